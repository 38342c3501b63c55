//! How much a policy allows, to whom.

use super::{Cost, Descriptor, Facts, KeyFault, KeyTemplate, KeyValues, MissingKey, client, path};
use crate::limiter::{Key, KeyBuilder, Lease, Limit};
use foldhash::HashMap;
use std::fmt;

/// Whose quota a request uses, and how much there is of it.
#[derive(Clone, Debug)]
pub struct Quota {
    pub key: KeyTemplate,
    pub missing_key: MissingKey,
    pub cost: Cost,
    /// At least one.
    pub limits: Vec<NamedLimit>,
    /// How long a key stays closed once one of the limits has refused it ([`Algorithm::Block`]).
    ///
    /// [`Algorithm::Block`]: crate::limiter::Algorithm::Block
    pub block: Option<Limit>,
    /// What the policy refuses uses its limits too ([`Effect::Press`]).
    ///
    /// [`Effect::Press`]: crate::limiter::Effect::Press
    pub count_rejected: bool,
    /// Over how many counters of a cluster each key is spread; 1: it isn't.
    pub shards: u16,
    /// How it takes units in advance, if it does.
    pub lease: Option<Lease>,
    pub overrides: Overrides,
}

/// A limit with its name in the rate-limit fields.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedLimit {
    pub name: Box<str>,
    /// What is counted, when it isn't requests.
    pub unit: Option<Box<str>>,
    pub limit: Limit,
}

/// Limits of their own for some keys. The first that fits replaces all limits of the policy.
#[derive(Clone, Default)]
pub struct Overrides {
    list: Vec<Override>,
    /// Those without a wildcard, by [`Key::id`]: thousands of them must not make a request slower.
    exact: HashMap<u128, usize>,
    /// Those with one, in order.
    wild: Vec<usize>,
}

/// One entry of [`Overrides`].
#[derive(Clone, Debug)]
pub struct Override {
    /// One per key position (see [`KeyTemplate::width`]); `None` matches any value.
    pub values: Vec<Option<Box<str>>>,
    pub limits: Vec<NamedLimit>,
}

impl Quota {
    /// The key and limits that one request of policy `name` uses; `None` if the policy skips it.
    ///
    /// # Errors
    /// A [`KeyFault`] for a request that cannot be keyed.
    pub fn select<'t>(
        &'t self,
        name: &str,
        facts: &Facts<'_>,
        client: &client::Settings,
    ) -> Result<Option<(Key, &'t [NamedLimit])>, KeyFault> {
        let values = self.key.values(facts, client, self.missing_key)?;
        if self.missing_key == MissingKey::Skip && values.iter().any(Option::is_none) {
            return Ok(None);
        }
        Ok(Some(self.of(name, &values)))
    }

    /// The same for a descriptor, which may bring a limit along. Then that is the limit, and nobody else's: the whole
    /// descriptor is part of its key.
    ///
    /// # Errors
    /// As [`Quota::select`].
    pub fn select_for<'t>(
        &'t self,
        name: &str,
        descriptor: &'t Descriptor<'t>,
        client: &client::Settings,
    ) -> Result<Option<(Key, &'t [NamedLimit])>, KeyFault> {
        let facts = Facts::of(descriptor);
        let Some(limits) = descriptor.own_limit(name, &self.limits) else {
            return self.select(name, &facts, client);
        };
        let mut values = self.key.values(&facts, client, self.missing_key)?;
        if self.missing_key == MissingKey::Skip && values.iter().any(Option::is_none) {
            return Ok(None);
        }
        // One more than the policy's key has: it meets none of the others.
        values.push(Some(descriptor.text().into_bytes().into()));
        Ok(Some((framed(name, &values), limits)))
    }

    /// The key and limits that belong to values given by hand, one per position; an empty text is an absent
    /// value.
    ///
    /// # Errors
    /// A sentence that says what is wrong with the values.
    pub fn select_by_hand<'t>(
        &'t self,
        name: &str,
        values: &[String],
        client: &client::Settings,
        path: &path::Settings,
    ) -> Result<(Key, &'t [NamedLimit]), String> {
        let width = self.key.width();
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
                text => self.key.canonical_value(position, text, client, path),
            })
            .collect::<Result<_, _>>()?;
        let values = values
            .iter()
            .map(|text| Some(text.as_bytes().into()).filter(|_| !text.is_empty()));
        Ok(self.of(name, &values.collect()))
    }

    fn of(&self, name: &str, values: &KeyValues<'_>) -> (Key, &[NamedLimit]) {
        let key = framed(name, values);
        let limits = self.overrides.find(&key, values).unwrap_or(&self.limits);
        (key, limits)
    }
}

impl Overrides {
    /// Those of policy `name`.
    pub fn new(name: &str, list: Vec<Override>) -> Self {
        let mut overrides = Self {
            list,
            exact: HashMap::default(),
            wild: Vec::new(),
        };
        for (at, entry) in overrides.list.iter().enumerate() {
            match entry
                .values
                .iter()
                .map(|value| value.as_deref().map(str::as_bytes))
                .collect::<Option<Vec<_>>>()
            {
                Some(values) => {
                    let id = framed(
                        name,
                        &values.into_iter().map(|value| Some(value.into())).collect(),
                    )
                    .id();
                    overrides.exact.entry(id).or_insert(at);
                }
                None => overrides.wild.push(at),
            }
        }
        overrides
    }

    pub fn list(&self) -> &[Override] {
        &self.list
    }

    fn find(&self, key: &Key, values: &KeyValues<'_>) -> Option<&[NamedLimit]> {
        if self.list.is_empty() {
            return None;
        }
        let exact = self.exact.get(&key.id()).copied();
        let wild = self
            .wild
            .iter()
            .copied()
            .find(|at| self.list.get(*at).is_some_and(|entry| entry.fits(values)));
        let first = match (exact, wild) {
            (Some(exact), Some(wild)) => exact.min(wild),
            (one, other) => one.or(other)?,
        };
        self.list.get(first).map(|entry| entry.limits.as_slice())
    }
}

/// What was written, and nothing of what is derived from it in no certain order: equal overrides read alike.
impl fmt::Debug for Overrides {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.list.fmt(f)
    }
}

impl Override {
    fn fits(&self, values: &KeyValues<'_>) -> bool {
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

fn framed(name: &str, values: &KeyValues<'_>) -> Key {
    let mut builder = KeyBuilder::new(name);
    for value in values {
        builder.part(value.as_deref());
    }
    builder.finish()
}
