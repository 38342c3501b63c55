//! Scans a client's HTTP/2 byte stream by its frames, below hyper and h2.
//!
//! Counts the costly frames, hides empty DATA frames, ends uploads of too many tiny ones, rejects a
//! first frame other than SETTINGS (RFC 9113, 3.4), which h2 accepts, and passes field blocks
//! through a [`FieldBlockFilter`]. See `docs/decisions/0083-library-guards.md`.

use smallvec::SmallVec;
use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use tokio::time::Instant;

use super::field_block_filter::{FieldBlockFilter, FieldBlockKind, INVALID_BLOCK, encode_frames};
use super::frame_limits::FrameBudget;
use super::frame_splitter::{
    CONTINUATION, DATA, END_HEADERS, END_STREAM, FRAME_HEADER_BYTES, FilterOutput, FrameHeader,
    FramePart, FrameSplitter, HEADERS, HiddenPadding, MAX_WINDOW_BYTES, push_window_update,
};
use super::hpack::InvalidFieldBlock;

const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PUSH_PROMISE: u8 = 5;
const GOAWAY: u8 = 7;

const ACK: u8 = 1;

/// Payload below which a DATA frame spends credit, that of its upload. gRPC messages and WebSocket
/// frames are larger.
const MIN_DATA_BYTES: usize = 5;

/// Bytes of a field list for which it spends one credit: a byte of a block can stand for 4 KiB.
const LIST_BYTES_PER_CREDIT: usize = 4096;

/// Length of one setting: identifier and value (RFC 9113, 6.5.1).
const SETTING_BYTES: usize = 6;
/// Identifier of SETTINGS_HEADER_TABLE_SIZE.
const HEADER_TABLE_SIZE: [u8; 2] = [0, 1];

/// Maximum memory that is reserved for a frame before it arrives.
const MAX_RESERVED_BYTES: usize = 16 * 1024;

/// Maximum bytes that replace those of one read. A byte of a field block can stand for 4 KiB, which
/// h2 shares between fields.
const MAX_REPLACEMENT_BYTES: usize = 1024 * 1024;

/// Kind of the error for a frame that must not be passed on.
pub(crate) const INVALID_FRAME: io::ErrorKind = io::ErrorKind::InvalidData;

/// Maximum streams whose trailers are recognized: those with the newest request heads.
const MAX_OPEN_UPLOADS: usize = 256;

/// State of the scan between two reads.
#[derive(Debug, Default)]
pub(crate) struct FrameScanner {
    splitter: FrameSplitter,
    pub(crate) hidden_padding: HiddenPadding,
    /// Whether the first frame has arrived.
    has_started: bool,
    /// Highest stream with a request head.
    last_stream: u32,
    /// Request bodies that the client has not ended. HEADERS of such a stream are trailers.
    open_uploads: VecDeque<OpenUpload>,
    /// Type of the last frame.
    frame_type: u8,
    /// Setting of which a part was received.
    setting: SmallVec<[u8; SETTING_BYTES]>,
    filter: FieldBlockFilter,
    /// Whether a field block was passed on without a check.
    is_filter_disabled: bool,
    /// Field block that is not complete. h2 has seen no part of it.
    block: Option<Box<FieldBlock>>,
    /// Whether the last field block is trailers.
    is_trailer_block: bool,
}

/// A request body that the client has not ended.
#[derive(Debug)]
struct OpenUpload {
    stream: u32,
    /// Credit for tiny DATA frames, set with the first one.
    budget: Option<Box<FrameBudget>>,
}

/// Frames of a field block.
#[derive(Debug, Default)]
struct FieldBlock {
    kind: FieldBlockKind,
    stream: u32,
    ends_stream: bool,
    /// Whether h2 resets the stream without decoding the block.
    depends_on_itself: bool,
    /// Whether the last frame so far has END_HEADERS.
    has_last_frame: bool,
    /// The frames as received.
    frames: Vec<u8>,
    /// Position in `frames` of the last frame's payload, without prefix and padding.
    last_payload: Range<usize>,
    /// The payloads before it.
    payload: Vec<u8>,
}

