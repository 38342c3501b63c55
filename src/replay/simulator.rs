//! Applies one policy set to logged requests and counts the outcomes.

use super::log_merge::ReplayRequest;
use super::missing_fields::{FieldCoverage, MissingFieldCheck};
use super::parsers::RequiredHeaders;
use super::statistics::{ReplayKeyTable, RequestSeries};
use super::suggestions::PeakDemandTracker;
use crate::clock::{Clock, ManualClock};
use crate::enforcer::{
    DryRunOutcome, EstimatedCharge, PolicyDecision, PolicyOutcome, dry_run_request,
};
use crate::limiter::{Amendment, Key, Limit};
use crate::policy::client::ClientAddress;
use crate::policy::jwt::RequestToken;
use crate::policy::path::{self, PathInterpretations};
use crate::policy::{Facts, Policy, PolicyTable};
use crate::proxy::normalize_host;
use crate::store::{MemorySettings, MemoryStore, Settlement, SettlementQueue, Store};
use crate::telemetry::metrics::{MetricLabels, Metrics};
use http::{HeaderMap, HeaderValue, Method, StatusCode};
use smallvec::SmallVec;
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
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
    pub(super) table: &'t PolicyTable,
    required_headers: &'t RequiredHeaders,
    memory: Arc<MemoryStore>,
    settlements: SettlementQueue,
    clock_control: ManualClock,
    /// Constant time argument for store calls, because the manual clock supplies the log time.
    fixed_instant: Instant,
    in_flight: InFlightRequests,
    /// Indices of the policies that do not apply: no request so far had a part of their key.
    pub(super) left_out: Vec<usize>,
    pub(super) stats: SimulationStats,
    pub(super) peaks: Option<PeakDemandTracker>,
}

/// Request counts and statistics of one policy set.
#[derive(Debug, Default)]
pub(super) struct SimulationStats {
    pub(super) forwarded: u64,
    pub(super) delayed: u64,
    pub(super) limited: u64,
    pub(super) denied: u64,
    pub(super) bad_key: u64,
    /// Requests that are rejected before any policy is evaluated.
    pub(super) malformed: u64,
    /// Longest delay of a request (µs).
    pub(super) max_delay_us: u64,
    pub(super) series: RequestSeries,
    /// Statistics of the policies, in the order of the policy table.
    pub(super) policies: Vec<ReplayPolicyStats>,
    pub(super) field_coverage: FieldCoverage,
    /// Requests older than a request that was already simulated.
    pub(super) late_requests: u64,
    pub(super) first_request_us: u64,
    pub(super) last_request_us: u64,
}

/// Request counts and statistics of one policy.
#[derive(Debug, Default)]
pub(super) struct ReplayPolicyStats {
    pub(super) allowed: u64,
    pub(super) delayed: u64,
    pub(super) rejected: u64,
    pub(super) blocked: u64,
    pub(super) denied: u64,
    pub(super) exempt: u64,
    pub(super) shadow_rejected: u64,
    pub(super) marked: u64,
    pub(super) first_refused_us: u64,
    pub(super) last_refused_us: u64,
    pub(super) series: RequestSeries,
    pub(super) keys: ReplayKeyTable,
}

