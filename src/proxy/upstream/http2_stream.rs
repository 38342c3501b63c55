//! One request on an HTTP/2 connection: its head, its body on the way up, its answer on the way down, and what
//! becomes of it as a tunnel.

use bytes::{Buf, Bytes};
use h2::{Reason, RecvStream, SendStream};
use http::uri::{Authority, Parts};
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, Uri, Version, header, request};
use http_body::{Body, Frame, SizeHint};
use smallvec::SmallVec;
use std::future::{Future, poll_fn};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::AbortHandle;

use super::pool::UpstreamConnection;
use crate::proxy::http::body::RequestBody;
use crate::proxy::http::{hop_by_hop, upgrade};

/// The most that is handed to a tunnel's stream at once.
const MAX_TUNNEL_CHUNK_BYTES: usize = 16 * 1024;

/// Makes an HTTP/1.1 head into one for HTTP/2 (RFC 9113, 8.2.2 and 8.3.1): the target is a whole URL, and there is
/// nothing about the connection but `te: trailers`.
///
/// Returns `None`, with the head half changed, for a `Host` that is no authority; the gate lets none pass.
pub(super) fn convert_head_to_http2(head: &mut request::Parts, is_secure: bool) -> Option<()> {
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

/// Makes the GET that opens a WebSocket into an extended CONNECT (RFC 8441, 5). Returns the key that the client
/// wants a proof for.
pub(super) fn convert_to_extended_connect(head: &mut request::Parts) -> Option<HeaderValue> {
    head.method = Method::CONNECT;
    head.extensions
        .insert(h2::ext::Protocol::from_static("websocket"));
    head.headers.remove(header::CONTENT_LENGTH);
    head.headers.remove(header::SEC_WEBSOCKET_KEY)
}

/// Makes the answer to an extended CONNECT into what an HTTP/1.1 upstream would have said.
pub(super) fn convert_to_switching_protocols<B>(response: &mut Response<B>, key: &HeaderValue) {
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(
        header::SEC_WEBSOCKET_ACCEPT,
        upgrade::websocket_accept_value(key),
    );
}

/// A request's body on its way. Dropped, it is given up.
#[derive(Debug)]
pub(super) struct BodyUpload(AbortHandle);

impl BodyUpload {
    /// Sends `body`, as far as it goes at once; then in the background. `declared`: the request's `Trailer` fields,
    /// which the gate has seen: only what they name may follow the body.
    pub(super) async fn start(
        body: RequestBody,
        stream: SendStream<Bytes>,
        declared_trailers: SmallVec<[HeaderValue; 1]>,
    ) -> Option<Self> {
        let mut upload = BodyUploadFuture {
            body,
            stream,
            declared_trailers,
            pending_chunk: Bytes::new(),
            is_last: false,
        };
        if poll_fn(|cx| Poll::Ready(Pin::new(&mut upload).poll(cx)))
            .await
            .is_ready()
        {
            return None;
        }
        Some(Self(tokio::task::spawn_local(upload).abort_handle()))
    }
}

impl Drop for BodyUpload {
    fn drop(&mut self) {
        self.0.abort();
    }
}

struct BodyUploadFuture {
    body: RequestBody,
    stream: SendStream<Bytes>,
    declared_trailers: SmallVec<[HeaderValue; 1]>,
    /// Of the last part, what the upstream has no room for yet.
    pending_chunk: Bytes,
    /// Nothing comes after the part.
    is_last: bool,
}

impl Future for BodyUploadFuture {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        // What went wrong with the stream is told to whoever waits for the answer.
        this.poll_upload(cx).map(|_sent| ())
    }
}

impl BodyUploadFuture {
    fn poll_upload(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        loop {
            // The upstream may have heard enough.
            if self.stream.poll_reset(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            while !self.pending_chunk.is_empty() {
                let capacity = ready!(poll_send_capacity(
                    &mut self.stream,
                    self.pending_chunk.len(),
                    cx
                ))?;
                let chunk = self
                    .pending_chunk
                    .split_to(capacity.min(self.pending_chunk.len()));
                let ends_stream = self.is_last && self.pending_chunk.is_empty();
                self.stream.send_data(chunk, ends_stream)?;
                if ends_stream {
                    return Poll::Ready(Ok(()));
                }
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(chunk) => {
                        self.is_last = self.body.is_end_stream();
                        if chunk.is_empty() && self.is_last {
                            return Poll::Ready(self.stream.send_data(chunk, true));
                        }
                        self.pending_chunk = chunk;
                    }
                    Err(frame) => return Poll::Ready(self.finish_with_trailers(frame)),
                },
                None => return Poll::Ready(self.stream.send_data(Bytes::new(), true)),
                // What was cut off must not look complete.
                Some(Err(_told_by_progress)) => {
                    self.stream.send_reset(Reason::CANCEL);
                    return Poll::Ready(Ok(()));
                }
            }
        }
    }

