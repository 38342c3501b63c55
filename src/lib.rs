//! tidegate: a rate-limiting sidecar proxy with a stated and tested guarantee.
//!
//! `docs/ARCHITECTURE.md` describes the modules, the layers and the allowed dependencies.

pub mod admin;
pub mod app;
pub mod cli;
pub mod clock;
pub mod config;
pub mod enforcer;
pub mod http_client;
pub mod jwks;
pub mod limiter;
pub mod listen;
pub mod policy;
pub mod proxy;
mod reload;
pub mod replay;
pub mod store;
pub mod telemetry;
pub mod text;
pub mod tls;
