//! The app of a node. It reports the begin and the end of each request on its standard output, so
//! that the test knows what was forwarded, even by a sidecar that ends.

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tidegate::clock::Clock;
use tokio::io::{BufReader, Lines};
use tokio::net::TcpListener;
use tokio::process::ChildStdout;
use tokio::time::sleep;

/// Holds a slot for longer than [`crate::policies::SLOT_TTL`], so that it must be renewed.
const LONG_REQUEST_MS: std::ops::Range<u64> = 3500..4500;
const SHORT_REQUEST_MS: std::ops::Range<u64> = 50..300;
const LONG_REQUESTS_ONE_IN: u32 = 8;

/// A request that a sidecar forwarded. Times are in microseconds since the epoch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ForwardedRequest {
    pub(crate) key: usize,
    pub(crate) cost: u64,
    pub(crate) began_us: u64,
    pub(crate) ended_us: Option<u64>,
}

/// Requests that arrived at any app.
#[derive(Debug, Default)]
pub(crate) struct ForwardedRequests(Mutex<Vec<ForwardedRequest>>);

/// Runs the app. It prints its URL and runs until the node ends.
pub(crate) async fn run_app() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    println!("http://{}", listener.local_addr().unwrap());
    while let Ok((stream, _)) = listener.accept().await {
        let connection =
            http1::Builder::new().serve_connection(TokioIo::new(stream), service_fn(respond));
        tokio::spawn(async move { connection.await.unwrap_or_default() });
    }
}

/// Reports the end of a request on drop: also if the sidecar disconnects.
struct RequestReport(u64);

impl RequestReport {
    fn begin(key: &str, cost: u64) -> Self {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        println!("{} {id} {key} {cost}", Clock::system().now_us());
        Self(id)
    }
}

impl Drop for RequestReport {
    fn drop(&mut self) {
        println!("{} {}", Clock::system().now_us(), self.0);
    }
}

async fn respond(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let header = |name| {
        let value = request.headers().get(name);
        value.and_then(|value| value.to_str().ok()).unwrap_or("0")
    };
    let cost = fastrand::u64(1..6);
    let _report = RequestReport::begin(header("x-key"), cost);
    if request.uri().path() == "/slots" {
        let millis = if fastrand::u32(..LONG_REQUESTS_ONE_IN) == 0 {
            LONG_REQUEST_MS
        } else {
            SHORT_REQUEST_MS
        };
        sleep(Duration::from_millis(fastrand::u64(millis))).await;
    }
    let number = Bytes::copy_from_slice(header("x-number").as_bytes());
    let response = Response::builder().header("x-cost", cost);
    Ok(response.body(Full::new(number)).unwrap())
}

impl ForwardedRequests {
    /// Reads the reports of one app until it ends.
    pub(crate) async fn read_reports(&self, mut lines: Lines<BufReader<ChildStdout>>) {
        let mut open = BTreeMap::new();
        while let Ok(Some(line)) = lines.next_line().await {
            let numbers: Vec<u64> = line
                .split(' ')
                .filter_map(|word| word.parse().ok())
                .collect();
            let mut requests = self.0.lock().unwrap();
            match numbers[..] {
                [began_us, id, key, cost] => {
                    open.insert(id, requests.len());
                    requests.push(ForwardedRequest {
                        key: usize::try_from(key).unwrap(),
                        cost,
                        began_us,
                        ended_us: None,
                    });
                }
                [ended_us, id] => {
                    if let Some(at) = open.remove(&id) {
                        requests[at].ended_us = Some(ended_us);
                    }
                }
                _ => assert!(line.is_empty(), "an app printed {line:?}"),
            }
        }
        let now_us = Clock::system().now_us();
        for at in open.into_values() {
            self.0.lock().unwrap()[at].ended_us = Some(now_us);
        }
    }

    /// Returns the requests of a key so far.
    pub(crate) fn of_key(&self, key: usize) -> Vec<ForwardedRequest> {
        let requests = self.0.lock().unwrap();
        let of_key = requests.iter().filter(|request| request.key == key);
        of_key.copied().collect()
    }
}
