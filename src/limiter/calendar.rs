//! Calendar periods: days, weeks and months of a time zone, as used for billing.
//!
//! A period starts at the first moment of its first day in the zone. So a day has 23 or 25 hours
//! when the clocks change, and a day that a zone skips has no period. A week starts on Monday (ISO
//! 8601). Moments are Unix times, so leap seconds play no role. The time zone data is part of the
//! program: all instances of one version agree.

use arc_swap::ArcSwap;
use jiff::civil::Date;
use jiff::tz::{TimeZone, TimeZoneDatabase};
use jiff::{Span, Timestamp};
use parking_lot::Mutex;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;
use strum::{EnumString, IntoStaticStr};

const HOUR_US: u64 = 3_600_000_000;
const DAY_US: u64 = 24 * HOUR_US;

/// A script call needs the previous, the current and the next period.
const CACHED_PERIODS: usize = 4;

/// A window in time: from `start_us` until just before `end_us`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TimeWindow {
    pub start_us: u64,
    pub end_us: u64,
}

impl TimeWindow {
    pub fn contains(self, at_us: u64) -> bool {
        (self.start_us..self.end_us).contains(&at_us)
    }

    pub fn length_us(self) -> u64 {
        self.end_us.saturating_sub(self.start_us)
    }
}

/// A unit of the calendar.
#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString, IntoStaticStr)]
#[strum(serialize_all = "lowercase", const_into_str)]
pub enum CalendarUnit {
    Day,
    Week,
    Month,
}

/// A unit of the calendar in a time zone. Two are equal if unit and zone are.
#[derive(Clone, Copy)]
pub struct Calendar(&'static CalendarDefinition);

struct CalendarDefinition {
    unit: CalendarUnit,
    zone_name: Box<str>,
    zone: TimeZone,
    /// Periods that were computed last, the newest one first.
    cached_periods: ArcSwap<[TimeWindow; CACHED_PERIODS]>,
}

/// All calendars in use. They are never freed: there are at most three per time zone.
static CALENDARS: Mutex<Vec<&'static CalendarDefinition>> = Mutex::new(Vec::new());

impl CalendarUnit {
    pub fn as_str(self) -> &'static str {
        self.into_str()
    }

    /// The length of a period in which the clocks do not change; for months, of the longest one.
    pub fn nominal_us(self) -> u64 {
        match self {
            Self::Day => DAY_US,
            Self::Week => 7 * DAY_US,
            Self::Month => 31 * DAY_US,
        }
    }

    /// The shortest and the longest length, where clocks change by one hour.
    pub(super) fn length_range_us(self) -> (u64, u64) {
        let shortest_us = match self {
            Self::Month => 28 * DAY_US,
            unit => unit.nominal_us(),
        };
        (shortest_us - HOUR_US, self.nominal_us() + HOUR_US)
    }

    fn first_day(self, date: Date) -> Option<Date> {
        match self {
            Self::Day => Some(date),
            Self::Week => {
                let days_since_monday = date.weekday().to_monday_zero_offset();
                date.checked_sub(Span::new().days(days_since_monday)).ok()
            }
            Self::Month => Some(date.first_of_month()),
        }
    }

    /// The first day of the period that is `count` periods after the one with this first day.
    fn shift(self, first_day: Date, count: i32) -> Option<Date> {
        let span = Span::new();
        let span = match self {
            Self::Day => span.days(count),
            Self::Week => span.weeks(count),
            Self::Month => span.months(count),
        };
        first_day.checked_add(span).ok()
    }
}

impl Calendar {
    /// Returns `None` if the time zone is unknown. The name is compared exactly.
    pub fn new(unit: CalendarUnit, zone_name: &str) -> Option<Self> {
        let mut calendars = CALENDARS.lock();
        let is_same =
            |known: &&&CalendarDefinition| known.unit == unit && *known.zone_name == *zone_name;
        if let Some(known) = calendars.iter().find(is_same) {
            return Some(Self(known));
        }
        if !time_zone_names().any(|name| name == zone_name) {
            return None;
        }
        let definition = Box::leak(Box::new(CalendarDefinition {
            unit,
            zone_name: zone_name.into(),
            zone: TimeZoneDatabase::bundled().get(zone_name).ok()?,
            cached_periods: ArcSwap::default(),
        }));
        calendars.push(definition);
        Some(Self(definition))
    }

