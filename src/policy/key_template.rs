//! Key templates: the values of a request that form its rate-limit key.

use super::key_part::{KeyComponent, KeyPart};
use super::part_values::{KeyContext, KeyValues};
use super::value_hasher::{ValueDigests, ValueHasher};
use super::value_pattern::{
    ValuePattern, canonicalize_part_value, canonicalize_piece, check_pattern_end,
    split_at_wildcards,
};
use super::{Facts, KeyError, client, path};
use crate::limiter::{CounterScope, Key, KeyBuilder, ListedValue, SOURCES_BYTES};
use sha2::{Digest, Sha256};
use std::borrow::Cow;
use strum::{EnumString, VariantNames};

/// The parts of a policy's key, in order. An empty template gives all matching requests one quota.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyTemplate {
    components: Vec<KeyComponent>,
    hasher: ValueHasher,
    /// Digest of the sources of the values. Keys of `client_ip` only have none, which keeps
    /// counters from 767e699. A part with alternatives stores a source label per value instead.
    sources: Option<[u8; SOURCES_BYTES]>,
    /// Where the counters of the keys are.
    pub scope: CounterScope,
    /// Replaces the policy's name in keys if the policy shares its counters.
    counter: Option<Box<str>>,
}

/// Precedes the name of a shared counter in keys. No name of a policy begins with it.
const SHARED_COUNTER_MARK: &str = "@";

/// The action if a part is absent or empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum MissingKeyAction {
    /// All requests without the part share one quota.
    Shared,
    /// The policy does not apply to requests without the part.
    Skip,
    /// Requests without the part are rejected.
    Reject,
}

impl KeyTemplate {
    /// A template without hashed parts.
    pub fn new(parts: Vec<KeyPart>) -> Self {
        let components = parts.into_iter().map(|part| KeyComponent {
            part,
            is_hashed: false,
        });
        Self::from_components(components.collect(), ValueHasher::default())
    }

    pub fn from_components(components: Vec<KeyComponent>, hasher: ValueHasher) -> Self {
        // A secret that the key does not use must not make templates differ.
        let is_hashed = components.iter().any(KeyComponent::has_hashed_part);
        Self {
            sources: digest_sources(&components),
            components,
            hasher: if is_hashed {
                hasher
            } else {
                ValueHasher::default()
            },
            scope: CounterScope::Shared,
            counter: None,
        }
    }

    /// Sets the name of the counter that the policy shares with others.
    #[must_use]
    pub fn with_counter(self, name: Option<String>) -> Self {
        let counter = name.map(|name| format!("{SHARED_COUNTER_MARK}{name}").into());
        Self { counter, ..self }
    }

    /// The name of the counter that the policy shares with others.
    pub fn counter_name(&self) -> Option<&str> {
        self.counter.as_deref()?.strip_prefix(SHARED_COUNTER_MARK)
    }

    /// The first part of the keys of policy `name`: that name, or its shared counter.
    pub fn key_namespace<'n>(&'n self, name: &'n str) -> &'n str {
        self.counter.as_deref().unwrap_or(name)
    }

    pub fn has_hashed_part(&self) -> bool {
        self.components.iter().any(KeyComponent::has_hashed_part)
    }

