//! Access control of the admin endpoint: bearer token, DNS rebinding, cross-site requests.

use super::fleet::derive_instance_credential;
use super::responses::ProblemDetails;
use super::{AdminSettings, AdminToken, ReloadableAdminToken};
use axum::extract::{Extension, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http::header::{AUTHORIZATION, HOST, ORIGIN, WWW_AUTHENTICATE};
use http::{HeaderMap, Method, StatusCode, Uri};
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;
use subtle::ConstantTimeEq;
use tokio::time::timeout;

/// Deadline of a response, longer than any wait inside a handler.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Address of the connected peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AdminPeer(pub(super) IpAddr);

/// Checks whether the caller may use a route.
#[derive(Clone, Debug)]
pub(super) struct AccessGuard {
    token: ReloadableAdminToken,
    /// Whether other machines can reach the endpoint. Reads of an exposed endpoint need the token
    /// too.
    is_exposed: bool,
    /// Selects the credential that other instances with the same token send.
    instance_id: String,
}

/// The access that a route requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequiredAccess {
    /// For routes that reveal no data: health checks, and the dashboard page without its data.
    Public,
    Read,
    /// Read access to what other instances request: the summary.
    InstanceSummary,
    /// To start a drain, as a `preStop` command inside the pod does.
    Drain,
    Write,
}

impl AccessGuard {
    pub(super) fn new(
        settings: &AdminSettings,
        token: ReloadableAdminToken,
        instance_id: &str,
    ) -> Self {
        Self {
            token,
            is_exposed: !settings.address.is_local(),
            instance_id: instance_id.to_owned(),
        }
    }

    /// # Errors
    /// Returns the problem to send if access is denied.
    fn authorize(
        &self,
        method: &Method,
        path: &str,
        headers: &HeaderMap,
        peer: AdminPeer,
    ) -> Result<(), ProblemDetails> {
        let required = RequiredAccess::from_request(method, path);
        // Following a link from another site is allowed: the user sees the page, and that site
        // cannot read it.
        let is_link = method.is_safe() && is_top_level_navigation(headers);
        if !is_link && is_cross_origin(headers) {
            return Err(forbidden_problem(
                "cross-site request: a script or form of another page sent it",
            ));
        }
        let token = self.token.load();
        let has_token = token
            .as_ref()
            .is_some_and(|token| has_expected_token(headers, token.expose()));
        let has_credential = |token: &AdminToken| {
            let expected = derive_instance_credential(token, &self.instance_id);
            has_expected_token(headers, expected.expose())
        };
        match (required, token.as_ref()) {
            (RequiredAccess::Public, _) => Ok(()),
            (RequiredAccess::Read | RequiredAccess::InstanceSummary, _) if !self.is_exposed => {
                Ok(())
            }
            _ if has_token => Ok(()),
            (RequiredAccess::InstanceSummary, Some(token)) if has_credential(token) => Ok(()),
            (_, Some(_)) => Err(ProblemDetails::new(
                StatusCode::UNAUTHORIZED,
                "a bearer token is needed: see admin.token_file",
            )),
            (RequiredAccess::Drain, None) if !peer.0.to_canonical().is_loopback() => {
                Err(forbidden_problem(
                    "without admin.token_file, only callers on this machine may do this",
                ))
            }
            (RequiredAccess::Drain, None) if is_from_browser(headers) => Err(forbidden_problem(
                "without admin.token_file, browsers may not do this",
            )),
            (RequiredAccess::Drain, None) => Ok(()),
            _ => Err(forbidden_problem(
                "nothing can be changed here without a token: name a file that holds one in admin.token_file",
            )),
        }
    }
}

impl RequiredAccess {
    /// Every combination of method and path that is not listed requires write access.
    fn from_request(method: &Method, path: &str) -> Self {
        match (method.as_str(), path) {
            ("GET" | "HEAD", "/" | "/livez" | "/readyz" | "/metrics") => Self::Public,
            ("GET" | "HEAD", "/fleet/instance") => Self::InstanceSummary,
            ("GET" | "HEAD", _) | ("POST", "/explain") => Self::Read,
            ("POST", "/drain") => Self::Drain,
            _ => Self::Write,
        }
    }
}

fn forbidden_problem(why: &str) -> ProblemDetails {
    ProblemDetails::new(StatusCode::FORBIDDEN, why)
}

