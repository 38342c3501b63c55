//! What the admin port sees of the other rooms, and does to them.

use super::explain::{self, Unclear};
use super::keys::{self, Found, NoKey};
use super::limits;
use super::{Doors, Stopper, Stores};
use crate::admin::{
    About, Asking, Described, Draining, Fault, KeyAsked, Selected, Selection, Told, View,
};
use crate::clock;
use crate::config::Words;
use crate::enforcer::Live;
use crate::policy::{Action, OnStoreFailure, Policy};
use crate::proxy::{Load, ShutdownSettings, Stop};
use crate::reload;
use crate::store::redis;
use crate::telemetry::history::History;
use crate::telemetry::metrics::{MemoryUse, Metrics, Observed, Phase};
use crate::trace::Tracer;
use arc_swap::ArcSwap;
use parking_lot::Mutex;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tokio::sync::{Semaphore, watch};
use tokio::task::spawn_local;

/// Looks into a store at a time: each may open connections of its own.
const LOOKS: usize = 4;

/// What the admin port tells of the other rooms.
pub(super) struct Watched {
    pub(super) stop: watch::Receiver<Stop>,
    pub(super) stopper: Stopper,
    pub(super) shutdown: ShutdownSettings,
    /// Clients can connect, or could.
    pub(super) listening: Arc<AtomicBool>,
    pub(super) load: Load,
    pub(super) max_connections: usize,
    pub(super) workers: usize,
    pub(super) stores: Stores,
    pub(super) reload: Arc<Mutex<reload::Status>>,
    pub(super) live: Live,
    /// What the policies mean, as it was last loaded.
    pub(super) words: Arc<ArcSwap<Vec<Words>>>,
    pub(super) doors: Doors,
    pub(super) tracer: Option<Tracer>,
    pub(super) started: Instant,
}

impl Watched {
    /// All of it, as the admin port wants it.
    pub(super) fn into_view(self, metrics: Arc<Metrics>, history: Arc<History>) -> View {
        let (store, store_address) = match &self.stores {
            Stores::Memory(_) => ("memory", String::new()),
            Stores::Redis(shared, _) => ("redis", shared.settings().to_string()),
        };
        let about = About {
            instance: redis::instance(),
            started_s: clock::unix_s(),
            workers: self.workers,
            store,
            store_address,
        };
        let this = Arc::new(self);
        let room = Arc::new(Semaphore::new(LOOKS));
        let each = || (Arc::clone(&this), Arc::clone(&room));
        let observe = Arc::clone(&this);
        let config = Arc::clone(&this);
        let policies = Arc::clone(&this);
        let (key, reset, explain, drain) = (each(), each(), each(), Arc::clone(&this));
        View {
            about,
            metrics,
            history,
            observe: Arc::new(move || observe.observe()),
            config: Arc::new(move || Arc::clone(&config.reload.lock().effective)),
            policies: Arc::new(move |selection| policies.policies(selection)),
            key: Arc::new(move |asked| here(&key, |this| async move { this.key(&asked).await })),
            reset: Arc::new(move |asked| {
                here(&reset, |this| async move { this.reset(&asked).await })
            }),
            explain: Arc::new(move |told| {
                here(&explain, |this| async move { this.explain(&told).await })
            }),
            drain: Arc::new(move || drain.drain()),
        }
    }

    fn observe(&self) -> Observed {
        let (store_up, breaker_open, store_errors, memory) = match &self.stores {
            Stores::Memory(memory) => {
                let (keys, bytes, evictions) = (memory.keys(), memory.bytes(), memory.evicted());
                (
                    true,
                    false,
                    Vec::new(),
                    Some(MemoryUse {
                        keys,
                        bytes,
                        evictions,
                    }),
                )
            }
            Stores::Redis(redis, _) => (
                redis.is_up(),
                redis.breaker_open(),
                redis.errors().collect(),
                None,
            ),
        };
        let (instances, lease_units_lost) = match &self.stores {
            Stores::Memory(_) => (None, None),
            Stores::Redis(redis, leases) => (Some(redis.instances()), Some(leases.lost())),
        };
        let reload = self.reload.lock();
        Observed {
            phase: self.phase(),
            uptime_s: self.started.elapsed().as_secs(),
            policies: self.live.rules().table.policies().len(),
            connections: self.load.connections(),
            connections_max: self.max_connections,
            connections_full: self.load.full(),
            panics: self.load.panics(),
            store_up,
            breaker_open,
            store_errors,
            instances,
            lease_units_lost,
            spans: self.tracer.as_ref().map(Tracer::spans),
            redis: self.stores.vitals(),
            memory,
            generation: reload.generation,
            reloads_refused: reload.refused,
            loaded_s: reload.loaded_s,
            configured_at_s: reload.taken_at_s,
            config_hash: reload.hash,
            reload_errors: reload.last_error.clone(),
            certificates: self.doors.expiries(),
        }
    }

    fn phase(&self) -> Phase {
        if *self.stop.borrow() != Stop::Run {
            Phase::Stopping
        } else if self.listening.load(Ordering::Relaxed) {
            Phase::Serving
        } else {
            Phase::Starting
        }
    }

    fn drain(&self) -> Draining {
        self.stopper.drain("admin");
        Draining {
            delay: self.shutdown.delay,
            grace: self.shutdown.grace,
        }
    }

