//! `tidegate top`: one instance, its policies, and the keys and paths refused most.

use super::frame::{
    ALERT, GOOD, MAX_PIPE_RANKING_HEIGHT, PolicySortOrder, TITLE, TopData, TopTable, ViewState,
    WARNING, draw_lines, draw_ranking, ranking_height,
};
use crate::admin::{
    OverviewDocument, PoliciesDocument, PolicyDocument, REFUSED_SERIES, TopDocument,
};
use crate::text::{format_latency, format_rate, format_share, format_short_duration, wrap_text};
use ratatui::buffer::Buffer;
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::Style;
use ratatui::text::Line;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::cmp::Reverse;

/// Length of a policy's history in minutes.
const HISTORY_MINUTES: usize = 60;
/// Minutes per character of a sparkline.
const MINUTES_PER_GLYPH: usize = 3;
/// Characters of a sparkline: for no requests, for requests without refusals, and for increasing
/// numbers of refusals.
const ASCII_GLYPHS: &str = " .:-=+*#@";
const BLOCK_GLYPHS: &str = " ·▁▂▃▄▅▆█";
/// Width of the last column of the policy table with the space before it.
const SPARKLINE_WIDTH: usize = 23;
/// Maximum number of lines of a problem on a screen.
const MAX_ALERT_LINES: usize = 2;
/// Counters that add up to all requests, and to all decisions of a policy. Some are only of the one
/// or of the other.
const ALL_COUNTERS: [&str; 10] = [
    "allowed",
    "exempt",
    "delayed",
    "degraded",
    "rejected",
    "blocked",
    "denied",
    "shadow_rejected",
    "marked",
    "malformed",
];

/// The responses of the admin API at one time. A missing field or a malformed response is no error,
/// so that an older or newer proxy can be shown.
#[derive(Debug, Default)]
pub(super) struct InstanceData {
    overview: OverviewDocument,
    policies: Vec<TopPolicyEntry>,
    /// Number of policies that were not fetched.
    omitted_policies: u64,
    top: TopDocument,
}

#[derive(Debug, Default)]
struct TopPolicyEntry {
    name: String,
    /// `shadow`, `mark`, `off`, `deny`, `exempt`, or empty.
    kind: &'static str,
    /// Number of passed and refused requests since the start of the process.
    totals: [u64; 2],
    /// The same per second since the previous responses, if there were any.
    rates_per_s: Option<[f64; 2]>,
    /// All and refused requests by minute of the last hour, oldest first.
    minutes: Vec<[u64; 2]>,
}

impl TopData for InstanceData {
    /// Rates are relative to the previous response, if the same process sent it earlier.
    fn update(&mut self, mut response: Value) {
        let earlier = std::mem::take(self);
        self.overview = take_document(&mut response, "overview");
        self.top = take_document(&mut response, "top");
        let page: PoliciesDocument = take_document(&mut response, "policies");
        self.omitted_policies = page.total.saturating_sub(page.policies.len()) as u64;
        let (instance, before) = (&self.overview.instance, &earlier.overview.instance);
        let elapsed_s = instance.uptime_s.saturating_sub(before.uptime_s);
        let is_later = instance.id == before.id && elapsed_s > 0;
        let policies = page.policies.iter().map(|entry| {
            let mut policy = TopPolicyEntry::new(entry);
            let mut earlier = earlier.policies.iter().filter(|_| is_later);
            let earlier = earlier.find(|earlier| earlier.name == policy.name);
            policy.rates_per_s = earlier.map(|earlier| {
                let [passed, refused] = earlier.totals;
                let [now_passed, now_refused] = policy.totals;
                [(now_passed, passed), (now_refused, refused)]
                    .map(|(now, then)| now.saturating_sub(then) as f64 / elapsed_s as f64)
            });
            policy
        });
        self.policies = policies.collect();
    }

    fn row_count(&self) -> usize {
        self.policies.len()
    }

    fn extra_keys(&self, view: &ViewState) -> String {
        format!("  s sort: {}  up/down scroll", view.sort_order)
    }

