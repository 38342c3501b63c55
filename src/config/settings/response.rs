//! `[response]`: rate-limit fields and CORS.

use crate::config::table_reader::{TableReader, report};
use crate::policy::{CorsOrigins, RateLimitHeaderSettings};

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
