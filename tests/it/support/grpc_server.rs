//! A gRPC server in the test process, for services that tonic generates.

use super::client::ByteStream;
use super::prelude::*;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::service::TowerToHyperService;
use std::convert::Infallible;
use tonic::codegen::Service;

/// Serves the connections that `open` accepts, for example after a TLS handshake. They end with the
/// task.
pub fn serve_grpc<S, F, T>(
    listener: TcpListener,
    service: S,
    open: impl Fn(TcpStream) -> F + Send + 'static,
) -> JoinHandle<()>
where
    S: Service<Request<Incoming>, Response = Response<tonic::body::Body>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send + 'static,
    F: Future<Output = Option<T>> + Send + 'static,
    T: ByteStream + 'static,
{
    tokio::spawn(async move {
        let mut connections = JoinSet::new();
        while let Ok((socket, _)) = listener.accept().await {
            let (opened, service) = (open(socket), TowerToHyperService::new(service.clone()));
            connections.spawn(async move {
                let Some(socket) = opened.await else { return };
                let server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                let served = server.serve_connection(TokioIo::new(socket), service);
                // A connection broken by the client is not an error of this server.
                served.await.unwrap_or_default();
            });
        }
    })
}
