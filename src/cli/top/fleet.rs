//! `tidegate top --fleet`: all instances that share the limits, and their rankings together.

use super::format::{format_rate, format_short_duration};
use super::frame::{TopData, ViewState, ranking_lines};
use super::screen_line::{LineStyle, ScreenLine};
use super::snapshot::{TopRankedEntry, escaped_at, parse_ranking};
use crate::cli::json_fields::{is_true_at, list_at, number_at, value_at};
use crate::text::truncate_text;
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
    /// State, share, rate, uptime and version.
    columns: [String; 5],
    /// The address of the admin port, or why it was not queried.
    admin: String,
    is_asked: bool,
}

impl FleetSnapshot {
    fn from_json(response: &Value) -> Self {
        let instances = list_at(response, "/instances").iter();
        Self {
            store: escaped_at(response, "/store"),
            is_shared: value_at(response, "/shared").as_bool().unwrap_or(true),
            total: number_at(response, "/total"),
            answered: number_at(response, "/answered"),
            rate_per_s: value_at(response, "/decisions_per_s")
                .as_f64()
                .unwrap_or(0.0),
            problem: escaped_at(response, "/problem"),
            instances: instances.map(FleetInstanceLine::from_json).collect(),
            keys: parse_ranking(list_at(response, "/keys/entries"), "/key", &[]),
            paths: parse_ranking(list_at(response, "/paths/entries"), "/path", &[]),
        }
    }
}

impl TopData for FleetSnapshot {
    fn update(&mut self, response: &Value) {
        *self = Self::from_json(response);
    }

    fn row_count(&self) -> usize {
        0
    }

    fn extra_keys(&self, _view: &ViewState) -> String {
        String::new()
    }

    fn render_lines(
        &self,
        view: &ViewState,
        width: usize,
        height: Option<usize>,
    ) -> Vec<ScreenLine> {
        let counted = match self.is_shared {
            true => format!(
                "{} instances share the limits, {} answered",
                self.total, self.answered
            ),
            false => "1 instance: the memory store is not shared".to_owned(),
        };
        let paused = if view.is_paused { "[paused]  " } else { "" };
        let title = format!(
            "tidegate fleet  {paused}store {}  {counted}  {}/s",
            self.store,
            format_rate(self.rate_per_s)
        );
        let mut lines = vec![ScreenLine::new(LineStyle::Title, title)];
        lines.extend(view.error_line());
        if !self.problem.is_empty() {
            let problem = format!("! {}", self.problem);
            lines.push(ScreenLine::new(LineStyle::Alert, problem));
        }
        let names = self.instances.iter().map(|one| one.name.chars().count());
        let name_width = names.max().unwrap_or(0).clamp(8, 40);
        let titles = ["state", "share", "per s", "up", "version"];
        let titles = instance_row(name_width, "instance", titles, "admin");
        lines.extend([
            ScreenLine::default(),
            ScreenLine::new(LineStyle::TableHeader, titles),
        ]);
        // Half of a screen is for the rankings.
        let max_instances = height.map_or(usize::MAX, |height| {
            (height / 2).saturating_sub(lines.len()).max(1)
        });
        lines.extend(self.instances.iter().take(max_instances).map(|one| {
            let columns = one.columns.each_ref().map(String::as_str);
            let text = instance_row(name_width, &one.name, columns, &one.admin);
            let style = match one.is_asked {
                true => LineStyle::Plain,
                false => LineStyle::Dim,
            };
            ScreenLine::new(style, truncate_text(&text, width, '~'))
        }));
        let hidden = self.instances.len().saturating_sub(max_instances);
        if hidden > 0 {
            lines.push(ScreenLine::new(
                LineStyle::Dim,
                format!("and {hidden} more"),
            ));
        }
        let left = height.map_or(usize::MAX, |height| height.saturating_sub(lines.len()));
        let ranking_height = (left / 2).saturating_sub(2).min(PIPE_RANKING_LINES);
        for (title, ranking) in [("keys", &self.keys), ("paths", &self.paths)] {
            lines.push(ScreenLine::default());
            lines.extend(ranking_lines(title, ranking, ranking_height, width));
        }
        lines
    }
}

impl FleetInstanceLine {
    fn from_json(instance: &Value) -> Self {
        let or_dash = |text: String| {
            if text.is_empty() {
                "-".to_owned()
            } else {
                text
            }
        };
        let (id, name) = (escaped_at(instance, "/id"), escaped_at(instance, "/name"));
        let name = match name.as_str() {
            "" => id.get(..8).unwrap_or(&id),
            name => name,
        };
        let own_mark = if is_true_at(instance, "/self") {
            "*"
        } else {
            ""
        };
        let state = match escaped_at(instance, "/store") == "degraded" {
            true => "degraded".to_owned(),
            false => or_dash(escaped_at(instance, "/state")),
        };
        let share = value_at(instance, "/share").as_f64().unwrap_or(0.0);
        let rate = value_at(instance, "/decisions_per_s")
            .as_f64()
            .map(format_rate);
        let uptime = value_at(instance, "/uptime_s").as_u64();
        let not_asked = escaped_at(instance, "/not_asked");
        Self {
            name: format!("{name}{own_mark}"),
            columns: [
                state,
                format!("{:.1}%", share * 100.0),
                or_dash(rate.unwrap_or_default()),
                or_dash(uptime.map(format_short_duration).unwrap_or_default()),
                or_dash(escaped_at(instance, "/version")),
            ],
            is_asked: not_asked.is_empty(),
            admin: match not_asked.is_empty() {
                true => or_dash(escaped_at(instance, "/admin")),
                false => not_asked,
            },
        }
    }
}

fn instance_row(name_width: usize, name: &str, columns: [&str; 5], last: &str) -> String {
    let [state, share, rate, uptime, version] = columns;
    format!(
        "{:<name_width$} {state:<10} {share:>6} {rate:>7} {uptime:>7} {version:<9} {last}",
        truncate_text(name, name_width, '~')
    )
}

#[cfg(test)]
mod tests {
    use super::super::frame::{render_plain_text, render_screen};
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
        let text = render_plain_text(&sample_snapshot(), &ViewState::default(), 120);
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
        let view = ViewState {
            last_error: Some("no answer".to_owned()),
            ..ViewState::default()
        };
        for (width, height) in [(80, 24), (48, 10), (200, 50)] {
            let lines = render_screen(&sample_snapshot(), &view, width, height);
            assert_eq!(lines.len(), height);
            assert!(lines.iter().all(|line| line.text.chars().count() <= width));
        }
    }
}
