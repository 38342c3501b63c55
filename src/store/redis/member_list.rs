//! The instances known by their heartbeats, for operators.
//!
//! The entry of an instance in the membership sets is its id, followed by what describes it:
//! version, name and admin address, separated by spaces. Instances of older versions have only
//! their id as the entry, and count entries of either form.

use redis::{Value, from_redis_value};
use std::time::Duration;

pub(super) const MEMBER_LIST_SCRIPT: &str = include_str!("membership_list.lua");

/// Maximum number of listed instances.
pub(super) const MAX_LISTED_MEMBERS: usize = 1_000;

/// Maximum length of the version, the name and the address in an entry.
const MAX_FIELD_BYTES: usize = 255;

/// Stands for an absent address.
const ABSENT: &str = "-";

/// Score offset of an instance with usage to write back: see `membership.lua`.
const PENDING_OFFSET: u64 = 1 << 52;

/// The description of an instance in its heartbeat.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberDescription {
    pub version: String,
    pub name: String,
    /// Host and port of the admin endpoint, if other instances can reach it.
    pub admin_address: Option<String>,
}

/// An instance that has sent a heartbeat recently.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FleetMember {
    pub id: String,
    /// `None` for instances of older versions.
    pub description: Option<MemberDescription>,
    pub heartbeat_age: Duration,
    /// Whether the instance has usage of an outage to write back.
    pub is_pending: bool,
}

/// The instances that share the limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberList {
    pub members: Vec<FleetMember>,
    /// The number of instances, of which not all may be listed.
    pub total: usize,
}

impl MemberDescription {
    /// The entry of the instance with this id.
    pub(super) fn entry_for(&self, id: &str) -> String {
        let [version, name] = [&self.version, &self.name].map(|text| to_field(text));
        let address = self.admin_address.as_deref().map(to_field);
        format!(
            "{id} {version} {name} {}",
            address.as_deref().unwrap_or(ABSENT)
        )
    }
}

/// Returns a text without characters that separate or break fields.
fn to_field(text: &str) -> String {
    let printable = text
        .chars()
        .map(|c| if c.is_ascii_graphic() { c } else { '_' });
    let field: String = printable.take(MAX_FIELD_BYTES).collect();
    if field.is_empty() {
        "_".to_owned()
    } else {
        field
    }
}

impl MemberList {
    /// Parses the reply of `membership_list.lua`. Entries of other programs, which may be any
    /// bytes, are left out.
    pub(super) fn from_reply(reply: Value, member_ttl: Duration) -> Option<Self> {
        let (now_us, total, pairs): (u64, usize, Vec<(Vec<u8>, f64)>) =
            from_redis_value(reply).ok()?;
        let mut members: Vec<_> = pairs
            .iter()
            .filter_map(|(entry, score)| {
                parse_member(std::str::from_utf8(entry).ok()?, *score, now_us)
            })
            .filter(|member| member.heartbeat_age <= member_ttl)
            .collect();
        members.sort_by_cached_key(|member| {
            let name = member.description.as_ref().map(|own| own.name.clone());
            (name, member.id.clone())
        });
        Some(Self { members, total })
    }
}

fn parse_member(entry: &str, score: f64, now_us: u64) -> Option<FleetMember> {
    #[allow(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a score is a whole number below 2^53"
    )]
    let score = score as u64;
    let (seen_us, is_pending) = match score.checked_sub(PENDING_OFFSET) {
        Some(seen_us) => (seen_us, true),
        None => (score, false),
    };
    let mut fields = entry.split(' ');
    let id = fields.next().filter(|id| is_valid_field(id))?;
    let description = match (fields.next(), fields.next(), fields.next()) {
        (Some(version), Some(name), Some(address))
            if [version, name, address].into_iter().all(is_valid_field) =>
        {
            Some(MemberDescription {
                version: version.to_owned(),
                name: name.to_owned(),
                admin_address: (address != ABSENT).then(|| address.to_owned()),
            })
        }
        _ => None,
    };
    Some(FleetMember {
        id: id.to_owned(),
        description,
        heartbeat_age: Duration::from_micros(now_us.saturating_sub(seen_us)),
        is_pending,
    })
}

fn is_valid_field(text: &str) -> bool {
    (1..=MAX_FIELD_BYTES).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW_US: u64 = 1_700_000_000_000_000;

    fn description(name: &str, admin_address: Option<&str>) -> MemberDescription {
        MemberDescription {
            version: "1.2.3".to_owned(),
            name: name.to_owned(),
            admin_address: admin_address.map(str::to_owned),
        }
    }

    #[test]
    fn an_entry_round_trips() {
        for described in [
            description("orders-1", Some("10.0.0.1:9090")),
            description("orders-1", None),
        ] {
            let entry = described.entry_for("id");
            let member = parse_member(&entry, (NOW_US - 5) as f64, NOW_US).unwrap();
            assert_eq!(member.id, "id");
            assert_eq!(member.description, Some(described));
            assert_eq!(member.heartbeat_age, Duration::from_micros(5));
            assert!(!member.is_pending);
        }
    }

    #[test]
    fn an_entry_never_contains_more_fields_than_it_should() {
        let hostile = description("a b\n\u{1b}é", Some(""));
        assert_eq!(hostile.entry_for("id"), "id 1.2.3 a_b___ _");
        let long = description(&"x".repeat(999), None).entry_for("id");
        assert_eq!(long.len(), "id 1.2.3  -".len() + MAX_FIELD_BYTES);
    }

    #[test]
    fn an_entry_of_other_bytes_does_not_hide_the_others() {
        let pair = |entry: &[u8]| {
            let score = Value::BulkString(NOW_US.to_string().into_bytes());
            [Value::BulkString(entry.to_vec()), score]
        };
        let pairs = [pair(b"\xff\xfe"), pair(b"0123abcd")].concat();
        let now = i64::try_from(NOW_US).unwrap();
        let reply = Value::Array(vec![Value::Int(now), Value::Int(2), Value::Array(pairs)]);
        let list = MemberList::from_reply(reply, Duration::from_secs(5)).unwrap();
        let ids: Vec<_> = list.members.iter().map(|member| &*member.id).collect();
        assert_eq!((ids, list.total), (vec!["0123abcd"], 2));
    }

    #[test]
    fn entries_of_older_versions_and_of_other_programs_are_read() {
        let member = parse_member("0123abcd", (PENDING_OFFSET + NOW_US) as f64, NOW_US).unwrap();
        assert_eq!((member.description, member.is_pending), (None, true));
        assert_eq!(parse_member("", 1.0, NOW_US), None);
        let odd = parse_member("id \u{1b}[2J x y", 1.0, NOW_US).unwrap();
        assert_eq!(odd.description, None);
    }
}
