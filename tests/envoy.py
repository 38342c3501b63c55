"""Tests the examples of docs/ENVOY.md, docs/RECIPES.md and docs/migration with Envoy and Traefik. Called by
tests/envoy.sh."""

import http.client
import http.server
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

TIDEGATE, ENVOY, TRAEFIK = sys.argv[1:4]
TIMEOUT_S = 60
DIR = tempfile.mkdtemp(prefix="tidegate-envoy-")
PAGE = open("docs/ENVOY.md", encoding="utf-8").read()
children = []
PROCESS = {}


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def block(language, *words, page=PAGE):
    """The only code block of the page in this language that contains all words."""
    found = [text for text in re.findall(rf"```{language}\n(.*?)```", page, re.S) if all(word in text for word in words)]
    assert len(found) == 1, (language, words, len(found))
    return found[0]


def section(path, heading):
    """The text of one section of a page."""
    text = open(path, encoding="utf-8").read()
    return re.search(rf"^## {re.escape(heading)}\n(.*?)(^## |\Z)", text, re.M | re.S)[1]


def indented(text, by):
    return "".join(f"{' ' * by}{line}\n" for line in text.splitlines())


def start(name, *command):
    log = open(f"{DIR}/{name}.log", "wb")
    child = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    children.append(child)
    return child


def log_of(name):
    return open(f"{DIR}/{name}.log", encoding="utf-8", errors="replace").read()


def until(what, holds):
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline, f"waited {TIMEOUT_S} s for {what}"
        time.sleep(0.05)


def answers(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        return True
    except OSError:
        return False


def ask(port, path="/", method="GET", timeout=TIMEOUT_S, **headers):
    """Status, headers in lower case, body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, body


def answers_ok(port, path):
    """Whether the status is 200 within a second."""
    try:
        return ask(port, path, timeout=1)[0] == 200
    except TimeoutError:
        return False


def file(name, text):
    with open(f"{DIR}/{name}", "w", encoding="utf-8") as out:
        out.write(text)
    return f"{DIR}/{name}"


def logged_address(name, message):
    """The port or Unix socket path in a log message."""
    line = next((line for line in log_of(name).splitlines() if f'"message":"{message}"' in line), None)
    if line is None:
        return None
    line = json.loads(line)
    last = line.get("address", line.get("fields", {}).get("address")).rsplit(":", 1)[1]
    return int(last) if last.isdigit() else last


def start_tidegate(name, text, message, *flags):
    text = re.sub(r"127\.0\.0\.1:808[12]", "127.0.0.1:0", text)
    config = file(f"{name}.toml", text)
    os.environ["TIDEGATE_ADMIN__ADDRESS"] = "127.0.0.1:0"
    PROCESS[name] = start(name, TIDEGATE, "run", "--config", config, *flags)
    until(f"{name} to listen", lambda: logged_address(name, message))
    return logged_address(name, message)


class App(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/slow":
            time.sleep(3)
        body = f"{self.path} {self.headers.get('host')}".encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        if "x-tokens" in self.headers:
            self.send_header("x-tokens", self.headers["x-tokens"])
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_args):
        pass


def envoy_config(filters, clusters, app, rate_limits="", route=""):
    def cluster(name, port):
        return f"""
  - name: {name}
    type: STATIC
    load_assignment:
      cluster_name: {name}
      endpoints:
      - lb_endpoints:
        - endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }} }}
"""

    return f"""
admin:
  address: {{ socket_address: {{ address: 127.0.0.1, port_value: 0 }} }}
static_resources:
  listeners:
  - name: front
    address: {{ socket_address: {{ address: 127.0.0.1, port_value: PORT }} }}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: front
          use_remote_address: true
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: {{ prefix: / }}
                route:
                  cluster: app
{indented(rate_limits, 18)}
{indented(route, 16)}
          http_filters:
{indented(filters, 10)}
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
  clusters:
{cluster("app", app)}
{clusters}
"""


def start_envoy(name, config):
    port = free_port()
    path = file(f"{name}.yaml", config.replace("PORT", str(port)))
    start(name, ENVOY, "-c", path, "--concurrency", "1", "--disable-hot-restart", "-l", "warning")
    until(f"{name} to listen", lambda: answers(port))
    return port


def rls_cluster(port):
    return indented(block("yaml", "# Envoy: the cluster, by HTTP/2").replace("port_value: 8081", f"port_value: {port}"), 2)


def rls_filter(*changes):
    # A slow Redis call on a busy machine must not look like an outage.
    text = block("yaml", "filters.http.ratelimit", "rate_limit_service").replace("timeout: 0.1s", "timeout: 5s")
    for change in changes:
        text = text.replace(*change)
    return text


DENYING = ("failure_mode_deny: false", "failure_mode_deny: true")


def rate_limits(app, redis):
    """The section "Envoy's rate limit service"."""
    toml = block("toml", "[rls]", "override").replace("127.0.0.1:6379", f"127.0.0.1:{redis}")
    # Low limits, and a policy that works without Redis.
    toml = toml.replace("requests = 60,", "requests = 6,").replace("requests = 1000,", "requests = 4,")
    toml += """
