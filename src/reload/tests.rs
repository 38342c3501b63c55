use super::*;
use crate::config::FileSource;
use crate::telemetry::metrics::{MetricLabels, Metrics};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

const OLD_CONTENT: &str = "a";
const NEW_CONTENT: &str = "b";

fn instant_at(ms: u64, start: Instant) -> Instant {
    start + Duration::from_millis(ms)
}

#[tokio::test]
async fn content_is_settled_after_the_settle_time() {
    let start = Instant::now();
    let mut debouncer = ChangeDebouncer::new(OLD_CONTENT);
    assert_eq!(
        debouncer.observe(OLD_CONTENT, instant_at(0, start)),
        Some(POLL_INTERVAL)
    );
    assert_eq!(
        debouncer.observe(NEW_CONTENT, instant_at(500, start)),
        Some(SETTLE_TIME)
    );
    assert_eq!(
        debouncer.observe(NEW_CONTENT, instant_at(530, start)),
        Some(Duration::from_millis(70))
    );
    assert_eq!(debouncer.observe(NEW_CONTENT, instant_at(600, start)), None);
    // Content stays new until it is accepted, because loading it may fail.
    assert_eq!(debouncer.observe(NEW_CONTENT, instant_at(700, start)), None);
    debouncer.accept(NEW_CONTENT);
    assert_eq!(
        debouncer.observe(NEW_CONTENT, instant_at(800, start)),
        Some(POLL_INTERVAL)
    );
}

#[tokio::test]
async fn each_write_restarts_the_settle_time() {
    let start = Instant::now();
    let mut debouncer = ChangeDebouncer::new(OLD_CONTENT);
    for (ms, half) in [(0, "b"), (60, "bb"), (120, "bbb")] {
        assert_eq!(
            debouncer.observe(half, instant_at(ms, start)),
            Some(SETTLE_TIME),
            "{half}"
        );
    }
    assert_eq!(debouncer.observe("bbb", instant_at(220, start)), None);
}

#[tokio::test]
async fn alternating_content_never_settles() {
    let start = Instant::now();
    let mut debouncer = ChangeDebouncer::new(OLD_CONTENT);
    for ms in [0, 100, 200, 300] {
        assert_eq!(
            debouncer.observe(NEW_CONTENT, instant_at(ms, start)),
            Some(SETTLE_TIME)
        );
        assert_eq!(
            debouncer.observe(OLD_CONTENT, instant_at(ms + 50, start)),
            Some(POLL_INTERVAL)
        );
    }
}

fn config_with_deny_policies(names: &[&str]) -> String {
    let policies = names
        .iter()
        .map(|name| format!("[[policy]]\nname = \"{name}\"\naction = \"deny\"\n"));
    format!(
        "include = [\"more/*.toml\"]\n[upstream]\nurl = \"http://127.0.0.1:1\"\n{}",
        policies.collect::<String>()
    )
}

struct ReloaderFixture {
    reloader: ConfigReloader,
    active_policies: ActivePolicies,
}

impl ReloaderFixture {
    fn load(file: &Path) -> Self {
        let sources = ConfigSources {
            file: FileSource::Path(file.to_owned()),
            ..ConfigSources::default()
        };
        let config = config::load(&sources).unwrap();
        let active_policies = ActivePolicies::new(
            &config.policy_table,
            Metrics::new(0, MetricLabels::default()),
            2,
        );
        Self {
            reloader: ConfigReloader::new(
                sources,
                &config,
                active_policies.clone(),
                Box::new(|_config| {}),
                Box::new(|_credentials| {}),
            ),
            active_policies,
        }
    }

    /// Polls the configuration files for `ms` milliseconds. Returns the names of the active
    /// policies, which are those of both workers.
    async fn policies_after_polling(&mut self, ms: u64) -> Vec<String> {
        let end = Instant::now() + Duration::from_millis(ms);
        while Instant::now() < end {
            let pause = self.reloader.check_files();
            tokio::time::sleep(pause.min(end.duration_since(Instant::now()))).await;
        }
        let [first, second] = [0, 1].map(|worker| {
            let snapshot = self.active_policies.for_worker(worker).load_snapshot();
            assert_eq!(snapshot.counters().len(), snapshot.table.policies().len());
            let policies = snapshot.table.policies().iter();
            policies.map(|policy| policy.name.to_string()).collect()
        });
        assert_eq!(first, second);
        first
    }