impl FieldBlock {
    fn begin_frame(&mut self, header: FrameHeader<'_>) {
        self.has_last_frame = header.flags & END_HEADERS != 0;
        if !self.frames.is_empty() {
            self.join_payloads();
        }
        self.frames
            .reserve(FRAME_HEADER_BYTES + header.remaining_len.min(MAX_RESERVED_BYTES));
        self.frames.extend_from_slice(header.fixed);
        self.frames.extend_from_slice(header.prefix);
        self.last_payload = self.frames.len()..self.frames.len() + header.block_len;
    }

    fn join_payloads(&mut self) {
        let last = self.frames.get(self.last_payload.clone());
        self.payload.extend_from_slice(last.unwrap_or_default());
    }

    /// The field block, if all frames are complete.
    fn complete_payload(&mut self) -> &[u8] {
        if self.payload.is_empty() {
            let payload = self.frames.get(self.last_payload.clone());
            return payload.unwrap_or_default();
        }
        self.join_payloads();
        &self.payload
    }
}

/// Result of scanning the bytes of one read.
#[derive(Debug, Default)]
pub(crate) struct FrameScan {
    /// Number of costly frames whose header ends in these bytes.
    pub(crate) costly_frames: u32,
    /// Number of tiny DATA frames beyond the credit of their upload, or of no upload.
    pub(crate) excess_data_frames: u32,
    /// Number of costly frames for which h2 visits every open stream.
    pub(crate) connection_wide_frames: u32,
    /// Number of HEADERS frames whose header ends in these bytes, and bytes of field blocks.
    pub(crate) heads: u32,
    pub(crate) head_bytes: usize,
    /// Number of trailer blocks that begin in these bytes, and the size of these blocks and of
    /// their replacements.
    pub(crate) trailers: usize,
    pub(crate) trailer_bytes: usize,
    /// Number of DATA frames that the peer sent: those whose frame header ends in these bytes, and
    /// bytes of their data.
    pub(crate) data_frames: usize,
    pub(crate) data_bytes: usize,
    /// Size of the largest field list among these bytes, decoded.
    pub(crate) list_bytes: usize,
    /// Whether the bytes so far end within a field block: the head or the trailers of a request.
    pub(crate) is_within_field_block: bool,
    /// Bytes of the last field block among these bytes, if they end within it.
    pub(crate) field_block_bytes: usize,
    /// Whether a frame follows that ends an earlier field block.
    pub(crate) ends_field_block: bool,
    /// Whether other bytes replace the scanned ones.
    pub(crate) is_rewritten: bool,
    /// Whether a head ends with a mark.
    pub(crate) has_head_mark: bool,
    /// Smallest and last new size of the client's HPACK table.
    pub(crate) table_bytes: Option<(u32, u32)>,
}

impl FrameScanner {
    /// `max_head_bytes` is the limit of h2 for a list of fields.
    pub(crate) fn new(max_head_bytes: usize) -> Self {
        Self {
            filter: FieldBlockFilter::new(max_head_bytes),
            ..Self::default()
        }
    }

    /// Scans the next bytes. If other bytes must be passed on in their place, appends those to
    /// `replacement`. An incomplete frame header or field block is withheld.
    ///
    /// # Errors
    /// Returns [`INVALID_FRAME`] if the first frame is not SETTINGS, if a request follows a field
    /// block for which h2 should have closed the connection, or if field blocks grow too much.
    pub(crate) fn scan(
        &mut self,
        bytes: &[u8],
        replacement: &mut Vec<u8>,
    ) -> io::Result<FrameScan> {
        let mut splitter = self.splitter;
        let (mut scan, mut is_valid) = (FrameScan::default(), true);
        let mut output = FilterOutput {
            bytes,
            unchanged: 0,
            replacement,
            is_rewritten: splitter.header_len > 0 || self.block.is_some(),
        };
        splitter.split(bytes, |part| match part {
            FramePart::Header(header) => {
                is_valid &= match header.kind {
                    HEADERS => self.has_started && !self.is_filter_disabled,
                    kind => self.has_started || kind == SETTINGS,
                };
                self.inspect_header(header, &mut scan, &mut output);
            }
            FramePart::Content(bytes, remaining) => {
                self.inspect_content(bytes, remaining, &mut scan, &mut output);
            }
        });
        if !is_valid || output.replacement.len() > MAX_REPLACEMENT_BYTES {
            return Err(INVALID_FRAME.into());
        }
        self.splitter = splitter;
        if self.splitter.header_len > 0 || self.block.is_some() {
            output.rewrite();
        }
        scan.is_rewritten = output.is_rewritten;
        scan.is_within_field_block = self.block.is_some();
        if !scan.is_within_field_block {
            scan.field_block_bytes = 0;
        }
        Ok(scan)
    }

