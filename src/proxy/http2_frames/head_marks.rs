//! Marks that the frame scanner adds to HTTP/2 request heads, for the handler of the request.
//!
//! A mark is one more `expect` field, the last one. Heads without an expectation get none, unless
//! they replace a malformed head. So a client cannot send a mark of its own.

use http::{HeaderMap, HeaderValue, header};

use crate::proxy::http::request_validation::RequestValidationError;

/// Prefix of the number of an error.
const ERROR_PREFIX: char = 'e';

/// Mark of a request head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeadMark {
    /// The stream of a head with an expectation.
    Stream(u32),
    /// The head replaces a malformed one.
    Malformed(RequestValidationError),
}

/// Value of the field that marks a head with its stream.
pub(crate) fn encode_stream_mark(stream: u32) -> String {
    stream.to_string()
}

/// Value of the field that marks the replacement of a malformed head.
pub(crate) fn encode_malformed_mark(error: RequestValidationError) -> String {
    format!("{ERROR_PREFIX}{}", error as u8)
}

/// Removes the mark of a head. Other `expect` fields stay. Call it only if the connection has
/// marks.
pub(crate) fn take_head_mark(headers: &mut HeaderMap) -> Option<HeadMark> {
    let header::Entry::Occupied(expectations) = headers.entry(header::EXPECT) else {
        return None;
    };
    let mut values: Vec<HeaderValue> = expectations.remove_entry_mult().1.collect();
    let mark = values.pop()?;
    for value in values {
        headers.append(header::EXPECT, value);
    }
    let mark = mark.to_str().ok()?;
    match mark.strip_prefix(ERROR_PREFIX) {
        Some(number) => {
            RequestValidationError::from_repr(number.parse().ok()?).map(HeadMark::Malformed)
        }
        None => mark.parse().ok().map(HeadMark::Stream),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_last_field_is_taken() {
        let head = |values: &[String]| -> HeaderMap {
            let values = values.iter().map(|value| value.parse().unwrap());
            values.map(|value| (header::EXPECT, value)).collect()
        };
        let client = ["100-continue".to_owned(), "7".to_owned()];
        let mark = [encode_stream_mark(u32::MAX >> 1)];
        let mut headers = head(&[&client[..], &mark].concat());
        let taken = take_head_mark(&mut headers);
        assert_eq!(taken, Some(HeadMark::Stream(u32::MAX >> 1)));
        assert_eq!(headers, head(&client));
        for error in (0..).map_while(RequestValidationError::from_repr) {
            let mut headers = head(&[encode_malformed_mark(error)]);
            let taken = take_head_mark(&mut headers);
            assert_eq!(taken, Some(HeadMark::Malformed(error)));
            assert!(headers.is_empty());
        }
        assert_eq!(take_head_mark(&mut HeaderMap::new()), None);
    }
}
