//! The integration tests, one binary: it links once, and its tests run side by side.
//!
//! `support/` holds the builders (the proxy as a process of its own, upstreams, clients), `model` the
//! naive truth about limits. Every other file is one subject, and its tests read as sentences. A test
//! named `trap_N_…` fails if the product falls into trap N of the list in `docs/CONTRIBUTING.md`.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::string_slice,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::large_futures,
    clippy::print_stdout,
    unreachable_pub,
    reason = "a test fails by panicking, and its helpers are tests too"
)]

mod support;

mod model;
mod musl;

mod absurd;
mod admin;
mod admin_socket;
mod amends;
mod asking;
mod bounds;
mod check;
mod cluster;
mod commands;
mod concurrency;
mod cors;
mod counting;
mod doors;
mod drain;
mod failover;
mod floods;
mod footprint;
mod front_tls;
mod gate;
mod gate_corpus;
mod grpc;
mod grpc_stack;
mod http2;
mod http2_upstream;
mod identity;
mod inspect;
mod interim;
mod leases;
mod lifecycle;
mod limits;
mod line;
mod local;
mod log;
mod lua;
mod memory;
mod migration;
mod outage;
mod pages;
mod paths;
mod pictures;
mod practice;
mod prometheus;
mod promises;
mod proxying;
mod redis_faults;
mod redis_store;
mod redis_ways;
mod reload;
mod replay;
mod rls;
mod settling;
mod shared_redis;
mod tokens;
mod top;
mod tracing;
mod traps;
mod truth;
mod upgrades;
mod upstream_ways;
