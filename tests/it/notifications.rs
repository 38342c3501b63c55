//! `notify`: the first crossing of a threshold per key and period has a field in its response, a
//! log line and a count.

use crate::support::prelude::*;
use crate::support::rls_client::{USER_POLICY, response_header};

const FIELD: &str = "x-tidegate-notify";

/// Windows that do not end while a test runs.
const POLICY: &str = r#"
[[policy]]
name = "plan"
key = ["header:x-user"]
limit = { requests = 8, per = "month", algorithm = "fixed_window", unit = "tokens" }
notify = [0.5, 1.0]
"#;

fn series(threshold: &str) -> String {
    format!(
        "tidegate_policy_notifications_total{{policy=\"plan\",limit=\"plan\",threshold=\"{threshold}\"}}"
    )
}

fn notification_lines(proxy: &Proxy) -> Vec<LogLine> {
    let mut lines = proxy.log_since(0);
    lines.retain(|line| line.field("message") == "quota threshold reached");
    lines
}

async fn send(proxy: &Proxy, user: &str) -> RawResponse {
    proxy.get_with("/", "X-User", user).await
}

#[tokio::test]
async fn two_proxies_notify_each_key_and_threshold_once() {
    let (server, upstream) = (RedisServer::start(), Upstream::echo().await);
    let config = format!("{}\nlisten.threads = 2\n{POLICY}", server.store_config());
    let proxies = [
        Proxy::start_connected(&config, upstream.address).await,
        Proxy::start_connected(&config, upstream.address).await,
    ];
    for proxy in &proxies {
        for threshold in ["0.5", "1.0"] {
            assert_eq!(proxy.read_present_metric(&series(threshold)).await, 0.0);
        }
    }
    // Ten requests for each of 20 keys, all at once: the last two of each are rejected.
    let requests = (0..200).map(|number| {
        let proxy = &proxies[number % 2];
        async move { send(proxy, &format!("user-{}", number / 2 % 20)).await }
    });
    let replies = join_all(requests).await;
    let rejected = replies.iter().filter(|reply| reply.status == 429);
    assert_eq!(rejected.count(), 40);
    let mut fields: BTreeMap<&str, usize> = BTreeMap::new();
    for reply in &replies {
        let items = reply.header(FIELD).into_iter();
        for item in items.flat_map(|field| field.split(", ")) {
            *fields.entry(item).or_default() += 1;
        }
    }
    let expected = [
        ("\"plan\";threshold=0.5", 20),
        ("\"plan\";threshold=1.0", 20),
    ];
    assert_eq!(fields, BTreeMap::from(expected));
    for threshold in ["0.5", "1.0"] {
        let mut count = 0.0;
        for proxy in &proxies {
            count += proxy.read_metric(&series(threshold)).await;
        }
        assert_eq!(count, 20.0, "{threshold}");
    }
    wait_until("40 log lines", async || {
        proxies
            .iter()
            .map(|proxy| notification_lines(proxy).len())
            .sum::<usize>()
            == 40
    })
    .await;
    let mut by_key: BTreeMap<(String, String), usize> = BTreeMap::new();
    for line in proxies.iter().flat_map(notification_lines) {
        assert!(line.is_level("WARN"), "{line:?}");
        line.expect_fields(&[
            ("policy", "plan"),
            ("limit", "plan"),
            ("capacity", "8"),
            ("unit", "tokens"),
        ]);
        assert!(!line.contains("user-"), "values of keys are hashed");
        let key = (line.field("key"), line.field("threshold"));
        *by_key.entry(key).or_default() += 1;
    }
    assert_eq!(by_key.len(), 40, "{by_key:?}");
    // The counters of notifications are none of the keys' counters.
    assert_eq!(list_counter_keys(&server).await.len(), 20 + 40);
    let dir = ConfigFile::new(&config);
    let listed = dir
        .run_successfully(&["keys", "list", "--policy", "plan"])
        .await;
    assert_eq!(listed.matches("plan/user-").count(), 20, "{listed}");
}

