//! Draws a view, for a terminal of any size and for a pipe.

use crate::telemetry::top_rejections::{RejectedText, RejectionEntry, RejectionRanking};
use crate::text::truncate_text;
use ratatui::buffer::{Buffer, CellDiffOption};
use ratatui::layout::{Alignment, Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::{Row, Table, Widget};
use serde_json::Value;

// A text has the same meaning without its style, for terminals without colours.
pub(super) const TITLE: Style = Style::new()
    .fg(Color::LightCyan)
    .add_modifier(Modifier::BOLD);
const TABLE_HEADER: Style = Style::new()
    .fg(Color::LightCyan)
    .add_modifier(Modifier::UNDERLINED);
pub(super) const ALERT: Style = Style::new()
    .fg(Color::LightRed)
    .add_modifier(Modifier::BOLD);
pub(super) const WARNING: Style = Style::new().fg(Color::LightYellow);
pub(super) const GOOD: Style = Style::new().fg(Color::LightGreen);
pub(super) const DIM: Style = Style::new().add_modifier(Modifier::DIM);

/// Minimum screen width and height.
const MIN_SCREEN_SIZE: (u16, u16) = (48, 10);
/// Maximum width of a table in columns if stdout is not a terminal.
const PIPE_WIDTH: u16 = 120;
/// More lines than a pipe shows besides the rows of the table.
const PIPE_RANKING_LINES: u16 = 30;
/// Height of a ranking in a pipe: a header and ten entries.
pub(super) const MAX_PIPE_RANKING_HEIGHT: u16 = 11;
/// Number of characters of a policy's name that a long key leaves visible.
const MIN_POLICY_WIDTH: usize = 8;

/// Keys and columns; no line is wider than 80 columns.
const HELP: &str = "\
KEYS
  q, Esc              quit
  p, Space            pause or resume
  s                   sort by refused, requests, name or order
  Up, Down            scroll by one policy (also k, j)
  PageUp, PageDown    scroll by ten
  Home, End           first and last policy
  ?                   show or hide this help

COLUMNS
  passed/s, refused/s requests since the last refresh
  passed, refused     requests in the last hour
  share               the refused part of them
  last hour, refused  one character for three minutes, in wide terminals

A shadow policy refuses nothing: its numbers are of requests that it would
refuse. Yellow: the policy refused requests in this or the previous minute.
NO_COLOR=1 disables colours.";

/// The data of a view.
pub(super) trait TopData {
    /// Replaces the data by that of a response, whose texts are escaped.
    fn update(&mut self, response: Value);

    /// Number of rows of the table.
    fn row_count(&self) -> usize;

    /// The keys of the terminal view that only this data needs.
    fn extra_keys(&self, _view: &ViewState) -> String {
        String::new()
    }

    /// The lines above the table. Problems are wrapped to `width`.
    fn header(&self, view: &ViewState, width: usize) -> Vec<Line<'static>>;

    /// Draws the table and the rankings: what fits, or all of it in a pipe.
    fn draw_body(&self, view: &ViewState, area: Rect, buffer: &mut Buffer);
}

/// Sort order of the policy table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, strum::Display, strum::EnumIter)]
#[strum(serialize_all = "lowercase")]
pub(super) enum PolicySortOrder {
    #[default]
    Refused,
    Requests,
    Name,
    /// The order in which the policies apply.
    #[strum(serialize = "order")]
    PolicyOrder,
}

/// Display state of the view, independent of the data.
#[derive(Clone, Debug, Default)]
pub(super) struct ViewState {
    pub(super) sort_order: PolicySortOrder,
    /// Whether block characters can be shown.
    pub(super) has_blocks: bool,
    pub(super) has_colours: bool,
    /// Whether the view is a screen and not a pipe.
    pub(super) is_live: bool,
    pub(super) is_paused: bool,
    /// Number of policies scrolled past at the top.
    pub(super) scroll_offset: usize,
    /// Address of the admin port.
    pub(super) address: String,
    /// Error of the latest fetch, if it failed; the displayed data is older than that fetch.
    pub(super) last_error: Option<String>,
    /// Whether the list of keys and columns is shown instead of the data.
    pub(super) shows_help: bool,
}

impl ViewState {
    /// The error of the latest fetch as a line.
    pub(super) fn error_line(&self) -> Option<Line<'static>> {
        let error = self.last_error.as_ref()?;
        Some(Line::styled(format!("! {error}"), ALERT))
    }
}

