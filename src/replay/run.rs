//! Judges requests of the past by one set of policies, and keeps the books.

use super::lacks::Told as LogTold;
use super::lines::Wanted;
use super::order::Request;
use super::suggest::Peaks;
use super::tally::{Keys, Series};
use crate::clock::{Clock, Hands};
use crate::enforcer::{Past, Told, rehearse};
use crate::limiter::{Amendment, Key, Limit};
use crate::policy::client::Client;
use crate::policy::jwt::Token;
use crate::policy::path::Readings;
use crate::policy::{Action, Facts, PolicyTable};
use crate::proxy::host_for_policies;
use crate::store::{Late, Memory, MemorySettings};
use crate::telemetry::metrics::Decision as Did;
use http::{HeaderMap, HeaderValue, Method};
use smallvec::SmallVec;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Instant;

/// Counters of one set of policies; as many again for suggestions.
const COUNTERS: MemorySettings = MemorySettings {
    max_keys: 1 << 20,
    max_bytes: 256 << 20,
};

/// Keys whose refusals are counted one by one, of all policies together.
const KEYS: usize = 1 << 20;

/// Requests that hold slots at a time; more are judged as if they had ended at once.
const MAX_FLIGHTS: usize = 1 << 18;

/// Longer ones hold no slot for longer, or a mistaken log could hold one for ever.
const LONGEST_US: u64 = 86_400_000_000;

/// One set of policies and what it did.
#[derive(Debug)]
pub(super) struct Judge<'t> {
    pub(super) table: &'t PolicyTable,
    wanted: &'t Wanted,
    memory: Memory,
    hands: Hands,
    /// The moment that rehearsals are asked at: the clock is moved by hand.
    asked: Instant,
    flights: Flights,
    pub(super) books: Books,
    pub(super) peaks: Option<Peaks>,
}

/// What is counted of one set of policies.
#[derive(Debug)]
pub(super) struct Books {
    pub(super) forwarded: u64,
    pub(super) delayed: u64,
    pub(super) limited: u64,
    pub(super) denied: u64,
    pub(super) bad_key: u64,
    /// Refused before any policy sees them.
    pub(super) malformed: u64,
    /// Longest and total time that requests were held (µs).
    pub(super) longest_delay_us: u64,
    pub(super) series: Series,
    /// In the order of the table.
    pub(super) policies: Vec<PolicyBook>,
    pub(super) told: LogTold,
    /// Older than one that was judged before.
    pub(super) late: u64,
    pub(super) first_us: u64,
    pub(super) last_us: u64,
}

/// What is counted of one policy.
#[derive(Debug)]
pub(super) struct PolicyBook {
    pub(super) allowed: u64,
    pub(super) delayed: u64,
    pub(super) rejected: u64,
    pub(super) blocked: u64,
    pub(super) denied: u64,
    pub(super) exempt: u64,
    pub(super) shadow_rejected: u64,
    pub(super) first_refused_us: u64,
    pub(super) last_refused_us: u64,
    pub(super) series: Series,
    pub(super) keys: Keys,
}

impl<'t> Judge<'t> {
    pub(super) fn new(table: &'t PolicyTable, wanted: &'t Wanted, suggests: bool) -> Self {
        let (clock, hands) = Clock::manual(0);
        let policies = table.policies().len();
        let bound = (KEYS / policies.max(1)).max(1 << 10);
        Self {
            table,
            wanted,
            peaks: suggests.then(|| Peaks::new(table, COUNTERS, clock.clone())),
            memory: Memory::new(COUNTERS, clock),
            hands,
            asked: Instant::now(),
            flights: Flights::default(),
            books: Books::new(policies, bound, wanted.names().len()),
        }
    }

    /// Counters that were dropped for want of room while they still mattered.
    pub(super) fn evicted(&self) -> u64 {
        self.memory.evicted() + self.peaks.as_ref().map_or(0, Peaks::evicted)
    }

