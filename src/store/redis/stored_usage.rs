//! Usage of an outage across processes: restored at the start, stored at the stop.

use super::SharedRedisState;

impl SharedRedisState {
    /// Continues the outage in which an earlier process stopped, if `store.state_dir` has its file.
    /// Call it before the first request.
    pub fn restore_usage(&self) {
        let Some(directory) = &self.usage_directory else {
            return;
        };
        if let Some((file, usage, downtime_us)) = directory.lock_and_read_newest_file() {
            tracing::info!(
                counters = usage.counter_count(),
                age_s = downtime_us / 1_000_000,
                "restored usage that an earlier process admitted without redis"
            );
            self.fallback.restore_usage(usage, downtime_us);
            directory.set_restored_file(file);
        }
    }

    /// Stores the usage that Redis lacks in `store.state_dir`. Call it after the last request.
    pub fn store_usage(&self) {
        let Some(directory) = &self.usage_directory else {
            return;
        };
        if let Some(usage) = self.fallback.export_usage(self.clock.wall_us()) {
            match directory.save_usage(&usage) {
                Ok(path) => tracing::info!(
                    file = %path.display(),
                    counters = usage.counter_count(),
                    "stored usage admitted without redis"
                ),
                Err(error) => {
                    tracing::warn!(directory = %directory.path().display(), %error, "cannot store usage admitted without redis");
                    return;
                }
            }
        }
        directory.remove_restored_file();
    }
}
