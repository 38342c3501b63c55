//! One client's connection: which protocol, which requests, and when it has to end.

mod handover;
mod streams;

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, Version, header};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::http1::Parts;
use hyper::server::conn::{http1, http2};
use hyper::service::{Service, service_fn};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::{TokioIo, TokioTimer};
use std::convert::Infallible;
use std::error::Error as _;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::time::{Instant, timeout};

use super::ListenSettings;
use super::alarm::Alarm;
use super::body::{BodyError, BodyLimits, RequestBody, ResponseBody};
use super::entrance::Entered;
use super::interim::Interim;
use super::server::{Door, Handler, Load, Peer};
use super::tidy::Tidy;
use super::watch::{Active, Overdue, Patience, Watch, WatchedSocket};
use crate::telemetry::metrics::Closed;
use handover::{Handover, Switched};
use streams::StreamTasks;

/// What an HTTP/2 client sends first.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const TOO_SLOW: &[u8] =
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
/// The last words to a client must not wait for it.
const LAST_WORDS_TIME: Duration = Duration::from_secs(3);

/// Before an idle connection is closed in a shutdown: a request may have arrived that the runtime has
/// not yet heard of.
const LAST_LOOK: Duration = Duration::from_millis(5);
/// The same, if the shutdown began while the client was still on its way in: its request may be a round trip away.
const FIRST_LOOK: Duration = Duration::from_secs(1);

/// hyper's parser takes this many fields from the stack; any other number costs an allocation.
const CHEAP_MAX_HEADERS: usize = 100;
/// Least room for an HTTP/1 connection's buffers, each way.
const MIN_BUFFER_BYTES: usize = 64 * 1024;
/// A stream's part of the answer that waits for the client's window.
const H2_SEND_BUFFER_BYTES: usize = 64 * 1024;
/// An answer is handed to HTTP/2 in parts of this size: that the next one is asked for shows that
/// the client reads, even if it does so slowly.
const H2_PART_BYTES: usize = 16 * 1024;
/// What a client may send before we read: per stream, and per connection.
const H2_STREAM_WINDOW: u32 = 256 * 1024;
const H2_CONNECTION_WINDOW: u32 = 1024 * 1024;
/// Streams that a client opened and reset at once ("rapid reset").
const H2_MAX_PENDING_RESETS: usize = 20;
/// Streams that we reset because of the client's errors, before the connection ends.
const H2_MAX_LOCAL_RESETS: usize = 256;
/// A peer that vanished without a word is found by PINGs.
const H2_PING_INTERVAL: Duration = Duration::from_secs(20);
const H2_PING_TIMEOUT: Duration = Duration::from_secs(10);

/// How connections are served; one per worker.
#[derive(Clone, Debug)]
pub(super) struct Protocols {
    http1: http1::Builder,
    settings: ListenSettings,
    door: Door,
    load: Load,
    tidy: Rc<Tidy>,
}

impl Protocols {
    /// `load`: where panics are counted.
    pub(super) fn new(settings: &ListenSettings, door: Door, load: Load, tidy: Rc<Tidy>) -> Self {
        let mut http1 = http1::Builder::new();
        http1
            .half_close(false)
            .max_header_size(settings.max_header_bytes);
        http1.max_buf_size(
            settings
                .max_header_bytes
                .saturating_add(1)
                .max(MIN_BUFFER_BYTES),
        );
        if settings.max_headers != CHEAP_MAX_HEADERS {
            http1.max_headers(settings.max_headers);
        }
        Self {
            http1,
            settings: settings.clone(),
            door,
            load,
            tidy,
        }
    }

    pub(super) fn patience(&self) -> Patience {
        Patience {
            idle: self.settings.idle_timeout,
            head: self.settings.header_timeout,
            stalled: self.settings.body_idle_timeout,
        }
    }

    fn body_limits(&self) -> BodyLimits {
        BodyLimits {
            idle: self.settings.body_idle_timeout,
            max_bytes: self.settings.max_body_bytes,
        }
    }

