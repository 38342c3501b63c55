//! Selection of the key and the limits that a request is charged against.

use super::{
    CostSource, Descriptor, Facts, KeyContext, KeyDigests, KeyError, KeyTemplate, KeyValues,
    MissingKeyAction, NamedLimit, client, path,
};
use crate::limiter::{Key, LeaseTerms, Limit};
use foldhash::HashMap;
use std::fmt;

/// The key, cost and limits of a policy.
#[derive(Clone, Debug)]
pub struct Quota {
    pub key: KeyTemplate,
    pub missing_key: MissingKeyAction,
    pub cost: CostSource,
    /// The limits of the policy, never empty.
    pub limits: Vec<NamedLimit>,
    /// How long a key stays blocked after one of the limits rejected it ([`Algorithm::Block`]).
    ///
    /// [`Algorithm::Block`]: crate::limiter::Algorithm::Block
    pub block: Option<Limit>,
    /// Whether requests that the policy rejects are charged too ([`ChargeEffect::ChargeRejected`]).
    ///
    /// [`ChargeEffect::ChargeRejected`]: crate::limiter::ChargeEffect::ChargeRejected
    pub count_rejected: bool,
    /// Number of counters, spread over a Redis cluster, for each key. 1 means that keys are not
    /// sharded.
    pub shards: u16,
    /// Settings for leasing units in advance; `None` disables leases.
    pub lease: Option<LeaseTerms>,
    pub overrides: LimitOverrides,
    /// Whether overrides of single keys in the store apply (`dynamic`).
    pub is_dynamic: bool,
}

/// Overrides of the limits for certain keys. The first matching entry replaces all limits of the
/// policy.
#[derive(Clone, Default)]
pub struct LimitOverrides {
    entries: Vec<LimitOverride>,
    /// Index of the entries without a wildcard, by [`Key::id`]. The lookup time must not grow with
    /// the number of entries, which may be thousands.
    exact_by_key_id: HashMap<u128, usize>,
    /// Indices of the entries with a wildcard, in file order.
    wildcard_indices: Vec<usize>,
}

/// One entry of [`LimitOverrides`].
#[derive(Clone, Debug)]
pub struct LimitOverride {
    /// One value per key position (see [`KeyTemplate::value_count`]); `None` matches any value.
    pub values: Vec<Option<Box<str>>>,
    pub limits: Vec<NamedLimit>,
}

