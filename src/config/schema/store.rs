//! Keys of `[store]`.

use super::key::*;
use strum::VariantNames;

schema_table! {
    pub(super) static STORE {
        /// Counters in this process, lost when it ends; or in Redis, shared by all replicas. Absent
        /// beside redis.url or redis.urls: "redis".
        kind: Keyword(&["memory", "redis"]), default = "memory";
        /// Directory for usage that on_store_failure = "local" admitted and Redis lacks when the
        /// process stops, for the next process. Files contain keys. Empty: such usage is lost.
        state_dir: Text("the path of a writable directory"), default = "";
        /// Limits of the counters in this process.
        memory: Table(&STORE_MEMORY);
        /// Redis servers and timeouts.
        redis: Table(&STORE_REDIS);
    }

    pub(super) static STORE_MEMORY {
        /// Most counters.
        max_keys: integer(1, 1 << 32), default = "1000000";
        /// Most memory for counters.
        max_bytes: byte_size(1 << 10, 1 << 50), default = "256MiB";
    }

    pub(super) static STORE_REDIS {
        /// One address; a master found by sentinels; a Redis Cluster.
        topology: Keyword(RedisTopologyKind::VARIANTS), default = "standalone";
        /// Address of a standalone server; valkey:// and valkeys:// mean the same. May contain user
        /// and password, but prefer password_file.
        url: Text("\"redis://host:port/database\", \"rediss://…\" for TLS, or \"unix:///path\""),
            default = "redis://127.0.0.1:6379/0", secret;
        /// Addresses of the sentinels (with the database after the slash), or of some cluster
        /// nodes.
        urls: TextList("URLs such as \"redis://host:port\""), default = "", secret;
        /// Name of the master at the sentinels.
        sentinel_master: Text("the name of a master"), default = "mymaster";
        /// ACL user for the sentinels. Empty: the default user.
        sentinel_username: Text("the name of an ACL user"), default = "", credential;
        /// Instead of sentinel_username: file with the name.
        sentinel_username_file: Text("the path of a file that holds the name"), default = "", credential;
        /// File with the password for the sentinels.
        sentinel_password_file: Text("the path of a file that holds the password"), default = "", credential;
        /// ACL user. Empty: the default user.
        username: Text("the name of an ACL user"), default = "", credential;
        /// Instead of username: file with the name.
        username_file: Text("the path of a file that holds the name"), default = "", credential;
        /// File with the password. Trailing white space is ignored.
        password_file: Text("the path of a file that holds the password"), default = "", credential;
        /// With rediss://: trusted CAs, or the server's own certificate. Empty: the system's.
        ca: PEM_PATH, default = "", credential;
        /// With rediss://: client certificate with its chain. Needs key.
        cert: PEM_PATH, default = "", credential;
        /// Private key of cert.
        key: PEM_PATH, default = "", credential;
        /// With rediss://: name to verify. Empty: the host of the connection, which for sentinels
        /// and clusters is often an IP address.
        server_name: Text("a host name"), default = "", credential;
        /// Prefix of all keys. Use one per service: services with equal prefix and policy names
        /// share counters.
        key_prefix: Text("1 to 64 letters, digits, \"_\", \".\", \"-\", \":\" or \"/\""),
            default = "tidegate";
        /// Number of instances for on_store_failure = "local", until tidegate has counted them.
        instances: integer(1, 100_000), default = "1";
        /// Timeout of a decision. Then on_store_failure applies.
        timeout: POSITIVE_DURATION, default = "50ms";
        /// Timeout of one connection attempt. At start, the listener waits this long for Redis.
        connect_timeout: POSITIVE_DURATION, default = "1s";
        /// Circuit breaker.
        breaker: Table(&STORE_REDIS_BREAKER);
    }

    pub(super) static STORE_REDIS_BREAKER {
        /// Consecutive failures that open the circuit breaker: requests then skip Redis.
        failures: integer(1, 1_000_000), default = "5";
        /// Interval of background probes while the breaker is open.
        probe_interval: POSITIVE_DURATION, default = "500ms";
    }
}