    /// Judges one request, not before those that were judged before. Whether it would have been forwarded.
    pub(super) fn judge(&mut self, request: &Request<'_>, tells_query: bool) -> bool {
        let books = &mut self.books;
        let now_us = request.at_us.max(books.last_us);
        books.late += u64::from(now_us > request.at_us);
        books.first_us = if books.told.requests == 0 {
            now_us
        } else {
            books.first_us
        };
        books.last_us = now_us;
        self.flights.land(now_us, &self.memory, &self.hands);
        self.hands.set_us(now_us);

        let headers = self.headers(request);
        let client = Client::identify(
            request.peer.unwrap_or(IpAddr::V4(Ipv4Addr::UNSPECIFIED)),
            &headers,
            &self.table.client,
        );
        let is_hidden = client.peer_trusted && !headers.contains_key(&self.table.client.ip_header);
        self.books.told.add(request, tells_query, is_hidden);
        let Some(target) = Target::of(request) else {
            return self.refuse_unseen(now_us);
        };
        let Ok(paths) = Readings::of(target.path, &self.table.path) else {
            return self.refuse_unseen(now_us);
        };
        let Ok(method) = Method::from_bytes(request.method) else {
            return self.refuse_unseen(now_us);
        };
        let Some(host) =
            host_for_policies(target.host).or_else(|| target.host.is_empty().then(|| "".into()))
        else {
            return self.refuse_unseen(now_us);
        };
        let token = match self.table.tokens() {
            Some(reader) if reader.is_ambiguous(&headers) => return self.refuse_unseen(now_us),
            Some(reader) => Token::new(Some(reader), now_us / 1_000_000),
            None => Token::default(),
        };
        let facts = Facts {
            method: &method,
            host: &host,
            paths: &paths,
            query: target.query,
            headers: &headers,
            client_ip: client.ip,
            token: &token,
            client_cert: None,
            descriptor: None,
        };
        self.decide(&facts, now_us, request.took_us)
    }

    fn decide(&mut self, facts: &Facts<'_>, now_us: u64, took_us: Option<u64>) -> bool {
        let (books, peaks, table) = (&mut self.books, &mut self.peaks, self.table);
        let slot = self.flights.next_slot();
        let asked = self.asked;
        let rehearsed = rehearse(&self.memory, table, facts, (slot, asked), |told| {
            books.add(&told, now_us);
            let quota = table
                .policies()
                .get(told.at)
                .and_then(|policy| match &policy.action {
                    Action::Limit(quota) => Some(quota),
                    Action::Allow | Action::Deny => None,
                });
            if let (Some(peaks), Some(claim), Some(quota)) = (peaks.as_mut(), &told.claim, quota) {
                peaks.add(told.at, &quota.limits, claim, asked);
            }
        });
        books.end(rehearsed.past, rehearsed.delay_us, now_us);
        if !rehearsed.places.is_empty() {
            // A request that waits has its slot already.
            let took_us = took_us
                .unwrap_or_default()
                .saturating_add(rehearsed.delay_us);
            let took_us = took_us
                .min(rehearsed.longest_us.unwrap_or(LONGEST_US))
                .min(LONGEST_US);
            self.flights.hold(
                slot,
                rehearsed.places,
                now_us,
                now_us.saturating_add(took_us),
            );
        }
        rehearsed.past == Past::Forwarded
    }

    fn refuse_unseen(&mut self, now_us: u64) -> bool {
        self.books.malformed += 1;
        self.books.series.add(now_us, true);
        false
    }

    fn headers(&self, request: &Request<'_>) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (place, value) in request.headers() {
            let name = self
                .wanted
                .names()
                .get(place)
                .filter(|name| self.table.reads_header(name));
            if let (Some(name), Ok(value)) = (name, HeaderValue::from_bytes(value)) {
                headers.append(name.clone(), value);
            }
        }
        if !request.host.is_empty() && self.table.reads_header(&http::header::HOST) {
            headers.extend(
                HeaderValue::from_bytes(request.host)
                    .ok()
                    .map(|host| (http::header::HOST, host)),
            );
        }
        headers
    }
}

/// Where a request wanted to go.
struct Target<'a> {
    host: &'a str,
    path: &'a str,
    query: Option<&'a str>,
}

impl<'a> Target<'a> {
    /// `None`: no request has such a target.
    fn of(request: &Request<'a>) -> Option<Self> {
        let target = str::from_utf8(request.target).ok()?;
        let mut host = str::from_utf8(request.host).ok()?;
        let mut rest = target;
        // A whole URL (RFC 9112, 3.2.2).
        for scheme in ["http://", "https://"] {
            if let Some(after) = target.strip_prefix(scheme) {
                let end = after.find(['/', '?']).unwrap_or(after.len());
                (host, rest) = after.split_at_checked(end)?;
            }
        }
        let (path, query) = rest
            .split_once('?')
            .map_or((rest, None), |(path, query)| (path, Some(query)));
        Some(Self {
            host,
            path: if path.is_empty() { "/" } else { path },
            query,
        })
    }
}

impl Books {
    fn new(policies: usize, bound: usize, headers: usize) -> Self {
        let policy = || PolicyBook {
            allowed: 0,
            delayed: 0,
            rejected: 0,
            blocked: 0,
            denied: 0,
            exempt: 0,
            shadow_rejected: 0,
            first_refused_us: 0,
            last_refused_us: 0,
            series: Series::new(),
            keys: Keys::new(bound),
        };
        Self {
            forwarded: 0,
            delayed: 0,
            limited: 0,
            denied: 0,
            bad_key: 0,
            malformed: 0,
            longest_delay_us: 0,
            series: Series::new(),
            policies: (0..policies).map(|_| policy()).collect(),
            told: LogTold {
                headers: vec![0; headers],
                ..LogTold::default()
            },
            late: 0,
            first_us: 0,
            last_us: 0,
        }
    }

