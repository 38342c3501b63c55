//! Reads and changes overrides of keys for the admin endpoint.

use super::admin_view::AdminViewState;
use super::key_status::{find_limiting_policy, resolve_override_key};
use super::override_store::{OverrideChange, OverrideStore, sort_listing};
use super::overrides::{describe_stored_override, override_from_json, resolve_override};
use crate::admin::{AdminError, OverrideListDocument, OverrideRemovalDocument, OverrideRequest};
use crate::clock::Clock;
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
                let mut found = Vec::new();
                let visited = store.visit(|stored| {
                    if stored.key.policy_name() == policy {
                        found.push(stored);
                    }
                    found.len() <= *limit
                });
                let visited = timeout(LISTING_TIMEOUT, visited).await;
                visited.map_err(listing_timeout_error)??;
                let (listed, has_more) = sort_listing(found, *limit);
                Ok(list_to_json(&listed, has_more))
            }
            OverrideRequest::Find { policy, values } => {
                let key = resolve_override_key(table, policy, values)?;
                let found = store.find(&key).await?;
                Ok(list_to_json(found.as_slice(), false))
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
                let entered = resolve_override(table, &input, now_us)?;
                let (stored, change) = if *keeps_other_limits {
                    store.merge(&entered, now_us).await?
                } else {
                    let change = store.set(&entered).await?;
                    (entered, change)
                };
                change.iter().for_each(OverrideChange::log);
                Ok(json!(describe_stored_override(&stored)))
            }
            OverrideRequest::Remove { policy, values } => {
                let key = resolve_override_key(table, policy, values)?;
                let (removed, change) = store.remove(&key).await?;
                change.iter().for_each(OverrideChange::log);
                Ok(json!(OverrideRemovalDocument {
                    policy: policy.clone(),
                    key: key.value_texts(),
                    removed,
                }))
            }
        }
    }
}

fn list_to_json(listed: &[StoredOverride], more: bool) -> Value {
    json!(OverrideListDocument {
        overrides: listed.iter().map(describe_stored_override).collect(),
        more,
    })
}

fn listing_timeout_error(_elapsed: Elapsed) -> AdminError {
    AdminError::Unavailable(format!(
        "the listing did not finish within {} s, because Redis has too many keys; \
         expected a single key, or the command `tidegate overrides list`, which has no timeout",
        LISTING_TIMEOUT.as_secs()
    ))
}
