//! Keys of `[[policy]]`.

use super::key::*;
use std::time::Duration;

pub(super) static POLICY: [SchemaKey; 22] = [
    required(
        "name",
        Text("a letter or digit, then up to 62 letters, digits, \"_\", \".\" or \"-\""),
        "Unique name. Renaming a policy starts new counters.",
    ),
    key(
        "priority",
        integer(i64::MIN, i64::MAX),
        Default("0"),
        "Higher values first; equal values in file order.",
    ),
    table(
        "match",
        &MATCH,
        "Requests that the policy applies to. Absent: all.",
    ),
    key(
        "key",
        TextList("key parts such as \"client_ip\" or \"header:x-user-id\""),
        Default(""),
        "Key parts: each combination of values has its own quota. Empty: one quota for all. `;hash` after header, query, cookie, jwt or descriptor stores only a hash of the value. It is the default for names such as authorization, api-key, token and session; `;plain` stores the value. \"a | b | c\" lists alternatives: the first one present in the request is used.",
    ),
    table(
        "limit",
        &LIMIT,
        "The limit. Required with action \"limit\", unless limits is set.",
    ),
    optional("limits", TableList(&LIMIT), "Several limits."),
    key(
        "action",
        Keyword(&["limit", "allow", "deny"]),
        Default("limit"),
        "Limit requests; exempt them from later policies; reject them with 403 without counting.",
    ),
    key(
        "mode",
        Keyword(&["enforce", "mark", "shadow", "off"]),
        Default("enforce"),
        "\"mark\" forwards requests over the limit with X-Tidegate-Over: POLICY (defaults.mark_header). \"shadow\" counts in separate counters and rejects nothing. \"off\": only validated.",
    ),
    key(
        "report",
        Bool,
        Default("true"),
        "false: no response has the policy's limits or its name. Logs and metrics have both.",
    ),
    key(
        "cost",
        ValueKind::IntegerOrTable {
            min: 0,
            max: MAX_UNITS,
            table: &COST,
        },
        Default("1"),
        "Units that a request takes from each limit. A table reads them from a header or the response.",
    ),
    table(
        "count_when",
        &COUNT_WHEN,
        "Counts a request only if its response has one of these statuses. Units are reserved at arrival and returned otherwise. Not with lease, shards, count_rejected, [check], descriptors or a cost that is not a number.",
    ),
    optional(
        "block_for",
        duration(Duration::from_millis(1), MAX_PERIOD),
        "After a rejection, reject the same key for this long. Only in mode \"enforce\".",
    ),
    key(
        "count_rejected",
        Bool,
        Default("false"),
        "true: rejected requests use quota too. Not with concurrency.",
    ),
    key(
        "shards",
        integer(1, 64),
        Default("1"),
        "Redis Cluster only: splits a hot key over this many counters. Not with on_store_failure = \"local\".",
    ),
    optional(
        "lease",
        ValueKind::KeywordOrTable {
            keyword: "auto",
            table: &LEASE,
        },
        "Leases units from Redis, to decide without a round trip. Not with leaky_bucket, concurrency, warm_up, block_for, count_rejected, shards or an estimate.",
    ),
    key(
        "scope",
        Keyword(&["shared", "instance"]),
        Default("shared"),
        "\"instance\": each instance counts for itself, in memory (bounded by store.memory), beside policies in Redis. A request is charged by all or none. Not with lease, shards or dynamic; on_store_failure has no effect.",
    ),
    optional(
        "counter",
        Text("a letter or digit, then up to 62 letters, digits, \"_\", \".\" or \"-\""),
        "Policies with the same counter share one quota per key. They must have the same key, mode and kind of limits; requests, burst and max_delay may differ. Each policy compares the shared usage with its own limit. If several match a request, only the strictest charges it. Not with dynamic.",
    ),
    optional("missing_key", MISSING_KEY, "As in [defaults]."),
    optional(
        "on_store_failure",
        ON_STORE_FAILURE,
        "As in [defaults]. Descriptor policies: \"local\", or else UNAVAILABLE, and Envoy's failure_mode_deny decides.",
    ),
    table("reject", &REJECT, "A custom response to rejected requests."),
    optional(
        "override",
        TableList(&OVERRIDE),
        "Other limits, an action or a mode for specific keys. Precedence: exact keys, then patterns with more literal text (the first key position decides first), then \"*\", then file order.",
    ),
    key(
        "dynamic",
        Bool,
        Default("false"),
        "true: `tidegate overrides` and the admin port set limits for single keys, or block them, in the store. A change holds from the next decision and wins over [[policy.override]]. Not with shards.",
    ),
];

