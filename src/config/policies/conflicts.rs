//! Options of a policy that exclude each other or have no effect together: one table, with the
//! reason.

use super::PolicyContext;
use super::limits::is_concurrency_limit;
use crate::config::table_reader::{TableReader, report};
use crate::limiter::Algorithm;
use crate::policy::{
    CostSource, Estimate, KeyPart, NamedLimit, OnStoreFailure, PolicyMode, Quota, ReportSource,
};

/// What a policy applies to, and how.
#[derive(Clone, Copy)]
pub(super) struct PolicyKind {
    pub(super) mode: PolicyMode,
    /// Whether the policy applies to calls of the rate-limit service.
    pub(super) matches_descriptors: bool,
    /// Whether a condition is on the body.
    pub(super) matches_body: bool,
    pub(super) on_store_failure: OnStoreFailure,
}

impl PolicyKind {
    /// Whether the policy only reports what it would reject.
    pub(super) fn is_watching(self) -> bool {
        self.mode != PolicyMode::Enforce
    }
}

/// Reports each pair of options that exclude each other, at the key of the second one, and options
/// without effect in their context.
pub(super) fn report_conflicts(
    reader: &TableReader<'_>,
    context: &PolicyContext,
    kind: PolicyKind,
    quota: &Quota,
) {
    report_foreign_key_part(reader, kind, quota);
    report_budget_conflicts(reader, context, kind, quota);
    report_unknown_usage(reader, quota);
    let first_set = |one, other| if reader.contains_key(one) { one } else { other };
    let (limits, cost) = (
        first_set("limits", "limit"),
        first_set("count_when", "cost"),
    );
    let has_limit = |is_such: fn(&NamedLimit) -> bool| quota.all_limits().any(is_such);
    let (for_descriptors, leases) = (kind.matches_descriptors, reader.contains_key("lease"));
    let for_ext_authz = context.has_ext_authz && !for_descriptors;
    let (is_sharded, is_dynamic) = (quota.shards > 1, quota.is_dynamic);
    let (in_instance, counts_rejected) = (quota.is_instance_scoped(), quota.count_rejected);
    let shares_counter = quota.key.counter_name().is_some();
    let (blocks, blocks_by_responses) = (quota.block.is_some(), quota.counts_responses());
    let has_header_cost = matches!(quota.cost, CostSource::Header(_));
    let is_estimated = quota.cost.as_estimate().is_some();
    let is_local = kind.on_store_failure == OnStoreFailure::Local;
    let has_slots = has_limit(is_concurrency_limit);
    let has_only_slots = !quota.limits.is_empty() && quota.limits.iter().all(is_concurrency_limit);
    let is_requested = has_limit(|one| one.amount.is_some());
    let delays = has_limit(|one| one.limit.algorithm.is_queue());
    let warms_up = has_limit(has_warm_up);
    let modes = || std::iter::once(kind.mode).chain(quota.overrides.modes());
    // `count_rejected` of an instance is exact only if all keys are enforced.
    let watching = modes()
        .find(|mode| !mode.is_enforced())
        .map(PolicyMode::name);
    let is_enforced = modes().any(PolicyMode::is_enforced);
    let (mode, is_watching) = (kind.mode.name(), kind.is_watching());
    report! { reader;
        Error("cost") if for_descriptors && has_header_cost => "a call of the rate-limit service has no header; expected a number, which is multiplied by hits_addend";
        Error(cost) if for_descriptors && is_estimated => "a call of the rate-limit service has no response; expected a number as cost, which is multiplied by hits_addend";
        Error(limits) if for_descriptors && has_slots => "the rate-limit service does not learn when a request ends; expected no algorithm = \"concurrency\"";
        Error(limits) if for_descriptors && delays => "a call of the rate-limit service can't be delayed; expected another algorithm, such as \"token_bucket\" with burst = 1";
        Error(limits) if for_descriptors && is_requested => "a call of the rate-limit service has no token, header or certificate; expected requests instead of requests_from, or the limit of a descriptor";
        Error(cost) if for_ext_authz && is_estimated => "calls at check.address carry no response; expected no estimate, or no [check]";
        Error(limits) if for_ext_authz && has_slots => "calls at check.address do not report the end of a request; expected no algorithm = \"concurrency\", or no [check]";
        Error(cost) if has_only_slots && is_estimated => "never settled: a request takes one concurrency slot, whatever its cost; expected another limit too";
        Error("count_rejected") if reader.contains_key("count_when") && counts_rejected => "not with count_when: a rejected request has no response of the app; expected false";
        Error("count_rejected") if has_slots && counts_rejected => "algorithm = \"concurrency\" can't count rejected requests: they are not in flight; expected false";
        Error("dynamic") if shares_counter && is_dynamic => "not with counter: an override has the name of one policy, and a key of this counter belongs to several; expected false, or [[policy.override]] in all of them";
        Error("dynamic") if in_instance && is_dynamic => "not with scope = \"instance\": overrides of keys are in the store, which does not decide this policy; expected false, or [[policy.override]]";
        Error("block_for") if is_sharded && blocks => "needs one counter that sees every rejection; expected no shards";
        Error("count_rejected") if is_sharded && counts_rejected => "needs one counter that sees every rejection; expected no shards";
        Error("dynamic") if is_sharded && is_dynamic => "an override is stored in the slot of one counter; shards are in several slots; expected false, or no shards";
        Error("block_for") if is_requested && blocks_by_responses => "not with requests_from and count_when together: the response counter of a block needs a fixed amount; expected no block_for";
        Error("on_store_failure") if is_requested && is_local => "\"local\" not with requests_from: an instance's share needs a fixed amount; expected \"open\" or \"closed\"";
        Error("lease") if in_instance && leases => "not with scope = \"instance\": counters are in this process, so there is no round trip to save; expected no lease";
        Error("lease") if is_sharded && leases => "units are leased from one counter; expected no shards";
        Error("lease") if is_requested && leases => "not with requests_from: a lease needs a fixed amount; expected no lease";
        Error("lease") if delays && leases => "not with algorithm = \"leaky_bucket\": each request takes its own place in the queue; expected no lease";
        Error("lease") if has_slots && leases => "not with algorithm = \"concurrency\": each request takes a slot and returns it; expected no lease";
        Error("lease") if warms_up && leases => "not with warm_up: leased units that are not used yet would warm the bucket up; expected no lease";
        Error("lease") if blocks && leases => "not with block_for: a block must apply at once in all instances; expected no lease";
        Error("lease") if counts_rejected && leases => "not with count_rejected: the store must count every rejection; expected no lease";
        Error("lease") if is_estimated && leases => "not with an estimate as cost or count_when: a settlement needs a charge at a time known to the store; expected no lease";
        Error("shards") if in_instance && is_sharded => "not with scope = \"instance\": counters are not in Redis; expected no shards";
        Error("shards") if has_slots && is_sharded => "algorithm = \"concurrency\" can't be sharded; expected another algorithm, or no shards";
        Error("shards") if delays && is_sharded => "algorithm = \"leaky_bucket\" can't be sharded; expected another algorithm, or no shards";
        Error("shards") if is_estimated && is_sharded => "an estimate (also of count_when) is settled on one counter; expected no shards";
        Error("shards") if is_local && context.uses_redis_cluster && is_sharded => "usage during an outage is written back to one counter; expected on_store_failure = \"open\" or \"closed\"";
        Error("shards") if is_requested && is_sharded => "not with requests_from: shards need a fixed amount; expected no shards";
        Error("count_rejected") if in_instance && counts_rejected && watching.is_some() => "not with scope = \"instance\" in mode \"{}\": the instance counts before it knows whether Redis admits the request; expected false, or mode = \"enforce\" for the policy and its overrides", watching.unwrap_or_default();
        Warning("on_store_failure") if in_instance && reader.contains_key("on_store_failure") => "without effect with scope = \"instance\": the counters are in this process; expected no such key";
        Warning("cost") if quota.cost.min_units() == 0 => "requests with cost 0 are never limited";
        Warning("block_for") if blocks && !is_enforced => "without effect: a policy in mode \"{mode}\" blocks no key";
        Warning("lease") if leases && is_watching => "without effect: a policy in mode \"{mode}\" counts each request in the store";
        Warning("lease") if leases && !is_watching && context.uses_memory_store => "without effect with store.kind = \"memory\": counters are in this process";
        Warning("shards") if is_sharded && !context.uses_redis_cluster => "without effect: sharding needs a Redis Cluster";
        Warning("shards") if is_sharded && kind.mode != PolicyMode::Enforce => "in mode \"{mode}\" a policy asks only one shard, so it reports more rejections than enforcement would cause";
    }
}

