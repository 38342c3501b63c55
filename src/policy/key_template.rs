//! Key templates: the values of a request that form its rate-limit key.

use super::jwt::ClaimName;
use super::{Facts, Matcher, PathPattern, client, facts, lenient_names, path};
use http::HeaderName;
use smallvec::{SmallVec, smallvec};
use std::borrow::Cow;
use std::fmt;
use std::net::IpAddr;

/// The source of one or more values of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyPart {
    ClientIp,
    Header(HeaderName),
    Query(Box<str>),
    Cookie(Box<str>),
    /// A claim of the request's token (see [`super::jwt`]).
    Claim(ClaimName),
    /// The captures of a pattern, one value each.
    PathCaptures(PathPattern),
    Method,
    Host,
    WholePath,
    Const(Box<str>),
    /// An entry of a descriptor.
    DescriptorEntry(Box<str>),
    /// All entries of a descriptor, with their names.
    WholeDescriptor,
    /// The subject alternative name of the client certificate.
    ClientCertSan,
    /// The common name of the client certificate.
    ClientCertCn,
}

/// The parts of a policy's key, in order. An empty template gives all matching requests one quota.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyTemplate(Vec<KeyPart>);

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

/// Why a request cannot be keyed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    #[error("{0} occurs more than once")]
    Repeated(String),
    #[error("{0} is missing")]
    Missing(String),
    #[error(
        "the path can be read in several ways with different keys (setting path.ambiguous_key)"
    )]
    AmbiguousPath,
    #[error("{0} can be read in several ways (setting client.ambiguous_query)")]
    AmbiguousQuery(String),
    #[error("{0} can be read in several ways (setting client.ambiguous_cookie)")]
    AmbiguousCookie(String),
}

/// What a key depends on beside the request.
#[derive(Clone, Copy, Debug)]
pub struct KeyContext<'a> {
    pub client: &'a client::Settings,
    pub path: &'a path::Settings,
    /// The conditions of the policy. Readings of the path that do not match give no key.
    pub matcher: &'a Matcher,
}

