//! gRPC end to end: all four kinds of calls, how they end, and denials in gRPC's format.

use crate::support::prelude::*;
use bytes::{BufMut, BytesMut};
use h2::client::SendRequest;
use h2::server::Builder;
use h2::{RecvStream, SendStream};
use hyper::HeaderMap;

/// Encodes an uncompressed gRPC message with its length prefix.
fn encode_message(text: &str) -> Bytes {
    let mut framed = BytesMut::new();
    framed.put_u8(0);
    framed.put_u32(u32::try_from(text.len()).unwrap());
    framed.put_slice(text.as_bytes());
    framed.freeze()
}

/// Reads messages from the frames of a stream.
struct MessageReader {
    stream: RecvStream,
    unread: BytesMut,
}

impl MessageReader {
    fn new(stream: RecvStream) -> Self {
        Self {
            stream,
            unread: BytesMut::new(),
        }
    }

    /// Returns the next message, or `None` at the end.
    async fn next_message(&mut self) -> Option<String> {
        loop {
            if let Some(length) = self.unread.get(1..5) {
                let end = 5 + u32::from_be_bytes(length.try_into().unwrap()) as usize;
                if self.unread.len() >= end {
                    let framed = self.unread.split_to(end);
                    return Some(String::from_utf8(framed[5..].to_vec()).unwrap());
                }
            }
            let part = timeout(TEST_TIMEOUT, self.stream.data())
                .await
                .expect("the message did not arrive in time")?
                .unwrap();
            self.stream
                .flow_control()
                .release_capacity(part.len())
                .unwrap();
            self.unread.extend_from_slice(&part);
        }
    }

    async fn read_all(&mut self) -> Vec<String> {
        let mut all = Vec::new();
        while let Some(message) = self.next_message().await {
            all.push(message);
        }
        all
    }

    async fn read_trailers(&mut self) -> HeaderMap {
        in_time(self.stream.trailers())
            .await
            .unwrap()
            .unwrap_or_default()
    }
}

/// Echoes each message. `/fail` fails at once, `/many` sends three for one, `/sum` one for all.
async fn serve_calls(exchange: H2Exchange) {
    let H2Exchange {
        request,
        mut respond,
        ..
    } = exchange;
    let (head, body) = request.into_parts();
    assert_eq!(head.headers["te"], "trailers");
    assert_eq!(head.headers["grpc-timeout"], "5S");
    let response = Response::builder().header("content-type", "application/grpc");
    let mut incoming = MessageReader::new(body);
    if head.uri.path() == "/a.Service/fail" {
        let only = response
            .header("grpc-status", "5")
            .header("grpc-message", "not%20found")
            .body(())
            .unwrap();
        respond.send_response(only, true).unwrap();
        return;
    }
    let mut stream = respond
        .send_response(response.body(()).unwrap(), false)
        .unwrap();
    let mut all = Vec::new();
    while let Some(text) = incoming.next_message().await {
        match head.uri.path() {
            "/a.Service/sum" => all.push(text),
            "/a.Service/many" => (0..3).for_each(|n| {
                stream
                    .send_data(encode_message(&format!("{text}{n}")), false)
                    .unwrap()
            }),
            _ => stream.send_data(encode_message(&text), false).unwrap(),
        }
    }
    if !all.is_empty() {
        stream
            .send_data(encode_message(&all.concat()), false)
            .unwrap();
    }
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", "0".parse().unwrap());
    trailers.insert("x-custom-bin", "AAA=".parse().unwrap());
    stream.send_trailers(trailers).unwrap();
}

async fn connect_client(address: SocketAddr) -> SendRequest<Bytes> {
    let (sender, connection) = h2::client::handshake(TcpStream::connect(address).await.unwrap())
        .await
        .unwrap();
    tokio::spawn(connection);
    sender
}

async fn start_call(
    sender: &SendRequest<Bytes>,
    method: &str,
) -> (h2::client::ResponseFuture, SendStream<Bytes>) {
    let request = Request::post(format!("http://shop.example/a.Service/{method}"))
        .header("content-type", "application/grpc+proto")
        .header("te", "trailers")
        .header("grpc-timeout", "5S")
        .body(())
        .unwrap();
    let mut sender = sender.clone().ready().await.unwrap();
    sender.send_request(request, false).unwrap()
}

async fn await_response(response: h2::client::ResponseFuture) -> Response<RecvStream> {
    timeout(TEST_TIMEOUT, response)
        .await
        .expect("no response in time")
        .unwrap()
}

