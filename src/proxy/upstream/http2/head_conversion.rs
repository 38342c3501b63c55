//! Conversion of request and response heads between HTTP/1.1 and HTTP/2.

use http::uri::{Authority, Parts};
use http::{HeaderValue, Method, Response, StatusCode, Uri, Version, header, request};

use crate::proxy::http::upgrade;

/// Converts an HTTP/1.1 request head to HTTP/2 (RFC 9113, 8.2.2 and 8.3.1). The target becomes an
/// absolute URI, and the connection headers except `te` are removed.
///
/// Returns `None`, with a partly changed head, if `Host` is missing or not an authority. This does
/// not occur after request validation.
pub(crate) fn convert_request_head_to_http2(
    head: &mut request::Parts,
    is_secure: bool,
) -> Option<()> {
    let host = head.headers.remove(header::HOST)?;
    let mut parts = Parts::default();
    parts.scheme = Some(if is_secure {
        http::uri::Scheme::HTTPS
    } else {
        http::uri::Scheme::HTTP
    });
    parts.authority = Some(Authority::try_from(host.as_bytes()).ok()?);
    parts.path_and_query = head.uri.path_and_query().cloned();
    head.uri = Uri::from_parts(parts).ok()?;
    head.version = Version::HTTP_2;
    for name in [
        header::CONNECTION,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
    ] {
        head.headers.remove(name);
    }
    Some(())
}

/// Converts a WebSocket GET to an extended CONNECT (RFC 8441, 5). Removes and returns the
/// `Sec-WebSocket-Key`, from which the `Sec-WebSocket-Accept` of the response is computed.
pub(crate) fn convert_to_extended_connect(head: &mut request::Parts) -> Option<HeaderValue> {
    head.method = Method::CONNECT;
    head.extensions
        .insert(h2::ext::Protocol::from_static("websocket"));
    head.headers.remove(header::CONTENT_LENGTH);
    head.headers.remove(header::SEC_WEBSOCKET_KEY)
}

/// Converts the successful response to an extended CONNECT to HTTP/1.1 `101 Switching Protocols`.
pub(crate) fn convert_to_switching_protocols<B>(response: &mut Response<B>, key: &HeaderValue) {
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(
        header::SEC_WEBSOCKET_ACCEPT,
        upgrade::websocket_accept_value(key),
    );
}
