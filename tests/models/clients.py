"""Calls through the client libraries. Each returns an `Outcome` instead of raising the library's error."""

import asyncio
import logging
from dataclasses import dataclass, field

import anthropic
import httpx
import httpx2
import openai
from google import genai
from google.genai import types
from mcp.client.client import Client as McpClient
from mcp.client.streamable_http import streamable_http_client

# The error of a stream is reported by the call too.
logging.getLogger("mcp").setLevel(logging.CRITICAL)
logging.getLogger("client").setLevel(logging.CRITICAL)


@dataclass
class Outcome:
    """The usage that the library reports, the number of events before the end or error, and the error."""

    units: int | None = None
    events: int = 0
    error: Exception | None = None
    seen: list = field(default_factory=list)

    def describe(self):
        if self.error is None:
            return f"{self.units} units, {self.events} events"
        kind = type(self.error)
        fields = {
            name: value
            for name in ("code", "type", "status", "status_code", "api_message", "message")
            if isinstance(value := getattr(self.error, name, None), (str, int)) and not callable(value)
        }
        return f"{kind.__module__.split('.')[0]}.{kind.__name__} after {self.events} events: {fields or self.error}"


class Clients:
    """All libraries with one base URL and one user. They do not retry."""

    def __init__(self, url, user):
        self.url, self.user = url, user
        self.headers = {"x-user": user}
        options = {"api_key": "none", "max_retries": 0, "default_headers": self.headers, "timeout": 60}
        self.openai = openai.OpenAI(base_url=f"{url}/v1", **options)
        self.anthropic = anthropic.Anthropic(base_url=url, **options)
        options = types.HttpOptions(base_url=url, api_version="v1beta", headers=self.headers)
        self.genai = genai.Client(api_key="none", http_options=options)

    def chat(self, plan, stream=False, model="gpt-5", include_usage=True, **more):
        request = {"model": model, "messages": [{"role": "user", "content": plan}], **more}
        if not stream:
            return call(lambda: self.openai.chat.completions.create(**request).usage, lambda usage: usage.total_tokens)
        request |= {"stream": True, "stream_options": {"include_usage": include_usage}}
        return iterate(
            lambda: self.openai.chat.completions.create(**request),
            lambda chunk: chunk.usage and chunk.usage.total_tokens,
        )

    def responses(self, plan, stream=False, model="gpt-5", **more):
        request = {"model": model, "input": plan, **more}
        if not stream:
            return call(lambda: self.openai.responses.create(**request).usage, lambda usage: usage.total_tokens)

        def units(event):
            usage = event.response.usage if event.type == "response.completed" else None
            return usage and usage.total_tokens

        return iterate(lambda: self.openai.responses.create(stream=True, **request), units)

    def messages(self, plan, stream=False, model="claude", max_tokens=100):
        request = {"model": model, "max_tokens": max_tokens, "messages": [{"role": "user", "content": plan}]}
        if not stream:
            return call(lambda: self.anthropic.messages.create(**request).usage, anthropic_units)
        first = 0

        def units(event):
            nonlocal first
            if event.type == "message_start":
                first = anthropic_units(event.message.usage) - event.message.usage.output_tokens
            return first + event.usage.output_tokens if event.type == "message_delta" else None

        return iterate(lambda: self.anthropic.messages.create(stream=True, **request), units)

    def gemini(self, plan, stream=False, model="gemini"):
        def units(response):
            return response.usage_metadata and response.usage_metadata.total_token_count

        if not stream:
            return call(lambda: self.genai.models.generate_content(model=model, contents=plan), units)
        return iterate(lambda: self.genai.models.generate_content_stream(model=model, contents=plan), units)

    def gemini_array(self, plan, model="gemini"):
        """The stream as one JSON array, which the library does not use."""
        outcome = Outcome()
        try:
            with httpx.stream("POST", **self.genai_request(plan, model), headers=self.headers) as response:
                response.raise_for_status()
                for part in response.iter_raw():
                    outcome.events += part.count(b"totalTokenCount")
        except httpx.HTTPError as error:
            outcome.error = error
        return outcome

    def genai_request(self, plan, model="gemini"):
        body = {"contents": [{"role": "user", "parts": [{"text": plan}]}]}
        return {"url": f"{self.url}/v1beta/models/{model}:streamGenerateContent", "json": body}

    def tool(self, name, plan):
        """Starts an MCP session and calls a tool."""
        return asyncio.run(self.call_tool(name, plan))

    async def call_tool(self, name, plan):
        outcome = Outcome()

        async def count(_):
            outcome.events += 1

        async with httpx2.AsyncClient(headers=self.headers, timeout=60) as http:
            transport = streamable_http_client(f"{self.url}/mcp", http_client=http)
            # An error of the handshake arrives in a group.
            try:
                async with McpClient(transport, mode="legacy", logging_callback=count) as client:
                    try:
                        result = await client.call_tool(name, {"plan": plan})
                        outcome.units = result.structured_content["usage"]["total_tokens"]
                    except Exception as error:
                        outcome.error = error
            except BaseExceptionGroup as group:
                outcome.error = first_of(group)
            except Exception as error:
                outcome.error = error
        return outcome

    def post(self, path, body, content_type="application/json", **headers):
        """A request with exactly this body."""
        body = body if isinstance(body, bytes) else body.encode()
        return httpx.post(
            f"{self.url}{path}", content=body, headers={"content-type": content_type, **self.headers, **headers}
        )


def first_of(error):
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def anthropic_units(usage):
    cached = (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    return usage.input_tokens + cached + usage.output_tokens


def call(send, units):
    try:
        response = send()
        return Outcome(units=units(response) if response is not None else None)
    except Exception as error:
        return Outcome(error=error)


def iterate(send, units):
    outcome = Outcome()
    try:
        for event in send():
            outcome.events += 1
            found = units(event)
            if found is not None:
                outcome.units = found
                outcome.seen.append(found)
    except Exception as error:
        outcome.error = error
    return outcome
