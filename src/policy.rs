//! Policy matching: conditions, key templates, client identity and the compiled policy table.
//!
//! This module uses HTTP types such as methods and header maps, but no sockets and no file formats.
//! All functions work on borrowed [`Facts`], so `check`, tests and fuzz targets need no server.

mod authorization;
mod body_facts;
pub mod client;
mod cors;
mod cost;
mod coverage;
mod descriptor;
mod facts;
mod host_pattern;
mod json_pointer;
mod json_scanner;
pub mod jwt;
mod key_part;
mod key_template;
mod matcher;
mod media_type;
mod named_limit;
mod part_values;
pub mod path;
mod path_pattern;
mod policy_index;
#[cfg(any(test, fuzzing))]
pub mod properties;
mod quota;
mod regex_spelling;
mod request_body;
mod self_service;
mod table;
mod threshold;
mod value_checks;
mod value_hasher;
mod value_pattern;

pub use body_facts::BodyFacts;
pub use cors::CorsOrigins;
pub use cost::{
    ActualCost, CostSource, CountedStatuses, CutOff, Estimate, EstimateCost, Factor,
    FactorsOfRequest, HeaderCost, ReportSource, ReportedUnits, StatedSource, StatedUnits, Weight,
    WeightsByValue,
};
pub use coverage::{CoverageIndex, merge_ascending};
pub use descriptor::Descriptor;
pub use facts::Facts;
pub use host_pattern::HostPattern;
pub use json_pointer::{JsonPointer, JsonPointerToken, parse_whole_number};
pub(crate) use json_scanner::JsonPointerScanner;
pub use key_part::{KeyComponent, KeyPart, is_credential_name};
pub use key_template::{KeyTemplate, MissingKeyAction};
pub use matcher::{
    AcceptedEntries, ConditionRegex, Matcher, PartCondition, UnmetCondition, ValueCondition,
};
pub use media_type::MediaType;
pub use named_limit::{AmountSource, NamedLimit, SlotRelease};
pub use part_values::{KeyContext, KeyValues};
pub use path_pattern::PathPattern;
pub use quota::{
    LimitOverride, LimitOverrides, OverrideRule, Quota, RequestAmounts, SelectedLimits,
    read_request_amounts,
};
pub use regex_spelling::accept_marked_letters;
pub use request_body::{BodyFormat, read_body};
pub use self_service::{ClientQuota, ClientQuotas};
pub use table::{
    MatchingPolicies, PolicyTable, RateLimitHeaderSettings, SelfServiceSettings, dashed_name,
};
pub use threshold::Threshold;
pub use value_checks::{HeaderValueError, KeyError, ValueChecks};
pub use value_hasher::{ValueDigests, ValueHasher};
pub use value_pattern::{ValuePattern, canonicalize_descriptor_value, canonicalize_part_value};

use bytes::Bytes;
use http::{HeaderName, HeaderValue, StatusCode};
use strum::{EnumString, IntoStaticStr, VariantNames};

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
    /// Bytes of a request's body that are read at most.
    pub max_scan: u64,
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

/// What a policy does with its decisions. In every mode it decides and counts.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, EnumString, VariantNames, IntoStaticStr,
)]
#[strum(serialize_all = "snake_case", const_into_str)]
pub enum PolicyMode {
    Enforce,
    /// Never rejects, exempts or denies: a request over the limit is forwarded with a header that
    /// names the policy.
    Mark,
    /// Never rejects, exempts or denies, and is invisible to clients and the upstream.
    Shadow,
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
        let skips = |quota: &Quota| quota.missing_key == MissingKeyAction::Skip;
        let strict;
        let facts = if facts.body.is_some() && (is_exemption || self.quota().is_some_and(skips)) {
            strict = facts.with_unreadable_values(false);
            &strict
        } else {
            facts
        };
        // An app that decodes twice would serve another path than the exempted one.
        if is_exemption && facts.paths.has_nested_escape && self.matcher.reads_path() {
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
    /// or cookie of its conditions differently, or the body can't be read and `missing_key`
    /// rejects, and all other conditions hold.
    pub fn find_ambiguity(&self, facts: &Facts<'_>, checks: ValueChecks) -> Option<KeyError> {
        let matcher = &self.matcher;
        let mut paths = facts.paths.iter();
        let ambiguity = paths.find_map(|path| matcher.find_ambiguity(facts, path, checks));
        ambiguity.or_else(|| {
            let rejects = |quota: &&Quota| quota.missing_key == MissingKeyAction::Reject;
            self.quota().filter(rejects)?;
            let part = matcher.unreadable_body_part(facts)?;
            let strict = facts.with_unreadable_values(false);
            let depends_on_body = self.first_unmet_condition(facts).is_none()
                && self.first_unmet_condition(&strict).is_some();
            depends_on_body.then(|| KeyError::UnreadableBody(part.to_string()))
        })
    }

    /// Whether the policy may apply, whatever the body says. In `facts` the body is unreadable.
    pub fn needs_body(&self, facts: &Facts<'_>) -> bool {
        let mut paths = facts.paths.iter();
        paths.any(|path| self.matcher.matches(facts, path))
    }
}

impl PolicyMode {
    /// The name in the configuration and in reports.
    pub const fn name(self) -> &'static str {
        self.into_str()
    }

    /// ` (mark)` or ` (shadow)`, to follow the name of a policy that does not reject.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::Enforce => "",
            Self::Mark => " (mark)",
            Self::Shadow => " (shadow)",
        }
    }

    /// Whether the policy may reject, exempt or deny.
    pub fn is_enforced(self) -> bool {
        self == Self::Enforce
    }
}
