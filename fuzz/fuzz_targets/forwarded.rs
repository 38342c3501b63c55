//! Request validation and the forwarded request.
#![no_main]

use libfuzzer_sys::fuzz_target;
use std::sync::{Arc, LazyLock};
use tidegate::policy::PolicyTable;

const POLICIES: &str = "
[client]
trusted_proxies = ['10.0.0.0/8']
[[policy]]
name = 'p'
match = { headers = { x-tier = 'gold' } }
key = ['client_ip', 'header:x-user-id', 'cookie:c', 'host']
limit = { requests = 1, per = '1s' }
cost = { header = 'x-cost' }
";

static POLICY_TABLE: LazyLock<Arc<PolicyTable>> = LazyLock::new(|| {
    tidegate::config::properties::load_text(POLICIES)
        .expect("it is right")
        .policy_table
});

fuzz_target!(
    |bytes: &[u8]| tidegate::proxy::properties::assert_forwarded_request(bytes, &POLICY_TABLE)
);
