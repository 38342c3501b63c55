"""Tests the Helm chart: what it renders for drawn values, what it refuses, and how other charts use it."""

import concurrent.futures
import os
import pathlib
import random
import re
import subprocess
import tempfile
import tomllib
import unittest

import kubernetes_validate
import yaml

from render import K8S, PAGE, REPO, kustomize, named, of_kind, pod_template, rendered, selects
from test_manifests import KUBERNETES, forbidden

CHART = K8S / "helm/tidegate"
BINARY = os.environ["TIDEGATE"]
DRAWN = 240
SIDECAR_SELECTOR = "tidegate/name"


def helm(*arguments):
    done = subprocess.run(["helm", *arguments], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise AssertionError(done.stdout + done.stderr)
    return done.stdout


def objects(text):
    return [thing for thing in yaml.safe_load_all(text) if thing]


def template(values=None, release="orders", chart=CHART):
    """The objects of the chart for a dictionary of values."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.dump(values or {}, file)
        file.flush()
        return objects(helm("template", release, str(chart), "--namespace", "shop", "--values", file.name))


def configuration(made, release="orders"):
    return tomllib.loads(named(made, "ConfigMap", f"{release}-tidegate")["data"]["config.toml"])


def workload(made):
    [found] = of_kind(made, "Deployment", "StatefulSet")
    return found


def pod(made):
    return pod_template(workload(made))["spec"]


def sidecar(made):
    return pod(made)["initContainers"][0]


def check(configurations):
    """Runs `tidegate check --strict` for the files of ConfigMaps. Secrets and certificates do not exist here."""
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number, files in enumerate(configurations):
            for name, text in files.items():
                path = pathlib.Path(folder, str(number), name)
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
            paths.append(f"{number}/config.toml")
        done = subprocess.run([BINARY, "check", "--strict", "--no-files", *paths], cwd=folder, capture_output=True,
                              text=True, timeout=120)
        if done.returncode != 0:
            raise AssertionError(done.stderr)


def draw(seed):
    """A release's name and values, which are valid together."""
    chance = random.Random(seed)
    pick, maybe = chance.choice, lambda share=0.5: chance.random() < share
    values = {"kind": pick(["Deployment", "Deployment", "StatefulSet", "None"])}

    def sometimes(into, **choices):
        for name, options in choices.items():
            if maybe(0.4):
                into[name] = pick(options)

    sometimes(values, name=["carts", "a", "x" * 55], labels=[{"release": "prometheus"}],
              trustedProxies=[["10.0.0.0/8"], ["10.0.0.0/8", "fd00::/8"]])
    values["redis"] = {"secret": pick(["", "tidegate-redis", "shared"])}
    if values["redis"]["secret"]:
        sometimes(values["redis"], url=["rediss://redis.example:6380/3"], username=["", "limits"], keyPrefix=["shop:orders"])
    values["tls"] = {"secret": pick(["", "orders-tls"])}
    if values["kind"] != "None" or values["redis"]["secret"]:
        sometimes(values, replicas=[0, 1, 7])
    parts = [('[listen.http]\nmax_body_bytes = "1MiB"', True), ('[shutdown]\ndelay = "1m30s"\ngrace = "1500ms"', True),
             ('[store]\nkind = "redis"\n[store.redis]\nurl = "redis://other:6379"\ninstances = 3\nkey_prefix = "own"',
              not values["redis"]["secret"]),
             ('[store.redis]\ntopology = "cluster"\nurls = ["redis://a:6379"]',
              values["redis"]["secret"] and "url" not in values["redis"]),
             ('[admin]\naddress = "[::]:9090"\ntoken_file = "/etc/token"\nallowed_hosts = ["orders"]', True),
             ('[[policy]]\nname = "own"\nkey = ["client_ip"]\nlimit = { requests = 10, per = "1m" }', True)]
    values["config"] = "\n".join(text for text, fits in parts if fits and maybe(0.25))
    if maybe(0.3):
        values["policies"] = '[[policy]]\nname = "mine"\nlimit = { requests = 5, per = "1s" }\n'
    values["sidecar"] = {}
    sometimes(values["sidecar"], image=["registry.example/tidegate:2"], imagePullPolicy=["Always"],
              resources=[{"limits": {"memory": "1Gi"}}, {"limits": {"memory": 536870912}}, {"requests": {"cpu": "1"}},
                         {"limits": {"memory": "0.5Gi", "cpu": 2}, "requests": {"memory": "100M", "cpu": "50m"}}],
              env=[[{"name": "A", "value": "b"}]], envFrom=[[{"configMapRef": {"name": "c"}}]],
              securityContext=[{"runAsUser": 1000}])
    monitoring = values["monitoring"] = {pick(["serviceMonitor", "podMonitor", "alerts", "dashboard"]): True}
    if values["kind"] == "None":
        return pick(["orders", "r2"]), values
    sometimes(values, networkPolicy=[False, True], podDisruptionBudget=[False, True])
    if monitoring.keys() & {"serviceMonitor", "podMonitor"} and values.get("networkPolicy", True):
        sometimes(monitoring, namespace=["observability"])
    if "replicas" not in values:
        sometimes(values, autoscaling=[
            {"enabled": True}, {"enabled": True, "minReplicas": 3, "maxReplicas": 30},
            {"enabled": True, "targetMemoryUtilizationPercentage": 70},
            {"enabled": True, "targetCPUUtilizationPercentage": 50, "targetMemoryUtilizationPercentage": 70}, {"enabled": False}])
    app = values["app"] = {}
    sometimes(app, image=["registry.example/carts:1"], imagePullPolicy=["Always"], command=[["/carts"]], args=[["--fast"], []],
              port=[5000], env=[[{"name": "A", "value": "b"}]], envFrom=[[{"secretRef": {"name": "s"}}]],
              readinessPath=["/ready", ""], livenessProbe=[{"httpGet": {"path": "/", "port": 8080}}],
              startupProbe=[{"exec": {"command": ["/ok"]}}], resources=[{"limits": {"memory": "1Gi"}}],
              lifecycle=[{"preStop": {"sleep": {"seconds": 5}}}, {"preStop": {"sleep": {"seconds": 300}}},
                         {"postStart": {"exec": {"command": ["/warm"]}}}, {"preStop": {"exec": {"command": ["/leave"]}}}],
              securityContext=[{"runAsUser": 7}], volumeMounts=[[{"name": "data", "mountPath": "/data"}]])
    if "exec" in app.get("lifecycle", {}).get("preStop", {}):
        values["sidecar"]["keepPreStop"] = True
    if "volumeMounts" in app:
        values["volumes"] = [{"name": "data", "emptyDir": {}}]
    sometimes(values, service=[{"type": "LoadBalancer", "annotations": {"a": "b"}}, {"name": "web", "port": 8443}],
              serviceAccount=[{"create": True, "annotations": {"a": "b"}}, {"name": "theirs"}, {"automount": True}],
              annotations=[{"a": "b"}], podAnnotations=[{"c": "d"}], podLabels=[{"e": "f"}], imagePullSecrets=[[{"name": "pull"}]],
              podSecurityContext=[{"fsGroup": 5}], nodeSelector=[{"disk": "ssd"}], priorityClassName=["high"],
              tolerations=[[{"operator": "Exists"}]],
              affinity=[{"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                  {"matchExpressions": [{"key": "a", "operator": "Exists"}]}]}}}],
              topologySpreadConstraints=[[{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]])
    return pick(["orders", "r2"]), values


def each(test):
    """Runs a test for each drawn release: its name, values and objects."""
    def run(self):
        for seed, name, values, made in self.cases:
            with self.subTest(seed=seed, values=values):
                test(self, name, values, made)
    return run


def each_workload(test):
    """The same for the releases with a workload."""
    return each(lambda self, name, values, made: values["kind"] == "None" or test(self, name, values, made))


class Drawn(unittest.TestCase):
    """Properties of what the chart renders for drawn values."""

    @classmethod
    def setUpClass(cls):
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            cls.cases = list(pool.map(cls.case, range(DRAWN)))

    @staticmethod
    def case(seed):
        release, values = draw(seed)
        try:
            return seed, values.get("name", release), values, template(values, release)
        except AssertionError as error:
            raise AssertionError(f"{values}: {error}") from None

    def test_each_configuration_passes_check_strict(self):
        check(named(made, "ConfigMap", f"{name}-tidegate")["data"] for _, name, _, made in self.cases)

    @each
    def test_the_store_follows_the_values(self, name, values, made):
        store, own = configuration(made, name)["store"], tomllib.loads(values["config"]).get("store", {})
        secret = values["redis"]["secret"]
        self.assertEqual(store["kind"], own.get("kind", "redis" if secret else "memory"))
        if secret:
            scaling = values.get("autoscaling", {})
            replicas = scaling.get("maxReplicas", 10) if scaling.get("enabled") else values.get("replicas", 2)
            self.assertEqual(store["redis"]["instances"], max(1, replicas))
            self.assertEqual(store["redis"]["key_prefix"], values["redis"].get("keyPrefix", name))
            self.assertNotEqual("url" in store["redis"], "urls" in store["redis"])
        elif not own:
            self.assertNotIn("redis", store)

    @each
    def test_the_memory_of_counters_is_half_of_the_limit(self, name, values, made):
        bytes_of = {"256Mi": 256 << 20, "1Gi": 1 << 30, 536870912: 1 << 29, "0.5Gi": 1 << 29, None: None}
        limit = bytes_of[values["sidecar"].get("resources", {"limits": {"memory": "256Mi"}}).get("limits", {}).get("memory")]
        expected = {"memory": {"max_bytes": f"{limit // 2}B"}} if limit else {}
        store = configuration(made, name)["store"]
        self.assertEqual({key: value for key, value in store.items() if key == "memory"}, expected)

    @each_workload
    def test_all_sides_speak_the_same_scheme(self, name, values, made):
        tls = bool(values["tls"]["secret"])
        self.assertEqual("tls" in configuration(made, name)["listen"], tls)
        [port] = named(made, "Service", name)["spec"]["ports"]
        service = values.get("service", {})
        self.assertEqual((port["name"], port["port"], port["targetPort"]),
                         (service.get("name", "https" if tls else "http"), service.get("port", 443 if tls else 80), 8080))
        path = values["app"].get("readinessPath", "/healthz")
        probe = pod(made)["containers"][0].get("readinessProbe")
        self.assertEqual(probe and probe["httpGet"],
                         {"path": path, "port": 8080, "scheme": "HTTPS" if tls else "HTTP"} if path else None)
        mounts = {mount["mountPath"] for mount in sidecar(made)["volumeMounts"]}
        self.assertEqual("/etc/tidegate-tls" in mounts, tls)

    @each_workload
    def test_probes_are_exempt_by_the_sample_policies(self, name, values, made):
        path = values["app"].get("readinessPath", "/healthz")
        policies = tomllib.loads(named(made, "ConfigMap", f"{name}-tidegate")["data"].get("policies.toml", ""))
        if path and policies.get("policy", [{}])[0].get("name") == "health":
            self.assertEqual(policies["policy"][0]["match"]["path"], path)

    @each_workload
    def test_the_app_ends_after_the_proxy(self, _name, values, made):
        hook = pod(made)["containers"][0]["lifecycle"]["preStop"]
        own = values["app"].get("lifecycle", {})
        drained = 90 + 2 if "1m30s" in values["config"] else 30
        sleep = max(drained + 5, own.get("preStop", {}).get("sleep", {}).get("seconds", 0))
        if "exec" in own.get("preStop", {}):
            self.assertEqual(hook, own["preStop"])
            sleep = drained + 5
        else:
            self.assertEqual(hook, {"sleep": {"seconds": sleep}})
        self.assertEqual(pod(made)["containers"][0]["lifecycle"].get("postStart"), own.get("postStart"))
        self.assertEqual(pod(made)["terminationGracePeriodSeconds"], sleep + 25)

    @each_workload
    def test_every_given_knob_is_in_the_pod(self, name, values, made):
        at_pod = {"imagePullSecrets", "nodeSelector", "affinity", "tolerations", "topologySpreadConstraints", "priorityClassName"}
        at_container = {"image", "imagePullPolicy", "command", "env", "envFrom", "livenessProbe", "startupProbe",
                        "resources", "securityContext", "volumeMounts"}
        spec, labels = pod(made), pod_template(workload(made))["metadata"]["labels"]
        for knob in at_pod & values.keys():
            self.assertEqual(spec[knob], values[knob])
        for knob in at_container & values["app"].keys():
            self.assertEqual(spec["containers"][0][knob], values["app"][knob])
        for knob in {"image", "imagePullPolicy", "envFrom", "resources"} & values["sidecar"].keys():
            self.assertEqual(sidecar(made)[knob], values["sidecar"][knob])
        for variable in values["sidecar"].get("env", []):
            self.assertIn(variable, sidecar(made)["env"])
        self.assertEqual(sidecar(made)["securityContext"]["runAsUser"],
                         values["sidecar"].get("securityContext", {}).get("runAsUser", 65532))
        self.assertIs(sidecar(made)["securityContext"]["readOnlyRootFilesystem"], True)
        self.assertLessEqual((values.get("podLabels", {}) | values.get("labels", {})).items(), labels.items())
        self.assertLessEqual(values.get("podAnnotations", {}).items(), pod_template(workload(made))["metadata"]["annotations"].items())
        self.assertEqual(workload(made)["metadata"].get("annotations", {}), values.get("annotations", {}))
        account = values.get("serviceAccount", {})
        self.assertEqual(spec.get("serviceAccountName"), account.get("name", name if account.get("create") else None))
        self.assertEqual([thing["metadata"]["name"] for thing in of_kind(made, "ServiceAccount")],
                         [name] if account.get("create") else [])
        for kind, switch in (("NetworkPolicy", "networkPolicy"), ("PodDisruptionBudget", "podDisruptionBudget")):
            self.assertEqual(name in {thing["metadata"]["name"] for thing in of_kind(made, kind)}, values.get(switch, True))

    @each_workload
    def test_an_autoscaler_replaces_the_number_of_replicas(self, name, values, made):
        scaling = values.get("autoscaling", {})
        self.assertNotEqual("replicas" in workload(made)["spec"], scaling.get("enabled", False))
        for scaler in of_kind(made, "HorizontalPodAutoscaler"):
            self.assertEqual(scaler["spec"]["scaleTargetRef"]["name"], name)
            self.assertEqual(scaler["spec"]["maxReplicas"], scaling.get("maxReplicas", 10))
            self.assertTrue(scaler["spec"]["metrics"])

    @each
    def test_references_and_names_belong_to_the_release(self, name, values, made):
        for thing in made:
            self.assertRegex(thing["metadata"]["name"], rf"^{name}(-tidegate|-metrics|-dashboard)?$")
            self.assertEqual(thing["metadata"]["namespace"], "shop")
            self.assertLessEqual(values.get("labels", {}).items(), thing["metadata"]["labels"].items())
        if values["kind"] == "None":
            return
        volumes = {volume["name"]: volume for volume in pod(made)["volumes"]}
        for container in (sidecar(made), *pod(made)["containers"]):
            for mount in container.get("volumeMounts", []):
                self.assertIn(mount["name"], volumes)
        self.assertEqual(volumes["tidegate"]["configMap"]["name"], f"{name}-tidegate")
        self.assertEqual("tidegate-redis" in volumes, bool(values["redis"]["secret"]))

    def test_objects_are_valid_by_the_schemas_of_kubernetes(self):
        for _, _, _, made in self.cases[::6]:
            for thing in made:
                if not thing["apiVersion"].startswith("monitoring.coreos.com"):
                    kubernetes_validate.validate(thing, KUBERNETES[1], strict=True)


class Chart(unittest.TestCase):
    maxDiff = None

    def refuses(self, values, message):
        with self.assertRaises(AssertionError) as caught:
            template(values)
        self.assertRegex(str(caught.exception), message)

    def test_lint_reports_no_warning(self):
        self.assertNotIn("[WARNING]", helm("lint", "--strict", str(CHART)))

    def test_the_defaults_are_the_base(self):
        base, made = rendered("base"), template()
        theirs = named(base, "Deployment", "orders")["spec"]["template"]["spec"]
        for container, own in ((sidecar(made), theirs["initContainers"][0]), (pod(made)["containers"][0], theirs["containers"][0])):
            container.get("readinessProbe", {}).get("httpGet", {}).pop("scheme", None)
            self.assertEqual(container, own)
        own_parts = {"initContainers", "containers", "volumes"}
        self.assertEqual({key: value for key, value in pod(made).items() if key not in own_parts},
                         {key: value for key, value in theirs.items() if key not in own_parts})
        files, own = named(made, "ConfigMap", "orders-tidegate")["data"], named(base, "ConfigMap", "tidegate")["data"]
        for file in ("config.toml", "policies.toml"):
            ours, base_file = tomllib.loads(files[file]), tomllib.loads(own[file])
            if file == "config.toml":
                self.assertEqual(ours["store"].pop("memory"), {"max_bytes": "134217728B"})
                self.assertEqual(base_file["store"].pop("memory"), {"max_bytes": "128MiB"})
            self.assertEqual(ours, base_file)
        self.assertEqual({(thing["kind"], thing["metadata"]["name"]) for thing in made} - {("ConfigMap", "orders-tidegate")},
                         {(thing["kind"], thing["metadata"]["name"]) for thing in base} - {("ConfigMap", "tidegate")})
        self.assertEqual(list(forbidden(pod(made))), [])

    def test_two_releases_share_a_namespace(self):
        for monitor in ("serviceMonitor", "podMonitor"):
            values = {"monitoring": {monitor: True, "alerts": True, "dashboard": True}, "serviceAccount": {"create": True},
                      "autoscaling": {"enabled": True}}
            first, second = template(values, "orders"), template(values, "carts")
            names = [{(thing["kind"], thing["metadata"]["name"]) for thing in made} for made in (first, second)]
            self.assertEqual(names[0] & names[1], set())
            self.assertEqual(len(names[0]), len(first))
            labels = {name: pod_template(workload(made))["metadata"]["labels"] for name, made in (("orders", first), ("carts", second))}
            for thing in first:
                spec = thing.get("spec", {})
                selector = spec.get("podSelector", spec.get("selector", {}))
                selector = selector.get("matchLabels", selector)
                if selector and thing["kind"] != "ServiceMonitor":
                    self.assertTrue(selects(selector, labels["orders"]), thing["metadata"])
                    self.assertFalse(selects(selector, labels["carts"]), thing["metadata"])
            for scrape in of_kind(first, "ServiceMonitor"):
                services = [thing for thing in (*first, *second) if thing["kind"] == "Service"
                            and selects(scrape["spec"]["selector"]["matchLabels"], thing["metadata"]["labels"])]
                self.assertEqual([thing["metadata"]["name"] for thing in services], ["orders-metrics"])
            prefixes = {configuration(made, name)["store"]["redis"]["key_prefix"] for name, made in (("orders", first), ("carts", second))}
            self.assertEqual(prefixes, {"orders", "carts"})

    def test_a_changed_setting_but_no_changed_policy_starts_new_pods(self):
        def annotation(**values):
            return pod_template(workload(template(values)))["metadata"]["annotations"]["tidegate/config"]
        policy = '[[policy]]\nname = "p"\nlimit = { requests = 1, per = "1s" }'
        self.assertEqual(annotation(), annotation(policies=policy))
        self.assertEqual(annotation(), annotation(replicas=9), "the number of instances is read from Redis")
        self.assertNotEqual(annotation(), annotation(config='[log]\nlevel = "debug"'))
        self.assertNotEqual(annotation(), annotation(redis={"url": "redis://other:6379"}))

    def test_values_without_an_effect_are_refused(self):
        for values, message in (
                ({"replica": 3}, "replica"),
                ({"app": {"picture": "x"}}, "picture"),
                ({"kind": "None", "app": {"image": "x"}}, "/app.*kind is None"),
                ({"kind": "None", "tolerations": [{"operator": "Exists"}]}, "/tolerations.*kind is None"),
                ({"kind": "None", "podDisruptionBudget": True}, "/podDisruptionBudget.*kind is None"),
                ({"kind": "None", "redis": {"secret": ""}, "replicas": 2}, "/replicas.*redis.secret is empty"),
                ({"redis": {"secret": "", "url": "redis://a:1"}}, "/redis/url.*redis.secret is empty"),
                ({"redis": {"secret": "", "keyPrefix": "a"}}, "/redis/keyPrefix.*redis.secret is empty"),
                ({"autoscaling": {"enabled": True}, "replicas": 3}, "/replicas.*autoscaling.enabled is true"),
                ({"autoscaling": {"maxReplicas": 3}}, "/autoscaling/maxReplicas.*enabled is not true"),
                ({"serviceAccount": {"annotations": {"a": "b"}}}, "/serviceAccount/annotations.*create is not true"),
                ({"monitoring": {"serviceMonitor": True, "podMonitor": True}}, "/monitoring/podMonitor"),
                ({"monitoring": {"namespace": "x"}}, "/monitoring/namespace.*no monitor"),
                ({"monitoring": {"podMonitor": True, "namespace": "x"}, "networkPolicy": False}, "networkPolicy is false"),
                ({"config": "include = []", "policies": "#"}, "config: include.*`policies` has no effect"),
                ({"config": "[store]\nkind = 'memory'"}, "redis.secret has no effect"),
                ({"config": "[store.redis]\nurl = 'redis://a:1'", "redis": {"url": "redis://b:1"}}, "redis.url has no effect"),
                ({"config": "[store.redis]\nurls = ['redis://a:1']", "redis": {"url": "redis://b:1"}}, "redis.url has no effect"),
                ({"config": "[store.redis]\nkey_prefix = 'a'", "redis": {"keyPrefix": "b"}}, "keyPrefix has no effect"),
                ({"config": "[client]\ntrusted_proxies = ['::1']", "trustedProxies": ["::2"]}, "trustedProxies has no effect"),
                ({"config": "[upstream]\nurl = 'h2c://127.0.0.1:9'", "app": {"port": 9}}, "app.port has no effect"),
                ({"sidecar": {"keepPreStop": True}}, "keepPreStop has no effect")):
            with self.subTest(values=values):
                self.refuses(values, message)

    def test_values_that_break_the_pod_are_refused(self):
        for values, message in (
                ({"config": "[listen]\naddress = '0.0.0.0:80'"}, "listen.address.*expected port 8080"),
                ({"config": "[admin]\nprobes = '[::]:9000'"}, "admin.probes.*expected port 9091"),
                ({"config": "[listen"}, "config: not valid TOML"),
                ({"config": "[listen.tls]\nclient_auth = 'require'", "tls": {"secret": "s"}}, "client_auth.*no client certificate"),
                ({"config": "[listen]\nproxy_protocol = 'require'"}, "proxy_protocol.*does not speak it"),
                ({"app": {"port": 8080}}, "/app/port"),
                ({"app": {"lifecycle": {"preStop": {"exec": {"command": ["/x"]}}}}}, "has a preStop hook of its own.*must wait 35 s"),
                ({"volumes": [{"name": "tidegate", "emptyDir": {}}]}, "volume tidegate.*rename it"),
                ({"sidecar": {"resources": {"limits": {"memory": "1Pi"}}}}, "limits.memory.*found 1Pi")):
            with self.subTest(values=values):
                self.refuses(values, message)
        for release in ("9lives", "a.b"):
            with self.assertRaisesRegex(AssertionError, "cannot name a Service; set `name`"):
                template(release=release)

    def test_own_configuration_brings_no_sample_policies(self):
        policy = '[[policy]]\nname = "p"\nlimit = { requests = 1, per = "1s" }'
        for config, files in (("", {"config.toml", "policies.toml"}), ("[log]\nlevel = 'debug'", {"config.toml", "policies.toml"}),
                              ("include = []", {"config.toml"}), (policy, {"config.toml"})):
            self.assertEqual(set(named(template({"config": config}), "ConfigMap", "orders-tidegate")["data"]), files)

    def test_a_complete_configuration_keeps_its_values(self):
        for overlay in ("redis-cluster", "tls"):
            text = (K8S / "overlays" / overlay / "config.toml").read_text()
            values = {"config": text, "tls": {"secret": "orders-tls" if overlay == "tls" else ""}}
            self.assertEqual(configuration(template(values)), tomllib.loads(text))

    def test_the_pod_monitor_selects_the_pods(self):
        made = template({"monitoring": {"podMonitor": True}})
        [monitor] = of_kind(made, "PodMonitor")
        self.assertTrue(selects(monitor["spec"]["selector"]["matchLabels"], pod_template(workload(made))["metadata"]["labels"]))
        with tempfile.TemporaryDirectory(dir=K8S) as folder:
            (pathlib.Path(folder) / "kustomization.yaml").write_text("resources: [../base]\ncomponents: [../components/podmonitor]\n")
            [component] = of_kind(kustomize(folder), "PodMonitor")
        self.assertEqual(monitor["spec"]["podMetricsEndpoints"], component["spec"]["podMetricsEndpoints"])

    def test_the_alerts_are_those_of_the_overlay(self):
        made = template({"monitoring": {"serviceMonitor": True, "alerts": True, "dashboard": True}})
        overlay = rendered("overlays/monitoring")
        [rules], [own] = of_kind(made, "PrometheusRule"), of_kind(overlay, "PrometheusRule")
        self.assertEqual(rules["spec"], own["spec"])
        self.assertEqual(named(made, "ConfigMap", "orders-dashboard")["data"], named(overlay, "ConfigMap", "tidegate-dashboard")["data"])

    def test_the_documented_chart_of_ones_own_gets_the_sidecar(self):
        """The files of the section "Your own chart", for each kind of workload and hook."""
        section = re.search(r"^## Your own chart\n(.*?)^## ", (REPO / PAGE).read_text(), re.MULTILINE | re.DOTALL)[1]
        files = dict(re.findall(r"`([\w./]+)`:\n\n```\w+\n(.*?)```", section, re.DOTALL))
        self.assertEqual(set(files), {"Chart.yaml", "values.yaml", "templates/deployment.yaml"})
        with tempfile.TemporaryDirectory() as folder:
            chart = pathlib.Path(folder) / "carts"
            for name, text in files.items():
                (chart / name).parent.mkdir(parents=True, exist_ok=True)
                (chart / name).write_text(text)
            (chart / "charts").mkdir()
            helm("package", str(CHART), "--destination", str(chart / "charts"))
            made = template(release="carts", chart=chart)
            deployment = named(made, "Deployment", "carts")
            spec = deployment["spec"]["template"]["spec"]
            self.assertEqual([one["name"] for one in spec["initContainers"]], ["tidegate"])
            self.assertEqual(spec["containers"][0]["lifecycle"], {"preStop": {"sleep": {"seconds": 35}}})
            self.assertEqual(spec["terminationGracePeriodSeconds"], 60)
            self.assertIn("carts-tidegate", [volume.get("configMap", {}).get("name") for volume in spec["volumes"]])
            self.assertEqual({thing["kind"] for thing in made}, {"Deployment", "ConfigMap"})
            check([named(made, "ConfigMap", "carts-tidegate")["data"]])
            kubernetes_validate.validate(deployment, KUBERNETES[0], strict=True)

            # With monitors, no NetworkPolicy isolates the pods of a chart that has none.
            made = template({"tidegate": {"monitoring": {"serviceMonitor": True}}}, "carts", chart)
            self.assertEqual({thing["kind"] for thing in made}, {"Deployment", "ConfigMap", "Service", "ServiceMonitor"})
            labels = named(made, "Deployment", "carts")["spec"]["template"]["metadata"]["labels"]
            self.assertTrue(selects(named(made, "Service", "carts-metrics")["spec"]["selector"], labels))

            text = (chart / "templates/deployment.yaml").read_text()
            own = "          lifecycle: {preStop: {exec: {command: [/leave]}}}\n"
            (chart / "templates/deployment.yaml").write_text(text.replace("          readinessProbe:", own + "          readinessProbe:"))
            with self.assertRaisesRegex(AssertionError, "Deployment carts: container app has a preStop hook of its own"):
                template(release="carts", chart=chart)
            made = template({"tidegate": {"sidecar": {"keepPreStop": True}}}, "carts", chart)
            hook = named(made, "Deployment", "carts")["spec"]["template"]["spec"]["containers"][0]["lifecycle"]
            self.assertEqual(hook, {"preStop": {"exec": {"command": ["/leave"]}}})
            for wrong, message in (("kind: Pod\nspec: {}", "no spec.template.spec.containers"), ("a: [", "not valid YAML")):
                (chart / "templates/deployment.yaml").write_text(
                    '{{- define "carts.deployment" }}\n' + wrong + '\n{{- end }}\n'
                    '{{ include "tidegate.inject" (list .Subcharts.tidegate (include "carts.deployment" .)) }}\n')
                with self.assertRaisesRegex(AssertionError, message):
                    template(release="carts", chart=chart)

    def test_the_chart_version_is_the_version_of_the_package(self):
        package = (REPO / "Cargo.toml").read_text().split('version = "')[1].split('"')[0]
        chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
        self.assertEqual((chart["version"], chart["appVersion"]), (package, package))


if __name__ == "__main__":
    unittest.main()
