//! Types of the schema, and types and ranges that several tables share.

use crate::config::values::format_duration;
use crate::limiter::Algorithm;
use crate::policy::{KeyPart, MissingKeyAction, OnStoreFailure};
use std::fmt;
use std::time::Duration;
use strum::{EnumString, IntoStaticStr, VariantNames};

/// One key of a table.
#[derive(Debug)]
pub(crate) struct SchemaKey {
    pub name: &'static str,
    pub kind: ValueKind,
    pub requirement: KeyRequirement,
    /// Description for `docs/CONFIGURATION.md`. Messages quote its first sentence.
    pub doc: &'static str,
    pub applied_at: AppliedAt,
    /// No message quotes the value, and the effective configuration masks it.
    pub is_secret: bool,
    /// Only for policies with action `limit`.
    pub is_of_quota: bool,
    /// The only algorithm that has the key.
    pub algorithm: Option<&'static str>,
    /// The keys of the table may differ between the instances of a service.
    pub is_per_instance: bool,
}

/// When a change of a key takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AppliedAt {
    Restart,
    Reload,
    /// Logins, TLS to Redis and the admin token: read again even if the rest of the configuration
    /// is invalid.
    CredentialReload,
}

impl AppliedAt {
    /// When a change takes effect in a table that `outer` applies to.
    pub(crate) fn within(self, outer: Self) -> Self {
        match self {
            Self::Restart => outer,
            own => own,
        }
    }
}

