//! The cost of a request in units: on arrival, and as the response reports it.

mod weight;

pub use weight::{Factor, Weight, WeightsByValue};

use super::json_pointer::{JsonPointer, parse_whole_number};
use super::json_scanner::BodyValue;
use super::{Facts, KeyPart};
use crate::limiter::MAX_UNITS;
use http::{HeaderName, StatusCode};
use smallvec::SmallVec;
use std::fmt;
use std::sync::Arc;
use weight::sum_weighted;

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
    pub estimate: Estimate,
    pub actual: ActualCost,
    /// `None` if the response is charged at its end only.
    pub cut_off: Option<CutOff>,
}

/// How a response is charged while it streams, and ended when its key has nothing left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CutOff {
    /// Units of each further charge, at least 1.
    pub slice: u64,
    /// Bytes of the response that count as one unit of the highest weight until it reports its
    /// cost; at least 1.
    pub bytes_per_unit: u64,
}

/// The units charged on arrival: at least 1. With an estimate of 0, a client could send unlimited
/// requests before the first response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Estimate {
    Fixed(u64),
    /// The sum of what the request states.
    Stated(Box<[StatedUnits]>),
}

/// A part of the estimate that the request states.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatedUnits {
    pub source: StatedSource,
    pub weight: Weight,
}

/// Where a request states units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StatedSource {
    /// A whole number in the body. Larger ones count as `max`, and so does what is not a number or
    /// can't be read.
    Json {
        pointer: JsonPointer,
        /// Units of a body without the number.
        default: u64,
        max: u64,
    },
    /// The size of the body: one unit for each of these bytes, rounded up, at most `max`. An
    /// unknown size counts as `max`.
    Bytes { bytes_per_unit: u64, max: u64 },
}

/// What a request really cost.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ActualCost {
    /// The status of the response decides (`count_when`): the estimate if the set contains it, else
    /// 0.
    Status(CountedStatuses),
    /// The weighted sum of the numbers that the response reports. If it reports none of them, the
    /// estimate stands.
    Sum(Box<[ReportedUnits]>),
}

/// A part of the actual cost that the response reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReportedUnits {
    /// The first source that the response has counts.
    pub sources: Box<[ReportSource]>,
    pub weight: Weight,
}

/// The place in a response that reports units: a whole number up to the counter's maximum.
#[derive(Clone, Debug, PartialEq, Eq, strum::Display)]
pub enum ReportSource {
    /// A header of the response, or a trailer if the header is absent.
    #[strum(to_string = "header {0}")]
    Header(HeaderName),
    /// A number in the body: in a JSON document, or in the last of several documents that has it
    /// (lines, events of a stream, or items of a list).
    #[strum(to_string = "JSON at {0}")]
    Json(JsonPointer),
}

/// The factors of the parts of an actual cost for one request.
pub type FactorsOfRequest = SmallVec<[Factor; 2]>;

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
            Self::Estimate(cost) => cost.estimate.compute_units(facts),
        }
    }

    /// The estimate, if the actual cost is settled later.
    pub fn as_estimate(&self) -> Option<&Arc<EstimateCost>> {
        match self {
            Self::Estimate(cost) => Some(cost),
            Self::Fixed(_) | Self::Header(_) => None,
        }
    }

    /// The highest cost of a request on arrival, or of a descriptor with one hit.
    pub fn max_units(&self) -> u64 {
        match self {
            Self::Fixed(units) => *units,
            Self::Header(cost) => cost.default.max(cost.max),
            Self::Estimate(cost) => cost.estimate.max_units(),
        }
    }

    /// The lowest cost of a request on arrival, or of a descriptor with one hit.
    pub fn min_units(&self) -> u64 {
        match self {
            Self::Fixed(units) => *units,
            Self::Header(cost) => cost.default.min(cost.min),
            Self::Estimate(cost) => match cost.estimate {
                Estimate::Fixed(units) => units,
                Estimate::Stated(_) => 1,
            },
        }
    }

    /// The parts of requests that the cost reads.
    pub fn parts(&self) -> impl Iterator<Item = KeyPart> {
        let cost = self.as_estimate().map(Arc::as_ref);
        let stated = cost.map_or(&[][..], |cost| cost.estimate.stated());
        let reported = cost.map_or(&[][..], |cost| cost.actual.reported());
        let pointers = stated.iter().filter_map(|one| match &one.source {
            StatedSource::Json { pointer, .. } => Some(KeyPart::Body(pointer.clone())),
            StatedSource::Bytes { .. } => None,
        });
        let weights = stated.iter().map(|one| &one.weight);
        let weights = weights.chain(reported.iter().map(|one| &one.weight));
        let weighted = weights.filter_map(|weight| Some(weight.by.as_ref()?.part.clone()));
        pointers.chain(weighted)
    }

    /// Whether the cost depends on the size of the body.
    pub fn reads_body_size(&self) -> bool {
        let stated = self.as_estimate().map(|cost| cost.estimate.stated());
        let mut stated = stated.unwrap_or_default().iter();
        stated.any(|one| matches!(one.source, StatedSource::Bytes { .. }))
    }
}

impl EstimateCost {
    /// The units that a response with this status costs after an estimate, if the status decides.
    pub fn units_of_status(&self, status: StatusCode, estimate: u64) -> Option<u64> {
        match &self.actual {
            ActualCost::Status(counted) if counted.contains(status) => Some(estimate),
            ActualCost::Status(_) => Some(0),
            ActualCost::Sum(_) => None,
        }
    }
}

