//! HTTP/2 frame headers in a byte stream.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tidegate::proxy::properties::check_frame_counting(bytes));