    /// In the order in which they apply; those that are off come last.
    fn policies(&self, selection: &Selection) -> Selected {
        let (rules, words) = (self.live.rules(), self.words.load());
        let is_asked = |name: &str| {
            selection.names.is_empty() || selection.names.iter().any(|asked| asked == name)
        };
        let sentences: HashMap<&str, &str> = words
            .iter()
            .map(|words| (&*words.policy, words.sentence.as_str()))
            .collect();
        let on = rules
            .table
            .policies()
            .iter()
            .zip(rules.tallies())
            .filter(|(p, _)| is_asked(&p.name));
        let off = words
            .iter()
            .filter(|words| words.off && is_asked(&words.policy));
        let total = on.clone().count() + off.clone().count();
        let on = on.map(|(policy, tally)| {
            let sentence = sentences.get(&*policy.name).copied().unwrap_or_default();
            let (name, about) = (policy.name.clone(), describe(policy, sentence));
            Described {
                name,
                about,
                tally: Some(Arc::clone(tally)),
            }
        });
        let off = off.map(|words| {
            let told = json!({ "name": words.policy, "mode": "off", "words": words.sentence });
            let about = told.as_object().cloned().unwrap_or_default();
            Described {
                name: words.policy.clone(),
                about,
                tally: None,
            }
        });
        let policies = on
            .chain(off)
            .skip(selection.offset)
            .take(selection.most)
            .collect();
        Selected { total, policies }
    }

    async fn key(&self, asked: &KeyAsked) -> Result<Value, Fault> {
        self.is_there()?;
        let rules = self.live.rules();
        let found = keys::find(&rules.table, &asked.policy, &asked.values).map_err(fault)?;
        let stand = found
            .look(&self.stores.for_looking().await)
            .await
            .map_err(|e| Fault::Away(e.to_string()))?;
        let mut told = found.in_json(&stand);
        if let Some(told) = told.as_object_mut() {
            told.insert("counters".to_owned(), json!(self.counters(&found)));
        }
        Ok(told)
    }

    /// Where in Redis a key is counted; empty for memory.
    fn counters(&self, found: &Found<'_>) -> Vec<String> {
        match &self.stores {
            Stores::Memory(_) => Vec::new(),
            Stores::Redis(shared, _) => found
                .charges()
                .iter()
                .flat_map(|charge| shared.counters(charge))
                .collect(),
        }
    }

    async fn reset(&self, asked: &KeyAsked) -> Result<Value, Fault> {
        self.is_there()?;
        let rules = self.live.rules();
        let found = keys::find(&rules.table, &asked.policy, &asked.values).map_err(fault)?;
        let count = found
            .reset(&self.stores)
            .await
            .map_err(|error| Fault::Away(error.to_string()))?;
        // Who, as the log names keys: without what the client has written.
        tracing::info!(
            policy = asked.policy,
            counters = count,
            "a key was reset by hand"
        );
        Ok(
            json!({ "policy": asked.policy, "key": found.key.readable(), "counters_forgotten": count }),
        )
    }

    async fn explain(&self, told: &Told) -> Result<Value, Fault> {
        let rules = self.live.rules();
        let store = self.stores.for_looking().await;
        match explain::explain(&store, &rules.table, told).await {
            Ok(explained) => Ok(explain::in_json(&explained, true)),
            Err(Unclear::NoRequest(why)) => Err(Fault::Wrong(why)),
            Err(Unclear::TurnedAway(why)) => Ok(explain::turned_away(&why)),
        }
    }

    /// Nobody waits for a store that is known to be away.
    fn is_there(&self) -> Result<(), Fault> {
        match &self.stores {
            Stores::Redis(redis, _) if !redis.is_up() => Err(Fault::Away(
                "the store is away: where its keys stand is not known".to_owned(),
            )),
            _ => Ok(()),
        }
    }
}

/// Runs what looks into stores: it stays on this thread, while the admin port's own tasks could do without.
fn here<F: Future<Output = Result<Value, Fault>> + 'static>(
    (this, room): &(Arc<Watched>, Arc<Semaphore>),
    work: impl FnOnce(Arc<Watched>) -> F + 'static,
) -> Asking {
    let (this, room) = (Arc::clone(this), Arc::clone(room));
    let task = spawn_local(async move {
        let _permit = room.acquire_owned().await;
        work(this).await
    });
    Box::pin(async move {
        task.await
            .unwrap_or_else(|error| Err(Fault::Away(error.to_string())))
    })
}

fn fault(no_key: NoKey) -> Fault {
    match no_key {
        NoKey::Policy(why) => Fault::Unknown(why),
        NoKey::Values(why) => Fault::Wrong(why),
    }
}

fn describe(policy: &Policy, sentence: &str) -> Map<String, Value> {
    let mut about = Map::new();
    let mut tell = |name: &str, value: Value| about.insert(name.to_owned(), value);
    tell("name", json!(policy.name));
    tell(
        "mode",
        json!(if policy.shadow { "shadow" } else { "enforce" }),
    );
    tell("words", json!(sentence));
    tell("priority", json!(policy.priority));
    let Action::Limit(quota) = &policy.action else {
        tell(
            "action",
            json!(if matches!(policy.action, Action::Allow) {
                "allow"
            } else {
                "deny"
            }),
        );
        return about;
    };
    tell("action", json!("limit"));
    tell("key", json!(quota.key.positions()));
    tell(
        "limits",
        quota
            .limits
            .iter()
            .map(|named| Value::Object(limits::told(named)))
            .collect(),
    );
    tell("overrides", json!(quota.overrides.list().len()));
    tell(
        "on_store_failure",
        json!(match policy.on_store_failure {
            OnStoreFailure::Open => "open",
            OnStoreFailure::Closed => "closed",
            OnStoreFailure::Local => "local",
        }),
    );
    tell(
        "block_s",
        json!(quota.block.map(|block| limits::seconds(block.per_us))),
    );
    tell(
        "lease",
        json!(quota.lease.map(|lease| json!({
            "size": lease.size.map_or_else(|| json!("auto"), |size| json!(size)),
            "ttl_s": limits::seconds(lease.ttl_us),
        }))),
    );
    about
}
