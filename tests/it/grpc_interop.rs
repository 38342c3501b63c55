//! gRPC with an independent stack on both sides: a tonic client and a tonic server, through the
//! proxy.
//!
//! Messages are plain texts. Codec and service are written by hand in place of generated code.

use crate::support::prelude::*;
use bytes::{Buf, BufMut};
use futures_util::future::BoxFuture;
use futures_util::stream::{self, BoxStream, Stream, StreamExt};
use http::uri::PathAndQuery;
use std::convert::Infallible;
use std::task::{Context, Poll};
use tokio::sync::mpsc;
use tonic::body::Body;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::Service;
use tonic::metadata::MetadataMap;
use tonic::server::{
    ClientStreamingService, Grpc, ServerStreamingService, StreamingService, UnaryService,
};
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Request, Response, Status, Streaming};

#[derive(Clone, Copy, Default)]
struct TextCodec;

impl Codec for TextCodec {
    type Encode = String;
    type Decode = String;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        *self
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Encoder for TextCodec {
    type Item = String;
    type Error = Status;

    fn encode(&mut self, text: String, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        into.put_slice(text.as_bytes());
        Ok(())
    }
}

impl Decoder for TextCodec {
    type Item = String;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<String>, Status> {
        let bytes = from.copy_to_bytes(from.remaining());
        String::from_utf8(bytes.to_vec())
            .map(Some)
            .map_err(|error| Status::internal(error.to_string()))
    }
}

/// A server with a method of each kind, one that fails and one that never ends.
#[derive(Clone, Default)]
struct ShopService {
    /// Calls that never end and are still open.
    hanging_calls: Arc<AtomicUsize>,
}

struct HangingCallGuard(Arc<AtomicUsize>);

impl Drop for HangingCallGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl ShopService {
    async fn start() -> (Self, SocketAddr, JoinHandle<()>) {
        let (shop, listener) = (
            Self::default(),
            TcpListener::bind("127.0.0.1:0").await.unwrap(),
        );
        let (address, serving) = (listener.local_addr().unwrap(), shop.clone());
        let serving = async move {
            Server::builder()
                .serve_with_incoming(serving, TcpIncoming::from(listener))
                .await
                .unwrap();
        };
        (shop, address, tokio::spawn(serving))
    }
}

impl Service<http::Request<Body>> for ShopService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let (shop, mut grpc) = (self.clone(), Grpc::new(TextCodec));
        Box::pin(async move {
            Ok(match request.uri().path() {
                "/a.Shop/Many" => grpc.server_streaming(shop, request).await,
                "/a.Shop/Sum" => grpc.client_streaming(shop, request).await,
                "/a.Shop/Chat" => grpc.streaming(shop, request).await,
                _ => grpc.unary(shop, request).await,
            })
        })
    }
}

type RpcFuture<T> = BoxFuture<'static, Result<Response<T>, Status>>;
type TextStream = BoxStream<'static, Result<String, Status>>;

impl UnaryService<String> for ShopService {
    type Response = String;
    type Future = RpcFuture<String>;

    fn call(&mut self, request: Request<String>) -> Self::Future {
        let shop = self.clone();
        Box::pin(async move {
            let (metadata, _, text) = request.into_parts();
            match text.as_str() {
                "fail" => {
                    let mut details = MetadataMap::new();
                    details.insert_bin(
                        "why-bin",
                        tonic::metadata::BinaryMetadataValue::from_bytes(b"\0\xff"),
                    );
                    let message = "déjà vendu: 100 %";
                    Err(Status::with_details_and_metadata(
                        Code::NotFound,
                        message,
                        "more".into(),
                        details,
                    ))
                }
                "hang" => {
                    shop.hanging_calls.fetch_add(1, Ordering::SeqCst);
                    let _counted = HangingCallGuard(shop.hanging_calls);
                    std::future::pending().await
                }
                _ => {
                    let mut response = Response::new(text);
                    let asked = metadata
                        .get("x-asked")
                        .cloned()
                        .unwrap_or("nothing".parse().unwrap());
                    response.metadata_mut().insert("x-asked", asked);
                    Ok(response)
                }
            }
        })
    }
}

impl ServerStreamingService<String> for ShopService {
    type Response = String;
    type ResponseStream = TextStream;
    type Future = RpcFuture<TextStream>;

    fn call(&mut self, request: Request<String>) -> Self::Future {
        let text = request.into_inner();
        let many = stream::iter(0..1000).map(move |n| Ok(format!("{text}{n}")));
        let end = stream::iter([Err(Status::data_loss("no more"))]);
        Box::pin(async { Ok(Response::new(many.chain(end).boxed())) })
    }
}

impl ClientStreamingService<String> for ShopService {
    type Response = String;
    type Future = RpcFuture<String>;

