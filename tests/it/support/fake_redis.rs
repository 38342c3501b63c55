//! Faulty Redis servers: a relay that delays or drops replies, and servers with invalid replies.

use super::prelude::*;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};

/// Forwards bytes between clients and a server, until the test's runtime ends.
pub(crate) struct TcpRelay {
    pub(crate) port: u16,
    mode: Arc<AtomicU64>,
}

const DROP_REPLIES: u64 = u64::MAX;
const CLOSE_SERVER_SIDE: u64 = u64::MAX - 1;
const REFUSE_CONNECTIONS: u64 = u64::MAX - 2;

impl TcpRelay {
    pub(crate) async fn start(port: u16) -> Self {
        let mode = Arc::<AtomicU64>::default();
        let relayed = Arc::clone(&mode);
        let address = serve_connections(move |client| {
            let mode = Arc::clone(&relayed);
            async move {
                if mode.load(Ordering::Relaxed) == REFUSE_CONNECTIONS {
                    return;
                }
                let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await else {
                    return;
                };
                let ((from_client, to_client), (from_server, to_server)) =
                    (client.into_split(), server.into_split());
                tokio::spawn(relay_bytes(from_client, to_server, Arc::default()));
                relay_bytes(from_server, to_client, mode).await;
            }
        })
        .await;
        Self {
            port: address.port(),
            mode,
        }
    }

    pub(crate) fn forward_at_once(&self) {
        self.mode.store(0, Ordering::Relaxed);
    }

    /// Delays replies by this duration.
    pub(crate) fn delay_replies(&self, by: Duration) {
        self.mode
            .store(u64::try_from(by.as_millis()).unwrap(), Ordering::Relaxed);
    }

    /// Drops all replies.
    pub(crate) fn drop_replies(&self) {
        self.mode.store(DROP_REPLIES, Ordering::Relaxed);
    }

    /// Closes new connections at once. Open connections are not affected.
    pub(crate) fn refuse_connections(&self) {
        self.mode.store(REFUSE_CONNECTIONS, Ordering::Relaxed);
    }

    /// Closes the server's side in place of the next reply. The client's side stays open.
    pub(crate) fn close_server_side(&self) {
        self.mode.store(CLOSE_SERVER_SIDE, Ordering::Relaxed);
    }
}

async fn relay_bytes(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, mode: Arc<AtomicU64>) {
    let mut bytes = vec![0; 65_536];
    while let Ok(count @ 1..) = from.read(&mut bytes).await {
        match mode.load(Ordering::Relaxed) {
            DROP_REPLIES => continue,
            REFUSE_CONNECTIONS => {}
            CLOSE_SERVER_SIDE => {
                drop(to.shutdown().await);
                // Dropping this half would end the other direction too.
                std::future::pending::<()>().await;
            }
            late_ms => tokio::time::sleep(Duration::from_millis(late_ms)).await,
        }
        if to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}

/// As [`TcpRelay`], with functions that see and may change the bytes of commands and replies. The
/// direction of one that returns `false` forwards nothing more.
pub(crate) async fn start_filtering_relay(
    port: u16,
    commands: impl Fn(&mut [u8]) -> bool + Clone + Send + 'static,
    replies: impl Fn(&mut [u8]) -> bool + Clone + Send + 'static,
) -> u16 {
    let serve = move |client: TcpStream| {
        let (commands, replies) = (commands.clone(), replies.clone());
        async move {
            let server = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            let ((from_client, to_client), (from_server, to_server)) =
                (client.into_split(), server.into_split());
            tokio::spawn(filter_bytes(from_client, to_server, commands));
            filter_bytes(from_server, to_client, replies).await;
        }
    };
    serve_connections(serve).await.port()
}

async fn filter_bytes(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    passes: impl Fn(&mut [u8]) -> bool,
) {
    let mut bytes = vec![0; 65_536];
    while let Ok(count @ 1..) = from.read(&mut bytes).await {
        if !passes(&mut bytes[..count]) {
            std::future::pending::<()>().await;
        }
        if to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}

/// Starts a server that replies like Redis until a connection passes its startup check. It answers
/// the next call with `answer`. Returns its port.
pub(crate) async fn start_faulty_redis(answer: &'static [u8]) -> u16 {
    let serve = move |client| serve_faulty_redis(client, answer);
    serve_connections(serve).await.port()
}

/// A server that admits every request, until it is given a fault.
pub(crate) struct ScriptedRedis {
    pub(crate) port: u16,
    fault: Arc<Mutex<Option<RedisFault>>>,
    connection_count: Arc<AtomicU64>,
}

/// How a server answers scripts in place of a decision.
#[derive(Clone)]
pub(crate) struct RedisFault {
    pub(crate) reply: Vec<u8>,
    pub(crate) then: AfterReply,
}

/// What a server does with a connection after a faulty reply.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum AfterReply {
    Serve,
    Hang,
    Close,
}

impl ScriptedRedis {
    pub(crate) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = Self {
            port: listener.local_addr().unwrap().port(),
            fault: Arc::default(),
            connection_count: Arc::default(),
        };
        let (fault, connection_count) = (
            Arc::clone(&server.fault),
            Arc::clone(&server.connection_count),
        );
        let port = server.port;
        tokio::spawn(async move {
            loop {
                let (client, _) = listener.accept().await.unwrap();
                connection_count.fetch_add(1, Ordering::Relaxed);
                client.set_nodelay(true).unwrap();
                tokio::spawn(serve_scripted_redis(client, port, Arc::clone(&fault)));
            }
        });
        server
    }

    pub(crate) fn set_fault(&self, fault: Option<RedisFault>) {
        *self.fault.lock().unwrap() = fault;
    }

    /// The number of connections so far.
    pub(crate) fn connection_count(&self) -> u64 {
        self.connection_count.load(Ordering::Relaxed)
    }
}

