//! Lints about settings that conflict with the policies or with each other.

use super::context::LintContext;
use crate::config::loaded_config::StoreSettings;
use crate::config::policies::context::PolicyWithReader;
use crate::listen::ListenAddress;
use crate::policy::{KeyPart, OnStoreFailure};
use crate::proxy::UpstreamUrl;

pub(super) fn check_settings(policies: &[PolicyWithReader<'_>], context: &LintContext<'_>) {
    warn_if_no_policy_applies(policies, context);
    warn_if_redis_is_unused(context);
    warn_if_all_proxies_are_trusted(context);
    warn_if_upstream_is_own_listener(context);
    warn_if_socket_hides_client_ips(policies, context);
    warn_if_instances_is_unset(policies, context);
    warn_if_tunnels_of_a_client_are_unlimited(context);
    warn_if_hash_secret_is_unused(policies, context);
}

fn warn_if_no_policy_applies(policies: &[PolicyWithReader<'_>], context: &LintContext<'_>) {
    if policies.is_empty() {
        let reason = if context.root.contains_key("policy") {
            "no [[policy]] is in effect (mode = \"off\")"
        } else {
            "there is no [[policy]]"
        };
        context.root.report_warning(
            "policy",
            format!("{reason}, so every request is forwarded without a limit"),
        );
    }
}

fn warn_if_hash_secret_is_unused(policies: &[PolicyWithReader<'_>], context: &LintContext<'_>) {
    let client = context.root.get_table("client");
    let has_hashed_part = |one: &PolicyWithReader<'_>| {
        let quota = one.quota();
        quota.is_some_and(|quota| quota.key.has_hashed_part())
    };
    if client.get_nonempty_string("hash_secret_file").is_some()
        && !policies.iter().any(has_hashed_part)
    {
        client.report_warning(
            "hash_secret_file",
            "without effect: no key has a hashed part; expected one such as \"header:x-api-key;hash\"",
        );
    }
}

/// A Redis URL without a kind means Redis, so only other keys can be without effect.
fn warn_if_redis_is_unused(context: &LintContext<'_>) {
    let store = context.root.get_table("store");
    if matches!(context.store, StoreSettings::Memory(_))
        && !store.contains_key("kind")
        && store.get_table("redis").has_any_value()
    {
        store.report_warning(
            "redis",
            "not used: the store is \"memory\"; expected store.kind = \"redis\", or store.redis.url",
        );
    }
}

fn warn_if_all_proxies_are_trusted(context: &LintContext<'_>) {
    if context
        .policy_context
        .client
        .trusted_proxies
        .iter()
        .any(|net| net.prefix_len() == 0)
    {
        context.root.get_table("client").report_warning(
            "trusted_proxies",
            "trusts every peer, so clients can forge the address that they are limited by; expected the networks of your proxies",
        );
    }
}

fn warn_if_upstream_is_own_listener(context: &LintContext<'_>) {
    let (ListenAddress::Ip(listen), UpstreamUrl::Net { host, port, .. }) =
        (&context.listen.address, &context.upstream.url)
    else {
        return;
    };
    let is_this_machine = match host.parse::<std::net::IpAddr>() {
        Ok(ip) => ip == listen.ip() || (ip.is_loopback() && listen.ip().is_unspecified()),
        Err(_) => {
            host == "localhost" && (listen.ip().is_loopback() || listen.ip().is_unspecified())
        }
    };
    if is_this_machine && *port == listen.port() {
        context.root.get_table("upstream").report_warning(
            "url",
            format!("this is listen.address, {listen}, so requests would loop; expected the address of your app"),
        );
    }
}

fn warn_if_socket_hides_client_ips(policies: &[PolicyWithReader<'_>], context: &LintContext<'_>) {
    let is_socket = matches!(context.listen.address, ListenAddress::Unix(_));
    let uses_client_ip_key = || {
        policies
            .iter()
            .flat_map(|one| one.quota())
            .any(|quota| quota.key.sources().any(|part| *part == KeyPart::ClientIp))
    };
    let knows_client_ip = context.listen.proxy_protocol_from.is_some()
        || !context.policy_context.client.trusted_proxies.is_empty();
    if is_socket && !knows_client_ip && uses_client_ip_key() {
        context.root.get_table("listen").report_warning(
            "address",
            "all clients of a Unix socket have the address 127.0.0.1, so the key \"client_ip\" is one quota; expected client.trusted_proxies = [\"127.0.0.1\"] if a proxy in front sends their addresses",
        );
    }
}

fn warn_if_instances_is_unset(policies: &[PolicyWithReader<'_>], context: &LintContext<'_>) {
    let is_limited_locally = |one: &PolicyWithReader<'_>| {
        one.policy.is_enforced()
            && one.quota().is_some()
            && one.policy.on_store_failure == OnStoreFailure::Local
    };
    let redis = context.root.get_table("store").get_table("redis");
    if matches!(context.store, StoreSettings::Redis(_))
        && !redis.contains_key("instances")
        && policies.iter().any(is_limited_locally)
    {
        redis.report_warning(
            "instances",
            "not set: an instance that starts while Redis is unavailable uses the whole limit as its share (on_store_failure = \"local\"); expected the number of instances",
        );
    }
}

/// A listener with TLS or the PROXY protocol, and without trusted proxies, faces clients directly.
fn warn_if_tunnels_of_a_client_are_unlimited(context: &LintContext<'_>) {
    let listen = context.root.get_table("listen");
    let faces_clients = match context.listen.address {
        ListenAddress::Ip(address) => !address.ip().is_loopback(),
        ListenAddress::Unix(_) => false,
    } && (listen.contains_key("tls")
        || context.listen.proxy_protocol_from.is_some())
        && context.policy_context.client.trusted_proxies.is_empty();
    if faces_clients && context.upstream.max_tunnels_per_client == 0 {
        let connections = context.upstream.max_connections;
        context.root.get_table("upstream").report_warning(
            "max_tunnels_per_client",
            format!("not set, and clients connect directly: one client's WebSockets can take all {connections} upstream connections; expected for example max_tunnels_per_client = {}", (connections / 16).max(1)),
        );
    }
}
