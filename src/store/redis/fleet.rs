//! How many instances share the limits, and when all of them know of an outage's end.
//!
//! Every process is in a sorted set per prefix while it lives, and in a second one that tells places. A background task of one of its workers keeps it
//! there, counts the others, and writes back what was admitted while Redis was away (see [`crate::store::Local`]).
//! It also says whether something is left to write back: who is heard of after an outage without that has told all.
//!
//! Of a cluster only some slots may be away. Then what can be told is, the process stays in the count, and the outage
//! ends for all slots that were in it together.

use super::cluster::slot_of_name;
use super::failure::Failure;
use super::{Redis, Way};
use crate::store::local::ALL;
use crate::store::{Late, Share};
use redis::{Cmd, Value};
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::LazyLock;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// How often an instance makes itself known.
const BEAT: Duration = Duration::from_secs(1);

/// The same while an outage ends, and the least time between two rounds.
const QUICK: Duration = Duration::from_millis(100);

/// After so much silence an instance is counted no more.
const KEPT: Duration = Duration::from_secs(5);

/// How long those are waited for who were there before: after an outage, or a loss of data, all are silent.
const PATIENCE: Duration = Duration::from_secs(3);

/// What an ending process has left to write back in.
const LAST_WORDS: Duration = Duration::from_secs(1);

const SCRIPT: &str = include_str!("fleet.lua");

/// This process among all others.
static ID: LazyLock<String> = LazyLock::new(|| {
    let [high, low] = [0, 1].map(|half| RandomState::new().hash_one(half));
    format!("{high:016x}{low:016x}")
});

/// The name of this process among all others: 32 hexadecimal digits, new with every start.
pub fn instance() -> &'static str {
    &ID
}

/// What an instance does with the set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Does {
    Beat,
    /// It lives, but has not told all.
    Owe,
    Look,
}

/// What the set says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    now_us: u64,
    live: u32,
    place: u32,
    heard: u32,
}

/// What is believed of the fleet.
#[derive(Debug)]
struct Count {
    share: Share,
    /// Since when fewer have been seen.
    fewer_since: Option<Instant>,
    /// Redis answers, but does not count.
    is_refused: bool,
    /// What Redis' clock showed (µs), at the latest when we heard of it.
    clock: Option<(u64, Instant)>,
}

/// Where an outage's end is.
#[derive(Clone, Copy, Debug)]
struct Recovery {
    /// When Redis answered again: by our clock, and by its own if it said that.
    began: Instant,
    began_us: Option<u64>,
}

/// Speaks for the process for as long as it is polled.
pub(super) async fn attend(redis: Redis) {
    // That no connection is there yet is no outage.
    redis.first_ready().await;
    let local = redis.local();
    let mut count = Count {
        share: local.share(),
        fewer_since: None,
        is_refused: false,
        clock: None,
    };
    let mut recovery = None;
    loop {
        recovery = round(&redis, &mut count, recovery)
            .await
            .unwrap_or_default();
        sleep(jittered(QUICK)).await;
        if recovery.is_none() && !local.is_away() && !local.owes() {
            tokio::select! {
                () = sleep(jittered(BEAT).saturating_sub(QUICK)) => {}
                () = local.changed() => {}
            }
        }
    }
}

