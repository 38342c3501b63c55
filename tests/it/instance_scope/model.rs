//! Charges split between this process and Redis against one memory store that has all of them.

use crate::calendar_limits::zone_far_from_midnight;
use crate::support::prelude::*;
use tidegate::clock::Clock;
use tidegate::limiter::{Calendar, CalendarUnit, CounterScope};
use tidegate::store::{MemorySettings, MemoryStore};

/// So long that no unit returns during the test.
const LONG_US: u64 = 100 * 86_400_000_000;

struct ModelPolicy {
    scope: CounterScope,
    shadow: bool,
    counts_rejected: bool,
    /// `count_when`: charges are reservations, and responses have counters of their own beside a
    /// block.
    counts_responses: bool,
    block: Option<Limit>,
    limits: Vec<Limit>,
}

/// A response that is not known yet: its policy, key and cost, and the time of each charge in the
/// model and in the split store.
struct PendingResponse {
    policy: usize,
    key: Key,
    cost: u64,
    charged_at_us: Vec<[u64; 2]>,
}

fn draw_limit(rng: &mut Rng) -> Limit {
    let requests = rng.u64(2..12);
    let algorithm = match rng.u8(0..6) {
        5 => {
            let units = [CalendarUnit::Day, CalendarUnit::Week, CalendarUnit::Month];
            let unit = units[rng.usize(..3)];
            let calendar = Calendar::new(unit, zone_far_from_midnight());
            return Limit::per_calendar_period(requests, calendar.unwrap());
        }
        0 => Algorithm::SlidingLog,
        1 => Algorithm::SlidingWindow { buckets: 10 },
        2 => Algorithm::FixedWindow { offset_us: 0 },
        3 => plain_bucket(requests),
        _ => Algorithm::Concurrency { max_duration_us: 0 },
    };
    Limit {
        requests,
        // Slots do not expire during the test either.
        per_us: if matches!(algorithm, Algorithm::TokenBucket { .. }) {
            LONG_US / 100
        } else {
            LONG_US
        },
        algorithm,
    }
}

fn draw_policy(rng: &mut Rng, scope: CounterScope) -> ModelPolicy {
    let mut limits = vec![draw_limit(rng)];
    if rng.bool() {
        let second = draw_limit(rng);
        if second.counter_identity() != limits[0].counter_identity() {
            limits.push(second);
        }
    }
    let shadow = rng.u8(0..4) == 0;
    // A refusal by the instance keeps Redis from counting it, so only the instance's own count.
    let counts = scope == CounterScope::Instance && !shadow;
    let has_slots = limits
        .iter()
        .any(|limit| matches!(limit.algorithm, Algorithm::Concurrency { .. }));
    let counts_responses = !has_slots && rng.u8(0..3) == 0;
    ModelPolicy {
        scope,
        shadow,
        counts_responses,
        counts_rejected: counts && !has_slots && !counts_responses && rng.bool(),
        block: (counts && rng.u8(0..4) == 0).then_some(make_limit(1, LONG_US, Algorithm::Block)),
        limits,
    }
}

fn build_charges<'c>(
    policies: &'c [ModelPolicy],
    included: &[(usize, u64)],
    keys: &'c [[Key; 2]],
    slot_id: u128,
) -> Vec<PolicyCharges<'c>> {
    let mut charges = Vec::new();
    for (number, cost) in included {
        let (policy, [key, counted_key]) = (&policies[*number], &keys[*number]);
        let limits = policy.block.iter().chain(&policy.limits).map(|limit| {
            let is_block = limit.algorithm == Algorithm::Block;
            let is_slot = matches!(limit.algorithm, Algorithm::Concurrency { .. });
            LimitCharge {
                is_estimate: policy.counts_responses && !is_block,
                ..LimitCharge::new(limit, if is_block || is_slot { 1 } else { *cost })
            }
        });
        let mut limits: SmallVec<[LimitCharge<'_>; 1]> = limits.collect();
        if policy.counts_responses && policy.block.is_some() {
            limits.extend(policy.limits.iter().map(|limit| LimitCharge {
                is_read: true,
                counts_responses: true,
                ..LimitCharge::new(limit, *cost)
            }));
        }
        charges.push(PolicyCharges {
            response_key: Some(Arc::new(counted_key.clone())),
            shadow: policy.shadow,
            counts_rejected: policy.counts_rejected,
            slot_id,
            ..PolicyCharges::with_limits(Cow::Borrowed(key), limits)
        });
    }
    charges
}

