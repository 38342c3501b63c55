//! A policy with its source, and the settings that all policies share.

use crate::config::table_reader::TableReader;
use crate::limiter::Algorithm;
use crate::policy::{
    KeyHasher, KeyPart, MissingKeyAction, OnStoreFailure, Policy, Quota, client, jwt, path,
};
use crate::proxy::{is_client_cert_field, is_stripped_before_policies};
use http::HeaderName;
use std::sync::Arc;

/// Settings that apply to all policies.
pub(crate) struct PolicyContext {
    /// Whether counters are in a Redis Cluster.
    pub(crate) uses_redis_cluster: bool,
    pub(crate) client: client::Settings,
    pub(crate) path: path::Settings,
    pub(crate) key_hasher: KeyHasher,
    /// Headers that the gateway in front always sets or removes.
    pub(crate) trusted_headers: Vec<HeaderName>,
    pub(crate) on_store_failure: OnStoreFailure,
    pub(crate) algorithm: Algorithm,
    pub(crate) missing_key: MissingKeyAction,
    /// Whether the listener requests client certificates.
    pub(crate) requests_client_certificates: bool,
    pub(crate) uses_memory_store: bool,
    /// How token claims are trusted. `None` if they are not.
    pub(crate) claim_trust: Option<ClaimTrust>,
    pub(crate) tokens: Option<jwt::Settings>,
    /// The issuers of tokens if there are several; empty otherwise.
    pub(crate) issuers: Arc<[Box<str>]>,
    /// Request header that is removed before policies see it ([`PolicyTable::mark_header`]).
    ///
    /// [`PolicyTable::mark_header`]: crate::policy::PolicyTable::mark_header
    pub(crate) mark_header: HeaderName,
    /// Whether `[check]` is configured.
    pub(crate) has_ext_authz: bool,
}

/// Whether token signatures are verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClaimTrust {
    Signed,
    Unverified,
}

/// A policy with the reader of its table, for diagnostics.
pub(crate) struct PolicyWithReader<'a> {
    pub(crate) policy: Policy,
    pub(crate) reader: TableReader<'a>,
}

impl PolicyContext {
    /// Whether tidegate removes the header before policies see it.
    pub(crate) fn is_removed_header(&self, name: &HeaderName) -> bool {
        *name == self.mark_header
            || is_stripped_before_policies(name)
            || (is_client_cert_field(name) && !self.trusted_headers.contains(name))
    }

    pub(crate) fn is_client_chosen(&self, part: &KeyPart) -> bool {
        if matches!(part, KeyPart::Alternatives(_)) {
            return part.alternatives().any(|one| self.is_client_chosen(one));
        }
        let is_claim = matches!(part, KeyPart::Claim(_));
        if matches!(part, KeyPart::Header(name) if self.trusted_headers.contains(name)) {
            return false;
        }
        part.is_client_chosen() || (is_claim && self.claim_trust == Some(ClaimTrust::Unverified))
    }
}

impl PolicyWithReader<'_> {
    pub(crate) fn quota(&self) -> Option<&Quota> {
        self.policy.quota()
    }

    pub(crate) fn key_parts(&self) -> impl Iterator<Item = &KeyPart> {
        self.quota().into_iter().flat_map(|quota| quota.key.parts())
    }

    /// The policy's name and position: `"login" (config.toml:12:8)`.
    pub(crate) fn quote_name_and_position(&self) -> String {
        let span = self
            .reader
            .get("name")
            .map_or_else(String::new, |item| format!(" ({})", item.source_span()));
        format!("\"{}\"{span}", self.policy.name)
    }
}
