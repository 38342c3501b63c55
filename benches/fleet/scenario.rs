//! The phases of the test, one after another.

use crate::FleetContext;
use crate::clients;
use crate::faults::FleetFault;
use crate::masters::RedisMasters;
use crate::net::BridgeNetwork;
use crate::node::FleetNode;
use crate::policies::{LIMIT_PERIOD, format_fleet_config};
use fastrand::Rng;
use futures_util::future::join_all;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Timeout for slow changes: instances that have ended are counted for some seconds.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScenarioPhase {
    TwoNodes,
    TwoToSix,
    RollingRestart,
    NodeLost,
    NodePartitioned,
    MasterPartitioned,
    MasterLost,
    LowerLimits,
    RaiseLimits,
    SixToThree,
}

impl ScenarioPhase {
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::TwoNodes => "two nodes",
            Self::TwoToSix => "two become six",
            Self::RollingRestart => "every sidecar is restarted",
            Self::NodeLost => "a node is lost, and replaced",
            Self::NodePartitioned => "a node is cut off from Redis",
            Self::MasterPartitioned => "a master is cut off",
            Self::MasterLost => "a master is killed, and comes back empty",
            Self::LowerLimits => "a ConfigMap with lower limits",
            Self::RaiseLimits => "a ConfigMap with the first limits",
            Self::SixToThree => "six become three",
        }
    }

    /// Whether Redis is unreachable for at least one node.
    pub(crate) fn is_outage(self) -> bool {
        matches!(
            self,
            Self::NodePartitioned | Self::MasterPartitioned | Self::MasterLost
        )
    }
}

/// A completed phase.
#[derive(Debug)]
pub(crate) struct PhaseResult {
    pub(crate) phase: ScenarioPhase,
    pub(crate) began: Instant,
    /// Time from which the fleet is healthy again.
    pub(crate) ended: Instant,
    pub(crate) nodes: usize,
    /// Decisions made without Redis.
    pub(crate) degraded_decisions: u64,
    /// Time until all nodes used Redis again.
    pub(crate) recovery: Option<Duration>,
}

pub(crate) struct FleetScenario {
    context: Arc<FleetContext>,
    masters: RedisMasters,
    nodes: Vec<FleetNode>,
    /// The load balancer still probes these nodes.
    lost_nodes: Vec<FleetNode>,
    next_node_id: u8,
    rng: Rng,
    has_lowered_limits: bool,
    /// Time until the end of the last outage was detected.
    last_recovery: Option<Duration>,
}

impl FleetScenario {
    pub(crate) fn new(context: &Arc<FleetContext>, masters: RedisMasters, seed: u64) -> Self {
        Self {
            context: Arc::clone(context),
            masters,
            nodes: Vec::new(),
            lost_nodes: Vec::new(),
            next_node_id: 1,
            rng: Rng::with_seed(seed),
            has_lowered_limits: false,
            last_recovery: None,
        }
    }

    /// From the first node to the last.
    pub(crate) async fn run(mut self, seed: u64) -> Vec<PhaseResult> {
        self.add_nodes_up_to(2).await;
        self.wait_until_healthy().await;
        let clients = clients::spawn_clients(&self.context, seed);
        let mut middle = [
            ScenarioPhase::RollingRestart,
            ScenarioPhase::NodeLost,
            ScenarioPhase::NodePartitioned,
            ScenarioPhase::MasterPartitioned,
            ScenarioPhase::MasterLost,
            ScenarioPhase::LowerLimits,
            ScenarioPhase::RaiseLimits,
        ];
        self.rng.shuffle(&mut middle);
        let place = |phase| {
            middle
                .iter()
                .position(|one| *one == phase)
                .expect("it is there")
        };
        let (lower, raise) = (
            place(ScenarioPhase::LowerLimits),
            place(ScenarioPhase::RaiseLimits),
        );
        if raise < lower {
            middle.swap(lower, raise);
        }
        let mut results = Vec::new();
        for phase in [ScenarioPhase::TwoNodes, ScenarioPhase::TwoToSix]
            .into_iter()
            .chain(middle)
            .chain([ScenarioPhase::SixToThree])
        {
            results.push(self.run_phase(phase).await);
            if results.len() == 1 {
                self.wait_for_key_placement().await;
            }
        }
        self.context.finish();
        for client in clients {
            client.await.unwrap();
        }
        self.remove_nodes_down_to(0).await;
        results
    }

