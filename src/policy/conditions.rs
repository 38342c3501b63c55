//! Conditions on the values of a request or descriptor.

use regex::Regex;
use std::fmt;

/// A condition on a named value.
#[derive(Clone, Debug)]
pub struct NamedCondition<N> {
    pub name: N,
    pub condition: ValueCondition,
}

/// A condition on a value. With several values of one name, any may fulfil it.
#[derive(Clone, Debug)]
pub enum ValueCondition {
    Equals(Box<str>),
    Regex(Regex),
    /// Whether the name occurs at all.
    Present(bool),
}

/// A condition that a request does not fulfil.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnmetCondition<'a> {
    Method,
    Host,
    Path,
    PathRegex,
    ClientIp,
    Header(&'a str),
    Query(&'a str),
    Cookie(&'a str),
    Claim(&'a str),
    /// It is about descriptors.
    RequestKind,
    Domain,
    Entry(&'a str),
    /// A descriptor says more than was asked for.
    ExtraEntries,
    /// What must not hold holds.
    Exclusion,
}

impl ValueCondition {
    pub(super) fn is_met_by<V: AsRef<[u8]>>(&self, mut values: impl Iterator<Item = V>) -> bool {
        match self {
            Self::Equals(wanted) => values.any(|value| value.as_ref() == wanted.as_bytes()),
            Self::Regex(regex) => {
                values.any(|value| regex.is_match(&String::from_utf8_lossy(value.as_ref())))
            }
            Self::Present(wanted) => values.next().is_some() == *wanted,
        }
    }
}

/// For people: `its path is another`.
impl fmt::Display for UnmetCondition<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Method => f.write_str("not for this method"),
            Self::Host => f.write_str("not for this host"),
            Self::Path => f.write_str("not for this path"),
            Self::PathRegex => f.write_str("path_regex does not match"),
            Self::ClientIp => f.write_str("not for this client address"),
            Self::Header(name) => write!(f, "the condition on header {name} does not hold"),
            Self::Query(name) => write!(f, "the condition on query parameter {name} does not hold"),
            Self::Cookie(name) => write!(f, "the condition on cookie {name} does not hold"),
            Self::Claim(name) => write!(f, "the condition on claim {name} does not hold"),
            Self::RequestKind => f.write_str("for calls of the rate-limit service only"),
            Self::Domain => f.write_str("not for this domain"),
            Self::Entry(name) => {
                write!(f, "the condition on descriptor entry {name} does not hold")
            }
            Self::ExtraEntries => f.write_str("the descriptor has other entries too"),
            Self::Exclusion => f.write_str("excepted by its `not`"),
        }
    }
}
