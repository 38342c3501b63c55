//! Finds missing permissions by trying each command on the counter of a probe.
//!
//! `ACL DRYRUN` would need a permission that the documented user does not have, and Redis 7.

use crate::limiter::{Algorithm, Charge, Key, Limit};
use crate::store::redis::error::{RedisConnectionError, RedisErrorKind};
use crate::store::redis::script_transfer::is_unknown_command;
use crate::store::redis::scripts::ScriptLibrary;
use redis::aio::MultiplexedConnection;
use redis::{RedisError, RedisResult, Value};

/// A command that the server refused to run for this user, or does not have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeniedCommand {
    pub command: &'static str,
    /// Whether decisions need the command.
    pub is_required: bool,
    pub reason: DenialReason,
    pub message: String,
}

/// Why a server did not run a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DenialReason {
    /// The user may not run the command.
    Command,
    /// The user may run the command, but not on keys with the prefix.
    Key,
    /// The server does not know the command.
    Unknown,
}

/// One command to try.
struct CommandTrial {
    name: &'static str,
    is_required: bool,
    key: TrialKey,
    /// Arguments before and after the key.
    before: &'static [&'static str],
    after: &'static [&'static str],
}

/// The counter that a trial uses.
#[derive(Clone, Copy)]
enum TrialKey {
    None,
    SortedSet,
    Text,
}

const fn required(
    name: &'static str,
    key: TrialKey,
    after: &'static [&'static str],
) -> CommandTrial {
    CommandTrial {
        name,
        is_required: true,
        key,
        before: &[],
        after,
    }
}

const fn optional(
    name: &'static str,
    key: TrialKey,
    before: &'static [&'static str],
) -> CommandTrial {
    CommandTrial {
        name,
        is_required: false,
        key,
        before,
        after: &[],
    }
}

/// The commands that the scripts use.
const SCRIPT_COMMANDS: [CommandTrial; 17] = [
    required("ZADD", TrialKey::SortedSet, &["0", "probe"]),
    required("PEXPIRE", TrialKey::SortedSet, &["10000"]),
    required("PEXPIREAT", TrialKey::SortedSet, &["1"]),
    required("PTTL", TrialKey::SortedSet, &[]),
    required("ZCARD", TrialKey::SortedSet, &[]),
    required("ZCOUNT", TrialKey::SortedSet, &["0", "0"]),
    required("ZLEXCOUNT", TrialKey::SortedSet, &["-", "+"]),
    required("ZRANGE", TrialKey::SortedSet, &["0", "0"]),
    required("ZRANGEBYSCORE", TrialKey::SortedSet, &["0", "0"]),
    required("ZRANK", TrialKey::SortedSet, &["probe"]),
    required("ZREM", TrialKey::SortedSet, &["probe"]),
    required("ZREMRANGEBYRANK", TrialKey::SortedSet, &["0", "0"]),
    required("ZREMRANGEBYSCORE", TrialKey::SortedSet, &["0", "0"]),
    required("GET", TrialKey::Text, &[]),
    required("MGET", TrialKey::Text, &[]),
    required("SET", TrialKey::Text, &["0", "PX", "1"]),
    required("TIME", TrialKey::None, &[]),
];

/// A script that no server has cached: the expected reply is NOSCRIPT.
const UNKNOWN_SCRIPT: &str = "0000000000000000000000000000000000000000";

/// Commands outside of scripts.
const DIRECT_COMMANDS: [CommandTrial; 8] = [
    CommandTrial {
        before: &["return 0", "1"],
        ..required("EVAL", TrialKey::SortedSet, &[])
    },
    CommandTrial {
        before: &[UNKNOWN_SCRIPT, "1"],
        ..required("EVALSHA", TrialKey::SortedSet, &[])
    },
    // Without it, EVAL sends the texts of scripts.
    optional("SCRIPT", TrialKey::None, &["LOAD", "return 0"]),
    optional("INFO", TrialKey::None, &["memory"]),
    optional("SCAN", TrialKey::None, &["0", "COUNT", "1"]),
    optional("MEMORY", TrialKey::SortedSet, &["USAGE"]),
    optional("DBSIZE", TrialKey::None, &[]),
    optional("DEL", TrialKey::SortedSet, &[]),
];

/// Commands that only a cluster needs.
const CLUSTER_COMMANDS: [CommandTrial; 2] = [
    required("CLUSTER", TrialKey::None, &["SLOTS"]),
    required("ASKING", TrialKey::None, &[]),
];

/// Tries each command that tidegate uses, all in one pipeline: over a slow link, one after the
/// other would take longer than an examination may. The probe's counter is deleted or expires.
pub(super) async fn try_commands(
    connection: &mut MultiplexedConnection,
    scripts: &ScriptLibrary,
    probe_key: &Key,
    is_cluster: bool,
) -> RedisResult<Vec<DeniedCommand>> {
    let counter = |algorithm| {
        let limit = Limit {
            requests: 1,
            per_us: 1000,
            algorithm,
        };
        scripts.counter_key(&Charge::new(&limit, probe_key, 0))
    };
    let set_key = counter(Algorithm::SlidingLog);
    let text_key = counter(Algorithm::TokenBucket {
        burst: 1,
        warm_up_us: 0,
    });
    let cluster_commands = CLUSTER_COMMANDS.iter().filter(|_| is_cluster);
    let trials = SCRIPT_COMMANDS
        .iter()
        .chain(&DIRECT_COMMANDS)
        .chain(cluster_commands);
    let mut pipeline = redis::pipe();
    for trial in trials.clone() {
        let key = match trial.key {
            TrialKey::None => None,
            TrialKey::SortedSet => Some(&set_key),
            TrialKey::Text => Some(&text_key),
        };
        let mut command = redis::cmd(trial.name);
        command.arg(trial.before).arg(key).arg(trial.after);
        pipeline.add_command(command);
    }
    let replies = connection
        .send_packed_commands(&pipeline, 0, pipeline.len())
        .await?;
    let mut denied = Vec::new();
    for (trial, reply) in trials.zip(replies) {
        let Value::ServerError(error) = reply else {
            continue;
        };
        let error = RedisError::from(error);
        let is_unknown = is_unknown_command(&error);
        let error = RedisConnectionError::from(error);
        let reason = match error.kind {
            _ if is_unknown => DenialReason::Unknown,
            RedisErrorKind::NoAuth if error.message.contains("access one of the keys") => {
                DenialReason::Key
            }
            RedisErrorKind::NoAuth => DenialReason::Command,
            _ => continue,
        };
        denied.push(DeniedCommand {
            command: trial.name,
            is_required: trial.is_required,
            reason,
            message: error.message,
        });
    }
    Ok(denied)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn each_command_of_the_scripts_is_tried() {
        let tried = || SCRIPT_COMMANDS.iter().map(|trial| trial.name);
        let pattern = regex::Regex::new(r"(?:call|try)\('([A-Z]+)'").unwrap();
        let mut count = 0;
        for directory in ["src/limiter", "src/store/redis"] {
            for entry in fs::read_dir(directory).unwrap() {
                let path = entry.unwrap().path();
                if path.extension().is_none_or(|extension| extension != "lua") {
                    continue;
                }
                let text = fs::read_to_string(&path).unwrap();
                for found in pattern.captures_iter(&text) {
                    count += 1;
                    let command = &found[1];
                    assert!(tried().any(|name| name == command), "{command} in {path:?}");
                }
            }
        }
        assert!(count > 30, "{count}");
    }
}
