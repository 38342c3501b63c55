//! The response to input that is not a valid HTTP/1.1 request. hyper writes an empty one.

use http::StatusCode;

const DATE_LENGTH: usize = "Sun, 06 Nov 1994 08:49:37 GMT".len();
const EMPTY_HEADERS: &str = "connection: close\r\ncontent-length: 0\r\ndate: ";
const HEAD_END: &str = "\r\n\r\n";

/// Returns the response that replaces hyper's empty one, or `None` if `output` is other output.
/// hyper writes an empty one with these headers only for input that it cannot parse. `output` must
/// not begin within a response. `status_override` replaces the status, which a header then states.
pub(super) fn describe_parse_error(
    output: &[u8],
    status_override: Option<StatusCode>,
) -> Option<String> {
    let output = std::str::from_utf8(output).ok()?;
    let (status_line, headers) = output.split_once("\r\n")?;
    let date = headers
        .strip_prefix(EMPTY_HEADERS)?
        .strip_suffix(HEAD_END)
        .filter(|date| date.len() == DATE_LENGTH)?;
    let (status, title, detail) = match status_line {
        "HTTP/1.1 400 Bad Request" => (
            400,
            "Bad Request",
            "The request is not valid HTTP/1.1. In the path, escape spaces, < (%3C), > (%3E), ` (%60) and bytes that are not UTF-8.",
        ),
        "HTTP/1.1 414 URI Too Long" => (414, "URI Too Long", "The request target is too long."),
        "HTTP/1.1 431 Request Header Fields Too Large" => (
            431,
            "Request Header Fields Too Large",
            "The request head is too large.",
        ),
        _ => return None,
    };
    let body = format!(
        "{{\"type\":\"about:blank\",\"title\":\"{title}\",\"status\":{status},\"detail\":\"{detail}\"}}\n"
    );
    let status_line = match status_override {
        Some(sent) => format!("HTTP/1.1 {sent}\r\nx-tidegate-status: {status}"),
        None => status_line.to_owned(),
    };
    Some(format!(
        "{status_line}\r\nconnection: close\r\ncontent-type: application/problem+json\r\ncontent-length: {}\r\ndate: {date}{HEAD_END}{body}",
        body.len()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_empty_response_to_unparsable_input_is_replaced() {
        let empty = "HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\ndate: Sun, 06 Nov 1994 08:49:37 GMT\r\n\r\n";
        let reply = describe_parse_error(empty.as_bytes(), None).unwrap();
        let (head, body) = reply.split_once(HEAD_END).unwrap();
        assert!(head.contains(&format!("content-length: {}\r\n", body.len())));
        assert!(body.contains("%3C") && head.ends_with("08:49:37 GMT"));
        let sent = Some(StatusCode::FORBIDDEN);
        let reply = describe_parse_error(empty.as_bytes(), sent).unwrap();
        assert!(
            reply.starts_with("HTTP/1.1 403 Forbidden\r\nx-tidegate-status: 400\r\nconnection"),
            "{reply}"
        );
        for other in [
            empty.replace("400 Bad Request", "404 Not Found"),
            empty.replace("date", "via: 1.1 tidegate\r\ndate"),
            empty.replace("length: 0", "length: 1"),
            format!("{empty}x"),
            format!("x{empty}"),
        ] {
            assert_eq!(
                describe_parse_error(other.as_bytes(), None),
                None,
                "{other}"
            );
        }
    }
}
