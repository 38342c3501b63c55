//! Whose requests are refused most: keys and paths, in bounded memory.
//!
//! Clients choose keys and paths, so they can't all be counted. Each worker keeps the space-saving sketch of Metwally,
//! Agrawal and El Abbadi ("Efficient computation of frequent and top-k elements in data streams", 2005): [`CAPACITY`]
//! counters; what has none takes over the smallest, count and all, and remembers that count as its possible error. So
//! of N refusals noted, whatever was refused more than N / [`CAPACITY`] times is there, and each count is right or too
//! high by at most its error. Added over workers both stay true: who is absent from a full sketch was refused at most as
//! often there as its smallest counter says.
//!
//! What is told covers the last half to whole hour: two generations of [`GENERATION_S`], the older forgotten when a
//! third begins. Only a refusal costs anything: one lock that nobody else wants, no clock, a few look-ups.

use foldhash::HashMap;
use foldhash::quality::RandomState;
use parking_lot::Mutex;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use std::hash::BuildHasher;
use std::sync::{Arc, LazyLock};

/// Counters in a sketch. An error of at most 1/512 of all refusals is small beside anything worth looking at, and a
/// worker's four sketches (keys and paths, two generations) take 0.6 MiB at most.
const CAPACITY: usize = 512;

/// Seconds in a generation.
const GENERATION_S: u64 = 1800;

/// Longer texts are cut, and end in [`CUT`]. What is counted is the whole.
const MAX_TEXT_BYTES: usize = 160;
const TRUNCATION_MARK: &str = "...";

/// What can't be taken for a URL's plain text is escaped: nothing here may harm a terminal or a page.
const ESCAPED_CHARACTERS: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'<')
    .add(b'>')
    .add(b'`')
    .add(b'\\');

/// What is ranked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalDimension {
    /// A policy's keys: `policy/value/value`.
    Keys,
    /// Paths without their queries, per policy.
    Paths,
}

/// One worker's refusals.
#[derive(Debug, Default)]
pub struct WorkerRefusals {
    keys: Mutex<SketchGenerations>,
    paths: Mutex<SketchGenerations>,
}

/// All workers' refusals.
#[derive(Debug)]
pub struct TopRefusals {
    workers: Box<[Arc<WorkerRefusals>]>,
    generation_starts: Mutex<GenerationStarts>,
}

/// Seconds since the Unix epoch; 0 until the first [`Top::tick`].
#[derive(Clone, Copy, Debug, Default)]
struct GenerationStarts {
    previous_s: u64,
    current_s: u64,
}

/// Those that were refused most.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusalRanking {
    /// By count, the highest first.
    pub entries: Vec<RefusalEntry>,
    /// All refusals in the time that is covered, of all policies.
    pub total: u64,
    /// Who is not in the whole ranking was refused at most so often.
    pub max_unlisted: u64,
    /// When that time began: seconds since the Unix epoch.
    pub since_s: u64,
}

/// One key or path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RefusalEntry {
    pub policy: Arc<str>,
    /// Printable ASCII.
    pub text: Box<str>,
    /// Refusals: exact, or too high by at most `error`.
    pub count: u64,
    pub max_error: u64,
}

#[derive(Debug, Default)]
struct SketchGenerations {
    current: SpaceSavingSketch,
    previous: SpaceSavingSketch,
}

/// Counters in descending order, so that the smallest is the last. A count grows by one at a time, so an item moves by
/// changing places with the first of those that count as much.
#[derive(Debug, Default)]
struct SpaceSavingSketch {
    positions: HashMap<u128, usize>,
    counts: Vec<u64>,
    /// Beside `counts`.
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

impl WorkerRefusals {
    /// A policy refused a key. `id` names policy and key; `text` is made only when it is needed.
    pub fn record_key(&self, policy: &Arc<str>, id: u128, text: impl FnOnce() -> String) {
        self.keys
            .lock()
            .current
            .add(id, policy, || truncate_text(text()));
    }

    /// A policy refused a request with this path.
    pub fn record_path(&self, policy: &Arc<str>, path: &str) {
        // The same in all workers, and in each process another: nobody can make paths meet.
        static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::default);
        let id = HASHER.hash_one((&**policy, path));
        self.paths
            .lock()
            .current
            .add(id.into(), policy, || escape_path(path));
    }

    fn generations(&self, dimension: RefusalDimension) -> &Mutex<SketchGenerations> {
        match dimension {
            RefusalDimension::Keys => &self.keys,
            RefusalDimension::Paths => &self.paths,
        }
    }
}

impl TopRefusals {
    pub(super) fn from_workers(workers: Box<[Arc<WorkerRefusals>]>) -> Self {
        Self {
            workers,
            generation_starts: Mutex::default(),
        }
    }

