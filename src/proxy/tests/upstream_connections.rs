//! New and reused upstream connections: selection, retries and limits.

use super::support::*;
use super::upstreams::{OK_RESPONSE, post_request};
use crate::proxy::*;
use std::net::TcpListener as StdListener;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::net::TcpStream;
use tokio::sync::{Barrier, Notify};

#[tokio::test]
async fn a_retry_uses_a_new_connection() {
    let both = Arc::new(Barrier::new(2));
    let (addr, connections) = start_upstream(move |mut client, n| {
        let both = Arc::clone(&both);
        async move {
            if n >= 2 {
                return client.serve_response(OK_RESPONSE).await;
            }
            client.read_head().await;
            both.wait().await;
            client.send(OK_RESPONSE).await;
            client.read_head().await;
        }
    })
    .await;
    let server = RunningServer::start_forwarding(&listen_settings(), upstream_settings(addr));
    let (mut one, mut two) = (server.connect().await, server.connect().await);
    tokio::join!(one.request(GET), two.request(GET));
    assert!(
        one.request(GET).await.ends_with("ok"),
        "both idle connections were dead"
    );
    assert_eq!(connections.load(Ordering::SeqCst), 3);
}

/// Handler that blocks its worker before a request if a receiver is set.
struct StallingHandler(
    Rc<UpstreamClient>,
    Arc<std::sync::Mutex<Option<std::sync::mpsc::Receiver<()>>>>,
);

impl RequestHandler for StallingHandler {
    async fn handle(
        &self,
        head: &mut ::http::request::Parts,
        mut body: RequestBody,
        _: &ConnectionPeer,
        interim: &mut InformationalForwarder,
    ) -> ::http::Response<ResponseBody> {
        let stall = self.1.lock().unwrap().take();
        if let Some(stall) = stall {
            stall.recv().unwrap();
        }
        match self
            .0
            .send(
                (head, &mut body, false),
                || [127, 0, 0, 1].into(),
                tokio::time::Instant::now(),
                interim,
                &Default::default(),
            )
            .await
        {
            Ok(response) => response,
            Err(error) => text_response(::http::StatusCode::BAD_GATEWAY, error.kind.into_str()),
        }
    }
}

#[tokio::test]
async fn a_non_idempotent_request_is_not_sent_on_a_closed_connection() {
    let (leave, left) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (leaves, leaving) = (Arc::clone(&leave), Arc::clone(&left));
    let (addr, connections) = start_upstream(move |mut client, n| {
        let (leave, left) = (Arc::clone(&leaves), Arc::clone(&leaving));
        async move {
            if n == 1 {
                return client.serve_response(OK_RESPONSE).await;
            }
            client.read_head().await;
            client.send(OK_RESPONSE).await;
            leave.notified().await;
            drop(client);
            left.notify_one();
        }
    })
    .await;
    let (shared, stall) = (
        UpstreamSharedState::new(upstream_settings(addr), 1).unwrap(),
        Arc::default(),
    );
    let stalling = Arc::clone(&stall);
    let server = RunningServer::start(&listen_settings(), immediate_shutdown(), move |_| {
        let (shared, stall) = (Arc::clone(&shared), Arc::clone(&stalling));
        async move { Rc::new(StallingHandler(UpstreamClient::new(shared), stall)) }
    });
    let mut client = server.connect().await;
    assert!(
        client
            .request(&post_request("content-length: 0"))
            .await
            .ends_with("ok")
    );
    // The idle connection closes while the worker is busy with the request that selects it.
    let (go_on, stalled) = std::sync::mpsc::sync_channel(1);
    stall.lock().unwrap().replace(stalled);
    client.send(&post_request("content-length: 3")).await;
    client.send(b"abc").await;
    wait_until(|| stall.lock().unwrap().is_none()).await;
    leave.notify_one();
    with_timeout(left.notified()).await;
    go_on.send(()).unwrap();
    assert!(client.read_response().await.ends_with("ok"));
    assert_eq!(connections.load(Ordering::SeqCst), 2);
}