    fn call(&mut self, request: Request<Streaming<String>>) -> Self::Future {
        Box::pin(async move {
            let (mut texts, mut sum) = (request.into_inner(), String::new());
            while let Some(text) = texts.message().await? {
                sum += &text;
            }
            Ok(Response::new(sum))
        })
    }
}

impl StreamingService<String> for ShopService {
    type Response = String;
    type ResponseStream = TextStream;
    type Future = RpcFuture<TextStream>;

    fn call(&mut self, request: Request<Streaming<String>>) -> Self::Future {
        self.hanging_calls.fetch_add(1, Ordering::SeqCst);
        let counted = HangingCallGuard(Arc::clone(&self.hanging_calls));
        let echoed = request.into_inner().map(move |text| {
            let _counted = &counted;
            text
        });
        Box::pin(async { Ok(Response::new(echoed.boxed())) })
    }
}

/// A client that connects on its first call.
struct ShopClient(tonic::client::Grpc<Channel>);

impl ShopClient {
    fn connect_lazy(proxy: &Proxy) -> Self {
        let channel = Endpoint::from_shared(format!("http://{}", proxy.address))
            .unwrap()
            .connect_lazy();
        Self(tonic::client::Grpc::new(channel))
    }

    async fn call_unary(&mut self, request: Request<String>) -> Result<Response<String>, Status> {
        self.0.ready().await.unwrap();
        let called = self
            .0
            .unary(request, PathAndQuery::from_static("/a.Shop/One"), TextCodec);
        timeout(TEST_TIMEOUT, called)
            .await
            .expect("no response in time")
    }

    async fn send_text(&mut self, text: &str) -> Result<String, Status> {
        self.call_unary(Request::new(text.to_owned()))
            .await
            .map(Response::into_inner)
    }

    async fn call_server_streaming(&mut self, text: &str) -> Streaming<String> {
        self.0.ready().await.unwrap();
        let request = Request::new(text.to_owned());
        let called = self.0.server_streaming(
            request,
            PathAndQuery::from_static("/a.Shop/Many"),
            TextCodec,
        );
        in_time(called).await.unwrap().into_inner()
    }

    async fn call_bidirectional(
        &mut self,
        texts: impl Stream<Item = String> + Send + 'static,
    ) -> Streaming<String> {
        self.0.ready().await.unwrap();
        let called = self.0.streaming(
            Request::new(texts),
            PathAndQuery::from_static("/a.Shop/Chat"),
            TextCodec,
        );
        in_time(called).await.unwrap().into_inner()
    }
}

fn stream_from_receiver(receiver: mpsc::Receiver<String>) -> impl Stream<Item = String> {
    stream::unfold(receiver, |mut receiver| async {
        receiver.recv().await.map(|text| (text, receiver))
    })
}

async fn next_message(stream: &mut Streaming<String>) -> Result<Option<String>, Status> {
    timeout(TEST_TIMEOUT, stream.message())
        .await
        .expect("the message did not arrive in time")
}

async fn start_through_proxy(config: &str) -> (ShopService, Proxy, ShopClient, JoinHandle<()>) {
    let (shop, address, serving) = ShopService::start().await;
    let proxy = Proxy::start(config, &format!("h2c://{address}")).await;
    let client = ShopClient::connect_lazy(&proxy);
    (shop, proxy, client, serving)
}

#[tokio::test]
async fn all_call_types_behave_as_without_a_proxy() {
    let (shop, _proxy, mut client, _serving) = start_through_proxy("").await;
    let mut request = Request::new("hello".to_owned());
    request
        .metadata_mut()
        .insert("x-asked", "politely".parse().unwrap());
    let response = client.call_unary(request).await.unwrap();
    assert_eq!(response.metadata().get("x-asked").unwrap(), "politely");
    assert_eq!(response.into_inner(), "hello");

    let long = "x".repeat(3 << 20);
    assert!(client.send_text(&long).await.unwrap() == long);

    let status = client.send_text("fail").await.unwrap_err();
    assert_eq!(status.code(), Code::NotFound);
    assert_eq!(status.message(), "déjà vendu: 100 %");
    assert_eq!(status.details(), b"more");
    assert_eq!(
        status
            .metadata()
            .get_bin("why-bin")
            .unwrap()
            .to_bytes()
            .unwrap(),
        &b"\0\xff"[..]
    );

    let mut many = client.call_server_streaming("n").await;
    for n in 0..1000 {
        let found = next_message(&mut many).await.unwrap();
        assert_eq!(found, Some(format!("n{n}")));
    }
    let end = next_message(&mut many).await.unwrap_err();
    assert_eq!(end.code(), Code::DataLoss, "the status is in the trailers");
    assert_eq!(end.message(), "no more", "the status is in the trailers");

    client.0.ready().await.unwrap();
    let texts = Request::new(stream::iter(["a", "b", "c"].map(str::to_owned)));
    let sum = client
        .0
        .client_streaming(texts, PathAndQuery::from_static("/a.Shop/Sum"), TextCodec);
    let sum: Response<String> = in_time(sum).await.unwrap();
    assert_eq!(sum.into_inner(), "abc");

    // Each reply arrives before the next message is sent.
    let (say, messages) = mpsc::channel(1);
    let mut chat = client
        .call_bidirectional(stream_from_receiver(messages))
        .await;
    for text in ["a", "b", "c"] {
        say.send(text.to_owned()).await.unwrap();
        let found = next_message(&mut chat).await.unwrap();
        assert_eq!(found.as_deref(), Some(text));
    }
    drop(say);
    assert_eq!(next_message(&mut chat).await.unwrap(), None);
    assert!(chat.trailers().await.unwrap().is_some());
    wait_until("the bidirectional call to end", async || {
        shop.hanging_calls.load(Ordering::SeqCst) == 0
    })
    .await;
}