    /// The source of a value at a position. A value of a part with alternatives is split.
    pub fn value_source<'v>(
        &self,
        position: usize,
        value: &'v [u8],
    ) -> Option<(&KeyComponent, &'v [u8])> {
        self.positions().nth(position)?.resolve_source(value)
    }

    /// Builds the key of policy `name` with these values, one per position. A value beyond the last
    /// position may contain the others, so it is hashed if one of them is.
    pub(super) fn build_key<'t>(
        &'t self,
        name: &str,
        values: &KeyValues<'_>,
        digests: &mut ValueDigests<'t>,
    ) -> Key {
        let mut builder = self.start_key(name);
        let mut positions = self.positions();
        for value in values {
            let component = positions.next();
            let value = value.as_deref().filter(|value| !value.is_empty());
            match (component, value) {
                (Some(component), Some(value)) => {
                    self.push_value(&mut builder, component, value, digests)
                }
                (None, Some(value)) if self.has_hashed_part() => {
                    builder.push_digest(&self.hasher.digest(value))
                }
                (_, value) => builder.push_key_value(value),
            }
        }
        builder.finish()
    }

    /// Starts a key of policy `name`, before its first value.
    pub fn start_key(&self, name: &str) -> KeyBuilder {
        let mut builder = KeyBuilder::with_scope(self.key_namespace(name), self.scope);
        if let Some(sources) = self.sources {
            builder.push_sources(sources);
        }
        builder
    }

    fn push_value<'t>(
        &'t self,
        builder: &mut KeyBuilder,
        component: &'t KeyComponent,
        value: &[u8],
        digests: &mut ValueDigests<'t>,
    ) {
        let Some((source, value)) = component.resolve_source(value) else {
            return builder.push_key_value(Some(value));
        };
        if matches!(component.part, KeyPart::Alternatives(_)) {
            builder.push_source_label(source.part.source_label().as_bytes());
        }
        if source.is_hashed {
            builder.push_digest(&digests.digest(&self.hasher, &source.part, value))
        } else {
            builder.push_key_value(Some(value))
        }
    }

    /// Adds a value at a position as operators enter it: empty if absent. After the label, if any,
    /// `parse` reads it. Returns the value in the form that requests have; `None` if it is absent.
    ///
    /// # Errors
    /// As [`Self::canonicalize_value`].
    pub(super) fn push_listed_value(
        &self,
        builder: &mut KeyBuilder,
        (position, text): (usize, &str),
        (client, path): (&client::Settings, &path::Settings),
        parse: impl Fn(&str) -> ListedValue<'_>,
    ) -> Result<Option<Box<str>>, String> {
        let Some(component) = self.positions().nth(position).filter(|_| !text.is_empty()) else {
            builder.push_key_value(Some(text.as_bytes()));
            return Ok(None);
        };
        let plain = match component.split_label(text) {
            None => text.to_owned(),
            Some((label, _, listed)) => match parse(listed) {
                ListedValue::Plain(value) => format!("{label}{value}"),
                ListedValue::Digest(digest) => {
                    if let Some(label) = label.strip_suffix('=') {
                        builder.push_source_label(label.as_bytes());
                    }
                    builder.push_digest(&digest);
                    // Only patterns for any value match a digest.
                    return Ok(Some(text.into()));
                }
            },
        };
        let value = self.canonicalize_value(position, &plain, client, path)?;
        if value.is_empty() {
            builder.push_key_value(None);
            return Ok(None);
        }
        let mut digests = ValueDigests::default();
        self.push_value(builder, component, value.as_bytes(), &mut digests);
        Ok(Some(value))
    }

    /// Each position with its part, and whether the value is hashed.
    fn positions(&self) -> impl Iterator<Item = &KeyComponent> {
        let components = self.components.iter();
        components.flat_map(|one| std::iter::repeat_n(one, one.part.value_count()))
    }

    /// The value at a position in the form in which keys store it: its digest if it is hashed.
    pub(super) fn stored_value<'t>(
        &'t self,
        position: usize,
        value: &[u8],
        digests: &mut ValueDigests<'t>,
    ) -> Vec<u8> {
        match self.value_source(position, value) {
            Some((source, value)) if source.is_hashed => {
                let digest = digests.digest(&self.hasher, &source.part, value);
                [source.part.source_label().as_bytes(), &digest].concat()
            }
            _ => value.to_vec(),
        }
    }

    /// The value at a position for people: a hashed one as keys show it.
    pub fn format_value<'v>(&self, position: usize, value: &'v str) -> Cow<'v, str> {
        let component = self.positions().nth(position);
        match component.and_then(|component| component.split_label(value)) {
            Some((label, source, hashed)) if source.is_hashed && !hashed.is_empty() => {
                let digest = self.hasher.format_value(hashed.as_bytes());
                format!("{label}{digest}").into()
            }
            _ => value.into(),
        }
    }

    /// Describes each position, for messages.
    pub fn describe_positions(&self) -> Vec<String> {
        self.positions().map(|one| one.part.to_string()).collect()
    }

    pub fn components(&self) -> &[KeyComponent] {
        &self.components
    }

    pub fn parts(&self) -> impl Iterator<Item = &KeyPart> {
        self.components.iter().map(|one| &one.part)
    }

    /// All parts, and instead of those with alternatives each alternative.
    pub fn sources(&self) -> impl Iterator<Item = &KeyPart> {
        self.parts().flat_map(KeyPart::alternatives)
    }

    /// The number of values: one per part, and one per capture of a `path:` part.
    pub fn value_count(&self) -> usize {
        self.parts().map(KeyPart::value_count).sum()
    }

    /// The part that supplies the value at a position, counted from 0.
    pub fn part_at(&self, position: usize) -> Option<&KeyPart> {
        self.positions().nth(position).map(|one| &one.part)
    }

    /// Extracts the values of one request.
    ///
    /// # Errors
    /// Returns [`KeyError::Repeated`] if a single-valued part occurs more than once, and an
    /// ambiguity if upstreams may read another value. With [`MissingKeyAction::Reject`], returns
    /// [`KeyError::Missing`] for the first absent value.
    pub fn extract_values<'a>(
        &'a self,
        facts: &Facts<'a>,
        context: &KeyContext<'_>,
        missing: MissingKeyAction,
    ) -> Result<KeyValues<'a>, KeyError> {
        let mut values = KeyValues::new();
        for part in self.parts() {
            let part_start = values.len();
            part.push_values(facts, context, &mut values)?;
            let has_missing_value = || values.iter().skip(part_start).any(Option::is_none);
            if missing == MissingKeyAction::Reject && has_missing_value() {
                return Err(KeyError::Missing(part.to_string()));
            }
        }
        Ok(values)
    }

    /// Parses what an override accepts at this position.
    ///
    /// # Errors
    /// Returns a message that states what is wrong.
    pub fn parse_value_pattern(
        &self,
        position: usize,
        text: &str,
        client: &client::Settings,
        path: &path::Settings,
    ) -> Result<ValuePattern, String> {
        let pieces = split_at_wildcards(text);
        let (first, rest) = match pieces.as_slice() {
            [] => return Ok(ValuePattern::Any),
            [literal] if literal.is_empty() => return Ok(ValuePattern::Exact(Box::default())),
            [literal] => {
                let value = self.canonicalize_value(position, literal, client, path)?;
                return Ok(ValuePattern::Exact(value));
            }
            [first, rest @ ..] => (first, rest),
        };
        let component = self.positions().nth(position);
        let Some(component) = component.filter(|_| text != "*") else {
            return Ok(ValuePattern::Any);
        };
        let split = component.split_label(first);
        let (label, source, start) =
            split.ok_or_else(|| missing_source_error(&component.part, text))?;
        let part = &source.part;
        if let KeyPart::Claim(name) = part {
            name.check_listed_value(start, true)?;
        }
        check_pattern_end(part, text)?;
        let pieces = std::iter::once(start).chain(rest.iter().map(String::as_str));
        let pieces = pieces.map(|piece| canonicalize_piece(part, piece, path));
        let mut pieces = pieces.collect::<Result<Vec<String>, String>>()?;
        if let Some(first) = pieces.first_mut() {
            first.insert_str(0, label);
        }
        Ok(ValuePattern::from_pieces(pieces))
    }

    /// What an override accepts at a position, for people: a hashed value as keys show it.
    pub fn format_pattern(&self, position: usize, pattern: &ValuePattern) -> String {
        match pattern.as_exact() {
            Some(value) => self.format_value(position, value).into_owned(),
            None => pattern.to_text(),
        }
    }

    /// Converts an override's value to the form that requests have at this position.
    ///
    /// # Errors
    /// Returns a message that states what is wrong.
    pub fn canonicalize_value(
        &self,
        position: usize,
        text: &str,
        client: &client::Settings,
        path: &path::Settings,
    ) -> Result<Box<str>, String> {
        let Some(component) = self.positions().nth(position) else {
            return Ok(text.into());
        };
        let split = component.split_label(text);
        let split = split.filter(|(label, _, value)| label.is_empty() || !value.is_empty());
        let (label, source, value) =
            split.ok_or_else(|| missing_source_error(&component.part, text))?;
        let value = canonicalize_part_value(&source.part, value, client, path)?;
        Ok(format!("{label}{value}").into())
    }
}

