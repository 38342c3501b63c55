//! The HTTP request for a JWK set.

use crate::http_client;
use crate::policy::jwt::KeySource;
use http::header::{ACCEPT, AGE, CACHE_CONTROL, CONNECTION, HOST, USER_AGENT};
use http::{HeaderMap, Request, StatusCode};
use http_body_util::Full;
use std::time::Duration;
use tokio::time::timeout;

/// Timeout of a fetch, with name resolution, connection and body.
const FETCH_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum size of a JWK set. Sets of large issuers have some ten KiB.
const MAX_KEY_SET_BYTES: usize = 1 << 20;
/// The text of a JWK set, and how long it may be used without another fetch; `None` if the response
/// does not say.
pub(super) type FetchedKeySet = (String, Option<Duration>);

/// Fetches the JWK set of a source.
///
/// # Errors
/// Returns a message without any content of the response.
pub(super) async fn fetch_key_set(source: &KeySource) -> Result<FetchedKeySet, String> {
    let fetched = timeout(FETCH_TIMEOUT, connect_and_fetch(source)).await;
    fetched.unwrap_or_else(|_elapsed| Err("no complete response within 5 s".to_owned()))
}

async fn connect_and_fetch(source: &KeySource) -> Result<FetchedKeySet, String> {
    let stream = http_client::connect(&source.url, source.tls.as_ref(), &[]).await?;
    let request = Request::get(&source.url.path_and_query)
        .header(HOST, &source.url.authority)
        .header(ACCEPT, "application/jwk-set+json, application/json")
        .header(USER_AGENT, concat!("tidegate/", env!("CARGO_PKG_VERSION")))
        .header(CONNECTION, "close")
        .body(Full::default())
        .map_err(|error| error.to_string())?;
    let response = http_client::fetch(stream, request, MAX_KEY_SET_BYTES, |status| {
        status == StatusCode::OK
    })
    .await?;
    match response.status() {
        StatusCode::OK => {}
        status if status.is_redirection() => {
            return Err(format!("status {status}: redirections are not followed"));
        }
        status => return Err(format!("status {status}")),
    }
    let max_age = read_max_age(response.headers());
    let text = String::from_utf8(response.into_body().into())
        .map_err(|_invalid| "the body is not UTF-8".to_owned())?;
    Ok((text, max_age))
}

/// The remaining freshness by `Cache-Control` and `Age`. `no-store` and `no-cache` are a freshness
/// of zero.
fn read_max_age(headers: &HeaderMap) -> Option<Duration> {
    let values = headers.get_all(CACHE_CONTROL).iter();
    let directives: Vec<String> = values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .map(|directive| directive.trim().to_ascii_lowercase())
        .collect();
    if directives.iter().any(|directive| {
        let name = directive.split('=').next().unwrap_or_default();
        matches!(name.trim(), "no-store" | "no-cache")
    }) {
        return Some(Duration::ZERO);
    }
    let seconds = directives.iter().find_map(|directive| {
        let (name, value) = directive.split_once('=')?;
        (name.trim() == "max-age").then_some(())?;
        value.trim().trim_matches('"').parse::<u64>().ok()
    })?;
    let age = headers
        .get(AGE)
        .and_then(|age| age.to_str().ok()?.trim().parse().ok());
    Some(Duration::from_secs(
        seconds.saturating_sub(age.unwrap_or(0)),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderName;

    #[test]
    fn reads_the_remaining_freshness() {
        let max_age_s = |lines: &[(HeaderName, &str)]| {
            let headers: HeaderMap = lines
                .iter()
                .map(|(name, value)| (name.clone(), value.parse().unwrap()))
                .collect();
            read_max_age(&headers).map(|age| age.as_secs())
        };
        let control = |value: &'static str| (CACHE_CONTROL, value);
        assert_eq!(max_age_s(&[]), None);
        assert_eq!(max_age_s(&[control("public")]), None);
        assert_eq!(max_age_s(&[control("public, Max-Age=300")]), Some(300));
        assert_eq!(
            max_age_s(&[control("public"), control("max-age=\"7\"")]),
            Some(7)
        );
        assert_eq!(
            max_age_s(&[control("max-age=300"), (AGE, "100")]),
            Some(200)
        );
        assert_eq!(max_age_s(&[control("max-age=300"), (AGE, "900")]), Some(0));
        assert_eq!(max_age_s(&[control("max-age=300, no-store")]), Some(0));
        assert_eq!(max_age_s(&[control("no-cache")]), Some(0));
        assert_eq!(max_age_s(&[control("max-age=x")]), None);
        assert_eq!(max_age_s(&[control("s-maxage=5")]), None);
    }
}
