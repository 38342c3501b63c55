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
const CUT: &str = "...";

/// What can't be taken for a URL's plain text is escaped: nothing here may harm a terminal or a page.
const HARMFUL: &AsciiSet = &CONTROLS
    .add(b' ')
    .add(b'"')
    .add(b'<')
    .add(b'>')
    .add(b'`')
    .add(b'\\');

/// What is ranked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ranked {
    /// A policy's keys: `policy/value/value`.
    Keys,
    /// Paths without their queries, per policy.
    Paths,
}

/// One worker's refusals.
#[derive(Debug, Default)]
pub struct Limited {
    keys: Mutex<Generations>,
    paths: Mutex<Generations>,
}

/// All workers' refusals.
#[derive(Debug)]
pub struct Top {
    workers: Box<[Arc<Limited>]>,
    since: Mutex<Since>,
}

/// Seconds since the Unix epoch; 0 until the first [`Top::tick`].
#[derive(Clone, Copy, Debug, Default)]
struct Since {
    old: u64,
    young: u64,
}

/// Those that were refused most.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ranking {
    /// By count, the highest first.
    pub entries: Vec<Entry>,
    /// All refusals in the time that is covered, of all policies.
    pub total: u64,
    /// Who is not in the whole ranking was refused at most so often.
    pub unseen: u64,
    /// When that time began: seconds since the Unix epoch.
    pub since_s: u64,
}

/// One key or path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub policy: Arc<str>,
    /// Printable ASCII.
    pub text: Box<str>,
    /// Refusals: exact, or too high by at most `error`.
    pub count: u64,
    pub error: u64,
}

#[derive(Debug, Default)]
struct Generations {
    young: Sketch,
    old: Sketch,
}

/// Counters in descending order, so that the smallest is the last. A count grows by one at a time, so an item moves by
/// changing places with the first of those that count as much.
#[derive(Debug, Default)]
struct Sketch {
    places: HashMap<u128, usize>,
    counts: Vec<u64>,
    /// Beside `counts`.
    items: Vec<Item>,
    total: u64,
}

#[derive(Debug)]
struct Item {
    id: u128,
    error: u64,
    policy: Arc<str>,
    text: Box<str>,
}

impl Limited {
    /// A policy refused a key. `id` names policy and key; `text` is made only when it is needed.
    pub fn key(&self, policy: &Arc<str>, id: u128, text: impl FnOnce() -> String) {
        self.keys.lock().young.add(id, policy, || cut(text()));
    }

    /// A policy refused a request with this path.
    pub fn path(&self, policy: &Arc<str>, path: &str) {
        // The same in all workers, and in each process another: nobody can make paths meet.
        static HASHER: LazyLock<RandomState> = LazyLock::new(RandomState::default);
        let id = HASHER.hash_one((&**policy, path));
        self.paths
            .lock()
            .young
            .add(id.into(), policy, || printable(path));
    }

    fn generations(&self, what: Ranked) -> &Mutex<Generations> {
        match what {
            Ranked::Keys => &self.keys,
            Ranked::Paths => &self.paths,
        }
    }
}

impl Top {
    pub(super) fn of(workers: Box<[Arc<Limited>]>) -> Self {
        Self {
            workers,
            since: Mutex::default(),
        }
    }

    /// To be called now and then: begins a new generation when it is time.
    pub fn tick(&self, now_s: u64) {
        let mut since = self.since.lock();
        if since.young == 0 {
            *since = Since {
                old: now_s,
                young: now_s,
            };
        }
        if now_s < since.young.saturating_add(GENERATION_S) {
            return;
        }
        *since = Since {
            old: since.young,
            young: now_s,
        };
        for worker in &self.workers {
            for what in [Ranked::Keys, Ranked::Paths] {
                let mut generations = worker.generations(what).lock();
                let young = std::mem::take(&mut generations.young);
                let forgotten = std::mem::replace(&mut generations.old, young);
                // Before it is dropped, the worker may go on.
                drop(generations);
                drop(forgotten);
            }
        }
    }