    fn add(&mut self, told: &Told<'_, '_>, now_us: u64) {
        let Some(policy) = self.policies.get_mut(told.at) else {
            return;
        };
        let (count, refused) = match told.did {
            Did::Allowed => (&mut policy.allowed, false),
            Did::Delayed => (&mut policy.delayed, false),
            Did::Exempt => (&mut policy.exempt, false),
            Did::Rejected => (&mut policy.rejected, true),
            Did::Blocked => (&mut policy.blocked, true),
            Did::Denied => (&mut policy.denied, true),
            Did::ShadowRejected => (&mut policy.shadow_rejected, true),
            // Memory is always there.
            Did::Degraded
            | Did::DegradedOpen
            | Did::DegradedClosed
            | Did::DegradedLocalAllowed
            | Did::DegradedLocalRejected => return,
        };
        *count += 1;
        policy.series.add(now_us, refused);
        if refused {
            if policy.first_refused_us == 0 {
                policy.first_refused_us = now_us;
            }
            policy.last_refused_us = now_us;
        }
        if let Some(claim) = &told.claim {
            policy.keys.add(claim.key, now_us, refused);
        }
    }

    fn end(&mut self, past: Past, delay_us: u64, now_us: u64) {
        let count = match past {
            Past::Forwarded => &mut self.forwarded,
            Past::Limited => &mut self.limited,
            Past::Denied => &mut self.denied,
            Past::BadKey => &mut self.bad_key,
        };
        *count += 1;
        self.delayed += u64::from(delay_us > 0);
        self.longest_delay_us = self.longest_delay_us.max(delay_us);
        self.series.add(now_us, past != Past::Forwarded);
    }
}

impl PolicyBook {
    pub(super) fn refused(&self) -> u64 {
        self.rejected + self.blocked + self.denied + self.shadow_rejected
    }

    pub(super) fn matched(&self) -> u64 {
        self.allowed + self.delayed + self.exempt + self.refused()
    }
}

impl LogTold {
    fn add(&mut self, request: &Request<'_>, tells_query: bool, is_hidden: bool) {
        self.requests += 1;
        self.peer += u64::from(request.peer.is_some());
        self.host += u64::from(!request.host.is_empty());
        self.took += u64::from(request.took_us.is_some());
        self.refused_then += u64::from(request.status == 429);
        self.without_query += u64::from(!tells_query);
        self.hidden += u64::from(is_hidden);
        for (place, _) in request.headers() {
            if let Some(count) = self.headers.get_mut(place) {
                *count += 1;
            }
        }
    }
}

/// The slots that requests hold, renewed and given back when it is time, as the proxy's keeper does.
#[derive(Debug, Default)]
struct Flights {
    serial: u128,
    held: HashMap<u128, Flight, foldhash::fast::RandomState>,
    /// When to look after which.
    due: BinaryHeap<Reverse<(u64, u128)>>,
}

#[derive(Debug)]
struct Flight {
    places: SmallVec<[(Limit, Key); 1]>,
    ends_us: u64,
}

impl Flight {
    /// When it ends, or has to be renewed before.
    fn due_us(&self, now_us: u64) -> u64 {
        let shortest_us = self
            .places
            .iter()
            .map(|(limit, _)| limit.per_us)
            .min()
            .unwrap_or_default();
        self.ends_us
            .min(now_us.saturating_add((shortest_us / 3).max(1)))
    }
}

impl Flights {
    fn next_slot(&mut self) -> u128 {
        self.serial += 1;
        self.serial
    }

    fn hold(&mut self, slot: u128, places: SmallVec<[(Limit, Key); 1]>, now_us: u64, ends_us: u64) {
        let ends_us = if self.held.len() < MAX_FLIGHTS {
            ends_us
        } else {
            now_us
        };
        let flight = Flight { places, ends_us };
        self.due.push(Reverse((flight.due_us(now_us), slot)));
        self.held.insert(slot, flight);
    }

    /// Does all that was to be done until `now_us`.
    fn land(&mut self, now_us: u64, memory: &Memory, hands: &Hands) {
        while let Some(Reverse((due_us, slot))) = self
            .due
            .peek()
            .copied()
            .filter(|Reverse((at, _))| *at <= now_us)
        {
            self.due.pop();
            hands.set_us(due_us);
            let Some(flight) = self.held.get(&slot) else {
                continue;
            };
            let has_ended = flight.ends_us <= due_us;
            let amendment = if has_ended {
                Amendment::Release { slot }
            } else {
                Amendment::Renew { slot }
            };
            for (limit, key) in &flight.places {
                memory.amend(&[Late {
                    limit,
                    key,
                    amendment,
                }]);
            }
            if has_ended {
                self.held.remove(&slot);
            } else {
                self.due.push(Reverse((flight.due_us(due_us), slot)));
            }
        }
    }
}
