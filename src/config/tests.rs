//! Tests of the fixtures, and of environment, flags and changing includes.

use super::*;
use crate::policy::{OnStoreFailure, PolicyAction};
use crate::store::MemorySettings;
use std::fmt::Write;
use std::fs;
use std::path::Path;
use std::time::Duration;

const FIXTURES_PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/config/");

fn make_text_sources(text: &str) -> ConfigSources {
    ConfigSources {
        file: FileSource::Text {
            name: "test.toml".into(),
            text: text.into(),
        },
        ..ConfigSources::default()
    }
}

fn with_env(mut sources: ConfigSources, env: &[(&str, &str)]) -> ConfigSources {
    sources.env = env
        .iter()
        .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
        .collect();
    sources
}

fn make_file_sources(path: &Path) -> ConfigSources {
    ConfigSources {
        file: FileSource::Path(path.to_owned()),
        ..ConfigSources::default()
    }
}

const UPSTREAM_LINE: &str = "upstream.url = \"http://127.0.0.1:3000\"\n";
const POLICY: &str =
    "[[policy]]\nname = 'a'\nkey = ['client_ip']\nlimit = { requests = 1, per = '1s' }\n";

/// Compares the diagnostics and descriptions of each file in a folder with its `.expected` file.
/// With `UPDATE_FIXTURES=1` the test rewrites the expected files: read the difference before you
/// commit it.
fn assert_fixtures(folder: &str, expect_ok: bool) {
    let mut mismatches = Vec::new();
    let mut count = 0;
    let mut entries: Vec<_> = fs::read_dir(format!("{FIXTURES_PATH}{folder}"))
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    entries.sort();
    for file in entries
        .iter()
        .filter(|file| file.extension().is_some_and(|ext| ext == "toml"))
    {
        count += 1;
        let loaded = load(&make_file_sources(file));
        assert_eq!(loaded.is_ok(), expect_ok, "{}: {loaded:?}", file.display());
        let output = match loaded {
            Ok(config) => {
                config
                    .policy_descriptions
                    .iter()
                    .map(|description| format!("{description}\n"))
                    .collect::<String>()
                    + &config
                        .warnings
                        .iter()
                        .map(ToString::to_string)
                        .collect::<String>()
            }
            Err(errors) => errors.to_string(),
        };
        let output = output.replace(&format!("{FIXTURES_PATH}{folder}/"), "");
        assert!(!output.contains("hunter2"), "{}: {output}", file.display());
        let expected_file = file.with_extension("expected");
        if std::env::var_os("UPDATE_FIXTURES").is_some() {
            fs::write(&expected_file, &output).unwrap();
        }
        let expected = fs::read_to_string(&expected_file).unwrap_or_default();
        if output != expected {
            mismatches.push(format!(
                "{}\n--- expected\n{expected}--- actual\n{output}",
                file.display()
            ));
        }
    }
    assert!(count > 3, "no fixtures in {folder}");
    assert!(mismatches.is_empty(), "{}", mismatches.join("\n"));
}

#[test]
fn invalid_configurations_report_errors_with_positions() {
    assert_fixtures("invalid", false);
}

#[test]
fn valid_configurations_are_described() {
    assert_fixtures("valid", true);
}