[[policy]]
name = "alone"
match = { domain = "edge", descriptors = { alone = "*" } }
key = ["descriptor:alone"]
limit = { requests = 2, per = "1h" }
on_store_failure = "local"

[[policy]]
name = "banned"
match = { domain = "edge", descriptors = { banned = "yes" } }
action = "deny"
reject = { body = "go away", content_type = "text/x-words", headers = { x-why = "banned" } }
"""
    rls = start_tidegate("tidegate-rls", toml.replace('key_prefix = "edge"', 'key_prefix = "edge"\ninstances = 1'),
                         "rate-limit service listening")
    cluster = rls_cluster(rls)
    limits = block("yaml", "# Envoy: the route\n") + """
  - actions: [{ request_headers: { header_name: x-alone, descriptor_key: alone } }]
  - actions: [{ request_headers: { header_name: x-banned, descriptor_key: banned } }]
"""
    beside = ("domain: edge", "domain: edge\n    enable_x_ratelimit_headers: DRAFT_VERSION_03")
    opens = start_envoy("envoy-open", envoy_config(rls_filter(beside), cluster, app, limits))
    closes = start_envoy("envoy-closed", envoy_config(rls_filter(beside, DENYING), cluster, app, limits))

    # Below and above one user's limit.
    for left in (3, 2, 1, 0):
        status, headers, _ = ask(opens, x_user_id="ann")
        assert status == 200, (status, headers, log_of("tidegate-rls"))
        assert f'"user";r={left};t=' in headers["ratelimit"], headers
    status, headers, body = ask(opens, x_user_id="ann")
    assert (status, body) == (429, ""), (status, body)
    assert headers["x-envoy-ratelimited"] == "true", headers
    assert 3000 < int(headers["retry-after"]) <= 3600, headers
    assert '"user";q=4;w=3600' in headers["ratelimit-policy"] and '"user";r=0' in headers["ratelimit"], headers
    print("   over:", {name: headers[name] for name in sorted(headers) if "rate" in name or name == "retry-after"})
    # Only admitted requests charged the client's limit: two of six units remain.
    assert [ask(opens, x_user_id="acme")[0] for _ in range(3)] == [200, 200, 429]
    # Both Envoys share the counters.
    assert ask(closes, x_user_id="bob")[0] == 429

    # The policy's own rejection response.
    status, headers, body = ask(opens, x_banned="yes")
    assert (status, headers["x-why"], body) == (429, "banned", "go away"), (status, headers, body)
    print("   rejection:", headers.get("content-type"), body)

    # Without Redis Envoy's failure mode decides.
    redis_down(redis)
    until("the outage", lambda: ask(closes)[0] == 500)
    assert ask(opens)[0] == 200 and ask(opens, x_user_id="ann")[0] == 200
    assert ask(closes, x_user_id="ann")[0] == 500
    print("   outage: failure_mode_deny false passes, true responds with 500")
    # Recovery needs no restart.
    redis_up(redis)
    until("recovery", lambda: ask(closes, x_user_id="new")[0] in (200, 429))
    return rls


def budget(app, redis):
    """The section "Costs known after the request"."""
    toml = block("toml", "[rls]", "override").replace("127.0.0.1:6379", f"127.0.0.1:{redis}").replace('"edge"\n\n', '"budget"\n\n')
    toml += block("toml", 'name = "budget"').replace("[rls]\n", "").replace("requests = 100000", "requests = 100")
    rls = start_tidegate("tidegate-budget", toml, "rate-limit service listening")
    route = block("yaml", "# Envoy: a route's budget")
    port = start_envoy("envoy-budget", envoy_config(rls_filter(DENYING), rls_cluster(rls), app, route=route))

    def query(**more):
        """The remaining quota before the request, and its status. A response without tokens charges nothing."""
        status, headers, _ = ask(port, x_user_id="u", **more)
        return int(re.search('"budget";r=([0-9]+)', headers["ratelimit"])[1]), status

    assert query(x_tokens="60") == (100, 200)
    until("the tokens to be charged", lambda: query()[0] != 100)
    assert [query() for _ in range(5)] == [(40, 200)] * 5
    # A charge above the remaining quota empties it.
    assert query(x_tokens="80") == (40, 200)
    until("the budget to be empty", lambda: query() != (40, 200))
    assert query() == (0, 429)
    print("   budget: queried, charged afterwards, emptied")


def several(app, redis):
    """The section "Several instances": one instance shuts down, and no call fails."""
    toml = block("toml", "[rls]", "override").replace("127.0.0.1:6379", f"127.0.0.1:{redis}").replace("requests = 60,", "requests = 1000000,")
    toml += block("toml", "[shutdown]")
    names = ["tidegate-one", "tidegate-two"]
    ports = [start_tidegate(name, toml, "rate-limit service listening") for name in names]
    cluster = rls_cluster(ports[0])
    endpoint = next(line for line in cluster.splitlines() if f"port_value: {ports[0]}" in line)
    cluster = cluster.replace(endpoint, endpoint + "\n" + endpoint.replace(str(ports[0]), str(ports[1])))
    cluster += indented(block("yaml", "# Envoy: the cluster's health checks"), 4)
    limits = block("yaml", "# Envoy: the route\n")
    port = start_envoy("envoy-several", envoy_config(rls_filter(DENYING), cluster, app, limits))

    def calls(name):
        page = ask(logged_address(name, "admin listening"), "/metrics", host="localhost")[2]
        return int(re.search(r'tidegate_rls_calls_total\{result="ok"\} ([0-9]+)', page)[1])

    # Envoy uses all endpoints until the first health checks, then the healthy ones.
    until("calls to both instances", lambda: ask(port)[0] == 200 and all(calls(name) > 0 for name in names))
    requests, stopped = 0, PROCESS[names[0]]
    stopped.terminate()
    exited_at = None
    while exited_at is None or time.monotonic() < exited_at + 2:
        status, headers, _ = ask(port)
        assert (status, "ratelimit" in headers) == (200, True), (requests, status, headers, log_of("envoy-several"))
        requests += 1
        if exited_at is None and stopped.poll() is not None:
            assert stopped.returncode == 0, log_of(names[0])
            exited_at = time.monotonic()
    assert '"connections_cut":0' in log_of(names[0]), log_of(names[0])
    print(f"   several: one of two stopped, {requests} requests, all decided")


def certificates():
    """Creates a certificate authority and certificates for tidegate and Envoy."""
    def openssl(*words):
        subprocess.run(["openssl", *words], cwd=DIR, check=True, capture_output=True)

    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    openssl("req", "-x509", *new, "-subj", "/CN=authority", "-keyout", "ca.key", "-out", "ca.crt")
    for name, host in [("tidegate", "tidegate.internal"), ("envoy", "envoy.internal")]:
        openssl("req", "-x509", *new, "-subj", f"/CN={host}", "-addext", f"subjectAltName=DNS:{host}",
                "-addext", "basicConstraints=critical,CA:FALSE", "-CA", "ca.crt", "-CAkey", "ca.key",
                "-keyout", f"{name}.key", "-out", f"{name}.crt")


def tls(app, redis):
    """The section "TLS and Unix sockets"."""
    certificates()
    toml = block("toml", "[rls]", "override").replace("127.0.0.1:6379", f"127.0.0.1:{redis}").replace('"edge"\n\n', '"tls"\n\n')
    limits = block("yaml", "# Envoy: the route\n")

    def with_local_paths(text, name):
        text = re.sub(r"/etc/[a-z]+/tls/tls", f"{DIR}/{name}", text)
        return re.sub(r"/etc/[a-z]+/tls/ca", f"{DIR}/ca", text)

    rls = start_tidegate("tidegate-tls", toml + with_local_paths(block("toml", "[rls.tls]"), "tidegate"),
                         "rate-limit service listening")
    socket_of_tls = with_local_paths(block("yaml", "# Envoy: the cluster's TLS"), "envoy")
    nameless = re.sub(r" +tls_certificates:\n.*\n.*\n", "", socket_of_tls)
    assert nameless != socket_of_tls
    for name, transport, status in [("envoy-tls", socket_of_tls, 200), ("envoy-nameless", nameless, 500)]:
        cluster = rls_cluster(rls) + indented(transport, 4)
        port = start_envoy(name, envoy_config(rls_filter(DENYING), cluster, app, limits))
        found, headers, _ = ask(port)
        assert (found, "ratelimit" in headers) == (status, status == 200), (name, found, headers, log_of(name))
    print("   tls: 200 with a certificate, 500 without")

    toml = toml.replace("127.0.0.1:8081", f"unix:{DIR}/rls.sock")
    path = start_tidegate("tidegate-socket", toml, "rate-limit service listening")
    assert path == f"{DIR}/rls.sock", path
    cluster = rls_cluster(8081).replace("socket_address: { address: 127.0.0.1, port_value: 8081 }", f"pipe: {{ path: {path} }}")
    port = start_envoy("envoy-socket", envoy_config(rls_filter(DENYING), cluster, app, limits))
    status, headers, _ = ask(port)
    assert (status, "ratelimit" in headers) == (200, True), (status, headers, log_of("envoy-socket"))
    print("   unix socket:", headers["ratelimit"])


def alone(app, redis):
    """A policy with on_store_failure = "local" decides without Redis, whatever Envoy's failure mode is."""
    toml = f"""
[rls]
address = "127.0.0.1:8081"
[store]
kind = "redis"
redis = {{ url = "redis://127.0.0.1:{redis}/0", key_prefix = "alone", instances = 1 }}
[[policy]]
name = "alone"
match = {{ domain = "edge", descriptors = {{ alone = "*" }} }}
key = ["descriptor:alone"]
limit = {{ requests = 2, per = "1h" }}
on_store_failure = "local"
"""
    rls = start_tidegate("tidegate-alone", toml, "rate-limit service listening")
    limits = "rate_limits:\n  - actions: [{ request_headers: { header_name: x-alone, descriptor_key: alone } }]\n"
    port = start_envoy("envoy-alone", envoy_config(rls_filter(DENYING), rls_cluster(rls), app, limits))
    assert ask(port, x_alone="a")[0] == 200
    redis_down(redis)
    assert [ask(port, x_alone="b")[0] for _ in range(4)] == [200, 200, 429, 429]
    redis_up(redis)


