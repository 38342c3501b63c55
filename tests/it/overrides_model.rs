//! Overrides of keys: both stores decide as the naive model does with the limits in effect.

use crate::reference_model::NaiveModel;
use crate::support::prelude::*;
use tidegate::limiter::{ChargeOutcome, KeyOverride, LimitAmounts, LimitName, OverrideInEffect};
use tidegate::store::StoredOverride;

const ROUNDS: usize = 60;
const DECISIONS_PER_ROUND: usize = 30;

/// Names that begin with digits look like amounts.
const NAMES: [&str; 3] = ["2fa", "10.day", "2fa-2"];

/// Overrides by the id of their key.
type Rules = HashMap<u128, KeyOverride>;

struct DynamicPolicy {
    key: Key,
    limits: Vec<(LimitName, Limit)>,
    block: Option<Limit>,
    shadow: bool,
    counts_rejected: bool,
    is_estimate: bool,
    is_dynamic: bool,
    counts_responses: bool,
    counted_key: Key,
}

/// The model has no buckets whose rate changes often: [`both_stores_agree_for_every_algorithm`].
const MODELLED_ALGORITHMS: usize = 3;

fn draw_policy(rng: &mut Rng, number: usize, algorithm_count: usize) -> DynamicPolicy {
    let mut limits: Vec<(LimitName, Limit)> = Vec::new();
    for name in NAMES.iter().take(rng.usize(1..=NAMES.len())) {
        let limit = EVERY_ALGORITHM[rng.usize(..algorithm_count)].1(rng);
        let is_new = |(_, other): &(_, Limit)| other.counter_identity() != limit.counter_identity();
        if limits.iter().all(is_new) {
            limits.push((Arc::from(*name), limit));
        }
    }
    // The model counts rejected requests only for logs and windows.
    let has_bucket = limits.iter().any(|(_, limit)| {
        matches!(
            limit.algorithm,
            Algorithm::TokenBucket { .. } | Algorithm::LeakyBucket { .. }
        )
    });
    let mut key = KeyBuilder::new("api");
    key.push_key_value(Some(format!("customer {number}").as_bytes()));
    let key = key.finish();
    DynamicPolicy {
        counts_responses: rng.u8(..4) == 0,
        counted_key: key.to_response_counter_key(),
        key,
        limits,
        // In the model, a refusal by a cold bucket starts no block.
        block: (!has_bucket && rng.u8(..3) == 0).then_some(make_limit(
            1,
            5_000_000,
            Algorithm::Block,
        )),
        shadow: rng.u8(..4) == 0,
        counts_rejected: !has_bucket && rng.u8(..4) == 0,
        is_estimate: rng.u8(..4) == 0,
        is_dynamic: rng.u8(..4) != 0,
    }
}

fn draw_override(rng: &mut Rng, max_amount: u64) -> KeyOverride {
    let amount = |rng: &mut Rng| match rng.u8(..10) {
        0 => 0,
        1 => max_amount,
        _ => rng.u64(1..30),
    };
    match rng.u8(..6) {
        0 => KeyOverride::Unlimited,
        1 => KeyOverride::Blocked,
        _ => KeyOverride::Limits(
            (0..rng.usize(1..=2))
                .map(|n| LimitAmounts {
                    limit: NAMES[(n + rng.usize(..2)) % 3].into(),
                    requests: amount(rng),
                    burst: rng.bool().then(|| amount(rng)),
                })
                .collect(),
        ),
    }
}

/// The limit in effect, by the words of the documentation. `None`: unlimited.
fn limit_in_effect(
    limit: &Limit,
    name: &str,
    rule: Option<&KeyOverride>,
) -> Option<(Limit, Option<OverrideInEffect>)> {
    let unchanged = Some((*limit, None));
    let is_block = limit.algorithm == Algorithm::Block;
    match rule {
        Some(KeyOverride::Unlimited) => None,
        Some(KeyOverride::Blocked) if !is_block => Some((
            Limit {
                requests: 0,
                ..*limit
            },
            Some(OverrideInEffect::Blocked),
        )),
        Some(KeyOverride::Limits(limits)) if !is_block => {
            let Some(amounts) = limits.iter().find(|amounts| *amounts.limit == *name) else {
                return unchanged;
            };
            let max_amount = match limit.algorithm {
                Algorithm::TokenBucket { .. } => MAX_UNITS / limit.per_us,
                Algorithm::LeakyBucket { max_delay_us } if max_delay_us > 0 => {
                    (MAX_UNITS - limit.per_us) / max_delay_us
                }
                _ => MAX_UNITS,
            };
            let requests = amounts.requests.min(max_amount);
            let burst = amounts.burst.unwrap_or(amounts.requests).min(max_amount);
            let algorithm = match limit.algorithm {
                Algorithm::TokenBucket { warm_up_us, .. } => {
                    Algorithm::TokenBucket { burst, warm_up_us }
                }
                other => other,
            };
            Some((
                Limit {
                    requests,
                    algorithm,
                    ..*limit
                },
                Some(OverrideInEffect::Amounts { requests, burst }),
            ))
        }
        _ => unchanged,
    }
}

