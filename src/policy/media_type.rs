//! Media types of bodies (RFC 9110, 8.3).

use http::{HeaderMap, header};

/// The media type of a body without a content coding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaType {
    /// The type and subtype in lower case.
    pub name: String,
    /// What follows the name, in lower case.
    parameters: String,
}

impl MediaType {
    /// The type of a request's or response's body. `None` if it has none, several or one that is
    /// not ASCII, or if a content coding hides the body.
    pub fn from_headers(headers: &HeaderMap) -> Option<Self> {
        let mut lines = headers.get_all(header::CONTENT_TYPE).iter();
        let line = lines.next().filter(|_| is_identity_coded(headers))?;
        if lines.next().is_some() {
            return None;
        }
        let (name, parameters) = match line.to_str().ok()?.split_once(';') {
            Some((name, parameters)) => (name, parameters.to_ascii_lowercase()),
            None => (line.to_str().ok()?, String::new()),
        };
        Some(Self {
            name: name.trim().to_ascii_lowercase(),
            parameters,
        })
    }

    /// Whether every app reads the body as UTF-8: no parameter, or one that apps might take for
    /// one, names another charset.
    pub fn is_utf8(&self) -> bool {
        let mut charsets = self.parameters.match_indices("charset");
        let Some((at, _)) = charsets.next() else {
            return true;
        };
        let (before, value) = self.parameters.split_at(at);
        let value = value.split(';').next().unwrap_or_default().trim_end();
        let is_own_parameter = before.trim_end().is_empty() || before.trim_end().ends_with(';');
        charsets.next().is_none()
            && is_own_parameter
            && !before.contains('"')
            && matches!(value, "charset=utf-8" | "charset=\"utf-8\"")
    }

    /// Whether this is the name of a type whose bodies are one JSON document.
    pub fn is_json(name: &str) -> bool {
        name == "application/json" || name.ends_with("+json")
    }
}

/// Whether a body has the identity coding.
fn is_identity_coded(headers: &HeaderMap) -> bool {
    let mut codings = headers.get_all(header::CONTENT_ENCODING).iter();
    codings.all(|coding| {
        coding
            .as_bytes()
            .trim_ascii()
            .eq_ignore_ascii_case(b"identity")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_plain_charset_is_utf_8() {
        for (value, is_utf8) in [
            ("application/json", true),
            ("Application/JSON; Charset=UTF-8", true),
            ("application/json;charset=\"utf-8\"; profile=x", true),
            ("application/json; profile=\"x\"", true),
            ("application/json; charset=utf-7", false),
            ("application/json; charset=utf-8; charset=utf-7", false),
            (
                "application/json; x=\"a; charset=utf-8\"; charset=utf-7",
                false,
            ),
            ("application/json; x=\"a; charset=utf-8\"", false),
            ("application/json; charset*=utf-7", false),
            ("application/json; xcharset=utf-8", false),
            ("application/json; charset =utf-8", false),
            ("application/json; charset=", false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::CONTENT_TYPE, value.parse().unwrap());
            let media_type = MediaType::from_headers(&headers).unwrap();
            assert_eq!(media_type.name, "application/json");
            assert_eq!(media_type.is_utf8(), is_utf8, "{value}");
        }
    }
}
