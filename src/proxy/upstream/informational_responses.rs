//! What an HTTP/1.1 upstream says before its answer (1xx): from the task that reads a connection to the request that
//! waits for its answer there.

use http::{HeaderMap, Request, StatusCode, Version};
use parking_lot::Mutex;
use std::sync::Arc;
use std::task::Waker;

use crate::proxy::http::informational_responses::{
    InformationalForwarder, MAX_INFORMATIONAL_RESPONSES,
};

/// One connection's; behind a lock, which nobody contends for, only because hyper asks for it.
#[derive(Debug, Default)]
pub(super) struct InformationalResponseQueue(Mutex<InformationalQueueState>);

#[derive(Debug, Default)]
struct InformationalQueueState {
    heads: Vec<(StatusCode, HeaderMap)>,
    waker: Option<Waker>,
}

impl InformationalResponseQueue {
    /// Has hyper tell of what comes before the answer to `request`.
    pub(super) fn attach_to_request<B>(self: &Arc<Self>, request: &mut Request<B>) {
        let queue = Arc::clone(self);
        hyper::ext::on_informational(request, move |head| {
            let mut state = queue.0.lock();
            if state.heads.len() < MAX_INFORMATIONAL_RESPONSES {
                state.heads.push((head.status(), head.headers().clone()));
            }
            if let Some(waker) = state.waker.take() {
                waker.wake();
            }
        });
    }

    /// Passes on what has come, and wakes the reader when there is more.
    pub(super) fn forward_responses(
        &self,
        interim: &mut InformationalForwarder,
        waker: Option<&Waker>,
    ) {
        let mut state = self.0.lock();
        for (status, fields) in state.heads.drain(..) {
            interim.forward(status, &fields, Version::HTTP_11);
        }
        // A waker keeps its task: none stays here longer than the request.
        state.waker = waker.cloned();
    }
}
