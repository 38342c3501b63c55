//! Keys of `[listen]`, `[rls]`, `[check]`, `[upstream]` and `[path]`.

use super::key::*;

pub(super) static LISTEN: [SchemaKey; 11] = [
    key(
        "address",
        Text("an IP address and port such as \"[::]:8080\", or \"unix:/path\""),
        Default("[::]:8080"),
        "Address for clients. [::] includes IPv4, and is 0.0.0.0 on machines without IPv6. Clients of a Unix socket count as 127.0.0.1.",
    ),
    key(
        "proxy_protocol",
        Keyword(&["off", "require"]),
        Default("off"),
        "PROXY protocol, version 1 or 2. \"require\": connections without a valid PROXY header are closed.",
    ),
    key(
        "proxy_protocol_from",
        TextList("networks such as \"10.0.0.0/8\""),
        Default(""),
        "Load balancers that send the PROXY header. Other connections are closed.",
    ),
    key(
        "forwarded_proto",
        Keyword(&["auto", "https"]),
        Default("auto"),
        "Protocol of clients, for X-Forwarded-Proto, Forwarded and traces. \"auto\": https if TLS ends here, or if a PROXY header of version 2 says so (PP2_TYPE_SSL). \"https\": also without that, for a load balancer that ends TLS and does not say so.",
    ),
    key(
        "max_connections",
        integer(1, 1_000_000),
        Default("10000"),
        "Most connections at a time. A new one closes the one idle longest; if all have requests, it waits in the kernel's backlog.",
    ),
    key(
        "max_connections_per_client",
        integer(0, 1_000_000),
        Default("0"),
        "Most connections of one client (by client.ipv6_prefix); further ones are closed. Peers in client.trusted_proxies are not counted. 0: no limit.",
    ),
    key(
        "max_connection_age",
        DURATION,
        Default("0s"),
        "Age at which a connection ends: Connection: close in its next response, or GOAWAY; requests in flight finish. Up to 10 % less or more, so that clients do not reconnect at once. 0: no limit.",
    ),
    optional(
        "max_memory",
        byte_size(0, u64::MAX),
        "Most memory of all client connections, by estimate; beyond it the largest are closed. Absent: 60 % of the container's limit. \"0\": no limit.",
    ),
    key(
        "threads",
        integer(0, 1024),
        Default("0"),
        "Worker threads. 0: by CPU affinity and CPU limit.",
    ),
    table("tls", &LISTEN_TLS, "TLS with clients."),
    table(
        "http",
        &LISTEN_HTTP,
        "Limits and timeouts of HTTP connections.",
    ),
];

pub(super) static LISTEN_TLS: [SchemaKey; 7] = [
    required(
        "cert",
        PEM_PATH,
        "Default certificate with its chain, for clients without SNI or with an unknown name.",
    ),
    required(
        "key",
        PEM_PATH,
        "Private key of cert, without a passphrase.",
    ),
    optional(
        "client_ca",
        PEM_PATH,
        "CAs that verify client certificates, or clients' own certificates. Required unless client_auth is \"none\".",
    ),
    optional(
        "client_crl",
        PEM_PATH,
        "Certificate revocation lists (CRLs) in one file, one per issuer.",
    ),
    key(
        "client_auth",
        Keyword(&["none", "optional", "require"]),
        Default("none"),
        "Client certificates. \"optional\": may be absent, but not invalid. Invalid ones fail the handshake.",
    ),
    key(
        "client_cert_header",
        Bool,
        Default("false"),
        "Send the client's certificate to the app: Client-Cert, and Client-Cert-Chain with the issuers that the client sent, up to 16 KiB (RFC 9440). Clients' own such headers never reach the app.",
    ),
    optional(
        "certificates",
        TableList(&LISTEN_TLS_CERTIFICATES),
        "More certificates, selected by SNI.",
    ),
];

pub(super) static LISTEN_TLS_CERTIFICATES: [SchemaKey; 2] = [
    required(
        "cert",
        PEM_PATH,
        "Certificate with its chain, for its DNS names; *.example.com covers one label.",
    ),
    required("key", PEM_PATH, "Private key of cert."),
];

const PEM_PATH: ValueKind = Text("the path of a PEM file");

