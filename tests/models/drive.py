"""Runs real client libraries against the model servers, directly and through tidegate.

    drive.py TIDEGATE [REDIS_SERVER]

Without REDIS_SERVER, counters are in memory. TIDEGATE "-" runs only the checks without tidegate. Prints a table; the
exit code is 1 if a check fails. CHECKS="load cut" selects checks by parts of their names. See README.md.
"""

import asyncio
import json
import math
import os
import re
import sys
import time
import traceback

import anthropic
import httpx
import load
import openai
import processes
from clients import Clients
from google.genai import errors as genai_errors
from mcp import MCPError
from servers import CUT_OFF_EVENT

USAGE = """actual = [
  { response_json = ["/usage/prompt_tokens", "/usage/input_tokens", "/message/usage/input_tokens",
    "/response/usage/input_tokens", "/usageMetadata/promptTokenCount",
    "/result/structuredContent/usage/total_tokens"] },
  { response_json = ["/usage/completion_tokens", "/usage/output_tokens", "/response/usage/output_tokens",
    "/usageMetadata/candidatesTokenCount"] },
]"""
ESTIMATE = 100
CODE = CUT_OFF_EVENT["error"]["code"]
CHECKS = []


def check(is_direct=False):
    def register(function):
        CHECKS.append((function.__name__, is_direct, function))
        return function

    return register


def equal(what, found, expected):
    assert found == expected, f"{what}: {found!r}, expected is {expected!r}"


def is_about(what, found, least, most):
    assert least <= found <= most, f"{what}: {found}, expected is {least} to {most}"


def policy(cost, limit=10**9, extra="", key='["header:x-user"]', name="tokens"):
    """A policy that counts the units of a user."""
    cost = f"\n[policy.cost]\n{cost}\n" if cost else ""
    return f"""
[[policy]]
name = "{name}"
key = {key}
limit = {{ requests = {limit}, per = "1h", algorithm = "sliding_window", unit = "tokens" }}
{extra}
{cost}"""


# Without tidegate.


def all_calls(clients):
    """Every way to ask, by name."""
    return {
        "openai chat": clients.chat,
        "openai responses": clients.responses,
        "anthropic": clients.messages,
        "gemini": clients.gemini,
    }


@check(is_direct=True)
def libraries_report_the_planned_usage(site):
    clients = Clients(site.servers, "direct")
    for name, send in all_calls(clients).items():
        for stream in (False, True):
            outcome = send("input=120 output=80 events=8", stream)
            assert outcome.error is None, f"{name}: {outcome.describe()}"
            equal(name, outcome.units, 200)
    equal(
        "cumulative",
        clients.chat("input=100 output=80 events=4 usage=cumulative", True).seen,
        [100, 120, 140, 160, 180, 180, 180],
    )
    equal("without usage", clients.chat("usage=none", True).units, None)
    equal("usage not wanted", clients.chat("", True, include_usage=False).units, None)
    for tool in ("search", "report"):
        equal(tool, clients.tool(tool, "input=120 output=80").units, 200)
    return "chat, responses, messages, generateContent; streamed or not; MCP"


@check(is_direct=True)
def libraries_raise_the_cut_off_event(site):
    """The event that tidegate sends is an error in each library, after the complete events before it."""
    return check_cut_off_errors(Clients(site.servers, "direct"), "input=10 output=100 events=10 cut=3 usage=cumulative")


def check_cut_off_errors(clients, plan):
    """Streams that are cut off raise a readable error of the library. Returns the outcomes."""
    outcomes = {name: send(plan, True) for name, send in all_calls(clients).items()}
    for name, outcome in outcomes.items():
        assert outcome.error is not None, f"{name}: the stream ended without an error, {outcome.describe()}"
        assert outcome.events > 0, f"{name}: no event before the error"
    for name in ("openai chat", "openai responses"):
        error = outcomes[name].error
        assert isinstance(error, openai.APIError), f"{name}: {outcomes[name].describe()}"
        equal(f"{name}: code", error.code, CODE)
        equal(f"{name}: type", error.type, "rate_limit_error")
        assert "limit" in error.message, error.message
    error = outcomes["anthropic"].error
    assert isinstance(error, anthropic.APIStatusError), outcomes["anthropic"].describe()
    equal("anthropic: type", error.type, "rate_limit_error")
    assert "limit" in error.api_message, error.api_message
    # The library reads every line "event: …" as JSON. No shape of the event suits it and the others.
    error = outcomes["gemini"].error
    assert isinstance(error, genai_errors.UnknownApiResponseError), outcomes["gemini"].describe()
    array = clients.gemini_array(plan)
    assert isinstance(array.error, httpx.RemoteProtocolError), f"gemini as an array: {array.describe()}"
    return "; ".join(
        f"{name}: {type(outcome.error).__name__} after {outcome.events}" for name, outcome in outcomes.items()
    )


