//! Unary gRPC calls: a POST, a five-byte prefix before each message, and the status in the trailers
//! (<https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md>).

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Method, Response, StatusCode, Version, header, request};
use http_body_util::BodyExt;
use prost::Message;
use strum::{IntoStaticStr, VariantNames};

use crate::proxy::ResponseBody;
use crate::proxy::body::{BodyError, RequestBody};
use crate::proxy::http::local_replies::{GRPC_STATUS, build_grpc_error};

const GRPC_MEDIA_TYPE: &[u8] = b"application/grpc";
/// Suffix of the media type with the only supported message encoding. Other suffixes, such as
/// `+json`, are rejected.
const PROTO_SUFFIX: &[u8] = b"+proto";

/// Bytes of the prefix of a message: a compression flag and the message length.
const MESSAGE_PREFIX_BYTES: usize = 5;

/// Error of a gRPC call: status code and text. The client receives the text, which must be ASCII
/// without percent signs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GrpcError(pub(crate) GrpcStatusCode, pub(crate) &'static str);

/// The gRPC error status codes that the rate-limit service sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GrpcStatusCode {
    Cancelled = 1,
    InvalidArgument = 3,
    NotFound = 5,
    ResourceExhausted = 8,
    Unimplemented = 12,
    Unavailable = 14,
}

/// Returns the response to a request that is not a gRPC call; `None` for a gRPC call.
pub(crate) fn reject_non_grpc(parts: &request::Parts) -> Option<Response<ResponseBody>> {
    let content_type = parts.headers.get(header::CONTENT_TYPE);
    let content_type = content_type.map_or(&[][..], HeaderValue::as_bytes);
    let status = if parts.version != Version::HTTP_2 {
        StatusCode::HTTP_VERSION_NOT_SUPPORTED
    } else if parts.method != Method::POST {
        StatusCode::METHOD_NOT_ALLOWED
    } else if !is_grpc_content_type(content_type) {
        StatusCode::UNSUPPORTED_MEDIA_TYPE
    } else {
        return None;
    };
    let mut response = Response::new(ResponseBody::Full("gRPC over HTTP/2 only\n".into()));
    *response.status_mut() = status;
    Some(response)
}

fn is_grpc_content_type(content_type: &[u8]) -> bool {
    let mut parts = content_type.split(|byte| *byte == b';');
    let media_type = parts.next().unwrap_or_default().trim_ascii();
    let rest = media_type.split_at_checked(GRPC_MEDIA_TYPE.len());
    rest.is_some_and(|(kind, rest)| {
        kind.eq_ignore_ascii_case(GRPC_MEDIA_TYPE)
            && (rest.is_empty() || rest.eq_ignore_ascii_case(PROTO_SUFFIX))
    })
}

/// Reads and decodes the one message of a gRPC call.
pub(crate) async fn read_message<M: Message + Default>(body: RequestBody) -> Result<M, GrpcError> {
    use GrpcStatusCode::{Cancelled, ResourceExhausted, Unimplemented};
    let body = body.collect().await.map_err(|error| match error {
        BodyError::TooLarge => GrpcError(ResourceExhausted, "the message is too large"),
        _ => GrpcError(Cancelled, "the message was cut off"),
    });
    let mut bytes = body?.to_bytes();
    if bytes.len() < MESSAGE_PREFIX_BYTES {
        return Err(invalid_argument("the call has no message"));
    }
    if bytes.get_u8() != 0 {
        return Err(GrpcError(
            Unimplemented,
            "compressed messages are not supported",
        ));
    }
    if usize::try_from(bytes.get_u32()) != Ok(bytes.len()) {
        return Err(invalid_argument(
            "expected exactly one message after its length prefix",
        ));
    }
    M::decode(bytes).map_err(|_undecodable| invalid_argument("the message cannot be decoded"))
}

pub(crate) fn invalid_argument(why: &'static str) -> GrpcError {
    GrpcError(GrpcStatusCode::InvalidArgument, why)
}

/// Encodes a gRPC message, preceded by its five-byte prefix.
pub(crate) fn encode_framed_message(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(MESSAGE_PREFIX_BYTES + length);
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    message.encode_raw(&mut bytes);
    bytes.freeze()
}

/// Builds the HTTP response to a gRPC call from an encoded message or an error.
pub(crate) fn build_grpc_response(result: Result<Bytes, GrpcError>) -> Response<ResponseBody> {
    let message = match result {
        Ok(message) => message,
        // An error response has no message, so the gRPC status is sent in the response head.
        Err(GrpcError(code, why)) => {
            return build_grpc_error(code as u8, why).map(ResponseBody::Full);
        }
    };
    let status = (GRPC_STATUS.clone(), HeaderValue::from_static("0"));
    let trailers = Some(HeaderMap::from_iter([status]));
    let mut response = Response::new(ResponseBody::FullWithTrailers(message, trailers));
    let grpc = HeaderValue::from_static("application/grpc");
    response.headers_mut().insert(header::CONTENT_TYPE, grpc);
    response
}

/// The result of a call to the rate-limit service. The names are metric labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum RlsCallResult {
    Ok,
    OverLimit,
    /// The store was unavailable.
    Unavailable,
    /// The request was not a valid gRPC call of the service.
    Invalid,
    /// The caller cancelled the call.
    #[strum(serialize = "given_up")]
    Cancelled,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_match_discriminants() {
        assert_eq!(
            RlsCallResult::VARIANTS.len(),
            RlsCallResult::Cancelled as usize + 1
        );
        for one in [
            RlsCallResult::Ok,
            RlsCallResult::OverLimit,
            RlsCallResult::Unavailable,
            RlsCallResult::Invalid,
            RlsCallResult::Cancelled,
        ] {
            assert_eq!(RlsCallResult::VARIANTS[one as usize], <&str>::from(one));
        }
    }
}
