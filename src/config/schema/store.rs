//! Where counters live: `[store]`.

use super::*;

pub(super) static STORE: [SchemaKey; 3] = [
    key(
        "kind",
        Keyword(&["memory", "redis"]),
        Default("memory"),
        "In this process only and lost at its end, or shared by all replicas.",
    ),
    key(
        "memory",
        Table(&STORE_MEMORY),
        Optional,
        "Bounds of the counters in this process.",
    ),
    key(
        "redis",
        Table(&STORE_REDIS),
        Optional,
        "Which Redis, and how long to wait for it.",
    ),
];

pub(super) static STORE_MEMORY: [SchemaKey; 2] = [
    key(
        "max_keys",
        integer(1, 1 << 32),
        Default("1000000"),
        "Most counters kept.",
    ),
    key(
        "max_bytes",
        byte_size(1 << 10, 1 << 50),
        Default("256MiB"),
        "Most memory for them. Keep it well below the container's limit.",
    ),
];

pub(super) static STORE_REDIS: [SchemaKey; 17] = [
    key(
        "topology",
        Keyword(&["standalone", "sentinel", "cluster"]),
        Default("standalone"),
        "One server, or whatever stands behind one address; a master that sentinels know; a Redis Cluster.",
    ),
    key(
        "url",
        Secret("\"redis://host:port/database\", \"rediss://…\" for TLS, or \"unix:///path\""),
        Default(DEFAULT_REDIS_URL),
        "Where Redis is, if it is one server. May hold user and password; password_file is better.",
    ),
    key(
        "urls",
        SecretList("URLs such as \"redis://host:port\""),
        Default(""),
        "With \"sentinel\": the sentinels; a database stands behind the slash. With \"cluster\": some nodes, which name the others.",
    ),
    key(
        "sentinel_master",
        Text("the name of a master"),
        Default("mymaster"),
        "What the sentinels call the master.",
    ),
    key(
        "sentinel_username",
        Text("the name of an ACL user"),
        Default(""),
        "The ACL user at the sentinels. Empty: the default user.",
    ),
    key(
        "sentinel_password_file",
        Text("the path of a file that holds the password"),
        Default(""),
        "Where the password for the sentinels is read from. Empty: none.",
    ),
    key(
        "username",
        Text("the name of an ACL user"),
        Default(""),
        "The ACL user. Empty: the default user.",
    ),
    key(
        "password_file",
        Text("the path of a file that holds the password"),
        Default(""),
        "Where the password is read from. White space at its end is ignored. Empty: none.",
    ),
    key(
        "ca",
        Text("the path of a PEM file"),
        Default(""),
        "With rediss://: the certificates that are trusted. Empty: those of the system.",
    ),
    key(
        "cert",
        Text("the path of a PEM file"),
        Default(""),
        "With rediss://: our certificate, for servers that ask for one, its chain behind it. Needs key.",
    ),
    key(
        "key",
        Text("the path of a PEM file"),
        Default(""),
        "The private key of cert.",
    ),
    key(
        "server_name",
        Text("a host name"),
        Default(""),
        "With rediss://: the name that certificates are checked against. Empty: the host that is connected to, which sentinels and nodes of a cluster often give as an address.",
    ),
    key(
        "key_prefix",
        Text("1 to 64 letters, digits, \"_\", \".\", \"-\", \":\" or \"/\""),
        Default(DEFAULT_KEY_PREFIX),
        "How all keys begin. One per service: services with the same prefix and policy names share counters.",
    ),
    key(
        "instances",
        integer(1, 100_000),
        Default("1"),
        "How many instances share the limits while Redis is away, for on_store_failure = \"local\", until they have been counted.",
    ),
    key(
        "timeout",
        POSITIVE_DURATION,
        Default("50ms"),
        "For one decision, all in. Passed: on_store_failure decides.",
    ),
    key(
        "connect_timeout",
        POSITIVE_DURATION,
        Default("1s"),
        "For one try to connect. The listener waits this long for the first connection at start.",
    ),
    key(
        "breaker",
        Table(&STORE_REDIS_BREAKER),
        Optional,
        "When to stop asking.",
    ),
];

pub(in crate::config) const DEFAULT_REDIS_URL: &str = "redis://127.0.0.1:6379/0";
pub(in crate::config) const DEFAULT_KEY_PREFIX: &str = "tidegate";

pub(super) static STORE_REDIS_BREAKER: [SchemaKey; 2] = [
    key(
        "failures",
        integer(1, 1_000_000),
        Default("5"),
        "Failures in a row after which requests don't ask Redis any more.",
    ),
    key(
        "probe_interval",
        POSITIVE_DURATION,
        Default("500ms"),
        "How often a probe in the background, never a user's request, then tries again.",
    ),
];
