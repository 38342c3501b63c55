//! Which limits apply to a request: conditions, keys, client identity, and the compiled table.
//!
//! Knows HTTP's vocabulary (methods, header maps) but no socket and no file format: everything here
//! works on borrowed [`Facts`], so that `check`, tests and fuzzing need no server.

pub mod client;
mod cors;
mod cost;
mod covers;
mod descriptor;
mod facts;
pub mod jwt;
mod key;
mod matcher;
pub mod path;
mod pattern;
#[cfg(any(test, fuzzing))]
pub mod properties;
mod quota;
mod table;

pub use cors::Cors;
pub use cost::{Actual, Cost, EstimateCost, HeaderCost, Pointer, Token, whole};
pub use descriptor::{Described, Descriptor};
pub use facts::Facts;
pub use key::{KeyFault, KeyPart, KeyTemplate, KeyValues, MissingKey};
pub use matcher::{HostPattern, Matcher, MethodSet, Named, Test, Unmet};
pub use pattern::PathPattern;
pub use quota::{NamedLimit, Override, Overrides, Quota};
pub use table::{Fields, PolicyTable};

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
    pub action: Action,
    /// Decides and counts, but never rejects, exempts or denies.
    pub shadow: bool,
    pub on_store_failure: OnStoreFailure,
    /// What a refused client gets instead of the standard answer.
    pub reject: Option<Reject>,
}

/// What a policy does with a request that it matches.
#[derive(Clone, Debug)]
pub enum Action {
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
pub struct Reject {
    pub status: StatusCode,
    pub body: Bytes,
    pub content_type: HeaderValue,
    pub headers: Vec<(HeaderName, HeaderValue)>,
}
