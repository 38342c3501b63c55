//! Programs that admit ordinary requests in straight code ([`plain.lua`](../plain.lua)).

use super::{ALGORITHM_SOURCES, LuaProgram, has_options, letter_and_flags, strip_source};
use crate::limiter::{Algorithm, Charge};
use redis::{Cmd, RedisWrite};
use smallvec::SmallVec;

/// The most charges of one request that a plain program admits.
const MAX_PLAIN_CHARGES: usize = 4;

/// Debts of plain buckets, and the times at which they are paid, are exact in a double.
const MAX_PLAIN_DEBT: u64 = 1 << 52;

/// The algorithm of an ordinary charge: cost within the capacity, and no option of its policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PlainRule {
    Log = 1,
    SubWindows,
    Window,
    Bucket,
    Queue,
}

/// The rules of a request's charges, in order.
pub(crate) type PlainRules = SmallVec<[PlainRule; MAX_PLAIN_CHARGES]>;

/// The number of different [`PlainRules`], also of the empty ones.
pub(super) const PLAIN_PROGRAM_COUNT: usize = 6_usize.pow(4);

impl PlainRule {
    /// The rule of a charge if it is ordinary.
    pub(crate) fn from_charge(charge: &Charge<'_, '_>) -> Option<Self> {
        let limit = charge.limit;
        let capacity = limit.capacity();
        let is_paid_exactly =
            limit.requests > 0 && capacity.saturating_mul(limit.per_us) < MAX_PLAIN_DEBT;
        let is_in_ms =
            |offset_us: u64| limit.per_us.is_multiple_of(1000) && offset_us.is_multiple_of(1000);
        let rule = match limit.algorithm {
            Algorithm::SlidingLog if charge.cost == 1 => Self::Log,
            Algorithm::SlidingWindow { .. } => Self::SubWindows,
            // In whole milliseconds, a key can expire exactly with its window.
            Algorithm::FixedWindow { offset_us }
                if is_in_ms(offset_us) && capacity < limit.per_us / 2 =>
            {
                Self::Window
            }
            Algorithm::TokenBucket { warm_up_us: 0, .. } if is_paid_exactly => Self::Bucket,
            Algorithm::LeakyBucket { .. } if is_paid_exactly => Self::Queue,
            _ => return None,
        };
        let is_ordinary = !has_options(charge) && charge.name.is_none();
        (is_ordinary && (1..=capacity).contains(&charge.cost)).then_some(rule)
    }

    /// The rules of a request's charges if all are ordinary, and few enough.
    pub(crate) fn of_request(
        charges: impl ExactSizeIterator<Item = Option<Self>>,
    ) -> Option<PlainRules> {
        let is_possible = (1..=MAX_PLAIN_CHARGES).contains(&charges.len());
        is_possible.then(|| charges.collect())?
    }

    /// An algorithm of this rule, with any parameters.
    fn algorithm(self) -> Algorithm {
        match self {
            Self::Log => Algorithm::SlidingLog,
            Self::SubWindows => Algorithm::SlidingWindow { buckets: 0 },
            Self::Window => Algorithm::FixedWindow { offset_us: 0 },
            Self::Bucket => Algorithm::TokenBucket {
                burst: 0,
                warm_up_us: 0,
            },
            Self::Queue => Algorithm::LeakyBucket { max_delay_us: 0 },
        }
    }

