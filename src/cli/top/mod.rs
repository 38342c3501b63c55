//! `tidegate top`: what the proxy on this machine does, live in a terminal, or once as a table or JSON.

mod frame;
mod screen;
mod seen;

use super::ask::{Answer, admin, ask};
use crate::admin::{AdminSettings, harmless};
use crate::config::{self, Sources};
use crate::listen::ListenAddress;
use frame::{Glyphs, Look, Order};
use seen::Seen;
use serde_json::{Value, json};
use std::io::IsTerminal;
use std::time::Duration;

/// Policies that are asked for: more than a screen shows, few enough for an answer every second.
const POLICIES: usize = 200;
/// Keys and paths.
const RANKS: usize = 30;
/// A table that goes into a pipe is as wide as it needs, within reason.
const WIDE: usize = 120;

#[derive(clap::Args, Debug)]
pub(super) struct Flags {
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
struct Desk {
    address: ListenAddress,
    settings: AdminSettings,
}

/// Shows it until somebody quits, or returns what is to be printed.
///
/// # Errors
/// A text for people, if nobody answers or the terminal can't be used.
pub(super) fn run(sources: &Sources, flags: &Flags) -> Result<String, String> {
    let settings = config::load_admin(sources).map_err(|report| report.to_string())?;
    let desk = Desk {
        address: admin(&settings)?,
        settings,
    };
    if flags.json {
        return Ok(harmless(&format!("{}\n", desk.look()?)));
    }
    let seen = Seen::of(&desk.look()?, None);
    let glyphs = Glyphs::of_this_terminal();
    let is_dumb = std::env::var_os("TERM").is_none_or(|term| term == "dumb");
    if flags.once || is_dumb || !std::io::stdout().is_terminal() {
        let look = Look {
            order: Order::Refused,
            glyphs,
            ..Look::default()
        };
        return Ok(frame::whole(&seen, &look, WIDE));
    }
    let from = desk.address.to_string();
    screen::show(
        move || desk.look(),
        seen,
        &from,
        Duration::from_secs(flags.every),
        glyphs,
    )
    .map(|()| String::new())
    .map_err(|error| format!("error: the terminal can't be used: {error}\n"))
}

impl Desk {
    /// All that is shown, at about one time.
    fn look(&self) -> Result<Value, String> {
        Ok(json!({
            "overview": self.ask("/overview?seconds=61")?,
            "policies": self.ask(&format!("/policies?limit={POLICIES}"))?,
            "top": self.ask(&format!("/top?n={RANKS}"))?,
        }))
    }

    fn ask(&self, target: &str) -> Result<Value, String> {
        let at = &self.address;
        let Answer { status, body } = ask(at, "GET", target, self.settings.token.as_ref())
            .map_err(|error| format!("error: {at}: {error}\n"))?;
        let told: Option<Value> = serde_json::from_str(&body).ok();
        match (status, told) {
            (200, Some(told)) => Ok(told),
            (_, told) => {
                let detail = told
                    .as_ref()
                    .and_then(|told| told.get("detail")?.as_str())
                    .unwrap_or_default();
                Err(format!(
                    "error: {at}: answered {status}: {}\n",
                    detail.escape_debug()
                ))
            }
        }
    }
}
