//! What a client's connection is doing, and how long it may go on with it.
//!
//! hyper has no limits in time but one, and that one cuts connections between requests too. So the
//! connection's socket and its requests leave marks in a [`Watch`], and the task that drives the
//! connection reads from it what is due next. Marks are cells in one thread: nothing on the way of
//! a request touches a timer.

use std::cell::{Cell, RefCell};
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use super::alarm::Alarm;
use super::flood::{Budget, Frames};
use super::transport::{Transport, give};
use crate::telemetry::metrics::{Closed, Shard};

/// A closed connection's unread bytes are read and thrown away up to here, so that the kernel does
/// not answer them with a reset that destroys our last response on its way.
const LINGER_BYTES: usize = 1024 * 1024;
const LINGER_TIME: Duration = Duration::from_secs(2);
/// An HTTP/2 client without requests that was told to go away answers that, and goes.
const LEAVE_TIME: Duration = Duration::from_secs(2);
/// A client that has asked nothing for so long may not ask soon: what its next request will need is given back until
/// then. Having it made again costs about 2 µs: little for who asks less than ten times a second.
const AWAKE_TIME: Duration = Duration::from_millis(100);

/// How long a client may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// Without a request.
    pub(super) idle: Duration,
    /// From the first byte of a request to the end of its head.
    pub(super) head: Duration,
    /// Without reading a byte of what we have to write.
    pub(super) stalled: Duration,
}

/// Why a connection has to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overdue {
    /// No request for a while: nothing has to end, but what requests need is not needed.
    Resting,
    /// No request for too long: close in good order.
    Idle,
    /// A request head that does not come to its end.
    SlowHead,
    /// A client that does not read, or does not leave.
    Stalled,
}

#[derive(Debug)]
pub(super) struct Watch {
    patience: Patience,
    phase: Cell<Phase>,
    /// Requests whose handling, request body or response body is not over.
    active: Cell<usize>,
    blocked_since: Cell<Option<Instant>>,
    closing_since: Cell<Option<Instant>>,
    multiplexed: Cell<bool>,
    /// Buffers are there that can be given back.
    awake: Cell<bool>,
    unread: Cell<bool>,
    /// The client takes the end of the connection for the end of a response.
    ends_by_close: Cell<bool>,
    /// In this turn, the client did its part: see [`Watch::excuse`].
    excused: Cell<bool>,
    drain: Cell<bool>,
    /// It was asked to end.
    leaving: Cell<bool>,
    budget: Budget,
    counts: Option<Arc<Shard>>,
    /// The task that drives the connection.
    driver: RefCell<Option<Waker>>,
    /// What stands before the next answer, and hyper knows nothing of.
    said_before: RefCell<Vec<u8>>,
    /// All that hyper had to write is written.
    is_flushed: Cell<bool>,
}

/// What holds while no request is active.
#[derive(Clone, Copy, Debug)]
enum Phase {
    Idle(Instant),
    Head(Instant),
}

impl Watch {
    /// `counts`: where it is counted what had to end.
    pub(super) fn new(patience: Patience, counts: Option<Arc<Shard>>) -> Rc<Self> {
        let now = Instant::now();
        Rc::new(Self {
            patience,
            phase: Cell::new(Phase::Idle(now)),
            active: Cell::new(0),
            blocked_since: Cell::new(None),
            closing_since: Cell::new(None),
            multiplexed: Cell::new(false),
            awake: Cell::new(false),
            unread: Cell::new(false),
            ends_by_close: Cell::new(false),
            excused: Cell::new(false),
            drain: Cell::new(false),
            leaving: Cell::new(false),
            budget: Budget::new(now),
            counts,
            driver: RefCell::new(None),
            said_before: RefCell::default(),
            is_flushed: Cell::new(true),
        })
    }

    /// A request has arrived; it is active until all clones of the answer are gone.
    pub(super) fn begin(self: &Rc<Self>) -> Active {
        if self.active.get() == 0 {
            self.unread.set(false);
        }
        self.active.set(self.active.get() + 1);
        Active(Rc::clone(self))
    }

    /// Whether any request is active.
    pub(super) fn is_active(&self) -> bool {
        self.active.get() > 0
    }