/// Renders all data as text for a pipe.
pub(super) fn render_plain_text(data: &dyn TopData, view: &ViewState) -> String {
    let rows = u16::try_from(data.row_count()).unwrap_or(u16::MAX);
    let area = Rect::new(0, 0, PIPE_WIDTH, rows.saturating_add(PIPE_RANKING_LINES));
    let mut buffer = Buffer::empty(area);
    data.draw_body(view, area, &mut buffer);
    let header = data.header(view, usize::MAX).into_iter();
    let lines = header.map(|line| line.to_string());
    let lines = lines.chain(buffer_lines(&buffer));
    let text: String = lines
        .map(|line| line.trim_end().to_owned() + "\n")
        .collect();
    text.trim_end().to_owned() + "\n"
}

/// The text of each line of a buffer.
fn buffer_lines(buffer: &Buffer) -> impl Iterator<Item = String> {
    let rows = buffer.content().chunks(buffer.area.width.max(1).into());
    rows.map(|cells| cells.iter().map(|cell| cell.symbol()).collect())
}

/// Draws a whole screen.
pub(super) fn draw_screen(data: &dyn TopData, view: &ViewState, buffer: &mut Buffer) {
    let Rect { width, height, .. } = buffer.area;
    let (min_width, min_height) = MIN_SCREEN_SIZE;
    if width < min_width || height < min_height {
        let text = format!("too small: {width}x{height}, needs {min_width}x{min_height}");
        draw_lines(&[Line::styled(text, ALERT)], buffer.area, buffer);
    } else {
        let mut header = if view.shows_help {
            HELP.lines().map(Line::from).collect()
        } else {
            data.header(view, width.into())
        };
        // The header is cut so that a row of the table stays visible.
        let below_header = if view.shows_help { 1 } else { 4 };
        header.truncate(usize::from(height - below_header));
        let [top, body, bottom] = Layout::vertical([
            Constraint::Length(to_length(header.len())),
            Constraint::Fill(1),
            Constraint::Length(1),
        ])
        .areas(buffer.area);
        draw_lines(&header, top, buffer);
        if !view.shows_help {
            data.draw_body(view, body, buffer);
        }
        let pause = if view.is_paused { "resume" } else { "pause" };
        let keys = format!("q quit  ? help  p {pause}{}", data.extra_keys(view));
        draw_lines(&[Line::styled(keys, DIM)], bottom, buffer);
    }
    for cell in &mut buffer.content {
        // A refresh also repairs what other programs wrote to the terminal.
        cell.set_diff_option(CellDiffOption::AlwaysUpdate);
        if !view.has_colours {
            cell.fg = Color::Reset;
        }
    }
}

pub(super) fn to_length(lines: usize) -> u16 {
    u16::try_from(lines).unwrap_or(u16::MAX)
}