#[test]
fn doubtful_configurations_produce_warnings() {
    assert_fixtures("doubtful", true);
    for file in fs::read_dir(format!("{FIXTURES_PATH}doubtful"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
    {
        let is_config = file.extension().is_some_and(|ext| ext == "toml");
        assert!(
            !is_config || !load(&make_file_sources(&file)).unwrap().warnings.is_empty(),
            "{}",
            file.display()
        );
    }
}

#[test]
fn near_misses_produce_no_warnings() {
    for name in ["near_misses", "includes", "warm_up", "trusted_headers"] {
        let config = load(&make_file_sources(Path::new(&format!(
            "{FIXTURES_PATH}valid/{name}.toml"
        ))))
        .unwrap();
        assert!(config.warnings.is_empty(), "{name}: {:#?}", config.warnings);
    }
}

#[test]
fn defaults_match_the_documentation() {
    let config = load(&make_text_sources(UPSTREAM_LINE)).unwrap();
    assert_eq!(config.listen.address.to_string(), "[::]:8080");
    assert_eq!(config.listen.proxy_protocol_from, None);
    assert!(config.listen.threads >= 1);
    assert_eq!(config.listen.max_header_bytes, 65_536);
    assert_eq!(config.listen.max_body_bytes, None);
    assert_eq!(config.upstream.connect_timeout, Duration::from_secs(1));
    assert_eq!(config.upstream.body_idle_timeout, None);
    assert_eq!(config.upstream.max_requests_waiting, 1024);
    assert_eq!(
        config.store,
        StoreSettings::Memory(MemorySettings {
            max_keys: 1_000_000,
            max_bytes: 256 << 20
        })
    );
    assert_eq!(config.policy_table.client.ipv6_prefix, 64);
    assert!(
        config.policy_table.rate_limit_headers.standard
            && config.policy_table.rate_limit_headers.legacy
    );
    assert_eq!(config.shutdown.grace, Duration::from_secs(25));
    assert_eq!(config.warnings.len(), 1, "{:?}", config.warnings);
    assert!(
        config.warnings[0]
            .problem
            .contains("there is no [[policy]]")
    );
}

#[test]
fn the_example_names_every_key_with_its_default() {
    let example = Path::new(env!("CARGO_MANIFEST_DIR")).join("config.toml");
    let config = load(&make_file_sources(&example)).unwrap();
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
    assert!(config.policy_table.policies().len() >= 6);
    // Uncommenting every key must change nothing.
    let written = fs::read_to_string(&example).unwrap();
    let (settings, _) = written.split_once("\n[[policy]]").unwrap();
    // Keys without a default would read files and need an upstream with TLS. A Redis URL
    // contradicts the store in memory.
    let is_for_tls =
        |line: &str| line.contains("\"/etc/tidegate/") || line.contains("orders.internal");
    let is_key = |line: &&str| {
        line.starts_with('#')
            && !line.starts_with("# ")
            && line.contains(" = ")
            && !is_for_tls(line)
            && !line.starts_with("#url = \"redis:")
    };
    let mut all = String::new();
    for line in settings.lines() {
        let line = if is_key(&line) {
            line.trim_start_matches('#')
        } else {
            line
        };
        writeln!(all, "{line}").unwrap();
    }
    let filled = load(&make_text_sources(&all)).unwrap();
    let fresh = load(&make_text_sources(UPSTREAM_LINE)).unwrap();
    for leaf in schema::leaf_keys() {
        let here = schema_value::content_or_default(&filled.raw, &leaf);
        let default = schema_value::content_or_default(&fresh.raw, &leaf);
        let (path, name) = (&leaf.path, leaf.key.name);
        assert!(
            default.is_none() || here == default,
            "{path} is not its default"
        );
        assert!(
            settings.contains(&format!("{name} = ")),
            "{path} is not in the example"
        );
    }
}

#[test]
fn the_environment_overrides_the_file_and_flags_override_both() {
    let mut sources = with_env(
        make_text_sources(
            "[upstream]\nurl = \"http://file:1\"\nretry_connect = 2\nconnect_timeout = \"7s\"\n",
        ),
        &[
            ("TIDEGATE_UPSTREAM__URL", "http://env:2"),
            ("TIDEGATE_UPSTREAM__RETRY_CONNECT", "5"),
            ("TIDEGATE_UPSTREAM__PRESERVE_HOST", "false"),
            ("TIDEGATE_LISTEN__ADDRESS", "127.0.0.1:1"),
            ("TIDEGATE_CLIENT__TRUSTED_PROXIES", "10.0.0.0/8, ::1"),
            ("TIDEGATE_LOG__ACCESS_SAMPLE", "0.5"),
            ("TIDEGATE_STORE__KIND", "redis"),
            ("TIDEGATE_STORE__REDIS__URL", "redis://:pw@redis:6380/2"),
            // A string that looks like a number stays a string.
            ("TIDEGATE_STORE__REDIS__KEY_PREFIX", "1234"),
        ],
    );
    let config = load(&sources).unwrap();
    assert_eq!(config.upstream.url.to_string(), "http://env:2");
    assert_eq!(
        (config.upstream.retry_connect, config.upstream.preserve_host),
        (5, false)
    );
    assert_eq!(config.upstream.connect_timeout, Duration::from_secs(7));
    assert_eq!(config.listen.address.to_string(), "127.0.0.1:1");
    assert_eq!(config.policy_table.client.trusted_proxies.len(), 2);
    assert!((config.log.access_sample - 0.5).abs() < 1e-9);
    let StoreSettings::Redis(redis) = &config.store else {
        panic!("{:?}", config.store)
    };
    assert_eq!((redis.database, redis.key_prefix.as_str()), (2, "1234"));
    assert!(redis.servers[0].to_string().ends_with(":6380"));
    assert!(!format!("{config:?}").contains("pw@"));

    sources.flags = FlagOverrides {
        upstream: Some("http://flag:3".into()),
        listen: Some("[::1]:4".into()),
        needs_no_upstream: false,
    };
    let config = load(&sources).unwrap();
    assert_eq!(config.upstream.url.to_string(), "http://flag:3");
    assert!(config.listen.address.to_string().ends_with(":4"));

    // The TLS settings are those of the upstream that the flag replaces.
    sources.file = FileSource::Text {
        name: "t".into(),
        text: "upstream = { url = 'https://app', tls = { server_name = 'app' } }".into(),
    };
    sources.env.clear();
    assert!(load(&sources).unwrap().upstream.tls.is_none());
}

#[test]
fn ignores_kubernetes_service_variables() {
    let noise = [
        ("TIDEGATE_PORT", "tcp://10.0.0.1:8080"),
        ("TIDEGATE_SERVICE_HOST", "10.0.0.1"),
        ("TIDEGATE_PORT_8080_TCP_ADDR", "10.0.0.1"),
        ("OTHER__KEY", "1"),
        ("PATH", "/bin"),
    ];
    load(&with_env(make_text_sources(UPSTREAM_LINE), &noise)).unwrap();
}

fn load_errors(sources: &ConfigSources) -> String {
    load(sources).unwrap_err().to_string()
}

#[test]
fn environment_errors_name_the_variable() {
    let errors = load_errors(&with_env(
        make_text_sources("[upstream]\nurl = 5\n"),
        &[
            ("TIDEGATE_LISTEN__ADRESS", "x"),
            ("TIDEGATE_LISTEN__THREADS", "many"),
            ("TIDEGATE_LISTEN__HTTP", "x"),
            ("TIDEGATE_POLICY__0__NAME", "x"),
            ("TIDEGATE_STORE__REDIS__PASSWORD", "hunter2"),
            ("TIDEGATE_STORE__REDIS__URL", "redis://:hunter2@h:x"),
            ("TIDEGATE_LOG__LEVEL", "\u{1b}[31m"),
        ],
    ));
    for expected in [
        "error: test.toml:2:7: upstream.url: found 5; expected \"http",
        "error: TIDEGATE_LISTEN__ADRESS: listen.adress: unknown key; did you mean TIDEGATE_LISTEN__ADDRESS?",
        "error: TIDEGATE_LISTEN__THREADS: listen.threads: found \"many\"; expected a whole number from 0 to 1024",
        "error: TIDEGATE_LISTEN__HTTP: listen.http: is a table",
        "error: TIDEGATE_POLICY__0__NAME: policy.0.name: policies can't be set from the environment",
        "error: TIDEGATE_STORE__REDIS__PASSWORD: store.redis.password: unknown key",
        "error: TIDEGATE_STORE__REDIS__URL: store.redis.url: expected a port",
        "8 errors",
    ] {
        assert!(errors.contains(expected), "{expected}\nis not in\n{errors}");
    }
    assert!(
        !errors.contains("hunter2") && !errors.contains('\u{1b}'),
        "{errors}"
    );
    let mut sources = make_text_sources("");
    sources.flags.upstream = Some("app".into());
    assert!(
        load_errors(&sources)
            .starts_with("error: --upstream: upstream.url: found \"app\"; expected")
    );
}

#[test]
fn a_missing_file_is_an_error_but_a_file_is_optional() {
    let errors = load_errors(&make_file_sources(Path::new("/nonexistent/config.toml")));
    assert!(
        errors.starts_with("error: /nonexistent/config.toml: can't be read: "),
        "{errors}"
    );
    let mut sources = ConfigSources::default();
    assert!(
        load_errors(&sources)
            .starts_with("error: no configuration file: upstream.url: missing; expected")
    );
    sources.flags.upstream = Some("http://app".into());
    load(&sources).unwrap();
}

#[test]
fn a_password_comes_from_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("password");
    fs::write(&file, "hunter2\n").unwrap();
    let settings = format!(
        "{UPSTREAM_LINE}[store]\nkind = \"redis\"\n[store.redis]\nkey_prefix = \"x\"\npassword_file = {:?}\n",
        file.display().to_string()
    );
    let config = load(&make_text_sources(&settings)).unwrap();
    let StoreSettings::Redis(redis) = &config.store else {
        panic!("{:?}", config.store)
    };
    assert_eq!(
        redis.credentials.password.as_ref().unwrap().expose(),
        "hunter2"
    );
    assert!(!format!("{config:?}").contains("hunter2"));
    assert!(config.files.expand_paths().contains(&file));

    let twice = settings.replace("key_prefix", "url = \"redis://:hunter3@host\"\nkey_prefix");
    assert!(load_errors(&make_text_sources(&twice)).contains("holds a password too"));
    fs::write(&file, " \n").unwrap();
    assert!(load_errors(&make_text_sources(&settings)).contains("the file is empty"));
}

#[test]
fn a_user_name_comes_from_its_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("username");
    fs::write(&file, "ann\n").unwrap();
    let settings = format!(
        "{UPSTREAM_LINE}[store]\nkind = \"redis\"\n[store.redis]\nusername_file = {:?}\n",
        file.display().to_string()
    );
    let config = load(&make_text_sources(&settings)).unwrap();
    let redis = config.credentials().redis.unwrap();
    assert_eq!(redis.credentials.username.as_deref(), Some("ann"));
    let twice = format!("{settings}username = \"bob\"\n");
    assert!(load_errors(&make_text_sources(&twice)).contains("username is set too"));
}

