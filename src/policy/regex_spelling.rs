//! Regular expressions on header values whose spellings mean the same: schemes in any letter case,
//! and hosts with and without a port.

use super::Facts;
use http::HeaderName;
use http::header::{AUTHORIZATION, HOST};
use regex_syntax::hir::{Class, ClassUnicode, ClassUnicodeRange, Hir, HirKind, Repetition};
use std::ops::RangeInclusive;

/// Letters that stand for the letters of a scheme: `\w` and `\b` treat them as letters too.
const MARKED_LETTERS: RangeInclusive<char> = '\u{1d41a}'..='\u{1d433}';

/// Whether a regular expression is tried on [`header_spellings`].
pub(super) fn has_spellings(name: &HeaderName) -> bool {
    *name == AUTHORIZATION || *name == HOST
}

/// The texts on which a regular expression for `authorization` or `host` is tried: the canonical
/// value with the letters of a scheme marked, Basic credentials also without padding, and a host
/// also with the port that the client sent.
pub(super) fn header_spellings(facts: &Facts<'_>, name: &HeaderName) -> Vec<String> {
    let sent = facts.header_values(name);
    let sent = sent.map(|value| String::from_utf8_lossy(&value).into_owned());
    if *name == HOST {
        let with_port = sent.filter_map(|value| {
            let (_, port) = value.rsplit_once(':')?;
            let is_port = port.bytes().all(|byte| byte.is_ascii_digit());
            is_port.then(|| format!("{}:{port}", facts.host))
        });
        return with_port.chain([facts.host.to_owned()]).collect();
    }
    let canonical = facts.canonical_header_values(name);
    let spellings = canonical.flat_map(|value| {
        let text = String::from_utf8_lossy(&value);
        let padded = text
            .starts_with("Basic ")
            .then(|| text.trim_end_matches('='));
        let unpadded = padded.filter(|unpadded| *unpadded != text);
        [Some(&*text), unpadded].map(|text| text.map(mark_scheme))
    });
    spellings.flatten().collect()
}

/// Replaces the letters of a scheme by marked ones. A single word is a credential.
fn mark_scheme(credentials: &str) -> String {
    match credentials.split_once(' ') {
        None => credentials.to_owned(),
        Some((scheme, rest)) => {
            let scheme = scheme.chars().map(|letter| mark(letter).unwrap_or(letter));
            format!("{} {rest}", scheme.collect::<String>())
        }
    }
}

fn mark(letter: char) -> Option<char> {
    let lower = letter.to_ascii_lowercase();
    let mut pairs = ('a'..='z').zip(MARKED_LETTERS);
    pairs.find_map(|(plain, marked)| (plain == lower).then_some(marked))
}

/// Rewrites a regular expression so that it matches marked letters as it matches the letter in
/// upper or lower case.
///
/// # Errors
/// Returns the parser's message if the text is no regular expression.
pub fn accept_marked_letters(regex: &str) -> Result<String, String> {
    let parsed = regex_syntax::parse(regex).map_err(|error| error.to_string())?;
    // A marked letter is no word character in ASCII.
    Ok(add_marked_letters(&parsed)
        .to_string()
        .replace("(?-u:", "(?:"))
}

fn add_marked_letters(hir: &Hir) -> Hir {
    let add_all = |several: &[Hir]| several.iter().map(add_marked_letters).collect();
    match hir.kind() {
        HirKind::Empty => Hir::empty(),
        HirKind::Look(look) => Hir::look(*look),
        HirKind::Literal(literal) => {
            let text = String::from_utf8_lossy(&literal.0).into_owned();
            let classes = text.chars().map(|letter| {
                add_to_class(ClassUnicode::new([ClassUnicodeRange::new(letter, letter)]))
            });
            Hir::concat(classes.collect())
        }
        HirKind::Class(Class::Unicode(class)) => add_to_class(class.clone()),
        // In a text, a class of bytes is one of ASCII.
        HirKind::Class(Class::Bytes(class)) => class
            .to_unicode_class()
            .map_or_else(Hir::fail, add_to_class),
        HirKind::Repetition(repetition) => Hir::repetition(Repetition {
            sub: Box::new(add_marked_letters(&repetition.sub)),
            ..repetition.clone()
        }),
        HirKind::Capture(capture) => add_marked_letters(&capture.sub),
        HirKind::Concat(several) => Hir::concat(add_all(several)),
        HirKind::Alternation(several) => Hir::alternation(add_all(several)),
    }
}

fn add_to_class(mut class: ClassUnicode) -> Hir {
    let contains = |letter| {
        let mut ranges = class.ranges().iter();
        ranges.any(|range| (range.start()..=range.end()).contains(&letter))
    };
    let marked = ('a'..='z')
        .zip(MARKED_LETTERS)
        .filter(|(letter, _)| contains(*letter) || contains(letter.to_ascii_uppercase()));
    let marked: Vec<_> = marked
        .map(|(_, marked)| ClassUnicodeRange::new(marked, marked))
        .collect();
    let all = ClassUnicodeRange::new(*MARKED_LETTERS.start(), *MARKED_LETTERS.end());
    class.difference(&ClassUnicode::new([all]));
    class.union(&ClassUnicode::new(marked));
    Hir::class(Class::Unicode(class))
}

#[cfg(test)]
mod tests {
    use super::*;
    use regex::Regex;

    fn matches(regex: &str, credentials: &str) -> bool {
        let regex = Regex::new(&accept_marked_letters(regex).unwrap()).unwrap();
        regex.is_match(&mark_scheme(credentials))
    }

    #[test]
    fn the_scheme_is_matched_in_any_letter_case_and_the_rest_exactly() {
        for regex in [
            "^ApiKey leaked$",
            "^apikey leaked",
            "^APIKEY",
            "^Api",
            "^[Aa]piKey l",
            "^(?:OAuth|Api(Key)?) leaked$",
            "^[A-Z]+ leaked$",
            "^[a-z]+ [a-z]+$",
            r"^\w+ leaked$",
            r"^\bAPIKEY\b",
            r"(?-u)^\bApiKey\b",
            r"^[^ ]{6} leaked$",
            "^[^0-9]+$",
            "(?i)^aPIkEY LEAKED$",
            "^.{13}$",
            r"\AAPI.*\z",
            "^A{1}p?i*KEY ",
            "leaked",
        ] {
            assert!(matches(regex, "Apikey leaked"), "{regex}");
        }
        for regex in [
            "^ApiKey Leaked$",
            "^ApiKeys leaked$",
            "LEAKED",
            "^[a-z]+$",
            "^[^a-zA-Z]",
            r"^\W",
            "^[0-9]",
            "^[^aA]",
            "^[A-Z]+ [A-Z]+$",
        ] {
            assert!(!matches(regex, "Apikey leaked"), "{regex}");
        }
        assert!(
            matches("^key$", "key") && !matches("^KEY$", "key"),
            "no scheme"
        );
        assert!(accept_marked_letters("(").is_err());
    }
}
