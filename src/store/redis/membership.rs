//! Counts the instances that share the limits, and detects when all of them have recovered from an
//! outage.
//!
//! Every live process is in a sorted set per prefix, and in a second one that gives its rank. A
//! background task of one worker keeps the process there, counts the members, and writes back usage
//! that was admitted without Redis (see [`FallbackStore`](crate::store::FallbackStore)). A
//! heartbeat says whether the instance has usage left to write back. An instance has recovered when
//! it has sent a heartbeat without the pending flag after an outage.
//!
//! In a cluster, only some slots may be unreachable. Usage of the other slots is written back and
//! the process stays counted. The outage ends together for all slots that it affected.

use super::connection::RedisNode;
use super::error::{RedisErrorKind, within};
use super::shared_state::{SharedRedisState, new_fallback};
use super::{RedisDialer, RedisStore};
use crate::clock::saturating_micros;
use crate::store::fallback::usage_directory::{UsageDirectory, UsageFile};
use crate::store::{FallbackStore, Settlement, Share};
use crate::telemetry::LogThrottle;
use redis::{Cmd, Value, from_redis_value};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};

/// Interval of heartbeats.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

/// Interval of heartbeats while an outage ends, and the shortest pause between two.
const RECOVERY_HEARTBEAT_INTERVAL: Duration = Duration::from_millis(100);

/// An instance that has sent no heartbeat for this long is not counted.
pub(super) const MEMBER_TTL: Duration = Duration::from_secs(5);

/// How long to wait for instances that are missing in the count. Right after an outage or a loss of
/// data, no instance has sent a heartbeat yet.
const MEMBERSHIP_GRACE_PERIOD: Duration = Duration::from_secs(3);

/// Interval of log lines while Redis rejects the membership script.
const REJECTION_LOG_INTERVAL: Duration = Duration::from_secs(3600);

/// Time for a write-back when the process stops.
const SHUTDOWN_WRITE_BACK_TIMEOUT: Duration = Duration::from_secs(1);

const MEMBERSHIP_SCRIPT: &str = include_str!("membership.lua");

/// The reply of `membership.lua`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MembershipReply {
    now_us: u64,
    live_instances: u32,
    rank: u32,
    recovered_instances: u32,
}

/// What the membership task has learned from the replies of Redis.
#[derive(Debug)]
struct MembershipTracker {
    /// Time since which every reply had a lower instance count. A failure resets it: the grace
    /// period needs consecutive replies, because after an outage the count has only the instances
    /// that have reconnected.
    decrease_since: Option<Instant>,
    /// The time (µs) that Redis' clock showed in the last reply, and when that reply arrived.
    redis_clock: Option<(u64, Instant)>,
    rejection_log: LogThrottle,
    /// A file of a stopped process that is being written back. The file is kept after a failed
    /// write, so that only its unsent usage is sent again.
    leftover_usage: Option<(UsageFile, FallbackStore)>,
}

/// When Redis answered again after an outage that has not ended yet.
#[derive(Clone, Copy, Debug)]
struct OutageRecovery {
    /// Time of the first answer on the local clock. `started_us` is its time on Redis' clock, if
    /// known.
    started_at: Instant,
    started_us: Option<u64>,
}

/// Maintains the membership of the process for as long as it is polled.
pub(super) async fn run_membership(redis: RedisStore) {
    // Before the first connection there is no outage.
    redis.wait_until_ready().await;
    let fallback = redis.fallback();
    let mut tracker = MembershipTracker::new();
    let mut recovery = None;
    loop {
        let round = run_heartbeat_round(&redis, &mut tracker, recovery).await;
        recovery = round.unwrap_or_else(|_| {
            tracker.decrease_since = None;
            None
        });
        sleep(add_jitter(RECOVERY_HEARTBEAT_INTERVAL)).await;
        if recovery.is_none() && !fallback.is_in_outage() && !fallback.has_pending_write_back() {
            tokio::select! {
                biased;
                () = sleep(add_jitter(HEARTBEAT_INTERVAL).saturating_sub(RECOVERY_HEARTBEAT_INTERVAL)) => {}
                () = fallback.wait_for_change() => {}
            }
        }
    }
}

