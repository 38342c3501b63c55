//! `tidegate top --fleet`: all instances that share the limits, and their rankings together.
//!
//! Missing or malformed fields are no error, as in [`super::snapshot`].

use super::format::{format_rate, format_short_duration, truncate_text};
use super::frame::{fit_to_screen, ranking_lines};
use super::screen_line::{LineStyle, ScreenLine};
use super::snapshot::{
    TopRankedEntry, escaped_text_or_empty, number_or_zero, parse_ranking, value_or_null,
};
use serde_json::Value;

/// Number of entries of each ranking in a pipe.
const PIPE_RANKING_LINES: usize = 10;

/// The displayed data of `GET /fleet`.
#[derive(Clone, Debug, Default)]
pub(super) struct FleetSnapshot {
    store: String,
    is_shared: bool,
    total: u64,
    answered: u64,
    rate_per_s: f64,
    problem: String,
    instances: Vec<FleetInstanceLine>,
    keys: Vec<TopRankedEntry>,
    paths: Vec<TopRankedEntry>,
}

/// One instance, as texts.
#[derive(Clone, Debug, Default)]
struct FleetInstanceLine {
    name: String,
    version: String,
    state: String,
    share: String,
    rate: String,
    uptime: String,
    admin: String,
    not_asked: String,
}

impl FleetSnapshot {
    pub(super) fn from_json(response: &Value) -> Self {
        let text = |name| escaped_text_or_empty(value_or_null(response, name));
        let list = value_or_null(response, "/instances").as_array();
        let instances = list.into_iter().flatten().map(FleetInstanceLine::from_json);
        let ranking = |entries, key| parse_ranking(value_or_null(response, entries), key);
        Self {
            store: text("/store"),
            is_shared: value_or_null(response, "/shared").as_bool().unwrap_or(true),
            total: number_or_zero(value_or_null(response, "/total")),
            answered: number_or_zero(value_or_null(response, "/answered")),
            rate_per_s: rate_or_zero(response),
            problem: text("/problem"),
            instances: instances.collect(),
            keys: ranking("/keys/entries", "key"),
            paths: ranking("/paths/entries", "path"),
        }
    }

    /// Renders all data as text for a pipe.
    pub(super) fn render_plain_text(&self, width: usize) -> String {
        let lines = self.render_lines(None, width, usize::MAX);
        lines.iter().fold(String::new(), |mut text, line| {
            text.push_str(line.text.trim_end());
            text.push('\n');
            text
        })
    }

    /// Renders a screen of exactly `height` lines, none wider than `width`.
    pub(super) fn render_screen(
        &self,
        error: Option<&str>,
        width: usize,
        height: usize,
    ) -> Vec<ScreenLine> {
        let rows = height.saturating_sub(1);
        let mut lines = fit_to_screen(self.render_lines(error, width, rows), width, rows);
        lines.push(ScreenLine::dim(truncate_text("q quit", width)));
        lines
    }

    fn render_lines(&self, error: Option<&str>, width: usize, height: usize) -> Vec<ScreenLine> {
        let counted = match self.is_shared {
            true => format!(
                "{} instances share the limits, {} answered",
                self.total, self.answered
            ),
            false => "1 instance: the memory store is not shared".to_owned(),
        };
        let title = format!(
            "tidegate fleet  store {}  {counted}  {}/s",
            self.store,
            format_rate(self.rate_per_s)
        );
        let mut lines = vec![ScreenLine {
            style: LineStyle::Title,
            text: title,
        }];
        let problem = Some(self.problem.as_str()).filter(|problem| !problem.is_empty());
        let alerts = error.into_iter().chain(problem);
        lines.extend(alerts.map(|alert| ScreenLine::alert(format!("! {alert}"))));
        lines.push(ScreenLine::plain(String::new()));
        let name_width = self.name_width();
        lines.push(ScreenLine {
            style: LineStyle::TableHeader,
            text: instance_row(
                name_width,
                ["instance", "state", "share", "per s", "up", "version"],
                "admin",
            ),
        });
        // Half of a screen is for the rankings.
        let max_instances = match height {
            usize::MAX => usize::MAX,
            height => (height / 2).saturating_sub(lines.len()).max(1),
        };
        lines.extend(self.instances.iter().take(max_instances).map(|one| {
            let columns = [
                one.name.as_str(),
                &one.state,
                &one.share,
                &one.rate,
                &one.uptime,
                &one.version,
            ];
            let admin = if one.not_asked.is_empty() {
                &one.admin
            } else {
                &one.not_asked
            };
            let text = instance_row(name_width, columns, admin);
            match one.not_asked.is_empty() {
                true => ScreenLine::plain(truncate_text(&text, width)),
                false => ScreenLine::dim(truncate_text(&text, width)),
            }
        }));
        let hidden = self.instances.len().saturating_sub(max_instances);
        if hidden > 0 {
            lines.push(ScreenLine::dim(format!("and {hidden} more")));
        }
        let left = height.saturating_sub(lines.len());
        let ranking_height = (left / 2).saturating_sub(2).min(PIPE_RANKING_LINES);
        for (title, ranking) in [("keys", &self.keys), ("paths", &self.paths)] {
            lines.push(ScreenLine::plain(String::new()));
            lines.extend(ranking_lines(title, ranking, ranking_height, width));
        }
        lines
    }

