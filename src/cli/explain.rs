//! `tidegate explain`: what would happen to this request, and why?

use super::request::Asked;
use super::standing;
use crate::admin::Told;
use crate::app::Stores;
use crate::app::explain::{self, Expected, Explained, Unclear};
use crate::config::{self, Config, Sources, StoreSettings};
use crate::enforcer::{Explanation, Step};
use serde_json::json;

/// Tells which policies match, which keys and limits the request would use, and where they stand: in words, or as the
/// admin port does. What was passed over in reading the request goes to stderr.
///
/// # Errors
/// A text for people, if the configuration or the request is wrong.
#[allow(clippy::print_stderr, reason = "notes are no data")]
pub(super) fn explain(sources: &Sources, asked: &Asked, as_json: bool) -> Result<String, String> {
    let config = config::load(sources).map_err(|report| report.to_string())?;
    let (told, notes) = asked.told().map_err(|why| format!("error: {why}\n"))?;
    for note in notes {
        eprintln!("note: {}", note.escape_debug());
    }
    let title = format!(
        "{} {} from {}\n\n",
        told.method.escape_debug(),
        told.url.escape_debug(),
        told.ip
    );
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| format!("error: {error}\n"))?;
    runtime.block_on(async {
        let store = Stores::new(&config.store).for_looking().await;
        match explain::explain(&store, &config.table, &told).await {
            Ok(explained) if as_json => Ok(in_json(&config, &told, &explained)),
            Ok(explained) => {
                let token = explained.token.as_ref().map_or_else(String::new, |fault| {
                    format!("The request's token says nothing: {fault}.\n")
                });
                Ok(title + &tell(&config, &explained.explanation) + &token)
            }
            Err(Unclear::NoRequest(why)) => Err(format!("error: {why}\n")),
            Err(Unclear::TurnedAway(why)) if as_json => Ok(format!(
                "{:#}\n",
                with_request(&told, explain::turned_away(&why))
            )),
            Err(Unclear::TurnedAway(why)) => Err(format!("{title}error: {why}\n")),
        }
    })
}

fn in_json(config: &Config, told: &Told, explained: &Explained<'_>) -> String {
    // An empty store in this process says nothing about the proxy's.
    let known = matches!(config.store, StoreSettings::Redis(_));
    format!(
        "{:#}\n",
        with_request(told, explain::in_json(explained, known))
    )
}

fn with_request(told: &Told, mut answer: serde_json::Value) -> serde_json::Value {
    if let Some(answer) = answer.as_object_mut() {
        answer.insert(
            "request".to_owned(),
            json!({ "method": told.method, "url": told.url, "ip": told.ip }),
        );
    }
    answer
}

fn tell(config: &Config, explanation: &Explanation<'_>) -> String {
    let live = matches!(config.store, StoreSettings::Redis(_));
    let now_us = explanation.store.as_ref().ok().copied().filter(|_| live);
    let mut text = String::new();
    for (policy, step) in &explanation.steps {
        let shadow = if policy.shadow { " (shadow)" } else { "" };
        let told = match step {
            Step::Unmet(unmet) => unmet.to_string(),
            Step::NotReached => "not reached".to_owned(),
            Step::Exempts => "matches: exempt".to_owned(),
            Step::Denies => "matches: denied".to_owned(),
            Step::Skipped => "matches, but a part of its key is missing: skipped".to_owned(),
            Step::CannotKey(fault) => format!("matches, but {fault}"),
            Step::Limits(limits) => format!("matches: key {}, cost {}", limits.key, limits.cost),
        };
        text.push_str(&format!("  {:<16} {told}{shadow}\n", policy.name));
        if let Step::Limits(limits) = step {
            if let Some((until_us, now_us)) = limits.blocked_until_us.zip(now_us) {
                let left = standing::wait(until_us.saturating_sub(now_us));
                text.push_str(&format!("  {:<16}   blocked for {left}\n", ""));
            }
            for (at, named) in limits.limits.iter().enumerate() {
                let standing = limits.standings.get(at).zip(now_us);
                text.push_str(&format!(
                    "  {:<16}   {}\n",
                    "",
                    standing::line(named, standing)
                ));
            }
        }
    }
    text.push('\n');
    text.push_str(&verdict(explanation, now_us.is_some()));
    if !live {
        text.push_str(
            "Where limits stand is known only to the running proxy: store.kind is \"memory\".\n",
        );
    } else if let Err(unavailable) = &explanation.store {
        text.push_str(&format!(
            "Where limits stand is not known: {unavailable}.\n"
        ));
    }
    text
}

/// What the client would get, as far as it can be told.
fn verdict(explanation: &Explanation<'_>, known: bool) -> String {
    match explain::expected(explanation, known) {
        Expected::Denied(policy) => format!("Denied by {policy}: 403.\n"),
        Expected::CannotKey(policy) => format!("Refused by {policy}: 400.\n"),
        Expected::Free => "Admitted: no limit applies.\n".to_owned(),
        Expected::Depends => "Admitted if these limits have room.\n".to_owned(),
        Expected::Admitted => "Admitted.\n".to_owned(),
        Expected::Rejected(policies) => format!("Rejected by {}: 429.\n", policies.join(", ")),
    }
}
