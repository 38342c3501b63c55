//! Lints about limits that a client raises with a header of its own.
//!
//! Headers of `client.trusted_headers` are left out, because the gateway in front sets or removes
//! them, and so are headers for credentials: a client has to know their values.

use super::LintContext;
use super::policy_interactions::ComparisonBudget;
use crate::config::policies::{PolicyContext, PolicyWithReader, is_concurrency_limit};
use crate::config::table_reader::report;
use crate::policy::{
    CoverageIndex, KeyPart, LimitOverride, Matcher, NamedLimit, OverrideRule, PartCondition,
    PolicyAction, Quota, ValueCondition,
};
use std::cell::Cell;
use std::collections::{HashMap, HashSet};

pub(super) fn check_forged_headers(
    policies: &[PolicyWithReader<'_>],
    context: &LintContext<'_>,
    budget: &mut ComparisonBudget,
) {
    let context = context.policy_context;
    let enforced = policies.iter().filter(|one| one.policy.is_enforced());
    let mut enforced: Vec<_> = enforced.collect();
    let mut questions = Vec::new();
    for spanned in &enforced {
        warn_raising_overrides(spanned, context);
        questions.extend(ask_about_headers(spanned, context));
    }
    drop_certain_questions(&mut questions, &enforced);
    // The strictest policies answer most questions.
    enforced.sort_by(|one, other| strictness(one).0.total_cmp(&strictness(other).0));
    let asked: HashSet<&KeyPart> = questions.iter().map(|question| question.header).collect();
    let without_asked = |spanned: &PolicyWithReader<'_>| {
        let mut rest = spanned.policy.matcher.clone();
        rest.conditions.retain(|one| !asked.contains(&one.part));
        rest
    };
    let rests: Vec<_> = enforced
        .iter()
        .map(|one| (without_asked(one), *one))
        .collect();
    let wider = CoverageIndex::new(rests.iter().collect(), |(rest, _)| rest);
    let asked = questions
        .iter()
        .filter(|question| question.depends_on_others());
    let asked: Vec<_> = asked.map(|one| (without_asked(one.spanned), one)).collect();
    for (rest, question) in &asked {
        let is_answered = budget
            .limit(wider.candidates(rest))
            .any(|(_, other)| question.is_answered_by(other));
        question.is_answered.set(is_answered);
    }
    let open = asked
        .iter()
        .filter(|(_, question)| !question.is_answered.get());
    let open = CoverageIndex::new(open.collect(), |(rest, _)| rest);
    for (rest, other) in &rests {
        for (_, question) in budget.limit(open.candidates(rest)) {
            if !question.is_answered.get() {
                question.is_answered.set(question.is_answered_by(other));
            }
        }
    }
    for question in &questions {
        question.report_warning(budget);
    }
}

/// What to write instead of a limit that depends on the header.
fn advise(name: &str) -> String {
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
            let advice = advise(name);
            report! { table;
                Warning("key") => "a client that sends this {name} gets the higher limit or none; {advice}";
            }
        }
    }
}

/// The header that a client sends to match an override, unless another value is beyond its control.
fn find_forgeable_value<'q>(
    entry: &LimitOverride,
    quota: &'q Quota,
    context: &PolicyContext,
) -> Option<&'q str> {
    let mut forgeable = None;
    let values = entry.values.iter().enumerate();
    for (position, value) in values {
        let value = value.literal_start();
        if value.is_empty() {
            continue;
        }
        let (source, _) = quota.key.value_source(position, value.as_bytes())?;
        match &source.part {
            part if source.is_hashed || part.is_credential() => return None,
            KeyPart::Const(_) | KeyPart::Method => {}
            part if !context.is_client_chosen(part) => return None,
            KeyPart::Header(name) => forgeable = Some(name.as_str()),
            _ => {}
        }
    }
    forgeable
}

/// Whether a header lets a client choose the policy that limits it, which depends on others.
struct HeaderQuestion<'p, 'r> {
    spanned: &'p PolicyWithReader<'r>,
    header: &'p KeyPart,
    /// The condition that the client meets by sending the header. `None` if sending it avoids the
    /// policy.
    met: Option<&'p PartCondition>,
    /// Whether a policy limits the requests without the header more, or those with it as much.
    is_answered: Cell<bool>,
}

