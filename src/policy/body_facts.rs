//! What policies know of the body of a request: its size, and values at JSON pointers.

use super::JsonPointer;
use super::json_pointer::parse_whole_number;
use super::json_scanner::BodyValue;

/// The body of a request, as policies read it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BodyFacts {
    /// Bytes of the body; `None` if unknown.
    pub size: Option<u64>,
    /// The values at the pointers of all policies; `None` if the body could not be read.
    values: Option<Box<[(JsonPointer, BodyValue)]>>,
}

impl BodyFacts {
    /// A body that was not read.
    pub const fn unreadable(size: Option<u64>) -> Self {
        Self { size, values: None }
    }

    /// The values of a body that was read.
    pub fn new(size: Option<u64>, values: Box<[(JsonPointer, BodyValue)]>) -> Self {
        let values = Some(values);
        Self { size, values }
    }

    /// The values of a body in a log, at the pointers of all policies. Digits are a number.
    pub fn from_texts<'t>(
        size: Option<u64>,
        texts: impl Iterator<Item = (JsonPointer, Option<&'t str>)>,
    ) -> Self {
        let value = |text: &str| match parse_whole_number(text.as_bytes()) {
            Some(_) => BodyValue::Number(text.into()),
            None => BodyValue::Text(text.into()),
        };
        let values = texts.map(|(pointer, text)| (pointer, text.map_or(BodyValue::Absent, value)));
        Self::new(size, values.collect())
    }

    /// The value at a pointer of a policy.
    pub fn value(&self, pointer: &JsonPointer) -> &BodyValue {
        let values = self.values.as_deref();
        let found = values.and_then(|values| values.iter().find(|(known, _)| known == pointer));
        found.map_or(&BodyValue::Unreadable, |(_, value)| value)
    }

    /// The value at a pointer as keys and conditions compare it.
    pub(super) fn text(&self, pointer: &JsonPointer) -> Option<&str> {
        match self.value(pointer) {
            BodyValue::Text(text) | BodyValue::Number(text) => Some(text),
            BodyValue::Absent | BodyValue::Unreadable => None,
        }
    }
}
