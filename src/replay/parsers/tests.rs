use super::*;
use http::HeaderName;

fn required_fields(names: &[&'static str], mappings: &[(&'static str, &str)]) -> RequiredFields {
    let names: Vec<HeaderName> = names
        .iter()
        .map(|name| HeaderName::from_static(name))
        .collect();
    let mappings: Vec<_> = mappings
        .iter()
        .map(|(name, field)| ((*name).to_owned(), (*field).to_owned()))
        .collect();
    RequiredFields::new(names.iter(), &mappings)
}

/// Formats a parsed line as `time duration peer status method target host headers`.
fn summarize_line(format: AccessLogFormat, required_fields: &RequiredFields, line: &str) -> String {
    match LineParser::new(&format, required_fields).parse_line(line.as_bytes()) {
        ParsedLine::Other => "other".to_owned(),
        ParsedLine::Broken => "broken".to_owned(),
        ParsedLine::Request(request) => {
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            let headers: Vec<String> = request
                .headers
                .iter()
                .map(|(place, value)| {
                    format!(
                        "{}={}",
                        required_fields.names[usize::from(*place)],
                        text(value)
                    )
                })
                .collect();
            let facts = request.facts;
            let peer = facts.peer.map_or("-".to_owned(), |peer| peer.to_string());
            let duration = facts
                .duration_us
                .map_or("-".to_owned(), |us| us.to_string());
            let (method, target, host) = (
                text(&request.method),
                text(&request.target),
                text(&request.host),
            );
            let (at_us, status) = (facts.arrival_us, facts.status);
            format!("{at_us} {duration} {peer} {status} {method} {target} {host} {headers:?}")
        }
    }
}