#[tokio::test]
async fn a_notification_outlives_an_instance_and_is_not_sent_without_redis() {
    let (server, upstream) = (RedisServer::start(), Upstream::echo().await);
    let config = format!(
        "{}\n{POLICY}",
        server.store_config().replace("'5s'", "'200ms'")
    );
    let first = Proxy::start_connected(&config, upstream.address).await;
    for expected in [None, None, None, Some("\"plan\";threshold=0.5"), None] {
        assert_eq!(send(&first, "ann").await.header(FIELD), expected);
    }
    drop(first);
    let second = Proxy::start_connected(&config, upstream.address).await;
    for expected in [None, None, Some("\"plan\";threshold=1.0"), None] {
        assert_eq!(send(&second, "ann").await.header(FIELD), expected);
    }
    for _ in 0..3 {
        assert_eq!(send(&second, "bob").await.header(FIELD), None);
    }
    server.pause();
    for _ in 0..3 {
        assert_eq!(send(&second, "bob").await.header(FIELD), None);
    }
    server.resume();
    second.wait_for_store().await;
    // Those sent to the paused server may have been charged.
    let reply = eventually("the notification", TEST_TIMEOUT, async || {
        send(&second, "bob").await.header(FIELD).map(str::to_owned)
    })
    .await;
    assert_starts(&reply, "\"plan\";threshold=0.5");
}

#[tokio::test]
async fn each_instance_notifies_its_own_counters() {
    let (server, upstream) = (RedisServer::start(), Upstream::echo().await);
    let config = format!("{}\n{POLICY}scope = 'instance'\n", server.store_config());
    for _ in 0..2 {
        let proxy = Proxy::start_connected(&config, upstream.address).await;
        let mut fields = Vec::new();
        for _ in 0..10 {
            let reply = send(&proxy, "ann").await;
            fields.extend(reply.header(FIELD).map(str::to_owned));
        }
        assert_eq!(fields, ["\"plan\";threshold=0.5", "\"plan\";threshold=1.0"]);
    }
    assert_eq!(list_counter_keys(&server).await, Vec::<String>::new());
}

#[tokio::test]
async fn policies_of_one_counter_notify_their_own_limits() {
    let policies = ["large", "small"].map(|name| {
        let requests = if name == "large" { 8 } else { 4 };
        format!(
            "[[policy]]\nname = \"{name}\"\nmatch.path = \"/{name}\"\nkey = [\"header:x-user\"]\n\
             counter = \"shared\"\nnotify = [0.5]\n\
             limits = [{{ name = \"monthly\", requests = {requests}, per = \"month\", \
             algorithm = \"fixed_window\" }}]\n"
        )
    });
    let upstream = Upstream::echo().await;
    let proxy = Proxy::start(&policies.concat(), upstream.address).await;
    let mut notified = Vec::new();
    for path in ["/small", "/small", "/large", "/large", "/large"] {
        let reply = proxy.get_with(path, "X-User", "ann").await;
        notified.push(reply.header(FIELD).is_some());
    }
    assert_eq!(notified, [false, true, false, true, false]);
}

#[tokio::test]
async fn hidden_policies_and_replies_to_other_proxies() {
    let config = format!("[check]\naddress = '127.0.0.1:0'\n{POLICY}");
    let proxy = Proxy::with_echo(&config).await;
    let check = proxy.logged_address("check listening").unwrap();
    let ask = || {
        let request = ClientRequest::new(check, "GET", "/check/envoy/");
        request.header("Host", "a").header("X-User", "ann").send()
    };
    let mut fields = Vec::new();
    for _ in 0..9 {
        fields.extend(ask().await.header(FIELD).map(str::to_owned));
    }
    assert_eq!(fields, ["\"plan\";threshold=0.5", "\"plan\";threshold=1.0"]);
    let proxy = Proxy::with_echo(&format!("{POLICY}report = false\n")).await;
    for _ in 0..9 {
        assert_eq!(send(&proxy, "ann").await.header(FIELD), None);
    }
    proxy.assert_metric(&series("0.5"), 1.0).await;
    proxy.assert_metric(&series("1.0"), 1.0).await;
}

#[tokio::test]
async fn envoy_adds_the_field_to_its_response() {
    let config = format!("{RLS_LISTENER}{USER_POLICY}notify = [1.0]\n");
    let mut service = ServiceClient::start(&config).await;
    for expected in [None, Some("\"user\";threshold=1.0"), None] {
        let reply = service.ask_user("ann").await;
        assert_eq!(response_header(&reply, FIELD), expected);
    }
}
