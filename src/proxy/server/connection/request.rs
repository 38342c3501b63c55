//! A request of a client connection, from its arrival to the end of its response.

use bytes::{Buf, Bytes};
use http::uri::{Authority, PathAndQuery};
use http::{HeaderValue, Method, Request, Response, StatusCode, Version, header, request};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::upgrade::OnUpgrade;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::time::Instant;

use super::upgrade_handover::{UpgradeHandover, UpgradedRequest};
use crate::proxy::ResponseBody;
use crate::proxy::body::informational_responses::InformationalForwarder;
use crate::proxy::body::{
    BodyError, RequestBody, RequestBodyLimits, RequestBodyProgress, add_to_size_hint,
};
use crate::proxy::client_connection::connection_monitor::{
    ActiveRequestGuard, ConnectionMonitor, StreamProgress,
};
use crate::proxy::client_connection::connection_output::ContinuePermit;
use crate::proxy::client_connection::connection_output::{StreamOutput, UnsentChunkGuard};
use crate::proxy::http::header_lines;
use crate::proxy::http2_frames::field_block_filter::{HeadMark, take_head_mark};
use crate::proxy::http2_frames::frame_limits::MALFORMED_HEAD_COST;
use crate::proxy::server::handler::{ConnectionPeer, RequestHandler};
use crate::proxy::server::listener::WorkerListener;

/// Maximum size of a response chunk passed to HTTP/2. Once h2 has taken a chunk, the client reads,
/// even if slowly.
const H2_MAX_CHUNK_BYTES: usize = 16 * 1024;

/// What the requests of one connection share.
pub(super) struct RequestContext<H> {
    pub(super) handler: Rc<H>,
    pub(super) peer: Arc<ConnectionPeer>,
    pub(super) listener: Rc<WorkerListener>,
    pub(super) monitor: Rc<ConnectionMonitor>,
    pub(super) handover: Rc<UpgradeHandover>,
}

impl<H: RequestHandler> RequestContext<H> {
    /// Passes one request to the handler. The request stays active until the bodies of request and
    /// response are dropped.
    pub(super) fn handle(
        &self,
        request: Request<Incoming>,
    ) -> Pin<Box<impl Future<Output = Result<Response<TrackedResponseBody>, Infallible>> + use<H>>>
    {
        // A request future takes about 4 KiB. It is constructed in its box, which avoids a copy.
        let allocation = Box::new_uninit();
        Box::into_pin(Box::write(allocation, self.begin(request)))
    }

    /// Inlined so that the future is constructed in place instead of being copied.
    #[inline(always)]
    fn begin(
        &self,
        request: Request<Incoming>,
    ) -> impl Future<Output = Result<Response<TrackedResponseBody>, Infallible>> + use<H> {
        let (monitor, settings) = (&self.monitor, &self.listener.config.settings);
        let active = monitor.begin_request();
        let (mut head, incoming) = request.into_parts();
        let upgrade = head.extensions.remove::<OnUpgrade>();
        if upgrade.is_some() {
            self.handover.was_upgrade_requested.set(true);
        }
        if head.version == Version::HTTP_10 {
            monitor.exchange.is_close_delimited.set(true);
        }
        let (is_http2, is_head) = (head.version == Version::HTTP_2, head.method == Method::HEAD);
        let charges_faults = is_http2
            && self.peer.listener_kind.is_public()
            && !monitor.connection.is_from_trusted_proxy();
        let permit = take_mark(&mut head, monitor, charges_faults);
        let limits = RequestBodyLimits {
            idle_timeout: settings.body_idle_timeout,
            min_rate: settings.min_upload_rate,
            max_bytes: settings.max_body_bytes,
        };
        let body = RequestBody::new(&head, incoming, limits, permit, &active);
        let head_bytes = count_head(monitor, &mut head, is_http2);
        let guard = RequestGuard {
            request: active,
            head_bytes,
            body: body.progress(),
            arrived_at: charges_faults.then(Instant::now),
            is_complete: false,
        };
        let (handler, handover) = (Rc::clone(&self.handler), Rc::clone(&self.handover));
        let peer = Arc::clone(&self.peer);
        let mut interim = InformationalForwarder::new(head.version, monitor);
        async move {
            // The handler's future is constructed here, in place: it reserves space for everything
            // that a request may need. Constructed earlier, this future would be stored twice per
            // connection and copied for each request.
            let mut handling = pin!(handler.handle(&mut head, body, &peer, &mut interim));
            let response = poll_fn(|cx| {
                let polled = handling.as_mut().poll(cx);
                if polled.is_pending() {
                    let progress = &guard.request.monitor().stream_progress;
                    progress.set(Some(StreamProgress::AwaitsUpstream));
                }
                polled
            });
            let mut response = response.await;
            let monitor = guard.request.monitor();
            if let Some(body) = &guard.body {
                body.record_response_start();
            }
            monitor.record_response_start();
            if !is_http2
                && (monitor.drain.requested.get().is_some()
                    || monitor.exchange.has_unread_input.get())
                && response.status() != StatusCode::SWITCHING_PROTOCOLS
            {
                // A request that the client sends after the last response is lost unless that
                // response has this header. hyper would add it too late: it is asked to close only
                // when no more input is expected, and notices an unread body later.
                let close = HeaderValue::from_static("close");
                response.headers_mut().insert(header::CONNECTION, close);
            }
            if let (Some(tunnel), Some(client)) = (response.body_mut().take_tunnel(), upgrade) {
                let active = guard.request.clone();
                handover.request.replace(Some(UpgradedRequest {
                    tunnel,
                    client,
                    active,
                }));
            }
            Ok(track_response(response, guard, is_http2, is_head))
        }
    }
}