    async fn run_phase(&mut self, phase: ScenarioPhase) -> PhaseResult {
        let (began, before) = (Instant::now(), self.degraded_decisions_by_node().await);
        eprintln!(
            "{:>6.1} s  {}",
            self.context.ledger.seconds_since_start(began),
            phase.title()
        );
        match phase {
            ScenarioPhase::TwoNodes => sleep(2 * LIMIT_PERIOD).await,
            ScenarioPhase::TwoToSix => self.add_nodes_up_to(6).await,
            ScenarioPhase::RollingRestart => self.restart_all_sidecars().await,
            ScenarioPhase::NodeLost => self.lose_and_replace_node().await,
            ScenarioPhase::NodePartitioned => self.partition_node().await,
            ScenarioPhase::MasterPartitioned => self.partition_master().await,
            ScenarioPhase::MasterLost => self.kill_and_restart_master().await,
            ScenarioPhase::LowerLimits => self.roll_out_config(true).await,
            ScenarioPhase::RaiseLimits => self.roll_out_config(false).await,
            ScenarioPhase::SixToThree => self.remove_nodes_down_to(3).await,
        }
        self.wait_until_healthy().await;
        // Longer than an outage needs to end on all nodes.
        sleep(3 * LIMIT_PERIOD).await;
        let after = self.degraded_decisions_by_node().await;
        // A restarted sidecar counts from 0.
        let of = |(node, count): (&u8, &u64)| {
            count - before.get(node).filter(|old| *old <= count).unwrap_or(&0)
        };
        let degraded = after.iter().map(of).sum();
        let (ledger, ended) = (&self.context.ledger, Instant::now());
        match (phase.is_outage(), degraded) {
            (true, 0) => ledger.record_unexplained_problem(format!(
                "{}: no node detected the fault",
                phase.title()
            )),
            (false, 1..) if ledger.total_stall_time(began, ended).is_zero() => {
                ledger.record_unexplained_problem(format!(
                    "{}: {degraded} decisions without Redis",
                    phase.title()
                ));
            }
            _ => {}
        }
        let recovery = self.last_recovery.take();
        PhaseResult {
            phase,
            began,
            ended,
            nodes: self.nodes.len(),
            degraded_decisions: degraded,
            recovery,
        }
    }

    async fn add_nodes_up_to(&mut self, to: usize) {
        while self.nodes.len() < to {
            let config = self.make_config(self.has_lowered_limits);
            self.nodes
                .push(FleetNode::start(self.next_node_id, &self.context, &config).await);
            self.next_node_id += 1;
            self.sleep_randomly(0..1500).await;
        }
    }

    /// Nodes that leave are announced immediately.
    async fn remove_nodes_down_to(&mut self, to: usize) {
        self.rng.shuffle(&mut self.nodes);
        let mut leaving = self.nodes.split_off(to);
        for status in join_all(leaving.iter_mut().map(FleetNode::stop_sidecar)).await {
            if !status.success() {
                self.context
                    .ledger
                    .record_unexplained_problem(format!("a sidecar ended with {status}"));
            }
        }
    }

    async fn restart_all_sidecars(&mut self) {
        self.rng.shuffle(&mut self.nodes);
        for nth in 0..self.nodes.len() {
            let node = &mut self.nodes[nth];
            let status = node.stop_sidecar().await;
            if !status.success() {
                self.context
                    .ledger
                    .record_unexplained_problem(format!("a sidecar ended with {status}"));
            }
            node.start_sidecar();
            let id = node.id;
            self.wait_until("a sidecar to be ready again", async |scenario| {
                scenario.context.balancer.ready_nodes().contains(&id)
            })
            .await;
        }
    }

    async fn lose_and_replace_node(&mut self) {
        let mut node = self.nodes.swap_remove(self.rng.usize(..self.nodes.len()));
        let (fault, silently) = (FleetFault::NodeLost(node.id), self.rng.bool());
        let lost = async {
            // A power loss closes no connections.
            if silently {
                node.machine.disconnect_all();
            }
            node.kill().await;
        };
        self.context.ledger.begin_fault(fault, lost).await;
        self.lost_nodes.push(node);
        self.sleep_randomly(2000..4000).await;
        self.add_nodes_up_to(self.nodes.len() + 1).await;
    }

    async fn partition_node(&mut self) {
        let nth = self.rng.usize(..self.nodes.len());
        let live = self.nodes.len() as u64;
        let fault = FleetFault::NodePartitioned {
            node: self.nodes[nth].id,
            live_nodes: live,
        };
        let machine = &self.nodes[nth].machine;
        self.context
            .ledger
            .begin_fault(fault, async { machine.disconnect(BridgeNetwork::Back) })
            .await;
        // Shorter and longer than the time for which silent instances are counted.
        self.sleep_randomly(4000..9000).await;
        self.nodes[nth].machine.reconnect(BridgeNetwork::Back);
        self.end_fault_after_recovery(fault).await;
    }

