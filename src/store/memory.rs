//! Counters in this process, bounded by number and by bytes.
//!
//! Keys are spread over shards by their id, which is a cryptographic hash: a shard is a random sample of
//! all keys, and nobody can aim at one. A question locks the shards of all its keys, in ascending order,
//! so that it is one atomic step.
//!
//! When a bound is passed, expired keys go first, then those with the least of their quota used, so that
//! nobody flushes his own exhausted key by inventing fresh ones. Within a shard that order is exact; with
//! few keys there is only one shard.

use super::Late;
use crate::clock::Clock;
use crate::limiter::{
    Algorithm, Charge, Decision, Effect, Grant, Key, Limit, Refusal, State, View, effect, grants,
};
use foldhash::fast::RandomState;
use indexmap::IndexMap;
use parking_lot::{Mutex, MutexGuard};
use smallvec::SmallVec;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

/// Bounds of the memory store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemorySettings {
    /// Counters kept, at least 1.
    pub max_keys: usize,
    /// Bytes that they may take together, the map's own share included (estimated).
    pub max_bytes: usize,
}

/// Counters of this process.
#[derive(Debug)]
pub struct Memory {
    clock: Clock,
    settings: MemorySettings,
    shards: Box<[Mutex<Shard>]>,
    keys: AtomicUsize,
    bytes: AtomicUsize,
    evicted: AtomicU64,
}

/// Below this many keys the order of eviction is exact over the whole store.
const KEYS_PER_SHARD: usize = 1 << 14;
const MAX_SHARDS: usize = 64;

/// Expired keys looked for with every question, so that memory comes back without pressure.
const SWEPT_PER_CHARGE: usize = 2;

/// Under pressure one part in so many of a shard goes at once, so that a flood pays for few scans.
const EVICTED_SHARE: usize = 64;

/// What names a counter: its key, and [`Limit::identity`].
pub(super) type Id = (u128, Algorithm, u64);

#[derive(Debug, Default)]
struct Shard {
    counters: IndexMap<Id, Counter, RandomState>,
    /// Where [`Shard::sweep`] goes on.
    swept: usize,
    /// The latest time that it decided at.
    newest_us: u64,
}

#[derive(Debug)]
struct Counter {
    state: State,
    expires_at_us: u64,
    /// Share of the quota in use when it was last charged, in 1/65536.
    fullness: u32,
    bytes: usize,
}

impl Memory {
    pub fn new(settings: MemorySettings, clock: Clock) -> Self {
        let shards = (settings.max_keys / KEYS_PER_SHARD)
            .next_power_of_two()
            .clamp(1, MAX_SHARDS);
        Self {
            clock,
            settings,
            shards: (0..shards).map(|_| Mutex::default()).collect(),
            keys: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            evicted: AtomicU64::new(0),
        }
    }

