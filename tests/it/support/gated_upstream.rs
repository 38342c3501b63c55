//! An upstream whose responses wait for the test.

use super::prelude::*;

/// An upstream that answers 200 once the test calls [`GatedUpstream::answer`].
#[derive(Debug)]
pub struct GatedUpstream {
    pub address: SocketAddr,
    upstream: Upstream,
    permits: Arc<Semaphore>,
}

impl GatedUpstream {
    pub async fn start() -> Self {
        let permits = Arc::new(Semaphore::new(0));
        let waiting = Arc::clone(&permits);
        let upstream = Upstream::with_handler(move |_| {
            let permits = Arc::clone(&waiting);
            async move {
                permits.acquire().await.unwrap().forget();
                Response::new(full_body(""))
            }
        })
        .await;
        Self {
            address: upstream.address,
            upstream,
            permits,
        }
    }

    /// Waits until so many requests have arrived.
    pub async fn wait_for_requests(&self, count: usize) {
        let arrived = async {
            while self.upstream.requests().len() < count {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(TEST_TIMEOUT, arrived).await.unwrap();
    }

    /// Answers so many requests, waiting or later ones.
    pub fn answer(&self, count: usize) {
        self.permits.add_permits(count);
    }
}
