//! What policies do to each other.

use super::Placed;
use crate::config::policies::Scope;
use crate::policy::{Action, KeyPart, Matcher, MissingKey, Named, Test};
use std::cmp::Reverse;
use std::collections::HashMap;

/// Comparisons of two policies in one load. With thousands of policies not all are compared with all: a doubt that is
/// not found does less harm than a reload that takes seconds.
const MOST_COMPARISONS: usize = 200_000;

pub(super) fn look(placed: &[Placed<'_>], scope: &Scope) {
    let mut left = MOST_COMPARISONS;
    unreached(placed, &mut left);
    twice(placed);
    same_names(placed, &mut left);
    keys_left_out(placed, &mut left);
    invented_keys(placed, scope);
}

/// `false` once there have been too many.
fn may_compare(left: &mut usize) -> bool {
    let may = *left > 0;
    *left = left.saturating_sub(1);
    may
}

fn unreached(placed: &[Placed<'_>], left: &mut usize) {
    let mut in_order: Vec<&Placed<'_>> = placed.iter().collect();
    in_order.sort_by_key(|one| Reverse(one.policy.priority));
    let mut ends: Vec<&Placed<'_>> = Vec::new();
    for one in in_order {
        let matcher = &one.policy.matcher;
        match ends
            .iter()
            .find(|end| may_compare(left) && end.policy.matcher.covers(matcher))
        {
            Some(end) => {
                let does = if matches!(end.policy.action, Action::Allow) {
                    "exempts"
                } else {
                    "refuses"
                };
                one.at.warn(
                    "name",
                    &format!(
                        "never reached: before it, {} {does} all that this one matches; put this one first, or give it a higher priority",
                        end.called()
                    ),
                );
            }
            None if one.quota().is_none() && !one.policy.shadow => ends.push(one),
            None => {}
        }
    }
}

fn twice(placed: &[Placed<'_>]) {
    let mut known: HashMap<String, &Placed<'_>> = HashMap::new();
    for one in placed {
        let Some(quota) = one.quota() else { continue };
        let limits: Vec<_> = quota.limits.iter().map(|named| named.limit).collect();
        let overrides: Vec<_> = quota
            .overrides
            .list()
            .iter()
            .map(|entry| &entry.values)
            .collect();
        let what = format!(
            "{:?}",
            (
                &one.policy.matcher,
                one.policy.shadow,
                &quota.key,
                &quota.cost,
                limits,
                overrides
            )
        );
        match known.get(&what) {
            Some(first) => one.at.warn(
                "name",
                &format!(
                    "limits the same requests by the same key as {}, and no less: one of them is enough",
                    first.called()
                ),
            ),
            None => {
                known.insert(what, one);
            }
        }
    }
}

/// A field that has one name twice says nothing.
fn same_names(placed: &[Placed<'_>], left: &mut usize) {
    let mut known: HashMap<&str, Vec<&Placed<'_>>> = HashMap::new();
    for one in placed.iter().filter(|one| !one.policy.shadow) {
        for named in one.quota().iter().flat_map(|quota| &quota.limits) {
            let others = known.entry(&named.name).or_default();
            let meets = |other: &&&Placed<'_>| {
                let (mine, others) = (&one.policy.matcher, &other.policy.matcher);
                may_compare(left) && (mine.covers(others) || others.covers(mine))
            };
            if let Some(other) = others.iter().find(meets) {
                one.at.warn(
                    "name",
                    &format!(
                        "a limit of {} is called \"{}\" in the rate-limit fields too; expected another name, or a name in that limit",
                        other.called(),
                        named.name
                    ),
                );
            }
            others.push(one);
        }
    }
}

fn keys_left_out(placed: &[Placed<'_>], left: &mut usize) {
    for (at, one) in placed
        .iter()
        .enumerate()
        .filter(|(_, one)| !one.policy.shadow)
    {
        let Some(part) = left_out(one) else { continue };
        let Some(without) = without(&one.policy.matcher, part) else {
            continue;
        };
        let is_caught = placed.iter().enumerate().any(|(other_at, other)| {
            let limits = match other.policy.action {
                Action::Limit(_) => left_out(other).is_none(),
                Action::Deny => true,
                Action::Allow => false,
            };
            other_at != at
                && !other.policy.shadow
                && limits
                && may_compare(left)
                && other.policy.matcher.covers(&without)
        });
        if !is_caught && *left > 0 {
            let key = if one.at.has("missing_key") {
                "missing_key"
            } else {
                "key"
            };
            one.at.warn(
                key,
                &format!(
                    "who sends no {part} is not limited at all (missing_key = \"skip\"); expected \"shared\" or \"reject\", or a policy with the key \"client_ip\" beside it"
                ),
            );
        }
    }
}

/// The first part of its key that a client can leave out to get past it.
fn left_out<'a>(one: &'a Placed<'_>) -> Option<&'a KeyPart> {
    let quota = one
        .quota()
        .filter(|quota| quota.missing_key == MissingKey::Skip)?;
    quota
        .key
        .parts()
        .iter()
        .find(|part| without(&one.policy.matcher, part).is_some())
}

/// The requests among those matched that don't have the part; `None` if there are none, or the client has no say.
fn without(matcher: &Matcher, part: &KeyPart) -> Option<Matcher> {
    let mut narrower = matcher.clone();
    match part {
        KeyPart::Header(name) => add_absent(&mut narrower.headers, name)?,
        KeyPart::Query(name) => add_absent(&mut narrower.query, name)?,
        KeyPart::Cookie(name) => add_absent(&mut narrower.cookies, name)?,
        KeyPart::Claim(name) => add_absent(&mut narrower.claims, name)?,
        _ => return None,
    }
    Some(narrower)
}

fn add_absent<N: PartialEq + Clone>(conditions: &mut Vec<Named<N>>, name: &N) -> Option<()> {
    let asks = |test: &Test| !matches!(test, Test::Present(false));
    if conditions
        .iter()
        .any(|named| named.name == *name && asks(&named.test))
    {
        return None;
    }
    conditions.push(Named {
        name: name.clone(),
        test: Test::Present(false),
    });
    Some(())
}

fn invented_keys(placed: &[Placed<'_>], scope: &Scope) {
    let invents = |one: &Placed<'_>| {
        one.key_parts()
            .iter()
            .any(|part| scope.is_client_chosen(part))
    };
    // Whether one client can't get round it by inventing values.
    let bounds = |one: &Placed<'_>| {
        !one.policy.shadow && one.key_parts().contains(&KeyPart::ClientIp) && !invents(one)
    };
    if placed.iter().any(bounds) {
        return;
    }
    for one in placed.iter().filter(|one| invents(one)) {
        one.at.warn("key", "clients choose these values and can make counters at will; put a policy with the key \"client_ip\" beside it");
    }
}
