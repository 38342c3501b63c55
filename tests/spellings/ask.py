"""Asks real servers for their readings of every spelling, and attacks the proxies in front of them.

    ask.py TIDEGATE ENVOY_OR_EMPTY

README.md describes both steps. Called by tests/spellings.sh.
"""

import json
import os
import re
import socket
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import proxies
import servers

FIXTURE = Path("tests/fixtures/spellings.json")
TIMEOUT_S = 5
# Every server and proxy must serve these.
PLAIN = {"target": "/login/bob", "cookie": "session=bob", "query": "api_key=bob"}
# The credentials of alice, whose quotas are used up.
CREDENTIALS = ("Bearer alice", "Basic YWxpY2U6c2VjcmV0")
# The fields of an answer, by what is spelled.
FIELDS = {"cookie": "session", "query": "api_key", "authorization": "authorization"}
# Answers about which a limit or a denial has something to say.
LIMITED = {"login", "account alice", "admin", "alice"}
EXEMPT = {"public", "healthz"}
REFUSALS = {400, 403, 429}


def expand(spelling):
    """`{x*3}` is `x&x&x`, and `{&*3}` is `&&&`."""

    def repeat(match):
        text, times = match.group(1), int(match.group(2))
        return ("" if text == "&" else "&").join([text] * times)

    return re.sub(r"\{([^{}*]+)\*(\d+)\}", repeat, spelling)


def load_spellings():
    with open(servers.HERE / "spellings.toml", "rb") as file:
        table = tomllib.load(file)
    return {kind: [text for group in groups for text in group["spellings"]] for kind, groups in table.items()}


def request_of(kind, spelling):
    target, field = "/search", ""
    if kind == "target":
        target = spelling
    elif kind == "query":
        target = f"/search?{expand(spelling)}"
    else:
        field = f"{kind.capitalize()}: {spelling}\r\n"
    head = f"GET {target} HTTP/1.1\r\nHost: app.test\r\n{field}Connection: close\r\n\r\n"
    return head.encode("latin-1")


def exchange(port, request):
    """The whole response. A server that neither answers nor closes has not read the request."""
    received = b""
    deadline = time.monotonic() + TIMEOUT_S
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
            connection.sendall(request)
            while part := connection.recv(65536):
                received += part
                connection.settimeout(max(0.01, deadline - time.monotonic()))
    except OSError:
        pass
    return received


def read_answer(kind, spelling, response):
    """What the app read: a handler, or the value "alice", or "none" of many parameters. `None` for anything else."""
    body = re.search(rb'\{"(?:handler|api_key)".*\}', response, re.S)
    if not response.startswith(b"HTTP/1.") or not body:
        return None
    body = json.loads(body.group().decode("utf-8", "replace"), strict=False)
    handler = body["handler"]
    if handler == "account":
        handler = "account alice" if body["user"] == "alice" else "account"
    if kind == "target":
        return handler
    name = FIELDS[kind]
    if handler != "search" or name not in body:
        return None
    if kind == "query" and body[name] is None and "*" in spelling:
        return "none"
    return "alice" if body[name] == "alice" else None


def ask(pool, port, kind, spellings):
    """Reading and status of each spelling."""

    def one(spelling):
        response = exchange(port, request_of(kind, spelling))
        status = re.match(rb"HTTP/1\.. (\d{3})", response)
        return read_answer(kind, spelling, response), int(status.group(1)) if status else None

    return dict(zip(spellings, pool.map(one, spellings), strict=True))


def ask_apps(pool, apps, spellings):
    """The readings of each app, by kind and spelling."""
    readings = {}
    for name, (port, _) in apps.items():
        started = time.monotonic()
        for kind in spellings:
            answers = ask(pool, port, kind, spellings[kind])
            readings[name, kind] = {text: reading for text, (reading, _) in answers.items() if reading}
        assert readings[name, "target"].get("/login") == "login", f"{name} has no /login"
        print(f"  {name}: {time.monotonic() - started:.0f} s", flush=True)
    return readings


def fixture_of(apps, readings, spellings):
    """All readings: per spelling the apps by what they read."""
    fixture = {
        "frameworks": {name: title for name, (_, title) in apps.items()},
        "ignore_case": [name for name in apps if ignores_case(readings, name)],
    }
    for kind, texts in spellings.items():
        fixture[kind] = {}
        for text in texts:
            by_reading = {}
            for name in apps:
                reading = readings[name, kind].get(text)
                if reading:
                    by_reading.setdefault(reading, []).append(name)
            fixture[kind][text] = {reading: " ".join(names) for reading, names in sorted(by_reading.items())}
    return fixture


def ignores_case(readings, name):
    return readings[name, "target"].get("/LOGIN") == "login"