    fn generation_and_errors(&self) -> (u64, Vec<String>) {
        let status = self.status();
        (status.generation, status.last.errors)
    }

    fn status(&self) -> ReloadStatus {
        self.reloader.status().lock().clone()
    }
}

#[tokio::test(start_paused = true)]
async fn edits_in_place_renames_and_includes_take_effect_within_two_seconds() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.toml");
    fs::write(&file, config_with_deny_policies(&["a"])).unwrap();
    let mut running = ReloaderFixture::load(&file);
    assert_eq!(running.policies_after_polling(2000).await, ["a"]);

    fs::write(&file, config_with_deny_policies(&["a", "b"])).unwrap();
    assert_eq!(running.policies_after_polling(2000).await, ["a", "b"]);

    let new = folder.path().join("new");
    fs::write(&new, config_with_deny_policies(&["c"])).unwrap();
    fs::rename(&new, &file).unwrap();
    assert_eq!(running.policies_after_polling(2000).await, ["c"]);

    fs::create_dir(folder.path().join("more")).unwrap();
    fs::write(
        folder.path().join("more/x.toml"),
        "[[policy]]\nname = \"x\"\naction = \"deny\"\n",
    )
    .unwrap();
    assert_eq!(running.policies_after_polling(2000).await, ["c", "x"]);
    assert_eq!(running.generation_and_errors(), (4, Vec::new()));
}

#[tokio::test(start_paused = true)]
async fn every_config_map_swap_is_detected() {
    let folder = tempfile::tempdir().unwrap();
    let publish = |version: &str, names: &[&str]| {
        let data = folder.path().join(version);
        fs::create_dir(&data).unwrap();
        fs::write(data.join("config.toml"), config_with_deny_policies(names)).unwrap();
        symlink(version, folder.path().join("..data_tmp")).unwrap();
        fs::rename(
            folder.path().join("..data_tmp"),
            folder.path().join("..data"),
        )
        .unwrap();
    };
    publish("..1", &["a"]);
    let file = folder.path().join("config.toml");
    symlink("..data/config.toml", &file).unwrap();
    let mut running = ReloaderFixture::load(&file);
    for (version, name) in [("..2", "b"), ("..3", "c"), ("..4", "d")] {
        publish(version, &[name]);
        assert_eq!(running.policies_after_polling(2000).await, [name]);
    }
}

#[tokio::test(start_paused = true)]
async fn an_invalid_file_changes_nothing_and_is_reported_until_it_is_valid() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.toml");
    fs::write(&file, config_with_deny_policies(&["a"])).unwrap();
    let mut running = ReloaderFixture::load(&file);

    fs::write(&file, config_with_deny_policies(&["not a name"])).unwrap();
    assert_eq!(running.policies_after_polling(2000).await, ["a"]);
    let status = running.status();
    assert_eq!((status.generation, status.last.errors.len()), (1, 1));
    assert!(
        status.last.errors[0].contains("config.toml:5:8: policy[0].name: found \"not a name\""),
        "{status:?}"
    );

    fs::write(&file, "[[policy").unwrap();
    assert_eq!(running.policies_after_polling(2000).await, ["a"]);
    assert!(running.status().last.errors[0].contains("not TOML"));

    fs::remove_file(&file).unwrap();
    assert_eq!(running.policies_after_polling(2000).await, ["a"]);
    assert!(running.status().last.errors[0].contains("can't be read"));

    fs::write(&file, config_with_deny_policies(&["b"])).unwrap();
    assert_eq!(running.policies_after_polling(2000).await, ["b"]);
    assert_eq!(running.generation_and_errors(), (2, Vec::new()));
}

#[test]
fn a_check_request_triggers_an_immediate_check() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.toml");
    fs::write(&file, config_with_deny_policies(&["a"])).unwrap();
    let ReloaderFixture {
        reloader,
        active_policies,
    } = ReloaderFixture::load(&file);
    let (check_request, check_requests) = mpsc::sync_channel(1);
    let (checked, checks) = mpsc::sync_channel(100);
    let watch = move || reloader.watch_files(&check_requests, || _ = checked.try_send(()));
    let watch = thread::spawn(watch);
    checks.recv().unwrap();
    fs::write(&file, config_with_deny_policies(&["b"])).unwrap();
    let requested_at = Instant::now();
    check_request.send(()).unwrap();
    // The first check finds the new content, and the second one that it has settled.
    checks.recv().unwrap();
    checks.recv().unwrap();
    assert!(requested_at.elapsed() < POLL_INTERVAL, "not by polling");
    assert_eq!(
        &*active_policies.load_snapshot().table.policies()[0].name,
        "b"
    );
    drop(check_request);
    watch.join().unwrap();
}

