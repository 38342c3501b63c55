//! Observability: the log, metrics, traces, and the recent history for the dashboard.

pub mod history;
mod log;
pub mod metrics;
mod throttle;
pub mod top_rejections;
pub mod trace;

pub use log::{
    AccessLogFilter, LogFormat, LogLevel, LogSettings, init_logging, log_level, set_log_level,
};
pub use throttle::LogThrottle;
