//! Parses the time formats of access logs, in microseconds since the Unix epoch.

use time::format_description::well_known::Rfc3339;
use time::{Date, Month, OffsetDateTime, PrimitiveDateTime, Time, UtcOffset};

/// Length of a CLF time such as `19/Nov/2026:13:55:36 +0100`.
pub(super) const CLF_TIME_LEN: usize = 26;

const MONTHS: [&[u8]; 12] = [
    b"Jan", b"Feb", b"Mar", b"Apr", b"May", b"Jun", b"Jul", b"Aug", b"Sep", b"Oct", b"Nov", b"Dec",
];

/// Parses CLF times and caches the last one, because consecutive lines often have the same time.
#[derive(Debug)]
pub(super) struct ClfTimeParser {
    last_text: [u8; CLF_TIME_LEN],
    last_time_us: u64,
}

impl ClfTimeParser {
    pub(super) fn new() -> Self {
        Self {
            last_text: [0; CLF_TIME_LEN],
            last_time_us: 0,
        }
    }

    /// Parses a CLF time such as `19/Nov/2026:13:55:36 +0100`.
    pub(super) fn parse(&mut self, text: &[u8]) -> Option<u64> {
        let text: [u8; CLF_TIME_LEN] = text.try_into().ok()?;
        if text != self.last_text {
            self.last_time_us = parse_clf_time(&text)?;
            self.last_text = text;
        }
        Some(self.last_time_us)
    }
}

fn parse_clf_time(text: &[u8; CLF_TIME_LEN]) -> Option<u64> {
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
    let two_digits = |tens: &u8, ones: &u8| Some(parse_digit(*tens)? * 10 + parse_digit(*ones)?);
    let month = MONTHS.iter().position(|name| **name == [*m1, *m2, *m3])?;
    let month = Month::try_from(u8::try_from(month).ok()? + 1).ok()?;
    let year = i32::from(two_digits(y1, y2)?) * 100 + i32::from(two_digits(y3, y4)?);
    let date = Date::from_calendar_date(year, month, two_digits(d1, d2)?).ok()?;
    // A leap second counts as second 59.
    let time = Time::from_hms(
        two_digits(h1, h2)?,
        two_digits(n1, n2)?,
        two_digits(s1, s2)?.min(59),
    )
    .ok()?;
    let minutes = i32::from(two_digits(o1, o2)?) * 60 + i32::from(two_digits(o3, o4)?);
    let east = if *sign == b'-' { -minutes } else { minutes };
    let offset = UtcOffset::from_whole_seconds(east * 60).ok()?;
    to_unix_micros(PrimitiveDateTime::new(date, time).assume_offset(offset))
}

fn parse_digit(byte: u8) -> Option<u8> {
    byte.is_ascii_digit().then(|| byte - b'0')
}

/// Parses a time such as `2026-11-19T13:55:36.123Z`, with `T` or a space. Also returns whether the
/// time has no fraction.
pub(crate) fn parse_rfc3339(text: &[u8]) -> Option<(u64, bool)> {
    let text = str::from_utf8(text).ok()?;
    let at = OffsetDateTime::parse(text, &Rfc3339).ok().or_else(|| {
        let (date, time) = text.split_once(' ')?;
        OffsetDateTime::parse(&format!("{date}T{time}"), &Rfc3339).ok()
    })?;
    Some((to_unix_micros(at)?, !text.contains('.')))
}

/// Converts seconds since the Unix epoch, with an optional fraction, to microseconds. Also returns
/// whether the time has no fraction.
pub(super) fn epoch_seconds_to_micros(seconds: f64) -> Option<(u64, bool)> {
    // Times after the year 2255 are rejected, because a double does not hold their microseconds
    // exactly.
    let is_date = (0.0..9e9).contains(&seconds);
    let us = is_date
        .then(|| std::time::Duration::from_secs_f64(seconds))?
        .as_micros();
    Some((u64::try_from(us).ok()?, seconds.fract() == 0.0))
}

fn to_unix_micros(at: OffsetDateTime) -> Option<u64> {
    u64::try_from(at.unix_timestamp_nanos() / 1000).ok()
}
