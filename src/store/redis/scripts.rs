//! The Lua programs: their texts, the commands that run them, and the parsers of their replies.

mod counter_key;
mod plain_program;
mod reply;

use crate::clock::Clock;
use crate::limiter::{Algorithm, Amendment, Charge, Limit, PolicyCharges, each_charge};
use crate::store::Settlement;
use plain_program::PLAIN_PROGRAM_COUNT;
use redis::{Arg, Cmd, RedisWrite};
use std::sync::OnceLock;

pub(super) use counter_key::push_hex_id;
pub(super) use plain_program::{PlainRule, PlainRules, push_lone_window_arguments};
pub(super) use reply::{CallerPosition, ServerClock, parse_now_us};

/// A script and its SHA-1 digest for EVALSHA.
#[derive(Debug)]
struct LuaProgram {
    text: String,
    sha: String,
}

/// The file of each algorithm, by its flag bit. A leaky bucket also needs the token bucket.
const ALGORITHM_SOURCES: [&str; 7] = [
    include_str!("../../limiter/sliding_log.lua"),
    include_str!("../../limiter/sliding_window.lua"),
    include_str!("../../limiter/fixed_window.lua"),
    include_str!("../../limiter/token_bucket.lua"),
    include_str!("../../limiter/leaky_bucket.lua"),
    include_str!("../../limiter/concurrency.lua"),
    include_str!("../../limiter/block.lua"),
];

/// Flags for the purposes of a program, above the bits of its algorithms: `SETTLE_FLAG` settles
/// charges, `COUNT_REJECTED_FLAG` counts rejected requests, `LEASE_FLAG` grants leases,
/// `OVERRIDE_FLAG` applies overrides of keys, `CALENDAR_FLAG` counts in periods of calendars.
const SETTLE_FLAG: usize = 1 << ALGORITHM_SOURCES.len();

const COUNT_REJECTED_FLAG: usize = SETTLE_FLAG << 1;

const LEASE_FLAG: usize = COUNT_REJECTED_FLAG << 1;

pub(super) const OVERRIDE_FLAG: usize = LEASE_FLAG << 1;

const CALENDAR_FLAG: usize = OVERRIDE_FLAG << 1;

const PROGRAM_COUNT: usize = CALENDAR_FLAG << 1;

/// Maximum arguments per charge (see `decide.lua` and `settle.lua`).
const MAX_ARGS_PER_CHARGE: usize = 6;

/// The programs for Redis, and the names of the keys that hold their state.
///
/// There is one program per set of algorithms and purposes, and one per list of ordinary limits, built
/// on first use: Redis creates every function again on each call, so a program contains only the
/// needed ones. The texts depend on nothing else, and variable values are arguments, so Redis caches
/// few scripts.
#[derive(Debug)]
pub struct ScriptLibrary {
    programs: [OnceLock<Box<LuaProgram>>; PROGRAM_COUNT],
    /// By the rules of a request.
    plain_programs: [OnceLock<Box<LuaProgram>>; PLAIN_PROGRAM_COUNT],
    /// The start of all keys, up to and including the brace that opens the hash tag.
    counter_key_prefix: String,
    /// Selects the periods of calendars that a call may need.
    clock: Clock,
}

impl ScriptLibrary {
    pub fn new(key_prefix: &str) -> Self {
        Self::with_clock(key_prefix, Clock::system())
    }

    pub fn with_clock(key_prefix: &str, clock: Clock) -> Self {
        // A brace in the prefix would move the hash tag.
        let prefix = key_prefix.replace('{', "%7B").replace('}', "%7D");
        Self {
            programs: [const { OnceLock::new() }; PROGRAM_COUNT],
            plain_programs: [const { OnceLock::new() }; PLAIN_PROGRAM_COUNT],
            counter_key_prefix: format!("{prefix}:v1:{{"),
            clock,
        }
    }

    /// The wall clock of this machine, with the steps that it made since the start.
    pub(super) fn read_wall_clock(&self) -> u64 {
        self.clock.wall_us()
    }

