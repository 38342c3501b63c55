"""Sends bodies through tidegate, and compares with what the readers find in them.

Of each field, two policies see the same request: `key` has the field in its key, and the quota of what a reader found
is used up; `has` denies requests in which the field has any value. A body *escapes* if it is forwarded although a
reader finds this value. A body that tidegate finds unreadable never is: `key` has `missing_key = "reject"`, and the
condition of `has` is taken to hold.
"""

import http.client
import json
import socket
import sys

import servers
from bodies import Body

POINTERS = {"model": "/model", "method": "/method", "max_tokens": "/max_tokens", "name": "/params/name"}
# Here `max_tokens` is an integer, also if the body has a text or a boolean. A key has what the body has.
TYPED = {"pydantic", "fastapi", "jackson-spring", "jackson-no-case", "gson-typed"}
# Answers every request with 200, after its body.
ECHO = """
import asyncio, sys
from aiohttp import web
async def handle(request):
    await request.read()
    return web.Response(text="{}")
async def run():
    runner = web.ServerRunner(web.Server(handle, auto_decompress=False), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(sys.argv[1])).start()
    await asyncio.Event().wait()
asyncio.run(run())
"""
CONFIG = """
[listen]
address = "127.0.0.1:{port}"
[upstream]
url = "http://127.0.0.1:{app}"
[admin]
address = "127.0.0.1:0"
[log]
access = "off"
"""
POLICIES = """
[[policy]]
name = "key-{name}"
match = {{ path = "/key/{name}" }}
key = ["header:x-case", "body:{pointer}"]
limit = {{ requests = 1, per = "1d" }}
missing_key = "reject"

[[policy]]
name = "has-{name}"
match = {{ path = "/has/{name}", body = {{ "{pointer}" = {{ regex = "(?s)^.*$" }} }} }}
action = "deny"
"""


def start(program):
    """The port of tidegate."""
    app, port = servers.free_port(), servers.free_port()
    servers.start("bodies-echo", [app], sys.executable, "-c", ECHO, app)
    policies = "".join(POLICIES.format(name=name, pointer=pointer) for name, pointer in POINTERS.items())
    file = servers.DIR / "tidegate-bodies.toml"
    file.write_text(CONFIG.format(port=port, app=app) + policies)
    servers.start("tidegate-bodies", [port], program, "run", "--config", file)
    return port


def send(port, request):
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        try:
            connection.sendall(request)
        except OSError:
            # The response may have arrived before the end of the body.
            pass
        response = http.client.HTTPResponse(connection, method="POST")
        response.begin()
        response.read()
        return response.status


def text_of(value):
    """A value as part of a key. None: no key has it. False: no text is the same."""
    if value is None or isinstance(value, dict) and "t" in value:
        return None
    if isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, dict):
        if "repeat" in value:
            return value["repeat"][0] * value["repeat"][1]
        return value.get("n", False)
    return value


def plain_body(name, text):
    found = {"name": text} if name == "name" else {name: text}
    return Body("plain", [json.dumps({"params": found} if name == "name" else found)])


def attack(port, body, entry, request):
    """Returns the escapes of one body: policy, field, value and readers. `request` makes the bytes of a request."""
    escapes = []
    statuses = {name: send(port, request(body, f"/has/{name}")) for name in POINTERS}
    for number, group in enumerate(entry["readings"]):
        for name in POINTERS:
            text = text_of(group.get(name))
            readers = group["by"].split()
            if text is None:
                continue
            if statuses[name] == 200:
                escapes.append(("has", name, text, readers))
            if name == "max_tokens":
                readers = [reader for reader in readers if reader not in TYPED]
            if not readers:
                continue
            headers = body.headers | {"x-case": f"{body.name.encode().hex()}-{number}"}
            if text is not False:
                plain = plain_body(name, text)
                plain.headers = {"x-case": headers["x-case"]}
                used = [send(port, request(plain, f"/key/{name}")) for _ in range(2)]
                # An empty text or a long one may be no key.
                if used != [200, 429]:
                    if used != [400, 400]:
                        escapes.append((f"plain: {used}", name, text, readers))
                    continue
            sent = Body(body.name, body.parts, body.content_type, headers, body.is_chunked)
            if send(port, request(sent, f"/key/{name}")) == 200:
                escapes.append(("key", name, text, readers))
    return escapes
