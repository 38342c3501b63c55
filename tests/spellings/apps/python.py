"""The Python frameworks. Arguments: NAME=PORT for each. gunicorn imports FLASK and DJANGO from here.

Every app has the same handlers: login, account (/login/{user}), admin, public, healthz and search. Each answers with
its name and the values that it read.
"""

import base64
import json
import sys
import threading

import bottle
import django
import flask
from aiohttp import BasicAuth, web
from django.conf import settings
from django.http import HttpResponse
from django.urls import path
from fastapi import Cookie, Depends, FastAPI, Header, HTTPException, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBasic, HTTPBearer
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route


def decode_user(credentials):
    """The user of Basic credentials, as most handlers read it."""
    try:
        return base64.b64decode(credentials).decode().partition(":")[0]
    except ValueError:
        return None


def read_credentials(header):
    """The token or user of Authorization, as Django REST framework and Starlette's example read it."""
    words = (header or "").split()
    if len(words) == 2 and words[0].lower() in ("basic", "bearer"):
        return decode_user(words[1]) if words[0].lower() == "basic" else words[1]
    return None


def answer(handler, **values):
    return json.dumps({"handler": handler, **values})


def starlette():
    def route(url, handler, read=lambda request: {}):
        async def endpoint(request):
            return JSONResponse({"handler": handler, **read(request)})

        return Route(url, endpoint)

    def search(request):
        session, api_key = request.cookies.get("session"), request.query_params.get("api_key")
        authorization = read_credentials(request.headers.get("authorization"))
        values = {"x_user": request.headers.get("x-user"), "host": request.url.hostname}
        return {"session": session, "api_key": api_key, "authorization": authorization, **values}

    return Starlette(
        routes=[
            route("/login", "login"),
            route("/login/{user}", "account", lambda request: {"user": request.path_params["user"]}),
            route("/admin/{rest:path}", "admin"),
            route("/public/{rest:path}", "public"),
            route("/healthz", "healthz"),
            route("/search", "search", search),
        ]
    )


def fastapi():
    app = FastAPI()

    @app.get("/login")
    async def login():
        return {"handler": "login"}

    @app.get("/login/{user}")
    async def account(user: str):
        return {"handler": "account", "user": user}

    @app.get("/admin/{rest:path}")
    async def admin(rest: str):
        return {"handler": "admin"}

    @app.get("/public/{rest:path}")
    async def public(rest: str):
        return {"handler": "public"}

    @app.get("/healthz")
    async def healthz():
        return {"handler": "healthz"}

    @app.get("/search")
    async def search(
        request: Request,
        api_key: str | None = None,
        session: str | None = Cookie(default=None),
        x_user: str | None = Header(default=None),
        bearer: HTTPAuthorizationCredentials | None = Depends(HTTPBearer(auto_error=False)),
    ):
        authorization = bearer and bearer.credentials
        if not bearer:
            try:
                basic = await HTTPBasic(auto_error=False)(request)
            except HTTPException:
                basic = None
            authorization = basic and basic.username
        values = {"session": session, "api_key": api_key, "x_user": x_user, "host": request.url.hostname}
        return {"handler": "search", "authorization": authorization, **values}

    return app


def flask_app():
    app = flask.Flask("app")
    app.add_url_rule("/login", "login", lambda: answer("login"))
    app.add_url_rule("/login/<user>", "account", lambda user: answer("account", user=user))
    app.add_url_rule("/admin/<path:rest>", "admin", lambda rest: answer("admin"))
    app.add_url_rule("/public/<path:rest>", "public", lambda rest: answer("public"))
    app.add_url_rule("/healthz", "healthz", lambda: answer("healthz"))

    @app.get("/search")
    def search():
        request = flask.request
        credentials = request.authorization
        is_known = credentials and credentials.type in ("basic", "bearer")
        authorization = (credentials.token or credentials.username) if is_known else None
        values = {"session": request.cookies.get("session"), "api_key": request.args.get("api_key")}
        values |= {"x_user": request.headers.get("X-User"), "host": request.host}
        return answer("search", authorization=authorization, **values)

    return app


