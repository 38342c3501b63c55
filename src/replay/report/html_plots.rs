//! The SVG plots of the HTML report.

use super::html_page::{EscapedText, HtmlPage};
use super::number_format::format_time;
use super::results::PolicySetReport;
use crate::config::format_duration;
use crate::replay::statistics::RequestSeries;
use crate::replay::suggestions::LimitProposal;
use crate::text::format_count;
use std::time::Duration;

/// Maximum number of bins in the main plot and in the sparklines of policies.
const MAX_TIMELINE_BINS: usize = 120;
const MAX_SPARKLINE_BINS: usize = 48;

impl HtmlPage<'_> {
    pub(super) fn write_timeline(&mut self, set: &PolicySetReport) {
        if set.stats.field_coverage.requests == 0 {
            return;
        }
        let report = self.report;
        let bins = report.resample_series(&set.stats.series, MAX_TIMELINE_BINS);
        let most = bins.iter().map(|bin| bin.requests).max();
        self.push(
            "<section><h3>Requests over time</h3><p class=\"legend\"><i class=\"ok\"></i>forwarded <i class=\"bad\"></i>refused</p>",
        );
        let (width_s, _) = report.time_grid(MAX_TIMELINE_BINS);
        let bar_duration = format_duration(Duration::from_secs(width_s));
        self.push(&format!(
            "<p class=\"axis\"><span>a bar is {bar_duration}; the maximum is {} requests</span></p>",
            format_count(most.unwrap_or_default()),
        ));
        self.write_stacked_bars(
            (&set.stats.series, MAX_TIMELINE_BINS),
            "plot",
            160,
            "Requests over time, forwarded and refused",
        );
        let [from, to] = report.time_texts();
        self.push(&format!(
            "<p class=\"axis\"><span>{from}</span><span>{to}</span></p></section>"
        ));
    }

    pub(super) fn write_sparkline(&mut self, series: &RequestSeries, name: &str) {
        let label = format!("Requests over time of policy {}", EscapedText(name));
        self.write_stacked_bars((series, MAX_SPARKLINE_BINS), "spark", 40, &label);
    }

    /// Writes stacked bars: refused requests on top of forwarded ones.
    fn write_stacked_bars(
        &mut self,
        (series, max_bins): (&RequestSeries, usize),
        class: &str,
        height: u64,
        label: &str,
    ) {
        let report = self.report;
        let bins = report.resample_series(series, max_bins);
        let most = bins
            .iter()
            .map(|bin| bin.requests)
            .max()
            .unwrap_or(0)
            .max(1);
        let width = bins.len() * 10;
        self.push(&format!(
            "<svg class=\"{class}\" viewBox=\"0 0 {width} {height}\" preserveAspectRatio=\"none\" role=\"img\" \
            aria-label=\"{label}\">",
        ));
        let bar_height = |number: u64| {
            let scaled = u128::from(number) * u128::from(height) / u128::from(most);
            // A nonzero bar has a minimum height, so that even a single refusal is visible.
            if number == 0 {
                0
            } else {
                u64::try_from(scaled).unwrap_or(height).max(2)
            }
        };
        let (width_s, _) = report.time_grid(max_bins);
        for (at, bin) in (0u64..).zip(&bins).filter(|(_, bin)| bin.requests > 0) {
            let refused = bar_height(bin.refused);
            let forwarded = bar_height(bin.requests).saturating_sub(refused);
            let from_s = report.from_s + at * width_s;
            self.push(&format!(
                "<g><title>{} UTC: {} requests, {} refused</title>",
                format_time(from_s * 1_000_000),
                format_count(bin.requests),
                format_count(bin.refused)
            ));
            let mut bar = |class: &str, top: u64, rect_height: u64| {
                let left = at * 10;
                self.push(&format!("<rect class=\"{class}\" x=\"{left}\" y=\"{top}\" width=\"9\" height=\"{rect_height}\"/>"));
            };
            bar("ok", height - forwarded, forwarded);
            bar("bad", height.saturating_sub(forwarded + refused), refused);
            self.push("</g>");
        }
        self.push("</svg>");
    }

    /// Writes a histogram of keys by peak and marks the keys that the suggestion affects.
    pub(super) fn write_peak_histogram(&mut self, proposal: &LimitProposal) {
        let most = proposal
            .histogram
            .iter()
            .map(|(_, keys)| *keys)
            .max()
            .unwrap_or_default();
        self.push(&format!(
            "<table class=\"hist\"><caption>Keys by peak demand; a key with a peak above {} is touched</caption><tbody>",
            format_count(proposal.requests),
        ));
        let mut above = 0;
        for (upto, keys) in &proposal.histogram {
            let from = above + 1;
            above = *upto;
            let range = if from == *upto {
                format_count(*upto)
            } else {
                format!("{} – {}", format_count(from), format_count(*upto))
            };
            // Width of the bar in 1/1000 of the plot; a nonzero bar is always visible.
            let bar_width = if *keys == 0 {
                0
            } else {
                (u128::from(*keys) * 1000 / u128::from(most.max(1))).max(4)
            };
            let (class, touched) = match (*keys, proposal.requests) {
                (1.., requests) if from > requests => ("bad", "touched".to_owned()),
                (1.., requests) if *upto > requests => {
                    ("ok", format!("touched above {}", format_count(requests)))
                }
                _ => ("ok", String::new()),
            };
            self.push(&format!(
                "<tr><th scope=\"row\" class=\"n\">{range}</th><td><svg viewBox=\"0 0 1000 10\" preserveAspectRatio=\"none\" \
                aria-hidden=\"true\"><rect class=\"{class}\" width=\"{bar_width}\" height=\"10\"/></svg></td><td class=\"n\">{}</td><td><small>{touched}</small></td></tr>",
                format_count(*keys),
            ));
        }
        self.push("</tbody></table>");
    }
}
