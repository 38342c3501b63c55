//! A large fleet in virtual time: do the formulas of docs/SCALE.md say what comes of leases and of local shares?
//!
//! The sidecars run the real book, the real memory of refusals and the real shares, the store the real rules. Nothing
//! goes wrong here; what may go wrong is [`super::fleet`]'s.
//!
//! `TIDEGATE_SCALE` says how many sidecars (`make scale`: 1,000), `TIDEGATE_TEST_SEED` what is drawn.

#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::print_stdout,
    reason = "numbers of a simulation, far below any edge, and a table of them"
)]

use super::book::{Book, Else, Return, Taken};
use crate::clock::{Clock, Hands};
use crate::limiter::{Algorithm, Charge, Decision, Key, KeyBuilder, Lease, Limit};
use crate::store::deny_cache::{DenyCache, Fit};
use crate::store::{Local, Memory, MemorySettings, Share};
use std::cmp::{Ordering, Reverse};
use std::collections::{BinaryHeap, VecDeque};
use std::time::Duration;
use tokio::time::Instant;

/// A whole second of the clock, so that windows begin at it.
const START_US: u64 = 4_102_444_800_000_000;
const SECOND_US: u64 = 1_000_000;
const PER_US: u64 = SECOND_US / 2;
const TTL_US: u64 = PER_US / 10;
/// The first periods are for warming up.
const WARM_UP_US: u64 = 2 * PER_US;
const LENGTH_US: u64 = WARM_UP_US + 8 * PER_US;
/// One way between sidecar and store.
const WAY_US: std::ops::Range<u64> = 100..400;
/// Requests of a sidecar per second.
const RATE: u64 = 1_000;
const SIDECARS: u64 = 10;
/// A `sliding_log` takes nothing back of a lease that more charges came after: with more sidecars than this it is
/// [`Algorithm::SlidingWindow`], in so many parts.
const LOGGED: u64 = 200;
const BUCKETS: u64 = 50;

fn setting(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).map_or(otherwise, |number| number.parse().unwrap())
}

/// What comes of a formula and of the simulation, side by side.
fn row(what: &str, says: Option<f64>, comes: f64) {
    let says = says.map_or(String::new(), |says| format!("{says:.4}"));
    println!("| {what} | {says} | {comes:.4} |");
}

fn is_near(what: &str, says: f64, comes: f64, tolerance: f64) {
    row(what, Some(says), comes);
    assert!(
        (comes - says).abs() <= says * tolerance,
        "{what}: {comes}, and the formula says {says}"
    );
}

fn is_at_least(what: &str, says: f64, comes: f64) {
    row(&format!("{what}, at least"), Some(says), comes);
    assert!(
        comes >= says,
        "{what}: {comes}, and the formula says at least {says}"
    );
}

fn is_at_most(what: &str, says: f64, comes: f64) {
    row(&format!("{what}, at most"), Some(says), comes);
    assert!(
        comes <= says,
        "{what}: {comes}, and the formula says at most {says}"
    );
}

