//! State of one HTTP/2 connection: its streams and the cancellation of requests.

use bytes::Bytes;
use h2::SendStream;
use h2::client::{ResponseFuture, SendRequest};
use http::{Request, Response};
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::received_stream::{ReceivedStream, ReceivedStreams};
use crate::proxy::connection_io::LazyTimer;

/// Maximum streams per connection, even if the upstream allows more.
pub(crate) const MAX_CONCURRENT_STREAMS: usize = 100;
/// Number of requests that may be cancelled. Each response head restores one, up to this number. At
/// zero the connection is retired.
///
/// Servers treat frequent cancellation as an attack (CVE-2023-44487) and close the connection with
/// all its requests; h2 and hyper tolerate 20 unprocessed cancelled requests. The budget keeps one
/// client's disconnects from ending the requests of other clients.
const CANCELLATION_BUDGET: u32 = 10;
/// Delay of cancellations beyond the budget, in which the upstream can process the abandoned
/// requests.
const DEFERRED_CANCEL_DELAY: Duration = Duration::from_secs(1);

/// An open HTTP/2 connection. Dropping the last handle closes it.
pub(crate) struct Http2Connection {
    sender: SendRequest<Bytes>,
    /// IP address of the upstream.
    pub(crate) peer: Option<IpAddr>,
    /// Number of reserved streams, one per request in progress.
    active_streams: Cell<usize>,
    /// Whether the connection takes no new requests and closes after the last one ends.
    pub(crate) closing: Cell<bool>,
    /// Whether a response timed out and no PONG has arrived since. A suspect connection takes no
    /// new requests.
    pub(super) is_suspect: Cell<bool>,
    pub(crate) was_used: Cell<bool>,
    /// Remaining cancellations; see [`CANCELLATION_BUDGET`].
    cancellation_budget: Cell<u32>,
    deferred_cancels: RefCell<DeferredCancels>,
    received_streams: ReceivedStreams,
    idle_since: Cell<Instant>,
    pub(super) driver_waker: RefCell<Option<Waker>>,
    pub(crate) task: Cell<Option<AbortHandle>>,
}

/// Future of the response head. Dropping it before completion cancels the request, possibly with a
/// delay.
pub(crate) struct Http2ResponseFuture {
    response: Option<ResponseFuture>,
    connection: Rc<Http2Connection>,
}

/// Abandoned requests that will be cancelled after [`DEFERRED_CANCEL_DELAY`].
#[derive(Default)]
struct DeferredCancels {
    requests: Vec<ResponseFuture>,
    since: Option<Instant>,
}

impl Http2Connection {
    pub(super) fn new(sender: SendRequest<Bytes>, peer: Option<IpAddr>) -> Self {
        Self {
            sender,
            peer,
            active_streams: Cell::new(0),
            closing: Cell::new(false),
            is_suspect: Cell::new(false),
            was_used: Cell::new(false),
            cancellation_budget: Cell::new(CANCELLATION_BUDGET),
            deferred_cancels: RefCell::default(),
            received_streams: ReceivedStreams::default(),
            idle_since: Cell::new(Instant::now()),
            driver_waker: RefCell::default(),
            task: Cell::default(),
        }
    }

    /// Reserves a stream if the connection has capacity. Returns whether a stream was reserved.
    pub(crate) fn try_reserve_stream(&self) -> bool {
        let max_streams = self
            .sender
            .current_max_send_streams()
            .min(MAX_CONCURRENT_STREAMS);
        let is_available = !self.closing.get()
            && !self.is_suspect.get()
            && self.active_streams.get() < max_streams;
        if is_available {
            self.active_streams.update(|value| value + 1);
        }
        is_available
    }

    /// Releases a stream that [`Http2Connection::try_reserve_stream`] reserved.
    pub(crate) fn release_stream(&self) {
        self.active_streams.update(|value| value - 1);
        if self.active_streams.get() == 0 {
            self.idle_since.set(Instant::now());
        }
    }

    /// Whether the upstream announced support for extended CONNECT (RFC 8441, 3).
    pub(crate) fn supports_extended_connect(&self) -> bool {
        self.sender.is_extended_connect_protocol_enabled()
    }