    /// From here on the client may send a request.
    pub(super) fn set_entered(&self) {
        self.phase.set(Phase::Idle(Instant::now()));
    }

    /// From here on bytes are frames: reading some does not mean that a request began.
    pub(super) fn set_multiplexed(&self) {
        self.multiplexed.set(true);
        self.phase.set(Phase::Idle(Instant::now()));
    }

    /// Whether the connection has what only requests need, and wants to know when it can do without.
    pub(super) fn set_awake(&self, awake: bool) {
        self.awake.set(awake);
    }

    /// The client has sent, or is sending, what nobody will read.
    pub(super) fn set_unread(&self) {
        self.unread.set(true);
    }

    pub(super) fn is_unread(&self) -> bool {
        self.unread.get()
    }

    /// The client speaks HTTP/1.0, where a response may end with the connection.
    pub(super) fn set_ends_by_close(&self) {
        self.ends_by_close.set(true);
    }

    pub(super) fn ends_by_close(&self) -> bool {
        self.ends_by_close.get()
    }

    /// It is not the client that keeps its answer from going on: the next part is not there yet, or
    /// the last one has just been taken.
    pub(super) fn excuse(&self) {
        self.excused.set(true);
    }

    /// Whether [`Watch::excuse`] was called since the last look.
    pub(super) fn take_excused(&self) -> bool {
        self.excused.take()
    }

    /// What an HTTP/2 client may still waste.
    pub(super) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Counts the end of the connection, or of a stream, that the client did not choose.
    pub(super) fn count(&self, reason: Closed) {
        if let Some(counts) = &self.counts {
            counts.closed(reason);
        }
    }

    /// Asks the connection to end as soon as what it is doing is done.
    pub(super) fn drain(&self) {
        self.drain.set(true);
        self.leaving.set(true);
        self.wake_driver();
    }

    /// Whether [`Watch::drain`] was called: the next answer is the last one.
    pub(super) fn is_leaving(&self) -> bool {
        self.leaving.get()
    }

    /// Whether [`Watch::drain`] was called, and nobody has taken notice of it.
    pub(super) fn is_to_drain(&self) -> bool {
        self.drain.get()
    }

    /// True once after [`Watch::drain`].
    pub(super) fn take_drain(&self) -> bool {
        self.drain.take()
    }

    /// The connection has been told to close.
    pub(super) fn set_closing(&self) {
        self.closing_since
            .set(Some(self.closing_since.get().unwrap_or_else(Instant::now)));
    }

