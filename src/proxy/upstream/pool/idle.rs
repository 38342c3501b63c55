//! Idle connections, and the tasks that close them.

use std::net::IpAddr;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::UpstreamPool;
use super::connection::{ConnectionProtocol, UpstreamConnection};
use crate::proxy::upstream::addresses;
use crate::proxy::upstream::http2::Http2Connection;

/// Minimum and maximum interval between sweeps that close idle connections.
const SWEEP_INTERVAL_RANGE: (Duration, Duration) =
    (Duration::from_millis(50), Duration::from_secs(5));

impl UpstreamPool {
    /// Updates the pool after a request on `http2_connection`, or the connection itself, has ended:
    /// drops, retires or reuses the connection.
    pub(super) fn handle_stream_end(self: &Rc<Self>, http2_connection: &Rc<Http2Connection>) {
        if self.shared.queued_requests.load(Ordering::SeqCst) > 0 {
            let is_unneeded =
                http2_connection.idle_since().is_some() && self.waiters.borrow().is_empty();
            if is_unneeded || self.should_yield_to_other_workers() {
                http2_connection.retire();
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

    pub(super) fn remove_http2_connection(&self, http2_connection: &Rc<Http2Connection>) {
        self.http2_connections
            .borrow_mut()
            .retain(|known| !Rc::ptr_eq(known, http2_connection));
    }

    pub(super) fn idle_count(&self) -> usize {
        let http2_idle = self
            .http2_connections
            .borrow()
            .iter()
            .filter(|http2_connection| http2_connection.idle_since().is_some())
            .count();
        http2_idle + self.idle_http1.borrow().len()
    }

    pub(crate) fn return_connection(&self, mut connection: Box<UpstreamConnection>) {
        let _freed_last = connection.share.take();
        let ConnectionProtocol::Http1(http1) = &mut connection.protocol else {
            return;
        };
        http1.response_rate.restart();
        // A connection is not ready if the upstream closes it or the request is not finished.
        // Dropping the connection here closes it.
        if !http1.sender.is_ready() || self.addresses.borrow().is_stale(http1.peer) {
            return;
        }
        connection.idle_since = Some(Instant::now());
        if self.shared.queued_requests.load(Ordering::SeqCst) > 0 {
            self.hand_to_waiter_or_close(connection);
        } else {
            self.keep_idle(connection);
        }
    }

    pub(super) fn keep_idle(&self, connection: Box<UpstreamConnection>) {
        let mut idle = self.idle_http1.borrow_mut();
        idle.push_back(connection);
        if idle.len() > self.shared.max_idle_per_worker {
            idle.pop_front();
        }
    }

    /// Records the latest DNS result and stops using connections to addresses removed from DNS,
    /// even if they still work.
    pub(super) fn apply_resolved_addresses(&self, found: Vec<IpAddr>) {
        self.addresses.borrow_mut().record_lookup(found);
        let addresses = self.addresses.borrow();
        self.idle_http1
            .borrow_mut()
            .retain(|connection| match &connection.protocol {
                ConnectionProtocol::Http1(http1) => !addresses.is_stale(http1.peer),
                ConnectionProtocol::Http2(_) => true,
            });
        self.http2_connections
            .borrow_mut()
            .retain(|http2_connection| {
                let is_current = !addresses.is_stale(http2_connection.peer);
                if !is_current {
                    http2_connection.retire();
                }
                is_current
            });
    }

    /// Closes idle connections that are dead or idle for too long, and those whose permits waiting
    /// requests need.
    pub(super) fn sweep_idle(&self) {
        let (max_age, now) = (self.settings().pool_idle_timeout, Instant::now());
        let mut idle = self.idle_http1.borrow_mut();
        idle.retain(|connection| connection.is_reusable(max_age, now));
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
}

pub(super) async fn run_idle_sweeper(
    pool: Weak<UpstreamPool>,
    mut queue_signal: watch::Receiver<()>,
) {
    let Some(interval) = pool
        .upgrade()
        .map(|pool| pool.settings().pool_idle_timeout / 2)
    else {
        return;
    };
    let interval = interval.clamp(SWEEP_INTERVAL_RANGE.0, SWEEP_INTERVAL_RANGE.1);
    while let Some(pool) = pool.upgrade() {
        pool.sweep_idle();
        drop(pool);
        tokio::select! {
            changed = queue_signal.changed() => if changed.is_err() { return },
            () = sleep(interval) => {}
        }
    }
}

/// Resolves the upstream's name periodically and applies the result, for as long as the pool
/// exists.
pub(super) async fn watch_dns_addresses(pool: Weak<UpstreamPool>) {
    loop {
        sleep(addresses::DNS_LOOKUP_INTERVAL).await;
        let Some(shared) = pool.upgrade().map(|pool| Arc::clone(&pool.shared)) else {
            return;
        };
        let found = addresses::resolve_addresses(&shared.settings.url).await;
        if let (Some(found), Some(pool)) = (found, pool.upgrade()) {
            pool.apply_resolved_addresses(found);
        }
    }
}
