//! What tidegate says about itself: the log, and the metrics.

pub mod history;
mod log;
pub mod metrics;
mod throttle;
pub mod top;

pub use log::{Access, Format, Level, LogSettings, init, level, set_level};
pub use throttle::Throttle;
