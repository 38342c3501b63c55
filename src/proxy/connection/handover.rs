//! From a request that was upgraded to the tunnel that takes its place.
//!
//! hyper gives an upgraded client's bytes to whoever drives the connection, or runs its streams; the tunnel's
//! other end comes with the response. Both meet in the [`Handover`].

use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use std::cell::{Cell, RefCell};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::say_goodbye;
use crate::proxy::tunnel::{Over, Tunnel};
use crate::proxy::watch::{Active, Watch, WatchedSocket};
use crate::telemetry::metrics::Closed;

/// Where a request leaves a tunnel for whoever gets the client's bytes from hyper.
#[derive(Debug, Default)]
pub(super) struct Handover {
    switched: RefCell<Option<Switched>>,
    offered: Cell<bool>,
}

impl Handover {
    pub(super) fn put(&self, switched: Switched) {
        self.switched.replace(Some(switched));
    }

    pub(super) fn take(&self) -> Option<Switched> {
        self.switched.take()
    }

    /// A request has come that could have been upgraded.
    pub(super) fn set_offered(&self) {
        self.offered.set(true);
    }

    /// Whether hyper takes the end of the connection for an upgrade, and so does not close it.
    pub(super) fn was_offered(&self) -> bool {
        self.offered.get()
    }
}

/// A request that was answered by switching protocols.
#[derive(Debug)]
pub(super) struct Switched {
    tunnel: Box<Tunnel>,
    client: OnUpgrade,
    active: Active,
}

impl Switched {
    /// `client`: hyper's promise of the client's bytes.
    pub(super) fn new(tunnel: Box<Tunnel>, client: OnUpgrade, active: Active) -> Self {
        Self {
            tunnel,
            client,
            active,
        }
    }

    /// Goes on with the whole connection.
    pub(super) async fn serve_http1(mut self, mut socket: WatchedSocket, patience: Duration) {
        socket.set_one_way(true);
        let over = self.tunnel.run(&mut socket, patience, false).await;
        note_end(&over, self.active.watch());
        match over {
            Over::Done | Over::ClientGone(_) => {}
            Over::Stalled | Over::Ignored => socket.abort(),
            Over::UpstreamGone(_) | Over::Idle | Over::Overlong => {
                socket.set_one_way(false);
                socket.forget_rest();
                say_goodbye(&mut socket).await;
            }
        }
    }

    /// Goes on with one stream, whose `sending` half hyper wants to be run.
    pub(super) async fn serve_http2(
        mut self,
        sending: impl Future<Output = ()>,
        patience: Duration,
    ) {
        let io = match self.client.await {
            Ok(upgraded) => TokioIo::new(upgraded),
            Err(error) => return tracing::debug!(%error, "a stream ended before its tunnel began"),
        };
        let mut stream = TunnelStream {
            io,
            sending: Some(Box::pin(sending)),
            active: self.active,
        };
        let over = self.tunnel.run(&mut stream, patience, true).await;
        note_end(&over, stream.active.watch());
        if matches!(over, Over::UpstreamGone(_) | Over::Idle | Over::Overlong) {
            say_goodbye(&mut stream).await;
        }
    }
}

fn note_end(over: &Over, watch: &Watch) {
    tracing::debug!(%over, "a tunnel ended");
    match over {
        Over::Stalled => watch.count(Closed::SlowRead),
        Over::Idle | Over::Ignored => watch.count(Closed::TunnelIdle),
        Over::Done | Over::ClientGone(_) | Over::UpstreamGone(_) | Over::Overlong => {}
    }
}

/// An HTTP/2 stream as bytes. hyper's sending half is a task that ends early when the client resets the
/// stream; run from here, that is noticed even while there is nothing to send.
struct TunnelStream<S> {
    io: TokioIo<Upgraded>,
    /// `None`: over.
    sending: Option<Pin<Box<S>>>,
    active: Active,
}

impl<S: Future<Output = ()>> TunnelStream<S> {
    fn send(&mut self, cx: &mut Context<'_>) {
        if self
            .sending
            .as_mut()
            .is_some_and(|sending| sending.as_mut().poll(cx).is_ready())
        {
            self.sending = None;
        }
    }
}

impl<S: Future<Output = ()>> AsyncRead for TunnelStream<S> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().io).poll_read(cx, into)
    }
}

impl<S: Future<Output = ()>> AsyncWrite for TunnelStream<S> {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let written = Pin::new(&mut this.io).poll_write(cx, bytes);
        if written.is_ready() {
            this.active.watch().budget().earn();
        }
        this.send(cx);
        written
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.send(cx);
        Pin::new(&mut this.io).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        // Closes the way to the sending half, which then ends, which is what this waits for.
        if let Poll::Ready(done) = Pin::new(&mut this.io).poll_shutdown(cx) {
            return Poll::Ready(done);
        }
        this.send(cx);
        Pin::new(&mut this.io).poll_shutdown(cx)
    }
}
