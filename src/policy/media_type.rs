//! Media types of bodies (RFC 9110, 8.3).

use http::{HeaderMap, header};

/// The media type of a body without a content coding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaType {
    /// The type and subtype in lower case.
    pub name: String,
    /// The value of the parameter `charset`, without quotes.
    pub charset: Option<String>,
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
        let mut parts = line.to_str().ok()?.split(';').map(str::trim);
        let name = parts.next()?.to_ascii_lowercase();
        let charset = parts.find_map(|parameter| {
            let (name, value) = parameter.split_once('=')?;
            let is_charset = name.trim_end().eq_ignore_ascii_case("charset");
            is_charset.then(|| value.trim().trim_matches('"').to_owned())
        });
        Some(Self { name, charset })
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