def write_fixture(fixture):
    """One line per spelling."""
    parts = []
    for key, value in fixture.items():
        if key == "ignore_case":
            parts.append(f"{json.dumps(key)}: {json.dumps(value)}")
        else:
            lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items()]
            parts.append(f"{json.dumps(key)}: {{\n" + ",\n".join(lines) + "\n}")
    FIXTURE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def differences(recorded, asked, apps):
    """Readings that are not as recorded. Apps that this machine lacks are not compared."""
    found = []
    for kind in ("target", *FIELDS):
        for text in sorted(recorded.get(kind, {}).keys() | asked[kind].keys()):
            before, now = (
                {name: reading for reading, names in side.get(kind, {}).get(text, {}).items() for name in names.split()}
                for side in (recorded, asked)
            )
            for name in apps:
                if before.get(name) != now.get(name):
                    found.append(f"{kind} {text!r}: {name} reads {now.get(name)}, recorded is {before.get(name)}")
    return found


def attack(pool, title, start, apps, readings, spellings, case):
    """Returns the escapes of one proxy: (line, spelling, app)."""
    ports = {name: proxies.new_ports(port, ignores_case(readings, name)) for name, (port, _) in apps.items()}
    escapes = []
    for names in case:
        running = start([ports[name] for name in names])
        for name in names:
            escapes += attack_app(pool, title, name, ports[name], spellings)
        for child in running:
            servers.stop(child)
    return escapes


def attack_app(pool, title, name, ports, spellings):
    # Uses up the quotas.
    for target in ("/login", "/login/alice"):
        exchange(ports.limits, request_of("target", target))
    exchange(ports.limits, request_of("cookie", "session=alice"))
    exchange(ports.limits, request_of("query", "api_key=alice"))
    for credentials in CREDENTIALS:
        exchange(ports.limits, request_of("authorization", credentials))
    exchange(ports.exemptions, request_of("target", "/other"))
    for port, target, expected in (
        (ports.limits, "/login", 429),
        (ports.limits, "/login/alice", 429),
        (ports.limits, "/admin/users", 403),
        (ports.limits, "/login/bob", 200),
        (ports.exemptions, "/public/app.css", 200),
        (ports.exemptions, "/login", 429),
    ):
        _, status = ask(pool, port, "target", [target])[target]
        assert status == expected, f"{title} in front of {name}: {target} is {status}, expected is {expected}"
    escapes = []
    lines = {"login": "limit", "account alice": "account", "admin": "denial"}
    for kind, texts in spellings.items():
        for text, (reading, _) in ask(pool, ports.limits, kind, texts).items():
            if reading in LIMITED:
                escapes.append((lines.get(reading, kind), text, name))
    for text, (reading, _) in ask(pool, ports.exemptions, "target", spellings["target"]).items():
        if reading and reading not in EXEMPT:
            escapes.append(("exemption", text, name))
    return escapes


LINES = ["limit", "account", "denial", "exemption", "cookie", "query", "authorization"]


def table(results):
    """The number of spellings that escape each proxy, and of apps in front of which any does."""
    rows = [f"| proxy | {' | '.join(LINES)} | all | servers |", f"|---|{'---:|' * (len(LINES) + 2)}"]
    for title, escapes in results.items():
        counts = [len({text for line, text, _ in escapes if line == wanted}) for wanted in LINES]
        names = {name for _, _, name in escapes}
        rows.append(f"| {title} | {' | '.join(map(str, counts))} | {len({e[:2] for e in escapes})} | {len(names)} |")
    return "\n".join(rows)


def main():
    tidegate, envoy = sys.argv[1:3]
    spellings = load_spellings()
    total = sum(map(len, spellings.values()))
    apps, missing = servers.start_apps(sys.executable)
    for name in missing:
        print(f"NOT ASKED: {name}; it is not installed")
    print(f"{total} spellings, {len(apps)} servers", flush=True)
    failed = False
    with ThreadPoolExecutor(4) as pool:
        readings = ask_apps(pool, apps, spellings)
        asked = fixture_of(apps, readings, spellings)
        if os.environ.get("UPDATE_FIXTURES"):
            if missing:
                raise SystemExit("the fixture needs all servers")
            write_fixture(asked)
        else:
            changes = differences(json.loads(FIXTURE.read_text(encoding="utf-8")), asked, apps)
            failed |= bool(changes)
            print("\n".join(changes) or "all readings are as recorded", flush=True)
        results = {}
        starters, missing = proxies.all_proxies(tidegate, envoy)
        for name in missing:
            print(f"NOT ATTACKED: {name}; it is not installed")
        wanted = os.environ.get("PROXIES", "")
        for title, start in starters.items():
            if not title.startswith(wanted):
                continue
            names = list(apps)
            # tidegate has a process per port; a few at a time are enough.
            case = [[name] for name in names] if title.startswith("tidegate") else [names]
            started = time.monotonic()
            results[title] = attack(pool, title, start, apps, readings, spellings, case)
            print(f"  {title}: {time.monotonic() - started:.0f} s", flush=True)
    for title in (title for title in results if title.startswith("tidegate")):
        failed |= bool(results[title])
        for line, text, name in sorted(results[title]):
            print(f"ESCAPED {title}: {line} {text!r} in front of {name}")
    print(table(results))
    if path := os.environ.get("SPELLINGS_REPORT"):
        Path(path).write_text(json.dumps(results, indent=1), encoding="utf-8")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