    /// Counts a frame, and begins or continues a field block.
    fn inspect_header(
        &mut self,
        header: FrameHeader<'_>,
        scan: &mut FrameScan,
        output: &mut FilterOutput<'_>,
    ) {
        let (kind, flags, stream) = (header.kind, header.flags, header.stream);
        scan.heads += u32::from(kind == HEADERS);
        if kind != CONTINUATION {
            scan.ends_field_block = true;
            scan.field_block_bytes = 0;
        }
        scan.field_block_bytes += FRAME_HEADER_BYTES;
        self.has_started = true;
        self.frame_type = kind;
        self.setting.clear();
        let is_tiny = kind == DATA && flags & END_STREAM == 0 && header.block_len < MIN_DATA_BYTES;
        let (is_upload, ends_upload) = if is_tiny {
            self.charge_tiny_frame(stream, scan)
        } else {
            (false, false)
        };
        let is_hidden = is_upload && header.is_empty_data() && self.block.is_none();
        let data_frames = usize::from(kind == DATA && !is_hidden);
        scan.data_frames += data_frames;
        scan.data_bytes += data_frames * header.block_len;
        // Larger DATA, HEADERS and CONTINUATION spend no credit: they belong to requests, which are
        // limited as requests or by h2.
        let cost = u32::from(!matches!(kind, DATA | HEADERS | CONTINUATION));
        scan.costly_frames = scan.costly_frames.saturating_add(cost);
        // h2 visits every open stream: SETTINGS may change all windows, GOAWAY may end streams.
        let is_connection_wide = kind == SETTINGS && flags & ACK == 0 || kind == GOAWAY;
        scan.connection_wide_frames += u32::from(is_connection_wide);
        // h2 may decode the block of a client's PUSH_PROMISE and go on.
        self.is_filter_disabled |= kind == PUSH_PROMISE;
        let block_kind = self.follow_stream(kind, flags, stream);
        if let Some(block_kind) = block_kind {
            self.is_trailer_block = block_kind == FieldBlockKind::Trailers;
            scan.trailers += usize::from(self.is_trailer_block && !header.is_too_short);
        }
        let continues = |block: &FieldBlock| kind == CONTINUATION && stream == block.stream;
        let continues_block = self.block.as_deref().is_some_and(continues);
        if !continues_block {
            // Another frame within a field block, or a frame too short for its padding, is a
            // connection error.
            if self.block.is_some() || header.is_too_short {
                self.disable_filter(output);
            }
            self.block = block_kind.filter(|_| !self.is_filter_disabled).map(|kind| {
                Box::new(FieldBlock {
                    kind,
                    stream,
                    ends_stream: flags & END_STREAM != 0,
                    depends_on_itself: header.depends_on_itself(),
                    ..FieldBlock::default()
                })
            });
        }
        if ends_upload {
            // h2 resets a stream, and not the connection, for a window beyond the maximum.
            push_window_update(stream, MAX_WINDOW_BYTES, output.rewrite());
            push_window_update(stream, MAX_WINDOW_BYTES, output.rewrite());
        }
        if let Some(block) = &mut self.block {
            block.begin_frame(header);
        } else if is_hidden {
            header.hide(&mut self.hidden_padding, output.rewrite());
        } else {
            header.pass(output);
        }
        self.end_complete_block(header.remaining_len, scan, output);
    }

