//! Keys of `[listen]`, `[rls]`, `[check]`, `[upstream]` and `[path]`.

use super::key::*;
use crate::policy::path::{EscapedDelimiters, EscapedSlashes, ForwardedPath};
use crate::tls::ClientAuth;
use strum::VariantNames;

schema_table! {
    pub(super) static LISTEN {
        /// Address for clients. [::] includes IPv4, and is 0.0.0.0 on machines without IPv6.
        /// Clients of a Unix socket count as 127.0.0.1.
        address: Text("an IP address and port such as \"[::]:8080\", or \"unix:/path\""),
            default = "[::]:8080";
        /// PROXY protocol, version 1 or 2. "require": connections without a valid header are
        /// closed.
        proxy_protocol: Keyword(&["off", "require"]), default = "off";
        /// Load balancers that send the PROXY header. Other connections are closed.
        proxy_protocol_from: TextList("networks such as \"10.0.0.0/8\""), default = "";
        /// Protocol of clients, for X-Forwarded-Proto, Forwarded and traces. "auto": https if TLS
        /// ends here, or if a PROXY header of version 2 says so (PP2_TYPE_SSL). "https": always.
        forwarded_proto: Keyword(&["auto", "https"]), default = "auto";
        /// Most connections at a time. A new one closes the one idle longest; if all have requests,
        /// it waits in the kernel's backlog.
        max_connections: integer(1, 1_000_000), default = "10000";
        /// Most connections of one client (by client.ipv6_prefix); further ones are closed. Peers
        /// in client.trusted_proxies are not counted. 0: no limit.
        max_connections_per_client: integer(0, 1_000_000), default = "0";
        /// Age at which a connection ends, by Connection: close or GOAWAY; requests in flight
        /// finish. Up to 10 % less or more. 0: no limit.
        max_connection_age: DURATION, default = "0s";
        /// Most memory of all client connections, by estimate; beyond it the largest are closed.
        /// Absent: 60 % of the container's limit. "0": no limit.
        max_memory: byte_size(0, u64::MAX);
        /// Worker threads. 0: by CPU affinity and CPU limit.
        threads: integer(0, 1024), default = "0";
        /// TLS with clients.
        tls: Table(&LISTEN_TLS), reload;
        /// Limits and timeouts of HTTP connections.
        http: Table(&LISTEN_HTTP);
    }

    pub(super) static LISTEN_TLS {
        /// Default certificate with its chain, for clients without SNI or with an unknown name.
        cert: PEM_PATH, required;
        /// Private key of cert, without a passphrase.
        key: PEM_PATH, required;
        /// CAs that verify client certificates, or clients' own certificates. Required unless
        /// client_auth is "none".
        client_ca: PEM_PATH;
        /// Certificate revocation lists (CRLs) in one file, one per issuer.
        client_crl: PEM_PATH;
        /// Client certificates. "optional": may be absent; invalid ones fail the handshake.
        client_auth: Keyword(ClientAuth::VARIANTS), default = "none";
        /// Send the client's certificate to the app: Client-Cert, and Client-Cert-Chain with the
        /// issuers that the client sent, up to 16 KiB (RFC 9440).
        client_cert_header: Bool, default = "false";
        /// More certificates, selected by SNI.
        certificates: TableList(&LISTEN_TLS_CERTIFICATES);
    }

    pub(super) static LISTEN_TLS_CERTIFICATES {
        /// Certificate with its chain, for its DNS names; *.example.com covers one label.
        cert: PEM_PATH, required;
        /// Private key of cert.
        key: PEM_PATH, required;
    }
}

