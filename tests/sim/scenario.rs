//! What happens in one run: the deployment, the policies, the requests and the faults.

use http::StatusCode;
use std::fmt::Write;
use tidegate::limiter::{CounterScope, Key};
use tidegate::policy::{KeyComponent, KeyTemplate, ValueHasher, path};

pub(crate) const SECOND: u64 = 1_000_000;
pub(crate) const HOUR: u64 = 3600 * SECOND;

/// Policies that must not affect any request.
const SHADOW_POLICIES: &str = include_str!("shadow_policies.toml");

const HEADER_KEY_PART: &str = "header:x-client";
const ALTERNATIVES_KEY_PART: &str = "header:x-api | header:x-client";
const DESCRIPTOR_KEY_PART: &str = "descriptor:client";

/// What requests state as their amount (`requests_from`).
const STATED_AMOUNTS: [Option<&str>; 6] = [
    None,
    Some("0"),
    Some("3"),
    Some("25"),
    Some("99999999999999999999"),
    Some("many"),
];

/// The status that policies with `count_when` count.
const COUNTED_STATUS: StatusCode = StatusCode::UNAUTHORIZED;

/// Routes that policies reject without a counter.
pub(crate) const CLOSED_ROUTES: [usize; 2] = [98, 99];

/// Kinds of runs. Each draws its details from the seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum ScenarioClass {
    /// One server and no faults, with any policies.
    Healthy,
    /// Delay, resets, half-open connections, partitions, error replies, lost scripts.
    Network,
    /// Restarts with and without data, eviction.
    DataLoss,
    /// Crashes, ends and pauses of instances while Redis answers.
    Instances,
    /// Clocks with offsets and rates.
    ClockRates,
    /// Outages that every instance sees, with `local`.
    Outage,
    /// A sentinel moves the master.
    Sentinel,
    /// A cluster without faults, and keys of one slot per request.
    Cluster,
    /// A dead master is replaced; each request has keys of one slot.
    ClusterFailover,
    /// Whole slots move without keys in two places.
    ClusterReshard,
    /// The counters of one process.
    Memory,
    /// A1: a request has keys of several slots, and one client is over its limit.
    SplitRefusals,
    /// A2: settlements beside concurrency slots, with Redis some milliseconds away.
    SettlementsBesideSlots,
    /// A3: a request has keys of several slots, and one master is dead.
    SplitFailover,
    /// A4: slots with several keys of a policy are open for long.
    OpenSlots,
    /// A5: short moments of service within an outage.
    Flapping,
    /// A6: instances end by SIGTERM within an outage.
    TerminationInOutage,
    /// A7: one client creates many keys in a full memory store.
    MemoryEviction,
    /// A8: the clock of Redis steps.
    ClockSteps,
    /// A9: instances with leases are frozen.
    FrozenLeases,
}

