//! The commands on keys that tidegate's scripts use, and the few that it sends without a script.

use super::dataset::{Dataset, Entry, SortedSet, Value};
use crate::sim::resp::Reply;

const WRONG_TYPE: &str = "WRONGTYPE Operation against a key holding the wrong kind of value";

/// One server's keys during one command.
#[derive(Debug)]
pub(crate) struct KeySpace {
    pub(crate) dataset: Dataset,
    /// The server's clock, which stands still during a script.
    pub(crate) time_us: u64,
    /// The world's clock.
    pub(crate) world_us: u64,
    /// Elements read or written: the work of the command.
    pub(crate) work: u64,
    /// Why writes are refused, if they are.
    pub(crate) write_error: Option<&'static str>,
}

type CommandResult = Result<Reply, String>;

impl KeySpace {
    /// Runs one command on keys.
    pub(crate) fn run(&mut self, command: &[Vec<u8>]) -> Reply {
        self.work += 1;
        let name = command[0].to_ascii_uppercase();
        let arguments = &command[1..];
        if let (Some(error), false) = (self.write_error, is_read(&name)) {
            return Reply::error(error);
        }
        let result = match name.as_slice() {
            b"TIME" => Ok(self.time_reply()),
            b"GET" => self.get_text(arguments),
            b"MGET" => Ok(self.get_texts(arguments)),
            b"SET" => self.set_text(arguments),
            b"INCRBY" => self.increase(&arguments[0], number(&arguments[1])),
            b"DECRBY" => self.increase(&arguments[0], -number(&arguments[1])),
            b"DEL" => Ok(self.delete(arguments)),
            b"PEXPIRE" => Ok(self.expire(
                &arguments[0],
                self.time_us / 1000 + number(&arguments[1]) as u64,
            )),
            b"PEXPIREAT" => Ok(self.expire(&arguments[0], number(&arguments[1]) as u64)),
            b"PTTL" => Ok(self.time_to_live(&arguments[0])),
            b"SCAN" => Ok(self.scan(arguments)),
            b"EXISTS" => Ok(Reply::Int(i64::from(self.exists(&arguments[0])))),
            _ => self.run_on_sorted_set(&name, arguments),
        };
        result.unwrap_or_else(Reply::Error)
    }

    pub(crate) fn exists(&self, key: &[u8]) -> bool {
        self.dataset.get(key, self.time_us / 1000).is_some()
    }

    pub(crate) fn time_reply(&self) -> Reply {
        let (seconds, micros) = (self.time_us / 1_000_000, self.time_us % 1_000_000);
        Reply::Array(vec![Reply::text(seconds), Reply::text(micros)])
    }

    fn put(&mut self, key: &[u8], entry: Option<Entry>) {
        self.dataset.put(key, entry, self.world_us);
    }

    fn get_text(&self, arguments: &[Vec<u8>]) -> CommandResult {
        match self.dataset.get(&arguments[0], self.time_us / 1000) {
            None => Ok(Reply::Nil),
            Some(Entry {
                value: Value::Text(text),
                ..
            }) => Ok(Reply::Bulk(text.clone())),
            Some(_) => Err(WRONG_TYPE.to_owned()),
        }
    }

    fn get_texts(&self, keys: &[Vec<u8>]) -> Reply {
        let text = |key: &Vec<u8>| self.get_text(std::slice::from_ref(key));
        Reply::Array(
            keys.iter()
                .map(|key| text(key).unwrap_or(Reply::Nil))
                .collect(),
        )
    }

    fn set_text(&mut self, arguments: &[Vec<u8>]) -> CommandResult {
        let expires_at_ms = match arguments {
            [_, _, option, at_ms] if option == b"PXAT" => Some(number(at_ms) as u64),
            [_, _] => None,
            _ => return Err("ERR syntax error".to_owned()),
        };
        // A time in the past deletes the key.
        let entry = Entry {
            value: Value::Text(arguments[1].clone()),
            expires_at_ms,
        };
        let is_past = expires_at_ms.is_some_and(|at_ms| at_ms <= self.time_us / 1000);
        self.put(&arguments[0], (!is_past).then_some(entry));
        Ok(Reply::OK)
    }

