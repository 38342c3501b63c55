//! Overrides of keys as operators enter and read them: checks against the policies, and JSON.

use super::key_status::find_limiting_policy;
use crate::admin::{
    AdminError, AmountsDocument, OneOrMany, OverrideDocument, get_field, get_string_field,
    reject_unknown_fields,
};
use crate::config::parse_duration;
use crate::limiter::{Algorithm, KeyBuilder, KeyOverride, LimitAmounts, ListedValue, MAX_UNITS};
use crate::policy::{NamedLimit, PolicyTable};
use crate::replay::parse_rfc3339;
use crate::store::{MAX_OVERRIDE_EXPIRY_MS, MAX_REMARK_BYTES, StoredOverride};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// The fields of an override in JSON and in CSV.
pub(crate) const FIELD_NAMES: [&str; 12] = [
    "policy",
    "key",
    "requests",
    "limit",
    "burst",
    "limits",
    "unlimited",
    "blocked",
    "expires",
    "expires_at",
    "note",
    "author",
];

/// An override as it was entered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct OverrideInput {
    pub(crate) policy: String,
    /// The values of the key in order; empty for an absent one.
    pub(crate) values: Vec<String>,
    /// An empty name stands for the only limit of the key.
    pub(crate) limits: Vec<LimitAmounts>,
    pub(crate) is_unlimited: bool,
    pub(crate) is_blocked: bool,
    pub(crate) expires_at_ms: Option<u64>,
    pub(crate) note: Option<String>,
    pub(crate) author: Option<String>,
}

/// Checks an override against the policies, and converts it to the form of the store.
///
/// # Errors
/// If the policy is not dynamic, or the values do not fit its key, or the amounts its limits, or if
/// the override ends in the past or after [`MAX_OVERRIDE_EXPIRY_MS`].
pub(crate) fn resolve_override(
    table: &PolicyTable,
    input: &OverrideInput,
    now_us: u64,
) -> Result<StoredOverride, AdminError> {
    let (policy, quota) = find_limiting_policy(table, &input.policy)?;
    let name = &policy.name;
    let invalid = AdminError::InvalidRequest;
    if !quota.is_dynamic {
        return Err(invalid(format!(
            "policy {name} has no overrides in the store; expected dynamic = true in its table"
        )));
    }
    let settings = (&table.client, &table.path);
    let (key, selected) = quota
        .key_and_limits_for_values(name, &input.values, settings, |text| {
            ListedValue::parse(text)
        })
        .map_err(invalid)?;
    let kinds = [
        input.is_unlimited,
        input.is_blocked,
        !input.limits.is_empty(),
    ];
    let rule = match kinds {
        [true, false, false] => KeyOverride::Unlimited,
        [false, true, false] => KeyOverride::Blocked,
        [false, false, true] => {
            resolve_limits(name, selected.limits, &input.limits).map_err(invalid)?
        }
        _ => {
            return Err(invalid(
                "expected exactly one of requests, unlimited and blocked (--requests, --unlimited, --block)".to_owned(),
            ));
        }
    };
    let wrong_expiry = match input.expires_at_ms {
        Some(at_ms) if at_ms <= now_us / 1000 => Some("the expiry is in the past"),
        Some(at_ms) if at_ms > MAX_OVERRIDE_EXPIRY_MS => {
            Some("the expiry is after 2255-06-05T23:47:34.739Z; expected an earlier one, or none")
        }
        _ => None,
    };
    if let Some(why) = wrong_expiry {
        return Err(invalid(why.to_owned()));
    }
    Ok(StoredOverride {
        key,
        rule,
        expires_at_ms: input.expires_at_ms,
        author: check_remark("author", input.author.as_deref()).map_err(invalid)?,
        note: check_remark("note", input.note.as_deref()).map_err(invalid)?,
    })
}

