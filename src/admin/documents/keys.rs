//! Keys: the state of their limits, counters, and what applies to a request.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// A limit, and its status if that is known.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct LimitDocument {
    pub name: String,
    pub algorithm: String,
    pub requests: u64,
    /// The period as in the configuration; `None` for `concurrency`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per: Option<String>,
    /// The time zone of a calendar period.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tz: Option<String>,
    /// The field of the request that may state another amount.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests_from: Option<String>,
    /// `unlimited`, `blocked` or `limits`, for a key with an override.
    #[serde(rename = "override", skip_serializing_if = "Option::is_none")]
    pub override_kind: Option<String>,
    /// Whether the explained request states the amounts.
    #[serde(skip)]
    pub is_stated: bool,
    /// `None` if the status is unknown, or nothing is counted.
    #[serde(flatten)]
    pub usage: Option<LimitUsage>,
    /// What only programs read, such as the settings of the algorithm.
    #[serde(flatten)]
    pub details: Map<String, Value>,
}

/// The units of a limit.
#[derive(Debug, Serialize, Deserialize)]
pub struct LimitUsage {
    pub used: u64,
    pub remaining: u64,
    /// Seconds until more units are available; `None` if none is used.
    pub grows_in_s: Option<f64>,
}

/// A key of a policy and the status of its limits.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct KeyDocument {
    pub policy: String,
    pub key: String,
    /// The hash of the key, as in the log; older proxies send none.
    pub key_hash: Option<String>,
    /// Whether a request of the lowest cost would be admitted.
    pub admitted: bool,
    pub mode: String,
    pub scope: String,
    pub shadow: bool,
    pub least_cost: u64,
    pub blocked_s: Option<f64>,
    pub limits: Vec<LimitDocument>,
    /// Describes the key's override in the store.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub override_words: Option<String>,
    /// `allow`, `deny` or `off`, by an override of the configuration.
    #[serde(rename = "override", skip_serializing_if = "Option::is_none")]
    pub override_rule: Option<String>,
    /// The Redis keys of the counters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub counters: Option<Vec<String>>,
}

/// Result of resetting a key.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct KeyResetDocument {
    pub policy: String,
    pub key: String,
    pub counters_forgotten: u64,
    /// Names of the limits that were reset.
    pub limits: Vec<String>,
    /// Whether a block was deleted.
    pub unblocked: bool,
    /// Remaining seconds of the key's block, if it stays because only one limit was reset.
    pub blocked_s: Option<f64>,
}

/// Counters in Redis, and whether there are more.
#[derive(Debug, Serialize)]
pub struct CounterListDocument {
    pub counters: Vec<CounterDocument>,
    pub more: bool,
}

/// A counter in Redis.
#[derive(Debug, Serialize)]
pub struct CounterDocument {
    /// The Redis key.
    pub key: String,
    /// The policy and the values of the key, if the Redis key contains them.
    pub readable: Option<String>,
    pub algorithm: &'static str,
    pub per_s: f64,
    pub used: u64,
    /// Seconds until units become available; `None` if none is used.
    pub frees_in_s: Option<f64>,
    /// The unit and the time zone of a calendar period.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tz: Option<String>,
}

/// What each policy does with a request, and the expected result.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ExplanationDocument {
    pub expected: ExpectedOutcome,
    pub policies: Vec<ExplainedPolicy>,
    /// Why the counters cannot be read.
    pub store_error: Option<String>,
    /// The error in the request's token.
    pub token_fault: Option<String>,
}

/// The expected result for the client.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct ExpectedOutcome {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// `None` if the counters cannot be read, or the request is rejected before policies apply.
    pub decision: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub by: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// What one policy does with a request.
#[derive(Debug, Serialize, Deserialize)]
pub struct ExplainedPolicy {
    pub policy: String,
    pub mode: String,
    pub shadow: bool,
    pub result: String,
    pub why: Option<String>,
    /// The result in words.
    #[serde(skip)]
    pub words: String,
    #[serde(flatten)]
    pub limited: Option<ExplainedKey>,
}

/// The key of a request in one policy, and its limits.
#[derive(Debug, Serialize, Deserialize)]
pub struct ExplainedKey {
    pub key: String,
    pub key_hash: String,
    pub scope: String,
    pub cost: u64,
    pub limits: Vec<LimitDocument>,
    pub blocked_s: Option<f64>,
}