#[test]
fn the_state_directory_exists_and_is_writable() {
    let directory = tempfile::tempdir().unwrap();
    let settings = |kind: &str, path: &Path| {
        make_text_sources(&format!(
            "{UPSTREAM_LINE}\nstore = {{ kind = \"{kind}\", state_dir = \"{}\", redis = {{ key_prefix = \"shop\" }} }}\n{POLICY}",
            path.display()
        ))
    };
    let config = load(&settings("redis", directory.path())).unwrap();
    assert!(config.warnings.is_empty(), "{:?}", config.warnings);
    let StoreSettings::Redis(redis) = &config.store else {
        panic!("{:?}", config.store);
    };
    assert_eq!(redis.state_dir.as_deref(), Some(directory.path()));
    assert_eq!(
        fs::read_dir(directory.path()).unwrap().count(),
        0,
        "the check leaves no file"
    );
    let absent = directory.path().join("absent");
    let errors = load_errors(&settings("redis", &absent));
    assert!(
        errors.contains("expected an existing directory"),
        "{errors}"
    );
    // Even root cannot create files here. A full disk must not stop a start or a reload.
    let config = load(&settings("redis", Path::new("/proc"))).unwrap();
    let warning = config.warnings[0].to_log_line();
    assert!(
        warning.contains("expected a writable directory"),
        "{warning}"
    );
    let warnings = load(&settings("memory", &absent)).unwrap().warnings;
    assert!(
        warnings[0]
            .to_log_line()
            .contains("the memory store does not use it")
    );
}

