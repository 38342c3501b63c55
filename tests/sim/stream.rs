//! A streaming response on its way to the client: the product decides how much of it may pass.

use crate::sim::scenario::StreamSpec;
use bytes::Bytes;
use http::Response;
use http::header::CONTENT_TYPE;
use http_body::Frame;
use std::future::poll_fn;
use std::time::Duration;
use tidegate::enforcer::EstimatedCharge;
use tidegate::proxy::{CostMeter, ResponseFlow};
use tokio::time::{Instant, sleep_until};

/// What the client received of a stream.
#[derive(Clone, Debug, Default)]
pub(crate) struct StreamRecord {
    /// After each whole event: the time, and the units that the response has used.
    pub(crate) used: Vec<(u64, u64)>,
    pub(crate) end: StreamEnd,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum StreamEnd {
    /// The client left, the process ended, or the run was over.
    #[default]
    Unknown,
    Complete,
    /// The key had nothing left.
    CutOff {
        at_us: u64,
        is_within_event: bool,
    },
}

impl StreamRecord {
    /// The units used at the end.
    pub(crate) fn units(&self) -> u64 {
        self.used.last().map_or(0, |(_, units)| *units)
    }

    /// The most units that were used at a time. The end may report fewer.
    pub(crate) fn most_units(&self) -> u64 {
        let units = self.used.iter().map(|(_, units)| *units);
        units.max().unwrap_or(0)
    }
}

/// Passes a response on, as the body of a response does in the proxy. `record` changes the record
/// at the current time.
pub(crate) async fn pass_stream(
    stream: StreamSpec,
    charges: Vec<EstimatedCharge>,
    record: impl Fn(&dyn Fn(&mut StreamRecord, u64)),
) {
    let head = Response::builder().header(CONTENT_TYPE, "text/event-stream");
    let head = head.body(()).unwrap().into_parts().0;
    let mut meter = CostMeter::settle_head_and_create(charges, &head).expect("a charge of a body");
    record(&|_, _| {});
    let started = Instant::now();
    for number in 1..=stream.events {
        let mut event = Bytes::from(stream.event_text(number));
        let event_bytes = event.len();
        let due_us = stream.interval_us * number;
        sleep_until(started + Duration::from_micros(due_us)).await;
        while !event.is_empty() {
            let flow = poll_fn(|cx| meter.poll_flow(event.len(), cx));
            let ResponseFlow::Bytes(bytes) = flow.await else {
                let is_within_event = event.len() < event_bytes;
                return record(&|record, at_us| {
                    record.end = StreamEnd::CutOff {
                        at_us,
                        is_within_event,
                    };
                });
            };
            let part = event.split_to(bytes.min(event.len()));
            meter.read_frame(&Frame::data(part));
        }
        let units = stream.units_after(number);
        record(&|record, at_us| record.used.push((at_us, units)));
    }
    meter.settle();
    record(&|record, _| record.end = StreamEnd::Complete);
}
