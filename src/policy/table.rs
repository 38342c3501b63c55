//! The compiled policies: built once, never changed, swapped as a whole.

use super::{
    Action, Cors, Cost, Facts, HostPattern, KeyPart, Matcher, Policy, Unmet, client, jwt, path,
    pattern::PathIndex,
};
use foldhash::{HashMap, HashSet};
use http::HeaderName;
use smallvec::SmallVec;
use std::sync::Arc;

/// The compiled, immutable policies with what is needed to read a request for them.
#[derive(Debug)]
pub struct PolicyTable {
    pub path: path::Settings,
    pub client: client::Settings,
    pub fields: Fields,
    /// Nobody, unless said otherwise.
    pub cors: Cors,
    /// In the order in which they apply.
    policies: Vec<Policy>,
    index: Index,
    headers: HashSet<HeaderName>,
    asks_for_client: bool,
    tokens: Option<Arc<jwt::Reader>>,
}

/// Which rate-limit fields answers carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fields {
    /// `RateLimit` and `RateLimit-Policy`.
    pub standard: bool,
    /// `X-RateLimit-*`.
    pub legacy: bool,
    /// `X-RateLimit-Reset` as seconds since the epoch instead of from now.
    pub legacy_reset_epoch: bool,
}

impl PolicyTable {
    /// Compiles policies given in file order; their names are unique.
    pub fn new(
        mut policies: Vec<Policy>,
        path: path::Settings,
        client: client::Settings,
        fields: Fields,
    ) -> Self {
        policies.sort_by_key(|policy| std::cmp::Reverse(policy.priority));
        let index = Index::of(&policies);
        let mut headers: HashSet<HeaderName> = policies.iter().flat_map(headers_read_by).collect();
        headers.insert(client.ip_header.clone());
        let asks_for_client = policies.iter().any(asks_for_client);
        Self {
            path,
            client,
            fields,
            cors: Cors::default(),
            policies,
            index,
            headers,
            asks_for_client,
            tokens: None,
        }
    }

    /// The same table, with tokens believed as `settings` say. Without, no token says anything.
    #[must_use]
    pub fn with_tokens(mut self, settings: jwt::Settings) -> Self {
        let mut claims: Vec<jwt::ClaimName> = Vec::new();
        for claim in self.policies.iter().flat_map(claims_asked_by) {
            if !claims.contains(&claim) {
                claims.push(claim);
            }
        }
        if !claims.is_empty() {
            self.headers.insert(settings.header.clone());
            self.tokens = Some(Arc::new(jwt::Reader::new(settings, claims)));
        }
        self
    }

    /// The same table, with answers of ours that scripts of these origins may read.
    #[must_use]
    pub fn with_cors(mut self, cors: Cors) -> Self {
        self.cors = cors;
        self
    }

    /// What reads tokens, if any policy asks for a claim.
    pub fn tokens(&self) -> Option<&Arc<jwt::Reader>> {
        self.tokens.as_ref()
    }

    /// In the order in which they apply.
    pub fn policies(&self) -> &[Policy] {
        &self.policies
    }

    /// The policies whose conditions hold, in the order in which they apply, each with its place in
    /// [`PolicyTable::policies`].
    pub fn matching(&self, facts: &Facts<'_>) -> SmallVec<[(usize, &Policy); 8]> {
        let places = self.index.candidates(facts).into_iter().filter_map(|at| usize::try_from(at).ok());
        places
            .filter_map(|at| Some((at, self.policies.get(at)?)))
            .filter(|(_, policy)| policy.unmet(facts).is_none())
            .collect()
    }

    /// Whether a request tells of a client behind its peer, but the peer is not trusted, while a policy tells
    /// clients apart: behind an ingress, everybody would share the ingress's quota.
    pub fn overhears(&self, client: &client::Client, headers: &http::HeaderMap) -> bool {
        let tells = |name: &HeaderName| headers.contains_key(name);
        let is_told = || {
            tells(&self.client.ip_header)
                || tells(&http::header::FORWARDED)
                || headers.contains_key("x-forwarded-for")
        };
        self.asks_for_client && !client.peer_trusted && is_told()
    }

