//! Paths, against a naive reader.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    tidegate::policy::properties::check_path_interpretations(bytes)
});
