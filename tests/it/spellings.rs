//! No spelling of a path or key escapes its policy, however a real framework reads it.
//!
//! `tests/fixtures/spellings.json` has the readings of real servers, recorded by `make spellings`.

use crate::support::client::RawClient;
use crate::support::h2_frames::{FrameClient, request_frame};
use crate::support::proxy::Proxy;
use crate::support::upstream::RawUpstream;
use serde_json::Value;
use std::collections::BTreeMap;

const FIXTURE: &str = include_str!("../fixtures/spellings.json");

/// The quota of `alice` is one request; the other quotas are never used up.
const LIMITS: &str = include_str!("../spellings/limits.toml");

const EXEMPTIONS: &str = include_str!("../spellings/exemptions.toml");

/// The names of frameworks by what they read. A character of a spelling stands for one byte.
type Readings = BTreeMap<String, BTreeMap<String, Vec<String>>>;

struct RecordedReadings {
    framework_count: usize,
    /// Frameworks that ignore case. In front of them, `path.case_sensitive` is `false`.
    ignore_case: Vec<String>,
    target: Readings,
    cookie: Readings,
    query: Readings,
    authorization: Readings,
}

/// How requests reach the proxy and the app.
#[derive(Clone, Copy)]
struct ForwardingMode {
    is_http2: bool,
    /// Value of `path.forward`.
    forward: &'static str,
}

const PLAIN: ForwardingMode = ForwardingMode {
    is_http2: false,
    forward: "unchanged",
};

const BY_HTTP2: ForwardingMode = ForwardingMode {
    is_http2: true,
    ..PLAIN
};

const NORMALIZED: ForwardingMode = ForwardingMode {
    forward: "normalized",
    ..PLAIN
};

impl RecordedReadings {
    fn load() -> Self {
        let fixture: Value = serde_json::from_str(FIXTURE).unwrap();
        let names = fixture["ignore_case"].as_array().unwrap().iter();
        Self {
            framework_count: fixture["frameworks"].as_object().unwrap().len(),
            ignore_case: names.map(|name| name.as_str().unwrap().into()).collect(),
            target: parse_readings(&fixture["target"]),
            cookie: parse_readings(&fixture["cookie"]),
            query: parse_readings(&fixture["query"]),
            authorization: parse_readings(&fixture["authorization"]),
        }
    }
}

fn parse_readings(recorded: &Value) -> Readings {
    let spellings = recorded.as_object().unwrap().iter();
    let parse_names = |names: &Value| {
        names
            .as_str()
            .unwrap()
            .split(' ')
            .map(str::to_owned)
            .collect()
    };
    spellings
        .map(|(spelling, readings)| {
            let readings = readings.as_object().unwrap().iter();
            let readings = readings.map(|(reading, names)| (reading.clone(), parse_names(names)));
            (spelling.clone(), readings.collect())
        })
        .collect()
}

/// A proxy in front of an upstream that answers with the request head it received.
struct RecordingProxy {
    proxy: Proxy,
    mode: ForwardingMode,
    _upstream: RawUpstream,
}

impl RecordingProxy {
    async fn start(policies: &str, case_sensitive: bool, mode: ForwardingMode) -> Self {
        let upstream = RawUpstream::with_script(|_, mut socket| async move {
            while let Some(request) = socket.read_request().await {
                let head = format!(
                    "HTTP/1.1 200 OK\r\nX-Reached: app\r\nContent-Length: {}\r\n\r\n",
                    request.len()
                );
                socket.send(&[head.as_bytes(), &request].concat()).await;
            }
        })
        .await;
        let forward = mode.forward;
        let config =
            format!("[path]\ncase_sensitive = {case_sensitive}\nforward = '{forward}'\n{policies}");
        Self {
            mode,
            proxy: Proxy::start(&config, upstream.address).await,
            _upstream: upstream,
        }
    }

    /// Returns the request head that reaches the app, if the request is not refused.
    async fn forward(&self, target: &str, field: Option<(&str, &str)>) -> Option<String> {
        let body = match self.mode.is_http2 {
            true => self.forward_by_http2(target, field).await?,
            false => {
                let field =
                    field.map_or_else(String::new, |(name, value)| format!("{name}: {value}\r\n"));
                let head = format!(
                    "GET {target} HTTP/1.1\r\nHost: app.test\r\n{field}Connection: close\r\n\r\n"
                );
                let mut client = RawClient::connect(self.proxy.address).await;
                client.send(to_latin1(&head)).await;
                let response = client.read_response_or_close().await?;
                response.header("x-reached")?;
                response.body
            }
        };
        Some(body.iter().map(|byte| char::from(*byte)).collect())
    }

