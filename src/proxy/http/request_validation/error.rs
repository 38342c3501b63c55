//! Reasons to reject a request head.

use http::StatusCode;

/// Reason why a request head is rejected. Clients see the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::FromRepr, thiserror::Error)]
#[repr(u8)]
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
    #[error(
        "a header name of HTTP/2 is empty, or has other characters than lowercase letters, digits and symbols"
    )]
    FieldName,
    #[error("a header value contains control characters")]
    FieldValue,
    #[error(
        "the pseudo-header fields are not one :method, :scheme and :path, and at most one :authority, before all other fields"
    )]
    PseudoFields,
    #[error(
        "Connection, Keep-Alive, Proxy-Connection, Transfer-Encoding, Upgrade, and TE other than \"trailers\", are not allowed in HTTP/2"
    )]
    ConnectionField,
    #[error("the method is not a token")]
    Method,
    #[error(
        "the path contains characters that are not allowed; escape spaces, < (%3C), > (%3E) and ` (%60)"
    )]
    Path,
    #[error("the Content-Length differs from the length of the body")]
    BodyLength,
    #[error("the request head is too large")]
    HeadTooLarge,
    #[error("the request has more headers than allowed")]
    TooManyHeaders,
}

impl RequestValidationError {
    pub(crate) fn status(self) -> StatusCode {
        match self {
            Self::Connect => StatusCode::METHOD_NOT_ALLOWED,
            Self::TransferEncoding | Self::ConnectProtocol => StatusCode::NOT_IMPLEMENTED,
            Self::Expect => StatusCode::EXPECTATION_FAILED,
            Self::HeadTooLarge | Self::TooManyHeaders => {
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE
            }
            _ => StatusCode::BAD_REQUEST,
        }
    }
}
