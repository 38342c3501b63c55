//! `[client]` and `[path]`: the client address and paths.

use crate::config::key_files::{is_path_set, read_text_file};
use crate::config::table_reader::TableReader;
use crate::config::values;
use crate::limiter::{Algorithm, Limit};
use crate::policy::path::{EscapedDelimiters, EscapedSlashes, ForwardedPath};
use crate::policy::{
    KeyHasher, NamedLimit, SelfServiceSettings, SlotRelease, ValueChecks, client, path,
};
use http::HeaderName;
use http::uri::PathAndQuery;
use ipnet::Ipv6Net;

/// Builds the settings of self-service. The inner `None` means that it is off.
pub(super) fn build_self_service_settings(
    root: &TableReader<'_>,
    has_upstream: bool,
) -> Option<Option<SelfServiceSettings>> {
    /// The window moves in tenths of its period.
    const SUB_WINDOWS: u64 = 10;
    let Some(reader) = root.get_optional_table("self_service") else {
        return Some(None);
    };
    if !has_upstream {
        reader.report_warning("path", "without effect: nothing listens at listen.address");
    }
    let path = reader.get_parsed("path", parse_self_service_path)?;
    let limit = reader.get_table("limit");
    let limit = Limit {
        requests: limit.get_integer("requests")?,
        per_us: u64::try_from(limit.get_duration("per")?.as_micros()).unwrap_or(u64::MAX),
        algorithm: Algorithm::SlidingWindow {
            buckets: SUB_WINDOWS,
        },
    };
    Some(Some(SelfServiceSettings {
        path: path.into(),
        limit: NamedLimit {
            amount: None,
            is_reported: true,
            release: SlotRelease::default(),
            name: "self_service".into(),
            unit: None,
            limit,
        },
    }))
}

fn parse_self_service_path(text: &str) -> Result<String, String> {
    let is_path =
        text.starts_with('/') && !text.contains(['?', '#']) && text.parse::<PathAndQuery>().is_ok();
    is_path
        .then(|| text.to_owned())
        .ok_or_else(|| "expected a path such as \"/.well-known/ratelimit\"".to_owned())
}

/// Builds the hasher of key values. Returns `None` after an error.
pub(super) fn build_key_hasher(reader: &TableReader<'_>) -> Option<KeyHasher> {
    const KEY: &str = "hash_secret_file";
    if !is_path_set(reader, KEY) || !reader.input().reads_key_files() {
        return Some(KeyHasher::default());
    }
    let secret = read_text_file(reader, KEY, "secret")?;
    KeyHasher::from_secret(secret.as_bytes())
        .map_err(|reason| reader.report_error(KEY, &reason))
        .ok()
}

/// The headers that the gateway in front always sets or removes.
pub(super) fn read_trusted_headers(reader: &TableReader<'_>) -> Vec<HeaderName> {
    reader.get_list("trusted_headers", values::parse_header_name)
}

const REJECT_OR_ALLOW: [(&str, bool); 2] = [("reject", true), ("allow", false)];

pub(super) fn build_client_settings(reader: &TableReader<'_>) -> Option<client::Settings> {
    Some(client::Settings {
        trusted_proxies: reader.get_list("trusted_proxies", values::parse_network),
        ip_header: reader.get_parsed("ip_header", |text| {
            HeaderName::from_bytes(text.as_bytes())
                .ok()
                .ok_or_else(|| "expected the name of a header".to_owned())
        })?,
        ipv4_prefix: reader.get_integer("ipv4_prefix")?,
        nat64_prefixes: reader.get_list("nat64_prefixes", parse_nat64_prefix),
        ipv6_prefix: reader.get_integer("ipv6_prefix")?,
        rejects_ambiguous_query: reader.get_keyword("ambiguous_query", &REJECT_OR_ALLOW)?,
        rejects_ambiguous_cookie: reader.get_keyword("ambiguous_cookie", &REJECT_OR_ALLOW)?,
        value_checks: ValueChecks {
            rejects_outer_white_space: reader.get_keyword("outer_white_space", &REJECT_OR_ALLOW)?,
            rejects_ambiguous_header: reader.get_keyword("ambiguous_header", &REJECT_OR_ALLOW)?,
            rejects_cookie_prefixes: reader.get_keyword("cookie_prefixes", &REJECT_OR_ALLOW)?,
            rejects_cookie_octets: reader.get_keyword("cookie_octets", &REJECT_OR_ALLOW)?,
        },
    })
}

fn parse_nat64_prefix(text: &str) -> Result<Ipv6Net, String> {
    let net = text.parse::<Ipv6Net>().ok().map(|net| net.trunc());
    net.filter(|net| [32, 40, 48, 56, 64, 96].contains(&net.prefix_len()))
        .ok_or_else(|| {
            "expected an IPv6 network of 32, 40, 48, 56, 64 or 96 bits, such as \"2001:db8:64::/96\""
                .to_owned()
        })
}

pub(super) fn build_path_settings(reader: &TableReader<'_>) -> Option<path::Settings> {
    let escaped_slashes = [
        ("both", EscapedSlashes::Both),
        ("reject", EscapedSlashes::Reject),
        ("keep", EscapedSlashes::Keep),
        ("decode", EscapedSlashes::Decode),
    ];
    let escaped_delimiters = [
        ("both", EscapedDelimiters::Both),
        ("reject", EscapedDelimiters::Reject),
        ("keep", EscapedDelimiters::Keep),
    ];
    let forward = [
        ("unchanged", ForwardedPath::Unchanged),
        ("normalized", ForwardedPath::Normalized),
    ];
    Some(path::Settings {
        normalize: reader.get_bool("normalize")?,
        forward: reader.get_keyword("forward", &forward)?,
        merge_slashes: reader.get_bool("merge_slashes")?,
        reads_authority: reader.get_keyword("authority", &[("both", true), ("ignore", false)])?,
        escaped_slashes: reader.get_keyword("escaped_slashes", &escaped_slashes)?,
        escaped_delimiters: reader.get_keyword("escaped_delimiters", &escaped_delimiters)?,
        rejects_control_characters: reader.get_keyword("control_characters", &REJECT_OR_ALLOW)?,
        rejects_invalid_utf8: reader.get_keyword("invalid_utf8", &REJECT_OR_ALLOW)?,
        ignore_trailing_slash: reader.get_keyword(
            "trailing_slash",
            &[("ignore", true), ("significant", false)],
        )?,
        strip_parameters: reader
            .get_keyword("path_parameters", &[("strip", true), ("keep", false)])?,
        case_sensitive: reader.get_bool("case_sensitive")?,
        rejects_ambiguous_keys: reader
            .get_keyword("ambiguous_key", &[("reject", true), ("first", false)])?,
        max_readings_size: reader.get_byte_size("max_readings_size")?,
    })
}
