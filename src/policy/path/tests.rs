//! Unit tests of path readings.

use super::*;

const DEFAULT_SETTINGS: Settings = Settings::DEFAULT;

fn interpret(path: &str, settings: Settings) -> Vec<String> {
    PathInterpretations::parse(path, &settings)
        .unwrap()
        .iter()
        .map(str::to_owned)
        .collect()
}

#[test]
fn trap_24_equivalent_path_spellings_normalize_equally() {
    for path in [
        "/api/login",
        "/api/login/",
        "//api///login",
        "/./api/./login",
        "/api/x/../login",
        "/api/%2e%2E/api/login",
        "/../../api/login",
        "/%61pi/l%6Fgin",
        "/api;x=1/login;jsessionid=2",
        "/api/login/.",
        "/api/login/x/..",
    ] {
        assert_eq!(interpret(path, DEFAULT_SETTINGS)[0], "/api/login", "{path}");
    }
}

#[test]
fn an_escaped_slash_has_both_interpretations() {
    assert_eq!(interpret("/a%2Fb", DEFAULT_SETTINGS), ["/a/b", "/a%2Fb"]);
    assert_eq!(interpret("/a%5cb", DEFAULT_SETTINGS), ["/a/b", "/a%5Cb"]);
    assert_eq!(interpret("/a\\b", DEFAULT_SETTINGS), ["/a/b", "/a%5Cb"]);
    assert_eq!(
        interpret("/public/..%2fapi", DEFAULT_SETTINGS),
        ["/api", "/public/../api", "/public/..%2Fapi"]
    );
    assert_eq!(
        interpret(
            "/a%2Fb",
            Settings {
                escaped_slashes: EscapedSlashes::Decode,
                ..DEFAULT_SETTINGS
            }
        ),
        ["/a/b"]
    );
    assert_eq!(
        interpret(
            "/a%2fb",
            Settings {
                escaped_slashes: EscapedSlashes::Keep,
                ..DEFAULT_SETTINGS
            }
        ),
        ["/a%2Fb"]
    );
    let rejected = PathInterpretations::parse(
        "/a%2fb",
        &Settings {
            escaped_slashes: EscapedSlashes::Reject,
            ..DEFAULT_SETTINGS
        },
    );
    assert_eq!(rejected, Err(PathError::EscapedSlash));
}

#[test]
fn ambiguous_paths_have_every_interpretation() {
    assert_eq!(interpret("/a/../b", DEFAULT_SETTINGS), ["/b", "/a/../b"]);
    assert_eq!(interpret("/a/./b", DEFAULT_SETTINGS), ["/a/b", "/a/./b"]);
    assert_eq!(
        interpret("/a/..;x/b", DEFAULT_SETTINGS),
        ["/b", "/a/..%3Bx/b", "/a/../b", "/", "/a/.."]
    );
    assert_eq!(
        interpret("/a/.;x/b", DEFAULT_SETTINGS),
        ["/a/b", "/a/.%3Bx/b", "/a/./b", "/a", "/a/."]
    );
    assert_eq!(
        interpret("/a//../b", DEFAULT_SETTINGS),
        ["/b", "/a/b", "/a/../b"]
    );
    assert_eq!(
        interpret("/a//b;x/c", DEFAULT_SETTINGS),
        ["/a/b/c", "/a/b%3Bx/c", "/a/b"]
    );
    assert_eq!(interpret("/a/;x", DEFAULT_SETTINGS), ["/a", "/a/%3Bx"]);
    // Some routers start the query at a semicolon.
    assert_eq!(
        interpret("/a;x/b", DEFAULT_SETTINGS),
        ["/a/b", "/a%3Bx/b", "/a"]
    );
    assert_eq!(
        interpret(
            "/a//../b",
            Settings {
                merge_slashes: false,
                ..DEFAULT_SETTINGS
            }
        ),
        ["/a/b", "/a//../b"]
    );
    let kept = Settings {
        strip_parameters: false,
        ..DEFAULT_SETTINGS
    };
    assert_eq!(interpret("/a/..;x/b", kept), ["/a/..;x/b"]);
    // Escaped slashes and backslashes separate independently of each other.
    assert_eq!(
        interpret("/a%2Fb%5C..", DEFAULT_SETTINGS),
        [
            "/a",
            "/a/b/..",
            "/a/b%5C..",
            "/",
            "/a%2Fb/..",
            "/a%2Fb%5C.."
        ]
    );
}

#[test]
fn a_leading_host_is_read_as_part_of_the_path_and_as_none() {
    for (path, readings) in [
        ("//host/login", &["/host/login", "/login"][..]),
        ("//host", &["/host", "/"]),
        ("//user@host:80/login", &["/user@host:80/login", "/login"]),
        ("///host/login", &["/host/login", "/login"]),
        // The whole path is the authority in RFC 3986, but WHATWG parsers end it at the backslash.
        (
            "//host\\login",
            &["/host/login", "/host%5Clogin", "/login", "/"],
        ),
        (
            "/\\host/login",
            &["/host/login", "/%5Chost/login", "/login"],
        ),
        ("//a/../b", &["/b", "/a/../b", "/../b"]),
        ("/%2Fhost/login", &["/host/login", "/%2Fhost/login"]),
    ] {
        assert_eq!(interpret(path, DEFAULT_SETTINGS), readings, "{path}");
    }
    let ignore = Settings {
        reads_authority: false,
        ..DEFAULT_SETTINGS
    };
    assert_eq!(interpret("//host/login", ignore), ["/host/login"]);
    let unmerged = Settings {
        merge_slashes: false,
        ..DEFAULT_SETTINGS
    };
    assert_eq!(
        interpret("///host/login", unmerged),
        ["///host/login", "/login", "/host/login"]
    );
}

