//! The policies that may have limited a client, and the hash of the client's key in each.

use super::log_record::LoggedRequest;
use crate::app::key_status::{ResolvedKey, find_limiting_policy, resolve_key};
use crate::app::overrides::describe_override;
use crate::limiter::Key;
use crate::policy::path::PathInterpretations;
use crate::policy::{
    KeyPart, NamedLimit, OverrideRule, Policy, PolicyAction, PolicyMode, PolicyTable, Quota,
};
use crate::store::StoredOverride;
use crate::text::count_noun;

/// A policy whose key fits the given values.
#[derive(Debug)]
pub(super) struct SearchedPolicy<'t> {
    table: &'t PolicyTable,
    pub(super) policy: &'t Policy,
    pub(super) quota: &'t Quota,
    /// One value per position of the key; `None` where each request's line has it. `None` if the
    /// values are only a part of the key.
    pub(super) values: Option<Vec<Option<String>>>,
    /// If fewer values than the key has are given: the hash of each of them at each position.
    /// `None` where the value is invalid.
    part_ids: Vec<Vec<Option<u64>>>,
    /// The key and its limits, if all its values are given.
    pub(super) resolved: Option<ResolvedKey<'t>>,
    /// The key's override in the store at present, or why it cannot be read.
    pub(super) stored: Result<Option<StoredOverride>, String>,
}

/// A policy whose key cannot be formed from the given values, and why.
#[derive(Debug)]
pub(super) struct SkippedPolicy<'t> {
    pub(super) policy: &'t Policy,
    pub(super) reason: String,
}

/// Sorts the policies with limits into those that the values fit, and the others. `name` selects
/// one policy.
///
/// # Errors
/// A message for the user if the selected policy does not exist, or if no policy fits.
pub(super) fn select_policies<'t>(
    table: &'t PolicyTable,
    name: Option<&str>,
    values: &[String],
) -> Result<(Vec<SearchedPolicy<'t>>, Vec<SkippedPolicy<'t>>), String> {
    if let Some(name) = name {
        find_limiting_policy(table, name).map_err(|error| error.to_string())?;
    }
    let (mut searched, mut skipped) = (Vec::new(), Vec::new());
    for policy in table.policies() {
        let PolicyAction::Limit(quota) = &policy.action else {
            continue;
        };
        if name.is_some_and(|name| *policy.name != *name) {
            continue;
        }
        match SearchedPolicy::new(table, policy, quota, values) {
            Ok(fits) => searched.push(fits),
            Err(reason) => skipped.push(SkippedPolicy { policy, reason }),
        }
    }
    if searched.is_empty() {
        let reasons: Vec<String> = skipped
            .iter()
            .map(|one| format!("\n  {}: {}", one.policy.name, one.reason))
            .collect();
        return Err(format!(
            "the values of --key fit no policy with limits{}",
            reasons.concat()
        ));
    }
    Ok((searched, skipped))
}

impl<'t> SearchedPolicy<'t> {
    /// Assigns the values to the positions of the policy's key: to all of them, or only to those
    /// that the lines of the log do not contain.
    fn new(
        table: &'t PolicyTable,
        policy: &'t Policy,
        quota: &'t Quota,
        given: &[String],
    ) -> Result<Self, String> {
        let positions = quota.key.value_count();
        let is_given = |at: usize| {
            given.len() == positions || !quota.key.part_at(at).is_some_and(is_logged_part)
        };
        let values =
            (given.len() == (0..positions).filter(|at| is_given(*at)).count()).then(|| {
                let mut given = given.iter().cloned();
                let value_at = |at| is_given(at).then(|| given.next()).flatten();
                (0..positions).map(value_at).collect()
            });
        let mut searched = Self {
            table,
            policy,
            quota,
            part_ids: Vec::new(),
            resolved: None,
            stored: Ok(None),
            values,
        };
        if given.len() < positions {
            let ids_of = |value: &String| {
                (0..positions)
                    .map(|at| searched.part_id(value, at))
                    .collect()
            };
            searched.part_ids = given.iter().map(ids_of).collect();
        }
        let is_part = |ids: &Vec<Option<u64>>| ids.iter().any(Option::is_some);
        if searched.values.is_none()
            && (searched.part_ids.is_empty() || !searched.part_ids.iter().all(is_part))
        {
            if positions == 0 {
                return Err("it counts all requests together".to_owned());
            }
            let words = quota.key.describe_positions().join(", ");
            let positions = count_noun(positions as u64, "value");
            return Err(format!("its key has {positions} ({words})"));
        }
        let complete = |values: &Vec<Option<String>>| values.iter().cloned().collect();
        let complete: Option<Vec<String>> = searched.values.as_ref().and_then(complete);
        let resolved = complete.map(|values| resolve_key(table, &policy.name, &values));
        searched.resolved = resolved.transpose().map_err(|error| error.to_string())?;
        Ok(searched)
    }

