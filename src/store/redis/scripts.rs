//! The Lua programs: their texts, the commands that run them, and the parsers of their replies.

use super::batch::CallerPosition;
use crate::limiter::{
    AUTO_LEASE_DIVISOR, Algorithm, Amendment, Charge, Decision, GrantedUnits, KeyBuilder, Lease,
    Limit, LimitStatus, MAX_UNITS, Refusal,
};
use crate::store::Settlement;
use redis::{Cmd, RedisWrite, Value};
use smallvec::SmallVec;
use std::sync::OnceLock;

/// A readable part of a key longer than this many bytes is left out.
const MAX_READABLE_BYTES: usize = 64;

/// Maximum arguments per charge (see `decide.lua` and `settle.lua`).
const MAX_ARGS_PER_CHARGE: usize = 6;

/// Later times are not exact in a double, so the scripts can't return them.
const MAX_TIME_US: u64 = 1 << 53;

/// The programs for Redis, and the names of the keys that hold their state.
///
/// There is one program per set of algorithms and purposes, built on first use: Redis creates every
/// function again on each call, so a program contains only the needed ones. The texts depend on
/// nothing else, and variable values are arguments, so Redis caches few scripts.
#[derive(Debug)]
pub struct ScriptLibrary {
    programs: [OnceLock<LuaProgram>; PROGRAM_COUNT],
    /// The start of all keys, up to and including the brace that opens the hash tag.
    counter_key_prefix: String,
}

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

/// Purposes of a program, beside the bits of its algorithms: it settles charges; it may count
/// rejected requests; it grants leases.
const SETTLE_FLAG: usize = 1 << ALGORITHM_SOURCES.len();
const COUNT_REJECTED_FLAG: usize = SETTLE_FLAG << 1;
const LEASE_FLAG: usize = COUNT_REJECTED_FLAG << 1;
const PROGRAM_COUNT: usize = LEASE_FLAG << 1;

fn algorithm_flags(algorithm: Algorithm) -> usize {
    match algorithm {
        Algorithm::SlidingLog => 1,
        Algorithm::SlidingWindow { .. } => 1 << 1,
        Algorithm::FixedWindow { .. } => 1 << 2,
        Algorithm::TokenBucket { .. } => 1 << 3,
        Algorithm::LeakyBucket { .. } => 1 << 3 | 1 << 4,
        Algorithm::Concurrency { .. } => 1 << 5,
        Algorithm::Block => 1 << 6,
    }
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
        let text = files
            .map(|source| strip_source(source, flags))
            .collect::<String>();
        let sha = redis::Script::new(&text).get_hash().to_owned();
        Self { text, sha }
    }
}

impl ScriptLibrary {
    pub fn new(key_prefix: &str) -> Self {
        // A brace in the prefix would move the hash tag.
        let prefix = key_prefix.replace('{', "%7B").replace('}', "%7D");
        Self {
            programs: [const { OnceLock::new() }; PROGRAM_COUNT],
            counter_key_prefix: format!("{prefix}:v1:{{"),
        }
    }

