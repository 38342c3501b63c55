//! One view of the fleet: `GET /fleet` and `tidegate top --fleet` with several instances.

use crate::support::prelude::*;
use tokio::time::Instant;

const POLICY: &str = r#"
[[policy]]
name = "api"
key = ["header:x-user"]
limit = { requests = 2, per = "1h" }
"#;

/// Instances that share a Redis server.
struct Fleet {
    redis: RedisServer,
    upstream: Upstream,
    directory: TempDir,
    instances: Vec<Proxy>,
}

impl Fleet {
    /// Starts instances with these names. All have the token `s3cret`.
    async fn start(names: &[&str]) -> Self {
        let mut fleet = Self {
            redis: RedisServer::start(),
            upstream: Upstream::echo().await,
            directory: TempDir::new().unwrap(),
            instances: Vec::new(),
        };
        for name in names {
            fleet.start_instance(name, "s3cret", "127.0.0.1:0").await;
        }
        fleet
    }

    async fn start_instance(&mut self, name: &str, token: &str, admin: &str) {
        let file = self.token_file(token);
        let config = format!(
            "admin.token_file = {file:?}\n{}\n{POLICY}",
            self.redis.store_config()
        );
        let proxy = Proxy::setup(&config)
            .upstream(self.upstream.address)
            .env("POD_NAME", name)
            .env("POD_IP", "127.0.0.1")
            .env("TIDEGATE_ADMIN__ADDRESS", admin)
            .start()
            .await;
        proxy.wait_for_store().await;
        self.instances.push(proxy);
    }

    fn token_file(&self, token: &str) -> PathBuf {
        let file = self.directory.path().join(token);
        fs::write(&file, token).unwrap();
        file
    }

    async fn read_fleet(&self, instance: usize) -> Value {
        let reply = self.admin_get(instance, "/fleet", "s3cret").await;
        assert_eq!(reply.status, 200, "{}", reply.text());
        reply.json()
    }

    async fn admin_get(&self, instance: usize, target: &str, token: &str) -> RawResponse {
        let address = self.instances[instance].admin_address();
        ClientRequest::new(address, "GET", target)
            .header("Host", "localhost")
            .header("Authorization", &format!("Bearer {token}"))
            .send()
            .await
    }

    /// Waits until the view of the first instance fulfils a condition.
    async fn wait_for_view(&self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        eventually(what, 2 * TEST_TIMEOUT, async || {
            let view = self.read_fleet(0).await;
            wanted(&view).then_some(view)
        })
        .await
    }

    /// Adds an entry to the set of heartbeats, as an instance with this entry does.
    async fn add_heartbeat(&self, entry: &str) {
        let mut redis = self.redis.connection().await;
        let keys: Vec<String> = self.redis.command("KEYS *:v1:instances").await;
        let (now_s, _): (u64, u64) = self.redis.command("TIME").await;
        // An hour ahead, so that the entry stays during the test.
        redis::cmd("ZADD")
            .arg(&keys[0])
            .arg((now_s + 3600) * 1_000_000)
            .arg(entry)
            .exec_async(&mut redis)
            .await
            .unwrap();
    }
}

fn find_instance<'v>(view: &'v Value, name: &str) -> &'v Value {
    let instances = view["instances"].as_array().unwrap();
    let found = instances.iter().find(|one| one["name"] == name);
    found.unwrap_or_else(|| panic!("{name} in {view:#}"))
}

/// Whether an instance has counted three instances.
fn has_third(view: &Value, name: &str) -> bool {
    let share = find_instance(view, name)["share"].as_f64().unwrap();
    (share - 1.0 / 3.0).abs() < 1e-9
}

fn answered(view: &Value, count: u64) -> bool {
    view["answered"] == count
}

