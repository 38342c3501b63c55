//! A limit and where it stands, as JSON.

use crate::config::duration_words;
use crate::limiter::{Algorithm, Limit, Standing};
use crate::policy::NamedLimit;
use serde_json::{Map, Value, json};
use std::time::Duration;

pub(crate) fn algorithm(algorithm: Algorithm) -> &'static str {
    match algorithm {
        Algorithm::SlidingLog => "sliding_log",
        Algorithm::SlidingWindow { .. } => "sliding_window",
        Algorithm::FixedWindow { .. } => "fixed_window",
        Algorithm::TokenBucket { .. } => "token_bucket",
        Algorithm::LeakyBucket { .. } => "leaky_bucket",
        Algorithm::Concurrency { .. } => "concurrency",
        Algorithm::Block => "block",
    }
}

/// What a limit is, in the words of the configuration; durations in seconds.
pub(crate) fn told(named: &NamedLimit) -> Map<String, Value> {
    let Limit {
        requests, per_us, ..
    } = named.limit;
    let mut told = Map::new();
    let mut tell = |name: &str, value: Value| told.insert(name.to_owned(), value);
    tell("name", json!(named.name));
    tell("algorithm", json!(algorithm(named.limit.algorithm)));
    tell("requests", json!(requests));
    if !matches!(named.limit.algorithm, Algorithm::Concurrency { .. }) {
        tell("per", json!(duration_words(Duration::from_micros(per_us))));
        tell("per_s", seconds(per_us));
    }
    if let Some(unit) = &named.unit {
        tell("unit", json!(unit));
    }
    match named.limit.algorithm {
        Algorithm::SlidingWindow { buckets } => _ = tell("buckets", json!(buckets)),
        Algorithm::FixedWindow { offset_us } => _ = tell("offset_s", seconds(offset_us)),
        Algorithm::TokenBucket { burst, warm_up_us } => {
            tell("burst", json!(burst));
            tell("warm_up_s", seconds(warm_up_us));
        }
        Algorithm::LeakyBucket { max_delay_us } => _ = tell("max_delay_s", seconds(max_delay_us)),
        Algorithm::Concurrency { max_duration_us } => {
            _ = tell("max_duration_s", seconds(max_duration_us));
        }
        Algorithm::SlidingLog | Algorithm::Block => {}
    }
    told
}

/// Where it stands at `now_us`: units used and remaining, and the seconds until more remain (null: nothing is used).
pub(crate) fn stands(limit: &Limit, standing: &Standing, now_us: u64) -> [(String, Value); 3] {
    let used = limit.capacity().saturating_sub(standing.remaining);
    let grows = standing
        .grows_at_us
        .map(|at_us| seconds(at_us.saturating_sub(now_us)));
    [
        ("used".to_owned(), json!(used)),
        ("remaining".to_owned(), json!(standing.remaining)),
        ("grows_in_s".to_owned(), json!(grows)),
    ]
}

pub(crate) fn seconds(us: u64) -> Value {
    json!(Duration::from_micros(us).as_secs_f64())
}
