//! The compiled, immutable table of policies. A reload replaces the table as a whole.

use super::policy_index::PolicyIndex;
use super::{
    CorsOrigins, CostSource, Facts, HeaderValueError, JsonPointer, KeyContext, KeyPart, NamedLimit,
    Policy, PolicyAction, PolicyMode, ValueCondition, client, jwt, path,
};
use foldhash::HashSet;
use http::{HeaderMap, HeaderName};
use indexmap::IndexSet;
use smallvec::SmallVec;
use std::sync::Arc;

/// The policies that match a request or a descriptor, with their indices, in their order.
pub type MatchingPolicies<'t> = SmallVec<[(usize, &'t Policy); 8]>;

/// The compiled policies, and the settings needed to read a request for them.
#[derive(Debug)]
pub struct PolicyTable {
    pub path: path::Settings,
    pub client: client::Settings,
    pub rate_limit_headers: RateLimitHeaderSettings,
    /// Request header with the names of the policies in [mode `Mark`](super::PolicyMode::Mark)
    /// whose limit a request exceeds. tidegate removes this header from the requests of clients.
    pub mark_header: HeaderName,
    /// Headers that the gateway in front always sets or removes.
    pub trusted_headers: Vec<HeaderName>,
    /// Origins with access to local replies; none by default.
    pub cors: CorsOrigins,
    /// In the order of their application.
    policies: Vec<Policy>,
    policy_index: PolicyIndex,
    referenced_headers: HashSet<HeaderName>,
    /// Referenced header names with `_` and similar characters replaced by `-`, as CGI-like
    /// upstreams read them.
    dashed_headers: HashSet<HeaderName>,
    /// The headers whose values are compared or are part of a key, without duplicates.
    value_headers: Vec<HeaderName>,
    /// Whether any policy depends on the client's address.
    pub depends_on_client_ip: bool,
    /// Set if any policy reads a claim.
    pub token_reader: Option<Arc<jwt::TokenReader>>,
    /// The path at which clients can query their quotas.
    pub self_service: Option<SelfServiceSettings>,
    /// Indices of the policies that read the body.
    body_readers: Box<[usize]>,
    /// Where all policies read values in the body, without duplicates.
    body_pointers: Box<[JsonPointer]>,
}

/// The default of [`PolicyTable::mark_header`].
const DEFAULT_MARK_HEADER: HeaderName = HeaderName::from_static("x-tidegate-over");

/// The path at which clients can query their quotas.
#[derive(Clone, Debug)]
pub struct SelfServiceSettings {
    /// The exact path.
    pub path: Box<str>,
    /// The limit of queries, per client.
    pub limit: NamedLimit,
}

/// The rate-limit headers that responses carry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimitHeaderSettings {
    /// `RateLimit` and `RateLimit-Policy`.
    pub standard: bool,
    /// `X-RateLimit-*`.
    pub legacy: bool,
    /// `X-RateLimit-Reset` as seconds since the Unix epoch instead of seconds from now.
    pub legacy_reset_epoch: bool,
}

impl PolicyTable {
    /// Compiles policies. `policies` are in file order and have unique names.
    pub fn new(
        mut policies: Vec<Policy>,
        path: path::Settings,
        client: client::Settings,
        rate_limit_headers: RateLimitHeaderSettings,
    ) -> Self {
        policies.sort_by_key(|policy| std::cmp::Reverse(policy.priority));
        let policy_index = PolicyIndex::from_policies(&policies);
        let parts: Vec<KeyPart> = policies.iter().flat_map(parts_read_by).collect();
        let body_pointers = parts.iter().filter_map(|part| match part {
            KeyPart::Body(pointer) => Some(pointer.clone()),
            _ => None,
        });
        let body_pointers: IndexSet<JsonPointer> = body_pointers.collect();
        let body_readers = policies.iter().enumerate();
        let body_readers = body_readers.filter(|(_, policy)| reads_body(policy));
        let body_readers: Vec<usize> = body_readers.map(|(index, _)| index).collect();
        let depends_on_client_ip = parts.contains(&KeyPart::ClientIp);
        let costs = policies
            .iter()
            .filter_map(|policy| match &policy.quota()?.cost {
                CostSource::Header(cost) => Some(&cost.name),
                _ => None,
            });
        let headers = parts.iter().filter_map(KeyPart::source_header);
        let headers = headers.chain(costs).chain([&client.ip_header]);
        let headers = headers.cloned().collect();
        let enforced = policies.iter().filter(|policy| may_reject(policy));
        let value_headers: IndexSet<_> = enforced.flat_map(value_headers_of).collect();
        let mut table = Self {
            path,
            client,
            rate_limit_headers,
            mark_header: DEFAULT_MARK_HEADER,
            trusted_headers: Vec::new(),
            cors: CorsOrigins::default(),
            policies,
            policy_index,
            referenced_headers: HashSet::default(),
            dashed_headers: HashSet::default(),
            value_headers: value_headers.into_iter().collect(),
            depends_on_client_ip,
            token_reader: None,
            self_service: None,
            body_readers: body_readers.into(),
            body_pointers: body_pointers.into_iter().collect(),
        };
        table.reference_headers(headers);
        table
    }

