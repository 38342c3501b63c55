//! Clients: exact bytes on a socket, single plain requests, and hyper's clients for HTTP/1.1 and
//! HTTP/2.

use super::prelude::*;
use http_body_util::combinators::BoxBody;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::convert::Infallible;
use std::fmt::Debug;
use std::io;
use tokio::io::{AsyncRead, AsyncWrite};

pub type ClientBody = BoxBody<Bytes, Infallible>;

/// A connection that sends exactly the bytes given by the test.
#[derive(Debug)]
pub struct RawClient {
    stream: Box<dyn ByteStream>,
    /// Bytes that were read and not yet returned.
    buffer: Vec<u8>,
}

/// A transport for bytes.
pub trait ByteStream: AsyncRead + AsyncWrite + Unpin + Send + Debug {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send + Debug> ByteStream for T {}

/// One response as received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawResponse {
    pub status: u16,
    /// In order, with lower-case names.
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// The body ended as its framing requires, not because the connection broke.
    pub complete: bool,
}

/// One request on its own connection, sent as written: nothing is normalized.
#[derive(Clone, Debug)]
pub struct ClientRequest {
    address: SocketAddr,
    method: String,
    target: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

impl RawClient {
    pub async fn connect(address: SocketAddr) -> Self {
        let stream = timeout(TEST_TIMEOUT, TcpStream::connect(address))
            .await
            .expect("connecting took too long");
        Self::from_stream(stream.unwrap_or_else(|error| panic!("{address}: {error}")))
    }

    /// Uses an existing connection, for example TLS.
    pub fn from_stream(stream: impl ByteStream + 'static) -> Self {
        Self {
            stream: Box::new(stream),
            buffer: Vec::new(),
        }
    }

    /// Connects and sends these bytes.
    pub async fn connect_and_send(address: SocketAddr, bytes: impl AsRef<[u8]>) -> Self {
        let mut client = Self::connect(address).await;
        client.send(bytes).await;
        client
    }

    /// Sends a request other than HEAD and returns the final response.
    pub async fn request(&mut self, bytes: impl AsRef<[u8]>) -> RawResponse {
        self.send(bytes).await.read_response().await
    }

    /// Sends these bytes. A closed connection is detected by the next read.
    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) -> &mut Self {
        let sent = timeout(TEST_TIMEOUT, self.stream.write_all(bytes.as_ref())).await;
        match sent.expect("the peer does not read") {
            Ok(()) => {}
            Err(error) => assert!(is_disconnect(&error), "{error}"),
        }
        self
    }

    /// Returns the final response to a request other than HEAD. Informational (1xx) responses are
    /// skipped.
    pub async fn read_response(&mut self) -> RawResponse {
        loop {
            let reply = self.read_any_response(false).await;
            if reply.status >= 200 {
                return reply;
            }
        }
    }

    /// Returns the next response, informational or final.
    pub async fn read_any_response(&mut self, to_head: bool) -> RawResponse {
        let got = timeout(TEST_TIMEOUT, self.try_read_response(to_head)).await;
        got.unwrap_or_else(|_| {
            panic!(
                "no complete response in time, received {:?}",
                self.unread_text()
            )
        })
        .unwrap_or_else(|| {
            panic!(
                "closed before the end of the response head, after {:?}",
                self.unread_text()
            )
        })
    }

    /// Returns a response, or `None` if the connection closes without one.
    pub async fn read_response_or_close(&mut self) -> Option<RawResponse> {
        let got = timeout(TEST_TIMEOUT, self.try_read_response(false)).await;
        got.unwrap_or_else(|_| {
            panic!(
                "neither a response nor a close, received {:?}",
                self.unread_text()
            )
        })
    }

    /// Reads HTTP/2 frames until one ends stream 1 (HEADERS, RST_STREAM, GOAWAY) or the peer
    /// closes. Returns `false` if neither happens.
    pub async fn waits_for_stream_1_result(&mut self) -> bool {
        let answered = timeout(TEST_TIMEOUT, async {
            loop {
                while self.buffer.len() >= 9 {
                    let size = self.buffer[..3]
                        .iter()
                        .fold(0, |size, byte| size << 8 | usize::from(*byte));
                    if self.buffer.len() < 9 + size {
                        break;
                    }
                    let frame: Vec<u8> = self.buffer.drain(..9 + size).collect();
                    if matches!((frame[3], frame[8]), (1 | 3, 1) | (7, _)) {
                        return;
                    }
                }
                if !self.fill_buffer().await {
                    return;
                }
            }
        });
        answered.await.is_ok()
    }

