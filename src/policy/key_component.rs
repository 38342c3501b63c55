//! Key parts as the configuration writes them, and the digests of their values.

use super::key_hasher::{KeyHasher, ValueDigest};
use super::key_part::{KeyComponent, KeyPart};
use super::path;
use smallvec::SmallVec;
use std::fmt;

/// Parts of names that usually stand for credentials, without separators and in lower case.
const CREDENTIAL_WORDS: [&str; 8] = [
    "authorization",
    "apikey",
    "accesskey",
    "token",
    "session",
    "sessid",
    "secret",
    "password",
];

/// The digests of one request, so that each value is hashed once for all policies.
#[derive(Debug, Default)]
pub struct KeyDigests<'t>(SmallVec<[(&'t KeyPart, ValueDigest); 1]>);

impl KeyComponent {
    /// Parses a part with an optional `;hash` or `;plain`, or several of them with `|` between
    /// them. Without an option, the values of credentials are hashed.
    ///
    /// # Errors
    /// Returns a message that states what is wrong.
    pub fn parse(text: &str, settings: &path::Settings) -> Result<Self, String> {
        if !text.contains('|') {
            return Self::parse_alternative(text, settings);
        }
        let alternatives = text.split('|');
        let alternatives = alternatives
            .map(|one| Self::parse_alternative(one.trim(), settings))
            .collect::<Result<_, String>>()?;
        KeyPart::from_alternatives(alternatives).map(|part| Self {
            part,
            is_hashed: false,
        })
    }

    /// Whether the value, or that of an alternative, is stored as its digest.
    pub(super) fn has_hashed_part(&self) -> bool {
        self.is_hashed
            || matches!(&self.part, KeyPart::Alternatives(all) if all.iter().any(|one| one.is_hashed))
    }

    /// Where a value comes from, and the value itself: of a part with alternatives, the alternative
    /// that its label names and the text after the label. `None` if it has no label of the part.
    pub(super) fn resolve_source<'v>(&self, value: &'v [u8]) -> Option<(&Self, &'v [u8])> {
        let KeyPart::Alternatives(alternatives) = &self.part else {
            return Some((self, value));
        };
        let end = value.iter().position(|byte| *byte == b'=')?;
        let (label, value) = (value.get(..end)?, value.get(end + 1..)?);
        let mut alternatives = alternatives.iter();
        let found = alternatives.find(|one| one.part.source_label().as_bytes() == label)?;
        Some((found, value))
    }

    /// As [`Self::resolve_source`], for a value that operators write. The label has its `=`, and is
    /// empty without alternatives.
    pub(super) fn split_label<'v>(&self, text: &'v str) -> Option<(&'v str, &Self, &'v str)> {
        let (source, value) = self.resolve_source(text.as_bytes())?;
        let (label, value) = text.split_at_checked(text.len() - value.len())?;
        Some((label, source, value))
    }

    fn parse_alternative(text: &str, settings: &path::Settings) -> Result<Self, String> {
        let is_hashable = |text: &str| {
            let kind = text.split(':').next().unwrap_or_default();
            ["header", "query", "cookie", "jwt", "descriptor"].contains(&kind)
        };
        let (source, option) = match text.rsplit_once(';') {
            Some((source, option)) if is_hashable(source) => (source, Some(option)),
            // Text and patterns may contain a semicolon.
            Some((source, "hash" | "plain")) if !source.starts_with("const:") => {
                return Err(format!(
                    "{source} is never hashed; expected {source:?}, or ;hash and ;plain after header, query, cookie, jwt or descriptor"
                ));
            }
            _ => (text, None),
        };
        let part = KeyPart::parse(source, settings)?;
        let is_hashed = match option {
            None => part.is_credential(),
            Some("hash") => true,
            Some("plain") => false,
            Some(other) => {
                return Err(format!(
                    "unknown option \";{other}\"; expected {:?} or {:?}",
                    format!("{source};hash"),
                    format!("{source};plain")
                ));
            }
        };
        Ok(Self { part, is_hashed })
    }
}

/// Text for messages, such as `header x-api-key (hashed)`.
impl fmt::Display for KeyComponent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hashed = if self.is_hashed { " (hashed)" } else { "" };
        write!(f, "{}{hashed}", self.part)
    }
}

impl KeyPart {
    /// Whether the name of a header, query parameter or cookie says that its value is a credential:
    /// `x-api-key`, `apiKey`, `access_token`.
    pub fn is_credential(&self) -> bool {
        matches!(self, Self::Header(_) | Self::Query(_) | Self::Cookie(_))
            && is_credential_name(self.name())
    }
}

/// Whether the name of a header, query parameter or cookie says that its value is a credential.
pub fn is_credential_name(name: &str) -> bool {
    let letters: String = name.chars().filter(char::is_ascii_alphanumeric).collect();
    let letters = letters.to_ascii_lowercase();
    CREDENTIAL_WORDS.iter().any(|word| letters.contains(word))
}

impl<'t> KeyDigests<'t> {
    /// The digest of a part's value, computed at most once.
    pub(super) fn digest(
        &mut self,
        hasher: &KeyHasher,
        part: &'t KeyPart,
        value: &[u8],
    ) -> ValueDigest {
        if let Some((_, digest)) = self.0.iter().find(|(known, _)| *known == part) {
            return *digest;
        }
        let digest = hasher.digest(value);
        self.0.push((part, digest));
        digest
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTINGS: path::Settings = path::Settings::DEFAULT;

    #[test]
    fn values_of_credentials_are_hashed_unless_stated_otherwise() {
        for (text, is_hashed) in [
            ("header:authorization", true),
            ("header:Proxy-Authorization", true),
            ("header:X-API-Key", true),
            ("header:x-auth-token", true),
            ("query:apiKey", true),
            ("query:access_token", true),
            ("cookie:session", true),
            ("cookie:PHPSESSID", true),
            ("header:x-api-key;plain", false),
            ("header:x-user-id", false),
            ("header:x-user-id;hash", true),
            ("cookie:lang", false),
            ("jwt:session", false),
            ("jwt:sub;hash", true),
            ("descriptor:api_key", false),
            ("descriptor:api_key;hash", true),
            ("descriptor;hash", true),
            ("client_ip", false),
            ("const:token;hash", false),
            ("const:a;b", false),
        ] {
            let parsed = KeyComponent::parse(text, &SETTINGS);
            assert_eq!(parsed.map(|one| one.is_hashed), Ok(is_hashed), "{text}");
        }
    }

    #[test]
    fn each_component_is_hashed_once() {
        let parse = |text| KeyComponent::parse(text, &SETTINGS).unwrap().part;
        let (one, other) = (parse("header:x-api-key"), parse("query:token"));
        let (hasher, mut digests) = (KeyHasher::default(), KeyDigests::default());
        for _ in 0..2 {
            assert_eq!(digests.digest(&hasher, &one, b"a"), hasher.digest(b"a"));
            assert_eq!(digests.digest(&hasher, &other, b"b"), hasher.digest(b"b"));
        }
        assert_eq!(digests.0.len(), 2);
    }

    #[test]
    fn wrong_options_name_the_right_ones() {
        for (text, expected) in [
            (
                "header:x-api-key;hsah",
                "expected \"header:x-api-key;hash\"",
            ),
            (
                "client_ip;hash",
                "client_ip is never hashed; expected \"client_ip\"",
            ),
            ("path:/a/{b};hash", "never hashed"),
            ("heder:x-api-key;hash", "never hashed"),
        ] {
            let error = KeyComponent::parse(text, &SETTINGS).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
