//! Tests over loopback sockets: a client, the server with a test handler, and a test upstream.

mod clients;
mod shutdown;
mod support;
mod tunnels;
mod upstream_connections;
mod upstreams;
