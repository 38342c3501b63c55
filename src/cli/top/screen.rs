//! The live terminal view. It restores the terminal on exit, on a signal and on a panic.

use super::frame::{self, TopData, ViewState};
use super::screen_line::{LineStyle, ScreenLine};
use crossterm::cursor::{Hide, MoveTo, Show};
use crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use crossterm::style::{
    Attribute, Attributes, Color, ContentStyle, PrintStyledContent, ResetColor, SetAttribute,
};
use crossterm::terminal::{
    self, BeginSynchronizedUpdate, Clear, ClearType, EndSynchronizedUpdate, EnterAlternateScreen,
    LeaveAlternateScreen,
};
use crossterm::{execute, queue};
use serde_json::Value;
use std::io::{self, IsTerminal, Stdout, Write};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Once};
use std::thread;
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};

/// Maximum delay before a key, a signal or a response is handled.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Interval between checks whether the terminal still exists.
const TERMINAL_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Fetches and draws data every `interval` until the user quits or a signal arrives.
///
/// # Errors
/// If the terminal can't be used.
pub(super) fn run_screen(
    fetch: impl Fn() -> Result<Value, String> + Send + 'static,
    mut data: Box<dyn TopData>,
    mut view: ViewState,
    interval: Duration,
) -> io::Result<()> {
    let stop_requested = Arc::new(AtomicBool::new(false));
    watch_signals_and_terminal(&stop_requested)?;
    let mut screen = TerminalScreen::open()?;
    // Fetches run on another thread, so that keys are handled during a fetch, which may take
    // seconds.
    let responses = spawn_poller(fetch, interval);
    let mut needs_redraw = true;
    while !stop_requested.load(Ordering::Relaxed) {
        if let Ok(response) = responses.try_recv()
            && !view.is_paused
        {
            view.last_error = response.map(|response| data.update(response)).err();
            needs_redraw = true;
        }
        if needs_redraw {
            screen.draw(&*data, &view)?;
            needs_redraw = false;
        }
        if event::poll(POLL_INTERVAL)? {
            match handle_event(&event::read()?, &mut view, data.row_count()) {
                InputReaction::Quit => break,
                InputReaction::Draw => needs_redraw = true,
                InputReaction::Nothing => {}
            }
        }
    }
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InputReaction {
    Quit,
    Draw,
    Nothing,
}

fn handle_event(event: &Event, view: &mut ViewState, policy_count: usize) -> InputReaction {
    let key = match event {
        Event::Resize(..) => return InputReaction::Draw,
        Event::Key(key) if key.kind != KeyEventKind::Release => key,
        _ => return InputReaction::Nothing,
    };
    let last = policy_count.saturating_sub(1);
    match key.code {
        KeyCode::Char('c' | 'd') if key.modifiers.contains(KeyModifiers::CONTROL) => {
            return InputReaction::Quit;
        }
        KeyCode::Char('?' | 'h') => view.shows_help = !view.shows_help,
        KeyCode::Esc if view.shows_help => view.shows_help = false,
        KeyCode::Char('q') | KeyCode::Esc => return InputReaction::Quit,
        KeyCode::Char('p' | ' ') => view.is_paused = !view.is_paused,
        KeyCode::Char('s') => (view.sort_order, view.scroll_offset) = (view.sort_order.next(), 0),
        KeyCode::Up | KeyCode::Char('k') => {
            view.scroll_offset = view.scroll_offset.saturating_sub(1)
        }
        KeyCode::Down | KeyCode::Char('j') => {
            view.scroll_offset = (view.scroll_offset + 1).min(last)
        }
        KeyCode::PageUp => view.scroll_offset = view.scroll_offset.saturating_sub(10),
        KeyCode::PageDown => view.scroll_offset = (view.scroll_offset + 10).min(last),
        KeyCode::Home => view.scroll_offset = 0,
        KeyCode::End => view.scroll_offset = last,
        _ => return InputReaction::Nothing,
    }
    InputReaction::Draw
}

/// Starts a thread that fetches a snapshot every `interval`, also after an error. The channel holds
/// at most one response. The thread ends when the receiver is dropped or the process exits.
fn spawn_poller(
    fetch: impl Fn() -> Result<Value, String> + Send + 'static,
    interval: Duration,
) -> Receiver<Result<Value, String>> {
    let (sender, receiver): (SyncSender<_>, _) = sync_channel(1);
    thread::spawn(move || {
        loop {
            thread::sleep(interval);
            let response = fetch().map_err(|error| {
                let retry_s = interval.as_secs();
                format!("{}; trying again every {retry_s} s", error.trim_end())
            });
            if sender.send(response).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Sets `stop_requested` on a termination signal, so that the view ends as after the quit key. Also
/// starts a thread that exits the process when the terminal closes.
fn watch_signals_and_terminal(stop_requested: &Arc<AtomicBool>) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let signals = {
        let _runtime_context = runtime.enter();
        [
            SignalKind::terminate(),
            SignalKind::hangup(),
            SignalKind::interrupt(),
            SignalKind::quit(),
        ]
        .map(signal)
    };
    for stream in signals {
        let (mut stream, stop_requested) = (stream?, Arc::clone(stop_requested));
        runtime.spawn(async move {
            while stream.recv().await.is_some() {
                stop_requested.store(true, Ordering::Relaxed);
            }
        });
    }
    thread::spawn(move || runtime.block_on(exit_when_terminal_closes()));
    Ok(())
}

/// Exits the process when the terminal has closed. crossterm retries at the end of the terminal
/// input forever, so the main thread would never end.
async fn exit_when_terminal_closes() {
    let mut checks = tokio::time::interval(TERMINAL_CHECK_INTERVAL);
    loop {
        checks.tick().await;
        if !io::stdout().is_terminal() {
            std::process::exit(1);
        }
    }
}

/// The terminal in raw mode on the alternate screen. Dropping it restores the terminal.
struct TerminalScreen {
    out: Stdout,
    has_colours: bool,
}

impl TerminalScreen {
    fn open() -> io::Result<Self> {
        install_terminal_panic_hook();
        terminal::enable_raw_mode()?;
        // From here on, dropping `screen` restores the terminal.
        let mut screen = Self {
            out: io::stdout(),
            // https://no-color.org: any value but an empty one.
            has_colours: std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()),
        };
        execute!(
            screen.out,
            EnterAlternateScreen,
            Hide,
            Clear(ClearType::All)
        )?;
        Ok(screen)
    }

    fn draw(&mut self, data: &dyn TopData, view: &ViewState) -> io::Result<()> {
        let (width, height) = terminal::size()?;
        let lines = frame::render_screen(data, view, width.into(), height.into());
        queue!(self.out, BeginSynchronizedUpdate)?;
        for (row, ScreenLine { style, text }) in (0..).zip(lines) {
            let styled = self.content_style(style).apply(text);
            queue!(
                self.out,
                MoveTo(0, row),
                PrintStyledContent(styled),
                Clear(ClearType::UntilNewLine)
            )?;
        }
        queue!(self.out, EndSynchronizedUpdate)?;
        self.out.flush()
    }

    fn content_style(&self, style: LineStyle) -> ContentStyle {
        let (attribute, colour) = match style {
            LineStyle::Plain => (None, None),
            LineStyle::Title => (Some(Attribute::Bold), Some(Color::Cyan)),
            LineStyle::TableHeader => (Some(Attribute::Underlined), Some(Color::Cyan)),
            LineStyle::Dim => (Some(Attribute::Dim), None),
            LineStyle::Alert => (Some(Attribute::Bold), Some(Color::Red)),
            LineStyle::Warning => (None, Some(Color::Yellow)),
            LineStyle::Good => (None, Some(Color::Green)),
        };
        ContentStyle {
            foreground_color: colour.filter(|_| self.has_colours),
            attributes: attribute.map_or(Attributes::none(), Attributes::from),
            ..ContentStyle::new()
        }
    }
}

impl Drop for TerminalScreen {
    fn drop(&mut self) {
        restore_terminal();
    }
}

/// Restores the terminal. Errors are ignored because there is nowhere left to report them.
fn restore_terminal() {
    execute!(
        io::stdout(),
        SetAttribute(Attribute::Reset),
        ResetColor,
        Show,
        LeaveAlternateScreen
    )
    .ok();
    terminal::disable_raw_mode().ok();
}

/// Installs a panic hook that restores the terminal first. Without this hook, the panic message
/// would be lost with the alternate screen.
fn install_terminal_panic_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let default_hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            restore_terminal();
            default_hook(panic);
        }));
    });
}

