//! A generated access log, drawn from a seed, with the expected decisions of a naive model. The
//! model keeps one list of times per limit and key, and scans it from the start.
//!
//! `benches/replay.rs` uses this module too, so it depends on nothing else of the test binary.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io::{self, Write};

/// The policies that [`generate_log`] applies.
pub const POLICIES: &str = r#"
[[policy]]
name = "health"
match = { path = "/health" }
action = "allow"

[[policy]]
name = "login"
match = { methods = ["POST"], path = "/api/login" }
key = ["client_ip"]
limit = { requests = 5, per = "1m" }

[[policy]]
name = "api"
match = { path = "/api/**" }
key = ["client_ip"]
limits = [
  { requests = 20, per = "10s" },
  { requests = 400, per = "1h", algorithm = "fixed_window" },
]

[[policy]]
name = "candidate"
mode = "shadow"
key = ["client_ip"]
limit = { requests = 30, per = "10s" }
"#;

/// The expected result of a replay.
#[derive(Debug, Default)]
pub struct ExpectedReport {
    pub lines: u64,
    pub requests: u64,
    pub malformed: u64,
    pub forwarded: u64,
    pub limited: u64,
    pub policies: BTreeMap<&'static str, ExpectedPolicyReport>,
}

#[derive(Debug, Default)]
pub struct ExpectedPolicyReport {
    pub matched: u64,
    pub refused: u64,
    /// Requests and refusals by key.
    pub keys: HashMap<u32, (u64, u64)>,
}

impl ExpectedPolicyReport {
    pub fn limited_keys(&self) -> u64 {
        self.keys
            .values()
            .filter(|(_, refused)| *refused > 0)
            .count() as u64
    }
}

#[derive(Clone, Copy)]
struct LoggedRequest {
    at_s: u64,
    client: u32,
    kind: RequestKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum RequestKind {
    Health,
    Login,
    Api,
    Other,
}

/// About a quarter past eleven on a Wednesday.
const START_S: u64 = 1_795_000_000;

/// A line is out of order by less than this many seconds.
const MAX_DISORDER_S: u64 = 3;

/// Writes a log of `requests` requests in nginx's combined format, about 300 per second. A few are
/// slightly out of order, and a few lines are broken.
pub fn generate_log(out: &mut impl Write, requests: u64, seed: u64) -> io::Result<ExpectedReport> {
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut model, mut written, mut now_s) = (ReplayModel::default(), 0, START_S);
    while written < requests {
        let mut group = Vec::new();
        for at_s in now_s..now_s + MAX_DISORDER_S {
            let count = random.u64(100..500).min(requests - written);
            written += count;
            group.extend((0..count).map(|_| draw_request(&mut random, at_s)));
        }
        now_s += MAX_DISORDER_S;
        for _ in 0..group.len() / 20 {
            let (one, other) = (random.usize(..group.len()), random.usize(..group.len()));
            group.swap(one, other);
        }
        for request in &group {
            if random.u32(..5000) == 0 {
                writeln!(out, "10.1.1.1 - - [29/Foo/2026:25:61:00] \u{1b}[31m\"GET /")?;
                model.expected.malformed += 1;
                model.expected.lines += 1;
            }
            write_log_line(out, *request, &mut random)?;
            model.expected.lines += 1;
        }
        model.decide_group(group);
    }
    Ok(model.expected)
}

/// A few clients send most of the requests.
fn draw_request(random: &mut fastrand::Rng, at_s: u64) -> LoggedRequest {
    let client = (1.0 / (random.f64() + 1e-6)).powf(1.5) as u32 % 200_000;
    let kind = match random.u32(..100) {
        0..5 => RequestKind::Health,
        5..8 => RequestKind::Login,
        8..60 => RequestKind::Api,
        _ => RequestKind::Other,
    };
    LoggedRequest { at_s, client, kind }
}