@check(is_direct=True)
def libraries_take_a_stream_without_end_for_complete(site):
    """Why tidegate sends an event."""
    clients = Clients(site.servers, "direct")
    for name, send in all_calls(clients).items():
        outcome = send("events=10 cut=3 ending=none", True)
        assert outcome.error is None, f"{name}: {outcome.describe()}"
    return "no error in openai, anthropic and google-genai"


@check(is_direct=True)
def mcp_reports_a_stream_that_ends_early(site):
    outcome = Clients(site.servers, "direct").tool("report", "events=10 cut=3")
    assert isinstance(outcome.error, MCPError), outcome.describe()
    return outcome.describe()


# Charges.


def check_charges(site, proxy, cases):
    """Each case: name, call with the clients of a fresh user, units that must be charged."""
    for index, (name, send, expected) in enumerate(cases):
        user = f"user{index}"
        outcome = send(Clients(proxy.url, user))
        error = getattr(outcome, "error", None)
        assert error is None, f"{name}: {outcome.describe()}"
        equal(name, proxy.used_after(expected, "tokens", user), expected)
    return f"{len(cases)} cases"


@check()
def charged_is_what_was_reported(site):
    cases = []
    for name in all_calls(Clients(site.servers, "")):
        for stream in (False, True):
            for plan, expected in (
                ("input=120 output=80 events=8", 200),
                ("input=7 output=1 events=1", 8),
                ("input=70000 output=5000 events=50", 75000),
                ("input=120 output=80 usage=none", ESTIMATE),
            ):
                # Messages always have it.
                if name == "anthropic" and "none" in plan:
                    continue
                title = f"{name}{', streamed' * stream}: {plan}"
                cases.append((title, lambda c, n=name, p=plan, s=stream: all_calls(c)[n](p, s), expected))
    cases += [
        ("chat in every event", lambda c: c.chat("input=50 output=333 events=9 usage=cumulative", True), 383),
        ("messages in every event", lambda c: c.messages("input=50 output=333 events=9 usage=cumulative", True), 383),
        ("usage not wanted", lambda c: c.chat("input=50 output=333", True, include_usage=False), ESTIMATE),
        # Of a list of documents the last one counts.
        ("gemini as an array", lambda c: c.gemini_array("input=50 output=333"), 383),
    ]
    with site.proxy(policy(f"estimate = {ESTIMATE}\n{USAGE}")) as proxy:
        told = check_charges(site, proxy, cases)
        if site.redis_url:
            equal("keys show", proxy.shown("tokens", "user0"), 200)
        return told


@check()
def charged_total_tokens(site):
    """The form with one pointer."""
    cases = [
        ("chat", lambda c: c.chat("input=120 output=80"), 200),
        ("chat, streamed", lambda c: c.chat("input=120 output=80", True), 200),
        ("chat, without usage", lambda c: c.chat("usage=none", True), ESTIMATE),
    ]
    cost = f'estimate = {ESTIMATE}\nactual = "response_json:/usage/total_tokens"'
    with site.proxy(policy(cost)) as proxy:
        return check_charges(site, proxy, cases)