def checks(app, redis):
    """The section "External authorization"."""
    toml = block("toml", "[check]").replace("refused_status = 403", "# refused_status = 403")
    port = start_tidegate("tidegate-check", toml, "check listening")

    front = start_traefik("traefik", block("yaml", "forwardAuth").replace("127.0.0.1:8082", f"127.0.0.1:{port}") + f"""
  routers:
    all: {{ rule: "PathPrefix(`/`)", service: app, middlewares: [tidegate], entryPoints: [web] }}
  services:
    app: {{ loadBalancer: {{ servers: [{{ url: "http://127.0.0.1:{app}" }}] }} }}
""")
    until("the routes of traefik", lambda: ask(front, "/free")[0] == 200)
    forged = {"x_original_uri": "/free", "x_forwarded_uri": "/free", "x_forwarded_method": "HEAD"}
    assert [ask(front, "/api/x", **forged)[0] for _ in range(11)] == [200] * 10 + [429], log_of("tidegate-check")
    for path, kind in [("/api/x?y=1", "text/x"), ("/free/../api/x", "text/x"), ("/%61pi/x", "application/grpc")]:
        status, headers, body = ask(front, path, content_type=kind)
        assert status == 429 and int(headers["retry-after"]) > 0, (path, status, headers)
        assert json.loads(body)["status"] == 429, body
    assert ask(front, "/free")[0] == 200
    print("   traefik:", status, headers["ratelimit"])

    toml = toml.replace('path = "/api/**"', 'path = "/api/**", headers = { x-plan = "free" }')
    toml += f"""
[[policy]]
name = "safe"
match = {{ path = "/safe" }}
limit = {{ requests = 1, per = "1h" }}
on_store_failure = "closed"
[store]
kind = "redis"
redis = {{ url = "redis://127.0.0.1:{redis}/0", key_prefix = "authz" }}
"""
    port = start_tidegate("tidegate-authz", toml, "check listening")
    cluster = indented(f"""- name: tidegate
  type: STATIC
  load_assignment:
    cluster_name: tidegate
    endpoints:
    - lb_endpoints:
      - endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }} }}
""", 2)
    filters = block("yaml", "ext_authz").replace("timeout: 0.1s", "timeout: 5s")
    front = start_envoy("envoy-authz", envoy_config(filters, cluster, app))
    assert [ask(front, "/api/x?y", x_plan="free", **forged)[0] for _ in range(11)] == [200] * 10 + [429], log_of("tidegate-authz")
    status, headers, _ = ask(front, "/api/y", method="POST", x_plan="free")
    assert status == 429 and int(headers["retry-after"]) > 0, (status, headers)
    status_of_free, headers_of_free, _ = ask(front, "/api/x")
    assert (status_of_free, "ratelimit" in headers_of_free) == (200, False)
    assert ask(front, "/free", x_plan="free")[0] == 200
    print("   ext_authz:", status, headers["ratelimit"])
    # Allowed responses carry the headers too.
    status, headers, _ = ask(front, "/safe")
    assert (status, headers.get("ratelimit", "").split(";t")[0]) == (200, '"safe";r=0'), (status, headers)
    # A rejection without the store stays one, although `failure_mode_allow` is set.
    redis_down(redis)
    until("the outage", lambda: ask(front, "/safe")[1].get("x-tidegate-status") == "503")
    status, headers, _ = ask(front, "/safe")
    assert (status, headers["retry-after"]) == (429, "1"), (status, headers)
    redis_up(redis)


