//! `tidegate top`: shows the activity of the proxy on this machine, live in a terminal, or once as
//! a table or JSON.

mod format;
mod frame;
mod screen;
mod snapshot;
mod sparkline;

use super::admin_client::{AdminClientResponse, admin_address, send_request};
use crate::admin::{AdminSettings, escape_json_for_display};
use crate::config::{self, ConfigSources};
use crate::listen::ListenAddress;
use frame::{PolicySortOrder, ViewState};
use serde_json::{Value, json};
use snapshot::AdminApiSnapshot;
use sparkline::SparklineGlyphs;
use std::io::IsTerminal;
use std::time::Duration;

/// Number of policies to fetch: more than a screen shows, few enough to fetch every second.
const MAX_POLICIES: usize = 200;
/// Number of keys and of paths to fetch.
const MAX_RANKED_ENTRIES: usize = 30;
/// Maximum width of the table in columns if stdout is not a terminal.
const MAX_PIPE_WIDTH: usize = 120;

#[derive(clap::Args, Debug)]
pub(super) struct TopFlags {
    /// Print a table once and exit. This is the default if stdout is not a terminal.
    #[arg(long)]
    once: bool,
    /// Print the responses of the admin API once, as JSON: {"overview", "policies", "top"}.
    #[arg(long, conflicts_with = "once")]
    json: bool,
    /// Seconds between refreshes.
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=60))]
    every: u64,
}

/// Client for the admin API of one proxy.
#[derive(Clone, Debug)]
struct AdminClient {
    address: ListenAddress,
    settings: AdminSettings,
}

/// Runs the live view until the user quits, or returns the text to print.
///
/// # Errors
/// A message for the user if the admin port does not respond or the terminal can't be used.
pub(super) fn run(sources: &ConfigSources, flags: &TopFlags) -> Result<String, String> {
    let settings = config::load_admin_settings(sources).map_err(|report| report.to_string())?;
    let client = AdminClient {
        address: admin_address(&settings)?,
        settings,
    };
    if flags.json {
        return Ok(escape_json_for_display(&format!(
            "{}\n",
            client.fetch_responses()?
        )));
    }
    let snapshot = AdminApiSnapshot::from_json(&client.fetch_responses()?, None);
    let glyphs = SparklineGlyphs::from_locale();
    let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    if flags.once || is_dumb || !std::io::stdout().is_terminal() {
        let view = ViewState {
            sort_order: PolicySortOrder::Refused,
            glyphs,
            ..ViewState::default()
        };
        return Ok(frame::render_plain_text(&snapshot, &view, MAX_PIPE_WIDTH));
    }
    let address = client.address.to_string();
    screen::run_screen(
        move || client.fetch_responses(),
        snapshot,
        &address,
        Duration::from_secs(flags.every),
        glyphs,
    )
    .map(|()| String::new())
    .map_err(|error| format!("error: the terminal can't be used: {error}\n"))
}

impl AdminClient {
    /// Fetches all displayed data by three requests, one immediately after the other.
    fn fetch_responses(&self) -> Result<Value, String> {
        Ok(json!({
            "overview": self.fetch_json("/overview?seconds=61")?,
            "policies": self.fetch_json(&format!("/policies?limit={MAX_POLICIES}"))?,
            "top": self.fetch_json(&format!("/top?n={MAX_RANKED_ENTRIES}"))?,
        }))
    }

    fn fetch_json(&self, target: &str) -> Result<Value, String> {
        let address = &self.address;
        let AdminClientResponse { status, body } =
            send_request(address, "GET", target, self.settings.token.as_ref())
                .map_err(|error| format!("error: {address}: {error}\n"))?;
        let json: Option<Value> = serde_json::from_str(&body).ok();
        match (status, json) {
            (200, Some(json)) => Ok(json),
            (_, json) => {
                let detail = json
                    .as_ref()
                    .and_then(|problem| problem.get("detail")?.as_str())
                    .unwrap_or_default();
                Err(format!(
                    "error: {address}: answered {status}: {}\n",
                    detail.escape_debug()
                ))
            }
        }
    }
}
