use super::*;
use proptest::prelude::*;

fn parse_source_of_complete_header(bytes: &[u8]) -> Result<Option<String>, ProxyHeaderError> {
    let header = parse_proxy_header(bytes)?.expect("the header is complete");
    assert_eq!(header.len, bytes.len());
    Ok(header.source.map(|source| source.to_string()))
}

/// Builds a version 2 header. `block` holds the bytes behind the length field.
fn build_v2_header(command: u8, family: u8, block: &[u8]) -> Vec<u8> {
    let len = u16::try_from(block.len()).unwrap().to_be_bytes();
    [V2_SIGNATURE.as_slice(), &[command, family], &len, block].concat()
}

const INET_ADDRESSES: [u8; 12] = [192, 0, 2, 1, 198, 51, 100, 1, 0xdc, 0x04, 0x01, 0xbb];

fn inet6_addresses(source: &str) -> Vec<u8> {
    let octets = |ip: &str| ip.parse::<Ipv6Addr>().unwrap().octets();
    [
        octets(source).as_slice(),
        &octets("2001:db8::2"),
        &[0xdc, 0x04, 0x01, 0xbb],
    ]
    .concat()
}

/// Builds a version 2 header with a checksum. The checksum is XORed with `wrong`; 0 leaves it
/// correct.
fn build_v2_header_with_crc(mut block: Vec<u8>, wrong: u32) -> Vec<u8> {
    block.extend([TLV_TYPE_CRC32C, 0, 4, 0, 0, 0, 0]);
    let mut header = build_v2_header(0x21, 0x11, &block);
    let crc = crc32c(header.iter().copied()) ^ wrong;
    let at = header.len() - 4;
    header[at..].copy_from_slice(&crc.to_be_bytes());
    header
}

#[test]
#[allow(clippy::too_many_lines, reason = "a table of cases")]
fn parses_version_1_strictly() {
    let read = |line: &str| parse_source_of_complete_header(line.as_bytes());
    let ok = |line| read(line).map(|source| source.unwrap_or_else(|| "the peer".into()));
    assert_eq!(
        ok("PROXY TCP4 192.0.2.1 198.51.100.1 56324 443\r\n").as_deref(),
        Ok("192.0.2.1:56324")
    );
    assert_eq!(
        ok("PROXY TCP4 192.0.2.1 198.51.100.1 0 65535\r\n").as_deref(),
        Ok("192.0.2.1:0")
    );
    assert_eq!(
        ok("PROXY TCP6 2001:db8::1 2001:db8::2 1 2\r\n").as_deref(),
        Ok("[2001:db8::1]:1")
    );
    assert_eq!(
        ok("PROXY TCP6 ::ffff:192.0.2.1 ::1 1 2\r\n").as_deref(),
        Ok("192.0.2.1:1"),
        "an IPv4-mapped address becomes IPv4"
    );
    assert_eq!(ok("PROXY UNKNOWN\r\n").as_deref(), Ok("the peer"));
    assert_eq!(
        ok("PROXY UNKNOWN 1.1.1.1 what ever\r\n").as_deref(),
        Ok("the peer")
    );
    let longest = "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff";
    let line = format!("PROXY UNKNOWN {longest} {longest} 65535 65535\r\n");
    assert_eq!(
        (line.len(), ok(&line).as_deref()),
        (V1_MAX_BYTES, Ok("the peer"))
    );
    for wrong in [
        "PROXY \r\n",
        "PROXY TCP4\r\n",
        "PROXY tcp4 1.1.1.1 2.2.2.2 1 2\r\n",
        "PROXY TCP5 1.1.1.1 2.2.2.2 1 2\r\n",
        "PROXY TCP4 1.1.1.1 2.2.2.2 1\r\n",
        "PROXY TCP4 1.1.1.1 2.2.2.2 1 2 \r\n",
        "PROXY TCP4  1.1.1.1 2.2.2.2 1 2\r\n",
        "PROXY TCP4 1.1.1.1 2.2.2.2 1 2 3\r\n",
        "PROXY TCP4 1.1.1.1 ::1 1 2\r\n",
        "PROXY TCP4 ::1 ::1 1 2\r\n",
        "PROXY TCP6 1.1.1.1 ::1 1 2\r\n",
        "PROXY TCP6 fe80::1%eth0 ::1 1 2\r\n",
        "PROXY TCP4 01.1.1.1 2.2.2.2 1 2\r\n",
        "PROXY TCP4 1.1.1.1 2.2.2.2 01 2\r\n",
        "PROXY TCP4 1.1.1.1 2.2.2.2 1 65536\r\n",
        "PROXY TCP4 1.1.1.1 2.2.2.2 +1 2\r\n",
        "PROXY TCP4 1.1.1.1 2.2.2.2 1 \r\n",
        "PROXY UNKNOWNS\r\n",
        "PROXY UNKNOWN\n",
        "PROXY UNKNOWN\r\r\n",
        "PROXY TCP4 1.1.1.1 2.2.2.2 1 2\n\r\n",
        "PROXY TCP4 1.1.1.\u{e9} 2.2.2.2 1 2\r\n",
    ] {
        assert_eq!(
            parse_proxy_header(wrong.as_bytes()),
            Err(ProxyHeaderError::Malformed),
            "{wrong:?}"
        );
    }
    for long in [
        format!("PROXY UNKNOWN {}", "x".repeat(93)),
        format!("PROXY UNKNOWN {}\r\n", "x".repeat(92)),
    ] {
        assert_eq!(
            parse_proxy_header(long.as_bytes()),
            Err(ProxyHeaderError::TooLong),
            "{long:?}"
        );
    }
    for absent in [
        "GET / HTTP/1.1\r\n",
        "proxy ",
        "PROXY\t",
        "\r\n\r\n\0\r\nQUIX",
        "\x16\x03\x01",
        "\n",
    ] {
        assert_eq!(
            parse_proxy_header(absent.as_bytes()),
            Err(ProxyHeaderError::Absent),
            "{absent:?}"
        );
    }
    assert_eq!(parse_proxy_header(b""), Ok(None));
}