#[test]
fn what_leases_cost_and_leave_is_what_the_formulas_say() {
    let (sidecars, seed) = (
        setting("TIDEGATE_SCALE", SIDECARS),
        setting("TIDEGATE_TEST_SEED", 1),
    );
    let (rate, ttl_s) = (RATE as f64, TTL_US as f64 / SECOND_US as f64);
    println!("{sidecars} sidecars, {RATE} requests per second each; TIDEGATE_TEST_SEED={seed}");
    println!("| | formula | simulated |\n|---|---|---|");

    // Far more than is asked for.
    let plenty = sidecars * RATE * 4;
    let in_fours = |size: u64| (size - size / 4) as f64;
    for (name, size, says) in [
        // A lease is spent long before its end.
        ("calls per request, size = 20", Some(20), 1.0 / in_fours(20)),
        // What was asked for in the time of one.
        (
            "calls per request, auto",
            None,
            1.0 / in_fours(RATE * TTL_US / SECOND_US),
        ),
        // It ends before it is spent: one at a time, and the next when somebody asks.
        (
            "calls per request, size = 1000",
            Some(1000),
            1.0 / (rate * (ttl_s + 1.0 / rate)),
        ),
    ] {
        let sums = World::new(sidecars, plenty, size, seed).run();
        is_near(name, says, sums.calls as f64 / sums.requests as f64, 0.2);
        is_at_most("  refused", 0.0, sums.refused as f64);
        if let Some(size) = size {
            is_at_most(
                "  units in hand, of all",
                (size * sidecars) as f64,
                sums.most_in_hand as f64,
            );
        }
    }

    // Two thirds of what is asked for.
    let scarce = sidecars * RATE * 2 / 3;
    let requests = scarce * PER_US / SECOND_US;
    // What is lent stands until a period after its end, so a key that is always spent comes round once in this time;
    // what was counted may have begun and ended in the middle.
    let round_us = PER_US
        + TTL_US
        + if sidecars > LOGGED {
            PER_US / BUCKETS
        } else {
            0
        };
    let rounds = (LENGTH_US - WARM_UP_US) as f64 / round_us as f64;
    let sliding = PER_US as f64 / round_us as f64 * (rounds - 1.0) / rounds;
    for size in [Some(4), Some(20), None] {
        let sums = World::new(sidecars, scarce, size, seed).run();
        let name = size.map_or("auto".to_owned(), |size| format!("size = {size}"));
        // "auto": what is asked for in the time of a lease.
        let in_hand = size.unwrap_or(RATE * TTL_US / SECOND_US) * sidecars;
        let idle = in_hand as f64 / requests as f64;
        is_at_least(
            &format!("used of a limit that is short, {name}"),
            (1.0 - idle) * sliding,
            sums.used(scarce),
        );
        is_at_most(
            "  fullest window, of the limit",
            1.0,
            sums.fullest as f64 / requests as f64,
        );
        row(
            "  calls per request",
            None,
            sums.calls as f64 / sums.requests as f64,
        );
    }
}

#[test]
fn what_shares_allow_and_leave_is_what_the_formulas_say() {
    let (sidecars, seed) = (
        setting("TIDEGATE_SCALE", SIDECARS),
        setting("TIDEGATE_TEST_SEED", 1),
    );
    println!("{sidecars} sidecars without their store; TIDEGATE_TEST_SEED={seed}");
    println!("| | formula | simulated |\n|---|---|---|");
    for each in [1, 4, 25, 100] {
        let requests = sidecars * each + sidecars / 2;
        let (admitted, asked) = shares(sidecars, requests, seed);
        is_at_most(
            &format!("in a window, of {requests}"),
            requests as f64,
            most(&admitted) as f64,
        );
        // Of requests that come at random, as many as there are units, a share loses what comes above it.
        let lost = (0..sidecars).map(|place| {
            let share = requests / sidecars + u64::from(place < requests % sidecars);
            share as f64 * chance(share)
        });
        let says = 1.0 - lost.sum::<f64>() / requests as f64;
        let (all, possible) = (admitted.iter().sum::<u64>(), asked.iter().sum::<u64>());
        is_near(
            "  admitted of what was asked for",
            says,
            all as f64 / possible as f64,
            0.03,
        );
    }
    // Fewer units than instances: some have one, the others none.
    let (admitted, _) = shares(sidecars, sidecars / 4, seed);
    is_at_most(
        "in a window, of a quarter of a unit each",
        (sidecars / 4) as f64,
        most(&admitted) as f64,
    );
}

fn most(admitted: &[u64]) -> u64 {
    admitted.iter().copied().max().unwrap_or(0)
}

