//! The admin port: what goes on, asked and changed by those who run tidegate.
//!
//! Never on the clients' port. It knows nothing of the rooms that it tells about: the assembler hands it a
//! [`View`], and so it can answer whatever state they are in.

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
pub(crate) use responses::escape_json;

use crate::listen::ListenAddress;
use crate::telemetry::history::TrafficHistory;
use crate::telemetry::metrics::{Metrics, PolicyCounters, ProcessStatus};
use serde_json::{Map, Value};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

/// Where to listen, and whom to answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminSettings {
    /// If others than this machine can reach it, there is a token.
    pub address: ListenAddress,
    /// A second address with only what gives nothing away: health and metrics.
    pub probes: Option<SocketAddr>,
    pub token: Option<AdminToken>,
    /// Names that `Host` may hold, besides localhost and addresses; in lower case.
    pub allowed_hosts: Vec<String>,
}

/// A secret that never shows itself in logs.
#[derive(Clone, PartialEq, Eq)]
pub struct AdminToken(String);

/// What there is to see, and the little there is to do. The functions are called for every request; those that have to
/// wait for somebody give a future, which does so for some seconds at most.
#[derive(Clone)]
pub struct AdminBackend {
    pub instance: InstanceDescription,
    pub metrics: Arc<Metrics>,
    pub history: Arc<TrafficHistory>,
    pub read_status: Arc<dyn Fn() -> ProcessStatus + Send + Sync>,
    /// The configuration in effect, as JSON without secrets.
    pub config_json: Arc<dyn Fn() -> Arc<str> + Send + Sync>,
    pub select_policies: Arc<dyn Fn(&PolicySelection) -> PolicyPage + Send + Sync>,
    /// Where a key stands in the store.
    pub inspect_key: Arc<dyn Fn(KeyQuery) -> AdminFuture + Send + Sync>,
    /// Forgets what a key has used.
    pub reset_key: Arc<dyn Fn(KeyQuery) -> AdminFuture + Send + Sync>,
    /// What becomes of a request.
    pub explain_request: Arc<dyn Fn(ExplainRequest) -> AdminFuture + Send + Sync>,
    /// Begins the ordered end that SIGTERM begins, if it has not begun.
    pub start_drain: Arc<dyn Fn() -> DrainSchedule + Send + Sync>,
}

/// What stays the same while the process lives.
#[derive(Clone, Debug)]
pub struct InstanceDescription {
    /// The process's name among all instances, new with every start.
    pub id: &'static str,
    /// Seconds since the Unix epoch.
    pub started_s: u64,
    pub workers: usize,
    /// `memory` or `redis`.
    pub store: &'static str,
    /// Where that is; empty for memory.
    pub store_address: String,
}

/// Some of the policies.
#[derive(Clone, Debug, Default)]
pub struct PolicySelection {
    /// Only these; empty: all.
    pub names: Vec<String>,
    /// So many are left out, and at most so many told.
    pub offset: usize,
    pub limit: usize,
}

#[derive(Debug)]
pub struct PolicyPage {
    /// How many there are without `offset` and `most`.
    pub total: usize,
    pub policies: Vec<PolicySummary>,
}

/// One policy.
#[derive(Debug)]
pub struct PolicySummary {
    pub name: Box<str>,
    /// What it is.
    pub description: Map<String, Value>,
    /// `None`: it is off.
    pub counters: Option<Arc<PolicyCounters>>,
}

/// A key by its policy and values: one per position, empty for what is absent.
#[derive(Clone, Debug)]
pub struct KeyQuery {
    pub policy: String,
    pub values: Vec<String>,
}

/// A request, told by hand.
#[derive(Clone, Debug)]
pub struct ExplainRequest {
    pub method: String,
    pub url: String,
    pub headers: Vec<(String, String)>,
    /// Who holds the other end of the socket.
    pub peer_ip: IpAddr,
    /// The alternative name in the client's certificate.
    pub client_cert_san: Option<String>,
    /// The common name in the client's certificate.
    pub client_cert_cn: Option<String>,
}

/// An answer that has to be waited for.
pub type AdminFuture = Pin<Box<dyn Future<Output = Result<Value, AdminError>> + Send>>;

/// Why a question has no answer. The texts are for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AdminError {
    /// It was no question.
    InvalidRequest(String),
    /// What it asks for doesn't exist.
    NotFound(String),
    /// Who knows can't be asked now.
    Unavailable(String),
}

/// How long an ordered end takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrainSchedule {
    /// Requests are served as before, while readiness fails.
    pub delay: Duration,
    /// Then at most, until what is in flight has ended or is cut.
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
        f.debug_struct("View")
            .field("about", &self.instance)
            .finish_non_exhaustive()
    }
}
