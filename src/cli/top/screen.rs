//! The terminal: taken, drawn on, and given back as it was, however it ends.

use super::frame::{self, Glyphs, Line, Look, Style};
use super::seen::Seen;
use crossterm::cursor::{Hide, MoveTo, Show};
use crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use crossterm::style::{Attribute, Color, Print, ResetColor, SetAttribute, SetForegroundColor};
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

/// How soon a key, a signal or an answer is seen.
const TICK: Duration = Duration::from_millis(50);
/// How soon it is seen that there is no terminal any more.
const GONE: Duration = Duration::from_secs(1);

/// Shows what `look` tells, again and again, until somebody quits or a signal comes.
///
/// # Errors
/// When the terminal can't be used.
pub(super) fn show(
    look: impl Fn() -> Result<Value, String> + Send + 'static,
    mut seen: Seen,
    from: &str,
    every: Duration,
    glyphs: Glyphs,
) -> io::Result<()> {
    let told_to_end = Arc::new(AtomicBool::new(false));
    end_on_signals(&told_to_end)?;
    let mut shown = Look {
        glyphs,
        from: from.to_owned(),
        ..Look::default()
    };
    let mut screen = Screen::take()?;
    // Asking may take seconds: keys are heard meanwhile.
    let answers = ask_again_and_again(look, every);
    let mut is_new = true;
    while !told_to_end.load(Ordering::Relaxed) {
        if let Ok(told) = answers.try_recv()
            && !shown.paused
        {
            match told {
                Ok(told) => {
                    seen = Seen::of(&told, Some(&seen));
                    shown.trouble = None;
                }
                Err(why) => shown.trouble = Some(why.trim_end().to_owned()),
            }
            is_new = true;
        }
        if is_new {
            screen.draw(&seen, &shown)?;
            is_new = false;
        }
        if event::poll(TICK)? {
            match react(&event::read()?, &mut shown, seen.policies.len()) {
                Reaction::Quit => break,
                Reaction::Draw => is_new = true,
                Reaction::Nothing => {}
            }
        }
    }
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reaction {
    Quit,
    Draw,
    Nothing,
}

fn react(event: &Event, look: &mut Look, policies: usize) -> Reaction {
    let key = match event {
        Event::Resize(..) => return Reaction::Draw,
        Event::Key(key) if key.kind != KeyEventKind::Release => key,
        _ => return Reaction::Nothing,
    };
    let last = policies.saturating_sub(1);
    match key.code {
        KeyCode::Char('c' | 'd') if key.modifiers.contains(KeyModifiers::CONTROL) => {
            return Reaction::Quit;
        }
        KeyCode::Char('q') | KeyCode::Esc => return Reaction::Quit,
        KeyCode::Char('p' | ' ') => look.paused = !look.paused,
        KeyCode::Char('s') => (look.order, look.scrolled) = (look.order.next(), 0),
        KeyCode::Up | KeyCode::Char('k') => look.scrolled = look.scrolled.saturating_sub(1),
        KeyCode::Down | KeyCode::Char('j') => look.scrolled = (look.scrolled + 1).min(last),
        KeyCode::PageUp => look.scrolled = look.scrolled.saturating_sub(10),
        KeyCode::PageDown => look.scrolled = (look.scrolled + 10).min(last),
        KeyCode::Home => look.scrolled = 0,
        KeyCode::End => look.scrolled = last,
        _ => return Reaction::Nothing,
    }
    Reaction::Draw
}

/// One answer waits at most; the thread ends with the process, or when nobody takes them.
fn ask_again_and_again(
    look: impl Fn() -> Result<Value, String> + Send + 'static,
    every: Duration,
) -> Receiver<Result<Value, String>> {
    let (give, take): (SyncSender<_>, _) = sync_channel(1);
    thread::spawn(move || {
        loop {
            thread::sleep(every);
            if give.send(look()).is_err() {
                return;
            }
        }
    });
    take
}

/// They end it in order, as a key does.
fn end_on_signals(told: &Arc<AtomicBool>) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let signals = {
        let _here = runtime.enter();
        [
            SignalKind::terminate(),
            SignalKind::hangup(),
            SignalKind::interrupt(),
            SignalKind::quit(),
        ]
        .map(signal)
    };
    for heard in signals {
        let (mut heard, told) = (heard?, Arc::clone(told));
        runtime.spawn(async move {
            while heard.recv().await.is_some() {
                told.store(true, Ordering::Relaxed);
            }
        });
    }
    thread::spawn(move || runtime.block_on(end_with_the_terminal()));
    Ok(())
}

