//! Applies one policy set to logged requests and counts the outcomes.

use super::Settings;
use super::log_merge::ReplayRequest;
use super::missing_fields::{FieldCoverage, describe_missing_fields};
use super::report::{PolicyReport, PolicySetReport, RefusedKeyReport};
use super::statistics::ReplayKeyTable;
use super::suggestions::PeakDemandTracker;
use crate::clock::{Clock, ManualClock};
use crate::enforcer::{
    DryRunOutcome, EstimatedCharge, PolicyDecision, PolicyOutcome, dry_run_request,
};
use crate::limiter::{Amendment, Key, Limit, MAX_UNITS};
use crate::policy::client::ClientAddress;
use crate::policy::jwt::RequestToken;
use crate::policy::path::{self, PathInterpretations};
use crate::policy::{BodyFacts, Facts, Policy, PolicyAction, PolicyMode, PolicyTable};
use crate::policy::{ReportSource, parse_whole_number};
use crate::proxy::normalize_host;
use crate::store::{MemorySettings, MemoryStore, Settlement, SettlementQueue, Store};
use crate::telemetry::metrics::{MetricLabels, Metrics};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Instant;

/// Limits of the counter store of one policy set. Suggestions use a second store of the same size.
const COUNTER_STORE_SETTINGS: MemorySettings = MemorySettings {
    max_keys: 1 << 20,
    max_bytes: 256 << 20,
};

/// Maximum number of keys with exact statistics, shared by all policies.
const MAX_TRACKED_KEYS: usize = 1 << 20;

/// Maximum number of requests that hold concurrency slots at a time. Requests beyond this maximum
/// release their slots immediately.
const MAX_IN_FLIGHT: usize = 1 << 18;

/// Maximum time that a request holds a slot, so that a wrong duration in the log cannot hold one
/// forever.
const MAX_HOLD_US: u64 = 86_400_000_000;

/// Simulation of one policy set.
#[derive(Debug)]
pub(crate) struct PolicySimulator<'t> {
    table: &'t PolicyTable,
    /// Names of the logged values, by index.
    names: &'t [String],
    memory: Arc<MemoryStore>,
    settlements: Arc<SettlementQueue>,
    clock_control: ManualClock,
    /// Constant time argument for store calls, because the manual clock supplies the log time.
    fixed_instant: Instant,
    in_flight: InFlightRequests,
    /// Indices of the policies that do not apply: no request so far had a part of their key.
    left_out: Vec<usize>,
    pub(super) report: PolicySetReport,
    /// Statistics of the keys of each policy, in the order of the policy table.
    keys_by_policy: Vec<ReplayKeyTable>,
    peaks: Option<PeakDemandTracker<'t>>,
}

impl<'t> PolicySimulator<'t> {
    /// Creates the simulator of a policy set. Policies whose key is not in `known_coverage` are
    /// left out until a request has it.
    pub(super) fn new(
        config: &str,
        table: &'t PolicyTable,
        known_coverage: &'t FieldCoverage,
        with_suggestions: bool,
    ) -> Self {
        let (clock, clock_control) = Clock::manual(0);
        let policy_count = table.policies().len();
        let max_keys = (MAX_TRACKED_KEYS / policy_count.max(1)).max(1 << 10);
        let memory = MemoryStore::new(COUNTER_STORE_SETTINGS, clock.clone());
        let memory = Arc::new(memory);
        let metrics = Metrics::new(0, MetricLabels::default()).worker_metrics(0);
        Self {
            table,
            names: &known_coverage.required_fields.names,
            settlements: SettlementQueue::new(Store::Memory(Arc::clone(&memory)), metrics),
            peaks: with_suggestions
                .then(|| PeakDemandTracker::new(table, COUNTER_STORE_SETTINGS, clock.clone())),
            memory,
            clock_control,
            fixed_instant: Instant::now(),
            in_flight: InFlightRequests::default(),
            left_out: known_coverage.check(table).policies_without_key().collect(),
            keys_by_policy: (0..policy_count)
                .map(|_| ReplayKeyTable::new(max_keys))
                .collect(),
            report: PolicySetReport {
                config: config.to_owned(),
                policies: table.policies().iter().map(new_policy_report).collect(),
                field_coverage: FieldCoverage::new(known_coverage.required_fields.clone()),
                ..PolicySetReport::default()
            },
        }
    }

