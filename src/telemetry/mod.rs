//! What tidegate says about itself: the log, and the metrics.

mod log;
pub mod metrics;

pub use log::{Access, Format, Level, LogSettings, init};
