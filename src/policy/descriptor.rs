//! Descriptors: the lists of named values in calls to the rate-limit service.

use super::{NamedLimit, SlotRelease};
use crate::limiter::{Algorithm, Limit, MAX_UNITS};
use std::borrow::Cow;
use std::sync::OnceLock;

/// Override limits above this number use a sliding window instead of a sliding log.
const MAX_SLIDING_LOG_OVERRIDE: u64 = 100_000;

/// One descriptor of a call to the rate-limit service. It comes without a request, which only the
/// caller of the service has.
#[derive(Debug)]
pub struct Descriptor<'a> {
    pub domain: &'a str,
    /// Names and values in order. A name may occur more than once.
    pub entries: &'a [(&'a str, &'a str)],
    /// The number of hits that the request counts as, at most [`MAX_UNITS`]. With 0 hits, a call
    /// only tests whether a request would be allowed.
    pub hits: u64,
    /// A limit of this many units per this many microseconds (at least 1), instead of the policy's
    /// limits.
    pub limit_override: Option<(u32, u64)>,
    override_limit: OnceLock<NamedLimit>,
}

impl<'a> Descriptor<'a> {
    pub fn new(
        domain: &'a str,
        entries: &'a [(&'a str, &'a str)],
        hits: u64,
        limit_override: Option<(u32, u64)>,
    ) -> Self {
        Self {
            domain,
            entries,
            hits: hits.min(MAX_UNITS),
            limit_override,
            override_limit: OnceLock::new(),
        }
    }