/// Checks access to a route, then runs its handler with a deadline.
pub(super) async fn authorize_and_run_handler(
    State(guard): State<AccessGuard>,
    Extension(peer): Extension<AdminPeer>,
    request: Request,
    next: Next,
) -> Response {
    if let Err(refusal) = guard.authorize(
        request.method(),
        request.uri().path(),
        request.headers(),
        peer,
    ) {
        let needs_token = refusal.status == StatusCode::UNAUTHORIZED;
        let mut response = refusal.into_response();
        if needs_token {
            response
                .headers_mut()
                .insert(WWW_AUTHENTICATE, http::HeaderValue::from_static("Bearer"));
        }
        return response;
    }
    timeout(RESPONSE_TIMEOUT, next.run(request))
        .await
        .unwrap_or_else(|_late| {
            ProblemDetails::new(StatusCode::GATEWAY_TIMEOUT, "the request timed out")
                .into_response()
        })
}

/// Accepts only requests whose `Host` names this endpoint (protection against DNS rebinding).
///
/// A web page can make a browser send requests to this address with a `Host` name that the page's
/// owner controls. A web page cannot choose an IP address as its host name, so every IP address is
/// accepted in `Host`: probes and people use them.
pub(super) async fn require_known_host(
    State(settings): State<Arc<AdminSettings>>,
    request: Request,
    next: Next,
) -> Response {
    if is_known_host(request.headers(), &settings.allowed_hosts) {
        next.run(request).await
    } else {
        forbidden_problem("this Host is not allowed: see admin.allowed_hosts").into_response()
    }
}

/// Whether the browser reports that a page of another origin made the request.
fn is_cross_origin(headers: &HeaderMap) -> bool {
    let mut sites = headers.get_all("sec-fetch-site").iter();
    let foreign = sites.any(|site| !matches!(site.as_bytes(), b"same-origin" | b"none"));
    let host = headers.get(HOST).map(http::HeaderValue::as_bytes);
    let is_ours = |origin: &http::HeaderValue| {
        let origin = origin.to_str().ok();
        let uri = origin.and_then(|origin| origin.parse::<Uri>().ok());
        let authority = uri.as_ref().and_then(Uri::authority).zip(host);
        authority.is_some_and(|(authority, host)| {
            authority.as_str().as_bytes().eq_ignore_ascii_case(host)
        })
    };
    foreign || !headers.get_all(ORIGIN).iter().all(is_ours)
}

/// Whether the browser reports a top-level navigation (Fetch Metadata).
fn is_top_level_navigation(headers: &HeaderMap) -> bool {
    let has_value = |name, value: &[u8]| {
        headers
            .get_all(name)
            .iter()
            .any(|said| said.as_bytes() == value)
    };
    has_value("sec-fetch-mode", b"navigate") && has_value("sec-fetch-dest", b"document")
}

fn is_from_browser(headers: &HeaderMap) -> bool {
    headers.contains_key(ORIGIN) || headers.contains_key("sec-fetch-site")
}

