//! Steps of the wall clock, for counters in memory: windows that begin at certain times of day follow it,
//! no step back loosens a limit, and no other algorithm notices a step.

use crate::support::clock_offset::ClockOffset;
use crate::support::prelude::*;
use tidegate::clock::{Clock, ManualClock};
use tidegate::limiter::{Calendar, CalendarUnit};
use tidegate::store::{MemorySettings, MemoryStore};

const HOUR_US: u64 = DAY_US / 24;
/// A midnight in UTC.
const MIDNIGHT_US: u64 = 1_700_006_400_000_000;

const SETTINGS: MemorySettings = MemorySettings {
    max_keys: 10_000,
    max_bytes: 64 << 20,
};

fn key(name: &str) -> Key {
    KeyBuilder::new(name).finish()
}

fn daily_limits() -> [Limit; 2] {
    let calendar = Calendar::new(CalendarUnit::Day, "UTC").unwrap();
    let fixed = make_limit(3, DAY_US, Algorithm::FixedWindow { offset_us: 0 });
    [Limit::per_calendar_period(3, calendar), fixed]
}

/// At noon.
fn start_store() -> (MemoryStore, ManualClock) {
    let (clock, hands) = Clock::manual(MIDNIGHT_US + 12 * HOUR_US);
    (MemoryStore::new(SETTINGS, clock), hands)
}

fn exhaust(store: &MemoryStore, limit: &Limit, key: &Key) -> Decision {
    for _ in 0..limit.requests {
        assert!(store.decide(&[PolicyCharges::new(limit, key, 1)]).admitted);
    }
    let refused = store.decide(&[PolicyCharges::new(limit, key, 1)]);
    assert!(!refused.admitted);
    refused
}

fn is_admitted(store: &MemoryStore, limit: &Limit, key: &Key) -> bool {
    store.decide(&[PolicyCharges::new(limit, key, 1)]).admitted
}

/// Other keys, so that expired counters are removed.
fn use_other_keys(store: &MemoryStore) {
    let limit = sliding_log(5, 1_000);
    for number in 0..100 {
        store.decide(&[PolicyCharges::new(
            &limit,
            &key(&format!("other{number}")),
            1,
        )]);
    }
}

fn wait_us(decision: &Decision) -> u64 {
    match decision.statuses().next().unwrap().refusal {
        Some(Refusal::Until(at_us)) => at_us - decision.now_us,
        other => panic!("{other:?}"),
    }
}

fn hours(count: i64) -> i64 {
    count * HOUR_US as i64
}

#[test]
fn a_new_day_begins_when_the_wall_clock_is_set_forward() {
    for limit in daily_limits() {
        for days in [1, 2, 30] {
            let (store, hands) = start_store();
            let key = key("daily");
            assert_eq!(wait_us(&exhaust(&store, &limit, &key)), 12 * HOUR_US);
            hands.step_wall_us(hours(24 * days + 2));
            let refused = exhaust(&store, &limit, &key);
            assert_eq!(wait_us(&refused), 10 * HOUR_US, "{limit:?}");
            let wall_us = MIDNIGHT_US + (24 * days as u64 + 14) * HOUR_US;
            assert_eq!(
                refused.now_us, wall_us,
                "reported times are of the wall clock"
            );
            hands.advance_us(10 * HOUR_US - 1);
            assert!(!is_admitted(&store, &limit, &key));
            hands.advance_us(1);
            assert!(is_admitted(&store, &limit, &key));
        }
    }
}

#[test]
fn a_step_back_prolongs_a_window_and_never_repeats_it() {
    for limit in daily_limits() {
        for back_h in [1, 11, 13, 24, 35] {
            let (store, hands) = start_store();
            let key = key("daily");
            exhaust(&store, &limit, &key);
            hands.step_wall_us(-hours(back_h));
            use_other_keys(&store);
            // Until the end of the day by the wall clock.
            hands.advance_us((12 + back_h as u64) * HOUR_US - 1);
            use_other_keys(&store);
            assert!(!is_admitted(&store, &limit, &key), "{limit:?}, {back_h} h");
            hands.advance_us(1);
            assert!(is_admitted(&store, &limit, &key), "{limit:?}, {back_h} h");
        }
    }
}

/// The key is not used on the wrong day.
#[test]
fn a_step_forward_and_back_gives_nothing() {
    for limit in daily_limits() {
        let (store, hands) = start_store();
        let key = key("daily");
        exhaust(&store, &limit, &key);
        hands.step_wall_us(hours(24));
        use_other_keys(&store);
        hands.step_wall_us(-hours(24));
        use_other_keys(&store);
        assert!(!is_admitted(&store, &limit, &key), "{limit:?}");
    }
}

/// The clock was wrong by a year: the key is not refused for a year.
#[test]
fn a_long_step_back_refuses_no_longer_than_the_window() {
    for limit in daily_limits() {
        let (store, hands) = start_store();
        let key = key("daily");
        exhaust(&store, &limit, &key);
        hands.step_wall_us(-hours(24 * 365));
        let refused = store.decide(&[PolicyCharges::new(&limit, &key, 1)]);
        assert_eq!(wait_us(&refused), 12 * HOUR_US, "{limit:?}");
        hands.advance_us(12 * HOUR_US - 1);
        use_other_keys(&store);
        assert!(!is_admitted(&store, &limit, &key), "{limit:?}");
        hands.advance_us(1);
        let refused = exhaust(&store, &limit, &key);
        assert_eq!(wait_us(&refused), 24 * HOUR_US, "the day of the wall clock");
    }
}

