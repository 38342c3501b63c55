#!/usr/bin/env python3
"""Measures the cost of a call of Envoy's rate limit service: tidegate's ([rls]) and optionally Limitador's, in turns.

    benches/rls.py PATH-OF-tidegate [--limitador PATH] [--envoy PATH] [--rounds 3] [--seconds 5]

All services use the same Redis. The service runs on one core; the load generator, Redis and the app on the other.
h2load calls the service directly, with one key. With --envoy, wrk sends requests through Envoy, with one key and with
10,000. Requires redis-server, h2load and, for Envoy, wrk and nginx. Prints a table of medians.
"""

import argparse
import http.client
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import tempfile
import time

SERVICE_CPU, LOAD_CPU = "0", "1"
CALL = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"
TICKS = os.sysconf("SC_CLK_TCK")
DIR = tempfile.mkdtemp(prefix="tidegate-rls-")
children = []


def free_ports(count):
    """Reserves all ports at once, so that none is returned twice."""
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in taken]
    for one in taken:
        one.close()
    return ports


def file(name, text):
    path = f"{DIR}/{name}"
    with open(path, "w", encoding="utf-8") as out:
        out.write(text)
    return path


def start(name, cpu, port, *command, **env):
    log = open(f"{DIR}/{name}.log", "wb")
    child = subprocess.Popen(
        ["taskset", "-c", cpu, *command], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, **env}
    )
    children.append(child)
    deadline = time.monotonic() + 20
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 1).close() or child
        except OSError:
            if child.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"{name} does not listen: {open(f'{DIR}/{name}.log').read()[-800:]}") from None
            time.sleep(0.05)


def end(child):
    child.terminate()
    child.wait(20)
    children.remove(child)


def cpu_s(child):
    """CPU seconds of a process without children."""
    fields = open(f"/proc/{child.pid}/stat", encoding="utf-8").read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


# ---- the part of the protocol that one call needs


def part(number, payload):
    assert len(payload) < 128
    return bytes([number << 3 | 2, len(payload)]) + payload


def call(user, plan):
    """A framed RateLimitRequest with one descriptor."""
    entries = b"".join(part(1, part(1, name) + part(2, value)) for name, value in ((b"user", user), (b"plan", plan)))
    message = part(1, b"bench") + part(2, entries)
    return b"\0" + len(message).to_bytes(4, "big") + message


def overall_code(port, framed):
    """Returns 1 for OK, 2 for OVER_LIMIT. Uses curl, because the Python standard library has no HTTP/2."""
    body = file("call.bin", "")
    with open(body, "wb") as out:
        out.write(framed)
    answer = subprocess.run(
        ["curl", "-s", "--http2-prior-knowledge", "-H", "content-type: application/grpc", "-H", "te: trailers",
         "--data-binary", f"@{body}", f"http://127.0.0.1:{port}{CALL}"],
        capture_output=True, check=True, timeout=20,
    ).stdout
    assert answer[5:6] == b"\x08", f"no code in {answer!r}"
    return answer[6]


# ---- the services


OURS = """
admin.address = "127.0.0.1:0"
log = {{ level = "warn", access = "off" }}
listen.threads = 1
rls.address = "127.0.0.1:{port}"
store.kind = "redis"
store.redis.url = "redis://127.0.0.1:{redis}"

[[policy]]
name = "pro"
match = {{ domain = "bench", descriptors = {{ user = "*", plan = "pro" }} }}
key = ["descriptor:user"]
limit = {{ requests = 1000000000, per = "60s", algorithm = "{algorithm}" }}

[[policy]]
name = "free"
match = {{ domain = "bench", descriptors = {{ user = "*", plan = "free" }} }}
key = ["descriptor:user"]
limit = {{ requests = 1, per = "60s", algorithm = "{algorithm}" }}
"""
THEIRS = """
- { namespace: bench, max_value: 1000000000, seconds: 60, conditions: ["descriptors[0].plan == 'pro'"], variables: ["descriptors[0].user"] }
- { namespace: bench, max_value: 1, seconds: 60, conditions: ["descriptors[0].plan == 'free'"], variables: ["descriptors[0].user"] }
"""


def ours(program, algorithm):
    def started(name, port, redis):
        config = file(f"{name}.toml", OURS.format(port=port, redis=redis, algorithm=algorithm))
        return start(name, SERVICE_CPU, port, program, "run", "--config", config)

    return started


