//! Properties of the readers of responses, checked by the tests and by `fuzz/`.

use super::{ReportSource, ResponseReports};
use crate::policy::JsonPointer;
use http::{Response, header};

/// The media types whose bodies are read.
const MEDIA_TYPES: [&str; 3] = [
    "application/json",
    "application/x-ndjson",
    "text/event-stream",
];

/// Checks that a response reports the same, however its body is split. The first byte of `bytes`
/// selects the media type. The second and its successors select the sizes of chunks.
pub(crate) fn check_response_reports(bytes: &[u8]) {
    let [choice, step, body @ ..] = bytes else {
        return;
    };
    let media_type = MEDIA_TYPES.get(usize::from(*choice) % MEDIA_TYPES.len());
    let pointers = ["/usage/total_tokens", "/a", "/0", "/a/0"];
    let pointers = pointers.iter().map(|text| JsonPointer::parse(text));
    let sources = pointers.flatten().map(ReportSource::Json);
    let sources: Vec<ReportSource> = sources.collect();
    let head = Response::builder().header(header::CONTENT_TYPE, *media_type.unwrap_or(&""));
    let Ok(head) = head.body(()) else {
        return;
    };
    let head = head.into_parts().0;
    let read = |chunk_sizes: &mut dyn Iterator<Item = usize>| {
        let mut reports = ResponseReports::from_head(sources.iter(), &head, true);
        let mut rest = body;
        while let (false, Some(size)) = (rest.is_empty(), chunk_sizes.next()) {
            let (chunk, next) = rest.split_at(size.clamp(1, rest.len()));
            reports.read_body_chunk(chunk);
            rest = next;
        }
        let units = |reports: &ResponseReports| -> Vec<_> {
            sources.iter().map(|one| reports.units_at(one)).collect()
        };
        let (so_far, is_between) = (units(&reports), reports.is_between_events());
        reports.finish_body();
        (so_far, is_between, units(&reports))
    };
    let whole = read(&mut std::iter::once(usize::MAX));
    let mut sizes = std::iter::successors(Some(*step), |size| Some(size.wrapping_mul(5) ^ 3));
    let split = read(&mut sizes.by_ref().map(|size| usize::from(size % 16)));
    let by_byte = read(&mut std::iter::repeat(1));
    assert_eq!(split, whole, "{}", body.escape_ascii());
    assert_eq!(by_byte, whole, "{}", body.escape_ascii());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn responses_report_the_same_however_they_are_split(choice in 0..3_u8, step in any::<u8>(), body in r#"([\[\]{},:0-9eE."\\-]|"a":|"usage":|"total_tokens":|\{"a":|\{"usage":\{"total_tokens":|\}\}|[0-9]{1,9}| |data:|event: x|\n|\r|\n\n|\r\n|\x{feff}){0,24}"#) {
            super::check_response_reports(&[&[choice, step], body.as_bytes()].concat());
        }
    }
}
