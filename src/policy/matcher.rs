//! The conditions under which a policy applies.

use super::jwt::{Claim, ClaimName};
use super::{Described, Facts, PathPattern, facts};
use http::{HeaderName, Method};
use ipnet::IpNet;
use regex::Regex;
use std::fmt;

/// Conditions: all of them must hold; within one, any alternative. An empty list is no condition.
#[derive(Clone, Debug, Default)]
pub struct Matcher {
    pub methods: MethodSet,
    pub hosts: Vec<HostPattern>,
    pub paths: Vec<PathPattern>,
    pub path_regex: Option<Regex>,
    pub headers: Vec<Named<HeaderName>>,
    pub query: Vec<Named<Box<str>>>,
    pub cookies: Vec<Named<Box<str>>>,
    pub client_ips: Vec<IpNet>,
    pub claims: Vec<Named<ClaimName>>,
    /// For descriptors; with it, the others are empty, those of `not` too.
    pub described: Option<Described>,
    /// Must *not* hold as a whole.
    pub not: Option<Box<Matcher>>,
}

/// A condition on a named value.
#[derive(Clone, Debug)]
pub struct Named<N> {
    pub name: N,
    pub test: Test,
}

/// A condition on a value. With several values of one name, any may fulfil it.
#[derive(Clone, Debug)]
pub enum Test {
    Is(Box<str>),
    Regex(Regex),
    /// Whether the name occurs at all.
    Present(bool),
}

/// A condition that a request does not fulfil.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unmet<'a> {
    Method,
    Host,
    Path,
    PathRegex,
    ClientIp,
    Header(&'a str),
    Query(&'a str),
    Cookie(&'a str),
    Claim(&'a str),
    /// It is about descriptors.
    Service,
    Domain,
    Entry(&'a str),
    /// A descriptor says more than was asked for.
    OtherEntries,
    /// What must not hold holds.
    Not,
}

/// For people: `its path is another`.
impl fmt::Display for Unmet<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Method => f.write_str("not for this method"),
            Self::Host => f.write_str("not for this host"),
            Self::Path => f.write_str("not for this path"),
            Self::PathRegex => f.write_str("path_regex does not match"),
            Self::ClientIp => f.write_str("not for this client address"),
            Self::Header(name) => write!(f, "the condition on header {name} does not hold"),
            Self::Query(name) => write!(f, "the condition on query parameter {name} does not hold"),
            Self::Cookie(name) => write!(f, "the condition on cookie {name} does not hold"),
            Self::Claim(name) => write!(f, "the condition on claim {name} does not hold"),
            Self::Service => f.write_str("for calls of the rate-limit service only"),
            Self::Domain => f.write_str("not for this domain"),
            Self::Entry(name) => {
                write!(f, "the condition on descriptor entry {name} does not hold")
            }
            Self::OtherEntries => f.write_str("the descriptor has other entries too"),
            Self::Not => f.write_str("excepted by its `not`"),
        }
    }
}

/// Methods, where `GET` also means `HEAD`; empty means all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MethodSet(Vec<Method>);

/// `example.com`, or `*.example.com` for every name below it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostPattern {
    Exact(Box<str>),
    /// The part after the star, with its dot.
    Below(Box<str>),
}

impl Matcher {
    /// Whether all conditions hold for one reading of the path.
    pub fn matches(&self, facts: &Facts<'_>, path: &str) -> bool {
        self.first_unmet(facts, path).is_none()
    }