#[tokio::test]
async fn lists_all_instances_and_adds_up_their_rankings() {
    let fleet = Fleet::start(&["orders-0", "orders-1", "orders-2"]).await;
    for (instance, times) in [(0, 5), (1, 4), (2, 3)] {
        for _ in 0..times {
            let request = fleet.instances[instance].request("GET", "/a");
            request.header("x-user", "ann").send_for_status().await;
        }
    }
    let view = fleet
        .wait_for_view("three answers with all refusals", |view| {
            // Two of twelve requests are admitted, by all instances together.
            answered(view, 3)
                && view["keys"]["entries"][0]["count"] == 10
                && ["orders-0", "orders-1", "orders-2"]
                    .iter()
                    .all(|name| has_third(view, name))
        })
        .await;
    assert_eq!((&view["total"], &view["shared"]), (&3.into(), &true.into()));
    let entry = &view["keys"]["entries"][0];
    assert_fields(entry, json!({ "policy": "api", "error": 0 }));
    assert_eq!(view["paths"]["entries"][0]["count"], 10);
    let own: Vec<_> = ["orders-0", "orders-1", "orders-2"]
        .iter()
        .enumerate()
        .map(|(index, name)| {
            let one = find_instance(&view, name);
            let address = fleet.instances[index].admin_address().to_string();
            assert_fields(one, json!({ "state": "ready", "store": "up" }));
            assert_eq!(one["version"], env!("CARGO_PKG_VERSION"));
            assert_fields(one, json!({ "admin": address, "not_asked": null }));
            assert!(one["decisions_per_s"].as_f64().is_some(), "{one}");
            one["self"].as_bool().unwrap()
        })
        .collect();
    assert_eq!(own, [true, false, false]);
}

#[tokio::test]
async fn an_instance_that_cannot_be_asked_is_named_with_the_reason() {
    let mut fleet = Fleet::start(&["here"]).await;
    // Only an address that other machines can reach requires the token for reading.
    fleet.start_instance("here", "other", "0.0.0.0:0").await;
    // Entries: of an older version, of another machine's loopback, of a closed port, and of a port
    // where another instance answers.
    let own = fleet.instances[0].admin_address();
    for entry in [
        "00000000000000000000000000000001",
        "00000000000000000000000000000002 1.0.0 elsewhere 127.0.0.1:9",
        "00000000000000000000000000000003 1.0.0 here 127.0.0.1:9",
        "00000000000000000000000000000004 1.0.0 hidden -",
        &format!("00000000000000000000000000000005 1.0.0 here {own}"),
    ] {
        fleet.add_heartbeat(entry).await;
    }
    let view = fleet
        .wait_for_view("seven entries", |view| view["total"] == 7)
        .await;
    assert_eq!(view["answered"], 1, "{view:#}");
    let items = view["instances"].as_array().unwrap().iter();
    let reasons: Vec<&str> = items.filter_map(|one| one["not_asked"].as_str()).collect();
    for part in [
        "its version does not report",
        "its admin port failed",
        "(its address is loopback: see admin.advertise)",
        "admin.advertise",
        "another instance answered",
        "its admin token differs",
    ] {
        assert!(
            reasons.iter().any(|reason| reason.contains(part)),
            "{part} in {reasons:#?}"
        );
    }
    assert_eq!(reasons.len(), 6);
}

/// A program that can write to Redis adds its own address: it must not get the token.
#[tokio::test]
async fn the_token_is_never_sent_to_an_address_in_redis() {
    let fleet = Fleet::start(&["orders-0"]).await;
    let trap = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = trap.local_addr().unwrap();
    let id = "00000000000000000000000000000001";
    fleet
        .add_heartbeat(&format!("{id} 1.0.0 orders-0 {address}"))
        .await;
    let answer = tokio::spawn(async move {
        let (mut socket, _) = trap.accept().await.unwrap();
        let mut request = vec![0; 4096];
        let length = socket.read(&mut request).await.unwrap();
        let body = format!("{{\"id\": \"{id}\", \"status\": \"\\u001b[2J\"}}");
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
        socket.write_all((head + &body).as_bytes()).await.unwrap();
        String::from_utf8(request[..length].to_vec()).unwrap()
    });
    let view = fleet.read_fleet(0).await;
    let request = answer.await.unwrap();
    assert_starts(&request, "GET /fleet/instance?n=100 HTTP/1.1\r\n");
    assert!(!request.contains("s3cret"), "{request}");
    assert_eq!(view["answered"], 2);
    // What it got changes nothing.
    let mut lines = request.lines();
    let credential = lines.find_map(|line| line.split_once("Bearer ")).unwrap().1;
    let address = fleet.instances[0].admin_address();
    let reply = ClientRequest::new(address, "DELETE", "/keys?policy=api&key=ann")
        .header("Host", "localhost")
        .header("Authorization", &format!("Bearer {credential}"))
        .send()
        .await;
    assert_eq!(reply.status, 401);
}