    /// The file with the sections of the rule: that of the first flag.
    fn source(self) -> &'static str {
        let (_, flags) = letter_and_flags(self.algorithm());
        let file = ALGORITHM_SOURCES.get(flags.trailing_zeros() as usize);
        file.copied().unwrap_or_default()
    }

    /// The text of a section for one charge. `number` counts the charges from 1; the cost is the
    /// argument `first`, and the other numbers of the charge follow.
    fn section(self, name: &str, number: usize, first: usize) -> String {
        let argument = |nth: usize| format!("ARGV[{}]", first + nth);
        let slack = match self {
            Self::Queue => argument(4),
            _ => "nil".to_owned(),
        };
        strip_source(self.source(), |section| section == Some(name))
            .replace("_N", &format!("_{number}"))
            .replace("KEY", &format!("KEYS[{number}]"))
            .replace("COST", &argument(0))
            .replace("CAPACITY", &argument(1))
            .replace("PARAMETER", &argument(3))
            .replace("PER", &argument(2))
            .replace("SLACK", &slack)
    }

    /// The arguments of a charge, from the text that the general program reads.
    pub(crate) fn arguments(self, text: &[u8]) -> impl Iterator<Item = &[u8]> {
        // Without the letter of the algorithm, and the number and the options of the policy.
        let numbers = text.split(|byte| b" +".contains(byte)).skip(2);
        numbers.take(self.argument_count())
    }

    fn argument_count(self) -> usize {
        match self {
            Self::Log => 3,
            Self::SubWindows | Self::Window | Self::Bucket => 4,
            Self::Queue => 5,
        }
    }

    /// Lua code for the text of a charge that the general program reads.
    fn general_text(self, number: usize, first: usize) -> String {
        let (letter, _) = letter_and_flags(self.algorithm());
        // Every charge has a policy of its own. The later ones belong to the same request.
        let group = if number == 1 { 0 } else { 32 * number + 8 };
        let last = first + 3;
        let parameters = match self {
            Self::Log => "0".to_owned(),
            Self::SubWindows | Self::Window | Self::Bucket => format!("' .. ARGV[{last}] .. '"),
            Self::Queue => format!("' .. ARGV[{last}] .. '+' .. ARGV[{}] .. '", last + 1),
        };
        format!(
            "'{letter} {group} ' .. ARGV[{first}] .. ' ' .. ARGV[{}] .. ' ' .. ARGV[{}] .. ' {parameters}'",
            first + 1,
            first + 2
        )
    }
}

/// Writes the arguments of a window that is alone, from the text that the general program reads.
pub(crate) fn push_lone_window_arguments(command: &mut Cmd, text: &[u8], time_us: Option<u64>) {
    let numbers: SmallVec<[&[u8]; 4]> = PlainRule::Window.arguments(text).collect();
    let [cost, capacity, per, offset] = numbers[..] else {
        return;
    };
    let time = time_us.map(|us| us.to_string()).unwrap_or_default();
    let optional: [(&[u8], &[u8]); 3] = [(offset, b"0"), (cost, b"1"), (time.as_bytes(), b"")];
    let is_given = |(value, default): &(&[u8], &[u8])| value != default;
    let given_count = optional
        .iter()
        .rposition(is_given)
        .map_or(0, |last| last + 1);
    let given = optional.iter().take(given_count).map(|(value, _)| *value);
    [capacity, per]
        .into_iter()
        .chain(given)
        .for_each(|argument| command.write_arg(argument));
}

/// The position of a plain program among [`PLAIN_PROGRAM_COUNT`].
pub(super) fn program_index(rules: &[PlainRule]) -> usize {
    let digits = rules.iter().rev().map(|rule| *rule as usize);
    digits.fold(0, |index, digit| 6 * index + digit)
}

impl LuaProgram {
    /// The plain program, with the general one at its end.
    pub(super) fn plain(rules: &[PlainRule]) -> Self {
        let mut flags = 0;
        let (mut checks, mut charges) = (String::new(), String::new());
        let (mut format, mut numbers) = ("%d".to_owned(), "now".to_owned());
        let (mut general_texts, mut first) = (String::new(), 2);
        for (number, rule) in (1..).zip(rules) {
            flags |= letter_and_flags(rule.algorithm()).1;
            checks.push_str(&rule.section("plain check", number, first));
            charges.push_str(&rule.section("plain charge", number, first));
            format.push_str(" 0 %d %d");
            numbers.push_str(&format!(", remaining_{number}, growth_{number}"));
            general_texts.push_str(&format!(", {}", rule.general_text(number, first)));
            first += rule.argument_count();
        }
        let start = match rules {
            [PlainRule::Window] => strip_source(PlainRule::Window.source(), |section| {
                section == Some("plain alone")
            }),
            _ => {
                let frame = strip_source(include_str!("../plain.lua"), |section| section.is_none());
                format!(
                    "{frame}repeat\n{checks}{charges}\
                     local reply = format('{format}', {numbers})\n\
                     if delay > 0 then reply = reply .. format(' %d', delay) end\n\
                     return reply\nuntil true\n"
                )
            }
        };
        let general = Self::new(flags).text;
        Self::from_text(format!(
            "{start}local ARGV = {{ ARGV[1]{general_texts} }}\n{general}"
        ))
    }
}
