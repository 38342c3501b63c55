//! What a process that stops during an outage leaves to the next one, and its encoding.
//!
//! The encoding is a header line with a version and a checksum, and one JSON array. All times are
//! ages at `saved_at_us`, so the clocks of the two processes are not compared.

use super::Share;
use super::write_back::UsageEntry;
use crate::limiter::{Algorithm, Key, Limit, MAX_UNITS, MAX_WARM_UP_US};
use crate::store::memory::CounterId;
use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use sha2::{Digest, Sha256};

const MAGIC: &str = "tidegate-usage";
const VERSION: &str = "1";

/// Usage of an outage that Redis may lack, and the state that keeps each share exact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::store) struct OutageUsage {
    /// The wall clock (µs) when this was saved.
    pub(in crate::store) saved_at_us: u64,
    pub(super) share: Share,
    pub(super) stale_partitions: Vec<u16>,
    pub(super) counters: Vec<OutageCounter>,
    pub(super) statuses: Vec<OutageStatus>,
}

/// One counter that was decided without Redis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OutageCounter {
    pub(super) limit: Limit,
    pub(super) key: Key,
    /// Units of the share in use that `usage` does not contain, and their age (µs).
    pub(super) other_units: u64,
    pub(super) other_age_us: u64,
    /// Units to write back, oldest first. `at_us` holds the age.
    pub(super) usage: Vec<UsageEntry>,
}

/// The last status from Redis of a counter that was not decided since.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct OutageStatus {
    pub(super) id: CounterId,
    pub(super) remaining: u64,
    pub(super) age_us: u64,
    /// Time (µs) until the block ends, for a block.
    pub(super) block_ends_in_us: Option<u64>,
}

/// Why a file is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::store) enum UsageFormatError {
    #[error("it is not a file of tidegate")]
    Foreign,
    #[error("it is of another version of tidegate")]
    Version,
    #[error("its checksum is wrong")]
    Checksum,
    #[error("its contents are invalid")]
    Contents,
}

type AlgorithmRow = (u8, u64, u64);
type CounterRow = (u64, u64, AlgorithmRow, String, u64, u64, Vec<(u64, u64)>);
type StatusRow = (u64, u64, AlgorithmRow, u64, u64, u64, Option<u64>);
type UsageRows = (u64, u64, Vec<u16>, Vec<CounterRow>, Vec<StatusRow>);

impl OutageUsage {
    pub(in crate::store) fn counter_count(&self) -> usize {
        self.counters.len()
    }

    pub(in crate::store) fn encode(&self) -> Vec<u8> {
        let rows: UsageRows = (
            self.saved_at_us,
            self.share.to_bits(),
            self.stale_partitions.clone(),
            self.counters.iter().map(OutageCounter::to_row).collect(),
            self.statuses.iter().map(|one| one.to_row()).collect(),
        );
        let body = serde_json::to_vec(&rows).unwrap_or_default();
        let mut bytes = format!("{MAGIC} {VERSION} {}\n", checksum(&body)).into_bytes();
        bytes.extend(body);
        bytes
    }

    /// # Errors
    /// [`UsageFormatError`] if the bytes are not exactly what [`OutageUsage::encode`] wrote.
    pub(in crate::store) fn decode(bytes: &[u8]) -> Result<Self, UsageFormatError> {
        let header_len = bytes
            .iter()
            .position(|byte| *byte == b'\n')
            .ok_or(UsageFormatError::Foreign)?;
        let (header, body) = bytes.split_at(header_len);
        let body = body.get(1..).unwrap_or_default();
        let header = str::from_utf8(header).or(Err(UsageFormatError::Foreign))?;
        match *header.split(' ').collect::<Vec<_>>() {
            [MAGIC, VERSION, sum] if sum == checksum(body) => {}
            [MAGIC, VERSION, _] => return Err(UsageFormatError::Checksum),
            [MAGIC, ..] => return Err(UsageFormatError::Version),
            _ => return Err(UsageFormatError::Foreign),
        }
        let rows = serde_json::from_slice(body).or(Err(UsageFormatError::Contents))?;
        Self::from_rows(rows).ok_or(UsageFormatError::Contents)
    }

    fn from_rows(rows: UsageRows) -> Option<Self> {
        let (saved_at_us, share, stale_partitions, counters, statuses) = rows;
        Some(Self {
            saved_at_us,
            share: Share::from_bits(share),
            stale_partitions,
            counters: counters
                .into_iter()
                .map(OutageCounter::from_row)
                .collect::<Option<_>>()?,
            statuses: statuses
                .into_iter()
                .map(OutageStatus::from_row)
                .collect::<Option<_>>()?,
        })
    }
}

impl OutageCounter {
    fn to_row(&self) -> CounterRow {
        let usage = self.usage.iter().map(|entry| (entry.at_us, entry.units));
        (
            self.limit.requests,
            self.limit.per_us,
            algorithm_to_row(self.limit.algorithm),
            STANDARD_NO_PAD.encode(self.key.encoded_values()),
            self.other_units,
            self.other_age_us,
            usage.collect(),
        )
    }

    fn from_row(row: CounterRow) -> Option<Self> {
        let (requests, per_us, algorithm, key, other_units, other_age_us, usage) = row;
        let limit = Limit {
            requests,
            per_us,
            algorithm: algorithm_from_row(algorithm)?,
        };
        let are_units_valid = usage
            .iter()
            .map(|(_, units)| units)
            .chain([&other_units])
            .all(|units| *units <= MAX_UNITS);
        (are_units_valid && is_valid_limit(&limit)).then_some(Self {
            limit,
            key: Key::from_encoded_values(&STANDARD_NO_PAD.decode(key).ok()?),
            other_units,
            other_age_us,
            usage: usage
                .into_iter()
                .map(|(at_us, units)| UsageEntry { at_us, units })
                .collect(),
        })
    }
}

