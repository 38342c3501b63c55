//! Options of a policy that exclude each other: one table of pairs, with the reason.

use super::context::PolicyContext;
use super::limits::is_concurrency_limit;
use crate::config::table_reader::TableReader;
use crate::limiter::Algorithm;
use crate::policy::{
    CostSource, KeyTemplate, LimitOverrides, NamedLimit, OnStoreFailure, PolicyMode, Quota,
};

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
        for (other, _, problem) in CONFLICTS.iter().filter(|(_, second, _)| second == option) {
            reader.error_if(options.contains(other), option.key(reader), problem);
        }
    }
    if options.contains(&InstanceScope) && options.contains(&CountRejected) {
        report_uncounted_rejections(reader, kind.mode, &quota.overrides);
    }
}

/// Declares [`CONFLICTS`]: an option, another one that is an error beside it, and why.
macro_rules! conflicts {
    ($($other:ident, $option:ident => $problem:literal;)+) => {
        const CONFLICTS: &[(PolicyOption, PolicyOption, &str)] = &[$(($other, $option, $problem)),+];
    };
}

conflicts! {
    Descriptors, HeaderCost => "a call of the rate-limit service has no header; expected a number, which is multiplied by hits_addend";
    Descriptors, Estimate => "a call of the rate-limit service has no response; expected a number as cost, which is multiplied by hits_addend";
    Descriptors, Concurrency => "the rate-limit service does not learn when a request ends; expected no algorithm = \"concurrency\"";
    Descriptors, LeakyBucket => "a call of the rate-limit service can't be delayed; expected another algorithm, such as \"token_bucket\" with burst = 1";
    Descriptors, RequestedAmount => "a call of the rate-limit service has no token, header or certificate; expected requests instead of requests_from, or the limit of a descriptor";
    ExtAuthz, Estimate => "calls at check.address carry no response; expected no estimate, or no [check]";
    ExtAuthz, Concurrency => "calls at check.address do not report the end of a request; expected no algorithm = \"concurrency\", or no [check]";
    OnlyConcurrency, Estimate => "never settled: a request takes one concurrency slot, whatever its cost; expected another limit too";
    CountWhen, CountRejected => "not with count_when: a rejected request has no response of the app; expected false";
    Concurrency, CountRejected => "algorithm = \"concurrency\" can't count rejected requests: they are not in flight; expected false";
    SharedCounter, Dynamic => "not with counter: an override has the name of one policy, and a key of this counter belongs to several; expected false, or [[policy.override]] in all of them";
    InstanceScope, Dynamic => "not with scope = \"instance\": overrides of keys are in the store, which does not decide this policy; expected false, or [[policy.override]]";
    Shards, Block => "needs one counter that sees every rejection; expected no shards";
    Shards, CountRejected => "needs one counter that sees every rejection; expected no shards";
    Shards, Dynamic => "an override is stored in the slot of one counter; shards are in several slots; expected false, or no shards";
    RequestedAmount, BlockByResponses => "not with requests_from and count_when together: the response counter of a block needs a fixed amount; expected no block_for";
    RequestedAmount, LocalFailureMode => "\"local\" not with requests_from: an instance's share needs a fixed amount; expected \"open\" or \"closed\"";
    InstanceScope, Lease => "not with scope = \"instance\": counters are in this process, so there is no round trip to save; expected no lease";
    Shards, Lease => "units are leased from one counter; expected no shards";
    RequestedAmount, Lease => "not with requests_from: a lease needs a fixed amount; expected no lease";
    LeakyBucket, Lease => "not with algorithm = \"leaky_bucket\": each request takes its own place in the queue; expected no lease";
    Concurrency, Lease => "not with algorithm = \"concurrency\": each request takes a slot and returns it; expected no lease";
    WarmUp, Lease => "not with warm_up: leased units that are not used yet would warm the bucket up; expected no lease";
    Block, Lease => "not with block_for: a block must apply at once in all instances; expected no lease";
    CountRejected, Lease => "not with count_rejected: the store must count every rejection; expected no lease";
    Estimate, Lease => "not with an estimate as cost or count_when: a settlement needs a charge at a time known to the store; expected no lease";
    InstanceScope, Shards => "not with scope = \"instance\": counters are not in Redis; expected no shards";
    Concurrency, Shards => "algorithm = \"concurrency\" can't be sharded; expected another algorithm, or no shards";
    LeakyBucket, Shards => "algorithm = \"leaky_bucket\" can't be sharded; expected another algorithm, or no shards";
    Estimate, Shards => "an estimate (also of count_when) is settled on one counter; expected no shards";
    LocalFailureModeInCluster, Shards => "usage during an outage is written back to one counter; expected on_store_failure = \"open\" or \"closed\"";
    RequestedAmount, Shards => "not with requests_from: shards need a fixed amount; expected no shards";
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
    let has_limit = |is_such: fn(&NamedLimit) -> bool| quota.all_limits().any(is_such);
    let only_slots = !quota.limits.is_empty() && quota.limits.iter().all(is_concurrency_limit);
    let options = [
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
        (OnlyConcurrency, only_slots),
        (Shards, quota.shards > 1),
        (SharedCounter, quota.key.counter_name().is_some()),
        (Concurrency, has_limit(is_concurrency_limit)),
        (
            LeakyBucket,
            has_limit(|one| matches!(one.limit.algorithm, Algorithm::LeakyBucket { .. })),
        ),
        (
            WarmUp,
            has_limit(|one| {
                matches!(
                    one.limit.algorithm,
                    Algorithm::TokenBucket {
                        warm_up_us: 1..,
                        ..
                    }
                )
            }),
        ),
        (RequestedAmount, has_limit(|one| one.amount.is_some())),
    ];
    let set = options.into_iter().filter(|(_, is_set)| *is_set);
    set.map(|(option, _)| option).collect()
}

/// Reports a part of the key that requests, or calls of the rate-limit service, do not have.
fn report_foreign_key_part(reader: &TableReader<'_>, kind: PolicyKind, key: &KeyTemplate) {
    let foreign = Some(!kind.matches_descriptors);
    if let Some(part) = key
        .parts()
        .find(|part| part.is_from_descriptor() == foreign)
    {
        reader.report_error("key", match kind.matches_descriptors {
            true => format!("a call of the rate-limit service has no {part}; expected descriptor:NAME, descriptor or const:TEXT"),
            false => format!("a request has no {part}; expected domain or descriptors in match"),
        });
    }
}

/// Reports `count_rejected` with `scope = "instance"` unless all keys are enforced.
fn report_uncounted_rejections(
    reader: &TableReader<'_>,
    mode: PolicyMode,
    overrides: &LimitOverrides,
) {
    let mut modes = std::iter::once(mode).chain(overrides.modes());
    if let Some(mode) = modes.find(|mode| !mode.is_enforced()) {
        let mode = mode.name();
        reader.report_error("count_rejected", format!("not with scope = \"instance\" in mode \"{mode}\": the instance counts before it knows whether Redis admits the request; expected false, or mode = \"enforce\" for the policy and its overrides"));
    }
}
