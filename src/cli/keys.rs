//! `tidegate keys`: the counters in Redis, for people on call.

use super::standing::{self, wait};
use crate::app::Stores;
use crate::app::keys::{Found, find};
use crate::app::limits::{self, algorithm};
use crate::config::{self, Config, Sources, StoreSettings, duration_words};
use crate::limiter::Algorithm;
use crate::store::redis::{Counter, Inspector, RedisSettings};
use serde_json::{Value, json};
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
pub(super) fn run(sources: &Sources, command: &Command, as_json: bool) -> Result<String, String> {
    let config = config::load(sources).map_err(|report| report.to_string())?;
    let StoreSettings::Redis(redis) = &config.store else {
        return Err(
            "error: store.kind is \"memory\": its counters are inside the running proxy\n"
                .to_owned(),
        );
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| format!("error: {error}\n"))?;
    runtime.block_on(async {
        match command {
            Command::List { policy, most } => list(redis, policy.as_deref(), *most, as_json).await,
            Command::Show(which) => show(&config, which, as_json).await,
            Command::Reset(which) => reset(&config, which, as_json).await,
        }
    })
}

async fn list(
    redis: &RedisSettings,
    policy: Option<&str>,
    most: usize,
    as_json: bool,
) -> Result<String, String> {
    let inspector = connect(redis).await?;
    let (mut counters, more) = inspector.list(policy, most).await.map_err(sentence)?;
    counters.sort_by(|a, b| b.used.cmp(&a.used).then_with(|| a.key.cmp(&b.key)));
    if as_json {
        let counters: Vec<Value> = counters.iter().map(counter).collect();
        return Ok(format!(
            "{:#}\n",
            json!({ "counters": counters, "more": more })
        ));
    }
    let mut text = format!(
        "{:>10}  {:<24} {:<14} KEY\n",
        "USED", "COUNTED BY", "FREES IN"
    );
    for counter in &counters {
        text.push_str(&format!(
            "{:>10}  {:<24} {:<14} {}\n",
            counter.used,
            counted_by(counter),
            if counter.used == 0 {
                "-".to_owned()
            } else {
                wait(counter.frees_in_us)
            },
            counter
                .readable
                .as_deref()
                .unwrap_or(&counter.key)
                .escape_debug(),
        ));
    }
    if more {
        text.push_str(&format!(
            "There are more: these {} were looked at (--most).\n",
            counters.len()
        ));
    }
    Ok(text)
}

fn counter(counter: &Counter) -> Value {
    json!({
        "key": counter.key,
        "readable": counter.readable,
        "algorithm": algorithm(counter.algorithm),
        "per_s": limits::seconds(counter.per_us),
        "used": counter.used,
        "frees_in_s": if counter.used == 0 { Value::Null } else { limits::seconds(counter.frees_in_us) },
    })
}

async fn show(config: &Config, which: &Which, as_json: bool) -> Result<String, String> {
    let found = which.find(config)?;
    let store = Stores::new(&config.store).for_looking().await;
    let stand = found.look(&store).await.map_err(sentence)?;
    if as_json {
        return Ok(format!("{:#}\n", found.in_json(&stand)));
    }
    let mut text = format!("{}\n", found.key);
    if let Some(until_us) = stand.blocked_until_us {
        let left = standing::wait(until_us.saturating_sub(stand.now_us));
        text.push_str(&format!("  blocked for {left}\n"));
    }
    for (named, standing) in found.limits.iter().zip(&stand.standings) {
        text.push_str(&format!(
            "  {}\n",
            standing::line(named, Some((standing, stand.now_us)))
        ));
    }
    text.push_str(match (found.is_full(&stand), found.policy.shadow) {
        (true, false) => "Rejected now.\n",
        (true, true) => "Would be rejected now (shadow).\n",
        (false, _) => "Admitted now.\n",
    });
    Ok(text)
}

async fn reset(config: &Config, which: &Which, as_json: bool) -> Result<String, String> {
    let found = which.find(config)?;
    let count = found
        .reset(&Stores::new(&config.store))
        .await
        .map_err(sentence)?;
    if as_json {
        let told =
            json!({ "policy": found.policy.name, "key": found.key.readable(), "forgotten": count });
        return Ok(format!("{told:#}\n"));
    }
    Ok(format!(
        "{}: {count} of {} counters were in use, and are forgotten\n",
        found.key,
        found.charges().len()
    ))
}

async fn connect(redis: &RedisSettings) -> Result<Inspector, String> {
    Inspector::connect(redis.clone()).await.map_err(sentence)
}

fn sentence(error: impl std::fmt::Display) -> String {
    format!("error: {error}\n")
}

impl Which {
    fn find<'c>(&self, config: &'c Config) -> Result<Found<'c>, String> {
        find(&config.table, &self.policy, &self.values).map_err(sentence)
    }
}

fn counted_by(counter: &Counter) -> String {
    if counter.algorithm == Algorithm::Block {
        return algorithm(counter.algorithm).to_owned();
    }
    let per = duration_words(Duration::from_micros(counter.per_us));
    format!("{} per {per}", algorithm(counter.algorithm))
}
