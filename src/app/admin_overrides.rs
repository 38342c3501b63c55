//! Reads and changes overrides of keys for the admin endpoint.

use super::admin_view::AdminViewState;
use super::key_status::{find_limiting_policy, resolve_override_key};
use super::override_store::{OverrideChange, OverrideListing, OverrideStore};
use super::overrides::{override_from_json, override_to_json, resolve_override};
use crate::admin::{AdminError, OverrideRequest};
use crate::clock::Clock;
use crate::limiter::Key;
use crate::store::StoredOverride;
use serde_json::{Value, json};
use std::time::Duration;
use tokio::time::error::Elapsed;
use tokio::time::timeout;

/// Maximum duration of a listing, which scans all keys of Redis: less than the deadline of a
/// response, so that the reason reaches the caller.
const LISTING_TIMEOUT: Duration = Duration::from_secs(8);

impl AdminViewState {
    pub(super) async fn handle_override_request(
        &self,
        request: &OverrideRequest,
    ) -> Result<Value, AdminError> {
        let snapshot = self.shared.active_policies.load_snapshot();
        let table = &snapshot.table;
        let store = OverrideStore::open(&self.shared.store_backend).await?;
        match request {
            OverrideRequest::List { policy, limit } => {
                find_limiting_policy(table, policy)?;
                let mut listing = OverrideListing::new(Some(policy), *limit);
                let visited = store.visit(|stored| listing.push(stored));
                let visited = timeout(LISTING_TIMEOUT, visited).await;
                visited.map_err(listing_timeout_error)??;
                let (listed, has_more) = listing.finish();
                let listed: Vec<Value> = listed.iter().map(override_to_json).collect();
                Ok(json!({ "overrides": listed, "more": has_more }))
            }
            OverrideRequest::Find { policy, values } => {
                let key = resolve_override_key(table, policy, values)?;
                let found = store.find(&key).await?;
                let listed: Vec<Value> = found.iter().map(override_to_json).collect();
                Ok(json!({ "overrides": listed, "more": false }))
            }
            OverrideRequest::Set {
                policy,
                fields,
                keeps_other_limits,
            } => {
                let now_us = Clock::system().now_us();
                let mut input =
                    override_from_json(fields, now_us).map_err(AdminError::InvalidRequest)?;
                if !input.policy.is_empty() && input.policy != *policy {
                    return Err(AdminError::InvalidRequest(format!(
                        "policy: {:?}; expected {policy:?}, as in the path",
                        input.policy
                    )));
                }
                input.policy.clone_from(policy);
                let mut stored = resolve_override(table, &input, now_us)?;
                let old = if *keeps_other_limits {
                    let merged = store.merge(&stored, now_us).await?;
                    stored = merged.1;
                    merged.0
                } else {
                    let old = store.find(&stored.key).await.unwrap_or_default();
                    store.set(&stored).await?;
                    old
                };
                log_change(&stored.key, old.as_ref(), Some(&stored));
                Ok(override_to_json(&stored))
            }
            OverrideRequest::Remove { policy, values } => {
                let key = resolve_override_key(table, policy, values)?;
                let old = store.find(&key).await.unwrap_or_default();
                let is_removed = store.remove(&key).await?;
                log_change(&key, old.as_ref().filter(|_| is_removed), None);
                Ok(json!({ "policy": policy, "key": key.value_texts(), "removed": is_removed }))
            }
        }
    }
}

fn listing_timeout_error(_elapsed: Elapsed) -> AdminError {
    AdminError::Unavailable(format!(
        "the listing did not finish within {} s, because Redis has too many keys; \
         expected a single key, or the command `tidegate overrides list`, which has no timeout",
        LISTING_TIMEOUT.as_secs()
    ))
}

fn log_change(key: &Key, old: Option<&StoredOverride>, new: Option<&StoredOverride>) {
    if let Some(change) = OverrideChange::new(key, old, new) {
        change.log();
    }
}
