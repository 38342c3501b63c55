//! Tests of connections to addresses that were removed from DNS.

use super::*;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{LocalSet, yield_now};
use tokio::time::{sleep, timeout};

fn build_pool(scheme: UpstreamScheme, address: SocketAddr) -> Rc<UpstreamClient> {
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
        pool_max_idle: 400,
        preserve_host: true,
        max_connections: 400,
        max_connections_per_client: 0,
        max_tunnels_per_client: 0,
        tunnel_idle_timeout: None,
        max_requests_waiting: 10,
        queue_timeout: long,
        retry_connect: 0,
        retry_idempotent: true,
        tls: None,
    };
    UpstreamClient::new(UpstreamSharedState::new(settings, 1).unwrap())
}

/// Opens a connection that is ready for a request.
async fn open_ready_connection(pool: &Rc<UpstreamClient>) -> Box<UpstreamConnection> {
    let connection = pool.acquire_new_or_http2(&mut 0).await.unwrap();
    while let ConnectionProtocol::Http1(http1) = &connection.protocol
        && !http1.is_ready()
    {
        yield_now().await;
    }
    connection
}

#[tokio::test]
async fn drops_connections_to_addresses_removed_from_dns() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let other_address = || vec![IpAddr::from([127, 0, 0, 2])];
    let scenario = async {
        let pool = build_pool(UpstreamScheme::Http, listener.local_addr().unwrap());
        let (idle, busy) = (
            open_ready_connection(&pool).await,
            open_ready_connection(&pool).await,
        );
        pool.return_connection(idle);
        pool.apply_resolved_addresses(other_address());
        assert_eq!(
            pool.idle_count(),
            1,
            "one lookup may return a subset of the addresses"
        );
        pool.apply_resolved_addresses(other_address());
        assert_eq!(pool.idle_count(), 0);
        pool.return_connection(busy);
        assert_eq!(pool.idle_count(), 0);
    };
    LocalSet::new().run_until(scenario).await;
}

#[tokio::test]
async fn an_idle_connection_is_dropped_as_soon_as_the_upstream_closes_it() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let scenario = async {
        let pool = build_pool(UpstreamScheme::Http, listener.local_addr().unwrap());
        let (first, second) = (
            open_ready_connection(&pool).await,
            open_ready_connection(&pool).await,
        );
        let (closed, _) = listener.accept().await.unwrap();
        let _open = listener.accept().await.unwrap();
        pool.return_connection(second);
        pool.return_connection(first);
        assert_eq!(pool.idle_count(), 2);
        drop(closed);
        let dropped = async {
            while pool.idle_count() == 2 {
                yield_now().await;
            }
        };
        // Well before the next sweep.
        timeout(Duration::from_secs(2), dropped).await.unwrap();
        assert_eq!(pool.idle_count(), 1);
        let left = pool.take_available_connection(Instant::now()).unwrap();
        assert!(left.is_reusable(Duration::from_secs(60), Instant::now()));
    };
    LocalSet::new().run_until(scenario).await;
}

#[tokio::test]
async fn a_connection_that_the_upstream_closed_during_its_use_is_not_kept() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let scenario = async {
        let address = listener.local_addr().unwrap();
        let pool = build_pool(UpstreamScheme::Http, address);
        let connection = open_ready_connection(&pool).await;
        let (closed, _) = listener.accept().await.unwrap();
        let mut later = TcpStream::connect(address).await.unwrap();
        let (mut writer, _) = listener.accept().await.unwrap();
        drop(closed);
        writer.write_all(b"x").await.unwrap();
        // This event comes after that of the closed connection.
        later.read_u8().await.unwrap();
        pool.return_connection(connection);
        assert_eq!(pool.idle_count(), 0);
    };
    LocalSet::new().run_until(scenario).await;
}

/// One poll of a task notices at most 128 of them.
#[tokio::test]
async fn many_idle_connections_are_dropped_as_soon_as_the_upstream_closes_them() {
    const COUNT: usize = 300;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let scenario = async {
        let pool = build_pool(UpstreamScheme::Http, listener.local_addr().unwrap());
        let (mut connections, mut accepted) = (Vec::new(), Vec::new());
        for _ in 0..COUNT {
            connections.push(open_ready_connection(&pool).await);
            accepted.push(listener.accept().await.unwrap());
        }
        for connection in connections {
            pool.return_connection(connection);
        }
        assert_eq!(pool.idle_count(), COUNT);
        drop(accepted);
        let dropped = async {
            while pool.idle_count() > 0 {
                yield_now().await;
            }
        };
        // Well before the next sweep.
        timeout(Duration::from_secs(2), dropped).await.unwrap();
    };
    LocalSet::new().run_until(scenario).await;
}

#[tokio::test(start_paused = true)]
async fn a_connection_opened_after_a_calm_time_is_closed_when_it_was_idle_too_long() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let scenario = async {
        let pool = build_pool(UpstreamScheme::Http, listener.local_addr().unwrap());
        sleep(Duration::from_secs(20)).await;
        assert!(pool.is_sweeper_resting.get());
        let connection = open_ready_connection(&pool).await;
        pool.return_connection(connection);
        sleep(Duration::from_secs(59)).await;
        assert_eq!(pool.idle_count(), 1);
        sleep(Duration::from_secs(7)).await;
        assert_eq!(pool.idle_count(), 0);
    };
    LocalSet::new().run_until(scenario).await;
}

#[tokio::test]
async fn http2_requests_finish_before_a_stale_connection_closes() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let scenario = async {
        let pool = build_pool(UpstreamScheme::H2c, listener.local_addr().unwrap());
        tokio::task::spawn_local(async move {
            while let Ok((socket, _)) = listener.accept().await {
                let mut connection = h2::server::handshake(socket).await.unwrap();
                tokio::task::spawn_local(
                    async move { while connection.accept().await.is_some() {} },
                );
            }
        });
        let busy = pool.acquire(&mut 0).await.unwrap();
        let ConnectionProtocol::Http2(slot) = &busy.protocol else {
            panic!("the connection is not HTTP/2")
        };
        let http2_connection = Rc::clone(&slot.connection);
        for _ in 0..2 {
            assert!(pool.take_available_connection(Instant::now()).is_some());
            pool.apply_resolved_addresses(vec![IpAddr::from([127, 0, 0, 2])]);
        }
        assert!(
            pool.take_available_connection(Instant::now()).is_none()
                && http2_connection.closing.get()
        );
        assert_eq!(http2_connection.idle_since(), None, "its request continues");
    };
    LocalSet::new().run_until(scenario).await;
}