def limitador(program, storage):
    def started(name, port, redis):
        limits = file(f"{name}.yaml", THEIRS)
        (http_port,) = free_ports(1)
        return start(
            name, SERVICE_CPU, port, program, "-b", "127.0.0.1", "-p", str(port), "-B", "127.0.0.1", "-P", str(http_port),
            limits, storage, f"redis://127.0.0.1:{redis}", TOKIO_WORKER_THREADS="1",
        )

    return started


ENVOY = """
admin: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {admin} }} }} }}
static_resources:
  listeners:
  - address: {{ socket_address: {{ address: 127.0.0.1, port_value: {front} }} }}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: front
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
              - match: {{ prefix: / }}
                route:
                  cluster: app
                  rate_limits:
                  - actions:
                    - request_headers: {{ header_name: x-user, descriptor_key: user }}
                    - request_headers: {{ header_name: x-plan, descriptor_key: plan }}
          http_filters:
          - name: envoy.filters.http.ratelimit
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.ratelimit.v3.RateLimit
              domain: bench
              failure_mode_deny: true
              timeout: 2s
              rate_limit_service:
                transport_api_version: V3
                grpc_service: {{ envoy_grpc: {{ cluster_name: rls }} }}
          - name: envoy.filters.http.router
            typed_config: {{ "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router }}
  clusters:
  - name: app
    type: STATIC
    load_assignment: {{ cluster_name: app, endpoints: [ {{ lb_endpoints: [ {{ endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {app} }} }} }} }} ] }} ] }}
  - name: rls
    type: STATIC
    typed_extension_protocol_options:
      envoy.extensions.upstreams.http.v3.HttpProtocolOptions:
        "@type": type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions
        explicit_http_config: {{ http2_protocol_options: {{}} }}
    load_assignment: {{ cluster_name: rls, endpoints: [ {{ lb_endpoints: [ {{ endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {rls} }} }} }} }} ] }} ] }}
"""
APP = """
worker_processes 1; daemon off; pid {dir}/app.pid; error_log {dir}/app.log;
events {{ worker_connections 1024; }}
http {{ access_log off; keepalive_requests 100000000; server {{ listen 127.0.0.1:{app}; location / {{ return 200 "{body}"; }} }} }}
"""
# User of a request: one of `keys`, or always the same.
WRK = """
local keys, n = {keys}, 0
request = function()
  n = n + 1
  return wrk.format("GET", "/", {{ ["X-User"] = keys == 1 and "hot" or "u" .. n % keys, ["X-Plan"] = "pro" }})
end
done = function(summary, latency)
  local e = summary.errors
  print(string.format("JSON %d %f %f %d", summary.requests, latency:percentile(50), latency:percentile(99),
    e.status + e.connect + e.read + e.write + e.timeout))
end
"""


# ---- load generators: each returns requests, p50 and p99 in ms, and the number of errors


