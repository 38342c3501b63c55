"""Envoy and Traefik in front of tidegate, by the examples of docs/ENVOY.md. Called by tests/envoy.sh."""

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
PATIENCE = 60
DIR = tempfile.mkdtemp(prefix="tidegate-envoy-")
PAGE = open("docs/ENVOY.md", encoding="utf-8").read()
children = []


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def block(language, *words):
    """The block of the page that has these words."""
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
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, f"waited {PATIENCE} s for {what}"
        time.sleep(0.05)


def answers(port):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        return True
    except OSError:
        return False


def ask(port, path="/", method="GET", **headers):
    """Status, headers in lower case, body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    body = response.read().decode()
    connection.close()
    return response.status, {name.lower(): value for name, value in response.getheaders()}, body


def file(name, text):
    with open(f"{DIR}/{name}", "w", encoding="utf-8") as out:
        out.write(text)
    return f"{DIR}/{name}"


def told_address(name, message):
    line = next((line for line in log_of(name).splitlines() if f'"message":"{message}"' in line), None)
    if line is None:
        return None
    line = json.loads(line)
    return int(line.get("address", line.get("fields", {}).get("address")).rsplit(":", 1)[1])


def start_tidegate(name, text, message, *more):
    text = re.sub(r"127\.0\.0\.1:808[12]", "127.0.0.1:0", text)
    config = file(f"{name}.toml", 'admin.address = "127.0.0.1:0"\n' + text)
    start(name, TIDEGATE, "run", "--config", config, *more)
    until(f"{name} to listen", lambda: told_address(name, message))
    return told_address(name, message)


class App(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        body = f"{self.path} {self.headers.get('host')}".encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *_args):
        pass


def envoy_config(filters, clusters, app, rate_limits="", admin=0):
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
  address: {{ socket_address: {{ address: 127.0.0.1, port_value: {admin} }} }}
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


def rate_limits(app, redis):
    """The section "Envoy's rate-limit service"."""
    toml = block("toml", "[rls]", "override").replace("127.0.0.1:6379", f"127.0.0.1:{redis}")
    # A limit that is quick to reach, and what goes on without Redis.
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

[[policy]]
name = "budget"
match = { domain = "edge", descriptors = { budget = "*" } }
key = ["descriptor:budget"]
limit = { requests = 100, per = "30s" }
count_rejected = true
"""
    rls = start_tidegate("tidegate-rls", toml.replace('key_prefix = "edge"', 'key_prefix = "edge"\ninstances = 1'),
                         "rate-limit service listening")
    cluster = indented(block("yaml", "# Envoy: the cluster").replace("port_value: 8081", f"port_value: {rls}"), 2)
    limits = block("yaml", "# Envoy: the route") + """
  - actions: [{ request_headers: { header_name: x-alone, descriptor_key: alone } }]
  - actions: [{ request_headers: { header_name: x-banned, descriptor_key: banned } }]
  - actions: [{ request_headers: { header_name: x-budget, descriptor_key: budget } }]
    hits_addend: { number: 0 }
  - actions: [{ request_headers: { header_name: x-budget, descriptor_key: budget } }]
    hits_addend: { format: "%REQ(x-tokens)%" }
    apply_on_stream_done: true
"""
    # One Redis call on a busy machine is not to look like an outage.
    filters = block("yaml", "filters.http.ratelimit").replace("timeout: 0.1s", "timeout: 5s")
    filters = filters.replace("domain: edge", "domain: edge\n    enable_x_ratelimit_headers: DRAFT_VERSION_03")
    opens = start_envoy("envoy-open", envoy_config(filters, cluster, app, limits))
    closes = filters.replace("failure_mode_deny: false", "failure_mode_deny: true")
    closes = start_envoy("envoy-closed", envoy_config(closes, cluster, app, limits))

    # Under and over the limit of a user, and nobody else's.
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
    # The clients' limit was charged by what passed only: two are left of six.
    assert [ask(opens, x_user_id="acme")[0] for _ in range(3)] == [200, 200, 429]
    # Both Envoys share the counters.
    assert ask(closes, x_user_id="bob")[0] == 429

    # An owner's own words.
    status, headers, body = ask(opens, x_banned="yes")
    assert (status, headers["x-why"], body) == (429, "banned", "go away"), (status, headers, body)
    print("   words:", headers.get("content-type"), body)

    # A budget: looked at before, charged after. Envoy takes 0 for 1 there, so looking costs a little here.
    redis_cli(redis, "FLUSHALL")
    assert ask(opens, x_budget="u", x_tokens="60")[0] == 200
    until("the tokens to be charged", lambda: 20 < ask_budget(opens, redis, "u") <= 40)
    assert ask(opens, x_budget="u", x_tokens="80")[0] == 200
    until("the budget to be empty", lambda: ask_budget(opens, redis, "u") == 0)
    assert ask(opens, x_budget="v", x_tokens="1")[0] == 200

    # Redis is away: what Envoy says, but for what goes on alone.
    redis_down(redis)
    until("the outage", lambda: ask(closes)[0] == 500)
    assert ask(opens)[0] == 200 and ask(opens, x_user_id="ann")[0] == 200
    assert ask(closes, x_user_id="ann")[0] == 500
    print("   away: failure_mode_deny false passes, true answers 500")
    # It is back, without a restart of anything.
    redis_up(redis)
    until("the way back", lambda: ask(closes, x_user_id="new")[0] in (200, 429))
    return rls


