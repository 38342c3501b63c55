"""Tests the examples of docs/ENVOY.md with Envoy and Traefik. Called by tests/envoy.sh."""

import http.client
import http.server
import json
import os
import re
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


def block(language, *words):
    """The only code block of the page in this language that contains all words."""
    found = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.S) if all(word in text for word in words)]
    assert len(found) == 1, (language, words, len(found))
    return found[0]


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


def ask(port, path="/", method="GET", **headers):
    """Status, headers in lower case, body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, body


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


def start_tidegate(name, text, message):
    text = re.sub(r"127\.0\.0\.1:808[12]", "127.0.0.1:0", text)
    config = file(f"{name}.toml", 'admin.address = "127.0.0.1:0"\n' + text)
    PROCESS[name] = start(name, TIDEGATE, "run", "--config", config)
    until(f"{name} to listen", lambda: logged_address(name, message))
    return logged_address(name, message)


class App(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
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

    front = free_port()
    static = file("traefik.yaml", f"""
entryPoints: {{ web: {{ address: "127.0.0.1:{front}" }} }}
providers: {{ file: {{ filename: "{DIR}/dynamic.yaml" }} }}
""")
    file("dynamic.yaml", block("yaml", "forwardAuth").replace("127.0.0.1:8082", f"127.0.0.1:{port}") + f"""
  routers:
    all: {{ rule: "PathPrefix(`/`)", service: app, middlewares: [tidegate], entryPoints: [web] }}
  services:
    app: {{ loadBalancer: {{ servers: [{{ url: "http://127.0.0.1:{app}" }}] }} }}
""")
    start("traefik", TRAEFIK, f"--configFile={static}")
    until("traefik to listen", lambda: answers(front))
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
