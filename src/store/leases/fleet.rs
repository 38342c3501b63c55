//! A fleet in virtual time: some proxies, one store, and everything that can go wrong between them, by a seed.
//!
//! The proxies run the real book, the store the real rules. What is admitted is judged on the store's clock, at the
//! moment of the decision, or at which a unit was handed out.

use super::book::{Book, Else, Permit, Return, Taken};
use crate::clock::{Clock, Hands};
use crate::limiter::{Algorithm, Charge, Decision, Key, KeyBuilder, Lease, Limit};
use crate::store::{Memory, MemorySettings};
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;
use tokio::time::Instant;

const SEEDS: u64 = 1_000;
const START_US: u64 = 4_102_444_800_000_000;
const TIMEOUT_US: u64 = 5_000;
const LENGTH_US: u64 = 160_000;

#[test]
fn no_bound_is_passed_whatever_becomes_of_the_fleet() {
    let seeds = match std::env::var("TIDEGATE_FLEET_SEED") {
        Ok(seed) => seed.parse().map(|seed: u64| seed..=seed).unwrap(),
        Err(_) => 0..=SEEDS - 1,
    };
    let mut all = Sums::default();
    for seed in seeds {
        let mut world = World::new(seed, false);
        if let Err(why) = world.run() {
            let mut world = World::new(seed, true);
            drop(world.run());
            panic!(
                "{why}\n{}\nTIDEGATE_FLEET_SEED={seed} shows it again",
                world.story.unwrap_or_default().join("\n")
            );
        }
        all.add(&world.sums);
    }
    // Else nothing was tried.
    assert!(all.from_hand > all.by_store / 3, "{all:?}");
    assert!(
        all.crashes > 0 && all.losses > 0 && all.refused > 0 && all.given_back > 0,
        "{all:?}"
    );
}

#[derive(Debug, Default)]
struct Sums {
    from_hand: u64,
    by_store: u64,
    refused: u64,
    unknown: u64,
    given_back: u64,
    crashes: u64,
    losses: u64,
}

impl Sums {
    fn add(&mut self, other: &Self) {
        self.from_hand += other.from_hand;
        self.by_store += other.by_store;
        self.refused += other.refused;
        self.unknown += other.unknown;
        self.given_back += other.given_back;
        self.crashes += other.crashes;
        self.losses += other.losses;
    }
}

struct World {
    random: fastrand::Rng,
    now_us: u64,
    agenda: BinaryHeap<Reverse<(u64, u64, usize)>>,
    events: Vec<Option<Event>>,
    instances: Vec<Instance>,
    key: Key,
    limits: Vec<Limit>,
    memory: Memory,
    hands: Hands,
    /// What was admitted: when, and how many units.
    uses: Vec<(u64, u64)>,
    /// When the store lost its data.
    lost_us: Vec<u64>,
    faults: Faults,
    sums: Sums,
    story: Option<Vec<String>>,
}

/// What may go wrong, in percent.
struct Faults {
    lost_message: u64,
    crash: bool,
    lost_data: bool,
    slowest_us: u64,
}

struct Instance {
    book: Book,
    lease: Option<Lease>,
    /// Its clock: where it began, and how fast it goes, in millionths.
    start: Instant,
    rate: u64,
    /// Grows with every crash: what was meant for the one before is for nobody.
    life: u64,
    cost: u64,
}

enum Event {
    Request {
        instance: usize,
    },
    Asks {
        instance: usize,
        life: u64,
        cost: u64,
        wanted: u64,
        asked: Instant,
        sent_us: u64,
    },
    Hears {
        instance: usize,
        life: u64,
        cost: u64,
        wanted: u64,
        asked: Instant,
        answer: Option<Decision>,
    },
    Decides {
        instance: usize,
        life: u64,
        permit: Permit,
        admitted: bool,
    },
    Looks {
        instance: usize,
        life: u64,
    },
    GivesBack {
        returns: Vec<Return>,
    },
    Crashes {
        instance: usize,
    },
    LosesData,
}