async fn serve_scripted_redis(client: TcpStream, port: u16, fault: Arc<Mutex<Option<RedisFault>>>) {
    let (from, mut to) = client.into_split();
    let mut from = BufReader::new(from);
    while let Some(words) = read_command_words(&mut from).await {
        let fault = fault.lock().unwrap().clone();
        let (reply, then) = match (words[0].as_str(), fault) {
            ("EVALSHA", Some(RedisFault { reply, then })) => (reply, then),
            // The membership script has two keys.
            ("EVAL", Some(RedisFault { reply, then })) if words[2] != "2" => (reply, then),
            ("EVALSHA", None) => (admitting_reply(&words).into_bytes(), AfterReply::Serve),
            // One node holds all slots.
            ("CLUSTER", _) => {
                let slots =
                    format!("*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:{port}\r\n");
                (slots.into_bytes(), AfterReply::Serve)
            }
            _ => (b"+OK\r\n".to_vec(), AfterReply::Serve),
        };
        if to.write_all(&reply).await.is_err() || then == AfterReply::Close {
            return;
        }
        if then == AfterReply::Hang {
            while read_command_words(&mut from).await.is_some() {}
            return;
        }
    }
}

/// Starts a cluster node whose slots move: it refuses scripts with two keys. All overrides are
/// `override_text`. It makes every charge, but can't read a counter. Returns its port.
pub(crate) async fn start_node_with_moving_slots(override_text: &'static str) -> u16 {
    let serve = move |client: TcpStream| {
        let port = client.local_addr().unwrap().port();
        serve_moving_slots(client, port, override_text)
    };
    serve_connections(serve).await.port()
}

async fn serve_moving_slots(client: TcpStream, port: u16, override_text: &'static str) {
    let (from, mut to) = client.into_split();
    let mut from = BufReader::new(from);
    while let Some(words) = read_command_words(&mut from).await {
        let group = words.get(5).and_then(|text| text.split(' ').nth(1));
        let options: u64 = group.map_or(0, |group| group.parse::<u64>().unwrap_or(0) % 32);
        let reply = match (words[0].as_str(), words.get(2).map(String::as_str)) {
            ("EVALSHA", Some("2")) => "-TRYAGAIN the slot moves\r\n".to_owned(),
            ("EVALSHA", _) if options >= 16 => "-ERR the counter can't be read\r\n".to_owned(),
            ("EVALSHA", _) => admitting_reply(&words),
            ("MGET", _) => format!("*1\r\n${}\r\n{override_text}\r\n", override_text.len()),
            ("CLUSTER", _) => {
                format!("*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$9\r\n127.0.0.1\r\n:{port}\r\n")
            }
            _ => "+OK\r\n".to_owned(),
        };
        if to.write_all(reply.as_bytes()).await.is_err() {
            return;
        }
    }
}

/// The reply of `decide.lua` to at most one charge of one unit, on an unused counter.
fn admitting_reply(words: &[String]) -> String {
    const NOW_US: u64 = 1_700_000_000_000_000;
    let mut text = NOW_US.to_string();
    if words[2] == "1" {
        // A plain call has the numbers as arguments.
        let charge = match words.get(6) {
            Some(_) => format!("l 0 {}", words[5..].join(" ")),
            None => words[5].clone(),
        };
        let field = |n| charge.split(' ').nth(n).unwrap().parse::<u64>().unwrap();
        text.push_str(&format!(" 0 {} {}", field(3) - 1, NOW_US + 1000));
        // A charge that will be settled.
        if field(1) & 4 != 0 {
            text.push_str(&format!(" {NOW_US}"));
        }
    }
    format!("${}\r\n{text}\r\n", text.len())
}

