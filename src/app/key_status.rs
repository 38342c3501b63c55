//! Describes policies and limits, and reads and resets one key of a policy, for operators.

use super::store_backend::StoreBackend;
use crate::admin::{
    AdminError, KeyResetDocument, LeaseDocument, LimitDocument, LimitUsage, PolicyDocument,
    QuotaDocument,
};
use crate::config::format_period;
use crate::limiter::{
    Algorithm, Key, Limit, LimitCharge, LimitStatus, ListedValue, OverrideInEffect, PolicyCharges,
};
use crate::policy::{
    NamedLimit, OnStoreFailure, OverrideRule, Policy, PolicyAction, PolicyMode, PolicyTable, Quota,
};
use crate::store::Store;
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// Maximum number of names that an error lists.
const MAX_LISTED_NAMES: usize = 20;

/// A key with its policy and limits.
#[derive(Debug)]
pub(crate) struct ResolvedKey<'t> {
    pub(crate) policy: &'t Policy,
    pub(crate) quota: &'t Quota,
    pub(crate) key: Key,
    pub(crate) limits: &'t [NamedLimit],
    /// What an override does with the key.
    pub(crate) rule: OverrideRule,
    pub(crate) mode: PolicyMode,
}

/// Status of a key's limits at one moment.
#[derive(Debug)]
pub(super) struct KeyStatus {
    /// Time of the store's clock, in microseconds.
    pub(super) now_us: u64,
    pub(super) blocked_until_us: Option<u64>,
    /// Statuses in the order of the key's limits.
    pub(super) limit_statuses: Vec<LimitStatus>,
}

/// Resolves a key by its values: one per position, empty if absent.
///
/// # Errors
/// If the policy does not exist or has no limits, or the values do not fit its key.
pub(crate) fn resolve_key<'t>(
    table: &'t PolicyTable,
    policy: &str,
    values: &[String],
) -> Result<ResolvedKey<'t>, AdminError> {
    let (policy, quota) = find_limiting_policy(table, policy)?;
    let settings = (&table.client, &table.path);
    let (key, selected) = quota
        .key_and_limits_for_values(&policy.name, values, settings, |text| {
            ListedValue::Plain(text)
        })
        .map_err(AdminError::InvalidRequest)?;
    Ok(ResolvedKey {
        policy,
        quota,
        key,
        limits: selected.limits,
        rule: selected.rule,
        mode: selected.mode(policy.mode),
    })
}

/// The key of an override. Its policy may have lost `dynamic`, so that old overrides can be
/// removed.
///
/// # Errors
/// If the policy does not exist or has no limits, or the values do not fit its key.
pub(crate) fn resolve_override_key(
    table: &PolicyTable,
    policy: &str,
    values: &[String],
) -> Result<Key, AdminError> {
    let (policy, quota) = find_limiting_policy(table, policy)?;
    let settings = (&table.client, &table.path);
    let key = quota.key_and_limits_for_values(&policy.name, values, settings, |text| {
        ListedValue::parse(text)
    });
    key.map(|(key, _)| key).map_err(AdminError::InvalidRequest)
}

/// Finds a policy with limits.
///
/// # Errors
/// If the policy does not exist or has no limits.
pub(crate) fn find_limiting_policy<'t>(
    table: &'t PolicyTable,
    policy: &str,
) -> Result<(&'t Policy, &'t Quota), AdminError> {
    let policies = table.policies();
    let Some(policy) = policies.iter().find(|known| *known.name == *policy) else {
        let names: BTreeSet<&str> = policies.iter().map(|policy| &*policy.name).collect();
        let more = if names.len() > MAX_LISTED_NAMES {
            ", ..."
        } else {
            ""
        };
        let listed: Vec<&str> = names.iter().copied().take(MAX_LISTED_NAMES).collect();
        let hint = match names.len() {
            0 => ": the configuration has no policies; expected --config with the proxy's configuration".to_owned(),
            _ => format!("; expected one of {}{more}", listed.join(", ")),
        };
        return Err(AdminError::NotFound(format!(
            "unknown policy {policy:?}{hint}"
        )));
    };
    let PolicyAction::Limit(quota) = &policy.action else {
        let why = format!("policy {} has no limits", policy.name);
        return Err(AdminError::InvalidRequest(why));
    };
    Ok((policy, quota))
}

