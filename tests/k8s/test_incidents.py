"""Causes each incident in a real proxy, and tests which alerts fire for it: one or two, never one per policy or pod.

The proxy's metrics are read in a healthy state and during the incident. promtool then evaluates the shipped rules on
half an hour of series with the same rates, in two pods: healthy, incident, healthy again.
"""

import concurrent.futures
import contextlib
import http.client
import os
import pathlib
import re
import socket
import subprocess
import tempfile
import threading
import time
import unittest

import yaml

from pod import fetch
from render import MONITORING, of_kind, rendered

BINARY = os.environ["TIDEGATE"]
RULES = of_kind(rendered(MONITORING), "PrometheusRule")[0]["spec"]
NAMES = set(re.findall(r"\btidegate_\w+", yaml.dump(RULES)))
STEP_S = 15
# Steps of each phase: longer than all windows and `for` of the rules together.
PHASE = 60
PHASE_MINUTES = PHASE * STEP_S // 60
MINUTES = 3 * PHASE_MINUTES
PODS = ("a", "b")
HEALTHY_S, SETTLE_S, INCIDENT_S = 2, 3, 4
POLICIES = 5
TIMEOUT_S = 0.5


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


class Server:
    """Calls `serve` with each accepted connection, in threads, until `stop`."""

    def __init__(self, serve):
        self.serve, self.connections = serve, []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with self.listener:
            while True:
                try:
                    connection, _ = self.listener.accept()
                except OSError:
                    return
                self.connections.append(connection)
                threading.Thread(target=self.run, args=[connection], daemon=True).start()

    def run(self, connection):
        with connection, contextlib.suppress(OSError):
            self.serve(connection)

    def stop(self):
        for one in (self.listener, *self.connections):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def respond(connection):
    """An app that responds with 200 to every request."""
    while connection.recv(65536):
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")


class Relay(Server):
    """Passes connections on to a port. `delay_s` delays the replies; `every` selects only each n-th of them."""

    def __init__(self, target):
        super().__init__(self.relay)
        self.target, self.delay_s, self.every = target, 0, 1

    def relay(self, client):
        with socket.create_connection(("127.0.0.1", self.target)) as server:
            threading.Thread(target=self.send_requests, args=[client, server], daemon=True).start()
            replies = 0
            while data := server.recv(65536):
                replies += 1
                if self.delay_s and replies % self.every == 0:
                    time.sleep(self.delay_s)
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)

    def send_requests(self, client, server):
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)


class Service:
    """Redis, an app and the proxy with five policies and a relay between proxy and Redis."""

    def __init__(self, folder, failure):
        redis_port = free_port()
        self.redis = subprocess.Popen(["redis-server", "--port", str(redis_port), "--save", "", "--dir", folder],
                                      stdout=subprocess.DEVNULL)
        self.relay = Relay(redis_port)
        self.app = Server(respond)
        self.port, self.admin = free_port(), free_port()
        policies = "".join(f"""
[[policy]]
name = "p{number}"
key = ["header:x-user"]
limit = {{ requests = 60, per = "1s" }}
""" for number in range(POLICIES))
        config = pathlib.Path(folder, "config.toml")
        config.write_text(f"""
[listen]
address = "127.0.0.1:{self.port}"
[upstream]
url = "http://127.0.0.1:{self.app.port}"
[client]
trusted_headers = ["x-user"]
[store]
kind = "redis"
[store.redis]
url = "redis://127.0.0.1:{self.relay.port}"
# A busy machine is not an incident.
timeout = "{TIMEOUT_S * 1000:.0f}ms"
[defaults]
on_store_failure = "{failure}"
[admin]
address = "127.0.0.1:{self.admin}"
{policies}
[[policy]]
name = "tight"
match = {{ path = "/tight" }}
limit = {{ requests = 1, per = "1m" }}
""")
        self.proxy = subprocess.Popen([BINARY, "run", "--config", str(config)], stderr=subprocess.DEVNULL)
        self.paths = ["/"]
        self.pause_s = 0.02
        self.done = threading.Event()
        deadline = time.monotonic() + 20
        while "tidegate_store_up 1" not in self.metrics():
            if time.monotonic() > deadline:
                raise AssertionError("the proxy has no store")
            time.sleep(0.05)
        threading.Thread(target=self.send, daemon=True).start()

    def stop(self):
        self.done.set()
        for process in (self.proxy, self.redis):
            process.kill()
            process.wait()
        self.app.stop()
        self.relay.stop()

    def send(self):
        """Sends requests one after the other."""
        sent = 0
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)) as connection:
            while not self.done.is_set():
                try:
                    connection.request("GET", self.paths[sent % len(self.paths)], headers={"x-user": "ann"})
                    connection.getresponse().read()
                except (OSError, http.client.HTTPException):
                    connection.close()
                sent += 1
                time.sleep(self.pause_s)

    def metrics(self):
        return fetch(f"http://127.0.0.1:{self.admin}/metrics")[1]

    def read(self):
        """Values of the metrics that the rules use, by series."""
        samples = re.findall(r"^(tidegate_\w+)(?:\{(.*)\})? (\S+)$", self.metrics(), re.MULTILINE)
        return {(name, labels): float(value) for name, labels, value in samples if name in NAMES}

    def observe(self, seconds):
        """Reads the metrics for some seconds, ten times: the increase of each counter per step, and the values of each
        gauge."""
        begin = time.monotonic()
        reads = [self.read()]
        for _ in range(10):
            time.sleep(seconds / 10)
            reads.append(self.read())
        took = time.monotonic() - begin
        found = {}
        for series in reads[-1]:
            values = [read.get(series, 0.0) for read in reads]
            is_counter = series[0].endswith("_total")
            found[series] = (values[-1] - values[0]) * STEP_S / took if is_counter else values[1:]
        return found


