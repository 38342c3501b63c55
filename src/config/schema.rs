//! Every key that exists: where it stands, what it takes, what holds without it, what it is for.
//!
//! Unknown keys, defaults, ranges and the words "expected …" all come from here, so that none of them
//! can differ from the others.

use super::values::duration_words;
use std::fmt;
use std::time::Duration;

/// One key of a table.
#[derive(Debug)]
pub(super) struct Key {
    pub name: &'static str,
    pub kind: Kind,
    pub need: Need,
    /// Sentences for `docs/CONFIGURATION.md`; the first one goes into messages too.
    pub doc: &'static str,
}

/// What holds without the key.
#[derive(Debug)]
pub(super) enum Need {
    Required,
    Optional,
    Default(&'static str),
}

/// What a key takes.
#[derive(Debug)]
pub(super) enum Kind {
    Bool,
    /// Both ends included.
    Whole {
        min: i64,
        max: i64,
    },
    /// A number as above, or a table that says where it comes from.
    WholeOrTable {
        min: i64,
        max: i64,
        table: &'static [Key],
    },
    /// A word, or a table that says more.
    WordOrTable {
        word: &'static str,
        table: &'static [Key],
    },
    /// 0 to 1.
    Fraction,
    Duration {
        min: Duration,
        max: Duration,
    },
    /// Bytes.
    Size {
        min: u64,
        max: u64,
    },
    Word(&'static [&'static str]),
    /// A text, and which.
    Text(&'static str),
    /// A text that no message repeats.
    Secret(&'static str),
    /// A list of texts, or one.
    Texts(&'static str),
    /// The same, of texts that no message repeats.
    Secrets(&'static str),
    Table(&'static [Key]),
    Tables(&'static [Key]),
    /// A table whose keys are names of the user's choice.
    Names(&'static str),
}

use Kind::{Bool, Fraction, Names, Secret, Secrets, Table, Tables, Text, Texts, Word};
use Need::{Default, Optional, Required};

/// Largest integer that a double holds exactly, which Redis computes with.
const MAX_UNITS: i64 = 1 << 53;
const DAY: Duration = Duration::from_secs(86_400);
const MAX_WARM_UP: Duration = Duration::from_micros(crate::limiter::MAX_WARM_UP_US);
const MAX_PERIOD: Duration = Duration::from_secs(400 * 86_400);

/// At least a millisecond: 0 is no way to switch this off.
const POSITIVE: Kind = Kind::Duration { min: Duration::from_millis(1), max: DAY };
const DURATION: Kind = Kind::Duration { min: Duration::ZERO, max: DAY };

/// The main file.
pub(super) static ROOT: [Key; 12] = [
    key(
        "include",
        Texts("paths or globs such as \"policies/*.toml\""),
        Default(""),
        "More files with [[policy]] tables, relative to this file. Nothing else may stand in them. This file's policies come first, then theirs by file name. A path that can't be read is an error.",
    ),
    key("listen", Table(&LISTEN), Optional, "Where clients connect."),
    key("upstream", Table(&UPSTREAM), Optional, "What requests are forwarded to."),
    key("client", Table(&CLIENT), Optional, "Who is the client?"),
    key(
        "path",
        Table(&PATH),
        Optional,
        "How a path is read for matching and keys. What is forwarded stays as it came.",
    ),
    key("store", Table(&STORE), Optional, "Where counters live."),
    key("defaults", Table(&DEFAULTS), Optional, "What a policy does that doesn't say otherwise."),
    key("response", Table(&RESPONSE), Optional, "What answers say about limits."),
    key("shutdown", Table(&SHUTDOWN), Optional, "How the end goes."),
    key("admin", Table(&ADMIN), Optional, "A port of its own: health, metrics, the configuration in effect."),
    key("log", Table(&LOG), Optional, "What is logged, to stderr."),
    key("policy", Tables(&POLICY), Optional, "The policies."),
];

/// An included file.
pub(super) static INCLUDED: [Key; 1] = [key("policy", Tables(&POLICY), Optional, "The policies.")];

static LISTEN: [Key; 7] = [
    key(
        "address",
        Text("an IP address and port such as \"0.0.0.0:8080\", or \"unix:/path\""),
        Default("0.0.0.0:8080"),
        "IP address and port that clients connect to, or a Unix socket, whose clients count as 127.0.0.1.",
    ),
    key(
        "proxy_protocol",
        Word(&["off", "require"]),
        Default("off"),
        "Whether every connection begins with a PROXY header, version 1 or 2, that says who the client is. \"require\": without one, or with a wrong one, it is closed.",
    ),
    key(
        "proxy_protocol_from",
        Texts("networks such as \"10.0.0.0/8\""),
        Default(""),
        "The load balancers that send it. Connections from all others are closed.",
    ),
    key(
        "max_connections",
        whole(1, 1_000_000),
        Default("10000"),
        "Connections served at a time; further ones wait in the kernel's backlog.",
    ),
    key(
        "threads",
        whole(0, 1024),
        Default("0"),
        "Worker threads. 0: as many as the container may use; a CPU limit counts.",
    ),
    key("tls", Table(&LISTEN_TLS), Optional, "TLS with clients."),
    key("http", Table(&LISTEN_HTTP), Optional, "Bounds on what a client may send, and how slowly."),
];

static LISTEN_TLS: [Key; 5] = [
    key(
        "cert",
        PEM,
        Required,
        "The certificate that clients see, with its chain behind it. For clients that name no host, or one that no other certificate has.",
    ),
    key("key", PEM, Required, "Its private key, without a passphrase."),
    key(
        "client_ca",
        PEM,
        Optional,
        "Certificates that have to stand behind those of clients. Needed unless client_auth is \"none\".",
    ),
    key(
        "client_auth",
        Word(&["none", "optional", "require"]),
        Default("none"),
        "Whether clients are asked for a certificate. \"optional\": it may be missing, but not be wrong. Who fails doesn't get past the handshake.",
    ),
    key(
        "certificates",
        Tables(&LISTEN_TLS_CERTIFICATES),
        Optional,
        "More certificates, chosen by the host that a client names (SNI).",
    ),
];

static LISTEN_TLS_CERTIFICATES: [Key; 2] = [
    key(
        "cert",
        PEM,
        Required,
        "A certificate and its chain. It is for the DNS names in it; *.example.com covers one label.",
    ),
    key("key", PEM, Required, "Its private key."),
];

const PEM: Kind = Text("the path of a PEM file");

static LISTEN_HTTP: [Key; 8] = [
    key("header_timeout", POSITIVE, Default("10s"), "For a whole request head, from its first byte."),
    key("idle_timeout", POSITIVE, Default("75s"), "How long a connection may stay open without a request."),
    key(
        "body_idle_timeout",
        POSITIVE,
        Default("30s"),
        "How long a request body may make no progress, or a client not read its response or what comes through a tunnel.",
    ),
    // hyper needs room for 8 KiB.
    key("max_header_bytes", size(8 << 10, 16 << 20), Default("64KiB"), "Largest request head. Above: 431."),
    key(
        "max_headers",
        whole(1, 10_000),
        Default("100"),
        "Most header fields of a request; an HTTP/2 client's cookies count as one. Above: 431.",
    ),
    key(
        "max_body_bytes",
        size(0, u64::MAX),
        Default("0"),
        "Largest request body. Above: 413. \"0\": no limit.",
    ),
    key(
        "max_concurrent_streams",
        whole(1, 1_000_000),
        Default("200"),
        "Requests at a time on one HTTP/2 connection.",
    ),
    key(
        "max_requests_waiting",
        whole(0, 1_000_000),
        Default("1024"),
        "Requests that leaky_bucket holds or that wait for an upstream connection, all together. Further ones get 503 at once.",
    ),
];

static UPSTREAM: [Key; 12] = [
    key(
        "url",
        Text("\"http://host:port\", \"https://host:port\", \"h2c://host:port\" or \"unix:/path\""),
        Required,
        "What to forward to, without a path. http and unix: HTTP/1.1; h2c: HTTP/2; https: what the server prefers of both.",
    ),
    key("connect_timeout", POSITIVE, Default("1s"), "For one try to connect, TLS included."),
    key(
        "response_timeout",
        DURATION,
        Default("60s"),
        "From the last byte of the request to the head of the response. Passed: 504. \"0\": no limit.",
    ),
    key(
        "body_idle_timeout",
        DURATION,
        Default("0"),
        "How long a response body may make no progress, or a tunnel (WebSocket) neither way. \"0\": no limit, as event streams and long polls need.",
    ),
    key(
        "pool_idle_timeout",
        POSITIVE,
        Default("90s"),
        "How long an idle connection is kept. Set it below the keep-alive time of your app (5 s in Node.js).",
    ),
    key(
        "pool_max_idle",
        whole(0, 1_000_000),
        Default("256"),
        "Idle connections kept, over all workers. 0: none.",
    ),
    key(
        "preserve_host",
        Bool,
        Default("true"),
        "Forward the client's Host. false: send the host of the URL.",
    ),
    key(
        "max_connections",
        whole(1, 1_000_000),
        Default("1024"),
        "Connections to the upstream at a time, over all workers; open WebSockets count. One by HTTP/2 carries up to 100 requests.",
    ),
    key(
        "queue_timeout",
        DURATION,
        Default("1s"),
        "How long a request waits for one of them, or for its turn on one. Passed: 503.",
    ),
    key(
        "retry_connect",
        whole(0, 100),
        Default("1"),
        "Further tries to connect when no byte of the request was sent.",
    ),
    key(
        "retry_idempotent",
        Bool,
        Default("true"),
        "Send a request once more when a reused connection turns out to be dead. Only without a body and with an idempotent method.",
    ),
    key("tls", Table(&UPSTREAM_TLS), Optional, "For https. Files are read again when they change."),
];

static UPSTREAM_TLS: [Key; 4] = [
    key("ca", PEM, Optional, "Certificates to trust. Absent: the system's."),
    key(
        "cert",
        Text("the path of a PEM file"),
        Optional,
        "Our certificate and its chain, for an upstream that asks for one.",
    ),
    key("key", Text("the path of a PEM file"), Optional, "Its private key."),
    key(
        "server_name",
        Text("a host name"),
        Optional,
        "The name that is verified. Absent: the host of the URL.",
    ),
];

static CLIENT: [Key; 5] = [
    key(
        "trusted_proxies",
        Texts("networks such as \"10.0.0.0/8\""),
        Default(""),
        "Proxies in front of tidegate, e.g. an ingress, whose forwarding header is believed.",
    ),
    key(
        "ip_header",
        Text("the name of a header"),
        Default("x-forwarded-for"),
        "That header. Or \"forwarded\", or any other that holds one address, such as \"x-real-ip\".",
    ),
    key(
        "ipv6_prefix",
        whole(0, 128),
        Default("64"),
        "IPv6 clients are told apart by this many bits. Whoever has one address of a /64 has all of them.",
    ),
    key("ipv4_prefix", whole(0, 32), Default("32"), "IPv4 clients are told apart by this many bits."),
    key("jwt", Table(&CLIENT_JWT), Optional, "Whose tokens are believed, for jwt in keys and matches."),
];

static CLIENT_JWT: [Key; 4] = [
    key(
        "keys_file",
        Text("the path of a JWK set"),
        Default(""),
        "Keys that tokens are verified by, as JSON (RFC 7517). Read again when it changes.",
    ),
    key(
        "secret_file",
        Text("the path of a file that holds the secret"),
        Default(""),
        "Instead of keys: the secret of HS256, HS384 and HS512. White space at its end is ignored. Read again when it changes.",
    ),
    key(
        "header",
        Text("the name of a header"),
        Default("authorization"),
        "Where the token is. In authorization it stands behind \"Bearer\", in others that isn't needed.",
    ),
    key(
        "verify",
        Bool,
        Default("true"),
        "false: claims are believed whoever wrote the token. Only where something before tidegate has verified it.",
    ),
];

static PATH: [Key; 6] = [
    key(
        "normalize",
        Bool,
        Default("true"),
        "Match on the normalized path: needless escapes decoded, . and .. resolved. false: byte for byte as it came, and the other keys here do nothing.",
    ),
    key("merge_slashes", Bool, Default("true"), "// is /."),
    key(
        "escaped_slashes",
        Word(&["both", "reject", "keep", "decode"]),
        Default("both"),
        "How %2F, %5C and \\ are read. As separators and as part of the segment, and a policy matches if either does; such a request gets 400; part of the segment; separators.",
    ),
    key(
        "trailing_slash",
        Word(&["ignore", "significant"]),
        Default("ignore"),
        "Whether /a/ is /a. \"ignore\": it is.",
    ),
    key(
        "path_parameters",
        Word(&["strip", "keep"]),
        Default("strip"),
        "Whether /a;x=1 is /a. \"strip\": it is.",
    ),
    key(
        "case_sensitive",
        Bool,
        Default("true"),
        "Whether /A and /a differ. Say false if your app thinks they don't.",
    ),
];

static STORE: [Key; 3] = [
    key(
        "kind",
        Word(&["memory", "redis"]),
        Default("memory"),
        "In this process only and lost at its end, or shared by all replicas.",
    ),
    key("memory", Table(&STORE_MEMORY), Optional, "Bounds of the counters in this process."),
    key("redis", Table(&STORE_REDIS), Optional, "Which Redis, and how long to wait for it."),
];

static STORE_MEMORY: [Key; 2] = [
    key("max_keys", whole(1, 1 << 32), Default("1000000"), "Most counters kept."),
    key(
        "max_bytes",
        size(1 << 10, 1 << 50),
        Default("256MiB"),
        "Most memory for them. Keep it well below the container's limit.",
    ),
];

static STORE_REDIS: [Key; 17] = [
    key(
        "topology",
        Word(&["standalone", "sentinel", "cluster"]),
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
        Secrets("URLs such as \"redis://host:port\""),
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
    key("username", Text("the name of an ACL user"), Default(""), "The ACL user. Empty: the default user."),
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
    key("key", Text("the path of a PEM file"), Default(""), "The private key of cert."),
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
        whole(1, 100_000),
        Default("1"),
        "How many instances share the limits while Redis is away, for on_store_failure = \"local\", until they have been counted.",
    ),
    key("timeout", POSITIVE, Default("50ms"), "For one decision, all in. Passed: on_store_failure decides."),
    key(
        "connect_timeout",
        POSITIVE,
        Default("1s"),
        "For one try to connect. The listener waits this long for the first connection at start.",
    ),
    key("breaker", Table(&STORE_REDIS_BREAKER), Optional, "When to stop asking."),
];

pub(super) const DEFAULT_REDIS_URL: &str = "redis://127.0.0.1:6379/0";
pub(super) const DEFAULT_KEY_PREFIX: &str = "tidegate";

static STORE_REDIS_BREAKER: [Key; 2] = [
    key(
        "failures",
        whole(1, 1_000_000),
        Default("5"),
        "Failures in a row after which requests don't ask Redis any more.",
    ),
    key(
        "probe_interval",
        POSITIVE,
        Default("500ms"),
        "How often a probe in the background, never a user's request, then tries again.",
    ),
];

static DEFAULTS: [Key; 3] = [
    key(
        "on_store_failure",
        ON_STORE_FAILURE,
        Default("open"),
        "When the store gives no answer: forward; answer 503 with Retry-After; or go on in this process, with its share of the limits.",
    ),
    key("algorithm", ALGORITHM, Default("sliding_log"), "How the units of a limit come back."),
    key(
        "missing_key",
        MISSING_KEY,
        Default("shared"),
        "When a key part is absent or empty: one quota for all such requests; the policy doesn't apply, so dropping a header gets round it; 400.",
    ),
];

const ON_STORE_FAILURE: Kind = Word(&["open", "closed", "local"]);
const ALGORITHM: Kind =
    Word(&["sliding_log", "sliding_window", "fixed_window", "token_bucket", "leaky_bucket", "concurrency"]);
const MISSING_KEY: Kind = Word(&["shared", "skip", "reject"]);

static RESPONSE_CORS: [Key; 1] = [key(
    "allow_origins",
    Texts("origins such as \"https://app.example.com\", or \"*\""),
    Default(""),
    "Whose scripts may read tidegate's own answers in a browser, such as a 429 and its Retry-After. What your app answers stays as it is.",
)];

static RESPONSE: [Key; 3] = [
    key(
        "headers",
        Word(&["standard", "legacy", "both", "none"]),
        Default("both"),
        "RateLimit and RateLimit-Policy with every limit that applied; X-RateLimit-* for the tightest; both; none.",
    ),
    key(
        "legacy_reset",
        Word(&["delta", "epoch"]),
        Default("delta"),
        "X-RateLimit-Reset: seconds from now, or since 1970.",
    ),
    key("cors", Table(&RESPONSE_CORS), Optional, "Whose scripts may read answers in a browser."),
];

static SHUTDOWN: [Key; 2] = [
    key("delay", DURATION, Default("0s"), "Keep serving this long after SIGTERM."),
    key("grace", DURATION, Default("25s"), "Then let requests in flight finish this long."),
];

static ADMIN: [Key; 4] = [
    key(
        "address",
        Text("an IP address and port such as \"127.0.0.1:9090\""),
        Default("127.0.0.1:9090"),
        "Never the clients' port. Not on loopback: token_file must be set.",
    ),
    key(
        "probes",
        Text("an IP address and port such as \"0.0.0.0:9091\""),
        Default(""),
        "A second port with /livez, /readyz and /metrics only, for kubelet and Prometheus. Empty: none.",
    ),
    key(
        "token_file",
        Text("the path of a file that holds the token"),
        Default(""),
        "Bearer token. With an address that is not on loopback it is asked for everything but health and metrics.",
    ),
    key(
        "allowed_hosts",
        Texts("host names such as \"admin.internal\""),
        Default(""),
        "Names in Host that are answered, besides localhost and addresses: other names may be DNS rebinding.",
    ),
];

static LOG: [Key; 4] = [
    key("format", Word(&["json", "text"]), Default("json"), "One JSON object per line, or text."),
    key(
        "level",
        Text(
            "\"error\", \"warn\", \"info\", \"debug\", \"trace\" or \"off\", perhaps with exceptions as in \"info,tidegate::proxy=debug\"",
        ),
        Default("info"),
        "What is worth a line.",
    ),
    key("access", Word(&["off", "rejected", "all"]), Default("rejected"), "Which requests get a line."),
    key("access_sample", Fraction, Default("1.0"), "The share of those that does."),
];

static POLICY: [Key; 17] = [
    key(
        "name",
        Text("a letter or digit, then up to 62 letters, digits, \"_\", \".\" or \"-\""),
        Required,
        "Unique. Appears in headers and logs, and is part of the counters' identity: renaming a policy starts new ones.",
    ),
    key("priority", whole(i64::MIN, i64::MAX), Default("0"), "Higher first; file order among equals."),
    key("match", Table(&MATCH), Optional, "Which requests. Absent: all."),
    key(
        "key",
        Texts("key parts such as \"client_ip\" or \"header:x-user-id\""),
        Default(""),
        "Whose quota. Empty: one for everybody who matches.",
    ),
    key(
        "limit",
        Table(&LIMIT),
        Optional,
        "How much. A policy with action \"limit\" has this or limits, others neither.",
    ),
    key("limits", Tables(&LIMIT), Optional, "The same, several."),
    key(
        "action",
        Word(&["limit", "allow", "deny"]),
        Default("limit"),
        "Limit; exempt, so that no later policy applies; refuse with 403, and nothing is counted.",
    ),
    key(
        "mode",
        Word(&["enforce", "shadow", "off"]),
        Default("enforce"),
        "A shadow policy decides, counts (on counters of its own) and logs, but stops nothing. \"off\": as if it weren't there.",
    ),
    key(
        "cost",
        Kind::WholeOrTable { min: 0, max: MAX_UNITS, table: &COST },
        Default("1"),
        "Units that one request takes from each limit, or where it is said: in a header of the request, or in the response. Above a limit's requests nothing ever passes.",
    ),
    key(
        "block_for",
        Kind::Duration { min: Duration::from_millis(1), max: MAX_PERIOD },
        Optional,
        "Once a limit of this policy refuses a key, the policy refuses it this long. Knocking doesn't prolong it. A shadow policy blocks nobody.",
    ),
    key(
        "count_rejected",
        Bool,
        Default("false"),
        "true: a request that this policy refuses uses its quota like an admitted one (never more than there is), so who goes on knocking stays out. Not with concurrency.",
    ),
    key(
        "shards",
        whole(1, 64),
        Default("1"),
        "Redis Cluster only: spreads one very hot key over so many counters, each with its part of the limit. A refusal asks all of them. Not with on_store_failure = \"local\".",
    ),
    key(
        "lease",
        Kind::WordOrTable { word: "auto", table: &LEASE },
        Optional,
        "Takes units from Redis in advance, and hands them out without asking it. \"auto\": as many as the rate of requests suggests. Not with leaky_bucket, concurrency, warm_up, block_for, count_rejected, shards or an estimate.",
    ),
    key("missing_key", MISSING_KEY, Optional, "As in [defaults]."),
    key("on_store_failure", ON_STORE_FAILURE, Optional, "As in [defaults]."),
    key("reject", Table(&REJECT), Optional, "Your own answer to refused clients."),
    key(
        "override",
        Tables(&OVERRIDE),
        Optional,
        "Limits of their own for some keys. The first that matches replaces all limits of the policy.",
    ),
];

static COST: [Key; 6] = [
    key(
        "header",
        Text("the name of a header"),
        Required,
        "Holds the units that the request takes, in digits. A cost has either this, or estimate and actual.",
    ),
    key("default", whole(0, MAX_UNITS), Default("1"), "Units of a request without the header."),
    key("min", whole(0, MAX_UNITS), Default("1"), "The fewest that the header may say."),
    key(
        "max",
        whole(0, MAX_UNITS),
        Default("100"),
        "The most that it may say, and what a request takes whose header is anything else: empty, signed, a fraction, out of range, repeated.",
    ),
    key(
        "estimate",
        whole(1, MAX_UNITS),
        Required,
        "Units that a request takes when it comes. When its response says what it really took, the difference is charged or given back; if it doesn't say, the estimate stands.",
    ),
    key(
        "actual",
        Text("\"response_header:NAME\" or \"response_json:/POINTER\""),
        Required,
        "Where the response says it: a header (or trailer), or a number in a JSON body, given by a JSON pointer such as /usage/total_tokens.",
    ),
];

static LEASE: [Key; 2] = [
    key("size", whole(1, 1_000_000), Required, "Units in hand at most, per key and proxy."),
    key(
        "ttl",
        Kind::Duration { min: Duration::from_millis(1), max: MAX_PERIOD },
        Default("100ms"),
        "How long they are kept, at most half of the policy's shortest period. Unused ones are given back then.",
    ),
];

static MATCH: [Key; 10] = [
    key("methods", Texts("methods such as \"GET\""), Default(""), "GET also means HEAD."),
    key(
        "hosts",
        Texts("hosts such as \"example.com\" or \"*.example.com\""),
        Default(""),
        "Without port. \"*.example.com\" is every name below it.",
    ),
    key(
        "path",
        Texts("path patterns such as \"/api/**\""),
        Default(""),
        "{name} and * are one segment, ** at the end is any rest.",
    ),
    key(
        "path_regex",
        Text("a regular expression"),
        Optional,
        "For what patterns can't say. It need not match the whole path: use ^ and $.",
    ),
    key(
        "headers",
        Names(TESTS),
        Optional,
        "Conditions on headers. With several values of a name, any may fulfil one.",
    ),
    key("query", Names(TESTS), Optional, "Conditions on query parameters."),
    key("cookies", Names(TESTS), Optional, "Conditions on cookies."),
    key("client_ips", Texts("networks such as \"10.0.0.0/8\""), Default(""), "Networks of clients."),
    key(
        "jwt",
        Names(TESTS),
        Optional,
        "Conditions on claims of the request's token: a name, or a JSON pointer such as \"/realm_access/roles\". Of a list, any element may fulfil one. Needs [client.jwt].",
    ),
    key("not", Table(&MATCH), Optional, "A whole match that must not hold."),
];

const TESTS: &str =
    "a table such as { name = \"value\" }, { name = { regex = \"…\" } } or { name = { present = true } }";

/// A condition that isn't just a text.
pub(super) static TEST: [Key; 2] = [
    key("regex", Text("a regular expression"), Optional, "The value contains a match."),
    key("present", Bool, Optional, "Whether there is a value."),
];

static LIMIT: [Key; 12] = [
    key(
        "requests",
        whole(0, MAX_UNITS),
        Required,
        "Units per period, or requests in flight. 0 refuses everything. Above 100,000 with sliding_log, check warns about the memory.",
    ),
    key(
        "per",
        Kind::Duration { min: Duration::from_millis(1), max: MAX_PERIOD },
        Optional,
        "The period. Required, but for concurrency, which has none.",
    ),
    key("algorithm", ALGORITHM, Optional, "As in [defaults]."),
    key(
        "buckets",
        whole(2, 100),
        Optional,
        "sliding_window only: sub-windows per period; 10 if absent. More are more exact and take more memory.",
    ),
    key(
        "burst",
        whole(1, MAX_UNITS),
        Optional,
        "token_bucket only: units that may be taken at once; `requests` if absent.",
    ),
    key(
        "warm_up",
        Kind::Duration { min: Duration::from_millis(1), max: MAX_WARM_UP },
        Optional,
        "token_bucket only: for apps that are slow after a pause. A bucket that nobody took from for this long allows a third of burst at once and a third of the rate; both grow to the full in as long again. A cost may not be above that third.",
    ),
    key(
        "max_delay",
        DURATION,
        Optional,
        "leaky_bucket only: how long a request that comes too early is held at most; 1 s if absent. One that would wait longer is refused.",
    ),
    key(
        "offset",
        Kind::Duration { min: Duration::ZERO, max: MAX_PERIOD },
        Optional,
        "fixed_window only: windows start this much after multiples of per since 1970, UTC. Less than per.",
    ),
    key(
        "lease_ttl",
        Kind::Duration { min: Duration::from_secs(1), max: Duration::from_secs(3600) },
        Optional,
        "concurrency only: how long a crashed sidecar's slots are kept; 10 s if absent. Living ones renew theirs at a third of it.",
    ),
    key(
        "max_duration",
        DURATION,
        Optional,
        "concurrency only: a request that is still in flight after this is ended: with 504, or broken off. Absent or 0: never.",
    ),
    key(
        "name",
        Text("a letter or digit, then up to 62 letters, digits, \"_\", \".\" or \"-\""),
        Optional,
        "How it is called in the rate-limit fields. Absent: the policy's name, with -2, -3 behind for further ones.",
    ),
    key(
        "unit",
        Text("1 to 32 letters, digits, \"_\" or \"-\""),
        Optional,
        "What is counted, if it isn't requests: \"tokens\" becomes qu=\"tokens\".",
    ),
];

static REJECT: [Key; 4] = [
    key("status", whole(400, 599), Optional, "Absent: 429, for deny 403."),
    key("body", Text("a text"), Default(""), "The body."),
    key("content_type", Text("a media type"), Default("text/plain; charset=utf-8"), "Its type."),
    key("headers", Names("a table such as { x-reason = \"quota\" }"), Optional, "More header fields."),
];

static OVERRIDE: [Key; 3] = [
    key("key", Texts("one value per position of the policy's key"), Required, "\"*\" is any value."),
    key("limit", Table(&LIMIT), Optional, "How much."),
    key("limits", Tables(&LIMIT), Optional, "The same, several."),
];

const fn key(name: &'static str, kind: Kind, need: Need, doc: &'static str) -> Key {
    Key { name, kind, need, doc }
}

const fn whole(min: i64, max: i64) -> Kind {
    Kind::Whole { min, max }
}

const fn size(min: u64, max: u64) -> Kind {
    Kind::Size { min, max }
}

/// The key called `name` in a table.
pub(super) fn find(table: &'static [Key], name: &str) -> Option<&'static Key> {
    table.iter().find(|key| key.name == name)
}

/// The key at a dotted path below the root; not inside policies.
pub(super) fn find_path<'p>(path: impl IntoIterator<Item = &'p str>) -> Option<&'static Key> {
    let mut table: &'static [Key] = &ROOT;
    let mut found = None;
    for name in path {
        let key = find(table, name)?;
        table = if let Table(inner) = &key.kind { inner } else { &[] };
        found = Some(key);
    }
    found
}

/// What a user who wrote `name` into `table` might have meant.
pub(super) fn advice(table: &'static [Key], name: &str) -> String {
    let likeness = |key: &Key| strsim::jaro_winkler(key.name, &name.to_ascii_lowercase());
    let best = table.iter().max_by(|a, b| likeness(a).total_cmp(&likeness(b)));
    if let Some(key) = best.filter(|key| likeness(key) > 0.8) {
        // The first sentence says enough.
        let gist = key.doc.split_once(". ").map_or(key.doc, |(first, _)| first).trim_end_matches('.');
        return format!("did you mean \"{}\"? ({gist}.)", key.name);
    }
    if let Some(path) = paths().into_iter().find(|path| path.rsplit('.').next() == Some(name)) {
        return format!("did you mean {path}?");
    }
    let known: Vec<&str> = table.iter().map(|key| key.name).collect();
    format!("expected {}", any_of(&known))
}

/// The dotted paths of all keys outside of policies that take a value.
pub(super) fn paths() -> Vec<String> {
    fn collect(table: &'static [Key], above: &str, paths: &mut Vec<String>) {
        for key in table {
            match &key.kind {
                Table(inner) => collect(inner, &format!("{above}{}.", key.name), paths),
                Tables(_) if above.is_empty() => {}
                _ => paths.push(format!("{above}{}", key.name)),
            }
        }
    }
    let mut paths = Vec::new();
    collect(&ROOT, "", &mut paths);
    paths
}

fn any_of(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => quoted.concat(),
    }
}

/// What would be right: follows "expected".
impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bool => f.write_str("true or false"),
            Kind::Whole { min: i64::MIN, max: i64::MAX } => f.write_str("a whole number"),
            Kind::Whole { min, max } => write!(f, "a whole number from {min} to {max}"),
            Kind::WholeOrTable { min, max, .. } => {
                write!(
                    f,
                    "a whole number from {min} to {max}, or a table such as {{ header = \"x-cost\", max = 100 }}"
                )
            }
            Kind::WordOrTable { word, .. } => {
                write!(f, "\"{word}\", or a table such as {{ size = 50, ttl = \"100ms\" }}")
            }
            Fraction => f.write_str("a number from 0 to 1"),
            Kind::Duration { min, max } => {
                write!(f, "a duration such as \"250ms\", \"1s\", \"5m\"")?;
                match min.is_zero() {
                    true => write!(f, ", at most {}", duration_words(*max)),
                    false => write!(f, ", from {} to {}", duration_words(*min), duration_words(*max)),
                }
            }
            Kind::Size { min, max } => {
                write!(f, "a size such as \"64KiB\", \"1MiB\"")?;
                if *min > 0 {
                    write!(f, ", at least {min} bytes")?;
                }
                if *max < u64::MAX { write!(f, ", at most {max} bytes") } else { Ok(()) }
            }
            Word(words) => f.write_str(&any_of(words)),
            Text(what) | Secret(what) | Names(what) => f.write_str(what),
            Texts(what) | Secrets(what) => write!(f, "a list of {what}"),
            Table(_) => f.write_str("a table"),
            Tables(_) => f.write_str("a list of tables"),
        }
    }
}
