//! No spelling of a path or key escapes its policy, however a real framework reads it.
//!
//! `tests/fixtures/spellings.json` has the readings of real servers, recorded by `make spellings`.

use crate::support::h2_frames::{FrameClient, request_frame};
use crate::support::prelude::*;

const FIXTURE: &str = include_str!("../fixtures/spellings.json");

/// The quota of `alice` is one request; the other quotas are never used up.
const LIMITS: &str = include_str!("../spellings/limits.toml");

const EXEMPTIONS: &str = include_str!("../spellings/exemptions.toml");

/// Denies the values whose quota `LIMITS` restricts.
const CONDITIONS: &str = include_str!("../spellings/conditions.toml");

/// The names of frameworks by what they read. A character of a spelling stands for one byte.
type Readings = BTreeMap<String, BTreeMap<String, Vec<String>>>;

struct RecordedReadings {
    framework_count: usize,
    /// Frameworks that ignore case. In front of them, `path.case_sensitive` is `false`.
    ignore_case: Vec<String>,
    target: Readings,
    query: Readings,
    /// Values of header fields and of the host, and complete header lines, by kind.
    fields: BTreeMap<&'static str, Readings>,
}

const FIELD_KINDS: [&str; 5] = ["authorization", "cookie", "fields", "header", "host"];

/// A request whose characters stand for one byte each.
struct SpelledRequest {
    target: String,
    host: String,
    /// Header lines without the last line end.
    lines: String,
}

impl SpelledRequest {
    fn with_target(target: &str) -> Self {
        Self {
            target: target.into(),
            host: "app.test".into(),
            lines: String::new(),
        }
    }

    /// A request of `/search` with the spelling of a field.
    fn with_field(kind: &str, spelling: &str) -> Self {
        let request = Self::with_target("/search");
        let lines = match kind {
            "host" => {
                let host = spelling.into();
                return Self { host, ..request };
            }
            "fields" => spelling.into(),
            "header" => format!("X-User: {spelling}"),
            name => format!("{name}: {spelling}"),
        };
        Self { lines, ..request }
    }

    fn http1_head(&self) -> Vec<u8> {
        let Self {
            target,
            host,
            lines,
        } = self;
        let end = if lines.is_empty() { "" } else { "\r\n" };
        to_latin1(&format!(
            "GET {target} HTTP/1.1\r\nHost: {host}\r\n{lines}{end}Connection: close\r\n\r\n"
        ))
    }

    /// Names and values. One space after the colon is not part of the value; the line ends of
    /// continuation lines are.
    fn http2_fields(&self) -> Vec<(String, Vec<u8>)> {
        let mut fields = vec![
            (":method".into(), b"GET".to_vec()),
            (":scheme".into(), b"http".to_vec()),
            (":authority".into(), to_latin1(&self.host)),
            (":path".into(), to_latin1(&self.target)),
        ];
        let unfolded = self
            .lines
            .replace("\r\n ", "\r\u{b} ")
            .replace("\r\n\t", "\r\u{b}\t");
        for line in unfolded.split("\r\n").filter(|line| !line.is_empty()) {
            let (name, value) = line.split_once(':').unwrap_or((line, ""));
            let value = value.strip_prefix(' ').unwrap_or(value);
            let value = value.replace("\r\u{b}", "\r\n");
            fields.push((name.to_ascii_lowercase(), to_latin1(&value)));
        }
        fields
    }

    /// Whether a head that reached the app still has one of the lines. The proxy does not forward
    /// fields that `Connection` lists.
    fn is_forwarded_in(&self, head: &str) -> bool {
        let head = head.to_ascii_lowercase();
        let mut lines = self.lines.split("\r\n").filter_map(|line| {
            let (name, value) = line.split_once(':')?;
            let name = name.trim().to_ascii_lowercase();
            let value = value.trim_matches([' ', '\t']).to_ascii_lowercase();
            (name != "connection").then(|| format!("{name}: {value}\r\n"))
        });
        self.lines.is_empty() || lines.any(|line| head.contains(&line))
    }
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
            query: parse_readings(&fixture["query"]),
            fields: FIELD_KINDS
                .map(|kind| (kind, parse_readings(&fixture[kind])))
                .into(),
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
    async fn forward(&self, request: &SpelledRequest) -> Option<String> {
        let body = if self.mode.is_http2 {
            let mut client = FrameClient::connect(self.proxy.address, &[]).await;
            let fields = request.http2_fields();
            let items = fields.iter();
            let fields: Vec<_> = items.map(|(name, value)| (name.as_str(), value)).collect();
            client.send(request_frame(1, &fields)).await;
            client.read_body().await?
        } else {
            let mut client = self.proxy.send_raw(request.http1_head()).await;
            let response = client.read_response_or_close().await?;
            response.header("x-reached")?;
            response.body
        };
        Some(body.iter().map(|byte| char::from(*byte)).collect())
    }

    async fn forward_field(&self, kind: &str, spelling: &str) -> Option<String> {
        self.forward(&SpelledRequest::with_field(kind, spelling))
            .await
    }

