//! Shutdown: active requests finish, idle connections close, overdue connections are cut.

use super::support::*;
use crate::proxy::*;
use ::http::{Request, StatusCode, request};
use bytes::Bytes;
use http_body_util::{BodyExt, Empty};
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::rc::Rc;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

/// Starts a server on which every request waits for a permit.
fn start_gated_server(
    listen: &ListenSettings,
    shutdown: ShutdownSettings,
) -> (RunningServer, Arc<Semaphore>) {
    struct GatedHandler(Arc<Semaphore>);
    impl RequestHandler for GatedHandler {
        async fn handle(
            &self,
            _: &mut request::Parts,
            _: RequestBody,
            _: &ConnectionPeer,
            _: &mut InformationalForwarder,
        ) -> ::http::Response<ResponseBody> {
            self.0.acquire().await.unwrap().forget();
            text_response(StatusCode::OK, "done")
        }
    }
    let permits = Arc::new(Semaphore::new(0));
    let shared = Arc::clone(&permits);
    let server = RunningServer::start(listen, shutdown, move |_| {
        let permits = Arc::clone(&shared);
        async move { Rc::new(GatedHandler(permits)) }
    });
    (server, permits)
}

#[tokio::test]
async fn draining_finishes_active_requests_and_closes_idle_connections() {
    let shutdown = ShutdownSettings {
        delay: ms(300),
        grace: ms(4000),
    };
    let (mut server, permits) = start_gated_server(
        &ListenSettings {
            threads: 2,
            ..listen_settings()
        },
        shutdown,
    );
    let (mut silent, mut idle, mut busy) = (
        server.connect().await,
        server.connect().await,
        server.connect().await,
    );
    permits.add_permits(1);
    idle.request(GET).await;
    busy.send(GET).await;
    let io = TokioIo::new(server.connect().await.0);
    let (mut sender, h2) = hyper::client::conn::http2::handshake(TokioExecutor::new(), io)
        .await
        .unwrap();
    let h2 = tokio::spawn(h2);
    let request = Request::get("http://a/")
        .body(Empty::<Bytes>::new())
        .unwrap();
    let stream = tokio::spawn(sender.send_request(request));
    wait_until(|| server.load.open_connections() == 4).await;

    server.shutdown_signal.send_replace(ShutdownSignal::Drain);
    let mut late = server.connect().await;
    late.send(GET).await;
    assert_eq!(silent.read_to_end().await, "");
    assert_eq!(idle.read_to_end().await, "");
    TcpStream::connect(server.addr)
        .await
        .expect_err("the listener must be closed");
    assert!(!server.task.is_finished());
    permits.add_permits(3);
    for client in [&mut busy, &mut late] {
        let answer = client.read_to_end().await;
        assert!(
            answer.starts_with("HTTP/1.1 200") && answer.contains("connection: close"),
            "{answer}"
        );
    }
    let response = with_timeout(stream).await.unwrap().unwrap();
    assert_eq!(
        with_timeout(response.into_body().collect())
            .await
            .unwrap()
            .to_bytes(),
        "done"
    );
    with_timeout(h2).await.unwrap().unwrap();
    assert_eq!(with_timeout(&mut server.task).await.unwrap().unwrap(), 0);
}

#[tokio::test]
async fn connections_open_after_the_grace_period_are_cut_and_counted() {
    let (mut server, _permits) = start_gated_server(
        &listen_settings(),
        ShutdownSettings {
            delay: ms(0),
            grace: ms(50),
        },
    );
    let mut clients = [server.connect().await, server.connect().await];
    for client in &mut clients {
        client.send(GET).await;
    }
    wait_until(|| server.load.open_connections() == 2).await;
    server.shutdown_signal.send_replace(ShutdownSignal::Drain);
    assert_eq!(with_timeout(&mut server.task).await.unwrap().unwrap(), 2);
    assert_eq!(clients[0].read_to_end().await, "");
    assert_eq!(server.load.open_connections(), 0);
}

