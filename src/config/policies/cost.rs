//! The key `cost` of a policy.

use super::PolicyContext;
use super::limits::is_concurrency_limit;
use super::match_conditions::NO_TRUSTED_TOKENS_ERROR;
use crate::config::schema::ValueKind;
use crate::config::schema_value::SchemaValue;
use crate::config::table_reader::{ConfigValue, TableReader, report};
use crate::config::value_tree::ValueContent;
use crate::config::values;
use crate::limiter::MAX_UNITS;
use crate::policy::{
    ActualCost, CostSource, CountedStatuses, CutOff, Estimate, EstimateCost, Factor, HeaderCost,
    JsonPointer, KeyPart, NamedLimit, Quota, ReportSource, ReportedUnits, StatedSource,
    StatedUnits, ValuePattern, Weight, WeightsByValue,
};
use std::sync::Arc;

/// Builds the cost: a number, a request header, or an estimate settled by the response. With
/// `count_when`, a number that is given back unless the status is one of those counted.
pub(super) fn build_cost(reader: &TableReader<'_>, context: &PolicyContext) -> Option<CostSource> {
    let cost = build_plain_cost(reader, context);
    let Some(table) = reader.get_optional_table("count_when") else {
        return cost;
    };
    let counted = read_counted_statuses(&table);
    match cost? {
        CostSource::Fixed(estimate @ 1..) => Some(CostSource::Estimate(Arc::new(EstimateCost {
            estimate: Estimate::Fixed(estimate),
            actual: ActualCost::Status(counted?),
            cut_off: None,
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

fn build_plain_cost(reader: &TableReader<'_>, context: &PolicyContext) -> Option<CostSource> {
    if reader
        .get("cost")
        .is_none_or(|item| item.value.as_table().is_none())
    {
        return reader.read("cost").map(CostSource::Fixed);
    }
    let table = reader.get_optional_table("cost")?;
    if table.contains_key("estimate") || table.contains_key("actual") {
        return build_estimate_cost(&table, reader.read("max_scan")?, context);
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

fn build_estimate_cost(
    reader: &TableReader<'_>,
    max_scan: u64,
    context: &PolicyContext,
) -> Option<CostSource> {
    for key in ["header", "default", "min", "max"] {
        report! { reader;
            Error(key) if reader.contains_key(key) => "not with an estimate; expected either header, or estimate and actual";
        }
    }
    let shared = build_weights(reader, context, None);
    let estimate = build_estimate(reader, max_scan, context, shared.as_ref());
    let actual = build_actual(reader, context, shared.as_ref());
    Some(CostSource::Estimate(Arc::new(EstimateCost {
        estimate: estimate?,
        actual: actual?,
        cut_off: build_cut_off(reader)?,
    })))
}

/// Builds the cut-off of streaming responses. The inner `None`: they are charged at their end.
fn build_cut_off(reader: &TableReader<'_>) -> Option<Option<CutOff>> {
    let is_on: bool = reader.read("cut_off")?;
    for key in ["slice", "response_bytes_per_unit"] {
        report! { reader;
            Error(key) if !is_on && reader.contains_key(key) => "without effect; expected cut_off = true beside it";
        }
    }
    report! { reader;
        Warning("cut_off") if is_on && !reader.contains_key("response_bytes_per_unit") => "4 bytes of a response count as a unit until it reports its cost, and event streams of language models have some 250 bytes for each token; expected response_bytes_per_unit";
    }
    let cut_off = CutOff {
        slice: reader.read("slice")?,
        bytes_per_unit: reader.read("response_bytes_per_unit")?,
    };
    Some(is_on.then_some(cut_off))
}

/// Builds the estimate: a number, or what the request states.
fn build_estimate(
    reader: &TableReader<'_>,
    max_scan: u64,
    context: &PolicyContext,
    shared: Option<&Arc<WeightsByValue>>,
) -> Option<Estimate> {
    let tables = reader.get_nested_tables("estimate");
    if tables.is_empty() {
        return reader.read("estimate").map(Estimate::Fixed);
    }
    let stated = tables.iter().map(|table| {
        let weight = build_weight(table, context, shared);
        let source = build_stated_source(table, max_scan)?;
        let most = source.max_units();
        report! { table;
            Error("weight") if !weight.fits(most) => "a weight of {} for {most} units is more than the largest cost, {MAX_UNITS}; expected a smaller max or weight", weight.highest();
        }
        Some(StatedUnits { source, weight })
    });
    let stated: Vec<Option<StatedUnits>> = stated.collect();
    let stated: Option<Box<[StatedUnits]>> = stated.into_iter().collect();
    stated.map(Estimate::Stated)
}

fn build_stated_source(reader: &TableReader<'_>, max_scan: u64) -> Option<StatedSource> {
    let of_json = reader.contains_key("request_json");
    let of_bytes = reader.contains_key("request_bytes_per_unit");
    report! { reader;
        Error("request_bytes_per_unit") if of_json && of_bytes => "not with request_json; expected one of them in each table";
        Error("default") if of_bytes && reader.contains_key("default") => "not with request_bytes_per_unit: each body has a size; expected no default";
        Error("default") if of_json && !reader.contains_key("default") => "missing; expected the units of a body without the number";
        Error("max") if of_json && !reader.contains_key("max") => "missing; expected the most units that a request may state";
    }
    let max = reader.read("max");
    if of_bytes {
        let bytes_per_unit = reader.read("request_bytes_per_unit")?;
        return Some(StatedSource::Bytes {
            bytes_per_unit,
            max: max.unwrap_or_else(|| max_scan.div_ceil(bytes_per_unit)),
        });
    }
    let pointer = reader.get_parsed("request_json", JsonPointer::parse);
    let (default, max): (u64, u64) = (reader.read("default")?, max?);
    report! { reader;
        Error("default") if default > max => "more than max; expected at most {max}";
    }
    Some(StatedSource::Json {
        pointer: pointer?,
        default,
        max,
    })
}

/// Builds the actual cost: one number of the response, or several with weights.
fn build_actual(
    reader: &TableReader<'_>,
    context: &PolicyContext,
    shared: Option<&Arc<WeightsByValue>>,
) -> Option<ActualCost> {
    let tables = reader.get_nested_tables("actual");
    if tables.is_empty() {
        let source = reader.get_parsed("actual", ReportSource::parse)?;
        let weight = Weight {
            by: shared.cloned(),
            ..Weight::ONE
        };
        return Some(ActualCost::from_source(source, weight));
    }
    let reported = tables.iter().map(|table| {
        let weight = build_weight(table, context, shared);
        let sources = build_report_sources(table)?;
        Some(ReportedUnits { sources, weight })
    });
    let reported: Vec<Option<ReportedUnits>> = reported.collect();
    let reported: Option<Box<[ReportedUnits]>> = reported.into_iter().collect();
    reported.map(ActualCost::Sum)
}

fn build_report_sources(reader: &TableReader<'_>) -> Option<Box<[ReportSource]>> {
    let has_pointers = reader.contains_key("response_json");
    report! { reader;
        Error("response_header") if has_pointers && reader.contains_key("response_header") => "not with response_json; expected one of them in each table";
    }
    if !has_pointers && reader.contains_key("response_header") {
        let name = reader.get_parsed("response_header", values::parse_header_name)?;
        return Some(Box::new([ReportSource::Header(name)]));
    }
    let pointers = reader.get_list("response_json", |text| {
        JsonPointer::parse(text).map(ReportSource::Json)
    });
    if pointers.is_empty() {
        report! { reader;
            Error("response_json") => "expected at least one JSON pointer, such as \"/usage/total_tokens\", or response_header";
        }
        return None;
    }
    Some(pointers.into())
}

fn build_weight(
    reader: &TableReader<'_>,
    context: &PolicyContext,
    shared: Option<&Arc<WeightsByValue>>,
) -> Weight {
    Weight {
        factor: reader.read("weight").unwrap_or(Factor::ONE),
        by: build_weights(reader, context, shared),
    }
}

/// Builds `weights`, or returns those of the whole cost.
fn build_weights(
    reader: &TableReader<'_>,
    context: &PolicyContext,
    shared: Option<&Arc<WeightsByValue>>,
) -> Option<Arc<WeightsByValue>> {
    let Some(item) = reader.get("weights") else {
        return shared.cloned();
    };
    let (mut by, mut default, mut factors) = (None, None, Vec::new());
    for (name, value) in reader.get_entries("weights") {
        match name {
            "by" => by = Some(parse_weighted_part(&value, context)?),
            "default" => default = Some(read_factor(&value)?),
            pattern => factors.push((ValuePattern::from_text(pattern), read_factor(&value)?)),
        }
    }
    let (Some(by), Some(default)) = (by, default) else {
        return item.report_error("expected by, a key part such as \"body:/model\", and default, the weight of other values");
    };
    Some(Arc::new(WeightsByValue::new(by, factors, default)))
}

fn read_factor(item: &ConfigValue<'_>) -> Option<Factor> {
    let factor = Factor::from_content(&ValueKind::Factor, &item.value.content);
    factor.or_else(|| item.report_error(format!("expected {}", ValueKind::Factor)))
}

/// Parses the key part whose value in a request selects its weight.
fn parse_weighted_part(item: &ConfigValue<'_>, context: &PolicyContext) -> Option<KeyPart> {
    let text = item.value.as_str().unwrap_or_default();
    match KeyPart::parse(text, &context.path) {
        Ok(KeyPart::Claim(_)) if context.claim_trust.is_none() => {
            item.report_error(NO_TRUSTED_TOKENS_ERROR)
        }
        Ok(
            part @ (KeyPart::Body(_)
            | KeyPart::Header(_)
            | KeyPart::Query(_)
            | KeyPart::Cookie(_)
            | KeyPart::Claim(_)),
        ) => {
            let is_body = matches!(part, KeyPart::Body(_));
            if !is_body && context.is_client_chosen(&part) {
                item.report_warning(
                    "clients choose this value, and so the weight of their requests; expected what the app reads, such as body:/model",
                );
            }
            Some(part)
        }
        Ok(_) => item.report_error(
            "expected body:/POINTER, header:NAME, query:NAME, cookie:NAME or jwt:CLAIM",
        ),
        Err(reason) => item.report_error(reason),
    }
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
