//! Protocol upgrades: which requests are forwarded and which responses are valid.
//!
//! After an upgrade, no policy sees the bytes of the connection. Upgrades to a protocol that can
//! carry HTTP requests are not forwarded, since a client could bypass every limit with them.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderMap, HeaderValue, Method, header};
use sha1_smol::Sha1;

use super::header_lines::list_elements;

/// `Upgrade` protocol names that continue with HTTP, in cleartext or over TLS.
const HTTP_PROTOCOL_NAMES: [&[u8]; 4] = [b"h2c", b"h2", b"http", b"tls"];
/// Prefixes of further protocol names that continue with HTTP: SPDY and drafts of HTTP/2.
const HTTP_PROTOCOL_PREFIXES: [&[u8]; 2] = [b"spdy", b"h2c-"];
/// Constant that a server appends to the key to compute `Sec-WebSocket-Accept` (RFC 6455, 4.2.2).
const WEBSOCKET_GUID: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// How a valid request asks for a protocol switch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RequestedProtocolSwitch {
    /// Whether by an extended CONNECT for a WebSocket on an HTTP/2 stream (RFC 8441). Otherwise by
    /// the `Upgrade` of an HTTP/1.1 request (RFC 9110, 7.8).
    pub(crate) is_extended_connect: bool,
    /// The `Sec-WebSocket-Key` for the upstream's handshake: that of the HTTP/1.1 request, if any,
    /// or a generated one.
    pub(crate) websocket_key: Option<HeaderValue>,
}

/// Whether `Upgrade` values may be forwarded: not empty, and every protocol well-formed and not
/// HTTP.
pub(crate) fn is_forwardable_upgrade(list: &[HeaderValue]) -> bool {
    let mut protocols = list.iter().flat_map(list_elements).peekable();
    protocols.peek().is_some()
        && protocols.all(|protocol| is_protocol_token(protocol) && !is_http_protocol(protocol))
}

/// Whether a `101` response selects only protocols that the request offered.
pub(crate) fn selects_only_offered_protocols(
    offered: &[HeaderValue],
    response: &HeaderMap,
) -> bool {
    let chosen = response.get_all(header::UPGRADE).iter();
    let mut chosen = chosen.flat_map(list_elements).peekable();
    let is_offered = |protocol: &[u8]| {
        let mut offered = offered.iter().flat_map(list_elements);
        offered.any(|offered| offered.eq_ignore_ascii_case(protocol))
    };
    chosen.peek().is_some() && chosen.all(is_offered)
}

/// Generates a random `Sec-WebSocket-Key`: 16 bytes in base64 (RFC 6455, 4.1).
pub(crate) fn generate_websocket_key() -> HeaderValue {
    let nonce = fastrand::u128(..).to_be_bytes();
    HeaderValue::try_from(STANDARD.encode(nonce)).expect("base64 is visible ASCII")
}

/// Whether the `Upgrade` header of a request or response names `websocket`.
pub(crate) fn upgrade_names_websocket(head: &HeaderMap) -> bool {
    let mut chosen = head.get_all(header::UPGRADE).iter().flat_map(list_elements);
    chosen.any(|protocol| protocol.eq_ignore_ascii_case(b"websocket"))
}

/// Whether the response has exactly one `Sec-WebSocket-Accept` and it matches `key`.
pub(crate) fn has_valid_websocket_accept(key: &HeaderValue, response: &HeaderMap) -> bool {
    let mut proofs = response.get_all(header::SEC_WEBSOCKET_ACCEPT).iter();
    proofs.next() == Some(&websocket_accept_value(key)) && proofs.next().is_none()
}

/// Computes `Sec-WebSocket-Accept` for `key` (RFC 6455, 4.2.2).
pub(crate) fn websocket_accept_value(key: &HeaderValue) -> HeaderValue {
    let mut hash = Sha1::new();
    hash.update(key.as_bytes());
    hash.update(WEBSOCKET_GUID);
    let accept = STANDARD.encode(hash.digest().bytes());
    HeaderValue::try_from(accept).expect("base64 is visible ASCII")
}