    /// Returns the target that reaches the app, if the request is not refused.
    async fn forward_target(&self, target: &str) -> Option<String> {
        let head = self.forward(&SpelledRequest::with_target(target)).await?;
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
            proxy.forward_target(target).await;
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
        let proxy = Proxy::setup(&config).start().await;
        let address = proxy.logged_address("check listening").unwrap();
        let check = async |target: &str| {
            let head = format!(
                "GET /check/traefik HTTP/1.1\r\nHost: tidegate\r\nX-Forwarded-Method: GET\r\n\
                 X-Forwarded-Proto: http\r\nX-Forwarded-Host: app.test\r\n\
                 X-Forwarded-Uri: {target}\r\nConnection: close\r\n\r\n"
            );
            let mut client = RawClient::connect_and_send(address, to_latin1(&head)).await;
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

/// Sends every spelling of fields and lists those that pass although a framework reads them as
/// the value of `alice`.
async fn list_passing_fields(proxy: &RecordingProxy, recorded: &RecordedReadings) -> Vec<String> {
    let mut passing = Vec::new();
    for (kind, readings) in &recorded.fields {
        for (spelling, readings) in readings {
            let Some(names) = readings.get("alice") else {
                continue;
            };
            let request = SpelledRequest::with_field(kind, spelling);
            if let Some(head) = proxy.forward(&request).await
                && request.is_forwarded_in(&head)
            {
                passing.push(format!("{kind} {spelling:?} for {names:?}"));
            }
        }
    }
    passing
}

/// Sends every query and lists those that pass although a framework reads them so.
async fn list_passing_queries(mode: ForwardingMode, used_up: &str, reading: &str) -> Vec<String> {
    let proxy = RecordingProxy::start(LIMITS, true, mode).await;
    proxy.forward_target(&format!("/search?{used_up}")).await;
    let mut passing = Vec::new();
    for (spelling, readings) in RecordedReadings::load().query {
        let target = format!("/search?{}", expand(&spelling));
        let forwarded = proxy.forward(&SpelledRequest::with_target(&target)).await;
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
    for mode in [PLAIN, BY_HTTP2, NORMALIZED] {
        let proxy = RecordingProxy::start(LIMITS, true, mode).await;
        for (kind, value) in [
            ("cookie", "session=alice"),
            ("header", "alice"),
            ("authorization", "Bearer alice"),
            ("authorization", "Basic YWxpY2U6c2VjcmV0"),
            ("host", "alice.test"),
        ] {
            let first = proxy.forward_field(kind, value).await;
            assert!(first.is_some(), "{kind} {value}");
        }
        assert_none_escapes(&list_passing_fields(&proxy, &recorded).await);
        assert_none_escapes(&list_passing_queries(mode, "api_key=alice", "alice").await);
    }
}

/// Otherwise each value of a parameter that the app does not read has a quota of its own.
#[tokio::test]
async fn more_parameters_than_an_app_reads_are_refused() {
    assert_none_escapes(&list_passing_queries(PLAIN, "other=x", "none").await);
}

/// Denies a cookie and a query parameter if present.
const PRESENCE_CONDITIONS: &str = "\
     [[policy]]\nname = 'query'\nmatch = { query = { api_key = { present = true } } }\naction = 'deny'\n\
     [[policy]]\nname = 'cookie'\nmatch = { cookies = { session = { present = true } } }\naction = 'deny'\n";

/// Denies the same as `CONDITIONS`, by regular expressions.
fn pattern_conditions() -> String {
    CONDITIONS
        .replace(" = \"alice\" }", " = { regex = \"^alice$\" } }")
        .replace(
            " = \"Bearer alice\" }",
            " = { regex = \"^Bearer alice$\" } }",
        )
        .replace(
            " = \"Basic YWxpY2U6c2VjcmV0\" }",
            " = { regex = \"^Basic YWxpY2U6c2VjcmV0$\" } }",
        )
}

#[tokio::test]
async fn no_spelling_of_a_value_escapes_a_condition() {
    let recorded = RecordedReadings::load();
    let mut escaped = Vec::new();
    let patterns = pattern_conditions();
    assert_eq!(patterns.matches("regex").count(), 5);
    for (policies, mode) in [CONDITIONS, &patterns, PRESENCE_CONDITIONS]
        .into_iter()
        .flat_map(|policies| [PLAIN, BY_HTTP2].map(|mode| (policies, mode)))
    {
        let proxy = RecordingProxy::start(policies, true, mode).await;
        let is_presence = policies == PRESENCE_CONDITIONS;
        let passing = list_passing_fields(&proxy, &recorded).await;
        escaped.extend(
            passing
                .into_iter()
                .filter(|one| !is_presence || one.starts_with("cookie ")),
        );
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
            let request = SpelledRequest {
                lines: format!("Cookie: {cookie}"),
                ..SpelledRequest::with_target(target)
            };
            let served = proxy.forward(&request).await;
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
            assert!(proxy.forward_target(target).await.is_some(), "{target}");
        }
        for cookie in [
            "session=bob",
            "session=\"bob\"",
            "session=b%20b",
            "other=\"\\163\"; session=bob",
        ] {
            let forwarded = proxy.forward_field("cookie", cookie).await;
            assert!(forwarded.is_some(), "{cookie}");
        }
    }
}
