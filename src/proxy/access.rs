//! The access log: one line per request, or per rejected request.
//!
//! Values that come from clients are fields, never text of the message: the formatter escapes them.

use crate::enforcer::Reported;
use crate::telemetry::metrics::{Answer, Source};
use crate::telemetry::{Access, LogSettings};
use crate::trace::TraceId;
use http::StatusCode;
use std::net::IpAddr;
use std::time::Duration;

/// Writes what was decided about requests, as far as the owner wants to read it.
#[derive(Clone, Copy, Debug)]
pub(super) struct AccessLog {
    access: Access,
    /// Share of the lines that is written, 0.0..=1.0.
    sample: f64,
}

/// One request, once its response head is known.
#[derive(Debug)]
pub(super) struct Entry<'a> {
    /// Empty, as host and path, if the head could not be read.
    pub(super) method: &'a str,
    pub(super) host: &'a str,
    /// As it came, without the query, which may hold secrets.
    pub(super) path: &'a str,
    pub(super) client_ip: IpAddr,
    pub(super) status: StatusCode,
    /// From the request's arrival to the head of the response.
    pub(super) head: Duration,
    /// allowed, rejected, blocked, denied, degraded, malformed
    pub(super) decision: &'static str,
    /// The policy that refused, if one did.
    pub(super) policy: Option<&'a str>,
    pub(super) shadow_rejected: &'a [&'a str],
    /// Those that were decided.
    pub(super) limits: &'a [Reported<'a>],
    /// Who decided them, and how long after the request's arrival.
    pub(super) source: Option<Source>,
    pub(super) decided: Option<Duration>,
    pub(super) trace: Option<TraceId>,
}

impl Entry<'_> {
    /// Of what could not be read as a request.
    pub(super) fn unread(client_ip: IpAddr, status: StatusCode) -> Self {
        Self {
            method: "",
            host: "",
            path: "",
            client_ip,
            status,
            head: Duration::ZERO,
            decision: Answer::Malformed.word(),
            policy: None,
            shadow_rejected: &[],
            limits: &[],
            source: None,
            decided: None,
            trace: None,
        }
    }
}

impl AccessLog {
    pub(super) fn new(settings: &LogSettings) -> Self {
        Self {
            access: settings.access,
            sample: settings.access_sample,
        }
    }

    /// Whether a line may be written about a request that was rejected, or one that was not.
    pub(super) fn wants(&self, is_rejected: bool) -> bool {
        match self.access {
            Access::Off => false,
            Access::Rejected => is_rejected,
            Access::All => true,
        }
    }

    pub(super) fn write(&self, entry: &Entry<'_>) {
        // By who refused, not by the decision: an outage must not write a line per request that it let through.
        let refused = entry.policy.is_some() || entry.decision == "malformed";
        let rejected = refused || !entry.shadow_rejected.is_empty();
        if !self.wants(rejected) || (self.sample < 1.0 && fastrand::f64() >= self.sample) {
            return;
        }
        let tightest = Reported::tightest(entry.limits);
        tracing::info!(
            target: "access",
            method = entry.method,
            host = entry.host,
            path = entry.path,
            client_ip = %entry.client_ip,
            status = entry.status.as_u16(),
            decision = entry.decision,
            policy = entry.policy,
            shadow_rejected = shadow(entry.shadow_rejected),
            limit = tightest.map(|limit| &*limit.limit.name),
            key = tightest.map(|limit| format!("{:032x}", limit.key)),
            remaining = tightest.map(|limit| limit.standing.remaining),
            source = entry.source.map(Source::word),
            trace_id = entry.trace.map(|trace| trace.to_string()),
            decision_ms = entry.decided.map(millis),
            head_ms = millis(entry.head),
            "request"
        );
    }
}

fn shadow(names: &[&str]) -> Option<String> {
    (!names.is_empty()).then(|| names.join(","))
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}
