//! Detects unresponsive upstreams by HTTP/2 PINGs.

use h2::{Ping, PingPong};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::Instant;

use crate::proxy::connection_io::LazyTimer;

/// Quiet times before the first, second and each further PING to a silent upstream. They grow
/// because gRPC servers treat more than two PINGs within five minutes as abuse.
const PING_INTERVALS: [Duration; 3] = [
    Duration::from_secs(20),
    Duration::from_secs(60),
    Duration::from_secs(330),
];
const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// Detects an unresponsive upstream by sending PINGs.
pub(super) struct PingMonitor {
    ping_pong: PingPong,
    read_activity: Arc<AtomicBool>,
    /// Number of PINGs sent since data other than PONGs was received.
    pings_since_read: usize,
    /// Start of the current quiet period: the last PONG or the last other data.
    quiet_since: Instant,
    /// Deadline for the PONG that answers the current PING; `None` if no PING is pending.
    pong_deadline: Option<Instant>,
    timer: LazyTimer,
}

impl PingMonitor {
    pub(super) fn new(ping_pong: PingPong, read_activity: Arc<AtomicBool>) -> Self {
        Self {
            ping_pong,
            read_activity,
            pings_since_read: 0,
            quiet_since: Instant::now(),
            pong_deadline: None,
            timer: LazyTimer::default(),
        }
    }

    /// Sends PINGs when due. Ready when a PONG is missing at its deadline and nothing else arrived.
    /// With `suspect` set, sends a PING immediately.
    pub(super) fn poll(&mut self, suspect: &Cell<bool>, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            let deadline = match self.pong_deadline {
                Some(due) => {
                    match self.ping_pong.poll_pong(cx) {
                        Poll::Ready(Ok(_)) => {
                            self.pong_deadline = None;
                            self.restart_quiet_period(self.pings_since_read);
                            suspect.set(false);
                            continue;
                        }
                        // The error is ignored here because the connection future reports it too.
                        Poll::Ready(Err(_)) => return Poll::Pending,
                        Poll::Pending => due,
                    }
                }
                None if suspect.get() => {
                    self.send_ping();
                    continue;
                }
                None => {
                    let pause = PING_INTERVALS
                        .get(self.pings_since_read)
                        .or(PING_INTERVALS.last());
                    self.quiet_since + pause.copied().unwrap_or(PING_TIMEOUT)
                }
            };
            if self.timer.poll(deadline, cx).is_pending() {
                return Poll::Pending;
            }
            let has_read = self.read_activity.load(Ordering::Relaxed);
            match self.pong_deadline {
                // Other data arrived: the PONG may be queued behind it, so its deadline is
                // extended.
                Some(_) if has_read => {
                    self.restart_quiet_period(0);
                    self.pong_deadline = Some(self.quiet_since + PING_TIMEOUT);
                }
                Some(_) => return Poll::Ready(()),
                None if has_read => self.restart_quiet_period(0),
                None => self.send_ping(),
            }
        }
    }

    fn send_ping(&mut self) {
        if self.ping_pong.send_ping(Ping::opaque()).is_ok() {
            self.pings_since_read += 1;
        }
        self.read_activity.store(false, Ordering::Relaxed);
        self.pong_deadline = Some(Instant::now() + PING_TIMEOUT);
    }

    /// Starts a new quiet period.
    fn restart_quiet_period(&mut self, pings_since_read: usize) {
        self.read_activity.store(false, Ordering::Relaxed);
        self.quiet_since = Instant::now();
        self.pings_since_read = pings_since_read;
    }
}
