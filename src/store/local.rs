//! Limiting goes on in this process while Redis is away: `on_store_failure = "local"`.
//!
//! Each instance allows its *share* of every limit ([`Share`]). A key starts from the last answer that Redis gave
//! about it ([`answers`]), and what is admitted is noted ([`debts`]) and written back when Redis is there again.
//!
//! An outage ends in two steps, because instances find Redis again one after the other: who is first would be
//! given what others have admitted and not yet written back. So from the first failure until all instances have
//! written back ([`super::redis`] finds that out) a request has to pass its share *and* Redis, if that answers.
//!
//! Of a cluster some slots may be away while others are not: all this is by parts of the store, and the others go on
//! as if nothing had happened.
//!
//! One per process, shared by its workers.

mod answers;
mod debts;
mod parts;
mod share;

pub use share::Share;

use super::Late;
use super::memory::{Id, Memory, MemorySettings, id};
use crate::clock::Clock;
use crate::limiter::{Algorithm, Amendment, Charge, Decision, Key, Limit, Refusal, Standing};
use answers::Answers;
use debts::Debts;
use parking_lot::Mutex;
use parts::Parts;
use smallvec::SmallVec;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;
use tokio::sync::Notify;

/// Counters that an outage may make; the least used go first.
const COUNTERS: MemorySettings = MemorySettings {
    max_keys: 1 << 17,
    max_bytes: 64 << 20,
};

/// The part of a store that is in one piece.
pub(super) const ALL: u16 = 0;

/// What this process decides by while Redis is away.
#[derive(Debug)]
pub struct Local {
    clock: Clock,
    memory: Memory,
    share: AtomicU64,
    answers: Answers,
    debts: Mutex<Debts>,
    /// There are debts, or some are just being written back: what Redis answers may lack them.
    owes: AtomicBool,
    /// From the first failure until everybody has written back.
    away: AtomicBool,
    /// About what is kept there Redis may not know all.
    lacking: Parts,
    /// Which part keeps a key.
    part_of: fn(&Key) -> u16,
    /// A failure since somebody last asked.
    failed: AtomicBool,
    /// There is something for the background to do.
    changed: Notify,
}

/// Some debts on their way to Redis; see [`Local::owed`].
#[derive(Debug)]
pub struct Owed(Vec<debts::Debt>);

impl Owed {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Local {
    /// For a fleet of so many instances, until more is known.
    pub fn new(instances: u32, clock: Clock) -> Self {
        Self {
            memory: Memory::new(COUNTERS, clock.clone()),
            clock,
            share: AtomicU64::new(Share::assumed(instances).packed()),
            answers: Answers::default(),
            debts: Mutex::default(),
            owes: AtomicBool::new(false),
            away: AtomicBool::new(false),
            lacking: Parts::default(),
            part_of: |_| ALL,
            failed: AtomicBool::new(false),
            changed: Notify::new(),
        }
    }

    /// The same over a store in several parts, of which each may be away.
    pub fn over(self, part_of: fn(&Key) -> u16) -> Self {
        Self { part_of, ..self }
    }

    /// Which part keeps a key.
    pub fn part(&self, key: &Key) -> u16 {
        (self.part_of)(key)
    }

    /// This instance's part of every limit.
    pub fn share(&self) -> Share {
        Share::unpacked(self.share.load(Ordering::Relaxed))
    }

    pub fn set_share(&self, share: Share) {
        self.share.store(share.packed(), Ordering::Relaxed);
    }

    /// Whether an outage is not wholly over, of any part.
    pub fn is_away(&self) -> bool {
        self.away.load(Ordering::Relaxed)
    }

