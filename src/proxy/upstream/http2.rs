//! HTTP/2 towards the upstream: one connection that carries many requests.
//!
//! h2 is used directly, not through hyper's client: that would run two tasks per request, and could not
//! take back an upload whose answer has been read, nor tell a request that the upstream refused unseen.

use bytes::Bytes;
use h2::client::{Builder, ResponseFuture, SendRequest};
use h2::{Ping, PingPong, RecvStream, SendStream};
use http::{Request, Response};
use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::net::IpAddr;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::connect::Stream;
use super::pool::Pool;
use super::stream::Upload;
use super::{Failure, MAX_RESPONSE_HEAD_BYTES, UpstreamError, UpstreamErrorKind, with_causes};
use crate::proxy::alarm::Alarm;

/// Requests at a time on one connection, if the upstream allows as many.
pub(super) const MAX_STREAMS: usize = 100;
/// What an upstream may send before the client has taken it: per request, and per connection. The second is so
/// large that clients who don't read hold up nobody but themselves.
const STREAM_WINDOW_BYTES: u32 = 256 * 1024;
const CONNECTION_WINDOW_BYTES: u32 = 100 * STREAM_WINDOW_BYTES;
/// A request's part that waits for the upstream's window.
const SEND_BUFFER_BYTES: usize = 64 * 1024;
/// Requests that were given up lately: what the upstream had already sent for them is not its fault.
const RESETS_REMEMBERED: usize = 1000;

/// How many requests may be given up before the upstream has answered as many others, until a connection gets no more
/// of them. Servers take a peer who sends requests and takes them back for an attacker and end the connection with all
/// that is on it (CVE-2023-44487; h2 and hyper allow 20 that nobody has looked at yet): no client's doing may end the
/// requests of others.
const PATIENCE: u32 = 10;
/// What is given up beyond that is so after this long only: by then the upstream has looked at it.
const GRACE: Duration = Duration::from_secs(1);

/// A silent upstream is asked for a sign of life. gRPC servers take more than two PINGs in a row for abuse if
/// they come within five minutes of each other.
const PING_AFTER: [Duration; 3] = [
    Duration::from_secs(20),
    Duration::from_secs(60),
    Duration::from_secs(330),
];
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection. Dropping it closes it.
pub(super) struct Link {
    sender: SendRequest<Bytes>,
    /// The address at the other end.
    pub(super) peer: Option<IpAddr>,
    /// Requests on it.
    streams: Cell<usize>,
    /// It is over, or is to be when its last request is.
    closing: Cell<bool>,
    /// It was slow to answer, and hasn't been heard of since.
    suspect: Cell<bool>,
    used: Cell<bool>,
    /// Requests that may still be given up, see [`PATIENCE`].
    patience: Cell<u32>,
    given_up: RefCell<GivenUp>,
    idle_since: Cell<Instant>,
    driver: RefCell<Option<Waker>>,
    task: Cell<Option<AbortHandle>>,
}

/// Room for one request on a [`Link`]; dropping it ends the request.
#[derive(Debug)]
pub(super) struct Place {
    link: Rc<Link>,
    pool: Rc<Pool>,
    is_first: bool,
    upload: Option<Upload>,
}

/// What the upstream says to a request. Dropped before that, the request is given up.
pub(super) struct Answer {
    awaited: Option<ResponseFuture>,
    link: Rc<Link>,
}

/// Requests that nobody waits for any more and that are not taken back yet.
#[derive(Default)]
struct GivenUp {
    requests: Vec<ResponseFuture>,
    since: Option<Instant>,
}

/// A request of which nothing was sent.
pub(super) struct NotBegun {
    /// The connection takes no more requests.
    pub(super) is_gone: bool,
    pub(super) error: h2::Error,
}

