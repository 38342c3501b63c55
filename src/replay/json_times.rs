//! Times of the JSON report: seconds since the Unix epoch.

use serde::Serializer;

pub(super) fn serialize_seconds<S: Serializer>(us: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    // Microseconds of this century are exact in a double.
    serializer.serialize_f64(*us as f64 / 1e6)
}

pub(super) fn serialize_seconds_if_any<S: Serializer>(
    us: &u64,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match us {
        0 => serializer.serialize_none(),
        us => serialize_seconds(us, serializer),
    }
}
