//! `tidegate overrides`: limits and blocks of single keys, in the store. Changes Redis itself. With
//! the memory store, it asks the admin port of the running proxy.

mod csv_records;
mod export;
mod import;
pub(super) mod store_client;

use super::output::{CommandError, CommandOutput, block_on};
use crate::admin::{AdminError, OverrideListDocument, OverrideRemovalDocument};
use crate::app::key_status::{find_limiting_policy, resolve_override_key};
use crate::app::override_store::sort_listing;
use crate::app::overrides::{
    OverrideInput, describe_rule, describe_stored_override, format_time_ms, parse_expiry,
    resolve_override,
};
use crate::clock::Clock;
use crate::config::{self, Config, ConfigSources};
use crate::limiter::{Key, LimitAmounts};
use crate::store::StoredOverride;
use export::{ExportArguments, export_overrides};
use import::{ImportArguments, import_overrides};
use std::process::ExitCode;
use store_client::StoreClient;

#[derive(clap::Subcommand, Debug)]
pub(super) enum OverridesCommand {
    /// Set the override of one key. Other limits of its override stay, which needs the same expiry.
    Set(Box<SetArguments>),
    /// Remove the override of one key: the limits of the configuration apply again.
    Remove(OverrideKey),
    /// Show the override of one key.
    Show(OverrideKey),
    /// List the overrides, of all policies or of one.
    List {
        /// Only list overrides of this policy.
        policy: Option<String>,
        /// Maximum number of overrides to list.
        #[arg(long, value_name = "N", default_value_t = 1000)]
        most: usize,
    },
    /// Set the overrides of a CSV or JSON Lines file, one per line. Wrong lines are reported and
    /// left out.
    ///
    /// JSON Lines have the fields of PUT /overrides/{policy} and "policy". A CSV header names the
    /// columns: policy, key, key2 (the second value of the key), requests, burst, limit, limits
    /// (several: minute=100,day=5000), unlimited, blocked, expires, expires_at, note, author. A
    /// record has at most 64 KiB and is set as a whole. After a failure of the store, --from-line
    /// continues.
    Import(ImportArguments),
    /// Write all overrides to stdout, in a form that import reads: the backup.
    Export(ExportArguments),
}

/// Selects a key by its policy and values.
#[derive(clap::Args, Debug)]
pub(super) struct OverrideKey {
    /// Name of a policy with dynamic = true.
    policy: String,
    /// Values of the key in order, e.g. a client address; "" for an absent value.
    #[arg(value_name = "KEY")]
    values: Vec<String>,
}

#[derive(clap::Args, Debug)]
pub(super) struct SetArguments {
    #[command(flatten)]
    key: OverrideKey,
    /// Requests per period of the limit.
    #[arg(long, value_name = "N", conflicts_with_all = ["unlimited", "block"])]
    requests: Option<u64>,
    /// Name of the limit, if the policy has several.
    #[arg(long, value_name = "NAME", requires = "requests")]
    limit: Option<String>,
    /// Burst of a token bucket [default: as --requests].
    #[arg(long, value_name = "N", requires = "requests")]
    burst: Option<u64>,
    /// Admit every request of the key, and charge nothing.
    #[arg(long, conflicts_with = "block")]
    unlimited: bool,
    /// Reject every request of the key.
    #[arg(long)]
    block: bool,
    /// When the override ends: after a duration, or at a time such as 2027-01-31T00:00:00Z
    /// [default: never].
    #[arg(long, value_name = "WHEN")]
    expires: Option<String>,
    /// Why, in one line.
    #[arg(long, value_name = "TEXT")]
    note: Option<String>,
    /// Author of the override.
    #[arg(long, value_name = "TEXT")]
    author: Option<String>,
}

