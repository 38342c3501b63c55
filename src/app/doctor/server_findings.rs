//! Judges the facts about one server.

use super::store_findings::{add_clock_finding, format_seconds};
use super::{FindingLevel, FindingList, join_names};
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

pub(super) fn judge_server(
    findings: &mut FindingList,
    settings: &RedisSettings,
    facts: &ServerFacts,
) {
    if facts.is_proxy {
        findings.add_warning(
            "proxy",
            "this looks like a Redis proxy: the servers behind it cannot be examined, and EVAL sends scripts that it does not load".to_owned(),
            "examine each server by a url of its own; a decision goes to the server of its first counter (docs/operations/redis.md, \"Redis proxies\")",
        );
        return judge_decision(findings, settings, facts);
    }
    match &facts.info {
        Ok(info) => {
            judge_version(findings, info);
            judge_role(findings, settings, info);
            judge_memory(findings, info);
            judge_eviction(findings, info);
            judge_persistence(findings, info);
            judge_replicas(findings, settings, info);
            judge_clients(findings, info);
        }
        Err(error) => findings.add_warning(
            "info",
            format!("INFO is refused, so version, memory, eviction, persistence and replicas are unknown ({}): {}", error.kind.into_str(), error.message),
            "grant +info",
        ),
    }
    match &facts.denied_commands {
        Ok(denied) => judge_permissions(findings, settings, denied),
        Err(error) => findings.add_unknown("permissions", "they are not known", error),
    }
    judge_decision(findings, settings, facts);
    match &facts.clock {
        Ok(clock) => judge_clock(findings, *clock),
        Err(error) => findings.add_unknown("clock", "the server's clock is not known", error),
    }
    judge_counters(findings, facts);
}

fn judge_decision(findings: &mut FindingList, settings: &RedisSettings, facts: &ServerFacts) {
    match &facts.latency {
        Ok(latency) => judge_latency(findings, settings, *latency),
        Err(error) if is_missing_reply(error) => {
            findings.add_unknown("latency", "it was not measured", error);
        }
        Err(error) => findings.add_error("decision", "a decision fails", error),
    }
}

/// Whether a fact is missing because the server sent no reply.
fn is_missing_reply(error: &RedisConnectionError) -> bool {
    matches!(
        error.kind,
        RedisErrorKind::Timeout | RedisErrorKind::Connection
    )
}

fn judge_clock(findings: &mut FindingList, clock: ClockReading) {
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
    add_clock_finding(
        findings,
        certain_us,
        found,
        "synchronize both clocks (NTP): limits follow the server's clock; logs, tokens and reset times in responses follow this machine's",
    );
}

fn judge_version(findings: &mut FindingList, info: &InfoFields) {
    let Some(version) = info.text("redis_version") else {
        return;
    };
    let name = match info.text("valkey_version") {
        Some(valkey) => format!("Valkey {valkey} (compatible with Redis {version})"),
        None => format!("Redis {version}"),
    };
    let mut numbers = version
        .split('.')
        .map(|part| part.parse::<u64>().unwrap_or(0));
    let number = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    match number < MIN_VERSION {
        true => findings.add_fault(
            "version",
            format!("{name} is too old: the scripts need SET with PXAT"),
            "upgrade to Redis 6.2 or newer, or to Valkey",
        ),
        false => findings.add_ok("version", name),
    }
}

fn judge_role(findings: &mut FindingList, settings: &RedisSettings, info: &InfoFields) {
    let mode = info.text("redis_mode").unwrap_or("standalone");
    match (mode, &settings.topology) {
        ("sentinel", _) => findings.add_fault(
            "topology",
            "the server is a sentinel, and holds no counters".to_owned(),
            "set topology = \"sentinel\", sentinel_master, and the sentinels' urls",
        ),
        ("cluster", RedisTopology::Standalone) => findings.add_fault(
            "topology",
            "the server is a node of a cluster, and topology is \"standalone\"".to_owned(),
            "set topology = \"cluster\"",
        ),
        _ => {}
    }
    match info.text("role") {
        Some("slave") => findings.add_fault(
            "role",
            format!(
                "the server is a replica of {}:{}: it rejects writes",
                info.text("master_host").unwrap_or("?"),
                info.text("master_port").unwrap_or("?")
            ),
            "set url to the master, or use topology = \"sentinel\"",
        ),
        Some(role) => findings.add_ok("role", role.to_owned()),
        None => {}
    }
}

