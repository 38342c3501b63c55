//! Reads the files that keys name.

use super::table_reader::TableReader;
use std::path::Path;

/// Reads the text file named by `key`. Returns `None` if the key is empty, after an error, or if
/// no such file is read.
pub(super) fn read_text_file(reader: &TableReader<'_>, key: &str, content: &str) -> Option<String> {
    let path = reader.get_nonempty_string(key)?;
    if !reader.input().reads_key_files() {
        return None;
    }
    match reader.input().read_file(Path::new(&path)) {
        Ok(text) if text.trim_end().is_empty() => {
            reader.report_error(key, &format!("the file is empty; expected a {content}"));
            None
        }
        Ok(text) => Some(text.trim_end().to_owned()),
        Err(error) => {
            reader.report_error(key, &format!("the file {error}"));
            None
        }
    }
}

/// Reads the PEM file named by `key`. Returns `None` after an error.
pub(super) fn read_pem_file(reader: &TableReader<'_>, key: &str) -> Option<Vec<u8>> {
    let path = reader.get_string(key)?;
    if path.is_empty() {
        reader.report_error(key, "expected the path of a PEM file");
        return None;
    }
    reader
        .input()
        .read_file_bytes(Path::new(&path))
        .map_err(|error| reader.report_error(key, &format!("the file {error}")))
        .ok()
}