    /// Whether a header decides anything: it is part of a key, a match or a cost, or names the client.
    /// Such a header must mean the same to us and to the upstream.
    pub fn reads_header(&self, name: &HeaderName) -> bool {
        self.headers.contains(name)
    }
}

impl Policy {
    /// The first condition that does not hold; `None`: the policy applies.
    ///
    /// A path may have two readings. A policy that limits or denies applies if either matches; one that
    /// exempts only if both do: an exemption must not be had by an ambiguous spelling.
    pub fn unmet(&self, facts: &Facts<'_>) -> Option<Unmet<'_>> {
        let mut unmet = facts.paths.iter().map(|path| self.matcher.first_unmet(facts, path));
        match self.action {
            Action::Allow => unmet.find(Option::is_some).flatten(),
            Action::Limit(_) | Action::Deny => unmet.reduce(Option::and).flatten(),
        }
    }
}

fn asks_for_client(policy: &Policy) -> bool {
    matches!(&policy.action, Action::Limit(quota) if quota.key.parts().contains(&KeyPart::ClientIp))
        || policy.matcher.asks_for_client()
}

fn headers_read_by(policy: &Policy) -> Vec<HeaderName> {
    let mut names = policy.matcher.header_names();
    if let Action::Limit(quota) = &policy.action {
        if let Cost::Header(cost) = &quota.cost {
            names.push(cost.name.clone());
        }
        names.extend(quota.key.parts().iter().filter_map(|part| match part {
            KeyPart::Header(name) => Some(name.clone()),
            KeyPart::Cookie(_) => Some(http::header::COOKIE),
            _ => None,
        }));
    }
    names
}

fn claims_asked_by(policy: &Policy) -> Vec<jwt::ClaimName> {
    let mut names = policy.matcher.claim_names();
    if let Action::Limit(quota) = &policy.action {
        names.extend(quota.key.parts().iter().filter_map(|part| match part {
            KeyPart::Claim(name) => Some(name.clone()),
            _ => None,
        }));
    }
    names
}

/// Finds the few policies that can match, by host and path; what they say beyond that is checked after.
#[derive(Debug, Default)]
struct Index {
    by_host: HashMap<Box<str>, Candidates>,
    any_host: Candidates,
}

#[derive(Debug, Default)]
struct Candidates {
    by_path: PathIndex,
    any_path: Vec<u32>,
}

impl Index {
    fn of(policies: &[Policy]) -> Self {
        let mut index = Self::default();
        for (id, policy) in (0..).zip(policies) {
            let matcher = &policy.matcher;
            let exact = matcher.hosts.iter().map(|host| match host {
                HostPattern::Exact(name) => Some(name),
                HostPattern::Below(_) => None,
            });
            match exact.collect::<Option<Vec<_>>>() {
                Some(names) if !names.is_empty() => {
                    for name in names {
                        index.by_host.entry(name.clone()).or_default().insert(matcher, id);
                    }
                }
                _ => index.any_host.insert(matcher, id),
            }
        }
        index
    }