    /// Sends a request head. With `has_body`, the stream stays open for the body.
    ///
    /// # Errors
    /// Fails, without sending anything, if the head is invalid, or the connection takes no more
    /// requests: then it is `closing`.
    pub(crate) fn send_request_head(
        self: &Rc<Self>,
        request: Request<()>,
        has_body: bool,
    ) -> Result<(Http2ResponseFuture, SendStream<Bytes>), h2::Error> {
        // Each request uses its own clone of the sender, so that requests waiting for capacity do
        // not block each other.
        let mut sender = self.sender.clone();
        if let Poll::Ready(Err(error)) = sender.poll_ready(&mut Context::from_waker(Waker::noop()))
        {
            self.closing.set(true);
            return Err(error);
        }
        let (response, send_stream) = sender.send_request(request, !has_body)?;
        let response = Http2ResponseFuture {
            response: Some(response),
            connection: Rc::clone(self),
        };
        Ok((response, send_stream))
    }

    /// Records that a response timed out. The connection takes no new requests until the upstream
    /// answers a PING.
    pub(crate) fn mark_suspect(&self) {
        self.is_suspect.set(true);
        self.wake_driver();
    }

    /// Maximum concurrent streams that both the upstream and the proxy allow on this connection, at
    /// least 1.
    pub(crate) fn max_streams(&self) -> usize {
        let allowed = self.sender.current_max_send_streams();
        allowed.clamp(1, MAX_CONCURRENT_STREAMS)
    }

    /// Cancels a request, or defers the cancellation if the cancellation budget is used up.
    fn cancel_or_defer_request(&self, request: ResponseFuture) {
        let Some(remaining) = self.cancellation_budget.get().checked_sub(1) else {
            let mut deferred = self.deferred_cancels.borrow_mut();
            deferred.requests.push(request);
            if deferred.since.is_none() {
                deferred.since = Some(Instant::now());
                self.wake_driver();
            }
            return;
        };
        self.cancellation_budget.set(remaining);
        if remaining == 0 {
            tracing::debug!("upstream connection retired after too many cancelled requests");
            self.closing.set(true);
        }
    }

    /// Cancels all deferred requests if [`DEFERRED_CANCEL_DELAY`] has passed since the first one.
    pub(super) fn cancel_deferred_if_due(&self, timer: &mut LazyTimer, cx: &mut Context<'_>) {
        let Some(since) = self.deferred_cancels.borrow().since else {
            return;
        };
        if timer.poll(since + DEFERRED_CANCEL_DELAY, cx).is_ready() {
            drop(self.deferred_cancels.take());
        }
    }

    /// Takes the unread frames of all streams out of h2, and cancels the abandoned requests that
    /// the upstream has answered: their responses have no reader.
    pub(super) fn collect_unread_frames(&self) {
        self.received_streams.collect();
        let mut cx = Context::from_waker(Waker::noop());
        let requests = &mut self.deferred_cancels.borrow_mut().requests;
        requests.retain_mut(|request| Pin::new(request).poll(&mut cx).is_pending());
    }

    fn wake_driver(&self) {
        if let Some(driver) = &*self.driver_waker.borrow() {
            driver.wake_by_ref();
        }
    }

    /// Start of the connection's idle time; `None` while it has requests.
    pub(crate) fn idle_since(&self) -> Option<Instant> {
        (self.active_streams.get() == 0).then(|| self.idle_since.get())
    }
}

impl Http2ResponseFuture {
    /// Polls for informational (1xx) response heads.
    pub(crate) fn poll_informational_response(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Response<()>, h2::Error>>> {
        match &mut self.response {
            Some(response) => response.poll_informational(cx),
            None => Poll::Ready(None),
        }
    }
}

impl Future for Http2ResponseFuture {
    type Output = Result<Response<ReceivedStream>, h2::Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(response) = &mut self.response else {
            return Poll::Pending;
        };
        let answer = ready!(Pin::new(response).poll(cx));
        self.response = None;
        let budget = &self.connection.cancellation_budget;
        budget.set((budget.get() + 1).min(CANCELLATION_BUDGET));
        let streams = &self.connection.received_streams;
        Poll::Ready(answer.map(|response| response.map(|stream| streams.add(stream))))
    }
}

impl Drop for Http2ResponseFuture {
    fn drop(&mut self) {
        if let Some(response) = self.response.take() {
            self.connection.cancel_or_defer_request(response);
        }
    }
}

impl Drop for Http2Connection {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

impl std::fmt::Debug for Http2Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Http2Connection")
            .field("streams", &self.active_streams)
            .finish_non_exhaustive()
    }
}