    /// Returns the table with a token reader. Without token settings, every claim is absent.
    #[must_use]
    pub fn with_token_settings(mut self, settings: jwt::Settings) -> Self {
        let parts = self.policies.iter().flat_map(parts_read_by);
        let claims = parts.filter_map(|part| match part {
            KeyPart::Claim(name) => Some(name),
            _ => None,
        });
        let claims: IndexSet<jwt::ClaimName> = claims.collect();
        if !claims.is_empty() {
            self.reference_headers(vec![settings.header.clone()]);
            self.token_reader = Some(Arc::new(jwt::TokenReader::new(settings, claims)));
        }
        self
    }

    /// Returns the table with the header that marks requests, which only tidegate sets, and with
    /// headers that the gateway in front sets. Those are protected as the ones that policies read:
    /// the app may read them.
    #[must_use]
    pub fn with_protected_headers(mut self, mark: HeaderName, trusted: Vec<HeaderName>) -> Self {
        self.reference_headers(trusted.clone());
        self.dashed_headers.extend(dashed_name(&mark));
        self.mark_header = mark;
        self.trusted_headers = trusted;
        self
    }

    /// The settings of self-service, if `path` is its path.
    pub fn self_service_at(&self, path: &str) -> Option<&SelfServiceSettings> {
        let settings = self.self_service.as_ref()?;
        (*settings.path == *path).then_some(settings)
    }

    /// What the keys of a policy depend on beside the request.
    pub fn key_context<'a>(&'a self, policy: &'a Policy) -> KeyContext<'a> {
        KeyContext {
            client: &self.client,
            path: &self.path,
            matcher: &policy.matcher,
        }
    }

    /// The policies in the order of their application.
    pub fn policies(&self) -> &[Policy] {
        &self.policies
    }