@check()
def weights_by_kind_of_token(site):
    cost = f"""estimate = {ESTIMATE}
actual = [
  {{ response_json = "/usage/prompt_tokens" }},
  {{ response_json = ["/usage/completion_tokens", "/usage/output_tokens"], weight = 4 }},
  {{ response_header = "x-cached", weight = -0.5 }},
]"""
    cases = [
        ("output", lambda c: c.chat("input=100 output=50"), 300),
        ("output, streamed", lambda c: c.chat("input=100 output=50", True), 300),
        ("cached, rounded up", lambda c: c.chat("input=100 output=50 cached=25", True), math.ceil(100 + 200 - 12.5)),
        ("never below 0", lambda c: c.chat("input=0 output=0 cached=30"), 0),
    ]
    with site.proxy(policy(cost)) as proxy:
        return check_charges(site, proxy, cases)


@check()
def weights_by_model(site):
    cost = f"""estimate = {ESTIMATE}
actual = "response_json:/usage/total_tokens"
weights = {{ by = "body:/model", "gpt-*" = 10, mini = 0.125, default = 2 }}"""
    twice = '{"model":"mini","model":"mini","messages":[{"content":"input=100 output=50"}]}'
    cases = [
        ("gpt-5", lambda c: c.chat("input=100 output=50"), 1500),
        ("gpt-5, streamed", lambda c: c.chat("input=100 output=50", True), 1500),
        ("mini, rounded up", lambda c: c.chat("input=100 output=50", model="mini"), 19),
        ("other", lambda c: c.chat("input=100 output=50", model="other"), 300),
        ("unreadable: the highest", lambda c: c.post("/v1/chat/completions", twice), 1500),
    ]
    with site.proxy(policy(cost)) as proxy:
        check_charges(site, proxy, cases)
    # Of one entry, times its weight.
    cost = f"""estimate = {ESTIMATE}
actual = [
  {{ response_json = "/usage/prompt_tokens" }},
  {{ response_json = "/usage/completion_tokens", weight = 4,
    weights = {{ by = "body:/model", gpt-5 = 2, default = 1 }} }},
]"""
    with site.proxy(policy(cost)) as proxy:
        check_charges(
            site,
            proxy,
            [
                ("entry, gpt-5", lambda c: c.chat("input=100 output=50"), 500),
                ("entry, other", lambda c: c.chat("input=100 output=50", model="other"), 300),
            ],
        )
    return f"{len(cases) + 2} cases"


@check()
def estimates_from_the_request(site):
    """The response reports no usage, so the estimate stands."""

    def send(size=None, **fields):
        text = json.dumps({"model": "m", "messages": [{"content": "usage=none"}]} | fields)
        if size:
            text = text[:-1] + " " * (size - len(text)) + "}"
        return lambda c: c.post("/v1/chat/completions", text)

    twice = '{"model":"m","max_tokens":1,"max_tokens":1,"messages":[{"content":"usage=none"}]}'
    other = '{"model":"m","Max_Tokens":1,"messages":[{"content":"usage=none"}]}'
    exponent = '{"model":"m","max_tokens":1e5,"messages":[{"content":"usage=none"}]}'
    unreadable = [
        ("twice", lambda c: c.post("/v1/chat/completions", twice)),
        ("another spelling", lambda c: c.post("/v1/chat/completions", other)),
        ("other type", lambda c: c.post("/v1/chat/completions", twice, "text/plain")),
    ]
    actual = 'actual = "response_json:/usage/total_tokens"'
    by_field = '{ request_json = "/max_tokens", default = 500, max = 8000, weight = 2 }'
    by_size = "{ request_bytes_per_unit = 4, max = 3000 }"
    groups = [
        (
            by_field,
            [
                ("given", send(max_tokens=300), 600),
                ("absent", send(), 1000),
                # Some apps read these as 100000.
                ("text", send(max_tokens="100000"), 16000),
                ("fraction", send(max_tokens=100000.0), 16000),
                ("exponent", lambda c: c.post("/v1/chat/completions", exponent), 16000),
                *((name, call, 16000) for name, call in unreadable),
            ],
        ),
        (by_size, [("bytes, rounded up", send(size=4001), 1001), ("bytes, most", send(size=50000), 3000)]),
        (f"[ {by_field}, {by_size} ]", [("added up", send(size=400, max_tokens=300), 700)]),
    ]
    for estimate, cases in groups:
        with site.proxy(policy(f"estimate = {estimate}\n{actual}")) as proxy:
            check_charges(site, proxy, cases)
    return f"{sum(len(cases) for _, cases in groups)} cases"


