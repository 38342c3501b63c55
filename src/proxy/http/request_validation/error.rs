//! Reasons to reject a request head.

use http::StatusCode;

/// Reason why a request head is rejected. Clients see the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestValidationError {
    #[error("the method contains lowercase letters; methods are case-sensitive")]
    LowercaseMethod,
    #[error("CONNECT is not supported")]
    Connect,
    #[error("the only protocol supported with CONNECT is \"websocket\"")]
    ConnectProtocol,
    #[error("the Host header is missing")]
    HostMissing,
    #[error("the request has more than one Host header")]
    HostRepeated,
    #[error("the Host header is not a valid name or address with an optional port")]
    HostInvalid,
    #[error("the Host header differs from the authority of the request target")]
    HostMismatch,
    #[error("the request target must be a path, or an http or https URL")]
    Target,
    #[error("the only transfer coding supported is a single \"chunked\"")]
    TransferEncoding,
    #[error("the Content-Length must be a single whole number, without Transfer-Encoding")]
    ContentLength,
    #[error("the only expectation supported is \"100-continue\"")]
    Expect,
    #[error("the Trailer header names a field that is not allowed in trailers")]
    Trailer,
    #[error("a header value begins or ends with white space")]
    OuterWhiteSpace,
    #[error("a header name resembles the name of a protected header")]
    AmbiguousHeaderName,
    #[error("the Connection header names a protected header")]
    ProtectedConnectionOption,
    #[error("a TRACE request must not have a body")]
    TraceBody,
}

impl RequestValidationError {
    pub(in crate::proxy) fn status(self) -> StatusCode {
        match self {
            Self::Connect => StatusCode::METHOD_NOT_ALLOWED,
            Self::TransferEncoding | Self::ConnectProtocol => StatusCode::NOT_IMPLEMENTED,
            Self::Expect => StatusCode::EXPECTATION_FAILED,
            _ => StatusCode::BAD_REQUEST,
        }
    }
}
