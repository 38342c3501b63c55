//! Transfers informational (1xx) responses of an HTTP/1.1 upstream from the task that reads the
//! connection to the request that waits for its response.

use http::{HeaderMap, Request, StatusCode, Version};
use parking_lot::Mutex;
use std::sync::Arc;
use std::task::Waker;

use crate::proxy::body::informational_responses::{
    InformationalForwarder, MAX_INFORMATIONAL_RESPONSES,
};

/// Queue of one connection's 1xx responses. The lock is never contended; it exists because hyper
/// requires its callback to be `Sync`.
#[derive(Debug, Default)]
pub(crate) struct InformationalResponseQueue(Mutex<InformationalQueueState>);

#[derive(Debug, Default)]
struct InformationalQueueState {
    heads: Vec<(StatusCode, HeaderMap)>,
    /// Responses received since the last forwarding, also those beyond the capacity of `heads`.
    received: usize,
    waker: Option<Waker>,
}

impl InformationalResponseQueue {
    /// Registers the queue as hyper's callback for 1xx responses to `request`.
    pub(super) fn attach_to_request<B>(self: &Arc<Self>, request: &mut Request<B>) {
        let queue = Arc::clone(self);
        hyper::ext::on_informational(request, move |head| {
            let mut state = queue.0.lock();
            state.received += 1;
            if state.heads.len() < MAX_INFORMATIONAL_RESPONSES {
                state.heads.push((head.status(), head.headers().clone()));
            }
            if let Some(waker) = state.waker.take() {
                waker.wake();
            }
        });
    }

    /// Forwards the queued 1xx responses to the client and stores `waker`, which the next one
    /// wakes. Returns `false` if the upstream sent too many.
    pub(super) fn forward_responses(
        &self,
        interim: &mut InformationalForwarder,
        waker: Option<&Waker>,
    ) -> bool {
        let mut state = self.0.lock();
        for (status, fields) in state.heads.drain(..) {
            interim.forward(status, &fields, Version::HTTP_11);
        }
        // `None` clears the waker after the request: a stored waker keeps its task's memory.
        state.waker = waker.cloned();
        interim.count_received(std::mem::take(&mut state.received))
    }
}
