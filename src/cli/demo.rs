//! `tidegate demo`: a sample upstream, the proxy and the memory store in one process.

use super::flags::{OverrideFlags, SharedFlags};
use super::output::CommandError;
use crate::app::ListeningAddresses;
use crate::config::{ConfigSources, FileSource, FlagOverrides};
use crate::listen::ListenAddress;
use axum::Router;
use axum::extract::Request;
use axum::response::IntoResponse;
use http::header::CONTENT_TYPE;
use serde_json::json;
use std::io::IsTerminal;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::path::Path;
use std::process::ExitCode;

/// The configuration at the root of the repository.
const DEMO_CONFIG: &str = include_str!("../../config.toml");

/// Address that the commands for a running proxy use by default.
const DEFAULT_ADMIN_ADDRESS: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 9090);

#[derive(clap::Args, Debug)]
pub(super) struct DemoFlags {
    /// Listen address of the proxy.
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
    listen: String,
    /// Address of the dashboard [default: 127.0.0.1:9090 if it is free, else a free port].
    #[arg(long, value_name = "ADDRESS")]
    admin: Option<String>,
}

#[allow(clippy::print_stdout, reason = "the demo prints instructions")]
/// Starts the sample upstream, then runs the proxy in front of it. Uses the built-in configuration
/// unless `--config` names another one.
///
/// # Errors
/// A message if the sample upstream cannot listen, or the errors of the configuration.
pub(super) fn run(flags: DemoFlags, shared: &SharedFlags) -> Result<ExitCode, CommandError> {
    let upstream = start_sample_upstream()
        .map_err(|error| format!("the sample upstream cannot listen on 127.0.0.1: {error}"))?;
    let admin_address = flags.admin.unwrap_or_else(free_admin_address);
    for (flag, address) in [("--listen", &flags.listen), ("--admin", &admin_address)] {
        if let Err(error) = TcpListener::bind(address)
            && error.kind() == std::io::ErrorKind::AddrInUse
        {
            let address = address.escape_debug();
            return Err(CommandError::Message(format!(
                "cannot listen on {address}: {error}; choose another address, or a free port by \
                 tidegate demo {flag} 127.0.0.1:0"
            )));
        }
    }
    let file = if shared.config.is_empty() {
        FileSource::Text {
            name: "config.toml".into(),
            text: DEMO_CONFIG.into(),
        }
    } else {
        shared.to_sources(OverrideFlags::default())?.file
    };
    // The environment is ignored, so that the demo behaves the same everywhere.
    let mut env = vec![("TIDEGATE_ADMIN__ADDRESS".to_owned(), admin_address)];
    if std::io::stderr().is_terminal() {
        env.push(("TIDEGATE_LOG__FORMAT".to_owned(), "text".to_owned()));
    }
    let sources = ConfigSources {
        file,
        env,
        flags: FlagOverrides {
            upstream: Some(format!("http://{upstream}")),
            listen: Some(flags.listen),
            ..FlagOverrides::default()
        },
        ..ConfigSources::default()
    };
    let as_json = shared.json;
    super::run::run_proxy(sources, move |ListeningAddresses { proxy, admin }| {
        let (text, upstream) = (usage_text(&proxy, &admin, upstream), upstream.to_string());
        let (proxy, admin) = (proxy.to_string(), admin.to_string());
        if as_json {
            println!(
                "{}",
                json!({ "proxy": proxy, "admin": admin, "upstream": upstream })
            )
        } else {
            println!("{text}")
        }
    })
}

/// Returns the default admin address, or port 0 if another process listens there.
fn free_admin_address() -> String {
    let address = match TcpListener::bind(DEFAULT_ADMIN_ADDRESS) {
        Ok(_) => DEFAULT_ADMIN_ADDRESS,
        Err(_) => SocketAddr::new(DEFAULT_ADMIN_ADDRESS.ip(), 0),
    };
    address.to_string()
}

