//! Copies of requests, kept for a retry.

use http::{HeaderName, HeaderValue, Method, Request, Uri};

use crate::proxy::body::request::RequestBody;

/// A copy of a request, for a retry. Copying the headers as text costs a third of cloning their
/// map; few copies are ever converted back.
pub(super) struct RetryRequest {
    method: Method,
    uri: Uri,
    /// `name:value\n` for each header. Names contain no colon, and values no line feed.
    header_lines: Vec<u8>,
    /// Another handle to the body of the original request.
    pub(super) body: RequestBody,
}

impl RetryRequest {
    pub(super) fn from_request(request: &Request<RequestBody>) -> Self {
        // Most heads are no longer.
        let mut header_lines = Vec::with_capacity(512);
        for (name, value) in request.headers() {
            header_lines.extend_from_slice(name.as_str().as_bytes());
            header_lines.push(b':');
            header_lines.extend_from_slice(value.as_bytes());
            header_lines.push(b'\n');
        }
        Self {
            method: request.method().clone(),
            uri: request.uri().clone(),
            header_lines,
            body: request.body().clone_handle(),
        }
    }

    pub(super) fn into_request(self) -> Request<RequestBody> {
        let mut request = Request::new(self.body);
        *request.method_mut() = self.method;
        *request.uri_mut() = self.uri;
        for line in self.header_lines.split(|byte| *byte == b'\n') {
            let mut halves = line.splitn(2, |byte| *byte == b':');
            let name = halves.next().map(HeaderName::from_bytes);
            let value = halves.next().map(HeaderValue::from_bytes);
            if let (Some(Ok(name)), Some(Ok(value))) = (name, value) {
                request.headers_mut().append(name, value);
            }
        }
        request
    }
}

/// Whether a request may be processed twice: its method is idempotent (RFC 9110, 9.2.2) and it has
/// no body.
pub(super) fn is_retryable(request: &Request<RequestBody>) -> bool {
    let method = request.method();
    request.body().is_empty()
        && (method.is_safe() || [Method::PUT, Method::DELETE].contains(method))
}

#[cfg(test)]
mod tests {
    use super::{RequestBody, RetryRequest, is_retryable};
    use http::Request;

    #[test]
    fn retry_request_equals_the_original() {
        let head = || {
            Request::put("/a?b")
                .header("x-b", ": 1:2")
                .header("host", "h")
                .header("x-b", "")
        };
        let request = || {
            head()
                .header("x-\u{7e}", &b"\xff\t"[..])
                .body(RequestBody::default())
                .unwrap()
        };
        let (first, retried) = (
            request(),
            RetryRequest::from_request(&request()).into_request(),
        );
        assert_eq!(
            (retried.method(), retried.uri()),
            (first.method(), first.uri())
        );
        assert_eq!(retried.headers(), first.headers());
        assert_eq!(retried.headers().iter().count(), 4);
    }

    #[test]
    fn only_idempotent_requests_are_retryable() {
        let repeatable = |method| {
            let request = Request::builder()
                .method(method)
                .body(RequestBody::default())
                .unwrap();
            is_retryable(&request)
        };
        for method in ["GET", "HEAD", "OPTIONS", "TRACE", "PUT", "DELETE"] {
            assert!(repeatable(method), "{method}");
        }
        for method in ["POST", "PATCH", "CONNECT", "PURGE", "get"] {
            assert!(!repeatable(method), "{method}");
        }
    }
}
