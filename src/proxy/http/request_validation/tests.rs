use super::*;
use http::StatusCode;
use proptest::prelude::*;

fn build_request_head(
    method: &str,
    uri: &str,
    version: Version,
    fields: &[(&str, &str)],
) -> request::Parts {
    let mut builder = http::Request::builder()
        .method(method)
        .uri(uri)
        .version(version);
    for (name, value) in fields {
        builder = builder.header(*name, *value);
    }
    builder.body(()).unwrap().into_parts().0
}

fn is_user_id_header(name: &HeaderName) -> bool {
    name.as_str() == "x-user-id"
}

fn expect_valid_request(mut parts: request::Parts) -> (request::Parts, RequestTarget) {
    let target = validate_and_rewrite_request(&mut parts, &is_user_id_header).unwrap();
    (parts, target)
}

fn expect_validation_error(mut parts: request::Parts) -> RequestValidationError {
    validate_and_rewrite_request(&mut parts, &is_user_id_header).unwrap_err()
}

/// Builds a GET of `/` with a valid Host and the given headers.
fn build_get_request(fields: &[(&str, &str)]) -> request::Parts {
    let fields: Vec<_> = [("host", "a.example")]
        .iter()
        .chain(fields)
        .copied()
        .collect();
    build_request_head("GET", "/", Version::HTTP_11, &fields)
}

#[test]
fn path_and_query_are_forwarded_unchanged() {
    let raw = "//a/%2e%2E/./b;x=1?q=%zz&&u=/../";
    let (parts, target) = expect_valid_request(build_request_head(
        "GET",
        raw,
        Version::HTTP_11,
        &[("host", "h")],
    ));
    assert_eq!(parts.uri.to_string(), raw);
    assert_eq!(
        (target.path(), target.query()),
        ("//a/%2e%2E/./b;x=1", Some("q=%zz&&u=/../"))
    );
}

#[test]
fn empty_path_becomes_a_slash() {
    for (sent, forwarded) in [
        ("http://h", "/"),
        ("http://h#x", "/"),
        ("http://h?q#x", "/?q"),
        ("/#x", "/"),
    ] {
        for version in [Version::HTTP_10, Version::HTTP_11] {
            let (parts, _) =
                expect_valid_request(build_request_head("GET", sent, version, &[("host", "h")]));
            assert_eq!(parts.uri.to_string(), forwarded, "{sent}");
        }
    }
}

#[test]
fn the_host_for_policies_is_normalized_and_the_authority_is_not() {
    for (sent, host) in [
        ("a.example", "a.example"),
        ("A.Example.:8080", "a.example"),
        ("a.example.", "a.example"),
        ("a.example:", "a.example"),
        ("127.0.0.1:80", "127.0.0.1"),
        ("[::0001]:80", "[::1]"),
        ("my_service-1", "my_service-1"),
    ] {
        let (parts, target) = expect_valid_request(build_request_head(
            "GET",
            "/",
            Version::HTTP_11,
            &[("host", sent)],
        ));
        assert_eq!(target.host(), host, "{sent}");
        assert_eq!(target.authority.as_ref().unwrap(), sent);
        assert_eq!(parts.headers["host"], sent);
    }
}

#[test]
fn rejects_an_invalid_missing_or_repeated_host() {
    for host in [
        "",
        "u@h",
        "u:p@h",
        "a b",
        "a,b",
        "h:x",
        "h:0",
        "h:65536",
        "h:1:2",
        "[::1",
        "::1",
        "[::1]x",
        "[x]",
        "[fe80::1%25eth0]",
        ".a",
        "a..b",
        ".",
        "a/b",
        "a%2eb",
        "a\\b",
        "h:+80",
    ] {
        let got = expect_validation_error(build_request_head(
            "GET",
            "/",
            Version::HTTP_11,
            &[("host", host)],
        ));
        assert_eq!(got, RequestValidationError::HostInvalid, "{host}");
    }
    assert_eq!(
        expect_validation_error(build_request_head("GET", "/", Version::HTTP_11, &[])),
        RequestValidationError::HostMissing
    );
    assert_eq!(
        expect_validation_error(build_request_head(
            "GET",
            "http://h/",
            Version::HTTP_11,
            &[]
        )),
        RequestValidationError::HostMissing
    );
    assert_eq!(
        expect_validation_error(build_get_request(&[("host", "a.example")])),
        RequestValidationError::HostRepeated
    );
}