    /// The matching policies in the order of their application, each with its index in
    /// [`PolicyTable::policies`]. Includes policies for which [`Policy::find_ambiguity`] finds one.
    pub fn matching_policies(&self, facts: &Facts<'_>) -> MatchingPolicies<'_> {
        let candidates = self.policy_index.find_candidates(facts);
        candidates
            .into_iter()
            .filter_map(|index| Some((index, self.policies.get(index)?)))
            .filter(|(_, policy)| {
                policy.first_unmet_condition(facts).is_none()
                    || policy
                        .find_ambiguity(facts, self.client.value_checks)
                        .is_some()
            })
            .collect()
    }

    /// How many bytes of the body have to be read for the policies that apply to a request, or may
    /// apply: the most of them; 0 if none reads the body. The body of `facts` counts as unreadable.
    pub fn body_bytes_to_read(&self, facts: &Facts<'_>) -> u64 {
        let readers = self.body_readers.iter();
        let policies = readers.filter_map(|index| self.policies.get(*index));
        let needed = policies.filter(|policy| policy.needs_body(facts));
        needed.map(|policy| policy.max_scan).max().unwrap_or(0)
    }

    /// Whether any policy reads the body.
    pub fn reads_bodies(&self) -> bool {
        !self.body_readers.is_empty()
    }

    /// Where all policies read values in the body.
    pub fn body_pointers(&self) -> impl Iterator<Item = &JsonPointer> {
        self.body_pointers.iter()
    }

    /// Whether a request from an untrusted peer has a forwarding header while a policy depends on
    /// the client's address. If so, all clients behind an ingress share the quota of its address.
    pub fn ignores_forwarding_headers(
        &self,
        client: &client::ClientAddress,
        headers: &HeaderMap,
    ) -> bool {
        // One pass instead of three lookups: these headers are usually absent.
        let has_forwarding_header = || {
            headers.keys().any(|name| {
                *name == self.client.ip_header
                    || *name == http::header::FORWARDED
                    || name.as_str() == "x-forwarded-for"
            })
        };
        self.depends_on_client_ip && !client.is_peer_trusted && has_forwarding_header()
    }

    /// Whether a header is part of a key, a condition or a cost, or identifies the client. A header
    /// that policies read must have the same meaning for tidegate and the upstream.
    pub fn reads_header(&self, name: &HeaderName) -> bool {
        self.referenced_headers.contains(name)
    }

    fn reference_headers(&mut self, names: Vec<HeaderName>) {
        self.dashed_headers
            .extend(names.iter().filter_map(dashed_name));
        self.referenced_headers.extend(names);
    }

    /// Whether a request header looks like a header that policies read: the names are equal once
    /// `_`, `.` and similar characters are replaced by `-`. An app may confuse the two.
    pub fn has_look_alike(&self, headers: &HeaderMap) -> bool {
        let is_look_alike = |name: &HeaderName| {
            let dashed = dashed_name(name);
            !self.reads_header(name)
                && *name != self.mark_header
                && self
                    .dashed_headers
                    .contains(dashed.as_ref().unwrap_or(name))
        };
        !self.dashed_headers.is_empty() && headers.keys().any(is_look_alike)
    }

    /// Checks the headers whose values keys and conditions read.
    ///
    /// # Errors
    /// Returns why an app may read another value than policies do.
    pub fn check_header_values(&self, headers: &HeaderMap) -> Result<(), HeaderValueError> {
        let checks = self.client.value_checks;
        let names = &self.value_headers;
        // Comparing the few names of a request is cheaper than a lookup.
        let lines = headers.iter().filter(|_| !names.is_empty());
        lines
            .filter(|(name, _)| names.contains(name))
            .try_for_each(|(name, value)| checks.check_header_value(name, value.as_bytes()))
    }

    /// The headers for which [`PolicyTable::reads_header`] holds, in no particular order.
    pub fn referenced_headers(&self) -> impl Iterator<Item = &HeaderName> {
        self.referenced_headers.iter()
    }
}

/// The name with `-` for each character that is no letter and no digit, as CGI-like upstreams read
/// it, if that is another name.
pub fn dashed_name(name: &HeaderName) -> Option<HeaderName> {
    // Names have no capitals.
    let is_plain = |byte: &u8| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-');
    let bytes = name.as_str().as_bytes();
    if bytes.iter().all(is_plain) {
        return None;
    }
    let dashed = bytes
        .iter()
        .map(|byte| if is_plain(byte) { *byte } else { b'-' });
    HeaderName::from_bytes(&dashed.collect::<SmallVec<[u8; 64]>>()).ok()
}

/// Whether the policy is enforced, at least for some keys.
fn may_reject(policy: &Policy) -> bool {
    let quota = policy.quota();
    policy.is_enforced()
        || quota.is_some_and(|quota| quota.overrides.modes().any(PolicyMode::is_enforced))
}

/// The headers whose values a policy compares or keys by.
fn value_headers_of(policy: &Policy) -> Vec<HeaderName> {
    let conditions = policy.matcher.all_conditions().into_iter();
    let compared = conditions.filter(|one| !matches!(one.condition, ValueCondition::Present(_)));
    let sources = policy.quota().map(|quota| quota.key.sources());
    let parts = compared
        .map(|one| &one.part)
        .chain(sources.into_iter().flatten());
    let names = parts.filter_map(|part| match part {
        KeyPart::Header(name) => Some(name.clone()),
        _ => None,
    });
    names.collect()
}

/// The parts of requests that the conditions, the key, the cost and the amounts of a policy read.
fn parts_read_by(policy: &Policy) -> Vec<KeyPart> {
    let conditions = policy.matcher.all_conditions().into_iter();
    let mut parts: Vec<KeyPart> = conditions.map(|one| one.part.clone()).collect();
    if let Some(quota) = policy.quota() {
        let amounts = quota.all_limits().filter_map(|one| one.amount.as_ref());
        let sources = quota.key.sources().chain(amounts.map(|one| &one.field));
        parts.extend(sources.cloned());
        parts.extend(quota.cost.parts());
    }
    parts
}

/// Whether the policy depends on the body, or on its size.
fn reads_body(policy: &Policy) -> bool {
    let is_body = |part: &KeyPart| matches!(part, KeyPart::Body(_));
    let quota = policy.quota();
    parts_read_by(policy).iter().any(is_body)
        || quota.is_some_and(|quota| quota.cost.reads_body_size())
}

impl PolicyTable {
    /// Describes the spellings that only the operator can rule out, because they depend on the app.
    pub fn spelling_notes(&self) -> Vec<String> {
        let case_matters = self.path.normalize && self.path.case_sensitive;
        let mut policies = self.policies().iter().filter(|_| case_matters);
        let case = policies.find(|one| is_evaded_by_case(one)).map(|policy| {
            format!(
                "policy \"{}\" misses paths in another letter case: if your app routes them alike (Express and Koa do), set path.case_sensitive = false",
                policy.name
            )
        });
        let limits_by_address = self.policies().iter().any(|policy| {
            let key = policy.quota().map(|quota| &quota.key);
            policy.is_enforced()
                && key.is_some_and(|key| key.parts().any(|part| *part == KeyPart::ClientIp))
                && !key.is_some_and(|key| key.parts().any(KeyPart::is_client_chosen))
        });
        let keys_by_authorization = |policy: &&Policy| {
            let mut sources = policy.quota().into_iter().flat_map(|one| one.key.sources());
            sources.any(|part| *part == KeyPart::Header(http::header::AUTHORIZATION))
        };
        let mut policies = self.policies().iter().filter(|_| !limits_by_address);
        let authorization = policies.find(keys_by_authorization).map(|policy| {
            format!(
                "policy \"{}\" has a quota for each value of the header authorization, and clients choose it (\"Token a\", \"Token b\"; Basic and Bearer have one spelling): expected a jwt: key, or a policy with client_ip beside it",
                policy.name
            )
        });
        case.into_iter().chain(authorization).collect()
    }
}

fn is_evaded_by_case(policy: &Policy) -> bool {
    let is_restriction = !matches!(policy.action, PolicyAction::Allow) && policy.is_enforced();
    let paths = policy.matcher.path_patterns();
    is_restriction && !paths.is_empty() && paths.iter().all(|pattern| pattern.has_letters())
}

#[cfg(test)]
mod tests {
    use super::super::path::PathInterpretations;
    use super::super::{
        HostPattern, Matcher, OnStoreFailure, PartCondition, PathPattern, PolicyAction,
    };
    use super::*;
    use crate::policy::descriptor::tests::matcher_with;
    use http::{HeaderMap, Method};

