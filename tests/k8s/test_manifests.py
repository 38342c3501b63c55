"""Tests the objects: schemas, restricted pods, references, alerts, dashboard."""

import json
import pathlib
import re
import subprocess
import tempfile
import tomllib
import unittest

import jsonschema
import kubernetes_validate
import yaml

from render import (ALL, CRONJOB, MONITORING, REPO, WORKLOADS, container, containers, fronted, kustomize, named,
                    of_kind, pod_template, pods, rendered, selects)

HERE = pathlib.Path(__file__).parent
# The oldest version with native sidecars and the `sleep` hook, and a recent one.
KUBERNETES = ["1.30", "1.34"]
# Objects that the user creates.
FROM_OUTSIDE = {("Secret", "tidegate-redis"), ("Secret", "orders-tls")}


def each(test):
    """Runs a test for each kustomization."""
    def run(self):
        for name in ALL:
            with self.subTest(kustomization=name):
                test(self, rendered(name))
    return run


def each_service(test):
    """Runs a test for each kustomization whose workload has clients."""
    def run(self):
        for name in ALL:
            if name != CRONJOB:
                with self.subTest(kustomization=name):
                    test(self, rendered(name))
    return run


class Objects(unittest.TestCase):
    @each
    def test_every_object_is_valid_by_its_schema(self, objects):
        for thing in objects:
            own = HERE / "schemas" / f"{thing['kind']}.json"
            if own.exists():
                jsonschema.validate(thing, json.loads(own.read_text()))
                continue
            for version in KUBERNETES:
                kubernetes_validate.validate(thing, version, strict=True)

    def test_the_schemas_reject_unknown_fields(self):
        pod = json.loads(json.dumps(named(rendered("base"), "Deployment", "orders")))
        pod["spec"]["template"]["spec"]["initContainers"][0]["restartPolcy"] = "Always"
        with self.assertRaises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(pod, KUBERNETES[0], strict=True)
        rule = json.loads(json.dumps(of_kind(rendered(MONITORING), "PrometheusRule")[0]))
        rule["spec"]["groups"][0]["rules"][0]["four"] = "5m"
        with self.assertRaises(jsonschema.ValidationError):
            jsonschema.validate(rule, json.loads((HERE / "schemas/PrometheusRule.json").read_text()))

    @each
    def test_pods_are_restricted(self, objects):
        for name, pod in pods(objects):
            # The README's app belongs to the user: only the added container counts.
            self.assertEqual([what for what in forbidden(pod) if name != "carts" or what.startswith("tidegate: ")], [])

    @each
    def test_referenced_objects_exist(self, objects):
        there = {(thing["kind"], thing["metadata"]["name"]) for thing in objects} | FROM_OUTSIDE
        for name, pod in pods(objects):
            volumes = {volume["name"]: volume for volume in pod.get("volumes", [])}
            for volume in volumes.values():
                if "configMap" in volume:
                    self.assertIn(("ConfigMap", volume["configMap"]["name"]), there, name)
                if "secret" in volume:
                    self.assertIn(("Secret", volume["secret"]["secretName"]), there, name)
            for one in containers(pod):
                for mount in one.get("volumeMounts", []):
                    self.assertIn(mount["name"], volumes, one["name"])
                    self.assertNotIn("subPath", mount, "a subPath mount is never updated")

    @each
    def test_each_selector_matches_one_workload(self, objects):
        labels = [pod_template(thing)["metadata"]["labels"] for thing in of_kind(objects, *WORKLOADS)]
        selectors = [(thing, thing["spec"]["selector"]) for thing in of_kind(objects, "Service")]
        selectors += [(thing, thing["spec"]["selector"]["matchLabels"])
                      for thing in of_kind(objects, "PodDisruptionBudget", "Deployment", "StatefulSet")]
        selectors += [(thing, thing["spec"]["podSelector"]["matchLabels"]) for thing in of_kind(objects, "NetworkPolicy")]
        for thing, selector in selectors:
            met = [pod for pod in labels if selects(selector, pod)]
            self.assertEqual(len(met), 1, f"{thing['kind']} {thing['metadata']['name']}")
        services = [thing["metadata"].get("labels", {}) for thing in of_kind(objects, "Service")]
        for monitor in of_kind(objects, "ServiceMonitor"):
            wanted = monitor["spec"]["selector"]["matchLabels"]
            self.assertEqual(len([one for one in services if selects(wanted, one)]), 1)

    @each_service
    def test_clients_reach_the_proxy_and_never_the_app(self, objects):
        pod = fronted(objects)
        [tidegate] = pod["initContainers"]
        ports = {port["containerPort"] for port in tidegate["ports"]}
        self.assertEqual(tidegate["restartPolicy"], "Always")
        self.assertNotIn("ports", container(pod, "app"))
        self.assertIn("-listen=127.0.0.1:3000", container(pod, "app").get("args", ["-listen=127.0.0.1:3000"]))
        for service in of_kind(objects, "Service"):
            if service["metadata"]["name"] != "redis":
                self.assertLessEqual({port["targetPort"] for port in service["spec"]["ports"]}, ports)

    @each_service
    def test_shutdown_durations_are_ordered(self, objects):
        config = tomllib.loads(named(objects, "ConfigMap", "tidegate")["data"]["config.toml"])
        drained = sum(int(config["shutdown"][key].removesuffix("s")) for key in ("delay", "grace"))
        pod = fronted(objects)
        sleep = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
        # tidegate writes to Redis after `grace`.
        self.assertGreaterEqual(sleep, drained + 5, "the app ends while requests are in flight")
        self.assertGreaterEqual(pod["terminationGracePeriodSeconds"], sleep + 20, "the app has no time for its shutdown")

    @each
    def test_counters_use_at_most_half_of_the_memory_limit(self, objects):
        config = tomllib.loads(named(objects, "ConfigMap", "tidegate")["data"]["config.toml"])
        [limit] = [container(pod, "tidegate")["resources"]["limits"]["memory"] for name, pod in pods(objects) if name != "redis"]
        self.assertLessEqual(2 * mebibytes(config["store"]["memory"]["max_bytes"]), mebibytes(limit))

    @each
    def test_the_config_map_name_has_no_hash(self, objects):
        # With a hash in the name every change would restart the pods.
        named(objects, "ConfigMap", "tidegate")

    def test_the_readme_demo_uses_the_pushed_image(self):
        line = next(line for line in (REPO / "README.md").read_text().splitlines() if "overlays/demo" in line)
        made = subprocess.run(["bash", "-euo", "pipefail", "-c", line.removesuffix(" | kubectl apply -f -")], cwd=REPO,
                              capture_output=True, text=True, check=True, timeout=60).stdout
        pod = fronted(list(yaml.safe_load_all(made)))
        self.assertEqual(container(pod, "tidegate")["image"], "registry.example/tidegate:0.1.0")

    def test_the_component_changes_only_labelled_workloads(self):
        theirs = workload("Deployment", "theirs", {"tidegate": "sidecar"})
        theirs["spec"]["template"]["spec"] |= {
            "initContainers": [{"name": "migrate", "image": "theirs:1"}],
            "containers": [{"name": "web", "image": "theirs:1", "volumeMounts": [{"name": "data", "mountPath": "/data"}]},
                           {"name": "log", "image": "log:1"}],
            "volumes": [{"name": "data", "emptyDir": {}}]}
        beside = workload("Deployment", "beside", {})
        scaler = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "theirs"},
                  "spec": {"maxReplicas": 9, "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "theirs"}}}
        made = with_sidecars([theirs, beside, workload("StatefulSet", "third", {"tidegate": "sidecar"}),
                              workload("Deployment", "fourth", {"tidegate": "sidecar"}), scaler])
        self.assertEqual(named(made, "Deployment", "beside"), beside)
        pod = named(made, "Deployment", "theirs")["spec"]["template"]["spec"]
        self.assertEqual([one["name"] for one in pod["initContainers"]], ["tidegate", "migrate"])
        self.assertEqual([one["name"] for one in pod["containers"]], ["web", "log"])
        self.assertIn("lifecycle", pod["containers"][0])
        self.assertNotIn("lifecycle", pod["containers"][1])
        self.assertEqual({volume["name"] for volume in pod["volumes"]}, {"data", "tidegate", "tidegate-redis"})
        self.assertEqual(named(made, "ConfigMap", "tidegate")["metadata"]["name"], "tidegate")
        self.assertEqual(named(made, "HorizontalPodAutoscaler", "theirs"), scaler)
        for kind, name in (("Deployment", "theirs"), ("Deployment", "fourth"), ("StatefulSet", "third")):
            changed = named(made, kind, name)
            self.assertEqual((changed["metadata"], changed["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]),
                             ({"name": name, "labels": {"tidegate": "sidecar"}}, 60))
            for version in KUBERNETES:
                kubernetes_validate.validate(changed, version, strict=True)

    def test_references_follow_a_suffix_around_the_component(self):
        scaler = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "theirs"},
                  "spec": {"maxReplicas": 9, "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "theirs"}}}
        made = with_sidecars([workload("Deployment", "theirs", {"tidegate": "sidecar"}), scaler], nameSuffix="-2")
        self.assertEqual(named(made, "HorizontalPodAutoscaler", "theirs-2")["spec"]["scaleTargetRef"]["name"], "theirs-2")
        pod = named(made, "Deployment", "theirs-2")["spec"]["template"]["spec"]
        self.assertEqual(pod["volumes"][0]["configMap"]["name"], "tidegate-2")

    def test_patches_of_a_kustomization_prolong_the_termination(self):
        patch = [{"op": "replace", "path": "/spec/template/spec/terminationGracePeriodSeconds", "value": 300}]
        made = with_sidecars([workload("Deployment", "theirs", {"tidegate": "sidecar"})],
                             patches=[{"target": {"kind": "Deployment"}, "patch": yaml.dump(patch)}])
        self.assertEqual(named(made, "Deployment", "theirs")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"], 300)

    def test_the_component_never_changes_a_grace_period_of_the_app(self):
        for seconds in (30, 300):
            theirs = workload("Deployment", "theirs", {"tidegate": "sidecar"})
            theirs["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = seconds
            with self.assertRaisesRegex(AssertionError, "grace-period-60-s-more-by-patches.*terminationGracePeriodSeconds failed"):
                with_sidecars([theirs])

    def test_the_component_fails_without_a_labelled_workload(self):
        without = [[], [workload("Deployment", "theirs", {})], [workload("Deployment", "theirs", {"tidegate": "side-car"})],
                   [workload("DaemonSet", "theirs", {"tidegate": "sidecar"}), workload("StatefulSet", "beside", {})]]
        for workloads in without:
            with self.subTest(workloads=workloads), self.assertRaisesRegex(
                    AssertionError, r'add the label \\"tidegate: sidecar\\" to your Deployment or StatefulSet'):
                with_sidecars(workloads)

    def test_a_lifecycle_of_the_app_is_never_lost(self):
        for own in ({"preStop": {"exec": {"command": ["/leave"]}}}, {"postStart": {"exec": {"command": ["/warm"]}}}):
            theirs = workload("Deployment", "theirs", {"tidegate": "sidecar"})
            theirs["spec"]["template"]["spec"]["containers"][0]["lifecycle"] = own
            with self.assertRaisesRegex(AssertionError, "sidecar/pre-stop.*lifecycle failed"):
                with_sidecars([theirs])
            theirs["metadata"]["annotations"] = {"tidegate/lifecycle": "own"}
            pod = named(with_sidecars([theirs]), "Deployment", "theirs")["spec"]["template"]["spec"]
            self.assertEqual(pod["containers"][0]["lifecycle"], own)
            self.assertEqual(pod["initContainers"][0]["name"], "tidegate")


def mebibytes(text):
    return int(re.fullmatch(r"(\d+)MiB?", text)[1])


def workload(kind, name, labels):
    """A workload of a user."""
    pod = {"metadata": {"labels": {"app": name}}, "spec": {"containers": [{"name": "web", "image": "theirs:1"}]}}
    spec = {"selector": {"matchLabels": {"app": name}}, "template": pod} | ({"serviceName": name} if kind == "StatefulSet" else {})
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name, "labels": labels}, "spec": spec}


def with_sidecars(objects, **fields):
    """The objects of a user's kustomization with the component `sidecar`."""
    with tempfile.TemporaryDirectory(dir=REPO / "k8s") as folder:
        folder = pathlib.Path(folder)
        (folder / "objects.yaml").write_text(yaml.dump_all(objects))
        (folder / "config.toml").write_text("[upstream]\nurl = 'http://127.0.0.1:3000'\n")
        (folder / "kustomization.yaml").write_text(yaml.dump({
            "resources": ["objects.yaml"] if objects else [], "components": ["../components/sidecar"],
            "configMapGenerator": [{"name": "tidegate", "files": ["config.toml"],
                                    "options": {"disableNameSuffixHash": True}}]} | fields))
        return kustomize(folder)


def forbidden(pod):
    """Violations of the Pod Security Standard "restricted" (latest version, Linux)."""
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(key):
            yield key
    whole = pod.get("securityContext", {})
    if whole.get("sysctls"):
        yield "sysctls"
    for volume in pod.get("volumes", []):
        kinds = set(volume) - {"name"}
        if not kinds <= {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}:
            yield f"volume {volume['name']}"
    for one in containers(pod):
        own = {**whole, **one.get("securityContext", {})}
        wrong = {
            "privileged": own.get("privileged"),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is not False,
            "runAsNonRoot": own.get("runAsNonRoot") is not True,
            "runAsUser": not own.get("runAsUser"),
            "seccompProfile": own.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"),
            "capabilities": own.get("capabilities", {}).get("drop") != ["ALL"] or own["capabilities"].get("add"),
            "procMount": own.get("procMount", "Default") != "Default",
            "seLinuxOptions": own.get("seLinuxOptions"),
            "appArmorProfile": own.get("appArmorProfile", {}).get("type", "RuntimeDefault") == "Unconfined",
            "hostPort": any(port.get("hostPort") for port in one.get("ports", [])),
            # Not part of the standard.
            "readOnlyRootFilesystem": own.get("readOnlyRootFilesystem") is not True,
            "resources": not {"cpu", "memory"} <= one.get("resources", {}).get("requests", {}).keys(),
            "memory limit": "memory" not in one.get("resources", {}).get("limits", {}),
        }
        for what, is_wrong in wrong.items():
            if is_wrong:
                yield f"{one['name']}: {what}"


class Monitoring(unittest.TestCase):
    def rules(self):
        return of_kind(rendered(MONITORING), "PrometheusRule")[0]["spec"]

    def test_alerts_fire_and_stay_silent(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            (folder / "rules.yaml").write_text(yaml.dump(self.rules()))
            (folder / "alerts.test.yaml").write_text((HERE / "alerts.test.yaml").read_text())
            promtool("test", "rules", str(folder / "alerts.test.yaml"))

    def test_every_alert_is_tested_and_has_a_runbook(self):
        headings = re.findall(r"^#+ (.*)$", (REPO / "docs/operations/troubleshooting.md").read_text(), re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
        tested = yaml.safe_load((HERE / "alerts.test.yaml").read_text())
        fired = {case["alertname"] for test in tested["tests"] for case in test.get("alert_rule_test", []) if case.get("exp_alerts")}
        silent = {case["alertname"] for test in tested["tests"] for case in test.get("alert_rule_test", []) if not case.get("exp_alerts")}
        for rule in (rule for group in self.rules()["groups"] for rule in group["rules"] if "alert" in rule):
            self.assertIn(rule["alert"], fired)
            self.assertIn(rule["alert"], silent)
            page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
            self.assertEqual(page, "docs/operations/troubleshooting.md")
            self.assertIn(anchor, anchors)

    def test_the_dashboard_expressions_are_valid(self):
        rules = [{"record": f"panel:{number}", "expr": text} for number, text in enumerate(dashboard_expressions())]
        self.assertGreater(len(rules), 20)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "panels.yaml"
            path.write_text(yaml.dump({"groups": [{"name": "panels", "rules": rules}]}))
            promtool("check", "rules", str(path))

    def test_the_dashboard_needs_no_labels_of_kubernetes(self):
        """Prometheus outside Kubernetes sets only `job` and `instance`: `namespace=~".*"` matches the missing label."""
        board = dashboard()
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                self.assertEqual((variable["allValue"], variable["current"]["value"]), (".*", "$__all"), variable["name"])
        for panel in board["panels"]:
            for target in panel["targets"]:
                self.assertNotIn('namespace="', target["expr"])
                self.assertNotRegex(target["expr"], r"by \(pod\)", panel["title"])
                self.assertNotEqual(target["legendFormat"], "{{pod}}")

    def test_panels_do_not_overlap(self):
        taken = set()
        for panel in dashboard()["panels"]:
            at = panel["gridPos"]
            cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
            self.assertFalse(cells & taken, panel["title"])
            self.assertLessEqual(at["x"] + at["w"], 24)
            taken |= cells


def dashboard():
    [config] = [thing for thing in of_kind(rendered(MONITORING), "ConfigMap")
                if thing["metadata"].get("labels", {}).get("grafana_dashboard")]
    return json.loads(config["data"]["tidegate.json"])


def dashboard_expressions():
    """All expressions of the dashboard with values for its variables."""
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            text = target["expr"]
            for variable, value in (("$__rate_interval", "1m"), ("$namespace", "n"), ("$job", "j")):
                text = text.replace(variable, value)
            yield text


def promtool(*arguments):
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise AssertionError(done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
