//! `tidegate keys`: lists, shows and resets counters. Connects to Redis directly. For counters in
//! memory (the memory store, and `scope = "instance"`), it queries the admin port of the running
//! proxy, which lists only keys with rejected requests.

use super::admin_client::{AdminClient, build_target};
use super::limit_status::{format_block, format_key_status};
use super::output::{CommandError, CommandOutput, block_on, print_audit_line};
use crate::admin::{
    AdminError, CounterDocument, CounterListDocument, KeyResetDocument, TopDocument,
};
use crate::app::StoreBackend;
use crate::app::key_status::{ResolvedKey, find_limiting_policy, micros_to_seconds, resolve_key};
use crate::config::{self, Config, ConfigSources, format_period};
use crate::limiter::Algorithm;
use crate::policy::Policy;
use crate::store::redis::{CounterInspector, RedisCounter};
use crate::text::{count_noun, format_wait};
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
) -> Result<CommandOutput, CommandError> {
    let config = config::load(sources)?;
    // Without a configuration, the proxy knows the policies.
    if let KeysCommand::List {
        policy: Some(name), ..
    } = command
        && !config.policy_table.policies().is_empty()
    {
        find_limiting_policy(&config.policy_table, name)?;
    }
    let stores = StoreBackend::new(&config.store);
    let redis = stores.redis();
    let Some(redis) = redis.filter(|_| !command.reads_instance_counters(&config)) else {
        let client = AdminClient::from_settings(&config.admin)?;
        return block_on(run_by_admin_port(&client, command))?;
    };
    block_on(async {
        match command {
            KeysCommand::List { policy, most } => {
                let inspector = stores.connect_inspector(redis).await?;
                list_counters(&config, &inspector, policy.as_deref(), *most).await
            }
            KeysCommand::Show(selector) => {
                let found = selector.resolve_against_config(&config)?;
                let status = found.inspect(&stores).await?;
                Ok(CommandOutput::new(&status, format_key_status(&status)))
            }
            KeysCommand::Reset { key, limit } => {
                let found = key.resolve_against_config(&config)?;
                let reset = found.reset_counters(&stores, limit.as_deref()).await?;
                // As the proxy logs it, without the values of the key.
                print_audit_line(json!({
                    "message": "key reset by an operator",
                    "policy": reset.policy,
                    "key": format!("{:032x}", found.key.id()),
                    "limit": limit,
                    "counters": reset.counters_forgotten,
                }));
                Ok(CommandOutput::new(&reset, format_reset(&reset)))
            }
        }
    })?
}

/// The first part of the keys of a policy: its name, or the counter that it shares.
fn key_namespace<'c>(config: &'c Config, policy: &'c str) -> &'c str {
    let quota = find_policy(config, policy).and_then(Policy::quota);
    quota.map_or(policy, |quota| quota.key.key_namespace(policy))
}

fn find_policy<'c>(config: &'c Config, name: &str) -> Option<&'c Policy> {
    let mut policies = config.policy_table.policies().iter();
    policies.find(|known| *known.name == *name)
}

async fn list_counters(
    config: &Config,
    inspector: &CounterInspector,
    policy: Option<&str>,
    max_counters: usize,
) -> Result<CommandOutput, CommandError> {
    let namespace = policy.map(|name| key_namespace(config, name));
    let listed = inspector.list_counters(namespace, max_counters).await;
    let (mut counters, has_more) = listed.map_err(AdminError::from)?;
    counters.sort_by(|a, b| {
        b.used_units
            .cmp(&a.used_units)
            .then_with(|| a.key.cmp(&b.key))
    });
    let document = CounterListDocument {
        counters: counters.iter().map(describe_counter).collect(),
        more: has_more,
    };
    let mut text = format!(
        "{:>10}  {:<24} {:<14} KEY\n",
        "USED", "COUNTED BY", "FREES IN"
    );
    text.extend(counters.iter().map(format_counter));
    let policies = config.policy_table.policies().iter();
    let in_memory = policies.filter(|policy| policy.is_instance_scoped());
    let instance_policies: Vec<&str> = in_memory.map(|policy| &*policy.name).collect();
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
    Ok(CommandOutput::new(&document, text))
}

