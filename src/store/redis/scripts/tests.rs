use super::plain_program::program_index;
use super::*;
use crate::limiter::{Calendar, CalendarUnit, CounterRef, Key, KeyBuilder, LimitStatus};
use redis::Value;

const LOG_LIMIT: Limit = Limit {
    requests: 5,
    per_us: 1_000_000,
    algorithm: Algorithm::SlidingLog,
};

fn key(policy: &str, value: &str) -> Key {
    let mut builder = KeyBuilder::new(policy);
    builder.push_key_value(Some(value.as_bytes()));
    builder.finish()
}

fn counter_key(script: &ScriptLibrary, limit: &Limit, key: &Key) -> String {
    script.counter_key(CounterRef { limit, key })
}

fn one_unit_charge<'a>(limit: &'a Limit, key: &'a Key) -> PolicyCharges<'a> {
    PolicyCharges::new(limit, key, 1)
}

#[test]
fn trap_5_decisions_use_the_clock_of_redis() {
    let (script, key) = (ScriptLibrary::new("p"), key("p", "x"));
    let args: Vec<Vec<u8>> = script
        .decide_command(&[one_unit_charge(&LOG_LIMIT, &key)], None)
        .args_iter()
        .map(|arg| match arg {
            redis::Arg::Simple(arg) => arg.to_vec(),
            other => panic!("{other:?}"),
        })
        .collect();
    let [_evalsha, _sha, keys, _key, time, rest @ ..] = args.as_slice() else {
        panic!("{args:?}")
    };
    assert_eq!(
        (keys.as_slice(), time.as_slice()),
        (&b"1"[..], &b""[..]),
        "no time is sent, so Redis reads its own clock"
    );
    let rest: Vec<&str> = rest
        .iter()
        .map(|arg| std::str::from_utf8(arg).unwrap())
        .collect();
    assert_eq!(rest, ["1", "5", "1000000"], "no argument is a time");
    assert!(script.script_text(&[]).contains("call('TIME')"));
}

#[test]
fn the_first_script_fits_the_limits_of_an_unauthenticated_connection() {
    let first = LuaProgram::new(program_flags_for_request(&[])).text;
    assert!(first.len() < 16 * 1024, "{}", first.len());
    for bits in [SETTLE_FLAG - 1, PROGRAM_COUNT - 1] {
        assert!(
            !LuaProgram::new(bits).text.contains("--"),
            "the program contains a comment"
        );
    }
}

#[test]
fn keys_contain_prefix_hash_algorithm_and_period() {
    let daily = Limit {
        algorithm: Algorithm::FixedWindow { offset_us: 7 },
        ..LOG_LIMIT
    };
    let (short, long) = (key("api", "ann"), key("api", &"x".repeat(62)));
    let script = ScriptLibrary::new("shop{a}");
    let hash = format!("{:032x}", short.id());
    assert_eq!(
        counter_key(&script, &LOG_LIMIT, &short),
        format!("shop%7Ba%7D:v1:{{{hash}}}:sliding_log:1000000:api/ann")
    );
    assert_eq!(
        counter_key(&script, &daily, &short),
        format!("shop%7Ba%7D:v1:{{{hash}}}:fixed_window:1000000@7:api/ann")
    );
    let counted = short.to_response_counter_key();
    assert_eq!(
        counter_key(&script, &LOG_LIMIT, &counted),
        format!("shop%7Ba%7D:v1:{{{hash}}}:counted:sliding_log:1000000:api/ann")
    );
    assert_eq!(script.override_key(&counted), script.override_key(&short));
    let hash = format!("{:032x}", long.id());
    assert_eq!(
        counter_key(&script, &LOG_LIMIT, &long),
        format!("shop%7Ba%7D:v1:{{{hash}}}:sliding_log:1000000")
    );
}

