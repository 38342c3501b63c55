//! `tidegate top --fleet`: all instances that share the limits, and their rankings together.

use super::frame::{
    ALERT, DIM, MAX_PIPE_RANKING_HEIGHT, TITLE, TopData, TopTable, ViewState, draw_ranking,
    ranking_height,
};
use crate::admin::{FleetDocument, FleetInstanceDocument};
use crate::text::{format_rate, format_short_duration};
use ratatui::buffer::Buffer;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::Style;
use ratatui::text::Line;
use serde::Deserialize;
use serde_json::Value;

/// Width of the columns between the name and the address, with the spaces around them.
const NUMBER_COLUMNS_WIDTH: usize = 45;

impl TopData for FleetDocument {
    fn update(&mut self, response: Value) {
        *self = Self::deserialize(response).unwrap_or_default();
    }

    fn row_count(&self) -> usize {
        self.instances.len()
    }

    fn header(&self, view: &ViewState, _width: usize) -> Vec<Line<'static>> {
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
        let mut lines = vec![Line::styled(title, TITLE)];
        lines.extend(view.error_line());
        let problem = self.problem.as_ref();
        lines.extend(problem.map(|problem| Line::styled(format!("! {problem}"), ALERT)));
        lines.push(Line::default());
        lines
    }

    fn draw_body(&self, view: &ViewState, area: Rect, buffer: &mut Buffer) {
        let rows: Vec<_> = self.instances.iter().map(describe_instance).collect();
        let names = rows.iter().filter_map(|(_, texts)| texts.first());
        let name_width = names.map(String::len).max().unwrap_or(0).clamp(8, 40);
        let fixed_width = name_width + NUMBER_COLUMNS_WIDTH;
        let table = TopTable {
            columns: vec![
                ("instance", name_width, Alignment::Left),
                ("state", 10, Alignment::Left),
                ("share", 6, Alignment::Right),
                ("per s", 7, Alignment::Right),
                ("up", 7, Alignment::Right),
                ("version", 9, Alignment::Left),
                (
                    "admin",
                    usize::from(area.width).saturating_sub(fixed_width),
                    Alignment::Left,
                ),
            ],
            rows,
            omitted: 0,
            more: "and",
        };
        // Half of a screen is for the rankings.
        let table_height = if view.is_live {
            table.height().min((area.height / 2).max(2))
        } else {
            table.height()
        };
        let left = area.height.saturating_sub(table_height);
        let half = (left / 2).saturating_sub(1).min(MAX_PIPE_RANKING_HEIGHT);
        let rankings = [("keys", &self.keys), ("paths", &self.paths)];
        let [keys_height, paths_height] =
            rankings.map(|(_, ranking)| Constraint::Length(ranking_height(ranking).min(half)));
        let [table_area, keys_area, paths_area] =
            Layout::vertical([Constraint::Length(table_height), keys_height, paths_height])
                .spacing(1)
                .areas(area);
        table.draw(0, table_area, buffer);
        for ((title, ranking), area) in rankings.into_iter().zip([keys_area, paths_area]) {
            draw_ranking(title, ranking, |_| None, area, buffer);
        }
    }
}

/// The style and the columns of an instance. `*` marks the name of the asked one. An instance
/// without a name has the start of its id.
fn describe_instance(instance: &FleetInstanceDocument) -> (Style, Vec<String>) {
    let id = instance.id.get(..8).unwrap_or(&instance.id);
    let name = instance.name.as_deref().unwrap_or(id);
    let state = match instance.figures.store.as_deref() {
        Some("degraded") => "degraded",
        _ => &instance.state,
    };
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let style = match instance.not_asked {
        None => Style::new(),
        Some(_) => DIM,
    };
    let texts = vec![
        format!("{name}{}", if instance.is_self { "*" } else { "" }),
        state.to_owned(),
        format!("{:.1}%", instance.share * 100.0),
        or_dash(instance.figures.decisions_per_s.map(format_rate)),
        or_dash(instance.figures.uptime_s.map(format_short_duration)),
        or_dash(instance.version.clone()),
        or_dash(instance.not_asked.clone().or(instance.admin.clone())),
    ];
    (style, texts)
}

#[cfg(test)]
mod tests {
    use super::super::escape_texts;
    use super::super::frame::render_plain_text;
    use super::super::frame::tests::screen_lines;
    use super::*;
    use serde_json::json;

    fn sample_snapshot() -> FleetDocument {
        let response = json!({
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
        FleetDocument::deserialize(escape_texts(response)).unwrap()
    }

    #[test]
    fn shows_every_instance_and_why_one_was_not_asked() {
        let text = render_plain_text(&sample_snapshot(), &ViewState::default());
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
            let lines = screen_lines(&sample_snapshot(), &view, width, height);
            assert_eq!(lines.len(), usize::from(height));
            let part = |text: &str| lines.iter().any(|line| line.contains(text));
            for text in [
                "tidegate fleet",
                "! no answer",
                "instance",
                "orders-0*",
                "q quit",
            ] {
                assert!(part(text), "{width}x{height}: {text}: {lines:?}");
            }
        }
    }
}