    fn header(&self, view: &ViewState, width: usize) -> Vec<Line<'static>> {
        let mut lines = vec![Line::styled(self.title(view), TITLE)];
        lines.extend(view.error_line());
        for (style, text) in self.alerts() {
            let wrapped = wrap_text(&text, width, ["! ", "  "], MAX_ALERT_LINES);
            lines.extend(wrapped.into_iter().map(|text| Line::styled(text, style)));
        }
        let seconds = &self.overview.requests.seconds;
        // The window is a minute, or less soon after the start. It excludes the last second, which
        // is incomplete.
        let window_s = seconds.get("at").map_or(0, Vec::len).saturating_sub(1);
        let count = |names: &[&str], last: usize| -> u64 {
            let columns = names.iter().filter_map(|name| seconds.get(*name));
            let values = columns.flat_map(|column| {
                let complete = column.iter().take(window_s);
                complete.skip(window_s.saturating_sub(last))
            });
            values.sum()
        };
        let requests = count(&ALL_COUNTERS, window_s);
        let share = |count| format_share(count, requests);
        let recent_s = window_s.clamp(1, 5);
        lines.push(Line::from(format!(
            "requests {}/s  refused {}  (of {requests} in {})  connections {}/{}",
            format_rate(count(&ALL_COUNTERS, recent_s) as f64 / recent_s as f64),
            share(count(&REFUSED_SERIES, window_s)),
            format_short_duration(window_s as u64),
            self.overview.connections.open,
            self.overview.connections.max,
        )));
        // A part of `degraded`.
        let refused = count(&["degraded_refused"], window_s);
        let without_store = match count(&["degraded"], window_s) {
            0 => String::new(),
            all => format!(
                "  without it: admitted {}, refused {}",
                share(all.saturating_sub(refused)),
                share(refused)
            ),
        };
        lines.extend([
            self.store_line(&without_store),
            Line::from(self.describe_latency()),
            Line::default(),
        ]);
        lines
    }

    fn draw_body(&self, view: &ViewState, area: Rect, buffer: &mut Buffer) {
        let table = self.policy_table(view, area.width.into());
        let rankings_height = match (view.is_live, area.height) {
            (true, ..12) => 0,
            (true, height) => height / 3,
            (false, height) => height.saturating_sub(table.height()),
        };
        let table_height = table
            .height()
            .min(area.height.saturating_sub(rankings_height));
        let [table_area, _, rankings_area] = Layout::vertical([
            Constraint::Length(table_height),
            Constraint::Length(rankings_height.min(1)),
            Constraint::Length(rankings_height.saturating_sub(1)),
        ])
        .areas(area);
        if self.policies.is_empty() {
            let text = "No policies are configured: every request passes.";
            draw_lines(&[Line::from(text)], table_area, buffer);
        } else {
            table.draw(view.scroll_offset, table_area, buffer);
        }
        let rankings = [
            ("KEYS REFUSED MOST BY A LIMIT", &self.top.keys),
            ("PATHS REFUSED MOST BY A POLICY", &self.top.paths),
        ];
        let layout = match (view.is_live, area.width) {
            (true, 100..) => Layout::horizontal([
                Constraint::Length((area.width / 2).saturating_sub(2)),
                Constraint::Fill(1),
            ])
            .spacing(2),
            (true, _) => Layout::vertical([Constraint::Fill(1), Constraint::Length(0)]),
            (false, _) => Layout::vertical(rankings.map(|(_, ranking)| {
                Constraint::Length(ranking_height(ranking).min(MAX_PIPE_RANKING_HEIGHT))
            }))
            .spacing(1),
        };
        let areas: [Rect; 2] = layout.areas(rankings_area);
        let mode_of = |name: &str| {
            let policy = self.policies.iter().find(|policy| policy.name == name);
            policy
                .map(|policy| policy.kind)
                .filter(|kind| matches!(*kind, "shadow" | "mark"))
        };
        for ((title, ranking), area) in rankings.into_iter().zip(areas) {
            draw_ranking(title, ranking, mode_of, area, buffer);
        }
    }
}

impl InstanceData {
    fn title(&self, view: &ViewState) -> String {
        let state = match (&view.last_error, view.is_paused) {
            (Some(_), _) => "[NO ANSWER] ",
            (None, true) => "[paused] ",
            (None, false) => "",
        };
        let after = |word: &str, text: &str| match text {
            "" => String::new(),
            text => format!("  {word} {text}"),
        };
        let overview = &self.overview;
        let process = &overview.instance;
        format!(
            "tidegate {}  {state}{}  instance {}{}  up {}  generation {}{}",
            process.version,
            overview.status,
            // The first 8 characters are enough to distinguish instances.
            process.id.get(..8).unwrap_or(&process.id),
            after("on", &process.host),
            format_short_duration(process.uptime_s),
            overview.generation,
            after("at", &view.address),
        )
    }

