//! The keys of counters and of the membership sets in Redis.

use super::ScriptLibrary;
use crate::limiter::{Algorithm, Calendar, CounterRef, Key, Limit, MAX_UNITS};

/// A readable part of a key longer than this many bytes is left out.
const MAX_READABLE_KEY_BYTES: usize = 64;

/// The end of the key of an override, after the id of the key that it is for.
const OVERRIDE_KEY_END: &str = "}:override";

impl ScriptLibrary {
    /// The Redis key of a counter: `<prefix>:v1:{<hash>}:<algorithm>:<per in µs>[+<offset
    /// or buckets>][:<readable key>]`. For a fixed window, `@` instead of `+` names the format of
    /// the value; for a period of a calendar, `<per>+<offset>` is `<unit>+<time zone>`. A response
    /// counter has `counted:` before the algorithm, the counter of a notification `notified:`; both
    /// are not parsed as counters.
    pub fn counter_key(&self, counter: CounterRef<'_>) -> String {
        let mut key = String::new();
        self.push_counter_key(&mut key, counter);
        key
    }

    /// The name of a counter: its key without the readable part.
    pub(crate) fn counter_name(&self, counter: CounterRef<'_>) -> String {
        let mut name = String::new();
        self.push_counter_name(&mut name, counter);
        name
    }

    pub(crate) fn push_counter_key(&self, key: &mut String, counter: CounterRef<'_>) {
        self.push_counter_name(key, counter);
        let end = key.len();
        key.push(':');
        counter.key.append_readable_to(key);
        if key.len() - end > 1 + MAX_READABLE_KEY_BYTES {
            key.truncate(end);
        }
    }

    /// Appends the key without its readable part: it names the counter and contains no value of a
    /// client.
    fn push_counter_name(&self, key: &mut String, counter: CounterRef<'_>) {
        key.push_str(&self.counter_key_prefix);
        push_hex_id(key, counter.key.quota_id());
        let (algorithm, per_us) = counter.limit.counter_identity();
        let kind = if counter.key.is_response_counter_key() {
            "}:counted:"
        } else if counter.key.is_notification_key() {
            "}:notified:"
        } else {
            "}:"
        };
        key.extend([kind, algorithm.into_str(), ":"]);
        let (separator, variant) = match algorithm {
            Algorithm::CalendarWindow { calendar } => {
                return key.extend([calendar.unit().as_str(), "+", calendar.zone_name()]);
            }
            Algorithm::SlidingWindow { buckets } => ("+", Some(buckets)),
            Algorithm::FixedWindow { offset_us } => ("@", Some(offset_us)),
            _ => ("", None),
        };
        let mut number = itoa::Buffer::new();
        key.push_str(number.format(per_us));
        if let Some(variant) = variant {
            key.push_str(separator);
            key.push_str(number.format(variant));
        }
    }

    /// The Redis key of the override of a key.
    pub fn override_key(&self, key: &Key) -> String {
        let mut text = String::new();
        self.push_override_key(&mut text, key.quota_id());
        text
    }

    /// Appends the Redis key of the override of a key: `<prefix>:v1:{<hash>}:override`, in the slot
    /// of the key's counters.
    pub(crate) fn push_override_key(&self, text: &mut String, key_id: u128) {
        text.push_str(&self.counter_key_prefix);
        push_hex_id(text, key_id);
        text.push_str(OVERRIDE_KEY_END);
    }

    /// Parses the Redis key of an override: the id of its key.
    pub(crate) fn parse_override_key(&self, key: &str) -> Option<u128> {
        let id = key
            .strip_prefix(&self.counter_key_prefix)?
            .strip_suffix(OVERRIDE_KEY_END)?;
        u128::from_str_radix(id, 16).ok().filter(|_| id.len() == 32)
    }

    /// The `SCAN` pattern for all overrides.
    pub(crate) fn override_scan_pattern(&self) -> String {
        let all = self.scan_pattern(None);
        format!("{all}{OVERRIDE_KEY_END}")
    }

    /// Parses the key of a counter: its readable part, and a limit with its algorithm and period.
    /// Returns `None` if it is not the key of a counter.
    pub(crate) fn parse_counter_key(&self, key: &str) -> Option<(Limit, Option<String>)> {
        let rest = key
            .strip_prefix(&self.counter_key_prefix)?
            .split_once("}:")?
            .1;
        let mut words = rest.splitn(3, ':');
        let (algorithm, period, readable) = (words.next()?, words.next()?, words.next());
        let (per_us, variant) = period.split_once(['+', '@']).unwrap_or((period, "0"));
        if let ("fixed_window", Some(calendar)) = (algorithm, Calendar::from_names(per_us, variant))
        {
            let limit = Limit::per_calendar_period(MAX_UNITS, calendar);
            return Some((limit, readable.map(str::to_owned)));
        }
        let variant = variant.parse().ok()?;
        let algorithm = match algorithm {
            "sliding_log" => Algorithm::SlidingLog,
            "sliding_window" => Algorithm::SlidingWindow { buckets: variant },
            "fixed_window" if period.contains('@') => Algorithm::FixedWindow { offset_us: variant },
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
        let limit = Limit {
            requests: MAX_UNITS,
            per_us: per_us.parse().ok()?,
            algorithm,
        };
        Some((limit, readable.map(str::to_owned)))
    }

    /// The `SCAN` pattern for all counters, or for those of one policy with a readable key.
    pub(crate) fn scan_pattern(&self, policy: Option<&str>) -> String {
        // The prefix may contain glob characters. Each is replaced by `?`, which matches any
        // character, so the caller must check the prefix of each found key.
        let start = self
            .counter_key_prefix
            .replace(['\\', '*', '?', '[', ']'], "?");
        match policy {
            None => format!("{start}*"),
            // In a key, a value or nothing follows the name of the policy.
            Some(policy) => format!("{start}*}}:*:{policy}*"),
        }
    }

    /// The keys of the two sorted sets of live instances: by heartbeat, and by id. Both are in one
    /// hash slot.
    pub(crate) fn membership_keys(&self) -> [String; 2] {
        let instances = format!("{}instances", self.counter_key_prefix.trim_end_matches('{'));
        let ids = format!("{instances}:{{{instances}}}");
        [instances, ids]
    }
}

pub(crate) fn push_hex_id(text: &mut String, id: u128) {
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
