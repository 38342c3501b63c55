//! The key `scope` of a policy.

use crate::config::table_reader::TableReader;
use crate::limiter::CounterScope;
use crate::policy::{LimitOverrides, PolicyMode};

const SCOPES: [(&str, CounterScope); 2] = [
    (CounterScope::Shared.name(), CounterScope::Shared),
    (CounterScope::Instance.name(), CounterScope::Instance),
];

/// Reads the scope, and reports settings that exclude `"instance"`.
pub(super) fn build_scope(reader: &TableReader<'_>) -> CounterScope {
    let scope = reader.get_keyword("scope", &SCOPES).unwrap_or_default();
    if scope == CounterScope::Shared {
        return scope;
    }
    if reader.get_bool("dynamic") == Some(true) {
        reader.report_error(
            "dynamic",
            "not with scope = \"instance\": overrides of keys are in the store, which does not decide this policy; expected false, or [[policy.override]]",
        );
    }
    if reader.contains_key("lease") {
        reader.report_error(
            "lease",
            "not with scope = \"instance\": counters are in this process, so there is no round trip to save; expected no lease",
        );
    }
    if reader
        .get_integer::<u16>("shards")
        .is_some_and(|shards| shards > 1)
    {
        reader.report_error(
            "shards",
            "not with scope = \"instance\": counters are not in Redis; expected no shards",
        );
    }
    if reader.contains_key("on_store_failure") {
        reader.report_warning(
            "on_store_failure",
            "without effect with scope = \"instance\": the counters are in this process; expected no such key",
        );
    }
    scope
}

/// Reports `count_rejected` with `scope = "instance"` unless all keys are enforced.
pub(super) fn reject_uncounted_rejections(
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
