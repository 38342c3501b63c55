//! Client identity: the address of the peer, or the address that trusted proxies report.

use super::ValueChecks;
use http::header::FORWARDED;
use http::{HeaderMap, HeaderName};
use ipnet::{IpNet, Ipv6Net};
use std::borrow::Cow;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// The trusted proxies, and the address prefixes that identify a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Peers with a trusted forwarding header, which is read from the right.
    pub trusted_proxies: Vec<IpNet>,
    /// `x-forwarded-for`, `forwarded`, or a header with one address.
    pub ip_header: HeaderName,
    /// Prefixes of translators besides the well-known one; lengths as RFC 6052 lists them.
    pub nat64_prefixes: Vec<Ipv6Net>,
    /// Length of the prefix that identifies an IPv4 client, 0 to 32 bits.
    pub ipv4_prefix: u8,
    /// Length of the prefix that identifies an IPv6 client, 0 to 128 bits. A client usually
    /// controls a whole /64.
    pub ipv6_prefix: u8,
    pub value_checks: ValueChecks,
}

/// The client that sent a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientAddress {
    pub ip: IpAddr,
    /// Whether the peer is a trusted proxy. Only a trusted proxy's forwarding fields are passed on.
    pub is_peer_trusted: bool,
}

impl Settings {
    /// Whether the peer is a trusted proxy.
    pub fn trusts_proxy(&self, ip: IpAddr) -> bool {
        self.trusted_proxies.iter().any(|net| net.contains(&ip))
    }

    /// The address of a client: the IPv4 address that an IPv6 address embeds, if any. 6to4, Teredo
    /// and ISATAP addresses stay what they are, because a client chooses parts of them.
    pub fn client_ip(&self, ip: IpAddr) -> IpAddr {
        let ip = match ip.to_canonical() {
            IpAddr::V6(ip) => ip,
            ip @ IpAddr::V4(_) => return ip,
        };
        let embedded = match ip.segments() {
            // The well-known prefix of NAT64, and SIIT (RFC 2765).
            [0x64, 0xff9b, 0, 0, 0, 0, ..] | [0, 0, 0, 0, 0xffff, 0, ..] => embedded_ipv4(ip, 96),
            _ => {
                let prefix = self.nat64_prefixes.iter().find(|net| net.contains(&ip));
                prefix.and_then(|net| embedded_ipv4(ip, net.prefix_len()))
            }
        };
        embedded.map_or(IpAddr::V6(ip), IpAddr::V4)
    }

    /// Checks a network of clients in a condition.
    ///
    /// # Errors
    /// Returns a message if no client has an address in it, because all embed an IPv4 address.
    pub fn check_client_network(&self, net: IpNet) -> Result<IpNet, String> {
        let ends = [net.network(), net.broadcast()].map(|ip| self.client_ip(ip));
        match (net, ends) {
            (IpNet::V6(_), [IpAddr::V4(first), IpAddr::V4(last)]) => Err(format!(
                "clients with these addresses are known by the IPv4 address in them; expected an IPv4 network, for {first} to {last}"
            )),
            _ => Ok(net),
        }
    }

    /// First address of the network that identifies a client.
    pub fn client_prefix(&self, ip: IpAddr) -> IpAddr {
        let ip = self.client_ip(ip);
        IpNet::new(ip, self.prefix_length(ip)).map_or(ip, |net| net.network())
    }

    fn prefix_length(&self, ip: IpAddr) -> u8 {
        match ip {
            IpAddr::V4(_) => self.ipv4_prefix,
            IpAddr::V6(_) => self.ipv6_prefix,
        }
    }
}

/// Maximum number of list elements read. No legitimate chain of proxies is longer.
const MAX_HOPS: usize = 100;