    pub(super) fn set_driver(&self, waker: &Waker) {
        let mut driver = self.driver.borrow_mut();
        match &mut *driver {
            Some(known) => known.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
    }

    fn wake_driver(&self) {
        if let Some(driver) = &*self.driver.borrow() {
            driver.wake_by_ref();
        }
    }

    /// Whether all that was written has been taken.
    pub(super) fn is_caught_up(&self) -> bool {
        self.blocked_since.get().is_none()
    }

    /// Writes a head to an HTTP/1.1 client that waits for an answer, before all that hyper writes from now on. It is
    /// dropped if something of earlier answers has still to be written.
    ///
    /// hyper flushes the socket when, and only when, it has written all that it had.
    pub(super) fn tell(&self, head: &[u8]) {
        if self.is_flushed.get() {
            self.said_before.borrow_mut().extend_from_slice(head);
            self.wake_driver();
        }
    }

    /// How long a client may leave a write alone.
    pub(super) fn stall_limit(&self) -> Duration {
        self.patience.stalled
    }

    /// What is due next, if nothing happens before.
    pub(super) fn due(&self) -> Option<(Instant, Overdue)> {
        // While there is something to write, the connection is not idle, whatever its requests do.
        if let Some(since) = self.blocked_since.get() {
            return Some((since + self.patience.stalled, Overdue::Stalled));
        }
        match (
            self.active.get(),
            self.phase.get(),
            self.closing_since.get(),
        ) {
            (0, Phase::Head(since), _) => Some((since + self.patience.head, Overdue::SlowHead)),
            (0, Phase::Idle(since), None)
                if self.awake.get() && self.patience.idle > AWAKE_TIME =>
            {
                Some((since + AWAKE_TIME, Overdue::Resting))
            }
            (0, Phase::Idle(since), None) => Some((since + self.patience.idle, Overdue::Idle)),
            // Told to go away, with nothing left to read but that.
            (0, Phase::Idle(since), Some(told)) => {
                Some((told.max(since) + LEAVE_TIME, Overdue::Stalled))
            }
            _ => None,
        }
    }

    fn note_read(&self) {
        if self.active.get() == 0
            && !self.multiplexed.get()
            && matches!(self.phase.get(), Phase::Idle(_))
        {
            self.phase.set(Phase::Head(Instant::now()));
        }
    }

    pub(super) fn note_write<T>(&self, result: &Poll<io::Result<T>>) {
        match result {
            Poll::Pending if self.blocked_since.get().is_none() => {
                self.blocked_since.set(Some(Instant::now()))
            }
            Poll::Pending => {}
            Poll::Ready(_) => self.blocked_since.set(None),
        }
    }
}

/// Keeps a request counted as active.
#[derive(Debug)]
pub(super) struct Active(Rc<Watch>);

impl Active {
    pub(super) fn watch(&self) -> &Watch {
        &self.0
    }
}

impl Clone for Active {
    fn clone(&self) -> Self {
        self.0.begin()
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        let watch = &self.0;
        watch.active.set(watch.active.get() - 1);
        if watch.active.get() == 0 {
            watch.phase.set(Phase::Idle(Instant::now()));
            // Streams end in tasks of their own: the driver would not look at the clock again.
            if watch.multiplexed.get() {
                watch.wake_driver();
            }
        }
    }
}

/// A client's socket, or what TLS makes of it, that leaves its marks in a [`Watch`], gives back bytes that were
/// looked at before the protocol was known, and lingers when it is shut down.
#[derive(Debug)]
pub(super) struct WatchedSocket {
    transport: Transport,
    watch: Rc<Watch>,
    looked_at: Vec<u8>,
    frames: Frames,
    /// The end of what we write is not the end of what we read.
    one_way: bool,
    /// Both ways have ended. What still comes is thrown away, and the rest of it must not be read as something else: as
    /// another request, or as what TLS has not said.
    over: bool,
    linger: Option<Linger>,
}

#[derive(Debug)]
struct Linger {
    left: usize,
    until: Instant,
    alarm: Alarm,
}

impl WatchedSocket {
    pub(super) fn new(transport: Transport, watch: Rc<Watch>) -> Self {
        Self {
            transport,
            watch,
            looked_at: Vec::new(),
            frames: Frames::default(),
            one_way: false,
            over: false,
            linger: None,
        }
    }

    /// Puts bytes back that will be read again first.
    pub(super) fn unread(&mut self, bytes: &[u8]) {
        self.looked_at.splice(0..0, bytes.iter().copied());
    }

    /// Waits until the client goes on; what it sends stays to be read. `false`: it has left.
    pub(super) fn poll_begin(&mut self, cx: &mut Context<'_>) -> Poll<bool> {
        let mut bytes = [0; 512];
        let mut into = ReadBuf::new(&mut bytes);
        let is_there = ready!(Pin::new(&mut *self).poll_read(cx, &mut into)).is_ok();
        self.unread(into.filled());
        if !into.filled().is_empty() {
            // Also if it has been read before, behind the last request.
            self.watch.note_read();
        }
        Poll::Ready(is_there && !into.filled().is_empty())
    }

    /// Closes with a reset: what was sent so far cannot be taken for the whole, and what the client
    /// has not fetched holds no memory.
    pub(super) fn abort(mut self) {
        if let Err(error) = self.transport.raw().set_abort() {
            tracing::debug!(%error, "a connection could not be reset");
        }
    }

    /// Whether a shutdown ends writing only, and lets the client go on.
    pub(super) fn set_one_way(&mut self, one_way: bool) {
        self.one_way = one_way;
    }

    /// What the client still sends will not be read.
    pub(super) fn forget_rest(&self) {
        self.watch.set_unread();
    }

    /// Writes what stands before that which hyper has to write.
    fn poll_said_before(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut said_before = self.watch.said_before.borrow_mut();
        while !said_before.is_empty() {
            let written = ready!(Pin::new(&mut self.transport).poll_write(cx, &said_before))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            said_before.drain(..written);
        }
        Poll::Ready(Ok(()))
    }

