"""The proxies under test. Each has several ports per app.

The port "limits" refuses /login, /login/alice, /admin/ and, for /search, the cookie, parameter, header, credentials and
host of alice. The port "exemptions" refuses everything but /public/ and /healthz. tidegate does so by limits without
quota left; the others refuse at once. "conditions" and "patterns" are tidegate's: policies with `action = "deny"`.
"""

import os
import re
import shutil
from collections import namedtuple
from pathlib import Path

import servers
import wire

FOLDER = Path(__file__).parent

# The ports of one app, and whether the app ignores case. nginx needs a port for HTTP/2 with the rules of `limits`.
Ports = namedtuple("Ports", "app limits exemptions conditions patterns http2 ignores_case")
Proxy = namedtuple("Proxy", "title start ports has_http2_port", defaults=[("limits", "exemptions"), False])
# The credentials of alice.
CREDENTIALS = ("Bearer alice", "Basic YWxpY2U6c2VjcmV0")


def new_ports(app, ignores_case):
    return Ports(app, *(servers.free_port() for _ in range(5)), ignores_case)


def use_up(ports):
    """Uses up the quotas of alice."""
    spellings = [("target", "/login"), ("target", "/login/alice"), ("cookie", "session=alice"), ("host", "alice.test")]
    spellings += [("query", "api_key=alice"), ("header", "alice"), *(("authorization", one) for one in CREDENTIALS)]
    for spelling in spellings:
        wire.Http1Client(ports.limits).ask(wire.request_of(*spelling))
    wire.Http1Client(ports.exemptions).ask(wire.request_of("target", "/other"))


TIDEGATE = """
[listen]
address = "127.0.0.1:{port}"
[upstream]
url = "http://127.0.0.1:{app}"
[admin]
address = "127.0.0.1:0"
[log]
access = "off"
[path]
case_sensitive = {case_sensitive}
forward = "{forward}"
"""
# The gate uses these policies too, in tests/it/spellings.rs.
TIDEGATE_LIMITS = (FOLDER / "limits.toml").read_text()
TIDEGATE_EXEMPTIONS = (FOLDER / "exemptions.toml").read_text()
TIDEGATE_CONDITIONS = (FOLDER / "conditions.toml").read_text()
TIDEGATE_PATTERNS = re.sub(r'(\w) = "([\w ]*)" } }', r'\1 = { regex = "^\2$" } } }', TIDEGATE_CONDITIONS)


def start_tidegate(program, forward):
    def start(apps):
        running = []
        for index, ports in enumerate(apps):
            for port, policies in (
                (ports.limits, TIDEGATE_LIMITS),
                (ports.exemptions, TIDEGATE_EXEMPTIONS),
                (ports.conditions, TIDEGATE_CONDITIONS),
                (ports.patterns, TIDEGATE_PATTERNS),
            ):
                case_sensitive = str(not ports.ignores_case).lower()
                text = TIDEGATE.format(port=port, app=ports.app, case_sensitive=case_sensitive, forward=forward)
                file = servers.DIR / f"tidegate-{index}-{port}.toml"
                file.write_text(text + policies)
                running.append(servers.start(file.stem, [port], program, "run", "--config", file))
        return running

    return start


def start_nginx(apps):
    text = ""
    for ports in apps:
        equals, matches = ("~* ^{}$", "~*") if ports.ignores_case else ("= {}", "~")
        forward = f"""
          proxy_pass http://127.0.0.1:{ports.app};
          proxy_http_version 1.1;
          proxy_set_header Host $http_host;
        """
        text += f"""
        server {{
          listen 127.0.0.1:{ports.limits};
          listen 127.0.0.1:{ports.http2} http2;
          location {equals.format('/login')} {{ return 429; }}
          location {equals.format('/login/')} {{ return 429; }}
          location {matches} ^/login/alice(/|$) {{ return 429; }}
          location {matches} ^/admin/ {{ return 403; }}
          location {equals.format('/search')} {{
            if ($cookie_session = alice) {{ return 429; }}
            if ($arg_api_key = alice) {{ return 429; }}
            if ($http_x_user = alice) {{ return 429; }}
            if ($host = alice.test) {{ return 429; }}
            if ($http_authorization = "Bearer alice") {{ return 429; }}
            if ($http_authorization = "Basic YWxpY2U6c2VjcmV0") {{ return 429; }}
            {forward}
          }}
          location / {{ {forward} }}
        }}
        server {{
          listen 127.0.0.1:{ports.exemptions};
          location {matches} ^/public/ {{ {forward} }}
          location {equals.format('/healthz')} {{ {forward} }}
          location / {{ return 429; }}
        }}
        """
    return [servers.start_nginx("nginx-proxy", text, [port for ports in apps for port in (ports.limits, ports.exemptions)])]


