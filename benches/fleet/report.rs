//! The report, as Markdown.

use crate::World;
use crate::books::{Fullest, Share, Windows};
use crate::masters::MASTERS;
use crate::policies::{PER, POLICIES, Policy, Without};
use crate::story::Played;
use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

/// In an outage shares are what there is: of those policies that go on by themselves at least so much, in percent.
const USED_IN_OUTAGE: u64 = 30;

/// Who stood still for more of the time, in percent, has seen too little.
const STILL_AT_MOST: u32 = 5;

/// Judges what was seen, and says so. Whether all is well.
pub(crate) fn write(seed: u32, world: &World, played: &[Played]) -> bool {
    let World { books, keys, .. } = world;
    books.judge_requests(keys);
    let windows = books.judge_windows(keys);
    let build = if cfg!(debug_assertions) {
        "debug"
    } else {
        "release"
    };
    let redis = Command::new("redis-server")
        .arg("--version")
        .output()
        .unwrap();
    let redis = String::from_utf8(redis.stdout).unwrap();
    let redis = redis
        .split(' ')
        .find_map(|word| word.strip_prefix("v="))
        .unwrap_or("?")
        .to_owned();
    println!(
        "Seed {seed}: tidegate {} ({build} build), Redis {redis}, {MASTERS} masters, {} cores, {:.0} s.\n",
        env!("CARGO_PKG_VERSION"),
        std::thread::available_parallelism().map_or(0, usize::from),
        played.last().map_or(0.0, |last| books.at(last.ended)),
    );
    let names: Vec<_> = POLICIES
        .iter()
        .map(|policy| format!("`{}`", policy.name))
        .collect();
    println!(
        "| from, s | | nodes after it | requests | failed | decided without Redis | until all ask Redis again, s | {} |",
        names.join(" | ")
    );
    println!("|{}", "---|".repeat(7 + POLICIES.len()));
    let mut all = Share::default();
    for one in played {
        let share = books.share(keys, one.began, one.ended);
        println!(
            "| {:.0} | {} | {} | {} | {} | {} | {} | {} |",
            books.at(one.began),
            one.chapter.title(),
            one.nodes,
            share.requests,
            share.failed,
            one.degraded,
            one.recovery
                .map(|time| format!("{:.1}", time.as_secs_f64()))
                .unwrap_or_default(),
            POLICIES
                .iter()
                .map(|policy| used(world, one, policy, &share))
                .collect::<Vec<_>>()
                .join(" | "),
        );
        all.requests += share.requests;
        all.failed += share.failed;
    }
    println!(
        "\nUnder the policies' names: admitted, in percent of what could be: what was asked for, or what the limit (the lower one, where it changes) lets pass. Answers took {}.\n",
        ["half of them", "99 %", "99.9 %", "all"]
            .iter()
            .zip(books.took(&[500, 990, 999, 1000]))
            .map(|(what, took)| format!("at most {:.1} ms ({what})", took.as_secs_f64() * 1000.0))
            .collect::<Vec<_>>()
            .join(", "),
    );
    println!(
        "| policy | | windows of {} s judged | fullest | fullest where a fault explains more |",
        PER.as_secs()
    );
    println!("|---|---|---|---|---|");
    for policy in &POLICIES {
        let Windows {
            count,
            plain,
            in_fault,
            unbounded,
        } = windows.get(policy.name).copied().unwrap_or_default();
        let open = if unbounded == 0 {
            String::new()
        } else {
            format!("; {unbounded} without a bound")
        };
        println!(
            "| `{}` | {} | {count} | {plain} | {in_fault}{open} |",
            policy.name,
            meaning(policy)
        );
    }
    println!("\nWhat faults explain:\n");
    books
        .explained()
        .iter()
        .for_each(|(what, times)| println!("- {times} × {what}"));
    let (from, to) = (
        books.start,
        played.last().map_or(books.start, |last| last.ended),
    );
    let still = books.still(from, to);
    if still > Duration::ZERO {
        println!(
            "- {:.1} s in which this machine was too busy for anything",
            still.as_secs_f64()
        );
    }
    if still * 100 > (to - from) * STILL_AT_MOST {
        books.complain(format!(
            "this machine stood still for {still:?}: it was too busy to tell"
        ));
    }
    let complaints = books.complaints();
    println!(
        "\n{} requests, {} of them failed, ",
        all.requests, all.failed
    );
    if complaints.is_empty() {
        println!("and nothing that no fault explains.");
    } else {
        println!("and what nothing explains:\n");
        complaints
            .iter()
            .for_each(|(what, times)| println!("- {times} × {what}"));
    }
    complaints.is_empty()
}

/// How much of what was possible a policy admitted; too little is a complaint.
fn used(world: &World, played: &Played, policy: &Policy, share: &Share) -> String {
    let books = &world.books;
    let of = |counts: &BTreeMap<&str, u64>| counts.get(policy.name).copied().unwrap_or(0) as f64;
    let possible = books.possible(policy, MASTERS as u64, played.began, played.ended);
    let percent = 100.0 * of(&share.admitted) / possible.min(of(&share.asked)).max(1.0);
    let is_still = !books.still(played.began, played.ended).is_zero();
    let least = match (played.chapter.is_outage() || is_still, policy.without) {
        (false, _) => policy.used,
        (true, Without::Closed) => 0,
        (true, Without::Open | Without::Local) => USED_IN_OUTAGE,
    };
    if percent < least as f64 {
        let (title, name) = (played.chapter.title(), policy.name);
        books.complain(format!(
            "{title}: {name} admitted {percent:.0} % of what it could, not {least} %"
        ));
    }
    format!("{percent:.0}")
}

fn meaning(policy: &Policy) -> String {
    let without = format!("{:?}", policy.without).to_lowercase();
    let lease = if policy.lease.is_empty() {
        ""
    } else {
        ", leased"
    };
    format!(
        "{} in {} s by `{}`{lease}, {without}",
        policy.requests,
        PER.as_secs(),
        policy.counts
    )
}

impl std::fmt::Display for Fullest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.allowed {
            0 => f.write_str("none"),
            allowed => write!(f, "{} of {allowed}", self.admitted),
        }
    }
}
