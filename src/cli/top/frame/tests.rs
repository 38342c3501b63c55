use super::*;

fn sample_policy(name: &str, passed: u64, refused: u64) -> TopPolicyEntry {
    let mut minutes = vec![(0, 0); 60];
    minutes[57] = (passed + refused, refused);
    minutes[30] = (5, 0);
    TopPolicyEntry {
        name: name.to_owned(),
        hour_passed: passed,
        hour_refused: refused,
        minutes,
        ..TopPolicyEntry::default()
    }
}

fn sample_snapshot() -> AdminApiSnapshot {
    let ranked = |text: &str, count, error| TopRankedEntry {
        policy: "api".to_owned(),
        text: text.to_owned(),
        count,
        error,
    };
    AdminApiSnapshot {
        version: "1.2.3".to_owned(),
        instance: "abc".to_owned(),
        status: "ready".to_owned(),
        uptime_s: 3725,
        generation: 2,
        window_s: 60,
        requests: 1000,
        refused: 55,
        requests_per_s: 16.66,
        store: "redis r:6379 up".to_owned(),
        store_up: true,
        instances: Some(3),
        connections: (4, 1000),
        latency: vec![TopLatencyEntry {
            source: "redis".to_owned(),
            count: 9,
            p50_s: Some(0.0004),
            p99_s: Some(0.0125),
        }],
        policies: vec![
            sample_policy("login", 10, 0),
            sample_policy("api", 90, 60),
            sample_policy("a.very.long.name", 0, 0),
        ],
        keys: vec![ranked("ann", 40, 0), ranked("bob", 30, 12)],
        paths: vec![ranked("/api/orders", 70, 0)],
        ..AdminApiSnapshot::default()
    }
}

#[test]
fn renders_a_table_for_a_pipe() {
    let view = ViewState {
        address: "127.0.0.1:9090".to_owned(),
        ..ViewState::default()
    };
    let table = render_plain_text(&sample_snapshot(), &view, 120);
    let expected = "\
tidegate 1.2.3  ready  instance abc  up 1h2m  generation 2  at 127.0.0.1:9090
requests 17/s  refused 5.5%  (of 1000 in 1m0s)  connections 4/1000
store redis r:6379 up  instances 3
decisions in the last minute:  redis 9, 50% in 400us, 99% in 12.5ms

POLICY                     passed   refused   share last hour, refused
api                            90        60   40.0%           .        @
login                          10         0      0%           .        .
a.very.long.name                0         0       -           .

      refused KEYS REFUSED MOST BY A LIMIT
           40 api  ann
        18-30 api  bob

      refused PATHS REFUSED MOST BY A POLICY
           70 api  /api/orders
";
    assert_eq!(table, expected);
}

#[test]
fn fills_every_screen_size_exactly() {
    let mut snapshot = sample_snapshot();
    snapshot.alerts = vec![
        TopAlert {
            is_error: true,
            text: "the store is unavailable: policies decide by on_store_failure".to_owned()
        };
        3
    ];
    snapshot
        .policies
        .extend((0..40).map(|n| sample_policy(&format!("p{n}"), n, n)));
    for width in 0..140 {
        for height in 0..60 {
            let lines = render_screen(
                &snapshot,
                &ViewState {
                    scroll_offset: 7,
                    ..ViewState::default()
                },
                width,
                height,
            );
            assert_eq!(lines.len(), height, "{width}x{height}");
            assert!(
                lines.iter().all(|line| line.text.chars().count() <= width),
                "{width}x{height}: {lines:?}"
            );
            let is_small = width < MIN_SCREEN_SIZE.0 || height < MIN_SCREEN_SIZE.1;
            let shows_message = lines
                .first()
                .is_some_and(|line| line.text.starts_with("too small"));
            assert!(
                shows_message == is_small || width < 10 || height == 0,
                "{width}x{height}"
            );
            if !is_small {
                assert!(
                    lines.iter().any(|line| line.text.starts_with("POLICY")),
                    "{width}x{height}: {lines:?}"
                );
            }
        }
    }
}

