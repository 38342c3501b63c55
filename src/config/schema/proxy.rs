//! What stands between clients and the upstream: `[listen]`, `[upstream]`, `[client]`, `[path]`.

use super::*;

pub(super) static LISTEN: [SchemaKey; 7] = [
    key(
        "address",
        Text("an IP address and port such as \"0.0.0.0:8080\", or \"unix:/path\""),
        Default("0.0.0.0:8080"),
        "IP address and port that clients connect to, or a Unix socket, whose clients count as 127.0.0.1.",
    ),
    key(
        "proxy_protocol",
        Keyword(&["off", "require"]),
        Default("off"),
        "Whether every connection begins with a PROXY header, version 1 or 2, that says who the client is. \"require\": without one, or with a wrong one, it is closed.",
    ),
    key(
        "proxy_protocol_from",
        TextList("networks such as \"10.0.0.0/8\""),
        Default(""),
        "The load balancers that send it. Connections from all others are closed.",
    ),
    key(
        "max_connections",
        integer(1, 1_000_000),
        Default("10000"),
        "Connections served at a time; further ones wait in the kernel's backlog.",
    ),
    key(
        "threads",
        integer(0, 1024),
        Default("0"),
        "Worker threads. 0: as many as the container may use; a CPU limit counts.",
    ),
    key("tls", Table(&LISTEN_TLS), Optional, "TLS with clients."),
    key(
        "http",
        Table(&LISTEN_HTTP),
        Optional,
        "Bounds on what a client may send, and how slowly.",
    ),
];

pub(super) static LISTEN_TLS: [SchemaKey; 6] = [
    key(
        "cert",
        PEM_PATH,
        Required,
        "The certificate that clients see, with its chain behind it. For clients that name no host, or one that no other certificate has.",
    ),
    key(
        "key",
        PEM_PATH,
        Required,
        "Its private key, without a passphrase.",
    ),
    key(
        "client_ca",
        PEM_PATH,
        Optional,
        "Certificates that have to stand behind those of clients. Needed unless client_auth is \"none\".",
    ),
    key(
        "client_crl",
        PEM_PATH,
        Optional,
        "Lists of revoked certificates (CRLs), one of every issuer that a client's certificate may have, all in one file. A certificate of an issuer without a list, or with one that is out of date, is refused.",
    ),
    key(
        "client_auth",
        Keyword(&["none", "optional", "require"]),
        Default("none"),
        "Whether clients are asked for a certificate. \"optional\": it may be missing, but not be wrong. Who fails doesn't get past the handshake.",
    ),
    key(
        "certificates",
        TableList(&LISTEN_TLS_CERTIFICATES),
        Optional,
        "More certificates, chosen by the host that a client names (SNI).",
    ),
];

pub(super) static LISTEN_TLS_CERTIFICATES: [SchemaKey; 2] = [
    key(
        "cert",
        PEM_PATH,
        Required,
        "A certificate and its chain. It is for the DNS names in it; *.example.com covers one label.",
    ),
    key("key", PEM_PATH, Required, "Its private key."),
];

const PEM_PATH: ValueKind = Text("the path of a PEM file");

pub(super) static LISTEN_HTTP: [SchemaKey; 8] = [
    key(
        "header_timeout",
        POSITIVE_DURATION,
        Default("10s"),
        "For a whole request head, from its first byte.",
    ),
    key(
        "idle_timeout",
        POSITIVE_DURATION,
        Default("75s"),
        "How long a connection may stay open without a request.",
    ),
    key(
        "body_idle_timeout",
        POSITIVE_DURATION,
        Default("30s"),
        "How long a request body may make no progress, or a client not read its response or what comes through a tunnel.",
    ),
    // hyper needs room for 8 KiB.
    key(
        "max_header_bytes",
        byte_size(8 << 10, 16 << 20),
        Default("64KiB"),
        "Largest request head. Above: 431.",
    ),
    key(
        "max_headers",
        integer(1, 10_000),
        Default("100"),
        "Most header fields of a request; an HTTP/2 client's cookies count as one. Above: 431.",
    ),
    key(
        "max_body_bytes",
        byte_size(0, u64::MAX),
        Default("0"),
        "Largest request body. Above: 413. \"0\": no limit.",
    ),
    key(
        "max_concurrent_streams",
        integer(1, 1_000_000),
        Default("200"),
        "Requests at a time on one HTTP/2 connection.",
    ),
    key(
        "max_requests_waiting",
        integer(0, 1_000_000),
        Default("1024"),
        "Requests that leaky_bucket holds or that wait for an upstream connection, all together. Further ones get 503 at once.",
    ),
];

