//! `[client]`, `[path]`, `[response]` and `[self_service]`: settings beside the policies.

use crate::config::table_reader::{TableReader, read_settings, report};
use crate::config::values;
use crate::limiter::{Algorithm, Limit};
use crate::policy::client::Settings as ClientSettings;
use crate::policy::path::Settings as PathSettings;
use crate::policy::{
    CorsOrigins, NamedLimit, RateLimitHeaderSettings, SelfServiceSettings, SlotRelease,
    ValueChecks, ValueHasher,
};
use http::HeaderName;
use http::uri::PathAndQuery;
use ipnet::Ipv6Net;

/// Builds the settings of self-service.
pub(super) fn build_self_service_settings(
    reader: &TableReader<'_>,
    has_upstream: bool,
) -> Option<SelfServiceSettings> {
    /// The window moves in tenths of its period.
    const SUB_WINDOWS: u64 = 10;
    report! { reader;
        Warning("path") if !has_upstream => "without effect: nothing listens at listen.address";
    }
    let path = reader.get_text("path", parse_self_service_path)?;
    let limit = reader.get_table("limit");
    let limit = Limit {
        requests: limit.read("requests")?,
        per_us: values::to_micros(limit.read("per")?),
        algorithm: Algorithm::SlidingWindow {
            buckets: SUB_WINDOWS,
        },
    };
    Some(SelfServiceSettings {
        path: path.into(),
        limit: NamedLimit {
            amount: None,
            is_reported: true,
            release: SlotRelease::default(),
            name: "self_service".into(),
            unit: None,
            limit,
        },
    })
}

fn parse_self_service_path(text: &str) -> Option<String> {
    let is_uri = text.starts_with('/') && text.parse::<PathAndQuery>().is_ok();
    (is_uri && !text.contains(['?', '#'])).then(|| text.to_owned())
}

/// Builds the hasher of key values. Returns `None` after an error.
pub(super) fn build_key_hasher(reader: &TableReader<'_>) -> Option<ValueHasher> {
    const KEY: &str = "hash_secret_file";
    if reader.get_nonempty_string(KEY).is_none() || !reader.input.reads_key_files() {
        return Some(ValueHasher::default());
    }
    let secret = reader.read_text_file(KEY, "secret")?;
    reader.accept(KEY, ValueHasher::from_secret(secret.as_bytes()))
}

pub(super) fn build_client_settings(reader: &TableReader<'_>) -> Option<ClientSettings> {
    let rejects = |key: &str| reader.is_keyword(key, "reject");
    let value_checks = ValueChecks {
        rejects_outer_white_space: rejects("outer_white_space")?,
        rejects_ambiguous_header: rejects("ambiguous_header")?,
        rejects_ambiguous_query: rejects("ambiguous_query")?,
        rejects_ambiguous_cookie: rejects("ambiguous_cookie")?,
        rejects_cookie_prefixes: rejects("cookie_prefixes")?,
        rejects_cookie_octets: rejects("cookie_octets")?,
    };
    Some(read_settings!(ClientSettings {
        reader: ipv4_prefix, ipv6_prefix;
        =>
        trusted_proxies: reader.get_list("trusted_proxies", values::parse_network),
        ip_header: reader.get_text("ip_header", |text| HeaderName::try_from(text).ok())?,
        nat64_prefixes: reader.get_list("nat64_prefixes", parse_nat64_prefix),
        value_checks,
    }))
}

fn parse_nat64_prefix(text: &str) -> Result<Ipv6Net, String> {
    let net = text.parse::<Ipv6Net>().ok().map(|net| net.trunc());
    net.filter(|net| [32, 40, 48, 56, 64, 96].contains(&net.prefix_len()))
        .ok_or_else(|| {
            "expected an IPv6 network of 32, 40, 48, 56, 64 or 96 bits, such as \"2001:db8:64::/96\""
                .to_owned()
        })
}

pub(super) fn build_path_settings(reader: &TableReader<'_>) -> Option<PathSettings> {
    let is = |key: &str, keyword: &str| reader.is_keyword(key, keyword);
    Some(read_settings!(PathSettings {
        reader: normalize, forward, merge_slashes, escaped_slashes, escaped_delimiters,
            case_sensitive, max_readings_size;
        =>
        reads_authority: is("authority", "both")?,
        rejects_control_characters: is("control_characters", "reject")?,
        rejects_invalid_utf8: is("invalid_utf8", "reject")?,
        ignore_trailing_slash: is("trailing_slash", "ignore")?,
        strip_parameters: is("path_parameters", "strip")?,
        rejects_ambiguous_keys: is("ambiguous_key", "reject")?,
    }))
}

pub(super) fn build_rate_limit_header_settings(
    reader: &TableReader<'_>,
) -> Option<RateLimitHeaderSettings> {
    let kind: String = reader.read("headers")?;
    Some(RateLimitHeaderSettings {
        standard: ["standard", "both"].contains(&kind.as_str()),
        legacy: ["legacy", "both"].contains(&kind.as_str()),
        legacy_reset_epoch: reader.is_keyword("legacy_reset", "epoch")?,
    })
}

pub(super) fn build_cors_origins(reader: &TableReader<'_>) -> CorsOrigins {
    let cors = CorsOrigins(reader.get_list("allow_origins", CorsOrigins::parse_origin));
    report! { reader;
        Error("allow_origins") if cors.allows_any_origin() && reader.get_items("allow_origins").len() > 1 => "\"*\" allows any origin; expected no other entries";
    }
    cors
}
