//! The front door: accepts connections and spreads them over the workers, until told to stop.
//!
//! Each worker is a thread with a runtime of its own; a connection and all its requests stay on the
//! thread that got it. The kernel's own spreading (`SO_REUSEPORT`) goes by a hash of addresses, which
//! is unfair to the few, long-lived connections of an ingress: so one acceptor gives each connection
//! to the worker that has the fewest.

use futures_util::future::{join_all, select_all};
use http::{Request, Response, StatusCode};
use std::cell::RefCell;
use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use tokio::runtime::{Builder, LocalOptions};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::body::{RequestBody, ResponseBody};
use super::connection::{Protocols, serve};
use super::entrance::{Entrance, EntryFault};
use super::headers::AddressText;
use super::interim::Interim;
use super::listener::{self, NewSocket};
use super::tidy::Tidy;
use super::transport::RawSocket;
use super::watch::Watch;
use super::{ListenSettings, ShutdownSettings};
use crate::listen::{Accepting, Bound, ListenAddress};
use crate::telemetry::metrics::Shard;
use crate::tls::{self, Subject};

/// Accepted connections that a worker has not yet taken.
const HANDOFF_QUEUE: usize = 256;
/// When the process has no file descriptors left, others have to close some first.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// Threads per worker for looking up names; a lookup may hang for long after we gave it up.
const LOOKUP_THREADS: usize = 16;

/// Answers requests.
pub trait Handler: 'static {
    /// Answers one request. The future is dropped when the client leaves. `interim` takes what comes before the answer.
    fn handle(
        self: Rc<Self>,
        request: Request<RequestBody>,
        peer: Arc<Peer>,
        interim: Interim,
    ) -> impl Future<Output = Response<ResponseBody>> + 'static;

    /// A connection ended before its first request.
    fn not_entered(&self, _fault: EntryFault) {}

    /// A head that could not be read to its end was answered with this.
    fn unread(&self, _status: StatusCode, _peer: &Peer) {}

    /// Where this worker counts.
    fn counts(&self) -> Option<Arc<Shard>> {
        None
    }

    /// What has to be said when no request is left. The worker ends after it.
    fn finish(&self) -> impl Future<Output = ()> {
        std::future::ready(())
    }
}

/// What is asked on an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Door {
    /// Requests to be forwarded.
    #[default]
    Proxy,
    /// Calls of Envoy's rate-limit service.
    Rls,
    /// Whether a request that somebody else forwards may pass.
    Check,
}

impl Door {
    /// Whether anybody may come, and not only proxies of our own.
    pub(super) fn is_public(self) -> bool {
        self == Self::Proxy
    }
}

/// The other end of a connection.
#[derive(Debug)]
pub struct Peer {
    pub door: Door,
    /// An IPv4 client of an IPv6 socket appears as IPv4, one of a Unix socket as 127.0.0.1. What a PROXY header says
    /// takes the place of the socket's own.
    pub addr: SocketAddr,
    pub tls: bool,
    /// Whom the certificate is about that the client has shown.
    pub certificate: Option<Subject>,
    /// The address as forwarding fields have it, printed once.
    pub(super) text: AddressText,
}

impl Peer {
    pub(super) fn new(addr: SocketAddr) -> Self {
        let addr = SocketAddr::new(addr.ip().to_canonical(), addr.port());
        Self {
            door: Door::Proxy,
            addr,
            tls: false,
            certificate: None,
            text: AddressText::new(addr.ip()),
        }
    }
}

/// What the server is asked to do; it only ever goes forward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stop {
    Run,
    /// Finish what is in flight, as [`ShutdownSettings`] say.
    Drain,
    /// End at once.
    Now,
}

/// Addresses that are ours; nobody can connect until [`Server::run`].
#[derive(Debug)]
pub struct Server {
    /// At least one.
    entries: Vec<Entry>,
    threads: usize,
    load: Load,
}

/// One of the addresses.
#[derive(Debug)]
struct Entry {
    door: Door,
    listener: Bound,
    settings: ListenSettings,
    tls: tls::Current,
}

/// How busy the server is.
#[derive(Clone, Debug)]
pub struct Load(Arc<Counters>);

#[derive(Debug)]
struct Counters {
    live: Box<[AtomicUsize]>,
    panics: AtomicU64,
    full: AtomicU64,
}