impl Estimate {
    fn compute_units(&self, facts: &Facts<'_>) -> u64 {
        let Self::Stated(stated) = self else {
            return self.max_units();
        };
        let weighted = stated.iter().map(|one| {
            let factor = one.weight.factor_for(facts);
            (one.source.read_units(facts), factor)
        });
        sum_weighted(weighted).max(1)
    }

    fn max_units(&self) -> u64 {
        match self {
            Self::Fixed(units) => *units,
            Self::Stated(stated) => {
                let most = stated
                    .iter()
                    .map(|one| (one.source.max_units(), one.weight.highest()));
                sum_weighted(most).max(1)
            }
        }
    }

    fn stated(&self) -> &[StatedUnits] {
        match self {
            Self::Fixed(_) => &[],
            Self::Stated(stated) => stated,
        }
    }
}

/// Text for messages, such as `500` or `the request's /max_tokens, at most 8000`.
impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Self::Fixed(units) = self {
            return write!(f, "{units}");
        }
        for (index, one) in self.stated().iter().enumerate() {
            let separator = if index > 0 { " + " } else { "" };
            write!(f, "{separator}{}", one.weight)?;
            match &one.source {
                StatedSource::Json { pointer, max, .. } => {
                    write!(f, "the request's {pointer}, at most {max}")?;
                }
                StatedSource::Bytes {
                    bytes_per_unit,
                    max,
                    ..
                } => {
                    write!(
                        f,
                        "1 for each {bytes_per_unit} bytes of the request, at most {max}"
                    )?;
                }
            }
        }
        Ok(())
    }
}

impl StatedSource {
    fn read_units(&self, facts: &Facts<'_>) -> u64 {
        match self {
            Self::Json {
                pointer,
                default,
                max,
            } => match facts.body.map(|body| body.value(pointer)) {
                None | Some(BodyValue::Absent) => *default,
                Some(BodyValue::Number(digits)) => {
                    parse_whole_number(digits.as_bytes()).map_or(*max, |units| units.min(*max))
                }
                Some(BodyValue::Text(_) | BodyValue::Unreadable) => *max,
            },
            Self::Bytes {
                bytes_per_unit,
                max,
            } => match facts.body {
                None => 0,
                Some(body) => body
                    .size
                    .map_or(*max, |size| size.div_ceil(*bytes_per_unit).min(*max)),
            },
        }
    }

    /// The most units before weights.
    pub fn max_units(&self) -> u64 {
        match self {
            Self::Json { default, max, .. } => *default.max(max),
            Self::Bytes { max, .. } => *max,
        }
    }
}

impl ActualCost {
    /// One number of the response.
    pub fn from_source(source: ReportSource, weight: Weight) -> Self {
        Self::Sum(Box::new([ReportedUnits {
            sources: Box::new([source]),
            weight,
        }]))
    }

    /// The parts that the response reports.
    pub fn reported(&self) -> &[ReportedUnits] {
        match self {
            Self::Status(_) => &[],
            Self::Sum(reported) => reported,
        }
    }

    /// The sources of all parts.
    pub fn sources(&self) -> impl Iterator<Item = &ReportSource> {
        self.reported().iter().flat_map(|one| &one.sources)
    }

    /// The factors of the parts for a request.
    pub fn factors_for(&self, facts: &Facts<'_>) -> FactorsOfRequest {
        let reported = self.reported().iter();
        reported.map(|one| one.weight.factor_for(facts)).collect()
    }

    /// The units that the response reports; `None` if it reports none, or discounts only. `read`
    /// reads a source.
    pub fn reported_units(
        &self,
        factors: &[Factor],
        read: impl Fn(&ReportSource) -> Option<u64>,
    ) -> Option<u64> {
        let parts = self.reported().iter().zip(factors);
        let found =
            parts.filter_map(|(one, factor)| Some((one.sources.iter().find_map(&read)?, *factor)));
        let found: SmallVec<[(u64, Factor); 2]> = found.collect();
        // A discount alone is no cost.
        let is_reported = found.iter().any(|(_, factor)| factor.0 > 0);
        is_reported.then(|| sum_weighted(found.into_iter()))
    }
}

/// Text for messages, such as `JSON at /usage/total_tokens`.
impl fmt::Display for ActualCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Self::Status(counted) = self {
            return write!(f, "status {counted}");
        }
        for (index, one) in self.reported().iter().enumerate() {
            let separator = if index > 0 { " + " } else { "" };
            let sources: Vec<String> = one.sources.iter().map(ToString::to_string).collect();
            write!(f, "{separator}{}{}", one.weight, sources.join(" or "))?;
        }
        Ok(())
    }
}

impl ReportSource {
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

    /// The source as [`Self::parse`] reads it.
    pub fn label(&self) -> String {
        match self {
            Self::Header(name) => format!("response_header:{name}"),
            Self::Json(pointer) => format!("response_json:{pointer}"),
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
            let Ok(ReportSource::Json(pointer)) =
                ReportSource::parse(&format!("response_json:{text}"))
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
            assert!(ReportSource::parse(wrong).is_err(), "{wrong}");
        }
        assert_eq!(
            ReportSource::parse("response_header:X-Units"),
            Ok(ReportSource::Header("x-units".parse().unwrap()))
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
