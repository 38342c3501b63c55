//! Encodes several requests into one call of `decide.lua`, and divides its reply among the callers.
//!
//! Identical requests for the same counter are merged into one decision. Of the merged requests,
//! the first that fit are admitted, in the order of arrival. Separate consecutive decisions would
//! have the same result: the batch runs as one script, so no other request for the counter comes
//! between them.

use super::error::RedisErrorKind;
use super::scripts::{self, CallerPosition, PlainRule, PlainRules, ScriptLibrary, number_charges};
use crate::limiter::{Algorithm, Charge, Decision, Limit, PolicyCharges};
use redis::{Cmd, RedisWrite, Value};
use smallvec::SmallVec;
use std::ops::Range;
use std::sync::Arc;

/// A batch with this many charges accepts no further request. It takes 0.2 to 0.4 ms of the
/// server's time. A larger batch would save little, and leave the server idle while the worker
/// notifies all callers.
const FULL_BATCH_CHARGE_COUNT: usize = 32;

/// Requests in the order of arrival. A batch borrows nothing, because a caller may disconnect.
#[derive(Debug, Default)]
pub struct DecisionBatch {
    /// Flags of the program that decides all charges.
    script_flags: usize,
    /// The key and the argument of every charge, concatenated.
    encoded_text: String,
    requests: Vec<BatchedRequest>,
}

/// A charge as ranges of the encoded text.
#[derive(Debug)]
struct EncodedCharge {
    key_id: u128,
    key_range: Range<usize>,
    argument_range: Range<usize>,
    is_dynamic: bool,
    /// The rule of an ordinary charge.
    plain_rule: Option<PlainRule>,
}

#[derive(Debug)]
struct BatchedRequest {
    charges: SmallVec<[EncodedCharge; 2]>,
    /// Limit and cost, if identical requests may be merged.
    mergeable_charge: Option<(Limit, u64)>,
}

/// The reply to one request of a batch, for one of its callers.
#[derive(Clone, Debug)]
pub struct CallerReply {
    now_us: u64,
    text: Arc<str>,
    position: CallerPosition,
}

impl ScriptLibrary {
    /// Builds the command that decides charges: a batch of one request. `time_us` replaces the
    /// server's clock in tests.
    pub fn decide_command(&self, request: &[PolicyCharges<'_>], time_us: Option<u64>) -> Cmd {
        let mut batch = DecisionBatch::default();
        let read_clock = || time_us.unwrap_or_else(|| self.read_wall_clock());
        batch.add_request(self, request, read_clock);
        batch.build_command(self, &[1], time_us)
    }
}

impl DecisionBatch {
    /// Whether further requests must go to another batch.
    pub fn is_full(&self) -> bool {
        let charges = self.requests.iter().map(|request| request.charges.len());
        charges.sum::<usize>() >= FULL_BATCH_CHARGE_COUNT
    }

