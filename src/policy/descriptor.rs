//! What others ask a rate-limit service about: descriptors, lists of named values, instead of requests.

use super::{Named, NamedLimit, Unmet};
use crate::limiter::{Algorithm, Limit, MAX_UNITS};
use std::borrow::Cow;
use std::sync::OnceLock;

/// Above this, an override of a limit is counted in parts instead of one by one.
const LARGE_LOG: u64 = 100_000;

/// One descriptor of a call, borrowed from the call. Who sent it has read the request; there is no head to look at.
#[derive(Debug)]
pub struct Descriptor<'a> {
    pub domain: &'a str,
    /// Names and values in their order. A name may occur more than once.
    pub entries: &'a [(&'a str, &'a str)],
    /// How often the request counts, at most [`MAX_UNITS`]. 0: it is only asked whether anything is left.
    pub hits: u64,
    /// So many units per so many microseconds (at least 1), instead of what policies say.
    pub instead: Option<(u32, u64)>,
    limit: OnceLock<NamedLimit>,
}

/// Conditions on a descriptor. A matcher that has them is for descriptors only, one without for requests only.
#[derive(Clone, Debug, Default)]
pub struct Described {
    /// `None`: any.
    pub domain: Option<Box<str>>,
    /// The entries that there have to be, in whatever order, and no others: a descriptor that says more asks for another
    /// limit. `None`: any.
    pub entries: Option<Vec<Named<Box<str>>>>,
}

impl<'a> Descriptor<'a> {
    pub fn new(
        domain: &'a str,
        entries: &'a [(&'a str, &'a str)],
        hits: u64,
        instead: Option<(u32, u64)>,
    ) -> Self {
        Self {
            domain,
            entries,
            hits: hits.min(MAX_UNITS),
            instead,
            limit: OnceLock::new(),
        }
    }

    pub(super) fn values(&self, name: &str) -> impl Iterator<Item = Cow<'a, [u8]>> {
        let found = self.entries.iter().filter(move |(found, _)| *found == name);
        found.map(|(_, value)| Cow::Borrowed(value.as_bytes()))
    }

    /// All entries as one value, no two lists as the same one: `generic_key=api,path=/a`.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for (nth, (name, value)) in self.entries.iter().enumerate() {
            if nth > 0 {
                text.push(',');
            }
            push_escaped(&mut text, name);
            text.push('=');
            push_escaped(&mut text, value);
        }
        text
    }

    /// The limit that it brings along, counted as the first policy that it meets counts.
    pub(super) fn own_limit(&self, policy: &str, usual: &[NamedLimit]) -> Option<&[NamedLimit]> {
        let (requests, per_us) = self.instead?;
        let requests = u64::from(requests);
        let limit = self.limit.get_or_init(|| {
            let usual = usual.first();
            let algorithm = counted_as(usual.map(|named| named.limit.algorithm), requests, per_us);
            let unit = usual.and_then(|named| named.unit.clone());
            NamedLimit {
                name: policy.into(),
                unit,
                limit: Limit {
                    requests,
                    per_us,
                    algorithm,
                },
            }
        });
        Some(std::slice::from_ref(limit))
    }
}

/// The algorithm for an amount that nobody has checked: the usual one, unless it can't count so many.
fn counted_as(usual: Option<Algorithm>, requests: u64, per_us: u64) -> Algorithm {
    match usual {
        Some(Algorithm::SlidingWindow { buckets }) => Algorithm::SlidingWindow { buckets },
        Some(Algorithm::FixedWindow { .. }) => Algorithm::FixedWindow { offset_us: 0 },
        Some(Algorithm::TokenBucket { .. })
            if requests
                .checked_mul(per_us)
                .is_some_and(|debt| debt <= MAX_UNITS) =>
        {
            Algorithm::TokenBucket {
                burst: requests.max(1),
                warm_up_us: 0,
            }
        }
        Some(Algorithm::SlidingLog) | None if requests <= LARGE_LOG => Algorithm::SlidingLog,
        _ => Algorithm::SlidingWindow { buckets: 10 },
    }
}

fn push_escaped(text: &mut String, part: &str) {
    for sign in part.chars() {
        if matches!(sign, ',' | '=' | '\\') {
            text.push('\\');
        }
        text.push(sign);
    }
}

