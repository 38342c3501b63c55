//! HTTP client for the admin port of the proxy on this machine.

use super::output::CommandError;
use crate::admin::{AdminSettings, AdminToken};
use crate::config::{self, ConfigSources};
use crate::http_client;
use crate::listen::ListenAddress;
use crate::text::escape_unprintable;
use bytes::Bytes;
use http::header::{AUTHORIZATION, CONNECTION, CONTENT_TYPE, HOST};
use http::{Request, Response, StatusCode};
use serde_json::Value;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;
use tokio::time::timeout;

/// Timeout for connecting, and for a response that needs no work.
pub(super) const IO_TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout for a response that needs work: the JSON API limits a request to 10 s.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(12);
/// Maximum response size, larger than any response that a command reads.
const MAX_RESPONSE_BYTES: usize = 8 << 20;

/// Client for the JSON API of one proxy's admin port.
#[derive(Clone, Debug)]
pub(super) struct AdminClient {
    address: ListenAddress,
    token: Option<AdminToken>,
}

impl AdminClient {
    /// Creates a client for the proxy with this configuration.
    ///
    /// # Errors
    /// A message for the user if the admin settings are invalid or the configured port is 0.
    pub(super) fn from_sources(sources: &ConfigSources) -> Result<Self, CommandError> {
        Self::from_settings(&config::load_admin_settings(sources)?)
    }

    /// [`Self::from_sources`] of a command that has loaded the whole configuration.
    ///
    /// # Errors
    /// A message for the user if the configured port is 0.
    pub(super) fn from_settings(settings: &AdminSettings) -> Result<Self, CommandError> {
        let token = settings.token.clone();
        Self::new(settings.address.clone(), "admin.address", token)
    }

    /// Creates a client for `admin.probes`, or for `admin.address` if that is not set.
    ///
    /// # Errors
    /// As [`Self::from_sources`].
    pub(super) fn for_probes(sources: &ConfigSources) -> Result<Self, CommandError> {
        let settings = config::load_admin_settings(sources)?;
        match settings.probes {
            Some(probes) => Self::new(ListenAddress::Ip(probes), "admin.probes", None),
            None => Self::new(settings.address, "admin.address", None),
        }
    }

    /// Connects to loopback if the address is unspecified.
    fn new(
        mut address: ListenAddress,
        config_key: &str,
        token: Option<AdminToken>,
    ) -> Result<Self, CommandError> {
        if let ListenAddress::Ip(address) = &mut address {
            if address.port() == 0 {
                return Err(CommandError::Message(format!(
                    "{config_key} has port 0, so the real port is unknown; expected a fixed port"
                )));
            }
            match address.ip() {
                IpAddr::V4(ip) if ip.is_unspecified() => {
                    address.set_ip(Ipv4Addr::LOCALHOST.into());
                }
                IpAddr::V6(ip) if ip.is_unspecified() => {
                    address.set_ip(Ipv6Addr::LOCALHOST.into());
                }
                _ => {}
            }
        }
        Ok(Self { address, token })
    }

    pub(super) fn address(&self) -> &ListenAddress {
        &self.address
    }

    /// Sends a request without a body and parses the response.
    ///
    /// # Errors
    /// A message for the user if the admin port does not respond, or responds with another status
    /// than 200.
    pub(super) async fn request_json(
        &self,
        method: &str,
        target: &str,
    ) -> Result<Value, CommandError> {
        let response = self.send(RESPONSE_TIMEOUT, method, target, String::new());
        self.parse(response.await)
    }

    /// Requests a response that the server sends at once.
    ///
    /// # Errors
    /// As [`Self::request_json`], also if there is no response within 2 s.
    pub(super) async fn get_json_at_once(&self, target: &str) -> Result<Value, CommandError> {
        self.parse(self.send(IO_TIMEOUT, "GET", target, String::new()).await)
    }

    /// Sends a JSON body and parses the response.
    ///
    /// # Errors
    /// As [`Self::request_json`].
    pub(super) async fn send_json(
        &self,
        method: &str,
        target: &str,
        body: &Value,
    ) -> Result<Value, CommandError> {
        let response = self.send(RESPONSE_TIMEOUT, method, target, body.to_string());
        self.parse(response.await)
    }

    fn parse(&self, response: io::Result<Response<Bytes>>) -> Result<Value, CommandError> {
        let response = response.map_err(|error| self.describe_failure(&error))?;
        let json = serde_json::from_slice(response.body()).ok();
        let json = json.filter(|_| response.status() == StatusCode::OK);
        json.ok_or_else(|| self.describe_refusal(&response))
    }

