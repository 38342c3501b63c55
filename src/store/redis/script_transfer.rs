//! How the texts of scripts reach a server (docs/decisions/0092-redis-proxies.md).

use super::context::RedisContext;
use super::error::RedisErrorKind;
use redis::{Cmd, ErrorKind, RedisError, ServerErrorKind};
use std::sync::atomic::Ordering;

/// Why a command carries the text of its script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScriptTextReason {
    /// The server refuses SCRIPT LOAD, or has lost the script again after it.
    NotLoadable,
    /// The server does not know EVALSHA.
    NoEvalsha,
}

impl RedisContext {
    /// Logs, once per process, that scripts are sent as texts.
    pub(super) fn note_script_text(&self, reason: ScriptTextReason, sent: &Cmd) {
        self.script_text_notice.call_once(|| match reason {
            ScriptTextReason::NotLoadable => tracing::info!(
                "redis allows no SCRIPT LOAD; the first call of a script on each server sends its text with EVAL"
            ),
            ScriptTextReason::NoEvalsha => tracing::warn!(
                bytes_per_call = sent.get_packed_command().len(),
                "this looks like a Redis proxy without EVALSHA; each decision sends its script with EVAL"
            ),
        });
    }

    /// Whether the servers are behind a proxy that accepts only commands with keys.
    pub(super) fn is_behind_proxy(&self) -> bool {
        self.is_behind_proxy.load(Ordering::Relaxed)
    }

    /// Records, and logs once, that the servers are behind a proxy.
    pub(super) fn record_proxy(&self) {
        if !self.is_behind_proxy.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "this looks like a Redis proxy: it refuses calls without keys; scripts are sent with EVAL, and memory and clock of Redis are unknown"
            );
        }
    }
}

/// Whether a server refused a script call without keys as proxies do, which need a key to choose a
/// server: by closing the connection, or by an error without a known code. A server without EVALSHA
/// is another case.
pub(super) fn is_proxy_refusal(error: &RedisError) -> bool {
    match RedisErrorKind::from(error) {
        RedisErrorKind::Other => find_text_reason(error).is_none(),
        // An error reply of this kind is that of a server with too many clients.
        RedisErrorKind::Connection => error.code().is_none(),
        _ => false,
    }
}

/// Whether a server refuses SCRIPT LOAD to a user that may run scripts.
pub(super) fn is_load_refusal(error: &RedisError) -> bool {
    matches!(
        RedisErrorKind::from(error),
        RedisErrorKind::NoAuth | RedisErrorKind::Other
    )
}

/// Why the text of its script may help a call that failed with this error.
pub(super) fn find_text_reason(error: &RedisError) -> Option<ScriptTextReason> {
    match error.kind() {
        ErrorKind::Server(ServerErrorKind::NoScript) => Some(ScriptTextReason::NotLoadable),
        _ if error.to_string().contains("unknown command") => Some(ScriptTextReason::NoEvalsha),
        _ => None,
    }
}
