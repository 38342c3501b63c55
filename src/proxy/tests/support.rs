//! Servers, clients and upstreams with scripted behaviour.

use crate::listen::ListenAddress;
use crate::proxy::http::headers::take_head;
use crate::proxy::*;
use ::http::{Request, Response, StatusCode, request};
use bytes::Bytes;
use std::cell::Cell;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

pub(super) const GET: &[u8] = b"GET / HTTP/1.1\r\nhost: a\r\n\r\n";

pub(super) fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// Fails the test after 5 seconds.
pub(super) async fn with_timeout<F: Future>(future: F) -> F::Output {
    timeout(Duration::from_secs(5), future)
        .await
        .expect("timed out after 5 seconds")
}

pub(super) async fn wait_until(mut condition: impl FnMut() -> bool) {
    with_timeout(async {
        while !condition() {
            tokio::time::sleep(ms(2)).await;
        }
    })
    .await;
}

pub(super) fn listen_settings() -> ListenSettings {
    ListenSettings {
        address: ListenAddress::Ip("127.0.0.1:0".parse().unwrap()),
        proxy_protocol_from: None,
        assumes_https: false,
        max_connections: 100,
        max_connections_per_client: 0,
        max_connection_age: None,
        max_memory: None,
        threads: 1,
        header_timeout: Duration::from_secs(5),
        idle_timeout: Duration::from_secs(5),
        body_idle_timeout: Duration::from_secs(5),
        min_upload_rate: 0,
        max_header_bytes: 64 * 1024,
        max_headers: 100,
        max_body_bytes: None,
        max_concurrent_streams: 200,
    }
}

pub(super) fn upstream_settings(addr: SocketAddr) -> UpstreamSettings {
    UpstreamSettings {
        url: UpstreamUrl::Net {
            scheme: UpstreamScheme::Http,
            host: addr.ip().to_string(),
            port: addr.port(),
        },
        connect_timeout: Duration::from_secs(1),
        response_timeout: Some(Duration::from_secs(5)),
        body_idle_timeout: None,
        pool_idle_timeout: Duration::from_secs(5),
        pool_max_idle: 256,
        preserve_host: true,
        max_connections: 100,
        max_connections_per_client: 0,
        max_tunnels_per_client: 0,
        tunnel_idle_timeout: None,
        max_requests_waiting: 100,
        queue_timeout: Duration::from_secs(1),
        retry_connect: 0,
        retry_idempotent: true,
        tls: None,
    }
}

/// Running server, stopped on drop.
pub(super) struct RunningServer {
    pub(super) addr: SocketAddr,
    pub(super) load: Arc<OpenConnections>,
    pub(super) shutdown_signal: watch::Sender<ShutdownSignal>,
    pub(super) task: JoinHandle<std::io::Result<usize>>,
}

impl RunningServer {
    pub(super) fn start<H, M, F>(
        settings: &ListenSettings,
        shutdown: ShutdownSettings,
        handler: M,
    ) -> Self
    where
        H: RequestHandler,
        M: Fn(usize) -> F + Clone + Send + 'static,
        F: Future<Output = Rc<H>> + 'static,
    {
        let mut server = ProxyServer::with_worker_threads(settings.threads);
        let kind = ListenerKind::Proxy;
        server.add_listener(kind, settings, Arc::default()).unwrap();
        let ListenAddress::Ip(addr) = server.first_listener_address().unwrap() else {
            panic!("expected an IP address")
        };
        let load = server.server_load();
        let (shutdown_signal, signal_rx) = watch::channel(ShutdownSignal::Run);
        server.listen().unwrap();
        let task = tokio::spawn(server.run(handler, shutdown, signal_rx, || {}));
        Self {
            addr,
            load,
            shutdown_signal,
            task,
        }
    }

    /// Starts a server with a function as its handler.
    pub(super) fn start_with_fn<A, F>(settings: &ListenSettings, answer: A) -> Self
    where
        A: Fn(Request<RequestBody>, usize) -> F + Clone + Send + 'static,
        F: Future<Output = Response<ResponseBody>> + 'static,
    {
        Self::start(settings, immediate_shutdown(), move |worker| {
            let answer = answer.clone();
            async move { Rc::new(FunctionHandler { answer, worker }) }
        })
    }

    /// Starts a server that forwards everything and answers errors with their name.
    pub(super) fn start_forwarding(listen: &ListenSettings, upstream: UpstreamSettings) -> Self {
        Self::start_forwarding_with_shutdown(listen, upstream, immediate_shutdown())
    }

    pub(super) fn start_forwarding_with_shutdown(
        listen: &ListenSettings,
        upstream: UpstreamSettings,
        shutdown: ShutdownSettings,
    ) -> Self {
        let shared = UpstreamSharedState::new(upstream, listen.threads).unwrap();
        Self::start(listen, shutdown, move |_| {
            let shared = Arc::clone(&shared);
            async move { Rc::new(ForwardingHandler(UpstreamClient::new(shared))) }
        })
    }

