//! The report as one self-contained HTML page: no scripts, fonts or external resources. The plots
//! are SVG.
//!
//! All text from logs and file names is escaped by [`EscapedText`] and never used in an attribute
//! that loads or runs anything.

use super::super::simulator::ReplayPolicyStats;
use super::super::suggestions::{LimitProposal, LimitSuggestion};
use super::html_escape::EscapedText;
use super::html_plots::{write_peak_histogram, write_sparkline, write_timeline};
use super::number_format::{
    format_count, format_key_count, format_share, format_time, format_time_range,
};
use super::results::{PolicySetReport, ReplayPolicySummary, ReplayReport, merged_policy_names};
use crate::config::format_period;
use crate::policy::PolicyMode;
use std::fmt::{self, Write};

const STYLE: &str = include_str!("style.css");

pub(super) fn render_html(report: &ReplayReport) -> String {
    let mut page = String::with_capacity(64 << 10);
    // Writing to a `String` does not fail.
    let _written = write_page(&mut page, report);
    page
}

fn write_page(page: &mut String, report: &ReplayReport) -> fmt::Result {
    write!(
        page,
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\
         <title>tidegate replay</title><style>{STYLE}</style></head><body><main>"
    )?;
    write_header(page, report)?;
    if let [first, second, ..] = report.sets.as_slice() {
        write_comparison(page, report, first, second)?;
    }
    let pair_class = if report.sets.len() > 1 {
        " class=\"pair\""
    } else {
        ""
    };
    write!(page, "<div{pair_class}>")?;
    for set in &report.sets {
        page.push_str("<article>");
        // A hidden `h2` keeps the heading levels complete for a single set.
        let (name, class) = match report.sets.len() {
            1 => ("these policies", " class=\"unseen\""),
            _ => (set.name.as_str(), ""),
        };
        write!(page, "<h2{class}>By {}</h2>", EscapedText(name))?;
        write_outcome_tiles(page, set)?;
        write_timeline(page, report, set)?;
        write_policy_table(page, report, set)?;
        write_most_refused_keys(page, set)?;
        write_suggestions(page, report, set)?;
        page.push_str("</article>");
    }
    page.push_str("</div>");
    write_list(page, "Warnings", &report.warnings())?;
    page.push_str("</main></body></html>\n");
    Ok(())
}

fn write_header(page: &mut String, report: &ReplayReport) -> fmt::Result {
    page.push_str("<header><h1>What the policies would have done</h1><p>");
    for (index, log) in report.logs.iter().enumerate() {
        let comma = if index > 0 { ", " } else { "" };
        write!(
            page,
            "{comma}<code>{}</code> ({})",
            EscapedText(&log.name),
            log.format
        )?;
    }
    write!(
        page,
        ": {} requests in {} lines",
        format_count(report.request_count()),
        format_count(report.line_count())
    )?;
    if report.request_count() > 0 {
        let (from, to) = (
            format_time(report.from_s * 1_000_000),
            format_time(report.to_s * 1_000_000),
        );
        write!(page, ", {from} to {to} UTC")?;
    }
    page.push_str(".</p></header>");
    write_list(page, "Caveats", &report.caveats())
}

fn write_comparison(
    page: &mut String,
    report: &ReplayReport,
    first: &PolicySetReport,
    second: &PolicySetReport,
) -> fmt::Result {
    write!(
        page,
        "<section><h2>Side by side</h2><div class=\"scroll\"><table class=\"sides\"><thead><tr><th scope=\"col\">Policy</th>\
         <th scope=\"col\" class=\"n\">{}</th><th scope=\"col\" class=\"n\">{}</th></tr></thead><tbody>",
        EscapedText(&first.name),
        EscapedText(&second.name)
    )?;
    let mut row = |name: &str, one: String, other: String| {
        write!(
            page,
            "<tr><th scope=\"row\">{}</th><td class=\"n\">{one}</td><td class=\"n\">{other}</td></tr>",
            EscapedText(name)
        )
    };
    let forwarded = |set: &PolicySetReport| {
        format!(
            "{} ({})",
            format_count(set.stats.forwarded),
            format_share(set.stats.forwarded, set.stats.field_coverage.requests)
        )
    };
    row("all: forwarded", forwarded(first), forwarded(second))?;
    for policy in merged_policy_names(first, second) {
        let refused = |set: &PolicySetReport| {
            set.policy_stats(policy).map_or("–".to_owned(), |stats| {
                format!(
                    "{} of {} refused",
                    format_count(stats.refused_count()),
                    format_count(stats.matched_count())
                )
            })
        };
        row(policy, refused(first), refused(second))?;
    }
    write!(
        page,
        "</tbody></table></div><p>Refused by the second only: <b>{}</b> requests. By the first only: <b>{}</b>.</p></section>",
        format_count(report.differences.rejected_by_second_only),
        format_count(report.differences.rejected_by_first_only)
    )
}

