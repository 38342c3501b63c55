//! Holds a streaming response at what its key can pay, and ends it when nothing is left
//! (`cut_off`).

use crate::enforcer::{EstimatedCharge, SliceDecision};
use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

/// How often a slice of the remaining units is asked for in a row: other streams take them too.
const MAX_REFUSALS: u32 = 3;

/// What one charge lets pass of its response.
#[derive(Debug)]
pub(super) struct StreamFlow {
    /// The units that the response may use by now: the estimate and the slices.
    granted: u64,
    /// The cost that the response has reported so far.
    reported: Option<u64>,
    /// Bytes of the body since then, or from its start.
    unreported_bytes: u64,
    pending: Option<PendingSlice>,
    /// Most units to ask for next: what the store has left.
    most_units: u64,
    refusals: u32,
    /// Set when the store refused further units: seconds until some would fit.
    retry_after_s: Option<u64>,
}

/// A slice that the store is asked for.
struct PendingSlice(Pin<Box<dyn Future<Output = SliceDecision> + Send>>);

impl fmt::Debug for PendingSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PendingSlice")
    }
}

impl StreamFlow {
    pub(super) fn new(charge: &EstimatedCharge) -> Self {
        Self {
            granted: charge.estimate,
            reported: None,
            unreported_bytes: 0,
            pending: None,
            most_units: u64::MAX,
            refusals: 0,
            retry_after_s: None,
        }
    }

    /// The slice that the store is still asked for.
    pub(super) fn into_pending(self) -> Option<impl Future<Output = SliceDecision> + Send> {
        self.pending.map(|pending| pending.0)
    }

    /// Notes further bytes of the body, after which the response has reported `units`.
    pub(super) fn note_bytes(&mut self, bytes: usize, units: Option<u64>) {
        if units != self.reported {
            self.reported = units;
            self.unreported_bytes = 0;
            return;
        }
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        self.unreported_bytes = self.unreported_bytes.saturating_add(bytes);
    }

    /// The units used so far: what was reported, and the bytes since.
    pub(super) fn used(&self, charge: &EstimatedCharge) -> u64 {
        let bytes = charge.units_of_bytes(self.unreported_bytes);
        self.reported.unwrap_or_default().saturating_add(bytes)
    }

    /// The bytes that may pass before more units are needed.
    pub(super) fn allowance(&self, charge: &EstimatedCharge) -> usize {
        let units = self.granted.saturating_sub(self.used(charge));
        usize::try_from(charge.bytes_of_units(units)).unwrap_or(usize::MAX)
    }

    /// Takes further units in time for bytes that have arrived. Ready with `Ok` if the response may
    /// go on, or with the seconds until further units fit if nothing is left.
    pub(super) fn poll_units(
        &mut self,
        charge: &mut EstimatedCharge,
        bytes: usize,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), u64>> {
        loop {
            let used = self.used(charge);
            let is_used_up = used >= self.granted;
            let awaited = charge.units_of_bytes(u64::try_from(bytes).unwrap_or(u64::MAX));
            let Some(slices) = &mut charge.slices else {
                return Poll::Ready(Ok(()));
            };
            // At least the data that has arrived and half a slice, at most a slice too much.
            let wanted = used.saturating_add(awaited.max(slices.next_size() / 2));
            let missing = wanted.saturating_sub(self.granted);
            match (&mut self.pending, self.retry_after_s) {
                (None, Some(retry_after_s)) if is_used_up => {
                    return Poll::Ready(Err(retry_after_s));
                }
                (None, Some(_)) => return Poll::Ready(Ok(())),
                (None, None) if missing == 0 => return Poll::Ready(Ok(())),
                (None, None) => {
                    let units = self.most_units.min(missing.max(slices.next_size()));
                    let decision = Box::pin(slices.decide(units));
                    self.pending = Some(PendingSlice(decision));
                }
                (Some(pending), _) => {
                    let decision = match pending.0.as_mut().poll(cx) {
                        Poll::Ready(decision) => decision,
                        Poll::Pending if is_used_up => return Poll::Pending,
                        Poll::Pending => return Poll::Ready(Ok(())),
                    };
                    self.pending = None;
                    let taken = match decision {
                        SliceDecision::Charged(slice) => slices.record(slice),
                        SliceDecision::Uncharged { units } => units,
                        SliceDecision::Refused {
                            remaining,
                            retry_after_s,
                        } => {
                            self.refusals += 1;
                            self.most_units = remaining;
                            if remaining == 0 || self.refusals == MAX_REFUSALS {
                                self.retry_after_s = Some(retry_after_s);
                            }
                            continue;
                        }
                    };
                    (self.refusals, self.most_units) = (0, u64::MAX);
                    self.granted = self.granted.saturating_add(taken);
                }
            }
        }
    }
}
