//! The task that renews the map, when somebody finds it stale, and now and then.

use super::map::{self, Map, Node, Range};
use crate::store::redis::connect::{self, Address};
use crate::store::redis::failure::{Failure, Trouble};
use crate::store::redis::link::{Context, Link, State, Target};
use redis::{Cmd, RedisError, Value};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, timeout};

/// The map is renewed this often, if nothing asks for it before.
const RENEWAL: Duration = Duration::from_secs(5);

/// Pause between two renewals that are asked for: doubled up to the largest while nothing new comes of it.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LARGEST_PAUSE: Duration = Duration::from_millis(500);

/// Renews the map when somebody finds it stale, and now and then.
pub(super) async fn keep(
    context: Arc<Context>,
    publish: watch::Sender<Arc<Map>>,
    stale: Arc<Notify>,
) {
    let health = &context.health;
    let (mut known, mut lost, mut pause): (Vec<Range>, _, _) = (Vec::new(), false, FIRST_PAUSE);
    loop {
        let before = publish.borrow().clone();
        match ranges(&context, &before).await {
            Ok(ranges) if ranges.is_empty() => health.count(Failure::ClusterDown),
            Ok(ranges) => {
                if std::mem::take(&mut lost) {
                    health.link_restored();
                }
                if ranges != known {
                    publish.send_replace(Arc::new(renewed(&context, &before, &ranges).await));
                    (known, pause) = (ranges, FIRST_PAUSE);
                }
            }
            Err(trouble) => {
                health.count(trouble.failure);
                // Whoever knows nodes knows it from their links.
                if known.is_empty() && !std::mem::replace(&mut lost, true) {
                    health.link_lost(&trouble);
                }
            }
        }
        sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
        pause = (pause * 2).min(LARGEST_PAUSE);
        if !known.is_empty() && timeout(RENEWAL, stale.notified()).await.is_err() {
            pause = FIRST_PAUSE;
        }
    }
}

/// A map in which nodes that stay keep their connections.
async fn renewed(context: &Arc<Context>, before: &Map, ranges: &[Range]) -> Map {
    let mut nodes: Vec<Arc<Node>> = Vec::new();
    for (_, _, address) in ranges {
        if nodes.iter().any(|node| node.address == *address) {
            continue;
        }
        if let Some(known) = before.at(address) {
            nodes.push(Arc::clone(known));
            continue;
        }
        let target = Target::node(address.clone(), map::probe(ranges, address).await);
        let link = Arc::new(Link::start(Arc::clone(context), target));
        let failures = AtomicU32::new(0);
        nodes.push(Arc::new(Node {
            address: address.clone(),
            link,
            failures,
            since: Instant::now(),
        }));
    }
    for gone in before
        .nodes
        .iter()
        .filter(|node| !nodes.iter().any(|other| Arc::ptr_eq(other, node)))
    {
        let (gone, patience) = (Arc::clone(gone), context.settings.timeout);
        // What is on the way is still answered, if only with where to go.
        tokio::spawn(async move {
            sleep(patience).await;
            gone.link.retire();
        });
    }
    Map::new(nodes, ranges)
}

/// Asks for the map: first those who are connected, one after the other, then whoever was configured.
async fn ranges(context: &Context, map: &Map) -> Result<Vec<Range>, Trouble> {
    let settings = &context.settings;
    let mut command = Cmd::new();
    command.arg("CLUSTER").arg("SLOTS");
    let mut nodes = map.nodes.clone();
    fastrand::shuffle(&mut nodes);
    for node in nodes {
        if let State::Up(live) = &*node.link.state()
            && let Ok(Ok(reply)) = timeout(settings.timeout, live.answer(&command, false)).await
            && let Some(ranges) = map::ranges(&reply, &node.address)
        {
            return Ok(sorted(ranges));
        }
    }
    let mut trouble = Trouble::new(Failure::Dns, "no address is known");
    let each = settings.connect_timeout / 2;
    for address in &settings.servers {
        let asked = timeout(each, ask_stranger(context, address, &command)).await;
        match asked.unwrap_or_else(|late| Err(late.into())) {
            Ok(ranges) => return Ok(sorted(ranges)),
            Err(error) => {
                trouble = Trouble::new(error.failure, format!("{address}: {}", error.why))
            }
        }
    }
    Err(trouble)
}

async fn ask_stranger(
    context: &Context,
    address: &Address,
    command: &Cmd,
) -> Result<Vec<Range>, Trouble> {
    let (mut connection, _driver) = connect::open(address, context.settings.how()).await?;
    let reply = match connection.send_packed_command(command).await? {
        Value::ServerError(error) => return Err(RedisError::from(error).into()),
        reply => reply,
    };
    map::ranges(&reply, address)
        .ok_or_else(|| Trouble::new(Failure::Reply, "the answer makes no sense"))
}

/// So that two answers that say the same are the same.
fn sorted(mut ranges: Vec<Range>) -> Vec<Range> {
    ranges.sort_unstable_by_key(|(first, last, _)| (*first, *last));
    ranges
}
