use super::super::instance::InstanceData;
use super::*;
use serde_json::json;

fn sample_policy(name: &str, passed: u64, refused: u64) -> Value {
    let (mut allowed, mut rejected) = ([0; 60], [0; 60]);
    allowed[30] = passed.min(5);
    allowed[57] = passed.saturating_sub(5);
    rejected[57] = refused;
    json!({ "name": name, "last_hour": { "allowed": &allowed[..], "rejected": &rejected[..] } })
}

/// 1000 requests in 60 complete seconds, 55 of them refused, and an incomplete second.
fn sample_response() -> Value {
    let column = |first: u64, each: u64| {
        let mut column = vec![0; 60];
        column[0] = first;
        column[55..].fill(each);
        column.push(1000);
        column
    };
    json!({
        "overview": {
            "instance": { "id": "abc", "version": "1.2.3", "uptime_s": 3725 },
            "status": "ready",
            "generation": 2,
            "store": { "kind": "redis", "address": "r:6379", "up": true, "instances": 3 },
            "connections": { "open": 4, "max": 1000 },
            "requests": { "seconds": {
                "at": column(0, 0), "allowed": column(865, 16), "rejected": column(50, 1),
            } },
            "latency": { "decisions": { "redis": { "count": 9, "p50_s": 0.0004, "p99_s": 0.0125 } } },
        },
        "policies": { "policies": [
            sample_policy("login", 10, 0),
            sample_policy("api", 90, 60),
            sample_policy("a.very.long.name", 0, 0),
        ] },
        "top": {
            "keys": { "entries": [
                { "policy": "api", "key": "api/ann", "count": 40, "error": 0 },
                { "policy": "api", "key": "api/bob", "count": 30, "error": 12 },
            ] },
            "paths": { "entries": [{ "policy": "api", "path": "/api/orders", "count": 70 }] },
        },
    })
}

fn add_policies(response: &mut Value, policies: impl Iterator<Item = Value>) {
    let list = response["policies"]["policies"].as_array_mut().unwrap();
    list.extend(policies);
}

fn load(response: Value) -> InstanceData {
    let mut data = InstanceData::default();
    data.update(response);
    data
}

fn live_view() -> ViewState {
    ViewState {
        is_live: true,
        has_colours: true,
        ..ViewState::default()
    }
}

fn draw_buffer(data: &dyn TopData, view: &ViewState, width: u16, height: u16) -> Buffer {
    let mut buffer = Buffer::empty(Rect::new(0, 0, width, height));
    draw_screen(data, view, &mut buffer);
    buffer
}

/// The lines of a screen.
pub(crate) fn screen_lines(
    data: &dyn TopData,
    view: &ViewState,
    width: u16,
    height: u16,
) -> Vec<String> {
    buffer_lines(&draw_buffer(data, view, width, height)).collect()
}

#[test]
fn renders_a_table_for_a_pipe() {
    let view = ViewState {
        address: "127.0.0.1:9090".to_owned(),
        ..ViewState::default()
    };
    let table = render_plain_text(&load(sample_response()), &view);
    let expected = "\
tidegate 1.2.3  ready  instance abc  up 1h2m  generation 2  at 127.0.0.1:9090
requests 17/s  refused 5.5%  (of 1000 in 1m0s)  connections 4/1000
store redis r:6379 up  instances 3
decisions in the last minute:  redis 9, 50% in 400us, 99% in 12.5ms

POLICY                     passed   refused   share last hour, refused
api                            90        60   40.0%           .        @
login                          10         0      0%           .        .
a.very.long.name                0         0       -

      refused KEYS REFUSED MOST BY A LIMIT
           40 api  ann
        18-30 api  bob

      refused PATHS REFUSED MOST BY A POLICY
           70 api  /api/orders
";
    assert_eq!(table, expected);
}