fn charges_of(policies: &[DynamicPolicy], cost: u64) -> Vec<PolicyCharges<'_>> {
    let mut charges = Vec::new();
    for policy in policies {
        let block = policy
            .block
            .iter()
            .map(|block| (&policy.limits[0].0, block));
        let limits = policy.limits.iter().map(|(name, limit)| (name, limit));
        let own = block.chain(limits).map(|(name, limit)| LimitCharge {
            is_estimate: policy.is_estimate,
            name: policy.is_dynamic.then_some(Cow::Borrowed(name)),
            ..LimitCharge::new(limit, cost)
        });
        let mut own: SmallVec<[LimitCharge<'_>; 1]> = own.collect();
        if policy.counts_responses {
            let limits = own.clone().into_iter().filter(|charge| !charge.is_block());
            own.extend(limits.map(|charge| LimitCharge {
                is_estimate: false,
                is_read: true,
                counts_responses: true,
                ..charge
            }));
        }
        charges.push(PolicyCharges {
            shadow: policy.shadow,
            counts_rejected: policy.counts_rejected && policy.block.is_none(),
            response_key: Some(Arc::new(policy.counted_key.clone())),
            ..PolicyCharges::with_limits(Cow::Borrowed(&policy.key), own)
        });
    }
    charges
}