def alone(port, seconds):
    body = file("hot.bin", "")
    with open(body, "wb") as out:
        out.write(call(b"hot", b"pro"))
    log = f"{DIR}/h2load.log"
    if os.path.exists(log):
        os.remove(log)
    output = subprocess.run(
        ["taskset", "-c", LOAD_CPU, "h2load", "-t1", "-c4", "-m16", f"-D{seconds}", f"--log-file={log}", "-d", body,
         "-H", "content-type: application/grpc", "-H", "te: trailers", f"http://127.0.0.1:{port}{CALL}"],
        capture_output=True, text=True, check=True, timeout=seconds + 60,
    ).stdout
    done, succeeded = map(int, re.search(r"(\d+) done, (\d+) succeeded", output).groups())
    took = sorted(int(line.split("\t")[2]) for line in open(log, encoding="utf-8"))
    return done, took[len(took) // 2] / 1000, took[len(took) * 99 // 100] / 1000, done - succeeded


def through(front, keys):
    script = file(f"keys-{keys}.lua", WRK.format(keys=keys))

    def load(_port, seconds):
        output = subprocess.run(
            ["taskset", "-c", LOAD_CPU, "wrk", "-t1", "-c64", f"-d{seconds}s", "-s", script, f"http://127.0.0.1:{front}"],
            capture_output=True, text=True, check=True, timeout=seconds + 60,
        ).stdout
        requests, p50, p99, wrong = re.search(r"JSON (\S+) (\S+) (\S+) (\S+)", output).groups()
        return int(requests), float(p50) / 1000, float(p99) / 1000, int(wrong)

    return load


def front_answers(port, user, plan):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", "/", headers={"X-User": user, "X-Plan": plan})
    status = connection.getresponse().status
    connection.close()
    return status


def right(name, port):
    """Checks the decisions: with a limit of 1 per minute, the first call of a key passes and the second does not."""
    codes = [overall_code(port, call(b"first", b"free")) for _ in range(2)]
    assert codes == [1, 2], f"{name}: {codes} instead of OK, OVER_LIMIT"
    assert overall_code(port, call(b"hot", b"pro")) == 1


def scripts_of(redis):
    output = subprocess.run(["redis-cli", "-p", str(redis), "info", "commandstats"], capture_output=True, text=True, check=True).stdout
    return sum(int(calls) for calls in re.findall(r"cmdstat_eval(?:sha)?:calls=(\d+)", output))


def measure(load, seconds, port, watched, redis):
    load(port, 1)
    before, scripts = {name: cpu_s(child) for name, child in watched.items()}, scripts_of(redis)
    requests, p50, p99, wrong = load(port, seconds)
    spent = {name: (cpu_s(child) - before[name]) / requests * 1e6 for name, child in watched.items()}
    return {**spent, "rate": requests / seconds, "p50": p50, "p99": p99, "wrong": wrong, "scripts": (scripts_of(redis) - scripts) / requests}


def main():
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("tidegate")
    ask.add_argument("--limitador")
    ask.add_argument("--envoy")
    ask.add_argument("--rounds", type=int, default=3)
    ask.add_argument("--seconds", type=int, default=5)
    args = ask.parse_args()

    services = {"tidegate, sliding_log": ours(args.tidegate, "sliding_log"), "tidegate, fixed_window": ours(args.tidegate, "fixed_window")}
    if args.limitador:
        services["Limitador"] = limitador(args.limitador, "redis")
        services["Limitador, cached"] = limitador(args.limitador, "redis_cached")

    redis_port, app_port, front_port, admin_port, *ports = free_ports(4 + len(services))
    redis = start("redis", LOAD_CPU, redis_port, "redis-server", "--port", str(redis_port), "--bind", "127.0.0.1", "--save", "", "--dir", DIR)
    running = {name: (started(re.sub(r"\W+", "-", name), port, redis_port), port) for (name, started), port in zip(services.items(), ports)}
    for name, (_, port) in running.items():
        if "cached" not in name:
            right(name, port)

    rows = {}
    for turn in range(args.rounds):
        for name, (child, port) in running.items():
            row = measure(alone, args.seconds, port, {"service": child, "redis": redis}, redis_port)
            rows.setdefault(("called directly, one key", name), []).append(row)
    if args.envoy:
        os.chmod(DIR, 0o755)
        app = start("app", LOAD_CPU, app_port, "nginx", "-p", DIR, "-c", file("app.conf", APP.format(dir=DIR, app=app_port, body="x" * 100)))
        for keys in (1, 10_000):
            for turn in range(args.rounds):
                for name, (child, port) in running.items():
                    config = file("envoy.yaml", ENVOY.format(admin=admin_port, front=front_port, app=app_port, rls=port))
                    envoy = start("envoy", SERVICE_CPU, front_port, args.envoy, "-c", config, "--concurrency", "1", "--disable-hot-restart", "-l", "error")
                    while front_answers(front_port, "ready", "pro") != 200:
                        time.sleep(0.05)
                    row = measure(through(front_port, keys), args.seconds, front_port, {"service": child, "envoy": envoy, "redis": redis}, redis_port)
                    rows.setdefault((f"through Envoy, {keys:,} key{'s' * (keys > 1)}", name), []).append(row)
                    end(envoy)
        end(app)

    print(f"{'':26}{'':24}{'µs of CPU a call':>18}{'Envoy':>8}{'Redis':>8}{'calls/s':>10}{'p50 ms':>8}{'p99 ms':>8}{'scripts':>9}{'wrong':>7}")
    for (scenario, name), measured in rows.items():
        median = {key: statistics.median(row[key] for row in measured) for key in measured[0]}
        envoy = f"{median['envoy']:8.1f}" if "envoy" in median else " " * 8
        print(
            f"{scenario:26}{name:24}{median['service']:18.1f}{envoy}{median['redis']:8.1f}{median['rate']:10,.0f}{median['p50']:8.2f}{median['p99']:8.2f}"
            f"{median['scripts']:9.2f}{sum(row['wrong'] for row in measured):7}"
        )


try:
    main()
finally:
    for child in children:
        child.kill()
        child.wait()
    shutil.rmtree(DIR, ignore_errors=True)
