//! The overrides of the configured store: in Redis, or in the memory of the proxy on this machine,
//! by its admin port.

use crate::admin::AdminError;
use crate::app::key_status::find_limiting_policy;
use crate::app::override_store::{OverrideChange, OverrideStore};
use crate::app::overrides::{listed_override_from_json, override_to_json};
use crate::cli::admin_client::{AdminClient, build_target};
use crate::cli::output::print_audit_line;
use crate::clock::Clock;
use crate::limiter::Key;
use crate::policy::PolicyTable;
use crate::store::StoredOverride;
use futures_util::future::join_all;
use indicatif::ProgressBar;
use serde_json::{Value, json};
use std::sync::Arc;

/// Most overrides that the admin port lists.
const MAX_LISTED_BY_ADMIN_PORT: usize = 10_000;

pub(crate) enum StoreClient {
    Redis(OverrideStore),
    AdminPort(AdminClient, Arc<PolicyTable>),
}

impl StoreClient {
    pub(crate) async fn find(&self, key: &Key) -> Result<Option<StoredOverride>, String> {
        match self {
            Self::Redis(store) => store.find(key).await.map_err(to_message),
            Self::AdminPort(client, _) => {
                let response = client.request_json("GET", &key_target(key))?;
                Ok(parse_list(&response)?.0.pop())
            }
        }
    }

    /// Sets an override. Other limits of the key's override stay. If that would change when they
    /// end, nothing is set and the result is an error.
    pub(super) async fn set_and_merge(
        &self,
        entered: &StoredOverride,
        now_us: u64,
    ) -> Result<StoredOverride, String> {
        match self {
            Self::Redis(store) => {
                let (old, new) = store.merge(entered, now_us).await.map_err(to_message)?;
                print_change(&new.key, old.as_ref(), Some(&new));
                Ok(new)
            }
            Self::AdminPort(client, _) => {
                let response = send_override(client, "PATCH", entered)?;
                let fields = response
                    .as_object()
                    .ok_or("the admin port sent no override")?;
                listed_override_from_json(fields, now_us)
            }
        }
    }

    /// Sets many overrides. Returns the result of each. Audit lines do not disturb `progress`.
    pub(super) async fn set_many(
        &self,
        overrides: &[StoredOverride],
        progress: &ProgressBar,
    ) -> Vec<Result<(), String>> {
        match self {
            Self::Redis(store) => {
                let set = async |stored: &StoredOverride| {
                    let old = store.find(&stored.key).await.unwrap_or_default();
                    store.set(stored).await.map_err(to_message)?;
                    progress.suspend(|| print_change(&stored.key, old.as_ref(), Some(stored)));
                    Ok(())
                };
                join_all(overrides.iter().map(set)).await
            }
            Self::AdminPort(client, _) => overrides
                .iter()
                .map(|stored| send_override(client, "PUT", stored).map(drop))
                .collect(),
        }
    }

    pub(super) async fn remove(&self, key: &Key) -> Result<bool, String> {
        match self {
            Self::Redis(store) => {
                let old = store.find(key).await.unwrap_or_default();
                let is_removed = store.remove(key).await.map_err(to_message)?;
                print_change(key, old.as_ref().filter(|_| is_removed), None);
                Ok(is_removed)
            }
            Self::AdminPort(client, _) => {
                let response = &client.request_json("DELETE", &key_target(key))?;
                Ok(response["removed"] == true)
            }
        }
    }

    /// Passes all overrides to `visit`, in no order, until it returns false.
    pub(super) async fn visit(
        &self,
        mut visit: impl FnMut(StoredOverride) -> bool,
    ) -> Result<(), String> {
        match self {
            Self::Redis(store) => store.visit(visit).await.map_err(to_message),
            Self::AdminPort(client, table) => {
                for policy in table.policies() {
                    let Ok((_, quota)) = find_limiting_policy(table, &policy.name) else {
                        continue;
                    };
                    if !quota.is_dynamic {
                        continue;
                    }
                    let max = MAX_LISTED_BY_ADMIN_PORT.to_string();
                    let target = build_target(&overrides_path(&policy.name), [("n", &*max)]);
                    let (listed, has_more) = parse_list(&client.request_json("GET", &target)?)?;
                    if has_more {
                        return Err(format!(
                            "{} has more than {MAX_LISTED_BY_ADMIN_PORT} overrides in memory, the most that the admin port lists",
                            policy.name
                        ));
                    }
                    if !listed.into_iter().all(&mut visit) {
                        return Ok(());
                    }
                }
                Ok(())
            }
        }
    }
}

fn print_change(key: &Key, old: Option<&StoredOverride>, new: Option<&StoredOverride>) {
    if let Some(change) = OverrideChange::new(key, old, new) {
        print_audit_line(json!(change));
    }
}

fn to_message(error: AdminError) -> String {
    error.to_string()
}

fn send_override(
    client: &AdminClient,
    method: &str,
    stored: &StoredOverride,
) -> Result<Value, String> {
    let target = overrides_path(stored.key.policy_name());
    client.send_json(method, &target, &override_to_json(stored))
}

fn overrides_path(policy: &str) -> String {
    format!("/overrides/{policy}")
}

/// The target of one key at the admin port.
fn key_target(key: &Key) -> String {
    let (path, values) = (overrides_path(key.policy_name()), key.value_texts());
    build_target(&path, values.iter().map(|value| ("key", &**value)))
}

/// Parses the overrides of a response, and whether there are more.
fn parse_list(response: &Value) -> Result<(Vec<StoredOverride>, bool), String> {
    let now_us = Clock::system().now_us();
    let listed = response["overrides"].as_array().into_iter().flatten();
    let listed = listed.filter_map(Value::as_object);
    let listed = listed.map(|fields| listed_override_from_json(fields, now_us));
    let listed = listed.collect::<Result<Vec<_>, String>>()?;
    Ok((listed, response["more"] == true))
}
