//! The documents and diagnostics of one load.

use super::diagnostic::{ConfigDiagnostic, ConfigErrors, DiagnosticSeverity, SourceSpan};
use super::document::TomlDocument;
use super::file_set::{FileSet, read_config_file};
use super::value_tree::{ValueNode, ValueOrigin};
use std::cell::RefCell;
use std::path::Path;

/// Diagnostics of variables and flags sort after those of files.
const OVERRIDE_RANK: usize = usize::MAX;

/// Documents, diagnostics and files of one load.
#[derive(Debug, Default)]
pub(super) struct ConfigInput {
    documents: Vec<TomlDocument>,
    diagnostics: RefCell<Vec<ConfigDiagnostic>>,
    files: RefCell<FileSet>,
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
        self.update_file_set(|files| files.insert_file(path.to_owned()));
        read_config_file(path).map_err(|error| format!("can't be read: {error}"))
    }

    pub(super) fn update_file_set(&self, update: impl FnOnce(&mut FileSet)) {
        update(&mut self.files.borrow_mut());
    }

    pub(super) fn report_error(&self, span: SourceSpan, key: String, problem: String) {
        self.report(DiagnosticSeverity::Error, span, key, problem);
    }

    pub(super) fn report_warning(&self, span: SourceSpan, key: String, problem: String) {
        self.report(DiagnosticSeverity::Warning, span, key, problem);
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
