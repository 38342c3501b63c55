//! Builds the settings of every module from the configuration tables.

mod client;
mod client_tls;
mod jwt;
mod listen_tls;
mod operation;
mod proxy;
mod store;

pub(super) use operation::build_admin_settings;
pub(super) use store::{build_memory_settings, build_redis_settings};

use super::input::FileSet;
use super::lints::{self, LintContext};
use super::loaded_config::{Config, StoreSettings};
use super::policies::{PolicyContext, build_policies};
use super::table_reader::TableReader;
use super::value_tree::ValueNode;
use super::values;
use crate::policy::{self, PolicyTable};
use crate::store::redis::RedisTopology;
use http::HeaderName;
use std::sync::Arc;

/// Builds the settings of all modules from the read tables. Errors are reported to their input.
/// Returns `None` if a key without a default is absent or invalid.
///
/// `raw`, `warnings` and `files` are empty. [`super::load`] sets these fields at the end.
pub(super) fn build_config(root: &TableReader<'_>, included: &[TableReader<'_>]) -> Option<Config> {
    let listen_reader = root.get_table("listen");
    let http = listen_reader.get_table("http");
    let listen = proxy::build_listen_settings(&listen_reader, &http);
    let tls_reader = listen_reader.get_optional_table("tls");
    let tls = tls_reader.as_ref().map(listen_tls::build_server_tls);
    let rls = root.get_optional_table("rls");
    let check = root.get_optional_table("check");
    let upstream_reader = root.get_table("upstream");
    let has_upstream = upstream_reader.contains_key("url") || (rls.is_none() && check.is_none());
    let upstream = proxy::build_upstream_settings(&upstream_reader, &http, has_upstream);
    let service_listeners =
        proxy::build_service_listeners(rls.as_ref(), check.as_ref(), listen.as_ref());
    let ext_authz = check.as_ref().map(proxy::read_ext_authz_settings);
    let store = store::build_store_settings(&root.get_table("store"));
    let shutdown = operation::build_shutdown_settings(&root.get_table("shutdown"));
    let admin = build_admin_settings(&root.get_table("admin"));
    let log = operation::build_log_settings(&root.get_table("log"));
    let trace = root.build_optional("trace", operation::build_trace_settings);
    let metric_export = root.build_optional("metrics", operation::build_metric_export_settings);
    let response = root.get_table("response");
    let headers = client::build_rate_limit_header_settings(&response);
    let cors = client::build_cors_origins(&response.get_table("cors"));
    let context = build_policy_context(root, store.as_ref(), tls_reader.as_ref())?;
    let tables = std::iter::once(root).chain(included);
    let policy_tables = tables.flat_map(|reader| reader.get_tables("policy"));
    let (policies, policy_descriptions) = build_policies(policy_tables, &context);
    // Lints assume valid settings.
    if !root.input.has_errors()
        && let (Some(listen), Some(upstream), Some(store)) = (&listen, &upstream, &store)
    {
        let lint_context = LintContext {
            root,
            policy_context: &context,
            listen,
            upstream,
            store,
            has_rls: rls.is_some(),
        };
        lints::run_lints(&policies, &lint_context);
    }
    let self_service = root.build_optional("self_service", |table| {
        client::build_self_service_settings(table, has_upstream)
    });
    let policies = policies.into_iter().map(|spanned| spanned.policy).collect();
    let value_hasher = context.value_hasher.clone();
    let mut table = PolicyTable::new(policies, context.path, context.client, headers?)
        .with_protected_headers(context.mark_header, context.trusted_headers);
    if let Some(tokens) = context.tokens {
        table = table.with_token_settings(tokens);
    }
    table.cors = cors;
    table.self_service = self_service?;
    Some(Config {
        listen: listen?,
        tls: tls.map_or(Some(None), |tls| tls.map(Arc::new).map(Some))?,
        upstream: upstream?,
        has_upstream,
        service_listeners: service_listeners?,
        ext_authz: ext_authz.unwrap_or_default(),
        policy_table: Arc::new(table),
        value_hasher,
        store: store?,
        shutdown: shutdown?,
        admin: admin?,
        log: log?,
        trace: trace?,
        metric_export: metric_export?,
        policy_descriptions,
        warnings: Vec::new(),
        files: FileSet::default(),
        raw: ValueNode::default(),
    })
}

/// Reads `defaults.mark_header`. tidegate removes this header from each request.
fn read_mark_header(
    defaults: &TableReader<'_>,
    client: &policy::client::Settings,
) -> Option<HeaderName> {
    defaults.get_parsed("mark_header", |text| {
        let name = values::parse_header_name(text)?;
        let is_used = name == client.ip_header
            || name == "x-real-ip"
            || name.as_str().starts_with("x-forwarded-");
        if name.as_str().starts_with("x-") && !is_used {
            Ok(name)
        } else {
            Err("expected a name of its own that starts with \"x-\"".to_owned())
        }
    })
}

/// Builds the settings that all policies share. Returns `None` after an error.
fn build_policy_context(
    root: &TableReader<'_>,
    store: Option<&StoreSettings>,
    tls_reader: Option<&TableReader<'_>>,
) -> Option<PolicyContext> {
    let (defaults, client_reader) = (root.get_table("defaults"), root.get_table("client"));
    let is_cluster = |store: &StoreSettings| match store {
        StoreSettings::Redis(redis) => redis.topology == RedisTopology::Cluster,
        StoreSettings::Memory(_) => false,
    };
    let jwt_reader = client_reader.get_table("jwt");
    let claim_trust = jwt::read_claim_trust(&jwt_reader);
    let tokens = claim_trust.and_then(|trust| jwt::build_jwt_settings(&jwt_reader, trust));
    let issuers = tokens.as_ref().map(policy::jwt::Settings::several_issuers);
    let value_hasher = client::build_key_hasher(&client_reader);
    let client = client::build_client_settings(&client_reader)?;
    Some(PolicyContext {
        mark_header: read_mark_header(&defaults, &client)?,
        // Without valid store settings, a cluster is assumed, so that no follow-up warning is
        // reported.
        uses_redis_cluster: store.is_none_or(is_cluster),
        client,
        path: client::build_path_settings(&root.get_table("path"))?,
        // The error of an unreadable secret has been reported.
        value_hasher: value_hasher.unwrap_or_default(),
        trusted_headers: client_reader.get_list("trusted_headers", values::parse_header_name),
        on_store_failure: defaults.read("on_store_failure")?,
        algorithm: defaults.read("algorithm")?,
        missing_key: defaults.read("missing_key")?,
        requests_client_certificates: tls_reader
            .is_some_and(listen_tls::requests_client_certificates),
        uses_memory_store: !matches!(store, Some(StoreSettings::Redis(_))),
        claim_trust,
        issuers: issuers.unwrap_or_default(),
        tokens,
        has_ext_authz: root.contains_key("check"),
    })
}