/// Listener with a full backlog: further connection attempts get no answer until the returned
/// connections are accepted.
async fn listen_with_full_backlog() -> (StdListener, Vec<TcpStream>) {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket
        .bind(&std::net::SocketAddr::from(([127, 0, 0, 1], 0)).into())
        .unwrap();
    socket.listen(0).unwrap();
    let listener = StdListener::from(socket);
    let address = listener.local_addr().unwrap();
    let mut waiting = Vec::new();
    while let Ok(connected) = tokio::time::timeout(ms(200), TcpStream::connect(address)).await {
        waiting.push(connected.unwrap());
    }
    (listener, waiting)
}

#[tokio::test]
async fn a_connect_timeout_is_retried() {
    let (listener, waiting) = listen_with_full_backlog().await;
    let settings = UpstreamSettings {
        // Shorter than the kernel's first SYN retransmission.
        connect_timeout: ms(600),
        ..upstream_settings(listener.local_addr().unwrap())
    };
    let server = RunningServer::start_forwarding(&listen_settings(), settings.clone());
    assert!(
        server
            .connect()
            .await
            .request(GET)
            .await
            .ends_with("connect_timeout")
    );
    let server = RunningServer::start_forwarding(
        &listen_settings(),
        UpstreamSettings {
            retry_connect: 1,
            ..settings
        },
    );
    let mut client = server.connect().await;
    client.send(&post_request("content-length: 3")).await;
    client.send(b"abc").await;
    tokio::time::sleep(ms(200)).await;
    listener.set_nonblocking(true).unwrap();
    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
    for _ in &waiting {
        drop(with_timeout(listener.accept()).await.unwrap());
    }
    let answering = tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let mut upstream = RawTestClient(socket);
            if upstream.read_head().await.is_some() {
                upstream.send(OK_RESPONSE).await;
                upstream.read_to_end().await;
            }
        }
    });
    assert!(client.read_response().await.ends_with("ok"));
    answering.abort();
}

#[tokio::test]
async fn a_client_disconnect_cancels_its_pending_connect() {
    let (listener, _waiting) = listen_with_full_backlog().await;
    let settings = UpstreamSettings {
        connect_timeout: ms(3000),
        max_connections: 1,
        queue_timeout: ms(300),
        ..upstream_settings(listener.local_addr().unwrap())
    };
    let server = RunningServer::start_forwarding(&listen_settings(), settings);
    let mut first = server.connect().await;
    first.send(GET).await;
    tokio::time::sleep(ms(100)).await;
    drop(first);
    wait_until(|| server.load.open_connections() == 0).await;
    let answer = server.connect().await.request(GET).await;
    assert!(
        answer.ends_with("connect_timeout"),
        "the connection slot is still taken: {answer}"
    );
}

#[tokio::test]
async fn idle_connections_above_the_pool_limit_are_closed() {
    let (open, together) = (Arc::new(AtomicUsize::new(0)), Arc::new(Barrier::new(3)));
    let counted = Arc::clone(&open);
    let (addr, _) = start_upstream(move |mut client, _| {
        let (open, together) = (Arc::clone(&counted), Arc::clone(&together));
        async move {
            open.fetch_add(1, Ordering::SeqCst);
            client.read_head().await;
            together.wait().await;
            client.send(OK_RESPONSE).await;
            client.read_to_end().await;
            open.fetch_sub(1, Ordering::SeqCst);
        }
    })
    .await;
    let server = RunningServer::start_forwarding(
        &listen_settings(),
        UpstreamSettings {
            pool_max_idle: 1,
            ..upstream_settings(addr)
        },
    );
    let mut clients = [
        server.connect().await,
        server.connect().await,
        server.connect().await,
    ];
    for client in &mut clients {
        client.send(GET).await;
    }
    for client in &mut clients {
        assert!(client.read_response().await.ends_with("ok"));
    }
    wait_until(|| open.load(Ordering::SeqCst) == 1).await;
}
