//! Settings for cross-origin access to local replies (Fetch standard, "CORS protocol").

use http::HeaderValue;

/// Origins with access to the proxy's local replies. Upstreams set their own CORS headers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CorsOrigins(Vec<HeaderValue>);

impl CorsOrigins {
    /// Takes origins as [`CorsOrigins::parse_origin`] returns them.
    pub fn new(origins: Vec<HeaderValue>) -> Self {
        Self(origins)
    }

    /// Parses `*`, or an origin as browsers serialize it: scheme, host and a non-default port.
    ///
    /// # Errors
    /// A description of the problem that can follow `found …;`.
    pub fn parse_origin(text: &str) -> Result<HeaderValue, String> {
        const EXPECTED: &str =
            "expected \"*\", or an origin as browsers send it such as \"https://app.example.com\"";
        let has_only_valid_bytes = |text: &str, more: &[u8]| {
            !text.is_empty()
                && text
                    .bytes()
                    .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || more.contains(&b))
        };
        let why = match text.split_once("://") {
            _ if text == "*" => None,
            None => Some("the scheme is missing"),
            Some(_) if text.contains('*') => Some("a wildcard cannot be part of an origin"),
            Some(_) if text.ends_with('/') => Some("remove the slash at the end"),
            Some(_) if text.bytes().any(|byte| byte.is_ascii_uppercase()) => Some("use lower case"),
            Some((scheme, authority)) => {
                let (host, port) = match authority.rsplit_once(':') {
                    Some((host, port)) if !port.ends_with(']') => (host, Some(port)),
                    _ => (authority, None),
                };
                let is_default_port = matches!(
                    (scheme, port),
                    ("http", Some("80")) | ("https", Some("443"))
                );
                let is_port = port.is_none_or(|port| {
                    port.parse::<u16>()
                        .is_ok_and(|n| n > 0 && n.to_string() == port)
                });
                match () {
                    () if is_default_port => Some("remove the default port of the scheme"),
                    () if has_only_valid_bytes(scheme, b"+.-")
                        && has_only_valid_bytes(host, b".-_[]:")
                        && is_port =>
                    {
                        None
                    }
                    () => Some("use a scheme, a host and an optional port, and nothing else"),
                }
            }
        };
        let value = HeaderValue::from_str(text).map_err(|_invalid| EXPECTED.to_owned());
        why.map_or(value, |why| Err(format!("{EXPECTED}: {why}")))
    }

    /// Whether the origins include `*`.
    pub fn allows_any_origin(&self) -> bool {
        self.0.iter().any(|origin| origin == "*")
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the configured entry that covers `origin`: the same origin, or `*`.
    pub fn match_origin(&self, origin: &HeaderValue) -> Option<&HeaderValue> {
        self.0
            .iter()
            .find(|entry| *entry == origin || *entry == "*")
    }
}

#[cfg(test)]
mod tests {
    use super::CorsOrigins;

    #[test]
    fn accepts_origins_only_as_browsers_send_them() {
        for right in [
            "*",
            "https://app.example.com",
            "http://localhost:3000",
            "https://a.example:8443",
            "http://[::1]",
            "http://[::1]:3000",
            "capacitor://localhost",
            "chrome-extension://abcdef",
            "http://a_b.example",
        ] {
            assert_eq!(CorsOrigins::parse_origin(right).unwrap(), right);
        }
        for (wrong, why) in [
            ("", "scheme"),
            ("null", "scheme"),
            ("app.example.com", "scheme"),
            ("https://*.example.com", "wildcard"),
            ("https://a.example/", "slash"),
            ("https://a.example/x", "nothing else"),
            ("https://A.example", "lower"),
            ("https://a.example:443", "default port"),
            ("http://a.example:80", "default port"),
            ("https://a.example:0443", "nothing else"),
            ("https://a.example:", "nothing else"),
            ("https://a.example:99999", "nothing else"),
            ("https://", "slash"),
            ("https://u@a.example", "nothing else"),
            ("https://a b", "nothing else"),
            ("https://a, https://b", "nothing else"),
            ("https://é.example", "nothing else"),
            ("https://a.example\r\n", "nothing else"),
        ] {
            let error = CorsOrigins::parse_origin(wrong).unwrap_err();
            assert!(error.contains(why), "{wrong}: {error}");
        }
    }
}
