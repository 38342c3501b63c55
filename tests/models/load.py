"""Many slow streams and uploads at a time."""

import asyncio
import functools
import json
import random
import time
from dataclasses import dataclass, field

import aiohttp

STREAMS = 200
UPLOADS = 1000
UPLOAD_BYTES = 200 << 10
PIECE_BYTES = 10 << 10


@dataclass
class StreamResult:
    status: int = 0
    # Time and reported total of each event.
    reports: list = field(default_factory=list)
    is_cut: bool = False
    # Lines that are no complete event.
    broken: int = 0

    @property
    def units(self):
        return self.reports[-1][1] if self.reports else 0


def draw_plans(seed):
    """Plans of streams that report their usage in every event, and what they would use together."""
    source = random.Random(seed)
    plans, total = [], 0
    for _ in range(STREAMS):
        prompt, output = source.randrange(10, 200), source.randrange(50, 1500)
        # At most 40 units in an event.
        events = output // 40 + source.randrange(1, 40)
        plans.append(
            f"input={prompt} output={output} events={events} usage=cumulative gap_ms={source.randrange(5, 60)}"
        )
        total += prompt + output
    return plans, total


async def read_stream(session, url, user, plan):
    result = StreamResult()
    body = {
        "model": "gpt-5",
        "messages": [{"role": "user", "content": plan}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with session.post(f"{url}/v1/chat/completions", json=body, headers={"x-user": user}) as response:
        result.status = response.status
        if response.status != 200:
            return result
        is_error = False
        async for line in response.content:
            line = line.decode().rstrip("\n")
            if line == "event: error":
                is_error = True
            elif line.startswith("data: ") and line != "data: [DONE]":
                try:
                    event = json.loads(line[6:])
                except ValueError:
                    result.broken += 1
                    continue
                if is_error:
                    result.is_cut = event["error"]["code"] == "rate_limit_exceeded"
                elif usage := event.get("usage"):
                    result.reports.append((time.monotonic(), usage["total_tokens"]))
            elif line and line != "data: [DONE]":
                result.broken += 1
    return result


async def read_streams(urls, user, plans):
    """Starts all streams at once, spread over the proxies."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        calls = [read_stream(session, urls[index % len(urls)], user, plan) for index, plan in enumerate(plans)]
        return await asyncio.gather(*calls)


def overspend(results, limit):
    """Units delivered over the limit: in total, and the most that one stream got after the limit was reached."""
    reports = sorted(
        (when, index, units - before)
        for index, result in enumerate(results)
        for (when, units), before in zip(result.reports, [0, *(units for _, units in result.reports)])
    )
    delivered, late = 0, [0] * len(results)
    for _, index, units in reports:
        late[index] += max(0, min(units, delivered + units - limit))
        delivered += units
    return max(0, delivered - limit), max(late)


@dataclass
class Upload:
    """A JSON body that is sent in pieces."""

    size: int = UPLOAD_BYTES
    is_chunked: bool = False
    content_type: str = "application/json"

    def head(self, user):
        lines = ["POST /upload HTTP/1.1", "host: test", f"x-user: {user}", f"content-type: {self.content_type}"]
        length = "transfer-encoding: chunked" if self.is_chunked else f"content-length: {self.size}"
        return "\r\n".join([*lines, length, "connection: close", "", ""]).encode()

    def piece(self, start, end):
        """These bytes of the body, as they are sent."""
        data = json_body(self.size)[start:end]
        if not self.is_chunked:
            return data
        return b"%x\r\n%s\r\n" % (len(data), data) + (b"0\r\n\r\n" if end == self.size else b"")


@functools.cache
def json_body(size=UPLOAD_BYTES):
    start, end = b'{"model":"gpt-5","padding":"', b'"}'
    return start + b"x" * (size - len(start) - len(end)) + end


async def upload_slowly(port, user, gap_s, upload):
    """Returns the times before the first and the last piece, and the status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(upload.head(user))
    started = time.monotonic()
    for place in range(0, upload.size, PIECE_BYTES):
        last = time.monotonic()
        writer.write(upload.piece(place, min(place + PIECE_BYTES, upload.size)))
        await writer.drain()
        await asyncio.sleep(gap_s)
    status = int((await reader.readline()).split()[1])
    writer.close()
    return started, last, status


async def hold_uploads(port, user, upload, places, measure):
    """Sends `UPLOADS` bodies at the same time. Calls `measure` while each has sent as many bytes as `places` say."""
    connections = []
    for _ in range(UPLOADS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(upload.head(user))
        connections.append((reader, writer))
    sent, measured = 0, []
    for until in [*places, upload.size]:
        while sent < until:
            size = min(5 << 10, until - sent)
            for _, writer in connections:
                writer.write(upload.piece(sent, sent + size))
                await writer.drain()
            sent += size
            await asyncio.sleep(0.1)
        if until < upload.size:
            await asyncio.sleep(1)
            measured.append(measure())
    statuses = []
    for reader, writer in connections:
        statuses.append(int((await reader.readline()).split()[1]))
        writer.close()
    return measured, statuses