#[test]
fn collector_headers_are_read_from_a_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("headers");
    let settings = format!(
        "{UPSTREAM_LINE}[trace]\notlp = \"http://c\"\nheaders_file = {:?}\n",
        file.display().to_string()
    );
    let sources_with_headers = |lines: &str| {
        fs::write(&file, lines).unwrap();
        make_text_sources(&settings)
    };
    let running = load(&sources_with_headers(
        "# a remark\n\nX-Api-Key: hunter2:3 \nx-team: a\n",
    ))
    .unwrap();
    let headers = &running.trace.as_ref().unwrap().collector.headers;
    assert_eq!(
        (&headers["x-api-key"], &headers["x-team"], headers.len()),
        (&"hunter2:3".parse().unwrap(), &"a".parse().unwrap(), 2)
    );
    assert!(
        !format!(
            "{running:?}{}",
            running.effective_json(&running.restart_only_settings())
        )
        .contains("hunter")
    );
    let newer = load(&sources_with_headers("x-api-key: hunter4")).unwrap();
    assert_eq!(
        running.restart_only_settings().changed_keys(&newer),
        ["trace (contents of a file)"]
    );
    for (lines, problem) in [
        ("x-team: a\nhunter2\n", "line 2: expected name: value"),
        ("x-api-key: hun\u{1}ter2", "line 1: expected name: value"),
        ("x-api-key:", "line 1: expected name: value"),
        (
            "Content-Type: hunter2",
            "line 1: content-type is set by tidegate",
        ),
        ("", "the file is empty"),
    ] {
        let errors = load_errors(&sources_with_headers(lines));
        assert!(
            errors.contains(problem) && !errors.contains("hunter"),
            "{errors}"
        );
    }
    let plain = make_text_sources(&format!(
        "{UPSTREAM_LINE}[trace]\notlp = \"http://c\"\ntls.server_name = \"c\"\n"
    ));
    assert!(
        load_errors(&plain).contains("expected https:// in trace.otlp"),
        "{}",
        load_errors(&plain)
    );
}

