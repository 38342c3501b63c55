//! The rest of an HTTP/2 request body that nobody wants.

use http_body::Body;
use std::cell::RefCell;
use std::future::{pending, poll_fn};
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;
use tokio::time::sleep;

use super::RequestBodyStream;

/// Maximum bytes of an unwanted HTTP/2 request body that are read and dropped. After these bytes
/// the client has to wait for the end of the response.
const MAX_HTTP2_DISCARD_BYTES: u64 = 16 * 1024 * 1024;

/// Time between the end of a response and the reset of its unwanted HTTP/2 request body. Common
/// clients lose a response that arrives together with a reset, even with `NO_ERROR`.
const HTTP2_RESET_DELAY: Duration = Duration::from_secs(1);

/// Reads and drops the rest of an HTTP/2 request body. Dropping `body` resets the stream if the
/// client has not ended or reset it. The reset waits until [`HTTP2_RESET_DELAY`] after the
/// response. No more than [`MAX_HTTP2_DISCARD_BYTES`] are read.
pub(super) async fn discard_http2_rest(body: Rc<RefCell<RequestBodyStream>>) {
    let progress = Rc::clone(&body.borrow().progress);
    let rest = async {
        let mut discarded = 0;
        while discarded <= MAX_HTTP2_DISCARD_BYTES {
            let incoming = poll_fn(|cx| Pin::new(&mut body.borrow_mut().incoming).poll_frame(cx));
            let Some(Ok(frame)) = incoming.await else {
                return;
            };
            body.borrow().release_frame(&frame);
            discarded += frame.data_ref().map_or(0, |data| data.len() as u64);
        }
        pending().await
    };
    let delay = async {
        progress.response_ended.notified().await;
        sleep(HTTP2_RESET_DELAY).await;
    };
    tokio::select! {
        () = rest => {}
        () = delay => {}
    }
}