impl ScenarioClass {
    pub(crate) const ALL: [Self; 20] = [
        Self::Healthy,
        Self::Network,
        Self::DataLoss,
        Self::Instances,
        Self::ClockRates,
        Self::Outage,
        Self::Sentinel,
        Self::Cluster,
        Self::ClusterFailover,
        Self::ClusterReshard,
        Self::Memory,
        Self::SplitRefusals,
        Self::SettlementsBesideSlots,
        Self::SplitFailover,
        Self::OpenSlots,
        Self::Flapping,
        Self::TerminationInOutage,
        Self::MemoryEviction,
        Self::ClockSteps,
        Self::FrozenLeases,
    ];
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Topology {
    Memory {
        max_keys: usize,
    },
    Standalone,
    /// Server 0 is the master, server 1 its replica; three sentinels follow.
    Sentinel,
    /// So many masters, then as many replicas.
    Cluster {
        masters: usize,
    },
}

impl Topology {
    pub(crate) fn masters(self) -> usize {
        match self {
            Self::Memory { .. } => 0,
            Self::Standalone | Self::Sentinel => 1,
            Self::Cluster { masters } => masters,
        }
    }
}

/// The clocks of a run begin at 08:00 UTC in January.
pub(crate) const CALENDAR_ZONE: &str = "America/Los_Angeles";

const CALENDAR_DAY: &str =
    "algorithm = \"fixed_window\", per = \"day\", tz = \"America/Los_Angeles\"";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rule {
    SlidingLog,
    SlidingWindow,
    FixedWindow,
    /// Per day of a time zone in which the run begins at midnight.
    CalendarDay,
    TokenBucket {
        burst: u64,
    },
    LeakyBucket {
        max_delay_us: u64,
    },
    Concurrency {
        ttl_us: u64,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OnFailure {
    Open,
    Closed,
    Local,
}

/// The units that a policy admits per period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Amounts {
    /// `requests`.
    Fixed,
    /// The request states them: at most [`Amounts::MAX_FACTOR`] times `requests`.
    OfRequest,
    /// `[[policy.override]]` with patterns: twice for client 0, as in the policy for client 1,
    /// no limit for client 2 unless `is_dynamic`, and 3 more for all others.
    OfPattern,
}

impl Amounts {
    pub(crate) const MAX_FACTOR: u64 = 3;
}

#[derive(Clone, Debug)]
pub(crate) struct PolicySpec {
    /// Requests of this route match.
    pub(crate) route: usize,
    pub(crate) rule: Rule,
    pub(crate) requests: u64,
    pub(crate) per_us: u64,
    pub(crate) on_failure: OnFailure,
    /// One quota for all clients, instead of one per client.
    pub(crate) is_global: bool,
    pub(crate) estimate: Option<u64>,
    /// The estimate is the cost of a request whose response has a counted status, else it costs 0.
    pub(crate) counts_responses: bool,
    /// Rejected requests use units, too.
    pub(crate) counts_rejected: bool,
    /// The size and the TTL of leases; size 0: sized by the request rate.
    pub(crate) lease: Option<(u64, u64)>,
    pub(crate) block_for_us: Option<u64>,
    pub(crate) shards: u16,
    /// A second limit of so many requests per ten periods.
    pub(crate) second_limit: Option<u64>,
    /// Overrides in the store apply.
    pub(crate) is_dynamic: bool,
    /// Whether a second policy has the same counter. It matches the same requests, or `other_route`.
    pub(crate) shares_counter: bool,
    pub(crate) other_route: Option<usize>,
    pub(crate) amounts: Amounts,
    /// Every other client is known by another header, in the same part of the key.
    pub(crate) has_alternatives: bool,
    /// Each instance counts for itself (`scope = "instance"`).
    pub(crate) is_of_instance: bool,
    /// Responses are streams that are cut off when nothing is left: the units of a slice.
    pub(crate) cut_off: Option<u64>,
}

#[derive(Clone, Debug)]
pub(crate) struct RequestSpec {
    pub(crate) at_us: u64,
    pub(crate) instance: usize,
    pub(crate) worker: usize,
    pub(crate) route: usize,
    pub(crate) client: u32,
    pub(crate) cost: u64,
    /// How long the app takes.
    pub(crate) service_us: u64,
    /// The cost that the response reports.
    pub(crate) actual: Option<u64>,
    /// The client disconnects after this time.
    pub(crate) leaves_after_us: Option<u64>,
    /// Between the arrival and the decision, the process does something else.
    pub(crate) pause_us: u64,
    /// How the response streams, if a policy may cut it off.
    pub(crate) stream: Option<StreamSpec>,
}

/// A response that uses its units event by event.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamSpec {
    pub(crate) events: u64,
    /// The units of an event.
    pub(crate) event_units: u64,
    /// The time between two events.
    pub(crate) interval_us: u64,
    pub(crate) report: StreamReport,
}

/// What the events of a stream report. Until they do, its bytes count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StreamReport {
    /// Each event reports the units so far.
    EachEvent,
    /// The last event reports these units for the whole response.
    AtEnd(u64),
    Never,
}