#[tokio::test]
async fn a_second_signal_stops_at_once() {
    let minute = ms(60_000);
    let (mut server, _permits) = start_gated_server(
        &listen_settings(),
        ShutdownSettings {
            delay: minute,
            grace: minute,
        },
    );
    let mut client = server.connect().await;
    client.send(GET).await;
    wait_until(|| server.load.open_connections() == 1).await;
    server.shutdown_signal.send_replace(ShutdownSignal::Drain);
    tokio::time::sleep(ms(20)).await;
    server
        .shutdown_signal
        .send_replace(ShutdownSignal::Immediate);
    assert_eq!(with_timeout(&mut server.task).await.unwrap().unwrap(), 1);
}

#[tokio::test]
async fn a_stop_before_the_handlers_are_ready_takes_effect() {
    struct PendingHandler;
    impl RequestHandler for PendingHandler {
        async fn handle(
            &self,
            _: &mut request::Parts,
            _: RequestBody,
            _: &ConnectionPeer,
            _: &mut InformationalForwarder,
        ) -> ::http::Response<ResponseBody> {
            std::future::pending().await
        }
    }
    let mut server = RunningServer::start(&listen_settings(), immediate_shutdown(), |_| async {
        tokio::time::sleep(ms(100)).await;
        Rc::new(PendingHandler)
    });
    server.shutdown_signal.send_replace(ShutdownSignal::Drain);
    assert_eq!(with_timeout(&mut server.task).await.unwrap().unwrap(), 0);
}

#[tokio::test]
async fn connections_in_the_backlog_at_shutdown_are_served() {
    let (mut server, permits) = start_gated_server(
        &listen_settings(),
        ShutdownSettings {
            delay: ms(0),
            grace: ms(4000),
        },
    );
    permits.add_permits(6);
    server.connect().await.request(GET).await;
    // Without an await in between, the acceptor does not run: these connections wait in the kernel.
    let mut waiting: Vec<_> = (0..5)
        .map(|_| std::net::TcpStream::connect(server.addr).unwrap())
        .collect();
    for client in &mut waiting {
        std::io::Write::write_all(client, GET).unwrap();
    }
    server.shutdown_signal.send_replace(ShutdownSignal::Drain);
    for client in waiting {
        client.set_nonblocking(true).unwrap();
        let answer = RawTestClient(TcpStream::from_std(client).unwrap())
            .read_to_end()
            .await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer:?}");
    }
    assert_eq!(with_timeout(&mut server.task).await.unwrap().unwrap(), 0);
}

#[tokio::test]
async fn connections_in_the_backlog_at_shutdown_are_served_by_a_busy_worker() {
    // More connections than a worker's queue holds.
    const MANY: usize = 400;
    let (release, busy) = std::sync::mpsc::sync_channel::<()>(1);
    let busy = Arc::new(std::sync::Mutex::new(Some(busy)));
    let is_taken = Arc::clone(&busy);
    let shutdown = ShutdownSettings {
        delay: ms(0),
        grace: ms(10_000),
    };
    let mut server = RunningServer::start(
        &ListenSettings {
            max_connections: 1000,
            ..listen_settings()
        },
        shutdown,
        move |_| {
            let busy = Arc::clone(&busy);
            async move { Rc::new(BlockingHandler(busy)) }
        },
    );
    let mut first = server.connect().await;
    first.send(GET).await;
    wait_until(|| is_taken.lock().unwrap().is_none()).await;
    let mut waiting = Vec::new();
    for _ in 0..MANY {
        let mut client = server.connect().await;
        client.send(GET).await;
        waiting.push(client);
    }
    server.shutdown_signal.send_replace(ShutdownSignal::Drain);
    // The drain has begun once the listener is closed.
    wait_until(|| std::net::TcpStream::connect(server.addr).is_err()).await;
    release.send(()).unwrap();
    for mut client in waiting.into_iter().chain([first]) {
        let answer = client.read_to_end().await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer:?}");
    }
    assert_eq!(with_timeout(&mut server.task).await.unwrap().unwrap(), 0);
}

