//! Splits an HTTP/2 byte stream into frames (RFC 9113, 4.1).

use std::collections::BTreeMap;

/// Length of a frame header: length, type, flags and stream.
pub(crate) const FRAME_HEADER_BYTES: usize = 9;

/// Maximum length of the fields between the header of a frame and its content: padding length of
/// DATA and HEADERS, and priority of HEADERS (RFC 9113, 6.2).
const MAX_PREFIX_BYTES: usize = 6;

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const WINDOW_UPDATE: u8 = 8;
pub(crate) const CONTINUATION: u8 = 9;
/// An unassigned frame type. h2 ignores frames of unknown types (RFC 9113, 4.1).
const UNASSIGNED: u8 = 0xff;

/// Maximum of any window (RFC 9113, 6.9.1).
pub(crate) const MAX_WINDOW_BYTES: u32 = u32::MAX >> 1;

pub(crate) const END_STREAM: u8 = 1;
pub(crate) const END_HEADERS: u8 = 4;
pub(crate) const PADDED: u8 = 8;
pub(crate) const PRIORITY: u8 = 32;

/// Splits a byte stream into frame headers and contents.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct FrameSplitter {
    /// Frame header with its prefix.
    header: [u8; FRAME_HEADER_BYTES + MAX_PREFIX_BYTES],
    /// Received bytes of `header`. These bytes are not passed on yet.
    pub(crate) header_len: usize,
    /// Bytes of the content still to be received.
    pub(super) remaining: usize,
}

/// Hides empty DATA frames that end no stream, and drops empty CONTINUATION frames that do not end
/// a field block. h2 closes a connection after 100 such DATA frames in its lifetime, or after a few
/// such CONTINUATION frames in one block.
#[derive(Debug, Default)]
pub(crate) struct EmptyFrameFilter {
    splitter: FrameSplitter,
    pub(crate) hidden_padding: HiddenPadding,
}

/// Bytes of flow-control window that hidden DATA frames took, by stream. h2 does not know of them.
pub(crate) type HiddenPadding = BTreeMap<u32, usize>;

/// Output of the filter for one read: a prefix of the read bytes, and a replacement from the first
/// changed byte on.
pub(crate) struct FilterOutput<'a> {
    pub(crate) bytes: &'a [u8],
    /// Number of `bytes` passed on unchanged so far.
    pub(crate) unchanged: usize,
    /// The whole output once a byte differs from the input.
    pub(crate) replacement: &'a mut Vec<u8>,
    pub(crate) is_rewritten: bool,
}

/// A part of the byte stream.
pub(crate) enum FramePart<'a> {
    Header(FrameHeader<'a>),
    /// Bytes of the payload behind the prefix, with padding, and the number of those that follow.
    Content(&'a [u8], usize),
}

/// Header of one frame.
#[derive(Clone, Copy)]
pub(crate) struct FrameHeader<'a> {
    pub(crate) fixed: &'a [u8; FRAME_HEADER_BYTES],
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
    /// Padding length of a DATA or HEADERS frame, and priority of a HEADERS frame. Empty if the
    /// frame is too short for them.
    pub(crate) prefix: &'a [u8],
    /// Bytes of the payload without prefix and padding.
    pub(crate) block_len: usize,
    /// Bytes of the payload without prefix.
    pub(crate) remaining_len: usize,
    /// Whether the payload is too short for prefix and padding.
    pub(crate) is_too_short: bool,
}

impl EmptyFrameFilter {
    /// Returns whether other bytes, which are appended to `replacement`, replace the next bytes. A
    /// frame header that is incomplete so far is withheld.
    pub(crate) fn filter(&mut self, bytes: &[u8], replacement: &mut Vec<u8>) -> bool {
        let mut output = FilterOutput {
            bytes,
            unchanged: 0,
            replacement,
            is_rewritten: self.splitter.header_len > 0,
        };
        self.splitter.split(bytes, |part| match part {
            FramePart::Content(bytes, _) => output.pass(bytes),
            FramePart::Header(header) if header.is_empty_continuation() => _ = output.rewrite(),
            FramePart::Header(header) if header.is_empty_data() => {
                header.hide(&mut self.hidden_padding, output.rewrite());
            }
            FramePart::Header(header) => header.pass(&mut output),
        });
        if self.splitter.header_len > 0 {
            output.rewrite();
        }
        output.is_rewritten
    }
}

impl FilterOutput<'_> {
    /// Passes on these next bytes of the read, or of earlier reads if a difference was recorded.
    pub(crate) fn pass(&mut self, bytes: &[u8]) {
        if self.is_rewritten {
            self.replacement.extend_from_slice(bytes);
        } else {
            self.unchanged += bytes.len();
        }
    }

    /// Records that the output differs from here on.
    pub(crate) fn rewrite(&mut self) -> &mut Vec<u8> {
        if !std::mem::replace(&mut self.is_rewritten, true) {
            let unchanged = self.bytes.get(..self.unchanged).unwrap_or_default();
            self.replacement.extend_from_slice(unchanged);
        }
        self.replacement
    }
}

