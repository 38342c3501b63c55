//! The network between an instance and the servers: byte streams in place of sockets.
//!
//! A stream belongs to the runtime of its instance. What it writes goes to the world with the
//! instance's time; what arrives has a time at which it becomes readable.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;
use tidegate::clock::ClockSteps;
use tidegate::http_client;
use tidegate::store::redis::{RedisAddress, RedisStreamFuture, RedisTransport};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Notify;
use tokio::time::{Instant, Sleep, sleep_until};

/// Unique over all instances of a world.
pub(crate) type ConnectionId = u64;

/// What an instance does at a connection.
#[derive(Debug)]
pub(crate) enum ClientAction {
    Connect(String, SharedInbox),
    Send(Vec<u8>),
    Close,
}

/// What an instance receives at a connection.
#[derive(Debug)]
pub(crate) enum Delivery {
    Established,
    Refused,
    Bytes(Vec<u8>),
    Reset,
}

/// Deliveries to one stream, each with the world's time of its arrival.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    deliveries: VecDeque<(u64, Delivery)>,
    waker: Option<Waker>,
}

pub(crate) type SharedInbox = Arc<Mutex<Inbox>>;

impl Inbox {
    pub(crate) fn push(&mut self, at_us: u64, delivery: Delivery) {
        self.deliveries.push_back((at_us, delivery));
        if let Some(waker) = self.waker.take() {
            waker.wake();
        }
    }
}

/// The world's time in the runtime of one instance.
#[derive(Debug)]
pub(crate) struct InstanceTime {
    start: Instant,
    start_us: u64,
    /// How long the machine was suspended: the runtime's time does not include it. How far its
    /// wall clock was set.
    pub(crate) steps: ClockSteps,
}

impl InstanceTime {
    /// Call it in the runtime of the instance.
    pub(crate) fn starting_at(start_us: u64) -> Self {
        Self {
            start: Instant::now(),
            start_us,
            steps: ClockSteps::default(),
        }
    }

    pub(crate) fn now_us(&self) -> u64 {
        self.first_us() + self.start.elapsed().as_micros() as u64
    }

    pub(crate) fn instant_at(&self, at_us: u64) -> Instant {
        self.start + Duration::from_micros(at_us.saturating_sub(self.first_us()))
    }

    fn first_us(&self) -> u64 {
        self.start_us + self.steps.suspended_us.load(Ordering::Relaxed)
    }
}

/// All connections of one instance.
pub(crate) struct InstanceNetwork {
    pub(crate) time: InstanceTime,
    next_id: AtomicU64,
    actions: Mutex<Vec<(u64, ConnectionId, ClientAction)>>,
    /// Notified by each action, so that the world continues before the instance does.
    pub(crate) acted: Notify,
}

impl InstanceNetwork {
    pub(crate) fn new(time: InstanceTime, first_id: ConnectionId) -> Self {
        Self {
            time,
            next_id: AtomicU64::new(first_id),
            actions: Mutex::default(),
            acted: Notify::new(),
        }
    }

    pub(crate) fn take_actions(&self) -> Vec<(u64, ConnectionId, ClientAction)> {
        std::mem::take(&mut self.actions.lock().unwrap())
    }

    /// Sorts the closed connections of a runtime that ended. It drops its tasks in an order that
    /// depends on the tasks of other threads' runs.
    pub(crate) fn sort_actions(&self) {
        self.actions.lock().unwrap().sort_by_key(|(_, id, _)| *id);
    }

    fn act(&self, at_us: u64, id: ConnectionId, action: ClientAction) {
        self.actions.lock().unwrap().push((at_us, id, action));
        self.acted.notify_one();
    }
}

impl fmt::Debug for InstanceNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InstanceNetwork")
    }
}

/// The transport in the settings of one instance.
#[derive(Debug)]
pub(crate) struct SimulatedTransport(pub(crate) Arc<InstanceNetwork>);

impl RedisTransport for SimulatedTransport {
    fn connect(&self, address: &RedisAddress) -> RedisStreamFuture {
        let (network, address) = (Arc::clone(&self.0), address.to_string());
        Box::pin(async move {
            let id = network.next_id.fetch_add(1, Ordering::Relaxed);
            let inbox = SharedInbox::default();
            let now_us = network.time.now_us();
            network.act(
                now_us,
                id,
                ClientAction::Connect(address, Arc::clone(&inbox)),
            );
            let mut stream = ClientStream {
                network,
                id,
                inbox,
                arrival: None,
                unread: Vec::new(),
            };
            match std::future::poll_fn(|context| stream.poll_delivery(context)).await {
                Delivery::Established => Ok(Box::new(stream) as Box<dyn http_client::ClientStream>),
                _ => Err(io::ErrorKind::ConnectionRefused.into()),
            }
        })
    }
}

/// The instance's end of a connection.
struct ClientStream {
    network: Arc<InstanceNetwork>,
    id: ConnectionId,
    inbox: SharedInbox,
    /// Wakes the reader when the next delivery arrives.
    arrival: Option<Pin<Box<Sleep>>>,
    unread: Vec<u8>,
}

impl ClientStream {
    fn poll_delivery(&mut self, context: &mut Context<'_>) -> Poll<Delivery> {
        loop {
            let at_us = {
                let mut inbox = self.inbox.lock().unwrap();
                let Some((at_us, _)) = inbox.deliveries.front() else {
                    inbox.waker = Some(context.waker().clone());
                    return Poll::Pending;
                };
                *at_us
            };
            if at_us <= self.network.time.now_us() {
                self.arrival = None;
                let delivery = self.inbox.lock().unwrap().deliveries.pop_front();
                return Poll::Ready(delivery.expect("the delivery that was seen").1);
            }
            let arrives = self.network.time.instant_at(at_us);
            let sleep = self
                .arrival
                .get_or_insert_with(|| Box::pin(sleep_until(arrives)));
            ready!(sleep.as_mut().poll(context));
            self.arrival = None;
        }
    }
}

impl AsyncRead for ClientStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.unread.is_empty() {
            match ready!(self.poll_delivery(context)) {
                Delivery::Bytes(bytes) => self.unread = bytes,
                _ => return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into())),
            }
        }
        let length = self.unread.len().min(buffer.remaining());
        buffer.put_slice(&self.unread[..length]);
        self.unread.drain(..length);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for ClientStream {
    fn poll_write(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let now_us = self.network.time.now_us();
        self.network
            .act(now_us, self.id, ClientAction::Send(bytes.to_vec()));
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl Drop for ClientStream {
    fn drop(&mut self) {
        // The runtime of a crashed instance has no clock any more; the world corrects the time.
        self.network.act(0, self.id, ClientAction::Close);
    }
}
