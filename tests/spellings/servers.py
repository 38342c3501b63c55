"""The apps and the proxies as processes on loopback."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent))
from loopback import DIR, children, free_port, stop  # noqa: E402

APPS = HERE / "apps"
START_S = 60
TOMCAT = [Path(f"/usr/share/java/tomcat10-{name}.jar") for name in ("embed-core", "annotations-api")]


def start(name, ports, *command, **options):
    """Starts a program and waits until it accepts connections on all ports."""
    log = open(DIR / f"{name}.log", "wb")
    child = subprocess.Popen(
        [str(part) for part in command], stdout=log, stderr=log, stdin=subprocess.DEVNULL, **options
    )
    children.append(child)
    deadline = time.monotonic() + START_S
    for port in ports:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=5).close()
                break
            except OSError:
                if child.poll() is not None or time.monotonic() > deadline:
                    text = (DIR / f"{name}.log").read_text(errors="replace")
                    raise SystemExit(f"{name} does not listen:\n{text[-4000:]}") from None
                time.sleep(0.05)
    return child


def output(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def version(pattern, *command):
    return re.search(pattern, output(*command)).group(1)


def node_version(package):
    return json.loads((HERE / "node_modules" / package / "package.json").read_text())["version"]


def start_node():
    packages = {
        "express4": ("Express", "express4"),
        "express5": ("Express", "express5"),
        "fastify": ("Fastify", "fastify"),
        "h3": ("h3", "h3"),
        "h3-v1": ("h3", "h3v1"),
        "hapi": ("hapi", "@hapi/hapi"),
        "hono": ("Hono", "hono"),
        "koa": ("Koa", "koa"),
        "polka": ("Polka", "polka"),
        "restify": ("Restify", "restify"),
    }
    apps = {name: (free_port(), f"{title} {node_version(package)}") for name, (title, package) in packages.items()}
    apps["node"] = (free_port(), f"Node {version(r'v([0-9.]+)', 'node', '--version')}, new URL")
    # These two change classes of Node.
    alone = ("hono", "restify")
    for names in ([name for name in apps if name not in alone], *([name] for name in alone)):
        arguments = [f"{name}={apps[name][0]}" for name in names]
        start(f"node-{names[0]}", [apps[name][0] for name in names], "node", APPS / "node.mjs", *arguments)
    return apps


def start_python(python):
    found = dict(line.split("==") for line in output(python, "-m", "pip", "freeze").split() if "==" in line)
    found = {name.lower(): number for name, number in found.items()}
    titles = {
        "aiohttp": ("aiohttp", None),
        "bottle": ("Bottle", None),
        "django-waitress": ("Django", "waitress"),
        "fastapi": ("FastAPI", "uvicorn"),
        "flask-werkzeug": ("Flask", "werkzeug"),
        "starlette": ("Starlette", "uvicorn"),
    }

    def title(framework, server):
        text = f"{framework} {found[framework.lower()]}"
        return f"{text}, {server} {found[server]}" if server else text

    apps = {name: (free_port(), title(*parts)) for name, parts in titles.items()}
    ports = [f"{name}={port}" for name, (port, _) in apps.items()]
    start("python", [port for port, _ in apps.values()], python, APPS / "python.py", *ports)
    gunicorn = ["-m", "gunicorn", "--chdir", APPS, "--workers", "1", "--threads", "4", "--log-level", "critical"]
    for name, framework, app in (("django", "Django", "DJANGO"), ("flask", "Flask", "FLASK")):
        port = free_port()
        command = [python, *gunicorn, "--no-control-socket", "--bind", f"127.0.0.1:{port}", f"python:{app}"]
        start(name, [port], *command)
        apps[name] = (port, title(framework, "gunicorn"))
    for name, framework, server in (
        ("blacksheep", "BlackSheep", "uvicorn"),
        ("cherrypy", "CherryPy", None),
        ("falcon", "Falcon", "cheroot"),
        ("litestar", "Litestar", "uvicorn"),
        ("pyramid", "Pyramid", "waitress"),
        ("quart", "Quart", "hypercorn"),
        ("sanic", "Sanic", None),
        ("tornado", "Tornado", None),
    ):
        port = free_port()
        start(name, [port], python, APPS / "more_python.py", name, port)
        apps[name] = (port, title(framework, server))
    return apps


def start_go():
    port = free_port()
    subprocess.run(["go", "build", "-o", DIR / "go-app", APPS / "main.go"], check=True)
    start("go", [port], DIR / "go-app", port)
    return {"go": (port, f"Go {version(r'go([0-9.]+)', 'go', 'version')} net/http")}


def start_java(name, source, jars, title):
    port = free_port()
    path = ":".join(str(jar) for jar in [DIR, *jars])
    output("javac", "-nowarn", "-Xlint:none", "-cp", path, "-d", DIR, APPS / f"{source}.java")
    # Without delays of 40 ms per response.
    start(name, [port], "java", "-Dsun.net.httpserver.nodelay=true", "-cp", path, source, port)
    return {name: (port, title)}


def start_jdk():
    return start_java("jdk", "Jdk", [], f"JDK {version(r'([0-9.]+)', 'javac', '-version')} HttpServer")


def start_tomcat():
    number = version(r"Apache Tomcat/([0-9.]+)", "java", "-cp", TOMCAT[0], "org.apache.catalina.util.ServerInfo")
    return start_java("tomcat", "Servlets", TOMCAT, f"Tomcat {number}")


def start_php():
    port = free_port()
    start("php", [port], "php", "-S", f"127.0.0.1:{port}", APPS / "router.php")
    return {"php": (port, f"PHP {version(r'PHP ([0-9.]+)', 'php', '--version')}, parse_url")}


def start_sinatra():
    port = free_port()
    command = ["puma", "-q", "-t", "16:16", "-b", f"tcp://127.0.0.1:{port}", APPS / "sinatra.ru"]
    start("sinatra", [port], *command, env=os.environ | {"RACK_ENV": "production"})
    script = "require 'sinatra/version'; require 'puma/const'; puts Sinatra::VERSION, Puma::Const::VERSION"
    sinatra, puma = output("ruby", "-e", script).split()
    return {"sinatra": (port, f"Sinatra {sinatra}, puma {puma}")}


def start_rack():
    port = free_port()
    command = ["rackup", "-q", "-s", "webrick", "-E", "production", "-o", "127.0.0.1", "-p", port, APPS / "rack.ru"]
    start("rack", [port], *command)
    script = "require 'rack'; require 'webrick'; puts Rack.release, WEBrick::VERSION"
    rack, webrick = output("ruby", "-e", script).split()
    return {"rack": (port, f"Rack {rack}, WEBrick {webrick}")}


def perl_version(module):
    return output("perl", "-e", f"use {module}; print {module}->VERSION").strip()


def start_mojolicious():
    port = free_port()
    start("mojolicious", [port], "perl", APPS / "mojolicious.pl", "daemon", "-l", f"http://127.0.0.1:{port}")
    return {"mojolicious": (port, f"Mojolicious {perl_version('Mojolicious')}")}


def start_dancer():
    port = free_port()
    # A worker serves one connection at a time.
    command = ["starman", "--workers", "20", "--listen", f"127.0.0.1:{port}", APPS / "dancer.psgi"]
    start("dancer", [port], *command)
    return {"dancer": (port, f"Dancer2 {perl_version('Dancer2')}, Starman {perl_version('Starman')}")}


def start_nginx(name, servers, ports):
    paths = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    file = DIR / f"{name}.conf"
    file.write_text(f"""
      daemon off;
      master_process off;
      error_log {DIR}/{name}-errors.log crit;
      pid {DIR}/{name}.pid;
      events {{ worker_connections 4096; }}
      http {{
        access_log off;
        large_client_header_buffers 4 32k;
        {" ".join(f"{path}_temp_path {DIR}/{name}-{path};" for path in paths)}
        {servers}
      }}
    """)
    return start(name, ports, "nginx", "-p", DIR, "-e", DIR / f"{name}-errors.log", "-c", file)


def nginx_version():
    return version(r"nginx/([0-9.]+)", "nginx", "-v")


def start_nginx_app():
    """nginx as an app: each handler is a location."""
    port = free_port()

    def handler(location, name, rest=""):
        body = f'{{"handler": "{name}"{rest}}}'
        return f"location {location} {{ default_type application/json; return 200 '{body}'; }}\n"

    values = [f'"{name}": ${name}' for name in ("session", "api_key", "x_user")]
    values += ['"authorization": "$remote_user"', '"host": "$host"']
    server = "".join(
        [
            'map $cookie_session $session { "" null; "~^alice$" \'"alice"\'; default \'"other"\'; }\n',
            'map $arg_api_key $api_key { "" null; "~^alice$" \'"alice"\'; default \'"other"\'; }\n',
            'map $http_x_user $x_user { "" null; "~^alice$" \'"alice"\'; default \'"other"\'; }\n',
            "server {\n",
            f"listen 127.0.0.1:{port};\n",
            handler("= /login", "login"),
            handler("~ ^/login/(?<user>[A-Za-z0-9]+)$", "account", ', "user": "$user"'),
            handler("/admin/", "admin"),
            handler("/public/", "public"),
            handler("= /healthz", "healthz"),
            handler("= /search", "search", f', {", ".join(values)}'),
            "location / { return 404; }\n",
            "}\n",
        ]
    )
    start_nginx("nginx-app", server, [port])
    return {"nginx": (port, f"nginx {nginx_version()}")}


def start_apps(python):
    """Starts all apps. Returns port and title by name, and what is missing on this machine."""
    apps, missing = {}, []
    optional = [
        ("go", "go", start_go),
        ("jdk", "javac", start_jdk),
        ("tomcat", "javac", start_tomcat),
        ("php", "php", start_php),
        ("sinatra", "puma", start_sinatra),
        ("rack", "rackup", start_rack),
        ("mojolicious", "perl", start_mojolicious),
        ("dancer", "starman", start_dancer),
        ("nginx", "nginx", start_nginx_app),
    ]
    libraries = {
        "sinatra": ["ruby", "-e", "require 'sinatra/base'"],
        "rack": ["ruby", "-e", "require 'webrick'"],
        "mojolicious": ["perl", "-e", "use Mojolicious"],
        "dancer": ["perl", "-e", "use Dancer2"],
    }
    apps |= start_node()
    apps |= start_python(python)
    for name, program, starts in optional:
        is_installed = shutil.which(program) is not None
        if name == "tomcat":
            is_installed &= all(jar.exists() for jar in TOMCAT)
        if is_installed and name in libraries:
            is_installed = subprocess.run(libraries[name], capture_output=True).returncode == 0
        if is_installed:
            apps |= starts()
        else:
            missing.append(name)
    return dict(sorted(apps.items())), missing
