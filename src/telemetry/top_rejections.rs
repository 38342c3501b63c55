//! The keys and paths with the most rejections, in bounded memory.
//!
//! Clients choose keys and paths, so counting all of them would need unbounded memory. Each worker
//! keeps space-saving sketches instead; see `docs/decisions/0016-admin-interface.md`. A ranking
//! covers the last 30 to 60 minutes.

use foldhash::HashMap;
use foldhash::quality::RandomState;
use parking_lot::Mutex;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::hash::BuildHasher;
use std::sync::{Arc, LazyLock};

/// Number of counters per sketch. The resulting error, at most 1/512 of all rejections, is
/// insignificant. The four sketches of a worker (keys and paths, two generations) take at most 0.6
/// MiB.
const SKETCH_CAPACITY: usize = 512;

/// Length of a generation in seconds.
const GENERATION_S: u64 = 1800;

/// Maximum length of a text. A longer text is truncated and ends in [`TRUNCATION_MARK`]. Counting
/// uses the whole text.
const MAX_TEXT_BYTES: usize = 160;
const TRUNCATION_MARK: &str = "...";

/// ASCII characters that are escaped, as all non-ASCII ones are, so that texts are safe in
/// terminals and HTML.
const ESCAPED_CHARACTERS: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'<')
    .add(b'>')
    .add(b'`')
    .add(b'\\');

/// The subject of a ranking: keys or paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RejectionDimension {
    /// The keys of a policy: `policy/value/value`.
    Keys,
    /// Paths without their queries, by policy.
    Paths,
    /// Paths without their queries that the upstream answered with a status from 500 on. Their
    /// policy is empty.
    AppErrors,
}

/// The rejections of one worker. The locks are uncontended, except while a ranking is read.
#[derive(Debug, Default)]
pub struct WorkerRejections {
    keys: Mutex<SketchGenerations>,
    paths: Mutex<SketchGenerations>,
    app_errors: Mutex<SketchGenerations>,
}

/// The rejections of all workers.
#[derive(Debug)]
pub struct TopRejections {
    workers: Box<[Arc<WorkerRejections>]>,
    generation_starts: Mutex<GenerationStarts>,
}

/// Start times of the two generations in seconds since the Unix epoch; 0 before the first rotation.
#[derive(Clone, Copy, Debug, Default)]
struct GenerationStarts {
    previous_s: u64,
    current_s: u64,
}

/// The keys or paths with the most rejections, as the admin endpoint shows them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RejectionRanking {
    /// Start of the covered time in seconds since the Unix epoch.
    pub since_s: u64,
    /// All rejections in the covered time, of all policies.
    pub refused: u64,
    /// Upper bound for the rejections of a key or path that the full ranking omits.
    pub unseen_at_most: u64,
    /// Entries in descending order of `count`.
    pub entries: Vec<RejectionEntry>,
}

/// One key or path with its number of rejections.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RejectionEntry {
    #[serde(default)]
    pub policy: String,
    #[serde(flatten)]
    pub text: RejectedText,
    /// Number of rejections: exact, or too high by at most `error`.
    #[serde(default)]
    pub count: u64,
    #[serde(default)]
    pub error: u64,
}

/// A key or path, in printable ASCII.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RejectedText {
    Key(String),
    Path(String),
}

impl RejectedText {
    pub fn as_str(&self) -> &str {
        let (Self::Key(text) | Self::Path(text)) = self;
        text
    }
}

#[derive(Debug, Default)]
struct SketchGenerations {
    current: SpaceSavingSketch,
    previous: SpaceSavingSketch,
}

/// A space-saving sketch. Its counters are in descending order, so the smallest is the last. Before
/// a count is incremented, its item swaps places with the first item of the same count.
#[derive(Debug, Default)]
struct SpaceSavingSketch {
    positions: HashMap<u128, usize>,
    counts: Vec<u64>,
    /// The items, at the same indices as their `counts`.
    items: Vec<SketchItem>,
    total: u64,
}

#[derive(Debug)]
struct SketchItem {
    id: u128,
    max_error: u64,
    policy: Arc<str>,
    text: Box<str>,
}

impl RejectionDimension {
    const ALL: [Self; 3] = [Self::Keys, Self::Paths, Self::AppErrors];
}

impl WorkerRejections {
    /// Counts a rejection of a key. `id` identifies the policy and the key; `text` is called only
    /// if the sketch does not contain `id`.
    pub fn record_key_rejection(&self, policy: &Arc<str>, id: u128, text: impl FnOnce() -> String) {
        let sketch = &mut self.keys.lock().current;
        sketch.increment_item(id, policy, || truncate_text(text()));
    }

