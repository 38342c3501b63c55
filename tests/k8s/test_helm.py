"""Compares the objects of the Helm chart with those of kustomize."""

import pathlib
import subprocess
import tempfile
import unittest

import yaml

from render import K8S, REPO, kustomize, named, of_kind, rendered

CHART = K8S / "helm/tidegate"
MONITORING_VALUES = ["--set", "monitoring.serviceMonitor=true,monitoring.alerts=true,monitoring.dashboard=true"]


def helm(*arguments):
    done = subprocess.run(["helm", *arguments], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise AssertionError(done.stdout + done.stderr)
    return done.stdout


def template(*values):
    """The objects of the chart."""
    return [thing for thing in yaml.safe_load_all(helm("template", "orders", str(CHART), *values)) if thing]


def by_name(objects):
    return {(thing["kind"], thing["metadata"]["name"]): thing for thing in objects}


def with_component(base, lines):
    """The objects of a kustomization in k8s/ with further lines in its file."""
    with tempfile.TemporaryDirectory(dir=K8S) as folder:
        (pathlib.Path(folder) / "kustomization.yaml").write_text(f"resources: [../{base}]\n{lines}")
        return kustomize(folder)


class Chart(unittest.TestCase):
    maxDiff = None

    def assert_same(self, chart, kustomization):
        self.assertEqual(by_name(chart), by_name(kustomization))

    def test_lint_reports_no_warning(self):
        self.assertNotIn("[WARNING]", helm("lint", "--strict", str(CHART)))

    def test_the_defaults_are_the_base(self):
        self.assert_same(template(), rendered("base"))

    def test_values_give_the_overlays(self):
        cluster = K8S / "overlays/redis-cluster/config.toml"
        policies = ["--set-file", f"policies={K8S / 'base/policies.toml'}"]
        self.assert_same(template("--set-file", f"config={cluster}", *policies), rendered("overlays/redis-cluster"))
        tls = ["--set", "tls.secret=orders-tls,service.name=https,service.port=443",
               "--set-file", f"config={K8S / 'overlays/tls/config.toml'}", *policies]
        self.assert_same(template(*tls), rendered("overlays/tls"))
        self.assert_same(template(*MONITORING_VALUES), rendered("overlays/monitoring"))

    def test_a_release_label_is_on_the_monitors_and_rules(self):
        kinds = ("ServiceMonitor", "PodMonitor", "PrometheusRule")
        chart = template(*MONITORING_VALUES, "--set", "labels.release=prometheus")
        made = with_component("overlays/monitoring", "labels: [{ pairs: { release: prometheus } }]\n")
        self.assert_same(of_kind(chart, *kinds), of_kind(made, *kinds))
        self.assertEqual({thing["metadata"]["labels"]["release"] for thing in of_kind(chart, *kinds)}, {"prometheus"})
        selector = named(chart, "Deployment", "orders")["spec"]["selector"]["matchLabels"]
        self.assertEqual(selector, {"app.kubernetes.io/name": "orders"}, "selectors must not change with labels")

    def test_the_pod_monitor_is_the_component(self):
        chart = of_kind(template("--set", "monitoring.podMonitor=true"), "PodMonitor")
        made = with_component("base", "components: [../components/podmonitor]\n")
        self.assert_same(chart, of_kind(made, "PodMonitor"))
        wanted = chart[0]["spec"]["selector"]["matchLabels"].items()
        labels = named(made, "Deployment", "orders")["spec"]["template"]["metadata"]["labels"]
        self.assertLessEqual(wanted, labels.items())

    def test_a_stateful_set_has_the_same_pod(self):
        [made] = of_kind(template("--set", "kind=StatefulSet"), "StatefulSet")
        deployment = named(rendered("base"), "Deployment", "orders")
        self.assertEqual(made["spec"]["template"], deployment["spec"]["template"])
        self.assertEqual(made["spec"]["serviceName"], "orders")

    def test_own_configuration_brings_no_sample_policies(self):
        chart = template("--set", "config=include = []", "--set", "redis.secret=")
        self.assertEqual(set(named(chart, "ConfigMap", "tidegate")["data"]), {"config.toml"})
        pod = named(chart, "Deployment", "orders")["spec"]["template"]["spec"]
        self.assertEqual([volume["name"] for volume in pod["volumes"]], ["tidegate"])
        self.assertEqual([mount["name"] for mount in pod["initContainers"][0]["volumeMounts"]], ["tidegate"])

    def test_unknown_values_are_rejected(self):
        with self.assertRaisesRegex(AssertionError, "replica"):
            template("--set", "replica=3")

    def test_other_charts_add_the_sidecar_to_their_pods(self):
        with tempfile.TemporaryDirectory() as folder:
            parent = pathlib.Path(folder) / "carts"
            (parent / "templates").mkdir(parents=True)
            (parent / "charts").mkdir()
            helm("package", str(CHART), "--destination", str(parent / "charts"))
            (parent / "Chart.yaml").write_text("apiVersion: v2\nname: carts\nversion: 1.0.0\n")
            (parent / "values.yaml").write_text("tidegate: {kind: None}\n")
            (parent / "templates/pod.yaml").write_text(
                "apiVersion: v1\nkind: Pod\nmetadata: {name: carts}\nspec:\n"
                '  initContainers:\n    - {{- include "tidegate.sidecar" .Subcharts.tidegate | nindent 6 }}\n'
                '  volumes: {{- include "tidegate.volumes" .Subcharts.tidegate | nindent 4 }}\n'
                '  containers:\n    - name: app\n      image: carts:1\n'
                '      lifecycle: {{- include "tidegate.appLifecycle" .Subcharts.tidegate | nindent 8 }}\n')
            made = [thing for thing in yaml.safe_load_all(helm("template", "carts", str(parent))) if thing]
        pod = named(rendered("base"), "Deployment", "orders")["spec"]["template"]["spec"]
        carts = named(made, "Pod", "carts")["spec"]
        self.assertEqual(carts["initContainers"], pod["initContainers"])
        self.assertEqual(carts["volumes"], pod["volumes"])
        self.assertEqual(carts["containers"][0]["lifecycle"], pod["containers"][0]["lifecycle"])
        self.assertEqual({thing["kind"] for thing in made}, {"Pod", "ConfigMap"})

    def test_the_chart_version_is_the_version_of_the_package(self):
        package = (REPO / "Cargo.toml").read_text().split('version = "')[1].split('"')[0]
        chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
        self.assertEqual((chart["version"], chart["appVersion"]), (package, package))


if __name__ == "__main__":
    unittest.main()
