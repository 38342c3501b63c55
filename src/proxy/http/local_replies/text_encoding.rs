//! Text encodings of local replies: JSON strings and numbers, `grpc-message` and sentences.

/// Appends microseconds as decimal seconds with six places, exact where a float would round.
pub(super) fn push_us_as_seconds(out: &mut String, us: u64) {
    let mut buffer = itoa::Buffer::new();
    out.push_str(buffer.format(us / 1_000_000));
    out.push('.');
    let fraction = buffer.format(us % 1_000_000);
    for _ in fraction.len()..6 {
        out.push('0');
    }
    out.push_str(fraction);
}

pub(super) fn push_json_string(out: &mut String, text: &str) {
    let is_special = |byte| matches!(byte, b'"' | b'\\' | ..b' ');
    let mut rest = text;
    out.push('"');
    // Each run without special characters, usually the whole text, is copied at once.
    while let Some((plain, special)) = rest
        .bytes()
        .position(is_special)
        .map(|at| rest.split_at(at))
    {
        out.push_str(plain);
        let mut chars = special.chars();
        match chars.next() {
            Some(quoted @ ('"' | '\\')) => out.extend(['\\', quoted]),
            control => {
                let code = control.map_or(0, u32::from);
                out.push_str("\\u00");
                out.extend([code >> 4, code & 15].map(hex_digit));
            }
        }
        rest = chars.as_str();
    }
    out.push_str(rest);
    out.push('"');
}

/// Percent-encodes a `grpc-message`: keeps spaces and visible ASCII other than `%`, and encodes
/// every other byte.
pub(super) fn percent_encode_grpc_message(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => out.push(char::from(byte)),
            _ => {
                out.push('%');
                out.extend([u32::from(byte) >> 4, u32::from(byte) & 15].map(hex_digit));
            }
        }
    }
    out
}

fn hex_digit(nibble: u32) -> char {
    char::from_digit(nibble, 16).map_or('0', |digit| digit.to_ascii_uppercase())
}

/// Capitalizes an error text and adds a full stop.
pub(super) fn to_sentence(text: &str) -> String {
    let mut chars = text.chars();
    chars
        .next()
        .into_iter()
        .flat_map(char::to_uppercase)
        .chain(chars)
        .chain(['.'])
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn grpc_messages_are_percent_encoded() {
        assert_eq!(
            percent_encode_grpc_message("100% \u{e9}\n"),
            "100%25 %C3%A9%0A"
        );
    }

    proptest! {
        #[test]
        fn push_us_as_seconds_is_exact(us: u64) {
            let mut out = String::new();
            push_us_as_seconds(&mut out, us);
            let (whole, fraction) = out.split_once('.').unwrap();
            prop_assert_eq!(fraction.len(), 6);
            let back = whole.parse::<u128>().unwrap() * 1_000_000 + fraction.parse::<u128>().unwrap();
            prop_assert_eq!(back, u128::from(us));
        }

        #[test]
        fn any_text_is_encoded_as_a_json_string(text: String) {
            let mut out = String::new();
            push_json_string(&mut out, &text);
            prop_assert_eq!(serde_json::from_str::<String>(&out).unwrap(), text);
        }
    }
}
