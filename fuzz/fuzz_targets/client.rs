//! Client addresses from `X-Forwarded-For` and `UpstreamSpan`.
#![no_main]

libfuzzer_sys::fuzz_target!(
    |bytes: &[u8]| tidegate::policy::properties::assert_client_cannot_be_forged(bytes)
);
