//! `tidegate keys`: the counters in Redis, for people on call.

use super::standing::{self, wait};
use crate::app::Stores;
use crate::config::{self, Config, Sources, StoreSettings, duration_words};
use crate::limiter::{Algorithm, Charge, Key};
use crate::policy::{Action, NamedLimit, Policy, Quota};
use crate::store::redis::{Counter, Inspector, RedisSettings};
use std::collections::BTreeSet;
use std::time::Duration;

#[derive(clap::Subcommand, Debug)]
pub(super) enum Command {
    /// List counters, the fullest first.
    List {
        /// Only those of this policy.
        #[arg(long, value_name = "NAME")]
        policy: Option<String>,
        /// How many counters are looked at.
        #[arg(long, value_name = "N", default_value_t = 100)]
        most: usize,
    },
    /// Show where one key of a policy stands.
    Show(Which),
    /// Forget what one key of a policy has used. Felt by every instance within a second.
    Reset(Which),
}

/// A policy's key by its values.
#[derive(clap::Args, Debug)]
pub(super) struct Which {
    /// The policy.
    policy: String,
    /// Its key's values in order, e.g. a client address; "" for one that is absent.
    values: Vec<String>,
}

/// Does what is asked and returns what to print.
///
/// # Errors
/// A text for people.
pub(super) fn run(sources: &Sources, command: &Command) -> Result<String, String> {
    let config = config::load(sources).map_err(|report| report.to_string())?;
    let StoreSettings::Redis(redis) = &config.store else {
        return Err("error: store.kind is \"memory\": its counters are inside the running proxy\n".to_owned());
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| format!("error: {error}\n"))?;
    runtime.block_on(async {
        match command {
            Command::List { policy, most } => list(redis, policy.as_deref(), *most).await,
            Command::Show(which) => show(&config, which).await,
            Command::Reset(which) => reset(&config, redis, which).await,
        }
    })
}

async fn list(redis: &RedisSettings, policy: Option<&str>, most: usize) -> Result<String, String> {
    let inspector = connect(redis).await?;
    let (mut counters, more) = inspector.list(policy, most).await.map_err(sentence)?;
    counters.sort_by(|a, b| b.used.cmp(&a.used).then_with(|| a.key.cmp(&b.key)));
    let mut text = format!("{:>10}  {:<24} {:<14} KEY\n", "USED", "COUNTED BY", "FREES IN");
    for counter in &counters {
        text.push_str(&format!(
            "{:>10}  {:<24} {:<14} {}\n",
            counter.used,
            counted_by(counter),
            if counter.used == 0 { "-".to_owned() } else { wait(counter.frees_in_us) },
            counter.readable.as_deref().unwrap_or(&counter.key).escape_debug(),
        ));
    }
    if more {
        text.push_str(&format!("There are more: these {} were looked at (--most).\n", counters.len()));
    }
    Ok(text)
}

async fn show(config: &Config, which: &Which) -> Result<String, String> {
    let (policy, quota, key, limits) = find(config, which)?;
    // Looking costs nothing, and is atomic like a decision.
    let charges = charges(&key, quota, limits);
    let store = Stores::new(&config.store).for_worker().await;
    let decision = store.decide(&charges).await.map_err(|error| format!("error: {error}\n"))?;
    let mut text = format!("{key}\n");
    let mut standings = decision.standings.iter().flatten();
    let block = quota.block.and_then(|_| standings.next()?.grows_at_us);
    let mut full = block.is_some();
    if let Some(until_us) = block {
        let left = standing::wait(until_us.saturating_sub(decision.now_us));
        text.push_str(&format!("  blocked for {left}\n"));
    }
    for (named, standing) in limits.iter().zip(standings) {
        full |= standing.remaining < quota.cost.least();
        text.push_str(&format!("  {}\n", standing::line(named, Some((standing, decision.now_us)))));
    }
    text.push_str(match (full, policy.shadow) {
        (true, false) => "Rejected now.\n",
        (true, true) => "Would be rejected now (shadow).\n",
        (false, _) => "Admitted now.\n",
    });
    Ok(text)
}

async fn reset(config: &Config, redis: &RedisSettings, which: &Which) -> Result<String, String> {
    let (_, quota, key, limits) = find(config, which)?;
    let charges = charges(&key, quota, limits);
    let inspector = connect(redis).await?;
    let count = inspector.reset(&charges).await.map_err(sentence)?;
    Ok(format!("{key}: {count} of {} counters were in use, and are forgotten\n", charges.len()))
}

async fn connect(redis: &RedisSettings) -> Result<Inspector, String> {
    Inspector::connect(redis.clone()).await.map_err(sentence)
}

fn sentence(error: impl std::fmt::Display) -> String {
    format!("error: {error}\n")
}

fn find<'c>(
    config: &'c Config,
    which: &Which,
) -> Result<(&'c Policy, &'c Quota, Key, &'c [NamedLimit]), String> {
    let policies = config.table.policies();
    let Some(policy) = policies.iter().find(|policy| *policy.name == *which.policy) else {
        let names: BTreeSet<&str> = policies.iter().map(|policy| &*policy.name).collect();
        let names: Vec<&str> = names.into_iter().collect();
        return Err(format!(
            "error: no policy is called {:?}; there are {}\n",
            which.policy,
            names.join(", ")
        ));
    };
    let Action::Limit(quota) = &policy.action else {
        return Err(format!("error: policy {} has no limits\n", policy.name));
    };
    let (key, limits) = quota
        .select_by_hand(&policy.name, &which.values, &config.table.client, &config.table.path)
        .map_err(sentence)?;
    Ok((policy, quota, key, limits))
}

/// What `quota` keeps for a key: the block first, if it has one.
fn charges<'a>(key: &'a Key, quota: &'a Quota, limits: &'a [NamedLimit]) -> Vec<Charge<'a>> {
    let limits = limits.iter().map(|named| &named.limit);
    let kept = quota.block.iter().chain(limits);
    kept.map(|limit| Charge { shards: quota.shards, ..Charge::new(limit, key, 0) }).collect()
}

fn counted_by(counter: &Counter) -> String {
    if counter.algorithm == Algorithm::Block {
        return standing::algorithm(counter.algorithm).to_owned();
    }
    let per = duration_words(Duration::from_micros(counter.per_us));
    format!("{} per {per}", standing::algorithm(counter.algorithm))
}
