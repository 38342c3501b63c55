//! Upstreams in the test process: hyper with a handler, and raw sockets with a script.

use super::prelude::*;
use http_body_util::combinators::BoxBody;
use hyper::HeaderMap;
use hyper::body::{Body, Frame};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use sha2::{Digest, Sha256};
use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::sync::mpsc;

pub type UpstreamBody = BoxBody<Bytes, io::Error>;
pub type UpstreamResponse = Response<UpstreamBody>;

/// A hyper server. Its connections end when it is dropped.
#[derive(Debug)]
pub struct Upstream {
    pub address: SocketAddr,
    received_requests: Arc<Mutex<Vec<ReceivedRequest>>>,
    accepted_connections: Arc<Mutex<usize>>,
    task: JoinHandle<()>,
}

/// A request head as the upstream received it.
#[derive(Clone, Debug)]
pub struct ReceivedRequest {
    pub method: String,
    pub target: String,
    /// In order, with lower-case names.
    pub headers: Vec<(String, String)>,
}

impl Upstream {
    /// Answers every request with a description of it, see [`echo`].
    pub async fn echo() -> Self {
        Self::with_handler(echo).await
    }

    /// As [`Self::echo`], but never answers `/never`, and answers `/big` with 4 MiB.
    pub async fn echo_or_slow() -> Self {
        Self::with_handler(|request| async move {
            match request.uri().path() {
                "/never" => std::future::pending().await,
                "/big" => Response::new(full_body(vec![b'x'; 4 << 20])),
                _ => echo(request).await,
            }
        })
        .await
    }

    /// Answers the first request with a body that the test sends.
    pub async fn streaming() -> (BodySender, Self) {
        let (sender, body) = channel_body();
        let body = Mutex::new(Some(body));
        let upstream = Self::with_handler(move |_| {
            let body = body.lock().unwrap().take().unwrap_or_default();
            async { Response::new(body) }
        });
        (sender, upstream.await)
    }

