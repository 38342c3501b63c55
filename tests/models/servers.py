"""Servers with the APIs of language models and of MCP, on one loopback port.

    servers.py PORT

The prompt of a request is its plan: "input=120 output=80 events=8". The server reports exactly this usage, so a client
knows what must be charged. Parts of a plan, all optional:

    input, output, cached   tokens; `cached` ones are part of `input` and also in the response header X-Cached
    events                  number of events with text in a streamed response
    usage                   final (default): as the real API reports it | cumulative: in every event | none
    gap_ms                  time between two events
    cut                     after so many events, end as the proxy ends a stream whose key has nothing left
    ending                  of such a stream: event (default) | none

`GET /log?user=NAME` returns the requests with this `X-User`: path, usage reported so far, whether the response was
complete, and when the first and the last byte of the request body arrived (monotonic clock).
"""

import asyncio
import json
import re
import sys
import time

from aiohttp import web

DEFAULTS = {
    "input": 10,
    "output": 20,
    "cached": 0,
    "events": 4,
    "usage": "final",
    "gap_ms": 0,
    "cut": None,
    "ending": "event",
}
# What the proxy sends as the last event of a stream that it ends.
CUT_OFF_EVENT = {
    "type": "error",
    "error": {
        "type": "rate_limit_error",
        "code": "rate_limit_exceeded",
        "message": 'Over the limit of policy "tokens". Try again in 60 s.',
    },
}
LOG = {}


class Plan:
    def __init__(self, prompt):
        parts = DEFAULTS | dict(re.findall(r"(\w+)=(\w+)", prompt))
        self.usage, self.ending = parts.pop("usage"), parts.pop("ending")
        for name, value in parts.items():
            setattr(self, name, None if value is None else int(value))

    def output_at(self, event):
        """Output tokens after this many events."""
        return self.output * event // self.events


class StreamWriter:
    """A streamed response. Records the usage that it has sent."""

    def __init__(self, request, plan, content_type="text/event-stream"):
        self.entry = request["entry"]
        self.plan = plan
        self.response = web.StreamResponse(headers={"content-type": content_type, **headers_of(plan)})
        self.sse = content_type == "text/event-stream"
        self.request = request
        self.events = 0

    async def __aenter__(self):
        await self.response.prepare(self.request)
        return self

    async def __aexit__(self, kind, *_):
        if kind is None:
            await self.response.write_eof()
            self.entry["complete"] = True

    async def send(self, text, reported=None):
        await self.response.write(text.encode())
        if reported is not None:
            self.entry["reported"] = reported

    async def event(self, data, name=None, reported=None):
        data = data if isinstance(data, str) else json.dumps(data)
        await self.send(f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n", reported)

    async def next_piece(self):
        """Waits for the next event with text. Returns False if the stream was cut off instead."""
        if self.events == self.plan.cut:
            if self.sse:
                if self.plan.ending == "event":
                    await self.event(CUT_OFF_EVENT, "error")
            else:
                self.request.transport.abort()
            return False
        self.events += 1
        if self.plan.gap_ms:
            await asyncio.sleep(self.plan.gap_ms / 1000)
        return True


def headers_of(plan):
    return {"x-cached": str(plan.cached)} if plan.cached else {}


def respond(request, plan, body, reported):
    request["entry"] |= {"reported": reported, "complete": True}
    return web.json_response(body, headers=headers_of(plan))


def text_of(content):
    """The text of a message, which is a string or a list of parts."""
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


async def read_json(request):
    """Reads the body and notes when its bytes arrive."""
    body = b""
    async for data in request.content.iter_any():
        request["entry"].setdefault("first_byte", time.monotonic())
        body += data
    request["entry"]["last_byte"] = time.monotonic()
    request["entry"]["bytes"] = len(body)
    return json.loads(body)


# OpenAI


def chat_usage(plan, output):
    return {
        "prompt_tokens": plan.input,
        "completion_tokens": output,
        "total_tokens": plan.input + output,
        "prompt_tokens_details": {"cached_tokens": plan.cached, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def chat_completions(request):
    body = await read_json(request)
    plan = Plan(text_of(body["messages"][-1]["content"]))
    head = {"id": "chatcmpl-1", "created": 1, "model": body["model"]}
    if not body.get("stream"):
        message = {"role": "assistant", "content": "word " * plan.events, "refusal": None}
        completion = head | {
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}],
        }
        if plan.usage != "none":
            completion["usage"] = chat_usage(plan, plan.output)
        return respond(request, plan, completion, plan.input + plan.output)

    wants_usage = (body.get("stream_options") or {}).get("include_usage") and plan.usage != "none"
    head["object"] = "chat.completion.chunk"

    def chunk(delta, output, finish_reason=None):
        data = head | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}]}
        if wants_usage:
            data["usage"] = chat_usage(plan, output) if plan.usage == "cumulative" else None
        return data

    async with StreamWriter(request, plan) as stream:
        await stream.event(chunk({"role": "assistant", "content": ""}, 0))
        while stream.events < plan.events or plan.cut == stream.events:
            if not await stream.next_piece():
                return stream.response
            output = plan.output_at(stream.events)
            reported = plan.input + output if plan.usage == "cumulative" else None
            await stream.event(chunk({"content": "word "}, output), reported=reported)
        await stream.event(chunk({}, plan.output, "stop"))
        if wants_usage:
            data = head | {"choices": [], "usage": chat_usage(plan, plan.output)}
            await stream.event(data, reported=plan.input + plan.output)
        await stream.event("[DONE]")
    return stream.response


