//! Checks the field blocks of HTTP/2 requests, and replaces those that h2 would reject.
//!
//! h2 resets the stream of a malformed head, or closes the connection, without a response. Such a
//! head is replaced by a valid one that states the error in an `expect` field. A head that expects
//! `100 Continue` gets its stream as one more `expect` field. Other heads get no such mark, so a
//! client cannot send one of its own. See `docs/decisions/0095-decoded-field-blocks.md`.

use http::uri::{PathAndQuery, Scheme};
use http::{HeaderMap, HeaderValue, Method, header};
use std::borrow::Cow;

use super::frame_splitter::{CONTINUATION, END_HEADERS, END_STREAM, HEADERS};
use super::hpack::{
    DecodedField, FieldKind, FieldList, HpackDecoder, InvalidFieldBlock, push_integer,
};
use crate::policy::parse_whole_number;
use crate::proxy::http::query_escaper::escape_query;
use crate::proxy::http::request_validation::RequestValidationError;

/// Maximum payload of a frame by default (RFC 9113, 6.5.2).
const MAX_FRAME_BYTES: usize = 16_384;

/// Lower bound for the size of a block that is kept until it is complete.
const MIN_BLOCK_BYTES: usize = 64 * 1024;

/// Maximum size of a field that the replacement of a malformed head keeps, and of a target that is
/// checked without the `http` crate.
const MAX_KEPT_BYTES: usize = 1024;

/// Maximum size of a head that is compared with the next one.
const MAX_REPEATED_BYTES: usize = 512;

/// Space for the `expect` field that is added to a head.
const MARK_BYTES: usize = 64;

/// Prefix of the number of an error.
const ERROR_PREFIX: char = 'e';

/// Whether a slash and such bytes are always a valid path and query. There are others.
fn is_plain_path_byte(byte: &u8) -> bool {
    matches!(byte, b'a'..=b'z' | b'A'..=b'Z' | b'/'..=b';' | b'%'..=b'.' | b'?' | b'=' | b'_' | b'~' | b'!' | b'$' | b'@')
}

/// What a field block belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum FieldBlockKind {
    RequestHead,
    /// Trailers of an upload that is not complete.
    Trailers,
    /// A stream that has ended.
    #[default]
    Other,
}

/// Frames that replace those of a field block.
#[derive(Debug)]
pub(crate) struct ReplacedBlock {
    pub(crate) frames: Vec<u8>,
    /// Whether the head ends with a mark.
    pub(crate) is_marked: bool,
}

/// A field block that is not valid HPACK (RFC 7541, 6.1): index 0.
pub(crate) const INVALID_BLOCK: [u8; 1] = [0x80];

/// Filter of one connection.
#[derive(Debug, Default)]
pub(crate) struct FieldBlockFilter {
    decoder: HpackDecoder,
    /// Maximum size of a field list, from which h2 rejects it.
    max_list_bytes: usize,
    /// Whether h2 has not seen an earlier block, which may have changed the dynamic table. All
    /// later blocks are then encoded anew, without the table.
    pub(crate) is_table_unknown: bool,
    /// Size of the last block's list, at most `max_list_bytes`.
    pub(crate) last_list_bytes: usize,
    /// The last block, if it is a head that h2 saw as it was and that left the table as it was. A
    /// client that repeats a request repeats its block, with the same result. With whether it ended
    /// its stream.
    repeated_head: (Vec<u8>, bool),
}

impl FieldBlockFilter {
    pub(crate) fn new(max_list_bytes: usize) -> Self {
        Self {
            max_list_bytes,
            ..Self::default()
        }
    }

    /// Maximum bytes of a block that is kept until it is complete. h2 closes the connection for a
    /// larger one.
    pub(crate) fn max_block_bytes(&self) -> usize {
        self.max_list_bytes.saturating_mul(2).max(MIN_BLOCK_BYTES)
    }