fn format_counter(counter: &RedisCounter) -> String {
    let frees_in = match counter.used_units {
        0 => "-".to_owned(),
        _ => format_wait(counter.next_release_in_us),
    };
    let algorithm = counter.limit.algorithm.into_str();
    let counted_by = match counter.limit.algorithm {
        Algorithm::Block => algorithm.to_owned(),
        _ => format!("{algorithm} per {}", format_period(&counter.limit)),
    };
    let key = counter.readable_key.as_deref().unwrap_or(&counter.key);
    format!(
        "{:>10}  {counted_by:<24} {frees_in:<14} {}\n",
        counter.used_units,
        key.escape_debug()
    )
}

fn describe_counter(counter: &RedisCounter) -> CounterDocument {
    let calendar = match counter.limit.algorithm {
        Algorithm::CalendarWindow { calendar } => Some(calendar),
        _ => None,
    };
    let frees_in_s = micros_to_seconds(counter.next_release_in_us);
    CounterDocument {
        key: counter.key.clone(),
        readable: counter.readable_key.clone(),
        algorithm: counter.limit.algorithm.into_str(),
        per_s: micros_to_seconds(counter.limit.per_us),
        used: counter.used_units,
        frees_in_s: (counter.used_units > 0).then_some(frees_in_s),
        per: calendar.map(|calendar| calendar.unit().as_str()),
        tz: calendar.map(|calendar| calendar.zone_name().to_owned()),
    }
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
async fn run_by_admin_port(
    client: &AdminClient,
    command: &KeysCommand,
) -> Result<CommandOutput, CommandError> {
    let (method, target) = match command {
        KeysCommand::List { policy, most } => {
            let most = most.min(&MAX_RANKED_KEYS).to_string();
            let policy = policy.iter().map(|policy| ("policy", &**policy));
            ("GET", build_target("/top", policy.chain([("n", &*most)])))
        }
        KeysCommand::Show(key) => ("GET", key.query_target(None)),
        KeysCommand::Reset { key, limit } => ("DELETE", key.query_target(limit.as_deref())),
    };
    let answer = client.request_json(method, &target).await?;
    let text = match command {
        KeysCommand::List { .. } => format_rejected_keys(&read_answer(&answer)),
        KeysCommand::Show(_) => format_key_status(&read_answer(&answer)),
        KeysCommand::Reset { .. } => format_reset(&read_answer(&answer)),
    };
    Ok(CommandOutput::new(&answer, text))
}

/// Reads an answer of the admin port. An unknown form is shown as if it were empty.
fn read_answer<'a, T: Deserialize<'a> + Default>(answer: &'a Value) -> T {
    T::deserialize(answer).unwrap_or_default()
}

/// Formats the most rejected keys.
fn format_rejected_keys(top: &TopDocument) -> String {
    let mut text = format!("{:>10}  {:<24} KEY\n", "REJECTED", "POLICY");
    for entry in &top.keys.entries {
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

impl KeysCommand {
    /// Whether the command is about a policy whose counters are in the memory of each instance.
    fn reads_instance_counters(&self, config: &Config) -> bool {
        let policy = match self {
            Self::List { policy, .. } => policy.as_deref(),
            Self::Show(key) | Self::Reset { key, .. } => Some(&*key.policy),
        };
        let policy = policy.and_then(|name| find_policy(config, name));
        policy.is_some_and(Policy::is_instance_scoped)
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

    fn resolve_against_config<'c>(
        &self,
        config: &'c Config,
    ) -> Result<ResolvedKey<'c>, AdminError> {
        resolve_key(&config.policy_table, &self.policy, &self.values)
    }
}