pub(super) static COUNT_WHEN: [SchemaKey; 1] = [required(
    "status",
    ValueKind::StatusList,
    "Statuses that count. Those of tidegate's own 502 and 504 count only if listed; a client that leaves early always counts.",
)];

pub(in crate::config) static COST: [SchemaKey; 6] = [
    required(
        "header",
        Text("the name of a header"),
        "Request header that holds the cost in digits. Either this, or estimate and actual.",
    ),
    key(
        "default",
        integer(0, MAX_UNITS),
        Default("1"),
        "Cost without the header.",
    ),
    key(
        "min",
        integer(0, MAX_UNITS),
        Default("1"),
        "Smallest valid cost in the header.",
    ),
    key(
        "max",
        integer(0, MAX_UNITS),
        Default("100"),
        "Largest valid cost in the header. Also the cost if the header is invalid or repeated.",
    ),
    required(
        "estimate",
        integer(1, MAX_UNITS),
        "Units charged on arrival. The response settles the difference.",
    ),
    required(
        "actual",
        Text("\"response_header:NAME\" or \"response_json:/POINTER\""),
        "Source of the actual cost: a response header or trailer, or a JSON pointer to a number in the body.",
    ),
];

pub(super) static LEASE: [SchemaKey; 2] = [
    required(
        "size",
        integer(1, 1_000_000),
        "Most units leased at a time, per key and proxy.",
    ),
    key(
        "ttl",
        duration(Duration::from_millis(1), MAX_PERIOD),
        Default("100ms"),
        "How long units are leased, at most half of the shortest period.",
    ),
];

pub(in crate::config) static MATCH: [SchemaKey; 14] = [
    key(
        "methods",
        TextList("methods such as \"GET\""),
        Default(""),
        "Methods. GET includes HEAD.",
    ),
    key(
        "hosts",
        TextList("hosts such as \"example.com\" or \"*.example.com\""),
        Default(""),
        "Hosts without port. \"*.example.com\" matches every subdomain.",
    ),
    key(
        "path",
        TextList("path patterns such as \"/api/**\""),
        Default(""),
        "Path patterns: {name} and * match one segment, ** at the end matches any rest.",
    ),
    optional(
        "path_regex",
        Text("a regular expression"),
        "A regular expression. Use ^ and $ to match the whole path.",
    ),
    optional(
        "headers",
        Map(VALUE_CONDITION_FORMAT),
        "Conditions on headers. Of several values of a name, one must match.",
    ),
    optional(
        "query",
        Map(VALUE_CONDITION_FORMAT),
        "Conditions on query parameters.",
    ),
    optional(
        "cookies",
        Map(VALUE_CONDITION_FORMAT),
        "Conditions on cookies.",
    ),
    key(
        "client_ips",
        TextList("networks such as \"10.0.0.0/8\""),
        Default(""),
        "Networks of clients.",
    ),
    optional(
        "jwt",
        Map(VALUE_CONDITION_FORMAT),
        "Conditions on token claims, by name or JSON pointer. Of a list, one element must match.",
    ),
    optional(
        "domain",
        Text("the domain of Envoy's filter"),
        "Domain of rate-limit service calls. With domain or descriptors, only not is allowed beside them.",
    ),
    optional(
        "descriptors",
        Map(DESCRIPTOR_ENTRY_FORMAT),
        "Entries of a descriptor, in any order; \"*\" matches any value. Absent with domain: any.",
    ),
    key(
        "descriptors_match",
        ValueKind::Keyword(&["all", "subset"]),
        Default("all"),
        "\"all\": a descriptor has exactly the entries in descriptors. \"subset\": it may have more.",
    ),
    optional(
        "any",
        TableList(&MATCH),
        "Matches of which one must hold, beside the other conditions.",
    ),
    table("not", &MATCH, "A match that must not hold."),
];

const VALUE_CONDITION_FORMAT: &str = "a table such as { name = \"value\" }, { name = [\"one\", \"other\"] }, { name = { regex = \"…\" } } or { name = { present = true } }";

const DESCRIPTOR_ENTRY_FORMAT: &str = "a table such as { generic_key = \"api\", remote_address = \"*\" }, where \"*\" matches any value, or { name = { regex = \"…\" } }";

/// Keys of a condition that is a table.
pub(in crate::config) static VALUE_CONDITION: [SchemaKey; 2] = [
    optional(
        "regex",
        Text("a regular expression"),
        "The value contains a match.",
    ),
    optional("present", Bool, "Whether the value must be present."),
];