    /// Reads and forgets until the client closes, or has had enough of our time.
    fn poll_linger(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let linger = self.linger.get_or_insert_with(|| Linger {
            left: LINGER_BYTES,
            until: Instant::now() + LINGER_TIME,
            alarm: Alarm::default(),
        });
        let mut scratch = [0; 8192];
        loop {
            let mut into = ReadBuf::new(&mut scratch);
            match Pin::new(self.transport.raw()).poll_read(cx, &mut into) {
                Poll::Ready(Ok(())) if !into.filled().is_empty() => {
                    self.watch.set_unread();
                    linger.left = linger.left.saturating_sub(into.filled().len());
                    if linger.left == 0 {
                        return Poll::Ready(());
                    }
                }
                Poll::Ready(_) => return Poll::Ready(()),
                Poll::Pending if !self.watch.is_unread() => return Poll::Ready(()),
                Poll::Pending => return linger.alarm.poll(linger.until, cx),
            }
        }
    }
}

impl AsyncRead for WatchedSocket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.over {
            return Poll::Ready(Ok(()));
        }
        if !this.looked_at.is_empty() {
            give(&mut this.looked_at, into);
            return Poll::Ready(Ok(()));
        }
        let before = into.filled().len();
        ready!(Pin::new(&mut this.transport).poll_read(cx, into))?;
        let come = into.filled().get(before..).unwrap_or_default();
        if !come.is_empty() {
            this.watch.note_read();
        }
        if this.watch.multiplexed.get() {
            let wasted = this.frames.wasted(come);
            this.watch.budget.spend(wasted);
            if this.watch.budget.is_exhausted() {
                return Poll::Ready(Err(io::ErrorKind::QuotaExceeded.into()));
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for WatchedSocket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(this.poll_said_before(cx))?;
        this.watch.is_flushed.set(false);
        Pin::new(&mut this.transport).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(this.poll_said_before(cx))?;
        this.watch.is_flushed.set(false);
        Pin::new(&mut this.transport).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.transport.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.watch.is_flushed.set(true);
        ready!(this.poll_said_before(cx))?;
        Pin::new(&mut this.transport).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.over |= !this.one_way;
        if this.linger.is_none() {
            ready!(Pin::new(&mut this.transport).poll_shutdown(cx))?;
        }
        if this.one_way {
            return Poll::Ready(Ok(()));
        }
        this.poll_linger(cx).map(Ok)
    }
}

#[cfg(test)]
mod tests {
    use super::{AWAKE_TIME, Overdue, Patience, Watch, WatchedSocket};
    use crate::proxy::transport::{RawSocket, Stream, Transport};
    use std::future::poll_fn;
    use std::pin::Pin;
    use std::rc::Rc;
    use std::task::Poll;
    use std::time::Duration;
    use tokio::io::{AsyncReadExt, AsyncWrite, AsyncWriteExt};
    use tokio::net::UnixStream;
    use tokio::time::{Instant, advance};

    const PATIENCE: Patience = Patience {
        idle: Duration::from_secs(75),
        head: Duration::from_secs(10),
        stalled: Duration::from_secs(30),
    };

    fn due_in(watch: &Watch) -> Option<(u64, Overdue)> {
        watch
            .due()
            .map(|(at, what)| ((at - Instant::now()).as_secs(), what))
    }

    #[tokio::test(start_paused = true)]
    async fn each_phase_has_its_own_deadline() {
        let watch = Watch::new(PATIENCE, None);
        assert_eq!(due_in(&watch), Some((75, Overdue::Idle)));
        advance(Duration::from_secs(5)).await;
        watch.note_read();
        assert_eq!(due_in(&watch), Some((10, Overdue::SlowHead)));
        advance(Duration::from_secs(4)).await;
        watch.note_read();
        assert_eq!(
            due_in(&watch),
            Some((6, Overdue::SlowHead)),
            "more bytes buy no more time"
        );
        let request = watch.begin();
        assert_eq!(due_in(&watch), None);
        let body = request.clone();
        drop(request);
        assert_eq!(due_in(&watch), None, "a body keeps its request active");
        drop(body);
        assert_eq!(due_in(&watch), Some((75, Overdue::Idle)));
    }