#[cfg(test)]
mod tests {
    use super::super::frame::PolicySortOrder;
    use super::*;
    use crossterm::event::KeyEvent;

    #[test]
    fn handles_the_keys_named_in_the_help_line() {
        let mut view = ViewState::default();
        let mut press = |code| {
            handle_event(
                &Event::Key(KeyEvent::new(code, KeyModifiers::NONE)),
                &mut view,
                3,
            )
        };
        assert_eq!(press(KeyCode::Char('q')), InputReaction::Quit);
        assert_eq!(press(KeyCode::Char('x')), InputReaction::Nothing);
        for code in [
            KeyCode::Char('p'),
            KeyCode::Char('s'),
            KeyCode::Down,
            KeyCode::Down,
            KeyCode::PageDown,
        ] {
            assert_eq!(press(code), InputReaction::Draw);
        }
        assert_eq!(
            (view.is_paused, view.sort_order, view.scroll_offset),
            (true, PolicySortOrder::Requests, 2)
        );
        let press_with = |code, view: &mut ViewState| {
            handle_event(
                &Event::Key(KeyEvent::new(code, KeyModifiers::NONE)),
                view,
                3,
            )
        };
        assert_eq!(
            press_with(KeyCode::Char('?'), &mut view),
            InputReaction::Draw
        );
        assert!(view.shows_help);
        assert_eq!(press_with(KeyCode::Esc, &mut view), InputReaction::Draw);
        assert!(!view.shows_help);
        assert_eq!(press_with(KeyCode::Esc, &mut view), InputReaction::Quit);
        let control_c = Event::Key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL));
        assert_eq!(handle_event(&control_c, &mut view, 3), InputReaction::Quit);
        assert_eq!(
            handle_event(&Event::Resize(3, 3), &mut view, 3),
            InputReaction::Draw
        );
    }
}
