//! The report as one self-contained HTML page: no scripts, fonts or external resources. The plots
//! are SVG.
//!
//! All text from logs and file names is escaped by [`EscapedText`] and never used in an attribute
//! that loads or runs anything.

use super::{PolicyReport, PolicySetReport, ReplayReport, format_share, merged_policy_names};
use crate::config::format_duration;
use crate::replay::statistics::RequestSeries;
use crate::replay::suggestions::{LimitProposal, LimitSuggestion};
use crate::text::{format_count, format_time, format_time_range};
use std::fmt::{self, Display, Write};
use std::time::Duration;

const STYLE: &str = include_str!("style.css");

/// Maximum number of bins in the main plot and in the sparklines of policies.
const MAX_TIMELINE_BINS: usize = 120;
const MAX_SPARKLINE_BINS: usize = 48;

/// An HTML report that is being written.
struct HtmlPage<'r> {
    report: &'r ReplayReport,
    text: String,
}

impl ReplayReport {
    /// Renders the report as a self-contained page.
    pub fn render_html(&self) -> String {
        let text = format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
            <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
            <meta name=\"color-scheme\" content=\"light dark\">\
            <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\
            <title>tidegate replay</title><style>{STYLE}</style></head><body><main>",
        );
        let mut page = HtmlPage { report: self, text };
        page.write_main();
        page.push("</main></body></html>\n");
        page.text
    }
}

