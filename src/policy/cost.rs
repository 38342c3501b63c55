//! The cost of a request in units, and where a response reports it.

use super::Facts;
use super::json_pointer::{JsonPointer, parse_whole_number};
use crate::limiter::MAX_UNITS;
use http::{HeaderName, StatusCode};
use std::fmt;
use std::sync::Arc;

/// Where a policy's cost comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CostSource {
    Fixed(u64),
    Header(Box<HeaderCost>),
    /// Shared with the responses whose actual cost is still unknown.
    Estimate(Arc<EstimateCost>),
}

/// The cost from a request header: a whole number from `min` to `max`. An invalid or repeated
/// header costs `max`, so that an invalid value is never cheaper than a valid one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderCost {
    pub name: HeaderName,
    /// The cost of a request without the header.
    pub default: u64,
    pub min: u64,
    pub max: u64,
}

/// The cost charged until the response reports the actual cost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EstimateCost {
    /// At least 1. With an estimate of 0, a client could send unlimited requests before the first
    /// response.
    pub estimate: u64,
    pub actual_source: ActualCostSource,
}

/// The place in a response that reports the actual cost: one whole number up to the counter's
/// maximum. If the number is absent or invalid, the estimate stands.
#[derive(Clone, Debug, PartialEq, Eq, strum::Display)]
pub enum ActualCostSource {
    /// A header of the response, or a trailer if the header is absent.
    #[strum(to_string = "header {0}")]
    Header(HeaderName),
    /// A number in the body: in a JSON document, or in the last of several documents that has it
    /// (lines, or events of a stream).
    #[strum(to_string = "JSON at {0}")]
    Json(JsonPointer),
    /// The status (`count_when`): the estimate if the set contains it, else 0.
    #[strum(to_string = "status {0}")]
    Status(CountedStatuses),
}

impl CostSource {
    /// The units that one request costs. A fixed cost is multiplied by the hits of a descriptor.
    pub fn compute_units(&self, facts: &Facts<'_>) -> u64 {
        match self {
            Self::Fixed(units) => {
                let hits = facts.descriptor.map_or(1, |descriptor| descriptor.hits);
                units.saturating_mul(hits).min(MAX_UNITS)
            }
            Self::Header(cost) => {
                let mut values = facts.header_values(&cost.name);
                match (values.next(), values.next()) {
                    (None, _) => cost.default,
                    (Some(value), None) => parse_whole_number(&value)
                        .filter(|units| (cost.min..=cost.max).contains(units))
                        .unwrap_or(cost.max),
                    (Some(_), Some(_)) => cost.max,
                }
            }
            Self::Estimate(cost) => cost.estimate,
        }
    }

    /// The estimate, if the actual cost is settled later.
    pub fn as_estimate(&self) -> Option<&Arc<EstimateCost>> {
        match self {
            Self::Estimate(cost) => Some(cost),
            Self::Fixed(_) | Self::Header(_) => None,
        }
    }

    /// The highest cost of a request, or of a descriptor with one hit.
    pub fn max_units(&self) -> u64 {
        match self {
            Self::Fixed(units) => *units,
            Self::Header(cost) => cost.default.max(cost.max),
            Self::Estimate(cost) => cost.estimate,
        }
    }

    /// The lowest cost of a request, or of a descriptor with one hit.
    pub fn min_units(&self) -> u64 {
        match self {
            Self::Fixed(units) => *units,
            Self::Header(cost) => cost.default.min(cost.min),
            Self::Estimate(cost) => cost.estimate,
        }
    }
}

impl EstimateCost {
    /// The units that a response with this status costs, if the status decides.
    pub fn units_of_status(&self, status: StatusCode) -> Option<u64> {
        match &self.actual_source {
            ActualCostSource::Status(counted) if counted.contains(status) => Some(self.estimate),
            ActualCostSource::Status(_) => Some(0),
            ActualCostSource::Header(_) | ActualCostSource::Json(_) => None,
        }
    }
}

impl ActualCostSource {
    /// Parses `response_header:NAME` or `response_json:/POINTER`.
    ///
    /// # Errors
    /// Returns a message that can follow "found …;".
    pub fn parse(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("response_header", name)) => {
                let name = HeaderName::from_bytes(name.as_bytes()).ok();
                name.map(Self::Header).ok_or_else(|| {
                    "expected the name of a header after \"response_header:\"".to_owned()
                })
            }
            Some(("response_json", pointer)) => JsonPointer::parse(pointer).map(Self::Json),
            _ => Err("expected \"response_header:NAME\" or \"response_json:/POINTER\"".to_owned()),
        }
    }
}

/// A set of response statuses: single ones, and classes such as `4xx`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CountedStatuses {
    /// The first and the last status of each entry.
    ranges: Vec<(u16, u16)>,
}