/// Whether the text is a protocol `name` or `name/version`, with tokens as parts. A method is a
/// token too.
fn is_protocol_token(text: &[u8]) -> bool {
    let mut parts = text.splitn(2, |byte| *byte == b'/');
    parts.all(|part| Method::from_bytes(part).is_ok())
}

fn is_http_protocol(protocol: &[u8]) -> bool {
    let mut parts = protocol.split(|byte| *byte == b'/');
    let name = parts.next().unwrap_or_default();
    let is_start = |prefix: &&[u8]| {
        name.get(..prefix.len())
            .is_some_and(|start| start.eq_ignore_ascii_case(prefix))
    };
    let is_name = |known: &&[u8]| name.eq_ignore_ascii_case(known);
    HTTP_PROTOCOL_NAMES.iter().any(is_name) || HTTP_PROTOCOL_PREFIXES.iter().any(is_start)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_header_lines(text: &str) -> Vec<HeaderValue> {
        text.split('\n').map(|line| line.parse().unwrap()).collect()
    }

    fn build_headers(name: header::HeaderName, lines: &str) -> HeaderMap {
        parse_header_lines(lines)
            .into_iter()
            .map(|line| (name.clone(), line))
            .collect()
    }

    #[test]
    fn rejects_upgrades_to_http_protocols() {
        for forwarded in [
            "websocket",
            "WebSocket",
            "a/1, b/2",
            "tcp",
            "x\ny/2",
            ", x,",
            "h2cc",
        ] {
            assert!(
                is_forwardable_upgrade(&parse_header_lines(forwarded)),
                "{forwarded}"
            );
        }
        for dropped in [
            "",
            ",",
            "h2c",
            "h2c-14",
            "SPDY/3.1",
            "H2C",
            "websocket, h2c",
            "websocket\nh2c",
            "TLS/1.0",
            "HTTP/2.0",
            "h2",
            "http/1.1",
            "web socket",
            "a/",
            "/1",
            "a/b/c",
            "\u{e9}",
            "a;b",
        ] {
            assert!(
                !is_forwardable_upgrade(&parse_header_lines(dropped)),
                "{dropped}"
            );
        }
    }

    #[test]
    fn a_switch_must_select_an_offered_protocol() {
        let selects = |offered, chosen| {
            super::selects_only_offered_protocols(
                &parse_header_lines(offered),
                &build_headers(header::UPGRADE, chosen),
            )
        };
        assert!(selects("websocket", "WebSocket"));
        assert!(selects("a/1, b\nc", "c"));
        assert!(selects("a, b, c", "a, c"));
        assert!(!selects("websocket", "h2c"));
        assert!(!selects("websocket", "websocket, h2c"));
        assert!(!selects("websocket", "websocket\nh2c"));
        assert!(!selects("a/1", "a/2"));
        assert!(!selects("websocket", ""));
        assert!(!super::selects_only_offered_protocols(
            &parse_header_lines("websocket"),
            &HeaderMap::new()
        ));
        assert!(!super::selects_only_offered_protocols(
            &[],
            &build_headers(header::UPGRADE, "websocket")
        ));
    }

    #[test]
    fn websocket_accept_follows_rfc_6455() {
        // RFC 6455, 1.3.
        let key = HeaderValue::from_static("dGhlIHNhbXBsZSBub25jZQ==");
        let is_accepted = |lines| {
            has_valid_websocket_accept(&key, &build_headers(header::SEC_WEBSOCKET_ACCEPT, lines))
        };
        assert!(is_accepted("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
        assert!(!is_accepted("s3pPLMBiTxaQ9kYGzzhZRbK+xOo"));
        assert!(!is_accepted(
            "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\ns3pPLMBiTxaQ9kYGzzhZRbK+xOo="
        ));
        assert!(!has_valid_websocket_accept(&key, &HeaderMap::new()));
    }

    #[test]
    fn base64_output_is_padded() {
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("\u{ff}?", "w78/"),
        ] {
            assert_eq!(STANDARD.encode(bytes.as_bytes()), text);
        }
    }
}