async def responses(request):
    body = await read_json(request)
    given = body["input"]
    plan = Plan(given if isinstance(given, str) else text_of(given[-1]["content"]))
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": []}
    head = {
        "id": "resp_1",
        "object": "response",
        "created_at": 1,
        "model": body["model"],
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "error": None,
        "output": [],
        "usage": None,
    }
    text = {"type": "output_text", "text": "word " * plan.events, "annotations": [], "logprobs": []}
    completed = head | {"status": "completed", "output": [item | {"content": [text]}]}
    if plan.usage != "none":
        completed["usage"] = {
            "input_tokens": plan.input,
            "input_tokens_details": {"cached_tokens": plan.cached},
            "output_tokens": plan.output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": plan.input + plan.output,
        }
    if not body.get("stream"):
        return respond(request, plan, completed, plan.input + plan.output)

    async with StreamWriter(request, plan) as stream:
        place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
        number = 0

        async def send(kind, reported=None, **fields):
            nonlocal number
            await stream.event({"type": kind, "sequence_number": number} | fields, kind, reported)
            number += 1

        await send("response.created", response=head | {"status": "in_progress"})
        await send("response.output_item.added", output_index=0, item=item | {"status": "in_progress"})
        await send("response.content_part.added", **place, part=text | {"text": ""})
        while stream.events < plan.events or plan.cut == stream.events:
            if not await stream.next_piece():
                return stream.response
            await send("response.output_text.delta", **place, delta="word ", logprobs=[])
        await send("response.output_text.done", **place, text=text["text"], logprobs=[])
        await send("response.content_part.done", **place, part=text)
        await send("response.output_item.done", output_index=0, item=completed["output"][0])
        await send("response.completed", plan.input + plan.output, response=completed)
    return stream.response


# Anthropic


async def messages(request):
    body = await read_json(request)
    plan = Plan(text_of(body["messages"][-1]["content"]))
    usage = {
        "input_tokens": plan.input - plan.cached,
        "cache_read_input_tokens": plan.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": plan.output,
    }
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": body["model"],
        "content": [{"type": "text", "text": "word " * plan.events}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": usage,
    }
    if not body.get("stream"):
        return respond(request, plan, message, plan.input + plan.output)

    async with StreamWriter(request, plan) as stream:

        async def send(kind, reported=None, **fields):
            await stream.event({"type": kind} | fields, kind, reported)

        def delta(output, stop_reason):
            return {
                "delta": {"stop_reason": stop_reason, "stop_sequence": None},
                "usage": {"output_tokens": output},
            }

        started = message | {"content": [], "stop_reason": None, "usage": usage | {"output_tokens": 1}}
        await send("message_start", plan.input + 1, message=started)
        await send("content_block_start", index=0, content_block={"type": "text", "text": ""})
        await send("ping")
        while stream.events < plan.events or plan.cut == stream.events:
            if not await stream.next_piece():
                return stream.response
            await send("content_block_delta", index=0, delta={"type": "text_delta", "text": "word "})
            if plan.usage == "cumulative":
                output = plan.output_at(stream.events)
                await send("message_delta", plan.input + output, **delta(output, None))
        await send("content_block_stop", index=0)
        await send("message_delta", plan.input + plan.output, **delta(plan.output, "end_turn"))
        await send("message_stop")
    return stream.response


