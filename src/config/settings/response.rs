//! `[response]`: rate-limit fields and CORS.

use crate::config::table_reader::TableReader;
use crate::policy::{CorsOrigins, RateLimitHeaderSettings};

pub(super) fn build_rate_limit_header_settings(
    reader: &TableReader<'_>,
) -> Option<RateLimitHeaderSettings> {
    let kinds = [
        ("standard", (true, false)),
        ("legacy", (false, true)),
        ("both", (true, true)),
        ("none", (false, false)),
    ];
    let (standard, legacy) = reader.get_mapped_keyword("headers", &kinds)?;
    Some(RateLimitHeaderSettings {
        standard,
        legacy,
        legacy_reset_epoch: reader.is_keyword("legacy_reset", "epoch")?,
    })
}

pub(super) fn build_cors_origins(reader: &TableReader<'_>) -> CorsOrigins {
    let cors = CorsOrigins(reader.get_list("allow_origins", CorsOrigins::parse_origin));
    if cors.allows_any_origin() && reader.get_items("allow_origins").len() > 1 {
        reader.report_error(
            "allow_origins",
            "\"*\" allows any origin; expected no other entries",
        );
    }
    cors
}
