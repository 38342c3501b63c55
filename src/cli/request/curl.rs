//! Parses a `curl` command line into a request.
//!
//! Method, URL, headers, cookies and data are parsed, because policies can match them. Other curl options
//! (proxies, certificates, output, retries) are ignored. Unknown options are reported in a note.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// An imported request, with notes about the ignored parts of its source.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct ImportedRequest {
    pub(crate) method: String,
    pub(crate) url: String,
    pub(crate) headers: Vec<(String, String)>,
    /// The body; empty if there is none.
    pub(crate) body: String,
    /// Messages about ignored parts of the source.
    pub(crate) notes: Vec<String>,
}

/// Supported options with a value.
const VALUE_OPTIONS: &str = "--request --url --header --json --data --data-ascii --data-binary --data-raw --data-urlencode \
--form --form-string --user --oauth2-bearer --cookie --user-agent --referer --range --upload-file";

/// Options with a value that do not affect the parts of a request that policies match.
const IGNORED_VALUE_OPTIONS: &str = "--aws-sigv4 --cacert --capath --cert --cert-type --ciphers --config --connect-timeout --connect-to \
--continue-at --cookie-jar --crlfile --curves --dns-servers --doh-url --dump-header --expect100-timeout --interface --keepalive-time --key \
--key-type --limit-rate --local-port --max-filesize --max-redirs --max-time --netrc-file --noproxy --output \
--output-dir --parallel-max --pass --pinnedpubkey --proto --proto-default --proto-redir --proxy --proxy-header --proxy-user --rate \
--resolve --retry --retry-delay --retry-max-time --socks5 --socks5-hostname --speed-limit --speed-time --stderr \
--tls-max --tls13-ciphers --trace --trace-ascii --unix-socket --write-out \
-c -C -D -E -K -m -o -P -Q -t -U -w -x -y -Y -z";

/// Options without a value that do not affect the parts of a request that policies match.
const IGNORED_FLAGS: &str = "--anyauth --basic --cert-status --compressed-ssh --digest --disable --fail --fail-early --fail-with-body \
--globoff --http0.9 --http1.0 --http1.1 --http2 --http2-prior-knowledge --http3 --include --insecure --ipv4 --ipv6 --location \
--location-trusted --netrc --next --no-buffer --no-keepalive --no-progress-meter --parallel --path-as-is --post301 --post302 --post303 \
--progress-bar --proxy-insecure --remote-name --remote-header-name --retry-all-errors --retry-connrefused --show-error --show-headers --silent --ssl-reqd \
--styled-output --tcp-nodelay --tlsv1 --tlsv1.0 --tlsv1.1 --tlsv1.2 --tlsv1.3 --tr-encoding --trace-time --verbose \
-0 -1 -2 -3 -4 -5 -6 -a -f -g -i -j -J -k -L -M -n -N -O -p -q -R -s -S -v -Z -#";

/// Percent-encodes all bytes except the unreserved characters of RFC 3986.
const FORM_ENCODE_SET: AsciiSet = NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');

/// Supported short options with their long names.
const SHORT_OPTIONS: [(char, &str); 14] = [
    ('X', "--request"),
    ('H', "--header"),
    ('d', "--data"),
    ('F', "--form"),
    ('I', "--head"),
    ('G', "--get"),
    ('u', "--user"),
    ('b', "--cookie"),
    ('A', "--user-agent"),
    ('e', "--referer"),
    ('T', "--upload-file"),
    ('r', "--range"),
    ('l', "--list-only"),
    ('B', "--use-ascii"),
];

/// Splits a command line as a shell does, then parses it as curl does.
///
/// # Errors
/// A message if the line is not a valid curl command.
pub(crate) fn parse_curl_line(line: &str) -> Result<ImportedRequest, String> {
    // `shlex` also joins lines that end with a backslash, as in a browser's "Copy as cURL".
    let words = shlex::split(line).ok_or_else(|| "unclosed quote in the curl line".to_owned())?;
    parse_curl_words(&words)
}

