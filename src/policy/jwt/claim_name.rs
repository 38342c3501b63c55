//! The names of claims, and what of a claim is the value of a key.

use super::ClaimValue;
use crate::policy::json_pointer::JsonPointer;
use serde_json::Value;
use std::fmt;
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

    fn find_in<'v>(&self, claims: &'v Value) -> Option<&'v Value> {
        if self.name.starts_with('/') {
            claims.pointer(&self.name)
        } else {
            claims.get(&*self.name)
        }
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

    pub(super) fn read_value(&self, claims: &Value) -> ClaimValue {
        let value = ClaimValue::from_json(self.find_in(claims));
        if self.issuers.is_empty() {
            return value;
        }
        let issuer = claims.get("iss").and_then(Value::as_str);
        let issuer = issuer.unwrap_or_default();
        let issued = |text: &str| format!("{issuer} {text}").into();
        match value {
            ClaimValue::Single(text) if !text.is_empty() => ClaimValue::Single(issued(&text)),
            ClaimValue::List(texts) => {
                ClaimValue::List(texts.iter().map(|text| issued(text)).collect())
            }
            other => other,
        }
    }
}

impl fmt::Display for ClaimName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

impl AsRef<str> for ClaimName {
    fn as_ref(&self) -> &str {
        &self.name
    }
}
