//! Units that are taken for a request and returned later: however many requests came in between, and
//! whatever the other store decides.

use crate::support::prelude::*;
use tokio::sync::watch;
use tokio::time::Instant;

const REJECTED: &str = "tidegate_requests_total{policy=\"customer\",decision=\"rejected\"}";

/// An upstream that answers when the test opens the gate, and counts arrivals.
struct GatedUpstream {
    upstream: Upstream,
    arrivals: watch::Receiver<usize>,
    gate: watch::Sender<bool>,
}

impl GatedUpstream {
    async fn start() -> Self {
        let (arrival_sender, arrivals) = watch::channel(0);
        let gate = watch::Sender::new(false);
        let opened = gate.subscribe();
        let upstream = Upstream::with_handler(move |_| {
            arrival_sender.send_modify(|count| *count += 1);
            let mut opened = opened.clone();
            async move {
                opened.wait_for(|is_open| *is_open).await.unwrap();
                UpstreamResponse::from(Response::new(full_body("")))
            }
        });
        Self {
            upstream: upstream.await,
            arrivals,
            gate,
        }
    }

    async fn wait_for_arrivals(&mut self, count: usize) {
        let arrived = self.arrivals.wait_for(|arrived| *arrived >= count);
        in_time(arrived).await.unwrap();
    }
}

fn store_config(redis: Option<&RedisServer>) -> String {
    redis.map(RedisServer::store_config).unwrap_or_default()
}

fn remaining(response: &RawResponse, limit: &str) -> Option<u64> {
    response.remaining(limit)
}

async fn send_as(proxy: &Proxy, customer: &str) -> RawResponse {
    let request = proxy.request("GET", "/").header("X-Customer", customer);
    request.send().await
}

/// Clients of one customer that repeat their request until they are stopped.
struct ClientFlood {
    is_stopped: Arc<AtomicBool>,
    clients: JoinSet<usize>,
}

impl ClientFlood {
    async fn start(proxy: &Proxy, customer: &str, connections: usize) -> Self {
        let (is_stopped, mut clients) = (Arc::new(AtomicBool::new(false)), JoinSet::new());
        let connecting = (0..connections).map(|_| RawClient::connect(proxy.address));
        for mut client in join_all(connecting).await {
            let request = format!("GET / HTTP/1.1\r\nHost: a\r\nX-Customer: {customer}\r\n\r\n");
            let is_stopped = Arc::clone(&is_stopped);
            clients.spawn(async move {
                let mut admitted = 0;
                while !is_stopped.load(Ordering::Relaxed) {
                    client.send(&request).await;
                    admitted += usize::from(client.read_response().await.status != 429);
                }
                admitted
            });
        }
        Self {
            is_stopped,
            clients,
        }
    }

    /// Returns how many requests were forwarded.
    async fn stop(self) -> usize {
        self.is_stopped.store(true, Ordering::Relaxed);
        self.clients.join_all().await.into_iter().sum()
    }
}

#[tokio::test]
async fn responses_that_do_not_count_return_their_units_whatever_came_after() {
    for (algorithm, in_flight, in_redis) in [
        ("sliding_log", 600, false),
        ("sliding_log", 600, true),
        ("sliding_window", 100, true),
        ("fixed_window", 100, false),
        ("token_bucket", 400, false),
        ("token_bucket", 400, true),
    ] {
        let redis = in_redis.then(RedisServer::start);
        let config = format!(
            "{}\n[[policy]]\nname = 'errors'\ncount_when = {{ status = ['5xx'] }}\n\
             limit = {{ requests = 700, per = '100d', algorithm = '{algorithm}' }}\n",
            store_config(redis.as_ref())
        );
        let mut app = GatedUpstream::start().await;
        let proxy = Proxy::start_connected(&config, app.upstream.address).await;
        let mut clients = Vec::new();
        // One after the other: each has a time of its own.
        for number in 1..=in_flight {
            let client = proxy.send_raw("GET / HTTP/1.1\r\nHost: a\r\n\r\n").await;
            app.wait_for_arrivals(number).await;
            clients.push(client);
        }
        app.gate.send_replace(true);
        for client in &mut clients {
            assert_eq!(client.read_response().await.status, 200);
        }
        let what = format!("the units, {algorithm}, Redis {in_redis}");
        wait_until(what, async || {
            remaining(&proxy.get("/").await, "errors") == Some(699)
        })
        .await;
    }
}