/// Admitted and asked in each aligned window, with as many requests as there are units, at random moments and sidecars.
fn shares(sidecars: u64, requests: u64, seed: u64) -> (Vec<u64>, Vec<u64>) {
    let windows = (20_000 / requests).max(4);
    let (clock, hands) = Clock::manual(START_US);
    let count = u32::try_from(sidecars).unwrap();
    let local = |place| {
        let local = Local::new(1, clock.clone());
        local.set_share(Share::seen(count, place));
        local
    };
    let fleet: Vec<Local> = (0..count).map(local).collect();
    let sum: u64 = fleet.iter().map(|local| local.share().of(requests)).sum();
    assert_eq!(sum, requests, "the shares are the limit");
    let limit = Limit {
        requests,
        per_us: PER_US,
        algorithm: Algorithm::FixedWindow { offset_us: 0 },
    };
    let key = KeyBuilder::new("p").finish();
    let charge = [Charge {
        local: true,
        ..Charge::new(&limit, &key, 1)
    }];
    let mut random = fastrand::Rng::with_seed(seed);
    let (mut admitted, mut asked) = (vec![0; windows as usize], vec![0; windows as usize]);
    // Those with one unit more are asked by so much more.
    let weights: Vec<u64> = fleet
        .iter()
        .map(|local| local.share().of(requests))
        .collect();
    let whose: Vec<usize> = weights
        .iter()
        .enumerate()
        .flat_map(|(at, units)| std::iter::repeat_n(at, *units as usize))
        .collect();
    for window in 0..windows {
        let mut at_us = START_US + window * PER_US;
        let end_us = at_us + PER_US;
        loop {
            at_us += gap_us(&mut random, requests as f64 / PER_US as f64);
            if at_us >= end_us {
                break;
            }
            hands.set_us(at_us);
            asked[window as usize] += 1;
            let at = whose[random.usize(..whose.len())];
            let decision = fleet[at].decide(&charge, std::time::Instant::now());
            admitted[window as usize] += u64::from(decision.admitted);
        }
    }
    (admitted, asked)
}

/// That of so many expected events exactly so many come (Poisson): what comes above `mean` is on average `mean` times this.
fn chance(mean: u64) -> f64 {
    let mean_f = mean as f64;
    (1..=mean).fold((-mean_f).exp(), |product, nth| {
        product * mean_f / nth as f64
    })
}

/// Until the next of so many per microsecond that come at random.
fn gap_us(random: &mut fastrand::Rng, rate: f64) -> u64 {
    (-(1.0 - random.f64()).ln() / rate).round() as u64
}

#[derive(Debug, Default)]
struct Sums {
    requests: u64,
    admitted: u64,
    refused: u64,
    /// Questions to the store: who asks for himself and for more asks once.
    calls: u64,
    fullest: u64,
    most_in_hand: u64,
}

impl Sums {
    fn used(&self, rate: u64) -> f64 {
        self.admitted as f64 / (rate as f64 * (LENGTH_US - WARM_UP_US) as f64 / SECOND_US as f64)
    }
}

struct World {
    random: fastrand::Rng,
    now_us: u64,
    start: Instant,
    agenda: BinaryHeap<Planned>,
    planned: u64,
    sidecars: Vec<Sidecar>,
    memory: Memory,
    hands: Hands,
    key: Key,
    limit: Limit,
    lease: Lease,
    /// When the units of the last period were admitted.
    window: VecDeque<u64>,
    in_hand: u64,
    sums: Sums,
}

#[derive(Default)]
struct Sidecar {
    book: Book,
    refusals: DenyCache,
    /// Requests that wait for who asks just now.
    waiting: usize,
    is_attended: bool,
}

struct Planned {
    at_us: u64,
    nth: u64,
    event: Event,
}

enum Event {
    Request {
        sidecar: usize,
    },
    Asks {
        sidecar: usize,
        cost: u64,
        wanted: u64,
        sent: Instant,
    },
    Hears {
        sidecar: usize,
        cost: u64,
        wanted: u64,
        sent: Instant,
        decision: Box<Decision>,
    },
    Looks {
        sidecar: usize,
    },
    GivesBack {
        returns: Vec<Return>,
    },
}

