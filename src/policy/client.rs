//! Who is the client: the socket's peer, or what proxies that we trust say of it.

use http::header::FORWARDED;
use http::{HeaderMap, HeaderName};
use ipnet::IpNet;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// Whom to believe, and how coarse an identity an address is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Peers whose forwarding header is believed, read from the right.
    pub trusted_proxies: Vec<IpNet>,
    /// `x-forwarded-for`, `forwarded`, or a header that holds one address.
    pub ip_header: HeaderName,
    /// 0..=32.
    pub ipv4_prefix: u8,
    /// 0..=128. Whoever has one address of a /64 has all of them.
    pub ipv6_prefix: u8,
}

/// Who sent a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Client {
    pub ip: IpAddr,
    /// Whether the peer is one whose forwarding fields are believed, and so passed on.
    pub peer_trusted: bool,
}

impl Settings {
    fn trusts(&self, ip: IpAddr) -> bool {
        self.trusted_proxies.iter().any(|net| net.contains(&ip))
    }
}

impl Client {
    /// Finds the client behind `peer`: walking from the right, the first address that we do not trust.
    /// What stands left of it, or of something unreadable, is hearsay.
    pub fn identify(peer: IpAddr, headers: &HeaderMap, settings: &Settings) -> Self {
        let peer = peer.to_canonical();
        if !settings.trusts(peer) {
            return Self { ip: peer, peer_trusted: false };
        }
        let mut ip = peer;
        'lines: for line in headers.get_all(&settings.ip_header).iter().rev() {
            let Ok(line) = line.to_str() else { break };
            for element in elements(line, ',') {
                let text =
                    if settings.ip_header == FORWARDED { forwarded_for(element) } else { Some(element) };
                let Some(hop) = text.and_then(parse_address) else { break 'lines };
                ip = hop;
                if !settings.trusts(ip) {
                    break 'lines;
                }
            }
        }
        Self { ip, peer_trusted: true }
    }
}

/// The `for` of one element of `Forwarded` (RFC 7239 §4).
fn forwarded_for(element: &str) -> Option<&str> {
    elements(element, ';').find_map(|pair| {
        let (name, value) = pair.trim().split_once('=')?;
        name.trim().eq_ignore_ascii_case("for").then(|| value.trim())
    })
}

/// `a`, `a:port`, `[v6]`, `[v6]:port`, bare v6, each perhaps in double quotes.
fn parse_address(text: &str) -> Option<IpAddr> {
    let text = text.trim();
    let text = text.strip_prefix('"').and_then(|text| text.strip_suffix('"')).unwrap_or(text);
    let ip = text
        .parse::<IpAddr>()
        .or_else(|_| text.parse::<SocketAddr>().map(|address| address.ip()))
        .ok()
        .or_else(|| text.strip_prefix('[')?.strip_suffix(']')?.parse::<Ipv6Addr>().ok().map(IpAddr::V6))?;
    Some(ip.to_canonical())
}

/// What stands between separators outside of double quotes, from the right: a quote that a stranger
/// left open on the left cannot swallow what a trusted proxy appended.
fn elements(text: &str, separator: char) -> impl Iterator<Item = &str> {
    let mut quoted = false;
    text.rsplit(move |c| {
        quoted ^= c == '"';
        c == separator && !quoted
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(header: &str, lines: &[&str], peer: &str) -> String {
        let settings = Settings {
            trusted_proxies: vec!["10.0.0.0/8".parse().unwrap(), "fd00::/8".parse().unwrap()],
            ip_header: header.parse().unwrap(),
            ipv4_prefix: 32,
            ipv6_prefix: 64,
        };
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(&settings.ip_header, line.parse().unwrap());
        }
        Client::identify(peer.parse().unwrap(), &headers, &settings).ip.to_string()
    }

    #[test]
    fn trap_23_the_header_is_read_from_the_right_and_only_from_trusted_peers() {
        let xff = "x-forwarded-for";
        assert_eq!(client(xff, &["1.1.1.1"], "9.9.9.9"), "9.9.9.9");
        assert_eq!(client(xff, &["6.6.6.6, 1.1.1.1"], "10.0.0.1"), "1.1.1.1");
        assert_eq!(client(xff, &["6.6.6.6, 1.1.1.1, 10.0.0.2"], "10.0.0.1"), "1.1.1.1");
        assert_eq!(client(xff, &["6.6.6.6", "1.1.1.1, 10.0.0.2"], "10.0.0.1"), "1.1.1.1");
        assert_eq!(client(xff, &["6.6.6.6", "10.0.0.3", "10.0.0.2"], "10.0.0.1"), "6.6.6.6");
        assert_eq!(client(xff, &[], "10.0.0.1"), "10.0.0.1");
        assert_eq!(client(xff, &["10.0.0.5"], "10.0.0.1"), "10.0.0.5");
    }

    #[test]
    fn what_is_left_of_something_unreadable_is_hearsay() {
        let xff = "x-forwarded-for";
        assert_eq!(client(xff, &["1.1.1.1, unknown"], "10.0.0.1"), "10.0.0.1");
        assert_eq!(client(xff, &["1.1.1.1, "], "10.0.0.1"), "10.0.0.1");
        assert_eq!(client(xff, &["1.1.1.1, x, 10.0.0.2"], "10.0.0.1"), "10.0.0.2");
        assert_eq!(client("forwarded", &["for=1.1.1.1, for=_hidden"], "10.0.0.1"), "10.0.0.1");
    }

    #[test]
    fn addresses_are_read_in_all_their_written_forms() {
        let xff = "x-forwarded-for";
        assert_eq!(client(xff, &["1.1.1.1:443"], "10.0.0.1"), "1.1.1.1");
        assert_eq!(client(xff, &["[2001:db8::1]:443"], "10.0.0.1"), "2001:db8::1");
        assert_eq!(client(xff, &["[2001:db8::1]"], "10.0.0.1"), "2001:db8::1");
        assert_eq!(client(xff, &["2001:db8::1"], "fd00::1"), "2001:db8::1");
        assert_eq!(client(xff, &["::ffff:1.1.1.1"], "::ffff:10.0.0.1"), "1.1.1.1");
        let forwarded = r#"for=6.6.6.6;by=x, For="[2001:db8::1]:47";proto=http;host="a,b;c""#;
        assert_eq!(client("forwarded", &[forwarded], "10.0.0.1"), "2001:db8::1");
        assert_eq!(client("x-real-ip", &["1.1.1.1"], "10.0.0.1"), "1.1.1.1");
        assert_eq!(client("forwarded", &[r#"for="6.6.6.6, for=1.1.1.1"#], "10.0.0.1"), "1.1.1.1");
    }
}
