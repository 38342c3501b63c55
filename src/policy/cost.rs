//! How many units a request takes.

use super::{Facts, facts};
use http::HeaderName;

/// Where a policy's cost comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cost {
    Fixed(u64),
    Header(Box<HeaderCost>),
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

impl Cost {
    /// The units that one request takes.
    pub fn of(&self, facts: &Facts<'_>) -> u64 {
        match self {
            Self::Fixed(units) => *units,
            Self::Header(cost) => {
                let mut values = facts::header_values(facts.headers, &cost.name);
                match (values.next(), values.next()) {
                    (None, _) => cost.default,
                    (Some(value), None) => whole(&value)
                        .filter(|units| (cost.min..=cost.max).contains(units))
                        .unwrap_or(cost.max),
                    (Some(_), Some(_)) => cost.max,
                }
            }
        }
    }

    /// The fewest units that any request takes.
    pub fn least(&self) -> u64 {
        match self {
            Self::Fixed(units) => *units,
            Self::Header(cost) => cost.default.min(cost.min),
        }
    }
}

/// Digits only: an upstream may read signs, fractions, exponents and lists in more than one way.
fn whole(value: &[u8]) -> Option<u64> {
    let text = str::from_utf8(value).ok()?;
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::path::{Readings, Settings};
    use http::{HeaderMap, HeaderValue, Method};

    const PATH: Settings = Settings::USUAL;

    fn cost_of(values: &[&[u8]]) -> u64 {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append("x-cost", HeaderValue::from_bytes(value).unwrap());
        }
        let paths = Readings::of("/", &PATH).unwrap();
        let facts = Facts {
            method: &Method::GET,
            host: "h",
            paths: &paths,
            query: None,
            headers: &headers,
            client_ip: [127, 0, 0, 1].into(),
        };
        let cost = HeaderCost { name: "x-cost".parse().unwrap(), default: 2, min: 3, max: 100 };
        Cost::Header(Box::new(cost)).of(&facts)
    }

    #[test]
    fn nonsense_pays_the_most() {
        assert_eq!(cost_of(&[]), 2);
        for (value, units) in [("3", 3), ("007", 7), ("99", 99), ("100", 100)] {
            assert_eq!(cost_of(&[value.as_bytes()]), units, "{value}");
        }
        for value in
            ["", "0", "2", "101", "-5", "+5", "5.0", "5,5", "5 5", "0x5", "5e0", "NaN", "inf", "1e30"]
        {
            assert_eq!(cost_of(&[value.as_bytes()]), 100, "{value}");
        }
        for value in [&[b'9'; 31][..], b"18446744073709551621", b"\xff", "\u{665}".as_bytes()] {
            assert_eq!(cost_of(&[value]), 100, "{value:?}");
        }
        assert_eq!(cost_of(&[b"5", b"5"]), 100);
    }
}
