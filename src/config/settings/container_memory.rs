//! The memory limit of the container (cgroup) that the process runs in.

use std::fs;

/// Share of the container's memory for client connections, in percent. The rest is for policies,
/// counters in memory, upstream connections and socket buffers of the kernel.
const CONNECTION_SHARE_PERCENT: u64 = 60;
/// cgroup v1 reports this limit or a larger one if there is none.
const MIN_UNLIMITED_BYTES: u64 = 1 << 60;

/// Default of `listen.max_memory`. `None` if the container has no memory limit.
pub(super) fn default_connection_memory() -> Option<usize> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    limit_files(&own)
        .iter()
        .filter_map(|file| parse_limit(&fs::read_to_string(file).ok()?))
        .min()
        .and_then(|limit| usize::try_from(limit / 100 * CONNECTION_SHARE_PERCENT).ok())
}

/// Files that may contain a limit, of cgroup v2 and v1. `own` is the content of
/// `/proc/self/cgroup`; in a container its path is often not visible, and the limit is at the root.
fn limit_files(own: &str) -> Vec<String> {
    let mut files = vec![
        "/sys/fs/cgroup/memory.max".to_owned(),
        "/sys/fs/cgroup/memory/memory.limit_in_bytes".to_owned(),
    ];
    for line in own.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            continue;
        };
        if controllers.is_empty() {
            files.push(format!("/sys/fs/cgroup{path}/memory.max"));
        } else if controllers.split(',').any(|name| name == "memory") {
            files.push(format!("/sys/fs/cgroup/memory{path}/memory.limit_in_bytes"));
        }
    }
    files
}

fn parse_limit(text: &str) -> Option<u64> {
    text.trim()
        .parse()
        .ok()
        .filter(|bytes| *bytes < MIN_UNLIMITED_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_limits_of_both_cgroup_versions() {
        let own = "12:cpu,cpuacct:/a\n11:memory:/kubepods/x\n0::/system.slice/tidegate.service\nnonsense\n";
        assert_eq!(
            limit_files(own)[2..],
            [
                "/sys/fs/cgroup/memory/kubepods/x/memory.limit_in_bytes",
                "/sys/fs/cgroup/system.slice/tidegate.service/memory.max"
            ]
        );
        assert_eq!(parse_limit("268435456\n"), Some(256 << 20));
        for unlimited in ["max\n", "9223372036854771712", ""] {
            assert_eq!(parse_limit(unlimited), None);
        }
    }
}