/// Draws the lines that fit. `~` marks the end of a line that is too long.
pub(super) fn draw_lines(lines: &[Line<'_>], area: Rect, buffer: &mut Buffer) {
    for (line, row) in lines.iter().zip(area.intersection(buffer.area).rows()) {
        line.render(row, buffer);
        if line.width() > row.width.into()
            && let Some(cell) = buffer.cell_mut((row.right().saturating_sub(1), row.y))
        {
            cell.set_char('~');
        }
    }
}

/// A table with a header.
pub(super) struct TopTable {
    /// Title, width and alignment. Columns that do not fit are left out from the right.
    pub(super) columns: Vec<(&'static str, usize, Alignment)>,
    pub(super) rows: Vec<(Style, Vec<String>)>,
    /// Number of rows that were not fetched.
    pub(super) omitted: u64,
    /// The word before the number of rows that are not visible.
    pub(super) more: &'static str,
}

impl TopTable {
    /// Number of lines of the whole table.
    pub(super) fn height(&self) -> u16 {
        to_length(1 + self.rows.len() + usize::from(self.omitted > 0))
    }

    /// Draws the rows from `first_row` on that fit, and how many more there are.
    pub(super) fn draw(self, first_row: usize, area: Rect, buffer: &mut Buffer) {
        let room = usize::from(area.height.saturating_sub(1));
        let room_for_last = room.saturating_sub(usize::from(self.omitted > 0)).max(1);
        let first_row = first_row.min(self.rows.len().saturating_sub(room_for_last));
        let remaining = self.rows.len() - first_row;
        let shown = if remaining > room_for_last {
            room.saturating_sub(1)
        } else {
            remaining
        };
        let hidden = (remaining - shown) as u64 + self.omitted;
        let mut right = 0;
        let columns = self.columns.iter().take_while(|(_, width, _)| {
            right += width + 1;
            right <= usize::from(area.width) + 1
        });
        let columns: Vec<_> = columns.collect();
        let to_row = |texts: &[String]| -> Row<'static> {
            let cells = columns.iter().zip(texts).map(|((_, width, side), text)| {
                Line::from(truncate_text(text, *width, '~')).alignment(*side)
            });
            cells.collect()
        };
        let titles: Vec<String> = columns.iter().map(|column| column.0.to_owned()).collect();
        let visible = self.rows.iter().skip(first_row).take(shown);
        let rows = visible.map(|(style, texts)| to_row(texts).style(*style));
        let widths = columns.iter().map(|column| to_length(column.1));
        Table::new(rows, widths)
            .header(to_row(&titles).style(TABLE_HEADER))
            .render(area, buffer);
        if let Some(row) = area.rows().nth(1 + shown)
            && hidden > 0
        {
            let line = Line::styled(format!("{} {hidden} more", self.more), DIM);
            draw_lines(&[line], row, buffer);
        }
    }
}

/// Number of lines of a whole ranking.
pub(super) fn ranking_height(ranking: &RejectionRanking) -> u16 {
    to_length(1 + ranking.entries.len().max(1))
}

/// Draws a ranking with its header. `mode_of` names the mode of a policy that refuses no requests.
pub(super) fn draw_ranking<'p>(
    title: &str,
    ranking: &RejectionRanking,
    mode_of: impl Fn(&str) -> Option<&'p str>,
    area: Rect,
    buffer: &mut Buffer,
) {
    let title = format!("{:>13} {title}", "refused");
    let mut lines = vec![Line::styled(title, TABLE_HEADER)];
    if ranking.entries.is_empty() {
        let text = format!("{:>13} none recently", "-");
        lines.push(Line::styled(text, DIM));
    }
    let width = usize::from(area.width);
    lines.extend(ranking.entries.iter().map(|entry| {
        let RejectionEntry {
            policy,
            text,
            count,
            error,
        } = entry;
        let count = match error {
            0 => count.to_string(),
            _ => format!("{}-{count}", count.saturating_sub(*error)),
        };
        // The policy's name at the start of a key is removed, because it has its own column.
        let text = match text {
            RejectedText::Path(path) => path,
            RejectedText::Key(key) => key.split_once('/').map_or("(no key)", |(_, values)| values),
        };
        let policy = match mode_of(policy) {
            Some(mode) => format!("{policy} ({mode})"),
            None => policy.clone(),
        };
        // A policy is recognizable by its beginning, a key is not.
        let policy_width = width.saturating_sub(16 + text.len()).max(MIN_POLICY_WIDTH);
        let policy = truncate_text(&policy, policy_width, '~');
        Line::from(format!("{count:>13} {policy}  {text}"))
    }));
    draw_lines(&lines, area, buffer);
}

#[cfg(test)]
pub(super) mod tests;
