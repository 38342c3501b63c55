//! The layers of `docs/ARCHITECTURE.md`, checked against the sources.
//!
//! The checks read text, not types. Comments, literals and items under `#[cfg(test)]` are left out.
//! Every path counts: `use` declarations with their nested groups, and paths inside expressions.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::string_slice,
    reason = "a test fails by panicking, and its helpers are tests too"
)]

use regex::{Captures, Regex};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use walkdir::WalkDir;

/// Lowest layer first: a module may use the modules before it.
const MODULE_LAYERS: [&str; 19] = [
    "text",
    "clock",
    "listen",
    "tls",
    "http_client",
    "telemetry",
    "limiter",
    "policy",
    "jwks",
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

/// The same inside `proxy`, for the modules and files directly below it.
const PROXY_LAYERS: [&str; 13] = [
    "settings",
    "upstream_error",
    "client_counts",
    "connection_io",
    "http",
    "http2_frames",
    "client_connection",
    "body",
    "upstream",
    "server",
    "service",
    "rate_limit_service",
    "ext_authz",
];

/// Uses of lower layers that are forbidden nevertheless: user, used, reason.
const FORBIDDEN_USES: [(&str, &str, &str); 5] = [
    (
        "proxy",
        "store",
        "the proxy asks the enforcer for one verdict and never sees counters",
    ),
    (
        "admin",
        "proxy",
        "the admin endpoint shows what `app` passes in, so that a stuck data path cannot block it",
    ),
    (
        "limiter",
        "clock",
        "a limiter is a pure function of state, limit, cost and time: let the caller pass the time in",
    ),
    (
        "limiter",
        "telemetry",
        "a limiter is a pure function: let the store count its results",
    ),
    (
        "policy",
        "clock",
        "policies do not depend on the time: decide that in the enforcer",
    ),
];

/// Lines of production code in `src/`, as [`read_sources`] finds them, when this number was set. Blank
/// lines do not count.
const REACHED_LINES: usize = 61_313;

/// Restricts an external library to some modules.
struct LibraryRule {
    /// Crate names, separated by `|`.
    name: &'static str,
    is_allowed: fn(ModuleFile<'_>) -> bool,
    advice: &'static str,
}

#[derive(Clone, Copy)]
struct ModuleFile<'a> {
    /// Top-level module.
    module: &'a str,
    /// Path below `src/`.
    file: &'a str,
}

const LIBRARY_RULES: [LibraryRule; 8] = [
    LibraryRule {
        name: r"hyper|hyper_util|h2",
        is_allowed: |at| {
            ["proxy", "admin", "http_client"].contains(&at.module)
                || at.file.starts_with("telemetry/otlp/")
        },
        advice: "only proxy, admin, http_client and telemetry::otlp use hyper: use the `http` types, or move this code into `proxy`",
    },
    LibraryRule {
        name: "axum",
        // `demo` contains a sample upstream server.
        is_allowed: |at| at.module == "admin" || at.file.starts_with("cli/demo"),
        advice: "only the admin endpoint has routes; the data path has none",
    },
    LibraryRule {
        name: "tokio|tokio_rustls",
        // `clock` reads the runtime's time.
        is_allowed: |at| !["limiter", "policy"].contains(&at.module),
        advice: "this module never waits: wait in `store` or `proxy` and pass the result in",
    },
    LibraryRule {
        name: "http",
        is_allowed: |at| !["clock", "limiter"].contains(&at.module),
        advice: "a limit does not know HTTP: turn the request into a key and a cost in `policy`",
    },
    LibraryRule {
        name: "toml|figment",
        is_allowed: |at| ["config", "reload", "app", "cli", "main"].contains(&at.module),
        advice: "only `config` knows the file format: give this module a plain `Settings` that `config` builds",
    },
    LibraryRule {
        name: "serde|serde_derive",
        // Properties are compiled for tests and fuzzing only.
        is_allowed: |at| {
            let domain = ["clock", "limiter", "policy", "store", "enforcer"];
            !domain.contains(&at.module) || at.file.contains("properties")
        },
        advice: "domain types have no serde: mirror them in `config::schema` or where they are written",
    },
    LibraryRule {
        name: "redis",
        is_allowed: |at| !["clock", "limiter", "policy", "enforcer", "proxy"].contains(&at.module),
        advice: "only the store talks to Redis: add a method to `store`",
    },
    LibraryRule {
        name: "clap",
        is_allowed: |at| ["cli", "main"].contains(&at.module),
        advice: "`cli` parses the command line and passes plain values on",
    },
];

/// Production code of every file below `src/`, by its path there.
fn read_sources() -> BTreeMap<String, String> {
    let src = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut sources = BTreeMap::new();
    for entry in WalkDir::new(&src) {
        let entry = entry.unwrap();
        let file = entry.path().strip_prefix(&src).unwrap().to_str().unwrap();
        if entry.path().extension().is_some_and(|found| found == "rs") && !is_test_file(file) {
            let text = fs::read_to_string(entry.path()).unwrap();
            sources.insert(file.to_owned(), production_code(&text));
        }
    }
    assert!(
        sources.len() > 100,
        "only {} files were found in {}",
        sources.len(),
        src.display()
    );
    sources
}

#[test]
fn every_module_uses_only_lower_layers() {
    let violations: Vec<String> = read_sources()
        .iter()
        .flat_map(|(file, code)| find_violations(file, code))
        .collect();
    assert!(violations.is_empty(), "\n{}\n", violations.join("\n"));
}

#[test]
fn files_form_no_circles() {
    let circles = find_circles(&read_sources());
    assert!(
        circles.is_empty(),
        "{} circles of files. Move the shared item down into a file that both may use.\n\n{}\n",
        circles.len(),
        circles.join("\n\n")
    );
}

/// One layout: `name.rs` beside `name/`; paths through `super` for the enclosing module, through `crate`
/// for all others; visibility is private, `pub(super)`, `pub(crate)` or `pub`.
#[test]
fn files_and_paths_have_one_layout() {
    let mut violations = Vec::new();
    for (file, code) in read_sources() {
        if file.ends_with("/mod.rs") {
            violations.push(format!(
                "src/{file}: name it after its folder, beside the folder."
            ));
        }
        let parent = module_path(&file);
        let parent = parent.split_last().map_or(&[][..], |(_, parent)| parent);
        let through_crate = format!("use crate::{}::", parent.join("::"));
        for (number, line) in numbered_lines(&code) {
            let advice = if line.contains("super::super") {
                "start the path with `crate`"
            } else if line.contains("pub(in ") {
                "use `pub(crate)`"
            } else if !parent.is_empty() && line.starts_with(&through_crate) {
                "start the path with `super`"
            } else {
                continue;
            };
            violations.push(format!("src/{file}:{number}: {advice}."));
        }
    }
    assert!(violations.is_empty(), "{}", violations.join("\n"));
}

#[test]
fn production_code_stays_within_its_budget() {
    let lines: usize = read_sources()
        .values()
        .map(|code| code.lines().filter(|line| !line.trim().is_empty()).count())
        .sum();
    let budget = REACHED_LINES * 103 / 100;
    assert!(
        lines <= budget,
        "src/ has {lines} lines of production code, and the budget is {budget} (3 % above {REACHED_LINES}). \
         Remove what the change makes superfluous. If it is worth its lines, set REACHED_LINES to {lines}, \
         and say in the commit what they are for."
    );
}

#[test]
fn every_glossary_word_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = fs::read_to_string(root.join("docs/GLOSSARY.md")).unwrap();
    let row = Regex::new(r"(?m)^\| *([^|]+?) *\|[^|]+\| *`([^`|]+)` *`([^`|]+)` *\|$").unwrap();
    let mut words = BTreeSet::new();
    for found in row.captures_iter(&page) {
        let (word, file, symbol) = (&found[1], &found[2], &found[3]);
        assert!(
            words.insert(word.to_lowercase()),
            "`{word}` is listed twice"
        );
        let code = fs::read_to_string(root.join(file))
            .unwrap_or_else(|error| panic!("`{word}`: {file}: {error}"));
        let definition = Regex::new(&format!(
            r"(?m)\b(?:struct|enum|trait|type|fn|const|static|mod|function) {symbol}\b|^    (?:pub )?{symbol}[,(: {{]"
        ));
        assert!(
            definition.unwrap().is_match(&code),
            "`{word}`: {file} defines no `{symbol}`"
        );
    }
    let rows = page.lines().filter(|line| line.starts_with('|')).count();
    assert_eq!(
        words.len() + 2,
        rows,
        "every row of docs/GLOSSARY.md reads: | word | meaning | `path` `Symbol` |"
    );
}