fn ask_about_headers<'p, 'r>(
    spanned: &'p PolicyWithReader<'r>,
    context: &PolicyContext,
) -> impl Iterator<Item = HeaderQuestion<'p, 'r>> {
    let (matcher, action) = (&spanned.policy.matcher, &spanned.policy.action);
    let met = forgeable_headers(matcher, context).into_iter();
    let met = met.filter(|_| !matches!(action, PolicyAction::Deny));
    let excluding = excluding_headers(matcher, context).into_iter();
    let excluding = excluding.filter(|_| !matches!(action, PolicyAction::Allow));
    let headers = met.map(|met| (&met.part, Some(met)));
    let headers = headers.chain(excluding.map(|header| (header, None)));
    headers.map(move |(header, met)| HeaderQuestion {
        spanned,
        header,
        met,
        is_answered: Cell::new(false),
    })
}

/// Drops the questions about a higher limit if no policy about the header has a lower one.
fn drop_certain_questions(
    questions: &mut Vec<HeaderQuestion<'_, '_>>,
    enforced: &[&PolicyWithReader<'_>],
) {
    let mut lowest: HashMap<&KeyPart, (f64, u64)> = HashMap::new();
    for spanned in enforced.iter().filter(|one| one.quota().is_some()) {
        let matcher = &spanned.policy.matcher;
        let excluded = matcher.not.iter().flat_map(|not| headers_of(not));
        let (rate, slots) = strictness(spanned);
        for one in headers_of(matcher).chain(excluded) {
            let lowest = lowest.entry(&one.part).or_insert((rate, slots));
            *lowest = (lowest.0.min(rate), lowest.1.min(slots));
        }
    }
    questions.retain(|question| {
        let (rate, slots) = strictness(question.spanned);
        let is_higher = |lowest: &(f64, u64)| rate > lowest.0 || slots > lowest.1;
        let lowest = lowest.get(question.header);
        question.met.is_none() || !question.depends_on_others() || lowest.is_some_and(is_higher)
    });
}

/// The rate and the slots of the strictest limits of a policy.
fn strictness(spanned: &PolicyWithReader<'_>) -> (f64, u64) {
    let quota = spanned.quota();
    quota.map_or((0.0, 0), |quota| {
        (strictest_rate(&quota.limits), fewest_slots(&quota.limits))
    })
}

impl HeaderQuestion<'_, '_> {
    /// Whether other policies decide. An exemption is always one.
    fn depends_on_others(&self) -> bool {
        self.met.is_none() || self.spanned.quota().is_some()
    }

    fn is_answered_by(&self, other: &PolicyWithReader<'_>) -> bool {
        let matcher = &other.policy.matcher;
        let (quota, other_quota) = (self.spanned.quota(), other.quota());
        let decides = match self.met {
            Some(met) => {
                let limits = quota.zip(other_quota);
                limits.is_some_and(|(own, other)| is_higher(&own.limits, &other.limits))
                    && misses_header(matcher, met)
            }
            None => {
                let is_as_strict = match (&other.policy.action, quota) {
                    (PolicyAction::Deny, _) => true,
                    (PolicyAction::Limit(other), Some(own)) => {
                        !is_higher(&other.limits, &own.limits)
                    }
                    _ => false,
                };
                // A policy that requires the header has been reported where it is too lax.
                is_as_strict || headers_of(matcher).any(|one| one.part == *self.header)
            }
        };
        decides
            && !std::ptr::eq(other, self.spanned)
            && are_for_same_requests(&self.spanned.policy.matcher, matcher, self.header)
    }

    fn report_warning(&self, budget: &ComparisonBudget) {
        let (reader, policy) = (&self.spanned.reader, &self.spanned.policy);
        let is_exempt = matches!(policy.action, PolicyAction::Allow);
        let effect = match self.met {
            Some(_) if is_exempt => "is exempt from all later policies",
            Some(_) if self.is_answered.get() => "gets a higher limit than without it",
            None if !self.is_answered.get() && !budget.is_exhausted() => "avoids this policy",
            _ => return,
        };
        let (header, advice) = (self.header, advise(self.header.name()));
        report! { reader;
            Warning("match") => "a client that sends the {header} {effect}; {advice}";
        }
    }
}

/// The conditions on headers, without those in `any` and `not`.
fn headers_of(matcher: &Matcher) -> impl Iterator<Item = &PartCondition> {
    let conditions = matcher.conditions.iter();
    conditions.filter(|one| matches!(one.part, KeyPart::Header(_)))
}

/// The conditions that a client meets by sending a header. Empty if the policy has a condition
/// that is beyond the client's control.
fn forgeable_headers<'m>(matcher: &'m Matcher, context: &PolicyContext) -> Vec<&'m PartCondition> {
    let is_guard = |one: &PartCondition| match one.part {
        KeyPart::Claim(_) | KeyPart::ClientIp => true,
        KeyPart::Query(_) => false,
        _ => one.part.is_credential(),
    };
    if matcher.conditions.iter().any(is_guard) {
        return Vec::new();
    }
    let alternatives = matcher.any.iter();
    let alternatives = alternatives.flat_map(|one| forgeable_headers(one, context));
    headers_of(matcher)
        .filter(|one| one.requires_value() && context.is_client_chosen(&one.part))
        .chain(alternatives)
        .collect()
}