impl StreamSpec {
    /// `response_bytes_per_unit` of the policies.
    pub(crate) const BYTES_PER_UNIT: u64 = 64;

    /// The units that the response has used after so many events.
    pub(crate) fn units_after(&self, events: u64) -> u64 {
        match self.report {
            StreamReport::AtEnd(units) if events == self.events => units,
            _ => events * self.event_units,
        }
    }

    /// The text of an event, the first of which is number 1. Its bytes count as many units as it
    /// uses.
    pub(crate) fn event_text(&self, number: u64) -> String {
        let is_reported = match self.report {
            StreamReport::EachEvent => true,
            StreamReport::AtEnd(_) => number == self.events,
            StreamReport::Never => false,
        };
        let units = self.units_after(number);
        let name = if is_reported { "usage" } else { "n" };
        let data = format!("data: {{\"{name}\":{units}");
        let bytes = (self.event_units * Self::BYTES_PER_UNIT) as usize;
        format!("{data}{}}}\n\n", " ".repeat(bytes - data.len() - 3))
    }
}

impl RequestSpec {
    pub(crate) fn stated_amount(&self) -> Option<&'static str> {
        STATED_AMOUNTS[self.at_us as usize % STATED_AMOUNTS.len()]
    }

    /// Half of the clients have another header, with the value that `x-client` of another one has.
    pub(crate) fn api_header(client: u32) -> Option<String> {
        client.is_multiple_of(2).then(|| (client + 1).to_string())
    }

    /// The status of the response, if there is one.
    pub(crate) fn status(&self) -> StatusCode {
        match self.actual {
            Some(actual) if actual % 2 == 1 => COUNTED_STATUS,
            _ => StatusCode::OK,
        }
    }
}

/// What an operator does at an instance.
#[derive(Clone, Debug)]
pub(crate) struct OperatorSpec {
    pub(crate) at_us: u64,
    pub(crate) action: OperatorAction,
    pub(crate) request: RequestSpec,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OperatorAction {
    Explain,
    /// A call of the rate-limit service with no hits.
    Query,
    Inspect,
    Replay,
    /// Overrides a key by the amounts that it has, and blocks an unused key.
    Override,
    /// A client asks for its own limits.
    OwnLimits,
    /// `tidegate doctor` and the list of all instances.
    Examine,
}

#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) at_us: u64,
    pub(crate) kind: FaultKind,
}

#[derive(Clone, Debug)]
pub(crate) enum FaultKind {
    /// The server is down for a time. Its last writes, or all data, may be lost.
    Restart {
        server: usize,
        down_us: u64,
        lost_us: u64,
    },
    /// The server dies and its replica takes over after a time, without the last writes.
    Failover {
        server: usize,
        after_us: u64,
        lost_us: u64,
    },
    /// The server runs nothing for a time.
    Hang {
        server: usize,
        for_us: u64,
    },
    ErrorReplies {
        server: usize,
        error: &'static str,
        for_us: u64,
    },
    /// Nothing passes for a time; then everything arrives.
    Partition {
        instance: Option<usize>,
        server: usize,
        for_us: u64,
    },
    Slow {
        server: usize,
        extra_us: u64,
        for_us: u64,
    },
    /// All connections to the server are reset.
    Reset {
        server: usize,
    },
    /// All connections from the instance to the server carry nothing any more.
    HalfOpen {
        instance: usize,
        server: usize,
    },
    ScriptFlush {
        server: usize,
    },
    Evict {
        server: usize,
        keys: usize,
    },
    ClockStep {
        server: usize,
        by_us: i64,
    },
    /// The wall clock of an instance's machine is set.
    WallClockStep {
        instance: usize,
        by_us: i64,
    },
    /// SIGKILL, and a new process after a time.
    Crash {
        instance: usize,
        restart_us: u64,
    },
    /// SIGTERM, and a new process after a time.
    Terminate {
        instance: usize,
        restart_us: u64,
    },
    /// SIGSTOP and SIGCONT, or a suspended machine.
    Freeze {
        instance: usize,
        for_us: u64,
        is_suspended: bool,
    },
    /// Redis gets a new password. The instances load it from their files before or after that.
    RotateLogin {
        is_loaded_first: bool,
        between_us: u64,
    },
    /// Slots of present keys move to another master, key by key. An interrupted reshard continues
    /// after a time.
    Migrate {
        to: usize,
        slots: usize,
        key_us: u64,
        interrupted_us: u64,
    },
}

