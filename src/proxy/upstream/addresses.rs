//! DNS addresses of the upstream, and detection of connections to removed addresses.

use std::net::IpAddr;
use std::time::Duration;
use tokio::net::lookup_host;

use crate::proxy::UpstreamUrl;

/// Interval of the periodic DNS lookups that find removed addresses.
pub(super) const DNS_LOOKUP_INTERVAL: Duration = Duration::from_secs(10);

/// Addresses found by the last two DNS lookups. Two lookups are kept because some name servers
/// return only a subset of the addresses each time.
#[derive(Debug, Default)]
pub(super) struct ResolvedAddresses {
    previous: Vec<IpAddr>,
    latest: Vec<IpAddr>,
}

impl ResolvedAddresses {
    pub(super) fn record_lookup(&mut self, resolved: Vec<IpAddr>) {
        self.previous = std::mem::replace(&mut self.latest, resolved);
    }

    /// Whether neither of the last two DNS lookups returned the address. `false` before two
    /// lookups, or for `None` (a Unix socket).
    pub(super) fn is_stale(&self, address: Option<IpAddr>) -> bool {
        let Some(address) = address else { return false };
        [&self.previous, &self.latest]
            .iter()
            .all(|found| !found.is_empty() && !found.contains(&address))
    }
}

/// Whether the upstream URL contains a host name instead of an IP address, so that its addresses
/// may change.
pub(super) fn has_dns_name(url: &UpstreamUrl) -> bool {
    matches!(url, UpstreamUrl::Net { host, .. } if host.parse::<IpAddr>().is_err())
}

/// Resolves the upstream's host name. Returns `None` if the lookup fails or finds no address.
pub(super) async fn resolve_addresses(url: &UpstreamUrl) -> Option<Vec<IpAddr>> {
    let UpstreamUrl::Net { host, port, .. } = url else {
        return None;
    };
    let found = lookup_host((host.as_str(), *port)).await.ok()?;
    Some(found.map(|address| address.ip()).collect()).filter(|found: &Vec<_>| !found.is_empty())
}

#[cfg(test)]
mod tests {
    use super::ResolvedAddresses;
    use std::net::IpAddr;

    #[test]
    fn address_is_stale_after_two_lookups_without_it() {
        let mut addresses = ResolvedAddresses::default();
        let [old, new]: [IpAddr; 2] =
            ["10.0.0.1", "10.0.0.2"].map(|address| address.parse().unwrap());
        let mut stale = Vec::new();
        for found in [vec![old], vec![new], vec![old, new], vec![new], vec![new]] {
            addresses.record_lookup(found);
            stale.push([Some(old), Some(new), None].map(|address| addresses.is_stale(address)));
        }
        let none = [false; 3];
        assert_eq!(stale, [none, none, none, none, [true, false, false]]);
    }
}
