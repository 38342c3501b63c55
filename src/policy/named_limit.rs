//! Limits with names, and the amounts that requests state.

use super::cost::parse_whole_number;
use super::facts::Facts;
use super::key_part::KeyPart;
use super::path;
use crate::limiter::{Algorithm, Limit, LimitName, OverrideInEffect};
use strum::{EnumString, IntoStaticStr, VariantNames};

/// A limit and its name in the rate-limit headers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedLimit {
    pub name: LimitName,
    /// The unit that is counted; `None` means requests.
    pub unit: Option<Box<str>>,
    pub limit: Limit,
    /// Where the request states the amount; `limit` then has the default.
    pub amount: Option<Box<AmountSource>>,
    /// Whether responses may have the limit: `report` of its policy.
    pub is_reported: bool,
    /// Of a concurrency limit: what ends a request.
    pub release: SlotRelease,
}

/// What ends a request in flight, so that its concurrency slot becomes free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, EnumString, VariantNames, IntoStaticStr)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum SlotRelease {
    /// The end of the response to the client, which may disconnect earlier.
    #[default]
    Response,
    /// The end of the upstream's response, whatever the client does.
    Upstream,
}

impl SlotRelease {
    /// The name in the configuration.
    pub const fn name(self) -> &'static str {
        self.into_str()
    }
}

impl NamedLimit {
    /// The capacity under the largest amount that a request may state.
    pub fn max_capacity(&self) -> u64 {
        let largest = |source: &AmountSource| source.apply_amount(&self.limit, source.max);
        let limit = self.amount.as_deref().map_or(self.limit, largest);
        limit.capacity()
    }
}

/// Where the amount of a limit comes from (`requests_from`). The limit's own amount is the default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AmountSource {
    /// A claim, a header, which is read only from a trusted proxy, or a field of the certificate.
    pub field: KeyPart,
    /// Larger amounts become this one.
    pub max: u64,
    /// The burst of a token bucket follows the amount, because the limit has no own one.
    pub sets_burst: bool,
}

impl AmountSource {
    /// Parses a field that no client can choose: `jwt:CLAIM`, `header:NAME`, `client_cert:san` or
    /// `client_cert:cn`.
    ///
    /// # Errors
    /// Returns a message that states what is wrong.
    pub fn parse_field(text: &str) -> Result<KeyPart, String> {
        let kind = text.split(':').next().unwrap_or_default();
        match KeyPart::parse(text, &path::Settings::DEFAULT) {
            result if matches!(kind, "jwt" | "header") => result,
            Ok(part @ (KeyPart::ClientCertSan | KeyPart::ClientCertCn)) => Ok(part),
            _ => Err("expected jwt:CLAIM, header:NAME (from client.trusted_proxies), client_cert:san or client_cert:cn: a client chooses everything else".to_owned()),
        }
    }

    /// The limit with an amount, at most `max`.
    pub(super) fn apply_amount(&self, limit: &Limit, amount: u64) -> Limit {
        let requests = amount.min(self.max);
        let algorithm = match limit.algorithm {
            Algorithm::TokenBucket { warm_up_us, .. } if self.sets_burst => {
                Algorithm::TokenBucket {
                    burst: requests,
                    warm_up_us,
                }
            }
            algorithm => algorithm,
        };
        Limit {
            requests,
            algorithm,
            ..*limit
        }
    }
}

/// The limits of a policy with the amounts of one request, in the same order; `None` for a limit
/// that does not depend on the request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestAmounts(Vec<Option<Limit>>);

impl RequestAmounts {
    /// The limit at an index, if it depends on the request.
    pub fn get(&self, index: usize) -> Option<&Limit> {
        self.0.get(index)?.as_ref()
    }

    /// What decides instead of the limit of the configuration at an index, if it depends on the
    /// request.
    pub fn in_effect(&self, index: usize) -> Option<OverrideInEffect> {
        let limit = self.get(index)?;
        let burst = match limit.algorithm {
            Algorithm::TokenBucket { burst, .. } => burst,
            _ => limit.requests,
        };
        Some(OverrideInEffect::StatedAmounts {
            requests: limit.requests,
            burst,
        })
    }
}

