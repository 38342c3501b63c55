//! Encoding of keys.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tidegate::policy::properties::assert_key_encoding(bytes));