impl<'t> PolicySimulator<'t> {
    /// Creates the simulator of a policy set. Policies whose key is not in `known_coverage` are
    /// left out until a request has it.
    pub(super) fn new(
        table: &'t PolicyTable,
        required_headers: &'t RequiredHeaders,
        known_coverage: &FieldCoverage,
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
            required_headers,
            settlements: SettlementQueue::new(Store::Memory(Arc::clone(&memory)), metrics),
            peaks: with_suggestions
                .then(|| PeakDemandTracker::new(table, COUNTER_STORE_SETTINGS, clock.clone())),
            memory,
            clock_control,
            fixed_instant: Instant::now(),
            in_flight: InFlightRequests::default(),
            left_out: MissingFieldCheck::new(table, known_coverage, required_headers)
                .policies_without_key()
                .collect(),
            stats: SimulationStats::new(policy_count, max_keys, required_headers),
        }
    }

    /// Returns the number of active counters that the stores evicted at their size limits.
    pub(super) fn evicted_counters(&self) -> u64 {
        let peaks = self.peaks.as_ref();
        self.memory.eviction_count() + peaks.map_or(0, PeakDemandTracker::evicted_counters)
    }

    /// Simulates one request and returns whether it is forwarded. A request older than the previous
    /// one is simulated at the time of the previous one.
    pub(super) fn evaluate_request(&mut self, request: &ReplayRequest<'_>) -> bool {
        let stats = &mut self.stats;
        let now_us = request.arrival_us.max(stats.last_request_us);
        stats.late_requests += u64::from(now_us > request.arrival_us);
        if stats.field_coverage.requests == 0 {
            stats.first_request_us = now_us;
        }
        stats.last_request_us = now_us;
        self.in_flight
            .renew_and_release_due_slots(now_us, &self.memory, &self.clock_control);
        self.clock_control.set_us(now_us);

        let headers = self.build_header_map(request);
        let peer = request.peer.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
        let client = ClientAddress::identify(peer, &headers, &self.table.client);
        let is_client_hidden =
            client.is_peer_trusted && !headers.contains_key(&self.table.client.ip_header);
        self.stats
            .field_coverage
            .record_request(request, is_client_hidden);
        if !self.left_out.is_empty() {
            let check = MissingFieldCheck::new(
                self.table,
                &self.stats.field_coverage,
                self.required_headers,
            );
            self.left_out.retain(|policy| check.lacks_key(*policy));
        }
        let Some(LoggedTarget {
            method,
            host,
            paths,
            query,
        }) = LoggedTarget::from_request(request, &self.table.path)
        else {
            return self.count_malformed_request(now_us);
        };
        let token = match &self.table.token_reader {
            Some(reader) if reader.has_ambiguous_token(&headers) => {
                return self.count_malformed_request(now_us);
            }
            Some(reader) => RequestToken::new(Some(reader), now_us / 1_000_000),
            None => RequestToken::default(),
        };
        let facts = Facts {
            method: &method,
            host: &host,
            paths: &paths,
            query,
            headers: &headers,
            client_ip: client.ip,
            token: &token,
            client_cert: None,
            has_joined_headers: false,
            is_peer_trusted: client.is_peer_trusted,
            descriptor: None,
        };
        self.apply_policies(&facts, now_us, request)
    }

    fn apply_policies(
        &mut self,
        facts: &Facts<'_>,
        now_us: u64,
        request: &ReplayRequest<'_>,
    ) -> bool {
        let (stats, peaks, table) = (&mut self.stats, &mut self.peaks, self.table);
        let slot = self.in_flight.allocate_slot_id();
        let instant = self.fixed_instant;
        let left_out = &self.left_out;
        let is_included = |at: usize| left_out.binary_search(&at).is_err();
        let slot_and_time = (slot, instant);
        let result = dry_run_request(
            (&self.memory, &self.settlements),
            table,
            facts,
            slot_and_time,
            is_included,
            |outcome| {
                stats.record_policy_outcome(&outcome, now_us);
                let policy = table.policies().get(outcome.policy_index);
                let quota = policy.and_then(Policy::quota);
                if let (Some(peaks), Some(claim), Some(quota)) =
                    (peaks.as_mut(), &outcome.quota_usage, quota)
                {
                    peaks.record_demand(outcome.policy_index, &quota.limits, claim, instant);
                }
            },
        );
        stats.record_request_outcome(result.outcome, result.delay_us, now_us);
        if !result.slot_counters.is_empty() || !result.estimated_charges.is_empty() {
            // The delay is added, because a delayed request holds its slot while it waits.
            let duration_us = request
                .duration_us
                .unwrap_or_default()
                .saturating_add(result.delay_us);
            let duration_us = duration_us
                .min(result.max_duration_us.unwrap_or(MAX_HOLD_US))
                .min(MAX_HOLD_US);
            let in_flight = InFlightRequest {
                counters: result.slot_counters,
                estimated_charges: result.estimated_charges,
                status: StatusCode::from_u16(request.status).ok(),
                ends_us: now_us.saturating_add(duration_us),
            };
            self.in_flight.add_request(slot, in_flight, now_us);
        }
        result.outcome == DryRunOutcome::Forwarded
    }

    fn count_malformed_request(&mut self, now_us: u64) -> bool {
        self.stats.malformed += 1;
        self.stats.series.record_request(now_us, true);
        false
    }

    fn build_header_map(&self, request: &ReplayRequest<'_>) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (header_index, value) in request.headers() {
            let name = self
                .required_headers
                .names()
                .get(header_index)
                .filter(|name| self.table.reads_header(name));
            if let (Some(name), Ok(value)) = (name, HeaderValue::from_bytes(value)) {
                headers.append(name.clone(), value);
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
        let (path, query) = rest
            .split_once('?')
            .map_or((rest, None), |(path, query)| (path, Some(query)));
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

impl SimulationStats {
    fn new(policy_count: usize, max_keys: usize, required_headers: &RequiredHeaders) -> Self {
        let new_policy_stats = || ReplayPolicyStats {
            keys: ReplayKeyTable::new(max_keys),
            ..ReplayPolicyStats::default()
        };
        Self {
            policies: (0..policy_count).map(|_| new_policy_stats()).collect(),
            field_coverage: FieldCoverage::new(required_headers),
            ..Self::default()
        }
    }

    fn record_policy_outcome(&mut self, outcome: &PolicyOutcome<'_, '_>, now_us: u64) {
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
        policy.series.record_request(now_us, refused);
        if refused {
            if policy.first_refused_us == 0 {
                policy.first_refused_us = now_us;
            }
            policy.last_refused_us = now_us;
        }
        if let Some(claim) = &outcome.quota_usage {
            policy.keys.record_request(claim.key, now_us, refused);
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
            .record_request(now_us, outcome != DryRunOutcome::Forwarded);
    }
}

impl ReplayPolicyStats {
    pub(super) fn refused_count(&self) -> u64 {
        self.rejected + self.blocked + self.denied + self.shadow_rejected + self.marked
    }

    pub(super) fn matched_count(&self) -> u64 {
        self.allowed + self.delayed + self.exempt + self.refused_count()
    }
}

/// Requests that hold concurrency slots, or whose response settles charges. Their slots are renewed
/// and released when due, as in the proxy.
#[derive(Debug, Default)]
struct InFlightRequests {
    last_slot_id: u128,
    requests_by_slot: HashMap<u128, InFlightRequest, foldhash::fast::RandomState>,
    /// Due times and slots, earliest first.
    due_queue: BinaryHeap<Reverse<(u64, u128)>>,
}

#[derive(Debug)]
struct InFlightRequest {
    counters: SmallVec<[(Limit, Key); 1]>,
    estimated_charges: Vec<EstimatedCharge>,
    /// The logged status of the response. Without one, estimates stand.
    status: Option<StatusCode>,
    ends_us: u64,
}

impl InFlightRequest {
    /// Returns the time of the next renewal, or the end of the request if that is earlier.
    fn next_due_us(&self, now_us: u64) -> u64 {
        let shortest_us = self.counters.iter().map(|(limit, _)| limit.per_us).min();
        shortest_us.map_or(self.ends_us, |shortest_us| {
            self.ends_us
                .min(now_us.saturating_add((shortest_us / 3).max(1)))
        })
    }

    fn settle_charges(self) {
        if let Some(status) = self.status {
            for charge in self.estimated_charges {
                charge.settle_by_status(status);
            }
        }
    }
}

impl InFlightRequests {
    fn allocate_slot_id(&mut self) -> u128 {
        self.last_slot_id += 1;
        self.last_slot_id
    }

    fn add_request(&mut self, slot: u128, mut request: InFlightRequest, now_us: u64) {
        if self.requests_by_slot.len() >= MAX_IN_FLIGHT {
            request.ends_us = now_us;
        }
        self.due_queue
            .push(Reverse((request.next_due_us(now_us), slot)));
        self.requests_by_slot.insert(slot, request);
    }

    /// Renews and releases all slots that are due by `now_us`.
    fn renew_and_release_due_slots(
        &mut self,
        now_us: u64,
        memory: &MemoryStore,
        clock_control: &ManualClock,
    ) {
        while let Some(Reverse((due_us, slot))) = self
            .due_queue
            .peek()
            .copied()
            .filter(|Reverse((at, _))| *at <= now_us)
        {
            self.due_queue.pop();
            clock_control.set_us(due_us);
            let Some(request) = self.requests_by_slot.get(&slot) else {
                continue;
            };
            let has_ended = request.ends_us <= due_us;
            let amendment = if has_ended {
                Amendment::Release { slot }
            } else {
                Amendment::Renew { slot }
            };
            for (limit, key) in &request.counters {
                memory.apply_settlements(&[Settlement {
                    limit,
                    key,
                    amendment,
                }]);
            }
            if !has_ended {
                let next_due_us = request.next_due_us(due_us);
                self.due_queue.push(Reverse((next_due_us, slot)));
            } else if let Some(ended) = self.requests_by_slot.remove(&slot) {
                ended.settle_charges();
            }
        }
    }
}
