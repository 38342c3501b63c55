//! The keys of one server: strings and sorted sets, with expiry, and a log to undo late writes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// How long writes can be undone: the largest lag of a replica.
const UNDO_US: u64 = 5_000_000;

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Value {
    Text(Vec<u8>),
    Sorted(SortedSet),
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entry {
    pub(crate) value: Value,
    /// On the server's clock.
    pub(crate) expires_at_ms: Option<u64>,
}

/// Scores are integers in all scripts.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SortedSet {
    scores: BTreeMap<Vec<u8>, i64>,
    ordered: BTreeSet<(i64, Vec<u8>)>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Dataset {
    keys: BTreeMap<Vec<u8>, Entry>,
    /// The entry before each recent write, oldest first, with the world's time of the write.
    undo_log: VecDeque<(u64, Vec<u8>, Option<Entry>)>,
}

impl Dataset {
    /// Reads a key. An expired key does not exist; as in Redis, it exists through its last
    /// millisecond.
    pub(crate) fn get(&self, key: &[u8], now_ms: u64) -> Option<&Entry> {
        self.keys
            .get(key)
            .filter(|entry| entry.expires_at_ms.is_none_or(|at_ms| at_ms >= now_ms))
    }

    /// Replaces or removes a key at the world's time `at_us`.
    pub(crate) fn put(&mut self, key: &[u8], entry: Option<Entry>, at_us: u64) {
        let previous = match entry {
            Some(entry) => self.keys.insert(key.to_vec(), entry),
            None => self.keys.remove(key),
        };
        self.undo_log.push_back((at_us, key.to_vec(), previous));
        while self
            .undo_log
            .front()
            .is_some_and(|(written_us, ..)| written_us + UNDO_US < at_us)
        {
            self.undo_log.pop_front();
        }
    }

    /// Undoes all writes since `since_us`. Returns the changed keys.
    pub(crate) fn undo_since(&mut self, since_us: u64) -> BTreeSet<Vec<u8>> {
        let mut changed = BTreeSet::new();
        while let Some((at_us, key, previous)) = self.undo_log.pop_back() {
            if at_us < since_us {
                self.undo_log.push_back((at_us, key, previous));
                break;
            }
            match previous {
                Some(entry) => self.keys.insert(key.clone(), entry),
                None => self.keys.remove(&key),
            };
            changed.insert(key);
        }
        changed
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &Vec<u8>> {
        self.keys.keys()
    }

    /// Deletes keys that have expired, as Redis' background cycle does.
    pub(crate) fn delete_expired(&mut self, now_ms: u64) {
        self.keys
            .retain(|_, entry| entry.expires_at_ms.is_none_or(|at_ms| at_ms >= now_ms));
    }
}

impl SortedSet {
    pub(crate) fn len(&self) -> usize {
        self.scores.len()
    }

    /// Returns whether the member is new.
    pub(crate) fn insert(&mut self, member: &[u8], score: i64) -> bool {
        let previous = self.scores.insert(member.to_vec(), score);
        if let Some(previous) = previous {
            self.ordered.remove(&(previous, member.to_vec()));
        }
        self.ordered.insert((score, member.to_vec()));
        previous.is_none()
    }

    pub(crate) fn remove(&mut self, member: &[u8]) -> bool {
        let Some(score) = self.scores.remove(member) else {
            return false;
        };
        self.ordered.remove(&(score, member.to_vec()))
    }

    pub(crate) fn rank(&self, member: &[u8]) -> Option<usize> {
        let score = *self.scores.get(member)?;
        let place = (score, member.to_vec());
        Some(self.ordered.range(..place).count())
    }

    /// The members from rank `start` to `stop`; negative ranks count from the end.
    pub(crate) fn by_rank(&self, start: i64, stop: i64) -> Vec<(Vec<u8>, i64)> {
        let length = self.len() as i64;
        let absolute = |rank: i64| if rank < 0 { rank + length } else { rank };
        let (start, stop) = (absolute(start).max(0), absolute(stop).min(length - 1));
        if start > stop {
            return Vec::new();
        }
        let (skip, take) = (start as usize, (stop - start + 1) as usize);
        let copy = |(score, member): &(i64, Vec<u8>)| (member.clone(), *score);
        // Scripts read one of the two ends.
        match skip + take > self.len() / 2 {
            false => self
                .ordered
                .iter()
                .skip(skip)
                .take(take)
                .map(copy)
                .collect(),
            true => {
                let from_end = self.len() - skip - take;
                let mut members: Vec<_> = self
                    .ordered
                    .iter()
                    .rev()
                    .skip(from_end)
                    .take(take)
                    .map(copy)
                    .collect();
                members.reverse();
                members
            }
        }
    }

    /// The members with a score in the range, both included, in order.
    pub(crate) fn by_score(
        &self,
        lowest: i64,
        highest: i64,
    ) -> impl Iterator<Item = (&Vec<u8>, i64)> {
        let from = (lowest, Vec::new());
        self.ordered
            .range(from..)
            .take_while(move |(score, _)| *score <= highest)
            .map(|(score, member)| (member, *score))
    }

    /// How many members sort before `member` by their bytes.
    pub(crate) fn count_before(&self, member: &[u8]) -> usize {
        self.scores.range(..member.to_vec()).count()
    }
}