    /// Ids in ascending order, each once.
    fn candidates(&self, facts: &Facts<'_>) -> SmallVec<[u32; 16]> {
        let mut found = SmallVec::new();
        for candidates in [self.by_host.get(facts.host), Some(&self.any_host)].into_iter().flatten() {
            found.extend_from_slice(&candidates.any_path);
            for path in facts.paths.iter() {
                candidates.by_path.find(path, &mut found);
            }
        }
        found.sort_unstable();
        found.dedup();
        found
    }
}

impl Candidates {
    fn insert(&mut self, matcher: &Matcher, id: u32) {
        if matcher.paths.is_empty() {
            self.any_path.push(id);
        }
        for pattern in &matcher.paths {
            self.by_path.insert(pattern, id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::path::Readings;
    use super::super::{MethodSet, Named, OnStoreFailure, PathPattern, Test};
    use super::*;
    use http::{HeaderMap, Method};

    const PATH: path::Settings = path::Settings::USUAL;

    fn policy(name: &str, action: Action, paths: &[&str]) -> Policy {
        let paths = paths.iter().map(|text| PathPattern::parse(text, &PATH).unwrap()).collect();
        Policy {
            name: name.into(),
            priority: 0,
            matcher: Matcher { paths, ..Matcher::default() },
            action,
            shadow: false,
            on_store_failure: OnStoreFailure::Open,
            reject: None,
        }
    }

    fn table(policies: Vec<Policy>) -> PolicyTable {
        let client = client::Settings {
            trusted_proxies: Vec::new(),
            ip_header: "x-forwarded-for".parse().unwrap(),
            ipv4_prefix: 32,
            ipv6_prefix: 64,
        };
        PolicyTable::new(
            policies,
            PATH,
            client,
            Fields { standard: true, legacy: true, legacy_reset_epoch: false },
        )
    }

    fn names(table: &PolicyTable, host: &str, path: &str) -> Vec<String> {
        let paths = Readings::of(path, &PATH).unwrap();
        let headers = HeaderMap::new();
        let facts = Facts {
            method: &Method::HEAD,
            host,
            paths: &paths,
            query: None,
            headers: &headers,
            client_ip: [127, 0, 0, 1].into(),
            token: crate::policy::jwt::Token::none(),
            client_cert: None,
        };
        table.matching(&facts).iter().map(|(_, policy)| policy.name.to_string()).collect()
    }

    #[test]
    fn policies_apply_by_priority_and_then_in_file_order() {
        let mut late = policy("late", Action::Deny, &["/**"]);
        late.priority = -1;
        let mut early = policy("early", Action::Deny, &["/a/**"]);
        early.priority = 5;
        let table =
            table(vec![late, policy("b", Action::Deny, &[]), early, policy("c", Action::Deny, &["/a/*"])]);
        assert_eq!(names(&table, "h", "/a/x"), ["early", "b", "c", "late"]);
        assert_eq!(names(&table, "h", "/x"), ["b", "late"]);
    }

    #[test]
    fn hosts_are_exact_or_below() {
        let mut exact = policy("exact", Action::Deny, &["/**"]);
        exact.matcher.hosts = vec![HostPattern::parse("API.example.com.").unwrap()];
        let mut below = policy("below", Action::Deny, &["/**"]);
        below.matcher.hosts = vec![HostPattern::parse("*.example.com").unwrap()];
        let table = table(vec![exact, below]);
        assert_eq!(names(&table, "api.example.com", "/"), ["exact", "below"]);
        assert_eq!(names(&table, "x.y.example.com", "/"), ["below"]);
        assert_eq!(names(&table, "example.com", "/"), Vec::<String>::new());
        assert_eq!(names(&table, "badexample.com", "/"), Vec::<String>::new());
    }

    #[test]
    fn an_exemption_is_not_had_by_an_ambiguous_spelling() {
        let table = table(vec![
            policy("free", Action::Allow, &["/public/**"]),
            policy("guard", Action::Deny, &["/api/**"]),
        ]);
        assert_eq!(names(&table, "h", "/public/x"), ["free"]);
        assert_eq!(names(&table, "h", "/public/..%2fapi/x"), ["guard"]);
        assert_eq!(names(&table, "h", "/api%2fx"), ["guard"]);
    }

    #[test]
    fn get_means_head_and_not_negates_a_whole_match() {
        let mut get = policy("get", Action::Deny, &[]);
        get.matcher.methods = MethodSet::new(vec![Method::GET]);
        let mut post = policy("post", Action::Deny, &[]);
        post.matcher.methods = MethodSet::new(vec![Method::POST]);
        let mut not = policy("not", Action::Deny, &["/**"]);
        let inner = Matcher {
            methods: MethodSet::new(vec![Method::GET]),
            headers: vec![Named { name: "x-internal".parse().unwrap(), test: Test::Present(true) }],
            ..Matcher::default()
        };
        not.matcher.not = Some(Box::new(inner));
        let table = table(vec![get, post, not]);
        assert_eq!(names(&table, "h", "/"), ["get", "not"]);
        assert!(table.reads_header(&"x-internal".parse().unwrap()));
        assert!(table.reads_header(&"x-forwarded-for".parse().unwrap()));
        assert!(!table.reads_header(&"accept".parse().unwrap()));
    }
}