/// Violations of one file below `src/`, each with its line and what to do instead.
fn find_violations(file: &str, code: &str) -> Vec<String> {
    let Some(at) = module_of(file) else {
        return Vec::new();
    };
    let layer_of = |name: &str| MODULE_LAYERS.iter().position(|module| *module == name);
    let Some(layer) = layer_of(at.module) else {
        return vec![format!(
            "src/{file}: `{}` has no layer. Add it to MODULE_LAYERS in tests/architecture.rs and to \
             docs/ARCHITECTURE.md, or move the file into an existing module.",
            at.module
        )];
    };
    let mut violations = Vec::new();
    for (line, path) in references(file, code) {
        let Some(used) = path.first().filter(|name| is_module_name(name)) else {
            continue;
        };
        let forbidden = FORBIDDEN_USES
            .iter()
            .find(|(user, other, _)| *user == at.module && other == used);
        if let Some((_, _, reason)) = forbidden {
            violations.push(format!(
                "src/{file}:{line}: `{}` must not use `{used}`: {reason}.",
                at.module
            ));
        } else if used != at.module && layer_of(used).is_none_or(|other| other > layer) {
            violations.push(format!(
                "src/{file}:{line}: `{}` uses `{used}`, which is a higher layer. Pass the value down as an \
                 argument, or move it to a module that both may use.",
                at.module
            ));
        }
    }
    violations.extend(find_proxy_violations(file, code));
    for rule in LIBRARY_RULES.iter().filter(|rule| !(rule.is_allowed)(at)) {
        let named = format!(r"(?:^|[^\w:.])(?:{})::|\buse (?:{0})\b", rule.name);
        let named = Regex::new(&named).unwrap();
        violations.extend(
            numbered_lines(code)
                .filter(|(_, line)| named.is_match(line))
                .map(|(number, line)| {
                    format!("src/{file}:{number}: `{}`: {}.", line.trim(), rule.advice)
                }),
        );
    }
    violations
}