# Gemini


async def generate_content(request):
    body = await read_json(request)
    plan = Plan(text_of(body["contents"][-1]["parts"]))

    def answer(text, output, finish_reason=None):
        candidate = {"content": {"role": "model", "parts": [{"text": text}]}, "index": 0}
        if finish_reason:
            candidate["finishReason"] = finish_reason
        data = {"candidates": [candidate], "modelVersion": request.match_info["model"], "responseId": "r1"}
        # The real API reports the usage in every chunk. Before the first text, there are no candidate tokens.
        if plan.usage != "none":
            counts = {"promptTokenCount": plan.input, "totalTokenCount": plan.input + output}
            data["usageMetadata"] = counts | ({"candidatesTokenCount": output} if output else {})
        return data

    if request.match_info["action"] == "generateContent":
        data = answer("word " * plan.events, plan.output, "STOP")
        return respond(request, plan, data, plan.input + plan.output)

    sse = request.query.get("alt") == "sse"
    async with StreamWriter(request, plan, "text/event-stream" if sse else "application/json") as stream:
        while stream.events < plan.events or plan.cut == stream.events:
            if not await stream.next_piece():
                return stream.response
            output = plan.output_at(stream.events)
            data = answer("word ", output, "STOP" if stream.events == plan.events else None)
            if sse:
                await stream.event(data, reported=plan.input + output)
            else:
                await stream.send(("[" if stream.events == 1 else ",\r\n") + json.dumps(data), plan.input + output)
        if not sse:
            await stream.send("]")
    return stream.response


# MCP


async def mcp(request):
    if request.method != "POST":
        return web.Response(status=405 if request.method == "GET" else 200)
    call = await read_json(request)
    request["entry"]["method"] = call.get("method")
    if "id" not in call:
        return web.Response(status=202)

    def reply(result=None, error=None):
        return {"jsonrpc": "2.0", "id": call["id"]} | ({"error": error} if error else {"result": result})

    params = call.get("params") or {}
    if call["method"] == "initialize":
        result = {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "test server", "version": "1"},
        }
        return web.json_response(reply(result), headers={"mcp-session-id": "s1"})
    if call["method"] == "tools/list":
        schema = {"type": "object", "properties": {"plan": {"type": "string"}}}
        tools = [{"name": name, "description": "A test tool", "inputSchema": schema} for name in ("search", "report")]
        return web.json_response(reply({"tools": tools}))
    if call["method"] != "tools/call":
        return web.json_response(reply(error={"code": -32601, "message": "Method not found"}))
    plan = Plan(params.get("arguments", {}).get("plan", ""))
    result = reply(
        {
            "content": [{"type": "text", "text": "word " * plan.events}],
            "structuredContent": {"usage": {"total_tokens": plan.input + plan.output}},
            "isError": False,
        }
    )
    if params["name"] == "search":
        return respond(request, plan, result, plan.input + plan.output)
    async with StreamWriter(request, plan) as stream:
        while stream.events < plan.events or plan.cut == stream.events:
            if not await stream.next_piece():
                return stream.response
            message = {"level": "info", "data": "word"}
            await stream.event({"jsonrpc": "2.0", "method": "notifications/message", "params": message}, "message")
        await stream.event(result, "message", plan.input + plan.output)
    return stream.response


async def upload(request):
    """Accepts any body, and answers with its size."""
    size = 0
    async for data in request.content.iter_any():
        request["entry"].setdefault("first_byte", time.monotonic())
        size += len(data)
    request["entry"] |= {"last_byte": time.monotonic(), "bytes": size, "complete": True}
    return web.json_response({"bytes": size, "usage": {"total_tokens": 1}})


async def log(request):
    return web.json_response(LOG.get(request.query["user"], []))


@web.middleware
async def record(request, handler):
    entry = {"path": request.path, "reported": None, "complete": False}
    if request.path != "/log":
        LOG.setdefault(request.headers.get("x-user", "-"), []).append(entry)
    request["entry"] = entry
    return await handler(request)


async def serve(port):
    app = web.Application(middlewares=[record], client_max_size=1 << 30)
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_post("/v1/responses", responses)
    app.router.add_post("/v1/messages", messages)
    app.router.add_post("/{version:v1|v1beta}/models/{model}:{action}", generate_content)
    app.router.add_route("*", "/mcp", mcp)
    app.router.add_post("/upload", upload)
    app.router.add_get("/log", log)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=2048).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
