//! `tidegate keys`: lists, shows and resets counters. Connects to Redis directly. For counters in
//! memory (the memory store, and `scope = "instance"`), it queries the admin port of the running
//! proxy, which lists only keys with rejected requests.

use super::admin_client::{AdminClient, build_target};
use super::limit_status::{format_block, format_key_status, format_wait};
use super::output::{CommandAnswer, CommandError, block_on, format_answer, print_audit_line};
use crate::admin::{KeyDocument, KeyResetDocument, add_fields};
use crate::app::StoreBackend;
use crate::app::key_status::{ResolvedKey, find_limiting_policy, resolve_key};
use crate::app::limit_documents::micros_to_seconds;
use crate::app::override_store::describe_key_override;
use crate::config::{self, Config, ConfigSources, format_period};
use crate::limiter::Algorithm;
use crate::policy::Policy;
use crate::store::redis::{CounterInspector, RedisCounter};
use crate::telemetry::top_rejections::RejectionRanking;
use crate::text::count_noun;
use serde::Deserialize;
use serde_json::{Value, json};

/// Most keys that the admin API ranks.
const MAX_RANKED_KEYS: usize = 500;

#[derive(clap::Subcommand, Debug)]
pub(super) enum KeysCommand {
    /// List counters, most used first. With the memory store: keys with rejected requests.
    List {
        /// Only list counters of this policy.
        #[arg(long, value_name = "NAME")]
        policy: Option<String>,
        /// Maximum number of counters to read.
        #[arg(long, value_name = "N", default_value_t = 100)]
        most: usize,
    },
    /// Show the state of one key of a policy.
    Show(KeySelector),
    /// Reset the counters of one key of a policy. Takes effect on every instance within a second.
    Reset {
        #[command(flatten)]
        key: KeySelector,
        /// Only reset the counter of this limit.
        #[arg(long, value_name = "NAME")]
        limit: Option<String>,
    },
}

/// Selects a key by its policy and values.
#[derive(clap::Args, Debug)]
pub(super) struct KeySelector {
    /// Name of the policy.
    policy: String,
    /// Values of the key in order, e.g. a client address; "" for an absent value.
    values: Vec<String>,
}

/// Runs the command and returns the text to print.
///
/// # Errors
/// A message for the user if the key is unknown, or Redis or the admin port does not respond.
pub(super) fn run(
    sources: &ConfigSources,
    command: &KeysCommand,
    as_json: bool,
) -> Result<String, CommandError> {
    let config = config::load(sources)?;
    // Without a configuration, the proxy knows the policies.
    if let KeysCommand::List {
        policy: Some(name), ..
    } = command
        && !config.policy_table.policies().is_empty()
    {
        find_limiting_policy(&config.policy_table, name).map_err(format_error)?;
    }
    let stores = StoreBackend::new(&config.store);
    let answer = match stores.redis() {
        Some(redis) if !command.reads_instance_counters(&config) => block_on(async {
            match command {
                KeysCommand::List { policy, most } => {
                    let inspector = stores.connect_inspector(redis).await;
                    let inspector = inspector.map_err(format_error)?;
                    list_counters(&config, &inspector, policy.as_deref(), *most).await
                }
                KeysCommand::Show(selector) => show_key(&config, &stores, selector).await,
                KeysCommand::Reset { key, limit } => {
                    reset_key(&config, &stores, key, limit.as_deref()).await
                }
            }
        })?,
        _ => run_by_admin_port(&AdminClient::from_sources(sources)?, command),
    };
    Ok(format_answer(answer?, as_json))
}

/// The first part of the keys of a policy: its name, or the counter that it shares.
fn key_namespace<'c>(config: &'c Config, policy: &'c str) -> &'c str {
    let mut policies = config.policy_table.policies().iter();
    let quota = policies.find(|known| *known.name == *policy);
    let quota = quota.and_then(Policy::quota);
    quota.map_or(policy, |quota| quota.key.key_namespace(policy))
}