    /// The expiry stays.
    fn increase(&mut self, key: &[u8], amount: i64) -> CommandResult {
        let expires_at_ms =
            (self.dataset.get(key, self.time_us / 1000)).and_then(|entry| entry.expires_at_ms);
        let value: i64 = match self.get_text(std::slice::from_ref(&key.to_vec()))? {
            Reply::Bulk(text) => std::str::from_utf8(&text)
                .ok()
                .and_then(|text| text.parse().ok())
                .ok_or("ERR value is not an integer or out of range")?,
            _ => 0,
        };
        let value = value + amount;
        let entry = Entry {
            value: Value::Text(value.to_string().into_bytes()),
            expires_at_ms,
        };
        self.put(key, Some(entry));
        Ok(Reply::Int(value))
    }

    fn delete(&mut self, keys: &[Vec<u8>]) -> Reply {
        let existing: Vec<_> = keys
            .iter()
            .filter(|key| self.exists(key))
            .cloned()
            .collect();
        existing.iter().for_each(|key| self.put(key, None));
        Reply::Int(existing.len() as i64)
    }

    fn expire(&mut self, key: &[u8], at_ms: u64) -> Reply {
        let now_ms = self.time_us / 1000;
        let Some(mut entry) = self.dataset.get(key, now_ms).cloned() else {
            return Reply::Int(0);
        };
        entry.expires_at_ms = Some(at_ms);
        self.put(key, (at_ms > now_ms).then_some(entry));
        Reply::Int(1)
    }

    /// In ms; -1 without an expiry, -2 without a key.
    fn time_to_live(&self, key: &[u8]) -> Reply {
        let now_ms = self.time_us / 1000;
        Reply::Int(match self.dataset.get(key, now_ms) {
            None => -2,
            Some(entry) => entry
                .expires_at_ms
                .map_or(-1, |at_ms| (at_ms - now_ms) as i64),
        })
    }

    /// Returns all keys that match in one step. The pattern may contain `*`.
    fn scan(&self, arguments: &[Vec<u8>]) -> Reply {
        let pattern = String::from_utf8_lossy(&arguments[2]);
        let parts: Vec<&str> = pattern.split('*').collect();
        let is_match = |name: &str| {
            let mut rest = name.strip_prefix(parts[0]);
            for part in &parts[1..] {
                rest = rest
                    .and_then(|rest| rest.split_once(part))
                    .map(|(_, rest)| rest);
            }
            rest.is_some()
        };
        let names = self.dataset.names().filter(|name| self.exists(name));
        let names = names.filter(|name| is_match(&String::from_utf8_lossy(name)));
        let names = names.map(|name| Reply::Bulk(name.clone())).collect();
        Reply::Array(vec![Reply::text(0), Reply::Array(names)])
    }

    fn sorted_set(&self, key: &[u8]) -> Result<Option<&SortedSet>, String> {
        match self.dataset.get(key, self.time_us / 1000) {
            None => Ok(None),
            Some(Entry {
                value: Value::Sorted(set),
                ..
            }) => Ok(Some(set)),
            Some(_) => Err(WRONG_TYPE.to_owned()),
        }
    }

    /// Changes a sorted set. An empty one is deleted.
    fn change_sorted_set(
        &mut self,
        key: &[u8],
        change: impl FnOnce(&mut SortedSet) -> i64,
    ) -> CommandResult {
        let now_ms = self.time_us / 1000;
        let mut set = self.sorted_set(key)?.cloned().unwrap_or_default();
        let expires_at_ms = self
            .dataset
            .get(key, now_ms)
            .and_then(|entry| entry.expires_at_ms);
        let result = change(&mut set);
        let entry = Entry {
            value: Value::Sorted(set),
            expires_at_ms,
        };
        let is_empty = matches!(&entry.value, Value::Sorted(set) if set.len() == 0);
        self.put(key, (!is_empty).then_some(entry));
        Ok(Reply::Int(result))
    }

