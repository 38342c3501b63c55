//! One view of all instances that share the limits.
//!
//! The store names the instances by their heartbeats. The admin endpoint of each one is queried for
//! a summary: in parallel, within a deadline, and at most [`MAX_ASKED_INSTANCES`]. An instance that
//! cannot be queried is listed with the reason.

mod merge;
mod peer_client;

use super::parameters::{BackendAndQuery, QueryParameters};
use super::responses::{JsonResult, ProblemDetails, respond_blocking, run_blocking};
use super::{
    AdminBackend, AdminToken, FleetDocument, FleetInstanceDocument, FleetMembers, InstanceFigures,
    InstanceSummary, ReloadableAdminToken,
};
use crate::telemetry::top_rejections::RejectionDimension;
use crate::text::SecretText;
use axum::Extension;
use futures_util::StreamExt as _;
use futures_util::stream;
use merge::{FleetSum, parse_summary};
use parking_lot::Mutex;
use peer_client::{MAX_CONCURRENT_LOOKUPS, MAX_SUMMARY_ENTRIES, fetch_summary};
use sha2::{Digest, Sha256};
use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout, timeout_at};

/// Maximum number of instances that are queried for one view.
const MAX_ASKED_INSTANCES: usize = 100;
/// Maximum number of concurrent requests to other instances.
const MAX_CONCURRENT_REQUESTS: usize = 32;
/// Timeout for the list of the instances and all their answers, shorter than the timeout of the
/// dashboard (5 s).
const VIEW_TIMEOUT: Duration = Duration::from_secs(4);
/// Timeout for the list; the rest of [`VIEW_TIMEOUT`] is for the answers.
const LIST_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a view is returned to further callers, so that many dashboards cost no more than one.
const VIEW_LIFETIME: Duration = Duration::from_secs(1);
/// Default number of entries in a ranking.
const DEFAULT_RANKING_ENTRIES: usize = 20;

/// Reads the view of the fleet. All callers share one reader.
#[derive(Debug)]
pub(super) struct FleetReader {
    token: ReloadableAdminToken,
    /// Only one view is built at a time.
    building: Arc<Semaphore>,
    /// Bounds the name lookups for other instances.
    lookup_permits: Arc<Semaphore>,
    /// The last view, and when it was built.
    last_view: Mutex<Option<(Instant, Arc<FleetDocument>)>>,
    /// The members of the last successful read, for an outage of the store.
    last_members: Mutex<Option<FleetMembers>>,
}

impl FleetReader {
    pub(super) fn new(token: ReloadableAdminToken) -> Self {
        Self {
            token,
            building: Arc::new(Semaphore::new(1)),
            lookup_permits: Arc::new(Semaphore::new(MAX_CONCURRENT_LOOKUPS)),
            last_view: Mutex::default(),
            last_members: Mutex::default(),
        }
    }

    /// Returns the view with rankings of [`MAX_SUMMARY_ENTRIES`], at most [`VIEW_LIFETIME`] old.
    async fn read_view(
        self: &Arc<Self>,
        view: &AdminBackend,
    ) -> Result<Arc<FleetDocument>, ProblemDetails> {
        // An error means that the semaphore is closed, which never happens.
        let permit = Arc::clone(&self.building).acquire_owned().await;
        let last_view = self.last_view.lock().clone();
        if let Some((built_at, last_view)) = last_view
            && built_at.elapsed() < VIEW_LIFETIME
        {
            return Ok(last_view);
        }
        let (reader, backend) = (Arc::clone(self), view.clone());
        // A task of its own, so that the other callers get the view if this one gives up.
        let building = tokio::spawn(async move {
            let _permit = permit;
            let sum = reader.ask_instances(&backend).await?;
            let built = run_blocking(move || Arc::new(sum.into_document())).await?;
            *reader.last_view.lock() = Some((Instant::now(), Arc::clone(&built)));
            Ok(built)
        });
        let built = building.await.map_err(ProblemDetails::from_join_error);
        built.flatten()
    }

