//! The compiled policies: built once, never changed, swapped as a whole.

use super::{
    Action, Cors, Cost, Descriptor, Facts, HostPattern, KeyPart, Matcher, Policy, Test, Unmet,
    client, jwt, path, pattern::PathIndex,
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
        let places = self
            .index
            .candidates(facts)
            .into_iter()
            .filter_map(|at| usize::try_from(at).ok());
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

    /// Whether a policy tells clients apart.
    pub fn asks_for_client(&self) -> bool {
        self.asks_for_client
    }

    /// Whether a header decides anything: it is part of a key, a match or a cost, or names the client.
    /// Such a header must mean the same to us and to the upstream.
    pub fn reads_header(&self, name: &HeaderName) -> bool {
        self.headers.contains(name)
    }

    /// All such headers, in no certain order.
    pub fn headers_read(&self) -> impl Iterator<Item = &HeaderName> {
        self.headers.iter()
    }
}

impl Policy {
    /// The first condition that does not hold; `None`: the policy applies.
    ///
    /// A path may have two readings. A policy that limits or denies applies if either matches; one that
    /// exempts only if both do: an exemption must not be had by an ambiguous spelling.
    pub fn unmet(&self, facts: &Facts<'_>) -> Option<Unmet<'_>> {
        let mut unmet = facts
            .paths
            .iter()
            .map(|path| self.matcher.first_unmet(facts, path));
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

/// Finds the few policies that can match, by path and by a host or a header's value; what they say beyond that is
/// checked after.
#[derive(Debug, Default)]
struct Index {
    by_host: HashMap<Box<str>, Candidates>,
    by_header: HashMap<HeaderName, HashMap<Box<[u8]>, Candidates>>,
    others: Candidates,
    described: DescribedIndex,
}

/// The same for policies about descriptors.
#[derive(Debug, Default)]
struct DescribedIndex {
    by_domain: HashMap<Box<str>, Vec<u32>>,
    by_entry: HashMap<Box<str>, HashMap<Box<str>, Vec<u32>>>,
    others: Vec<u32>,
}

#[derive(Debug, Default)]
struct Candidates {
    by_path: PathIndex,
    any_path: Vec<u32>,
}

/// What a condition asks to be so and not otherwise.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Exact<'p> {
    Host(&'p str),
    Header(&'p HeaderName, &'p str),
    Domain(&'p str),
    Entry(&'p str, &'p str),
}

impl Index {
    /// Each policy is found by that of its exact conditions which the fewest policies share: thousands may differ in
    /// a header and have their host in common, or the other way round.
    fn of(policies: &[Policy]) -> Self {
        let mut sharing: HashMap<Exact<'_>, usize> = HashMap::default();
        for exact in policies
            .iter()
            .flat_map(|policy| exact_conditions(&policy.matcher))
            .flatten()
        {
            *sharing.entry(exact).or_default() += 1;
        }
        let most = |alternatives: &Vec<Exact<'_>>| {
            alternatives
                .iter()
                .map(|exact| sharing.get(exact).copied())
                .max()
        };
        let mut index = Self::default();
        for (id, policy) in (0..).zip(policies) {
            let conditions = exact_conditions(&policy.matcher);
            match conditions.into_iter().min_by_key(most) {
                Some(alternatives) => {
                    for exact in alternatives {
                        index.insert(exact, &policy.matcher, id);
                    }
                }
                None if policy.matcher.described.is_some() => index.described.others.push(id),
                None => index.others.insert(&policy.matcher, id),
            }
        }
        index
    }

    fn insert(&mut self, exact: Exact<'_>, matcher: &Matcher, id: u32) {
        match exact {
            Exact::Host(name) => self
                .by_host
                .entry(name.into())
                .or_default()
                .insert(matcher, id),
            Exact::Header(name, value) => {
                let by_value = self.by_header.entry(name.clone()).or_default();
                by_value
                    .entry(value.as_bytes().into())
                    .or_default()
                    .insert(matcher, id);
            }
            Exact::Domain(name) => self
                .described
                .by_domain
                .entry(name.into())
                .or_default()
                .push(id),
            Exact::Entry(name, value) => {
                let by_value = self.described.by_entry.entry(name.into()).or_default();
                by_value.entry(value.into()).or_default().push(id);
            }
        }
    }

    /// Ids in ascending order, each once.
    fn candidates(&self, facts: &Facts<'_>) -> SmallVec<[u32; 16]> {
        let mut found = SmallVec::new();
        if let Some(descriptor) = facts.descriptor {
            self.described.find(descriptor, &mut found);
            found.sort_unstable();
            found.dedup();
            return found;
        }
        let by_header = self.by_header.iter().flat_map(|(name, by_value)| {
            facts
                .headers
                .get_all(name)
                .into_iter()
                .filter_map(|value| by_value.get(value.as_bytes()))
        });
        let by_host = self.by_host.get(facts.host);
        for candidates in by_host.into_iter().chain(by_header).chain([&self.others]) {
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

impl DescribedIndex {
    fn find(&self, descriptor: &Descriptor<'_>, found: &mut SmallVec<[u32; 16]>) {
        let by_entry = descriptor
            .entries
            .iter()
            .filter_map(|(name, value)| self.by_entry.get(*name)?.get(*value));
        for ids in self
            .by_domain
            .get(descriptor.domain)
            .into_iter()
            .chain(by_entry)
            .chain([&self.others])
        {
            found.extend_from_slice(ids);
        }
    }
}

/// For each condition by which a policy can be found the values that fulfil it: a request that has none of them is none
/// of the policy's.
fn exact_conditions(matcher: &Matcher) -> Vec<Vec<Exact<'_>>> {
    if let Some(described) = &matcher.described {
        let entries = described
            .entries
            .iter()
            .flatten()
            .filter_map(|entry| match &entry.test {
                Test::Is(value) => Some(vec![Exact::Entry(&entry.name, value)]),
                Test::Regex(_) | Test::Present(_) => None,
            });
        let domain = described
            .domain
            .iter()
            .map(|domain| vec![Exact::Domain(domain)]);
        return domain.chain(entries).collect();
    }
    let hosts = matcher.hosts.iter().map(|host| match host {
        HostPattern::Exact(name) => Some(Exact::Host(name)),
        HostPattern::Below(_) => None,
    });
    let hosts: Option<Vec<_>> = hosts.collect();
    let headers = matcher
        .headers
        .iter()
        .filter_map(|header| match &header.test {
            Test::Is(value) => Some(vec![Exact::Header(&header.name, value)]),
            Test::Regex(_) | Test::Present(_) => None,
        });
    hosts
        .filter(|hosts| !hosts.is_empty())
        .into_iter()
        .chain(headers)
        .collect()
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
    use super::super::{MethodSet, Named, OnStoreFailure, PathPattern};
    use super::*;
    use http::{HeaderMap, Method};

    const PATH: path::Settings = path::Settings::USUAL;

    fn policy(name: &str, action: Action, paths: &[&str]) -> Policy {
        let paths = paths
            .iter()
            .map(|text| PathPattern::parse(text, &PATH).unwrap())
            .collect();
        Policy {
            name: name.into(),
            priority: 0,
            matcher: Matcher {
                paths,
                ..Matcher::default()
            },
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
            Fields {
                standard: true,
                legacy: true,
                legacy_reset_epoch: false,
            },
        )
    }

    fn facts<'a>(host: &'a str, paths: &'a Readings, headers: &'a HeaderMap) -> Facts<'a> {
        let client_ip = [127, 0, 0, 1].into();
        let token = super::super::jwt::Token::none();
        let client_cert = None;
        Facts {
            method: &Method::HEAD,
            host,
            paths,
            query: None,
            headers,
            client_ip,
            token,
            client_cert,
            descriptor: None,
        }
    }

    fn names(table: &PolicyTable, host: &str, path: &str) -> Vec<String> {
        let (paths, headers) = (Readings::of(path, &PATH).unwrap(), HeaderMap::new());
        let matching = table.matching(&facts(host, &paths, &headers));
        matching
            .iter()
            .map(|(_, policy)| policy.name.to_string())
            .collect()
    }

    fn is(name: &'static str, value: &str) -> Named<HeaderName> {
        Named {
            name: HeaderName::from_static(name),
            test: Test::Is(value.into()),
        }
    }

    #[test]
    fn policies_apply_by_priority_and_then_in_file_order() {
        let mut late = policy("late", Action::Deny, &["/**"]);
        late.priority = -1;
        let mut early = policy("early", Action::Deny, &["/a/**"]);
        early.priority = 5;
        let table = table(vec![
            late,
            policy("b", Action::Deny, &[]),
            early,
            policy("c", Action::Deny, &["/a/*"]),
        ]);
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
    fn the_index_finds_what_trying_each_policy_finds() {
        let hosts = [vec![], vec!["a"], vec!["a", "b"], vec!["a", "*.b"]];
        let present = Named {
            name: HeaderName::from_static("x"),
            test: Test::Present(true),
        };
        let headers = [
            vec![],
            vec![present.clone()],
            vec![is("x", "1")],
            vec![is("x", "2"), present],
            vec![is("x", "1"), is("y", "1")],
        ];
        let mut policies = Vec::new();
        for (hosts, headers) in hosts
            .iter()
            .flat_map(|hosts| headers.iter().map(move |all| (hosts, all)))
        {
            for paths in [&[][..], &["/p"], &["/q/**", "/p"]] {
                let mut policy = policy(&policies.len().to_string(), Action::Deny, paths);
                policy.matcher.hosts = hosts
                    .iter()
                    .map(|host| HostPattern::parse(host).unwrap())
                    .collect();
                policy.matcher.headers = headers.clone();
                policies.push(policy);
            }
        }
        let table = table(policies);
        let lines: [&[(&str, &str)]; 5] = [
            &[],
            &[("x", "1")],
            &[("x", "2"), ("x", "1")],
            &[("x", "1"), ("y", "1")],
            &[("y", "1")],
        ];
        for (host, path, lines) in ["a", "b", "c.b", "c"].into_iter().flat_map(|host| {
            ["/p", "/q/r", "/"]
                .into_iter()
                .flat_map(move |path| lines.map(|lines| (host, path, lines)))
        }) {
            let (paths, mut headers) = (Readings::of(path, &PATH).unwrap(), HeaderMap::new());
            for (name, value) in lines {
                headers.append(HeaderName::from_static(name), value.parse().unwrap());
            }
            let facts = facts(host, &paths, &headers);
            let found: Vec<usize> = table.matching(&facts).iter().map(|(at, _)| *at).collect();
            let each = table.policies().iter().enumerate();
            let tried: Vec<usize> = each
                .filter(|(_, policy)| policy.unmet(&facts).is_none())
                .map(|(at, _)| at)
                .collect();
            assert_eq!(found, tried, "{host} {path} {lines:?}");
        }
    }

    #[test]
    fn a_policy_is_found_by_what_it_shares_with_the_fewest() {
        let with = |host: &str, tenant: &str| {
            let mut policy = policy(&format!("{host}{tenant}"), Action::Deny, &[]);
            policy.matcher.hosts = vec![HostPattern::parse(host).unwrap()];
            policy.matcher.headers = vec![is("x", tenant)];
            policy
        };
        let headers: HeaderMap = [(HeaderName::from_static("x"), "1".parse().unwrap())]
            .into_iter()
            .collect();
        let paths = Readings::of("/", &PATH).unwrap();
        for policies in [
            ["1", "2", "3"].map(|tenant| with("a", tenant)),
            ["a", "b", "c"].map(|host| with(host, "1")),
        ] {
            let table = table(policies.to_vec());
            assert_eq!(
                table
                    .index
                    .candidates(&facts("a", &paths, &headers))
                    .to_vec(),
                [0]
            );
        }
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
            headers: vec![Named {
                name: "x-internal".parse().unwrap(),
                test: Test::Present(true),
            }],
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