/// Violations of the layers inside `proxy`. The file of `proxy` itself only re-exports.
fn find_proxy_violations(file: &str, code: &str) -> Vec<String> {
    let own_path = module_path(file);
    let [first, own, ..] = own_path.as_slice() else {
        return Vec::new();
    };
    if first != "proxy" {
        return Vec::new();
    }
    let layer_of = |name: &str| PROXY_LAYERS.iter().position(|module| *module == name);
    let Some(layer) = layer_of(own) else {
        return vec![format!(
            "src/{file}: `proxy::{own}` has no layer. Add it to PROXY_LAYERS in tests/architecture.rs."
        )];
    };
    let used = references(file, code)
        .into_iter()
        .filter_map(|(line, path)| {
            let module = path
                .get(1)
                .filter(|name| path[0] == "proxy" && is_module_name(name));
            Some((line, module?.clone()))
        });
    used.filter(|(_, used)| used != own && layer_of(used).is_none_or(|other| other > layer))
        .map(|(line, used)| {
            format!(
                "src/{file}:{line}: `proxy::{own}` uses `proxy::{used}`, which is a higher layer. Pass the \
                 value down as an argument, or move it to a module that both may use."
            )
        })
        .collect()
}

/// The module of a file; `None` for the crate root, which only declares modules.
fn module_of(file: &str) -> Option<ModuleFile<'_>> {
    let module = file.split('/').next()?;
    let module = module.strip_suffix(".rs").unwrap_or(module);
    (module != "lib").then_some(ModuleFile { module, file })
}

fn is_module_name(name: &str) -> bool {
    name.starts_with(|first: char| first.is_ascii_lowercase())
}

fn is_test_file(file: &str) -> bool {
    file.contains("/tests/") || file.ends_with("/tests.rs") || file.ends_with("/properties.rs")
}

