//! Hand-written HTTP/2: exactly the frames that a test needs, valid or not (RFC 9113, RFC 7541).

use super::prelude::*;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const PRIORITY: u8 = 2;
pub const RST_STREAM: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PUSH_PROMISE: u8 = 5;
pub const PING: u8 = 6;
pub const GOAWAY: u8 = 7;
pub const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;

pub const ACK: u8 = 1;
pub const END_STREAM: u8 = 1;
pub const END_HEADERS: u8 = 4;
pub const PADDED: u8 = 8;
pub const PRIORITY_FLAG: u8 = 32;

pub const PROTOCOL_ERROR: u32 = 1;
pub const FLOW_CONTROL_ERROR: u32 = 3;
pub const FRAME_SIZE_ERROR: u32 = 6;
pub const ENHANCE_YOUR_CALM: u32 = 11;

/// The fields of a minimal request.
pub const GET_FIELDS: [(&str, &str); 4] = request_fields("GET", "/");

/// Encodes a frame with its correct length.
pub fn encode_frame(kind: u8, flags: u8, stream: u32, payload: impl AsRef<[u8]>) -> Vec<u8> {
    let payload = payload.as_ref();
    let [_, a, b, c] = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&[a, b, c, kind, flags], &stream.to_be_bytes()[..], payload].concat()
}

pub fn data_frame(stream: u32, payload: impl AsRef<[u8]>) -> Vec<u8> {
    encode_frame(DATA, 0, stream, payload)
}

/// A DATA frame that ends its stream.
pub fn last_data_frame(stream: u32, payload: impl AsRef<[u8]>) -> Vec<u8> {
    encode_frame(DATA, END_STREAM, stream, payload)
}

/// A complete header block.
pub fn headers_frame(flags: u8, stream: u32, payload: impl AsRef<[u8]>) -> Vec<u8> {
    encode_frame(HEADERS, flags | END_HEADERS, stream, payload)
}

/// SETTINGS with one setting.
pub fn setting_frame(id: u16, value: u32) -> Vec<u8> {
    encode_frame(SETTINGS, 0, 0, encode_setting(id, value))
}

pub fn settings_ack() -> Vec<u8> {
    encode_frame(SETTINGS, ACK, 0, "")
}

/// The pseudo-fields of a request.
pub const fn request_fields<'a>(method: &'a str, path: &'a str) -> [(&'a str, &'a str); 4] {
    [
        (":method", method),
        (":scheme", "http"),
        (":authority", "a"),
        (":path", path),
    ]
}

/// A complete request without a body.
pub fn request_frame<V: AsRef<[u8]>>(stream: u32, fields: &[(&str, V)]) -> Vec<u8> {
    encode_frame(
        HEADERS,
        END_STREAM | END_HEADERS,
        stream,
        encode_header_block(fields),
    )
}

/// A request head that is followed by a body.
pub fn request_head_frame(stream: u32, fields: &[(&str, &str)]) -> Vec<u8> {
    encode_frame(HEADERS, END_HEADERS, stream, encode_header_block(fields))
}

/// A GET of this path.
pub fn get_frame(stream: u32, path: &str) -> Vec<u8> {
    request_frame(stream, &get_fields_with(":path", path))
}

/// [`GET_FIELDS`] with one field replaced, or added at the end.
pub fn get_fields_with<'a>(name: &'a str, value: &'a str) -> Vec<(&'a str, &'a str)> {
    let mut fields: Vec<(&str, &str)> = GET_FIELDS.to_vec();
    match fields.iter_mut().find(|(given, _)| *given == name) {
        Some(field) => field.1 = value,
        None => fields.push((name, value)),
    }
    fields
}

/// Encodes fields as HPACK literals, neither indexed nor compressed.
pub fn encode_header_block<V: AsRef<[u8]>>(fields: &[(&str, V)]) -> Vec<u8> {
    let literal =
        |(name, value): &(&str, V)| [vec![0], encode_string(name), encode_string(value)].concat();
    fields.iter().flat_map(literal).collect()
}

/// Encodes a field that the receiver adds to its dynamic table.
pub fn encode_indexed_literal(name: &str, value: &str) -> Vec<u8> {
    [vec![0x40], encode_string(name), encode_string(value)].concat()
}

fn encode_string(text: impl AsRef<[u8]>) -> Vec<u8> {
    let text = text.as_ref();
    let mut bytes = Vec::new();
    match text.len() {
        len @ ..127 => bytes.push(len as u8),
        mut len => {
            bytes.push(127);
            len -= 127;
            while len >= 128 {
                bytes.push((len % 128 + 128) as u8);
                len /= 128;
            }
            bytes.push(len as u8);
        }
    }
    [&bytes, text].concat()
}

pub fn encode_setting(id: u16, value: u32) -> Vec<u8> {
    [&id.to_be_bytes()[..], &value.to_be_bytes()].concat()
}

pub fn rst_stream_frame(stream: u32) -> Vec<u8> {
    encode_frame(RST_STREAM, 0, stream, 8_u32.to_be_bytes())
}

pub fn window_update_frame(stream: u32, by: u32) -> Vec<u8> {
    encode_frame(WINDOW_UPDATE, 0, stream, by.to_be_bytes())
}

/// A frame as received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawFrame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

