//! JSON Web Tokens, forged and damaged.
#![no_main]

libfuzzer_sys::fuzz_target!(
    |bytes: &[u8]| tidegate::policy::properties::assert_token_verification(bytes)
);
