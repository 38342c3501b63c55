//! Notes for `check` about spellings of a request that still escape a policy.

use super::{KeyPart, Policy, PolicyAction, PolicyTable};

impl PolicyTable {
    /// Describes the spellings that only the operator can rule out, because they depend on the app.
    pub fn spelling_notes(&self) -> Vec<String> {
        let case = (self.path.normalize && self.path.case_sensitive)
            .then(|| self.policies().iter().find(|one| is_evaded_by_case(one)))
            .flatten()
            .map(|policy| {
                format!(
                    "policy \"{}\" misses paths in another letter case: if your app routes them alike (Express and Koa do), set path.case_sensitive = false",
                    policy.name
                )
            });
        let limits_by_address = self.policies().iter().any(|policy| {
            let parts = key_parts(policy);
            let is_client_chosen = parts.iter().any(KeyPart::is_client_chosen);
            policy.is_enforced() && parts.contains(&KeyPart::ClientIp) && !is_client_chosen
        });
        let authorization = (!limits_by_address)
            .then(|| {
                let authorization = KeyPart::Header(http::header::AUTHORIZATION);
                let mut policies = self.policies().iter();
                policies.find(|policy| {
                    let mut sources = key_parts(policy).iter().flat_map(KeyPart::alternatives);
                    sources.any(|part| *part == authorization)
                })
            })
            .flatten()
            .map(|policy| {
                format!(
                    "policy \"{}\" has a quota for each value of the header authorization, and clients choose it (\"Token a\", \"Token b\"; Basic and Bearer have one spelling): expected a jwt: key, or a policy with client_ip beside it",
                    policy.name
                )
            });
        case.into_iter().chain(authorization).collect()
    }
}

fn is_evaded_by_case(policy: &Policy) -> bool {
    let is_restriction = !matches!(policy.action, PolicyAction::Allow) && policy.is_enforced();
    let paths = &policy.matcher.paths;
    is_restriction && !paths.is_empty() && paths.iter().all(|pattern| pattern.has_letters())
}

fn key_parts(policy: &Policy) -> &[KeyPart] {
    match &policy.action {
        PolicyAction::Limit(quota) => quota.key.parts(),
        PolicyAction::Allow | PolicyAction::Deny => &[],
    }
}
