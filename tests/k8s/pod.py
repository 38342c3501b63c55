"""A pod as processes on this machine: the containers' exact commands, arguments, environment, user and mounts, by what
kustomize makes of k8s/. What the kubelet does is told by its documentation, and done by `Kubelet`.

Runs in a network and a mount namespace of its own (`isolate`), so that all ports are those of the manifests.
Differences: no image is unpacked (root file systems hold this machine's libraries beside the binary), resources are
not limited, there is no seccomp filter, and all pods are on the same loopback.
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

# What the image says.
ENTRYPOINT = re.findall(r'"([^"]+)"', re.search(r"^ENTRYPOINT (.*)$", (REPO / "Dockerfile").read_text(), re.MULTILINE)[1])
SOON = 10


def isolate():
    """Goes on in namespaces of our own, where nothing outlives us."""
    if os.environ.get("TIDEGATE_POD") != "1":
        as_root = [] if os.geteuid() == 0 else ["sudo", "-nE"]
        unshare = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        os.environ["TIDEGATE_POD"] = "1"
        os.execvp((as_root + unshare)[0], [*as_root, *unshare, sys.executable, *sys.argv])
    sh("mount", "--make-rprivate", "/")
    sh("ip", "link", "set", "lo", "up")


def sh(*command):
    subprocess.run(command, check=True, timeout=30)


def eventually(what, found, within=SOON):
    """Waits for `found` to be true, and returns what it said."""
    deadline = time.monotonic() + within
    while True:
        seen = found()
        if seen:
            return seen
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {within} s for {what}")
        time.sleep(0.02)


def fetch(url, timeout=SOON):
    """Status and body; who serves it isn't asked (as the kubelet does by HTTPS). Status 0: nobody answered."""
    anybody = ssl._create_unverified_context()
    try:
        with urllib.request.urlopen(url, timeout=timeout, context=anybody) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


class Volume:
    """A ConfigMap or Secret as the kubelet mounts it: files are links through `..data`, which is swapped as a whole."""

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
    """The pod `pod` with objects to mount from. `binary` is tidegate's; `root` an empty folder."""

    def __init__(self, pod, objects, root, binary):
        self.spec = pod
        self.root = pathlib.Path(root)
        self.binary = pathlib.Path(binary)
        self.volumes = {}
        for volume in pod.get("volumes", []):
            self.volumes[volume["name"]] = Volume(self.root / "volumes" / volume["name"], content(volume, objects))

    def prepare(self, name):
        """Makes the root file system of a container, read-only if it says so. Returns its path."""
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
        (root / "etc/hosts").write_text("127.0.0.1 localhost redis redis-cluster\n")
        (root / "tidegate").touch()
        bind(self.binary, root / "tidegate")
        for mount in one.get("volumeMounts", []):
            bind(self.volumes[mount["name"]].path, root / mount["mountPath"].lstrip("/"), mount.get("readOnly"))
        if one["securityContext"].get("readOnlyRootFilesystem"):
            sh("mount", "-o", "remount,ro", str(root))
        return root

    def start(self, name, command=None, log=None):
        """Starts a container's own command, or another one inside it."""
        one = container(self.spec, name)
        root = self.prepare(name)
        secure = {**self.spec.get("securityContext", {}), **one["securityContext"]}
        command = command or (one.get("command") or ENTRYPOINT) + one.get("args", [])
        environment = {variable["name"]: variable["value"] for variable in one.get("env", [])}
        user = ["--reuid", str(secure["runAsUser"]), "--regid", str(secure["runAsGroup"]), "--clear-groups"]
        # In a root of its own, without privileges, and with nothing of our environment.
        wrapped = ["chroot", str(root), "/usr/bin/setpriv", "--no-new-privs", "--bounding-set=-all", *user, *command]
        return subprocess.Popen(wrapped, env={"PATH": os.environ["PATH"], **environment}, stdin=subprocess.DEVNULL,
                                stdout=log or subprocess.PIPE, stderr=log or subprocess.STDOUT, text=True)


def content(volume, objects):
    """The files of a ConfigMap or Secret; those of `objects` may be given by tests in the same form."""
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
    """What the kubelet does with a pod that has one native sidecar and one app: `start`, then `end`."""

    def __init__(self, pod, app, log):
        self.pod = pod
        # Started in place of the app's image, which isn't here.
        self.app_command = app
        self.log = log
        self.order = []
        self.sidecar = self.app = None

    def probe(self, name, kind):
        """Asks once what a probe asks."""
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
        """The sidecar; when it has started up the app; then both are ready and live."""
        self.sidecar = self.pod.start("tidegate", log=self.log)
        self.passes("tidegate", "startupProbe")
        self.app = subprocess.Popen(self.app_command, stdin=subprocess.DEVNULL)
        for name, kind in (("tidegate", "readinessProbe"), ("tidegate", "livenessProbe"), ("app", "readinessProbe")):
            self.passes(name, kind)

    def end(self):
        """All preStop hooks at once; SIGTERM to the app after its own; to the sidecar when the app is gone and its own
        hook is over. Returns how long it took, in seconds. (Kubernetes' documentation: "Pod Lifecycle", "Sidecar Containers".)"""
        begin = time.monotonic()
        note = lambda what: self.order.append((what, time.monotonic() - begin))
        hook = self.pod.start("tidegate", container(self.pod.spec, "tidegate")["lifecycle"]["preStop"]["exec"]["command"])

        def see_sidecar():
            self.sidecar.wait()
            note("sidecar ended")

        seeing = threading.Thread(target=see_sidecar, daemon=True)
        seeing.start()
        time.sleep(container(self.pod.spec, "app")["lifecycle"]["preStop"]["sleep"]["seconds"])
        note("app told to end")
        self.app.terminate()
        self.app.wait(timeout=SOON)
        note("app ended")
        told, _ = hook.communicate(timeout=SOON)
        self.hook = (hook.returncode, told)
        if self.sidecar.poll() is None:
            note("sidecar told to end")
            self.sidecar.terminate()
        seeing.join(timeout=SOON)
        return time.monotonic() - begin
