//! Overrides of single keys in the store, end to end: commands, proxies and a Redis server.

mod admin_port;
mod combinations;
mod expiry;
mod input;
mod reasons;

use crate::support::prelude::*;
use hyper::header::HeaderName;
use tidegate::policy::{KeyPart, KeyTemplate};
use tokio::time::Instant;

const POLICIES: &str = r#"
[[policy]]
name = "api"
dynamic = true
match = { path = "/api" }
key = ["header:x-user-id"]
limit = { requests = 2, per = "1h" }
reject = { status = 403 }

[[policy.override]]
key = ["partner"]
limit = { requests = 4, per = "1h" }

[[policy]]
name = "several"
dynamic = true
match = { path = "/several" }
key = ["header:x-user-id", "header:x-api-key"]
limits = [
  { requests = 2, per = "1m", name = "minute", algorithm = "token_bucket", burst = 2 },
  { requests = 5, per = "1d", name = "day", algorithm = "fixed_window" },
]

[[policy]]
name = "static"
match = { path = "/static" }
key = ["header:x-user-id"]
limit = { requests = 2, per = "1h" }
"#;

/// A configuration file for a Redis server, the commands that read it, and proxies.
struct OverrideFixture {
    config: ConfigFile,
    redis: RedisServer,
    upstream: Upstream,
}

impl OverrideFixture {
    async fn start(policies: &str) -> Self {
        let redis = RedisServer::start();
        Self {
            config: ConfigFile::new(&format!("{}\n{policies}", redis.store_config())),
            redis,
            upstream: Upstream::echo().await,
        }
    }

    async fn start_proxy(&self) -> Proxy {
        let text = fs::read_to_string(self.config.path()).unwrap();
        Proxy::start(&text, self.upstream.address).await
    }

    async fn run_command(&self, words: &[&str]) -> ProcessOutput {
        self.config.run(&[&["overrides"], words].concat()).await
    }

    async fn run_successfully(&self, words: &[&str]) -> String {
        let ended = self.run_command(words).await;
        ended.into_stdout()
    }

    async fn error_of(&self, words: &[&str]) -> String {
        let ended = self.run_command(words).await;
        ended.expect_code(1);
        ended.stderr
    }
}

async fn get(proxy: &Proxy, path: &str, user: &str) -> RawResponse {
    let request = proxy.request("GET", path).header("x-user-id", user);
    request.header("x-api-key", "sk_live_1").send().await
}

async fn status(proxy: &Proxy, user: &str) -> u16 {
    get(proxy, "/api", user).await.status
}

/// Waits until a response to the user has this status, and returns it. A cached refusal holds
/// for a second in the worker that caches it, so the response after this one may have another
/// status.
async fn await_status(proxy: &Proxy, user: &str, expected: u16) -> RawResponse {
    eventually(format!("{expected} for {user}"), TEST_TIMEOUT, async || {
        let response = get(proxy, "/api", user).await;
        (response.status == expected).then_some(response)
    })
    .await
}

#[tokio::test]
async fn a_change_holds_on_every_proxy_from_the_next_decision() {
    let fixture = OverrideFixture::start(POLICIES).await;
    let (one, other) = (fixture.start_proxy().await, fixture.start_proxy().await);
    assert_eq!(status(&one, "ann").await, 200);

    fixture
        .run_successfully(&["set", "api", "ann", "--requests", "4"])
        .await;
    let response = get(&other, "/api", "ann").await;
    assert_eq!(response.status, 200);
    let quota = response.list_parameter("ratelimit-policy", "api", "q");
    let remaining = response.remaining("api");
    assert_eq!((quota, remaining), (Some(4), Some(2)), "the usage is kept");
    for (proxy, expected) in [(&one, 200), (&other, 200), (&one, 403), (&other, 403)] {
        assert_eq!(status(proxy, "ann").await, expected);
    }

    fixture
        .run_successfully(&["set", "api", "ann", "--unlimited"])
        .await;
    for proxy in [&one, &other] {
        let response = await_status(proxy, "ann", 200).await;
        assert_eq!(response.header("ratelimit"), None);
    }
    let shown = fixture.run_successfully(&["show", "api", "ann"]).await;
    assert!(shown.contains("unlimited"), "{shown}");

    assert_eq!(status(&one, "bob").await, 200);
    fixture
        .run_successfully(&["set", "api", "bob", "--block"])
        .await;
    for proxy in [&one, &other] {
        let response = get(proxy, "/api", "bob").await;
        assert_eq!(response.status, 403, "the policy's reject");
        assert_eq!(response.header("retry-after"), None);
    }
    for user in ["ann", "bob"] {
        fixture.run_successfully(&["remove", "api", user]).await;
    }
    await_status(&one, "bob", 200).await;
    await_status(&other, "bob", 403).await;
    await_status(&other, "ann", 403).await;
    let answer = fixture.run_successfully(&["list"]).await;
    assert_eq!(answer, "", "no override is left");
}

