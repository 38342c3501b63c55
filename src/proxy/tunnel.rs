//! After an upgrade: bytes both ways until both sides are done, or one is gone.
//!
//! A part that was read is written before the next one is read, so the slower side sets the pace, and a
//! tunnel in which nothing moves holds no buffer.

use bytes::{Buf, Bytes};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use std::future::poll_fn;
use std::io;
use std::mem::MaybeUninit;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Instant;

use super::alarm::Alarm;
use super::upstream::Duplex;
use crate::enforcer::Hold;
use crate::trace::Recording;

/// The most that waits in each direction.
const PART_BYTES: usize = 16 * 1024;

/// An upstream's connection that no longer speaks HTTP. Dropping it closes it.
#[derive(Debug)]
pub struct Tunnel {
    upstream: Far,
    /// Nothing moves in either direction for this long: the end. `None`: no limit.
    idle: Option<Duration>,
    hold: Option<Hold>,
    /// Dropped with the tunnel, it ends.
    _recording: Option<Box<Recording>>,
    up: Flow,
    down: Flow,
    moved: Instant,
    /// Since when it is the client's turn.
    owing_since: Option<Instant>,
    /// Since when the upstream has left alone what the client sent.
    ignoring_since: Option<Instant>,
    alarm: Alarm,
}

/// The upstream's end.
#[derive(Debug)]
pub(super) enum Far {
    /// A whole connection.
    Http1(TokioIo<Upgraded>),
    /// A stream of one.
    Http2(Duplex),
}

/// How a tunnel ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Over {
    /// Both sides have said all they had to say.
    #[error("both sides are done")]
    Done,
    /// The client's connection broke.
    #[error("the client's connection broke: {0}")]
    ClientGone(io::Error),
    /// The upstream's connection broke. The client has all that came before.
    #[error("the upstream's connection broke: {0}")]
    UpstreamGone(io::Error),
    /// Nothing moved for too long.
    #[error("nothing moved")]
    Idle,
    /// The request took longer than a limit allows.
    #[error("it took longer than allowed")]
    Overlong,
    /// The client does not read, or does not come to an end after the upstream has.
    #[error("the client does not read, or does not end")]
    Stalled,
    /// The upstream does not read, at the expense of others.
    #[error("the upstream does not read, and holds up what else the client sends")]
    Ignored,
}

impl Tunnel {
    pub(super) fn new(upstream: Far, idle: Option<Duration>) -> Self {
        Self {
            upstream,
            idle,
            hold: None,
            _recording: None,
            up: Flow::default(),
            down: Flow::default(),
            moved: Instant::now(),
            owing_since: None,
            ignoring_since: None,
            alarm: Alarm::default(),
        }
    }

    /// Keeps what the request holds until the end of the tunnel, and ends the tunnel when that has to end.
    pub(super) fn keep(&mut self, hold: Option<Hold>) {
        self.hold = hold;
    }

    /// The request's recording ends with the tunnel.
    pub(super) fn record(&mut self, recording: Option<Box<Recording>>) {
        self._recording = recording;
    }

    /// Passes bytes on. A side that ends its own direction is still sent the other.
    ///
    /// `patience`: how long a client may leave what is there for it, and, once the upstream has ended, how
    /// long it may pause. If the client's other streams share their window with this one, it is also how long the
    /// upstream may leave alone what is there: unread bytes hold that window.
    pub(super) async fn run<C>(
        &mut self,
        client: &mut C,
        patience: Duration,
        shares_window: bool,
    ) -> Over
    where
        C: AsyncRead + AsyncWrite + Unpin,
    {
        poll_fn(|cx| {
            // Down first: what the upstream said last arrives before it is found to be gone.
            let down = match self.down.poll(&mut self.upstream, client, cx) {
                Poll::Ready(Err(Broken::Source(error))) => {
                    return Poll::Ready(Over::UpstreamGone(error));
                }
                Poll::Ready(Err(Broken::Sink(error))) => {
                    return Poll::Ready(Over::ClientGone(error));
                }
                down => down.is_ready(),
            };
            let up = match self.up.poll(client, &mut self.upstream, cx) {
                Poll::Ready(Err(Broken::Source(error))) => {
                    return Poll::Ready(Over::ClientGone(error));
                }
                Poll::Ready(Err(Broken::Sink(error))) => {
                    return Poll::Ready(Over::UpstreamGone(error));
                }
                up => up.is_ready(),
            };
            if down && up {
                return Poll::Ready(Over::Done);
            }
            self.poll_overdue(patience, shares_window, cx)
        })
        .await
    }

