//! Attributes of spans, metrics and resources.

use http::Method;
use opentelemetry_proto::tonic::common::v1::{AnyValue, KeyValue, any_value};

/// Maximum length of a text attribute. A request head may contain more than a trace should store.
const MAX_ATTRIBUTE_BYTES: usize = 256;

/// Returns the name of a method that the semantic conventions list. Clients can invent any number
/// of other methods.
pub(crate) fn standard_method_name(method: &Method) -> Option<&'static str> {
    const KNOWN: [&str; 9] = [
        "GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "CONNECT", "TRACE",
    ];
    KNOWN.into_iter().find(|known| method.as_str() == *known)
}

pub(crate) fn string_attribute(key: &str, value: &str) -> KeyValue {
    let end = value.floor_char_boundary(MAX_ATTRIBUTE_BYTES);
    let value = value.get(..end).unwrap_or_default().to_owned();
    new_attribute(key, any_value::Value::StringValue(value))
}

pub(crate) fn bool_attribute(key: &str, value: bool) -> KeyValue {
    new_attribute(key, any_value::Value::BoolValue(value))
}

pub(crate) fn int_attribute(key: &str, value: i64) -> KeyValue {
    new_attribute(key, any_value::Value::IntValue(value))
}

fn new_attribute(key: &str, value: any_value::Value) -> KeyValue {
    KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue { value: Some(value) }),
        ..KeyValue::default()
    }
}