    /// Lists the instances; while the store does not answer, those of the last list.
    async fn list_members(&self, view: &AdminBackend) -> (FleetMembers, Option<String>) {
        let problem = match timeout(LIST_TIMEOUT, Arc::clone(&view.state).list_members()).await {
            Ok(Ok(members)) => {
                *self.last_members.lock() = Some(members.clone());
                return (members, None);
            }
            Ok(Err(error)) => error.to_string(),
            Err(_elapsed) => "the store did not list the instances within 2 s".to_owned(),
        };
        let last_members = self.last_members.lock().clone();
        (last_members.unwrap_or_default(), Some(problem))
    }

    async fn ask_instances(&self, view: &AdminBackend) -> Result<FleetSum, ProblemDetails> {
        let deadline = Instant::now() + VIEW_TIMEOUT;
        let (mut members, problem) = self.list_members(view).await;
        let own_id = &view.instance.id;
        // The own heartbeat may be missing while the store is unavailable.
        if !members.instances.iter().any(|one| one.id == *own_id) {
            let own = FleetInstanceDocument {
                id: own_id.clone(),
                name: Some(view.instance.host.clone()),
                version: Some(view.instance.version.clone()),
                state: "unknown".to_owned(),
                ..FleetInstanceDocument::default()
            };
            members.instances.insert(0, own);
            members.total += 1;
        }
        let backend = view.clone();
        let own_summary =
            run_blocking(move || build_summary(&backend, MAX_SUMMARY_ENTRIES)).await?;
        let repeated_ids = find_repeated_ids(&members.instances);
        let store = view.state.read_status().store.kind;
        let mut sum = FleetSum::new(view.instance.clone(), &store, members.total, problem);
        let instances = members.instances.into_iter().enumerate();
        let answers = instances.map(|(at, instance)| {
            let is_repeated = repeated_ids.contains(&instance.id);
            let own_summary = &own_summary;
            async move {
                let answer = match find_address(&instance, at, is_repeated) {
                    _ if instance.id == *own_id => Ok(own_summary.clone()),
                    Ok(address) => self.ask_instance(&instance.id, address, deadline).await,
                    Err(reason) => Err(reason),
                };
                (at, instance, answer)
            }
        });
        // Each summary is added at once, because it takes more memory than its bytes.
        let mut answers = stream::iter(answers).buffer_unordered(MAX_CONCURRENT_REQUESTS);
        while let Some((at, instance, answer)) = answers.next().await {
            sum.add(at, instance, answer);
        }
        Ok(sum)
    }

    async fn ask_instance(
        &self,
        id: &str,
        address: &str,
        deadline: Instant,
    ) -> Result<InstanceSummary, String> {
        let token = self.token.load();
        let credential = token
            .as_ref()
            .map(|token| derive_instance_credential(token, id));
        let answer = fetch_summary(&self.lookup_permits, address, credential.as_ref());
        let answer = timeout_at(deadline, answer).await;
        let late = |_elapsed| Err("it did not answer in time".to_owned());
        parse_summary(&answer.unwrap_or_else(late)?, id)
    }
}

/// The ids of several entries. The credential is derived from the id, so one of them is forged.
fn find_repeated_ids(instances: &[FleetInstanceDocument]) -> HashSet<String> {
    let mut ids = HashSet::new();
    let repeated = instances.iter().filter(|one| !ids.insert(&one.id));
    repeated.map(|one| one.id.clone()).collect()
}

/// Returns the address to query, or why an instance cannot be queried.
fn find_address(
    instance: &FleetInstanceDocument,
    position: usize,
    is_repeated: bool,
) -> Result<&str, String> {
    let reason = match &instance.admin {
        None if instance.name.is_none() => "its version does not report its admin address",
        None => "other instances cannot reach its admin port: see admin.advertise",
        Some(_) if is_repeated => "several heartbeats have its id",
        Some(_) if position >= MAX_ASKED_INSTANCES => {
            "too many instances: only the first 100 are asked"
        }
        Some(address) => return Ok(address),
    };
    Err(reason.to_owned())
}

/// Returns the instances that share the limits, and their most rejected keys and paths together.
pub(super) async fn get_fleet(
    BackendAndQuery(view, query): BackendAndQuery,
    Extension(reader): Extension<Arc<FleetReader>>,
) -> JsonResult {
    let query = QueryParameters::parse(query.as_deref(), &["n"])?;
    let limit = query.get_number("n", DEFAULT_RANKING_ENTRIES, MAX_SUMMARY_ENTRIES)?;
    let fleet = reader.read_view(&view).await?;
    respond_blocking(move || {
        let mut fleet = (*fleet).clone();
        fleet.keys.entries.truncate(limit);
        fleet.paths.entries.truncate(limit);
        fleet
    })
    .await
}

