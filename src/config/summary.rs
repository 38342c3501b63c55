//! The addresses of a configuration, for `check`.

use super::loaded_config::{Config, StoreSettings};
use crate::proxy::ListenerKind;
use crate::store::redis::{RedisSettings, RedisTopology};

impl Config {
    /// The listeners, the upstream and the store, each with its name. Contains no secret.
    pub fn summarize_addresses(&self) -> Vec<(&'static str, String)> {
        let encryption = |is_tls: bool| if is_tls { "TLS" } else { "cleartext" };
        let mut lines = Vec::new();
        if self.has_upstream {
            let tls = encryption(self.tls.is_some());
            lines.push(("listen", format!("{}, {tls}", self.listen.address)));
        }
        for listener in &self.service_listeners {
            let name = match listener.kind {
                ListenerKind::RateLimitService => "rls",
                ListenerKind::ExtAuthz => "check",
                ListenerKind::Proxy => "listen",
            };
            let tls = encryption(listener.tls.is_some());
            lines.push((name, format!("{}, {tls}", listener.listen.address)));
        }
        if self.has_upstream {
            lines.push(("upstream", self.upstream.url.to_string()));
        }
        lines.push(("store", self.summarize_store()));
        lines.push(("admin", self.admin.address.to_string()));
        if let Some(probes) = self.admin.probes {
            lines.push(("probes", probes.to_string()));
        }
        lines
    }

    fn summarize_store(&self) -> String {
        match &self.store {
            StoreSettings::Memory(_) => "memory, of this process only".to_owned(),
            StoreSettings::Redis(redis) => summarize_redis(redis),
        }
    }
}

fn summarize_redis(redis: &RedisSettings) -> String {
    let servers: Vec<String> = redis.servers.iter().map(ToString::to_string).collect();
    let servers = servers.join(", ");
    let at = match &redis.topology {
        RedisTopology::Standalone => servers,
        RedisTopology::Cluster => format!("cluster {servers}"),
        RedisTopology::Sentinel { master, .. } => {
            format!("master {master:?} of sentinels {servers}")
        }
    };
    let tls = if redis.tls.is_some() { ", TLS" } else { "" };
    format!(
        "redis, {at}, database {}{tls}, key prefix {:?}",
        redis.database, redis.key_prefix
    )
}
