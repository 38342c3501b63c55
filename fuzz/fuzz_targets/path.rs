//! Path parsing, compared with a naive implementation.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    tidegate::policy::properties::assert_path_interpretations(bytes)
});
