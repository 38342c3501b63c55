//! The access log: one line per request, or per rejected request.
//!
//! Values from clients are log fields, never part of the message, so that the formatter escapes
//! them.

use crate::enforcer::{DecisionSource, LimitReport, RequestDecision, UnenforcedRejections};
use crate::limiter::{Key, OverrideInEffect};
use crate::policy::PolicyMode;
use crate::telemetry::trace::TraceId;
use crate::telemetry::{AccessLogFilter, LogSettings, shorten_client_text};
use http::StatusCode;
use std::cell::RefCell;
use std::collections::HashMap;
use std::net::IpAddr;
use std::rc::Rc;
use std::time::Duration;
use tokio::task::spawn_local;
use tokio::time::{Instant, sleep_until};

/// Maximum lines per second, policy and worker if only rejected requests are logged. A client can
/// cause many rejections.
const MAX_REJECTION_LINES_PER_SECOND: u32 = 100;

const SECOND: Duration = Duration::from_secs(1);

/// Writes access-log lines according to the log settings.
#[derive(Debug)]
pub(in crate::proxy) struct AccessLog {
    mode: AccessLogFilter,
    /// Share of the lines that are written, 0.0..=1.0.
    sample_rate: f64,
    rejection_lines: Rc<RefCell<RejectionLines>>,
}

/// Lines of the current second by policy; the empty name stands for malformed requests.
type RejectionLines = HashMap<String, RejectionLineCount>;

/// Lines about one policy's rejections in one second.
#[derive(Debug)]
struct RejectionLineCount {
    started_at: Instant,
    written: u32,
    omitted: u32,
}

impl RejectionLineCount {
    /// Writes the number of omitted lines, if any, and resets it.
    fn write_summary(&mut self, policy: &str) {
        let lines = std::mem::take(&mut self.omitted);
        if lines > 0 {
            tracing::info!(target: "access", policy, lines, "rejected requests not logged");
        }
    }
}

/// Fields of one access-log line; all are known once the response head is.
#[derive(Debug)]
pub(in crate::proxy) struct AccessLogEntry<'a> {
    /// Request method. Like `host` and `path`, empty if the request head could not be parsed; `RLS`
    /// for a rate-limit call.
    pub(in crate::proxy) method: &'a str,
    pub(in crate::proxy) host: &'a str,
    /// The path as the client sent it. The query is left out, because it may contain secrets.
    pub(in crate::proxy) path: &'a str,
    pub(in crate::proxy) client_ip: IpAddr,
    pub(in crate::proxy) status: StatusCode,
    /// Time from the request's arrival to the response head.
    pub(in crate::proxy) time_to_head: Duration,
    /// One of `allowed`, `rejected`, `blocked`, `denied`, `degraded`, `malformed`.
    pub(in crate::proxy) decision: &'static str,
    /// The policy that rejected the request, if any.
    pub(in crate::proxy) policy: Option<&'a str>,
    pub(in crate::proxy) unenforced_rejections: Option<&'a UnenforcedRejections<'a>>,
    /// The wait after which a rejected request would be admitted, if it is known.
    pub(in crate::proxy) retry_after_us: Option<u64>,
    /// The key that was rejected, if it has several values.
    pub(in crate::proxy) key: Option<&'a Key>,
    /// The evaluated limits; the line reports the one with the least remaining.
    pub(in crate::proxy) limits: &'a [LimitReport<'a>],
    /// Source of the decision, such as Redis or a lease.
    pub(in crate::proxy) source: Option<DecisionSource>,
    /// Time from the request's arrival to the decision.
    pub(in crate::proxy) time_to_decision: Option<Duration>,
    pub(in crate::proxy) trace_id: Option<TraceId>,
}

impl AccessLogEntry<'_> {
    /// Creates an entry for a request that could not be parsed: all other fields are empty.
    pub(in crate::proxy) fn for_unreadable_request(client_ip: IpAddr, status: StatusCode) -> Self {
        Self {
            method: "",
            host: "",
            path: "",
            client_ip,
            status,
            time_to_head: Duration::ZERO,
            decision: RequestDecision::Malformed.into_str(),
            policy: None,
            unenforced_rejections: None,
            retry_after_us: None,
            key: None,
            limits: &[],
            source: None,
            time_to_decision: None,
            trace_id: None,
        }
    }
}

impl AccessLog {
    pub(in crate::proxy) fn new(settings: &LogSettings) -> Self {
        Self {
            mode: settings.access,
            sample_rate: settings.access_sample,
            rejection_lines: Rc::default(),
        }
    }

    /// Whether a line about a rejection may be written. After a second with omitted lines, a
    /// summary is written.
    fn take_rejection_line(&self, policy: &str, now: Instant) -> bool {
        let mut rejection_lines = self.rejection_lines.borrow_mut();
        let Some(count) = rejection_lines.get_mut(policy) else {
            let count = RejectionLineCount {
                started_at: now,
                written: 1,
                omitted: 0,
            };
            rejection_lines.insert(policy.to_owned(), count);
            return true;
        };
        if now.saturating_duration_since(count.started_at) >= SECOND {
            count.write_summary(policy);
            (count.started_at, count.written) = (now, 0);
        }
        if count.written < MAX_REJECTION_LINES_PER_SECOND {
            count.written += 1;
            return true;
        }
        if count.omitted == 0 {
            self.schedule_summary(policy.to_owned(), count.started_at + SECOND);
        }
        count.omitted += 1;
        false
    }

