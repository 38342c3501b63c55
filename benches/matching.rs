//! Measures the cost of finding a request's policy among many, by the conditions that distinguish
//! the policies. Requests cycle through all policies, so that no policy stays cached that would not
//! be in production. Each result is the minimum of several rounds.
//!
//! Run by `make bench`, or `cargo bench --bench matching`.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark talks on stdout and stops at any error"
)]

use http::{HeaderMap, HeaderName, HeaderValue, Method};
use std::hint::black_box;
use std::time::{Duration, Instant};
use tidegate::policy::path::{PathInterpretations, Settings};
use tidegate::policy::{
    Facts, HostPattern, KeyPart, Matcher, OnStoreFailure, PartCondition, PathPattern, Policy,
    PolicyAction, PolicyMode, PolicyTable, RateLimitHeaderSettings, ValueCondition, client, jwt,
};

const TABLE_SIZES: [usize; 4] = [10, 100, 1_000, 10_000];
const ROUNDS: usize = 5;
const LOOKUPS_PER_ROUND: usize = 20_000;
/// Requests are made in small groups just before their lookups, because a worker that looks up
/// policies has just parsed the request. Thousands made in advance would be in no cache.
const REQUESTS_PER_GROUP: usize = 20;
const PATH_SETTINGS: Settings = Settings::DEFAULT;
static TENANT_HEADER: HeaderName = HeaderName::from_static("x-tenant");

/// The conditions of the n-th policy.
type MatcherFunction = fn(usize) -> Matcher;

const MATCHER_SHAPES: [(&str, MatcherFunction); 6] = [
    ("path", |n| {
        make_path_matcher(&format!("/shop/service-{n}/orders"))
    }),
    ("path with rest", |n| {
        make_path_matcher(&format!("/shop/service-{n}/**"))
    }),
    ("path with wildcards", |n| {
        make_path_matcher(&format!("/*/service-{n}/{{order}}"))
    }),
    ("host", make_host_matcher),
    ("header", make_tenant_matcher),
    ("header, below one path", |n| {
        let mut matcher = make_path_matcher("/shop/**");
        matcher.conditions.extend(make_tenant_matcher(n).conditions);
        matcher
    }),
];

fn main() {
    print!("{:<26}", "ns per request, policies:");
    TABLE_SIZES.iter().for_each(|size| print!("{size:>10}"));
    println!();
    for (name, conditions) in MATCHER_SHAPES {
        print!("{name:<26}");
        for size in TABLE_SIZES {
            let cost_ns = (0..ROUNDS)
                .map(|_| measure_lookup_ns(size, conditions))
                .min();
            print!("{:>10}", cost_ns.unwrap());
        }
        println!();
    }
}

fn measure_lookup_ns(size: usize, conditions: MatcherFunction) -> u128 {
    let table = make_policy_table((0..size).map(conditions));
    let lookups = LOOKUPS_PER_ROUND.min(size * 100);
    let mut elapsed = Duration::ZERO;
    for first in (0..lookups).step_by(REQUESTS_PER_GROUP) {
        // A stride keeps consecutive requests from using neighbouring policies.
        let requests: Vec<BenchRequest> = (first..first + REQUESTS_PER_GROUP)
            .map(|n| BenchRequest::for_policy(n * 7919 % size))
            .collect();
        let start = Instant::now();
        for request in &requests {
            let facts = request.as_facts();
            assert_eq!(table.matching_policies(black_box(&facts)).len(), 1);
        }
        elapsed += start.elapsed();
    }
    elapsed.as_nanos() / lookups as u128
}

fn make_policy_table(conditions: impl Iterator<Item = Matcher>) -> PolicyTable {
    let policies = conditions.enumerate().map(|(n, matcher)| Policy {
        name: n.to_string().into(),
        priority: 0,
        matcher,
        action: PolicyAction::Deny,
        mode: PolicyMode::Enforce,
        is_reported: true,
        on_store_failure: OnStoreFailure::Open,
        max_scan: 0,
        reject_response: None,
    });
    let client = client::Settings {
        trusted_proxies: Vec::new(),
        ip_header: HeaderName::from_static("x-forwarded-for"),
        ipv4_prefix: 32,
        nat64_prefixes: Vec::new(),
        ipv6_prefix: 64,
        value_checks: tidegate::policy::ValueChecks::ALL,
    };
    let fields = RateLimitHeaderSettings {
        standard: true,
        legacy: true,
        legacy_reset_epoch: false,
    };
    PolicyTable::new(policies.collect(), PATH_SETTINGS, client, fields)
}

fn matcher_with(part: KeyPart, condition: ValueCondition) -> Matcher {
    Matcher {
        conditions: vec![PartCondition { part, condition }],
        ..Matcher::default()
    }
}

fn make_path_matcher(pattern: &str) -> Matcher {
    let pattern = PathPattern::parse(pattern, &PATH_SETTINGS).unwrap();
    matcher_with(KeyPart::WholePath, ValueCondition::Paths([pattern].into()))
}

fn make_host_matcher(n: usize) -> Matcher {
    let name = HostPattern::parse(&format!("service-{n}.example.com"));
    matcher_with(KeyPart::Host, ValueCondition::Hosts([name.unwrap()].into()))
}

fn make_tenant_matcher(n: usize) -> Matcher {
    let condition = ValueCondition::equals(&format!("tenant-{n}"));
    matcher_with(KeyPart::Header(TENANT_HEADER.clone()), condition)
}

/// A request that matches the n-th policy of every table.
struct BenchRequest {
    host: String,
    paths: PathInterpretations,
    headers: HeaderMap,
}

impl BenchRequest {
    fn for_policy(n: usize) -> Self {
        let usual = [
            ("accept", "*/*"),
            ("user-agent", "bench"),
            ("x-forwarded-proto", "https"),
        ];
        let usual = usual.map(|(name, value)| {
            (
                HeaderName::from_static(name),
                HeaderValue::from_static(value),
            )
        });
        let tenant = HeaderValue::try_from(format!("tenant-{n}")).unwrap();
        Self {
            host: format!("service-{n}.example.com"),
            paths: PathInterpretations::parse(&format!("/shop/service-{n}/orders"), &PATH_SETTINGS)
                .unwrap(),
            headers: usual
                .into_iter()
                .chain([(TENANT_HEADER.clone(), tenant)])
                .collect(),
        }
    }

    fn as_facts(&self) -> Facts<'_> {
        Facts {
            method: &Method::GET,
            host: &self.host,
            paths: &self.paths,
            query: None,
            headers: &self.headers,
            client_ip: [127, 0, 0, 1].into(),
            token: jwt::RequestToken::without_token_reader(),
            client_cert: None,
            has_joined_headers: false,
            is_peer_trusted: false,
            body: None,
            unreadable_holds: true,
            descriptor: None,
        }
    }
}
