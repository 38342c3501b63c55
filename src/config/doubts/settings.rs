//! Settings that don't go with the policies, or with each other.

use super::{Around, Placed};
use crate::config::StoreSettings;
use crate::listen::ListenAddress;
use crate::policy::{KeyPart, OnStoreFailure};
use crate::proxy::UpstreamUrl;

pub(super) fn look(placed: &[Placed<'_>], around: &Around<'_>) {
    everybody_is_trusted(around);
    loops(around);
    one_client_behind_a_socket(placed, around);
    whole_shares(placed, around);
}

fn everybody_is_trusted(around: &Around<'_>) {
    if around
        .scope
        .client
        .trusted_proxies
        .iter()
        .any(|net| net.prefix_len() == 0)
    {
        around.top.table("client").warn(
            "trusted_proxies",
            "everybody is believed: clients choose the address that they are limited by; expected the networks of your proxies",
        );
    }
}

fn loops(around: &Around<'_>) {
    let (ListenAddress::Ip(listen), UpstreamUrl::Net { host, port, .. }) =
        (&around.listen.address, &around.upstream.url)
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
        around.top.table("upstream").warn(
            "url",
            &format!("that is listen.address, {listen}: every request would come back; expected your app's"),
        );
    }
}

fn one_client_behind_a_socket(placed: &[Placed<'_>], around: &Around<'_>) {
    let is_socket = matches!(around.listen.address, ListenAddress::Unix(_));
    let asks = || {
        placed
            .iter()
            .any(|one| one.key_parts().contains(&KeyPart::ClientIp))
    };
    let is_told = around.listen.proxy_protocol_from.is_some()
        || !around.scope.client.trusted_proxies.is_empty();
    if is_socket && !is_told && asks() {
        around.top.table("listen").warn(
            "address",
            "clients of a Unix socket are all 127.0.0.1, so the key \"client_ip\" is one for everybody; expected client.trusted_proxies = [\"127.0.0.1\"] if a proxy in front says who they are",
        );
    }
}

fn whole_shares(placed: &[Placed<'_>], around: &Around<'_>) {
    let is_local = |one: &Placed<'_>| {
        !one.policy.shadow
            && one.quota().is_some()
            && one.policy.on_store_failure == OnStoreFailure::Local
    };
    let redis = around.top.table("store").table("redis");
    if matches!(around.store, StoreSettings::Redis(_))
        && !redis.has("instances")
        && placed.iter().any(is_local)
    {
        redis.warn(
            "instances",
            "not said: an instance that starts while Redis is away takes the whole limit as its share (on_store_failure = \"local\"); expected how many instances there are",
        );
    }
}
