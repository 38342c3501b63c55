//! Requests that want to go on in another protocol, and the answers that let them.
//!
//! Once an upgrade is granted, bytes pass that no policy sees. So nothing is asked for in which further
//! HTTP requests could come: whoever may open one WebSocket must not thereby get round every limit.

use super::gate::{GateFault, elements};
use http::{HeaderMap, HeaderValue, Method, Version, header, request};
use hyper::ext::Protocol;
use sha1_smol::Sha1;

/// Names under which HTTP itself goes on, in the clear or not.
const HTTP_AGAIN: [&[u8]; 4] = [b"h2c", b"h2", b"http", b"tls"];
/// How further such names begin: SPDY and drafts of HTTP/2.
const HTTP_KIN: [&[u8]; 2] = [b"spdy", b"h2c-"];
/// What a server joins to the key to show that it knows WebSockets (RFC 6455, 4.2.2).
const WEBSOCKET_GUID: &[u8] = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11";

/// What a request asks for beside an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Wanted {
    /// The protocols of its `Upgrade` fields (RFC 9110, 7.8); the key, if one of them may be a WebSocket's.
    Upgrade { websocket_key: Option<HeaderValue> },
    /// A WebSocket on an HTTP/2 stream (RFC 8441). Upstreams get an HTTP/1.1 handshake with this key.
    WebSocket(HeaderValue),
}

/// Whether an `Upgrade` list is one that we pass on: all of it well-formed, and none of it HTTP.
pub(super) fn may_pass(list: &[HeaderValue]) -> bool {
    let mut protocols = list.iter().flat_map(elements).peekable();
    protocols.peek().is_some()
        && protocols.all(|protocol| is_protocol(protocol) && !is_http(protocol))
}

/// Whether a `101` switches to nothing but what was offered.
pub(super) fn grants(offered: &[HeaderValue], response: &HeaderMap) -> bool {
    let mut chosen = response
        .get_all(header::UPGRADE)
        .iter()
        .flat_map(elements)
        .peekable();
    let is_offered = |protocol: &[u8]| {
        offered
            .iter()
            .flat_map(elements)
            .any(|offered| offered.eq_ignore_ascii_case(protocol))
    };
    chosen.peek().is_some() && chosen.all(is_offered)
}

/// Makes an extended CONNECT for a WebSocket into a GET, as it would have come by HTTP/1.1, and returns the
/// key for its handshake.
///
/// # Errors
/// [`GateFault::Connect`] for a plain CONNECT, [`GateFault::ConnectProtocol`] for other protocols.
pub(super) fn get_from_connect(parts: &mut request::Parts) -> Result<HeaderValue, GateFault> {
    let protocol = parts
        .extensions
        .remove::<Protocol>()
        .filter(|_| parts.version == Version::HTTP_2);
    let protocol = protocol.ok_or(GateFault::Connect)?;
    if !protocol.as_str().eq_ignore_ascii_case("websocket") {
        return Err(GateFault::ConnectProtocol);
    }
    parts.method = Method::GET;
    let nonce = fastrand::u128(..).to_be_bytes();
    Ok(HeaderValue::try_from(base64(&nonce)).expect("base64 is made of visible signs"))
}

/// Whether a request wants a WebSocket, or a response switches to one.
pub(super) fn is_websocket(head: &HeaderMap) -> bool {
    let mut chosen = head.get_all(header::UPGRADE).iter().flat_map(elements);
    chosen.any(|protocol| protocol.eq_ignore_ascii_case(b"websocket"))
}

/// Whether a response proves that a WebSocket was opened for `key`.
pub(super) fn accepts(key: &HeaderValue, response: &HeaderMap) -> bool {
    let mut proofs = response.get_all(header::SEC_WEBSOCKET_ACCEPT).iter();
    let right = accept(key.as_bytes());
    proofs
        .next()
        .is_some_and(|proof| proof.as_bytes() == right.as_bytes())
        && proofs.next().is_none()
}

/// The proof that a server knows what a client with `key` wants (RFC 6455, 4.2.2).
pub(super) fn proof_for(key: &HeaderValue) -> HeaderValue {
    HeaderValue::try_from(accept(key.as_bytes())).expect("base64 is made of visible signs")
}

