//! What tidegate says about itself. So far: the log.

mod log;

pub use log::{Access, Format, Level, LogSettings, init};
