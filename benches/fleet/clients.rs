//! The clients, and their load balancer, which follows the readiness of the nodes.

use crate::FleetContext;
use crate::support::client::{RequestOutcome, handshake_http1, http_get};
use bytes::Bytes;
use fastrand::Rng;
use http_body_util::Full;
use hyper::Request;
use std::collections::BTreeMap;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

/// Timeout longer than any operation takes, even on a busy machine.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
const CLIENTS_PER_KEY: u64 = 4;

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

    fn choose_node(&self, rng: &mut Rng) -> Option<(u8, SocketAddr)> {
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

/// Runs all clients until the time is over. The seed determines each client's choices.
pub(crate) fn spawn_clients(context: &Arc<FleetContext>, seed: u64) -> Vec<JoinHandle<()>> {
    let keys = (0..context.keys.len()).flat_map(|key| (0..CLIENTS_PER_KEY).map(move |_| key));
    (seed..)
        .zip(keys)
        .map(|(seed, key)| tokio::spawn(run_client(Arc::clone(context), key, Rng::with_seed(seed))))
        .collect()
}

/// Runs one client: one connection after another, each to a random node.
async fn run_client(context: Arc<FleetContext>, key: usize, mut rng: Rng) {
    while !context.has_ended() {
        if let Some((node, address)) = context.balancer.choose_node(&mut rng) {
            run_connection(&context, key, node, address, &mut rng).await;
        }
        sleep_randomly(&mut rng).await;
    }
}

async fn run_connection(
    context: &FleetContext,
    key: usize,
    node: u8,
    address: SocketAddr,
    rng: &mut Rng,
) {
    let pending = context.ledger.begin_request(key, node);
    let connected = timeout(RESPONSE_TIMEOUT, async {
        handshake_http1(TcpStream::connect(address).await?).await
    })
    .await;
    let late = || Err(io::Error::from(io::ErrorKind::TimedOut));
    let mut sidecar = match connected.unwrap_or_else(|_| late()) {
        Ok(sidecar) => sidecar,
        Err(error) => return pending.finish(RequestOutcome::NoAnswer(error.to_string())),
    };
    let (path, user) = context.keys[key].path_and_user();
    for _ in 0..rng.u32(1..60) {
        if context.has_ended()
            || !context.balancer.contains_node(node)
            || sidecar.ready().await.is_err()
        {
            break;
        }
        let number = rng.u32(..).to_string();
        let request = Request::get(path)
            .header("host", "fleet.test")
            .header("x-user", user);
        let request = request
            .header("x-number", &number)
            .body(Full::<Bytes>::default())
            .unwrap();
        let pending = context.ledger.begin_request(key, node);
        let outcome =
            RequestOutcome::from_response(sidecar.send_request(request), &number, RESPONSE_TIMEOUT)
                .await;
        let goes_on = matches!(outcome, RequestOutcome::Answered(_));
        pending.finish(outcome);
        if !goes_on {
            break;
        }
        sleep_randomly(rng).await;
    }
}

async fn sleep_randomly(rng: &mut Rng) {
    sleep(Duration::from_millis(rng.u64(20..200))).await;
}