HAPROXY_NORMALIZATION = """
  http-request normalize-uri fragment-strip
  http-request normalize-uri percent-decode-unreserved
  http-request normalize-uri path-strip-dot
  http-request normalize-uri path-strip-dotdot full
  http-request normalize-uri path-merge-slashes
"""


def start_haproxy(normalization):
    def start(apps):
        text = """
global
  expose-experimental-directives
  tune.bufsize 65536
defaults
  mode http
  timeout connect 5s
  timeout client 10s
  timeout server 10s
"""
        for index, ports in enumerate(apps):
            case = "-i" if ports.ignores_case else ""
            text += f"""
backend app-{index}
  server app 127.0.0.1:{ports.app}
frontend limits-{index}
  bind 127.0.0.1:{ports.limits}
{normalization}
  http-request deny deny_status 429 if {{ path {case} /login /login/ }}
  http-request deny deny_status 429 if {{ path_reg {case} ^/login/alice(/|$) }}
  http-request deny deny_status 403 if {{ path_beg {case} /admin/ }}
  http-request deny deny_status 429 if {{ path {case} /search }} {{ req.cook(session) -m str alice }}
  http-request deny deny_status 429 if {{ path {case} /search }} {{ url_param(api_key),url_dec -m str alice }}
  http-request deny deny_status 429 if {{ path {case} /search }} {{ req.hdr(x-user) -m str alice }}
  http-request deny deny_status 429 if {{ path {case} /search }} {{ req.hdr(host),host_only,lower -m str alice.test }}
  acl credentials req.hdr(authorization) -m str "Bearer alice" "Basic YWxpY2U6c2VjcmV0"
  http-request deny deny_status 429 if {{ path {case} /search }} credentials
  default_backend app-{index}
frontend exemptions-{index}
  bind 127.0.0.1:{ports.exemptions}
{normalization}
  http-request deny deny_status 429 unless {{ path_beg {case} /public/ }} || {{ path {case} /healthz }}
  default_backend app-{index}
"""
        name = "haproxy-normalizing" if normalization else "haproxy"
        file = servers.DIR / f"{name}.cfg"
        file.write_text(text)
        return [servers.start(name, [port for ports in apps for port in (ports.limits, ports.exemptions)], "haproxy", "-db", "-f", file)]

    return start


# As Envoy's page on edge proxies recommends.
ENVOY_NORMALIZATION = """
          normalize_path: true
          merge_slashes: true
          path_with_escaped_slashes_action: UNESCAPE_AND_REDIRECT
          strip_any_host_port: true
          strip_trailing_host_dot: true
"""


def envoy_listener(name, port, routes, normalization):
    return f"""
  - name: {name}
    address: {{ socket_address: {{ address: 127.0.0.1, port_value: {port} }} }}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: {name}
          delayed_close_timeout: 0s
{normalization}
          http_filters:
          - name: envoy.filters.http.router
            typed_config: {{ "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router }}
          route_config:
            virtual_hosts:
            - name: all
              domains: ["*"]
              routes:
{routes}
"""


