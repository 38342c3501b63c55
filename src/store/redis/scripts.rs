//! The Lua programs: their texts, the commands that run them, and the parsers of their replies.

mod arguments;
mod counter_key;
mod program;
mod reply;

use crate::clock::Clock;
use crate::limiter::{Charge, PolicyCharges};
use crate::store::Settlement;
use arguments::push_settlement_arguments;
use program::{
    LuaProgram, PROGRAM_COUNT, SETTLE_FLAG, program_flags_for_algorithm, program_flags_for_request,
};
use redis::{Arg, Cmd, RedisWrite};
use std::sync::OnceLock;

pub(super) use arguments::{push_charge_argument, push_time_argument};
pub(super) use counter_key::push_hex_id;
pub(super) use program::{OVERRIDE_FLAG, program_flags_for_charge};
pub(super) use reply::{CallerPosition, parse_now_us};

/// Maximum arguments per charge (see `decide.lua` and `settle.lua`).
const MAX_ARGS_PER_CHARGE: usize = 6;

/// The programs for Redis, and the names of the keys that hold their state.
///
/// There is one program per set of algorithms and purposes, built on first use: Redis creates every
/// function again on each call, so a program contains only the needed ones. The texts depend on
/// nothing else, and variable values are arguments, so Redis caches few scripts.
#[derive(Debug)]
pub struct ScriptLibrary {
    programs: [OnceLock<Box<LuaProgram>>; PROGRAM_COUNT],
    /// The start of all keys, up to and including the brace that opens the hash tag.
    counter_key_prefix: String,
    /// Selects the periods of calendars that a call may need.
    clock: Clock,
}

impl ScriptLibrary {
    pub fn new(key_prefix: &str) -> Self {
        Self::with_clock(key_prefix, Clock::system())
    }

    pub fn with_clock(key_prefix: &str, clock: Clock) -> Self {
        // A brace in the prefix would move the hash tag.
        let prefix = key_prefix.replace('{', "%7B").replace('}', "%7D");
        Self {
            programs: [const { OnceLock::new() }; PROGRAM_COUNT],
            counter_key_prefix: format!("{prefix}:v1:{{"),
            clock,
        }
    }

    /// The wall clock of this machine, with the steps that it made since the start.
    pub(super) fn read_wall_clock(&self) -> u64 {
        self.clock.wall_us()
    }

    /// The text of the program that decides these charges.
    pub fn script_text(&self, request: &[PolicyCharges<'_>]) -> &str {
        self.program_for_flags(program_flags_for_request(request))
            .map_or("", |program| &program.text)
    }

    /// Builds the commands that load all programs used since the start.
    pub fn load_commands_for_used_programs(&self) -> redis::Pipeline {
        let mut pipeline = redis::pipe();
        for program in self.programs.iter().filter_map(OnceLock::get) {
            pipeline.cmd("SCRIPT").arg("LOAD").arg(&program.text);
        }
        pipeline
    }

    /// Builds the EVAL command for an EVALSHA command of a used program. Returns `None` for other
    /// commands.
    pub(super) fn replace_digest_by_text(&self, command: &Cmd) -> Option<Cmd> {
        let mut args = command.args_iter().map(|arg| match arg {
            Arg::Simple(bytes) => bytes,
            _ => b"",
        });
        let digest = args
            .next()
            .filter(|name| *name == b"EVALSHA")
            .and(args.next())?;
        let mut programs = self.programs.iter().filter_map(OnceLock::get);
        let program = programs.find(|program| program.sha.as_bytes() == digest)?;
        let mut text_command = redis::cmd("EVAL");
        text_command.arg(&program.text);
        args.for_each(|arg| text_command.write_arg(arg));
        Some(text_command)
    }

    /// Builds the command that settles charges.
    pub fn settle_command(&self, settlements: &[Settlement<'_>], time_us: Option<u64>) -> Cmd {
        let algorithms = settlements.iter().fold(SETTLE_FLAG, |flags, settlement| {
            flags | program_flags_for_algorithm(settlement.limit.algorithm)
        });
        let mut command = self.start_evalsha_command(algorithms, settlements.len());
        let mut key = String::with_capacity(192);
        for settlement in settlements {
            key.clear();
            self.push_counter_key(&mut key, settlement.counter());
            command.write_arg(key.as_bytes());
        }
        push_time_argument(&mut command, time_us);
        for settlement in settlements {
            let now_us = || time_us.unwrap_or_else(|| self.read_wall_clock());
            push_settlement_arguments(&mut command, settlement, now_us);
        }
        command
    }

    /// Builds the command that reads the counters of these names, without any change. The charges
    /// have their limits, and no cost.
    pub(super) fn read_command<'n>(
        &self,
        names: impl Iterator<Item = &'n str>,
        request: &[PolicyCharges<'_>],
    ) -> Cmd {
        let flags = program_flags_for_request(request);
        let mut command = self.start_evalsha_command(flags, number_charges(request).count());
        names.for_each(|name| command.write_arg(name.as_bytes()));
        push_time_argument(&mut command, None);
        for (nth, (policy_number, charge)) in number_charges(request).enumerate() {
            let mut argument = String::with_capacity(64);
            let place = (policy_number, nth > 0);
            // With rate 0, a debt is paid back at the rate of its last charge.
            push_charge_argument(&mut argument, &charge, place, 0, || self.read_wall_clock());
            command.write_arg(argument.as_bytes());
        }
        command
    }

    fn program_for_flags(&self, flags: usize) -> Option<&LuaProgram> {
        self.programs
            .get(flags)
            .map(|program| &**program.get_or_init(|| Box::new(LuaProgram::new(flags))))
    }

    pub(super) fn start_evalsha_command(&self, flags: usize, count: usize) -> Cmd {
        let mut command =
            Cmd::with_capacity(4 + count * (1 + MAX_ARGS_PER_CHARGE), 64 + count * 224);
        // A program with overrides has two keys per charge.
        let key_count = match flags & OVERRIDE_FLAG {
            0 => count,
            _ => 2 * count,
        };
        command.write_arg(b"EVALSHA");
        let sha = self
            .program_for_flags(flags)
            .map_or("", |program| &program.sha);
        command.write_arg(sha.as_bytes());
        command.write_arg(itoa::Buffer::new().format(key_count).as_bytes());
        command
    }
}

/// The charges of a request, each with the number of its policy within the call.
pub(super) fn number_charges<'r, 'a>(
    request: &'r [PolicyCharges<'a>],
) -> impl Iterator<Item = (u64, Charge<'r, 'a>)> {
    let policies = (0..).zip(request);
    policies.flat_map(|(number, policy)| policy.charges().map(move |charge| (number, charge)))
}

#[cfg(test)]
mod tests;
