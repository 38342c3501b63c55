//! Decodes the field blocks of HTTP/2 requests (HPACK, RFC 7541), and checks their fields as h2
//! does (RFC 9113, 8.2).

use http::uri::Authority;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::LazyLock;

use crate::proxy::http::request_validation::RequestValidationError;

/// Overhead of a field in the sizes of tables and field lists (RFC 7541, 4.1).
const FIELD_OVERHEAD: usize = 32;

/// Memory of a literal field at first. Most are shorter.
const LITERAL_BYTES: usize = 64;

/// Maximum size of the dynamic table: the default, because the server's SETTINGS do not change it.
const MAX_TABLE_BYTES: usize = 4096;

thread_local! {
    /// Fields of the static table, in order (RFC 7541, Appendix A). A field has a value behind a
    /// space.
    static STATIC_TABLE: Rc<[Rc<DecodedField>]> = {
        let fields = ":authority|:method GET|:method POST|:path /|:path /index.html|:scheme http|:scheme https|:status 200|\
        :status 204|:status 206|:status 304|:status 400|:status 404|:status 500|accept-charset|\
        accept-encoding gzip, deflate|accept-language|accept-ranges|accept|access-control-allow-origin|age|allow|\
        authorization|cache-control|content-disposition|content-encoding|content-language|content-length|\
        content-location|content-range|content-type|cookie|date|etag|expect|expires|from|host|if-match|\
        if-modified-since|if-none-match|if-range|if-unmodified-since|last-modified|link|location|max-forwards|\
        proxy-authenticate|proxy-authorization|range|referer|refresh|retry-after|server|set-cookie|\
        strict-transport-security|transfer-encoding|user-agent|vary|via|www-authenticate";
        let field = |field: &str| {
            let (name, value) = field.split_once(' ').unwrap_or((field, ""));
            Rc::new(DecodedField::new([name, value].concat().into_bytes(), name.len()))
        };
        fields.split('|').map(field).collect()
    };
}

/// Huffman code (RFC 7541, Appendix B): lengths in bits, and the bytes with codes of that length in
/// the order of their codes. Each code is the previous one plus 1, filled with zeros. The code of
/// 30 ones ends no string.
const HUFFMAN_CODES: [(u32, &[u8]); 21] = [
    (5, b"012aceiost"),
    (6, b" %-./3456789=A_bdfghlmnpru"),
    (7, b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz"),
    (8, b"&*,;XZ"),
    (10, b"!\"()?"),
    (11, b"'+|"),
    (12, b"#>"),
    (13, b"\x00$@[]~"),
    (14, b"^}"),
    (15, b"<`{"),
    (19, b"\\\xc3\xd0"),
    (20, b"\x80\x82\x83\xa2\xb8\xc2\xe0\xe2"),
    (21, b"\x99\xa1\xa7\xac\xb0\xb1\xb3\xd1\xd8\xd9\xe3\xe5\xe6"),
    (22, b"\x81\x84\x85\x86\x88\x92\x9a\x9c\xa0\xa3\xa4\xa9\xaa\xad\xb2\xb5\xb9\xba\xbb\xbd\xbe\xc4\xc6\xe4\xe8\xe9"),
    (23, b"\x01\x87\x89\x8a\x8b\x8c\x8d\x8f\x93\x95\x96\x97\x98\x9b\x9d\x9e\xa5\xa6\xa8\xae\xaf\xb4\xb6\xb7\xbc\xbf\xc5\xe7\xef"),
    (24, b"\x09\x8e\x90\x91\x94\x9f\xab\xce\xd7\xe1\xec\xed"),
    (25, b"\xc7\xcf\xea\xeb"),
    (26, b"\xc0\xc1\xc8\xc9\xca\xcd\xd2\xd5\xda\xdb\xee\xf0\xf2\xf3\xff"),
    (27, b"\xcb\xcc\xd3\xd4\xd6\xdd\xde\xdf\xf1\xf4\xf5\xf6\xf7\xf8\xfa\xfb\xfc\xfd\xfe"),
    (28, b"\x02\x03\x04\x05\x06\x07\x08\x0b\x0c\x0e\x0f\x10\x11\x12\x13\x14\x15\x17\x18\x19\x1a\x1b\x1c\x1d\x1e\x1f\x7f\xdc\xf9"),
    (30, b"\x0a\x0d\x16"),
];

/// Huffman codes of at most 8 bits, such as those of letters and digits, indexed by the next 8 bits
/// of the string.
static SHORT_HUFFMAN_CODES: LazyLock<Vec<Option<(u32, u8)>>> = LazyLock::new(|| {
    let codes = (0_u8..=255).map(|byte| find_huffman_code(u64::from(byte) << 56));
    codes
        .map(|code| code.filter(|(length, _)| *length <= 8))
        .collect()
});

/// A field block that is not valid HPACK. h2 closes the connection.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct InvalidFieldBlock;

/// Decoder with the dynamic table of one connection.
#[derive(Debug)]
pub(crate) struct HpackDecoder {
    static_table: Rc<[Rc<DecodedField>]>,
    /// Newest field first.
    table: VecDeque<Rc<DecodedField>>,
    table_bytes: usize,
    max_table_bytes: usize,
    /// Whether the last block changed the table.
    pub(crate) has_changed: bool,
}

/// Whether a field is valid.
pub(crate) type FieldCheck = Result<(), RequestValidationError>;

/// What a field means for the head that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FieldKind {
    Method,
    Scheme,
    Authority,
    Path,
    Protocol,
    UnknownPseudo,
    ContentLength,
    Expect,
    Other,
}