impl ClientAddress {
    /// Returns the first untrusted address, read from the right of the forwarding header.
    ///
    /// Elements to the left of that address are ignored, since the client may have written them. If
    /// an element is unreadable, the address to its right is the client. Empty elements are skipped
    /// (RFC 9110, section 5.6.1.2).
    pub fn identify(peer: IpAddr, headers: &HeaderMap, settings: &Settings) -> Self {
        let peer = peer.to_canonical();
        if !settings.trusts_proxy(peer) {
            return Self {
                ip: settings.client_ip(peer),
                is_peer_trusted: false,
            };
        }
        let is_forwarded = settings.ip_header == FORWARDED;
        let lines = headers.get_all(&settings.ip_header).iter().rev();
        let mut ip = peer;
        for element in lines
            .flat_map(|line| split_unquoted_from_right(line.as_bytes(), b','))
            .take(MAX_HOPS)
        {
            let element = element.trim_ascii();
            if element.is_empty() {
                continue;
            }
            // Each element is parsed separately: invalid text from a client must not invalidate the
            // element that a proxy appended.
            let hop = if is_forwarded {
                parse_forwarded_element(element)
            } else {
                parse_x_forwarded_for_element(element)
            };
            let Some(hop) = hop else { break };
            ip = hop;
            if !settings.trusts_proxy(ip) {
                break;
            }
        }
        // Proxies are trusted by the address as it is: an embedded one is the client's.
        Self {
            ip: settings.client_ip(ip),
            is_peer_trusted: true,
        }
    }
}

/// The IPv4 address behind a prefix of this length (RFC 6052, section 2.2). Its bits skip byte 8,
/// which is zero.
fn embedded_ipv4(ip: Ipv6Addr, prefix_len: u8) -> Option<Ipv4Addr> {
    let bytes = ip.octets();
    let mut rest = bytes.iter().enumerate().skip(usize::from(prefix_len / 8));
    let mut octets = [0; 4];
    for octet in &mut octets {
        *octet = *rest.find(|(at, _)| *at != 8)?.1;
    }
    (prefix_len == 96 || bytes.get(8) == Some(&0)).then(|| octets.into())
}

/// Parses an element of `X-Forwarded-For`, which has no standard grammar. It is an address,
/// optionally with a port, with brackets around IPv6, or in double quotes.
fn parse_x_forwarded_for_element(element: &[u8]) -> Option<IpAddr> {
    let text = str::from_utf8(element).ok()?;
    let text = text
        .strip_prefix('"')
        .and_then(|text| text.strip_suffix('"'))
        .unwrap_or(text);
    match strip_zone_id(text).parse::<Ipv6Addr>() {
        Ok(ip) => Some(IpAddr::V6(ip).to_canonical()),
        Err(_) => parse_node(text),
    }
}

/// Parses the `for` parameter of one `Forwarded` element. Parameters have any order and case, and
/// none may repeat (RFC 7239, section 4). `unknown` and obfuscated identifiers (sections 6.2 and
/// 6.3) are no addresses.
fn parse_forwarded_element(element: &[u8]) -> Option<IpAddr> {
    let mut found = None;
    for pair in split_unquoted_from_right(element, b';')
        .map(<[u8]>::trim_ascii)
        .filter(|pair| !pair.is_empty())
    {
        let (name, value) = str::from_utf8(pair).ok()?.split_once('=')?;
        if name.eq_ignore_ascii_case("for") && found.replace(unquote_value(value)?).is_some() {
            return None;
        }
    }
    parse_node(&found?)
}

/// Removes the quotes and escapes of a value (RFC 9110, section 5.6.4). Unquoted values may contain
/// characters that require quotes, because many proxies send addresses with ports that way.
fn unquote_value(value: &str) -> Option<Cow<'_, str>> {
    let Some(rest) = value.strip_prefix('"') else {
        return (!value.contains(['"', '\\'])).then_some(Cow::Borrowed(value));
    };
    let inner = rest.strip_suffix('"')?;
    if !inner.contains(['"', '\\']) {
        return Some(Cow::Borrowed(inner));
    }
    let (mut text, mut characters) = (String::with_capacity(inner.len()), inner.chars());
    while let Some(character) = characters.next() {
        text.push(match character {
            '\\' => characters.next()?,
            '"' => return None,
            plain => plain,
        });
    }
    Some(Cow::Owned(text))
}

