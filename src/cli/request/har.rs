//! Reads a request from a browser's HAR file ("Save all as HAR").

use super::curl::ImportedRequest;
use serde_json::Value;
use std::fs::File;
use std::io::Read as _;
use std::path::Path;

/// Maximum file size. A recorded browser session with all bodies is smaller.
const MAX_FILE_BYTES: u64 = 256 << 20;

/// Reads entry `number` of a file, starting at 1. Reads the first entry if `number` is `None`.
///
/// # Errors
/// A message if the file is invalid or has no such entry.
pub(crate) fn read_har_entry(
    path: &Path,
    number: Option<usize>,
) -> Result<ImportedRequest, String> {
    let name = path.display();
    let mut text = Vec::new();
    let file = File::open(path).map_err(|error| format!("{name} can't be read: {error}"))?;
    file.take(MAX_FILE_BYTES + 1)
        .read_to_end(&mut text)
        .map_err(|error| format!("{name} can't be read: {error}"))?;
    if u64::try_from(text.len()).unwrap_or(u64::MAX) > MAX_FILE_BYTES {
        return Err(format!(
            "{name} is larger than {} MiB",
            MAX_FILE_BYTES >> 20
        ));
    }
    // Some tools write a UTF-8 byte order mark.
    let text = text.strip_prefix("\u{feff}".as_bytes()).unwrap_or(&text);
    let har: Value =
        serde_json::from_slice(text).map_err(|error| format!("{name} is not JSON: {error}"))?;
    import_har_entry(&har, number).map_err(|error| format!("{name}: {error}"))
}

fn import_har_entry(har: &Value, number: Option<usize>) -> Result<ImportedRequest, String> {
    let entries = har
        .pointer("/log/entries")
        .and_then(Value::as_array)
        .ok_or("not a HAR file: log.entries is missing")?;
    let count = entries.len();
    let number = number.unwrap_or(1);
    let request = number
        .checked_sub(1)
        .and_then(|at| entries.get(at))
        .ok_or_else(|| format!("there is no entry {number}; expected 1 to {count}"))?
        .get("request")
        .ok_or_else(|| format!("entry {number} has no request"))?;
    let text = |name: &str| {
        let value = request.get(name).and_then(Value::as_str);
        value
            .map(str::to_owned)
            .ok_or_else(|| format!("the request of entry {number} has no {name}"))
    };
    let (method, url) = (text("method")?, text("url")?);
    let listed = request
        .get("headers")
        .and_then(Value::as_array)
        .map_or(&[] as &[Value], Vec::as_slice);
    let text_field =
        |header: &Value, name: &str| header.get(name).and_then(Value::as_str).map(str::to_owned);
    // HTTP/2 pseudo-headers such as `:path` repeat the method and URL.
    let headers = listed
        .iter()
        .filter_map(|header| Some((text_field(header, "name")?, text_field(header, "value")?)));
    let headers = headers.filter(|(name, _)| !name.starts_with(':')).collect();
    let body = request.pointer("/postData/text").and_then(Value::as_str);
    let notes = if count > 1 {
        vec![format!("entry {number} of {count}")]
    } else {
        Vec::new()
    };
    Ok(ImportedRequest {
        method,
        url: url.split('#').next().unwrap_or_default().to_owned(),
        headers,
        body: body.unwrap_or_default().to_owned(),
        notes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn sample_har() -> Value {
        let request = |url: &str| {
            json!({ "request": { "method": "GET", "url": url, "headers": [
                { "name": ":path", "value": "/x" }, { "name": "X-User", "value": "ann" }, { "broken": 1 },
            ] } })
        };
        json!({ "log": { "entries": [request("https://h/1#x"), request("https://h/2"), {}] } })
    }

    #[test]
    fn reads_an_entry_as_a_request() {
        let first = import_har_entry(&sample_har(), None).unwrap();
        assert_eq!(
            (first.method.as_str(), first.url.as_str()),
            ("GET", "https://h/1")
        );
        assert_eq!(first.headers, [("X-User".to_owned(), "ann".to_owned())]);
        assert_eq!(first.notes, ["entry 1 of 3"]);
        assert_eq!(
            import_har_entry(&sample_har(), Some(2)).unwrap().url,
            "https://h/2"
        );
    }

    #[test]
    fn reports_invalid_har_files() {
        for (number, why) in [
            (0, "expected 1 to 3"),
            (4, "expected 1 to 3"),
            (3, "has no request"),
        ] {
            assert!(
                import_har_entry(&sample_har(), Some(number))
                    .unwrap_err()
                    .contains(why),
                "{number}"
            );
        }
        assert!(
            import_har_entry(&json!({}), None)
                .unwrap_err()
                .contains("log.entries")
        );
        assert!(
            read_har_entry(Path::new("/nonexistent"), None)
                .unwrap_err()
                .contains("can't be read")
        );
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "\u{feff}{").unwrap();
        assert!(
            read_har_entry(file.path(), None)
                .unwrap_err()
                .contains("not JSON")
        );
    }
}
