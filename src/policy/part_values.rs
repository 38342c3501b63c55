//! Reads the values of parts from a request or descriptor.

use super::client::format_client_network;
use super::json_scanner::BodyValue;
use super::key_part::{KeyComponent, KeyPart};
use super::{Facts, KeyError, Matcher, client, facts, path};
use smallvec::{SmallVec, smallvec};
use std::borrow::Cow;
use std::iter;

/// What a key depends on beside the request.
#[derive(Clone, Copy, Debug)]
pub struct KeyContext<'a> {
    pub client: &'a client::Settings,
    pub path: &'a path::Settings,
    /// The conditions of the policy. Readings of the path that do not match give no key.
    pub matcher: &'a Matcher,
}

/// The values of one request, one per position; `None` if the value is absent.
pub type KeyValues<'a> = SmallVec<[Option<Cow<'a, [u8]>>; 4]>;

impl KeyPart {
    /// Whether requests that the conditions match may lack the value.
    pub fn may_be_absent(&self, matcher: &Matcher) -> bool {
        let is_absent = |part: &Self| {
            !part.is_always_present() && !matcher.requires_part(&part.without_issuers())
        };
        self.alternatives().all(is_absent)
    }

    /// Whether the part is in a body of which apps may read another value, or none of tidegate's.
    pub(super) fn is_unreadable_in(&self, facts: &Facts<'_>) -> bool {
        match (self, facts.body) {
            (Self::Body(pointer), Some(body)) => *body.value(pointer) == BodyValue::Unreadable,
            _ => false,
        }
    }