    /// Answers with `handler`. If the client disconnects, the handler's future is dropped.
    pub async fn with_handler<H, F>(handler: H) -> Self
    where
        H: Fn(Request<Incoming>) -> F + Send + Sync + 'static,
        F: Future<Output = UpstreamResponse> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (seen, connections) = (
            Arc::<Mutex<Vec<ReceivedRequest>>>::default(),
            Arc::<Mutex<usize>>::default(),
        );
        let (seeing, counting, handler) = (
            Arc::clone(&seen),
            Arc::clone(&connections),
            Arc::new(handler),
        );
        let task = tokio::spawn(async move {
            let mut open = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                *counting.lock().unwrap() += 1;
                let (seeing, handler) = (Arc::clone(&seeing), Arc::clone(&handler));
                let service = service_fn(move |request: Request<Incoming>| {
                    seeing.lock().unwrap().push(ReceivedRequest::new(&request));
                    let answer = handler(request);
                    async move { Ok::<_, Infallible>(answer.await) }
                });
                let connection = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(stream), service);
                // A connection broken by the client is not an error of this server.
                open.spawn(async move { connection.await.is_ok() });
            }
        });
        Self {
            address,
            received_requests: seen,
            accepted_connections: connections,
            task,
        }
    }

    /// The requests so far.
    pub fn requests(&self) -> Vec<ReceivedRequest> {
        self.received_requests.lock().unwrap().clone()
    }

    /// The last request.
    pub fn last_request(&self) -> ReceivedRequest {
        self.requests()
            .pop()
            .expect("no request has reached the upstream")
    }

    /// Connections accepted so far.
    pub fn connection_count(&self) -> usize {
        *self.accepted_connections.lock().unwrap()
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl ReceivedRequest {
    fn new(request: &Request<Incoming>) -> Self {
        let header = |(name, value): (&hyper::header::HeaderName, &hyper::header::HeaderValue)| {
            (
                name.to_string(),
                String::from_utf8_lossy(value.as_bytes()).into_owned(),
            )
        };
        Self {
            method: request.method().to_string(),
            target: request.uri().to_string(),
            headers: request.headers().iter().map(header).collect(),
        }
    }

    /// All values of a header.
    pub fn header_values(&self, name: &str) -> Vec<&str> {
        self.headers
            .iter()
            .filter(|(given, _)| given == name)
            .map(|(_, value)| value.as_str())
            .collect()
    }

    /// Asserts the value of a header that occurs exactly once.
    #[track_caller]
    pub fn expect_header(&self, name: &str, value: impl AsRef<str>) {
        assert_eq!(self.single_header(name), value.as_ref(), "{name}: {self:?}");
    }

    /// The value of a header that occurs exactly once.
    pub fn single_header(&self, name: &str) -> &str {
        match self.header_values(name)[..] {
            [value] => value,
            ref values => panic!("{name} is {values:?} in {self:?}"),
        }
    }
}

/// Reads the complete body and answers with JSON: `method`, `target`, `headers` (pairs in order),
/// `body_len`, `body_sha256`.
pub async fn echo(request: Request<Incoming>) -> UpstreamResponse {
    let seen = ReceivedRequest::new(&request);
    let (len, sha256) = hash_body(request.into_body()).await;
    let text = json!({
        "method": seen.method, "target": seen.target, "headers": seen.headers,
        "body_len": len, "body_sha256": sha256,
    });
    let mut answer = Response::new(full_body(text.to_string()));
    answer
        .headers_mut()
        .insert("content-type", "application/json".parse().unwrap());
    answer
}

/// Sets a header of a response.
pub fn set_header<T>(response: &mut Response<T>, name: &'static str, value: &str) {
    response.headers_mut().insert(name, value.parse().unwrap());
}

/// Length and SHA-256 of a body, without buffering it.
pub async fn hash_body(mut body: Incoming) -> (u64, String) {
    let (mut len, mut hasher) = (0, Sha256::new());
    while let Some(Ok(frame)) = body.frame().await {
        if let Some(data) = frame.data_ref() {
            len += data.len() as u64;
            hasher.update(data);
        }
    }
    (len, super::hex_encode(&hasher.finalize()))
}

/// A body that is available at once, with its length.
pub fn full_body(bytes: impl Into<Bytes>) -> UpstreamBody {
    Full::new(bytes.into())
        .map_err(|never| match never {})
        .boxed()
}

/// A body that the test sends in pieces.
pub fn channel_body() -> (BodySender, UpstreamBody) {
    let (sender, receiver) = mpsc::channel(1);
    (BodySender(sender), ChannelBody(receiver).boxed())
}

/// Sends a body. Dropping it ends the body without an error.
#[derive(Debug)]
pub struct BodySender(mpsc::Sender<io::Result<Frame<Bytes>>>);

impl BodySender {
    /// Waits while the peer does not read. Returns `false` if the peer is gone.
    pub async fn send(&self, bytes: impl Into<Bytes>) -> bool {
        self.0.send(Ok(Frame::data(bytes.into()))).await.is_ok()
    }

    pub async fn send_trailers(self, trailers: HeaderMap) {
        self.0
            .send(Ok(Frame::trailers(trailers)))
            .await
            .expect("the peer is connected");
    }

    /// Aborts the body.
    pub async fn send_error(self) {
        self.0
            .send(Err(io::Error::other("broken off")))
            .await
            .expect("the peer is connected");
    }

    /// Waits until the body is no longer read.
    pub async fn wait_until_dropped(&self) {
        self.0.closed().await;
    }
}

struct ChannelBody(mpsc::Receiver<io::Result<Frame<Bytes>>>);

impl Body for ChannelBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        self.0.poll_recv(context)
    }
}

/// A server of raw sockets that records every byte it receives.
#[derive(Debug)]
pub struct RawUpstream {
    pub address: SocketAddr,
    received: ReceivedBytes,
    task: JoinHandle<()>,
}

/// The received bytes, per connection.
type ReceivedBytes = Arc<Mutex<Vec<Vec<u8>>>>;

/// The upstream's end of one connection. Dropping it closes the connection.
#[derive(Debug)]
pub struct RawSocket {
    stream: TcpStream,
    received: ReceivedBytes,
    number: usize,
    /// Bytes of `received` that were already returned as requests.
    consumed_bytes: usize,
}