/// The text without comments, literals and items under `#[cfg(test)]`. Line numbers stay the same.
fn production_code(text: &str) -> String {
    let silent = r#"//[^\n]*|r\#"(?s:.*?)"\#|"(?s:\\.|[^"\\])*"|'(?:\\.|[^'\\])'"#;
    let code = Regex::new(silent)
        .unwrap()
        .replace_all(text, |found: &Captures<'_>| {
            "\n".repeat(found[0].matches('\n').count())
        });
    let mut kept = String::new();
    // The line that ends the test item being skipped.
    let mut skipped_until: Option<String> = None;
    let mut is_test_item = false;
    for line in code.lines() {
        let indent = &line[..line.len() - line.trim_start().len()];
        if let Some(end) = &skipped_until {
            if line.trim_end() == end {
                skipped_until = None;
            }
        } else if line.trim_start().starts_with("#[cfg(test)]")
            || line.trim_start().starts_with("#[cfg(any(test")
        {
            is_test_item = true;
        } else if is_test_item && !line.trim_start().starts_with("#[") {
            is_test_item = false;
            let is_complete =
                line.trim_end().ends_with([';', ',']) || line.trim_end().ends_with('}');
            if !is_complete {
                skipped_until = Some(format!("{indent}}}"));
            }
        } else if !is_test_item {
            kept.push_str(line);
        }
        kept.push('\n');
    }
    kept
}

/// The path of the module that a file defines, from the crate root.
fn module_path(file: &str) -> Vec<String> {
    let path = file.strip_suffix(".rs").unwrap_or(file);
    if ["lib", "main"].contains(&path) {
        return Vec::new();
    }
    path.split('/').map(str::to_owned).collect()
}

/// Every path inside the crate that `code` names, from the crate root, with its line.
fn references(file: &str, code: &str) -> Vec<(usize, Vec<String>)> {
    let own_path = module_path(file);
    let mut found = Vec::new();
    for (line, path) in imported_paths(code) {
        found.extend(absolute_path(&own_path, &path).map(|path| (line, path)));
    }
    let inline = Regex::new(r"(?:^|[^\w:])((?:crate|super|self|tidegate)(?:::\w+)+)").unwrap();
    for (line, text) in numbered_lines(&without_imports(code)) {
        for path in inline.captures_iter(text) {
            let path: Vec<String> = path[1].split("::").map(str::to_owned).collect();
            found.extend(absolute_path(&own_path, &path).map(|path| (line, path)));
        }
    }
    found
}

/// The paths of all `use` declarations, groups written out, each with its line.
fn imported_paths(code: &str) -> Vec<(usize, Vec<String>)> {
    let declaration = Regex::new(r"\buse\s+([\w:{}*,\s]+);").unwrap();
    let mut paths = Vec::new();
    for found in declaration.captures_iter(code) {
        let tree = found.get(1).unwrap();
        let line = code[..tree.start()].matches('\n').count() + 1;
        let mut expanded = Vec::new();
        expand_use_tree(&[], tree.as_str(), &mut expanded);
        paths.extend(expanded.into_iter().map(|path| (line, path)));
    }
    paths
}

/// The code without its `use` declarations. Line numbers stay the same.
fn without_imports(code: &str) -> String {
    let declaration = Regex::new(r"\buse\s+[\w:{}*,\s]+;").unwrap();
    declaration
        .replace_all(code, |found: &Captures<'_>| {
            "\n".repeat(found[0].matches('\n').count())
        })
        .into_owned()
}

/// Writes `a::{b, c::{d as e}}` out as `a::b` and `a::c::d`.
fn expand_use_tree(prefix: &[String], tree: &str, paths: &mut Vec<Vec<String>>) {
    let tree = tree.trim();
    let Some(open) = tree.find('{') else {
        let path = tree.split(" as ").next().unwrap_or(tree);
        if !path.is_empty() {
            let names = path.split("::").map(|name| name.trim().to_owned());
            paths.push(prefix.iter().cloned().chain(names).collect());
        }
        return;
    };
    let names = tree[..open]
        .split("::")
        .map(str::trim)
        .filter(|name| !name.is_empty());
    let prefix: Vec<String> = prefix
        .iter()
        .cloned()
        .chain(names.map(str::to_owned))
        .collect();
    let mut depth = 0;
    let mut start = open + 1;
    for (at, letter) in tree.char_indices().skip(open) {
        depth += i32::from(letter == '{') - i32::from(letter == '}');
        if (depth == 1 && letter == ',') || depth == 0 {
            expand_use_tree(&prefix, &tree[start..at], paths);
            start = at + 1;
        }
    }
}

