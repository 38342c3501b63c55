//! Real sockets on loopback: a client, the server with a handler of the test, an upstream of the test.

mod clients;
mod shutdown;
mod support;
mod tunnels;
mod upstream_connections;
mod upstreams;
