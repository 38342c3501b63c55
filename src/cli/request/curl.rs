//! A request as a `curl` command line tells it.
//!
//! What policies can see is understood: method, URL, headers, cookies. What curl does beside (proxies, certificates,
//! output, retries) is passed over, and what is unknown is said.

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

/// A request that was read, and what was passed over in it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::cli) struct Read {
    pub(in crate::cli) method: String,
    pub(in crate::cli) url: String,
    pub(in crate::cli) headers: Vec<(String, String)>,
    /// Sentences.
    pub(in crate::cli) notes: Vec<String>,
}

/// Options that take a value and change nothing that a policy sees.
const VALUES: &str = "--aws-sigv4 --cacert --capath --cert --cert-type --ciphers --config --connect-timeout --connect-to \
--continue-at --cookie-jar --crlfile --curves --dns-servers --doh-url --dump-header --expect100-timeout --interface --keepalive-time --key \
--key-type --limit-rate --local-port --max-filesize --max-redirs --max-time --netrc-file --noproxy --output \
--output-dir --parallel-max --pass --pinnedpubkey --proto --proto-default --proto-redir --proxy --proxy-header --proxy-user --rate \
--resolve --retry --retry-delay --retry-max-time --socks5 --socks5-hostname --speed-limit --speed-time --stderr \
--tls-max --tls13-ciphers --trace --trace-ascii --unix-socket --write-out";
const SHORT_VALUES: &str = "cCDEKmoPQtUwxyYz";

/// Options without a value, of the same kind.
const FLAGS: &str = "--anyauth --basic --cert-status --compressed-ssh --digest --disable --fail --fail-early --fail-with-body \
--globoff --http0.9 --http1.0 --http1.1 --http2 --http2-prior-knowledge --http3 --include --insecure --ipv4 --ipv6 --location \
--location-trusted --netrc --next --no-buffer --no-keepalive --no-progress-meter --parallel --path-as-is --post301 --post302 --post303 \
--progress-bar --proxy-insecure --remote-name --remote-header-name --retry-all-errors --retry-connrefused --show-error --show-headers --silent --ssl-reqd \
--styled-output --tcp-nodelay --tlsv1 --tlsv1.0 --tlsv1.1 --tlsv1.2 --tlsv1.3 --tr-encoding --trace-time --verbose";
const SHORT_FLAGS: &str = "0123456afgijJkLMnNOpqRsSvZ#";

/// What forms leave as it is.
const FORM: AsciiSet = NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'_')
    .remove(b'.')
    .remove(b'~');