/// Reports conflicts of costs from the response and of values in the body.
fn report_budget_conflicts(
    reader: &TableReader<'_>,
    context: &PolicyContext,
    kind: PolicyKind,
    quota: &Quota,
) {
    let cuts_off = (quota.cost.as_estimate()).is_some_and(|cost| cost.cut_off.is_some());
    let is_body = |part: &KeyPart| matches!(part, KeyPart::Body(_));
    let keyed_by_body = quota.key.sources().any(is_body);
    let body = if keyed_by_body { "key" } else { "match" };
    let reads_body = keyed_by_body || kind.matches_body;
    let for_ext_authz = context.has_ext_authz && !kind.matches_descriptors;
    let mut limits = quota.all_limits();
    let delays = limits.any(|one| one.limit.algorithm.is_queue());
    let (mode, is_watching) = (kind.mode.name(), kind.is_watching());
    report! { reader;
        Error(body) if for_ext_authz && reads_body => "calls at check.address carry no body; expected no body:/POINTER and no body in match, or no [check]";
        Error("cost") if delays && cuts_off => "cut_off not with algorithm = \"leaky_bucket\": a response can't wait in the queue; expected another algorithm";
        Warning("cost") if cuts_off && is_watching => "cut_off without effect: a policy in mode \"{mode}\" ends no response";
        Warning("cost") if is_low_estimate(quota) => "the estimate is far below what responses with token counts report, and requests in flight at the same time overspend by the difference; expected about the usual cost, or an estimate from the request such as {{ request_json = \"/max_tokens\", default = 500, max = 8000 }}";
    }
}