/// Whoever closes the window sees no last word. crossterm reads the end of a terminal again and again and never comes
/// back, so nobody but this would end.
async fn end_with_the_terminal() {
    let mut looks = tokio::time::interval(GONE);
    loop {
        looks.tick().await;
        if !io::stdout().is_terminal() {
            std::process::exit(1);
        }
    }
}

/// The terminal while it is ours.
struct Screen {
    out: Stdout,
    has_colours: bool,
}

impl Screen {
    fn take() -> io::Result<Self> {
        give_back_before_a_panic_is_told();
        terminal::enable_raw_mode()?;
        // From here on it is given back when this is dropped.
        let mut screen = Self {
            out: io::stdout(),
            has_colours: std::env::var_os("NO_COLOR").is_none(),
        };
        execute!(
            screen.out,
            EnterAlternateScreen,
            Hide,
            Clear(ClearType::All)
        )?;
        Ok(screen)
    }

    fn draw(&mut self, seen: &Seen, look: &Look) -> io::Result<()> {
        let (width, height) = terminal::size()?;
        let lines = frame::screen(seen, look, width.into(), height.into());
        queue!(self.out, BeginSynchronizedUpdate)?;
        for (row, Line { style, text }) in (0..height).zip(&lines) {
            queue!(self.out, MoveTo(0, row))?;
            self.begin(*style)?;
            queue!(
                self.out,
                Print(text),
                SetAttribute(Attribute::Reset),
                ResetColor
            )?;
            queue!(self.out, Clear(ClearType::UntilNewLine))?;
        }
        queue!(self.out, EndSynchronizedUpdate)?;
        self.out.flush()
    }

    fn begin(&mut self, style: Style) -> io::Result<()> {
        match style {
            Style::Plain => Ok(()),
            Style::Title => queue!(self.out, SetAttribute(Attribute::Bold)),
            Style::Head => queue!(self.out, SetAttribute(Attribute::Underlined)),
            Style::Quiet => queue!(self.out, SetAttribute(Attribute::Dim)),
            Style::Bad => {
                queue!(self.out, SetAttribute(Attribute::Bold))?;
                match self.has_colours {
                    true => queue!(self.out, SetForegroundColor(Color::Red)),
                    false => Ok(()),
                }
            }
        }
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        give_back();
    }
}

/// As it was. If that fails there is nobody to tell.
fn give_back() {
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

/// What a panic says would be lost with the screen that it is said on.
fn give_back_before_a_panic_is_told() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let told = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            give_back();
            told(panic);
        }));
    });
}

#[cfg(test)]
mod tests {
    use super::super::frame::Order;
    use super::*;
    use crossterm::event::KeyEvent;

    #[test]
    fn keys_do_what_the_last_line_says() {
        let mut look = Look::default();
        let mut press = |code| {
            react(
                &Event::Key(KeyEvent::new(code, KeyModifiers::NONE)),
                &mut look,
                3,
            )
        };
        assert_eq!(press(KeyCode::Char('q')), Reaction::Quit);
        assert_eq!(press(KeyCode::Char('x')), Reaction::Nothing);
        for code in [
            KeyCode::Char('p'),
            KeyCode::Char('s'),
            KeyCode::Down,
            KeyCode::Down,
            KeyCode::PageDown,
        ] {
            assert_eq!(press(code), Reaction::Draw);
        }
        assert_eq!(
            (look.paused, look.order, look.scrolled),
            (true, Order::Requests, 2)
        );
        let control_c = Event::Key(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL));
        assert_eq!(react(&control_c, &mut look, 3), Reaction::Quit);
        assert_eq!(react(&Event::Resize(3, 3), &mut look, 3), Reaction::Draw);
    }
}
