//! The conditions of a policy.

use super::cursor::{Cursor, Item};
use super::{schema, values};
use crate::policy::jwt::ClaimName;
use crate::policy::path;
use crate::policy::{Described, HostPattern, Matcher, MethodSet, Named, PathPattern, Test};
use figment::value::{Num, Value};
use http::{HeaderName, Method};

/// What makes a policy one for descriptors.
const DESCRIBES: [&str; 2] = ["domain", "descriptors"];

/// Conditions on a request.
const OF_REQUESTS: [&str; 9] = [
    "methods",
    "hosts",
    "path",
    "path_regex",
    "headers",
    "query",
    "cookies",
    "client_ips",
    "jwt",
];

/// `tokens`: whether any are believed.
pub(super) fn matcher(at: &Cursor<'_>, path: &path::Settings, tokens: bool) -> Matcher {
    let is_of_descriptors = DESCRIBES.iter().any(|key| at.has(key));
    if is_of_descriptors {
        for key in OF_REQUESTS.into_iter().filter(|key| at.has(key)) {
            at.fail(key, "beside domain or descriptors: a call of the rate-limit service brings descriptors and no request; expected one or the other");
        }
    }
    let not = at.optional_table("not");
    if let Some(not) = &not {
        let describes = DESCRIBES.iter().any(|key| not.has(key));
        match is_of_descriptors {
            true if !describes => {
                at.fail("not", "expected domain or descriptors in it, as beside it");
            }
            false if describes => {
                at.fail(
                    "not",
                    "a request has no descriptors; expected domain or descriptors beside it too",
                );
            }
            _ => {}
        }
    }
    if at.has("jwt") && !tokens {
        at.fail("jwt", NO_TOKENS);
    }
    Matcher {
        methods: MethodSet::new(at.list("methods", method)),
        hosts: at.list("hosts", HostPattern::parse),
        paths: at.list("path", |text| PathPattern::parse(text, path)),
        path_regex: at.parsed("path_regex", values::regex),
        headers: named(at, "headers", header_name, test),
        query: named(at, "query", any_name, test),
        cookies: named(at, "cookies", any_name, test),
        client_ips: at.list("client_ips", values::network),
        claims: named(at, "jwt", ClaimName::parse, claim_test),
        described: is_of_descriptors.then(|| Described {
            domain: at.parsed("domain", any_name),
            entries: at
                .has("descriptors")
                .then(|| named(at, "descriptors", any_name, entry)),
        }),
        not: not.map(|not| Box::new(matcher(&not, path, tokens))),
    }
}

/// What is wrong with asking for a claim when nobody's is believed.
pub(super) const NO_TOKENS: &str =
    "nobody's tokens are believed; expected [client.jwt] with keys_file or secret_file";

/// Methods are case-sensitive: a lower-case one would never match what clients send.
fn method(text: &str) -> Result<Method, String> {
    match Method::from_bytes(text.as_bytes()) {
        Ok(method) if !text.bytes().any(|byte| byte.is_ascii_lowercase()) => Ok(method),
        _ => Err("expected a method in capitals such as \"GET\"".to_owned()),
    }
}

pub(super) fn header_name(text: &str) -> Result<HeaderName, String> {
    HeaderName::from_bytes(text.as_bytes())
        .ok()
        .ok_or_else(|| format!("{text:?} is no name of a header"))
}

fn any_name(text: &str) -> Result<Box<str>, String> {
    if text.is_empty() {
        Err("the name is empty".to_owned())
    } else {
        Ok(text.into())
    }
}

fn named<N>(
    at: &Cursor<'_>,
    key: &str,
    parse: impl Fn(&str) -> Result<N, String>,
    test: fn(&Item<'_>) -> Option<Test>,
) -> Vec<Named<N>> {
    let condition = |(name, item): (&str, Item<'_>)| {
        let test = test(&item);
        match parse(name) {
            Ok(name) => Some(Named { name, test: test? }),
            Err(reason) => item.fail(&reason),
        }
    };
    at.entries(key).into_iter().filter_map(condition).collect()
}

/// Claims may be `true` or `7`.
fn claim_test(item: &Item<'_>) -> Option<Test> {
    match item.value {
        Value::Bool(_, flag) => Some(Test::Is(flag.to_string().into())),
        Value::Num(_, Num::I64(number)) => Some(Test::Is(number.to_string().into())),
        _ => test(item),
    }
}

/// Entries that aren't named must not be there, so there is nothing to say of absent ones.
fn entry(item: &Item<'_>) -> Option<Test> {
    match test(item)? {
        Test::Is(text) if *text == *"*" => Some(Test::Present(true)),
        Test::Present(false) => item
            .fail("a descriptor with other entries is never matched; expected it to be left out"),
        test => Some(test),
    }
}

fn test(item: &Item<'_>) -> Option<Test> {
    const EXPECTED: &str = "expected a text, { regex = \"…\" } or { present = true }";
    if let Some(text) = item.value.as_str() {
        return Some(Test::Is(text.into()));
    }
    let Some(table) = item.table(&schema::TEST) else {
        return item.fail(EXPECTED);
    };
    match (table.has("regex"), table.has("present")) {
        (true, false) => table.parsed("regex", values::regex).map(Test::Regex),
        (false, true) => table.flag("present").map(Test::Present),
        _ => item.fail(EXPECTED),
    }
}
