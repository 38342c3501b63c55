//! Judges the facts about one server.

use super::store_findings::{CLOCK_FAULT_US, CLOCK_WARNING_US, format_seconds};
use super::{
    DoctorFinding, FindingLevel, failure, fault, finding, join_names, level_from, ok, quote_error,
    unknown, warning,
};
use crate::config::format_duration;
use crate::store::redis::{
    ClockReading, DenialReason, DeniedCommand, InfoFields, RedisConnectionError, RedisErrorKind,
    RedisSettings, RedisTopology, ScriptLatency, ServerFacts,
};

/// The oldest version with all commands that the scripts use.
const MIN_VERSION: (u64, u64) = (6, 2);

/// Shares of `maxmemory` from which on there is a warning, and a fault, in percent.
const MEMORY_WARNING_PERCENT: u64 = 80;
const MEMORY_FAULT_PERCENT: u64 = 95;

/// Share of `maxclients` from which on there is a warning, in percent.
const CLIENTS_WARNING_PERCENT: u64 = 80;

/// Replicas acknowledge once per second.
const MAX_REPLICA_LAG_S: u64 = 2;
const MAX_REPLICA_BEHIND_BYTES: u64 = 1 << 20;

pub(super) fn judge_server(settings: &RedisSettings, facts: &ServerFacts) -> Vec<DoctorFinding> {
    let mut findings = Vec::new();
    if facts.is_proxy {
        findings.push(warning(
            "proxy",
            "this looks like a Redis proxy: the servers behind it cannot be examined, and EVAL sends scripts that it does not load",
            "examine each server by a url of its own; a decision goes to the server of its first counter (docs/operations/redis.md, \"Redis proxies\")",
        ));
        findings.push(judge_decision(settings, facts));
        return findings;
    }
    match &facts.info {
        Ok(info) => {
            findings.extend(judge_version(info));
            findings.extend(judge_mode(settings, info));
            findings.extend(judge_role(info));
            findings.extend(judge_memory(info));
            findings.extend(judge_eviction(info));
            findings.push(judge_persistence(info));
            findings.extend(judge_replicas(settings, info));
            findings.extend(judge_clients(info));
        }
        Err(error) => {
            let what = "INFO is refused, so version, memory, eviction, persistence and replicas are unknown";
            findings.push(warning("info", quote_error(what, error), "grant +info"));
        }
    }
    match &facts.denied_commands {
        Ok(denied) => findings.extend(judge_permissions(settings, denied)),
        Err(error) => findings.push(unknown("permissions", "they are not known", error)),
    }
    findings.push(judge_decision(settings, facts));
    findings.push(match &facts.clock {
        Ok(clock) => judge_clock(*clock),
        Err(error) => unknown("clock", "the server's clock is not known", error),
    });
    findings.push(judge_counters(facts));
    findings
}

fn judge_decision(settings: &RedisSettings, facts: &ServerFacts) -> DoctorFinding {
    match &facts.latency {
        Ok(latency) => judge_latency(settings, *latency),
        Err(error) if is_missing_reply(error) => unknown("latency", "it was not measured", error),
        Err(error) => failure("decision", "a decision fails", error),
    }
}

/// Whether a fact is missing because the server sent no reply.
fn is_missing_reply(error: &RedisConnectionError) -> bool {
    matches!(
        error.kind,
        RedisErrorKind::Timeout | RedisErrorKind::Connection
    )
}

fn judge_clock(clock: ClockReading) -> DoctorFinding {
    let difference_us = clock.ahead_us.unsigned_abs();
    let direction = match clock.ahead_us {
        ..0 => "behind",
        _ => "ahead of",
    };
    let found = format!(
        "the server's clock is {} {direction} this machine's (± {})",
        format_seconds(difference_us),
        format_seconds(clock.error_us)
    );
    // The part that the measurement cannot explain.
    let certain_us = difference_us.saturating_sub(clock.error_us);
    let advice = "synchronize both clocks (NTP): limits follow the server's clock; logs, tokens and reset times in responses follow this machine's";
    let level = level_from(certain_us, CLOCK_WARNING_US, CLOCK_FAULT_US);
    finding(level, "clock", found, advice)
}