impl World {
    fn new(seed: u64, tells: bool) -> Self {
        let mut random = fastrand::Rng::with_seed(seed);
        let per_us = random.u64(10_000..80_000);
        let requests = random.u64(1..300);
        let mut limits = vec![Limit {
            requests,
            per_us,
            algorithm: algorithm(&mut random, per_us),
        }];
        if random.u8(..3) == 0 {
            let per_us = per_us * random.u64(2..4);
            let requests = requests * random.u64(1..3);
            limits.push(Limit {
                requests,
                per_us,
                algorithm: algorithm(&mut random, per_us),
            });
        }
        let (clock, hands) = Clock::manual(START_US);
        let memory = Memory::new(
            MemorySettings {
                max_keys: 10,
                max_bytes: 1 << 20,
            },
            clock,
        );
        let faults = Faults {
            lost_message: [0, 0, 5, 30][random.usize(..4)],
            crash: random.bool(),
            lost_data: random.u8(..4) == 0,
            slowest_us: [200, 2_000, 20_000][random.usize(..3)],
        };
        let instances = (0..random.usize(3..6))
            .map(|_| Instance::new(&mut random, per_us))
            .collect();
        let mut world = Self {
            random,
            now_us: START_US,
            agenda: BinaryHeap::new(),
            events: Vec::new(),
            instances,
            key: KeyBuilder::new("p").finish(),
            limits,
            memory,
            hands,
            uses: Vec::new(),
            lost_us: Vec::new(),
            faults,
            sums: Sums::default(),
            story: tells.then(Vec::new),
        };
        world.plan();
        world
    }

    /// Puts on the agenda what comes from outside: requests, crashes, losses.
    fn plan(&mut self) {
        // Bursts and pauses; from a third of what is allowed to four times as much.
        let pace_us = self.limits[0].per_us * 3 / self.limits[0].requests / self.random.u64(1..12);
        let mut at_us = START_US;
        while at_us < START_US + LENGTH_US {
            at_us += match self.random.u8(..60) {
                0 => self.limits[0].per_us / 2,
                _ => self.random.u64(0..2 * pace_us.max(10)),
            };
            let instance = self.random.usize(..self.instances.len());
            self.at(at_us, Event::Request { instance });
        }
        for _ in 0..if self.faults.crash {
            self.random.u64(1..8)
        } else {
            0
        } {
            let at_us = START_US + self.random.u64(..LENGTH_US);
            let instance = self.random.usize(..self.instances.len());
            self.at(at_us, Event::Crashes { instance });
        }
        for _ in 0..if self.faults.lost_data {
            self.random.u64(1..3)
        } else {
            0
        } {
            let at_us = START_US + self.random.u64(..LENGTH_US);
            self.at(at_us, Event::LosesData);
        }
    }

    fn at(&mut self, at_us: u64, event: Event) {
        let nth = self.events.len();
        // Events of one moment come in any order.
        self.agenda.push(Reverse((at_us, self.random.u64(..), nth)));
        self.events.push(Some(event));
    }

    /// A message on its way; `None`: it is lost.
    fn arrives_us(&mut self) -> Option<u64> {
        let is_lost = self.random.u64(..100) < self.faults.lost_message;
        let slowest_us = if self.random.u8(..10) == 0 {
            self.faults.slowest_us
        } else {
            200
        };
        let us = self.random.u64(10..slowest_us);
        (!is_lost).then_some(self.now_us + us)
    }

    fn tell(&mut self, text: impl FnOnce() -> String) {
        let now_us = self.now_us - START_US;
        if let Some(story) = &mut self.story {
            story.push(format!("{now_us:>8} {}", text()));
        }
    }