    /// Counts a part of a payload, and passes it on unless it belongs to a field block.
    fn inspect_content(
        &mut self,
        bytes: &[u8],
        remaining: usize,
        scan: &mut FrameScan,
        output: &mut FilterOutput<'_>,
    ) {
        match self.frame_type {
            SETTINGS => self.inspect_settings(bytes, scan),
            HEADERS | CONTINUATION => {
                scan.field_block_bytes += bytes.len();
                scan.head_bytes += bytes.len();
                scan.trailer_bytes += bytes.len() * usize::from(self.is_trailer_block);
            }
            _ => {}
        }
        match &mut self.block {
            Some(block) => block.frames.extend_from_slice(bytes),
            None => output.pass(bytes),
        }
        self.end_complete_block(remaining, scan, output);
    }

    /// Passes on the field block if it is complete, or what replaces it.
    fn end_complete_block(
        &mut self,
        remaining: usize,
        scan: &mut FrameScan,
        output: &mut FilterOutput<'_>,
    ) {
        let Some(block) = &mut self.block else {
            return;
        };
        let filter = &mut self.filter;
        if block.frames.len() > filter.max_block_bytes() {
            scan.costly_frames = u32::MAX;
            return self.reject_block(output);
        }
        if !block.has_last_frame || remaining > 0 {
            return;
        }
        let stream = (block.stream, block.ends_stream);
        match filter.filter(block.kind, stream, block.complete_payload()) {
            Ok(None) => {
                filter.is_table_unknown |= block.depends_on_itself;
                output.pass(&block.frames);
            }
            Ok(Some(replaced)) => {
                scan.trailer_bytes += replaced.frames.len() * usize::from(self.is_trailer_block);
                output.rewrite().extend_from_slice(&replaced.frames);
                self.is_filter_disabled |= output.replacement.len() > MAX_REPLACEMENT_BYTES;
                scan.has_head_mark |= replaced.is_marked;
            }
            Err(InvalidFieldBlock) => return self.reject_block(output),
        }
        scan.list_bytes = scan.list_bytes.max(filter.last_list_bytes);
        let credit = u32::try_from(filter.last_list_bytes / LIST_BYTES_PER_CREDIT);
        scan.costly_frames = scan
            .costly_frames
            .saturating_add(credit.unwrap_or(u32::MAX));
        self.block = None;
    }

    /// Replaces the field block by one for which h2 certainly closes the connection: h2 accepts
    /// some that are not valid, such as a size update in a CONTINUATION frame.
    fn reject_block(&mut self, output: &mut FilterOutput<'_>) {
        self.is_filter_disabled = true;
        if let Some(block) = self.block.take() {
            let frames = encode_frames(block.stream, block.ends_stream, &INVALID_BLOCK);
            output.rewrite().extend_from_slice(&frames);
        }
    }

    /// Passes on a field block for which h2 closes the connection. A request that follows is an
    /// error.
    fn disable_filter(&mut self, output: &mut FilterOutput<'_>) {
        self.is_filter_disabled = true;
        if let Some(block) = self.block.take() {
            output.pass(&block.frames);
        }
    }

    /// Finds the size of the HPACK table among the settings.
    fn inspect_settings(&mut self, payload: &[u8], scan: &mut FrameScan) {
        for byte in payload {
            self.setting.push(*byte);
            if let [id_high, id_low, a, b, c, d] = *self.setting.as_slice() {
                if [id_high, id_low] == HEADER_TABLE_SIZE {
                    let bytes = u32::from_be_bytes([a, b, c, d]);
                    let known = scan.table_bytes.map_or(bytes, |(known, _)| known);
                    scan.table_bytes = Some((bytes.min(known), bytes));
                }
                self.setting.clear();
            }
        }
    }

    /// Charges a tiny DATA frame to its upload. Returns whether there is one, and whether it must
    /// be reset now.
    fn charge_tiny_frame(&mut self, stream: u32, scan: &mut FrameScan) -> (bool, bool) {
        let mut uploads = self.open_uploads.iter_mut();
        let Some(upload) = uploads.find(|upload| upload.stream == stream) else {
            scan.excess_data_frames += 1;
            return (false, false);
        };
        let new_budget = || Box::new(FrameBudget::new(Instant::now()));
        let budget = upload.budget.get_or_insert_with(new_budget);
        let was_exhausted = budget.is_exhausted.get();
        budget.charge_frames(1);
        scan.excess_data_frames += u32::from(was_exhausted);
        (true, budget.is_exhausted.get() && !was_exhausted)
    }