/// Speaks HTTP/2 on a new connection. It is open when the upstream has said what it allows: who doesn't speak HTTP/2
/// is found out before there is a request that it could have seen.
///
/// # Errors
/// When the upstream says anything else, or nothing within `limit`.
pub(super) async fn open(
    stream: Stream,
    limit: Duration,
) -> Result<(Rc<Link>, Driver), UpstreamError> {
    let (heard, peer) = (stream.heard(), stream.peer());
    let mut builder = Builder::new();
    builder
        .enable_push(false)
        // None until it says how many.
        .initial_max_send_streams(0)
        .initial_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_header_list_size(MAX_RESPONSE_HEAD_BYTES)
        .max_send_buffer_size(SEND_BUFFER_BYTES)
        .max_concurrent_reset_streams(RESETS_REMEMBERED)
        // Counted over the connection's life, which may be long.
        .max_local_error_reset_streams(None);
    let failed = |error: h2::Error| UpstreamError {
        kind: kind(&error),
        detail: format!("no HTTP/2: {}", with_causes(&error)),
    };
    let agreeing = async {
        let (sender, mut connection) = builder.handshake(stream).await.map_err(failed)?;
        poll_fn(|cx| match Pin::new(&mut connection).poll(cx) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(failed(error))),
            Poll::Ready(Ok(())) => Poll::Ready(Err(UpstreamError {
                kind: UpstreamErrorKind::Terminated,
                detail: "closed before it spoke HTTP/2".to_owned(),
            })),
            Poll::Pending if sender.current_max_send_streams() > 0 => Poll::Ready(Ok(())),
            Poll::Pending => Poll::Pending,
        })
        .await?;
        Ok((sender, connection))
    };
    let (sender, mut connection) =
        tokio::time::timeout(limit, agreeing)
            .await
            .unwrap_or_else(|_elapsed| {
                let detail = format!("it did not begin to speak HTTP/2 within {limit:?}");
                Err(UpstreamError {
                    kind: UpstreamErrorKind::ConnectTimeout,
                    detail,
                })
            })?;
    let link = Rc::new(Link {
        sender,
        peer,
        streams: Cell::new(0),
        closing: Cell::new(false),
        suspect: Cell::new(false),
        used: Cell::new(false),
        patience: Cell::new(PATIENCE),
        given_up: RefCell::default(),
        idle_since: Cell::new(Instant::now()),
        driver: RefCell::default(),
        task: Cell::default(),
    });
    let pings = connection.ping_pong().map(|pings| Pings::new(pings, heard));
    let driver = Driver {
        connection,
        pings,
        link: Rc::downgrade(&link),
        grace: Alarm::default(),
    };
    Ok((link, driver))
}

impl Link {
    /// Lets `driver` run the connection until its end, which the pool is told of.
    pub(super) fn run(&self, driver: Driver, pool: Weak<Pool>) {
        let task = tokio::task::spawn_local(driver.run(pool));
        self.task.set(Some(task.abort_handle()));
    }

    /// Room for one more request, if there is.
    pub(super) fn place(self: &Rc<Self>, pool: &Rc<Pool>) -> Option<Place> {
        let is_good = !self.closing.get() && !self.suspect.get();
        if !is_good || self.streams.get() >= self.sender.current_max_send_streams().min(MAX_STREAMS)
        {
            return None;
        }
        self.streams.set(self.streams.get() + 1);
        let is_first = !self.used.replace(true);
        Some(Place {
            link: Rc::clone(self),
            pool: Rc::clone(pool),
            is_first,
            upload: None,
        })
    }

    /// How many requests the upstream allows on one connection, and we do.
    pub(super) fn capacity(&self) -> usize {
        self.sender.current_max_send_streams().clamp(1, MAX_STREAMS)
    }

    /// No request will be added; the connection ends with its last one.
    pub(super) fn retire(&self) {
        self.closing.set(true);
    }

    pub(super) fn is_closing(&self) -> bool {
        self.closing.get()
    }

    /// Takes a request back, or leaves that for later if there were many of late.
    fn give_up(&self, request: ResponseFuture) {
        match self.patience.get() {
            0 => {
                let mut given_up = self.given_up.borrow_mut();
                given_up.requests.push(request);
                if given_up.since.is_none() {
                    given_up.since = Some(Instant::now());
                    self.wake();
                }
            }
            left => {
                self.patience.set(left - 1);
                if left == 1 {
                    tracing::debug!(
                        "an upstream connection gets no more requests: too many were given up"
                    );
                    self.retire();
                }
            }
        }
    }

