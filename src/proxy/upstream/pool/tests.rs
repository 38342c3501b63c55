//! Connections to addresses that the upstream's name has lost.

use super::*;
use std::net::SocketAddr;
use tokio::net::TcpListener;
use tokio::task::{LocalSet, yield_now};

fn pool(scheme: Scheme, address: SocketAddr) -> Rc<Pool> {
    let long = Duration::from_secs(60);
    let settings = UpstreamSettings {
        url: UpstreamUrl::Net {
            scheme,
            host: address.ip().to_string(),
            port: address.port(),
        },
        connect_timeout: long,
        response_timeout: None,
        body_idle_timeout: None,
        pool_idle_timeout: long,
        pool_max_idle: 10,
        preserve_host: true,
        max_connections: 10,
        max_requests_waiting: 10,
        queue_timeout: long,
        retry_connect: 0,
        retry_idempotent: true,
        tls: None,
    };
    Pool::new(Shared::new(settings, 1).unwrap())
}

/// A connection whose request is over.
async fn used(pool: &Rc<Pool>) -> Box<Connection> {
    let connection = pool.acquire_new(&mut 0).await.unwrap();
    while let Wire::Http1(http1) = &connection.wire
        && !http1.sender.is_ready()
    {
        yield_now().await;
    }
    connection
}

#[tokio::test]
async fn an_address_that_the_name_has_lost_is_left_though_somebody_is_there() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let other = || vec![IpAddr::from([127, 0, 0, 2])];
    let working = async {
        let pool = pool(Scheme::Http, listener.local_addr().unwrap());
        let (idle, busy) = (used(&pool).await, used(&pool).await);
        pool.put_back(idle);
        pool.follow(other());
        assert_eq!(pool.idle_count(), 1, "told once, it may be of many");
        pool.follow(other());
        assert_eq!(pool.idle_count(), 0);
        pool.put_back(busy);
        assert_eq!(pool.idle_count(), 0);
    };
    LocalSet::new().run_until(working).await;
}

#[tokio::test]
async fn by_http2_what_is_under_way_there_ends_first() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let working = async {
        let pool = pool(Scheme::H2c, listener.local_addr().unwrap());
        tokio::task::spawn_local(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let mut connection = h2::server::handshake(socket).await.unwrap();
                tokio::task::spawn_local(
                    async move { while connection.accept().await.is_some() {} },
                );
            }
        });
        let busy = pool.acquire(&mut 0).await.unwrap();
        let Wire::Http2(place) = &busy.wire else {
            panic!("it speaks HTTP/2")
        };
        let link = Rc::clone(place.link());
        for _ in 0..2 {
            assert!(pool.take_idle(Instant::now()).is_some());
            pool.follow(vec![IpAddr::from([127, 0, 0, 2])]);
        }
        assert!(pool.take_idle(Instant::now()).is_none() && link.is_closing());
        assert_eq!(link.idle_since(), None, "its request goes on");
    };
    LocalSet::new().run_until(working).await;
}