impl ResolvedKey<'_> {
    /// Returns charges of cost 0 on all counters of the key, the block first. They serve to read or
    /// delete the counters.
    fn zero_cost_charges(&self) -> PolicyCharges<'_> {
        let name_of_block = self.limits.first().map(|named| &named.name);
        let block = self.quota.block.iter().map(|block| (block, name_of_block));
        let limits = self.limits.iter();
        let limits = limits.map(|named| (&named.limit, Some(&named.name)));
        let charges = block.chain(limits).map(|(limit, name)| LimitCharge {
            name: name.filter(|_| self.quota.is_dynamic).map(Cow::Borrowed),
            ..LimitCharge::new(limit, 0)
        });
        PolicyCharges {
            shard_count: self.quota.shards,
            ..PolicyCharges::with_limits(Cow::Borrowed(&self.key), charges.collect())
        }
    }

    /// The charges of all counters of the key, also of its response counters.
    pub(crate) fn all_counters(&self) -> PolicyCharges<'_> {
        let mut all = self.zero_cost_charges();
        if self.quota.counts_responses() {
            all.response_key = Some(Arc::new(self.key.to_response_counter_key()));
            let limits = self.limits.iter().map(|named| &named.limit);
            // The response counts against no slot.
            let limits = limits.filter(|limit| !limit.algorithm.counts_slots());
            all.limits.extend(limits.map(|limit| LimitCharge {
                counts_responses: true,
                ..LimitCharge::new(limit, 0)
            }));
        }
        all
    }

    /// Reads the status of all limits at one moment, without changing a counter.
    ///
    /// # Errors
    /// If Redis does not answer.
    pub(super) async fn read_status(&self, stores: &StoreBackend) -> Result<KeyStatus, AdminError> {
        let store = if self.key.is_instance_scoped() {
            Store::Memory(Arc::clone(stores.memory()))
        } else {
            stores.open_for_inspection().await
        };
        let decision = store.decide(&[self.zero_cost_charges()]).await;
        let decision = decision
            .map_err(|error| AdminError::Unavailable(stores.describe_failure(&store, &error)))?;
        let mut statuses = decision.statuses();
        let blocked_until_us = self
            .quota
            .block
            .and_then(|_| statuses.next()?.next_growth_us);
        Ok(KeyStatus {
            now_us: decision.now_us,
            blocked_until_us,
            limit_statuses: statuses.collect(),
        })
    }

    /// Deletes the counters of the key, or only those of one limit.
    ///
    /// # Errors
    /// If the key has no limit of this name, or Redis does not answer.
    pub(crate) async fn reset_counters(
        &self,
        stores: &StoreBackend,
        limit: Option<&str>,
    ) -> Result<KeyResetDocument, AdminError> {
        let is_selected = |named: &&NamedLimit| limit.is_none_or(|name| *named.name == *name);
        let mut selected = self.limits.iter().filter(is_selected).peekable();
        if let (Some(name), None) = (limit, selected.peek()) {
            let names: Vec<&str> = self.limits.iter().map(|named| &*named.name).collect();
            return Err(AdminError::InvalidRequest(format!(
                "unknown limit {name:?} of policy {}; expected one of {}",
                self.policy.name,
                names.join(", ")
            )));
        }
        let redis = stores.redis().filter(|_| !self.key.is_instance_scoped());
        let inspector = match redis {
            Some(redis) => Some(stores.connect_inspector(redis).await?),
            None => None,
        };
        let counters = self.all_counters();
        let delete = async |limit: &Limit| -> Result<u64, AdminError> {
            let counters = counters.charges().filter(|charge| *charge.limit == *limit);
            match &inspector {
                Some(inspector) => Ok(inspector.reset_counters(counters).await?),
                None => {
                    let counters = counters.map(|charge| charge.counter());
                    Ok(stores.memory().remove_counters(counters))
                }
            }
        };
        let mut reset = KeyResetDocument {
            policy: self.policy.name.to_string(),
            key: self.key.to_readable_string(),
            ..KeyResetDocument::default()
        };
        for named in selected {
            let count = delete(&named.limit).await?;
            reset.counters_forgotten += count;
            reset
                .limits
                .extend((count > 0).then(|| named.name.to_string()));
        }
        match (&self.quota.block, limit) {
            (Some(block), None) => {
                let count = delete(block).await?;
                reset.counters_forgotten += count;
                reset.unblocked = count > 0;
            }
            (Some(_), Some(_)) => {
                reset.blocked_s = self.read_status(stores).await?.blocked_s();
            }
            (None, _) => {}
        }
        Ok(reset)
    }
}

impl KeyStatus {
    /// Seconds until the block ends, if the key is blocked.
    pub(super) fn blocked_s(&self) -> Option<f64> {
        let until_us = self.blocked_until_us?;
        Some(micros_to_seconds(until_us.saturating_sub(self.now_us)))
    }
}

