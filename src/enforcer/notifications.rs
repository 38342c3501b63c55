//! Soft thresholds (`notify`): notifies that a key has reached a share of a limit.
//!
//! The store decides which request of the fleet is the first: by a counter of its own that admits
//! one notification per key, limit, threshold and period
//! ([decision 114](../../docs/decisions/0114-notifications-of-thresholds.md)).

use super::Enforcer;
use super::charge_plan::ChargePlan;
use crate::limiter::{
    Algorithm, ChargeOutcome, Decision, Key, Limit, LimitName, PolicyCharges, Refusal,
};
use crate::policy::{NamedLimit, PolicyMode, Threshold};
use crate::store::Store;
use crate::telemetry::metrics::WorkerMetrics;
use foldhash::fast::RandomState;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Maximum number of notifications that a worker remembers: about 400 KiB. Forgetting is harmless,
/// because the store is asked again.
const MAX_REMEMBERED: usize = 4096;

/// Longest time for which a worker does not ask the store again, so that it notices a counter that
/// was reset.
const MAX_REMEMBERED_TIME: Duration = Duration::from_secs(60);

/// Time for which a worker waits for an answer of the store before another request asks.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the counter of a window's notification outlasts the window: longer than a decision
/// about the window is on its way.
const WINDOW_GRACE_US: u64 = 10_000_000;

/// Interval of log lines after [`LOG_LINE_BURST`], in each worker: a client that invents keys can
/// reach any number of thresholds.
const LOG_LINE_INTERVAL: Duration = Duration::from_millis(100);

/// Log lines that a worker may write at once.
const LOG_LINE_BURST: u32 = 1000;

/// What is notified once. Policies of one counter have the same keys, but their own limits.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct NotificationId {
    key: u128,
    limit: LimitName,
    /// Without overrides, which may change within a period.
    requests: u64,
    threshold: Threshold,
    /// 0 for an algorithm without windows.
    window_start_us: u64,
}

/// The recent notifications of one worker. The lock is uncontended.
#[derive(Debug, Default)]
pub(super) struct SentNotifications(Mutex<SentNotificationsState>);

#[derive(Debug, Default)]
struct SentNotificationsState {
    /// Until when the store need not be asked, because it has answered or is being asked.
    asked_until: HashMap<NotificationId, Instant, RandomState>,
    /// When the whole burst of log lines is available again.
    lines_full_at: Option<Instant>,
    unlogged_count: u64,
}

/// A threshold that a request has reached, perhaps not as the first one.
struct ReachedThreshold {
    id: NotificationId,
    policy: Box<str>,
    key: Key,
    named: NamedLimit,
    usage: LimitUsage,
}

/// The usage of a limit after a decision.
#[derive(Clone, Copy)]
struct LimitUsage {
    used: u64,
    capacity: u64,
    /// The limit refuses the request: too few units are left.
    is_full: bool,
}

impl Enforcer {
    /// Notifies the thresholds that keys of the plan reach for the first time in a period. Returns
    /// those that the response may have. Without an answer of the store, nothing is notified.
    pub(super) async fn notify_thresholds<'t>(
        &self,
        plan: &ChargePlan<'t>,
        decision: &Decision,
    ) -> Vec<(&'t NamedLimit, Threshold)> {
        let mut asked = Vec::new();
        for (planned_policy, statuses) in plan.policies_with_statuses(decision) {
            let own = &planned_policy.own;
            for (named, outcome) in own.limits.iter().zip(statuses.limits) {
                let Some(usage) = LimitUsage::from_outcome(named, outcome) else {
                    continue;
                };
                let thresholds = own.quota.notify.iter().copied();
                for threshold in thresholds.filter(|threshold| usage.reaches(*threshold)) {
                    let id = NotificationId {
                        key: own.key.id(),
                        limit: LimitName::clone(&named.name),
                        requests: named.limit.requests,
                        threshold,
                        window_start_us: find_window_start(&named.limit, decision.now_us),
                    };
                    if !self.sent_notifications.begin(&id) {
                        continue;
                    }
                    let reached = ReachedThreshold {
                        id,
                        policy: own.policy.name.clone(),
                        key: own.key.clone(),
                        named: named.clone(),
                        usage,
                    };
                    // A task, so that the notification is not lost if the client leaves.
                    let task = tokio::spawn(reached.notify_if_first(
                        self.store.clone(),
                        Arc::clone(&self.metrics),
                        Arc::clone(&self.sent_notifications),
                    ));
                    let is_reported = named.is_reported && own.mode != PolicyMode::Shadow;
                    asked.push((task, is_reported.then_some((named, threshold))));
                }
            }
        }
        let mut fields = Vec::new();
        for (task, field) in asked {
            if task.await.unwrap_or(false) {
                fields.extend(field);
            }
        }
        fields
    }
}

impl ChargePlan<'_> {
    pub(super) fn has_thresholds(&self) -> bool {
        let mut policies = self.planned_policies.iter();
        policies.any(|planned_policy| !planned_policy.own.quota.notify.is_empty())
    }
}

