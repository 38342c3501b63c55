//! Resources of the machine that end: ports towards the upstream, threads, disk space, and the
//! kernel's backlog. `descriptor_limits` has file descriptors.

use crate::support::prelude::*;
use socket2::{Domain, SockAddr, Socket, Type};
use std::io::{Read, Write};
use tokio::process::Command;

/// Runs the proxy where two ports are left for connections to the upstream, which answers neither
/// of two requests, then one. curl binds ports outside of that range.
const TWO_PORTS: &str = r#"
set -eu
ip link set lo up
echo "50000 50001" >/proc/sys/net/ipv4/ip_local_port_range
(echo 64 >/proc/sys/net/core/somaxconn) 2>/dev/null || true
echo "somaxconn $(cat /proc/sys/net/core/somaxconn)"
"$TIDEGATE" run --config "$CONFIG" &
proxy=$!
until "$TIDEGATE" health --config "$CONFIG" >/dev/null 2>&1; do
  kill -0 $proxy
  sleep 0.05
done
python3 -c '
import socket, subprocess
server = socket.create_server(("127.0.0.1", 3000))
curl = ["curl", "--silent", "--output", "/dev/null", "--write-out", "%{http_code}"]
ask = lambda port: subprocess.Popen(
    [*curl, "--local-port", str(port), "http://127.0.0.1:8080/"], stdout=subprocess.PIPE, text=True)
answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
asked = [ask(40001), ask(40002)]
taken = [server.accept()[0] for _ in asked]
for connection in taken:
    connection.recv(65536)
print("third:", ask(40003).communicate()[0])
for connection in taken:
    connection.sendall(answer)
print("first, second:", *[one.communicate()[0] for one in asked])
fourth = ask(40004)
for connection in taken:
    connection.settimeout(0.05)
while fourth.poll() is None:
    for connection in taken:
        try:
            connection.recv(65536) and connection.sendall(answer)
        except TimeoutError:
            pass
print("fourth:", fourth.communicate()[0])
'
kill -TERM $proxy
wait $proxy
"#;

#[tokio::test]
async fn exhausted_ports_and_a_short_backlog_are_named() {
    let in_namespace = || {
        let mut command = Command::new("unshare");
        command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
        command.args(["--user", "--map-root-user", "--net"]);
        command
    };
    let permitted = run_command(in_namespace().arg("true")).await;
    if !permitted.status.success() {
        println!("not checked: network namespaces are not permitted here");
        return;
    }
    let dir = TempDir::new().unwrap();
    let config = dir.path().join("config.toml");
    let text = "upstream.url = 'http://127.0.0.1:3000'\nlisten.address = '127.0.0.1:8080'\n\
                admin.address = '127.0.0.1:9090'\n";
    fs::write(&config, text).unwrap();
    let mut command = in_namespace();
    command.args(["sh", "-c", TWO_PORTS]);
    command.env("TIDEGATE", env!("CARGO_BIN_EXE_tidegate"));
    command.env("CONFIG", &config);
    let ended = run_command(&mut command).await;
    let output = format!("{}{}", ended.stdout, ended.stderr);
    assert!(ended.status.success(), "{output}");
    assert_contains(
        &output,
        &[
            "third: 503",
            "first, second: 200 200",
            "fourth: 200",
            "local_resources: Cannot assign requested address",
            "no local port is left",
        ],
    );
    let is_short = output.contains("somaxconn 64");
    let is_named = output.contains("a burst of new connections is dropped earlier");
    assert!(!is_short || is_named, "{output}");
}

/// Runs tidegate with a limit of the shell's `ulimit`.
async fn run_limited(limit: &str, arguments: &[&str]) -> ProcessOutput {
    // Large stacks: the memory for the next one is missing before that for anything else is.
    let script = format!("ulimit {limit} && RUST_MIN_STACK=134217728 exec \"$0\" \"$@\"");
    let mut shell = Command::new("sh");
    shell.args(["-c", &script, env!("CARGO_BIN_EXE_tidegate")]);
    shell.env("TIDEGATE_ADMIN__ADDRESS", "127.0.0.1:0");
    run_command(shell.args(arguments)).await
}

