//! Readings of request bodies, compared with serde_json and a naive parser of forms.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tidegate::policy::properties::assert_body_readings(bytes));
