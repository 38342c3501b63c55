//! Inputs and options of a replay.

use super::parsers::AccessLogFormat;
use http::HeaderName;
use std::path::PathBuf;

/// Inputs and options of a replay.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Paths of the access logs; `-` is stdin.
    pub logs: Vec<PathBuf>,
    /// Log format; `None` detects the format of each log.
    pub format: Option<AccessLogFormat>,
    /// Headers, each with the log field that holds its value.
    pub header_fields: Vec<(HeaderName, String)>,
    /// Spreads requests whose times are whole seconds evenly over their second.
    pub spread_within_second: bool,
    /// Maximum share of keys, in percent, that a suggested limit may affect. `None` disables
    /// suggestions.
    pub suggest_percent: Option<f64>,
    /// Maximum number of keys in the list of most limited keys.
    pub top_keys: usize,
}