/// Parses a command line that a shell has split already. The first word is `curl`.
///
/// # Errors
/// A message if the words are not a valid curl command.
pub(crate) fn parse_curl_words(words: &[String]) -> Result<ImportedRequest, String> {
    let mut words = words.iter().map(String::as_str).filter(|word| *word != "$");
    match words.next() {
        Some(first) if first == "curl" || first.ends_with("/curl") => {}
        _ => return Err("a curl line must begin with curl".to_owned()),
    }
    let mut options = CurlOptions::default();
    let mut allows_options = true;
    while let Some(word) = words.next() {
        match word {
            "--" if allows_options => allows_options = false,
            _ if allows_options && word.starts_with('-') && word.len() > 1 => {
                options.apply_options(word, &mut words)?
            }
            _ => options.set_first_url(word),
        }
    }
    options.into_request()
}

/// The parsed options of a curl command.
#[derive(Debug, Default)]
struct CurlOptions {
    method: Option<String>,
    url: Option<String>,
    headers: Vec<(String, String)>,
    /// Default headers of curl that an option such as `-H 'Accept:'` removes.
    removed_headers: Vec<String>,
    form_data: Vec<String>,
    content_type: Option<&'static str>,
    is_head: bool,
    is_get: bool,
    is_upload: bool,
    notes: Vec<String>,
}

impl CurlOptions {
    fn set_first_url(&mut self, url: &str) {
        match &self.url {
            None => self.url = Some(url.to_owned()),
            Some(first) => self
                .notes
                .push(format!("only the URL {first} is explained; ignored: {url}")),
        }
    }