#[test]
fn a_pipe_shows_all_policies_and_ten_entries_of_each_ranking() {
    let mut response = sample_response();
    add_policies(
        &mut response,
        (0..197).map(|n| sample_policy(&format!("p{n}"), n, n)),
    );
    response["policies"]["total"] = json!(1000);
    let entries = |name: &str| -> Vec<Value> {
        let entry = |n| json!({ "policy": "api", name: format!("api/{n}"), "count": n });
        (0..30).map(entry).collect()
    };
    response["top"]["keys"]["entries"] = json!(entries("key"));
    response["top"]["paths"]["entries"] = json!(entries("path"));
    response["overview"]["hints"] = json!(["a long hint ".repeat(20).trim_end()]);
    let table = render_plain_text(&load(response), &ViewState::default());
    let lines: Vec<&str> = table.lines().collect();
    assert_eq!(lines.len(), 6 + 1 + 200 + 1 + 2 * 12, "{table}");
    assert!(lines.contains(&"... 800 more"), "{table}");
    assert!(lines[1].len() > 200, "a pipe has whole hints: {table}");
    assert!(lines.last().unwrap().ends_with("api  api/9"), "{table}");
}

#[test]
fn every_screen_size_shows_the_policies_and_the_keys_of_the_terminal() {
    let mut response = sample_response();
    let hint = "the store is unavailable: policies decide by on_store_failure";
    response["overview"]["hints"] = json!([hint, hint, hint]);
    add_policies(
        &mut response,
        (0..40).map(|n| sample_policy(&format!("p{n}"), n, n)),
    );
    let data = load(response);
    let view = ViewState {
        scroll_offset: 7,
        ..live_view()
    };
    for width in (0..60).chain((60..140).step_by(9)) {
        for height in (0..24).chain((24..60).step_by(7)) {
            let lines = screen_lines(&data, &view, width, height);
            if width == 0 || height == 0 {
                continue;
            }
            assert_eq!(lines.len(), usize::from(height), "{width}x{height}");
            let is_small = width < MIN_SCREEN_SIZE.0 || height < MIN_SCREEN_SIZE.1;
            let shows_message = lines.first().unwrap().starts_with("too small");
            assert!(shows_message == is_small || width < 10, "{width}x{height}");
            if !is_small {
                let position = lines.iter().position(|line| line.starts_with("POLICY"));
                let header = position.unwrap_or_else(|| panic!("{width}x{height}: {lines:?}"));
                assert!(
                    lines[header + 1].starts_with('p'),
                    "{width}x{height}: {lines:?}"
                );
                assert!(
                    lines.last().unwrap().starts_with("q quit"),
                    "{width}x{height}"
                );
                // Only what stands above the table may be cut.
                let full = lines.iter().any(|line| line.starts_with("... "));
                assert!(full || height > 45, "{width}x{height}: {lines:?}");
            }
        }
    }
}

#[test]
fn policies_are_sorted_and_scrolled() {
    let mut response = sample_response();
    let more = (0..40).map(|n| sample_policy(&format!("p{n:02}"), 1000, 0));
    add_policies(&mut response, more);
    let data = load(response);
    let rows = |sort_order, scroll_offset| -> Vec<String> {
        let view = ViewState {
            sort_order,
            scroll_offset,
            ..live_view()
        };
        let lines = screen_lines(&data, &view, 80, 16);
        let from_header = lines.iter().skip_while(|line| !line.starts_with("POLICY"));
        from_header.skip(1).cloned().collect()
    };
    let first = |order, scrolled| {
        let rows = rows(order, scrolled);
        rows[0].split(' ').next().unwrap().to_owned()
    };
    assert_eq!(first(PolicySortOrder::Refused, 0), "api");
    assert_eq!(first(PolicySortOrder::Requests, 0), "p00");
    assert_eq!(first(PolicySortOrder::Name, 0), "a.very.long.name");
    assert_eq!(first(PolicySortOrder::PolicyOrder, 0), "login");
    assert_eq!(first(PolicySortOrder::PolicyOrder, 2), "a.very.long.name");
    let rows = rows(PolicySortOrder::Refused, 999);
    assert!(
        rows.iter().any(|row| row.starts_with("a.very")),
        "the last policy is visible: {rows:?}"
    );
}

