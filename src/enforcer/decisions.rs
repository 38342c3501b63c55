//! Decisions on requests, and how metrics and history label their counters.

use crate::policy::PolicyMode;
use crate::telemetry::metrics::LabelledCounterIndices;
use strum::IntoStaticStr;

/// The decision of one policy on one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyDecision {
    /// The request is within the limits. Shadow policies count these requests too.
    Allowed,
    /// The request is within the limits, but a policy with `leaky_bucket` delayed it.
    Delayed,
    Rejected,
    /// Rejected because an earlier rejection blocked the key.
    Blocked,
    /// Rejected regardless of the quota: by `action = "deny"`, or because a required key value is
    /// missing or repeated.
    Denied,
    Exempt,
    /// A shadow policy would have rejected the request.
    ShadowRejected,
    /// A policy with `mode = "mark"` is over its limit. The request is forwarded with a mark.
    Marked,
    /// The policy did not decide, because the store was unavailable: it is a shadow policy, or
    /// another policy is `closed`.
    DegradedUndecided,
    /// The store was unavailable, and the policy let the request through.
    DegradedOpen,
    /// The store was unavailable, and the policy rejected the request.
    DegradedClosed,
    /// The store was unavailable, and the request was within the local share of the limits.
    DegradedLocalAllowed,
    /// The store was unavailable, and the local share of the limits was exhausted.
    DegradedLocalRejected,
}

/// The decision of all policies together on a request, in the terms of the access log. The names
/// are those in the access log and in spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum RequestDecision {
    Allowed,
    Delayed,
    Rejected,
    Blocked,
    Denied,
    /// The request was let through without a decision of the store.
    Degraded,
    /// The request is invalid or cannot be keyed.
    Malformed,
    /// Rejected because the store was unavailable. The access log shows these requests as
    /// `degraded` too.
    #[strum(serialize = "degraded")]
    Unavailable,
}

/// Label of the rejected part of `degraded`.
const DEGRADED_REFUSED_LABEL: &str = "degraded_refused";

impl PolicyDecision {
    /// The values of the label `decision` of a policy's requests, with their counters.
    pub const LABELS: [LabelledCounterIndices; 9] = [
        ("allowed", &[Self::Allowed as usize]),
        ("delayed", &[Self::Delayed as usize]),
        ("rejected", &[Self::Rejected as usize]),
        ("blocked", &[Self::Blocked as usize]),
        ("denied", &[Self::Denied as usize]),
        ("exempt", &[Self::Exempt as usize]),
        ("shadow_rejected", &[Self::ShadowRejected as usize]),
        ("marked", &[Self::Marked as usize]),
        (
            "degraded",
            &[
                Self::DegradedUndecided as usize,
                Self::DegradedOpen as usize,
                Self::DegradedClosed as usize,
                Self::DegradedLocalAllowed as usize,
                Self::DegradedLocalRejected as usize,
            ],
        ),
    ];

    /// The values of the label `outcome` of requests that an enforced policy decided without the
    /// store, with their counters.
    pub const DEGRADED_OUTCOMES: [LabelledCounterIndices; 4] = [
        ("open", &[Self::DegradedOpen as usize]),
        ("closed", &[Self::DegradedClosed as usize]),
        ("local_allowed", &[Self::DegradedLocalAllowed as usize]),
        ("local_rejected", &[Self::DegradedLocalRejected as usize]),
    ];

    /// The series of the history: [`Self::LABELS`], and the rejected part of `degraded`.
    pub const HISTORY_SERIES: [LabelledCounterIndices; 10] = {
        let [a, b, c, d, e, f, g, h, i] = Self::LABELS;
        let refused: LabelledCounterIndices = (
            DEGRADED_REFUSED_LABEL,
            &[
                Self::DegradedClosed as usize,
                Self::DegradedLocalRejected as usize,
            ],
        );
        [a, b, c, d, e, f, g, h, i, refused]
    };

    /// The decision of a policy in a mode without enforcement that would reject the request.
    pub(super) fn from_mode(mode: PolicyMode) -> Self {
        match mode {
            PolicyMode::Mark => Self::Marked,
            PolicyMode::Enforce | PolicyMode::Shadow => Self::ShadowRejected,
        }
    }

