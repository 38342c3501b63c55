//! An override of one key as stores keep it, and its text in Redis.
//!
//! The text is `RULE[@EXPIRES_MS] POLICY/VALUE/..`, then optionally a line with the author and one
//! with the note. `decide.lua` reads only the rule: `*` unlimited, `!` blocked, else
//! `LIMIT=REQUESTS[+BURST],..`. The policy and the values are there for lists: the Redis key has
//! only their hash.

use crate::limiter::{Key, KeyOverride, LimitAmounts};

/// Maximum length of a note and of an author, in bytes.
pub const MAX_REMARK_BYTES: usize = 500;

/// The latest expiry (ms since the epoch), in June 2255: the end of this millisecond, in µs, is
/// exact in a script. A stored override that expires later has no end. `decide.lua` has the same
/// number.
pub const MAX_OVERRIDE_EXPIRY_MS: u64 = (1 << 53) / 1000 - 1;

/// An override, the key that it is for, and remarks for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredOverride {
    pub key: Key,
    pub rule: KeyOverride,
    /// When it ends by itself (ms since the epoch).
    pub expires_at_ms: Option<u64>,
    /// One line without control characters.
    pub author: Option<Box<str>>,
    /// As `author`.
    pub note: Option<Box<str>>,
}

impl StoredOverride {
    /// The text in Redis.
    pub fn to_text(&self) -> String {
        let mut text = self.format_rule();
        if let Some(expires_at_ms) = self.expires_at_ms {
            text.push('@');
            text.push_str(&expires_at_ms.to_string());
        }
        text.push(' ');
        self.key.append_full_text_to(&mut text);
        if self.author.is_some() || self.note.is_some() {
            for remark in [&self.author, &self.note] {
                text.push('\n');
                text.push_str(remark.as_deref().unwrap_or_default());
            }
        }
        text
    }

    /// Parses the text in Redis. Returns `None` if it is foreign.
    pub fn from_text(text: &str) -> Option<Self> {
        let mut lines = text.split('\n');
        let (head, key) = lines.next()?.split_once(' ')?;
        let (rule, expires_at_ms) = split_rule_and_expiry(head)?;
        let mut next_remark = || lines.next().filter(|line| !line.is_empty()).map(Into::into);
        Some(Self {
            key: Key::from_full_text(key)?,
            rule: parse_override_rule(rule)?,
            expires_at_ms,
            author: next_remark(),
            note: next_remark(),
        })
    }

    /// The rule as [`parse_override_rule`] reads it.
    pub fn format_rule(&self) -> String {
        let limits = match &self.rule {
            KeyOverride::Unlimited => return "*".to_owned(),
            KeyOverride::Blocked => return "!".to_owned(),
            KeyOverride::Limits(limits) => limits,
        };
        let limits = limits.iter().map(|amounts| {
            let burst = amounts
                .burst
                .map_or_else(String::new, |burst| format!("+{burst}"));
            format!("{}={}{burst}", amounts.limit, amounts.requests)
        });
        limits.collect::<Vec<_>>().join(",")
    }

    pub fn is_expired(&self, now_us: u64) -> bool {
        self.expires_at_ms
            .is_some_and(|at_ms| override_end_us(at_ms) <= now_us)
    }
}

/// When an override with this expiry ends (µs). Redis keeps a key through the whole millisecond of
/// its expiry.
pub fn override_end_us(expires_at_ms: u64) -> u64 {
    expires_at_ms.saturating_add(1).saturating_mul(1000)
}

/// Divides the start of an override's text, `RULE[@EXPIRES_MS] ...`, as `decide.lua` does. Returns
/// `None` if the expiry is not a number.
pub(super) fn split_rule_and_expiry(text: &str) -> Option<(&str, Option<u64>)> {
    let word = text.split(' ').next().unwrap_or_default();
    let Some((rule, expiry)) = word.split_once('@') else {
        return Some((word, None));
    };
    let is_number = !expiry.is_empty() && expiry.bytes().all(|byte| byte.is_ascii_digit());
    let expires_at_ms: Option<u64> = expiry.parse().ok();
    let expires_at_ms = expires_at_ms.filter(|at_ms| *at_ms <= MAX_OVERRIDE_EXPIRY_MS);
    is_number.then_some((rule, expires_at_ms))
}