    fn run(&mut self) -> Result<(), String> {
        if let Some(limits) = self.story.is_some().then(|| format!("{:?}", self.limits)) {
            self.tell(|| limits);
        }
        while let Some(Reverse((at_us, _, nth))) = self.agenda.pop() {
            self.now_us = at_us;
            if let Some(event) = self.events[nth].take() {
                self.happens(event);
            }
        }
        self.judge()
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Request { instance } => self.request(instance),
            Event::Asks {
                instance,
                life,
                cost,
                wanted,
                asked,
                sent_us,
            } => {
                let decision = self.store_decides(instance, cost, wanted);
                self.tell(|| {
                    format!(
                        "store to {instance}, sent {}: {decision:?}",
                        sent_us - START_US
                    )
                });
                let in_time = |at_us: &u64| *at_us <= sent_us + TIMEOUT_US;
                let answer = self.arrives_us().filter(in_time);
                if answer.is_some() && decision.admitted && self.instances[instance].life == life {
                    self.uses.push((self.now_us, cost));
                    self.sums.by_store += u64::from(cost > 0);
                }
                self.sums.refused += u64::from(!decision.admitted);
                let (at_us, answer) = match answer {
                    Some(at_us) => (at_us, Some(decision)),
                    None => (sent_us + TIMEOUT_US, None),
                };
                let at_us = at_us.max(self.now_us);
                self.at(
                    at_us,
                    Event::Hears {
                        instance,
                        life,
                        cost,
                        wanted,
                        asked,
                        answer,
                    },
                );
            }
            Event::Hears {
                instance,
                life,
                cost,
                wanted,
                asked,
                answer,
            } => {
                self.hears(instance, life, cost, wanted, asked, answer);
            }
            Event::Decides {
                instance,
                life,
                permit,
                admitted,
            } => {
                if self.instances[instance].life != life {
                } else if admitted {
                    self.hands_out(instance, permit);
                } else {
                    self.instances[instance].book.put_back(&permit);
                }
            }
            Event::Looks { instance, life } if self.instances[instance].life == life => {
                self.looks(instance)
            }
            Event::Looks { .. } => {}
            Event::GivesBack { returns } => {
                self.hands.set_us(self.now_us);
                for late in returns.iter().flat_map(Return::late) {
                    self.tell(|| format!("store gets back {:?}", late.amendment));
                    self.memory.amend(&[late]);
                }
                self.sums.given_back += 1;
            }
            Event::Crashes { instance } => {
                self.tell(|| format!("{instance} crashes"));
                let per_us = self.limits[0].per_us;
                let life = self.instances[instance].life + 1;
                self.instances[instance] = Instance {
                    life,
                    ..Instance::new(&mut self.random, per_us)
                };
                self.sums.crashes += 1;
            }
            Event::LosesData => {
                self.tell(|| "store loses its data".to_owned());
                let (clock, hands) = Clock::manual(self.now_us);
                self.memory = Memory::new(
                    MemorySettings {
                        max_keys: 10,
                        max_bytes: 1 << 20,
                    },
                    clock,
                );
                self.hands = hands;
                self.lost_us.push(self.now_us);
                self.sums.losses += 1;
            }
        }
    }

    fn request(&mut self, at: usize) {
        let instance = &self.instances[at];
        let (life, cost, now) = (instance.life, instance.cost, instance.clock(self.now_us));
        let is_store_known_away = self.random.u8(..50) == 0;
        let or = if is_store_known_away {
            Else::Nothing
        } else {
            Else::Ask
        };
        let taken = {
            let charges = charges(&self.limits, &self.key, cost, instance.lease, 0);
            instance.book.take(&charges, now, or)
        };
        if let Taken::Permit {
            wanted: wanted @ 1..,
            ..
        } = taken
        {
            self.asks(at, 0, wanted, now);
        }
        match taken {
            Taken::Permit { permit, .. } if self.random.u8(..4) > 0 => self.hands_out(at, permit),
            Taken::Permit { permit, .. } => {
                // Another policy has to be asked: that takes time, and it may refuse.
                let deadline = now + Duration::from_micros(TIMEOUT_US);
                if permit.ends <= deadline {
                    self.instances[at].book.put_back(&permit);
                    return self.asks(at, cost, 0, now);
                }
                let slow = self.random.u64(..TIMEOUT_US * 999 / 1_000);
                let admitted = self.random.bool();
                self.at(
                    self.now_us + slow,
                    Event::Decides {
                        instance: at,
                        life,
                        permit,
                        admitted,
                    },
                );
            }
            Taken::Ask { .. } if is_store_known_away => self.sums.unknown += 1,
            Taken::Ask { wanted } => self.asks(at, cost, wanted, now),
            Taken::Wait(_) => unreachable!("nobody was told to wait"),
        }
    }

    fn asks(&mut self, instance: usize, cost: u64, wanted: u64, asked: Instant) {
        let (life, sent_us) = (self.instances[instance].life, self.now_us);
        match self.arrives_us() {
            Some(at_us) => self.at(
                at_us,
                Event::Asks {
                    instance,
                    life,
                    cost,
                    wanted,
                    asked,
                    sent_us,
                },
            ),
            None => {
                let hears = Event::Hears {
                    instance,
                    life,
                    cost,
                    wanted,
                    asked,
                    answer: None,
                };
                self.at(sent_us + TIMEOUT_US, hears);
            }
        }
    }

    fn store_decides(&mut self, instance: usize, cost: u64, wanted: u64) -> Decision {
        self.hands.set_us(self.now_us);
        let charges = charges(
            &self.limits,
            &self.key,
            cost,
            self.instances[instance].lease,
            wanted,
        );
        self.memory.decide(&charges)
    }

    fn hears(
        &mut self,
        at: usize,
        life: u64,
        cost: u64,
        wanted: u64,
        asked: Instant,
        answer: Option<Decision>,
    ) {
        let instance = &self.instances[at];
        if instance.life != life {
            return;
        }
        let Some(decision) = answer else {
            self.sums.unknown += 1;
            if wanted > 0 {
                instance.book.asked(self.key.id());
            }
            return;
        };
        if wanted == 0 {
            return;
        }
        let received = instance.clock(self.now_us);
        {
            let charges = charges(&self.limits, &self.key, cost, instance.lease, wanted);
            instance
                .book
                .lent(&charges, &decision.standings, &decision, (asked, received));
        }
        instance.book.asked(self.key.id());
        if !decision.grants.is_empty() {
            let at_us = self.now_us + self.random.u64(..1_000);
            self.at(at_us, Event::Looks { instance: at, life });
        }
    }

    fn hands_out(&mut self, instance: usize, permit: Permit) {
        let units = permit.units;
        self.tell(|| format!("{instance} hands out {units}"));
        self.uses.push((self.now_us, units));
        self.sums.from_hand += 1;
    }

    /// As the task that attends to the leases does.
    fn looks(&mut self, at: usize) {
        let instance = &self.instances[at];
        let (life, now) = (instance.life, instance.clock(self.now_us));
        let (returns, next) = instance.book.due(now);
        if !returns.is_empty()
            && let Some(at_us) = self.arrives_us()
        {
            self.at(at_us, Event::GivesBack { returns });
        }
        if let Some(next) = next {
            let wait = u64::try_from(next.saturating_duration_since(now).as_micros()).unwrap();
            let at_us = self.now_us + wait.max(1_000) + self.random.u64(..500);
            self.at(at_us, Event::Looks { instance: at, life });
        }
    }

    /// The promise of each limit, and one further limit for each loss of data.
    fn judge(&mut self) -> Result<(), String> {
        self.uses.sort_unstable();
        self.lost_us.sort_unstable();
        for limit in &self.limits {
            if let Algorithm::TokenBucket { burst, .. } = limit.algorithm {
                self.judge_bucket(limit, burst)?;
                continue;
            }
            let per_us = limit.per_us;
            let begins = |at_us: u64| match limit.algorithm {
                Algorithm::FixedWindow { offset_us } => at_us - (at_us - offset_us) % per_us,
                _ => at_us - per_us + 1,
            };
            let (mut first, mut sum) = (0, 0);
            for (at_us, units) in &self.uses {
                sum += units;
                while self.uses[first].0 < begins(*at_us) {
                    sum -= self.uses[first].1;
                    first += 1;
                }
                // What was lost may have been charged one period, or a lease, before.
                let matters =
                    |lost_us: &&u64| **lost_us <= *at_us && **lost_us + 2 * per_us >= *at_us;
                let losses = u64::try_from(self.lost_us.iter().filter(matters).count()).unwrap();
                if sum > limit.requests * (1 + losses) {
                    let at_us = at_us - START_US;
                    return Err(format!(
                        "{sum} units up to {at_us}, after {losses} losses, of {limit:?}"
                    ));
                }
            }
        }
        self.all_is_back()
    }

    /// In any time t no more than burst + rate · t: a debt that is never above burst.
    fn judge_bucket(&self, limit: &Limit, burst: u64) -> Result<(), String> {
        let (mut debt, mut then_us, mut losses) = (0_u64, START_US, self.lost_us.iter().peekable());
        for (at_us, units) in &self.uses {
            while losses.next_if(|lost_us| *lost_us <= at_us).is_some() {
                debt = debt.saturating_sub(burst * limit.per_us);
            }
            debt = debt.saturating_sub((at_us - then_us) * limit.requests) + units * limit.per_us;
            then_us = *at_us;
            if debt > burst * limit.per_us {
                let (debt, at_us) = (debt.div_ceil(limit.per_us), at_us - START_US);
                return Err(format!("{debt} units in debt at {at_us} of {limit:?}"));
            }
        }
        Ok(())
    }

    /// Where nothing went wrong, what was lent and not used is free again.
    fn all_is_back(&mut self) -> Result<(), String> {
        if self.faults.lost_message > 0
            || self.faults.crash
            || self.faults.lost_data
            || self.sums.unknown > 0
        {
            return Ok(());
        }
        self.hands.set_us(self.now_us);
        let charges = charges(&self.limits, &self.key, 0, None, 0);
        let decision = self.memory.decide(&charges);
        for (limit, standing) in self.limits.iter().zip(decision.standings) {
            // Counted at the lease's end at the latest, and up to a sub-window longer.
            let longest_us = limit.per_us + self.limits[0].per_us / 2 + limit.sub_window_us();
            let recent = self
                .uses
                .iter()
                .filter(|(at_us, _)| at_us + longest_us > self.now_us);
            let most = recent.map(|(_, units)| units).sum::<u64>();
            let used = limit.capacity() - standing.unwrap().remaining;
            if used > most {
                return Err(format!(
                    "{used} units in use of {most} admitted lately, of {limit:?}"
                ));
            }
        }
        Ok(())
    }
}