    /// Reads everything until the peer closes.
    pub async fn read_to_close(&mut self) -> Vec<u8> {
        let closed = timeout(TEST_TIMEOUT, async { while self.fill_buffer().await {} }).await;
        assert!(
            closed.is_ok(),
            "the peer did not close, after {:?}",
            self.unread_text()
        );
        std::mem::take(&mut self.buffer)
    }

    /// Returns the first bytes received. Returns none if the peer closes or resets.
    pub async fn read_first_bytes(&mut self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(1024);
        match timeout(TEST_TIMEOUT, self.stream.read_buf(&mut bytes))
            .await
            .expect("neither a response nor a close")
        {
            Ok(_) => bytes,
            Err(_) => Vec::new(),
        }
    }

    /// Waits until these bytes arrive, and consumes everything up to their end.
    pub async fn read_past(&mut self, wanted: &[u8]) -> Vec<u8> {
        let found = timeout(TEST_TIMEOUT, async {
            loop {
                if let Some(at) = find_bytes(&self.buffer, wanted) {
                    return self.buffer.drain(..at + wanted.len()).collect();
                }
                assert!(
                    self.fill_buffer().await,
                    "closed before {wanted:?}, after {:?}",
                    self.unread_text()
                );
            }
        });
        let found = found.await;
        found.unwrap_or_else(|_| {
            panic!(
                "no {:?} in time, received {:?}",
                String::from_utf8_lossy(wanted),
                self.unread_text()
            )
        })
    }

    /// Whether the peer closes within this time, with nothing more to read.
    pub async fn closes_within(&mut self, within: Duration) -> bool {
        self.buffer.is_empty() && timeout(within, self.fill_buffer()).await == Ok(false)
    }

    /// Whether bytes were read that no call has returned yet.
    pub fn has_buffered_bytes(&self) -> bool {
        !self.buffer.is_empty()
    }

    async fn try_read_response(&mut self, to_head: bool) -> Option<RawResponse> {
        let head_len = loop {
            if let Some(at) = find_bytes(&self.buffer, b"\r\n\r\n") {
                break at + 4;
            }
            if !self.fill_buffer().await {
                return None;
            }
        };
        let head: Vec<u8> = self.buffer.drain(..head_len).collect();
        let mut reply = parse_head(&head);
        let bodiless = to_head || reply.status < 200 || matches!(reply.status, 204 | 304);
        reply.complete = bodiless || self.read_body(&mut reply).await;
        Some(reply)
    }

    /// Returns whether the body is complete.
    async fn read_body(&mut self, reply: &mut RawResponse) -> bool {
        if reply
            .header("transfer-encoding")
            .is_some_and(|value| value.contains("chunked"))
        {
            return self.read_chunks(&mut reply.body).await;
        }
        let Some(len) = reply
            .header("content-length")
            .map(|len| len.parse::<usize>().unwrap())
        else {
            while self.fill_buffer().await {}
            reply.body = std::mem::take(&mut self.buffer);
            return true;
        };
        while self.buffer.len() < len && self.fill_buffer().await {}
        reply.body = self.buffer.drain(..len.min(self.buffer.len())).collect();
        reply.body.len() == len
    }

    async fn read_chunks(&mut self, body: &mut Vec<u8>) -> bool {
        loop {
            let Some(line) = self.read_line().await else {
                return false;
            };
            let size = line.split(';').next().unwrap_or_default().trim();
            let size =
                usize::from_str_radix(size, 16).unwrap_or_else(|_| panic!("chunk size {line:?}"));
            if size == 0 {
                // Trailers, up to the empty line.
                while self.read_line().await.is_some_and(|line| !line.is_empty()) {}
                return true;
            }
            while self.buffer.len() < size + 2 {
                if !self.fill_buffer().await {
                    body.append(&mut self.buffer);
                    return false;
                }
            }
            body.extend(self.buffer.drain(..size));
            assert_eq!(
                self.buffer.drain(..2).collect::<Vec<_>>(),
                b"\r\n",
                "no CRLF after a chunk"
            );
        }
    }

