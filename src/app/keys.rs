//! One key of a policy, named by hand: where it stands in the store, and how it is forgotten. For `tidegate keys` and
//! the admin port.

use super::{Stores, limits};
use crate::limiter::{Charge, Key, Standing};
use crate::policy::{Action, NamedLimit, Policy, PolicyTable, Quota};
use crate::store::redis::{InspectError, Inspector};
use crate::store::{Store, Unavailable};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// Names that an error lists.
const MAX_NAMES: usize = 20;

/// A key and what limits it.
#[derive(Debug)]
pub(crate) struct Found<'t> {
    pub(crate) policy: &'t Policy,
    pub(crate) quota: &'t Quota,
    pub(crate) key: Key,
    pub(crate) limits: &'t [NamedLimit],
}

/// Why there is no such key. For people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NoKey {
    #[error("{0}")]
    Policy(String),
    #[error("{0}")]
    Values(String),
}

/// Where a key stands.
#[derive(Debug)]
pub(crate) struct Stand {
    /// The store's clock.
    pub(crate) now_us: u64,
    pub(crate) blocked_until_us: Option<u64>,
    /// One per limit.
    pub(crate) standings: Vec<Standing>,
}

/// The key of a policy by its values: one per position, an empty one for what is absent.
///
/// # Errors
/// [`NoKey`]: there is no such policy, it has no limits, or these are no values of its key.
pub(crate) fn find<'t>(
    table: &'t PolicyTable,
    policy: &str,
    values: &[String],
) -> Result<Found<'t>, NoKey> {
    let policies = table.policies();
    let Some(policy) = policies.iter().find(|known| *known.name == *policy) else {
        let names: BTreeSet<&str> = policies.iter().map(|policy| &*policy.name).collect();
        let more = if names.len() > MAX_NAMES { ", ..." } else { "" };
        let names: Vec<&str> = names.into_iter().take(MAX_NAMES).collect();
        return Err(NoKey::Policy(format!(
            "no policy is called {policy:?}; there are {}{more}",
            names.join(", ")
        )));
    };
    let Action::Limit(quota) = &policy.action else {
        return Err(NoKey::Values(format!(
            "policy {} has no limits",
            policy.name
        )));
    };
    let (key, limits) = quota
        .select_by_hand(&policy.name, values, &table.client, &table.path)
        .map_err(NoKey::Values)?;
    Ok(Found {
        policy,
        quota,
        key,
        limits,
    })
}

impl Found<'_> {
    /// What is kept for the key: the block first, if there is one. They cost nothing: to look, or to forget.
    pub(crate) fn charges(&self) -> Vec<Charge<'_>> {
        let limits = self.limits.iter().map(|named| &named.limit);
        let kept = self.quota.block.iter().chain(limits);
        kept.map(|limit| Charge {
            shards: self.quota.shards,
            ..Charge::new(limit, &self.key, 0)
        })
        .collect()
    }

    /// Looks, all limits at one moment, and changes nothing.
    pub(crate) async fn look(&self, store: &Store) -> Result<Stand, Unavailable> {
        let decision = store.decide(&self.charges()).await?;
        let mut standings = decision.standings.into_iter().flatten();
        let blocked_until_us = self.quota.block.and_then(|_| standings.next()?.grows_at_us);
        Ok(Stand {
            now_us: decision.now_us,
            blocked_until_us,
            standings: standings.collect(),
        })
    }

    /// Whether a request would be refused that costs the least that one costs.
    pub(crate) fn is_full(&self, stand: &Stand) -> bool {
        let least = self.quota.cost.least();
        stand.blocked_until_us.is_some()
            || stand
                .standings
                .iter()
                .any(|standing| standing.remaining < least)
    }

    /// For programs.
    pub(crate) fn in_json(&self, stand: &Stand) -> Value {
        let limits = self
            .limits
            .iter()
            .zip(&stand.standings)
            .map(|(named, standing)| {
                let mut told = limits::told(named);
                told.extend(limits::stands(&named.limit, standing, stand.now_us));
                Value::Object(told)
            });
        let left = |until_us: u64| limits::seconds(until_us.saturating_sub(stand.now_us));
        json!({
            "policy": self.policy.name,
            "key": self.key.readable(),
            "admitted": !self.is_full(stand),
            "shadow": self.policy.shadow,
            "least_cost": self.quota.cost.least(),
            "blocked_s": stand.blocked_until_us.map(left),
            "limits": limits.collect::<Vec<Value>>(),
        })
    }

    /// Forgets what the key has used. Returns how many counters there were.
    pub(crate) async fn reset(&self, stores: &Stores) -> Result<u64, InspectError> {
        match stores {
            Stores::Memory(memory) => Ok(memory.reset(&self.charges())),
            Stores::Redis(redis, _) => {
                let inspector = Inspector::connect(redis.settings().clone()).await?;
                inspector.reset(&self.charges()).await
            }
        }
    }
}