fn write_outcome_tiles(page: &mut String, set: &PolicySetReport) -> fmt::Result {
    page.push_str("<dl class=\"tiles\">");
    for (label, number) in set.outcome_counts() {
        if number > 0 || label == "forwarded" {
            let part = format_share(number, set.stats.field_coverage.requests);
            write!(
                page,
                "<div><dt>{label}</dt><dd>{}<small>{part}</small></dd></div>",
                format_count(number)
            )?;
        }
    }
    page.push_str("</dl>");
    match set.describe_left_out() {
        Some(sentence) => write!(page, "<p>{}</p>", EscapedText(&sentence)),
        None => Ok(()),
    }
}

fn write_policy_table(
    page: &mut String,
    report: &ReplayReport,
    set: &PolicySetReport,
) -> fmt::Result {
    page.push_str(
        "<section><h3>Policies</h3><div class=\"scroll\"><table><thead><tr><th scope=\"col\">Policy</th>\
         <th scope=\"col\" class=\"n\">Matched</th><th scope=\"col\" class=\"n\">Refused</th><th scope=\"col\" class=\"n\">Share</th>\
         <th scope=\"col\" class=\"n\">Delayed</th><th scope=\"col\" class=\"n\">Keys</th><th scope=\"col\" class=\"n\">Touched</th>\
         <th scope=\"col\">Over time; first and last refusal</th></tr></thead><tbody>",
    );
    for (summary, stats) in set.policies.iter().zip(&set.stats.policies) {
        write_policy_row(page, report, summary, stats)?;
    }
    page.push_str("</tbody></table></div></section>");
    Ok(())
}

fn write_policy_row(
    page: &mut String,
    report: &ReplayReport,
    summary: &ReplayPolicySummary,
    stats: &ReplayPolicyStats,
) -> fmt::Result {
    let (matched, refused) = (stats.matched_count(), stats.refused_count());
    let (keys, touched) = match summary.action {
        None => (
            format_key_count(stats),
            format_count(stats.keys.refused_key_count()),
        ),
        Some(_) => ("–".to_owned(), "–".to_owned()),
    };
    write!(page, "<tr><th scope=\"row\">{}", EscapedText(&summary.name))?;
    if summary.mode != PolicyMode::Enforce {
        let mode = summary.mode.name();
        page.push_str(&format!("<small>{mode}: not enforced</small>"));
    }
    if let Some(action) = summary.action {
        write!(page, "<small>{action}</small>")?;
    }
    if stats.blocked > 0 {
        write!(
            page,
            "<small>{} of the refused by block_for</small>",
            format_count(stats.blocked)
        )?;
    }
    write!(
        page,
        "</th><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
         <td class=\"n\">{keys}</td><td class=\"n\">{touched}</td><td>",
        format_count(matched),
        format_count(refused),
        format_share(refused, matched),
        format_count(stats.delayed),
    )?;
    write_sparkline(page, report, &stats.series, &summary.name)?;
    if refused > 0 {
        write!(
            page,
            "<small>{}</small>",
            format_time_range(stats.first_refused_us, stats.last_refused_us)
        )?;
    }
    page.push_str("</td></tr>");
    Ok(())
}