impl Server {
    /// Takes the proxy's address. `tls` may change while it runs.
    ///
    /// # Errors
    /// When the address is taken, not ours, or not allowed.
    pub fn bind(settings: &ListenSettings, tls: tls::Current) -> io::Result<Self> {
        let mut server = Self::of(settings.threads);
        server.open(Door::Proxy, settings, tls)?;
        Ok(server)
    }

    /// With so many workers, at least 1, and no address yet.
    pub fn of(threads: usize) -> Self {
        let threads = threads.max(1);
        let live = (0..threads).map(|_| AtomicUsize::new(0)).collect();
        let load = Load(Arc::new(Counters {
            live,
            panics: AtomicU64::new(0),
            full: AtomicU64::new(0),
        }));
        Self {
            entries: Vec::new(),
            threads,
            load,
        }
    }

    /// Takes one more address, for the same workers. Returns where it listens: the port that the system chose if none
    /// was asked for.
    ///
    /// # Errors
    /// As [`Server::bind`].
    pub fn open(
        &mut self,
        door: Door,
        settings: &ListenSettings,
        tls: tls::Current,
    ) -> io::Result<ListenAddress> {
        let listener = listener::bind(&settings.address)?;
        let address = listener.address()?;
        self.entries.push(Entry {
            door,
            listener,
            settings: settings.clone(),
            tls,
        });
        Ok(address)
    }

    /// Where the first address is: the port that the system chose if none was asked for.
    ///
    /// # Errors
    /// When the socket has none, which no system is known to say of a bound socket.
    pub fn address(&self) -> io::Result<ListenAddress> {
        let first = self
            .entries
            .first()
            .ok_or_else(|| io::Error::other("no address"))?;
        first.listener.address()
    }

    /// Lets clients connect; they wait in the kernel until they are accepted.
    pub(super) fn listen(&self) -> io::Result<()> {
        self.entries
            .iter()
            .try_for_each(|entry| entry.listener.listen(listener::BACKLOG))
    }

    /// The live counts of connections, for metrics.
    pub fn load(&self) -> Load {
        self.load.clone()
    }

    /// Serves until `stop` says otherwise, or its sender is gone, which counts as [`Stop::Drain`].
    /// `make_handler` runs once in each worker's runtime with the worker's index; when all handlers are
    /// there clients can connect, and `on_listening` is called. Returns how many connections were cut
    /// at the end.
    ///
    /// # Errors
    /// When a worker cannot be started or dies.
    pub async fn run<H, M, F>(
        self,
        make_handler: M,
        shutdown: ShutdownSettings,
        mut stop: watch::Receiver<Stop>,
        on_listening: impl FnOnce(),
    ) -> io::Result<usize>
    where
        H: Handler,
        M: Fn(usize) -> F + Clone + Send + 'static,
        F: Future<Output = Rc<H>> + 'static,
    {
        let (cut, cut_rx) = watch::channel(false);
        let mut workers = Vec::new();
        for index in 0..self.threads {
            workers.push(Worker::start(
                index,
                &self.entries,
                &self.load,
                make_handler.clone(),
                cut_rx.clone(),
            )?);
        }
        let mut asked = stop.clone();
        tokio::select! {
            biased;
            () = until(&mut asked, Stop::Drain) => return Ok(0),
            ready = all_ready(&mut workers) => ready?,
        }
        self.listen()?;
        on_listening();
        let accepting = self.entries.into_iter().enumerate();
        let accepting = accepting.map(|(place, entry)| Acceptor::new(place, entry, &workers));
        let mut accepting = accepting.collect::<io::Result<Vec<_>>>()?;
        let drain = async {
            until(&mut asked, Stop::Drain).await;
            sleep(shutdown.delay).await;
        };
        let failed = tokio::select! {
            biased;
            () = until(&mut stop, Stop::Now) => None,
            () = drain => None,
            (error, ..) = select_all(accepting.iter_mut().map(|one| Box::pin(one.run(&self.load)))) => Some(error),
        };
        let rest: Vec<Rest> = accepting.into_iter().map(Acceptor::take_rest).collect();
        // The listener is closed. A worker may be busy, but nobody waits for it longer than for the rest of the end.
        let told = Instant::now();
        tokio::select! {
            biased;
            () = until(&mut stop, Stop::Now) => {}
            handed = timeout(shutdown.grace, join_all(rest.into_iter().map(|rest| rest.hand_over(&self.load)))) => {
                if handed.is_err() {
                    tracing::warn!("no worker took the last connections in time");
                }
            }
        }
        // Workers see the end of their queues, and finish what they have.
        let threads: Vec<_> = workers.into_iter().map(|worker| worker.thread).collect();
        let mut ended = tokio::task::spawn_blocking(|| {
            threads
                .into_iter()
                .map(JoinHandle::join)
                .collect::<Vec<_>>()
        });
        let finished = tokio::select! {
            biased;
            () = until(&mut stop, Stop::Now) => None,
            ended = timeout_at(told + shutdown.grace, &mut ended) => ended.ok(),
        };
        let counts = match finished {
            Some(counts) => counts,
            None => {
                cut.send_replace(true);
                ended.await
            }
        };
        match failed {
            Some(error) => Err(error),
            None => counts?
                .into_iter()
                .map(|count| count.map_err(|_panic| worker_died()))
                .sum(),
        }
    }
}

