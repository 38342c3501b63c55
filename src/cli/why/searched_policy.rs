//! The policies that may have limited a client, and the hash of the client's key in each.

use super::log_record::LoggedRequest;
use crate::app::key_status::resolve_key;
use crate::limiter::Key;
use crate::policy::path::PathInterpretations;
use crate::policy::{KeyPart, NamedLimit, Policy, PolicyAction, PolicyMode, PolicyTable, Quota};

/// A policy whose key fits the given values.
#[derive(Debug)]
pub(super) struct SearchedPolicy<'t> {
    table: &'t PolicyTable,
    pub(super) policy: &'t Policy,
    pub(super) quota: &'t Quota,
    /// One value per position of the key; `None` where each request's line has it.
    values: Vec<Option<String>>,
    /// The key, if all its values are given.
    pub(super) key: Option<Key>,
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
        // An unknown policy is reported with the names of all policies.
        let is_known = table.policies().iter().any(|policy| *policy.name == *name);
        if !is_known {
            resolve_key(table, name, values).map_err(|error| error.to_string())?;
        }
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
        let parts: Vec<Option<&KeyPart>> = (0..positions).map(|at| quota.key.part_at(at)).collect();
        let is_given = |part: &Option<&KeyPart>| !part.is_some_and(is_logged_part);
        let values: Vec<Option<String>> = if given.len() == positions {
            given.iter().cloned().map(Some).collect()
        } else if given.len() == parts.iter().filter(|part| is_given(part)).count() {
            let mut given = given.iter().cloned();
            let assigned = parts.iter().map(|part| match part {
                part if is_given(part) => given.next(),
                _ => None,
            });
            assigned.collect()
        } else {
            let words = quota.key.describe_positions().join(", ");
            return Err(format!("its key has {positions} values ({words})"));
        };
        let mut searched = Self {
            table,
            policy,
            quota,
            values,
            key: None,
        };
        let complete: Option<Vec<String>> = searched.values.iter().cloned().collect();
        if let Some(values) = complete {
            searched.key = Some(searched.build_key(&values)?);
        }
        Ok(searched)
    }

    /// Whether a logged request has the client's key in this policy. A line about a request that no
    /// limit decided has no key; it counts if it contains all values of the policy's key.
    pub(super) fn has_key_of(&self, request: &LoggedRequest) -> bool {
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
                && other.quota.key.parts() == self.quota.key.parts();
            has_same_key && other.find_limit(limit).is_some()
        });
        enforced.map(|other| other.has_key_of(request)).max()
    }

    /// Whether the line of a request contains all values of the policy's key.
    pub(super) fn is_key_in_line(&self, request: &LoggedRequest) -> bool {
        self.read_logged_key_id(request).is_some()
    }

    /// The client's key, with the values that each line contains taken from this one.
    fn wanted_key_id(&self, request: &LoggedRequest) -> Option<u128> {
        match &self.key {
            Some(key) => Some(key.id()),
            None => self.key_id_from_line(request, &self.values),
        }
    }

    fn read_logged_key_id(&self, request: &LoggedRequest) -> Option<u128> {
        self.key_id_from_line(request, &vec![None; self.values.len()])
    }

    /// The limit of this name that applies to the key.
    pub(super) fn find_limit(&self, name: &str) -> Option<&'t NamedLimit> {
        let overrides = self.quota.overrides.as_slice();
        let all = overrides.iter().flat_map(|one| &one.limits);
        let mut limits = self
            .limits_of_key()
            .iter()
            .chain(&self.quota.limits)
            .chain(all);
        limits.find(|limit| *limit.name == *name)
    }

    fn limits_of_key(&self) -> &'t [NamedLimit] {
        let complete: Option<Vec<String>> = self.values.iter().cloned().collect();
        complete
            .and_then(|values| resolve_key(self.table, &self.policy.name, &values).ok())
            .map_or(&[], |resolved| resolved.limits)
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
        self.build_key(&values).ok().map(|key| key.id())
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

    fn build_key(&self, values: &[String]) -> Result<Key, String> {
        resolve_key(self.table, &self.policy.name, values)
            .map(|resolved| resolved.key)
            .map_err(|error| error.to_string())
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
