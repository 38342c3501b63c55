#!/usr/bin/env python3
"""The training run of profile-guided optimisation: fixed requests through an instrumented tidegate, on loopback.

    LLVM_PROFILE_FILE=DIR/%p.profraw packaging/train.py PATH-OF-tidegate

Called by packaging/build.sh. Small and 64 KiB responses, uploads, and all algorithms admitted and rejected, with limits
in memory and in a Redis of its own; over HTTP/1.1 and HTTP/2, cleartext and TLS. It fails if responses have an
unexpected status, because the profile would then describe something else.
"""

import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import threading
import time

REQUESTS, CONNECTIONS, TIMEOUT_S, TRAINING_TIMEOUT_S = 1000, 8, 20, 300
ALGORITHMS = ["sliding_log", "sliding_window", "fixed_window", "token_bucket", "leaky_bucket"]
TLS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../src/proxy/tests/tls")
LARGE, UPLOAD = b"x" * 65536, b"x" * 16384
BUFFER = 1 << 18
CONTEXT = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
CONTEXT.check_hostname, CONTEXT.verify_mode = False, ssl.CERT_NONE


def respond(connection):
    """The upstream of one connection: 64 KiB for /large, else a few bytes."""
    received = b""
    while chunk := connection.recv(BUFFER):
        received += chunk
        while b"\r\n\r\n" in received:
            head, _, rest = received.partition(b"\r\n\r\n")
            length = content_length(head)
            if len(rest) < length:
                break
            received = rest[length:]
            body = LARGE if b" /large " in head else b"hello"
            connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n" % len(body) + body)


def serve(port):
    listener = socket.create_server(("127.0.0.1", port), backlog=512)
    while True:
        threading.Thread(target=respond, args=[listener.accept()[0]], daemon=True).start()


def content_length(head):
    _, found, rest = head.lower().partition(b"\r\ncontent-length:")
    return int(rest.split(b"\r\n", 1)[0]) if found else 0


class Http1:
    """A connection with one request at a time."""

    def __init__(self, connection):
        self.connection, self.received = connection, b""

    def send(self, path, key, body=b""):
        upload = b"content-length: %d\r\n" % len(body) if body else b""
        self.connection.sendall(
            b"%s %s HTTP/1.1\r\nhost: shop.example\r\nuser-agent: train/1\r\naccept: */*\r\naccept-encoding: gzip\r\nx-key: %s\r\n%s\r\n%s"
            % (b"POST" if body else b"GET", path, key, upload, body)
        )

    def receive(self):
        while b"\r\n\r\n" not in self.received:
            self.received += receive(self.connection, BUFFER)
        head, _, self.received = self.received.partition(b"\r\n\r\n")
        length = content_length(head)
        while len(self.received) < length:
            self.received += receive(self.connection, BUFFER)
        self.received = self.received[length:]
        return int(head.split(b" ", 2)[1])


class Http2:
    """A connection with one stream at a time. Header fields are literals, the authority with Huffman coding."""

    PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    AUTHORITY = b"\x01\x8c\xf1\xe3\xc2\xe5\xf2\x3a\x6b\xa0\xab\x90\xf4\xff"  # www.example.com
    FIRST = b"\x40\x0auser-agent\x07train/1\x40\x06accept\x03*/*"
    REPEATED = b"\xbf\xbe"

    def __init__(self, connection):
        self.connection, self.stream, self.fields = connection, -1, self.FIRST
        window = struct.pack(">HI", 4, 1 << 30)
        connection.sendall(self.PREFACE + self.frame(4, 0, 0, window) + self.frame(8, 0, 0, struct.pack(">I", 1 << 30)))

    @staticmethod
    def frame(kind, flags, stream, payload):
        return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload

    def send(self, path, key, body=b""):
        self.stream += 2
        block = (b"\x83" if body else b"\x82") + b"\x87\x04" + bytes([len(path)]) + path + self.AUTHORITY
        block += self.fields + b"\x00\x05x-key" + bytes([len(key)]) + key
        self.fields = self.REPEATED
        if body:
            block += b"\x0f\x0d\x05%d" % len(body)  # content-length
        data = self.frame(0, 1, self.stream, body) if body else b""
        self.connection.sendall(self.frame(1, 4 if body else 5, self.stream, block) + data)

    def receive(self):
        """Returns 200, or 429 for any other status."""
        status = None
        while True:
            head = self.exactly(9)
            length, (kind, flags, stream) = int.from_bytes(head[:3], "big"), struct.unpack(">BBI", head[3:])
            payload = self.exactly(length)
            if kind in (4, 6) and not flags & 1:  # SETTINGS and PING are acknowledged.
                self.connection.sendall(self.frame(kind, 1, 0, payload if kind == 6 else b""))
            if kind in (3, 7):
                sys.exit(f"train: HTTP/2 frame of kind {kind}: {payload!r}")
            if kind == 1 and stream == self.stream:
                status = status or (200 if payload[0] == 0x88 else 429)
            if kind in (0, 1) and flags & 1:
                return status

    def exactly(self, count):
        received = b""
        while len(received) < count:
            received += receive(self.connection, count - len(received))
        return received


