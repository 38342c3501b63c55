//! The access log: one line per request, or per rejected request.
//!
//! Values from clients are log fields, never part of the message, so that the formatter escapes
//! them.

use http::StatusCode;
use parking_lot::Mutex;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep_until};

use crate::enforcer::{
    DecisionSource, LimitRejection, LimitReport, RequestDecision, RequestOutcome, Verdict,
};
use crate::limiter::{Key, OverrideInEffect};
use crate::policy::PolicyMode;
use crate::telemetry::trace::TraceId;
use crate::telemetry::{AccessLogFilter, LogSettings, shorten_client_text};

/// Lines about rejections per second, if only those are logged: a client can cause any number. With
/// [`REJECTION_LINE_BURST`], a process writes at most 10 lines per second, over 10 seconds.
const REJECTION_LINES_PER_SECOND: f64 = 5.0;

/// Lines about rejections that may be written at once.
const REJECTION_LINE_BURST: f64 = 50.0;

/// Lines of the burst that a policy leaves to other policies while its own lines are omitted.
const RESERVED_LINES: f64 = 10.0;

const SECOND: Duration = Duration::from_secs(1);

/// The lines about rejections of this process. Its workers share them.
static REJECTION_LINES: Mutex<RejectionLines> = Mutex::new(RejectionLines {
    available: REJECTION_LINE_BURST,
    refilled_at: None,
    summary_due: None,
    omitted: BTreeMap::new(),
});

/// Writes access-log lines according to the log settings.
#[derive(Debug)]
pub(crate) struct AccessLog(pub(crate) LogSettings);

/// A token bucket of lines, and the rejections that were not logged.
#[derive(Debug)]
struct RejectionLines {
    available: f64,
    refilled_at: Option<Instant>,
    /// When a worker writes the next summary.
    summary_due: Option<Instant>,
    /// Rejections without a line, by policy; the empty name stands for malformed requests.
    omitted: BTreeMap<String, u64>,
}

impl RejectionLines {
    fn refill(&mut self, now: Instant) {
        let last = self.refilled_at.replace(now).unwrap_or(now);
        let elapsed_s = now.saturating_duration_since(last).as_secs_f64();
        let refilled = self.available + elapsed_s * REJECTION_LINES_PER_SECOND;
        self.available = refilled.min(REJECTION_LINE_BURST);
    }

    /// Whether a line about a rejection may be written. Otherwise the next summary counts it.
    fn take_line(&mut self, policy: &str, now: Instant) -> bool {
        self.refill(now);
        let omitted = self.omitted.get_mut(policy);
        let reserved = omitted.as_ref().map_or(0.0, |_| RESERVED_LINES);
        if self.available >= 1.0 + reserved {
            self.available -= 1.0;
            return true;
        }
        match omitted {
            Some(lines) => *lines += 1,
            None => drop(self.omitted.insert(policy.to_owned(), 1)),
        }
        false
    }

    /// Writes the numbers of omitted lines, the largest first. Numbers for which no line is
    /// available stay for the next summary.
    fn write_summaries(&mut self, now: Instant) {
        self.refill(now);
        let mut by_count: Vec<_> = std::mem::take(&mut self.omitted).into_iter().collect();
        by_count.sort_by_key(|(_, lines)| Reverse(*lines));
        for (policy, lines) in by_count {
            if self.available < 1.0 {
                self.omitted.insert(policy, lines);
                continue;
            }
            self.available -= 1.0;
            tracing::info!(target: "access", policy, lines, "rejected requests not logged");
        }
    }

    /// The time at which the caller must write a summary. `None` if there is nothing to write, or
    /// another worker does it.
    fn schedule_summary(&mut self, now: Instant) -> Option<Instant> {
        let is_scheduled = self.summary_due.is_some_and(|due| now < due + SECOND);
        let is_due = !self.omitted.is_empty() && !is_scheduled;
        is_due.then(|| *self.summary_due.insert(now + SECOND))
    }
}

/// Writes a summary each second until no line is omitted.
async fn write_summaries_from(first: Instant) {
    let mut next = Some(first);
    while let Some(at) = next {
        sleep_until(at).await;
        let mut lines = REJECTION_LINES.lock();
        lines.write_summaries(Instant::now());
        lines.summary_due = None;
        next = lines.schedule_summary(at);
    }
}

/// Fields of one access-log line; all are known once the response head is.
#[derive(Debug)]
pub(crate) struct AccessLogEntry<'a, 't> {
    /// Request method. Like `host` and `path`, empty if the request head could not be parsed; `RLS`
    /// for a rate-limit call.
    pub(crate) method: &'a str,
    pub(crate) host: &'a str,
    /// The path as the client sent it. The query is left out, because it may contain secrets.
    pub(crate) path: &'a str,
    pub(crate) client_ip: IpAddr,
    pub(crate) status: StatusCode,
    /// Time from the request's arrival to the response head.
    pub(crate) time_to_head: Duration,
    /// `None` if the request was malformed.
    pub(crate) verdict: Option<&'a Verdict<'t>>,
    /// Time from the request's arrival to the decision.
    pub(crate) time_to_decision: Option<Duration>,
    pub(crate) trace_id: Option<TraceId>,
}

