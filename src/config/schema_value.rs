//! Values of the schema's kinds: from text, and as the types that they are read as.

use super::schema::{
    ALGORITHMS, KeyRequirement, LeafKey, PolicyActionKind, RedisTopologyKind, ValueKind,
};
use super::value_tree::{ValueContent, ValueNode};
use super::values;
use crate::limiter::{Algorithm, CounterScope};
use crate::policy::path::{EscapedDelimiters, EscapedSlashes, ForwardedPath};
use crate::policy::{Factor, MissingKeyAction, OnStoreFailure, PolicyMode, SlotRelease};
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
    Factor => |_, content| match content {
        ValueContent::Float(number) => Factor::from_number(*number),
        ValueContent::Integer(number) => Factor::from_number(i32::try_from(*number).ok()?.into()),
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

/// Converts text from the environment, a flag or a schema default to a value of the key's type.
/// Text that does not parse stays a string, which the key's reader reports.
pub(super) fn content_from_text(kind: &ValueKind, text: &str) -> ValueContent {
    let typed = match kind.first() {
        ValueKind::Bool => text.parse().ok().map(ValueContent::Bool),
        ValueKind::Integer { .. } => text.parse().ok().map(ValueContent::Integer),
        ValueKind::Fraction | ValueKind::Factor => text.parse().ok().map(ValueContent::Float),
        ValueKind::TextList(_) => Some(ValueContent::List(parse_list(text))),
        _ => None,
    };
    typed.unwrap_or_else(|| ValueContent::Text(text.to_owned()))
}

/// The content at a key's path from the root, or its default.
pub(super) fn content_or_default(root: &ValueNode, leaf: &LeafKey) -> Option<ValueContent> {
    let mut path = leaf.path.split('.');
    let found = path.try_fold(root, |table, key| table.get(key));
    match (found, &leaf.key.requirement) {
        (Some(found), _) => Some(found.content.clone()),
        (None, KeyRequirement::Default(text)) => Some(content_from_text(&leaf.key.kind, text)),
        (None, _) => None,
    }
}

/// Parses a list such as `a, b` or `["a", "b"]`.
fn parse_list(text: &str) -> Vec<ValueNode> {
    let text = text.trim();
    let inner = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'))
        .unwrap_or(text);
    let items = inner
        .split(',')
        .map(|item| item.trim().trim_matches(['"', '\'']))
        .filter(|item| !item.is_empty());
    items.map(ValueNode::from_text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_in_the_environment_are_separated_by_commas() {
        let wanted = vec![
            ValueNode::from_text("10.0.0.0/8"),
            ValueNode::from_text("::1"),
        ];
        for text in [
            "10.0.0.0/8,::1",
            "[\"10.0.0.0/8\", '::1']",
            " [10.0.0.0/8, ::1] ",
        ] {
            assert_eq!(parse_list(text), wanted, "{text}");
        }
        assert_eq!(parse_list(""), Vec::new());
    }
}