/// Keeps the request active until its response ends. Drops the body of an HTTP/2 response to HEAD
/// and of a 204 or 304, which must not have one. hyper does this only for HTTP/1.
fn track_response(
    mut response: Response<ResponseBody>,
    mut guard: RequestGuard,
    is_http2: bool,
    is_head: bool,
) -> Response<TrackedResponseBody> {
    let status = response.status();
    let hides_end = !is_http2
        && status == StatusCode::NOT_MODIFIED
        && response.headers().contains_key(header::CONTENT_LENGTH);
    let has_no_body = matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    if is_http2 && (is_head || has_no_body) {
        *response.body_mut() = ResponseBody::Empty;
    }
    response.map(|body| {
        guard.is_complete = body.is_end_stream();
        TrackedResponseBody {
            body,
            hides_end,
            guard,
            is_http2,
            output: None,
            remainder: Bytes::new(),
        }
    })
}

/// Takes the mark of an HTTP/2 head. Returns the permit if the client expects `100 Continue`. The
/// error of a malformed head becomes an extension and, if `charges_faults`, spends frame credit.
fn take_mark(
    head: &mut request::Parts,
    monitor: &ConnectionMonitor,
    charges_faults: bool,
) -> Option<ContinuePermit> {
    if !monitor.has_head_marks.get() {
        return None;
    }
    match take_head_mark(&mut head.headers)? {
        HeadMark::Stream(stream) => Some(ContinuePermit::new(stream)),
        HeadMark::Malformed(error) => {
            head.extensions.insert(error);
            if charges_faults {
                monitor.frame_budget.charge_frames(MALFORMED_HEAD_COST);
            }
            None
        }
    }
}

/// Counts the memory of a head until [`RequestGuard`] is dropped. Returns its size.
fn count_head(monitor: &ConnectionMonitor, head: &mut request::Parts, is_http2: bool) -> usize {
    let decoded_bytes = if is_http2 && monitor.memory.has_large_lists.get() {
        let target = head.uri.path_and_query().map_or("", PathAndQuery::as_str);
        let authority = head.uri.authority().map_or("", Authority::as_str);
        header_lines::compact_header_map(&mut head.headers) + target.len() + authority.len()
    } else {
        0
    };
    monitor.memory.begin_head(is_http2, decoded_bytes)
}

/// Guard of a request, from its arrival to the end of its response. If a client of a public HTTP/2
/// listener cancels the request shortly after its arrival, the connection's frame budget is
/// charged.
struct RequestGuard {
    request: ActiveRequestGuard,
    /// Size of the request head, as far as it counts for the memory budget.
    head_bytes: usize,
    body: Option<Rc<RequestBodyProgress>>,
    /// Arrival time, set only for HTTP/2 clients of a public listener, which can cancel one request
    /// and continue with others. The operator's own proxies may cancel requests when their timeouts
    /// expire.
    arrived_at: Option<Instant>,
    is_complete: bool,
}