impl World {
    /// With `rate` units per second for all.
    fn new(sidecars: u64, rate: u64, size: Option<u64>, seed: u64) -> Self {
        let (clock, hands) = Clock::manual(START_US);
        let mut world = Self {
            random: fastrand::Rng::with_seed(seed),
            now_us: START_US,
            start: Instant::now(),
            agenda: BinaryHeap::new(),
            planned: 0,
            sidecars: (0..sidecars).map(|_| Sidecar::default()).collect(),
            memory: Memory::new(
                MemorySettings {
                    max_keys: 10,
                    max_bytes: 1 << 30,
                },
                clock,
            ),
            hands,
            key: KeyBuilder::new("p").finish(),
            limit: Limit {
                requests: rate * PER_US / SECOND_US,
                per_us: PER_US,
                algorithm: match sidecars {
                    ..=LOGGED => Algorithm::SlidingLog,
                    _ => Algorithm::SlidingWindow { buckets: BUCKETS },
                },
            },
            lease: Lease {
                size,
                ttl_us: TTL_US,
            },
            window: VecDeque::new(),
            in_hand: 0,
            sums: Sums::default(),
        };
        for sidecar in 0..world.sidecars.len() {
            world.comes_next(sidecar);
        }
        world
    }

    fn run(mut self) -> Sums {
        while let Some(Planned { at_us, event, .. }) = self.agenda.pop() {
            if at_us >= START_US + LENGTH_US {
                break;
            }
            self.now_us = at_us;
            self.happens(event);
        }
        self.sums
    }

    fn plan(&mut self, in_us: u64, event: Event) {
        let (at_us, nth) = (self.now_us + in_us, self.planned);
        self.planned += 1;
        self.agenda.push(Planned { at_us, nth, event });
    }

    fn comes_next(&mut self, sidecar: usize) {
        let in_us = gap_us(&mut self.random, RATE as f64 / SECOND_US as f64);
        self.plan(in_us, Event::Request { sidecar });
    }

    fn clock(&self) -> Instant {
        self.start + Duration::from_micros(self.now_us - START_US)
    }

    /// Whether it counts.
    fn is_warm(&self) -> bool {
        self.now_us >= START_US + WARM_UP_US
    }

