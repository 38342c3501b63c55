//! W3C Trace Context: who called us, as `traceparent` says, and what we say to whom we call.
//!
//! <https://www.w3.org/TR/trace-context/>, 3.2.

use http::{HeaderMap, HeaderName, HeaderValue};
use std::collections::hash_map::RandomState;
use std::fmt;
use std::hash::BuildHasher;

pub(super) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
pub(super) const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

const SAMPLED: u8 = 1;
/// The trace's id is random: what counts ids may rely on it (level 2 of the recommendation).
const RANDOM: u8 = 2;

/// Length of version 00, and of what stands in front in any later one.
const LENGTH: usize = 55;

/// A trace, the same in all services that a request passes; shown as 32 hexadecimal digits. Never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceId(pub(super) u128);

/// A span of a trace. Never 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanId(pub(super) u64);

/// One valid `traceparent`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Context {
    pub trace: TraceId,
    /// Of the one who says it.
    pub span: SpanId,
    flags: u8,
}

impl Context {
    /// What a request's headers say; `None` also if they say it twice or wrongly: then it counts as unsaid.
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(TRACEPARENT).iter();
        let value = values.next()?;
        values
            .next()
            .is_none()
            .then(|| Self::parse(value.as_bytes()))
            .flatten()
    }

    fn parse(text: &[u8]) -> Option<Self> {
        let (known, rest) = text.split_at_checked(LENGTH)?;
        let known = std::str::from_utf8(known).ok()?;
        let mut parts = known.split('-');
        let mut part = |length: usize| {
            parts
                .next()
                .filter(|part| part.len() == length && is_hex(part))
        };
        let (version, trace, span, flags) = (part(2)?, part(32)?, part(16)?, part(2)?);
        // A later version may say more behind these.
        let ends_well = match version {
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
            flags: flags & (SAMPLED | RANDOM),
        };
        (ends_well && parts.next().is_none()).then_some(context)
    }

    /// Whoever began the trace has it recorded.
    pub fn is_sampled(self) -> bool {
        self.flags & SAMPLED != 0
    }

    /// The begin of a trace that is recorded.
    pub(super) fn begin() -> Self {
        let high = u128::from(random()) << 64;
        Self {
            trace: TraceId(high | u128::from(random())),
            span: SpanId(random()),
            flags: SAMPLED | RANDOM,
        }
    }

    /// A new span in the same trace.
    pub(super) fn child(self) -> Self {
        Self {
            span: SpanId(random()),
            ..self
        }
    }

    pub(super) fn header(self) -> Option<HeaderValue> {
        HeaderValue::try_from(format!(
            "00-{}-{}-{:02x}",
            self.trace, self.span, self.flags
        ))
        .ok()
    }

    /// As OTLP has them.
    pub(super) fn flags(self) -> u32 {
        self.flags.into()
    }
}

/// The recommendation has lower case only.
fn is_hex(text: &str) -> bool {
    text.bytes()
        .all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// By the system's randomness: generators seeded with the time would meet in replicas that start together.
fn random() -> u64 {
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

    fn parse(text: &str) -> Option<Context> {
        Context::parse(text.as_bytes())
    }

    #[test]
    fn what_is_valid_is_read_and_written_again() {
        let context = parse(VALID).unwrap();
        assert!(context.is_sampled());
        assert_eq!(context.header().unwrap(), VALID);
        assert_eq!(
            context.trace.to_string(),
            "4bf92f3577b34da6a3ce929d0e0e4736"
        );
        let child = context.child();
        assert_eq!(child.trace, context.trace);
        assert_ne!(child.span, context.span);
        assert!(!parse(&VALID.replace("-01", "-00")).unwrap().is_sampled());
    }

    #[test]
    fn flags_that_nobody_knows_are_not_passed_on() {
        let context = parse(&VALID.replace("-01", "-ff")).unwrap();
        assert!(context.header().unwrap().to_str().unwrap().ends_with("-03"));
    }

    #[test]
    fn a_later_version_may_say_more() {
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
    fn what_is_not_valid_counts_as_unsaid() {
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
        assert!(Context::of(&headers).is_some());
        headers.append(TRACEPARENT, HeaderValue::from_static(VALID));
        assert_eq!(
            Context::of(&headers),
            None,
            "who says it twice says nothing"
        );
    }

    proptest! {
        #[test]
        fn whatever_is_taken_is_written_as_it_was(trace in 1_u128.., span in 1_u64.., flags in 0_u8..4) {
            let text = format!("00-{trace:032x}-{span:016x}-{flags:02x}");
            let header = parse(&text).unwrap().header().unwrap();
            prop_assert_eq!(header.to_str().unwrap(), text);
        }

        #[test]
        fn nothing_makes_it_stumble(bytes in proptest::collection::vec(any::<u8>(), 0..70)) {
            let _ = Context::parse(&bytes);
        }
    }
}
