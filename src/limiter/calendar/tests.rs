//! Calendars against a naive one, over 50 years.

use super::*;

const SECOND_US: u64 = 1_000_000;
use crate::limiter::Limit;

const HOUR_S: i64 = 3_600;
const DAY_S: i64 = 86_400;

const UNITS: [CalendarUnit; 3] = [CalendarUnit::Day, CalendarUnit::Week, CalendarUnit::Month];

/// The years in which the naive calendar is compared: 1975 to 2025.
const FIRST_S: i64 = 157_766_400;
const LAST_S: i64 = 1_735_689_600;

/// Zones with midnights that the clocks skip or repeat, a skipped day, half-hour changes, negative
/// daylight saving time, and changes of the standard offset.
const ZONES: [&str; 14] = [
    "UTC",
    "Europe/Berlin",
    "Europe/Dublin",
    "America/New_York",
    "America/St_Johns",
    "America/Sao_Paulo",
    "America/Havana",
    "America/Caracas",
    "Asia/Kathmandu",
    "Asia/Gaza",
    "Australia/Lord_Howe",
    "Pacific/Apia",
    "Africa/Casablanca",
    "Antarctica/Troll",
];

/// A time zone as its offsets from UTC, each with the second from which it holds.
struct NaiveZone(Vec<(i64, i64)>);

impl NaiveZone {
    /// Asks for the offset of every hour, and for that of every second of an hour with a change.
    fn scan(name: &str) -> Self {
        let zone = TimeZoneDatabase::bundled().get(name).unwrap();
        let offset_at = |at_s: i64| {
            let offset = zone.to_offset(Timestamp::from_second(at_s).unwrap());
            i64::from(offset.seconds())
        };
        let mut offsets = vec![(FIRST_S, offset_at(FIRST_S))];
        let (mut at_s, mut offset) = offsets[0];
        while at_s < LAST_S {
            if offset_at(at_s + HOUR_S) != offset {
                for second in at_s..=at_s + HOUR_S {
                    if offset_at(second) != offset {
                        offset = offset_at(second);
                        offsets.push((second, offset));
                    }
                }
            }
            at_s += HOUR_S;
        }
        Self(offsets)
    }

    /// The first second whose local date is this day or a later one.
    fn start_of_day(&self, day: i64) -> Option<i64> {
        let next = self.0.iter().skip(1).map(|(at_s, _)| *at_s);
        let ends = next.chain([LAST_S]);
        self.0
            .iter()
            .zip(ends)
            .find_map(|((from_s, offset), end_s)| {
                let start_s = (*from_s).max(day * DAY_S - offset);
                (start_s < end_s).then_some(start_s)
            })
    }
}

/// Years, months and days by counting them from 1970.
fn first_days(unit: CalendarUnit) -> Vec<i64> {
    let mut days = Vec::new();
    let mut day = 0;
    for year in 1970..2030 {
        let is_leap = year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
        let february = if is_leap { 29 } else { 28 };
        for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
            for day_of_month in 0..length {
                let is_first = match unit {
                    CalendarUnit::Day => true,
                    // 1970 began on a Thursday.
                    CalendarUnit::Week => day % 7 == 4,
                    CalendarUnit::Month => day_of_month == 0,
                };
                if is_first {
                    days.push(day);
                }
                day += 1;
            }
        }
    }
    days
}

#[test]
fn periods_are_those_of_a_naive_calendar_over_50_years() {
    for name in ZONES {
        let zone = NaiveZone::scan(name);
        for unit in UNITS {
            let calendar = Calendar::new(unit, name).unwrap();
            let days = first_days(unit).into_iter();
            let mut starts_s: Vec<i64> = days
                .filter_map(|day| zone.start_of_day(day))
                .filter(|start_s| (FIRST_S + 1..LAST_S).contains(start_s))
                .collect();
            // A skipped day begins with the next one.
            starts_s.dedup();
            assert!(starts_s.is_sorted() && starts_s.len() > 590, "{calendar}");
            for pair in starts_s.windows(2) {
                let [start_us, end_us] =
                    [pair[0], pair[1]].map(|at_s| u64::try_from(at_s).unwrap() * SECOND_US);
                let period = TimeWindow { start_us, end_us };
                for at_us in [start_us, start_us.midpoint(end_us), end_us - 1] {
                    assert_eq!(calendar.period_at(at_us), period, "{calendar} at {at_us}");
                }
                let [_, current_us, next_us, _] = calendar.boundaries_around(end_us - 1);
                assert_eq!([current_us, next_us], [start_us, end_us]);
                let [previous_us, current_us, ..] = calendar.boundaries_around(end_us);
                assert_eq!([previous_us, current_us], [start_us, end_us]);
            }
        }
    }
}

