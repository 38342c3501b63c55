"""Requests as raw bytes, over HTTP/1.1 and HTTP/2, and what apps answer."""

import json
import re
import socket
import struct
import threading

from hpack import Decoder, HPACKError

# A server that does not answer in this time has not read the request.
TIMEOUT_S = 2
HOST = "app.test"
# The field of an app's answer, by what is spelled.
FIELDS = {"cookie": "session", "query": "api_key", "authorization": "authorization", "header": "x_user", "host": "host"}
ALICE = {"host": "alice.test"}
# Answers about which a limit or a denial has something to say.
LIMITED = {"login", "account alice", "admin", "alice"}
EXEMPT = {"public", "healthz"}


def expand(spelling):
    """`{x*3}` is `x&x&x`, and `{&*3}` is `&&&`."""

    def repeat(match):
        text, times = match.group(1), int(match.group(2))
        return ("" if text == "&" else "&").join([text] * times)

    return re.sub(r"\{([^{}*]+)\*(\d+)\}", repeat, spelling)


def parts_of(kind, spelling):
    """Target, host and header lines."""
    if kind == "target":
        return spelling, HOST, ""
    if kind == "query":
        return f"/search?{expand(spelling)}", HOST, ""
    if kind == "host":
        return "/search", spelling, ""
    if kind == "fields":
        return "/search", HOST, f"{spelling}\r\n"
    name = "X-User" if kind == "header" else kind.capitalize()
    return "/search", HOST, f"{name}: {spelling}\r\n"


def request_of(kind, spelling):
    target, host, lines = parts_of(kind, spelling)
    return f"GET {target} HTTP/1.1\r\nHost: {host}\r\n{lines}\r\n".encode("latin-1")


def http2_fields_of(kind, spelling):
    """Names and values. One space after the colon is no part of the value; continuation lines are."""
    target, host, lines = parts_of(kind, spelling)
    fields = [(":method", "GET"), (":scheme", "http"), (":authority", host), (":path", target)]
    for line in re.split(r"\r\n(?![ \t])", lines.removesuffix("\r\n")) if lines else []:
        name, _, value = line.partition(":")
        fields.append((name.lower(), value.removeprefix(" ")))
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields]


def has_other_password(spelling):
    """Whether Basic credentials are not those of alice, however leniently they are decoded."""
    basic = re.search(r"(?i)basic(.*)", spelling, re.S)
    if not basic:
        return False
    for word in [basic[1], *re.split(r"[\s\x85\xa0,;]+", basic[1])]:
        mapped = word.replace("-", "+").replace("_", "/")
        for text in (word, mapped, word.split("=")[0], mapped.split("=")[0]):
            letters = re.sub(r"[^A-Za-z0-9+/]", "", text)
            # A last letter without eight bits is dropped.
            if letters.startswith("YWxpY2U6c2VjcmV0") and len(letters) <= len("YWxpY2U6c2VjcmV0") + 1:
                return False
    return True


def read_answer(kind, spelling, body):
    """What the app read: a handler, or the value "alice", or "none" of many parameters. `None` for anything else."""
    try:
        body = json.loads(body.decode("utf-8", "replace"), strict=False)
        handler = body["handler"]
    except (ValueError, KeyError, TypeError):
        return None
    if handler == "account":
        handler = "account alice" if body["user"] == "alice" else "account"
    if kind == "target":
        return handler
    if handler != "search":
        return None
    if has_other_password(spelling):
        body["authorization"] = None
    if kind == "fields":
        return "alice" if "alice" in (body.get("session"), body.get("authorization"), body.get("x_user")) else None
    value = body.get(FIELDS[kind])
    if kind == "host":
        # As virtual hosts are compared.
        value = re.sub(r"\.?(:\d*)?$", "", value or "").lower()
    if kind == "query" and FIELDS[kind] in body and value is None and "*" in spelling:
        return "none"
    return "alice" if value == ALICE.get(kind, "alice") else None


