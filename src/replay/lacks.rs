//! What a log does not tell, and which policies can't be judged because of it.

use super::lines::Wanted;
use crate::limiter::Algorithm;
use crate::policy::{Action, Cost, KeyPart, Matcher, MissingKey, Policy, PolicyTable, Quota};
use http::HeaderName;
use http::header::COOKIE;
use std::collections::BTreeSet;

/// How many requests told what.
#[derive(Clone, Debug, Default)]
pub(super) struct Told {
    pub(super) requests: u64,
    pub(super) peer: u64,
    pub(super) host: u64,
    pub(super) took: u64,
    /// Answered 429 then.
    pub(super) refused_then: u64,
    /// By place in [`Wanted`].
    pub(super) headers: Vec<u64>,
    /// Requests of a log that has no queries.
    pub(super) without_query: u64,
    /// Whose peer is a trusted proxy, but who is behind it isn't told.
    pub(super) hidden: u64,
}

/// Sentences about what could not be judged, for people.
pub(super) fn lacks(table: &PolicyTable, told: &Told, wanted: &Wanted) -> Vec<String> {
    if told.requests == 0 {
        return Vec::new();
    }
    let tells = |name: &HeaderName| {
        let place = wanted.names().iter().position(|wanted| wanted == name);
        place
            .and_then(|place| told.headers.get(place))
            .is_some_and(|count| *count > 0)
    };
    let log = Log {
        told,
        tells: &tells,
        token: table.tokens().map(|reader| reader.header()),
    };
    let mut sentences: Vec<String> = table
        .policies()
        .iter()
        .filter_map(|policy| log.lacks(policy))
        .collect();
    if table.asks_for_client() {
        if told.peer < told.requests {
            let missing = told.requests - told.peer;
            sentences.push(format!(
                "{missing} of {} requests have no client address in the log: they were judged as one client, 0.0.0.0",
                told.requests
            ));
        }
        if told.hidden > 0 {
            sentences.push(format!(
                "{} of {} requests came from a trusted proxy, and the log doesn't tell {} for them: everybody behind \
                 that proxy was judged as one client. Where the log has it, say so: --header-from {}=FIELD",
                told.hidden, told.requests, table.client.ip_header, table.client.ip_header
            ));
        }
    }
    sentences
}

struct Log<'a> {
    told: &'a Told,
    tells: &'a dyn Fn(&HeaderName) -> bool,
    /// Where tokens would stand.
    token: Option<&'a HeaderName>,
}

impl Log<'_> {
    fn lacks(&self, policy: &Policy) -> Option<String> {
        let mut conditions = BTreeSet::new();
        self.conditions(&policy.matcher, &mut conditions);
        let mut texts = Vec::new();
        if !conditions.is_empty() {
            let names: Vec<String> = conditions.into_iter().collect();
            texts.push(format!(
                "its conditions on {} were judged as if no request had any",
                names.join(", ")
            ));
        }
        if let Action::Limit(quota) = &policy.action {
            self.quota(quota, &mut texts);
        }
        (!texts.is_empty()).then(|| {
            format!(
                "policy {}: the log doesn't tell all: {}",
                policy.name,
                texts.join("; ")
            )
        })
    }

    fn quota(&self, quota: &Quota, texts: &mut Vec<String>) {
        let missing = quota
            .key
            .parts()
            .iter()
            .filter(|part| !self.tells_part(part));
        let missing: Vec<String> = missing.map(ToString::to_string).collect();
        if !missing.is_empty() {
            let so = match quota.missing_key {
                MissingKey::Shared => "all requests share that part (missing_key = \"shared\")",
                MissingKey::Skip => "it applied to nobody (missing_key = \"skip\")",
                MissingKey::Reject => "it refused everybody (missing_key = \"reject\")",
            };
            texts.push(format!(
                "of its key {} is missing, so {so}",
                missing.join(", ")
            ));
        }
        match &quota.cost {
            Cost::Header(cost) if !(self.tells)(&cost.name) => {
                texts.push(format!(
                    "every request cost {}, for want of {}",
                    cost.default, cost.name
                ));
            }
            Cost::Estimate(cost) => {
                texts.push(format!(
                    "every request cost its estimate, {}: responses are not in a log",
                    cost.estimate
                ));
            }
            Cost::Fixed(_) | Cost::Header(_) => {}
        }
        let mut limits = quota.limits.iter().chain(
            quota
                .overrides
                .list()
                .iter()
                .flat_map(|entry| &entry.limits),
        );
        let is_concurrency =
            limits.any(|named| matches!(named.limit.algorithm, Algorithm::Concurrency { .. }));
        if is_concurrency && self.told.took < self.told.requests {
            let without = self.told.requests - self.told.took;
            texts.push(format!(
                "{without} of {} requests have no duration, so its concurrency was judged without them",
                self.told.requests
            ));
        }
    }

    fn tells_part(&self, part: &KeyPart) -> bool {
        match part {
            KeyPart::Header(name) => (self.tells)(name),
            KeyPart::Cookie(_) => (self.tells)(&COOKIE),
            KeyPart::Query(_) => self.tells_query(),
            KeyPart::Host => self.told.host > 0,
            KeyPart::Claim(_) => self.tells_token(),
            KeyPart::ClientCertSan | KeyPart::ClientCertCn => false,
            KeyPart::ClientIp
            | KeyPart::Path(_)
            | KeyPart::Method
            | KeyPart::WholePath
            | KeyPart::Const(_)
            // A log has requests: such a policy matches none.
            | KeyPart::Entry(_)
            | KeyPart::Descriptor => true,
        }
    }

    fn tells_query(&self) -> bool {
        self.told.without_query < self.told.requests
    }

    fn tells_token(&self) -> bool {
        self.token.is_some_and(self.tells)
    }

    fn conditions(&self, matcher: &Matcher, found: &mut BTreeSet<String>) {
        let headers = matcher
            .headers
            .iter()
            .filter(|header| !(self.tells)(&header.name));
        found.extend(headers.map(|header| format!("header {}", header.name)));
        if !(self.tells)(&COOKIE) {
            found.extend(
                matcher
                    .cookies
                    .iter()
                    .map(|cookie| format!("cookie {}", cookie.name)),
            );
        }
        if !self.tells_query() {
            found.extend(
                matcher
                    .query
                    .iter()
                    .map(|query| format!("query parameter {}", query.name)),
            );
        }
        if !self.tells_token() {
            found.extend(
                matcher
                    .claims
                    .iter()
                    .map(|claim| format!("claim {}", claim.name.as_ref())),
            );
        }
        if !matcher.hosts.is_empty() && self.told.host == 0 {
            found.insert("the host".to_owned());
        }
        if let Some(not) = &matcher.not {
            self.conditions(not, found);
        }
    }
}
