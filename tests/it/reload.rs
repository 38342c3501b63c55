//! Policy reloads: every kind of file change, valid and invalid contents.

use crate::support::prelude::*;
use crate::support::secret_volume::SecretVolume;

/// The documented maximum is 2 s; the rest is for a busy machine.
const RELOAD_TIMEOUT: Duration = Duration::from_millis(2_500);

fn make_policy(requests: u64) -> String {
    format!("[[policy]]\nname = \"p\"\nlimit = {{ requests = {requests}, per = \"1h\" }}\n")
}

/// The limit that responses report. The request itself uses quota, unless it is rejected.
async fn get_limit(proxy: &Proxy) -> Option<u64> {
    proxy
        .get("/")
        .await
        .list_parameter("ratelimit-policy", "p", "q")
}

async fn wait_for_limit(proxy: &Proxy, requests: u64, what: &str) {
    wait_until_within(
        format!("{what}: limit {requests}"),
        RELOAD_TIMEOUT,
        async || get_limit(proxy).await == Some(requests),
    )
    .await;
}

fn is_warning_or_error(line: &LogLine) -> bool {
    line.is_level("WARN") || line.is_level("ERROR")
}

#[tokio::test]
async fn an_edit_in_place_takes_effect() {
    let proxy = Proxy::with_echo(&make_policy(1_000)).await;
    for requests in [2_000, 3_000, 4_000] {
        proxy.write_config(&make_policy(requests));
        wait_for_limit(&proxy, requests, "edited in place").await;
    }
}

#[tokio::test]
async fn a_file_renamed_over_it_takes_effect() {
    let proxy = Proxy::with_echo(&make_policy(1_000)).await;
    for requests in [2_000, 3_000] {
        let new = proxy.config_path().with_extension("new");
        fs::write(&new, make_policy(requests)).unwrap();
        fs::rename(&new, proxy.config_path()).unwrap();
        wait_for_limit(&proxy, requests, "renamed over").await;
    }
}

#[tokio::test]
async fn an_edited_include_takes_effect() {
    let dir = TempDir::new().unwrap();
    let included = dir.path().join("policies");
    fs::create_dir(&included).unwrap();
    fs::write(included.join("a.toml"), make_policy(1_000)).unwrap();
    fs::write(
        dir.path().join("config.toml"),
        "include = [\"policies/*.toml\"]\n",
    )
    .unwrap();
    let upstream = Upstream::echo().await;
    let builder = Proxy::setup("").config_file(&dir.path().join("config.toml"));
    let proxy = builder.upstream(upstream.address).start().await;
    assert_eq!(get_limit(&proxy).await, Some(1_000));
    fs::write(included.join("a.toml"), make_policy(2_000)).unwrap();
    wait_for_limit(&proxy, 2_000, "an include edited").await;
    fs::remove_file(included.join("a.toml")).unwrap();
    fs::write(included.join("b.toml"), make_policy(3_000)).unwrap();
    wait_for_limit(&proxy, 3_000, "another include in its place").await;
}

#[tokio::test]
async fn a_config_map_takes_effect_at_every_one_of_three_swaps() {
    let map = SecretVolume::mount(&[("config.toml", &make_policy(1_000))]);
    let upstream = Upstream::echo().await;
    let builder = Proxy::setup("")
        .config_file(&map.path("config.toml"))
        .upstream(upstream.address);
    let proxy = builder.start().await;
    assert_eq!(get_limit(&proxy).await, Some(1_000));
    for swap in 2..=4 {
        map.swap(&[("config.toml", &make_policy(swap * 1_000))]);
        wait_for_limit(&proxy, swap * 1_000, &format!("swap {}", swap - 1)).await;
    }
}

#[tokio::test]
async fn sighup_reloads_at_once() {
    let proxy = Proxy::with_echo(&make_policy(1_000)).await;
    proxy.write_config(&make_policy(2_000));
    proxy.send_sighup();
    wait_for_limit(&proxy, 2_000, "SIGHUP").await;
}

#[tokio::test]
async fn an_invalid_file_changes_nothing_and_is_logged() {
    let proxy = Proxy::with_echo(&make_policy(1_000)).await;
    let bad = [
        ("no TOML", "[[policy]\nname = \"p\"", ""),
        (
            "an unknown key",
            "[[policy]]\nname = \"p\"\nlimitt = { requests = 1, per = \"1h\" }",
            "limitt",
        ),
        (
            "a bad value",
            "[[policy]]\nname = \"p\"\nlimit = { requests = 1, per = \"1 fortnight\" }",
            "fortnight",
        ),
        (
            "a missing include",
            "include = [\"missing.toml\"]",
            "missing.toml",
        ),
    ];
    for (what, text, expected_text) in bad {
        let mark = proxy.log_mark();
        proxy.write_config(text);
        let complaint = |line: &LogLine| is_warning_or_error(line) && line.contains(expected_text);
        proxy
            .wait_for_log(
                &format!("a complaint about {what}"),
                mark,
                TEST_TIMEOUT,
                complaint,
            )
            .await;
        let answer = get_limit(&proxy).await;
        assert_eq!(answer, Some(1_000), "{what} must change nothing");
    }
    proxy.write_config(&make_policy(2_000));
    wait_for_limit(&proxy, 2_000, "a good file after bad ones").await;
}

#[tokio::test]
async fn a_removed_file_changes_nothing() {
    let proxy = Proxy::with_echo(&make_policy(1_000)).await;
    let mark = proxy.log_mark();
    fs::remove_file(proxy.config_path()).unwrap();
    proxy
        .wait_for_log(
            "a complaint about the missing file",
            mark,
            TEST_TIMEOUT,
            is_warning_or_error,
        )
        .await;
    assert_eq!(get_limit(&proxy).await, Some(1_000));
    proxy.write_config(&make_policy(2_000));
    wait_for_limit(&proxy, 2_000, "the file is back").await;
}

