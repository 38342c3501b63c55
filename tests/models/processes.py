"""Starts the servers, Redis and tidegate on free loopback ports, and stops them at the end."""

import json
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from loopback import DIR, children, free_port, stop  # noqa: E402

START_S = 30
SETTLE_S = 3


def start(name, port, *command):
    """Starts a program and waits until it accepts connections."""
    path = DIR / f"{name}.log"
    with open(path, "wb") as log:
        child = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    children.append(child)
    deadline = time.monotonic() + START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
            return child
        except OSError:
            if child.poll() is not None or time.monotonic() > deadline:
                text = path.read_text(errors="replace")
                raise RuntimeError(f"{name} does not listen: {text[-2000:]}") from None
            time.sleep(0.02)


def start_servers():
    """Returns the URL of the model servers."""
    port = free_port()
    start("servers", port, sys.executable, HERE / "servers.py", port)
    return f"http://127.0.0.1:{port}"


def start_redis(program):
    """Returns the URL of Redis."""
    port = free_port()
    options = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", DIR]
    start("redis", port, program, "--port", port, *options)
    return f"redis://127.0.0.1:{port}/0"


def get_json(url):
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


CONFIG = """
[listen]
address = "127.0.0.1:{port}"
max_connections = 20000
[upstream]
url = "{upstream}"
max_connections = 4000
max_connections_per_client = 0
queue_timeout = "10s"
[admin]
address = "127.0.0.1:{admin}"
[log]
access = "off"
{store}
"""
REDIS = """
[store.redis]
url = "{url}"
key_prefix = "{prefix}"
timeout = "2s"
"""


class Proxy:
    """A running tidegate."""

    def __init__(self, program, upstream, policies, redis_url=None, prefix="models"):
        self.port, self.admin = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        store = REDIS.format(url=redis_url, prefix=prefix) if redis_url else ""
        text = CONFIG.format(port=self.port, admin=self.admin, upstream=upstream, store=store) + policies
        self.name = f"tidegate-{self.port}"
        self.config = DIR / f"{self.name}.toml"
        self.config.write_text(text)
        self.program = program
        self.child = start(self.name, self.port, program, "run", "--config", self.config)

    def used(self, policy, *key):
        """The units charged to a key, as the admin endpoint reports them."""
        query = urllib.parse.urlencode([("policy", policy), *(("key", value) for value in key)])
        return get_json(f"http://127.0.0.1:{self.admin}/keys?{query}")["limits"][0]["used"]

    def used_after(self, expected, policy, *key):
        """As `used`, but waits some seconds for the settlement that leads to `expected`."""
        deadline = time.monotonic() + SETTLE_S
        while (used := self.used(policy, *key)) != expected and time.monotonic() < deadline:
            time.sleep(0.02)
        # A wrong later settlement would follow at once.
        time.sleep(0.05)
        return self.used(policy, *key) if used == expected else used

    def shown(self, policy, *key):
        """As `used`, from `tidegate keys show`."""
        command = [self.program, "keys", "show", policy, *key, "--config", self.config, "--json"]
        done = subprocess.run(command, capture_output=True, check=True, timeout=30)
        return json.loads(done.stdout)["limits"][0]["used"]

    def memory_kib(self):
        """Resident memory."""
        text = Path(f"/proc/{self.child.pid}/status").read_text()
        return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS:"))

    def log(self):
        return (DIR / f"{self.name}.log").read_text(errors="replace")


class Site:
    """What checks run on: the servers, the program, and a store."""

    def __init__(self, servers, program, redis_url):
        self.servers, self.program, self.redis_url = servers, program, redis_url
        self.prefixes = 0

    @contextmanager
    def proxies(self, policies, number=1):
        """Proxies that share the store, with counters of their own."""
        self.prefixes += 1
        prefix = f"models-{self.prefixes}"
        running = []
        try:
            for _ in range(number):
                running.append(Proxy(self.program, self.servers, policies, self.redis_url, prefix))
            yield running
        finally:
            for proxy in running:
                stop(proxy.child)

    @contextmanager
    def proxy(self, policies):
        with self.proxies(policies) as (proxy,):
            yield proxy

    def log_of(self, user):
        """The requests of a user that reached the servers."""
        return get_json(f"{self.servers}/log?{urllib.parse.urlencode({'user': user})}")