fn judge_version(info: &InfoFields) -> Option<DoctorFinding> {
    let version = info.text("redis_version")?;
    let name = match info.text("valkey_version") {
        Some(valkey) => format!("Valkey {valkey} (compatible with Redis {version})"),
        None => format!("Redis {version}"),
    };
    let mut numbers = version
        .split('.')
        .map(|part| part.parse::<u64>().unwrap_or(0));
    let number = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    Some(if number < MIN_VERSION {
        fault(
            "version",
            format!("{name} is too old: the scripts need SET with PXAT"),
            "upgrade to Redis 6.2 or newer, or to Valkey",
        )
    } else {
        ok("version", name)
    })
}

fn judge_mode(settings: &RedisSettings, info: &InfoFields) -> Option<DoctorFinding> {
    match (info.text("redis_mode")?, &settings.topology) {
        ("sentinel", _) => Some(fault(
            "topology",
            "the server is a sentinel, and holds no counters",
            "set topology = \"sentinel\", sentinel_master, and the sentinels' urls",
        )),
        ("cluster", RedisTopology::Standalone) => Some(fault(
            "topology",
            "the server is a node of a cluster, and topology is \"standalone\"",
            "set topology = \"cluster\"",
        )),
        _ => None,
    }
}

fn judge_role(info: &InfoFields) -> Option<DoctorFinding> {
    Some(match info.text("role")? {
        "slave" => {
            let part = |name| info.text(name).unwrap_or("?");
            let (host, port) = (part("master_host"), part("master_port"));
            fault(
                "role",
                format!("the server is a replica of {host}:{port}: it rejects writes"),
                "set url to the master, or use topology = \"sentinel\"",
            )
        }
        role => ok("role", role),
    })
}

fn judge_memory(info: &InfoFields) -> Option<DoctorFinding> {
    let used = info.number("used_memory")?;
    let max = info.number("maxmemory").unwrap_or(0);
    let (used_text, max_text) = (format_bytes(used), format_bytes(max));
    let Some(percent) = used.saturating_mul(100).checked_div(max) else {
        return Some(ok("memory", format!("{used_text} used, no maxmemory")));
    };
    let found = format!("{used_text} of {max_text} used ({percent} %)");
    let advice = "raise maxmemory, shorten periods, or use an algorithm with less memory than sliding_log (docs/ALGORITHMS.md)";
    let level = level_from(percent, MEMORY_WARNING_PERCENT, MEMORY_FAULT_PERCENT);
    Some(finding(level, "memory", found, advice))
}

fn judge_eviction(info: &InfoFields) -> Vec<DoctorFinding> {
    let policy = info.text("maxmemory_policy").map(|policy| match policy {
        "noeviction" => ok("eviction", "maxmemory-policy is noeviction"),
        policy => fault(
            "eviction",
            format!("maxmemory-policy is {policy}: a full server evicts counters, and their clients get a fresh quota"),
            "CONFIG SET maxmemory-policy noeviction, and set it in redis.conf or in the provider's parameter group",
        ),
    });
    let evicted = info.number("evicted_keys").filter(|evicted| *evicted > 0);
    let evicted = evicted.map(|evicted| {
        let found = format!("{evicted} keys were evicted since the server's start");
        let advice = "raise maxmemory; CONFIG RESETSTAT resets this figure";
        warning("eviction", found, advice)
    });
    policy.into_iter().chain(evicted).collect()
}

