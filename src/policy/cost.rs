//! How many units a request takes.

use super::json_pointer::JsonPointer;
use super::whole_number::parse_whole_number;
use super::{Facts, facts};
use crate::limiter::MAX_UNITS;
use http::HeaderName;
use std::fmt;
use std::sync::Arc;

/// Where a policy's cost comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CostSource {
    Fixed(u64),
    Header(Box<HeaderCost>),
    /// Shared with the responses that are still to say what their requests took.
    Estimate(Arc<EstimateCost>),
}

/// What a request says of itself, as a whole number from `min` to `max`. Whoever says something else, or says it
/// twice, pays `max`: nonsense must not be cheaper than the truth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HeaderCost {
    pub name: HeaderName,
    /// Of a request without the header.
    pub default: u64,
    pub min: u64,
    pub max: u64,
}

/// What a request takes until its response has said what it took.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EstimateCost {
    /// At least 1: who took nothing could be let in without end until the first response.
    pub estimate: u64,
    pub actual_source: ActualCostSource,
}

/// Where a response says what its request took: one whole number, at most what a counter holds. A response that
/// says nothing, or anything else, leaves the estimate as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ActualCostSource {
    /// A field of the head, or of the trailers if the head has none.
    Header(HeaderName),
    /// A number in the body: in a JSON document, or in the last of many (lines, events of a stream) that has it.
    Json(JsonPointer),
}

impl CostSource {
    /// The units that one request takes. A descriptor says how many it counts as.
    pub fn compute_units(&self, facts: &Facts<'_>) -> u64 {
        match self {
            Self::Fixed(units) => units.saturating_mul(facts.hit_count()).min(MAX_UNITS),
            Self::Header(cost) => {
                let mut values = facts::header_values(facts.headers, &cost.name);
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

    /// What is to be settled later, if it is that kind of cost.
    pub fn as_estimate(&self) -> Option<&Arc<EstimateCost>> {
        match self {
            Self::Estimate(cost) => Some(cost),
            Self::Fixed(_) | Self::Header(_) => None,
        }
    }

    /// The most units that any request takes.
    pub fn max_units(&self) -> u64 {
        match self {
            Self::Fixed(units) => *units,
            Self::Header(cost) => cost.default.max(cost.max),
            Self::Estimate(cost) => cost.estimate,
        }
    }

    /// The fewest units that any request takes.
    pub fn min_units(&self) -> u64 {
        match self {
            Self::Fixed(units) => *units,
            Self::Header(cost) => cost.default.min(cost.min),
            Self::Estimate(cost) => cost.estimate,
        }
    }
}

impl ActualCostSource {
    /// Reads `response_header:NAME` or `response_json:/POINTER`.
    ///
    /// # Errors
    /// What is wrong, in words that follow "found …;".
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

impl fmt::Display for ActualCostSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header(name) => write!(f, "header {name}"),
            Self::Json(pointer) => write!(f, "JSON at {pointer}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::path::{PathInterpretations, Settings};
    use http::{HeaderMap, HeaderValue, Method};

    const PATH_SETTINGS: Settings = Settings::DEFAULT;

    fn header_cost(values: &[&[u8]]) -> u64 {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append("x-cost", HeaderValue::from_bytes(value).unwrap());
        }
        let paths = PathInterpretations::parse("/", &PATH_SETTINGS).unwrap();
        let facts = Facts {
            method: &Method::GET,
            host: "h",
            paths: &paths,
            query: None,
            headers: &headers,
            client_ip: [127, 0, 0, 1].into(),
            token: crate::policy::jwt::RequestToken::none(),
            client_cert: None,
            descriptor: None,
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
        assert_eq!(header_cost(&[]), 2);
        for (value, units) in [("3", 3), ("007", 7), ("99", 99), ("100", 100)] {
            assert_eq!(header_cost(&[value.as_bytes()]), units, "{value}");
        }
        for value in [
            "", "0", "2", "101", "-5", "+5", "5.0", "5,5", "5 5", "0x5", "5e0", "NaN", "inf",
            "1e30",
        ] {
            assert_eq!(header_cost(&[value.as_bytes()]), 100, "{value}");
        }
        for value in [
            &[b'9'; 31][..],
            b"18446744073709551621",
            b"\xff",
            "\u{665}".as_bytes(),
        ] {
            assert_eq!(header_cost(&[value]), 100, "{value:?}");
        }
        assert_eq!(header_cost(&[b"5", b"5"]), 100);
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
}