impl Quota {
    /// Returns the key and the limits for one request of policy `name`, or `None` if the policy
    /// skips the request.
    ///
    /// # Errors
    /// Returns a [`KeyError`] if the request cannot be keyed.
    pub fn key_and_limits_for_request<'t>(
        &'t self,
        name: &str,
        facts: &Facts<'_>,
        context: &KeyContext<'_>,
        digests: &mut KeyDigests<'t>,
    ) -> Result<Option<(Key, &'t [NamedLimit])>, KeyError> {
        let values = self.key.extract_values(facts, context, self.missing_key)?;
        if self.missing_key == MissingKeyAction::Skip && values.iter().any(Option::is_none) {
            return Ok(None);
        }
        Ok(Some(self.key_and_limits(name, &values, digests)))
    }

    /// Returns the key and the limits for one descriptor of a rate-limit call. A descriptor's own
    /// limit replaces those of the policy. The key then includes the whole descriptor, so that no
    /// other descriptor shares the quota.
    ///
    /// # Errors
    /// Same as [`Quota::key_and_limits_for_request`].
    pub fn key_and_limits_for_descriptor<'t>(
        &'t self,
        name: &str,
        descriptor: &'t Descriptor<'t>,
        context: &KeyContext<'_>,
        digests: &mut KeyDigests<'t>,
    ) -> Result<Option<(Key, &'t [NamedLimit])>, KeyError> {
        let facts = Facts::from_descriptor(descriptor);
        let Some(limits) = descriptor.resolve_override_limit(name, &self.limits) else {
            return self.key_and_limits_for_request(name, &facts, context, digests);
        };
        let mut values = self.key.extract_values(&facts, context, self.missing_key)?;
        if self.missing_key == MissingKeyAction::Skip && values.iter().any(Option::is_none) {
            return Ok(None);
        }
        // This key has one value more than the template has parts, so it cannot equal a key that is
        // built from the template alone.
        values.push(Some(descriptor.canonical_text().into_bytes().into()));
        Ok(Some((self.key.build_key(name, &values, digests), limits)))
    }

    /// Returns the key and the limits for explicit values, one per position. An empty text stands
    /// for an absent value.
    ///
    /// # Errors
    /// Returns a message that states which values are wrong.
    pub fn key_and_limits_for_values<'t>(
        &'t self,
        name: &str,
        values: &[String],
        client: &client::Settings,
        path: &path::Settings,
    ) -> Result<(Key, &'t [NamedLimit]), String> {
        let width = self.key.value_count();
        if values.len() != width {
            let parts: Vec<String> = self.key.parts().iter().map(ToString::to_string).collect();
            let parts = if parts.is_empty() {
                String::new()
            } else {
                format!(" ({})", parts.join(", "))
            };
            return Err(format!(
                "the key of {name} has {width} values{parts}, not {}",
                values.len()
            ));
        }
        let values: Vec<Box<str>> = values
            .iter()
            .enumerate()
            .map(|(position, text)| match text.as_str() {
                "" => Ok("".into()),
                text => self.key.canonicalize_value(position, text, client, path),
            })
            .collect::<Result<_, _>>()?;
        let values = values
            .iter()
            .map(|text| Some(text.as_bytes().into()).filter(|_| !text.is_empty()));
        let mut digests = KeyDigests::default();
        Ok(self.key_and_limits(name, &values.collect(), &mut digests))
    }

    /// [`Self::key_and_limits_for_values`], where a value may also be a digest as lists of
    /// overrides show it.
    ///
    /// # Errors
    /// As [`Self::key_and_limits_for_values`].
    pub fn key_and_limits_for_listed_values<'t>(
        &'t self,
        name: &str,
        values: &[String],
        client: &client::Settings,
        path: &path::Settings,
    ) -> Result<(Key, &'t [NamedLimit]), String> {
        if values.len() != self.key.value_count() {
            return self.key_and_limits_for_values(name, values, client, path);
        }
        let mut builder = self.key.start_key(name);
        let mut extracted = KeyValues::new();
        for (position, text) in values.iter().enumerate() {
            let value = self
                .key
                .push_listed_value(&mut builder, position, text, client, path)?;
            extracted
                .push(Some(value.into_string().into_bytes().into()).filter(|_| !text.is_empty()));
        }
        let key = builder.finish();
        let limits = self.overrides.find_limits(&key, &extracted);
        let limits = limits.unwrap_or(&self.limits);
        Ok((key, limits))
    }

    /// Keeps all limits out of responses to clients.
    pub fn hide_limits(&mut self) {
        let overridden = self.overrides.entries.iter_mut();
        let overridden = overridden.flat_map(|entry| &mut entry.limits);
        for named in self.limits.iter_mut().chain(overridden) {
            named.is_reported = false;
        }
    }

    pub(super) fn key_and_limits<'t>(
        &'t self,
        name: &str,
        values: &KeyValues<'_>,
        digests: &mut KeyDigests<'t>,
    ) -> (Key, &'t [NamedLimit]) {
        let key = self.key.build_key(name, values, digests);
        let limits = self
            .overrides
            .find_limits(&key, values)
            .unwrap_or(&self.limits);
        (key, limits)
    }
}

impl LimitOverrides {
    /// Creates the overrides of policy `name` with this key.
    pub fn new(name: &str, key: &KeyTemplate, entries: Vec<LimitOverride>) -> Self {
        let mut overrides = Self {
            entries,
            exact_by_key_id: HashMap::default(),
            wildcard_indices: Vec::new(),
        };
        for (index, entry) in overrides.entries.iter().enumerate() {
            match entry
                .values
                .iter()
                .map(|value| value.as_deref().map(str::as_bytes))
                .collect::<Option<Vec<_>>>()
            {
                Some(values) => {
                    let values = values.into_iter().map(|value| Some(value.into())).collect();
                    let id = key
                        .build_key(name, &values, &mut KeyDigests::default())
                        .id();
                    overrides.exact_by_key_id.entry(id).or_insert(index);
                }
                None => overrides.wildcard_indices.push(index),
            }
        }
        overrides
    }

    pub fn as_slice(&self) -> &[LimitOverride] {
        &self.entries
    }

    fn find_limits(&self, key: &Key, values: &KeyValues<'_>) -> Option<&[NamedLimit]> {
        if self.entries.is_empty() {
            return None;
        }
        let exact = self.exact_by_key_id.get(&key.id()).copied();
        let wild = self.wildcard_indices.iter().copied().find(|index| {
            self.entries
                .get(*index)
                .is_some_and(|entry| entry.matches_values(values))
        });
        let first = match (exact, wild) {
            (Some(exact), Some(wild)) => exact.min(wild),
            (one, other) => one.or(other)?,
        };
        self.entries.get(first).map(|entry| entry.limits.as_slice())
    }
}

/// Prints only the entries: the index maps have no stable order, and equal overrides must print
/// equally.
impl fmt::Debug for LimitOverrides {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.entries.fmt(f)
    }
}

impl LimitOverride {
    fn matches_values(&self, values: &KeyValues<'_>) -> bool {
        self.values.len() == values.len()
            && self
                .values
                .iter()
                .zip(values)
                .all(|(wanted, value)| match (wanted, value) {
                    (None, _) => true,
                    (Some(wanted), Some(value)) => wanted.as_bytes() == &**value,
                    (Some(wanted), None) => wanted.is_empty(),
                })
    }
}
