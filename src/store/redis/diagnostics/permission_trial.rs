//! Finds missing permissions by trying each command on the counter of a probe.
//!
//! `ACL DRYRUN` would need a permission that the documented user does not have, and Redis 7.

use super::ServerCheck;
use crate::limiter::{Algorithm, CounterRef, Limit};
use crate::store::redis::error::{RedisConnectionError, RedisErrorKind};
use crate::store::redis::live_connection::is_unknown_command;
use redis::{RedisError, Value};

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

/// The commands that the scripts use. `{set}` and `{text}` stand for counters of the probe.
const SCRIPT_COMMANDS: [&str; 20] = [
    "ZADD {set} 0 probe",
    "PEXPIRE {set} 10000",
    "PEXPIREAT {set} 1",
    "PTTL {set}",
    "ZCARD {set}",
    "ZCOUNT {set} 0 0",
    "ZLEXCOUNT {set} - +",
    "ZRANGE {set} 0 0",
    "ZRANGEBYSCORE {set} 0 0",
    "ZRANK {set} probe",
    "ZREM {set} probe",
    "ZREMRANGEBYRANK {set} 0 0",
    "ZREMRANGEBYSCORE {set} 0 0",
    "GET {text}",
    "MGET {text}",
    "INCRBY {text} 1",
    "PEXPIRE {text} 10000",
    "DECRBY {text} 1",
    "SET {text} 0 PX 1",
    "TIME",
];

/// Further commands of decisions. No server has cached this script: the expected reply is NOSCRIPT.
const DIRECT_COMMANDS: [&str; 2] = [
    "EVAL return(0) 1 {set}",
    "EVALSHA 0000000000000000000000000000000000000000 1 {set}",
];

/// Commands that decisions do not need. Without SCRIPT, EVAL sends the texts of scripts.
const OPTIONAL_COMMANDS: [&str; 6] = [
    "SCRIPT LOAD return(0)",
    "INFO memory",
    "SCAN 0 COUNT 1",
    "MEMORY USAGE {set}",
    "DBSIZE",
    "DEL {set}",
];

/// Commands that only a cluster needs.
const CLUSTER_COMMANDS: [&str; 2] = ["CLUSTER SLOTS", "ASKING"];

impl ServerCheck<'_> {
    /// Tries each command that tidegate uses, all in one pipeline: over a slow link, one after the
    /// other would take longer than an examination may. The probe's counter is deleted or expires.
    pub(super) async fn try_commands(
        &self,
        is_cluster: bool,
    ) -> Result<Vec<DeniedCommand>, RedisConnectionError> {
        let counter = |algorithm| {
            let limit = &Limit {
                requests: 1,
                per_us: 1000,
                algorithm,
            };
            self.scripts.counter_key(CounterRef {
                limit,
                key: self.probe_key,
            })
        };
        let set_key = counter(Algorithm::SlidingLog);
        let text_key = counter(Algorithm::TokenBucket {
            burst: 1,
            warm_up_us: 0,
        });
        let cluster_commands = CLUSTER_COMMANDS.iter().filter(|_| is_cluster);
        let required = SCRIPT_COMMANDS.iter().chain(&DIRECT_COMMANDS);
        let trials = (required.map(|trial| (trial, true)))
            .chain(OPTIONAL_COMMANDS.iter().map(|trial| (trial, false)))
            .chain(cluster_commands.map(|trial| (trial, true)));
        let mut pipeline = redis::pipe();
        for (trial, _) in trials.clone() {
            let mut command = redis::Cmd::new();
            for word in trial.split(' ') {
                command.arg(match word {
                    "{set}" => &set_key,
                    "{text}" => &text_key,
                    word => word,
                });
            }
            pipeline.add_command(command);
        }
        let replies = self.run_pipeline(&pipeline).await?;
        let mut denied = Vec::new();
        for ((trial, is_required), reply) in trials.zip(replies) {
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
                command: command_name(trial),
                is_required,
                reason,
                message: error.message,
            });
        }
        Ok(denied)
    }
}

fn command_name(trial: &'static str) -> &'static str {
    trial.split(' ').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn each_command_of_the_scripts_is_tried() {
        let tried = || SCRIPT_COMMANDS.iter().map(|trial| command_name(trial));
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