/// Waits until the server is asked for `what`, or more.
async fn until(stop: &mut watch::Receiver<Stop>, what: Stop) {
    // Nobody left to say more: drain, but do not hurry.
    if stop.wait_for(|asked| *asked >= what).await.is_err() && what > Stop::Drain {
        std::future::pending().await
    }
}

fn worker_died() -> io::Error {
    io::Error::other("a worker thread died")
}

impl Load {
    /// Connections that are open now.
    pub fn connections(&self) -> usize {
        self.0
            .live
            .iter()
            .map(|live| live.load(Ordering::Relaxed))
            .sum()
    }

    /// Connections, and requests by HTTP/2, that ended in a panic; each is a bug.
    pub fn panics(&self) -> u64 {
        self.0.panics.load(Ordering::Relaxed)
    }

    /// How often `max_connections` were open, and new ones had to wait.
    pub fn full(&self) -> u64 {
        self.0.full.load(Ordering::Relaxed)
    }

    pub(super) fn note_panic(&self) {
        self.0.panics.fetch_add(1, Ordering::Relaxed);
    }

    fn of(&self, worker: usize) -> usize {
        self.0
            .live
            .get(worker)
            .map_or(usize::MAX, |live| live.load(Ordering::Relaxed))
    }
}

/// A connection on its way to a worker, and counted until its end.
struct Accepted {
    /// The place of the address among the server's.
    entry: usize,
    socket: NewSocket,
    addr: SocketAddr,
    counted: Counted,
}

struct Counted {
    load: Load,
    worker: usize,
    _permit: OwnedSemaphorePermit,
}

