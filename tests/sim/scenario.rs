//! What happens in one run: the deployment, the policies, the requests and the faults.

use http::StatusCode;
use std::fmt::Write;
use tidegate::policy::{KeyPart, path};

pub(crate) const SECOND: u64 = 1_000_000;
pub(crate) const HOUR: u64 = 3600 * SECOND;

/// Policies that must not affect any request.
const SHADOW_POLICIES: &str = include_str!("shadow_policies.toml");

const HEADER_KEY_PART: &str = "header:x-client";
const DESCRIPTOR_KEY_PART: &str = "descriptor:client";

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
    /// The size and the TTL of leases; size 0: sized by the request rate.
    pub(crate) lease: Option<(u64, u64)>,
    pub(crate) block_for_us: Option<u64>,
    pub(crate) shards: u16,
    /// A second limit of so many requests per ten periods.
    pub(crate) second_limit: Option<u64>,
    /// Overrides in the store apply.
    pub(crate) is_dynamic: bool,
    /// Whether a second policy matches the same requests and has the same counter.
    pub(crate) shares_counter: bool,
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
}

impl RequestSpec {
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
    /// The instances have few slots for the requests of this route.
    pub(crate) crowded_route: Option<usize>,
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
const POD_POLICY: &str = "[[policy]]\nname = \"pod\"\nscope = \"instance\"\nmatch = { path = [\"/r0\", \"/r1\", \"/r2\", \"/r3\"] }\nlimits = [\n\
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
            "[client]\ntrusted_headers = [\"x-client\"]\n[self_service]\npath = \"/limits\"\n",
        );
        if self.has_shadow_policies {
            text.push_str(SHADOW_POLICIES);
        }
        if self.has_pod_policy() {
            text.push_str(POD_POLICY);
        }
        if let Some(route) = self.crowded_route {
            writeln!(
                text,
                "[[policy]]\nname = \"crowd\"\nscope = \"instance\"\nmatch = {{ path = \"/r{route}\" }}\n\
                 limit = {{ requests = 30, algorithm = \"concurrency\", lease_ttl = \"1h\" }}"
            )
            .unwrap();
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
    /// The key part that has the client.
    pub(crate) fn client_key_part(&self) -> KeyPart {
        let text = match self.is_rate_limit_service {
            true => DESCRIPTOR_KEY_PART,
            false => HEADER_KEY_PART,
        };
        KeyPart::parse(text, &path::Settings::DEFAULT).unwrap()
    }
}

impl PolicySpec {
    /// A policy with the same counter that refuses no request which this one admits.
    fn looser_policy(&self) -> Self {
        let needs_same_amounts = self.lease.is_some() || self.on_failure == OnFailure::Local;
        let has_rate = matches!(
            self.rule,
            Rule::TokenBucket { .. } | Rule::LeakyBucket { .. }
        );
        let more = u64::from(!needs_same_amounts && !has_rate) * 3;
        Self {
            requests: self.requests + more,
            ..self.clone()
        }
    }

    fn config_text(&self, name: &str, is_rate_limit_service: bool) -> String {
        let limit = |requests: u64, per_us: u64| {
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
            format!("{{ requests = {requests}, {rule} }}")
        };
        let (conditions, key) = match is_rate_limit_service {
            true => (
                format!(
                    "domain = \"sim\", descriptors = {{ route = \"{}\", client = \"*\" }}",
                    self.route
                ),
                DESCRIPTOR_KEY_PART,
            ),
            false => (format!("path = \"/r{}\"", self.route), HEADER_KEY_PART),
        };
        let mut text = format!("[[policy]]\nname = \"{name}\"\nmatch = {{ {conditions} }}\n");
        if !self.is_global {
            writeln!(text, "key = [\"{key}\"]").unwrap();
        }
        let mut limits = vec![limit(self.requests, self.per_us)];
        limits.extend(
            self.second_limit
                .map(|requests| limit(requests, 10 * self.per_us)),
        );
        writeln!(text, "limits = [{}]", limits.join(", ")).unwrap();
        let failure = format!("{:?}", self.on_failure).to_lowercase();
        writeln!(text, "on_store_failure = \"{failure}\"").unwrap();
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
        if self.is_dynamic {
            text.push_str("dynamic = true\n");
        }
        if self.shares_counter {
            let counter = name.trim_end_matches("-looser");
            writeln!(text, "counter = \"{counter}\"").unwrap();
        }
        text
    }

    fn cost_text(&self, is_rate_limit_service: bool) -> String {
        match (self.estimate, self.rule) {
            (Some(cost), _) if self.counts_responses => {
                let status = COUNTED_STATUS.as_u16();
                format!("cost = {cost}\ncount_when = {{ status = [{status}] }}\n")
            }
            (Some(estimate), _) => {
                format!("cost = {{ estimate = {estimate}, actual = \"response_header:x-cost\" }}\n")
            }
            (None, Rule::Concurrency { .. }) => String::new(),
            // Each hit is a unit.
            (None, _) if is_rate_limit_service => String::new(),
            (None, _) => "cost = { header = \"x-cost\" }\n".to_owned(),
        }
    }

    /// The units that the response reports, if they settle an estimate.
    pub(crate) fn actual_units(&self, request: &RequestSpec) -> Option<u64> {
        let (cost, actual) = self.estimate.zip(request.actual)?;
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
