//! `tidegate top`: what the proxy on this machine does, live in a terminal, or once as a table or JSON.

mod frame;
mod screen;
mod snapshot;

use super::admin_client::{AdminClientResponse, admin_address, send_request};
use crate::admin::{AdminSettings, escape_json};
use crate::config::{self, ConfigSources};
use crate::listen::ListenAddress;
use frame::{PolicySortOrder, SparklineGlyphs, ViewState};
use serde_json::{Value, json};
use snapshot::AdminApiSnapshot;
use std::io::IsTerminal;
use std::time::Duration;

/// Policies that are asked for: more than a screen shows, few enough for an answer every second.
const MAX_POLICIES: usize = 200;
/// Keys and paths.
const MAX_RANKED_ENTRIES: usize = 30;
/// A table that goes into a pipe is as wide as it needs, within reason.
const PIPE_WIDTH: usize = 120;

#[derive(clap::Args, Debug)]
pub(super) struct TopFlags {
    /// Print a table once and end. It is what happens anyway where there is no terminal.
    #[arg(long)]
    once: bool,
    /// Print what the admin port tells, once, as JSON: {"overview", "policies", "top"}.
    #[arg(long, conflicts_with = "once")]
    json: bool,
    /// Seconds between looks.
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=60))]
    every: u64,
}

/// Whom to ask.
#[derive(Clone, Debug)]
struct AdminClient {
    address: ListenAddress,
    settings: AdminSettings,
}

/// Shows it until somebody quits, or returns what is to be printed.
///
/// # Errors
/// A text for people, if nobody answers or the terminal can't be used.
pub(super) fn run(sources: &ConfigSources, flags: &TopFlags) -> Result<String, String> {
    let settings = config::load_admin_settings(sources).map_err(|report| report.to_string())?;
    let client = AdminClient {
        address: admin_address(&settings)?,
        settings,
    };
    if flags.json {
        return Ok(escape_json(&format!("{}\n", client.fetch_snapshot()?)));
    }
    let snapshot = AdminApiSnapshot::from_json(&client.fetch_snapshot()?, None);
    let glyphs = SparklineGlyphs::from_locale();
    let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    if flags.once || is_dumb || !std::io::stdout().is_terminal() {
        let view = ViewState {
            sort_order: PolicySortOrder::Refused,
            glyphs,
            ..ViewState::default()
        };
        return Ok(frame::render_table(&snapshot, &view, PIPE_WIDTH));
    }
    let address = client.address.to_string();
    screen::run_screen(
        move || client.fetch_snapshot(),
        snapshot,
        &address,
        Duration::from_secs(flags.every),
        glyphs,
    )
    .map(|()| String::new())
    .map_err(|error| format!("error: the terminal can't be used: {error}\n"))
}

impl AdminClient {
    /// All that is shown, at about one time.
    fn fetch_snapshot(&self) -> Result<Value, String> {
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
                    .and_then(|told| told.get("detail")?.as_str())
                    .unwrap_or_default();
                Err(format!(
                    "error: {address}: answered {status}: {}\n",
                    detail.escape_debug()
                ))
            }
        }
    }
}
