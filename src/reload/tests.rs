use super::*;
use crate::config::FileSource;
use crate::telemetry::metrics::{Kinds, Metrics};
use std::os::unix::fs::symlink;
use std::path::Path;

const A: &str = "a";
const B: &str = "b";

fn at(ms: u64, start: Instant) -> Instant {
    start + Duration::from_millis(ms)
}

#[tokio::test]
async fn content_counts_once_it_has_stayed() {
    let start = Instant::now();
    let mut settling = Settling::new(A);
    assert_eq!(settling.see(A, at(0, start)), Step::Known);
    assert_eq!(settling.see(B, at(500, start)), Step::Settling(SETTLED));
    assert_eq!(
        settling.see(B, at(530, start)),
        Step::Settling(Duration::from_millis(70))
    );
    assert_eq!(settling.see(B, at(600, start)), Step::New);
    // Until it is known, it is still new: loading it may have been in vain.
    assert_eq!(settling.see(B, at(700, start)), Step::New);
    settling.know(B);
    assert_eq!(settling.see(B, at(800, start)), Step::Known);
}

#[tokio::test]
async fn what_is_being_written_has_to_stay_anew() {
    let start = Instant::now();
    let mut settling = Settling::new(A);
    for (ms, half) in [(0, "b"), (60, "bb"), (120, "bbb")] {
        assert_eq!(
            settling.see(half, at(ms, start)),
            Step::Settling(SETTLED),
            "{half}"
        );
    }
    assert_eq!(settling.see("bbb", at(220, start)), Step::New);
}

#[tokio::test]
async fn content_that_goes_back_and_forth_never_counts() {
    let start = Instant::now();
    let mut settling = Settling::new(A);
    for ms in [0, 100, 200, 300] {
        assert_eq!(settling.see(B, at(ms, start)), Step::Settling(SETTLED));
        assert_eq!(settling.see(A, at(ms + 50, start)), Step::Known);
    }
}

fn policies(names: &[&str]) -> String {
    let policies = names
        .iter()
        .map(|name| format!("[[policy]]\nname = \"{name}\"\naction = \"deny\"\n"));
    format!(
        "include = [\"more/*.toml\"]\n[upstream]\nurl = \"http://127.0.0.1:1\"\n{}",
        policies.collect::<String>()
    )
}

struct Running {
    reloader: Reloader,
    live: Live,
}

impl Running {
    fn start(file: &Path) -> Self {
        let sources = Sources {
            file: FileSource::Path(file.to_owned()),
            ..Sources::default()
        };
        let config = config::load(&sources).unwrap();
        let live = Live::new(Arc::clone(&config.table), Metrics::new(0, Kinds::default()));
        Self {
            reloader: Reloader::new(sources, &config, live.clone(), Box::new(|_config| {})),
            live,
        }
    }

    /// Lets the reloader look until this much time has passed.
    async fn after(&mut self, ms: u64) -> Vec<String> {
        let end = Instant::now() + Duration::from_millis(ms);
        while Instant::now() < end {
            let pause = self.reloader.look();
            tokio::time::sleep(pause.min(end.duration_since(Instant::now()))).await;
        }
        self.live
            .rules()
            .table
            .policies()
            .iter()
            .map(|policy| policy.name.to_string())
            .collect()
    }

    fn told(&self) -> (u64, Vec<String>) {
        let status = self.status();
        (status.generation, status.last_error)
    }

    fn status(&self) -> Status {
        self.reloader.status().lock().clone()
    }
}

#[tokio::test(start_paused = true)]
async fn edits_in_place_renames_and_includes_take_effect_within_two_seconds() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.toml");
    fs::write(&file, policies(&["a"])).unwrap();
    let mut running = Running::start(&file);
    assert_eq!(running.after(2000).await, ["a"]);

    fs::write(&file, policies(&["a", "b"])).unwrap();
    assert_eq!(running.after(2000).await, ["a", "b"]);

    let new = folder.path().join("new");
    fs::write(&new, policies(&["c"])).unwrap();
    fs::rename(&new, &file).unwrap();
    assert_eq!(running.after(2000).await, ["c"]);

    fs::create_dir(folder.path().join("more")).unwrap();
    fs::write(
        folder.path().join("more/x.toml"),
        "[[policy]]\nname = \"x\"\naction = \"deny\"\n",
    )
    .unwrap();
    assert_eq!(running.after(2000).await, ["c", "x"]);
    assert_eq!(running.told(), (4, Vec::new()));
}

