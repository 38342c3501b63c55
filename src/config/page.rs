//! The tables of `docs/CONFIGURATION.md` come from the schema, so that the page can't say anything else.
//!
//! A table stands between `<!-- keys: NAME -->` and `<!-- end -->`. With UPDATE_FIXTURES=1 the tables are written
//! anew: read the difference before you commit it.

use super::LIVE;
use super::schema::{Key, Kind, Need, ROOT};
use super::values::duration_words;
use std::fs;

const PAGE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/CONFIGURATION.md");

#[test]
fn the_page_says_what_the_schema_says() {
    let page = fs::read_to_string(PAGE).unwrap();
    let mut tables = Vec::new();
    collect("", &ROOT, &mut tables);
    let fresh = tables.iter().fold(page.clone(), |page, (path, table)| {
        with_table(&page, path, table)
    });
    if std::env::var_os("UPDATE_FIXTURES").is_some() {
        fs::write(PAGE, &fresh).unwrap();
        return;
    }
    assert!(
        fresh == page,
        "docs/CONFIGURATION.md is stale: UPDATE_FIXTURES=1 cargo test --lib config"
    );
}

/// Every table once, by the path at which it is first met.
fn collect(path: &str, table: &'static [Key], tables: &mut Vec<(String, &'static [Key])>) {
    if tables.iter().any(|(_, known)| std::ptr::eq(*known, table)) {
        return;
    }
    tables.push((path.to_owned(), table));
    for key in table {
        if let Kind::Table(inner)
        | Kind::Tables(inner)
        | Kind::WholeOrTable { table: inner, .. }
        | Kind::WordOrTable { table: inner, .. } = key.kind
        {
            collect(
                format!("{path}.{}", key.name).trim_start_matches('.'),
                inner,
                tables,
            );
        }
    }
}

/// The page with the rows of one table as they are now. The sign of what is reloaded is in its heading.
fn with_table(page: &str, path: &str, table: &[Key]) -> String {
    let mark = format!(
        "<!-- keys: {} -->\n",
        if path.is_empty() { "top level" } else { path }
    );
    let (before, rest) = page
        .split_once(&mark)
        .unwrap_or_else(|| panic!("the page has no {mark}"));
    let (_, after) = rest
        .split_once("<!-- end -->")
        .unwrap_or_else(|| panic!("no end of {mark}"));
    let heading = before
        .lines()
        .rfind(|line| line.starts_with('#'))
        .unwrap_or_default();
    let is_policy = path.starts_with("policy");
    let live = is_policy || LIVE.iter().any(|live| format!("{path}.").starts_with(live));
    assert_eq!(
        live,
        heading.contains('↻') && !path.is_empty(),
        "the ↻ of {heading}"
    );
    let rows = table
        .iter()
        .filter(|key| is_policy || !matches!(key.kind, Kind::Table(_) | Kind::Tables(_)));
    let rows: String = rows.map(row).collect();
    format!(
        "{before}{mark}| key | default | takes | meaning |\n|---|---|---|---|\n{rows}<!-- end -->{after}"
    )
}

fn row(key: &Key) -> String {
    let default = match (&key.need, &key.kind) {
        (Need::Required, _) => "must be set".to_owned(),
        (Need::Default(""), Kind::Texts(_) | Kind::Secrets(_)) => "`[]`".to_owned(),
        (
            Need::Default(text),
            Kind::Bool | Kind::Whole { .. } | Kind::WholeOrTable { .. } | Kind::Fraction,
        ) => format!("`{text}`"),
        (Need::Default(text), _) => format!("`\"{text}\"`"),
        (Need::Optional, _) => "absent".to_owned(),
    };
    let plain = |text: &str| text.replace('|', "\\|").replace('*', "\\*");
    format!(
        "| `{}` | {default} | {} | {} |\n",
        key.name,
        plain(&takes(&key.kind)),
        plain(key.doc)
    )
}

fn takes(kind: &Kind) -> String {
    match kind {
        Kind::Whole { min: i64::MIN, .. } => "a whole number".to_owned(),
        Kind::Whole { min, max } => format!("{min} to {}", count(*max)),
        Kind::WholeOrTable { min, max, .. } => format!("{min} to {}, or a table", count(*max)),
        Kind::WordOrTable { word, .. } => format!("`\"{word}\"`, or a table"),
        Kind::Fraction => "0.0 to 1.0".to_owned(),
        Kind::Duration { min, max } => {
            format!(
                "{} to {}",
                if min.is_zero() {
                    "0".into()
                } else {
                    duration_words(*min)
                },
                duration_words(*max)
            )
        }
        Kind::Size { min, max: u64::MAX } => format!("{} or more", size(*min)),
        Kind::Size { min, max } => format!("{} to {}", size(*min), size(*max)),
        Kind::Word(words) => words
            .iter()
            .map(|word| format!("`\"{word}\"`"))
            .collect::<Vec<_>>()
            .join(", "),
        other => other.to_string(),
    }
}

/// Large powers of two are known by their exponent.
fn count(number: i64) -> String {
    match u64::try_from(number) {
        Ok(number) if number > 1 << 20 && number.is_power_of_two() => {
            format!("2^{}", number.trailing_zeros())
        }
        _ => number.to_string(),
    }
}

fn size(bytes: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units
        .iter()
        .find(|(_, shift)| bytes > 0 && bytes.is_multiple_of(1 << shift))
    {
        Some((unit, shift)) => format!("{}{unit}", bytes >> shift),
        None => bytes.to_string(),
    }
}