fn write_log_line(
    out: &mut impl Write,
    request: LoggedRequest,
    random: &mut fastrand::Rng,
) -> io::Result<()> {
    const AGENTS: [&str; 3] = [
        "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/130.0.0.0 Safari/537.36",
        "curl/8.5.0",
        "Mozilla/5.0 (iPhone; CPU iPhone OS 18_0 like Mac OS X) AppleWebKit/605.1.15",
    ];
    let [_, a, b, c] = request.client.to_be_bytes();
    let days_s = request.at_s - 1_794_960_000;
    let (hour, minute, second) = (days_s / 3600, days_s / 60 % 60, days_s % 60);
    write!(out, "10.{a}.{b}.{c} - - [{:02}/Nov/2026:", 18 + hour / 24)?;
    write!(out, "{:02}:{minute:02}:{second:02} +0000] \"", hour % 24)?;
    match request.kind {
        RequestKind::Health => write!(out, "GET /health")?,
        RequestKind::Login => write!(out, "POST /api/login")?,
        RequestKind::Api => write!(
            out,
            "GET /api/orders/{}?page={}",
            random.u32(..10_000),
            random.u32(..9)
        )?,
        RequestKind::Other => write!(out, "GET /static/app.{}.js", random.u32(..100))?,
    }
    let agent = AGENTS[random.usize(..AGENTS.len())];
    writeln!(
        out,
        " HTTP/1.1\" 200 {} \"https://shop.example/\" \"{agent}\"",
        random.u32(..50_000)
    )
}

#[derive(Default)]
struct ReplayModel {
    expected: ExpectedReport,
    admitted_at_us: HashMap<(&'static str, u32), VecDeque<u64>>,
    hourly_counts: HashMap<u32, (u64, u64)>,
}

impl ReplayModel {
    /// Decides requests ordered by second. Requests of one second keep the order of the log and are
    /// spread evenly over it.
    fn decide_group(&mut self, mut group: Vec<LoggedRequest>) {
        group.sort_by_key(|request| request.at_s);
        for second in group.chunk_by(|a, b| a.at_s == b.at_s) {
            for (at, request) in (0u64..).zip(second) {
                let us = at * 1_000_000 / second.len() as u64;
                self.decide_request(*request, request.at_s * 1_000_000 + us);
            }
        }
    }

    fn decide_request(&mut self, request: LoggedRequest, now_us: u64) {
        let LoggedRequest { client, kind, .. } = request;
        self.expected.requests += 1;
        if kind == RequestKind::Health {
            self.expected.forwarded += 1;
            self.expected.policies.entry("health").or_default().matched += 1;
            return;
        }
        let is_api = matches!(kind, RequestKind::Api | RequestKind::Login);
        let login = kind != RequestKind::Login
            || self.fits_sliding_log("login", client, 5, 60_000_000, now_us);
        let api = !is_api
            || (self.fits_sliding_log("api", client, 20, 10_000_000, now_us)
                & self.fits_hourly_window(client, now_us));
        let candidate = self.fits_sliding_log("candidate", client, 30, 10_000_000, now_us);
        let admitted = login && api;
        *if admitted {
            &mut self.expected.forwarded
        } else {
            &mut self.expected.limited
        } += 1;
        let asked = [
            ("login", kind == RequestKind::Login, login),
            ("api", is_api, api),
            ("candidate", true, candidate),
        ];
        for (name, _, passes) in asked.into_iter().filter(|(_, matches, _)| *matches) {
            let policy = self.expected.policies.entry(name).or_default();
            policy.matched += 1;
            policy.refused += u64::from(!passes);
            let key = policy.keys.entry(client).or_default();
            key.0 += 1;
            key.1 += u64::from(!passes);
            // All or nothing: a shadow policy is charged only if all enforced policies admit.
            if admitted && passes {
                self.admitted_at_us
                    .entry((name, client))
                    .or_default()
                    .push_back(now_us);
            }
        }
        if admitted && is_api {
            self.hourly_counts.entry(client).or_default().1 += 1;
        }
    }

    fn fits_sliding_log(
        &mut self,
        policy: &'static str,
        client: u32,
        most: usize,
        per_us: u64,
        now_us: u64,
    ) -> bool {
        let log = self.admitted_at_us.entry((policy, client)).or_default();
        while log.front().is_some_and(|at_us| at_us + per_us <= now_us) {
            log.pop_front();
        }
        log.len() < most
    }

    fn fits_hourly_window(&mut self, client: u32, now_us: u64) -> bool {
        let hour = self.hourly_counts.entry(client).or_default();
        if hour.0 != now_us / 3_600_000_000 {
            *hour = (now_us / 3_600_000_000, 0);
        }
        hour.1 < 400
    }
}
