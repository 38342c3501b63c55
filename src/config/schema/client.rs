//! Keys of `[client]` and `[self_service]`.

use super::key::*;
use super::proxy::UPSTREAM_TLS;

pub(super) static SELF_SERVICE: [SchemaKey; 2] = [
    key(
        "path",
        Text("a path such as \"/.well-known/ratelimit\""),
        Default("/.well-known/ratelimit"),
        "Exact path that answers a client with its own limits. It is not forwarded.",
    ),
    table("limit", &SELF_SERVICE_LIMIT, "Limit of queries per client."),
];

pub(super) static SELF_SERVICE_LIMIT: [SchemaKey; 2] = [
    key(
        "requests",
        integer(1, 1_000_000),
        Default("10"),
        "Most queries of one client in per.",
    ),
    key(
        "per",
        POSITIVE_DURATION,
        Default("1s"),
        "Period of the limit.",
    ),
];

pub(super) static CLIENT: [SchemaKey; 14] = [
    key(
        "trusted_proxies",
        TextList("networks such as \"10.0.0.0/8\""),
        Default(""),
        "Proxies in front of tidegate, such as an ingress. Their ip_header is trusted.",
    ),
    key(
        "ip_header",
        Text("the name of a header"),
        Default("x-forwarded-for"),
        "Header with the client address: x-forwarded-for, forwarded, or another with one address, such as x-real-ip.",
    ),
    key(
        "ipv6_prefix",
        integer(0, 128),
        Default("64"),
        "Bits of an IPv6 address that identify a client.",
    ),
    key(
        "nat64_prefixes",
        TextList("IPv6 networks such as \"2001:db8:64::/96\""),
        Default(""),
        "Prefixes of your NAT64 or SIIT translators (RFC 6052). The IPv4 address in such an address is the client, as in 64:ff9b::/96 and ::ffff:0:0:0/96.",
    ),
    key(
        "ipv4_prefix",
        integer(0, 32),
        Default("32"),
        "Bits of an IPv4 address that identify a client.",
    ),
    key(
        "trusted_headers",
        TextList("names of headers such as \"x-plan\""),
        Default(""),
        "Headers that the gateway in front sets on every request, or removes: clients can't choose their values, so check does not warn of limits that depend on them, and [self_service] identifies clients by them.",
    ),
    key(
        "hash_secret_file",
        Text("the path of a file with at least 16 random bytes"),
        Default(""),
        "Values of hashed key parts are stored as HMAC-SHA-256 with this secret, the same on all instances, instead of SHA-256. With another secret, their counters start anew.",
    ),
    key(
        "ambiguous_query",
        Keyword(&["reject", "allow"]),
        Default("reject"),
        "Requests that lenient parsers read another parameter from, of a key or condition, such as [id]= or ID= beside id=, a ; in the value, invalid UTF-8, more than 1000 parameters: 400, or only the exact name counts. \"allow\": if the app's parser is lenient, each spelling has its own quota and may escape a condition.",
    ),
    key(
        "ambiguous_cookie",
        Keyword(&["reject", "allow"]),
        Default("reject"),
        "Cookies of keys and conditions with a space, a backslash or a byte above 0x7F in the value, or a name that lenient parsers fold: 400, or read as sent. \"allow\": if the app unescapes, each spelling has its own quota and may escape a condition.",
    ),
    key(
        "ambiguous_header",
        Keyword(&["reject", "allow"]),
        Default("reject"),
        "Headers of keys and conditions with an encoded word (RFC 2047), such as =?utf-8?q?alice?=, or authorization with several credentials: 400, or read as sent. \"allow\": if the app decodes them, each spelling has its own quota and may escape a condition.",
    ),
    key(
        "outer_white_space",
        Keyword(&["reject", "allow"]),
        Default("reject"),
        "Values of keys and conditions with white space around them, in ASCII or Unicode and also escaped, or with control characters: 400, or read as sent. \"allow\": if the app trims, each spelling has its own quota and may escape a condition.",
    ),
    key(
        "cookie_octets",
        Keyword(&["reject", "allow"]),
        Default("reject"),
        "With ambiguous_cookie = \"reject\": cookies of keys and conditions with a comma, a bracket, an ampersand, a control character, or a quote in the value: 400, or read as sent. \"allow\": if the app ends the value there, each spelling has its own quota and may escape a condition.",
    ),
    key(
        "cookie_prefixes",
        Keyword(&["reject", "allow"]),
        Default("reject"),
        "With ambiguous_cookie = \"reject\": requests with a cookie __Host-NAME or __Secure-NAME, if NAME is in a key or condition: 400, or ignored. \"allow\": an app that reads it as NAME serves another key than the one charged.",
    ),
    table(
        "jwt",
        &CLIENT_JWT,
        "Token verification, for jwt in keys and matches.",
    ),
];

