//! What tidegate says about itself: the log, and the metrics.

pub mod history;
mod log;
pub mod metrics;
mod throttle;
pub mod top_refusals;
pub mod trace;

pub use log::{
    AccessLogFilter, LogFormat, LogLevel, LogSettings, init_logging, log_level, set_log_level,
};
pub use throttle::LogThrottle;
