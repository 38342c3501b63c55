//! The address of the admin endpoint for other instances.

use crate::listen::ListenAddress;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

/// A host, and its port if it is not that of `admin.address`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AdvertisedAddress {
    /// Name or IP address, without brackets.
    host: String,
    port: Option<u16>,
}

impl AdvertisedAddress {
    /// Parses `HOST`, `HOST:PORT`, an IPv6 address, or `[IPV6]:PORT`.
    ///
    /// # Errors
    /// Returns a message that states the expected form.
    pub fn parse(text: &str) -> Result<Self, String> {
        let invalid = || {
            "expected a host, and optionally a port, such as \"10.0.0.7\" or \"10.0.0.7:9090\""
                .to_owned()
        };
        if let Ok(ip) = text.parse::<IpAddr>() {
            return Ok(Self::from_host(&ip.to_string()));
        }
        let (host, port) = match text.rsplit_once(':') {
            None => (text, None),
            Some((host, port)) => {
                let port = port.parse().ok().filter(|port| *port > 0);
                (host, Some(port.ok_or_else(invalid)?))
            }
        };
        let bracketed = host
            .strip_prefix('[')
            .and_then(|host| host.strip_suffix(']'));
        let is_valid = match bracketed {
            Some(ip) => ip.parse::<Ipv6Addr>().is_ok(),
            None => {
                (1..=253).contains(&host.len())
                    && host
                        .bytes()
                        .all(|byte| byte.is_ascii_alphanumeric() || b".-_".contains(&byte))
            }
        };
        if is_valid {
            Ok(Self {
                host: bracketed.unwrap_or(host).to_owned(),
                port,
            })
        } else {
            Err(invalid())
        }
    }

    /// An address with the port of `admin.address`.
    pub fn from_host(host: &str) -> Self {
        Self {
            host: host.to_owned(),
            port: None,
        }
    }

    /// The address to advertise if the configuration names none: the bound address, or for all
    /// addresses of the machine that of the pod.
    pub fn from_bound_address(bound: &ListenAddress, pod_ip: Option<IpAddr>) -> Option<Self> {
        let ListenAddress::Ip(bound) = bound else {
            return None;
        };
        let ip = match bound.ip() {
            ip if ip.is_unspecified() => pod_ip?,
            ip => ip,
        };
        Some(Self::from_host(&ip.to_string()))
    }

    /// Adds the port of the bound address. `None` if neither has a port.
    #[must_use]
    pub fn with_port_of(self, bound: &ListenAddress) -> Option<Self> {
        let bound_port = match bound {
            ListenAddress::Ip(bound) => Some(bound.port()),
            ListenAddress::Unix(_) => None,
        };
        Some(Self {
            port: Some(self.port.or(bound_port)?),
            ..self
        })
    }

    pub fn is_loopback(&self) -> bool {
        let ip = self.host.parse::<IpAddr>();
        ip.is_ok_and(|ip| ip.to_canonical().is_loopback()) || self.host == "localhost"
    }

    pub fn has_port(&self) -> bool {
        self.port.is_some()
    }
}

impl fmt::Display for AdvertisedAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            write!(f, "[{}]", self.host)?
        } else {
            f.write_str(&self.host)?
        }
        match self.port {
            Some(port) => write!(f, ":{port}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_hosts_with_and_without_port() {
        let bound = ListenAddress::Ip("0.0.0.0:9090".parse().unwrap());
        for (text, shown) in [
            ("10.0.0.7", "10.0.0.7:9090"),
            ("10.0.0.7:80", "10.0.0.7:80"),
            ("orders-0.orders", "orders-0.orders:9090"),
            ("fd00::7", "[fd00::7]:9090"),
            ("[fd00::7]:80", "[fd00::7]:80"),
        ] {
            let address = AdvertisedAddress::parse(text).unwrap();
            assert_eq!(address.with_port_of(&bound).unwrap().to_string(), shown);
        }
        for text in [
            "",
            ":80",
            "a b",
            "http://a",
            "a:0",
            "a:99999",
            "[x]:1",
            "a/b",
            "$(POD_IP)",
        ] {
            assert!(AdvertisedAddress::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn default_is_the_bound_address_or_that_of_the_pod() {
        let default = |bound: &str, pod_ip: Option<&str>| {
            let bound = ListenAddress::Ip(bound.parse().unwrap());
            let pod_ip = pod_ip.map(|ip| ip.parse().unwrap());
            let address = AdvertisedAddress::from_bound_address(&bound, pod_ip)?;
            address
                .with_port_of(&bound)
                .map(|address| address.to_string())
        };
        assert_eq!(
            default("127.0.0.1:1", Some("10.0.0.7")).unwrap(),
            "127.0.0.1:1"
        );
        assert_eq!(
            default("0.0.0.0:1", Some("10.0.0.7")).unwrap(),
            "10.0.0.7:1"
        );
        assert_eq!(default("[::]:1", Some("fd00::7")).unwrap(), "[fd00::7]:1");
        assert_eq!(default("0.0.0.0:1", None), None);
    }
}
