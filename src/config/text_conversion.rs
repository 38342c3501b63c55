//! Converts text from the environment, flags and schema defaults to typed values.

use super::schema::{KeyRequirement, LeafKey, ValueKind};
use super::value_tree::{ValueContent, ValueNode};

/// Converts text from the environment, a flag or a schema default to a value of the key's type.
/// Text that does not parse stays a string, which the key's reader reports.
pub(super) fn content_from_text(kind: &ValueKind, text: &str) -> ValueContent {
    let typed = match kind.first() {
        ValueKind::Bool => text.parse().ok().map(ValueContent::Bool),
        ValueKind::Integer { .. } => text.parse().ok().map(ValueContent::Integer),
        ValueKind::Fraction => text.parse().ok().map(ValueContent::Float),
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
