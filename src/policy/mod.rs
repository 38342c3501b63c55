//! Which limits apply to a request: conditions, keys, client identity, and the compiled table.
//!
//! Knows HTTP's vocabulary (methods, header maps) but no socket and no file format: everything here
//! works on borrowed [`Facts`], so that `check`, tests and fuzzing need no server.

pub mod client;
mod conditions;
mod cors;
mod cost;
mod coverage;
mod descriptor;
mod facts;
mod json_pointer;
pub mod jwt;
mod key_template;
mod matcher;
mod named_limit;
pub mod path;
mod path_pattern;
#[cfg(any(test, fuzzing))]
pub mod properties;
mod quota;
mod table;
mod whole_number;

pub use conditions::{NamedCondition, UnmetCondition, ValueCondition};
pub use cors::CorsOrigins;
pub use cost::{ActualCostSource, CostSource, EstimateCost, HeaderCost};
pub use descriptor::{Descriptor, DescriptorConditions};
pub use facts::Facts;
pub use json_pointer::{JsonPointer, JsonPointerToken};
pub use key_template::{KeyFault, KeyPart, KeyTemplate, KeyValues, MissingKeyAction};
pub use matcher::{HostPattern, Matcher, MethodSet};
pub use named_limit::NamedLimit;
pub use path_pattern::PathPattern;
pub use quota::{LimitOverride, LimitOverrides, Quota};
pub use table::{PolicyTable, RateLimitHeaderSettings};
pub use whole_number::parse_whole_number;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, StatusCode};

/// A named rule: which requests it matches, how they are keyed, how much is allowed.
#[derive(Clone, Debug)]
pub struct Policy {
    /// `[A-Za-z0-9][A-Za-z0-9_.-]{0,62}`, unique in the table.
    pub name: Box<str>,
    /// Higher first; file order among equals.
    pub priority: i64,
    pub matcher: Matcher,
    pub action: PolicyAction,
    /// Decides and counts, but never rejects, exempts or denies.
    pub shadow: bool,
    pub on_store_failure: OnStoreFailure,
    /// What a refused client gets instead of the standard answer.
    pub reject_response: Option<RejectResponse>,
}

/// What a policy does with a request that it matches.
#[derive(Clone, Debug)]
pub enum PolicyAction {
    Limit(Box<Quota>),
    /// Exempt: no later policy applies.
    Allow,
    /// Refused, whatever the quota.
    Deny,
}

/// What to do when the store cannot answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnStoreFailure {
    Open,
    Closed,
    /// This process goes on with its share of the limits.
    Local,
}

/// An owner's own words to refused clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectResponse {
    pub status: StatusCode,
    pub body: Bytes,
    pub content_type: HeaderValue,
    pub headers: Vec<(HeaderName, HeaderValue)>,
}
