//! Settings for cross-origin access to local replies (Fetch standard, "CORS protocol").

use http::{HeaderMap, HeaderValue, header};

/// Origins with access to the proxy's local replies, as [`CorsOrigins::parse_origin`] returns them.
/// Upstreams set their own CORS headers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CorsOrigins(pub Vec<HeaderValue>);

impl CorsOrigins {
    /// Parses `*`, or an origin as browsers serialize it: scheme, host and a non-default port.
    /// `*.` before the host stands for one or more labels.
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
        let parts = text.split_once("://").map(|(scheme, authority)| {
            let parent = authority.strip_prefix("*.");
            let parent = parent.filter(|parent| parent.contains('.') && !parent.starts_with('.'));
            (scheme, parent.unwrap_or(authority))
        });
        let why = match parts {
            _ if text == "*" => None,
            None => Some("the scheme is missing"),
            Some((_, name)) if name.contains('*') => {
                Some("a wildcard is the whole first label, as in \"https://*.example.com\"")
            }
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

    /// A copy of a request's `Origin`, if any origins are configured.
    pub fn copy_origin(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let is_configured = !self.is_empty();
        is_configured.then(|| headers.get(header::ORIGIN).cloned())?
    }

    /// Returns the value of `Access-Control-Allow-Origin` for `origin`: itself if it is configured,
    /// or `*`.
    pub fn match_origin<'o>(&'o self, origin: &'o HeaderValue) -> Option<&'o HeaderValue> {
        self.0.iter().find_map(|entry| match entry {
            entry if entry == "*" => Some(entry),
            entry => {
                let is_same = entry == origin && !origin.as_bytes().contains(&b'*');
                (is_same || is_below(entry, origin)).then_some(origin)
            }
        })
    }
}

/// Whether `entry` is a pattern such as `https://*.example.com` that covers an origin.
fn is_below(entry: &HeaderValue, origin: &HeaderValue) -> bool {
    let labels = || {
        let (scheme, parent) = entry.to_str().ok()?.split_once('*')?;
        origin
            .to_str()
            .ok()?
            .strip_prefix(scheme)?
            .strip_suffix(parent)
    };
    let is_label = |label: &str| {
        let is_valid =
            |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-_".contains(&byte);
        !label.is_empty() && label.bytes().all(is_valid)
    };
    labels().is_some_and(|labels| labels.split('.').all(is_label))
}

#[cfg(test)]
mod tests {
    use super::CorsOrigins;

    #[test]
    fn a_pattern_covers_whole_labels_of_its_scheme_and_port() {
        let patterns = ["https://*.example.com", "http://*.local.test:8080"];
        let patterns = patterns.map(|text| CorsOrigins::parse_origin(text).unwrap());
        let origins = CorsOrigins(patterns.into());
        for (origin, is_allowed) in [
            ("https://a.example.com", true),
            ("https://a.b-1.example.com", true),
            ("http://x.local.test:8080", true),
            ("https://example.com", false),
            ("https://.example.com", false),
            ("https://evil-example.com", false),
            ("https://evilexample.com", false),
            ("https://a.example.com.evil.test", false),
            ("https://a.example.com:8443", false),
            ("http://a.example.com", false),
            ("https://a..example.com", false),
            ("https://evil.test/.example.com", false),
            ("https://evil.test#.example.com", false),
            ("https://u@a.example.com", false),
            ("https://evil.test:1.example.com", false),
            ("https://*.example.com", false),
            ("http://x.local.test", false),
            ("null", false),
            ("", false),
        ] {
            let origin = http::HeaderValue::from_static(origin);
            let allowed = origins.match_origin(&origin);
            assert_eq!(allowed, is_allowed.then_some(&origin), "{origin:?}");
        }
    }

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
            "https://*.example.com",
            "http://*.example.com:8080",
            "http://a_b.example",
        ] {
            assert_eq!(CorsOrigins::parse_origin(right).unwrap(), right);
        }
        for (wrong, why) in [
            ("", "scheme"),
            ("null", "scheme"),
            ("app.example.com", "scheme"),
            ("https://*.com", "wildcard"),
            ("https://*", "wildcard"),
            ("https://a*.example.com", "wildcard"),
            ("https://*example.com", "wildcard"),
            ("https://*.*.example.com", "wildcard"),
            ("https://*..example.com", "wildcard"),
            ("*://a.example.com", "nothing else"),
            ("https://*.example.com/", "slash"),
            ("https://*.example.com:443", "default port"),
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
