//! The amount of a limit: a number, or where the request states it.

use super::context::{ClaimTrust, PolicyContext};
use super::match_conditions::NO_TRUSTED_TOKENS_ERROR;
use crate::config::table_reader::TableReader;
use crate::policy::{AmountSource, KeyPart};

/// The amount of a limit.
pub(super) struct LimitAmount {
    /// `requests`, or `default` beside `requests_from`.
    pub(super) requests: u64,
    pub(super) source: Option<Box<AmountSource>>,
}

impl LimitAmount {
    /// The largest amount of a request.
    pub(super) fn max(&self) -> u64 {
        self.source
            .as_ref()
            .map_or(self.requests, |source| source.max)
    }
}

/// Reads `requests`, or `requests_from` with its `default` and `max`.
pub(super) fn read_amount(
    reader: &TableReader<'_>,
    context: &PolicyContext,
) -> Option<LimitAmount> {
    if !reader.contains_key("requests_from") {
        for key in ["default", "max"] {
            if reader.contains_key(key) {
                reader.report_error(
                    key,
                    "needs requests_from; expected requests_from, or no such key",
                );
            }
        }
        if !reader.contains_key("requests") {
            reader.report_error(
                "requests",
                "missing; expected a whole number, or requests_from with default and max",
            );
            return None;
        }
        let requests = reader.read("requests")?;
        return Some(LimitAmount {
            requests,
            source: None,
        });
    }
    if reader.contains_key("requests") {
        reader.report_error(
            "requests",
            "not beside requests_from; expected default, the amount of a request that states none",
        );
    }
    let field = reader.get_parsed("requests_from", AmountSource::parse_field);
    if let Some(field) = &field {
        reject_untrusted_field(reader, context, field);
    }
    let read_bound = |key: &str, meaning: &str| {
        if !reader.contains_key(key) {
            reader.report_error(
                key,
                &format!("missing; expected {meaning} beside requests_from"),
            );
        }
        reader.read::<u64>(key)
    };
    let default = read_bound("default", "the amount of a request that states none");
    let max = read_bound("max", "the largest amount that a request may state");
    if let (Some(default), Some(max)) = (default, max)
        && default > max
    {
        reader.report_error("default", &format!("more than max; expected at most {max}"));
    }
    Some(LimitAmount {
        requests: default?,
        source: Some(Box::new(AmountSource {
            field: field?,
            max: max?,
            sets_burst: !reader.contains_key("burst"),
        })),
    })
}

/// Reports a field that a client could write.
fn reject_untrusted_field(reader: &TableReader<'_>, context: &PolicyContext, field: &KeyPart) {
    let key = "requests_from";
    match (field, context.claim_trust) {
        (KeyPart::Claim(_), None) => {
            reader.report_error(key, NO_TRUSTED_TOKENS_ERROR);
        }
        (KeyPart::Claim(_), Some(ClaimTrust::Unverified)) => {
            reader.report_error(
                key,
                "with client.jwt.verify = false, each client writes its own amount; expected verified tokens",
            );
        }
        (KeyPart::Claim(_), Some(ClaimTrust::Signed)) => {}
        (KeyPart::Header(name), _) if context.client.trusted_proxies.is_empty() => {
            reader.report_error(
                key,
                &format!("no proxy is trusted to send {name}; expected client.trusted_proxies with the networks of the gateway in front"),
            );
        }
        (KeyPart::Header(name), _) if context.is_removed_header(name) => {
            reader.report_error(
                key,
                &format!("{name} is never present: tidegate removes it before policies see it; expected another header"),
            );
        }
        (KeyPart::Header(name), _) => {
            if !context.trusted_headers.contains(name) {
                reader.report_warning(
                    key,
                    &format!("a client that sends {name} through the trusted proxy states its own amount; expected client.trusted_headers = [\"{name}\"] if the proxy sets or removes this header"),
                );
            }
        }
        _ => {
            if !context.requests_client_certificates {
                reader.report_error(
                    key,
                    "the listener requests no client certificates; expected listen.tls.client_auth = \"optional\" or \"require\"",
                );
            }
        }
    }
}

/// Reports options of a limit that need one amount for all requests.
pub(super) fn reject_options_with_one_amount(reader: &TableReader<'_>, counts_slots: bool) {
    if counts_slots {
        reader.report_error("requests_from", "not with algorithm = \"concurrency\", whose slots need a fixed amount; expected requests");
    }
    if reader.contains_key("warm_up") {
        reader.report_error("warm_up", "not with requests_from: a third of a small amount may be less than the cost of a request; expected no warm_up");
    }
}
