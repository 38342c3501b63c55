//! The usage that a process stopped in an outage leaves to the next process: its export, encoding
//! and restoration.
//!
//! The encoding is a header line with a version and a checksum, and one JSON array. All times are
//! of the local clock of the stopped process, which showed `now_us` when this was saved.

use super::status_cache::CachedStatus;
use super::write_back::{CounterWriteBack, UsageEntry};
use super::{FallbackStore, OutagePhase, SINGLE_PARTITION, Share};
use crate::limiter::{
    Algorithm, Amendment, Calendar, CounterRef, Key, Limit, MAX_UNITS, MAX_WARM_UP_US,
};
use crate::store::memory::CounterId;
use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use sha2::{Digest, Sha256};
use std::sync::atomic::Ordering;

const FILE_MAGIC: &str = "tidegate-usage";
const FORMAT_VERSION: &str = "4";

const FOREIGN_FILE: &str = "it is not a file of tidegate";
const WRONG_VERSION: &str = "it is of another version of tidegate";
const WRONG_CHECKSUM: &str = "its checksum is wrong";
const INVALID_CONTENTS: &str = "its contents are invalid";

/// Usage of an outage that Redis may lack, and the state that keeps each share exact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OutageUsage {
    /// The wall clock (µs) when this was saved.
    pub(crate) saved_at_us: u64,
    pub(super) now_us: u64,
    /// End of the outage before this one.
    pub(super) outage_ended_us: u64,
    pub(super) share: Share,
    pub(super) stale_partitions: Vec<u16>,
    /// The counters that were decided without Redis. Each has the units to write back, and other
    /// units used from the instance's share with the time of their charge.
    pub(super) counters: Vec<(CounterWriteBack, UsageEntry)>,
    /// The last statuses that Redis reported, if no local decision followed.
    pub(super) statuses: Vec<(CounterId, CachedStatus)>,
}

impl FallbackStore {
    /// What a later process needs to continue this outage. `None` if Redis has all usage.
    /// `wall_clock_us`: the current wall clock.
    pub(crate) fn export_usage(&self, wall_clock_us: u64) -> Option<OutageUsage> {
        // The statuses are exported before the table is locked, because other callers lock the
        // table while they hold the lock of a status shard.
        let statuses = self.status_cache.to_vec();
        let mut write_back = self.write_back.lock();
        write_back.finish_batch(|_| false);
        let now_us = self.clock.now_us();
        let counters = write_back.iter();
        (!self.is_in_phase(OutagePhase::UpToDate)).then(|| OutageUsage {
            saved_at_us: wall_clock_us,
            now_us,
            outage_ended_us: self.outage_ended_us.load(Ordering::Relaxed),
            share: self.share(),
            stale_partitions: self.stale_partitions.read().iter().copied().collect(),
            counters: counters
                .filter_map(|counter| self.export_counter(counter, now_us))
                .collect(),
            statuses,
        })
    }

    fn export_counter(
        &self,
        counter: &CounterWriteBack,
        now_us: u64,
    ) -> Option<(CounterWriteBack, UsageEntry)> {
        let limit = counter.limit;
        if limit.algorithm.counts_slots() {
            return None;
        }
        let mut exported = CounterWriteBack::new(counter.counter(), counter.partition);
        exported.usage = counter.usage_in_use(now_us).copied().collect();
        let (units_in_use, next_growth_us) = self.usage_of_share(counter.counter());
        // The entries of a bucket have no age: all its usage counts as one charge now.
        let known_units = if limit.algorithm.is_bucket() {
            0
        } else {
            exported.usage.iter().map(|entry| entry.units).sum()
        };
        let at_us = match limit.algorithm {
            // A block lasts for `per_us` from its start.
            Algorithm::Block => next_growth_us.map_or(0, |ends| ends.saturating_sub(limit.per_us)),
            _ => now_us,
        };
        let other_usage = UsageEntry {
            at_us,
            units: units_in_use.saturating_sub(known_units),
        };
        (units_in_use > 0 || !exported.usage.is_empty()).then_some((exported, other_usage))
    }