    fn poll_overdue(
        &mut self,
        patience: Duration,
        shares_window: bool,
        cx: &mut Context<'_>,
    ) -> Poll<Over> {
        let (up_moved, down_moved) = (self.up.take_moved(), self.down.take_moved());
        if up_moved || down_moved {
            self.moved = Instant::now();
            self.owing_since = None;
        }
        if up_moved || !self.up.lags {
            self.ignoring_since = None;
        }
        if shares_window && self.up.lags {
            self.ignoring_since.get_or_insert_with(Instant::now);
        }
        let ignored = self
            .ignoring_since
            .map(|since| (since + patience, Over::Ignored));
        let owes = self.down.lags || self.down.stage == Stage::Over && !self.up.lags;
        self.owing_since = owes.then(|| self.owing_since.unwrap_or_else(Instant::now));
        let stalled = self
            .owing_since
            .map(|since| (since + patience, Over::Stalled));
        let idle = self.idle.map(|idle| (self.moved + idle, Over::Idle));
        let overlong = self
            .hold
            .as_ref()
            .and_then(Hold::ends_at)
            .map(|at| (at, Over::Overlong));
        match [stalled, ignored, idle, overlong]
            .into_iter()
            .flatten()
            .min_by_key(|(due, _)| *due)
        {
            Some((due, over)) => self.alarm.poll(due, cx).map(|()| over),
            None => Poll::Pending,
        }
    }
}

impl Far {
    fn writer(&mut self) -> Pin<&mut (dyn AsyncWrite + Unpin)> {
        match self {
            Self::Http1(io) => Pin::new(io),
            Self::Http2(stream) => Pin::new(stream),
        }
    }
}

impl AsyncRead for Far {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Http1(io) => Pin::new(io).poll_read(cx, into),
            Self::Http2(stream) => Pin::new(stream).poll_read(cx, into),
        }
    }
}

impl AsyncWrite for Far {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.get_mut().writer().poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().writer().poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().writer().poll_shutdown(cx)
    }
}

/// One direction.
#[derive(Debug, Default)]
struct Flow {
    /// Read, and not yet written.
    unsent: Bytes,
    stage: Stage,
    /// It waits for the receiver, not for the sender.
    lags: bool,
    /// Something has happened since the last look.
    moved: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    Open,
    /// The sender has ended; the receiver is to be told.
    Ending,
    Over,
}

/// Which end of a direction failed.
enum Broken {
    Source(io::Error),
    Sink(io::Error),
}

impl Flow {
    /// Ready when the sender's end has reached the receiver.
    fn poll<S, T>(
        &mut self,
        source: &mut S,
        sink: &mut T,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), Broken>>
    where
        S: AsyncRead + Unpin,
        T: AsyncWrite + Unpin,
    {
        self.lags = true;
        loop {
            while !self.unsent.is_empty() {
                let taken = ready!(write(sink, &self.unsent, cx))?;
                self.unsent.advance(taken);
                self.moved = true;
            }
            self.unsent = Bytes::new();
            match self.stage {
                Stage::Open => {}
                Stage::Ending => {
                    ready!(Pin::new(&mut *sink).poll_shutdown(cx)).map_err(Broken::Sink)?;
                    (self.stage, self.moved) = (Stage::Over, true);
                }
                Stage::Over => {
                    self.lags = false;
                    return Poll::Ready(Ok(()));
                }
            }
            if self.stage == Stage::Open && self.poll_part(source, sink, cx)?.is_pending() {
                // Also how a receiver that is gone can be noticed while there is nothing for it.
                ready!(Pin::new(&mut *sink).poll_flush(cx)).map_err(Broken::Sink)?;
                self.lags = false;
                return Poll::Pending;
            }
        }
    }

    /// Reads a part and writes what of it is taken at once.
    fn poll_part<S, T>(
        &mut self,
        source: &mut S,
        sink: &mut T,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), Broken>>
    where
        S: AsyncRead + Unpin,
        T: AsyncWrite + Unpin,
    {
        let mut room = [const { MaybeUninit::uninit() }; PART_BYTES];
        let mut part = ReadBuf::uninit(&mut room);
        ready!(Pin::new(source).poll_read(cx, &mut part)).map_err(Broken::Source)?;
        self.moved = true;
        if part.filled().is_empty() {
            self.stage = Stage::Ending;
            return Poll::Ready(Ok(()));
        }
        let taken = match write(sink, part.filled(), cx)? {
            Poll::Ready(taken) => taken,
            Poll::Pending => 0,
        };
        self.unsent = Bytes::copy_from_slice(part.filled().get(taken..).unwrap_or_default());
        Poll::Ready(Ok(()))
    }

    fn take_moved(&mut self) -> bool {
        std::mem::take(&mut self.moved)
    }
}

/// Writes at least one byte.
fn write<T: AsyncWrite + Unpin>(
    sink: &mut T,
    bytes: &[u8],
    cx: &mut Context<'_>,
) -> Poll<Result<usize, Broken>> {
    match ready!(Pin::new(sink).poll_write(cx, bytes)) {
        Ok(0) => Poll::Ready(Err(Broken::Sink(io::ErrorKind::WriteZero.into()))),
        written => Poll::Ready(written.map_err(Broken::Sink)),
    }
}
