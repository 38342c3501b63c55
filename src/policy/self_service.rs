//! The quotas of one client, for a query by that client.
//!
//! A client is identified only by what it cannot choose: its address, its certificate, the claims
//! of its verified token, and the headers of `client.trusted_headers` if a trusted proxy sent the
//! request. A policy whose key has any other part is left out.

use super::key_part::KeyPart;
use super::{
    Facts, Matcher, NamedLimit, OverrideRule, Policy, PolicyAction, PolicyMode, PolicyTable, Quota,
    RequestAmounts, SelectedLimits, ValueDigests, read_request_amounts,
};
use crate::limiter::{Key, KeyBuilder};

/// The policy name of the counters that limit queries of quotas. No policy can have this name.
const SELF_SERVICE_POLICY_NAME: &str = "-self-service";

/// Maximum number of policies in an answer.
const MAX_REPORTED_POLICIES: usize = 32;

/// The quotas of one client.
#[derive(Debug)]
pub struct ClientQuotas<'t> {
    /// Identifies the client.
    pub client_key: Key,
    pub quotas: Vec<ClientQuota<'t>>,
}

/// The quota that one policy gives a client.
#[derive(Clone, Debug)]
pub struct ClientQuota<'t> {
    /// Index of the policy in the table.
    pub policy_index: usize,
    pub policy: &'t Policy,
    pub quota: &'t Quota,
    /// The mode of the policy, or of an override for the key.
    pub mode: PolicyMode,
    pub key: Key,
    pub limits: &'t [NamedLimit],
    pub amounts: Option<Box<RequestAmounts>>,
}

