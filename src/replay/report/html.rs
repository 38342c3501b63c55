//! The report as one page that needs nothing else: no script, no font, no other server. The plots are SVG.
//!
//! All that comes from a log or a file's name goes through [`Text`], and nothing of it into an attribute that does anything.

use super::super::run::PolicyBook;
use super::super::suggest::{Drawn, Suggestion};
use super::super::tally::{Bin, Series};
use super::{PolicyWords, Report, Set, count, keys, moment, share, span};
use crate::config::duration_words;
use std::fmt::{self, Display, Write};
use std::time::Duration;

const STYLE: &str = include_str!("style.css");

/// Steps of time in the large plot, and in those of the policies.
const STEPS: usize = 120;
const SMALL_STEPS: usize = 48;

pub(super) fn write(report: &Report) -> String {
    let mut page = String::with_capacity(64 << 10);
    // Writing to a text doesn't fail.
    let _written = render(&mut page, report);
    page
}

fn render(page: &mut String, report: &Report) -> fmt::Result {
    write!(
        page,
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\
         <title>tidegate replay</title><style>{STYLE}</style></head><body><main>"
    )?;
    head(page, report)?;
    if let [first, second, ..] = report.sets.as_slice() {
        compare(page, report, first, second)?;
    }
    let several = if report.sets.len() > 1 {
        " class=\"pair\""
    } else {
        ""
    };
    write!(page, "<div{several}>")?;
    for set in &report.sets {
        page.push_str("<article>");
        // No heading is skipped.
        let (name, class) = match report.sets.len() {
            1 => ("these policies", " class=\"unseen\""),
            _ => (set.name.as_str(), ""),
        };
        write!(page, "<h2{class}>By {}</h2>", Text(name))?;
        tiles(page, set)?;
        timeline(page, report, set)?;
        policies(page, report, set)?;
        top(page, set)?;
        suggestions(page, report, set)?;
        page.push_str("</article>");
    }
    page.push_str("</div>");
    warnings(page, report)?;
    page.push_str("</main></body></html>\n");
    Ok(())
}

/// A text as it is, for a place between tags or in quotes. Signs that change how others are shown are written out.
struct Text<'a>(&'a str);

impl Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for sign in self.0.chars() {
            match sign {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                // Of these it is the harmless ones that `escape_debug` would change, too.
                '\\' => f.write_char('\\')?,
                sign => write!(f, "{}", sign.escape_debug())?,
            }
        }
        Ok(())
    }
}

fn head(page: &mut String, report: &Report) -> fmt::Result {
    page.push_str("<header><h1>What the policies would have done</h1><p>");
    for (at, log) in report.logs.iter().enumerate() {
        let comma = if at > 0 { ", " } else { "" };
        write!(
            page,
            "{comma}<code>{}</code> ({})",
            Text(&log.name),
            log.format
        )?;
    }
    write!(
        page,
        ": {} requests in {} lines",
        count(report.requests()),
        count(report.lines())
    )?;
    if report.requests() > 0 {
        let (from, to) = (
            moment(report.from_s * 1_000_000),
            moment(report.to_s * 1_000_000),
        );
        write!(page, ", {from} to {to} UTC")?;
    }
    page.push_str(".</p></header>");
    Ok(())
}

fn compare(page: &mut String, report: &Report, first: &Set, second: &Set) -> fmt::Result {
    write!(
        page,
        "<section><h2>Side by side</h2><div class=\"scroll\"><table class=\"sides\"><thead><tr><th scope=\"col\">Policy</th>\
         <th scope=\"col\" class=\"n\">{}</th><th scope=\"col\" class=\"n\">{}</th></tr></thead><tbody>",
        Text(&first.name),
        Text(&second.name)
    )?;
    let mut row = |name: &str, one: String, other: String| {
        write!(
            page,
            "<tr><th scope=\"row\">{}</th><td class=\"n\">{one}</td><td class=\"n\">{other}</td></tr>",
            Text(name)
        )
    };
    let forwarded = |set: &Set| {
        format!(
            "{} ({})",
            count(set.books.forwarded),
            share(set.books.forwarded, set.books.told.requests)
        )
    };
    row("all: forwarded", forwarded(first), forwarded(second))?;
    for policy in super::names(first, second) {
        let refused = |set: &Set| {
            set.book(policy).map_or("–".to_owned(), |book| {
                format!(
                    "{} of {} refused",
                    count(book.refused()),
                    count(book.matched())
                )
            })
        };
        row(policy, refused(first), refused(second))?;
    }
    let [gained, lost] = report.parted;
    write!(
        page,
        "</tbody></table></div><p>Refused by the second only: <b>{}</b> requests. By the first only: <b>{}</b>.</p></section>",
        count(gained),
        count(lost)
    )
}

