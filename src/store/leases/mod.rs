//! Leases: Redis out of the hot path (see ALGORITHMS.md). Units are taken in advance beside an ordinary decision, and
//! handed out here until they end.
//!
//! When little is left, more is asked for in the background. When nothing is left, one asks for himself and for more, and
//! the others wait for that; if it is nothing, all others ask, each for himself: near the limit everybody is decided
//! exactly.

mod book;
#[cfg(test)]
mod fleet;
#[cfg(test)]
mod scale;

use super::redis::Redis;
use super::{Ask, Late, without_hand};
use crate::limiter::{Charge, Decision, Limit, Standing};
use crate::store::Unavailable;
use crate::telemetry::metrics::Source;
use book::{Book, Else, Permit, Return, Taken};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until, timeout, timeout_at};

/// How often at most the book is looked through for what has ended.
const LOOK: Duration = Duration::from_millis(10);

/// The longest that an ending process waits until Redis knows what was not used.
const FLUSH: Duration = Duration::from_secs(1);

/// What the workers of one process have been lent.
#[derive(Debug, Default)]
pub struct Leases {
    book: Book,
    /// Whether a task gives back what has ended.
    is_attended: Mutex<bool>,
}

/// What a request has taken; dropped before it was admitted, that goes back.
#[derive(Debug)]
struct Hand<'l> {
    leases: &'l Arc<Leases>,
    redis: &'l Redis,
    /// Each with the place of its policy's first charge.
    permits: SmallVec<[(usize, Permit); 1]>,
    asking: SmallVec<[Asking; 1]>,
}

/// One asks for a key; dropped, he is done.
#[derive(Debug)]
struct Asking {
    leases: Arc<Leases>,
    key: u128,
}