    /// A proxy that waits some milliseconds only gives up all that it has asked when we come late.
    fn pending_resets(&self) -> usize {
        match self.door.is_public() {
            true => H2_MAX_PENDING_RESETS,
            false => usize::try_from(self.settings.max_concurrent_streams).unwrap_or(usize::MAX),
        }
    }

    fn http2(&self, watch: &Rc<Watch>, handover: &Rc<Handover>) -> http2::Builder<StreamTasks> {
        let tasks = StreamTasks::new(Rc::clone(watch), Rc::clone(handover), self.load.clone());
        let mut http2 = http2::Builder::new(tasks);
        http2
            .timer(TokioTimer::new())
            .enable_connect_protocol()
            .max_concurrent_streams(self.settings.max_concurrent_streams)
            .max_header_list_size(u32::try_from(self.settings.max_header_bytes).unwrap_or(u32::MAX))
            .initial_stream_window_size(H2_STREAM_WINDOW)
            .initial_connection_window_size(H2_CONNECTION_WINDOW)
            .max_send_buf_size(H2_SEND_BUFFER_BYTES)
            .max_pending_accept_reset_streams(self.pending_resets())
            .max_local_error_reset_streams(H2_MAX_LOCAL_RESETS)
            .keep_alive_interval(H2_PING_INTERVAL)
            .keep_alive_timeout(H2_PING_TIMEOUT);
        http2
    }
}

/// Serves one connection to its end.
pub(super) async fn serve<H: Handler>(
    entered: Entered,
    handler: Rc<H>,
    protocols: Rc<Protocols>,
    watch: Rc<Watch>,
) {
    let Entered {
        socket,
        peer,
        http2,
    } = entered;
    let peer = Arc::new(peer);
    watch.set_entered();
    let mut driver = Driver::new(Rc::clone(&watch));
    let mut socket = WatchedSocket::new(socket, Rc::clone(&watch));
    let mut first = Vec::with_capacity(PREFACE.len());
    let sniffed = driver
        .drive(|cx, close| poll_sniff(&mut socket, &mut first, cx, close))
        .await;
    socket.unread(&first);
    let limits = protocols.body_limits();
    let handover = Rc::<Handover>::default();
    // Of a request's future, 4 KiB, nothing is copied: it is made in the box, after that is there.
    let requests = service_fn(|request| {
        let room = Box::new_uninit();
        let answer = answer(
            request,
            Arc::clone(&peer),
            &handler,
            limits,
            &watch,
            &handover,
        );
        Box::into_pin(Box::write(room, answer))
    });
    let sniffed = sniffed.map(|sniffed| match (sniffed, http2) {
        // What was agreed on holds, whatever the client goes on with.
        (Sniffed::Http2, Some(false)) => Sniffed::Http1,
        (Sniffed::Http1, Some(true)) => Sniffed::Http2,
        (sniffed, _) => sniffed,
    });
    let unread = |status| handler.unread(status, &peer);
    match sniffed {
        Ok(Sniffed::Http1) => {
            serve_http1(socket, &protocols, driver, requests, &handover, unread).await
        }
        Ok(Sniffed::Http2) => {
            watch.set_multiplexed();
            // Boxed, or every connection would have room for it.
            Box::pin(serve_http2(socket, &protocols, driver, requests, &handover)).await;
        }
        // To a TLS client, an end that nobody announced is a broken connection.
        Ok(Sniffed::Nothing) => say_goodbye(&mut socket).await,
        Err(overdue) => part(socket, overdue, &watch, unread).await,
    }
    protocols.tidy.freed();
}

