//! Key parts: where a request has the values of its rate-limit key, as the configuration writes it.

use super::jwt::ClaimName;
use super::{JsonPointer, PathPattern, path};
use crate::text::find_similar;
use http::HeaderName;
use http::header::COOKIE;
use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

/// Longest source of an alternative, as keys contain it.
const MAX_LABEL_BYTES: usize = 128;

/// A part of a request or descriptor: the source of one or more values of a key, of the values of a
/// condition, or of the amount of a limit.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum KeyPart {
    ClientIp,
    Header(HeaderName),
    Query(Box<str>),
    Cookie(Box<str>),
    /// A claim of the request's token (see [`super::jwt`]).
    Claim(ClaimName),
    /// A value in the body: at a JSON pointer, or of a form field.
    Body(JsonPointer),
    /// The captures of a pattern, one value each.
    PathCaptures(PathPattern),
    Method,
    Host,
    WholePath,
    Const(Box<str>),
    /// The domain of a descriptor, in conditions only.
    DescriptorDomain,
    /// An entry of a descriptor.
    DescriptorEntry(Box<str>),
    /// All entries of a descriptor, with their names.
    WholeDescriptor,
    /// The subject alternative name of the client certificate.
    ClientCertSan,
    /// The common name of the client certificate.
    ClientCertCn,
    /// The first of several parts that a request has. Its value is `label=value`.
    Alternatives(Box<[KeyComponent]>),
}

/// A key part as the configuration writes it, such as `header:x-api-key;hash | client_ip`.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct KeyComponent {
    pub part: KeyPart,
    /// The value is stored as its digest.
    pub is_hashed: bool,
}

/// What is known of a kind of part without a request.
struct PartTraits {
    /// The source of a value as operators write it, without its name.
    label: &'static str,
    /// The part in messages, without its name.
    noun: &'static str,
    is_always_present: bool,
    is_client_chosen: bool,
}

impl KeyPart {
    /// Parses a part, such as `header:x-user-id`.
    ///
    /// # Errors
    /// Returns a message that states what is wrong.
    pub fn parse(text: &str, settings: &path::Settings) -> Result<Self, String> {
        let (kind, name) = text.split_once(':').unwrap_or((text, ""));
        match (kind, name) {
            ("client_ip", "") => Ok(Self::ClientIp),
            ("method", "") => Ok(Self::Method),
            ("host", "") => Ok(Self::Host),
            ("path", "") => Ok(Self::WholePath),
            ("client_cert", "san") => Ok(Self::ClientCertSan),
            ("client_cert", "cn") => Ok(Self::ClientCertCn),
            ("descriptor", "") => Ok(Self::WholeDescriptor),
            ("descriptor", name) => Ok(Self::DescriptorEntry(name.into())),
            ("header" | "query" | "cookie" | "jwt" | "const", "") => {
                Err(format!("{kind} needs a name, as in \"{kind}:NAME\""))
            }
            ("header", name) => HeaderName::from_bytes(name.as_bytes())
                .map(Self::Header)
                .map_err(|error| format!("{name:?}: {error}")),
            ("query", name) => Ok(Self::Query(name.into())),
            ("cookie", name) => Ok(Self::Cookie(name.into())),
            ("jwt", name) => ClaimName::parse(name).map(Self::Claim),
            ("body", pointer) => JsonPointer::parse(pointer).map(Self::Body),
            ("const", text) => Ok(Self::Const(text.into())),
            ("path", pattern) => match PathPattern::parse(pattern, settings)? {
                pattern if pattern.capture_count() == 0 => {
                    Err(format!("{name:?} captures nothing: write {{name}} for a segment to key by"))
                }
                pattern => Ok(Self::PathCaptures(pattern)),
            },
            _ => Err("a key part is client_ip, header:NAME, query:NAME, cookie:NAME, jwt:CLAIM, body:/POINTER, path:PATTERN, method, host, path, client_cert:san, client_cert:cn, const:TEXT, or in policies for the rate-limit service descriptor:NAME or descriptor".to_owned() + &suggest_part(text)),
        }
    }

