//! Runs the phases of the test, one after another, and waits for the recovery after each.

use crate::FleetContext;
use crate::charge_checks::ChargeChecker;
use crate::clients;
use crate::masters::RedisMasters;
use crate::node::FleetNode;
use crate::phases::{DegradedDecisions, PhaseResult, SHUFFLED_PHASES, ScenarioPhase};
use crate::policies::{LIMIT_PERIOD, format_fleet_config};
use fastrand::Rng;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Time between the recovery of the fleet and the end of a phase.
pub(crate) const SETTLING_TIME: Duration = LIMIT_PERIOD.saturating_mul(3);

/// Timeout for slow changes: instances that have ended are counted for some seconds.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

pub(crate) struct FleetScenario {
    pub(crate) context: Arc<FleetContext>,
    pub(crate) masters: RedisMasters,
    pub(crate) nodes: Vec<FleetNode>,
    /// The load balancer still probes these nodes.
    pub(crate) lost_nodes: Vec<FleetNode>,
    pub(crate) next_node_id: u8,
    pub(crate) rng: Rng,
    pub(crate) has_lowered_limits: bool,
    /// Time until the end of the last outage was detected.
    pub(crate) last_recovery: Option<Duration>,
    charge_checker: ChargeChecker,
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
            charge_checker: ChargeChecker::default(),
        }
    }

    /// From the first node to the last.
    pub(crate) async fn run(mut self, seed: u64) -> Vec<PhaseResult> {
        self.add_nodes_up_to(2).await;
        self.wait_until_healthy().await;
        let clients = clients::spawn_clients(&self.context, seed);
        let mut middle = SHUFFLED_PHASES;
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
            ScenarioPhase::SidecarFrozen => self.freeze_sidecar().await,
            ScenarioPhase::MasterPartitioned => self.partition_master().await,
            ScenarioPhase::MasterLost => self.kill_and_restart_master().await,
            ScenarioPhase::RestartInOutage => self.restart_sidecars_in_outage().await,
            ScenarioPhase::ReshardInterrupted => self.interrupt_reshard().await,
            ScenarioPhase::HostileClient => self.run_hostile_client().await,
            ScenarioPhase::Settlements => self.run_settlements().await,
            ScenarioPhase::LowerLimits => self.roll_out_config(true).await,
            ScenarioPhase::RaiseLimits => self.roll_out_config(false).await,
            ScenarioPhase::SixToThree => self.remove_nodes_down_to(3).await,
        }
        self.wait_until_healthy().await;
        // Longer than an outage needs to end on all nodes.
        sleep(SETTLING_TIME).await;
        let after = self.degraded_decisions_by_node().await;
        // A restarted sidecar counts from 0.
        let of = |(node, count): (&u8, &u64)| {
            count - before.get(node).filter(|old| *old <= count).unwrap_or(&0)
        };
        let degraded = after.iter().map(of).sum();
        let (ledger, ended) = (&self.context.ledger, Instant::now());
        match (phase.degraded_decisions(), degraded) {
            (DegradedDecisions::Expected, 0) => ledger.record_unexplained_problem(format!(
                "{}: no node detected the fault",
                phase.title()
            )),
            (DegradedDecisions::Forbidden, 1..)
                if ledger.total_stall_time(began, ended).is_zero() =>
            {
                ledger.record_unexplained_problem(format!(
                    "{}: {degraded} decisions without Redis",
                    phase.title()
                ));
            }
            _ => {}
        }
        self.context.pause_clients().await;
        let charges = self
            .charge_checker
            .check_charges(&self.context, &self.masters, began, degraded)
            .await;
        self.context.resume_clients();
        let recovery = self.last_recovery.take();
        PhaseResult {
            phase,
            began,
            ended,
            nodes: self.nodes.len(),
            degraded_decisions: degraded,
            recovery,
            charges,
        }
    }

    pub(crate) fn make_config(&self, lowered: bool) -> String {
        format_fleet_config(&self.masters.urls(), lowered)
    }

    /// Waits until all nodes are ready, use Redis, and count each other.
    pub(crate) async fn wait_until_healthy(&mut self) {
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

    pub(crate) async fn wait_until(&self, what: &str, mut comes: impl AsyncFnMut(&Self) -> bool) {
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
                .filter(|key| key.policy.is_some_and(|policy| policy.clients_per_key > 0));
            keys.all(|key| scenario.masters.has_key(key.master, &key.redis_key))
        })
        .await;
    }

    pub(crate) async fn sleep_randomly(&mut self, millis: std::ops::Range<u64>) {
        sleep(Duration::from_millis(self.rng.u64(millis))).await;
    }
}
