//! The end: what is in flight finishes, what is idle closes, what takes too long is cut.

use super::support::*;
use crate::proxy::*;
use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper_util::rt::{TokioExecutor, TokioIo};
use std::rc::Rc;
use std::sync::Arc;
use tokio::net::TcpStream;
use tokio::sync::Semaphore;

/// Every request waits for a permit.
fn gated(listen: &ListenSettings, shutdown: ShutdownSettings) -> (Running, Arc<Semaphore>) {
    struct Gated(Arc<Semaphore>);
    impl Handler for Gated {
        async fn handle(
            self: Rc<Self>,
            _: Request<RequestBody>,
            _: Arc<Peer>,
            _: Interim,
        ) -> http::Response<ResponseBody> {
            self.0.acquire().await.unwrap().forget();
            text(StatusCode::OK, "done")
        }
    }
    let gate = Arc::new(Semaphore::new(0));
    let shared = Arc::clone(&gate);
    let server = Running::start(listen, shutdown, move |_| {
        let gate = Arc::clone(&shared);
        async move { Rc::new(Gated(gate)) }
    });
    (server, gate)
}

#[tokio::test]
async fn draining_finishes_what_is_in_flight_and_closes_what_is_idle() {
    let shutdown = ShutdownSettings {
        delay: ms(300),
        grace: ms(4000),
    };
    let (mut server, gate) = gated(
        &ListenSettings {
            threads: 2,
            ..listen()
        },
        shutdown,
    );
    let (mut silent, mut idle, mut busy) = (
        server.connect().await,
        server.connect().await,
        server.connect().await,
    );
    gate.add_permits(1);
    idle.ask(GET).await;
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
    eventually(|| server.load.connections() == 4).await;

    server.stop.send_replace(Stop::Drain);
    let mut late = server.connect().await;
    late.send(GET).await;
    assert_eq!(silent.rest().await, "");
    assert_eq!(idle.rest().await, "");
    TcpStream::connect(server.addr)
        .await
        .expect_err("nobody listens any more");
    assert!(!server.ended.is_finished());
    gate.add_permits(3);
    for client in [&mut busy, &mut late] {
        let answer = client.rest().await;
        assert!(
            answer.starts_with("HTTP/1.1 200") && answer.contains("connection: close"),
            "{answer}"
        );
    }
    let response = soon(stream).await.unwrap().unwrap();
    assert_eq!(
        soon(response.into_body().collect())
            .await
            .unwrap()
            .to_bytes(),
        "done"
    );
    soon(h2).await.unwrap().unwrap();
    assert_eq!(soon(&mut server.ended).await.unwrap().unwrap(), 0);
}

#[tokio::test]
async fn what_outlasts_the_grace_is_cut_and_counted() {
    let (mut server, _gate) = gated(
        &listen(),
        ShutdownSettings {
            delay: ms(0),
            grace: ms(50),
        },
    );
    let mut clients = [server.connect().await, server.connect().await];
    for client in &mut clients {
        client.send(GET).await;
    }
    eventually(|| server.load.connections() == 2).await;
    server.stop.send_replace(Stop::Drain);
    assert_eq!(soon(&mut server.ended).await.unwrap().unwrap(), 2);
    assert_eq!(clients[0].rest().await, "");
    assert_eq!(server.load.connections(), 0);
}

#[tokio::test]
async fn a_second_signal_ends_at_once() {
    let minute = ms(60_000);
    let (mut server, _gate) = gated(
        &listen(),
        ShutdownSettings {
            delay: minute,
            grace: minute,
        },
    );
    let mut client = server.connect().await;
    client.send(GET).await;
    eventually(|| server.load.connections() == 1).await;
    server.stop.send_replace(Stop::Drain);
    tokio::time::sleep(ms(20)).await;
    server.stop.send_replace(Stop::Now);
    assert_eq!(soon(&mut server.ended).await.unwrap().unwrap(), 1);
}

#[tokio::test]
async fn a_stop_before_the_handlers_are_ready_is_heard() {
    struct Never;
    impl Handler for Never {
        async fn handle(
            self: Rc<Self>,
            _: Request<RequestBody>,
            _: Arc<Peer>,
            _: Interim,
        ) -> http::Response<ResponseBody> {
            std::future::pending().await
        }
    }
    let mut server = Running::start(&listen(), at_once(), |_| async {
        tokio::time::sleep(ms(100)).await;
        Rc::new(Never)
    });
    server.stop.send_replace(Stop::Drain);
    assert_eq!(soon(&mut server.ended).await.unwrap().unwrap(), 0);
}

#[tokio::test]
async fn who_connected_before_the_end_is_served() {
    let (mut server, gate) = gated(
        &listen(),
        ShutdownSettings {
            delay: ms(0),
            grace: ms(4000),
        },
    );
    gate.add_permits(6);
    server.connect().await.ask(GET).await;
    // Without an await between, the acceptor has no turn: these wait in the kernel.
    let mut waiting: Vec<_> = (0..5)
        .map(|_| std::net::TcpStream::connect(server.addr).unwrap())
        .collect();
    for client in &mut waiting {
        std::io::Write::write_all(client, GET).unwrap();
    }
    server.stop.send_replace(Stop::Drain);
    for client in waiting {
        client.set_nonblocking(true).unwrap();
        let answer = Client(TcpStream::from_std(client).unwrap()).rest().await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer:?}");
    }
    assert_eq!(soon(&mut server.ended).await.unwrap().unwrap(), 0);
}