/// Whether a key must be present, and its default.
#[derive(Debug)]
pub(crate) enum KeyRequirement {
    Required,
    Optional,
    Default(&'static str),
}

/// Parses the name of a part, such as that of a header.
pub(crate) type PartParser = fn(&str) -> Result<KeyPart, String>;

/// Type and range of a value.
#[derive(Debug)]
pub(crate) enum ValueKind {
    Bool,
    /// An integer from `min` to `max`, both included.
    Integer {
        min: i64,
        max: i64,
    },
    /// A number from 0 to 1.
    Fraction,
    /// A factor with at most three decimals.
    Factor,
    Duration {
        min: Duration,
        max: Duration,
    },
    /// A size in bytes.
    ByteSize {
        min: u64,
        max: u64,
    },
    Keyword(&'static [&'static str]),
    /// A string, with its description.
    Text(&'static str),
    /// A list of strings, or one string.
    TextList(&'static str),
    /// A list of statuses: integers, or classes such as `"4xx"`.
    StatusList,
    /// A list of ascending fractions, each above 0 and at most 1.
    ThresholdList,
    Table(&'static [SchemaKey]),
    TableList(&'static [SchemaKey]),
    /// A table with user-defined keys.
    Map(&'static str),
    /// Conditions on the values of named parts, such as headers.
    Conditions {
        /// What a part is in sentences.
        noun: &'static str,
        parse_part: PartParser,
    },
    /// A value of either kind. The text follows the description of the first one in messages.
    Either(&'static ValueKind, &'static str, &'static ValueKind),
}

pub(super) use ValueKind::{
    Bool, Factor, Fraction, Keyword, Map, Table, TableList, Text, TextList,
};

/// Largest integer that a double represents exactly. Redis scripts compute with doubles.
pub(super) const MAX_UNITS: i64 = 1 << 53;

pub(super) const DAY: Duration = Duration::from_secs(86_400);

pub(super) const MAX_WARM_UP: Duration = Duration::from_micros(crate::limiter::MAX_WARM_UP_US);

pub(super) const MAX_PERIOD: Duration = Duration::from_secs(400 * 86_400);

/// At least a millisecond, because 0 does not disable the setting.
pub(super) const POSITIVE_DURATION: ValueKind = duration(Duration::from_millis(1), DAY);

pub(super) const DURATION: ValueKind = duration(Duration::ZERO, DAY);

pub(super) const ON_STORE_FAILURE: ValueKind = Keyword(OnStoreFailure::VARIANTS);

pub(super) const ALGORITHM: ValueKind = Keyword(&[
    "sliding_log",
    "sliding_window",
    "fixed_window",
    "token_bucket",
    "leaky_bucket",
    "concurrency",
]);

/// The action of a policy or of an override.
#[derive(Clone, Copy, PartialEq, Eq, EnumString, IntoStaticStr, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum PolicyActionKind {
    Limit,
    Allow,
    Deny,
}

#[derive(Clone, Copy, PartialEq, Eq, EnumString, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub(crate) enum RedisTopologyKind {
    Standalone,
    Sentinel,
    Cluster,
}

/// The algorithms with the defaults of their options.
pub(crate) const ALGORITHMS: [Algorithm; 6] = [
    Algorithm::SlidingLog,
    Algorithm::SlidingWindow { buckets: 10 },
    Algorithm::FixedWindow { offset_us: 0 },
    Algorithm::TokenBucket {
        burst: 1,
        warm_up_us: 0,
    },
    Algorithm::LeakyBucket {
        max_delay_us: 1_000_000,
    },
    Algorithm::Concurrency { max_duration_us: 0 },
];

pub(super) const PEM_PATH: ValueKind = Text("the path of a PEM file");

/// Names of policies, limits and counters.
pub(super) const NAME: ValueKind =
    Text("a letter or digit, then up to 62 letters, digits, \"_\", \".\" or \"-\"");

pub(super) const MISSING_KEY: ValueKind = Keyword(MissingKeyAction::VARIANTS);

/// The variants of `PolicyMode`; "off": the policy is only validated.
pub(super) const POLICY_MODE: ValueKind = Keyword(&["enforce", "mark", "shadow", "off"]);

/// A check that the operator may turn off.
pub(super) const REJECT_OR_ALLOW: ValueKind = Keyword(&["reject", "allow"]);

/// Declares tables of keys. A row has the key's description, its name and its kind, and then
/// methods of [`SchemaKey`], such as `default = "1s"`.
macro_rules! schema_table {
    ($(
        $(#[$about:meta])*
        $visibility:vis static $table:ident {
            $($(#[doc = $doc:literal])+ $name:ident: $kind:expr $(, $method:ident $(= $value:expr)?)*;)+
        }
    )+) => {$(
        $(#[$about])*
        $visibility static $table: [SchemaKey; [$(stringify!($name)),+].len()] = [$(
            SchemaKey::new(stringify!($name), $kind, concat!($($doc),+)) $(.$method($($value)?))*
        ),+];
    )+};
}

pub(super) use schema_table;

impl SchemaKey {
    /// A key that may be absent and takes effect at a restart.
    pub(super) const fn new(name: &'static str, kind: ValueKind, doc: &'static str) -> Self {
        Self {
            name,
            kind,
            requirement: KeyRequirement::Optional,
            doc: doc.trim_ascii_start(),
            applied_at: AppliedAt::Restart,
            is_secret: false,
            is_of_quota: false,
            algorithm: None,
            is_per_instance: false,
        }
    }

    pub(super) const fn required(mut self) -> Self {
        self.requirement = KeyRequirement::Required;
        self
    }

    pub(super) const fn default(mut self, text: &'static str) -> Self {
        self.requirement = KeyRequirement::Default(text);
        self
    }

    /// A reload applies the key, or all keys of the table.
    pub(super) const fn reload(mut self) -> Self {
        self.applied_at = AppliedAt::Reload;
        self
    }

    pub(super) const fn credential(mut self) -> Self {
        self.applied_at = AppliedAt::CredentialReload;
        self
    }

    pub(super) const fn secret(mut self) -> Self {
        self.is_secret = true;
        self
    }

    pub(super) const fn of_quota(mut self) -> Self {
        self.is_of_quota = true;
        self
    }

    pub(super) const fn only_for(mut self, algorithm: &'static str) -> Self {
        self.algorithm = Some(algorithm);
        self
    }

    pub(super) const fn per_instance(mut self) -> Self {
        self.is_per_instance = true;
        self
    }
}

pub(super) const fn duration(min: Duration, max: Duration) -> ValueKind {
    ValueKind::Duration { min, max }
}

pub(super) const fn conditions(noun: &'static str, parse_part: PartParser) -> ValueKind {
    ValueKind::Conditions { noun, parse_part }
}

pub(super) const fn integer(min: i64, max: i64) -> ValueKind {
    ValueKind::Integer { min, max }
}

pub(super) const fn byte_size(min: u64, max: u64) -> ValueKind {
    ValueKind::ByteSize { min, max }
}

/// Formats the expected value, to follow the word "expected".
impl ValueKind {
    /// The kind of plain values, if a table or a keyword is valid too.
    pub(crate) fn first(&self) -> &Self {
        match self {
            Self::Either(first, ..) => first,
            kind => kind,
        }
    }

    /// The keys of the table, or of the tables in the list.
    pub(crate) fn nested_keys(&self) -> &'static [SchemaKey] {
        match self {
            Table(table) | TableList(table) => table,
            Self::Either(_, _, second) => second.nested_keys(),
            _ => &[],
        }
    }
}

impl fmt::Display for ValueKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Bool => f.write_str("true or false"),
            ValueKind::Integer {
                min: i64::MIN,
                max: i64::MAX,
            } => f.write_str("a whole number"),
            ValueKind::Integer { min, max } => write!(f, "a whole number from {min} to {max}"),
            ValueKind::Either(first, text, _) => write!(f, "{first}{text}"),
            Fraction => f.write_str("a number from 0 to 1"),
            Factor => f.write_str("a number from -1000000 to 1000000 with at most three decimals"),
            ValueKind::Duration { min, max } => write_duration_range(f, *min, *max),
            ValueKind::ByteSize { min, max } => {
                write!(f, "a size such as \"64KiB\", \"1MiB\"")?;
                if *min > 0 {
                    write!(f, ", at least {min} bytes")?;
                }
                if *max < u64::MAX {
                    write!(f, ", at most {max} bytes")
                } else {
                    Ok(())
                }
            }
            Keyword(words) => f.write_str(&join_alternatives(words)),
            Text(description) | Map(description) => f.write_str(description),
            ValueKind::Conditions { .. } => f.write_str(
                "a table such as { name = \"value\" }, { name = [\"one\", \"other\"] }, { name = { regex = \"…\" } } or { name = { present = true } }",
            ),
            TextList(description) => write!(f, "a list of {description}"),
            ValueKind::StatusList => f.write_str("a list of statuses such as 401 or \"4xx\""),
            ValueKind::ThresholdList => f.write_str(
                "1 to 4 ascending numbers above 0, at most 1, with up to three decimals, such as [0.8, 1.0]",
            ),
            Table(_) => f.write_str("a table"),
            TableList(_) => f.write_str("a list of tables"),
        }
    }
}

fn write_duration_range(f: &mut fmt::Formatter<'_>, min: Duration, max: Duration) -> fmt::Result {
    write!(f, "a duration such as \"250ms\", \"1s\", \"5m\"")?;
    if min.is_zero() {
        write!(f, ", at most {}", format_duration(max))
    } else {
        write!(
            f,
            ", from {} to {}",
            format_duration(min),
            format_duration(max)
        )
    }
}

/// Formats alternatives: `"a", "b" or "c"`.
pub(super) fn join_alternatives(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        _ => quoted.concat(),
    }
}
