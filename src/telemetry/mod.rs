//! What tidegate says about itself: the log, and the metrics.

mod log;
pub mod metrics;
mod throttle;

pub use log::{Access, Format, Level, LogSettings, init};
pub use throttle::Throttle;
