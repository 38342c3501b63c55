//! Keys of `[client]` and `[self_service]`.

use super::key::*;
use super::proxy::UPSTREAM_TLS;

schema_table! {
    pub(super) static SELF_SERVICE {
        /// Exact path that answers a client with its own limits. It is not forwarded.
        path: Text("a path such as \"/.well-known/ratelimit\""), default = "/.well-known/ratelimit";
        /// Limit of queries per client.
        limit: Table(&SELF_SERVICE_LIMIT);
    }

    pub(super) static SELF_SERVICE_LIMIT {
        /// Most queries of one client in per.
        requests: integer(1, 1_000_000), default = "10";
        /// Period of the limit.
        per: POSITIVE_DURATION, default = "1s";
    }

    pub(super) static CLIENT {
        /// Proxies in front of tidegate, such as an ingress. Their ip_header is trusted.
        trusted_proxies: TextList("networks such as \"10.0.0.0/8\""), default = "";
        /// Header with the client address: x-forwarded-for, forwarded, or another with one address,
        /// such as x-real-ip.
        ip_header: Text("the name of a header"), default = "x-forwarded-for";
        /// Bits of an IPv6 address that identify a client.
        ipv6_prefix: integer(0, 128), default = "64";
        /// Prefixes of your NAT64 or SIIT translators (RFC 6052), whose addresses contain the
        /// client's IPv4 address.
        nat64_prefixes: TextList("IPv6 networks such as \"2001:db8:64::/96\""), default = "";
        /// Bits of an IPv4 address that identify a client.
        ipv4_prefix: integer(0, 32), default = "32";
        /// Headers that the gateway in front sets or removes on every request. Clients can't choose
        /// their values.
        trusted_headers: TextList("names of headers such as \"x-plan\""), default = "";
        /// Hashed key values are stored as HMAC-SHA-256 with this secret, the same on all
        /// instances, instead of SHA-256. With another secret, their counters start anew.
        hash_secret_file: Text("the path of a file with at least 16 random bytes"), default = "";
        /// Requests that lenient parsers read another parameter from, of a key or condition, such
        /// as [id]= or ID= beside id=, a ; in the value, invalid UTF-8, more than 1000 parameters:
        /// 400, or only the exact name counts.
        ambiguous_query: REJECT_OR_ALLOW, default = "reject";
        /// Cookies of keys and conditions with a space, a backslash or a byte above 0x7F in the
        /// value, or a name that lenient parsers fold: 400, or read as sent.
        ambiguous_cookie: REJECT_OR_ALLOW, default = "reject";
        /// Headers of keys and conditions with an encoded word (RFC 2047), such as
        /// =?utf-8?q?alice?=, or authorization with several credentials: 400, or read as sent.
        ambiguous_header: REJECT_OR_ALLOW, default = "reject";
        /// Values of keys and conditions with white space around them, in ASCII or Unicode and also
        /// escaped, or with control characters: 400, or read as sent.
        outer_white_space: REJECT_OR_ALLOW, default = "reject";
        /// With ambiguous_cookie = "reject": cookies of keys and conditions with a comma, a
        /// bracket, an ampersand, a control character, or a quote in the value: 400, or read as
        /// sent.
        cookie_octets: REJECT_OR_ALLOW, default = "reject";
        /// With ambiguous_cookie = "reject": requests with a cookie __Host-NAME or __Secure-NAME,
        /// if NAME is in a key or condition: 400, or ignored.
        cookie_prefixes: REJECT_OR_ALLOW, default = "reject";
        /// Token verification, for jwt in keys and matches.
        jwt: Table(&CLIENT_JWT);
    }

    static CLIENT_JWT {
        /// Keys that verify tokens, as JSON (RFC 7517).
        keys_file: Text("the path of a JWK set"), default = "";
        /// Instead of keys_file: the secret of HS256, HS384 and HS512. Trailing white space is
        /// ignored.
        secret_file: Text("the path of a file that holds the secret"), default = "";
        /// Instead of keys_file: https URL of the keys, fetched in the background. Cache-Control:
        /// max-age is honoured from 5 s to 1 day.
        keys_url: Text("the URL of a JWK set"), default = "";
        /// Accept only tokens with this iss. Empty: any.
        issuer: Text("the iss of the tokens"), default = "";
        /// Accept only tokens for one of these audiences (aud). Empty: any.
        audience: TextList("values of aud such as \"orders\""), default = "";
        /// Instead of the keys above: several issuers, each with its own keys.
        issuers: TableList(&CLIENT_JWT_ISSUERS);
        /// Interval of fetches if the response has no max-age.
        keys_refresh: POSITIVE_DURATION, default = "5m";
        /// A token with an unknown key causes a fetch, at most one in this time.
        keys_cooldown: POSITIVE_DURATION, default = "30s";
        /// How long fetched keys are used while the issuer does not answer. Then no token is
        /// accepted.
        keys_max_stale: POSITIVE_DURATION, default = "1d";
        /// Directory for fetched keys, which the next process uses at start. Write access to it
        /// allows forging tokens.
        keys_cache_dir: Text("the path of a writable directory"), default = "";
        /// Allow http:// in keys_url for hosts other than loopback: an attacker on the path can
        /// then forge tokens.
        keys_allow_http: Bool, default = "false";
        /// TLS to https issuers.
        tls: Table(&UPSTREAM_TLS);
        /// Header with the token. A token among several words or elements: 400.
        header: Text("the name of a header"), default = "authorization";
        /// false: trust claims without a signature check, only if a proxy in front verifies tokens.
        verify: Bool, default = "true";
    }

    static CLIENT_JWT_ISSUERS {
        /// Tokens with this iss are verified with these keys.
        issuer: Text("the iss of the tokens"), required;
        /// As client.jwt.audience.
        audience: TextList("values of aud such as \"orders\""), default = "";
        /// As client.jwt.keys_file.
        keys_file: Text("the path of a JWK set"), default = "";
        /// As client.jwt.keys_url.
        keys_url: Text("the URL of a JWK set"), default = "";
        /// As client.jwt.secret_file.
        secret_file: Text("the path of a file that holds the secret"), default = "";
    }
}