/// Writes back usage, sends a heartbeat, and ends an outage that is over. Returns the recovery of
/// an outage that is not over.
async fn run_heartbeat_round(
    redis: &RedisStore,
    tracker: &mut MembershipTracker,
    recovery: Option<OutageRecovery>,
) -> Result<Option<OutageRecovery>, RedisErrorKind> {
    let fallback = redis.fallback();
    let has_failed = fallback.take_new_failure_flag();
    // In a cluster, failures of other servers say nothing about the count.
    if has_failed && fallback.is_stale(redis.membership_partition()) {
        tracker.decrease_since = None;
    }
    // Other workers may still have no connection.
    let is_up = redis.breaker.is_up();
    let recovery = recovery.filter(|_| !has_failed && is_up);
    fallback.mark_partitions_unreachable(redis.unreachable_partitions(&[]));
    let silent = redis.find_silent_nodes().await;
    let unreachable = redis.unreachable_partitions(&silent);
    fallback.mark_partitions_unreachable(unreachable.iter().copied());
    if !redis.is_reachable() {
        return Ok(None);
    }
    // A failure concerns only some nodes of a cluster; the heartbeat reports what is left to write.
    write_back_with_files(redis, tracker, &silent).await.ok();
    if unreachable.contains(&redis.membership_partition()) {
        return Err(RedisErrorKind::Timeout);
    }
    let since_us = recovery.and_then(|recovery| recovery.started_us);
    // A worker without a connection still decides by its share, and will have usage to write back.
    let is_written_back = !fallback.has_pending_write_back() && redis.breaker.is_up();
    let operation = if is_written_back {
        "heartbeat"
    } else {
        "pending"
    };
    let call_timeout = redis.settings.connect_timeout;
    let reply = match run_membership_script(
        redis,
        operation,
        since_us,
        tracker.predict_redis_time_us(Instant::now() + call_timeout),
    )
    .await
    {
        Ok(reply) => {
            let now = Instant::now();
            let is_near_outage = fallback.is_near_outage();
            fallback.set_share(tracker.next_share(fallback.share(), reply, now, is_near_outage));
            tracker.redis_clock = Some((reply.now_us, now));
            Some(reply)
        }
        // Redis did not answer at all.
        Err(failure @ (RedisErrorKind::Timeout | RedisErrorKind::Connection)) => {
            fallback.mark_partitions_unreachable([redis.membership_partition()]);
            return Err(failure);
        }
        // Redis rejects the script, so missing instances can't be waited for.
        Err(failure) => {
            tracker.record_rejection(failure);
            None
        }
    };
    if !fallback.is_in_outage() || !is_up || fallback.has_pending_write_back() {
        return Ok(None);
    }
    let start_recovery = || OutageRecovery {
        started_at: Instant::now(),
        started_us: reply.map(|reply| reply.now_us),
    };
    let recovery = recovery.unwrap_or_else(start_recovery);
    let all_recovered =
        reply.is_some_and(|reply| reply.recovered_instances >= fallback.share().instance_count());
    if all_recovered || recovery.started_at.elapsed() >= MEMBERSHIP_GRACE_PERIOD {
        fallback.end_outage();
        return Ok(None);
    }
    Ok(Some(recovery))
}

/// Writes back usage and removes the process from the membership sets.
pub(super) async fn write_back_and_remove_member(redis: &RedisStore) {
    let last_write_back = async {
        let silent = redis.find_silent_nodes().await;
        write_back(redis, redis.fallback(), &silent).await
    };
    if let Err(failure) = within(SHUTDOWN_WRITE_BACK_TIMEOUT, last_write_back).await {
        tracing::warn!(
            kind = failure.into_str(),
            "failed to write back usage admitted without redis"
        );
    }
    for key in redis.scripts.membership_keys() {
        let mut command = redis::cmd("ZREM");
        command.arg(key).arg(redis.member_entry());
        drop(run_command(redis, &command).await);
    }
}

/// Writes back the usage of this process. At the end of an outage it also writes back the files
/// that stopped processes left in `store.state_dir`, and removes all files whose usage is in Redis.
async fn write_back_with_files(
    redis: &RedisStore,
    tracker: &mut MembershipTracker,
    silent: &[Arc<RedisNode>],
) -> Result<(), RedisErrorKind> {
    write_back(redis, redis.fallback(), silent).await?;
    if redis.usage_directory.is_none() || !redis.fallback().is_in_outage() {
        return Ok(());
    }
    let shared = Arc::clone(&redis.shared);
    run_blocking(redis, move || {
        let directory = shared.usage_directory.as_ref();
        directory.map(UsageDirectory::remove_restored_file)
    })
    .await;
    loop {
        let leftover_usage = match tracker.leftover_usage.take() {
            None => {
                let shared = Arc::clone(&redis.shared);
                let claimed = run_blocking(redis, move || claim_leftover_usage(&shared)).await;
                claimed.flatten()
            }
            leftover_usage => leftover_usage,
        };
        let Some((file, stopped_process)) = leftover_usage else {
            return Ok(());
        };
        if let Err(failure) = write_back(redis, &stopped_process, silent).await {
            tracker.leftover_usage = Some((file, stopped_process));
            return Err(failure);
        }
        run_blocking(redis, move || file.remove()).await;
    }
}

