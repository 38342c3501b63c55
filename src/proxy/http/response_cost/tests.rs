use super::*;
use crate::policy::{Factor, Weight};
use http::Response;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const TOTAL_TOKENS_SOURCE: &str = "response_json:/usage/total_tokens";

/// Reads one actual cost from one response.
struct CostReader {
    actual: ActualCost,
    reports: ResponseReports,
}

impl CostReader {
    fn new(actual: &str, response: &response::Parts) -> Self {
        let actual = ActualCost::from_source(ReportSource::parse(actual).unwrap(), Weight::ONE);
        let reports = ResponseReports::from_head(actual.sources(), response, false);
        Self { actual, reports }
    }

    fn finish(mut self) -> Option<u64> {
        self.reports.finish_body();
        self.actual
            .reported_units(&[Factor::ONE], |source| self.reports.units_at(source))
    }
}

fn build_cost_reader(actual: &str, fields: &[(&str, &str)]) -> CostReader {
    let response = fields
        .iter()
        .fold(Response::builder(), |response, (name, value)| {
            response.header(*name, *value)
        });
    CostReader::new(actual, &response.body(()).unwrap().into_parts().0)
}

fn build_cost_reader_for_type(actual: &str, media_type: &str) -> CostReader {
    build_cost_reader(actual, &[("content-type", media_type)])
}

fn read_units_from_parts(mut reader: CostReader, parts: &[&[u8]]) -> Option<u64> {
    parts
        .iter()
        .for_each(|part| reader.reports.read_body_chunk(part));
    reader.finish()
}

/// Reads the body at once and byte by byte, and checks that the results are equal.
fn read_units_whole_and_bytewise(actual: &str, media_type: &str, body: &str) -> Option<u64> {
    let whole = read_units_from_parts(
        build_cost_reader_for_type(actual, media_type),
        &[body.as_bytes()],
    );
    let bytes: Vec<&[u8]> = body.as_bytes().chunks(1).collect();
    assert_eq!(
        read_units_from_parts(build_cost_reader_for_type(actual, media_type), &bytes),
        whole,
        "{body}"
    );
    whole
}

fn units_in_json_document(body: &str) -> Option<u64> {
    read_units_whole_and_bytewise(TOTAL_TOKENS_SOURCE, "application/json", body)
}

fn units_in_event_stream(body: &str) -> Option<u64> {
    read_units_whole_and_bytewise(TOTAL_TOKENS_SOURCE, "text/event-stream", body)
}

#[test]
fn reads_a_header_that_is_one_whole_number() {
    let units_from_header =
        |fields: &[(&str, &str)]| build_cost_reader("response_header:X-Units", fields).finish();
    assert_eq!(units_from_header(&[("x-units", "17")]), Some(17));
    assert_eq!(units_from_header(&[("x-units", "0")]), Some(0));
    assert_eq!(
        units_from_header(&[("x-units", "9007199254740992")]),
        Some(1 << 53)
    );
    for value in [
        "",
        "-1",
        "+1",
        "1.0",
        "1e2",
        "1, 1",
        "1;a",
        "x",
        "9007199254740993",
        "18446744073709551617",
    ] {
        assert_eq!(units_from_header(&[("x-units", value)]), None, "{value}");
    }
    assert_eq!(
        units_from_header(&[("x-units", "1"), ("x-units", "1")]),
        None
    );
    assert_eq!(units_from_header(&[("x-other", "1")]), None);
}

#[test]
fn reads_trailers_if_the_head_lacks_the_header() {
    let trailers = HeaderMap::from_iter([("x-units".parse().unwrap(), "23".parse().unwrap())]);
    let units_after_trailers = |fields: &[(&str, &str)]| {
        let mut reader = build_cost_reader("response_header:x-units", fields);
        reader.reports.read_body_chunk(b"17");
        reader.reports.read_trailers(&trailers);
        reader.finish()
    };
    assert_eq!(units_after_trailers(&[]), Some(23));
    assert_eq!(units_after_trailers(&[("x-units", "17")]), Some(17));
    assert_eq!(units_after_trailers(&[("x-units", "many")]), None);
    let mut json = build_cost_reader_for_type(TOTAL_TOKENS_SOURCE, "application/json");
    json.reports.read_trailers(&trailers);
    assert_eq!(json.finish(), None);
}