/// The limits with the amounts of this request, or `None` if no limit depends on the request.
pub fn read_request_amounts(
    limits: &[NamedLimit],
    facts: &Facts<'_>,
) -> Option<Box<RequestAmounts>> {
    if limits.iter().all(|named| named.amount.is_none()) {
        return None;
    }
    let limits = limits.iter().map(|named| {
        let source = named.amount.as_ref()?;
        Some(resolve_limit(source, &named.limit, facts))
    });
    Some(Box::new(RequestAmounts(limits.collect())))
}

/// The limit with the amount of the request: its own without the field, or if the field is no
/// whole number.
fn resolve_limit(source: &AmountSource, limit: &Limit, facts: &Facts<'_>) -> Limit {
    let is_readable = facts.is_peer_trusted || !matches!(source.field, KeyPart::Header(_));
    // A repeated field counts as absent.
    let value = source.field.single_value(facts).ok().flatten();
    match value.filter(|value| is_readable && !value.is_empty()) {
        // A number beyond 64 bits is above the maximum, too.
        Some(value) if value.iter().all(u8::is_ascii_digit) => {
            source.apply_amount(limit, parse_whole_number(&value).unwrap_or(u64::MAX))
        }
        _ => *limit,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::path::{PathInterpretations, Settings};
    use http::{HeaderMap, HeaderValue, Method};

    fn read_amount(algorithm: Algorithm, values: &[&str], is_peer_trusted: bool) -> Limit {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append("x-rpm", HeaderValue::from_str(value).unwrap());
        }
        let paths = PathInterpretations::parse("/", &Settings::DEFAULT).unwrap();
        let facts = Facts {
            method: &Method::GET,
            host: "h",
            paths: &paths,
            query: None,
            headers: &headers,
            client_ip: [127, 0, 0, 1].into(),
            is_peer_trusted,
            token: crate::policy::jwt::RequestToken::without_token_reader(),
            client_cert: None,
            has_joined_headers: false,
            descriptor: None,
        };
        let named = NamedLimit {
            name: "p".into(),
            unit: None,
            limit: Limit {
                requests: 100,
                per_us: 60_000_000,
                algorithm,
            },
            amount: Some(Box::new(AmountSource {
                field: AmountSource::parse_field("header:x-rpm").unwrap(),
                max: 1000,
                sets_burst: true,
            })),
            is_reported: true,
            release: crate::policy::SlotRelease::default(),
        };
        *read_request_amounts(&[named], &facts)
            .unwrap()
            .get(0)
            .unwrap()
    }

    #[test]
    fn an_amount_is_a_whole_number_up_to_the_maximum_else_the_default() {
        let read = |values: &[&str]| read_amount(Algorithm::SlidingLog, values, true).requests;
        for (value, expected) in [
            ("7", 7),
            ("0", 0),
            ("0010", 10),
            ("1000", 1000),
            ("1001", 1000),
            ("99999999999999999999999999", 1000),
            ("", 100),
            ("-1", 100),
            ("+5", 100),
            ("5.0", 100),
            ("5, 6", 100),
            ("1e3", 100),
            ("gold", 100),
        ] {
            assert_eq!(read(&[value]), expected, "{value}");
        }
        assert_eq!(read(&[]), 100);
        assert_eq!(read(&["7", "9"]), 100, "a repeated header is ambiguous");
        let untrusted = read_amount(Algorithm::SlidingLog, &["7"], false);
        assert_eq!(
            untrusted.requests, 100,
            "only a trusted proxy states an amount"
        );
    }

    #[test]
    fn the_burst_follows_the_amount() {
        let bucket = Algorithm::TokenBucket {
            burst: 100,
            warm_up_us: 0,
        };
        assert_eq!(read_amount(bucket, &["7"], true).capacity(), 7);
        assert_eq!(read_amount(bucket, &[], true).capacity(), 100);
    }
}
