//! What happens to the fleet, one chapter after the other.

use crate::World;
use crate::books::Fault;
use crate::clients;
use crate::masters::Masters;
use crate::net::Net;
use crate::node::Node;
use crate::policies::{PER, config};
use fastrand::Rng;
use futures_util::future::join_all;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// For what takes a while: those that are gone are counted for some seconds.
const WELL: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chapter {
    Two,
    TwoToSix,
    Rolling,
    NodeLost,
    NodeCut,
    MasterCut,
    MasterLost,
    Lower,
    Raise,
    SixToThree,
}

impl Chapter {
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Two => "two nodes",
            Self::TwoToSix => "two become six",
            Self::Rolling => "every sidecar is restarted",
            Self::NodeLost => "a node is lost, and replaced",
            Self::NodeCut => "a node is cut off from Redis",
            Self::MasterCut => "a master is cut off",
            Self::MasterLost => "a master is killed, and comes back empty",
            Self::Lower => "a ConfigMap with lower limits",
            Self::Raise => "a ConfigMap with the first limits",
            Self::SixToThree => "six become three",
        }
    }

    /// Whether Redis is away from somebody.
    pub(crate) fn is_outage(self) -> bool {
        matches!(self, Self::NodeCut | Self::MasterCut | Self::MasterLost)
    }
}

/// A chapter that was played.
#[derive(Debug)]
pub(crate) struct Played {
    pub(crate) chapter: Chapter,
    pub(crate) began: Instant,
    /// From here on all is well again.
    pub(crate) ended: Instant,
    pub(crate) nodes: usize,
    /// Decisions without Redis.
    pub(crate) degraded: u64,
    /// How long it took until everybody asked Redis again.
    pub(crate) recovery: Option<Duration>,
}

pub(crate) struct Story {
    world: Arc<World>,
    masters: Masters,
    nodes: Vec<Node>,
    /// They are still probed.
    lost: Vec<Node>,
    next: u8,
    rng: Rng,
    lowered: bool,
    /// How long the last outage took to be noticed as over.
    recovery: Option<Duration>,
}

impl Story {
    pub(crate) fn new(world: &Arc<World>, masters: Masters, seed: u64) -> Self {
        Self {
            world: Arc::clone(world),
            masters,
            nodes: Vec::new(),
            lost: Vec::new(),
            next: 1,
            rng: Rng::with_seed(seed),
            lowered: false,
            recovery: None,
        }
    }

    /// From the first node to the last.
    pub(crate) async fn play(mut self, seed: u64) -> Vec<Played> {
        self.grow(2).await;
        self.is_well().await;
        let clients = clients::start(&self.world, seed);
        let mut middle = [
            Chapter::Rolling,
            Chapter::NodeLost,
            Chapter::NodeCut,
            Chapter::MasterCut,
            Chapter::MasterLost,
            Chapter::Lower,
            Chapter::Raise,
        ];
        self.rng.shuffle(&mut middle);
        let place = |chapter| {
            middle
                .iter()
                .position(|one| *one == chapter)
                .expect("it is there")
        };
        let (lower, raise) = (place(Chapter::Lower), place(Chapter::Raise));
        if raise < lower {
            middle.swap(lower, raise);
        }
        let mut played = Vec::new();
        for chapter in [Chapter::Two, Chapter::TwoToSix]
            .into_iter()
            .chain(middle)
            .chain([Chapter::SixToThree])
        {
            played.push(self.chapter(chapter).await);
            if played.len() == 1 {
                self.keys_are_where_they_should_be().await;
            }
        }
        self.world.end();
        for client in clients {
            client.await.unwrap();
        }
        self.shrink(0).await;
        played
    }

    async fn chapter(&mut self, chapter: Chapter) -> Played {
        let (began, before) = (Instant::now(), self.degraded().await);
        eprintln!("{:>6.1} s  {}", self.world.books.at(began), chapter.title());
        match chapter {
            Chapter::Two => sleep(2 * PER).await,
            Chapter::TwoToSix => self.grow(6).await,
            Chapter::Rolling => self.restart_all().await,
            Chapter::NodeLost => self.lose_node().await,
            Chapter::NodeCut => self.cut_node().await,
            Chapter::MasterCut => self.cut_master().await,
            Chapter::MasterLost => self.lose_master().await,
            Chapter::Lower => self.roll_out(true).await,
            Chapter::Raise => self.roll_out(false).await,
            Chapter::SixToThree => self.shrink(3).await,
        }
        self.is_well().await;
        // Longer than an outage needs to end everywhere.
        sleep(3 * PER).await;
        let after = self.degraded().await;
        // Whoever started anew counts from 0.
        let of = |(node, count): (&u8, &u64)| {
            count - before.get(node).filter(|old| *old <= count).unwrap_or(&0)
        };
        let degraded = after.iter().map(of).sum();
        let (books, ended) = (&self.world.books, Instant::now());
        match (chapter.is_outage(), degraded) {
            (true, 0) => books.complain(format!("{}: nobody noticed", chapter.title())),
            (false, 1..) if books.still(began, ended).is_zero() => {
                books.complain(format!(
                    "{}: {degraded} decisions without Redis",
                    chapter.title()
                ));
            }
            _ => {}
        }
        let recovery = self.recovery.take();
        Played {
            chapter,
            began,
            ended,
            nodes: self.nodes.len(),
            degraded,
            recovery,
        }
    }

    async fn grow(&mut self, to: usize) {
        while self.nodes.len() < to {
            let config = self.config(self.lowered);
            self.nodes
                .push(Node::start(self.next, &self.world, &config).await);
            self.next += 1;
            self.some_time(0..1500).await;
        }
    }