    fn run_on_sorted_set(&mut self, name: &[u8], arguments: &[Vec<u8>]) -> CommandResult {
        let (key, rest) = arguments
            .split_first()
            .ok_or("ERR wrong number of arguments")?;
        self.work += rest.len() as u64;
        match name {
            b"ZADD" => self.change_sorted_set(key, |set| {
                rest.chunks(2)
                    .filter(|pair| set.insert(&pair[1], number(&pair[0])))
                    .count() as i64
            }),
            b"ZREM" => self.change_sorted_set(key, |set| {
                rest.iter().filter(|member| set.remove(member)).count() as i64
            }),
            b"ZREMRANGEBYRANK" => self.change_sorted_set(key, |set| {
                let members = set.by_rank(number(&rest[0]), number(&rest[1]));
                members
                    .iter()
                    .filter(|(member, _)| set.remove(member))
                    .count() as i64
            }),
            b"ZREMRANGEBYSCORE" => self.change_sorted_set(key, |set| {
                let (lowest, highest) = (bound(&rest[0], 1), bound(&rest[1], -1));
                let members: Vec<_> = set
                    .by_score(lowest, highest)
                    .map(|(member, _)| member.clone())
                    .collect();
                members.iter().filter(|member| set.remove(member)).count() as i64
            }),
            _ => self.read_sorted_set(name, key, rest),
        }
    }

    fn read_sorted_set(&mut self, name: &[u8], key: &[u8], rest: &[Vec<u8>]) -> CommandResult {
        let empty = SortedSet::default();
        let set = self.sorted_set(key)?.unwrap_or(&empty);
        let reply = match name {
            b"ZCARD" => Reply::Int(set.len() as i64),
            b"ZCOUNT" => Reply::Int(
                set.by_score(bound(&rest[0], 1), bound(&rest[1], -1))
                    .count() as i64,
            ),
            b"ZRANK" => set
                .rank(&rest[0])
                .map_or(Reply::Nil, |rank| Reply::Int(rank as i64)),
            b"ZLEXCOUNT" => Reply::Int(set.count_before(&rest[1][1..]) as i64),
            b"ZRANGE" => members_reply(
                &set.by_rank(number(&rest[0]), number(&rest[1])),
                rest.len() > 2,
            ),
            b"ZRANGEBYSCORE" => {
                let has = |option: &[u8]| rest.iter().any(|text| text == option);
                let limit = rest.iter().position(|text| text == b"LIMIT");
                let count = limit.map_or(usize::MAX, |at| number(&rest[at + 2]) as usize);
                let members: Vec<_> = set
                    .by_score(bound(&rest[0], 1), bound(&rest[1], -1))
                    .take(count)
                    .map(|(member, score)| (member.clone(), score))
                    .collect();
                members_reply(&members, has(b"WITHSCORES"))
            }
            other => Reply::error(format!(
                "ERR unknown command '{}'",
                String::from_utf8_lossy(other)
            )),
        };
        if let Reply::Array(items) = &reply {
            self.work += items.len() as u64;
        }
        Ok(reply)
    }
}

fn is_read(name: &[u8]) -> bool {
    matches!(
        name,
        b"TIME"
            | b"PTTL"
            | b"GET"
            | b"MGET"
            | b"EXISTS"
            | b"ZCARD"
            | b"ZCOUNT"
            | b"ZRANK"
            | b"ZLEXCOUNT"
            | b"ZRANGE"
            | b"ZRANGEBYSCORE"
    )
}

fn members_reply(members: &[(Vec<u8>, i64)], with_scores: bool) -> Reply {
    let texts = members.iter().flat_map(|(member, score)| {
        let score = with_scores.then(|| Reply::text(score));
        std::iter::once(Reply::Bulk(member.clone())).chain(score)
    });
    Reply::Array(texts.collect())
}

pub(crate) fn number(text: &[u8]) -> i64 {
    let text = std::str::from_utf8(text).unwrap_or_default();
    text.parse()
        .unwrap_or_else(|_| text.parse::<f64>().unwrap_or_default() as i64)
}

/// A bound of a score range; an exclusive one is moved by `step`.
fn bound(text: &[u8], step: i64) -> i64 {
    match text {
        b"-inf" => i64::MIN,
        b"+inf" => i64::MAX,
        [b'(', rest @ ..] => number(rest) + step,
        text => number(text),
    }
}
