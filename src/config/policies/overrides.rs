//! The tables `override` of a policy.

use super::PolicyContext;
use super::limits::build_limits;
use crate::config::schema::PolicyActionKind;
use crate::config::table_reader::{ConfigValue, TableReader, report};
use crate::policy::{
    KeyTemplate, LimitOverride, NamedLimit, OverrideRule, PolicyMode, ValuePattern,
};
use std::collections::HashMap;

/// Builds the overrides of a policy. `key` is the policy's key, or `None` if it is invalid.
pub(super) fn build_overrides(
    reader: &TableReader<'_>,
    context: &PolicyContext,
    policy: &str,
    key: Option<&KeyTemplate>,
    is_dynamic: bool,
) -> Vec<LimitOverride> {
    let mut positions: HashMap<Vec<ValuePattern>, ConfigValue<'_>> = HashMap::new();
    let mut overrides = Vec::new();
    for table in reader.get_tables("override") {
        let Some(one) = build_override(&table, context, policy, key, is_dynamic) else {
            continue;
        };
        if let Some(item) = table.get("key") {
            if let Some(first) = positions.get(&one.values) {
                let first = first.source_span();
                let problem = format!(
                    "the override at {first} has the same key; expected one override per key"
                );
                item.report_error::<()>(problem);
            } else {
                positions.insert(one.values.clone(), item);
            }
        }
        overrides.push(one);
    }
    overrides
}

fn build_override(
    reader: &TableReader<'_>,
    context: &PolicyContext,
    policy: &str,
    key: Option<&KeyTemplate>,
    is_dynamic: bool,
) -> Option<LimitOverride> {
    let rule = read_rule(reader, is_dynamic);
    let limits = read_limits(reader, context, policy, rule);
    let items = reader.get_items("key");
    let has_key = reader.contains_key("key");
    report! { reader;
        Error("key") if !has_key => "missing; expected one value per position of the policy's key";
    }
    let key = key.filter(|_| has_key)?;
    let (found, width) = (items.len(), key.value_count());
    if found != width {
        report! { reader;
            Error("key") => "{found} values; expected {width}, as many as the policy's key has positions";
        }
        return None;
    }
    let mut values = Vec::new();
    for (position, item) in items.iter().enumerate() {
        let Some(text) = item.value.as_str() else {
            return item.report_error("expected a string; \"*\" matches any value");
        };
        match key.parse_value_pattern(position, text, &context.client, &context.path) {
            Ok(value) => values.push(value),
            Err(reason) => return item.report_error(reason),
        }
    }
    Some(LimitOverride {
        values,
        limits: limits?,
        rule,
    })
}

/// Reads `action` and `mode`.
fn read_rule(reader: &TableReader<'_>, is_dynamic: bool) -> OverrideRule {
    let action = reader.read("action").unwrap_or(PolicyActionKind::Limit);
    let mode: Option<Option<PolicyMode>> = reader.read("mode");
    let is_limit = action == PolicyActionKind::Limit;
    let is_off = mode == Some(None);
    let key = if is_off { "mode" } else { "action" };
    report! { reader;
        Error("mode") if mode.is_some() && !is_limit => "an override with action \"allow\" or \"deny\" has no limits; expected no such key";
        Error(key) if is_dynamic && (!is_limit || is_off) => "not with dynamic = true: this override would hide overrides in the store; expected a limit here, or `tidegate overrides set` with --unlimited or --block";
    }
    match (action, mode) {
        (PolicyActionKind::Limit, Some(None)) => OverrideRule::Off,
        (PolicyActionKind::Limit, mode) => OverrideRule::Limit(mode.flatten()),
        (PolicyActionKind::Allow, _) => OverrideRule::Allow,
        (PolicyActionKind::Deny, _) => OverrideRule::Deny,
    }
}

/// The limits of an override. Empty: those of the policy.
fn read_limits(
    reader: &TableReader<'_>,
    context: &PolicyContext,
    policy: &str,
    rule: OverrideRule,
) -> Option<Vec<NamedLimit>> {
    let own = ["limit", "limits"];
    let own = own.into_iter().find(|key| reader.contains_key(key));
    match (rule, own) {
        (OverrideRule::Limit(Some(_)), None) => Some(Vec::new()),
        (OverrideRule::Limit(_), _) => build_limits(reader, context, policy),
        (_, None) => Some(Vec::new()),
        (_, Some(key)) => {
            reader.report_error(key, "an override with action \"allow\" or \"deny\", or mode \"off\", has no limits; expected no such key");
            None
        }
    }
}
