//! Timers and byte buffers of connections to clients and to the upstream.

use bytes::Bytes;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

/// Timer that avoids most operations on the runtime's timer. Deadlines of a busy connection move
/// with each request and rarely expire. The runtime's timer keeps an earlier deadline and is reset
/// when it fires too early, so thousands of requests cost a handful of timer operations.
#[derive(Debug, Default)]
pub(crate) struct LazyTimer {
    sleep: Option<Pin<Box<Sleep>>>,
}

impl LazyTimer {
    /// Returns ready once `deadline` has passed. A pending task is woken at the deadline or
    /// earlier.
    pub(crate) fn poll(&mut self, deadline: Instant, cx: &mut Context<'_>) -> Poll<()> {
        let sleep = self
            .sleep
            .get_or_insert_with(|| Box::pin(sleep_until(deadline)));
        if sleep.deadline() > deadline {
            sleep.as_mut().reset(deadline);
        }
        while sleep.as_mut().poll(cx).is_ready() {
            if Instant::now() >= deadline {
                return Poll::Ready(());
            }
            sleep.as_mut().reset(deadline);
        }
        Poll::Pending
    }
}

/// Moves bytes from the front of `bytes` into `into`, as many as fit.
pub(crate) fn move_buffered_bytes(bytes: &mut Bytes, into: &mut ReadBuf<'_>) {
    let n = bytes.len().min(into.remaining());
    into.put_slice(&bytes.split_to(n));
}

/// Writes all of `bytes`, and removes what was written.
pub(crate) fn poll_write_all(
    transport: &mut (impl AsyncWrite + Unpin),
    cx: &mut Context<'_>,
    bytes: &mut Vec<u8>,
) -> Poll<io::Result<()>> {
    while !bytes.is_empty() {
        let written = ready!(Pin::new(&mut *transport).poll_write(cx, bytes))?;
        if written == 0 {
            return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
        }
        bytes.drain(..written);
    }
    Poll::Ready(Ok(()))
}

#[cfg(test)]
mod tests {
    use super::LazyTimer;
    use std::future::poll_fn;
    use std::time::Duration;
    use tokio::time::Instant;

    #[tokio::test(start_paused = true)]
    async fn fires_at_the_last_deadline_set() {
        let (start, mut timer) = (Instant::now(), LazyTimer::default());
        let seconds = |s| start + Duration::from_secs(s);
        let mut deadline = seconds(5);
        // Later and earlier deadlines, each while the timer is set to another time.
        for (poll, next) in [(1, 9), (2, 3), (3, 7)].into_iter().enumerate() {
            assert_eq!(poll + 1, usize::try_from(next.0).unwrap());
            poll_fn(|cx| {
                assert!(timer.poll(deadline, cx).is_pending());
                std::task::Poll::Ready(())
            })
            .await;
            deadline = seconds(next.1);
        }
        poll_fn(|cx| timer.poll(deadline, cx)).await;
        assert_eq!(start.elapsed().as_secs(), 7);
        poll_fn(|cx| timer.poll(seconds(8), cx)).await;
        assert_eq!(start.elapsed().as_secs(), 8, "a timer can be reused");
    }
}
