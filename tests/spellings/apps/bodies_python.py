"""How Python's parsers and frameworks read a body. Arguments: NAME=PORT for each.

Each answers with the fields that it read, or 400 if it rejects the body or does not parse this type.
"""

import asyncio
import decimal
import json
import math
import sys
import threading

import django
import flask
import json5
import msgspec
import orjson
import pydantic
import rapidjson
import simplejson
import tornado.escape
import tornado.httpserver
import tornado.web
import ujson
import uvicorn
from aiohttp import web
from django.conf import settings
from django.core.handlers.asgi import ASGIHandler
from django.http import JsonResponse
from django.urls import path
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from werkzeug.serving import make_server

NAMES = ("model", "method", "max_tokens")


def shown(value):
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return {"b": value.hex()}
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value
    if isinstance(value, (int, float, decimal.Decimal)):
        if isinstance(value, int) and value.bit_length() > 2000:
            return {"n": "very long"}
        if isinstance(value, float) and not math.isfinite(value):
            return {"n": {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}[str(value)]}
        return {"n": str(int(value)) if value == int(value) else str(value)}
    return {"t": "list" if isinstance(value, list) else "object"}


def fields(document):
    """The fields of a document. A list or a string has none."""
    found = {}
    if isinstance(document, dict):
        found = {name: shown(document[name]) for name in NAMES if name in document}
        if isinstance(document.get("params"), dict) and "name" in document["params"]:
            found["name"] = shown(document["params"]["name"])
    return found


def form_fields(form):
    """The last value of each field. `form` returns all values of a name."""
    return {name: shown(values[-1]) for name in NAMES if (values := form(name))}


def is_form(content_type):
    return "form-urlencoded" in content_type.lower() or "form-data" in content_type.lower()


class Params(pydantic.BaseModel):
    name: str | None = None


class Call(pydantic.BaseModel):
    model_config = {"protected_namespaces": ()}
    model: str | None = None
    method: str | None = None
    max_tokens: int | None = None
    params: Params | None = None


class ParamsStruct(msgspec.Struct):
    name: str | msgspec.UnsetType = msgspec.UNSET


class CallStruct(msgspec.Struct):
    model: str | None | msgspec.UnsetType = msgspec.UNSET
    method: str | None | msgspec.UnsetType = msgspec.UNSET
    max_tokens: int | None | msgspec.UnsetType = msgspec.UNSET
    params: ParamsStruct | None | msgspec.UnsetType = msgspec.UNSET


PARSERS = {
    "json": json.loads,
    "json-text": lambda body: json.loads(body.decode()),
    "orjson": orjson.loads,
    "ujson": ujson.loads,
    "simplejson": simplejson.loads,
    "rapidjson": rapidjson.loads,
    "json5": lambda body: json5.loads(body.decode()),
    "msgspec": msgspec.json.decode,
    "msgspec-typed": lambda body: msgspec.to_builtins(msgspec.json.decode(body, type=CallStruct)),
    "pydantic": lambda body: Call.model_validate_json(body).model_dump(exclude_unset=True),
    "pydantic-from-json": lambda body: json.loads(
        json.dumps(pydantic.TypeAdapter(pydantic.JsonValue).validate_json(body))
    ),
}


def aiohttp_app(parse, **options):
    async def handle(request):
        try:
            return web.json_response(await parse(request))
        except Exception as error:
            return web.json_response({"error": str(error)[:200]}, status=400)

    async def run(port):
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/", handle)
        runner = web.AppRunner(app, access_log=None, **options)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()

    return lambda port: asyncio.run(run(port))


def parser_app(parse):
    async def read(request):
        return fields(parse(await request.read()))

    return aiohttp_app(read, auto_decompress=False)


async def aiohttp_json(request):
    return fields(await request.json())


async def aiohttp_form(request):
    assert is_form(request.headers.get("content-type", ""))
    form = await request.post()
    return form_fields(lambda name: form.getall(name, []))


def uvicorn_app(app):
    def run(port):
        config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="critical")
        asyncio.run(uvicorn.Server(config).serve())

    return run


FASTAPI = FastAPI()


@FASTAPI.post("/")
async def fastapi_model(call: Call):
    return fields(call.model_dump(exclude_unset=True))


@FASTAPI.exception_handler(Exception)
async def fastapi_error(*_):
    return JSONResponse({}, 400)


def starlette_app(parse):
    async def handle(request):
        try:
            return JSONResponse(await parse(request))
        except Exception as error:
            return JSONResponse({"error": str(error)[:200]}, 400)

    return uvicorn_app(Starlette(routes=[Route("/", handle, methods=["POST"])]))


async def starlette_json(request):
    return fields(await request.json())


async def starlette_form(request):
    assert is_form(request.headers.get("content-type", ""))
    form = await request.form()
    return form_fields(form.getlist)


def flask_app(parse):
    app = flask.Flask("bodies")

    @app.post("/")
    def handle():
        try:
            return json.dumps(parse(flask.request))
        except Exception as error:
            return str(error)[:200], 400

    return lambda port: make_server("127.0.0.1", port, app, threaded=True).serve_forever()


def flask_form(request):
    assert is_form(request.content_type or "")
    return form_fields(request.form.getlist)


class TornadoForm(tornado.web.RequestHandler):
    def post(self):
        try:
            # It ignores other spellings of the type.
            assert self.request.headers.get("content-type", "").startswith(
                ("application/x-www-form-urlencoded", "multipart/form-data")
            )
            self.write(form_fields(self.get_body_arguments))
        except Exception as error:
            self.set_status(400)
            self.write(str(error)[:200])


class TornadoJson(tornado.web.RequestHandler):
    def post(self):
        try:
            self.write(fields(tornado.escape.json_decode(self.request.body)))
        except Exception as error:
            self.set_status(400)
            self.write(str(error)[:200])


def tornado_app(handler):
    async def run(port):
        app = tornado.web.Application([("/", handler)], log_function=lambda _: None)
        app.listen(port, "127.0.0.1")
        await asyncio.Event().wait()

    return lambda port: asyncio.run(run(port))


def django_form(request):
    try:
        assert is_form(request.META.get("CONTENT_TYPE", ""))
        return JsonResponse(form_fields(request.POST.getlist))
    except Exception as error:
        return JsonResponse({"error": str(error)[:200]}, status=400)


def django_app(port):
    settings.configure(
        DEBUG=False, ALLOWED_HOSTS=["*"], ROOT_URLCONF="__main__", SECRET_KEY="x", DATA_UPLOAD_MAX_MEMORY_SIZE=1 << 24
    )
    django.setup()
    uvicorn_app(ASGIHandler())(port)


urlpatterns = [path("", django_form)]

APPS = {name: parser_app(parse) for name, parse in PARSERS.items()} | {
    "aiohttp": aiohttp_app(aiohttp_json),
    "aiohttp-form": aiohttp_app(aiohttp_form),
    "fastapi": uvicorn_app(FASTAPI),
    "starlette": starlette_app(starlette_json),
    "starlette-form": starlette_app(starlette_form),
    "flask": flask_app(lambda request: fields(request.get_json())),
    "flask-force": flask_app(lambda request: fields(request.get_json(force=True))),
    "flask-form": flask_app(flask_form),
    "tornado": tornado_app(TornadoJson),
    "tornado-form": tornado_app(TornadoForm),
    "django-form": django_app,
}

if __name__ == "__main__":
    threads = []
    for argument in sys.argv[1:]:
        name, port = argument.split("=")
        threads.append(threading.Thread(target=APPS[name], args=(int(port),), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