    /// Takes back what was left for later, when it is time.
    fn clear_up(&self, grace: &mut Alarm, cx: &mut Context<'_>) {
        let Some(since) = self.given_up.borrow().since else {
            return;
        };
        if grace.poll(since + GRACE, cx).is_ready() {
            drop(self.given_up.take());
        }
    }

    fn wake(&self) {
        if let Some(driver) = &*self.driver.borrow() {
            driver.wake_by_ref();
        }
    }

    /// Since when it has had no request, if it has none.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        (self.streams.get() == 0).then(|| self.idle_since.get())
    }
}

impl Place {
    /// Whether earlier requests were sent on the connection.
    pub(super) fn is_reused(&self) -> bool {
        !self.is_first
    }

    pub(super) fn link(&self) -> &Rc<Link> {
        &self.link
    }

    /// Whether a stream may become a tunnel (RFC 8441, 3).
    pub(super) fn allows_tunnels(&self) -> bool {
        self.link.sender.is_extended_connect_protocol_enabled()
    }

    /// Sends a request's head. Its body, if it has one, is to follow.
    ///
    /// # Errors
    /// When the connection takes no more, or the request is one that can't be sent; nothing of it was.
    pub(super) fn begin(
        &self,
        request: Request<()>,
        has_body: bool,
    ) -> Result<(Answer, SendStream<Bytes>), NotBegun> {
        // A clone of its own: of those that wait for their turn, none stands in the way of the next.
        let mut sender = self.link.sender.clone();
        match sender.poll_ready(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Err(error)) => {
                self.link.retire();
                Err(NotBegun {
                    is_gone: true,
                    error,
                })
            }
            _ => match sender.send_request(request, !has_body) {
                Ok((awaited, sending)) => Ok((
                    Answer {
                        awaited: Some(awaited),
                        link: Rc::clone(&self.link),
                    },
                    sending,
                )),
                Err(error) => Err(NotBegun {
                    is_gone: false,
                    error,
                }),
            },
        }
    }

    /// Keeps the sending of the request's body, which is given up when this is dropped.
    pub(super) fn keep(&mut self, upload: Upload) {
        self.upload = Some(upload);
    }

    /// The answer did not come in time. Perhaps nobody is there any more: until there is a sign of life,
    /// no further request is sent.
    pub(super) fn suspect(&self) {
        self.link.suspect.set(true);
        self.link.wake();
    }
}

impl Answer {
    /// Heads that come before the answer's.
    pub(super) fn poll_informational(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Response<()>, h2::Error>>> {
        match &mut self.awaited {
            Some(awaited) => awaited.poll_informational(cx),
            None => Poll::Ready(None),
        }
    }
}

impl Future for Answer {
    type Output = Result<Response<RecvStream>, h2::Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(awaited) = &mut self.awaited else {
            return Poll::Pending;
        };
        let answer = ready!(Pin::new(awaited).poll(cx));
        self.awaited = None;
        let patience = &self.link.patience;
        patience.set((patience.get() + 1).min(PATIENCE));
        Poll::Ready(answer)
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if let Some(awaited) = self.awaited.take() {
            self.link.give_up(awaited);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.upload = None;
        let link = &self.link;
        link.streams.set(link.streams.get() - 1);
        if link.streams.get() == 0 {
            link.idle_since.set(Instant::now());
        }
        self.pool.freed(link);
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            task.abort();
        }
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link")
            .field("streams", &self.streams)
            .finish_non_exhaustive()
    }
}

/// What an error means for the request that met it.
pub(super) fn kind(error: &h2::Error) -> UpstreamErrorKind {
    match error.is_remote() {
        true if error.is_reset() => UpstreamErrorKind::Reset,
        // h2 tells a request of a GOAWAY only if the upstream says that it never saw the request.
        true => UpstreamErrorKind::Terminated,
        false if error.is_library() => UpstreamErrorKind::Protocol,
        false => UpstreamErrorKind::Terminated,
    }
}

