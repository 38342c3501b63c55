"""Asks real servers for their readings of every spelling, and attacks the proxies in front of them.

    ask.py TIDEGATE ENVOY_OR_EMPTY

README.md describes both steps. Called by tests/spellings.sh.
"""

import json
import os
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import draw
import proxies
import servers
import wire

FIXTURE = Path("tests/fixtures/spellings.json")
DRAWN = servers.HERE / "drawn.toml"


def load_spellings():
    kinds = {}
    for kind, groups in tomllib.loads((servers.HERE / "spellings.toml").read_text(encoding="utf-8")).items():
        kinds[kind] = [text for group in groups for text in group["spellings"]]
    for kind, drawn in load_drawn().items():
        kinds[kind] = list(dict.fromkeys([*kinds[kind], *drawn.values()]))
    return kinds


def load_drawn():
    return tomllib.loads(DRAWN.read_text(encoding="utf-8"))


def ask(pool, port, kind, spellings):
    """Reading and status of each spelling."""
    answers = wire.ask_all(pool, port, [wire.request_of(kind, text) for text in spellings])
    return {
        text: (wire.read_answer(kind, text, body), status)
        for text, (status, body) in zip(spellings, answers, strict=True)
    }


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
    for kind in asked.keys() - {"frameworks", "ignore_case"}:
        for text in sorted(recorded.get(kind, {}).keys() | asked[kind].keys()):
            before, now = (
                {name: reading for reading, names in side.get(kind, {}).get(text, {}).items() for name in names.split()}
                for side in (recorded, asked)
            )
            for name in apps:
                if before.get(name) != now.get(name):
                    found.append(f"{kind} {text!r}: {name} reads {now.get(name)}, recorded is {before.get(name)}")
    return found


def attack(pool, proxy, apps, readings, spellings):
    """Returns the escapes of one proxy: (line, spelling, app)."""
    ports = {name: proxies.new_ports(port, ignores_case(readings, name)) for name, (port, _) in apps.items()}
    escapes = []
    # tidegate has a process per port; a few at a time are enough.
    for names in [[name] for name in apps] if proxy.title.startswith("tidegate") else [list(apps)]:
        running = proxy.start([ports[name] for name in names])
        for name in names:
            escapes += attack_app(pool, proxy, name, ports[name], spellings)
        for child in running:
            servers.stop(child)
    return escapes


def attack_app(pool, proxy, name, ports, spellings):
    proxies.use_up(ports)
    for port, target, expected in (
        (ports.limits, "/login", 429),
        (ports.limits, "/login/alice", 429),
        (ports.limits, "/admin/users", 403),
        (ports.limits, "/login/bob", 200),
        (ports.exemptions, "/public/app.css", 200),
        (ports.exemptions, "/login", 429),
    ):
        _, status = ask(pool, port, "target", [target])[target]
        assert status == expected, f"{proxy.title} in front of {name}: {target} is {status}, expected is {expected}"
    escapes = []
    lines = {"login": "limit", "account alice": "account", "admin": "denial"}
    for port in proxy.ports:
        for kind, texts in spellings.items():
            is_sent = port == "limits" or (kind == "target") == (port == "exemptions")
            for text, (reading, _) in ask(pool, getattr(ports, port), kind, texts).items() if is_sent else ():
                if draw.is_escape(port, reading):
                    line = lines.get(reading, kind) if port != "exemptions" else "exemption"
                    escapes.append((line, text, name))
    return escapes


LINES = ["limit", "account", "denial", "exemption", "cookie", "query", "authorization", "header", "fields", "host"]


def table(results):
    """The number of spellings that escape each proxy, and of apps in front of which any does."""
    rows = [f"| proxy | {' | '.join(LINES)} | all | servers |", f"|---|{'---:|' * (len(LINES) + 2)}"]
    for title, escapes in results.items():
        counts = [len({text for line, text, _ in escapes if line == wanted}) for wanted in LINES]
        names = {name for _, _, name in escapes}
        rows.append(f"| {title} | {' | '.join(map(str, counts))} | {len({e[:2] for e in escapes})} | {len(names)} |")
    return "\n".join(rows)


def append_drawn(escapes):
    """Adds spellings to drawn.toml, by their seeds."""
    drawn = load_drawn()
    for (kind, spelling), seed in escapes.items():
        if spelling not in drawn.setdefault(kind, {}).values():
            drawn[kind][seed] = spelling
    parts = [
        "# Spellings that once escaped, by the seed and number of the draw. See README.md.\n",
        *("\n".join([f"\n[{kind}]", *(line_of(*one) for one in found.items()), ""]) for kind, found in drawn.items()),
    ]
    DRAWN.write_text("".join(parts), encoding="utf-8")


def line_of(seed, spelling):
    shown = json.dumps(spelling).replace("\x7f", "\\u007f")
    return f'"{seed}" = {shown}'


def ask_list(pool, apps, starters, is_update):
    """Asks all apps for the listed spellings, and attacks the proxies with them. Returns whether all is as expected."""
    spellings = load_spellings()
    print(f"{sum(map(len, spellings.values()))} listed spellings, {len(apps)} servers", flush=True)
    readings = ask_apps(pool, apps, spellings)
    asked = fixture_of(apps, readings, spellings)
    changes = []
    if is_update:
        write_fixture(asked)
    else:
        changes = differences(json.loads(FIXTURE.read_text(encoding="utf-8")), asked, apps)
        print("\n".join(changes) or "all readings are as recorded", flush=True)
    return attack_list(pool, apps, readings, spellings, starters) and not changes


def attack_list(pool, apps, readings, spellings, starters):
    """Sends the listed spellings through each proxy in front of each app. Returns whether tidegate held."""
    results = {}
    for proxy in starters:
        started = time.monotonic()
        results[proxy.title] = attack(pool, proxy, apps, readings, spellings)
        print(f"  {proxy.title}: {time.monotonic() - started:.0f} s", flush=True)
    own = [title for title in results if title.startswith("tidegate")]
    for title in own:
        for line, text, name in sorted(set(results[title])):
            print(f"ESCAPED {title}: {line} {text!r} in front of {name}")
    print(table(results))
    if path := os.environ.get("SPELLINGS_REPORT"):
        Path(path).write_text(json.dumps(results, indent=1), encoding="utf-8")
    return not any(results[title] for title in own)


def main():
    tidegate, envoy = sys.argv[1:3]
    apps, missing = servers.start_apps(sys.executable)
    for name in missing:
        print(f"NOT ASKED: {name}; it is not installed")
    if wanted := os.environ.get("SERVERS", "").split():
        apps = {name: apps[name] for name in wanted}
    starters, lacking = proxies.all_proxies(tidegate, envoy)
    for name in lacking:
        print(f"NOT ATTACKED: {name}; it is not installed")
    is_update = bool(os.environ.get("UPDATE_FIXTURES"))
    if is_update and (missing or wanted):
        raise SystemExit("the fixture needs all servers")
    failed = False
    with ThreadPoolExecutor(16) as pool:
        if os.environ.get("DRAWS") != "0":
            routers = [name for name, (port, _) in apps.items() if ask(pool, port, "target", ["/LOGIN"])["/LOGIN"][0]]
            escapes = draw.run(pool, apps, routers, starters)
            failed |= bool(escapes)
            if is_update:
                append_drawn(escapes)
        if os.environ.get("LIST") != "0":
            failed |= not ask_list(pool, apps, starters, is_update)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