/// Runs the command and returns the text to print.
///
/// # Errors
/// A message for the user if the key or the override is invalid, or the store does not respond.
pub(super) fn run(
    sources: &ConfigSources,
    command: &OverridesCommand,
) -> Result<CommandOutput, CommandError> {
    let config = config::load(sources)?;
    block_on(async {
        if let OverridesCommand::List {
            policy: Some(name), ..
        }
        | OverridesCommand::Export(ExportArguments {
            policy: Some(name), ..
        }) = command
        {
            find_limiting_policy(&config.policy_table, name)?;
        }
        let store = StoreClient::open(&config).await?;
        match command {
            OverridesCommand::Set(arguments) => {
                let now_us = Clock::system().now_us();
                let input = arguments.to_input(now_us)?;
                let entered = resolve_override(&config.policy_table, &input, now_us)?;
                let stored = store.set_and_merge(&entered, now_us).await?;
                Ok(answer_with_override(&stored))
            }
            OverridesCommand::Remove(key) => {
                let key = key.resolve(&config)?;
                let removal = OverrideRemovalDocument {
                    removed: store.remove(&key).await?,
                    policy: key.policy_name().to_owned(),
                    key: key.value_texts(),
                };
                let text = match removal.removed {
                    true => format!("{key}: override removed\n"),
                    false => format!("{key}: had no override\n"),
                };
                Ok(CommandOutput::new(&removal, text))
            }
            OverridesCommand::Show(key) => {
                let key = key.resolve(&config)?;
                Ok(match store.find(&key).await? {
                    Some(stored) => answer_with_override(&stored),
                    None => CommandOutput::new(&(), format!("{key}: no override\n")),
                })
            }
            OverridesCommand::List { policy, most } => {
                list_overrides(&store, policy.as_deref(), *most).await
            }
            OverridesCommand::Import(arguments) => {
                import_overrides(&store, &config, arguments).await
            }
            OverridesCommand::Export(arguments) => {
                export_overrides(&store, &config, arguments).await?;
                Ok(ExitCode::SUCCESS.into())
            }
        }
    })?
}

async fn list_overrides(
    store: &StoreClient,
    policy: Option<&str>,
    max_listed: usize,
) -> Result<CommandOutput, CommandError> {
    let mut found = Vec::new();
    let visited = store.visit(policy, |stored| {
        found.push(stored);
        found.len() <= max_listed
    });
    visited.await?;
    let (listed, more) = sort_listing(found, max_listed);
    let mut text: String = listed.iter().map(format_override).collect();
    if more {
        text.push_str(&format!(
            "There are more overrides; listed {} (--most).\n",
            listed.len()
        ));
    }
    let document = OverrideListDocument {
        overrides: listed.iter().map(describe_stored_override).collect(),
        more,
    };
    Ok(CommandOutput::new(&document, text))
}

fn answer_with_override(stored: &StoredOverride) -> CommandOutput {
    CommandOutput::new(&describe_stored_override(stored), format_override(stored))
}

/// One line: the key, the rule, and what else is known.
fn format_override(stored: &StoredOverride) -> String {
    let mut text = format!(
        "{:<40} {}",
        stored.key.to_readable_string(),
        describe_rule(&stored.rule)
    );
    if let Some(expires_at) = stored.expires_at_ms.and_then(format_time_ms) {
        text.push_str(&format!(", until {expires_at}"));
    }
    if let Some(author) = &stored.author {
        text.push_str(&format!(", by {}", author.escape_debug()));
    }
    if let Some(note) = &stored.note {
        text.push_str(&format!(": {}", note.escape_debug()));
    }
    text.push('\n');
    text
}

impl OverrideKey {
    fn resolve(&self, config: &Config) -> Result<Key, AdminError> {
        resolve_override_key(&config.policy_table, &self.policy, &self.values)
    }
}

impl SetArguments {
    fn to_input(&self, now_us: u64) -> Result<OverrideInput, String> {
        let limits = self.requests.map(|requests| LimitAmounts {
            limit: self.limit.as_deref().unwrap_or_default().into(),
            requests,
            burst: self.burst,
        });
        let expires = self.expires.as_deref();
        let (duration, at) = if expires.is_some_and(|text| text.contains('T')) {
            (None, expires)
        } else {
            (expires, None)
        };
        Ok(OverrideInput {
            policy: self.key.policy.clone(),
            values: self.key.values.clone(),
            limits: limits.into_iter().collect(),
            is_unlimited: self.unlimited,
            is_blocked: self.block,
            expires_at_ms: parse_expiry(duration, at, now_us)?,
            note: self.note.clone(),
            author: self.author.clone(),
        })
    }
}
