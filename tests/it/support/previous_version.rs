//! Redis calls as version 767e699 makes them: its scripts, keys and arguments.
//!
//! Nothing here uses the product's script library, so a change of today's formats can't hide.

use super::store_harness::first_counter;
use redis::aio::MultiplexedConnection;
use redis::{RedisResult, Script};
use std::sync::LazyLock;
use tidegate::limiter::{
    Algorithm, Amendment, Charge, CounterRef, Limit, PolicyCharges, Refusal, each_charge,
};

macro_rules! fixture {
    ($name:literal) => {
        include_str!(concat!("../../fixtures/upgrade/767e699/", $name))
    };
}

static DECIDE: LazyLock<Script> = LazyLock::new(|| script_with_rules(fixture!("decide.lua")));
static AMEND: LazyLock<Script> = LazyLock::new(|| script_with_rules(fixture!("amend.lua")));
static FLEET: LazyLock<Script> = LazyLock::new(|| Script::new(fixture!("fleet.lua")));

/// The Redis keys that the binary of 767e699 wrote for `tests/fixtures/upgrade/policies.toml`.
pub const KEYS: &str = fixture!("keys.txt");

/// How long an instance counts after its last heartbeat.
const MEMBER_TTL_US: u64 = 5_000_000;

/// One instance of 767e699.
#[derive(Clone)]
pub struct PreviousVersion {
    connection: MultiplexedConnection,
    prefix: String,
}

/// The state of one limit in a reply: refused until, remaining units, and their next growth.
pub type StatusNumbers = [i64; 3];

#[derive(Debug, PartialEq)]
pub struct PreviousDecision {
    pub statuses: Vec<StatusNumbers>,
    /// One per charge that will be settled.
    pub charged_at_us: Vec<u64>,
    /// The units of a lease, and the last moment of their use.
    pub grant: Option<(u64, u64)>,
    pub delay_us: u64,
}

impl PreviousDecision {
    pub fn is_admitted(&self) -> bool {
        self.statuses.iter().all(|status| status[0] == 0)
    }
}

impl PreviousVersion {
    pub fn new(connection: MultiplexedConnection, prefix: &str) -> Self {
        Self {
            connection,
            prefix: prefix.to_owned(),
        }
    }

    /// Decides the charges of one request.
    ///
    /// # Errors
    /// Those of Redis. `FOREIGN n`: 767e699 can't read the value of the n-th key.
    pub async fn decide(
        &mut self,
        charges: &[PolicyCharges<'_>],
        time_us: Option<u64>,
    ) -> RedisResult<PreviousDecision> {
        let mut call = DECIDE.prepare_invoke();
        for charge in each_charge(charges) {
            call.key(self.counter_key(charge.counter()));
        }
        call.arg(format_time(time_us));
        let mut follows = false;
        for (number, policy) in (0..).zip(charges) {
            for charge in policy.charges() {
                call.arg(charge_argument(&charge, number, follows));
                follows = true;
            }
        }
        let reply: String = call.invoke_async(&mut self.connection).await?;
        Ok(parse_decision(&reply, charges))
    }

    /// Applies one amendment.
    pub async fn amend(
        &mut self,
        charge: &PolicyCharges<'_>,
        amendment: Amendment,
        time_us: Option<u64>,
    ) -> RedisResult<u64> {
        let (operation, units, at_us) = match amendment {
            Amendment::Charge(units) => ("charge", units.to_string(), 0),
            Amendment::BackdatedCharge { units, age_us } => ("charge", units.to_string(), age_us),
            Amendment::Credit { units, at_us } => ("credit", units.to_string(), at_us),
            Amendment::Renew { slot } => ("renew", slot_text(slot), 0),
            Amendment::Release { slot } => ("release", slot_text(slot), 0),
        };
        let limit = charge.limits[0].limit;
        AMEND
            .key(self.counter_key(first_counter(charge)))
            .arg(format_time(time_us))
            .arg(letter(&limit))
            .arg(limit.per_us)
            .arg(parameters(&limit, 0))
            .arg(operation)
            .arg(units)
            .arg(at_us)
            .invoke_async(&mut self.connection)
            .await
    }

    /// Sends a heartbeat: `beat`, `owe` or `look`. Returns the live instances, those with lower
    /// ids, and those heard from since `since_us` that have nothing to write back.
    pub async fn heartbeat(
        &mut self,
        id: &str,
        operation: &str,
        since_us: Option<u64>,
    ) -> [u64; 3] {
        let [instances, ids] = self.membership_keys();
        let (_now_us, live, lower, recovered): (u64, u64, u64, u64) = FLEET
            .key(instances)
            .key(ids)
            .arg(id)
            .arg(operation)
            .arg(MEMBER_TTL_US)
            .arg(format_time(since_us))
            .arg("")
            .invoke_async(&mut self.connection)
            .await
            .unwrap();
        [live, lower, recovered]
    }

    /// Removes an instance, as it does when it stops.
    pub async fn leave(&mut self, id: &str) {
        for key in self.membership_keys() {
            redis::cmd("ZREM")
                .arg(key)
                .arg(id)
                .exec_async(&mut self.connection)
                .await
                .unwrap();
        }
    }

    pub fn membership_keys(&self) -> [String; 2] {
        let instances = format!("{}:v1:instances", self.prefix);
        let ids = format!("{instances}:{{{instances}}}");
        [instances, ids]
    }

    pub fn counter_key(&self, counter: CounterRef<'_>) -> String {
        let CounterRef { limit, key } = counter;
        let (name, per_us, variant) = match limit.algorithm {
            Algorithm::SlidingLog => ("sliding_log", limit.per_us, 0),
            Algorithm::SlidingWindow { buckets } => ("sliding_window", limit.per_us, buckets),
            Algorithm::FixedWindow { offset_us } => ("fixed_window", limit.per_us, offset_us),
            Algorithm::TokenBucket { .. } => ("token_bucket", limit.per_us, 0),
            Algorithm::LeakyBucket { .. } => ("leaky_bucket", limit.per_us, 0),
            Algorithm::Concurrency { .. } => ("concurrency", 0, 0),
            Algorithm::Block => ("block", 0, 0),
            Algorithm::CalendarWindow { .. } => unreachable!("the previous version had none"),
        };
        let variant = match variant {
            0 => String::new(),
            variant => format!("+{variant}"),
        };
        let readable = key.to_readable_string();
        let id = key.id();
        format!(
            "{}:v1:{{{id:032x}}}:{name}:{per_us}{variant}:{readable}",
            self.prefix
        )
    }
}

/// The same numbers of today's decision.
pub fn status_numbers(decision: &tidegate::limiter::Decision) -> Vec<StatusNumbers> {
    let statuses = decision.statuses();
    let numbers = statuses.map(|status| {
        let until = match status.refusal {
            None => 0,
            Some(Refusal::Never) => -1,
            Some(Refusal::Unknown) => -2,
            Some(Refusal::Until(at_us)) => at_us as i64,
        };
        [
            until,
            status.remaining as i64,
            status.next_growth_us.unwrap_or(0) as i64,
        ]
    });
    numbers.collect()
}

fn script_with_rules(text: &str) -> Script {
    Script::new(&[fixture!("rules.lua"), text].concat())
}

fn format_time(time_us: Option<u64>) -> String {
    time_us.map_or_else(String::new, |time_us| time_us.to_string())
}

fn slot_text(slot: u128) -> String {
    format!("{slot:032x}:")
}

fn letter(limit: &Limit) -> &'static str {
    match limit.algorithm {
        Algorithm::SlidingLog => "l",
        Algorithm::SlidingWindow { .. } => "s",
        Algorithm::FixedWindow { .. } => "w",
        Algorithm::TokenBucket { .. } => "t",
        Algorithm::LeakyBucket { .. } => "d",
        Algorithm::Concurrency { .. } => "c",
        Algorithm::Block => "b",
        Algorithm::CalendarWindow { .. } => unreachable!("the previous version had none"),
    }
}

