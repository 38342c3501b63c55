//! Fields of the admin API's JSON, by JSON pointer. Missing or malformed fields are no error, so
//! that the responses of an older or newer proxy can be shown.

use serde_json::Value;

/// The value at a pointer, or null.
pub(super) fn value_at<'v>(json: &'v Value, pointer: &str) -> &'v Value {
    json.pointer(pointer).unwrap_or(&Value::Null)
}

/// The text at a pointer, or an empty one.
pub(super) fn text_at<'v>(json: &'v Value, pointer: &str) -> &'v str {
    value_at(json, pointer).as_str().unwrap_or_default()
}

/// The unsigned integer at a pointer, or 0.
pub(super) fn number_at(json: &Value, pointer: &str) -> u64 {
    value_at(json, pointer).as_u64().unwrap_or_default()
}

/// Whether the value at a pointer is true.
pub(super) fn is_true_at(json: &Value, pointer: &str) -> bool {
    *value_at(json, pointer) == true
}

/// The elements of the list at a pointer, or none.
pub(super) fn list_at<'v>(json: &'v Value, pointer: &str) -> &'v [Value] {
    let list = value_at(json, pointer).as_array();
    list.map_or(&[], Vec::as_slice)
}
