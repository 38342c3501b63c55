//! Runs the real scripts: `redis.call`, `redis.pcall` and `struct` over a [`KeySpace`].

use super::commands::KeySpace;
use crate::sim::resp::Reply;
use mlua::{Function, Lua, MultiValue, Table, Value, Variadic};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// `redis.call` raises an error table, as Redis 7 does.
const PRELUDE: &str = "
redis = { pcall = redis_pcall }
function redis.call(...)
  local reply = redis_pcall(...)
  if type(reply) == 'table' and reply.err then error(reply) end
  return reply
end
struct = { pack = struct_pack, unpack = struct_unpack }
";

/// One interpreter for all servers of a world. Scripts leave no state in it.
pub(crate) struct ScriptEngine {
    lua: Lua,
    /// By SHA-1 of the text.
    compiled: HashMap<String, Function>,
    keyspace: Rc<RefCell<Option<KeySpace>>>,
}

impl ScriptEngine {
    pub(crate) fn new() -> Self {
        let lua = Lua::new();
        let keyspace: Rc<RefCell<Option<KeySpace>>> = Rc::default();
        let shared = Rc::clone(&keyspace);
        let call = lua.create_function(move |lua, arguments: Variadic<Value>| {
            let command = arguments.iter().map(value_bytes).collect::<Vec<_>>();
            let mut keyspace = shared.borrow_mut();
            let reply = keyspace
                .as_mut()
                .map_or(Reply::Nil, |keys| keys.run(&command));
            reply_to_lua(lua, &reply)
        });
        let globals = lua.globals();
        globals.set("redis_pcall", call.unwrap()).unwrap();
        globals
            .set("struct_pack", lua.create_function(struct_pack).unwrap())
            .unwrap();
        globals
            .set("struct_unpack", lua.create_function(struct_unpack).unwrap())
            .unwrap();
        lua.load(PRELUDE).exec().unwrap();
        Self {
            lua,
            compiled: HashMap::new(),
            keyspace,
        }
    }

    /// Runs a script whose text has the given SHA-1. Returns its reply and the keys afterwards.
    pub(crate) fn run(
        &mut self,
        sha: &str,
        text: &[u8],
        keys: &[Vec<u8>],
        arguments: &[Vec<u8>],
        keyspace: KeySpace,
    ) -> (Reply, KeySpace) {
        let lua = &self.lua;
        let function = self
            .compiled
            .entry(sha.to_owned())
            .or_insert_with(|| lua.load(text).set_name("@script").into_function().unwrap());
        let list = |items: &[Vec<u8>]| {
            let strings = items.iter().map(|item| lua.create_string(item).unwrap());
            lua.create_sequence_from(strings).unwrap()
        };
        lua.globals().set("KEYS", list(keys)).unwrap();
        lua.globals().set("ARGV", list(arguments)).unwrap();
        *self.keyspace.borrow_mut() = Some(keyspace);
        let reply = match function.call::<Value>(()) {
            Ok(value) => lua_to_reply(&value),
            Err(error) => Reply::error(format!("ERR {error}").replace(['\r', '\n'], " ")),
        };
        let keyspace = self
            .keyspace
            .borrow_mut()
            .take()
            .expect("the script's keys");
        (reply, keyspace)
    }
}

fn value_bytes(value: &Value) -> Vec<u8> {
    match value {
        Value::String(text) => text.as_bytes().to_vec(),
        Value::Integer(number) => number.to_string().into_bytes(),
        Value::Number(number) => number.to_string().into_bytes(),
        other => panic!("redis.call with {other:?}"),
    }
}

fn reply_to_lua(lua: &Lua, reply: &Reply) -> mlua::Result<Value> {
    let field = |name: &str, text: &str| {
        let table = lua.create_table()?;
        table.set(name, text)?;
        Ok(Value::Table(table))
    };
    match reply {
        Reply::Status(text) => field("ok", text),
        Reply::Error(text) => field("err", text),
        Reply::Int(number) => Ok(Value::Number(*number as f64)),
        Reply::Nil => Ok(Value::Boolean(false)),
        Reply::Bulk(bytes) => Ok(Value::String(lua.create_string(bytes)?)),
        Reply::Array(items) => {
            let table = lua.create_table_with_capacity(items.len(), 0)?;
            for item in items {
                table.raw_push(reply_to_lua(lua, item)?)?;
            }
            Ok(Value::Table(table))
        }
    }
}

fn lua_to_reply(value: &Value) -> Reply {
    match value {
        Value::Integer(number) => Reply::Int(*number),
        Value::Number(number) => Reply::Int(*number as i64),
        Value::String(text) => Reply::Bulk(text.as_bytes().to_vec()),
        Value::Boolean(true) => Reply::Int(1),
        Value::Table(table) => table_to_reply(table),
        _ => Reply::Nil,
    }
}

fn table_to_reply(table: &Table) -> Reply {
    if let Ok(Some(text)) = table.get::<Option<mlua::LuaString>>("err") {
        return Reply::error(text.to_string_lossy());
    }
    let items = table.sequence_values::<Value>();
    Reply::Array(items.map(|item| lua_to_reply(&item.unwrap())).collect())
}

/// The widths in a format such as `>I7I7`.
fn struct_widths(format: &[u8]) -> Vec<usize> {
    let digits = format.iter().filter(|byte| byte.is_ascii_digit());
    digits.map(|digit| usize::from(digit - b'0')).collect()
}

fn struct_pack(
    lua: &Lua,
    (format, numbers): (mlua::LuaString, Variadic<f64>),
) -> mlua::Result<Value> {
    let mut packed = Vec::new();
    for (width, number) in struct_widths(&format.as_bytes()).into_iter().zip(numbers) {
        packed.extend(&(number as u64).to_be_bytes()[8 - width..]);
    }
    Ok(Value::String(lua.create_string(packed)?))
}

fn struct_unpack(
    _: &Lua,
    (format, data, position): (mlua::LuaString, mlua::LuaString, Option<f64>),
) -> mlua::Result<MultiValue> {
    let data = data.as_bytes();
    let mut at = position.map_or(0, |position| position as usize - 1);
    let mut values = Vec::new();
    for width in struct_widths(&format.as_bytes()) {
        let bytes = data
            .get(at..at + width)
            .ok_or_else(|| mlua::Error::runtime("data string too short"))?;
        let number = bytes
            .iter()
            .fold(0_u64, |number, byte| number << 8 | u64::from(*byte));
        values.push(Value::Number(number as f64));
        at += width;
    }
    values.push(Value::Number((at + 1) as f64));
    Ok(MultiValue::from_iter(values))
}
