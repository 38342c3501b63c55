//! The admin port: health, metrics and the configuration in effect, for those who run tidegate.
//!
//! Never on the clients' port. It knows nothing of the rooms that it tells about: the assembler hands it a
//! [`View`], and so it can answer whatever state they are in.

mod access;
mod listener;
mod routes;

pub use listener::Listener;

use crate::telemetry::metrics::{Metrics, Observed};
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;

/// Where to listen, and whom to answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdminSettings {
    /// If it is not on loopback, there is a token.
    pub address: SocketAddr,
    /// A second address with only what gives nothing away: health and metrics.
    pub probes: Option<SocketAddr>,
    pub token: Option<Token>,
    /// Names that `Host` may hold, besides localhost and addresses; in lower case.
    pub allowed_hosts: Vec<String>,
}

/// A secret that never shows itself in logs.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

/// What there is to see. The functions are called for every look, and must not wait.
#[derive(Clone)]
pub struct View {
    pub metrics: Arc<Metrics>,
    pub observe: Arc<dyn Fn() -> Observed + Send + Sync>,
    /// The configuration in effect, as JSON without secrets.
    pub config: Arc<dyn Fn() -> Arc<str> + Send + Sync>,
}

impl Token {
    pub fn new(text: String) -> Self {
        Self(text)
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("View").finish_non_exhaustive()
    }
}
