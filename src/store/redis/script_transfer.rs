//! How the texts of scripts reach a server (docs/decisions/0092-redis-topologies.md).

use super::error::RedisErrorKind;
use super::shared_state::SharedRedisState;
use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind};
use std::sync::atomic::Ordering;

impl SharedRedisState {
    /// Logs, once per process, that a command carries the text of its script.
    pub(super) fn note_script_text(&self, command: &Cmd, lacks_evalsha: bool) {
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
                tracing::warn!("redis refuses script calls without keys; treated as a Redis proxy")
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
pub(super) fn is_load_refusal(error: &RedisError) -> bool {
    let kind = RedisErrorKind::from(error);
    matches!(kind, RedisErrorKind::NoAuth | RedisErrorKind::Other)
}

pub(super) fn is_missing_script(error: &RedisError) -> bool {
    error.kind() == ErrorKind::Server(ServerErrorKind::NoScript)
}

/// Whether a server has no EVALSHA, or none for this user. EVAL may work.
pub(super) fn lacks_evalsha(error: &RedisError) -> bool {
    let is_denied = RedisErrorKind::from(error) == RedisErrorKind::NoAuth;
    is_unknown_command(error) || is_denied && error.to_string().contains("'evalsha'")
}

pub(super) fn is_unknown_command(error: &RedisError) -> bool {
    error.to_string().contains("unknown command")
}