impl Counted {
    fn new(load: &Load, worker: usize, permit: OwnedSemaphorePermit) -> Self {
        if let Some(live) = load.0.live.get(worker) {
            live.fetch_add(1, Ordering::Relaxed);
        }
        Self {
            load: load.clone(),
            worker,
            _permit: permit,
        }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        if let Some(live) = self.load.0.live.get(self.worker) {
            live.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

struct Acceptor {
    entry: usize,
    listener: Accepting,
    room: Arc<Semaphore>,
    queues: Vec<mpsc::Sender<Accepted>>,
    failing: bool,
    /// Accepted, and no worker has taken it yet.
    in_hand: Option<InHand>,
}

type InHand = (NewSocket, SocketAddr, OwnedSemaphorePermit);

/// What was accepted before the listener was closed, and no worker has yet.
struct Rest {
    entry: usize,
    connections: Vec<InHand>,
    queues: Vec<mpsc::Sender<Accepted>>,
}

impl Acceptor {
    fn new(place: usize, entry: Entry, workers: &[Worker]) -> io::Result<Self> {
        Ok(Self {
            entry: place,
            listener: entry.listener.into_accepting()?,
            room: Arc::new(Semaphore::new(
                entry
                    .settings
                    .max_connections
                    .clamp(1, Semaphore::MAX_PERMITS),
            )),
            queues: workers.iter().map(|worker| worker.queue.clone()).collect(),
            failing: false,
            in_hand: None,
        })
    }

    /// Returns when a worker is gone.
    async fn run(&mut self, load: &Load) -> io::Error {
        loop {
            let Some(permit) = self.room(load).await else {
                return worker_died();
            };
            let (socket, addr) = self.accept().await;
            // Who is told to end while a worker's queue is full still has it.
            self.in_hand = Some((socket, addr, permit));
            if !hand_over(&self.queues, load, self.entry, &mut self.in_hand).await {
                return worker_died();
            }
        }
    }

    /// Takes what the kernel has completed by now, as far as there is room, and closes the listener. These clients
    /// may have sent a request, and closing would answer it with a reset.
    fn take_rest(self) -> Rest {
        let Self {
            entry,
            listener,
            room,
            queues,
            in_hand,
            ..
        } = self;
        let mut connections = Vec::from_iter(in_hand);
        listener.take_rest(|socket, addr| {
            let Ok(permit) = Arc::clone(&room).try_acquire_owned() else {
                return false;
            };
            connections.push((socket, addr, permit));
            true
        });
        Rest {
            entry,
            connections,
            queues,
        }
    }

    /// Without room for it, a connection is better off in the kernel's backlog.
    async fn room(&self, load: &Load) -> Option<OwnedSemaphorePermit> {
        if let Ok(permit) = Arc::clone(&self.room).try_acquire_owned() {
            return Some(permit);
        }
        load.0.full.fetch_add(1, Ordering::Relaxed);
        Arc::clone(&self.room).acquire_owned().await.ok()
    }

    /// The next connection. Errors never end it: they are a lack of resources, or a client's haste.
    async fn accept(&mut self) -> (NewSocket, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok(accepted) => {
                    if std::mem::take(&mut self.failing) {
                        tracing::info!("connections can be accepted again");
                    }
                    return accepted;
                }
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) => {
                    if !std::mem::replace(&mut self.failing, true) {
                        tracing::error!(%error, "connections cannot be accepted");
                    }
                    sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

impl Rest {
    async fn hand_over(self, load: &Load) {
        for connection in self.connections {
            if !hand_over(&self.queues, load, self.entry, &mut Some(connection)).await {
                return;
            }
        }
    }
}

/// Gives a connection to the worker with the fewest, which takes it out of `in_hand`. `false`: that worker is gone.
async fn hand_over(
    queues: &[mpsc::Sender<Accepted>],
    load: &Load,
    entry: usize,
    in_hand: &mut Option<InHand>,
) -> bool {
    let Some((worker, queue)) = idlest(queues, load) else {
        return false;
    };
    let Ok(place) = queue.reserve().await else {
        return false;
    };
    if let Some((socket, addr, permit)) = in_hand.take() {
        place.send(Accepted {
            entry,
            socket,
            addr,
            counted: Counted::new(load, worker, permit),
        });
    }
    true
}

/// The worker with the fewest connections.
fn idlest<'q>(
    queues: &'q [mpsc::Sender<Accepted>],
    load: &Load,
) -> Option<(usize, &'q mpsc::Sender<Accepted>)> {
    queues
        .iter()
        .enumerate()
        .min_by_key(|(worker, _)| load.of(*worker))
}

/// A thread that serves connections.
struct Worker {
    thread: JoinHandle<usize>,
    queue: mpsc::Sender<Accepted>,
    ready: oneshot::Receiver<io::Result<()>>,
}

impl Worker {
    fn start<H, M, F>(
        index: usize,
        entries: &[Entry],
        load: &Load,
        make_handler: M,
        cut: watch::Receiver<bool>,
    ) -> io::Result<Self>
    where
        H: Handler,
        M: Fn(usize) -> F + Send + 'static,
        F: Future<Output = Rc<H>> + 'static,
    {
        let (queue, accepted) = mpsc::channel(HANDOFF_QUEUE);
        let (tell_ready, ready) = oneshot::channel();
        let load = load.clone();
        let entrances: Vec<_> = entries
            .iter()
            .map(|entry| {
                (
                    entry.door,
                    Entrance::new(&entry.settings, &entry.tls),
                    entry.settings.clone(),
                )
            })
            .collect();
        let thread = std::thread::Builder::new()
            .name(format!("tidegate-worker-{index}"))
            .spawn(move || {
                let runtime = match Builder::new_current_thread()
                    .enable_all()
                    .max_blocking_threads(LOOKUP_THREADS)
                    .build_local(LocalOptions::default())
                {
                    Ok(runtime) => runtime,
                    Err(error) => {
                        drop(tell_ready.send(Err(error)));
                        return 0;
                    }
                };
                let cut = runtime.block_on(async {
                    let handler = make_handler(index).await;
                    drop(tell_ready.send(Ok(())));
                    let tidy = Rc::<Tidy>::default();
                    let ways = entrances.into_iter().map(|(door, entrance, settings)| {
                        let tidy = Rc::clone(&tidy);
                        let protocols =
                            Rc::new(Protocols::new(&settings, door, load.clone(), tidy));
                        Way {
                            door,
                            entrance: entrance.into(),
                            protocols,
                        }
                    });
                    let cut = work(Rc::clone(&handler), ways.collect(), accepted, cut, &load).await;
                    // Connections that were cut let go of their requests.
                    tokio::task::yield_now().await;
                    handler.finish().await;
                    cut
                });
                // Dropping it would wait for lookups that nobody needs any more.
                runtime.shutdown_background();
                cut
            })?;
        Ok(Self {
            thread,
            queue,
            ready,
        })
    }
}

async fn all_ready(workers: &mut [Worker]) -> io::Result<()> {
    for worker in workers {
        (&mut worker.ready)
            .await
            .unwrap_or_else(|_dropped| Err(worker_died()))?;
    }
    Ok(())
}

/// How connections of one address come in and are served, on one worker.
struct Way {
    door: Door,
    entrance: Rc<Entrance>,
    protocols: Rc<Protocols>,
}

/// A worker's life. Returns how many connections were cut.
async fn work<H: Handler>(
    handler: Rc<H>,
    ways: Vec<Way>,
    mut accepted: mpsc::Receiver<Accepted>,
    mut cut: watch::Receiver<bool>,
    load: &Load,
) -> usize {
    let mut connections = JoinSet::new();
    let watches: Rc<RefCell<HashMap<u64, Rc<Watch>>>> = Rc::default();
    let mut serial = 0;
    loop {
        tokio::select! {
            next = accepted.recv() => {
                let Some(next) = next else { break };
                let Some(Way { door, entrance, protocols }) = ways.get(next.entry) else { continue };
                let watch = Watch::new(protocols.patience(), handler.counts());
                serial += 1;
                watches.borrow_mut().insert(serial, Rc::clone(&watch));
                let listed = Listed { watches: Rc::clone(&watches), serial };
                let (handler, protocols) = (Rc::clone(&handler), Rc::clone(protocols));
                let (door, entrance) = (*door, Rc::clone(entrance));
                connections.spawn_local(async move {
                    let _listed = listed;
                    let Accepted { socket, addr, counted: _counted, .. } = next;
                    let socket = match socket.adopt() {
                        Ok(socket) => RawSocket::new(socket, Rc::clone(&watch)),
                        Err(error) => return tracing::debug!(%error, "a connection ended before it began"),
                    };
                    match entrance.enter(socket, addr).await {
                        Ok(mut entered) => {
                            entered.peer.door = door;
                            serve(entered, handler, protocols, watch).await;
                        }
                        Err(turned_away) => {
                            if let Some(fault) = turned_away.fault {
                                handler.not_entered(fault);
                            }
                            Box::pin(turned_away.part()).await;
                        }
                    }
                });
            }
            Some(ended) = connections.join_next() => note_end(ended, load),
            _ = cut.wait_for(|cut| *cut) => return unfinished(connections),
        }
    }
    for watch in watches.borrow().values() {
        watch.drain();
    }
    loop {
        tokio::select! {
            biased;
            ended = connections.join_next() => match ended {
                Some(ended) => note_end(ended, load),
                None => return 0,
            },
            _ = cut.wait_for(|cut| *cut) => return unfinished(connections),
        }
    }
}

fn unfinished(mut connections: JoinSet<()>) -> usize {
    while connections.try_join_next().is_some() {}
    connections.len()
}

/// A panic ends its own connection only, but must not pass unseen.
fn note_end(ended: Result<(), JoinError>, load: &Load) {
    if let Err(error) = ended {
        load.note_panic();
        tracing::error!(%error, "a connection ended in a panic");
    }
}

/// Takes a connection off the list of those to be told of the end.
struct Listed {
    watches: Rc<RefCell<HashMap<u64, Rc<Watch>>>>,
    serial: u64,
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.watches.borrow_mut().remove(&self.serial);
    }
}