    pub(super) fn push_values<'a>(
        &'a self,
        facts: &Facts<'a>,
        context: &KeyContext<'_>,
        values: &mut KeyValues<'a>,
    ) -> Result<(), KeyError> {
        let value = match self {
            Self::ClientIp => Some(Cow::Owned(
                format_client_network(facts.client_ip, context.client).into_bytes(),
            )),
            Self::WholePath | Self::PathCaptures(_) => {
                return self.push_path_values(facts, context, values);
            }
            Self::Alternatives(alternatives) => find_first_present(alternatives, facts, context)?,
            part => {
                part.find_ambiguity(facts, context.client.value_checks)
                    .map_or(Ok(()), Err)?;
                part.single_value(facts)?
            }
        };
        values.push(value.filter(|value| !value.is_empty()));
        Ok(())
    }

    /// Appends the values of a part that is read from the path.
    ///
    /// # Errors
    /// Returns [`KeyError::AmbiguousPath`] if the readings of the path that the policy matches have
    /// different values.
    fn push_path_values<'a>(
        &'a self,
        facts: &Facts<'a>,
        context: &KeyContext<'_>,
        values: &mut KeyValues<'a>,
    ) -> Result<(), KeyError> {
        let paths = facts.paths;
        let read = |path: &'a str| -> Option<SmallVec<[&'a str; 4]>> {
            match self {
                Self::PathCaptures(pattern) => pattern.captured_segments(path),
                _ => Some(smallvec![path]),
            }
        };
        let is_ambiguous = context.path.rejects_ambiguous_keys && !paths.has_single_reading();
        let found = if is_ambiguous {
            let matching = paths
                .iter()
                .filter(|path| context.matcher.matches(facts, path));
            let mut readings = matching.map(read);
            let first = readings.next().flatten();
            if readings.any(|other| other != first) {
                return Err(KeyError::AmbiguousPath);
            }
            first
        } else {
            paths.iter().find_map(read)
        };
        let Some(found) = found else {
            values.extend(iter::repeat_n(None, self.value_count()));
            return Ok(());
        };
        let checks = context.client.value_checks;
        let is_rejected = |value: &&str| {
            let decoded = Cow::from(percent_encoding::percent_decode_str(value));
            checks.rejects_value(&decoded)
        };
        if matches!(self, Self::PathCaptures(_)) && found.iter().any(is_rejected) {
            return Err(KeyError::OuterWhiteSpace(self.to_string()));
        }
        let found = found.into_iter().map(str::as_bytes);
        values.extend(found.map(|value| Some(Cow::Borrowed(value))));
        Ok(())
    }

    /// The only value. A list claim with several has none.
    ///
    /// # Errors
    /// Rejects other repeated values, because the upstream might read a different one.
    pub(super) fn single_value<'a>(
        &'a self,
        facts: &Facts<'a>,
    ) -> Result<Option<Cow<'a, [u8]>>, KeyError> {
        self.read_values(facts, |values| {
            let first = values.next();
            match (self, values.next()) {
                (_, None) => Ok(first),
                (Self::Claim(_), _) => Ok(None),
                (Self::Header(_), _) if facts.has_joined_headers => {
                    Err(KeyError::Joined(self.to_string()))
                }
                _ => Err(KeyError::Repeated(self.to_string())),
            }
        })
    }

    /// Whether one of the values is as wanted.
    pub(super) fn has_value(
        &self,
        facts: &Facts<'_>,
        mut is_wanted: impl FnMut(&[u8]) -> bool,
    ) -> bool {
        self.read_values(facts, |mut values| {
            Iterator::any(&mut values, |value| is_wanted(&value))
        })
    }

    /// Passes the values that a request or descriptor has to `read`. Parts whose values depend on
    /// settings or on the policy (client address, path, alternatives) have none.
    pub(super) fn read_values<'a, R>(
        &'a self,
        facts: &Facts<'a>,
        read: impl FnOnce(&mut dyn Iterator<Item = Cow<'a, [u8]>>) -> R,
    ) -> R {
        let text = |text: Option<&'a str>| text.map(|text| Cow::Borrowed(text.as_bytes()));
        let cert = facts.client_cert;
        let value = match self {
            Self::Header(name) => return read(&mut facts.canonical_header_values(name)),
            Self::Query(name) => return read(&mut facts::query_values(facts.query, name)),
            Self::Cookie(name) => return read(&mut facts::cookie_values(facts.headers, name)),
            Self::Claim(name) => {
                let texts = facts.token.claim(facts.headers, name).unwrap_or_default();
                return read(&mut texts.iter().map(|text| Cow::Borrowed(text.as_bytes())));
            }
            Self::Body(pointer) => text(facts.body.and_then(|body| body.text(pointer))),
            Self::DescriptorEntry(name) => {
                let descriptor = facts.descriptor.into_iter();
                return read(&mut descriptor.flat_map(|descriptor| descriptor.values(name)));
            }
            Self::WholeDescriptor => facts
                .descriptor
                .map(|descriptor| descriptor.canonical_text().into_bytes().into()),
            Self::Method => text(Some(facts.method.as_str())),
            Self::Host => text(Some(facts.host)),
            Self::DescriptorDomain => text(facts.descriptor.map(|descriptor| descriptor.domain)),
            Self::Const(constant) => text(Some(constant)),
            Self::ClientCertSan => text(cert.and_then(|cert| cert.san.as_deref())),
            Self::ClientCertCn => text(cert.and_then(|cert| cert.cn.as_deref())),
            Self::ClientIp | Self::WholePath | Self::PathCaptures(_) | Self::Alternatives(_) => {
                None
            }
        };
        read(&mut value.into_iter())
    }
}

/// The first value that is present, after its label. An earlier alternative that is ambiguous is an
/// error, so that no client chooses among alternatives by an ambiguity.
fn find_first_present<'a>(
    alternatives: &'a [KeyComponent],
    facts: &Facts<'a>,
    context: &KeyContext<'_>,
) -> Result<Option<Cow<'a, [u8]>>, KeyError> {
    for KeyComponent { part, .. } in alternatives {
        let mut values = KeyValues::new();
        part.push_values(facts, context, &mut values)?;
        if let Some(Some(value)) = values.pop() {
            let label = part.source_label();
            return Ok(Some([label.as_bytes(), b"=", &value].concat().into()));
        }
    }
    Ok(None)
}