#[tokio::test]
async fn a_request_that_arrives_during_shutdown_is_served() {
    let busy = Arc::<std::sync::Mutex<Option<_>>>::default();
    let blocking = Arc::clone(&busy);
    let shutdown = ShutdownSettings {
        delay: ms(0),
        grace: ms(10_000),
    };
    let mut server = RunningServer::start(&listen_settings(), shutdown, move |_| {
        let busy = Arc::clone(&blocking);
        async move { Rc::new(BlockingHandler(busy)) }
    });
    let (mut idle, mut recently_active, mut first) = (
        server.connect().await,
        server.connect().await,
        server.connect().await,
    );
    idle.request(GET).await;
    tokio::time::sleep(ms(300)).await;
    recently_active.request(GET).await;
    let (release, wait) = std::sync::mpsc::sync_channel::<()>(1);
    busy.lock().unwrap().replace(wait);
    first.send(GET).await;
    wait_until(|| busy.lock().unwrap().is_none()).await;
    // Both requests are in the kernel when the drain begins: the busy worker has not read them.
    idle.send(GET).await;
    recently_active.send(GET).await;
    server.shutdown_signal.send_replace(ShutdownSignal::Drain);
    wait_until(|| std::net::TcpStream::connect(server.addr).is_err()).await;
    tokio::time::sleep(ms(50)).await;
    release.send(()).unwrap();
    for mut client in [idle, recently_active, first] {
        let answer = client.read_to_end().await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer:?}");
    }
    assert_eq!(with_timeout(&mut server.task).await.unwrap().unwrap(), 0);
}

#[tokio::test]
async fn a_connection_in_its_handshake_at_shutdown_may_send_one_request() {
    let settings = ListenSettings {
        proxy_protocol_from: Some(vec!["127.0.0.0/8".parse().unwrap()]),
        ..listen_settings()
    };
    let (mut server, permits) = start_gated_server(
        &settings,
        ShutdownSettings {
            delay: ms(0),
            grace: ms(10_000),
        },
    );
    permits.add_permits(1);
    let mut client = server.connect().await;
    wait_until(|| server.load.open_connections() == 1).await;
    server.shutdown_signal.send_replace(ShutdownSignal::Drain);
    wait_until(|| std::net::TcpStream::connect(server.addr).is_err()).await;
    tokio::time::sleep(ms(50)).await;
    client.send(b"PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\n").await;
    // The request arrives one round trip later.
    tokio::time::sleep(ms(50)).await;
    client.send(GET).await;
    let answer = client.read_to_end().await;
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains("connection: close"),
        "{answer:?}"
    );
    assert_eq!(with_timeout(&mut server.task).await.unwrap().unwrap(), 0);
}

#[tokio::test]
async fn a_partial_request_at_shutdown_may_be_completed() {
    let (mut server, permits) = start_gated_server(
        &listen_settings(),
        ShutdownSettings {
            delay: ms(0),
            grace: ms(10_000),
        },
    );
    permits.add_permits(1);
    let mut client = server.connect().await;
    // This byte could begin the HTTP/2 preface.
    client.send(b"P").await;
    wait_until(|| server.load.open_connections() == 1).await;
    server.shutdown_signal.send_replace(ShutdownSignal::Drain);
    wait_until(|| std::net::TcpStream::connect(server.addr).is_err()).await;
    tokio::time::sleep(ms(50)).await;
    client
        .send(b"UT / HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n")
        .await;
    let answer = client.read_response().await;
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains("connection: close"),
        "{answer:?}"
    );
    assert_eq!(with_timeout(&mut server.task).await.unwrap().unwrap(), 0);
}

/// Handler that blocks its worker during the first request, until the test releases it.
struct BlockingHandler(Arc<std::sync::Mutex<Option<std::sync::mpsc::Receiver<()>>>>);

impl RequestHandler for BlockingHandler {
    async fn handle(
        &self,
        _: &mut request::Parts,
        _: RequestBody,
        _: &ConnectionPeer,
        _: &mut InformationalForwarder,
    ) -> ::http::Response<ResponseBody> {
        let busy = self.0.lock().unwrap().take();
        if let Some(busy) = busy {
            busy.recv().unwrap();
        }
        text_response(StatusCode::OK, "done")
    }
}

#[tokio::test]
async fn a_hanging_dns_lookup_does_not_delay_shutdown() {
    let mut server = RunningServer::start_with_fn(&listen_settings(), |_, _| async {
        // Simulates a resolver that does not answer.
        drop(tokio::task::spawn_blocking(|| {
            std::thread::sleep(ms(60_000))
        }));
        text_response(StatusCode::OK, "")
    });
    server.connect().await.request(GET).await;
    server
        .shutdown_signal
        .send_replace(ShutdownSignal::Immediate);
    with_timeout(&mut server.task).await.unwrap().unwrap();
}