/// Whether a fixed estimate is tiny beside limits of units that response bodies report.
fn is_low_estimate(quota: &Quota) -> bool {
    let Some(cost) = quota.cost.as_estimate() else {
        return false;
    };
    let mut sources = cost.actual.sources();
    let reports_in_body = sources.any(|source| matches!(source, ReportSource::Json(_)));
    let mut limits = quota.limits.iter();
    reports_in_body
        && matches!(cost.estimate, Estimate::Fixed(1..10))
        && limits.all(|named| named.limit.requests >= 1000)
}

/// Reports a part of the key that requests, or calls of the rate-limit service, do not have.
fn report_foreign_key_part(reader: &TableReader<'_>, kind: PolicyKind, quota: &Quota) {
    let for_descriptors = kind.matches_descriptors;
    let mut parts = quota.key.parts();
    if let Some(part) = parts.find(|part| part.is_from_descriptor() == Some(!for_descriptors)) {
        report! { reader;
            Error("key") if for_descriptors => "a call of the rate-limit service has no {part}; expected descriptor:NAME, descriptor or const:TEXT";
            Error("key") if !for_descriptors => "a request has no {part}; expected domain or descriptors in match";
        }
    }
}

/// Reports options beside `notify` with which a decision does not see the usage of the key.
fn report_unknown_usage(reader: &TableReader<'_>, quota: &Quota) {
    if quota.notify.is_empty() {
        return;
    }
    let has_only_slots = !quota.limits.is_empty() && quota.limits.iter().all(is_concurrency_limit);
    report! { reader;
        Error("notify") if has_only_slots => "algorithm = \"concurrency\" has no period; expected another limit too, or no notify";
        Error("notify") if quota.shards > 1 => "not with shards: a decision sees the usage of one shard; expected no notify";
        Error("notify") if reader.contains_key("lease") => "not with lease: leased units count as used before they are; expected no notify";
        Error("notify") if quota.all_limits().any(has_warm_up) => "not with warm_up: a cold bucket has few units left without any use; expected no notify";
    }
}

fn has_warm_up(named: &NamedLimit) -> bool {
    match named.limit.algorithm {
        Algorithm::TokenBucket { warm_up_us, .. } => warm_up_us > 0,
        _ => false,
    }
}
