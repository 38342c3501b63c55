//! Describes the fields that a log lacks and the policies that they affect.

use super::log_merge::ReplayRequest;
use super::parsers::RequiredFields;
use crate::policy::{
    ActualCost, CostSource, KeyPart, Matcher, Policy, PolicyTable, Quota, ReportSource,
};
use http::StatusCode;
use http::header::COOKIE;
use std::collections::BTreeSet;

/// Numbers of requests for which the log has, or lacks, certain fields.
#[derive(Clone, Debug, Default)]
pub(super) struct FieldCoverage {
    pub(super) required_fields: RequiredFields,
    pub(super) requests: u64,
    pub(super) with_peer: u64,
    pub(super) with_host: u64,
    pub(super) with_duration: u64,
    /// Requests with a status.
    pub(super) with_status: u64,
    /// Requests that the server answered with status 429 at the time of the log.
    pub(super) answered_429: u64,
    /// Requests that the server answered with an error of the client or its own, such as 429.
    pub(super) answered_with_error: u64,
    /// Requests with a header or mapped value, by its index in `required_fields`.
    pub(super) with_field: Vec<u64>,
    /// Requests from logs that do not record the query string.
    pub(super) without_query: u64,
    /// Requests from a trusted proxy without the header that names the client.
    pub(super) hidden_clients: u64,
}

impl FieldCoverage {
    pub(super) fn new(required_fields: RequiredFields) -> Self {
        Self {
            with_field: vec![0; required_fields.names.len()],
            required_fields,
            ..Self::default()
        }
    }

    /// The fields that the policies of `table` read, in the requests counted so far.
    pub(super) fn check<'a>(&'a self, table: &'a PolicyTable) -> MissingFieldCheck<'a> {
        MissingFieldCheck {
            table,
            coverage: self,
        }
    }

    /// Counts a request and the fields that it has.
    pub(super) fn record_request(&mut self, request: &ReplayRequest<'_>, is_client_hidden: bool) {
        self.requests += 1;
        self.with_peer += u64::from(request.facts.peer.is_some());
        self.with_host += u64::from(!request.host.is_empty());
        self.with_duration += u64::from(request.facts.duration_us.is_some());
        self.with_status += u64::from(StatusCode::from_u16(request.facts.status).is_ok());
        self.answered_429 += u64::from(request.facts.status == 429);
        self.answered_with_error += u64::from(request.facts.status >= 400);
        self.without_query += u64::from(!request.log_has_query);
        self.hidden_clients += u64::from(is_client_hidden);
        for (index, _) in request.field_values() {
            if let Some(count) = self.with_field.get_mut(index) {
                *count += 1;
            }
        }
    }
}

/// Returns one sentence for each gap in the log that affects the results.
pub(super) fn describe_missing_fields(
    table: &PolicyTable,
    coverage: &FieldCoverage,
) -> Vec<String> {
    if coverage.requests == 0 {
        return Vec::new();
    }
    let check = coverage.check(table);
    let mut sentences: Vec<String> = table
        .policies()
        .iter()
        .filter_map(|policy| check.describe_missing_policy_fields(policy))
        .collect();
    let policies = table.policies().iter();
    let by_instances = policies.filter(|policy| policy.is_instance_scoped());
    let by_instances: Vec<_> = by_instances.map(|policy| &policy.name).collect();
    if !by_instances.is_empty() {
        let are = if by_instances.len() == 1 { "is" } else { "are" };
        let names = join_texts(by_instances, ", ");
        sentences.push(format!(
            "{names} {are} counted per instance (scope = \"instance\"), but the log does not name the instance; \
             the replay counts as one instance",
        ));
    }
    let (requests, hidden) = (coverage.requests, coverage.hidden_clients);
    let without_peer = requests - coverage.with_peer;
    if table.depends_on_client_ip && without_peer > 0 {
        sentences.push(format!(
            "{without_peer} of {requests} requests have no client address in the log; all count as the client 0.0.0.0"
        ));
    }
    if table.depends_on_client_ip && hidden > 0 {
        let header = &table.client.ip_header;
        sentences.push(format!(
            "{hidden} of {requests} requests came from a trusted proxy without {header} in the log; all clients behind \
             a proxy count as one client. If the log has the header in another field, use --header-from {header}=FIELD"
        ));
    }
    sentences
}

