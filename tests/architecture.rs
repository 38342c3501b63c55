//! Who may use whom, as a test: the rooms of `docs/ARCHITECTURE.md`, read from the sources.
//!
//! It reads text, not types: comments and what stands under `#[cfg(test)]` are left out, and every path
//! that starts at the crate's root counts, wherever it stands.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::string_slice,
    reason = "a test fails by panicking, and its helpers are tests too"
)]

use regex::{Captures, Regex};
use std::fs;
use std::path::Path;
use walkdir::WalkDir;

/// Lowest floor first: a room may use what stands before it.
const MODULE_LAYERS: [&str; 17] = [
    "clock",
    "listen",
    "telemetry",
    "tls",
    "limiter",
    "policy",
    "store",
    "enforcer",
    "proxy",
    "admin",
    "config",
    "replay",
    "reload",
    "app",
    "cli",
    "main",
];

/// Rooms below that must not be used all the same.
const FORBIDDEN_USES: [(&str, &str, &str); 5] = [
    (
        "proxy",
        "store",
        "the proxy asks the enforcer one question and gets one verdict; it never sees counters",
    ),
    (
        "admin",
        "proxy",
        "the admin port shows what the assembler hands it: a stuck data path must not take it along",
    ),
    (
        "limiter",
        "clock",
        "a limiter is a pure function of (state, limit, cost, now): let the caller pass the time in",
    ),
    (
        "limiter",
        "telemetry",
        "a limiter is a pure function: let the store count what came of it",
    ),
    (
        "policy",
        "clock",
        "a policy says what applies to a request, whatever the time",
    ),
];

/// What a library may be named in, and what to do instead.
struct LibraryRule {
    name: &'static str,
    allowed: fn(ModuleFile<'_>) -> bool,
    advice: &'static str,
}

#[derive(Clone, Copy)]
struct ModuleFile<'a> {
    module: &'a str,
    /// Under `src/`.
    file: &'a str,
}

const LIBRARIES: [LibraryRule; 8] = [
    LibraryRule {
        name: r"hyper|hyper_util|h2",
        // The demo brings a sample upstream of its own.
        allowed: |place| {
            ["proxy", "admin", "trace"].contains(&place.module)
                || place.file.starts_with("cli/demo")
        },
        advice: "only proxy, admin and trace speak hyper: use the `http` vocabulary, or move this code into `proxy`",
    },
    LibraryRule {
        name: "axum",
        allowed: |place| place.module == "admin",
        advice: "routes are the admin port's; on the data path there are none",
    },
    LibraryRule {
        name: "tokio|tokio_rustls",
        allowed: |place| !["clock", "limiter", "policy"].contains(&place.module),
        advice: "this room waits for nobody: do the waiting in `store` or `proxy` and pass the result in",
    },
    LibraryRule {
        name: "http",
        allowed: |place| !["clock", "limiter"].contains(&place.module),
        advice: "a limit knows no HTTP: turn the request into a key and a cost in `policy`",
    },
    LibraryRule {
        name: "toml|figment",
        allowed: |place| ["config", "reload", "app", "cli", "main"].contains(&place.module),
        advice: "the file format is known to `config` only: give this room a plain `Settings` that `config` builds",
    },
    LibraryRule {
        name: "serde|serde_derive",
        allowed: |place| {
            !["clock", "limiter", "policy", "store", "enforcer"].contains(&place.module)
        },
        advice: "domain types have no serde: mirror them in `config::schema` or where they are written out",
    },
    LibraryRule {
        name: "redis",
        allowed: |place| {
            !["clock", "limiter", "policy", "enforcer", "proxy"].contains(&place.module)
        },
        advice: "only the store talks to Redis: ask `store` for what is needed",
    },
    LibraryRule {
        name: "clap",
        allowed: |place| ["cli", "main"].contains(&place.module),
        advice: "the command line is read in `cli`, and handed on as plain values",
    },
];