#[tokio::test]
async fn an_override_in_the_store_wins_over_the_file_and_ends_by_itself() {
    let fixture = OverrideFixture::start(POLICIES).await;
    let proxy = fixture.start_proxy().await;
    let quota = async || {
        let response = get(&proxy, "/api", "partner").await;
        response.list_parameter("ratelimit-policy", "api", "q")
    };
    assert_eq!(quota().await, Some(4));
    let words = [
        "set",
        "api",
        "partner",
        "--requests",
        "9",
        "--expires",
        "5s",
    ];
    fixture.run_successfully(&words).await;
    assert_eq!(quota().await, Some(9));
    let quota_after = eventually("the expiry", TEST_TIMEOUT, async || {
        Some(quota().await).filter(|quota| *quota != Some(9))
    });
    assert_eq!(quota_after.await, Some(4));
    let shown = fixture.run_successfully(&["show", "api", "partner"]).await;
    assert!(shown.contains("no override"), "{shown}");
}

#[tokio::test]
async fn limits_are_set_one_by_one_and_lists_show_no_key_that_is_hashed() {
    let fixture = OverrideFixture::start(POLICIES).await;
    let proxy = fixture.start_proxy().await;
    let key = ["several", "ann", "sk_live_1"];
    let set = async |words: &[&str]| {
        let words = [&["set"], &key[..], words].concat();
        fixture.run_successfully(&words).await
    };
    set(&["--limit", "minute", "--requests", "7", "--burst", "20"]).await;
    set(&[
        "--limit",
        "day",
        "--requests",
        "30",
        "--note",
        "contract 17",
    ])
    .await;
    let response = get(&proxy, "/several", "ann").await;
    let quota = |limit: &str| response.list_parameter("ratelimit-policy", limit, "q");
    assert_eq!((quota("minute"), quota("day")), (Some(20), Some(30)));

    let listed = fixture
        .run_successfully(&["list", "several", "--json"])
        .await;
    assert!(!listed.contains("sk_live"), "{listed}");
    let listed: Value = serde_json::from_str(&listed).unwrap();
    let stored = &listed["overrides"][0];
    assert_eq!(stored["limits"]["minute"]["burst"], 20);
    assert_eq!(stored["limits"]["day"]["requests"], 30);
    assert_eq!(stored["note"], "contract 17");
    assert_eq!(stored["key"][0], "ann");
    // The listed digest names the key, too.
    let digest = stored["key"][1].as_str().unwrap();
    fixture
        .run_successfully(&["remove", "several", "ann", digest])
        .await;
    assert_eq!(fixture.run_successfully(&["list"]).await, "");
}

#[tokio::test]
async fn wrong_overrides_are_refused_with_a_reason() {
    let fixture = OverrideFixture::start(POLICIES).await;
    for (words, reason) in [
        ("set static ann --block", "expected dynamic = true"),
        ("set absent ann --block", "unknown policy \"absent\""),
        ("set api --block", "the key of api has 1 value"),
        ("set api a b --block", "the key of api has 1 value"),
        (
            "set api a",
            "expected exactly one of requests, unlimited and blocked (--requests, --unlimited, --block)",
        ),
        ("set api a --requests 5 --burst 9", "is not a token_bucket"),
        (
            "set several a b --requests 5",
            "the limits of several are minute, day",
        ),
        (
            "set several a b --limit hour --requests 5",
            "unknown limit \"hour\"; expected one of minute, day",
        ),
        (
            "set several a b --limit minute --requests 9007199254740992",
            "counts exactly up to 150119987",
        ),
        ("set api a --block --expires soon", "is no duration"),
        (
            "set api a --block --expires 200000000000d",
            "the expiry is after 2255-06-05",
        ),
        ("set api a --block --note a\nb", "note: expected one line"),
    ] {
        let error = fixture
            .error_of(&words.split(' ').collect::<Vec<_>>())
            .await;
        assert!(error.contains(reason), "{words}: {error}");
    }
    assert_eq!(fixture.run_successfully(&["list"]).await, "");
}