#[test]
fn keys_and_arguments_of_a_calendar_name_its_periods() {
    let zone = "America/Argentina/Buenos_Aires";
    let calendar = Calendar::new(CalendarUnit::Month, zone).unwrap();
    let limit = Limit::per_calendar_period(9, calendar);
    // 2026-03-01T02:59:59Z is still in February there.
    let (clock, _) = Clock::manual(1_772_333_999_000_000);
    let (script, key) = (ScriptLibrary::with_clock("p", clock), key("api", "a:b"));
    let request = [one_unit_charge(&limit, &key)];
    let name = counter_key(&script, &limit, &key);
    assert!(
        name.ends_with(&format!("}}:fixed_window:month+{zone}:{key}")),
        "{name}"
    );
    let (parsed, readable) = script.parse_counter_key(&name).unwrap();
    assert_eq!(parsed.counter_identity(), limit.counter_identity());
    assert_eq!(readable, Some(key.to_readable_string()));
    for foreign in ["month+Mars/Base", "month+", "month", "year+UTC"] {
        let name = format!("p:v1:{{{:032x}}}:fixed_window:{foreign}:x", key.id());
        assert_eq!(script.parse_counter_key(&name), None, "{foreign}");
    }
    let mut argument = String::new();
    let charge = request[0].charges().next().unwrap();
    push_charge_argument(&mut argument, &charge, (0, false), 9, || {
        script.read_wall_clock()
    });
    let (january, february, march, april) = (
        1_767_236_400_000_000_u64,
        1_769_914_800_000_000_u64,
        1_772_334_000_000_000_u64,
        1_775_012_400_000_000_u64,
    );
    let boundaries = format!("{january}+{february}+{march}+{april}");
    assert_eq!(argument, format!("p 0 1 9 2678400000000 {boundaries}"));
    // Other programs do not contain the part for calendars.
    let other = letter_and_flags(Algorithm::FixedWindow { offset_us: 0 }).1;
    assert!(!LuaProgram::new(other).text.contains("calendar"));
    let own = LuaProgram::new(program_flags_for_request(&request)).text;
    assert!(own.contains("calendar_read") && own.len() < 16 * 1024);
}

#[test]
fn the_decide_command_has_the_arguments_that_decide_lua_reads() {
    let key = key("api", "ann");
    let shadow = PolicyCharges {
        shadow: true,
        ..one_unit_charge(&LOG_LIMIT, &key).with_cost(2)
    };
    let script = ScriptLibrary::new("t");
    let command = script.decide_command(&[one_unit_charge(&LOG_LIMIT, &key), shadow], None);
    let args: Vec<_> = command
        .args_iter()
        .map(|arg| match arg {
            redis::Arg::Simple(bytes) => String::from_utf8_lossy(bytes).into_owned(),
            _ => panic!("no cursors here"),
        })
        .collect();
    let name = counter_key(&script, &LOG_LIMIT, &key);
    let sha = &script
        .program_for_flags(letter_and_flags(Algorithm::SlidingLog).1)
        .unwrap()
        .sha;
    let head = ["EVALSHA", sha, "2", &name, &name, ""];
    let rest = ["l 0 1 5 1000000 0", "l 41 2 5 1000000 0"];
    assert_eq!(args, [head.as_slice(), &rest].concat());
}

