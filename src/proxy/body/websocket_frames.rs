//! Frame boundaries of a WebSocket byte stream (RFC 6455, 5.2).

/// Close frame with status 1001, "going away" (RFC 6455, 7.4.1), from a server.
pub(crate) const CLOSE_TO_CLIENT: &[u8] = &[0x88, 2, 0x03, 0xe9];

/// The same from a client. The masking key is zero: no application chooses these bytes.
pub(crate) const CLOSE_TO_UPSTREAM: &[u8] = &[0x88, 0x82, 0, 0, 0, 0, 0x03, 0xe9];

/// Opcode of a Close frame.
const CLOSE: u8 = 8;

/// Position within the frames of one direction.
#[derive(Clone, Debug, Default)]
pub(crate) struct WebSocketFrames {
    /// Opcode, length and extended length of the current frame.
    header: [u8; 10],
    /// Received bytes of `header`.
    header_len: usize,
    /// Bytes of masking key and payload still to come.
    remaining: u64,
    pub(crate) has_close: bool,
}

impl WebSocketFrames {
    /// Whether the bytes so far end with a complete frame.
    pub(crate) fn is_at_boundary(&self) -> bool {
        self.header_len == 0 && self.remaining == 0
    }

    /// Passes over the next bytes.
    pub(crate) fn advance(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let passed = self.advance_to_boundary(bytes);
            bytes = bytes.get(passed..).unwrap_or_default();
        }
    }

    /// Passes over the next bytes up to the end of a frame. Returns their number.
    pub(crate) fn advance_to_boundary(&mut self, bytes: &[u8]) -> usize {
        let mut rest = bytes;
        while let [next, tail @ ..] = rest {
            if self.remaining > 0 {
                let missing = usize::try_from(self.remaining).unwrap_or(usize::MAX);
                let (skipped, tail) = rest.split_at(missing.min(rest.len()));
                self.remaining -= u64::try_from(skipped.len()).unwrap_or(self.remaining);
                rest = tail;
            } else {
                if let Some(byte) = self.header.get_mut(self.header_len) {
                    *byte = *next;
                }
                self.header_len += 1;
                rest = tail;
                self.parse_complete_header();
            }
            if self.is_at_boundary() {
                break;
            }
        }
        bytes.len() - rest.len()
    }

    fn parse_complete_header(&mut self) {
        let [first, second, extended @ ..] = self.header;
        let short = second & 0x7f;
        let wanted = match short {
            _ if self.header_len < 2 => return,
            126 => 4,
            127 => 10,
            _ => 2,
        };
        if self.header_len < wanted {
            return;
        }
        let payload = match short {
            126 => u64::from_be_bytes(extended) >> 48,
            127 => u64::from_be_bytes(extended),
            short => u64::from(short),
        };
        let masking_key = if second & 0x80 > 0 { 4 } else { 0 };
        self.remaining = payload.saturating_add(masking_key);
        self.has_close |= first & 0x0f == CLOSE;
        self.header_len = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode_frame(opcode: u8, mask: bool, payload: usize) -> Vec<u8> {
        let mask_bit = u8::from(mask) << 7;
        let length = match payload {
            0..126 => vec![mask_bit | u8::try_from(payload).unwrap()],
            126..0x1_0000 => {
                let length = u16::try_from(payload).unwrap();
                [&[mask_bit | 126][..], &length.to_be_bytes()].concat()
            }
            _ => [&[mask_bit | 127][..], &payload.to_be_bytes()].concat(),
        };
        let rest = vec![0xff; payload + 4 * usize::from(mask)];
        [vec![0x80 | opcode], length, rest].concat()
    }

    #[test]
    fn boundaries_are_found_however_the_bytes_are_split() {
        let lengths = [0, 1, 125, 126, 127, 128, 65_535, 65_536, 70_000, 0];
        for mask in [false, true] {
            let frames = lengths.map(|length| encode_frame(2, mask, length));
            let stream = frames.concat();
            for step in [1, 2, 3, 7, 1000, usize::MAX] {
                let (mut position, mut ends, mut at) = (WebSocketFrames::default(), vec![], 0);
                for part in stream.chunks(step.min(stream.len())) {
                    let mut part = part;
                    while !part.is_empty() {
                        let passed = position.advance_to_boundary(part);
                        at += passed;
                        part = &part[passed..];
                        if position.is_at_boundary() {
                            ends.push(at);
                        }
                    }
                }
                let mut end = 0;
                let expected = frames.each_ref().map(|frame| {
                    end += frame.len();
                    end
                });
                assert_eq!(ends, expected, "{mask}, steps of {step}");
                assert!(!position.has_close);
            }
        }
    }

    #[test]
    fn close_frames_are_recognized() {
        for close in [CLOSE_TO_CLIENT, CLOSE_TO_UPSTREAM] {
            let mut position = WebSocketFrames::default();
            position.advance(&encode_frame(1, true, 300));
            assert!(position.is_at_boundary() && !position.has_close);
            position.advance(&close[..3]);
            assert!(!position.is_at_boundary());
            position.advance(&close[3..]);
            assert!(position.is_at_boundary() && position.has_close);
        }
    }
}