    /// Writes the summary at the end of the second, even if no further request is rejected.
    fn schedule_summary(&self, policy: String, at: Instant) {
        let rejection_lines = Rc::clone(&self.rejection_lines);
        spawn_local(async move {
            sleep_until(at).await;
            if let Some(count) = rejection_lines.borrow_mut().get_mut(&policy) {
                count.write_summary(&policy);
            }
        });
    }

    /// Whether the log settings allow a line for a request, before sampling. `is_rejected` says
    /// whether the request was rejected.
    pub(in crate::proxy) fn filter_allows_request(&self, is_rejected: bool) -> bool {
        match self.mode {
            AccessLogFilter::Off => false,
            AccessLogFilter::Rejected => is_rejected,
            AccessLogFilter::All => true,
        }
    }

    pub(in crate::proxy) fn write(&self, entry: &AccessLogEntry<'_>) {
        // Tests for a rejecting policy, not for the decision: otherwise each request forwarded as
        // `degraded` during an outage would write a line.
        let is_rejected = entry.policy.is_some() || entry.decision == "malformed";
        let unenforced_in = |mode| {
            let all = entry.unenforced_rejections.into_iter();
            all.flat_map(move |all| all.names_in_mode(mode))
        };
        let is_logged_as_rejected = is_rejected
            || entry
                .unenforced_rejections
                .is_some_and(|all| !all.is_empty());
        if !self.filter_allows_request(is_logged_as_rejected)
            || (self.sample_rate < 1.0 && fastrand::f64() >= self.sample_rate)
        {
            return;
        }
        if self.mode == AccessLogFilter::Rejected {
            let mut unenforced =
                unenforced_in(PolicyMode::Mark).chain(unenforced_in(PolicyMode::Shadow));
            let policy = entry
                .policy
                .or_else(|| unenforced.next())
                .unwrap_or_default();
            if !self.take_rejection_line(policy, Instant::now()) {
                return;
            }
        }
        let tightest = LimitReport::find_tightest_limit(entry.limits);
        let in_effect = tightest.and_then(|limit| limit.status.in_effect);
        tracing::info!(
            target: "access",
            method = &*shorten_client_text(entry.method),
            host = &*shorten_client_text(entry.host),
            path = &*shorten_client_text(entry.path),
            client_ip = %entry.client_ip,
            status = entry.status.as_u16(),
            decision = entry.decision,
            policy = entry.policy,
            shadow_rejected = join_policy_names(unenforced_in(PolicyMode::Shadow)),
            marked = join_policy_names(unenforced_in(PolicyMode::Mark)),
            limit = tightest.map(|limit| &*limit.limit.name),
            key = tightest.map(|limit| format!("{:032x}", limit.key_id)),
            key_parts = entry.key.map(format_value_ids),
            "override" = in_effect.and_then(format_override),
            stated = in_effect.and_then(format_stated_amounts),
            remaining = tightest.map(|limit| limit.status.remaining),
            retry_after_ms = entry.retry_after_us.map(|wait_us| wait_us.div_ceil(1000)),
            source = entry.source.as_ref().map(DecisionSource::into_str),
            trace_id = entry.trace_id.map(|trace| trace.to_string()),
            decision_ms = entry.time_to_decision.map(to_millis),
            head_ms = to_millis(entry.time_to_head),
            "request"
        );
    }
}

fn join_policy_names<'a>(names: impl Iterator<Item = &'a str>) -> Option<String> {
    let names: Vec<&str> = names.collect();
    (!names.is_empty()).then(|| names.join(","))
}

/// The hash of each value of a key, in order.
fn format_value_ids(key: &Key) -> String {
    let ids = key.value_ids();
    let ids: Vec<String> = ids.iter().map(|id| format!("{id:016x}")).collect();
    ids.join(",")
}

/// What an override of the key decided: `blocked`, or its requests and burst, such as `5` or `5+8`.
fn format_override(in_effect: OverrideInEffect) -> Option<String> {
    match in_effect {
        OverrideInEffect::Blocked => Some("blocked".to_owned()),
        OverrideInEffect::Amounts { requests, burst } => Some(format_amounts(requests, burst)),
        OverrideInEffect::Unlimited | OverrideInEffect::StatedAmounts { .. } => None,
    }
}

/// The amounts that the request states, as [`format_override`] writes them.
fn format_stated_amounts(in_effect: OverrideInEffect) -> Option<String> {
    match in_effect {
        OverrideInEffect::StatedAmounts { requests, burst } => {
            Some(format_amounts(requests, burst))
        }
        _ => None,
    }
}

fn format_amounts(requests: u64, burst: u64) -> String {
    match requests == burst {
        true => requests.to_string(),
        false => format!("{requests}+{burst}"),
    }
}

/// Milliseconds, rounded to microseconds.
fn to_millis(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e6).round() / 1e3
}