fn write_most_refused_keys(page: &mut String, set: &PolicySetReport) -> fmt::Result {
    if set.most_refused_keys.is_empty() {
        return Ok(());
    }
    page.push_str(
        "<section><h3>Most limited keys</h3><div class=\"scroll\"><table><thead><tr><th scope=\"col\">Policy</th>\
         <th scope=\"col\">Key</th><th scope=\"col\" class=\"n\">Refused</th><th scope=\"col\" class=\"n\">Of</th>\
         <th scope=\"col\">First and last (UTC)</th></tr></thead><tbody>",
    );
    for key in &set.most_refused_keys {
        let error = if key.error > 0 {
            format!("<small>or {} more</small>", format_count(key.error))
        } else {
            String::new()
        };
        write!(
            page,
            "<tr><td>{}{}</td><td><code>{}</code></td><td class=\"n\">{}{error}</td><td class=\"n\">{}</td><td class=\"when\">{}</td></tr>",
            EscapedText(&key.policy),
            match key.mode {
                PolicyMode::Enforce => "",
                PolicyMode::Mark => " <small>mark</small>",
                PolicyMode::Shadow => " <small>shadow</small>",
            },
            EscapedText(&key.key),
            format_count(key.refused),
            format_count(key.requests),
            format_time_range(key.first_refused_us, key.last_refused_us),
        )?;
    }
    page.push_str("</tbody></table></div></section>");
    Ok(())
}

fn write_suggestions(
    page: &mut String,
    report: &ReplayReport,
    set: &PolicySetReport,
) -> fmt::Result {
    let Some(percent) = report
        .suggest_percent
        .filter(|_| !set.suggestions.is_empty())
    else {
        return Ok(());
    };
    write!(
        page,
        "<section><h3>Limits that would have touched at most {percent} % of the keys</h3>"
    )?;
    for (at, suggestions) in &set.suggestions {
        let name = set.policies.get(*at).map_or("", |summary| &summary.name);
        for suggestion in suggestions {
            page.push_str("<div class=\"card\">");
            write_suggestion(page, name, suggestion)?;
            page.push_str("</div>");
        }
    }
    page.push_str("</section>");
    Ok(())
}

fn write_suggestion(page: &mut String, policy: &str, suggestion: &LimitSuggestion) -> fmt::Result {
    let limit = &suggestion.limit;
    let per = format_period(&limit.limit);
    write!(page, "<h4>{}", EscapedText(policy))?;
    if *limit.name != *policy {
        write!(page, " / {}", EscapedText(&limit.name))?;
    }
    page.push_str("</h4>");
    let proposal = match &suggestion.proposal {
        Ok(proposal) => proposal,
        Err(reason) => {
            return write!(page, "<p>No suggestion: {}.</p>", EscapedText(reason));
        }
    };
    let LimitProposal {
        requests,
        peak,
        touched_keys: touched,
        touched_keys_now: touched_now,
        sampled_keys: keys,
        ..
    } = proposal;
    write!(
        page,
        "<p><code>requests = {requests}, per = \"{per}\"</code> (a peak of {} and headroom) touches {} of {} keys ({}). The current limit is {}, which touches at most {} ({}).</p>",
        format_count(*peak),
        format_count(*touched),
        format_count(*keys),
        format_share(*touched, *keys),
        format_count(limit.limit.requests),
        format_count(*touched_now),
        format_share(*touched_now, *keys),
    )?;
    page.push_str("<p>Peak demand: ");
    for (index, (of_1000, peak)) in proposal.quantiles.iter().enumerate() {
        let comma = if index > 0 { ", " } else { "" };
        match of_1000 {
            1000 => write!(page, "{comma}and the highest {}", format_count(*peak))?,
            _ => write!(
                page,
                "{comma}{} % of the keys up to {}",
                f64::from(*of_1000) / 10.0,
                format_count(*peak)
            )?,
        }
    }
    write!(page, " per {per}.</p>")?;
    write_peak_histogram(page, proposal)?;
    if proposal.keys_per_sample > 1 {
        write!(
            page,
            "<p><small>Sampled from one key in {}.</small></p>",
            format_count(proposal.keys_per_sample)
        )?;
    }
    Ok(())
}

fn write_list(page: &mut String, title: &str, sentences: &[String]) -> fmt::Result {
    if sentences.is_empty() {
        return Ok(());
    }
    write!(page, "<section><h2>{title}</h2><ul>")?;
    for sentence in sentences {
        write!(page, "<li>{}</li>", EscapedText(sentence))?;
    }
    page.push_str("</ul></section>");
    Ok(())
}
