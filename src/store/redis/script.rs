//! The programs in Redis, what is sent to them and what their answers mean.

use crate::limiter::{
    AUTO_SHARE, Algorithm, Amendment, Charge, Decision, Grant, KeyBuilder, Lease, Limit, MAX_UNITS, Refusal,
    Standing,
};
use crate::store::Late;
use redis::{Cmd, RedisWrite, Value};
use smallvec::SmallVec;
use std::sync::OnceLock;

/// Readable tails longer than this many bytes are left out of keys.
const MAX_TAIL_BYTES: usize = 64;

/// Arguments per charge (see `decide.lua`).
const ARGS_PER_CHARGE: usize = 6;

/// Times above this are not exact in a double, so they can't come from the script.
const MAX_TIME_US: u64 = 1 << 53;

/// The programs for Redis, with the names under which they keep state.
///
/// There is one per set of algorithms and purpose, made when it is first wanted: what is not asked for costs nothing
/// there. Their texts depend on nothing else; what varies goes into the arguments, so Redis caches few.
#[derive(Debug)]
pub struct Script {
    programs: [OnceLock<Program>; PROGRAMS],
    /// What all keys start with, up to and including the brace that opens the hash tag.
    key_start: String,
}

/// A text, and the hash by which Redis calls it.
#[derive(Debug)]
struct Program {
    text: String,
    sha: String,
}

/// Each algorithm's file, by the bit that stands for it. A leaky bucket is made of a token bucket.
const FILES: [&str; 7] = [
    include_str!("../../limiter/sliding_log.lua"),
    include_str!("../../limiter/sliding_window.lua"),
    include_str!("../../limiter/fixed_window.lua"),
    include_str!("../../limiter/token_bucket.lua"),
    include_str!("../../limiter/leaky_bucket.lua"),
    include_str!("../../limiter/concurrency.lua"),
    include_str!("../../limiter/block.lua"),
];

/// Stands beside the bits of the algorithms.
const AMENDS: usize = 1 << FILES.len();
const PROGRAMS: usize = AMENDS << 1;