#[tokio::test]
async fn slow_and_huge_answers_are_bounded() {
    let fleet = Fleet::start(&["orders-0"]).await;
    let mut traps = Vec::new();
    for number in 1..=40 {
        let trap = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let entry = format!("{number:032} 1.0.0 orders-0 {}", trap.local_addr().unwrap());
        fleet.add_heartbeat(&entry).await;
        traps.push(tokio::spawn(async move {
            let (mut socket, _) = trap.accept().await.unwrap();
            if number % 2 == 0 {
                socket.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.ok();
                while socket.write_all(&[b' '; 65_536]).await.is_ok() {}
            }
            sleep(TEST_TIMEOUT).await;
        }));
    }
    let started = Instant::now();
    let view = fleet.read_fleet(0).await;
    assert_faster_than(Duration::from_secs(6), started);
    assert_eq!((&view["total"], &view["answered"]), (&41.into(), &1.into()));
    let rss_kib = fleet.instances[0].rss_kib();
    assert!(rss_kib < 200 << 10, "{rss_kib} KiB");
    traps.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn during_an_outage_the_last_list_is_asked() {
    let mut fleet = Fleet::start(&["a", "b"]).await;
    fleet
        .wait_for_view("two answers", |view| answered(view, 2))
        .await;
    fleet.redis.kill();
    let view = fleet
        .wait_for_view("degraded instances", |view| {
            answered(view, 2) && find_instance(view, "b")["store"] == "degraded"
        })
        .await;
    assert!(
        view["problem"]
            .as_str()
            .unwrap()
            .contains("Redis gave no answer"),
        "{view:#}"
    );
}

#[tokio::test]
async fn the_memory_store_has_one_instance() {
    let proxy = Proxy::setup(POLICY).start().await;
    let address = proxy.admin_address();
    let request = ClientRequest::new(address, "GET", "/fleet").header("Host", "localhost");
    let view = request.send().await.json();
    assert_fields(&view, json!({ "shared": false, "store": "memory" }));
    assert_eq!((&view["total"], &view["answered"]), (&1.into(), &1.into()));
}

#[tokio::test]
async fn top_prints_the_fleet() {
    let fleet = Fleet::start(&["orders-0", "orders-1"]).await;
    for _ in 0..3 {
        let request = fleet.instances[1].request("GET", "/a");
        request.header("x-user", "ann").send_for_status().await;
    }
    fleet
        .wait_for_view("the refusal", |view| {
            answered(view, 2) && view["keys"]["refused"] == 1
        })
        .await;
    let address = fleet.instances[0].admin_address();
    let config = fleet.directory.path().join("top.toml");
    let text = format!(
        "upstream.url = 'http://127.0.0.1:9'\nadmin.token_file = {:?}\n",
        fleet.token_file("s3cret")
    );
    fs::write(&config, text).unwrap();
    let run = async |words: &[&str]| {
        let mut command = tidegate_command();
        command.args(["top", "--fleet"]).args(words);
        command.arg("--config").arg(&config);
        command.env("TIDEGATE_ADMIN__ADDRESS", address.to_string());
        run_command(&mut command).await
    };
    let table = run(&[]).await;
    assert!(table.status.success(), "{table:?}");
    for part in [
        "2 instances share the limits, 2 answered",
        "orders-0*",
        "orders-1 ",
        "50.0%",
        "ann",
    ] {
        assert!(table.stdout.contains(part), "{part} in {}", table.stdout);
    }
    let json: Value = serde_json::from_str(&run(&["--json"]).await.stdout).unwrap();
    assert_eq!(json["answered"], 2);
}