#[test]
fn included_policies_come_after_the_main_file_by_file_name() {
    let folder = tempfile::tempdir().unwrap();
    let policy = |name: &str| format!("[[policy]]\nname = \"{name}\"\naction = \"deny\"\n");
    // A folder name with glob characters is taken literally.
    let base = folder.path().join("[x]");
    for (file, name) in [
        ("z/1.toml", "third"),
        ("a/2.toml", "fourth"),
        ("a/0.toml", "second"),
        ("a/.hidden.toml", "never"),
    ] {
        let file = base.join(file);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, policy(name)).unwrap();
    }
    let main = base.join("config.toml");
    fs::write(
        &main,
        format!(
            "include = [\"z/1.toml\", \"a/*.toml\", \"a/0.toml\", \"none/*.toml\"]\n{UPSTREAM_LINE}{}",
            policy("first")
        ),
    )
    .unwrap();
    let config = load(&make_file_sources(&main)).unwrap();
    let names: Vec<&str> = config
        .policy_table
        .policies()
        .iter()
        .map(|policy| &*policy.name)
        .collect();
    assert_eq!(names, ["first", "second", "third", "fourth"]);
    assert_eq!(config.files.expand_paths().len(), 4);
    // A file that is added later belongs to the set.
    fs::write(base.join("a/9.toml"), policy("fifth")).unwrap();
    assert_eq!(config.files.expand_paths().len(), 5);
}

#[test]
fn policies_inherit_defaults_and_override_them() {
    let config = load(&make_text_sources(&format!(
        "{UPSTREAM_LINE}[defaults]\non_store_failure = \"closed\"\nalgorithm = \"fixed_window\"\n\
         [[policy]]\nname = \"a\"\nlimit = {{ requests = 1, per = \"1s\" }}\n\
         [[policy]]\nname = \"b\"\non_store_failure = \"open\"\nlimits = [{{ requests = 1, per = \"1s\", algorithm = \"sliding_log\" }}, {{ requests = 1, per = \"2s\", name = \"x\" }}, {{ requests = 1, per = \"3s\" }}]\n"
    )))
    .unwrap();
    let [a, b] = config.policy_table.policies() else {
        panic!()
    };
    assert_eq!(
        (a.on_store_failure, b.on_store_failure),
        (OnStoreFailure::Closed, OnStoreFailure::Open)
    );
    let (PolicyAction::Limit(a), PolicyAction::Limit(b)) = (&a.action, &b.action) else {
        panic!()
    };
    assert_eq!(
        a.limits[0].limit.algorithm,
        crate::limiter::Algorithm::FixedWindow { offset_us: 0 }
    );
    assert_eq!(
        b.limits[0].limit.algorithm,
        crate::limiter::Algorithm::SlidingLog
    );
    let names: Vec<&str> = b.limits.iter().map(|limit| &*limit.name).collect();
    assert_eq!(names, ["b", "x", "b-2"]);
}

#[test]
fn settings_that_need_a_restart_are_named() {
    let running = load(&make_text_sources(UPSTREAM_LINE))
        .unwrap()
        .restart_only_settings();
    let changed = |settings: &str| {
        running
            .changed_keys(&load(&make_text_sources(&format!("{UPSTREAM_LINE}{settings}"))).unwrap())
    };
    assert_eq!(
        changed("[client]\nipv6_prefix = 56\n[path]\nnormalize = false\n"),
        [""; 0]
    );
    assert_eq!(changed("[listen]\naddress = \"[::]:8080\"\n"), [""; 0]);
    assert_eq!(
        changed("[listen]\naddress = \"0.0.0.0:81\"\n[log]\nlevel = \"warn\"\n"),
        ["listen.address", "log.level"]
    );
}