    const PATH_SETTINGS: path::Settings = path::Settings::DEFAULT;

    fn make_policy(name: &str, action: PolicyAction, paths: &[&str]) -> Policy {
        let patterns = paths
            .iter()
            .map(|text| PathPattern::parse(text, &PATH_SETTINGS).unwrap());
        let patterns: Box<[_]> = patterns.collect();
        let on_paths = |patterns| matcher_with(KeyPart::WholePath, ValueCondition::Paths(patterns));
        Policy {
            name: name.into(),
            priority: 0,
            matcher: if patterns.is_empty() {
                Matcher::default()
            } else {
                on_paths(patterns)
            },
            action,
            mode: PolicyMode::Enforce,
            is_reported: true,
            on_store_failure: OnStoreFailure::Open,
            max_scan: 0,
            reject_response: None,
        }
    }

    fn make_table(policies: Vec<Policy>) -> PolicyTable {
        let client = client::Settings {
            trusted_proxies: Vec::new(),
            ip_header: "x-forwarded-for".parse().unwrap(),
            ipv4_prefix: 32,
            ipv6_prefix: 64,
            nat64_prefixes: Vec::new(),
            value_checks: crate::policy::ValueChecks::ALL,
        };
        PolicyTable::new(
            policies,
            PATH_SETTINGS,
            client,
            RateLimitHeaderSettings {
                standard: true,
                legacy: true,
                legacy_reset_epoch: false,
            },
        )
    }

