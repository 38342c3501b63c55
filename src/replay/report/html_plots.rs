//! The SVG plots of the HTML report.

use super::PolicySetReport;
use super::html_page::{EscapedText, HtmlPage};
use super::number_format::format_time;
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
        if set.field_coverage.requests == 0 {
            return;
        }
        let series = &set.series.counts;
        let plot = self.report.plot(series, MAX_TIMELINE_BINS);
        let bar_duration = format_duration(Duration::from_secs(plot.step_seconds));
        let most = format_count(plot.requests.iter().copied().max().unwrap_or_default());
        self.push(&format!(
            "<section><h3>Requests over time</h3><p class=\"legend\"><i class=\"ok\"></i>forwarded <i class=\"bad\"></i>refused</p>\
            <p class=\"axis\"><span>a bar is {bar_duration}; the maximum is {most} requests</span></p>",
        ));
        let label = "Requests over time, forwarded and refused";
        self.write_stacked_bars(series, MAX_TIMELINE_BINS, ("plot", 160), label);
        let [from, to] = self.report.time_texts();
        self.push(&format!(
            "<p class=\"axis\"><span>{from}</span><span>{to}</span></p></section>"
        ));
    }

    pub(super) fn write_sparkline(&mut self, series: &RequestSeries, name: &str) {
        let label = format!("Requests over time of policy {}", EscapedText(name));
        self.write_stacked_bars(series, MAX_SPARKLINE_BINS, ("spark", 40), &label);
    }

    /// Writes stacked bars: refused requests on top of forwarded ones.
    fn write_stacked_bars(
        &mut self,
        series: &RequestSeries,
        max_bins: usize,
        (class, height): (&str, u64),
        label: &str,
    ) {
        let plot = self.report.plot(series, max_bins);
        let most = plot.requests.iter().copied().max().unwrap_or(0).max(1);
        let width = plot.requests.len() * 10;
        self.push(&format!(
            "<svg class=\"{class}\" viewBox=\"0 0 {width} {height}\" preserveAspectRatio=\"none\" role=\"img\" \
            aria-label=\"{label}\">",
        ));
        let bar_height = |number: u64| {
            let scaled = u128::from(number) * u128::from(height) / u128::from(most);
            // A nonzero bar has a minimum height, so that even a single refusal is visible.
            u64::try_from(scaled)
                .unwrap_or(height)
                .max(2.min(number.saturating_mul(2)))
        };
        let bins = plot.requests.into_iter().zip(plot.refused).zip(0u64..);
        for ((requests, refused), at) in bins.filter(|((requests, _), _)| *requests > 0) {
            let bad = bar_height(refused);
            let ok = bar_height(requests).saturating_sub(bad);
            let from = format_time((self.report.from + at * plot.step_seconds) * 1_000_000);
            let [requests, refused] = [requests, refused].map(format_count);
            let (left, ok_top) = (at * 10, height - ok);
            let bad_top = ok_top.saturating_sub(bad);
            self.push(&format!(
                "<g><title>{from} UTC: {requests} requests, {refused} refused</title>\
                <rect class=\"ok\" x=\"{left}\" y=\"{ok_top}\" width=\"9\" height=\"{ok}\"/>\
                <rect class=\"bad\" x=\"{left}\" y=\"{bad_top}\" width=\"9\" height=\"{bad}\"/></g>"
            ));
        }
        self.push("</svg>");
    }

    /// Writes a histogram of keys by peak and marks the keys that the suggestion affects.
    pub(super) fn write_peak_histogram(&mut self, proposal: &LimitProposal) {
        let limit = proposal.requests;
        let above_limit = format_count(limit);
        let most = proposal.histogram.iter().map(|(_, keys)| *keys).max();
        self.push(&format!(
            "<table class=\"hist\"><caption>Keys by peak demand; a key with a peak above {above_limit} is touched</caption><tbody>",
        ));
        let mut above = 0;
        for (upto, keys) in proposal.histogram.iter().copied() {
            let from = above + 1;
            above = upto;
            let range = match from {
                from if from == upto => format_count(upto),
                from => format!("{} – {}", format_count(from), format_count(upto)),
            };
            // Width of the bar in 1/1000 of the plot; a nonzero bar is always visible.
            let most = u128::from(most.unwrap_or_default().max(1));
            let width = (u128::from(keys) * 1000 / most).max(4.min(u128::from(keys) * 4));
            let (class, touched) = match keys {
                1.. if from > limit => ("bad", "touched".to_owned()),
                1.. if upto > limit => ("ok", format!("touched above {above_limit}")),
                _ => ("ok", String::new()),
            };
            let keys = format_count(keys);
            self.push(&format!(
                "<tr><th scope=\"row\" class=\"n\">{range}</th><td><svg viewBox=\"0 0 1000 10\" preserveAspectRatio=\"none\" \
                aria-hidden=\"true\"><rect class=\"{class}\" width=\"{width}\" height=\"10\"/></svg></td>\
                <td class=\"n\">{keys}</td><td><small>{touched}</small></td></tr>",
            ));
        }
        self.push("</tbody></table>");
    }
}