#[test]
fn http_1_0_does_not_require_a_host() {
    let (parts, target) = expect_valid_request(build_request_head(
        "GET",
        "/",
        Version::HTTP_10,
        &[("expect", "x")],
    ));
    assert_eq!((target.host(), target.authority.as_ref()), ("", None));
    assert_eq!(parts.version, Version::HTTP_11);
    assert!(parts.headers.is_empty());
}

#[test]
fn rejects_an_absolute_target_that_differs_from_the_host() {
    for (uri, host) in [
        ("http://a.example/x?y", "A.EXAMPLE"),
        ("http://a.example:80/x?y", "a.example"),
        ("https://a.example/x?y", "a.example:443"),
        ("HTTP://[::1]/x?y", "[0::1]:80"),
    ] {
        let (parts, _) = expect_valid_request(build_request_head(
            "GET",
            uri,
            Version::HTTP_11,
            &[("host", host)],
        ));
        assert_eq!(parts.uri.to_string(), "/x?y");
    }
    for (uri, host) in [
        ("http://a.example/", "b.example"),
        ("http://a.example/", "a.example:443"),
        ("https://a.example/", "a.example:80"),
    ] {
        let got = expect_validation_error(build_request_head(
            "GET",
            uri,
            Version::HTTP_11,
            &[("host", host)],
        ));
        assert_eq!(got, RequestValidationError::HostMismatch, "{uri} {host}");
    }
    let got = expect_validation_error(build_request_head(
        "GET",
        "http://u@a.example/",
        Version::HTTP_11,
        &[("host", "a.example")],
    ));
    assert_eq!(got, RequestValidationError::HostInvalid);
}

#[test]
fn http_2_host_is_taken_from_the_authority() {
    let (parts, target) = expect_valid_request(build_request_head(
        "GET",
        "http://A.example:8080/x",
        Version::HTTP_2,
        &[],
    ));
    assert_eq!(parts.headers["host"], "A.example:8080");
    assert_eq!(target.host(), "a.example");
    assert_eq!(
        (parts.uri.to_string().as_str(), parts.version),
        ("/x", Version::HTTP_11)
    );
    let got = expect_validation_error(build_request_head(
        "GET",
        "http://a.example/",
        Version::HTTP_2,
        &[("host", "b.example")],
    ));
    assert_eq!(got, RequestValidationError::HostMismatch);
}

#[test]
fn rejects_unsupported_target_forms() {
    for (method, uri) in [
        ("GET", "foo"),
        ("GET", "a.example:80"),
        ("GET", "*"),
        ("POST", "*"),
        ("GET", "ftp://a.example/"),
    ] {
        let got = expect_validation_error(build_request_head(
            method,
            uri,
            Version::HTTP_11,
            &[("host", "a.example")],
        ));
        assert_eq!(got, RequestValidationError::Target, "{method} {uri}");
    }
    let (parts, target) = expect_valid_request(build_request_head(
        "OPTIONS",
        "*",
        Version::HTTP_11,
        &[("host", "h")],
    ));
    assert_eq!((parts.uri.to_string().as_str(), target.path()), ("*", "/"));
    let (parts, target) = expect_valid_request(build_request_head(
        "GET",
        "http://h?x=1",
        Version::HTTP_11,
        &[("host", "h")],
    ));
    assert_eq!(
        (parts.uri.to_string().as_str(), target.path()),
        ("/?x=1", "/")
    );
    let got = expect_validation_error(build_request_head(
        "CONNECT",
        "a.example:80",
        Version::HTTP_11,
        &[("host", "a.example:80")],
    ));
    assert_eq!(got.status(), StatusCode::METHOD_NOT_ALLOWED);
}