#[tokio::test]
async fn requests_that_redis_refuses_use_no_units_of_the_instance() {
    let app = Upstream::echo().await;
    for counting in ["count_rejected = true", "count_when = { status = ['2xx'] }"] {
        for algorithm in ["sliding_log", "token_bucket"] {
            let redis = RedisServer::start();
            let config = format!(
                "{}\n[[policy]]\nname = 'pod'\nscope = 'instance'\n\
                 limit = {{ requests = 5000, per = '10d', algorithm = '{algorithm}' }}\n\
                 [[policy]]\nname = 'customer'\nkey = ['header:x-customer']\n{counting}\n\
                 limit = {{ requests = 5, per = '100d' }}\n",
                redis.store_config()
            );
            let proxy = Proxy::start_connected(&config, app.address).await;
            let flood = ClientFlood::start(&proxy, "greedy", 600).await;
            wait_until("4,000 refusals", async || {
                proxy.read_metric(REJECTED).await >= 4_000.0
            })
            .await;
            assert_eq!(flood.stop().await, 5);
            let response = send_as(&proxy, "other").await;
            let what = format!("{counting}, {algorithm}");
            assert_eq!(remaining(&response, "pod"), Some(4_994), "{what}");
        }
    }
}

#[tokio::test]
async fn requests_that_redis_refuses_take_no_slots_from_other_requests() {
    let app = Upstream::echo().await;
    for counting in [
        "count_rejected = true",
        "lease = { size = 2, ttl = '200ms' }",
    ] {
        let redis = RedisServer::start();
        let config = format!(
            "{}\n[[policy]]\nname = 'pod'\nscope = 'instance'\n\
             limit = {{ requests = 50, algorithm = 'concurrency' }}\n\
             [[policy]]\nname = 'customer'\nkey = ['header:x-customer']\n{counting}\n\
             limit = {{ requests = 5, per = '100d' }}\n",
            redis.store_config()
        );
        let proxy = Proxy::start_connected(&config, app.address).await;
        let flood = ClientFlood::start(&proxy, "greedy", 300).await;
        let mut statuses = Vec::new();
        // Also known customers: each comes three times.
        for number in 0..60 {
            statuses.push(send_as(&proxy, &format!("c{}", number / 3)).await.status);
        }
        assert_eq!(flood.stop().await, 5, "{counting}");
        let refused = statuses.iter().filter(|status| **status != 200).count();
        assert_eq!(refused, 0, "of {}, {counting}", statuses.len());
    }
}

/// The pod has room while Redis is asked, and for one request only when the answers come. The units of
/// all others are returned.
#[tokio::test]
async fn units_of_redis_are_returned_if_the_instance_refuses_after_its_answer() {
    let app = Upstream::echo().await;
    for more in ["", "lease = { size = 2, ttl = '100ms' }"] {
        let redis = RedisServer::start();
        let customer = format!(
            "[[policy]]\nname = 'customer'\nkey = ['header:x-customer']\n{more}\n\
             limit = {{ requests = 3, per = '100d' }}\n"
        );
        let pod = "[[policy]]\nname = 'pod'\nscope = 'instance'\nlimit = { requests = 1, per = '100d' }\n";
        let store = redis.store_config();
        let proxy = Proxy::start(&format!("{store}\n{pod}{customer}"), app.address).await;
        let other = Proxy::start(&format!("{store}\n{customer}"), app.address).await;
        proxy.wait_for_store().await;
        other.wait_for_store().await;
        let names: Vec<_> = (0..40).map(|number| format!("c{number}")).collect();
        let answers = join_all(names.iter().map(|name| send_as(&proxy, name))).await;
        let admitted = answers.iter().filter(|answer| answer.status == 200).count();
        assert_eq!(admitted, 1, "{more}");
        for (name, answer) in names.iter().zip(&answers) {
            let left = if answer.status == 200 { 2 } else { 3 };
            for _ in 0..left {
                let what = format!("{name}: {left} units, {more}");
                let is_admitted = async || send_as(&other, name).await.status == 200;
                wait_until(what, is_admitted).await;
            }
            assert_eq!(send_as(&other, name).await.status, 429, "{name}, {more}");
        }
    }
}

