//! The page at `/`: shows live what the other routes tell, and asks them by itself.
//!
//! It is one answer that needs nothing else: no other server, no font, no build. It holds nothing that is secret, so it
//! is given without a token; what it asks for afterwards is not. A browser runs only the scripts and styles whose
//! hashes its policy names, loads nothing from elsewhere, and refuses every way of making markup from a text
//! (`require-trusted-types-for`): what a client has put into a key stays a text.

use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::HeaderValue;
use http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::sync::LazyLock;

const HTML_TEMPLATE: &str = include_str!("dashboard/index.html");
const STYLES_PLACEHOLDER: &str = "<!--STYLES-->";
const SCRIPTS_PLACEHOLDER: &str = "<!--SCRIPTS-->";

/// uPlot is kept as its makers ship it (1.6.32); its licence is beside it.
const STYLES: [&str; 2] = [
    include_str!("dashboard/uplot.min.css"),
    include_str!("dashboard/style.css"),
];

/// In the order in which they need each other.
const SCRIPTS: [&str; 6] = [
    include_str!("dashboard/uplot.min.js"),
    include_str!("dashboard/page.js"),
    include_str!("dashboard/charts.js"),
    include_str!("dashboard/sections.js"),
    include_str!("dashboard/keys.js"),
    include_str!("dashboard/main.js"),
];

struct DashboardPage {
    html: String,
    csp: HeaderValue,
}

static DASHBOARD_PAGE: LazyLock<DashboardPage> = LazyLock::new(|| DashboardPage {
    html: HTML_TEMPLATE
        .replace(STYLES_PLACEHOLDER, &wrap_in_tags("style", &STYLES))
        .replace(SCRIPTS_PLACEHOLDER, &wrap_in_tags("script", &SCRIPTS)),
    csp: HeaderValue::try_from(content_security_policy()).expect("hashes and names are printable"),
});

#[allow(clippy::unused_async, reason = "a handler is async")]
pub(super) async fn get_dashboard() -> Response {
    let DashboardPage { html, csp: policy } = &*DASHBOARD_PAGE;
    let kind = HeaderValue::from_static("text/html; charset=utf-8");
    (
        [
            (CONTENT_TYPE, kind),
            (CONTENT_SECURITY_POLICY, policy.clone()),
        ],
        html.as_str(),
    )
        .into_response()
}

fn wrap_in_tags(tag: &str, texts: &[&str]) -> String {
    texts
        .iter()
        .map(|text| format!("<{tag}>{text}</{tag}>\n"))
        .collect()
}

/// What the page may do (CSP level 3).
fn content_security_policy() -> String {
    format!(
        "default-src 'none'; script-src{}; style-src{}; connect-src 'self'; img-src data:; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'",
        csp_hashes(&SCRIPTS),
        csp_hashes(&STYLES)
    )
}

fn csp_hashes(texts: &[&str]) -> String {
    texts.iter().fold(String::new(), |mut all, text| {
        write!(all, " 'sha256-{}'", STANDARD.encode(Sha256::digest(text)))
            .expect("a String takes everything");
        all
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a browser runs it is seen in one: `make test-browser`.
    #[test]
    fn page_is_small_and_self_contained() {
        let DashboardPage { html, csp: policy } = &*DASHBOARD_PAGE;
        assert!(
            html.len() < 150 << 10,
            "{} bytes: who looks by a slow tunnel waits",
            html.len()
        );
        assert!(!html.contains(STYLES_PLACEHOLDER) && !html.contains(SCRIPTS_PLACEHOLDER));
        assert!(!policy.to_str().unwrap().contains("unsafe"));
        let ours = SCRIPTS
            .iter()
            .skip(1)
            .chain([&HTML_TEMPLATE])
            .chain(&STYLES);
        for text in ours {
            assert!(!text.contains('\r'), "a browser would hash it without");
            for external_reference in ["src=", "@import", "url(", "https://", "eval("] {
                assert!(
                    !text.contains(external_reference),
                    "{external_reference} brings something in from elsewhere"
                );
            }
        }
        for script in SCRIPTS {
            assert!(!script.contains("</script"));
            for sink in [
                "innerHTML",
                "outerHTML",
                "insertAdjacentHTML",
                "document.write",
            ] {
                assert!(
                    !script.contains(&format!(".{sink}")),
                    "{sink} makes markup from text"
                );
            }
        }
    }
}
