//! Measures `tidegate replay` on a large log with known results: correctness of the counts, time
//! per line, and memory use.
//!
//! Run `cargo bench --bench replay`, or with fewer lines `-- 500000`. The log is written to a
//! temporary directory.

#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    unreachable_pub,
    reason = "a benchmark talks on stdout and stops at any error"
)]

#[path = "../tests/it/support/generated_log.rs"]
mod generated_log;

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::time::Instant;
use tidegate::config::{self, ConfigSources, FileSource, FlagOverrides};
use tidegate::replay::{Settings, replay_logs};

fn main() {
    let requests = std::env::args()
        .find_map(|arg| arg.parse().ok())
        .unwrap_or(5_000_000);
    let dir = tempfile::TempDir::new().unwrap();
    let path = dir.path().join("access.log");
    let mut out = BufWriter::new(File::create(&path).unwrap());
    let answers = generated_log::generate_log(&mut out, requests, 7).unwrap();
    out.flush().unwrap();
    let size = fs::metadata(&path).unwrap().len();
    println!("{} lines, {} MiB", answers.lines, size >> 20);

    let file = FileSource::Text {
        name: "policies".into(),
        text: generated_log::POLICIES.into(),
    };
    let flags = FlagOverrides {
        needs_no_upstream: true,
        ..FlagOverrides::default()
    };
    let config = config::load(&ConfigSources {
        file,
        env: Vec::new(),
        flags,
        skips_key_files: false,
    })
    .unwrap();
    for (name, suggest) in [("replay", None), ("replay --suggest", Some(1.0))] {
        let settings = Settings {
            logs: vec![path.clone()],
            format: None,
            field_mappings: Vec::new(),
            spread_within_second: true,
            suggest_percent: suggest,
            top_keys: 10,
        };
        // The peak from here on includes the memory of the model, which is printed separately.
        fs::write("/proc/self/clear_refs", "5").unwrap();
        let (held, cpu_ms, wall) = (memory_kib("VmRSS"), cpu_ms(), Instant::now());
        let report = replay_logs(
            &settings,
            &[("policies".to_owned(), &*config.policy_table)],
            |_, _| {},
        )
        .unwrap();
        let cpu_ms = self::cpu_ms() - cpu_ms;
        let peak = memory_kib("VmHWM") - held;
        let json: serde_json::Value = serde_json::from_str(&report.render_json()).unwrap();
        check_report(&answers, &json);
        println!(
            "{name:<17} {:>9} lines per second of CPU, {:>5} ns each, {:.1} s of wall time, {} MiB at most, counts exact",
            answers.lines * 1000 / cpu_ms,
            cpu_ms * 1_000_000 / answers.lines,
            wall.elapsed().as_secs_f64(),
            peak >> 10,
        );
    }
}

fn check_report(answers: &generated_log::ExpectedReport, report: &serde_json::Value) {
    let set = &report["sets"][0];
    assert_eq!(report["lines"], answers.lines);
    assert_eq!(report["requests"], answers.requests);
    assert_eq!(report["logs"][0]["broken"], answers.malformed);
    assert_eq!(set["forwarded"], answers.forwarded);
    assert_eq!(set["limited"], answers.limited);
    for policy in set["policies"].as_array().unwrap() {
        let wanted = &answers.policies[policy["name"].as_str().unwrap()];
        let refused =
            policy["rejected"].as_u64().unwrap() + policy["shadow_rejected"].as_u64().unwrap();
        assert_eq!(refused, wanted.refused, "{policy}");
        assert_eq!(policy["keys"].as_u64().unwrap(), wanted.keys.len() as u64);
        assert_eq!(
            policy["keys_touched"].as_u64().unwrap(),
            wanted.limited_keys()
        );
    }
}

/// Returns the CPU time that this process has used, user and system.
fn cpu_ms() -> u64 {
    let stat = fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat
        .rsplit_once(')')
        .unwrap()
        .1
        .split_whitespace()
        .collect();
    // utime and stime, in hundredths of a second on Linux.
    (fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()) * 10
}

/// In KiB.
fn memory_kib(what: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(what)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse().unwrap()
}