#[tokio::test(start_paused = true)]
async fn a_config_map_swap_is_seen_every_time() {
    let folder = tempfile::tempdir().unwrap();
    let publish = |version: &str, names: &[&str]| {
        let data = folder.path().join(version);
        fs::create_dir(&data).unwrap();
        fs::write(data.join("config.toml"), policies(names)).unwrap();
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
    let mut running = Running::start(&file);
    for (version, name) in [("..2", "b"), ("..3", "c"), ("..4", "d")] {
        publish(version, &[name]);
        assert_eq!(running.after(2000).await, [name]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_bad_file_changes_nothing_and_is_reported_until_it_is_good_again() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.toml");
    fs::write(&file, policies(&["a"])).unwrap();
    let mut running = Running::start(&file);

    fs::write(&file, policies(&["not a name"])).unwrap();
    assert_eq!(running.after(2000).await, ["a"]);
    let status = running.status();
    assert_eq!((status.generation, status.last_error.len()), (1, 1));
    assert!(
        status.last_error[0].contains("config.toml:5:8: policy[0].name: found \"not a name\""),
        "{status:?}"
    );

    fs::write(&file, "[[policy").unwrap();
    assert_eq!(running.after(2000).await, ["a"]);
    assert!(running.status().last_error[0].contains("not TOML"));

    fs::remove_file(&file).unwrap();
    assert_eq!(running.after(2000).await, ["a"]);
    assert!(running.status().last_error[0].contains("can't be read"));

    fs::write(&file, policies(&["b"])).unwrap();
    assert_eq!(running.after(2000).await, ["b"]);
    assert_eq!(running.told(), (2, Vec::new()));
}

#[tokio::test(start_paused = true)]
async fn a_signal_makes_it_look_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.toml");
    fs::write(&file, policies(&["a"])).unwrap();
    let Running { reloader, live } = Running::start(&file);
    let asked = Arc::new(tokio::sync::Notify::new());
    let watch = tokio::spawn({
        let asked = Arc::clone(&asked);
        reloader.watch(async move || asked.notified().await)
    });
    tokio::task::yield_now().await;
    fs::write(&file, policies(&["b"])).unwrap();
    asked.notify_one();
    tokio::time::sleep(SETTLED + Duration::from_millis(5)).await;
    assert_eq!(&*live.rules().table.policies()[0].name, "b");
    watch.abort();
}

#[tokio::test]
async fn a_slow_disk_holds_nobody_else_up() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.toml");
    fs::write(&file, policies(&["a"])).unwrap();
    let Running { reloader, .. } = Running::start(&file);
    fs::remove_file(&file).unwrap();
    assert!(
        std::process::Command::new("mkfifo")
            .arg(&file)
            .status()
            .unwrap()
            .success()
    );
    let (tell, told) = tokio::sync::oneshot::channel();
    let (answer, answered) = std::sync::mpsc::sync_channel(1);
    let disk = std::thread::spawn(move || {
        // Opens once somebody opens it for reading, who then waits until it is dropped.
        let pipe = fs::OpenOptions::new().write(true).open(&file).unwrap();
        tell.send(()).unwrap();
        let on_time = answered.recv_timeout(Duration::from_secs(5)).is_ok();
        drop(pipe);
        on_time
    });
    let watch = tokio::spawn(reloader.watch(std::future::pending));
    told.await.unwrap();
    answer.send(()).unwrap();
    assert!(
        disk.join().unwrap(),
        "the runtime stood still while a file was read"
    );
    watch.abort();
}

#[test]
fn changes_are_named() {
    let load = |text: &str| {
        let text = format!("[upstream]\nurl = \"http://a\"\n{text}");
        let sources = Sources {
            file: FileSource::Text {
                name: "t".into(),
                text,
            },
            ..Sources::default()
        };
        config::load(&sources).unwrap()
    };
    let old = load(&policies_only(&[
        ("a", "deny"),
        ("b", "deny"),
        ("c", "deny"),
    ]));
    let new = load(&policies_only(&[
        ("b", "deny"),
        ("c", "allow"),
        ("d", "deny"),
    ]));
    assert_eq!(
        changes(old.table.policies(), new.table.policies()),
        "added d; removed a; changed c"
    );
    // Maps without an order must not make a difference where there is none.
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
    let same = changes(load(&many).table.policies(), load(&many).table.policies());
    assert_eq!(same, "the policies are the same");
}

fn policies_only(policies: &[(&str, &str)]) -> String {
    policies
        .iter()
        .map(|(name, action)| format!("[[policy]]\nname = \"{name}\"\naction = \"{action}\"\n"))
        .collect()
}