pub(in crate::config) static LIMIT: [SchemaKey; 17] = [
    optional(
        "requests",
        integer(0, MAX_UNITS),
        "Units per period, or requests in flight. 0 rejects every request. Required, unless requests_from is set.",
    ),
    optional(
        "requests_from",
        Text("jwt:CLAIM, header:NAME, client_cert:san or client_cert:cn"),
        "Takes requests from the request: a claim of a verified token, a header from client.trusted_proxies, or a field of the client certificate. Not with concurrency, warm_up, lease, shards, descriptors or on_store_failure = \"local\".",
    ),
    optional(
        "default",
        integer(0, MAX_UNITS),
        "Required with requests_from. The amount if the field is absent, repeated or not a whole number.",
    ),
    optional(
        "max",
        integer(0, MAX_UNITS),
        "Required with requests_from. Larger amounts are reduced to this one.",
    ),
    optional(
        "per",
        ValueKind::DurationOrKeyword {
            min: Duration::from_millis(1),
            max: MAX_PERIOD,
            keywords: &["day", "week", "month"],
        },
        "The period: a duration, or with fixed_window a calendar \"day\", \"week\" (from Monday) or \"month\". Required, except with concurrency.",
    ),
    optional(
        "tz",
        Text("the IANA name of a time zone such as \"Europe/Berlin\""),
        "Time zone of a day, week or month. Absent: UTC.",
    ),
    optional("algorithm", ALGORITHM, "As in [defaults]."),
    optional(
        "buckets",
        integer(2, 100),
        "sliding_window only: buckets per period. Absent: 10.",
    ),
    optional(
        "burst",
        integer(1, MAX_UNITS),
        "token_bucket only: capacity of the bucket. Absent: requests, also those of requests_from.",
    ),
    optional(
        "warm_up",
        duration(Duration::from_millis(1), MAX_WARM_UP),
        "token_bucket only: for apps that are slow after a pause. After this long idle, a third of burst and rate; both grow back in the same time. No cost may exceed that third.",
    ),
    optional(
        "max_delay",
        DURATION,
        "leaky_bucket only: longest delay of a request. One that would wait longer is rejected. Absent: 1 s.",
    ),
    optional(
        "offset",
        duration(Duration::ZERO, MAX_PERIOD),
        "fixed_window only: offset of window starts from multiples of per since 1970 UTC. Less than per.",
    ),
    optional(
        "lease_ttl",
        duration(Duration::from_secs(1), Duration::from_secs(3600)),
        "concurrency only: how long slots of a crashed sidecar stay taken, renewed at a third of it. Absent: 10 s.",
    ),
    optional(
        "max_duration",
        DURATION,
        "concurrency only: ends requests after this time, with 504 or by aborting the response. Absent or 0: never.",
    ),
    key(
        "release",
        Keyword(&["response", "upstream"]),
        Default("response"),
        "concurrency only: a slot is free at the end of the response to the client, or of the upstream's response even if the client left. \"upstream\" needs max_duration.",
    ),
    optional(
        "name",
        Text("a letter or digit, then up to 62 letters, digits, \"_\", \".\" or \"-\""),
        "Name in the rate-limit fields. Absent: the policy's name; further limits add -2, -3.",
    ),
    optional(
        "unit",
        Text("1 to 32 letters, digits, \"_\" or \"-\""),
        "Unit counted, if not requests: \"tokens\" becomes qu=\"tokens\".",
    ),
];

pub(super) static REJECT: [SchemaKey; 4] = [
    optional(
        "status",
        integer(400, 599),
        "Status code. Absent: 429, or 403 with action \"deny\".",
    ),
    key("body", Text("a text"), Default(""), "Body of the response."),
    key(
        "content_type",
        Text("a media type"),
        Default("text/plain; charset=utf-8"),
        "Content-Type of the body.",
    ),
    optional(
        "headers",
        Map("a table such as { x-reason = \"quota\" }"),
        "Additional header fields, such as { x-reason = \"quota\" }.",
    ),
];

pub(super) static OVERRIDE: [SchemaKey; 5] = [
    required(
        "key",
        TextList("one value per position of the policy's key"),
        "One value or pattern per position. \"*\" stands for any text: \"acme-*\"; alone, for any value. \"\\\\*\" is a star.",
    ),
    table(
        "limit",
        &LIMIT,
        "The limit. Absent with mode: the policy's.",
    ),
    optional("limits", TableList(&LIMIT), "Several limits."),
    key(
        "action",
        Keyword(&["limit", "allow", "deny"]),
        Default("limit"),
        "\"allow\" exempts the key from this policy; others still apply. \"deny\" rejects it with 403 without counting. Both not with dynamic.",
    ),
    optional(
        "mode",
        Keyword(&["enforce", "mark", "shadow", "off"]),
        "The mode for this key. Absent: the policy's. \"off\" not with dynamic.",
    ),
];