class Http1Client:
    """Sends requests one after another, on one connection if the server keeps it."""

    def __init__(self, port):
        self.port, self.connection, self.received = port, None, b""

    def ask(self, request):
        """Status and body, or (0, b"") if there was no response."""
        was_open = self.connection is not None
        answer = self.try_once(request)
        # The server may have closed the connection before, or be slow.
        if answer is None and was_open or answer == (0, b""):
            answer = self.try_once(request)
        if answer is None or answer[0] != 200 or not is_one_request(request):
            self.close()
        return answer or (0, b"")

    def try_once(self, request):
        try:
            if self.connection is None:
                self.connection = socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S)
                self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.received = b""
            self.connection.sendall(request)
            return self.read_response()
        except TimeoutError:
            self.close()
            return 0, b""
        except (OSError, ValueError):
            self.close()
            return None

    def read_more(self):
        part = self.connection.recv(65536)
        self.received += part
        return bool(part)

    def read_until(self, end):
        while end not in self.received:
            if not self.read_more():
                raise ValueError
        before, _, self.received = self.received.partition(end)
        return before

    def read_exactly(self, count):
        while len(self.received) < count:
            if not self.read_more():
                raise ValueError
        body, self.received = self.received[:count], self.received[count:]
        return body

    def read_response(self):
        head = self.read_until(b"\r\n\r\n")
        status = int(re.match(rb"HTTP/1\.[01] (\d{3})", head)[1]) if head.startswith(b"HTTP/1.") else 0
        lower = head.lower()
        if length := re.search(rb"\r\ncontent-length: *(\d+)", lower):
            body = self.read_exactly(int(length[1]))
        elif b"\r\ntransfer-encoding: *chunked" in lower or b"\r\ntransfer-encoding: chunked" in lower:
            body = b""
            while size := int(self.read_until(b"\r\n").split(b";")[0], 16):
                body += self.read_exactly(size)
                self.read_exactly(2)
            self.read_until(b"\r\n")
        else:
            while self.read_more():
                pass
            body = self.received
            self.close()
        if b"\r\nconnection: close" in lower or head.startswith(b"HTTP/1.0") and b"keep-alive" not in lower:
            self.close()
        return status, body

    def close(self):
        if self.connection is not None:
            self.connection.close()
        self.connection = None


def is_one_request(request):
    """Whether no server can take the end of the head for another request."""
    lines = request.removesuffix(b"\r\n\r\n").replace(b"\r\n", b"")
    return b"\n" not in lines and b"\r" not in lines and b"\x00" not in lines


def ask_all(pool, port, requests):
    """Status and body of each request, by HTTP/1.1."""
    local = threading.local()

    def one(request):
        if not hasattr(local, "client"):
            local.client = Http1Client(port)
        return local.client.ask(request)

    return list(pool.map(one, requests))


HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, CONTINUATION = 1, 3, 4, 6, 7, 9
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
BATCH = 50


def frame(kind, flags, stream, payload):
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def encode_string(text):
    length, encoded = len(text), bytearray()
    if length < 127:
        encoded.append(length)
    else:
        encoded.append(127)
        length -= 127
        while length >= 128:
            encoded.append(length % 128 + 128)
            length //= 128
        encoded.append(length)
    return bytes(encoded) + text


def ask_batch(port, requests):
    """Status and body of each list of fields, as streams of one connection. `None`: it ended before."""
    block = frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 2**31 - 1)) + frame(8, 0, 0, struct.pack(">I", 2**30))
    for index, fields in enumerate(requests):
        literals = b"".join(b"\x00" + encode_string(name) + encode_string(value) for name, value in fields)
        block += frame(HEADERS, 5, 2 * index + 1, literals)
    statuses, bodies, ended = [None] * len(requests), [b""] * len(requests), [False] * len(requests)
    received, decoder = b"", Decoder()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as connection:
            connection.sendall(PREFACE + block)
            while not all(ended):
                while len(received) < 9 or len(received) < 9 + int.from_bytes(received[:3]):
                    part = connection.recv(262144)
                    if not part:
                        raise OSError
                    received += part
                length, kind, flags = int.from_bytes(received[:3]), received[3], received[4]
                index, payload = int.from_bytes(received[5:9]) // 2, received[9 : 9 + length]
                received = received[9 + length :]
                if kind == SETTINGS and not flags & 1:
                    connection.sendall(frame(SETTINGS, 1, 0, b""))
                elif kind == PING and not flags & 1:
                    connection.sendall(frame(PING, 1, 0, payload))
                elif kind == HEADERS:
                    fields = dict(decoder.decode(payload, raw=True))
                    statuses[index] = int(fields.get(b":status", statuses[index] or 0))
                elif kind == 0:
                    bodies[index] += payload
                elif kind == RST_STREAM and not ended[index]:
                    statuses[index], bodies[index], ended[index] = statuses[index] or 0, b"", True
                elif kind == GOAWAY and int.from_bytes(payload[4:8]):
                    raise OSError
                if kind in (0, HEADERS) and flags & 1:
                    ended[index] = True
    except (OSError, ValueError, HPACKError):
        pass
    answers = zip(statuses, bodies, ended, strict=True)
    return [(status, body) if is_ended else None for status, body, is_ended in answers]


def ask_all_http2(pool, port, requests):
    """Status and body of each list of fields. (0, b""): the stream or its connection was closed."""

    def batch(at):
        part = requests[at : at + BATCH]
        answers = ask_batch(port, part)
        for index, answer in enumerate(answers):
            if answer is None:
                answers[index] = ask_batch(port, [part[index]])[0] or (0, b"")
        return answers

    return [answer for answers in pool.map(batch, range(0, len(requests), BATCH)) for answer in answers]
