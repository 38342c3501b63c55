"""Draws spellings, sends them through the proxies, and asks real servers how they read what passes.

Each proxy stands in front of an app that answers with the head that it received. So what a proxy forwards is known
byte by byte, and every server is asked for its reading of it.
"""

import os
import re
import time
from collections import Counter, defaultdict, namedtuple

import grammar
import proxies
import servers
import wire

# A request that passed: where ("limits", ...), the protocol, the kind and text of its spelling, and the forwarded head.
Passed = namedtuple("Passed", "port protocol kind text ignores_case head")
PROTOCOLS = ("HTTP/1.1", "HTTP/2")
COUNTED = {403, 429}
# Fields that a proxy adds by itself.
ADDED = re.compile(rb"(?i)^(x-forwarded-\S*|x-envoy-\S*|x-request-id|x-real-ip|forwarded|via|traceparent):|^connection: close$")
NAMES = {name.lower(): name for name in (b"Host", b"Cookie", b"X-User", b"Authorization")}


def comparable(head):
    """A forwarded head as `request_of` writes it, so that equal requests are asked once."""
    line, *fields = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    kept = []
    for field in fields:
        name, colon, value = field.partition(b":")
        if not ADDED.match(field):
            kept.append(NAMES.get(name.lower(), name) + colon + value)
    kept.sort(key=lambda field: not field.startswith(b"Host:"))
    return b"\r\n".join([line, *kept, b"", b""])


def send_all(pool, proxy, ports, spellings):
    """Sends each spelling to each port of a proxy. Returns what passed, and the statuses at the limits."""
    passed, statuses = [], {}
    own = [key for key in spellings if key[0] != "target"]
    targets = [key for key in spellings if key[0] == "target"]
    for ignores_case in (False, True):
        of_case = ports[ignores_case]
        for port in proxy.ports:
            sent = targets if port == "exemptions" else own if port != "limits" else spellings
            # Only routers ignore case.
            sent = [key for key in sent if not ignores_case or key[0] == "target"]
            for protocol in PROTOCOLS:
                if protocol == "HTTP/1.1":
                    answers = wire.ask_all(pool, getattr(of_case, port), [wire.request_of(*key) for key in sent])
                else:
                    number = of_case.http2 if proxy.has_http2_port else getattr(of_case, port)
                    if proxy.has_http2_port and port != "limits":
                        continue
                    answers = wire.ask_all_http2(pool, number, [wire.http2_fields_of(*key) for key in sent])
                for (kind, text), (status, body) in zip(sent, answers, strict=True):
                    if port == "limits":
                        statuses[kind, text, ignores_case, protocol] = status
                    if status == 200 and body.startswith(b"GET "):
                        passed.append(Passed(port, protocol, kind, text, ignores_case, comparable(body)))
    return passed, statuses


def attack(pool, proxy, echo, spellings):
    ports = {ignores_case: proxies.new_ports(echo, ignores_case) for ignores_case in (False, True)}
    running = proxy.start(list(ports.values()))
    for one in ports.values():
        proxies.use_up(one)
    passed, statuses = send_all(pool, proxy, ports, spellings)
    for child in running:
        servers.stop(child)
    return passed, statuses


def is_escape(port, reading):
    if port == "exemptions":
        return bool(reading) and reading not in wire.EXEMPT
    return reading in wire.LIMITED


def ask_server(pool, port, spellings, passed):
    """What a server reads of each spelling, and of each forwarded head of a spelling."""
    wanted = {(kind, text, wire.request_of(kind, text)) for kind, text in spellings}
    wanted.update((one.kind, one.text, one.head) for one in passed)
    heads = sorted({head for _, _, head in wanted})
    answers = dict(zip(heads, wire.ask_all(pool, port, heads), strict=True))
    return {key: wire.read_answer(key[0], key[1], answers[key[2]][1]) for key in wanted}