#[tokio::test]
async fn a_file_is_imported_line_by_line_and_an_export_is_its_backup() {
    let fixture = OverrideFixture::start(POLICIES).await;
    let path = fixture.config.beside("overrides.csv");
    let text = "policy,key,key2,requests,limit,burst,limits,unlimited,blocked,expires_at,note\r\n\
        api,\"o'hara, \"\"bob\"\"\",,7,,,,,,2099-01-31T00:00:00Z,\"a, b\"\r\n\
        api,scraper,,,,,,,true,,\r\n\
        static,ann,,7,,,,,,,\r\n\
        api,x,y,7,,,,,,,\r\n\
        several,ann,sk_live_1,,,,\"minute=7+20,day=30\",,,,\r\n\
        api,negative,,-7,,,,,,,\r\n\
        api,short,7\r\n\
        several,ann,sk_live_2,,,,,true,,,\r\n";
    fs::write(&path, text).unwrap();
    let path = path.to_str().unwrap();
    let error = fixture.error_of(&["import", path]).await;
    assert_contains(
        &error,
        &[
            "line 4: policy static has no overrides in the store",
            "line 5: the key of api has 1 value",
            "line 7: requests: \"-7\"; expected an integer",
            "line 8: 3 columns; expected 11",
            "4 lines are wrong and were not set; 4 overrides were set",
        ],
    );
    let shown = fixture
        .run_successfully(&["show", "api", "o'hara, \"bob\"", "--json"])
        .await;
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown["limits"]["api"]["requests"], 7);
    assert_fields(
        &shown,
        json!({ "note": "a, b", "expires_at": "2099-01-31T00:00:00Z" }),
    );

    let listed = fixture.run_successfully(&["list", "--json"]).await;
    for format in ["csv", "jsonl"] {
        let exported = fixture
            .run_successfully(&["export", "--format", format])
            .await;
        assert!(!exported.contains("sk_live"), "{exported}");
        fixture.redis.command::<()>("FLUSHALL").await;
        assert_eq!(fixture.run_successfully(&["list"]).await, "");
        let backup = fixture.config.beside(&format!("backup.{format}"));
        fs::write(&backup, exported).unwrap();
        let printed = fixture
            .run_successfully(&["import", backup.to_str().unwrap()])
            .await;
        assert_eq!(printed, "4 overrides set\n");
        assert_eq!(fixture.run_successfully(&["list", "--json"]).await, listed);
    }
    let proxy = fixture.start_proxy().await;
    let response = get(&proxy, "/several", "ann").await;
    let found = response.list_parameter("ratelimit-policy", "day", "q");
    assert_eq!(found, Some(30));
    assert_eq!(status(&proxy, "scraper").await, 403);
}