    /// Follows the streams with an open request body. Returns what the field block of a HEADERS
    /// frame belongs to.
    fn follow_stream(&mut self, kind: u8, flags: u8, stream: u32) -> Option<FieldBlockKind> {
        let ends_stream = flags & END_STREAM != 0;
        match kind {
            HEADERS if stream > self.last_stream => {
                self.last_stream = stream;
                self.is_trailer_block = false;
                if !ends_stream {
                    self.open_uploads.truncate(MAX_OPEN_UPLOADS - 1);
                    let budget = None;
                    self.open_uploads.push_front(OpenUpload { stream, budget });
                }
                Some(FieldBlockKind::RequestHead)
            }
            HEADERS if self.end_upload(stream) => Some(FieldBlockKind::Trailers),
            HEADERS => Some(FieldBlockKind::Other),
            _ => {
                if kind == RST_STREAM || kind == DATA && ends_stream {
                    self.end_upload(stream);
                }
                None
            }
        }
    }

    /// Returns whether the stream had an open request body.
    fn end_upload(&mut self, stream: u32) -> bool {
        let mut uploads = self.open_uploads.iter();
        let found = uploads.position(|upload| upload.stream == stream);
        found.is_some_and(|at| self.open_uploads.remove(at).is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy::http2_frames::frame_splitter::{
        EmptyFrameFilter, PADDED, PRIORITY, WINDOW_UPDATE, return_window,
    };

    /// Type of a frame that h2 does not see.
    const HIDDEN: u8 = 0xff;

    fn build_frame(kind: u8, flags: u8, stream: u8, payload: usize) -> Vec<u8> {
        let [.., a, b, c] = u32::try_from(payload).unwrap().to_be_bytes();
        [
            vec![a, b, c, kind, flags, 0, 0, 0, stream],
            vec![0xff; payload],
        ]
        .concat()
    }

    /// A valid request head of this many bytes.
    fn request_block(bytes: u8) -> Vec<u8> {
        let value = vec![b'v'; usize::from(bytes) - 7];
        [b"\x82\x86\x84\0\x01x", &[bytes - 7][..], &value].concat()
    }

    /// Frames of a request head, divided at this position.
    fn head_frames(flags: u8, stream: u8, bytes: u8, at: usize) -> [Vec<u8>; 2] {
        let block = request_block(bytes);
        let (front, back) = block.split_at(at);
        [(HEADERS, flags, front), (CONTINUATION, END_HEADERS, back)].map(|(kind, flags, part)| {
            let mut frame = build_frame(kind, flags, stream, part.len());
            frame.splice(FRAME_HEADER_BYTES.., part.iter().copied());
            frame
        })
    }

    /// Returns the costly frames and the bytes passed on.
    fn scan_in_steps(bytes: &[u8], step: usize) -> (u32, Vec<u8>) {
        let (mut scanner, mut costly_frames, mut passed) = (FrameScanner::new(16_384), 0, vec![]);
        for part in bytes.chunks(step.min(bytes.len())) {
            let scan = scanner.scan(part, &mut passed).unwrap();
            costly_frames += scan.costly_frames;
            if !scan.is_rewritten {
                passed.extend_from_slice(part);
            }
        }
        let splitter = scanner.splitter;
        assert_eq!((splitter.header_len, splitter.remaining), (0, 0));
        (costly_frames, passed)
    }

    #[test]
    fn frames_are_counted_and_passed_on_however_the_bytes_are_split() {
        let kinds = [
            (SETTINGS, 18),
            (HEADERS, 300),
            (CONTINUATION, 0),
            (DATA, 70_000),
            (6, 8),
            (8, 4),
            (DATA, 0),
            (3, 4),
            (200, 17),
        ];
        let frames: Vec<u8> = kinds
            .into_iter()
            .flat_map(|(kind, len)| build_frame(kind, 0, 1, len))
            .collect();
        let find = |frame: Vec<u8>| frames.windows(9).position(|part| part == frame).unwrap();
        let mut expected = frames.clone();
        expected[find(build_frame(DATA, 0, 1, 0)) + 3] = HIDDEN;
        let continuation = find(build_frame(CONTINUATION, 0, 1, 0));
        let mut expected_of_filter = expected.clone();
        expected_of_filter.drain(continuation..continuation + 9);
        for step in [1, 2, 3, 8, 9, 10, 1000, usize::MAX] {
            let (costly_frames, passed) = scan_in_steps(&frames, step);
            assert_eq!(costly_frames, 5, "{step}: 4, 6, 8, 3 and 200");
            assert!(passed == expected, "in steps of {step}");
            let (mut filter, mut filtered) = (EmptyFrameFilter::default(), vec![]);
            for part in frames.chunks(step.min(frames.len())) {
                if !filter.filter(part, &mut filtered) {
                    filtered.extend_from_slice(part);
                }
            }
            assert!(filtered == expected_of_filter, "in steps of {step}");
        }
    }

    #[test]
    fn padding_of_hidden_frames_is_returned() {
        let padded = |flags, data: &[u8], padding: u8| {
            let payload = [&[padding][..], data, &vec![0; usize::from(padding)]].concat();
            let mut frame = build_frame(DATA, flags | PADDED, 1, payload.len());
            frame.splice(FRAME_HEADER_BYTES.., payload);
            frame
        };
        let [head, end] = head_frames(0, 1, 35, 30);
        let opening = [build_frame(SETTINGS, 0, 0, 6), head, end].concat();
        let frames = [padded(0, b"", 5), padded(0, b"", 0), padded(0, b"x", 7)];
        let (too_short, last) = (build_frame(DATA, PADDED, 1, 0), padded(END_STREAM, b"", 3));
        let [mut hidden, mut hidden_1, data] = frames.clone();
        (hidden[3], hidden_1[3]) = (HIDDEN, HIDDEN);
        let input = [&opening[..], &frames.concat(), &last, &too_short].concat();
        let expected = [&opening[..], &hidden, &hidden_1, &data, &last, &too_short].concat();
        let updates = |stream| [0, 0, 4, WINDOW_UPDATE, 0, 0, 0, 0, stream, 0, 0, 0, 7];
        for step in [1, 3, 9, 10, 11, usize::MAX] {
            let (mut scanner, mut filter) =
                (FrameScanner::new(16_384), EmptyFrameFilter::default());
            let (mut passed, mut filtered) = (Vec::new(), Vec::new());
            for part in input.chunks(step.min(input.len())) {
                if !scanner.scan(part, &mut passed).unwrap().is_rewritten {
                    passed.extend_from_slice(part);
                }
                if !filter.filter(part, &mut filtered) {
                    filtered.extend_from_slice(part);
                }
            }
            assert!(passed == expected && filtered == expected, "{step}");
            for padding in [&mut scanner.hidden_padding, &mut filter.hidden_padding] {
                let mut returned = Vec::new();
                return_window(padding, &mut returned);
                return_window(padding, &mut returned);
                assert_eq!(returned, [updates(1), updates(0)].concat());
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_upload_of_too_many_tiny_frames_is_reset_once() {
        let [head, end] = head_frames(0, 1, 35, 30);
        let opening = [build_frame(SETTINGS, 0, 0, 6), head, end].concat();
        let (tiny, empty) = (build_frame(DATA, 0, 1, 4), build_frame(DATA, 0, 1, 0));
        let frames = [&opening[..], &[&tiny[..], &empty].concat().repeat(6_000)].concat();
        let mut hidden = empty;
        hidden[3] = HIDDEN;
        let pair = [tiny, hidden].concat();
        let (within_credit, beyond) = (pair.repeat(5_000), pair.repeat(1_000));
        let mut overflow = Vec::new();
        push_window_update(1, MAX_WINDOW_BYTES, &mut overflow);
        let expected = [opening, within_credit, overflow.repeat(2), beyond].concat();
        for step in [7, 1000, usize::MAX] {
            assert!(scan_in_steps(&frames, step).1 == expected, "{step}");
        }
    }

    #[test]
    fn a_field_block_ends_with_the_payload_that_has_end_headers() {
        let [head, end] = head_frames(0, 1, 35, 30);
        let [_, next] = head_frames(0, 3, 10, 0);
        let next = [&next[..3], &[HEADERS, END_HEADERS | END_STREAM], &next[5..]].concat();
        let steps = [
            (build_frame(SETTINGS, 0, 0, 6), false),
            (head, true),
            (build_frame(CONTINUATION, 0, 1, 0), true),
            (end, false),
            (build_frame(DATA, 0, 1, 9), false),
            (next, false),
        ];
        let mut scanner = FrameScanner::new(16_384);
        for (frame, is_within_at_end) in steps {
            let (last, rest) = frame.split_last().unwrap();
            scanner.scan(rest, &mut vec![]).unwrap();
            let is_block = matches!(frame[3], HEADERS | CONTINUATION);
            assert!(frame.len() == FRAME_HEADER_BYTES || scanner.block.is_some() == is_block);
            scanner.scan(&[*last], &mut vec![]).unwrap();
            assert_eq!(scanner.block.is_some(), is_within_at_end);
        }
    }

    #[test]
    fn only_bytes_of_the_unfinished_field_block_are_counted() {
        let mut scanner = FrameScanner::new(16_384);
        let mut scan = |bytes: &[u8]| {
            let scan = scanner.scan(bytes, &mut vec![]).unwrap();
            (scan.field_block_bytes, scan.ends_field_block)
        };
        let settings = build_frame(SETTINGS, 0, 0, 0);
        let data = build_frame(DATA, 0, 1, 5_000);
        let [head, end] = head_frames(0, 3, 130, 100);
        assert_eq!(scan(&[settings, data, head].concat()), (109, true));
        assert_eq!(scan(&end[..30]), (30, false));
        let [next, end_of_next] = head_frames(0, 5, 30, 20);
        assert_eq!(scan(&[&end[30..], &next].concat()), (29, true));
        assert_eq!(scan(&end_of_next), (0, false));
    }

    #[test]
    fn complete_heads_are_passed_on_unchanged_and_trailers_are_checked() {
        let frame = |kind, flags, payload: &[u8]| {
            let mut frame = build_frame(kind, flags, 1, payload.len());
            frame.splice(FRAME_HEADER_BYTES.., payload.iter().copied());
            frame
        };
        let (ends, field) = (END_HEADERS | END_STREAM, b"\0\x01x\x01y");
        let settings = build_frame(SETTINGS, 0, 0, 0);
        let head = [b"\x02\0\0\0\0\x09".as_slice(), &request_block(40), b"\0\0"].concat();
        let head = frame(HEADERS, END_HEADERS | PADDED | PRIORITY, &head);
        let next = build_frame(6, 0, 0, 8);
        let malformed = frame(HEADERS, ends, b"\0\x01x\x01 ");
        let empty = frame(HEADERS, ends | PADDED | PRIORITY, &[]);
        let invalid = frame(HEADERS, ends, &INVALID_BLOCK);
        for (trailers, expected) in [
            (vec![frame(HEADERS, ends, field)], None),
            (
                vec![frame(
                    HEADERS,
                    ends | PADDED,
                    &[b"\x01", &field[..], b"\0"].concat(),
                )],
                None,
            ),
            (
                vec![
                    frame(HEADERS, END_STREAM, &field[..2]),
                    frame(CONTINUATION, 0, &[]),
                    frame(CONTINUATION, END_HEADERS, &field[2..]),
                ],
                None,
            ),
            (vec![frame(HEADERS, ends, &[0x84])], Some(&malformed)),
            (
                vec![frame(HEADERS, ends | PADDED, &[1, 0x84, 0])],
                Some(&malformed),
            ),
            // For h2 to reject: too short for its padding, and no valid HPACK.
            (vec![frame(HEADERS, ends | PADDED, &[9, 0])], None),
            (vec![empty], None),
            (vec![frame(HEADERS, ends, &[0xff])], Some(&invalid)),
            (
                vec![
                    frame(HEADERS, END_STREAM, &field[..2]),
                    frame(CONTINUATION, END_HEADERS, &[&[0x20], &field[2..]].concat()),
                ],
                Some(&invalid),
            ),
            (
                vec![frame(HEADERS, 0, field), frame(DATA, 0, b"12345")],
                None,
            ),
            (vec![frame(HEADERS, 0, field), frame(DATA, 0, b"")], None),
        ] {
            let trailers = trailers.concat();
            let input = [&settings[..], &head, &trailers, &next].concat();
            let expected = expected.unwrap_or(&trailers);
            let expected = [&settings[..], &head, expected, &next].concat();
            for step in [1, 2, 3, 8, 9, 10, 11, 50, usize::MAX] {
                assert_eq!(scan_in_steps(&input, step).1, expected, "steps of {step}");
            }
        }
    }

    /// h2 does not decode the block of a stream that depends on itself, so later blocks are encoded
    /// without the table.
    #[test]
    fn the_table_is_unknown_after_a_stream_that_depends_on_itself() {
        let frame = |flags: u8, stream: u8, payload: &[u8]| {
            let mut frame = build_frame(HEADERS, flags, stream, payload.len());
            frame.splice(FRAME_HEADER_BYTES.., payload.iter().copied());
            frame
        };
        let ends = END_HEADERS | END_STREAM;
        let head = b"\0\0\0\x01\x09\x82\x86\x84\x41\x01a\x40\x01x\x01y";
        let settings = build_frame(SETTINGS, 0, 0, 0);
        let first = [settings, frame(ends | PRIORITY, 1, head)].concat();
        let indexed = frame(ends, 3, b"\x82\x86\x84\xbf\xbe");
        let passed = scan_in_steps(&[&first[..], &indexed].concat(), usize::MAX).1;
        assert_eq!(passed[..first.len()], first);
        assert!(passed.ends_with(b"\x01x\x01y") && passed.len() > first.len() + indexed.len());
    }

    #[test]
    fn a_request_after_an_unchecked_field_block_is_an_error() {
        let mut scanner = FrameScanner::new(100);
        let settings = build_frame(SETTINGS, 0, 0, 0);
        let head = build_frame(HEADERS, 0, 1, 300);
        let long = build_frame(CONTINUATION, 0, 1, 70_000);
        let ping = build_frame(6, 0, 0, 8);
        let scan = scanner.scan(&[settings, head, long, ping].concat(), &mut vec![]);
        assert_eq!(scan.unwrap().costly_frames, u32::MAX, "a flood");
        assert!(scanner.block.is_none());
        let next = build_frame(HEADERS, END_HEADERS, 3, 10);
        scanner.scan(&next, &mut vec![]).unwrap_err();
    }

    /// A small block can refer to a large field often.
    #[test]
    fn field_blocks_that_grow_too_much_are_an_error() {
        let mut scanner = FrameScanner::new(65_536);
        let frame = |stream: u32, block: &[u8]| {
            let stream = u8::try_from(stream).unwrap();
            let mut frame = build_frame(HEADERS, END_HEADERS | END_STREAM, stream, block.len());
            frame.splice(FRAME_HEADER_BYTES.., block.iter().copied());
            frame
        };
        let settings = build_frame(SETTINGS, 0, 0, 0);
        // A malformed name, and a field of 4,001 bytes for the table.
        let value = [b"\x40\x01x\x7f\xa1\x1e".to_vec(), vec![b'v'; 4000]].concat();
        let first = [b"\x82\x86\x84\0\x01X\x01y", &value[..]].concat();
        let mut replacement = Vec::new();
        scanner
            .scan(&[settings, frame(1, &first)].concat(), &mut replacement)
            .unwrap();
        let block = [&b"\x82\x86\x84"[..], &[0xbe; 16]].concat();
        let many: Vec<u8> = (1..120).flat_map(|n| frame(2 * n + 1, &block)).collect();
        let mut replacement = Vec::new();
        scanner.scan(&many[..16 * 28], &mut replacement).unwrap();
        assert!(replacement.len() > 15 * 60_000, "{}", replacement.len());
        let mut replacement = Vec::new();
        scanner
            .scan(&many[16 * 28..], &mut replacement)
            .unwrap_err();
        assert!(replacement.len() < MAX_REPLACEMENT_BYTES + 70_000);
    }

    #[test]
    fn the_first_frame_must_be_settings() {
        for (kind, is_valid) in [(SETTINGS, true), (HEADERS, false), (6, false)] {
            let scan = FrameScanner::new(16_384).scan(&build_frame(kind, 0, 0, 8), &mut vec![]);
            assert_eq!(scan.is_ok(), is_valid, "{kind}");
        }
    }
}
