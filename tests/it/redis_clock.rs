//! A wall clock of Redis that is set forward and back.

use crate::support::prelude::*;

const HOUR: u64 = 3_600;

/// One policy per path, each with a limit of 10 per minute.
const POLICIES: [(&str, &str); 6] = [
    ("log", ""),
    ("sub-windows", "algorithm = 'sliding_window'"),
    ("window", "algorithm = 'fixed_window'"),
    ("bucket", "algorithm = 'token_bucket'"),
    ("queue", "algorithm = 'leaky_bucket', max_delay = '1ms'"),
    ("block", "block"),
];

fn make_config(server: &RedisServer) -> String {
    let mut config = server.store_config();
    for (name, words) in POLICIES {
        let (limit, block) = match words {
            "block" => ("", "block_for = '1m'"),
            limit => (limit, ""),
        };
        let comma = if limit.is_empty() { "" } else { ", " };
        config += &format!(
            "\n[[policy]]\nname = '{name}'\nmatch = {{ path = '/{name}' }}\n{block}\n\
             limit = {{ requests = 10, per = '1m'{comma}{limit} }}\n"
        );
    }
    config
}

/// Sends 12 requests under each policy. Returns how many are admitted, and the longest
/// `Retry-After`.
async fn count_admitted(proxy: &Proxy) -> Vec<(&'static str, usize, u64)> {
    // Workers cache refusals for up to one second.
    sleep(Duration::from_millis(1_050)).await;
    let mut results = Vec::new();
    for (name, _) in POLICIES {
        let (mut admitted, mut retry_after) = (0, 0);
        for _ in 0..12 {
            let reply = proxy.get(&format!("/{name}")).await;
            admitted += usize::from(reply.status == 200);
            if let Some(secs) = reply.header("retry-after") {
                retry_after = retry_after.max(secs.parse().unwrap());
            }
        }
        results.push((name, admitted, retry_after));
    }
    results
}

/// All policies admit this many requests; the queue admits one at a time.
fn assert_admitted(results: &[(&str, usize, u64)], expected: usize, what: &str) {
    for (name, admitted, _) in results {
        let expected = if *name == "queue" {
            expected.min(1)
        } else {
            expected
        };
        assert_eq!(*admitted, expected, "{what}: {results:?}");
    }
}

/// A step forward admits one further limit, as if the time had passed. The step back admits
/// nothing, and the keys are admitted again after at most about a period.
#[tokio::test]
async fn a_clock_that_steps_back_admits_nothing_and_refuses_no_longer_than_a_period() {
    let server = RedisServer::start_with_clock();
    let proxy = Proxy::echo_connected(&make_config(&server)).await;
    assert_admitted(&count_admitted(&proxy).await, 10, "at first");

    server.set_clock_offset(HOUR);
    assert_admitted(&count_admitted(&proxy).await, 10, "an hour ahead");

    server.set_clock_offset(0);
    let results = count_admitted(&proxy).await;
    assert_admitted(&results, 0, "right again");
    for (name, _, retry_after) in results {
        // A sub-window is a tenth of the period.
        assert!(retry_after <= 66, "{name}: Retry-After: {retry_after}");
    }

    server.set_clock_offset(40);
    let mut results = count_admitted(&proxy).await;
    results.retain(|(name, ..)| *name != "queue");
    assert_admitted(&results, 0, "within the period");

    server.set_clock_offset(70);
    assert_admitted(&count_admitted(&proxy).await, 10, "a period later");
}