    /// The calendar of a unit and a time zone, both by name.
    pub fn from_names(unit: &str, zone_name: &str) -> Option<Self> {
        Self::new(unit.parse().ok()?, zone_name)
    }

    pub fn unit(self) -> CalendarUnit {
        self.0.unit
    }

    /// The IANA name of the time zone.
    pub fn zone_name(self) -> &'static str {
        &self.0.zone_name
    }

    /// The period that contains a time. A period that began before 1970 starts at 0.
    pub fn period_at(self, now_us: u64) -> TimeWindow {
        let cached = self.0.cached_periods.load();
        if let Some(period) = cached.iter().find(|period| period.contains(now_us)) {
            return *period;
        }
        let period = self.compute_period(now_us).unwrap_or_else(|| {
            // Only for times outside the years of the time zone database.
            let length_us = self.0.unit.nominal_us();
            let start_us = now_us - now_us % length_us;
            TimeWindow {
                start_us,
                end_us: start_us.saturating_add(length_us),
            }
        });
        let [first, second, third, _] = **cached;
        let newest = [period, first, second, third];
        self.0.cached_periods.store(Arc::new(newest));
        period
    }

    /// The starts of the previous, the current and the next period, and the end of the next one.
    pub fn boundaries_around(self, now_us: u64) -> [u64; 4] {
        let current = self.period_at(now_us);
        let previous = self.period_at(current.start_us.saturating_sub(1));
        let next = self.period_at(current.end_us);
        [
            previous.start_us.min(current.start_us),
            current.start_us,
            current.end_us,
            next.end_us,
        ]
    }

    fn compute_period(self, now_us: u64) -> Option<TimeWindow> {
        let unit = self.0.unit;
        let now = Timestamp::from_microsecond(i64::try_from(now_us).ok()?).ok()?;
        let mut first_day = unit.first_day(self.0.zone.to_datetime(now).date())?;
        // Clocks that go back over midnight return to the day before, whose period has ended.
        while self.start_of_day(first_day)? > now {
            first_day = unit.shift(first_day, -1)?;
        }
        let mut next_day = unit.shift(first_day, 1)?;
        while self.start_of_day(next_day)? <= now {
            (first_day, next_day) = (next_day, unit.shift(next_day, 1)?);
        }
        let to_us = |start: Timestamp| u64::try_from(start.as_microsecond()).unwrap_or(0);
        Some(TimeWindow {
            start_us: to_us(self.start_of_day(first_day)?),
            end_us: to_us(self.start_of_day(next_day)?),
        })
    }

    /// The first moment of a day. If the clocks skip it, the moment at which they do.
    fn start_of_day(self, date: Date) -> Option<Timestamp> {
        let zone = &self.0.zone;
        let start = date.to_zoned_datetime(zone.clone()).ok()?;
        let start = start.timestamp();
        if zone.to_datetime(start).time() == jiff::civil::Time::midnight() {
            return Some(start);
        }
        let just_after = start.checked_add(jiff::SignedDuration::from_secs(1)).ok()?;
        let transition = zone.preceding(just_after).next()?;
        Some(transition.timestamp())
    }
}

/// The names of all time zones.
pub fn time_zone_names() -> impl Iterator<Item = String> {
    let database = TimeZoneDatabase::bundled();
    let names: Vec<String> = database.available().map(|name| name.to_string()).collect();
    names.into_iter()
}

impl PartialEq for Calendar {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Eq for Calendar {}

impl Hash for Calendar {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.0.unit.as_str(), &self.0.zone_name).hash(state);
    }
}

/// `month Europe/Berlin`
impl fmt::Display for Calendar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.0.unit.as_str(), self.0.zone_name)
    }
}

impl fmt::Debug for Calendar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests;