#[test]
fn accepts_only_a_single_chunked_transfer_coding() {
    let (parts, target) =
        expect_valid_request(build_get_request(&[("transfer-encoding", "Chunked")]));
    assert!(parts.headers.contains_key("transfer-encoding"));
    assert_eq!(target.content_length, None);
    for fields in [
        &[("transfer-encoding", "gzip, chunked")][..],
        &[("transfer-encoding", "chunked, chunked")],
        &[("transfer-encoding", "identity")],
        &[("transfer-encoding", "\"chunked\"")],
        &[
            ("transfer-encoding", "chunked"),
            ("transfer-encoding", "chunked"),
        ],
        &[
            ("transfer-encoding", "identity"),
            ("transfer-encoding", "chunked"),
        ],
    ] {
        assert_eq!(
            expect_validation_error(build_get_request(fields)).status(),
            StatusCode::NOT_IMPLEMENTED,
            "{fields:?}"
        );
    }
}

#[test]
fn rejects_an_invalid_or_repeated_content_length() {
    let (parts, target) = expect_valid_request(build_get_request(&[("content-length", "12")]));
    assert_eq!(
        (
            parts.headers["content-length"].as_bytes(),
            target.content_length
        ),
        (&b"12"[..], Some(12))
    );
    for fields in [
        &[("content-length", "1, 1")][..],
        &[("content-length", "+1")],
        &[("content-length", "")],
        &[("content-length", "0x1")],
        &[("content-length", "18446744073709551616")],
        &[("content-length", "1"), ("content-length", "1")],
        &[("content-length", "1"), ("transfer-encoding", "chunked")],
    ] {
        assert_eq!(
            expect_validation_error(build_get_request(fields)),
            RequestValidationError::ContentLength,
            "{fields:?}"
        );
    }
}

#[test]
fn rejects_header_names_that_resemble_protected_ones() {
    for name in [
        "x_user_id",
        "x-user_id",
        "x.user.id",
        "x_forwarded_for",
        "X_Forwarded_Whatever",
        "content_length",
        "transfer_encoding",
        "authorization",
        "x_real_ip",
    ] {
        let parts = build_get_request(&[(name, "1")]);
        if name == "authorization" {
            expect_valid_request(parts);
        } else {
            assert_eq!(
                expect_validation_error(parts),
                RequestValidationError::AmbiguousHeaderName,
                "{name}"
            );
        }
    }
    let (parts, _) = expect_valid_request(build_get_request(&[("my_own_name", "1")]));
    assert_eq!(parts.headers["my_own_name"], "1");
}

#[test]
fn rejects_a_connection_header_that_names_protected_fields() {
    for name in [
        "X-User-Id",
        "host",
        "Authorization",
        "cookie",
        "x-forwarded-for",
        "via",
        "content-length",
    ] {
        assert_eq!(
            expect_validation_error(build_get_request(&[("connection", name)])),
            RequestValidationError::ProtectedConnectionOption,
            "{name}"
        );
        let list = format!("close,, {name} ,x");
        assert_eq!(
            expect_validation_error(build_get_request(&[
                ("connection", "x"),
                ("connection", &list)
            ])),
            RequestValidationError::ProtectedConnectionOption
        );
    }
}

#[test]
fn hop_by_hop_fields_are_removed() {
    let (parts, _) = expect_valid_request(build_get_request(&[
        ("connection", "close, X-Gone"),
        ("connection", "keep-alive, upgrade, http2-settings, b@d"),
        ("x-gone", "1"),
        ("x-gone", "2"),
        ("keep-alive", "timeout=5"),
        ("proxy-connection", "keep-alive"),
        ("proxy-authorization", "basic x"),
        ("te", "gzip"),
        ("upgrade", "h2c"),
        ("http2-settings", "AAA"),
        ("accept", "a/b"),
    ]));
    let left: Vec<_> = parts.headers.keys().map(HeaderName::as_str).collect();
    assert_eq!(left, ["host", "accept"]);
}

#[test]
fn te_keeps_trailers_only() {
    let (parts, _) = expect_valid_request(build_get_request(&[
        ("te", "gzip;q=0.5, Trailers"),
        ("connection", "TE"),
    ]));
    assert_eq!(
        (&parts.headers["te"], &parts.headers["connection"]),
        (&"trailers".parse().unwrap(), &"te".parse().unwrap())
    );
}

