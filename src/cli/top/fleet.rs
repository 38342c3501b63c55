//! `tidegate top --fleet`: all instances that share the limits, and their rankings together.

use super::format::{format_rate, format_short_duration};
use super::frame::{TopData, ViewState, ranking_lines};
use super::screen_line::{LineStyle, ScreenLine};
use super::snapshot::list_refused;
use crate::admin::{FleetDocument, FleetInstanceDocument};
use crate::text::truncate_text;
use serde::Deserialize;
use serde_json::Value;

/// Number of entries of each ranking in a pipe.
const PIPE_RANKING_LINES: usize = 10;

impl TopData for FleetDocument {
    fn update(&mut self, response: Value) {
        *self = Self::deserialize(response).unwrap_or_default();
    }

    fn render_lines(
        &self,
        view: &ViewState,
        width: usize,
        height: Option<usize>,
    ) -> Vec<ScreenLine> {
        let counted = match self.shared {
            true if self.total == 1 => "1 instance: no other shares the limits".to_owned(),
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
            format_rate(self.decisions_per_s)
        );
        let mut lines = vec![ScreenLine::new(LineStyle::Title, title)];
        lines.extend(view.error_line());
        if let Some(problem) = &self.problem {
            let problem = format!("! {problem}");
            lines.push(ScreenLine::new(LineStyle::Alert, problem));
        }
        let names = self.instances.iter().map(|one| display_name(one).len());
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
            let text = truncate_text(&describe_instance(one, name_width), width, '~');
            let style = match one.not_asked {
                None => LineStyle::Plain,
                Some(_) => LineStyle::Dim,
            };
            ScreenLine::new(style, text)
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
            let ranking = list_refused(ranking, &[]);
            lines.push(ScreenLine::default());
            lines.extend(ranking_lines(title, &ranking, ranking_height, width));
        }
        lines
    }
}

/// The name, or the start of the id of an instance that has none; `*` marks the asked one.
fn display_name(instance: &FleetInstanceDocument) -> String {
    let id = instance.id.get(..8).unwrap_or(&instance.id);
    let name = instance.name.as_deref().unwrap_or(id);
    format!("{name}{}", if instance.is_self { "*" } else { "" })
}

fn describe_instance(instance: &FleetInstanceDocument, name_width: usize) -> String {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let state = match instance.figures.store.as_deref() {
        Some("degraded") => "degraded",
        _ => &instance.state,
    };
    let share = format!("{:.1}%", instance.share * 100.0);
    let rate = or_dash(instance.figures.decisions_per_s.map(format_rate));
    let uptime = or_dash(instance.figures.uptime_s.map(format_short_duration));
    let version = or_dash(instance.version.clone());
    let admin = instance.not_asked.clone().or(instance.admin.clone());
    let columns = [state, &share, &rate, &uptime, &version];
    instance_row(
        name_width,
        &display_name(instance),
        columns,
        &or_dash(admin),
    )
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
    use super::super::snapshot::escape_texts;
    use super::*;
    use serde_json::json;

    fn sample_snapshot() -> FleetDocument {
        let mut response = json!({
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
        });
        escape_texts(&mut response);
        FleetDocument::deserialize(response).unwrap()
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