    /// Counts a rejection of a path.
    pub fn record_path_rejection(&self, policy: &Arc<str>, path: &str) {
        Self::record_path(&self.paths, policy, path);
    }

    pub(super) fn record_app_error(&self, path: &str) {
        static NO_POLICY: LazyLock<Arc<str>> = LazyLock::new(|| "".into());
        Self::record_path(&self.app_errors, &NO_POLICY, path);
    }

    fn record_path(generations: &Mutex<SketchGenerations>, policy: &Arc<str>, path: &str) {
        let id = hash_text(policy, path);
        let sketch = &mut generations.lock().current;
        sketch.increment_item(id, policy, || escape_and_truncate_path(path));
    }

    fn generations(&self, dimension: RejectionDimension) -> &Mutex<SketchGenerations> {
        match dimension {
            RejectionDimension::Keys => &self.keys,
            RejectionDimension::Paths => &self.paths,
            RejectionDimension::AppErrors => &self.app_errors,
        }
    }
}

impl TopRejections {
    pub(super) fn from_workers(workers: Box<[Arc<WorkerRejections>]>) -> Self {
        Self {
            workers,
            generation_starts: Mutex::default(),
        }
    }

    /// Starts a new generation if the current one is over. Must be called periodically.
    pub fn rotate_generations_if_due(&self, now_s: u64) {
        let mut starts = self.generation_starts.lock();
        if starts.current_s == 0 {
            *starts = GenerationStarts {
                previous_s: now_s,
                current_s: now_s,
            };
        }
        if now_s < starts.current_s.saturating_add(GENERATION_S) {
            return;
        }
        *starts = GenerationStarts {
            previous_s: starts.current_s,
            current_s: now_s,
        };
        for worker in &self.workers {
            for dimension in RejectionDimension::ALL {
                let mut generations = worker.generations(dimension).lock();
                let current = std::mem::take(&mut generations.current);
                let forgotten = std::mem::replace(&mut generations.previous, current);
                // The lock is released before the old sketch is dropped, so that the worker does
                // not wait.
                drop(generations);
                drop(forgotten);
            }
        }
    }

    /// Returns the `limit` items with the most rejections, of one policy or of all policies.
    pub fn ranking(
        &self,
        dimension: RejectionDimension,
        policy: Option<&str>,
        limit: usize,
    ) -> RejectionRanking {
        let since_s = self.generation_starts.lock().previous_s;
        let new_text = match dimension {
            RejectionDimension::Keys => RejectedText::Key,
            RejectionDimension::Paths | RejectionDimension::AppErrors => RejectedText::Path,
        };
        let mut sum = RankingSum::default();
        for worker in &self.workers {
            let generations = worker.generations(dimension).lock();
            for sketch in [&generations.current, &generations.previous] {
                let bound = sketch.max_unlisted_count();
                sum.add_part(since_s, sketch.total, bound);
                let items = sketch.items.iter().zip(&sketch.counts);
                let is_selected =
                    |item: &SketchItem| policy.is_none_or(|policy| *item.policy == *policy);
                for (item, count) in items.filter(|(item, _)| is_selected(item)) {
                    sum.add_entry(item.id, bound, (*count, item.max_error), || {
                        (item.policy.to_string(), new_text(item.text.to_string()))
                    });
                }
            }
        }
        sum.into_ranking(limit, |entry| entry.error)
    }
}

/// Adds up rankings: of sketches, or of instances. Each part lists its most rejected items, and
/// bounds the rejections of the others. The true count of an item lies between `count - error` and
/// `count`.
#[derive(Debug, Default)]
pub(crate) struct RankingSum {
    /// Each item by its id, with the sum of the bounds of the parts that list it.
    entries: HashMap<u128, (RejectionEntry, u64)>,
    since_s: Option<u64>,
    refused: u64,
    /// The sum of the bounds of all parts.
    unseen_at_most: u64,
}

impl RankingSum {
    /// Adds a part without its items, which were rejected up to `bound` times if it omits them.
    pub(crate) fn add_part(&mut self, since_s: u64, refused: u64, bound: u64) {
        self.since_s = Some(self.since_s.unwrap_or(u64::MAX).min(since_s));
        self.refused = self.refused.saturating_add(refused);
        self.unseen_at_most = self.unseen_at_most.saturating_add(bound);
    }

