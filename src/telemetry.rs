//! Observability: the log, metrics, traces, and the recent history for the dashboard.

pub mod history;
mod log;
mod log_writer;
pub mod metrics;
pub mod otlp;
mod throttle;
pub mod top_rejections;
pub mod trace;

pub(crate) use log::escape_json;
pub use log::{
    AccessLogFilter, LogFormat, LogLevel, LogSettings, init_logging, log_level, set_log_level,
    shorten_client_text,
};
pub use log_writer::{dropped_log_lines, flush_log};
pub use throttle::LogThrottle;