@check()
def a_client_that_leaves_pays_what_it_saw(site):
    with site.proxy(policy(f"estimate = 10\n{USAGE}")) as proxy:
        clients = Clients(proxy.url, "leaver")
        plan = "input=100 output=1000 events=100 gap_ms=20 usage=cumulative"
        request = {"model": "m", "messages": [{"role": "user", "content": plan}], "stream": True}
        stream = clients.openai.chat.completions.create(stream_options={"include_usage": True}, **request)
        seen = 0
        for chunk in stream:
            seen = chunk.usage.total_tokens
            if seen >= 300:
                break
        stream.close()
        time.sleep(0.5)
        used = proxy.used("tokens", "leaver")
        (entry,) = site.log_of("leaver")
        assert not entry["complete"], "the upstream's stream was read to its end"
        is_about("charged", used, seen, entry["reported"])
        told = f"saw {seen}, charged {used}, the server had reported {entry['reported']}"
        # The same of a list of documents.
        request = clients.genai_request(plan)
        with httpx.stream("POST", **request, headers={"x-user": "other"}) as response:
            parts = response.iter_raw()
            seen = "".join(next(parts).decode() for _ in range(10))
        seen = int(re.findall(r'"totalTokenCount": (\d+)', seen)[-1])
        time.sleep(0.5)
        assert proxy.used("tokens", "other") >= seen, f"of a list: saw {seen}, charged {proxy.used('tokens', 'other')}"
        return told


# Keys and conditions.


@check()
def keys_by_model(site):
    key = '["header:x-user", "body:/model"]'
    with site.proxy(policy("", limit=2, key=key, extra='missing_key = "reject"')) as proxy:
        clients = Clients(proxy.url, "ann")
        for model, expected in (("a", None), ("a", None), ("a", openai.RateLimitError), ("b", None)):
            error = clients.chat("", model=model).error
            equal(f"model {model}", error and type(error), expected)
        equal("used", proxy.used("tokens", "ann", "a"), 2)
        equal("used", proxy.used("tokens", "ann", "b"), 1)
        message = '"messages":[{"content":""}]'
        bodies = {
            "absent": f"{{{message}}}",
            "twice": f'{{"model":"c","model":"c",{message}}}',
            "another spelling": f'{{"Model":"c",{message}}}',
            "null": f'{{"model":null,{message}}}',
            "not UTF-8": b'{"model":"\xff",' + message.encode() + b"}",
            "a list": f'[{{"model":"c",{message}}}]',
            "trailing data": f'{{"model":"c",{message}}}x',
        }
        for name, body in bodies.items():
            equal(name, clients.post("/v1/chat/completions", body).status_code, 400)
        readable = f'{{"model":"c",{message}}}'
        equal("text/plain", clients.post("/v1/chat/completions", readable, "text/plain").status_code, 400)
        equal(
            "utf-16",
            clients.post("/v1/chat/completions", readable, "application/json; charset=utf-16").status_code,
            400,
        )
        equal("form", clients.post("/upload", "x=1&model=d", "application/x-www-form-urlencoded").status_code, 200)
        equal("used", proxy.used("tokens", "ann", "d"), 1)
        return f"{len(bodies) + 9} requests"


@check()
def conditions_on_an_mcp_call(site):
    extra = 'match = { path = "/mcp", body = { "/method" = "tools/call", "/params/name" = ["search", "other"] } }'
    with site.proxy(policy("", extra=extra)) as proxy:
        clients = Clients(proxy.url, "agent")
        for name, send, expected in (
            ("tools/call of search", lambda: clients.tool("search", ""), 1),
            ("tools/call of report", lambda: clients.tool("report", ""), 1),
            ("tools/list", lambda: clients.post("/mcp", '{"id":1,"method":"tools/list"}'), 1),
            ("no method", lambda: clients.post("/mcp", '{"params":{"name":"search"}}'), 1),
            ("method twice, another tool", lambda: clients.post("/mcp", '{"method":"a","method":"b","params":{}}'), 1),
            ("method twice", lambda: clients.post("/mcp", '{"method":"a","method":"b","params":{"name":"search"}}'), 2),
            ("a batch", lambda: clients.post("/mcp", '[{"method":"a"}]'), 3),
        ):
            send()
            equal(name, proxy.used("tokens", "agent"), expected)
    return "7 requests"


