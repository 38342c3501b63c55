"""Runs a pod as local processes, with the commands, arguments, environment, users and mounts that kustomize generates from
k8s/. `Kubelet` does what the documentation of the kubelet describes.

The processes have their own network and mount namespaces (`isolate`) and use the ports of the manifests. Differences to
Kubernetes: root file systems contain the local libraries instead of an image, there are no resource limits and no
seccomp filter, and all pods share the loopback interface.
"""

import base64
import os
import pathlib
import re
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

from render import REPO, container, named

# The entry point of the image.
ENTRYPOINT = re.findall(r'"([^"]+)"', re.search(r"^ENTRYPOINT (.*)$", (REPO / "Dockerfile").read_text(), re.MULTILINE)[1])
TIMEOUT_S = 10


def isolate():
    """Restarts this program in new namespaces, which end all processes with it."""
    if os.environ.get("TIDEGATE_POD") != "1":
        as_root = [] if os.geteuid() == 0 else ["sudo", "-nE"]
        unshare = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        os.environ["TIDEGATE_POD"] = "1"
        os.execvp((as_root + unshare)[0], [*as_root, *unshare, sys.executable, *sys.argv])
    sh("mount", "--make-rprivate", "/")
    sh("ip", "link", "set", "lo", "up")


def sh(*command):
    subprocess.run(command, check=True, timeout=30)


def eventually(what, condition, within=TIMEOUT_S):
    """Waits until `condition` is true and returns its value."""
    deadline = time.monotonic() + within
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {within} s for {what}")
        time.sleep(0.02)


def fetch(url, timeout=TIMEOUT_S):
    """Status and body; status 0 without a response. Certificates are not verified, as in the kubelet's probes."""
    unverified = ssl._create_unverified_context()
    try:
        with urllib.request.urlopen(url, timeout=timeout, context=unverified) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


class Volume:
    """A ConfigMap or Secret mounted like the kubelet does: files link through `..data`, which is replaced atomically."""

    def __init__(self, path, files):
        self.path = path
        self.version = 0
        path.mkdir(parents=True)
        for name in files:
            (path / name).symlink_to(f"..data/{name}")
        self.write(files)

    def write(self, files):
        self.version += 1
        (self.path / f"..v{self.version}").mkdir()
        for name, content in files.items():
            (self.path / f"..v{self.version}" / name).write_bytes(content)
        (self.path / "..new").symlink_to(f"..v{self.version}")
        (self.path / "..new").rename(self.path / "..data")


class Pod:
    """The pod spec `pod` with the objects that it mounts, tidegate's `binary`, `root_certificates` (PEM), and an empty
    folder `root`."""

    def __init__(self, pod, objects, root, binary, root_certificates):
        self.spec = pod
        self.root = pathlib.Path(root)
        self.binary = pathlib.Path(binary)
        self.root_certificates = root_certificates
        self.volumes = {}
        for volume in pod.get("volumes", []):
            self.volumes[volume["name"]] = Volume(self.root / "volumes" / volume["name"], content(volume, objects))
            if "emptyDir" in volume:
                self.volumes[volume["name"]].path.chmod(0o777)

    def prepare(self, name):
        """Creates the root file system of a container, read-only if the spec requires it. Returns its path."""
        one = container(self.spec, name)
        root = self.root / "containers" / name
        if root.exists():
            return root
        root.mkdir(parents=True)
        sh("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", str(root))
        for system in ("usr", "bin", "lib", "lib64", "sbin"):
            at = pathlib.Path("/") / system
            if at.is_symlink():
                (root / system).symlink_to(os.readlink(at))
            elif at.exists():
                bind(at, root / system)
        (root / "proc").mkdir()
        sh("mount", "-t", "proc", "proc", str(root / "proc"))
        (root / "etc").mkdir()
        # Like the image, which has the root certificates of its build stage.
        (root / "etc/ssl/certs").mkdir(parents=True)
        (root / "etc/ssl/certs/ca-certificates.crt").write_bytes(self.root_certificates)
        (root / "etc/hosts").write_text("127.0.0.1 localhost redis redis-cluster\n")
        (root / "tidegate").touch()
        bind(self.binary, root / "tidegate")
        for mount in one.get("volumeMounts", []):
            bind(self.volumes[mount["name"]].path, root / mount["mountPath"].lstrip("/"), mount.get("readOnly"))
        if one["securityContext"].get("readOnlyRootFilesystem"):
            sh("mount", "-o", "remount,ro", str(root))
        return root

    def start(self, name, command=None, log=None):
        """Starts the container's command, or another command in the container."""
        one = container(self.spec, name)
        root = self.prepare(name)
        secure = {**self.spec.get("securityContext", {}), **one["securityContext"]}
        command = command or (one.get("command") or ENTRYPOINT) + one.get("args", [])
        # The downward API's values are the paths of their fields.
        environment = {variable["name"]: variable.get("value") or variable["valueFrom"]["fieldRef"]["fieldPath"]
                       for variable in one.get("env", [])}
        user = ["--reuid", str(secure["runAsUser"]), "--regid", str(secure["runAsGroup"]), "--clear-groups"]
        # Separate root, no privileges, no inherited environment.
        wrapped = ["chroot", str(root), "/usr/bin/setpriv", "--no-new-privs", "--bounding-set=-all", *user, *command]
        return subprocess.Popen(wrapped, env={"PATH": os.environ["PATH"], **environment}, stdin=subprocess.DEVNULL,
                                stdout=log or subprocess.PIPE, stderr=log or subprocess.STDOUT, text=True)


