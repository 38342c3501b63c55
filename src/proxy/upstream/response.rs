//! Response bodies: local replies, bodies streamed from the upstream, and tunnels.

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use std::pin::Pin;
use std::task::{Context, Poll};

use super::response_body::UpstreamBody;
use crate::enforcer::ConcurrencySlotGuard;
use crate::proxy::body::error::BodyError;
use crate::proxy::body::tunnel::Tunnel;
use crate::telemetry::metrics::ActiveHttpRequest;
use crate::telemetry::trace::RequestRecording;

/// A response body, sent to the client.
#[derive(Debug, Default)]
pub enum ResponseBody {
    #[default]
    Empty,
    /// A locally generated body.
    Full(Bytes),
    /// A locally generated body with trailers.
    FullWithTrailers(Bytes, Option<HeaderMap>),
    /// A body streamed from the upstream.
    Upstream(UpstreamBody),
    /// No body: after the response head, a tunnel copies bytes of another protocol.
    Tunnel(Box<Tunnel>),
}

impl ResponseBody {
    /// Attaches the concurrency slot and the trace recording to the body, to end with it. For a
    /// local body, which is already complete, they end immediately.
    pub(crate) fn attach_guards(
        &mut self,
        slot_guard: Option<ConcurrencySlotGuard>,
        recording: Option<Box<RequestRecording>>,
    ) {
        match self {
            Self::Upstream(body) => body.attach_guards(slot_guard, recording),
            Self::Tunnel(tunnel) => {
                tunnel.attach_slot_guard(slot_guard);
                tunnel.keep(recording);
            }
            Self::Empty | Self::Full(_) | Self::FullWithTrailers(..) => {}
        }
    }

    /// Attaches the request's metrics to the body, to end with it. For a local body, they end
    /// immediately.
    pub(crate) fn attach_active_request(&mut self, active: Box<ActiveHttpRequest>) {
        match self {
            Self::Upstream(body) => body.attach_active_request(active),
            Self::Tunnel(tunnel) => tunnel.keep(active),
            Self::Empty | Self::Full(_) | Self::FullWithTrailers(..) => {}
        }
    }

    /// Takes the tunnel of a response that switches protocols.
    pub(crate) fn take_tunnel(&mut self) -> Option<Box<Tunnel>> {
        let Self::Tunnel(_) = self else { return None };
        match std::mem::take(self) {
            Self::Tunnel(tunnel) => Some(tunnel),
            _ => None,
        }
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        match self.get_mut() {
            Self::Empty | Self::Tunnel(_) => Poll::Ready(None),
            Self::Full(bytes) if bytes.is_empty() => Poll::Ready(None),
            Self::Full(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Self::FullWithTrailers(bytes, trailers) if bytes.is_empty() => Poll::Ready(
                trailers
                    .take()
                    .map(|trailers| Ok(Frame::trailers(trailers))),
            ),
            Self::FullWithTrailers(bytes, _) => {
                Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes)))))
            }
            Self::Upstream(body) => body.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Empty | Self::Tunnel(_) => true,
            Self::Full(bytes) => bytes.is_empty(),
            Self::FullWithTrailers(bytes, trailers) => bytes.is_empty() && trailers.is_none(),
            Self::Upstream(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Empty | Self::Tunnel(_) => SizeHint::with_exact(0),
            Self::Full(bytes) | Self::FullWithTrailers(bytes, _) => {
                SizeHint::with_exact(u64::try_from(bytes.len()).unwrap_or(u64::MAX))
            }
            Self::Upstream(body) => body.size_hint(),
        }
    }
}
