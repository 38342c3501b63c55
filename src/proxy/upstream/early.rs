//! What an HTTP/1.1 upstream says before its answer (1xx): from the task that reads a connection to the request that
//! waits for its answer there.

use http::{HeaderMap, Request, StatusCode, Version};
use parking_lot::Mutex;
use std::sync::Arc;
use std::task::Waker;

use crate::proxy::interim::{Interim, MAX_HEADS};

/// One connection's; behind a lock, which nobody contends for, only because hyper asks for it.
#[derive(Debug, Default)]
pub(super) struct Early(Mutex<Waiting>);

#[derive(Debug, Default)]
struct Waiting {
    heads: Vec<(StatusCode, HeaderMap)>,
    reader: Option<Waker>,
}

impl Early {
    /// Has hyper tell of what comes before the answer to `request`.
    pub(super) fn listen<B>(self: &Arc<Self>, request: &mut Request<B>) {
        let early = Arc::clone(self);
        hyper::ext::on_informational(request, move |head| {
            let mut waiting = early.0.lock();
            if waiting.heads.len() < MAX_HEADS {
                waiting.heads.push((head.status(), head.headers().clone()));
            }
            if let Some(reader) = waiting.reader.take() {
                reader.wake();
            }
        });
    }

    /// Passes on what has come, and wakes the reader when there is more.
    pub(super) fn pass_on(&self, interim: &mut Interim, reader: Option<&Waker>) {
        let mut waiting = self.0.lock();
        for (status, fields) in waiting.heads.drain(..) {
            interim.pass_on(status, &fields, Version::HTTP_11);
        }
        // A waker keeps its task: none stays here longer than the request.
        waiting.reader = reader.cloned();
    }
}
