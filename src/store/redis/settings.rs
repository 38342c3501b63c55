//! The settings of the Redis store: topology, addresses, login and timeouts.

use crate::http_client::ClientStream;
use crate::store::MemorySettings;
use crate::text::SecretText;
use crate::tls::ClientTls;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

/// Which Redis to use, and how long to wait for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedisSettings {
    pub topology: RedisTopology,
    /// The server, the sentinels, or some nodes of the cluster.
    pub servers: Vec<RedisAddress>,
    pub database: i64,
    /// Login for the servers that hold counters.
    pub credentials: RedisCredentials,
    /// `None`: without TLS.
    pub tls: Option<ClientTls>,
    /// Separates the counters of services that share a Redis.
    pub key_prefix: String,
    /// How many instances share the limits, at least 1, until they are counted.
    pub initial_instances: u32,
    /// Deadline of one decision.
    pub timeout: Duration,
    pub connect_timeout: Duration,
    /// Consecutive failures after which the circuit breaker opens.
    pub breaker_failures: u32,
    /// Interval of the background probes while the circuit breaker is open.
    pub probe_interval: Duration,
    /// Bounds of the counters of `scope = "instance"`.
    pub instance_counter_bounds: MemorySettings,
    /// Directory for usage admitted without Redis, which a later process continues from.
    pub state_dir: Option<PathBuf>,
    /// How connections are opened.
    pub dialer: RedisDialer,
}

/// How connections to Redis are opened.
#[derive(Clone, Debug, Default)]
pub enum RedisDialer {
    /// Over the network, with TLS if the settings say so.
    #[default]
    Network,
    /// Through a simulated network, in tests.
    Simulated(Arc<dyn RedisTransport>),
}

/// A connection attempt.
pub type RedisStreamFuture =
    Pin<Box<dyn Future<Output = io::Result<Box<dyn ClientStream>>> + Send>>;

/// Opens byte streams to servers in place of the network.
pub trait RedisTransport: fmt::Debug + Send + Sync {
    /// Resolves when the connection is established or refused.
    fn connect(&self, address: &RedisAddress) -> RedisStreamFuture;
}

impl PartialEq for RedisDialer {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Network, Self::Network) => true,
            (Self::Simulated(one), Self::Simulated(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }
}

impl Eq for RedisDialer {}

/// The kind of deployment at the addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RedisTopology {
    /// One server, or any deployment behind one address.
    Standalone,
    /// Sentinels that monitor the master of this name.
    Sentinel {
        master: String,
        credentials: RedisCredentials,
    },
    Cluster,
}

/// The address of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum RedisAddress {
    /// A host name, or an IP address without brackets.
    Tcp {
        host: String,
        port: u16,
    },
    Unix(PathBuf),
}

/// An ACL user. Without a name: the default user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RedisCredentials {
    pub username: Option<String>,
    pub password: Option<RedisPassword>,
}

pub type RedisPassword = SecretText;

impl RedisSettings {
    /// The name of the master in the sentinels' configuration; `None` for other topologies.
    pub fn sentinel_master(&self) -> Option<&str> {
        match &self.topology {
            RedisTopology::Sentinel { master, .. } => Some(master),
            RedisTopology::Standalone | RedisTopology::Cluster => None,
        }
    }
}

/// The addresses as readable text, with the topology if it is not one server.
impl fmt::Display for RedisSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.topology {
            RedisTopology::Standalone => {}
            RedisTopology::Sentinel { master, .. } => write!(f, "{master} by sentinels ")?,
            RedisTopology::Cluster => f.write_str("cluster ")?,
        }
        let addresses: Vec<String> = self.servers.iter().map(ToString::to_string).collect();
        f.write_str(&addresses.join(", "))
    }
}

impl fmt::Display for RedisAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => path.display().fmt(f),
        }
    }
}