    fn name_width(&self) -> usize {
        let names = self.instances.iter();
        let longest = names.map(|one| one.name.chars().count()).max();
        longest.unwrap_or(0).clamp(8, 40)
    }
}

impl FleetInstanceLine {
    fn from_json(instance: &Value) -> Self {
        let text = |name| escaped_text_or_empty(value_or_null(instance, name));
        let or_dash = |text: String| {
            if text.is_empty() {
                "-".to_owned()
            } else {
                text
            }
        };
        let id = text("/id");
        let name = match text("/name") {
            name if name.is_empty() => id.get(..8).unwrap_or(&id).to_owned(),
            name => name,
        };
        let is_own = value_or_null(instance, "/self").as_bool() == Some(true);
        let store_is_degraded = text("/store") == "degraded";
        let rate = value_or_null(instance, "/decisions_per_s").as_f64();
        let share = value_or_null(instance, "/share").as_f64().unwrap_or(0.0);
        Self {
            name: if is_own { format!("{name}*") } else { name },
            version: or_dash(text("/version")),
            state: match store_is_degraded {
                true => "degraded".to_owned(),
                false => or_dash(text("/state")),
            },
            share: format!("{:.1}%", share * 100.0),
            rate: rate.map_or_else(|| "-".to_owned(), format_rate),
            uptime: value_or_null(instance, "/uptime_s")
                .as_u64()
                .map_or_else(|| "-".to_owned(), format_short_duration),
            admin: or_dash(text("/admin")),
            not_asked: text("/not_asked"),
        }
    }
}

fn rate_or_zero(value: &Value) -> f64 {
    let rate = value_or_null(value, "/decisions_per_s");
    rate.as_f64().unwrap_or(0.0)
}

fn instance_row(name_width: usize, columns: [&str; 6], last: &str) -> String {
    let [name, state, share, rate, uptime, version] = columns;
    format!(
        "{:<name_width$} {state:<10} {share:>6} {rate:>7} {uptime:>7} {version:<9} {last}",
        truncate_text(name, name_width)
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn sample_snapshot() -> FleetSnapshot {
        FleetSnapshot::from_json(&json!({
            "store": "redis", "shared": true, "total": 3, "answered": 2, "decisions_per_s": 30.0,
            "problem": null,
            "instances": [
                { "id": "aaaaaaaaaaaa", "name": "orders-0", "version": "1.0.0", "admin": "10.0.0.1:9090",
                  "self": true, "state": "ready", "store": "up", "share": 0.333, "decisions_per_s": 20.0,
                  "uptime_s": 65, "not_asked": null },
                { "id": "bbbbbbbbbbbb", "name": null, "version": null, "admin": null, "self": false,
                  "state": "alive", "share": 0.333, "decisions_per_s": null,
                  "not_asked": "its version does not report its admin address" },
                { "id": "c", "name": "\u{1b}[2J", "self": false, "state": "stopping", "share": 0.333,
                  "store": "degraded", "decisions_per_s": 10.0, "not_asked": null },
            ],
            "keys": { "entries": [{ "policy": "api", "key": "api/ann", "count": 7, "error": 0 }] },
            "paths": { "entries": [] },
        }))
    }

    #[test]
    fn shows_every_instance_and_why_one_was_not_asked() {
        let text = sample_snapshot().render_plain_text(120);
        let line = |part: &str| text.lines().find(|line| line.contains(part)).unwrap();
        assert!(line("tidegate fleet").contains("3 instances share the limits, 2 answered  30/s"));
        let own = line("orders-0*");
        for part in ["ready", "33.3%", "20", "1m5s", "1.0.0", "10.0.0.1:9090"] {
            assert!(own.contains(part), "{part} in {own}");
        }
        assert!(line("bbbbbbbb ").contains("its version does not report its admin address"));
        assert!(text.contains("degraded") && !text.contains('\u{1b}'));
        assert!(line("ann").contains('7'));
    }

    #[test]
    fn a_screen_has_its_exact_size() {
        for (width, height) in [(80, 24), (48, 10), (200, 50)] {
            let lines = sample_snapshot().render_screen(Some("no answer"), width, height);
            assert_eq!(lines.len(), height);
            assert!(lines.iter().all(|line| line.text.chars().count() <= width));
        }
    }
}