    /// Joins parts of which the first present one counts.
    ///
    /// # Errors
    /// Returns a message if an alternative has not one value, or is never used.
    pub fn from_alternatives(alternatives: Vec<KeyComponent>) -> Result<Self, String> {
        let is_for_descriptors = |one: &KeyComponent| one.part.is_from_descriptor();
        let kinds: Vec<bool> = alternatives.iter().filter_map(is_for_descriptors).collect();
        if kinds.contains(&true) && kinds.contains(&false) {
            return Err("alternatives mix request and descriptor parts, which never occur together; expected only parts of one kind".to_owned());
        }
        let mut before: Vec<&KeyPart> = Vec::new();
        for KeyComponent { part, .. } in &alternatives {
            if part.value_count() != 1 {
                return Err(format!(
                    "the path pattern has {} captures; expected exactly one in an alternative, such as \"path:/{{tenant}}/**\"",
                    part.value_count()
                ));
            }
            let label = part.source_label();
            if label.len() > MAX_LABEL_BYTES || label.contains('=') {
                return Err(format!(
                    "{label:?} cannot be an alternative; expected a name without \"=\" of at most {MAX_LABEL_BYTES} bytes"
                ));
            }
            if let Some(previous) = before
                .last()
                .filter(|previous| previous.is_always_present())
            {
                return Err(format!(
                    "{part} is never reached: every request has the {previous}; expected the {previous} last"
                ));
            }
            if before.contains(&part) {
                return Err(format!("{part} occurs twice; expected it once"));
            }
            before.push(part);
        }
        Ok(Self::Alternatives(alternatives.into()))
    }

    /// Makes the issuer a part of the values of claims.
    pub fn set_issuers(&mut self, issuers: &Arc<[Box<str>]>) {
        match self {
            Self::Claim(name) => *name = name.with_issuers(issuers),
            Self::Alternatives(alternatives) => {
                let parts = alternatives.iter_mut().map(|one| &mut one.part);
                parts.for_each(|part| part.set_issuers(issuers));
            }
            _ => {}
        }
    }

    /// The part as conditions have it: without the issuers of a claim.
    pub fn without_issuers(&self) -> Self {
        match self {
            Self::Claim(name) => Self::Claim(name.without_issuers()),
            part => part.clone(),
        }
    }

    /// The name of a header, query parameter, cookie, claim or descriptor entry, or the pointer
    /// into the body; otherwise empty.
    pub fn name(&self) -> &str {
        match self {
            Self::Header(name) => name.as_str(),
            Self::Body(pointer) => pointer.as_str(),
            Self::Query(name) | Self::Cookie(name) | Self::DescriptorEntry(name) => name,
            Self::Claim(name) => name.as_ref(),
            _ => "",
        }
    }

    /// The header whose lines have the values, if any.
    pub(super) fn source_header(&self) -> Option<&HeaderName> {
        match self {
            Self::Header(name) => Some(name),
            Self::Cookie(_) => Some(&COOKIE),
            _ => None,
        }
    }

    /// The parts of which the first present one counts: usually one.
    pub fn alternatives(&self) -> impl Iterator<Item = &Self> {
        let (own, alternatives): (_, &[KeyComponent]) = match self {
            Self::Alternatives(alternatives) => (None, alternatives),
            part => (Some(part), &[]),
        };
        own.into_iter()
            .chain(alternatives.iter().map(|one| &one.part))
    }

    /// Whether every request, or every descriptor, has the value.
    pub(super) fn is_always_present(&self) -> bool {
        self.alternatives()
            .any(|one| one.traits().is_always_present)
    }

    /// Whether the client can choose the value freely. A claim counts as chosen by the token's
    /// issuer, and a descriptor as chosen by the caller of the rate-limit service.
    pub fn is_client_chosen(&self) -> bool {
        self.alternatives().any(|one| one.traits().is_client_chosen)
    }