#[test]
fn every_module_uses_only_the_layers_below_it() {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut complaints = Vec::new();
    let mut read = 0;
    for entry in WalkDir::new(&src) {
        let entry = entry.unwrap();
        let file = entry.path().strip_prefix(&src).unwrap().to_str().unwrap();
        if entry
            .path()
            .extension()
            .is_some_and(|extension| extension == "rs")
            && !is_test_file(file)
        {
            complaints.extend(find_violations(
                file,
                &fs::read_to_string(entry.path()).unwrap(),
            ));
            read += 1;
        }
    }
    assert!(
        read > 10,
        "only {read} files were found in {}",
        src.display()
    );
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

/// What is wrong with one file under `src/`, each with its line and what to do.
fn find_violations(file: &str, text: &str) -> Vec<String> {
    let Some(place) = module_of_file(file) else {
        return Vec::new();
    };
    let Some(floor) = MODULE_LAYERS.iter().position(|room| *room == place.module) else {
        return vec![format!(
            "src/{file}: `{}` is no room yet. Give it a floor in tests/architecture.rs and a line in \
             docs/ARCHITECTURE.md, or put the file into the room that it belongs to.",
            place.module
        )];
    };
    let code = production_code(text);
    let mut complaints = Vec::new();
    for (line, used) in used_modules(place, &code) {
        let is_above = MODULE_LAYERS
            .iter()
            .position(|room| *room == used)
            .is_none_or(|other| other > floor);
        let never = FORBIDDEN_USES
            .iter()
            .find(|(room, other, _)| *room == place.module && *other == used);
        if let Some((_, _, why)) = never {
            complaints.push(format!(
                "src/{file}:{line}: `{}` must not use `{used}`: {why}.",
                place.module
            ));
        } else if used != place.module && is_above {
            complaints.push(format!(
                "src/{file}:{line}: `{}` uses `{used}`, which stands above it. Pass what is needed down as an \
                 argument, or move it to a room that both may use.",
                place.module
            ));
        }
    }
    for library in LIBRARIES.iter().filter(|library| !(library.allowed)(place)) {
        let named = Regex::new(&format!(
            r"(?:^|[^\w:.])(?:{})::|\buse (?:{0})\b",
            library.name
        ))
        .unwrap();
        complaints.extend(
            numbered_lines(&code)
                .filter(|(_, line)| named.is_match(line))
                .map(|(number, line)| {
                    format!(
                        "src/{file}:{number}: `{}`: {}.",
                        line.trim(),
                        library.advice
                    )
                }),
        );
    }
    complaints
}

/// Where a file lives; `None` for the crate's root, which only lists the rooms.
fn module_of_file(file: &str) -> Option<ModuleFile<'_>> {
    let room = file.split('/').next()?;
    let room = room.strip_suffix(".rs").unwrap_or(room);
    (room != "lib").then_some(ModuleFile { module: room, file })
}

fn is_test_file(file: &str) -> bool {
    file.contains("/tests/") || file.ends_with("/tests.rs")
}

/// The text without comments, literals and the tests at its end, line numbers kept.
fn production_code(text: &str) -> String {
    let silent = r#"//[^\n]*|r\#"(?s:.*?)"\#|"(?s:\\.|[^"\\])*"|'(?:\\.|[^'\\])'"#;
    let code = Regex::new(silent)
        .unwrap()
        .replace_all(text, |found: &Captures<'_>| {
            "\n".repeat(found[0].matches('\n').count())
        });
    code.lines()
        .take_while(|line| line.trim_end() != "#[cfg(test)]")
        .map(|line| format!("{line}\n"))
        .collect()
}

/// The rooms that paths from the crate's root lead to, with the lines they stand on.
fn used_modules(place: ModuleFile<'_>, code: &str) -> Vec<(usize, String)> {
    // The binary sees the library by its name; a room's own root file sees the crate as `super`.
    let is_room_root = !place.file.contains('/')
        || place.file.ends_with("/mod.rs") && place.file.matches('/').count() == 1;
    let root = if is_room_root {
        r"\b(?:crate|tidegate|super)::"
    } else {
        r"\b(?:crate|tidegate)::"
    };
    let root = Regex::new(root).unwrap();
    let mut used = Vec::new();
    for found in root.find_iter(code) {
        let line = code[..found.start()].matches('\n').count() + 1;
        let rest = &code[found.end()..];
        match rest.strip_prefix('{') {
            Some(group) => used.extend(leading_names(group).map(|name| (line, name))),
            None => used.extend(leading_names(rest).next().map(|name| (line, name))),
        }
    }
    // What starts with a capital is an item of the root itself.
    used.retain(|(_, name)| name.starts_with(|first: char| first.is_ascii_lowercase()));
    used
}

/// The first names of a list of paths, up to the brace that ends the list.
fn leading_names(list: &str) -> impl Iterator<Item = String> + '_ {
    let mut depth = 0_i32;
    let end = list.find(|letter| {
        depth += i32::from(letter == '{') - i32::from(letter == '}');
        depth < 0
    });
    let mut depth = 0_i32;
    let entries = list[..end.unwrap_or(list.len())].split(move |letter| {
        depth += i32::from(letter == '{') - i32::from(letter == '}');
        depth == 0 && letter == ','
    });
    entries.map(|entry| {
        entry
            .trim()
            .chars()
            .take_while(|letter| letter.is_alphanumeric() || *letter == '_')
            .collect()
    })
}