def ask_budget(port, redis, name):
    """What is left of it."""
    # The clients' limit is in the way of asking often.
    listed = redis_cli(redis, "KEYS", "*client*").split(b"\r\n")
    for key in listed[2::2]:
        redis_cli(redis, "DEL", key.decode())
    _, headers, _ = ask(port, x_budget=name, x_tokens="1")
    return int(re.search('"budget";r=([0-9]+)', headers["ratelimit"])[1])


def alone(app, redis):
    """A policy that is "local" goes on while Redis is away, whatever Envoy would do."""
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
    cluster = indented(block("yaml", "# Envoy: the cluster").replace("port_value: 8081", f"port_value: {rls}"), 2)
    limits = "rate_limits:\n  - actions: [{ request_headers: { header_name: x-alone, descriptor_key: alone } }]\n"
    filters = block("yaml", "filters.http.ratelimit").replace("timeout: 0.1s", "timeout: 5s")
    filters = filters.replace("failure_mode_deny: false", "failure_mode_deny: true")
    port = start_envoy("envoy-alone", envoy_config(filters, cluster, app, limits))
    assert ask(port, x_alone="a")[0] == 200
    redis_down(redis)
    assert [ask(port, x_alone="b")[0] for _ in range(4)] == [200, 200, 429, 429]
    redis_up(redis)


def checks(app):
    """The section "Asking whether a request may pass"."""
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
    until("traefik to know its routes", lambda: ask(front, "/free")[0] == 200)
    forged = {"x_original_uri": "/free", "x_forwarded_uri": "/free", "x_forwarded_method": "HEAD"}
    assert [ask(front, "/api/x", **forged)[0] for _ in range(11)] == [200] * 10 + [429], log_of("tidegate-check")
    for path in ("/api/x?y=1", "/free/../api/x", "/%61pi/x"):
        status, headers, body = ask(front, path)
        assert status == 429 and int(headers["retry-after"]) > 0, (path, status, headers)
        assert json.loads(body)["status"] == 429, body
    assert ask(front, "/free")[0] == 200
    print("   traefik:", status, headers["ratelimit"])

    toml = toml.replace('path = "/api/**"', 'path = "/api/**", headers = { x-plan = "free" }')
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
    assert ask(front, "/api/x")[0] == 200 and ask(front, "/free", x_plan="free")[0] == 200
    print("   ext_authz:", status, headers["ratelimit"])


def redis_cli(port, *command):
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as peer:
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
        ("envoy, rate-limit service", lambda: rate_limits(app.server_port, redis)),
        ("envoy, while redis is away", lambda: alone(app.server_port, redis)),
        ("traefik and ext_authz", lambda: checks(app.server_port)),
    ]:
        print(f"== {name}", flush=True)
        run()
    print("envoy and traefik: all as the page says")


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