/// Parses the rule of an override.
pub fn parse_override_rule(text: &str) -> Option<KeyOverride> {
    match text {
        "*" => return Some(KeyOverride::Unlimited),
        "!" => return Some(KeyOverride::Blocked),
        _ => {}
    }
    let limits = text.split(',').map(|limit| {
        let (name, amounts) = limit.split_once('=')?;
        let (requests, burst) = match amounts.split_once('+') {
            Some((requests, burst)) => (requests, Some(burst.parse().ok()?)),
            None => (amounts, None),
        };
        Some(LimitAmounts {
            limit: name.into(),
            requests: requests.parse().ok()?,
            burst,
        })
    });
    limits.collect::<Option<_>>().map(KeyOverride::Limits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limiter::KeyBuilder;

    fn key(values: &[Option<&str>]) -> Key {
        let mut builder = KeyBuilder::new("api");
        for value in values {
            builder.push_key_value(value.map(str::as_bytes));
        }
        builder.finish()
    }

    #[test]
    fn a_text_is_read_as_it_was_written() {
        let long = "x".repeat(100);
        let limits = vec![
            LimitAmounts {
                limit: "api".into(),
                requests: 5000,
                burst: None,
            },
            LimitAmounts {
                limit: "day.of-all".into(),
                requests: 0,
                burst: Some(7),
            },
        ];
        let plain = StoredOverride {
            key: key(&[Some("ann"), None, Some("a/b %\n#-"), Some("-"), Some(&long)]),
            rule: KeyOverride::Limits(limits),
            expires_at_ms: None,
            author: None,
            note: None,
        };
        let texts = [
            plain.clone(),
            StoredOverride {
                rule: KeyOverride::Unlimited,
                expires_at_ms: Some(1_790_000_000_000),
                note: Some("see ticket 7".into()),
                ..plain.clone()
            },
            StoredOverride {
                rule: KeyOverride::Blocked,
                author: Some("ann@example.com".into()),
                ..plain
            },
        ];
        for stored in texts {
            let text = stored.to_text();
            assert_eq!(StoredOverride::from_text(&text), Some(stored), "{text}");
        }
    }

    #[test]
    fn the_usual_override_is_short() {
        let stored = StoredOverride {
            key: key(&[Some("customer-1234567")]),
            rule: KeyOverride::Limits(vec![LimitAmounts {
                limit: "api".into(),
                requests: 5000,
                burst: None,
            }]),
            expires_at_ms: None,
            author: None,
            note: None,
        };
        assert_eq!(stored.to_text(), "api=5000 api/customer-1234567");
    }

    #[test]
    fn an_override_that_ends_beyond_exact_times_has_no_end() {
        for (expiry, expected) in [
            ("9007199254739", Some(MAX_OVERRIDE_EXPIRY_MS)),
            ("9007199254740", None),
            ("253402300799999", None),
            ("99999999999999999999999999", None),
        ] {
            let stored = StoredOverride::from_text(&format!("!@{expiry} api/a")).unwrap();
            assert_eq!(stored.expires_at_ms, expected, "{expiry}");
        }
        assert!(override_end_us(MAX_OVERRIDE_EXPIRY_MS) <= 1 << 53);
    }

    #[test]
    fn a_foreign_text_is_no_override() {
        for text in [
            "",
            "*",
            "api=5",
            "x api/a",
            "api=x api/a",
            "api=1@ api/a",
            "api=1@-1 api/a",
            "*@+5 api/a",
            "*@1e30 api/a",
            "!@1@2 api/a",
            "* api/%zz",
            "* api/#abc",
            "* ",
        ] {
            assert_eq!(StoredOverride::from_text(text), None, "{text:?}");
        }
    }
}