impl CountedStatuses {
    /// Adds a status such as `401`, or a class such as `4xx`.
    ///
    /// # Errors
    /// Returns a message that can follow "found …;".
    pub fn add_text(&mut self, text: &str) -> Result<(), String> {
        let range = match text.split_at_checked(1) {
            Some((class, "xx")) => class
                .parse()
                .ok()
                .filter(|class| (1..=5).contains(class))
                .map(|class: u16| (100 * class, 100 * class + 99)),
            _ => text
                .parse()
                .ok()
                .filter(|status| text.len() == 3 && (100..=599).contains(status))
                .map(|status: u16| (status, status)),
        };
        self.ranges.push(
            range.ok_or(
                "expected a status from 100 to 599, or a class such as \"4xx\"".to_owned(),
            )?,
        );
        Ok(())
    }

    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    pub fn contains(&self, status: StatusCode) -> bool {
        let in_range = |(first, last): &(u16, u16)| (*first..=*last).contains(&status.as_u16());
        self.ranges.iter().any(in_range)
    }
}

impl fmt::Display for CountedStatuses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (first, last)) in self.ranges.iter().enumerate() {
            let separator = if index > 0 { ", " } else { "" };
            if first == last {
                write!(f, "{separator}{first}")?;
            } else {
                write!(f, "{separator}{}xx", first / 100)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::{HeaderMap, HeaderValue};

    fn compute_header_cost(values: &[&[u8]]) -> u64 {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append("x-cost", HeaderValue::from_bytes(value).unwrap());
        }
        let facts = Facts {
            headers: &headers,
            ..Facts::placeholder()
        };
        let cost = HeaderCost {
            name: "x-cost".parse().unwrap(),
            default: 2,
            min: 3,
            max: 100,
        };
        CostSource::Header(Box::new(cost)).compute_units(&facts)
    }

    #[test]
    fn invalid_cost_headers_cost_the_maximum() {
        assert_eq!(compute_header_cost(&[]), 2);
        for (value, units) in [("3", 3), ("007", 7), ("99", 99), ("100", 100)] {
            assert_eq!(compute_header_cost(&[value.as_bytes()]), units, "{value}");
        }
        for value in [
            "", "0", "2", "101", "-5", "+5", "5.0", "5,5", "5 5", "0x5", "5e0", "NaN", "inf",
            "1e30",
        ] {
            assert_eq!(compute_header_cost(&[value.as_bytes()]), 100, "{value}");
        }
        for value in [
            &[b'9'; 31][..],
            b"18446744073709551621",
            b"\xff",
            "\u{665}".as_bytes(),
        ] {
            assert_eq!(compute_header_cost(&[value]), 100, "{value:?}");
        }
        assert_eq!(compute_header_cost(&[b"5", b"5"]), 100);
    }

    #[test]
    fn parses_json_pointers_per_rfc_6901() {
        let tokens = |text: &str| {
            let Ok(ActualCostSource::Json(pointer)) =
                ActualCostSource::parse(&format!("response_json:{text}"))
            else {
                panic!("{text}")
            };
            assert_eq!(pointer.to_string(), text);
            pointer
                .tokens()
                .iter()
                .map(|token| (token.name.to_string(), token.index))
                .collect::<Vec<_>>()
        };
        let named = |name: &str| (name.to_owned(), None);
        assert_eq!(
            tokens("/usage/total_tokens"),
            [named("usage"), named("total_tokens")]
        );
        assert_eq!(tokens("/"), [named("")]);
        assert_eq!(tokens("//a:b "), [named(""), named("a:b ")]);
        assert_eq!(
            tokens("/~01/a~1b/~0~1"),
            [named("~1"), named("a/b"), named("~/")]
        );
        assert_eq!(
            tokens("/0/17/01/-/+1"),
            [
                ("0".to_owned(), Some(0)),
                ("17".to_owned(), Some(17)),
                named("01"),
                named("-"),
                named("+1")
            ]
        );
        let long = format!("response_json:/{}", "a".repeat(256));
        for wrong in [
            "",
            "usage",
            "response_json",
            "response_json:",
            "response_json:usage",
            "response_json:$.usage",
            "response_json:/a~",
            "response_json:/a~2",
            "response_json:/~~0",
            "response_header:",
            "response_header:x y",
            "Response_header:x",
            "header:x",
            " response_json:/a",
            &long,
        ] {
            assert!(ActualCostSource::parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!(
            ActualCostSource::parse("response_header:X-Units"),
            Ok(ActualCostSource::Header("x-units".parse().unwrap()))
        );
    }

    #[test]
    fn statuses_and_classes_are_parsed_and_matched() {
        let mut counted = CountedStatuses::default();
        for text in ["401", "5xx"] {
            counted.add_text(text).unwrap();
        }
        assert_eq!(counted.to_string(), "401, 5xx");
        for status in 100..=599 {
            let expected = status == 401 || status >= 500;
            let status = StatusCode::from_u16(status).unwrap();
            assert_eq!(counted.contains(status), expected, "{status}");
        }
        for wrong in [
            "", "xx", "6xx", "0xx", "4XX", "4xxx", "99", "600", "0401", "+40", "é",
        ] {
            assert!(counted.add_text(wrong).is_err(), "{wrong}");
        }
    }
}