/// Parses `a`, `a:port`, `[v6]` or `[v6]:port` (RFC 7239, section 6). IPv6 needs brackets, because
/// its last group looks like a port.
fn parse_node(text: &str) -> Option<IpAddr> {
    let (ip, rest) = match text.strip_prefix('[') {
        Some(rest) => {
            let (ip, rest) = rest.split_once(']')?;
            (IpAddr::V6(strip_zone_id(ip).parse().ok()?), rest)
        }
        None => {
            let end = text.find(':').unwrap_or(text.len());
            let (ip, rest) = text.split_at_checked(end)?;
            // Rust's parser rejects leading zeros, which other software may read as octal.
            (IpAddr::V4(ip.parse().ok()?), rest)
        }
    };
    let is_port = match rest.strip_prefix(':') {
        Some(hidden) if hidden.starts_with('_') => {
            hidden.len() > 1
                && hidden
                    .bytes()
                    .all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
        }
        Some(digits) => {
            digits.len() <= 5
                && digits.bytes().all(|b| b.is_ascii_digit())
                && digits.parse::<u16>().is_ok()
        }
        None => rest.is_empty(),
    };
    is_port.then(|| ip.to_canonical())
}

/// Removes the zone id (RFC 6874). A zone id names the proxy's network interface and does not
/// change the address.
fn strip_zone_id(text: &str) -> &str {
    match text.split_once('%') {
        Some((ip, zone)) if !zone.is_empty() && zone.bytes().all(|b| b.is_ascii_graphic()) => ip,
        _ => text,
    }
}

/// Splits at separators outside of double quotes, from the right. A quote that a client left open
/// on the left cannot hide an element that a trusted proxy appended.
fn split_unquoted_from_right(text: &[u8], separator: u8) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest?;
        let mut quoted = false;
        for (at, byte) in text.iter().enumerate().rev() {
            quoted ^= *byte == b'"' && !is_escaped(text, at);
            if *byte == separator && !quoted {
                rest = text.get(..at);
                return text.get(at + 1..);
            }
        }
        rest = None;
        Some(text)
    })
}

/// Whether an odd number of backslashes precedes `position`.
fn is_escaped(text: &[u8], position: usize) -> bool {
    let before = text.get(..position).unwrap_or_default();
    before
        .iter()
        .rev()
        .take_while(|byte| **byte == b'\\')
        .count()
        % 2
        == 1
}

