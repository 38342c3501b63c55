//! Idle connections, and the tasks that close them.

use std::net::IpAddr;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Wake;
use std::time::Duration;
use tokio::net::lookup_host;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep};

use super::UpstreamClient;
use super::{ConnectionProtocol, UpstreamConnection};
use crate::proxy::UpstreamUrl;
use crate::proxy::upstream::http2::Http2Connection;

/// Minimum and maximum interval between sweeps that close idle connections.
const SWEEP_INTERVAL_RANGE: (Duration, Duration) =
    (Duration::from_millis(50), Duration::from_secs(5));

impl UpstreamClient {
    /// Updates the pool after a request on `http2_connection`, or the connection itself, has ended:
    /// drops, retires or reuses the connection.
    pub(crate) fn handle_stream_end(self: &Rc<Self>, http2_connection: &Rc<Http2Connection>) {
        if self.shared.queued_requests.load(Ordering::SeqCst) > 0 {
            let is_unneeded =
                http2_connection.idle_since().is_some() && self.waiters.borrow().is_empty();
            if is_unneeded || self.should_yield_to_other_workers() {
                http2_connection.closing.set(true);
            }
        }
        if http2_connection.closing.get() {
            self.remove_http2_connection(http2_connection);
            if self.http2_connections.borrow().is_empty() {
                self.reject_waiters(None);
            }
            return;
        }
        self.give_streams_to_waiters(http2_connection);
        if http2_connection.idle_since().is_some()
            && self.idle_count() > self.shared.max_idle_per_worker
        {
            self.remove_http2_connection(http2_connection);
        }
    }

    pub(crate) fn remove_http2_connection(&self, http2_connection: &Rc<Http2Connection>) {
        let mut connections = self.http2_connections.borrow_mut();
        connections.retain(|known| !Rc::ptr_eq(known, http2_connection));
    }

    pub(crate) fn idle_count(&self) -> usize {
        let http2 = self.http2_connections.borrow();
        let http2_idle = http2
            .iter()
            .filter(|connection| connection.idle_since().is_some());
        http2_idle.count() + self.idle_http1.borrow().len()
    }

    pub(crate) fn return_connection(&self, mut connection: Box<UpstreamConnection>) {
        let _freed_last = connection.share.take();
        let ConnectionProtocol::Http1(http1) = &mut connection.protocol else {
            return;
        };
        http1.end_request(&self.sweeper);
        // A connection is not ready if the upstream closes it or the request is not finished.
        // Dropping the connection here closes it.
        if !http1.is_ready() || self.addresses.borrow().is_stale(http1.peer) {
            return;
        }
        connection.idle_since = Some(Instant::now());
        if self.shared.queued_requests.load(Ordering::SeqCst) > 0 {
            if !self.should_yield_to_other_workers()
                && let Some(waiter) = self.pop_waiter()
            {
                drop(waiter.send(Ok(Some(connection))));
            }
        } else {
            self.keep_idle(connection);
        }
    }

    pub(crate) fn keep_idle(&self, connection: Box<UpstreamConnection>) {
        self.begin_sweeps();
        let mut idle = self.idle_http1.borrow_mut();
        idle.push_back(connection);
        if idle.len() > self.shared.max_idle_per_worker {
            idle.pop_front();
        }
    }

    /// Records the latest DNS result and stops using connections to addresses removed from DNS,
    /// even if they still work.
    pub(crate) fn apply_resolved_addresses(&self, found: Vec<IpAddr>) {
        self.addresses.borrow_mut().record_lookup(found);
        let addresses = self.addresses.borrow();
        let mut idle = self.idle_http1.borrow_mut();
        idle.retain(|connection| match &connection.protocol {
            ConnectionProtocol::Http1(http1) => !addresses.is_stale(http1.peer),
            ConnectionProtocol::Http2(_) => true,
        });
        drop(idle);
        self.http2_connections
            .borrow_mut()
            .retain(|http2_connection| {
                let is_current = !addresses.is_stale(http2_connection.peer);
                if !is_current {
                    http2_connection.closing.set(true);
                }
                is_current
            });
    }

    /// Starts the sweeps, if they have stopped because there was no connection.
    pub(crate) fn begin_sweeps(&self) {
        if self.is_sweeper_resting.take() {
            self.sweeper.wake_by_ref();
        }
    }

    /// Closes idle connections that are dead or idle for too long, and those whose permits waiting
    /// requests need.
    pub(crate) fn sweep_idle(&self) {
        let (max_age, now) = (self.settings().pool_idle_timeout, Instant::now());
        let mut idle = self.idle_http1.borrow_mut();
        idle.retain(|connection| {
            if let ConnectionProtocol::Http1(http1) = &connection.protocol {
                http1.poll_driver();
                http1.watch(&self.sweeper);
            }
            connection.is_reusable(max_age, now)
        });
        let mut needed = self.shared.queued_requests.load(Ordering::SeqCst);
        let closed = needed.min(idle.len());
        idle.drain(..closed);
        needed -= closed;
        self.http2_connections
            .borrow_mut()
            .retain(|http2_connection| match http2_connection.idle_since() {
                Some(_) if needed > 0 => {
                    needed -= 1;
                    false
                }
                idle_since => idle_since.is_none_or(|since| now.duration_since(since) < max_age),
            });
    }