/// Returns the summary of this instance to another instance.
pub(super) async fn get_instance_summary(
    BackendAndQuery(view, query): BackendAndQuery,
) -> JsonResult {
    let query = QueryParameters::parse(query.as_deref(), &["n"])?;
    let limit = query.get_number("n", DEFAULT_RANKING_ENTRIES, MAX_SUMMARY_ENTRIES)?;
    respond_blocking(move || build_summary(&view, limit)).await
}

/// A part of the decisions with another label.
const PARTIAL_LABEL: &str = "degraded_refused";

/// Complete seconds over which the rate is averaged.
const RATE_SECONDS: usize = 5;

fn build_summary(view: &AdminBackend, max_entries: usize) -> InstanceSummary {
    let observed = view.state.read_status();
    let rejections = &view.metrics.top_rejections;
    let rank = |dimension| rejections.ranking(dimension, None, max_entries);
    InstanceSummary {
        id: view.instance.id.clone(),
        name: view.instance.host.clone(),
        version: view.instance.version.clone(),
        status: Some(observed.phase.to_string()),
        instances: Some(observed.store.instances.unwrap_or(1).into()),
        figures: InstanceFigures {
            store: Some(observed.store.availability().to_owned()),
            decisions_per_s: Some(mean_rate(view)),
            uptime_s: Some(observed.uptime_s),
            generation: Some(observed.config_generation),
            config_hash: Some(observed.config_hash),
        },
        keys: rank(RejectionDimension::Keys),
        paths: rank(RejectionDimension::Paths),
    }
}

/// The mean number of decisions per second. The last second is incomplete and left out.
fn mean_rate(view: &AdminBackend) -> f64 {
    let (_, seconds) = view.history.last_seconds(RATE_SECONDS + 1);
    let labels = view.metrics.labels.request_decisions;
    let complete = seconds
        .split_last()
        .map_or(&[][..], |(_, complete)| complete);
    let decisions: u64 = complete
        .iter()
        .flat_map(|second| labels.iter().zip(second.decisions))
        .filter(|((label, _), _)| *label != PARTIAL_LABEL)
        .map(|(_, count)| u64::from(count))
        .sum();
    #[allow(clippy::cast_precision_loss, reason = "the counts are below 2^52")]
    let rate = decisions as f64 / complete.len().max(1) as f64;
    rate
}

/// Separates this use of the token from others.
const PURPOSE: &str = "tidegate fleet summary v1";

/// Bearer credential for the summary of one instance: what one instance sends to another instead of
/// the token.
///
/// Anyone who can write to Redis can add a heartbeat with an address of their own, so the token
/// itself is never sent. The credential is derived from the token and the id of the instance. It is
/// valid for that process only, and only for reading its summary.
pub(super) fn derive_instance_credential(token: &AdminToken, instance_id: &str) -> SecretText {
    let key = Sha256::digest(format!("{PURPOSE}\n{}", token.expose()));
    let mut digest = Sha256::new();
    digest.update(key);
    digest.update(instance_id);
    // The second digest makes it impossible to extend the id.
    let derived = Sha256::digest(digest.finalize());
    SecretText::new(derived.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_of_several_entries_is_found_wherever_they_are() {
        let instance = |id: &str| FleetInstanceDocument {
            id: id.to_owned(),
            ..FleetInstanceDocument::default()
        };
        let instances = ["a", "b", "c", "a", "c", "a"].map(instance);
        let expected = ["a", "c"].map(str::to_owned);
        assert_eq!(find_repeated_ids(&instances), HashSet::from(expected));
    }

    #[test]
    fn credentials_differ_by_token_and_instance_and_hide_the_token() {
        let credential =
            |token: &str, id| derive_instance_credential(&AdminToken::new(token.to_owned()), id);
        let one = credential("s3cret", "a");
        assert_eq!(one, credential("s3cret", "a"));
        assert_ne!(one, credential("s3cret", "b"));
        assert_ne!(one, credential("other", "a"));
        assert_eq!(one.expose().len(), 64);
        assert!(!one.expose().contains("s3cret") && format!("{one:?}") == "***");
    }
}