/// The policies whose counters are in the memory of each instance.
fn instance_policy_names(config: &Config) -> Vec<&str> {
    let policies = config.policy_table.policies().iter();
    let in_memory = policies.filter(|policy| policy.is_instance_scoped());
    in_memory.map(|policy| &*policy.name).collect()
}

async fn list_counters(
    config: &Config,
    inspector: &CounterInspector,
    policy: Option<&str>,
    max_counters: usize,
) -> Result<CommandAnswer, String> {
    let namespace = policy.map(|name| key_namespace(config, name));
    let (mut counters, has_more) = inspector
        .list_counters(namespace, max_counters)
        .await
        .map_err(format_error)?;
    counters.sort_by(|a, b| {
        b.used_units
            .cmp(&a.used_units)
            .then_with(|| a.key.cmp(&b.key))
    });
    let mut text = format!(
        "{:>10}  {:<24} {:<14} KEY\n",
        "USED", "COUNTED BY", "FREES IN"
    );
    for counter in &counters {
        text.push_str(&format!(
            "{:>10}  {:<24} {:<14} {}\n",
            counter.used_units,
            describe_algorithm_and_period(counter),
            if counter.used_units == 0 {
                "-".to_owned()
            } else {
                format_wait(counter.next_release_in_us)
            },
            counter
                .readable_key
                .as_deref()
                .unwrap_or(&counter.key)
                .escape_debug(),
        ));
    }
    let instance_policies = instance_policy_names(config);
    if policy.is_none() && !instance_policies.is_empty() {
        text.push_str(&format!(
            "Not listed: {}, counted per instance in memory; --policy NAME queries the proxy at admin.address.\n",
            instance_policies.join(", ")
        ));
    }
    if has_more {
        text.push_str(&format!(
            "There are more counters; read {} (--most).\n",
            counters.len()
        ));
    }
    let counters: Vec<Value> = counters.iter().map(counter_to_json).collect();
    Ok((json!({ "counters": counters, "more": has_more }), text))
}

fn counter_to_json(counter: &RedisCounter) -> Value {
    let mut fields = json!({
        "key": counter.key,
        "readable": counter.readable_key,
        "algorithm": counter.limit.algorithm.into_str(),
        "per_s": micros_to_seconds(counter.limit.per_us),
        "used": counter.used_units,
        "frees_in_s": (counter.used_units > 0).then(|| micros_to_seconds(counter.next_release_in_us)),
    });
    if let Algorithm::CalendarWindow { calendar } = counter.limit.algorithm {
        let period = json!({ "per": calendar.unit().as_str(), "tz": calendar.zone_name() });
        add_fields(&mut fields, period);
    }
    fields
}

async fn show_key(
    config: &Config,
    stores: &StoreBackend,
    selector: &KeySelector,
) -> Result<CommandAnswer, String> {
    let found = selector.resolve_against_config(config)?;
    let state = found.read_status(stores).await.map_err(format_error)?;
    let words = describe_key_override(stores, &found, state.now_us).await;
    let status = found.describe_status(&state, words.map_err(format_error)?);
    Ok((json!(status), format_key_status(&status)))
}

async fn reset_key(
    config: &Config,
    stores: &StoreBackend,
    selector: &KeySelector,
    limit: Option<&str>,
) -> Result<CommandAnswer, String> {
    let found = selector.resolve_against_config(config)?;
    let reset = found.reset_counters(stores, limit).await;
    let reset = reset.map_err(format_error)?;
    // As the proxy logs it, without the values of the key.
    print_audit_line(json!({
        "message": "key reset by an operator",
        "policy": reset.policy,
        "key": format!("{:032x}", found.key.id()),
        "limit": limit,
        "counters": reset.counters_forgotten,
    }));
    Ok((json!(reset), format_reset(&reset)))
}

