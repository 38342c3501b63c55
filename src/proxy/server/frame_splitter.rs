//! Splits an HTTP/2 byte stream into frames (RFC 9113, 4.1).

/// Length of a frame header: length, type, flags and stream.
pub(super) const FRAME_HEADER_BYTES: usize = 9;

/// Maximum length of the fields between the header of a HEADERS frame and its field block: padding
/// length and priority (RFC 9113, 6.2).
const MAX_PREFIX_BYTES: usize = 6;

pub(super) const DATA: u8 = 0;
pub(super) const HEADERS: u8 = 1;
pub(super) const CONTINUATION: u8 = 9;

pub(super) const END_STREAM: u8 = 1;
pub(super) const END_HEADERS: u8 = 4;
pub(super) const PADDED: u8 = 8;
pub(super) const PRIORITY: u8 = 32;

/// Splits a byte stream into frame headers, payloads and the padding of HEADERS frames.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FrameSplitter {
    /// Frame header, and padding length and priority of a HEADERS frame.
    header: [u8; FRAME_HEADER_BYTES + MAX_PREFIX_BYTES],
    /// Received bytes of `header`. These bytes are not passed on yet.
    pub(super) header_len: usize,
    /// Payload bytes still to be skipped.
    remaining_payload: usize,
    /// Padding bytes behind the payload.
    remaining_padding: usize,
}

/// Drops empty DATA frames that do not end a stream. h2 closes a connection with 100 of them, over
/// its whole life.
#[derive(Debug, Default)]
pub(crate) struct EmptyFrameFilter(FrameSplitter);

/// A part of the byte stream.
pub(super) enum FramePart<'a> {
    Header(FrameHeader<'a>),
    Payload(&'a [u8]),
    Padding(&'a [u8]),
}

/// Header of one frame.
#[derive(Clone, Copy)]
pub(super) struct FrameHeader<'a> {
    pub(super) fixed: &'a [u8; FRAME_HEADER_BYTES],
    /// Padding length and priority of a HEADERS frame. Empty if the frame is too short for them.
    pub(super) prefix: &'a [u8],
    /// Bytes of the payload without prefix and padding.
    pub(super) block_len: usize,
    /// Bytes of the payload without prefix.
    pub(super) remaining_len: usize,
    /// Whether the frame is HEADERS with a payload too short for its prefix and padding.
    pub(super) is_too_short: bool,
}

impl EmptyFrameFilter {
    /// Returns whether other bytes, which are appended to `replacement`, replace the next bytes. A
    /// frame header that is incomplete so far is withheld.
    pub(crate) fn filter(&mut self, bytes: &[u8], replacement: &mut Vec<u8>) -> bool {
        let (mut splitter, mut has_empty_frames) = (self.0, false);
        splitter.split(bytes, |part| {
            has_empty_frames |= matches!(part, FramePart::Header(header) if header.is_empty_data());
        });
        let mut start = std::mem::replace(&mut self.0, splitter);
        let is_rewritten = has_empty_frames || start.header_len > 0 || self.0.header_len > 0;
        if is_rewritten {
            start.split(bytes, |part| match part {
                FramePart::Payload(bytes) | FramePart::Padding(bytes) => {
                    replacement.extend_from_slice(bytes);
                }
                FramePart::Header(header) if header.is_empty_data() => {}
                FramePart::Header(header) => header.push(replacement),
            });
        }
        is_rewritten
    }
}

impl FrameHeader<'_> {
    pub(super) fn kind(&self) -> u8 {
        let [_, _, _, kind, ..] = *self.fixed;
        kind
    }

    pub(super) fn flags(&self) -> u8 {
        let [_, _, _, _, flags, ..] = *self.fixed;
        flags
    }

    pub(super) fn stream(&self) -> u32 {
        let [_, _, _, _, _, stream @ ..] = *self.fixed;
        u32::from_be_bytes(stream) & (u32::MAX >> 1)
    }

    /// Whether this is an empty DATA frame that does not end its stream.
    pub(super) fn is_empty_data(&self) -> bool {
        matches!(*self.fixed, [0, 0, 0, DATA, flags, ..] if flags & END_STREAM == 0)
    }

    /// Whether a HEADERS frame has a priority that depends on its own stream (RFC 7540, 5.3.1).
    pub(super) fn depends_on_itself(&self) -> bool {
        match *self.prefix {
            [.., a, b, c, d, _weight] => {
                u32::from_be_bytes([a, b, c, d]) & (u32::MAX >> 1) == self.stream()
            }
            _ => false,
        }
    }

    pub(super) fn push(&self, into: &mut Vec<u8>) {
        into.extend_from_slice(self.fixed);
        into.extend_from_slice(self.prefix);
    }
}

