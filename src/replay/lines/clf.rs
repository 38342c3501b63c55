//! nginx's and Apache's formats, and those that followed them:
//!
//! `[vhost:port ]peer ident user [time] "request" status bytes[ "referer" "user agent"[ further…]]`
//!
//! Further fields, quoted or not, are called `extra1`, `extra2`, …. Traefik's text ends in a quoted router and service and
//! a number of milliseconds.

use super::when::{CLF_LEN, ClfClock};
use super::{
    Headers, Line, Read, Wanted, address, number, request_line, to_quote, told, unescaped,
};
use smallvec::SmallVec;
use std::borrow::Cow;

#[derive(Debug)]
pub(in super::super) struct Parser {
    clock: ClfClock,
    user: SmallVec<[u16; 1]>,
    referer: SmallVec<[u16; 1]>,
    agent: SmallVec<[u16; 1]>,
    /// In the order of the fields.
    extras: Vec<SmallVec<[u16; 1]>>,
}

/// Fields after the user agent that are looked at.
const MOST_EXTRAS: usize = 32;

impl Parser {
    pub(super) fn new(wanted: &Wanted) -> Self {
        let extras: Vec<_> = (1..=MOST_EXTRAS)
            .map(|number| wanted.of_field(&format!("extra{number}"), None))
            .collect();
        let used = extras
            .iter()
            .rposition(|places| !places.is_empty())
            .map_or(0, |last| last + 1);
        Self {
            clock: ClfClock::new(),
            user: wanted.of_field("remote_user", None),
            referer: wanted.of_field("referer", Some("referer")),
            agent: wanted.of_field("user_agent", Some("user-agent")),
            extras: extras.into_iter().take(used).collect(),
        }
    }

    pub(super) fn read<'l>(&mut self, line: &'l [u8]) -> Read<'l> {
        self.request(line).unwrap_or(Read::Broken)
    }

    fn request<'l>(&mut self, line: &'l [u8]) -> Option<Read<'l>> {
        let (head, at_us, rest) = self.split_at_time(line)?;
        let (request, rest) = to_quote(rest.strip_prefix(b" \"")?)?;
        let (status, rest) = word(rest.strip_prefix(b" ")?);
        let (_bytes, rest) = word(rest);
        let status = number(status).and_then(|status| u16::try_from(status).ok())?;
        let request = unescaped(request);
        let (method, target) = match &request {
            // What no client has sent as a request: bytes of TLS, nothing at all.
            Cow::Borrowed(text) => match request_line(text) {
                Some((method, target)) => (method.into(), target.into()),
                None => return Some(Read::Other),
            },
            Cow::Owned(text) => match request_line(text) {
                Some((method, target)) => (method.to_vec().into(), target.to_vec().into()),
                None => return Some(Read::Other),
            },
        };
        let (host, peer, user) = split_head(head)?;
        let mut headers = Headers::new();
        push(&mut headers, &self.user, user);
        let took_us = self.push_fields(&mut headers, rest);
        let host = Cow::Borrowed(host);
        Some(Read::Request(Line {
            at_us,
            coarse: true,
            took_us,
            peer: address(peer),
            status,
            method,
            target,
            host,
            headers,
        }))
    }

    /// What stands before the time, the time, and what stands after. A user's name may hold brackets, too.
    fn split_at_time<'l>(&mut self, line: &'l [u8]) -> Option<(&'l [u8], u64, &'l [u8])> {
        let mut from = 0;
        loop {
            let at = from + memchr::memchr(b'[', line.get(from..)?)?;
            let text = line.get(at + 1..)?;
            if let Some(at_us) = text.get(..CLF_LEN).and_then(|text| self.clock.read(text))
                && text.get(CLF_LEN) == Some(&b']')
            {
                return Some((line.get(..at)?, at_us, text.get(CLF_LEN + 1..)?));
            }
            from = at + 1;
        }
    }

    /// Reads what follows the size, and the duration that Traefik ends its lines with.
    fn push_fields<'l>(&self, headers: &mut Headers<'l>, rest: &'l [u8]) -> Option<u64> {
        let wants_nothing =
            self.referer.is_empty() && self.agent.is_empty() && self.extras.is_empty();
        if !wants_nothing {
            let mut rest = rest;
            for place in [&self.referer, &self.agent].into_iter().chain(&self.extras) {
                let Some((field, after)) = field(rest) else {
                    break;
                };
                push(headers, place, field);
                rest = after;
            }
        }
        let digits = rest.strip_suffix(b"ms")?;
        let start = memchr::memrchr(b' ', digits)? + 1;
        number(digits.get(start..)?)?.checked_mul(1000)
    }
}

fn push<'l>(headers: &mut Headers<'l>, places: &[u16], text: &'l [u8]) {
    if let (Some(text), false) = (told(text), places.is_empty()) {
        headers.extend(places.iter().map(|place| (*place, unescaped(text))));
    }
}

/// Virtual host, peer, user.
fn split_head(head: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let (first, rest) = word(head);
    let (second, after) = word(rest);
    // Nothing but an address begins with a digit or holds a colon and no dot, and most lines begin with one.
    let is_virtual_host = address(first).is_none() && address(second).is_some();
    let (host, peer, rest) = if is_virtual_host {
        (first, second, after)
    } else {
        (&[][..], first, rest)
    };
    let (_ident, user) = word(rest);
    (!peer.is_empty()).then_some((host, peer, user.trim_ascii_end()))
}

/// Up to the next blank, and what follows it.
fn word(text: &[u8]) -> (&[u8], &[u8]) {
    match memchr::memchr(b' ', text).and_then(|at| text.split_at_checked(at)) {
        Some((word, rest)) => (word, rest.get(1..).unwrap_or_default()),
        None => (text, &[]),
    }
}

/// The next field, in quotes or not.
fn field(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let text = text.trim_ascii_start();
    match text.strip_prefix(b"\"") {
        Some(quoted) => to_quote(quoted),
        None if text.is_empty() => None,
        None => Some(word(text)),
    }
}