#[test]
fn parses_version_2_strictly() {
    let read = |command, family, block: &[u8]| {
        parse_source_of_complete_header(&build_v2_header(command, family, block))
    };
    assert_eq!(
        read(0x21, 0x11, &INET_ADDRESSES),
        Ok(Some("192.0.2.1:56324".into()))
    );
    assert_eq!(
        read(0x21, 0x21, &inet6_addresses("2001:db8::1")),
        Ok(Some("[2001:db8::1]:56324".into()))
    );
    assert_eq!(
        read(0x21, 0x21, &inet6_addresses("::ffff:192.0.2.1")),
        Ok(Some("192.0.2.1:56324".into()))
    );
    // Headers of these kinds make the peer itself the client.
    for (command, family, block) in [
        (0x20, 0x00, [].as_slice()),
        (0x20, 0x11, &INET_ADDRESSES),
        (0x20, 0xff, b"nonsense"),
        (0x21, 0x00, b"anything"),
        (0x21, 0x12, &INET_ADDRESSES),
        (0x21, 0x10, &INET_ADDRESSES),
        (0x21, 0x31, &[7; 216]),
    ] {
        assert_eq!(
            read(command, family, block),
            Ok(None),
            "{command:x} {family:x}"
        );
    }
    for (command, family, block) in [
        (0x11, 0x11, INET_ADDRESSES.as_slice()),
        (0x22, 0x11, &INET_ADDRESSES),
        (0x31, 0x11, &INET_ADDRESSES),
        (0x21, 0x41, &INET_ADDRESSES),
        (0x21, 0x13, &INET_ADDRESSES),
        (0x21, 0x11, &INET_ADDRESSES[..11]),
        (0x21, 0x21, &[0; 35]),
        (0x21, 0x31, &[0; 215]),
        (0x21, 0x11, &[INET_ADDRESSES.as_slice(), &[4]].concat()),
        (0x21, 0x11, &[INET_ADDRESSES.as_slice(), &[4, 0]].concat()),
        (
            0x21,
            0x11,
            &[INET_ADDRESSES.as_slice(), &[4, 0, 1]].concat(),
        ),
        (
            0x21,
            0x11,
            &[INET_ADDRESSES.as_slice(), &[TLV_TYPE_CRC32C, 0, 3, 0, 0, 0]].concat(),
        ),
    ] {
        assert_eq!(
            parse_proxy_header(&build_v2_header(command, family, block)),
            Err(ProxyHeaderError::Malformed),
            "{command:x} {family:x}"
        );
    }
    // A no-op extension of two bytes and an authority extension.
    let extended = [
        INET_ADDRESSES.as_slice(),
        &[4, 0, 2, 0, 0],
        &[2, 0, 1, b'a'],
    ]
    .concat();
    assert_eq!(
        read(0x21, 0x11, &extended),
        Ok(Some("192.0.2.1:56324".into()))
    );
    let longest = vec![0; V2_MAX_BYTES - V2_FIXED_PART_BYTES];
    assert_eq!(read(0x20, 0, &longest), Ok(None));
    assert_eq!(
        parse_proxy_header(&build_v2_header(0x20, 0, &[longest, vec![0]].concat())[..16]),
        Err(ProxyHeaderError::TooLong)
    );
}