/// A partially written file may parse and have another meaning.
#[tokio::test]
async fn a_half_written_file_is_not_applied() {
    let proxy = Proxy::with_echo(&make_policy(1_000)).await;
    let whole = format!("{}# {}\n", make_policy(2_000), "filler ".repeat(100));
    // Writes a bit more every 40 ms for over two seconds, so that the file is never stable for 100
    // ms.
    for end in (1..whole.len()).step_by(whole.len() / 60) {
        proxy.write_config(&whole[..end]);
        sleep(Duration::from_millis(40)).await;
        if end < make_policy(2_000).len() {
            assert_eq!(get_limit(&proxy).await, Some(1_000), "after {end} bytes");
        }
    }
    proxy.write_config(&whole);
    wait_for_limit(&proxy, 2_000, "written to its end").await;
}

#[tokio::test]
async fn trap_15_usage_is_kept_and_a_changed_limit_applies_at_once() {
    let proxy = Proxy::with_echo(&make_policy(3)).await;
    assert_eq!(proxy.get_statuses("/", 4).await, [200, 200, 200, 429]);
    // Raising the limit allows two more requests. Polling is rejected until the reload and then
    // uses one.
    proxy.write_config(&make_policy(5));
    wait_for_limit(&proxy, 5, "raised").await;
    assert_eq!(
        proxy.get_statuses("/", 2).await,
        [200, 429],
        "three were used before, and polling used one"
    );
    proxy.write_config(&make_policy(2));
    wait_for_limit(&proxy, 2, "lowered").await;
    let refused = proxy.get("/").await;
    assert_eq!((refused.status, refused.remaining("p")), (429, Some(0)));
    proxy.write_config(&make_policy(6));
    wait_for_limit(&proxy, 6, "raised again").await;
    proxy
        .expect_status("/", 429, "five were used before, and polling used one")
        .await;
}

#[tokio::test]
async fn trap_15_counters_survive_a_reload_that_changes_something_else() {
    let proxy = Proxy::with_echo(&make_policy(2)).await;
    assert_eq!(proxy.get_statuses("/", 3).await, [200, 200, 429]);
    let extra = "[[policy]]\nname = \"new\"\nmatch = { path = \"/new\" }\naction = \"deny\"\n";
    proxy.write_config(&format!("{extra}{}", make_policy(2)));
    wait_until_within("the reload", RELOAD_TIMEOUT, async || {
        proxy.get("/new").await.status == 403
    })
    .await;
    assert_eq!(proxy.get("/").await.status, 429);
}

#[tokio::test]
async fn a_request_in_flight_survives_a_reload() {
    let (feeder, body) = channel_body();
    let body = Mutex::new(Some(body));
    let upstream = Upstream::with_handler(move |request| {
        let slow = if request.uri() == "/slow" {
            body.lock().unwrap().take()
        } else {
            None
        };
        async { Response::new(slow.unwrap_or_default()) }
    })
    .await;
    let proxy = Proxy::start(&make_policy(1_000), upstream.address).await;
    let mut client = proxy
        .send_raw("GET /slow HTTP/1.1\r\nHost: a\r\n\r\n")
        .await;
    feeder.send("before").await;
    client.read_past(b"before").await;
    proxy.write_config(&make_policy(2_000));
    wait_for_limit(&proxy, 2_000, "while a request is in flight").await;
    feeder.send("after").await;
    drop(feeder);
    client.read_past(b"after").await;
    client.send("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
    client.read_past(b"q=2000").await;
}

#[tokio::test]
async fn a_change_that_needs_a_restart_is_logged() {
    let proxy = Proxy::with_echo(&make_policy(1_000)).await;
    let mark = proxy.log_mark();
    proxy.write_config(&format!(
        "[listen]\nmax_connections = 5\n{}",
        make_policy(2_000)
    ));
    wait_for_limit(&proxy, 2_000, "the policies beside it").await;
    let mentions_restart = |line: &LogLine| is_warning_or_error(line) && line.contains("restart");
    proxy
        .wait_for_log(
            "a log line that the listener needs a restart",
            mark,
            TEST_TIMEOUT,
            mentions_restart,
        )
        .await;
}

#[tokio::test]
async fn a_reload_that_changes_block_for_does_not_end_a_block() {
    let policy = |requests: u64, block: &str| {
        format!(
            "[[policy]]\nname = \"p\"\nlimit = {{ requests = {requests}, per = \"1ms\" }}\n{block}"
        )
    };
    let proxy = Proxy::with_echo(&policy(0, "block_for = \"1h\"")).await;
    proxy
        .expect_status("/", 429, "a request that never fits must not start a block")
        .await;
    proxy.write_config(&policy(1, "block_for = \"1h\""));
    wait_for_limit(&proxy, 1, "one a millisecond").await;
    while proxy.get_statuses("/", 8).await.ends_with(&[200]) {}
    for (requests, block) in [(2_000, "block_for = \"1m\""), (3_000, "block_for = \"2h\"")] {
        proxy.write_config(&policy(requests, block));
        wait_for_limit(&proxy, requests, "blocked, with another block_for").await;
        let reply = proxy.get("/").await;
        assert_eq!(reply.status, 429, "{block}");
        let left_us = reply.retry_after_us();
        let range = 3_000_000_000..=3_600_000_000;
        assert!(range.contains(&left_us), "{left_us}");
    }
    proxy.write_config(&policy(4_000, ""));
    wait_for_limit(&proxy, 4_000, "without a block").await;
    assert_eq!(proxy.get("/").await.status, 200);
}
