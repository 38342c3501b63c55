//! Options of a policy that exclude each other: one table of pairs, with the reason.

use super::context::PolicyContext;
use super::limits::is_concurrency_limit;
use crate::config::table_reader::TableReader;
use crate::limiter::Algorithm;
use crate::policy::{CostSource, KeyTemplate, LimitOverrides, OnStoreFailure, PolicyMode, Quota};

/// What a policy applies to, and how.
#[derive(Clone, Copy)]
pub(super) struct PolicyKind {
    pub(super) mode: PolicyMode,
    /// Whether the policy applies to calls of the rate-limit service.
    pub(super) matches_descriptors: bool,
    pub(super) on_store_failure: OnStoreFailure,
}

/// An option of a policy, or a circumstance.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PolicyOption {
    Block,
    /// `block_for` with `count_when`: responses start the block.
    BlockByResponses,
    Concurrency,
    /// All limits, beside those of overrides, count requests in flight.
    OnlyConcurrency,
    CountRejected,
    CountWhen,
    Descriptors,
    Dynamic,
    /// A cost that the response settles, also by `count_when`.
    Estimate,
    /// The policy applies to requests, and `[check]` is configured.
    ExtAuthz,
    HeaderCost,
    InstanceScope,
    LeakyBucket,
    Lease,
    LocalFailureMode,
    LocalFailureModeInCluster,
    /// The requests state the amount of a limit.
    RequestedAmount,
    Shards,
    SharedCounter,
    WarmUp,
}

use PolicyOption::*;

/// Reports each pair of options that exclude each other, at the key of the second one.
pub(super) fn report_conflicts(
    reader: &TableReader<'_>,
    context: &PolicyContext,
    kind: PolicyKind,
    quota: &Quota,
) {
    report_foreign_key_part(reader, kind, &quota.key);
    let options = list_options(reader, context, kind, quota);
    for option in &options {
        let key = option.key(reader);
        let reasons = options
            .iter()
            .filter_map(|other| describe_conflict(*other, *option));
        reasons.for_each(|problem| reader.report_error(key, problem));
    }
    if options.contains(&InstanceScope) && options.contains(&CountRejected) {
        report_uncounted_rejections(reader, kind.mode, &quota.overrides);
    }
}

/// Why `option` is an error beside `other`.
fn describe_conflict(other: PolicyOption, option: PolicyOption) -> Option<&'static str> {
    Some(match (other, option) {
        (other, Lease) => return describe_lease_conflict(other),
        (other, Shards) => return describe_shards_conflict(other),
        (Descriptors, HeaderCost) => {
            "a call of the rate-limit service has no header; expected a number, which is multiplied by hits_addend"
        }
        (Descriptors, Estimate) => {
            "a call of the rate-limit service has no response; expected a number as cost, which is multiplied by hits_addend"
        }
        (Descriptors, Concurrency) => {
            "the rate-limit service does not learn when a request ends; expected no algorithm = \"concurrency\""
        }
        (Descriptors, LeakyBucket) => {
            "a call of the rate-limit service can't be delayed; expected another algorithm, such as \"token_bucket\" with burst = 1"
        }
        (Descriptors, RequestedAmount) => {
            "a call of the rate-limit service has no token, header or certificate; expected requests instead of requests_from, or the limit of a descriptor"
        }
        (ExtAuthz, Estimate) => {
            "calls at check.address carry no response; expected no estimate, or no [check]"
        }
        (ExtAuthz, Concurrency) => {
            "calls at check.address do not report the end of a request; expected no algorithm = \"concurrency\", or no [check]"
        }
        (OnlyConcurrency, Estimate) => {
            "never settled: a request takes one concurrency slot, whatever its cost; expected another limit too"
        }
        (CountWhen, CountRejected) => {
            "not with count_when: a rejected request has no response of the app; expected false"
        }
        (Concurrency, CountRejected) => {
            "algorithm = \"concurrency\" can't count rejected requests: they are not in flight; expected false"
        }
        (SharedCounter, Dynamic) => {
            "not with counter: an override has the name of one policy, and a key of this counter belongs to several; expected false, or [[policy.override]] in all of them"
        }
        (InstanceScope, Dynamic) => {
            "not with scope = \"instance\": overrides of keys are in the store, which does not decide this policy; expected false, or [[policy.override]]"
        }
        (Shards, Block | CountRejected) => {
            "needs one counter that sees every rejection; expected no shards"
        }
        (Shards, Dynamic) => {
            "an override is stored in the slot of one counter; shards are in several slots; expected false, or no shards"
        }
        (RequestedAmount, BlockByResponses) => {
            "not with requests_from and count_when together: the response counter of a block needs a fixed amount; expected no block_for"
        }
        (RequestedAmount, LocalFailureMode) => {
            "\"local\" not with requests_from: an instance's share needs a fixed amount; expected \"open\" or \"closed\""
        }
        _ => return None,
    })
}

fn describe_lease_conflict(other: PolicyOption) -> Option<&'static str> {
    Some(match other {
        InstanceScope => {
            "not with scope = \"instance\": counters are in this process, so there is no round trip to save; expected no lease"
        }
        Shards => "units are leased from one counter; expected no shards",
        RequestedAmount => {
            "not with requests_from: a lease needs a fixed amount; expected no lease"
        }
        LeakyBucket => {
            "not with algorithm = \"leaky_bucket\": each request takes its own place in the queue; expected no lease"
        }
        Concurrency => {
            "not with algorithm = \"concurrency\": each request takes a slot and returns it; expected no lease"
        }
        WarmUp => {
            "not with warm_up: leased units that are not used yet would warm the bucket up; expected no lease"
        }
        Block => {
            "not with block_for: a block must apply at once in all instances; expected no lease"
        }
        CountRejected => {
            "not with count_rejected: the store must count every rejection; expected no lease"
        }
        Estimate => {
            "not with an estimate as cost or count_when: a settlement needs a charge at a time known to the store; expected no lease"
        }
        _ => return None,
    })
}