    fn charge(&self, cost: u64, wanted: u64) -> Charge<'_> {
        Charge {
            lease: Some(self.lease),
            wanted,
            ..Charge::new(&self.limit, &self.key, cost)
        }
    }

    fn happens(&mut self, event: Event) {
        match event {
            Event::Request { sidecar } => {
                self.sums.requests += u64::from(self.is_warm());
                self.decide(sidecar);
                self.comes_next(sidecar);
            }
            Event::Asks {
                sidecar,
                cost,
                wanted,
                sent,
            } => {
                self.hands.set_us(self.now_us);
                let decision = Box::new(self.memory.decide(&[self.charge(cost, wanted)]));
                if cost > 0 && decision.admitted {
                    self.admit();
                }
                let in_us = self.random.u64(WAY_US);
                self.plan(
                    in_us,
                    Event::Hears {
                        sidecar,
                        cost,
                        wanted,
                        sent,
                        decision,
                    },
                );
            }
            Event::Hears {
                sidecar,
                cost,
                wanted,
                sent,
                decision,
            } => {
                self.hears(sidecar, cost, wanted, sent, &decision);
            }
            Event::Looks { sidecar } => self.looks(sidecar),
            Event::GivesBack { returns } => {
                self.hands.set_us(self.now_us);
                for late in returns.iter().flat_map(Return::late) {
                    self.memory.amend(&[late]);
                }
            }
        }
    }

    /// As [`super::Leases::answer`] does, over one policy.
    fn decide(&mut self, at: usize) {
        let now = self.clock();
        let charges = [self.charge(1, 0)];
        let Sidecar { book, refusals, .. } = &self.sidecars[at];
        match book.take(&charges, now, Else::Wait) {
            Taken::Permit { wanted, .. } => {
                self.in_hand -= 1;
                self.admit();
                if wanted > 0 {
                    self.asks(at, [(0, wanted)]);
                }
            }
            Taken::Wait(_) => self.sidecars[at].waiting += 1,
            Taken::Ask { wanted } => {
                if refusals.recall(&charges, now, Fit::Whole).is_some() {
                    if wanted > 0 {
                        book.asked(self.key.id());
                    }
                    self.refuse();
                } else if wanted > 0 {
                    self.asks(at, [(1, 0), (0, wanted)]);
                } else {
                    self.asks(at, [(1, 0)]);
                }
            }
        }
    }

    /// Questions of some cost, for some units, in one call.
    fn asks(&mut self, sidecar: usize, questions: impl IntoIterator<Item = (u64, u64)>) {
        let (sent, in_us) = (self.clock(), self.random.u64(WAY_US));
        self.sums.calls += u64::from(self.is_warm());
        for (cost, wanted) in questions {
            self.plan(
                in_us,
                Event::Asks {
                    sidecar,
                    cost,
                    wanted,
                    sent,
                },
            );
        }
    }

    fn hears(&mut self, at: usize, cost: u64, wanted: u64, sent: Instant, decision: &Decision) {
        let (received, charges) = (self.clock(), [self.charge(cost, wanted)]);
        if cost > 0 {
            if !decision.admitted {
                self.sidecars[at]
                    .refusals
                    .remember(&charges, decision, sent, received);
                self.refuse();
            }
            return;
        }
        let book = &self.sidecars[at].book;
        book.lent(&charges, &decision.standings, decision, (sent, received));
        book.asked(self.key.id());
        self.in_hand += decision.grants.iter().map(|grant| grant.units).sum::<u64>();
        self.sums.most_in_hand = self.sums.most_in_hand.max(self.in_hand);
        if !std::mem::replace(&mut self.sidecars[at].is_attended, true) {
            self.plan(0, Event::Looks { sidecar: at });
        }
        for _ in 0..std::mem::take(&mut self.sidecars[at].waiting) {
            self.decide(at);
        }
    }

    /// As the task that attends to the leases does.
    fn looks(&mut self, at: usize) {
        let now = self.clock();
        let (returns, next) = self.sidecars[at].book.due(now);
        self.in_hand -= returns.iter().map(Return::units).sum::<u64>();
        self.sidecars[at].is_attended = next.is_some() || !returns.is_empty();
        if !returns.is_empty() {
            let in_us = self.random.u64(WAY_US);
            self.plan(in_us, Event::GivesBack { returns });
        }
        if self.sidecars[at].is_attended {
            let look_us = super::LOOK.as_micros() as u64;
            let wait = next.map_or(Duration::ZERO, |next| next.saturating_duration_since(now));
            self.plan(
                look_us.max(wait.as_micros() as u64 + 1),
                Event::Looks { sidecar: at },
            );
        }
    }

    /// One unit, now.
    fn admit(&mut self) {
        while self
            .window
            .front()
            .is_some_and(|at_us| at_us + self.limit.per_us <= self.now_us)
        {
            self.window.pop_front();
        }
        self.window.push_back(self.now_us);
        self.sums.fullest = self.sums.fullest.max(self.window.len() as u64);
        self.sums.admitted += u64::from(self.is_warm());
    }

    fn refuse(&mut self) {
        self.sums.refused += u64::from(self.is_warm());
    }
}

impl PartialEq for Planned {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Planned {}

impl PartialOrd for Planned {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The earliest is the greatest: a heap gives that first.
impl Ord for Planned {
    fn cmp(&self, other: &Self) -> Ordering {
        Reverse((self.at_us, self.nth)).cmp(&Reverse((other.at_us, other.nth)))
    }
}
