//! `[store]`: memory or Redis.

use super::redis;
use crate::config::key_files::read_directory;
use crate::config::loaded_config::StoreSettings;
use crate::config::table_reader::{TableReader, read_settings, report};
use crate::store::MemorySettings;
use crate::store::redis::RedisSettings;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::Path;

pub(super) fn build_store_settings(reader: &TableReader<'_>) -> Option<StoreSettings> {
    let use_redis = reader.is_keyword("kind", "redis")?;
    let memory = build_memory_settings(&reader.get_table("memory"))?;
    // `[store.redis]` is validated even if it is not used.
    let redis = redis::build_redis_settings(&reader.get_table("redis"), use_redis, memory)?;
    let state_dir = read_directory(reader, "state_dir", use_redis)?;
    if use_redis && reader.input().reads_key_files() {
        state_dir
            .iter()
            .for_each(|path| warn_if_not_writable(reader, path));
    }
    report! { reader;
        Warning("state_dir") if state_dir.is_some() && !use_redis => "the memory store does not use it; expected kind = \"redis\", or no state_dir";
    }
    Some(if use_redis {
        StoreSettings::Redis(Box::new(RedisSettings { state_dir, ..redis }))
    } else {
        StoreSettings::Memory(memory)
    })
}

/// Builds the bounds of counters in memory: of the memory store, and of `scope = "instance"`.
pub(crate) fn build_memory_settings(reader: &TableReader<'_>) -> Option<MemorySettings> {
    Some(read_settings!(MemorySettings { reader: max_keys, max_bytes; }))
}

/// Warns if no file can be created in the directory. A full disk must neither stop the process from
/// serving nor reject new policies.
fn warn_if_not_writable(reader: &TableReader<'_>, directory: &Path) {
    let probe = directory.join(format!("tidegate-check-{}.tmp", std::process::id()));
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .open(&probe)
        .and_then(|mut file| file.write_all(b"probe"));
    drop(fs::remove_file(&probe));
    if let Err(error) = written {
        reader.report_warning(
            "state_dir",
            format!("can't be written: {error}; a restart during an outage of Redis loses usage; expected a writable directory with free space"),
        );
    }
}
