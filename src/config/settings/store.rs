//! `[store]`: memory or Redis.

use super::redis;
use crate::config::input::ConfigInput;
use crate::config::loaded_config::StoreSettings;
use crate::config::table_reader::TableReader;
use crate::store::MemorySettings;

pub(super) fn build_store_settings(
    input: &ConfigInput,
    reader: &TableReader<'_>,
) -> Option<StoreSettings> {
    let use_redis = reader.get_keyword("kind", &[("memory", false), ("redis", true)])?;
    let memory_reader = reader.get_table("memory");
    let memory = MemorySettings {
        max_keys: memory_reader.get_integer("max_keys")?,
        max_bytes: memory_reader.get_byte_size("max_bytes")?,
    };
    // Validated even if it is not used.
    let redis = redis::build_redis_settings(input, &reader.get_table("redis"), use_redis)?;
    Some(if use_redis {
        StoreSettings::Redis(Box::new(redis))
    } else {
        StoreSettings::Memory(memory)
    })
}
