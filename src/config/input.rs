//! The documents and diagnostics of one load.

use super::diagnostic::{ConfigDiagnostic, ConfigErrors, DiagnosticSeverity, SourceSpan};
use super::document::{KeyPath, TomlDocument};
use super::file_set::{FileSet, read_config_file};
use figment::Figment;
use figment::value::{Dict, Tag, Value};
use std::cell::RefCell;
use std::path::Path;

/// Diagnostics of variables and flags sort after those of files.
const OVERRIDE_RANK: usize = usize::MAX;

/// Documents, merged layers, diagnostics and files of one load.
#[derive(Debug, Default)]
pub(super) struct ConfigInput {
    documents: Vec<TomlDocument>,
    /// The merged layers. They record the source of each value.
    layers: Figment,
    diagnostics: RefCell<Vec<ConfigDiagnostic>>,
    files: RefCell<FileSet>,
    skips_key_files: bool,
}

/// The document has a syntax error, which has been reported.
#[derive(Debug)]
pub(super) struct InvalidToml;

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

    /// Parses a document and stores it. Returns its index.
    ///
    /// # Errors
    /// [`InvalidToml`] if the text is not TOML. The first syntax error has been reported.
    pub(super) fn parse_document(
        &mut self,
        name: String,
        text: String,
    ) -> Result<usize, InvalidToml> {
        let number = self.documents.len();
        let (document, syntax_error) = TomlDocument::parse(name, text, number);
        self.documents.push(document);
        let Some((span, message)) = syntax_error else {
            return Ok(number);
        };
        self.report_error(span, String::new(), format!("not TOML: {message}"));
        Err(InvalidToml)
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

    pub(super) fn set_layers(&mut self, layers: Figment) {
        self.layers = layers;
    }

    /// Takes the values of a document, without overrides. They are large with many policies.
    pub(super) fn take_document_values(&mut self, document: usize) -> Dict {
        let document = self.documents.get_mut(document);
        document.map(TomlDocument::take_values).unwrap_or_default()
    }

    pub(super) fn documents(&self) -> &[TomlDocument] {
        &self.documents
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

    /// Span of a value, or of its table if the value is absent.
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
            (Some(label), _) => Self::span_for_override(label),
            (None, Some(document)) => document.value_span(path),
            (None, None) => Self::span_for_override("configuration"),
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

    /// Source text of a value in its file. `None` if a variable or flag set it.
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

    /// Name of the variable or flag that set a value. `None` for a file.
    pub(super) fn override_label(&self, tag: Tag) -> Option<&str> {
        let metadata = self.layers.get_metadata(tag)?;
        if metadata.source.is_some() {
            None
        } else {
            Some(&metadata.name)
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
