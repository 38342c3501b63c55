//! Checks single fields of HTTP/2 requests, as h2 does (RFC 9113, 8.2).

use http::uri::Authority;

use crate::proxy::http::request_validation::RequestValidationError;

/// Whether a field is valid.
pub(crate) type FieldCheck = Result<(), RequestValidationError>;

/// What a field means for the head that it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FieldKind {
    Method,
    Scheme,
    Authority,
    Path,
    Protocol,
    UnknownPseudo,
    ContentLength,
    Expect,
    Other,
}

/// Whether a field name may contain the byte (RFC 9110, 5.6.2; RFC 9113, 8.2).
fn is_name_byte(byte: &u8) -> bool {
    matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'!' | b'#'..=b'\'' | b'*' | b'+' | b'^' | b'`' | b'|' | b'~')
}

/// Checks a field. Of pseudo-header fields, only `:authority` can be invalid here: the checks of
/// the others depend on the head.
pub(crate) fn check_field(name: &[u8], value: &[u8]) -> (FieldKind, FieldCheck) {
    let kind = match name {
        b":method" => FieldKind::Method,
        b":scheme" => FieldKind::Scheme,
        b":authority" => FieldKind::Authority,
        b":path" => FieldKind::Path,
        b":protocol" => FieldKind::Protocol,
        [b':', ..] => FieldKind::UnknownPseudo,
        b"content-length" => FieldKind::ContentLength,
        b"expect" => FieldKind::Expect,
        _ => FieldKind::Other,
    };
    let check = match kind {
        FieldKind::Authority => Authority::try_from(value)
            .map_or(Err(RequestValidationError::HostInvalid), |_valid| Ok(())),
        FieldKind::ContentLength | FieldKind::Expect | FieldKind::Other => {
            check_regular_field(name, value)
        }
        _ => Ok(()),
    };
    (kind, check)
}

fn check_regular_field(name: &[u8], value: &[u8]) -> FieldCheck {
    if name.is_empty() || !name.iter().all(is_name_byte) {
        return Err(RequestValidationError::FieldName);
    }
    // Without an early end, which lets the compiler check several bytes at once.
    let is_value_byte = |byte: u8| byte == b'\t' || byte >= b' ' && byte != 0x7f;
    let checked = value.iter().map(|byte| is_value_byte(*byte));
    if !checked.fold(true, |all, is_valid| all & is_valid) {
        return Err(RequestValidationError::FieldValue);
    }
    match name {
        b"connection" | b"keep-alive" | b"proxy-connection" | b"transfer-encoding" | b"upgrade" => {
            Err(RequestValidationError::ConnectionField)
        }
        b"te" if value != b"trailers" => Err(RequestValidationError::ConnectionField),
        _ => Ok(()),
    }
}
