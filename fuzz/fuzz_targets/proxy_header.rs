//! PROXY headers, versions 1 and 2.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tidegate::proxy::properties::assert_proxy_protocol_header(bytes));