#[test]
fn a_new_password_needs_no_restart_and_is_never_printed() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("password");
    let settings = format!(
        "{UPSTREAM_LINE}[store]\nkind = \"redis\"\nredis.password_file = {:?}\n",
        file.display().to_string()
    );
    fs::write(&file, "hunter2").unwrap();
    let running = load(&make_text_sources(&settings)).unwrap();
    fs::write(&file, "hunter3").unwrap();
    let newer = load(&make_text_sources(&settings)).unwrap();
    assert_eq!(
        running.restart_only_settings().changed_keys(&newer),
        [""; 0]
    );
    let source = running.credential_source();
    assert!(source.files.files.contains(&file));
    let credentials = Credentials {
        redis: source.load_redis().unwrap(),
        admin_token: source.load_admin_token().unwrap(),
    };
    assert_eq!(credentials, newer.credentials());
    assert!(credentials != running.credentials());
    assert!(running.credentials().is_for_same_servers(&credentials));
    let elsewhere = settings.replace("redis.pass", "redis.url = \"redis://other\"\nredis.pass");
    let elsewhere = load(&make_text_sources(&elsewhere)).unwrap().credentials();
    assert!(!running.credentials().is_for_same_servers(&elsewhere));
    let sources = with_env(
        make_text_sources("x = \"hunter2\""),
        &[("TIDEGATE_STORE__REDIS__URL", "redis://:hunter2@h")],
    );
    assert!(
        !format!("{running:?}{newer:?}{sources:?}{source:?}{credentials:?}").contains("hunter")
    );
}

#[test]
fn deep_nesting_is_rejected() {
    let deep = 5_000;
    for nested in [
        format!("x = {}{}\n", "[".repeat(deep), "]".repeat(deep)),
        format!("x = {}1{}\n", "{a=".repeat(deep), "}".repeat(deep)),
        format!("x{} = 1\n", ".a".repeat(deep)),
        format!("[x{}]\n", ".a".repeat(deep)),
    ] {
        assert!(load(&make_text_sources(&format!("{UPSTREAM_LINE}{nested}"))).is_err());
    }
}

/// An index finds the policies to compare, so that thousands of others do not use up the
/// comparisons.
#[test]
fn lints_compare_each_of_thousands_of_policies() {
    let mut text = UPSTREAM_LINE.to_owned();
    let mut add = |name: &str, conditions: &str, rest: &str| {
        text += &format!("[[policy]]\nname = '{name}'\nmatch = {{ {conditions} }}\n{rest}\n");
    };
    let limit = "limit = { name = 'x', requests = 9, per = '1s' }";
    for n in 0..1_500 {
        let skip = format!("key = ['header:x-user-id']\nmissing_key = 'skip'\n{limit}");
        let address = format!("key = ['client_ip']\n{limit}");
        add(
            &format!("path{n}"),
            &format!("path = '/a{n}/{{id}}/*'"),
            &skip,
        );
        add(
            &format!("host{n}"),
            &format!("hosts = ['*.h{n}.com']"),
            &address,
        );
        add(
            &format!("net{n}"),
            &format!("client_ips = ['10.{}.{}.0/24']", n / 250, n % 250),
            "action = 'deny'",
        );
    }
    for (name, conditions, rest) in [
        ("unreachable", "client_ips = ['10.5.9.7']", limit),
        (
            "same-name",
            "hosts = ['a.b.h700.com'], methods = ['POST']",
            limit,
        ),
        (
            "caught",
            "path = '/a900/**'",
            "key = ['client_ip']\nlimit = { requests = 9, per = '1s' }",
        ),
        (
            "raised",
            "path = '/r', headers = { x-plan = 'gold' }",
            "limit = { requests = 99, per = '1s' }",
        ),
        (
            "lower",
            "path = ['/r', '/q'], headers = { x-plan = 'free' }",
            "limit = { requests = 1, per = '1s' }",
        ),
    ] {
        add(name, conditions, rest);
    }
    let config = load(&make_text_sources(&text)).unwrap();
    let with = |part: &str| {
        let warnings = config.warnings.iter();
        warnings.filter(|one| one.problem.contains(part)).count()
    };
    assert_eq!(
        with("never reached: \"net1259\""),
        1,
        "a network covers the address"
    );
    assert_eq!(with("has the name \"x\" in the rate-limit fields too"), 1);
    assert_eq!(
        with("requests without header x-user-id are not limited"),
        1_499
    );
    assert_eq!(with("gets a higher limit than without it"), 1);
}