    /// Adds an item of a part with this bound. `name` returns its policy and its text.
    pub(crate) fn add_entry(
        &mut self,
        id: u128,
        bound: u64,
        (count, error): (u64, u64),
        name: impl FnOnce() -> (String, RejectedText),
    ) {
        let (entry, listed_bounds) = self.entries.entry(id).or_insert_with(|| {
            let (policy, text) = name();
            let entry = RejectionEntry {
                policy,
                text,
                count: 0,
                error: 0,
            };
            (entry, 0)
        });
        entry.count = entry.count.saturating_add(count);
        entry.error = entry.error.saturating_add(error);
        *listed_bounds = listed_bounds.saturating_add(bound);
    }

    /// Returns the `limit` items with the most rejections. `tie` orders items with equal counts,
    /// before their names.
    pub(crate) fn into_ranking(
        self,
        limit: usize,
        tie: fn(&RejectionEntry) -> u64,
    ) -> RejectionRanking {
        // A part that omits an item may have counted it up to its bound.
        let entries = self.entries.into_values().map(|(entry, listed_bounds)| {
            let unlisted = self.unseen_at_most.saturating_sub(listed_bounds);
            RejectionEntry {
                count: entry.count.saturating_add(unlisted),
                error: entry.error.saturating_add(unlisted),
                ..entry
            }
        });
        let mut entries: Vec<RejectionEntry> = entries.collect();
        entries.sort_by(|a, b| {
            let order = |entry: &RejectionEntry| (Reverse(entry.count), tie(entry));
            let by_name = || (&a.policy, &a.text).cmp(&(&b.policy, &b.text));
            order(a).cmp(&order(b)).then_with(by_name)
        });
        entries.truncate(limit);
        RejectionRanking {
            since_s: self.since_s.unwrap_or(0),
            refused: self.refused,
            unseen_at_most: self.unseen_at_most,
            entries,
        }
    }
}

impl SpaceSavingSketch {
    fn increment_item(&mut self, id: u128, policy: &Arc<str>, text: impl FnOnce() -> String) {
        self.total += 1;
        let at = match self.positions.get(&id) {
            Some(at) => *at,
            None => {
                let error = self.max_unlisted_count();
                let item = SketchItem {
                    id,
                    max_error: error,
                    policy: Arc::clone(policy),
                    text: text().into(),
                };
                self.assign_counter(item)
            }
        };
        // Moves the item in front of all items with the same count, and increments its count.
        let Some(count) = self.counts.get(at).copied() else {
            return;
        };
        let first = self.counts.partition_point(|other| *other > count);
        if first != at {
            self.items.swap(first, at);
            for at in [first, at] {
                if let Some(item) = self.items.get(at) {
                    self.positions.insert(item.id, at);
                }
            }
        }
        if let Some(count) = self.counts.get_mut(first) {
            *count += 1;
        }
    }

    /// Assigns a counter to an item: a new one, or the one with the smallest count. Returns its
    /// index.
    fn assign_counter(&mut self, item: SketchItem) -> usize {
        if self.items.len() < SKETCH_CAPACITY {
            self.positions.insert(item.id, self.items.len());
            self.counts.push(0);
            self.items.push(item);
        } else if let Some(last) = self.items.last_mut() {
            self.positions.remove(&last.id);
            *last = item;
            self.positions.insert(last.id, SKETCH_CAPACITY - 1);
        }
        self.items.len() - 1
    }

    /// Upper bound for the count of an item that is not in the sketch.
    fn max_unlisted_count(&self) -> u64 {
        if self.items.len() < SKETCH_CAPACITY {
            0
        } else {
            self.counts.last().copied().unwrap_or_default()
        }
    }
}

/// The id of a text of a policy. All workers share one randomly keyed hasher, so that clients
/// cannot construct collisions.
pub(crate) fn hash_text(policy: &str, text: &str) -> u128 {
    static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::default);
    HASHER.hash_one((policy, text)).into()
}

fn escape_and_truncate_path(path: &str) -> String {
    // Only the part that is kept needs escaping.
    let end = path.floor_char_boundary(MAX_TEXT_BYTES + 1);
    let start = path.split_at_checked(end).map_or(path, |(start, _)| start);
    truncate_text(utf8_percent_encode(start, ESCAPED_CHARACTERS).to_string())
}

/// Truncates an ASCII text to [`MAX_TEXT_BYTES`].
fn truncate_text(mut text: String) -> String {
    if text.len() > MAX_TEXT_BYTES {
        text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES - TRUNCATION_MARK.len()));
        text.push_str(TRUNCATION_MARK);
    }
    text
}

#[cfg(test)]
mod tests;
