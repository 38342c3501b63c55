//! Lints about limits that a client raises with a header of its own.
//!
//! Headers of `client.trusted_headers` are left out, because the gateway in front sets or removes
//! them, and so are headers for credentials: a client has to know their values.

use super::context::LintContext;
use super::policy_interactions::ComparisonBudget;
use crate::config::policies::context::{PolicyContext, PolicyWithReader};
use crate::limiter::Algorithm;
use crate::policy::{
    KeyPart, LimitOverride, Matcher, NamedCondition, NamedLimit, OverrideRule, PolicyAction, Quota,
    ValueCondition, is_credential_name,
};
use http::HeaderName;

pub(super) fn check_forged_headers(
    policies: &[PolicyWithReader<'_>],
    context: &LintContext<'_>,
    budget: &mut ComparisonBudget,
) {
    let context = context.policy_context;
    let enforced: Vec<_> = policies
        .iter()
        .filter(|one| one.policy.is_enforced())
        .collect();
    for (index, spanned) in enforced.iter().enumerate() {
        warn_raising_overrides(spanned, context);
        let others = || {
            let others = enforced.iter().enumerate();
            others.filter_map(move |(other, one)| (other != index).then_some(*one))
        };
        warn_raising_match(spanned, others, context, budget);
        warn_avoidable_match(spanned, others, context, budget);
    }
}

/// What to write instead of a limit that depends on the header.
fn advise(name: &HeaderName) -> String {
    format!(
        "expected a claim of a verified token (jwt), or client.trusted_headers = [\"{name}\"] if the gateway in front sets or removes this header"
    )
}

fn warn_raising_overrides(spanned: &PolicyWithReader<'_>, context: &PolicyContext) {
    let Some(quota) = spanned.quota() else { return };
    let tables = spanned.reader.get_tables("override");
    for (table, entry) in tables.iter().zip(quota.overrides.as_slice()) {
        let is_raised = match entry.rule {
            OverrideRule::Limit(Some(mode)) if !mode.is_enforced() => true,
            OverrideRule::Limit(_) => {
                !entry.limits.is_empty() && is_higher(&entry.limits, &quota.limits)
            }
            OverrideRule::Allow | OverrideRule::Off => true,
            OverrideRule::Deny => false,
        };
        if let Some(name) = find_forgeable_value(entry, quota, context).filter(|_| is_raised) {
            table.report_warning(
                "key",
                &format!(
                    "a client that sends this {name} gets the higher limit or none; {}",
                    advise(name)
                ),
            );
        }
    }
}

/// The header that a client sends to match an override, unless another value is beyond its control.
fn find_forgeable_value<'q>(
    entry: &LimitOverride,
    quota: &'q Quota,
    context: &PolicyContext,
) -> Option<&'q HeaderName> {
    let mut forgeable = None;
    let values = entry.values.iter().enumerate();
    for (position, value) in values {
        let value = value.literal_start();
        if value.is_empty() {
            continue;
        }
        let source = quota.key.value_source(position, value.as_bytes())?;
        match source.part {
            part if source.is_hashed || part.is_credential() => return None,
            KeyPart::Const(_) | KeyPart::Method => {}
            part if !context.is_client_chosen(part) => return None,
            KeyPart::Header(name) => forgeable = Some(name),
            _ => {}
        }
    }
    forgeable
}

/// Warns of an exemption or a limit that a client gets by sending a header, while another policy
/// limits requests without it more.
fn warn_raising_match<'p, 'r: 'p, I: Iterator<Item = &'p PolicyWithReader<'r>>>(
    spanned: &PolicyWithReader<'_>,
    others: impl Fn() -> I,
    context: &PolicyContext,
    budget: &mut ComparisonBudget,
) {
    let matcher = &spanned.policy.matcher;
    for named in forgeable_headers(matcher, context) {
        let name = &named.name;
        let problem = match &spanned.policy.action {
            PolicyAction::Deny => continue,
            PolicyAction::Allow => "is exempt from all later policies",
            PolicyAction::Limit(quota) => {
                let is_raised = others().take_while(|_| budget.take()).any(|other| {
                    let stricter = other
                        .quota()
                        .is_some_and(|other_quota| is_higher(&quota.limits, &other_quota.limits));
                    stricter
                        && misses_header(&other.policy.matcher, named)
                        && are_for_same_requests(matcher, &other.policy.matcher, name)
                });
                if !is_raised {
                    continue;
                }
                "gets a higher limit than without it"
            }
        };
        spanned.reader.report_warning(
            "match",
            &format!(
                "a client that sends the header {name} {problem}; {}",
                advise(name)
            ),
        );
    }
}

