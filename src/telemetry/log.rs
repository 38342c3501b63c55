//! The log, on stderr: stdout is for the data that commands print.

use std::io::{self, Write};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

/// What is logged, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct LogSettings {
    pub format: Format,
    pub level: Level,
    /// Which requests get a line.
    pub access: Access,
    /// The share of those that does, 0 to 1.
    pub access_sample: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// One object per line, times in RFC 3339.
    Json,
    Text,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Off,
    Rejected,
    All,
}

/// `info`, or with exceptions: `info,tidegate::proxy=debug`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Level(String);

impl Level {
    /// # Errors
    /// Words that say what would be right.
    pub fn parse(text: &str) -> Result<Self, String> {
        let is_level = |word: &str| matches!(word, "error" | "warn" | "info" | "debug" | "trace" | "off");
        // A filter takes any other word for the name of a module, and a misspelt level with it.
        let known = text.split(',').all(|part| match part.rsplit_once('=') {
            Some((_, level)) => is_level(level.trim()),
            None => is_level(part.trim()),
        });
        if known && EnvFilter::builder().parse(text).is_ok() {
            return Ok(Self(text.to_owned()));
        }
        Err("expected \"error\", \"warn\", \"info\", \"debug\", \"trace\" or \"off\", perhaps with exceptions \
             as in \"info,tidegate::proxy=debug\""
            .to_owned())
    }

    /// h2 warns of each PING that it did not ask for: a client could fill the log. Who wants to read that says
    /// `h2=warn`.
    fn filter(&self) -> EnvFilter {
        EnvFilter::builder().parse_lossy(format!("h2=error,{}", self.0))
    }
}

/// Sets the log up for the whole process. Only the first call does something.
pub fn init(settings: &LogSettings) {
    // No colours: with them, escape sequences of our own could not be told from those of strangers.
    let builder = tracing_subscriber::fmt().with_env_filter(settings.level.filter()).with_ansi(false);
    let result = match settings.format {
        Format::Json => builder.json().flatten_event(true).with_writer(io::stderr).try_init(),
        Format::Text => builder.with_writer(Printable(io::stderr)).try_init(),
    };
    if let Err(error) = result {
        tracing::debug!(%error, "the log is set up already");
    }
}

/// Makes each record one line without control characters, whatever a client put into it. (JSON is by itself.)
struct Printable<M>(M);

/// Writes one record.
struct PrintableWriter<W>(W);

impl<'a, M: MakeWriter<'a>> MakeWriter<'a> for Printable<M> {
    type Writer = PrintableWriter<M::Writer>;

    fn make_writer(&'a self) -> Self::Writer {
        PrintableWriter(self.0.make_writer())
    }
}

impl<W: Write> Write for PrintableWriter<W> {
    /// A record comes as a whole, ended by a newline.
    fn write(&mut self, record: &[u8]) -> io::Result<usize> {
        let (line, end) = match record.split_last() {
            Some((b'\n', line)) => (line, "\n"),
            _ => (record, ""),
        };
        let text = String::from_utf8_lossy(line);
        let printable: String = text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
        self.0.write_all(format!("{printable}{end}").as_bytes())?;
        Ok(record.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct Captured(Arc<Mutex<Vec<u8>>>);

    impl Write for Captured {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_client_cannot_write_control_characters_or_lines_of_its_own() {
        let captured = Captured::default();
        let writer = captured.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_ansi(false)
            .with_writer(Printable(move || writer.clone()))
            .finish();
        let hostile = "a\u{1b}[31m\nlevel=ERROR forged\r\u{9b}m\u{7f}";
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(field = %hostile, text = hostile, "said {hostile}");
        });
        let text = String::from_utf8(captured.0.lock().unwrap().clone()).unwrap();
        assert!(text.ends_with('\n') && text.contains("forged"), "{text:?}");
        assert_eq!(text.chars().filter(|c| c.is_control()).count(), 1, "{text:?}");
    }

    #[test]
    fn a_level_is_a_word_or_a_list_of_exceptions() {
        for right in ["info", "off", "warn,tidegate::proxy=debug", "info,hyper=off"] {
            assert!(Level::parse(right).is_ok(), "{right}");
        }
        for wrong in ["", "inof", "INFO!", "info,", "tidegate", "tidegate=loud", "info,[{=debug"] {
            assert!(Level::parse(wrong).is_err(), "{wrong}");
        }
    }
}
