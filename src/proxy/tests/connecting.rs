//! New connections to the upstream and used ones: which one a request gets, and what becomes of it if there is none.

use super::support::*;
use super::upstreams::{OK, post};
use crate::proxy::*;
use std::net::TcpListener as StdListener;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::net::TcpStream;
use tokio::sync::{Barrier, Notify};

#[tokio::test]
async fn what_is_tried_once_more_goes_by_a_new_connection() {
    let both = Arc::new(Barrier::new(2));
    let (addr, connections) = upstream(move |mut client, n| {
        let both = Arc::clone(&both);
        async move {
            if n >= 2 {
                return client.serve(OK).await;
            }
            client.head().await;
            both.wait().await;
            client.send(OK).await;
            client.head().await;
        }
    })
    .await;
    let server = Running::forwarding(&listen(), upstream_at(addr));
    let (mut one, mut two) = (server.connect().await, server.connect().await);
    tokio::join!(one.ask(GET), two.ask(GET));
    assert!(
        one.ask(GET).await.ends_with("ok"),
        "two were idle, and both had died"
    );
    assert_eq!(connections.load(Ordering::SeqCst), 3);
}

/// Holds up its whole worker before a request, if it is told to.
struct Stalling(
    Upstream,
    Arc<std::sync::Mutex<Option<std::sync::mpsc::Receiver<()>>>>,
);

impl Handler for Stalling {
    async fn handle(
        self: Rc<Self>,
        request: http::Request<RequestBody>,
        _: Arc<Peer>,
        mut interim: Interim,
    ) -> http::Response<ResponseBody> {
        let stall = self.1.lock().unwrap().take();
        if let Some(stall) = stall {
            stall.recv().unwrap();
        }
        match self
            .0
            .send(request, tokio::time::Instant::now(), &mut interim)
            .await
        {
            Ok(response) => response,
            Err(error) => text(http::StatusCode::BAD_GATEWAY, error.kind.name()),
        }
    }
}

#[tokio::test]
async fn what_cannot_be_sent_twice_is_not_sent_to_one_who_has_left() {
    let (leave, left) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (leaves, leaving) = (Arc::clone(&leave), Arc::clone(&left));
    let (addr, connections) = upstream(move |mut client, n| {
        let (leave, left) = (Arc::clone(&leaves), Arc::clone(&leaving));
        async move {
            if n == 1 {
                return client.serve(OK).await;
            }
            client.head().await;
            client.send(OK).await;
            leave.notified().await;
            drop(client);
            left.notify_one();
        }
    })
    .await;
    let (shared, stall) = (Shared::new(upstream_at(addr), 1).unwrap(), Arc::default());
    let stalling = Arc::clone(&stall);
    let server = Running::start(&listen(), at_once(), move |_| {
        let (shared, stall) = (Arc::clone(&shared), Arc::clone(&stalling));
        async move { Rc::new(Stalling(Upstream::new(shared), stall)) }
    });
    let mut client = server.connect().await;
    assert!(client.ask(&post("content-length: 0")).await.ends_with("ok"));
    // The connection is idle; its end comes while the worker is busy with the request that takes it.
    let (go_on, stalled) = std::sync::mpsc::sync_channel(1);
    stall.lock().unwrap().replace(stalled);
    client.send(&post("content-length: 3")).await;
    client.send(b"abc").await;
    eventually(|| stall.lock().unwrap().is_none()).await;
    leave.notify_one();
    soon(left.notified()).await;
    go_on.send(()).unwrap();
    assert!(client.response().await.ends_with("ok"));
    assert_eq!(connections.load(Ordering::SeqCst), 2);
}

/// An address with no room for more connections: whoever tries hears nothing. Dropping the second makes room.
async fn crowded() -> (StdListener, Vec<TcpStream>) {
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
async fn connecting_is_tried_again_when_it_took_too_long() {
    let (listener, waiting) = crowded().await;
    let settings = UpstreamSettings {
        // Before the kernel itself tries again.
        connect_timeout: ms(600),
        ..upstream_at(listener.local_addr().unwrap())
    };
    let server = Running::forwarding(&listen(), settings.clone());
    assert!(
        server
            .connect()
            .await
            .ask(GET)
            .await
            .ends_with("connect_timeout")
    );
    let server = Running::forwarding(
        &listen(),
        UpstreamSettings {
            retry_connect: 1,
            ..settings
        },
    );
    let mut client = server.connect().await;
    client.send(&post("content-length: 3")).await;
    client.send(b"abc").await;
    tokio::time::sleep(ms(200)).await;
    listener.set_nonblocking(true).unwrap();
    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
    for _ in &waiting {
        drop(soon(listener.accept()).await.unwrap());
    }
    let answering = tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let mut upstream = Client(socket);
            if upstream.head().await.is_some() {
                upstream.send(OK).await;
                upstream.rest().await;
            }
        }
    });
    assert!(client.response().await.ends_with("ok"));
    answering.abort();
}

#[tokio::test]
async fn a_client_that_leaves_ends_what_is_connecting_for_it() {
    let (listener, _waiting) = crowded().await;
    let settings = UpstreamSettings {
        connect_timeout: ms(3000),
        max_connections: 1,
        queue_timeout: ms(300),
        ..upstream_at(listener.local_addr().unwrap())
    };
    let server = Running::forwarding(&listen(), settings);
    let mut first = server.connect().await;
    first.send(GET).await;
    tokio::time::sleep(ms(100)).await;
    drop(first);
    eventually(|| server.load.connections() == 0).await;
    let answer = server.connect().await.ask(GET).await;
    assert!(
        answer.ends_with("connect_timeout"),
        "somebody is still in the way: {answer}"
    );
}

#[tokio::test]
async fn no_more_connections_than_wanted_stay_idle() {
    let (open, together) = (Arc::new(AtomicUsize::new(0)), Arc::new(Barrier::new(3)));
    let counted = Arc::clone(&open);
    let (addr, _) = upstream(move |mut client, _| {
        let (open, together) = (Arc::clone(&counted), Arc::clone(&together));
        async move {
            open.fetch_add(1, Ordering::SeqCst);
            client.head().await;
            together.wait().await;
            client.send(OK).await;
            client.rest().await;
            open.fetch_sub(1, Ordering::SeqCst);
        }
    })
    .await;
    let server = Running::forwarding(
        &listen(),
        UpstreamSettings {
            pool_max_idle: 1,
            ..upstream_at(addr)
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
        assert!(client.response().await.ends_with("ok"));
    }
    eventually(|| open.load(Ordering::SeqCst) == 1).await;
}