    /// To be called now and then: begins a new generation when it is time.
    pub fn rotate_generations(&self, now_s: u64) {
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
            for dimension in [RefusalDimension::Keys, RefusalDimension::Paths] {
                let mut generations = worker.generations(dimension).lock();
                let current = std::mem::take(&mut generations.current);
                let forgotten = std::mem::replace(&mut generations.previous, current);
                // Before it is dropped, the worker may go on.
                drop(generations);
                drop(forgotten);
            }
        }
    }

    /// The `most` that were refused most often, of one policy or of all.
    pub fn ranking(
        &self,
        dimension: RefusalDimension,
        policy: Option<&str>,
        limit: usize,
    ) -> RefusalRanking {
        let since_s = self.generation_starts.lock().previous_s;
        let (mut sums, mut total, mut max_unlisted) =
            (HashMap::<u128, MergedCount>::default(), 0, 0);
        for worker in &self.workers {
            let generations = worker.generations(dimension).lock();
            for sketch in [&generations.current, &generations.previous] {
                total += sketch.total;
                max_unlisted += sketch.min_count();
                sketch.merge_into(&mut sums, policy);
            }
        }
        // Who is not in a sketch may have been refused there as often as its smallest.
        let estimates = sums.into_values().map(|sum| {
            let absent = max_unlisted - sum.floor_sum;
            RefusalEntry {
                count: sum.entry.count + absent,
                max_error: sum.entry.max_error + absent,
                ..sum.entry
            }
        });
        let mut entries: Vec<RefusalEntry> = estimates.collect();
        entries.sort_by(|a, b| {
            let order = |entry: &RefusalEntry| (std::cmp::Reverse(entry.count), entry.max_error);
            order(a)
                .cmp(&order(b))
                .then_with(|| (&a.policy, &a.text).cmp(&(&b.policy, &b.text)))
        });
        entries.truncate(limit);
        RefusalRanking {
            entries,
            total,
            max_unlisted,
            since_s,
        }
    }
}

/// What the sketches that have an item say of it together.
struct MergedCount {
    entry: RefusalEntry,
    /// The smallest counts of those sketches.
    floor_sum: u64,
}

impl SpaceSavingSketch {
    fn add(&mut self, id: u128, policy: &Arc<str>, text: impl FnOnce() -> String) {
        self.total += 1;
        let at = match self.positions.get(&id) {
            Some(at) => *at,
            None => {
                let error = self.min_count();
                let item = SketchItem {
                    id,
                    max_error: error,
                    policy: Arc::clone(policy),
                    text: text().into(),
                };
                self.claim_counter(item)
            }
        };
        // The first of those that count as much changes places with it, and it counts more.
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

    /// Gives an item a counter: a new one, or the smallest. Returns where.
    fn claim_counter(&mut self, item: SketchItem) -> usize {
        if self.items.len() < CAPACITY {
            self.positions.insert(item.id, self.items.len());
            self.counts.push(0);
            self.items.push(item);
        } else if let Some(last) = self.items.last_mut() {
            self.positions.remove(&last.id);
            *last = item;
            self.positions.insert(last.id, CAPACITY - 1);
        }
        self.items.len() - 1
    }

    /// How often at most an item was added that is not here.
    fn min_count(&self) -> u64 {
        if self.items.len() < CAPACITY {
            0
        } else {
            self.counts.last().copied().unwrap_or_default()
        }
    }

    fn merge_into(&self, sums: &mut HashMap<u128, MergedCount>, policy: Option<&str>) {
        let min_count = self.min_count();
        let items = self.items.iter().zip(&self.counts);
        for (item, count) in
            items.filter(|(item, _)| policy.is_none_or(|policy| *item.policy == *policy))
        {
            let sum = sums.entry(item.id).or_insert_with(|| MergedCount {
                entry: RefusalEntry {
                    policy: Arc::clone(&item.policy),
                    text: item.text.clone(),
                    count: 0,
                    max_error: 0,
                },
                floor_sum: 0,
            });
            sum.entry.count += count;
            sum.entry.max_error += item.max_error;
            sum.floor_sum += min_count;
        }
    }
}

fn escape_path(path: &str) -> String {
    // What will be cut away need not be escaped.
    let end = path.floor_char_boundary(MAX_TEXT_BYTES + 1);
    let start = path.split_at_checked(end).map_or(path, |(start, _)| start);
    truncate_text(utf8_percent_encode(start, ESCAPED_CHARACTERS).to_string())
}

/// Of ASCII.
fn truncate_text(mut text: String) -> String {
    if text.len() > MAX_TEXT_BYTES {
        text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES - TRUNCATION_MARK.len()));
        text.push_str(TRUNCATION_MARK);
    }
    text
}

#[cfg(test)]
mod tests;