#[test]
fn a_pipe_in_place_of_a_file_does_not_stop_reloading() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.toml");
    fs::write(&file, config_with_deny_policies(&["a"])).unwrap();
    let ReloaderFixture {
        reloader,
        active_policies,
        ..
    } = ReloaderFixture::load(&file);
    let status = reloader.status();
    fs::remove_file(&file).unwrap();
    let mkfifo = std::process::Command::new("mkfifo").arg(&file).status();
    assert!(mkfifo.unwrap().success());
    let (check_request, check_requests) = mpsc::sync_channel(1);
    let (checked, checks) = mpsc::sync_channel(100);
    let watch = move || reloader.watch_files(&check_requests, || _ = checked.try_send(()));
    let watch = thread::spawn(watch);
    let wait = |is_done: &dyn Fn() -> bool| {
        while !is_done() {
            checks.recv_timeout(Duration::from_secs(20)).unwrap();
        }
    };
    wait(&|| status.lock().last.refused == 1);
    assert!(status.lock().last.errors[0].contains("not a regular file"));
    fs::remove_file(&file).unwrap();
    fs::write(&file, config_with_deny_policies(&["b"])).unwrap();
    wait(&|| &*active_policies.load_snapshot().table.policies()[0].name == "b");
    drop(check_request);
    watch.join().unwrap();
}

/// A configuration with Redis and an admin token, whose credentials are recorded.
struct CredentialFixture {
    folder: tempfile::TempDir,
    running: ReloaderFixture,
    published: Arc<Mutex<Vec<Credentials>>>,
}

impl CredentialFixture {
    /// Starts with the port 1 of Redis, the password `p0` and the admin token `t0`.
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("password"), "p0").unwrap();
        fs::write(folder.path().join("token"), "t0").unwrap();
        write_redis_config(folder.path(), 1, "password");
        let mut running = ReloaderFixture::load(&folder.path().join("config.toml"));
        let published = Arc::<Mutex<Vec<Credentials>>>::default();
        let sink = Arc::clone(&published);
        running.reloader.publish_credentials =
            Box::new(move |credentials| sink.lock().push(credentials.clone()));
        Self {
            folder,
            running,
            published,
        }
    }

    fn write(&self, name: &str, content: &str) {
        fs::write(self.folder.path().join(name), content).unwrap();
    }

    fn write_config(&self, port: u16, password_file: &str) {
        write_redis_config(self.folder.path(), port, password_file);
    }

    /// Polls the files, and returns the last published port, password and token.
    async fn poll(&mut self) -> Option<(String, String, String)> {
        self.running.policies_after_polling(2000).await;
        let published = self.published.lock();
        let credentials = published.last()?;
        let redis = credentials.redis.as_ref().unwrap();
        let password = redis.credentials.password.as_ref().unwrap();
        let token = credentials.admin_token.as_ref().unwrap();
        Some((
            redis.servers[0].to_string(),
            password.expose().to_owned(),
            token.expose().to_owned(),
        ))
    }
}

fn write_redis_config(folder: &Path, port: u16, password_file: &str) {
    let config = format!(
        "upstream.url = \"http://127.0.0.1:1\"\nadmin.token_file = {:?}\n[store]\nkind = \"redis\"\n\
         [store.redis]\nurl = \"redis://127.0.0.1:{port}\"\npassword_file = {:?}\n",
        folder.join("token"),
        folder.join(password_file),
    );
    fs::write(folder.join("config.toml"), config).unwrap();
}

fn published(address: &str, password: &str, token: &str) -> Option<(String, String, String)> {
    Some((address.to_owned(), password.to_owned(), token.to_owned()))
}

#[tokio::test(start_paused = true)]
async fn an_admin_token_is_in_use_while_another_redis_server_waits_for_a_restart() {
    let mut fixture = CredentialFixture::start();
    fixture.write("other", "secret of another server");
    fixture.write_config(2, "other");
    assert_eq!(fixture.poll().await, None);
    fixture.write("token", "t1");
    let expected = published("127.0.0.1:1", "p0", "t1");
    assert_eq!(fixture.poll().await, expected);
    // The server in use has its own file.
    fixture.write("password", "p1");
    let expected = published("127.0.0.1:1", "p1", "t1");
    assert_eq!(fixture.poll().await, expected);
    fixture.write("config.toml", "not TOML");
    fixture.write("token", "t2");
    let expected = published("127.0.0.1:1", "p1", "t2");
    assert_eq!(fixture.poll().await, expected);
}