impl<'a, 't> AccessLogEntry<'a, 't> {
    /// Creates an entry for a request that could not be parsed: all other fields are empty.
    pub(crate) fn for_unreadable_request(client_ip: IpAddr, status: StatusCode) -> Self {
        Self {
            method: "",
            host: "",
            path: "",
            client_ip,
            status,
            time_to_head: Duration::ZERO,
            verdict: None,
            time_to_decision: None,
            trace_id: None,
        }
    }

    /// Entry of a request that arrived at `arrived_at`. The caller adds what the client sent.
    pub(crate) fn for_verdict(
        verdict: &'a Verdict<'t>,
        client_ip: IpAddr,
        status: StatusCode,
        arrived_at: Instant,
    ) -> Self {
        Self {
            verdict: Some(verdict),
            time_to_decision: verdict.decided_at.map(|at| at - arrived_at),
            ..Self::for_unreadable_request(client_ip, status)
        }
    }

    pub(crate) fn decision(&self) -> RequestDecision {
        self.verdict
            .map_or(RequestDecision::Malformed, classify_verdict)
    }

    /// The policy that rejected the request, if any.
    pub(crate) fn policy(&self) -> Option<&'a str> {
        match &self.verdict?.outcome {
            RequestOutcome::Forward => None,
            RequestOutcome::Limited(LimitRejection { policy, .. })
            | RequestOutcome::Denied { policy, .. }
            | RequestOutcome::InvalidKey { policy, .. }
            | RequestOutcome::Unavailable { policy, .. } => Some(policy),
        }
    }
}

impl AccessLog {
    /// Whether a line about a rejection may be written.
    fn take_rejection_line(policy: &str) -> bool {
        let now = Instant::now();
        let mut lines = REJECTION_LINES.lock();
        let is_allowed = lines.take_line(policy, now);
        if let Some(due) = lines.schedule_summary(now) {
            spawn_local(write_summaries_from(due));
        }
        is_allowed
    }

    /// Whether the log settings allow a line for a request, before sampling. `is_rejected` says
    /// whether the request was rejected.
    pub(crate) fn filter_allows_request(&self, is_rejected: bool) -> bool {
        match self.0.access {
            AccessLogFilter::Off => false,
            AccessLogFilter::Rejected => is_rejected,
            AccessLogFilter::All => true,
        }
    }

    pub(crate) fn write(&self, entry: &AccessLogEntry<'_, '_>) {
        // Tests for a rejecting policy, not for the decision: otherwise each request forwarded as
        // `degraded` during an outage would write a line.
        let (policy, decision) = (entry.policy(), entry.decision());
        let is_rejected = policy.is_some() || decision == RequestDecision::Malformed;
        let unenforced = entry.verdict.map(|verdict| &verdict.unenforced_rejections);
        let unenforced_in = |mode| {
            let all = unenforced.into_iter();
            all.flat_map(move |all| all.names_in_mode(mode))
        };
        let has_unenforced = unenforced.is_some_and(|all| !all.is_empty());
        if !self.filter_allows_request(is_rejected || has_unenforced)
            || (self.0.access_sample < 1.0 && fastrand::f64() >= self.0.access_sample)
        {
            return;
        }
        if self.0.access == AccessLogFilter::Rejected {
            let mut unenforced =
                unenforced_in(PolicyMode::Mark).chain(unenforced_in(PolicyMode::Shadow));
            let policy = policy.or_else(|| unenforced.next());
            let policy = policy.unwrap_or_default();
            if !Self::take_rejection_line(policy) {
                return;
            }
        }
        let outcome = entry.verdict.map(|verdict| &verdict.outcome);
        // The key that was rejected, if it has several values.
        let key = match outcome {
            Some(RequestOutcome::Limited(limited)) => limited.key.as_deref(),
            _ => None,
        };
        let tightest = entry
            .verdict
            .and_then(|verdict| LimitReport::find_tightest_limit(&verdict.limits));
        let source = entry.verdict.and_then(|verdict| verdict.source.as_ref());
        let retry_after_us = outcome.and_then(RequestOutcome::retry_after_us);
        let in_effect = tightest.and_then(|limit| limit.status.in_effect);
        let [by_override, stated] = in_effect.map_or([None, None], format_amounts_in_effect);
        tracing::info!(
            target: "access",
            method = &*shorten_client_text(entry.method),
            host = &*shorten_client_text(entry.host),
            path = &*shorten_client_text(entry.path),
            client_ip = %entry.client_ip,
            status = entry.status.as_u16(),
            decision = decision.into_str(),
            policy,
            shadow_rejected = join_policy_names(unenforced_in(PolicyMode::Shadow)),
            marked = join_policy_names(unenforced_in(PolicyMode::Mark)),
            limit = tightest.map(|limit| &*limit.limit.name),
            key = tightest.map(|limit| format!("{:032x}", limit.key_id)),
            key_parts = key.map(Key::format_value_ids),
            "override" = by_override,
            stated,
            remaining = tightest.map(|limit| limit.status.remaining),
            retry_after_ms = retry_after_us.map(|wait_us| wait_us.div_ceil(1000)),
            source = source.map(DecisionSource::into_str),
            trace_id = entry.trace_id.map(|trace| trace.to_string()),
            decision_ms = entry.time_to_decision.map(to_millis),
            head_ms = to_millis(entry.time_to_head),
            "request"
        );
    }
}

