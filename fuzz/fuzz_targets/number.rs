//! The number in a JSON document, against serde_json.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tidegate::proxy::properties::check_json_number(bytes));