    /// Problems that need attention.
    fn alerts(&self) -> Vec<(Style, String)> {
        // The problems are the hints with their levels, which older versions do not send.
        let overview = &self.overview;
        let hints = overview.hints.iter().enumerate().map(|(at, text)| {
            let problem = overview.problems.get(at);
            let is_warning = problem.is_some_and(|problem| problem.level == "warning");
            (if is_warning { WARNING } else { ALERT }, text.clone())
        });
        let errors = overview.last_reload.errors.iter();
        let errors = errors.map(|text| (ALERT, text.clone()));
        let peers: Vec<String> = overview
            .untrusted_peers
            .iter()
            .map(ToString::to_string)
            .collect();
        let peers = (!peers.is_empty()).then(|| {
            let peers = peers.join(", ");
            (
                WARNING,
                format!("forwarding headers from untrusted peers: {peers}"),
            )
        });
        hints.chain(errors).chain(peers).collect()
    }

    fn store_line(&self, without_store: &str) -> Line<'static> {
        let store = &self.overview.store;
        let (style, state) = match (store.up, store.breaker_open) {
            (true, true) => (ALERT, "breaker open"),
            (true, false) => (GOOD, "up"),
            (false, _) => (ALERT, "DOWN"),
        };
        let instances = store.instances;
        let instances = instances.map_or_else(String::new, |count| format!("  instances {count}"));
        let location = format!("{} {}", store.kind, store.address);
        let location = location.trim_end();
        Line::styled(
            format!("store {location} {state}{instances}{without_store}"),
            style,
        )
    }

    fn describe_latency(&self) -> String {
        let sources = self.overview.latency.decisions.iter();
        let sources = sources.map(|(source, times)| {
            let [p50, p99] = [times.p50_s, times.p99_s].map(format_latency);
            format!("  {source} {}, 50% in {p50}, 99% in {p99}", times.count)
        });
        let sources: String = sources.collect();
        let none = if sources.is_empty() { " none" } else { "" };
        format!("decisions in the last minute:{none}{sources}")
    }

    fn policy_table(&self, view: &ViewState, width: usize) -> TopTable {
        let mut sorted: Vec<&TopPolicyEntry> = self.policies.iter().collect();
        match view.sort_order {
            PolicySortOrder::Refused => sorted.sort_by_key(|policy| {
                let [passed, refused] = policy.last_hour();
                Reverse((refused, passed))
            }),
            PolicySortOrder::Requests => {
                sorted.sort_by_key(|policy| Reverse(policy.last_hour().iter().sum::<u64>()));
            }
            PolicySortOrder::Name => sorted.sort_by(|a, b| a.name.cmp(&b.name)),
            PolicySortOrder::PolicyOrder => {}
        }
        let has_rates = sorted.iter().any(|policy| policy.rates_per_s.is_some());
        let longest_name = sorted.iter().map(|policy| policy.name.len()).max();
        let longest_name = longest_name.unwrap_or(0);
        let numbers_width = 35 + if has_rates { 19 } else { 0 };
        // Names are more important than the sparkline.
        let has_sparkline = width >= numbers_width + SPARKLINE_WIDTH + longest_name.clamp(6, 24);
        let fixed_width = numbers_width + if has_sparkline { SPARKLINE_WIDTH } else { 0 };
        let name_width = longest_name.clamp(6, width.saturating_sub(fixed_width).max(8));
        let mut columns = vec![
            ("POLICY", name_width, Alignment::Left),
            ("", 6, Alignment::Left),
            ("passed/s", 8, Alignment::Right),
            ("refused/s", 9, Alignment::Right),
            ("passed", 9, Alignment::Right),
            ("refused", 9, Alignment::Right),
            ("share", 7, Alignment::Right),
            ("last hour, refused", SPARKLINE_WIDTH - 1, Alignment::Left),
        ];
        let rows = sorted.iter().map(|policy| policy.describe(view.has_blocks));
        let mut rows: Vec<_> = rows.collect();
        if !has_rates {
            columns.drain(2..4);
            rows.iter_mut()
                .for_each(|(_, texts)| drop(texts.drain(2..4)));
        }
        columns.truncate(columns.len() - usize::from(!has_sparkline));
        TopTable {
            columns,
            rows,
            omitted: self.omitted_policies,
            more: "...",
        }
    }
}