impl FaultKind {
    pub(crate) fn name(&self) -> String {
        let text = format!("{self:?}");
        text.split([' ', '{']).next().unwrap_or_default().to_owned()
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) seed: u64,
    pub(crate) class: ScenarioClass,
    pub(crate) topology: Topology,
    pub(crate) instances: usize,
    pub(crate) workers: usize,
    pub(crate) policies: Vec<PolicySpec>,
    /// Whether policies without effect come first: they are in mode "shadow", or match no request.
    pub(crate) has_shadow_policies: bool,
    pub(crate) requests: Vec<RequestSpec>,
    /// Requests come as calls of the rate-limit service, each with one descriptor.
    pub(crate) is_rate_limit_service: bool,
    pub(crate) operations: Vec<OperatorSpec>,
    pub(crate) faults: Vec<Fault>,
    /// Clock rates of the servers, in parts per million.
    pub(crate) rates_ppm: Vec<i64>,
    /// Delay of a message, one way.
    pub(crate) delay_us: u64,
    pub(crate) timeout_us: u64,
    pub(crate) end_us: u64,
}

/// Slots outlive all pauses of a run, and units return only by hand.
const POD_POLICY: &str = "[[policy]]\nname = \"pod\"\nscope = \"instance\"\nmatch = { path = [\"/r0\", \"/r1\", \"/r2\", \"/r3\", \"/r4\", \"/r10\", \"/r11\", \"/r12\"] }\nlimits = [\n\
    { requests = 1000000, algorithm = \"concurrency\", lease_ttl = \"1h\" },\n\
    { requests = 1000000, algorithm = \"sliding_log\", per = \"300d\" },\n]\n";

impl Scenario {
    /// Whether the servers need a login.
    pub(crate) fn has_login(&self) -> bool {
        let is_rotation = |fault: &Fault| matches!(fault.kind, FaultKind::RotateLogin { .. });
        self.faults.iter().any(is_rotation)
    }

    /// A2: more settlements than round trips, beside slots that have to be renewed.
    pub(crate) fn has_settlement_backlog(&self) -> bool {
        let is_one_worker = self.instances == 1 && self.workers == 1;
        self.class == ScenarioClass::SettlementsBesideSlots && is_one_worker
    }

    /// Whether a policy of the instance applies to all requests. It never refuses, so it changes no
    /// other counter.
    pub(crate) fn has_pod_policy(&self) -> bool {
        self.seed.is_multiple_of(3) && !self.is_rate_limit_service
    }

    /// A6: each instance has a `store.state_dir`.
    pub(crate) fn stores_usage(&self) -> bool {
        self.class == ScenarioClass::TerminationInOutage
    }

    pub(crate) fn server_address(index: usize) -> String {
        format!("redis-{index}:6379")
    }