impl RawFrame {
    /// The error code of RST_STREAM and GOAWAY.
    pub fn error_code(&self) -> Option<u32> {
        let at = match self.kind {
            RST_STREAM => 0,
            GOAWAY => 4,
            _ => return None,
        };
        Some(u32::from_be_bytes(
            self.payload.get(at..at + 4)?.try_into().unwrap(),
        ))
    }

    /// `:status` of a response, if it is an indexed field of HPACK's static table.
    pub fn status(&self) -> Option<u16> {
        // The static table of RFC 7541, Appendix A. Bytes 0x20 to 0x3f are table size updates.
        const INDEXED: [u16; 7] = [200, 204, 206, 304, 400, 404, 500];
        let first = *self.payload.iter().find(|byte| **byte & 0xe0 != 0x20)?;
        match first {
            0x88..=0x8e => Some(INDEXED[usize::from(first - 0x88)]),
            _ => None,
        }
    }
}

/// A client that reads responses continuously, so that flow control never blocks its own writes.
#[derive(Debug)]
pub struct FrameClient {
    writer: OwnedWriteHalf,
    frames: tokio::sync::mpsc::Receiver<RawFrame>,
    reader: JoinHandle<()>,
}

impl FrameClient {
    /// Sends the preface and SETTINGS. Nothing received is acknowledged unless the test does it.
    pub async fn connect(address: SocketAddr, settings: &[u8]) -> Self {
        let stream = timeout(TEST_TIMEOUT, TcpStream::connect(address))
            .await
            .unwrap()
            .unwrap();
        stream.set_nodelay(true).unwrap();
        let (reader, writer) = stream.into_split();
        let (to, frames) = tokio::sync::mpsc::channel(1 << 20);
        let mut client = Self {
            writer,
            frames,
            reader: tokio::spawn(read_frames(reader, to)),
        };
        client
            .send([PREFACE, &encode_frame(SETTINGS, 0, 0, settings)].concat())
            .await;
        client
    }

    /// Returns whether the bytes could be sent. The peer may have closed the connection.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        timeout(TEST_TIMEOUT, self.writer.write_all(bytes.as_ref()))
            .await
            .expect("the proxy stopped reading")
            .is_ok()
    }

    /// Returns the first frame of this kind.
    pub async fn wait_for_kind(&mut self, kind: u8) -> RawFrame {
        let what = format!("a frame of kind {kind}");
        self.wait_for_frame(&what, |frame| frame.kind == kind).await
    }

    /// Returns the first frame that `wanted` accepts.
    pub async fn wait_for_frame(
        &mut self,
        what: &str,
        wanted: impl Fn(&RawFrame) -> bool,
    ) -> RawFrame {
        let found = timeout(TEST_TIMEOUT, async {
            loop {
                let frame = self
                    .frames
                    .recv()
                    .await
                    .unwrap_or_else(|| panic!("closed before {what}"));
                if wanted(&frame) {
                    return frame;
                }
            }
        });
        found.await.unwrap_or_else(|_| panic!("no {what} in time"))
    }

    /// Returns the body of the response to the first stream, if its status is 200.
    pub async fn read_body(&mut self) -> Option<Vec<u8>> {
        let mut body = None;
        while let Ok(Some(frame)) = timeout(TEST_TIMEOUT, self.frames.recv()).await {
            match (frame.kind, frame.status()) {
                (HEADERS, Some(200)) => body = Some(Vec::new()),
                (DATA, _) => body.as_mut()?.extend(frame.payload),
                (HEADERS | RST_STREAM | GOAWAY, _) => return None,
                _ => continue,
            }
            if frame.flags & END_STREAM > 0 {
                return body;
            }
        }
        None
    }

    /// Returns whether the peer closes within this time, and the code of its last GOAWAY.
    pub async fn wait_for_close(&mut self, within: Duration) -> (bool, Option<u32>) {
        let mut code = None;
        let closed = timeout(within, async {
            while let Some(frame) = self.frames.recv().await {
                if frame.kind == GOAWAY {
                    code = frame.error_code();
                }
            }
        });
        (closed.await.is_ok(), code)
    }

    /// Whether a frame that `wanted` accepts has arrived. Drops the frames before it.
    pub fn take_frame(&mut self, wanted: impl Fn(&RawFrame) -> bool) -> bool {
        std::iter::from_fn(|| self.frames.try_recv().ok()).any(|frame| wanted(&frame))
    }

    /// Whether a frame has arrived that was not taken.
    pub fn has_frame(&self) -> bool {
        !self.frames.is_empty()
    }

    /// Whether the peer has closed.
    pub fn is_closed(&self) -> bool {
        self.reader.is_finished()
    }
}

impl Drop for FrameClient {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

async fn read_frames(mut from: OwnedReadHalf, to: tokio::sync::mpsc::Sender<RawFrame>) {
    loop {
        let mut head = [0; 9];
        if from.read_exact(&mut head).await.is_err() {
            return;
        }
        let [a, b, c, kind, flags, s, t, r, e] = head;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        if from.read_exact(&mut payload).await.is_err() {
            return;
        }
        // A test that ignores frames can still flood.
        drop(to.try_send(RawFrame {
            kind,
            flags,
            stream: u32::from_be_bytes([s, t, r, e]),
            payload,
        }));
    }
}