#[test]
fn verifies_a_checksum_if_present() {
    assert_eq!(
        crc32c(b"123456789".iter().copied()),
        0xe306_9283,
        "the check value of CRC-32C"
    );
    assert_eq!(crc32c([0; 32].into_iter()), 0x8a91_36aa, "RFC 3720, B.4");
    let right = build_v2_header_with_crc(INET_ADDRESSES.to_vec(), 0);
    assert_eq!(
        parse_source_of_complete_header(&right),
        Ok(Some("192.0.2.1:56324".into()))
    );
    assert_eq!(
        parse_proxy_header(&build_v2_header_with_crc(INET_ADDRESSES.to_vec(), 1)),
        Err(ProxyHeaderError::Checksum)
    );
    for at in 16..28 {
        let mut changed = right.clone();
        changed[at] ^= 1;
        assert_eq!(
            parse_proxy_header(&changed),
            Err(ProxyHeaderError::Checksum),
            "byte {at}"
        );
    }
    let twice = build_v2_header_with_crc([INET_ADDRESSES.as_slice(), &right[28..]].concat(), 0);
    assert!(parse_proxy_header(&twice).is_err());
}

/// Generates valid PROXY headers, almost valid headers, and arbitrary bytes.
fn header_like_bytes() -> impl Strategy<Value = Vec<u8>> {
    let lines = prop_oneof![
        Just(
            "PROXY TCP4 192.0.2.1 198.51.100.1 56324 443\r\nGET /"
                .as_bytes()
                .to_vec()
        ),
        Just(b"PROXY UNKNOWN\r\n\r\n".to_vec()),
        Just(
            [
                build_v2_header(0x21, 0x11, &INET_ADDRESSES),
                b"GET / HTTP/1.1".to_vec()
            ]
            .concat()
        ),
        Just(
            [
                build_v2_header_with_crc(INET_ADDRESSES.to_vec(), 0),
                b"\x16\x03\x01".to_vec()
            ]
            .concat()
        ),
        Just(build_v2_header(0x21, 0x21, &inet6_addresses("2001:db8::1"))),
        any::<[u8; 3]>().prop_map(|tail| build_v2_header(
            tail[0] % 4 + 0x1f,
            tail[1],
            &[INET_ADDRESSES.as_slice(), &tail].concat()
        )),
        "PROXY (TCP[456]|UNKNOWN) [0-9.: ]{0,99}\r?\n?".prop_map(String::into_bytes),
        proptest::collection::vec(any::<u8>(), 0..200),
    ];
    // One byte of the generated bytes may be changed.
    (lines, any::<prop::sample::Index>(), any::<Option<u8>>()).prop_map(
        |(mut bytes, at, change)| {
            if let (Some(change), false) = (change, bytes.is_empty()) {
                let at = at.index(bytes.len());
                bytes[at] ^= change;
            }
            bytes
        },
    )
}

proptest! {
    #[test]
    fn parsing_does_not_depend_on_how_bytes_are_split(bytes in header_like_bytes()) {
        properties::assert_incremental_parsing(&bytes);
    }

    #[test]
    fn parses_every_generated_header(bytes in prop::collection::vec(prop_oneof![0..8_u8, any::<u8>()], 21..60)) {
        properties::assert_generated_header(&bytes);
    }
}