def content(volume, objects):
    """The files of a ConfigMap, a Secret or an empty volume."""
    if "emptyDir" in volume:
        return {}
    if "configMap" in volume:
        return {name: text.encode() for name, text in named(objects, "ConfigMap", volume["configMap"]["name"])["data"].items()}
    secret = named(objects, "Secret", volume["secret"]["secretName"])
    return {name: base64.b64decode(text) for name, text in secret["data"].items()}


def bind(what, where, read_only=False):
    if not what.is_file():
        where.mkdir(parents=True)
    sh("mount", "--bind", str(what), str(where))
    if read_only:
        sh("mount", "-o", "remount,ro,bind", str(where))


class Kubelet:
    """Starts and ends a pod with one native sidecar and one app like the kubelet: `start`, then `end`."""

    def __init__(self, pod, app, log):
        self.pod = pod
        # Replaces the app's image.
        self.app_command = app
        self.log = log
        self.order = []
        self.sidecar = self.app = None

    def probe(self, name, kind):
        """Runs a probe once."""
        probe = container(self.pod.spec, name)[kind]
        if "tcpSocket" in probe:
            raise NotImplementedError(kind)
        get = probe["httpGet"]
        url = f"{get.get('scheme', 'HTTP').lower()}://127.0.0.1:{get['port']}{get['path']}"
        return 200 <= fetch(url, probe.get("timeoutSeconds", 1))[0] < 400

    def passes(self, name, kind):
        probe = container(self.pod.spec, name)[kind]
        within = probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)
        eventually(f"{kind} of {name}", lambda: self.probe(name, kind), within)

    def start(self):
        """Starts the sidecar, then the app, and waits until both are ready and live."""
        self.sidecar = self.pod.start("tidegate", log=self.log)
        self.passes("tidegate", "startupProbe")
        self.app = subprocess.Popen(self.app_command, stdin=subprocess.DEVNULL)
        for name, kind in (("tidegate", "readinessProbe"), ("tidegate", "livenessProbe"), ("app", "readinessProbe")):
            self.passes(name, kind)

    def end(self):
        """Runs all preStop hooks at once. Sends SIGTERM to the app after its hook, and to the sidecar after the app and its
        own hook have ended. Returns the duration in seconds. (Kubernetes documentation: "Pod Lifecycle", "Sidecar
        Containers".)"""
        begin = time.monotonic()
        note = lambda what: self.order.append((what, time.monotonic() - begin))
        hook = self.pod.start("tidegate", container(self.pod.spec, "tidegate")["lifecycle"]["preStop"]["exec"]["command"])

        def wait_for_sidecar():
            self.sidecar.wait()
            note("sidecar ended")

        waiting = threading.Thread(target=wait_for_sidecar, daemon=True)
        waiting.start()
        time.sleep(container(self.pod.spec, "app")["lifecycle"]["preStop"]["sleep"]["seconds"])
        note("app signalled")
        self.app.terminate()
        self.app.wait(timeout=TIMEOUT_S)
        note("app ended")
        output, _ = hook.communicate(timeout=TIMEOUT_S)
        self.hook = (hook.returncode, output)
        if self.sidecar.poll() is None:
            note("sidecar signalled")
            self.sidecar.terminate()
        waiting.join(timeout=TIMEOUT_S)
        return time.monotonic() - begin