/// A path as written in the module `own_path`, from the crate root; `None` for other crates.
fn absolute_path(own_path: &[String], path: &[String]) -> Option<Vec<String>> {
    let first = path.first()?.as_str();
    if ["crate", "tidegate"].contains(&first) {
        return Some(path[1..].to_vec());
    }
    if !["super", "self"].contains(&first) {
        return None;
    }
    let mut absolute = own_path.to_vec();
    let mut rest = path;
    while let Some((name, others)) = rest.split_first() {
        match name.as_str() {
            "super" => drop(absolute.pop()?),
            "self" => {}
            _ => break,
        }
        rest = others;
    }
    absolute.extend_from_slice(rest);
    Some(absolute)
}

fn numbered_lines(code: &str) -> impl Iterator<Item = (usize, &str)> {
    code.lines()
        .enumerate()
        .map(|(index, line)| (index + 1, line))
}

/// The files of the crate, and which of them each one uses.
struct FileGraph<'a> {
    files: BTreeMap<Vec<String>, &'a str>,
    /// Names that a module imports or re-exports, with the paths that they stand for.
    imports: BTreeMap<Vec<String>, BTreeMap<String, Vec<String>>>,
}

impl<'a> FileGraph<'a> {
    fn new(sources: &'a BTreeMap<String, String>) -> Self {
        let modules = sources.iter().filter(|(file, _)| *file != "main.rs");
        let files: BTreeMap<_, _> = modules
            .map(|(file, _)| (module_path(file), file.as_str()))
            .collect();
        let mut graph = Self {
            files,
            imports: BTreeMap::new(),
        };
        for (path, file) in graph.files.clone() {
            let mut names = BTreeMap::new();
            for (_, imported) in imported_paths(&sources[file]) {
                let imported = graph.resolve_relative(&path, &imported);
                if let Some((name, imported)) =
                    imported.and_then(|full| Some((full.last()?.clone(), full)))
                {
                    names.insert(name, imported);
                }
            }
            graph.imports.insert(path, names);
        }
        graph
    }

    /// As [`absolute_path`]; names of child modules count as well.
    fn resolve_relative(&self, own_path: &[String], path: &[String]) -> Option<Vec<String>> {
        absolute_path(own_path, path).or_else(|| {
            let child: Vec<String> = own_path.iter().chain(path.first()).cloned().collect();
            self.files
                .contains_key(&child)
                .then(|| own_path.iter().chain(path).cloned().collect())
        })
    }

    /// The module that defines the item at `path`. Re-exports are followed.
    fn defining_module(&self, path: &[String], depth: usize) -> Option<Vec<String>> {
        let length = (0..=path.len())
            .rev()
            .find(|&n| self.files.contains_key(&path[..n]))?;
        let module = path[..length].to_vec();
        let reexported = path
            .get(length)
            .and_then(|name| self.imports.get(&module)?.get(name));
        match reexported {
            Some(target) if depth < 8 && target.as_slice() != path => {
                self.defining_module(target, depth + 1)
            }
            _ => Some(module),
        }
    }