#[test]
fn an_escaped_delimiter_may_end_the_path() {
    assert_eq!(
        interpret("/login%3Fx", DEFAULT_SETTINGS),
        ["/login?x", "/login"]
    );
    assert_eq!(
        interpret("/login%23x%3fy", DEFAULT_SETTINGS),
        ["/login#x?y", "/login#x", "/login"]
    );
    let with = |escaped_delimiters| Settings {
        escaped_delimiters,
        ..DEFAULT_SETTINGS
    };
    assert_eq!(
        interpret("/login%3Fx", with(EscapedDelimiters::Keep)),
        ["/login?x"]
    );
    for path in ["/login%3fx", "/login%23"] {
        assert_eq!(
            PathInterpretations::parse(path, &with(EscapedDelimiters::Reject)),
            Err(PathError::EscapedDelimiter)
        );
    }
}

#[test]
fn rejects_control_characters_and_invalid_utf8() {
    for path in ["/a%0A", "/a%0d", "/%01", "/a%1Fb", "/a%7f", "/a\u{7f}"] {
        assert_eq!(
            PathInterpretations::parse(path, &DEFAULT_SETTINGS),
            Err(PathError::ControlCharacter),
            "{path}"
        );
    }
    for path in ["/a%80", "/%FF", "/%c3x", "/a%c0%af", "/%ed%a0%80"] {
        assert_eq!(
            PathInterpretations::parse(path, &DEFAULT_SETTINGS),
            Err(PathError::InvalidUtf8),
            "{path}"
        );
    }
    for path in ["/al%6%39ce", "/%%36%31", "/a%%361"] {
        assert_eq!(
            PathInterpretations::parse(path, &DEFAULT_SETTINGS),
            Err(PathError::CompletedEscape),
            "{path}"
        );
    }
    for path in ["/100%", "/%6", "/a%6x%39", "/%2561", "/%%20"] {
        assert!(PathInterpretations::parse(path, &DEFAULT_SETTINGS).is_ok());
    }
    let lenient = Settings {
        rejects_control_characters: false,
        rejects_invalid_utf8: false,
        ..DEFAULT_SETTINGS
    };
    assert_eq!(interpret("/a%0a%ff", lenient), ["/a%0A%FF"]);
}

/// Python's `http.server` splits the request line at the spaces of Latin-1.
#[test]
fn a_path_may_end_at_a_byte_that_is_a_space_in_latin_1() {
    let readings = interpret("/login\u{2005}", DEFAULT_SETTINGS);
    assert!(readings.contains(&"/login".to_owned()), "{readings:?}");
    let readings = interpret("/login\u{a0}x", DEFAULT_SETTINGS);
    assert!(readings.contains(&"/login".to_owned()), "{readings:?}");
    for path in ["/login%E2%80%85", "/caf\u{e9}"] {
        assert_eq!(interpret(path, DEFAULT_SETTINGS).len(), 1, "{path}");
    }
}

#[test]
fn the_work_for_a_hostile_path_is_bounded() {
    let hostile = format!("/{}", "%2f%5c;./".repeat(6600));
    assert_eq!(
        PathInterpretations::parse(&hostile, &DEFAULT_SETTINGS),
        Err(PathError::TooManyReadings)
    );
    let long = format!("/{}", "a%20".repeat(15_000));
    assert_eq!(interpret(&long, DEFAULT_SETTINGS), [long]);
    let strict = Settings {
        max_readings_size: 0,
        ..DEFAULT_SETTINGS
    };
    assert_eq!(interpret("/a%20/", strict), ["/a%20"]);
    assert_eq!(
        PathInterpretations::parse("/a/./b", &strict),
        Err(PathError::TooManyReadings)
    );
}

#[test]
fn a_double_escape_of_a_path_character_is_noticed() {
    for path in [
        "/%252e",
        "/a%252Fb",
        "/a%255cb",
        "/%2525",
        "/%%32%65",
        "/%25%32e",
        "/%2%35c%255C",
    ] {
        let readings = PathInterpretations::parse(path, &DEFAULT_SETTINGS).unwrap();
        assert!(readings.has_nested_escape, "{path}");
    }
    for path in ["/a", "/%2e", "/%2541", "/%25", "/100%25"] {
        let readings = PathInterpretations::parse(path, &DEFAULT_SETTINGS).unwrap();
        assert!(!readings.has_nested_escape, "{path}");
    }
}