async fn assert_all_call_types_work(proxy: &Proxy) {
    let sender = connect_client(proxy.address).await;
    for (method, asked, expected) in [
        ("unary", vec!["a"], vec!["a"]),
        ("many", vec!["a"], vec!["a0", "a1", "a2"]),
        ("sum", vec!["a", "b", "c"], vec!["abc"]),
    ] {
        let (response, mut sending) = start_call(&sender, method).await;
        for (n, text) in asked.iter().enumerate() {
            sending
                .send_data(encode_message(text), n + 1 == asked.len())
                .unwrap();
        }
        let response = await_response(response).await;
        assert_eq!(response.headers()["content-type"], "application/grpc");
        let mut messages = MessageReader::new(response.into_body());
        assert_eq!(messages.read_all().await, expected, "{method}");
        let trailers = messages.read_trailers().await;
        assert_eq!(trailers["grpc-status"], "0");
        assert_eq!(trailers["x-custom-bin"], "AAA=");
    }

    // Each reply arrives before the next message is sent.
    let (response, mut sending) = start_call(&sender, "bidi").await;
    let mut messages = MessageReader::new(await_response(response).await.into_body());
    for text in ["a", "b", "c"] {
        sending.send_data(encode_message(text), false).unwrap();
        assert_eq!(messages.next_message().await.as_deref(), Some(text));
    }
    sending.send_data(Bytes::new(), true).unwrap();
    assert_eq!(messages.next_message().await, None);
    assert_eq!(messages.read_trailers().await["grpc-status"], "0");

    let (response, _sending) = start_call(&sender, "fail").await;
    let response = await_response(response).await;
    assert_eq!(
        (
            &response.headers()["grpc-status"],
            &response.headers()["grpc-message"]
        ),
        (&"5".parse().unwrap(), &"not%20found".parse().unwrap())
    );
    assert!(response.body().is_end_stream());
}

#[tokio::test]
async fn all_call_types_work_over_cleartext() {
    let upstream = H2Upstream::with_handler(Builder::new(), serve_calls).await;
    let proxy = Proxy::start("listen.threads = 1", &upstream.url()).await;
    assert_all_call_types_work(&proxy).await;
    assert_eq!(upstream.connection_count(), 1);
}

#[tokio::test]
async fn all_call_types_work_over_tls() {
    let authority = CertificateAuthority::new();
    authority.sign("server", "127.0.0.1");
    let upstream =
        H2Upstream::with_tls(authority.tls_acceptor("server", &["h2"], None), serve_calls).await;
    let config = format!(
        "[upstream.tls]\nca = '{}'\n",
        authority.path_string("ca.pem")
    );
    let url = format!("https://{}", upstream.address);
    let proxy = Proxy::start(&config, &url).await;
    assert_all_call_types_work(&proxy).await;
}

/// Checks that a call is rejected by headers only, with this status. Returns the message.
async fn assert_call_rejected(proxy: &Proxy, status: &str) -> String {
    let (response, _sending) = start_call(&connect_client(proxy.address).await, "unary").await;
    let response = await_response(response).await;
    assert_eq!(response.status(), 200, "{response:?}");
    let headers = response.headers();
    assert_eq!(headers["grpc-status"], status, "{headers:?}");
    assert_eq!(headers["content-type"], "application/grpc");
    assert!(response.body().is_end_stream(), "the rejection has a body");
    headers["grpc-message"].to_str().unwrap().to_owned()
}

#[tokio::test]
async fn rejections_are_grpc_statuses() {
    let upstream = H2Upstream::with_handler(Builder::new(), serve_calls).await;
    let limited = "[[policy]]\nname = 'p'\nmatch = { path = '/a.Service/**' }\nlimit = { requests = 1, per = '1h' }";
    let proxy = Proxy::start(limited, &upstream.url()).await;
    let (response, mut sending) = start_call(&connect_client(proxy.address).await, "unary").await;
    sending.send_data(encode_message("a"), true).unwrap();
    assert_eq!(
        await_response(response).await.headers()["x-ratelimit-remaining"],
        "0"
    );
    let expected = assert_call_rejected(&proxy, "8").await;
    assert_starts(&expected, "Over the limit of policy \"p\".");

    let closed_port = unused_address();
    let proxy = Proxy::start("", &format!("h2c://{closed_port}")).await;
    assert_call_rejected(&proxy, "14").await;

    let silent = RawUpstream::with_script(|_, mut socket| async move {
        socket
            .send(b"\0\0\0\x04\0\0\0\0\0\0\0\0\x04\x01\0\0\0\0")
            .await;
        socket.read_to_close().await;
    })
    .await;
    let config = "upstream.response_timeout = '200ms'";
    let url = format!("h2c://{}", silent.address);
    let proxy = Proxy::start(config, &url).await;
    let (response, mut sending) = start_call(&connect_client(proxy.address).await, "unary").await;
    sending.send_data(encode_message("a"), true).unwrap();
    let response = await_response(response).await;
    assert_eq!(response.headers()["grpc-status"], "4");
}

#[tokio::test]
async fn a_truncated_call_has_no_status() {
    let release = Arc::new(Semaphore::new(0));
    let waiting = Arc::clone(&release);
    let upstream = H2Upstream::with_handler(Builder::new(), move |mut exchange: H2Exchange| {
        let release = Arc::clone(&waiting);
        async move {
            let response = Response::builder()
                .header("content-type", "application/grpc")
                .body(())
                .unwrap();
            let mut stream = exchange.respond.send_response(response, false).unwrap();
            stream.send_data(encode_message("half"), false).unwrap();
            release.acquire().await.unwrap().forget();
            stream.send_reset(h2::Reason::CANCEL);
        }
    })
    .await;
    let proxy = Proxy::start("", &upstream.url()).await;
    let (response, _sending) = start_call(&connect_client(proxy.address).await, "unary").await;
    let mut stream = await_response(response).await.into_body();
    release.add_permits(1);
    let end = loop {
        match in_time(stream.data()).await {
            Some(Ok(_)) => {}
            end => break end,
        }
    };
    assert!(
        end.is_some_and(|end| end.is_err()),
        "the truncated call looks complete"
    );
}