    async fn read_line(&mut self) -> Option<String> {
        loop {
            if let Some(at) = find_bytes(&self.buffer, b"\r\n") {
                let line: Vec<u8> = self.buffer.drain(..at + 2).collect();
                return Some(String::from_utf8_lossy(&line[..at]).into_owned());
            }
            if !self.fill_buffer().await {
                return None;
            }
        }
    }

    /// Reads more bytes. Returns `false` if the peer has closed.
    async fn fill_buffer(&mut self) -> bool {
        // Reads into the heap: an array would enlarge every future that reads.
        self.buffer.reserve(64 << 10);
        match self.stream.read_buf(&mut self.buffer).await {
            Ok(read) => read > 0,
            Err(error) if is_disconnect(&error) => false,
            Err(error) => panic!("{error}"),
        }
    }

    fn unread_text(&self) -> String {
        String::from_utf8_lossy(&self.buffer[..self.buffer.len().min(400)]).into_owned()
    }
}

impl RawResponse {
    #[track_caller]
    pub fn expect_status(&self, status: u16) -> &Self {
        assert_eq!(self.status, status, "{self:?}");
        self
    }

    /// Asserts the value of a header that occurs exactly once.
    #[track_caller]
    pub fn expect_header(&self, name: &str, value: impl AsRef<str>) -> &Self {
        assert_eq!(self.header(name), Some(value.as_ref()), "{name}: {self:?}");
        self
    }

    /// Returns the value of a header that occurs at most once.
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.iter().filter(|(given, _)| given == name);
        let value = values.next().map(|(_, value)| value.as_str());
        assert!(
            values.next().is_none(),
            "more than one {name} in {:?}",
            self.headers
        );
        value
    }

    /// Returns a header that is a number.
    pub fn header_number(&self, name: &str) -> u64 {
        let value = self.header(name);
        value
            .unwrap_or_else(|| panic!("no {name}"))
            .parse()
            .unwrap()
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {:?}", self.text()))
    }

    /// Returns a parameter of a named item of a structured list, as in `RateLimit: "api";r=3;t=10`.
    pub fn list_parameter(&self, field: &str, item: &str, parameter: &str) -> Option<u64> {
        let list = self.header(field)?;
        let item = list.split(',').map(str::trim).find_map(|entry| {
            entry
                .strip_prefix(&format!("\"{item}\""))
                .filter(|rest| rest.is_empty() || rest.starts_with(';'))
        })?;
        let value = item
            .split(';')
            .find_map(|pair| pair.trim().strip_prefix(&format!("{parameter}=")))?;
        Some(
            value
                .parse()
                .unwrap_or_else(|_| panic!("{parameter} in {list:?}")),
        )
    }

    /// Returns the remaining units of a limit, from `RateLimit`.
    pub fn remaining(&self, limit: &str) -> Option<u64> {
        self.list_parameter("ratelimit", limit, "r")
    }

    /// Returns `Retry-After`, in seconds.
    pub fn retry_after_s(&self) -> u64 {
        let value = self.header("retry-after");
        value.expect("a Retry-After").parse().unwrap()
    }

    /// Returns `retry_after` of a problem body, in microseconds.
    pub fn retry_after_us(&self) -> u64 {
        let seconds = self.json()["retry_after"].as_f64();
        (seconds.unwrap_or_else(|| panic!("no retry_after in {}", self.text())) * 1e6).round()
            as u64
    }
}

impl ClientRequest {
    pub fn new(address: SocketAddr, method: &str, target: &str) -> Self {
        let (method, target) = (method.to_owned(), target.to_owned());
        Self {
            address,
            method,
            target,
            headers: Vec::new(),
            body: Vec::new(),
        }
    }

