//! Keys of `[[policy]]`.

use super::key::*;
use crate::config::values::{parse_header_name, parse_nonempty};
use crate::limiter::CounterScope;
use crate::policy::jwt::ClaimName;
use crate::policy::{JsonPointer, KeyPart, SlotRelease};
use std::time::Duration;
use strum::VariantNames;

const UNITS: ValueKind = integer(0, MAX_UNITS);
const AUTO: ValueKind = Keyword(&["auto"]);
const PERIOD: ValueKind = duration(Duration::from_millis(1), MAX_PERIOD);
const CALENDAR_UNIT: ValueKind = Keyword(&["day", "week", "month"]);
static COST_TABLE: ValueKind = Table(&COST);
static LEASE_TABLE: ValueKind = Table(&LEASE);
const ESTIMATED_UNITS: ValueKind = integer(1, MAX_UNITS);
static ESTIMATE_TABLE: ValueKind = Table(&ESTIMATE);
static ESTIMATE_TABLES: ValueKind = ValueKind::Either(
    &ESTIMATE_TABLE,
    " or a list of tables",
    &TableList(&ESTIMATE),
);
const ACTUAL_TEXT: ValueKind = Text("\"response_header:NAME\" or \"response_json:/POINTER\"");
static ACTUAL_TABLE: ValueKind = Table(&ACTUAL);
static ACTUAL_TABLES: ValueKind =
    ValueKind::Either(&ACTUAL_TABLE, " or a list of tables", &TableList(&ACTUAL));
const WEIGHTS: ValueKind =
    Map("a table such as { by = \"body:/model\", \"gpt-*\" = 10, default = 1 }");

