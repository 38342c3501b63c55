//! Policy matching: conditions, key templates, client identity and the compiled policy table.
//!
//! This module uses HTTP types such as methods and header maps, but no sockets and no file formats.
//! All functions work on borrowed [`Facts`], so `check`, tests and fuzz targets need no server.

mod authorization;
mod canonical_value;
pub mod client;
mod client_network;
mod conditions;
mod cors;
mod cost;
mod counted_statuses;
mod coverage;
mod coverage_index;
mod descriptor;
mod facts;
mod host_pattern;
mod json_pointer;
pub mod jwt;
mod key_component;
mod key_error;
mod key_hasher;
mod key_part;
mod key_template;
mod lenient_names;
mod limit_override;
mod matcher;
mod named_limit;
mod part_values;
pub mod path;
mod path_pattern;
mod policy_mode;
#[cfg(any(test, fuzzing))]
pub mod properties;
mod quota;
mod regex_spelling;
mod request_amounts;
mod self_service;
mod spelling_notes;
mod table;
mod value_checks;
mod value_pattern;
mod whole_number;

pub use canonical_value::{canonicalize_descriptor_value, canonicalize_part_value};
pub use conditions::{ConditionRegex, PartCondition, UnmetCondition, ValueCondition};
pub use cors::CorsOrigins;
pub use cost::{ActualCostSource, CostSource, EstimateCost, HeaderCost};
pub use counted_statuses::CountedStatuses;
pub use coverage_index::{CoverageIndex, merge_ascending};
pub use descriptor::Descriptor;
pub use facts::Facts;
pub use host_pattern::HostPattern;
pub use json_pointer::{JsonPointer, JsonPointerToken};
pub use key_component::{KeyDigests, is_credential_name};
pub use key_error::KeyError;
pub use key_hasher::KeyHasher;
pub use key_part::{KeyComponent, KeyPart};
pub use key_template::{KeyTemplate, MissingKeyAction};
pub use limit_override::{LimitOverride, LimitOverrides, OverrideRule, SelectedLimits};
pub use matcher::{AcceptedEntries, Matcher};
pub use named_limit::{AmountSource, NamedLimit, SlotRelease};
pub use part_values::{KeyContext, KeyValues};
pub use path_pattern::PathPattern;
pub use policy_mode::PolicyMode;
pub use quota::Quota;
pub use regex_spelling::accept_marked_letters;
pub use request_amounts::{RequestAmounts, read_request_amounts};
pub use self_service::{ClientQuota, ClientQuotas};
pub use table::{
    MatchingPolicies, PolicyTable, RateLimitHeaderSettings, SelfServiceSettings, dashed_name,
};
pub use value_checks::{HeaderValueError, ValueChecks};
pub use value_pattern::ValuePattern;
pub use whole_number::parse_whole_number;

use bytes::Bytes;
use http::{HeaderName, HeaderValue, StatusCode};
use strum::{EnumString, VariantNames};

/// A named rule: the requests it matches, how they are keyed, and how much is allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// `[A-Za-z0-9][A-Za-z0-9_.-]{0,62}`, unique in the table.
    pub name: Box<str>,
    /// Policies with a higher priority apply first; policies of equal priority apply in file order.
    pub priority: i64,
    pub matcher: Matcher,
    pub action: PolicyAction,
    pub mode: PolicyMode,
    /// Whether responses to clients name the policy and its limits.
    pub is_reported: bool,
    pub on_store_failure: OnStoreFailure,
    /// Response to requests that this policy rejects, instead of the standard response.
    pub reject_response: Option<RejectResponse>,
}

/// The action of a policy on a matching request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PolicyAction {
    Limit(Box<Quota>),
    /// Exempts the request: no later policy applies.
    Allow,
    /// Rejects every matching request.
    Deny,
}

/// The action of a policy when the store is unavailable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum OnStoreFailure {
    Open,
    Closed,
    /// Without the store, the process counts by itself, against its share of the limits.
    Local,
}

/// A configured response to rejected requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RejectResponse {
    /// `None` for the status without a configured response: 429, or 403 if the request is denied.
    pub status: Option<StatusCode>,
    pub body: Bytes,
    pub content_type: HeaderValue,
    pub headers: Vec<(HeaderName, HeaderValue)>,
}

impl Policy {
    /// Whether the policy may reject, exempt or deny.
    pub fn is_enforced(&self) -> bool {
        self.mode.is_enforced()
    }

    /// The quota, if the policy limits requests.
    pub fn quota(&self) -> Option<&Quota> {
        match &self.action {
            PolicyAction::Limit(quota) => Some(quota),
            PolicyAction::Allow | PolicyAction::Deny => None,
        }
    }

    /// Whether each instance counts for itself, so that the store's availability is irrelevant.
    pub fn is_instance_scoped(&self) -> bool {
        self.quota().is_some_and(Quota::is_instance_scoped)
    }

    /// Returns the first condition that does not hold, or `None` if the policy applies.
    ///
    /// A path may have several interpretations. A limiting or denying policy applies if any
    /// interpretation matches. An exempting policy applies only if every interpretation matches, so
    /// that an ambiguous spelling gains no exemption.
    pub fn first_unmet_condition(&self, facts: &Facts<'_>) -> Option<UnmetCondition<'_>> {
        let is_exemption = matches!(self.action, PolicyAction::Allow);
        // An app that decodes twice would serve another path than the exempted one.
        if is_exemption && facts.paths.has_nested_escape() && self.matcher.reads_path() {
            return Some(UnmetCondition::NestedEscape);
        }
        let mut unmet = facts
            .paths
            .iter()
            .map(|path| self.matcher.first_unmet_condition(facts, path));
        match self.action {
            PolicyAction::Allow => unmet.find(Option::is_some).flatten(),
            // `None` if any interpretation matches.
            PolicyAction::Limit(_) | PolicyAction::Deny => unmet.reduce(Option::and).flatten(),
        }
    }

    /// Returns why it is unclear whether the policy applies: upstreams may read a query parameter
    /// or cookie of its conditions differently, and all other conditions hold.
    pub fn find_ambiguity(&self, facts: &Facts<'_>, client: &client::Settings) -> Option<KeyError> {
        let matcher = &self.matcher;
        let mut paths = facts.paths.iter();
        paths.find_map(|path| matcher.find_ambiguity(facts, path, client))
    }
}
