//! A deterministic simulation of instances, network and Redis; see docs/CONTRIBUTING.md.
//!
//! The test target `sim` and the bench target `sim` share these modules.

mod draw;
mod faults;
mod instance;
mod judge;
mod minimize;
mod network;
mod operator;
mod overrides;
mod redis_server;
mod resp;
mod scenario;
mod stream;
mod summary;
mod trace;
mod world;

pub(crate) use scenario::ScenarioClass;
pub(crate) use summary::run_seeds;