#[tokio::test]
async fn who_connected_before_the_end_is_served_by_a_busy_worker_too() {
    // More than a worker's queue holds.
    const MANY: usize = 400;
    let (release, busy) = std::sync::mpsc::sync_channel::<()>(1);
    let busy = Arc::new(std::sync::Mutex::new(Some(busy)));
    let is_taken = Arc::clone(&busy);
    let shutdown = ShutdownSettings {
        delay: ms(0),
        grace: ms(10_000),
    };
    let mut server = Running::start(
        &ListenSettings {
            max_connections: 1000,
            ..listen()
        },
        shutdown,
        move |_| {
            let busy = Arc::clone(&busy);
            async move { Rc::new(Blocking(busy)) }
        },
    );
    let mut first = server.connect().await;
    first.send(GET).await;
    eventually(|| is_taken.lock().unwrap().is_none()).await;
    let mut waiting = Vec::new();
    for _ in 0..MANY {
        let mut client = server.connect().await;
        client.send(GET).await;
        waiting.push(client);
    }
    server.stop.send_replace(Stop::Drain);
    // The end has begun: nobody can connect.
    eventually(|| std::net::TcpStream::connect(server.addr).is_err()).await;
    release.send(()).unwrap();
    for mut client in waiting.into_iter().chain([first]) {
        let answer = client.rest().await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer:?}");
    }
    assert_eq!(soon(&mut server.ended).await.unwrap().unwrap(), 0);
}

#[tokio::test]
async fn a_request_that_crosses_the_end_is_served() {
    let busy = Arc::<std::sync::Mutex<Option<_>>>::default();
    let blocking = Arc::clone(&busy);
    let shutdown = ShutdownSettings {
        delay: ms(0),
        grace: ms(10_000),
    };
    let mut server = Running::start(&listen(), shutdown, move |_| {
        let busy = Arc::clone(&blocking);
        async move { Rc::new(Blocking(busy)) }
    });
    let (mut rested, mut awake, mut first) = (
        server.connect().await,
        server.connect().await,
        server.connect().await,
    );
    rested.ask(GET).await;
    tokio::time::sleep(ms(300)).await;
    awake.ask(GET).await;
    let (release, wait) = std::sync::mpsc::sync_channel::<()>(1);
    busy.lock().unwrap().replace(wait);
    first.send(GET).await;
    eventually(|| busy.lock().unwrap().is_none()).await;
    // Both are in the kernel, where the busy worker has not looked, when it is told to end.
    rested.send(GET).await;
    awake.send(GET).await;
    server.stop.send_replace(Stop::Drain);
    eventually(|| std::net::TcpStream::connect(server.addr).is_err()).await;
    tokio::time::sleep(ms(50)).await;
    release.send(()).unwrap();
    for mut client in [rested, awake, first] {
        let answer = client.rest().await;
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer:?}");
    }
    assert_eq!(soon(&mut server.ended).await.unwrap().unwrap(), 0);
}

#[tokio::test]
async fn who_is_still_coming_in_at_the_end_may_ask() {
    let settings = ListenSettings {
        proxy_protocol_from: Some(vec!["127.0.0.0/8".parse().unwrap()]),
        ..listen()
    };
    let (mut server, gate) = gated(
        &settings,
        ShutdownSettings {
            delay: ms(0),
            grace: ms(10_000),
        },
    );
    gate.add_permits(1);
    let mut client = server.connect().await;
    eventually(|| server.load.connections() == 1).await;
    server.stop.send_replace(Stop::Drain);
    eventually(|| std::net::TcpStream::connect(server.addr).is_err()).await;
    tokio::time::sleep(ms(50)).await;
    client.send(b"PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\n").await;
    // A round trip later.
    tokio::time::sleep(ms(50)).await;
    client.send(GET).await;
    let answer = client.rest().await;
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains("connection: close"),
        "{answer:?}"
    );
    assert_eq!(soon(&mut server.ended).await.unwrap().unwrap(), 0);
}

#[tokio::test]
async fn who_has_said_one_letter_at_the_end_may_finish_and_no_more() {
    let (mut server, gate) = gated(
        &listen(),
        ShutdownSettings {
            delay: ms(0),
            grace: ms(10_000),
        },
    );
    gate.add_permits(1);
    let mut client = server.connect().await;
    // It could become the preface of HTTP/2.
    client.send(b"P").await;
    eventually(|| server.load.connections() == 1).await;
    server.stop.send_replace(Stop::Drain);
    eventually(|| std::net::TcpStream::connect(server.addr).is_err()).await;
    tokio::time::sleep(ms(50)).await;
    client
        .send(b"UT / HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n")
        .await;
    let answer = client.response().await;
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains("connection: close"),
        "{answer:?}"
    );
    assert_eq!(soon(&mut server.ended).await.unwrap().unwrap(), 0);
}

/// Its first request holds up its whole worker until it is let go.
struct Blocking(Arc<std::sync::Mutex<Option<std::sync::mpsc::Receiver<()>>>>);

impl Handler for Blocking {
    async fn handle(
        self: Rc<Self>,
        _: Request<RequestBody>,
        _: Arc<Peer>,
        _: Interim,
    ) -> http::Response<ResponseBody> {
        let busy = self.0.lock().unwrap().take();
        if let Some(busy) = busy {
            busy.recv().unwrap();
        }
        text(StatusCode::OK, "done")
    }
}

#[tokio::test]
async fn a_name_that_is_still_looked_up_holds_up_nobody() {
    let mut server = Running::answering(&listen(), |_, _| async {
        // Stands for a resolver that does not answer.
        drop(tokio::task::spawn_blocking(|| {
            std::thread::sleep(ms(60_000))
        }));
        text(StatusCode::OK, "")
    });
    server.connect().await.ask(GET).await;
    server.stop.send_replace(Stop::Now);
    soon(&mut server.ended).await.unwrap().unwrap();
}
