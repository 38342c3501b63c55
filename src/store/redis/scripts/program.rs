//! The texts of the Lua programs: which files and sections a program contains.

use crate::limiter::{Algorithm, Charge, PolicyCharges, each_charge};

/// A script and its SHA-1 digest for EVALSHA.
#[derive(Debug)]
pub(super) struct LuaProgram {
    pub(super) text: String,
    pub(super) sha: String,
}

/// The file of each algorithm, by its flag bit. A leaky bucket also needs the token bucket.
const ALGORITHM_SOURCES: [&str; 7] = [
    include_str!("../../../limiter/sliding_log.lua"),
    include_str!("../../../limiter/sliding_window.lua"),
    include_str!("../../../limiter/fixed_window.lua"),
    include_str!("../../../limiter/token_bucket.lua"),
    include_str!("../../../limiter/leaky_bucket.lua"),
    include_str!("../../../limiter/concurrency.lua"),
    include_str!("../../../limiter/block.lua"),
];

/// Flags for the purposes of a program, above the bits of its algorithms: `SETTLE_FLAG` settles
/// charges, `COUNT_REJECTED_FLAG` counts rejected requests, `LEASE_FLAG` grants leases,
/// `OVERRIDE_FLAG` applies overrides of keys, `CALENDAR_FLAG` counts in periods of calendars.
pub(super) const SETTLE_FLAG: usize = 1 << ALGORITHM_SOURCES.len();

const COUNT_REJECTED_FLAG: usize = SETTLE_FLAG << 1;

const LEASE_FLAG: usize = COUNT_REJECTED_FLAG << 1;

pub(crate) const OVERRIDE_FLAG: usize = LEASE_FLAG << 1;

const CALENDAR_FLAG: usize = OVERRIDE_FLAG << 1;

pub(super) const PROGRAM_COUNT: usize = CALENDAR_FLAG << 1;

impl LuaProgram {
    pub(super) fn new(flags: usize) -> Self {
        let algorithms = ALGORITHM_SOURCES
            .iter()
            .enumerate()
            .filter(|(bit, _)| flags >> bit & 1 == 1)
            .map(|(_, text)| *text);
        let last = if flags & SETTLE_FLAG == 0 {
            include_str!("../decide.lua")
        } else {
            include_str!("../settle.lua")
        };
        let files = [include_str!("../prelude.lua")]
            .into_iter()
            .chain(algorithms)
            .chain([last]);
        let text = files
            .map(|source| strip_source(source, flags))
            .collect::<String>();
        let sha = redis::Script::new(&text).get_hash().to_owned();
        Self { text, sha }
    }
}

/// Removes comments, indentation, and the sections that the program does not need. Redis accepts
/// arguments up to 16 KiB from an unauthenticated connection. After a larger argument, Redis closes
/// the connection instead of reporting the missing login.
fn strip_source(source: &str, flags: usize) -> String {
    let (mut text, mut is_included) = (String::with_capacity(source.len()), true);
    for line in source.lines().map(str::trim_start) {
        match line {
            "-- section: settlements" => is_included = flags & SETTLE_FLAG != 0,
            "-- section: rejected charges" => is_included = flags & COUNT_REJECTED_FLAG != 0,
            "-- section: leases" => is_included = flags & LEASE_FLAG != 0,
            "-- section: overrides" => is_included = flags & OVERRIDE_FLAG != 0,
            "-- section: calendars" => is_included = flags & CALENDAR_FLAG != 0,
            "-- end section" => is_included = true,
            line if is_included && !line.is_empty() && !line.starts_with("--") => {
                text.push_str(line);
                text.push('\n');
            }
            _ => {}
        }
    }
    text
}

pub(super) fn program_flags_for_algorithm(algorithm: Algorithm) -> usize {
    match algorithm {
        Algorithm::SlidingLog => 1,
        Algorithm::SlidingWindow { .. } => 1 << 1,
        Algorithm::FixedWindow { .. } => 1 << 2,
        Algorithm::CalendarWindow { .. } => 1 << 2 | CALENDAR_FLAG,
        Algorithm::TokenBucket { .. } => 1 << 3,
        Algorithm::LeakyBucket { .. } => 1 << 3 | 1 << 4,
        Algorithm::Concurrency { .. } => 1 << 5,
        Algorithm::Block => 1 << 6,
    }
}

pub(super) fn program_flags_for_request(request: &[PolicyCharges<'_>]) -> usize {
    each_charge(request).fold(0, |bits, charge| bits | program_flags_for_charge(&charge))
}

/// The flags of the program that decides a charge.
pub(crate) fn program_flags_for_charge(charge: &Charge<'_, '_>) -> usize {
    let mut flags = program_flags_for_algorithm(charge.limit.algorithm);
    if charge.policy.counts_rejected {
        flags |= COUNT_REJECTED_FLAG;
    }
    if charge.policy.requested_lease().is_some() {
        flags |= LEASE_FLAG;
    }
    if charge.name.is_some() {
        flags |= OVERRIDE_FLAG;
    }
    flags
}