impl FrameHeader<'_> {
    /// Whether this is a DATA frame without data, apart from padding, that does not end its stream.
    pub(crate) fn is_empty_data(&self) -> bool {
        let is_empty = self.block_len == 0 && !self.is_too_short;
        self.kind == DATA && self.flags & END_STREAM == 0 && is_empty
    }

    /// Whether this is an empty CONTINUATION frame that does not end its field block.
    fn is_empty_continuation(&self) -> bool {
        self.kind == CONTINUATION && self.flags & END_HEADERS == 0 && self.remaining_len == 0
    }

    /// Whether a HEADERS frame has a priority that depends on its own stream (RFC 7540, 5.3.1).
    pub(crate) fn depends_on_itself(&self) -> bool {
        match *self.prefix {
            [.., a, b, c, d, _weight] => {
                u32::from_be_bytes([a, b, c, d]) & (u32::MAX >> 1) == self.stream
            }
            _ => false,
        }
    }

    /// Appends the frame header with a type that h2 ignores.
    pub(crate) fn hide(&self, padding: &mut HiddenPadding, output: &mut Vec<u8>) {
        let mut fixed = *self.fixed;
        fixed[3] = UNASSIGNED;
        output.extend_from_slice(&fixed);
        output.extend_from_slice(self.prefix);
        let hidden = self.prefix.len() + self.remaining_len;
        if hidden > 0 {
            *padding.entry(self.stream).or_default() += hidden;
        }
    }

    pub(crate) fn pass(&self, output: &mut FilterOutput<'_>) {
        output.pass(self.fixed);
        output.pass(self.prefix);
    }
}

impl FrameSplitter {
    /// Splits the next bytes into complete frame headers and parts of contents.
    pub(crate) fn split(&mut self, mut bytes: &[u8], mut visit: impl FnMut(FramePart<'_>)) {
        loop {
            let content = take_front(&mut bytes, &mut self.remaining);
            if !content.is_empty() {
                visit(FramePart::Content(content, self.remaining));
            }
            if bytes.is_empty() {
                return;
            }
            let wanted = FRAME_HEADER_BYTES + self.prefix_len().unwrap_or(0);
            let mut missing = wanted.saturating_sub(self.header_len);
            let taken = take_front(&mut bytes, &mut missing);
            for (into, byte) in self.header.iter_mut().skip(self.header_len).zip(taken) {
                *into = *byte;
            }
            self.header_len += taken.len();
            if self.header_len == FRAME_HEADER_BYTES + self.prefix_len().unwrap_or(0) {
                self.visit_header(&mut visit);
            }
        }
    }

    /// Length of the prefix, once the frame header is complete, and 0 before. `None` for a frame
    /// that is too short for it.
    fn prefix_len(&self) -> Option<usize> {
        let [a, b, c, kind, flags, ..] = self.header;
        let padding = usize::from(flags & PADDED != 0);
        let prefix_len = match kind {
            _ if self.header_len < FRAME_HEADER_BYTES => 0,
            DATA => padding,
            HEADERS => padding + 5 * usize::from(flags & PRIORITY != 0),
            _ => 0,
        };
        (prefix_len <= payload_len([a, b, c])).then_some(prefix_len)
    }

    fn visit_header(&mut self, visit: &mut impl FnMut(FramePart<'_>)) {
        let known_prefix_len = self.prefix_len();
        let prefix_len = known_prefix_len.unwrap_or(0);
        self.header_len = 0;
        let header = self.header;
        let Some((fixed, prefix)) = header.split_first_chunk::<FRAME_HEADER_BYTES>() else {
            return;
        };
        let prefix = prefix.get(..prefix_len).unwrap_or_default();
        let [a, b, c, kind, flags, stream @ ..] = *fixed;
        let rest = payload_len([a, b, c]) - prefix_len;
        let padding = match prefix {
            [padding, ..] if flags & PADDED != 0 => usize::from(*padding),
            _ => 0,
        };
        let is_too_short = known_prefix_len.is_none() || padding > rest;
        self.remaining = rest;
        visit(FramePart::Header(FrameHeader {
            fixed,
            kind,
            flags,
            stream: u32::from_be_bytes(stream) & (u32::MAX >> 1),
            prefix,
            block_len: if is_too_short { rest } else { rest - padding },
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

/// Appends frames that return the window of hidden frames to the peer. They may be written between
/// two frames of h2. While earlier output waits for a peer that does not read, the window adds up
/// instead.
pub(crate) fn return_window(padding: &mut HiddenPadding, output: &mut Vec<u8>) {
    if padding.is_empty() || !output.is_empty() {
        return;
    }
    for (stream, bytes) in std::mem::take(padding) {
        let bytes = u32::try_from(bytes).unwrap_or(MAX_WINDOW_BYTES);
        if bytes > 0 {
            push_window_update(stream, bytes, output);
            push_window_update(0, bytes, output);
        }
    }
}

/// Appends a WINDOW_UPDATE frame.
pub(crate) fn push_window_update(stream: u32, bytes: u32, output: &mut Vec<u8>) {
    output.extend_from_slice(&[0, 0, 4, WINDOW_UPDATE, 0]);
    output.extend_from_slice(&stream.to_be_bytes());
    output.extend_from_slice(&bytes.min(MAX_WINDOW_BYTES).to_be_bytes());
}

fn payload_len([a, b, c]: [u8; 3]) -> usize {
    usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c)
}