/// Locks and reads the newest file that a stopped process left, if there is one.
fn claim_leftover_usage(shared: &SharedRedisState) -> Option<(UsageFile, FallbackStore)> {
    let directory = shared.usage_directory.as_ref()?;
    let (file, usage, downtime_us) = directory.lock_and_read_newest_file()?;
    let stopped_process = new_fallback(&shared.settings, shared.clock.clone());
    stopped_process.restore_usage(usage, downtime_us);
    Some((file, stopped_process))
}

/// Runs file access on a blocking thread: this thread serves requests, and a file may be large. A
/// simulation runs it on its own thread: it could not repeat a run whose order a second thread
/// determines.
async fn run_blocking<T: Send + 'static>(
    redis: &RedisStore,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    match redis.settings.dialer {
        RedisDialer::Simulated(_) => Some(work()),
        RedisDialer::Network => spawn_blocking(work).await.ok(),
    }
}

/// Writes all usage that was admitted without Redis, except to `silent` nodes. A failed write is
/// repeated: usage may count twice, but is never lost.
async fn write_back(
    redis: &RedisStore,
    fallback: &FallbackStore,
    silent: &[Arc<RedisNode>],
) -> Result<(), RedisErrorKind> {
    while fallback.has_pending_write_back() {
        let batch = fallback
            .take_write_back_batch(redis.unreachable_partitions(silent))
            .ok_or(RedisErrorKind::Connection)?;
        let settlements: Vec<_> = batch.iter().map(Settlement::from_pending).collect();
        if let Err(error) = redis.apply_settlements(&settlements).await {
            fallback.requeue_unconfirmed(&error.unconfirmed);
            return Err(RedisErrorKind::Timeout);
        }
        fallback.confirm_write_back_batch();
    }
    Ok(())
}

/// Runs the membership script. `deadline_us`: the time on Redis' clock at which this caller stops
/// waiting.
async fn run_membership_script(
    redis: &RedisStore,
    operation: &str,
    since_us: Option<u64>,
    deadline_us: Option<u64>,
) -> Result<MembershipReply, RedisErrorKind> {
    let mut command = redis::cmd("EVAL");
    let keys = redis.scripts.membership_keys();
    command
        .arg(MEMBERSHIP_SCRIPT)
        .arg(keys.len())
        .arg(&keys)
        .arg(redis.member_entry())
        .arg(operation)
        .arg(saturating_micros(MEMBER_TTL));
    for time_us in [since_us, deadline_us] {
        command.arg(time_us.map_or_else(String::new, |time_us| time_us.to_string()));
    }
    let reply = run_command(redis, &command).await?;
    parse_membership_reply(reply).ok_or(RedisErrorKind::InvalidReply)
}

fn parse_membership_reply(reply: Value) -> Option<MembershipReply> {
    let [now_us, live_instances, rank, recovered_instances]: [i64; 4] =
        from_redis_value(reply).ok()?;
    Some(MembershipReply {
        now_us: now_us.try_into().ok()?,
        live_instances: live_instances.try_into().ok()?,
        rank: rank.try_into().ok()?,
        recovered_instances: recovered_instances.try_into().ok()?,
    })
}

async fn run_command(redis: &RedisStore, command: &Cmd) -> Result<Value, RedisErrorKind> {
    let deadline = Instant::now() + redis.settings.connect_timeout;
    let hash_slot = redis.membership_partition();
    redis.run_on_hash_slot(hash_slot, command, deadline).await
}

/// Adds jitter to a pause, so that instances started together don't send together.
fn add_jitter(pause: Duration) -> Duration {
    pause.mul_f64(0.75 + fastrand::f64() / 2.0)
}

impl MembershipTracker {
    fn new() -> Self {
        Self {
            decrease_since: None,
            redis_clock: None,
            rejection_log: LogThrottle::new(REJECTION_LOG_INTERVAL),
            leftover_usage: None,
        }
    }

    /// Estimates Redis' clock at a time, rather too early.
    fn predict_redis_time_us(&self, at: Instant) -> Option<u64> {
        let (now_us, read_at) = self.redis_clock?;
        now_us.checked_add(saturating_micros(at.saturating_duration_since(read_at)))
    }

