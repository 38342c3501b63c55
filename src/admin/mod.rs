//! The admin port: what goes on, asked and changed by those who run tidegate.
//!
//! Never on the clients' port. It knows nothing of the rooms that it tells about: the assembler hands it a
//! [`View`], and so it can answer whatever state they are in.

mod access;
mod acts;
mod answer;
mod asked;
mod dashboard;
mod health;
mod listener;
mod looks;
mod routes;

pub(crate) use answer::harmless;
pub use listener::Listener;

use crate::listen::ListenAddress;
use crate::telemetry::history::History;
use crate::telemetry::metrics::{Metrics, Observed, Tally};
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
    pub token: Option<Token>,
    /// Names that `Host` may hold, besides localhost and addresses; in lower case.
    pub allowed_hosts: Vec<String>,
}

/// A secret that never shows itself in logs.
#[derive(Clone, PartialEq, Eq)]
pub struct Token(String);

/// What there is to see, and the little there is to do. The functions are called for every request; those that have to
/// wait for somebody give a future, which does so for some seconds at most.
#[derive(Clone)]
pub struct View {
    pub about: About,
    pub metrics: Arc<Metrics>,
    pub history: Arc<History>,
    pub observe: Arc<dyn Fn() -> Observed + Send + Sync>,
    /// The configuration in effect, as JSON without secrets.
    pub config: Arc<dyn Fn() -> Arc<str> + Send + Sync>,
    pub policies: Arc<dyn Fn(&Selection) -> Selected + Send + Sync>,
    /// Where a key stands in the store.
    pub key: Arc<dyn Fn(KeyAsked) -> Asking + Send + Sync>,
    /// Forgets what a key has used.
    pub reset: Arc<dyn Fn(KeyAsked) -> Asking + Send + Sync>,
    /// What becomes of a request.
    pub explain: Arc<dyn Fn(Told) -> Asking + Send + Sync>,
    /// Begins the ordered end that SIGTERM begins, if it has not begun.
    pub drain: Arc<dyn Fn() -> Draining + Send + Sync>,
}

/// What stays the same while the process lives.
#[derive(Clone, Debug)]
pub struct About {
    /// The process's name among all instances, new with every start.
    pub instance: &'static str,
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
pub struct Selection {
    /// Only these; empty: all.
    pub names: Vec<String>,
    /// So many are left out, and at most so many told.
    pub offset: usize,
    pub most: usize,
}

#[derive(Debug)]
pub struct Selected {
    /// How many there are without `offset` and `most`.
    pub total: usize,
    pub policies: Vec<Described>,
}

/// One policy.
#[derive(Debug)]
pub struct Described {
    pub name: Box<str>,
    /// What it is.
    pub about: Map<String, Value>,
    /// `None`: it is off.
    pub tally: Option<Arc<Tally>>,
}

/// A key by its policy and values: one per position, empty for what is absent.
#[derive(Clone, Debug)]
pub struct KeyAsked {
    pub policy: String,
    pub values: Vec<String>,
}

/// A request, told by hand.
#[derive(Clone, Debug)]
pub struct Told {
    pub method: String,
    pub url: String,
    pub headers: Vec<(String, String)>,
    /// Who holds the other end of the socket.
    pub ip: IpAddr,
    /// The alternative name in the client's certificate.
    pub client_cert_san: Option<String>,
    /// The common name in the client's certificate.
    pub client_cert_cn: Option<String>,
}

/// An answer that has to be waited for.
pub type Asking = Pin<Box<dyn Future<Output = Result<Value, Fault>> + Send>>;

/// Why a question has no answer. The texts are for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fault {
    /// It was no question.
    Wrong(String),
    /// What it asks for doesn't exist.
    Unknown(String),
    /// Who knows can't be asked now.
    Away(String),
}

/// How long an ordered end takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Draining {
    /// Requests are served as before, while readiness fails.
    pub delay: Duration,
    /// Then at most, until what is in flight has ended or is cut.
    pub grace: Duration,
}

impl Token {
    pub fn new(text: String) -> Self {
        Self(text)
    }

    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl fmt::Debug for View {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("View")
            .field("about", &self.about)
            .finish_non_exhaustive()
    }
}