def start_traefik(name, dynamic):
    """Traefik with a dynamic configuration and the entry point `web`."""
    front = free_port()
    provider = file(f"{name}-dynamic.yaml", dynamic)
    static = file(f"{name}-static.yaml", f"""
entryPoints: {{ web: {{ address: "127.0.0.1:{front}" }} }}
providers: {{ file: {{ filename: "{provider}" }} }}
""")
    start(name, TRAEFIK, f"--configFile={static}")
    until(f"{name} to listen", lambda: answers(front))
    return front


def no_answer(app):
    """The section "Traefik": forwardAuth fails while tidegate is stopped. Counters of Envoy's rate limit filter."""
    toml = block("toml", "[check]").replace("refused_status = 403", "# refused_status = 403")
    port = start_tidegate("tidegate-away", toml, "check listening")
    dynamic = block("yaml", "forwardAuth").replace("127.0.0.1:8082", f"127.0.0.1:{port}") + f"""
  routers:
    all: {{ rule: "PathPrefix(`/`)", service: app, middlewares: [tidegate], entryPoints: [web] }}
  services:
    app: {{ loadBalancer: {{ servers: [{{ url: "http://127.0.0.1:{app}" }}] }} }}
"""
    front = start_traefik("traefik-away", dynamic)
    until("the routes of traefik-away", lambda: ask(front, "/free")[0] == 200)
    PROCESS["tidegate-away"].kill()
    PROCESS["tidegate-away"].wait()
    assert ask(front, "/free")[0] == 500
    print("   traefik, forwardAuth without tidegate: 500, as the page says")

    # Envoy gives up after 20 ms: the request passes, and only Envoy counts it.
    rls = start_tidegate("tidegate-hung", block("toml", "[rls]", "override").split("[store]")[0] + """
[[policy]]
name = "client"
match = { domain = "edge", descriptors = { remote_address = "*" } }
key = ["descriptor:remote_address"]
limit = { requests = 1, per = "1h" }
""", "rate-limit service listening")
    filters = rls_filter().replace("    timeout: 5s\n", "")
    assert filters != rls_filter()
    config = envoy_config(filters, rls_cluster(rls), app, block("yaml", "# Envoy: the route\n"))
    admin = free_port()
    config = config.replace("port_value: 0", f"port_value: {admin}", 1)
    front = start_envoy("envoy-hung", config)
    PROCESS["tidegate-hung"].send_signal(signal.SIGSTOP)
    assert [ask(front)[0] for _ in range(5)] == [200] * 5
    PROCESS["tidegate-hung"].send_signal(signal.SIGCONT)
    stats = ask(admin, "/stats?filter=ratelimit")[2]
    allowed = int(re.search(r"cluster\.app\.ratelimit\.failure_mode_allowed: ([0-9]+)", stats)[1])
    assert allowed == 5, stats
    print("   envoy, 20 ms: passed 5 requests, failure_mode_allowed", allowed)


