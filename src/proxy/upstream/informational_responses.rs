//! Transfers informational (1xx) responses of an HTTP/1.1 upstream from the task that reads the
//! connection to the request that waits for its response.

use http::{HeaderMap, Request, StatusCode, Version};
use parking_lot::Mutex;
use std::sync::Arc;
use std::task::Waker;

use crate::proxy::http::informational_responses::{
    InformationalForwarder, MAX_INFORMATIONAL_RESPONSES,
};

/// The queue of one connection. hyper requires the callback to be `Sync`, hence the lock; it is
/// never contended.
#[derive(Debug, Default)]
pub(super) struct InformationalResponseQueue(Mutex<InformationalQueueState>);

#[derive(Debug, Default)]
struct InformationalQueueState {
    heads: Vec<(StatusCode, HeaderMap)>,
    waker: Option<Waker>,
}

impl InformationalResponseQueue {
    /// Registers the queue as hyper's callback for 1xx responses to `request`.
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

    /// Forwards the queued responses and stores `waker` for further ones.
    pub(super) fn forward_responses(
        &self,
        interim: &mut InformationalForwarder,
        waker: Option<&Waker>,
    ) {
        let mut state = self.0.lock();
        for (status, fields) in state.heads.drain(..) {
            interim.forward(status, &fields, Version::HTTP_11);
        }
        // A stored waker keeps its task alive, so it must not outlive the request.
        state.waker = waker.cloned();
    }
}