fn numbered_lines(code: &str) -> impl Iterator<Item = (usize, &str)> {
    code.lines()
        .enumerate()
        .map(|(index, line)| (index + 1, line))
}

mod checker_tests {
    use super::find_violations;

    #[track_caller]
    fn assert_violation(file: &str, text: &str, wanted: &str) {
        let complaints = find_violations(file, text);
        assert!(
            complaints.len() == 1 && complaints[0].contains(wanted),
            "{wanted:?} expected, got {complaints:?}"
        );
    }

    #[track_caller]
    fn assert_accepted(file: &str, text: &str) {
        assert_eq!(find_violations(file, text), Vec::<String>::new());
    }

    #[test]
    fn rejects_uses_of_higher_layers() {
        assert_violation(
            "limiter/key.rs",
            "\nuse crate::policy::Facts;\n",
            "src/limiter/key.rs:2: `limiter` uses `policy`",
        );
        assert_violation(
            "store/memory.rs",
            "fn f() { crate::enforcer::go() }",
            "`store` uses `enforcer`",
        );
        assert_violation("store/mod.rs", "use super::proxy;", "`store` uses `proxy`");
        assert_violation(
            "policy/mod.rs",
            "use crate::{\n    limiter::{Key, Limit},\n    app::{a, b},\n};",
            "`policy` uses `app`",
        );
        assert_violation(
            "telemetry/mod.rs",
            "use crate::limiter::Key;",
            "`telemetry` uses `limiter`",
        );
        assert_violation("cli/check.rs", "use tidegate::main;", "`cli` uses `main`");
    }

    #[test]
    fn rejects_forbidden_uses() {
        assert_violation(
            "proxy/service.rs",
            "use crate::store::Store;",
            "`proxy` must not use `store`",
        );
        assert_violation(
            "limiter/mod.rs",
            "use crate::clock::Clock;",
            "pass the time in",
        );
    }

    #[test]
    fn rejects_libraries_in_the_wrong_module() {
        assert_violation(
            "enforcer.rs",
            "fn f(request: hyper::Request<()>) {}",
            "only proxy, admin and trace speak hyper",
        );
        assert_violation(
            "cli/explain.rs",
            "use hyper_util::rt::TokioIo;",
            "only proxy, admin and trace speak hyper",
        );
        assert_violation(
            "limiter/mod.rs",
            "use http::Method;",
            "a limit knows no HTTP",
        );
        assert_violation("policy/table.rs", "tokio::spawn(f());", "waits for nobody");
        assert_violation("policy/table.rs", "use toml::Value;", "the file format");
        assert_violation("limiter/mod.rs", "#[derive(serde::Serialize)]", "no serde");
        assert_violation("app.rs", "use clap::Parser;", "the command line");
    }

    #[test]
    fn rejects_unknown_modules() {
        assert_violation("util/mod.rs", "", "`util` is no room yet");
        assert_violation(
            "policy/mod.rs",
            "use crate::util::x;",
            "`policy` uses `util`",
        );
    }

    #[test]
    fn accepts_allowed_uses() {
        assert_accepted(
            "config/build.rs",
            "use crate::proxy::ListenSettings;\nuse crate::{limiter, policy::Policy};",
        );
        assert_accepted(
            "proxy/http.rs",
            "use hyper::body::Incoming;\nuse crate::enforcer::Enforcer;",
        );
        assert_accepted("cli/demo.rs", "use hyper::Response;");
        assert_accepted(
            "policy/mod.rs",
            "use http::Method;\nuse self::facts::Facts;\nlet x = a.http::<u8>();",
        );
        assert_accepted("main.rs", "fn main() { tidegate::cli::run() }");
        assert_accepted("lib.rs", "pub mod util;");
    }

    #[test]
    fn comments_literals_and_tests_do_not_count() {
        assert_accepted(
            "limiter/mod.rs",
            r#"let x = "a \" crate::store \
            tokio::x"; let y = '"'; let z = 1;"#,
        );
        assert_violation(
            "limiter/mod.rs",
            "let y = \"\n\"; crate::store::go()",
            "src/limiter/mod.rs:2",
        );
        assert_accepted(
            "limiter/mod.rs",
            "//! See [`crate::store`].\nlet x = 1; // tokio::time\n",
        );
        assert_accepted(
            "limiter/mod.rs",
            "fn f() {}\n#[cfg(test)]\nmod tests { use crate::clock::Clock; }",
        );
    }
}
