//! Parses the time formats of access logs, in microseconds since the Unix epoch.

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use time::macros::format_description;

/// Length of a CLF time such as `19/Nov/2026:13:55:36 +0100`.
pub(super) const CLF_TIME_LEN: usize = 26;

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
    let format = format_description!(
        "[day]/[month repr:short]/[year]:[hour]:[minute]:[second] [offset_hour sign:mandatory][offset_minute]"
    );
    let mut text = *text;
    // A leap second counts as second 59.
    if let [.., tens @ b'6', ones @ b'0', b' ', _, _, _, _, _] = &mut text {
        (*tens, *ones) = (b'5', b'9');
    }
    to_unix_micros(OffsetDateTime::parse(str::from_utf8(&text).ok()?, &format).ok()?)
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
    let us = seconds_to_micros(seconds).filter(|_| is_date)?;
    Some((us, seconds.fract() == 0.0))
}

/// Converts a duration in seconds to microseconds. `None` if it is negative or too long.
pub(super) fn seconds_to_micros(seconds: f64) -> Option<u64> {
    let duration = std::time::Duration::try_from_secs_f64(seconds).ok()?;
    u64::try_from(duration.as_micros()).ok()
}

fn to_unix_micros(at: OffsetDateTime) -> Option<u64> {
    u64::try_from(at.unix_timestamp_nanos() / 1000).ok()
}