#[test]
fn an_upgrade_is_forwarded_with_all_its_values() {
    let (parts, target) = expect_valid_request(build_get_request(&[
        ("connection", "X-Gone, UPGRADE"),
        ("x-gone", "1"),
        ("upgrade", "websocket, Other/2"),
        ("upgrade", "more"),
        ("http2-settings", "AAA"),
        ("content-length", "0"),
    ]));
    assert_eq!(
        target.upgrade_request,
        Some(RequestedProtocolSwitch {
            is_extended_connect: false,
            websocket_key: None
        })
    );
    let lines: Vec<_> = parts.headers.get_all("upgrade").iter().collect();
    assert_eq!(lines, ["websocket, Other/2", "more"]);
    assert_eq!(parts.headers["connection"], "upgrade");
    assert!(!parts.headers.contains_key("x-gone") && !parts.headers.contains_key("http2-settings"));
    let (parts, _) = expect_valid_request(build_get_request(&[
        ("connection", "te, upgrade"),
        ("te", "trailers"),
        ("upgrade", "a"),
    ]));
    assert_eq!(
        (&parts.headers["te"], &parts.headers["connection"]),
        (
            &"trailers".parse().unwrap(),
            &"te, upgrade".parse().unwrap()
        )
    );
}

#[test]
fn policies_that_read_upgrade_do_not_block_upgrades() {
    let reads = |name: &HeaderName| *name == header::UPGRADE || *name == header::TE;
    let mut parts = build_get_request(&[
        ("connection", "te, upgrade"),
        ("te", "trailers"),
        ("upgrade", "websocket"),
    ]);
    let target = validate_and_rewrite_request(&mut parts, &reads).unwrap();
    assert!(target.upgrade_request.is_some());
    assert_eq!(parts.headers["upgrade"], "websocket");
}

#[test]
fn removes_upgrade_from_a_request_that_cannot_be_upgraded() {
    let upgrade = [("connection", "upgrade"), ("upgrade", "websocket")];
    for more in [
        ("content-length", "1"),
        ("transfer-encoding", "chunked"),
        ("upgrade", "h2c"),
    ] {
        let (parts, target) =
            expect_valid_request(build_get_request(&[upgrade[0], upgrade[1], more]));
        assert_eq!(
            (target.upgrade_request, parts.headers.get("upgrade")),
            (None, None),
            "{more:?}"
        );
        assert!(!parts.headers.contains_key("connection"));
    }
    let (parts, target) = expect_valid_request(build_get_request(&[upgrade[1]]));
    assert_eq!(
        (target.upgrade_request, parts.headers.get("upgrade")),
        (None, None),
        "not named in Connection"
    );
    for version in [Version::HTTP_10, Version::HTTP_2] {
        let fields = [("host", "h"), upgrade[0], upgrade[1]];
        let (parts, target) =
            expect_valid_request(build_request_head("GET", "http://h/", version, &fields));
        assert_eq!(
            (target.upgrade_request, parts.headers.get("upgrade")),
            (None, None),
            "{version:?}"
        );
    }
}

#[test]
fn extended_connect_becomes_a_websocket_handshake() {
    let connect = |protocol: Option<&'static str>, version, fields: &[(&str, &str)]| {
        let mut parts =
            build_request_head("CONNECT", "https://a.example:8443/chat?x", version, fields);
        if let Some(name) = protocol {
            parts
                .extensions
                .insert(hyper::ext::Protocol::from_static(name));
        }
        parts
    };
    let fields = [
        ("sec-websocket-key", "theirs"),
        ("sec-websocket-version", "13"),
    ];
    let (parts, target) =
        expect_valid_request(connect(Some("WebSocket"), Version::HTTP_2, &fields));
    assert_eq!(
        (&parts.method, parts.uri.to_string().as_str()),
        (&Method::GET, "/chat?x")
    );
    assert_eq!(
        (target.host(), parts.version),
        ("a.example", Version::HTTP_11)
    );
    let key = parts
        .headers
        .get_all("sec-websocket-key")
        .iter()
        .collect::<Vec<_>>();
    assert_eq!(
        target.upgrade_request,
        Some(RequestedProtocolSwitch {
            is_extended_connect: true,
            websocket_key: Some(key[0].clone())
        })
    );
    assert_eq!((key.len(), key[0].len()), (1, 24));
    assert_eq!(
        (&parts.headers["upgrade"], &parts.headers["connection"]),
        (&"websocket".parse().unwrap(), &"upgrade".parse().unwrap())
    );
    assert_eq!(parts.headers["sec-websocket-version"], "13");

    assert_eq!(
        expect_validation_error(connect(Some("connect-udp"), Version::HTTP_2, &[])).status(),
        StatusCode::NOT_IMPLEMENTED
    );
    assert_eq!(
        expect_validation_error(connect(None, Version::HTTP_2, &[])),
        RequestValidationError::Connect
    );
    assert_eq!(
        expect_validation_error(connect(
            Some("websocket"),
            Version::HTTP_11,
            &[("host", "a")]
        )),
        RequestValidationError::Connect
    );
}