fn tiles(page: &mut String, set: &Set) -> fmt::Result {
    page.push_str("<dl class=\"tiles\">");
    for (label, number) in set.outcomes() {
        if number > 0 || label == "forwarded" {
            let part = share(number, set.books.told.requests);
            write!(
                page,
                "<div><dt>{label}</dt><dd>{}<small>{part}</small></dd></div>",
                count(number)
            )?;
        }
    }
    page.push_str("</dl>");
    Ok(())
}

fn timeline(page: &mut String, report: &Report, set: &Set) -> fmt::Result {
    if set.books.told.requests == 0 {
        return Ok(());
    }
    let bins = report.bins(&set.books.series, STEPS);
    let most = bins.iter().map(|bin| bin.all).max().unwrap_or_default();
    page.push_str(
        "<section><h3>When</h3><p class=\"legend\"><i class=\"ok\"></i>forwarded <i class=\"bad\"></i>refused, on top</p>",
    );
    let (width_s, _) = report.grid(STEPS);
    let each = duration_words(Duration::from_secs(width_s));
    write!(
        page,
        "<p class=\"axis\"><span>a bar is {each}, the highest {}</span></p>",
        count(most)
    )?;
    bars(
        page,
        (report, STEPS),
        &bins,
        "plot",
        160,
        "Requests over time, forwarded and refused",
    )?;
    let (from, to) = (
        moment(report.from_s * 1_000_000),
        moment(report.to_s * 1_000_000),
    );
    write!(
        page,
        "<p class=\"axis\"><span>{from}</span><span>{to}</span></p></section>"
    )
}

/// Stacked bars: what was refused stands on what was not.
fn bars(
    page: &mut String,
    (report, most_steps): (&Report, usize),
    bins: &[Bin],
    class: &str,
    height: u64,
    label: &str,
) -> fmt::Result {
    let most = bins
        .iter()
        .map(|bin| bin.all)
        .max()
        .unwrap_or_default()
        .max(1);
    let width = bins.len() * 10;
    write!(
        page,
        "<svg class=\"{class}\" viewBox=\"0 0 {width} {height}\" preserveAspectRatio=\"none\" role=\"img\" \
         aria-label=\"{label}\">"
    )?;
    let tall = |number: u64| {
        let scaled = u128::from(number) * u128::from(height) / u128::from(most);
        // One refusal among a million is seen, too.
        if number == 0 {
            0
        } else {
            u64::try_from(scaled).unwrap_or(height).max(2)
        }
    };
    let (width_s, _) = report.grid(most_steps);
    for (at, bin) in (0u64..).zip(bins).filter(|(_, bin)| bin.all > 0) {
        let refused = tall(bin.refused);
        let forwarded = tall(bin.all).saturating_sub(refused);
        let from_s = report.from_s + at * width_s;
        write!(
            page,
            "<g><title>{} UTC: {} requests, {} refused</title>",
            moment(from_s * 1_000_000),
            count(bin.all),
            count(bin.refused)
        )?;
        let mut bar = |class: &str, top: u64, tall: u64| {
            let left = at * 10;
            write!(
                page,
                "<rect class=\"{class}\" x=\"{left}\" y=\"{top}\" width=\"9\" height=\"{tall}\"/>"
            )
        };
        bar("ok", height - forwarded, forwarded)?;
        bar("bad", height.saturating_sub(forwarded + refused), refused)?;
        page.push_str("</g>");
    }
    page.push_str("</svg>");
    Ok(())
}

