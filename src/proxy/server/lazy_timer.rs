//! A timer that is moved only when it has to be.

use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::time::{Instant, Sleep, sleep_until};

/// Deadlines on a busy connection move with every request, but are hardly ever met. So the runtime's
/// timer is left where it is as long as it rings early enough, and is set again when it rings too
/// early: thousands of requests cost a handful of timer operations.
#[derive(Debug, Default)]
pub(in crate::proxy) struct LazyTimer {
    sleep: Option<Pin<Box<Sleep>>>,
}

impl LazyTimer {
    /// Ready once `due` has passed; otherwise the task is woken by then, perhaps before.
    pub(in crate::proxy) fn poll(&mut self, deadline: Instant, cx: &mut Context<'_>) -> Poll<()> {
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
        // Later and earlier again, each while the timer is set to something else.
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
        assert_eq!(start.elapsed().as_secs(), 8, "an alarm can be used again");
    }
}