impl TopPolicyEntry {
    fn new(entry: &PolicyDocument) -> Self {
        let total = |names: &[&str]| -> u64 {
            let counts = names.iter().filter_map(|name| entry.decisions.get(*name));
            counts.filter_map(Value::as_u64).sum()
        };
        // Since-start totals of degraded decisions are counted by outcome in `degraded_by`.
        let degraded = ["closed", "local_rejected"];
        let degraded = degraded.map(|outcome| entry.degraded_by.as_ref()?.get(outcome));
        let refused = total(&REFUSED_SERIES) + degraded.into_iter().flatten().sum::<u64>();
        let hour = entry.last_hour.as_ref();
        let in_minute = |names: &[&str], minute: usize| -> u64 {
            let counts = names
                .iter()
                .filter_map(|name| hour?.get(*name)?.get(minute));
            counts.map(|count| u64::from(*count)).sum()
        };
        let minutes = (0..HISTORY_MINUTES)
            .map(|at| [&ALL_COUNTERS[..], &REFUSED_SERIES].map(|names| in_minute(names, at)));
        Self {
            name: entry.name.clone(),
            kind: match (&*entry.mode, entry.action.as_deref().unwrap_or_default()) {
                ("off", _) => "off",
                ("shadow", _) => "shadow",
                ("mark", _) => "mark",
                (_, "deny") => "deny",
                (_, "allow") => "exempt",
                _ => "",
            },
            totals: [total(&ALL_COUNTERS).saturating_sub(refused), refused],
            rates_per_s: None,
            minutes: minutes.collect(),
        }
    }

    /// Passed and refused requests in the last hour.
    fn last_hour(&self) -> [u64; 2] {
        let [all, refused] = sum_minutes(&self.minutes);
        [all.saturating_sub(refused), refused]
    }

    /// The style and the columns.
    fn describe(&self, has_blocks: bool) -> (Style, Vec<String>) {
        let is_refusing = self.minutes.iter().rev().take(2).any(|[_, n]| *n > 0);
        let [passed, refused] = self.last_hour();
        let rates = self.rates_per_s.map(|rates| rates.map(format_rate));
        let [passed_per_s, refused_per_s] = rates.unwrap_or_else(|| ["-", "-"].map(str::to_owned));
        let texts = vec![
            self.name.clone(),
            self.kind.to_owned(),
            passed_per_s,
            refused_per_s,
            passed.to_string(),
            refused.to_string(),
            format_share(refused, passed + refused),
            render_sparkline(&self.minutes, has_blocks),
        ];
        (if is_refusing { WARNING } else { Style::new() }, texts)
    }
}

fn sum_minutes(minutes: &[[u64; 2]]) -> [u64; 2] {
    let sum = |[all, refused]: [u64; 2], more: &[u64; 2]| [all + more[0], refused + more[1]];
    minutes.iter().fold([0, 0], sum)
}

/// Renders the refusals of `minutes`, which holds all and refused requests by minute, oldest first.
fn render_sparkline(minutes: &[[u64; 2]], has_blocks: bool) -> String {
    let groups: Vec<_> = minutes.chunks(MINUTES_PER_GLYPH).map(sum_minutes).collect();
    let most = groups.iter().map(|[_, refused]| *refused).max();
    let most = most.unwrap_or(0).max(1);
    let glyphs = if has_blocks {
        BLOCK_GLYPHS
    } else {
        ASCII_GLYPHS
    };
    let glyphs: Vec<char> = glyphs.chars().collect();
    let heights = glyphs.len() as u64 - 2;
    let glyph = |[all, refused]: &[u64; 2]| {
        let at = match (all, refused) {
            (0, _) => 0,
            (_, 0) => 1,
            _ => 1 + (refused * heights).div_ceil(most),
        };
        let glyph = usize::try_from(at).ok().and_then(|at| glyphs.get(at));
        glyph.copied().unwrap_or(' ')
    };
    groups.iter().map(glyph).collect()
}