    /// The number of distinct requests.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Adds a request, or finds an identical one in the batch. Returns its index.
    pub fn add_or_merge_request(
        &mut self,
        script: &ScriptLibrary,
        request: &[PolicyCharges<'_>],
    ) -> usize {
        let mergeable = find_mergeable_charge(request);
        let identical = mergeable.and_then(|charge| self.find_identical_request(&charge));
        if let Some(existing) = identical {
            return existing;
        }
        let request_index = self.add_request(script, request, || script.read_wall_clock());
        if let (Some(request), Some(charge)) = (self.requests.last_mut(), mergeable) {
            request.mergeable_charge = Some((*charge.limit, charge.cost));
        }
        request_index
    }

    /// Adds a request. Returns its index. `read_clock` is called for a period of a calendar only.
    fn add_request(
        &mut self,
        script: &ScriptLibrary,
        request: &[PolicyCharges<'_>],
        read_clock: impl Fn() -> u64,
    ) -> usize {
        if self.requests.is_empty() {
            self.encoded_text.reserve(192 * request.len());
        }
        let mut encoded_charges: SmallVec<[EncodedCharge; 2]> = SmallVec::new();
        for (policy_number, charge) in number_charges(request) {
            let start = self.encoded_text.len();
            script.push_counter_key(&mut self.encoded_text, charge.counter());
            let key_end = self.encoded_text.len();
            scripts::push_charge_argument(
                &mut self.encoded_text,
                &charge,
                (policy_number, !encoded_charges.is_empty()),
                charge.limit.requests,
                &read_clock,
            );
            self.script_flags |= scripts::program_flags_for_charge(&charge);
            encoded_charges.push(EncodedCharge {
                key_id: charge.key.quota_id(),
                key_range: start..key_end,
                argument_range: key_end..self.encoded_text.len(),
                is_dynamic: charge.name.is_some(),
                plain_rule: PlainRule::from_charge(&charge),
            });
        }
        self.requests.push(BatchedRequest {
            charges: encoded_charges,
            mergeable_charge: None,
        });
        self.requests.len() - 1
    }

    /// The index of the last request for the charge's counter, if it is identical.
    fn find_identical_request(&self, charge: &Charge<'_, '_>) -> Option<usize> {
        let key_id = charge.key.quota_id();
        let mut last_first = self.requests.iter().enumerate().rev();
        let (request_index, last_request) = last_first
            .find(|(_, request)| request.charges.iter().any(|own| own.key_id == key_id))?;
        let is_same = last_request.mergeable_charge == Some((*charge.limit, charge.cost));
        is_same.then_some(request_index)
    }

    /// The only request of a call and its rules, if its charges are ordinary.
    fn plain_request(&self, repeat_counts: &[u32]) -> Option<(&BatchedRequest, PlainRules)> {
        let requests = self.requests.iter().zip(repeat_counts);
        let mut repeated = requests.filter(|(_, repeat_count)| **repeat_count > 0);
        let (request, 1) = repeated.next()? else {
            return None;
        };
        let rules = request.charges.iter().map(|charge| charge.plain_rule);
        let rules = PlainRule::of_request(rules)?;
        repeated.next().is_none().then_some((request, rules))
    }

    /// Builds the command. Each request is decided as often as `repeat_counts` says; a request with
    /// the count 0 is left out. `time_us` replaces the server's clock in tests.
    pub fn build_command(
        &self,
        script: &ScriptLibrary,
        repeat_counts: &[u32],
        time_us: Option<u64>,
    ) -> Cmd {
        let repeated_charges = || {
            let requests = self.requests.iter().zip(repeat_counts);
            let repeated = requests.filter(|(_, repeat_count)| **repeat_count > 0);
            repeated.flat_map(|(request, repeat_count)| {
                request.charges.iter().map(|charge| (charge, *repeat_count))
            })
        };
        let text = |range: &Range<usize>| {
            self.encoded_text
                .get(range.clone())
                .unwrap_or_default()
                .as_bytes()
        };
        if let Some((request, rules)) = self.plain_request(repeat_counts) {
            let mut command = script.start_plain_command(&rules);
            for charge in &request.charges {
                command.write_arg(text(&charge.key_range));
            }
            if let ([PlainRule::Window], [charge]) = (&rules[..], &request.charges[..]) {
                let text = text(&charge.argument_range);
                scripts::push_lone_window_arguments(&mut command, text, time_us);
                return command;
            }
            scripts::push_time_argument(&mut command, time_us);
            for (charge, rule) in request.charges.iter().zip(&rules) {
                let arguments = rule.arguments(text(&charge.argument_range));
                arguments.for_each(|argument| command.write_arg(argument));
            }
            return command;
        }
        let mut command =
            script.start_evalsha_command(self.script_flags, repeated_charges().count());
        for (charge, _) in repeated_charges() {
            command.write_arg(text(&charge.key_range));
        }
        if self.script_flags & scripts::OVERRIDE_FLAG != 0 {
            let mut override_key = String::with_capacity(96);
            for (charge, _) in repeated_charges() {
                if charge.is_dynamic {
                    override_key.clear();
                    script.push_override_key(&mut override_key, charge.key_id);
                    command.write_arg(override_key.as_bytes());
                } else {
                    command.write_arg(text(&charge.key_range));
                }
            }
        }
        scripts::push_time_argument(&mut command, time_us);
        for (charge, repeat_count) in repeated_charges() {
            let argument = text(&charge.argument_range);
            if repeat_count > 1 {
                let mut count = itoa::Buffer::new();
                command
                    .write_arg(&[argument, b" ", count.format(repeat_count).as_bytes()].concat());
            } else {
                command.write_arg(argument);
            }
        }
        command
    }

    /// Parses the reply: one part per request, for its first caller. Returns `None` if it is
    /// invalid.
    pub fn parse_reply(reply: Value, repeat_counts: &[u32]) -> Option<Vec<CallerReply>> {
        let Value::BulkString(text) = reply else {
            return None;
        };
        let text = String::from_utf8(text).ok()?;
        let (now, answers) = text.split_once(' ')?;
        let now_us = scripts::parse_now_us(now)?;
        let mut lines = answers.split('\n');
        let parts = repeat_counts.iter().map(|repeat_count| {
            let text = if *repeat_count > 0 { lines.next()? } else { "" };
            Some(CallerReply {
                now_us,
                text: text.into(),
                position: CallerPosition {
                    index: 0,
                    total: *repeat_count,
                },
            })
        });
        let parts: Vec<CallerReply> = parts.collect::<Option<_>>()?;
        lines.next().is_none().then_some(parts)
    }
}

impl CallerReply {
    /// The reply to the same request for the caller with this index.
    pub fn for_caller(&self, index: u32) -> Self {
        let mut reply = self.clone();
        reply.position.index = index;
        reply
    }

    /// Parses the decision for these charges.
    ///
    /// # Errors
    /// The error of one of their counters, or of the reply.
    pub fn parse_decision(
        &self,
        request: &[PolicyCharges<'_>],
    ) -> Result<Decision, RedisErrorKind> {
        if let Some(error) = self.text.strip_prefix('!') {
            return Err(RedisErrorKind::from_error_text(error));
        }
        ScriptLibrary::parse_request_decision(self.now_us, &self.text, request, self.position)
            .ok_or(RedisErrorKind::InvalidReply)
    }
}

/// Returns the only charge of a request if identical requests can be merged: it has no options, and
/// its effect does not depend on the caller.
fn find_mergeable_charge<'r, 'a>(request: &'r [PolicyCharges<'a>]) -> Option<Charge<'r, 'a>> {
    let [policy] = request else { return None };
    let charge = policy
        .charges()
        .next()
        .filter(|_| policy.limits.len() == 1)?;
    let is_additive = match charge.limit.algorithm {
        Algorithm::SlidingLog
        | Algorithm::SlidingWindow { .. }
        | Algorithm::FixedWindow { .. }
        | Algorithm::CalendarWindow { .. }
        | Algorithm::TokenBucket { warm_up_us: 0, .. } => true,
        Algorithm::TokenBucket { .. }
        | Algorithm::LeakyBucket { .. }
        | Algorithm::Concurrency { .. }
        | Algorithm::Block => false,
    };
    (is_additive && !scripts::has_options(&charge) && charge.cost > 0).then_some(charge)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::{Key, KeyBuilder, LeaseTerms, Refusal};

    const LIMIT: Limit = Limit {
        requests: 5,
        per_us: 1_000_000,
        algorithm: Algorithm::SlidingLog,
    };

    fn key(policy: &str) -> Key {
        KeyBuilder::new(policy).finish()
    }

    fn charge_arguments(command: &Cmd) -> Vec<String> {
        let args = command.args_iter().filter_map(|arg| match arg {
            redis::Arg::Simple(bytes) => Some(String::from_utf8_lossy(bytes).into_owned()),
            _ => None,
        });
        args.filter(|arg| arg.starts_with("l ") || arg.starts_with("d "))
            .collect()
    }

    #[test]
    #[allow(clippy::too_many_lines, reason = "a table of cases")]
    fn identical_requests_are_merged_unless_another_request_for_the_counter_is_between_them() {
        let (script, a, b) = (ScriptLibrary::new("t"), key("a"), key("b"));
        let leaky_bucket = Limit {
            algorithm: Algorithm::LeakyBucket { max_delay_us: 0 },
            ..LIMIT
        };
        let raised = Limit {
            requests: 6,
            ..LIMIT
        };
        let one = &PolicyCharges::new(&LIMIT, &a, 1);
        let other = &PolicyCharges::new(&LIMIT, &b, 1);
        let mut batch = DecisionBatch::default();
        let mut add = |request: &[&PolicyCharges<'_>]| {
            let request: Vec<_> = request.iter().map(|policy| (*policy).clone()).collect();
            batch.add_or_merge_request(&script, &request)
        };
        assert_eq!(
            [add(&[one]), add(&[other]), add(&[one])],
            [0, 1, 0],
            "b is another counter"
        );
        assert_eq!(add(&[one, other]), 2);
        assert_eq!(
            [add(&[one]), add(&[one])],
            [3, 3],
            "the pair is between them"
        );
        for (at, charge) in [
            one.with_cost(2),
            one.with_limit(&raised),
            one.with_estimate(),
            PolicyCharges {
                lease: Some(LeaseTerms {
                    size: None,
                    ttl_us: 9,
                }),
                requested_lease_units: 7,
                ..one.clone()
            },
            PolicyCharges {
                counts_rejected: true,
                ..one.clone()
            },
            PolicyCharges {
                shadow: true,
                ..one.clone()
            },
            one.with_limit(&leaky_bucket),
        ]
        .into_iter()
        .enumerate()
        {
            assert_eq!(add(&[&charge]), 4 + at, "{charge:?}");
        }
        assert_eq!(
            [add(&[&one.with_limit(&leaky_bucket)]), add(&[one])],
            [11, 12]
        );
        let repeat_counts = [2, 1, 1, 0, 0, 0, 0, 1, 0, 0, 1, 0, 0];
        assert_eq!(
            charge_arguments(&batch.build_command(&script, &repeat_counts, None)),
            [
                "l 0 1 5 1000000 0 2",
                "l 0 1 5 1000000 0",
                "l 0 1 5 1000000 0",
                "l 40 1 5 1000000 0",
                "l 0 1+7+9+4 5 1000000 0",
                "d 0 1 1 1000000 5+0"
            ],
            "requests without waiting callers are left out"
        );
    }

    #[test]
    fn admits_merged_callers_in_order_and_reports_an_error_to_its_request_only() {
        let keys = [key("a"), key("b"), key("c")];
        let charges = keys
            .each_ref()
            .map(|key| PolicyCharges::new(&LIMIT, key, 2));
        let reply = "1000 2000 1 2000 2\n!FOREIGN 1\n!@user_script: 9: -OOM command not allowed";
        let answers =
            DecisionBatch::parse_reply(Value::BulkString(reply.into()), &[3, 2, 1]).unwrap();
        let caller_decision = |request: usize, nth| {
            answers[request]
                .for_caller(nth)
                .parse_decision(&charges[request..=request])
        };
        let decisions: Vec<_> = (0..3).map(|nth| caller_decision(0, nth).unwrap()).collect();
        let remaining = decisions
            .iter()
            .map(|decision| decision.statuses().next().unwrap().remaining);
        assert_eq!(remaining.collect::<Vec<_>>(), [3, 1, 1]);
        assert_eq!(
            [
                decisions[0].admitted,
                decisions[1].admitted,
                decisions[2].admitted
            ],
            [true, true, false]
        );
        assert_eq!(
            decisions[2].statuses().next().unwrap().refusal,
            Some(Refusal::Until(2000))
        );
        assert_eq!(
            [caller_decision(1, 0), caller_decision(1, 1)],
            [
                Err(RedisErrorKind::WrongType(1)),
                Err(RedisErrorKind::WrongType(1))
            ]
        );
        assert_eq!(caller_decision(2, 0), Err(RedisErrorKind::OutOfMemory));
        assert_eq!(answers.len(), 3);
    }

    #[test]
    fn a_batch_reply_of_impossible_form_is_rejected() {
        let key = key("a");
        let charge = [PolicyCharges::new(&LIMIT, &key, 2)];
        for invalid in [
            "",
            "1000",
            "0 0 1 2000 3",
            "x 0 1 2000 3",
            "1000 0 1 2000 3\n0 1 2000",
        ] {
            assert!(
                DecisionBatch::parse_reply(Value::BulkString(invalid.into()), &[3]).is_none(),
                "{invalid}"
            );
        }
        for invalid in [
            "",
            "0 1 2000",
            "0 1 2000 2",
            "2000 1 2000 3",
            "2000 1 2000 4",
            "2000 4 2000 2",
            "2000 1 2000 -1",
        ] {
            let reply = Value::BulkString(format!("1000 {invalid}").into());
            let answer =
                DecisionBatch::parse_reply(reply, &[3]).unwrap()[0].parse_decision(&charge);
            assert_eq!(answer, Err(RedisErrorKind::InvalidReply), "{invalid}");
        }
    }
}