fn algorithm(random: &mut fastrand::Rng, per_us: u64) -> Algorithm {
    match random.u8(..4) {
        0 => Algorithm::SlidingLog,
        1 => Algorithm::SlidingWindow {
            buckets: random.u64(2..20),
        },
        2 => Algorithm::TokenBucket {
            burst: random.u64(1..200),
            warm_up_us: 0,
        },
        _ => Algorithm::FixedWindow {
            offset_us: START_US % per_us,
        },
    }
}

fn charges<'c>(
    limits: &'c [Limit],
    key: &'c Key,
    cost: u64,
    lease: Option<Lease>,
    wanted: u64,
) -> SmallVec<[Charge<'c>; 2]> {
    limits
        .iter()
        .map(|limit| Charge {
            lease,
            wanted,
            ..Charge::new(limit, key, cost)
        })
        .collect()
}

impl Instance {
    /// Some lend, some don't, as during a roll-out; each for its own time.
    fn new(random: &mut fastrand::Rng, per_us: u64) -> Self {
        let ttl_us = random.u64(1_000..=per_us / 2);
        let size = random.bool().then(|| random.u64(1..60));
        Self {
            book: Book::default(),
            lease: (random.u8(..4) > 0).then_some(Lease { size, ttl_us }),
            start: Instant::now(),
            rate: random.u64(996_500..=1_003_500),
            life: 0,
            cost: if random.u8(..4) == 0 {
                random.u64(1..4)
            } else {
                1
            },
        }
    }

    fn clock(&self, now_us: u64) -> Instant {
        self.start + Duration::from_micros((now_us - START_US) * self.rate / 1_000_000)
    }
}
