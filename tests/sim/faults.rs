//! Applies faults to a world.

use crate::sim::instance::Instance;
use crate::sim::redis_server::cluster::slot_of;
use crate::sim::redis_server::{NEW_PASSWORD, Role, Server};
use crate::sim::scenario::{FaultKind, Topology};
use crate::sim::world::{Event, FaultStep, TERMINATION_US, World};
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;

/// Until a half-open connection is reset by TCP.
const HALF_OPEN_RESET_US: u64 = 30_000_000;

impl World {
    pub(crate) fn apply_fault(&mut self, kind: FaultKind) {
        let now_us = self.now_us;
        match kind {
            FaultKind::Restart {
                server,
                down_us,
                lost_us,
            } => {
                self.kill_server(server);
                self.servers[server]
                    .dataset
                    .undo_since(now_us.saturating_sub(lost_us));
                self.continue_at(now_us + down_us, FaultStep::StartServer(server));
            }
            FaultKind::Failover {
                server,
                after_us,
                lost_us,
            } => {
                self.kill_server(server);
                self.continue_at(now_us + after_us, FaultStep::Promote { server, lost_us });
            }
            FaultKind::Hang { server, for_us } => {
                let busy_until_us = self.servers[server].busy_until_us.max(now_us) + for_us;
                self.servers[server].busy_until_us = busy_until_us;
            }
            FaultKind::ErrorReplies {
                server,
                error,
                for_us,
            } => {
                self.servers[server].error = Some((error, now_us + for_us));
            }
            FaultKind::Partition {
                instance,
                server,
                for_us,
            } => {
                let cut = instance.map_or(0..self.instances.len(), |one| one..one + 1);
                let until = cut.map(|index| ((index, server), now_us + for_us));
                self.blocked_until.extend(until);
            }
            FaultKind::Slow {
                server,
                extra_us,
                for_us,
            } => {
                self.slow_until.insert(server, (now_us + for_us, extra_us));
            }
            FaultKind::Reset { server } => {
                let ids = self.connections_to(server, None);
                ids.into_iter().for_each(|id| self.reset(id));
            }
            FaultKind::HalfOpen { instance, server } => self.open_halves(instance, server),
            FaultKind::ScriptFlush { server } => self.servers[server].flush_scripts(),
            FaultKind::Evict { server, keys } => self.evict(server, keys),
            FaultKind::ClockStep { server, by_us } => {
                self.servers[server].clock.offset_us += by_us;
                let now_ms = self.servers[server].clock.time_us(now_us) / 1000;
                self.servers[server].dataset.delete_expired(now_ms);
            }
            FaultKind::WallClockStep { instance, by_us } => {
                let time = &self.instances[instance].network.time;
                time.steps.wall_shift_us.fetch_add(by_us, Ordering::Relaxed);
            }
            FaultKind::Crash { .. } | FaultKind::Terminate { .. } | FaultKind::Freeze { .. } => {
                self.apply_instance_fault(kind);
            }
            FaultKind::RotateLogin {
                is_loaded_first,
                between_us,
            } => self.rotate_login(is_loaded_first, between_us),
            FaultKind::Migrate {
                to,
                slots,
                key_us,
                interrupted_us,
            } => {
                self.open_slots(to, slots, key_us, interrupted_us);
            }
        }
    }

    fn rotate_login(&mut self, is_loaded_first: bool, between_us: u64) {
        let (first, second) = match is_loaded_first {
            true => (FaultStep::LoadLogin, FaultStep::ChangeLogin),
            false => (FaultStep::ChangeLogin, FaultStep::LoadLogin),
        };
        self.continue_fault(first);
        self.continue_at(self.now_us + between_us, second);
    }

    fn apply_instance_fault(&mut self, kind: FaultKind) {
        let now_us = self.now_us;
        match kind {
            FaultKind::Crash {
                instance,
                restart_us,
            } => {
                self.continue_fault(FaultStep::EndInstance {
                    instance,
                    restart_us,
                });
            }
            FaultKind::Terminate {
                instance,
                restart_us,
            } => {
                self.instances[instance].terminate(now_us);
                let step = FaultStep::EndInstance {
                    instance,
                    restart_us,
                };
                self.continue_at(now_us + TERMINATION_US, step);
            }
            FaultKind::Freeze {
                instance,
                for_us,
                is_suspended,
            } => {
                self.instances[instance].is_frozen = true;
                let step = FaultStep::Thaw {
                    instance,
                    is_suspended,
                };
                self.continue_at(now_us + for_us, step);
            }
            other => panic!("{other:?} is no fault of an instance"),
        }
    }

    pub(crate) fn continue_at(&mut self, at_us: u64, step: FaultStep) {
        self.schedule(at_us, Event::Continue(step));
    }

    pub(crate) fn continue_fault(&mut self, step: FaultStep) {
        match step {
            FaultStep::StartServer(server) => self.servers[server].is_alive = true,
            FaultStep::Promote { server, lost_us } => self.promote(server, lost_us),
            FaultStep::Thaw {
                instance,
                is_suspended,
            } => self.instances[instance].thaw(self.now_us, is_suspended),
            FaultStep::EndInstance {
                instance,
                restart_us,
            } => {
                self.instances[instance].kill();
                self.take_actions(instance);
                self.continue_at(self.now_us + restart_us, FaultStep::StartInstance(instance));
            }
            FaultStep::StartInstance(instance) => {
                self.instances[instance] = self.start_process(instance)
            }
            FaultStep::MoveKey { slots, to, key_us } => self.move_key(slots, to, key_us),
            FaultStep::FinishSlots { slots, to } => self.finish_slots(&slots, to),
            FaultStep::LoadLogin => self.instances.iter().for_each(Instance::load_new_login),
            FaultStep::ChangeLogin => {
                let servers = self.servers.iter_mut();
                servers.for_each(|server| server.password = Some(NEW_PASSWORD));
            }
        }
    }