/// Starts a server that answers each command with the same bytes. If there are none, it closes the
/// connection. Returns its port.
pub(crate) async fn start_fixed_reply_server(answer: &'static [u8]) -> u16 {
    let serve = move |client: TcpStream| async move {
        let (from, mut to) = client.into_split();
        let mut from = BufReader::new(from);
        while read_command(&mut from).await.is_some() {
            if answer.is_empty() || to.write_all(answer).await.is_err() {
                return;
            }
        }
    };
    serve_connections(serve).await.port()
}

/// What a Redis proxy refuses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ProxyRefusal {
    /// Closes the connection at a command that needs no key, as twemproxy.
    CloseWithoutKey,
    /// Answers a script call without keys by an error, as Envoy.
    ErrorWithoutKey,
    /// Knows no script commands but EVAL.
    OnlyEval,
}

/// Starts a Redis proxy in front of a server. Returns its port.
pub(crate) async fn start_redis_proxy(server_port: u16, refusal: ProxyRefusal) -> u16 {
    start_redis_proxy_for(server_port, refusal, u64::MAX).await
}

/// Starts a Redis proxy that closes only so many connections at a command without a key.
pub(crate) async fn start_redis_proxy_for(
    server_port: u16,
    refusal: ProxyRefusal,
    closed_connections: u64,
) -> u16 {
    let closes_left = Arc::new(AtomicU64::new(closed_connections));
    let serve = move |client| {
        let closes_left = Arc::clone(&closes_left);
        async move {
            let server = TcpStream::connect(("127.0.0.1", server_port));
            serve_redis_proxy(client, server.await.unwrap(), refusal, closes_left).await;
        }
    };
    serve_connections(serve).await.port()
}

async fn serve_redis_proxy(
    client: TcpStream,
    server: TcpStream,
    refusal: ProxyRefusal,
    closes_left: Arc<AtomicU64>,
) {
    let ((from_client, to_client), (from_server, mut to_server)) =
        (client.into_split(), server.into_split());
    let replies = tokio::spawn(relay_bytes(from_server, to_client, Arc::default()));
    let mut from_client = BufReader::new(from_client);
    while let Some(mut words) = read_command_words(&mut from_client).await {
        let name = words[0].to_ascii_uppercase();
        let is_script = name == "EVAL" || name == "EVALSHA";
        let lacks_key = is_script && words[2] == "0";
        let is_keyed = is_script || matches!(&*name, "DEL" | "GET" | "SET" | "PING" | "AUTH");
        match refusal {
            ProxyRefusal::CloseWithoutKey if lacks_key || !is_keyed => {
                let (load, store) = (Ordering::Relaxed, Ordering::Relaxed);
                if closes_left
                    .fetch_update(load, store, |left| left.checked_sub(1))
                    .is_ok()
                {
                    break;
                }
            }
            // The server's own error keeps the order of the replies.
            ProxyRefusal::ErrorWithoutKey if lacks_key => words = vec!["GET".to_owned()],
            ProxyRefusal::OnlyEval if matches!(&*name, "SCRIPT" | "EVALSHA") => {
                words = vec![format!("no{name}")];
            }
            _ => {}
        }
        let mut bytes = format!("*{}\r\n", words.len());
        for word in &words {
            bytes.push_str(&format!("${}\r\n{word}\r\n", word.len()));
        }
        if to_server.write_all(bytes.as_bytes()).await.is_err() {
            break;
        }
    }
    replies.abort();
}

async fn serve_faulty_redis(client: TcpStream, answer: &'static [u8]) {
    const VALID_REPLY: &[u8] = b"$52\r\n1700000000000000 0 9007199254740991 1700000000001000\r\n";
    let (from, mut to) = client.into_split();
    let mut from = BufReader::new(from);
    let mut decisions = 0;
    while let Some(command) = read_command(&mut from).await {
        let reply = match command.as_str() {
            "EVALSHA" => {
                decisions += 1;
                // The empty call and the startup check.
                if decisions <= 2 { VALID_REPLY } else { answer }
            }
            "EVAL" => answer,
            _ => b"+OK\r\n",
        };
        if reply.is_empty() || to.write_all(reply).await.is_err() {
            return;
        }
    }
}

/// Reads one command and returns its first word.
async fn read_command(from: &mut BufReader<OwnedReadHalf>) -> Option<String> {
    read_command_words(from).await?.into_iter().next()
}

pub(crate) async fn read_command_words(from: &mut BufReader<OwnedReadHalf>) -> Option<Vec<String>> {
    let mut line = String::new();
    from.read_line(&mut line).await.ok()?;
    let count: usize = line.trim_end().strip_prefix('*')?.parse().ok()?;
    let mut words = Vec::new();
    for _ in 0..count {
        line.clear();
        from.read_line(&mut line).await.ok()?;
        let length: usize = line.trim_end().strip_prefix('$')?.parse().ok()?;
        let mut word = vec![0; length + 2];
        from.read_exact(&mut word).await.ok()?;
        words.push(String::from_utf8_lossy(&word[..length]).into_owned());
    }
    Some(words)
}