    /// Decides all charges together, as [`super::Store::decide`] says.
    pub fn decide(&self, charges: &[Charge<'_>]) -> Decision {
        self.decide_at(charges, Instant::now())
    }

    /// The same for who has just looked at the clock.
    pub fn decide_at(&self, charges: &[Charge<'_>], asked: Instant) -> Decision {
        let mut held = self.hold(charges);
        let now_us = held.advance(asked);

        let refusals: SmallVec<[Option<Refusal>; 4]> = charges
            .iter()
            .map(|charge| held.look(charge, now_us, |view| view.refusal(charge.cost)))
            .collect();
        let admitted = charges
            .iter()
            .zip(&refusals)
            .all(|(charge, refusal)| charge.shadow || refusal.is_none());

        let settles = charges.iter().any(|charge| charge.settles);
        let (mut delay_us, mut stands_us) = (0, SmallVec::new());
        let standings = charges
            .iter()
            .zip(&refusals)
            .enumerate()
            .map(|(at, (charge, refusal))| {
                let effect = effect(charges, &refusals, at);
                let say = |view: View<'_>| {
                    if effect == Effect::Charge && !charge.shadow {
                        delay_us = view.delay_us().max(delay_us);
                    }
                    if settles {
                        let is_told = charge.settles && effect == Effect::Charge;
                        stands_us.push(is_told.then(|| view.stands_us()));
                    }
                    // Its own knock is in the way of the next.
                    let refusal = if effect == Effect::Press {
                        view.refusal(charge.cost)
                    } else {
                        *refusal
                    };
                    view.standing(refusal)
                };
                match effect {
                    Effect::Nothing => Some(held.look(charge, now_us, say)),
                    Effect::Charge => {
                        held.change(charge, now_us, |state| state.charge(charge, now_us), say)
                    }
                    Effect::Press => {
                        held.change(charge, now_us, |state| state.press(charge, now_us), say)
                    }
                }
            })
            .collect();
        let grants = if admitted {
            held.lend(charges, now_us)
        } else {
            SmallVec::new()
        };
        for (_, shard) in &mut held.shards {
            shard.sweep(self, now_us, SWEPT_PER_CHARGE);
        }
        self.release(held, now_us);
        Decision {
            now_us,
            admitted,
            standings,
            delay_us,
            grants,
            stands_us,
        }
    }

    /// Takes a charge's units, whether they fit or not, and tells how many are in use then. Of 0 units nothing is kept.
    pub fn count_at(&self, charge: &Charge<'_>, asked: Instant) -> u64 {
        let place = self.place_of(charge);
        let Some(shard) = self.shards.get(place) else {
            return 0;
        };
        let mut shard = shard.lock();
        let now_us = self.clock.at_us(asked).max(shard.newest_us);
        shard.newest_us = now_us;
        let used = match charge.cost {
            0 => shard
                .counters
                .get(&id_of(charge))
                .map_or(0, |counter| counter.state.at(charge.limit, now_us).used()),
            _ => shard
                .change(self, charge, now_us, |state| state.charge(charge, now_us))
                .used(),
        };
        shard.sweep(self, now_us, SWEPT_PER_CHARGE);
        drop(shard);
        self.relieve(place, now_us);
        used
    }

    /// Puts charges right, as [`super::Store::amend`] says.
    pub fn amend(&self, late: &[Late<'_>]) {
        for late in late {
            self.put_right(late, |_, _| true);
        }
    }

    /// The same of one counter, if that is here.
    pub(super) fn amend_kept(&self, late: &Late<'_>) -> bool {
        self.put_right(late, |held, charge| held.keeps(charge))
    }

    /// Whether a counter is here.
    pub(super) fn keeps(&self, limit: &Limit, key: &Key) -> bool {
        let charge = Charge::new(limit, key, 0);
        self.hold(&[charge]).keeps(&charge)
    }

    /// Forgets the counters of charges. Returns how many there were.
    pub fn reset(&self, charges: &[Charge<'_>]) -> u64 {
        let mut held = self.hold(charges);
        let kept = charges.iter().filter(|charge| {
            let keeps = held.keeps(charge);
            held.forget(charge);
            keeps
        });
        kept.count() as u64
    }

    /// Forgets a counter, and begins it anew with an amendment.
    pub(super) fn begin(&self, late: &Late<'_>) {
        self.put_right(late, |held, charge| {
            held.forget(charge);
            true
        });
    }

    fn put_right(
        &self,
        late: &Late<'_>,
        prepare: impl FnOnce(&mut Held<'_>, &Charge<'_>) -> bool,
    ) -> bool {
        let charge = Charge::new(late.limit, late.key, 0);
        let mut held = self.hold(&[charge]);
        let now_us = held.advance(Instant::now());
        let wanted = prepare(&mut held, &charge);
        if wanted {
            let amend = |state: &mut State| state.amend(late.limit, late.amendment, now_us);
            held.change(&charge, now_us, amend, |_| ());
        }
        self.release(held, now_us);
        wanted
    }

    /// Lets go of shards that may have grown.
    fn release(&self, held: Held<'_>, now_us: u64) {
        let grown = held.shards.first().map_or(0, |(place, _)| *place);
        drop(held);
        self.relieve(grown, now_us);
    }

    /// Counters held.
    pub fn keys(&self) -> usize {
        self.keys.load(Ordering::Relaxed)
    }

    /// Bytes held, estimated.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Counters that were dropped while they still mattered.
    pub fn evicted(&self) -> u64 {
        self.evicted.load(Ordering::Relaxed)
    }

    /// In ascending order, so that two questions never wait for each other.
    fn hold(&self, charges: &[Charge<'_>]) -> Held<'_> {
        let mut places: SmallVec<[usize; 4]> =
            charges.iter().map(|charge| self.place_of(charge)).collect();
        places.sort_unstable();
        places.dedup();
        let shards = places
            .iter()
            .filter_map(|at| Some((*at, self.shards.get(*at)?.lock())))
            .collect();
        Held {
            memory: self,
            shards,
        }
    }

    /// By the low bits of a cryptographic hash; the number of shards is a power of two.
    fn place_of(&self, charge: &Charge<'_>) -> usize {
        usize::try_from(charge.key.id() & 0xffff).unwrap_or(0) & (self.shards.len() - 1)
    }

    /// Makes room until both bounds hold, beginning with the shard that grew.
    fn relieve(&self, first: usize, now_us: u64) {
        for step in 0..self.shards.len() {
            if !self.is_over() {
                return;
            }
            let Some(shard) = self.shards.get((first + step) % self.shards.len()) else {
                return;
            };
            let mut shard = shard.lock();
            shard.sweep(self, now_us, usize::MAX);
            while self.is_over() && shard.evict_least_used(self) {}
        }
    }

    fn is_over(&self) -> bool {
        self.keys() > self.settings.max_keys || self.bytes() > self.settings.max_bytes
    }
}

fn id_of(charge: &Charge<'_>) -> Id {
    id(charge.limit, charge.key)
}

pub(super) fn id(limit: &Limit, key: &Key) -> Id {
    let (algorithm, per_us) = limit.identity();
    (key.id(), algorithm, per_us)
}

/// The shards of one question, locked together, each with its place.
struct Held<'a> {
    memory: &'a Memory,
    shards: SmallVec<[(usize, MutexGuard<'a, Shard>); 4]>,
}

impl Held<'_> {
    /// Time never goes back: what expired once was perhaps forgotten, and may not come to matter again.
    fn advance(&mut self, asked: Instant) -> u64 {
        let newest_us = self.shards.iter().map(|(_, shard)| shard.newest_us);
        let now_us = newest_us.fold(self.memory.clock.at_us(asked), u64::max);
        for (_, shard) in &mut self.shards {
            shard.newest_us = now_us;
        }
        now_us
    }

    /// What `say` says of a charge's counter.
    fn look<T>(&self, charge: &Charge<'_>, now_us: u64, say: impl FnOnce(View<'_>) -> T) -> T {
        let place = self.memory.place_of(charge);
        let shard = self.shards.iter().find(|(at, _)| *at == place);
        match shard.and_then(|(_, shard)| shard.counters.get(&id_of(charge))) {
            Some(counter) => say(counter.state.at(charge.limit, now_us)),
            None => say(charge.limit.fresh().at(charge.limit, now_us)),
        }
    }

    /// Lends what is wanted beside, as far as it is free.
    fn lend(&mut self, charges: &[Charge<'_>], now_us: u64) -> SmallVec<[Grant; 1]> {
        let lends = |charge: &Charge<'_>, until_us| {
            self.look(charge, now_us, |view| view.lends(now_us, until_us))
        };
        let grants = grants(charges, now_us, lends);
        for grant in &grants {
            for charge in charges.iter().filter(|charge| charge.group == grant.group) {
                let Grant {
                    units, until_us, ..
                } = *grant;
                let lend = |state: &mut State| state.lend(charge.limit, units, now_us, until_us);
                self.change(charge, now_us, lend, |_| ());
            }
        }
        grants
    }

    /// Changes a charge's counter, and what `say` says of it then.
    fn change<T>(
        &mut self,
        charge: &Charge<'_>,
        now_us: u64,
        change: impl FnOnce(&mut State),
        say: impl FnOnce(View<'_>) -> T,
    ) -> Option<T> {
        let memory = self.memory;
        self.shard(charge)
            .map(|shard| say(shard.change(memory, charge, now_us, change)))
    }

    fn keeps(&mut self, charge: &Charge<'_>) -> bool {
        self.shard(charge)
            .is_some_and(|shard| shard.counters.contains_key(&id_of(charge)))
    }

    fn forget(&mut self, charge: &Charge<'_>) {
        let memory = self.memory;
        if let Some(shard) = self.shard(charge)
            && let Some(at) = shard.counters.get_index_of(&id_of(charge))
        {
            shard.remove(memory, at);
        }
    }

    fn shard(&mut self, charge: &Charge<'_>) -> Option<&mut Shard> {
        let place = self.memory.place_of(charge);
        self.shards
            .iter_mut()
            .find(|(at, _)| *at == place)
            .map(|(_, shard)| &mut **shard)
    }
}

/// One counter in the map: its slot and its share of the hash index.
const COUNTER_BYTES: usize = size_of::<Id>() + size_of::<Counter>() + 3 * size_of::<usize>();

fn fullness(used: u64, limit: &Limit) -> u32 {
    let share = u128::from(used) * 65_536 / u128::from(limit.capacity().max(1));
    u32::try_from(share).unwrap_or(u32::MAX)
}

impl Shard {
    /// Returns what the counter says afterwards.
    fn change<'a>(
        &'a mut self,
        memory: &Memory,
        charge: &Charge<'a>,
        now_us: u64,
        change: impl FnOnce(&mut State),
    ) -> View<'a> {
        let limit = charge.limit;
        let counter = self.counters.entry(id_of(charge)).or_insert_with(|| {
            memory.keys.fetch_add(1, Ordering::Relaxed);
            memory.bytes.fetch_add(COUNTER_BYTES, Ordering::Relaxed);
            Counter {
                state: limit.fresh(),
                expires_at_us: 0,
                fullness: 0,
                bytes: COUNTER_BYTES,
            }
        });
        change(&mut counter.state);
        counter.expires_at_us = counter.state.expires_at_us(limit);
        let bytes = COUNTER_BYTES + counter.state.heap_bytes();
        if bytes != counter.bytes {
            memory.bytes.fetch_add(bytes, Ordering::Relaxed);
            memory.bytes.fetch_sub(
                std::mem::replace(&mut counter.bytes, bytes),
                Ordering::Relaxed,
            );
        }
        let view = counter.state.at(limit, now_us);
        counter.fullness = fullness(view.used(), limit);
        view
    }

    /// Looks at the next `most` counters and drops the expired ones.
    fn sweep(&mut self, memory: &Memory, now_us: u64, most: usize) {
        for _ in 0..most.min(self.counters.len()) {
            if self.swept >= self.counters.len() {
                self.swept = 0;
            }
            match self.counters.get_index(self.swept) {
                Some((_, counter)) if counter.expires_at_us <= now_us => {
                    self.remove(memory, self.swept)
                }
                _ => self.swept += 1,
            }
        }
    }

    /// Drops the counters with the least of their quota used; of equals those that expire first.
    /// `false` if there is none left.
    fn evict_least_used(&mut self, memory: &Memory) -> bool {
        let count = (self.counters.len() / EVICTED_SHARE).max(1);
        let mut order: Vec<(u32, u64, Id)> = self
            .counters
            .iter()
            .map(|(id, counter)| (counter.fullness, counter.expires_at_us, *id))
            .collect();
        if order.is_empty() {
            return false;
        }
        let count = count.min(order.len());
        order.select_nth_unstable_by_key(count - 1, |(fullness, expires_at_us, _)| {
            (*fullness, *expires_at_us)
        });
        for (_, _, id) in order.iter().take(count) {
            if let Some(at) = self.counters.get_index_of(id) {
                self.remove(memory, at);
                memory.evicted.fetch_add(1, Ordering::Relaxed);
            }
        }
        true
    }

    fn remove(&mut self, memory: &Memory, at: usize) {
        if let Some((_, counter)) = self.counters.swap_remove_index(at) {
            memory.keys.fetch_sub(1, Ordering::Relaxed);
            memory.bytes.fetch_sub(counter.bytes, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::KeyBuilder;

    const LIMIT: Limit = Limit {
        requests: 5,
        per_us: 60_000_000,
        algorithm: Algorithm::SlidingLog,
    };

    fn key(name: usize) -> Key {
        let mut builder = KeyBuilder::new("p");
        builder.part(Some(name.to_string().as_bytes()));
        builder.finish()
    }

    fn ask(memory: &Memory, limit: &Limit, key: &Key) -> bool {
        memory.decide(&[Charge::new(limit, key, 1)]).admitted
    }

    #[test]
    fn nobody_flushes_an_exhausted_key_with_fresh_ones() {
        let (clock, _) = Clock::manual(1_000_000);
        let memory = Memory::new(
            MemorySettings {
                max_keys: 100,
                max_bytes: 1 << 30,
            },
            clock,
        );
        let mine = key(0);
        assert_eq!((0..6).filter(|_| ask(&memory, &LIMIT, &mine)).count(), 5);
        for name in 1..5_000 {
            ask(&memory, &LIMIT, &key(name));
            assert!(memory.keys() <= 100);
        }
        assert!(!ask(&memory, &LIMIT, &mine));
        assert_eq!(memory.evicted(), 4_900);
    }

    #[test]
    fn counting_is_deciding_where_nothing_is_refused() {
        let settings = MemorySettings {
            max_keys: 1000,
            max_bytes: 1 << 30,
        };
        let (clock, hands) = Clock::manual(1_000_000_000);
        let (counts, decides) = (
            Memory::new(settings, clock.clone()),
            Memory::new(settings, clock),
        );
        let mut random = fastrand::Rng::with_seed(7);
        for algorithm in [
            Algorithm::SlidingWindow { buckets: 100 },
            Algorithm::FixedWindow { offset_us: 7 },
        ] {
            let limit = Limit {
                requests: 1 << 40,
                per_us: 60_000_000,
                algorithm,
            };
            for _ in 0..2_000 {
                hands.advance_us(random.u64(..2_000_000));
                let (key, cost) = (key(random.usize(..5)), random.u64(..4));
                let charge = Charge::new(&limit, &key, cost);
                let used = counts.count_at(&charge, Instant::now());
                let standing = decides.decide(&[charge]).standings[0].unwrap();
                assert_eq!(used, limit.requests - standing.remaining);
            }
        }
        assert_eq!(counts.keys(), decides.keys());
        // What a limit would refuse is counted all the same.
        let key = key(9);
        let counted =
            [3, 4].map(|units| counts.count_at(&Charge::new(&LIMIT, &key, units), Instant::now()));
        assert_eq!(counted, [3, 7]);
    }

    #[test]
    fn expired_keys_go_first_and_bytes_are_bounded() {
        let (clock, hands) = Clock::manual(1_000_000);
        let memory = Memory::new(
            MemorySettings {
                max_keys: 1000,
                max_bytes: 10 * COUNTER_BYTES + 1000,
            },
            clock,
        );
        for name in 0..5 {
            ask(&memory, &LIMIT, &key(name));
        }
        hands.advance_us(LIMIT.per_us);
        for name in 5..1000 {
            ask(&memory, &LIMIT, &key(name));
            assert!(memory.bytes() <= 10 * COUNTER_BYTES + 1000);
        }
        assert!(memory.evicted() <= 990, "expired keys are not evictions");
    }

    #[test]
    fn a_store_that_is_idle_for_its_old_keys_gives_their_memory_back() {
        let (clock, hands) = Clock::manual(1_000_000);
        let memory = Memory::new(
            MemorySettings {
                max_keys: 100_000,
                max_bytes: 1 << 30,
            },
            clock,
        );
        for name in 0..1_000 {
            ask(&memory, &LIMIT, &key(name));
        }
        hands.advance_us(LIMIT.per_us);
        let one = key(0);
        for _ in 0..8_000 {
            ask(&memory, &LIMIT, &key(fastrand::usize(0..8)));
        }
        ask(&memory, &LIMIT, &one);
        assert!(memory.keys() < 700, "{}", memory.keys());
        assert_eq!(memory.evicted(), 0);
    }
}
