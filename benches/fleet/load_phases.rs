//! Phases with more load: a hostile client, and settlements.

use crate::clients::{ClientLoad, spawn_client};
use crate::policies::{HOSTILE_POLICY_NAME, SETTLED_POLICY_NAME};
use crate::scenario::FleetScenario;
use fastrand::Rng;
use futures_util::future::join_all;
use std::ops::Range;
use std::time::{Duration, Instant};

const HOSTILE_CONNECTIONS: usize = 200;
const HOSTILE_PAUSE_MS: Range<u64> = 100..300;
/// With and without the ordinary clients.
const HOSTILE_TIME: Duration = Duration::from_secs(6);
/// Time that Redis may spend in scripts for each refused request. A refusal that asks Redis takes
/// about 100 µs.
const MAX_REDIS_US_PER_REFUSAL: f64 = 25.0;

const SETTLEMENT_CONNECTIONS: usize = 64;
const SETTLEMENT_PAUSE_MS: Range<u64> = 30..70;
const SETTLEMENT_TIME: Duration = Duration::from_secs(8);
/// Fewer are no load worth the name.
const MIN_SETTLEMENTS_PER_SECOND: f64 = 100.0;

impl FleetScenario {
    /// One client over its limit, on many connections: beside the ordinary clients, then alone, to
    /// measure the work of Redis.
    pub(crate) async fn run_hostile_client(&mut self) {
        let key = self.key_of_policy(HOSTILE_POLICY_NAME);
        self.run_load(key, HOSTILE_CONNECTIONS, HOSTILE_PAUSE_MS, HOSTILE_TIME)
            .await;
        self.context.pause_clients().await;
        let (began, redis_us_before) = (Instant::now(), self.redis_script_us());
        self.run_load(key, HOSTILE_CONNECTIONS, HOSTILE_PAUSE_MS, HOSTILE_TIME)
            .await;
        let redis_us = self.redis_script_us() - redis_us_before;
        let ledger = &self.context.ledger;
        let (sent, admitted) = ledger.sent_and_admitted(key, began, Instant::now());
        self.context.resume_clients();
        let refused = sent - admitted;
        let per_refusal = redis_us as f64 / refused.max(1) as f64;
        ledger.record_measurement(format!(
            "The hostile client: {refused} refused requests alone, {per_refusal:.1} µs of Redis scripts each (at most {MAX_REDIS_US_PER_REFUSAL})"
        ));
        if per_refusal > MAX_REDIS_US_PER_REFUSAL {
            ledger.record_unexplained_problem(format!(
                "a refused request of the hostile client cost Redis {per_refusal:.1} µs"
            ));
        }
        let limit = self.context.keys[key].policy.map(|it| it.requests);
        let forwarded = self.context.forwarded.of_key(key).len() as u64;
        if Some(forwarded) != limit {
            ledger.record_unexplained_problem(format!(
                "{forwarded} requests of the hostile client were forwarded, not {limit:?}"
            ));
        }
    }

    /// Requests whose cost is known by the response, beside the concurrency limits.
    pub(crate) async fn run_settlements(&mut self) {
        let key = self.key_of_policy(SETTLED_POLICY_NAME);
        let began = Instant::now();
        self.run_load(
            key,
            SETTLEMENT_CONNECTIONS,
            SETTLEMENT_PAUSE_MS,
            SETTLEMENT_TIME,
        )
        .await;
        let settled = self.context.forwarded.of_key(key).len() as f64;
        let per_second = settled / began.elapsed().as_secs_f64();
        let ledger = &self.context.ledger;
        ledger.record_measurement(format!("Settlements: {per_second:.0} per second"));
        let stalled = ledger.total_stall_time(began, Instant::now());
        if per_second < MIN_SETTLEMENTS_PER_SECOND && stalled.is_zero() {
            ledger
                .record_unexplained_problem(format!("only {per_second:.0} settlements per second"));
        }
    }

    async fn run_load(
        &mut self,
        key: usize,
        connections: usize,
        pause_ms: Range<u64>,
        time: Duration,
    ) {
        let until = Some(Instant::now() + time);
        let clients = (0..connections).map(|_| {
            let load = ClientLoad {
                key,
                pause_ms: pause_ms.clone(),
                until,
            };
            spawn_client(&self.context, load, Rng::with_seed(self.rng.u64(..)))
        });
        for client in join_all(clients.collect::<Vec<_>>()).await {
            client.unwrap();
        }
    }

    fn key_of_policy(&self, name: &str) -> usize {
        let keys = self.context.keys.iter();
        keys.map(|key| key.policy.map(|policy| policy.name))
            .position(|policy| policy == Some(name))
            .unwrap()
    }

    /// Returns the time that the masters spent in scripts so far, in microseconds.
    fn redis_script_us(&self) -> u64 {
        let line_start = "cmdstat_evalsha:";
        self.masters.sum_of_info("commandstats", line_start, "usec")
    }
}