static CLIENT_JWT: [SchemaKey; 14] = [
    key(
        "keys_file",
        Text("the path of a JWK set"),
        Default(""),
        "Keys that verify tokens, as JSON (RFC 7517).",
    ),
    key(
        "secret_file",
        Text("the path of a file that holds the secret"),
        Default(""),
        "Instead of keys_file: the secret of HS256, HS384 and HS512. Trailing white space is ignored.",
    ),
    key(
        "keys_url",
        Text("the URL of a JWK set"),
        Default(""),
        "Instead of keys_file: https URL of the keys, fetched in the background. Cache-Control: max-age is honoured between 5 s and 1 day. Secrets in it are ignored.",
    ),
    key(
        "issuer",
        Text("the iss of the tokens"),
        Default(""),
        "Accept only tokens with this iss. Empty: any.",
    ),
    key(
        "audience",
        TextList("values of aud such as \"orders\""),
        Default(""),
        "Accept only tokens for one of these audiences (aud). Empty: any.",
    ),
    optional(
        "issuers",
        TableList(&CLIENT_JWT_ISSUERS),
        "Instead of the keys above: several issuers, each with its own keys.",
    ),
    key(
        "keys_refresh",
        POSITIVE_DURATION,
        Default("5m"),
        "Interval of fetches if the response has no max-age.",
    ),
    key(
        "keys_cooldown",
        POSITIVE_DURATION,
        Default("30s"),
        "A token with an unknown key causes a fetch, at most one in this time.",
    ),
    key(
        "keys_max_stale",
        POSITIVE_DURATION,
        Default("1d"),
        "How long fetched keys are used while the issuer does not answer. Then no token is accepted.",
    ),
    key(
        "keys_cache_dir",
        Text("the path of a writable directory"),
        Default(""),
        "Directory for fetched keys, which the next process uses at start. Write access to it allows forging tokens. Empty: none.",
    ),
    key(
        "keys_allow_http",
        Bool,
        Default("false"),
        "Allow http:// in keys_url for hosts other than loopback. An attacker on the network path can then forge tokens.",
    ),
    table("tls", &UPSTREAM_TLS, "TLS to https issuers."),
    key(
        "header",
        Text("the name of a header"),
        Default("authorization"),
        "Header with the token. In authorization it follows a scheme such as \"Bearer\", in others that is optional. A token among several words or elements: 400.",
    ),
    key(
        "verify",
        Bool,
        Default("true"),
        "false: trust claims without a signature check. Only if a proxy in front verifies tokens.",
    ),
];

static CLIENT_JWT_ISSUERS: [SchemaKey; 5] = [
    required(
        "issuer",
        Text("the iss of the tokens"),
        "Tokens with this iss are verified with these keys.",
    ),
    key(
        "audience",
        TextList("values of aud such as \"orders\""),
        Default(""),
        "As client.jwt.audience.",
    ),
    key(
        "keys_file",
        Text("the path of a JWK set"),
        Default(""),
        "As client.jwt.keys_file.",
    ),
    key(
        "keys_url",
        Text("the URL of a JWK set"),
        Default(""),
        "As client.jwt.keys_url.",
    ),
    key(
        "secret_file",
        Text("the path of a file that holds the secret"),
        Default(""),
        "As client.jwt.secret_file.",
    ),
];