/// The client's network as text. A prefix of full length gives the address alone.
pub(super) fn format_client_network(ip: IpAddr, settings: &Settings) -> String {
    let prefix = settings.prefix_length(ip);
    match ip {
        IpAddr::V4(ip) if prefix >= 32 => format_ipv4(ip),
        IpAddr::V6(ip) if prefix >= 128 => ip.to_string(),
        _ => IpNet::new(ip, prefix).map_or_else(|_| ip.to_string(), |net| net.trunc().to_string()),
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples of RFC 6052, section 2.4, and what no translator makes.
    #[test]
    fn embedded_addresses_are_those_of_the_standard() {
        let settings = Settings {
            nat64_prefixes: [
                "2001:db8::/32",
                "2001:db9:100::/40",
                "2001:dba:122::/48",
                "2001:dbb:122:300::/56",
                "2001:dbc:122:344::/64",
                "2001:dbd:122:344::/96",
            ]
            .map(|text| text.parse().unwrap())
            .into(),
            ..make_settings("x-forwarded-for")
        };
        for (text, expected) in [
            ("2001:db8:c000:221::", "192.0.2.33"),
            ("2001:db9:1c0:2:21::", "192.0.2.33"),
            ("2001:dba:122:c000:2:2100::", "192.0.2.33"),
            ("2001:dbb:122:3c0:0:221::", "192.0.2.33"),
            ("2001:dbc:122:344:c0:2:2100::", "192.0.2.33"),
            ("2001:dbd:122:344::192.0.2.33", "192.0.2.33"),
            ("64:ff9b::192.0.2.33", "192.0.2.33"),
            ("::ffff:192.0.2.33", "192.0.2.33"),
            ("::ffff:0:192.0.2.33", "192.0.2.33"),
            ("192.0.2.33", "192.0.2.33"),
            (
                "2001:dbc:122:344:1c0:2:2100::",
                "2001:dbc:122:344:1c0:2:2100:0",
            ),
            ("64:ff9b:1::192.0.2.33", "64:ff9b:1::c000:221"),
            ("2002:c000:221::1", "2002:c000:221::1"),
            ("2001:0:c000:221::1", "2001:0:c000:221::1"),
            ("fe80::5efe:192.0.2.33", "fe80::5efe:c000:221"),
        ] {
            let ip = settings.client_ip(text.parse().unwrap());
            assert_eq!(ip, expected.parse::<IpAddr>().unwrap(), "{text}");
        }
    }

    fn make_settings(header: &str) -> Settings {
        Settings {
            nat64_prefixes: Vec::new(),
            trusted_proxies: vec!["10.0.0.0/8".parse().unwrap(), "fd00::/8".parse().unwrap()],
            ip_header: header.parse().unwrap(),
            ipv4_prefix: 32,
            ipv6_prefix: 64,
            value_checks: ValueChecks::ALL,
        }
    }

    fn identify_client_ip(header: &str, lines: &[&str], peer: &str) -> String {
        let settings = make_settings(header);
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append(&settings.ip_header, line.parse().unwrap());
        }
        ClientAddress::identify(peer.parse().unwrap(), &headers, &settings)
            .ip
            .to_string()
    }

    #[test]
    fn trap_23_the_header_is_read_from_the_right_and_only_from_trusted_peers() {
        let xff = "x-forwarded-for";
        assert_eq!(identify_client_ip(xff, &["1.1.1.1"], "9.9.9.9"), "9.9.9.9");
        assert_eq!(
            identify_client_ip(xff, &["6.6.6.6, 1.1.1.1"], "10.0.0.1"),
            "1.1.1.1"
        );
        assert_eq!(
            identify_client_ip(xff, &["6.6.6.6, 1.1.1.1, 10.0.0.2"], "10.0.0.1"),
            "1.1.1.1"
        );
        assert_eq!(
            identify_client_ip(xff, &["6.6.6.6", "1.1.1.1, 10.0.0.2"], "10.0.0.1"),
            "1.1.1.1"
        );
        assert_eq!(
            identify_client_ip(xff, &["6.6.6.6", "10.0.0.3", "10.0.0.2"], "10.0.0.1"),
            "6.6.6.6"
        );
        assert_eq!(identify_client_ip(xff, &[], "10.0.0.1"), "10.0.0.1");
        assert_eq!(
            identify_client_ip(xff, &["10.0.0.5"], "10.0.0.1"),
            "10.0.0.5"
        );
    }

    const PROXY: &str = "10.0.0.1";

    /// Checks the client address for header lines that [`PROXY`] sends.
    #[track_caller]
    fn assert_client_ips(table: &[(&str, &[&str], &str)]) {
        for (header, lines, expected) in table {
            assert_eq!(
                identify_client_ip(header, lines, PROXY),
                *expected,
                "{header}: {lines:?}"
            );
        }
    }

    #[test]
    fn parses_every_form_of_an_x_forwarded_for_address() {
        assert_client_ips(&[
            // The header has no grammar.
            ("x-forwarded-for", &["1.1.1.1:443"], "1.1.1.1"),
            ("x-forwarded-for", &["\"1.1.1.1:443\""], "1.1.1.1"),
            ("x-forwarded-for", &["[2001:db8::1]:443"], "2001:db8::1"),
            ("x-forwarded-for", &["[2001:DB8:0:0::0001]"], "2001:db8::1"),
            ("x-forwarded-for", &["2001:db8::1"], "2001:db8::1"),
            ("x-forwarded-for", &["\"2001:db8::1\""], "2001:db8::1"),
            ("x-forwarded-for", &["::ffff:1.1.1.1"], "1.1.1.1"),
            ("x-forwarded-for", &["[::ffff:101:101]:80"], "1.1.1.1"),
            ("x-forwarded-for", &["1.1.1.1, ::ffff:10.0.0.9"], "1.1.1.1"),
            ("x-forwarded-for", &["fe80::1%eth0"], "fe80::1"),
            ("x-forwarded-for", &["[fe80::1%25eth0]:80"], "fe80::1"),
            ("x-forwarded-for", &["\t 1.1.1.1\t,10.0.0.2 "], "1.1.1.1"),
        ]);
        assert_eq!(
            identify_client_ip("x-forwarded-for", &["2001:db8::1"], "fd00::1"),
            "2001:db8::1"
        );
        assert_eq!(
            identify_client_ip("x-forwarded-for", &["1.1.1.1"], "::ffff:10.0.0.1"),
            "1.1.1.1"
        );
    }

    #[test]
    fn an_invalid_x_forwarded_for_element_hides_the_elements_to_its_left() {
        assert_client_ips(&[
            ("x-forwarded-for", &["1.1.1.1, unknown"], PROXY),
            ("x-forwarded-for", &["1.1.1.1, x, 10.0.0.2"], "10.0.0.2"),
            ("x-forwarded-for", &["1.1.1.1", "x, 10.0.0.2"], "10.0.0.2"),
            ("x-forwarded-for", &["01.1.1.1"], PROXY),
            ("x-forwarded-for", &["1.1.1.010"], PROXY),
            ("x-forwarded-for", &["1.1.1"], PROXY),
            ("x-forwarded-for", &["0x1.1.1.1"], PROXY),
            ("x-forwarded-for", &["16843009"], PROXY),
            ("x-forwarded-for", &["256.1.1.1"], PROXY),
            ("x-forwarded-for", &["1.1.1.1:"], PROXY),
            ("x-forwarded-for", &["1.1.1.1:65536"], PROXY),
            ("x-forwarded-for", &["1.1.1.1:+80"], PROXY),
            ("x-forwarded-for", &["1.1.1.1:000080"], PROXY),
            ("x-forwarded-for", &["1.1.1.1 2.2.2.2"], PROXY),
            ("x-forwarded-for", &["1.1.1.1/32"], PROXY),
            ("x-forwarded-for", &["[1.1.1.1]"], PROXY),
            ("x-forwarded-for", &["[2001:db8::1"], PROXY),
            ("x-forwarded-for", &["[2001:db8::1]x"], PROXY),
            ("x-forwarded-for", &["2001:db8:::1"], PROXY),
            ("x-forwarded-for", &["fe80::1%"], PROXY),
            ("x-forwarded-for", &["unix:"], PROXY),
            ("x-forwarded-for", &["localhost"], PROXY),
        ]);
    }

    #[test]
    fn x_forwarded_for_lines_form_one_list_without_empty_elements() {
        assert_client_ips(&[
            (
                "x-forwarded-for",
                &["6.6.6.6", "1.1.1.1, 10.0.0.2"],
                "1.1.1.1",
            ),
            ("x-forwarded-for", &["1.1.1.1,"], "1.1.1.1"),
            ("x-forwarded-for", &["1.1.1.1, , ,10.0.0.2,\t"], "1.1.1.1"),
            ("x-forwarded-for", &["1.1.1.1", ""], "1.1.1.1"),
            ("x-forwarded-for", &[""], PROXY),
            ("x-forwarded-for", &[" , ,"], PROXY),
            ("x-forwarded-for", &["\"6.6.6.6, 1.1.1.1"], "1.1.1.1"),
        ]);
    }

    #[test]
    fn parses_every_form_of_a_forwarded_element() {
        assert_client_ips(&[
            ("forwarded", &["for=1.1.1.1"], "1.1.1.1"),
            ("forwarded", &["For=\"1.1.1.1\""], "1.1.1.1"),
            ("forwarded", &["FOR=\"1.1.1.1:4711\""], "1.1.1.1"),
            ("forwarded", &["for=1.1.1.1:4711"], "1.1.1.1"),
            ("forwarded", &["for=\"1.1.1.1:_port.1-x\""], "1.1.1.1"),
            ("forwarded", &["for=\"[2001:db8::1]\""], "2001:db8::1"),
            ("forwarded", &["for=\"[2001:db8::1]:4711\""], "2001:db8::1"),
            ("forwarded", &["for=[2001:db8::1]"], "2001:db8::1"),
            ("forwarded", &["for=\"\\1.\\1.1.1\""], "1.1.1.1"),
            (
                "forwarded",
                &["proto=https;by=_x;host=\"a:1\";for=1.1.1.1"],
                "1.1.1.1",
            ),
            (
                "forwarded",
                &["for=1.1.1.1; proto=http ;; by=x;"],
                "1.1.1.1",
            ),
            (
                "forwarded",
                &["for=6.6.6.6, for=1.1.1.1, for=10.0.0.2"],
                "1.1.1.1",
            ),
            (
                "forwarded",
                &["for=6.6.6.6", "for=1.1.1.1,,for=10.0.0.2,"],
                "1.1.1.1",
            ),
            (
                "forwarded",
                &[r#"for=6.6.6.6;by=x, For="[2001:db8::1]:47";proto=http;host="a,b;c""#],
                "2001:db8::1",
            ),
            (
                "forwarded",
                &[r#"for=1.1.1.1;host="a\",for=6.6.6.6""#],
                "1.1.1.1",
            ),
            (
                "forwarded",
                &[r#"for=1.1.1.1;host="a\\", for=10.0.0.2"#],
                "1.1.1.1",
            ),
            ("forwarded", &[r#"for="6.6.6.6, for=1.1.1.1"#], "1.1.1.1"),
            ("forwarded", &["for=6.6.6.6, for=unknown"], PROXY),
            ("forwarded", &["for=6.6.6.6, for=_hidden"], PROXY),
            ("forwarded", &["for=6.6.6.6, for=\"_hidden:80\""], PROXY),
            ("forwarded", &["for=6.6.6.6, proto=https"], PROXY),
            ("forwarded", &["for=6.6.6.6;for=1.1.1.1"], PROXY),
            ("forwarded", &["for = 1.1.1.1"], PROXY),
            ("forwarded", &["for=\"2001:db8::1\""], PROXY),
            ("forwarded", &["for=\"1.1.1.1"], PROXY),
            ("forwarded", &["for=1.1.1.1\""], PROXY),
            ("forwarded", &["for=\"1.1\"1.1"], PROXY),
            ("forwarded", &["for=1.1.1.1;proto"], PROXY),
            ("forwarded", &["1.1.1.1"], PROXY),
        ]);
    }

    #[test]
    fn other_headers_contain_one_address() {
        assert_client_ips(&[
            ("x-real-ip", &["1.1.1.1"], "1.1.1.1"),
            ("cf-connecting-ip", &["2001:db8::1"], "2001:db8::1"),
        ]);
    }

    #[test]
    fn invalid_client_bytes_do_not_hide_addresses_appended_by_proxies() {
        let settings = make_settings("x-forwarded-for");
        let mut headers = HeaderMap::new();
        let line = http::HeaderValue::from_bytes(b"\xff\xfe, 1.1.1.1, 10.0.0.2").unwrap();
        headers.append(&settings.ip_header, line);
        let client = ClientAddress::identify("10.0.0.1".parse().unwrap(), &headers, &settings);
        assert_eq!(client.ip.to_string(), "1.1.1.1");
    }

    #[test]
    fn reads_at_most_max_hops_elements() {
        let hops = |count: usize| format!("1.1.1.1{}", ", 10.0.0.2".repeat(count));
        assert_eq!(
            identify_client_ip("x-forwarded-for", &[&hops(MAX_HOPS - 1)], "10.0.0.1"),
            "1.1.1.1"
        );
        assert_eq!(
            identify_client_ip("x-forwarded-for", &[&hops(MAX_HOPS)], "10.0.0.1"),
            "10.0.0.2"
        );
    }

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
