//! HTTP client for the admin port of the proxy on this machine.

use super::output::CommandError;
use crate::admin::{AdminSettings, AdminToken};
use crate::config::{self, ConfigSources};
use crate::listen::{ListenAddress, is_family_missing};
use crate::text::escape_unprintable;
use serde_json::Value;
use socket2::{Domain, SockAddr, Socket, Type};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

/// Timeout for connecting, for each write, and for a response that needs no work.
pub(super) const IO_TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout for a response that needs work: the JSON API limits a request to 10 s.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(12);
/// Maximum response size, larger than any response that a command reads.
const MAX_RESPONSE_BYTES: usize = 8 << 20;

/// Status and body of an admin API response.
#[derive(Debug)]
pub(super) struct AdminClientResponse {
    pub(super) status: u16,
    pub(super) body: String,
}

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
        let AdminSettings { address, token, .. } = config::load_admin_settings(sources)?;
        Self::new(address, "admin.address", token)
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
    pub(super) fn request_json(&self, method: &str, target: &str) -> Result<Value, String> {
        self.send_and_parse(RESPONSE_TIMEOUT, method, target, "")
    }

    /// Like [`Self::request_json`], for a response that the server sends at once.
    ///
    /// # Errors
    /// As [`Self::request_json`], also if there is no response within 2 s.
    pub(super) fn request_json_at_once(&self, method: &str, target: &str) -> Result<Value, String> {
        self.send_and_parse(IO_TIMEOUT, method, target, "")
    }

    /// Sends a JSON body and parses the response.
    ///
    /// # Errors
    /// As [`Self::request_json`].
    pub(super) fn send_json(
        &self,
        method: &str,
        target: &str,
        body: &Value,
    ) -> Result<Value, String> {
        self.send_and_parse(RESPONSE_TIMEOUT, method, target, &body.to_string())
    }

    fn send_and_parse(
        &self,
        response_timeout: Duration,
        method: &str,
        target: &str,
        body: &str,
    ) -> Result<Value, String> {
        let response = self.send(response_timeout, method, target, body);
        let response = response
            .map_err(|error| format!("error: {}: {}\n", self.address, describe_failure(&error)))?;
        match (response.status, response.parse_json()) {
            (200, Some(json)) => Ok(json),
            _ => Err(self.describe_refusal(&response)),
        }
    }

    /// The message about another status than expected: with the detail of the problem document (RFC
    /// 9457), and where commands find their token.
    pub(super) fn describe_refusal(&self, response: &AdminClientResponse) -> String {
        let status = response.status;
        let mut text = format!("error: {}: answered {status}", self.address);
        let body = &response.parse_json().unwrap_or_default();
        if let Some(detail) = body["detail"].as_str() {
            text.push_str(&format!(": {}", escape_unprintable(detail)));
        }
        if matches!(status, 401 | 403) {
            text.push_str(
                "; commands send the token of admin.token_file, as the proxy has it \
                 (--config, or TIDEGATE_ADMIN__TOKEN_FILE)",
            );
        }
        text + "\n"
    }

    /// Sends one request on a new connection and reads the response within `response_timeout`.
    ///
    /// # Errors
    /// If the connection fails or times out, or the response is not HTTP.
    pub(super) fn send(
        &self,
        response_timeout: Duration,
        method: &str,
        target: &str,
        body: &str,
    ) -> io::Result<AdminClientResponse> {
        let mut socket = connect(&self.address)?;
        socket.set_write_timeout(Some(IO_TIMEOUT))?;
        let token = self.token.as_ref().map_or_else(String::new, |token| {
            format!("Authorization: Bearer {}\r\n", token.expose())
        });
        let head = format!(
            "{method} {target} HTTP/1.1\r\nHost: localhost\r\n{token}Content-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
            body.len()
        );
        socket.write_all(head.as_bytes())?;
        let bytes = read_to_end(&mut socket, response_timeout)?;
        parse_response(&bytes).ok_or_else(|| {
            let start = String::from_utf8_lossy(bytes.get(..64).unwrap_or(&bytes)).into_owned();
            io::Error::new(
                io::ErrorKind::InvalidData,
                format!("answered {:?}", start.lines().next().unwrap_or("")),
            )
        })
    }
}