fn accept(key: &[u8]) -> String {
    let mut hash = Sha1::new();
    hash.update(key);
    hash.update(WEBSOCKET_GUID);
    base64(&hash.digest().bytes())
}

/// `name` or `name/version`, both tokens.
fn is_protocol(text: &[u8]) -> bool {
    let is_token = |text: &[u8]| {
        !text.is_empty()
            && text
                .iter()
                .all(|byte| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte))
    };
    let mut parts = text.splitn(2, |byte| *byte == b'/');
    parts.all(is_token)
}

fn is_http(protocol: &[u8]) -> bool {
    let name = protocol
        .split(|byte| *byte == b'/')
        .next()
        .unwrap_or_default();
    let begins = |kin: &[u8]| {
        name.get(..kin.len())
            .is_some_and(|start| start.eq_ignore_ascii_case(kin))
    };
    HTTP_AGAIN
        .iter()
        .any(|known| name.eq_ignore_ascii_case(known))
        || HTTP_KIN.iter().any(|kin| begins(kin))
}

fn base64(bytes: &[u8]) -> String {
    const SIGNS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let mut three = [0; 3];
        for (to, from) in three.iter_mut().zip(group) {
            *to = *from;
        }
        let [a, b, c] = three.map(u32::from);
        let bits = a << 16 | b << 8 | c;
        for place in 0..4 {
            let sign = usize::try_from(bits >> (18 - 6 * place) & 63)
                .ok()
                .and_then(|sign| SIGNS.get(sign));
            let is_padding = place > group.len();
            text.push(
                sign.filter(|_| !is_padding)
                    .map_or('=', |sign| char::from(*sign)),
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(text: &str) -> Vec<HeaderValue> {
        text.split('\n').map(|line| line.parse().unwrap()).collect()
    }

    fn answer(name: header::HeaderName, lines: &str) -> HeaderMap {
        list(lines)
            .into_iter()
            .map(|line| (name.clone(), line))
            .collect()
    }

    #[test]
    fn what_would_go_on_as_http_does_not_pass() {
        for passes in [
            "websocket",
            "WebSocket",
            "a/1, b/2",
            "tcp",
            "x\ny/2",
            ", x,",
            "h2cc",
        ] {
            assert!(may_pass(&list(passes)), "{passes}");
        }
        for stays in [
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
            assert!(!may_pass(&list(stays)), "{stays}");
        }
    }

    #[test]
    fn only_what_was_offered_is_granted() {
        let grants =
            |offered, chosen| super::grants(&list(offered), &answer(header::UPGRADE, chosen));
        assert!(grants("websocket", "WebSocket"));
        assert!(grants("a/1, b\nc", "c"));
        assert!(grants("a, b, c", "a, c"));
        assert!(!grants("websocket", "h2c"));
        assert!(!grants("websocket", "websocket, h2c"));
        assert!(!grants("websocket", "websocket\nh2c"));
        assert!(!grants("a/1", "a/2"));
        assert!(!grants("websocket", ""));
        assert!(!super::grants(&list("websocket"), &HeaderMap::new()));
        assert!(!super::grants(&[], &answer(header::UPGRADE, "websocket")));
    }

    #[test]
    fn the_proof_is_that_of_the_standard() {
        // RFC 6455, 1.3.
        let key = HeaderValue::from_static("dGhlIHNhbXBsZSBub25jZQ==");
        let proves = |lines| accepts(&key, &answer(header::SEC_WEBSOCKET_ACCEPT, lines));
        assert!(proves("s3pPLMBiTxaQ9kYGzzhZRbK+xOo="));
        assert!(!proves("s3pPLMBiTxaQ9kYGzzhZRbK+xOo"));
        assert!(!proves(
            "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\ns3pPLMBiTxaQ9kYGzzhZRbK+xOo="
        ));
        assert!(!accepts(&key, &HeaderMap::new()));
    }

    #[test]
    fn base64_pads() {
        for (bytes, text) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("\u{ff}?", "w78/"),
        ] {
            assert_eq!(base64(bytes.as_bytes()), text);
        }
    }
}