/// A field of a block, which a table may share. It is checked once.
#[derive(Debug)]
pub(crate) struct DecodedField {
    /// Name and value.
    text: Vec<u8>,
    name_len: usize,
    pub(crate) kind: FieldKind,
    pub(crate) check: FieldCheck,
}

impl DecodedField {
    fn new(text: Vec<u8>, name_len: usize) -> Self {
        let (name, value) = text.split_at_checked(name_len).unwrap_or((&text, &[]));
        let (kind, check) = check_field(name, value);
        Self {
            text,
            name_len,
            kind,
            check,
        }
    }

    pub(crate) fn name(&self) -> &[u8] {
        self.text.get(..self.name_len).unwrap_or_default()
    }

    pub(crate) fn value(&self) -> &[u8] {
        self.text.get(self.name_len..).unwrap_or_default()
    }

    /// Size in tables and lists.
    fn size(&self) -> usize {
        self.text.len() + FIELD_OVERHEAD
    }
}

/// Fields of one block, in order.
#[derive(Debug, Default)]
pub(crate) struct FieldList {
    pub(crate) fields: SmallVec<[Rc<DecodedField>; 32]>,
    /// Size that remains, with the overhead of each field. Fields beyond it are left out.
    pub(crate) remaining_bytes: usize,
    pub(crate) is_too_large: bool,
}

impl FieldList {
    /// A list of at most this size, with 32 bytes for each field (RFC 9113, 6.5.2).
    pub(crate) fn with_max_bytes(max_bytes: usize) -> Self {
        Self {
            remaining_bytes: max_bytes,
            ..Self::default()
        }
    }

    fn push(&mut self, field: &Rc<DecodedField>) {
        match self.remaining_bytes.checked_sub(field.size()) {
            Some(rest) if !self.is_too_large => {
                self.remaining_bytes = rest;
                self.fields.push(Rc::clone(field));
            }
            _ => self.is_too_large = true,
        }
    }
}

impl Default for HpackDecoder {
    fn default() -> Self {
        Self {
            static_table: STATIC_TABLE.with(Rc::clone),
            table: VecDeque::new(),
            table_bytes: 0,
            max_table_bytes: MAX_TABLE_BYTES,
            has_changed: false,
        }
    }
}

impl HpackDecoder {
    /// Appends the fields of a complete block to `fields`.
    ///
    /// # Errors
    /// Fails if the block is not valid HPACK. The decoder is then unusable.
    pub(crate) fn decode(
        &mut self,
        mut block: &[u8],
        fields: &mut FieldList,
    ) -> Result<(), InvalidFieldBlock> {
        let mut may_resize = true;
        self.has_changed = false;
        while let [first, ..] = block {
            match first {
                0x80.. => fields.push(self.entry(read_integer(&mut block, 7)?)?),
                0x20..0x40 => {
                    let bytes = read_integer(&mut block, 5)?;
                    if bytes > MAX_TABLE_BYTES || !may_resize {
                        return Err(InvalidFieldBlock);
                    }
                    (self.max_table_bytes, self.has_changed) = (bytes, true);
                    self.evict_entries(0);
                    continue;
                }
                _ => {
                    let is_indexed = *first >= 0x40;
                    let mut text = Vec::with_capacity(LITERAL_BYTES);
                    match read_integer(&mut block, if is_indexed { 6 } else { 4 })? {
                        0 => read_string(&mut block, &mut text)?,
                        index => text.extend_from_slice(self.entry(index)?.name()),
                    }
                    let name_len = text.len();
                    read_string(&mut block, &mut text)?;
                    if is_indexed {
                        text.shrink_to_fit();
                    }
                    let field = Rc::new(DecodedField::new(text, name_len));
                    fields.push(&field);
                    if is_indexed {
                        self.insert_entry(field);
                    }
                }
            }
            may_resize = false;
        }
        Ok(())
    }