    fn kill_server(&mut self, server: usize) {
        self.servers[server].kill();
        self.connections_to(server, None)
            .into_iter()
            .for_each(|id| self.reset(id));
    }

    fn open_halves(&mut self, instance: usize, server: usize) {
        for id in self.connections_to(server, Some(instance)) {
            // The reset comes late; most clients have given up by then.
            let inbox_us = self.now_us + HALF_OPEN_RESET_US;
            self.deliver(id, inbox_us, crate::sim::network::Delivery::Reset);
            if let Some(connection) = self.connections.get_mut(&id) {
                connection.is_half_open = true;
            }
        }
    }

    fn evict(&mut self, server: usize, keys: usize) {
        for _ in 0..keys {
            let names: Vec<_> = self.servers[server].dataset.names().cloned().collect();
            if let Some(name) = self.rng.choice(&names) {
                self.servers[server].dataset.put(name, None, self.now_us);
            }
        }
    }

    /// The replica of a dead master takes over, without its last writes, on its own clock.
    fn promote(&mut self, server: usize, lost_us: u64) {
        let replica = match self.scenario.topology {
            Topology::Cluster { masters } => (server + masters) % (2 * masters),
            _ => 1 - server,
        };
        let mut dataset = std::mem::take(&mut self.servers[server].dataset);
        dataset.undo_since(self.now_us.saturating_sub(lost_us));
        self.servers[replica].dataset = dataset;
        self.servers[replica].role = Role::Master;
        self.sentinel_master = replica;
        if let Some(cluster) = &mut self.cluster {
            let is_old = |owner: &&mut usize| **owner == server;
            cluster
                .owners
                .iter_mut()
                .filter(is_old)
                .for_each(|owner| *owner = replica);
        }
        self.servers[server].role = Role::Replica;
        self.servers[server].is_alive = true;
    }

    fn open_slots(&mut self, to: usize, count: usize, key_us: u64, interrupted_us: u64) {
        let Some(cluster) = &mut self.cluster else {
            return;
        };
        // Slots that have keys, because others are of no interest.
        let mut slots: Vec<u16> = Vec::new();
        for name in self
            .servers
            .iter()
            .flat_map(|server| server.dataset.names())
        {
            let slot = slot_of(name);
            let is_open = cluster.migrating.contains_key(&slot);
            if cluster.owners[usize::from(slot)] != to && !is_open && !slots.contains(&slot) {
                slots.push(slot);
            }
        }
        self.rng.shuffle(&mut slots);
        slots.truncate(count);
        cluster
            .migrating
            .extend(slots.iter().map(|slot| (*slot, to)));
        self.continue_at(
            self.now_us + interrupted_us + key_us,
            FaultStep::MoveKey { slots, to, key_us },
        );
    }

    /// Moves one key of slots that are open; after the last one, the slots have moved.
    fn move_key(&mut self, slots: Vec<u16>, to: usize, key_us: u64) {
        let cluster = self.cluster.as_ref().expect("a cluster");
        let wanted: BTreeSet<u16> = slots.iter().copied().collect();
        let found = (0..self.servers.len())
            .filter(|index| *index != to)
            .find_map(|index| {
                let now_ms = self.servers[index].clock.time_us(self.now_us) / 1000;
                let server = &self.servers[index];
                let is_moved = |name: &&Vec<u8>| {
                    let slot = slot_of(name);
                    wanted.contains(&slot)
                        && cluster.owners[usize::from(slot)] == index
                        && exists(server, name, now_ms)
                };
                server
                    .dataset
                    .names()
                    .find(is_moved)
                    .map(|name| (index, name.clone()))
            });
        match found {
            Some((from, name)) => {
                let now_ms = self.servers[from].clock.time_us(self.now_us) / 1000;
                let entry = self.servers[from].dataset.get(&name, now_ms).cloned();
                self.servers[to].dataset.put(&name, entry, self.now_us);
                self.servers[from].dataset.put(&name, None, self.now_us);
                self.continue_at(
                    self.now_us + key_us,
                    FaultStep::MoveKey { slots, to, key_us },
                );
            }
            None => self.continue_at(self.now_us + key_us, FaultStep::FinishSlots { slots, to }),
        }
    }

    fn finish_slots(&mut self, slots: &[u16], to: usize) {
        let now_ms: Vec<u64> = self
            .servers
            .iter()
            .map(|server| server.clock.time_us(self.now_us) / 1000)
            .collect();
        let cluster = self.cluster.as_mut().expect("a cluster");
        for slot in slots {
            let owner = cluster.owners[usize::from(*slot)];
            let from = &self.servers[owner];
            // A key that came meanwhile moves first.
            if from
                .dataset
                .names()
                .any(|name| slot_of(name) == *slot && exists(from, name, now_ms[owner]))
            {
                let slots = slots.to_vec();
                return self.continue_at(
                    self.now_us,
                    FaultStep::MoveKey {
                        slots,
                        to,
                        key_us: 1_000,
                    },
                );
            }
            cluster.owners[usize::from(*slot)] = to;
            cluster.migrating.remove(slot);
        }
    }
}

fn exists(server: &Server, name: &[u8], now_ms: u64) -> bool {
    server.dataset.get(name, now_ms).is_some()
}
