//! The SVG plots of the HTML report.

use super::super::statistics::{RequestSeries, SeriesBin};
use super::super::suggestions::LimitProposal;
use super::html_escape::EscapedText;
use super::number_format::{format_count, format_time};
use super::results::{PolicySetReport, ReplayReport};
use crate::config::format_duration;
use std::fmt::{self, Write};
use std::time::Duration;

/// Maximum number of bins in the main plot and in the sparklines of policies.
const MAX_TIMELINE_BINS: usize = 120;
const MAX_SPARKLINE_BINS: usize = 48;

pub(super) fn write_timeline(
    page: &mut String,
    report: &ReplayReport,
    set: &PolicySetReport,
) -> fmt::Result {
    if set.stats.field_coverage.requests == 0 {
        return Ok(());
    }
    let bins = report.resample_series(&set.stats.series, MAX_TIMELINE_BINS);
    let most = bins
        .iter()
        .map(|bin| bin.requests)
        .max()
        .unwrap_or_default();
    page.push_str(
        "<section><h3>Requests over time</h3><p class=\"legend\"><i class=\"ok\"></i>forwarded <i class=\"bad\"></i>refused</p>",
    );
    let (width_s, _) = report.time_grid(MAX_TIMELINE_BINS);
    let bar_duration = format_duration(Duration::from_secs(width_s));
    write!(
        page,
        "<p class=\"axis\"><span>a bar is {bar_duration}; the maximum is {} requests</span></p>",
        format_count(most)
    )?;
    write_stacked_bars(
        page,
        (report, MAX_TIMELINE_BINS),
        &bins,
        "plot",
        160,
        "Requests over time, forwarded and refused",
    )?;
    let (from, to) = (
        format_time(report.from_s * 1_000_000),
        format_time(report.to_s * 1_000_000),
    );
    write!(
        page,
        "<p class=\"axis\"><span>{from}</span><span>{to}</span></p></section>"
    )
}

pub(super) fn write_sparkline(
    page: &mut String,
    report: &ReplayReport,
    series: &RequestSeries,
    name: &str,
) -> fmt::Result {
    let bins = report.resample_series(series, MAX_SPARKLINE_BINS);
    let label = format!("Requests over time of policy {}", EscapedText(name));
    write_stacked_bars(
        page,
        (report, MAX_SPARKLINE_BINS),
        &bins,
        "spark",
        40,
        &label,
    )
}

/// Writes stacked bars: refused requests on top of forwarded ones.
fn write_stacked_bars(
    page: &mut String,
    (report, most_steps): (&ReplayReport, usize),
    bins: &[SeriesBin],
    class: &str,
    height: u64,
    label: &str,
) -> fmt::Result {
    let most = bins
        .iter()
        .map(|bin| bin.requests)
        .max()
        .unwrap_or_default()
        .max(1);
    let width = bins.len() * 10;
    write!(
        page,
        "<svg class=\"{class}\" viewBox=\"0 0 {width} {height}\" preserveAspectRatio=\"none\" role=\"img\" \
         aria-label=\"{label}\">"
    )?;
    let bar_height = |number: u64| {
        let scaled = u128::from(number) * u128::from(height) / u128::from(most);
        // A nonzero bar has a minimum height, so that even a single refusal is visible.
        if number == 0 {
            0
        } else {
            u64::try_from(scaled).unwrap_or(height).max(2)
        }
    };
    let (width_s, _) = report.time_grid(most_steps);
    for (at, bin) in (0u64..).zip(bins).filter(|(_, bin)| bin.requests > 0) {
        let refused = bar_height(bin.refused);
        let forwarded = bar_height(bin.requests).saturating_sub(refused);
        let from_s = report.from_s + at * width_s;
        write!(
            page,
            "<g><title>{} UTC: {} requests, {} refused</title>",
            format_time(from_s * 1_000_000),
            format_count(bin.requests),
            format_count(bin.refused)
        )?;
        let mut bar = |class: &str, top: u64, rect_height: u64| {
            let left = at * 10;
            write!(
                page,
                "<rect class=\"{class}\" x=\"{left}\" y=\"{top}\" width=\"9\" height=\"{rect_height}\"/>"
            )
        };
        bar("ok", height - forwarded, forwarded)?;
        bar("bad", height.saturating_sub(forwarded + refused), refused)?;
        page.push_str("</g>");
    }
    page.push_str("</svg>");
    Ok(())
}

/// Writes a histogram of keys by peak and marks the keys that the suggestion affects.
pub(super) fn write_peak_histogram(page: &mut String, proposal: &LimitProposal) -> fmt::Result {
    let most = proposal
        .histogram
        .iter()
        .map(|(_, keys)| *keys)
        .max()
        .unwrap_or_default();
    write!(
        page,
        "<table class=\"hist\"><caption>Keys by peak demand; a key with a peak above {} is touched</caption><tbody>",
        format_count(proposal.requests)
    )?;
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
        write!(
            page,
            "<tr><th scope=\"row\" class=\"n\">{range}</th><td><svg viewBox=\"0 0 1000 10\" preserveAspectRatio=\"none\" \
             aria-hidden=\"true\"><rect class=\"{class}\" width=\"{bar_width}\" height=\"10\"/></svg></td><td class=\"n\">{}</td><td><small>{touched}</small></td></tr>",
            format_count(*keys)
        )?;
    }
    page.push_str("</tbody></table>");
    Ok(())
}