    /// Returns the results of all requests.
    pub(super) fn into_report(self, settings: &Settings) -> PolicySetReport {
        let mut report = self.report;
        let peaks_and_percent = self.peaks.as_ref().zip(settings.suggest_percent);
        let results = report.policies.iter_mut().zip(&self.keys_by_policy);
        for (index, (result, keys)) in results.enumerate() {
            result.left_out = self.left_out.contains(&index);
            (result.keys, result.keys_exact) = keys.key_count();
            result.keys_touched = keys.refused_keys;
            let top = keys.most_refused_keys(settings.top_keys).into_iter();
            report.top.extend(top.map(|key| {
                let values = key.readable_key.split_once('/').map(|(_, values)| values);
                RefusedKeyReport {
                    policy: result.name.clone(),
                    mode: result.mode,
                    shadow: result.shadow,
                    key: values.unwrap_or("(all requests)").to_owned(),
                    stats: key.clone(),
                }
            }));
            if let Some((peaks, percent)) = peaks_and_percent {
                result.suggested = peaks.suggest_limits(index, percent);
            }
        }
        report.top.sort_by_key(|key| Reverse(key.stats.refused));
        report.top.truncate(settings.top_keys);
        report.lacks = describe_missing_fields(self.table, &report.field_coverage);
        report.refused_then = report.field_coverage.answered_429;
        let peaks = self.peaks.as_ref();
        report.evicted_counters =
            self.memory.eviction_count() + peaks.map_or(0, PeakDemandTracker::evicted_counters);
        report
    }

    /// Simulates one request and returns whether it is forwarded. A request older than the previous
    /// one is simulated at the time of the previous one.
    pub(super) fn evaluate_request(&mut self, request: &ReplayRequest<'_>) -> bool {
        let report = &mut self.report;
        let now_us = request.facts.arrival_us.max(report.last_request_us);
        report.late += u64::from(now_us > request.facts.arrival_us);
        if report.field_coverage.requests == 0 {
            report.first_request_us = now_us;
        }
        report.last_request_us = now_us;
        self.in_flight
            .renew_and_release_due_slots(now_us, &self.memory, &self.clock_control);
        self.clock_control.set_us(now_us);

        let headers = self.build_header_map(request);
        let peer = request.facts.peer;
        let peer = peer.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let client = ClientAddress::identify(peer, &headers, &self.table.client);
        let is_client_hidden =
            client.is_peer_trusted && !headers.contains_key(&self.table.client.ip_header);
        self.report
            .field_coverage
            .record_request(request, is_client_hidden);
        if !self.left_out.is_empty() {
            let check = self.report.field_coverage.check(self.table);
            self.left_out.retain(|policy| check.lacks_key(*policy));
        }
        let is_forwarded = self.apply_policies(request, now_us, &headers, &client);
        if is_forwarded.is_none() {
            self.report.malformed += 1;
            self.report.series.counts.record_request(now_us, true);
        }
        is_forwarded.unwrap_or(false)
    }