    async fn partition_master(&mut self) {
        let master = self.rng.usize(..self.masters.0.len());
        let fault = FleetFault::MasterPartitioned(master);
        let machine = &self.masters.0[master].machine;
        self.context
            .ledger
            .begin_fault(fault, async { machine.disconnect(BridgeNetwork::Back) })
            .await;
        self.sleep_randomly(4000..9000).await;
        self.masters.0[master]
            .machine
            .reconnect(BridgeNetwork::Back);
        self.end_fault_after_recovery(fault).await;
    }

    async fn kill_and_restart_master(&mut self) {
        let master = self.rng.usize(..self.masters.0.len());
        let fault = FleetFault::MasterLost(master);
        let server = &mut self.masters.0[master];
        self.context.ledger.begin_fault(fault, server.kill()).await;
        self.sleep_randomly(2000..6000).await;
        self.masters.0[master].restart().await;
        self.end_fault_after_recovery(fault).await;
    }

    /// Redis is reachable again; the fault ends when all nodes use it.
    async fn end_fault_after_recovery(&mut self, fault: FleetFault) {
        let healed = Instant::now();
        self.wait_until_healthy().await;
        self.last_recovery = Some(healed.elapsed());
        self.context.ledger.end_fault(fault);
    }

    /// Kubelets update in random order, some seconds apart.
    async fn roll_out_config(&mut self, lowered: bool) {
        let mut generations = BTreeMap::new();
        for node in &self.nodes {
            generations.insert(
                node.id,
                node.metrics().await.value("tidegate_config_generation"),
            );
        }
        let config = self.make_config(lowered);
        self.rng.shuffle(&mut self.nodes);
        self.context.ledger.begin_rollout(lowered);
        for nth in 0..self.nodes.len() {
            self.nodes[nth].write_config(&config);
            self.sleep_randomly(0..2000).await;
        }
        self.wait_until("the configuration to be everywhere", async |scenario| {
            for node in &scenario.nodes {
                let generation = node.metrics().await.value("tidegate_config_generation");
                if generation == generations[&node.id] {
                    return false;
                }
            }
            true
        })
        .await;
        self.context.ledger.end_rollout();
        self.has_lowered_limits = lowered;
    }

    fn make_config(&self, lowered: bool) -> String {
        format_fleet_config(&self.masters.urls(), lowered)
    }

    /// Waits until all nodes are ready, use Redis, and count each other.
    async fn wait_until_healthy(&mut self) {
        let count = self.nodes.len() as u64;
        self.wait_until("the fleet to be well", async |scenario| {
            if scenario.context.balancer.ready_nodes().len() != scenario.nodes.len() {
                return false;
            }
            for node in &scenario.nodes {
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

    async fn wait_until(&self, what: &str, mut comes: impl AsyncFnMut(&Self) -> bool) {
        let deadline = Instant::now() + WAIT_TIMEOUT;
        while !comes(self).await {
            if Instant::now() > deadline {
                return self
                    .context
                    .ledger
                    .record_unexplained_problem(format!("waited {WAIT_TIMEOUT:?} for {what}"));
            }
            sleep(Duration::from_millis(200)).await;
        }
    }

    /// Returns the decisions made without Redis so far, by node.
    async fn degraded_decisions_by_node(&self) -> BTreeMap<u8, u64> {
        let mut degraded = BTreeMap::new();
        for node in &self.nodes {
            let metrics = node.metrics().await;
            degraded.insert(
                node.id,
                metrics
                    .labelled_values("tidegate_degraded_total")
                    .map(|(_, count)| count)
                    .sum(),
            );
        }
        degraded
    }

    /// Otherwise a fault would be attributed to the wrong keys.
    async fn wait_for_key_placement(&self) {
        self.wait_until("every key to be on its master", async |scenario| {
            let mut keys = scenario
                .context
                .keys
                .iter()
                .filter(|key| key.policy.is_some());
            keys.all(|key| scenario.masters.has_key(key.master, &key.redis_key))
        })
        .await;
    }

    async fn sleep_randomly(&mut self, millis: std::ops::Range<u64>) {
        sleep(Duration::from_millis(self.rng.u64(millis))).await;
    }
}
