//! Configuration files.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tidegate::config::properties::assert_two_loads_are_equal(bytes));
