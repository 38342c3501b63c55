//! Parser of PROXY protocol headers, versions 1 and 2 (HAProxy's `proxy-protocol.txt`). The
//! load balancer that opened the connection sends the client's address in the PROXY header.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use crate::proxy::server::handler::ProxyHeaderError;

/// Maximum length of a version 1 header, with its line end ("2.1. Human-readable header format").
const V1_MAX_BYTES: usize = 107;
/// Maximum accepted length of a version 2 header. The PROXY protocol allows 64 KiB. The addresses
/// and the extensions used in practice (TLS names, network identifiers) take a few hundred bytes.
const V2_MAX_BYTES: usize = 4096;

const V1_PREFIX: &[u8] = b"PROXY ";
const V2_SIGNATURE: &[u8; 12] = b"\r\n\r\n\0\r\nQUIT\n";
/// Length of a version 2 header before its addresses: signature, version and command, family, and
/// length.
const V2_FIXED_PART_BYTES: usize = 16;
const V2_INET_ADDRESSES_BYTES: usize = 12;
const V2_INET6_ADDRESSES_BYTES: usize = 36;
const V2_UNIX_ADDRESSES_BYTES: usize = 216;
/// Type of the extension with a checksum of the whole header ("2.2.5. The type PP2_TYPE_CRC32C").
const TLV_TYPE_CRC32C: u8 = 0x03;
/// Type of the extension about TLS between the client and the load balancer ("2.2.6. The
/// PP2_TYPE_SSL type and subtypes"), and the bit of its first byte for a client that uses TLS.
const TLV_TYPE_SSL: u8 = 0x20;
const SSL_CLIENT_BIT: u8 = 0x01;

/// Parsed PROXY header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ProxyHeader {
    /// Client address. `None` if the peer itself is the client (LOCAL, UNKNOWN, or a family other
    /// than IP).
    pub(super) source: Option<SocketAddr>,
    /// Whether the client uses TLS towards the load balancer. `None` if the header does not
    /// state it.
    pub(super) is_tls: Option<bool>,
    /// Length of the header in bytes. The client's own bytes follow the header.
    pub(super) len: usize,
}

/// Parses a header from the first bytes of a connection. Returns `None` if more bytes are needed.
///
/// # Errors
/// Returns a [`ProxyHeaderError`] as soon as no further byte could complete a header. More
/// bytes do not change the error.
pub(super) fn parse_proxy_header(bytes: &[u8]) -> Result<Option<ProxyHeader>, ProxyHeaderError> {
    let matches_prefix = |start: &[u8]| bytes.starts_with(start) || start.starts_with(bytes);
    if matches_prefix(V2_SIGNATURE) && !bytes.is_empty() {
        parse_v2(bytes)
    } else if matches_prefix(V1_PREFIX) {
        parse_v1(bytes)
    } else {
        Err(ProxyHeaderError::Absent)
    }
}

/// Parses a version 1 header, such as `PROXY TCP4 192.0.2.1 198.51.100.1 56324 443\r\n`.
fn parse_v1(bytes: &[u8]) -> Result<Option<ProxyHeader>, ProxyHeaderError> {
    let line = bytes.get(..V1_MAX_BYTES).unwrap_or(bytes);
    let Some(end) = line.iter().position(|byte| matches!(byte, b'\r' | b'\n')) else {
        let is_too_long = line.len() == V1_MAX_BYTES;
        return if is_too_long {
            Err(ProxyHeaderError::TooLong)
        } else {
            Ok(None)
        };
    };
    match line.get(end..) {
        Some([b'\r', b'\n', ..]) => {}
        Some([b'\r']) if line.len() < V1_MAX_BYTES => return Ok(None),
        Some([b'\r']) => return Err(ProxyHeaderError::TooLong),
        _ => return Err(ProxyHeaderError::Malformed),
    }
    let fields = line.get(V1_PREFIX.len()..end);
    let fields = fields.ok_or(ProxyHeaderError::Malformed)?;
    let source = if fields == b"UNKNOWN" || fields.starts_with(b"UNKNOWN ") {
        None
    } else {
        Some(parse_v1_source_address(fields).ok_or(ProxyHeaderError::Malformed)?)
    };
    Ok(Some(ProxyHeader {
        source,
        is_tls: None,
        len: end + 2,
    }))
}

/// Parses the source address from the fields between `PROXY` and the line end. Exactly one space
/// separates two fields.
fn parse_v1_source_address(fields: &[u8]) -> Option<SocketAddr> {
    let mut parts = std::str::from_utf8(fields).ok()?.split(' ');
    let family = parts.next()?;
    let mut address = || -> Option<IpAddr> {
        let text = parts.next()?;
        match family {
            "TCP4" => text.parse::<Ipv4Addr>().ok().map(IpAddr::V4),
            "TCP6" => text.parse::<Ipv6Addr>().ok().map(IpAddr::V6),
            _ => None,
        }
    };
    let (source, _destination) = (address()?, address()?);
    let mut port = || -> Option<u16> {
        let text = parts.next()?;
        let is_plain = text.bytes().all(|byte| byte.is_ascii_digit())
            && (text == "0" || !text.starts_with('0'));
        if is_plain { text.parse().ok() } else { None }
    };
    let (source_port, _destination_port) = (port()?, port()?);
    if parts.next().is_some() {
        return None;
    }
    Some(SocketAddr::new(source.to_canonical(), source_port))
}