    pub(super) async fn connect(&self) -> RawTestClient {
        RawTestClient(with_timeout(TcpStream::connect(self.addr)).await.unwrap())
    }
}

impl Drop for RunningServer {
    fn drop(&mut self) {
        self.shutdown_signal.send_replace(ShutdownSignal::Immediate);
    }
}

pub(super) fn immediate_shutdown() -> ShutdownSettings {
    ShutdownSettings {
        delay: Duration::ZERO,
        grace: Duration::ZERO,
    }
}

pub(super) fn text_response(status: StatusCode, text: impl Into<Bytes>) -> Response<ResponseBody> {
    let mut response = Response::new(ResponseBody::Full(text.into()));
    *response.status_mut() = status;
    response
}

struct FunctionHandler<A> {
    answer: A,
    worker: usize,
}

impl<A, F> RequestHandler for FunctionHandler<A>
where
    A: Fn(Request<RequestBody>, usize) -> F + 'static,
    F: Future<Output = Response<ResponseBody>> + 'static,
{
    async fn handle(
        &self,
        head: &mut request::Parts,
        body: RequestBody,
        _peer: &ConnectionPeer,
        _interim: &mut InformationalForwarder,
    ) -> Response<ResponseBody> {
        let request = Request::from_parts(take_head(head), body);
        (self.answer)(request, self.worker).await
    }
}

struct ForwardingHandler(Rc<UpstreamClient>);

impl RequestHandler for ForwardingHandler {
    async fn handle(
        &self,
        head: &mut request::Parts,
        mut body: RequestBody,
        _peer: &ConnectionPeer,
        interim: &mut InformationalForwarder,
    ) -> Response<ResponseBody> {
        let was_sent = Cell::default();
        let is_upgrade = head.headers.contains_key("upgrade");
        let sent = self.0.send(
            (head, &mut body, is_upgrade),
            || [127, 0, 0, 1].into(),
            Instant::now(),
            interim,
            &was_sent,
        );
        match sent.await {
            Ok(response) => response,
            Err(error) => text_response(StatusCode::BAD_GATEWAY, error.kind.into_str()),
        }
    }
}

/// Client that sends and receives raw bytes.
pub(super) struct RawTestClient(pub(super) TcpStream);

impl RawTestClient {
    pub(super) async fn send(&mut self, bytes: &[u8]) {
        with_timeout(self.0.write_all(bytes)).await.unwrap();
    }

    /// Reads one response with a content-length, head and body.
    pub(super) async fn read_response(&mut self) -> String {
        let mut got = Vec::new();
        loop {
            let byte = with_timeout(self.0.read_u8()).await;
            got.push(
                byte.unwrap_or_else(|_| panic!("ended after {:?}", String::from_utf8_lossy(&got))),
            );
            if got.ends_with(b"\r\n\r\n") {
                break;
            }
        }
        let mut text = String::from_utf8(got).unwrap();
        let length = text
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "))
            .map_or(0, |n| n.parse().unwrap());
        let mut body = vec![0; length];
        with_timeout(self.0.read_exact(&mut body)).await.unwrap();
        text.push_str(std::str::from_utf8(&body).unwrap());
        text
    }

    pub(super) async fn request(&mut self, bytes: &[u8]) -> String {
        self.send(bytes).await;
        self.read_response().await
    }

    /// Reads until the connection ends, cleanly or with a reset.
    pub(super) async fn read_to_end(&mut self) -> String {
        let mut got = Vec::new();
        let mut chunk = vec![0; 16384];
        while let Ok(n @ 1..) = with_timeout(self.0.read(&mut chunk)).await {
            got.extend_from_slice(&chunk[..n]);
        }
        String::from_utf8(got).unwrap()
    }
}

/// Starts an upstream. `serve` receives each connection and its index.
pub(super) async fn start_upstream<F>(
    serve: impl Fn(RawTestClient, usize) -> F + Send + 'static,
) -> (SocketAddr, Arc<AtomicUsize>)
where
    F: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    let accepted = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&accepted);
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            tokio::spawn(serve(
                RawTestClient(socket),
                counted.fetch_add(1, Ordering::SeqCst),
            ));
        }
    });
    (addr, accepted)
}

impl RawTestClient {
    /// As an upstream: reads one request head. Returns `None` at the end of the connection.
    pub(super) async fn read_head(&mut self) -> Option<String> {
        let mut got = Vec::new();
        while !got.ends_with(b"\r\n\r\n") {
            got.push(self.0.read_u8().await.ok()?);
        }
        Some(String::from_utf8(got).unwrap())
    }

    /// As an upstream: sends the same response to every request without a body.
    pub(super) async fn serve_response(&mut self, answer: &[u8]) {
        while self.read_head().await.is_some() {
            if self.0.write_all(answer).await.is_err() {
                return;
            }
        }
    }
}
