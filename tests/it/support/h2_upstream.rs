//! An HTTP/2 upstream with control over streams and resets.

use super::prelude::*;
use h2::server::{Builder, SendResponse};
use h2::{Reason, RecvStream};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;

/// An HTTP/2 server. Its connections end when it is dropped.
#[derive(Debug)]
pub struct H2Upstream {
    pub address: SocketAddr,
    accepted_connections: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

/// One request in flight.
#[derive(Debug)]
pub struct H2Exchange {
    /// The index of the connection, from 0.
    pub connection_index: usize,
    pub request: Request<RecvStream>,
    pub respond: SendResponse<Bytes>,
}

impl H2Upstream {
    /// Cleartext, with the settings of `builder`.
    pub async fn with_handler<H, F>(builder: Builder, handler: H) -> Self
    where
        H: Fn(H2Exchange) -> F + Send + Sync + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        Self::start(builder, None, handler).await
    }

    /// TLS, with the protocols that `tls` offers.
    pub async fn with_tls<H, F>(tls: TlsAcceptor, handler: H) -> Self
    where
        H: Fn(H2Exchange) -> F + Send + Sync + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        Self::start(Builder::new(), Some(tls), handler).await
    }

    async fn start<H, F>(builder: Builder, tls: Option<TlsAcceptor>, handler: H) -> Self
    where
        H: Fn(H2Exchange) -> F + Send + Sync + 'static,
        F: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let connections = Arc::<AtomicUsize>::default();
        let (counted, handler) = (Arc::clone(&connections), Arc::new(handler));
        let task = tokio::spawn(async move {
            let mut open = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let number = counted.fetch_add(1, Ordering::SeqCst);
                let (builder, tls, handler) = (builder.clone(), tls.clone(), Arc::clone(&handler));
                open.spawn(async move {
                    match tls {
                        None => serve_connection(stream, number, &builder, &*handler).await,
                        Some(tls) => {
                            if let Ok(stream) = tls.accept(stream).await {
                                serve_connection(stream, number, &builder, &*handler).await;
                            }
                        }
                    }
                });
            }
        });
        Self {
            address,
            accepted_connections: connections,
            task,
        }
    }

    /// Answers with method, target and headers as text, followed by the request body.
    pub async fn echo() -> Self {
        Self::with_handler(Builder::new(), |exchange| exchange.echo()).await
    }

    /// Connections accepted so far.
    pub fn connection_count(&self) -> usize {
        self.accepted_connections.load(Ordering::SeqCst)
    }

    pub fn url(&self) -> String {
        format!("h2c://{}", self.address)
    }
}

async fn serve_connection<H, F>(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    connection: usize,
    builder: &Builder,
    handler: &H,
) where
    H: Fn(H2Exchange) -> F,
    F: Future<Output = ()> + Send + 'static,
{
    let Ok(mut h2) = builder.handshake::<_, Bytes>(stream).await else {
        return;
    };
    let mut requests = JoinSet::new();
    while let Some(Ok((request, respond))) = h2.accept().await {
        let goes_away = request.headers().contains_key("x-go-away");
        requests.spawn(handler(H2Exchange {
            connection_index: connection,
            request,
            respond,
        }));
        if goes_away {
            h2.graceful_shutdown();
        }
    }
    // The connection has ended by then.
    requests.detach_all();
}

impl Drop for H2Upstream {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl H2Exchange {
    /// Answers with a complete body.
    pub fn respond_with(mut self, status: u16, body: impl Into<Bytes>) {
        let head = Response::builder().status(status).body(()).unwrap();
        let body = body.into();
        if let Ok(mut stream) = self.respond.send_response(head, body.is_empty())
            && !body.is_empty()
        {
            stream.send_data(body, true).unwrap_or_default();
        }
    }

    /// Reads the complete request body. Fails if it was truncated.
    pub async fn read_body(&mut self) -> Result<Vec<u8>, h2::Error> {
        let body = self.request.body_mut();
        let mut all = Vec::new();
        while let Some(part) = body.data().await {
            let part = part?;
            body.flow_control().release_capacity(part.len())?;
            all.extend_from_slice(&part);
        }
        Ok(all)
    }

    pub async fn echo(mut self) {
        let Ok(body) = self.read_body().await else {
            return;
        };
        let mut text = format!("{} {}\n", self.request.method(), self.request.uri());
        for (name, value) in self.request.headers() {
            text += &format!("{name}: {}\n", String::from_utf8_lossy(value.as_bytes()));
        }
        self.respond_with(200, [text.as_bytes(), b"\n", &body].concat());
    }

    /// Waits until the proxy resets the request, and returns the reason.
    pub async fn wait_for_reset(&mut self) -> Option<Reason> {
        std::future::poll_fn(|cx| self.respond.poll_reset(cx))
            .await
            .ok()
    }
}

/// A request body that is available at once.
pub fn full_body(bytes: impl Into<Bytes>) -> super::client::ClientBody {
    http_body_util::BodyExt::boxed(Full::new(bytes.into()))
}
