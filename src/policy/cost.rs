//! How many units a request takes.

use super::{Facts, facts};
use crate::limiter::MAX_UNITS;
use http::HeaderName;
use std::fmt;
use std::sync::Arc;

/// Where a policy's cost comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cost {
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
    pub actual: Actual,
}

/// Where a response says what its request took: one whole number, at most what a counter holds. A response that
/// says nothing, or anything else, leaves the estimate as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Actual {
    /// A field of the head, or of the trailers if the head has none.
    Header(HeaderName),
    /// A number in the body: in a JSON document, or in the last of many (lines, events of a stream) that has it.
    Json(Pointer),
}

/// A place inside a JSON document (RFC 6901).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pointer(Box<[Token]>);

/// One step of a [`Pointer`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Token {
    /// What a key of an object has to be.
    pub name: Box<str>,
    /// What an element of an array has to be, from 0; `None`: the step leads into no array.
    pub index: Option<u64>,
}

impl Cost {
    /// The units that one request takes. A descriptor says how many it counts as.
    pub fn of(&self, facts: &Facts<'_>) -> u64 {
        match self {
            Self::Fixed(units) => units.saturating_mul(facts.hits()).min(MAX_UNITS),
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
            Self::Estimate(cost) => cost.estimate,
        }
    }

    /// What is to be settled later, if it is that kind of cost.
    pub fn estimate(&self) -> Option<&Arc<EstimateCost>> {
        match self {
            Self::Estimate(cost) => Some(cost),
            Self::Fixed(_) | Self::Header(_) => None,
        }
    }

    /// The most units that any request takes.
    pub fn most(&self) -> u64 {
        match self {
            Self::Fixed(units) => *units,
            Self::Header(cost) => cost.default.max(cost.max),
            Self::Estimate(cost) => cost.estimate,
        }
    }

    /// The fewest units that any request takes.
    pub fn least(&self) -> u64 {
        match self {
            Self::Fixed(units) => *units,
            Self::Header(cost) => cost.default.min(cost.min),
            Self::Estimate(cost) => cost.estimate,
        }
    }
}

impl Actual {
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
            Some(("response_json", pointer)) => Pointer::parse(pointer).map(Self::Json),
            _ => Err("expected \"response_header:NAME\" or \"response_json:/POINTER\"".to_owned()),
        }
    }
}

impl fmt::Display for Actual {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header(name) => write!(f, "header {name}"),
            Self::Json(pointer) => write!(f, "JSON at {pointer}"),
        }
    }
}

impl Pointer {
    /// Longer ones are a mistake; so every response needs little memory to look for them.
    const MAX_BYTES: usize = 256;

    /// # Errors
    /// What is wrong, in words that follow "found …;".
    pub fn parse(text: &str) -> Result<Self, String> {
        let steps = text
            .strip_prefix('/')
            .ok_or("expected a pointer that begins with \"/\", such as /usage/total_tokens")?;
        if text.len() > Self::MAX_BYTES {
            return Err(format!(
                "expected a pointer of at most {} bytes",
                Self::MAX_BYTES
            ));
        }
        steps
            .split('/')
            .map(Token::parse)
            .collect::<Result<_, _>>()
            .map(Self)
    }

    /// At least one.
    pub fn tokens(&self) -> &[Token] {
        &self.0
    }
}

impl fmt::Display for Pointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|token| {
            write!(f, "/{}", token.name.replace('~', "~0").replace('/', "~1"))
        })
    }
}

impl Token {
    fn parse(text: &str) -> Result<Self, String> {
        let mut escapes = text.split('~').skip(1);
        if !escapes.all(|rest| rest.starts_with(['0', '1'])) {
            return Err(
                "expected 0 or 1 after \"~\": \"~0\" is \"~\" and \"~1\" is \"/\" inside a name"
                    .to_owned(),
            );
        }
        let is_index = text == "0" || !text.starts_with('0');
        let index = whole(text.as_bytes()).filter(|_| is_index);
        Ok(Self {
            name: text.replace("~1", "/").replace("~0", "~").into(),
            index,
        })
    }
}

/// Digits only: an upstream may read signs, fractions, exponents and lists in more than one way.
pub fn whole(value: &[u8]) -> Option<u64> {
    let text = str::from_utf8(value).ok()?;
    text.bytes()
        .all(|byte| byte.is_ascii_digit())
        .then(|| text.parse().ok())?
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
            token: crate::policy::jwt::Token::none(),
            client_cert: None,
            descriptor: None,
        };
        let cost = HeaderCost {
            name: "x-cost".parse().unwrap(),
            default: 2,
            min: 3,
            max: 100,
        };
        Cost::Header(Box::new(cost)).of(&facts)
    }

    #[test]
    fn nonsense_pays_the_most() {
        assert_eq!(cost_of(&[]), 2);
        for (value, units) in [("3", 3), ("007", 7), ("99", 99), ("100", 100)] {
            assert_eq!(cost_of(&[value.as_bytes()]), units, "{value}");
        }
        for value in [
            "", "0", "2", "101", "-5", "+5", "5.0", "5,5", "5 5", "0x5", "5e0", "NaN", "inf",
            "1e30",
        ] {
            assert_eq!(cost_of(&[value.as_bytes()]), 100, "{value}");
        }
        for value in [
            &[b'9'; 31][..],
            b"18446744073709551621",
            b"\xff",
            "\u{665}".as_bytes(),
        ] {
            assert_eq!(cost_of(&[value]), 100, "{value:?}");
        }
        assert_eq!(cost_of(&[b"5", b"5"]), 100);
    }

    #[test]
    fn a_pointer_is_read_as_rfc_6901_says() {
        let tokens = |text: &str| {
            let Ok(Actual::Json(pointer)) = Actual::parse(&format!("response_json:{text}")) else {
                panic!("{text}")
            };
            assert_eq!(pointer.to_string(), text);
            pointer
                .0
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
            assert!(Actual::parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!(
            Actual::parse("response_header:X-Units"),
            Ok(Actual::Header("x-units".parse().unwrap()))
        );
    }
}
