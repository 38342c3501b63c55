//! A probed connection to a server: sends commands, loads missing scripts, and asks for its own
//! replacement. [Decision 22](../../../docs/decisions/0022-redis-connections.md): how the texts of
//! scripts reach a server.

use super::error::RedisErrorKind;
use super::scripts::ServerClock;
use super::shared_state::SharedRedisState;
use arc_swap::ArcSwap;
use redis::aio::MultiplexedConnection;
use redis::{
    Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value, cmd, from_redis_value,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use tokio::sync::{OnceCell, mpsc};

/// Consecutive timeouts after which a connection is replaced: the server may hang, or the address
/// may lead to another server. Each caller of a call that times out counts.
const MAX_CONSECUTIVE_TIMEOUTS: u32 = 3;

/// Number of keys per step of a scan: few enough that Redis can serve requests between two steps.
pub(super) const KEYS_PER_SCAN_STEP: u64 = 256;

/// A connection to a server that ran a script and accepted its writes.
#[derive(Debug)]
pub(super) struct LiveConnection {
    pub(super) shared: Arc<SharedRedisState>,
    pub(super) connection: MultiplexedConnection,
    /// Timeouts since the last reply.
    pub(super) consecutive_timeouts: AtomicU32,
    /// Takes the reason of the first request to replace the connection.
    pub(super) replacement_sender: mpsc::Sender<RedisErrorKind>,
    /// The next load of the scripts, which all callers that find a script missing wait for. `false`
    /// if the server refuses it.
    pub(super) script_load: ArcSwap<OnceCell<bool>>,
    /// Whether the server does not know EVALSHA.
    pub(super) lacks_evalsha: AtomicBool,
    pub(super) server_clock: ServerClock,
}

impl LiveConnection {
    /// Runs a command, as [`Self::send_command`] does. The caller sets the deadline.
    pub(super) async fn run_command(&self, command: &Cmd) -> Result<Value, RedisErrorKind> {
        self.send_command(command, false)
            .await
            .map_err(|error| RedisErrorKind::from(&error))
    }

    /// Runs a command, and returns the full error. If Redis has not cached its script, the scripts
    /// are loaded first, once for all callers; if that is refused or does not help, the command is
    /// sent with the text of its script. `is_asking`: the command goes to a node that is importing
    /// the key's slot.
    pub(super) async fn send_command(&self, command: &Cmd, is_asking: bool) -> RedisResult<Value> {
        let scripts = &self.shared.scripts;
        let with_text = if self.lacks_evalsha.load(Ordering::Relaxed) {
            scripts.replace_digest_by_text(command)
        } else {
            None
        };
        let command = with_text.as_ref().unwrap_or(command);
        let mut script_load = self.script_load.load_full();
        let mut answer = self.send_once(command, is_asking).await;
        // Twice: a load that another caller began earlier may lack this script.
        for _ in 0..2 {
            if !answer.as_ref().is_err_and(is_missing_script)
                || !*script_load.get_or_try_init(|| self.load_scripts()).await?
            {
                break;
            }
            script_load = self.script_load.load_full();
            answer = self.send_once(command, is_asking).await;
        }
        if let Err(error) = &answer
            && (is_missing_script(error) || is_unknown_command(error))
            && let Some(with_text) = scripts.replace_digest_by_text(command)
        {
            let lacks_evalsha = is_unknown_command(error);
            answer = self.send_once(&with_text, is_asking).await;
            if answer.is_ok() {
                self.lacks_evalsha.store(lacks_evalsha, Ordering::Relaxed);
                self.shared.note_script_text(&with_text, lacks_evalsha);
            }
        }
        if let Err(error) = &answer {
            self.shared.breaker.record_error_message(error);
        }
        if self.consecutive_timeouts.load(Ordering::Relaxed) != 0 {
            self.consecutive_timeouts.store(0, Ordering::Relaxed);
        }
        answer
    }

    /// Sends a command as it is.
    pub(super) async fn send_once(&self, command: &Cmd, is_asking: bool) -> RedisResult<Value> {
        self.shared.call_count.fetch_add(1, Ordering::Relaxed);
        let mut connection = self.connection.clone();
        let answer = if is_asking {
            let mut pipeline = redis::pipe();
            pipeline.cmd("ASKING").add_command(command.clone());
            let replies = connection.send_packed_commands(&pipeline, 1, 1).await;
            replies.map(|mut replies| replies.pop().unwrap_or(Value::Nil))
        } else {
            connection.send_packed_command(command).await
        };
        answer.and_then(check_reply)
    }

    /// Runs one step of a scan from `cursor`, at first 0. Returns the next cursor, `None` at the
    /// end, and keys that match `pattern`. A key that is no text is foreign, and left out.
    pub(super) async fn scan_step(
        &self,
        cursor: u64,
        pattern: &str,
    ) -> RedisResult<(Option<u64>, Vec<String>)> {
        let mut command = cmd("SCAN");
        command.arg(cursor).arg("MATCH").arg(pattern);
        command.arg("COUNT").arg(KEYS_PER_SCAN_STEP);
        let reply = self.send_command(&command, false).await?;
        let (cursor, keys): (u64, Vec<Vec<u8>>) = from_redis_value(reply)?;
        let keys = keys.into_iter().map(String::from_utf8);
        let next = (cursor != 0).then_some(cursor);
        Ok((next, keys.filter_map(Result::ok).collect()))
    }

    /// Loads all scripts that were used. Later callers that find a script missing load them again,
    /// unless the server refuses that.
    async fn load_scripts(&self) -> RedisResult<bool> {
        let pipeline = self.shared.scripts.load_commands_for_used_programs();
        let mut connection = self.connection.clone();
        let replies = connection.send_packed_commands(&pipeline, 0, pipeline.len());
        for reply in replies.await? {
            match check_reply(reply) {
                Err(error) if is_load_refusal(&error) => return Ok(false),
                reply => reply?,
            };
        }
        self.script_load.store(Arc::default());
        Ok(true)
    }

    /// Records a failed call. The connection is replaced if that may help.
    pub(super) fn record_failure(&self, kind: RedisErrorKind) {
        let is_hanging = kind == RedisErrorKind::Timeout
            && self.consecutive_timeouts.fetch_add(1, Ordering::Relaxed)
                >= MAX_CONSECUTIVE_TIMEOUTS - 1;
        if is_hanging || kind.requires_reconnect() {
            self.request_replacement(kind);
        }
    }

    /// Asks the supervisor to replace the connection.
    pub(super) fn request_replacement(&self, kind: RedisErrorKind) {
        // A full channel has an earlier request.
        self.replacement_sender.try_send(kind).ok();
    }
}

/// Returns the error that a reply consists of. An error inside an array is an invalid reply.
fn check_reply(reply: Value) -> RedisResult<Value> {
    match reply {
        Value::ServerError(error) => Err(error.into()),
        reply => Ok(reply),
    }
}

impl SharedRedisState {
    /// Logs, once per process, that a command carries the text of its script.
    fn note_script_text(&self, command: &Cmd, lacks_evalsha: bool) {
        self.script_text_notice.call_once(|| {
            tracing::warn!(
                bytes = command.get_packed_command().len(),
                with_each_call = lacks_evalsha,
                "this looks like a Redis proxy, or SCRIPT LOAD is not allowed; scripts are sent with EVAL"
            );
        });
    }

    /// Whether the servers are behind a proxy that accepts only commands with keys.
    pub(super) fn is_behind_proxy(&self) -> bool {
        self.is_behind_proxy.load(Ordering::Relaxed)
    }

    /// Records whether a new connection refuses a call without keys, as a proxy does.
    pub(super) fn set_behind_proxy(&self, is_behind_proxy: bool) {
        match (
            self.is_behind_proxy
                .swap(is_behind_proxy, Ordering::Relaxed),
            is_behind_proxy,
        ) {
            (false, true) => {
                tracing::warn!(
                    "this looks like a Redis proxy: it refuses script calls without keys"
                )
            }
            (true, false) => tracing::info!(
                "redis accepts script calls without keys; no longer treated as a Redis proxy"
            ),
            _ => {}
        }
    }
}

/// Whether a server refused a script call without keys as proxies do, which need a key to choose a
/// server: by closing the connection, or by an error without a known code.
pub(super) fn is_proxy_refusal(error: &RedisError) -> bool {
    match RedisErrorKind::from(error) {
        // A server without EVALSHA is another case.
        RedisErrorKind::Other => !is_unknown_command(error),
        // An error reply of this kind is that of a server with too many clients.
        kind => kind == RedisErrorKind::Connection && error.code().is_none(),
    }
}

/// Whether a server refuses SCRIPT LOAD to a user that may run scripts.
fn is_load_refusal(error: &RedisError) -> bool {
    let kind = RedisErrorKind::from(error);
    matches!(kind, RedisErrorKind::NoAuth | RedisErrorKind::Other)
}

pub(super) fn is_missing_script(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

pub(super) fn is_unknown_command(error: &RedisError) -> bool {
    error.to_string().contains("unknown command")
}
