//! The store for commands that look at it and are gone.

use crate::clock::Clock;
use crate::config::StoreSettings;
use crate::store::redis::{Redis, Shared};
use crate::store::{Memory, Store};
use std::sync::Arc;

/// On the current runtime; waits for Redis as the proxy does at its start.
pub(super) async fn open_store(settings: &StoreSettings) -> Store {
    match settings {
        StoreSettings::Memory(settings) => Store::Memory(Arc::new(Memory::new(*settings, Clock::system()))),
        StoreSettings::Redis(settings) => {
            let redis = Redis::start(&Shared::new(settings.clone()));
            redis.first_ready().await;
            Store::redis(redis)
        }
    }
}