fn judge_persistence(info: &InfoFields) -> DoctorFinding {
    let failed: Vec<&str> = [
        "rdb_last_bgsave_status",
        "aof_last_bgrewrite_status",
        "aof_last_write_status",
    ]
    .into_iter()
    .filter(|name| info.text(name).is_some_and(|status| status != "ok"))
    .collect();
    if !failed.is_empty() {
        return fault(
            "persistence",
            format!(
                "the server failed to persist its data: {}",
                failed.join(", ")
            ),
            "check the server's disk and log: it rejects writes while stop-writes-on-bgsave-error is yes",
        );
    }
    let has_replica = info.replicas().any(|replica| replica.state == "online");
    // Redis counts snapshots since 7.0; before, the time of the last one is known.
    let has_snapshots = info.number("rdb_saves").is_some_and(|saves| saves > 0)
        || info.number("rdb_last_bgsave_time_sec").is_some();
    match (info.text("aof_enabled"), has_snapshots, has_replica) {
        (Some("1"), ..) => ok("persistence", "append-only file"),
        (_, true, _) => ok(
            "persistence",
            "snapshots: a crash loses the usage since the last one",
        ),
        (_, _, true) => ok("persistence", "none seen; a replica has the data"),
        _ => warning(
            "persistence",
            "no append-only file, no snapshot since the start, no replica: a restart gives each key a fresh quota",
            "set appendonly yes or add a replica, unless one further limit per key after a restart is acceptable (docs/GUARANTEE.md)",
        ),
    }
}

fn judge_replicas(settings: &RedisSettings, info: &InfoFields) -> Vec<DoctorFinding> {
    if info.text("role") != Some("master") {
        return Vec::new();
    }
    let replicas = info.replicas().map(|replica| {
        let lag = replica
            .lag_s
            .map_or("unknown".to_owned(), |lag_s| format!("{lag_s} s"));
        let found = format!(
            "replica {}: {}, {} behind, last acknowledgement {lag} ago",
            replica.address,
            replica.state,
            format_bytes(replica.behind_bytes)
        );
        let is_late = replica.lag_s.is_some_and(|lag_s| lag_s > MAX_REPLICA_LAG_S)
            || replica.behind_bytes > MAX_REPLICA_BEHIND_BYTES;
        let level = level_from(u64::from(replica.state != "online" || is_late), 1, u64::MAX);
        let advice =
            "a failover to this replica loses the usage that it lacks: check its load and network";
        finding(level, "replication", found, advice)
    });
    let mut findings: Vec<DoctorFinding> = replicas.collect();
    if findings.is_empty() {
        findings.push(match settings.topology {
            RedisTopology::Standalone => ok("replication", "no replica"),
            _ => warning(
                "replication",
                "no replica: nothing takes over if this master fails",
                "add a replica",
            ),
        });
    }
    findings
}

fn judge_clients(info: &InfoFields) -> Option<DoctorFinding> {
    let clients = info.number("connected_clients")?;
    let max = info.number("maxclients")?;
    let found = format!("{clients} of {max} connections (maxclients)");
    let near = max.saturating_mul(CLIENTS_WARNING_PERCENT);
    let level = level_from(clients.saturating_mul(100), near, u64::MAX);
    let advice = "raise maxclients: at least 2 × instances × workers + 100";
    Some(finding(level, "clients", found, advice))
}

fn judge_permissions(settings: &RedisSettings, denied: &[DeniedCommand]) -> Vec<DoctorFinding> {
    if denied.is_empty() {
        let found = "the user may run all commands that tidegate uses";
        return vec![ok("permissions", found)];
    }
    // Without these, scripts are sent as texts.
    let (scripts, others): (Vec<_>, Vec<_>) = denied.iter().partition(|one| {
        one.command == "SCRIPT" || one.command == "EVALSHA" && one.reason == DenialReason::Unknown
    });
    let (required, optional): (Vec<_>, Vec<_>) =
        others.into_iter().partition(|command| command.is_required);
    let is_unknown = |one: &DeniedCommand| one.reason == DenialReason::Unknown;
    let mut advice = if denied.iter().any(is_unknown) {
        "the server or its provider has removed or renamed these commands: use one that has them"
            .to_owned()
    } else {
        format_grant(settings, denied)
    };
    let is_key_denied = |one: &&DeniedCommand| one.reason == DenialReason::Key;
    let lacking = if required.iter().all(is_key_denied) {
        let prefix = &settings.key_prefix;
        format!("the user may not access keys that start with {prefix}: ")
    } else {
        "decisions need commands that the user may not run: ".to_owned()
    };
    let groups = [
        (FindingLevel::Fault, required, &*lacking),
        (
            FindingLevel::Warning,
            scripts,
            "EVAL sends some KiB of script, once to each server, or with each call without EVALSHA, for lack of: ",
        ),
        (
            FindingLevel::Warning,
            optional,
            "without these commands, metrics, `tidegate keys` or parts of this report are missing: ",
        ),
    ];
    let findings = groups.into_iter().filter_map(|(level, commands, effect)| {
        let first = commands.first()?;
        let names = join_names(commands.iter().map(|one| one.command));
        let found = format!("{effect}{names} ({})", first.message);
        // One rule grants all of them.
        let advice = std::mem::replace(&mut advice, "as above".to_owned());
        Some(finding(level, "permissions", found, &advice))
    });
    findings.collect()
}

