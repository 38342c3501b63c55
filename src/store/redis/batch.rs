//! Several questions in one call: what is sent, and what each caller is told.
//!
//! Who asks the same of the same counter is answered with one decision, in the order of arrival: the first that fit
//! are admitted. That is what they would have got one by one at the same time, as nothing that touches the counter
//! stands between them.

use super::failure::Failure;
use super::script::{self, Script};
use crate::limiter::{Algorithm, Charge, Decision, Limit};
use redis::{Cmd, RedisWrite, Value};
use std::ops::Range;
use std::sync::Arc;

/// Charges after which a call takes no further question: 0.2 to 0.4 ms of the server's time. More would save little, and
/// leave the server without work while the worker tells so many callers.
const MAX_CHARGES: usize = 32;

/// Questions in the order in which they came. It borrows nothing: who asks may leave.
#[derive(Debug, Default)]
pub struct Batch {
    /// Bits of the programs that are needed.
    programs: usize,
    /// Of every charge its key in Redis and what is asked of it.
    text: String,
    charges: Vec<Written>,
    /// Whose counter each charge names, in the order of `charges`.
    owners: Vec<u128>,
    questions: Vec<Question>,
}

/// A charge by its place in the text.
#[derive(Debug)]
struct Written {
    key: Range<usize>,
    ask: Range<usize>,
    question: usize,
}

#[derive(Debug)]
struct Question {
    charges: Range<usize>,
    /// Limit and cost, if others may ask along.
    plain: Option<(Limit, u64)>,
}

/// What a call has brought.
#[derive(Debug)]
pub struct Answers {
    reply: Arc<Reply>,
    /// By question: its part of the reply, and how often it was asked.
    parts: Vec<(Range<usize>, u32)>,
}

/// What it has brought for one caller.
#[derive(Debug)]
pub struct Answer {
    reply: Arc<Reply>,
    part: Range<usize>,
    place: Place,
}

/// One of those who asked the same, counted from 0 in the order of arrival.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) nth: u32,
    pub(super) of: u32,
}

#[derive(Debug)]
struct Reply {
    text: String,
    now_us: u64,
}

impl Batch {
    /// Whether another question has to wait for another call.
    pub fn is_full(&self) -> bool {
        self.charges.len() >= MAX_CHARGES
    }

    /// How many questions there are.
    pub fn len(&self) -> usize {
        self.questions.len()
    }

    pub fn is_empty(&self) -> bool {
        self.questions.is_empty()
    }

