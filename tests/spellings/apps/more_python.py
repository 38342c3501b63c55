"""More Python frameworks, each with its own server and process. Arguments: NAME PORT.

The handlers are those of python.py.
"""

import asyncio
import sys

from python import answer, read_credentials


def search(session, api_key, headers, host, authorization=None):
    authorization = authorization or read_credentials(headers.get("authorization"))
    values = {"x_user": headers.get("x-user"), "host": host}
    return {"session": session, "api_key": api_key, "authorization": authorization, **values}


async def serve_tornado(port):
    from tornado.web import Application, RequestHandler

    def handler(name, read=lambda it, *arguments: {}):
        class Handler(RequestHandler):
            def get(self, *arguments):
                self.write(answer(name, **read(self, *arguments)))

        return Handler

    def read_search(it):
        api_key = it.get_query_argument("api_key", None)
        return search(it.get_cookie("session"), api_key, it.request.headers, it.request.host_name)

    routes = [
        ("/login", handler("login")),
        ("/login/([^/]+)", handler("account", lambda it, user: {"user": user})),
        ("/admin/.*", handler("admin")),
        ("/public/.*", handler("public")),
        ("/healthz", handler("healthz")),
        ("/search", handler("search", read_search)),
    ]
    Application(routes, log_function=lambda it: None).listen(port, "127.0.0.1")
    await asyncio.Event().wait()


async def serve_sanic(port):
    from sanic import Sanic, json

    app = Sanic("app", configure_logging=False)

    def route(path, name, read=lambda request, **arguments: {}):
        async def endpoint(request, **arguments):
            return json({"handler": name, **read(request, **arguments)})

        app.add_route(endpoint, path, name=name)

    def read_search(it):
        # A token is given for any scheme.
        is_bearer = (it.headers.get("authorization") or "").lower().startswith("bearer")
        token = it.token if is_bearer else None
        return search(it.cookies.get("session"), it.args.get("api_key"), it.headers, it.server_name, token)

    route("/login", "login")
    route("/login/<user>", "account", lambda request, user: {"user": user})
    route("/admin/<rest:path>", "admin", lambda request, rest: {})
    route("/public/<rest:path>", "public", lambda request, rest: {})
    route("/healthz", "healthz")
    route("/search", "search", read_search)
    server = await app.create_server(host="127.0.0.1", port=port, return_asyncio_server=True, access_log=False)
    await server.startup()
    await server.serve_forever()


def serve_cherrypy(port):
    import cherrypy

    class App:
        @cherrypy.expose
        def login(self, *segments, **parameters):
            if len(segments) > 1:
                raise cherrypy.NotFound
            return answer("account", user=segments[0]) if segments else answer("login")

        @cherrypy.expose
        def admin(self, *segments, **parameters):
            if not segments:
                raise cherrypy.NotFound
            return answer("admin")

        @cherrypy.expose
        def public(self, *segments, **parameters):
            if not segments:
                raise cherrypy.NotFound
            return answer("public")

        @cherrypy.expose
        def healthz(self, **parameters):
            return answer("healthz")

        @cherrypy.expose
        def search(self, api_key=None, **parameters):
            request = cherrypy.request
            cookie = request.cookie.get("session")
            values = search(cookie and cookie.value, api_key, request.headers, request.headers.get("host"))
            return answer("search", **values)

    settings = {"server.socket_host": "127.0.0.1", "server.socket_port": port, "server.thread_pool": 4}
    cherrypy.config.update(settings | {"environment": "production", "log.screen": False})
    cherrypy.quickstart(App())


def serve_pyramid(port):
    import waitress
    from pyramid.config import Configurator

    def read_search(it):
        user = None
        if it.authorization and it.authorization[0].lower() == "bearer":
            user = it.authorization[1] if isinstance(it.authorization[1], str) else None
        return search(it.cookies.get("session"), it.GET.get("api_key"), it.headers, it.domain, user)

    def view_of(name, read):
        return lambda context, request: {"handler": name, **read(request)}

    with Configurator() as config:
        for name, path, read in (
            ("login", "/login", lambda it: {}),
            ("account", "/login/{user}", lambda it: {"user": it.matchdict["user"]}),
            ("admin", "/admin/*rest", lambda it: {}),
            ("public", "/public/*rest", lambda it: {}),
            ("healthz", "/healthz", lambda it: {}),
            ("search", "/search", read_search),
        ):
            config.add_route(name, path)
            config.add_view(view_of(name, read), route_name=name, renderer="json")
        app = config.make_wsgi_app()
    waitress.serve(app, host="127.0.0.1", port=port, threads=4, _quiet=True)


