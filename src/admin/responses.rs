//! Responses of the admin endpoint: JSON that is safe to display, and problem details.

use super::AdminError;
use crate::telemetry::escape_json;
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::header::{
    ALLOW, CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY,
    X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use http::{HeaderName, HeaderValue, StatusCode};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::task::JoinError;

/// The result of a handler that answers in JSON.
pub(super) type JsonResult = Result<Response, ProblemDetails>;

/// An error as `application/problem+json` (RFC 9457). The detail of a problem says what would be
/// right.
#[derive(Debug)]
pub(super) struct ProblemDetails {
    pub(super) status: StatusCode,
    pub(super) detail: String,
}

impl ProblemDetails {
    pub(super) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self {
            status,
            detail: detail.into(),
        }
    }

    /// A panic in a task.
    pub(super) fn from_join_error(error: JoinError) -> Self {
        let detail = format!("this is a bug: {error}");
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, detail)
    }
}

/// What is wrong with a request.
impl From<String> for ProblemDetails {
    fn from(detail: String) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }
}

impl From<AdminError> for ProblemDetails {
    fn from(error: AdminError) -> Self {
        match error {
            AdminError::InvalidRequest(why) => Self::from(why),
            AdminError::NotFound(why) => Self::new(StatusCode::NOT_FOUND, why),
            AdminError::Unavailable(why) => Self::new(StatusCode::SERVICE_UNAVAILABLE, why),
        }
    }
}

/// A JSON response. Fields of objects are in alphabetical order.
pub(super) fn json_response(status: StatusCode, document: &impl Serialize) -> Response {
    render_json(status, "application/json", document)
}

fn render_json(status: StatusCode, media_type: &str, document: &impl Serialize) -> Response {
    let body = escape_json_for_display(&format!("{}\n", json!(document)));
    (status, [(CONTENT_TYPE, media_type)], body).into_response()
}

impl IntoResponse for ProblemDetails {
    fn into_response(self) -> Response {
        let Self { status, detail } = self;
        let title = status.canonical_reason().unwrap_or("Error");
        let body = json!({ "type": "about:blank", "title": title, "status": status.as_u16(), "detail": detail });
        render_json(status, "application/problem+json", &body)
    }
}

/// Builds a document and its response on another thread, so that connections are accepted
/// meanwhile.
pub(super) async fn respond_blocking<D: Serialize>(
    build: impl FnOnce() -> D + Send + 'static,
) -> JsonResult {
    run_blocking(move || json_response(StatusCode::OK, &build())).await
}

/// Runs `work` on another thread, so that connections are accepted meanwhile.
pub(super) async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ProblemDetails> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(ProblemDetails::from_join_error)
}

/// Adds the fields of a JSON object to another one.
pub(crate) fn add_fields(object: &mut Value, more: Value) {
    if let (Value::Object(object), Value::Object(more)) = (object, more) {
        object.extend(more);
    }
}

/// Escapes all characters except printable ASCII, and `<`, `>` and `&`, so that no terminal or
/// browser interprets them. They occur only in JSON strings, where the escape means the same.
pub(crate) fn escape_json_for_display(json: &str) -> String {
    let is_plain = |c: char| c == '\n' || (' '..='~').contains(&c) && !matches!(c, '<' | '>' | '&');
    escape_json(json, |letter| !is_plain(letter))
}

/// Headers that are added to responses without them. This content security policy allows nothing.
const DEFAULT_HEADERS: [(HeaderName, HeaderValue); 6] = [
    (CACHE_CONTROL, HeaderValue::from_static("no-store")),
    (
        CONTENT_SECURITY_POLICY,
        HeaderValue::from_static(
            "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        ),
    ),
    (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    (X_FRAME_OPTIONS, HeaderValue::from_static("DENY")),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        HeaderValue::from_static("same-origin"),
    ),
];

/// Completes every response: adds problem details where the router set only a status, and security
/// headers for browsers.
pub(super) async fn add_default_body_and_headers(request: Request, next: Next) -> Response {
    let path = request.uri().path().to_owned();
    let mut response = next.run(request).await;
    if !response.headers().contains_key(CONTENT_TYPE) {
        let detail = match response.status() {
            StatusCode::NOT_FOUND => {
                format!("{path} does not exist: /openapi.json lists all routes")
            }
            StatusCode::METHOD_NOT_ALLOWED => {
                format!("{path} does not support this method: see the Allow header")
            }
            _ => String::new(),
        };
        if !detail.is_empty() {
            let allow = response.headers().get(ALLOW).cloned();
            response = ProblemDetails::new(response.status(), detail).into_response();
            response
                .headers_mut()
                .extend(allow.map(|allow| (ALLOW, allow)));
        }
    }
    for (name, value) in DEFAULT_HEADERS {
        response.headers_mut().entry(name).or_insert(value);
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_unsafe_characters_without_changing_the_value() {
        let hostile =
            "<script>&\u{1b}[31m\u{9b}\u{7f}\u{202e}\u{2066}\u{feff}\u{2028}\u{1f300}é\"\\\n";
        let written = escape_json_for_display(&json!({ hostile: hostile }).to_string());
        assert!(
            written.bytes().all(|byte| (b' '..=b'~').contains(&byte)),
            "{written}"
        );
        assert!(!written.contains(['<', '>', '&']), "{written}");
        assert_eq!(
            serde_json::from_str::<Value>(&written).unwrap(),
            json!({ hostile: hostile })
        );
    }
}
