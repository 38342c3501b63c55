//! Hash slots that move between masters, and moves that do not end.

use crate::masters::{MASTER_COUNT, REDIS_PORT, RedisMasters, initial_master_of_slot};
use crate::policies::HourlyLimit;
use crate::scenario::FleetScenario;
use redis::Connection;
use std::collections::BTreeSet;
use std::process::Stdio;
use std::time::Duration;
use tokio::process::Command;
use tokio::time::sleep;

/// Slots of a reshard that is killed before its end.
const RESHARDED_SLOTS: &str = "1000";
const MIGRATE_TIMEOUT_MS: u64 = 5000;

impl FleetScenario {
    /// Opens the slots of keys, with a part of the keys on each side, and leaves them open; then
    /// kills a reshard. No request may notice it.
    pub(crate) async fn interrupt_reshard(&mut self) {
        let from = self.rng.usize(..MASTER_COUNT);
        let to = (from + self.rng.usize(1..MASTER_COUNT)) % MASTER_COUNT;
        let replies_before = self.redirect_counts();
        for slot in self.slots_of_hourly_keys(from) {
            let moved_keys = self.rng.usize(..2);
            self.masters.open_slot(slot, from, to, moved_keys);
        }
        // A key of each of two limits, on both sides.
        for slot in self.slots_of_two_limits(from) {
            self.masters.open_slot(slot, from, to, 1);
        }
        self.sleep_randomly(4000..7000).await;
        for ((reply, before), (_, after)) in replies_before.into_iter().zip(self.redirect_counts())
        {
            let count = after - before;
            let ledger = &self.context.ledger;
            ledger.record_measurement(format!("Open slots: {count} × {reply}"));
            if count == 0 {
                ledger.record_unexplained_problem(format!("open slots caused no {reply}"));
            }
        }
        self.masters.finish_slot_moves(from, to);
        let mut reshard = self.masters.start_reshard(from, to);
        self.sleep_randomly(300..1000).await;
        reshard.kill().await.unwrap();
        self.sleep_randomly(2000..4000).await;
        self.masters.finish_slot_moves(from, to);
        let moved = self.masters.return_slots(to).await;
        let ledger = &self.context.ledger;
        ledger.record_measurement(format!("The killed reshard moved {moved} slots"));
        self.masters.wait_for_cluster_ok().await;
    }

    /// Returns how often Redis replied to commands for keys that are elsewhere.
    fn redirect_counts(&self) -> [(&'static str, u64); 2] {
        ["ASK", "TRYAGAIN"].map(|reply| {
            let line_start = format!("errorstat_{reply}:");
            let count = self.masters.sum_of_info("errorstats", &line_start, "count");
            (reply, count)
        })
    }

    /// Slots of keys that are decided together with a key of another master.
    fn slots_of_hourly_keys(&self, master: usize) -> BTreeSet<u16> {
        let counters = self.context.keys.iter().filter_map(|key| {
            let policy = key.policy?;
            let is_split = policy.hourly_limit == HourlyLimit::NextMaster;
            let counter = key.hourly_counter.as_ref()?;
            (is_split && policy.clients_per_key > 0).then_some([
                (key.master, &key.redis_key),
                (counter.master, &counter.redis_key),
            ])
        });
        let on_master = counters.flatten().filter(|(owner, _)| *owner == master);
        on_master
            .map(|(_, key)| self.masters.key_slot(key))
            .collect()
    }

    fn slots_of_two_limits(&self, master: usize) -> BTreeSet<u16> {
        let keys = self.context.keys.iter().filter(|key| {
            let hourly_limit = key.policy.map(|policy| policy.hourly_limit);
            key.master == master && hourly_limit == Some(HourlyLimit::SamePolicy)
        });
        keys.map(|key| self.masters.key_slot(&key.redis_key))
            .collect()
    }
}

impl RedisMasters {
    /// Begins to move a slot, and moves some of its keys.
    fn open_slot(&self, slot: u16, from: usize, to: usize, moved_keys: usize) {
        let (mut source, mut target) = (self.connection(from), self.connection(to));
        begin_slot_move(slot, &mut source, &mut target);
        for key in keys_in_slot(slot, moved_keys, &mut source) {
            self.migrate_key(&key, to, &mut source);
        }
    }

    /// Moves the slots of a master back that it did not have at the start. Returns their number.
    async fn return_slots(&self, from: usize) -> usize {
        let mut source = self.connection(from);
        let moved: Vec<u16> = owned_slots(&mut source)
            .into_iter()
            .filter(|slot| initial_master_of_slot(*slot) != from)
            .collect();
        for slot in &moved {
            let to = initial_master_of_slot(*slot);
            begin_slot_move(*slot, &mut source, &mut self.connection(to));
            self.finish_slot_move(*slot, from, to);
            // The clients run on the same thread.
            sleep(Duration::from_millis(1)).await;
        }
        moved.len()
    }

