//! `tidegate demo`: a sample upstream, the proxy and the memory store in one process.

use crate::app::ListeningAddresses;
use crate::config::{ConfigSources, FileSource, FlagOverrides};
use crate::listen::ListenAddress;
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::PathBuf;
use std::process::ExitCode;

/// The configuration at the root of the repository.
const DEMO_CONFIG: &str = include_str!("../../config.toml");

#[allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "the demo prints instructions and errors"
)]
/// Starts the sample upstream, then runs the proxy in front of it.
pub(super) fn run(listen: String, file: Option<PathBuf>) -> ExitCode {
    let upstream = match start_sample_upstream() {
        Ok(address) => address,
        Err(error) => {
            eprintln!("error: the sample upstream cannot listen on 127.0.0.1: {error}");
            return ExitCode::FAILURE;
        }
    };
    let file = match file {
        Some(path) => FileSource::Path(path),
        None => FileSource::Text {
            name: "config.toml".into(),
            text: DEMO_CONFIG.into(),
        },
    };
    // The environment is ignored, so that the demo behaves the same everywhere. The admin port is
    // ephemeral because the default port may be in use.
    let env = vec![(
        "TIDEGATE_ADMIN__ADDRESS".to_owned(),
        "127.0.0.1:0".to_owned(),
    )];
    let flags = FlagOverrides {
        upstream: Some(format!("http://{upstream}")),
        listen: Some(listen),
    };
    let sources = ConfigSources { file, env, flags };
    super::run::run_proxy(sources, |addresses| {
        println!("{}", usage_text(addresses, upstream))
    })
}

fn usage_text(addresses: ListeningAddresses, upstream: SocketAddr) -> String {
    let ListeningAddresses { proxy, admin } = addresses;
    let proxy = match proxy {
        ListenAddress::Ip(address) => format!("http://{address}"),
        ListenAddress::Unix(path) => format!("--unix-socket {} http://localhost", path.display()),
    };
    format!(
        "tidegate demo: everything runs in this process.\n\
         \n  proxy            {proxy}\n  sample upstream  http://{upstream}\n\
         \x20 dashboard        http://{admin}/\n  store            memory\n\
         \nTry, in another terminal:\n\
         \n  # 20 requests per client and 10 s: status 200, then 429\n\
         \x20 for i in $(seq 25); do curl -s -o /dev/null -w '%{{http_code}} ' {proxy}/hello; done; echo\n\
         \n  # the response to a rejected request\n\
         \x20 curl -i {proxy}/hello\n\
         \n  # 5 logins per client and minute\n\
         \x20 for i in $(seq 7); do curl -s -o /dev/null -w '%{{http_code}} ' -X POST {proxy}/api/login; done; echo\n\
         \n  # each user has a separate quota; acme has a larger one\n\
         \x20 curl -i -H 'x-user-id: ann' {proxy}/api/orders\n\
         \x20 curl -i -H 'x-user-id: acme' {proxy}/api/orders\n\
         \n  # a denied path, and an exempt path\n\
         \x20 curl -i {proxy}/internal/secret\n\
         \x20 curl -i {proxy}/health\n\
         \n  # metrics\n\
         \x20 curl -s http://{admin}/metrics\n\
         \nPress Ctrl-C to stop."
    )
}

/// Starts an upstream that describes each request in its response.
fn start_sample_upstream() -> std::io::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    std::thread::Builder::new()
        .name("sample-upstream".into())
        .spawn(move || {
            runtime.block_on(async move {
                let Ok(listener) = tokio::net::TcpListener::from_std(listener) else {
                    return;
                };
                loop {
                    // A failed accept concerns one client; the upstream keeps running.
                    let Ok((socket, _)) = listener.accept().await else {
                        continue;
                    };
                    tokio::spawn(
                        hyper::server::conn::http1::Builder::new()
                            .serve_connection(TokioIo::new(socket), service_fn(echo_request)),
                    );
                }
            });
        })?;
    Ok(address)
}

#[allow(clippy::unused_async, reason = "service_fn requires a future")]
async fn echo_request(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let body = serde_json::json!({
        "hello": "from the sample upstream",
        "method": request.method().as_str(),
        "path": request.uri().path(),
        "x-forwarded-for": request.headers().get("x-forwarded-for").and_then(|value| value.to_str().ok()),
    });
    let mut response = Response::new(Full::from(format!("{body}\n")));
    *response.status_mut() = StatusCode::OK;
    response.headers_mut().insert(
        "content-type",
        http::HeaderValue::from_static("application/json"),
    );
    Ok(response)
}