    /// The same, of a part that keeps any of these counters.
    pub fn is_away_for(&self, charges: &[Charge<'_>]) -> bool {
        self.is_away()
            && charges
                .iter()
                .any(|charge| self.lacking.has(self.part(charge.key)))
    }

    /// These parts can't be reached, if any.
    pub fn fail(&self, parts: impl IntoIterator<Item = u16>) {
        let mut parts = parts.into_iter().peekable();
        if parts.peek().is_none() {
            return;
        }
        parts.for_each(|part| self.lacking.add(part));
        // Read first: in an outage every request comes by.
        if !self.failed.load(Ordering::Relaxed) || !self.is_away() {
            self.failed.store(true, Ordering::Relaxed);
            self.away.store(true, Ordering::Relaxed);
            self.changed.notify_one();
        }
    }

    /// Whether Redis could not be reached since this was last asked.
    pub fn has_failed(&self) -> bool {
        self.failed.swap(false, Ordering::Relaxed)
    }

    /// Redis knows all: from now on it decides alone.
    pub fn end(&self) {
        self.away.store(false, Ordering::Relaxed);
        self.paid();
    }

    /// Ends when there is something new to do.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Remembers what Redis said, for the case that it is away next time.
    pub fn remember(&self, charges: &[Charge<'_>], decision: &Decision, at: Instant) {
        for (charge, standing) in charges.iter().zip(&decision.standings) {
            let Some(standing) = standing.filter(|_| is_local(charge)) else {
                continue;
            };
            match charge.limit.algorithm {
                // In flight is what this process says, not what Redis said last.
                Algorithm::Concurrency { .. } if decision.admitted => {
                    let amendment = Amendment::Renew { slot: charge.slot };
                    self.memory.amend(&[Late {
                        limit: charge.limit,
                        key: charge.key,
                        amendment,
                    }]);
                }
                Algorithm::Concurrency { .. } => {}
                _ if !self.may_lack(charge) => {
                    self.answers
                        .insert(charge, standing, decision.now_us, self.clock.at_us(at))
                }
                _ => {}
            }
        }
    }

    /// Decides the charges of `local` policies without Redis, all or nothing; the others have no standing. What is
    /// admitted will be written back.
    pub fn decide(&self, charges: &[Charge<'_>], asked: Instant) -> Decision {
        let share = self.share();
        for charge in charges.iter().filter(|charge| is_local(charge)) {
            self.answers.take(charge, |answer| {
                let limit = share.limit(charge.limit);
                let amendment = answer.units_used(share, &limit, self.clock.at_us(asked));
                self.memory.begin(&Late {
                    limit: &limit,
                    key: charge.key,
                    amendment,
                });
            });
        }
        let decision = self.decide_share(charges, share, asked, is_local);
        if decision.admitted {
            let mut debts = self.debts.lock();
            for charge in charges
                .iter()
                .filter(|charge| is_local(charge) && charge.cost > 0)
            {
                let part = self.part(charge.key);
                self.lacking.add(part);
                debts.note(charge, part, decision.now_us);
            }
            if !debts.is_empty() && !self.owes.swap(true, Ordering::Relaxed) {
                self.changed.notify_one();
            }
        }
        decision
    }

    /// Decides them beside Redis, which has still to be asked: for the end of an outage. `None`: there are none that were
    /// in it.
    pub fn gate(&self, charges: &[Charge<'_>], asked: Instant) -> Option<Decision> {
        let is_ours = |charge: &Charge<'_>| is_local(charge) && self.may_lack(charge);
        charges
            .iter()
            .any(is_ours)
            .then(|| self.decide_share(charges, self.share(), asked, is_ours))
    }

    /// Whether what Redis says about a charge may lack what is still to be written back.
    fn may_lack(&self, charge: &Charge<'_>) -> bool {
        let is_whole = !self.is_away() && !self.owes();
        !is_whole && self.lacking.has(self.part(charge.key))
    }

    fn decide_share(
        &self,
        charges: &[Charge<'_>],
        share: Share,
        asked: Instant,
        is_ours: impl Fn(&Charge<'_>) -> bool,
    ) -> Decision {
        let ours: SmallVec<[(&Charge<'_>, Limit); 4]> = charges
            .iter()
            .filter(|charge| is_ours(charge))
            .map(|charge| (charge, share.limit(charge.limit)))
            .collect();
        let asks: SmallVec<[Charge<'_>; 4]> = ours
            .iter()
            .map(|(charge, limit)| Charge { limit, ..**charge })
            .collect();
        let mut decision = self.memory.decide_at(&asks, asked);
        // Where it is written back it stands elsewhere: further units are charged, and none given back.
        decision.stands_us.clear();
        let mut found = std::mem::take(&mut decision.standings).into_iter();
        let mut standing = |charge: &Charge<'_>| if is_ours(charge) { found.next()? } else { None };
        decision.standings = charges
            .iter()
            .map(|charge| standing(charge).map(|standing| never_only_if_true(charge, standing)))
            .collect();
        decision
    }

    /// Follows what becomes known of charges that were decided here, or whose slots are counted here.
    pub fn amend(&self, late: &[Late<'_>]) {
        for late in late {
            match late.amendment {
                Amendment::Release { slot } => {
                    self.memory.amend_kept(late);
                    self.debts.lock().release(late.limit, late.key, slot);
                }
                Amendment::Renew { .. } => drop(self.memory.amend_kept(late)),
                Amendment::Charge(_) if self.is_away() => drop(self.memory.amend_kept(late)),
                // What is given back is not worth a search: it is too strict, and not for long.
                Amendment::Charge(_) | Amendment::Credit { .. } | Amendment::Back { .. } => {}
            }
        }
    }

    /// Notes what Redis could not be told, if it is further units for what was admitted here. Whether it is.
    pub fn amend_later(&self, late: &Late<'_>) -> bool {
        let Amendment::Charge(units) = late.amendment else {
            return false;
        };
        let is_ours = self.memory.keeps(late.limit, late.key);
        if is_ours {
            let part = self.part(late.key);
            let mut debts = self.debts.lock();
            self.lacking.add(part);
            debts.note(
                &Charge::new(late.limit, late.key, units),
                part,
                self.clock.now_us(),
            );
            self.owes.store(true, Ordering::Relaxed);
        }
        is_ours
    }

    /// Whether something is still to be written back.
    pub fn owes(&self) -> bool {
        self.owes.load(Ordering::Relaxed)
    }

    /// Some of what is to be written back, but nothing to these parts. It is owed until [`Local::paid`] or
    /// [`Local::unpaid`] hears of it.
    pub fn owed(&self, away: impl IntoIterator<Item = u16>) -> Owed {
        let silent = Parts::default();
        away.into_iter().for_each(|part| silent.add(part));
        Owed(self.debts.lock().take(|part| !silent.has(part)))
    }

    /// It was written back.
    pub fn paid(&self) {
        let debts = self.debts.lock();
        self.owes.store(!debts.is_empty(), Ordering::Relaxed);
        if debts.is_empty() && !self.is_away() {
            self.lacking.clear();
        }
    }

    /// These counters were not told, as far as is known; the others were.
    pub fn unpaid<'l>(&self, owed: Owed, untold: impl Iterator<Item = &'l Late<'l>>) {
        let untold: HashSet<Id> = untold.map(|late| id(late.limit, late.key)).collect();
        let left = owed
            .0
            .into_iter()
            .filter(|debt| untold.contains(&debt.id()));
        self.debts.lock().put_back(left);
    }

    /// What Redis has to be told of these debts now: how long ago they were made.
    pub fn amendments(&self, owed: &Owed) -> Vec<(Limit, Key, Amendment)> {
        let now_us = self.clock.now_us();
        let used = |limit: &Limit, key: &Key| {
            let limit = self.share().limit(limit);
            let look = self.memory.decide(&[Charge::new(&limit, key, 0)]);
            let standing = look.standings.first().copied().flatten();
            standing.map_or(0, |standing| {
                limit.capacity().saturating_sub(standing.remaining)
            })
        };
        owed.0
            .iter()
            .flat_map(|debt| debt.amendments(now_us, used))
            .collect()
    }
}

/// What this process may have to decide.
fn is_local(charge: &Charge<'_>) -> bool {
    charge.local && !charge.shadow
}

/// What is above the share only is refused for as long as the outage lasts, and nobody knows how long.
fn never_only_if_true(charge: &Charge<'_>, standing: Standing) -> Standing {
    let is_over = standing.refusal == Some(Refusal::Never);
    let fits = charge.limit.capacity() > 0 && charge.cost <= charge.limit.capacity();
    if is_over && fits {
        Standing {
            refusal: Some(Refusal::Unknown),
            ..standing
        }
    } else {
        standing
    }
}

#[cfg(test)]
mod tests;
