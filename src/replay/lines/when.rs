//! Times as logs write them, in microseconds since the epoch.

use time::format_description::well_known::Rfc3339;
use time::{Date, Month, OffsetDateTime, PrimitiveDateTime, Time, UtcOffset};

/// Length of `19/Nov/2026:13:55:36 +0100`.
pub(super) const CLF_LEN: usize = 26;

const MONTHS: [&[u8]; 12] = [
    b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec",
];

/// Remembers the time that was read last: thousands of lines in a row say the same.
#[derive(Debug)]
pub(super) struct ClfClock {
    text: [u8; CLF_LEN],
    at_us: u64,
}

impl ClfClock {
    pub(super) fn new() -> Self {
        Self {
            text: [0; CLF_LEN],
            at_us: 0,
        }
    }

    /// Reads `19/Nov/2026:13:55:36 +0100`.
    pub(super) fn read(&mut self, text: &[u8]) -> Option<u64> {
        let text: [u8; CLF_LEN] = text.try_into().ok()?;
        if text != self.text {
            self.at_us = clf(&text)?;
            self.text = text;
        }
        Some(self.at_us)
    }
}

fn clf(text: &[u8; CLF_LEN]) -> Option<u64> {
    let [
        d1,
        d2,
        b'/',
        m1,
        m2,
        m3,
        b'/',
        y1,
        y2,
        y3,
        y4,
        b':',
        rest @ ..,
    ] = text
    else {
        return None;
    };
    let [
        h1,
        h2,
        b':',
        n1,
        n2,
        b':',
        s1,
        s2,
        b' ',
        sign @ (b'+' | b'-'),
        o1,
        o2,
        o3,
        o4,
    ] = rest
    else {
        return None;
    };
    let two = |tens: &u8, ones: &u8| Some(digit(*tens)? * 10 + digit(*ones)?);
    let month = MONTHS.iter().position(|name| **name == [*m1, *m2, *m3])?;
    let month = Month::try_from(u8::try_from(month).ok()? + 1).ok()?;
    let year = i32::from(two(y1, y2)?) * 100 + i32::from(two(y3, y4)?);
    let date = Date::from_calendar_date(year, month, two(d1, d2)?).ok()?;
    // A leap second is the last of its minute twice.
    let time = Time::from_hms(two(h1, h2)?, two(n1, n2)?, two(s1, s2)?.min(59)).ok()?;
    let minutes = i32::from(two(o1, o2)?) * 60 + i32::from(two(o3, o4)?);
    let east = if *sign == b'-' { -minutes } else { minutes };
    let offset = UtcOffset::from_whole_seconds(east * 60).ok()?;
    micros(PrimitiveDateTime::new(date, time).assume_offset(offset))
}

fn digit(byte: u8) -> Option<u8> {
    byte.is_ascii_digit().then(|| byte - b'0')
}

/// Reads `2026-11-19T13:55:36.123Z`, and a blank instead of the `T`, and whether it has no fraction.
pub(super) fn rfc3339(text: &[u8]) -> Option<(u64, bool)> {
    let text = str::from_utf8(text).ok()?;
    let at = OffsetDateTime::parse(text, &Rfc3339).ok().or_else(|| {
        let (date, time) = text.split_once(' ')?;
        OffsetDateTime::parse(&format!("{date}T{time}"), &Rfc3339).ok()
    })?;
    Some((micros(at)?, !text.contains('.')))
}

/// Reads seconds since the epoch, perhaps with a fraction.
pub(super) fn epoch(seconds: f64) -> Option<(u64, bool)> {
    // The year 2255, where microseconds stop being exact.
    let is_date = (0.0..9e9).contains(&seconds);
    let us = is_date
        .then(|| std::time::Duration::from_secs_f64(seconds))?
        .as_micros();
    Some((u64::try_from(us).ok()?, seconds.fract() == 0.0))
}

fn micros(at: OffsetDateTime) -> Option<u64> {
    u64::try_from(at.unix_timestamp_nanos() / 1000).ok()
}