/// Renders a screen of 80 columns and 24 lines, the size of a terminal by default.
fn default_screen(data: &InstanceData, view: &ViewState) -> String {
    let lines = screen_lines(data, view, 80, 24);
    let lines = lines.iter().map(|line| line.trim_end());
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn a_screen_of_80_columns_shows_names_keys_and_problems() {
    let long_name = "a-policy-with-a-long-name-of-40-letters!";
    let mut response = sample_response();
    let overview = &mut response["overview"];
    overview["instance"]["host"] = json!("orders-7d4f9c-x2k");
    overview["hints"] = json!([
        "81 % of the requests of the last minute were refused (81 of 100): unless this is an attack, a limit is too low"
    ]);
    overview["problems"] = json!([{ "level": "warning" }]);
    let seconds = &mut overview["requests"]["seconds"];
    seconds["allowed"][0] = json!(845);
    seconds["rejected"][0] = json!(20);
    (seconds["degraded"], seconds["degraded_refused"]) = (json!([50]), json!([30]));
    response["policies"]["policies"][2]["name"] = json!(long_name);
    response["top"]["keys"]["entries"][0]["policy"] = json!(long_name);
    let key = format!("{long_name}/tenant-of-many-letters/user-of-many-letters/203.0.113.7");
    response["top"]["keys"]["entries"][0]["key"] = json!(key);
    let mut earlier = response.clone();
    earlier["overview"]["instance"]["uptime_s"] = json!(3723);
    let mut data = load(earlier);
    data.update(response);
    let expected = "\
tidegate 1.2.3  ready  instance abc  on orders-7d4f9c-x2k  up 1h2m  generation 2
! 81 % of the requests of the last minute were refused (81 of 100): unless this
  is an attack, a limit is too low
requests 17/s  refused 5.5%  (of 1000 in 1m0s)  connections 4/1000
store redis r:6379 up  instances 3  without it: admitted 2.0%, refused 3.0%
decisions in the last minute:  redis 9, 50% in 400us, 99% in 12.5ms

POLICY                            passed/s refused/s    passed   refused   share
";
    let screen = default_screen(&data, &live_view());
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
fn a_line_that_is_too_long_ends_with_a_mark() {
    let view = ViewState {
        last_error: Some("long ".repeat(20)),
        ..live_view()
    };
    let lines = screen_lines(&load(sample_response()), &view, 60, 24);
    assert!(lines[0].contains("[NO ANSWER]"), "{lines:?}");
    assert!(
        lines[1].starts_with("! long") && lines[1].ends_with('~'),
        "{lines:?}"
    );
}

#[test]
fn the_help_names_every_key_and_fits_80_columns() {
    let view = ViewState {
        shows_help: true,
        ..live_view()
    };
    let screen = default_screen(&load(sample_response()), &view);
    for line in HELP.lines() {
        assert!(
            line.len() <= 80 && screen.contains(line),
            "{line}\n{screen}"
        );
    }
}

#[test]
fn lines_are_styled_by_their_state() {
    let mut response = sample_response();
    response["policies"]["policies"][1]["last_hour"]["rejected"][59] = json!(5);
    let colour = |response: &Value, view: &ViewState, start: &str| {
        let buffer = draw_buffer(&load(response.clone()), view, 80, 24);
        let row = buffer_lines(&buffer).position(|line| line.starts_with(start));
        buffer.cell((0, to_length(row.unwrap()))).unwrap().fg
    };
    let view = live_view();
    assert_eq!(colour(&response, &view, "api "), Color::LightYellow);
    assert_eq!(colour(&response, &view, "login "), Color::Reset);
    assert_eq!(colour(&response, &view, "store "), Color::LightGreen);
    response["overview"]["store"]["up"] = json!(false);
    assert_eq!(colour(&response, &view, "store "), Color::LightRed);
    let no_colour = ViewState {
        has_colours: false,
        ..view
    };
    let buffer = draw_buffer(&load(response), &no_colour, 80, 24);
    assert!(buffer.content.iter().all(|cell| cell.fg == Color::Reset));
}