    /// The source of a value as operators write it before the value: `header:x-api-key`.
    pub fn source_label(&self) -> Cow<'static, str> {
        match (self.traits().label, self.name()) {
            (label, "") => label.into(),
            (label, name) => format!("{label}:{name}").into(),
        }
    }

    /// What is known of each kind of part.
    fn traits(&self) -> PartTraits {
        let (label, noun, is_always_present, is_client_chosen) = match self {
            Self::ClientIp => ("client_ip", "client IP", true, false),
            Self::Header(_) => ("header", "header", false, true),
            Self::Query(_) => ("query", "query parameter", false, true),
            Self::Cookie(_) => ("cookie", "cookie", false, true),
            Self::Claim(_) => ("jwt", "claim", false, false),
            Self::Body(_) => ("body", "body field", false, true),
            Self::PathCaptures(_) => ("segment", "path segment", false, true),
            Self::Method => ("method", "method", true, false),
            Self::Host => ("host", "host", true, true),
            Self::WholePath => ("path", "path", true, true),
            Self::Const(_) => ("const", "constant", true, false),
            Self::DescriptorDomain => ("domain", "domain", true, false),
            Self::DescriptorEntry(_) => ("descriptor", "descriptor entry", false, false),
            Self::WholeDescriptor => ("descriptor", "whole descriptor", true, false),
            Self::ClientCertSan => ("client_cert:san", "client certificate's SAN", false, false),
            Self::ClientCertCn => ("client_cert:cn", "client certificate's CN", false, false),
            Self::Alternatives(_) => ("|", "", false, false),
        };
        PartTraits {
            label,
            noun,
            is_always_present,
            is_client_chosen,
        }
    }

    /// Whether the value comes from the client's certificate.
    pub fn is_from_client_certificate(&self) -> bool {
        matches!(self, Self::ClientCertSan | Self::ClientCertCn)
    }

    /// `true` if the value comes from a descriptor, `false` if from a request, `None` if from
    /// neither.
    pub fn is_from_descriptor(&self) -> Option<bool> {
        match self {
            Self::DescriptorDomain | Self::DescriptorEntry(_) | Self::WholeDescriptor => Some(true),
            Self::Const(_) => None,
            Self::Alternatives(alternatives) => alternatives
                .iter()
                .find_map(|one| one.part.is_from_descriptor()),
            _ => Some(false),
        }
    }

    /// The number of values: one, or one per capture of a pattern.
    pub fn value_count(&self) -> usize {
        match self {
            Self::PathCaptures(pattern) => pattern.capture_count(),
            _ => 1,
        }
    }
}

/// Suggests the part that an unknown part probably means.
fn suggest_part(text: &str) -> String {
    const SYNONYMS: [(&str, &str); 7] = [
        ("ip", "client_ip"),
        ("remote_addr", "client_ip"),
        ("remote_address", "client_ip"),
        ("binary_remote_addr", "client_ip"),
        ("address", "client_ip"),
        ("claim", "jwt"),
        ("param", "query"),
    ];
    const KINDS: [&str; 11] = [
        "client_ip",
        "header",
        "query",
        "cookie",
        "jwt",
        "body",
        "path",
        "method",
        "host",
        "client_cert",
        "const",
    ];
    let (kind, name) = text.split_once([':', '=', '.']).unwrap_or((text, ""));
    let kind = kind
        .trim_start_matches('$')
        .to_ascii_lowercase()
        .replace('-', "_");
    let synonym = SYNONYMS.iter().find(|(other, _)| *other == kind);
    let similar = || find_similar(KINDS, &kind, 0.8);
    match synonym.map(|(_, known)| *known).or_else(similar) {
        Some(known) if name.is_empty() => format!("; did you mean \"{known}\"?"),
        Some(known) => format!("; did you mean \"{known}:{name}\"?"),
        None => String::new(),
    }
}

/// Text for messages, such as `header x-user-id`.
impl fmt::Display for KeyPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.traits().noun)?;
        match self {
            Self::Const(text) => write!(f, " {text}"),
            Self::Alternatives(alternatives) => {
                alternatives
                    .iter()
                    .enumerate()
                    .try_for_each(|(index, one)| {
                        let join = if index > 0 { ", else " } else { "" };
                        write!(f, "{join}{one}")
                    })
            }
            part if part.name().is_empty() => Ok(()),
            part => write!(f, " {}", part.name()),
        }
    }
}

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
            ["header", "query", "cookie", "jwt", "body", "descriptor"].contains(&kind)
        };
        let (source, option) = match text.rsplit_once(';') {
            Some((source, option)) if is_hashable(source) => (source, Some(option)),
            // Text and patterns may contain a semicolon.
            Some((source, "hash" | "plain")) if !source.starts_with("const:") => {
                return Err(format!(
                    "{source} is never hashed; expected {source:?}, or ;hash and ;plain after header, query, cookie, jwt, body or descriptor"
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
