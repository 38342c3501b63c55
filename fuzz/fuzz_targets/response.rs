//! Reports of responses, in chunks and at once.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tidegate::proxy::properties::check_response_reports(bytes));
