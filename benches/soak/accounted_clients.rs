//! Clients whose charges in Redis are compared with what the app received: settlements, and one
//! client over its limit on many connections.

use crate::SoakContext;
use crate::ledger::RouteExpectation;
use crate::support::client::{RequestOutcome, handshake_http1};
use crate::traffic::{RESPONSE_TIMEOUT, connect_to_proxy, make_request, make_route};
use bytes::Bytes;
use fastrand::Rng;
use hyper::Version;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::task::JoinHandle;
use tokio::time::sleep;

const FLOODING_CONNECTIONS: usize = 200;
const METERING_CONNECTIONS: usize = 8;
/// Together, the clients of both proxies send about 1,000 metered requests per second.
const METERING_PAUSE_MS: u64 = 20;
const FLOODING_PAUSE_MS: u64 = 2000;

const METERED_ROUTE: RouteExpectation = RouteExpectation {
    without_redis: &[503],
    ..make_route("/metered", &[200])
};
const FLOODED_ROUTE: RouteExpectation = RouteExpectation {
    without_redis: &[503],
    ..make_route("/flooded", &[200, 429])
};

/// Runs the accounted clients until the time is over.
pub(crate) fn spawn_accounted_clients(
    context: &Arc<SoakContext>,
    seed: u64,
) -> Vec<JoinHandle<()>> {
    let metering = (0..METERING_CONNECTIONS).map(|_| (&METERED_ROUTE, METERING_PAUSE_MS));
    let flooding = (0..FLOODING_CONNECTIONS).map(|_| (&FLOODED_ROUTE, FLOODING_PAUSE_MS));
    (seed..)
        .zip(metering.chain(flooding))
        .map(|(seed, (route, pause_ms))| {
            let (context, mut rng) = (Arc::clone(context), Rng::with_seed(seed));
            tokio::spawn(async move {
                while !context.has_ended() {
                    context.wait_while_paused().await;
                    let began = Instant::now();
                    let lived = run_connection(&context, route, pause_ms, &mut rng).await;
                    if let Err(error) = lived {
                        context.ledger.judge_failed_connection(began, &error);
                    }
                    sleep(Duration::from_millis(rng.u64(..pause_ms))).await;
                }
            })
        })
        .collect()
}

async fn run_connection(
    context: &SoakContext,
    route: &'static RouteExpectation,
    pause_ms: u64,
    rng: &mut Rng,
) -> io::Result<()> {
    let mut proxy = handshake_http1(connect_to_proxy(context, Version::HTTP_11).await?).await?;
    for _ in 0..rng.u32(1..200) {
        // The proxy closes connections that are idle for long.
        if context.is_paused() || context.has_ended() || proxy.ready().await.is_err() {
            break;
        }
        let number = rng.u32(..);
        let request = make_request("", route, rng, number, Bytes::new());
        let pending = context.ledger.begin_request();
        context.ledger.begin_accounted_request();
        let response = proxy.send_request(request);
        let outcome =
            RequestOutcome::from_response(response, &number.to_string(), RESPONSE_TIMEOUT).await;
        let has_failed = !matches!(outcome, RequestOutcome::Answered(200 | 429));
        context.ledger.end_accounted_request(has_failed);
        pending.judge_outcome(route, &outcome);
        if !matches!(outcome, RequestOutcome::Answered(_)) {
            break;
        }
        sleep(Duration::from_millis(rng.u64(..pause_ms))).await;
    }
    Ok(())
}