/// The headers that end the application of a policy if a client sends them.
fn excluding_headers<'m>(matcher: &'m Matcher, context: &PolicyContext) -> Vec<&'m KeyPart> {
    let absent = headers_of(matcher).filter(|one| {
        !one.requires_value() && context.is_client_chosen(&one.part) && !one.part.is_credential()
    });
    let excluded = matcher.not.iter();
    let excluded = excluded.flat_map(|not| forgeable_headers(not, context));
    absent.chain(excluded).map(|one| &one.part).collect()
}

/// Whether a matcher excludes requests that meet this condition on a header.
fn misses_header(matcher: &Matcher, met: &PartCondition) -> bool {
    let differs = |one: &PartCondition| match (&one.condition, &met.condition) {
        (ValueCondition::Present(false), _) => true,
        (ValueCondition::OneOf(one), ValueCondition::OneOf(other)) => {
            !one.iter().any(|value| other.contains(value))
        }
        _ => false,
    };
    let mut conditions = matcher.conditions.iter();
    conditions.any(|one| one.part == met.part && differs(one))
        || matcher
            .not
            .as_deref()
            .is_some_and(|not| not.requires_part(&met.part))
}

/// Whether two matchers are for the same requests, apart from their conditions on a header.
fn are_for_same_requests(one: &Matcher, other: &Matcher, header: &KeyPart) -> bool {
    let (one, other) = (without_header(one, header), without_header(other, header));
    one.covers(&other) || other.covers(&one)
}

fn without_header(matcher: &Matcher, header: &KeyPart) -> Matcher {
    let mut rest = matcher.clone();
    rest.conditions.retain(|one| one.part != *header);
    let is_about_header = |not: &Matcher| not.conditions.iter().any(|one| one.part == *header);
    rest.not = rest.not.filter(|not| !is_about_header(not));
    rest
}

/// Whether the strictest of `limits` admits more than the strictest of `others`.
fn is_higher(limits: &[NamedLimit], others: &[NamedLimit]) -> bool {
    strictest_rate(limits) > strictest_rate(others) || fewest_slots(limits) > fewest_slots(others)
}

/// Units per microsecond.
fn strictest_rate(limits: &[NamedLimit]) -> f64 {
    let rates = limits.iter().filter(|named| !is_concurrency_limit(named));
    let rates = rates.map(|one| one.limit.requests as f64 / one.limit.per_us.max(1) as f64);
    rates.fold(f64::INFINITY, f64::min)
}

fn fewest_slots(limits: &[NamedLimit]) -> u64 {
    let slots = limits.iter().filter(|named| is_concurrency_limit(named));
    let slots = slots.map(|named| named.limit.requests);
    slots.min().unwrap_or(u64::MAX)
}