fn judge_memory(findings: &mut FindingList, info: &InfoFields) {
    let Some(used) = info.number("used_memory") else {
        return;
    };
    let max = info.number("maxmemory").unwrap_or(0);
    let Some(percent) = used.saturating_mul(100).checked_div(max) else {
        findings.add_ok(
            "memory",
            format!("{} used, no maxmemory", format_bytes(used)),
        );
        return;
    };
    let found = format!(
        "{} of {} used ({percent} %)",
        format_bytes(used),
        format_bytes(max)
    );
    let advice = "raise maxmemory, shorten periods, or use an algorithm with less memory than sliding_log (docs/ALGORITHMS.md)";
    let level = match percent {
        MEMORY_FAULT_PERCENT.. => FindingLevel::Fault,
        MEMORY_WARNING_PERCENT.. => FindingLevel::Warning,
        _ => FindingLevel::Ok,
    };
    findings.add(level, "memory", found, advice);
}

fn judge_eviction(findings: &mut FindingList, info: &InfoFields) {
    let advice = "CONFIG SET maxmemory-policy noeviction, and set it in redis.conf or in the provider's parameter group";
    match info.text("maxmemory_policy") {
        Some("noeviction") => findings.add_ok("eviction", "maxmemory-policy is noeviction"),
        Some(policy) => findings.add_fault(
            "eviction",
            format!("maxmemory-policy is {policy}: a full server evicts counters, and their clients get a fresh quota"),
            advice,
        ),
        None => {}
    }
    if let Some(evicted @ 1..) = info.number("evicted_keys") {
        findings.add_warning(
            "eviction",
            format!("{evicted} keys were evicted since the server's start"),
            "raise maxmemory; CONFIG RESETSTAT resets this figure",
        );
    }
}

fn judge_persistence(findings: &mut FindingList, info: &InfoFields) {
    let failed: Vec<&str> = [
        "rdb_last_bgsave_status",
        "aof_last_bgrewrite_status",
        "aof_last_write_status",
    ]
    .into_iter()
    .filter(|name| info.text(name).is_some_and(|status| status != "ok"))
    .collect();
    if !failed.is_empty() {
        findings.add_fault(
            "persistence",
            format!("the server failed to persist its data: {}", failed.join(", ")),
            "check the server's disk and log: it rejects writes while stop-writes-on-bgsave-error is yes",
        );
        return;
    }
    let has_replica = info.replicas().any(|replica| replica.state == "online");
    // Redis counts snapshots since 7.0; before, the time of the last one is known.
    let has_snapshots = info.number("rdb_saves").is_some_and(|saves| saves > 0)
        || info.number("rdb_last_bgsave_time_sec").is_some();
    match (info.text("aof_enabled"), has_snapshots, has_replica) {
        (Some("1"), ..) => findings.add_ok("persistence", "append-only file"),
        (_, true, _) => findings.add_ok("persistence", "snapshots: a crash loses the usage since the last one"),
        (_, _, true) => findings.add_ok("persistence", "none seen; a replica has the data"),
        _ => findings.add_warning(
            "persistence",
            "no append-only file, no snapshot since the start, no replica: a restart gives each key a fresh quota".to_owned(),
            "set appendonly yes or add a replica, unless one further limit per key after a restart is acceptable (docs/GUARANTEE.md)",
        ),
    }
}

fn judge_replicas(findings: &mut FindingList, settings: &RedisSettings, info: &InfoFields) {
    if info.text("role") != Some("master") {
        return;
    }
    let replicas: Vec<_> = info.replicas().collect();
    for replica in &replicas {
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
        let level = FindingLevel::warning_if(replica.state != "online" || is_late);
        let advice =
            "a failover to this replica loses the usage that it lacks: check its load and network";
        findings.add(level, "replication", found, advice);
    }
    if replicas.is_empty() {
        match settings.topology {
            RedisTopology::Standalone => findings.add_ok("replication", "no replica"),
            _ => findings.add_warning(
                "replication",
                "no replica: nothing takes over if this master fails".to_owned(),
                "add a replica",
            ),
        }
    }
}

fn judge_clients(findings: &mut FindingList, info: &InfoFields) {
    let (Some(clients), Some(max)) = (info.number("connected_clients"), info.number("maxclients"))
    else {
        return;
    };
    let found = format!("{clients} of {max} connections (maxclients)");
    let is_near = clients.saturating_mul(100) >= max.saturating_mul(CLIENTS_WARNING_PERCENT);
    let advice = "raise maxclients: at least 2 × instances × workers + 100";
    findings.add(FindingLevel::warning_if(is_near), "clients", found, advice);
}