pub(super) static RLS: [SchemaKey; 4] = [
    key(
        "address",
        SERVICE_ADDRESS,
        Default("127.0.0.1:8081"),
        "IP address and port that Envoys connect to, or a Unix socket. Whoever can connect is believed.",
    ),
    key(
        "max_connections",
        integer(1, 1_000_000),
        Default("1000"),
        "Connections at a time.",
    ),
    key(
        "max_concurrent_streams",
        integer(1, 1_000_000),
        Default("1000"),
        "Calls at a time on one connection.",
    ),
    key(
        "tls",
        Table(&LISTEN_TLS),
        Optional,
        "TLS with those who call.",
    ),
];

pub(super) static CHECK: [SchemaKey; 4] = [
    key(
        "address",
        SERVICE_ADDRESS,
        Default("127.0.0.1:8082"),
        "IP address and port that the proxy in front asks, or a Unix socket. Whoever can connect is believed what it says of a request; for the client's address client.trusted_proxies holds as ever.",
    ),
    key(
        "max_connections",
        integer(1, 1_000_000),
        Default("1000"),
        "Connections at a time.",
    ),
    key(
        "refused_status",
        integer(401, 403),
        Optional,
        "Status of all refusals, for nginx, which understands 401 and 403 only. What it would have been stands in X-Tidegate-Status. Absent: 429, 403, 503 and so on, as from the proxy; to Envoy, 429 instead of 503.",
    ),
    key(
        "tls",
        Table(&LISTEN_TLS),
        Optional,
        "TLS with those who ask.",
    ),
];

const SERVICE_ADDRESS: ValueKind =
    Text("an IP address and port such as \"127.0.0.1:8081\", or \"unix:/path\"");

pub(super) static UPSTREAM: [SchemaKey; 12] = [
    key(
        "url",
        Text("\"http://host:port\", \"https://host:port\", \"h2c://host:port\" or \"unix:/path\""),
        Required,
        "What to forward to, without a path. http and unix: HTTP/1.1; h2c: HTTP/2; https: what the server prefers of both.",
    ),
    key(
        "connect_timeout",
        POSITIVE_DURATION,
        Default("1s"),
        "For one try to connect, TLS included.",
    ),
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
        POSITIVE_DURATION,
        Default("90s"),
        "How long an idle connection is kept. Set it below the keep-alive time of your app (5 s in Node.js).",
    ),
    key(
        "pool_max_idle",
        integer(0, 1_000_000),
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
        integer(1, 1_000_000),
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
        integer(0, 100),
        Default("1"),
        "Further tries to connect when no byte of the request was sent.",
    ),
    key(
        "retry_idempotent",
        Bool,
        Default("true"),
        "Send a request once more when a reused connection turns out to be dead. Only without a body and with an idempotent method.",
    ),
    key(
        "tls",
        Table(&UPSTREAM_TLS),
        Optional,
        "For https. Files are read again when they change.",
    ),
];

pub(super) static UPSTREAM_TLS: [SchemaKey; 4] = [
    key(
        "ca",
        PEM_PATH,
        Optional,
        "Certificates to trust. Absent: the system's.",
    ),
    key(
        "cert",
        Text("the path of a PEM file"),
        Optional,
        "Our certificate and its chain, for an upstream that asks for one.",
    ),
    key(
        "key",
        Text("the path of a PEM file"),
        Optional,
        "Its private key.",
    ),
    key(
        "server_name",
        Text("a host name"),
        Optional,
        "The name that is verified. Absent: the host of the URL.",
    ),
];

pub(super) static CLIENT: [SchemaKey; 5] = [
    key(
        "trusted_proxies",
        TextList("networks such as \"10.0.0.0/8\""),
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
        integer(0, 128),
        Default("64"),
        "IPv6 clients are told apart by this many bits. Whoever has one address of a /64 has all of them.",
    ),
    key(
        "ipv4_prefix",
        integer(0, 32),
        Default("32"),
        "IPv4 clients are told apart by this many bits.",
    ),
    key(
        "jwt",
        Table(&CLIENT_JWT),
        Optional,
        "Whose tokens are believed, for jwt in keys and matches.",
    ),
];

pub(super) static CLIENT_JWT: [SchemaKey; 4] = [
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

pub(super) static PATH: [SchemaKey; 6] = [
    key(
        "normalize",
        Bool,
        Default("true"),
        "Match on the normalized path: needless escapes decoded, . and .. resolved. false: byte for byte as it came, and the other keys here do nothing.",
    ),
    key("merge_slashes", Bool, Default("true"), "// is /."),
    key(
        "escaped_slashes",
        Keyword(&["both", "reject", "keep", "decode"]),
        Default("both"),
        "How %2F, %5C and \\ are read. As separators and as part of the segment, and a policy matches if either does; such a request gets 400; part of the segment; separators.",
    ),
    key(
        "trailing_slash",
        Keyword(&["ignore", "significant"]),
        Default("ignore"),
        "Whether /a/ is /a. \"ignore\": it is.",
    ),
    key(
        "path_parameters",
        Keyword(&["strip", "keep"]),
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