def search_in_django(request):
    session, api_key = request.COOKIES.get("session"), request.GET.get("api_key")
    authorization = read_credentials(request.headers.get("authorization"))
    values = {"x_user": request.headers.get("X-User"), "host": request.get_host()}
    return HttpResponse(answer("search", session=session, api_key=api_key, authorization=authorization, **values))


def django_app():
    settings.configure(
        ALLOWED_HOSTS=["*"],
        DATABASES={},
        DEBUG=False,
        LOGGING_CONFIG=None,
        MIDDLEWARE=["django.middleware.common.CommonMiddleware"],
        ROOT_URLCONF=__name__,
        SECRET_KEY="x",
    )
    django.setup()
    from django.core.wsgi import get_wsgi_application

    return get_wsgi_application()


urlpatterns = [
    path("login", lambda request: HttpResponse(answer("login"))),
    path("login/<str:user>", lambda request, user: HttpResponse(answer("account", user=user))),
    path("admin/<path:rest>", lambda request, rest: HttpResponse(answer("admin"))),
    path("public/<path:rest>", lambda request, rest: HttpResponse(answer("public"))),
    path("healthz", lambda request: HttpResponse(answer("healthz"))),
    path("search", search_in_django),
]


def bottle_app():
    app = bottle.Bottle()
    app.route("/login", callback=lambda: answer("login"))
    app.route("/login/<user>", callback=lambda user: answer("account", user=user))
    app.route("/admin/<rest:path>", callback=lambda rest: answer("admin"))
    app.route("/public/<rest:path>", callback=lambda rest: answer("public"))
    app.route("/healthz", callback=lambda: answer("healthz"))

    @app.route("/search")
    def search():
        request = bottle.request
        user = request.auth and request.auth[0]
        values = {"session": request.get_cookie("session"), "api_key": request.query.get("api_key")}
        values |= {"x_user": request.get_header("X-User"), "host": request.urlparts.hostname}
        return answer("search", authorization=user, **values)

    return app


def aiohttp_app():
    def route(url, handler, read=lambda request: {}):
        async def endpoint(request):
            return web.json_response({"handler": handler, **read(request)})

        return web.get(url, endpoint)

    def search(request):
        try:
            user = BasicAuth.decode(request.headers.get("authorization", "")).login
        except ValueError:
            user = None
        session, api_key = request.cookies.get("session"), request.query.get("api_key")
        values = {"x_user": request.headers.get("X-User"), "host": request.url.host}
        return {"session": session, "api_key": api_key, "authorization": user, **values}

    app = web.Application()
    app.add_routes(
        [
            route("/login", "login"),
            route("/login/{user}", "account", lambda request: {"user": request.match_info["user"]}),
            route("/admin/{rest:.*}", "admin"),
            route("/public/{rest:.*}", "public"),
            route("/healthz", "healthz"),
            route("/search", "search", search),
        ]
    )
    return app


def serve_asgi(app, http):
    import uvicorn

    return lambda port: uvicorn.run(app, host="127.0.0.1", port=port, http=http, log_level="critical")


def serve_werkzeug(port):
    import logging

    from werkzeug.serving import run_simple

    logging.getLogger("werkzeug").disabled = True
    run_simple("127.0.0.1", port, FLASK, threaded=True)


def serve_waitress(port):
    import waitress

    waitress.serve(DJANGO, host="127.0.0.1", port=port, threads=4, _quiet=True)


def serve_wsgiref(port):
    bottle.run(bottle_app(), host="127.0.0.1", port=port, quiet=True)


def serve_aiohttp(port):
    web.run_app(aiohttp_app(), host="127.0.0.1", port=port, handle_signals=False, print=None, access_log=None)


FLASK = flask_app()
DJANGO = django_app()
APPS = {
    "aiohttp": serve_aiohttp,
    "bottle": serve_wsgiref,
    "django-waitress": serve_waitress,
    "fastapi": serve_asgi(fastapi(), "h11"),
    "flask-werkzeug": serve_werkzeug,
    "starlette": serve_asgi(starlette(), "httptools"),
}

if __name__ == "__main__":
    for argument in sys.argv[1:]:
        name, port = argument.split("=")
        threading.Thread(target=APPS[name], args=[int(port)]).start()