/// The ACL rule that grants what is missing.
fn format_grant(settings: &RedisSettings, denied: &[DeniedCommand]) -> String {
    let user = settings
        .credentials
        .username
        .as_deref()
        .unwrap_or("default");
    let mut rule = format!("ACL SETUSER {user}");
    let (keys, commands): (Vec<&DeniedCommand>, Vec<&DeniedCommand>) = denied
        .iter()
        .partition(|command| command.reason == DenialReason::Key);
    if !keys.is_empty() {
        rule.push_str(&format!(" ~{}:*", settings.key_prefix));
    }
    for command in commands {
        let name = match command.command {
            "CLUSTER" => "cluster|slots",
            "SCRIPT" => "script|load",
            "MEMORY" => "memory|usage",
            other => &other.to_ascii_lowercase(),
        };
        rule.push_str(&format!(" +{name}"));
    }
    rule + " (docs/operations/redis.md has the whole rule)"
}

fn judge_latency(settings: &RedisSettings, latency: ScriptLatency) -> DoctorFinding {
    let timeout = format_duration(settings.timeout);
    let found = format!(
        "a decision takes {} (p50) and {} (p99) of {} calls; store.redis.timeout is {timeout}",
        format_seconds(latency.p50_us),
        format_seconds(latency.p99_us),
        latency.samples
    );
    let timeout_us = u64::try_from(settings.timeout.as_micros()).unwrap_or(u64::MAX);
    let advice = "move tidegate and Redis closer together, look at SLOWLOG and LATENCY DOCTOR, use leases, or raise store.redis.timeout";
    let level = level_from(latency.p99_us, timeout_us / 2, timeout_us);
    finding(level, "latency", found, advice)
}

fn judge_counters(facts: &ServerFacts) -> DoctorFinding {
    let sample = match &facts.keys {
        Ok(sample) => sample,
        Err(error) if is_missing_reply(error) => {
            let what = "the counters were not scanned: expiry and memory per policy are not known";
            return unknown("expiry", what, error);
        }
        Err(error) => {
            let found = quote_error("the counters could not be scanned", error);
            return warning("expiry", found, "grant +@read");
        }
    };
    let policies = || sample.policies.values();
    let keys: u64 = policies().map(|policy| policy.keys).sum();
    let unexpiring: u64 = policies().map(|policy| policy.unexpiring_keys).sum();
    if unexpiring > 0 {
        let examples = sample.unexpiring.iter().map(|key| format!("{key:?}"));
        let examples = examples.collect::<Vec<_>>().join(", ");
        return fault(
            "expiry",
            format!("{unexpiring} of {keys} counters have no expiry, for example {examples}"),
            "tidegate always sets one, so another program has changed these keys (PERSIST, a restored copy): delete them with DEL or `tidegate keys reset`",
        );
    }
    let percent = sample.scanned_share * 100.0;
    let coverage = if sample.scanned_share < 1.0 {
        format!(" (about {percent:.0} % of the keys were scanned)")
    } else {
        String::new()
    };
    let found = format!("all {keys} counters expire{coverage}");
    match &sample.interruption {
        None => ok("expiry", found),
        Some(error) => {
            let what = format!("the scan ended early, and until then {found}");
            unknown("expiry", &what, error)
        }
    }
}

#[allow(clippy::cast_precision_loss, reason = "a size is shown to people")]
pub(crate) fn format_bytes(bytes: u64) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{:.1} KiB", bytes as f64 / 1024.0),
        1_048_576..1_073_741_824 => format!("{:.1} MiB", bytes as f64 / 1_048_576.0),
        _ => format!("{:.1} GiB", bytes as f64 / 1_073_741_824.0),
    }
}