/// One of the responses, without it the default.
fn take_document<T: DeserializeOwned + Default>(responses: &mut Value, name: &str) -> T {
    let response = responses.get_mut(name).map(Value::take);
    let document = response.and_then(|response| serde_json::from_value(response).ok());
    document.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::escape_texts;
    use super::super::frame::render_plain_text;
    use super::*;
    use serde_json::json;

    #[test]
    fn escapes_control_characters_in_all_texts() {
        let hostile = "\u{1b}[2J\u{9b}31m\u{202e}\r\nü";
        let response = json!({
            "overview": {
                "instance": { "id": hostile, "version": hostile }, "status": hostile, "hints": [hostile], "untrusted_peers": ["::1"],
                "last_reload": { "errors": [hostile] }, "store": { "kind": hostile, "address": hostile },
                "latency": { "decisions": { hostile: { "count": 1 } } },
            },
            "policies": { "policies": [{ "name": hostile }] },
            "top": { "keys": { "entries": [{ "policy": hostile, "key": hostile }] }, "paths": { "entries": [{ "policy": hostile, "path": hostile }] } },
        });
        let text = render_plain_text(&load(escape_texts(response)), &ViewState::default());
        let is_plain = |letter| letter == '\n' || (' '..='~').contains(&letter);
        assert!(text.chars().all(is_plain), "{text}");
        let letter = escape_texts(json!("\u{1b}[31mé"));
        assert_eq!(letter, "\\u{1b}[31m\\u{e9}");
    }

    #[test]
    fn rates_are_relative_to_the_previous_snapshot_of_the_same_process() {
        let response = |id: &str, uptime_s: u64, allowed: u64, rejected: u64| {
            json!({
                "overview": { "instance": { "id": id, "uptime_s": uptime_s } },
                "policies": { "policies": [{ "name": "p", "allowed": allowed, "rejected": rejected }] },
            })
        };
        let rates = |value: Value| {
            let mut data = load(response("a", 10, 100, 4));
            assert_eq!(data.policies[0].rates_per_s, None);
            data.update(value);
            data.policies[0].rates_per_s
        };
        assert_eq!(rates(response("a", 12, 120, 5)), Some([10.0, 0.5]));
        assert_eq!(rates(response("a", 10, 120, 5)), None, "no time has passed");
        let restarted = response("b", 12, 1, 0);
        assert_eq!(rates(restarted), None, "the process has restarted");
    }

    #[test]
    fn marks_ranked_entries_of_shadow_policies() {
        let ranked = |policy: &str| json!({ "policy": policy, "key": "p/ann", "count": 1 });
        let path = json!({ "policy": "candidate", "path": "/b", "count": 1 });
        let response = json!({
            "policies": { "policies": [{ "name": "api" }, { "name": "candidate", "mode": "shadow" }] },
            "top": { "keys": { "entries": [ranked("candidate"), ranked("api")] }, "paths": { "entries": [path] } },
        });
        let text = render_plain_text(&load(response), &ViewState::default());
        let ranked = text
            .lines()
            .filter(|line| line.starts_with("            1 "));
        assert_eq!(
            ranked.collect::<Vec<_>>(),
            [
                "            1 candidate (shadow)  ann",
                "            1 api  ann",
                "            1 candidate (shadow)  /b",
            ]
        );
    }

    #[test]
    fn accepts_missing_and_malformed_fields() {
        for odd in [
            json!(null),
            json!([]),
            json!({ "overview": 3, "policies": { "policies": [1, null] } }),
        ] {
            let text = render_plain_text(&load(odd), &ViewState::default());
            assert!(text.contains("(of 0 in 0s)"), "{text}");
            assert!(text.contains("store  DOWN"), "{text}");
        }
    }

    #[test]
    fn a_sparkline_distinguishes_no_requests_from_no_refusals() {
        let mut minutes = vec![[0, 0]; 60];
        minutes[3] = [9, 0];
        minutes[59] = [9, 9];
        minutes[56] = [9, 1];
        assert_eq!(
            render_sparkline(&minutes, false),
            " .                ::".replace("::", ":@")
        );
        assert_eq!(render_sparkline(&minutes, true).chars().last(), Some('█'));
    }

    fn load(response: Value) -> InstanceData {
        let mut data = InstanceData::default();
        data.update(response);
        data
    }
}
