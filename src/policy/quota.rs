//! Selection of the key and the limits that a request is charged against.

use super::{
    CostSource, Descriptor, Facts, KeyContext, KeyDigests, KeyError, KeyTemplate, KeyValues,
    LimitOverrides, MissingKeyAction, NamedLimit, SelectedLimits, client, path,
};
use crate::limiter::{CounterScope, Key, LeaseTerms, Limit, ListedValue};
use crate::text::count_noun;

/// The key, cost and limits of a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Quota {
    pub key: KeyTemplate,
    pub missing_key: MissingKeyAction,
    pub cost: CostSource,
    /// The limits of the policy, never empty.
    pub limits: Vec<NamedLimit>,
    /// How long a key stays blocked after a rejection ([`Algorithm::Block`]). With `count_when`,
    /// only if the response counter is full.
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

impl Quota {
    /// All limits, including those of overrides.
    pub fn all_limits(&self) -> impl Iterator<Item = &NamedLimit> + Clone {
        let overridden = self.overrides.as_slice().iter();
        let overridden = overridden.flat_map(|entry| &entry.limits);
        self.limits.iter().chain(overridden)
    }

    /// Whether each instance counts for itself, in its memory.
    pub fn is_instance_scoped(&self) -> bool {
        self.key.scope == CounterScope::Instance
    }

    /// Whether the limits have response counters, which start the block (`count_when` with
    /// `block_for`).
    pub fn counts_responses(&self) -> bool {
        self.block.is_some() && self.cost.depends_on_status()
    }

    /// Returns the key and the limits for one request or descriptor of policy `name`, or `None` if
    /// the policy skips it. A descriptor's own limit replaces those of the policy. The key then
    /// includes the whole descriptor, so that no other descriptor shares the quota.
    ///
    /// # Errors
    /// Returns a [`KeyError`] if the request cannot be keyed.
    pub fn key_and_limits_for_facts<'t>(
        &'t self,
        name: &str,
        (facts, descriptor): (&Facts<'_>, Option<&'t Descriptor<'t>>),
        context: &KeyContext<'_>,
        digests: &mut KeyDigests<'t>,
    ) -> Result<Option<(Key, SelectedLimits<'t>)>, KeyError> {
        let own_limits = descriptor.and_then(|one| one.resolve_override_limit(name, &self.limits));
        let mut values = self.key.extract_values(facts, context, self.missing_key)?;
        if self.missing_key == MissingKeyAction::Skip && values.iter().any(Option::is_none) {
            return Ok(None);
        }
        let (Some(descriptor), Some(limits)) = (descriptor, own_limits) else {
            return Ok(Some(self.key_and_limits(name, &values, digests)));
        };
        // This key has one value more than the template has parts, so it cannot equal a key that is
        // built from the template alone.
        values.push(Some(descriptor.canonical_text().into_bytes().into()));
        let key = self.key.build_key(name, &values, digests);
        Ok(Some((key, SelectedLimits::from_policy(limits))))
    }

    /// Returns the key and the limits for explicit values, one per position. An empty text stands
    /// for an absent value. `parse` is [`ListedValue::Plain`], or [`ListedValue::parse`] for values
    /// as lists of overrides show them, also digests.
    ///
    /// # Errors
    /// Returns a message that states which values are wrong.
    pub fn key_and_limits_for_values<'t>(
        &'t self,
        name: &str,
        values: &[String],
        (client, path): (&client::Settings, &path::Settings),
        parse: impl Fn(&str) -> ListedValue<'_>,
    ) -> Result<(Key, SelectedLimits<'t>), String> {
        let width = self.key.value_count();
        if values.len() != width {
            let parts: Vec<String> = self.key.parts().map(ToString::to_string).collect();
            let parts = if parts.is_empty() {
                String::new()
            } else {
                format!(" ({})", parts.join(", "))
            };
            return Err(format!(
                "the key of {name} has {}{parts}, not {}",
                count_noun(width as u64, "value"),
                values.len()
            ));
        }
        let mut builder = self.key.start_key(name);
        let mut compared = KeyValues::new();
        for (position, text) in values.iter().enumerate() {
            let value = self.key.push_listed_value(
                &mut builder,
                (position, text),
                (client, path),
                &parse,
            )?;
            compared.push(value.map(|value| value.into_string().into_bytes().into()));
        }
        let key = builder.finish();
        let selected = self.select_limits(&key, &compared);
        Ok((key, selected))
    }

    /// Keeps all limits out of responses to clients.
    pub fn hide_limits(&mut self) {
        for named in self.limits.iter_mut().chain(self.overrides.limits_mut()) {
            named.is_reported = false;
        }
    }

    pub(super) fn key_and_limits<'t>(
        &'t self,
        name: &str,
        values: &KeyValues<'_>,
        digests: &mut KeyDigests<'t>,
    ) -> (Key, SelectedLimits<'t>) {
        let key = self.key.build_key(name, values, digests);
        let selected = self.select_limits(&key, values);
        (key, selected)
    }

    fn select_limits(&self, key: &Key, values: &KeyValues<'_>) -> SelectedLimits<'_> {
        let found = self.overrides.find_override(key, values);
        let Some(found) = found else {
            return SelectedLimits::from_policy(&self.limits);
        };
        SelectedLimits {
            limits: if found.limits.is_empty() {
                &self.limits
            } else {
                &found.limits
            },
            rule: found.rule,
        }
    }
}