    /// Applies a word with one long option, or with short ones. `rest` are the words after it.
    fn apply_options<'w>(
        &mut self,
        word: &'w str,
        rest: &mut impl Iterator<Item = &'w str>,
    ) -> Result<(), String> {
        if word.starts_with("--") {
            return self.apply_option(word, word, "", rest).map(drop);
        }
        let mut letters = word.chars();
        letters.next();
        while let Some(letter) = letters.next() {
            let short = format!("-{letter}");
            let mut known = SHORT_OPTIONS.iter();
            let long = known.find(|(known, _)| *known == letter);
            let name = long.map_or(&*short, |(_, long)| long);
            if self.apply_option(name, &short, letters.as_str(), rest)? {
                break;
            }
        }
        Ok(())
    }

    /// Applies one option, which was written as `written`. Its value is `joined`, or the next word.
    /// Returns whether it has a value.
    fn apply_option<'w>(
        &mut self,
        name: &str,
        written: &str,
        joined: &'w str,
        rest: &mut impl Iterator<Item = &'w str>,
    ) -> Result<bool, String> {
        let has_known_value = is_listed(VALUE_OPTIONS, name);
        if has_known_value || is_listed(IGNORED_VALUE_OPTIONS, name) {
            let value = match joined {
                "" => rest
                    .next()
                    .ok_or_else(|| format!("{written} needs a value"))?,
                joined => joined,
            };
            if has_known_value {
                self.apply_value_option(name, value)?;
            }
            return Ok(true);
        }
        let positive = name.strip_prefix("--no-").map(|name| format!("--{name}"));
        match name {
            _ if is_listed(IGNORED_FLAGS, name) => {}
            _ if positive.is_some_and(|positive| is_listed(IGNORED_FLAGS, &positive)) => {}
            "--head" => self.is_head = true,
            "--get" => self.is_get = true,
            "--compressed" => self.push_header("accept-encoding", "deflate, gzip, br, zstd"),
            "--list-only" | "--use-ascii" => {}
            name => self.notes.push(format!("ignored: {name}")),
        }
        Ok(false)
    }

    fn apply_value_option(&mut self, name: &str, value: &str) -> Result<(), String> {
        match name {
            "--request" => self.method = Some(value.to_owned()),
            "--url" => self.set_first_url(value),
            "--header" => self.apply_header_line(value)?,
            "--json" => {
                self.form_data.push(value.to_owned());
                self.content_type = Some("application/json");
                self.push_header_if_absent("accept", "application/json");
            }
            "--data" | "--data-ascii" | "--data-binary" if value.starts_with('@') => {
                self.apply_data_file(value)
            }
            "--data-urlencode" if value.contains('@') && !value.contains('=') => {
                self.apply_data_file(value)
            }
            "--data-urlencode" => self.push_form_data(&encode_urlencoded_data(value)),
            "--data" | "--data-ascii" | "--data-binary" | "--data-raw" => {
                self.push_form_data(value)
            }
            "--form" | "--form-string" => self.content_type = Some("multipart/form-data"),
            "--user" => self.push_header_if_absent(
                "authorization",
                &format!("Basic {}", BASE64_STANDARD.encode(value)),
            ),
            "--oauth2-bearer" => {
                self.push_header_if_absent("authorization", &format!("Bearer {value}"))
            }
            "--cookie" if value.contains('=') => self.push_header("cookie", value),
            "--cookie" => self
                .notes
                .push(format!("the cookies in the file {value} are not read")),
            "--user-agent" => self.push_header("user-agent", value),
            "--referer" => self.push_header("referer", value.trim_end_matches(";auto")),
            "--range" => self.push_header("range", &format!("bytes={value}")),
            _ => self.is_upload = true,
        }
        Ok(())
    }

    fn apply_header_line(&mut self, line: &str) -> Result<(), String> {
        if line.starts_with('@') {
            self.notes
                .push(format!("the headers in the file {line} are not read"));
            return Ok(());
        }
        match (line.split_once(':'), line.strip_suffix(';')) {
            (Some((name, value)), _) if value.trim().is_empty() => {
                self.removed_headers.push(name.trim().to_ascii_lowercase());
            }
            (Some((name, value)), _) => self.push_header(name.trim(), value.trim()),
            (None, Some(name)) => self.push_header(name.trim(), ""),
            (None, None) => return Err(format!("{line:?} is not a header: write \"name: value\"")),
        }
        Ok(())
    }

    fn push_header(&mut self, name: &str, value: &str) {
        self.headers.push((name.to_owned(), value.to_owned()));
    }

    fn push_header_if_absent(&mut self, name: &str, value: &str) {
        let is_present = self
            .headers
            .iter()
            .any(|(known, _)| known.eq_ignore_ascii_case(name));
        if !is_present && !self.removed_headers.iter().any(|removed| removed == name) {
            self.push_header(name, value);
        }
    }

    fn push_form_data(&mut self, data: &str) {
        self.form_data.push(data.to_owned());
        self.content_type = self
            .content_type
            .or(Some("application/x-www-form-urlencoded"));
    }

    fn apply_data_file(&mut self, name: &str) {
        self.content_type = self
            .content_type
            .or(Some("application/x-www-form-urlencoded"));
        self.notes
            .push(format!("the data in the file {name} is not read"));
    }

    fn into_request(mut self) -> Result<ImportedRequest, String> {
        let url = self
            .url
            .take()
            .ok_or_else(|| "the curl line has no URL".to_owned())?;
        let url = if url.contains("://") || url.starts_with('/') {
            url
        } else {
            format!("http://{url}")
        };
        let mut url = url.split('#').next().unwrap_or_default().to_owned();
        let has_body = self.content_type.is_some() && !self.is_get && !self.is_head;
        if self.is_get && !self.form_data.is_empty() {
            url.push(if url.contains('?') { '&' } else { '?' });
            url.push_str(&self.form_data.join("&"));
        }
        let separator = match self.content_type {
            Some("application/json") => "",
            _ => "&",
        };
        let body = if has_body {
            self.form_data.join(separator)
        } else {
            String::new()
        };
        let method = match self.method.take() {
            Some(method) => method,
            None if self.is_head => "HEAD".to_owned(),
            None if self.is_upload => "PUT".to_owned(),
            None if has_body => "POST".to_owned(),
            None => "GET".to_owned(),
        };
        if let Some(content_type) = self.content_type.filter(|_| has_body) {
            self.push_header_if_absent("content-type", content_type);
        }
        self.push_header_if_absent("accept", "*/*");
        self.push_header_if_absent("user-agent", "curl");
        Ok(ImportedRequest {
            method,
            url,
            headers: self.headers,
            body,
            notes: self.notes,
        })
    }
}

fn is_listed(options: &str, name: &str) -> bool {
    options.split(' ').any(|known| known == name)
}