    fn finish_with_trailers(&mut self, frame: Frame<Bytes>) -> Result<(), h2::Error> {
        let mut trailers = frame.into_trailers().unwrap_or_default();
        let undeclared: SmallVec<[_; 4]> = trailers
            .keys()
            .filter(|name| {
                let mut declared_names = self
                    .declared_trailers
                    .iter()
                    .flat_map(hop_by_hop::list_elements);
                !declared_names.any(|item| item.eq_ignore_ascii_case(name.as_str().as_bytes()))
            })
            .cloned()
            .collect();
        for name in undeclared {
            trailers.remove(name);
        }
        if trailers.is_empty() {
            self.stream.send_data(Bytes::new(), true)
        } else {
            self.stream.send_trailers(trailers)
        }
    }
}

/// Waits until the stream has room for some of `wanted` bytes.
fn poll_send_capacity(
    stream: &mut SendStream<Bytes>,
    requested_bytes: usize,
    cx: &mut Context<'_>,
) -> Poll<Result<usize, h2::Error>> {
    stream.reserve_capacity(requested_bytes);
    loop {
        match stream.capacity() {
            0 => match ready!(stream.poll_capacity(cx)) {
                Some(capacity) => drop(capacity?),
                None => return Poll::Ready(Err(Reason::STREAM_CLOSED.into())),
            },
            capacity => return Poll::Ready(Ok(capacity)),
        }
    }
}

/// A response's body as it comes.
#[derive(Debug)]
pub(crate) struct Http2ResponseBody {
    stream: RecvStream,
    /// As declared.
    remaining_bytes: Option<u64>,
    data_ended: bool,
}

impl Http2ResponseBody {
    pub(super) fn new(stream: RecvStream, headers: &HeaderMap) -> Self {
        let length = headers
            .get(header::CONTENT_LENGTH)
            .and_then(|length| length.to_str().ok()?.parse().ok());
        Self {
            stream,
            remaining_bytes: length,
            data_ended: false,
        }
    }

    /// The next part. A stream that was reset is an error, whatever the reason: an end is said by END_STREAM only.
    pub(crate) fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        if !self.data_ended {
            match ready!(self.stream.poll_data(cx)) {
                Some(Ok(data)) => {
                    self.stream.flow_control().release_capacity(data.len())?;
                    if let Some(remaining) = &mut self.remaining_bytes {
                        *remaining =
                            remaining.saturating_sub(u64::try_from(data.len()).unwrap_or(u64::MAX));
                    }
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => self.data_ended = true,
            }
        }
        self.stream
            .poll_trailers(cx)
            .map(|trailers| trailers.map(|some| some.map(Frame::trailers)).transpose())
    }

    pub(crate) fn is_end_stream(&self) -> bool {
        self.stream.is_end_stream()
    }

    pub(crate) fn size_hint(&self) -> SizeHint {
        self.remaining_bytes
            .map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

/// A stream as bytes both ways. Dropped before both ends, it is reset.
#[derive(Debug)]
pub(crate) struct Http2TunnelIo {
    send_stream: SendStream<Bytes>,
    recv_stream: RecvStream,
    read_buffer: Bytes,
    write_closed: bool,
    _connection: Box<UpstreamConnection>,
}

impl Http2TunnelIo {
    pub(super) fn new(
        send_stream: SendStream<Bytes>,
        recv_stream: RecvStream,
        connection: Box<UpstreamConnection>,
    ) -> Self {
        Self {
            send_stream,
            recv_stream,
            read_buffer: Bytes::new(),
            write_closed: false,
            _connection: connection,
        }
    }
}

impl AsyncRead for Http2TunnelIo {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while this.read_buffer.is_empty() {
            match ready!(this.recv_stream.poll_data(cx)) {
                Some(data) => this.read_buffer = data.map_err(io::Error::other)?,
                None => return Poll::Ready(Ok(())),
            }
        }
        let chunk = this
            .read_buffer
            .split_to(this.read_buffer.len().min(into.remaining()));
        into.put_slice(&chunk);
        // Only what has gone on makes room for more.
        this.recv_stream
            .flow_control()
            .release_capacity(chunk.len())
            .map_err(io::Error::other)?;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Http2TunnelIo {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let requested_bytes = bytes.len().min(MAX_TUNNEL_CHUNK_BYTES);
        let capacity = ready!(poll_send_capacity(
            &mut this.send_stream,
            requested_bytes,
            cx
        ))
        .map_err(io::Error::other)?;
        let chunk = bytes.copy_to_bytes(capacity.min(requested_bytes));
        let taken = chunk.len();
        this.send_stream
            .send_data(chunk, false)
            .map_err(io::Error::other)?;
        Poll::Ready(Ok(taken))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if std::mem::replace(&mut this.write_closed, true) {
            return Poll::Ready(Ok(()));
        }
        Poll::Ready(
            this.send_stream
                .send_data(Bytes::new(), true)
                .map_err(io::Error::other),
        )
    }
}