pub(super) static LISTEN_HTTP: [SchemaKey; 9] = [
    key(
        "header_timeout",
        POSITIVE_DURATION,
        Default("10s"),
        "Timeout of a whole request head, from its first byte.",
    ),
    key(
        "idle_timeout",
        POSITIVE_DURATION,
        Default("75s"),
        "Timeout of a connection without a request.",
    ),
    key(
        "body_idle_timeout",
        POSITIVE_DURATION,
        Default("30s"),
        "Timeout without progress on a request body, or on writing a response or tunnel data to the client.",
    ),
    key(
        "min_upload_rate",
        byte_size(0, 1 << 30),
        Default("4B"),
        "Bytes per second that a client must send of a request body while the upstream waits for them; a client that falls body_idle_timeout behind gets 408. Not for gRPC. \"0\": no minimum.",
    ),
    // hyper needs a buffer of at least 8 KiB.
    key(
        "max_header_bytes",
        byte_size(8 << 10, 16 << 20),
        Default("64KiB"),
        "Largest request head; larger: 431.",
    ),
    key(
        "max_headers",
        integer(1, 10_000),
        Default("100"),
        "Most header fields of a request; more: 431. The cookies of an HTTP/2 request count as one.",
    ),
    key(
        "max_body_bytes",
        byte_size(0, u64::MAX),
        Default("0"),
        "Largest request body; larger: 413. \"0\": no limit.",
    ),
    key(
        "max_concurrent_streams",
        integer(1, 1_000_000),
        Default("200"),
        "Most requests at a time on an HTTP/2 connection.",
    ),
    key(
        "max_requests_waiting",
        integer(0, 1_000_000),
        Default("1024"),
        "Most requests delayed by leaky_bucket or waiting for an upstream connection. Further ones get 503.",
    ),
];

pub(super) static RLS: [SchemaKey; 4] = [
    key(
        "address",
        SERVICE_ADDRESS,
        Default("127.0.0.1:8081"),
        "Address for Envoy. All callers are trusted.",
    ),
    key(
        "max_connections",
        integer(1, 1_000_000),
        Default("1000"),
        "Most connections at a time.",
    ),
    key(
        "max_concurrent_streams",
        integer(1, 1_000_000),
        Default("1000"),
        "Most calls at a time on a connection.",
    ),
    table("tls", &LISTEN_TLS, "TLS with callers."),
];

pub(super) static CHECK: [SchemaKey; 5] = [
    key(
        "address",
        SERVICE_ADDRESS,
        Default("127.0.0.1:8082"),
        "Address for the proxy in front. All callers are trusted; their ip_header only from client.trusted_proxies.",
    ),
    key(
        "max_connections",
        integer(1, 1_000_000),
        Default("1000"),
        "Most connections at a time.",
    ),
    optional(
        "refused_status",
        integer(401, 403),
        "Status of all denials, for nginx; X-Tidegate-Status has the original one. Absent: the proxy's status, but to Envoy 429 instead of 503.",
    ),
    key(
        "joined_headers",
        Keyword(&["reject", "allow"]),
        Default("reject"),
        "Key headers with a comma: 400, because Envoy joins repeated lines with commas and forwards both lines; or read as sent. Conditions on headers read each part too. \"allow\": only if the proxy in front rejects or replaces repeated lines.",
    ),
    table("tls", &LISTEN_TLS, "TLS with callers."),
];

const SERVICE_ADDRESS: ValueKind =
    Text("an IP address and port such as \"127.0.0.1:8081\", or \"unix:/path\"");

pub(super) static UPSTREAM: [SchemaKey; 15] = [
    required(
        "url",
        Text("\"http://host:port\", \"https://host:port\", \"h2c://host:port\" or \"unix:/path\""),
        "Server to forward to, without a path. http and unix use HTTP/1.1, h2c uses HTTP/2, https negotiates by ALPN.",
    ),
    key(
        "connect_timeout",
        POSITIVE_DURATION,
        Default("1s"),
        "Timeout of one connection attempt, including TLS.",
    ),
    key(
        "response_timeout",
        DURATION,
        Default("60s"),
        "Timeout from the last byte of the request to the response head, then 504. \"0\": no limit.",
    ),
    key(
        "body_idle_timeout",
        DURATION,
        Default("0"),
        "Timeout without progress on a response body or a tunnel (WebSocket). \"0\": no limit, for event streams and long polls.",
    ),
    key(
        "tunnel_idle_timeout",
        DURATION,
        Default("1h"),
        "Timeout of a tunnel (WebSocket) without traffic. \"0\": only body_idle_timeout.",
    ),
    key(
        "pool_idle_timeout",
        POSITIVE_DURATION,
        Default("90s"),
        "How long an idle connection is kept. Set it below your app's keep-alive timeout (5 s in Node.js).",
    ),
    key(
        "pool_max_idle",
        integer(0, 1_000_000),
        Default("256"),
        "Most idle connections, over all workers. 0: none.",
    ),
    key(
        "preserve_host",
        Bool,
        Default("true"),
        "true: forward the client's Host. false: send the host of the URL.",
    ),
    key(
        "max_connections",
        integer(1, 1_000_000),
        Default("1024"),
        "Most upstream connections, over all workers, including WebSockets. An HTTP/2 connection carries up to 100 requests.",
    ),
    key(
        "max_connections_per_client",
        integer(0, 1_000_000),
        Default("256"),
        "Once half of max_connections are in use: most HTTP/1.1 connections of the other half that one client (by client.ipv6_prefix) may take, and at most half of them. Its further requests wait. 0: no limit.",
    ),
    key(
        "max_tunnels_per_client",
        integer(0, 1_000_000),
        Default("0"),
        "Most tunnels (WebSockets) of one client (by client.ipv6_prefix); further ones get 429. 0: no limit.",
    ),
    key(
        "queue_timeout",
        DURATION,
        Default("1s"),
        "How long a request waits for a connection or stream, then 503.",
    ),
    key(
        "retry_connect",
        integer(0, 100),
        Default("1"),
        "Retries of a connection attempt, before any byte of the request is sent.",
    ),
    key(
        "retry_idempotent",
        Bool,
        Default("true"),
        "Retry a request once if a reused connection is dead. Only for idempotent methods without a body.",
    ),
    table("tls", &UPSTREAM_TLS, "TLS to an https upstream."),
];