fn join_texts<T: ToString>(texts: impl IntoIterator<Item = T>, separator: &str) -> String {
    let texts: Vec<String> = texts.into_iter().map(|text| text.to_string()).collect();
    texts.join(separator)
}

/// The option that maps a log field to a header or source.
pub(super) fn mapping_option(name: &str) -> String {
    let is_header = !name.contains(':') && name != "request_bytes";
    let option = if is_header { "header" } else { "field" };
    format!("--{option}-from {name}")
}

fn suggest_mapping(name: &str) -> String {
    format!("; {}=FIELD names the field", mapping_option(name))
}

/// Suggests the option for a header or a value in the body. The text is empty for other parts.
fn suggest_part_mapping(part: &KeyPart) -> String {
    match part {
        KeyPart::Header(name) => suggest_mapping(name.as_str()),
        KeyPart::Body(_) => suggest_mapping(&part.source_label()),
        _ => String::new(),
    }
}

/// Checks which fields the log has had so far.
pub(super) struct MissingFieldCheck<'a> {
    table: &'a PolicyTable,
    coverage: &'a FieldCoverage,
}

impl MissingFieldCheck<'_> {
    /// Returns whether a policy has a key with a part that no request in the log has. What an option
    /// maps is in the log: otherwise the replay fails at the end.
    pub(super) fn lacks_key(&self, policy_index: usize) -> bool {
        let policy = self.table.policies().get(policy_index);
        let quota = policy.and_then(Policy::quota);
        quota.is_some_and(|quota| !self.missing_key_parts(quota).is_empty())
    }

    /// The policies for which [`Self::lacks_key`] is true, by index.
    pub(super) fn policies_without_key(&self) -> impl Iterator<Item = usize> {
        (0..self.table.policies().len()).filter(|policy| self.lacks_key(*policy))
    }

    fn missing_key_parts<'q>(&self, quota: &'q Quota) -> Vec<&'q KeyPart> {
        let parts = quota.key.parts();
        parts.filter(|part| !self.log_has_key_part(part)).collect()
    }

    fn has_field(&self, name: &str) -> bool {
        let required = &self.coverage.required_fields;
        let place = required.names.iter().position(|known| known == name);
        place.is_some_and(|place| {
            let count = self.coverage.with_field.get(place);
            required.is_mapped(place) || count.is_some_and(|count| *count > 0)
        })
    }

    fn describe_missing_policy_fields(&self, policy: &Policy) -> Option<String> {
        if let Some(quota) = policy.quota()
            && let missing @ [_, ..] = self.missing_key_parts(quota).as_slice()
        {
            let mut sentence = format!(
                "policy {}: left out of the result, because {} of its key is not in the log",
                policy.name,
                join_texts(missing, ", ")
            );
            for part in missing.iter().flat_map(|part| part.alternatives()) {
                sentence.push_str(&suggest_part_mapping(part));
            }
            return Some(sentence);
        }
        let mut missing_conditions = BTreeSet::new();
        self.collect_missing_conditions(&policy.matcher, &mut missing_conditions);
        let mut texts = Vec::new();
        if !missing_conditions.is_empty() {
            let names = join_texts(missing_conditions, ", ");
            texts.push(format!(
                "its conditions on {names} were evaluated as if no request had them"
            ));
        }
        if let Some(quota) = policy.quota() {
            self.describe_missing_quota_fields(quota, &mut texts);
        }
        (!texts.is_empty()).then(|| {
            format!(
                "policy {}: fields are missing from the log: {}",
                policy.name,
                texts.join("; ")
            )
        })
    }

    fn describe_missing_quota_fields(&self, quota: &Quota, texts: &mut Vec<String>) {
        let absent = quota
            .key
            .sources()
            .filter(|part| !self.log_has_key_part(part));
        let absent: Vec<_> = absent.collect();
        if !absent.is_empty() {
            let they_were = if absent.len() == 1 {
                "it were"
            } else {
                "they were"
            };
            let names = join_texts(absent, " and no ");
            texts.push(format!(
                "the log has no {names}, so every request was treated as if {they_were} absent"
            ));
        }
        self.describe_missing_cost_parts(&quota.cost, texts);
        match &quota.cost {
            CostSource::Header(cost) if !self.has_field(cost.name.as_str()) => {
                texts.push(format!(
                    "every request cost {}, because {} is missing",
                    cost.default, cost.name
                ));
            }
            CostSource::Estimate(cost) if matches!(cost.actual, ActualCost::Status(_)) => {
                let (requests, statuses) = (self.coverage.requests, cost.actual.to_string());
                let without = requests - self.coverage.with_status;
                if without > 0 {
                    let statuses = statuses.trim_start_matches("status ");
                    texts.push(format!(
                        "{without} of {requests} requests have no status, so each counted as if it had one of {statuses}"
                    ));
                }
            }
            CostSource::Estimate(cost) => {
                let reported = cost.actual.reported();
                let has_source = |source: &ReportSource| self.has_field(&source.label());
                let missing = reported.iter();
                let missing = missing.filter(|one| !one.sources.iter().any(has_source));
                let missing = missing.filter_map(|one| one.sources.first());
                let missing: Vec<_> = missing.map(|one| suggest_mapping(&one.label())).collect();
                let suggestions = missing.concat();
                let estimate = &cost.estimate;
                if missing.len() == reported.len() {
                    texts.push(format!("every request cost its estimate, {estimate}, because the log has no response data{suggestions}"));
                } else if !missing.is_empty() {
                    texts.push(format!(
                        "parts of its reported cost are missing{suggestions}"
                    ));
                }
            }
            CostSource::Fixed(_) | CostSource::Header(_) => {}
        }
        let mut limits = quota.all_limits();
        let default_amounts = limits.clone().filter_map(|named| {
            let source = named.amount.as_ref()?;
            let default = named.limit.requests;
            (!self.log_has_key_part(&source.field)).then(|| {
                format!(
                    "every request had the default amount {default}, because {} is missing",
                    source.field
                )
            })
        });
        texts.extend(default_amounts);
        let is_concurrency = limits.any(|named| named.limit.algorithm.counts_slots());
        let requests = self.coverage.requests;
        let without = requests - self.coverage.with_duration;
        if is_concurrency && without > 0 {
            texts.push(format!(
                "{without} of {requests} requests have no duration, so they hold no slot of its concurrency limit"
            ));
        }
    }

    /// What the cost reads in requests.
    fn describe_missing_cost_parts(&self, cost: &CostSource, texts: &mut Vec<String>) {
        let parts = cost.parts().filter(|part| !self.log_has_key_part(part));
        let parts = parts.map(|part| (part.to_string(), suggest_part_mapping(&part)));
        let is_size_missing = cost.reads_body_size() && !self.has_field("request_bytes");
        let size = is_size_missing.then(|| ("a body".to_owned(), suggest_mapping("request_bytes")));
        let parts: BTreeSet<_> = parts.chain(size).collect();
        texts.extend(parts.into_iter().map(|(part, suggestion)| {
            format!("its cost was computed as if no request had {part}{suggestion}")
        }));
    }

    fn log_has_key_part(&self, part: &KeyPart) -> bool {
        match part {
            KeyPart::Header(name) => self.has_field(name.as_str()),
            KeyPart::Body(_) => self.has_field(&part.source_label()),
            KeyPart::Cookie(_) => self.has_field(COOKIE.as_str()),
            KeyPart::Query(_) => self.coverage.without_query < self.coverage.requests,
            KeyPart::Host => self.coverage.with_host > 0,
            KeyPart::Claim(_) => {
                let reader = self.table.token_reader.as_ref();
                reader.is_some_and(|reader| self.has_field(reader.settings.header.as_str()))
            }
            KeyPart::ClientCertSan | KeyPart::ClientCertCn => false,
            KeyPart::ClientIp => self.coverage.with_peer > 0,
            KeyPart::PathCaptures(_)
            | KeyPart::Method
            | KeyPart::WholePath
            | KeyPart::Const(_)
            // An access log has no descriptors, so a policy with a descriptor in its key matches no
            // request.
            | KeyPart::DescriptorDomain
            | KeyPart::DescriptorEntry(_)
            | KeyPart::WholeDescriptor => true,
            KeyPart::Alternatives(_) => part.alternatives().any(|one| self.log_has_key_part(one)),
        }
    }

    fn collect_missing_conditions(&self, matcher: &Matcher, missing: &mut BTreeSet<String>) {
        let parts = matcher.all_conditions().into_iter().map(|one| &one.part);
        // A client without an address counts as 0.0.0.0.
        let parts =
            parts.filter(|part| **part != KeyPart::ClientIp && !self.log_has_key_part(part));
        missing.extend(parts.map(|part| match part {
            KeyPart::Host => "the host".to_owned(),
            part => part.to_string(),
        }));
    }
}
