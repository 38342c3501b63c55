//! A request as people have it at hand: method and URL, a curl line, a HAR file.

mod curl;
mod har;

pub(super) use curl::Read;

use crate::admin::Told;
use std::net::IpAddr;
use std::path::PathBuf;

/// A request as it is told on the command line.
#[derive(clap::Args, Debug)]
pub(super) struct Asked {
    /// METHOD and URL, e.g. GET http://shop.example/api/orders?page=2; only a URL is a GET, and only a path will do. Or a
    /// curl command: put -- in front of it.
    #[arg(value_name = "METHOD URL", required_unless_present_any = ["curl", "har"], conflicts_with_all = ["curl", "har", "entry"])]
    request: Vec<String>,
    /// A curl command as one argument, as browsers copy it ("Copy as cURL").
    #[arg(long, value_name = "LINE", conflicts_with = "har")]
    curl: Option<String>,
    /// A HAR file, as browsers save it.
    #[arg(long, value_name = "FILE")]
    har: Option<PathBuf>,
    /// Which request of the HAR file, from 1.
    #[arg(long, value_name = "N", requires = "har")]
    entry: Option<usize>,
    /// A header of the request; may be given several times. Beside a curl line or a HAR entry: one more.
    #[arg(short = 'H', long = "header", value_name = "NAME: VALUE")]
    headers: Vec<String>,
    /// Who holds the other end of the socket.
    #[arg(long, default_value = "127.0.0.1")]
    ip: IpAddr,
    /// The alternative name in the client's certificate.
    #[arg(long, value_name = "NAME")]
    client_cert_san: Option<String>,
    /// The common name in the client's certificate.
    #[arg(long, value_name = "NAME")]
    client_cert_cn: Option<String>,
}

impl Asked {
    /// The request, and what was passed over in telling it.
    ///
    /// # Errors
    /// A sentence.
    pub(super) fn told(&self) -> Result<(Told, Vec<String>), String> {
        let mut read = self.read()?;
        for line in &self.headers {
            let (name, value) = line
                .split_once(':')
                .ok_or_else(|| format!("{line:?} is no header: write \"name: value\""))?;
            read.headers
                .push((name.trim().to_owned(), value.trim().to_owned()));
        }
        let Read {
            method,
            url,
            headers,
            notes,
        } = read;
        let told = Told {
            method,
            url,
            headers,
            ip: self.ip,
            client_cert_san: self.client_cert_san.clone(),
            client_cert_cn: self.client_cert_cn.clone(),
        };
        Ok((told, notes))
    }

    fn read(&self) -> Result<Read, String> {
        if let Some(line) = &self.curl {
            return curl::line(line);
        }
        if let Some(file) = &self.har {
            return har::entry(file, self.entry);
        }
        let plain = |method: &str, url: &str| Read {
            method: method.into(),
            url: url.into(),
            ..Read::default()
        };
        match self.request.as_slice() {
            [first, ..] if first == "curl" => curl::words(&self.request),
            [url] if url.contains('/') => Ok(plain("GET", url)),
            [method, url] => Ok(plain(method, url)),
            _ => Err("expected METHOD and URL, as in: tidegate explain GET /api/orders".to_owned()),
        }
    }
}
