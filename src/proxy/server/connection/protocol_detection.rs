//! Detects the protocol of a connection from its first bytes.

use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, ReadBuf};

use crate::proxy::server::monitored_socket::MonitoredSocket;

/// HTTP/2 client connection preface (RFC 9113, 3.4).
pub(super) const HTTP2_PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub(super) enum DetectedProtocol {
    Http1,
    Http2,
    /// The client disconnected, or the connection was asked to close, before any byte arrived.
    Disconnected,
}

/// Reads until the first bytes are, or cannot be, the HTTP/2 preface. If `close` is true, it does
/// not wait for the first byte.
pub(super) fn poll_detect_protocol(
    socket: &mut MonitoredSocket,
    first_bytes: &mut Vec<u8>,
    cx: &mut Context<'_>,
    close: bool,
) -> Poll<DetectedProtocol> {
    loop {
        let mut bytes = [0; HTTP2_PREFACE.len()];
        let unfilled = bytes.get_mut(first_bytes.len()..).unwrap_or_default();
        let mut into = ReadBuf::new(unfilled);
        match Pin::new(&mut *socket).poll_read(cx, &mut into) {
            Poll::Pending if close && first_bytes.is_empty() => {
                return Poll::Ready(DetectedProtocol::Disconnected);
            }
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Err(_)) => return Poll::Ready(DetectedProtocol::Disconnected),
            Poll::Ready(Ok(())) if into.filled().is_empty() && first_bytes.is_empty() => {
                return Poll::Ready(DetectedProtocol::Disconnected);
            }
            // A truncated request is left to hyper's HTTP/1 parser.
            Poll::Ready(Ok(())) if into.filled().is_empty() => {
                return Poll::Ready(DetectedProtocol::Http1);
            }
            Poll::Ready(Ok(())) => first_bytes.extend_from_slice(into.filled()),
        }
        if !HTTP2_PREFACE.starts_with(first_bytes) {
            return Poll::Ready(DetectedProtocol::Http1);
        }
        if first_bytes.len() == HTTP2_PREFACE.len() {
            return Poll::Ready(DetectedProtocol::Http2);
        }
    }
}