    /// Whether no connection is idle, nor open over HTTP/2.
    fn is_empty(&self) -> bool {
        self.idle_http1.borrow().is_empty() && self.http2_connections.borrow().is_empty()
    }
}

/// Lets [`run_idle_sweeper`] sweep at once: the upstream has closed an idle connection, or there is
/// a first one.
#[derive(Debug, Default)]
pub(crate) struct SweepSignal(Notify);

impl Wake for SweepSignal {
    fn wake(self: Arc<Self>) {
        self.0.notify_one();
    }
}

pub(crate) async fn run_idle_sweeper(
    pool: Weak<UpstreamClient>,
    mut queue_signal: watch::Receiver<()>,
    sweep_signal: Arc<SweepSignal>,
) {
    let mut was_calm = false;
    while let Some(pool) = pool.upgrade() {
        pool.sweep_idle();
        let interval = pool.settings().pool_idle_timeout / 2;
        // A busy pool is empty at times, and shall not wake this task each time.
        let rests = was_calm && pool.is_empty();
        pool.is_sweeper_resting.set(rests);
        drop(pool);
        let interval = interval.clamp(SWEEP_INTERVAL_RANGE.0, SWEEP_INTERVAL_RANGE.1);
        was_calm = tokio::select! {
            changed = queue_signal.changed() => match changed {
                Ok(()) => false,
                Err(_) => return,
            },
            () = sweep_signal.0.notified() => false,
            () = sleep(interval), if !rests => true,
        };
    }
}

/// Resolves the upstream's name periodically and applies the result, for as long as the pool
/// exists.
pub(crate) async fn watch_dns_addresses(pool: Weak<UpstreamClient>) {
    loop {
        sleep(DNS_LOOKUP_INTERVAL).await;
        let Some(shared) = pool.upgrade().map(|pool| Arc::clone(&pool.shared)) else {
            return;
        };
        let UpstreamUrl::Net { host, port, .. } = &shared.settings.url else {
            return;
        };
        let Ok(found) = lookup_host((host.as_str(), *port)).await else {
            continue;
        };
        let found: Vec<_> = found.map(|address| address.ip()).collect();
        if !found.is_empty()
            && let Some(pool) = pool.upgrade()
        {
            pool.apply_resolved_addresses(found);
        }
    }
}

/// Interval of the periodic DNS lookups that find removed addresses.
pub(crate) const DNS_LOOKUP_INTERVAL: Duration = Duration::from_secs(10);

/// Addresses found by the last two DNS lookups. Two lookups are kept because some name servers
/// return only a subset of the addresses each time.
#[derive(Debug, Default)]
pub(crate) struct ResolvedAddresses {
    previous: Vec<IpAddr>,
    latest: Vec<IpAddr>,
}

impl ResolvedAddresses {
    pub(crate) fn record_lookup(&mut self, resolved: Vec<IpAddr>) {
        self.previous = std::mem::replace(&mut self.latest, resolved);
    }

    /// Whether neither of the last two DNS lookups returned the address. `false` before two
    /// lookups, or for `None` (a Unix socket).
    pub(crate) fn is_stale(&self, address: Option<IpAddr>) -> bool {
        let Some(address) = address else { return false };
        [&self.previous, &self.latest]
            .iter()
            .all(|found| !found.is_empty() && !found.contains(&address))
    }
}

/// Whether the upstream URL contains a host name instead of an IP address, so that its addresses
/// may change.
pub(crate) fn has_dns_name(url: &UpstreamUrl) -> bool {
    matches!(url, UpstreamUrl::Net { host, .. } if host.parse::<IpAddr>().is_err())
}

#[cfg(test)]
mod tests {
    use super::ResolvedAddresses;
    use std::net::IpAddr;

    #[test]
    fn address_is_stale_after_two_lookups_without_it() {
        let mut addresses = ResolvedAddresses::default();
        let [old, new]: [IpAddr; 2] =
            ["10.0.0.1", "10.0.0.2"].map(|address| address.parse().unwrap());
        let mut stale = Vec::new();
        for found in [vec![old], vec![new], vec![old, new], vec![new], vec![new]] {
            addresses.record_lookup(found);
            stale.push([Some(old), Some(new), None].map(|address| addresses.is_stale(address)));
        }
        let none = [false; 3];
        assert_eq!(stale, [none, none, none, none, [true, false, false]]);
    }
}