    /// The `most` that were refused most often, of one policy or of all.
    pub fn ranking(&self, what: Ranked, policy: Option<&str>, most: usize) -> Ranking {
        let since_s = self.since.lock().old;
        let (mut sums, mut total, mut unseen) = (HashMap::<u128, Sum>::default(), 0, 0);
        for worker in &self.workers {
            let generations = worker.generations(what).lock();
            for sketch in [&generations.young, &generations.old] {
                total += sketch.total;
                unseen += sketch.floor();
                sketch.add_to(&mut sums, policy);
            }
        }
        // Who is not in a sketch may have been refused there as often as its smallest.
        let told = sums.into_values().map(|sum| {
            let absent = unseen - sum.floors;
            Entry {
                count: sum.entry.count + absent,
                error: sum.entry.error + absent,
                ..sum.entry
            }
        });
        let mut entries: Vec<Entry> = told.collect();
        entries.sort_by(|a, b| {
            let order = |entry: &Entry| (std::cmp::Reverse(entry.count), entry.error);
            order(a)
                .cmp(&order(b))
                .then_with(|| (&a.policy, &a.text).cmp(&(&b.policy, &b.text)))
        });
        entries.truncate(most);
        Ranking {
            entries,
            total,
            unseen,
            since_s,
        }
    }
}

/// What the sketches that have an item say of it together.
struct Sum {
    entry: Entry,
    /// The smallest counts of those sketches.
    floors: u64,
}

impl Sketch {
    fn add(&mut self, id: u128, policy: &Arc<str>, text: impl FnOnce() -> String) {
        self.total += 1;
        let at = match self.places.get(&id) {
            Some(at) => *at,
            None => {
                let error = self.floor();
                let item = Item {
                    id,
                    error,
                    policy: Arc::clone(policy),
                    text: text().into(),
                };
                self.place(item)
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
                    self.places.insert(item.id, at);
                }
            }
        }
        if let Some(count) = self.counts.get_mut(first) {
            *count += 1;
        }
    }

    /// Gives an item a counter: a new one, or the smallest. Returns where.
    fn place(&mut self, item: Item) -> usize {
        if self.items.len() < CAPACITY {
            self.places.insert(item.id, self.items.len());
            self.counts.push(0);
            self.items.push(item);
        } else if let Some(last) = self.items.last_mut() {
            self.places.remove(&last.id);
            *last = item;
            self.places.insert(last.id, CAPACITY - 1);
        }
        self.items.len() - 1
    }

    /// How often at most an item was added that is not here.
    fn floor(&self) -> u64 {
        if self.items.len() < CAPACITY {
            0
        } else {
            self.counts.last().copied().unwrap_or_default()
        }
    }

    fn add_to(&self, sums: &mut HashMap<u128, Sum>, policy: Option<&str>) {
        let floor = self.floor();
        let items = self.items.iter().zip(&self.counts);
        for (item, count) in
            items.filter(|(item, _)| policy.is_none_or(|policy| *item.policy == *policy))
        {
            let sum = sums.entry(item.id).or_insert_with(|| Sum {
                entry: Entry {
                    policy: Arc::clone(&item.policy),
                    text: item.text.clone(),
                    count: 0,
                    error: 0,
                },
                floors: 0,
            });
            sum.entry.count += count;
            sum.entry.error += item.error;
            sum.floors += floor;
        }
    }
}

fn printable(path: &str) -> String {
    // What will be cut away need not be escaped.
    let end = path.floor_char_boundary(MAX_TEXT_BYTES + 1);
    let start = path.split_at_checked(end).map_or(path, |(start, _)| start);
    cut(utf8_percent_encode(start, HARMFUL).to_string())
}

/// Of ASCII.
fn cut(mut text: String) -> String {
    if text.len() > MAX_TEXT_BYTES {
        text.truncate(text.floor_char_boundary(MAX_TEXT_BYTES - CUT.len()));
        text.push_str(CUT);
    }
    text
}

#[cfg(test)]
mod tests;
