//! The results of a replay, and their text, JSON and HTML reports.

mod html;
mod html_page;
mod html_plots;
mod json;
mod number_format;
mod results;
mod text;

pub(crate) use number_format::{format_time, format_time_range};
pub use results::ReplayReport;
pub(super) use results::{LogSummary, PolicySetReport, SetDifferences};

impl ReplayReport {
    /// Renders the report for a terminal with `width` columns.
    pub fn render_text(&self, width: usize, is_bold: bool) -> String {
        text::render_text(self, width, is_bold)
    }

    /// Renders the report for scripts.
    pub fn render_json(&self) -> String {
        json::render_json(self)
    }

    /// Renders the report as a self-contained page.
    pub fn render_html(&self) -> String {
        html::render_html(self)
    }
}
