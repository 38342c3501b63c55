//! `tidegate top`: shows the activity of the proxy on this machine, live in a terminal, or once as
//! a table or JSON.

mod fleet;
mod frame;
mod instance;
mod screen;

use super::admin_client::AdminClient;
use super::output::{CommandError, block_on, has_colours};
use crate::admin::{FleetDocument, escape_json_for_display};
use crate::config::{ConfigSources, parse_duration};
use frame::{TopData, ViewState};
use instance::InstanceData;
use serde_json::{Value, json};
use std::env;
use std::io::IsTerminal;
use std::time::Duration;

/// Number of policies to fetch: more than a screen shows, few enough to fetch every second.
const MAX_POLICIES: usize = 200;
/// Number of keys and of paths to fetch.
const MAX_RANKED_ENTRIES: usize = 30;

#[derive(clap::Args, Debug)]
pub(super) struct TopFlags {
    /// Print a table once and exit. This is the default if stdout is not a terminal.
    #[arg(long)]
    once: bool,
    /// Show all instances that share the limits, and their most refused keys and paths together.
    #[arg(long)]
    fleet: bool,
    /// Print the responses of the admin API once, as JSON: {"overview", "policies", "top"}, or with
    /// --fleet that of GET /fleet.
    #[arg(long)]
    json: bool,
    /// Time between refreshes, from 1s to 60s; a number alone is in seconds.
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = parse_interval)]
    every: Duration,
}

fn parse_interval(text: &str) -> Result<Duration, &'static str> {
    let seconds = text.parse().map(Duration::from_secs).ok();
    let interval = seconds.or_else(|| parse_duration(text));
    interval
        .filter(|interval| (1..=60).contains(&interval.as_secs()))
        .ok_or("expected a duration from 1s to 60s")
}

/// Runs the live view until the user quits, or returns the text to print.
///
/// # Errors
/// A message for the user if the admin port does not respond or the terminal can't be used.
pub(super) fn run(sources: &ConfigSources, flags: &TopFlags) -> Result<String, CommandError> {
    let client = AdminClient::from_sources(sources)?;
    let fetch = if flags.fleet {
        fetch_fleet
    } else {
        fetch_responses
    };
    let response = fetch(&client)?;
    if flags.json {
        return Ok(escape_json_for_display(&format!("{response}\n")));
    }
    let mut data: Box<dyn TopData> = if flags.fleet {
        Box::new(FleetDocument::default())
    } else {
        Box::new(InstanceData::default())
    };
    data.update(escape_texts(response));
    let mut view = ViewState {
        has_blocks: is_utf8_locale(),
        has_colours: has_colours(),
        ..ViewState::default()
    };
    let is_dumb = env::var_os("TERM").is_none_or(|term| term == "dumb");
    if flags.once || is_dumb || !std::io::stdout().is_terminal() {
        return Ok(frame::render_plain_text(&*data, &view));
    }
    view.is_live = true;
    view.address = client.address().to_string();
    let fetch_escaped = move || fetch(&client).map(escape_texts);
    screen::run_screen(fetch_escaped, data, view, flags.every)
        .map_err(|error| format!("error: the terminal can't be used: {error}\n"))?;
    Ok(String::new())
}

/// Whether the terminal shows UTF-8, by the variables of the locale.
fn is_utf8_locale() -> bool {
    let names = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter();
    let mut values = names.filter_map(|name| env::var(name).ok());
    let locale = values.find(|value| !value.is_empty()).unwrap_or_default();
    let locale = locale.to_ascii_lowercase();
    locale.contains("utf-8") || locale.contains("utf8")
}

/// Escapes all texts of a response, so that clients cannot send control characters to the terminal.
fn escape_texts(value: Value) -> Value {
    match value {
        Value::String(text) => escape_text(&text).into(),
        Value::Array(values) => values.into_iter().map(escape_texts).collect(),
        Value::Object(fields) => {
            let escape = |(name, value): (String, Value)| (escape_text(&name), escape_texts(value));
            fields.into_iter().map(escape).collect()
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => value,
    }
}

/// Escapes all characters except printable ASCII. Each character of the result is one column wide,
/// and none controls the terminal.
fn escape_text(text: &str) -> String {
    let escape = |letter: char| match letter {
        ' '..='~' => letter.to_string(),
        _ => letter.escape_default().to_string(),
    };
    text.chars().map(escape).collect()
}

/// Fetches all displayed data by three requests, one immediately after the other.
fn fetch_responses(client: &AdminClient) -> Result<Value, CommandError> {
    block_on(async {
        Ok(json!({
            "overview": client.get_json_at_once("/overview?seconds=61").await?,
            "policies": client.get_json_at_once(&format!("/policies?limit={MAX_POLICIES}")).await?,
            "top": client.get_json_at_once(&format!("/top?n={MAX_RANKED_ENTRIES}")).await?,
        }))
    })?
}

/// Fetches the view of all instances. The proxy asks the other instances first, which may take
/// seconds. The quick request before it finds out whether the proxy answers at all.
fn fetch_fleet(client: &AdminClient) -> Result<Value, CommandError> {
    block_on(async {
        client.get_json_at_once("/overview?seconds=1").await?;
        let target = format!("/fleet?n={MAX_RANKED_ENTRIES}");
        client.request_json("GET", &target).await
    })?
}
