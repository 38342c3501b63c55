//! State of one client connection, shared by its socket, its requests and the server.

pub(crate) mod close_reason;
pub(crate) mod connection_load;
pub(crate) mod connection_memory;
pub(crate) mod connection_monitor;
pub(crate) mod continue_responses;
pub(crate) mod open_connection;
pub(crate) mod unsent_responses;
