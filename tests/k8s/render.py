"""Renders each kustomization in k8s/ once, and finds objects in the result."""

import functools
import pathlib
import re
import shutil
import subprocess
import tempfile

import yaml

REPO = pathlib.Path(__file__).resolve().parents[2]
K8S = REPO / "k8s"
MONITORING = "overlays/monitoring"
PAGE = "docs/operations/kubernetes.md"
# Calls another API through tidegate and has no clients of its own.
CRONJOB = "overlays/cronjob"
WORKLOADS = ("Deployment", "StatefulSet", "DaemonSet", "Job", "CronJob")
ALL = [PAGE, "base", *sorted(str(path.relative_to(K8S)) for path in (K8S / "overlays").iterdir())]


def kustomize(folder):
    """The objects of a kustomization."""
    made = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    if made.returncode != 0:
        raise AssertionError(f"{folder}: {made.stderr}")
    return [thing for thing in yaml.safe_load_all(made.stdout) if thing]


@functools.cache
def rendered(name):
    """The objects of `base`, of an overlay, or of the page."""
    return page() if name == PAGE else kustomize(K8S / name)


@functools.cache
def page():
    """The objects of the files in the page's section on one's own Deployment."""
    section = re.search(r"^## Your own Deployment\n(.*?)^## ", (REPO / PAGE).read_text(), re.MULTILINE | re.DOTALL)[1]
    files = dict(re.findall(r"`([\w.]+)`:\n\n```\w+\n(.*?)```", section, re.DOTALL))
    assert sorted(files) == ["config.toml", "deployment.yaml", "kustomization.yaml", "service.yaml"], sorted(files)
    with tempfile.TemporaryDirectory() as folder:
        carts = pathlib.Path(folder) / "carts"
        carts.mkdir()
        shutil.copytree(K8S, pathlib.Path(folder) / "tidegate" / "k8s")
        for name, text in files.items():
            (carts / name).write_text(text)
        return kustomize(carts)


def named(objects, kind, name):
    [found] = [thing for thing in objects if thing["kind"] == kind and thing["metadata"]["name"] == name]
    return found


def of_kind(objects, *kinds):
    return [thing for thing in objects if thing["kind"] in kinds]


def pods(objects):
    """Name and pod spec of each workload."""
    for thing in of_kind(objects, *WORKLOADS):
        yield thing["metadata"]["name"], with_claims(thing)


def pod_template(workload):
    job = workload["spec"].get("jobTemplate", workload)
    return job["spec"]["template"]


def with_claims(workload):
    """The pod spec of a workload. An empty volume replaces each volume that a StatefulSet claims."""
    pod = dict(pod_template(workload)["spec"])
    claims = workload["spec"].get("volumeClaimTemplates", [])
    pod["volumes"] = pod.get("volumes", []) + [{"name": claim["metadata"]["name"], "emptyDir": {}} for claim in claims]
    return pod


def containers(pod):
    return [*pod.get("initContainers", []), *pod["containers"]]


def container(pod, name):
    [found] = [one for one in containers(pod) if one["name"] == name]
    return found


def fronted(objects):
    """The pod spec of the workload that the component patched."""
    [found] = [thing for thing in of_kind(objects, "Deployment", "StatefulSet") if thing["metadata"].get("labels", {}).get("tidegate")]
    return found["spec"]["template"]["spec"]


def selects(selector, labels):
    return selector.items() <= labels.items()
