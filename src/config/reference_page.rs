//! Generates the lists of keys in `docs/CONFIGURATION.md` from the schema.
//!
//! The list of a table is between `<!--NAME-->` and `<!--end-->`. With `UPDATE_FIXTURES=1` the
//! test rewrites the lists: read the difference before you commit it.

use super::schema::{AppliedAt, KeyRequirement, ROOT, SchemaKey, ValueKind};
use super::values::format_duration;
use std::fs;
use std::time::Duration;

const PAGE_PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/CONFIGURATION.md");

#[test]
fn configuration_page_matches_the_schema() {
    let page = fs::read_to_string(PAGE_PATH).unwrap();
    let mut tables = Vec::new();
    collect_tables("", AppliedAt::Restart, &ROOT, &mut tables);
    let fresh = tables
        .iter()
        .fold(page.clone(), |page, table| replace_table(&page, table));
    if std::env::var_os("UPDATE_FIXTURES").is_some() {
        fs::write(PAGE_PATH, &fresh).unwrap();
        return;
    }
    assert!(
        fresh == page,
        "docs/CONFIGURATION.md is stale: UPDATE_FIXTURES=1 cargo test --lib config"
    );
}

/// A table of the schema, under the first path that leads to it.
struct SchemaTable {
    path: String,
    applied_at: AppliedAt,
    keys: &'static [SchemaKey],
}

/// Collects every schema table once.
fn collect_tables(
    path: &str,
    applied_at: AppliedAt,
    keys: &'static [SchemaKey],
    tables: &mut Vec<SchemaTable>,
) {
    if tables.iter().any(|known| std::ptr::eq(known.keys, keys)) {
        return;
    }
    tables.push(SchemaTable {
        path: path.to_owned(),
        applied_at,
        keys,
    });
    for key in keys {
        let inner = key.kind.nested_keys();
        if !inner.is_empty() {
            collect_tables(
                format!("{path}.{}", key.name).trim_start_matches('.'),
                key.applied_at.within(applied_at),
                inner,
                tables,
            );
        }
    }
}

/// Replaces the rows of one table in the page. Checks that the heading has ↻ if a reload applies
/// the table.
fn replace_table(page: &str, table: &SchemaTable) -> String {
    let SchemaTable {
        path,
        applied_at,
        keys,
    } = table;
    let mark = format!("<!--{}-->\n", if path.is_empty() { "root" } else { path });
    let (before, rest) = page
        .split_once(&mark)
        .unwrap_or_else(|| panic!("the page has no {mark}"));
    let (_, after) = rest
        .split_once("<!--end-->")
        .unwrap_or_else(|| panic!("no end of {mark}"));
    let heading = before
        .lines()
        .rfind(|line| line.starts_with('#'))
        .unwrap_or_default();
    let is_policy = path.starts_with("policy");
    let is_reloadable = is_policy || *applied_at == AppliedAt::Reload;
    assert_eq!(
        is_reloadable,
        heading.contains('↻') && !path.is_empty(),
        "the ↻ of {heading}"
    );
    let rows = keys.iter().filter(|key| {
        is_policy || !matches!(key.kind, ValueKind::Table(_) | ValueKind::TableList(_))
    });
    let rows: String = rows.map(format_row).collect();
    format!("{before}{mark}{rows}<!--end-->{after}")
}

fn format_row(key: &SchemaKey) -> String {
    let plain = |text: &str| text.replace('*', "\\*");
    let kind = plain(&format_kind(&key.kind));
    let bold = |text: &str| format!("**`{text}`**");
    let takes = match (&key.requirement, key.kind.first()) {
        (KeyRequirement::Required, _) => format!("required: {kind}"),
        (KeyRequirement::Default(""), _) | (KeyRequirement::Optional, _) => kind,
        (KeyRequirement::Default(default), ValueKind::Keyword(_)) => {
            let word = format!("`\"{default}\"`");
            kind.replace(&word, &format!("**{word}**"))
        }
        (KeyRequirement::Default(default), ValueKind::Bool) => {
            kind.replace(&format!("`{default}`"), &bold(default))
        }
        (
            KeyRequirement::Default(default),
            ValueKind::Integer { .. } | ValueKind::Fraction | ValueKind::Factor,
        ) => {
            format!("{}; {kind}", bold(default))
        }
        (KeyRequirement::Default(default), _) => {
            format!("{}; {kind}", bold(&format!("\"{default}\"")))
        }
    };
    format!("- `{}` ({takes}): {}\n", key.name, plain(key.doc))
}

fn format_kind(kind: &ValueKind) -> String {
    match kind {
        ValueKind::Integer { min: i64::MIN, .. } => "a whole number".to_owned(),
        ValueKind::Integer { min, max } => format!("{min}–{}", format_count(*max)),
        ValueKind::Either(first, _, ValueKind::Either(ValueKind::Table(_), ..)) => {
            format!("{}, or a table or a list of tables", format_kind(first))
        }
        ValueKind::Either(first, _, ValueKind::Table(_)) => {
            format!("{}, or a table", format_kind(first))
        }
        ValueKind::Either(first, _, second) => {
            format!("{}, {}", format_kind(first), format_kind(second))
        }
        ValueKind::Bool => "`true`, `false`".to_owned(),
        ValueKind::Fraction => "0.0–1.0".to_owned(),
        ValueKind::Factor => "-10^6–10^6, at most three decimals".to_owned(),
        ValueKind::Duration { min, max } => format_duration_range(*min, *max),
        ValueKind::ByteSize { min, max: u64::MAX } => format!("{} or more", format_size(*min)),
        ValueKind::ByteSize { min, max } => {
            format!("{}–{}", format_size(*min), format_size(*max))
        }
        ValueKind::Keyword(words) => format_keywords(words),
        // The page describes user-defined entries elsewhere.
        ValueKind::Map(_) | ValueKind::Conditions { .. } | ValueKind::Table(_) => {
            "table".to_owned()
        }
        ValueKind::TableList(_) => "list of tables".to_owned(),
        ValueKind::TextList(items) => format!("list of {}", omit_article(items)),
        ValueKind::StatusList => "list of statuses such as 401, \"4xx\"".to_owned(),
        other => omit_article(&other.to_string()).to_owned(),
    }
}

/// Omits words that a cell needs not: `the path of a PEM file` becomes `PEM file`.
fn omit_article(text: &str) -> &str {
    let text = text.strip_prefix("the path of ").unwrap_or(text);
    let articles = ["the ", "a ", "an "];
    let rest = articles
        .iter()
        .find_map(|article| text.strip_prefix(article));
    rest.unwrap_or(text)
}

fn format_duration_range(min: Duration, max: Duration) -> String {
    let min = if min.is_zero() {
        "0".into()
    } else {
        format_duration(min)
    };
    format!("{min}–{}", format_duration(max))
}

fn format_keywords(words: &[&str]) -> String {
    let words = words.iter().map(|word| format!("`\"{word}\"`"));
    words.collect::<Vec<_>>().join(", ")
}

/// Formats a number. Large powers of two are written with their exponent.
fn format_count(number: i64) -> String {
    match u64::try_from(number) {
        Ok(number) if number > 1 << 20 && number.is_power_of_two() => {
            format!("2^{}", number.trailing_zeros())
        }
        _ => number.to_string(),
    }
}

fn format_size(bytes: u64) -> String {
    let units = [("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)];
    match units
        .iter()
        .find(|(_, shift)| bytes > 0 && bytes.is_multiple_of(1 << shift))
    {
        Some((unit, shift)) => format!("{}{unit}", bytes >> shift),
        None => bytes.to_string(),
    }
}
