//! Operators override keys in the store. Keys of the run get the amounts that they have, so nothing
//! changes for their requests; keys that no client uses are blocked or unlimited.

use super::instance::InstanceState;
use super::redis_server::EPOCH_US;
use super::scenario::{PolicySpec, RequestSpec, Rule, Scenario};
use std::sync::atomic::Ordering;
use tidegate::limiter::{Key, KeyBuilder, KeyOverride, LimitAmounts};
use tidegate::store::redis::{CounterInspector, RedisConnectionError};
use tidegate::store::{MemoryStore, Store, StoredOverride};

/// How long an override holds.
const LIFETIME_MS: u64 = 5_000;

/// Overrides the key of a request and unused keys, and removes some of the overrides.
pub(crate) async fn change_overrides(
    state: &InstanceState,
    store: &Store,
    scenario: &Scenario,
    request: &RequestSpec,
) {
    let now_us = EPOCH_US + state.network.time.now_us();
    let wall_shift_us = state
        .network
        .time
        .steps
        .wall_shift_us
        .load(Ordering::Relaxed);
    let now_ms = now_us.saturating_add_signed(wall_shift_us) / 1000;
    let stored = |key: Key, rule: KeyOverride, has_end: bool| StoredOverride {
        key,
        rule,
        expires_at_ms: has_end.then_some(now_ms + LIFETIME_MS),
        author: None,
        note: Some("simulated".into()),
    };
    let unused = |name: &str| KeyBuilder::new(name).finish();
    let mut overrides = vec![
        stored(unused("blocked"), KeyOverride::Blocked, false),
        stored(unused("unlimited"), KeyOverride::Unlimited, true),
    ];
    let matching = scenario.policies.iter().enumerate();
    for (number, policy) in matching.filter(|(_, policy)| policy.applies_to(request)) {
        if policy.is_dynamic && policy.second_limit.is_none() {
            let client = (!policy.is_global).then_some(request.client);
            let key = scenario.counter_key(number, client);
            let has_end = request.client.is_multiple_of(2);
            overrides.push(stored(key, same_amounts(number, policy, request), has_end));
        }
    }
    match (store, &state.redis) {
        (Store::Memory(memory), _) => change_in_memory(memory, overrides),
        (_, Some(redis)) => {
            if let Ok(inspector) = CounterInspector::connect(redis.settings_in_use()).await {
                // It fails only with the servers.
                drop(change_in_redis(&inspector, &overrides).await);
            }
        }
        (_, None) => {}
    }
}

fn same_amounts(number: usize, policy: &PolicySpec, request: &RequestSpec) -> KeyOverride {
    let burst = match policy.rule {
        Rule::TokenBucket { burst } => Some(burst),
        _ => None,
    };
    KeyOverride::Limits(vec![LimitAmounts {
        limit: format!("p{number}").into(),
        requests: policy.amount(request),
        burst,
    }])
}

fn change_in_memory(memory: &MemoryStore, overrides: Vec<StoredOverride>) {
    for one in overrides {
        let key = one.key.clone();
        assert!(memory.set_override(one.clone()));
        assert_eq!(memory.find_override(&key), Some(one));
    }
    let blocked = memory
        .list_overrides()
        .into_iter()
        .find(|one| one.rule == KeyOverride::Blocked);
    let blocked = blocked.expect("a blocked key");
    assert_eq!(memory.remove_override(&blocked.key), Some(blocked));
}

async fn change_in_redis(
    inspector: &CounterInspector,
    overrides: &[StoredOverride],
) -> Result<(), RedisConnectionError> {
    for one in overrides {
        inspector.set_override(one).await?;
    }
    inspector.visit_overrides(|_| true).await?;
    for one in overrides {
        let found = inspector.find_override(&one.key).await?;
        inspector.replace_override(found.as_ref(), one).await?;
        if one.rule == KeyOverride::Blocked {
            inspector.remove_override(&one.key).await?;
        }
    }
    Ok(())
}