impl LimitUsage {
    /// `None` if the limit has no usage of a period, or its usage is unknown.
    fn from_outcome(named: &NamedLimit, outcome: &ChargeOutcome) -> Option<Self> {
        let status = outcome.status.filter(|status| !status.is_unlimited())?;
        let capacity = status.limit_in_effect(&named.limit).capacity();
        let usage = Self {
            used: capacity.saturating_sub(status.remaining),
            capacity,
            // A cost above the capacity is refused whatever the usage is.
            is_full: matches!(status.refusal, Some(Refusal::Until(_))),
        };
        (capacity > 0 && !named.limit.algorithm.counts_slots()).then_some(usage)
    }

    fn reaches(self, threshold: Threshold) -> bool {
        self.is_full || threshold.is_reached(self.used, self.capacity)
    }
}

/// The start of the window at a time; 0 for an algorithm without windows.
fn find_window_start(limit: &Limit, now_us: u64) -> u64 {
    if limit.algorithm.follows_wall_clock() {
        limit.window_at(now_us).start_us
    } else {
        0
    }
}

impl SentNotifications {
    /// Whether the store is to be asked now. Until its answer, other requests do not ask.
    fn begin(&self, id: &NotificationId) -> bool {
        let now = Instant::now();
        let asked_until = &mut self.0.lock().asked_until;
        if asked_until.get(id).is_some_and(|until| now < *until) {
            return false;
        }
        if asked_until.len() >= MAX_REMEMBERED {
            asked_until.retain(|_, until| now < *until);
        }
        if asked_until.len() >= MAX_REMEMBERED {
            asked_until.clear();
        }
        asked_until.insert(id.clone(), now + ANSWER_TIMEOUT);
        true
    }

    fn remember(&self, id: &NotificationId, until: Instant) {
        if let Some(asked_until) = self.0.lock().asked_until.get_mut(id) {
            *asked_until = until;
        }
    }

    /// Whether a log line may be written, with the number of lines that were omitted before it.
    fn take_log_line(&self) -> Option<u64> {
        let now = Instant::now();
        let mut state = self.0.lock();
        let full_at = state.lines_full_at.map_or(now, |full_at| full_at.max(now));
        let full_at = full_at + LOG_LINE_INTERVAL;
        if full_at > now + LOG_LINE_INTERVAL * LOG_LINE_BURST {
            state.unlogged_count += 1;
            return None;
        }
        state.lines_full_at = Some(full_at);
        Some(std::mem::take(&mut state.unlogged_count))
    }
}

impl ReachedThreshold {
    /// Logs and counts the threshold if the store decides that it is reached for the first time.
    /// Returns whether it is.
    async fn notify_if_first(
        self,
        store: Store,
        metrics: Arc<WorkerMetrics>,
        sent: Arc<SentNotifications>,
    ) -> bool {
        let NotificationId {
            limit,
            requests,
            threshold,
            window_start_us,
            ..
        } = &self.id;
        let subject = format!("{limit}@{requests}@{threshold}@{window_start_us}");
        let key = self.key.to_notification_key(&subject);
        let one_notification = self.notification_limit();
        let asked_at = Instant::now();
        let charges = PolicyCharges::new(&one_notification, &key, 1);
        let Ok(decision) = store.decide(&[charges]).await else {
            return false;
        };
        let ends_us = decision.statuses().find_map(|status| status.next_growth_us);
        let wait = Duration::from_micros(ends_us.unwrap_or(0).saturating_sub(decision.now_us));
        sent.remember(&self.id, asked_at + wait.min(MAX_REMEMBERED_TIME));
        if decision.admitted {
            metrics
                .notifications
                .add([&*self.policy, limit, &threshold.to_string()], 1);
            self.log(sent.take_log_line());
        }
        decision.admitted
    }

    /// Writes a log line. `unlogged` is the number of lines that were omitted before it; `None`
    /// omits it.
    fn log(&self, unlogged: Option<u64>) {
        let Some(unlogged) = unlogged else {
            return;
        };
        tracing::warn!(
            policy = &*self.policy,
            limit = &*self.named.name,
            threshold = %self.id.threshold,
            used = self.usage.used,
            capacity = self.usage.capacity,
            unit = self.named.unit.as_deref(),
            key = format!("{:032x}", self.key.id()),
            key_parts = self.key.format_value_ids(),
            unlogged = Some(unlogged).filter(|unlogged| *unlogged > 0),
            "quota threshold reached"
        );
    }

    /// Admits one notification: per period, or for the window in its key.
    fn notification_limit(&self) -> Limit {
        let limit = &self.named.limit;
        let per_us = if limit.algorithm.follows_wall_clock() {
            limit
                .period_length_us(self.id.window_start_us)
                .saturating_add(WINDOW_GRACE_US)
        } else {
            limit.per_us
        };
        Limit {
            requests: 1,
            per_us,
            algorithm: Algorithm::SlidingLog,
        }
    }
}