impl FrameSplitter {
    /// Splits the next bytes into complete frame headers and parts of payloads and padding.
    pub(super) fn split(&mut self, mut bytes: &[u8], mut visit: impl FnMut(FramePart<'_>)) {
        loop {
            let payload = take_front(&mut bytes, &mut self.remaining_payload);
            if !payload.is_empty() {
                visit(FramePart::Payload(payload));
            }
            let padding = take_front(&mut bytes, &mut self.remaining_padding);
            if !padding.is_empty() {
                visit(FramePart::Padding(padding));
            }
            if bytes.is_empty() {
                return;
            }
            let wanted = FRAME_HEADER_BYTES + self.prefix_len();
            let mut missing = wanted.saturating_sub(self.header_len);
            let taken = take_front(&mut bytes, &mut missing);
            for (into, byte) in self.header.iter_mut().skip(self.header_len).zip(taken) {
                *into = *byte;
            }
            self.header_len += taken.len();
            let wanted = FRAME_HEADER_BYTES + self.prefix_len();
            if self.header_len == wanted {
                self.visit_header(&mut visit);
            }
        }
    }

    /// Length of the prefix, once the frame header is complete. 0 before, and for a frame that is
    /// too short for it.
    fn prefix_len(&self) -> usize {
        let [a, b, c, kind, flags, ..] = self.header;
        if self.header_len < FRAME_HEADER_BYTES || kind != HEADERS {
            return 0;
        }
        let padding = usize::from(flags & PADDED != 0);
        let prefix_len = padding + 5 * usize::from(flags & PRIORITY != 0);
        if payload_len([a, b, c]) < prefix_len {
            return 0;
        }
        prefix_len
    }

    fn visit_header(&mut self, visit: &mut impl FnMut(FramePart<'_>)) {
        let prefix_len = self.prefix_len();
        self.header_len = 0;
        let header = self.header;
        let Some((fixed, prefix)) = header.split_first_chunk::<FRAME_HEADER_BYTES>() else {
            return;
        };
        let prefix = prefix.get(..prefix_len).unwrap_or_default();
        let [a, b, c, kind, flags, ..] = *fixed;
        let rest = payload_len([a, b, c]) - prefix_len;
        let has_prefix = kind == HEADERS && flags & (PADDED | PRIORITY) != 0;
        let padding = match prefix {
            [padding, ..] if flags & PADDED != 0 => usize::from(*padding),
            _ => 0,
        };
        let is_too_short = has_prefix && prefix.is_empty() || padding > rest;
        self.remaining_padding = if is_too_short { 0 } else { padding };
        self.remaining_payload = rest - self.remaining_padding;
        visit(FramePart::Header(FrameHeader {
            fixed,
            prefix,
            block_len: self.remaining_payload,
            remaining_len: rest,
            is_too_short,
        }));
    }
}

/// Takes at most `count` bytes from the front, and reduces `count` by their number.
fn take_front<'b>(bytes: &mut &'b [u8], count: &mut usize) -> &'b [u8] {
    let (front, rest) = bytes.split_at((*count).min(bytes.len()));
    *count -= front.len();
    *bytes = rest;
    front
}

fn payload_len([a, b, c]: [u8; 3]) -> usize {
    usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c)
}