impl Described {
    pub(super) fn first_unmet(&self, descriptor: &Descriptor<'_>) -> Option<Unmet<'_>> {
        if self
            .domain
            .as_deref()
            .is_some_and(|domain| domain != descriptor.domain)
        {
            return Some(Unmet::Domain);
        }
        let wanted = self.entries.as_ref()?;
        let unmet = wanted
            .iter()
            .find(|entry| !entry.test.holds(descriptor.values(&entry.name)));
        match unmet {
            Some(entry) => Some(Unmet::Entry(&entry.name)),
            // Names that are wanted are different ones, so there are others, or one of these twice.
            None => (wanted.len() != descriptor.entries.len()).then_some(Unmet::OtherEntries),
        }
    }

    pub(super) fn covers(&self, other: &Self) -> bool {
        let domain = self.domain.is_none() || self.domain == other.domain;
        domain
            && match (&self.entries, &other.entries) {
                (None, _) => true,
                (Some(_), None) => false,
                (Some(mine), Some(others)) => {
                    mine.len() == others.len() && super::covers::implied(mine, others)
                }
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Test;

    fn described(domain: Option<&str>, entries: Option<&[(&str, Option<&str>)]>) -> Described {
        let entry = |(name, value): &(&str, Option<&str>)| Named {
            name: (*name).into(),
            test: value.map_or(Test::Present(true), |value| Test::Is(value.into())),
        };
        Described {
            domain: domain.map(Into::into),
            entries: entries.map(|entries| entries.iter().map(entry).collect()),
        }
    }

    fn matches(described: &Described, entries: &[(&str, &str)]) -> bool {
        described
            .first_unmet(&Descriptor::new("edge", entries, 1, None))
            .is_none()
    }

    #[test]
    fn a_descriptor_has_what_is_wanted_and_nothing_else() {
        let both = described(
            Some("edge"),
            Some(&[("tenant", Some("acme")), ("path", None)]),
        );
        assert!(matches(&both, &[("tenant", "acme"), ("path", "/")]));
        assert!(matches(&both, &[("path", "/"), ("tenant", "acme")]));
        for other in [
            &[("tenant", "acme")][..],
            &[("tenant", "other"), ("path", "/")],
            &[("tenant", "acme"), ("path", "/"), ("user", "1")],
            &[("tenant", "acme"), ("path", "/"), ("path", "/")],
            &[("tenant", "acme"), ("tenant", "acme")],
            &[("Tenant", "acme"), ("path", "/")],
            &[],
        ] {
            assert!(!matches(&both, other), "{other:?}");
        }
        assert!(!matches(&described(Some("other"), None), &[("a", "b")]));
        assert!(matches(
            &described(Some("edge"), None),
            &[("a", "b"), ("a", "c")]
        ));
        assert!(matches(&described(None, Some(&[])), &[]));
    }

    #[test]
    fn conditions_cover_what_asks_for_more() {
        let all = described(None, None);
        let edge = described(Some("edge"), None);
        let any = described(Some("edge"), Some(&[("a", None)]));
        let one = described(Some("edge"), Some(&[("a", Some("1"))]));
        for (wide, narrow) in [(&all, &edge), (&edge, &any), (&any, &one), (&all, &one)] {
            assert!(wide.covers(narrow) && !narrow.covers(wide));
        }
        let two = described(Some("edge"), Some(&[("a", None), ("b", None)]));
        assert!(!any.covers(&two) && !two.covers(&any));
    }

    #[test]
    fn no_two_descriptors_read_alike() {
        let text = |entries: &[(&str, &str)]| Descriptor::new("d", entries, 1, None).text();
        assert_eq!(
            text(&[("generic_key", "api"), ("path", "/a")]),
            "generic_key=api,path=/a"
        );
        assert_ne!(text(&[("a", "1,b=2")]), text(&[("a", "1"), ("b", "2")]));
        assert_ne!(text(&[("a", "1\\"), ("b", "2")]), text(&[("a", "1\\,b=2")]));
        assert_ne!(text(&[("a=", "1")]), text(&[("a", "=1")]));
    }

    #[test]
    fn an_amount_that_nobody_has_checked_is_counted_by_what_can() {
        let bucket = Some(Algorithm::TokenBucket {
            burst: 5,
            warm_up_us: 9,
        });
        let year = 31_536_000_000_000;
        assert_eq!(
            counted_as(bucket, 60, 60_000_000),
            Algorithm::TokenBucket {
                burst: 60,
                warm_up_us: 0
            }
        );
        assert_eq!(
            counted_as(bucket, u32::MAX.into(), year),
            Algorithm::SlidingWindow { buckets: 10 }
        );
        assert_eq!(
            counted_as(Some(Algorithm::SlidingLog), 100, year),
            Algorithm::SlidingLog
        );
        assert_eq!(
            counted_as(Some(Algorithm::SlidingLog), 1 << 20, year),
            Algorithm::SlidingWindow { buckets: 10 }
        );
        let hour = Some(Algorithm::FixedWindow {
            offset_us: 3_600_000_000,
        });
        assert_eq!(
            counted_as(hour, 5, 1_000_000),
            Algorithm::FixedWindow { offset_us: 0 }
        );
    }
}