    /// The configuration of each instance.
    pub(crate) fn config_text(&self) -> String {
        let mut text = String::from("[upstream]\nurl = \"http://127.0.0.1:1\"\n[store]\n");
        let url = |server: usize| format!("\"redis://{}\"", Self::server_address(server));
        let (kind, servers) = match self.topology {
            Topology::Memory { max_keys } => {
                writeln!(
                    text,
                    "kind = \"memory\"\n[store.memory]\nmax_keys = {max_keys}"
                )
                .unwrap();
                ("", String::new())
            }
            Topology::Standalone => ("standalone", format!("url = {}", url(0))),
            Topology::Sentinel => {
                let urls = [2, 3, 4].map(url).join(", ");
                (
                    "sentinel",
                    format!("urls = [{urls}]\nsentinel_master = \"m\""),
                )
            }
            Topology::Cluster { .. } => ("cluster", format!("urls = [{}, {}]", url(0), url(1))),
        };
        if !kind.is_empty() {
            writeln!(
                text,
                "kind = \"redis\"\n[store.redis]\ntopology = \"{kind}\"\n{servers}\nkey_prefix = \"sim\"\n\
                 instances = {}\ntimeout = \"{}ms\"",
                self.instances,
                self.timeout_us / 1000
            )
            .unwrap();
        }
        text.push_str(
            "[client]\ntrusted_headers = [\"x-client\", \"x-api\", \"x-amount\"]\n\
             trusted_proxies = [\"127.0.0.1\"]\n[self_service]\npath = \"/limits\"\n",
        );
        if self.has_shadow_policies {
            text.push_str(SHADOW_POLICIES);
        }
        if self.has_pod_policy() {
            text.push_str(POD_POLICY);
        }
        for (number, policy) in self.policies.iter().enumerate() {
            let name = format!("p{number}");
            text.push_str(&policy.config_text(&name, self.is_rate_limit_service));
            if policy.shares_counter {
                let looser = policy.looser_policy();
                let name = format!("{name}-looser");
                text.push_str(&looser.config_text(&name, self.is_rate_limit_service));
            }
        }
        text
    }
}

impl Scenario {
    /// The counter of a policy for a client, or for all.
    pub(crate) fn counter_key(&self, number: usize, client: Option<u32>) -> Key {
        let (name, policy) = (format!("p{number}"), &self.policies[number]);
        let part = policy.key_part(self.is_rate_limit_service);
        let part = KeyComponent::parse(part, &path::Settings::DEFAULT).unwrap();
        let parts = client.map(|_| part).into_iter().collect();
        let mut template = KeyTemplate::from_components(parts, ValueHasher::default())
            .with_counter(policy.shares_counter.then(|| name.clone()));
        template.scope = match policy.is_of_instance {
            true => CounterScope::Instance,
            false => CounterScope::Shared,
        };
        let mut key = template.start_key(&name);
        let Some(client) = client else {
            return key.finish();
        };
        let api = RequestSpec::api_header(client);
        let (label, value) = match api.filter(|_| policy.has_alternatives) {
            Some(value) => ("header:x-api", value),
            None => (HEADER_KEY_PART, client.to_string()),
        };
        if policy.has_alternatives {
            key.push_source_label(label.as_bytes());
        }
        key.push_key_value(Some(value.as_bytes()));
        key.finish()
    }
}

impl PolicySpec {
    /// The policy with the same counter. It refuses no request that this one admits.
    fn looser_policy(&self) -> Self {
        let needs_same_amounts = self.lease.is_some()
            || self.shards > 1
            || self.on_failure == OnFailure::Local
            || self.amounts == Amounts::OfRequest;
        let has_rate = matches!(
            self.rule,
            Rule::TokenBucket { .. } | Rule::LeakyBucket { .. }
        );
        let more = u64::from(!needs_same_amounts && !has_rate) * 3;
        Self {
            requests: self.requests + more,
            route: self.other_route.unwrap_or(self.route),
            other_route: None,
            ..self.clone()
        }
    }

    pub(crate) fn applies_to(&self, request: &RequestSpec) -> bool {
        let is_exempt = self.exempts_a_client() && request.client == 2;
        let is_on_route = [Some(self.route), self.other_route].contains(&Some(request.route));
        is_on_route && !is_exempt
    }