fn charge_argument(charge: &Charge<'_, '_>, policy_number: u32, follows: bool) -> String {
    let (policy, limit) = (charge.policy, charge.limit);
    let flags = u32::from(policy.shadow)
        + 2 * u32::from(policy.counts_rejected)
        + 4 * u32::from(charge.is_estimate)
        + 8 * u32::from(follows);
    let capacity = match limit.algorithm {
        Algorithm::TokenBucket { burst, .. } => burst,
        Algorithm::LeakyBucket { max_delay_us } => max_delay_us * limit.requests / limit.per_us + 1,
        _ => limit.requests,
    };
    let lease = policy.requested_lease().map_or_else(String::new, |lease| {
        let divisor = if lease.size.is_some() { 1 } else { 4 };
        let units = policy.requested_lease_units;
        format!("+{units}+{}+{divisor}", lease.ttl_us)
    });
    format!(
        "{} {} {}{lease} {capacity} {} {}",
        letter(limit),
        policy_number * 16 + flags,
        charge.cost,
        limit.per_us,
        parameters(limit, policy.slot_id),
    )
}

fn parameters(limit: &Limit, slot_id: u128) -> String {
    match limit.algorithm {
        Algorithm::SlidingLog | Algorithm::Block => "0".to_owned(),
        Algorithm::SlidingWindow { buckets } => limit.per_us.div_ceil(buckets).to_string(),
        Algorithm::FixedWindow { offset_us } => offset_us.to_string(),
        Algorithm::TokenBucket {
            burst,
            warm_up_us: warm_up_us @ 1..,
        } => {
            let cold_burst = (burst / 3).max(1);
            format!("{}+{warm_up_us}+{}", limit.requests, burst - cold_burst)
        }
        Algorithm::TokenBucket { .. } => limit.requests.to_string(),
        Algorithm::LeakyBucket { max_delay_us } => {
            let remainder = max_delay_us * limit.requests % limit.per_us;
            format!("{}+{remainder}", limit.requests)
        }
        Algorithm::Concurrency { .. } => slot_text(slot_id),
        Algorithm::CalendarWindow { .. } => unreachable!("the previous version had none"),
    }
}

fn parse_decision(reply: &str, charges: &[PolicyCharges<'_>]) -> PreviousDecision {
    let mut numbers = reply.split(' ').map(|word| word.parse::<i64>().unwrap());
    let mut next = || numbers.next().unwrap();
    let _now_us = next();
    let (mut statuses, mut charged_at_us) = (Vec::new(), Vec::new());
    for charge in each_charge(charges) {
        statuses.push([next(), next(), next()]);
        if charge.is_estimate {
            charged_at_us.push(next() as u64);
        }
    }
    let grant = charges[0]
        .requested_lease()
        .map(|_| (next() as u64, next() as u64));
    let delay_us = numbers.next().unwrap_or(0) as u64;
    assert_eq!(numbers.next(), None, "{reply}");
    PreviousDecision {
        statuses,
        charged_at_us,
        grant: grant.filter(|(units, _)| *units > 0),
        delay_us,
    }
}