    /// Continues the outage of a process that stopped `downtime_us` ago.
    pub(crate) fn restore_usage(&self, usage: OutageUsage, downtime_us: u64) {
        let now_us = self.clock.now_us();
        let to_local_time = |at_us: u64| {
            (at_us.saturating_add(now_us)).saturating_sub(usage.now_us.saturating_add(downtime_us))
        };
        self.set_share(usage.share);
        let ended_us = to_local_time(usage.outage_ended_us);
        self.outage_ended_us.store(ended_us, Ordering::Relaxed);
        for (id, status) in usage.statuses {
            let status = CachedStatus {
                remaining: status.remaining,
                received_at_us: to_local_time(status.received_at_us),
                block_ends_us: status.block_ends_us.map(to_local_time),
            };
            self.status_cache.replace(id, Some(status));
        }
        let mut partitions = usage.stale_partitions;
        for (mut counter, mut other_usage) in usage.counters {
            counter.partition = self.partition(&counter.key);
            partitions.push(counter.partition);
            for entry in counter.usage.iter_mut().chain([&mut other_usage]) {
                entry.at_us = to_local_time(entry.at_us);
            }
            self.restore_counter(counter, other_usage, now_us);
        }
        self.mark_partitions_unreachable(partitions);
    }

    fn restore_counter(&self, counter: CounterWriteBack, other_usage: UsageEntry, now_us: u64) {
        let limit = self.share().scale_limit(&counter.limit);
        let usage = counter
            .usage
            .iter()
            .filter(|_| !limit.algorithm.is_bucket());
        for entry in usage.chain([&other_usage]).filter(|entry| entry.units > 0) {
            let amendment = Amendment::BackdatedCharge {
                units: entry.units,
                age_us: now_us.saturating_sub(entry.at_us),
            };
            let counter = CounterRef {
                limit: &limit,
                key: &counter.key,
            };
            self.amend_share(counter, amendment);
        }
        self.write_back.lock().merge_older_usage(counter);
    }
}

// Rows of the usage file's JSON array.

/// The name of the algorithm, or of its calendar, and its numbers.
type EncodedAlgorithm = (String, u64, u64);
type UsageRow = (u64, u64);
type CounterRow = (u64, u64, EncodedAlgorithm, String, UsageRow, Vec<UsageRow>);
type StatusRow = (u128, EncodedAlgorithm, u64, u64, u64, Option<u64>);
type FileRows = (
    u64,
    u64,
    u64,
    (u32, Option<u32>),
    Vec<u16>,
    Vec<CounterRow>,
    Vec<StatusRow>,
);

impl OutageUsage {
    pub(crate) fn counter_count(&self) -> usize {
        self.counters.len()
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let rows: FileRows = (
            self.saved_at_us,
            self.now_us,
            self.outage_ended_us,
            (self.share.instances, self.share.rank),
            self.stale_partitions.clone(),
            self.counters.iter().map(counter_to_row).collect(),
            self.statuses.iter().map(status_to_row).collect(),
        );
        let body = serde_json::to_vec(&rows).unwrap_or_default();
        let checksum = compute_checksum(&body);
        let mut bytes = format!("{FILE_MAGIC} {FORMAT_VERSION} {checksum}\n").into_bytes();
        bytes.extend(body);
        bytes
    }

    /// # Errors
    /// The reason if the bytes are not exactly what [`OutageUsage::encode`] wrote.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, &'static str> {
        let mut lines = bytes.splitn(2, |byte| *byte == b'\n');
        let header = lines
            .next()
            .map(String::from_utf8_lossy)
            .unwrap_or_default();
        let body = lines.next().unwrap_or_default();
        match *header.split(' ').collect::<Vec<_>>() {
            [FILE_MAGIC, FORMAT_VERSION, sum] if sum == compute_checksum(body) => {}
            [FILE_MAGIC, FORMAT_VERSION, _] => return Err(WRONG_CHECKSUM),
            [FILE_MAGIC, ..] => return Err(WRONG_VERSION),
            _ => return Err(FOREIGN_FILE),
        }
        let rows = serde_json::from_slice(body).ok();
        rows.and_then(Self::from_rows).ok_or(INVALID_CONTENTS)
    }

    fn from_rows(rows: FileRows) -> Option<Self> {
        let (saved_at_us, now_us, outage_ended_us, share, stale_partitions, counters, statuses) =
            rows;
        let (instances @ 1.., rank) = share else {
            return None;
        };
        let counters = counters.into_iter().map(counter_from_row);
        let statuses = statuses.into_iter().map(status_from_row);
        Some(Self {
            saved_at_us,
            now_us,
            outage_ended_us,
            share: Share { instances, rank },
            stale_partitions,
            counters: counters.collect::<Option<_>>()?,
            statuses: statuses.collect::<Option<_>>()?,
        })
    }
}

fn counter_to_row((counter, other_usage): &(CounterWriteBack, UsageEntry)) -> CounterRow {
    let to_row = |entry: &UsageEntry| (entry.at_us, entry.units);
    (
        counter.limit.requests,
        counter.limit.per_us,
        encode_algorithm(counter.limit.algorithm),
        STANDARD_NO_PAD.encode(counter.key.encoded_values()),
        to_row(other_usage),
        counter.usage.iter().map(to_row).collect(),
    )
}

