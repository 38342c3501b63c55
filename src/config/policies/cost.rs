//! The key `cost` of a policy.

use super::limits::is_concurrency_limit;
use crate::config::table_reader::{TableReader, report};
use crate::config::value_tree::ValueContent;
use crate::config::values;
use crate::policy::{
    ActualCostSource, CostSource, CountedStatuses, EstimateCost, HeaderCost, NamedLimit, Quota,
};
use std::sync::Arc;

/// Builds the cost: a number, a request header, or an estimate settled by the response. With
/// `count_when`, a number that is given back unless the status is one of those counted.
pub(super) fn build_cost(reader: &TableReader<'_>) -> Option<CostSource> {
    let cost = build_plain_cost(reader);
    let Some(table) = reader.get_optional_table("count_when") else {
        return cost;
    };
    let counted = read_counted_statuses(&table);
    match cost? {
        CostSource::Fixed(estimate @ 1..) => Some(CostSource::Estimate(Arc::new(EstimateCost {
            estimate,
            actual_source: ActualCostSource::Status(counted?),
        }))),
        _ => {
            let problem = "not with this cost; expected a number from 1 as cost";
            reader.report_error("count_when", problem);
            None
        }
    }
}

/// Reads the statuses of `count_when`: numbers, or classes in quotes.
fn read_counted_statuses(table: &TableReader<'_>) -> Option<CountedStatuses> {
    let mut counted = CountedStatuses::default();
    for item in table.get_items("status") {
        let text = match &item.value.content {
            ValueContent::Text(text) => text.clone(),
            ValueContent::Integer(number) => number.to_string(),
            _ => "0".to_owned(),
        };
        if let Err(reason) = counted.add_text(&text) {
            item.report_error::<()>(reason);
        }
    }
    if counted.is_empty() {
        table.report_error("status", "expected at least one status, such as 401");
        return None;
    }
    Some(counted)
}

fn build_plain_cost(reader: &TableReader<'_>) -> Option<CostSource> {
    if reader
        .get("cost")
        .is_none_or(|item| item.value.as_table().is_none())
    {
        return reader.read("cost").map(CostSource::Fixed);
    }
    let table = reader.get_optional_table("cost")?;
    if table.contains_key("estimate") || table.contains_key("actual") {
        return build_estimate_cost(&table);
    }
    let name = table.get_parsed("header", values::parse_header_name);
    let (default, min, max) = (
        table.read("default")?,
        table.read("min")?,
        table.read("max")?,
    );
    report! { table;
        Error("min") if min > max => "more than max; expected at most {max}";
        Warning("default") if min <= max && default < min => "less than min: requests without the header cost less than any with it";
    }
    Some(CostSource::Header(Box::new(HeaderCost {
        name: name?,
        default,
        min,
        max,
    })))
}

fn build_estimate_cost(reader: &TableReader<'_>) -> Option<CostSource> {
    for key in ["header", "default", "min", "max"] {
        report! { reader;
            Error(key) if reader.contains_key(key) => "not with an estimate; expected either header, or estimate and actual";
        }
    }
    let estimate = reader.read("estimate");
    let actual = reader.get_parsed("actual", ActualCostSource::parse);
    Some(CostSource::Estimate(Arc::new(EstimateCost {
        estimate: estimate?,
        actual_source: actual?,
    })))
}

/// Reports a cost above the capacity of a cold bucket: such requests would never warm it up.
pub(super) fn reject_cost_above_cold_capacity(reader: &TableReader<'_>, quota: &Quota) {
    let cost = quota.cost.max_units();
    for NamedLimit { name, limit, .. } in quota.all_limits() {
        let most = limit.cold_capacity();
        if limit.capacity() > most && most < cost {
            let problem = format!(
                "a request may cost {cost}, but before its warm_up the limit \"{name}\" has {most}, a third of burst; expected at most {most}"
            );
            return reader.report_error("cost", problem);
        }
    }
}

/// Warns if the smallest cost exceeds a limit, so that every request is rejected.
pub(super) fn warn_if_cost_exceeds_capacity(
    reader: &TableReader<'_>,
    cost: u64,
    limits: &[NamedLimit],
) {
    let mut limits = limits.iter().filter(|named| !is_concurrency_limit(named));
    // A limit of 0 has a warning of its own.
    if let Some(limit) = limits.find(|limit| (1..cost).contains(&limit.max_capacity())) {
        let most = limit.max_capacity();
        report! { reader;
            Warning("cost") => "rejects every request: each costs at least {cost}, and the limit has {most}";
        }
    }
}
