//! RESP2: requests as arrays of bulk strings, and replies.

/// A reply, or a value inside one.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Reply {
    Status(&'static str),
    Error(String),
    Int(i64),
    Bulk(Vec<u8>),
    Nil,
    Array(Vec<Reply>),
}

pub(crate) type Command = Vec<Vec<u8>>;

impl Reply {
    pub(crate) const OK: Self = Self::Status("OK");

    pub(crate) fn text(text: impl ToString) -> Self {
        Self::Bulk(text.to_string().into_bytes())
    }

    pub(crate) fn error(text: impl ToString) -> Self {
        Self::Error(text.to_string())
    }

    /// Appends the encoded reply.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Status(text) => out.extend(format!("+{text}\r\n").bytes()),
            Self::Error(text) => out.extend(format!("-{text}\r\n").bytes()),
            Self::Int(number) => out.extend(format!(":{number}\r\n").bytes()),
            Self::Nil => out.extend(b"$-1\r\n"),
            Self::Bulk(bytes) => {
                out.extend(format!("${}\r\n", bytes.len()).bytes());
                out.extend(bytes);
                out.extend(b"\r\n");
            }
            Self::Array(items) => {
                out.extend(format!("*{}\r\n", items.len()).bytes());
                items.iter().for_each(|item| item.encode(out));
            }
        }
    }
}

/// Takes the complete commands from the start of a buffer.
pub(crate) fn take_commands(buffer: &mut Vec<u8>) -> Vec<Command> {
    let (mut commands, mut taken) = (Vec::new(), 0);
    while let Some((command, length)) = parse_command(&buffer[taken..]) {
        commands.push(command);
        taken += length;
    }
    buffer.drain(..taken);
    commands
}

fn parse_command(bytes: &[u8]) -> Option<(Command, usize)> {
    let (count, mut at) = parse_header(bytes, b'*')?;
    let mut command = Vec::with_capacity(count);
    for _ in 0..count {
        let (length, start) = parse_header(&bytes[at..], b'$')?;
        let from = at + start;
        command.push(bytes.get(from..from + length)?.to_vec());
        at = from + length + 2;
        if at > bytes.len() {
            return None;
        }
    }
    Some((command, at))
}

/// Parses a line such as `*3`. Returns the number and the length of the line.
fn parse_header(bytes: &[u8], kind: u8) -> Option<(usize, usize)> {
    let end = bytes.windows(2).position(|pair| pair == b"\r\n")?;
    assert_eq!(bytes[0], kind, "the client sent no RESP array");
    let number = std::str::from_utf8(&bytes[1..end]).ok()?.parse().ok()?;
    Some((number, end + 2))
}