fn resolve_limits(
    policy: &str,
    limits: &[NamedLimit],
    entered: &[LimitAmounts],
) -> Result<KeyOverride, String> {
    let names = || {
        limits
            .iter()
            .map(|named| &*named.name)
            .collect::<Vec<_>>()
            .join(", ")
    };
    let mut amounts: Vec<LimitAmounts> = Vec::new();
    for one in entered {
        let named = match (&*one.limit, limits) {
            ("", [only]) => only,
            ("", _) => {
                return Err(format!(
                    "the limits of {policy} are {}; expected the name of one of them",
                    names()
                ));
            }
            (name, _) => limits
                .iter()
                .find(|named| &*named.name == name)
                .ok_or_else(|| format!("unknown limit {name:?}; expected one of {}", names()))?,
        };
        let is_bucket = matches!(named.limit.algorithm, Algorithm::TokenBucket { .. });
        if one.burst.is_some() && !is_bucket {
            return Err(format!(
                "burst: the limit {} is not a token_bucket; expected no burst",
                named.name
            ));
        }
        if one.burst == Some(0) {
            return Err("burst: 0; expected at least 1".to_owned());
        }
        let max_amount = named.limit.max_amount();
        if one.requests.max(one.burst.unwrap_or(0)) > max_amount {
            return Err(format!(
                "the limit {} counts exactly up to {max_amount}; expected at most that",
                named.name
            ));
        }
        if amounts.iter().any(|other| *other.limit == *named.name) {
            return Err(format!("the limit {} is given twice", named.name));
        }
        amounts.push(LimitAmounts {
            limit: (*named.name).into(),
            ..one.clone()
        });
    }
    Ok(KeyOverride::Limits(amounts))
}

fn check_remark(field: &str, text: Option<&str>) -> Result<Option<Box<str>>, String> {
    let text = text.map(str::trim).filter(|text| !text.is_empty());
    if text.is_some_and(|text| text.chars().any(char::is_control)) {
        return Err(format!(
            "{field}: expected one line without control characters"
        ));
    }
    if text.is_some_and(|text| text.len() > MAX_REMARK_BYTES) {
        return Err(format!(
            "{field}: expected at most {MAX_REMARK_BYTES} bytes"
        ));
    }
    Ok(text.map(Into::into))
}

/// Adds the amounts of other limits that the key already has to the amounts that one command sets.
/// The note and the author stay if the command has none.
///
/// # Errors
/// If that would change when the other amounts end.
pub(crate) fn merge_amounts(
    previous: &StoredOverride,
    stored: &mut StoredOverride,
) -> Result<(), String> {
    let (KeyOverride::Limits(limits), KeyOverride::Limits(before)) =
        (&mut stored.rule, &previous.rule)
    else {
        return Ok(());
    };
    let is_kept = |amounts: &&LimitAmounts| !limits.iter().any(|set| set.limit == amounts.limit);
    let kept: Vec<LimitAmounts> = before.iter().filter(is_kept).cloned().collect();
    if !kept.is_empty() && previous.expires_at_ms != stored.expires_at_ms {
        let names: Vec<&str> = kept.iter().map(|amounts| &*amounts.limit).collect();
        let [old, new] =
            [previous.expires_at_ms, stored.expires_at_ms].map(|at| at.and_then(format_time_ms));
        let describe = |at: &Option<String>| match at {
            Some(at) => format!("end at {at}"),
            None => "never end".to_owned(),
        };
        let expected = match &old {
            Some(at) => format!("--expires {at}"),
            None => "no --expires".to_owned(),
        };
        return Err(format!(
            "the override of this key has other limits ({}), which {}; the new amounts would {}; \
             expected {expected}, or remove the override first",
            names.join(", "),
            describe(&old),
            describe(&new),
        ));
    }
    limits.extend(kept);
    stored.note = stored.note.take().or_else(|| previous.note.clone());
    stored.author = stored.author.take().or_else(|| previous.author.clone());
    Ok(())
}