    /// The text of the program that decides these charges.
    pub fn script_text(&self, request: &[PolicyCharges<'_>]) -> &str {
        self.program_for_flags(program_flags_for_request(request))
            .map_or("", |program| &program.text)
    }

    /// Builds the commands that load all programs used since the start.
    pub fn load_commands_for_used_programs(&self) -> redis::Pipeline {
        let mut pipeline = redis::pipe();
        for program in self.used_programs() {
            pipeline.cmd("SCRIPT").arg("LOAD").arg(&program.text);
        }
        pipeline
    }

    /// Builds the EVAL command for an EVALSHA command of a used program. Returns `None` for other
    /// commands.
    pub(super) fn replace_digest_by_text(&self, command: &Cmd) -> Option<Cmd> {
        let mut args = command.args_iter().map(|arg| match arg {
            Arg::Simple(bytes) => bytes,
            _ => b"",
        });
        let digest = args
            .next()
            .filter(|name| *name == b"EVALSHA")
            .and(args.next())?;
        let mut programs = self.used_programs();
        let program = programs.find(|program| program.sha.as_bytes() == digest)?;
        let mut text_command = redis::cmd("EVAL");
        text_command.arg(&program.text);
        args.for_each(|arg| text_command.write_arg(arg));
        Some(text_command)
    }

    /// Builds the command that settles charges.
    pub fn settle_command(&self, settlements: &[Settlement<'_>], time_us: Option<u64>) -> Cmd {
        let algorithms = settlements.iter().fold(SETTLE_FLAG, |flags, settlement| {
            flags | letter_and_flags(settlement.limit.algorithm).1
        });
        let mut command = self.start_evalsha_command(algorithms, settlements.len());
        let mut key = String::with_capacity(192);
        for settlement in settlements {
            key.clear();
            self.push_counter_key(&mut key, settlement.counter());
            command.write_arg(key.as_bytes());
        }
        push_time_argument(&mut command, time_us);
        for settlement in settlements {
            let now_us = || time_us.unwrap_or_else(|| self.read_wall_clock());
            push_settlement_arguments(&mut command, settlement, now_us);
        }
        command
    }

    /// Builds the command that reads the counters of these names, without any change. The charges
    /// have their limits, and no cost.
    pub(super) fn read_command<'n>(
        &self,
        names: impl Iterator<Item = &'n str>,
        request: &[PolicyCharges<'_>],
    ) -> Cmd {
        let flags = program_flags_for_request(request);
        let mut command = self.start_evalsha_command(flags, number_charges(request).count());
        names.for_each(|name| command.write_arg(name.as_bytes()));
        push_time_argument(&mut command, None);
        for (nth, (policy_number, charge)) in number_charges(request).enumerate() {
            let mut argument = String::with_capacity(64);
            let place = (policy_number, nth > 0);
            // With rate 0, a debt is paid back at the rate of its last charge.
            push_charge_argument(&mut argument, &charge, place, 0, || self.read_wall_clock());
            command.write_arg(argument.as_bytes());
        }
        command
    }

    fn used_programs(&self) -> impl Iterator<Item = &LuaProgram> {
        let programs = self.programs.iter().chain(&self.plain_programs);
        programs.filter_map(|program| program.get().map(|program| &**program))
    }

    /// Starts the command that decides a request with these rules.
    pub(super) fn start_plain_command(&self, rules: &[PlainRule]) -> Cmd {
        let programs = self.plain_programs.get(plain_program::program_index(rules));
        let program =
            programs.map(|program| &**program.get_or_init(|| Box::new(LuaProgram::plain(rules))));
        start_command(program, rules.len(), rules.len())
    }

    fn program_for_flags(&self, flags: usize) -> Option<&LuaProgram> {
        self.programs
            .get(flags)
            .map(|program| &**program.get_or_init(|| Box::new(LuaProgram::new(flags))))
    }

    pub(super) fn start_evalsha_command(&self, flags: usize, count: usize) -> Cmd {
        // A program with overrides has two keys per charge.
        let key_count = match flags & OVERRIDE_FLAG {
            0 => count,
            _ => 2 * count,
        };
        start_command(self.program_for_flags(flags), count, key_count)
    }
}

/// Starts an EVALSHA command for `count` charges.
fn start_command(program: Option<&LuaProgram>, count: usize, key_count: usize) -> Cmd {
    let mut command = Cmd::with_capacity(4 + count * (1 + MAX_ARGS_PER_CHARGE), 64 + count * 224);
    let sha = program.map_or("", |program| &program.sha);
    command.arg("EVALSHA").arg(sha).arg(key_count);
    command
}

/// The charges of a request, each with the number of its policy within the call.
pub(super) fn number_charges<'r, 'a>(
    request: &'r [PolicyCharges<'a>],
) -> impl Iterator<Item = (u64, Charge<'r, 'a>)> {
    let policies = (0..).zip(request);
    policies.flat_map(|(number, policy)| policy.charges().map(move |charge| (number, charge)))
}

impl LuaProgram {
    fn new(flags: usize) -> Self {
        let algorithms = ALGORITHM_SOURCES
            .iter()
            .enumerate()
            .filter(|(bit, _)| flags >> bit & 1 == 1)
            .map(|(_, text)| *text);
        let last = if flags & SETTLE_FLAG == 0 {
            include_str!("decide.lua")
        } else {
            include_str!("settle.lua")
        };
        let files = [include_str!("prelude.lua")]
            .into_iter()
            .chain(algorithms)
            .chain([last]);
        let sections = |section: Option<&str>| match section {
            Some("settlements") => flags & SETTLE_FLAG != 0,
            Some("rejected charges") => flags & COUNT_REJECTED_FLAG != 0,
            Some("leases") => flags & LEASE_FLAG != 0,
            Some("overrides") => flags & OVERRIDE_FLAG != 0,
            Some("calendars") => flags & CALENDAR_FLAG != 0,
            section => section.is_none(),
        };
        let files = files.map(|source| strip_source(source, sections));
        Self::from_text(files.collect())
    }