    fn entry(&self, index: usize) -> Result<&Rc<DecodedField>, InvalidFieldBlock> {
        let index = index.checked_sub(1).ok_or(InvalidFieldBlock)?;
        let entry = match index.checked_sub(self.static_table.len()) {
            None => self.static_table.get(index),
            Some(index) => self.table.get(index),
        };
        entry.ok_or(InvalidFieldBlock)
    }

    fn insert_entry(&mut self, field: Rc<DecodedField>) {
        let bytes = field.size();
        self.has_changed = true;
        self.evict_entries(bytes);
        if bytes <= self.max_table_bytes {
            self.table_bytes += bytes;
            self.table.push_front(field);
        }
    }

    /// Removes the oldest entries until there is space for this many bytes.
    fn evict_entries(&mut self, bytes: usize) {
        while self.table_bytes + bytes > self.max_table_bytes
            && let Some(oldest) = self.table.pop_back()
        {
            self.table_bytes -= oldest.size();
        }
    }
}

/// Takes an integer with a prefix of this many bits (RFC 7541, 5.1). Accepts up to 5 bytes, as h2.
fn read_integer(bytes: &mut &[u8], prefix_bits: u32) -> Result<usize, InvalidFieldBlock> {
    let max = (1 << prefix_bits) - 1;
    let mut value = usize::from(take_byte(bytes)?) & max;
    if value < max {
        return Ok(value);
    }
    for shift in [0, 7, 14, 21] {
        let byte = take_byte(bytes)?;
        value += usize::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Ok(value);
        }
    }
    Err(InvalidFieldBlock)
}

/// Appends an integer (RFC 7541, 5.1) with a prefix of `prefix_bits` bits, after the bits of
/// `flags`.
pub(crate) fn push_integer(value: usize, prefix_bits: u32, flags: u8, output: &mut Vec<u8>) {
    let max = (1 << prefix_bits) - 1;
    output.extend(u8::try_from(value.min(max)).map(|prefix| flags | prefix));
    let Some(mut rest) = value.checked_sub(max) else {
        return;
    };
    while rest >= 0x80 {
        output.extend(u8::try_from(rest & 0x7f | 0x80));
        rest >>= 7;
    }
    output.extend(u8::try_from(rest));
}

fn take_byte(bytes: &mut &[u8]) -> Result<u8, InvalidFieldBlock> {
    let (first, rest) = bytes.split_first().ok_or(InvalidFieldBlock)?;
    *bytes = rest;
    Ok(*first)
}

/// Takes a string and appends it, decoded, to `into` (RFC 7541, 5.2).
fn read_string(bytes: &mut &[u8], into: &mut Vec<u8>) -> Result<(), InvalidFieldBlock> {
    let is_huffman = bytes.first().is_some_and(|first| *first >= 0x80);
    let length = read_integer(bytes, 7)?;
    let (text, rest) = bytes.split_at_checked(length).ok_or(InvalidFieldBlock)?;
    *bytes = rest;
    if is_huffman {
        return decode_huffman(text, into);
    }
    into.extend_from_slice(text);
    Ok(())
}

/// Finds the Huffman code at the highest bits of `window`. Returns the length of the code in bits,
/// and the byte that it encodes.
fn find_huffman_code(window: u64) -> Option<(u32, u8)> {
    let (mut first_code, mut previous_length) = (0, 0);
    HUFFMAN_CODES.iter().find_map(|(length, symbols)| {
        first_code <<= length - previous_length;
        previous_length = *length;
        let offset = usize::try_from((window >> (64 - length)) - first_code).ok()?;
        first_code += u64::try_from(symbols.len()).ok()?;
        symbols.get(offset).map(|symbol| (*length, *symbol))
    })
}