fn parse_v2(bytes: &[u8]) -> Result<Option<ProxyHeader>, ProxyHeaderError> {
    // Each byte is checked as soon as it arrives.
    let is_local = match bytes.get(12) {
        None => return Ok(None),
        Some(0x20) => true,
        Some(0x21) => false,
        Some(_) => return Err(ProxyHeaderError::Malformed),
    };
    let Some(&[family, high, low]) = bytes.get(13..V2_FIXED_PART_BYTES) else {
        return Ok(None);
    };
    let len = V2_FIXED_PART_BYTES + usize::from(u16::from_be_bytes([high, low]));
    if len > V2_MAX_BYTES {
        return Err(ProxyHeaderError::TooLong);
    }
    // The high half of the byte is the address family, the low half the transport (stream or
    // datagram).
    if !is_local && (family >> 4 > 3 || family & 0xf > 2) {
        return Err(ProxyHeaderError::Malformed);
    }
    let Some(header) = bytes.get(..len) else {
        return Ok(None);
    };
    let block = header.get(V2_FIXED_PART_BYTES..).unwrap_or_default();
    let (source, is_tls) = match family >> 4 {
        // "the receiver must … discard the protocol block including the family which is ignored"
        _ if is_local => (None, None),
        // HAProxy sends no addresses then, only extensions; other senders may send anything.
        0 => (None, read_extensions(header, block).unwrap_or(None)),
        kind => {
            let address_bytes = match kind {
                1 => V2_INET_ADDRESSES_BYTES,
                2 => V2_INET6_ADDRESSES_BYTES,
                _ => V2_UNIX_ADDRESSES_BYTES,
            };
            let parts = block.split_at_checked(address_bytes);
            let (addresses, extensions) = parts.ok_or(ProxyHeaderError::Malformed)?;
            // Addresses of datagrams do not apply to a connection and are ignored.
            let addresses = Some(addresses).filter(|_| family & 0xf == 1);
            let source = addresses.and_then(parse_v2_source_address);
            (source, read_extensions(header, extensions)?)
        }
    };
    Ok(Some(ProxyHeader {
        source,
        is_tls,
        len,
    }))
}

/// Reads the source address and port. Ignores the destination address and port.
fn parse_v2_source_address(addresses: &[u8]) -> Option<SocketAddr> {
    if let Ok([a, b, c, d, _, _, _, _, high, low, _, _]) =
        <[u8; V2_INET_ADDRESSES_BYTES]>::try_from(addresses)
    {
        let ip = Ipv4Addr::new(a, b, c, d);
        return Some(SocketAddr::new(ip.into(), u16::from_be_bytes([high, low])));
    }
    if addresses.len() != V2_INET6_ADDRESSES_BYTES {
        return None;
    }
    let ip = Ipv6Addr::from(*addresses.first_chunk::<16>()?);
    let port = u16::from_be_bytes(*addresses.get(32..)?.first_chunk::<2>()?);
    Some(SocketAddr::new(IpAddr::V6(ip).to_canonical(), port))
}

/// Validates the list of extensions (type, length, value) and the checksum, if present. Returns
/// whether the client uses TLS, if stated.
fn read_extensions(header: &[u8], extensions: &[u8]) -> Result<Option<bool>, ProxyHeaderError> {
    let (mut rest, mut is_tls) = (extensions, None);
    while let Some((&[kind, high, low], behind)) = rest.split_first_chunk::<3>() {
        let len = usize::from(u16::from_be_bytes([high, low]));
        let parts = behind.split_at_checked(len);
        let (value, further) = parts.ok_or(ProxyHeaderError::Malformed)?;
        if kind == TLV_TYPE_CRC32C {
            let stated =
                <[u8; 4]>::try_from(value).map_err(|_length| ProxyHeaderError::Malformed)?;
            let at = header.len() - further.len() - stated.len();
            // The checksum is computed with zeros in the checksum field.
            let zeroed = header
                .iter()
                .enumerate()
                .map(|(n, byte)| if (at..at + 4).contains(&n) { 0 } else { *byte });
            if crc32c(zeroed) != u32::from_be_bytes(stated) {
                return Err(ProxyHeaderError::Checksum);
            }
        }
        if kind == TLV_TYPE_SSL {
            // The bits, and four bytes that state whether the client's certificate is valid.
            let [bits, _, _, _, _, ..] = value else {
                return Err(ProxyHeaderError::Malformed);
            };
            is_tls = Some(bits & SSL_CLIENT_BIT != 0);
        }
        rest = further;
    }
    rest.is_empty()
        .then_some(is_tls)
        .ok_or(ProxyHeaderError::Malformed)
}

/// CRC-32C (RFC 3720, appendix B.4), computed bit by bit. Most PROXY headers have at most one
/// checksum, over a few hundred bytes.
fn crc32c(bytes: impl Iterator<Item = u8>) -> u32 {
    let fold = |crc: u32, byte: u8| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            (crc >> 1) ^ if crc & 1 == 1 { 0x82f6_3b78 } else { 0 }
        })
    };
    !bytes.fold(u32::MAX, fold)
}

#[cfg(any(test, fuzzing))]
pub(crate) mod properties;
#[cfg(test)]
mod tests;
