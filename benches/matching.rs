//! What it costs to find a request's policy among many, by what sets the policies apart. The requests go round over all
//! policies, so that no answer stays in a cache where a real table would have none. The least of some rounds.
//!
//! Run by `make bench`, or `cargo bench --bench matching`.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    reason = "a benchmark talks on stdout and stops at any error"
)]

use http::{HeaderMap, HeaderName, HeaderValue, Method};
use std::hint::black_box;
use std::time::Instant;
use tidegate::policy::path::{EscapedSlashes, Readings, Settings};
use tidegate::policy::{
    Action, Facts, Fields, HostPattern, Matcher, Named, OnStoreFailure, PathPattern, Policy,
    PolicyTable, Test, client, jwt,
};

const SIZES: [usize; 4] = [10, 100, 1_000, 10_000];
const ROUNDS: usize = 5;
const ASKS: usize = 20_000;
const PATH: Settings = Settings {
    normalize: true,
    merge_slashes: true,
    escaped_slashes: EscapedSlashes::Both,
    ignore_trailing_slash: true,
    strip_parameters: true,
    case_sensitive: true,
};
static TENANT: HeaderName = HeaderName::from_static("x-tenant");

/// The conditions of the n-th policy.
type Conditions = fn(usize) -> Matcher;

const SHAPES: [(&str, Conditions); 6] = [
    ("path", |n| path(&format!("/shop/service-{n}/orders"))),
    ("path with rest", |n| path(&format!("/shop/service-{n}/**"))),
    ("path with wildcards", |n| {
        path(&format!("/*/service-{n}/{{order}}"))
    }),
    ("host", host),
    ("header", tenant),
    ("header, below one path", |n| Matcher {
        paths: path("/shop/**").paths,
        ..tenant(n)
    }),
];

fn main() {
    print!("{:<26}", "ns per request, policies:");
    SIZES.iter().for_each(|size| print!("{size:>10}"));
    println!();
    for (name, conditions) in SHAPES {
        print!("{name:<26}");
        for size in SIZES {
            let cost_ns = (0..ROUNDS).map(|_| cost_ns(size, conditions)).min();
            print!("{:>10}", cost_ns.unwrap());
        }
        println!();
    }
}

fn cost_ns(size: usize, conditions: Conditions) -> u128 {
    let table = table((0..size).map(conditions));
    // By a stride, so that none lies beside the one before.
    let requests: Vec<Request> = (0..size).map(|n| Request::to(n * 7919 % size)).collect();
    let asks = ASKS.min(size * 100);
    let start = Instant::now();
    for request in requests.iter().cycle().take(asks) {
        assert_eq!(table.matching(black_box(&request.facts())).len(), 1);
    }
    start.elapsed().as_nanos() / asks as u128
}

fn table(conditions: impl Iterator<Item = Matcher>) -> PolicyTable {
    let policies = conditions.enumerate().map(|(n, matcher)| Policy {
        name: n.to_string().into(),
        priority: 0,
        matcher,
        action: Action::Deny,
        shadow: false,
        on_store_failure: OnStoreFailure::Open,
        reject: None,
    });
    let client = client::Settings {
        trusted_proxies: Vec::new(),
        ip_header: HeaderName::from_static("x-forwarded-for"),
        ipv4_prefix: 32,
        ipv6_prefix: 64,
    };
    let fields = Fields {
        standard: true,
        legacy: true,
        legacy_reset_epoch: false,
    };
    PolicyTable::new(policies.collect(), PATH, client, fields)
}

fn path(pattern: &str) -> Matcher {
    Matcher {
        paths: vec![PathPattern::parse(pattern, &PATH).unwrap()],
        ..Matcher::default()
    }
}

fn host(n: usize) -> Matcher {
    let name = HostPattern::parse(&format!("service-{n}.example.com"));
    Matcher {
        hosts: vec![name.unwrap()],
        ..Matcher::default()
    }
}

fn tenant(n: usize) -> Matcher {
    let test = Test::Is(format!("tenant-{n}").into());
    Matcher {
        headers: vec![Named {
            name: TENANT.clone(),
            test,
        }],
        ..Matcher::default()
    }
}

/// A request to which the n-th policy of every table applies.
struct Request {
    host: String,
    paths: Readings,
    headers: HeaderMap,
}

impl Request {
    fn to(n: usize) -> Self {
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
            paths: Readings::of(&format!("/shop/service-{n}/orders"), &PATH).unwrap(),
            headers: usual
                .into_iter()
                .chain([(TENANT.clone(), tenant)])
                .collect(),
        }
    }

    fn facts(&self) -> Facts<'_> {
        Facts {
            method: &Method::GET,
            host: &self.host,
            paths: &self.paths,
            query: None,
            headers: &self.headers,
            client_ip: [127, 0, 0, 1].into(),
            token: jwt::Token::none(),
            client_cert: None,
            descriptor: None,
        }
    }
}