fn policies(page: &mut String, report: &Report, set: &Set) -> fmt::Result {
    page.push_str(
        "<section><h3>Policies</h3><div class=\"scroll\"><table><thead><tr><th scope=\"col\">Policy</th>\
         <th scope=\"col\" class=\"n\">Matched</th><th scope=\"col\" class=\"n\">Refused</th><th scope=\"col\" class=\"n\">Share</th>\
         <th scope=\"col\" class=\"n\">Held back</th><th scope=\"col\" class=\"n\">Keys</th><th scope=\"col\" class=\"n\">Touched</th>\
         <th scope=\"col\">When; first and last refusal</th></tr></thead><tbody>",
    );
    for (words, book) in set.policies.iter().zip(&set.books.policies) {
        policy(page, report, words, book)?;
    }
    page.push_str("</tbody></table></div></section>");
    Ok(())
}

fn policy(
    page: &mut String,
    report: &Report,
    words: &PolicyWords,
    book: &PolicyBook,
) -> fmt::Result {
    let (matched, refused) = (book.matched(), book.refused());
    let (keys, touched) = match words.action {
        None => (keys(book), count(book.keys.touched())),
        Some(_) => ("–".to_owned(), "–".to_owned()),
    };
    write!(page, "<tr><th scope=\"row\">{}", Text(&words.name))?;
    if words.shadow {
        page.push_str("<small>shadow: refuses nobody yet</small>");
    }
    if let Some(action) = words.action {
        write!(page, "<small>{action}</small>")?;
    }
    if book.blocked > 0 {
        write!(page, "<small>{} by block_for</small>", count(book.blocked))?;
    }
    write!(
        page,
        "</th><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td><td class=\"n\">{}</td>\
         <td class=\"n\">{keys}</td><td class=\"n\">{touched}</td><td>",
        count(matched),
        count(refused),
        share(refused, matched),
        count(book.delayed),
    )?;
    sparkline(page, report, &book.series, &words.name)?;
    if refused > 0 {
        write!(
            page,
            "<small>{}</small>",
            span(book.first_refused_us, book.last_refused_us)
        )?;
    }
    page.push_str("</td></tr>");
    Ok(())
}

fn sparkline(page: &mut String, report: &Report, series: &Series, name: &str) -> fmt::Result {
    let bins = report.bins(series, SMALL_STEPS);
    let label = format!("Requests over time of policy {}", Text(name));
    bars(page, (report, SMALL_STEPS), &bins, "spark", 40, &label)
}

fn top(page: &mut String, set: &Set) -> fmt::Result {
    if set.top.is_empty() {
        return Ok(());
    }
    page.push_str(
        "<section><h3>Most limited keys</h3><div class=\"scroll\"><table><thead><tr><th scope=\"col\">Policy</th>\
         <th scope=\"col\">Key</th><th scope=\"col\" class=\"n\">Refused</th><th scope=\"col\" class=\"n\">Of</th>\
         <th scope=\"col\">First and last (UTC)</th></tr></thead><tbody>",
    );
    for top in &set.top {
        let error = if top.error > 0 {
            format!("<small>or {} more</small>", count(top.error))
        } else {
            String::new()
        };
        write!(
            page,
            "<tr><td>{}{}</td><td><code>{}</code></td><td class=\"n\">{}{error}</td><td class=\"n\">{}</td><td class=\"when\">{}</td></tr>",
            Text(&top.policy),
            if top.shadow {
                " <small>shadow</small>"
            } else {
                ""
            },
            Text(&top.key),
            count(top.refused),
            count(top.requests),
            span(top.first_us, top.last_us),
        )?;
    }
    page.push_str("</tbody></table></div></section>");
    Ok(())
}

fn suggestions(page: &mut String, report: &Report, set: &Set) -> fmt::Result {
    let Some(percent) = report.percent.filter(|_| !set.suggestions.is_empty()) else {
        return Ok(());
    };
    write!(
        page,
        "<section><h3>Limits that would have touched at most {percent} % of the keys</h3>"
    )?;
    for (at, suggestions) in &set.suggestions {
        let name = set.policies.get(*at).map_or("", |words| &words.name);
        for suggestion in suggestions {
            page.push_str("<div class=\"card\">");
            suggested(page, name, suggestion)?;
            page.push_str("</div>");
        }
    }
    page.push_str("</section>");
    Ok(())
}