def recipes(app):
    """Traefik and Envoy in front of tidegate, from docs/RECIPES.md."""
    page = section("docs/RECIPES.md", "Behind Traefik")
    upstream = f"http://127.0.0.1:{app}"
    probes = free_port()
    toml = block("toml", page=page).replace("127.0.0.1:9091", f"127.0.0.1:{probes}")
    flags = ["--listen", "127.0.0.1:0", "--upstream", upstream]
    port = start_tidegate("tidegate-behind", toml, "listening", *flags)
    dynamic = block("yaml", page=page).replace("127.0.0.1:8080", f"127.0.0.1:{port}")
    dynamic = dynamic.replace("127.0.0.1:3000", f"127.0.0.1:{app}").replace("9091", str(probes))
    front = start_traefik("traefik-behind", dynamic)
    until("the routes of traefik-behind", lambda: ask(front, "/free")[0] == 200)
    until("tidegate's health", lambda: "ratelimit" in ask(front, "/api/x")[1])
    forged = [ask(front, "/api/x", x_forwarded_for=f"198.51.100.{n}")[0] for n in range(10)]
    assert forged[-1] == 429, forged
    for number, how in [(signal.SIGSTOP, "hung"), (signal.SIGKILL, "stopped")]:
        PROCESS["tidegate-behind"].send_signal(number)
        until("the fallback to the app", lambda: answers_ok(front, "/api/x"))
        assert [ask(front, "/api/x")[0] for _ in range(5)] == [200] * 5
        print(f"   traefik, tidegate {how}: requests reach the app")
        if number == signal.SIGSTOP:
            PROCESS["tidegate-behind"].send_signal(signal.SIGCONT)
            until("tidegate again", lambda: ask(front, "/api/x")[0] == 429)

    page = section("docs/RECIPES.md", "Behind Envoy")
    port = start_tidegate("tidegate-next", block("toml", page=page), "listening", *flags)
    front = start_envoy("envoy-next", envoy_config("", "", port))
    statuses = [ask(front, "/api/x", x_forwarded_for=f"198.51.100.{n}")[0] for n in range(11)]
    assert statuses == [200] * 10 + [429], statuses
    assert ask(front, "/free")[0] == 200
    print("   envoy in front: forged addresses share the client's quota")


