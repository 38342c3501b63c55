//! Counts of what each client holds: connections or tunnels.

use parking_lot::Mutex;
use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

/// Number of connections or tunnels of each client, shared by all workers. A client is an address
/// prefix.
#[derive(Clone, Debug, Default)]
pub(crate) struct ClientCounts(Arc<Mutex<HashMap<IpAddr, usize>>>);

/// One counted connection or tunnel of a client, until it is dropped.
#[derive(Debug)]
pub(crate) struct ClientCountGuard {
    counts: ClientCounts,
    client: IpAddr,
}

impl ClientCounts {
    /// Counts one more connection or tunnel of the client. `None` if it has `limit` already.
    pub(crate) fn try_acquire(&self, client: IpAddr, limit: usize) -> Option<ClientCountGuard> {
        let mut counts = self.0.lock();
        let count = counts.entry(client).or_default();
        if *count >= limit {
            return None;
        }
        *count += 1;
        Some(ClientCountGuard {
            counts: self.clone(),
            client,
        })
    }
}

impl Drop for ClientCountGuard {
    fn drop(&mut self) {
        let mut counts = self.counts.0.lock();
        if let Some(count) = counts.get_mut(&self.client) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.client);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_each_client_until_the_guards_are_dropped() {
        let counts = ClientCounts::default();
        let [a, b] = ["10.0.0.1", "10.0.0.2"].map(|ip| ip.parse().unwrap());
        let first = counts.try_acquire(a, 2);
        let second = counts.try_acquire(a, 2);
        assert!(first.is_some() && second.is_some());
        assert!(counts.try_acquire(a, 2).is_none());
        assert!(counts.try_acquire(b, 2).is_some());
        drop(first);
        assert!(counts.try_acquire(a, 2).is_some());
        drop(second);
        assert!(counts.0.lock().is_empty());
    }
}
