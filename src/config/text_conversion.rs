//! Converts text from the environment, flags and schema defaults to typed values.

use super::schema::ValueKind;
use figment::value::Value;

/// Converts text from the environment, a flag or a schema default to a value of the key's type.
/// Text that does not parse stays a string, which the key's reader reports.
pub(super) fn value_from_text(kind: &ValueKind, text: &str) -> Value {
    let typed = match kind.first() {
        ValueKind::Bool => text.parse::<bool>().ok().map(Value::from),
        ValueKind::Integer { .. } => text.parse::<i64>().ok().map(Value::from),
        ValueKind::Fraction => text.parse::<f64>().ok().map(Value::from),
        ValueKind::TextList(_) => Some(parse_list(text).into()),
        _ => None,
    };
    typed.unwrap_or_else(|| text.into())
}

/// Parses a list such as `a, b` or `["a", "b"]`.
fn parse_list(text: &str) -> Vec<Value> {
    let text = text.trim();
    let inner = text
        .strip_prefix('[')
        .and_then(|text| text.strip_suffix(']'))
        .unwrap_or(text);
    let items = inner
        .split(',')
        .map(|item| item.trim().trim_matches(['"', '\'']));
    items
        .filter(|item| !item.is_empty())
        .map(Value::from)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_in_the_environment_are_separated_by_commas() {
        let wanted = vec![Value::from("10.0.0.0/8"), Value::from("::1")];
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