/// Threads cannot start without memory for their stacks.
#[tokio::test]
async fn threads_that_cannot_start_are_named() {
    let dir = TempDir::new().unwrap();
    let config = dir.path().join("config.toml");
    let text = "upstream.url = 'http://127.0.0.1:1'\nlisten = { address = '127.0.0.1:0', threads = 1024 }\n";
    fs::write(&config, text).unwrap();
    let path = config.to_str().unwrap();
    let ended = run_limited("-v 1500000", &["run", "--config", path]).await;
    ended.expect_code(1);
    for expected in [
        "cannot start worker thread",
        "lower listen.threads, or raise the limit on threads",
    ] {
        assert!(ended.stderr.contains(expected), "{expected}: {ended:?}");
    }
}

#[tokio::test]
async fn check_states_limits_that_the_descriptors_would_lower() {
    let (_dir, config) = write_temp_file(
        "config.toml",
        "upstream.url = 'http://127.0.0.1:1'\nlisten.threads = 1\n",
    );
    for (limit, expected) in [
        (
            "-n 300",
            "note: max_connections needs more file descriptors than the hard limit here, 300: it would be lowered to 169 (listen) and 56 (upstream)",
        ),
        ("-n 20000", ""),
    ] {
        let checked = run_limited(limit, &["check", config.to_str().unwrap()]).await;
        assert!(checked.status.success(), "{checked:?}");
        let note = checked.stderr.contains("file descriptors");
        assert_eq!(note, !expected.is_empty(), "{checked:?}");
        assert!(checked.stderr.contains(expected), "{checked:?}");
    }
}

/// A disk that is full must not stop the proxy, nor reject new policies.
#[tokio::test]
async fn a_state_directory_without_space_is_a_warning() {
    let dir = TempDir::new().unwrap();
    let state = dir.path().join("state");
    fs::create_dir(&state).unwrap();
    // A directory in which no file can be created, also by root.
    let mut mount = Command::new("unshare");
    mount.args(["--user", "--map-root-user", "--mount", "sh", "-c"]);
    mount.arg("mount -t tmpfs -o size=4k,nr_inodes=1 none \"$STATE\" && exec \"$TIDEGATE\" check \"$CONFIG\"");
    let config = dir.path().join("config.toml");
    let text = format!(
        "upstream.url = 'http://127.0.0.1:1'\n[store]\nstate_dir = {state:?}\nredis.url = 'redis://127.0.0.1:1'\n"
    );
    fs::write(&config, text).unwrap();
    mount.env("STATE", &state).env("CONFIG", &config);
    mount.env("TIDEGATE", env!("CARGO_BIN_EXE_tidegate"));
    let checked = run_command(&mut mount).await;
    if checked.stderr.contains("unshare failed") || checked.stderr.contains("mount:") {
        println!("not checked: mounts are not permitted here");
        return;
    }
    assert!(checked.status.success(), "{checked:?}");
    assert!(
        checked
            .stderr
            .contains("store.state_dir: can't be written: No space left on device"),
        "{checked:?}"
    );
}

/// The kernel refuses connections to a Unix socket with a full backlog; over TCP it tries again.
#[tokio::test]
async fn a_full_backlog_of_a_unix_upstream_delays_requests() {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("app.sock");
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
    let address = SockAddr::unix(&path).unwrap();
    socket.bind(&address).unwrap();
    socket.listen(1).unwrap();
    let mut waiting = Vec::new();
    let is_full = || {
        let client = Socket::new(Domain::UNIX, Type::STREAM, None).unwrap();
        client.set_nonblocking(true).unwrap();
        let is_full = client.connect(&address).is_err();
        waiting.push(client);
        is_full
    };
    assert!(std::iter::repeat_with(is_full).take(100).any(|full| full));
    let url = format!("unix:{}", path.display());
    let proxy = Proxy::start("", &url).await;
    let request = tokio::spawn(proxy.request("GET", "/").send_for_status());
    let accept = move || {
        // The proxy has met the full backlog before the first connection is accepted.
        std::thread::sleep(Duration::from_millis(100));
        drop(waiting);
        loop {
            let (mut client, _) = socket.accept().unwrap();
            let mut received = [0; 1024];
            if client.read(&mut received).unwrap_or(0) > 0 {
                let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
                return client.write_all(answer).unwrap();
            }
        }
    };
    tokio::task::spawn_blocking(accept).await.unwrap();
    assert_eq!(request.await.unwrap(), 200);
}
