//! Responses to uploads that end before the request does reach a client that is still sending.

use crate::support::client::ByteStream;
use crate::support::h2_frames::*;
use crate::support::prelude::*;

const DENY: &str = "[[policy]]\nname = 'deny'\nmatch = { path = '/deny' }\naction = 'deny'";

/// [`DENY`] and TLS with a certificate for localhost.
fn tls_config(authority: &CertificateAuthority) -> String {
    authority.sign("server", "localhost");
    format!(
        "{DENY}\n[listen.tls]\ncert = {:?}\nkey = {:?}",
        authority.path_string("server.pem"),
        authority.path_string("server.key")
    )
}

/// An upstream that refuses each upload after its first bytes and closes.
async fn start_refusing_upstream() -> RawUpstream {
    RawUpstream::with_script(|_, mut socket| async move {
        while !socket.read_chunk().await {}
        socket
            .send(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 3\r\n\r\nbig")
            .await;
        socket.read_to_close().await;
    })
    .await
}

/// Sends an upload and reads nothing meanwhile. Returns the status, and the time after which the
/// connection was reset, unless the whole body was sent.
async fn upload(
    mut stream: impl ByteStream + 'static,
    path: &str,
    body_bytes: usize,
) -> (u16, Option<Duration>) {
    let head =
        format!("PUT {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {body_bytes}\r\n\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let started_at = Instant::now();
    let mut failed_after = None;
    for _ in 0..body_bytes / 10_000 {
        let sent = timeout(TEST_TIMEOUT, stream.write_all(&[b'x'; 10_000])).await;
        if sent.expect("the proxy neither reads nor closes").is_err() {
            failed_after = Some(started_at.elapsed());
            break;
        }
    }
    let response = RawClient::from_stream(stream).read_response().await;
    (response.status, failed_after)
}

async fn connect_tcp(address: SocketAddr) -> TcpStream {
    TcpStream::connect(address).await.unwrap()
}

/// Clients such as curl fail if sending fails before they have read the response.
#[tokio::test]
async fn a_connection_with_an_unfinished_upload_is_not_reset_at_once() {
    let upstream = start_refusing_upstream().await;
    let authority = CertificateAuthority::new();
    let plain_proxy = Proxy::start(DENY, upstream.address).await;
    let tls_proxy = Proxy::start(&tls_config(&authority), upstream.address).await;
    let tls_client = TlsClient::new(&authority);
    for (path, status) in [("/deny", 403), ("/app", 413)] {
        for body_bytes in [8_000_000, 64_000_000] {
            let plain = upload(connect_tcp(plain_proxy.address).await, path, body_bytes).await;
            let encrypted = tls_client.connect(tls_proxy.address, "localhost").await;
            let encrypted = upload(encrypted.unwrap(), path, body_bytes).await;
            for (name, (received, failed_after)) in [("plain", plain), ("TLS", encrypted)] {
                println!("{name} {path} {body_bytes}: {failed_after:?}");
                assert_eq!(received, status, "{name} {path} {body_bytes}");
                assert!(
                    failed_after.is_none_or(|time| time > Duration::from_secs(1)),
                    "{name} {path} {body_bytes}: reset after {failed_after:?}"
                );
            }
        }
    }
}

/// Reads one HTTP/2 frame: kind, flags and stream.
async fn read_frame(stream: &mut (impl ByteStream + 'static)) -> (u8, u8, u32) {
    let mut head = [0; 9];
    let read = timeout(TEST_TIMEOUT, stream.read_exact(&mut head)).await;
    read.expect("no frame in time").expect("connection closed");
    let mut payload = vec![0; usize::from(head[1]) << 8 | usize::from(head[2])];
    stream.read_exact(&mut payload).await.unwrap();
    let stream = u32::from_be_bytes(head[5..].try_into().unwrap());
    (head[3], head[4], stream)
}

/// Stock clients such as curl 7.88 lose a response that arrives together with a reset.
#[tokio::test]
async fn an_unfinished_http2_upload_over_tls_is_not_reset_at_once() {
    let upstream = start_refusing_upstream().await;
    let authority = CertificateAuthority::new();
    let proxy = Proxy::start(&tls_config(&authority), upstream.address).await;
    let client = TlsClient::new(&authority).with_alpn(&["h2"]);
    for path in ["/deny", "/app"] {
        let mut stream = client.connect(proxy.address, "localhost").await.unwrap();
        let fields = get_fields_with(":path", path);
        let mut upload = [PREFACE, &encode_frame(SETTINGS, 0, 0, "")].concat();
        upload.extend(request_head_frame(1, &fields));
        upload.extend(data_frame(1, [0; 16_000]));
        stream.write_all(&upload).await.unwrap();
        let mut ended_at = None;
        let reset_at = loop {
            match read_frame(&mut stream).await {
                (DATA, flags, 1) if flags & END_STREAM != 0 => ended_at = Some(Instant::now()),
                (RST_STREAM, _, 1) => break Instant::now(),
                _ => {}
            }
        };
        let delay = reset_at - ended_at.expect("a response before the reset");
        assert!(delay > Duration::from_millis(500), "{path}: {delay:?}");
    }
}

/// The client of a full-duplex request may send all before it reads anything.
#[tokio::test]
async fn an_upload_goes_on_while_the_client_does_not_read_the_response() {
    const BODY_BYTES: usize = 32 << 20;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let upstream = tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        let mut chunk = vec![0; 64 * 1024];
        assert!(socket.read(&mut chunk).await.unwrap() > 0);
        let head = format!("HTTP/1.1 200 OK\r\nContent-Length: {BODY_BYTES}\r\n\r\n");
        socket.write_all(head.as_bytes()).await.unwrap();
        let (mut reader, mut writer) = socket.into_split();
        let response = tokio::spawn(async move {
            let chunk = [b'r'; 64 * 1024];
            for _ in 0..BODY_BYTES / chunk.len() {
                writer.write_all(&chunk).await.unwrap();
            }
            writer
        });
        while !chunk.ends_with(b"end") {
            chunk.resize(64 * 1024, 0);
            let read = reader.read(&mut chunk).await.unwrap();
            assert!(read > 0, "the upload was cut off");
            chunk.truncate(read);
        }
        drop(response.await.unwrap());
    });
    let proxy = Proxy::start("", address).await;
    let mut client = connect_tcp(proxy.address).await;
    let head = format!("PUT / HTTP/1.1\r\nHost: a\r\nContent-Length: {BODY_BYTES}\r\n\r\n");
    client.write_all(head.as_bytes()).await.unwrap();
    let mut body = vec![b'u'; BODY_BYTES];
    body.splice(BODY_BYTES - 3.., *b"end");
    let sent = timeout(TEST_TIMEOUT, client.write_all(&body)).await;
    sent.expect("the proxy does not read on").unwrap();
    let mut response = vec![0; BODY_BYTES];
    let read = timeout(TEST_TIMEOUT, client.read_exact(&mut response)).await;
    read.expect("the response stops").unwrap();
    upstream.await.unwrap();
}
