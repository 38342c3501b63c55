//! Notes for `check` about spellings of a request that still escape a policy.

use super::{KeyPart, Policy, PolicyAction, PolicyTable};

impl PolicyTable {
    /// Describes the spellings that only the operator can rule out, because they depend on the app.
    pub fn spelling_notes(&self) -> Vec<String> {
        let case_matters = self.path.normalize && self.path.case_sensitive;
        let mut policies = self.policies().iter().filter(|_| case_matters);
        let case = policies.find(|one| is_evaded_by_case(one)).map(|policy| {
            format!(
                "policy \"{}\" misses paths in another letter case: if your app routes them alike (Express and Koa do), set path.case_sensitive = false",
                policy.name
            )
        });
        let limits_by_address = self.policies().iter().any(|policy| {
            let key = policy.quota().map(|quota| &quota.key);
            policy.is_enforced()
                && key.is_some_and(|key| key.parts().any(|part| *part == KeyPart::ClientIp))
                && !key.is_some_and(|key| key.parts().any(KeyPart::is_client_chosen))
        });
        let keys_by_authorization = |policy: &&Policy| {
            let mut sources = policy.quota().into_iter().flat_map(|one| one.key.sources());
            sources.any(|part| *part == KeyPart::Header(http::header::AUTHORIZATION))
        };
        let mut policies = self.policies().iter().filter(|_| !limits_by_address);
        let authorization = policies.find(keys_by_authorization).map(|policy| {
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
    let paths = policy.matcher.path_patterns();
    is_restriction && !paths.is_empty() && paths.iter().all(|pattern| pattern.has_letters())
}
