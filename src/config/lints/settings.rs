//! Lints about settings that conflict with the policies or with each other.

use super::LintContext;
use crate::config::loaded_config::StoreSettings;
use crate::config::policies::PolicyWithReader;
use crate::config::table_reader::report;
use crate::listen::ListenAddress;
use crate::policy::{KeyPart, OnStoreFailure};
use crate::proxy::UpstreamUrl;

pub(super) fn check_settings(policies: &[PolicyWithReader<'_>], context: &LintContext<'_>) {
    let root = context.root;
    let (client, store) = (root.get_table("client"), root.get_table("store"));
    let (listen, redis) = (root.get_table("listen"), store.get_table("redis"));
    let upstream = root.get_table("upstream");
    let reason = if root.contains_key("policy") {
        "no [[policy]] is in effect (mode = \"off\")"
    } else {
        "there is no [[policy]]"
    };
    report! { root;
        Warning("policy") if policies.is_empty() => "{reason}, so every request is forwarded without a limit";
    }
    let uses_redis = matches!(context.store, StoreSettings::Redis(_));
    let is_redis_idle = !uses_redis && !store.contains_key("kind") && redis.has_any_value();
    report! { store;
        // A Redis URL without a kind means Redis, so only other keys can be without effect.
        Warning("redis") if is_redis_idle => "not used: the store is \"memory\"; expected store.kind = \"redis\", or store.redis.url";
    }
    let proxies = &context.policy_context.client.trusted_proxies;
    let has_secret = client.get_nonempty_string("hash_secret_file").is_some();
    let mut quotas = policies.iter().filter_map(PolicyWithReader::quota);
    let has_hashed_part = quotas.clone().any(|quota| quota.key.has_hashed_part());
    report! { client;
        Warning("trusted_proxies") if proxies.iter().any(|net| net.prefix_len() == 0) => "trusts every peer, so clients can forge the address that they are limited by; expected the networks of your proxies";
        Warning("hash_secret_file") if has_secret && !has_hashed_part => "without effect: no key has a hashed part; expected one such as \"header:x-api-key;hash\"";
    }
    let is_socket = matches!(context.listen.address, ListenAddress::Unix(_));
    let reads_header = context.listen.proxy_protocol_from.is_some();
    let is_client_ip = |part: &KeyPart| *part == KeyPart::ClientIp;
    let has_client_ip = quotas.any(|quota| quota.key.sources().any(is_client_ip));
    report! { listen;
        Warning("address") if is_socket && !reads_header && proxies.is_empty() && has_client_ip => "all clients of a Unix socket have the address 127.0.0.1, so the key \"client_ip\" is one quota; expected client.trusted_proxies = [\"127.0.0.1\"] if a proxy in front sends their addresses";
    }
    let is_limited_locally = |one: &PolicyWithReader<'_>| {
        let is_local = one.policy.on_store_failure == OnStoreFailure::Local;
        is_local && one.policy.is_enforced() && one.quota().is_some()
    };
    let needs_count = uses_redis && policies.iter().any(is_limited_locally);
    report! { redis;
        Warning("instances") if needs_count && !redis.contains_key("instances") => "not set: an instance that starts while Redis is unavailable uses the whole limit as its share (on_store_failure = \"local\"); expected the number of instances";
    }
    // A listener with TLS or the PROXY protocol, and without trusted proxies, faces clients
    // directly.
    let is_public =
        matches!(context.listen.address, ListenAddress::Ip(at) if !at.ip().is_loopback());
    let faces_clients = (listen.contains_key("tls") || reads_header) && proxies.is_empty();
    let connections = context.upstream.max_connections;
    let is_unlimited = context.upstream.max_tunnels_per_client == 0;
    report! { upstream;
        Warning("url") if is_own_listener(context) => "this is listen.address, {}, so requests would loop; expected the address of your app", context.listen.address;
        Warning("max_tunnels_per_client") if is_public && faces_clients && is_unlimited => "not set, and clients connect directly: one client's WebSockets can take all {connections} upstream connections; expected for example max_tunnels_per_client = {}", (connections / 16).max(1);
    }
}

fn is_own_listener(context: &LintContext<'_>) -> bool {
    let (ListenAddress::Ip(listen), UpstreamUrl::Net { host, port, .. }) =
        (&context.listen.address, &context.upstream.url)
    else {
        return false;
    };
    let (own, is_any) = (listen.ip(), listen.ip().is_unspecified());
    let is_this_machine = match host.parse::<std::net::IpAddr>() {
        Ok(ip) => ip == own || (ip.is_loopback() && is_any),
        Err(_) => host == "localhost" && (own.is_loopback() || is_any),
    };
    is_this_machine && *port == listen.port()
}
