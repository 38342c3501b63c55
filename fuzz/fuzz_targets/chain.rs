//! Chains of proxies in `X-Forwarded-For` and `Forwarded`, written and read.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tidegate::policy::properties::chain(bytes));