pub(super) static UPSTREAM_TLS: [SchemaKey; 4] = [
    optional(
        "ca",
        PEM_PATH,
        "Trusted CAs, or the server's own certificate. Absent: the system's.",
    ),
    optional(
        "cert",
        Text("the path of a PEM file"),
        "Client certificate with its chain, if the server requires one.",
    ),
    optional(
        "key",
        Text("the path of a PEM file"),
        "Private key of cert.",
    ),
    optional(
        "server_name",
        Text("a host name"),
        "Name to verify. Absent: the host of the URL.",
    ),
];

pub(super) static PATH: [SchemaKey; 13] = [
    key(
        "normalize",
        Bool,
        Default("true"),
        "Decode unneeded escapes and resolve . and .. segments. false: match the raw path, ignoring the keys below.",
    ),
    key(
        "forward",
        Keyword(&["unchanged", "normalized"]),
        Default("unchanged"),
        "Path that the app receives: as sent, or normalized, so that it is the matched one: unneeded escapes decoded, dots resolved, // merged. Escaped slashes are separators with escaped_slashes = \"decode\" only; case, parameters and the final slash stay. [check] matches the path as sent.",
    ),
    key("merge_slashes", Bool, Default("true"), "Treat // as /."),
    key(
        "authority",
        Keyword(&["both", "ignore"]),
        Default("both"),
        "Whether //host/a is read also as /a. \"ignore\": an app that parses the target as a URL (Node new URL, JDK HttpServer) is open to //host/ before any limited path.",
    ),
    key(
        "escaped_slashes",
        Keyword(&["both", "reject", "keep", "decode"]),
        Default("both"),
        "How %2F, %5C and \\ are read: as separator and as part of the segment (two readings); reject with 400; as part of the segment; as separator.",
    ),
    key(
        "escaped_delimiters",
        Keyword(&["both", "reject", "keep"]),
        Default("both"),
        "How %3F and %23 are read: as the end of the path and as part of it (two readings); reject with 400; as part of it. \"keep\": an app that decodes before it splits off the query is open to them.",
    ),
    key(
        "control_characters",
        Keyword(&["reject", "allow"]),
        Default("reject"),
        "Paths with %01 to %1F or %7F: 400, or part of the segment. \"allow\": an app that strips them has unlimited spellings of a limited path. %00 is always 400.",
    ),
    key(
        "invalid_utf8",
        Keyword(&["reject", "allow"]),
        Default("reject"),
        "Paths that are not UTF-8 when decoded, or that have a new escape then (%6%31 becomes %61): 400, or matched byte by byte. \"allow\", for Latin-1 paths: an app that drops or replaces such bytes has unlimited spellings of a limited path.",
    ),
    key(
        "trailing_slash",
        Keyword(&["ignore", "significant"]),
        Default("ignore"),
        "\"ignore\": /a/ equals /a.",
    ),
    key(
        "path_parameters",
        Keyword(&["strip", "keep"]),
        Default("strip"),
        "\"strip\": /a;x=1 equals /a.",
    ),
    key(
        "case_sensitive",
        Bool,
        Default("true"),
        "Whether /A and /a differ. Set it as your app behaves.",
    ),
    key(
        "ambiguous_key",
        Keyword(&["reject", "first"]),
        Default("reject"),
        "Requests with a path or path:PATTERN in the key that differs between the matching readings: 400, or the first reading counts. \"first\": the app may serve another key than the one charged.",
    ),
    key(
        "max_readings_size",
        byte_size(0, 1 << 20),
        Default("32KiB"),
        "Most bytes of all readings of one path, 256 more for each; above: 400. A path with one reading is not bounded. Larger: more CPU time per hostile path.",
    ),
];
