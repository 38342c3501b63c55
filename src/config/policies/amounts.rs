//! The amount of a limit: a number, or where the request states it.

use super::context::{ClaimTrust, PolicyContext};
use super::match_conditions::NO_TRUSTED_TOKENS_ERROR;
use crate::config::table_reader::{TableReader, report};
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
        let source = self.source.as_ref();
        source.map_or(self.requests, |source| source.max)
    }
}

/// Reads `requests`, or `requests_from` with its `default` and `max`.
pub(super) fn read_amount(
    reader: &TableReader<'_>,
    context: &PolicyContext,
) -> Option<LimitAmount> {
    let has = |key: &str| reader.contains_key(key);
    let is_requested = has("requests_from");
    report! { reader;
        Error("default") if has("default") && !is_requested => "needs requests_from; expected requests_from, or no such key";
        Error("max") if has("max") && !is_requested => "needs requests_from; expected requests_from, or no such key";
        Error("requests") if !has("requests") && !is_requested => "missing; expected a whole number, or requests_from with default and max";
        Error("requests") if has("requests") && is_requested => "not beside requests_from; expected default, the amount of a request that states none";
        Error("default") if !has("default") && is_requested => "missing; expected the amount of a request that states none beside requests_from";
        Error("max") if !has("max") && is_requested => "missing; expected the largest amount that a request may state beside requests_from";
    }
    if !is_requested {
        return Some(LimitAmount {
            requests: reader.read("requests")?,
            source: None,
        });
    }
    let field = reader.get_parsed("requests_from", AmountSource::parse_field);
    if let Some(field) = &field {
        reject_untrusted_field(reader, context, field);
    }
    let (default, max) = (reader.read("default"), reader.read("max"));
    if let (Some(default), Some(max)) = (default, max) {
        report! { reader;
            Error("default") if default > max => "more than max; expected at most {max}";
        }
    }
    Some(LimitAmount {
        requests: default?,
        source: Some(Box::new(AmountSource {
            field: field?,
            max: max?,
            sets_burst: !has("burst"),
        })),
    })
}

/// Reports a field that a client could write.
fn reject_untrusted_field(reader: &TableReader<'_>, context: &PolicyContext, field: &KeyPart) {
    let key = "requests_from";
    match field {
        KeyPart::Claim(_) => report! { reader;
            Error(key) if context.claim_trust.is_none() => "{NO_TRUSTED_TOKENS_ERROR}";
            Error(key) if context.claim_trust == Some(ClaimTrust::Unverified) => "with client.jwt.verify = false, each client writes its own amount; expected verified tokens";
        },
        KeyPart::Header(name) => {
            let has_proxy = !context.client.trusted_proxies.is_empty();
            let is_removed = context.is_removed_header(name);
            let is_trusted = context.trusted_headers.contains(name);
            report! { reader;
                Error(key) if !has_proxy => "no proxy is trusted to send {name}; expected client.trusted_proxies with the networks of the gateway in front";
                Error(key) if has_proxy && is_removed => "{name} is never present: tidegate removes it before policies see it; expected another header";
                Warning(key) if has_proxy && !is_removed && !is_trusted => "a client that sends {name} through the trusted proxy states its own amount; expected client.trusted_headers = [\"{name}\"] if the proxy sets or removes this header";
            }
        }
        _ => report! { reader;
            Error(key) if !context.requests_client_certificates => "the listener requests no client certificates; expected listen.tls.client_auth = \"optional\" or \"require\"";
        },
    }
}

/// Reports options of a limit that need one amount for all requests.
pub(super) fn reject_options_with_one_amount(reader: &TableReader<'_>, counts_slots: bool) {
    report! { reader;
        Error("requests_from") if counts_slots => "not with algorithm = \"concurrency\", whose slots need a fixed amount; expected requests";
        Error("warm_up") if reader.contains_key("warm_up") => "not with requests_from: a third of a small amount may be less than the cost of a request; expected no warm_up";
    }
}
