//! Limits per day, week or month: `per` with a unit of the calendar, and `tz`.

use crate::config::suggestions::suggest_time_zone;
use crate::config::table_reader::TableReader;
use crate::limiter::{Algorithm, Calendar, CalendarUnit, Limit};

/// The time zone without the key `tz`.
const DEFAULT_TIME_ZONE: &str = "UTC";

/// The unit of the calendar in `per`, unless it is a duration.
pub(super) fn read_calendar_unit(reader: &TableReader<'_>) -> Option<CalendarUnit> {
    let item = reader.get("per")?;
    let word = item.value.as_str()?;
    let mut units = CalendarUnit::ALL.into_iter();
    units.find(|unit| unit.as_str() == word)
}

/// Builds the limit per period of a calendar.
pub(super) fn build_calendar_limit(
    reader: &TableReader<'_>,
    unit: CalendarUnit,
    algorithm: Algorithm,
    requests: Option<u64>,
) -> Option<Limit> {
    let is_fixed_window = matches!(algorithm, Algorithm::FixedWindow { .. });
    match algorithm {
        Algorithm::FixedWindow { .. } => {}
        // Reported with `per` of any kind.
        Algorithm::Concurrency { .. } => {
            reader.report_error("per", "not for algorithm = \"concurrency\", which counts requests in flight; expected no such key");
        }
        _ => reader.report_error("per", &format!(
            "a {} of the calendar is counted by algorithm = \"fixed_window\" only; expected that algorithm, or a duration such as \"{}\"",
            unit.as_str(),
            match unit {
                CalendarUnit::Day => "1d",
                CalendarUnit::Week => "7d",
                CalendarUnit::Month => "30d",
            }
        )),
    }
    if is_fixed_window && reader.contains_key("offset") {
        reader.report_error("offset", &format!(
            "a {} of the calendar starts at midnight of its time zone; expected tz instead, such as \"Europe/Berlin\"",
            unit.as_str()
        ));
    }
    let calendar = match reader.contains_key("tz") {
        true => reader.get_parsed("tz", |name| parse_calendar(unit, name)),
        false => Calendar::new(unit, DEFAULT_TIME_ZONE),
    };
    let limit = Limit::per_calendar_period(requests?, calendar?);
    is_fixed_window.then_some(limit)
}

/// Reports `tz` beside a `per` that is a duration.
pub(super) fn reject_time_zone(reader: &TableReader<'_>) {
    if reader.contains_key("tz") {
        reader.report_error(
            "tz",
            "only beside per = \"day\", \"week\" or \"month\"; expected one of them, or no such key",
        );
    }
}

fn parse_calendar(unit: CalendarUnit, zone_name: &str) -> Result<Calendar, String> {
    Calendar::new(unit, zone_name).ok_or_else(|| {
        format!(
            "expected the IANA name of a time zone such as \"Europe/Berlin\" or \"UTC\"{}",
            suggest_time_zone(zone_name)
        )
    })
}