    /// Checks a complete block. Returns `None` if h2 may see it as it is.
    ///
    /// # Errors
    /// Fails if the block is not valid HPACK, for which h2 closes the connection.
    pub(crate) fn filter(
        &mut self,
        kind: FieldBlockKind,
        (stream, ends_stream): (u32, bool),
        block: &[u8],
    ) -> Result<Option<ReplacedBlock>, InvalidFieldBlock> {
        let (last_head, ended_stream) = &mut self.repeated_head;
        let is_repeated = !block.is_empty() && *last_head == block && *ended_stream == ends_stream;
        if is_repeated && kind == FieldBlockKind::RequestHead && !self.is_table_unknown {
            return Ok(None);
        }
        last_head.clear();
        let mut fields = FieldList::with_max_bytes(self.max_list_bytes.saturating_sub(1));
        self.decoder.decode(block, &mut fields)?;
        self.last_list_bytes = self.max_list_bytes.saturating_sub(fields.remaining_bytes);
        let mut output = Vec::new();
        let mut is_marked = false;
        match kind {
            FieldBlockKind::RequestHead => {
                let mut head = RequestHead::default();
                match head.check(&fields, ends_stream) {
                    Ok(()) if !head.is_rewritten() && !self.is_table_unknown => {
                        if !self.decoder.has_changed && block.len() <= MAX_REPEATED_BYTES {
                            last_head.extend_from_slice(block);
                            *ended_stream = ends_stream;
                        }
                        return Ok(None);
                    }
                    Ok(()) => {
                        is_marked = head.has_expectation;
                        head.encode(&fields, stream, &mut output);
                    }
                    Err(error) => {
                        is_marked = true;
                        head.encode_malformed(&fields, error, &mut output);
                    }
                }
            }
            FieldBlockKind::Trailers if are_malformed_trailers(&fields) => {
                // The request's body rejects the white space.
                encode_field(b"x", b" ", &mut output);
            }
            _ if !self.is_table_unknown => return Ok(None),
            _ => {
                for field in &fields.fields {
                    encode_field(field.name(), field.value(), &mut output);
                }
            }
        }
        self.is_table_unknown = true;
        Ok(Some(ReplacedBlock {
            frames: encode_frames(stream, ends_stream, &output),
            is_marked,
        }))
    }
}

/// Parts of a request head that h2 checks (RFC 9113, 8.2 and 8.3).
#[derive(Debug, Default)]
struct RequestHead<'f> {
    method: Option<&'f [u8]>,
    scheme: Option<&'f [u8]>,
    authority: Option<&'f DecodedField>,
    path: Option<&'f [u8]>,
    /// The path and query, escaped as over HTTP/1.
    path_for_h2: Cow<'f, [u8]>,
    protocol: Option<&'f [u8]>,
    content_length: Option<u64>,
    has_regular_field: bool,
    has_expectation: bool,
}

impl<'f> RequestHead<'f> {
    /// Reads all fields.
    ///
    /// # Errors
    /// Returns the first error for which h2 would reject the head.
    fn check(
        &mut self,
        fields: &'f FieldList,
        ends_stream: bool,
    ) -> Result<(), RequestValidationError> {
        let mut result = Ok(());
        for field in &fields.fields {
            result = result.and(self.add_field(field));
        }
        self.path_for_h2 = escape_query(self.path.unwrap_or_default());
        if fields.is_too_large {
            return Err(RequestValidationError::HeadTooLarge);
        }
        result?;
        self.check_pseudo_fields()?;
        // hyper closes the connection for a CONNECT with a length.
        let has_no_body = ends_stream || self.method == Some(b"CONNECT");
        if has_no_body && self.content_length.is_some_and(|length| length > 0) {
            return Err(RequestValidationError::BodyLength);
        }
        let added = self.path_for_h2.len() - self.path.map_or(0, <[u8]>::len);
        let mark = if self.has_expectation { MARK_BYTES } else { 0 };
        if added + mark > fields.remaining_bytes {
            return Err(RequestValidationError::HeadTooLarge);
        }
        Ok(())
    }