def row_of(name, spellings, readings, statuses, ignores_case, escaped):
    """Of the spellings that a server reads as the plain one: refused and counted ones, by protocol."""
    plain = [key for key in spellings if readings[*key, wire.request_of(*key)] in wire.LIMITED]
    cells = [name, len(spellings), len(plain)]
    for protocol in PROTOCOLS:
        seen = Counter()
        for kind, text in plain:
            status = statuses[kind, text, ignores_case and kind == "target", protocol]
            seen["counted" if status in COUNTED else "passed" if status == 200 else "refused"] += 1
        cells += [seen["refused"], seen["counted"], seen["passed"]]
    return f"| {' | '.join(map(str, [*cells, escaped]))} |"


def run(pool, apps, ignores_case, all_proxies):
    """Returns the numbers, kinds and spellings that escape tidegate, and prints tables."""
    seed = os.environ.get("SEED") or str(int(time.time()))
    count = int(os.environ.get("DRAWS") or 15_000)
    spellings = grammar.draws(seed, count)
    kinds = Counter(kind for kind, _ in spellings)
    shares = ", ".join(f"{kind} {kinds[kind]}" for kind in grammar.WEIGHTS)
    print(f"SEED={seed} DRAWS={count}: {shares}", flush=True)
    echo = servers.free_port()
    servers.start("echo", [echo], servers.sys.executable, servers.APPS / "echo.py", echo)
    attacks = {}
    for proxy in all_proxies:
        started = time.monotonic()
        attacks[proxy.title] = attack(pool, proxy, echo, spellings)
        number = len(attacks[proxy.title][0])
        print(f"  {proxy.title}: {number} passed, {time.monotonic() - started:.0f} s", flush=True)
    everything = [one for passed, _ in attacks.values() for one in passed]
    escapes = {title: defaultdict(set) for title in attacks}
    first = all_proxies[0].title
    rows = []
    for name, (port, title) in apps.items():
        started = time.monotonic()
        readings = ask_server(pool, port, spellings, everything)
        for proxy, (passed, _) in attacks.items():
            for one in passed:
                is_asked = one.kind != "target" or one.ignores_case == (name in ignores_case)
                if is_asked and is_escape(one.port, readings[one.kind, one.text, one.head]):
                    escapes[proxy][one.kind, one.text].add((name, one.protocol, one.port))
        own = sum(any(place[0] == name for place in places) for places in escapes[first].values())
        rows.append(row_of(title, spellings, readings, attacks[first][1], name in ignores_case, own))
        taken = time.monotonic() - started
        print(f"  {name}: {len(readings)} requests, {own} escapes of {first}, {taken:.0f} s", flush=True)
    print(f"\n{first} in front of each server:\n")
    print("| server | drawn | read as the plain one | HTTP/1.1: refused | counted | passed ", end="")
    print("| HTTP/2: refused | counted | passed | escaped |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    print("\n".join(rows))
    print_escapes(seed, spellings, escapes)
    print("\n" + table(escapes), flush=True)
    found = {key for title, places in escapes.items() if title.startswith("tidegate") for key in places}
    return {key: f"{seed}/{spellings[key]}" for key in sorted(found)}


def print_escapes(seed, spellings, escapes):
    for title, found in escapes.items():
        if not title.startswith("tidegate"):
            continue
        for (kind, text), places in sorted(found.items()):
            names = " ".join(sorted({name for name, _, _ in places}))
            ways = ", ".join(sorted({f"{protocol} {port}" for _, protocol, port in places}))
            print(f"ESCAPED {title}: {seed}/{spellings[kind, text]} {kind} {text!r} ({ways}) in front of {names}")


def table(escapes):
    kinds = list(grammar.WEIGHTS)
    rows = [f"| proxy | {' | '.join(kinds)} | all | servers |", f"|---|{'---:|' * (len(kinds) + 2)}"]
    for title, found in escapes.items():
        counts = Counter(kind for kind, _ in found)
        names = {name for places in found.values() for name, _, _ in places}
        rows.append(f"| {title} | {' | '.join(str(counts[kind]) for kind in kinds)} | {len(found)} | {len(names)} |")
    return "\n".join(rows)