/// Encodes the value of `--data-urlencode`: `content`, `=content` or `name=content`.
fn encode_urlencoded_data(data: &str) -> String {
    let (name, content) = data.split_once('=').unwrap_or(("", data));
    let content = utf8_percent_encode(content, &FORM_ENCODE_SET);
    match name {
        "" => content.to_string(),
        name => format!("{name}={content}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_valid_line(text: &str) -> ImportedRequest {
        parse_curl_line(text).unwrap()
    }

    fn find_header<'r>(read: &'r ImportedRequest, name: &str) -> Option<&'r str> {
        read.headers
            .iter()
            .find(|(known, _)| known == name)
            .map(|(_, value)| value.as_str())
    }

    #[test]
    fn reads_method_url_and_headers() {
        let request = parse_valid_line(
            "curl -sSkX POST 'https://shop.example/api?a=1#part' -H 'x-a: b c' -d x -o /dev/null --max-time 5",
        );
        assert_eq!(
            (request.method.as_str(), request.url.as_str()),
            ("POST", "https://shop.example/api?a=1")
        );
        assert_eq!(find_header(&request, "x-a"), Some("b c"));
        assert_eq!(
            find_header(&request, "content-type"),
            Some("application/x-www-form-urlencoded")
        );
        assert_eq!(request.notes, [""; 0]);
    }

    #[test]
    fn derives_the_method_as_curl_does() {
        for (line, method) in [
            ("curl h", "GET"),
            ("curl -I h", "HEAD"),
            ("curl -d x h", "POST"),
            ("curl --data-raw=x h", "GET"),
            ("curl --json '{}' h", "POST"),
            ("curl -F a=b h", "POST"),
            ("curl -T file h", "PUT"),
            ("curl -G -d x h", "GET"),
            ("curl -XDELETE h", "DELETE"),
            ("curl -d x -X PATCH h", "PATCH"),
        ] {
            assert_eq!(parse_valid_line(line).method, method, "{line}");
        }
        assert_eq!(
            parse_valid_line("curl -G h/a?b=1 -d c=2 --data-urlencode 'd=e f&'").url,
            "http://h/a?b=1&c=2&d=e%20f%26"
        );
    }

    #[test]
    fn converts_options_to_headers() {
        let request = parse_valid_line(
            "curl h -u ann:pw -b 'a=1; b=2' -A agent -e http://r -H 'Accept:' -H 'x-empty;' -r 0-9 --compressed",
        );
        for (name, value) in [
            ("authorization", Some("Basic YW5uOnB3")),
            ("cookie", Some("a=1; b=2")),
            ("user-agent", Some("agent")),
            ("referer", Some("http://r")),
            ("x-empty", Some("")),
            ("range", Some("bytes=0-9")),
            ("accept", None),
        ] {
            assert_eq!(find_header(&request, name), value, "{name}");
        }
        assert_eq!(
            find_header(&parse_valid_line("curl --json '{}' h"), "content-type"),
            Some("application/json")
        );
        assert_eq!(
            find_header(
                &parse_valid_line("curl --oauth2-bearer t h"),
                "authorization"
            ),
            Some("Bearer t")
        );
    }

    #[test]
    fn unknown_and_unread_inputs_add_notes() {
        let request = parse_valid_line("curl --frobnicate h second -b jar.txt -H @file -l");
        assert_eq!(request.url, "http://h");
        let notes = request.notes.join("\n");
        for word in ["--frobnicate", "second", "jar.txt", "@file"] {
            assert!(notes.contains(word), "{word} is not in {notes}");
        }
    }

    #[test]
    fn rejects_invalid_curl_lines() {
        for (line, why) in [
            ("wget h", "begin with curl"),
            ("", "begin with curl"),
            ("curl", "no URL"),
            ("curl -X", "-X needs a value"),
            ("curl 'h", "unclosed quote"),
            ("curl -H nothing h", "not a header"),
            ("curl --data", "--data needs a value"),
        ] {
            let error = super::parse_curl_line(line).unwrap_err();
            assert!(error.contains(why), "{line}: {error}");
        }
    }

    #[test]
    fn reads_a_line_copied_from_a_browser() {
        let request =
            parse_valid_line("curl 'https://h/x' \\\n  -H 'accept: text/html' \\\n  --compressed");
        assert_eq!(
            (request.url.as_str(), find_header(&request, "accept")),
            ("https://h/x", Some("text/html"))
        );
    }

    proptest::proptest! {
        /// Parsing never panics, and a parsed request has a method.
        #[test]
        fn no_curl_command_line_panics(text in "curl [ -~é\\n]{0,60}") {
            if let Ok(read) = parse_curl_line(&text) {
                proptest::prop_assert!(!read.method.is_empty());
            }
        }
    }
}