/// The values of one request, one per position; `Retry` if the value is absent.
pub type KeyValues<'a> = SmallVec<[Option<Cow<'a, [u8]>>; 4]>;

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
            ("const", text) => Ok(Self::Const(text.into())),
            ("path", pattern) => match PathPattern::parse(pattern, settings)? {
                pattern if pattern.capture_count() == 0 => {
                    Err(format!("{pattern_text:?} captures nothing: write {{name}} for a segment to key by", pattern_text = name))
                }
                pattern => Ok(Self::PathCaptures(pattern)),
            },
            _ => Err("a key part is client_ip, header:NAME, query:NAME, cookie:NAME, jwt:CLAIM, path:PATTERN, method, host, path, client_cert:san, client_cert:cn, const:TEXT, or in policies for the rate-limit service descriptor:NAME or descriptor".to_owned()),
        }
    }

    /// Whether the client can choose the value freely. A claim counts as chosen by the token's
    /// issuer.
    pub fn is_client_chosen(&self) -> bool {
        !matches!(
            self,
            Self::ClientIp
                | Self::Method
                | Self::Const(_)
                | Self::Claim(_)
                // The caller of the rate-limit service sets descriptor entries.
                | Self::DescriptorEntry(_)
                | Self::WholeDescriptor
                | Self::ClientCertSan
                | Self::ClientCertCn
        )
    }

    /// Whether the value comes from the client's certificate.
    pub fn is_from_client_certificate(&self) -> bool {
        matches!(self, Self::ClientCertSan | Self::ClientCertCn)
    }

    /// `true` if the value comes from a descriptor, `false` if from a request, `Retry` if from
    /// neither.
    pub fn is_from_descriptor(&self) -> Option<bool> {
        match self {
            Self::DescriptorEntry(_) | Self::WholeDescriptor => Some(true),
            Self::Const(_) => None,
            _ => Some(false),
        }
    }

    fn value_count(&self) -> usize {
        match self {
            Self::PathCaptures(pattern) => pattern.capture_count(),
            _ => 1,
        }
    }

    fn push_values<'a>(
        &'a self,
        facts: &Facts<'a>,
        context: &KeyContext<'_>,
        values: &mut KeyValues<'a>,
    ) -> Result<(), KeyError> {
        let client = context.client;
        let value = match self {
            Self::ClientIp => Some(Cow::Owned(
                format_client_network(facts.client_ip, client).into_bytes(),
            )),
            Self::Header(name) => self.single_value(facts.header_values(name))?,
            Self::Query(name)
                if client.rejects_ambiguous_query
                    && (facts.paths.may_contain_query()
                        || lenient_names::is_query_ambiguous(facts.query, name)) =>
            {
                return Err(KeyError::AmbiguousQuery(self.to_string()));
            }
            Self::Cookie(name)
                if client.rejects_ambiguous_cookie
                    && lenient_names::is_cookie_ambiguous(facts.headers, name) =>
            {
                return Err(KeyError::AmbiguousCookie(self.to_string()));
            }
            Self::Query(name) => self.single_value(facts::query_values(facts.query, name))?,
            Self::Cookie(name) => self.single_value(facts::cookie_values(facts.headers, name))?,
            Self::Claim(name) => facts
                .token
                .claim(facts.headers, name)
                .single_text()
                .map(Cow::Borrowed),
            Self::Method => Some(Cow::Borrowed(facts.method.as_str().as_bytes())),
            Self::Host => Some(Cow::Borrowed(facts.host.as_bytes())),
            Self::WholePath | Self::PathCaptures(_) => {
                return self.push_path_values(facts, context, values);
            }
            Self::Const(text) => Some(Cow::Borrowed(text.as_bytes())),
            Self::DescriptorEntry(name) => match facts.descriptor {
                Some(descriptor) => self.single_value(descriptor.values(name))?,
                None => None,
            },
            Self::WholeDescriptor => facts
                .descriptor
                .map(|descriptor| descriptor.canonical_text().into_bytes().into()),
            Self::ClientCertSan => facts
                .client_cert
                .and_then(|cert| text_bytes(cert.san.as_deref())),
            Self::ClientCertCn => facts
                .client_cert
                .and_then(|cert| text_bytes(cert.cn.as_deref())),
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
        if paths.has_single_reading() || !context.path.rejects_ambiguous_keys {
            let found = paths.iter().find_map(|path| self.path_values(path));
            self.push_found_path_values(found, values);
            return Ok(());
        }
        let mut matching_readings = paths
            .iter()
            .filter(|path| context.matcher.matches(facts, path))
            .map(|path| self.path_values(path));
        let first = matching_readings.next().flatten();
        if matching_readings.any(|other| other != first) {
            return Err(KeyError::AmbiguousPath);
        }
        self.push_found_path_values(first, values);
        Ok(())
    }

    /// The values of a part that is read from the path, for one reading.
    fn path_values<'p>(&self, path: &'p str) -> Option<SmallVec<[&'p str; 4]>> {
        match self {
            Self::PathCaptures(pattern) => pattern.captured_segments(path),
            _ => Some(smallvec![path]),
        }
    }

    fn push_found_path_values<'a>(
        &self,
        found: Option<SmallVec<[&'a str; 4]>>,
        values: &mut KeyValues<'a>,
    ) {
        match found {
            Some(found) => values.extend(
                found
                    .into_iter()
                    .map(|value| Some(Cow::Borrowed(value.as_bytes()))),
            ),
            None => values.extend(std::iter::repeat_n(None, self.value_count())),
        }
    }

    /// Rejects repeated values, because the upstream might read a different one.
    fn single_value<'a>(
        &self,
        mut values: impl Iterator<Item = Cow<'a, [u8]>>,
    ) -> Result<Option<Cow<'a, [u8]>>, KeyError> {
        let first = values.next();
        if values.next().is_some() {
            return Err(KeyError::Repeated(self.to_string()));
        }
        Ok(first)
    }
}

fn text_bytes(text: Option<&str>) -> Option<Cow<'_, [u8]>> {
    text.map(|text| Cow::Borrowed(text.as_bytes()))
}