impl<'t> ClientQuota<'t> {
    /// The quota of a policy, given with its index, by the key and the limits of a request.
    pub fn new(
        (policy_index, policy): (usize, &'t Policy),
        quota: &'t Quota,
        (key, selected): (Key, SelectedLimits<'t>),
        facts: &Facts<'_>,
    ) -> Self {
        Self {
            policy_index,
            policy,
            quota,
            mode: selected.mode(policy.mode),
            key,
            limits: selected.limits,
            amounts: read_request_amounts(selected.limits, facts),
        }
    }
}

impl PolicyTable {
    /// The quotas of the client that sent a request, in the order of the policies: of each policy
    /// that may apply to its requests. Returns `None` if no such policy identifies the client.
    pub fn client_quotas(
        &self,
        facts: &Facts<'_>,
        is_peer_trusted: bool,
    ) -> Option<ClientQuotas<'_>> {
        let mut identities: Vec<(&KeyPart, Vec<u8>)> = Vec::new();
        let (mut quotas, mut digests) = (Vec::new(), ValueDigests::default());
        for (policy_index, policy) in self.policies().iter().enumerate() {
            if !policy.is_reported || !policy.matcher.may_match_client(facts) {
                continue;
            }
            let PolicyAction::Limit(quota) = &policy.action else {
                // It ends the evaluation of all requests, unless it depends on the request.
                if policy.mode != PolicyMode::Shadow && policy.matcher.depends_only_on_client() {
                    break;
                }
                continue;
            };
            let are_verified = quota
                .key
                .parts()
                .all(|part| self.is_verified_part(part, is_peer_trusted));
            if !are_verified {
                continue;
            }
            let context = self.key_context(policy);
            let Ok(values) = quota.key.extract_values(facts, &context, quota.missing_key) else {
                continue;
            };
            // A verified part has one value, so its index is its position.
            let sources = values.iter().enumerate().map(|(position, value)| {
                let (source, _) = quota.key.value_source(position, value.as_deref()?)?;
                Some((&source.part, position, value.as_deref()?))
            });
            // Without one of its values, or by constants alone, the client has no quota of its own.
            let Some(sources) = sources.collect::<Option<Vec<_>>>() else {
                continue;
            };
            if sources.iter().all(|(part, ..)| is_constant(part)) {
                continue;
            }
            let (key, selected) = quota.key_and_limits(&policy.name, &values, &mut digests);
            let mode = selected.mode(policy.mode);
            let is_limited = matches!(selected.rule, OverrideRule::Limit(_));
            if !is_limited || mode == PolicyMode::Shadow {
                continue;
            }
            for (part, position, value) in sources {
                if !identities.iter().any(|(known, _)| *known == part) {
                    let stored = quota.key.stored_value(position, value, &mut digests);
                    identities.push((part, stored));
                }
            }
            let policy = (policy_index, policy);
            quotas.push(ClientQuota::new(policy, quota, (key, selected), facts));
            if quotas.len() == MAX_REPORTED_POLICIES {
                break;
            }
        }
        (!quotas.is_empty()).then(|| ClientQuotas {
            client_key: build_client_key(&identities),
            quotas,
        })
    }

    /// Whether a client cannot choose the value of a part.
    fn is_verified_part(&self, part: &KeyPart, is_peer_trusted: bool) -> bool {
        match part {
            KeyPart::ClientIp
            | KeyPart::ClientCertSan
            | KeyPart::ClientCertCn
            | KeyPart::Const(_) => true,
            KeyPart::Header(name) => is_peer_trusted && self.trusted_headers.contains(name),
            // Without a signature check, only the proxy in front has verified the token.
            KeyPart::Claim(_) => {
                is_peer_trusted
                    || self
                        .token_reader
                        .as_ref()
                        .is_some_and(|reader| reader.settings.issuers.is_some())
            }
            KeyPart::Query(_)
            | KeyPart::Cookie(_)
            | KeyPart::Body(_)
            | KeyPart::PathCaptures(_)
            | KeyPart::Method
            | KeyPart::Host
            | KeyPart::WholePath
            | KeyPart::DescriptorDomain
            | KeyPart::DescriptorEntry(_)
            | KeyPart::WholeDescriptor => false,
            KeyPart::Alternatives(_) => part
                .alternatives()
                .all(|one| self.is_verified_part(one, is_peer_trusted)),
        }
    }
}

fn is_constant(part: &KeyPart) -> bool {
    matches!(part, KeyPart::Const(_))
}

/// The key of a client: certificate, claims and trusted headers if there are any, else its address.
/// A client with several addresses therefore has one quota of queries.
fn build_client_key(identities: &[(&KeyPart, Vec<u8>)]) -> Key {
    let is_name = |part: &&KeyPart| !is_constant(part) && **part != KeyPart::ClientIp;
    let has_name = identities.iter().any(|(part, _)| is_name(part));
    let mut builder = KeyBuilder::new(SELF_SERVICE_POLICY_NAME);
    for (part, value) in identities {
        if is_name(part) == has_name {
            builder.push_key_value(Some(part.to_string().as_bytes()));
            builder.push_key_value(Some(value.as_slice()));
        }
    }
    builder.finish()
}

impl Matcher {
    /// Whether the conditions on the client hold. Conditions on what a client requests are ignored,
    /// also on headers that the present request lacks.
    fn may_match_client(&self, facts: &Facts<'_>) -> bool {
        let is_excluded = || {
            let not = self.not.as_deref();
            not.is_some_and(|not| not.depends_only_on_client() && not.matches_client(facts))
        };
        let may_match = |one: &Self| one.may_match_client(facts);
        !self.is_for_descriptors()
            && self.matches_client(facts)
            && (self.any.is_empty() || self.any.iter().any(may_match))
            && !is_excluded()
    }

    fn matches_client(&self, facts: &Facts<'_>) -> bool {
        self.conditions.iter().all(|one| match &one.part {
            KeyPart::Header(name) if !facts.headers.contains_key(name) => true,
            part if is_of_client(part) || matches!(part, KeyPart::Header(_)) => {
                one.is_met(facts, facts.path_or_domain())
            }
            _ => true,
        })
    }

    /// Whether all conditions are on the client and none on what it requests.
    fn depends_only_on_client(&self) -> bool {
        !self.is_for_descriptors() && !self.has_condition_on(|part| !is_of_client(part))
    }
}

fn is_of_client(part: &KeyPart) -> bool {
    matches!(part, KeyPart::Claim(_) | KeyPart::ClientIp | KeyPart::Host)
}
