//! The types that values are read as.

use super::keywords::{ALGORITHMS, PolicyActionKind, RedisTopologyKind};
use super::schema::ValueKind;
use super::value_tree::ValueContent;
use super::values;
use crate::limiter::{Algorithm, CounterScope};
use crate::policy::path::{EscapedDelimiters, EscapedSlashes, ForwardedPath};
use crate::policy::{MissingKeyAction, OnStoreFailure, PolicyMode, SlotRelease};
use crate::telemetry::{AccessLogFilter, LogFormat};
use crate::tls::ClientAuth;
use std::time::Duration;

/// A type that a kind of value is read as.
pub(super) trait SchemaValue: Sized {
    /// Returns `None` if the content has not the type or range of `kind`.
    fn from_content(kind: &ValueKind, content: &ValueContent) -> Option<Self>;
}

/// Implements [`SchemaValue`] for types by a function of the kind and the content.
macro_rules! schema_values {
    ($($($type:ty),+ => $read:expr;)+) => {$($(
        impl SchemaValue for $type {
            fn from_content(kind: &ValueKind, content: &ValueContent) -> Option<Self> {
                let read: fn(&ValueKind, &ValueContent) -> Option<Self> = $read;
                read(kind, content)
            }
        }
    )+)+};
}

schema_values! {
    bool => |_, content| match content {
        ValueContent::Bool(flag) => Some(*flag),
        _ => None,
    };
    f64 => |_, content| match content {
        ValueContent::Float(number) if (0.0..=1.0).contains(number) => Some(*number),
        ValueContent::Integer(0) => Some(0.0),
        ValueContent::Integer(1) => Some(1.0),
        _ => None,
    };
    String => |kind, content| match (kind, content.as_str()?) {
        (ValueKind::Keyword(words), word) if !words.contains(&word) => None,
        (_, text) => Some(text.to_owned()),
    };
    Duration => |kind, content| match kind {
        ValueKind::Duration { min, max } => {
            let duration = values::parse_duration(content.as_str()?);
            duration.filter(|duration| (min..=max).contains(&duration))
        }
        _ => None,
    };
    // Zero means none.
    Option<Duration> => |kind, content| {
        Duration::from_content(kind, content).map(|time| Some(time).filter(|time| !time.is_zero()))
    };
    Option<u64>, Option<usize> => |kind, content| {
        SchemaValue::from_content(kind, content).map(|size| Some(size).filter(|size| *size > 0))
    };
    u8, u16, u32, u64, usize, i64 => read_number;
    // "off": the policy is only validated.
    Option<PolicyMode> => |_, content| match content.as_str()? {
        "off" => Some(None),
        mode => mode.parse().ok().map(Some),
    };
    Algorithm => |_, content| {
        let mut algorithms = ALGORITHMS.into_iter();
        algorithms.find(|algorithm| Some(algorithm.into_str()) == content.as_str())
    };
    // Keywords. Those of the schema are the variants of the type.
    LogFormat, AccessLogFilter, ClientAuth, ForwardedPath, EscapedSlashes, EscapedDelimiters,
    OnStoreFailure, MissingKeyAction, SlotRelease, CounterScope, PolicyActionKind,
    RedisTopologyKind => |_, content| content.as_str()?.parse().ok();
}

/// Reads an integer or a size in bytes. The range of the schema must fit into the type.
fn read_number<T>(kind: &ValueKind, content: &ValueContent) -> Option<T>
where
    T: TryFrom<i64> + TryFrom<u64>,
{
    match (kind, content) {
        (ValueKind::Integer { min, max }, ValueContent::Integer(number)) => {
            let number = Some(*number).filter(|number| (min..=max).contains(&number));
            T::try_from(number?).ok()
        }
        (ValueKind::ByteSize { min, max }, ValueContent::Text(text)) => {
            let size = values::parse_byte_size(text);
            T::try_from(size.filter(|size| (min..=max).contains(&size))?).ok()
        }
        _ => None,
    }
}
