//! Text encodings of local replies: numbers in JSON, `grpc-message` and sentences.

use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

/// Appends microseconds as decimal seconds with six places, exact where a float would round.
pub(super) fn push_us_as_seconds(out: &mut Vec<u8>, us: u64) {
    let mut buffer = itoa::Buffer::new();
    out.extend_from_slice(buffer.format(us / 1_000_000).as_bytes());
    out.push(b'.');
    let fraction = buffer.format(us % 1_000_000).as_bytes();
    out.extend((fraction.len()..6).map(|_| b'0'));
    out.extend_from_slice(fraction);
}

/// Bytes that are escaped in a `grpc-message`, apart from those outside ASCII.
const GRPC_ESCAPED: &AsciiSet = &CONTROLS.add(b'%');

/// Percent-encodes a `grpc-message`: keeps spaces and visible ASCII other than `%`, and encodes
/// every other byte.
pub(super) fn percent_encode_grpc_message(text: &str) -> String {
    utf8_percent_encode(text, GRPC_ESCAPED).to_string()
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
            let mut out = Vec::new();
            push_us_as_seconds(&mut out, us);
            let out = String::from_utf8(out).unwrap();
            let (whole, fraction) = out.split_once('.').unwrap();
            prop_assert_eq!(fraction.len(), 6);
            let back = whole.parse::<u128>().unwrap() * 1_000_000 + fraction.parse::<u128>().unwrap();
            prop_assert_eq!(back, u128::from(us));
        }
    }
}