#[track_caller]
fn assert_parses(format: AccessLogFormat, names: &[&'static str], line: &str, expected: &str) {
    assert_eq!(
        summarize_line(format, &required_fields(names, &[]), line),
        expected,
        "{line}"
    );
}

const COMBINED: &str = r#"10.0.0.1 - ann [18/Nov/2026:12:06:40 +0100] "GET /a?b=1 HTTP/1.1" 200 512 "https://a/" "curl/8""#;

/// The example of the AWS documentation, and a client that sent no request.
const ALB: &str = r#"https 2026-11-18T11:06:40.186641Z app/lb/50dc6c495c0c9188 192.168.131.39:2817 10.0.0.1:80 0.086 0.048 0.037 200 200 0 57 "GET https://www.example.com:443/a?b=1 HTTP/1.1" "curl/7.46.0" ECDHE-RSA-AES128-GCM-SHA256 TLSv1.2 arn:aws:elasticloadbalancing:us-east-2:123456789012:targetgroup/t/73e2d6bc24d8a067 "Root=1-58337281-1d84f3d73c47ec4e58577259" "www.example.com" "arn:aws:acm:us-east-2:123456789012:certificate/12345678" 1 2026-11-18T11:06:40.000000Z "authenticate,forward" "-" "-" "10.0.0.1:80" "200" "-" "-" TID_123456"#;

#[test]
fn parses_lines_of_aws_load_balancers() {
    let names = ["user-agent", "x-amzn-trace-id"];
    assert_parses(
        AccessLogFormat::Alb,
        &names,
        ALB,
        r#"1795000000000000 171000 192.168.131.39 200 GET /a?b=1 www.example.com:443 ["user-agent=curl/7.46.0", "x-amzn-trace-id=Root=1-58337281-1d84f3d73c47ec4e58577259"]"#,
    );
    // Without the time of the creation, the durations are subtracted from the time of the end.
    let old = ALB.split(" 1 2026-").next().unwrap();
    assert_parses(
        AccessLogFormat::Alb,
        &[],
        old,
        "1795000000015641 171000 192.168.131.39 200 GET /a?b=1 www.example.com:443 []",
    );
    let no_request = ALB.replace(
        "GET https://www.example.com:443/a?b=1 HTTP/1.1",
        "- http://lb:80- ",
    );
    assert_parses(AccessLogFormat::Alb, &[], &no_request, "other");
    assert_parses(AccessLogFormat::Alb, &[], ALB.split_at(300).0, "broken");
    assert_eq!(
        AccessLogFormat::detect(std::iter::once(ALB.as_bytes())),
        Some(AccessLogFormat::Alb)
    );
}

fn custom_format(text: &str) -> AccessLogFormat {
    AccessLogFormat::Custom(LineTemplate::parse(text).unwrap().into())
}

#[test]
fn parses_formats_with_nginx_variables() {
    let format = r#"$host $remote_addr [$time_local] "$request" $status ${request_time}s "$http_x_user_id" $upstream_addr"#;
    let line = r#"shop.example 10.0.0.1 [18/Nov/2026:12:06:40 +0100] "GET /a?b=\x22 HTTP/1.1" 200 0.250s "ann \"a\"" 10.0.0.9:80"#;
    assert_parses(
        custom_format(format),
        &["x-user-id"],
        line,
        r#"1795000000000000 250000 10.0.0.1 200 GET /a?b=" shop.example ["x-user-id=ann \"a\""]"#,
    );
    let mapped = required_fields(&[], &[("x-upstream", "upstream_addr")]);
    let summary = summarize_line(custom_format(format), &mapped, line);
    assert!(
        summary.ends_with(r#"["x-upstream=10.0.0.9:80"]"#),
        "{summary}"
    );
    assert_parses(
        custom_format("$msec\t$request_method $uri ?$args $request_time $cookie_sid"),
        &["cookie"],
        "1795000000.750\tPOST /a ?b=1 0.250 s3",
        r#"1795000000500000 250000 - 0 POST /a?b=1  ["cookie=sid=s3"]"#,
    );
    assert_parses(custom_format(format), &[], "shop.example - [x]", "broken");
}

#[test]
fn parses_formats_with_apache_directives() {
    let format = r#"%v %h %l %u %t \"%r\" %>s %b %D \"%{X-User-Id}i\" %{session}C"#;
    let line = r#"shop.example 10.0.0.1 - ann [18/Nov/2026:12:06:40 +0100] "GET /a HTTP/1.1" 200 5 250000 "u1" c9"#;
    assert_parses(
        custom_format(format),
        &["x-user-id", "cookie"],
        line,
        r#"1795000000000000 250000 10.0.0.1 200 GET /a shop.example ["x-user-id=u1", "cookie=session=c9"]"#,
    );
    assert_parses(
        custom_format("%{usec}t %m %U%% %q|%{ms}T"),
        &[],
        "1795000000500000 GET /a% ?b=1|250",
        "1795000000500000 250000 - 0 GET /a?b=1  []",
    );
}

#[test]
fn incomplete_formats_are_rejected_with_reasons() {
    for (format, reason) in [
        ("$request", "the format has no time"),
        ("$time_local $status", "the format has no request"),
        ("%t", "the format has no request"),
        (
            "$msec$request",
            "needs text between it and the field before it",
        ),
        ("$msec ${request", "has no closing brace"),
        ("%t %r %", "does not begin with a directive"),
        ("$msec $ $request", "does not begin with a variable"),
    ] {
        let error = LineTemplate::parse(format).unwrap_err();
        assert!(error.contains(reason), "{format}: {error}");
    }
}

#[test]
fn parses_nginx_and_apache_text() {
    let names = ["user-agent", "referer"];
    assert_parses(
        AccessLogFormat::Combined,
        &names,
        COMBINED,
        r#"1795000000000000 - 10.0.0.1 200 GET /a?b=1  ["referer=https://a/", "user-agent=curl/8"]"#,
    );
    for (line, expected) in [
        (
            r#"::1 - - [18/Nov/2026:11:06:40 +0000] "HEAD / HTTP/1.0" 304 -"#,
            "1795000000000000 - ::1 304 HEAD /  []",
        ),
        (
            r#"a.example:80 1.2.3.4 - - [18/Nov/2026:11:06:40 +0000] "GET / HTTP/1.1" 429 0 "-" "-""#,
            "1795000000000000 - 1.2.3.4 429 GET / a.example:80 []",
        ),
        // The user name is unchecked client input, and the host may be a resolved name.
        (
            r#"1.2.3.4 - a [b] c [18/Nov/2026:06:06:40 -0500] "GET / HTTP/1.1" 200 0"#,
            "1795000000000000 - 1.2.3.4 200 GET /  []",
        ),
        (
            r#"host.example - - [18/Nov/2026:11:06:40 +0000] "GET / HTTP/1.1" 200 0"#,
            "1795000000000000 - - 200 GET /  []",
        ),
        // Escapes of nginx and Apache, and a quote inside a field.
        (
            r#"1.2.3.4 - - [18/Nov/2026:11:06:40 +0000] "GET /\x22\"\\ HTTP/1.1" 200 0 "\"" "a\x1bb""#,
            "1795000000000000 - 1.2.3.4 200 GET /\"\"\\  [\"referer=\\\"\", \"user-agent=a\\u{1b}b\"]",
        ),
        (
            r#"1.2.3.4 - - [18/Nov/2026:11:06:40 +0000] "GET /a b HTTP/1.1" 200 0"#,
            "1795000000000000 - 1.2.3.4 200 GET /a b  []",
        ),
        // Traefik text.
        (
            r#"1.2.3.4 - - [18/Nov/2026:11:06:40 +0000] "GET / HTTP/1.1" 200 5 "-" "-" 12 "web@docker" "http://1.1.1.1:80" 37ms"#,
            "1795000000000000 37000 1.2.3.4 200 GET /  []",
        ),
        // Lines without a request, and malformed lines.
        (
            r#"1.2.3.4 - - [18/Nov/2026:11:06:40 +0000] "\x16\x03\x01" 400 150 "-" "-""#,
            "other",
        ),
        (
            r#"1.2.3.4 - - [18/Nov/2026:11:06:40 +0000] "-" 408 0 "-" "-""#,
            "other",
        ),
        (
            r#"1.2.3.4 - - [18/Nov/2026:11:06:40 +0000] "" 400 0"#,
            "other",
        ),
        (
            r#"1.2.3.4 - - [31/Feb/2026:11:06:40 +0000] "GET / HTTP/1.1" 200 0"#,
            "broken",
        ),
        (
            r#"1.2.3.4 - - [18/Nov/2026:25:06:40 +0000] "GET / HTTP/1.1" 200 0"#,
            "broken",
        ),
        (
            r#"1.2.3.4 - - [18/Nov/2026:11:06:40 +0000] "GET / HTTP/1.1"#,
            "broken",
        ),
        (
            r#"[18/Nov/2026:11:06:40 +0000] "GET / HTTP/1.1" 200 0"#,
            "broken",
        ),
        ("[", "broken"),
    ] {
        assert_parses(AccessLogFormat::Combined, &names, line, expected);
    }
}

#[test]
fn reads_headers_from_mapped_fields() {
    let required = required_fields(
        &["x-user-id", "x-forwarded-for", "user-agent"],
        &[
            ("x-user-id", "remote_user"),
            ("x-forwarded-for", "extra2"),
            ("user-agent", "extra1"),
        ],
    );
    let line = format!(r#"{COMBINED} "other" 9.9.9.9 "more""#);
    let summary = summarize_line(AccessLogFormat::Combined, &required, &line);
    assert!(
        summary.ends_with(r#"["x-user-id=ann", "user-agent=other", "x-forwarded-for=9.9.9.9"]"#),
        "{summary}"
    );
    let line =
        r#"{"time":"2026-11-18T11:06:40Z","method":"GET","path":"/","a.b":{"c":"1"},"d":"2"}"#;
    let required =
        self::required_fields(&["x-user-id"], &[("x-user-id", "a.b.c"), ("x-other", "d")]);
    let summary = summarize_line(AccessLogFormat::Json, &required, line);
    assert!(
        summary.ends_with(r#"["x-other=2", "x-user-id=1"]"#),
        "{summary}"
    );
}

#[test]
fn parses_envoy_text() {
    let line = |forwarded: &str, agent: &str| {
        format!(
            r#"[2026-11-18T11:06:40.250Z] "GET /a?b HTTP/2" 200 - 0 11 37 36 "{forwarded}" "{agent}" "id" "shop:443" "10.0.0.9:80""#
        )
    };
    let names = ["x-forwarded-for", "user-agent"];
    assert_parses(
        AccessLogFormat::Envoy,
        &names,
        &line("6.6.6.6, 1.1.1.1,10.0.0.1", "curl"),
        r#"1795000000250000 37000 10.0.0.1 200 GET /a?b shop:443 ["x-forwarded-for=6.6.6.6, 1.1.1.1", "user-agent=curl"]"#,
    );
    // Envoy escapes nothing.
    assert_parses(
        AccessLogFormat::Envoy,
        &names,
        &line("1.1.1.1", r#"a" "id" "evil" "x" b"#),
        r#"1795000000250000 37000 1.1.1.1 200 GET /a?b shop:443 ["user-agent=a\" \"id\" \"evil\" \"x\" b"]"#,
    );
    assert_parses(
        AccessLogFormat::Envoy,
        &names,
        &line("-", "-"),
        "1795000000250000 37000 - 200 GET /a?b shop:443 []",
    );
    assert_parses(
        AccessLogFormat::Envoy,
        &names,
        "[2026-11-18T11:06:40.250Z] \"GET / HTTP/2\" 200",
        "broken",
    );
}

#[test]
fn parses_json_of_each_format() {
    let names = ["x-user-id", "x-forwarded-for"];
    for (format, line, expected) in [
        (
            AccessLogFormat::Tidegate,
            r#"{"timestamp":"2026-11-18T11:06:40.250000Z","level":"INFO","message":"request","method":"GET","host":"a","path":"/x","client_ip":"1.2.3.4","status":429,"decision":"rejected","head_ms":0.25,"target":"access"}"#,
            "1795000000249750 250 1.2.3.4 429 GET /x a []",
        ),
        (
            AccessLogFormat::Tidegate,
            r#"{"timestamp":"2026-11-18T11:06:40.25Z","message":"listening","target":"tidegate::app"}"#,
            "other",
        ),
        (
            AccessLogFormat::TraefikJson,
            r#"{"ClientHost":"1.2.3.4","Duration":1500000,"DownstreamStatus":200,"RequestHost":"a","RequestMethod":"GET","RequestPath":"/x?y","StartUTC":"2026-11-18T11:06:40.25Z","request_X-User-Id":"ann","time":"2026-11-18T11:06:41Z"}"#,
            r#"1795000000250000 1500 1.2.3.4 200 GET /x?y a ["x-user-id=ann"]"#,
        ),
        (
            AccessLogFormat::Caddy,
            r#"{"level":"info","ts":1795000000.5,"logger":"http.log.access","request":{"remote_ip":"1.2.3.4","method":"GET","host":"a:80","uri":"/x","headers":{"X-User-Id":["ann"],"X-Forwarded-For":["1.1.1.1","2.2.2.2"]}},"duration":0.25,"status":200}"#,
            r#"1795000000250000 250000 1.2.3.4 200 GET /x a:80 ["x-forwarded-for=1.1.1.1", "x-forwarded-for=2.2.2.2", "x-user-id=ann"]"#,
        ),
        (
            AccessLogFormat::EnvoyJson,
            r#"{"start_time":"2026-11-18T11:06:40.250Z","method":"GET","path":"/x","authority":"a","response_code":200,"duration":12,"x_forwarded_for":"1.1.1.1,10.0.0.1"}"#,
            r#"1795000000250000 12000 10.0.0.1 200 GET /x a ["x-forwarded-for=1.1.1.1"]"#,
        ),
        (
            AccessLogFormat::Json,
            r#"{"time_iso8601":"2026-11-18T12:06:40+01:00","remote_addr":"1.2.3.4","request":"GET /x HTTP/1.1","args":"a=1","status":"200","request_time":"0.250","host":"a","http_x_user_id":"ann","http_x_forwarded_for":"-"}"#,
            r#"1795000000000000 250000 1.2.3.4 200 GET /x?a=1 a ["x-user-id=ann"]"#,
        ),
        (
            AccessLogFormat::Json,
            r#"{"msec":"1795000000.250","request_method":"GET","request_uri":"/x","request_time":0.25}"#,
            "1795000000000000 250000 - 0 GET /x  []",
        ),
        (
            AccessLogFormat::Json,
            r#"{"time":"18/Nov/2026:11:06:40 +0000","method":"GET","path":"/x"}"#,
            "1795000000000000 - - 0 GET /x  []",
        ),
        (
            AccessLogFormat::Json,
            r#"{"time":1e300,"method":"GET","path":"/x"}"#,
            "broken",
        ),
        (
            AccessLogFormat::Json,
            r#"{"time":"2026-11-18T11:06:40Z"}"#,
            "broken",
        ),
        (AccessLogFormat::Json, "[]", "broken"),
        (AccessLogFormat::Json, "{", "broken"),
        (AccessLogFormat::Tidegate, "7", "broken"),
    ] {
        assert_parses(format.clone(), &names, line, expected);
        if !["broken", "other"].contains(&expected) {
            assert_eq!(
                AccessLogFormat::detect([line.as_bytes(), b"{}"].into_iter()),
                Some(format),
                "{line}"
            );
        }
    }
    let nested = "[".repeat(100_000);
    assert_parses(AccessLogFormat::Json, &names, &nested, "broken");
}

#[test]
fn detects_the_format_of_most_lines() {
    let lines = [COMBINED, "garbage", "\u{1b}[2J", COMBINED];
    assert_eq!(
        AccessLogFormat::detect(lines.iter().map(|line| line.as_bytes())),
        Some(AccessLogFormat::Combined)
    );
    assert_eq!(
        AccessLogFormat::detect([&b"\xff\xfe"[..], b"hello"].into_iter()),
        None
    );
    assert_eq!(AccessLogFormat::detect(std::iter::empty()), None);
}

#[test]
fn does_not_panic_on_corrupted_lines() {
    let mut random = fastrand::Rng::with_seed(5);
    let alphabet = br#"[]"\ -x0{}:,.GET/+18Nov2026"#;
    for _ in 0..20_000 {
        let mut line = COMBINED.as_bytes().to_vec();
        for _ in 0..random.usize(1..6) {
            let at = random.usize(..line.len());
            match random.u8(..3) {
                0 => line.truncate(at.max(1)),
                1 => line[at] = alphabet[random.usize(..alphabet.len())],
                _ => line[at] = random.u8(..),
            }
        }
        for format in AccessLogFormat::ALL {
            let required = required_fields(&["user-agent", "x-forwarded-for"], &[]);
            drop(LineParser::new(&format, &required).parse_line(&line));
        }
    }
}