/// Writes back, makes the process known, and ends an outage that is over. Returns where that is, if it isn't yet.
async fn round(
    redis: &Redis,
    count: &mut Count,
    recovery: Option<Recovery>,
) -> Result<Option<Recovery>, Failure> {
    let local = redis.local();
    let has_failed = local.has_failed();
    // Other workers may still be without a connection.
    let is_up = redis.context.health.is_up();
    let recovery = recovery.filter(|_| !has_failed && is_up);
    local.fail(redis.parts_away());
    local.fail(redis.parts_silent().await);
    if !redis.is_reachable() {
        return Ok(None);
    }
    match write_back(redis).await {
        // The rest of a cluster may well be there.
        Err(_) if redis.is_cluster() => {}
        told => told?,
    }
    let since_us = recovery.and_then(|recovery| recovery.began_us);
    // A worker that has no connection yet goes on by the share, and will have something to tell.
    let has_told = !local.owes() && redis.context.health.is_up();
    let does = if has_told { Does::Beat } else { Does::Owe };
    let within = redis.context.settings.connect_timeout;
    let seen = match ask(
        redis,
        does,
        since_us,
        count.time_us(Instant::now() + within),
    )
    .await
    {
        Ok(seen) => {
            let now = Instant::now();
            local.set_share(count.hear(seen, now));
            (count.is_refused, count.clock) = (false, Some((seen.now_us, now)));
            Some(seen)
        }
        Err(failure) if is_silent(failure) => {
            if !redis.is_cluster() {
                local.fail([ALL]);
            }
            return Err(failure);
        }
        // It answers, but not this: nobody can be waited for.
        Err(failure) => {
            if !std::mem::replace(&mut count.is_refused, true) {
                tracing::warn!(
                    kind = failure.word(),
                    "Redis does not let the instances be counted"
                );
            }
            None
        }
    };
    if !local.is_away() || !is_up || local.owes() {
        return Ok(None);
    }
    let began = || Recovery {
        began: Instant::now(),
        began_us: seen.map(|seen| seen.now_us),
    };
    let recovery = recovery.unwrap_or_else(began);
    let all_heard = seen.is_some_and(|seen| seen.heard >= count.share.live());
    if all_heard || recovery.began.elapsed() >= PATIENCE {
        local.end();
        return Ok(None);
    }
    Ok(Some(recovery))
}

/// Takes the process out of the set, once nothing is left to write back.
pub(super) async fn leave(redis: &Redis) {
    let written = timeout(LAST_WORDS, write_back(redis)).await;
    if let Err(failure) = written.unwrap_or_else(|late| Err(late.into())) {
        tracing::warn!(
            kind = failure.word(),
            "what was admitted without Redis was not written back"
        );
    }
    for key in redis.context.script.instances_keys() {
        let mut command = redis::cmd("ZREM");
        command.arg(key).arg(&*ID);
        drop(run(redis, &command).await);
    }
}

/// Tells Redis all that was admitted without it. What fails is told again: perhaps twice, never not at all.
async fn write_back(redis: &Redis) -> Result<(), Failure> {
    let local = redis.local();
    if !local.owes() {
        return Ok(());
    }
    // What a server that hangs is told it hears when it goes on, every time. (A node of a cluster is given up after some.)
    if !redis.is_cluster()
        && let Err(failure) = ask(redis, Does::Look, None, None).await
        && is_silent(failure)
    {
        return Err(failure);
    }
    while local.owes() {
        let owed = local.owed(redis.parts_away());
        if owed.is_empty() {
            return Err(Failure::Connection);
        }
        let amendments = local.amendments(&owed);
        let late: Vec<_> = amendments
            .iter()
            .map(|(limit, key, amendment)| Late {
                limit,
                key,
                amendment: *amendment,
            })
            .collect();
        if let Err(untold) = redis.amend(&late).await {
            local.unpaid(
                owed,
                untold.places.iter().filter_map(|place| late.get(*place)),
            );
            return Err(Failure::Timeout);
        }
        local.paid();
    }
    Ok(())
}

/// `until_us`: when Redis' clock shows this, nobody waits for the answer any more.
async fn ask(
    redis: &Redis,
    does: Does,
    since_us: Option<u64>,
    until_us: Option<u64>,
) -> Result<Seen, Failure> {
    let mut command = redis::cmd("EVAL");
    let keys = redis.context.script.instances_keys();
    command.arg(SCRIPT).arg(keys.len()).arg(&keys).arg(&*ID);
    command.arg(match does {
        Does::Beat => "beat",
        Does::Owe => "owe",
        Does::Look => "look",
    });
    command.arg(u64::try_from(KEPT.as_micros()).unwrap_or(u64::MAX));
    for time_us in [since_us, until_us] {
        command.arg(time_us.map_or_else(String::new, |time_us| time_us.to_string()));
    }
    Seen::of(&run(redis, &command).await?).ok_or(Failure::Reply)
}