    /// The hash of a value at a position of the key.
    fn part_id(&self, value: &str, position: usize) -> Option<u64> {
        let mut values = vec![String::new(); self.quota.key.value_count()];
        value.clone_into(values.get_mut(position)?);
        self.build_key(&values)?.value_ids().get(position).copied()
    }

    /// The positions of the given values in the key of a logged request, if they are a part of it.
    pub(super) fn matched_positions(&self, request: &LoggedRequest) -> Option<Vec<usize>> {
        let mut logged = request.key_parts.iter().enumerate();
        let mut find = |ids: &Vec<Option<u64>>| {
            let is_id = |(at, id): &(usize, &u64)| ids.get(*at) == Some(&Some(**id));
            logged.find(is_id).map(|(at, _)| at)
        };
        let is_partial = !self.part_ids.is_empty();
        is_partial.then(|| self.part_ids.iter().map(&mut find).collect())?
    }

    /// Whether a refusal without the hashes of its key's values may be of the client.
    pub(super) fn is_undecided(&self, request: &LoggedRequest) -> bool {
        match self.values {
            Some(_) => request.key_id.is_none() && self.read_logged_key_id(request).is_none(),
            None => request.key_parts.is_empty(),
        }
    }

    /// Whether a logged request has the client's key in this policy, or the given part of a key. A
    /// line about a request that no limit decided has no key; it counts if it contains all values
    /// of the policy's key.
    pub(super) fn has_key_of(&self, request: &LoggedRequest) -> bool {
        if self.matched_positions(request).is_some() {
            return true;
        }
        let wanted = self.wanted_key_id(request);
        let logged = request.key_id.or_else(|| self.read_logged_key_id(request));
        wanted.is_some() && wanted == logged
    }

    /// Whether a request that this shadow policy refused has the client's key; `None` if its line
    /// does not show that. The line has the key of an enforced policy, which shows the client if
    /// that policy is one of `searched` and has the same key.
    pub(super) fn is_shadow_refusal_of_key(
        &self,
        request: &LoggedRequest,
        searched: &[Self],
    ) -> Option<bool> {
        if let Some(logged) = self.read_logged_key_id(request) {
            return Some(self.wanted_key_id(request) == Some(logged));
        }
        let limit = request.limit.as_deref()?;
        let enforced = searched.iter().filter(|other| {
            let has_same_key = other.policy.mode != PolicyMode::Shadow
                && other.quota.key.parts().eq(self.quota.key.parts());
            has_same_key && other.find_limit(limit).is_some()
        });
        enforced.map(|other| other.has_key_of(request)).max()
    }

    /// The key, if all its values are given.
    pub(super) fn key(&self) -> Option<&Key> {
        self.resolved.as_ref().map(|resolved| &resolved.key)
    }

    /// The client's key, with the values that each line contains taken from this one.
    fn wanted_key_id(&self, request: &LoggedRequest) -> Option<u128> {
        match self.key() {
            Some(key) => Some(key.id()),
            None => self.key_id_from_line(request, self.values.as_ref()?),
        }
    }