    /// Adds a header. `Host` and `Content-Length` are added if absent.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    pub fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = body.into();
        self
    }

    pub async fn send(self) -> RawResponse {
        let mut client = RawClient::connect(self.address).await;
        client.send(self.encode()).await;
        let to_head = self.method == "HEAD";
        loop {
            let reply = client.read_any_response(to_head).await;
            if reply.status >= 200 {
                return reply;
            }
        }
    }

    /// Sends the request this many times in sequence and returns the statuses.
    pub async fn send_times(self, times: usize) -> Vec<u16> {
        let mut statuses = Vec::new();
        for _ in 0..times {
            statuses.push(self.clone().send_for_status().await);
        }
        statuses
    }

    /// Sends the request and asserts the status of its response.
    pub async fn expect_status(self, status: u16) {
        let sent = format!("{} {}", self.method, self.target);
        assert_eq!(self.send().await.status, status, "{sent}");
    }

    pub async fn send_for_status(self) -> u16 {
        self.send().await.status
    }

    fn encode(&self) -> Vec<u8> {
        let given = |name: &str| {
            self.headers
                .iter()
                .any(|(given, _)| given.eq_ignore_ascii_case(name))
        };
        let mut head = format!("{} {} HTTP/1.1\r\n", self.method, self.target);
        if !given("host") {
            head += "Host: shop.example\r\n";
        }
        if !self.body.is_empty() && !given("content-length") {
            head += &format!("Content-Length: {}\r\n", self.body.len());
        }
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        [head.as_bytes(), b"\r\n", &self.body].concat()
    }
}

/// An HTTP/1.1 connection of hyper, with streaming bodies.
pub async fn open_http1_connection(address: SocketAddr) -> http1::SendRequest<ClientBody> {
    let stream = TcpStream::connect(address).await.unwrap();
    let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    sender
}

/// A cleartext HTTP/2 connection with prior knowledge.
pub async fn open_http2_connection(address: SocketAddr) -> http2::SendRequest<ClientBody> {
    open_http2_over_stream(TcpStream::connect(address).await.unwrap()).await
}

/// HTTP/2 over an existing connection.
pub async fn open_http2_over_stream(
    stream: impl ByteStream + 'static,
) -> http2::SendRequest<ClientBody> {
    let (sender, connection) = http2::handshake(TokioExecutor::new(), TokioIo::new(stream))
        .await
        .unwrap();
    tokio::spawn(connection);
    sender
}

/// A GET of hyper's clients.
pub fn get_request(url: impl AsRef<str>) -> hyper::Request<ClientBody> {
    let request = hyper::Request::get(url.as_ref());
    request.body(ClientBody::default()).unwrap()
}

/// Waits for hyper's response, with a deadline.
pub async fn await_response(
    answer: impl Future<Output = hyper::Result<hyper::Response<Incoming>>>,
) -> hyper::Response<Incoming> {
    timeout(TEST_TIMEOUT, answer)
        .await
        .expect("no response in time")
        .unwrap()
}

/// Sends this many bytes and the end of the stream. Asserts that the peer returns both.
pub async fn assert_echo(stream: impl ByteStream + 'static, length: usize) {
    let (mut reads, mut writes) = tokio::io::split(stream);
    let bytes = pseudo_random_bytes(length);
    let sent = bytes.clone();
    let sending = tokio::spawn(async move {
        writes.write_all(&sent).await.unwrap();
        writes.shutdown().await.unwrap();
    });
    let mut got = Vec::new();
    timeout(Duration::from_secs(30), reads.read_to_end(&mut got))
        .await
        .unwrap()
        .unwrap();
    sending.await.unwrap();
    assert!(got == bytes, "{} of {} bytes", got.len(), bytes.len());
}

fn parse_head(head: &[u8]) -> RawResponse {
    let head = String::from_utf8_lossy(head);
    let mut lines = head.split("\r\n");
    let status_line = lines.next().unwrap_or_default();
    let status = status_line
        .split(' ')
        .nth(1)
        .and_then(|status| status.parse().ok());
    let headers = lines.take_while(|line| !line.is_empty()).map(|line| {
        let (name, value) = line
            .split_once(':')
            .unwrap_or_else(|| panic!("header line {line:?}"));
        (name.to_ascii_lowercase(), value.trim().to_owned())
    });
    RawResponse {
        status: status.unwrap_or_else(|| panic!("status line {status_line:?}")),
        headers: headers.collect(),
        body: Vec::new(),
        complete: false,
    }
}

fn is_disconnect(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionReset
            | io::ErrorKind::BrokenPipe
            | io::ErrorKind::ConnectionAborted
    )
}

fn find_bytes(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes
        .windows(wanted.len())
        .position(|window| window == wanted)
}