fn decode_huffman(text: &[u8], into: &mut Vec<u8>) -> Result<(), InvalidFieldBlock> {
    let short_codes = &**SHORT_HUFFMAN_CODES;
    let mut rest = text.iter();
    // The next bits, from the highest on. The others are ones, as the padding of the last byte.
    let (mut window, mut bits) = (u64::MAX, 0);
    loop {
        while bits <= 56
            && let Some(byte) = rest.next()
        {
            let shift = 56 - bits;
            window &= !(0xff << shift) | u64::from(*byte) << shift;
            bits += 8;
        }
        // Padding is less than a byte of ones (RFC 7541, 5.2).
        if bits < 8 && window == u64::MAX {
            return Ok(());
        }
        let [first, ..] = window.to_be_bytes();
        let short = short_codes.get(usize::from(first)).copied();
        match short.flatten().or_else(|| find_huffman_code(window)) {
            Some((length, symbol)) if length <= bits => {
                into.push(symbol);
                window = window << length | ((1 << length) - 1);
                bits -= length;
            }
            _ => return Err(InvalidFieldBlock),
        }
    }
}

/// Whether a field name may contain the byte (RFC 9110, 5.6.2; RFC 9113, 8.2).
fn is_name_byte(byte: &u8) -> bool {
    matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'!' | b'#'..=b'\'' | b'*' | b'+' | b'^' | b'`' | b'|' | b'~')
}

/// Checks a field. Of pseudo-header fields, only `:authority` can be invalid here: the checks of
/// the others depend on the head.
fn check_field(name: &[u8], value: &[u8]) -> (FieldKind, FieldCheck) {
    let kind = match name {
        b":method" => FieldKind::Method,
        b":scheme" => FieldKind::Scheme,
        b":authority" => FieldKind::Authority,
        b":path" => FieldKind::Path,
        b":protocol" => FieldKind::Protocol,
        [b':', ..] => FieldKind::UnknownPseudo,
        b"content-length" => FieldKind::ContentLength,
        b"expect" => FieldKind::Expect,
        _ => FieldKind::Other,
    };
    let check = match kind {
        FieldKind::Authority => Authority::try_from(value)
            .map_or(Err(RequestValidationError::HostInvalid), |_valid| Ok(())),
        FieldKind::ContentLength | FieldKind::Expect | FieldKind::Other => {
            check_regular_field(name, value)
        }
        _ => Ok(()),
    };
    (kind, check)
}

