//! The files, documents and diagnostics of one load.

use super::diagnostic::{ConfigDiagnostic, DiagnosticSeverity, SourceSpan};
use super::document::TomlDocument;
use super::value_tree::{ValueNode, ValueOrigin};
use indexmap::IndexSet;
use std::cell::RefCell;
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Diagnostics of variables and flags sort after those of files.
const OVERRIDE_RANK: usize = usize::MAX;

/// Documents, diagnostics and files of one load.
#[derive(Debug, Default)]
pub(super) struct ConfigInput {
    documents: Vec<TomlDocument>,
    diagnostics: RefCell<Vec<ConfigDiagnostic>>,
    pub(super) files: RefCell<FileSet>,
    skips_key_files: bool,
}

impl ConfigInput {
    pub(super) fn new(skips_key_files: bool) -> Self {
        Self {
            skips_key_files,
            ..Self::default()
        }
    }

    /// Whether the files that keys name are read: secrets, certificates and key sets.
    pub(super) fn reads_key_files(&self) -> bool {
        !self.skips_key_files
    }

    /// Parses a document and stores it. Returns its values, or `None` if the text is not TOML. The
    /// first syntax error has been reported.
    pub(super) fn parse_document(&mut self, name: String, text: String) -> Option<ValueNode> {
        let (document, parsed) = TomlDocument::parse(name, text, self.documents.len());
        self.documents.push(document);
        parsed
            .map_err(|(span, message)| {
                self.report_error(span, String::new(), format!("not TOML: {message}"));
            })
            .ok()
    }

    /// Reads a text file and adds it to the watched set.
    pub(super) fn read_file(&self, path: &Path) -> Result<String, String> {
        let bytes = self.read_file_bytes(path)?;
        String::from_utf8(bytes).map_err(|_invalid| "can't be read: not UTF-8".to_owned())
    }

    /// Reads a file that may contain bytes that are not UTF-8, and adds it to the watched set.
    pub(super) fn read_file_bytes(&self, path: &Path) -> Result<Vec<u8>, String> {
        self.files.borrow_mut().files.insert(path.to_owned());
        read_config_file(path).map_err(|error| format!("can't be read: {error}"))
    }

    pub(super) fn report_error(&self, span: SourceSpan, key: String, problem: String) {
        self.report(DiagnosticSeverity::Error, span, key, problem);
    }

    pub(super) fn has_errors(&self) -> bool {
        self.diagnostics
            .borrow()
            .iter()
            .any(|finding| finding.severity == DiagnosticSeverity::Error)
    }

    /// Span of a value. A whole document has no position.
    pub(super) fn value_span(&self, origin: &ValueOrigin) -> SourceSpan {
        match origin {
            ValueOrigin::Override(label) => Self::span_for_override(label),
            ValueOrigin::Document {
                document, value, ..
            } => match self.documents.get(*document) {
                Some(document) => document.span(value),
                None => Self::span_for_override("configuration"),
            },
        }
    }

    /// Source text of a value in its file. `None` if a variable or flag set it.
    pub(super) fn source_text(&self, origin: &ValueOrigin) -> Option<&str> {
        match origin {
            ValueOrigin::Override(_) => None,
            ValueOrigin::Document {
                document, value, ..
            } => self.documents.get(*document)?.source_text(value),
        }
    }

    /// Span of an environment variable or a flag.
    pub(super) fn span_for_override(label: &str) -> SourceSpan {
        SourceSpan::from_source(label, OVERRIDE_RANK)
    }

    /// Returns `built`, completed with all warnings and the files read.
    ///
    /// # Errors
    /// [`ConfigErrors`] if there was any error.
    pub(super) fn into_load_result<T, C>(
        self,
        built: Option<T>,
        complete: impl FnOnce(T, Vec<ConfigDiagnostic>, FileSet) -> C,
    ) -> Result<C, ConfigErrors> {
        let failed = self.has_errors();
        let files = self.files.into_inner();
        let mut diagnostics = self.diagnostics.into_inner();
        diagnostics.sort_by_key(|finding| finding.span.sort_key());
        match built {
            Some(built) if !failed => Ok(complete(built, diagnostics, files)),
            _ => {
                diagnostics.retain(|finding| finding.severity == DiagnosticSeverity::Error);
                Err(ConfigErrors { diagnostics, files })
            }
        }
    }

    pub(super) fn report(
        &self,
        severity: DiagnosticSeverity,
        span: SourceSpan,
        key: String,
        problem: String,
    ) {
        self.diagnostics.borrow_mut().push(ConfigDiagnostic {
            severity,
            span,
            key,
            problem,
        });
    }
}

/// All errors of one load, in the order of the files.
#[derive(Debug)]
pub struct ConfigErrors {
    pub diagnostics: Vec<ConfigDiagnostic>,
    /// Files that the load has read. After a change of one of them, loading may succeed.
    pub files: FileSet,
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for diagnostic in &self.diagnostics {
            write!(f, "{diagnostic}")?;
        }
        match self.diagnostics.len() {
            1 => writeln!(f, "1 error"),
            n => writeln!(f, "{n} errors"),
        }
    }
}

impl std::error::Error for ConfigErrors {}

/// Maximum size of a file of the configuration.
const MAX_FILE_BYTES: u64 = 16 * 1024 * 1024;

/// Files and globs of a configuration. A reload reads them again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FileSet {
    /// Files that were read or that failed to be read.
    pub(super) files: IndexSet<PathBuf>,
    /// Globs of `include`. A new file that matches belongs to the configuration.
    pub(super) globs: Vec<String>,
}

impl FileSet {
    /// Adds the files of another set.
    pub fn extend(&mut self, other: &Self) {
        self.files.extend(other.files.iter().cloned());
    }

    /// All paths of the configuration. Evaluates the globs again.
    pub fn expand_paths(&self) -> Vec<PathBuf> {
        let mut paths: Vec<PathBuf> = self.files.iter().cloned().collect();
        for glob in &self.globs {
            paths.extend(expand_glob(glob).unwrap_or_default());
        }
        paths.sort();
        paths.dedup();
        paths
    }
}

/// Expands a glob. Skips hidden names: a mounted ConfigMap keeps its link targets in them.
pub(super) fn expand_glob(glob: &str) -> Result<Vec<PathBuf>, String> {
    let options = glob::MatchOptions {
        case_sensitive: true,
        require_literal_separator: true,
        require_literal_leading_dot: true,
    };
    let paths =
        glob::glob_with(glob, options).map_err(|error| format!("not a glob: {}", error.msg))?;
    paths
        .collect::<Result<_, _>>()
        .map_err(|error| error.to_string())
}

/// Reads a file of the configuration.
///
/// # Errors
/// Returns an error for a device, pipe or socket, which could block or never end, and for a file
/// above [`MAX_FILE_BYTES`].
pub fn read_config_file(path: &Path) -> io::Result<Vec<u8>> {
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut bytes = Vec::new();
    File::open(path)?
        .take(MAX_FILE_BYTES + 1)
        .read_to_end(&mut bytes)?;
    if u64::try_from(bytes.len()).is_ok_and(|length| length > MAX_FILE_BYTES) {
        return Err(io::Error::other("larger than 16 MiB"));
    }
    Ok(bytes)
}