def receive(connection, most):
    return connection.recv(most) or sys.exit("train: the proxy closed a connection")


def connect(port, protocol, tls):
    connection = socket.create_connection(("127.0.0.1", port), TIMEOUT_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls:
        CONTEXT.set_alpn_protocols(["h2" if protocol is Http2 else "http/1.1"])
        connection = CONTEXT.wrap_socket(connection, server_hostname="orders.internal")
    return protocol(connection)


def drive(clients, path, expected, requests=REQUESTS, keys=1, body=b""):
    """Sends requests on all connections at once. Most responses must have the expected status."""
    found = 0
    for turn in range(requests // len(clients)):
        for index, client in enumerate(clients):
            client.send(path, b"key-%d" % ((turn * len(clients) + index) % keys), body)
        found += sum(client.receive() == expected for client in clients)
    if found < 0.9 * requests:
        sys.exit(f"train: {path.decode()}: {found} of {requests} responses are {expected}")


def policy(path, limit, more=""):
    return f'[[policy]]\nname = "{path.replace("/", "-")}"\nmatch = {{ path = "/{path}" }}\nkey = ["header:x-key", "client_ip"]\nlimit = {{ {limit} }}\n{more}'


def policies():
    for algorithm in ALGORITHMS:
        delay = ', max_delay = "0s"' if algorithm == "leaky_bucket" else ""
        yield policy(f"admit/{algorithm}", f'requests = 1000000, per = "1h", algorithm = "{algorithm}"')
        yield policy(f"reject/{algorithm}", f'requests = 5, per = "1h", algorithm = "{algorithm}"{delay}')
    yield policy("lease", 'requests = 1000000, per = "1h", algorithm = "sliding_log"', 'lease = "auto"\n')
    yield policy("slots", 'requests = 1000, algorithm = "concurrency"')


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def start(port, *command):
    """Starts a program and waits until it listens."""
    with open("log", "wb") as log:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    children.append(child)
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return child
        except OSError:
            if child.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"train: {command[0]} does not listen: {open('log', encoding='utf-8').read()}")
            time.sleep(0.05)


def train(tidegate, upstream, store, tls):
    port = free_port()
    with open("config.toml", "w", encoding="utf-8") as config:
        config.write(f'[upstream]\nurl = "http://127.0.0.1:{upstream}"\n[listen]\naddress = "127.0.0.1:{port}"\nthreads = 1\n')
        if tls:
            config.write(f'[listen.tls]\ncert = "{TLS}/cert.pem"\nkey = "{TLS}/key.pem"\n')
        config.write(f'[admin]\naddress = "127.0.0.1:0"\n[log]\naccess = "off"\n{store}{"".join(policies())}')
    proxy = start(port, tidegate, "run", "--config", "config.toml")
    for protocol in (Http1, Http2):
        clients = [connect(port, protocol, tls) for _ in range(CONNECTIONS)]
        drive(clients, b"/orders/17?page=2", 200, 2 * REQUESTS)
        drive(clients, b"/large", 200)
        drive(clients, b"/upload", 200, REQUESTS // 8, body=UPLOAD)
        for algorithm in [name.encode() for name in ALGORITHMS]:
            drive(clients, b"/admit/" + algorithm, 200, REQUESTS // 2)
            drive(clients, b"/admit/" + algorithm, 200, REQUESTS // 2, keys=500)
            drive(clients, b"/reject/" + algorithm, 429, REQUESTS // 2)
        for path in (b"/lease", b"/slots"):
            drive(clients, path, 200, REQUESTS // 2)
        # Connections without reuse: handshakes of TLS, and the ends of connections.
        for _ in range(REQUESTS // 10):
            drive([connect(port, protocol, tls)], b"/orders/17?page=2", 200, 1)
    del clients
    # The profile is written at the regular end.
    proxy.send_signal(signal.SIGTERM)
    if proxy.wait(60) != 0:
        sys.exit(f"train: the proxy ended with {proxy.returncode}")


def main(tidegate):
    upstream, redis = free_port(), free_port()
    start(upstream, sys.executable, PROGRAM, "--upstream", str(upstream))
    start(redis, "redis-server", "--port", str(redis), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
    for store in ("", f'[store]\nkind = "redis"\n[store.redis]\nurl = "redis://127.0.0.1:{redis}"\ntimeout = "5s"\n'):
        for tls in (False, True):
            started = time.monotonic()
            train(tidegate, upstream, store, tls)
            print(f"train: {'Redis' if store else 'memory'}, {'TLS' if tls else 'cleartext'}: {time.monotonic() - started:.0f} s")


PROGRAM = os.path.abspath(__file__)
if sys.argv[1] == "--upstream":
    serve(int(sys.argv[2]))

children = []
binary = os.path.abspath(sys.argv[1])
signal.signal(signal.SIGTERM, lambda *_: sys.exit("train: stopped"))
signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"train: not done after {TRAINING_TIMEOUT_S} s"))
signal.alarm(TRAINING_TIMEOUT_S)
with tempfile.TemporaryDirectory(prefix="tidegate-train-") as scratch:
    os.chdir(scratch)
    try:
        main(binary)
    finally:
        for each in children:
            each.kill()
            each.wait()