    /// The files that `file` uses. Items that an enclosing module defines itself do not count.
    fn used_files(&self, file: &'a str, code: &str) -> BTreeSet<&'a str> {
        let own_path = module_path(file);
        let mut paths: Vec<Vec<String>> = references(file, code)
            .into_iter()
            .map(|(_, path)| path)
            .collect();
        let relative = Regex::new(r"(?:^|[^\w:.])([a-z]\w*)::(\w+)").unwrap();
        paths.extend(
            imported_paths(code)
                .iter()
                .filter_map(|(_, path)| self.resolve_relative(&own_path, path)),
        );
        for found in relative.captures_iter(code) {
            let path = [found[1].to_owned(), found[2].to_owned()];
            paths.extend(self.resolve_relative(&own_path, &path));
            let imported = self
                .imports
                .get(&own_path)
                .and_then(|names| names.get(&path[0]));
            paths.extend(imported.map(|module| {
                module
                    .iter()
                    .chain(&path[1..])
                    .cloned()
                    .collect::<Vec<String>>()
            }));
        }
        paths
            .iter()
            .filter_map(|path| self.defining_module(path, 0))
            .filter(|module| !own_path.starts_with(module))
            .map(|module| self.files[&module])
            .collect()
    }
}

/// Every file that can reach itself, as one shortest circle per group of such files.
fn find_circles(sources: &BTreeMap<String, String>) -> Vec<String> {
    let graph = FileGraph::new(sources);
    let uses: BTreeMap<&str, BTreeSet<&str>> = graph
        .files
        .values()
        .map(|file| (*file, graph.used_files(file, &sources[*file])))
        .collect();
    let mut reported: BTreeSet<&str> = BTreeSet::new();
    let mut circles = Vec::new();
    for file in uses.keys() {
        if !reported.contains(file)
            && let Some(circle) = shortest_circle(file, &uses)
        {
            reported.extend(&circle);
            let names: Vec<String> = circle.iter().map(|name| format!("src/{name}")).collect();
            circles.push(format!("{} -> src/{file}", names.join(" -> ")));
        }
    }
    circles
}

/// The shortest way from `start` back to itself.
fn shortest_circle<'a>(
    start: &'a str,
    uses: &BTreeMap<&'a str, BTreeSet<&'a str>>,
) -> Option<Vec<&'a str>> {
    let mut came_from: BTreeMap<&str, &str> = BTreeMap::new();
    let mut queue = std::collections::VecDeque::from([start]);
    while let Some(file) = queue.pop_front() {
        for used in &uses[file] {
            if *used == start {
                let mut circle = vec![file];
                while *circle.last()? != start {
                    circle.push(came_from[circle.last()?]);
                }
                circle.reverse();
                return Some(circle);
            }
            if !came_from.contains_key(used) {
                came_from.insert(used, file);
                queue.push_back(used);
            }
        }
    }
    None
}

mod checker_tests {
    use super::{find_circles, find_violations, production_code};
    use std::collections::BTreeMap;

    fn violations_in(file: &str, text: &str) -> Vec<String> {
        find_violations(file, &production_code(text))
    }

    #[track_caller]
    fn rejects(file: &str, text: &str, expected: &str) {
        let violations = violations_in(file, text);
        assert!(
            violations.len() == 1 && violations[0].contains(expected),
            "{expected:?} expected, got {violations:?}"
        );
    }

    #[track_caller]
    fn accepts(file: &str, text: &str) {
        assert_eq!(violations_in(file, text), Vec::<String>::new());
    }

    fn circles_in(files: &[(&str, &str)]) -> Vec<String> {
        let sources: BTreeMap<String, String> = files
            .iter()
            .map(|(file, text)| ((*file).to_owned(), production_code(text)))
            .collect();
        find_circles(&sources)
    }

    #[test]
    fn rejects_uses_of_higher_layers() {
        rejects(
            "limiter/key.rs",
            "\nuse crate::policy::Facts;\n",
            "src/limiter/key.rs:2: `limiter` uses `policy`",
        );
        rejects(
            "store/memory.rs",
            "fn f() { crate::enforcer::go() }",
            "`store` uses `enforcer`",
        );
        rejects("store.rs", "use super::proxy;", "`store` uses `proxy`");
        rejects(
            "policy.rs",
            "use crate::{\n    limiter::{Key, Limit},\n    app::a,\n};",
            "`policy` uses `app`",
        );
        rejects(
            "telemetry.rs",
            "use crate::limiter::Key;",
            "`telemetry` uses `limiter`",
        );
        rejects("cli/check.rs", "use tidegate::main;", "`cli` uses `main`");
        rejects(
            "proxy/http/headers.rs",
            "use crate::proxy::server::worker::WorkerThread;",
            "`proxy::http` uses `proxy::server`",
        );
        rejects(
            "proxy/body.rs",
            "use super::service;",
            "`proxy::body` uses `proxy::service`",
        );
        rejects("proxy/new.rs", "", "`proxy::new` has no layer");
    }

    #[test]
    fn rejects_forbidden_uses_of_lower_layers() {
        rejects(
            "proxy/service.rs",
            "use crate::store::Store;",
            "`proxy` must not use `store`",
        );
        rejects("limiter.rs", "use crate::clock::Clock;", "pass the time in");
    }