    /// Returns whether the request is forwarded; `None` if it is malformed.
    fn apply_policies(
        &mut self,
        request: &ReplayRequest<'_>,
        now_us: u64,
        headers: &HeaderMap,
        client: &ClientAddress,
    ) -> Option<bool> {
        let target = LoggedTarget::from_request(request, &self.table.path)?;
        let token = match &self.table.token_reader {
            Some(reader) if reader.has_ambiguous_token(headers) => return None,
            Some(reader) => RequestToken::new(Some(reader), now_us / 1_000_000),
            None => RequestToken::default(),
        };
        let names = self.names;
        let read_field = |name: &str| {
            let mut values = request.field_values();
            let found = values.find(|(index, _)| names.get(*index).is_some_and(|one| one == name));
            str::from_utf8(found?.1).ok()
        };
        let pointers = self.table.body_pointers();
        let texts = pointers.map(|one| (one.clone(), read_field(&format!("body:{one}"))));
        let size = read_field("request_bytes").map_or(Some(0), |size| size.parse().ok());
        let body = BodyFacts::from_texts(size, texts);
        let facts = Facts {
            method: &target.method,
            host: &target.host,
            paths: &target.paths,
            query: target.query,
            headers,
            client_ip: client.ip,
            token: &token,
            is_peer_trusted: client.is_peer_trusted,
            body: Some(&body),
            ..Facts::placeholder()
        };
        let (report, peaks, table) = (&mut self.report, &mut self.peaks, self.table);
        let keys_by_policy = &mut self.keys_by_policy;
        self.in_flight.last_slot_id += 1;
        let (slot, instant) = (self.in_flight.last_slot_id, self.fixed_instant);
        let left_out = &self.left_out;
        let result = dry_run_request(
            (&self.memory, &self.settlements),
            table,
            &facts,
            (slot, instant),
            |at| left_out.binary_search(&at).is_err(),
            |outcome| {
                let keys = keys_by_policy.get_mut(outcome.policy_index);
                report.record_policy_outcome(&outcome, keys, now_us);
                if let (Some(peaks), Some(claim)) = (peaks.as_mut(), &outcome.quota_usage) {
                    peaks.record_demand(outcome.policy_index, claim, instant);
                }
            },
        );
        report.record_request_outcome(result.outcome, result.delay_us, now_us);
        if !result.slot_counters.is_empty() || !result.estimated_charges.is_empty() {
            // The delay is added, because a delayed request holds its slot while it waits.
            let duration_us = request.facts.duration_us.unwrap_or_default();
            let duration_us = duration_us
                .saturating_add(result.delay_us)
                .min(result.max_duration_us.unwrap_or(MAX_HOLD_US))
                .min(MAX_HOLD_US);
            let read_units = |source: &ReportSource| {
                let units = parse_whole_number(read_field(&source.label())?.as_bytes());
                units.filter(|units| *units <= MAX_UNITS)
            };
            let status = StatusCode::from_u16(request.facts.status).ok();
            let charges = result.estimated_charges.into_iter().map(|charge| {
                let by_status = || charge.cost.units_of_status(status?, charge.estimate);
                (charge.reported_units(read_units).or_else(by_status), charge)
            });
            let in_flight = InFlightRequest {
                counters: result.slot_counters,
                estimated_charges: charges.collect(),
                ends_us: now_us.saturating_add(duration_us),
            };
            self.in_flight.add_request(slot, in_flight, now_us);
        }
        Some(result.outcome == DryRunOutcome::Forwarded)
    }

    fn build_header_map(&self, request: &ReplayRequest<'_>) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (index, value) in request.field_values() {
            // Only names of headers can be parsed.
            let name = self.names.get(index);
            let name = name.and_then(|name| HeaderName::from_bytes(name.as_bytes()).ok());
            let name = name.filter(|name| self.table.reads_header(name));
            if let (Some(name), Ok(value)) = (name, HeaderValue::from_bytes(value)) {
                headers.append(name, value);
            }
        }
        if !request.host.is_empty() && self.table.reads_header(&http::header::HOST) {
            let host = HeaderValue::from_bytes(request.host).ok();
            headers.extend(host.map(|host| (http::header::HOST, host)));
        }
        headers
    }
}

/// Method, host, path and query of a logged request. The host of a target in absolute form takes
/// precedence.
struct LoggedTarget<'a> {
    method: Method,
    host: Cow<'a, str>,
    paths: PathInterpretations,
    query: Option<&'a str>,
}

impl<'a> LoggedTarget<'a> {
    /// Returns `None` if no valid request has this target.
    fn from_request(request: &ReplayRequest<'a>, settings: &path::Settings) -> Option<Self> {
        let target = str::from_utf8(request.target).ok()?;
        let mut host = str::from_utf8(request.host).ok()?;
        let mut rest = target;
        // A target in absolute form (RFC 9112, section 3.2.2) contains the host.
        for scheme in ["http://", "https://"] {
            if let Some(after) = target.strip_prefix(scheme) {
                let end = after.find(['/', '?']).unwrap_or(after.len());
                (host, rest) = after.split_at_checked(end)?;
            }
        }
        let (path, query) = match rest.split_once('?') {
            Some((path, query)) => (path, Some(query)),
            None => (rest, None),
        };
        let path = if path.is_empty() { "/" } else { path };
        Some(Self {
            method: Method::from_bytes(request.method).ok()?,
            host: match host {
                "" => "".into(),
                host => normalize_host(host)?,
            },
            paths: PathInterpretations::parse(path, settings).ok()?,
            query,
        })
    }
}

fn new_policy_report(policy: &Policy) -> PolicyReport {
    PolicyReport {
        name: policy.name.to_string(),
        mode: policy.mode.name(),
        shadow: policy.mode == PolicyMode::Shadow,
        action: match policy.action {
            PolicyAction::Limit(_) => "limit",
            PolicyAction::Allow => "allow",
            PolicyAction::Deny => "deny",
        },
        ..PolicyReport::default()
    }
}

