//! Reads the main file and the included files.

use super::diagnostic::SourceSpan;
use super::input::{ConfigInput, expand_glob};
use super::schema;
use super::sources::FileSource;
use super::table_reader::{ConfigValue, TableReader};
use super::value_tree::ValueNode;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Reads the main file. Returns its values, or `None` if it is unreadable or not TOML.
/// [`FileSource::None`] is an empty document.
pub(super) fn read_main_file(input: &mut ConfigInput, source: &FileSource) -> Option<ValueNode> {
    match source {
        FileSource::Path(path) => {
            let name = path.display().to_string();
            match input.read_file(path) {
                Ok(text) => input.parse_document(name, text),
                Err(error) => {
                    input.report_error(SourceSpan::from_source(&name, 0), String::new(), error);
                    None
                }
            }
        }
        FileSource::Text { name, text } => input.parse_document(name.clone(), text.clone()),
        FileSource::None => input.parse_document(source.to_string(), String::new()),
    }
}

/// Reads all included files, sorted by file name and then path. Policies apply in this order.
pub(super) fn read_included_files(
    input: &mut ConfigInput,
    root: &ValueNode,
    source: &FileSource,
) -> Vec<ValueNode> {
    let base = match source {
        FileSource::Path(path) => path.parent().unwrap_or(Path::new("")),
        FileSource::Text { .. } | FileSource::None => Path::new(""),
    };
    let mut found: Vec<(OsString, PathBuf, String)> = Vec::new();
    // Reads only `include`. Errors in other keys are reported when the whole file is read.
    let mut only_include = ValueNode::default();
    if let Some(include) = root.get("include") {
        only_include.set_at_path(&["include"], include.clone());
    }
    for item in TableReader::from_root(input, &schema::ROOT, &only_include).get_items("include") {
        for path in expand_include(input, &item, base) {
            match input.read_file(&path) {
                Ok(text) => {
                    found.push((path.file_name().unwrap_or_default().to_owned(), path, text))
                }
                Err(error) => {
                    item.report_error::<()>(format!("{} {error}", path.display()));
                }
            }
        }
    }
    found.sort();
    found.dedup();
    // A file with a syntax error is left out: diagnostics of its readable part would mislead.
    found
        .into_iter()
        .filter_map(|(_, path, text)| input.parse_document(path.display().to_string(), text))
        .collect()
}

fn expand_include(input: &ConfigInput, item: &ConfigValue<'_>, base: &Path) -> Vec<PathBuf> {
    let Some(text) = item.value.as_str() else {
        item.report_error::<()>("expected a path or a glob such as \"policies/*.toml\"");
        return Vec::new();
    };
    if !text.contains(['*', '?', '[']) {
        return vec![base.join(text)];
    }
    // The directory of the main file is taken literally, even if it contains glob characters.
    let glob = match base.to_str() {
        Some("") | None => text.to_owned(),
        Some(_) if Path::new(text).is_absolute() => text.to_owned(),
        Some(base) => format!("{}/{text}", glob::Pattern::escape(base)),
    };
    match expand_glob(&glob) {
        Ok(paths) => {
            if paths.is_empty() {
                item.report_warning(format!("{text:?} matches no file"));
            }
            input.files.borrow_mut().globs.push(glob);
            paths
        }
        Err(error) => item.report_error(error).unwrap_or_default(),
    }
}
