//! The table `match` of a policy.

use super::context::PolicyContext;
use crate::config::table_reader::{ConfigValue, TableReader};
use crate::config::{schema, values};
use crate::policy::jwt::ClaimName;
use crate::policy::{
    ConditionRegex, DescriptorConditions, HostPattern, Matcher, MethodSet, NamedCondition,
    PathPattern, ValueCondition, canonicalize_descriptor_value, canonicalize_header_value,
};
use figment::value::{Num, Value};
use http::{HeaderName, Method};

/// Keys that make a policy apply to descriptors of the rate-limit service.
const DESCRIPTOR_KEYS: [&str; 3] = ["domain", "descriptors", "descriptors_match"];

/// Builds the conditions of a policy.
pub(super) fn build_matcher(reader: &TableReader<'_>, context: &PolicyContext) -> Matcher {
    let matches_descriptors = DESCRIPTOR_KEYS.iter().any(|key| reader.contains_key(key));
    if matches_descriptors {
        let keys = reader.present_keys().map(|key| key.name);
        for key in
            keys.filter(|key| !DESCRIPTOR_KEYS.contains(key) && !["any", "not"].contains(key))
        {
            reader.report_error(key, "not with domain or descriptors: a call of the rate-limit service has descriptors and no request; expected one or the other");
        }
    }
    let (any, not) = (reader.get_tables("any"), reader.get_optional_table("not"));
    let nested = any.iter().map(|table| ("any", table));
    for (key, table) in nested.chain(not.iter().map(|table| ("not", table))) {
        let has_descriptor_key = DESCRIPTOR_KEYS.iter().any(|key| table.contains_key(key));
        match matches_descriptors {
            true if !has_descriptor_key => {
                reader.report_error(key, "expected domain or descriptors in it too");
            }
            false if has_descriptor_key => {
                reader.report_error(
                    key,
                    "a request has no descriptors; expected domain or descriptors in match too",
                );
            }
            _ => {}
        }
    }
    if reader.contains_key("any") && any.is_empty() {
        reader.report_error("any", "nothing matches; expected at least one table");
    }
    if reader.contains_key("jwt") && context.claim_trust.is_none() {
        reader.report_error("jwt", NO_TRUSTED_TOKENS_ERROR);
    }
    Matcher {
        methods: MethodSet::new(reader.get_list("methods", parse_method)),
        hosts: reader.get_list("hosts", HostPattern::parse),
        paths: reader.get_list("path", |text| PathPattern::parse(text, &context.path)),
        path_regex: reader
            .get_parsed("path_regex", values::parse_regex)
            .map(ConditionRegex),
        headers: parse_conditions(
            reader,
            "headers",
            values::parse_header_name,
            parse_header_condition,
        ),
        query: parse_conditions(reader, "query", parse_nonempty_name, |_, item| {
            parse_value_condition(item)
        }),
        cookies: parse_conditions(reader, "cookies", parse_nonempty_name, |_, item| {
            parse_value_condition(item)
        }),
        client_ips: reader.get_list("client_ips", |text| {
            let net = values::parse_network(text)?;
            context.client.check_client_network(net)
        }),
        claims: parse_conditions(reader, "jwt", ClaimName::parse, |_, item| {
            parse_claim_condition(item)
        }),
        descriptor_conditions: matches_descriptors.then(|| parse_descriptor_conditions(reader)),
        any: any.iter().map(|one| build_matcher(one, context)).collect(),
        not: not.map(|not| Box::new(build_matcher(&not, context))),
    }
}

fn parse_descriptor_conditions(reader: &TableReader<'_>) -> DescriptorConditions {
    let has_entries = reader.contains_key("descriptors");
    if reader.contains_key("descriptors_match") && !has_entries {
        reader.report_error(
            "descriptors_match",
            "no entries to match; expected descriptors beside it",
        );
    }
    let accepts_more_entries = reader
        .is_keyword("descriptors_match", "subset")
        .unwrap_or_default();
    let entries = has_entries.then(|| {
        parse_conditions(reader, "descriptors", parse_entry_name, |_, item| {
            parse_descriptor_condition(item, accepts_more_entries)
        })
    });
    DescriptorConditions {
        domain: reader.get_parsed("domain", parse_nonempty_name),
        entries,
        accepts_more_entries,
    }
}

/// Error of a claim in a key or match without `[client.jwt]`.
pub(super) const NO_TRUSTED_TOKENS_ERROR: &str =
    "no key verifies tokens; expected [client.jwt] with keys_file or secret_file";