    fn record_rejection(&mut self, failure: RedisErrorKind) {
        self.decrease_since = None;
        let now = crate::clock::monotonic_now();
        if self.rejection_log.record_occurrence(now).is_some() {
            tracing::warn!(
                kind = failure.into_str(),
                "redis rejected the membership script; using the last known instance count"
            );
        }
    }

    /// The share after a reply. A higher count takes effect at once, a lower one after the grace
    /// period. During an outage and shortly after it ([`FallbackStore::is_near_outage`]), a known
    /// rank decreases only together with the count. A lower rank can add a unit, and the instance
    /// that had this unit uses it until a heartbeat reports its new rank.
    fn next_share(
        &mut self,
        share: Share,
        reply: MembershipReply,
        now: Instant,
        is_near_outage: bool,
    ) -> Share {
        let is_decrease = reply.live_instances < share.instance_count();
        if is_decrease
            && now.duration_since(*self.decrease_since.get_or_insert(now)) < MEMBERSHIP_GRACE_PERIOD
        {
            return share;
        }
        self.decrease_since = None;
        let newest = Share::with_rank(reply.live_instances, reply.rank);
        if is_near_outage && !is_decrease {
            newest.with_higher_rank(share)
        } else {
            newest
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn membership_reply(live_instances: u32, rank: u32) -> MembershipReply {
        MembershipReply {
            now_us: 1,
            live_instances,
            rank,
            recovered_instances: 1,
        }
    }

    #[tokio::test(start_paused = true)]
    async fn more_instances_take_effect_at_once_and_fewer_after_the_grace_period() {
        let mut tracker = MembershipTracker::new();
        let mut share = Share::with_unknown_rank(3);
        let start = Instant::now();
        let mut reply_at = |beat: u32, instances: u32, rank: u32| {
            let reply = membership_reply(instances, rank);
            share = tracker.next_share(share, reply, start + beat * HEARTBEAT_INTERVAL, false);
            share
        };
        assert_eq!(
            reply_at(0, 1, 0),
            Share::with_unknown_rank(3),
            "other instances may not have sent a heartbeat yet"
        );
        assert_eq!(reply_at(1, 4, 2), Share::with_rank(4, 2));
        assert_eq!(reply_at(2, 2, 1), Share::with_rank(4, 2));
        assert_eq!(
            reply_at(3, 4, 3),
            Share::with_rank(4, 3),
            "the second heartbeat was late"
        );
        for beat in 4..7 {
            assert_eq!(reply_at(beat, 2, 1), Share::with_rank(4, 3));
        }
        assert_eq!(reply_at(7, 2, 1), Share::with_rank(2, 1));
    }

    /// Three instances share 20 units as 7, 7 and 6, and are restarted in an outage. The new ids
    /// give the last one rank 0 before the others know their new ranks.
    #[tokio::test(start_paused = true)]
    async fn a_lower_rank_adds_no_unit_near_an_outage() {
        let mut tracker = MembershipTracker::new();
        let mut share_after = |rank, new_rank, is_near_outage| {
            let (share, reply) = (Share::with_rank(3, rank), membership_reply(3, new_rank));
            let share = tracker.next_share(share, reply, Instant::now(), is_near_outage);
            share.scale_units(20)
        };
        assert_eq!(share_after(2, 0, true), 6);
        assert_eq!(share_after(1, 2, true), 6, "a higher rank takes effect");
        assert_eq!(share_after(2, 0, false), 7);
    }

    #[tokio::test(start_paused = true)]
    async fn only_consecutive_answers_reduce_the_instance_count() {
        let mut tracker = MembershipTracker::new();
        let five = Share::with_rank(5, 4);
        let lower_reply = |tracker: &mut MembershipTracker| {
            tracker.next_share(five, membership_reply(2, 1), Instant::now(), false)
        };
        for _ in 0..10 {
            assert_eq!(lower_reply(&mut tracker), five, "a glimpse after an outage");
            sleep(MEMBERSHIP_GRACE_PERIOD - RECOVERY_HEARTBEAT_INTERVAL).await;
            assert_eq!(lower_reply(&mut tracker), five);
            tracker.decrease_since = None;
            sleep(MEMBER_TTL).await;
        }
        assert_eq!(lower_reply(&mut tracker), five);
        sleep(MEMBERSHIP_GRACE_PERIOD).await;
        assert_eq!(lower_reply(&mut tracker), Share::with_rank(2, 1));
    }
}