/// What was not compared is said, and only then.
#[test]
fn lints_say_that_too_many_policies_were_left_to_compare() {
    let warns = |count: usize, matches: &dyn Fn(usize) -> String| {
        let policies = (0..count).map(|n| {
            let conditions = matches(n);
            format!("[[policy]]\nname = 'p{n}'\nmatch = {{ {conditions} }}\naction = 'deny'\n")
        });
        let text = UPSTREAM_LINE.to_owned() + &policies.collect::<String>();
        let config = load(&make_text_sources(&text)).unwrap();
        let mut warnings = config.warnings.iter();
        warnings.any(|one| {
            one.problem
                .contains("too many policies may match the same requests")
        })
    };
    let without = |n: usize| format!("path = '/x/**', not = {{ headers = {{ x-t = 'v{n}' }} }}");
    assert!(warns(1_500, &without) && !warns(100, &without));
    assert!(!warns(1_500, &|n| format!(
        "path = '/x/**', headers = {{ x-t = 'v{n}' }}"
    )));
}

/// A text that no request has in the form in which policies read it never matches.
#[test]
fn conditions_in_a_spelling_that_no_request_has_are_reported() {
    let warnings = |path: &str, conditions: &str| {
        let policy = "[[policy]]\nname = 'p'\naction = 'deny'\nmatch = ";
        let text = format!("{UPSTREAM_LINE}[path]\n{path}\n{policy}{{ {conditions} }}\n");
        let config = load(&make_text_sources(&text)).unwrap();
        let warnings = config.warnings.iter().map(|one| one.problem.clone());
        warnings.collect::<Vec<_>>().join("\n")
    };
    for conditions in [
        "query = { q = 'a%20b' }",
        "query = { q = ['a', 'a%2Fb'] }",
        "cookies = { sid = { regex = '^a%3Ab$' } }",
        "not = { cookies = { sid = 'a%3ab' } }",
        "any = [{ query = { q = { regex = '%2f' } } }]",
    ] {
        let found = warnings("", conditions);
        assert!(
            found.contains("are compared decoded"),
            "{conditions}: {found}"
        );
    }
    for (conditions, is_reported) in [
        ("headers = { x-plan = { regex = '^ free' } }", true),
        ("headers = { x-plan = { regex = 'free $' } }", true),
        ("headers = { x-plan = { regex = '^ free|gold' } }", false),
        ("headers = { x-plan = { regex = '^ *free' } }", false),
        ("headers = { x-plan = { regex = '(?x) free $' } }", false),
        (
            "headers = { authorization = { regex = '^Bearer  *abc' } }",
            false,
        ),
        (
            "headers = { authorization = { regex = '^Bearer  abc' } }",
            true,
        ),
        ("not = { headers = { x-plan = { regex = '^ ' } } }", true),
        ("headers = { x-plan = { regex = 'very  free' } }", false),
        (
            "headers = { authorization = { regex = '^Bearer abc$' } }",
            false,
        ),
        ("headers = { x-plan = ' free' }", false),
    ] {
        let found = warnings("", conditions);
        let expected = "headers are compared without spaces at their start and end";
        assert_eq!(
            found.contains(expected),
            is_reported,
            "{conditions}: {found}"
        );
    }
    for conditions in [
        "path_regex = '^/café$'",
        "path_regex = '^/a%2fb$'",
        "not = { path_regex = '^/%61dmin' }",
    ] {
        let found = warnings("", conditions);
        assert!(found.contains("no path contains"), "{conditions}: {found}");
        assert_eq!(
            warnings("normalize = false", conditions),
            "",
            "{conditions}"
        );
    }
    for conditions in [
        "query = { q = '100%' }",
        "headers = { x-a = 'a%20b' }",
        "path_regex = '^/caf%C3%A9.x$'",
    ] {
        assert_eq!(warnings("", conditions), "", "{conditions}");
    }
    assert_eq!(
        warnings("case_sensitive = false", "path_regex = '^/Caf%c3.x$'"),
        ""
    );
}