schema_table! {
    pub(super) static LISTEN_HTTP {
        /// Timeout of a whole request head, from its first byte.
        header_timeout: POSITIVE_DURATION, default = "10s";
        /// Timeout of a connection without a request.
        idle_timeout: POSITIVE_DURATION, default = "75s";
        /// Timeout without progress on a request body, or on writing a response or tunnel data to
        /// the client.
        body_idle_timeout: POSITIVE_DURATION, default = "30s";
        /// Bytes per second of a request body that a client must send while the upstream waits for
        /// them; one that falls body_idle_timeout behind gets 408. Not for gRPC. "0": no minimum.
        min_upload_rate: byte_size(0, 1 << 30), default = "4B";
        // hyper needs a buffer of at least 8 KiB.
        /// Largest request head; larger: 431.
        max_header_bytes: byte_size(8 << 10, 16 << 20), default = "64KiB";
        /// Most header fields of a request; more: 431. The cookies of an HTTP/2 request count as
        /// one.
        max_headers: integer(1, 10_000), default = "100";
        /// Largest request body; larger: 413. "0": no limit.
        max_body_bytes: byte_size(0, u64::MAX), default = "0";
        /// Most requests at a time on an HTTP/2 connection.
        max_concurrent_streams: integer(1, 1_000_000), default = "200";
        /// Most requests delayed by leaky_bucket or waiting for an upstream connection; further
        /// ones get 503.
        max_requests_waiting: integer(0, 1_000_000), default = "1024";
    }

    pub(super) static RLS {
        /// Address for Envoy. All callers are trusted.
        address: SERVICE_ADDRESS, default = "127.0.0.1:8081";
        /// Most connections at a time.
        max_connections: integer(1, 1_000_000), default = "1000";
        /// Most calls at a time on a connection.
        max_concurrent_streams: integer(1, 1_000_000), default = "1000";
        /// TLS with callers.
        tls: Table(&LISTEN_TLS), reload;
    }

    pub(super) static CHECK {
        /// Address for the proxy in front. All callers are trusted; their ip_header only from
        /// client.trusted_proxies.
        address: SERVICE_ADDRESS, default = "127.0.0.1:8082";
        /// Most connections at a time.
        max_connections: integer(1, 1_000_000), default = "1000";
        /// Status of all denials, for nginx; X-Tidegate-Status has the original one.
        refused_status: integer(401, 403);
        /// Key headers with a comma: 400, because Envoy joins repeated lines and forwards both; or
        /// read as sent. "allow": only if the proxy in front rejects or replaces repeated lines.
        joined_headers: REJECT_OR_ALLOW, default = "reject";
        /// TLS with callers.
        tls: Table(&LISTEN_TLS), reload;
    }
}

const SERVICE_ADDRESS: ValueKind =
    Text("an IP address and port such as \"127.0.0.1:8081\", or \"unix:/path\"");