def start_envoy(program, normalization):
    def start(apps):
        listeners, clusters = "", ""
        for index, ports in enumerate(apps):
            name = f"app-{index}"
            case = str(not ports.ignores_case).lower()

            def refuse(match, status=429):
                return f"              - {{ match: {{ {match} }}, direct_response: {{ status: {status} }} }}\n"

            def forward(match):
                return f"              - {{ match: {{ {match} }}, route: {{ cluster: {name} }} }}\n"

            def path(kind, text):
                return f'{kind}: "{text}", case_sensitive: {case}'

            regex = "(?i)^/login/alice(/.*)?$" if ports.ignores_case else "^/login/alice(/.*)?$"
            alice = "string_match: { exact: alice }"
            host = "string_match: { exact: alice.test, ignore_case: true }"
            limits = [
                refuse(path("path", "/login")),
                refuse(path("path", "/login/")),
                refuse(f'safe_regex: {{ regex: "{regex}" }}'),
                refuse(path("prefix", "/admin/"), 403),
                refuse(path("path", "/search") + f", query_parameters: [{{ name: api_key, {alice} }}]"),
                refuse(path("path", "/search") + f", headers: [{{ name: x-user, {alice} }}]"),
                refuse(path("path", "/search") + f', headers: [{{ name: ":authority", {host} }}]'),
                refuse(path("path", "/search") + f", cookies: [{{ name: session, {alice} }}]"),
                *(
                    refuse(
                        path("path", "/search")
                        + f', headers: [{{ name: authorization, string_match: {{ exact: "{credentials}" }} }}]'
                    )
                    for credentials in ("Bearer alice", "Basic YWxpY2U6c2VjcmV0")
                ),
                forward('prefix: "/"'),
            ]
            exemptions = [
                forward(path("prefix", "/public/")),
                forward(path("path", "/healthz")),
                refuse('prefix: "/"'),
            ]
            listeners += envoy_listener(f"limits-{index}", ports.limits, "".join(limits), normalization)
            listeners += envoy_listener(f"exemptions-{index}", ports.exemptions, "".join(exemptions), normalization)
            clusters += f"""
  - name: {name}
    type: STATIC
    load_assignment:
      cluster_name: {name}
      endpoints:
      - lb_endpoints:
        - endpoint: {{ address: {{ socket_address: {{ address: 127.0.0.1, port_value: {ports.app} }} }} }}
"""
        name = "envoy-normalizing" if normalization else "envoy"
        file = servers.DIR / f"{name}.yaml"
        file.write_text(f"static_resources:\n  listeners:{listeners}\n  clusters:{clusters}")
        command = [program, "--config-path", file, "--base-id-path", servers.DIR / name, "--use-dynamic-base-id"]
        ports = [port for ports in apps for port in (ports.limits, ports.exemptions)]
        return [servers.start(name, ports, *command, "--concurrency", "1", "--log-level", "error")]

    return start


def all_proxies(tidegate, envoy):
    """All proxies, and what is missing on this machine."""
    ports = ("limits", "exemptions", "conditions", "patterns")
    missing = []
    found = [
        Proxy("tidegate", start_tidegate(tidegate, "unchanged"), ports),
        Proxy("tidegate, normalizing", start_tidegate(tidegate, "normalized"), ports),
    ]
    if shutil.which("nginx"):
        found.append(Proxy(f"nginx {servers.nginx_version()}", start_nginx, has_http2_port=True))
    else:
        missing.append("nginx")
    if envoy:
        number = servers.version(r"/([0-9]+\.[0-9.]+)/", envoy, "--version")
        found.append(Proxy(f"Envoy {number}", start_envoy(envoy, "")))
        found.append(Proxy(f"Envoy {number}, normalizing", start_envoy(envoy, ENVOY_NORMALIZATION)))
    else:
        missing.append("Envoy")
    if shutil.which("haproxy"):
        number = servers.version(r"version ([0-9.]+)", "haproxy", "-v")
        found.append(Proxy(f"HAProxy {number}", start_haproxy("")))
        found.append(Proxy(f"HAProxy {number}, normalizing", start_haproxy(HAPROXY_NORMALIZATION)))
    else:
        missing.append("HAProxy")
    # Only these proxies, by the start of the title.
    wanted = os.environ.get("PROXIES", "")
    return [proxy for proxy in found if proxy.title.startswith(wanted)], missing