# Rejections.


@check()
def rejections_are_the_errors_of_the_libraries(site):
    mcp = 'match = { path = "/mcp", body = { "/method" = "tools/call" } }'
    kinds = {
        "openai chat": openai.RateLimitError,
        "openai responses": openai.RateLimitError,
        "anthropic": anthropic.RateLimitError,
        "gemini": genai_errors.ClientError,
    }
    told = []
    with site.proxy(policy("", limit=1)) as proxy:
        for name, kind in kinds.items():
            for stream in (False, True):
                send = all_calls(Clients(proxy.url, f"{name}{stream}"))[name]
                assert send("").error is None
                error = send("", stream).error
                equal(f"{name}: error", type(error), kind)
                equal(f"{name}: status", error.code if name == "gemini" else error.status_code, 429)
                assert int(error.response.headers["retry-after"]) > 0
    with site.proxy(policy("", limit=1, extra=mcp)) as proxy:
        clients = Clients(proxy.url, "agent")
        assert clients.tool("search", "").error is None
        outcome = clients.tool("search", "")
        assert isinstance(outcome.error, MCPError), outcome.describe()
        told.append(outcome.describe())
    # A JSON-RPC error as body is what the library shows.
    body = '{"jsonrpc":"2.0","id":null,"error":{"code":-32029,"message":"Rate limit exceeded"}}'
    reject = f"{mcp}\nreject = {{ status = 429, content_type = \"application/json\", body = '{body}' }}"
    with site.proxy(policy("", limit=1, extra=reject)) as proxy:
        clients = Clients(proxy.url, "agent")
        assert clients.tool("search", "").error is None
        outcome = clients.tool("search", "")
        assert isinstance(outcome.error, MCPError), outcome.describe()
        equal("code", outcome.error.code, -32029)
        told.append(outcome.describe())
    return "; ".join(told)


# Streams that are cut off.

SLICE = 50


def cut_off(limit, estimate=10, piece=SLICE, is_on=True, bytes_per_unit=400):
    """Beside "tokens", a policy "ledger" never rejects: the admin endpoint reports no usage above a limit.

    An event of these servers has some 300 bytes.
    """
    cost = f"estimate = {estimate}\n{USAGE}"
    ledger = policy(cost, extra='mode = "shadow"', name="ledger")
    if not is_on:
        return policy(cost, limit) + ledger
    cut = f"cut_off = true\nslice = {piece}\nresponse_bytes_per_unit = {bytes_per_unit}"
    return policy(f"{cost}\n{cut}", limit) + ledger


@check()
def cut_off_streams_raise_errors(site):
    limit = 300
    plan = "input=100 output=2000 events=200 gap_ms=3 usage=cumulative"
    told = []
    with site.proxy(cut_off(limit)) as proxy:
        for name in ("openai chat", "anthropic", "gemini"):
            user = f"cut {name}".replace(" ", "-")
            clients = Clients(proxy.url, user)
            outcome = all_calls(clients)[name](plan, True)
            kinds = {"openai chat": openai.APIError, "anthropic": anthropic.APIStatusError}
            kind = kinds.get(name, genai_errors.UnknownApiResponseError)
            assert isinstance(outcome.error, kind), f"{name}: {outcome.describe()}"
            if name != "gemini":
                equal(f"{name}: type", outcome.error.type, "rate_limit_error")
            # The steps of the server are ten units.
            is_about(f"{name}: delivered", outcome.units, limit - SLICE - 10, limit + SLICE)
            # What was reserved and not used is returned.
            left = limit - proxy.used_after(limit, "tokens", user)
            is_about(f"{name}: left of the limit", left, 0, SLICE)
            used = proxy.used("ledger", user)
            is_about(f"{name}: charged", used, outcome.units, limit + SLICE + 10)
            (entry,) = site.log_of(user)
            assert not entry["complete"], f"{name}: the upstream's stream was read to its end"
            error = all_calls(clients)[name]("", True).error
            assert error is not None or left >= 10, f"{name}: the next request passed"
            told.append(f"{name}: {outcome.units} delivered, {used} charged")
    return f"limit {limit}; " + "; ".join(told)


