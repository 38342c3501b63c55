//! The clients, and the balancer in front of them, which believes the nodes' readiness.

use crate::World;
use crate::support::client::{Outcome, get, handshake1};
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

/// Longer than anything takes, a busy machine included.
const PATIENCE: Duration = Duration::from_secs(10);
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
const CLIENTS_PER_KEY: u64 = 4;

/// The nodes that take requests, and where.
#[derive(Debug, Default)]
pub(crate) struct Balancer(Mutex<BTreeMap<u8, SocketAddr>>);

impl Balancer {
    pub(crate) fn ready(&self) -> Vec<u8> {
        self.0.lock().unwrap().keys().copied().collect()
    }

    pub(crate) fn forget(&self, node: u8) {
        self.0.lock().unwrap().remove(&node);
    }

    fn any(&self, rng: &mut Rng) -> Option<(u8, SocketAddr)> {
        let nodes = self.0.lock().unwrap();
        rng.choice(nodes.iter())
            .map(|(node, address)| (*node, *address))
    }

    fn has(&self, node: u8) -> bool {
        self.0.lock().unwrap().contains_key(&node)
    }
}

impl World {
    /// As the kubelet and whoever hears of it do: twice a second or so.
    pub(crate) async fn probe(self: Arc<Self>, node: u8, probes: SocketAddr, address: SocketAddr) {
        loop {
            match timeout(PROBE_TIMEOUT, get(probes, "/readyz")).await {
                Ok(Ok((200, _))) => drop(self.balancer.0.lock().unwrap().insert(node, address)),
                _ => self.balancer.forget(node),
            }
            sleep(Duration::from_millis(fastrand::u64(300..700))).await;
        }
    }
}

/// All of them, until the time is over. What each one does is the seed's choice.
pub(crate) fn start(world: &Arc<World>, seed: u64) -> Vec<JoinHandle<()>> {
    let keys = (0..world.keys.len()).flat_map(|key| (0..CLIENTS_PER_KEY).map(move |_| key));
    (seed..)
        .zip(keys)
        .map(|(seed, key)| tokio::spawn(live(Arc::clone(world), key, Rng::with_seed(seed))))
        .collect()
}

/// One connection after the other, each to some node.
async fn live(world: Arc<World>, key: usize, mut rng: Rng) {
    while !world.is_over() {
        if let Some((node, address)) = world.balancer.any(&mut rng) {
            talk(&world, key, node, address, &mut rng).await;
        }
        pause(&mut rng).await;
    }
}

async fn talk(world: &World, key: usize, node: u8, address: SocketAddr, rng: &mut Rng) {
    let asked = world.books.ask(key, node);
    let connected = timeout(PATIENCE, async {
        handshake1(TcpStream::connect(address).await?).await
    })
    .await;
    let late = || Err(io::Error::from(io::ErrorKind::TimedOut));
    let mut sidecar = match connected.unwrap_or_else(|_| late()) {
        Ok(sidecar) => sidecar,
        Err(error) => return asked.end(Outcome::Nothing(error.to_string())),
    };
    let (path, user) = world.keys[key].request();
    for _ in 0..rng.u32(1..60) {
        if world.is_over() || !world.balancer.has(node) || sidecar.ready().await.is_err() {
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
        let asked = world.books.ask(key, node);
        let outcome = Outcome::of(sidecar.send_request(request), &number, PATIENCE).await;
        let goes_on = matches!(outcome, Outcome::Answered(_));
        asked.end(outcome);
        if !goes_on {
            break;
        }
        pause(rng).await;
    }
}

async fn pause(rng: &mut Rng) {
    sleep(Duration::from_millis(rng.u64(20..200))).await;
}
