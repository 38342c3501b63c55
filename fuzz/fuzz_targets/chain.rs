//! Proxy chains in `X-Forwarded-For` and `UpstreamSpan`, written and parsed.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tidegate::policy::properties::assert_proxy_chain(bytes));