    fn read_logged_key_id(&self, request: &LoggedRequest) -> Option<u128> {
        self.key_id_from_line(request, &vec![None; self.quota.key.value_count()])
    }

    /// The parts of the key at these positions.
    pub(super) fn describe_positions(&self, positions: &[usize]) -> Vec<String> {
        let all = self.quota.key.describe_positions();
        let described = positions.iter().filter_map(|at| all.get(*at).cloned());
        described.collect()
    }

    /// What an override does with the key at present, if there is one.
    pub(super) fn describe_override(&self) -> Option<String> {
        let by_file = match self.resolved.as_ref().map(|resolved| resolved.rule) {
            Some(OverrideRule::Allow) => Some("exempt"),
            Some(OverrideRule::Deny) => Some("denied"),
            Some(OverrideRule::Off) => Some("off for this key"),
            Some(OverrideRule::Limit(_)) | None => None,
        };
        if let Some(word) = by_file {
            return Some(format!("now {word} by an override of the configuration"));
        }
        match &self.stored {
            Ok(stored) => Some(format!("now {}", describe_override(stored.as_ref()?))),
            Err(error) => Some(format!("its override cannot be read: {error}")),
        }
    }

    /// The limit of this name that applies to the key.
    pub(super) fn find_limit(&self, name: &str) -> Option<&'t NamedLimit> {
        let of_key = self.resolved.iter().flat_map(|resolved| resolved.limits);
        let all = self.quota.overrides.as_slice().iter();
        let all = all.flat_map(|one| &one.limits);
        let mut limits = of_key.chain(&self.quota.limits).chain(all);
        limits.find(|limit| *limit.name == *name)
    }

    /// The key with the values that are known, and the others from a line; `None` if the line lacks
    /// one.
    fn key_id_from_line(&self, request: &LoggedRequest, known: &[Option<String>]) -> Option<u128> {
        let mut values = Vec::with_capacity(known.len());
        for part in self.quota.key.parts() {
            let end = values.len() + count_values(part);
            let known_values = known.get(values.len()..end)?;
            match known_values.iter().cloned().collect::<Option<Vec<_>>>() {
                Some(part_values) => values.extend(part_values),
                None => values.extend(self.read_logged_values(part, request)?),
            }
        }
        self.build_key(&values).map(|key| key.id())
    }

    /// The values of a part, as a line contains them.
    fn read_logged_values(&self, part: &KeyPart, request: &LoggedRequest) -> Option<Vec<String>> {
        let value = match part {
            KeyPart::ClientIp => request.client_ip?.to_string(),
            KeyPart::Method => request.method.clone(),
            KeyPart::Host => request.host.clone(),
            KeyPart::WholePath => request.path.clone(),
            KeyPart::Const(text) => text.to_string(),
            KeyPart::PathCaptures(pattern) => {
                let paths = PathInterpretations::parse(&request.path, &self.table.path).ok()?;
                let captured = paths.iter().find_map(|path| {
                    let values = pattern.captured_segments(path)?;
                    Some(values.into_iter().map(str::to_owned).collect())
                });
                let absent = || vec![String::new(); count_values(part)];
                return Some(captured.unwrap_or_else(absent));
            }
            _ => return None,
        };
        Some(vec![value])
    }

    fn build_key(&self, values: &[String]) -> Option<Key> {
        let resolved = resolve_key(self.table, &self.policy.name, values);
        resolved.ok().map(|resolved| resolved.key)
    }
}

/// Whether each line of the access log contains the values of a part.
fn is_logged_part(part: &KeyPart) -> bool {
    matches!(
        part,
        KeyPart::ClientIp
            | KeyPart::Method
            | KeyPart::Host
            | KeyPart::WholePath
            | KeyPart::PathCaptures(_)
            | KeyPart::Const(_)
    )
}

fn count_values(part: &KeyPart) -> usize {
    match part {
        KeyPart::PathCaptures(pattern) => pattern.capture_count(),
        _ => 1,
    }
}