fn usage_text(proxy: &ListenAddress, admin: &ListenAddress, upstream: SocketAddr) -> String {
    let proxy = match proxy {
        ListenAddress::Ip(address) => format!("http://{address}"),
        ListenAddress::Unix(path) => format!("--unix-socket {} http://localhost", path.display()),
    };
    // `tidegate top` and `keys` need the address only if it is not the default one.
    let setting = match admin {
        ListenAddress::Ip(address) if *address == DEFAULT_ADMIN_ADDRESS => String::new(),
        address => format!("TIDEGATE_ADMIN__ADDRESS={address} "),
    };
    format!(
        "tidegate demo: everything runs in this process.\n\
         \n  proxy            {proxy}\n  sample upstream  http://{upstream}\n\
         \x20 dashboard        http://{admin}/\n  store            memory\n\
         \nOpen http://{admin}/ in a browser, and try in another terminal:\n\
         \n  # 20 requests per client and 10 s: status 200, then 429\n\
         \x20 for i in $(seq 25); do curl -s -o /dev/null -w '%{{http_code}} ' {proxy}/hello; done; echo\n\
         \n  # the response to a rejected request\n\
         \x20 curl -i {proxy}/hello\n\
         \n  # 5 logins per client and minute\n\
         \x20 for i in $(seq 7); do curl -s -o /dev/null -w '%{{http_code}} ' -X POST {proxy}/api/login; done; echo\n\
         \n  # each user has a separate quota; crawler has a smaller one\n\
         \x20 curl -i -H 'x-user-id: ann' {proxy}/api/orders\n\
         \x20 curl -i -H 'x-user-id: crawler' {proxy}/api/orders\n\
         \n  # a denied path, and an exempt path\n\
         \x20 curl -i {proxy}/internal/secret\n\
         \x20 curl -i {proxy}/health\n\
         \n  # metrics, live activity, and the most limited keys\n\
         \x20 curl -s http://{admin}/metrics\n\
         \x20 {setting}{program} top\n\
         \x20 {setting}{program} keys list\n\
         \nPress Ctrl-C to stop.",
        program = program_path(),
    )
}

/// Path of this program, as the user can run it from the current directory.
fn program_path() -> String {
    let path = std::env::current_exe().unwrap_or_else(|_| "tidegate".into());
    let in_path = std::env::var_os("PATH")
        .is_some_and(|list| std::env::split_paths(&list).any(|dir| dir.join("tidegate") == path));
    if in_path {
        return "tidegate".to_owned();
    }
    let shown = std::env::current_dir()
        .ok()
        .and_then(|dir| path.strip_prefix(dir).ok().map(Path::to_path_buf));
    shown.unwrap_or_else(|| path.clone()).display().to_string()
}

/// Starts an upstream that describes each request in its response.
fn start_sample_upstream() -> std::io::Result<SocketAddr> {
    let loopback: [SocketAddr; 2] = [
        (Ipv4Addr::LOCALHOST, 0).into(),
        (Ipv6Addr::LOCALHOST, 0).into(),
    ];
    let listener = TcpListener::bind(loopback.as_slice())?;
    listener.set_nonblocking(true)?;
    let address = listener.local_addr()?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    std::thread::Builder::new()
        .name("sample-upstream".into())
        .spawn(move || {
            runtime.block_on(async move {
                let listener = tokio::net::TcpListener::from_std(listener)?;
                axum::serve(listener, Router::new().fallback(echo_request)).await
            })
        })?;
    Ok(address)
}

#[allow(clippy::unused_async, reason = "a handler is async")]
async fn echo_request(request: Request) -> impl IntoResponse {
    let body = json!({
        "hello": "from the sample upstream",
        "method": request.method().as_str(),
        "path": request.uri().path(),
        "x-forwarded-for": request.headers().get("x-forwarded-for").and_then(|value| value.to_str().ok()),
    });
    ([(CONTENT_TYPE, "application/json")], format!("{body}\n"))
}