    async fn forward_by_http2(&self, target: &str, field: Option<(&str, &str)>) -> Option<Vec<u8>> {
        let mut fields = vec![
            (":method", b"GET".to_vec()),
            (":scheme", b"http".to_vec()),
            (":authority", b"app.test".to_vec()),
            (":path", to_latin1(target)),
        ];
        fields.extend(field.map(|(name, value)| (name, to_latin1(value))));
        let mut client = FrameClient::connect(self.proxy.address, &[]).await;
        client.send(request_frame(1, &fields)).await;
        client.read_body().await
    }

    /// Returns the target that reaches the app, if the request is not refused.
    async fn forward_target(&self, target: &str) -> Option<String> {
        let head = self.forward(target, None).await?;
        let line = head.lines().next().unwrap();
        let (line, _version) = line.rsplit_once(' ').unwrap();
        Some(line.split_once(' ').unwrap().1.to_owned())
    }
}

fn to_latin1(text: &str) -> Vec<u8> {
    text.chars()
        .map(|character| u8::try_from(u32::from(character)).unwrap())
        .collect()
}

/// `{x*3}` is `x&x&x`, and `{&*3}` is `&&&`.
fn expand(spelling: &str) -> String {
    let Some((before, rest)) = spelling.split_once('{') else {
        return spelling.to_owned();
    };
    let Some((part, after)) = rest.split_once('}') else {
        return spelling.to_owned();
    };
    let Some((text, times)) = part.split_once('*') else {
        return spelling.to_owned();
    };
    let separator = if text == "&" { "" } else { "&" };
    let repeated = vec![text; times.parse().unwrap()].join(separator);
    format!("{before}{repeated}{}", expand(after))
}

/// The readings of one spelling that `escapes` selects, of frameworks that do or do not ignore
/// case.
fn describe_escapes(
    recorded: &RecordedReadings,
    spelling: &str,
    readings: &BTreeMap<String, Vec<String>>,
    case_sensitive: bool,
    escapes: fn(&str) -> bool,
) -> Vec<String> {
    let mut found = Vec::new();
    for (reading, names) in readings.iter().filter(|(reading, _)| escapes(reading)) {
        let names: Vec<_> = names
            .iter()
            .filter(|name| recorded.ignore_case.contains(name) != case_sensitive)
            .collect();
        if !names.is_empty() {
            found.push(format!("{spelling:?} is {reading} for {names:?}"));
        }
    }
    found
}

fn is_limited(reading: &str) -> bool {
    ["login", "account alice", "admin"].contains(&reading)
}

fn is_not_exempt(reading: &str) -> bool {
    !["public", "healthz"].contains(&reading)
}

/// Sends every target and lists those that a framework reads as `escapes` says although they pass.
async fn list_escaped_targets(
    policies: &str,
    mode: ForwardingMode,
    escapes: fn(&str) -> bool,
) -> Vec<String> {
    let recorded = RecordedReadings::load();
    let mut found = Vec::new();
    for case_sensitive in [true, false] {
        let proxy = RecordingProxy::start(policies, case_sensitive, mode).await;
        for target in ["/login", "/login/alice", "/other"] {
            proxy.forward(target, None).await;
        }
        for spelling in recorded.target.keys() {
            let Some(forwarded) = proxy.forward_target(spelling).await else {
                continue;
            };
            let Some(readings) = recorded.target.get(&forwarded) else {
                found.push(format!(
                    "{spelling:?} is forwarded as {forwarded:?}: add that to spellings.toml"
                ));
                continue;
            };
            found.extend(describe_escapes(
                &recorded,
                spelling,
                readings,
                case_sensitive,
                escapes,
            ));
        }
    }
    found
}

fn assert_none_escapes(escaped: &[String]) {
    assert!(
        escaped.is_empty(),
        "{} escaped:\n{}",
        escaped.len(),
        escaped.join("\n")
    );
}

#[tokio::test]
async fn no_spelling_of_a_path_escapes_a_limit_or_denial() {
    for mode in [PLAIN, BY_HTTP2, NORMALIZED] {
        let escaped = list_escaped_targets(LIMITS, mode, is_limited).await;
        assert_none_escapes(&escaped);
    }
}

