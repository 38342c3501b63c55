//! Matching of a policy's conditions against a request or descriptor.

use super::conditions::find_unmet_value;
use super::{
    ConditionRegex, DescriptorConditions, Facts, KeyError, KeyPart, PartCondition, PathPattern,
    UnmetCondition, client,
};
use http::Method;
use ipnet::IpNet;
use std::net::Ipv6Addr;

/// The conditions of a policy. All of them must hold. Within one condition, any alternative
/// suffices; an empty list of alternatives always holds.
///
/// A new condition on named values is a [`KeyPart`], and the compiler demands the code that reads
/// it. For another condition, it demands code in `covers`, `depends_only_on_client`, the
/// configuration's `build_matcher` and the replay's missing fields: each lists all fields.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Matcher {
    pub methods: MethodSet,
    pub hosts: Vec<HostPattern>,
    /// Path patterns; `path` in TOML.
    pub paths: Vec<PathPattern>,
    pub path_regex: Option<ConditionRegex>,
    pub client_ips: Vec<IpNet>,
    /// `headers`, `query`, `cookies` and `jwt` in TOML. Claims come last, because they may require
    /// a signature verification.
    pub values: Vec<PartCondition>,
    /// `domain` and `descriptors` in TOML. Set only in policies for descriptors, in which all
    /// request conditions are empty, also those in `not`.
    pub descriptor_conditions: Option<DescriptorConditions>,
    /// One of these must match. Empty: no condition.
    pub any: Vec<Matcher>,
    /// The policy does not apply to a request that meets all conditions of `not`.
    pub not: Option<Box<Matcher>>,
}

/// HTTP methods. `GET` includes `HEAD`; the empty set contains every method.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MethodSet(Vec<Method>);

/// `example.com`, or `*.example.com` for all its subdomains.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum HostPattern {
    Exact(Box<str>),
    /// The suffix `.example.com` of `*.example.com`: the part after the star, with its dot.
    Subdomains(Box<str>),
}

impl Matcher {
    /// Whether all conditions hold for one interpretation of the path.
    pub fn matches(&self, facts: &Facts<'_>, path: &str) -> bool {
        self.first_unmet_condition(facts, path).is_none()
    }

    /// Returns the first condition that does not hold. Cheap conditions are evaluated first.
    pub fn first_unmet_condition(
        &self,
        facts: &Facts<'_>,
        path: &str,
    ) -> Option<UnmetCondition<'_>> {
        let unmet = match (&self.descriptor_conditions, facts.descriptor) {
            (None, None) => self
                .first_unmet_plain_condition(facts, path)
                .or_else(|| find_unmet_value(&self.values, facts)),
            (Some(conditions), Some(descriptor)) => {
                conditions.first_unmet_condition(descriptor, facts)
            }
            _ => Some(UnmetCondition::RequestKind),
        };
        unmet
            .or_else(|| self.find_unmet_alternatives(facts, path))
            .or_else(|| {
                let not = self.not.as_ref();
                not.filter(|not| not.excludes(facts, path))
                    .map(|_| UnmetCondition::Exclusion)
            })
    }

    /// Returns the first unmet condition on the method, host, path or address.
    fn first_unmet_plain_condition(
        &self,
        facts: &Facts<'_>,
        path: &str,
    ) -> Option<UnmetCondition<'_>> {
        if !self.methods.contains(facts.method) {
            return Some(UnmetCondition::Method);
        }
        if !is_empty_or_any(&self.hosts, |host| host.matches(facts.host)) {
            return Some(UnmetCondition::Host);
        }
        if !is_empty_or_any(&self.paths, |pattern| pattern.matches(path)) {
            return Some(UnmetCondition::Path);
        }
        if self
            .path_regex
            .as_ref()
            .is_some_and(|regex| !regex.is_match(path))
        {
            return Some(UnmetCondition::PathRegex);
        }
        if !is_empty_or_any(&self.client_ips, |net| net.contains(&facts.client_ip)) {
            return Some(UnmetCondition::ClientIp);
        }
        None
    }

    fn find_unmet_alternatives(&self, facts: &Facts<'_>, path: &str) -> Option<UnmetCondition<'_>> {
        let is_met = is_empty_or_any(&self.any, |one| one.matches(facts, path));
        (!is_met).then_some(UnmetCondition::Alternatives)
    }

    /// The matchers in `any` and `not`.
    fn nested_matchers(&self) -> impl Iterator<Item = &Self> {
        self.any.iter().chain(self.not.as_deref())
    }

    /// Whether any condition reads the query or cookies.
    fn reads_query_or_cookies(&self) -> bool {
        let mut parts = self.values.iter().map(|one| &one.part);
        parts.any(|part| matches!(part, KeyPart::Query(_) | KeyPart::Cookie(_)))
            || self.nested_matchers().any(Self::reads_query_or_cookies)
    }

    /// Returns a query parameter or cookie that upstreams may read differently, if the result
    /// depends on it: all other conditions hold.
    pub(super) fn find_ambiguity(
        &self,
        facts: &Facts<'_>,
        path: &str,
        client: &client::Settings,
    ) -> Option<KeyError> {
        if !self.reads_query_or_cookies() || self.first_unmet_plain_condition(facts, path).is_some()
        {
            return None;
        }
        let mut found = None;
        for one in &self.values {
            match one.part.find_ambiguity(facts, client) {
                None if !one.is_met(facts) => return None,
                ambiguity => found = found.or(ambiguity),
            }
        }
        match self.find_ambiguous_alternative(facts, path, client) {
            None if self.find_unmet_alternatives(facts, path).is_some() => return None,
            ambiguity => found = found.or(ambiguity),
        }
        let Some(not) = &self.not else { return found };
        match not.find_ambiguity(facts, path, client) {
            None if not.excludes(facts, path) => None,
            ambiguity => found.or(ambiguity),
        }
    }

    /// Returns an ambiguity in `any`, unless one of its alternatives matches without any.
    fn find_ambiguous_alternative(
        &self,
        facts: &Facts<'_>,
        path: &str,
        client: &client::Settings,
    ) -> Option<KeyError> {
        let mut found = None;
        for one in &self.any {
            match one.find_ambiguity(facts, path, client) {
                None if one.matches(facts, path) => return None,
                ambiguity => found = found.or(ambiguity),
            }
        }
        found
    }

    /// Whether these conditions, as a `not`, exclude a request. An exclusion is an exemption, so a
    /// path that is escaped twice gains none.
    fn excludes(&self, facts: &Facts<'_>, path: &str) -> bool {
        self.matches(facts, path) && !(facts.paths.has_nested_escape() && self.has_path_condition())
    }

    /// Whether a condition depends on the path.
    pub(super) fn has_path_condition(&self) -> bool {
        !self.paths.is_empty()
            || self.path_regex.is_some()
            || self.nested_matchers().any(Self::has_path_condition)
    }

    /// The conditions on values, also those in `any` and `not`.
    pub fn all_values(&self) -> Vec<&PartCondition> {
        let nested = self.nested_matchers().flat_map(Self::all_values);
        self.values.iter().chain(nested).collect()
    }

    /// Whether a condition, on the request or a descriptor, holds only if the part is present.
    pub fn requires_part(&self, part: &KeyPart) -> bool {
        let descriptor = self.descriptor_conditions.as_ref();
        let entries = descriptor.and_then(|conditions| conditions.entries.as_ref());
        let mut values = self.values.iter().chain(entries.into_iter().flatten());
        values.any(|one| one.part == *part && one.requires_value())
    }

    /// Whether a condition depends on the client's address.
    pub(super) fn has_client_ip_condition(&self) -> bool {
        !self.client_ips.is_empty() || self.nested_matchers().any(Self::has_client_ip_condition)
    }
}