async fn run(redis: &Redis, command: &Cmd) -> Result<Value, Failure> {
    let link = match &redis.way {
        Way::One(link, _) => link,
        Way::Cluster(cluster) => {
            let [instances, _] = redis.context.script.instances_keys();
            let slot = slot_of_name(&instances);
            return cluster
                .call(
                    slot,
                    command,
                    Instant::now() + redis.context.settings.connect_timeout,
                )
                .await;
        }
    };
    let state = link.state();
    let super::State::Up(live) = &*state else {
        return Err(Failure::Connection);
    };
    let within = redis.context.settings.connect_timeout;
    let reply = timeout(within, live.run(command))
        .await
        .unwrap_or_else(|late| Err(late.into()));
    if let Err(failure) = reply {
        redis.context.health.count(failure);
        // Whom Redis does not let count it may well let decide.
        if is_silent(failure) {
            live.failed(failure);
        }
    }
    reply
}

/// Whether nobody answered.
fn is_silent(failure: Failure) -> bool {
    matches!(failure, Failure::Timeout | Failure::Connection)
}

/// So that instances that were started together don't ask together.
fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.75 + fastrand::f64() / 2.0)
}

impl Count {
    /// What Redis' clock will show at a time, if it goes on as it did; rather too early.
    fn time_us(&self, at: Instant) -> Option<u64> {
        let (now_us, heard) = self.clock?;
        let since_us = u64::try_from(at.saturating_duration_since(heard).as_micros()).ok()?;
        now_us.checked_add(since_us)
    }

    /// Hears what was seen at `now`. More are believed at once; fewer when it has been said for a while.
    fn hear(&mut self, seen: Seen, now: Instant) -> Share {
        let is_fewer = seen.live < self.share.live();
        if is_fewer && now.duration_since(*self.fewer_since.get_or_insert(now)) < PATIENCE {
            return self.share;
        }
        self.fewer_since = None;
        self.share = Share::seen(seen.live, seen.place);
        self.share
    }
}

impl Seen {
    /// Reads a reply; `None`: it isn't one.
    fn of(reply: &Value) -> Option<Self> {
        let Value::Array(numbers) = reply else {
            return None;
        };
        let [
            Value::Int(now_us),
            Value::Int(live),
            Value::Int(place),
            Value::Int(heard),
        ] = numbers.as_slice()
        else {
            return None;
        };
        let small = |number: &i64| u32::try_from(*number).ok();
        Some(Self {
            now_us: u64::try_from(*now_us).ok()?,
            live: small(live)?,
            place: small(place)?,
            heard: small(heard)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(live: u32, place: u32) -> Seen {
        Seen {
            now_us: 1,
            live,
            place,
            heard: 1,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn more_are_believed_at_once_and_fewer_when_it_lasts() {
        let mut count = Count {
            share: Share::assumed(3),
            fewer_since: None,
            is_refused: false,
            clock: None,
        };
        let start = Instant::now();
        assert_eq!(
            count.hear(seen(1, 0), start),
            Share::assumed(3),
            "others may not have come yet"
        );
        assert_eq!(count.hear(seen(4, 2), start + BEAT), Share::seen(4, 2));
        assert_eq!(count.hear(seen(2, 1), start + 2 * BEAT), Share::seen(4, 2));
        assert_eq!(
            count.hear(seen(4, 3), start + 3 * BEAT),
            Share::seen(4, 3),
            "only late"
        );
        for beat in 4..7 {
            assert_eq!(
                count.hear(seen(2, 1), start + beat * BEAT),
                Share::seen(4, 3)
            );
        }
        assert_eq!(count.hear(seen(2, 1), start + 7 * BEAT), Share::seen(2, 1));
    }
}