/// Maps a verdict to the decision reported in logs and metrics.
pub(crate) fn classify_verdict(verdict: &Verdict<'_>) -> RequestDecision {
    match &verdict.outcome {
        RequestOutcome::Forward if verdict.is_degraded => RequestDecision::Degraded,
        RequestOutcome::Forward if !verdict.delay.is_zero() => RequestDecision::Delayed,
        RequestOutcome::Forward => RequestDecision::Allowed,
        RequestOutcome::Limited(limited) if limited.is_blocked => RequestDecision::Blocked,
        RequestOutcome::Limited(_) => RequestDecision::Rejected,
        RequestOutcome::Denied { .. } => RequestDecision::Denied,
        RequestOutcome::InvalidKey { .. } => RequestDecision::Malformed,
        RequestOutcome::Unavailable { .. } => RequestDecision::Unavailable,
    }
}

fn join_policy_names<'a>(names: impl Iterator<Item = &'a str>) -> Option<String> {
    let names: Vec<&str> = names.collect();
    (!names.is_empty()).then(|| names.join(","))
}

/// What an override of the key decided (`blocked`, or its requests and burst, such as `5` or
/// `5+8`), and the amounts that the request states, in the same form.
fn format_amounts_in_effect(in_effect: OverrideInEffect) -> [Option<String>; 2] {
    match in_effect {
        OverrideInEffect::Blocked => [Some("blocked".to_owned()), None],
        OverrideInEffect::Amounts { requests, burst } => {
            [Some(format_amounts(requests, burst)), None]
        }
        OverrideInEffect::StatedAmounts { requests, burst } => {
            [None, Some(format_amounts(requests, burst))]
        }
        OverrideInEffect::Unlimited => [None, None],
    }
}

fn format_amounts(requests: u64, burst: u64) -> String {
    if requests == burst {
        requests.to_string()
    } else {
        format!("{requests}+{burst}")
    }
}

/// Milliseconds, rounded to microseconds.
fn to_millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_writes_ten_lines_a_second_and_leaves_some_to_other_policies() {
        let start = Instant::now();
        let mut lines = RejectionLines {
            available: REJECTION_LINE_BURST,
            refilled_at: None,
            summary_due: None,
            omitted: BTreeMap::new(),
        };
        let (mut written, mut others) = (0, 0);
        for ms in 0..10_000_u64 {
            let now = start + Duration::from_millis(ms);
            for _ in 0..5 {
                written += u32::from(lines.take_line("flood", now));
            }
            if ms % 2000 == 1999 {
                others += u32::from(lines.take_line("other", now));
            }
            if lines.schedule_summary(now).is_some() {
                // The first summary is due a second later, as in `write_summaries_from`.
                assert!(!lines.omitted.is_empty());
            }
        }
        assert_eq!(others, 5, "each rejection of another policy has a line");
        assert!((80..=95).contains(&written), "{written}");
        assert_eq!(lines.omitted["flood"], 50_000 - u64::from(written));
        lines.write_summaries(start + Duration::from_secs(10));
        assert!(lines.omitted.is_empty());
    }

    #[test]
    fn summaries_without_a_line_are_counted_on() {
        let start = Instant::now();
        let mut lines = RejectionLines {
            available: 0.0,
            refilled_at: Some(start),
            summary_due: None,
            omitted: BTreeMap::new(),
        };
        for policy in ["a", "b", "b", "c"] {
            assert!(!lines.take_line(policy, start));
        }
        lines.write_summaries(start + Duration::from_millis(400));
        assert_eq!(lines.omitted.len(), 1, "two lines were available");
        assert!(!lines.omitted.contains_key("b"), "the largest comes first");
        assert!(!lines.take_line("c", start + Duration::from_millis(400)));
    }
}
