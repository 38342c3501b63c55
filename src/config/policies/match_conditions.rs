//! The table `match` of a policy.

use super::PolicyContext;
use crate::config::schema::{self, ValueKind};
use crate::config::table_reader::{ConfigValue, TableReader, report};
use crate::config::value_tree::{ValueContent, ValueNode};
use crate::config::values;
use crate::policy::{
    AcceptedEntries, ConditionRegex, HostPattern, KeyPart, Matcher, PartCondition, PathPattern,
    ValueCondition, accept_marked_letters, canonicalize_part_value,
};
use http::Method;
use http::header::{AUTHORIZATION, HOST};
use regex::Regex;

/// Keys that make a policy apply to descriptors of the rate-limit service.
const DESCRIPTOR_KEYS: [&str; 3] = ["domain", "descriptors", "descriptors_match"];

/// Builds the conditions of a policy.
pub(super) fn build_matcher(reader: &TableReader<'_>, context: &PolicyContext) -> Matcher {
    let has_descriptor_key =
        |table: &TableReader<'_>| DESCRIPTOR_KEYS.iter().any(|key| table.contains_key(key));
    let matches_descriptors = has_descriptor_key(reader);
    for key in reader.present_keys().map(|key| key.name) {
        let is_allowed = DESCRIPTOR_KEYS.contains(&key) || ["any", "not"].contains(&key);
        report! { reader;
            Error(key) if matches_descriptors && !is_allowed => "not with domain or descriptors: a call of the rate-limit service has descriptors and no request; expected one or the other";
        }
    }
    let (any, not) = (reader.get_tables("any"), reader.get_optional_table("not"));
    let nested = any.iter().map(|table| ("any", table));
    for (key, table) in nested.chain(not.iter().map(|table| ("not", table))) {
        report! { reader;
            Error(key) if matches_descriptors && !has_descriptor_key(table) => "expected domain or descriptors in it too";
            Error(key) if !matches_descriptors && has_descriptor_key(table) => "a request has no descriptors; expected domain or descriptors in match too";
        }
    }
    let has_jwt = reader.contains_key("jwt");
    report! { reader;
        Error("any") if reader.contains_key("any") && any.is_empty() => "nothing matches; expected at least one table";
        Error("jwt") if has_jwt && context.claim_trust.is_none() => "{NO_TRUSTED_TOKENS_ERROR}";
    }
    let mut conditions = parse_request_conditions(reader, context);
    for key in reader.present_keys() {
        if let ValueKind::Conditions { parse_part, .. } = key.kind {
            let adjust = |condition, _: &ConfigValue<'_>| Some(condition);
            conditions.extend(parse_conditions(
                reader, key.name, context, parse_part, adjust,
            ));
        }
    }
    let accepted_entries = matches_descriptors.then(|| {
        let (accepted, entries) = parse_descriptor_conditions(reader, context);
        conditions.extend(entries);
        accepted
    });
    Matcher {
        conditions,
        accepted_entries,
        any: any.iter().map(|one| build_matcher(one, context)).collect(),
        not: not.map(|not| Box::new(build_matcher(&not, context))),
    }
}

/// Parses the conditions on parts that each request or descriptor has, in the order of their
/// evaluation.
fn parse_request_conditions(
    reader: &TableReader<'_>,
    context: &PolicyContext,
) -> Vec<PartCondition> {
    fn list<T>(
        values: Vec<T>,
        condition: impl FnOnce(Box<[T]>) -> ValueCondition,
    ) -> Option<ValueCondition> {
        (!values.is_empty()).then(|| condition(values.into()))
    }
    let methods = reader.get_list("methods", parse_method);
    let hosts = reader.get_list("hosts", HostPattern::parse);
    let paths = reader.get_list("path", |text| PathPattern::parse(text, &context.path));
    let path_regex = reader.get_parsed("path_regex", |text| {
        let is_caseless = context.path.normalize && !context.path.case_sensitive;
        values::parse_regex(text, is_caseless)
    });
    let networks = reader.get_list("client_ips", |text| {
        let net = values::parse_network(text)?;
        context.client.check_client_network(net)
    });
    let domain = reader.get_parsed("domain", values::parse_nonempty);
    let conditions = [
        (
            KeyPart::Method,
            list(methods, |methods| ValueCondition::from_methods(&methods)),
        ),
        (KeyPart::Host, list(hosts, ValueCondition::Hosts)),
        (KeyPart::WholePath, list(paths, ValueCondition::Paths)),
        (
            KeyPart::WholePath,
            path_regex.map(|regex| ValueCondition::Regex(ConditionRegex(regex))),
        ),
        (KeyPart::ClientIp, list(networks, ValueCondition::Networks)),
        (
            KeyPart::DescriptorDomain,
            domain.map(|domain| ValueCondition::equals(&domain)),
        ),
    ];
    let conditions = conditions.into_iter().filter_map(|(part, condition)| {
        let condition = condition?;
        Some(PartCondition { part, condition })
    });
    conditions.collect()
}

fn parse_descriptor_conditions(
    reader: &TableReader<'_>,
    context: &PolicyContext,
) -> (AcceptedEntries, Vec<PartCondition>) {
    let has_entries = reader.contains_key("descriptors");
    report! { reader;
        Error("descriptors_match") if reader.contains_key("descriptors_match") && !has_entries => "no entries to match; expected descriptors beside it";
    }
    let accepted = match reader.is_keyword("descriptors_match", "subset") {
        _ if !has_entries => AcceptedEntries::Any,
        Some(true) => AcceptedEntries::More,
        _ => AcceptedEntries::Listed,
    };
    let adjust = |condition, item: &ConfigValue<'_>| {
        adjust_entry_condition(condition, item, accepted == AcceptedEntries::More)
    };
    let entries = parse_conditions(reader, "descriptors", context, parse_entry, adjust);
    (accepted, entries)
}