def admitted_by_schedule(port, schedule):
    """Sends one request at each time of the schedule. Returns which of them were admitted."""
    admitted = [None] * len(schedule)
    began = time.monotonic() + 0.2

    def send(number, at):
        time.sleep(max(0, began + at - time.monotonic()))
        admitted[number] = ask(port)[0] == 200

    threads = [threading.Thread(target=send, args=item) for item in enumerate(schedule)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return admitted


def apart(one, other):
    """The decisions that differ, and the largest difference of the numbers admitted up to any moment."""
    sums = list(itertools.accumulate(a - b for a, b in zip(one, other)))
    return sum(a != b for a, b in zip(one, other)), max(map(abs, sums))


def side_by_side(name, original, translated, schedule, phase_differs=False):
    """The translation may differ from the product as much as the product from itself: on a busy machine a request may
    arrive some milliseconds late, and change the decision about the next ones. `phase_differs`: the page says that
    single decisions differ, so only the numbers admitted up to any moment are compared."""
    ports = [original(0), original(1), translated()]
    results = [None] * 3

    def run(number):
        results[number] = admitted_by_schedule(ports[number], schedule)

    runs = [threading.Thread(target=run, args=[number]) for number in range(3)]
    for thread in runs:
        thread.start()
    for thread in runs:
        thread.join()
    first, again, ours = results
    itself, differ = apart(first, again), min(apart(first, ours), apart(again, ours))
    totals = [sum(result) for result in results]
    print(f"   {name}: admitted {totals[0]}, again {totals[1]}, tidegate {totals[2]} of {len(schedule)};"
          f" decisions that differ, largest lead: {itself} and {differ}")
    assert 0 < totals[2] < len(schedule), totals
    assert phase_differs or differ[0] <= 2 * itself[0] + len(schedule) // 20, (itself, differ)
    assert differ[1] <= itself[1] + 3, (itself, differ)


def at_once(port, times, path, **headers):
    """How often each status occurs for requests at the same time."""
    statuses = []
    threads = [threading.Thread(target=lambda: statuses.append(ask(port, path, **headers)[0])) for _ in range(times)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {status: statuses.count(status) for status in sorted(set(statuses))}


def migrations(app, redis):
    """Examples of docs/migration beside the product, with seeded traffic."""
    chosen = random.Random(18)
    upstream = f"http://127.0.0.1:{app}"

    def seeded(rate, seconds):
        times, at = [], 0.0
        while at < seconds:
            times.append(at)
            # Bursts and pauses.
            at += chosen.expovariate(rate) if chosen.random() < 0.9 else chosen.uniform(0, 4 / rate)
        return times

    def tidegate(name, toml):
        flags = ["--listen", "127.0.0.1:0", "--upstream", upstream]
        return lambda: start_tidegate(name, toml, "listening", *flags)

    def traefik(name, middleware):
        dynamic = f"""
http:
  middlewares:
    limit:
{indented(middleware, 6)}
  routers:
    all: {{ rule: "PathPrefix(`/`)", service: app, middlewares: [limit], entryPoints: [web] }}
  services:
    app: {{ loadBalancer: {{ servers: [{{ url: "{upstream}" }}] }} }}
"""

        def run(number):
            front = start_traefik(f"{name}-{number}", dynamic)
            until("its routes", lambda: ask(front)[0] in (200, 429))
            time.sleep(1)
            return front

        return run

    page = section("docs/migration/traefik-ratelimit.md", "average, period, burst")
    examples = re.findall(r"```yaml\n(.*?)```.*?```toml\n(.*?)```", page, re.S)
    assert len(examples) == 2
    # 100 per minute with a burst of 50: one token was used to wait for the routes.
    (burst_yaml, burst_toml), (single_yaml, single_toml) = examples
    burst_yaml = burst_yaml.replace("period: 1m", "period: 10s").replace("burst: 50", "burst: 20")
    burst_toml = burst_toml.replace('per = "1m"', 'per = "10s"').replace("burst = 50", "burst = 20")
    side_by_side("traefik, burst", traefik("traefik-burst", burst_yaml), tidegate("tidegate-burst", burst_toml), seeded(25, 8),
                 phase_differs=True)
    side_by_side("traefik, burst 1", traefik("traefik-single", single_yaml), tidegate("tidegate-single", single_toml),
                 seeded(15, 10))

    # Requests in flight, by host.
    page = section("docs/migration/traefik-ratelimit.md", "InFlightReq")
    ports = [traefik("traefik-slots", block("yaml", page=page))(0), tidegate("tidegate-slots", block("toml", page=page))()]
    statuses = [at_once(port, 14, "/slow", Host="shop.example.com") for port in ports]
    print("   traefik, in flight:", *statuses)
    assert statuses == [{200: 10, 429: 4}] * 2, statuses

    whole_traefik(upstream, tidegate)

    # Two instances of each share one quota in Redis.
    page = section("docs/migration/traefik-ratelimit.md", "redis")
    shared = re.sub(r"redis:6379", f"127.0.0.1:{redis}", block("yaml", page=page))
    shared = re.sub(r" +(username|password|db|tls):.*\n", "", shared)
    toml = re.sub(r"rediss://redis:6379", f"redis://127.0.0.1:{redis}", block("toml", page=page))
    toml = re.sub(r"(username|password_file|ca) = .*\n", "", toml)
    run = traefik("traefik-shared", shared)
    for name, ports in [("traefik", [run(0), run(1)]),
                        ("tidegate", [tidegate(f"tidegate-shared-{n}", toml)() for n in range(2)])]:
        began = time.monotonic()
        admitted = [sum(ask(port)[0] == 200 for _ in range(20)) for _ in range(2) for port in ports]
        print(f"   {name}, two instances with redis: admitted {admitted} of 20 each")
        # The check of the routes may have used some of the burst of 50.
        assert 45 <= sum(admitted) <= 51 + (time.monotonic() - began) * 100 / 60, admitted

    page = section("docs/migration/envoy-ratelimit.md", "The local filter")
    bucket = re.search(r"`token_bucket: (\{.*?\})`", page)[1]
    local = f"""- name: envoy.filters.http.local_ratelimit
  typed_config:
    "@type": type.googleapis.com/envoy.extensions.filters.http.local_ratelimit.v3.LocalRateLimit
    stat_prefix: local
    token_bucket: {bucket}
    filter_enabled: {{ default_value: {{ numerator: 100, denominator: HUNDRED }} }}
    filter_enforced: {{ default_value: {{ numerator: 100, denominator: HUNDRED }} }}
"""
    # A smaller bucket, so that it is empty soon.
    local = local.replace("max_tokens: 100", "max_tokens: 20")
    toml = block("toml", page=page).replace("burst = 100", "burst = 20")
    side_by_side("envoy, local", lambda number: start_envoy(f"envoy-local-{number}", envoy_config(local, "", app)),
                 tidegate("tidegate-local", toml), seeded(25, 8))


def whole_traefik(upstream, tidegate):
    """The whole configuration of the page, as a file and as labels, gets the same requests as its translation."""
    page = section("docs/migration/traefik-ratelimit.md", "A whole configuration")
    service = {"app": {"loadBalancer": {"servers": [{"url": upstream}]}}}
    labels = {}
    for name, value in re.findall(r'- "traefik\.([^=]+)=(.*)"', block("yaml", "labels:", page=page)):
        *parents, last = name.split(".")
        table = labels
        for parent in parents:
            table = table.setdefault(parent, {})
        table[last] = value.split(",") if last == "middlewares" else value
    for router in labels["http"]["routers"].values():
        router["service"] = "app"
    labels["http"]["services"] = service
    text = block("yaml", "routers:", page=page) + indented(f"services: {json.dumps(service)}", 2)
    fronts = [start_traefik("traefik-whole-file", text), start_traefik("traefik-whole-labels", json.dumps(labels))]
    for front in fronts:
        until("its routes", lambda port=front: ask(port, "/ready", Host="shop.example")[0] == 200)
    ports = fronts + [tidegate("tidegate-whole", block("toml", page=page))()]
    chosen = random.Random(5)
    requests = [(chosen.choice(["/api/a", "/apis", "/x"]), chosen.choice(["GET", "GET", "POST"]),
                 chosen.choice(["ann", "bob", "cid", "dot"])) for _ in range(120)]
    statuses = [[ask(port, path, method, Host="shop.example", X_User=user)[0] for path, method, user in requests]
                for port in ports]
    print("   traefik, a whole configuration: admitted", *(found.count(200) for found in statuses), "of", len(requests))
    assert statuses[0] == statuses[1] == statuses[2], statuses
    assert 429 in statuses[2]


def redis_cli(port, *command):
    with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as peer:
        words = b"".join(b"$%d\r\n%s\r\n" % (len(word.encode()), word.encode()) for word in command)
        peer.sendall(b"*%d\r\n%s" % (len(command), words))
        return peer.recv(1 << 16)


REDIS = {}


def redis_up(port):
    REDIS[port] = start("redis", "redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", DIR)
    until("redis", lambda: answers(port))


def redis_down(port):
    REDIS[port].kill()
    REDIS[port].wait()


def main():
    app = http.server.ThreadingHTTPServer(("127.0.0.1", 0), App)
    threading.Thread(target=app.serve_forever, daemon=True).start()
    redis = free_port()
    redis_up(redis)
    for name, run in [
        ("envoy, rate limit service", lambda: rate_limits(app.server_port, redis)),
        ("envoy, a budget", lambda: budget(app.server_port, redis)),
        ("envoy, several instances", lambda: several(app.server_port, redis)),
        ("envoy, tls and unix sockets", lambda: tls(app.server_port, redis)),
        ("envoy, without redis", lambda: alone(app.server_port, redis)),
        ("traefik and ext_authz", lambda: checks(app.server_port, redis)),
        ("without an answer", lambda: no_answer(app.server_port)),
        ("recipes", lambda: recipes(app.server_port)),
        ("migration, side by side", lambda: migrations(app.server_port, redis)),
    ]:
        print(f"== {name}", flush=True)
        run()
    print("envoy and traefik: all examples work")


try:
    main()
except BaseException:
    for name in sorted(os.listdir(DIR)):
        if name.endswith(".log"):
            print(f"-- {name}\n{log_of(name[:-4])[-4000:]}", file=sys.stderr)
    raise
finally:
    for child in reversed(children):
        child.kill()
        child.wait()
    subprocess.run(["rm", "-rf", DIR], check=False)