impl HtmlPage<'_> {
    fn push(&mut self, html: &str) {
        self.text.push_str(html);
    }

    fn write_main(&mut self) {
        let report = self.report;
        self.write_header();
        if let [first, second, ..] = report.sets.as_slice() {
            self.write_comparison([first, second]);
        }
        let is_pair = report.sets.len() > 1;
        let class = if is_pair { " class=\"pair\"" } else { "" };
        self.push(&format!("<div{class}>"));
        for set in &report.sets {
            self.push("<article>");
            // A hidden `h2` keeps the heading levels complete for a single set.
            let (name, class) = match is_pair {
                true => (set.config.as_str(), ""),
                false => ("these policies", " class=\"unseen\""),
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
        self.write_list("Warnings", report.other_warnings());
    }

    fn write_header(&mut self) {
        let report = self.report;
        let logs = report.logs.iter();
        let logs =
            logs.map(|log| format!("<code>{}</code> ({})", EscapedText(&log.name), log.format));
        let logs = logs.collect::<Vec<_>>().join(", ");
        let [requests, lines] = [report.requests, report.lines].map(format_count);
        self.push(&format!(
            "<header><h1>What the policies would have done</h1><p>{logs}: {requests} requests in {lines} lines"
        ));
        if report.requests > 0 {
            let [from, to] = report.time_texts();
            self.push(&format!(", {from} to {to} UTC"));
        }
        self.push(".</p></header>");
        self.write_list("Caveats", report.caveats())
    }

    fn write_comparison(&mut self, sets: [&PolicySetReport; 2]) {
        let [first, second] = sets.map(|set| EscapedText(&set.config));
        self.push(&format!(
            "<section><h2>Side by side</h2><div class=\"scroll\"><table class=\"sides\"><thead><tr><th scope=\"col\">Policy</th>\
            <th scope=\"col\" class=\"n\">{first}</th><th scope=\"col\" class=\"n\">{second}</th></tr></thead><tbody>",
        ));
        let mut row = |name: &str, [one, other]: [String; 2]| {
            let name = EscapedText(name);
            self.push(&format!(
                "<tr><th scope=\"row\">{name}</th><td class=\"n\">{one}</td><td class=\"n\">{other}</td></tr>",
            ))
        };
        let forwarded = sets.map(|set| {
            let share = format_share(set.forwarded, set.field_coverage.requests);
            format!("{} ({share})", format_count(set.forwarded))
        });
        row("all: forwarded", forwarded);
        for policy in merged_policy_names(sets) {
            row(policy, sets.map(|set| set.describe_refused(policy)));
        }
        let [by_second, by_first] = self.report.differences().map(format_count);
        self.push(&format!(
            "</tbody></table></div><p>Refused by the second only: <b>{by_second}</b> requests. \
            By the first only: <b>{by_first}</b>.</p></section>",
        ))
    }

    fn write_outcome_tiles(&mut self, set: &PolicySetReport) {
        self.push("<dl class=\"tiles\">");
        for (label, number) in set.outcome_counts() {
            if number > 0 || label == "forwarded" {
                let part = format_share(number, set.field_coverage.requests);
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
        self.open_table(
            "<h3>Policies</h3>",
            &[
                "Policy",
                "#Matched",
                "#Refused",
                "#Share",
                "#Delayed",
                "#Keys",
                "#Touched",
                "Over time; first and last refusal",
            ],
        );
        let mut unmatched = Vec::new();
        for policy in &set.policies {
            match policy.matched {
                0 if policy.left_out => {}
                0 => unmatched.push(policy.name.as_str()),
                _ => self.write_policy_row(policy),
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

    fn write_policy_row(&mut self, policy: &PolicyReport) {
        let (mode, action) = (policy.mode, policy.action);
        self.push(&format!(
            "<tr><th scope=\"row\">{}",
            EscapedText(&policy.name)
        ));
        let [matched, refused, delayed, blocked] = [
            policy.matched,
            policy.refused,
            policy.delayed,
            policy.blocked,
        ]
        .map(format_count);
        for (applies, note) in [
            (mode != "enforce", format!("{mode}: not enforced")),
            (action != "limit", action.to_owned()),
            (
                policy.blocked > 0,
                format!("{blocked} of the refused by block_for"),
            ),
        ] {
            if applies {
                self.push(&format!("<small>{note}</small>"));
            }
        }
        self.push("</th>");
        let [keys, touched] = policy.format_key_counts("–");
        let share = format_share(policy.refused, policy.matched);
        for cell in [matched, refused, share, delayed, keys, touched] {
            self.push(&format!("<td class=\"n\">{cell}</td>"));
        }
        self.push("<td>");
        let label = format!("Requests over time of policy {}", EscapedText(&policy.name));
        let series = &policy.series.counts;
        self.write_stacked_bars(series, MAX_SPARKLINE_BINS, ("spark", 40), &label);
        if policy.refused > 0 {
            let times = format_time_range(policy.first_refused_us, policy.last_refused_us, '…');
            self.push(&format!("<small>{times}</small>"));
        }
        self.push("</td></tr>");
    }

    fn write_most_refused_keys(&mut self, set: &PolicySetReport) {
        if set.top.is_empty() {
            return;
        }
        let columns = ["Policy", "Key", "#Refused", "#Of", "First and last (UTC)"];
        self.open_table("<h3>Most limited keys</h3>", &columns);
        for key in &set.top {
            let stats = &key.stats;
            let (policy, name) = (EscapedText(&key.policy), EscapedText(&key.key));
            let [refused, requests, error] =
                [stats.refused, stats.requests, stats.error].map(format_count);
            let error = match stats.error {
                0 => String::new(),
                _ => format!("<small>or {error} more</small>"),
            };
            let mode = match key.mode {
                "enforce" => String::new(),
                mode => format!(" <small>{mode}</small>"),
            };
            let times = format_time_range(stats.first_refused_us, stats.last_refused_us, '…');
            self.push(&format!(
                "<tr><td>{policy}{mode}</td><td><code>{name}</code></td><td class=\"n\">{refused}{error}</td>\
                <td class=\"n\">{requests}</td><td class=\"when\">{times}</td></tr>",
            ));
        }
        self.push("</tbody></table></div></section>");
    }

    fn write_suggestions(&mut self, set: &PolicySetReport) {
        let mut suggestions = set.suggestions().peekable();
        if let Some(percent) = self.report.suggest_percent
            && suggestions.peek().is_some()
        {
            self.push(&format!(
                "<section><h3>Limits that would have touched at most {percent} % of the keys</h3>"
            ));
            for suggestion in suggestions {
                self.push("<div class=\"card\">");
                self.write_suggestion(suggestion);
                self.push("</div>");
            }
            self.push("</section>");
        }
    }

    fn write_suggestion(&mut self, suggestion: &LimitSuggestion) {
        let per = &suggestion.period;
        self.push(&format!("<h4>{}</h4>", EscapedText(&suggestion.title)));
        let Some(proposal) = &suggestion.proposal else {
            let reason = EscapedText(suggestion.reason.as_deref().unwrap_or_default());
            return self.push(&format!("<p>No suggestion: {reason}.</p>"));
        };
        let [suggested, current] = proposal.describe_touched_keys();
        let (requests, now) = (proposal.requests, format_count(suggestion.now));
        self.push(&format!(
            "<p><code>requests = {requests}, per = \"{per}\"</code> {suggested}. The current limit is {now}, which {current}.</p>",
        ));
        let peaks = proposal.describe_peaks();
        self.push(&format!("<p>Peak demand per {per}: {peaks}.</p>"));
        self.write_peak_histogram(proposal);
        if proposal.one_key_in > 1 {
            let one_in = format_count(proposal.one_key_in);
            self.push(&format!(
                "<p><small>Sampled from one key in {one_in}.</small></p>"
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

    /// Opens a table in its own section. Columns of numbers have a name that starts with `#`.
    fn open_table(&mut self, title: &str, columns: &[&str]) {
        self.push(&format!(
            "<section>{title}<div class=\"scroll\"><table><thead><tr>"
        ));
        for column in columns {
            match column.strip_prefix('#') {
                Some(name) => self.push(&format!("<th scope=\"col\" class=\"n\">{name}</th>")),
                None => self.push(&format!("<th scope=\"col\">{column}</th>")),
            }
        }
        self.push("</tr></thead><tbody>");
    }

    fn write_timeline(&mut self, set: &PolicySetReport) {
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
    fn write_peak_histogram(&mut self, proposal: &LimitProposal) {
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

/// Text escaped for HTML content and quoted attributes. Control and formatting characters are
/// written as escapes.
struct EscapedText<'a>(&'a str);

impl Display for EscapedText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for character in self.0.chars() {
            match character {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                // A backslash is harmless and stays single; `escape_debug` would double it.
                '\\' => f.write_char('\\')?,
                character => write!(f, "{}", character.escape_debug())?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::EscapedText;

    #[test]
    fn escapes_markup_in_untrusted_text() {
        let hostile = "<script>alert('1')</script>\"&\u{202e}\u{1b}[31m\n\\x";
        assert_eq!(
            EscapedText(hostile).to_string(),
            "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;&quot;&amp;\\u{202e}\\u{1b}[31m\\n\\x"
        );
    }
}