impl Leases {
    /// Decides charges of which some come with a lease, as [`super::Store::answer`]; `ask` is asked for what isn't in
    /// hand.
    pub(super) async fn answer(
        self: &Arc<Self>,
        ask: Ask<'_>,
        charges: &[Charge<'_>],
        asked: Instant,
    ) -> Result<(Decision, Source), Unavailable> {
        let deadline = asked + ask.redis.timeout();
        // Then there is still time to ask.
        let patience = asked + ask.redis.timeout() / 2;
        // While an outage ends Redis would lend what others have admitted without it and not yet written back.
        let lends = !ask.redis.breaker_open() && !ask.redis.local().is_away_for(charges);
        let mut or = if lends { Else::Wait } else { Else::Nothing };
        let mut now = asked;
        loop {
            let mut hand = Hand {
                leases: self,
                redis: ask.redis,
                permits: SmallVec::new(),
                asking: SmallVec::new(),
            };
            let rest = match hand.take(charges, now, deadline, or) {
                Ok(rest) => rest,
                Err(told) => {
                    drop(hand);
                    drop(timeout_at(patience, told).await);
                    now = Instant::now();
                    or = if now < patience {
                        Else::Wait
                    } else {
                        Else::Ask
                    };
                    continue;
                }
            };
            if rest.is_empty() {
                return Ok((hand.decision(charges, None), Source::Lease));
            }
            let mut others: SmallVec<[Charge<'_>; 4]> =
                rest.iter().map(|(_, charge)| *charge).collect();
            let (decision, source) = match ask.refusal(&others, asked) {
                Some(refusal) => refusal,
                None => {
                    hand.fetch(&mut others);
                    ask.redis(&others, asked).await?
                }
            };
            return Ok((hand.decision(charges, Some((&rest, decision))), source));
        }
    }

    /// Gives everything back, but doesn't take long for it, and lends nothing any more.
    pub(super) async fn finish(&self, redis: &Redis) {
        drop(timeout(FLUSH, self.give_back(redis, self.book.close())).await);
    }

    /// Units that were lent and not used, and of which the store was not told, as far as is known.
    pub fn lost(&self) -> u64 {
        self.book.lost()
    }

    /// What fails is not tried again: it counts until it has left.
    async fn give_back(&self, redis: &Redis, returns: Vec<Return>) {
        let (owners, late): (Vec<&Return>, Vec<Late<'_>>) = returns
            .iter()
            .flat_map(|one| one.late().map(move |late| (one, late)))
            .unzip();
        if late.is_empty() {
            return;
        }
        let untold = match redis.breaker_open() {
            true => (0..late.len()).collect(),
            false => redis
                .amend(&late)
                .await
                .err()
                .map(|untold| untold.places)
                .unwrap_or_default(),
        };
        let mut lost: Vec<&Return> = untold
            .iter()
            .filter_map(|place| owners.get(*place).copied())
            .collect();
        // One that several limits were not told of.
        lost.dedup_by(|one, other| std::ptr::eq(*one, *other));
        self.book.lose(lost.iter().map(|one| one.units()).sum());
    }

    /// As [`Book::due`]; `None` if nothing is lent and nobody attends any more. Who is lent something after that finds
    /// nobody attending.
    fn due(&self) -> Option<(Vec<Return>, Option<Instant>)> {
        let mut is_attended = self.is_attended.lock();
        let (returns, next) = self.book.due(Instant::now());
        *is_attended = next.is_some() || !returns.is_empty();
        is_attended.then_some((returns, next))
    }

    fn asking(self: &Arc<Self>, key: u128) -> Asking {
        Asking {
            leases: Arc::clone(self),
            key,
        }
    }

    /// Asks for more while the rest is handed out.
    fn fetch(asking: Asking, redis: &Redis, policy: &[Charge<'_>], wanted: u64) {
        let Some(Charge {
            key, lease, local, ..
        }) = policy.first()
        else {
            return;
        };
        let (key, redis) = ((*key).clone(), redis.clone());
        let (lease, local) = (*lease, *local);
        let limits: SmallVec<[Limit; 2]> = policy.iter().map(|charge| *charge.limit).collect();
        tokio::spawn(async move {
            let charges = limits.iter().map(|limit| Charge {
                lease,
                wanted,
                local,
                ..Charge::new(limit, &key, 0)
            });
            let (charges, sent): (SmallVec<[_; 2]>, _) = (charges.collect(), Instant::now());
            if let Ok(decision) = redis.decide(&charges, sent).await {
                let local = redis.local();
                local.remember(
                    &charges,
                    &without_hand(&charges, &decision, local.share()),
                    sent.into_std(),
                );
                let leases = &asking.leases;
                leases.book.lent(
                    &charges,
                    &decision.standings,
                    &decision,
                    (sent, Instant::now()),
                );
                leases.attend(&redis);
            }
        });
    }

    fn attend(self: &Arc<Self>, redis: &Redis) {
        if !std::mem::replace(&mut *self.is_attended.lock(), true) {
            tokio::spawn(attend(Arc::clone(self), redis.clone()));
        }
    }
}

/// Gives back what has ended, until nothing is lent.
async fn attend(leases: Arc<Leases>, redis: Redis) {
    while let Some((returns, next)) = leases.due() {
        leases.give_back(&redis, returns).await;
        sleep(LOOK).await;
        let Some(next) = next else { continue };
        tokio::select! {
            () = sleep_until(next) => {}
            () = leases.book.changed() => {}
        }
    }
}

impl Hand<'_> {
    /// Takes what is in hand for each policy with a lease. What is left has to be asked of the store.
    ///
    /// # Errors
    /// What to wait for, if somebody is just asking.
    fn take<'c>(
        &mut self,
        charges: &[Charge<'c>],
        now: Instant,
        deadline: Instant,
        or: Else,
    ) -> Result<SmallVec<[(usize, Charge<'c>); 4]>, tokio::sync::futures::OwnedNotified> {
        let mut rest = SmallVec::new();
        let mut next = 0;
        for policy in charges.chunk_by(Charge::is_of_policy_of) {
            let first = next;
            next += policy.len();
            let mut wanted = 0;
            if let [
                Charge {
                    lease: Some(_),
                    key,
                    ..
                },
                ..,
            ] = policy
            {
                match self.leases.book.take(policy, now, or) {
                    Taken::Permit { permit, wanted } => {
                        self.permits.push((first, permit));
                        if wanted > 0 {
                            Leases::fetch(self.leases.asking(key.id()), self.redis, policy, wanted);
                        }
                        continue;
                    }
                    Taken::Wait(told) => return Err(told),
                    Taken::Ask { wanted: units } => wanted = units,
                }
                if wanted > 0 {
                    self.asking.push(self.leases.asking(key.id()));
                }
            }
            rest.extend(
                (first..)
                    .zip(policy)
                    .map(|(at, charge)| (at, Charge { wanted, ..*charge })),
            );
        }
        if !rest.is_empty() {
            // The store decides when the request is admitted: by then a lease must not have ended.
            let (lasting, ending): (SmallVec<[_; 1]>, SmallVec<[_; 1]>) = self
                .permits
                .drain(..)
                .partition(|(_, permit)| permit.ends > deadline);
            self.permits = lasting;
            for (first, permit) in ending {
                self.leases.book.put_back(&permit);
                let policy = charges
                    .get(first..)
                    .and_then(|rest| rest.chunk_by(Charge::is_of_policy_of).next());
                rest.extend(
                    (first..)
                        .zip(policy.unwrap_or_default())
                        .map(|(at, charge)| (at, *charge)),
                );
            }
            rest.sort_unstable_by_key(|(at, _)| *at);
        }
        Ok(rest)
    }

    /// Asks for leases apart: who asks first may leave, or be refused by another policy or server, and what is lent is
    /// for all. On one connection both questions go in one call.
    fn fetch(&mut self, charges: &mut [Charge<'_>]) {
        for policy in charges.chunk_by_mut(Charge::is_of_policy_of) {
            let wanted = policy.first().map_or(0, |charge| charge.wanted);
            policy.iter_mut().for_each(|charge| charge.wanted = 0);
            let key = policy.first().map(|charge| charge.key.id());
            if let Some(at) = self
                .asking
                .iter()
                .position(|asking| Some(asking.key) == key)
            {
                Leases::fetch(self.asking.remove(at), self.redis, policy, wanted);
            }
        }
    }

    /// Puts what the store has decided beside what was in hand.
    fn decision(
        mut self,
        charges: &[Charge<'_>],
        rest: Option<(&[(usize, Charge<'_>)], Decision)>,
    ) -> Decision {
        let mut standings: SmallVec<[Option<Standing>; 4]> =
            SmallVec::from_elem(None, charges.len());
        for (first, permit) in &self.permits {
            for (place, standing) in standings.iter_mut().skip(*first).zip(&permit.standings) {
                *place = Some(*standing);
            }
        }
        let Some((rest, decision)) = rest else {
            let now_us = self.permits.first().map_or(0, |(_, permit)| permit.now_us);
            self.permits.clear();
            return Decision {
                now_us,
                admitted: true,
                standings,
                delay_us: 0,
                grants: SmallVec::new(),
                stands_us: SmallVec::new(),
            };
        };
        for ((at, _), standing) in rest.iter().zip(decision.standings) {
            if let Some(place) = standings.get_mut(*at) {
                *place = standing;
            }
        }
        let mut stands_us = SmallVec::from_elem(None, charges.len());
        for ((at, _), at_us) in rest.iter().zip(&decision.stands_us) {
            if let Some(place) = stands_us.get_mut(*at) {
                *place = *at_us;
            }
        }
        if decision.admitted {
            self.permits.clear();
        }
        Decision {
            standings,
            stands_us,
            ..decision
        }
    }
}

impl Drop for Hand<'_> {
    fn drop(&mut self) {
        for (_, permit) in &self.permits {
            self.leases.book.put_back(permit);
        }
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        self.leases.book.asked(self.key);
    }
}