#[test]
fn policies_are_sorted_and_scrolled() {
    let mut snapshot = sample_snapshot();
    snapshot
        .policies
        .extend((0..40).map(|n| sample_policy(&format!("p{n:02}"), 1000, 0)));
    let first = |order, scrolled| {
        let view = ViewState {
            sort_order: order,
            scroll_offset: scrolled,
            ..ViewState::default()
        };
        policy_lines(&snapshot, &view, 10, 80)[1]
            .text
            .split(' ')
            .next()
            .unwrap()
            .to_owned()
    };
    assert_eq!(first(PolicySortOrder::Refused, 0), "api");
    assert_eq!(first(PolicySortOrder::Requests, 0), "p00");
    assert_eq!(first(PolicySortOrder::Name, 0), "a.very.long.name");
    assert_eq!(first(PolicySortOrder::PolicyOrder, 0), "login");
    assert_eq!(first(PolicySortOrder::PolicyOrder, 2), "a.very.long.name");
    let lines = policy_lines(
        &snapshot,
        &ViewState {
            scroll_offset: 999,
            ..ViewState::default()
        },
        10,
        80,
    );
    assert!(
        lines.last().unwrap().text.starts_with("a.very"),
        "the last policy is visible: {lines:?}"
    );
}

/// Renders a screen of 80 columns and 24 lines, the size of a terminal by default.
fn default_screen(snapshot: &AdminApiSnapshot, view: &ViewState) -> String {
    let lines = render_screen(snapshot, view, 80, 24);
    let lines = lines.iter().map(|line| line.text.trim_end());
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn a_screen_of_80_columns_shows_names_keys_and_problems() {
    let mut snapshot = sample_snapshot();
    snapshot.host = "orders-7d4f9c-x2k".to_owned();
    snapshot.alerts = vec![TopAlert {
        is_error: false,
        text: "81 % of the requests of the last minute were refused (81 of 100): unless this is an attack, a limit is too low"
            .to_owned(),
    }];
    for policy in &mut snapshot.policies {
        policy.rates_per_s = Some((1.5, 0.5));
    }
    snapshot.without_store = [20, 30];
    snapshot.policies[2].name = "a-policy-with-a-long-name-of-40-letters!".to_owned();
    snapshot.keys[0].policy = "a-policy-with-a-long-name-of-40-letters!".to_owned();
    snapshot.keys[0].text = "tenant-of-many-letters/user-of-many-letters/203.0.113.7".to_owned();
    let expected = "\
tidegate 1.2.3  ready  instance abc  on orders-7d4f9c-x2k  up 1h2m  generation 2
! 81 % of the requests of the last minute were refused (81 of 100): unless this
  is an attack, a limit is too low
requests 17/s  refused 5.5%  (of 1000 in 1m0s)  connections 4/1000
store redis r:6379 up  instances 3  without it: admitted 2.0%, refused 3.0%
decisions in the last minute:  redis 9, 50% in 400us, 99% in 12.5ms

POLICY                             passed/s refused/s   passed   refused   share
";
    let screen = default_screen(&snapshot, &ViewState::default());
    for line in expected.lines() {
        assert!(
            screen.lines().any(|drawn| drawn == line),
            "{line}\n{screen}"
        );
    }
    assert!(screen.contains("a-policy-with-a-long-name~"), "{screen}");
    assert!(
        screen.contains(" a-policy~  tenant-of-many-letters/user-of-many-letters/203.0.113.7"),
        "{screen}"
    );
    assert!(screen.ends_with("q quit  ? help  p pause  s sort: refused  up/down scroll"));
}

#[test]
fn the_help_names_every_key_and_fits_80_columns() {
    let view = ViewState {
        shows_help: true,
        ..ViewState::default()
    };
    let screen = default_screen(&sample_snapshot(), &view);
    for line in HELP.lines() {
        assert!(
            line.len() <= 80 && screen.contains(line),
            "{line}\n{screen}"
        );
    }
}

#[test]
fn lines_are_styled_by_their_state() {
    let mut snapshot = sample_snapshot();
    snapshot.policies[1].minutes[59] = (5, 5);
    let style = |snapshot: &AdminApiSnapshot, start: &str| {
        let lines = render_screen(snapshot, &ViewState::default(), 80, 24);
        let line = lines.iter().find(|line| line.text.starts_with(start));
        line.unwrap().style
    };
    assert_eq!(style(&snapshot, "api "), LineStyle::Warning);
    assert_eq!(style(&snapshot, "login "), LineStyle::Plain);
    assert_eq!(style(&snapshot, "store "), LineStyle::Good);
    snapshot.store_up = false;
    assert_eq!(style(&snapshot, "store "), LineStyle::Alert);
}

#[test]
fn a_sparkline_distinguishes_no_requests_from_no_refusals() {
    let mut minutes = vec![(0, 0); 60];
    minutes[3] = (9, 0);
    minutes[59] = (9, 9);
    minutes[56] = (9, 1);
    assert_eq!(
        render_sparkline(&minutes, SparklineGlyphs::Ascii),
        " .                ::".replace("::", ":@")
    );
    assert_eq!(
        render_sparkline(&minutes, SparklineGlyphs::Blocks)
            .chars()
            .last(),
        Some('█')
    );
}
