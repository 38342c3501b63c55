//! Configuration files.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tidegate::config::properties::check_any_text(bytes));