/// Reads an override from JSON. `policy` is its policy if the address names it.
///
/// # Errors
/// Which field is wrong.
pub(crate) fn override_from_json(
    object: &Map<String, Value>,
    now_us: u64,
) -> Result<OverrideInput, String> {
    reject_unknown_fields(object, "", &FIELD_NAMES)?;
    let text = |name: &str| get_string_field(object, name);
    let flag = |name| get_field(object, name, "true or false").map(Option::unwrap_or_default);
    let values: Option<OneOrMany> = get_field(object, "key", "a string, or an array of strings")?;
    Ok(OverrideInput {
        policy: text("policy")?.unwrap_or_default(),
        values: values.map_or(Vec::new(), OneOrMany::into_vec),
        limits: limits_from_json(object)?,
        is_unlimited: flag("unlimited")?,
        is_blocked: flag("blocked")?,
        expires_at_ms: parse_expiry(
            text("expires")?.as_deref(),
            text("expires_at")?.as_deref(),
            now_us,
        )?,
        note: text("note")?,
        author: text("author")?,
    })
}

/// Reads the amounts: those of one limit in the object itself, or of several in its `limits`.
fn limits_from_json(object: &Map<String, Value>) -> Result<Vec<LimitAmounts>, String> {
    let given = |name: &str| object.get(name).filter(|value| !value.is_null());
    let of_one = ["burst", "limit"]
        .into_iter()
        .find(|name| given(name).is_some());
    match (given("requests"), given("limits"), of_one) {
        (None, None, None) => Ok(Vec::new()),
        (None, None, Some(field)) => Err(format!("{field}: expected requests beside it")),
        (Some(_), None, _) => {
            let limit = get_string_field(object, "limit")?.unwrap_or_default();
            Ok(vec![amounts_from_json(&limit, object)?])
        }
        (None, Some(_), Some(field)) => Err(format!("{field}: expected it inside limits")),
        (None, Some(Value::Object(by_name)), None) => by_name
            .iter()
            .map(|(name, amounts)| named_amounts_from_json(name, amounts))
            .collect(),
        (None, Some(_), None) => {
            Err("limits: expected an object with the name of each limit".to_owned())
        }
        (Some(_), Some(_), _) => Err("expected requests or limits, not both".to_owned()),
    }
}

fn named_amounts_from_json(name: &str, amounts: &Value) -> Result<LimitAmounts, String> {
    let amounts = amounts
        .as_object()
        .ok_or_else(|| format!("limits.{name}: expected an object with requests"))?;
    let place = format!("limits.{name}: ");
    reject_unknown_fields(amounts, &place, &["requests", "burst"])?;
    amounts_from_json(name, amounts).map_err(|why| place + &why)
}

fn amounts_from_json(limit: &str, object: &Map<String, Value>) -> Result<LimitAmounts, String> {
    let amount = |name: &str| {
        let expected = format!("an integer from 0 to {MAX_UNITS}");
        let amount: Option<u64> = get_field(object, name, &expected)?;
        match amount {
            Some(too_many) if too_many > MAX_UNITS => Err(format!("{name}: expected {expected}")),
            amount => Ok(amount),
        }
    };
    Ok(LimitAmounts {
        limit: limit.into(),
        requests: amount("requests")?.ok_or("requests: missing")?,
        burst: amount("burst")?,
    })
}

/// Reads an override that [`describe_stored_override`] described. It may have expired, and name a
/// limit or a policy that the configuration does not have.
///
/// # Errors
/// If the expiry is no time.
pub(crate) fn override_from_document(document: OverrideDocument) -> Result<StoredOverride, String> {
    let mut key = KeyBuilder::new(&document.policy);
    for text in &document.key {
        match ListedValue::parse(text) {
            ListedValue::Digest(digest) => key.push_digest(&digest),
            ListedValue::Plain(text) => key.push_key_value(Some(text.as_bytes())),
        }
    }
    let limits = document.limits.into_iter().flatten();
    let limits = limits.map(|(limit, amounts)| LimitAmounts {
        limit: limit.into(),
        requests: amounts.requests,
        burst: amounts.burst,
    });
    Ok(StoredOverride {
        key: key.finish(),
        rule: match (document.unlimited, document.blocked) {
            (true, _) => KeyOverride::Unlimited,
            (false, true) => KeyOverride::Blocked,
            (false, false) => KeyOverride::Limits(limits.collect()),
        },
        expires_at_ms: parse_expiry(None, document.expires_at.as_deref(), 0)?,
        author: document.author.map(Into::into),
        note: document.note.map(Into::into),
    })
}