    /// Whether the policy rejected the request because of its client, or would have.
    pub fn is_client_rejection(self) -> bool {
        matches!(
            self,
            Self::Rejected
                | Self::Blocked
                | Self::Denied
                | Self::ShadowRejected
                | Self::Marked
                | Self::DegradedLocalRejected
        )
    }
}

impl RequestDecision {
    /// The series of all requests. `degraded` counts all decisions without the store;
    /// `degraded_refused` counts the rejected part of them.
    pub const LABELS: [LabelledCounterIndices; 8] = [
        (Self::Allowed.into_str(), &[Self::Allowed as usize]),
        (Self::Delayed.into_str(), &[Self::Delayed as usize]),
        (Self::Rejected.into_str(), &[Self::Rejected as usize]),
        (Self::Blocked.into_str(), &[Self::Blocked as usize]),
        (Self::Denied.into_str(), &[Self::Denied as usize]),
        (
            Self::Degraded.into_str(),
            &[Self::Degraded as usize, Self::Unavailable as usize],
        ),
        (Self::Malformed.into_str(), &[Self::Malformed as usize]),
        (DEGRADED_REFUSED_LABEL, &[Self::Unavailable as usize]),
    ];
}

#[cfg(test)]
mod tests {
    use super::{PolicyDecision as P, RequestDecision as D};
    use crate::telemetry::metrics::{MetricLabels, Metrics};

    #[test]
    fn every_request_decision_has_a_counter_and_a_label() {
        let labels = MetricLabels {
            request_decisions: D::LABELS,
            ..MetricLabels::default()
        };
        let metrics = Metrics::new(1, labels);
        for (times, decision) in (1..).zip([
            D::Allowed,
            D::Delayed,
            D::Rejected,
            D::Blocked,
            D::Denied,
            D::Degraded,
            D::Malformed,
            D::Unavailable,
        ]) {
            for _ in 0..times {
                metrics
                    .worker_metrics(0)
                    .record_request_decision(decision as usize);
            }
        }
        assert_eq!(
            metrics.request_decision_counts(),
            [1, 2, 3, 4, 5, 6 + 8, 7, 8]
        );
    }

    #[test]
    fn every_policy_decision_has_a_counter_and_a_label() {
        let metrics = Metrics::new(1, MetricLabels::default());
        let counters = metrics.get_or_create_policy_counters(["p"].into_iter());
        for (at, decision) in [
            P::Allowed,
            P::Delayed,
            P::Rejected,
            P::Blocked,
            P::Denied,
            P::Exempt,
            P::ShadowRejected,
            P::Marked,
            P::DegradedUndecided,
            P::DegradedOpen,
            P::DegradedClosed,
            P::DegradedLocalAllowed,
            P::DegradedLocalRejected,
        ]
        .into_iter()
        .enumerate()
        {
            for _ in 0..1_u64 << at {
                metrics
                    .worker_metrics(0)
                    .record_policy_decision(&counters[0], decision as usize);
            }
        }
        let counts = |labels| counters[0].requests_by_label(labels).collect::<Vec<_>>();
        let decided = [
            ("allowed", 1),
            ("delayed", 1 << 1),
            ("rejected", 1 << 2),
            ("blocked", 1 << 3),
            ("denied", 1 << 4),
            ("exempt", 1 << 5),
            ("shadow_rejected", 1 << 6),
            ("marked", 1 << 7),
            ("degraded", 0b1_1111 << 8),
        ];
        assert_eq!(counts(&P::LABELS), decided);
        let outcomes = [
            ("open", 1 << 9),
            ("closed", 1 << 10),
            ("local_allowed", 1 << 11),
            ("local_rejected", 1 << 12),
        ];
        assert_eq!(counts(&P::DEGRADED_OUTCOMES), outcomes);
        let history = counts(&P::HISTORY_SERIES);
        assert_eq!(history[..9], decided);
        assert_eq!(history[9], ("degraded_refused", (1 << 10) + (1 << 12)));
    }
}