#[tokio::test(start_paused = true)]
async fn a_password_of_another_server_in_the_same_file_is_not_used() {
    let mut fixture = CredentialFixture::start();
    fixture.write("password", "secret of another server");
    fixture.write_config(2, "password");
    assert_eq!(fixture.poll().await, None);
    fixture.write("token", "t1");
    let expected = published("127.0.0.1:1", "p0", "t1");
    assert_eq!(fixture.poll().await, expected);
    fixture.write("config.toml", "not TOML");
    fixture.write("password", "newer secret of another server");
    assert_eq!(fixture.poll().await, expected);
    // The configuration names the server in use again.
    fixture.write("password", "p1");
    fixture.write_config(1, "password");
    let expected = published("127.0.0.1:1", "p1", "t1");
    assert_eq!(fixture.poll().await, expected);
}

#[test]
fn describes_added_removed_and_changed_policies() {
    let load = |text: &str| {
        let text = format!("[upstream]\nurl = \"http://a\"\n{text}");
        let sources = ConfigSources {
            file: FileSource::Text {
                name: "t".into(),
                text,
            },
            ..ConfigSources::default()
        };
        config::load(&sources).unwrap()
    };
    let old = load(&policies_toml(&[
        ("a", "deny"),
        ("b", "deny"),
        ("c", "deny"),
    ]));
    let new = load(&policies_toml(&[
        ("b", "deny"),
        ("c", "allow"),
        ("d", "deny"),
    ]));
    assert_eq!(
        describe_changes(old.policy_table.policies(), new.policy_table.policies()),
        "added d; removed a; changed c"
    );
    // Unordered maps must not cause a false difference.
    let keys: String = (0..50)
        .map(|n| {
            format!(
                "[[policy.override]]\nkey = [\"{n}\"]\nlimit = {{ requests = {n}, per = \"1s\" }}\n"
            )
        })
        .collect();
    let many = format!(
        "[[policy]]\nname = \"o\"\nkey = [\"host\"]\nlimit = {{ requests = 1, per = \"1s\" }}\n{keys}"
    );
    let same = describe_changes(
        load(&many).policy_table.policies(),
        load(&many).policy_table.policies(),
    );
    assert_eq!(same, "policies unchanged");
}

#[test]
fn a_changed_regex_or_hash_secret_changes_the_policies_that_use_it() {
    let folder = tempfile::tempdir().unwrap();
    let load = |secret: &str, regex: &str| {
        let file = folder.path().join("secret");
        std::fs::write(&file, secret).unwrap();
        let text = format!(
            "upstream.url = \"http://a\"\nclient.hash_secret_file = {file:?}\n\
             [[policy]]\nname = \"r\"\naction = \"deny\"\nmatch = {{ path_regex = \"{regex}\" }}\n\
             [[policy]]\nname = \"p\"\nkey = [\"client_ip\"]\nlimit = {{ requests = 1, per = \"1s\" }}\n\
             [[policy]]\nname = \"h\"\nkey = [\"header:x-api-key\"]\nlimit = {{ requests = 1, per = \"1s\" }}\n"
        );
        let file = FileSource::Text {
            name: "t".into(),
            text,
        };
        let sources = ConfigSources {
            file,
            ..ConfigSources::default()
        };
        config::load(&sources).unwrap()
    };
    let old = load("0123456789abcdef", "^/a");
    for (secret, regex, expected) in [
        ("0123456789abcdef", "^/a", "policies unchanged"),
        ("0123456789abcdef", "^/b", "changed r"),
        ("fedcba9876543210", "^/a", "changed h"),
    ] {
        let new = load(secret, regex);
        let changes = describe_changes(old.policy_table.policies(), new.policy_table.policies());
        assert_eq!(changes, expected);
    }
}

fn policies_toml(policies: &[(&str, &str)]) -> String {
    policies
        .iter()
        .map(|(name, action)| format!("[[policy]]\nname = \"{name}\"\naction = \"{action}\"\n"))
        .collect()
}
