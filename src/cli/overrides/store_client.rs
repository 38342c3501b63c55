//! The overrides of the configured store: in Redis, or in the memory of the proxy on this machine,
//! by its admin port.

use crate::admin::{OverrideDocument, OverrideListDocument, OverrideRemovalDocument};
use crate::app::StoreBackend;
use crate::app::override_store::{OverrideChange, OverrideStore};
use crate::app::overrides::{describe_stored_override, override_from_document};
use crate::cli::admin_client::{AdminClient, build_target};
use crate::cli::output::{CommandError, print_audit_line};
use crate::config::{Config, StoreSettings};
use crate::limiter::Key;
use crate::policy::{Policy, PolicyTable};
use crate::store::StoredOverride;
use futures_util::future::join_all;
use indicatif::ProgressBar;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::sync::Arc;

/// Most overrides that the admin port lists.
const MAX_LISTED_BY_ADMIN_PORT: usize = 10_000;

pub(crate) enum StoreClient {
    Redis(OverrideStore),
    AdminPort(AdminClient, Arc<PolicyTable>),
}

impl StoreClient {
    /// Opens the overrides of the configured store.
    pub(crate) async fn open(config: &Config) -> Result<Self, CommandError> {
        match &config.store {
            StoreSettings::Redis(_) => {
                let backend = StoreBackend::new(&config.store);
                Ok(Self::Redis(OverrideStore::open(&backend).await?))
            }
            StoreSettings::Memory(_) => {
                let client = AdminClient::from_settings(&config.admin)?;
                Ok(Self::AdminPort(client, Arc::clone(&config.policy_table)))
            }
        }
    }

    pub(crate) async fn find(&self, key: &Key) -> Result<Option<StoredOverride>, CommandError> {
        match self {
            Self::Redis(store) => Ok(store.find(key).await?),
            Self::AdminPort(client, _) => {
                let response = client.request_json("GET", &key_target(key)).await?;
                let listed: OverrideListDocument = parse_answer(response)?;
                let found = listed.overrides.into_iter().next();
                Ok(found.map(override_from_document).transpose()?)
            }
        }
    }

    /// Sets an override. Other limits of the key's override stay. If that would change when they
    /// end, nothing is set and the result is an error.
    pub(super) async fn set_and_merge(
        &self,
        entered: &StoredOverride,
        now_us: u64,
    ) -> Result<StoredOverride, CommandError> {
        match self {
            Self::Redis(store) => {
                let (stored, change) = store.merge(entered, now_us).await?;
                change.iter().for_each(print_change);
                Ok(stored)
            }
            Self::AdminPort(client, _) => {
                let set: OverrideDocument =
                    parse_answer(send_override(client, "PATCH", entered).await?)?;
                Ok(override_from_document(set)?)
            }
        }
    }

    /// Sets many overrides. Returns the result of each. Audit lines do not disturb `progress`.
    pub(super) async fn set_many(
        &self,
        overrides: &[StoredOverride],
        progress: &ProgressBar,
    ) -> Vec<Result<(), CommandError>> {
        match self {
            Self::Redis(store) => {
                let set = async |stored: &StoredOverride| {
                    let change = store.set(stored).await?;
                    progress.suspend(|| change.iter().for_each(print_change));
                    Ok(())
                };
                join_all(overrides.iter().map(set)).await
            }
            Self::AdminPort(client, _) => {
                let mut results = Vec::new();
                for stored in overrides {
                    results.push(send_override(client, "PUT", stored).await.map(drop));
                }
                results
            }
        }
    }

    pub(super) async fn remove(&self, key: &Key) -> Result<bool, CommandError> {
        match self {
            Self::Redis(store) => {
                let (is_removed, change) = store.remove(key).await?;
                change.iter().for_each(print_change);
                Ok(is_removed)
            }
            Self::AdminPort(client, _) => {
                let response = client.request_json("DELETE", &key_target(key)).await?;
                Ok(parse_answer::<OverrideRemovalDocument>(response)?.removed)
            }
        }
    }

    /// Passes the overrides of all policies, or of one, to `visit`, in no order, until it returns
    /// false.
    pub(super) async fn visit(
        &self,
        policy: Option<&str>,
        mut visit: impl FnMut(StoredOverride) -> bool,
    ) -> Result<(), CommandError> {
        let mut visit = |stored: StoredOverride| {
            let is_selected = policy.is_none_or(|policy| stored.key.policy_name() == policy);
            !is_selected || visit(stored)
        };
        let (client, table) = match self {
            Self::Redis(store) => return Ok(store.visit(visit).await?),
            Self::AdminPort(client, table) => (client, table),
        };
        let is_dynamic = |policy: &&Policy| policy.quota().is_some_and(|quota| quota.is_dynamic);
        for policy in table.policies().iter().filter(is_dynamic) {
            let max = MAX_LISTED_BY_ADMIN_PORT.to_string();
            let target = build_target(&overrides_path(&policy.name), [("n", &*max)]);
            let listed: OverrideListDocument =
                parse_answer(client.request_json("GET", &target).await?)?;
            if listed.more {
                return Err(CommandError::Message(format!(
                    "{} has more than {max} overrides in memory, the most that the admin port lists",
                    policy.name
                )));
            }
            for document in listed.overrides {
                if !visit(override_from_document(document)?) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}

fn print_change(change: &OverrideChange) {
    print_audit_line(json!(change));
}

async fn send_override(
    client: &AdminClient,
    method: &str,
    stored: &StoredOverride,
) -> Result<Value, CommandError> {
    let target = overrides_path(stored.key.policy_name());
    let document = describe_stored_override(stored);
    client.send_json(method, &target, &json!(document)).await
}

fn overrides_path(policy: &str) -> String {
    format!("/overrides/{policy}")
}

/// The target of one key at the admin port.
fn key_target(key: &Key) -> String {
    let (path, values) = (overrides_path(key.policy_name()), key.value_texts());
    build_target(&path, values.iter().map(|value| ("key", &**value)))
}

fn parse_answer<T: DeserializeOwned>(response: Value) -> Result<T, CommandError> {
    serde_json::from_value(response)
        .map_err(|error| CommandError::Message(format!("unexpected answer: {error}")))
}