/// Serves HTTP/1 to the end of the connection. hyper and its buffers, some 20 KiB, are there only while the client has
/// something to ask: most of its life a connection waits.
///
/// `unread` is told the status when what came could not be read as a request.
async fn serve_http1<S, F>(
    mut socket: WatchedSocket,
    protocols: &Protocols,
    mut driver: Driver,
    mut requests: S,
    handover: &Handover,
    unread: impl Fn(StatusCode),
) where
    S: Service<Request<Incoming>, Response = Response<AnswerBody>, Error = Infallible, Future = F>,
    F: Future<Output = Result<Response<AnswerBody>, Infallible>>,
{
    loop {
        driver.watch.set_awake(true);
        let awake = Box::pin(serve_requests(
            socket,
            protocols,
            &mut driver,
            requests,
            handover,
            &unread,
        ))
        .await;
        driver.watch.set_awake(false);
        match awake {
            Some(resting) => {
                (socket, requests) = resting;
                protocols.tidy.freed();
            }
            None => return,
        }
        let goes_on = driver.drive(|cx, close| match socket.poll_begin(cx) {
            Poll::Pending if close => Poll::Ready(false),
            begun => begun,
        });
        match goes_on.await {
            Ok(true) => {}
            Ok(false) => return say_goodbye(&mut socket).await,
            Err(overdue) => return part(socket, overdue, &driver.watch, unread).await,
        }
    }
}

/// Serves HTTP/1 until the connection ends, or is given back because it can rest.
async fn serve_requests<S, F>(
    socket: WatchedSocket,
    protocols: &Protocols,
    driver: &mut Driver,
    requests: S,
    handover: &Handover,
    unread: &impl Fn(StatusCode),
) -> Option<(WatchedSocket, S)>
where
    S: Service<Request<Incoming>, Response = Response<AnswerBody>, Error = Infallible, Future = F>,
    F: Future<Output = Result<Response<AnswerBody>, Infallible>>,
{
    let mut connection = protocols
        .http1
        .serve_connection(TokioIo::new(socket), requests);
    let end = driver.drive(|cx, close| {
        if close {
            Pin::new(&mut connection).graceful_shutdown();
        }
        Pin::new(&mut connection).poll(cx)
    });
    match end.await {
        Ok(Ok(())) => {
            let Parts { io, read_buf, .. } = connection.into_parts();
            let mut socket = io.into_inner();
            socket.unread(&read_buf);
            drop(read_buf);
            match handover.take() {
                // Without its head, a tunnel's bytes would be taken for an answer.
                Some(switched) if driver.watch.is_caught_up() => {
                    // Boxed, or every connection would have room for it.
                    Box::pin(switched.serve_http1(socket, protocols.settings.body_idle_timeout))
                        .await;
                }
                // hyper leaves the end to us once a client has spoken of an upgrade.
                None if handover.was_offered() => say_goodbye(&mut socket).await,
                _ => {}
            }
        }
        Ok(Err(error)) => {
            tracing::debug!(%error, "a client's connection ended");
            if let Some(status) = status_of(&error) {
                driver.watch.count(Closed::Protocol);
                unread(status);
            }
            if error.is_user() && driver.watch.ends_by_close() {
                connection.into_parts().io.into_inner().abort();
            }
        }
        Err(Overdue::Resting) => {
            let Parts {
                io,
                read_buf,
                service,
                ..
            } = connection.into_parts();
            let mut socket = io.into_inner();
            socket.unread(&read_buf);
            return Some((socket, service));
        }
        Err(overdue) => {
            part(
                connection.into_parts().io.into_inner(),
                overdue,
                &driver.watch,
                unread,
            )
            .await;
        }
    }
    None
}

/// What hyper has answered to something that is no HTTP/1 request; `None`: nothing.
fn status_of(error: &hyper::Error) -> Option<StatusCode> {
    match () {
        () if !error.is_parse() || error.is_parse_version_h2() => None,
        () if !error.is_parse_too_large() => Some(StatusCode::BAD_REQUEST),
        // The two kinds of it differ in nothing but words.
        () if error.to_string().starts_with("URI") => Some(StatusCode::URI_TOO_LONG),
        () => Some(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE),
    }
}