fn suggested(page: &mut String, policy: &str, suggestion: &Suggestion) -> fmt::Result {
    let limit = &suggestion.limit;
    let per = duration_words(Duration::from_micros(limit.limit.per_us));
    write!(page, "<h4>{}", Text(policy))?;
    if *limit.name != *policy {
        write!(page, " / {}", Text(&limit.name))?;
    }
    page.push_str("</h4>");
    let Some(drawn) = &suggestion.drawn else {
        page.push_str("<p>Nothing to draw from.</p>");
        return Ok(());
    };
    let Drawn {
        requests,
        touched,
        touched_now,
        keys,
        ..
    } = drawn;
    write!(
        page,
        "<p><code>requests = {requests}, per = \"{per}\"</code> touches {} of {} keys ({}). Now: {}, which touches {} ({}) at most.</p>",
        count(*touched),
        count(*keys),
        share(*touched, *keys),
        count(limit.limit.requests),
        count(*touched_now),
        share(*touched_now, *keys),
    )?;
    page.push_str("<p>At its busiest, ");
    for (at, (of_1000, peak)) in drawn.quantiles.iter().enumerate() {
        let comma = if at > 0 { ", " } else { "" };
        match of_1000 {
            1000 => write!(page, "{comma}and the busiest {}", count(*peak))?,
            _ => write!(
                page,
                "{comma}{} % of the keys asked up to {}",
                f64::from(*of_1000) / 10.0,
                count(*peak)
            )?,
        }
    }
    write!(page, " in {per}.</p>")?;
    histogram(page, drawn)?;
    if drawn.one_in > 1 {
        write!(
            page,
            "<p><small>Drawn from one key in {}.</small></p>",
            count(drawn.one_in)
        )?;
    }
    Ok(())
}

/// Keys by their peak. What the suggestion would touch is marked.
fn histogram(page: &mut String, drawn: &Drawn) -> fmt::Result {
    let most = drawn
        .histogram
        .iter()
        .map(|(_, keys)| *keys)
        .max()
        .unwrap_or_default();
    write!(
        page,
        "<table class=\"hist\"><caption>Keys by what they asked at their busiest; more than {} is touched</caption><tbody>",
        count(drawn.requests)
    )?;
    let mut above = 0;
    for (upto, keys) in &drawn.histogram {
        let from = above + 1;
        above = *upto;
        let range = if from == *upto {
            count(*upto)
        } else {
            format!("{} – {}", count(from), count(*upto))
        };
        // In 1/10 %, and always to be seen.
        let wide = if *keys == 0 {
            0
        } else {
            (u128::from(*keys) * 1000 / u128::from(most.max(1))).max(4)
        };
        let (class, touched) = match (*keys, drawn.requests) {
            (1.., requests) if from > requests => ("bad", "touched".to_owned()),
            (1.., requests) if *upto > requests => {
                ("ok", format!("touched above {}", count(requests)))
            }
            _ => ("ok", String::new()),
        };
        write!(
            page,
            "<tr><th scope=\"row\" class=\"n\">{range}</th><td><svg viewBox=\"0 0 1000 10\" preserveAspectRatio=\"none\" \
             aria-hidden=\"true\"><rect class=\"{class}\" width=\"{wide}\" height=\"10\"/></svg></td><td class=\"n\">{}</td><td><small>{touched}</small></td></tr>",
            count(*keys)
        )?;
    }
    page.push_str("</tbody></table>");
    Ok(())
}

fn warnings(page: &mut String, report: &Report) -> fmt::Result {
    let warnings = report.warnings();
    if warnings.is_empty() {
        return Ok(());
    }
    page.push_str("<section><h2>To be known</h2><ul>");
    for warning in &warnings {
        write!(page, "<li>{}</li>", Text(warning))?;
    }
    page.push_str("</ul></section>");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::Text;

    #[test]
    fn nothing_of_a_stranger_is_markup() {
        let hostile = "<script>alert('1')</script>\"&\u{202e}\u{1b}[31m\n\\x";
        assert_eq!(
            Text(hostile).to_string(),
            "&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;&quot;&amp;\\u{202e}\\u{1b}[31m\\n\\x"
        );
    }
}