fn is_known_host(headers: &HeaderMap, allowed: &[String]) -> bool {
    let mut hosts = headers.get_all(HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else {
        return false;
    };
    let Ok(host) = host.to_str() else {
        return false;
    };
    if let Some(rest) = host.strip_prefix('[') {
        return rest
            .split_once(']')
            .is_some_and(|(address, _)| address.parse::<Ipv6Addr>().is_ok());
    }
    let name = host
        .split_once(':')
        .map_or(host, |(name, _port)| name)
        .to_ascii_lowercase();
    name == "localhost" || name.parse::<IpAddr>().is_ok() || allowed.contains(&name)
}

/// Whether the request has the expected bearer token, compared in constant time.
fn has_expected_token(headers: &HeaderMap, token: &str) -> bool {
    let mut given = headers.get_all(AUTHORIZATION).iter();
    let (Some(given), None) = (given.next(), given.next()) else {
        return false;
    };
    let given = given.as_bytes().split_at_checked("Bearer ".len());
    given.is_some_and(|(scheme, given)| {
        scheme.eq_ignore_ascii_case(b"Bearer ") && given.ct_eq(token.as_bytes()).into()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderName;

    fn header_map(name: HeaderName, values: &[&str]) -> HeaderMap {
        values
            .iter()
            .map(|value| (name.clone(), value.parse().unwrap()))
            .collect()
    }

    #[test]
    fn rejects_unknown_host_names() {
        let allowed = ["admin.internal".to_owned()];
        let known = |hosts: &[&str]| is_known_host(&header_map(HOST, hosts), &allowed);
        for host in [
            "localhost",
            "LOCALHOST:9090",
            "127.0.0.1:9090",
            "10.1.2.3",
            "[::1]:9090",
            "Admin.Internal:1",
        ] {
            assert!(known(&[host]), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "[evil]",
            "[::1",
        ] {
            assert!(!known(&[host]), "{host}");
        }
        assert!(!known(&[]) && !known(&["localhost", "evil.example"]));
    }

    const LOOPBACK_PEER: AdminPeer = AdminPeer(IpAddr::V6(Ipv6Addr::LOCALHOST));

    fn authorization_status(
        guard: &AccessGuard,
        method: Method,
        path: &str,
        lines: &[(&'static str, &str)],
        peer: AdminPeer,
    ) -> u16 {
        let line = |(name, value): &(&'static str, &str)| {
            (
                HeaderName::from_static(name),
                value.parse::<http::HeaderValue>().unwrap(),
            )
        };
        let headers: HeaderMap = lines
            .iter()
            .map(line)
            .chain([(HOST, "localhost:1".parse().unwrap())])
            .collect();
        let admitted = guard.authorize(&method, path, &headers, peer);
        admitted.map_or_else(|problem| problem.status.as_u16(), |()| 200)
    }

    #[test]
    fn each_route_requires_its_access_level() {
        let token = Some(AdminToken::new("t".to_owned()));
        let (get, delete, post) = (Method::GET, Method::DELETE, Method::POST);
        // Expected statuses on loopback: without a token, with a configured one, and with it sent.
        // Then those on an exposed address with a configured token: not sent, and sent.
        let cases = [
            (&get, "/livez", [200, 200, 200], [200, 200]),
            (&get, "/", [200, 200, 200], [200, 200]),
            (&post, "/", [403, 401, 200], [401, 200]),
            (&get, "/policies", [200, 200, 200], [401, 200]),
            (&post, "/explain", [200, 200, 200], [401, 200]),
            (&post, "/drain", [200, 401, 200], [401, 200]),
            (&delete, "/keys", [403, 401, 200], [401, 200]),
            (&Method::PUT, "/log-level", [403, 401, 200], [401, 200]),
            (&post, "/something-new", [403, 401, 200], [401, 200]),
        ];
        let sent = &[("authorization", "Bearer t")][..];
        for (method, path, local, exposed) in cases {
            let request_status = |guard: &AccessGuard, lines| {
                authorization_status(guard, method.clone(), path, lines, LOOPBACK_PEER)
            };
            let (without, with) = (
                AccessGuard {
                    token: ReloadableAdminToken::default(),
                    is_exposed: false,
                    instance_id: "i".to_owned(),
                },
                AccessGuard {
                    token: ReloadableAdminToken::new(token.clone()),
                    is_exposed: false,
                    instance_id: "i".to_owned(),
                },
            );
            assert_eq!(
                [
                    request_status(&without, &[]),
                    request_status(&with, &[]),
                    request_status(&with, sent)
                ],
                local,
                "{method} {path}"
            );
            let everywhere = AccessGuard {
                token: ReloadableAdminToken::new(token.clone()),
                is_exposed: true,
                instance_id: "i".to_owned(),
            };
            assert_eq!(
                [
                    request_status(&everywhere, &[]),
                    request_status(&everywhere, sent)
                ],
                exposed,
                "{method} {path}"
            );
        }
    }

    #[test]
    fn without_a_token_only_local_non_browser_clients_may_drain() {
        let guard = AccessGuard {
            token: ReloadableAdminToken::default(),
            is_exposed: false,
            instance_id: "i".to_owned(),
        };
        let drain = |lines: &[(&'static str, &str)], peer| {
            authorization_status(&guard, Method::POST, "/drain", lines, peer)
        };
        assert_eq!(drain(&[], LOOPBACK_PEER), 200);
        assert_eq!(
            drain(&[], AdminPeer("::ffff:127.0.0.1".parse().unwrap())),
            200
        );
        assert_eq!(drain(&[], AdminPeer("10.0.0.1".parse().unwrap())), 403);
        assert_eq!(
            drain(&[("sec-fetch-site", "same-origin")], LOOPBACK_PEER),
            403
        );
        assert_eq!(
            drain(&[("origin", "http://localhost:1")], LOOPBACK_PEER),
            403
        );
    }

    #[test]
    fn cross_origin_changes_are_rejected_even_with_a_token() {
        let guard = AccessGuard {
            token: ReloadableAdminToken::new(Some(AdminToken::new("t".to_owned()))),
            is_exposed: false,
            instance_id: "i".to_owned(),
        };
        let reset = |name, value| {
            let lines = [("authorization", "Bearer t"), (name, value)];
            authorization_status(&guard, Method::DELETE, "/keys", &lines, LOOPBACK_PEER)
        };
        for (name, value) in [
            ("sec-fetch-site", "same-origin"),
            ("sec-fetch-site", "none"),
            ("origin", "http://localhost:1"),
            ("origin", "http://LOCALHOST:1"),
        ] {
            assert_eq!(reset(name, value), 200, "{name}: {value}");
        }
        for (name, value) in [
            ("sec-fetch-site", "cross-site"),
            ("sec-fetch-site", "same-site"),
            ("sec-fetch-site", ""),
            ("origin", "null"),
            ("origin", ""),
            ("origin", "http://localhost"),
            ("origin", "http://localhost:2"),
            ("origin", "http://evil.example"),
            ("origin", "http://localhost:1.evil.example"),
        ] {
            assert_eq!(reset(name, value), 403, "{name}: {value}");
        }
    }

    #[test]
    fn cross_origin_reads_are_rejected_except_navigation() {
        let guard = AccessGuard {
            token: ReloadableAdminToken::default(),
            is_exposed: false,
            instance_id: "i".to_owned(),
        };
        let get_status = |lines: &[(&'static str, &str)]| {
            authorization_status(&guard, Method::GET, "/keys", lines, LOOPBACK_PEER)
        };
        assert_eq!(get_status(&[("origin", "http://evil.example")]), 403);
        let site = ("sec-fetch-site", "cross-site");
        let (script, image) = (("sec-fetch-dest", "script"), ("sec-fetch-dest", "image"));
        assert_eq!(get_status(&[site]), 403);
        assert_eq!(
            get_status(&[site, ("sec-fetch-mode", "no-cors"), script]),
            403
        );
        assert_eq!(
            get_status(&[site, ("sec-fetch-mode", "no-cors"), image]),
            403
        );
        let navigate = ("sec-fetch-mode", "navigate");
        assert_eq!(
            get_status(&[site, navigate, ("sec-fetch-dest", "iframe")]),
            403
        );
        assert_eq!(
            get_status(&[site, navigate, ("sec-fetch-dest", "document")]),
            200
        );
        let post = [site, navigate, ("sec-fetch-dest", "document")];
        assert_eq!(
            authorization_status(&guard, Method::POST, "/explain", &post, LOOPBACK_PEER),
            403,
            "a form submission is not a link"
        );
    }

    #[test]
    fn an_instance_credential_reads_only_the_summary_of_its_instance() {
        let token = AdminToken::new("t".to_owned());
        let status = |id, path, method: Method| {
            let guard = AccessGuard {
                token: ReloadableAdminToken::new(Some(token.clone())),
                is_exposed: true,
                instance_id: "i".to_owned(),
            };
            let credential = derive_instance_credential(&token, id);
            let value = format!("Bearer {}", credential.expose());
            let lines = [("authorization", value.as_str())];
            authorization_status(&guard, method, path, &lines, LOOPBACK_PEER)
        };
        assert_eq!(status("i", "/fleet/instance", Method::GET), 200);
        assert_eq!(status("j", "/fleet/instance", Method::GET), 401);
        assert_eq!(status("i", "/fleet", Method::GET), 401);
        assert_eq!(status("i", "/keys", Method::DELETE), 401);
    }

    #[test]
    fn only_the_exact_token_is_accepted() {
        let has =
            |values: &[&str]| has_expected_token(&header_map(AUTHORIZATION, values), "s3cret");
        assert!(has(&["Bearer s3cret"]) && has(&["bearer s3cret"]));
        for wrong in [
            "",
            "Bearer",
            "Bearer ",
            "Bearer s3cre",
            "Bearer s3crets",
            "Basic s3cret",
            "s3cret",
        ] {
            assert!(!has(&[wrong]), "{wrong}");
        }
        assert!(!has(&[]) && !has(&["Bearer s3cret", "Bearer s3cret"]));
    }
}