async fn serve_http2<S, F>(
    socket: WatchedSocket,
    protocols: &Protocols,
    mut driver: Driver,
    requests: S,
    handover: &Rc<Handover>,
) where
    S: Service<Request<Incoming>, Response = Response<AnswerBody>, Error = Infallible, Future = F>,
    F: Future<Output = Result<Response<AnswerBody>, Infallible>> + 'static,
{
    let http2 = protocols.http2(&driver.watch, handover);
    let mut connection = http2.serve_connection(TokioIo::new(socket), requests);
    let end = driver.drive(|cx, close| {
        if close {
            Pin::new(&mut connection).graceful_shutdown();
        }
        Pin::new(&mut connection).poll(cx)
    });
    match end.await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => {
            tracing::debug!(%error, "a client's connection ended");
            if let Some(reason) = offence(&error, &driver.watch) {
                driver.watch.count(reason);
            }
        }
        Err(overdue) => {
            tracing::debug!(?overdue, "cutting a client's connection");
            driver.watch.count(Closed::SlowRead);
        }
    }
}

/// Why an HTTP/2 connection had to end; `None`: it is not what the client did.
fn offence(error: &hyper::Error, watch: &Watch) -> Option<Closed> {
    if watch.budget().is_exhausted() {
        return Some(Closed::Flood);
    }
    let error = error
        .source()?
        .downcast_ref::<h2::Error>()
        .filter(|error| error.is_library())?;
    match error.reason()? {
        h2::Reason::NO_ERROR => None,
        h2::Reason::ENHANCE_YOUR_CALM => Some(Closed::Flood),
        _ => Some(Closed::Protocol),
    }
}