#[test]
fn reads_only_the_value_at_the_pointer() {
    for (body, units) in [
        (r#"{"usage":{"total_tokens":12}}"#, Some(12)),
        (
            " {\n\t\"usage\" : {\r\n \"total_tokens\" : 12 } } \n",
            Some(12),
        ),
        (
            r#"{"a":[{"usage":{"total_tokens":1}}],"usage":{"x":{"total_tokens":2},"total_tokens":3,"y":[4]},"z":5}"#,
            Some(3),
        ),
        (
            r#"{"usage":{"total_tokens":3},"choices":[{"usage":{"total_tokens":1}},{"total_tokens":2}]}"#,
            Some(3),
        ),
        (
            r#"{"text":"\"usage\":{\"total_tokens\":9}","b":"\\","usage":{"total_tokens":4}}"#,
            Some(4),
        ),
        (r#"{"text":"{\"usage\":{\"total_tokens\":9}}"}"#, None),
        (r#"["usage",{"total_tokens":9}]"#, None),
        (r#"[{"usage":{"total_tokens":9}}]"#, Some(9)),
        (r#"[{"usage":{"total_tokens":9}},{}, {"usage":{}}"#, Some(9)),
        (r#"{"total_tokens":9,"usage":8}"#, None),
        (r#"{"usage":{"total_tokens":{"total_tokens":9}}}"#, None),
        (r#"{"usage":{"total_tokens":[9]}}"#, None),
        (
            r#"{"usage":{"total_token":9,"total_tokens_":9,"total_tokens.":9,"":9}}"#,
            None,
        ),
        (r#"{"usage":{"usage":{"total_tokens":9}}}"#, None),
        // A key matches however it is escaped.
        (r#"{"\u0075s\u0061ge":{"total\u005ftokens":12}}"#, Some(12)),
        (r#"{"usage\u0000":{"total_tokens":12}}"#, None),
        // Of repeated names the last counts, even if its value is not a number.
        (r#"{"usage":{"total_tokens":1,"total_tokens":2}}"#, Some(2)),
        (
            r#"{"usage":{"total_tokens":1},"usage":{"total_tokens":2}}"#,
            Some(2),
        ),
        (r#"{"usage":{"total_tokens":1},"usage":null}"#, None),
        (r#"{"usage":{"total_tokens":1,"total_tokens":"2"}}"#, None),
        // An incomplete document, or more than one document, has no value.
        (r#"{"usage":{"total_tokens":12}"#, None),
        (r#"{"usage":{"total_tokens":12"#, None),
        (r#"{"usage":{"total_tokens":12}}}"#, None),
        (r#"{"usage":{"total_tokens":12}}{}"#, None),
        (r#"{"usage":{"total_tokens":12}]"#, None),
        (r#"{"usage":{"total_tokens" 12}}"#, None),
        (r#"{"usage":{"total_tokens":12,}}"#, None),
        ("{\"a\":\"\n\",\"usage\":{\"total_tokens\":12}}", None),
        ("", None),
        ("12", None),
        ("\u{feff}{\"usage\":{\"total_tokens\":12}}", Some(12)),
        ("\u{feff}\u{feff}{\"usage\":{\"total_tokens\":12}}", None),
    ] {
        assert_eq!(units_in_json_document(body), units, "{body}");
    }
}

#[test]
fn accepts_only_whole_numbers() {
    for (number, units) in [
        ("0", Some(0)),
        ("123.0", Some(123)),
        ("1.23e2", Some(123)),
        ("12300E-2", Some(123)),
        ("9007199254740992", Some(1 << 53)),
    ] {
        assert_eq!(
            units_in_json_document(&format!(r#"{{"usage":{{"total_tokens":{number}}}}}"#)),
            units,
            "{number}"
        );
    }
    let long = format!("1.{}", "0".repeat(100));
    for number in [
        "-1",
        "-0",
        "1.5",
        "9007199254740993",
        "1e30",
        "1e999",
        "\"12\"",
        "null",
        "true",
        "007",
        "1.",
        "+1",
        "0x1",
        "NaN",
        &long,
    ] {
        assert_eq!(
            units_in_json_document(&format!(r#"{{"usage":{{"total_tokens":{number}}}}}"#)),
            None,
            "{number}"
        );
    }
}

#[test]
fn pointers_reach_array_elements_and_escaped_names() {
    let units_at = |pointer: &str, body: &str| {
        read_units_whole_and_bytewise(
            &format!("response_json:{pointer}"),
            "application/json",
            body,
        )
    };
    assert_eq!(units_at("/1/0", "[[1,2],[3,4],[5]]"), Some(3));
    assert_eq!(
        units_at("/a/1/b", r#"{"a":[{"b":1},{"b":2},{"b":3}]}"#),
        Some(2)
    );
    assert_eq!(units_at("/a/0/0", r#"{"a":[[[7],[8]],1]}"#), None);
    assert_eq!(units_at("/2", "[[0,1,2,3],{\"x\":[1]},9]"), Some(9));
    assert_eq!(units_at("/1/1", "[[1,1],[[1,2],5],[6,7]]"), Some(5));
    assert_eq!(units_at("/1", r#"{"1":4}"#), Some(4));
    assert_eq!(units_at("/01", "[3,4]"), None);
    assert_eq!(units_at("/-", "[3,4]"), None);
    assert_eq!(units_at("/", r#"{"":4}"#), Some(4));
    assert_eq!(units_at("/a~1b/~0", r#"{"a/b":{"~":4}}"#), Some(4));
    assert_eq!(units_at("/\u{1f30a}", r#"{"\ud83c\udf0a":4}"#), Some(4));
    assert_eq!(units_at("/\u{1f30a}", r#"{"\ud83c":4}"#), None);
}

#[test]
fn the_last_ndjson_line_with_the_value_is_used() {
    let ndjson_units = |body: &str| {
        read_units_whole_and_bytewise(TOTAL_TOKENS_SOURCE, "application/x-ndjson", body)
    };
    assert_eq!(
        ndjson_units(
            "{\"usage\":{\"total_tokens\":1}}\n{\"usage\":{\"total_tokens\":2}}\r\n\n{}\n"
        ),
        Some(2)
    );
    assert_eq!(
        ndjson_units("{\"usage\":{\"total_tokens\":1}}\n{\"usage\":{\"total_tokens\":2}}"),
        Some(2)
    );
    assert_eq!(
        ndjson_units(
            "oops}\n{\"usage\":{\"total_tokens\":1}}\n{\"usage\":\n{\"total_tokens\":2}}\n"
        ),
        Some(1)
    );
}

#[test]
fn the_last_event_with_the_value_is_used() {
    for end in ["\n", "\r", "\r\n"] {
        let stream = "data: {\"usage\":null}\n\n\
                      event: message\nid: 7\ndata:{\"usage\":{\"total_tokens\":8}}\n\n\
                      : a comment\n\ndata: {\"usage\":\ndata: {\"total_tokens\"\ndata\ndata:: 9}}\nretry: 1\n\n\
                      data: {\"x\":1}\n\ndata: [DONE]\n\n";
        assert_eq!(
            units_in_event_stream(&stream.replace('\n', end)),
            Some(9),
            "{end:?}"
        );
        // Without the second colon, the event's JSON is invalid, so an earlier event's value is
        // used.
        assert_eq!(
            units_in_event_stream(&stream.replace("::", ":").replace('\n', end)),
            Some(8),
            "{end:?}"
        );
    }
}

#[test]
fn data_lines_of_one_event_form_one_document() {
    assert_eq!(
        units_in_event_stream("data: {\"usage\":{\"total_tokens\":1\ndata:2}}\n\n"),
        None
    );
    assert_eq!(
        units_in_event_stream("data: {\"usage\":{\"total_tokens\":1}}\ndata: {}\n\n"),
        None
    );
    assert_eq!(
        units_in_event_stream("data: {\"usage\":\n\ndata: {\"total_tokens\":1}}\n\n"),
        None
    );
    assert_eq!(
        units_in_event_stream(
            "data: {\"usage\":\ndat: 1\nxdata: 2\ndatas: 3\n: {\ndata: {\"total_tokens\":1}}\n\n"
        ),
        Some(1)
    );
    assert_eq!(
        units_in_event_stream("{\"usage\":{\"total_tokens\":1}}\n\n"),
        None
    );
    assert_eq!(
        units_in_event_stream(" data: {\"usage\":{\"total_tokens\":1}}\n\n"),
        None
    );
    assert_eq!(
        units_in_event_stream("\u{feff}data: {\"usage\":{\"total_tokens\":1}}\n\n"),
        Some(1)
    );
    // The end of the body also ends the last event, without an empty line.
    assert_eq!(
        units_in_event_stream("data: {\"usage\":{\"total_tokens\":1}}"),
        Some(1)
    );
}

#[test]
fn ignores_bodies_of_other_types_encoded_or_partial() {
    let body = br#"{"usage":{"total_tokens":12}}"#;
    let units_from_body = |fields: &[(&str, &str)]| {
        read_units_from_parts(build_cost_reader(TOTAL_TOKENS_SOURCE, fields), &[body])
    };
    for media_type in [
        "application/json",
        "Application/JSON; charset=utf-8",
        "application/problem+json",
        "application/x-ndjson",
    ] {
        assert_eq!(
            units_from_body(&[("content-type", media_type)]),
            Some(12),
            "{media_type}"
        );
        assert_eq!(
            units_from_body(&[
                ("content-type", media_type),
                ("content-encoding", "Identity")
            ]),
            Some(12)
        );
        for coding in ["gzip", "br", "identity, gzip", "", "x"] {
            assert_eq!(
                units_from_body(&[("content-type", media_type), ("content-encoding", coding)]),
                None,
                "{coding}"
            );
        }
    }
    for media_type in [
        "text/html",
        "text/event-stream",
        "application/jsonx",
        "json",
        "",
    ] {
        assert_eq!(
            units_from_body(&[("content-type", media_type)]),
            None,
            "{media_type}"
        );
    }
    assert_eq!(units_from_body(&[]), None);
    let part = Response::builder()
        .status(206)
        .header("content-type", "application/json")
        .body(())
        .unwrap();
    assert_eq!(
        read_units_from_parts(
            CostReader::new(TOTAL_TOKENS_SOURCE, &part.into_parts().0),
            &[body]
        ),
        None
    );
}

/// The test's time limit allows for a debug build on a busy machine; quadratic work would take
/// hours.
#[test]
fn hostile_bodies_take_bounded_memory_and_linear_time() {
    const BODY_BYTES: usize = 10 << 20;
    let began = Instant::now();
    let text = format!("{{\"{}", "a\\\"".repeat(BODY_BYTES / 3));
    for (media_type, body) in [
        ("application/json", "{".repeat(BODY_BYTES)),
        ("application/json", "[".repeat(BODY_BYTES)),
        ("application/json", r#"{"usage":"#.repeat(BODY_BYTES / 9)),
        (
            "application/json",
            format!("{{\"usage\":{{\"total_tokens\":{}", "1".repeat(BODY_BYTES)),
        ),
        (
            "application/json",
            format!("{{\"usage\":[{}", "0,".repeat(BODY_BYTES / 2)),
        ),
        ("application/json", text),
        ("text/event-stream", "data:".repeat(BODY_BYTES / 5)),
        ("text/event-stream", "data:{\n".repeat(BODY_BYTES / 7)),
        ("text/event-stream", "\r\r\n".repeat(BODY_BYTES / 3)),
        ("application/x-ndjson", "{\n".repeat(BODY_BYTES / 2)),
    ] {
        let mut reader = build_cost_reader_for_type(TOTAL_TOKENS_SOURCE, media_type);
        for part in body.as_bytes().chunks(16 << 10) {
            reader.reports.read_body_chunk(part);
            let body_reader = reader.reports.body.as_ref().unwrap();
            assert!(
                body_reader.numbers[0].scanner.buffer_capacity() <= 1024,
                "{media_type} {:.40}",
                body
            );
        }
        assert_eq!(reader.finish(), None);
    }
    assert!(
        began.elapsed() < Duration::from_secs(30),
        "{:?}",
        began.elapsed()
    );
}

#[test]
fn finds_the_number_after_strings_of_any_size() {
    let text = "x\\n\"usage\":".repeat(1 << 17).replace('"', "\\\"");
    let body = format!(r#"{{"text":"{text}","usage":{{"total_tokens":77}},"more":"{text}"}}"#);
    assert!(body.len() > 2 << 20);
    let parts: Vec<&[u8]> = body.as_bytes().chunks(4093).collect();
    assert_eq!(
        read_units_from_parts(
            build_cost_reader_for_type(TOTAL_TOKENS_SOURCE, "application/json"),
            &parts
        ),
        Some(77)
    );
}

/// Generates JSON documents. Their names have few letters, so that a pointer often matches.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        4 => (0..200_u32).prop_map(|number| json!(number)),
        1 => "[ab\"\\\\{}\\[\\]:,\u{e9}\u{1f30a}]{0,6}".prop_map(Value::String),
        1 => Just(Value::Null),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        let name = prop_oneof![3 => "[ab01]", 1 => "[ab\"\\\\/~\u{e9}\u{1f30a}\n]{0,2}"];
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::Array),
            prop::collection::vec((name, inner), 0..4)
                .prop_map(|entries| Value::Object(entries.into_iter().collect())),
        ]
    })
}

/// Collects the JSON pointers of all values in a document, except the root.
fn collect_pointers(value: &Value, at: &str, places: &mut Vec<String>) {
    let entries: Vec<(String, &Value)> = match value {
        Value::Array(items) => items
            .iter()
            .enumerate()
            .map(|(at, item)| (at.to_string(), item))
            .collect(),
        Value::Object(entries) => entries
            .iter()
            .map(|(name, item)| (name.clone(), item))
            .collect(),
        _ => return,
    };
    for (name, item) in entries {
        let place = format!("{at}/{}", name.replace('~', "~0").replace('/', "~1"));
        self::collect_pointers(item, &place, places);
        places.push(place);
    }
}

/// The number at a pointer: of a list whose items have names, in the last one that has it.
fn number_at(document: &Value, pointer: &str) -> Option<u64> {
    let first = pointer.split('/').nth(1).unwrap();
    let is_index = first == "0" || first.parse::<u64>().is_ok() && !first.starts_with('0');
    let number = |document: &Value| document.pointer(pointer).and_then(Value::as_u64);
    match document {
        Value::Array(items) if !is_index => items.iter().rev().find_map(number),
        document => number(document),
    }
}

/// Escapes every non-ASCII character, and the letter `a`.
fn escape_a_and_non_ascii(text: &str) -> String {
    let mut units = [0; 2];
    text.chars()
        .flat_map(|c| match c {
            'a' | '\u{80}'.. => c
                .encode_utf16(&mut units)
                .iter()
                .map(|unit| format!("\\u{unit:04x}"))
                .collect::<Vec<_>>(),
            c => vec![c.to_string()],
        })
        .collect()
}

proptest! {
    /// Compares the scanner with a full JSON parser, for every pointer into a document and some
    /// others.
    #[test]
    fn scanner_agrees_with_a_full_parser(
        documents in prop::collection::vec(any_json(), 1..4),
        pretty in any::<bool>(),
        escape in any::<bool>(),
        size in 1..40_usize,
    ) {
        let mut pointers = vec!["/a".to_owned(), "/b/0".to_owned(), "/0/a/b".to_owned()];
        documents.iter().for_each(|document| collect_pointers(document, "", &mut pointers));
        let write = |document: &Value| {
            let text = if pretty { format!("{document:#}") } else { document.to_string() };
            // Texts with a backslash are not escaped, because escaping an `a` inside `\u` breaks
            // them.
            if escape && !text.contains('\\') { escape_a_and_non_ascii(&text) } else { text }
        };
        let texts: Vec<String> = documents.iter().map(write).collect();
        let stream: String = texts.iter().map(|text| format!("data: {}\n\n", text.replace('\n', "\ndata:"))).collect();
        for pointer in pointers {
            let whole = format!("response_json:{pointer}");
            let expected: Vec<_> = documents.iter().map(|document| number_at(document, &pointer)).collect();
            for (text, expected) in texts.iter().zip(&expected) {
                let parts: Vec<&[u8]> = text.as_bytes().chunks(size).collect();
                prop_assert_eq!(read_units_from_parts(build_cost_reader_for_type(&whole, "application/json"), &parts), *expected, "{} in {}", pointer, text);
            }
            let parts: Vec<&[u8]> = stream.as_bytes().chunks(size).collect();
            let last = expected.into_iter().flatten().last();
            prop_assert_eq!(read_units_from_parts(build_cost_reader_for_type(&whole, "text/event-stream"), &parts), last, "{} in {}", pointer, stream);
        }
    }

    /// The scanner never panics, and finds the same number as a strict parser if that accepts the
    /// text.
    #[test]
    fn scanner_never_contradicts_a_strict_parser(
        document in any_json(),
        at in any::<prop::sample::Index>(),
        with in prop::sample::select(b"{}[]\",:\\0a \n".to_vec()),
    ) {
        let mut bytes = document.to_string().into_bytes();
        let at = at.index(bytes.len());
        bytes[at] = with;
        let strict = serde_json::from_slice::<Value>(&bytes);
        for pointer in ["/a", "/0", "/a/0", "/0/b"] {
            let found = read_units_from_parts(build_cost_reader_for_type(&format!("response_json:{pointer}"), "application/json"), &[&bytes]);
            if let Ok(document) = &strict {
                prop_assert_eq!(found, number_at(document, pointer));
            }
        }
    }
}