#[test]
fn only_100_continue_is_accepted_and_removed() {
    let (parts, _) = expect_valid_request(build_get_request(&[("expect", "100-Continue")]));
    assert!(!parts.headers.contains_key("expect"));
    assert_eq!(
        expect_validation_error(build_get_request(&[("expect", "magic")])).status(),
        StatusCode::EXPECTATION_FAILED
    );
    assert_eq!(
        expect_validation_error(build_get_request(&[
            ("expect", "100-continue"),
            ("expect", "x")
        ])),
        RequestValidationError::Expect
    );
}

#[test]
fn rejects_trailers_that_name_protected_fields() {
    expect_valid_request(build_get_request(&[("trailer", "grpc-status, X-Checksum")]));
    for name in [
        "content-length",
        "Host",
        "x-user-id",
        "x_user_id",
        "te",
        "a b",
        "trailer",
        "cookie",
        "x, via",
    ] {
        assert_eq!(
            expect_validation_error(build_get_request(&[("trailer", name)])),
            RequestValidationError::Trailer,
            "{name}"
        );
    }
}

#[test]
fn rejects_trace_with_a_body() {
    let trace =
        |fields: &[(&str, &str)]| build_request_head("TRACE", "/", Version::HTTP_11, fields);
    expect_valid_request(trace(&[("host", "h"), ("content-length", "0")]));
    assert_eq!(
        expect_validation_error(trace(&[("host", "h"), ("content-length", "1")])),
        RequestValidationError::TraceBody
    );
    assert_eq!(
        expect_validation_error(trace(&[("host", "h"), ("transfer-encoding", "chunked")])),
        RequestValidationError::TraceBody
    );
}

proptest! {
    #[test]
    fn valid_requests_are_unambiguous(
        fields in prop::collection::vec((
            prop_oneof![
                "[!-~]{1,12}",
                prop::sample::select(vec![
                    "host", "connection", "te", "trailer", "expect", "content-length", "transfer-encoding",
                ]).prop_map(str::to_owned),
            ],
            prop_oneof![
                prop::collection::vec(any::<u8>(), 0..24),
                "[a-z0-9:.,\\[\\]-]{0,12}".prop_map(String::into_bytes),
            ],
        ), 0..8),
        uri in prop_oneof!["/[!-~]{0,12}", "[!-~]{1,16}", "http://[a-z@:\\[\\].]{1,8}[!-~]{0,8}"],
        options in any::<bool>(),
    ) {
        let Ok(uri) = uri.parse::<Uri>() else { return Ok(()) };
        let mut parts = build_request_head(if options { "OPTIONS" } else { "GET" }, "/", Version::HTTP_11, &[]);
        parts.uri = uri;
        for (name, value) in fields {
            if let (Ok(name), Ok(value)) =
                (HeaderName::from_bytes(name.as_bytes()), HeaderValue::from_bytes(&value))
            {
                parts.headers.append(name, value);
            }
        }
        if let Ok(target) = validate_and_rewrite_request(&mut parts, &is_user_id_header) {
            prop_assert_eq!(parts.headers.get_all("host").iter().count(), 1);
            prop_assert!(parts.headers.get_all("content-length").iter().count() <= 1);
            prop_assert!(!target.host().is_empty());
            prop_assert!(target.path().starts_with('/'));
            prop_assert!(parts.uri.authority().is_none() && !parts.headers.contains_key("expect"));
        }
    }
}