schema_table! {
    pub(super) static POLICY {
        /// Unique name. Renaming a policy starts new counters.
        name: NAME, required;
        /// Higher values first; equal values in file order.
        priority: integer(i64::MIN, i64::MAX), default = "0";
        /// Requests that the policy applies to. Absent: all.
        match: Table(&MATCH);
        /// Key parts: each combination of values has its own quota. Empty: one quota for all.
        /// `;hash` stores only a hash of a value, `;plain` the value; "a | b" is the first one
        /// present.
        key: TextList("key parts such as \"client_ip\" or \"header:x-user-id\""), default = "", of_quota;
        /// The limit. Required with action "limit", unless limits is set.
        limit: Table(&LIMIT), of_quota;
        /// Several limits.
        limits: TableList(&LIMIT), of_quota;
        /// Limit requests; exempt them from later policies; reject them with 403 without counting.
        action: Keyword(PolicyActionKind::VARIANTS), default = "limit";
        /// "mark" forwards requests over the limit with X-Tidegate-Over: POLICY
        /// (defaults.mark_header). "shadow" counts as "enforce" does, and rejects nothing. A change
        /// of mode keeps the counts, so "enforce" at once rejects what "shadow" reported. "off":
        /// only validated.
        mode: POLICY_MODE, default = "enforce";
        /// false: no response has the policy's limits or its name. Logs and metrics do.
        report: Bool, default = "true";
        /// Units that a request takes from each limit. A table reads them from a header or the
        /// response.
        cost: ValueKind::Either(&UNITS, ", or a table such as { header = \"x-cost\", max = 100 }", &COST_TABLE),
            default = "1", of_quota;
        /// Counts a request only if its response has one of these statuses. Not with lease, shards,
        /// count_rejected, [check], descriptors or a cost that is not a number.
        count_when: Table(&COUNT_WHEN), of_quota;
        /// After a rejection, reject the same key for this long. Only in mode "enforce".
        block_for: duration(Duration::from_millis(1), MAX_PERIOD), of_quota;
        /// true: rejected requests use quota too. Not with concurrency.
        count_rejected: Bool, default = "false", of_quota;
        /// Redis Cluster only: splits a hot key over this many counters. Not with on_store_failure
        /// = "local".
        shards: integer(1, 64), default = "1", of_quota;
        /// Leases units from Redis, to decide without a round trip. Not with leaky_bucket,
        /// concurrency, warm_up, block_for, count_rejected, shards or an estimate.
        lease: ValueKind::Either(&AUTO, ", or a table such as { size = 50, ttl = \"100ms\" }", &LEASE_TABLE), of_quota;
        /// "instance": each instance counts for itself, in memory (bounded by store.memory), beside
        /// policies in Redis. Not with lease, shards or dynamic; on_store_failure has no effect.
        scope: Keyword(CounterScope::VARIANTS), default = "shared", of_quota;
        /// Policies with the same counter share one quota per key. Their key, mode and kind of
        /// limits must be equal; requests, burst and max_delay may differ, but not with shards, a
        /// lease or "local". Each policy compares the shared usage with its own limit. Their
        /// costs may differ; count_when may not. If several match a request, only the strictest
        /// charges it, at the highest cost. Not with dynamic.
        counter: NAME, of_quota;
        /// Soft thresholds: the first request by which a key reaches such a share of a limit in a
        /// period, or by which the limit rejects (1.0), is logged, counted in
        /// tidegate_policy_notifications_total, and its response has X-Tidegate-Notify. Once for
        /// all instances; with other algorithms than fixed_window at most once per period. Not
        /// with lease, shards, warm_up or only concurrency. None while the store is unreachable.
        notify: ValueKind::ThresholdList, of_quota;
        /// As in [defaults]. If tidegate can't read a body, keys lack its values, and for
        /// match.body "shared" limits the request, "skip" does not, "reject" rejects it.
        missing_key: MISSING_KEY, of_quota;
        /// Bytes of the request body that are read for body: values and estimates. A longer body
        /// can't be read.
        max_scan: byte_size(1, 1 << 20), default = "64KiB";
        /// As in [defaults]. Descriptor policies: "local", or else UNAVAILABLE, and Envoy's
        /// failure_mode_deny decides.
        on_store_failure: ON_STORE_FAILURE, of_quota;
        /// A custom response to rejected requests.
        reject: Table(&REJECT);
        /// Other limits, an action or a mode for specific keys. Precedence: exact keys, then
        /// patterns with more literal text (the first key position decides first), then "*", then
        /// file order.
        override: TableList(&OVERRIDE), of_quota;
        /// true: `tidegate overrides` and the admin port set limits for single keys, or block them,
        /// in the store. Not with shards.
        dynamic: Bool, default = "false", of_quota;
    }

    pub(super) static COUNT_WHEN {
        /// Statuses that count. tidegate's own 502, 503 or 504 counts if the request was sent, and
        /// otherwise only if listed; a client that leaves early always counts.
        status: ValueKind::StatusList, required;
    }

    pub(crate) static COST {
        /// Request header that holds the cost in digits. Either this, or estimate and actual.
        header: Text("the name of a header"), required;
        /// Cost without the header.
        default: integer(0, MAX_UNITS), default = "1";
        /// Smallest valid cost in the header.
        min: integer(0, MAX_UNITS), default = "1";
        /// Largest valid cost in the header. Also the cost if the header is invalid or repeated.
        max: integer(0, MAX_UNITS), default = "100";
        /// Units charged on arrival, at least 1: a number, or what the request states, added up.
        /// The response settles the difference.
        estimate: ValueKind::Either(&ESTIMATED_UNITS, ", or a table such as { request_json = \"/max_tokens\", default = 500, max = 8000 } or a list of tables", &ESTIMATE_TABLES), required;
        /// Source of the actual cost: a response header or trailer, a JSON pointer to a number in
        /// the body, or several of them, added up with weights. If the response has none of them,
        /// the estimate stands.
        actual: ValueKind::Either(&ACTUAL_TEXT, ", or a table such as { response_json = \"/usage/output_tokens\", weight = 4 } or a list of tables", &ACTUAL_TABLES), required;
        /// true: charges the response while it streams, and ends it when the key has nothing left.
        /// An event stream ends after a whole event with event: error; of another body, the
        /// connection is closed. Only in mode "enforce". Not with leaky_bucket.
        cut_off: Bool, default = "false";
        /// cut_off only: units of each further charge. A stream overspends by less than this and
        /// one event.
        slice: integer(1, MAX_UNITS), default = "200";
        /// cut_off only: bytes of the response that count as one unit of the highest weight until
        /// the response reports its cost. The report corrects them.
        response_bytes_per_unit: integer(1, 1 << 30), default = "4";
        /// weights of all entries of estimate and actual without weights of their own.
        weights: WEIGHTS;
    }

    pub(crate) static ESTIMATE {
        /// JSON pointer or form field of a whole number in the request body.
        request_json: Text("a JSON pointer such as \"/max_tokens\""), required;
        /// Units of a body without the number. With request_json only.
        default: UNITS;
        /// Most units: of a larger number, a value that is no number, or a body that can't be read
        /// or has an unknown size. With request_bytes_per_unit the default is max_scan's units.
        max: integer(1, MAX_UNITS);
        /// Bytes of the request body for each unit, rounded up. Either this or request_json.
        request_bytes_per_unit: integer(1, 1 << 30), required;
        /// Multiplies the units.
        weight: Factor, default = "1";
        /// Multiplies the units by a value of the request: by is a key part, the other keys are
        /// values or patterns. A value that can't be read has the highest weight.
        weights: WEIGHTS;
    }

    pub(crate) static ACTUAL {
        /// JSON pointer to a whole number in the response body; of a list of pointers, the first
        /// that the response has counts.
        response_json: TextList("JSON pointers such as \"/usage/total_tokens\""), required;
        /// Header or trailer of the response with a whole number. Either this or response_json.
        response_header: Text("the name of a header"), required;
        /// Multiplies the number; may be negative. The sum of all is never below 0, and rounded up.
        weight: Factor, default = "1";
        /// As in estimate.
        weights: WEIGHTS;
    }

    pub(super) static LEASE {
        /// Most units leased at a time, per key and proxy.
        size: integer(1, 1_000_000), required;
        /// How long units are leased, at most half of the shortest period.
        ttl: duration(Duration::from_millis(1), MAX_PERIOD), default = "100ms";
    }

    pub(crate) static MATCH {
        /// Methods. GET includes HEAD.
        methods: TextList("methods such as \"GET\""), default = "";
        /// Hosts without port. "*.example.com" matches every subdomain.
        hosts: TextList("hosts such as \"example.com\" or \"*.example.com\""), default = "";
        /// Path patterns: {name} and * match one segment, ** at the end matches any rest.
        path: TextList("path patterns such as \"/api/**\""), default = "";
        /// A regular expression. Use ^ and $ to match the whole path.
        path_regex: Text("a regular expression");
        /// Conditions on headers. Of several values of a name, one must match.
        headers: conditions("header", |name| parse_header_name(name).map(KeyPart::Header));
        /// Conditions on query parameters.
        query: conditions("query parameter", |name| parse_nonempty(name).map(KeyPart::Query));
        /// Conditions on cookies.
        cookies: conditions("cookie", |name| parse_nonempty(name).map(KeyPart::Cookie));
        /// Networks of clients.
        client_ips: TextList("networks such as \"10.0.0.0/8\""), default = "";
        /// Conditions on token claims, by name or JSON pointer. Of a list, one element must match.
        jwt: conditions("claim", |name| ClaimName::parse(name).map(KeyPart::Claim));
        /// Conditions on values in the body, by JSON pointer or "/FIELD" of a form. A body that
        /// can't be read meets them: see missing_key.
        body: conditions("JSON pointer", |text| JsonPointer::parse(text).map(KeyPart::Body));
        /// Domain of rate-limit service calls. With domain or descriptors, only not is allowed
        /// beside them.
        domain: Text("the domain of Envoy's filter");
        /// Entries of a descriptor, in any order; "*" matches any value. Absent with domain: any.
        descriptors: Map(DESCRIPTOR_ENTRY_FORMAT);
        /// "all": a descriptor has exactly the entries in descriptors. "subset": it may have more.
        descriptors_match: ValueKind::Keyword(&["all", "subset"]), default = "all";
        /// Matches of which one must hold, beside the other conditions.
        any: TableList(&MATCH);
        /// A match that must not hold.
        not: Table(&MATCH);
    }
}