    #[tokio::test(start_paused = true)]
    async fn who_is_awake_may_rest_soon() {
        let watch = Watch::new(PATIENCE, None);
        watch.set_awake(true);
        assert_eq!(
            watch.due(),
            Some((Instant::now() + AWAKE_TIME, Overdue::Resting))
        );
        let request = watch.begin();
        assert_eq!(due_in(&watch), None);
        drop(request);
        watch.set_closing();
        assert_eq!(
            due_in(&watch),
            Some((2, Overdue::Stalled)),
            "who leaves needs no rest"
        );
        let hasty = Watch::new(
            Patience {
                idle: AWAKE_TIME,
                ..PATIENCE
            },
            None,
        );
        hasty.set_awake(true);
        assert_eq!(
            hasty.due(),
            Some((Instant::now() + AWAKE_TIME, Overdue::Idle))
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_does_not_read_is_found_in_any_phase() {
        let watch = Watch::new(PATIENCE, None);
        let request = watch.begin();
        watch.note_write(&Poll::<std::io::Result<()>>::Pending);
        advance(Duration::from_secs(10)).await;
        watch.note_write(&Poll::<std::io::Result<()>>::Pending);
        assert_eq!(due_in(&watch), Some((20, Overdue::Stalled)));
        drop(request);
        assert_eq!(due_in(&watch), Some((20, Overdue::Stalled)));
        watch.note_write(&Poll::Ready(Ok(1)));
        assert_eq!(due_in(&watch), Some((75, Overdue::Idle)));
    }

    #[tokio::test]
    async fn what_is_said_before_an_answer_stands_between_answers() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let watch = Watch::new(PATIENCE, None);
        let raw = RawSocket::new(Stream::Unix(ours), Rc::clone(&watch));
        let mut socket = WatchedSocket::new(Transport::Plain(raw), Rc::clone(&watch));
        watch.tell(b"<1>");
        socket.flush().await.unwrap();
        watch.tell(b"<2>");
        let mut sent = 0;
        // As much as nobody reads: the rest of the answer has to wait.
        poll_fn(|cx| {
            while let Poll::Ready(written) = Pin::new(&mut socket).poll_write(cx, &[b'a'; 4096]) {
                sent += written.unwrap();
            }
            Poll::Ready(())
        })
        .await;
        watch.tell(b"<dropped>");
        let mut got = vec![0; 6 + sent];
        theirs.read_exact(&mut got).await.unwrap();
        socket.write_all(b"end").await.unwrap();
        watch.tell(b"<dropped>");
        socket.flush().await.unwrap();
        watch.tell(b"<3>");
        socket.write_all(b"next").await.unwrap();
        drop(socket);
        theirs.read_to_end(&mut got).await.unwrap();
        let text = String::from_utf8(got).unwrap();
        assert_eq!(text, format!("<1><2>{}end<3>next", "a".repeat(sent)));
    }

    #[tokio::test]
    async fn what_comes_after_the_goodbye_is_never_read() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let watch = Watch::new(PATIENCE, None);
        let raw = RawSocket::new(Stream::Unix(ours), Rc::clone(&watch));
        let mut socket = WatchedSocket::new(Transport::Plain(raw), Rc::clone(&watch));
        socket.unread(b"read too early");
        socket.forget_rest();
        let lingers =
            poll_fn(|cx| Poll::Ready(Pin::new(&mut socket).poll_shutdown(cx).is_pending())).await;
        assert!(lingers);
        theirs.write_all(b"GET / HTTP/1.1").await.unwrap();
        assert_eq!(socket.read(&mut [0; 32]).await.unwrap(), 0);
        assert!(!poll_fn(|cx| socket.poll_begin(cx)).await);
    }

    #[tokio::test(start_paused = true)]
    async fn frames_are_not_heads_and_goodbyes_end() {
        let watch = Watch::new(PATIENCE, None);
        watch.set_multiplexed();
        watch.note_read();
        assert_eq!(due_in(&watch), Some((75, Overdue::Idle)));
        watch.set_closing();
        assert_eq!(due_in(&watch), Some((2, Overdue::Stalled)));
    }
}