impl AdminClientResponse {
    pub(super) fn parse_json(&self) -> Option<Value> {
        serde_json::from_str(&self.body).ok()
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
pub(super) fn describe_failure(error: &io::Error) -> String {
    let remedy = match error.kind() {
        io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound => {
            "; no proxy listens there: start it, or set admin.address as the running proxy has it \
             (--config, or TIDEGATE_ADMIN__ADDRESS)"
        }
        _ => "",
    };
    format!("{error}{remedy}")
}

fn read_to_end(socket: &mut Socket, response_timeout: Duration) -> io::Result<Vec<u8>> {
    let late_error = || {
        let message = format!("no answer within {} s", response_timeout.as_secs());
        io::Error::new(io::ErrorKind::TimedOut, message)
    };
    let (mut bytes, mut chunk) = (Vec::new(), [0; 4096]);
    let deadline = Instant::now() + response_timeout;
    while bytes.len() < MAX_RESPONSE_BYTES {
        let remaining = deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Err(late_error());
        }
        socket.set_read_timeout(Some(remaining))?;
        match socket.read(&mut chunk) {
            Ok(0) => break,
            Ok(read) => bytes.extend(chunk.iter().take(read)),
            // The system reports a read timeout as either of these.
            Err(error) => match error.kind() {
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => return Err(late_error()),
                _ => return Err(error),
            },
        }
    }
    Ok(bytes)
}

/// Connects to the address, or to its substitute on a machine without its address family: the proxy
/// listens there.
fn connect(address: &ListenAddress) -> io::Result<Socket> {
    connect_socket(address).or_else(|error| {
        let substitute = address.substitute().filter(|_| is_family_missing(&error));
        connect_socket(&ListenAddress::Ip(substitute.ok_or(error)?))
    })
}

fn connect_socket(address: &ListenAddress) -> io::Result<Socket> {
    let (domain, address) = match address {
        ListenAddress::Ip(address) => (Domain::for_address(*address), SockAddr::from(*address)),
        ListenAddress::Unix(path) => (Domain::UNIX, SockAddr::unix(path)?),
    };
    let socket = Socket::new(domain, Type::STREAM, None)?;
    socket.connect_timeout(&address, IO_TIMEOUT)?;
    Ok(socket)
}

/// Parses a response whose body ends with the connection.
fn parse_response(bytes: &[u8]) -> Option<AdminClientResponse> {
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once("\r\n\r\n")?;
    let status = head.strip_prefix("HTTP/1.")?.split(' ').nth(1)?;
    Some(AdminClientResponse {
        status: status.parse().ok()?,
        body: body.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The admin endpoint may ask other instances for some seconds before it answers.
    #[test]
    fn waits_for_an_answer_that_takes_longer_than_connecting() {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = ListenAddress::Ip(listener.local_addr().unwrap());
        let server = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            std::thread::sleep(IO_TIMEOUT + Duration::from_millis(200));
            socket.write_all(b"HTTP/1.1 200 OK\r\n\r\nok").unwrap();
            // Unread data would reset the connection.
            socket.shutdown(std::net::Shutdown::Write).unwrap();
            drop(io::copy(&mut socket, &mut io::sink()));
        });
        let client = AdminClient::new(address, "admin.address", None).unwrap();
        let response = client.send(RESPONSE_TIMEOUT, "GET", "/fleet", "").unwrap();
        assert_eq!((response.status, &*response.body), (200, "ok"));
        server.join().unwrap();
    }

    #[test]
    fn rejects_malformed_http_responses() {
        let status = |text: &str| {
            parse_response(text.as_bytes()).map(|response| (response.status, response.body))
        };
        assert_eq!(
            status("HTTP/1.1 200 OK\r\nA: b\r\n\r\nok\n"),
            Some((200, "ok\n".to_owned()))
        );
        assert_eq!(status("HTTP/1.0 503 x\r\n\r\n"), Some((503, String::new())));
        for nonsense in [
            "",
            "HTTP/1.1 200 OK\r\n",
            "SSH-2.0-x\r\n\r\n",
            "HTTP/1.1 abc\r\n\r\n",
            "HTTP/1.1\r\n\r\n",
        ] {
            assert_eq!(status(nonsense), None, "{nonsense:?}");
        }
    }
}