def in_time(healthy, incident):
    """The values of a series through the three phases."""
    phases = (healthy, incident, healthy)
    if isinstance(incident, list):
        return [(phase or [0])[step % len(phase or [0])] for phase in phases for step in range(PHASE)]
    value, values = 0, []
    for phase in phases:
        for _ in range(PHASE):
            value += phase or 0
            values.append(value)
    return values


def firing(folder, healthy, incident):
    """Names of the alerts, with their number, that fire at the end of each minute."""
    series = []
    for (name, labels), now in incident.items():
        before = healthy.get((name, labels), [0] if isinstance(now, list) else 0)
        for pod in PODS:
            own = ",".join(filter(None, [f'namespace="n",job="orders",pod="{pod}"', labels]))
            values = " ".join(f"{value:.3f}" for value in in_time(before, now))
            series.append({"series": f"{name}{{{own}}}", "values": values})
    (folder / "rules.yaml").write_text(yaml.dump(RULES))
    # promtool prints the samples that it found where they differ from the expected ones.
    checks = [{"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": f"{minute}m",
               "exp_samples": [{"labels": "expected", "value": 0}]} for minute in range(1, MINUTES + 1)]
    test = {"rule_files": ["rules.yaml"], "evaluation_interval": f"{STEP_S}s",
            "tests": [{"interval": f"{STEP_S}s", "input_series": series, "promql_expr_test": checks}]}
    (folder / "incident.yaml").write_text(yaml.dump(test))
    done = subprocess.run(["promtool", "test", "rules", str(folder / "incident.yaml")], capture_output=True, text=True,
                          timeout=60)
    found = re.findall(r"^ *got: *(.*)$", done.stdout + done.stderr, re.MULTILINE)
    if len(found) != MINUTES:
        raise AssertionError(done.stdout + done.stderr)
    return [{name: int(float(count)) for name, count in re.findall(r'alertname="Tidegate(\w+)"\} (\S+?),?(?= |$)', line)}
            for line in found]


def redis_down(service):
    service.redis.kill()


def redis_hangs(service):
    service.relay.delay_s = 10 * TIMEOUT_S


def redis_slow(service):
    service.relay.delay_s = 1.5 * TIMEOUT_S


def redis_sometimes_slow(service):
    service.relay.delay_s, service.relay.every = 1.2 * TIMEOUT_S, 3


def app_down(service):
    service.app.stop()


def flood(service):
    service.pause_s = 0


def one_policy_blocks(service):
    service.paths = ["/"] * 4 + ["/tight"]


# What happens, `on_store_failure`, and the alerts that fire in the end.
INCIDENTS = [
    *((redis_down, failure, {"StoreDown"}) for failure in ("open", "closed", "local")),
    (redis_hangs, "local", {"StoreDown"}),
    (redis_slow, "open", {"StoreDown"}),
    (redis_sometimes_slow, "open", {"StoreErrors", "Degraded"}),
    (app_down, "open", {"UpstreamErrors"}),
    (flood, "open", {"BlockRateHigh"}),
    (one_policy_blocks, "open", {"BlockRateHigh"}),
]


class Incidents(unittest.TestCase):
    def test_an_incident_fires_one_or_two_alerts_and_its_end_none(self):
        with concurrent.futures.ThreadPoolExecutor(len(INCIDENTS)) as pool:
            incidents = list(pool.map(lambda one: self.observe(*one), INCIDENTS))
        for (cause, failure, expected), minutes in zip(INCIDENTS, incidents):
            with self.subTest(incident=cause.__name__, on_store_failure=failure):
                quiet, during, after = (minutes[phase * PHASE_MINUTES:(phase + 1) * PHASE_MINUTES] for phase in range(3))
                self.assertEqual([alerts for alerts in quiet[:-1] if alerts], [], "in health")
                self.assertEqual(during[-2], dict.fromkeys(expected, 1), "in the incident")
                self.assertLessEqual(max(sum(alerts.values()) for alerts in minutes), 2, minutes)
                new = {alert for alerts in after for alert in alerts} - expected
                self.assertEqual((new, after[-1]), (set(), {}), "after the incident")

    def observe(self, cause, failure, _):
        with tempfile.TemporaryDirectory() as folder:
            service = Service(folder, failure)
            try:
                healthy = service.observe(HEALTHY_S)
                cause(service)
                time.sleep(SETTLE_S)
                incident = service.observe(INCIDENT_S)
            finally:
                service.stop()
            return firing(pathlib.Path(folder), healthy, incident)


if __name__ == "__main__":
    unittest.main()