fn missing_source_error(part: &KeyPart, text: &str) -> String {
    let labels = part.alternatives();
    let labels: Vec<String> = labels
        .map(|one| format!("{}=VALUE", one.source_label()))
        .collect();
    format!(
        "{text:?} does not name its source; expected {}",
        labels.join(" or ")
    )
}

fn digest_sources(components: &[KeyComponent]) -> Option<[u8; SOURCES_BYTES]> {
    let parts = components.iter().map(|one| &one.part);
    let has_own_label =
        |part: &KeyPart| matches!(part, KeyPart::ClientIp | KeyPart::Alternatives(_));
    if parts.clone().all(has_own_label) {
        return None;
    }
    let mut hash = Sha256::new();
    for part in parts {
        let label = part.source_label();
        hash.update(label.len().to_be_bytes());
        hash.update(label.as_bytes());
    }
    hash.finalize().first_chunk().copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Matcher;
    use http::HeaderMap;

    const PATH_SETTINGS: path::Settings = path::Settings {
        case_sensitive: false,
        ..path::Settings::DEFAULT
    };

    #[test]
    fn override_values_are_canonicalized_like_request_values() {
        let client = client::Settings {
            trusted_proxies: Vec::new(),
            ip_header: "x-forwarded-for".parse().unwrap(),
            ipv4_prefix: 24,
            ipv6_prefix: 64,
            nat64_prefixes: Vec::new(),
            value_checks: crate::policy::ValueChecks::ALL,
        };
        let parts = [
            "client_ip",
            "host",
            "path:/{tenant}/**",
            "path",
            "header:authorization",
        ];
        let parts = parts
            .iter()
            .map(|text| KeyPart::parse(text, &PATH_SETTINGS).unwrap());
        let key = KeyTemplate::new(parts.collect());
        let mut headers = HeaderMap::new();
        headers.insert("authorization", "bearer \t alice".parse().unwrap());
        let (headers, paths) = (
            headers,
            path::PathInterpretations::parse("/Caf%c3%a9/x/", &PATH_SETTINGS).unwrap(),
        );
        let facts = Facts {
            host: "a.example",
            paths: &paths,
            headers: &headers,
            client_ip: [10, 1, 2, 3].into(),
            ..Facts::placeholder()
        };
        let context = KeyContext {
            client: &client,
            path: &PATH_SETTINGS,
            matcher: &Matcher::default(),
        };
        let values = key
            .extract_values(&facts, &context, MissingKeyAction::Shared)
            .unwrap();
        for (position, written) in ["10.1.2.9", "A.example.", "café", "/café//x", "BEARER alice"]
            .into_iter()
            .enumerate()
        {
            let canonical = key
                .canonicalize_value(position, written, &client, &PATH_SETTINGS)
                .unwrap();
            assert_eq!(
                values[position].as_deref(),
                Some(canonical.as_bytes()),
                "{written}"
            );
        }
        assert!(
            key.canonicalize_value(3, "no/slash", &client, &PATH_SETTINGS)
                .is_err()
        );
        assert!(
            key.canonicalize_value(4, "Bearer alice bob", &client, &PATH_SETTINGS)
                .is_err()
        );
    }

    proptest::proptest! {
        /// The definition: the first alternative with a value; a repeated one before it is an
        /// error.
        #[test]
        fn the_first_present_alternative_has_the_value(
            tenants in proptest::collection::vec("[ab]?", 0..3),
            users in proptest::collection::vec("[ab]?", 0..3),
        ) {
            let part = KeyComponent::parse("header:x-tenant | query:user|client_ip", &PATH_SETTINGS);
            let key = KeyTemplate::from_components(vec![part.unwrap()], ValueHasher::default());
            let mut headers = HeaderMap::new();
            for tenant in &tenants {
                headers.append("x-tenant", tenant.parse().unwrap());
            }
            let query: Vec<String> = users.iter().map(|user| format!("user={user}")).collect();
            let (query, paths) = (
                query.join("&"),
                path::PathInterpretations::parse("/", &PATH_SETTINGS).unwrap(),
            );
            let client = client::Settings {
                trusted_proxies: Vec::new(),
                ip_header: "x-forwarded-for".parse().unwrap(),
                ipv4_prefix: 32,
                ipv6_prefix: 64,
                nat64_prefixes: Vec::new(),
                value_checks: crate::policy::ValueChecks::ALL,
            };
            let facts = Facts {
                host: "a.example",
                paths: &paths,
                query: Some(&query),
                headers: &headers,
                client_ip: [10, 1, 2, 3].into(),
                ..Facts::placeholder()
            };
            let context = KeyContext {
                client: &client,
                path: &PATH_SETTINGS,
                matcher: &Matcher::default(),
            };
            let found = key.extract_values(&facts, &context, MissingKeyAction::Reject);
            let expected = match (tenants.as_slice(), users.as_slice()) {
                ([_, _, ..], _) => None,
                ([tenant], _) if !tenant.is_empty() => Some(format!("header:x-tenant={tenant}")),
                (_, [_, _, ..]) => None,
                (_, [user]) if !user.is_empty() => Some(format!("query:user={user}")),
                _ => Some("client_ip=10.1.2.3".to_owned()),
            };
            let found = found.ok().and_then(|values| values[0].as_deref().map(<[u8]>::to_vec));
            proptest::prop_assert_eq!(found, expected.map(String::into_bytes));
        }
    }

    /// Only addresses keep the keys of the first versions: all other values name their source.
    #[test]
    fn values_of_other_sources_have_other_keys() {
        let build_key = |parts: &[&str], value: &[u8]| {
            let parts = parts.iter();
            let parts = parts.map(|text| KeyComponent::parse(text, &PATH_SETTINGS).unwrap());
            let key = KeyTemplate::from_components(parts.collect(), ValueHasher::default());
            let values = [Some(Cow::Borrowed(value))].into_iter().collect();
            key.build_key("p", &values, &mut ValueDigests::default())
        };
        let mut plain = KeyBuilder::new("p");
        plain.push_key_value(Some(b"10.0.0.1"));
        let address = build_key(&["client_ip"], b"10.0.0.1");
        assert_eq!(address, plain.finish());
        let keys = [
            address,
            build_key(&["header:a"], b"10.0.0.1"),
            build_key(&["header:b"], b"10.0.0.1"),
            build_key(&["query:a"], b"10.0.0.1"),
            build_key(&["jwt:a"], b"10.0.0.1"),
            build_key(&["header:a | client_ip"], b"client_ip=10.0.0.1"),
            build_key(&["header:a | client_ip"], b"header:a=10.0.0.1"),
            build_key(&["header:a;hash"], b"10.0.0.1"),
            build_key(&["header:a;hash | client_ip"], b"header:a=10.0.0.1"),
        ];
        for (at, key) in keys.iter().enumerate() {
            assert!(
                !keys[..at].iter().any(|other| other.id() == key.id()),
                "{key} {at}"
            );
        }
        let reordered = build_key(
            &["client_cert:cn | header:a | client_ip"],
            b"header:a=10.0.0.1",
        );
        assert_eq!(reordered, keys[6], "the order is not part of the key");
    }

    /// The whole descriptor, which a key with the descriptor's own limit contains, has the value
    /// too.
    #[test]
    fn a_value_after_the_last_position_is_hashed_like_the_others() {
        let build_key = |text: &str, values: [&[u8]; 2]| {
            let part = KeyComponent::parse(text, &PATH_SETTINGS).unwrap();
            let key = KeyTemplate::from_components(vec![part], ValueHasher::default());
            let values = values.map(|value| Some(Cow::Borrowed(value)));
            key.build_key(
                "p",
                &values.into_iter().collect(),
                &mut ValueDigests::default(),
            )
        };
        let values: [&[u8]; 2] = [b"hunter2", b"api_key=hunter2"];
        let hashed = build_key("descriptor:api_key;hash", values);
        let readable = hashed.to_readable_string();
        assert!(readable.matches('#').count() == 2, "{readable}");
        let other = build_key("descriptor:api_key;hash", [b"hunter2", b"api_key=hunter3"]);
        assert_ne!(hashed.id(), other.id());
        let plain = build_key("descriptor:api_key", values);
        assert!(plain.to_readable_string().contains("hunter2"));
    }
}
