//! Patterns of hosts, and the form in which hosts are compared.

use std::net::Ipv6Addr;

/// `example.com`, or `*.example.com` for all its subdomains.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum HostPattern {
    Exact(Box<str>),
    /// The suffix `.example.com` of `*.example.com`: the part after the star, with its dot.
    Subdomains(Box<str>),
}

impl HostPattern {
    /// Parses `name` or `*.name`, without a port.
    ///
    /// # Errors
    /// Returns a message that states the expected form.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
        let (is_wildcard, name) = match text.strip_prefix("*.") {
            Some(name) => (true, name),
            None => (false, text.as_str()),
        };
        let is_ip_literal = name.starts_with('[') && name.ends_with(']') && !is_wildcard;
        if name.is_empty()
            || name.contains(['*', '/', '@'])
            || (name.contains(':') && !is_ip_literal)
        {
            return Err("a host is a name or *.name, without port".to_owned());
        }
        Ok(if is_wildcard {
            Self::Subdomains(format!(".{name}").into())
        } else {
            Self::Exact(canonicalize_host(name))
        })
    }

    pub fn matches(&self, host: &str) -> bool {
        match self {
            Self::Exact(name) => **name == *host,
            Self::Subdomains(suffix) => host.len() > suffix.len() && host.ends_with(&**suffix),
        }
    }

    /// Whether this pattern matches every host that `other` matches.
    pub(super) fn covers(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Subdomains(mine), Self::Subdomains(others)) => others.ends_with(&**mine),
            (_, Self::Exact(name)) => self.matches(name),
            (Self::Exact(_), Self::Subdomains(_)) => false,
        }
    }

    /// The name, or the suffix with its dot.
    pub(super) fn text(&self) -> &str {
        match self {
            Self::Exact(text) | Self::Subdomains(text) => text,
        }
    }
}

/// A host as requests have it: in lower case, without port and trailing dot; an IPv6 address in its
/// shortest form.
pub(super) fn canonicalize_host(text: &str) -> Box<str> {
    if let Some((address, _port)) = text.strip_prefix('[').and_then(|rest| rest.split_once(']'))
        && let Ok(address) = address.parse::<Ipv6Addr>()
    {
        return format!("[{address}]").into();
    }
    let host = text.split_once(':').map_or(text, |(host, _port)| host);
    let host = host.strip_suffix('.').unwrap_or(host);
    host.to_ascii_lowercase().into()
}