fn describe_shards_conflict(other: PolicyOption) -> Option<&'static str> {
    Some(match other {
        InstanceScope => {
            "not with scope = \"instance\": counters are not in Redis; expected no shards"
        }
        Concurrency => {
            "algorithm = \"concurrency\" can't be sharded; expected another algorithm, or no shards"
        }
        LeakyBucket => {
            "algorithm = \"leaky_bucket\" can't be sharded; expected another algorithm, or no shards"
        }
        Estimate => {
            "an estimate (also of count_when) is settled on one counter; expected no shards"
        }
        LocalFailureModeInCluster => {
            "usage during an outage is written back to one counter; expected on_store_failure = \"open\" or \"closed\""
        }
        RequestedAmount => "not with requests_from: shards need a fixed amount; expected no shards",
        _ => return None,
    })
}

impl PolicyOption {
    /// The key that sets the option.
    fn key(self, reader: &TableReader<'_>) -> &'static str {
        let first_set = |one, other| if reader.contains_key(one) { one } else { other };
        match self {
            Block | BlockByResponses => "block_for",
            Concurrency | OnlyConcurrency | LeakyBucket | RequestedAmount | WarmUp => {
                first_set("limits", "limit")
            }
            CountRejected => "count_rejected",
            CountWhen => "count_when",
            Descriptors | ExtAuthz => "match",
            Dynamic => "dynamic",
            Estimate => first_set("count_when", "cost"),
            HeaderCost => "cost",
            InstanceScope => "scope",
            Lease => "lease",
            LocalFailureMode | LocalFailureModeInCluster => "on_store_failure",
            Shards => "shards",
            SharedCounter => "counter",
        }
    }
}

fn list_options(
    reader: &TableReader<'_>,
    context: &PolicyContext,
    kind: PolicyKind,
    quota: &Quota,
) -> Vec<PolicyOption> {
    let is_local = kind.on_store_failure == OnStoreFailure::Local;
    let mut options: Vec<PolicyOption> = [
        (Block, quota.block.is_some()),
        (BlockByResponses, quota.counts_responses()),
        (CountRejected, quota.count_rejected),
        (CountWhen, reader.contains_key("count_when")),
        (Descriptors, kind.matches_descriptors),
        (Dynamic, quota.is_dynamic),
        (Estimate, quota.cost.as_estimate().is_some()),
        (ExtAuthz, context.has_ext_authz && !kind.matches_descriptors),
        (HeaderCost, matches!(quota.cost, CostSource::Header(_))),
        (InstanceScope, quota.is_instance_scoped()),
        (Lease, reader.contains_key("lease")),
        (LocalFailureMode, is_local),
        (
            LocalFailureModeInCluster,
            is_local && context.uses_redis_cluster,
        ),
        (
            OnlyConcurrency,
            !quota.limits.is_empty() && quota.limits.iter().all(is_concurrency_limit),
        ),
        (Shards, quota.shards > 1),
        (SharedCounter, quota.key.counter_name().is_some()),
    ]
    .into_iter()
    .filter_map(|(option, is_set)| is_set.then_some(option))
    .collect();
    let limit_options = quota.all_limits().flat_map(|named| {
        let by_algorithm = match named.limit.algorithm {
            Algorithm::Concurrency { .. } => Some(Concurrency),
            Algorithm::LeakyBucket { .. } => Some(LeakyBucket),
            Algorithm::TokenBucket {
                warm_up_us: 1.., ..
            } => Some(WarmUp),
            _ => None,
        };
        by_algorithm
            .into_iter()
            .chain(named.amount.is_some().then_some(RequestedAmount))
    });
    for option in limit_options {
        if !options.contains(&option) {
            options.push(option);
        }
    }
    options
}

/// Reports a part of the key that requests, or calls of the rate-limit service, do not have.
fn report_foreign_key_part(reader: &TableReader<'_>, kind: PolicyKind, key: &KeyTemplate) {
    let mut parts = key.parts();
    let foreign = Some(!kind.matches_descriptors);
    let Some(part) = parts.find(|part| part.is_from_descriptor() == foreign) else {
        return;
    };
    let problem = if kind.matches_descriptors {
        format!(
            "a call of the rate-limit service has no {part}; expected descriptor:NAME, descriptor or const:TEXT"
        )
    } else {
        format!("a request has no {part}; expected domain or descriptors in match")
    };
    reader.report_error("key", &problem);
}

/// Reports `count_rejected` with `scope = "instance"` unless all keys are enforced.
fn report_uncounted_rejections(
    reader: &TableReader<'_>,
    mode: PolicyMode,
    overrides: &LimitOverrides,
) {
    let mut modes = std::iter::once(mode).chain(overrides.modes());
    if let Some(mode) = modes.find(|mode| !mode.is_enforced()) {
        reader.report_error(
            "count_rejected",
            &format!(
                "not with scope = \"instance\" in mode \"{}\": the instance counts before it knows whether Redis admits the request; expected false, or mode = \"enforce\" for the policy and its overrides",
                mode.name()
            ),
        );
    }
}