fn counter_from_row(row: CounterRow) -> Option<(CounterWriteBack, UsageEntry)> {
    let (requests, per_us, algorithm, key, other_usage, usage) = row;
    let limit = Limit {
        requests,
        per_us,
        algorithm: decode_algorithm(algorithm)?,
    };
    let from_row =
        |(at_us, units): UsageRow| (units <= MAX_UNITS).then_some(UsageEntry { at_us, units });
    let key = Key::from_encoded_values(&STANDARD_NO_PAD.decode(key).ok()?);
    let counter = CounterRef {
        limit: &limit,
        key: &key,
    };
    let mut counter = CounterWriteBack::new(counter, SINGLE_PARTITION);
    counter.usage = usage.into_iter().map(from_row).collect::<Option<_>>()?;
    is_valid_limit(&limit).then_some((counter, from_row(other_usage)?))
}

fn status_to_row(((key_id, algorithm, per_us), status): &(CounterId, CachedStatus)) -> StatusRow {
    (
        *key_id,
        encode_algorithm(*algorithm),
        *per_us,
        status.remaining,
        status.received_at_us,
        status.block_ends_us,
    )
}

fn status_from_row(row: StatusRow) -> Option<(CounterId, CachedStatus)> {
    let (key_id, algorithm, per_us, remaining, received_at_us, block_ends_us) = row;
    let id = (key_id, decode_algorithm(algorithm)?, per_us);
    let status = CachedStatus {
        remaining,
        received_at_us,
        block_ends_us,
    };
    (remaining <= MAX_UNITS).then_some((id, status))
}

fn compute_checksum(body: &[u8]) -> String {
    STANDARD_NO_PAD.encode(Sha256::digest(body))
}

fn encode_algorithm(algorithm: Algorithm) -> EncodedAlgorithm {
    let numbers = |name: &str, first, second| (name.to_owned(), first, second);
    let name = algorithm.into_str();
    match algorithm {
        Algorithm::SlidingLog | Algorithm::Block => numbers(name, 0, 0),
        Algorithm::SlidingWindow { buckets } => numbers(name, buckets, 0),
        Algorithm::FixedWindow { offset_us } => numbers(name, offset_us, 0),
        Algorithm::TokenBucket { burst, warm_up_us } => numbers(name, burst, warm_up_us),
        Algorithm::LeakyBucket { max_delay_us } => numbers(name, max_delay_us, 0),
        Algorithm::Concurrency { max_duration_us } => numbers(name, max_duration_us, 0),
        Algorithm::CalendarWindow { calendar } => numbers(&calendar.to_string(), 0, 0),
    }
}

fn decode_algorithm((name, first, second): EncodedAlgorithm) -> Option<Algorithm> {
    Some(match (&*name, first, second) {
        ("sliding_log", 0, 0) => Algorithm::SlidingLog,
        ("sliding_window", buckets, 0) => Algorithm::SlidingWindow { buckets },
        ("fixed_window", offset_us, 0) => Algorithm::FixedWindow { offset_us },
        ("token_bucket", burst, warm_up_us) => Algorithm::TokenBucket { burst, warm_up_us },
        ("leaky_bucket", max_delay_us, 0) => Algorithm::LeakyBucket { max_delay_us },
        ("block", 0, 0) => Algorithm::Block,
        (calendar, 0, 0) => {
            let (unit, zone_name) = calendar.split_once(' ')?;
            let calendar = Calendar::from_names(unit, zone_name)?;
            Algorithm::CalendarWindow { calendar }
        }
        _ => return None,
    })
}

