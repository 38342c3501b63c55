//! A Redis that comes back for moments within one outage.

use super::*;

const PROXY_COUNT: usize = 5;

/// Longer than an instance without a heartbeat counts.
const DOWN_TIME: Duration = Duration::from_secs(6);

/// Too short for all instances to reconnect.
const UP_TIME: Duration = Duration::from_millis(350);

/// Each return of Redis shows only the instances that have reconnected. Such counts must not add up
/// to a smaller fleet. One instance never reconnects, so the outage does not end. A fleet that
/// really is smaller gets its larger shares after 3 s of answers.
#[tokio::test]
async fn a_flapping_redis_does_not_reduce_the_instance_count() {
    let (mut server, upstream) = (start_persistent_redis(), Upstream::echo().await);
    let policy = catch_all_policy("hot", "");
    let mut proxies = Vec::new();
    let relay = TcpRelay::start(server.port()).await;
    for proxy in 0..PROXY_COUNT {
        let is_last = proxy == PROXY_COUNT - 1;
        let port = if is_last { relay.port } else { server.port() };
        proxies.push(start_proxy(port, &policy, upstream.address).await);
    }
    for proxy in &proxies {
        wait_for_instance_count(proxy, PROXY_COUNT as f64).await;
    }
    let load = FleetLoad::start(&proxies, "/");
    load.run_for(2 * LIMIT_PERIOD).await;
    server.kill();
    relay.drop_replies();
    let began = Instant::now();
    for _ in 0..3 {
        load.run_for(DOWN_TIME).await;
        server.restart_async().await;
        load.run_for(UP_TIME).await;
        server.kill();
    }
    load.run_for(2 * LIMIT_PERIOD).await;
    let mut counts = Vec::new();
    for proxy in &proxies {
        counts.push(proxy.read_metric("tidegate_instances").await);
    }
    let (admitted, refused) = load.finish().await;
    let items = admitted.into_iter();
    let since: Vec<AdmittedRequest> = items.filter(|one| one.sent >= began).collect();
    let most = max_admitted_in_a_period(&since);
    println!(
        "at most {most} of {LIMIT_UNITS} in a window; {} admitted in {:?}, {refused} refused; instance counts {counts:?}",
        since.len(),
        began.elapsed(),
    );
    assert!(
        refused > 100,
        "only {refused} refusals: the load is too low"
    );
    assert!(most <= LIMIT_UNITS, "{most} of {LIMIT_UNITS} in a window");
    assert!(
        counts.iter().all(|count| *count >= PROXY_COUNT as f64),
        "{counts:?}"
    );
    let windows = began.elapsed().as_secs_f64() / LIMIT_PERIOD.as_secs_f64();
    assert!(
        since.len() as f64 >= 0.6 * windows * LIMIT_UNITS as f64,
        "too few admitted during the outage: {}",
        since.len()
    );

    proxies.truncate(3);
    server.restart_async().await;
    for proxy in &proxies {
        wait_for_instance_count(proxy, 3.0).await;
    }
    server.kill();
    let smaller_from = Instant::now();
    let load = FleetLoad::start(&proxies, "/");
    load.run_for(4 * LIMIT_PERIOD).await;
    let (admitted, _) = load.finish().await;
    let later: Vec<AdmittedRequest> = admitted
        .into_iter()
        .filter(|one| one.sent >= smaller_from + LIMIT_PERIOD)
        .collect();
    println!("three instances: {} in three periods", later.len());
    assert!(max_admitted_in_a_period(&later) <= LIMIT_UNITS);
    assert!(
        later.len() > 3 * LIMIT_UNITS * 7 / 10,
        "expected the larger shares: {} in three periods",
        later.len()
    );
}
