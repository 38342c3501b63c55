//! A policy with its source, and the settings that all policies share.

use crate::config::table_reader::TableReader;
use crate::limiter::Algorithm;
use crate::policy::{
    KeyHasher, KeyPart, MissingKeyAction, OnStoreFailure, Policy, Quota, client, path,
};
use crate::proxy::{is_client_cert_field, is_stripped_before_policies};
use http::HeaderName;
use std::sync::Arc;

/// Settings that apply to all policies.
pub(in crate::config) struct PolicyContext {
    /// Whether counters are in a Redis Cluster.
    pub(in crate::config) uses_redis_cluster: bool,
    pub(in crate::config) client: client::Settings,
    pub(in crate::config) path: path::Settings,
    pub(in crate::config) key_hasher: KeyHasher,
    /// Headers that the gateway in front always sets or removes.
    pub(in crate::config) trusted_headers: Vec<HeaderName>,
    pub(in crate::config) on_store_failure: OnStoreFailure,
    pub(in crate::config) algorithm: Algorithm,
    pub(in crate::config) missing_key: MissingKeyAction,
    /// Whether the listener requests client certificates.
    pub(in crate::config) requests_client_certificates: bool,
    pub(in crate::config) uses_memory_store: bool,
    /// How token claims are trusted. `None` if they are not.
    pub(in crate::config) claim_trust: Option<ClaimTrust>,
    /// The issuers of tokens if there are several; empty otherwise.
    pub(in crate::config) issuers: Arc<[Box<str>]>,
    /// Request header that is removed before policies see it ([`PolicyTable::mark_header`]).
    ///
    /// [`PolicyTable::mark_header`]: crate::policy::PolicyTable::mark_header
    pub(in crate::config) mark_header: HeaderName,
    /// Whether `[check]` is configured.
    pub(in crate::config) has_ext_authz: bool,
}

/// Whether token signatures are verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::config) enum ClaimTrust {
    Signed,
    Unverified,
}

/// A policy with the reader of its table, for diagnostics.
pub(in crate::config) struct PolicyWithReader<'a> {
    pub(in crate::config) policy: Policy,
    pub(in crate::config) reader: TableReader<'a>,
}

impl PolicyContext {
    /// Whether tidegate removes the header before policies see it.
    pub(in crate::config) fn is_removed_header(&self, name: &HeaderName) -> bool {
        *name == self.mark_header
            || is_stripped_before_policies(name)
            || (is_client_cert_field(name) && !self.trusted_headers.contains(name))
    }

    pub(in crate::config) fn is_client_chosen(&self, part: &KeyPart) -> bool {
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
    pub(in crate::config) fn quota(&self) -> Option<&Quota> {
        self.policy.quota()
    }

    pub(in crate::config) fn key_parts(&self) -> impl Iterator<Item = &KeyPart> {
        self.quota().into_iter().flat_map(|quota| quota.key.parts())
    }

    /// The policy's name and position: `"login" (config.toml:12:8)`.
    pub(in crate::config) fn quote_name_and_position(&self) -> String {
        let span = self
            .reader
            .get("name")
            .map_or_else(String::new, |item| format!(" ({})", item.source_span()));
        format!("\"{}\"{span}", self.policy.name)
    }
}