impl OutageStatus {
    fn to_row(self) -> StatusRow {
        let (key_id, algorithm, per_us) = self.id;
        (
            u64::try_from(key_id >> 64).unwrap_or_default(),
            u64::try_from(key_id & u128::from(u64::MAX)).unwrap_or_default(),
            algorithm_to_row(algorithm),
            per_us,
            self.remaining,
            self.age_us,
            self.block_ends_in_us,
        )
    }

    fn from_row(row: StatusRow) -> Option<Self> {
        let (high, low, algorithm, per_us, remaining, age_us, block_ends_in_us) = row;
        let key_id = u128::from(high) << 64 | u128::from(low);
        (remaining <= MAX_UNITS).then_some(Self {
            id: (key_id, algorithm_from_row(algorithm)?, per_us),
            remaining,
            age_us,
            block_ends_in_us,
        })
    }
}

fn checksum(body: &[u8]) -> String {
    STANDARD_NO_PAD.encode(Sha256::digest(body))
}

fn algorithm_to_row(algorithm: Algorithm) -> AlgorithmRow {
    match algorithm {
        Algorithm::SlidingLog => (0, 0, 0),
        Algorithm::SlidingWindow { buckets } => (1, buckets, 0),
        Algorithm::FixedWindow { offset_us } => (2, offset_us, 0),
        Algorithm::TokenBucket { burst, warm_up_us } => (3, burst, warm_up_us),
        Algorithm::LeakyBucket { max_delay_us } => (4, max_delay_us, 0),
        Algorithm::Concurrency { max_duration_us } => (5, max_duration_us, 0),
        Algorithm::Block => (6, 0, 0),
    }
}

fn algorithm_from_row(row: AlgorithmRow) -> Option<Algorithm> {
    Some(match row {
        (0, 0, 0) => Algorithm::SlidingLog,
        (1, buckets, 0) => Algorithm::SlidingWindow { buckets },
        (2, offset_us, 0) => Algorithm::FixedWindow { offset_us },
        (3, burst, warm_up_us) => Algorithm::TokenBucket { burst, warm_up_us },
        (4, max_delay_us, 0) => Algorithm::LeakyBucket { max_delay_us },
        (5, max_duration_us, 0) => Algorithm::Concurrency { max_duration_us },
        (6, 0, 0) => Algorithm::Block,
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
            Algorithm::TokenBucket { burst, warm_up_us } => {
                burst >= 1
                    && warm_up_us <= MAX_WARM_UP_US
                    && is_bounded(burst.max(requests), per_us, 0)
            }
            Algorithm::LeakyBucket { max_delay_us } => is_bounded(requests, max_delay_us, per_us),
            Algorithm::Block => requests == 1,
            // Slots end with the process that holds them.
            Algorithm::Concurrency { .. } => false,
        }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::KeyBuilder;

    fn usage() -> OutageUsage {
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
        let counter = |algorithm| OutageCounter {
            limit: Limit {
                requests: 1,
                per_us: 10_000_000,
                algorithm,
            },
            key: KeyBuilder::new("p/\u{e4}").finish(),
            other_units: 3,
            other_age_us: 4,
            usage: vec![
                UsageEntry { at_us: 9, units: 1 },
                UsageEntry { at_us: 2, units: 5 },
            ],
        };
        OutageUsage {
            saved_at_us: 1_700_000_000_000_000,
            share: Share::with_rank(5, 3),
            stale_partitions: vec![0, 16_383],
            counters: limits.map(counter).into(),
            statuses: vec![OutageStatus {
                id: (u128::MAX - 7, Algorithm::SlidingLog, 10_000_000),
                remaining: 4,
                age_us: 8,
                block_ends_in_us: Some(1),
            }],
        }
    }

    #[test]
    fn decode_returns_what_was_encoded() {
        assert_eq!(OutageUsage::decode(&usage().encode()), Ok(usage()));
    }

    #[test]
    fn damaged_and_foreign_bytes_are_refused() {
        let bytes = usage().encode();
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
        assert_eq!(
            replace("usage 1", "usage 2"),
            Err(UsageFormatError::Version)
        );
        assert_eq!(replace("tidegate", "other"), Err(UsageFormatError::Foreign));
        assert_eq!(replace("[", "["), Ok(usage()));
        assert_eq!(replace("[", " ["), Err(UsageFormatError::Checksum));
    }

    /// A valid checksum does not make the numbers valid.
    #[test]
    fn limits_outside_their_ranges_are_refused() {
        let decode_with = |change: fn(&mut OutageCounter)| {
            let mut usage = usage();
            usage.counters.truncate(1);
            usage.counters.iter_mut().for_each(change);
            OutageUsage::decode(&usage.encode()).map(drop)
        };
        assert_eq!(decode_with(|_| {}), Ok(()));
        let changes: [fn(&mut OutageCounter); 7] = [
            |counter| counter.limit.per_us = 0,
            |counter| counter.limit.requests = u64::MAX,
            |counter| counter.other_units = u64::MAX,
            |counter| counter.usage[0].units = MAX_UNITS + 1,
            |counter| counter.limit.algorithm = Algorithm::SlidingWindow { buckets: 0 },
            |counter| {
                counter.limit.algorithm = Algorithm::LeakyBucket {
                    max_delay_us: u64::MAX,
                }
            },
            |counter| counter.limit.algorithm = Algorithm::Concurrency { max_duration_us: 0 },
        ];
        for change in changes {
            assert_eq!(decode_with(change), Err(UsageFormatError::Contents));
        }
    }
}