    /// The first condition that does not hold, cheapest first.
    pub fn first_unmet(&self, facts: &Facts<'_>, path: &str) -> Option<Unmet<'_>> {
        match (&self.described, facts.descriptor) {
            (None, None) => {}
            (Some(described), Some(descriptor)) => {
                let not = || {
                    self.not
                        .as_ref()
                        .filter(|not| not.matches(facts, path))
                        .map(|_| Unmet::Not)
                };
                return described.first_unmet(descriptor).or_else(not);
            }
            _ => return Some(Unmet::Service),
        }
        if !self.methods.contains(facts.method) {
            return Some(Unmet::Method);
        }
        if !any(&self.hosts, |host| host.matches(facts.host)) {
            return Some(Unmet::Host);
        }
        if !any(&self.paths, |pattern| pattern.matches(path)) {
            return Some(Unmet::Path);
        }
        if self
            .path_regex
            .as_ref()
            .is_some_and(|regex| !regex.is_match(path))
        {
            return Some(Unmet::PathRegex);
        }
        if !any(&self.client_ips, |net| net.contains(&facts.client_ip)) {
            return Some(Unmet::ClientIp);
        }
        for header in &self.headers {
            if !header
                .test
                .holds(facts::header_values(facts.headers, &header.name))
            {
                return Some(Unmet::Header(header.name.as_str()));
            }
        }
        for parameter in &self.query {
            if !parameter
                .test
                .holds(facts::query_values(facts.query, &parameter.name))
            {
                return Some(Unmet::Query(&parameter.name));
            }
        }
        for cookie in &self.cookies {
            if !cookie
                .test
                .holds(facts::cookie_values(facts.headers, &cookie.name))
            {
                return Some(Unmet::Cookie(&cookie.name));
            }
        }
        // Last: it may take a signature to be verified.
        for claim in &self.claims {
            if !claim
                .test
                .holds_for(facts.token.claim(facts.headers, &claim.name))
            {
                return Some(Unmet::Claim(claim.name.as_ref()));
            }
        }
        self.not
            .as_ref()
            .filter(|not| not.matches(facts, path))
            .map(|_| Unmet::Not)
    }

    /// The headers that these conditions read.
    pub(super) fn header_names(&self) -> Vec<HeaderName> {
        let mut names: Vec<_> = self
            .headers
            .iter()
            .map(|header| header.name.clone())
            .collect();
        if !self.cookies.is_empty() {
            names.push(http::header::COOKIE);
        }
        names.extend(self.not.iter().flat_map(|not| not.header_names()));
        names
    }

    /// Whether they ask for the client's address.
    pub(super) fn asks_for_client(&self) -> bool {
        !self.client_ips.is_empty() || self.not.as_ref().is_some_and(|not| not.asks_for_client())
    }

    /// The claims that these conditions ask for.
    pub(super) fn claim_names(&self) -> Vec<ClaimName> {
        let mut names: Vec<_> = self.claims.iter().map(|claim| claim.name.clone()).collect();
        names.extend(self.not.iter().flat_map(|not| not.claim_names()));
        names
    }
}

fn any<T>(alternatives: &[T], holds: impl FnMut(&T) -> bool) -> bool {
    alternatives.is_empty() || alternatives.iter().any(holds)
}

impl Test {
    pub(super) fn holds<V: AsRef<[u8]>>(&self, mut values: impl Iterator<Item = V>) -> bool {
        match self {
            Self::Is(wanted) => values.any(|value| value.as_ref() == wanted.as_bytes()),
            Self::Regex(regex) => {
                values.any(|value| regex.is_match(&String::from_utf8_lossy(value.as_ref())))
            }
            Self::Present(wanted) => values.next().is_some() == *wanted,
        }
    }

    /// Of a list, any element may fulfil it.
    fn holds_for(&self, claim: &Claim) -> bool {
        match self {
            Self::Present(wanted) => claim.is_present() == *wanted,
            Self::Is(_) | Self::Regex(_) => self.holds(claim.texts()),
        }
    }
}

impl MethodSet {
    pub fn new(methods: Vec<Method>) -> Self {
        Self(methods)
    }

    /// As written; empty means all.
    pub fn listed(&self) -> &[Method] {
        &self.0
    }

    pub fn is_any(&self) -> bool {
        self.0.is_empty()
    }

    pub fn contains(&self, method: &Method) -> bool {
        any(&self.0, |listed| {
            listed == method || (listed == Method::GET && method == Method::HEAD)
        })
    }
}

impl HostPattern {
    /// Reads `name` or `*.name`, without a port.
    ///
    /// # Errors
    /// A sentence that says what is wrong with it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = text.strip_suffix('.').unwrap_or(text).to_ascii_lowercase();
        let (below, name) = match text.strip_prefix("*.") {
            Some(name) => (true, name),
            None => (false, text.as_str()),
        };
        let address = name.starts_with('[') && name.ends_with(']') && !below;
        if name.is_empty() || name.contains(['*', '/', '@']) || (name.contains(':') && !address) {
            return Err("a host is a name or *.name, without port".to_owned());
        }
        Ok(if below {
            Self::Below(format!(".{name}").into())
        } else {
            Self::Exact(name.into())
        })
    }

    pub fn matches(&self, host: &str) -> bool {
        match self {
            Self::Exact(name) => **name == *host,
            Self::Below(suffix) => host.len() > suffix.len() && host.ends_with(&**suffix),
        }
    }
}