fn check_regular_field(name: &[u8], value: &[u8]) -> FieldCheck {
    if name.is_empty() || !name.iter().all(is_name_byte) {
        return Err(RequestValidationError::FieldName);
    }
    // Without an early end, which lets the compiler check several bytes at once.
    let is_value_byte = |byte: u8| byte == b'\t' || byte >= b' ' && byte != 0x7f;
    let checked = value.iter().map(|byte| is_value_byte(*byte));
    if !checked.fold(true, |all, is_valid| all & is_valid) {
        return Err(RequestValidationError::FieldValue);
    }
    match name {
        b"connection" | b"keep-alive" | b"proxy-connection" | b"transfer-encoding" | b"upgrade" => {
            Err(RequestValidationError::ConnectionField)
        }
        b"te" if value != b"trailers" => Err(RequestValidationError::ConnectionField),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(
        decoder: &mut HpackDecoder,
        block: &[u8],
    ) -> Result<Vec<(String, String)>, InvalidFieldBlock> {
        let mut fields = FieldList::with_max_bytes(16_384);
        decoder.decode(block, &mut fields)?;
        let text = |bytes: &[u8]| bytes.iter().map(|byte| char::from(*byte)).collect();
        let pairs = (fields.fields.iter()).map(|field| (text(field.name()), text(field.value())));
        Ok(pairs.collect())
    }

    fn pairs(fields: &[(&str, &str)]) -> Vec<(String, String)> {
        let owned = |(name, value): &(&str, &str)| ((*name).to_owned(), (*value).to_owned());
        fields.iter().map(owned).collect()
    }

    /// RFC 7541, C.4: requests with Huffman code and the dynamic table.
    #[test]
    fn the_requests_of_the_rfc_are_decoded() {
        let get = [(":method", "GET"), (":scheme", "http"), (":path", "/")];
        let host = [(":authority", "www.example.com")];
        let (first, second, third) = (
            [&get[..], &host].concat(),
            [&get[..], &host, &[("cache-control", "no-cache")]].concat(),
            [
                &[
                    (":method", "GET"),
                    (":scheme", "https"),
                    (":path", "/index.html"),
                ][..],
                &host,
                &[("custom-key", "custom-value")],
            ]
            .concat(),
        );
        let mut decoder = HpackDecoder::default();
        for (block, expected) in [
            (
                &b"\x82\x86\x84\x41\x8c\xf1\xe3\xc2\xe5\xf2\x3a\x6b\xa0\xab\x90\xf4\xff"[..],
                first,
            ),
            (b"\x82\x86\x84\xbe\x58\x86\xa8\xeb\x10\x64\x9c\xbf", second),
            (
                b"\x82\x87\x85\xbf\x40\x88\x25\xa8\x49\xe9\x5b\xa9\x7d\x7f\x89\x25\xa8\x49\xe9\x5b\xb8\xe8\xb4\xbf",
                third,
            ),
        ] {
            assert_eq!(decode(&mut decoder, block).unwrap(), pairs(&expected));
        }
        assert_eq!(decoder.table_bytes, 164);
    }

    /// The codes are those of h2's encoder.
    #[test]
    fn each_byte_has_its_huffman_code() {
        let (mut code, mut previous_length, mut seen) = (0_u64, 0, Vec::new());
        for (length, symbols) in HUFFMAN_CODES {
            code <<= length - previous_length;
            previous_length = length;
            for symbol in symbols {
                // The code, filled up with ones.
                let bits = 8 * length.div_ceil(8);
                let filled = (code + 1) << (bits - length);
                let text = (filled - 1).to_be_bytes();
                let text = &text[8 - usize::try_from(bits / 8).unwrap()..];
                let mut decoded = Vec::new();
                decode_huffman(text, &mut decoded).unwrap();
                assert_eq!(decoded.as_slice(), [*symbol]);
                seen.push(*symbol);
                code += 1;
            }
        }
        seen.sort_unstable();
        assert_eq!(seen, (0..=255).collect::<Vec<_>>());
        // Only the end of strings is left, with 30 ones.
        assert_eq!(code, (1 << 30) - 1);
    }

    #[test]
    fn the_table_evicts_the_oldest_entries() {
        let mut decoder = HpackDecoder::default();
        let long = "v".repeat(1500);
        let entry = |name: char| {
            let length = [0x7f, 0xdd, 0x0a];
            [
                &[0x40, 1, u8::try_from(name).unwrap()][..],
                &length,
                long.as_bytes(),
            ]
            .concat()
        };
        for name in ['a', 'b', 'c'] {
            let expected = pairs(&[(&name.to_string(), &long)]);
            assert_eq!(decode(&mut decoder, &entry(name)).unwrap(), expected);
        }
        assert_eq!(
            decode(&mut decoder, &[0xbe]).unwrap(),
            pairs(&[("c", &long)])
        );
        assert_eq!(
            decode(&mut decoder, &[0xbf]).unwrap(),
            pairs(&[("b", &long)])
        );
        decode(&mut decoder, &[0xc0]).unwrap_err();
        // A table of 1,600 bytes, then of none.
        assert_eq!(
            decode(&mut decoder, b"\x3f\xa1\x0c\xbe").unwrap(),
            pairs(&[("c", &long)])
        );
        decode(&mut decoder, &[0xbf]).unwrap_err();
        decode(&mut decoder, &[0x20, 0xbe]).unwrap_err();
    }

    #[test]
    fn invalid_blocks_are_errors() {
        for block in [
            &b"\x80"[..],
            b"\xff",
            b"\xff\x80\x80\x80\x80\x01",
            b"\x40\x0ax",
            b"\x00\x01x",
            b"\x3f\xe2\x1f",
            b"\x82\x20",
            // Huffman code: padding with a zero, of a whole byte, and the end of strings.
            b"\x00\x01x\x81\x00",
            b"\x00\x01x\x82\x1f\xff",
            b"\x00\x01x\x84\xff\xff\xff\xff",
        ] {
            decode(&mut HpackDecoder::default(), block).unwrap_err();
        }
    }

    #[test]
    fn fields_beyond_the_limit_are_left_out_but_enter_the_table() {
        let mut decoder = HpackDecoder::default();
        let mut fields = FieldList::with_max_bytes(2 * 34);
        let block = b"\x00\x01a\x01b\x00\x01c\x01d\x40\x01e\x01f";
        decoder.decode(block, &mut fields).unwrap();
        assert!(fields.is_too_large);
        assert_eq!(fields.fields.len(), 2);
        assert_eq!(decode(&mut decoder, &[0xbe]).unwrap(), pairs(&[("e", "f")]));
    }
}