#[test]
fn the_forwarded_path_is_the_matched_one() {
    let settings = Settings {
        forward: ForwardedPath::Normalized,
        ..DEFAULT_SETTINGS
    };
    for (path, forwarded, readings) in [
        ("/a/../b", "/b", &["/b"][..]),
        ("//host/login", "/host/login", &["/host/login"]),
        ("/%61/%2e%2e/b%2F", "/b%2F", &["/b", "/b%2F"]),
        ("/a%2fb", "/a%2Fb", &["/a/b", "/a%2Fb"]),
        ("/a\\b", "/a%5Cb", &["/a/b", "/a%5Cb"]),
        ("/a//b/./", "/a/b/", &["/a/b"]),
        ("/a/..", "/", &["/"]),
        (
            "/%7Ea%40%c3%a9\"<>",
            "/~a%40%C3%A9%22%3C%3E",
            &["/~a@%C3%A9\"<>"],
        ),
        ("/a;x/..", "/", &["/"]),
        ("/100%", "/100%25", &["/100%25"]),
    ] {
        let normalized = normalize_forwarded_path(path, &settings);
        assert_eq!(normalized.as_deref(), Some(forwarded));
        assert_eq!(interpret(path, settings), readings, "{path}");
        assert_eq!(
            normalize_forwarded_path(forwarded, &settings),
            None,
            "{forwarded}"
        );
    }
    let decode = Settings {
        escaped_slashes: EscapedSlashes::Decode,
        ..settings
    };
    assert_eq!(
        normalize_forwarded_path("/a%2f..%5cb", &decode).as_deref(),
        Some("/b")
    );
    assert_eq!(normalize_forwarded_path("/A/b;x/", &settings), None);
}

#[test]
fn a_path_is_decoded_exactly_once() {
    assert_eq!(
        interpret("/%252e%252e/a", DEFAULT_SETTINGS),
        ["/%252e%252e/a"]
    );
    assert_eq!(interpret("/a%zz", DEFAULT_SETTINGS), ["/a%25zz"]);
    assert_eq!(interpret("/%c3%a9", DEFAULT_SETTINGS), ["/%C3%A9"]);
    assert_eq!(interpret("/é", DEFAULT_SETTINGS), ["/%C3%A9"]);
    assert_eq!(interpret("/a%3Bb", DEFAULT_SETTINGS), ["/a%3Bb"]);
}

#[test]
fn each_setting_has_its_documented_effect() {
    let off = Settings {
        normalize: false,
        ..DEFAULT_SETTINGS
    };
    assert_eq!(interpret("/A//b/../%61/", off), ["/A//b/../%61/"]);
    assert_eq!(
        interpret(
            "/a//b",
            Settings {
                merge_slashes: false,
                ..DEFAULT_SETTINGS
            }
        ),
        ["/a//b"]
    );
    assert_eq!(
        interpret(
            "/a/b/",
            Settings {
                ignore_trailing_slash: false,
                ..DEFAULT_SETTINGS
            }
        ),
        ["/a/b/"]
    );
    assert_eq!(
        interpret(
            "/a/b/..",
            Settings {
                ignore_trailing_slash: false,
                ..DEFAULT_SETTINGS
            }
        ),
        ["/a/", "/a/b/.."]
    );
    assert_eq!(
        interpret(
            "/a;x/b",
            Settings {
                strip_parameters: false,
                ..DEFAULT_SETTINGS
            }
        ),
        ["/a;x/b"]
    );
    assert_eq!(
        interpret(
            "/a%3bx",
            Settings {
                strip_parameters: false,
                ..DEFAULT_SETTINGS
            }
        ),
        ["/a;x"]
    );
    assert_eq!(
        interpret(
            "/API",
            Settings {
                case_sensitive: false,
                ..DEFAULT_SETTINGS
            }
        ),
        ["/api"]
    );
}

#[test]
fn rejects_invalid_paths() {
    assert_eq!(
        PathInterpretations::parse("/a%00b", &DEFAULT_SETTINGS),
        Err(PathError::Nul)
    );
    assert_eq!(
        PathInterpretations::parse("foo", &DEFAULT_SETTINGS),
        Err(PathError::NotAbsolute)
    );
    assert_eq!(
        PathInterpretations::parse("", &DEFAULT_SETTINGS),
        Err(PathError::NotAbsolute)
    );
    assert_eq!(interpret("*", DEFAULT_SETTINGS), ["/"]);
    assert_eq!(interpret("/", DEFAULT_SETTINGS), ["/"]);
    assert_eq!(interpret("//", DEFAULT_SETTINGS), ["/"]);
}

proptest::proptest! {
    #[test]
    fn normalization_is_idempotent(path in "/[a-b%.;/\\\\2fF5cC0-9A]{0,24}") {
        let settings = Settings { escaped_slashes: EscapedSlashes::Decode, ..DEFAULT_SETTINGS };
        if let Ok(first) = PathInterpretations::parse(&path, &settings) {
            for reading in first.iter() {
                let again = PathInterpretations::parse(reading, &settings).unwrap();
                proptest::prop_assert!(again.iter().any(|same| same == reading), "{} {:?}", reading, again);
                proptest::prop_assert!(!reading.contains("//"));
            }
        }
    }
}
