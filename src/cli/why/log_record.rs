//! Parses one line of tidegate's own JSON log.

use crate::limiter::OverrideInEffect;
use crate::replay::parse_rfc3339;
use serde_json::{Map, Value};
use std::net::IpAddr;

/// One line of the log with its time.
#[derive(Debug)]
pub(super) struct LogRecord {
    pub(super) at_us: u64,
    pub(super) event: LogEvent,
}

/// What a line reports.
#[derive(Debug)]
pub(super) enum LogEvent {
    /// One request of the access log.
    Request(Box<LoggedRequest>),
    /// Rejected requests of one policy that the access log left out.
    RequestsOmitted { policy: String, lines: u64 },
    /// Lines of any kind that were lost because stderr was read too slowly.
    LinesDropped { lines: u64 },
    /// Any other event.
    Other,
}

/// The fields of an access-log line that identify the client and the decision.
#[derive(Debug, Default)]
pub(super) struct LoggedRequest {
    pub(super) decision: String,
    /// The policy that rejected the request.
    pub(super) policy: Option<String>,
    /// The policies that would have rejected the request, each with its decision.
    pub(super) unenforced_rejections: Vec<(String, &'static str)>,
    pub(super) limit: Option<String>,
    /// The hash of the key: [`Key::id`](crate::limiter::Key::id).
    pub(super) key_id: Option<u128>,
    /// The hash of each value of a key with several:
    /// [`Key::value_ids`](crate::limiter::Key::value_ids).
    pub(super) key_parts: Vec<u64>,
    /// What decided instead of the limit of the configuration.
    pub(super) in_effect: Option<OverrideInEffect>,
    pub(super) retry_after_ms: Option<u64>,
    pub(super) method: String,
    pub(super) host: String,
    pub(super) path: String,
    pub(super) client_ip: Option<IpAddr>,
}

/// Parses a line. Text before the first brace is skipped: `kubectl logs --timestamps` and the files
/// of container runtimes start with a time or a name. An object with a `log` field is a line as
/// Docker stores it.
pub(super) fn parse_log_record(line: &[u8]) -> Option<LogRecord> {
    let start = memchr::memchr(b'{', line)?;
    let Value::Object(mut fields) = serde_json::from_slice(line.get(start..)?).ok()? else {
        return None;
    };
    if let Some(Value::String(inner)) = fields.get("log") {
        fields = serde_json::from_str(inner).ok()?;
    }
    let (at_us, _) = parse_rfc3339(fields.get("timestamp")?.as_str()?.as_bytes())?;
    let target = fields.get("target")?.as_str()?;
    let message = fields.get("message")?.as_str()?;
    let event = match (target, message) {
        ("access", "request") => LogEvent::Request(Box::new(read_request(&fields))),
        ("access", "rejected requests not logged") => LogEvent::RequestsOmitted {
            policy: text_field(&fields, "policy").unwrap_or_default(),
            lines: number_field(&fields, "lines").unwrap_or(0),
        },
        (_, message) if message.starts_with("log lines dropped") => LogEvent::LinesDropped {
            lines: number_field(&fields, "lines").unwrap_or(0),
        },
        _ => LogEvent::Other,
    };
    Some(LogRecord { at_us, event })
}

/// Fields of a line with the policies that would have rejected the request if they were enforced.
pub(super) const UNENFORCED_DECISIONS: [&str; 2] = ["shadow_rejected", "marked"];

fn read_request(fields: &Map<String, Value>) -> LoggedRequest {
    let text = |name| text_field(fields, name);
    LoggedRequest {
        decision: text("decision").unwrap_or_default(),
        policy: text("policy"),
        unenforced_rejections: UNENFORCED_DECISIONS
            .into_iter()
            .flat_map(|decision| {
                let names = text(decision).unwrap_or_default();
                let names = names.split(',').filter(|name| !name.is_empty());
                names
                    .map(|name| (name.to_owned(), decision))
                    .collect::<Vec<_>>()
            })
            .collect(),
        limit: text("limit"),
        key_id: text("key").and_then(|hex| u128::from_str_radix(&hex, 16).ok()),
        key_parts: text("key_parts").map_or(Vec::new(), |parts| {
            let ids = parts.split(',').map(|hex| u64::from_str_radix(hex, 16));
            ids.collect::<Result<_, _>>().unwrap_or_default()
        }),
        in_effect: read_override(text("override"), text("stated")),
        retry_after_ms: number_field(fields, "retry_after_ms"),
        method: text("method").unwrap_or_default(),
        host: text("host").unwrap_or_default(),
        path: text("path").unwrap_or_default(),
        client_ip: text("client_ip").and_then(|address| address.parse().ok()),
    }
}

/// Reads the amounts of an override, or those that the request stated.
fn read_override(of_key: Option<String>, stated: Option<String>) -> Option<OverrideInEffect> {
    let is_stated = of_key.is_none();
    let text = of_key.or(stated)?;
    if text == "blocked" {
        return Some(OverrideInEffect::Blocked);
    }
    let (requests, burst) = text.split_once('+').unwrap_or((&text, &text));
    let (requests, burst) = (requests.parse().ok()?, burst.parse().ok()?);
    Some(if is_stated {
        OverrideInEffect::StatedAmounts { requests, burst }
    } else {
        OverrideInEffect::Amounts { requests, burst }
    })
}

fn text_field(fields: &Map<String, Value>, name: &str) -> Option<String> {
    fields.get(name)?.as_str().map(str::to_owned)
}

fn number_field(fields: &Map<String, Value>, name: &str) -> Option<u64> {
    fields.get(name)?.as_u64()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"{"timestamp":"2026-11-22T09:14:03.000001Z","level":"INFO","message":"request","method":"GET","host":"a","path":"/api","client_ip":"10.0.0.1","status":429,"decision":"rejected","policy":"api","limit":"api","key":"000000000000000000000000000000ff","remaining":0,"retry_after_ms":1500,"target":"access"}"#;

    #[test]
    fn parses_lines_as_container_runtimes_store_them() {
        let docker =
            serde_json::json!({ "log": format!("{LINE}\n"), "stream": "stderr", "time": "x" });
        for line in [
            LINE.to_owned(),
            format!("2026-11-22T09:14:03.1Z stderr F {LINE}"),
            format!("[pod/shop-1/tidegate] {LINE}"),
            docker.to_string(),
        ] {
            let record = parse_log_record(line.as_bytes()).unwrap();
            assert_eq!(record.at_us % 60_000_000, 3_000_001);
            let LogEvent::Request(request) = record.event else {
                panic!("{line}");
            };
            assert_eq!(
                (request.key_id, request.retry_after_ms),
                (Some(255), Some(1500))
            );
        }
    }

    #[test]
    fn other_lines_are_no_records() {
        for line in ["", "INFO request", "{}", "{\"timestamp\":1}", "{broken"] {
            assert!(parse_log_record(line.as_bytes()).is_none(), "{line}");
        }
    }
}