    fn make_facts<'a>(
        host: &'a str,
        paths: &'a PathInterpretations,
        headers: &'a HeaderMap,
    ) -> Facts<'a> {
        let client_ip = [127, 0, 0, 1].into();
        let token = super::super::jwt::RequestToken::without_token_reader();
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
            has_joined_headers: false,
            is_peer_trusted: false,
            body: None,
            unreadable_holds: true,
            descriptor: None,
        }
    }

    fn matching_policy_names(table: &PolicyTable, host: &str, path: &str) -> Vec<String> {
        let (paths, headers) = (
            PathInterpretations::parse(path, &PATH_SETTINGS).unwrap(),
            HeaderMap::new(),
        );
        let matching = table.matching_policies(&make_facts(host, &paths, &headers));
        matching
            .iter()
            .map(|(_, policy)| policy.name.to_string())
            .collect()
    }

    fn make_host_condition(hosts: &[&str]) -> PartCondition {
        let hosts = hosts.iter().map(|host| HostPattern::parse(host).unwrap());
        PartCondition {
            part: KeyPart::Host,
            condition: ValueCondition::Hosts(hosts.collect()),
        }
    }

    fn make_header_condition(name: &'static str, value: &str) -> PartCondition {
        PartCondition {
            part: KeyPart::Header(HeaderName::from_static(name)),
            condition: ValueCondition::equals(value),
        }
    }

    #[test]
    fn policies_apply_by_priority_and_then_in_file_order() {
        let mut late = make_policy("late", PolicyAction::Deny, &["/**"]);
        late.priority = -1;
        let mut early = make_policy("early", PolicyAction::Deny, &["/a/**"]);
        early.priority = 5;
        let table = make_table(vec![
            late,
            make_policy("b", PolicyAction::Deny, &[]),
            early,
            make_policy("c", PolicyAction::Deny, &["/a/*"]),
        ]);
        assert_eq!(
            matching_policy_names(&table, "h", "/a/x"),
            ["early", "b", "c", "late"]
        );
        assert_eq!(matching_policy_names(&table, "h", "/x"), ["b", "late"]);
    }

    #[test]
    fn host_patterns_match_exactly_or_by_subdomain() {
        let mut exact = make_policy("exact", PolicyAction::Deny, &["/**"]);
        let conditions = &mut exact.matcher.conditions;
        conditions.push(make_host_condition(&["API.example.com."]));
        let mut below = make_policy("below", PolicyAction::Deny, &["/**"]);
        let conditions = &mut below.matcher.conditions;
        conditions.push(make_host_condition(&["*.example.com"]));
        let table = make_table(vec![exact, below]);
        assert_eq!(
            matching_policy_names(&table, "api.example.com", "/"),
            ["exact", "below"]
        );
        assert_eq!(
            matching_policy_names(&table, "x.y.example.com", "/"),
            ["below"]
        );
        assert_eq!(
            matching_policy_names(&table, "example.com", "/"),
            Vec::<String>::new()
        );
        assert_eq!(
            matching_policy_names(&table, "badexample.com", "/"),
            Vec::<String>::new()
        );
    }

    #[test]
    fn the_index_finds_the_same_policies_as_a_scan() {
        let hosts = [vec![], vec!["a"], vec!["a", "b"], vec!["a", "*.b"]];
        let present = PartCondition {
            part: KeyPart::Header(HeaderName::from_static("x")),
            condition: ValueCondition::Present(true),
        };
        let headers = [
            vec![],
            vec![present.clone()],
            vec![make_header_condition("x", "1")],
            vec![make_header_condition("x", "2"), present],
            vec![
                make_header_condition("x", "1"),
                make_header_condition("y", "1"),
            ],
        ];
        let mut policies = Vec::new();
        for (hosts, headers) in hosts
            .iter()
            .flat_map(|hosts| headers.iter().map(move |all| (hosts, all)))
        {
            for paths in [&[][..], &["/p"], &["/q/**", "/p"]] {
                let mut policy =
                    make_policy(&policies.len().to_string(), PolicyAction::Deny, paths);
                if !hosts.is_empty() {
                    policy.matcher.conditions.push(make_host_condition(hosts));
                }
                policy.matcher.conditions.extend(headers.clone());
                policies.push(policy);
            }
        }
        let table = make_table(policies);
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
            let (paths, mut headers) = (
                PathInterpretations::parse(path, &PATH_SETTINGS).unwrap(),
                HeaderMap::new(),
            );
            for (name, value) in lines {
                headers.append(HeaderName::from_static(name), value.parse().unwrap());
            }
            let facts = make_facts(host, &paths, &headers);
            let found: Vec<usize> = table
                .matching_policies(&facts)
                .iter()
                .map(|(at, _)| *at)
                .collect();
            let each = table.policies().iter().enumerate();
            let scanned: Vec<usize> = each
                .filter(|(_, policy)| policy.first_unmet_condition(&facts).is_none())
                .map(|(at, _)| at)
                .collect();
            assert_eq!(found, scanned, "{host} {path} {lines:?}");
        }
    }

    #[test]
    fn policies_are_indexed_by_their_most_selective_condition() {
        let with = |host: &str, tenant: &str| {
            let mut policy = make_policy(&format!("{host}{tenant}"), PolicyAction::Deny, &[]);
            policy.matcher.conditions = vec![
                make_host_condition(&[host]),
                make_header_condition("x", tenant),
            ];
            policy
        };
        let headers: HeaderMap = [(HeaderName::from_static("x"), "1".parse().unwrap())]
            .into_iter()
            .collect();
        let paths = PathInterpretations::parse("/", &PATH_SETTINGS).unwrap();
        for policies in [
            ["1", "2", "3"].map(|tenant| with("a", tenant)),
            ["a", "b", "c"].map(|host| with(host, "1")),
        ] {
            let table = make_table(policies.to_vec());
            assert_eq!(
                table
                    .policy_index
                    .find_candidates(&make_facts("a", &paths, &headers))
                    .to_vec(),
                [0]
            );
        }
    }

    #[test]
    fn an_ambiguous_path_does_not_match_an_exemption() {
        let table = make_table(vec![
            make_policy("free", PolicyAction::Allow, &["/public/**"]),
            make_policy("guard", PolicyAction::Deny, &["/api/**"]),
        ]);
        assert_eq!(matching_policy_names(&table, "h", "/public/x"), ["free"]);
        assert_eq!(
            matching_policy_names(&table, "h", "/public/..%2fapi/x"),
            ["guard"]
        );
        assert_eq!(matching_policy_names(&table, "h", "/api%2fx"), ["guard"]);
    }

    #[test]
    fn get_also_matches_head_and_not_negates_a_whole_matcher() {
        let mut get = make_policy("get", PolicyAction::Deny, &[]);
        let on_methods = |methods: &[Method]| {
            matcher_with(KeyPart::Method, ValueCondition::from_methods(methods))
        };
        get.matcher = on_methods(&[Method::GET]);
        let mut post = make_policy("post", PolicyAction::Deny, &[]);
        post.matcher = on_methods(&[Method::POST]);
        let mut not = make_policy("not", PolicyAction::Deny, &["/**"]);
        let mut inner = on_methods(&[Method::GET]);
        inner.conditions.push(PartCondition {
            part: KeyPart::Header("x-internal".parse().unwrap()),
            condition: ValueCondition::Present(true),
        });
        not.matcher.not = Some(Box::new(inner));
        let table = make_table(vec![get, post, not]);
        assert_eq!(matching_policy_names(&table, "h", "/"), ["get", "not"]);
        assert!(table.reads_header(&"x-internal".parse().unwrap()));
        assert!(table.reads_header(&"x-forwarded-for".parse().unwrap()));
        assert!(!table.reads_header(&"accept".parse().unwrap()));
    }

    /// Compares a path with a pattern word by word.
    fn is_matched_by_words(pattern: &str, path: &str) -> bool {
        let (mut pattern, mut path): (Vec<&str>, Vec<&str>) =
            (pattern.split('/').collect(), path.split('/').collect());
        if pattern.last() == Some(&"**") {
            pattern.pop();
            path.truncate(pattern.len());
        }
        let is_wildcard = |word: &str| word == "*" || word.starts_with('{');
        pattern.len() == path.len()
            && pattern
                .iter()
                .zip(path)
                .all(|(pattern, word)| is_wildcard(pattern) || *pattern == word)
    }

    proptest::proptest! {
        #[test]
        fn the_index_finds_the_same_patterns_as_a_scan(
            patterns in proptest::collection::vec("/(a|b|ab|\\*|\\{x\\})(/(a|b|ab|\\*|\\{x\\})){0,3}(/\\*\\*)?", 1..12),
            policies in 1..12_usize,
            path in "/(a|b|ab|ba)(/(a|b|ab|abc)){0,4}",
        ) {
            let patterns: Vec<&str> = patterns.iter().map(String::as_str).collect();
            let by_policy: Vec<_> = patterns.chunks(patterns.len().div_ceil(policies)).collect();
            let policies = by_policy.iter().enumerate();
            let policies = policies.map(|(n, all)| make_policy(&n.to_string(), PolicyAction::Deny, all));
            let found = matching_policy_names(&make_table(policies.collect()), "h", &path);
            let applies = |all: &&[&str]| all.iter().any(|pattern| is_matched_by_words(pattern, &path));
            let scanned = by_policy.iter().enumerate().filter(|(_, all)| applies(all));
            let scanned: Vec<String> = scanned.map(|(n, _)| n.to_string()).collect();
            proptest::prop_assert_eq!(found, scanned);
        }
    }
}