/// Reads when an override ends: after a duration such as `30d`, or at a time.
///
/// # Errors
/// What is wrong.
pub(crate) fn parse_expiry(
    duration: Option<&str>,
    at: Option<&str>,
    now_us: u64,
) -> Result<Option<u64>, String> {
    match (duration, at) {
        (None, None) => Ok(None),
        (Some(text), None) => {
            let duration = parse_duration(text).ok_or_else(|| {
                format!("expires: {text:?} is no duration; expected one such as 30d or 12h")
            })?;
            let duration_s = duration.as_secs().max(1);
            Ok(Some(
                (now_us / 1_000_000)
                    .saturating_add(duration_s)
                    .saturating_mul(1000),
            ))
        }
        (None, Some(text)) => match parse_rfc3339(text.as_bytes()) {
            Some((at_us, _)) => Ok(Some(at_us / 1000)),
            None => Err(format!(
                "expires_at: {text:?} is no time; expected one such as 2027-01-31T00:00:00Z"
            )),
        },
        (Some(_), Some(_)) => Err("expected expires or expires_at, not both".to_owned()),
    }
}

/// Describes an override in the form that [`override_from_json`] reads.
pub(crate) fn describe_stored_override(stored: &StoredOverride) -> OverrideDocument {
    OverrideDocument {
        policy: stored.key.policy_name().to_owned(),
        key: stored.key.value_texts(),
        unlimited: stored.rule == KeyOverride::Unlimited,
        blocked: stored.rule == KeyOverride::Blocked,
        limits: match &stored.rule {
            KeyOverride::Limits(limits) => Some(amounts_by_limit(limits)),
            KeyOverride::Unlimited | KeyOverride::Blocked => None,
        },
        expires_at: stored.expires_at_ms.and_then(format_time_ms),
        note: stored.note.as_deref().map(str::to_owned),
        author: stored.author.as_deref().map(str::to_owned),
    }
}

pub(crate) fn amounts_by_limit(limits: &[LimitAmounts]) -> BTreeMap<String, AmountsDocument> {
    let limits = limits.iter().map(|amounts| {
        let LimitAmounts {
            limit,
            requests,
            burst,
        } = amounts.clone();
        (limit.into(), AmountsDocument { requests, burst })
    });
    limits.collect()
}

/// Describes the override for people: `5000 requests (api)`, `unlimited`, `blocked`.
pub(crate) fn describe_rule(rule: &KeyOverride) -> String {
    let limits = match rule {
        KeyOverride::Unlimited => return "unlimited".to_owned(),
        KeyOverride::Blocked => return "blocked".to_owned(),
        KeyOverride::Limits(limits) => limits,
    };
    let limits = limits.iter().map(|amounts| {
        let burst = amounts
            .burst
            .map_or_else(String::new, |burst| format!(", burst {burst}"));
        format!("{} {}{burst}", amounts.limit, amounts.requests)
    });
    limits.collect::<Vec<_>>().join("; ")
}

/// Describes who changed what until when: `blocked by an override of ann until
/// 2027-01-31T00:00:00Z: abuse`.
pub(crate) fn describe_override(stored: &StoredOverride) -> String {
    let mut text = format!("{} by an override", describe_rule(&stored.rule));
    if let Some(author) = &stored.author {
        text.push_str(&format!(" of {}", author.escape_debug()));
    }
    if let Some(expires_at) = stored.expires_at_ms.and_then(format_time_ms) {
        text.push_str(&format!(" until {expires_at}"));
    }
    if let Some(note) = &stored.note {
        text.push_str(&format!(": {}", note.escape_debug()));
    }
    text
}

/// A time such as `2027-01-31T00:00:00Z`.
pub(crate) fn format_time_ms(at_ms: u64) -> Option<String> {
    let at = OffsetDateTime::from_unix_timestamp_nanos(i128::from(at_ms) * 1_000_000).ok()?;
    at.format(&Rfc3339).ok()
}
