//! Limits per day, week or month: `per` with a unit of the calendar, and `tz`.

use crate::config::suggestions::suggest_time_zone;
use crate::config::table_reader::{TableReader, report};
use crate::limiter::{Algorithm, Calendar, CalendarUnit, Limit};

/// The time zone without the key `tz`.
const DEFAULT_TIME_ZONE: &str = "UTC";

/// The unit of the calendar in `per`, unless it is a duration.
pub(super) fn read_calendar_unit(reader: &TableReader<'_>) -> Option<CalendarUnit> {
    let item = reader.get("per")?;
    item.value.as_str()?.parse().ok()
}

/// Builds the limit per period of a calendar.
pub(super) fn build_calendar_limit(
    reader: &TableReader<'_>,
    unit: CalendarUnit,
    algorithm: Algorithm,
    requests: Option<u64>,
) -> Option<Limit> {
    let is_fixed_window = matches!(algorithm, Algorithm::FixedWindow { .. });
    let counts_slots = algorithm.counts_slots();
    let name = unit.as_str();
    let duration = match unit {
        CalendarUnit::Day => "1d",
        CalendarUnit::Week => "7d",
        CalendarUnit::Month => "30d",
    };
    report! { reader;
        Error("per") if counts_slots => "{PERIOD_OF_SLOTS_ERROR}";
        Error("per") if !is_fixed_window && !counts_slots => "a {name} of the calendar is counted by algorithm = \"fixed_window\" only; expected that algorithm, or a duration such as \"{duration}\"";
        Error("offset") if is_fixed_window && reader.contains_key("offset") => "a {name} of the calendar starts at midnight of its time zone; expected tz instead, such as \"Europe/Berlin\"";
    }
    let calendar = if reader.contains_key("tz") {
        reader.get_parsed("tz", |name| parse_calendar(unit, name))
    } else {
        Calendar::new(unit, DEFAULT_TIME_ZONE)
    };
    let limit = Limit::per_calendar_period(requests?, calendar?);
    is_fixed_window.then_some(limit)
}

/// Error of `per` in a limit of requests in flight.
pub(super) const PERIOD_OF_SLOTS_ERROR: &str =
    "not for algorithm = \"concurrency\", which counts requests in flight; expected no such key";

fn parse_calendar(unit: CalendarUnit, zone_name: &str) -> Result<Calendar, String> {
    Calendar::new(unit, zone_name).ok_or_else(|| {
        let meant = suggest_time_zone(zone_name);
        format!("expected the IANA name of a time zone such as \"Europe/Berlin\" or \"UTC\"{meant}")
    })
}