    #[test]
    fn rejects_libraries_in_the_wrong_module() {
        rejects(
            "enforcer.rs",
            "fn f(request: hyper::Request<()>) {}",
            "only proxy, admin, http_client and telemetry::otlp use hyper",
        );
        rejects(
            "cli/explain.rs",
            "use hyper_util::rt::TokioIo;",
            "only proxy, admin, http_client and telemetry::otlp use hyper",
        );
        rejects("telemetry/log.rs", "use hyper::Request;", "use hyper");
        rejects(
            "limiter.rs",
            "use http::Method;",
            "a limit does not know HTTP",
        );
        rejects("policy/table.rs", "tokio::spawn(f());", "never waits");
        rejects("policy/table.rs", "use toml::Value;", "the file format");
        rejects("limiter.rs", "#[derive(serde::Serialize)]", "no serde");
        rejects("app.rs", "use clap::Parser;", "the command line");
    }

    #[test]
    fn rejects_modules_without_a_layer() {
        rejects("util.rs", "", "`util` has no layer");
        rejects("policy.rs", "use crate::util::x;", "`policy` uses `util`");
    }

    #[test]
    fn accepts_uses_of_lower_layers() {
        accepts(
            "config/settings.rs",
            "use crate::proxy::ListenSettings;\nuse crate::{limiter, policy::Policy};",
        );
        accepts(
            "proxy/http/headers.rs",
            "use hyper::body::Incoming;\nuse crate::enforcer::Enforcer;",
        );
        accepts("telemetry/otlp/collector.rs", "use hyper::Request;");
        accepts("cli/demo.rs", "use axum::Router;");
        accepts(
            "policy.rs",
            "use http::Method;\nuse self::facts::Facts;\nlet x = a.http::<u8>();",
        );
        accepts("main.rs", "fn main() { tidegate::cli::run() }");
        accepts("lib.rs", "pub mod util;");
    }

    #[test]
    fn comments_literals_and_test_items_do_not_count() {
        accepts(
            "limiter.rs",
            r#"let x = "a \" crate::store \
            tokio::x"; let y = '"'; let z = 1;"#,
        );
        rejects(
            "limiter.rs",
            "let y = \"\n\"; crate::store::go()",
            "src/limiter.rs:2",
        );
        accepts(
            "limiter.rs",
            "//! See [`crate::store`].\nlet x = 1; // tokio::time\n",
        );
        accepts(
            "limiter.rs",
            "fn f() {}\n#[cfg(test)]\nmod tests {\n    use crate::clock::Clock;\n}\n",
        );
        rejects(
            "limiter.rs",
            "#[cfg(test)]\nmod tests;\nuse crate::clock::Clock;\n",
            "src/limiter.rs:3",
        );
    }

    #[test]
    fn finds_circles_through_use_declarations_inline_paths_and_reexports() {
        let circle = "src/a/b.rs -> src/a/c.rs -> src/a/b.rs";
        let parent = ("a.rs", "mod b;\nmod c;\npub use c::C;\nfn f() {}");
        let direct = [
            parent,
            ("a/b.rs", "use super::c::X;"),
            ("a/c.rs", "use crate::a::b::Y;"),
        ];
        assert_eq!(circles_in(&direct), [circle]);
        let nested = [
            parent,
            ("a/b.rs", "use super::{c::{X, Z}};"),
            ("a/c.rs", "use super::b;\nb::y()"),
        ];
        assert_eq!(circles_in(&nested), [circle]);
        let inline = [
            parent,
            ("a/b.rs", "fn g() { super::c::x() }"),
            ("a/c.rs", "use crate::a::b::Y;"),
        ];
        assert_eq!(circles_in(&inline), [circle]);
        let reexport = [
            parent,
            ("a/b.rs", "use super::C;"),
            ("a/c.rs", "use super::b::Y;"),
        ];
        assert_eq!(circles_in(&reexport), [circle]);
    }

    #[test]
    fn enclosing_modules_and_tests_form_no_circles() {
        let parent = ("a.rs", "mod b;\nmod c;\nuse b::B;\npub struct Own;");
        let up = [
            parent,
            ("a/b.rs", "use super::Own;\nuse super::c::C;"),
            ("a/c.rs", "use crate::a::Own;"),
        ];
        assert_eq!(circles_in(&up), Vec::<String>::new());
        let test = [
            parent,
            ("a/b.rs", "use super::c::C;"),
            (
                "a/c.rs",
                "#[cfg(test)]\nmod tests {\n    use crate::a::b::B;\n}",
            ),
        ];
        assert_eq!(circles_in(&test), Vec::<String>::new());
    }
}
