//! The names of claims, and what of a claim is the value of a key.

use super::ClaimTexts;
use crate::policy::JsonPointer;
use serde_json::Value;
use std::sync::Arc;

/// The claim that a policy reads: a name, or a JSON Pointer (RFC 6901) if it starts with a slash.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ClaimName {
    name: Box<str>,
    /// If not empty, `ISSUER VALUE` is the value of the claim, with one of these issuers.
    issuers: Arc<[Box<str>]>,
}

impl ClaimName {
    /// Parses a claim name or a JSON Pointer.
    ///
    /// # Errors
    /// Returns a message that states what is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        if text.is_empty() {
            return Err("a claim has a name, such as \"sub\"".to_owned());
        }
        if text.starts_with('/') {
            JsonPointer::parse(text)?;
        }
        Ok(Self {
            name: text.into(),
            issuers: Arc::default(),
        })
    }

    /// The same claim, with one of several issuers in its values.
    pub(crate) fn with_issuers(&self, issuers: &Arc<[Box<str>]>) -> Self {
        Self {
            name: self.name.clone(),
            issuers: Arc::clone(issuers),
        }
    }

    /// The claim as conditions read it.
    pub fn without_issuers(&self) -> Self {
        self.with_issuers(&Arc::default())
    }

    /// Whether the claim is the issuer itself.
    pub fn is_issuer(&self) -> bool {
        matches!(&*self.name, "iss" | "/iss")
    }

    /// Checks a value that an operator writes, or the text that a pattern begins with.
    ///
    /// # Errors
    /// Returns a message if the value has no issuer although it needs one.
    pub(crate) fn check_listed_value(&self, text: &str, is_pattern: bool) -> Result<(), String> {
        let has_issuer = |issuer: &str| match text.strip_prefix(issuer) {
            Some(rest) => rest.starts_with(' ') || (is_pattern && rest.is_empty()),
            None => is_pattern && issuer.starts_with(text),
        };
        match self.issuers.first() {
            Some(first) if !self.issuers.iter().any(|issuer| has_issuer(issuer)) => Err(format!(
                "with several issuers, the key requires the issuer before the value of a claim; expected for example \"{first} alice\""
            )),
            _ => Ok(()),
        }
    }

    pub(super) fn read_value(&self, claims: &Value) -> ClaimTexts {
        let issuer = claims.get("iss").and_then(Value::as_str);
        let issuer = (!self.issuers.is_empty()).then(|| issuer.unwrap_or_default());
        let issued = |text: String| match issuer {
            Some(issuer) => format!("{issuer} {text}").into(),
            None => text.into(),
        };
        let found = if self.name.starts_with('/') {
            claims.pointer(&self.name)
        } else {
            claims.get(&*self.name)
        };
        Some(match found {
            None | Some(Value::Null) => return None,
            Some(Value::Array(items)) => {
                let texts = items.iter().filter_map(scalar_text);
                texts.map(issued).collect()
            }
            Some(value) => match scalar_text(value) {
                Some(text) if text.is_empty() => vec![text.into()],
                text => text.map(issued).into_iter().collect(),
            },
        })
    }
}

fn scalar_text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(_) | Value::Bool(_) => Some(value.to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

impl AsRef<str> for ClaimName {
    fn as_ref(&self) -> &str {
        &self.name
    }
}
