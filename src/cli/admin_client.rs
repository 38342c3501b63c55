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
const IO_TIMEOUT: Duration = Duration::from_secs(2);
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
        let settings = config::load_admin_settings(sources)?;
        Ok(Self {
            address: admin_address(&settings)?,
            token: settings.token,
        })
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
        let address = &self.address;
        let token = self.token.as_ref();
        let response =
            send_request_within(response_timeout, address, (method, target), body, token)
                .map_err(|error| format!("error: {address}: {}\n", describe_failure(&error)))?;
        match (response.status, response.parse_json()) {
            (200, Some(json)) => Ok(json),
            _ => Err(response.describe_refusal(address)),
        }
    }
}

impl AdminClientResponse {
    pub(super) fn parse_json(&self) -> Option<Value> {
        serde_json::from_str(&self.body).ok()
    }

    /// The message about another status than expected: with the detail of the problem document (RFC
    /// 9457), and where commands find their token.
    pub(super) fn describe_refusal(&self, address: &ListenAddress) -> String {
        let mut text = format!("error: {address}: answered {}", self.status);
        let body = &self.parse_json().unwrap_or_default();
        if let Some(detail) = body["detail"].as_str() {
            text.push_str(&format!(": {}", escape_unprintable(detail)));
        }
        if matches!(self.status, 401 | 403) {
            text.push_str(
                "; commands send the token of admin.token_file, as the proxy has it \
                 (--config, or TIDEGATE_ADMIN__TOKEN_FILE)",
            );
        }
        text + "\n"
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

/// Returns the address to connect to. Replaces an unspecified IP address by loopback.
///
/// # Errors
/// A message for the user if the configured port is 0.
pub(super) fn reachable_address(
    address: &ListenAddress,
    config_key: &str,
) -> Result<ListenAddress, String> {
    let ListenAddress::Ip(mut address) = *address else {
        return Ok(address.clone());
    };
    if address.port() == 0 {
        return Err(format!(
            "error: {config_key} has port 0, so the real port is unknown; expected a fixed port\n"
        ));
    }
    if address.ip().is_unspecified() {
        address.set_ip(match address.ip() {
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    Ok(ListenAddress::Ip(address))
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

/// Returns the address for connecting to the admin port, or an error if the configured port is 0.
pub(super) fn admin_address(settings: &AdminSettings) -> Result<ListenAddress, String> {
    reachable_address(&settings.address, "admin.address")
}

/// Sends one request without a body on a new connection and reads the response, which the server
/// must send at once.
///
/// # Errors
/// If the connection fails or times out, or the response is not HTTP.
pub(super) fn send_request(
    address: &ListenAddress,
    method: &str,
    target: &str,
    token: Option<&AdminToken>,
) -> io::Result<AdminClientResponse> {
    send_request_within(IO_TIMEOUT, address, (method, target), "", token)
}

/// Like [`send_request`], with a timeout for the whole response.
fn send_request_within(
    response_timeout: Duration,
    address: &ListenAddress,
    (method, target): (&str, &str),
    body: &str,
    token: Option<&AdminToken>,
) -> io::Result<AdminClientResponse> {
    let mut socket = connect(address)?;
    socket.set_write_timeout(Some(IO_TIMEOUT))?;
    let token = token.map_or_else(String::new, |token| {
        format!("Authorization: Bearer {}\r\n", token.expose())
    });
    let head = format!(
        "{method} {target} HTTP/1.1\r\nHost: localhost\r\n{token}Content-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    socket.write_all(head.as_bytes())?;
    let (mut bytes, mut chunk) = (Vec::new(), [0; 4096]);
    let deadline = Instant::now() + response_timeout;
    while bytes.len() < MAX_RESPONSE_BYTES {
        let remaining = deadline.saturating_duration_since(Instant::now());
        if remaining.is_zero() {
            return Err(late_response_error(response_timeout));
        }
        socket.set_read_timeout(Some(remaining))?;
        match socket.read(&mut chunk) {
            Ok(0) => break,
            Ok(read) => bytes.extend(chunk.iter().take(read)),
            // The system reports a read timeout as either of these.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
                ) =>
            {
                return Err(late_response_error(response_timeout));
            }
            Err(error) => return Err(error),
        }
    }
    parse_response(&bytes).ok_or_else(|| {
        let start = String::from_utf8_lossy(bytes.get(..64).unwrap_or(&bytes)).into_owned();
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("answered {:?}", start.lines().next().unwrap_or("")),
        )
    })
}

fn late_response_error(response_timeout: Duration) -> io::Error {
    let message = format!("no answer within {} s", response_timeout.as_secs());
    io::Error::new(io::ErrorKind::TimedOut, message)
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
        let response =
            send_request_within(RESPONSE_TIMEOUT, &address, ("GET", "/fleet"), "", None).unwrap();
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