#[tokio::test]
async fn no_spelling_of_a_path_wins_an_exemption() {
    for mode in [PLAIN, BY_HTTP2, NORMALIZED] {
        let escaped = list_escaped_targets(EXEMPTIONS, mode, is_not_exempt).await;
        assert_none_escapes(&escaped);
    }
}

#[tokio::test]
async fn no_spelling_of_a_path_escapes_the_ext_authz_listener() {
    let recorded = RecordedReadings::load();
    let mut escaped = Vec::new();
    for case_sensitive in [true, false] {
        let config = format!(
            "client.trusted_proxies = ['127.0.0.1']\n[check]\naddress = '127.0.0.1:0'\n\
             [path]\ncase_sensitive = {case_sensitive}\n{LIMITS}"
        );
        let proxy = Proxy::builder().config(&config).start().await;
        let address = proxy.logged_address("check listening").unwrap();
        let check = async |target: &str| {
            let head = format!(
                "GET /check/traefik HTTP/1.1\r\nHost: tidegate\r\nX-Forwarded-Method: GET\r\n\
                 X-Forwarded-Proto: http\r\nX-Forwarded-Host: app.test\r\n\
                 X-Forwarded-Uri: {target}\r\nConnection: close\r\n\r\n"
            );
            let mut client = RawClient::connect(address).await;
            client.send(to_latin1(&head)).await;
            let response = client.read_response_or_close().await;
            response.is_some_and(|response| response.status == 200)
        };
        assert!(check("/login").await && check("/login/alice").await && check("/other").await);
        for (spelling, readings) in &recorded.target {
            if check(spelling).await {
                escaped.extend(describe_escapes(
                    &recorded,
                    spelling,
                    readings,
                    case_sensitive,
                    is_limited,
                ));
            }
        }
    }
    assert_none_escapes(&escaped);
}

/// Sends every spelling of a field and lists those that pass although a framework reads them as
/// the value whose quota is used up.
async fn list_passing_fields(
    mode: ForwardingMode,
    name: &str,
    readings: &Readings,
    used_up: &[&str],
) -> Vec<String> {
    let proxy = RecordingProxy::start(LIMITS, true, mode).await;
    for value in used_up {
        let first = proxy.forward("/search", Some((name, value))).await;
        assert!(first.is_some(), "{value}");
    }
    let mut passing = Vec::new();
    for (spelling, readings) in readings {
        let forwarded = proxy.forward("/search", Some((name, spelling))).await;
        if let (Some(_), Some(names)) = (forwarded, readings.get("alice")) {
            passing.push(format!("{name} {spelling:?} for {names:?}"));
        }
    }
    passing
}

/// Sends every query and lists those that pass although a framework reads them so.
async fn list_passing_queries(mode: ForwardingMode, used_up: &str, reading: &str) -> Vec<String> {
    let proxy = RecordingProxy::start(LIMITS, true, mode).await;
    proxy.forward(&format!("/search?{used_up}"), None).await;
    let mut passing = Vec::new();
    for (spelling, readings) in RecordedReadings::load().query {
        let target = format!("/search?{}", expand(&spelling));
        let forwarded = proxy.forward(&target, None).await;
        let Some(forwarded) = forwarded else {
            continue;
        };
        if !forwarded.contains(&target) {
            assert!(spelling.contains('#'), "{spelling:?} became {forwarded}");
            // The app receives the target without the part from `#` on.
            assert!(!forwarded.contains("alice"), "{forwarded}");
        } else if let Some(names) = readings.get(reading) {
            passing.push(format!("query {spelling:?} for {names:?}"));
        }
    }
    passing
}

#[tokio::test]
async fn no_spelling_of_a_key_has_a_quota_of_its_own() {
    let recorded = RecordedReadings::load();
    let credentials = ["Bearer alice", "Basic YWxpY2U6c2VjcmV0"];
    for mode in [PLAIN, BY_HTTP2, NORMALIZED] {
        assert_none_escapes(
            &list_passing_fields(mode, "cookie", &recorded.cookie, &["session=alice"]).await,
        );
        assert_none_escapes(&list_passing_queries(mode, "api_key=alice", "alice").await);
        let readings = &recorded.authorization;
        assert_none_escapes(
            &list_passing_fields(mode, "authorization", readings, &credentials).await,
        );
    }
}

