//! The dashboard at `/`: a page that polls the other routes.
//!
//! The page is one response, without external fonts or scripts and without a build step. The page
//! contains no secrets, so it is served without the token; the data that it requests may need the
//! token. Its content security policy allows only the scripts and styles with the listed hashes,
//! loads nothing from other origins, and forbids markup from strings (`require-trusted-types-for`),
//! so that client-chosen key values stay text.

use axum::response::IntoResponse;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use http::header::{CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use sha2::{Digest, Sha256};
use std::fmt::Write as _;
use std::sync::LazyLock;

const HTML_TEMPLATE: &str = include_str!("dashboard/index.html");
const STYLES_PLACEHOLDER: &str = "<!--STYLES-->";
const SCRIPTS_PLACEHOLDER: &str = "<!--SCRIPTS-->";

/// Style sheets of the page. Those of uPlot 1.6.32 are unmodified; `uplot.LICENSE` is its licence.
const STYLES: [&str; 2] = [
    include_str!("dashboard/uplot.min.css"),
    include_str!("dashboard/style.css"),
];

/// Scripts of the page, in dependency order.
const SCRIPTS: [&str; 9] = [
    include_str!("dashboard/uplot.min.js"),
    include_str!("dashboard/page.js"),
    include_str!("dashboard/charts.js"),
    include_str!("dashboard/sections.js"),
    include_str!("dashboard/overrides.js"),
    include_str!("dashboard/keys.js"),
    include_str!("dashboard/fleet.js"),
    include_str!("dashboard/doctor.js"),
    include_str!("dashboard/main.js"),
];

static DASHBOARD_HTML: LazyLock<String> = LazyLock::new(|| {
    HTML_TEMPLATE
        .replace(STYLES_PLACEHOLDER, &wrap_in_tags("style", &STYLES))
        .replace(SCRIPTS_PLACEHOLDER, &wrap_in_tags("script", &SCRIPTS))
});

static DASHBOARD_POLICY: LazyLock<String> = LazyLock::new(content_security_policy);

pub(super) fn dashboard_page() -> impl IntoResponse {
    let headers = [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CONTENT_SECURITY_POLICY, &**DASHBOARD_POLICY),
    ];
    (headers, DASHBOARD_HTML.as_str())
}

fn wrap_in_tags(tag: &str, texts: &[&str]) -> String {
    texts
        .iter()
        .map(|text| format!("<{tag}>{text}</{tag}>\n"))
        .collect()
}

/// The content security policy of the dashboard (CSP level 3).
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

    /// Scripts must not depend on the wording of hints, which may change.
    #[test]
    fn scripts_check_problem_fields_instead_of_hint_texts() {
        assert!(SCRIPTS.iter().all(|script| !script.contains("hints")));
        for cause in ["last_reload.errors.length", "overview.untrusted_forwarding"] {
            let shown = format!("if ({cause}) {{");
            assert!(
                SCRIPTS.iter().any(|script| script.contains(&shown)),
                "{cause}"
            );
        }
    }

    /// `make test-browser` checks that a browser runs the page.
    #[test]
    fn page_is_small_and_self_contained() {
        let (html, policy) = (&*DASHBOARD_HTML, &*DASHBOARD_POLICY);
        assert!(
            html.len() < 150 << 10,
            "{} bytes are too many for a slow tunnel",
            html.len()
        );
        assert!(!html.contains(STYLES_PLACEHOLDER) && !html.contains(SCRIPTS_PLACEHOLDER));
        assert!(!policy.contains("unsafe"));
        let ours = SCRIPTS
            .iter()
            .skip(1)
            .chain([&HTML_TEMPLATE])
            .chain(&STYLES);
        for text in ours {
            assert!(
                !text.contains('\r'),
                "browsers hash the text without carriage returns"
            );
            for external_reference in ["src=", "@import", "url(", "https://", "eval("] {
                assert!(
                    !text.contains(external_reference),
                    "{external_reference} loads from another origin"
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
                    "{sink} creates markup from text"
                );
            }
        }
    }
}