@check()
def cut_off_is_at_an_event_boundary(site):
    plan = "input=100 output=2000 events=200 gap_ms=3 usage=cumulative"
    body = {"model": "m", "messages": [{"content": plan}], "stream": True, "stream_options": {"include_usage": True}}
    with site.proxy(cut_off(300)) as proxy:
        response = Clients(proxy.url, "ann").post("/v1/chat/completions", json.dumps(body))
    events = response.text.split("\n\n")
    equal("after the last event", events.pop(), "")
    kind, data = events.pop().split("\n")
    equal("last event", kind, "event: error")
    error = json.loads(data.removeprefix("data: "))
    equal("type", error["type"], "error")
    equal("names", sorted(error["error"]), ["code", "message", "type"])
    equal("code", error["error"]["code"], CODE)
    for event in events:
        json.loads(event.removeprefix("data: "))
    return f"{len(events)} complete events, then: {data}"


@check()
def cut_off_of_other_bodies_closes_the_connection(site):
    """A list of documents has no event boundaries."""
    plan = "input=100 output=2000 events=200 gap_ms=3"
    with site.proxy(cut_off(300)) as proxy:
        outcome = Clients(proxy.url, "array").gemini_array(plan)
        assert isinstance(outcome.error, httpx.RemoteProtocolError), outcome.describe()
        return f"{outcome.describe()}; charged {proxy.used('ledger', 'array')}"


@check()
def cut_off_without_usage_before_the_end(site):
    """Bytes count as units until the last event reports the usage, which corrects them."""
    told = []
    for bytes_per_unit, output, gets_all in ((400, 200, True), (400, 2000, False), (4, 200, False)):
        user = f"late-{bytes_per_unit}-{output}"
        with site.proxy(cut_off(300, bytes_per_unit=bytes_per_unit)) as proxy:
            outcome = Clients(proxy.url, user).chat(f"input=10 output={output} events={output} gap_ms=1", True)
            told.append(f"{bytes_per_unit} bytes per unit, {output + 10} units: {outcome.events} events")
            equal(f"{told[-1]}: complete", outcome.error is None, gets_all)
            if gets_all:
                equal("charged", proxy.used_after(output + 10, "tokens", user), output + 10)
            else:
                is_about("left of the limit", 300 - proxy.used("tokens", user), 0, SLICE)
    return "limit 300; " + "; ".join(told)


# Load.


def run_streams(site, is_on):
    plans, total = load.draw_plans(seed=1)
    limit = total * 6 // 10
    with site.proxies(cut_off(limit, piece=200, is_on=is_on), 2 if site.redis_url else 1) as proxies:
        started = time.monotonic()
        results = asyncio.run(load.read_streams([proxy.url for proxy in proxies], "crowd", plans))
        took = time.monotonic() - started
        time.sleep(1)
        used, of_limit = (proxies[0].used(name, "crowd") for name in ("ledger", "tokens"))
    equal("broken events", sum(result.broken for result in results), 0)
    over, most = load.overspend(results, limit)
    delivered = sum(result.units for result in results)
    cut = sum(result.is_cut for result in results)
    rejected = sum(result.status == 429 for result in results)
    text = (
        f"{load.STREAMS} streams, {len(proxies)} proxies, {took:.1f} s: limit {limit}, wanted {total}, delivered "
        f"{delivered}, charged {used}; {cut} cut off, {rejected} rejected; overspend {over}, of one stream {most}"
    )
    assert used >= delivered, f"charged less than delivered: {text}"
    # What streams reserved and did not use is returned.
    is_about("used of the limit", of_limit, limit - (load.STREAMS * 200 if is_on else 0), limit)
    return over, most, cut, text


@check()
def load_without_cut_off(site):
    *_, text = run_streams(site, is_on=False)
    return text