fn bits(algorithm: Algorithm) -> usize {
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

impl Program {
    fn new(bits: usize) -> Self {
        let algorithms =
            FILES.iter().enumerate().filter(|(bit, _)| bits >> bit & 1 == 1).map(|(_, text)| *text);
        let last = if bits & AMENDS == 0 { include_str!("decide.lua") } else { include_str!("amend.lua") };
        let files = [include_str!("start.lua")].into_iter().chain(algorithms).chain([last]);
        let text = files.map(without_comments).collect::<String>();
        let sha = redis::Script::new(&text).get_hash().to_owned();
        Self { text, sha }
    }
}

impl Script {
    pub fn new(key_prefix: &str) -> Self {
        // A brace in the prefix would move the hash tag.
        let prefix = key_prefix.replace('{', "%7B").replace('}', "%7D");
        Self { programs: [const { OnceLock::new() }; PROGRAMS], key_start: format!("{prefix}:v1:{{") }
    }

    /// What Redis is given to decide these charges.
    pub fn text(&self, charges: &[Charge<'_>]) -> &str {
        self.program(bits_of(charges)).map_or("", |program| &program.text)
    }

    /// What loads all programs that were wanted so far.
    pub fn load(&self) -> redis::Pipeline {
        let mut pipeline = redis::pipe();
        for program in self.programs.iter().filter_map(OnceLock::get) {
            pipeline.cmd("SCRIPT").arg("LOAD").arg(&program.text);
        }
        pipeline
    }

    /// What asks for a decision. `time_us` stands in for the server's clock in tests.
    pub fn decide(&self, charges: &[Charge<'_>], time_us: Option<u64>) -> Cmd {
        let mut command = self.call(bits_of(charges), charges.len());
        let mut key = String::with_capacity(192);
        for charge in charges {
            key.clear();
            self.push_key(&mut key, charge);
            command.write_arg(key.as_bytes());
        }
        push_time(&mut command, time_us);
        for charge in charges {
            push_args(&mut command, charge, charge.limit.requests);
        }
        command
    }

    /// What puts charges right.
    pub fn amend(&self, late: &[Late<'_>], time_us: Option<u64>) -> Cmd {
        let algorithms = late.iter().fold(AMENDS, |bits_of, late| bits_of | bits(late.limit.algorithm));
        let mut command = self.call(algorithms, late.len());
        let mut key = String::with_capacity(192);
        for late in late {
            key.clear();
            self.push_key(&mut key, &Charge::new(late.limit, late.key, 0));
            command.write_arg(key.as_bytes());
        }
        push_time(&mut command, time_us);
        for late in late {
            push_amendment(&mut command, late);
        }
        command
    }

    /// What asks how counters stand, by their names in Redis, and changes nothing.
    pub(super) fn look(&self, counters: &[(&str, &Limit)]) -> Cmd {
        let nobody = KeyBuilder::new("").finish();
        let charges: Vec<_> = counters.iter().map(|(_, limit)| Charge::new(limit, &nobody, 0)).collect();
        let mut command = self.call(bits_of(&charges), counters.len());
        for (key, _) in counters {
            command.write_arg(key.as_bytes());
        }
        push_time(&mut command, None);
        for charge in &charges {
            // A debt is paid back as it was when it was charged.
            push_args(&mut command, charge, 0);
        }
        command
    }

    fn program(&self, bits: usize) -> Option<&Program> {
        self.programs.get(bits).map(|program| program.get_or_init(|| Program::new(bits)))
    }

    fn call(&self, algorithms: usize, count: usize) -> Cmd {
        let mut command = Cmd::with_capacity(4 + count * (1 + ARGS_PER_CHARGE), 64 + count * 224);
        command.write_arg(b"EVALSHA");
        let sha = self.program(algorithms).map_or("", |program| &program.sha);
        command.write_arg(sha.as_bytes());
        command.write_arg(itoa::Buffer::new().format(count).as_bytes());
        command
    }

    /// Reads the answer to [`Script::look`]: the time, and how each counter stands. `None`: it isn't one.
    pub(super) fn seen(reply: &Value, counters: &[(&str, &Limit)]) -> Option<(u64, Vec<Standing>)> {
        let mut numbers = Numbers::of(reply)?;
        let now_us = numbers.now_us()?;
        let standings: Option<_> =
            counters.iter().map(|(_, limit)| standing(limit, 0, now_us, numbers.three()?)).collect();
        Some((now_us, standings?)).filter(|_| numbers.is_over())
    }

    /// The Redis key of a charge's counter:
    /// `<prefix>:v1:{<hash>}:<algorithm>:<per in µs>[+<offset or buckets>][:<key, for people>]`.
    pub fn key(&self, charge: &Charge<'_>) -> String {
        let mut key = String::new();
        self.push_key(&mut key, charge);
        key
    }

    /// The set in which instances make themselves known.
    pub(super) fn instances_key(&self) -> String {
        format!("{}instances", self.key_start.trim_end_matches('{'))
    }

    /// What `SCAN` matches all our counters by, or those of a policy whose names are readable.
    pub(super) fn pattern(&self, policy: Option<&str>) -> String {
        // A policy's name holds nothing that a glob would take for more than itself; the prefix may.
        let start = self.key_start.replace(['\\', '*', '?', '[', ']'], "?");
        match policy {
            None => format!("{start}*"),
            // After the name comes a value, or nothing.
            Some(policy) => format!("{start}*}}:*:{policy}*"),
        }
    }

    /// Reads a counter's name back: its algorithm, period, and what is readable of its key. `None`: it is
    /// not a counter of ours.
    pub(super) fn parse(&self, key: &str) -> Option<(Algorithm, u64, Option<String>)> {
        let rest = key.strip_prefix(&self.key_start)?.split_once("}:")?.1;
        let mut words = rest.splitn(3, ':');
        let (algorithm, period, readable) = (words.next()?, words.next()?, words.next());
        let (per_us, variant) = period.split_once('+').unwrap_or((period, "0"));
        let variant = variant.parse().ok()?;
        let algorithm = match algorithm {
            "sliding_log" => Algorithm::SlidingLog,
            "sliding_window" => Algorithm::SlidingWindow { buckets: variant },
            "fixed_window" => Algorithm::FixedWindow { offset_us: variant },
            "token_bucket" => Algorithm::TokenBucket { burst: MAX_UNITS, warm_up_us: 0 },
            // So much that its capacity is all units there are.
            "leaky_bucket" => Algorithm::LeakyBucket { max_delay_us: per_us.parse().ok()? },
            "concurrency" => Algorithm::Concurrency { max_duration_us: 0 },
            "block" => Algorithm::Block,
            _ => return None,
        };
        Some((algorithm, per_us.parse().ok()?, readable.map(str::to_owned)))
    }

    /// Reads the answer to [`Script::decide`]. `None`: it isn't one.
    pub fn decision(reply: &Value, charges: &[Charge<'_>]) -> Option<Decision> {
        let mut numbers = Numbers::of(reply)?;
        let now_us = numbers.now_us()?;
        let (mut admitted, mut standings, mut longest_us) = (true, SmallVec::new(), 0);
        for charge in charges {
            let standing = standing(charge.limit, charge.cost, now_us, numbers.three()?)?;
            admitted &= charge.shadow || standing.refusal.is_none();
            standings.push(Some(standing));
            if let (Algorithm::LeakyBucket { max_delay_us }, false) = (charge.limit.algorithm, charge.shadow)
            {
                longest_us = max_delay_us.max(longest_us);
            }
        }
        let mut grants = SmallVec::new();
        for charges in charges.chunk_by(|one, other| one.is_of_policy_of(other)) {
            if let Some(charge) = charges.first().filter(|charge| charge.lease.is_some() && charge.wanted > 0)
            {
                grants.extend(grant(charge, now_us, [numbers.one()?, numbers.one()?])?);
            }
        }
        let delay_us = numbers.delay_us()?;
        let may_be_held = delay_us == 0 || (admitted && delay_us <= longest_us);
        (may_be_held && numbers.is_over()).then_some(Decision {
            now_us,
            admitted,
            standings,
            delay_us,
            grants,
        })
    }

    fn push_key(&self, key: &mut String, charge: &Charge<'_>) {
        self.push_counter(key, charge);
        let tail = charge.key.readable();
        if tail.len() <= MAX_TAIL_BYTES {
            key.push(':');
            key.push_str(&tail);
        }
    }

    /// The key at a position, as the script counts them, without what would name its owner.
    pub(super) fn counter_at(&self, charges: &[Charge<'_>], position: usize) -> String {
        let mut name = String::new();
        if let Some(charge) = position.checked_sub(1).and_then(|position| charges.get(position)) {
            self.push_counter(&mut name, charge);
        }
        name
    }

    /// The key without its readable tail: names the counter and shows nothing of its owner.
    fn push_counter(&self, key: &mut String, charge: &Charge<'_>) {
        key.push_str(&self.key_start);
        push_hex(key, charge.key.id());
        let (algorithm, per_us) = charge.limit.identity();
        let (word, variant) = match algorithm {
            Algorithm::SlidingLog => ("}:sliding_log:", 0),
            Algorithm::SlidingWindow { buckets } => ("}:sliding_window:", buckets),
            Algorithm::FixedWindow { offset_us } => ("}:fixed_window:", offset_us),
            Algorithm::TokenBucket { .. } => ("}:token_bucket:", 0),
            Algorithm::LeakyBucket { .. } => ("}:leaky_bucket:", 0),
            Algorithm::Concurrency { .. } => ("}:concurrency:", 0),
            Algorithm::Block => ("}:block:", 0),
        };
        let mut number = itoa::Buffer::new();
        key.push_str(word);
        key.push_str(number.format(per_us));
        if variant > 0 {
            key.push('+');
            key.push_str(number.format(variant));
        }
    }
}

/// Comments are for us. And a server that has not let us in takes no argument above 16 KiB: it would break the
/// connection instead of saying so.
fn without_comments(source: &str) -> String {
    let lines =
        source.lines().map(str::trim_start).filter(|line| !line.is_empty() && !line.starts_with("--"));
    lines.flat_map(|line| [line, "\n"]).collect()
}

fn bits_of(charges: &[Charge<'_>]) -> usize {
    charges.iter().fold(0, |bits_of, charge| bits_of | bits(charge.limit.algorithm))
}

fn push_time(command: &mut Cmd, time_us: Option<u64>) {
    let mut number = itoa::Buffer::new();
    command.write_arg(time_us.map_or("", |time_us| number.format(time_us)).as_bytes());
}

fn push_args(command: &mut Cmd, charge: &Charge<'_>, rate: u64) {
    let wants = [(charge.shadow, 1), (charge.counts_rejected, 2), (charge.settles, 4)];
    let wants: u64 = wants.iter().filter(|(is_wanted, _)| *is_wanted).map(|(_, bit)| bit).sum();
    command.write_arg(letter(charge.limit));
    let mut number = itoa::Buffer::new();
    let whose = u64::from(charge.group) * 8 + wants;
    command.write_arg(number.format(whose).as_bytes());
    match charge.lease.filter(|_| charge.wanted > 0) {
        None => command.write_arg(number.format(charge.cost).as_bytes()),
        Some(Lease { size, ttl_us }) => {
            let share = if size.is_none() { AUTO_SHARE } else { 1 };
            let Charge { cost, wanted, .. } = charge;
            command.write_arg_fmt(format_args!("{cost}+{wanted}+{ttl_us}+{share}"));
        }
    }
    for value in [charge.limit.capacity(), charge.limit.per_us] {
        command.write_arg(number.format(value).as_bytes());
    }
    push_beside(command, charge.limit, rate, charge.slot);
}

fn push_amendment(command: &mut Cmd, late: &Late<'_>) {
    let mut number = itoa::Buffer::new();
    command.write_arg(letter(late.limit));
    command.write_arg(number.format(late.limit.per_us).as_bytes());
    push_beside(command, late.limit, late.limit.requests, 0);
    let (word, units, at_us) = match late.amendment {
        Amendment::Charge(units) => ("charge", units, 0),
        Amendment::Back { units, age_us } => ("charge", units, age_us),
        Amendment::Credit { units, at_us } => ("credit", units, at_us),
        Amendment::Renew { slot } | Amendment::Release { slot } => {
            let renews = matches!(late.amendment, Amendment::Renew { .. });
            command.write_arg(if renews { b"renew" } else { b"release" });
            push_slot(command, slot);
            command.write_arg(b"0");
            return;
        }
    };
    command.write_arg(word.as_bytes());
    command.write_arg(number.format(units).as_bytes());
    command.write_arg(number.format(at_us).as_bytes());
}

fn letter(limit: &Limit) -> &'static [u8] {
    match limit.algorithm {
        Algorithm::SlidingLog => b"l",
        Algorithm::SlidingWindow { .. } => b"s",
        Algorithm::FixedWindow { .. } => b"w",
        Algorithm::TokenBucket { .. } => b"t",
        Algorithm::LeakyBucket { .. } => b"d",
        Algorithm::Concurrency { .. } => b"c",
        Algorithm::Block => b"b",
    }
}

/// `rate`: units that a bucket pays back per period, unless it was charged at a higher rate.
fn push_beside(command: &mut Cmd, limit: &Limit, rate: u64, slot: u128) {
    let mut number = itoa::Buffer::new();
    let beside = match limit.algorithm {
        Algorithm::LeakyBucket { .. } => {
            return command.write_arg_fmt(format_args!("{rate}+{}", limit.slack()));
        }
        Algorithm::Concurrency { .. } => return push_slot(command, slot),
        Algorithm::SlidingWindow { .. } => limit.sub_window_us(),
        Algorithm::FixedWindow { offset_us } => offset_us,
        Algorithm::TokenBucket { burst, warm_up_us } if warm_up_us > 0 => {
            let lacks = burst - limit.cold_capacity();
            return command.write_arg_fmt(format_args!("{rate}+{warm_up_us}+{lacks}"));
        }
        Algorithm::TokenBucket { .. } => rate,
        Algorithm::SlidingLog | Algorithm::Block => 0,
    };
    command.write_arg(number.format(beside).as_bytes());
}

/// With a sign that no number has.
fn push_slot(command: &mut Cmd, slot: u128) {
    command.write_arg_fmt(format_args!("{:x}:{:x}", slot >> 64, slot & u128::from(u64::MAX)));
}

/// The integers of a reply, in order.
struct Numbers<'a>(std::str::Split<'a, char>);

impl<'a> Numbers<'a> {
    fn of(reply: &'a Value) -> Option<Self> {
        let Value::BulkString(text) = reply else { return None };
        Some(Self(std::str::from_utf8(text).ok()?.split(' ')))
    }

    fn now_us(&mut self) -> Option<u64> {
        time(self.one()?).filter(|now_us| *now_us > 0)
    }

    /// The last one, said only if it isn't 0.
    fn delay_us(&mut self) -> Option<u64> {
        match self.0.next() {
            None => Some(0),
            Some(text) => time(text.parse().ok()?).filter(|delay_us| *delay_us > 0),
        }
    }

    fn three(&mut self) -> Option<[i64; 3]> {
        Some([self.one()?, self.one()?, self.one()?])
    }

    fn one(&mut self) -> Option<i64> {
        self.0.next()?.parse().ok()
    }

    fn is_over(&mut self) -> bool {
        self.0.next().is_none()
    }
}

pub(super) fn push_hex(text: &mut String, id: u128) {
    for byte in id.to_be_bytes() {
        text.extend(char::from_digit(u32::from(byte >> 4), 16));
        text.extend(char::from_digit(u32::from(byte & 15), 16));
    }
}

/// One charge's part of the reply. What can't be true is no answer: it must not be acted upon.
fn standing(
    limit: &Limit,
    cost: u64,
    now_us: u64,
    [until, remaining, grows_at]: [i64; 3],
) -> Option<Standing> {
    let later = |number| time(number).filter(|time_us| *time_us > now_us);
    let refusal = match until {
        -2 if matches!(limit.algorithm, Algorithm::Concurrency { .. } | Algorithm::TokenBucket { .. }) => {
            Some(Refusal::Unknown)
        }
        -1 => Some(Refusal::Never),
        0 => None,
        until => Some(Refusal::Until(later(until)?)),
    };
    let grows_at_us = match grows_at {
        0 => None,
        grows_at => Some(later(grows_at)?),
    };
    let remaining = u64::try_from(remaining).ok().filter(|remaining| *remaining <= limit.capacity())?;
    let never = cost > limit.capacity() || limit.capacity() == 0;
    (never == (refusal == Some(Refusal::Never))).then_some(Standing { remaining, grows_at_us, refusal })
}

/// What was lent, if anything; `None`: that can't be true.
fn grant(charge: &Charge<'_>, now_us: u64, [units, until]: [i64; 2]) -> Option<Option<Grant>> {
    let (units, until_us) = (u64::try_from(units).ok()?, time(until)?);
    if units == 0 {
        return Some(None);
    }
    let lasts_us = (until_us + 1).checked_sub(now_us)?;
    let may_be = units <= charge.wanted && (1..=charge.lease?.ttl_us).contains(&lasts_us);
    may_be.then_some(Some(Grant { group: charge.group, units, until_us }))
}

fn time(number: i64) -> Option<u64> {
    u64::try_from(number).ok().filter(|time_us| *time_us <= MAX_TIME_US)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::{Key, KeyBuilder, Limit};

    const LOG: Limit = Limit { requests: 5, per_us: 1_000_000, algorithm: Algorithm::SlidingLog };

    fn key(policy: &str, value: &str) -> Key {
        let mut builder = KeyBuilder::new(policy);
        builder.part(Some(value.as_bytes()));
        builder.finish()
    }

    fn charge<'a>(limit: &'a Limit, key: &'a Key) -> Charge<'a> {
        Charge::new(limit, key, 1)
    }

    #[test]
    fn trap_5_no_clock_of_ours_decides() {
        let (script, key) = (Script::new("p"), key("p", "x"));
        let args: Vec<Vec<u8>> = script
            .decide(&[charge(&LOG, &key)], None)
            .args_iter()
            .map(|arg| match arg {
                redis::Arg::Simple(arg) => arg.to_vec(),
                other => panic!("{other:?}"),
            })
            .collect();
        let [_evalsha, _sha, keys, _key, time, rest @ ..] = args.as_slice() else { panic!("{args:?}") };
        assert_eq!(
            (keys.as_slice(), time.as_slice()),
            (&b"1"[..], &b""[..]),
            "Redis is to ask its own clock"
        );
        let rest: Vec<&str> = rest.iter().map(|arg| std::str::from_utf8(arg).unwrap()).collect();
        assert_eq!(rest, ["l", "0", "1", "5", "1000000", "0"], "nothing here tells a time");
        assert!(script.text(&[]).contains("redis.call('TIME')"));
    }

    #[test]
    fn the_first_text_is_short_enough_for_a_server_that_has_not_let_us_in() {
        let first = Program::new(bits_of(&[])).text;
        assert!(first.len() < 16 * 1024, "{}", first.len());
        for bits in [AMENDS - 1, PROGRAMS - 1] {
            assert!(!Program::new(bits).text.contains("--"), "a comment is left");
        }
    }

    #[test]
    fn keys_name_what_they_count() {
        let daily = Limit { algorithm: Algorithm::FixedWindow { offset_us: 7 }, ..LOG };
        let (short, long) = (key("api", "ann"), key("api", &"x".repeat(62)));
        let script = Script::new("shop{a}");
        let hash = format!("{:032x}", short.id());
        assert_eq!(
            script.key(&charge(&LOG, &short)),
            format!("shop%7Ba%7D:v1:{{{hash}}}:sliding_log:1000000:api/ann")
        );
        assert_eq!(
            script.key(&charge(&daily, &short)),
            format!("shop%7Ba%7D:v1:{{{hash}}}:fixed_window:1000000+7:api/ann")
        );
        let hash = format!("{:032x}", long.id());
        assert_eq!(
            script.key(&charge(&LOG, &long)),
            format!("shop%7Ba%7D:v1:{{{hash}}}:sliding_log:1000000")
        );
    }

    #[test]
    fn the_command_is_what_decide_lua_reads() {
        let key = key("api", "ann");
        let shadow = Charge { group: 3, shadow: true, cost: 2, ..charge(&LOG, &key) };
        let script = Script::new("t");
        let command = script.decide(&[charge(&LOG, &key), shadow], None);
        let args: Vec<_> = command
            .args_iter()
            .map(|arg| match arg {
                redis::Arg::Simple(bytes) => String::from_utf8_lossy(bytes).into_owned(),
                _ => panic!("no cursors here"),
            })
            .collect();
        let name = script.key(&shadow);
        let sha = &script.program(bits(Algorithm::SlidingLog)).unwrap().sha;
        let head = ["EVALSHA", sha, "2", &name, &name, ""];
        let rest = ["l", "0", "1", "5", "1000000", "0", "l", "25", "2", "5", "1000000", "0"];
        assert_eq!(args, [head.as_slice(), &rest].concat());
    }

    #[test]
    fn a_delay_is_read_if_the_limit_may_want_it() {
        let limit = Limit { algorithm: Algorithm::LeakyBucket { max_delay_us: 400_000 }, ..LOG };
        let key = key("api", "ann");
        let (line, log) = (charge(&limit, &key), charge(&LOG, &key));
        let read = |reply: &str, charges: &[Charge<'_>]| {
            Script::decision(&Value::BulkString(reply.into()), charges).map(|decision| decision.delay_us)
        };
        assert_eq!(read("1000 0 2 2000", &[line]), Some(0));
        assert_eq!(read("1000 0 2 2000 400000", &[line]), Some(400_000));
        assert_eq!(read("1000 0 2 2000 0 4 2000 1", &[line, log]), Some(1));
        for lie in [
            "1000 0 2 2000 400001",
            "1000 0 2 2000 0",
            "1000 0 2 2000 -1",
            "1000 0 2 2000 5 5",
            "1000 1500 0 1500 5",
        ] {
            assert_eq!(read(lie, &[line]), None, "{lie}");
        }
        let shadow = Charge { shadow: true, ..line };
        assert_eq!(read("1000 0 2 2000 5", &[shadow]), None, "a shadow holds nobody");
    }

    #[test]
    fn an_answer_that_cannot_be_true_is_none() {
        let key = key("api", "ann");
        let charges = [charge(&LOG, &key)];
        let read = |reply: &str| Script::decision(&Value::BulkString(reply.into()), &charges);
        let decision = read("1000 0 4 2000").unwrap();
        assert!(decision.admitted);
        assert_eq!(
            decision.standings.as_slice(),
            [Some(Standing { remaining: 4, grows_at_us: Some(2000), refusal: None })]
        );
        assert!(!read("1000 1500 0 1500").unwrap().admitted);
        for lie in [
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
        ] {
            assert_eq!(read(lie), None, "{lie}");
        }
        for lie in [Value::Nil, Value::Okay, Value::Int(5), Value::Array(Vec::new())] {
            assert_eq!(Script::decision(&lie, &charges), None, "{lie:?}");
        }
    }
}