/// Short options that are understood, by their long names.
const SHORT: [(char, &str); 14] = [
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

/// Reads a command line as a shell would, and then as curl would.
///
/// # Errors
/// A sentence, if it can't be a request.
pub(in crate::cli) fn line(line: &str) -> Result<Read, String> {
    // Lines are broken with backslashes; a browser's "copy as cURL" does so.
    let words =
        shlex::split(line).ok_or_else(|| "a quote in the curl line has no end".to_owned())?;
    self::words(&words)
}

/// Reads what a shell has split already. The first word is `curl`.
///
/// # Errors
/// A sentence, if it can't be a request.
pub(in crate::cli) fn words(words: &[String]) -> Result<Read, String> {
    let mut words = words.iter().map(String::as_str).filter(|word| *word != "$");
    match words.next() {
        Some(first) if first == "curl" || first.ends_with("/curl") => {}
        _ => return Err("a curl line begins with curl".to_owned()),
    }
    let mut told = Told::default();
    let mut is_option = true;
    while let Some(word) = words.next() {
        match word {
            "--" if is_option => is_option = false,
            _ if is_option && word.starts_with("--") => told.long(word, &mut words)?,
            _ if is_option && word.starts_with('-') && word.len() > 1 => {
                told.short(word, &mut words)?
            }
            _ => told.url(word),
        }
    }
    told.finish()
}

/// What the options have said so far.
#[derive(Debug, Default)]
struct Told {
    method: Option<String>,
    url: Option<String>,
    headers: Vec<(String, String)>,
    /// Headers that curl sends by itself, and that are told not to be.
    removed: Vec<String>,
    data: Vec<String>,
    body: Option<&'static str>,
    is_head: bool,
    is_get: bool,
    is_upload: bool,
    notes: Vec<String>,
}

impl Told {
    fn url(&mut self, url: &str) {
        match &self.url {
            None => self.url = Some(url.to_owned()),
            Some(first) => self
                .notes
                .push(format!("one URL is explained, {first}; passed over: {url}")),
        }
    }

    fn short<'w>(
        &mut self,
        word: &'w str,
        rest: &mut impl Iterator<Item = &'w str>,
    ) -> Result<(), String> {
        let mut letters = word.chars();
        letters.next();
        while let Some(letter) = letters.next() {
            if SHORT_FLAGS.contains(letter) {
                continue;
            }
            let long = SHORT
                .iter()
                .find(|(short, _)| *short == letter)
                .map(|(_, long)| *long);
            let takes_value = long.is_some_and(takes_value) || SHORT_VALUES.contains(letter);
            if !takes_value {
                match long {
                    Some(long) => self.flag(long),
                    None => self.unknown(&format!("-{letter}")),
                }
                continue;
            }
            let value = match letters.as_str() {
                "" => rest
                    .next()
                    .ok_or_else(|| format!("-{letter} needs a value"))?,
                joined => joined,
            };
            return match long {
                Some(long) => self.value(long, value),
                None => Ok(()),
            };
        }
        Ok(())
    }

    fn long<'w>(
        &mut self,
        word: &'w str,
        rest: &mut impl Iterator<Item = &'w str>,
    ) -> Result<(), String> {
        let is_passed_over = VALUES.split(' ').any(|known| known == word);
        if takes_value(word) || is_passed_over {
            let value = rest.next().ok_or_else(|| format!("{word} needs a value"))?;
            return if is_passed_over {
                Ok(())
            } else {
                self.value(word, value)
            };
        }
        let positive = word.strip_prefix("--no-").map(|name| format!("--{name}"));
        if !FLAGS
            .split(' ')
            .any(|known| known == word || positive.as_deref() == Some(known))
        {
            self.flag(word);
        }
        Ok(())
    }

    fn flag(&mut self, name: &str) {
        match name {
            "--head" => self.is_head = true,
            "--get" => self.is_get = true,
            "--compressed" => self.header("accept-encoding", "deflate, gzip, br, zstd"),
            "--list-only" | "--use-ascii" => {}
            name => self.unknown(name),
        }
    }

    fn value(&mut self, name: &str, value: &str) -> Result<(), String> {
        match name {
            "--request" => self.method = Some(value.to_owned()),
            "--url" => self.url(value),
            "--header" => self.header_line(value)?,
            "--json" => {
                self.data.push(value.to_owned());
                self.body = Some("application/json");
                self.header_if_absent("accept", "application/json");
            }
            "--data" | "--data-ascii" | "--data-binary" if value.starts_with('@') => {
                self.file(value)
            }
            "--data-urlencode" if value.contains('@') && !value.contains('=') => self.file(value),
            "--data-urlencode" => self.form(&urlencoded(value)),
            "--data" | "--data-ascii" | "--data-binary" | "--data-raw" => self.form(value),
            "--form" | "--form-string" => self.body = Some("multipart/form-data"),
            "--user" => self.header_if_absent(
                "authorization",
                &format!("Basic {}", BASE64_STANDARD.encode(value)),
            ),
            "--oauth2-bearer" => self.header_if_absent("authorization", &format!("Bearer {value}")),
            "--cookie" if value.contains('=') => self.header("cookie", value),
            "--cookie" => self
                .notes
                .push(format!("the cookies in the file {value} are not read")),
            "--user-agent" => self.header("user-agent", value),
            "--referer" => self.header("referer", value.trim_end_matches(";auto")),
            "--range" => self.header("range", &format!("bytes={value}")),
            _ => self.is_upload = true,
        }
        Ok(())
    }

    fn header_line(&mut self, line: &str) -> Result<(), String> {
        if line.starts_with('@') {
            self.notes
                .push(format!("the headers in the file {line} are not read"));
            return Ok(());
        }
        match (line.split_once(':'), line.strip_suffix(';')) {
            (Some((name, value)), _) if value.trim().is_empty() => {
                self.removed.push(name.trim().to_ascii_lowercase());
            }
            (Some((name, value)), _) => self.header(name.trim(), value.trim()),
            (None, Some(name)) => self.header(name.trim(), ""),
            (None, None) => return Err(format!("{line:?} is no header: write \"name: value\"")),
        }
        Ok(())
    }

    fn header(&mut self, name: &str, value: &str) {
        self.headers.push((name.to_owned(), value.to_owned()));
    }

    fn header_if_absent(&mut self, name: &str, value: &str) {
        let is_there = self
            .headers
            .iter()
            .any(|(known, _)| known.eq_ignore_ascii_case(name));
        if !is_there && !self.removed.iter().any(|removed| removed == name) {
            self.header(name, value);
        }
    }

    fn form(&mut self, data: &str) {
        self.data.push(data.to_owned());
        self.body = self.body.or(Some("application/x-www-form-urlencoded"));
    }

    fn file(&mut self, name: &str) {
        self.body = self.body.or(Some("application/x-www-form-urlencoded"));
        if self.is_get {
            self.notes
                .push(format!("the data in the file {name} is not read"));
        }
    }

    fn unknown(&mut self, option: &str) {
        self.notes.push(format!("passed over: {option}"));
    }

    fn finish(mut self) -> Result<Read, String> {
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
        let has_body = self.body.is_some() && !self.is_get && !self.is_head;
        if self.is_get && !self.data.is_empty() {
            url.push(if url.contains('?') { '&' } else { '?' });
            url.push_str(&self.data.join("&"));
        }
        let method = match self.method.take() {
            Some(method) => method,
            None if self.is_head => "HEAD".to_owned(),
            None if self.is_upload => "PUT".to_owned(),
            None if has_body => "POST".to_owned(),
            None => "GET".to_owned(),
        };
        if let Some(kind) = self.body.filter(|_| has_body) {
            self.header_if_absent("content-type", kind);
        }
        self.header_if_absent("accept", "*/*");
        self.header_if_absent("user-agent", "curl");
        Ok(Read {
            method,
            url,
            headers: self.headers,
            notes: self.notes,
        })
    }
}

