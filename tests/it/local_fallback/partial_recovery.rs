//! One node of a cluster has recovered while another is still down.

use super::*;

/// Instances without a heartbeat are not counted after this time, so shares grow.
const MEMBERSHIP_TTL: Duration = Duration::from_secs(5);

const UNITS: usize = 20;

/// Redis lacks the usage of an instance that is stopped. Requests that need both nodes are checked
/// by the share of the recovered one, too.
#[tokio::test]
async fn a_node_that_is_down_does_not_disable_the_share_of_a_recovered_node() {
    let (mut cluster, upstream) = (RedisCluster::start().await, Upstream::echo().await);
    // The membership set is on the third node.
    let counted = initial_node_for_name("shop:v1:instances");
    let (down_node, back_node) = ((counted + 1) % 3, (counted + 2) % 3);
    let [down, back] = [down_node, back_node].map(|node| {
        let mut names = (0..).map(|number| format!("p{number}"));
        names
            .find(|name| initial_node(&KeyBuilder::new(name).finish()) == node)
            .unwrap()
    });
    let policies = format!(
        "[[policy]]\nname = \"{down}\"\nmatch = {{ path = [\"/both\", \"/down\"] }}\n\
         limit = {{ requests = 1000, per = \"1h\" }}\n\
         [[policy]]\nname = \"{back}\"\nmatch = {{ path = [\"/both\", \"/back\"] }}\n\
         limit = {{ requests = {UNITS}, per = \"1h\" }}\n"
    );
    let mut proxies = Vec::new();
    for _ in 0..2 {
        let proxy = build_proxy_with_redis(&cluster.config_lines(), &policies)
            .upstream(upstream.address)
            .start()
            .await;
        proxies.push(proxy);
    }
    for proxy in &proxies {
        wait_for_instance_count(proxy, 2.0).await;
    }
    cluster.nodes[down_node].kill();
    cluster.nodes[back_node].pause();
    let admitted_of = |statuses: Vec<u16>| {
        assert!(
            statuses.iter().all(|status| [200, 429].contains(status)),
            "{statuses:?}"
        );
        statuses.iter().filter(|status| **status == 200).count()
    };
    let mut admitted = admitted_of(proxies[0].get_statuses("/back", UNITS).await);
    // Calls to the hanging node count twice in the share of an instance.
    assert!(
        (1..=UNITS / 2).contains(&admitted),
        "{admitted} admitted by a share of {}",
        UNITS / 2
    );
    // The other instance meets the outage, too: an outage that it does not notice, shorter than the
    // interval of its checks, leaves its decisions to Redis alone.
    admitted += admitted_of(proxies[1].get_statuses("/back", 1).await);
    proxies[0].pause();
    let stopped = Instant::now();
    cluster.nodes[back_node].resume();
    let mut asked = 0;
    while stopped.elapsed() < MEMBERSHIP_TTL - Duration::from_secs(1) {
        let answer = proxies[1].get_statuses("/both", 1).await;
        // Only answers from before the instance count changes are judged.
        if stopped.elapsed() < MEMBERSHIP_TTL {
            admitted += admitted_of(answer);
            asked += 1;
        }
        sleep(Duration::from_millis(20)).await;
    }
    println!("{admitted} of {UNITS} admitted, {asked} requests while a node was down");
    assert!(admitted <= UNITS, "{admitted} of {UNITS} admitted");
}
