//! Processes that stop and start again within one outage, with `store.state_dir`.

use super::*;
use crate::support::prelude::*;
use std::os::unix::fs::PermissionsExt;

const UNITS: usize = 20;
const PERIOD: Duration = Duration::from_secs(12);

/// A single instance with a limit of [`UNITS`] per [`PERIOD`].
async fn start_instance(redis_port: u16, state_dir: &Path, upstream: &Upstream) -> Proxy {
    let policy = format!(
        "[[policy]]\nname = \"p\"\nlimit = {{ requests = {UNITS}, per = \"{}s\" }}\n",
        PERIOD.as_secs()
    );
    let proxy = Proxy::setup(&format!(
        r#"
listen = {{ threads = 2 }}
log = {{ access = "off" }}
defaults = {{ on_store_failure = "local" }}
[store]
kind = "redis"
state_dir = "{}"
[store.redis]
url = "redis://127.0.0.1:{redis_port}/0"
key_prefix = "shop"
instances = 1
timeout = "500ms"
{policy}
"#,
        state_dir.display()
    ));
    proxy.upstream(upstream.address).start().await
}

fn list_files(directory: &Path) -> Vec<String> {
    let files = fs::read_dir(directory).unwrap();
    files
        .map(|file| file.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// Sends requests and records the admitted ones.
async fn send_requests(proxy: &Proxy, count: usize, admitted: &mut Vec<AdmittedRequest>) {
    for _ in 0..count {
        let sent = Instant::now();
        let status = proxy.get("/").await.status;
        assert!([200, 429].contains(&status), "{status}");
        if status == 200 {
            let answered = Instant::now();
            admitted.push(AdmittedRequest { sent, answered });
        }
    }
}

async fn stop(mut proxy: Proxy) {
    proxy.send_sigterm();
    assert!(proxy.wait_for_exit(TEST_TIMEOUT).await.status.success());
}

/// A rollout restarts each instance. The usage of the outage is known to the new process, and
/// reaches Redis when the outage ends.
#[tokio::test]
async fn a_restart_in_an_outage_grants_no_second_quota() {
    let (mut server, upstream) = (start_persistent_redis(), Upstream::echo().await);
    let directory = TempDir::new().unwrap();
    let proxy = start_instance(server.port(), directory.path(), &upstream).await;
    wait_for_instance_count(&proxy, 1.0).await;
    let mut admitted = Vec::new();
    send_requests(&proxy, 5, &mut admitted).await;
    let first = admitted[0];
    server.kill();
    send_requests(&proxy, 10, &mut admitted).await;
    stop(proxy).await;
    assert_eq!(list_files(directory.path()).len(), 1);
    let proxy = start_instance(server.port(), directory.path(), &upstream).await;
    send_requests(&proxy, 30, &mut admitted).await;
    let in_outage = admitted.len();
    stop(proxy).await;
    let proxy = start_instance(server.port(), directory.path(), &upstream).await;
    send_requests(&proxy, 30, &mut admitted).await;
    println!(
        "{in_outage} and {} admitted in {:?}",
        admitted.len() - in_outage,
        first.sent.elapsed()
    );
    server.restart_async().await;
    wait_until("the usage to be written back", async || {
        list_files(directory.path()).is_empty()
    })
    .await;
    while first.sent.elapsed() < PERIOD * 3 {
        send_requests(&proxy, 5, &mut admitted).await;
        sleep(Duration::from_millis(100)).await;
    }
    let within = |first: &AdmittedRequest| {
        let inside =
            |one: &&AdmittedRequest| one.sent >= first.sent && one.answered < first.sent + PERIOD;
        admitted.iter().filter(inside).count()
    };
    let most = admitted.iter().map(within).max().unwrap_or(0);
    println!(
        "at most {most} of {UNITS} in a window, {} in all",
        admitted.len()
    );
    assert!(most <= UNITS, "{most} of {UNITS} in a window");
    assert_eq!(in_outage, UNITS, "the stored usage is not the whole limit");
    assert!(
        admitted.len() >= 2 * UNITS,
        "{} admitted in three periods",
        admitted.len()
    );
    stop(proxy).await;
    assert!(list_files(directory.path()).is_empty());
}

/// A damaged file is set aside, and the start succeeds.
#[tokio::test]
async fn a_damaged_state_file_is_refused_with_a_warning() {
    let (mut server, upstream) = (RedisServer::start(), Upstream::echo().await);
    let directory = TempDir::new().unwrap();
    let proxy = start_instance(server.port(), directory.path(), &upstream).await;
    wait_for_instance_count(&proxy, 1.0).await;
    server.kill();
    let mut admitted = Vec::new();
    send_requests(&proxy, 5, &mut admitted).await;
    stop(proxy).await;
    let name = list_files(directory.path()).pop().unwrap();
    let path = directory.path().join(&name);
    let mode = fs::metadata(&path).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "only the owner may read the keys");
    fs::write(&path, b"tidegate-usage 1 0000\n[1,").unwrap();
    server.restart_async().await;
    let proxy = start_instance(server.port(), directory.path(), &upstream).await;
    proxy
        .wait_for_log("a warning", 0, TEST_TIMEOUT, |line| {
            line.is_level("WARN") && line.message_starts_with("stored usage refused")
        })
        .await;
    admitted.clear();
    send_requests(&proxy, UNITS + 5, &mut admitted).await;
    assert_eq!(admitted.len(), UNITS);
    stop(proxy).await;
    assert_eq!(list_files(directory.path()), [format!("{name}.refused")]);
}

/// Two instances that share the directory read one file each, and the file of an instance that does
/// not return is written back by another.
#[tokio::test]
async fn instances_that_share_the_directory_read_each_file_once() {
    let (mut server, upstream) = (RedisServer::start(), Upstream::echo().await);
    let directory = TempDir::new().unwrap();
    let mut proxies = Vec::new();
    for _ in 0..3 {
        proxies.push(start_instance(server.port(), directory.path(), &upstream).await);
    }
    for proxy in &proxies {
        wait_for_instance_count(proxy, 3.0).await;
    }
    server.kill();
    let mut admitted = Vec::new();
    for proxy in proxies {
        send_requests(&proxy, UNITS, &mut admitted).await;
        stop(proxy).await;
    }
    assert_eq!(admitted.len(), UNITS, "three shares");
    assert_eq!(list_files(directory.path()).len(), 3);
    let mut restarted = Vec::new();
    for _ in 0..2 {
        let proxy = start_instance(server.port(), directory.path(), &upstream).await;
        send_requests(&proxy, UNITS, &mut admitted).await;
        restarted.push(proxy);
    }
    server.restart_async().await;
    wait_until("the usage to be written back", async || {
        list_files(directory.path()).is_empty()
    })
    .await;
    send_requests(&restarted[0], UNITS, &mut admitted).await;
    let elapsed = admitted[0].sent.elapsed();
    println!("{} admitted in {elapsed:?}", admitted.len());
    // A slow machine may leave the window; then the limit allows more.
    assert!(admitted.len() <= UNITS || elapsed >= PERIOD);
}
