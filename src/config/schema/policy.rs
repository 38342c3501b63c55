//! `[[policy]]` and all that is in it.

use super::*;

pub(super) static POLICY: [SchemaKey; 17] = [
    key(
        "name",
        Text("a letter or digit, then up to 62 letters, digits, \"_\", \".\" or \"-\""),
        Required,
        "Unique. Appears in headers and logs, and is part of the counters' identity: renaming a policy starts new ones.",
    ),
    key(
        "priority",
        integer(i64::MIN, i64::MAX),
        Default("0"),
        "Higher first; file order among equals.",
    ),
    key(
        "match",
        Table(&MATCH),
        Optional,
        "Which requests. Absent: all.",
    ),
    key(
        "key",
        TextList("key parts such as \"client_ip\" or \"header:x-user-id\""),
        Default(""),
        "Whose quota. Empty: one for everybody who matches.",
    ),
    key(
        "limit",
        Table(&LIMIT),
        Optional,
        "How much. A policy with action \"limit\" has this or limits, others neither.",
    ),
    key("limits", TableList(&LIMIT), Optional, "The same, several."),
    key(
        "action",
        Keyword(&["limit", "allow", "deny"]),
        Default("limit"),
        "Limit; exempt, so that no later policy applies; refuse with 403, and nothing is counted.",
    ),
    key(
        "mode",
        Keyword(&["enforce", "shadow", "off"]),
        Default("enforce"),
        "A shadow policy decides, counts (on counters of its own) and logs, but stops nothing. \"off\": as if it weren't there.",
    ),
    key(
        "cost",
        ValueKind::IntegerOrTable {
            min: 0,
            max: MAX_UNITS,
            table: &COST,
        },
        Default("1"),
        "Units that one request takes from each limit, or where it is said: in a header of the request, or in the response. Above a limit's requests nothing ever passes.",
    ),
    key(
        "block_for",
        ValueKind::Duration {
            min: Duration::from_millis(1),
            max: MAX_PERIOD,
        },
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
        integer(1, 64),
        Default("1"),
        "Redis Cluster only: spreads one very hot key over so many counters, each with its part of the limit. A refusal asks all of them. Not with on_store_failure = \"local\".",
    ),
    key(
        "lease",
        ValueKind::KeywordOrTable {
            keyword: "auto",
            table: &LEASE,
        },
        Optional,
        "Takes units from Redis in advance, and hands them out without asking it. \"auto\": as many as the rate of requests suggests. Not with leaky_bucket, concurrency, warm_up, block_for, count_rejected, shards or an estimate.",
    ),
    key("missing_key", MISSING_KEY, Optional, "As in [defaults]."),
    key(
        "on_store_failure",
        ON_STORE_FAILURE,
        Optional,
        "As in [defaults]. Of policies for calls of the rate-limit service only \"local\" holds, in [defaults] too; else they are answered UNAVAILABLE, and Envoy does what its failure_mode_deny says.",
    ),
    key(
        "reject",
        Table(&REJECT),
        Optional,
        "Your own answer to refused clients.",
    ),
    key(
        "override",
        TableList(&OVERRIDE),
        Optional,
        "Limits of their own for some keys. The first that matches replaces all limits of the policy.",
    ),
];

