//! Lints: warnings about valid settings that are surely not meant. `check` and the log at start
//! print them.
//!
//! Users stop reading warnings after a false one, so each lint reports only certain cases. The
//! running proxy warns of problems that only traffic shows, such as an unlisted ingress.

pub(super) mod context;
mod forged_headers;
mod path_regex;
mod policy_interactions;
mod settings;
mod single_policy;

use super::policies::context::PolicyWithReader;
use context::LintContext;
use policy_interactions::{ComparisonBudget, check_policy_interactions};

const INCOMPLETE_COMPARISON_WARNING: &str = "too many policies may match the same requests to compare each with each, so warnings may be missing: of policies that are never reached, have a name in the rate-limit fields twice, charge a descriptor twice, or are avoided by a header or key that the client chooses; expected a path, host or header value in match that fewer policies share";

/// Runs all lints over the valid policies in file order. Policies with `mode = "off"` are left out.
pub(super) fn run_lints(policies: &[PolicyWithReader<'_>], context: &LintContext<'_>) {
    settings::check_settings(policies, context);
    for spanned in policies {
        single_policy::check_policy(spanned, context);
    }
    let mut budget = ComparisonBudget::default();
    check_policy_interactions(policies, context.policy_context, &mut budget);
    forged_headers::check_forged_headers(policies, context, &mut budget);
    if budget.is_exhausted() {
        context
            .root
            .report_warning("policy", INCOMPLETE_COMPARISON_WARNING);
    }
}