#[tokio::test]
async fn deadlines_reach_the_server_and_a_client_disconnect_cancels_its_call() {
    let (shop, proxy, mut client, _serving) = start_through_proxy("").await;
    let hanging = |count: usize| {
        let hanging = Arc::clone(&shop.hanging_calls);
        async move {
            wait_until("the open calls", async || {
                hanging.load(Ordering::SeqCst) == count
            })
            .await;
        }
    };
    let mut request = Request::new("hang".to_owned());
    request.set_timeout(Duration::from_millis(200));
    let status = client.call_unary(request).await.unwrap_err();
    // Client and server compute the remaining time at about the same moment.
    assert!(
        matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled),
        "{status:?}"
    );
    hanging(0).await;

    let (say, messages) = mpsc::channel(1);
    let mut chat = client
        .call_bidirectional(stream_from_receiver(messages))
        .await;
    say.send("a".to_owned()).await.unwrap();
    assert_eq!(next_message(&mut chat).await.unwrap().as_deref(), Some("a"));
    hanging(1).await;
    let mut other = ShopClient::connect_lazy(&proxy);
    let called = timeout(Duration::from_millis(200), other.send_text("hang")).await;
    called.expect_err("it hangs until it is given up");
    hanging(1).await;
    // Drops both directions: either one would keep the call open.
    drop((chat, say));
    hanging(0).await;
    assert_eq!(client.send_text("still here").await.unwrap(), "still here");
}

#[tokio::test]
async fn rejections_are_grpc_statuses() {
    let config = "
[store]
kind = 'redis'
[store.redis]
url = 'redis://127.0.0.1:9/0'
timeout = '20ms'
connect_timeout = '20ms'
[[policy]]
name = 'denied'
match.headers = { x-case = 'denied' }
action = 'deny'
[[policy]]
name = 'closed'
match.headers = { x-case = 'closed' }
limit = { requests = 1, per = '1h' }
on_store_failure = 'closed'
[[policy]]
name = 'limited'
match.headers = { x-case = 'limited' }
limit = { requests = 1, per = '1h' }
on_store_failure = 'local'
[upstream]
response_timeout = '200ms'
";
    let (_shop, _proxy, mut client, _serving) = start_through_proxy(config).await;
    let case = |case: &'static str, text: &str| {
        let mut request = Request::new(text.to_owned());
        request
            .metadata_mut()
            .insert("x-case", case.parse().unwrap());
        request
    };
    assert_eq!(
        client
            .call_unary(case("limited", "hi"))
            .await
            .unwrap()
            .into_inner(),
        "hi"
    );
    for (name, text, code) in [
        ("limited", "hi", Code::ResourceExhausted),
        ("denied", "hi", Code::PermissionDenied),
        ("closed", "hi", Code::Unavailable),
        ("none", "hang", Code::DeadlineExceeded),
    ] {
        let status = client.call_unary(case(name, text)).await.expect_err(name);
        assert_eq!(status.code(), code, "{name}: {status:?}");
    }
    let over = client.call_unary(case("limited", "hi")).await.unwrap_err();
    assert!(
        over.message()
            .starts_with("Over the limit of policy \"limited\"."),
        "{over:?}"
    );
    assert!(over.metadata().get("retry-after").is_some(), "{over:?}");
    // Streams are rejected in the same way.
    let texts = Request::from_parts(
        case("denied", "").metadata().clone(),
        tonic::Extensions::new(),
        stream::pending::<String>(),
    );
    client.0.ready().await.unwrap();
    let refused = client
        .0
        .streaming(texts, PathAndQuery::from_static("/a.Shop/Chat"), TextCodec);
    let refused: Result<Response<Streaming<String>>, Status> = in_time(refused).await;
    assert_eq!(refused.unwrap_err().code(), Code::PermissionDenied);

    let proxy = Proxy::start("", "h2c://127.0.0.1:9").await;
    let status = ShopClient::connect_lazy(&proxy)
        .send_text("hi")
        .await
        .unwrap_err();
    assert_eq!(status.code(), Code::Unavailable, "{status:?}");
}