pub(super) static COST: [SchemaKey; 6] = [
    key(
        "header",
        Text("the name of a header"),
        Required,
        "Holds the units that the request takes, in digits. A cost has either this, or estimate and actual.",
    ),
    key(
        "default",
        integer(0, MAX_UNITS),
        Default("1"),
        "Units of a request without the header.",
    ),
    key(
        "min",
        integer(0, MAX_UNITS),
        Default("1"),
        "The fewest that the header may say.",
    ),
    key(
        "max",
        integer(0, MAX_UNITS),
        Default("100"),
        "The most that it may say, and what a request takes whose header is anything else: empty, signed, a fraction, out of range, repeated.",
    ),
    key(
        "estimate",
        integer(1, MAX_UNITS),
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

pub(super) static LEASE: [SchemaKey; 2] = [
    key(
        "size",
        integer(1, 1_000_000),
        Required,
        "Units in hand at most, per key and proxy.",
    ),
    key(
        "ttl",
        ValueKind::Duration {
            min: Duration::from_millis(1),
            max: MAX_PERIOD,
        },
        Default("100ms"),
        "How long they are kept, at most half of the policy's shortest period. Unused ones are given back then.",
    ),
];

pub(super) static MATCH: [SchemaKey; 12] = [
    key(
        "methods",
        TextList("methods such as \"GET\""),
        Default(""),
        "GET also means HEAD.",
    ),
    key(
        "hosts",
        TextList("hosts such as \"example.com\" or \"*.example.com\""),
        Default(""),
        "Without port. \"*.example.com\" is every name below it.",
    ),
    key(
        "path",
        TextList("path patterns such as \"/api/**\""),
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
        Map(VALUE_TEST_FORMAT),
        Optional,
        "Conditions on headers. With several values of a name, any may fulfil one.",
    ),
    key(
        "query",
        Map(VALUE_TEST_FORMAT),
        Optional,
        "Conditions on query parameters.",
    ),
    key(
        "cookies",
        Map(VALUE_TEST_FORMAT),
        Optional,
        "Conditions on cookies.",
    ),
    key(
        "client_ips",
        TextList("networks such as \"10.0.0.0/8\""),
        Default(""),
        "Networks of clients.",
    ),
    key(
        "jwt",
        Map(VALUE_TEST_FORMAT),
        Optional,
        "Conditions on claims of the request's token: a name, or a JSON pointer such as \"/realm_access/roles\". Of a list, any element may fulfil one. Needs [client.jwt].",
    ),
    key(
        "domain",
        Text("the domain that Envoy's filter names"),
        Optional,
        "For calls of the rate-limit service: their domain. With this or descriptors a policy is for such calls only, and nothing else here goes beside them but not.",
    ),
    key(
        "descriptors",
        Map(DESCRIPTOR_ENTRY_FORMAT),
        Optional,
        "For calls of the rate-limit service: the entries that a descriptor has. It must have all of them, in whatever order, and no others. Absent beside domain: any.",
    ),
    key(
        "not",
        Table(&MATCH),
        Optional,
        "A whole match that must not hold.",
    ),
];

const VALUE_TEST_FORMAT: &str = "a table such as { name = \"value\" }, { name = { regex = \"…\" } } or { name = { present = true } }";

const DESCRIPTOR_ENTRY_FORMAT: &str = "a table such as { generic_key = \"api\", remote_address = \"*\" }, where \"*\" is any value, or { name = { regex = \"…\" } }";

/// A condition that isn't just a text.
pub(in crate::config) static VALUE_TEST: [SchemaKey; 2] = [
    key(
        "regex",
        Text("a regular expression"),
        Optional,
        "The value contains a match.",
    ),
    key("present", Bool, Optional, "Whether there is a value."),
];

pub(super) static LIMIT: [SchemaKey; 12] = [
    key(
        "requests",
        integer(0, MAX_UNITS),
        Required,
        "Units per period, or requests in flight. 0 refuses everything. Above 100,000 with sliding_log, check warns about the memory.",
    ),
    key(
        "per",
        ValueKind::Duration {
            min: Duration::from_millis(1),
            max: MAX_PERIOD,
        },
        Optional,
        "The period. Required, but for concurrency, which has none.",
    ),
    key("algorithm", ALGORITHM, Optional, "As in [defaults]."),
    key(
        "buckets",
        integer(2, 100),
        Optional,
        "sliding_window only: sub-windows per period; 10 if absent. More are more exact and take more memory.",
    ),
    key(
        "burst",
        integer(1, MAX_UNITS),
        Optional,
        "token_bucket only: units that may be taken at once; `requests` if absent.",
    ),
    key(
        "warm_up",
        ValueKind::Duration {
            min: Duration::from_millis(1),
            max: MAX_WARM_UP,
        },
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
        ValueKind::Duration {
            min: Duration::ZERO,
            max: MAX_PERIOD,
        },
        Optional,
        "fixed_window only: windows start this much after multiples of per since 1970, UTC. Less than per.",
    ),
    key(
        "lease_ttl",
        ValueKind::Duration {
            min: Duration::from_secs(1),
            max: Duration::from_secs(3600),
        },
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

pub(super) static REJECT: [SchemaKey; 4] = [
    key(
        "status",
        integer(400, 599),
        Optional,
        "Absent: 429, for deny 403.",
    ),
    key("body", Text("a text"), Default(""), "The body."),
    key(
        "content_type",
        Text("a media type"),
        Default("text/plain; charset=utf-8"),
        "Its type.",
    ),
    key(
        "headers",
        Map("a table such as { x-reason = \"quota\" }"),
        Optional,
        "More header fields.",
    ),
];

pub(super) static OVERRIDE: [SchemaKey; 3] = [
    key(
        "key",
        TextList("one value per position of the policy's key"),
        Required,
        "\"*\" is any value.",
    ),
    key("limit", Table(&LIMIT), Optional, "How much."),
    key("limits", TableList(&LIMIT), Optional, "The same, several."),
];
