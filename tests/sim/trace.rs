//! What happened in a run, for its hash and for the report of a violation.

use crate::sim::network::{ClientAction, ConnectionId};
use crate::sim::resp::Command;
use crate::sim::scenario::FaultKind;
use std::hash::{DefaultHasher, Hash, Hasher};

/// The longest part of a command or reply in the text of a trace.
const SHOWN_BYTES: usize = 160;

#[derive(Debug, Default)]
pub(crate) struct Trace {
    hasher: DefaultHasher,
    /// Text lines are kept only for a report.
    pub(crate) is_verbose: bool,
    pub(crate) lines: Vec<(u64, String)>,
    pub(crate) commands: u64,
    /// Credits of charges that Redis was asked to return.
    pub(crate) credits: u64,
}

impl Trace {
    /// The hash of all events so far.
    pub(crate) fn hash(&self) -> u64 {
        self.hasher.finish()
    }

    pub(crate) fn record_action(&mut self, at_us: u64, id: ConnectionId, action: &ClientAction) {
        match action {
            ClientAction::Send(bytes) => (at_us, id, bytes).hash(&mut self.hasher),
            ClientAction::Connect(address, _) => (at_us, id, address).hash(&mut self.hasher),
            ClientAction::Close => id.hash(&mut self.hasher),
        }
    }

    pub(crate) fn record_fault(&mut self, at_us: u64, kind: &FaultKind) {
        let text = format!("FAULT {kind:?}");
        text.hash(&mut self.hasher);
        self.lines.push((at_us, text));
    }

    pub(crate) fn record_command(
        &mut self,
        at_us: u64,
        server: usize,
        command: &Command,
        reply: &[u8],
    ) {
        self.commands += 1;
        let is_credit = |word: &&Vec<u8>| word.as_slice() == b"credit";
        self.credits += command.iter().filter(is_credit).count() as u64;
        (at_us, server, reply).hash(&mut self.hasher);
        if self.is_verbose {
            let shown = |bytes: &[u8]| {
                let text =
                    String::from_utf8_lossy(&bytes[..bytes.len().min(SHOWN_BYTES)]).into_owned();
                text.replace("\r\n", " ").replace('\n', " ")
            };
            let words: Vec<String> = command.iter().skip(2).map(|word| shown(word)).collect();
            let name = String::from_utf8_lossy(&command[0]).into_owned();
            self.lines.push((
                at_us,
                format!(
                    "server {server}: {name} {} -> {}",
                    words.join(" "),
                    shown(reply)
                ),
            ));
        }
    }
}