    /// Finishes all moves between two masters. `redis-cli --cluster fix` would leave slots without
    /// an owner for a moment.
    fn finish_slot_moves(&self, from: usize, to: usize) {
        let mut slots = open_slots(&mut self.connection(from));
        slots.extend(open_slots(&mut self.connection(to)));
        for slot in slots {
            self.finish_slot_move(slot, from, to);
        }
    }

    fn finish_slot_move(&self, slot: u16, from: usize, to: usize) {
        let (mut source, mut target) = (self.connection(from), self.connection(to));
        let id = node_id(&mut target);
        // The source of a killed reshard may not know of the move yet.
        if owned_slots(&mut source).contains(&slot) {
            set_slot(slot, "MIGRATING", &id, &mut source);
        }
        for key in keys_in_slot(slot, usize::from(u8::MAX), &mut source) {
            self.migrate_key(&key, to, &mut source);
        }
        set_slot(slot, "NODE", &id, &mut target);
        set_slot(slot, "NODE", &id, &mut source);
        for master in 0..MASTER_COUNT {
            set_slot(slot, "NODE", &id, &mut self.connection(master));
        }
    }

    fn migrate_key(&self, key: &str, to: usize, source: &mut Connection) {
        redis::cmd("MIGRATE")
            .arg(self.0[to].address().to_string())
            .arg(REDIS_PORT)
            .arg(key)
            .arg(0)
            .arg(MIGRATE_TIMEOUT_MS)
            .exec(source)
            .unwrap();
    }

    fn start_reshard(&self, from: usize, to: usize) -> tokio::process::Child {
        let id = |master| node_id(&mut self.connection(master));
        let mut reshard = Command::new("redis-cli");
        reshard.args(["--cluster", "reshard"]);
        reshard.arg(format!("{}:{REDIS_PORT}", self.0[from].address()));
        reshard.args(["--cluster-from", &id(from), "--cluster-to", &id(to)]);
        reshard.args(["--cluster-slots", RESHARDED_SLOTS, "--cluster-yes"]);
        let reshard = reshard.stdin(Stdio::null()).stdout(Stdio::null());
        reshard.kill_on_drop(true).spawn().unwrap()
    }
}

fn begin_slot_move(slot: u16, source: &mut Connection, target: &mut Connection) {
    let (source_id, target_id) = (node_id(source), node_id(target));
    set_slot(slot, "IMPORTING", &source_id, target);
    set_slot(slot, "MIGRATING", &target_id, source);
}

fn set_slot(slot: u16, state: &str, node: &str, connection: &mut Connection) {
    redis::cmd("CLUSTER")
        .arg("SETSLOT")
        .arg(slot)
        .arg(state)
        .arg(node)
        .exec(connection)
        .unwrap();
}

fn node_id(connection: &mut Connection) -> String {
    redis::cmd("CLUSTER").arg("MYID").query(connection).unwrap()
}

fn keys_in_slot(slot: u16, count: usize, connection: &mut Connection) -> Vec<String> {
    let mut command = redis::cmd("CLUSTER");
    command.arg("GETKEYSINSLOT").arg(slot).arg(count);
    command.query(connection).unwrap()
}

/// Returns the slots that the master owns.
fn owned_slots(connection: &mut Connection) -> Vec<u16> {
    let mut slots = Vec::new();
    for range in slot_ranges(connection) {
        let (first, last) = range.split_once('-').unwrap_or((&range, &range));
        if let (Ok(first), Ok(last)) = (first.parse(), last.parse::<u16>()) {
            slots.extend(first..=last);
        }
    }
    slots
}

/// Returns the slots that the master imports or migrates: `[slot-<-node]` or `[slot->-node]`.
fn open_slots(connection: &mut Connection) -> BTreeSet<u16> {
    let ranges = slot_ranges(connection).into_iter();
    ranges
        .filter_map(|range| range.strip_prefix('[')?.split('-').next()?.parse().ok())
        .collect()
}

/// Returns the slots in the master's own line of `CLUSTER NODES`.
fn slot_ranges(connection: &mut Connection) -> Vec<String> {
    let nodes: String = redis::cmd("CLUSTER")
        .arg("NODES")
        .query(connection)
        .unwrap();
    let own_line = nodes.lines().find(|line| line.contains("myself")).unwrap();
    own_line.split(' ').skip(8).map(str::to_owned).collect()
}
