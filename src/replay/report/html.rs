//! The report as one self-contained HTML page: no scripts, fonts or external resources. The plots
//! are SVG.
//!
//! All text from logs and file names is escaped by [`EscapedText`] and never used in an attribute
//! that loads or runs anything.

use super::html_page::{EscapedText, HtmlPage};
use super::number_format::{format_key_counts, format_share, format_time_range};
use super::results::{
    PolicySetReport, ReplayPolicySummary, ReplayReport, describe_peaks, describe_touched_keys,
    limit_title, merged_policy_names,
};
use crate::config::format_period;
use crate::policy::PolicyMode;
use crate::replay::simulator::ReplayPolicyStats;
use crate::replay::suggestions::LimitSuggestion;
use crate::text::format_count;

const STYLE: &str = include_str!("style.css");

pub(super) fn render_html(report: &ReplayReport) -> String {
    let mut page = HtmlPage::new(report);
    page.write_page();
    page.text
}

impl HtmlPage<'_> {
    fn write_page(&mut self) {
        let report = self.report;
        self.push(&format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
            <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
            <meta name=\"color-scheme\" content=\"light dark\">\
            <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\
            <title>tidegate replay</title><style>{STYLE}</style></head><body><main>",
        ));
        self.write_header();
        if let [first, second, ..] = report.sets.as_slice() {
            self.write_comparison(first, second);
        }
        let pair_class = if report.sets.len() > 1 {
            " class=\"pair\""
        } else {
            ""
        };
        self.push(&format!("<div{pair_class}>"));
        for set in &report.sets {
            self.push("<article>");
            // A hidden `h2` keeps the heading levels complete for a single set.
            let (name, class) = match report.sets.len() {
                1 => ("these policies", " class=\"unseen\""),
                _ => (set.name.as_str(), ""),
            };
            self.push(&format!("<h2{class}>By {}</h2>", EscapedText(name)));
            self.write_outcome_tiles(set);
            self.write_timeline(set);
            self.write_policy_table(set);
            self.write_most_refused_keys(set);
            self.write_suggestions(set);
            self.push("</article>");
        }
        self.push("</div>");
        self.write_list("Warnings", &report.warnings());
        self.push("</main></body></html>\n");
    }

    fn write_header(&mut self) {
        let report = self.report;
        self.push("<header><h1>What the policies would have done</h1><p>");
        for (index, log) in report.logs.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            self.push(&format!(
                "{comma}<code>{}</code> ({})",
                EscapedText(&log.name),
                log.format
            ));
        }
        self.push(&format!(
            ": {} requests in {} lines",
            format_count(report.request_count()),
            format_count(report.line_count())
        ));
        if report.request_count() > 0 {
            let [from, to] = report.time_texts();
            self.push(&format!(", {from} to {to} UTC"));
        }
        self.push(".</p></header>");
        self.write_list("Caveats", &report.caveats())
    }

    fn write_comparison(&mut self, first: &PolicySetReport, second: &PolicySetReport) {
        self.push(&format!(
            "<section><h2>Side by side</h2><div class=\"scroll\"><table class=\"sides\"><thead><tr><th scope=\"col\">Policy</th>\
            <th scope=\"col\" class=\"n\">{}</th><th scope=\"col\" class=\"n\">{}</th></tr></thead><tbody>",
            EscapedText(&first.name),
            EscapedText(&second.name),
        ));
        let mut row = |name: &str, one: String, other: String| {
            self.push(&format!(
                "<tr><th scope=\"row\">{}</th><td class=\"n\">{one}</td><td class=\"n\">{other}</td></tr>",
                EscapedText(name),
            ))
        };
        let forwarded = |set: &PolicySetReport| {
            format!(
                "{} ({})",
                format_count(set.stats.forwarded),
                format_share(set.stats.forwarded, set.stats.field_coverage.requests)
            )
        };
        row("all: forwarded", forwarded(first), forwarded(second));
        for policy in merged_policy_names(first, second) {
            let [one, two] = [first, second].map(|set| set.describe_refused(policy));
            row(policy, one, two);
        }
        self.push(&format!(
            "</tbody></table></div><p>Refused by the second only: <b>{}</b> requests. By the first only: <b>{}</b>.</p></section>",
            format_count(self.report.differences.rejected_by_second_only),
            format_count(self.report.differences.rejected_by_first_only),
        ))
    }

    fn write_outcome_tiles(&mut self, set: &PolicySetReport) {
        self.push("<dl class=\"tiles\">");
        for (label, number) in set.outcome_counts() {
            if number > 0 || label == "forwarded" {
                let part = format_share(number, set.stats.field_coverage.requests);
                self.push(&format!(
                    "<div><dt>{label}</dt><dd>{}<small>{part}</small></dd></div>",
                    format_count(number)
                ));
            }
        }
        self.push("</dl>");
        if let Some(sentence) = set.describe_left_out() {
            self.push(&format!("<p>{}</p>", EscapedText(&sentence)));
        }
    }

    fn write_policy_table(&mut self, set: &PolicySetReport) {
        self.push(
            "<section><h3>Policies</h3><div class=\"scroll\"><table><thead><tr><th scope=\"col\">Policy</th>\
            <th scope=\"col\" class=\"n\">Matched</th><th scope=\"col\" class=\"n\">Refused</th><th scope=\"col\" class=\"n\">Share</th>\
            <th scope=\"col\" class=\"n\">Delayed</th><th scope=\"col\" class=\"n\">Keys</th><th scope=\"col\" class=\"n\">Touched</th>\
            <th scope=\"col\">Over time; first and last refusal</th></tr></thead><tbody>",
        );
        let mut unmatched = Vec::new();
        for (summary, stats) in set.policies.iter().zip(&set.stats.policies) {
            match stats.matched_count() {
                0 if summary.is_left_out => {}
                0 => unmatched.push(summary.name.as_str()),
                _ => self.write_policy_row(summary, stats),
            }
        }
        self.push("</tbody></table></div>");
        if !unmatched.is_empty() {
            let names = unmatched.join(", ");
            self.push(&format!(
                "<p>No request matched: {}.</p>",
                EscapedText(&names)
            ));
        }
        self.push("</section>");
    }

    fn write_policy_row(&mut self, summary: &ReplayPolicySummary, stats: &ReplayPolicyStats) {
        let (matched, refused) = (stats.matched_count(), stats.refused_count());
        let [keys, touched] = format_key_counts(stats, summary.action.is_none(), "–");
        self.push(&format!(
            "<tr><th scope=\"row\">{}",
            EscapedText(&summary.name)
        ));
        if summary.mode != PolicyMode::Enforce {
            let mode = summary.mode.name();
            self.push(&format!("<small>{mode}: not enforced</small>"));
        }
        if let Some(action) = summary.action {
            self.push(&format!("<small>{action}</small>"));
        }
        if stats.blocked > 0 {
            self.push(&format!(
                "<small>{} of the refused by block_for</small>",
                format_count(stats.blocked)
            ));
        }
        self.push(&format!(
            "</th><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
            <td class=\"n\">{keys}</td><td class=\"n\">{touched}</td><td>",
            format_count(matched),
            format_count(refused),
            format_share(refused, matched),
            format_count(stats.delayed),
        ));
        self.write_sparkline(&stats.series, &summary.name);
        if refused > 0 {
            self.push(&format!(
                "<small>{}</small>",
                format_time_range(stats.first_refused_us, stats.last_refused_us, '…')
            ));
        }
        self.push("</td></tr>");
    }

    fn write_most_refused_keys(&mut self, set: &PolicySetReport) {
        if set.most_refused_keys.is_empty() {
            return;
        }
        self.push(
            "<section><h3>Most limited keys</h3><div class=\"scroll\"><table><thead><tr><th scope=\"col\">Policy</th>\
            <th scope=\"col\">Key</th><th scope=\"col\" class=\"n\">Refused</th><th scope=\"col\" class=\"n\">Of</th>\
            <th scope=\"col\">First and last (UTC)</th></tr></thead><tbody>",
        );
        for key in &set.most_refused_keys {
            let error = if key.stats.error > 0 {
                format!("<small>or {} more</small>", format_count(key.stats.error))
            } else {
                String::new()
            };
            self.push(&format!(
                "<tr><td>{}{}</td><td><code>{}</code></td><td class=\"n\">{}{error}</td><td class=\"n\">{}</td><td class=\"when\">{}</td></tr>",
                EscapedText(&key.policy),
                match key.mode {
                    PolicyMode::Enforce => "",
                    PolicyMode::Mark => " <small>mark</small>",
                    PolicyMode::Shadow => " <small>shadow</small>",
                },
                EscapedText(&key.key),
                format_count(key.stats.refused),
                format_count(key.stats.requests),
                format_time_range(key.stats.first_refused_us, key.stats.last_refused_us, '…'),
            ));
        }
        self.push("</tbody></table></div></section>");
    }

    fn write_suggestions(&mut self, set: &PolicySetReport) {
        let Some(percent) = self
            .report
            .suggest_percent
            .filter(|_| !set.suggestions.is_empty())
        else {
            return;
        };
        self.push(&format!(
            "<section><h3>Limits that would have touched at most {percent} % of the keys</h3>"
        ));
        for suggestion in &set.suggestions {
            self.push("<div class=\"card\">");
            self.write_suggestion(suggestion);
            self.push("</div>");
        }
        self.push("</section>");
    }

    fn write_suggestion(&mut self, suggestion: &LimitSuggestion) {
        let limit = &suggestion.limit;
        let per = format_period(&limit.limit);
        let title = limit_title(suggestion);
        self.push(&format!("<h4>{}</h4>", EscapedText(&title)));
        let proposal = match &suggestion.proposal {
            Ok(proposal) => proposal,
            Err(reason) => {
                return self.push(&format!("<p>No suggestion: {}.</p>", EscapedText(reason)));
            }
        };
        let [suggested, current] = describe_touched_keys(proposal);
        self.push(&format!(
            "<p><code>requests = {}, per = \"{per}\"</code> {suggested}. The current limit is {}, which {current}.</p>",
            proposal.requests,
            format_count(limit.limit.requests),
        ));
        let peaks = describe_peaks(proposal);
        self.push(&format!("<p>Peak demand per {per}: {peaks}.</p>"));
        self.write_peak_histogram(proposal);
        if proposal.keys_per_sample > 1 {
            self.push(&format!(
                "<p><small>Sampled from one key in {}.</small></p>",
                format_count(proposal.keys_per_sample)
            ));
        }
    }

    fn write_list(&mut self, title: &str, sentences: &[String]) {
        if sentences.is_empty() {
            return;
        }
        self.push(&format!("<section><h2>{title}</h2><ul>"));
        for sentence in sentences {
            self.push(&format!("<li>{}</li>", EscapedText(sentence)));
        }
        self.push("</ul></section>");
    }
}