impl RawUpstream {
    /// Answers every complete request with these bytes and leaves the connection open.
    pub async fn with_response(answer: impl AsRef<[u8]> + Send + Sync + 'static) -> Self {
        let answer = Arc::new(answer);
        Self::with_script(move |_, mut socket| {
            let answer = Arc::clone(&answer);
            async move {
                while socket.read_request().await.is_some() {
                    socket.send((*answer).as_ref()).await;
                }
            }
        })
        .await
    }

    /// Answers the first request of a connection with these bytes, and closes.
    pub async fn answering_once(answer: &'static str) -> Self {
        Self::with_script(move |_, mut socket| async move {
            socket.read_request().await;
            socket.send(answer.as_bytes()).await;
        })
        .await
    }

    /// Reads everything and answers nothing.
    pub async fn silent() -> Self {
        Self::with_script(|_, mut socket| async move { socket.read_to_close().await }).await
    }

    /// Runs `script` with each connection and its index, from 0.
    pub async fn with_script<S, F>(script: S) -> Self
    where
        S: Fn(usize, RawSocket) -> F + Send + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let received = ReceivedBytes::default();
        let receiving = Arc::clone(&received);
        let task = tokio::spawn(async move {
            let mut open = JoinSet::new();
            for number in 0.. {
                let Ok((stream, _)) = listener.accept().await else {
                    break;
                };
                receiving.lock().unwrap().push(Vec::new());
                let received = Arc::clone(&receiving);
                open.spawn(script(
                    number,
                    RawSocket {
                        stream,
                        received,
                        number,
                        consumed_bytes: 0,
                    },
                ));
            }
        });
        Self {
            address,
            received,
            task,
        }
    }

    /// All bytes so far, in order of connections.
    pub fn received_bytes(&self) -> Vec<u8> {
        self.received.lock().unwrap().concat()
    }

    pub fn connection_count(&self) -> usize {
        self.received.lock().unwrap().len()
    }
}

impl Drop for RawUpstream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl RawSocket {
    /// Returns the next complete request, head and body as received, or `None` if the peer closes.
    pub async fn read_request(&mut self) -> Option<Vec<u8>> {
        loop {
            let pending =
                self.received.lock().unwrap()[self.number][self.consumed_bytes..].to_vec();
            if let Some(len) = request_len(&pending) {
                self.consumed_bytes += len;
                return Some(pending[..len].to_vec());
            }
            if !self.read_chunk().await {
                return None;
            }
        }
    }

    /// Reads until the peer closes.
    pub async fn read_to_close(&mut self) {
        while self.read_chunk().await {}
    }

    /// The socket itself. Bytes read from it are not recorded.
    pub fn stream(&mut self) -> &mut TcpStream {
        &mut self.stream
    }

    pub async fn send(&mut self, bytes: &[u8]) {
        // A closed peer is detected by the next read.
        self.stream.write_all(bytes).await.unwrap_or_default();
    }

    /// Reads some bytes. Returns `false` if the peer has closed.
    pub async fn read_chunk(&mut self) -> bool {
        let mut chunk = Vec::with_capacity(16 << 10);
        let read = self.stream.read_buf(&mut chunk).await.unwrap_or(0);
        self.received.lock().unwrap()[self.number].append(&mut chunk);
        read > 0
    }
}

/// The length of the request at the start of `bytes`, if it is complete. A chunked body ends at the
/// first empty chunk, which is enough for these tests.
fn request_len(bytes: &[u8]) -> Option<usize> {
    let text = String::from_utf8_lossy(bytes).to_ascii_lowercase();
    let find = |wanted: &[u8], from: usize| {
        bytes[from..]
            .windows(wanted.len())
            .position(|window| window == wanted)
            .map(|at| from + at + wanted.len())
    };
    let head_len = find(b"\r\n\r\n", 0)?;
    let field = |name: &str| {
        let line = text
            .split("\r\n")
            .take_while(|line| !line.is_empty())
            .find_map(|line| line.strip_prefix(name));
        line.map(|value| value.trim().to_owned())
    };
    if field("transfer-encoding:").is_some() {
        return find(b"0\r\n\r\n", head_len);
    }
    let body_len = field("content-length:").map_or(0, |len| len.parse::<usize>().unwrap());
    (bytes.len() >= head_len + body_len).then_some(head_len + body_len)
}
