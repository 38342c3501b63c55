//! Key templates: the values of a request that form its rate-limit key.

use super::authorization::read_credentials;
use super::key_component::{KeyComponent, KeyDigests};
use super::key_error::KeyError;
use super::key_hasher::KeyHasher;
use super::key_part::{KeyContext, KeyPart, KeyValues, format_client_network};
use super::{Facts, client, path};
use crate::limiter::{Key, KeyBuilder};
use std::borrow::Cow;
use std::net::IpAddr;

/// The parts of a policy's key, in order. An empty template gives all matching requests one quota.
#[derive(Clone, Debug, Default)]
pub struct KeyTemplate {
    parts: Vec<KeyPart>,
    /// For each part, whether its value is stored as a digest. Empty if none is.
    hashed: Vec<bool>,
    hasher: KeyHasher,
}

/// The action if a part is absent or empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
        Self {
            parts,
            ..Self::default()
        }
    }

    pub fn from_components(components: Vec<KeyComponent>, hasher: KeyHasher) -> Self {
        let mut hashed: Vec<bool> = components.iter().map(|one| one.is_hashed).collect();
        if !hashed.contains(&true) {
            hashed.clear();
        }
        let parts = components.into_iter().map(|one| one.part).collect();
        Self {
            parts,
            hashed,
            hasher,
        }
    }

    /// Whether the value at a position is stored as a digest.
    pub fn is_hashed_at(&self, position: usize) -> bool {
        self.positions()
            .nth(position)
            .is_some_and(|(_, is_hashed)| is_hashed)
    }

    pub fn has_hashed_part(&self) -> bool {
        !self.hashed.is_empty()
    }

    /// Builds the key of policy `name` with these values, one per position. A value beyond the last
    /// position may contain the others, so it is hashed if one of them is.
    pub(super) fn build_key<'t>(
        &'t self,
        name: &str,
        values: &KeyValues<'_>,
        digests: &mut KeyDigests<'t>,
    ) -> Key {
        let mut builder = KeyBuilder::new(name);
        if !self.has_hashed_part() {
            for value in values {
                builder.push_key_value(value.as_deref());
            }
            return builder.finish();
        }
        let mut positions = self.positions();
        for value in values {
            match (positions.next(), value) {
                (Some((part, true)), Some(value)) if !value.is_empty() => {
                    builder.push_digest(&digests.digest(&self.hasher, part, value));
                }
                (None, Some(value)) => builder.push_digest(&self.hasher.digest(value)),
                (_, value) => builder.push_key_value(value.as_deref()),
            }
        }
        builder.finish()
    }

    /// Adds a value to a key, in the form in which keys store the value at its position.
    pub(super) fn push_value<'t>(
        &'t self,
        builder: &mut KeyBuilder,
        position: usize,
        value: &[u8],
        digests: &mut KeyDigests<'t>,
    ) {
        match self.positions().nth(position) {
            Some((part, true)) if !value.is_empty() => {
                builder.push_digest(&digests.digest(&self.hasher, part, value));
            }
            _ => builder.push_key_value(Some(value)),
        }
    }

    /// Each position with its part, and whether the value is hashed.
    fn positions(&self) -> impl Iterator<Item = (&KeyPart, bool)> {
        let hashed = self.hashed.iter().copied().chain(std::iter::repeat(false));
        self.parts.iter().zip(hashed).flat_map(|(part, is_hashed)| {
            std::iter::repeat_n((part, is_hashed), part.value_count())
        })
    }

    /// The value at a position in the form in which keys store it: its digest if it is hashed.
    pub(super) fn stored_value<'t>(
        &'t self,
        position: usize,
        value: &[u8],
        digests: &mut KeyDigests<'t>,
    ) -> Vec<u8> {
        match self.positions().nth(position) {
            Some((part, true)) => digests.digest(&self.hasher, part, value).to_vec(),
            _ => value.to_vec(),
        }
    }

    /// The value at a position for people: a hashed one as keys show it.
    pub fn format_value<'v>(&self, position: usize, value: &'v str) -> Cow<'v, str> {
        match self.positions().nth(position) {
            Some((_, true)) if !value.is_empty() => {
                self.hasher.format_value(value.as_bytes()).into()
            }
            _ => value.into(),
        }
    }

    /// Describes the parts, and which of them are hashed.
    pub fn describe_parts(&self) -> Vec<String> {
        let hashed = self.hashed.iter().copied().chain(std::iter::repeat(false));
        let describe = |(part, is_hashed): (&KeyPart, bool)| match is_hashed {
            true => format!("{part} (hashed)"),
            false => part.to_string(),
        };
        self.parts.iter().zip(hashed).map(describe).collect()
    }

    /// Describes each position, for messages.
    pub fn describe_positions(&self) -> Vec<String> {
        let repeated = |part: &KeyPart| std::iter::repeat_n(part.to_string(), part.value_count());
        self.parts.iter().flat_map(repeated).collect()
    }

    pub fn parts(&self) -> &[KeyPart] {
        &self.parts
    }

    /// The number of values: one per part, and one per capture of a `path:` part.
    pub fn value_count(&self) -> usize {
        self.parts.iter().map(KeyPart::value_count).sum()
    }

    /// The part that supplies the value at a position, counted from 0.
    pub fn part_at(&self, position: usize) -> Option<&KeyPart> {
        self.positions().nth(position).map(|(part, _)| part)
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
        for part in &self.parts {
            let part_start = values.len();
            part.push_values(facts, context, &mut values)?;
            let has_missing_value = || values.iter().skip(part_start).any(Option::is_none);
            if missing == MissingKeyAction::Reject && has_missing_value() {
                return Err(KeyError::Missing(part.to_string()));
            }
        }
        Ok(values)
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
        match self.part_at(position) {
            Some(KeyPart::ClientIp) => {
                let address = text.split_once('/').map_or(text, |(address, _)| address);
                let ip: IpAddr = address.parse().map_err(|error| {
                    format!("the key requires a client address here, but {text:?} is none: {error}")
                })?;
                let canonical = format_client_network(ip.to_canonical(), client);
                if text.contains('/') && text != canonical {
                    return Err(format!(
                        "clients are keyed as {canonical} (client.ipv4_prefix, client.ipv6_prefix)"
                    ));
                }
                Ok(canonical.into())
            }
            Some(KeyPart::Host) => Ok(text
                .strip_suffix('.')
                .unwrap_or(text)
                .to_ascii_lowercase()
                .into()),
            Some(KeyPart::Header(name)) if *name == http::header::AUTHORIZATION => {
                match read_credentials(text.as_bytes()).as_slice() {
                    [one] => Ok(String::from_utf8_lossy(one).into()),
                    _ => Err(
                        "these credentials can be read in several ways; expected one scheme and one credential"
                            .to_owned(),
                    ),
                }
            }
            Some(KeyPart::PathCaptures(_)) => Ok(path::canonicalize_segment(text, path)),
            Some(KeyPart::WholePath) => path::PathInterpretations::parse(text, path)
                .map_err(|error| error.to_string())
                .and_then(|read| read.iter().next().map(Into::into).ok_or_else(String::new)),
            _ => Ok(text.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Matcher;
    use http::{HeaderMap, Method};

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
            rejects_ambiguous_query: true,
            rejects_ambiguous_cookie: true,
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
            method: &Method::GET,
            host: "a.example",
            paths: &paths,
            query: None,
            headers: &headers,
            client_ip: [10, 1, 2, 3].into(),
            token: crate::policy::jwt::RequestToken::without_token_reader(),
            client_cert: None,
            has_joined_headers: false,
            descriptor: None,
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

    /// The whole descriptor, which a key with the descriptor's own limit contains, has the value
    /// too.
    #[test]
    fn a_value_after_the_last_position_is_hashed_like_the_others() {
        let build_key = |text: &str, values: [&[u8]; 2]| {
            let part = KeyComponent::parse(text, &PATH_SETTINGS).unwrap();
            let key = KeyTemplate::from_components(vec![part], KeyHasher::default());
            let values = values.map(|value| Some(Cow::Borrowed(value)));
            key.build_key(
                "p",
                &values.into_iter().collect(),
                &mut KeyDigests::default(),
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