/// Ten requests leave per second. Neither a response that does not count nor a cost of 0 brings the
/// next requests forward.
#[tokio::test]
async fn requests_leave_a_queue_at_a_distance_also_after_returns() {
    const INTERVAL: Duration = Duration::from_millis(100);
    for cost in [
        "count_when = { status = [401] }",
        "cost = { estimate = 1, actual = 'response_header:x-cost' }",
    ] {
        for in_redis in [false, true] {
            let redis = in_redis.then(RedisServer::start);
            let config = format!(
                "{}\n[[policy]]\nname = 'line'\n{cost}\n\
                 limit = {{ requests = 10, per = '1s', algorithm = 'leaky_bucket', max_delay = '2s' }}\n",
                store_config(redis.as_ref())
            );
            let (arrival_sender, mut arrivals) = tokio::sync::mpsc::channel(64);
            let app = Upstream::with_handler(move |_| {
                arrival_sender.try_send(Instant::now()).unwrap();
                let response = Response::builder().header("x-cost", "0");
                std::future::ready(response.body(full_body("")).unwrap())
            })
            .await;
            let proxy = Proxy::start_connected(&config, app.address).await;
            let start = Instant::now();
            assert_eq!(proxy.get("/").await.status, 200);
            // Longer than a settlement takes.
            sleep(INTERVAL / 4).await;
            let others = join_all((0..3).map(|_| proxy.get("/"))).await;
            assert!(others.iter().all(|response| response.status == 200));
            for place in 0..4 {
                let at = arrivals.recv().await.unwrap() - start;
                let what = format!("{cost}, Redis {in_redis}, request {place}");
                assert!(at >= INTERVAL * place, "{what}: {at:?}");
            }
        }
    }
}

/// A customer that Redis refuses takes no places in the queue of the instance, and brings no request
/// forward.
#[tokio::test]
async fn requests_that_redis_refuses_keep_the_distance_in_a_queue_of_the_instance() {
    const INTERVAL: Duration = Duration::from_millis(100);
    let redis = RedisServer::start();
    let config = format!(
        "{}\n[[policy]]\nname = 'pod'\nscope = 'instance'\n\
         limit = {{ requests = 10, per = '1s', algorithm = 'leaky_bucket', max_delay = '10s' }}\n\
         [[policy]]\nname = 'customer'\nkey = ['header:x-customer']\ncount_rejected = true\n\
         limit = {{ requests = 1, per = '100d' }}\n",
        redis.store_config()
    );
    let (arrival_sender, mut arrivals) = tokio::sync::mpsc::channel(64);
    let app = Upstream::with_handler(move |_| {
        arrival_sender.try_send(Instant::now()).unwrap();
        std::future::ready(UpstreamResponse::from(Response::new(full_body(""))))
    })
    .await;
    let proxy = Proxy::start_connected(&config, app.address).await;
    let start = Instant::now();
    let flood = ClientFlood::start(&proxy, "greedy", 50).await;
    let names: Vec<_> = (0..9).map(|number| format!("c{number}")).collect();
    let others = join_all(names.iter().map(|name| send_as(&proxy, name))).await;
    assert!(others.iter().all(|response| response.status == 200));
    assert_eq!(flood.stop().await, 1);
    for place in 0..10 {
        let at = arrivals.recv().await.unwrap() - start;
        assert!(at >= INTERVAL * place, "request {place}: {at:?}");
    }
    // No place is taken but those of the last tenth of a second and of this request.
    let response = send_as(&proxy, "last").await;
    assert!(remaining(&response, "pod") >= Some(99), "{response:?}");
}

/// A client sends one request after the other, on two connections in turn. None of its responses
/// counts, so each request finds the unit that the last response returned.
#[tokio::test]
async fn a_client_in_sequence_finds_the_last_unit_returned() {
    let (server, upstream) = (RedisServer::start(), Upstream::echo().await);
    let config = format!(
        "{}\nlisten.threads = 2\n
        [[policy]]\nname = 'customer'\nkey = ['client_ip']\non_store_failure = 'closed'
        count_when = {{ status = [401] }}\nlimit = {{ requests = 1, per = '1h' }}",
        server.store_config(),
    );
    let proxy = Proxy::start_connected(&config, upstream.address).await;
    let mut clients = [
        RawClient::connect(proxy.address).await,
        RawClient::connect(proxy.address).await,
    ];
    for nth in 0..200 {
        let request = clients[nth % 2].request("GET / HTTP/1.1\r\nHost: a\r\n\r\n");
        let reply = request.await;
        assert_eq!(reply.status, 200, "request {nth}: {}", reply.text());
    }
}
