//! `tidegate explain`: what would happen to this request, and why?

use super::standing;
use crate::app::Stores;
use crate::config::{self, Config, Sources, StoreSettings};
use crate::enforcer::{self, Explanation, Step};
use crate::proxy::Inbound;
use crate::tls::Subject;
use http::{HeaderName, HeaderValue, Request, Uri, request};
use std::net::IpAddr;

/// A request as it is told on the command line.
#[derive(clap::Args, Debug)]
pub(super) struct Asked {
    /// E.g. GET.
    method: http::Method,
    /// E.g. http://shop.example/api/orders?page=2, or only /api/orders.
    url: String,
    /// A header of the request; may be given several times.
    #[arg(short = 'H', long = "header", value_name = "NAME: VALUE")]
    headers: Vec<String>,
    /// Who holds the other end of the socket.
    #[arg(long, default_value = "127.0.0.1")]
    ip: IpAddr,
    /// The alternative name in the client's certificate.
    #[arg(long, value_name = "NAME")]
    client_cert_san: Option<String>,
    /// The common name in the client's certificate.
    #[arg(long, value_name = "NAME")]
    client_cert_cn: Option<String>,
}

/// Tells which policies match, which keys and limits the request would use, and where they stand.
///
/// # Errors
/// A text for people, if the configuration or the request is wrong.
pub(super) fn explain(sources: &Sources, asked: &Asked) -> Result<String, String> {
    let config = config::load(sources).map_err(|report| report.to_string())?;
    let mut parts = head(asked)?;
    let text = |text: &Option<String>| text.as_deref().map(Into::into);
    let certificate = Subject { san: text(&asked.client_cert_san), cn: text(&asked.client_cert_cn) };
    let title = format!("{} {} from {}\n\n", asked.method, asked.url.escape_debug(), asked.ip);
    let inbound = Inbound::read(&mut parts, asked.ip, &config.table)
        .map_err(|fault| format!("{title}The request is refused before any policy sees it: {fault}.\n"))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| format!("error: {error}\n"))?;
    runtime.block_on(async {
        let store = Stores::new(&config.store).for_worker().await;
        let explanation =
            enforcer::explain(&store, &config.table, &inbound.facts(&parts, Some(&certificate))).await;
        let token = inbound
            .token_fault()
            .map_or_else(String::new, |fault| format!("The request's token says nothing: {fault}.\n"));
        Ok(title + &tell(&config, &explanation) + &token)
    })
}

fn head(asked: &Asked) -> Result<request::Parts, String> {
    let uri: Uri =
        asked.url.parse().map_err(|error| format!("error: {:?} is no URL: {error}\n", asked.url))?;
    let mut request = Request::builder().method(asked.method.clone());
    let mut has_host = false;
    for header in &asked.headers {
        let (name, value) = header
            .split_once(':')
            .ok_or_else(|| format!("error: {header:?} is no header: write \"name: value\"\n"))?;
        let name: HeaderName =
            name.trim().parse().map_err(|error| format!("error: header name {name:?}: {error}\n"))?;
        let value = HeaderValue::from_str(value.trim())
            .map_err(|error| format!("error: header value {value:?}: {error}\n"))?;
        has_host |= name == http::header::HOST;
        request = request.header(name, value);
    }
    if !has_host {
        request = request.header("host", uri.authority().map_or("localhost", |authority| authority.as_str()));
    }
    let request = request.uri(uri).body(()).map_err(|error| format!("error: {error}\n"))?;
    Ok(request.into_parts().0)
}

fn tell(config: &Config, explanation: &Explanation<'_>) -> String {
    let live = matches!(config.store, StoreSettings::Redis(_));
    let now_us = explanation.store.as_ref().ok().copied().filter(|_| live);
    let mut text = String::new();
    for (policy, step) in &explanation.steps {
        let shadow = if policy.shadow { " (shadow)" } else { "" };
        let told = match step {
            Step::Unmet(unmet) => unmet.to_string(),
            Step::NotReached => "not reached".to_owned(),
            Step::Exempts => "matches: exempt".to_owned(),
            Step::Denies => "matches: denied".to_owned(),
            Step::Skipped => "matches, but a part of its key is missing: skipped".to_owned(),
            Step::CannotKey(fault) => format!("matches, but {fault}"),
            Step::Limits(limits) => format!("matches: key {}, cost {}", limits.key, limits.cost),
        };
        text.push_str(&format!("  {:<16} {told}{shadow}\n", policy.name));
        if let Step::Limits(limits) = step {
            if let Some((until_us, now_us)) = limits.blocked_until_us.zip(now_us) {
                let left = standing::wait(until_us.saturating_sub(now_us));
                text.push_str(&format!("  {:<16}   blocked for {left}\n", ""));
            }
            for (at, named) in limits.limits.iter().enumerate() {
                let standing = limits.standings.get(at).zip(now_us);
                text.push_str(&format!("  {:<16}   {}\n", "", standing::line(named, standing)));
            }
        }
    }
    text.push('\n');
    text.push_str(&verdict(explanation, now_us.is_some()));
    if !live {
        text.push_str("Where limits stand is known only to the running proxy: store.kind is \"memory\".\n");
    } else if let Err(unavailable) = &explanation.store {
        text.push_str(&format!("Where limits stand is not known: {unavailable}.\n"));
    }
    text
}

/// What the client would get, as far as it can be told.
fn verdict(explanation: &Explanation<'_>, known: bool) -> String {
    let mut full: Vec<&str> = Vec::new();
    let mut limited = false;
    for (policy, step) in explanation.steps.iter().filter(|(policy, _)| !policy.shadow) {
        match step {
            Step::Denies => return format!("Denied by {}: 403.\n", policy.name),
            Step::CannotKey(_) => return format!("Refused by {}: 400.\n", policy.name),
            Step::Limits(limits) => {
                limited = true;
                let is_full = limits.standings.iter().any(|standing| standing.remaining < limits.cost);
                if is_full || limits.blocked_until_us.is_some() {
                    full.push(&policy.name);
                }
            }
            _ => {}
        }
    }
    match (limited, known, full.is_empty()) {
        (false, ..) => "Admitted: no limit applies.\n".to_owned(),
        (true, false, _) => "Admitted if these limits have room.\n".to_owned(),
        (true, true, true) => "Admitted.\n".to_owned(),
        (true, true, false) => format!("Rejected by {}: 429.\n", full.join(", ")),
    }
}
