//! Reads the files that keys name.

use super::table_reader::TableReader;
use std::path::{Path, PathBuf};

/// Reads the text file named by `key`. Returns `None` if the key is empty, after an error, or if
/// no such file is read.
pub(super) fn read_text_file(reader: &TableReader<'_>, key: &str, content: &str) -> Option<String> {
    let path = reader.get_nonempty_string(key)?;
    if !reader.input().reads_key_files() {
        return None;
    }
    let text = reader.input().read_file(Path::new(&path));
    let text = reader.accept(key, text.map_err(|error| format!("the file {error}")))?;
    if text.trim_end().is_empty() {
        reader.report_error(key, format!("the file is empty; expected a {content}"));
        return None;
    }
    Some(text.trim_end().to_owned())
}

/// Reads the PEM file named by `key`. Returns `None` after an error.
pub(super) fn read_pem_file(reader: &TableReader<'_>, key: &str) -> Option<Vec<u8>> {
    let path: String = reader.read(key)?;
    if path.is_empty() {
        reader.report_error(key, "expected the path of a PEM file");
        return None;
    }
    let pem = reader.input().read_file_bytes(Path::new(&path));
    reader.accept(key, pem.map_err(|error| format!("the file {error}")))
}

/// Returns what the file named by `key` contains, or reports what is wrong in it.
pub(super) fn accept_content<T>(
    reader: &TableReader<'_>,
    key: &str,
    content: Result<T, String>,
) -> Option<T> {
    reader.accept(
        key,
        content.map_err(|reason| format!("in the file: {reason}")),
    )
}

/// Reads the path of an existing directory. The inner `None`: the key is empty, or directories are
/// not looked up.
pub(super) fn read_directory(
    reader: &TableReader<'_>,
    key: &str,
    is_used: bool,
) -> Option<Option<PathBuf>> {
    let is_checked = is_used && reader.input().reads_key_files();
    reader.get_parsed(key, |path| match path {
        "" => Ok(None),
        path if is_checked && !Path::new(path).is_dir() => {
            Err("not a directory; expected an existing directory".to_owned())
        }
        path => Ok(Some(PathBuf::from(path))),
    })
}