/// The responses that an admitted request still has to get: one per policy that counts them and has
/// charged.
fn find_pending_responses(
    charges: &[PolicyCharges<'_>],
    included: &[(usize, u64)],
    decisions: [&Decision; 2],
) -> Vec<PendingResponse> {
    let mut pending: Vec<PendingResponse> = Vec::new();
    let numbers = charges.iter().zip(included);
    let numbers = numbers.flat_map(|(policy, (number, _))| policy.limits.iter().map(|_| *number));
    for ((index, charge), policy) in each_charge(charges).enumerate().zip(numbers) {
        if !charge.is_estimate {
            continue;
        }
        let charged = |decision: &Decision| decision.outcomes().nth(index).unwrap().charged_at_us;
        let (in_model, in_split) = match decisions.map(charged) {
            [Some(in_model), Some(in_split)] => (in_model, in_split),
            [None, None] => continue,
            differing => panic!("{charge:?} is charged at {differing:?}"),
        };
        let times = [in_model, in_split];
        match pending.last_mut() {
            Some(last) if last.policy == policy => last.charged_at_us.push(times),
            _ => pending.push(PendingResponse {
                policy,
                key: charge.key.clone(),
                cost: charge.cost,
                charged_at_us: vec![times],
            }),
        }
    }
    pending
}

/// Settles a response in both stores: it counts, or its reservation is returned.
async fn settle_response(
    stores: [&Store; 2],
    policy: &ModelPolicy,
    response: &PendingResponse,
    is_counted: bool,
) {
    let counted_key = response.key.to_response_counter_key();
    for (number, store) in stores.into_iter().enumerate() {
        let charged = policy.limits.iter().zip(&response.charged_at_us);
        let settlements: Vec<Settlement<'_>> = charged
            .filter(|_| !is_counted || policy.block.is_some())
            .map(|(limit, at_us)| {
                let units = response.cost;
                let (key, amendment) = match is_counted {
                    true => (&counted_key, Amendment::Charge(units)),
                    false => {
                        let at_us = at_us[number];
                        (&response.key, Amendment::Credit { units, at_us })
                    }
                };
                Settlement {
                    limit,
                    key,
                    amendment,
                }
            })
            .collect();
        store.apply_settlements(&settlements).await.unwrap();
    }
}

/// Decisions in sequence are those of one store, and so is what is left afterwards.
#[tokio::test]
async fn split_decisions_are_those_of_one_store() {
    let seed = test_seed();
    let mut rng = Rng::with_seed(seed);
    let server = RedisServer::start();
    for round in 0..30 {
        server.command::<()>("FLUSHALL").await;
        let (_shared, redis) = server.connect().await;
        let split = Store::from_redis(redis);
        let bounds = MemorySettings {
            max_keys: 1 << 20,
            max_bytes: 1 << 30,
        };
        let model = Store::Memory(Arc::new(MemoryStore::new(bounds, Clock::system())));
        let policies: Vec<ModelPolicy> = (0..4)
            .map(|number| match number % 2 {
                0 => draw_policy(&mut rng, CounterScope::Instance),
                _ => draw_policy(&mut rng, CounterScope::Shared),
            })
            .collect();
        let mut pending = Vec::new();
        let mut held: Vec<(u128, Vec<(Limit, Key)>)> = Vec::new();
        for step in 0..60_u128 {
            let customer = rng.u8(0..2);
            let keys: Vec<[Key; 2]> = (0..)
                .zip(&policies)
                .map(|(number, policy)| {
                    let mut key = KeyBuilder::with_scope(&format!("p{number}"), policy.scope);
                    key.push_key_value(Some(&[b'a' + customer]));
                    let key = key.finish();
                    let counted_key = key.to_response_counter_key();
                    [key, counted_key]
                })
                .collect();
            let mut included: Vec<(usize, u64)> = (0..policies.len())
                .map(|number| (number, rng.u64(0..3)))
                .collect();
            included.retain(|_| rng.u8(0..4) > 0);
            rng.shuffle(&mut included);
            let slot = u128::from(round as u64) << 64 | step;
            let charges = build_charges(&policies, &included, &keys, slot);
            if charges.is_empty() {
                continue;
            }
            let expected = model.decide(&charges).await.unwrap();
            let decided = split.decide(&charges).await.unwrap();
            let context = || format!("seed {seed}, round {round}, step {step}: {charges:#?}");
            assert_eq!(decided.admitted, expected.admitted, "{}", context());
            for (one, other) in decided.outcomes().zip(expected.outcomes()) {
                let (Some(one), Some(other)) = (one.status, other.status) else {
                    assert!(!expected.admitted, "{}", context());
                    continue;
                };
                assert_eq!(one.remaining, other.remaining, "{}", context());
                let found = one.refusal.is_some();
                assert_eq!(found, other.refusal.is_some(), "{}", context());
            }
            if decided.admitted {
                let decisions = [&expected, &decided];
                pending.extend(find_pending_responses(&charges, &included, decisions));
                let slots = each_charge(&charges).filter(|charge| {
                    matches!(charge.limit.algorithm, Algorithm::Concurrency { .. })
                });
                held.push((
                    slot,
                    slots.map(|one| (*one.limit, one.key.clone())).collect(),
                ));
            }
            while rng.bool() && !pending.is_empty() {
                let response = pending.swap_remove(rng.usize(..pending.len()));
                let policy = &policies[response.policy];
                settle_response([&model, &split], policy, &response, rng.bool()).await;
            }
            while rng.bool() && !held.is_empty() {
                let (slot, counters) = held.swap_remove(rng.usize(..held.len()));
                let amendment = Amendment::Release { slot };
                let releases: Vec<Settlement<'_>> = counters
                    .iter()
                    .map(|(limit, key)| Settlement {
                        limit,
                        key,
                        amendment,
                    })
                    .collect();
                for store in [&model, &split] {
                    store.apply_settlements(&releases).await.unwrap();
                }
            }
        }
    }
}