    fn add_field(&mut self, field: &'f DecodedField) -> Result<(), RequestValidationError> {
        let value = field.value();
        let was_known = match field.kind {
            FieldKind::Method => self.method.replace(value).is_some(),
            FieldKind::Scheme => self.scheme.replace(value).is_some(),
            FieldKind::Authority => self.authority.replace(field).is_some(),
            FieldKind::Path => self.path.replace(value).is_some(),
            FieldKind::Protocol => self.protocol.replace(value).is_some(),
            FieldKind::UnknownPseudo => true,
            FieldKind::ContentLength | FieldKind::Expect | FieldKind::Other => {
                return self.add_regular_field(field);
            }
        };
        if was_known || self.has_regular_field {
            return Err(RequestValidationError::PseudoFields);
        }
        Ok(())
    }

    fn add_regular_field(&mut self, field: &DecodedField) -> Result<(), RequestValidationError> {
        self.has_regular_field = true;
        field.check?;
        match field.kind {
            FieldKind::Expect => self.has_expectation = true,
            FieldKind::ContentLength => {
                let length = parse_whole_number(field.value());
                let earlier = self.content_length.replace(length.unwrap_or_default());
                if length.is_none() || earlier.is_some_and(|earlier| Some(earlier) != length) {
                    return Err(RequestValidationError::ContentLength);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn check_pseudo_fields(&self) -> Result<(), RequestValidationError> {
        let method = self.method.ok_or(RequestValidationError::PseudoFields)?;
        if Method::from_bytes(method).is_err() {
            return Err(RequestValidationError::Method);
        }
        let (is_connect, is_extended) = (method == b"CONNECT", self.protocol.is_some());
        let is_scheme =
            |text: &[u8]| matches!(text, b"http" | b"https") || Scheme::try_from(text).is_ok();
        let has_target = match (self.scheme, self.path) {
            (Some(scheme), Some(_)) if is_scheme(scheme) => true,
            (None, None) => false,
            _ => return Err(RequestValidationError::PseudoFields),
        };
        let is_utf8 = |value: &[u8]| str::from_utf8(value).is_ok();
        if has_target != (!is_connect || is_extended)
            || is_extended && !is_connect
            || !self.protocol.is_none_or(is_utf8)
        {
            return Err(RequestValidationError::PseudoFields);
        }
        self.authority.map_or(Ok(()), |field| field.check)?;
        if has_target && !self.has_valid_path() {
            return Err(RequestValidationError::Path);
        }
        Ok(())
    }

    fn has_valid_path(&self) -> bool {
        let path = &*self.path_for_h2;
        let is_plain = path.starts_with(b"/")
            && path.len() <= MAX_KEPT_BYTES
            && path.iter().all(is_plain_path_byte);
        // `http` also accepts a path without a slash, and drops a fragment.
        let has_start = path.starts_with(b"/") || path == b"*";
        is_plain || has_start && PathAndQuery::try_from(path).is_ok()
    }

    /// Whether h2 must not see the head as it is.
    fn is_rewritten(&self) -> bool {
        self.has_expectation || matches!(self.path_for_h2, Cow::Owned(_))
    }

    fn encode(&self, fields: &FieldList, stream: u32, output: &mut Vec<u8>) {
        for field in &fields.fields {
            let value = match field.kind {
                FieldKind::Path => &self.path_for_h2,
                _ => field.value(),
            };
            encode_field(field.name(), value, output);
        }
        if self.has_expectation {
            encode_field(b"expect", stream.to_string().as_bytes(), output);
        }
    }

    /// Encodes a valid head that states the error, with the valid fields on which the response
    /// depends.
    fn encode_malformed(
        &self,
        fields: &FieldList,
        error: RequestValidationError,
        output: &mut Vec<u8>,
    ) {
        let is_short = |text: &&[u8]| text.len() <= MAX_KEPT_BYTES;
        let method = self
            .method
            .filter(|method| Method::from_bytes(method).is_ok() && *method != b"CONNECT");
        let method = method.filter(is_short).unwrap_or(b"GET");
        encode_field(b":method", method, output);
        encode_field(b":scheme", b"http", output);
        if let Some(authority) = self.authority
            && is_short(&authority.value())
            && authority.check.is_ok()
        {
            encode_field(b":authority", authority.value(), output);
        }
        let path = &*self.path_for_h2;
        let is_kept = is_short(&path) && self.has_valid_path();
        encode_field(b":path", if is_kept { path } else { b"/" }, output);
        for field in &fields.fields {
            let (name, value) = (field.name(), field.value());
            let is_kept = matches!(
                name,
                b"accept" | b"content-type" | b"origin" | b"traceparent"
            );
            if is_kept && is_short(&value) && field.check.is_ok() {
                encode_field(name, value, output);
            }
        }
        let mark = format!("{ERROR_PREFIX}{}", error as u8);
        encode_field(b"expect", mark.as_bytes(), output);
    }
}

fn are_malformed_trailers(fields: &FieldList) -> bool {
    let is_malformed =
        |field: &DecodedField| field.check.is_err() || field.name().starts_with(b":");
    fields.is_too_large || fields.fields.iter().any(|field| is_malformed(field))
}

/// Encodes a field as a literal that enters no dynamic table (RFC 7541, 6.2.2).
fn encode_field(name: &[u8], value: &[u8], output: &mut Vec<u8>) {
    output.push(0);
    for text in [name, value] {
        push_integer(text.len(), 7, 0, output);
        output.extend_from_slice(text);
    }
}

/// Divides a field block into HEADERS and CONTINUATION frames.
pub(crate) fn encode_frames(stream: u32, ends_stream: bool, block: &[u8]) -> Vec<u8> {
    let mut frames = Vec::with_capacity(block.len() + 64);
    let (mut rest, mut kind) = (block, HEADERS);
    loop {
        let (part, behind) = rest.split_at(rest.len().min(MAX_FRAME_BYTES));
        let mut flags = if behind.is_empty() { END_HEADERS } else { 0 };
        if kind == HEADERS && ends_stream {
            flags |= END_STREAM;
        }
        let [.., a, b, c] = part.len().to_be_bytes();
        frames.extend_from_slice(&[a, b, c, kind, flags]);
        frames.extend_from_slice(&stream.to_be_bytes());
        frames.extend_from_slice(part);
        if behind.is_empty() {
            return frames;
        }
        (rest, kind) = (behind, CONTINUATION);
    }
}

/// Mark of a request head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeadMark {
    /// The stream of a head with an expectation.
    Stream(u32),
    /// The head replaces a malformed one.
    Malformed(RequestValidationError),
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

    const GET: [(&str, &str); 4] = [
        (":method", "GET"),
        (":scheme", "http"),
        (":authority", "a"),
        (":path", "/"),
    ];

    fn encode(fields: &[(&str, &str)]) -> Vec<u8> {
        let mut block = Vec::new();
        for (name, value) in fields {
            encode_field(name.as_bytes(), value.as_bytes(), &mut block);
        }
        block
    }

    fn filter_head(filter: &mut FieldBlockFilter, block: &[u8]) -> Option<ReplacedBlock> {
        let kind = FieldBlockKind::RequestHead;
        filter.filter(kind, (7, true), block).unwrap()
    }

    /// Fields of a block in one frame.
    fn decode(replaced: Option<ReplacedBlock>) -> Vec<(String, String)> {
        let frames = replaced.expect("the head is not replaced").frames;
        let [a, b, c, HEADERS, flags, 0, 0, 0, 7, block @ ..] = frames.as_slice() else {
            panic!("{frames:?}")
        };
        assert_eq!(*flags, END_STREAM | END_HEADERS);
        assert_eq!(
            usize::from(*a) << 16 | usize::from(*b) << 8 | usize::from(*c),
            block.len()
        );
        let mut fields = FieldList::with_max_bytes(usize::MAX);
        HpackDecoder::default().decode(block, &mut fields).unwrap();
        let text = |bytes| String::from_utf8(Vec::from(bytes)).unwrap();
        let pairs = fields
            .fields
            .iter()
            .map(|field| (text(field.name()), text(field.value())));
        pairs.collect()
    }

    #[test]
    fn valid_heads_are_not_replaced() {
        let mut filter = FieldBlockFilter::new(16_384);
        for fields in [
            &GET[..],
            &[(":method", "CONNECT"), (":authority", "a:443")],
            &[
                (":method", "CONNECT"),
                (":protocol", "websocket"),
                (":scheme", "https"),
                (":path", "/x?y=1#z"),
                (":authority", "[::1]:80"),
            ],
            &[
                (":method", "OPTIONS"),
                (":scheme", "http"),
                (":path", "*"),
                ("te", "trailers"),
            ],
            &[
                (":path", "/{}|^?`\u{e9}"),
                (":scheme", "x+y"),
                (":method", "PURGE"),
                ("x", "\t\u{e9}"),
            ],
        ] {
            let replaced = filter_head(&mut filter, &encode(fields));
            assert!(replaced.is_none(), "{fields:?} {replaced:?}");
        }
    }

    #[test]
    fn the_size_of_a_list_is_that_of_the_library() {
        // Four fields of 32 bytes and their text.
        let bytes = 4 * 32 + 7 + 3 + 7 + 4 + 10 + 1 + 5 + 1;
        for (max_bytes, is_too_large) in [(bytes, true), (bytes + 1, false)] {
            let replaced = filter_head(&mut FieldBlockFilter::new(max_bytes), &encode(&GET));
            assert_eq!(replaced.is_some(), is_too_large, "{max_bytes}");
        }
    }

    #[test]
    fn a_malformed_head_keeps_what_the_response_depends_on() {
        let head = [
            &[
                (":path", "/a?\"b\""),
                (":scheme", "http"),
                (":method", "PUT"),
            ][..],
            &[
                (":authority", "a"),
                ("accept", "text/plain"),
                ("x", "y"),
                ("expect", "7"),
            ],
            &[("connection", "close"), ("origin", "\n")],
        ];
        let replaced = filter_head(&mut FieldBlockFilter::new(16_384), &encode(&head.concat()));
        let mark = format!("e{}", RequestValidationError::ConnectionField as u8);
        let expected = [
            (":method", "PUT"),
            (":scheme", "http"),
            (":authority", "a"),
            (":path", "/a?%22b%22"),
            ("accept", "text/plain"),
            ("expect", &mark),
        ];
        let expected = expected.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(decode(replaced), expected);
    }

    /// h2 does not know the entries of blocks that it has not seen.
    #[test]
    fn later_blocks_are_encoded_without_the_table() {
        let mut filter = FieldBlockFilter::new(16_384);
        let indexed = [&encode(&GET)[..], b"\x40\x01x\x01y"].concat();
        assert!(filter_head(&mut filter, &indexed).is_none());
        let repeated = [&encode(&GET)[..], b"\xbe"].concat();
        assert!(filter_head(&mut filter, &repeated).is_none());
        let malformed = [&encode(&GET)[..], b"\x40\x01X\x01y"].concat();
        assert!(filter_head(&mut filter, &malformed).is_some());
        let repeated = [&encode(&GET)[..], b"\xbf"].concat();
        let fields = [&GET[..], &[("x", "y")]].concat();
        let expected: Vec<_> = fields
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        assert_eq!(decode(filter_head(&mut filter, &repeated)), expected);
    }

    #[test]
    fn a_repeated_block_is_checked_again_if_the_end_of_the_stream_differs() {
        let mut filter = FieldBlockFilter::new(16_384);
        let with_length = [&encode(&GET)[..], &encode(&[("content-length", "5")])].concat();
        let mut filter_block = |ends_stream| {
            let kind = FieldBlockKind::RequestHead;
            filter.filter(kind, (7, ends_stream), &with_length).unwrap()
        };
        assert!(filter_block(false).is_none() && filter_block(false).is_none());
        assert!(filter_block(true).is_some());
    }

    #[test]
    fn a_repeated_block_that_changes_the_table_is_checked_again() {
        let mut filter = FieldBlockFilter::new(16_384);
        // The first field is the newest of the table: `:authority`, later `x`, which pseudo-header
        // fields may not follow.
        let others = encode(&[GET[0], GET[1], GET[3]]);
        let shifting = [&b"\xbe"[..], &others, b"\x40\x01x\x01y"].concat();
        assert!(filter_head(&mut filter, &[&others[..], b"\x41\x01b"].concat()).is_none());
        assert!(filter_head(&mut filter, &shifting).is_none());
        assert!(filter_head(&mut filter, &shifting).is_some());
    }

    /// The end of an upload would be lost.
    #[test]
    fn an_empty_block_that_is_encoded_anew_is_a_frame() {
        let mut filter = FieldBlockFilter::new(16_384);
        let malformed = [&encode(&GET)[..], b"\0\x01X\x01y"].concat();
        assert!(filter_head(&mut filter, &malformed).is_some());
        let trailers = filter.filter(FieldBlockKind::Trailers, (7, true), b"");
        let frame = [0, 0, 0, HEADERS, END_STREAM | END_HEADERS, 0, 0, 0, 7];
        assert_eq!(trailers.unwrap().unwrap().frames, frame);
    }

    #[test]
    fn large_blocks_are_divided_into_frames() {
        let value = "v".repeat(40_000);
        let fields = [&GET[..], &[("expect", "x"), ("y", &value)]].concat();
        let replaced = filter_head(&mut FieldBlockFilter::new(100_000), &encode(&fields)).unwrap();
        let (mut rest, mut seen) = (replaced.frames.as_slice(), Vec::new());
        while let [a, b, c, kind, flags, 0, 0, 0, 7, tail @ ..] = rest {
            let length = usize::from(*a) << 16 | usize::from(*b) << 8 | usize::from(*c);
            seen.push((*kind, *flags, length == MAX_FRAME_BYTES));
            rest = &tail[length..];
        }
        let expected = [
            (HEADERS, END_STREAM, true),
            (CONTINUATION, 0, true),
            (CONTINUATION, END_HEADERS, false),
        ];
        assert_eq!(seen, expected);
        assert!(rest.is_empty() && replaced.is_marked);
    }

    #[test]
    fn only_the_last_field_is_taken() {
        let head = |values: &[String]| -> HeaderMap {
            let values = values.iter().map(|value| value.parse().unwrap());
            values.map(|value| (header::EXPECT, value)).collect()
        };
        let client = ["100-continue".to_owned(), "7".to_owned()];
        let mark = [(u32::MAX >> 1).to_string()];
        let mut headers = head(&[&client[..], &mark].concat());
        let taken = take_head_mark(&mut headers);
        assert_eq!(taken, Some(HeadMark::Stream(u32::MAX >> 1)));
        assert_eq!(headers, head(&client));
        for error in (0..).map_while(RequestValidationError::from_repr) {
            let mut headers = head(&[format!("e{}", error as u8)]);
            let taken = take_head_mark(&mut headers);
            assert_eq!(taken, Some(HeadMark::Malformed(error)));
            assert!(headers.is_empty());
        }
        assert_eq!(take_head_mark(&mut HeaderMap::new()), None);
    }
}