const DESCRIPTOR_ENTRY_FORMAT: &str = "a table such as { generic_key = \"api\", remote_address = \"*\" }, where \"*\" matches any value, or { name = { regex = \"…\" } }";

schema_table! {
    /// Keys of a condition that is a table.
    pub(crate) static VALUE_CONDITION {
        /// The value contains a match.
        regex: Text("a regular expression");
        /// Whether the value must be present.
        present: Bool;
    }

    pub(crate) static LIMIT {
        /// Units per period, or requests in flight. 0 rejects every request. Required, unless
        /// requests_from is set.
        requests: integer(0, MAX_UNITS);
        /// Takes requests from the request: a claim of a verified token, a header from
        /// client.trusted_proxies, or a field of the client certificate. Not with concurrency,
        /// warm_up, lease, shards, descriptors or on_store_failure = "local".
        requests_from: Text("jwt:CLAIM, header:NAME, client_cert:san or client_cert:cn");
        /// Required with requests_from: the amount if the field is absent, repeated or not a whole
        /// number.
        default: integer(0, MAX_UNITS);
        /// Required with requests_from: larger amounts are reduced to this one.
        max: integer(0, MAX_UNITS);
        /// The period: a duration, or with fixed_window a calendar "day", "week" (from Monday) or
        /// "month". Required, except with concurrency.
        per: ValueKind::Either(&PERIOD, "; or \"day\", \"week\" or \"month\"", &CALENDAR_UNIT);
        /// Time zone of a day, week or month. Absent: UTC.
        tz: Text("the IANA name of a time zone such as \"Europe/Berlin\"");
        /// As in [defaults].
        algorithm: ALGORITHM;
        /// sliding_window only: buckets per period. Absent: 10.
        buckets: integer(2, 100), only_for = "sliding_window";
        /// token_bucket only: capacity of the bucket. Absent: requests, also those of
        /// requests_from.
        burst: integer(1, MAX_UNITS), only_for = "token_bucket";
        /// token_bucket only: for apps that are slow after a pause. After this long idle, a third
        /// of burst and rate; both grow back in the same time. No cost may exceed that third.
        warm_up: duration(Duration::from_millis(1), MAX_WARM_UP), only_for = "token_bucket";
        /// leaky_bucket only: longest delay of a request. One that would wait longer is rejected.
        /// Absent: 1 s.
        max_delay: DURATION, only_for = "leaky_bucket";
        /// fixed_window only: offset of window starts from multiples of per since 1970 UTC. Less
        /// than per.
        offset: duration(Duration::ZERO, MAX_PERIOD), only_for = "fixed_window";
        /// concurrency only: how long slots of a crashed sidecar stay taken, renewed at a third of
        /// it. Absent: 10 s.
        lease_ttl: duration(Duration::from_secs(1), Duration::from_secs(3600)), only_for = "concurrency";
        /// concurrency only: ends requests after this time, with 504 or by aborting the response.
        /// Absent or 0: never.
        max_duration: DURATION, only_for = "concurrency";
        /// concurrency only: a slot is free at the end of the response to the client, or of the
        /// upstream's response even if the client left. "upstream" needs max_duration.
        release: Keyword(SlotRelease::VARIANTS), default = "response", only_for = "concurrency";
        /// Name in the rate-limit fields. Absent: the policy's name; further limits add -2, -3.
        name: NAME;
        /// Unit counted, if not requests: "tokens" becomes qu="tokens".
        unit: Text("1 to 32 letters, digits, \"_\" or \"-\"");
    }

    pub(super) static REJECT {
        /// Status code. Absent: 429, or 403 with action "deny".
        status: integer(400, 599);
        /// Body of the response.
        body: Text("a text"), default = "";
        /// Content-Type of the body.
        content_type: Text("a media type"), default = "text/plain; charset=utf-8";
        /// Additional header fields, such as { x-reason = "quota" }.
        headers: Map("a table such as { x-reason = \"quota\" }");
    }

    pub(super) static OVERRIDE {
        /// One value or pattern per position. "*" stands for any text: "acme-*"; alone, for any
        /// value. "\\*" is a star.
        key: TextList("one value per position of the policy's key"), required;
        /// The limit. Absent with mode: the policy's.
        limit: Table(&LIMIT);
        /// Several limits.
        limits: TableList(&LIMIT);
        /// "allow" exempts the key from this policy; others still apply. "deny" rejects it with 403
        /// without counting. Both not with dynamic.
        action: Keyword(PolicyActionKind::VARIANTS), default = "limit";
        /// The mode for this key. Absent: the policy's. "off" not with dynamic.
        mode: POLICY_MODE;
    }
}