fn decide_by_model(
    model: &mut NaiveModel,
    at_us: u64,
    charges: &[PolicyCharges<'_>],
    rules: &Rules,
) -> Decision {
    let effective: Vec<_> = each_charge(charges)
        .map(|charge| {
            let name = charge.name.map_or("", |name| name);
            let rule = charge.name.and_then(|_| rules.get(&charge.key.quota_id()));
            limit_in_effect(charge.limit, name, rule)
        })
        .collect();
    let mut own = effective.iter();
    let limited: Vec<PolicyCharges<'_>> = charges
        .iter()
        .map(|policy| {
            policy.map_limits(|charge| {
                if let Some((limit, _)) = own.next().unwrap() {
                    charge.limit = *limit;
                }
            })
        })
        .collect();
    let mut own = effective.iter();
    let limited = RequestPart::new(&limited, |_| own.next().unwrap().is_some());
    let decided = model.decide(at_us, &limited.policies);
    let mut outcomes = decided.outcomes();
    let mut decision = Decision {
        policies: Decision::without_outcomes(charges).policies,
        ..decided.clone()
    };
    for (outcome, effective) in decision.outcomes_mut().zip(&effective) {
        *outcome = match effective {
            None => ChargeOutcome {
                status: Some(LimitStatus::UNLIMITED),
                ..ChargeOutcome::default()
            },
            Some((_, in_effect)) => {
                let outcome = *outcomes.next().unwrap();
                let status = LimitStatus {
                    in_effect: *in_effect,
                    ..outcome.status.unwrap()
                };
                ChargeOutcome {
                    status: Some(status),
                    ..outcome
                }
            }
        };
    }
    decision
}

/// Decides random requests in both stores while overrides change at random, and passes what they
/// decided to `check`.
fn run_rounds(
    algorithm_count: usize,
    max_amount: u64,
    mut check: impl FnMut(&mut NaiveModel, u64, &[PolicyCharges<'_>], &Rules, [Decision; 2], &str),
) {
    let seed = test_seed();
    let mut rng = Rng::with_seed(seed);
    let mut stores = StoreUnderTest::both_stores();
    for round in 0..ROUNDS {
        stores.iter_mut().for_each(StoreUnderTest::reset);
        let mut model = NaiveModel::default();
        let policies: Vec<DynamicPolicy> = (0..rng.usize(1..=2))
            .map(|number| draw_policy(&mut rng, number, algorithm_count))
            .collect();
        let mut rules = Rules::new();
        let mut at_us = START_US;
        for _ in 0..DECISIONS_PER_ROUND {
            at_us += match rng.u8(..3) {
                0 => 0,
                1 => rng.u64(..1_000_000),
                _ => rng.u64(..policies[0].limits[0].1.per_us),
            };
            if rng.u8(..4) == 0 {
                let key = &policies[rng.usize(..policies.len())].key;
                let rule = (rng.u8(..4) != 0).then(|| draw_override(&mut rng, max_amount));
                let stored = rule.clone().map(|rule| StoredOverride {
                    key: key.clone(),
                    rule,
                    expires_at_ms: None,
                    author: None,
                    note: Some("as agreed".into()),
                });
                for store in &mut stores {
                    store.change_override(key, stored.as_ref());
                }
                match rule {
                    Some(rule) => drop(rules.insert(key.id(), rule)),
                    None => drop(rules.remove(&key.id())),
                }
            }
            let charges = charges_of(&policies, rng.u64(0..4));
            let decisions = stores.each_mut().map(|store| store.decide(&charges, at_us));
            let described: Vec<String> =
                charges.iter().map(|policy| format!("{policy:?}")).collect();
            let context = format!(
                "seed {seed}, round {round}, {rules:?}\n{}",
                described.join("\n")
            );
            check(&mut model, at_us, &charges, &rules, decisions, &context);
        }
    }
}

#[test]
fn both_stores_decide_as_the_model_with_the_limits_in_effect() {
    run_rounds(
        MODELLED_ALGORITHMS,
        10_000,
        |model, at_us, charges, rules, [memory, redis], context| {
            let expected = decide_by_model(model, at_us, charges, rules);
            assert_eq!(memory, expected, "memory, {context}");
            assert_eq!(redis, expected, "redis, {context}");
        },
    );
}

#[test]
fn both_stores_agree_for_every_algorithm() {
    run_rounds(
        EVERY_ALGORITHM.len(),
        MAX_UNITS,
        |_, _, _, _, [memory, redis], context| {
            assert_eq!(memory, redis, "{context}");
        },
    );
}

/// The override applies until its end, and then the limit of the file.
#[test]
fn retry_times_are_exact_when_overrides_end() {
    let seed = test_seed();
    let mut rng = Rng::with_seed(seed);
    let mut stores = StoreUnderTest::both_stores();
    let name: LimitName = Arc::from(NAMES[0]);
    let (mut at_the_end, mut after_the_end) = (0, 0);
    for round in 0..600 {
        stores.iter_mut().for_each(StoreUnderTest::reset);
        let limit = EVERY_ALGORITHM[rng.usize(..EVERY_ALGORITHM.len())].1(&mut rng);
        let mut key = KeyBuilder::new("api");
        key.push_key_value(Some(b"ann"));
        let key = key.finish();
        let charge = PolicyCharges::new(&limit, &key, rng.u64(1..=3).min(limit.cold_capacity()));
        let charge = charge.map_limits(|charge| charge.name = Some(Cow::Borrowed(&name)));
        let ends_ms = (START_US + rng.u64(..2 * limit.per_us)) / 1000;
        let ends_us = (ends_ms + 1) * 1000;
        let amounts = LimitAmounts {
            limit: (*name).into(),
            requests: rng.u64(0..30),
            burst: None,
        };
        let stored = StoredOverride {
            key: key.clone(),
            rule: match rng.u8(..3) {
                0 => KeyOverride::Blocked,
                _ => KeyOverride::Limits(vec![amounts]),
            },
            expires_at_ms: Some(ends_ms),
            author: None,
            note: None,
        };
        let mut decide = |at_us: u64| {
            let stored = Some(&stored).filter(|_| at_us < ends_us);
            let decisions = stores.each_mut().map(|store| {
                if at_us == START_US || at_us >= ends_us {
                    store.change_override(&key, stored);
                }
                store.decide(std::slice::from_ref(&charge), at_us)
            });
            let [memory, mut redis] = decisions;
            redis.outcomes_mut().next().unwrap().override_expires_at_ms = None;
            assert_eq!(
                memory, redis,
                "seed {seed}, round {round}, {limit:?}, {stored:?}"
            );
            memory
        };
        let (mut at_us, mut requests) = (START_US, 0);
        let refused = loop {
            let decision = decide(at_us);
            requests += 1;
            if !decision.admitted || requests == 60 {
                break decision;
            }
            at_us += rng.u64(..=limit.per_us / 8);
        };
        let Some(until_us) = admissible_at_us(std::slice::from_ref(&charge), &refused) else {
            continue;
        };
        if at_us < ends_us {
            at_the_end += usize::from(until_us == ends_us);
            after_the_end += usize::from(until_us > ends_us);
        }
        for at_us in [until_us - 1, until_us] {
            let what = format!("seed {seed}, round {round}: {refused:?}, {limit:?}, {stored:?}");
            assert_eq!(decide(at_us).admitted, at_us == until_us, "{what}");
        }
    }
    assert!(at_the_end > 20, "{at_the_end}, {after_the_end}");
    assert!(after_the_end > 0, "{at_the_end}, {after_the_end}");
}
