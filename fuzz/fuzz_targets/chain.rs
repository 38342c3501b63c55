//! Chains of proxies in `X-Forwarded-For` and `UpstreamSpan`, written and read.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tidegate::policy::properties::check_proxy_chain(bytes));