/// Hands one request to the handler, counted as active until its last body is gone.
///
/// Inlined, or its future would be made elsewhere and copied to where it stays.
#[inline(always)]
fn answer<H: Handler>(
    request: Request<Incoming>,
    peer: Arc<Peer>,
    handler: &Rc<H>,
    limits: BodyLimits,
    watch: &Rc<Watch>,
    handover: &Rc<Handover>,
) -> impl Future<Output = Result<Response<AnswerBody>, Infallible>> + use<H> {
    let active = watch.begin();
    let (mut head, incoming) = request.into_parts();
    let upgrade = head.extensions.remove::<OnUpgrade>();
    if upgrade.is_some() {
        handover.set_offered();
    }
    let handover = Rc::clone(handover);
    if head.version == Version::HTTP_10 {
        watch.set_ends_by_close();
    }
    let multiplexed = head.version == Version::HTTP_2;
    let part = if multiplexed {
        H2_PART_BYTES
    } else {
        usize::MAX
    };
    let body = RequestBody::new(&head, incoming, limits, &active);
    let may_not_give_up = multiplexed && peer.door.is_public();
    let mut turn = Turn {
        active,
        arrived: may_not_give_up.then(Instant::now),
        over: false,
    };
    let handler = Rc::clone(handler);
    let interim = Interim::new(head.version, watch);
    async move {
        // Made where it stays. It has room for everything that a request may come to need, and made before it would be
        // here twice, in every connection, and be copied twice with every request.
        let mut answer = pin!(handler.handle(Request::from_parts(head, body), peer, interim));
        let response = poll_fn(|cx| {
            let answer = answer.as_mut().poll(cx);
            if answer.is_pending() {
                turn.active.watch().excuse();
            }
            answer
        });
        let mut response = response.await;
        let watch = turn.active.watch();
        watch.budget().earn();
        if !multiplexed
            && (watch.is_leaving() || watch.is_unread())
            && response.status() != StatusCode::SWITCHING_PROTOCOLS
        {
            // Before hyper knows: it is told only when there is surely nothing more to come, and of a body that nobody
            // reads it learns later. What a client sends after an answer that doesn't say so is lost.
            response
                .headers_mut()
                .insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if let (Some(tunnel), Some(client)) = (response.body_mut().take_tunnel(), upgrade) {
            handover.put(Switched::new(tunnel, client, turn.active.clone()));
        }
        Ok(response.map(|body| {
            turn.over = body.is_end_stream();
            AnswerBody {
                body,
                turn,
                part,
                rest: Bytes::new(),
            }
        }))
    }
}

/// The end of a connection that took too long.
async fn part(
    mut socket: WatchedSocket,
    overdue: Overdue,
    watch: &Watch,
    unread: impl Fn(StatusCode),
) {
    tracing::debug!(?overdue, "cutting a client's connection");
    match overdue {
        Overdue::SlowHead => watch.count(Closed::HeaderTimeout),
        Overdue::Stalled => {
            watch.count(Closed::SlowRead);
            return socket.abort();
        }
        // Who rests is not parted from.
        Overdue::Idle | Overdue::Resting => return socket.abort(),
    }
    unread(StatusCode::REQUEST_TIMEOUT);
    socket.forget_rest();
    let said = timeout(LAST_WORDS_TIME, async {
        socket.write_all(TOO_SLOW).await?;
        socket.shutdown().await
    });
    if !matches!(said.await, Ok(Ok(()))) {
        tracing::debug!("the client was not there to be told");
    }
}

/// Ends a connection in good order.
async fn say_goodbye(socket: &mut (impl AsyncWrite + Unpin)) {
    if !matches!(
        timeout(LAST_WORDS_TIME, socket.shutdown()).await,
        Ok(Ok(()))
    ) {
        tracing::debug!("the client was not there to be told");
    }
}

/// Polls a connection's work and ends it when its [`Watch`] says so.
struct Driver {
    watch: Rc<Watch>,
    alarm: Alarm,
    /// When to tell the work that it should end.
    close_at: Option<Instant>,
    told_to_close: bool,
    last_look: Duration,
}

impl Driver {
    fn new(watch: Rc<Watch>) -> Self {
        let last_look = if watch.is_to_drain() {
            FIRST_LOOK
        } else {
            LAST_LOOK
        };
        Self {
            watch,
            alarm: Alarm::default(),
            close_at: None,
            told_to_close: false,
            last_look,
        }
    }

    /// `work` is called with `true` once, when it should come to an end in good order.
    async fn drive<T>(
        &mut self,
        mut work: impl FnMut(&mut Context<'_>, bool) -> Poll<T>,
    ) -> Result<T, Overdue> {
        // Earlier work was told already: so must this be.
        if std::mem::take(&mut self.told_to_close) {
            self.close_at = Some(Instant::now());
        }
        poll_fn(|cx| {
            self.watch.set_driver(cx.waker());
            if self.watch.take_drain() && !self.told_to_close {
                self.close_at = Some(Instant::now() + self.last_look);
            }
            // An answer that is under way can still say that it is the last one.
            if let Poll::Ready(end) = self.close_if_active(cx, &mut work) {
                return Poll::Ready(Ok(end));
            }
            if let Poll::Ready(end) = work(cx, false) {
                return Poll::Ready(Ok(end));
            }
            if let Poll::Ready(end) = self.close_if_active(cx, &mut work) {
                return Poll::Ready(Ok(end));
            }
            while let Some((due, overdue)) = self.due() {
                if self.alarm.poll(due, cx).is_pending() {
                    return Poll::Pending;
                }
                if overdue != Overdue::Idle || self.told_to_close {
                    return Poll::Ready(Err(overdue));
                }
                if self.close_at.is_none() {
                    self.watch.count(Closed::Idle);
                }
                if let Poll::Ready(end) = self.close(cx, &mut work) {
                    return Poll::Ready(Ok(end));
                }
            }
            Poll::Pending
        })
        .await
    }

    fn due(&self) -> Option<(Instant, Overdue)> {
        self.close_at
            .map(|at| (at, Overdue::Idle))
            .or_else(|| self.watch.due())
    }

    fn close_if_active<T>(
        &mut self,
        cx: &mut Context<'_>,
        work: &mut impl FnMut(&mut Context<'_>, bool) -> Poll<T>,
    ) -> Poll<T> {
        if self.close_at.is_some() && self.watch.is_active() {
            self.close(cx, work)
        } else {
            Poll::Pending
        }
    }

    fn close<T>(
        &mut self,
        cx: &mut Context<'_>,
        work: &mut impl FnMut(&mut Context<'_>, bool) -> Poll<T>,
    ) -> Poll<T> {
        self.close_at = None;
        self.told_to_close = true;
        self.watch.set_closing();
        work(cx, true)
    }
}

enum Sniffed {
    Http1,
    Http2,
    /// The client left, or was asked to, before it said anything.
    Nothing,
}

/// Reads until the first bytes cannot be, or are, the preface of HTTP/2; `close`: do not wait.
fn poll_sniff(
    socket: &mut WatchedSocket,
    first: &mut Vec<u8>,
    cx: &mut Context<'_>,
    close: bool,
) -> Poll<Sniffed> {
    loop {
        let mut bytes = [0; PREFACE.len()];
        let room = bytes.get_mut(first.len()..).unwrap_or_default();
        let mut into = ReadBuf::new(room);
        match Pin::new(&mut *socket).poll_read(cx, &mut into) {
            Poll::Pending if close && first.is_empty() => return Poll::Ready(Sniffed::Nothing),
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Err(_)) => return Poll::Ready(Sniffed::Nothing),
            Poll::Ready(Ok(())) if into.filled().is_empty() && first.is_empty() => {
                return Poll::Ready(Sniffed::Nothing);
            }
            // hyper knows what to do with half a request.
            Poll::Ready(Ok(())) if into.filled().is_empty() => return Poll::Ready(Sniffed::Http1),
            Poll::Ready(Ok(())) => first.extend_from_slice(into.filled()),
        }
        if !PREFACE.starts_with(first) {
            return Poll::Ready(Sniffed::Http1);
        }
        if first.len() == PREFACE.len() {
            return Poll::Ready(Sniffed::Http2);
        }
    }
}

/// A request's turn, from its arrival to the end of its answer.
struct Turn {
    active: Active,
    /// Of HTTP/2 only, where a client can give up one request and go on with others, and not of our own proxies, who do so
    /// when their time is up.
    arrived: Option<Instant>,
    over: bool,
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(arrived) = self.arrived.filter(|_| !self.over) {
            self.active.watch().budget().given_up(arrived.elapsed());
        }
    }
}

/// A response body that keeps its request active and tells whose turn it is.
struct AnswerBody {
    body: ResponseBody,
    turn: Turn,
    /// The most bytes in a frame.
    part: usize,
    /// Of the last frame, what is to follow.
    rest: Bytes,
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        // hyper asks for more only when the client has room for it.
        self.turn.active.watch().excuse();
        if self.rest.is_empty() {
            match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => self.rest = data,
                    Err(trailers) => {
                        self.turn.over = true;
                        return Poll::Ready(Some(Ok(trailers)));
                    }
                },
                end => {
                    self.turn.over = true;
                    return Poll::Ready(end);
                }
            }
        }
        self.turn.active.watch().budget().earn();
        let part = self.part.min(self.rest.len());
        let part = self.rest.split_to(part);
        self.turn.over = self.is_end_stream();
        Poll::Ready(Some(Ok(Frame::data(part))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        let (mut hint, rest) = (
            self.body.size_hint(),
            u64::try_from(self.rest.len()).unwrap_or(u64::MAX),
        );
        if let Some(upper) = hint.upper() {
            hint.set_upper(upper.saturating_add(rest));
        }
        hint.set_lower(hint.lower().saturating_add(rest));
        hint
    }
}
