//! Causes the faults, scalings and rollouts of the phases, and waits until each is over.

use crate::faults::FleetFault;
use crate::net::BridgeNetwork;
use crate::node::FleetNode;
use crate::scenario::FleetScenario;
use futures_util::future::join_all;
use std::collections::BTreeMap;
use std::time::Instant;

impl FleetScenario {
    pub(crate) async fn add_nodes_up_to(&mut self, to: usize) {
        while self.nodes.len() < to {
            let config = self.make_config(self.has_lowered_limits);
            self.nodes
                .push(FleetNode::start(self.next_node_id, &self.context, &config).await);
            self.next_node_id += 1;
            self.sleep_randomly(0..1500).await;
        }
    }

    /// Nodes that leave are announced immediately.
    pub(crate) async fn remove_nodes_down_to(&mut self, to: usize) {
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

    pub(crate) async fn restart_all_sidecars(&mut self) {
        self.rng.shuffle(&mut self.nodes);
        for nth in 0..self.nodes.len() {
            self.restart_sidecar(nth).await;
        }
    }

    async fn restart_sidecar(&mut self, nth: usize) {
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

    /// Stops a sidecar for shorter and longer than slots and counted instances last.
    pub(crate) async fn freeze_sidecar(&mut self) {
        let nth = self.rng.usize(..self.nodes.len());
        let fault = FleetFault::SidecarFrozen {
            node: self.nodes[nth].id,
            live_nodes: self.nodes.len() as u64,
        };
        let node = &self.nodes[nth];
        self.context
            .ledger
            .begin_fault(fault, async { node.freeze_sidecar() })
            .await;
        self.sleep_randomly(4000..9000).await;
        let ready = self.context.balancer.ready_nodes();
        if ready.contains(&self.nodes[nth].id) {
            self.context
                .ledger
                .record_unexplained_problem("a frozen sidecar was ready".to_owned());
        }
        self.nodes[nth].continue_sidecar();
        self.end_fault_after_recovery(fault).await;
    }

    /// Restarts two sidecars while a master is cut off: what they admitted without it must be
    /// charged later.
    pub(crate) async fn restart_sidecars_in_outage(&mut self) {
        let master = self.rng.usize(..self.masters.0.len());
        let fault = FleetFault::MasterPartitioned(master);
        let machine = &self.masters.0[master].machine;
        self.context
            .ledger
            .begin_fault(fault, async { machine.disconnect(BridgeNetwork::Back) })
            .await;
        self.sleep_randomly(3000..5000).await;
        self.rng.shuffle(&mut self.nodes);
        let restarted = FleetFault::RestartedInOutage { master };
        for nth in 0..2 {
            self.context.ledger.begin_fault(restarted, async {}).await;
            self.restart_sidecar(nth).await;
        }
        self.sleep_randomly(1000..2000).await;
        self.masters.0[master]
            .machine
            .reconnect(BridgeNetwork::Back);
        self.end_fault_after_recovery(fault).await;
        self.context.ledger.end_fault(restarted);
    }

    pub(crate) async fn lose_and_replace_node(&mut self) {
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

    pub(crate) async fn partition_node(&mut self) {
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

    pub(crate) async fn partition_master(&mut self) {
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

    pub(crate) async fn kill_and_restart_master(&mut self) {
        let master = self.rng.usize(..self.masters.0.len());
        let fault = FleetFault::MasterLost(master);
        let server = &mut self.masters.0[master];
        self.context.ledger.begin_fault(fault, server.kill()).await;
        self.sleep_randomly(2000..6000).await;
        self.masters.0[master].restart().await;
        self.end_fault_after_recovery(fault).await;
    }

    /// Redis is reachable again; the fault ends when all nodes use it.
    pub(crate) async fn end_fault_after_recovery(&mut self, fault: FleetFault) {
        let healed = Instant::now();
        self.wait_until_healthy().await;
        self.last_recovery = Some(healed.elapsed());
        self.context.ledger.end_fault(fault);
    }

    /// Kubelets update in random order, some seconds apart.
    pub(crate) async fn roll_out_config(&mut self, lowered: bool) {
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
}