/// Warns of a policy that a client avoids by sending a header, if no other policy limits it as
/// much.
fn warn_avoidable_match<'p, 'r: 'p, I: Iterator<Item = &'p PolicyWithReader<'r>>>(
    spanned: &PolicyWithReader<'_>,
    others: impl Fn() -> I,
    context: &PolicyContext,
    budget: &mut ComparisonBudget,
) {
    let matcher = &spanned.policy.matcher;
    let limits = match &spanned.policy.action {
        PolicyAction::Limit(quota) => Some(&quota.limits),
        PolicyAction::Deny => None,
        PolicyAction::Allow => return,
    };
    for name in excluding_headers(matcher, context) {
        let is_caught = others().take_while(|_| budget.take()).any(|other| {
            let is_as_strict = match (&other.policy.action, limits) {
                (PolicyAction::Deny, _) => true,
                (PolicyAction::Limit(other), Some(limits)) => !is_higher(&other.limits, limits),
                _ => false,
            };
            // A policy that requires the header has been reported where it is too lax.
            let requires = other
                .policy
                .matcher
                .headers
                .iter()
                .any(|one| one.name == *name);
            (is_as_strict || requires)
                && are_for_same_requests(matcher, &other.policy.matcher, name)
        });
        if !is_caught && !budget.is_exhausted() {
            spanned.reader.report_warning(
                "match",
                &format!(
                    "a client that sends the header {name} avoids this policy; {}",
                    advise(name)
                ),
            );
        }
    }
}

/// The conditions that a client meets by sending a header. Empty if the policy has a condition
/// that is beyond the client's control.
fn forgeable_headers<'m>(
    matcher: &'m Matcher,
    context: &PolicyContext,
) -> Vec<&'m NamedCondition<HeaderName>> {
    let is_secret = |name: &str| is_credential_name(name);
    let is_guarded = !matcher.client_ips.is_empty()
        || !matcher.claims.is_empty()
        || matcher
            .headers
            .iter()
            .any(|one| is_secret(one.name.as_str()))
        || matcher.cookies.iter().any(|one| is_secret(&one.name));
    let is_forgeable = |one: &&NamedCondition<HeaderName>| {
        requires_value(&one.condition) && !context.trusted_headers.contains(&one.name)
    };
    if is_guarded {
        return Vec::new();
    }
    let alternatives = matcher.any.iter();
    let alternatives = alternatives.flat_map(|one| forgeable_headers(one, context));
    matcher
        .headers
        .iter()
        .filter(is_forgeable)
        .chain(alternatives)
        .collect()
}

/// The headers that end the application of a policy if a client sends them.
fn excluding_headers<'m>(matcher: &'m Matcher, context: &PolicyContext) -> Vec<&'m HeaderName> {
    let absent = matcher.headers.iter().filter(|one| {
        !requires_value(&one.condition)
            && !context.trusted_headers.contains(&one.name)
            && !is_credential_name(one.name.as_str())
    });
    let excluded = matcher
        .not
        .iter()
        .flat_map(|not| forgeable_headers(not, context));
    absent.chain(excluded).map(|one| &one.name).collect()
}

fn requires_value(condition: &ValueCondition) -> bool {
    !matches!(condition, ValueCondition::Present(false))
}

/// Whether a matcher excludes requests that meet this condition on a header.
fn misses_header(matcher: &Matcher, named: &NamedCondition<HeaderName>) -> bool {
    let differs = |one: &NamedCondition<HeaderName>| {
        let is_other_value = match (&one.condition, &named.condition) {
            (ValueCondition::Present(false), _) => true,
            (ValueCondition::OneOf(one), ValueCondition::OneOf(other)) => {
                !one.iter().any(|value| other.contains(value))
            }
            _ => false,
        };
        one.name == named.name && is_other_value
    };
    let excludes = |not: &Matcher| {
        let mut headers = not.headers.iter();
        headers.any(|one| one.name == named.name && requires_value(&one.condition))
    };
    matcher.headers.iter().any(differs) || matcher.not.as_deref().is_some_and(excludes)
}

/// Whether two matchers are for the same requests, apart from their conditions on a header.
fn are_for_same_requests(one: &Matcher, other: &Matcher, name: &HeaderName) -> bool {
    let (one, other) = (without_header(one, name), without_header(other, name));
    one.covers(&other) || other.covers(&one)
}

fn without_header(matcher: &Matcher, name: &HeaderName) -> Matcher {
    let mut rest = matcher.clone();
    rest.headers.retain(|one| one.name != *name);
    let is_about_header = |not: &Matcher| not.headers.iter().any(|one| one.name == *name);
    rest.not = rest.not.filter(|not| !is_about_header(not));
    rest
}

/// Whether the strictest of `limits` admits more than the strictest of `others`.
fn is_higher(limits: &[NamedLimit], others: &[NamedLimit]) -> bool {
    strictest_rate(limits) > strictest_rate(others) || fewest_slots(limits) > fewest_slots(others)
}

/// Units per microsecond.
fn strictest_rate(limits: &[NamedLimit]) -> f64 {
    let rates = limits.iter().map(|named| &named.limit);
    rates
        .filter(|limit| !matches!(limit.algorithm, Algorithm::Concurrency { .. }))
        .map(|limit| limit.requests as f64 / limit.per_us.max(1) as f64)
        .fold(f64::INFINITY, f64::min)
}

fn fewest_slots(limits: &[NamedLimit]) -> u64 {
    let slots = limits.iter().map(|named| &named.limit);
    slots
        .filter(|limit| matches!(limit.algorithm, Algorithm::Concurrency { .. }))
        .map(|limit| limit.requests)
        .min()
        .unwrap_or(u64::MAX)
}