/// Text for messages, such as `header x-user-id`.
impl fmt::Display for KeyPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ClientIp => f.write_str("client IP"),
            Self::Header(name) => write!(f, "header {name}"),
            Self::Query(name) => write!(f, "query parameter {name}"),
            Self::Cookie(name) => write!(f, "cookie {name}"),
            Self::Claim(name) => write!(f, "claim {name}"),
            Self::PathCaptures(_) => f.write_str("path segment"),
            Self::Method => f.write_str("method"),
            Self::Host => f.write_str("host"),
            Self::WholePath => f.write_str("path"),
            Self::Const(text) => write!(f, "constant {text}"),
            Self::DescriptorEntry(name) => write!(f, "descriptor entry {name}"),
            Self::WholeDescriptor => f.write_str("whole descriptor"),
            Self::ClientCertSan => f.write_str("client certificate's name"),
            Self::ClientCertCn => f.write_str("client certificate's CN"),
        }
    }
}

impl KeyTemplate {
    pub fn new(parts: Vec<KeyPart>) -> Self {
        Self(parts)
    }

    /// Describes each position, for messages.
    pub fn describe_positions(&self) -> Vec<String> {
        let repeated = |part: &KeyPart| std::iter::repeat_n(part.to_string(), part.value_count());
        self.0.iter().flat_map(repeated).collect()
    }

    pub fn parts(&self) -> &[KeyPart] {
        &self.0
    }

    /// The number of values: one per part, and one per capture of a `path:` part.
    pub fn value_count(&self) -> usize {
        self.0.iter().map(KeyPart::value_count).sum()
    }

    /// The part that supplies the value at a position, counted from 0.
    pub fn part_at(&self, position: usize) -> Option<&KeyPart> {
        self.0
            .iter()
            .flat_map(|part| std::iter::repeat_n(part, part.value_count()))
            .nth(position)
    }

    /// Extracts the values of one request.
    ///
    /// # Errors
    /// Returns [`KeyError::Repeated`] if a single-valued part occurs more than once, and an
    /// ambiguity if upstreams may read another value. With [`MissingKeyAction::RejectResponse`], returns
    /// [`KeyError::Missing`] for the first absent value.
    pub fn extract_values<'a>(
        &'a self,
        facts: &Facts<'a>,
        context: &KeyContext<'_>,
        missing: MissingKeyAction,
    ) -> Result<KeyValues<'a>, KeyError> {
        let mut values = KeyValues::new();
        for part in &self.0 {
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
            Some(KeyPart::PathCaptures(_)) => Ok(path::canonicalize_segment(text, path)),
            Some(KeyPart::WholePath) => path::PathInterpretations::parse(text, path)
                .map_err(|error| error.to_string())
                .and_then(|read| read.iter().next().map(Into::into).ok_or_else(String::new)),
            _ => Ok(text.into()),
        }
    }
}

/// The client's network as text. A prefix of full length gives the address alone.
fn format_client_network(ip: IpAddr, settings: &client::Settings) -> String {
    match ip {
        IpAddr::V4(ip) if settings.ipv4_prefix >= 32 => ip.to_string(),
        IpAddr::V6(ip) if settings.ipv6_prefix >= 128 => ip.to_string(),
        IpAddr::V4(_) => format_network(ip, settings.ipv4_prefix),
        IpAddr::V6(_) => format_network(ip, settings.ipv6_prefix),
    }
}

fn format_network(ip: IpAddr, prefix: u8) -> String {
    ipnet::IpNet::new(ip, prefix).map_or_else(|_| ip.to_string(), |net| net.trunc().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
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
        let parts = ["client_ip", "host", "path:/{tenant}/**", "path"];
        let parts = parts
            .iter()
            .map(|text| KeyPart::parse(text, &PATH_SETTINGS).unwrap());
        let key = KeyTemplate::new(parts.collect());
        let (headers, paths) = (
            HeaderMap::new(),
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
        for (position, written) in ["10.1.2.9", "A.example.", "café", "/café//x"]
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
    }
}
