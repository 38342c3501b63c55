//! The table `reject` of a policy.

use crate::config::table_reader::TableReader;
use crate::config::values;
use crate::policy::RejectResponse;
use http::{HeaderName, HeaderValue, StatusCode, header};

/// Builds the response to rejected requests.
pub(super) fn build_reject_response(reader: &TableReader<'_>) -> Option<RejectResponse> {
    let status = reader.read("status");
    let status = status.and_then(|code: u16| StatusCode::from_u16(code).ok());
    let entries = reader.get_entries("headers").into_iter();
    let headers = entries.filter_map(|(name, item)| {
        let Some(text) = item.value.as_str() else {
            return item.report_error("expected a string");
        };
        match (parse_reject_header(name), HeaderValue::from_str(text)) {
            (Ok(name), Ok(value)) => Some((name, value)),
            (Err(reason), _) => item.report_error(reason),
            (_, Err(_)) => item.report_error("expected a valid header value"),
        }
    });
    Some(RejectResponse {
        status,
        headers: headers.collect(),
        body: reader.read::<String>("body")?.into(),
        content_type: reader.get_parsed("content_type", |text| {
            match HeaderValue::from_str(text) {
                Ok(value) if text.contains('/') => Ok(value),
                _ => Err("expected a media type such as \"application/json\"".to_owned()),
            }
        })?,
    })
}

/// Parses the name of a response header. Rejects headers that tidegate sets for framing or routing.
fn parse_reject_header(text: &str) -> Result<HeaderName, String> {
    const RESERVED_HEADERS: [HeaderName; 8] = [
        header::CONNECTION,
        header::CONTENT_LENGTH,
        header::CONTENT_TYPE,
        header::TE,
        header::TRAILER,
        header::TRANSFER_ENCODING,
        header::UPGRADE,
        header::RETRY_AFTER,
    ];
    match values::parse_header_name(text)? {
        header::CONTENT_TYPE => Err("expected the key content_type instead".to_owned()),
        name if RESERVED_HEADERS.contains(&name) => Err(format!("{name} is set by tidegate")),
        name => Ok(name),
    }
}
