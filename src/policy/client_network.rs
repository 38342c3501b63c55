//! The text of a client's address in keys.

use super::client;
use std::net::{IpAddr, Ipv4Addr};

/// The client's network as text. A prefix of full length gives the address alone.
pub(super) fn format_client_network(ip: IpAddr, settings: &client::Settings) -> String {
    match ip {
        IpAddr::V4(ip) if settings.ipv4_prefix >= 32 => format_ipv4(ip),
        IpAddr::V6(ip) if settings.ipv6_prefix >= 128 => ip.to_string(),
        IpAddr::V4(_) => format_network(ip, settings.ipv4_prefix),
        IpAddr::V6(_) => format_network(ip, settings.ipv6_prefix),
    }
}

/// The text of [`Ipv4Addr`]'s `Display`, in a sixth of its instructions: most keys have an address.
fn format_ipv4(ip: Ipv4Addr) -> String {
    let mut text = String::with_capacity("255.255.255.255".len());
    for octet in ip.octets() {
        if !text.is_empty() {
            text.push('.');
        }
        text.push_str(itoa::Buffer::new().format(octet));
    }
    text
}

fn format_network(ip: IpAddr, prefix: u8) -> String {
    ipnet::IpNet::new(ip, prefix).map_or_else(|_| ip.to_string(), |net| net.trunc().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_written_as_the_library_writes_them() {
        for ip in [
            Ipv4Addr::UNSPECIFIED,
            Ipv4Addr::BROADCAST,
            Ipv4Addr::new(10, 0, 100, 9),
        ] {
            assert_eq!(format_ipv4(ip), ip.to_string());
        }
    }
}