/// Whether a limit is within the ranges that the algorithms compute with.
fn is_valid_limit(limit: &Limit) -> bool {
    let (requests, per_us) = (limit.requests, limit.per_us);
    let is_bounded = |units: u64, time_us: u64, added: u64| {
        u128::from(units) * u128::from(time_us) + u128::from(added) <= u128::from(MAX_UNITS)
    };
    requests <= MAX_UNITS
        && (1..=MAX_UNITS).contains(&per_us)
        && match limit.algorithm {
            Algorithm::SlidingLog => true,
            Algorithm::SlidingWindow { buckets } => (2..=100).contains(&buckets),
            Algorithm::FixedWindow { offset_us } => offset_us < per_us,
            Algorithm::CalendarWindow { calendar } => per_us == calendar.unit().nominal_us(),
            Algorithm::TokenBucket { burst, warm_up_us } => {
                burst >= 1
                    && warm_up_us <= MAX_WARM_UP_US
                    && is_bounded(burst.max(requests), per_us, 0)
            }
            Algorithm::LeakyBucket { max_delay_us } => is_bounded(requests, max_delay_us, per_us),
            Algorithm::Block => requests == 1,
            // Slots are never saved: they end with the process that holds them.
            Algorithm::Concurrency { .. } => false,
        }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::{CalendarUnit, KeyBuilder};

    fn sample_usage() -> OutageUsage {
        let limits = [
            Algorithm::SlidingLog,
            Algorithm::SlidingWindow { buckets: 10 },
            Algorithm::FixedWindow { offset_us: 3 },
            Algorithm::TokenBucket {
                burst: 5,
                warm_up_us: 7,
            },
            Algorithm::LeakyBucket { max_delay_us: 9 },
            Algorithm::Block,
        ];
        let month = Calendar::new(CalendarUnit::Month, "Europe/Berlin").unwrap();
        let per_month = Limit::per_calendar_period(100, month);
        let counter = |limit: Limit| {
            let key = KeyBuilder::new("p/\u{e4}").finish();
            let counter = CounterRef {
                limit: &limit,
                key: &key,
            };
            let mut counter = CounterWriteBack::new(counter, SINGLE_PARTITION);
            let usage = [(9, 1), (2, 5)].map(|(at_us, units)| UsageEntry { at_us, units });
            counter.usage = usage.into();
            (counter, UsageEntry { at_us: 4, units: 3 })
        };
        let counters = limits.map(|algorithm| Limit {
            requests: 1,
            per_us: 10_000_000,
            algorithm,
        });
        let counters = counters.into_iter().chain([per_month]).map(counter);
        OutageUsage {
            saved_at_us: 1_700_000_000_000_000,
            now_us: 1_700_000_000_000_009,
            outage_ended_us: 1_700_000_000_000_001,
            share: Share::with_rank(5, 3),
            stale_partitions: vec![0, 16_383],
            counters: counters.collect(),
            statuses: vec![(
                (u128::MAX - 7, Algorithm::SlidingLog, 10_000_000),
                CachedStatus {
                    remaining: 4,
                    received_at_us: 8,
                    block_ends_us: Some(1),
                },
            )],
        }
    }

    #[test]
    fn decode_returns_what_was_encoded() {
        assert_eq!(
            OutageUsage::decode(&sample_usage().encode()),
            Ok(sample_usage())
        );
    }

    #[test]
    fn damaged_and_foreign_bytes_are_refused() {
        let bytes = sample_usage().encode();
        for len in 0..bytes.len() {
            assert!(OutageUsage::decode(&bytes[..len]).is_err(), "cut at {len}");
        }
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert!(OutageUsage::decode(&damaged).is_err(), "bit flip at {at}");
        }
        let replace = |from: &str, to: &str| {
            let text = String::from_utf8(bytes.clone()).unwrap();
            OutageUsage::decode(text.replacen(from, to, 1).as_bytes())
        };
        assert_eq!(replace("usage 4", "usage 3"), Err(WRONG_VERSION));
        assert_eq!(replace("tidegate", "other"), Err(FOREIGN_FILE));
        assert_eq!(replace("[", "["), Ok(sample_usage()));
        assert_eq!(replace("[", " ["), Err(WRONG_CHECKSUM));
    }

    /// A valid checksum does not make the numbers valid.
    #[test]
    fn limits_outside_their_ranges_are_refused() {
        let decode_with = |change: fn(&mut (CounterWriteBack, UsageEntry))| {
            let mut usage = sample_usage();
            usage.counters.truncate(1);
            usage.counters.iter_mut().for_each(change);
            OutageUsage::decode(&usage.encode()).map(drop)
        };
        assert_eq!(decode_with(|_| {}), Ok(()));
        let changes: [fn(&mut (CounterWriteBack, UsageEntry)); 8] = [
            |counter| {
                let day = Calendar::new(CalendarUnit::Day, "UTC").unwrap();
                counter.0.limit.algorithm = Algorithm::CalendarWindow { calendar: day };
            },
            |counter| counter.0.limit.per_us = 0,
            |counter| counter.0.limit.requests = u64::MAX,
            |counter| counter.1.units = u64::MAX,
            |counter| counter.0.usage[0].units = MAX_UNITS + 1,
            |counter| counter.0.limit.algorithm = Algorithm::SlidingWindow { buckets: 0 },
            |counter| {
                counter.0.limit.algorithm = Algorithm::LeakyBucket {
                    max_delay_us: u64::MAX,
                }
            },
            |counter| counter.0.limit.algorithm = Algorithm::Concurrency { max_duration_us: 0 },
        ];
        for change in changes {
            assert_eq!(decode_with(change), Err(INVALID_CONTENTS));
        }
    }
}
