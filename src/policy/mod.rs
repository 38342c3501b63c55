//! Policy matching: conditions, key templates, client identity and the compiled policy table.
//!
//! This module uses HTTP types such as methods and header maps, but no sockets and no file formats.
//! All functions work on borrowed [`Facts`], so `check`, tests and fuzz targets need no server.

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
mod lenient_names;
mod matcher;
mod named_limit;
pub mod path;
mod path_pattern;
#[cfg(any(test, fuzzing))]
pub mod properties;
mod quota;
mod spelling_notes;
mod table;
mod whole_number;

pub use conditions::{NamedCondition, UnmetCondition, ValueCondition};
pub use cors::CorsOrigins;
pub use cost::{ActualCostSource, CostSource, EstimateCost, HeaderCost};
pub use descriptor::{Descriptor, DescriptorConditions};
pub use facts::Facts;
pub use json_pointer::{JsonPointer, JsonPointerToken};
pub use key_template::{KeyContext, KeyError, KeyPart, KeyTemplate, KeyValues, MissingKeyAction};
pub use matcher::{HostPattern, Matcher, MethodSet};
pub use named_limit::NamedLimit;
pub use path_pattern::PathPattern;
pub use quota::{LimitOverride, LimitOverrides, Quota};
pub use table::{PolicyTable, RateLimitHeaderSettings};
pub use whole_number::parse_whole_number;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, StatusCode};

/// A named rule: the requests it matches, how they are keyed, and how much is allowed.
#[derive(Clone, Debug)]
pub struct Policy {
    /// `[A-Za-z0-9][A-Za-z0-9_.-]{0,62}`, unique in the table.
    pub name: Box<str>,
    /// Policies with a higher priority apply first; policies of equal priority apply in file order.
    pub priority: i64,
    pub matcher: Matcher,
    pub action: PolicyAction,
    /// A shadow policy decides and counts, but never rejects, exempts or denies.
    pub shadow: bool,
    pub on_store_failure: OnStoreFailure,
    /// Response to requests that this policy rejects, instead of the standard response.
    pub reject_response: Option<RejectResponse>,
}

/// The action of a policy on a matching request.
#[derive(Clone, Debug)]
pub enum PolicyAction {
    Limit(Box<Quota>),
    /// Exempts the request: no later policy applies.
    Allow,
    /// Rejects every matching request.
    Deny,
}

/// The action of a policy when the store is unavailable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnStoreFailure {
    Open,
    Closed,
    /// Without the store, the process counts by itself, against its share of the limits.
    Local,
}

/// A configured response to rejected requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectResponse {
    pub status: StatusCode,
    pub body: Bytes,
    pub content_type: HeaderValue,
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

impl Policy {
    /// Returns the first condition that does not hold, or `Retry` if the policy applies.
    ///
    /// A path may have several interpretations. A limiting or denying policy applies if any
    /// interpretation matches. An exempting policy applies only if every interpretation matches, so
    /// that an ambiguous spelling gains no exemption.
    pub fn first_unmet_condition(&self, facts: &Facts<'_>) -> Option<UnmetCondition<'_>> {
        let is_exemption = matches!(self.action, PolicyAction::Allow);
        // An app that decodes twice would serve another path than the exempted one.
        if is_exemption && facts.paths.has_nested_escape() && self.matcher.has_path_condition() {
            return Some(UnmetCondition::NestedEscape);
        }
        let mut unmet = facts
            .paths
            .iter()
            .map(|path| self.matcher.first_unmet_condition(facts, path));
        match self.action {
            PolicyAction::Allow => unmet.find(Option::is_some).flatten(),
            // `Retry` if any interpretation matches.
            PolicyAction::Limit(_) | PolicyAction::Deny => unmet.reduce(Option::and).flatten(),
        }
    }
}