    pub(super) fn values(&self, name: &str) -> impl Iterator<Item = Cow<'a, [u8]>> {
        let found = self.entries.iter().filter(move |(found, _)| *found == name);
        found.map(|(_, value)| Cow::Borrowed(value.as_bytes()))
    }

    /// All entries as one text, such as `generic_key=api,path=/a`. Different lists have different
    /// texts.
    pub fn canonical_text(&self) -> String {
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

    /// Returns the descriptor's own limit, if it has one. The first policy that calls this
    /// determines the algorithm of the limit.
    pub(super) fn resolve_override_limit(
        &self,
        policy_name: &str,
        policy_limits: &[NamedLimit],
    ) -> Option<&[NamedLimit]> {
        let (requests, per_us) = self.limit_override?;
        let requests = u64::from(requests);
        let limit = self.override_limit.get_or_init(|| {
            let usual = policy_limits.first();
            let algorithm = choose_override_algorithm(
                usual.map(|named| named.limit.algorithm),
                requests,
                per_us,
            );
            let unit = usual.and_then(|named| named.unit.clone());
            NamedLimit {
                amount: None,
                is_reported: usual.is_none_or(|named| named.is_reported),
                release: SlotRelease::default(),
                name: policy_name.into(),
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

/// Chooses an algorithm for an unvalidated limit: the policy's algorithm, unless it cannot count
/// that many units.
fn choose_override_algorithm(
    policy_algorithm: Option<Algorithm>,
    requests: u64,
    per_us: u64,
) -> Algorithm {
    match policy_algorithm {
        Some(Algorithm::SlidingWindow { buckets }) => Algorithm::SlidingWindow { buckets },
        // The descriptor names its own period.
        Some(Algorithm::FixedWindow { .. } | Algorithm::CalendarWindow { .. }) => {
            Algorithm::FixedWindow { offset_us: 0 }
        }
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
        Some(Algorithm::SlidingLog) | None if requests <= MAX_SLIDING_LOG_OVERRIDE => {
            Algorithm::SlidingLog
        }
        _ => Algorithm::SlidingWindow { buckets: 10 },
    }
}

fn push_escaped(text: &mut String, part: &str) {
    for character in part.chars() {
        if matches!(character, ',' | '=' | '\\') {
            text.push('\\');
        }
        text.push(character);
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::policy::{AcceptedEntries, Facts, KeyPart, Matcher, PartCondition, ValueCondition};

    /// A matcher with one condition.
    pub(crate) fn matcher_with(part: KeyPart, condition: ValueCondition) -> Matcher {
        Matcher {
            conditions: vec![PartCondition { part, condition }],
            ..Matcher::default()
        }
    }

    pub(crate) fn make_descriptor_matcher(
        domain: Option<&str>,
        entries: Option<&[(&str, Option<&str>)]>,
    ) -> Matcher {
        let entry = |(name, value): &(&str, Option<&str>)| PartCondition {
            part: KeyPart::DescriptorEntry((*name).into()),
            condition: value.map_or(ValueCondition::Present(true), |value| {
                ValueCondition::equals(value)
            }),
        };
        let domain = domain.map(|name| PartCondition {
            part: KeyPart::DescriptorDomain,
            condition: ValueCondition::equals(name),
        });
        let accepted = match entries {
            Some(_) => AcceptedEntries::Listed,
            None => AcceptedEntries::Any,
        };
        let entries = entries.unwrap_or_default().iter().map(entry);
        Matcher {
            conditions: domain.into_iter().chain(entries).collect(),
            accepted_entries: Some(accepted),
            ..Matcher::default()
        }
    }

    fn matches_entries(matcher: &Matcher, entries: &[(&str, &str)]) -> bool {
        let descriptor = Descriptor::new("edge", entries, 1, None);
        let facts = Facts {
            descriptor: Some(&descriptor),
            ..Facts::placeholder()
        };
        matcher.matches(&facts, "/")
    }

    #[test]
    fn a_descriptor_must_have_exactly_the_expected_entries() {
        let both = make_descriptor_matcher(
            Some("edge"),
            Some(&[("tenant", Some("acme")), ("path", None)]),
        );
        assert!(matches_entries(&both, &[("tenant", "acme"), ("path", "/")]));
        assert!(matches_entries(&both, &[("path", "/"), ("tenant", "acme")]));
        for other in [
            &[("tenant", "acme")][..],
            &[("tenant", "other"), ("path", "/")],
            &[("tenant", "acme"), ("path", "/"), ("user", "1")],
            &[("tenant", "acme"), ("path", "/"), ("path", "/")],
            &[("tenant", "acme"), ("tenant", "acme")],
            &[("Tenant", "acme"), ("path", "/")],
            &[],
        ] {
            assert!(!matches_entries(&both, other), "{other:?}");
        }
        assert!(!matches_entries(
            &make_descriptor_matcher(Some("other"), None),
            &[("a", "b")]
        ));
        assert!(matches_entries(
            &make_descriptor_matcher(Some("edge"), None),
            &[("a", "b"), ("a", "c")]
        ));
        assert!(matches_entries(
            &make_descriptor_matcher(None, Some(&[])),
            &[]
        ));
    }

    #[test]
    fn a_descriptor_may_have_more_entries_if_the_policy_says_so() {
        let subset = Matcher {
            accepted_entries: Some(AcceptedEntries::More),
            ..make_descriptor_matcher(
                Some("edge"),
                Some(&[("tenant", Some("acme")), ("path", None)]),
            )
        };
        for matching in [
            &[("tenant", "acme"), ("path", "/")][..],
            &[("user", "1"), ("tenant", "acme"), ("path", "/")],
            &[("tenant", "acme"), ("path", "/"), ("path", "/a")],
        ] {
            assert!(matches_entries(&subset, matching), "{matching:?}");
        }
        for other in [
            &[("tenant", "acme")][..],
            &[("tenant", "other"), ("path", "/"), ("user", "1")],
            &[],
        ] {
            assert!(!matches_entries(&subset, other), "{other:?}");
        }
    }

    #[test]
    fn different_descriptors_have_different_texts() {
        let text =
            |entries: &[(&str, &str)]| Descriptor::new("d", entries, 1, None).canonical_text();
        assert_eq!(
            text(&[("generic_key", "api"), ("path", "/a")]),
            "generic_key=api,path=/a"
        );
        assert_ne!(text(&[("a", "1,b=2")]), text(&[("a", "1"), ("b", "2")]));
        assert_ne!(text(&[("a", "1\\"), ("b", "2")]), text(&[("a", "1\\,b=2")]));
        assert_ne!(text(&[("a=", "1")]), text(&[("a", "=1")]));
    }

    #[test]
    fn override_limits_use_an_algorithm_that_can_count_them() {
        let bucket = Some(Algorithm::TokenBucket {
            burst: 5,
            warm_up_us: 9,
        });
        let year = 31_536_000_000_000;
        assert_eq!(
            choose_override_algorithm(bucket, 60, 60_000_000),
            Algorithm::TokenBucket {
                burst: 60,
                warm_up_us: 0
            }
        );
        assert_eq!(
            choose_override_algorithm(bucket, u32::MAX.into(), year),
            Algorithm::SlidingWindow { buckets: 10 }
        );
        assert_eq!(
            choose_override_algorithm(Some(Algorithm::SlidingLog), 100, year),
            Algorithm::SlidingLog
        );
        assert_eq!(
            choose_override_algorithm(Some(Algorithm::SlidingLog), 1 << 20, year),
            Algorithm::SlidingWindow { buckets: 10 }
        );
        let hour = Some(Algorithm::FixedWindow {
            offset_us: 3_600_000_000,
        });
        assert_eq!(
            choose_override_algorithm(hour, 5, 1_000_000),
            Algorithm::FixedWindow { offset_us: 0 }
        );
    }
}
