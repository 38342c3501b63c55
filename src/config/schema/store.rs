//! Keys of `[store]`.

use super::key::*;

pub(super) static STORE: [SchemaKey; 4] = [
    key(
        "kind",
        Keyword(&["memory", "redis"]),
        Default("memory"),
        "Counters in this process, lost when it ends; or in Redis, shared by all replicas. Absent beside redis.url or redis.urls: \"redis\".",
    ),
    key(
        "state_dir",
        Text("the path of a writable directory"),
        Default(""),
        "Directory for usage that on_store_failure = \"local\" admitted and Redis lacks when the process stops; the next process reads it. Files contain keys. Empty: such usage is lost.",
    ),
    table(
        "memory",
        &STORE_MEMORY,
        "Limits of the counters in this process.",
    ),
    table("redis", &STORE_REDIS, "Redis servers and timeouts."),
];

pub(super) static STORE_MEMORY: [SchemaKey; 2] = [
    key(
        "max_keys",
        integer(1, 1 << 32),
        Default("1000000"),
        "Most counters.",
    ),
    key(
        "max_bytes",
        byte_size(1 << 10, 1 << 50),
        Default("256MiB"),
        "Most memory for counters.",
    ),
];

pub(super) static STORE_REDIS: [SchemaKey; 19] = [
    key(
        "topology",
        Keyword(&["standalone", "sentinel", "cluster"]),
        Default("standalone"),
        "One address; a master found by sentinels; a Redis Cluster.",
    ),
    key(
        "url",
        Secret("\"redis://host:port/database\", \"rediss://…\" for TLS, or \"unix:///path\""),
        Default(DEFAULT_REDIS_URL),
        "Address of a standalone server; valkey:// and valkeys:// mean the same. May contain user and password, but prefer password_file.",
    ),
    key(
        "urls",
        SecretList("URLs such as \"redis://host:port\""),
        Default(""),
        "Addresses of the sentinels (with the database after the slash), or of some cluster nodes.",
    ),
    key(
        "sentinel_master",
        Text("the name of a master"),
        Default("mymaster"),
        "Name of the master at the sentinels.",
    ),
    key(
        "sentinel_username",
        Text("the name of an ACL user"),
        Default(""),
        "ACL user for the sentinels. Empty: the default user.",
    ),
    key(
        "sentinel_username_file",
        Text("the path of a file that holds the name"),
        Default(""),
        "Instead of sentinel_username: file with the name.",
    ),
    key(
        "sentinel_password_file",
        Text("the path of a file that holds the password"),
        Default(""),
        "File with the password for the sentinels. Empty: none.",
    ),
    key(
        "username",
        Text("the name of an ACL user"),
        Default(""),
        "ACL user. Empty: the default user.",
    ),
    key(
        "username_file",
        Text("the path of a file that holds the name"),
        Default(""),
        "Instead of username: file with the name.",
    ),
    key(
        "password_file",
        Text("the path of a file that holds the password"),
        Default(""),
        "File with the password. Trailing white space is ignored. Empty: none.",
    ),
    key(
        "ca",
        Text("the path of a PEM file"),
        Default(""),
        "With rediss://: trusted CAs, or the server's own certificate. Empty: the system's.",
    ),
    key(
        "cert",
        Text("the path of a PEM file"),
        Default(""),
        "With rediss://: client certificate with its chain. Needs key.",
    ),
    key(
        "key",
        Text("the path of a PEM file"),
        Default(""),
        "Private key of cert.",
    ),
    key(
        "server_name",
        Text("a host name"),
        Default(""),
        "With rediss://: name to verify. Empty: the host of the connection, which for sentinels and clusters is often an IP address.",
    ),
    key(
        "key_prefix",
        Text("1 to 64 letters, digits, \"_\", \".\", \"-\", \":\" or \"/\""),
        Default(DEFAULT_KEY_PREFIX),
        "Prefix of all keys. Use one per service: services with equal prefix and policy names share counters.",
    ),
    key(
        "instances",
        integer(1, 100_000),
        Default("1"),
        "Number of instances for on_store_failure = \"local\", until tidegate has counted them.",
    ),
    key(
        "timeout",
        POSITIVE_DURATION,
        Default("50ms"),
        "Timeout of a decision. Then on_store_failure applies.",
    ),
    key(
        "connect_timeout",
        POSITIVE_DURATION,
        Default("1s"),
        "Timeout of one connection attempt. At start, the listener waits this long for Redis.",
    ),
    table("breaker", &STORE_REDIS_BREAKER, "Circuit breaker."),
];

pub(in crate::config) const DEFAULT_REDIS_URL: &str = "redis://127.0.0.1:6379/0";
pub(in crate::config) const DEFAULT_KEY_PREFIX: &str = "tidegate";

pub(super) static STORE_REDIS_BREAKER: [SchemaKey; 2] = [
    key(
        "failures",
        integer(1, 1_000_000),
        Default("5"),
        "Consecutive failures that open the circuit breaker: requests then skip Redis.",
    ),
    key(
        "probe_interval",
        POSITIVE_DURATION,
        Default("500ms"),
        "Interval of background probes while the breaker is open.",
    ),
];
