//! The clients, and their load balancer, which follows the readiness of the nodes.

use crate::FleetContext;
use crate::support::client::{RequestOutcome, handshake_http1, http_get};
use bytes::Bytes;
use fastrand::Rng;
use http_body_util::Full;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

/// Timeout longer than any operation takes, even on a busy machine.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Pause of an ordinary client between two requests.
const PAUSE_MS: Range<u64> = 40..220;

/// What one client does.
#[derive(Clone, Debug)]
pub(crate) struct ClientLoad {
    /// Index of the quota that it uses.
    pub(crate) key: usize,
    pub(crate) pause_ms: Range<u64>,
    /// An ordinary client waits while the test reads counters. Others end at the given time.
    pub(crate) until: Option<Instant>,
}

/// The nodes that accept requests, and their addresses.
#[derive(Debug, Default)]
pub(crate) struct LoadBalancer(Mutex<BTreeMap<u8, SocketAddr>>);

impl LoadBalancer {
    pub(crate) fn ready_nodes(&self) -> Vec<u8> {
        self.0.lock().unwrap().keys().copied().collect()
    }

    pub(crate) fn remove_node(&self, node: u8) {
        self.0.lock().unwrap().remove(&node);
    }

    /// A random ready node for a new connection.
    fn choose_random_node(&self, rng: &mut Rng) -> Option<(u8, SocketAddr)> {
        let nodes = self.0.lock().unwrap();
        rng.choice(nodes.iter())
            .map(|(node, address)| (*node, *address))
    }

    fn contains_node(&self, node: u8) -> bool {
        self.0.lock().unwrap().contains_key(&node)
    }
}

impl FleetContext {
    /// Probes readiness about twice a second, as the kubelet and endpoint updates do.
    pub(crate) async fn probe_readiness(
        self: Arc<Self>,
        node: u8,
        probes: SocketAddr,
        address: SocketAddr,
    ) {
        loop {
            match timeout(PROBE_TIMEOUT, http_get(probes, "/readyz")).await {
                Ok(Ok((200, _))) => drop(self.balancer.0.lock().unwrap().insert(node, address)),
                _ => self.balancer.remove_node(node),
            }
            sleep(Duration::from_millis(fastrand::u64(300..700))).await;
        }
    }
}

impl ClientLoad {
    fn has_ended(&self, context: &FleetContext) -> bool {
        match self.until {
            Some(until) => Instant::now() >= until,
            None => context.has_ended(),
        }
    }

    async fn wait_while_paused(&self, context: &FleetContext) {
        if self.until.is_none() {
            context.wait_while_paused().await;
        }
    }
}

/// Runs all clients until the time is over. The seed determines each client's choices.
pub(crate) fn spawn_clients(context: &Arc<FleetContext>, seed: u64) -> Vec<JoinHandle<()>> {
    let clients_of = |key: usize| {
        let policy = context.keys[key].policy;
        policy.map_or(4, |policy| policy.clients_per_key)
    };
    let keys = (0..context.keys.len()).flat_map(|key| (0..clients_of(key)).map(move |_| key));
    let load = |key| ClientLoad {
        key,
        pause_ms: PAUSE_MS,
        until: None,
    };
    (seed..)
        .zip(keys)
        .map(|(seed, key)| spawn_client(context, load(key), Rng::with_seed(seed)))
        .collect()
}

/// Spawns one client: one connection after another, each to a random node.
pub(crate) fn spawn_client(
    context: &Arc<FleetContext>,
    load: ClientLoad,
    mut rng: Rng,
) -> JoinHandle<()> {
    let context = Arc::clone(context);
    tokio::spawn(async move {
        while !load.has_ended(&context) {
            if let Some((node, address)) = context.balancer.choose_random_node(&mut rng) {
                run_connection(&context, &load, node, address, &mut rng).await;
            }
            sleep_randomly(&load, &mut rng).await;
        }
    })
}

async fn run_connection(
    context: &FleetContext,
    load: &ClientLoad,
    node: u8,
    address: SocketAddr,
    rng: &mut Rng,
) {
    load.wait_while_paused(context).await;
    let pending = context.ledger.begin_request(load.key, node);
    let connected = timeout(RESPONSE_TIMEOUT, async {
        handshake_http1(TcpStream::connect(address).await?).await
    })
    .await;
    let late = || Err(io::Error::from(io::ErrorKind::TimedOut));
    let mut sidecar = match connected.unwrap_or_else(|_| late()) {
        Ok(sidecar) => sidecar,
        Err(error) => return pending.finish(RequestOutcome::NoAnswer(error.to_string())),
    };
    drop(pending);
    for _ in 0..rng.u32(1..60) {
        load.wait_while_paused(context).await;
        if load.has_ended(context)
            || !context.balancer.contains_node(node)
            || sidecar.ready().await.is_err()
        {
            break;
        }
        let number = rng.u32(..).to_string();
        let request = context.keys[load.key]
            .request_builder()
            .header("x-key", load.key)
            .header("x-number", &number)
            .body(Full::<Bytes>::default())
            .unwrap();
        let pending = context.ledger.begin_request(load.key, node);
        let outcome =
            RequestOutcome::from_response(sidecar.send_request(request), &number, RESPONSE_TIMEOUT)
                .await;
        let goes_on = matches!(outcome, RequestOutcome::Answered(_));
        pending.finish(outcome);
        if !goes_on {
            break;
        }
        sleep_randomly(load, rng).await;
    }
}

async fn sleep_randomly(load: &ClientLoad, rng: &mut Rng) {
    sleep(Duration::from_millis(rng.u64(load.pause_ms.clone()))).await;
}