/// The words of a command after EVALSHA and the digest.
fn command_words(command: &Cmd) -> Vec<String> {
    let words = command.args_iter().skip(2).map(|arg| match arg {
        redis::Arg::Simple(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        other => panic!("{other:?}"),
    });
    words.collect()
}

#[test]
fn only_ordinary_requests_have_plain_arguments() {
    let (script, key, other) = (ScriptLibrary::new("t"), key("a", "x"), key("b", "x"));
    let window = Limit {
        algorithm: Algorithm::FixedWindow { offset_us: 0 },
        ..LOG_LIMIT
    };
    let queue = Limit {
        algorithm: Algorithm::LeakyBucket {
            max_delay_us: 400_001,
        },
        ..LOG_LIMIT
    };
    let words_at = |request: &[PolicyCharges<'_>], time_us| {
        let words = command_words(&script.decide_command(request, time_us));
        let keys: usize = words[0].parse().unwrap();
        words[keys + 1..].join(" ")
    };
    let words = |request: &[PolicyCharges<'_>]| words_at(request, None);
    let charge = |limit, key| one_unit_charge(limit, key);
    let window_charge = charge(&window, &key);
    assert_eq!(words(std::slice::from_ref(&window_charge)), "5 1000000");
    assert_eq!(words(&[window_charge.with_cost(3)]), "5 1000000 0 3");
    let at = words_at(std::slice::from_ref(&window_charge), Some(7));
    assert_eq!(at, "5 1000000 0 1 7");
    // The first argument is the time.
    assert_eq!(
        words(&[window_charge.with_cost(3), charge(&LOG_LIMIT, &other)]),
        " 3 5 1000000 0 1 5 1000000"
    );
    assert_eq!(words(&[charge(&queue, &key)]), " 1 3 1000000 5 5");
    let shadow = PolicyCharges {
        shadow: true,
        ..charge(&LOG_LIMIT, &other)
    };
    assert_eq!(
        words(&[charge(&LOG_LIMIT, &key), shadow]),
        " l 0 1 5 1000000 0 l 41 1 5 1000000 0"
    );
    for general in [
        charge(&LOG_LIMIT, &key).with_cost(2),
        charge(&window, &key).with_cost(6),
        charge(&window, &key).with_cost(0),
        charge(&window, &key).with_estimate(),
    ] {
        let words = words(std::slice::from_ref(&general));
        assert!(words.trim_start().starts_with(['l', 'w']), "{words}");
    }
    let five: Vec<_> = (0..5).map(|_| charge(&window, &key)).collect();
    assert!(words(&five).starts_with(" w 0 1 5"));
}

#[test]
fn plain_programs_are_complete() {
    let rules = [
        PlainRule::Log,
        PlainRule::SubWindows,
        PlainRule::Window,
        PlainRule::Bucket,
        PlainRule::Queue,
    ];
    for first in rules {
        for second in rules {
            let text = LuaProgram::plain(&[first, second]).text;
            let plain = text.split_once("until true").unwrap().0;
            for placeholder in [
                "_N",
                "KEY,",
                "COST",
                "CAPACITY",
                "PER,",
                "PARAMETER",
                "SLACK",
            ] {
                assert!(!plain.contains(placeholder), "{placeholder}: {plain}");
            }
            assert!(plain.contains("growth_2") && !text.contains("--"));
        }
    }
    let indexes = rules
        .iter()
        .flat_map(|first| rules.map(|second| [*first, second]));
    let mut indexes: Vec<_> = indexes.map(|rules| program_index(&rules)).collect();
    indexes.sort_unstable();
    indexes.dedup();
    assert_eq!(indexes.len(), 25);
    assert!(program_index(&[PlainRule::Queue; 4]) < PLAIN_PROGRAM_COUNT);
}

#[test]
fn accepts_a_delay_up_to_the_maximum_of_the_limit() {
    let limit = Limit {
        algorithm: Algorithm::LeakyBucket {
            max_delay_us: 400_000,
        },
        ..LOG_LIMIT
    };
    let key = key("api", "ann");
    let (leaky_bucket, log) = (
        &one_unit_charge(&limit, &key),
        &one_unit_charge(&LOG_LIMIT, &key),
    );
    let read = |reply: &str, charges: &[&PolicyCharges<'_>]| {
        let charges: Vec<_> = charges.iter().map(|charge| (*charge).clone()).collect();
        ScriptLibrary::parse_decision_reply(&Value::BulkString(reply.into()), &charges)
            .map(|decision| decision.delay_us)
    };
    assert_eq!(read("1000 0 2 2000", &[leaky_bucket]), Some(0));
    assert_eq!(read("1000 0 2 2000 400000", &[leaky_bucket]), Some(400_000));
    assert_eq!(
        read("1000 0 2 2000 0 4 2000 1", &[leaky_bucket, log]),
        Some(1)
    );
    for invalid in [
        "1000 0 2 2000 400001",
        "1000 0 2 2000 0",
        "1000 0 2 2000 -1",
        "1000 0 2 2000 5 5",
        "1000 1500 0 1500 5",
    ] {
        assert_eq!(read(invalid, &[leaky_bucket]), None, "{invalid}");
    }
    let shadow = &PolicyCharges {
        shadow: true,
        ..leaky_bucket.clone()
    };
    assert_eq!(
        read("1000 0 2 2000 5", &[shadow]),
        None,
        "a shadow policy delays no request"
    );
}

#[test]
fn a_script_reply_of_impossible_form_is_rejected() {
    let key = key("api", "ann");
    let charges = [one_unit_charge(&LOG_LIMIT, &key)];
    let read = |reply: &str| {
        ScriptLibrary::parse_decision_reply(&Value::BulkString(reply.into()), &charges)
    };
    let decision = read("1000 0 4 2000").unwrap();
    assert!(decision.admitted);
    assert_eq!(
        decision.outcomes().next().unwrap().status,
        Some(LimitStatus {
            remaining: 4,
            next_growth_us: Some(2000),
            refusal: None,
            in_effect: None
        })
    );
    assert!(!read("1000 1500 0 1500").unwrap().admitted);
    for invalid in [
        "",
        "1000",
        "1000 0 4",
        "1000 0 4 ",
        "1000 0 4 2000 0",
        "1000  0 4 2000",
        "1000.0 0 4 2000",
        "1000 nan 4 2000",
        "1e3 0 4 2000",
        "0 0 4 2000",
        "-1 0 4 2000",
        "9223372036854775807 0 4 0",
        "9223372036854775808 0 4 0",
        "1000 1000 0 2000",
        "1000 -2 0 2000",
        "1000 -1 4 2000",
        "1000 0 6 2000",
        "1000 0 -1 2000",
        "1000 0 4 999",
        "1000 0 4 2000 70",
        "1000 0 4 2000\n0 3 2000",
        "1000 !OOM no",
    ] {
        assert_eq!(read(invalid), None, "{invalid}");
    }
    for invalid in [
        Value::Nil,
        Value::Okay,
        Value::Int(5),
        Value::Array(Vec::new()),
    ] {
        assert_eq!(
            ScriptLibrary::parse_decision_reply(&invalid, &charges),
            None,
            "{invalid:?}"
        );
    }
}