impl Drop for RequestGuard {
    /// Records the end of the response, and charges the frame budget if the client cancelled the
    /// request early.
    fn drop(&mut self) {
        if let Some(body) = &self.body {
            body.record_response_end();
        }
        let monitor = self.request.monitor();
        monitor.memory.end_head(self.head_bytes);
        if let Some(arrived) = self.arrived_at.filter(|_| !self.is_complete) {
            monitor.frame_budget.charge_early_reset(arrived.elapsed());
        }
    }
}

/// Response body that keeps its request active and records that the client reads the response.
pub(super) struct TrackedResponseBody {
    body: ResponseBody,
    /// Whether the body of a 304 looks unfinished. hyper removes `Content-Length` from a response
    /// without a body, unless the request is a HEAD. It never sends the body of a 304.
    hides_end: bool,
    guard: RequestGuard,
    is_http2: bool,
    /// Set with the first chunk of an HTTP/2 response.
    output: Option<StreamOutput>,
    /// Rest of the last frame that was split, not yet passed to hyper.
    remainder: Bytes,
}

/// A chunk of a response body.
pub(super) struct ResponseChunk {
    bytes: Bytes,
    /// `None` for HTTP/1.
    _unsent: Option<UnsentChunkGuard>,
}

impl Buf for ResponseChunk {
    fn remaining(&self) -> usize {
        self.bytes.remaining()
    }

    fn chunk(&self) -> &[u8] {
        self.bytes.chunk()
    }

    fn advance(&mut self, count: usize) {
        self.bytes.advance(count);
    }
}

impl Body for TrackedResponseBody {
    type Data = ResponseChunk;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<ResponseChunk>, BodyError>>> {
        // hyper polls for more data once h2 has taken the last chunk.
        let monitor = self.guard.request.monitor();
        let progress = &monitor.stream_progress;
        progress.set(Some(StreamProgress::AwaitsUpstream));
        // hyper and h2 buffer tens of KiB of a response. While the socket accepts no bytes, more
        // data stays with the upstream.
        ready!(monitor.output.poll_write_progress(cx));
        if !self.is_http2 && monitor.output.collectable_bytes.get() == 0 {
            // hyper writes what it has before it polls again. With nothing to write, the number of
            // collectable bytes is not 0: only chunks that hyper buffers are subtracted.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        if self.remainder.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.remainder = data,
                    Err(trailers) => {
                        self.guard.is_complete = true;
                        let mut trailers = trailers.into_trailers().unwrap_or_default();
                        if self.is_http2 {
                            header_lines::remove_invalid_trailers(&mut trailers);
                        }
                        return Poll::Ready(Some(Ok(Frame::trailers(trailers))));
                    }
                },
                end => {
                    self.guard.is_complete = true;
                    return Poll::Ready(end.and_then(Result::err).map(Err));
                }
            }
        }
        let monitor = self.guard.request.monitor();
        monitor.frame_budget.credit_response();
        let progress = &monitor.stream_progress;
        progress.set(Some(StreamProgress::AwaitsClient));
        let (max_bytes, unsent) = if self.is_http2 {
            let responses = Rc::clone(&monitor.output.unsent_responses);
            let new_output = || StreamOutput::new(&responses);
            let output = self.output.get_or_insert_with(new_output);
            (H2_MAX_CHUNK_BYTES, Some(output.begin_chunk()))
        } else {
            let collectable = &monitor.output.collectable_bytes;
            collectable.update(|bytes| bytes.saturating_sub(self.remainder.len()));
            (usize::MAX, None)
        };
        let chunk_bytes = max_bytes.min(self.remainder.len());
        let chunk = ResponseChunk {
            bytes: self.remainder.split_to(chunk_bytes),
            _unsent: unsent,
        };
        self.guard.is_complete = self.is_end_stream();
        Poll::Ready(Some(Ok(Frame::data(chunk))))
    }

    fn is_end_stream(&self) -> bool {
        !self.hides_end && self.remainder.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.hides_end {
            return SizeHint::default();
        }
        add_to_size_hint(self.body.size_hint(), self.remainder.len())
    }
}
