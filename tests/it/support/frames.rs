//! HTTP/2 by hand: exactly the frames that a test wants, right or wrong (RFC 9113, RFC 7541).

use super::SOON;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::task::JoinHandle;
use tokio::time::timeout;

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

pub const PROTOCOL_ERROR: u32 = 1;
pub const FLOW_CONTROL_ERROR: u32 = 3;
pub const FRAME_SIZE_ERROR: u32 = 6;
pub const ENHANCE_YOUR_CALM: u32 = 11;

/// A request that wants nothing special.
pub const GET: [(&str, &str); 4] = [
    (":method", "GET"),
    (":scheme", "http"),
    (":authority", "a"),
    (":path", "/"),
];

/// A frame's bytes, its length as it is.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: impl AsRef<[u8]>) -> Vec<u8> {
    let payload = payload.as_ref();
    let [_, a, b, c] = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&[a, b, c, kind, flags], &stream.to_be_bytes()[..], payload].concat()
}

/// A whole request without a body.
pub fn request(stream: u32, fields: &[(&str, &str)]) -> Vec<u8> {
    frame(HEADERS, END_STREAM | END_HEADERS, stream, block(fields))
}

/// A request's head, whose body is to follow.
pub fn head(stream: u32, fields: &[(&str, &str)]) -> Vec<u8> {
    frame(HEADERS, END_HEADERS, stream, block(fields))
}

/// A GET of this path.
pub fn get(stream: u32, path: &str) -> Vec<u8> {
    request(stream, &with(":path", path))
}

/// [`GET`] with one field replaced, or added at the end.
pub fn with<'a>(name: &'a str, value: &'a str) -> Vec<(&'a str, &'a str)> {
    let mut fields: Vec<(&str, &str)> = GET.to_vec();
    match fields.iter_mut().find(|(given, _)| *given == name) {
        Some(field) => field.1 = value,
        None => fields.push((name, value)),
    }
    fields
}

/// Fields as HPACK literals, neither indexed nor compressed.
pub fn block(fields: &[(&str, &str)]) -> Vec<u8> {
    let literal = |(name, value): &(&str, &str)| [vec![0], text(name), text(value)].concat();
    fields.iter().flat_map(literal).collect()
}

/// A field that the receiver has to remember in its table.
pub fn remembered(name: &str, value: &str) -> Vec<u8> {
    [vec![0x40], text(name), text(value)].concat()
}

fn text(text: &str) -> Vec<u8> {
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
    [&bytes, text.as_bytes()].concat()
}

pub fn setting(id: u16, value: u32) -> Vec<u8> {
    [&id.to_be_bytes()[..], &value.to_be_bytes()].concat()
}

pub fn rst(stream: u32) -> Vec<u8> {
    frame(RST_STREAM, 0, stream, 8_u32.to_be_bytes())
}

pub fn window_update(stream: u32, by: u32) -> Vec<u8> {
    frame(WINDOW_UPDATE, 0, stream, by.to_be_bytes())
}

/// A frame as it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

impl Frame {
    /// Of RST_STREAM and GOAWAY.
    pub fn code(&self) -> Option<u32> {
        let at = match self.kind {
            RST_STREAM => 0,
            GOAWAY => 4,
            _ => return None,
        };
        Some(u32::from_be_bytes(
            self.payload.get(at..at + 4)?.try_into().unwrap(),
        ))
    }

    /// `:status`, of a response by this project's proxy: an indexed field, or a literal with an indexed name.
    pub fn status(&self) -> Option<u16> {
        // Table 7541, Appendix A; a literal's digits are Huffman codes of 5 bits for 0 to 2, 6 for the others.
        const INDEXED: [u16; 7] = [200, 204, 206, 304, 400, 404, 500];
        let first = *self.payload.iter().find(|byte| **byte & 0xe0 != 0x20)?;
        match first {
            0x88..=0x8e => Some(INDEXED[usize::from(first - 0x88)]),
            _ => None,
        }
    }
}

/// A client whose answers are read all the time, so that it never stands in its own way.
#[derive(Debug)]
pub struct Framed {
    writer: OwnedWriteHalf,
    frames: tokio::sync::mpsc::Receiver<Frame>,
    reader: JoinHandle<()>,
}

impl Framed {
    /// Preface and settings; nothing that comes back is acknowledged unless the test does it.
    pub async fn connect(address: SocketAddr, settings: &[u8]) -> Self {
        let stream = timeout(SOON, TcpStream::connect(address))
            .await
            .unwrap()
            .unwrap();
        stream.set_nodelay(true).unwrap();
        let (reader, writer) = stream.into_split();
        let (to, frames) = tokio::sync::mpsc::channel(1 << 20);
        let mut client = Self {
            writer,
            frames,
            reader: tokio::spawn(read(reader, to)),
        };
        client
            .send([PREFACE, &frame(SETTINGS, 0, 0, settings)].concat())
            .await;
        client
    }

    /// Whether the bytes could be sent: a peer that has had enough closes.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) -> bool {
        timeout(SOON, self.writer.write_all(bytes.as_ref()))
            .await
            .expect("the proxy does not read")
            .is_ok()
    }

    /// The first frame that `wanted` accepts.
    pub async fn find(&mut self, what: &str, wanted: impl Fn(&Frame) -> bool) -> Frame {
        let found = timeout(SOON, async {
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
        found
            .await
            .unwrap_or_else(|_| panic!("waited in vain for {what}"))
    }

    /// Whether the peer closes within this time, and the code of its last GOAWAY.
    pub async fn end(&mut self, within: Duration) -> (bool, Option<u32>) {
        let mut code = None;
        let closed = timeout(within, async {
            while let Some(frame) = self.frames.recv().await {
                if frame.kind == GOAWAY {
                    code = frame.code();
                }
            }
        });
        (closed.await.is_ok(), code)
    }

    /// Whether the peer has closed.
    pub fn is_closed(&self) -> bool {
        self.reader.is_finished()
    }
}

impl Drop for Framed {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

async fn read(mut from: OwnedReadHalf, to: tokio::sync::mpsc::Sender<Frame>) {
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
        // A test that does not look at them is not kept from flooding.
        drop(to.try_send(Frame {
            kind,
            flags,
            stream: u32::from_be_bytes([s, t, r, e]),
            payload,
        }));
    }
}
