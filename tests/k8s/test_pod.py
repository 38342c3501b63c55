"""Runs k8s/ as local processes: checks each mounted configuration, then starts, reloads and stops the demo."""

import base64
import http.client
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import pod as pods
import test_helm
from pod import Kubelet, Pod, eventually, fetch
from render import ALL, CRONJOB, MONITORING, WORKLOADS, fronted, named, rendered, with_claims
from test_manifests import dashboard, of_kind

BINARY = os.environ["TIDEGATE"]
PROXY = ("127.0.0.1", 8080)
# Time until clients stop opening connections to a terminating pod: less than `shutdown.delay`.
DEREGISTRATION_S = 5
# The app of these tests. It responds with `ok`, to `/slow` after five seconds.
APP = r"""
import http.server, sys, time
class App(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        if self.path == "/slow":
            time.sleep(5)
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", 3000), App).serve_forever()
"""


def secret(name, **files):
    return {"kind": "Secret", "metadata": {"name": name},
            "data": {file: base64.b64encode(content).decode() for file, content in files.items()}}


def certificate(folder):
    names = [folder / "tls.crt", folder / "tls.key"]
    subprocess.run(["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
                    "-days", "30", "-subj", "/CN=orders", "-addext", "subjectAltName=DNS:orders",
                    "-out", names[0], "-keyout", names[1]], check=True, capture_output=True, timeout=60)
    return {path.name: path.read_bytes() for path in names}


def with_secrets(objects, folder):
    """The objects with the Secrets that the user creates."""
    there = {thing["metadata"]["name"] for thing in of_kind(objects, "Secret")}
    made = [secret("tidegate-redis", password=b"demo")] if "tidegate-redis" not in there else []
    return [*objects, *made, secret("orders-tls", **certificate(folder))]


