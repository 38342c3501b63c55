//! The request of `tidegate explain`: from a method and URL, a curl command, or a HAR file.

mod curl;
mod har;

pub(super) use curl::ImportedRequest;

use crate::admin::ExplainRequest;
use std::net::IpAddr;
use std::path::PathBuf;

/// Command-line arguments that describe a request.
#[derive(clap::Args, Debug)]
pub(super) struct RequestArguments {
    /// METHOD and URL, e.g. GET http://shop.example/api/orders?page=2. The method defaults to GET,
    /// and a path is enough for the URL. Alternatively a curl command, after --.
    #[arg(value_name = "METHOD URL", required_unless_present_any = ["curl", "har"], conflicts_with_all = ["curl", "har", "entry"])]
    request: Vec<String>,
    /// A curl command as one argument, e.g. from a browser's "Copy as cURL".
    #[arg(long, value_name = "LINE", conflicts_with = "har")]
    curl: Option<String>,
    /// A HAR file, as saved by a browser.
    #[arg(long, value_name = "FILE")]
    har: Option<PathBuf>,
    /// Number of the request in the HAR file, starting at 1 [default: 1].
    #[arg(long, value_name = "N", requires = "har")]
    entry: Option<usize>,
    /// A request header. Repeatable. Added to the headers of a curl command or HAR entry.
    #[arg(short = 'H', long = "header", value_name = "NAME: VALUE")]
    headers: Vec<String>,
    /// The body of the request, e.g. '{"model":"a"}'. Replaces that of a curl command or HAR entry.
    #[arg(long, value_name = "TEXT")]
    body: Option<String>,
    /// IP address of the peer of the connection.
    #[arg(long, default_value = "127.0.0.1")]
    ip: IpAddr,
    /// Subject alternative name of the client certificate.
    #[arg(long, value_name = "NAME")]
    client_cert_san: Option<String>,
    /// Common name of the client certificate.
    #[arg(long, value_name = "NAME")]
    client_cert_cn: Option<String>,
}

impl RequestArguments {
    /// Returns the request, and notes about ignored parts of the input.
    ///
    /// # Errors
    /// A message without prefix if the arguments do not describe a request.
    pub(super) fn to_request(&self) -> Result<(ExplainRequest, Vec<String>), String> {
        let mut imported = self.import_request()?;
        for line in &self.headers {
            let (name, value) = line
                .split_once(':')
                .ok_or_else(|| format!("{line:?} is not a header: write \"name: value\""))?;
            imported
                .headers
                .push((name.trim().to_owned(), value.trim().to_owned()));
        }
        let ImportedRequest {
            method,
            url,
            headers,
            body,
            notes,
        } = imported;
        let request = ExplainRequest {
            method,
            url,
            headers,
            body: self.body.clone().unwrap_or(body),
            peer_ip: self.ip,
            client_cert_san: self.client_cert_san.clone(),
            client_cert_cn: self.client_cert_cn.clone(),
        };
        Ok((request, notes))
    }

    fn import_request(&self) -> Result<ImportedRequest, String> {
        if let Some(line) = &self.curl {
            return curl::parse_curl_line(line);
        }
        if let Some(file) = &self.har {
            return har::read_har_entry(file, self.entry);
        }
        let plain = |method: &str, url: &str| ImportedRequest {
            method: method.into(),
            url: url.into(),
            ..ImportedRequest::default()
        };
        match self.request.as_slice() {
            [first, ..] if first == "curl" => curl::parse_curl_words(&self.request),
            [url] if url.contains('/') => Ok(plain("GET", url)),
            [method, url] => Ok(plain(method, url)),
            _ => Err("expected METHOD and URL, as in: tidegate explain GET /api/orders".to_owned()),
        }
    }
}
