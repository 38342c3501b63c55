//! The heads of HTTP/2 frames in a stream of bytes.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tidegate::proxy::properties::check_frames(bytes));
