//! Logging to stderr. Commands print their data to stdout.

use super::log_writer::{LogSink, start_log_writer};
use parking_lot::Mutex;
use std::borrow::Cow;
use std::fmt;
use std::io::{self, Write};
use std::sync::OnceLock;
use strum::{EnumString, VariantNames};
use tracing::Subscriber;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::reload::{self, Handle};
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry};

/// Settings of the log: format, level and access log.
#[derive(Clone, Debug, PartialEq)]
pub struct LogSettings {
    pub format: LogFormat,
    pub level: LogLevel,
    /// The requests that the access log contains.
    pub access: AccessLogFilter,
    /// The share of the requests selected by `access` that is logged, 0 to 1.
    pub access_sample: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum LogFormat {
    /// One JSON object per line, with times in RFC 3339.
    Json,
    Text,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, EnumString, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum AccessLogFilter {
    Off,
    Rejected,
    All,
}

/// A level such as `info`, optionally with exceptions, as in `info,tidegate::proxy=debug`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogLevel(String);

impl LogLevel {
    /// Parses a log level.
    ///
    /// # Errors
    /// Returns a message that states the expected form.
    pub fn parse(text: &str) -> Result<Self, String> {
        let is_level =
            |word: &str| matches!(word, "error" | "warn" | "info" | "debug" | "trace" | "off");
        // `EnvFilter` takes any other word for a module name, and would accept a misspelt level.
        let known = text.split(',').all(|part| match part.rsplit_once('=') {
            Some((_, level)) => is_level(level.trim()),
            None => is_level(part.trim()),
        });
        if known && EnvFilter::builder().parse(text).is_ok() {
            return Ok(Self(text.to_owned()));
        }
        Err("expected \"error\", \"warn\", \"info\", \"debug\", \"trace\" or \"off\", optionally with exceptions \
             as in \"info,tidegate::proxy=debug\""
            .to_owned())
    }

    /// Converts the level to a filter that limits h2 and rustls to errors. Both libraries warn
    /// about invalid input, such as unsolicited PINGs, so a client could flood the log. The level
    /// can show their warnings by `h2=warn` or `rustls=warn`.
    fn to_env_filter(&self) -> EnvFilter {
        EnvFilter::builder().parse_lossy(format!("h2=error,rustls=error,{}", self.0))
    }
}

impl fmt::Display for LogLevel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The log level in effect, and the filter of the log.
struct LogLevelHandle {
    level: Mutex<LogLevel>,
    filter: Handle<EnvFilter, Registry>,
}

static LOG_LEVEL_HANDLE: OnceLock<LogLevelHandle> = OnceLock::new();

/// Initializes logging for the process. Only the first call has an effect.
pub fn init_logging(settings: &LogSettings) {
    start_log_writer();
    let (filter, handle) = reload::Layer::new(settings.level.to_env_filter());
    let subscriber = tracing_subscriber::registry().with(filter);
    let log = subscriber.with(new_log_layer(settings.format, || LogSink));
    match log.try_init() {
        Ok(()) => drop(LOG_LEVEL_HANDLE.set(LogLevelHandle {
            level: Mutex::new(settings.level.clone()),
            filter: handle,
        })),
        Err(error) => tracing::debug!(%error, "logging is already initialized"),
    }
}

/// Writes records in the format to writers that `new_writer` returns. Colours are off, so every
/// escape sequence in the log comes from input and is escaped. Internal errors are not logged,
/// because a failed write to stderr would panic.
fn new_log_layer<S, W>(
    format: LogFormat,
    new_writer: impl Fn() -> W + Send + Sync + 'static,
) -> Box<dyn Layer<S> + Send + Sync>
where
    S: Subscriber + for<'s> LookupSpan<'s>,
    W: Write + 'static,
{
    let writer = move || EscapingWriter {
        inner: new_writer(),
        format,
    };
    let layer = tracing_subscriber::fmt::layer()
        .with_ansi(false)
        .log_internal_errors(false)
        .with_writer(writer);
    match format {
        LogFormat::Json => layer.json().flatten_event(true).boxed(),
        LogFormat::Text => layer.boxed(),
    }
}

/// The log level in effect; `None` before [`init_logging`].
pub fn log_level() -> Option<LogLevel> {
    LOG_LEVEL_HANDLE
        .get()
        .map(|handle| handle.level.lock().clone())
}

/// Changes the log level of the running process. Returns `false` before [`init_logging`], or if the
/// reload fails.
pub fn set_log_level(level: LogLevel) -> bool {
    let Some(level_handle) = LOG_LEVEL_HANDLE.get() else {
        return false;
    };
    let mut current = level_handle.level.lock();
    let reloaded = level_handle.filter.reload(level.to_env_filter()).is_ok();
    if reloaded {
        tracing::info!(from = %current, to = %level, "log level changed");
        *current = level;
    }
    reloaded
}

/// Maximum bytes of a client's text in a log field.
const MAX_CLIENT_TEXT_BYTES: usize = 512;

/// Shortens text from a client for a log field. The mark states the bytes left out.
pub fn shorten_client_text(text: &str) -> Cow<'_, str> {
    if text.len() <= MAX_CLIENT_TEXT_BYTES {
        return Cow::Borrowed(text);
    }
    let (shown, rest) = text.split_at(text.floor_char_boundary(MAX_CLIENT_TEXT_BYTES));
    Cow::Owned(format!("{shown}…[{} bytes more]", rest.len()))
}

/// Writes each record as one line of printable characters, even if it contains client text: all
/// unprintable characters are escaped.
struct EscapingWriter<W> {
    inner: W,
    format: LogFormat,
}

impl<W: Write> Write for EscapingWriter<W> {
    /// `tracing_subscriber` writes each record with one call, with a newline at its end.
    fn write(&mut self, record: &[u8]) -> io::Result<usize> {
        let (line, end) = match record.split_last() {
            Some((b'\n', line)) => (line, "\n"),
            _ => (record, ""),
        };
        let text = String::from_utf8_lossy(line);
        let mut escaped = match self.format {
            LogFormat::Json => escape_json(&text, is_unprintable),
            LogFormat::Text => escape_text(&text),
        };
        escaped.push_str(end);
        self.inner.write_all(escaped.as_bytes())?;
        Ok(record.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// Escapes characters of JSON, which may occur only in its strings: the escape means the same
/// there.
pub(crate) fn escape_json(json: &str, is_escaped: impl Fn(char) -> bool) -> String {
    let mut escaped = String::with_capacity(json.len());
    for character in json.chars() {
        if is_escaped(character) {
            for unit in character.encode_utf16(&mut [0; 2]) {
                escaped.push_str(&format!("\\u{unit:04x}"));
            }
        } else {
            escaped.push(character);
        }
    }
    escaped
}

fn escape_text(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        if is_unprintable(character) {
            escaped.extend(character.escape_unicode());
        } else {
            escaped.push(character);
        }
    }
    escaped
}

/// Whether a terminal or browser would interpret a character instead of printing it. This covers C0
/// and C1 controls, line separators, and invisible or bidirectional formatting.
fn is_unprintable(character: char) -> bool {
    let is_format = |character| {
        matches!(character, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}'
            | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{e0000}'..='\u{e007f}')
    };
    !character.is_ascii_graphic()
        && character != ' '
        && (character.is_control() || is_format(character))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[derive(Clone, Default)]
    struct CapturedLog(Arc<Mutex<Vec<u8>>>);

    impl Write for CapturedLog {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    const HOSTILE: &str = "a\u{1b}[31m\nlevel=ERROR forged\r\u{9b}m\u{85}\u{7f}\u{202e}\u{2066}\u{2028}\u{200b}\u{feff}\u{e0041}\u{fc}";

    /// Logs hostile text in every position of a record, and returns the output.
    fn format_hostile_record(format: LogFormat) -> String {
        let captured = CapturedLog::default();
        let copy = captured.clone();
        let log = || tracing::info!(field = %HOSTILE, text = HOSTILE, debug = ?HOSTILE, "message {HOSTILE}");
        let layer = new_log_layer(format, move || copy.clone());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), log);
        let bytes = captured.0.lock().unwrap().clone();
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn clients_cannot_inject_invisible_characters_or_lines() {
        for format in [LogFormat::Json, LogFormat::Text] {
            let text = format_hostile_record(format);
            let line = text.strip_suffix('\n').unwrap();
            assert!(
                line.contains("forged") && line.contains('\u{fc}'),
                "{line:?}"
            );
            let unprintable = line.chars().filter(|character| {
                character.is_control() || HOSTILE.contains(*character) && is_unprintable(*character)
            });
            assert_eq!(unprintable.collect::<String>(), "", "{format:?}");
        }
    }

    #[test]
    fn json_log_preserves_client_text() {
        let record: serde_json::Value =
            serde_json::from_str(&format_hostile_record(LogFormat::Json)).unwrap();
        assert_eq!(record["field"], HOSTILE);
        assert_eq!(record["text"], HOSTILE);
    }

    #[test]
    fn long_client_text_is_cut_and_marked() {
        assert_eq!(shorten_client_text(&"a".repeat(512)), "a".repeat(512));
        let cut = shorten_client_text(&"\u{e9}".repeat(300)).into_owned();
        assert_eq!(cut, "\u{e9}".repeat(256) + "…[88 bytes more]");
        let cut = shorten_client_text(&format!("a{}", "\u{e9}".repeat(300))).into_owned();
        assert!(
            cut.starts_with('a') && cut.ends_with("…[90 bytes more]"),
            "{cut}"
        );
    }

    #[test]
    fn level_is_a_word_with_optional_exceptions() {
        for right in [
            "info",
            "off",
            "warn,tidegate::proxy=debug",
            "info,hyper=off",
        ] {
            assert!(LogLevel::parse(right).is_ok(), "{right}");
        }
        for wrong in [
            "",
            "inof",
            "INFO!",
            "info,",
            "tidegate",
            "tidegate=loud",
            "info,[{=debug",
        ] {
            assert!(LogLevel::parse(wrong).is_err(), "{wrong}");
        }
    }
}
