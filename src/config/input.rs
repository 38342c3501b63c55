//! What was read, and what was found wrong with it so far.

use super::FileSet;
use super::diagnostic::{Diagnostic, Place, Report, Severity};
use super::document::{Document, KeyPath};
use figment::Figment;
use figment::value::{Tag, Value};
use std::cell::RefCell;
use std::path::Path;

/// What overrides files sorts behind them.
const OVERRIDES: usize = usize::MAX;

/// All that a load reads and finds.
#[derive(Debug, Default)]
pub(super) struct Input {
    documents: Vec<Document>,
    /// The merged layers, which know where each value came from.
    layers: Figment,
    findings: RefCell<Vec<Diagnostic>>,
    files: RefCell<FileSet>,
}

/// A document that cannot be used.
#[derive(Debug)]
pub(super) struct NoToml;

impl Input {
    /// Parses a document and keeps it. Returns its number.
    ///
    /// # Errors
    /// What is no TOML is reported.
    pub(super) fn parse(&mut self, name: String, text: String) -> Result<usize, NoToml> {
        let number = self.documents.len();
        let (document, faults) = Document::parse(name, text, number);
        self.documents.push(document);
        if faults.is_empty() {
            return Ok(number);
        }
        for (place, message) in faults {
            self.error(place, String::new(), format!("not TOML: {message}"));
        }
        Err(NoToml)
    }

    /// Reads a file, which is watched from now on.
    pub(super) fn read(&self, path: &Path) -> Result<String, String> {
        self.watch(|files| files.add(path.to_owned()));
        std::fs::read_to_string(path).map_err(|error| format!("can't be read: {error}"))
    }

    /// The same, of a file that need not be text throughout.
    pub(super) fn read_bytes(&self, path: &Path) -> Result<Vec<u8>, String> {
        self.watch(|files| files.add(path.to_owned()));
        std::fs::read(path).map_err(|error| format!("can't be read: {error}"))
    }

    pub(super) fn watch(&self, add: impl FnOnce(&mut FileSet)) {
        add(&mut self.files.borrow_mut());
    }

    pub(super) fn set_layers(&mut self, layers: Figment) {
        self.layers = layers;
    }

    pub(super) fn documents(&self) -> &[Document] {
        &self.documents
    }

    pub(super) fn error(&self, place: Place, key: String, problem: String) {
        self.find(Severity::Error, place, key, problem);
    }

    pub(super) fn warning(&self, place: Place, key: String, problem: String) {
        self.find(Severity::Warning, place, key, problem);
    }

    pub(super) fn has_errors(&self) -> bool {
        self.findings
            .borrow()
            .iter()
            .any(|finding| finding.severity == Severity::Error)
    }

    /// Where a value was written; without one, where it should be.
    pub(super) fn place(&self, document: usize, path: &KeyPath, value: Option<&Value>) -> Place {
        match (
            value.and_then(|value| self.overridden_by(value.tag())),
            self.documents.get(document),
        ) {
            (Some(label), _) => Self::override_place(label),
            (None, Some(document)) => document.place_of_value(path),
            (None, None) => Self::override_place("configuration"),
        }
    }

    pub(super) fn place_of_key(&self, document: usize, path: &KeyPath, value: &Value) -> Place {
        match (
            self.overridden_by(value.tag()),
            self.documents.get(document),
        ) {
            (None, Some(document)) => document.place_of_key(path),
            _ => self.place(document, path, Some(value)),
        }
    }

    /// A value as it was written in its file, unless it comes from elsewhere.
    pub(super) fn source(&self, document: usize, path: &KeyPath, value: &Value) -> Option<&str> {
        match self.overridden_by(value.tag()) {
            Some(_) => None,
            None => self.documents.get(document)?.source(path),
        }
    }

    /// A variable or a flag.
    pub(super) fn override_place(label: &str) -> Place {
        Place::whole(label, OVERRIDES)
    }

    /// All errors, or `built` with all warnings.
    ///
    /// # Errors
    /// A [`Report`] if there was any error.
    pub(super) fn finish<T, C>(
        self,
        built: Option<T>,
        complete: impl FnOnce(T, Vec<Diagnostic>, FileSet) -> C,
    ) -> Result<C, Report> {
        let failed = self.has_errors();
        let files = self.files.into_inner();
        let mut diagnostics = self.findings.into_inner();
        diagnostics.sort_by_key(|finding| finding.place.order());
        match built {
            Some(built) if !failed => Ok(complete(built, diagnostics, files)),
            _ => {
                diagnostics.retain(|finding| finding.severity == Severity::Error);
                Err(Report { diagnostics, files })
            }
        }
    }

    fn overridden_by(&self, tag: Tag) -> Option<&str> {
        let metadata = self.layers.get_metadata(tag)?;
        if metadata.source.is_some() {
            None
        } else {
            Some(&metadata.name)
        }
    }

    fn find(&self, severity: Severity, place: Place, key: String, problem: String) {
        self.findings.borrow_mut().push(Diagnostic {
            severity,
            place,
            key,
            problem,
        });
    }
}
