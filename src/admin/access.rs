//! Who is answered: not a browser that was led here by another name, and only who has the token.

use super::{AdminSettings, Token};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::header::{AUTHORIZATION, HOST, WWW_AUTHENTICATE};
use http::{HeaderMap, StatusCode};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use subtle::ConstantTimeEq;

/// Answers only requests whose `Host` is known to mean us.
///
/// A page from anywhere can make a browser call any address, under a name that its owner lets point there (DNS
/// rebinding). The browser then sends that name. A page can't choose an address as its name, so addresses are
/// let through: probes and people use them.
pub(super) async fn require_known_host(
    State(settings): State<Arc<AdminSettings>>,
    request: Request,
    next: Next,
) -> Response {
    match is_known_host(request.headers(), &settings.allowed_hosts) {
        true => next.run(request).await,
        false => refused(StatusCode::FORBIDDEN, "this Host is not answered: see admin.allowed_hosts\n"),
    }
}

/// Answers only requests with the bearer token.
pub(super) async fn require_token(State(token): State<Token>, request: Request, next: Next) -> Response {
    if has_token(request.headers(), &token) {
        return next.run(request).await;
    }
    let mut response = refused(StatusCode::UNAUTHORIZED, "a bearer token is needed: see admin.token_file\n");
    response.headers_mut().insert(WWW_AUTHENTICATE, http::HeaderValue::from_static("Bearer"));
    response
}

fn refused(status: StatusCode, why: &'static str) -> Response {
    (status, why).into_response()
}

fn is_known_host(headers: &HeaderMap, allowed: &[String]) -> bool {
    let mut hosts = headers.get_all(HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else { return false };
    let Ok(host) = host.to_str() else { return false };
    if let Some(rest) = host.strip_prefix('[') {
        return rest.split_once(']').is_some_and(|(address, _)| address.parse::<Ipv6Addr>().is_ok());
    }
    let name = host.split_once(':').map_or(host, |(name, _port)| name).to_ascii_lowercase();
    name == "localhost" || name.parse::<IpAddr>().is_ok() || allowed.contains(&name)
}

/// In a time that does not tell how much of a guess is right.
fn has_token(headers: &HeaderMap, token: &Token) -> bool {
    let mut given = headers.get_all(AUTHORIZATION).iter();
    let (Some(given), None) = (given.next(), given.next()) else { return false };
    let given = given.as_bytes().split_at_checked("Bearer ".len());
    given.is_some_and(|(scheme, given)| {
        scheme.eq_ignore_ascii_case(b"Bearer ") && given.ct_eq(token.0.as_bytes()).into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderName;

    fn headers(name: HeaderName, values: &[&str]) -> HeaderMap {
        values.iter().map(|value| (name.clone(), value.parse().unwrap())).collect()
    }

    #[test]
    fn names_that_anybody_can_give_us_are_not_answered() {
        let allowed = ["admin.internal".to_owned()];
        let known = |hosts: &[&str]| is_known_host(&headers(HOST, hosts), &allowed);
        for host in
            ["localhost", "LOCALHOST:9090", "127.0.0.1:9090", "10.1.2.3", "[::1]:9090", "Admin.Internal:1"]
        {
            assert!(known(&[host]), "{host}");
        }
        for host in ["", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "[evil]", "[::1"]
        {
            assert!(!known(&[host]), "{host}");
        }
        assert!(!known(&[]) && !known(&["localhost", "evil.example"]));
    }

    #[test]
    fn only_the_whole_token_is_the_token() {
        let token = Token::new("s3cret".to_owned());
        let has = |values: &[&str]| has_token(&headers(AUTHORIZATION, values), &token);
        assert!(has(&["Bearer s3cret"]) && has(&["bearer s3cret"]));
        for wrong in ["", "Bearer", "Bearer ", "Bearer s3cre", "Bearer s3crets", "Basic s3cret", "s3cret"] {
            assert!(!has(&[wrong]), "{wrong}");
        }
        assert!(!has(&[]) && !has(&["Bearer s3cret", "Bearer s3cret"]));
    }
}