def serve_falcon(port):
    import falcon
    from cheroot.wsgi import Server

    class Handler:
        def __init__(self, name, read=lambda request, **arguments: {}):
            self.name, self.read = name, read

        def on_get(self, request, response, **arguments):
            response.text = answer(self.name, **self.read(request, **arguments))

    def read_search(it):
        headers = {"authorization": it.get_header("Authorization"), "x-user": it.get_header("X-User")}
        return search(it.cookies.get("session"), it.get_param("api_key"), headers, it.host)

    app = falcon.App()
    app.add_route("/login", Handler("login"))
    app.add_route("/login/{user}", Handler("account", lambda request, user: {"user": user}))
    app.add_route("/admin/{rest:path}", Handler("admin", lambda request, rest: {}))
    app.add_route("/public/{rest:path}", Handler("public", lambda request, rest: {}))
    app.add_route("/healthz", Handler("healthz"))
    app.add_route("/search", Handler("search", read_search))
    Server(("127.0.0.1", port), app, numthreads=4).start()


async def serve_quart(port):
    from hypercorn.asyncio import serve
    from hypercorn.config import Config
    from quart import Quart, request

    app = Quart("app")

    def route(path, name, read=lambda **arguments: {}):
        async def endpoint(**arguments):
            return {"handler": name, **read(**arguments)}

        app.add_url_rule(path, name, endpoint)

    def read_search():
        credentials = request.authorization
        is_known = credentials and credentials.type in ("basic", "bearer")
        user = (credentials.token or credentials.username) if is_known else None
        return search(request.cookies.get("session"), request.args.get("api_key"), request.headers, request.host, user)

    route("/login", "login")
    route("/login/<user>", "account", lambda user: {"user": user})
    route("/admin/<path:rest>", "admin", lambda rest: {})
    route("/public/<path:rest>", "public", lambda rest: {})
    route("/healthz", "healthz")
    route("/search", "search", read_search)
    config = Config()
    config.bind, config.errorlog = [f"127.0.0.1:{port}"], None
    await serve(app, config, shutdown_trigger=asyncio.Event().wait)


def serve_litestar(port):
    import uvicorn
    from litestar import Litestar, Request, get

    def route(path, name, read=lambda request: {}):
        @get(path, name=name, sync_to_thread=False)
        def endpoint(request: Request) -> dict:
            return {"handler": name, **read(request)}

        return endpoint

    def read_search(it):
        return search(it.cookies.get("session"), it.query_params.get("api_key"), it.headers, it.url.hostname)

    app = Litestar(
        [
            route("/login", "login"),
            route("/login/{user:str}", "account", lambda it: {"user": it.path_params["user"]}),
            route("/admin/{rest:path}", "admin"),
            route("/public/{rest:path}", "public"),
            route("/healthz", "healthz"),
            route("/search", "search", read_search),
        ],
        openapi_config=None,
    )
    uvicorn.run(app, host="127.0.0.1", port=port, http="h11", log_level="critical")


def serve_blacksheep(port):
    import uvicorn
    from blacksheep import Application, json
    from blacksheep import Request as BlackSheepRequest

    app = Application()

    def route(path, name, read=lambda request: {}):
        async def endpoint(request: BlackSheepRequest):
            return json({"handler": name, **read(request)})

        app.router.add_get(path, endpoint)

    def header(request, name):
        found = request.headers.get_first(name)
        return found.decode("latin-1") if found is not None else None

    def read_search(it):
        headers = {"authorization": header(it, b"authorization"), "x-user": header(it, b"x-user")}
        api_key = (it.query.get("api_key") or [None])[0]
        return search(it.cookies.get("session"), api_key, headers, it.host)

    route("/login", "login")
    route("/login/{user}", "account", lambda it: {"user": it.route_values["user"]})
    route("/admin/{path:rest}", "admin")
    route("/public/{path:rest}", "public")
    route("/healthz", "healthz")
    route("/search", "search", read_search)
    uvicorn.run(app, host="127.0.0.1", port=port, http="httptools", log_level="critical")


APPS = {
    "blacksheep": serve_blacksheep,
    "cherrypy": serve_cherrypy,
    "falcon": serve_falcon,
    "litestar": serve_litestar,
    "pyramid": serve_pyramid,
    "quart": serve_quart,
    "sanic": serve_sanic,
    "tornado": serve_tornado,
}

if __name__ == "__main__":
    started = APPS[sys.argv[1]](int(sys.argv[2]))
    if started is not None:
        asyncio.run(started)
