//! Parses the time formats of access logs, in microseconds since the Unix epoch.

use super::fields::parse_number;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use time::macros::format_description;

/// Length of a CLF time such as `19/Nov/2026:13:55:36 +0100`.
const CLF_TIME_LEN: usize = 26;

/// Parses the times of a log and caches the last CLF time, because consecutive lines often have the
/// same time.
#[derive(Debug, Default)]
pub(super) struct LogTimeParser {
    last_text: [u8; CLF_TIME_LEN],
    last_time_us: u64,
}

impl LogTimeParser {
    /// Parses a time: CLF, RFC 3339, or a number since the Unix epoch in `parts` of a second. Also
    /// returns whether the time has no fraction of a second.
    pub(super) fn parse(&mut self, text: &[u8], parts: u32) -> Option<(u64, bool)> {
        if let Some(time_us) = self.parse_clf(text) {
            return Some((time_us, true));
        }
        parse_rfc3339(text).or_else(|| {
            // Times after the year 2255 are rejected, because a double does not hold their
            // microseconds exactly.
            let seconds = parse_number::<f64>(text)? / f64::from(parts);
            let seconds = Some(seconds).filter(|seconds| (0.0..9e9).contains(seconds))?;
            let is_whole = parts == 1 && seconds.fract() == 0.0;
            Some((seconds_to_micros(seconds)?, is_whole))
        })
    }

    /// Returns whether a text starts with a CLF time in brackets, after the opening one.
    pub(super) fn starts_with_clf_time(&mut self, text: &[u8]) -> bool {
        let split = text.split_at_checked(CLF_TIME_LEN);
        split.is_some_and(|(time, after)| after.starts_with(b"]") && self.parse_clf(time).is_some())
    }

    fn parse_clf(&mut self, text: &[u8]) -> Option<u64> {
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

/// Converts a duration in seconds to microseconds. `None` if it is negative or too long.
pub(super) fn seconds_to_micros(seconds: f64) -> Option<u64> {
    let duration = std::time::Duration::try_from_secs_f64(seconds).ok()?;
    u64::try_from(duration.as_micros()).ok()
}

fn to_unix_micros(at: OffsetDateTime) -> Option<u64> {
    u64::try_from(at.unix_timestamp_nanos() / 1000).ok()
}
