//! `tidegate health`: does the proxy on this machine live?

use crate::config::{self, Sources};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream};
use std::time::Duration;

/// For connecting, and for each step after it: a probe that hangs is no probe.
const PATIENCE: Duration = Duration::from_secs(2);

/// Asks `/livez` of the address that is configured for probes, or else of the admin port.
///
/// # Errors
/// A text for people, if there is no answer or another one.
pub(super) fn run(sources: &Sources) -> Result<String, String> {
    let admin = config::load_admin(sources).map_err(|report| report.to_string())?;
    let address = reachable(admin.probes.unwrap_or(admin.address));
    if address.port() == 0 {
        return Err("error: admin.address has no port of its own: nobody can know where to ask\n".to_owned());
    }
    let answer = ask(address).map_err(|error| format!("error: {address}: {error}\n"))?;
    let line = answer.lines().next().unwrap_or_default();
    match line.strip_prefix("HTTP/1.1 200") {
        Some(_) => Ok("ok\n".to_owned()),
        None => Err(format!("error: {address}: answered {:?}\n", line.escape_debug())),
    }
}

/// Who listens everywhere listens on loopback too.
fn reachable(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(match address.ip() {
            IpAddr::V4(_) => Ipv4Addr::LOCALHOST.into(),
            IpAddr::V6(_) => Ipv6Addr::LOCALHOST.into(),
        });
    }
    address
}

/// The beginning of the answer.
fn ask(address: SocketAddr) -> io::Result<String> {
    let mut socket = TcpStream::connect_timeout(&address, PATIENCE)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.set_write_timeout(Some(PATIENCE))?;
    socket.write_all(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = Vec::new();
    let mut piece = [0; 512];
    while answer.len() < piece.len() && !answer.contains(&b'\n') {
        match socket.read(&mut piece)? {
            0 => break,
            read => answer.extend(piece.iter().take(read)),
        }
    }
    Ok(String::from_utf8_lossy(&answer).into_owned())
}
