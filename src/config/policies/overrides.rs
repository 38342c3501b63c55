//! The tables `override` of a policy.

use super::context::PolicyContext;
use super::limits::build_limits;
use crate::config::table_reader::TableReader;
use crate::policy::{KeyTemplate, LimitOverride};

/// Builds an override. `key` is the policy's key, or `None` if it is invalid.
pub(super) fn build_override(
    reader: &TableReader<'_>,
    context: &PolicyContext,
    policy: &str,
    key: Option<&KeyTemplate>,
) -> Option<LimitOverride> {
    let limits = build_limits(reader, context, policy);
    if !reader.contains_key("key") {
        reader.report_error(
            "key",
            "missing; expected one value per position of the policy's key",
        );
        return None;
    }
    let items = reader.get_items("key");
    let key = key?;
    if items.len() != key.value_count() {
        let width = key.value_count();
        reader.report_error(
            "key",
            &format!(
                "{} values; expected {width}, as many as the policy's key has positions",
                items.len()
            ),
        );
        return None;
    }
    let mut values = Vec::new();
    for (position, item) in items.iter().enumerate() {
        match item.value.as_str() {
            Some("*") => values.push(None),
            Some(text) => {
                match key.canonicalize_value(position, text, &context.client, &context.path) {
                    Ok(value) => values.push(Some(value)),
                    Err(reason) => return item.report_error(&reason),
                }
            }
            None => return item.report_error("expected a string; \"*\" matches any value"),
        }
    }
    Some(LimitOverride {
        values,
        limits: limits?,
    })
}