impl PolicySetReport {
    fn record_policy_outcome(
        &mut self,
        outcome: &PolicyOutcome<'_, '_>,
        keys: Option<&mut ReplayKeyTable>,
        now_us: u64,
    ) {
        let Some(policy) = self.policies.get_mut(outcome.policy_index) else {
            return;
        };
        let (count, refused) = match outcome.decision {
            PolicyDecision::Allowed => (&mut policy.allowed, false),
            PolicyDecision::Delayed => (&mut policy.delayed, false),
            PolicyDecision::Exempt => (&mut policy.exempt, false),
            PolicyDecision::Rejected => (&mut policy.rejected, true),
            PolicyDecision::Blocked => (&mut policy.blocked, true),
            PolicyDecision::Denied => (&mut policy.denied, true),
            PolicyDecision::ShadowRejected => (&mut policy.shadow_rejected, true),
            PolicyDecision::Marked => (&mut policy.marked, true),
            // Degraded decisions do not occur, because the memory store is always available.
            PolicyDecision::DegradedUndecided
            | PolicyDecision::DegradedOpen
            | PolicyDecision::DegradedClosed
            | PolicyDecision::DegradedLocalAllowed
            | PolicyDecision::DegradedLocalRejected => return,
        };
        *count += 1;
        policy.matched += 1;
        policy.refused += u64::from(refused);
        policy.series.counts.record_request(now_us, refused);
        if refused {
            if policy.first_refused_us == 0 {
                policy.first_refused_us = now_us;
            }
            policy.last_refused_us = now_us;
        }
        if let (Some(claim), Some(keys)) = (&outcome.quota_usage, keys) {
            keys.record_request(claim.key, now_us, refused);
        }
    }

    fn record_request_outcome(&mut self, outcome: DryRunOutcome, delay_us: u64, now_us: u64) {
        let count = match outcome {
            DryRunOutcome::Forwarded => &mut self.forwarded,
            DryRunOutcome::Limited => &mut self.limited,
            DryRunOutcome::Denied => &mut self.denied,
            DryRunOutcome::InvalidKey => &mut self.bad_key,
        };
        *count += 1;
        self.delayed += u64::from(delay_us > 0);
        self.max_delay_us = self.max_delay_us.max(delay_us);
        self.series
            .counts
            .record_request(now_us, outcome != DryRunOutcome::Forwarded);
    }
}

/// Requests that hold concurrency slots, or whose response settles charges. Their slots are renewed
/// and released when due, as in the proxy.
#[derive(Debug, Default)]
struct InFlightRequests {
    last_slot_id: u128,
    /// The requests by due time and slot.
    by_due_time: BTreeMap<(u64, u128), InFlightRequest>,
}

#[derive(Debug)]
struct InFlightRequest {
    counters: SmallVec<[(Limit, Key); 1]>,
    /// The charges, each with the actual units. If the log does not have these, the estimate stands.
    estimated_charges: Vec<(Option<u64>, EstimatedCharge)>,
    ends_us: u64,
}

impl InFlightRequests {
    /// Adds a request that is due at its next renewal, or at its end if that is earlier.
    fn add_request(&mut self, slot: u128, mut request: InFlightRequest, now_us: u64) {
        if self.by_due_time.len() >= MAX_IN_FLIGHT {
            request.ends_us = now_us;
        }
        let shortest_us = request.counters.iter().map(|(limit, _)| limit.per_us).min();
        let renewal_us = shortest_us.map_or(u64::MAX, |shortest_us| {
            now_us.saturating_add((shortest_us / 3).max(1))
        });
        let due_us = request.ends_us.min(renewal_us);
        self.by_due_time.insert((due_us, slot), request);
    }

    /// Renews and releases all slots that are due by `now_us`.
    fn renew_and_release_due_slots(
        &mut self,
        now_us: u64,
        memory: &MemoryStore,
        clock_control: &ManualClock,
    ) {
        while let Some(first) = self.by_due_time.first_entry()
            && first.key().0 <= now_us
        {
            let ((due_us, slot), request) = first.remove_entry();
            clock_control.set_us(due_us);
            let has_ended = request.ends_us <= due_us;
            let amendment = match has_ended {
                true => Amendment::Release { slot },
                false => Amendment::Renew { slot },
            };
            let settlements = request.counters.iter().map(|(limit, key)| Settlement {
                limit,
                key,
                amendment,
            });
            settlements.for_each(|settlement| memory.apply_settlements(&[settlement]));
            if !has_ended {
                self.add_request(slot, request, due_us);
                continue;
            }
            for (actual_units, charge) in request.estimated_charges {
                if let Some(units) = actual_units {
                    charge.settle(units);
                }
            }
        }
    }
}