/// The same commands with the memory store, by the admin port.
#[tokio::test]
async fn the_admin_port_changes_overrides_of_both_stores() {
    let redis = RedisServer::start();
    for store in [String::new(), redis.store_config()] {
        let proxy = Proxy::with_token(&format!("{store}\n{POLICIES}")).await;
        let put = async |path: &str, body: &str| {
            let request = proxy.authorized_request("PUT", path);
            let request = request.header("content-type", "application/json");
            request.body(body).send().await
        };
        let quota = async || {
            let response = get(&proxy, "/api", "ann").await;
            response.list_parameter("ratelimit-policy", "api", "q")
        };
        let response = put("/overrides/api", r#"{"key": "ann", "requests": 9}"#).await;
        assert_eq!(response.status, 200, "{}", response.text());
        assert_eq!(quota().await, Some(9));
        let listed = proxy.get_json("/overrides/api").await;
        assert_eq!(listed["overrides"][0]["limits"]["api"]["requests"], 9);
        let one = proxy.get_json("/overrides/api?key=ann").await;
        assert_eq!(one["overrides"], listed["overrides"]);
        let none = proxy.get_json("/overrides/api?key=bob").await;
        assert_eq!(none["overrides"].as_array().unwrap().len(), 0);

        let without_token = proxy.admin_request("PUT", "/overrides/api").send().await;
        assert_eq!(without_token.status, 401);
        for (path, body, status, reason) in [
            ("/overrides/absent", "{}", 404, "unknown policy"),
            (
                "/overrides/static",
                r#"{"key": "a", "blocked": true}"#,
                400,
                "dynamic = true",
            ),
            (
                "/overrides/api",
                r#"{"key": "a", "request": 1}"#,
                400,
                "unknown field",
            ),
            (
                "/overrides/api",
                r#"{"policy": "several", "key": "a"}"#,
                400,
                "as in the path",
            ),
            (
                "/overrides/api",
                r#"{"key": ["a", "b"], "blocked": true}"#,
                400,
                "has 1 value",
            ),
            (
                "/overrides/api",
                r#"{"key": "a", "limits": {"api": {"requests": 5, "brust": 50}}}"#,
                400,
                "limits.api: unknown field",
            ),
            (
                "/overrides/api",
                r#"{"key": "a", "limits": {"api": {"requests": 5}}, "burst": 50}"#,
                400,
                "burst: expected it inside limits",
            ),
            (
                "/overrides/api",
                r#"{"key": "a", "blocked": true, "expires": "200000000000d"}"#,
                400,
                "the expiry is after 2255-06-05",
            ),
        ] {
            let response = put(path, body).await;
            assert_eq!(response.status, status, "{}", response.text());
            assert!(response.text().contains(reason), "{}", response.text());
        }
        let removed = proxy.authorized_request("DELETE", "/overrides/api?key=ann");
        assert_eq!(removed.send().await.json()["removed"], true);
        assert_eq!(quota().await, Some(2));

        let words = ["overrides", "set", "several", "ann", "k", "--limit", "day"];
        let set = [&words[..], &["--requests", "3"]].concat();
        let ended = proxy.run_command(&set).await;
        ended.expect_code(0);
        let words = [
            "overrides",
            "set",
            "several",
            "ann",
            "k",
            "--limit",
            "minute",
        ];
        let set = [&words[..], &["--requests", "4"]].concat();
        proxy.run_command(&set).await;
        let shown = proxy
            .run_command(&["overrides", "show", "several", "ann", "k"])
            .await;
        shown.expect_stdout("day 3");
        shown.expect_stdout("minute 4");
        let exported = proxy.run_command(&["overrides", "export"]).await;
        assert_eq!(exported.stdout.lines().count(), 1, "{}", exported.stderr);
        let removed = proxy
            .run_command(&["overrides", "remove", "several", "ann", "k"])
            .await;
        removed.expect_stdout("override removed");
    }
}

const ORACLE_POLICY: &str = r#"
[[policy]]
name = "api"
dynamic = true
key = ["header:x-user-id"]
limits = [
  { requests = 1000001, per = "1d", name = "day", algorithm = "sliding_window" },
  { requests = 2000001, per = "12h", name = "half", algorithm = "fixed_window" },
]
"#;

/// The amounts of both limits, changed together.
const ORACLE_AMOUNTS: [(u64, u64); 3] = [
    (1_000_001, 2_000_001),
    (3_000_001, 4_000_001),
    (5_000_001, 6_000_001),
];

/// Changes of the override in order: their begin, their end, and the index of the amounts.
type ChangeHistory = Mutex<Vec<(Instant, Option<Instant>, usize)>>;

/// Every decision of three proxies has the amounts of one override that was in effect while it was
/// made, and every charge counts once.
#[tokio::test]
async fn no_decision_mixes_two_overrides_while_they_change() {
    let wanted =
        std::env::var("TIDEGATE_TEST_DECISIONS").map_or(3_000, |count| count.parse().unwrap());
    let fixture = OverrideFixture::start(ORACLE_POLICY).await;
    let proxies = [
        fixture.start_proxy().await,
        fixture.start_proxy().await,
        fixture.start_proxy().await,
    ];
    let history = Arc::new(ChangeHistory::default());
    history
        .lock()
        .unwrap()
        .push((Instant::now(), Some(Instant::now()), 0));
    let (decided, is_over) = (
        Arc::new(AtomicUsize::new(0)),
        Arc::new(AtomicBool::new(false)),
    );
    let mut clients = Vec::new();
    for proxy in proxies.iter().cycle().take(9) {
        let (address, decided) = (proxy.address, Arc::clone(&decided));
        clients.push(tokio::spawn(async move {
            let mut client = RawClient::connect(address).await;
            let mut answers = Vec::new();
            while decided.fetch_add(1, Ordering::Relaxed) < wanted {
                let sent_at = Instant::now();
                client
                    .send("GET /api HTTP/1.1\r\nhost: a\r\nx-user-id: ann\r\n\r\n")
                    .await;
                let response = client.read_response().await;
                assert_eq!(response.status, 200);
                let number = |field: &str, limit: &str, parameter: &str| {
                    response.list_parameter(field, limit, parameter).unwrap()
                };
                answers.push((
                    sent_at,
                    Instant::now(),
                    ["day", "half"].map(|limit| {
                        (
                            number("ratelimit-policy", limit, "q"),
                            number("ratelimit", limit, "r"),
                        )
                    }),
                ));
            }
            answers
        }));
    }
    let changes = tokio::spawn({
        let (history, is_over) = (Arc::clone(&history), Arc::clone(&is_over));
        let mut connection = fixture.redis.connection_without_timeout().await;
        let script = tidegate::store::redis::ScriptLibrary::new("test");
        async move {
            let header = KeyPart::Header(HeaderName::from_static("x-user-id"));
            let mut key = KeyTemplate::new(vec![header]).start_key("api");
            key.push_key_value(Some(b"ann"));
            let name = script.override_key(&key.finish());
            for n in 1.. {
                if is_over.load(Ordering::Relaxed) {
                    break;
                }
                let at = n % ORACLE_AMOUNTS.len();
                history.lock().unwrap().push((Instant::now(), None, at));
                // The first amounts are those of the file.
                let (day, half) = ORACLE_AMOUNTS[at];
                let text = format!("day={day},half={half} api/ann");
                let command = match at {
                    0 => redis::cmd("DEL").arg(&name).clone(),
                    _ => redis::cmd("SET").arg(&name).arg(text).clone(),
                };
                let _: redis::Value = command.query_async(&mut connection).await.unwrap();
                history.lock().unwrap().last_mut().unwrap().1 = Some(Instant::now());
                sleep(Duration::from_millis(100)).await;
            }
        }
    });
    let mut answers = Vec::new();
    for client in clients {
        answers.extend(client.await.unwrap());
    }
    is_over.store(true, Ordering::Relaxed);
    changes.await.unwrap();
    let history = history.lock().unwrap();
    let mut used_units = [BTreeSet::new(), BTreeSet::new()];
    for (sent_at, received_at, limits) in &answers {
        // Overrides that were in effect at some moment between the request and its response.
        let next_ends = history.iter().skip(1).map(|(_, ended, _)| *ended);
        let next_ends = next_ends.chain([None]);
        let possible = history
            .iter()
            .zip(next_ends)
            .filter(|((began, _, _), next_ended)| {
                began <= received_at && next_ended.is_none_or(|ended| ended >= *sent_at)
            });
        let quotas = (limits[0].0, limits[1].0);
        let mut items = possible.into_iter();
        let is_possible = items.any(|((_, _, at), _)| ORACLE_AMOUNTS[*at] == quotas);
        assert!(is_possible, "{quotas:?}");
        for (used, (quota, remaining)) in used_units.iter_mut().zip(limits) {
            used.insert(quota - remaining);
        }
    }
    assert!(answers.len() >= wanted && history.len() > 3);
    for used in used_units {
        let expected: BTreeSet<u64> = (1..=answers.len() as u64).collect();
        assert_eq!(used, expected, "every decision counts once");
    }
}
