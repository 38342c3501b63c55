//! Drives a connection's work until it ends, times out or drains.

use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, timeout};

use crate::proxy::client_connection::ConnectionCloseReason;
use crate::proxy::client_connection::connection_monitor::{ConnectionMonitor, TimeoutKind};
use crate::proxy::connection_io::LazyTimer;

/// Polls the work of a connection and ends it at the deadlines of its [`ConnectionMonitor`].
pub(crate) struct ConnectionDriver {
    pub(crate) monitor: Rc<ConnectionMonitor>,
    timer: LazyTimer,
    /// Time at which the work is asked to close.
    close_at: Option<Instant>,
    /// Time for one more request after a response that did not announce the close.
    request_delay: Duration,
    is_closing: bool,
    /// Whether the drain began before the client could send a request. An HTTP/2 client that is
    /// told at once would send none on any connection.
    is_new_in_drain: bool,
}

impl ConnectionDriver {
    pub(crate) fn new(monitor: Rc<ConnectionMonitor>) -> Self {
        Self {
            is_new_in_drain: monitor.drain.is_new.get(),
            monitor,
            timer: LazyTimer::default(),
            close_at: None,
            request_delay: Duration::ZERO,
            is_closing: false,
        }
    }

    /// Polls `work` until it is ready or a timeout expires. `work` is called with `true` once, when
    /// it should close gracefully.
    pub(crate) async fn drive<T>(
        &mut self,
        mut work: impl FnMut(&mut Context<'_>, bool) -> Poll<T>,
    ) -> Result<T, TimeoutKind> {
        // If earlier work on the connection was asked to close, this work is asked as well.
        if std::mem::take(&mut self.is_closing) {
            self.close_at = Some(Instant::now());
        }
        poll_fn(|cx| {
            self.monitor.connection.driver.register(cx.waker());
            self.begin_requested_drain();
            // The close is requested before `work` is polled, so that a response in progress
            // announces it.
            if let Poll::Ready(end) = self.request_close_if_active(cx, &mut work) {
                return Poll::Ready(Ok(end));
            }
            if let Poll::Ready(end) = work(cx, false) {
                return Poll::Ready(Ok(end));
            }
            if let Poll::Ready(end) = self.request_close_if_active(cx, &mut work) {
                return Poll::Ready(Ok(end));
            }
            if let Some(reason) = self.monitor.take_close_request() {
                self.monitor.record_close(reason);
                return Poll::Ready(match self.request_close(cx, &mut work) {
                    Poll::Ready(end) => Ok(end),
                    Poll::Pending => Err(TimeoutKind::CloseRequested),
                });
            }
            self.monitor.report_memory();
            self.monitor.update_activity();
            while let Some((deadline, overdue)) = self.next_deadline() {
                if self.timer.poll(deadline, cx).is_pending() {
                    return Poll::Pending;
                }
                match overdue {
                    TimeoutKind::Idle if !self.is_closing => {
                        if self.close_at.is_none() {
                            self.monitor.record_close(ConnectionCloseReason::Idle);
                        }
                    }
                    TimeoutKind::Age => {
                        self.monitor.drain_for_age();
                        self.begin_requested_drain();
                        continue;
                    }
                    // Counted if the client does not read then either.
                    TimeoutKind::UnsentResponse => {
                        self.monitor.output.unsent_responses.restart_timeout()
                    }
                    _ => return Poll::Ready(Err(overdue)),
                }
                if let Poll::Ready(end) = self.request_close(cx, &mut work) {
                    return Poll::Ready(Ok(end));
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Sets the time of the close if the connection was asked to drain.
    fn begin_requested_drain(&mut self) {
        if self.monitor.drain.is_new.take()
            && !self.is_closing
            && let Some(drain) = self.monitor.drain.requested.get()
        {
            let now = Instant::now();
            self.request_delay = drain.request_delay;
            self.close_at = Some(if self.monitor.is_http2.get() && !self.is_new_in_drain {
                now
            } else {
                drain.closes_from.max(now + drain.request_delay)
            });
        }
    }

    /// When to close the connection. Returns `None` during an HTTP/1 response. If the response
    /// began before the drain, the client may send another request, and the response to that
    /// announces the close.
    fn close_time(&mut self) -> Option<Instant> {
        if self.monitor.is_within_http1_response() {
            let delay = self.request_delay;
            self.close_at = self.close_at.map(|at| at.max(Instant::now() + delay));
            return None;
        }
        self.close_at
    }

    fn next_deadline(&mut self) -> Option<(Instant, TimeoutKind)> {
        let next = self.monitor.next_deadline();
        let close = self.close_time().map(|at| (at, TimeoutKind::Idle));
        // A drain, which sets the time of the close, ends the wait for the age.
        let age = || Some((self.monitor.drain.age_ends_at.get()?, TimeoutKind::Age));
        match close.or_else(age) {
            None => next,
            fixed => fixed.into_iter().chain(next).min_by_key(|(at, _)| *at),
        }
    }

    fn request_close_if_active<T>(
        &mut self,
        cx: &mut Context<'_>,
        work: &mut impl FnMut(&mut Context<'_>, bool) -> Poll<T>,
    ) -> Poll<T> {
        if self.close_time().is_some() && self.monitor.has_active_requests() {
            self.request_close(cx, work)
        } else {
            Poll::Pending
        }
    }

    fn request_close<T>(
        &mut self,
        cx: &mut Context<'_>,
        work: &mut impl FnMut(&mut Context<'_>, bool) -> Poll<T>,
    ) -> Poll<T> {
        self.close_at = None;
        self.is_closing = true;
        self.monitor.set_closing();
        work(cx, true)
    }
}

/// Time limit for writing a final response and closing the connection.
pub(super) const CLOSE_TIMEOUT: Duration = Duration::from_secs(3);

/// Shuts a connection down within [`CLOSE_TIMEOUT`].
pub(crate) async fn close_gracefully(socket: &mut (impl AsyncWrite + Unpin)) {
    if !matches!(timeout(CLOSE_TIMEOUT, socket.shutdown()).await, Ok(Ok(()))) {
        tracing::debug!("client did not close within the limit");
    }
}