fn format_reset(reset: &KeyResetDocument) -> String {
    let (names, count) = (reset.limits.join(", "), reset.limits.len() as u64);
    let limits = format!("{} ({})", count_noun(count, "limit"), names.escape_debug());
    let limits = (count > 0).then_some(limits);
    let block = reset.unblocked.then(|| "the block".to_owned());
    let parts: Vec<String> = limits.into_iter().chain(block).collect();
    let key = reset.key.escape_debug();
    let mut text = match (parts.is_empty(), reset.counters_forgotten) {
        (true, 0) => format!("{key}: no counter to reset\n"),
        // An older proxy names no limits.
        (true, count) => format!("{key}: reset {}\n", count_noun(count, "counter")),
        (false, _) => format!("{key}: reset {}\n", parts.join(" and ")),
    };
    if let Some(blocked_s) = reset.blocked_s {
        text.push_str(&format!(
            "The key stays {}; reset it without --limit to end the block.\n",
            format_block(blocked_s)
        ));
    }
    text
}

/// Runs the command by the admin API of the proxy whose memory holds the counters.
fn run_by_admin_port(client: &AdminClient, command: &KeysCommand) -> Result<CommandAnswer, String> {
    Ok(match command {
        KeysCommand::List { policy, most } => {
            let most = most.min(&MAX_RANKED_KEYS).to_string();
            let policy = policy.iter().map(|policy| ("policy", &**policy));
            let target = build_target("/top", policy.chain([("n", &*most)]));
            let response = client.request_json("GET", &target)?;
            let text = format_rejected_keys(&response);
            (response, text)
        }
        KeysCommand::Show(selector) => {
            let response = client.request_json("GET", &selector.query_target(None))?;
            let status = KeyDocument::deserialize(&response).unwrap_or_default();
            let text = format_key_status(&status);
            (response, text)
        }
        KeysCommand::Reset { key, limit } => {
            let target = key.query_target(limit.as_deref());
            let response = client.request_json("DELETE", &target)?;
            let reset = KeyResetDocument::deserialize(&response).unwrap_or_default();
            (response, format_reset(&reset))
        }
    })
}

/// Formats the most rejected keys of a `GET /top` response.
fn format_rejected_keys(response: &Value) -> String {
    let mut text = format!("{:>10}  {:<24} KEY\n", "REJECTED", "POLICY");
    let ranking = RejectionRanking::deserialize(&response["keys"]).unwrap_or_default();
    for entry in ranking.entries {
        text.push_str(&format!(
            "{:>10}  {:<24} {}\n",
            entry.count,
            entry.policy.escape_debug().to_string(),
            entry.text.as_str().escape_debug(),
        ));
    }
    text.push_str(
        "Only keys with rejected requests are listed, because these counters are in memory.\n",
    );
    text
}

fn format_error(error: impl std::fmt::Display) -> String {
    format!("error: {error}\n")
}

impl KeysCommand {
    /// Whether the command is about a policy whose counters are in the memory of each instance.
    fn reads_instance_counters(&self, config: &Config) -> bool {
        let policy = match self {
            Self::List { policy, .. } => policy.as_deref(),
            Self::Show(key) | Self::Reset { key, .. } => Some(&*key.policy),
        };
        policy.is_some_and(|name| {
            let policies = config.policy_table.policies();
            let named = policies.iter().find(|known| *known.name == *name);
            named.is_some_and(Policy::is_instance_scoped)
        })
    }
}

impl KeySelector {
    /// Target of the admin API for this key.
    fn query_target(&self, limit: Option<&str>) -> String {
        let values = self.values.iter().map(|value| ("key", &**value));
        let limit = limit.map(|limit| ("limit", limit));
        let policy = [("policy", &*self.policy)].into_iter();
        build_target("/keys", policy.chain(values).chain(limit))
    }

    fn resolve_against_config<'c>(&self, config: &'c Config) -> Result<ResolvedKey<'c>, String> {
        resolve_key(&config.policy_table, &self.policy, &self.values).map_err(format_error)
    }
}

fn describe_algorithm_and_period(counter: &RedisCounter) -> String {
    let name = counter.limit.algorithm.into_str();
    match counter.limit.algorithm {
        Algorithm::Block => name.to_owned(),
        _ => format!("{name} per {}", format_period(&counter.limit)),
    }
}
