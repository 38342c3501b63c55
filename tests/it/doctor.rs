//! `tidegate doctor` and `GET /doctor`: each fault of Redis, with real servers.

use crate::support::prelude::*;

const POLICIES: &str = "
[[policy]]
name = \"api\"
key = [\"header:x-user-id\"]
limits = [{ requests = 50, per = \"1m\" }, { requests = 90, per = \"1d\", algorithm = \"fixed_window\", name = \"daily\" }]
";

/// Settings of the store that a busy machine can meet.
fn store_config(lines: &str) -> String {
    format!(
        "[store]\nkind = \"redis\"\n[store.redis]\ntimeout = \"5s\"\nkey_prefix = \"shop\"\n{lines}\n{POLICIES}"
    )
}

fn url_line(port: u16) -> String {
    format!("url = \"redis://127.0.0.1:{port}\"")
}

async fn run_doctor(config: &str, args: &[&str]) -> ProcessOutput {
    let words = [&["doctor"], args].concat();
    ConfigFile::new(config).run(&words).await
}

/// The report of a run that ends with this code.
async fn examine(lines: &str, code: i32) -> DoctorReport {
    examine_config(&store_config(lines), code).await
}

async fn examine_config(config: &str, code: i32) -> DoctorReport {
    let ended = run_doctor(config, &["--json"]).await;
    DoctorReport(ended.expect_code(code).json())
}

/// What `doctor --json` prints.
#[derive(Debug)]
struct DoctorReport(Value);

impl std::ops::Deref for DoctorReport {
    type Target = Value;

    fn deref(&self) -> &Value {
        &self.0
    }
}

impl DoctorReport {
    fn findings(&self) -> &[Value] {
        self["findings"].as_array().unwrap()
    }

    /// The findings of a check that are not `ok`, as `level: found`.
    fn problems(&self, check: &str) -> Vec<String> {
        let is_problem = |finding: &&Value| finding["check"] == check && finding["level"] != "ok";
        let problems = self.findings().iter().filter(is_problem).map(|finding| {
            assert!(finding["advice"].is_string(), "{finding}");
            let text = |name: &str| finding[name].as_str().unwrap();
            format!("{}: {}", text("level"), text("found"))
        });
        problems.collect()
    }

    /// Asserts a problem, as `check: level: beginning … part`.
    #[track_caller]
    fn names(&self, problem: impl AsRef<str>) -> &Self {
        let (check, rest) = problem.as_ref().split_once(": ").unwrap();
        let (start, part) = rest.split_once(" … ").unwrap_or((rest, ""));
        let problems = self.problems(check);
        let is_meant = |problem: &String| problem.starts_with(start) && problem.contains(part);
        assert!(
            problems.iter().any(is_meant),
            "{check}: {start} … {part}: {self:#?}"
        );
        self
    }
}

#[tokio::test]
async fn a_healthy_server_has_no_problems_and_keeps_no_traces() {
    let server = RedisServer::start_with(&["--appendonly", "yes"]);
    let proxy = Proxy::echo_connected(&store_config(&url_line(server.port()))).await;
    for user in 0..30 {
        let request = proxy
            .request("GET", "/")
            .header("x-user-id", &user.to_string());
        assert_eq!(request.send_for_status().await, 200);
    }
    let report = examine(&url_line(server.port()), 0).await;
    assert_fields(&report, json!({ "ok": true, "warnings": 0 }));
    for check in [
        "topology",
        "version",
        "role",
        "memory",
        "eviction",
        "persistence",
        "replication",
        "clients",
        "permissions",
        "latency",
        "clock",
        "expiry",
    ] {
        let findings = report.findings();
        assert!(
            findings.iter().any(|finding| finding["check"] == check),
            "{check}"
        );
    }
    let server_facts = &report["servers"][0];
    assert_fields(
        server_facts,
        json!({ "role": "master", "append_only_file": true }),
    );
    assert!(server_facts["latency_p99_ms"].as_f64() >= server_facts["latency_p50_ms"].as_f64());
    let memory = &report["policies"][0];
    assert_fields(memory, json!({ "policy": "api", "counters": 60 }));
    assert!(memory["bytes"].as_u64().unwrap() > 60 * 50, "{memory}");
    let keys: Vec<String> = server.command("KEYS *").await;
    assert!(keys.iter().all(|key| !key.contains("probe")), "{keys:?}");

    let text = run_doctor(&store_config(&url_line(server.port())), &["--strict"]).await;
    text.expect_code(0);
    assert_ends(&text.stdout, "No problem was found.\n");
    text.expect_stdout("\napi ");
}

#[tokio::test]
async fn settings_that_lose_usage_are_reported() {
    let server = RedisServer::start();
    server.run("CONFIG SET maxmemory-policy allkeys-lru").await;
    let report = examine(&url_line(server.port()), 1).await;
    report.names("eviction: fault: maxmemory-policy is allkeys-lru … fresh quota");
    report.names("persistence: warning: no append-only file … no replica");

    // A warning fails only with --strict.
    server.run("CONFIG SET maxmemory-policy noeviction").await;
    let config = store_config(&url_line(server.port()));
    assert_eq!(run_doctor(&config, &[]).await.status.code(), Some(0));
    let strict = run_doctor(&config, &["--strict"]).await;
    strict.expect_code(1);
    assert_ends(&strict.stdout, "0 faults, 1 warning.\n");

    let (_, directory): (String, String) = server.command("CONFIG GET dir").await;
    fs::remove_dir_all(&directory).unwrap();
    server.run("BGSAVE").await;
    wait_until("the save to fail", async || {
        let info: String = server.command("INFO persistence").await;
        info.contains("rdb_last_bgsave_status:err")
    })
    .await;
    let report = examine(&url_line(server.port()), 1).await;
    report.names("persistence: fault:  … rdb_last_bgsave_status");
    fs::create_dir_all(&directory).unwrap();
}

#[tokio::test]
async fn a_full_server_is_reported() {
    let server = RedisServer::start_with(&["--appendonly", "yes"]);
    server.run("CONFIG SET maxmemory 1").await;
    let report = examine(&url_line(server.port()), 1).await;
    report.names("memory: fault:  … of 1 B used");
    report.names("decision: fault: a decision fails (oom) … maxmemory");
}

#[tokio::test]
async fn replicas_that_lag_and_a_replica_as_master_are_reported() {
    let master =
        RedisServer::start_with(&["--appendonly", "yes", "--repl-diskless-sync-delay", "0"]);
    let port = master.port().to_string();
    let replica = RedisServer::start_with(&["--replicaof", "127.0.0.1", &port]);
    wait_until("the replica", async || {
        let info: String = master.command("INFO replication").await;
        info.contains("state=online")
    })
    .await;
    let report = examine(&url_line(master.port()), 0).await;
    assert_eq!(report["servers"][0]["replicas"][0]["state"], "online");

    let report = examine(&url_line(replica.port()), 1).await;
    report.names(format!(
        "role: fault: the server is a replica of 127.0.0.1 … {port}"
    ));
    report.names("decision: fault: a decision fails (readonly) … replica");

    replica.pause();
    sleep(Duration::from_millis(4_100)).await;
    let report = examine(&url_line(master.port()), 0).await;
    report.names("replication: warning: replica 127.0.0.1 … last acknowledgement");
    replica.resume();
}

#[tokio::test]
async fn missing_permissions_are_named() {
    let server = RedisServer::start_with(&["--appendonly", "yes"]);
    let documented = "resetchannels ~shop:* -@all +@read +@write +@scripting +@connection -@dangerous +time +info";
    let login = format!("url = \"redis://tg:s3cret@127.0.0.1:{}\"", server.port());
    let mut words = format!("ACL SETUSER tg on >s3cret {documented}");
    server.run(&words).await;
    let report = examine(&login, 0).await;
    assert_eq!(report["warnings"], 0, "the documented user: {report:#?}");

    words = format!("ACL SETUSER tg reset on >s3cret {documented} -evalsha -zadd");
    server.run(&words).await;
    let report = examine(&login, 1).await;
    report.names("permissions: fault: decisions need commands … EVALSHA, ZADD");
    assert_eq!(
        report["servers"][0]["denied_commands"],
        json!(["ZADD", "EVALSHA"])
    );
    let rule = "ACL SETUSER tg +zadd +evalsha";
    assert_eq!(report.to_string().matches(rule).count(), 1, "{report:#?}");
    report.names("decision: fault: a decision fails (noauth) … evalsha");

    words = format!("ACL SETUSER tg reset on >s3cret {documented} resetkeys ~other:*");
    server.run(&words).await;
    let report = examine(&login, 1).await;
    report.names("permissions: fault: the user may not access keys that start with shop … ZADD");

    words = format!("ACL SETUSER tg reset on >s3cret {documented} -info -memory -scan");
    server.run(&words).await;
    let report = examine(&login, 0).await;
    report.names("permissions: warning: without these commands … INFO, MEMORY, SCAN");
    report.names("info: warning: INFO is refused … no permissions");

    words = format!("ACL SETUSER tg reset on >s3cret {documented} -time -info -script");
    server.run(&words).await;
    let report = examine(&login, 1).await;
    report.names("permissions: fault: decisions need … TIME");
    let findings = report.findings();
    let advice_on = |check: &str| {
        let found = findings.iter().filter(|finding| finding["check"] == check);
        found
            .map(|finding| finding["advice"].as_str().unwrap())
            .collect::<Vec<_>>()
    };
    let advice = advice_on("permissions");
    assert!(advice[0].starts_with("ACL SETUSER tg "), "{advice:?}");
    assert_eq!(advice[1..], ["as above", "as above"]);
    for check in ["decision", "clock"] {
        let expected = ["grant what the findings about permissions name"];
        assert_eq!(advice_on(check), expected, "{check}");
    }

    let wrong = login.replace("s3cret", "wrong");
    let report = examine(&wrong, 1).await;
    report.names("connection: fault: no connection (noauth)");
    let output = run_doctor(&store_config(&wrong), &[]).await;
    assert_lacks(&output.stdout, &["wrong@", ":wrong"]);
}

#[tokio::test]
async fn a_wrong_clock_is_reported() {
    let server = RedisServer::start_with_clock();
    server.set_clock_offset(3_600);
    let report = examine(&url_line(server.port()), 1).await;
    report.names("clock: fault: the server's clock is 3600. … ahead of");
    server.set_clock_offset(4);
    let report = examine(&url_line(server.port()), 0).await;
    report.names("clock: warning: the server's clock is  … ahead of");
}

#[tokio::test]
async fn counters_without_expiry_are_named() {
    let server = RedisServer::start_with(&["--appendonly", "yes"]);
    let proxy = Proxy::echo_connected(&store_config(&url_line(server.port()))).await;
    let request = proxy.request("GET", "/").header("x-user-id", "acme");
    assert_eq!(request.send_for_status().await, 200);
    let keys: Vec<String> = server.command("KEYS *sliding_log*").await;
    let _: i32 = server.command(&format!("PERSIST {}", keys[0])).await;
    // A foreign key with the prefix is no counter.
    server.run("SET shop:v1:other 1").await;
    let report = examine(&url_line(server.port()), 1).await;
    report.names(format!(
        "expiry: fault: 1 of 2 counters have no expiry … {}",
        keys[0]
    ));
    assert_eq!(report["policies"][0]["without_expiry"], 1);
}

#[tokio::test]
async fn the_masters_of_a_cluster_are_examined() {
    let mut cluster = RedisCluster::with_clocks().await;
    cluster.nodes[1].set_clock_offset(100);
    let lines = cluster.config_lines();
    let report = examine(&lines, 1).await;
    let count = report["servers"].as_array().unwrap().len();
    assert_eq!(count, 3, "{report:#?}");
    report.names(format!(
        "clock: fault: the clocks of the masters differ by 100. … {}",
        cluster.nodes[1].port()
    ));
    report.names("replication: warning: no replica … takes over");
    assert_eq!(report.problems("topology"), Vec::<String>::new());
    for node in &cluster.nodes {
        let keys: Vec<String> = node.command("KEYS *").await;
        assert_eq!(keys, Vec::<String>::new());
    }

    // The other topology in each case.
    let report = examine(&url_line(cluster.nodes[0].port()), 1).await;
    report.names("topology: fault: the server is a node of a cluster … standalone");
    let single = RedisServer::start();
    let lines_of_single = format!(
        "topology = \"cluster\"\nurls = [\"redis://127.0.0.1:{}\"]",
        single.port()
    );
    let report = examine(&lines_of_single, 1).await;
    report.names("topology: fault: topology is \"cluster\" … not in a cluster");

    cluster.nodes[2].kill();
    let report = examine(&lines, 1).await;
    report.names("connection: fault: no connection (refused) … refused");
    cluster.nodes[0].run("CLUSTER DELSLOTS 0 1").await;
    let report = examine(&lines, 1).await;
    report.names("topology: fault: 2 hash slots … no master");
}

#[tokio::test]
async fn sentinels_and_the_master_that_they_name_are_examined() {
    let mut deployment = SentinelDeployment::start(1).await;
    let lines = deployment.config_lines();
    let report = examine(&lines, 0).await;
    let findings = report["findings"].to_string();
    assert_contains(&findings, &["3 sentinels name the master 127.0.0.1:"]);

    deployment.sentinels[1].kill();
    let report = examine(&lines, 0).await;
    report.names("topology: warning: sentinel 127.0.0.1 … refused");

    let unknown = lines.replace("sentinel_master = \"shop\"", "sentinel_master = \"other\"");
    let report = examine(&unknown, 1).await;
    report.names("topology: fault: sentinel 127.0.0.1 … unknown master name");

    let url = url_line(deployment.sentinels[0].port);
    let report = examine(&url, 1).await;
    report.names("topology: fault: the server is a sentinel … no counters");
}

#[tokio::test]
async fn an_unreachable_or_hung_server_is_reported_in_time() {
    let report = examine(&url_line(free_port()), 1).await;
    report.names("connection: fault: no connection (refused) … refused");
    let report = examine("url = \"redis://redis.invalid:6379\"", 1).await;
    report.names("connection: fault: no connection (dns) … redis.invalid");

    let server = RedisServer::start();
    server.pause();
    let started = Instant::now();
    let report = examine(&url_line(server.port()), 1).await;
    report.names("connection: fault: no connection (timeout) … timeout");
    assert_faster_than(Duration::from_secs(8), started);
    server.resume();
}

/// Forwards bytes, until a client sends a command with this part. From then on, it forwards nothing
/// of this connection.
async fn start_stalling_relay(port: u16, part: &'static str) -> u16 {
    let passes = move |command: &mut [u8]| !String::from_utf8_lossy(command).contains(part);
    start_filtering_relay(port, passes, |_| true).await
}

#[tokio::test]
async fn a_server_that_stops_answering_keeps_the_facts_that_are_known() {
    let server = RedisServer::start_with(&["--appendonly", "yes"]);
    let lines = async |part| {
        let port = start_stalling_relay(server.port(), part).await;
        url_line(port)
    };
    let (at_clock, at_scan) = (lines("$4\r\nTIME").await, lines("MATCH").await);
    let scan_config = store_config(&at_scan);
    let (early, late, text) = tokio::join!(
        examine(&at_clock, 3),
        examine(&at_scan, 3),
        run_doctor(&scan_config, &[]),
    );
    for (report, missing) in [
        (&early, &["permissions", "latency", "clock", "expiry"][..]),
        (&late, &["expiry"]),
    ] {
        assert_fields(
            report,
            json!({ "ok": false, "faults": 0, "unknown": missing.len() }),
        );
        assert_eq!(report["servers"][0]["role"], "master");
        for check in missing {
            report.names(format!("{check}: unknown:  … no reply within 5 s"));
        }
    }
    assert!(
        late["servers"][0]["latency_p99_ms"].is_number(),
        "{late:#?}"
    );
    assert!(
        late["servers"][0]["clock_ahead_ms"].is_number(),
        "{late:#?}"
    );

    text.expect_code(3).expect_stdout("Redis ");
    assert_ends(
        &text.stdout,
        "No problem was found. Incomplete: 1 check without a result.\n",
    );
}

#[tokio::test]
async fn certificates_that_do_not_fit_are_reported() {
    let (authority, stranger) = (CertificateAuthority::new(), CertificateAuthority::new());
    authority.sign("server", "127.0.0.1");
    let server = RedisServer::start_with_tls(
        &authority,
        &["--tls-auth-clients", "no", "--appendonly", "yes"],
    );
    let lines = |ca: &CertificateAuthority| {
        format!(
            "url = \"rediss://127.0.0.1:{}\"\nca = {:?}",
            server.tls_port(),
            ca.path_string("ca.pem")
        )
    };
    examine(&lines(&authority), 0).await;
    let report = examine(&lines(&stranger), 1).await;
    report.names("connection: fault: no connection (tls) … ca must be a file with the certificate of its issuer, or with this certificate itself");
}

/// A server that states this line to each connection, and closes it.
async fn start_refusing_server(line: &'static str) -> u16 {
    let serve = move |mut stream: TcpStream| async move {
        stream.write_all(line.as_bytes()).await.unwrap_or_default();
    };
    serve_connections(serve).await.port()
}

/// A server that answers what it receives with an error of HTTP, and closes.
async fn start_web_server() -> u16 {
    let serve = |mut stream: TcpStream| async move {
        let received = stream.read(&mut [0; 1024]).await;
        let answer = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n\r\n";
        if received.is_ok_and(|count| count > 0) {
            stream.write_all(answer).await.unwrap_or_default();
        }
    };
    serve_connections(serve).await.port()
}

/// `[store.redis]` for a server that requires a client certificate, without one.
fn lines_without_certificate(server: &RedisServer, authority: &CertificateAuthority) -> String {
    let (port, ca) = (server.tls_port(), authority.path_string("ca.pem"));
    format!("url = \"rediss://127.0.0.1:{port}\"\nca = {ca:?}")
}

/// What a server, TLS or the network states before the first decision: the only problem is the
/// connection, with its cause and its cure, in the report, in the log and in `/readyz`.
#[tokio::test]
async fn errors_before_the_first_command_name_their_cure() {
    let authority = CertificateAuthority::new();
    authority.sign("server", "127.0.0.1");
    let with_password = RedisServer::start_with(&["--requirepass", "secret"]);
    let open = RedisServer::start();
    let with_tls = RedisServer::start_with_tls(&authority, &["--tls-auth-clients", "no"]);
    let in_cluster = RedisServer::start_with(&["--cluster-enabled", "yes"]);
    let with_client_tls = RedisServer::start_with_tls(&authority, &["--tls-auth-clients", "yes"]);
    let protected = start_refusing_server("-DENIED Redis is running in protected mode\r\n").await;
    let crowded = start_refusing_server("-ERR max number of clients reached\r\n").await;
    let password = tempfile::NamedTempFile::new().unwrap();
    fs::write(password.path(), "wrong").unwrap();
    let password_line = format!("password_file = {:?}", password.path());
    let cases = [
        (
            url_line(with_password.port()),
            "noauth",
            "set store.redis.password_file",
        ),
        (
            format!("{}\n{password_line}", url_line(with_password.port())),
            "noauth",
            "check store.redis.username and password_file",
        ),
        (
            format!("{}\n{password_line}", url_line(open.port())),
            "noauth",
            "remove store.redis.password_file, or set requirepass",
        ),
        (url_line(with_tls.tls_port()), "connection", "use rediss://"),
        (
            format!(
                "url = \"rediss://127.0.0.1:{}\"\nca = {:?}",
                open.port(),
                authority.path_string("ca.pem")
            ),
            "",
            "use redis://",
        ),
        (url_line(protected), "noauth", "protected mode"),
        (url_line(crowded), "connection", "maxclients"),
        (
            format!("url = \"redis://127.0.0.1:{}/99\"", open.port()),
            "other",
            "raise databases",
        ),
        (
            format!("url = \"redis://127.0.0.1:{}/1\"", in_cluster.port()),
            "other",
            "has only database 0",
        ),
        (
            lines_without_certificate(&with_client_tls, &authority),
            "tls",
            "set store.redis.cert and store.redis.key",
        ),
        (
            url_line(start_web_server().await),
            "reply",
            "not of another service",
        ),
    ];
    for (lines, kind, cure) in cases {
        let report = examine(&lines, 1).await;
        let findings = report.findings().iter();
        let faults: Vec<_> = findings
            .filter(|finding| finding["level"] == "fault")
            .collect();
        assert_eq!(faults.len(), 1, "{lines}: {report:#?}");
        let advice = faults[0]["advice"].as_str().unwrap();
        assert!(advice.contains(cure), "{lines}: {report:#?}");
        let found = faults[0]["found"].as_str().unwrap();
        assert!(found.contains(&format!("({kind}")), "{lines}: {found}");
    }
}

#[tokio::test]
async fn log_and_readiness_name_cause_and_cure() {
    let authority = CertificateAuthority::new();
    authority.sign("server", "127.0.0.1");
    let with_password = RedisServer::start_with(&["--requirepass", "secret"]);
    let with_client_tls = RedisServer::start_with_tls(&authority, &["--tls-auth-clients", "yes"]);
    let in_cluster = RedisServer::start_with(&["--cluster-enabled", "yes"]);
    let open = RedisServer::start();
    let web_port = start_web_server().await;
    let cases = [
        (
            url_line(with_password.port()),
            with_password.port(),
            "NOAUTH Authentication required.",
            "set store.redis.password_file",
        ),
        (
            lines_without_certificate(&with_client_tls, &authority),
            with_client_tls.tls_port(),
            "CertificateRequired",
            "set store.redis.cert and store.redis.key",
        ),
        (
            url_line(web_port),
            web_port,
            "the answer is not of the Redis protocol",
            "not of another service",
        ),
        (
            format!(
                "topology = \"cluster\"\nurls = [\"redis://127.0.0.1:{}\"]",
                in_cluster.port()
            ),
            in_cluster.port(),
            "no slot has a master",
            "restore the missing masters",
        ),
        (
            url_line(in_cluster.port()),
            in_cluster.port(),
            "CLUSTERDOWN",
            "a cluster also needs topology",
        ),
        (
            format!(
                "topology = \"sentinel\"\nsentinel_master = \"main\"\nurls = [\"redis://127.0.0.1:{}\"]",
                open.port()
            ),
            open.port(),
            "unknown command",
            "the server is no sentinel",
        ),
    ];
    for (lines, port, reason, remedy) in cases {
        let proxy = Proxy::with_echo(&store_config(&lines)).await;
        let line = proxy.wait_for_message("redis unavailable", 0).await;
        assert!(line.field("reason").contains(reason), "{line:?}");
        assert!(line.field("remedy").contains(remedy), "{line:?}");
        let address = line.field("address");
        assert!(address.ends_with(&format!("127.0.0.1:{port}")), "{address}");
        let readiness = proxy.admin_request("GET", "/readyz").send().await.text();
        assert_contains(&readiness, &[reason, remedy, "nothing is limited by api"]);
    }
}

#[tokio::test]
async fn explain_states_what_clients_get_during_an_outage() {
    let url = url_line(free_port());
    for (mode, expected) in [
        (
            "open",
            "Admitted while Redis is unavailable (on_store_failure = \"open\").",
        ),
        (
            "closed",
            "Rejected by api while Redis is unavailable (on_store_failure = \"closed\"): 503.",
        ),
        (
            "local",
            "Decided by each instance alone while Redis is unavailable: api.",
        ),
    ] {
        let config = store_config(&url).replace(
            "name = \"api\"",
            &format!("name = \"api\"\non_store_failure = \"{mode}\""),
        );
        let words = ["explain", "GET", "http://a/", "-H", "x-user-id: ann"];
        let explained = ConfigFile::new(&config).run(&words).await.stdout;
        assert!(
            explained.contains(expected) && explained.contains("check host and port"),
            "{mode}: {explained}"
        );
        // Only a running proxy knows since when.
        assert!(!explained.contains(" s."), "{explained}");
    }
    let proxy = Proxy::with_echo(&store_config(&url)).await;
    proxy.wait_for_message("redis unavailable", 0).await;
    let words = ["explain", "GET", "http://a/", "-H", "x-user-id: ann"];
    let explained = proxy.run_command(&words).await.stdout;
    let expected = "; the proxy on this machine has been without Redis for ";
    assert!(explained.contains(expected), "{explained}");
}

#[tokio::test]
async fn commands_name_the_cause_of_a_hung_server() {
    let server = RedisServer::start();
    let relay = TcpRelay::start(server.port()).await;
    relay.drop_replies();
    let lines = format!(
        "url = \"redis://127.0.0.1:{}\"\nconnect_timeout = \"500ms\"",
        relay.port
    );
    let config = ConfigFile::new(&store_config(&lines));
    let cause = format!(
        "Redis gave no answer (timeout): no reply before the timeout at 127.0.0.1:{}; check that the server runs",
        relay.port
    );
    for words in [
        ["explain", "GET", "http://a/", "-H", "x-user-id: ann"].as_slice(),
        &["keys", "show", "api", "ann"],
        &["keys", "reset", "api", "ann"],
        &["keys", "list"],
        &["overrides", "list"],
    ] {
        let ended = config.run(words).await;
        let text = format!("{}{}", ended.stdout, ended.stderr);
        assert!(text.contains(&cause), "{words:?}: {text}");
    }
}

/// Forwards bytes, and replaces the major version in the replies.
async fn start_version_relay(port: u16, major: u8) -> u16 {
    let name = b"redis_version:";
    let replace = move |reply: &mut [u8]| {
        if let Some(at) = reply.windows(name.len()).position(|window| window == name) {
            reply[at + name.len()] = b'0' + major;
        }
        true
    };
    start_filtering_relay(port, |_| true, replace).await
}

#[tokio::test]
async fn an_old_version_is_reported() {
    let server = RedisServer::start();
    let port = start_version_relay(server.port(), 5).await;
    let report = examine(&url_line(port), 1).await;
    report.names("version: fault: Redis 5. … too old");
}

#[tokio::test]
async fn latency_is_compared_with_the_timeout() {
    let server = RedisServer::start();
    let relay = TcpRelay::start(server.port()).await;
    relay.delay_replies(Duration::from_millis(30));
    let config = store_config(&url_line(relay.port)).replace("\"5s\"", "\"20ms\"");
    let report = examine_config(&config, 1).await;
    report.names("latency: fault: a decision takes  … store.redis.timeout is 20ms");
}

#[tokio::test]
async fn envoys_default_timeout_and_the_memory_store_are_mentioned() {
    let server = RedisServer::start();
    let rls = format!(
        "{}\n[rls]\naddress = \"127.0.0.1:0\"\n",
        store_config(&url_line(server.port()))
    );
    let report = examine_config(&rls, 0).await;
    report.names("rls: warning: store.redis.timeout is 5s … 20 ms");
    let fast = rls.replace("timeout = \"5s\"", "timeout = \"15ms\"");
    let report = examine_config(&fast, 0).await;
    assert_eq!(report.problems("rls"), Vec::<String>::new());

    let ended = run_doctor(POLICIES, &[]).await;
    ended
        .expect_code(0)
        .expect_stdout("store.kind is \"memory\"");
    run_doctor("[store]\nkind = \"rediss\"\n", &[])
        .await
        .expect_code(1)
        .expect_stderr("store.kind");
}

#[tokio::test]
async fn the_admin_endpoint_examines_redis_at_most_once_per_interval() {
    let server = RedisServer::start();
    let admin = Proxy::with_token(&store_config(&url_line(server.port()))).await;
    admin.wait_for_store().await;
    let (one, other) = tokio::join!(admin.get_json("/doctor"), admin.get_json("/doctor"));
    assert_eq!(one, other);
    assert_fields(&one, json!({ "store": { "kind": "redis" }, "faults": 0 }));
    // One more examination would find this.
    server.run("CONFIG SET maxmemory-policy allkeys-lru").await;
    assert_eq!(admin.get_json("/doctor").await, one);
    let calls = |info: String| {
        let line = info
            .lines()
            .find_map(|line| line.strip_prefix("cmdstat_dbsize:calls="));
        line.map(|line| line.split(',').next().unwrap().to_owned())
    };
    let info: String = server.command("INFO commandstats").await;
    assert_eq!(calls(info).as_deref(), Some("1"));
    let request = admin.admin_request("GET", "/doctor?x=1");
    request.expect_status(400).await;
}