/// Otherwise the rest of a day by the old clock and the days of the new one would be three days in
/// less than the time of one.
#[test]
fn a_long_step_back_to_another_time_of_day_begins_the_next_day_at_midnight() {
    for limit in daily_limits() {
        for (back_h, refused_h) in [(24 * 3 + 13, 25), (24 * 365 + 5, 17), (24 * 365 - 5, 31)] {
            let (store, hands) = start_store();
            let key = key("daily");
            exhaust(&store, &limit, &key);
            hands.step_wall_us(-hours(back_h));
            let refused = store.decide(&[PolicyCharges::new(&limit, &key, 1)]);
            assert_eq!(wait_us(&refused), refused_h * HOUR_US, "{back_h} h");
            for by_us in [12 * HOUR_US, (refused_h - 12) * HOUR_US - 1] {
                hands.advance_us(by_us);
                use_other_keys(&store);
                assert!(!is_admitted(&store, &limit, &key), "{limit:?}, {back_h} h");
            }
            hands.advance_us(1);
            let refused = exhaust(&store, &limit, &key);
            assert_eq!(wait_us(&refused), 24 * HOUR_US, "the day of the wall clock");
        }
    }
}

/// Within steps of less than a window's length, no day begins twice.
#[test]
fn no_day_begins_twice_whatever_the_clock_does() {
    let seed = test_seed();
    let mut rng = Rng::with_seed(seed);
    for round in 0..200 {
        let limit = daily_limits()[round % 2];
        let (store, hands) = start_store();
        let key = key("daily");
        // The store has seen this day.
        exhaust(&store, &limit, &key);
        let mut units = limit.requests;
        let mut wall_us = MIDNIGHT_US + 12 * HOUR_US;
        let mut latest_us = wall_us;
        for _ in 0..100 {
            match rng.u8(..4) {
                0 => {
                    // At most a day behind the latest time.
                    let back_us = rng
                        .u64(..23 * HOUR_US)
                        .min(wall_us + 23 * HOUR_US - latest_us);
                    let step_us = match rng.bool() {
                        true => rng.u64(..23 * HOUR_US) as i64,
                        false => -(back_us as i64),
                    };
                    hands.step_wall_us(step_us);
                    wall_us = wall_us.saturating_add_signed(step_us);
                }
                1 => use_other_keys(&store),
                _ => {
                    let by_us = rng.u64(..6 * HOUR_US);
                    hands.advance_us(by_us);
                    wall_us += by_us;
                }
            }
            latest_us = latest_us.max(wall_us);
            for _ in 0..=limit.requests {
                units += u64::from(is_admitted(&store, &limit, &key));
            }
            let days = latest_us / DAY_US - MIDNIGHT_US / DAY_US + 1;
            let what = format!("seed {seed}, round {round}: {units} units in {days} days");
            assert!(units <= days * limit.requests, "{what}");
        }
    }
}

#[test]
fn other_algorithms_do_not_notice_a_step() {
    let seed = test_seed();
    let mut rng = Rng::with_seed(seed);
    for (name, draw) in EVERY_ALGORITHM {
        if name.contains("fixed") || name.contains("calendar") {
            continue;
        }
        for step_h in [-24 * 400, -1, 1, 24 * 400] {
            let limit = draw(&mut rng);
            let [(steady, steady_hands), (stepping, hands)] = [start_store(), start_store()];
            let key = key("any");
            for _ in 0..40 {
                let by_us = rng.u64(..=limit.per_us / 4);
                steady_hands.advance_us(by_us);
                hands.advance_us(by_us);
                if rng.u8(..8) == 0 {
                    hands.step_wall_us(hours(step_h));
                }
                let [expected, decided] = [&steady, &stepping].map(|store| {
                    let decision = store.decide(&[PolicyCharges::new(&limit, &key, 1)]);
                    let status = decision.statuses().next().unwrap();
                    (decision.admitted, status.convert_clock(decision.now_us, 0))
                });
                assert_eq!(decided, expected, "seed {seed}, {name}, {limit:?}");
            }
        }
    }
}

/// A proxy whose clock was a day behind when it started, as before the first answer of NTP.
#[tokio::test]
async fn a_proxy_begins_the_next_day_when_its_clock_is_corrected() {
    let app = Upstream::echo().await;
    for policy in ["", "scope = 'instance'"] {
        for per in ["per = '1d'", "per = 'day', tz = 'Asia/Tokyo'"] {
            let clock = ClockOffset::new();
            let config = format!(
                "listen = {{ threads = 1 }}\nresponse = {{ legacy_reset = 'epoch' }}\n\
                 [[policy]]\nname = 'daily'\n{policy}\n\
                 limit = {{ requests = 2, {per}, algorithm = 'fixed_window' }}\n"
            );
            let mut builder = Proxy::setup(&config).upstream(app.address);
            for (name, value) in clock.environment() {
                builder = builder.env(name, &value);
            }
            let proxy = builder.start().await;
            for expected in [200, 200, 429] {
                assert_eq!(proxy.get("/").await.status, expected);
            }
            clock.set_secs(86_400);
            let response = proxy.get("/").await;
            assert_eq!(response.status, 200, "{per}");
            let now_s = tidegate::clock::unix_time_s() + 86_400;
            let reset_s: u64 = response.header_number("x-ratelimit-reset");
            let range = now_s..=now_s + 86_400;
            assert!(range.contains(&reset_s), "{reset_s}, now {now_s}");
            assert_eq!(reset_s % 3_600, 0, "a midnight");
        }
    }
}