    /// Those that go are told at once.
    async fn shrink(&mut self, to: usize) {
        self.rng.shuffle(&mut self.nodes);
        let mut leaving = self.nodes.split_off(to);
        for status in join_all(leaving.iter_mut().map(Node::end)).await {
            if !status.success() {
                self.world
                    .books
                    .complain(format!("a sidecar ended with {status}"));
            }
        }
    }

    async fn restart_all(&mut self) {
        self.rng.shuffle(&mut self.nodes);
        for nth in 0..self.nodes.len() {
            let node = &mut self.nodes[nth];
            let status = node.end().await;
            if !status.success() {
                self.world
                    .books
                    .complain(format!("a sidecar ended with {status}"));
            }
            node.begin();
            let id = node.id;
            self.until("a sidecar to be ready again", async |story| {
                story.world.balancer.ready().contains(&id)
            })
            .await;
        }
    }

    async fn lose_node(&mut self) {
        let mut node = self.nodes.swap_remove(self.rng.usize(..self.nodes.len()));
        let (fault, silently) = (Fault::NodeLost(node.id), self.rng.bool());
        let lost = async {
            // Without power nobody says that connections have ended.
            if silently {
                node.machine.cut_all();
            }
            node.kill().await;
        };
        self.world.books.begin(fault, lost).await;
        self.lost.push(node);
        self.some_time(2000..4000).await;
        self.grow(self.nodes.len() + 1).await;
    }

    async fn cut_node(&mut self) {
        let nth = self.rng.usize(..self.nodes.len());
        let live = self.nodes.len() as u64;
        let fault = Fault::NodeCut {
            node: self.nodes[nth].id,
            live,
        };
        let machine = &self.nodes[nth].machine;
        self.world
            .books
            .begin(fault, async { machine.cut(Net::Back) })
            .await;
        // Shorter and longer than silent instances are counted.
        self.some_time(4000..9000).await;
        self.nodes[nth].machine.join(Net::Back);
        self.recover(fault).await;
    }

    async fn cut_master(&mut self) {
        let master = self.rng.usize(..self.masters.0.len());
        let fault = Fault::MasterCut(master);
        let machine = &self.masters.0[master].machine;
        self.world
            .books
            .begin(fault, async { machine.cut(Net::Back) })
            .await;
        self.some_time(4000..9000).await;
        self.masters.0[master].machine.join(Net::Back);
        self.recover(fault).await;
    }

    async fn lose_master(&mut self) {
        let master = self.rng.usize(..self.masters.0.len());
        let fault = Fault::MasterLost(master);
        let server = &mut self.masters.0[master];
        self.world.books.begin(fault, server.kill()).await;
        self.some_time(2000..6000).await;
        self.masters.0[master].restart().await;
        self.recover(fault).await;
    }

    /// Redis can be reached again: the fault is over when everybody does.
    async fn recover(&mut self, fault: Fault) {
        let healed = Instant::now();
        self.is_well().await;
        self.recovery = Some(healed.elapsed());
        self.world.books.over(fault);
    }

    /// Kubelets look when they look: in any order, some seconds apart.
    async fn roll_out(&mut self, lowered: bool) {
        let mut generations = BTreeMap::new();
        for node in &self.nodes {
            generations.insert(
                node.id,
                node.metrics().await.value("tidegate_config_generation"),
            );
        }
        let config = self.config(lowered);
        self.rng.shuffle(&mut self.nodes);
        self.world.books.version(lowered);
        for nth in 0..self.nodes.len() {
            self.nodes[nth].mount(&config);
            self.some_time(0..2000).await;
        }
        self.until("the configuration to be everywhere", async |story| {
            for node in &story.nodes {
                let generation = node.metrics().await.value("tidegate_config_generation");
                if generation == generations[&node.id] {
                    return false;
                }
            }
            true
        })
        .await;
        self.world.books.is_everywhere();
        self.lowered = lowered;
    }

    fn config(&self, lowered: bool) -> String {
        config(&self.masters.urls(), lowered)
    }

    /// Waits until all nodes take requests, ask Redis, and count each other.
    async fn is_well(&mut self) {
        let count = self.nodes.len() as u64;
        self.until("the fleet to be well", async |story| {
            if story.world.balancer.ready().len() != story.nodes.len() {
                return false;
            }
            for node in &story.nodes {
                let metrics = node.metrics().await;
                let says = |name| metrics.value(name);
                if says("tidegate_store_up") != 1
                    || says("tidegate_breaker_open") != 0
                    || says("tidegate_instances") != count
                {
                    return false;
                }
            }
            true
        })
        .await;
    }

    async fn until(&self, what: &str, mut comes: impl AsyncFnMut(&Self) -> bool) {
        let deadline = Instant::now() + WELL;
        while !comes(self).await {
            if Instant::now() > deadline {
                return self
                    .world
                    .books
                    .complain(format!("waited {WELL:?} for {what}"));
            }
            sleep(Duration::from_millis(200)).await;
        }
    }

    /// Decisions without Redis so far, by node.
    async fn degraded(&self) -> BTreeMap<u8, u64> {
        let mut degraded = BTreeMap::new();
        for node in &self.nodes {
            let metrics = node.metrics().await;
            degraded.insert(
                node.id,
                metrics
                    .each("tidegate_degraded_total")
                    .map(|(_, count)| count)
                    .sum(),
            );
        }
        degraded
    }

    /// Else a fault would be looked for at the wrong keys.
    async fn keys_are_where_they_should_be(&self) {
        self.until("every key to be on its master", async |story| {
            let mut keys = story.world.keys.iter().filter(|key| key.policy.is_some());
            keys.all(|key| story.masters.has(key.master, &key.name))
        })
        .await;
    }

    async fn some_time(&mut self, millis: std::ops::Range<u64>) {
        sleep(Duration::from_millis(self.rng.u64(millis))).await;
    }
}
