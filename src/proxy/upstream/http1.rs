//! HTTP/1.1 connections to the upstream.
//!
//! The task of a request polls its connection: it wakes no other task, and what the client does not
//! take stays with the upstream.

use futures_util::FutureExt;
use futures_util::future::{Fuse, LocalBoxFuture};
use futures_util::task::AtomicWaker;
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::TrySendError;
use hyper::client::conn::http1::{Builder, SendRequest};
use hyper_util::rt::TokioIo;
use std::cell::RefCell;
use std::fmt;
use std::future::{Future, poll_fn};
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use tokio::task::{spawn_local, unconstrained};
use tokio_util::task::AbortOnDropHandle;

use super::MAX_RESPONSE_HEAD_BYTES;
use super::connector::UpstreamSocket;
use crate::proxy::body::informational_responses::InformationalResponseQueue;
use crate::proxy::body::request::RequestBody;

/// Maximum header lines of an HTTP/1.1 response. hyper's default of 100 is too few for frameworks
/// that send one line per cookie or preload.
const MAX_RESPONSE_HEADERS: usize = 256;

/// An HTTP/1.1 connection. Dropping it closes the connection, during an upload as soon as the
/// worker runs the aborted task.
pub(crate) struct Http1Connection {
    sender: SendRequest<RequestBody>,
    pub(crate) informational: Arc<InformationalResponseQueue>,
    pub(crate) peer: Option<IpAddr>,
    /// Reads and writes, until the connection is closed.
    driver: Rc<RefCell<Fuse<LocalBoxFuture<'static, ()>>>>,
    wakeup: Arc<DriverWakeup>,
    /// `wakeup` as a waker; the driver is polled with it.
    waker: Waker,
    /// Task that polls the driver instead: it sends the rest of a request's body, also while the
    /// client does not read the response.
    upload: Option<AbortOnDropHandle<()>>,
}

/// Wakes the task that waits for the driver.
#[derive(Default)]
struct DriverWakeup {
    /// Empty while no task waits, also during a poll.
    task: AtomicWaker,
    /// Whether the driver has to be polled again.
    was_woken: AtomicBool,
}

impl Wake for DriverWakeup {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.was_woken.store(true, Ordering::Release);
        self.task.wake();
    }
}

impl Http1Connection {
    /// Prepares `socket` for requests. `watcher` is woken when the upstream closes the idle
    /// connection.
    ///
    /// # Errors
    /// Fails as hyper does.
    pub(super) async fn new(socket: UpstreamSocket, watcher: &Waker) -> hyper::Result<Self> {
        let peer = socket.peer_ip();
        let (sender, connection) = Builder::new()
            .max_buf_size(MAX_RESPONSE_HEAD_BYTES as usize)
            .max_headers(MAX_RESPONSE_HEADERS)
            .handshake(TokioIo::new(socket))
            .await?;
        let driver = async move {
            if let Err(error) = connection.with_upgrades().await {
                tracing::debug!(%error, "upstream connection closed");
            }
        };
        let wakeup = Arc::<DriverWakeup>::default();
        let http1 = Self {
            sender,
            informational: Arc::default(),
            peer,
            driver: Rc::new(RefCell::new(driver.boxed_local().fuse())),
            waker: Arc::clone(&wakeup).into(),
            wakeup,
            upload: None,
        };
        // Until the first poll, `is_ready` is false.
        http1.poll_driver();
        http1.watch(watcher);
        Ok(http1)
    }

    /// Whether the connection is open, and no request uses it.
    pub(crate) fn is_ready(&self) -> bool {
        self.sender.is_ready()
    }

    /// Begins a request. The response arrives while the connection is polled.
    pub(super) fn send(
        &mut self,
        request: Request<RequestBody>,
    ) -> impl Future<Output = Result<Response<Incoming>, TrySendError<Request<RequestBody>>>> + use<>
    {
        // The caller polls next, so hyper need not wake anyone.
        self.wakeup.task.take();
        self.sender.try_send_request(request)
    }

    /// Polls the driver, and `work`, which only the driver makes ready: tokio's budget, which would
    /// wake the waker of `work`, does not apply to it.
    pub(super) fn poll_with<T>(
        &self,
        cx: &mut Context<'_>,
        mut work: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        if self.upload.is_some() {
            return work(cx);
        }
        self.wakeup.task.take();
        let unwoken = &mut Context::from_waker(Waker::noop());
        let mut poll_work = || pin!(unconstrained(poll_fn(&mut work))).poll(unwoken);
        let polled = poll_work();
        if polled.is_ready() {
            return polled;
        }
        self.poll_driver();
        let polled = poll_work();
        if polled.is_pending() {
            self.watch(cx.waker());
        }
        polled
    }

    /// Reads and writes what is possible without waiting. Notices if the upstream has closed the
    /// connection.
    pub(super) fn poll_driver(&self) {
        self.wakeup.was_woken.store(false, Ordering::Release);
        let cx = &mut Context::from_waker(&self.waker);
        _ = self.driver.borrow_mut().poll_unpin(cx);
    }

    /// Wakes `watcher` when the driver has to be polled: now, if it was woken since the last poll.
    pub(super) fn watch(&self, watcher: &Waker) {
        self.wakeup.task.register(watcher);
        if self.wakeup.was_woken.load(Ordering::Acquire) {
            watcher.wake_by_ref();
        }
    }

    /// Starts a task that sends the rest of the request's body.
    pub(super) fn start_upload(&mut self) {
        let driver = Rc::clone(&self.driver);
        let upload = poll_fn(move |cx| Pin::new(&mut *driver.borrow_mut()).poll(cx));
        self.upload = Some(AbortOnDropHandle::new(spawn_local(upload)));
    }

    /// Ends a request. `watcher` is as for [`Http1Connection::new`].
    pub(super) fn end_request(&mut self, watcher: &Waker) {
        let was_uploading = self.upload.take().is_some();
        // The upstream may have closed the connection after the end of the response.
        if was_uploading || self.wakeup.was_woken.load(Ordering::Acquire) {
            self.poll_driver();
        }
        self.watch(watcher);
    }
}

impl fmt::Debug for Http1Connection {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = formatter.debug_struct("Http1Connection");
        debug.field("peer", &self.peer).finish_non_exhaustive()
    }
}