/// Parses a method. Rejects lower case: methods are case-sensitive, so it would never match.
fn parse_method(text: &str) -> Result<Method, String> {
    match Method::from_bytes(text.as_bytes()) {
        Ok(method) if !text.bytes().any(|byte| byte.is_ascii_lowercase()) => Ok(method),
        _ => {
            let capitals = text.to_ascii_uppercase();
            let meant = match Method::from_bytes(capitals.as_bytes()) {
                Ok(method) if capitals != text => format!("; did you mean \"{method}\"?"),
                _ => String::new(),
            };
            Err(format!(
                "expected a method in capitals such as \"GET\"{meant}"
            ))
        }
    }
}

fn parse_nonempty_name(text: &str) -> Result<Box<str>, String> {
    if text.is_empty() {
        Err("the name is empty".to_owned())
    } else {
        Ok(text.into())
    }
}

/// Parses the name of a descriptor entry. Rejects `*`: a name is literal.
fn parse_entry_name(text: &str) -> Result<Box<str>, String> {
    match text {
        "*" => Err("\"*\" is no name: descriptors lists each entry by its name; expected for example descriptors = { user = \"*\" }, or only domain for all descriptors of a domain".to_owned()),
        text => parse_nonempty_name(text),
    }
}

fn parse_conditions<N>(
    reader: &TableReader<'_>,
    key: &str,
    parse_name: impl Fn(&str) -> Result<N, String>,
    parse_condition: impl Fn(&N, &ConfigValue<'_>) -> Option<ValueCondition>,
) -> Vec<NamedCondition<N>> {
    let named_condition = |(name, item): (&str, ConfigValue<'_>)| match parse_name(name) {
        Ok(name) => {
            let condition = parse_condition(&name, &item)?;
            Some(NamedCondition { name, condition })
        }
        Err(reason) => item.report_error(&reason),
    };
    reader
        .get_entries(key)
        .into_iter()
        .filter_map(named_condition)
        .collect()
}

/// Parses a condition on a claim, whose values may also be booleans and integers.
fn parse_claim_condition(item: &ConfigValue<'_>) -> Option<ValueCondition> {
    let text = |value: &Value| match value {
        Value::Bool(_, flag) => Some(flag.to_string().into()),
        Value::Num(_, Num::I64(number)) => Some(number.to_string().into()),
        value => value.as_str().map(Into::into),
    };
    parse_condition(item, text)
}

/// Parses a condition on a descriptor entry. `"*"` is any value.
fn parse_descriptor_condition(
    item: &ConfigValue<'_>,
    accepts_more_entries: bool,
) -> Option<ValueCondition> {
    match parse_value_condition(item)? {
        ValueCondition::OneOf(values) if values.iter().any(|value| **value == *"*") => {
            match values.len() {
                1 => Some(ValueCondition::Present(true)),
                _ => item.report_error("\"*\" is any value; expected it alone, without a list"),
            }
        }
        ValueCondition::Present(false) if !accepts_more_entries => item.report_error(
            "a descriptor with other entries never matches; expected no such condition, or descriptors_match = \"subset\"",
        ),
        condition => {
            let rewrite = |text: &str| Ok(canonicalize_descriptor_value(text).into());
            condition.rewrite_texts(rewrite).ok()
        }
    }
}

/// Parses a condition on a header. Its texts get the form in which requests are compared.
fn parse_header_condition(name: &HeaderName, item: &ConfigValue<'_>) -> Option<ValueCondition> {
    let condition = parse_value_condition(item)?;
    let rewrite = |text: &str| canonicalize_header_value(name, text);
    match condition.rewrite_texts(rewrite) {
        Ok(condition) => Some(condition),
        Err(reason) => item.report_error(&reason),
    }
}

fn parse_value_condition(item: &ConfigValue<'_>) -> Option<ValueCondition> {
    parse_condition(item, |value| value.as_str().map(Into::into))
}

/// Parses a condition on a value. `parse_text` reads one value to compare with.
fn parse_condition(
    item: &ConfigValue<'_>,
    parse_text: impl Fn(&Value) -> Option<Box<str>>,
) -> Option<ValueCondition> {
    const EXPECTED: &str =
        "expected a text, a list of texts, { regex = \"…\" } or { present = true }";
    if let Some(text) = parse_text(item.value) {
        return Some(ValueCondition::equals(&text));
    }
    if let Some(values) = item.value.as_array() {
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
            .get_parsed("regex", values::parse_regex)
            .map(|regex| ValueCondition::Regex(ConditionRegex(regex))),
        (false, true) => table.get_bool("present").map(ValueCondition::Present),
        _ => item.report_error(EXPECTED),
    }
}
