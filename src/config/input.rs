//! What was read, and what was found wrong with it so far.

use super::FileSet;
use super::diagnostic::{ConfigDiagnostic, ConfigErrors, DiagnosticSeverity, SourceSpan};
use super::document::{KeyPath, TomlDocument};
use figment::Figment;
use figment::value::{Tag, Value};
use std::cell::RefCell;
use std::path::Path;

/// What overrides files sorts behind them.
const OVERRIDE_RANK: usize = usize::MAX;

/// All that a load reads and finds.
#[derive(Debug, Default)]
pub(super) struct ConfigInput {
    documents: Vec<TomlDocument>,
    /// The merged layers, which know where each value came from.
    layers: Figment,
    diagnostics: RefCell<Vec<ConfigDiagnostic>>,
    files: RefCell<FileSet>,
}

/// A document that cannot be used.
#[derive(Debug)]
pub(super) struct InvalidToml;

impl ConfigInput {
    /// Parses a document and keeps it. Returns its number.
    ///
    /// # Errors
    /// What is no TOML is reported.
    pub(super) fn parse_document(
        &mut self,
        name: String,
        text: String,
    ) -> Result<usize, InvalidToml> {
        let number = self.documents.len();
        let (document, syntax_errors) = TomlDocument::parse(name, text, number);
        self.documents.push(document);
        if syntax_errors.is_empty() {
            return Ok(number);
        }
        for (place, message) in syntax_errors {
            self.report_error(place, String::new(), format!("not TOML: {message}"));
        }
        Err(InvalidToml)
    }

    /// Reads a file, which is watched from now on.
    pub(super) fn read_file(&self, path: &Path) -> Result<String, String> {
        self.update_file_set(|files| files.insert(path.to_owned()));
        std::fs::read_to_string(path).map_err(|error| format!("can't be read: {error}"))
    }

    /// The same, of a file that need not be text throughout.
    pub(super) fn read_file_bytes(&self, path: &Path) -> Result<Vec<u8>, String> {
        self.update_file_set(|files| files.insert(path.to_owned()));
        std::fs::read(path).map_err(|error| format!("can't be read: {error}"))
    }

    pub(super) fn update_file_set(&self, update: impl FnOnce(&mut FileSet)) {
        update(&mut self.files.borrow_mut());
    }

    pub(super) fn set_layers(&mut self, layers: Figment) {
        self.layers = layers;
    }

    pub(super) fn documents(&self) -> &[TomlDocument] {
        &self.documents
    }

    pub(super) fn report_error(&self, span: SourceSpan, key: String, problem: String) {
        self.add_diagnostic(DiagnosticSeverity::Error, span, key, problem);
    }

    pub(super) fn report_warning(&self, span: SourceSpan, key: String, problem: String) {
        self.add_diagnostic(DiagnosticSeverity::Warning, span, key, problem);
    }

    pub(super) fn has_errors(&self) -> bool {
        self.diagnostics
            .borrow()
            .iter()
            .any(|finding| finding.severity == DiagnosticSeverity::Error)
    }

    /// Where a value was written; without one, where it should be.
    pub(super) fn value_span(
        &self,
        document: usize,
        path: &KeyPath,
        value: Option<&Value>,
    ) -> SourceSpan {
        match (
            value.and_then(|value| self.override_label(value.tag())),
            self.documents.get(document),
        ) {
            (Some(label), _) => Self::override_span(label),
            (None, Some(document)) => document.value_span(path),
            (None, None) => Self::override_span("configuration"),
        }
    }

    pub(super) fn key_span(&self, document: usize, path: &KeyPath, value: &Value) -> SourceSpan {
        match (
            self.override_label(value.tag()),
            self.documents.get(document),
        ) {
            (None, Some(document)) => document.key_span(path),
            _ => self.value_span(document, path, Some(value)),
        }
    }

    /// A value as it was written in its file, unless it comes from elsewhere.
    pub(super) fn source_text(
        &self,
        document: usize,
        path: &KeyPath,
        value: &Value,
    ) -> Option<&str> {
        match self.override_label(value.tag()) {
            Some(_) => None,
            None => self.documents.get(document)?.source_text(path),
        }
    }

    /// A variable or a flag.
    pub(super) fn override_span(label: &str) -> SourceSpan {
        SourceSpan::from_source(label, OVERRIDE_RANK)
    }

    /// All errors, or `built` with all warnings.
    ///
    /// # Errors
    /// A [`Report`] if there was any error.
    pub(super) fn finish<T, C>(
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

    fn override_label(&self, tag: Tag) -> Option<&str> {
        let metadata = self.layers.get_metadata(tag)?;
        if metadata.source.is_some() {
            None
        } else {
            Some(&metadata.name)
        }
    }

    fn add_diagnostic(
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