    /// The message about another status than expected: with the detail of the problem document (RFC
    /// 9457), and where commands find their token.
    pub(super) fn describe_refusal(&self, response: &Response<Bytes>) -> CommandError {
        let status = response.status().as_u16();
        let mut text = format!("{}: answered {status}", self.address);
        let body: Value = serde_json::from_slice(response.body()).unwrap_or_default();
        if let Some(detail) = body.get("detail").and_then(Value::as_str) {
            text.push_str(&format!(": {}", escape_unprintable(detail)));
        }
        if matches!(status, 401 | 403) {
            text.push_str(
                "; commands send the token of admin.token_file, as the proxy has it \
                 (--config, or TIDEGATE_ADMIN__TOKEN_FILE)",
            );
        }
        CommandError::Message(text)
    }

    /// The message about a failed request.
    pub(super) fn describe_failure(&self, error: &io::Error) -> CommandError {
        CommandError::Message(format!("{}: {}", self.address, explain_failure(error)))
    }

    /// Sends one request on a new connection and reads the response within `response_timeout`.
    ///
    /// # Errors
    /// If the connection fails or times out, or the response is not HTTP.
    pub(super) async fn send(
        &self,
        response_timeout: Duration,
        method: &str,
        target: &str,
        body: String,
    ) -> io::Result<Response<Bytes>> {
        let connected = timeout(IO_TIMEOUT, http_client::connect_to_listener(&self.address));
        let socket = connected.await.map_err(|_elapsed| {
            let message = format!("no connection within {} s", IO_TIMEOUT.as_secs());
            io::Error::new(io::ErrorKind::TimedOut, message)
        })??;
        let mut request = Request::builder()
            .method(method)
            .uri(target)
            .header(HOST, "localhost")
            .header(CONTENT_TYPE, "application/json")
            .header(CONNECTION, "close");
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, format!("Bearer {}", token.expose()));
        }
        let request = request.body(body.into()).map_err(io::Error::other)?;
        let response = http_client::fetch(socket, request, MAX_RESPONSE_BYTES, |_| true);
        let response = timeout(response_timeout, response).await;
        response.map_err(|_elapsed| {
            let message = format!("no answer within {} s", response_timeout.as_secs());
            io::Error::new(io::ErrorKind::TimedOut, message)
        })?
    }
}

/// The target of a request: a path, and the parameters of the query.
pub(super) fn build_target<'p>(
    path: &str,
    parameters: impl IntoIterator<Item = (&'p str, &'p str)>,
) -> String {
    let mut query = form_urlencoded::Serializer::new(String::new());
    format!("{path}?{}", query.extend_pairs(parameters).finish())
}

/// Describes why there is no answer, and what to do.
pub(super) fn explain_failure(error: &io::Error) -> String {
    let remedy = match error.kind() {
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => {
            "; no proxy listens there: start it, or set admin.address as the running proxy has it \
             (--config, or TIDEGATE_ADMIN__ADDRESS)"
        }
        _ => "",
    };
    format!("{error}{remedy}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{Shutdown, TcpListener};

    /// Answers one request with `response` after `delay`.
    async fn ask_server(response: &'static str, delay: Duration) -> io::Result<Response<Bytes>> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = ListenAddress::Ip(listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            // A client may ignore what comes before its request.
            drop(socket.read(&mut [0; 512]));
            std::thread::sleep(delay);
            socket.write_all(response.as_bytes()).unwrap();
            socket.shutdown(Shutdown::Write).unwrap();
            drop(io::copy(&mut socket, &mut io::sink()));
        });
        let client = AdminClient::new(address, "admin.address", None).unwrap();
        let answer = client.send(RESPONSE_TIMEOUT, "GET", "/fleet", String::new());
        let answer = answer.await;
        server.join().unwrap();
        answer
    }

    /// The admin endpoint may ask other instances for some seconds before it answers.
    #[tokio::test]
    async fn waits_for_an_answer_that_takes_longer_than_connecting() {
        let delay = IO_TIMEOUT + Duration::from_millis(200);
        let response = ask_server("HTTP/1.1 200 OK\r\n\r\nok", delay)
            .await
            .unwrap();
        assert_eq!(
            (response.status(), &response.body()[..]),
            (StatusCode::OK, &b"ok"[..])
        );
    }

    #[tokio::test]
    async fn rejects_malformed_http_responses() {
        let mut answers = Vec::new();
        for text in [
            "HTTP/1.1 200 OK\r\nA: b\r\n\r\nok\n",
            "HTTP/1.0 503 x\r\n\r\n",
            "",
            "HTTP/1.1 200 OK\r\n",
            "SSH-2.0-x\r\n\r\n",
            "HTTP/1.1 abc\r\n\r\n",
            "HTTP/1.1\r\n\r\n",
        ] {
            let answer = ask_server(text, Duration::ZERO).await.ok();
            answers.push(answer.map(|answer| (answer.status().as_u16(), answer.into_body())));
        }
        let ok = Some((200, Bytes::from("ok\n")));
        let unavailable = Some((503, Bytes::new()));
        assert_eq!(answers, [ok, unavailable, None, None, None, None, None]);
    }
}
