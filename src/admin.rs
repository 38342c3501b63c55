//! The admin endpoint: status, metrics and commands for operators, on an address of its own.
//!
//! The endpoint does not depend on the data path: `app` gives it an [`AdminBackend`]. It therefore
//! responds whatever the state of the data path.

mod access_control;
mod advertised_address;
mod commands;
mod dashboard;
mod documents;
mod fleet;
mod listener;
mod parameters;
mod problems;
mod queries;
mod responses;
mod routes;

pub use advertised_address::AdvertisedAddress;
pub(crate) use documents::REFUSED_SERIES;
pub use documents::*;
pub use listener::AdminListener;
pub(crate) use parameters::{OneOrMany, get_field, get_string_field, reject_unknown_fields};
pub(crate) use responses::{add_fields, escape_json_for_display};

use crate::listen::ListenAddress;
use crate::telemetry::history::TrafficHistory;
use crate::telemetry::metrics::{Metrics, PolicyCounters, ProcessStatus};
use crate::text::SecretText;
use arc_swap::ArcSwapOption;
use serde_json::{Map, Value};
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;

/// Addresses and access settings of the admin endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminSettings {
    /// A token is required if other machines can reach this address.
    pub address: ListenAddress,
    /// Second listening address, which serves only health and metrics.
    pub probes: Option<SocketAddr>,
    pub token: Option<AdminToken>,
    /// The address for other instances; `None` derives it from the bound address.
    pub advertise: Option<AdvertisedAddress>,
    /// Lower-case names accepted in `Host`, besides localhost and IP addresses.
    pub allowed_hosts: Vec<String>,
}

/// The bearer token of the admin endpoint.
pub type AdminToken = SecretText;

/// The token in use, which is replaced when its file changes.
#[derive(Clone, Debug, Default)]
pub struct ReloadableAdminToken(Arc<ArcSwapOption<AdminToken>>);

/// Data and commands behind the admin endpoint.
#[derive(Clone)]
pub(crate) struct AdminBackend {
    /// This process; `uptime_s` is 0.
    pub(crate) instance: OverviewInstance,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) history: Arc<TrafficHistory>,
    pub(crate) state: Arc<dyn AdminState>,
}

/// The state of the process, and the commands that change it.
pub trait AdminState: Send + Sync {
    fn read_status(&self) -> ProcessStatus;

    fn select_policies(&self, selection: &PolicySelection) -> PolicyPage;

    /// Starts the same drain as SIGTERM, unless one has begun.
    fn start_drain(&self) -> DrainDocument;

    // The methods below use the store. Their futures finish within some seconds.

    /// Lists the instances that share the limits.
    fn list_members(self: Arc<Self>) -> AdminFuture<FleetMembers>;

    /// Reads the counters of a key.
    fn inspect_key(self: Arc<Self>, query: KeyQuery) -> AdminFuture<KeyDocument>;

    /// Deletes the counters of a key.
    fn reset_key(self: Arc<Self>, query: KeyQuery) -> AdminFuture<KeyResetDocument>;

    /// Returns up to `limit` overrides of a policy.
    fn list_overrides(
        self: Arc<Self>,
        policy: String,
        limit: usize,
    ) -> AdminFuture<OverrideListDocument>;

    fn find_override(self: Arc<Self>, query: KeyQuery) -> AdminFuture<OverrideListDocument>;

    /// `fields` is the override as JSON, with its key. `keeps_other_limits` is whether other limits
    /// of the key's override stay.
    fn set_override(
        self: Arc<Self>,
        policy: String,
        fields: Map<String, Value>,
        keeps_other_limits: bool,
    ) -> AdminFuture<OverrideDocument>;

    fn remove_override(self: Arc<Self>, query: KeyQuery) -> AdminFuture<OverrideRemovalDocument>;

    /// Explains the decision about a request.
    fn explain_request(
        self: Arc<Self>,
        request: ExplainRequest,
    ) -> AdminFuture<ExplanationDocument>;

    /// Examines Redis, or returns the last report if it is recent.
    fn examine_store(self: Arc<Self>) -> AdminFuture<DoctorReport>;
}

/// Selects policies by name, and one page of them.
#[derive(Clone, Debug, Default)]
pub struct PolicySelection {
    /// Names to select; empty selects all.
    pub names: Vec<String>,
    /// Selects names that contain this text, ignoring case.
    pub search: String,
    /// Position of policies that come before all others. The others keep the order in which they
    /// apply.
    pub ranks: HashMap<Arc<str>, usize>,
    /// Number of policies to skip.
    pub offset: usize,
    /// Maximum number of policies to return.
    pub limit: usize,
}

#[derive(Debug)]
pub struct PolicyPage {
    /// Number of selected policies before `offset` and `limit`.
    pub total: usize,
    /// The policies and their counters; `None` if a policy is off.
    pub policies: Vec<(PolicyDocument, Option<Arc<PolicyCounters>>)>,
}

/// A key, given by its policy and values: one value per position of the key, empty if absent.
#[derive(Clone, Debug)]
pub struct KeyQuery {
    pub policy: String,
    pub values: Vec<String>,
    /// Only the counters of this limit.
    pub limit: Option<String>,
}

/// A request that an operator describes, to have its decision explained.
#[derive(Clone, Debug)]
pub struct ExplainRequest {
    pub method: String,
    pub url: String,
    pub headers: Vec<(String, String)>,
    /// The body; empty if there is none.
    pub body: String,
    /// Address of the connected peer.
    pub peer_ip: IpAddr,
    /// The alternative name in the client's certificate.
    pub client_cert_san: Option<String>,
    /// The common name in the client's certificate.
    pub client_cert_cn: Option<String>,
}

/// The instances that share the limits.
#[derive(Clone, Debug, Default)]
pub struct FleetMembers {
    /// What their heartbeats say.
    pub instances: Vec<FleetInstanceDocument>,
    /// The number of instances, of which not all may be listed.
    pub total: usize,
}

/// The future result of a store lookup.
pub type AdminFuture<T> = Pin<Box<dyn Future<Output = Result<T, AdminError>> + Send>>;

/// Why a request of an operator failed, with a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdminError {
    /// The request is malformed.
    #[error("{0}")]
    InvalidRequest(String),
    /// The requested policy or key does not exist.
    #[error("{0}")]
    NotFound(String),
    /// The store is unavailable.
    #[error("{0}")]
    Unavailable(String),
}

impl ReloadableAdminToken {
    pub fn new(token: Option<AdminToken>) -> Self {
        Self(Arc::new(ArcSwapOption::from_pointee(token)))
    }

    /// Accepts only `token` from now on.
    pub fn replace(&self, token: Option<AdminToken>) {
        let token = token.map(Arc::new);
        if self.0.swap(token.clone()) != token {
            tracing::info!("admin token changed");
        }
    }

    fn load(&self) -> Option<Arc<AdminToken>> {
        self.0.load_full()
    }
}
