//! The live terminal view. It restores the terminal on exit, on a signal and on a panic.

use super::frame::{self, PolicySortOrder, TopData, ViewState};
use crate::cli::output::CommandError;
use futures_util::future::select_all;
use ratatui::Frame;
use ratatui::crossterm::SynchronizedUpdate;
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use serde_json::Value;
use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::thread;
use std::time::Duration;
use strum::IntoEnumIterator;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::timeout;

/// Maximum delay before a key, a signal or a response is handled.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Interval between checks whether the terminal still exists.
const TERMINAL_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Fetches and draws data every `interval` until the user quits or a signal arrives.
///
/// # Errors
/// If the terminal can't be used.
pub(super) fn run_screen(
    fetch: impl Fn() -> Result<Value, CommandError> + Send + 'static,
    mut data: Box<dyn TopData>,
    mut view: ViewState,
    interval: Duration,
) -> io::Result<()> {
    let stop_requested = watch_signals_and_terminal()?;
    // Dropped after `terminal`, which shows the cursor again.
    let _mode = TerminalMode;
    let mut terminal = ratatui::try_init()?;
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
            io::stdout().sync_update(|_| {
                let draw = |frame: &mut Frame<'_>| {
                    frame::draw_screen(&*data, &view, frame.buffer_mut());
                };
                terminal.draw(draw).map(drop)
            })??;
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
    let offset = view.scroll_offset;
    let mut scroll_by =
        |lines: isize| view.scroll_offset = offset.saturating_add_signed(lines).min(last);
    match key.code {
        KeyCode::Char('c' | 'd') if key.modifiers.contains(KeyModifiers::CONTROL) => {
            return InputReaction::Quit;
        }
        KeyCode::Char('?' | 'h') => view.shows_help = !view.shows_help,
        KeyCode::Esc if view.shows_help => view.shows_help = false,
        KeyCode::Char('q') | KeyCode::Esc => return InputReaction::Quit,
        KeyCode::Char('p' | ' ') => view.is_paused = !view.is_paused,
        KeyCode::Char('s') => {
            let next = PolicySortOrder::iter().nth(view.sort_order as usize + 1);
            (view.sort_order, view.scroll_offset) = (next.unwrap_or_default(), 0);
        }
        KeyCode::Up | KeyCode::Char('k') => scroll_by(-1),
        KeyCode::Down | KeyCode::Char('j') => scroll_by(1),
        KeyCode::PageUp => scroll_by(-10),
        KeyCode::PageDown => scroll_by(10),
        KeyCode::Home => view.scroll_offset = 0,
        KeyCode::End => view.scroll_offset = last,
        _ => return InputReaction::Nothing,
    }
    InputReaction::Draw
}

/// Starts a thread that fetches a snapshot every `interval`, also after an error. The channel holds
/// at most one response. The thread ends when the receiver is dropped or the process exits.
fn spawn_poller(
    fetch: impl Fn() -> Result<Value, CommandError> + Send + 'static,
    interval: Duration,
) -> Receiver<Result<Value, String>> {
    let (sender, receiver) = sync_channel(1);
    thread::spawn(move || {
        loop {
            thread::sleep(interval);
            let response = fetch().map_err(|error| {
                let retry_s = interval.as_secs();
                format!(
                    "{}; trying again every {retry_s} s",
                    error.to_string().trim_end()
                )
            });
            if sender.send(response).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Returns a flag that is set on a termination signal, so that the view ends as after the quit key.
/// The process exits when the terminal has closed: crossterm retries at the end of the terminal
/// input forever, so the main thread would never end.
fn watch_signals_and_terminal() -> io::Result<Arc<AtomicBool>> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let runtime_context = runtime.enter();
    let kinds = [
        SignalKind::terminate(),
        SignalKind::hangup(),
        SignalKind::interrupt(),
        SignalKind::quit(),
    ];
    let signals: io::Result<Vec<_>> = kinds.map(signal).into_iter().collect();
    let mut signals = signals?;
    drop(runtime_context);
    let stop_requested = Arc::new(AtomicBool::new(false));
    let stop = Arc::clone(&stop_requested);
    let watch = async move {
        loop {
            let next = select_all(signals.iter_mut().map(|stream| Box::pin(stream.recv())));
            if timeout(TERMINAL_CHECK_INTERVAL, next).await.is_ok() {
                stop.store(true, Ordering::Relaxed);
            }
            if !io::stdout().is_terminal() {
                std::process::exit(1);
            }
        }
    };
    thread::spawn(move || runtime.block_on(watch));
    Ok(stop_requested)
}

/// Restores the terminal when dropped. Errors are ignored because there is nowhere left to report
/// them.
struct TerminalMode;

impl Drop for TerminalMode {
    fn drop(&mut self) {
        ratatui::try_restore().ok();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::crossterm::event::KeyEvent;

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
