//! The overrides of the configured store: in Redis, or in the memory of the proxy on this machine,
//! by its admin port.

use crate::app::key_status::find_limiting_policy;
use crate::app::overrides::{listed_override_from_json, merge_amounts, override_to_json};
use crate::cli::admin_client::AdminClient;
use crate::clock::Clock;
use crate::limiter::Key;
use crate::policy::PolicyTable;
use crate::store::StoredOverride;
use crate::store::redis::CounterInspector;
use serde_json::Value;
use std::sync::Arc;

/// Attempts to change an override that other commands change at the same time.
const MAX_ATTEMPTS: usize = 10;

/// Most overrides that the admin port lists.
const MAX_LISTED_BY_ADMIN_PORT: usize = 10_000;

pub(super) enum StoreClient {
    Redis(Box<CounterInspector>),
    AdminPort(AdminClient, Arc<PolicyTable>),
}

impl StoreClient {
    pub(super) async fn find(&self, key: &Key) -> Result<Option<StoredOverride>, String> {
        match self {
            Self::Redis(inspector) => {
                let found = inspector.find_override(key).await;
                found.map_err(|error| error.to_string())
            }
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
        for _ in 0..MAX_ATTEMPTS {
            let previous = self.find(&entered.key).await?;
            let mut stored = entered.clone();
            if let Some(previous) = previous.as_ref().filter(|last| !last.is_expired(now_us)) {
                merge_amounts(previous, &mut stored)?;
            }
            let is_set = match self {
                Self::Redis(inspector) => {
                    let replaced = inspector.replace_override(previous.as_ref(), &stored);
                    replaced.await.map_err(|error| error.to_string())?
                }
                Self::AdminPort(client, _) => put_override(client, &stored).map(|()| true)?,
            };
            if is_set {
                return Ok(stored);
            }
        }
        Err("other commands change this override at the same time; try again".to_owned())
    }

    /// Sets many overrides. Returns the result of each.
    pub(super) async fn set_many(&self, overrides: &[StoredOverride]) -> Vec<Result<(), String>> {
        match self {
            Self::Redis(inspector) => {
                let results = inspector.set_overrides(overrides).await;
                results
                    .into_iter()
                    .map(|result| result.map_err(|error| error.to_string()))
                    .collect()
            }
            Self::AdminPort(client, _) => overrides
                .iter()
                .map(|stored| put_override(client, stored))
                .collect(),
        }
    }

    pub(super) async fn remove(&self, key: &Key) -> Result<bool, String> {
        match self {
            Self::Redis(inspector) => {
                let removed = inspector.remove_override(key).await;
                removed.map_err(|error| error.to_string())
            }
            Self::AdminPort(client, _) => {
                let response = client.request_json("DELETE", &key_target(key))?;
                Ok(response.get("removed") == Some(&Value::Bool(true)))
            }
        }
    }

    /// Passes all overrides to `visit`, in no order, until it returns false.
    pub(super) async fn visit(
        &self,
        mut visit: impl FnMut(StoredOverride) -> bool,
    ) -> Result<(), String> {
        match self {
            Self::Redis(inspector) => {
                let visited = inspector.visit_overrides(visit).await;
                visited.map_err(|error| error.to_string())
            }
            Self::AdminPort(client, table) => {
                for policy in table.policies() {
                    let Ok((_, quota)) = find_limiting_policy(table, &policy.name) else {
                        continue;
                    };
                    if !quota.is_dynamic {
                        continue;
                    }
                    let target = format!("/overrides/{}?n={MAX_LISTED_BY_ADMIN_PORT}", policy.name);
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

fn put_override(client: &AdminClient, stored: &StoredOverride) -> Result<(), String> {
    let target = format!("/overrides/{}", stored.key.policy_name());
    client
        .put_json(&target, &override_to_json(stored))
        .map(drop)
}

/// The target of one key at the admin port.
fn key_target(key: &Key) -> String {
    let mut target = format!("/overrides/{}?", key.policy_name());
    for value in key.value_texts() {
        let value =
            percent_encoding::utf8_percent_encode(&value, percent_encoding::NON_ALPHANUMERIC);
        target.push_str(&format!("key={value}&"));
    }
    target.pop();
    target
}

/// Parses the overrides of a response, and whether there are more.
fn parse_list(response: &Value) -> Result<(Vec<StoredOverride>, bool), String> {
    let now_us = Clock::system().now_us();
    let listed = response.get("overrides").and_then(Value::as_array);
    let listed = listed.into_iter().flatten().filter_map(Value::as_object);
    let listed = listed.map(|fields| listed_override_from_json(fields, now_us));
    let listed = listed.collect::<Result<Vec<_>, String>>()?;
    Ok((listed, response.get("more") == Some(&Value::Bool(true))))
}