    /// An override in the store could not win over an exemption.
    fn exempts_a_client(&self) -> bool {
        self.amounts == Amounts::OfPattern && !self.is_dynamic
    }

    /// The units to which the usage is compared for a request.
    pub(crate) fn amount(&self, request: &RequestSpec) -> u64 {
        let requests = match self.other_route == Some(request.route) {
            true => self.looser_policy().requests,
            false => self.requests,
        };
        match (self.amounts, request.client) {
            (Amounts::OfRequest, _) => {
                let is_number = |text: &&str| text.bytes().all(|byte| byte.is_ascii_digit());
                let stated = request.stated_amount().filter(is_number);
                stated.map_or(requests, |text| {
                    let stated = text.parse().unwrap_or(u64::MAX);
                    stated.min(Amounts::MAX_FACTOR * requests)
                })
            }
            (Amounts::Fixed, _) | (Amounts::OfPattern, 1) => requests,
            (Amounts::OfPattern, 0) => 2 * requests,
            (Amounts::OfPattern, _) => requests + 3,
        }
    }

    fn key_part(&self, is_rate_limit_service: bool) -> &'static str {
        match (is_rate_limit_service, self.has_alternatives) {
            (true, _) => DESCRIPTOR_KEY_PART,
            (false, true) => ALTERNATIVES_KEY_PART,
            (false, false) => HEADER_KEY_PART,
        }
    }

    /// The setting `limits`. `amount` is the setting with the amount of the first limit.
    fn limits_text(&self, amount: &str) -> String {
        let limit = |amount: &str, per_us: u64| {
            let per = format!("per = \"{}ms\"", per_us / 1000);
            let rule = match self.rule {
                Rule::SlidingLog => format!("algorithm = \"sliding_log\", {per}"),
                Rule::SlidingWindow => format!("algorithm = \"sliding_window\", {per}"),
                Rule::FixedWindow => format!("algorithm = \"fixed_window\", {per}"),
                Rule::CalendarDay => CALENDAR_DAY.to_owned(),
                Rule::TokenBucket { burst } => {
                    format!("algorithm = \"token_bucket\", burst = {burst}, {per}")
                }
                Rule::LeakyBucket { max_delay_us } => {
                    format!(
                        "algorithm = \"leaky_bucket\", max_delay = \"{}ms\", {per}",
                        max_delay_us / 1000
                    )
                }
                Rule::Concurrency { ttl_us } => {
                    format!(
                        "algorithm = \"concurrency\", lease_ttl = \"{}ms\"",
                        ttl_us / 1000
                    )
                }
            };
            format!("{{ {amount}, {rule} }}")
        };
        let mut limits = vec![limit(amount, self.per_us)];
        limits.extend(
            self.second_limit
                .map(|requests| limit(&format!("requests = {requests}"), 10 * self.per_us)),
        );
        format!("limits = [{}]\n", limits.join(", "))
    }

    fn config_text(&self, name: &str, is_rate_limit_service: bool) -> String {
        let conditions = match is_rate_limit_service {
            true => format!(
                "domain = \"sim\", descriptors = {{ route = \"{}\", client = \"*\" }}",
                self.route
            ),
            false => format!("path = \"/r{}\"", self.route),
        };
        let mut text = format!("[[policy]]\nname = \"{name}\"\nmatch = {{ {conditions} }}\n");
        if !self.is_global {
            let key = self.key_part(is_rate_limit_service);
            writeln!(text, "key = [\"{key}\"]").unwrap();
        }
        let requests = self.requests;
        let fixed = |requests: u64| self.limits_text(&format!("requests = {requests}"));
        text += &match self.amounts {
            Amounts::OfRequest => self.limits_text(&format!(
                "requests_from = \"header:x-amount\", default = {requests}, max = {}",
                Amounts::MAX_FACTOR * requests
            )),
            Amounts::Fixed | Amounts::OfPattern => fixed(requests),
        };
        if self.is_of_instance {
            text.push_str("scope = \"instance\"\n");
        } else {
            let failure = format!("{:?}", self.on_failure).to_lowercase();
            writeln!(text, "on_store_failure = \"{failure}\"").unwrap();
        }
        text.push_str(&self.cost_text(is_rate_limit_service));
        if let Some((0, _)) = self.lease {
            text.push_str("lease = \"auto\"\n");
        } else if let Some((size, ttl_us)) = self.lease {
            writeln!(
                text,
                "lease = {{ size = {size}, ttl = \"{}ms\" }}",
                ttl_us / 1000
            )
            .unwrap();
        }
        if let Some(block_us) = self.block_for_us {
            writeln!(text, "block_for = \"{}ms\"", block_us / 1000).unwrap();
        }
        if self.shards > 1 {
            writeln!(text, "shards = {}", self.shards).unwrap();
        }
        if self.counts_rejected {
            text.push_str("count_rejected = true\n");
        }
        if self.is_dynamic {
            text.push_str("dynamic = true\n");
        }
        if self.shares_counter {
            let counter = name.trim_end_matches("-looser");
            writeln!(text, "counter = \"{counter}\"").unwrap();
        }
        if self.amounts == Amounts::OfPattern {
            let mut rules = vec![
                ("*", fixed(requests + 3)),
                ("1", fixed(requests)),
                ("0*", fixed(2 * requests)),
            ];
            if self.exempts_a_client() {
                rules.push(("*2", "action = \"allow\"\n".to_owned()));
            }
            for (key, rule) in rules {
                write!(text, "[[policy.override]]\nkey = [\"{key}\"]\n{rule}").unwrap();
            }
        }
        text
    }

    fn cost_text(&self, is_rate_limit_service: bool) -> String {
        match (self.estimate, self.rule) {
            (Some(cost), _) if self.counts_responses => {
                let status = COUNTED_STATUS.as_u16();
                format!("cost = {cost}\ncount_when = {{ status = [{status}] }}\n")
            }
            (Some(estimate), _) if self.cut_off.is_some() => format!(
                "cost = {{ estimate = {estimate}, actual = \"response_json:/usage\", cut_off = true, \
                 slice = {}, response_bytes_per_unit = {} }}\n",
                self.cut_off.unwrap_or_default(),
                StreamSpec::BYTES_PER_UNIT
            ),
            (Some(estimate), _) => {
                format!("cost = {{ estimate = {estimate}, actual = \"response_header:x-cost\" }}\n")
            }
            (None, Rule::Concurrency { .. }) => String::new(),
            // Each hit is a unit.
            (None, _) if is_rate_limit_service => String::new(),
            (None, _) => "cost = { header = \"x-cost\" }\n".to_owned(),
        }
    }

    /// The units that the response reports, if they settle an estimate at once.
    pub(crate) fn actual_units(&self, request: &RequestSpec) -> Option<u64> {
        let (cost, actual) = self.estimate.zip(request.actual)?;
        if self.cut_off.is_some() {
            return None;
        }
        let is_counted = request.status() == COUNTED_STATUS;
        Some(match (self.counts_responses, is_counted) {
            (false, _) => actual,
            (true, true) => cost,
            (true, false) => 0,
        })
    }

    /// Whether only responses start the block.
    pub(crate) fn counts_responses_for_block(&self) -> bool {
        self.counts_responses && self.block_for_us.is_some()
    }

    /// The most units of one lease, 0 without leases.
    pub(crate) fn lease_units(&self) -> u64 {
        match self.lease {
            None => 0,
            Some((0, _)) => self.requests,
            Some((size, _)) => size,
        }
    }

    /// The units that a request takes before its response.
    pub(crate) fn cost(&self, request: &RequestSpec) -> u64 {
        match (self.estimate, self.rule) {
            (_, Rule::Concurrency { .. }) => 1,
            (Some(estimate), _) => estimate,
            (None, _) => request.cost,
        }
    }
}
