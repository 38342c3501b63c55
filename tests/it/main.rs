//! The integration tests. They are one binary: it links once, and the tests run in parallel.
//!
//! `support/` holds the builders: the proxy as a separate process, upstreams and clients.
//! `reference_model` is a naive model of limits. Every other file covers one subject. A test named
//! `trap_N_…` fails if the product falls into trap N of the list in `traps.rs`.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::string_slice,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::large_futures,
    clippy::print_stdout,
    clippy::too_many_lines,
    unreachable_pub,
    reason = "a test fails by panicking, and its helpers are tests too"
)]

mod support;

mod musl;
mod reference_model;

mod address_families;
mod admin;
mod admin_api;
mod admin_drain;
mod admin_keys;
mod admin_socket;
mod algorithm_charts;
mod algorithm_guarantees;
mod budgets;
mod calendar_limits;
mod cli_commands;
mod client_crowds;
mod client_identity;
mod cluster;
mod cluster_nodes;
mod cluster_split_decisions;
mod concurrency;
mod configuration_limits;
mod configuration_sources;
mod connection_guards;
mod cors;
mod counted_lockouts;
mod counted_responses;
mod credential_rotation;
mod descriptor_limits;
mod doctor;
mod documentation;
mod drain;
mod early_answers;
mod ext_authz;
mod extreme_inputs;
mod failover;
mod fleet_view;
mod footprint;
mod forwarded_certificates;
mod grpc;
mod grpc_interop;
mod half_close;
mod hashed_keys;
mod http2_conformance;
mod http2_floods;
mod http2_slow_readers;
mod http2_upstream;
mod informational_responses;
mod inspection_commands;
mod instance_scope;
mod jwt_claims;
mod key_alternatives;
mod keys_by_url;
mod leaky_bucket_queue;
mod leases;
mod lenient_queries;
mod lifecycle;
mod limits;
mod listener_tls;
mod listeners;
mod local_fallback;
mod log_flood;
mod log_output;
mod lua;
mod marked_requests;
mod memory_budget;
mod memory_store;
mod migration;
mod migration_products;
mod notifications;
mod operator_answers;
mod otlp_metrics;
mod override_patterns;
mod overrides;
mod overrides_model;
mod path_normalization;
mod problems;
mod prometheus;
mod proxying;
mod rate_limit_service;
mod rate_limit_service_operation;
mod rate_limit_service_protocol;
mod recipes;
mod redis_clock;
mod redis_connection_budget;
mod redis_connections;
mod redis_faults;
mod redis_outage;
mod redis_practice;
mod redis_proxies;
mod redis_replies;
mod redis_store;
mod reload;
mod replay;
mod request_amounts;
mod request_bodies;
mod request_costs;
mod request_validation;
mod request_validation_corpus;
mod resource_limits;
mod resource_shortages;
mod response_cleanup;
mod response_costs;
mod retry_after;
mod retry_after_of_all_limits;
mod returned_units;
mod rolling_upgrade;
mod self_service;
mod self_signed_certificates;
mod settlements;
mod shared_counters;
mod shared_redis;
mod spellings;
mod top;
mod tracing;
mod traps;
mod upgrades;
mod upload_shares;
mod upstream_connections;
mod value_spellings;
mod wall_clock;
mod why;