    /// The text of the program that decides these charges.
    pub fn script_text(&self, charges: &[Charge<'_>]) -> &str {
        self.program(charges_flags(charges))
            .map_or("", |program| &program.text)
    }

    /// The commands that load all programs used so far.
    pub fn load_pipeline(&self) -> redis::Pipeline {
        let mut pipeline = redis::pipe();
        for program in self.programs.iter().filter_map(OnceLock::get) {
            pipeline.cmd("SCRIPT").arg("LOAD").arg(&program.text);
        }
        pipeline
    }

    /// Builds the command that decides charges. `time_us` replaces the server's clock in tests.
    pub fn decide_command(&self, charges: &[Charge<'_>], time_us: Option<u64>) -> Cmd {
        let mut command = self.start_evalsha(charges_flags(charges), charges.len());
        let mut key = String::with_capacity(192);
        for charge in charges {
            key.clear();
            self.push_counter_key(&mut key, charge);
            command.write_arg(key.as_bytes());
        }
        push_time_argument(&mut command, time_us);
        for (nth, charge) in charges.iter().enumerate() {
            key.clear();
            push_charge_argument(&mut key, charge, charge.limit.requests, nth > 0);
            command.write_arg(key.as_bytes());
        }
        command
    }

    /// Builds the command that settles charges.
    pub fn amend_command(&self, settlements: &[Settlement<'_>], time_us: Option<u64>) -> Cmd {
        let algorithms = settlements.iter().fold(SETTLE_FLAG, |flags, settlement| {
            flags | algorithm_flags(settlement.limit.algorithm)
        });
        let mut command = self.start_evalsha(algorithms, settlements.len());
        let mut key = String::with_capacity(192);
        for settlement in settlements {
            key.clear();
            self.push_counter_key(&mut key, &Charge::new(settlement.limit, settlement.key, 0));
            command.write_arg(key.as_bytes());
        }
        push_time_argument(&mut command, time_us);
        for settlement in settlements {
            push_settlement_arguments(&mut command, settlement);
        }
        command
    }

    /// Builds the command that reads counters by their keys, without any change.
    pub(super) fn read_command(&self, counters: &[(&str, &Limit)]) -> Cmd {
        let placeholder_key = KeyBuilder::new("").finish();
        let charges: Vec<_> = counters
            .iter()
            .map(|(_, limit)| Charge::new(limit, &placeholder_key, 0))
            .collect();
        let mut command = self.start_evalsha(charges_flags(&charges), counters.len());
        for (key, _) in counters {
            command.write_arg(key.as_bytes());
        }
        push_time_argument(&mut command, None);
        let mut argument = String::with_capacity(64);
        for (nth, charge) in charges.iter().enumerate() {
            argument.clear();
            // With rate 0, a debt is paid back at the rate of its last charge.
            push_charge_argument(&mut argument, charge, 0, nth > 0);
            command.write_arg(argument.as_bytes());
        }
        command
    }

    fn program(&self, flags: usize) -> Option<&LuaProgram> {
        self.programs
            .get(flags)
            .map(|program| program.get_or_init(|| LuaProgram::new(flags)))
    }

    pub(super) fn start_evalsha(&self, flags: usize, count: usize) -> Cmd {
        let mut command =
            Cmd::with_capacity(4 + count * (1 + MAX_ARGS_PER_CHARGE), 64 + count * 224);
        command.write_arg(b"EVALSHA");
        let sha = self.program(flags).map_or("", |program| &program.sha);
        command.write_arg(sha.as_bytes());
        command.write_arg(itoa::Buffer::new().format(count).as_bytes());
        command
    }

    /// Parses the reply to [`ScriptLibrary::read_command`]: the time and the status of each
    /// counter. Returns `None` if the reply is invalid.
    pub(super) fn parse_read_reply(
        reply: &Value,
        counters: &[(&str, &Limit)],
    ) -> Option<(u64, Vec<LimitStatus>)> {
        let Value::BulkString(text) = reply else {
            return None;
        };
        let mut numbers = ReplyNumbers::from_text(std::str::from_utf8(text).ok()?);
        let now_us = to_time_us(numbers.next_number()?).filter(|now_us| *now_us > 0)?;
        let statuses: Option<_> = counters
            .iter()
            .map(|(_, limit)| parse_limit_status(limit, 0, now_us, numbers.next_three()?))
            .collect();
        Some((now_us, statuses?)).filter(|_| numbers.0.next().is_none())
    }

    /// The Redis key of a charge's counter: `<prefix>:v1:{<hash>}:<algorithm>:<per in µs>[+<offset
    /// or buckets>][:<readable key>]`.
    pub fn counter_key(&self, charge: &Charge<'_>) -> String {
        let mut key = String::new();
        self.push_counter_key(&mut key, charge);
        key
    }

    /// The keys of the two membership sets. The second is in the slot of the first.
    pub(super) fn membership_keys(&self) -> [String; 2] {
        let instances = format!("{}instances", self.counter_key_prefix.trim_end_matches('{'));
        let ids = format!("{instances}:{{{instances}}}");
        [instances, ids]
    }

    /// The `SCAN` pattern for all counters, or for those of one policy with a readable key.
    pub(super) fn scan_pattern(&self, policy: Option<&str>) -> String {
        // A policy's name contains no glob characters, but the prefix may.
        let start = self
            .counter_key_prefix
            .replace(['\\', '*', '?', '[', ']'], "?");
        match policy {
            None => format!("{start}*"),
            // A value or nothing follows the name.
            Some(policy) => format!("{start}*}}:*:{policy}*"),
        }
    }

    /// Parses the key of a counter: algorithm, period and readable part. Returns `None` if it is
    /// not the key of a counter.
    pub(super) fn parse_counter_key(&self, key: &str) -> Option<(Algorithm, u64, Option<String>)> {
        let rest = key
            .strip_prefix(&self.counter_key_prefix)?
            .split_once("}:")?
            .1;
        let mut words = rest.splitn(3, ':');
        let (algorithm, period, readable) = (words.next()?, words.next()?, words.next());
        let (per_us, variant) = period.split_once('+').unwrap_or((period, "0"));
        let variant = variant.parse().ok()?;
        let algorithm = match algorithm {
            "sliding_log" => Algorithm::SlidingLog,
            "sliding_window" => Algorithm::SlidingWindow { buckets: variant },
            "fixed_window" => Algorithm::FixedWindow { offset_us: variant },
            "token_bucket" => Algorithm::TokenBucket {
                burst: MAX_UNITS,
                warm_up_us: 0,
            },
            // This delay is so long that the capacity includes all units in use.
            "leaky_bucket" => Algorithm::LeakyBucket {
                max_delay_us: per_us.parse().ok()?,
            },
            "concurrency" => Algorithm::Concurrency { max_duration_us: 0 },
            "block" => Algorithm::Block,
            _ => return None,
        };
        Some((algorithm, per_us.parse().ok()?, readable.map(str::to_owned)))
    }

    /// Parses the reply to [`ScriptLibrary::decide_command`]. Returns `None` if it is invalid.
    pub fn parse_decision_reply(reply: &Value, charges: &[Charge<'_>]) -> Option<Decision> {
        let Value::BulkString(text) = reply else {
            return None;
        };
        let text = std::str::from_utf8(text).ok()?;
        let (now, text) = text.split_once(' ').unwrap_or((text, ""));
        Self::parse_request_decision(
            parse_now_us(now)?,
            text,
            charges,
            CallerPosition { index: 0, total: 1 },
        )
    }

    /// Parses the part of a reply that belongs to one request. Returns `None` if it is invalid.
    pub(super) fn parse_request_decision(
        now_us: u64,
        text: &str,
        charges: &[Charge<'_>],
        position: CallerPosition,
    ) -> Option<Decision> {
        let mut numbers = ReplyNumbers::from_text(text);
        let (mut admitted, mut statuses, mut max_allowed_delay_us) = (true, SmallVec::new(), 0);
        let settles = charges.iter().any(|charge| charge.settles);
        let mut charged_at_us = SmallVec::new();
        for charge in charges {
            let mut status =
                parse_limit_status(charge.limit, charge.cost, now_us, numbers.next_three()?)?;
            if position.total > 1 {
                status = derive_caller_status(position, status, charge, numbers.next_number()?)?;
            }
            if settles {
                charged_at_us.push(if charge.settles {
                    parse_charged_at_us(now_us, numbers.next_number()?)?
                } else {
                    None
                });
            }
            admitted &= charge.shadow || status.refusal.is_none();
            statuses.push(Some(status));
            if let (Algorithm::LeakyBucket { max_delay_us }, false) =
                (charge.limit.algorithm, charge.shadow)
            {
                max_allowed_delay_us = max_delay_us.max(max_allowed_delay_us);
            }
        }
        let mut grants = SmallVec::new();
        for charges in charges.chunk_by(|one, other| one.is_same_policy(other)) {
            let first = charges
                .first()
                .and_then(|charge| Some((charge, charge.requested_lease()?)));
            if let Some((charge, lease)) = first {
                grants.extend(parse_grant(
                    charge,
                    lease,
                    now_us,
                    [numbers.next_number()?, numbers.next_number()?],
                )?);
            }
        }
        let delay_us = numbers.read_delay_us()?;
        let is_valid_delay = delay_us == 0 || (admitted && delay_us <= max_allowed_delay_us);
        is_valid_delay.then_some(Decision {
            now_us,
            admitted,
            statuses,
            delay_us,
            grants,
            charged_at_us,
        })
    }

    pub(super) fn push_counter_key(&self, key: &mut String, charge: &Charge<'_>) {
        self.push_counter_name(key, charge);
        let end = key.len();
        key.push(':');
        charge.key.push_readable(key);
        if key.len() - end > 1 + MAX_READABLE_BYTES {
            key.truncate(end);
        }
    }

    /// The name of the counter at a position, counted from 1 as in the script, without its readable
    /// part.
    pub(super) fn counter_name_at(&self, charges: &[Charge<'_>], position: usize) -> String {
        let mut name = String::new();
        if let Some(charge) = position
            .checked_sub(1)
            .and_then(|position| charges.get(position))
        {
            self.push_counter_name(&mut name, charge);
        }
        name
    }

    /// Appends the key without its readable part: it names the counter and contains no value of a
    /// client.
    fn push_counter_name(&self, key: &mut String, charge: &Charge<'_>) {
        key.push_str(&self.counter_key_prefix);
        push_hex_id(key, charge.key.id());
        let (algorithm, per_us) = charge.limit.counter_identity();
        let (algorithm_name, variant) = match algorithm {
            Algorithm::SlidingLog => ("}:sliding_log:", 0),
            Algorithm::SlidingWindow { buckets } => ("}:sliding_window:", buckets),
            Algorithm::FixedWindow { offset_us } => ("}:fixed_window:", offset_us),
            Algorithm::TokenBucket { .. } => ("}:token_bucket:", 0),
            Algorithm::LeakyBucket { .. } => ("}:leaky_bucket:", 0),
            Algorithm::Concurrency { .. } => ("}:concurrency:", 0),
            Algorithm::Block => ("}:block:", 0),
        };
        let mut number = itoa::Buffer::new();
        key.push_str(algorithm_name);
        key.push_str(number.format(per_us));
        if variant > 0 {
            key.push('+');
            key.push_str(number.format(variant));
        }
    }
}

/// Removes comments, indentation, and the sections that the program does not need. Redis accepts
/// arguments up to 16 KiB from an unauthenticated connection. Above that it closes the connection
/// instead of reporting the missing login.
fn strip_source(source: &str, flags: usize) -> String {
    let (mut text, mut is_included) = (String::with_capacity(source.len()), true);
    for line in source.lines().map(str::trim_start) {
        match line {
            "-- section: settlements" => is_included = flags & SETTLE_FLAG != 0,
            "-- section: rejected charges" => is_included = flags & COUNT_REJECTED_FLAG != 0,
            "-- section: leases" => is_included = flags & LEASE_FLAG != 0,
            "-- end section" => is_included = true,
            line if is_included && !line.is_empty() && !line.starts_with("--") => {
                text.push_str(line);
                text.push('\n');
            }
            _ => {}
        }
    }
    text
}

fn charges_flags(charges: &[Charge<'_>]) -> usize {
    charges
        .iter()
        .fold(0, |bits, charge| bits | charge_flags(charge))
}

/// The flags of the program that decides a charge.
pub(super) fn charge_flags(charge: &Charge<'_>) -> usize {
    let options = [
        (charge.counts_rejected, COUNT_REJECTED_FLAG),
        (charge.requested_lease().is_some(), LEASE_FLAG),
    ];
    options
        .iter()
        .filter(|(is_set, _)| *is_set)
        .fold(algorithm_flags(charge.limit.algorithm), |bits, (_, bit)| {
            bits | bit
        })
}

pub(super) fn push_time_argument(command: &mut Cmd, time_us: Option<u64>) {
    let mut number = itoa::Buffer::new();
    command.write_arg(
        time_us
            .map_or("", |time_us| number.format(time_us))
            .as_bytes(),
    );
}

/// Appends the argument of a charge. `follows`: it belongs to the same request as the charge
/// before.
pub(super) fn push_charge_argument(
    text: &mut String,
    charge: &Charge<'_>,
    rate: u64,
    follows: bool,
) {
    let options = [
        (charge.shadow, 1),
        (charge.counts_rejected, 2),
        (charge.settles, 4),
        (follows, 8),
    ];
    let options: u64 = options
        .iter()
        .filter(|(is_set, _)| *is_set)
        .map(|(_, bit)| bit)
        .sum();
    text.push_str(algorithm_letter(charge.limit));
    let mut number = itoa::Buffer::new();
    let group_and_options = u64::from(charge.group) * 16 + options;
    for value in [group_and_options, charge.cost] {
        text.push(' ');
        text.push_str(number.format(value));
    }
    if let Some(Lease { size, ttl_us }) = charge.requested_lease() {
        for value in [
            charge.requested_lease_units,
            ttl_us,
            if size.is_none() {
                AUTO_LEASE_DIVISOR
            } else {
                1
            },
        ] {
            text.push('+');
            text.push_str(number.format(value));
        }
    }
    for value in [charge.limit.capacity(), charge.limit.per_us] {
        text.push(' ');
        text.push_str(number.format(value));
    }
    text.push(' ');
    push_algorithm_parameters(text, charge.limit, rate, charge.slot_id);
}

fn push_settlement_arguments(command: &mut Cmd, settlement: &Settlement<'_>) {
    let mut number = itoa::Buffer::new();
    let mut parameters = String::new();
    push_algorithm_parameters(
        &mut parameters,
        settlement.limit,
        settlement.limit.requests,
        0,
    );
    for text in [
        algorithm_letter(settlement.limit),
        number.format(settlement.limit.per_us),
        &parameters,
    ] {
        command.write_arg(text.as_bytes());
    }
    let (operation, units, at_us) = match settlement.amendment {
        Amendment::Charge(units) => ("charge", units, 0),
        Amendment::BackdatedCharge { units, age_us } => ("charge", units, age_us),
        Amendment::Credit { units, at_us } => ("credit", units, at_us),
        Amendment::Renew { slot } | Amendment::Release { slot } => {
            let renews = matches!(settlement.amendment, Amendment::Renew { .. });
            command.write_arg(if renews { b"renew" } else { b"release" });
            parameters.clear();
            push_slot_id(&mut parameters, slot);
            command.write_arg(parameters.as_bytes());
            command.write_arg(b"0");
            return;
        }
    };
    command.write_arg(operation.as_bytes());
    command.write_arg(number.format(units).as_bytes());
    command.write_arg(number.format(at_us).as_bytes());
}

fn algorithm_letter(limit: &Limit) -> &'static str {
    match limit.algorithm {
        Algorithm::SlidingLog => "l",
        Algorithm::SlidingWindow { .. } => "s",
        Algorithm::FixedWindow { .. } => "w",
        Algorithm::TokenBucket { .. } => "t",
        Algorithm::LeakyBucket { .. } => "d",
        Algorithm::Concurrency { .. } => "c",
        Algorithm::Block => "b",
    }
}

/// `rate`: units that a bucket pays back per period, unless its last charge used a higher rate.
fn push_algorithm_parameters(text: &mut String, limit: &Limit, rate: u64, slot: u128) {
    let mut number = itoa::Buffer::new();
    let parameter = match limit.algorithm {
        Algorithm::LeakyBucket { .. } => {
            text.push_str(number.format(rate));
            text.push('+');
            limit.delay_remainder()
        }
        Algorithm::Concurrency { .. } => return push_slot_id(text, slot),
        Algorithm::SlidingWindow { .. } => limit.sub_window_us(),
        Algorithm::FixedWindow { offset_us } => offset_us,
        Algorithm::TokenBucket { burst, warm_up_us } if warm_up_us > 0 => {
            for leading_parameter in [rate, warm_up_us] {
                text.push_str(number.format(leading_parameter));
                text.push('+');
            }
            burst - limit.cold_capacity()
        }
        Algorithm::TokenBucket { .. } => rate,
        Algorithm::SlidingLog | Algorithm::Block => 0,
    };
    text.push_str(number.format(parameter));
}

/// The colon distinguishes the id from a number.
fn push_slot_id(text: &mut String, slot: u128) {
    push_hex_id(text, slot);
    text.push(':');
}

/// The integers of a reply, in order.
struct ReplyNumbers<'a>(std::str::Split<'a, char>);

impl<'a> ReplyNumbers<'a> {
    fn from_text(text: &'a str) -> Self {
        let mut words = text.split(' ');
        if text.is_empty() {
            words.next();
        }
        Self(words)
    }

    /// The last number of a reply. It is left out if it is 0.
    fn read_delay_us(&mut self) -> Option<u64> {
        let Some(text) = self.0.next() else {
            return Some(0);
        };
        let delay_us = to_time_us(text.parse().ok()?).filter(|delay_us| *delay_us > 0);
        delay_us.filter(|_| self.0.next().is_none())
    }

    fn next_three(&mut self) -> Option<[i64; 3]> {
        Some([
            self.next_number()?,
            self.next_number()?,
            self.next_number()?,
        ])
    }

    fn next_number(&mut self) -> Option<i64> {
        self.0.next()?.parse().ok()
    }
}

/// Parses the server's time in a reply.
pub(super) fn parse_now_us(text: &str) -> Option<u64> {
    to_time_us(text.parse().ok()?).filter(|now_us| *now_us > 0)
}

pub(super) fn push_hex_id(text: &mut String, id: u128) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut digits = [0; 32];
    for (nth, digit) in digits.iter_mut().rev().enumerate() {
        *digit = DIGITS
            .get((id >> (4 * nth) & 15) as usize)
            .copied()
            .unwrap_or_default();
    }
    text.push_str(std::str::from_utf8(&digits).unwrap_or_default());
}

/// Parses the numbers of one charge. Returns `None` for impossible values, which must not take
/// effect.
fn parse_limit_status(
    limit: &Limit,
    cost: u64,
    now_us: u64,
    [until, remaining, next_growth]: [i64; 3],
) -> Option<LimitStatus> {
    let to_future_us = |number| to_time_us(number).filter(|time_us| *time_us > now_us);
    let refusal = match until {
        -2 if matches!(
            limit.algorithm,
            Algorithm::Concurrency { .. } | Algorithm::TokenBucket { .. }
        ) =>
        {
            Some(Refusal::Unknown)
        }
        -1 => Some(Refusal::Never),
        0 => None,
        until => Some(Refusal::Until(to_future_us(until)?)),
    };
    let next_growth_us = match next_growth {
        0 => None,
        next_growth => Some(to_future_us(next_growth)?),
    };
    let remaining = u64::try_from(remaining)
        .ok()
        .filter(|remaining| *remaining <= limit.capacity())?;
    let is_never_admitted = cost > limit.capacity() || limit.capacity() == 0;
    (is_never_admitted == (refusal == Some(Refusal::Never))).then_some(LimitStatus {
        remaining,
        next_growth_us,
        refusal,
    })
}

/// Parses the time of a charge; `Some(None)` if it was not made. Returns `None` for an impossible
/// value.
fn parse_charged_at_us(now_us: u64, number: i64) -> Option<Option<u64>> {
    if number == 0 {
        return Some(None);
    }
    to_time_us(number)
        .filter(|at_us| *at_us >= now_us)
        .map(Some)
}

/// Derives the status for one of several callers with the same request. `admitted` of them were
/// admitted, and `last_status` is that of the last one.
fn derive_caller_status(
    position: CallerPosition,
    last_status: LimitStatus,
    charge: &Charge<'_>,
    admitted: i64,
) -> Option<LimitStatus> {
    let admitted = u32::try_from(admitted)
        .ok()
        .filter(|admitted| *admitted <= position.total)?;
    if (admitted == position.total) != last_status.refusal.is_none() {
        return None;
    }
    let Some(callers_after) = admitted.checked_sub(position.index + 1) else {
        return Some(last_status);
    };
    let remaining = last_status
        .remaining
        .checked_add(charge.cost.checked_mul(callers_after.into())?)?;
    let is_possible = remaining <= charge.limit.capacity();
    is_possible.then_some(LimitStatus {
        remaining,
        refusal: None,
        ..last_status
    })
}

/// Parses a grant; `Some(None)` without one. Returns `None` for an impossible value.
fn parse_grant(
    charge: &Charge<'_>,
    lease: Lease,
    now_us: u64,
    [units, until]: [i64; 2],
) -> Option<Option<GrantedUnits>> {
    let (units, until_us) = (u64::try_from(units).ok()?, to_time_us(until)?);
    if units == 0 {
        return Some(None);
    }
    let remaining_us = (until_us + 1).checked_sub(now_us)?;
    let is_valid =
        units <= charge.requested_lease_units && (1..=lease.ttl_us).contains(&remaining_us);
    is_valid.then_some(Some(GrantedUnits {
        group: charge.group,
        units,
        until_us,
    }))
}

fn to_time_us(number: i64) -> Option<u64> {
    u64::try_from(number)
        .ok()
        .filter(|time_us| *time_us <= MAX_TIME_US)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::{Key, KeyBuilder, Limit};

    const LOG: Limit = Limit {
        requests: 5,
        per_us: 1_000_000,
        algorithm: Algorithm::SlidingLog,
    };

    fn key(policy: &str, value: &str) -> Key {
        let mut builder = KeyBuilder::new(policy);
        builder.push_part(Some(value.as_bytes()));
        builder.finish()
    }

    fn charge<'a>(limit: &'a Limit, key: &'a Key) -> Charge<'a> {
        Charge::new(limit, key, 1)
    }

    #[test]
    fn trap_5_decisions_use_the_clock_of_redis() {
        let (script, key) = (ScriptLibrary::new("p"), key("p", "x"));
        let args: Vec<Vec<u8>> = script
            .decide_command(&[charge(&LOG, &key)], None)
            .args_iter()
            .map(|arg| match arg {
                redis::Arg::Simple(arg) => arg.to_vec(),
                other => panic!("{other:?}"),
            })
            .collect();
        let [_evalsha, _sha, keys, _key, time, rest @ ..] = args.as_slice() else {
            panic!("{args:?}")
        };
        assert_eq!(
            (keys.as_slice(), time.as_slice()),
            (&b"1"[..], &b""[..]),
            "no time is sent, so Redis reads its own clock"
        );
        let rest: Vec<&str> = rest
            .iter()
            .map(|arg| std::str::from_utf8(arg).unwrap())
            .collect();
        assert_eq!(rest, ["l 0 1 5 1000000 0"], "no argument is a time");
        assert!(script.script_text(&[]).contains("call('TIME')"));
    }

    #[test]
    fn the_first_script_fits_the_limits_of_an_unauthenticated_connection() {
        let first = LuaProgram::new(charges_flags(&[])).text;
        assert!(first.len() < 16 * 1024, "{}", first.len());
        for bits in [SETTLE_FLAG - 1, PROGRAM_COUNT - 1] {
            assert!(
                !LuaProgram::new(bits).text.contains("--"),
                "the program contains a comment"
            );
        }
    }

    #[test]
    fn keys_contain_prefix_hash_algorithm_and_period() {
        let daily = Limit {
            algorithm: Algorithm::FixedWindow { offset_us: 7 },
            ..LOG
        };
        let (short, long) = (key("api", "ann"), key("api", &"x".repeat(62)));
        let script = ScriptLibrary::new("shop{a}");
        let hash = format!("{:032x}", short.id());
        assert_eq!(
            script.counter_key(&charge(&LOG, &short)),
            format!("shop%7Ba%7D:v1:{{{hash}}}:sliding_log:1000000:api/ann")
        );
        assert_eq!(
            script.counter_key(&charge(&daily, &short)),
            format!("shop%7Ba%7D:v1:{{{hash}}}:fixed_window:1000000+7:api/ann")
        );
        let hash = format!("{:032x}", long.id());
        assert_eq!(
            script.counter_key(&charge(&LOG, &long)),
            format!("shop%7Ba%7D:v1:{{{hash}}}:sliding_log:1000000")
        );
    }

    #[test]
    fn the_decide_command_has_the_arguments_that_decide_lua_reads() {
        let key = key("api", "ann");
        let shadow = Charge {
            group: 3,
            shadow: true,
            cost: 2,
            ..charge(&LOG, &key)
        };
        let script = ScriptLibrary::new("t");
        let command = script.decide_command(&[charge(&LOG, &key), shadow], None);
        let args: Vec<_> = command
            .args_iter()
            .map(|arg| match arg {
                redis::Arg::Simple(bytes) => String::from_utf8_lossy(bytes).into_owned(),
                _ => panic!("no cursors here"),
            })
            .collect();
        let name = script.counter_key(&shadow);
        let sha = &script
            .program(algorithm_flags(Algorithm::SlidingLog))
            .unwrap()
            .sha;
        let head = ["EVALSHA", sha, "2", &name, &name, ""];
        let rest = ["l 0 1 5 1000000 0", "l 57 2 5 1000000 0"];
        assert_eq!(args, [head.as_slice(), &rest].concat());
    }

    #[test]
    fn accepts_a_delay_up_to_the_maximum_of_the_limit() {
        let limit = Limit {
            algorithm: Algorithm::LeakyBucket {
                max_delay_us: 400_000,
            },
            ..LOG
        };
        let key = key("api", "ann");
        let (leaky_bucket, log) = (charge(&limit, &key), charge(&LOG, &key));
        let read = |reply: &str, charges: &[Charge<'_>]| {
            ScriptLibrary::parse_decision_reply(&Value::BulkString(reply.into()), charges)
                .map(|decision| decision.delay_us)
        };
        assert_eq!(read("1000 0 2 2000", &[leaky_bucket]), Some(0));
        assert_eq!(read("1000 0 2 2000 400000", &[leaky_bucket]), Some(400_000));
        assert_eq!(
            read("1000 0 2 2000 0 4 2000 1", &[leaky_bucket, log]),
            Some(1)
        );
        for invalid in [
            "1000 0 2 2000 400001",
            "1000 0 2 2000 0",
            "1000 0 2 2000 -1",
            "1000 0 2 2000 5 5",
            "1000 1500 0 1500 5",
        ] {
            assert_eq!(read(invalid, &[leaky_bucket]), None, "{invalid}");
        }
        let shadow = Charge {
            shadow: true,
            ..leaky_bucket
        };
        assert_eq!(
            read("1000 0 2 2000 5", &[shadow]),
            None,
            "a shadow policy delays no request"
        );
    }

    #[test]
    fn rejects_impossible_replies() {
        let key = key("api", "ann");
        let charges = [charge(&LOG, &key)];
        let read = |reply: &str| {
            ScriptLibrary::parse_decision_reply(&Value::BulkString(reply.into()), &charges)
        };
        let decision = read("1000 0 4 2000").unwrap();
        assert!(decision.admitted);
        assert_eq!(
            decision.statuses.as_slice(),
            [Some(LimitStatus {
                remaining: 4,
                next_growth_us: Some(2000),
                refusal: None
            })]
        );
        assert!(!read("1000 1500 0 1500").unwrap().admitted);
        for invalid in [
            "",
            "1000",
            "1000 0 4",
            "1000 0 4 ",
            "1000 0 4 2000 0",
            "1000  0 4 2000",
            "1000.0 0 4 2000",
            "1000 nan 4 2000",
            "1e3 0 4 2000",
            "0 0 4 2000",
            "-1 0 4 2000",
            "9223372036854775807 0 4 0",
            "9223372036854775808 0 4 0",
            "1000 1000 0 2000",
            "1000 -2 0 2000",
            "1000 -1 4 2000",
            "1000 0 6 2000",
            "1000 0 -1 2000",
            "1000 0 4 999",
            "1000 0 4 2000 70",
            "1000 0 4 2000\n0 3 2000",
            "1000 !OOM no",
        ] {
            assert_eq!(read(invalid), None, "{invalid}");
        }
        for invalid in [
            Value::Nil,
            Value::Okay,
            Value::Int(5),
            Value::Array(Vec::new()),
        ] {
            assert_eq!(
                ScriptLibrary::parse_decision_reply(&invalid, &charges),
                None,
                "{invalid:?}"
            );
        }
    }
}
