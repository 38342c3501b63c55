//! W3C Trace Context: the `traceparent` header of received and forwarded requests.
//!
//! See <https://www.w3.org/TR/trace-context/>, section 3.2.

use http::{HeaderMap, HeaderName, HeaderValue};
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher;

pub(super) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
pub(super) const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

const SAMPLED_FLAG: u8 = 1;
/// Flag for a random trace id (Trace Context level 2), by which other software may sample.
const RANDOM_ID_FLAG: u8 = 2;

/// Length of a `traceparent` of version 00, and of the known prefix of later versions.
const TRACEPARENT_LEN: usize = 55;

/// The id of a trace, the same in all services of a request. It is displayed as 32 hexadecimal
/// digits, and never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceId(pub(super) u128);

/// The id of a span, never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanId(pub(super) u64);

/// The content of a valid `traceparent` header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceParent {
    pub trace: TraceId,
    /// The span of the sender.
    pub span: SpanId,
    pub(super) flags: u8,
}

impl TraceParent {
    /// Reads the context from a request's headers. `None` if the header is absent, repeated or
    /// invalid.
    pub fn from_headers(headers: &HeaderMap) -> Option<Self> {
        // Comparing the few names of a request is cheaper than a lookup.
        let mut values = headers
            .iter()
            .filter_map(|(name, value)| (*name == TRACEPARENT).then_some(value));
        let value = values.next()?;
        values
            .next()
            .is_none()
            .then(|| Self::parse(value.as_bytes()))
            .flatten()
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let (known, rest) = text.split_at_checked(TRACEPARENT_LEN)?;
        let known = std::str::from_utf8(known).ok()?;
        let mut parts = known.split('-');
        let mut part = |length: usize| {
            parts
                .next()
                .filter(|part| part.len() == length && is_lowercase_hex(part))
        };
        let (version, trace, span, flags) = (part(2)?, part(32)?, part(16)?, part(2)?);
        // Versions after 00 may append fields.
        let is_end_valid = match version {
            "ff" => false,
            "00" => rest.is_empty(),
            _ => matches!(rest, [] | [b'-', ..]),
        };
        let trace = u128::from_str_radix(trace, 16).ok().filter(|id| *id != 0)?;
        let span = u64::from_str_radix(span, 16).ok().filter(|id| *id != 0)?;
        let flags = u8::from_str_radix(flags, 16).ok()?;
        let context = Self {
            trace: TraceId(trace),
            span: SpanId(span),
            flags: flags & (SAMPLED_FLAG | RANDOM_ID_FLAG),
        };
        (is_end_valid && parts.next().is_none()).then_some(context)
    }

    /// Whether the caller records the trace.
    pub fn is_sampled(self) -> bool {
        self.flags & SAMPLED_FLAG != 0
    }

    /// Starts a new trace that is recorded.
    pub(super) fn new_root() -> Self {
        let high = u128::from(random_id()) << 64;
        Self {
            trace: TraceId(high | u128::from(random_id())),
            span: SpanId(random_id()),
            flags: SAMPLED_FLAG | RANDOM_ID_FLAG,
        }
    }

    /// Creates a new span in the same trace.
    pub(super) fn new_child(self) -> Self {
        Self {
            span: SpanId(random_id()),
            ..self
        }
    }

    pub(super) fn to_header_value(self) -> Option<HeaderValue> {
        HeaderValue::try_from(format!(
            "00-{}-{}-{:02x}",
            self.trace, self.span, self.flags
        ))
        .ok()
    }
}

/// Whether a text has only hexadecimal digits in lower case, as the specification requires.
fn is_lowercase_hex(text: &str) -> bool {
    text.bytes()
        .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// A random id from the system's randomness. Generators seeded with the time could produce equal
/// ids in replicas that start together.
fn random_id() -> u64 {
    RandomState::new().hash_one(0_u8).max(1)
}

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Display for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const VALID: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    fn parse(text: &str) -> Option<TraceParent> {
        TraceParent::parse(text.as_bytes())
    }

    #[test]
    fn a_valid_traceparent_round_trips() {
        let context = parse(VALID).unwrap();
        assert!(context.is_sampled());
        assert_eq!(context.to_header_value().unwrap(), VALID);
        assert_eq!(
            context.trace.to_string(),
            "4bf92f3577b34da6a3ce929d0e0e4736"
        );
        let child = context.new_child();
        assert_eq!(child.trace, context.trace);
        assert_ne!(child.span, context.span);
        assert!(!parse(&VALID.replace("-01", "-00")).unwrap().is_sampled());
    }

    #[test]
    fn unknown_flags_are_not_forwarded() {
        let context = parse(&VALID.replace("-01", "-ff")).unwrap();
        assert!(
            context
                .to_header_value()
                .unwrap()
                .to_str()
                .unwrap()
                .ends_with("-03")
        );
    }

    #[test]
    fn accepts_extra_fields_of_later_versions() {
        let later = VALID.replacen("00", "01", 1);
        for text in [
            later.clone(),
            format!("{later}-more"),
            VALID.replacen("00", "fe", 1),
        ] {
            assert_eq!(parse(&text), parse(VALID), "{text}");
        }
        assert_eq!(parse(&format!("{later}more")), None);
    }

    #[test]
    fn ignores_an_invalid_or_repeated_traceparent() {
        for text in [
            String::new(),
            VALID.replacen("00", "ff", 1),
            VALID.replacen("00", "0F", 1),
            VALID.to_uppercase(),
            format!("{VALID}-"),
            format!("{VALID} "),
            VALID.trim_end_matches('1').to_owned(),
            VALID.replace("4bf92f3577b34da6a3ce929d0e0e4736", &"0".repeat(32)),
            VALID.replace("00f067aa0ba902b7", &"0".repeat(16)),
            VALID.replace('4', "g"),
            VALID.replace('4', "+"),
            VALID.replace("6-0", "60-"),
            "é".repeat(40),
        ] {
            assert_eq!(parse(&text), None, "{text}");
        }
        let mut headers = HeaderMap::new();
        headers.append(TRACEPARENT, HeaderValue::from_static(VALID));
        assert!(TraceParent::from_headers(&headers).is_some());
        headers.append(TRACEPARENT, HeaderValue::from_static(VALID));
        assert_eq!(
            TraceParent::from_headers(&headers),
            None,
            "a repeated header is ignored"
        );
    }

    proptest! {
        #[test]
        fn an_accepted_traceparent_is_written_unchanged(trace in 1_u128.., span in 1_u64.., flags in 0_u8..4) {
            let text = format!("00-{trace:032x}-{span:016x}-{flags:02x}");
            let header = parse(&text).unwrap().to_header_value().unwrap();
            prop_assert_eq!(header.to_str().unwrap(), text);
        }

        #[test]
        fn parsing_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..70)) {
            let _ = TraceParent::parse(&bytes);
        }
    }
}