/// Error of a claim in a key or match without `[client.jwt]`.
pub(super) const NO_TRUSTED_TOKENS_ERROR: &str =
    "no key verifies tokens; expected [client.jwt] with keys_file or secret_file";

/// Parses a method. Rejects lower case: methods are case-sensitive, so it would never match.
fn parse_method(text: &str) -> Result<Method, String> {
    let parse = |text: &str| Method::from_bytes(text.as_bytes()).ok();
    let is_lower = |byte: u8| byte.is_ascii_lowercase();
    if let Some(method) = parse(text).filter(|_| !text.bytes().any(is_lower)) {
        return Ok(method);
    }
    let capitals = text.to_ascii_uppercase();
    let meant = parse(&capitals).filter(|_| capitals != text);
    let meant = meant.map_or_else(String::new, |meant| format!("; did you mean \"{meant}\"?"));
    Err(format!(
        "expected a method in capitals such as \"GET\"{meant}"
    ))
}

/// Parses the name of a descriptor entry. Rejects `*`: a name is literal.
fn parse_entry(text: &str) -> Result<KeyPart, String> {
    match text {
        "*" => Err("\"*\" is no name: descriptors lists each entry by its name; expected for example descriptors = { user = \"*\" }, or only domain for all descriptors of a domain".to_owned()),
        text => values::parse_nonempty(text).map(KeyPart::DescriptorEntry),
    }
}

/// Parses the conditions in a table. Their texts get the form in which values are compared.
fn parse_conditions(
    reader: &TableReader<'_>,
    key: &str,
    context: &PolicyContext,
    parse_part: impl Fn(&str) -> Result<KeyPart, String>,
    adjust: impl Fn(ValueCondition, &ConfigValue<'_>) -> Option<ValueCondition>,
) -> Vec<PartCondition> {
    let parse = |(name, item): (&str, ConfigValue<'_>)| {
        let part = match parse_part(name) {
            Ok(part) => part,
            Err(reason) => return item.report_error(reason),
        };
        let condition = adjust(parse_condition(&part, &item)?, &item)?;
        let rewrite =
            |text: &str| canonicalize_part_value(&part, text, &context.client, &context.path);
        match condition.rewrite_texts(rewrite) {
            Ok(condition) => Some(PartCondition { part, condition }),
            Err(reason) => item.report_error(reason),
        }
    };
    let entries = reader.get_entries(key).into_iter();
    entries.filter_map(parse).collect()
}

/// Parses a regular expression on the values of a part. The scheme of credentials and a host match
/// in any letter case.
fn parse_part_regex(part: &KeyPart, text: &str) -> Result<Regex, String> {
    let regex = values::parse_regex(text, *part == KeyPart::Header(HOST))?;
    match part {
        KeyPart::Header(AUTHORIZATION) => values::parse_regex(&accept_marked_letters(text)?, false),
        _ => Ok(regex),
    }
}

/// Adjusts a condition on a descriptor entry: `"*"` is any value.
fn adjust_entry_condition(
    condition: ValueCondition,
    item: &ConfigValue<'_>,
    accepts_more_entries: bool,
) -> Option<ValueCondition> {
    match condition {
        ValueCondition::OneOf(values) if values.iter().any(|value| **value == *"*") => {
            match values.len() {
                1 => Some(ValueCondition::Present(true)),
                _ => item.report_error("\"*\" is any value; expected it alone, without a list"),
            }
        }
        ValueCondition::Present(false) if !accepts_more_entries => item.report_error(
            "a descriptor with other entries never matches; expected no such condition, or descriptors_match = \"subset\"",
        ),
        condition => Some(condition),
    }
}

/// Parses a condition on the values of a part. Those of a claim or body may be booleans and
/// integers.
fn parse_condition(part: &KeyPart, item: &ConfigValue<'_>) -> Option<ValueCondition> {
    const EXPECTED: &str =
        "expected a text, a list of texts, { regex = \"…\" } or { present = true }";
    let is_typed = matches!(part, KeyPart::Claim(_) | KeyPart::Body(_));
    let parse_text = |value: &ValueNode| -> Option<Box<str>> {
        match &value.content {
            ValueContent::Bool(flag) if is_typed => Some(flag.to_string().into()),
            ValueContent::Integer(number) if is_typed => Some(number.to_string().into()),
            content => content.as_str().map(Into::into),
        }
    };
    if let Some(text) = parse_text(item.value) {
        return Some(ValueCondition::equals(&text));
    }
    if let Some(values) = item.value.as_list() {
        let texts: Option<Box<[_]>> = values.iter().map(parse_text).collect();
        return match texts {
            Some(texts) if texts.is_empty() => {
                item.report_error("no value meets an empty list; expected at least one value")
            }
            Some(texts) => Some(ValueCondition::OneOf(texts)),
            None => item.report_error(EXPECTED),
        };
    }
    let Some(table) = item.open_table(&schema::VALUE_CONDITION) else {
        return item.report_error(EXPECTED);
    };
    match (table.contains_key("regex"), table.contains_key("present")) {
        (true, false) => table
            .get_parsed("regex", |text| parse_part_regex(part, text))
            .map(|regex| ValueCondition::Regex(ConditionRegex(regex))),
        (false, true) => table.read("present").map(ValueCondition::Present),
        _ => item.report_error(EXPECTED),
    }
}