fn judge_permissions(
    findings: &mut FindingList,
    settings: &RedisSettings,
    denied: &[DeniedCommand],
) {
    // Without these, scripts are sent as texts.
    let (scripts, others): (Vec<_>, Vec<_>) = denied.iter().partition(|one| {
        one.command == "SCRIPT" || one.command == "EVALSHA" && one.reason == DenialReason::Unknown
    });
    let (required, optional): (Vec<_>, Vec<_>) =
        others.into_iter().partition(|command| command.is_required);
    if denied.is_empty() {
        findings.add_ok(
            "permissions",
            "the user may run all commands that tidegate uses",
        );
        return;
    }
    let prefix = &settings.key_prefix;
    let mut advice = if denied
        .iter()
        .any(|command| command.reason == DenialReason::Unknown)
    {
        "the server or its provider has removed or renamed these commands: use one that has them"
            .to_owned()
    } else {
        format_grant(settings, denied)
    };
    let is_key_denied = |one: &&DeniedCommand| one.reason == DenialReason::Key;
    let lacking = match required.iter().all(is_key_denied) {
        true => format!("the user may not access keys that start with {prefix}: "),
        false => "decisions need commands that the user may not run: ".to_owned(),
    };
    for (level, commands, effect) in [
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
    ] {
        if let Some(first) = commands.first() {
            let names = join_names(commands.iter().map(|one| one.command));
            let found = format!("{effect}{names} ({})", first.message);
            // One rule grants all of them.
            let advice = std::mem::replace(&mut advice, "as above".to_owned());
            findings.add(level, "permissions", found, &advice);
        }
    }
}

/// The ACL rule that grants what is missing.
fn format_grant(settings: &RedisSettings, denied: &[DeniedCommand]) -> String {
    let user = settings
        .credentials
        .username
        .as_deref()
        .unwrap_or("default");
    let mut rule = format!("ACL SETUSER {user}");
    if denied
        .iter()
        .any(|command| command.reason == DenialReason::Key)
    {
        rule.push_str(&format!(" ~{}:*", settings.key_prefix));
    }
    for command in denied
        .iter()
        .filter(|command| command.reason != DenialReason::Key)
    {
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

fn judge_latency(findings: &mut FindingList, settings: &RedisSettings, latency: ScriptLatency) {
    let timeout = format_duration(settings.timeout);
    let found = format!(
        "a decision takes {} (p50) and {} (p99) of {} calls; store.redis.timeout is {timeout}",
        format_seconds(latency.p50_us),
        format_seconds(latency.p99_us),
        latency.samples
    );
    let timeout_us = u64::try_from(settings.timeout.as_micros()).unwrap_or(u64::MAX);
    let advice = "move tidegate and Redis closer together, look at SLOWLOG and LATENCY DOCTOR, use leases, or raise store.redis.timeout";
    let level = match latency.p99_us {
        p99_us if p99_us >= timeout_us => FindingLevel::Fault,
        p99_us => FindingLevel::warning_if(p99_us >= timeout_us / 2),
    };
    findings.add(level, "latency", found, advice);
}

fn judge_counters(findings: &mut FindingList, facts: &ServerFacts) {
    let sample = match &facts.keys {
        Ok(sample) => sample,
        Err(error) if is_missing_reply(error) => {
            let what = "the counters were not scanned: expiry and memory per policy are not known";
            findings.add_unknown("expiry", what, error);
            return;
        }
        Err(error) => {
            findings.add_warning(
                "expiry",
                format!(
                    "the counters could not be scanned ({}): {}",
                    error.kind.into_str(),
                    error.message
                ),
                "grant +@read",
            );
            return;
        }
    };
    let keys: u64 = sample.policies.values().map(|policy| policy.keys).sum();
    let unexpiring: u64 = sample
        .policies
        .values()
        .map(|policy| policy.unexpiring_keys)
        .sum();
    if unexpiring > 0 {
        findings.add_fault(
            "expiry",
            format!(
                "{unexpiring} of {keys} counters have no expiry, for example {}",
                sample.unexpiring.iter().map(|key| format!("{key:?}")).collect::<Vec<_>>().join(", ")
            ),
            "tidegate always sets one, so another program has changed these keys (PERSIST, a restored copy): delete them with DEL or `tidegate keys reset`",
        );
        return;
    }
    let coverage = if sample.scanned_share < 1.0 {
        format!(
            " (about {:.0} % of the keys were scanned)",
            sample.scanned_share * 100.0
        )
    } else {
        String::new()
    };
    let found = format!("all {keys} counters expire{coverage}");
    match &sample.interruption {
        None => findings.add_ok("expiry", found),
        Some(error) => {
            let what = format!("the scan ended early, and until then {found}");
            findings.add_unknown("expiry", &what, error);
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