@check()
def load_with_cut_off(site):
    over, most, cut, text = run_streams(site, is_on=True)
    assert over <= load.STREAMS * 200, f"in total: {text}"
    assert most <= 200, f"of one stream: {text}"
    assert cut > 0, text
    return text


@check()
def load_of_a_slow_upload(site):
    """The upstream gets the first byte before the client has sent the last one."""
    told = []
    body_key = '["header:x-user", "body:/model"]'
    for name, key, upload in (
        ("no body in the key", '["header:x-user"]', load.Upload()),
        ("body in the key", body_key, load.Upload()),
        ("chunked", body_key, load.Upload(is_chunked=True)),
        ("other type", body_key, load.Upload(is_chunked=True, content_type="application/octet-stream")),
        ("form", body_key, load.Upload(is_chunked=True, content_type="application/x-www-form-urlencoded")),
    ):
        user = name.replace(" ", "-")
        with site.proxy(policy("", key=key)) as proxy:
            started, last, status = asyncio.run(load.upload_slowly(proxy.port, user, 0.05, upload))
        equal(f"{name}: status", status, 200)
        (entry,) = site.log_of(user)
        equal(f"{name}: bytes", entry["bytes"], upload.size)
        late = entry["first_byte"] - last
        assert late < 0, f"{name}: the first byte came {late:.2f} s after the last"
        told.append(f"{name} {entry['first_byte'] - started:.2f} of {last - started:.2f} s")
    return "first byte after: " + ", ".join(told)


@check()
def load_of_slow_uploads(site):
    """Memory of requests in flight: a policy with the body in its key adds at most `max_scan` and 32 KiB to each."""
    with_body = '["header:x-user", "body:/model"]'
    told, most = [], {}
    for name, key, upload in (
        ("without", '["header:x-user"]', load.Upload(is_chunked=True)),
        ("long", with_body, load.Upload()),
        ("chunked", with_body, load.Upload(is_chunked=True)),
        ("short", with_body, load.Upload(size=64 << 10)),
    ):
        places = [place << 10 for place in (60, 100) if place << 10 < upload.size]
        with site.proxy(policy("", key=key)) as proxy:
            for _ in range(50):
                Clients(proxy.url, "warm").post("/upload", load.json_body(60 << 10))
            before = proxy.memory_kib()
            upload_all = load.hold_uploads(proxy.port, name, upload, places, proxy.memory_kib)
            measured, statuses = asyncio.run(upload_all)
        equal(f"{name}: statuses", set(statuses), {200})
        equal(f"{name}: bytes at the server", {entry["bytes"] for entry in site.log_of(name)}, {upload.size})
        each = [(memory - before) / load.UPLOADS for memory in measured]
        shown = ", ".join(f"{size:.0f} at {place >> 10} KiB" for size, place in zip(each, places, strict=True))
        told.append(f"{name}: {shown}")
        most[name] = max(each)
    text = f"KiB for each of {load.UPLOADS} uploads: " + "; ".join(told)
    for name, size in most.items():
        assert size - most["without"] <= 64 + 32, f"{name}: {text}"
    return text


def main():
    program, *redis = sys.argv[1:3]
    servers = processes.start_servers()
    redis_url = processes.start_redis(redis[0]) if redis else None
    site = processes.Site(servers, program, redis_url)
    wanted = os.environ.get("CHECKS", "").split()
    rows, failed = [], 0
    for name, is_direct, function in CHECKS:
        if (program == "-" and not is_direct) or (wanted and not any(part in name for part in wanted)):
            continue
        started = time.monotonic()
        try:
            result, text = "ok", function(site)
        except Exception as error:
            result, text = "FAILED", str(error).splitlines()[0] if str(error) else repr(error)
            if not isinstance(error, AssertionError):
                traceback.print_exc()
            failed += 1
        rows.append((name.replace("_", " "), result, text))
        print(f"{result:7} {time.monotonic() - started:5.1f} s  {rows[-1][0]}: {text}", flush=True)
    print("\n| check | result | |\n|---|---|---|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(f"\n{len(rows) - failed} passed, {failed} failed")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