/// Whether the upstream says that it did nothing about a request (RFC 9113, 8.7).
pub(super) fn failure(error: &h2::Error) -> Failure {
    match error.is_remote() {
        true if error.is_go_away() => Failure::TooLate,
        true if error.reason() == Some(h2::Reason::REFUSED_STREAM) => Failure::Refused,
        _ => Failure::Sent,
    }
}

/// What reads and writes for all requests of a connection.
pub(super) struct Driver {
    connection: h2::client::Connection<Stream, Bytes>,
    pings: Option<Pings>,
    link: Weak<Link>,
    grace: Alarm,
}

impl Driver {
    async fn run(mut self, pool: Weak<Pool>) {
        let end = poll_fn(|cx| {
            if let Poll::Ready(end) = Pin::new(&mut self.connection).poll(cx) {
                return Poll::Ready(end.map_err(|error| with_causes(&error)));
            }
            let Some(link) = self.link.upgrade() else {
                return Poll::Pending;
            };
            link.driver.replace(Some(cx.waker().clone()));
            link.clear_up(&mut self.grace, cx);
            let Some(pings) = &mut self.pings else {
                return Poll::Pending;
            };
            pings
                .poll(&link.suspect, cx)
                .map(|()| Err("it does not answer a PING".to_owned()))
        });
        match end.await {
            Ok(()) => tracing::debug!("an upstream connection ended"),
            Err(error) => tracing::debug!(error, "an upstream connection ended"),
        }
        // Its requests learn of it.
        drop(self.connection);
        if let (Some(link), Some(pool)) = (self.link.upgrade(), pool.upgrade()) {
            link.retire();
            pool.freed(&link);
        }
    }
}

/// Finds out whether a silent upstream is still there.
struct Pings {
    pings: PingPong,
    heard: Arc<AtomicBool>,
    /// PINGs since anything else was heard.
    unheard: usize,
    /// When the last one was answered, or something else was last heard of.
    since: Instant,
    /// Until when the PING under way has to be answered.
    due: Option<Instant>,
    alarm: Alarm,
}

impl Pings {
    fn new(pings: PingPong, heard: Arc<AtomicBool>) -> Self {
        Self {
            pings,
            heard,
            unheard: 0,
            since: Instant::now(),
            due: None,
            alarm: Alarm::default(),
        }
    }

    /// Ready when the upstream is gone. Whoever is `suspect` is asked at once.
    fn poll(&mut self, suspect: &Cell<bool>, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let at = match self.due {
                Some(due) => {
                    match self.pings.poll_pong(cx) {
                        Poll::Ready(Ok(_)) => {
                            self.due = None;
                            self.quiet(self.unheard);
                            suspect.set(false);
                            continue;
                        }
                        // The connection says so, too.
                        Poll::Ready(Err(_)) => return Poll::Pending,
                        Poll::Pending => due,
                    }
                }
                None if suspect.get() => {
                    self.ask();
                    continue;
                }
                None => {
                    let pause = PING_AFTER.get(self.unheard).or(PING_AFTER.last());
                    self.since + pause.copied().unwrap_or(PING_TIMEOUT)
                }
            };
            if self.alarm.poll(at, cx).is_pending() {
                return Poll::Pending;
            }
            let heard = self.heard.load(Ordering::Relaxed);
            match self.due {
                // Busy with much to say, and the answer stands behind all that.
                Some(_) if heard => {
                    self.quiet(0);
                    self.due = Some(self.since + PING_TIMEOUT);
                }
                Some(_) => return Poll::Ready(()),
                None if heard => self.quiet(0),
                None => self.ask(),
            }
        }
    }

    fn ask(&mut self) {
        if self.pings.send_ping(Ping::opaque()).is_ok() {
            self.unheard += 1;
        }
        self.heard.store(false, Ordering::Relaxed);
        self.due = Some(Instant::now() + PING_TIMEOUT);
    }

    /// Silence begins anew.
    fn quiet(&mut self, unheard: usize) {
        self.heard.store(false, Ordering::Relaxed);
        self.since = Instant::now();
        self.unheard = unheard;
    }
}