    /// Adds a question, or finds the same among those that are there. Returns its number.
    pub fn add(&mut self, script: &Script, charges: &[Charge<'_>]) -> usize {
        let plain = plain(charges);
        if let Some(same) = plain.and_then(|charge| self.same(charge)) {
            return same;
        }
        let (number, first) = (self.questions.len(), self.charges.len());
        for (nth, charge) in charges.iter().enumerate() {
            let start = self.text.len();
            script.push_key(&mut self.text, charge);
            let middle = self.text.len();
            script::push_ask(&mut self.text, charge, charge.limit.requests, nth > 0);
            self.programs |= script::bits_of_charge(charge);
            let written = Written {
                key: start..middle,
                ask: middle..self.text.len(),
                question: number,
            };
            self.charges.push(written);
            self.owners.push(charge.key.id());
        }
        let plain = plain.map(|charge| (*charge.limit, charge.cost));
        self.questions.push(Question {
            charges: first..self.charges.len(),
            plain,
        });
        number
    }

    /// The last question about the charge's counter, if it asks just this.
    fn same(&self, charge: &Charge<'_>) -> Option<usize> {
        let last = self
            .owners
            .iter()
            .rposition(|owner| *owner == charge.key.id())?;
        let question = self.charges.get(last)?.question;
        let is_same = self.questions.get(question)?.plain == Some((*charge.limit, charge.cost));
        is_same.then_some(question)
    }

    /// What asks everything, each question as often as `times` says; 0: not at all. `time_us` stands in for the
    /// server's clock in tests.
    pub fn command(&self, script: &Script, times: &[u32], time_us: Option<u64>) -> Cmd {
        let asked = || {
            let questions = self
                .questions
                .iter()
                .zip(times)
                .filter(|(_, times)| **times > 0);
            questions.flat_map(|(question, times)| {
                let charges = self
                    .charges
                    .get(question.charges.clone())
                    .unwrap_or_default();
                charges.iter().map(|charge| (charge, *times))
            })
        };
        let text =
            |range: &Range<usize>| self.text.get(range.clone()).unwrap_or_default().as_bytes();
        let mut command = script.call(self.programs, asked().count());
        for (charge, _) in asked() {
            command.write_arg(text(&charge.key));
        }
        script::push_time(&mut command, time_us);
        let mut ask = Vec::with_capacity(64);
        for (charge, times) in asked() {
            ask.clear();
            ask.extend_from_slice(text(&charge.ask));
            if times > 1 {
                ask.push(b' ');
                ask.extend_from_slice(itoa::Buffer::new().format(times).as_bytes());
            }
            command.write_arg(&ask);
        }
        command
    }

    /// Reads the reply. `None`: it isn't one.
    pub fn answers(&self, reply: Value, times: &[u32]) -> Option<Answers> {
        let Value::BulkString(text) = reply else {
            return None;
        };
        let text = String::from_utf8(text).ok()?;
        let (now, answers) = text.split_once(' ')?;
        let now_us = script::now_us(now)?;
        let (mut lines, mut start) = (answers.split('\n'), now.len() + 1);
        let mut parts = Vec::with_capacity(times.len());
        for times in times {
            let line = if *times > 0 { lines.next()? } else { "" };
            parts.push((start..start + line.len(), *times));
            start += if *times > 0 { line.len() + 1 } else { 0 };
        }
        if lines.next().is_some() {
            return None;
        }
        Some(Answers {
            reply: Arc::new(Reply { text, now_us }),
            parts,
        })
    }
}

impl Answers {
    /// For the `nth` of those who asked a question, from 0 on. `None`: nobody did.
    pub fn of(&self, question: usize, nth: u32) -> Option<Answer> {
        let (part, of) = self.parts.get(question)?.clone();
        (nth < of).then(|| Answer {
            reply: Arc::clone(&self.reply),
            part,
            place: Place { nth, of },
        })
    }
}

impl Answer {
    /// Reads it, for who has asked for these charges.
    ///
    /// # Errors
    /// What is wrong with one of their counters, or with the answer.
    pub fn decision(&self, charges: &[Charge<'_>]) -> Result<Decision, Failure> {
        let text = self.reply.text.get(self.part.clone()).unwrap_or_default();
        if let Some(error) = text.strip_prefix('!') {
            return Err(Failure::of_text(error));
        }
        Script::read(self.reply.now_us, text, charges, self.place).ok_or(Failure::Reply)
    }
}

/// The only charge of a question, if whoever asks the same can be told by the same answer: it takes units or leaves
/// no trace, and what it has taken doesn't depend on who it was.
fn plain<'a, 'b>(charges: &'b [Charge<'a>]) -> Option<&'b Charge<'a>> {
    let [charge] = charges else { return None };
    let adds = match charge.limit.algorithm {
        Algorithm::SlidingLog
        | Algorithm::SlidingWindow { .. }
        | Algorithm::FixedWindow { .. }
        | Algorithm::TokenBucket { warm_up_us: 0, .. } => true,
        Algorithm::TokenBucket { .. }
        | Algorithm::LeakyBucket { .. }
        | Algorithm::Concurrency { .. }
        | Algorithm::Block => false,
    };
    let has_wants = charge.shadow
        || charge.counts_rejected
        || charge.settles
        || charge.wanted_lease().is_some();
    (adds && !has_wants && charge.cost > 0).then_some(charge)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::{Key, KeyBuilder, Lease, Refusal};

    const LIMIT: Limit = Limit {
        requests: 5,
        per_us: 1_000_000,
        algorithm: Algorithm::SlidingLog,
    };

    fn key(policy: &str) -> Key {
        KeyBuilder::new(policy).finish()
    }

    fn asks(command: &Cmd) -> Vec<String> {
        let args = command.args_iter().filter_map(|arg| match arg {
            redis::Arg::Simple(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
            _ => None,
        });
        args.filter(|arg| arg.starts_with("l ") || arg.starts_with("d "))
            .collect()
    }

    #[test]
    fn who_asks_the_same_goes_along_unless_another_question_about_the_counter_stands_between() {
        let (script, a, b) = (Script::new("t"), key("a"), key("b"));
        let line = Limit {
            algorithm: Algorithm::LeakyBucket { max_delay_us: 0 },
            ..LIMIT
        };
        let raised = Limit {
            requests: 6,
            ..LIMIT
        };
        let one = Charge::new(&LIMIT, &a, 1);
        let other = Charge::new(&LIMIT, &b, 1);
        let mut batch = Batch::default();
        let mut add = |charges: &[Charge<'_>]| batch.add(&script, charges);
        assert_eq!(
            [add(&[one]), add(&[other]), add(&[one])],
            [0, 1, 0],
            "b is another counter"
        );
        assert_eq!(add(&[one, other]), 2);
        assert_eq!([add(&[one]), add(&[one])], [3, 3], "the pair came between");
        for (at, charge) in [
            Charge { cost: 2, ..one },
            Charge {
                limit: &raised,
                ..one
            },
            Charge {
                settles: true,
                ..one
            },
            Charge {
                lease: Some(Lease {
                    size: None,
                    ttl_us: 9,
                }),
                wanted: 7,
                ..one
            },
            Charge {
                counts_rejected: true,
                ..one
            },
            Charge {
                shadow: true,
                ..one
            },
            Charge {
                limit: &line,
                ..one
            },
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(add(&[charge]), 4 + at, "{charge:?}");
        }
        assert_eq!(
            [
                add(&[Charge {
                    limit: &line,
                    ..one
                }]),
                add(&[one])
            ],
            [11, 12]
        );
        let times = [2, 1, 1, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0];
        assert_eq!(
            asks(&batch.command(&script, &times, None)),
            [
                "l 0 1 5 1000000 0 2",
                "l 0 1 5 1000000 0",
                "l 0 1 5 1000000 0",
                "l 8 1 5 1000000 0",
                "l 0 1+7+9+4 5 1000000 0",
                "d 0 1 1 1000000 5+0"
            ],
            "nobody is asked for who has left"
        );
    }

    #[test]
    fn the_first_that_fit_are_admitted_and_one_fault_is_one_questions() {
        let (script, keys) = (Script::new("t"), [key("a"), key("b"), key("c")]);
        let charges = keys.each_ref().map(|key| Charge::new(&LIMIT, key, 2));
        let mut batch = Batch::default();
        for charge in &charges {
            batch.add(&script, &[*charge]);
        }
        let reply = "1000 2000 1 2000 2\n!FOREIGN 1\n!@user_script: 9: -OOM command not allowed";
        let answers = batch
            .answers(Value::BulkString(reply.into()), &[3, 2, 1])
            .unwrap();
        let of = |question: usize, nth| {
            answers
                .of(question, nth)
                .unwrap()
                .decision(&charges[question..=question])
        };
        let told: Vec<_> = (0..3).map(|nth| of(0, nth).unwrap()).collect();
        let remaining = told.iter().map(|told| told.standings[0].unwrap().remaining);
        assert_eq!(remaining.collect::<Vec<_>>(), [3, 1, 1]);
        assert_eq!(
            [told[0].admitted, told[1].admitted, told[2].admitted],
            [true, true, false]
        );
        assert_eq!(
            told[2].standings[0].unwrap().refusal,
            Some(Refusal::Until(2000))
        );
        assert_eq!(
            [of(1, 0), of(1, 1)],
            [Err(Failure::WrongType(1)), Err(Failure::WrongType(1))]
        );
        assert_eq!(of(2, 0), Err(Failure::OutOfMemory));
        assert!(answers.of(0, 3).is_none() && answers.of(3, 0).is_none());
    }

    #[test]
    fn what_cannot_be_true_is_no_answer() {
        let (script, key) = (Script::new("t"), key("a"));
        let charge = Charge::new(&LIMIT, &key, 2);
        let mut batch = Batch::default();
        batch.add(&script, &[charge]);
        for lie in [
            "",
            "1000",
            "0 0 1 2000 3",
            "x 0 1 2000 3",
            "1000 0 1 2000 3\n0 1 2000",
        ] {
            assert!(
                batch.answers(Value::BulkString(lie.into()), &[3]).is_none(),
                "{lie}"
            );
        }
        for lie in [
            "",
            "0 1 2000",
            "0 1 2000 2",
            "2000 1 2000 3",
            "2000 1 2000 4",
            "2000 4 2000 2",
            "2000 1 2000 -1",
        ] {
            let reply = Value::BulkString(format!("1000 {lie}").into());
            let answer = batch
                .answers(reply, &[3])
                .unwrap()
                .of(0, 0)
                .unwrap()
                .decision(&[charge]);
            assert_eq!(answer, Err(Failure::Reply), "{lie}");
        }
    }
}