fn is_empty_or_any<T>(alternatives: &[T], is_met: impl FnMut(&T) -> bool) -> bool {
    alternatives.is_empty() || alternatives.iter().any(is_met)
}

impl MethodSet {
    pub fn new(methods: Vec<Method>) -> Self {
        Self(methods)
    }

    /// The methods as configured; empty means every method.
    pub fn as_slice(&self) -> &[Method] {
        &self.0
    }

    pub fn is_any(&self) -> bool {
        self.0.is_empty()
    }

    pub fn contains(&self, method: &Method) -> bool {
        is_empty_or_any(&self.0, |listed| {
            listed == method || (listed == Method::GET && method == Method::HEAD)
        })
    }
}

impl HostPattern {
    /// Parses `name` or `*.name`, without a port.
    ///
    /// # Errors
    /// Returns a message that states the expected form.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
        let (is_wildcard, name) = match text.strip_prefix("*.") {
            Some(name) => (true, name),
            None => (false, text.as_str()),
        };
        let is_ip_literal = name.starts_with('[') && name.ends_with(']') && !is_wildcard;
        if name.is_empty()
            || name.contains(['*', '/', '@'])
            || (name.contains(':') && !is_ip_literal)
        {
            return Err("a host is a name or *.name, without port".to_owned());
        }
        Ok(if is_wildcard {
            Self::Subdomains(format!(".{name}").into())
        } else {
            Self::Exact(canonicalize_host(name))
        })
    }

    pub fn matches(&self, host: &str) -> bool {
        match self {
            Self::Exact(name) => **name == *host,
            Self::Subdomains(suffix) => host.len() > suffix.len() && host.ends_with(&**suffix),
        }
    }
}

/// A host as requests have it: in lower case, without port and trailing dot; an IPv6 address in its
/// shortest form.
pub(super) fn canonicalize_host(text: &str) -> Box<str> {
    if let Some((address, _port)) = text.strip_prefix('[').and_then(|rest| rest.split_once(']'))
        && let Ok(address) = address.parse::<Ipv6Addr>()
    {
        return format!("[{address}]").into();
    }
    let host = text.split_once(':').map_or(text, |(host, _port)| host);
    let host = host.strip_suffix('.').unwrap_or(host);
    host.to_ascii_lowercase().into()
}
