//! Holds a response back to what its key can pay, and ends it when nothing is left.

use bytes::Bytes;
use http_body::Frame;
use std::task::{Context, Poll};

use super::{FirstFrame, UpstreamBody, UpstreamBodySource};
use crate::proxy::body::BodyError;
use crate::proxy::http::response_cost::ResponseFlow;

impl UpstreamBody {
    /// The part of a frame that the request's key can pay. The rest stays for the next frame; while
    /// the store is asked, all of it. Fails with the last event if nothing is left.
    pub(super) fn poll_flow(
        &mut self,
        frame: Frame<Bytes>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Frame<Bytes>, Option<Bytes>>> {
        let meter = self.cost_meter.as_mut();
        let Some(meter) = meter.filter(|meter| meter.may_cut_off()) else {
            return Poll::Ready(Ok(frame));
        };
        let mut data = match frame.into_data() {
            Ok(data) if !data.is_empty() => data,
            Ok(data) => return Poll::Ready(Ok(Frame::data(data))),
            Err(trailers) => return Poll::Ready(Ok(trailers)),
        };
        let most = match meter.poll_flow(data.len(), cx) {
            Poll::Ready(ResponseFlow::Bytes(most)) => most.min(data.len()),
            Poll::Ready(ResponseFlow::End(last_event)) => return Poll::Ready(Err(last_event)),
            Poll::Pending => 0,
        };
        let rest = data.split_off(most);
        if !rest.is_empty() {
            self.first_frame = FirstFrame::Data(rest);
        }
        if most == 0 {
            return Poll::Pending;
        }
        Poll::Ready(Ok(Frame::data(data)))
    }

    /// Ends the response, whose key has nothing left, and its exchange with the upstream.
    pub(super) fn cut_off(&mut self, last_event: Option<Bytes>) -> Result<Frame<Bytes>, BodyError> {
        let error = self.fail(BodyError::CutOff);
        let event = last_event.ok_or(error)?;
        (self.source, self.first_frame) = (UpstreamBodySource::Moved, FirstFrame::None);
        Ok(Frame::data(event))
    }
}
