//! Extraction of a number from a JSON document, compared with serde_json.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tidegate::proxy::properties::check_json_number_scan(bytes));
