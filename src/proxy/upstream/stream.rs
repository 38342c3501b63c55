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

use super::pool::Connection;
use crate::proxy::body::RequestBody;
use crate::proxy::{gate, upgrade};

/// The most that is handed to a tunnel's stream at once.
const PART_BYTES: usize = 16 * 1024;

/// Makes an HTTP/1.1 head into one for HTTP/2 (RFC 9113, 8.2.2 and 8.3.1): the target is a whole URL, and there is
/// nothing about the connection but `te: trailers`.
///
/// Returns `None`, with the head half changed, for a `Host` that is no authority; the gate lets none pass.
pub(super) fn head_for_http2(head: &mut request::Parts, is_secure: bool) -> Option<()> {
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
pub(super) fn connect_from_get(head: &mut request::Parts) -> Option<HeaderValue> {
    head.method = Method::CONNECT;
    head.extensions
        .insert(h2::ext::Protocol::from_static("websocket"));
    head.headers.remove(header::CONTENT_LENGTH);
    head.headers.remove(header::SEC_WEBSOCKET_KEY)
}

/// Makes the answer to an extended CONNECT into what an HTTP/1.1 upstream would have said.
pub(super) fn switched<B>(response: &mut Response<B>, key: &HeaderValue) {
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert(header::UPGRADE, HeaderValue::from_static("websocket"));
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::SEC_WEBSOCKET_ACCEPT, upgrade::proof_for(key));
}

/// A request's body on its way. Dropped, it is given up.
#[derive(Debug)]
pub(super) struct Upload(AbortHandle);

impl Upload {
    /// Sends `body`, as far as it goes at once; then in the background. `declared`: the request's `Trailer` fields,
    /// which the gate has seen: only what they name may follow the body.
    pub(super) async fn start(
        body: RequestBody,
        stream: SendStream<Bytes>,
        declared: SmallVec<[HeaderValue; 1]>,
    ) -> Option<Self> {
        let mut sending = Sending {
            body,
            stream,
            declared,
            part: Bytes::new(),
            is_last: false,
        };
        if poll_fn(|cx| Poll::Ready(Pin::new(&mut sending).poll(cx)))
            .await
            .is_ready()
        {
            return None;
        }
        Some(Self(tokio::task::spawn_local(sending).abort_handle()))
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.0.abort();
    }
}

struct Sending {
    body: RequestBody,
    stream: SendStream<Bytes>,
    declared: SmallVec<[HeaderValue; 1]>,
    /// Of the last part, what the upstream has no room for yet.
    part: Bytes,
    /// Nothing comes after the part.
    is_last: bool,
}

impl Future for Sending {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        // What went wrong with the stream is told to whoever waits for the answer.
        this.poll_all(cx).map(|_sent| ())
    }
}

impl Sending {
    fn poll_all(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), h2::Error>> {
        loop {
            // The upstream may have heard enough.
            if self.stream.poll_reset(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            while !self.part.is_empty() {
                let room = ready!(poll_room(&mut self.stream, self.part.len(), cx))?;
                let now = self.part.split_to(room.min(self.part.len()));
                let ends = self.is_last && self.part.is_empty();
                self.stream.send_data(now, ends)?;
                if ends {
                    return Poll::Ready(Ok(()));
                }
            }
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(part) => {
                        self.is_last = self.body.is_end_stream();
                        if part.is_empty() && self.is_last {
                            return Poll::Ready(self.stream.send_data(part, true));
                        }
                        self.part = part;
                    }
                    Err(frame) => return Poll::Ready(self.end(frame)),
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

    fn end(&mut self, frame: Frame<Bytes>) -> Result<(), h2::Error> {
        let mut trailers = frame.into_trailers().unwrap_or_default();
        let undeclared: SmallVec<[_; 4]> = trailers
            .keys()
            .filter(|name| {
                let mut declared = self.declared.iter().flat_map(gate::elements);
                !declared.any(|item| item.eq_ignore_ascii_case(name.as_str().as_bytes()))
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
fn poll_room(
    stream: &mut SendStream<Bytes>,
    wanted: usize,
    cx: &mut Context<'_>,
) -> Poll<Result<usize, h2::Error>> {
    stream.reserve_capacity(wanted);
    loop {
        match stream.capacity() {
            0 => match ready!(stream.poll_capacity(cx)) {
                Some(room) => drop(room?),
                None => return Poll::Ready(Err(Reason::STREAM_CLOSED.into())),
            },
            room => return Poll::Ready(Ok(room)),
        }
    }
}

/// A response's body as it comes.
#[derive(Debug)]
pub(crate) struct Receiving {
    stream: RecvStream,
    /// As declared.
    length: Option<u64>,
    data_is_over: bool,
}

impl Receiving {
    pub(super) fn new(stream: RecvStream, headers: &HeaderMap) -> Self {
        let length = headers
            .get(header::CONTENT_LENGTH)
            .and_then(|length| length.to_str().ok()?.parse().ok());
        Self {
            stream,
            length,
            data_is_over: false,
        }
    }

    /// The next part. A stream that was reset is an error, whatever the reason: an end is said by END_STREAM only.
    pub(crate) fn poll_frame(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, h2::Error>>> {
        if !self.data_is_over {
            match ready!(self.stream.poll_data(cx)) {
                Some(Ok(data)) => {
                    self.stream.flow_control().release_capacity(data.len())?;
                    if let Some(left) = &mut self.length {
                        *left = left.saturating_sub(u64::try_from(data.len()).unwrap_or(u64::MAX));
                    }
                    return Poll::Ready(Some(Ok(Frame::data(data))));
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => self.data_is_over = true,
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
        self.length
            .map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

/// A stream as bytes both ways. Dropped before both ends, it is reset.
#[derive(Debug)]
pub(crate) struct Duplex {
    sending: SendStream<Bytes>,
    receiving: RecvStream,
    unread: Bytes,
    has_ended: bool,
    _place: Box<Connection>,
}

impl Duplex {
    pub(super) fn new(
        sending: SendStream<Bytes>,
        receiving: RecvStream,
        place: Box<Connection>,
    ) -> Self {
        Self {
            sending,
            receiving,
            unread: Bytes::new(),
            has_ended: false,
            _place: place,
        }
    }
}

impl AsyncRead for Duplex {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while this.unread.is_empty() {
            match ready!(this.receiving.poll_data(cx)) {
                Some(data) => this.unread = data.map_err(io::Error::other)?,
                None => return Poll::Ready(Ok(())),
            }
        }
        let part = this
            .unread
            .split_to(this.unread.len().min(into.remaining()));
        into.put_slice(&part);
        // Only what has gone on makes room for more.
        this.receiving
            .flow_control()
            .release_capacity(part.len())
            .map_err(io::Error::other)?;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Duplex {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        mut bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let wanted = bytes.len().min(PART_BYTES);
        let room = ready!(poll_room(&mut this.sending, wanted, cx)).map_err(io::Error::other)?;
        let part = bytes.copy_to_bytes(room.min(wanted));
        let taken = part.len();
        this.sending
            .send_data(part, false)
            .map_err(io::Error::other)?;
        Poll::Ready(Ok(taken))
    }

    fn poll_flush(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if std::mem::replace(&mut this.has_ended, true) {
            return Poll::Ready(Ok(()));
        }
        Poll::Ready(
            this.sending
                .send_data(Bytes::new(), true)
                .map_err(io::Error::other),
        )
    }
}
