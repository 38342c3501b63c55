//! Properties of the PROXY header parser for arbitrary bytes.

use std::net::{IpAddr, SocketAddr};

use super::{
    ProxyHeaderError, TLV_TYPE_CRC32C, TLV_TYPE_SSL, V2_MAX_BYTES, V2_SIGNATURE, crc32c,
    parse_proxy_header,
};

/// Checks that the parser's first result is final however the bytes are split, and that it covers
/// only bytes of the header.
pub(crate) fn assert_incremental_parsing(bytes: &[u8]) {
    let mut result = None;
    for len in 0..=bytes.len() {
        let Some(begin) = bytes.get(..len) else {
            return;
        };
        let now = parse_proxy_header(begin);
        match (result, now) {
            (Some(known), now) => assert_eq!(now, known, "{begin:?}"),
            (None, Ok(None)) => {}
            (None, now) => {
                if let Ok(Some(header)) = now {
                    assert_eq!(header.len, len, "complete with its last byte: {begin:?}");
                }
                result = Some(now);
            }
        }
    }
    assert!(
        result.is_some() || bytes.len() < V2_MAX_BYTES,
        "the header length is bounded"
    );
}

/// Checks that a generated header parses to its source address, whatever bytes follow, and that a
/// checksum reveals changed addresses.
///
/// The first bytes of `bytes` select version, address and port. The other bytes become the header's
/// extensions and the client's own bytes.
pub(crate) fn assert_generated_header(bytes: &[u8]) {
    let Some(([choice, at, change], rest)) = bytes.split_first_chunk::<3>() else {
        return;
    };
    let Some((address, rest)) = rest.split_first_chunk::<18>() else {
        return;
    };
    let [ip @ .., high, low] = *address;
    let ip = if choice & 1 == 0 {
        let [a, b, c, d, ..] = ip;
        IpAddr::from([a, b, c, d])
    } else {
        IpAddr::from(ip)
    };
    let source = SocketAddr::new(ip, u16::from_be_bytes([high, low]));
    let is_checked = choice & 4 != 0;
    let header = if choice & 2 == 0 {
        build_v1_header(source)
    } else {
        build_v2_header(source, rest, is_checked)
    };
    let parsed = parse_proxy_header(&[&header, rest].concat())
        .map(|header| header.map(|header| (header.source, header.len)));
    // IPv4-mapped addresses are parsed as IPv4.
    let expected = SocketAddr::new(source.ip().to_canonical(), source.port());
    assert_eq!(
        parsed,
        Ok(Some((Some(expected), header.len()))),
        "{header:?}"
    );
    assert_incremental_parsing(&header);
    // Only address bytes are changed: a changed extension length could form a valid list without a
    // checksum.
    let addresses = if ip.is_ipv4() { 12 } else { 36 };
    let mut changed = header;
    if choice & 6 == 6
        && let Some(byte) = changed.get_mut(16 + usize::from(*at) % addresses)
        && *change != 0
    {
        *byte ^= change;
        assert_eq!(
            parse_proxy_header(&changed),
            Err(ProxyHeaderError::Checksum),
            "{changed:?}"
        );
    }
}

fn build_v1_header(source: SocketAddr) -> Vec<u8> {
    let (family, other) = if source.is_ipv4() {
        ("TCP4", "198.51.100.1")
    } else {
        ("TCP6", "2001:db8::2")
    };
    format!(
        "PROXY {family} {} {other} {} 443\r\n",
        source.ip(),
        source.port()
    )
    .into_bytes()
}

/// Each byte of `extensions` becomes the type of one extension, with a value of up to 15 bytes.
fn build_v2_header(source: SocketAddr, extensions: &[u8], is_checked: bool) -> Vec<u8> {
    let mut block = match source.ip() {
        IpAddr::V4(ip) => [ip.octets(), [198, 51, 100, 1]].concat(),
        IpAddr::V6(ip) => [ip.octets(), [7; 16]].concat(),
    };
    block.extend(source.port().to_be_bytes());
    block.extend([1, 0xbb]);
    for byte in extensions
        .iter()
        .take(100)
        .filter(|byte| ![TLV_TYPE_CRC32C, TLV_TYPE_SSL].contains(byte))
    {
        block.extend([*byte, 0, byte % 16]);
        block.extend(std::iter::repeat_n(*byte, usize::from(byte % 16)));
    }
    if is_checked {
        block.extend([TLV_TYPE_CRC32C, 0, 4, 0, 0, 0, 0]);
    }
    let [high, low] = u16::try_from(block.len()).unwrap_or(u16::MAX).to_be_bytes();
    let family = if source.is_ipv4() { 0x11 } else { 0x21 };
    let mut header = [V2_SIGNATURE.as_slice(), &[0x21, family, high, low], &block].concat();
    let sum = crc32c(header.iter().copied()).to_be_bytes();
    if is_checked && let Some(place) = header.last_chunk_mut::<4>() {
        *place = sum;
    }
    header
}