/// Otherwise each value of a parameter that the app does not read has a quota of its own.
#[tokio::test]
async fn more_parameters_than_an_app_reads_are_refused() {
    assert_none_escapes(&list_passing_queries(PLAIN, "other=x", "none").await);
}

/// Denies a cookie and a query parameter, by their presence or by their values.
const CONDITIONS: [&str; 2] = [
    "[[policy]]\nname = 'query'\nmatch = { query = { api_key = 'alice' } }\naction = 'deny'\n\
     [[policy]]\nname = 'cookie'\nmatch = { cookies = { session = 'alice' } }\naction = 'deny'\n",
    "[[policy]]\nname = 'query'\nmatch = { query = { api_key = { present = true } } }\naction = 'deny'\n\
     [[policy]]\nname = 'cookie'\nmatch = { cookies = { session = { present = true } } }\naction = 'deny'\n",
];

#[tokio::test]
async fn no_spelling_of_a_value_escapes_a_condition() {
    let recorded = RecordedReadings::load();
    let mut escaped = Vec::new();
    for (policies, mode) in CONDITIONS
        .into_iter()
        .flat_map(|policies| [PLAIN, BY_HTTP2].map(|mode| (policies, mode)))
    {
        let proxy = RecordingProxy::start(policies, true, mode).await;
        for (spelling, readings) in &recorded.cookie {
            let forwarded = proxy.forward("/search", Some(("cookie", spelling))).await;
            if let (Some(_), Some(names)) = (forwarded, readings.get("alice")) {
                escaped.push(format!("cookie {spelling:?} for {names:?}"));
            }
        }
        for (spelling, readings) in &recorded.query {
            let target = format!("/search?{}", expand(spelling));
            let forwarded = proxy.forward_target(&target).await;
            if let (Some(forwarded), Some(names)) = (forwarded, readings.get("alice"))
                && forwarded == target
            {
                escaped.push(format!("query {spelling:?} for {names:?}"));
            }
        }
        for target in [
            "/search%3Fapi_key=alice",
            "/search;api_key=alice",
            "/search%3Fa=1&api_key=alice?x=1",
        ] {
            if proxy.forward_target(target).await.is_some() {
                escaped.push(target.to_owned());
            }
        }
        for (target, cookie) in [
            ("/search?API_KEYS=1&x=2", "sessions=x"),
            ("/search;jsessionid=A1", "other=\"\\163\""),
            ("/search;jsessionid=A1?x=1;y=2", "a=1, b=2"),
        ] {
            let served = proxy.forward(target, Some(("cookie", cookie))).await;
            assert!(served.is_some(), "{target} {cookie}");
        }
    }
    assert_none_escapes(&escaped);
}

/// A parameter of the path that no reading takes for the key is no reason to refuse.
#[tokio::test]
async fn a_path_parameter_beside_a_query_key_is_served() {
    let proxy = RecordingProxy::start(LIMITS, true, PLAIN).await;
    for (target, is_served) in [
        ("/search;jsessionid=A1", true),
        ("/search;jsessionid=A1?x=1", true),
        ("/search;api_key=x", false),
        ("/search%3Fapi_key=x", false),
        ("/search%3Fapi%5Fkey%3Dx", false),
        ("/search;a=%26api_key%3Dx", false),
        // Apps whose query begins at the semicolon read no key.
        ("/search;jsessionid=A1?api_key=x", false),
    ] {
        let served = proxy.forward_target(target).await;
        assert_eq!(served.is_some(), is_served, "{target}");
    }
}

#[tokio::test]
async fn plain_spellings_are_served() {
    let recorded = RecordedReadings::load();
    assert!(recorded.framework_count >= 15);
    assert!(recorded.target.len() >= 300);
    for case_sensitive in [true, false] {
        let proxy = RecordingProxy::start(LIMITS, case_sensitive, PLAIN).await;
        for target in [
            "/",
            "/other",
            "/login/bob",
            "/login/bob/",
            "/public/app.css",
            "/public/a%20b.css",
            "/caf%C3%A9",
            "/search?api_key=bob&x=1",
            "/search?filter[name]=x&filter.age=3",
        ] {
            assert!(proxy.forward(target, None).await.is_some(), "{target}");
        }
        for cookie in [
            "session=bob",
            "session=\"bob\"",
            "session=b%20b",
            "other=\"\\163\"; session=bob",
        ] {
            let forwarded = proxy.forward("/search", Some(("cookie", cookie))).await;
            assert!(forwarded.is_some(), "{cookie}");
        }
    }
}