class Machine(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(folder.name)
        self.log = open(self.folder / "log", "w+", encoding="utf-8")
        self.processes = []
        self.addCleanup(self.clean, folder)

    def clean(self, folder):
        for process in self.processes:
            if process and process.poll() is None:
                process.kill()
                process.wait()
        for line in reversed(pathlib.Path("/proc/mounts").read_text().splitlines()):
            if line.split()[1].startswith(str(self.folder)):
                subprocess.run(["umount", "-l", line.split()[1]], check=False)
        self.log.close()
        folder.cleanup()

    def log_text(self):
        self.log.flush()
        return (self.folder / "log").read_text()

    def pod(self, spec, objects, name="pod"):
        objects = with_secrets(objects, self.folder)
        certificate = base64.b64decode(named(objects, "Secret", "orders-tls")["data"]["tls.crt"])
        return Pod(spec, objects, self.folder / name, BINARY, certificate)


class Configurations(Machine):
    def test_each_mounted_configuration_is_valid(self):
        for name in ALL:
            with self.subTest(kustomization=name):
                objects = rendered(name)
                [workload] = [thing for thing in of_kind(objects, *WORKLOADS) if thing["metadata"]["name"] != "redis"]
                pod = self.pod(with_claims(workload), objects, name.replace("/", "-"))
                check = pod.start("tidegate", ["/tidegate", "check", "--strict", "/etc/tidegate/config.toml"])
                output, _ = check.communicate(timeout=30)
                self.assertEqual(check.returncode, 0, output)
                self.assertIn("partner: " if name == CRONJOB else "per-client: ", output)
                self.assertNotIn("warning", output)

    def test_tls_clients_and_probes_are_served(self):
        objects = rendered("overlays/tls")
        kubelet = Kubelet(self.pod(fronted(objects), objects), [sys.executable, "-c", APP], self.log)
        self.addCleanup(self.kill, kubelet)
        kubelet.start()
        self.assertEqual(fetch("https://127.0.0.1:8080/healthz")[0], 200)

    def test_the_chart_serves_tls_with_counters_in_memory(self):
        objects = test_helm.template({"redis": {"secret": ""}, "tls": {"secret": "orders-tls"}})
        kubelet = Kubelet(self.pod(test_helm.pod(objects), objects), [sys.executable, "-c", APP], self.log)
        self.addCleanup(self.kill, kubelet)
        kubelet.start()
        self.assertEqual([fetch("https://127.0.0.1:8080/")[0] for _ in range(101)], [200] * 100 + [429])

    def test_limits_apply_with_a_redis_cluster(self):
        objects = rendered("overlays/redis-cluster")
        acl = self.folder / "users.acl"
        acl.write_text("user default on nopass ~* &* +@all\nuser tidegate on >demo resetchannels ~orders:* -@all +@read "
                       "+@write +@scripting +@connection -@dangerous +time +info +cluster|slots +asking\n")
        node = ["redis-server", "--port", "6379", "--cluster-enabled", "yes", "--save", "", "--aclfile", str(acl),
                "--dir", str(self.folder), "--cluster-announce-ip", "127.0.0.1"]
        self.processes.append(subprocess.Popen(node, stdout=self.log))
        ask = ["redis-cli", "cluster"]
        eventually("a node of the cluster", lambda: subprocess.run([*ask, "addslotsrange", "0", "16383"], capture_output=True).stdout == b"OK\n")
        eventually("the cluster", lambda: b"cluster_state:ok" in subprocess.run([*ask, "info"], capture_output=True).stdout)
        kubelet = Kubelet(self.pod(fronted(objects), objects), [sys.executable, "-c", APP], self.log)
        self.addCleanup(self.kill, kubelet)
        kubelet.start()
        eventually("the store", lambda: "tidegate_store_up 1" in metrics())
        self.assertEqual([fetch("http://127.0.0.1:8080/")[0] for _ in range(101)], [200] * 100 + [429])

    def kill(self, kubelet):
        for process in (kubelet.sidecar, kubelet.app):
            if process:
                process.kill()
                process.wait()


class Demo(Machine):
    """The overlay `demo` with the metrics of `monitoring`, in one test because each start takes seconds."""

    def test_it_starts_serves_limits_reloads_and_stops(self):
        objects = rendered("overlays/demo")
        redis = self.pod(named(objects, "Deployment", "redis")["spec"]["template"]["spec"], objects, "redis")
        self.processes.append(redis.start("redis", log=self.log))
        self.kubelet = Kubelet(self.pod(fronted(objects), objects), [sys.executable, "-c", APP], self.log)
        try:
            self.kubelet.start()
            self.processes += [self.kubelet.sidecar, self.kubelet.app]
            self.only_the_proxy_and_probes_listen()
            self.limits_by_redis()
            self.exports_all_queried_metrics()
            self.reloads()
            self.stops()
        except AssertionError:
            print(self.log_text(), file=sys.stderr)
            raise

    def only_the_proxy_and_probes_listen(self):
        listening = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=True).stdout.split("\n")
        open_to_all = {line.split()[3].rpartition(":")[2] for line in listening if line and "127.0.0.1" not in line.split()[3]}
        self.assertEqual(open_to_all - {"6379"}, {"8080", "9091"})
        self.assertEqual(fetch("http://127.0.0.1:9091/config")[0], 404)

    def limits_by_redis(self):
        eventually("Redis with the user and password of the Secret", lambda: "tidegate_store_up 1" in metrics())
        codes = [fetch("http://127.0.0.1:8080/")[0] for _ in range(101)]
        self.assertEqual(codes, [200] * 100 + [429])
        # Probes are exempt and never rejected.
        self.assertTrue(self.kubelet.probe("app", "readinessProbe"))

    def exports_all_queried_metrics(self):
        page = eventually("metrics of Redis itself", lambda: (text := metrics()) and "tidegate_redis_memory_bytes" in text and text)
        help_ = set(re.findall(r"^# TYPE (\w+) ", page, re.MULTILINE))
        there = help_ | {name + "_bucket" for name in help_}
        # These metrics appear only with a certificate (overlay `tls`) and with token keys by URL.
        optional = {"tidegate_certificate_expiry_seconds", "tidegate_jwks_fetches_total"}
        there |= optional
        rules = [rule for group in of_kind(rendered(MONITORING), "PrometheusRule")[0]["spec"]["groups"] for rule in group["rules"]]
        asked = [rule["expr"] for rule in rules] + [target["expr"] for panel in dashboard()["panels"] for target in panel["targets"]]
        names = {name for text in asked for name in re.findall(r"\btidegate_\w+", text)}
        self.assertEqual(names - there, set())
        for metric, label in {pair for text in asked for pair in re.findall(r"(tidegate_\w+)\{[^}]*?(\w+)(?:=~|=)\"[^\"]*\"\}", text)}:
            if metric not in optional and label not in ("namespace", "job"):
                self.assertRegex(page, rf"{metric}\{{[^}}]*{label}=")

    def reloads(self):
        volume = self.kubelet.pod.volumes["tidegate"]
        files = {path.name: path.read_bytes() for path in (volume.path / "..data").iterdir()}
        files["policies.toml"] = files["policies.toml"].replace(b"requests = 100", b"requests = 200")
        volume.write(files)
        eventually("the ConfigMap's policies", lambda: "tidegate_config_generation 2" in metrics(), within=5)
        self.assertEqual(fetch("http://127.0.0.1:8080/")[0], 200)

    def stops(self):
        """Kept connections, new connections and slow responses: no request reaches a stopped app."""
        kept, fresh, slow = Client("/healthz", True), Client("/healthz", False), Client("/slow", True)
        begin = time.monotonic()
        for client in (kept, fresh, slow):
            client.until = begin + DEREGISTRATION_S
            client.start()
        took = self.kubelet.end()
        for client in (kept, fresh, slow):
            client.join(timeout=30)
            self.assertFalse(client.is_alive())
            self.assertEqual(client.failures, [])
            self.assertEqual(set(client.codes), {200})
        self.assertGreater(len(kept.codes), 50)
        self.assertGreater(len(fresh.codes), 50)
        self.assertLess(took, self.kubelet.pod.spec["terminationGracePeriodSeconds"])
        self.assertEqual([what for what, _ in self.kubelet.order], ["sidecar ended", "app signalled", "app ended"])
        delay = 10
        self.assertGreaterEqual(self.kubelet.order[0][1], delay)
        self.assertEqual((self.kubelet.hook[0], self.kubelet.sidecar.returncode), (0, 0), self.kubelet.hook[1])
        self.assertIn('"connections_cut":0', self.log_text())


class Client(threading.Thread):
    """Sends requests until the pod is deregistered (`until`), and on a kept connection until it closes. Records all
    statuses and failures."""

    def __init__(self, path, keeps):
        super().__init__(daemon=True)
        self.path, self.keeps = path, keeps
        self.until = 0
        self.codes, self.failures = [], []

    def run(self):
        connection = None
        while connection or time.monotonic() < self.until:
            fresh = connection is None
            connection = connection or http.client.HTTPConnection(*PROXY, timeout=20)
            try:
                connection.request("GET", self.path)
                answer = connection.getresponse()
                answer.read()
                self.codes.append(answer.status)
                if not self.keeps or answer.will_close:
                    connection = connection.close()
            except (http.client.RemoteDisconnected, ConnectionError) as error:
                connection.close()
                connection = None
                # A kept connection may close while a request is sent: clients retry it.
                if fresh:
                    self.failures.append(f"{self.path}: {error!r}")
            except (OSError, http.client.HTTPException) as error:
                self.failures.append(f"{self.path}: {error!r}")
                return
            time.sleep(0.02)


def metrics():
    return fetch("http://127.0.0.1:9091/metrics")[1]


if __name__ == "__main__":
    pods.isolate()
    unittest.main()