/// Completes the document of an active policy.
pub(super) fn describe_policy(policy: &Policy, described: PolicyDocument) -> PolicyDocument {
    let action = match policy.action {
        PolicyAction::Allow => "allow",
        PolicyAction::Deny => "deny",
        PolicyAction::Limit(_) => "limit",
    };
    PolicyDocument {
        mode: policy.mode.name().to_owned(),
        priority: Some(policy.priority),
        action: Some(action.to_owned()),
        quota: policy.quota().map(|quota| describe_quota(policy, quota)),
        ..described
    }
}

fn describe_quota(policy: &Policy, quota: &Quota) -> QuotaDocument {
    let on_store_failure = match policy.on_store_failure {
        _ if quota.is_instance_scoped() => None,
        OnStoreFailure::Open => Some("open"),
        OnStoreFailure::Closed => Some("closed"),
        OnStoreFailure::Local => Some("local"),
    };
    QuotaDocument {
        key: quota.key.describe_positions(),
        limits: quota.limits.iter().map(describe_limit).collect(),
        overrides: quota.overrides.as_slice().len(),
        dynamic: quota.is_dynamic,
        scope: quota.key.scope.name().to_owned(),
        counter: quota.key.counter_name().map(str::to_owned),
        on_store_failure: on_store_failure.map(str::to_owned),
        block_s: quota.block.map(|block| micros_to_seconds(block.per_us)),
        lease: quota.lease.map(|lease| LeaseDocument {
            size: lease.size.map_or(json!("auto"), |size| json!(size)),
            ttl_s: micros_to_seconds(lease.ttl_us),
        }),
    }
}

/// Describes a limit, with the names of the configuration and durations in seconds.
pub(crate) fn describe_limit(named: &NamedLimit) -> LimitDocument {
    let limit = &named.limit;
    let (mut per, mut tz) = (Some(format_period(limit)), None);
    let mut details = Map::new();
    let mut add = |name: &str, value: Value| drop(details.insert(name.to_owned(), value));
    let seconds = |us| json!(micros_to_seconds(us));
    match limit.algorithm {
        Algorithm::SlidingWindow { buckets } => add("buckets", json!(buckets)),
        Algorithm::FixedWindow { offset_us } => add("offset_s", seconds(offset_us)),
        Algorithm::TokenBucket { burst, warm_up_us } => {
            add("burst", json!(burst));
            add("warm_up_s", seconds(warm_up_us));
        }
        Algorithm::LeakyBucket { max_delay_us } => add("max_delay_s", seconds(max_delay_us)),
        Algorithm::Concurrency { max_duration_us } => {
            per = None;
            add("max_duration_s", seconds(max_duration_us));
            add("release", json!(named.release.name()));
        }
        Algorithm::CalendarWindow { calendar } => {
            per = Some(calendar.unit().as_str().to_owned());
            tz = Some(calendar.zone_name().to_owned());
        }
        Algorithm::SlidingLog | Algorithm::Block => {}
    }
    if per.is_some() {
        add("per_s", seconds(limit.per_us));
    }
    if let Some(source) = &named.amount {
        add("max", json!(source.max));
    }
    if let Some(unit) = &named.unit {
        add("unit", json!(unit));
    }
    LimitDocument {
        name: named.name.to_string(),
        algorithm: limit.algorithm.into_str().to_owned(),
        requests: limit.requests,
        per,
        tz,
        requests_from: named.amount.as_ref().map(|source| source.field.to_string()),
        details,
        ..LimitDocument::default()
    }
}

/// Describes a limit with its status at `now_us`. A limit of a key with an override has the amounts
/// in effect.
pub(crate) fn describe_limit_status(
    named: &NamedLimit,
    status: &LimitStatus,
    now_us: u64,
) -> LimitDocument {
    let in_effect = NamedLimit {
        limit: status.limit_in_effect(&named.limit),
        ..named.clone()
    };
    let override_kind = status.in_effect.and_then(|in_effect| match in_effect {
        OverrideInEffect::Unlimited => Some("unlimited"),
        OverrideInEffect::Blocked => Some("blocked"),
        OverrideInEffect::Amounts { .. } => Some("limits"),
        OverrideInEffect::StatedAmounts { .. } => None,
    });
    let usage = LimitUsage {
        used: in_effect.limit.capacity().saturating_sub(status.remaining),
        remaining: status.remaining,
        grows_in_s: status
            .next_growth_us
            .map(|at_us| micros_to_seconds(at_us.saturating_sub(now_us))),
    };
    LimitDocument {
        override_kind: override_kind.map(str::to_owned),
        is_stated: override_kind.is_none() && status.in_effect.is_some(),
        usage: (!status.is_unlimited()).then_some(usage),
        ..describe_limit(&in_effect)
    }
}

pub(crate) fn micros_to_seconds(us: u64) -> f64 {
    Duration::from_micros(us).as_secs_f64()
}