/// Of the options that are understood.
fn takes_value(long: &str) -> bool {
    matches!(
        long,
        "--request"
            | "--url"
            | "--header"
            | "--json"
            | "--data"
            | "--data-ascii"
            | "--data-binary"
            | "--data-raw"
            | "--data-urlencode"
            | "--form"
            | "--form-string"
            | "--user"
            | "--oauth2-bearer"
            | "--cookie"
            | "--user-agent"
            | "--referer"
            | "--range"
            | "--upload-file"
    )
}

/// `content`, `=content` or `name=content`.
fn urlencoded(data: &str) -> String {
    match data.split_once('=') {
        Some(("", content)) => utf8_percent_encode(content, &FORM).to_string(),
        Some((name, content)) => format!("{name}={}", utf8_percent_encode(content, &FORM)),
        None => utf8_percent_encode(data, &FORM).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Read {
        line(text).unwrap()
    }

    fn header<'r>(read: &'r Read, name: &str) -> Option<&'r str> {
        read.headers
            .iter()
            .find(|(known, _)| known == name)
            .map(|(_, value)| value.as_str())
    }

    #[test]
    fn a_line_says_method_url_and_headers() {
        let said = read(
            "curl -sSkX POST 'https://shop.example/api?a=1#part' -H 'x-a: b c' -d x -o /dev/null --max-time 5",
        );
        assert_eq!(
            (said.method.as_str(), said.url.as_str()),
            ("POST", "https://shop.example/api?a=1")
        );
        assert_eq!(header(&said, "x-a"), Some("b c"));
        assert_eq!(
            header(&said, "content-type"),
            Some("application/x-www-form-urlencoded")
        );
        assert_eq!(said.notes, [""; 0]);
    }

    #[test]
    fn the_method_follows_from_the_rest_as_in_curl() {
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
            assert_eq!(read(line).method, method, "{line}");
        }
        assert_eq!(
            read("curl -G h/a?b=1 -d c=2 --data-urlencode 'd=e f&'").url,
            "http://h/a?b=1&c=2&d=e%20f%26"
        );
    }

    #[test]
    fn what_stands_for_headers_becomes_headers() {
        let said = read(
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
            assert_eq!(header(&said, name), value, "{name}");
        }
        assert_eq!(
            header(&read("curl --json '{}' h"), "content-type"),
            Some("application/json")
        );
        assert_eq!(
            header(&read("curl --oauth2-bearer t h"), "authorization"),
            Some("Bearer t")
        );
    }

    #[test]
    fn what_is_not_understood_is_said() {
        let said = read("curl --frobnicate h second -b jar.txt -H @file -l");
        assert_eq!(said.url, "http://h");
        let notes = said.notes.join("\n");
        for word in ["--frobnicate", "second", "jar.txt", "@file"] {
            assert!(notes.contains(word), "{word} is not in {notes}");
        }
    }

    #[test]
    fn what_is_no_request_is_an_error() {
        for (line, why) in [
            ("wget h", "begins with curl"),
            ("", "begins with curl"),
            ("curl", "no URL"),
            ("curl -X", "-X needs a value"),
            ("curl 'h", "no end"),
            ("curl -H nothing h", "no header"),
            ("curl --data", "--data needs a value"),
        ] {
            let error = super::line(line).unwrap_err();
            assert!(error.contains(why), "{line}: {error}");
        }
    }

    #[test]
    fn a_browsers_copy_is_read() {
        let said = read("curl 'https://h/x' \\\n  -H 'accept: text/html' \\\n  --compressed");
        assert_eq!(
            (said.url.as_str(), header(&said, "accept")),
            ("https://h/x", Some("text/html"))
        );
    }

    proptest::proptest! {
        /// Whatever somebody pastes.
        #[test]
        fn nothing_panics(text in "curl [ -~é\\n]{0,60}") {
            if let Ok(read) = line(&text) {
                proptest::prop_assert!(!read.method.is_empty());
            }
        }
    }
}