schema_table! {
    pub(super) static UPSTREAM {
        /// Server to forward to, without a path. http and unix use HTTP/1.1, h2c HTTP/2; https
        /// negotiates by ALPN.
        url: Text("\"http://host:port\", \"https://host:port\", \"h2c://host:port\" or \"unix:/path\""),
            required;
        /// Timeout of one connection attempt, including TLS.
        connect_timeout: POSITIVE_DURATION, default = "1s";
        /// Timeout from the last byte of the request to the response head, then 504. "0": no limit.
        response_timeout: DURATION, default = "60s";
        /// Timeout without progress on a response body or a tunnel (WebSocket). "0": no limit, for
        /// event streams and long polls.
        body_idle_timeout: DURATION, default = "0";
        /// Timeout of a tunnel (WebSocket) without traffic. "0": only body_idle_timeout.
        tunnel_idle_timeout: DURATION, default = "1h";
        /// How long an idle connection is kept. Set it below your app's keep-alive timeout (5 s in
        /// Node.js).
        pool_idle_timeout: POSITIVE_DURATION, default = "90s";
        /// Most idle connections, over all workers. 0: none.
        pool_max_idle: integer(0, 1_000_000), default = "256";
        /// Forward the client's Host; false: the host of the URL.
        preserve_host: Bool, default = "true";
        /// Most upstream connections, over all workers, including WebSockets. An HTTP/2 connection
        /// carries up to 100 requests.
        max_connections: integer(1, 1_000_000), default = "1024";
        /// Once half of max_connections are in use: most HTTP/1.1 connections of the other half
        /// that one client (by client.ipv6_prefix) may take, and at most half of them. Its further
        /// requests wait. Tunnels (WebSockets) count too. 0: no limit.
        max_connections_per_client: integer(0, 1_000_000), default = "256";
        /// Most tunnels (WebSockets) of one client (by client.ipv6_prefix); further ones get 429.
        /// 0: no limit.
        max_tunnels_per_client: integer(0, 1_000_000), default = "0";
        /// How long a request waits for a connection or stream, then 503.
        queue_timeout: DURATION, default = "1s";
        /// Retries of a connection attempt, before any byte of the request is sent.
        retry_connect: integer(0, 100), default = "1";
        /// Retry a request once if a reused connection is dead: only idempotent methods without a
        /// body.
        retry_idempotent: Bool, default = "true";
        /// TLS to an https upstream.
        tls: Table(&UPSTREAM_TLS), reload;
    }

    pub(super) static UPSTREAM_TLS {
        /// Trusted CAs, or the server's own certificate. Absent: the system's.
        ca: PEM_PATH;
        /// Client certificate with its chain, if the server requires one.
        cert: PEM_PATH;
        /// Private key of cert.
        key: PEM_PATH;
        /// Name to verify. Absent: the host of the URL.
        server_name: Text("a host name");
    }

    pub(super) static PATH {
        /// Decode unneeded escapes and resolve . and .. segments. false: match the raw path,
        /// ignoring the keys below.
        normalize: Bool, default = "true";
        /// Path that the app receives: as sent, or the normalized one that is matched: unneeded
        /// escapes decoded, dots resolved, // merged. Escaped slashes are separators with
        /// escaped_slashes = "decode" only; case, parameters and the final slash stay. [check]
        /// matches the path as sent.
        forward: Keyword(ForwardedPath::VARIANTS), default = "unchanged";
        /// Treat // as /.
        merge_slashes: Bool, default = "true";
        /// Whether //host/a is read also as /a. "ignore": an app that parses the target as a URL is
        /// open to //host/ before any limited path.
        authority: Keyword(&["both", "ignore"]), default = "both";
        /// How %2F, %5C and \ are read: as separator and as part of the segment (two readings);
        /// reject with 400; as part of the segment; as separator.
        escaped_slashes: Keyword(EscapedSlashes::VARIANTS), default = "both";
        /// How %3F and %23 are read: as the end of the path and as part of it (two readings);
        /// reject with 400; as part of it. "keep": an app that decodes before it splits off the
        /// query is open to them.
        escaped_delimiters: Keyword(EscapedDelimiters::VARIANTS), default = "both";
        /// Paths with %01 to %1F or %7F: 400, or part of the segment. "allow": an app that strips
        /// them has unlimited spellings of a limited path. %00 is always 400.
        control_characters: REJECT_OR_ALLOW, default = "reject";
        /// Paths that are not UTF-8 when decoded, or that have a new escape then (%6%31 becomes
        /// %61): 400, or matched byte by byte. "allow", for Latin-1 paths: an app that drops or
        /// replaces such bytes has unlimited spellings of a limited path.
        invalid_utf8: REJECT_OR_ALLOW, default = "reject";
        /// "ignore": /a/ equals /a.
        trailing_slash: Keyword(&["ignore", "significant"]), default = "ignore";
        /// "strip": /a;x=1 equals /a.
        path_parameters: Keyword(&["strip", "keep"]), default = "strip";
        /// Whether /A and /a differ. Set it as your app behaves.
        case_sensitive: Bool, default = "true";
        /// Requests with a path or path:PATTERN in the key that differs between the matching
        /// readings: 400, or the first reading counts. "first": the app may serve another key than
        /// the one charged.
        ambiguous_key: Keyword(&["reject", "first"]), default = "reject";
        /// Most bytes of all readings of one path, 256 more for each; above: 400. Larger: more CPU
        /// time per hostile path.
        max_readings_size: byte_size(0, 1 << 20), default = "32KiB";
    }
}
