//! The admin endpoint: status, metrics and commands for operators, on an address of its own.
//!
//! The endpoint does not depend on the data path: `app` gives it an [`AdminBackend`]. It therefore
//! responds whatever the state of the data path.

mod access_control;
mod commands;
mod dashboard;
mod health;
mod listener;
mod parameters;
mod queries;
mod responses;
mod routes;

pub use listener::AdminListener;
pub(crate) use responses::escape_json_for_display;

use crate::listen::ListenAddress;
use crate::telemetry::history::TrafficHistory;
use crate::telemetry::metrics::{Metrics, PolicyCounters, ProcessStatus};
use serde_json::{Map, Value};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

/// Addresses and access settings of the admin endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminSettings {
    /// A token is required if other machines can reach this address.
    pub address: ListenAddress,
    /// Second listening address, which serves only health and metrics.
    pub probes: Option<SocketAddr>,
    pub token: Option<AdminToken>,
    /// Lower-case names accepted in `Host`, besides localhost and IP addresses.
    pub allowed_hosts: Vec<String>,
}

/// The bearer token of the admin endpoint; its `Debug` text is masked.
#[derive(Clone, PartialEq, Eq)]
pub struct AdminToken(String);

/// Data and commands behind the admin endpoint. Its functions are called for every request;
/// functions that use the store return a future that finishes within some seconds.
#[derive(Clone)]
pub struct AdminBackend {
    pub instance: InstanceDescription,
    pub metrics: Arc<Metrics>,
    pub history: Arc<TrafficHistory>,
    pub read_status: Arc<dyn Fn() -> ProcessStatus + Send + Sync>,
    /// The configuration in effect, as JSON without secrets.
    pub config_json: Arc<dyn Fn() -> Arc<str> + Send + Sync>,
    pub select_policies: Arc<dyn Fn(&PolicySelection) -> PolicyPage + Send + Sync>,
    /// Reads the counters of a key.
    pub inspect_key: Arc<dyn Fn(KeyQuery) -> AdminFuture + Send + Sync>,
    /// Deletes the counters of a key.
    pub reset_key: Arc<dyn Fn(KeyQuery) -> AdminFuture + Send + Sync>,
    /// Explains the decision about a request.
    pub explain_request: Arc<dyn Fn(ExplainRequest) -> AdminFuture + Send + Sync>,
    /// Starts the same drain as SIGTERM, unless one has begun.
    pub start_drain: Arc<dyn Fn() -> DrainSchedule + Send + Sync>,
}

/// Properties of the process that never change.
#[derive(Clone, Debug)]
pub struct InstanceDescription {
    /// Random instance id, new with every start.
    pub id: &'static str,
    /// Seconds since the Unix epoch.
    pub started_s: u64,
    pub workers: usize,
    /// `memory` or `redis`.
    pub store: &'static str,
    /// Address of the store; empty for `memory`.
    pub store_address: String,
}

/// Selects policies by name, and one page of them.
#[derive(Clone, Debug, Default)]
pub struct PolicySelection {
    /// Names to select; empty selects all.
    pub names: Vec<String>,
    /// Number of policies to skip.
    pub offset: usize,
    /// Maximum number of policies to return.
    pub limit: usize,
}

#[derive(Debug)]
pub struct PolicyPage {
    /// Number of selected policies before `offset` and `limit`.
    pub total: usize,
    pub policies: Vec<PolicySummary>,
}

/// One policy and its counters.
#[derive(Debug)]
pub struct PolicySummary {
    pub name: Box<str>,
    /// JSON fields that describe the policy.
    pub description: Map<String, Value>,
    /// `Retry` if the policy is off.
    pub counters: Option<Arc<PolicyCounters>>,
}

/// A key, given by its policy and values: one value per position of the key, empty if absent.
#[derive(Clone, Debug)]
pub struct KeyQuery {
    pub policy: String,
    pub values: Vec<String>,
}

/// A request that an operator describes, to have its decision explained.
#[derive(Clone, Debug)]
pub struct ExplainRequest {
    pub method: String,
    pub url: String,
    pub headers: Vec<(String, String)>,
    /// Address of the connected peer.
    pub peer_ip: IpAddr,
    /// The alternative name in the client's certificate.
    pub client_cert_san: Option<String>,
    /// The common name in the client's certificate.
    pub client_cert_cn: Option<String>,
}

/// The future result of a store lookup, as JSON.
pub type AdminFuture = Pin<Box<dyn Future<Output = Result<Value, AdminError>> + Send>>;

/// Why an admin request failed, with a message for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdminError {
    /// The request is malformed.
    InvalidRequest(String),
    /// The requested policy or key does not exist.
    NotFound(String),
    /// The store is unavailable.
    Unavailable(String),
}

/// Duration of the first phase of a drain, and maximum duration of the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainSchedule {
    /// First phase: readiness fails, and new requests are still served.
    pub delay: Duration,
    /// Second phase: the maximum time for requests in flight to finish.
    pub grace: Duration,
}

impl AdminToken {
    pub fn new(text: String) -> Self {
        Self(text)
    }

    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for AdminToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl fmt::Debug for AdminBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdminBackend")
            .field("instance", &self.instance)
            .finish_non_exhaustive()
    }
}