    fn from_text(text: String) -> Self {
        let sha = redis::Script::new(&text).get_hash().to_owned();
        Self { text, sha }
    }
}

/// Removes comments, indentation, and the sections that are not wanted; `None` is the text outside
/// of sections. Redis accepts arguments up to 16 KiB from an unauthenticated connection. After a
/// larger argument, Redis closes the connection instead of reporting the missing login.
fn strip_source(source: &str, is_wanted: impl Fn(Option<&str>) -> bool) -> String {
    let (mut text, mut section) = (String::with_capacity(source.len()), None);
    for line in source.lines().map(str::trim_start) {
        if let Some(name) = line.strip_prefix("-- section: ") {
            section = Some(name);
        } else if line == "-- end section" {
            section = None;
        } else if is_wanted(section) && !line.is_empty() && !line.starts_with("--") {
            text.push_str(line);
            text.push('\n');
        }
    }
    text
}

/// The letter of an algorithm in the arguments of a program, and the flags of its program.
fn letter_and_flags(algorithm: Algorithm) -> (&'static str, usize) {
    match algorithm {
        Algorithm::SlidingLog => ("l", 1),
        Algorithm::SlidingWindow { .. } => ("s", 1 << 1),
        Algorithm::FixedWindow { .. } => ("w", 1 << 2),
        Algorithm::CalendarWindow { .. } => ("p", 1 << 2 | CALENDAR_FLAG),
        Algorithm::TokenBucket { .. } => ("t", 1 << 3),
        Algorithm::LeakyBucket { .. } => ("d", 1 << 3 | 1 << 4),
        Algorithm::Concurrency { .. } => ("c", 1 << 5),
        Algorithm::Block => ("b", 1 << 6),
    }
}

fn program_flags_for_request(request: &[PolicyCharges<'_>]) -> usize {
    each_charge(request).fold(0, |bits, charge| bits | program_flags_for_charge(&charge))
}

/// The flags of the program that decides a charge.
pub(super) fn program_flags_for_charge(charge: &Charge<'_, '_>) -> usize {
    let mut flags = letter_and_flags(charge.limit.algorithm).1;
    if charge.policy.counts_rejected {
        flags |= COUNT_REJECTED_FLAG;
    }
    if charge.policy.requested_lease().is_some() {
        flags |= LEASE_FLAG;
    }
    if charge.name.is_some() {
        flags |= OVERRIDE_FLAG;
    }
    flags
}

/// Whether a charge has options of its policy or a special purpose, apart from overrides.
pub(super) fn has_options(charge: &Charge<'_, '_>) -> bool {
    let policy = charge.policy;
    policy.shadow
        || policy.counts_rejected
        || charge.is_estimate
        || charge.is_read
        || policy.requested_lease().is_some()
}

pub(super) fn push_time_argument(command: &mut Cmd, time_us: Option<u64>) {
    match time_us {
        Some(time_us) => command.arg(time_us),
        None => command.arg(""),
    };
}

/// Appends the argument of a charge. `policy_number` is that of its policy within the request.
/// `follows`: the charge belongs to the same request as the charge before it. `read_clock` is
/// called for a period of a calendar only.
pub(super) fn push_charge_argument(
    text: &mut String,
    charge: &Charge<'_, '_>,
    (policy_number, follows): (u64, bool),
    rate: u64,
    read_clock: impl Fn() -> u64,
) {
    let policy = charge.policy;
    let options = u64::from(policy.shadow)
        + 2 * u64::from(policy.counts_rejected)
        + 4 * u64::from(charge.is_estimate)
        + 8 * u64::from(follows)
        + 16 * u64::from(charge.is_read);
    text.push_str(letter_and_flags(charge.limit.algorithm).0);
    push_numbers(text, ' ', &[policy_number * 32 + options, charge.cost]);
    if let Some(lease) = policy.requested_lease() {
        let units = policy.requested_lease_units;
        push_numbers(text, '+', &[units, lease.ttl_us, lease.divisor()]);
    }
    push_numbers(text, ' ', &[charge.limit.capacity(), charge.limit.per_us]);
    text.push(' ');
    push_algorithm_parameters(text, charge.limit, rate, policy.slot_id, read_clock);
    if let Some(limit_name) = charge.name {
        let limit = charge.limit;
        push_numbers(text, '|', &[limit.max_amount(), limit.max_delay_us()]);
        text.push('|');
        text.push_str(limit_name);
    }
}

/// Appends numbers, each after a separator.
fn push_numbers(text: &mut String, separator: char, numbers: &[u64]) {
    let mut buffer = itoa::Buffer::new();
    for number in numbers {
        text.push(separator);
        text.push_str(buffer.format(*number));
    }
}

fn push_settlement_arguments(
    command: &mut Cmd,
    settlement: &Settlement<'_>,
    read_clock: impl Fn() -> u64,
) {
    let limit = settlement.limit;
    let mut parameters = String::new();
    push_algorithm_parameters(&mut parameters, limit, limit.requests, 0, read_clock);
    let (operation, units, slot, at_us) = match settlement.amendment {
        Amendment::Charge(units) => ("charge", units, None, 0),
        Amendment::BackdatedCharge { units, age_us } => ("charge", units, None, age_us),
        Amendment::Credit { units, at_us } => ("credit", units, None, at_us),
        Amendment::Renew { slot } => ("renew", 0, Some(slot), 0),
        Amendment::Release { slot } => ("release", 0, Some(slot), 0),
    };
    let (letter, _) = letter_and_flags(limit.algorithm);
    command.arg(letter).arg(limit.per_us).arg(parameters);
    command.arg(operation);
    match slot {
        Some(slot) => {
            let mut slot_id = String::with_capacity(33);
            push_slot_id(&mut slot_id, slot);
            command.arg(slot_id)
        }
        None => command.arg(units),
    };
    command.arg(at_us);
}

/// Appends the parameters of a limit's algorithm. `rate`: units that a bucket pays back per period,
/// unless its last charge used a higher rate.
fn push_algorithm_parameters(
    text: &mut String,
    limit: &Limit,
    rate: u64,
    slot: u128,
    read_clock: impl Fn() -> u64,
) {
    let mut push = |first: u64, further: &[u64]| {
        text.push_str(itoa::Buffer::new().format(first));
        push_numbers(text, '+', further);
    };
    match limit.algorithm {
        Algorithm::LeakyBucket { .. } => push(rate, &[limit.max_delay_remainder()]),
        Algorithm::Concurrency { .. } => push_slot_id(text, slot),
        Algorithm::SlidingWindow { .. } => push(limit.sub_window_width_us(), &[]),
        Algorithm::FixedWindow { offset_us } => push(offset_us, &[]),
        Algorithm::CalendarWindow { calendar } => {
            let [first_us, further_us @ ..] = calendar.boundaries_around(read_clock());
            push(first_us, &further_us);
        }
        Algorithm::TokenBucket { burst, warm_up_us } if warm_up_us > 0 => {
            push(rate, &[warm_up_us, burst - limit.cold_capacity()]);
        }
        Algorithm::TokenBucket { .. } => push(rate, &[]),
        Algorithm::SlidingLog | Algorithm::Block => push(0, &[]),
    }
}

/// Appends a slot id. The colon distinguishes the id from a number.
fn push_slot_id(text: &mut String, slot: u128) {
    push_hex_id(text, slot);
    text.push(':');
}

#[cfg(test)]
mod tests;