#[test]
fn known_periods() {
    use CalendarUnit::{Day, Month, Week};
    for (unit, zone, at_s, start_s, hours) in [
        // The clocks go forward on 2024-03-31 and back on 2024-10-27.
        (Day, "Europe/Berlin", 1_711_900_000, 1_711_839_600, 23),
        (Day, "Europe/Berlin", 1_730_000_000, 1_729_980_000, 25),
        (
            Week,
            "Europe/Berlin",
            1_711_900_000,
            1_711_321_200,
            7 * 24 - 1,
        ),
        (
            Month,
            "Europe/Berlin",
            1_711_900_000,
            1_709_247_600,
            31 * 24 - 1,
        ),
        // February of a leap year, of another year, and of 2100.
        (Month, "UTC", 1_708_000_000, 1_706_745_600, 29 * 24),
        (Month, "UTC", 1_676_000_000, 1_675_209_600, 28 * 24),
        (Month, "UTC", 4_106_000_000, 4_105_123_200, 28 * 24),
        // 2011-12-30 was skipped, so that week had six days.
        (Day, "Pacific/Apia", 1_325_239_199, 1_325_152_800, 24),
        (Week, "Pacific/Apia", 1_325_239_199, 1_324_893_600, 6 * 24),
        // The clocks went from 23:59:59 on 2018-11-03 to 01:00.
        (Day, "America/Sao_Paulo", 1_541_300_400, 1_541_300_400, 23),
        // The clocks went back from 00:01 to 23:01 of the day before.
        (Day, "America/St_Johns", 1_289_101_000, 1_289_097_000, 25),
    ] {
        let calendar = Calendar::new(unit, zone).unwrap();
        let (start_us, end_us) = (start_s * SECOND_US, (start_s + hours * 3_600) * SECOND_US);
        let period = TimeWindow { start_us, end_us };
        assert_eq!(calendar.period_at(at_s * SECOND_US), period, "{calendar}");
    }
}

#[test]
fn every_time_is_in_one_period_that_contains_it() {
    for name in ZONES {
        for unit in UNITS {
            let calendar = Calendar::new(unit, name).unwrap();
            let mut random = fastrand::Rng::with_seed(7);
            let times = (0..200).map(|_| random.u64(..1 << 53));
            for at_us in times.chain([0, 1, 1 << 53, u64::MAX / 2]) {
                let period = calendar.period_at(at_us);
                assert!(period.contains(at_us), "{calendar} at {at_us}: {period:?}");
                let boundaries = calendar.boundaries_around(at_us);
                assert!(boundaries.is_sorted(), "{calendar} at {at_us}");
            }
        }
    }
}

#[test]
fn a_calendar_is_one_object_per_unit_and_zone() {
    let berlin = Calendar::new(CalendarUnit::Month, "Europe/Berlin").unwrap();
    assert_eq!(
        Some(berlin),
        Calendar::new(CalendarUnit::Month, "Europe/Berlin")
    );
    assert_ne!(
        Some(berlin),
        Calendar::new(CalendarUnit::Day, "Europe/Berlin")
    );
    assert_ne!(
        Some(berlin),
        Calendar::new(CalendarUnit::Month, "Europe/Paris")
    );
    assert_eq!(Some(berlin), Calendar::from_names("month", "Europe/Berlin"));
    assert_eq!(None, Calendar::from_names("year", "Europe/Berlin"));
    // A zone that no limit uses yet.
    let tokyo = Calendar::from_names("week", "Asia/Tokyo");
    assert_eq!(
        tokyo.map(|calendar| calendar.to_string()).as_deref(),
        Some("week Asia/Tokyo")
    );
    for unknown in [
        "",
        "europe/berlin",
        "Europe/Berlin ",
        "CEST",
        "Europe",
        "Etc/Unknown",
    ] {
        assert_eq!(None, Calendar::new(CalendarUnit::Day, unknown), "{unknown}");
    }
    let limit = Limit::per_calendar_period(5, berlin);
    assert_eq!(limit.counter_identity().1, 31 * DAY_US);
    // All names are usable.
    assert!(time_zone_names().count() > 400);
    for name in time_zone_names() {
        assert!(TimeZoneDatabase::bundled().get(&name).is_ok(), "{name}");
        assert!(
            !name.contains([':', '{', '}']),
            "{name} would end in a Redis key"
        );
    }
}
