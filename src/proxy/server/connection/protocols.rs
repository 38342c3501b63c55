//! HTTP settings of a listener's connections.

use hyper::server::conn::{http1, http2};
use hyper_util::rt::TokioTimer;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use super::streams::StreamTaskExecutor;
use super::upgrade_handover::UpgradeHandover;
use crate::proxy::body::RequestBodyLimits;
use crate::proxy::client_connection::connection_load::ServerLoad;
use crate::proxy::client_connection::connection_memory::{
    H2_CONNECTION_WINDOW_BYTES, H2_STREAM_WINDOW_BYTES,
};
use crate::proxy::client_connection::connection_monitor::{ConnectionMonitor, ConnectionTimeouts};
use crate::proxy::server::allocator_trim::AllocatorTrim;
use crate::proxy::server::listener::ListenerConfig;

/// Header limit for which hyper's parser keeps the headers on the stack. Any other header limit
/// costs an allocation.
const HYPER_MAX_STACK_HEADERS: usize = 100;

/// Lower bound for the size limit of an HTTP/1 connection's buffers, per direction.
const MIN_HTTP1_BUFFER_LIMIT_BYTES: usize = 64 * 1024;

/// Response bytes buffered per stream while the client's flow-control window is exhausted.
const H2_STREAM_SEND_BUFFER_BYTES: usize = 32 * 1024;

/// Maximum streams that a client has reset before the server accepted them ("rapid reset").
const H2_MAX_PENDING_RESETS: usize = 20;

/// Maximum streams that the server resets for client errors before it closes the connection.
const H2_MAX_LOCAL_RESETS: usize = 256;

/// Factor that spreads the ages of successive connections: 13 is coprime to the 21 percentages.
const AGE_SPREAD_FACTOR: u64 = 13;

/// Interval of PINGs, which detect a peer that disappeared without closing the connection.
const H2_PING_INTERVAL: Duration = Duration::from_secs(20);
const H2_PING_TIMEOUT: Duration = Duration::from_secs(10);

/// One listener, on one worker.
#[derive(Debug)]
pub(crate) struct WorkerListener {
    pub(crate) config: Arc<ListenerConfig>,
    pub(super) http1: http1::Builder,
    load: ServerLoad,
    pub(super) allocator_trim: Rc<AllocatorTrim>,
}

impl WorkerListener {
    /// Panics of HTTP/2 stream tasks are counted in `load`.
    pub(crate) fn new(
        config: Arc<ListenerConfig>,
        load: ServerLoad,
        allocator_trim: Rc<AllocatorTrim>,
    ) -> Self {
        let settings = &config.settings;
        let mut http1 = http1::Builder::new();
        let max_head = settings.max_header_bytes;
        http1.half_close(false).max_header_size(max_head);
        http1.max_buf_size(max_head.saturating_add(1).max(MIN_HTTP1_BUFFER_LIMIT_BYTES));
        if settings.max_headers != HYPER_MAX_STACK_HEADERS {
            http1.max_headers(settings.max_headers);
        }
        Self {
            config,
            http1,
            load,
            allocator_trim,
        }
    }

    /// Time until the connection with this id ends gracefully, from 90 % to 110 % of the setting.
    /// Successive ids are spread evenly, so that connections of one moment do not end together.
    pub(crate) fn connection_age_limit(&self, id: u64) -> Option<Duration> {
        let percent = 90 + u32::try_from(id.wrapping_mul(AGE_SPREAD_FACTOR) % 21).unwrap_or(0);
        Some(self.config.settings.max_connection_age? / 100 * percent)
    }

    pub(crate) fn connection_timeouts(&self) -> ConnectionTimeouts {
        ConnectionTimeouts {
            idle: self.config.settings.idle_timeout,
            request_head: self.config.settings.header_timeout,
            write_stall: self.config.settings.body_idle_timeout,
        }
    }

    pub(super) fn body_limits(&self) -> RequestBodyLimits {
        RequestBodyLimits {
            idle_timeout: self.config.settings.body_idle_timeout,
            min_rate: self.config.settings.min_upload_rate,
            max_bytes: self.config.settings.max_body_bytes,
        }
    }

    /// Maximum streams that a client has reset before the server accepted them, and that the server
    /// resets for client errors. The operator's own proxies may reset every stream: they have
    /// timeouts of milliseconds, and carry many clients, of which one must not end the requests of
    /// others.
    fn reset_limits(&self, monitor: &ConnectionMonitor) -> (usize, Option<usize>) {
        if self.config.kind.is_public() && !monitor.connection.is_from_trusted_proxy() {
            return (H2_MAX_PENDING_RESETS, Some(H2_MAX_LOCAL_RESETS));
        }
        let streams = usize::try_from(self.config.settings.max_concurrent_streams);
        (streams.unwrap_or(usize::MAX), None)
    }

    pub(super) fn http2_builder(
        &self,
        monitor: &Rc<ConnectionMonitor>,
        handover: &Rc<UpgradeHandover>,
    ) -> http2::Builder<StreamTaskExecutor> {
        let tasks = StreamTaskExecutor {
            monitor: Rc::clone(monitor),
            handover: Rc::clone(handover),
            load: self.load.clone(),
        };
        let mut http2 = http2::Builder::new(tasks);
        let (max_pending_resets, max_local_resets) = self.reset_limits(monitor);
        let settings = &self.config.settings;
        let max_head = u32::try_from(settings.max_header_bytes);
        http2
            .timer(TokioTimer::new())
            .enable_connect_protocol()
            .max_concurrent_streams(settings.max_concurrent_streams)
            .max_header_list_size(max_head.unwrap_or(u32::MAX))
            .initial_stream_window_size(H2_STREAM_WINDOW_BYTES)
            .initial_connection_window_size(H2_CONNECTION_WINDOW_BYTES)
            .max_send_buf_size(H2_STREAM_SEND_BUFFER_BYTES)
            .max_pending_accept_reset_streams(max_pending_resets)
            .max_local_error_reset_streams(max_local_resets)
            .keep_alive_interval(H2_PING_INTERVAL)
            .keep_alive_timeout(H2_PING_TIMEOUT);
        http2
    }
}
