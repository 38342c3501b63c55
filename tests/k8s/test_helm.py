"""Tests the Helm chart: what it renders for drawn values, what it refuses, and how other charts use it."""

import concurrent.futures
import contextlib
import json
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
# YAML takes these for other values than strings, if they are not quoted.
WORDS = ["n", "true", "null"]
# Keys of the pod's labels, and of all objects' labels, that the chart sets.
OWN_LABELS = ["app.kubernetes.io/name", "app.kubernetes.io/instance", "tidegate", "tidegate/name", "helm.sh/chart"]


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
        json.dump(values or {}, file)
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


def probes(made):
    """The HTTP requests of the app's probes."""
    app = pod(made)["containers"][0]
    return [app[kind]["httpGet"] for kind in ("startupProbe", "readinessProbe", "livenessProbe") if "httpGet" in app.get(kind, {})]


def policies(made, release="orders"):
    return tomllib.loads(named(made, "ConfigMap", f"{release}-tidegate")["data"].get("policies.toml", "")).get("policy", [])


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

    sometimes(values, name=["carts", "a", "x" * 55, *WORDS], labels=[{"release": "prometheus"}],
              trustedProxies=[["10.0.0.0/8"], ["10.0.0.0/8", "fd00::/8"]])
    values["redis"] = {"secret": pick(["", "tidegate-redis", "123"])}
    if values["redis"]["secret"]:
        sometimes(values["redis"], url=["rediss://redis.example:6380/3"], username=["", "limits"], keyPrefix=["shop:orders"])
    values["tls"] = {"secret": pick(["", "orders-tls", "1e3"])}
    sometimes(values, replicas=[0, 1, 7])
    parts = [('[listen.http]\nmax_body_bytes = "1MiB"', True), ('[shutdown]\ndelay = "1m30s"\ngrace = "1500ms"', True),
             ('[store]\nkind = "redis"\n[store.redis]\nurl = "redis://other:6379"\ninstances = 3\nkey_prefix = "own"',
              not values["redis"]["secret"] and not (values["kind"] == "None" and "replicas" in values)),
             ('[store.redis]\nurl = "redis://u:p@other:6379"', not values["redis"]["secret"]),
             ('[store.redis]\nusername_file = "/etc/user"', values["redis"]["secret"] and "username" not in values["redis"]),
             ('[store.redis]\ntopology = "cluster"\nurls = ["redis://a:6379"]',
              values["redis"]["secret"] and "url" not in values["redis"]),
             ('[admin]\naddress = "[::]:9090"\ntoken_file = "/etc/token"\nallowed_hosts = ["orders"]', True),
             ('[[policy]]\nname = "own"\nkey = ["client_ip"]\nlimit = { requests = 10, per = "1m" }', True)]
    taken = [text for text, fits in parts if fits and maybe(0.25)]
    # TOML has each table once.
    values["config"] = "\n".join(text for at, text in enumerate(taken)
                                 if "[store.redis]" not in text or not any("[store.redis]" in one for one in taken[:at]))
    if maybe(0.1):
        values["config"] = 'include = ["policies.toml"]\n' + values["config"]
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
        return pick(["orders", "r2", *WORDS]), values
    sometimes(values, networkPolicy=[False, True], podDisruptionBudget=[False, True])
    if monitoring.keys() & {"serviceMonitor", "podMonitor"} and values.get("networkPolicy", True):
        sometimes(monitoring, namespace=["observability", "123"])
    if "replicas" not in values:
        sometimes(values, autoscaling=[
            {"enabled": True}, {"enabled": True, "minReplicas": 3, "maxReplicas": 30},
            {"enabled": True, "targetMemoryUtilizationPercentage": 70},
            {"enabled": True, "targetCPUUtilizationPercentage": 50, "targetMemoryUtilizationPercentage": 70}, {"enabled": False}])
    app = values["app"] = {}
    sometimes(app, image=["registry.example/carts:1"], imagePullPolicy=["Always"], command=[["/carts"]], args=[["--fast"], []],
              port=[5000], env=[[{"name": "A", "value": "b"}]], envFrom=[[{"secretRef": {"name": "s"}}]],
              readinessPath=["/ready?full=1", "/a:b", ""],
              livenessProbe=[{"httpGet": {"path": "/live?x=*", "port": 8080}}, {"httpGet": {"path": "/", "port": 5001}}],
              startupProbe=[{"exec": {"command": ["/ok"]}}], resources=[{"limits": {"memory": "1Gi"}}],
              lifecycle=[{"preStop": {"sleep": {"seconds": 5}}}, {"preStop": {"sleep": {"seconds": 300}}},
                         {"postStart": {"exec": {"command": ["/warm"]}}}, {"preStop": {"exec": {"command": ["/leave"]}}}],
              securityContext=[{"runAsUser": 7}], volumeMounts=[[{"name": "data", "mountPath": "/data"}]])
    if "exec" in app.get("lifecycle", {}).get("preStop", {}):
        values["sidecar"]["keepPreStop"] = True
    if "volumeMounts" in app:
        values["volumes"] = [{"name": "data", "emptyDir": {}}]
    sometimes(values, service=[{"type": "LoadBalancer", "annotations": {"a": "b"}}, {"name": "yes", "port": 8443}],
              serviceAccount=[{"create": True, "annotations": {"a": "b"}}, {"name": "123"}, {"automount": True}],
              annotations=[{"a": "b"}], podAnnotations=[{"c": "d"}], podLabels=[{"e": "f"}], imagePullSecrets=[[{"name": "pull"}]],
              podSecurityContext=[{"fsGroup": 5}], nodeSelector=[{"disk": "ssd"}], priorityClassName=["high", "on"],
              tolerations=[[{"operator": "Exists"}]],
              affinity=[{"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
                  {"matchExpressions": [{"key": "a", "operator": "Exists"}]}]}}}],
              topologySpreadConstraints=[[{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}]])
    return pick(["orders", "r2", *WORDS]), values


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
        self.assertEqual(store["kind"], "redis" if secret or "redis" in own else "memory")
        self.assertEqual("redis" in store, store["kind"] == "redis")
        if "redis" in store:
            scaling = values.get("autoscaling", {})
            replicas = scaling.get("maxReplicas", 10) if scaling.get("enabled") else values.get("replicas", 2)
            expected = {"instances": max(1, replicas), "key_prefix": values["redis"].get("keyPrefix", name)} | own.get("redis", {})
            self.assertLessEqual(expected.items(), store["redis"].items())
            self.assertNotEqual("url" in store["redis"], "urls" in store["redis"])
            self.assertEqual("password_file" in store["redis"], bool(secret))

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
        paths = [path, values["app"].get("livenessProbe", {}).get("httpGet", {}).get("path")]
        self.assertEqual([probe["path"] for probe in probes(made)], [one for one in paths if one])
        for probe in probes(made):
            self.assertEqual(probe.get("scheme", "HTTP"), "HTTPS" if tls and probe["port"] == 8080 else "HTTP")
        mounts = {mount["mountPath"] for mount in sidecar(made)["volumeMounts"]}
        self.assertEqual("/etc/tidegate-tls" in mounts, tls)

    @each_workload
    def test_policies_exempt_the_probes_through_the_proxy(self, name, _values, made):
        paths = {probe["path"].partition("?")[0] for probe in probes(made) if probe["port"] == 8080}
        exempt = [policy["match"]["path"] for policy in policies(made, name) if policy["name"] == "health"]
        self.assertEqual(exempt, [sorted(paths)] if paths else [])

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
        at_container = {"image", "imagePullPolicy", "command", "env", "envFrom", "startupProbe",
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
            for text in thing["metadata"]["labels"].values():
                self.assertIsInstance(text, str)
        if values["kind"] == "None":
            return
        volumes = {volume["name"]: volume for volume in pod(made)["volumes"]}
        for container in (sidecar(made), *pod(made)["containers"]):
            for mount in container.get("volumeMounts", []):
                self.assertIn(mount["name"], volumes)
        self.assertEqual(volumes["tidegate"]["configMap"]["name"], f"{name}-tidegate")
        for volume, secret in (("tidegate-redis", values["redis"]["secret"]), ("tidegate-tls", values["tls"]["secret"])):
            self.assertEqual(volumes.get(volume), {"name": volume, "secret": {"secretName": secret}} if secret else None)

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
            if file == "policies.toml":
                base_file["policy"][0]["match"]["path"] = [base_file["policy"][0]["match"]["path"]]
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
                ({"kind": "None", "replicas": 2, "config": "[store.redis]\ninstances = 3"}, "replicas has no effect.*store.redis.instances"),
                ({"enabled": False}, "enabled: false has no effect.*condition"),
                *(({knob: {label: "x"}}, f"/{knob}/.*the chart sets it") for knob in ("labels", "podLabels") for label in OWN_LABELS),
                ({"podAnnotations": {"tidegate/config": "x"}}, "/podAnnotations/.*the chart sets it"),
                ({"tls": {"secret": "s"}, "config": "[listen.tls]\ncert = '/c'\nkey = '/k'"}, "tls.secret has no effect.*listen.tls.cert"),
                ({"config": "[store.redis]\npassword_file = '/p'"}, "redis.secret has no effect.*password_file"),
                ({"redis": {"username": "a"}, "config": "[store.redis]\nusername_file = '/u'"}, "redis.username has no effect.*username_file"),
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
                ({"policies": "[[policy"}, "policies: not valid TOML"),
                *(({"trustedProxies": ["::1", text]}, f'trustedProxies: found "{text}"; expected an address or a network')
                  for text in ("nonsense", "10.0.0.0/33", "10.0.0.256", "fd00::/129", "")),
                ({"redis": {"keyPrefix": "a b"}}, "/redis/keyPrefix"),
                ({"redis": {"keyPrefix": "a" * 65}}, "/redis/keyPrefix"),
                ({"redis": {"secret": "A_b"}}, "/redis/secret"),
                ({"redis": {"url": "redis://h/x"}}, "/redis/url"),
                ({"redis": {"url": "redis://u:p@h"}}, "URL of Redis holds a login.*redis.username"),
                ({"config": "[store.redis]\nurls = ['redis://:p@h']\ntopology = 'cluster'"}, "URL of Redis holds a login"),
                ({"tls": {"secret": "a b"}}, "/tls/secret"),
                ({"app": {"readinessPath": "/a: b"}}, "/app/readinessPath"),
                ({"app": {"readinessPath": "/a*"}}, "/app/readinessPath"),
                ({"app": {"livenessProbe": {"httpGet": {"path": "a", "port": 8080}}}}, "/app/livenessProbe/httpGet/path"),
                ({"replicas": 200000}, "/replicas"),
                ({"autoscaling": {"enabled": True, "minReplicas": 20}}, r"minReplicas \(20\) is more than .*maxReplicas \(10\)"),
                ({"autoscaling": {"enabled": True, "minReplicas": 5, "maxReplicas": 3}}, r"minReplicas \(5\) is more than .*maxReplicas \(3\)"),
                ({"autoscaling": {"enabled": True, "maxReplicas": 1}}, r"minReplicas \(2\) is more than .*maxReplicas \(1\)"),
                ({"service": {"name": "a b"}}, "/service/name"),
                ({"labels": {"team": "a b"}}, "/labels/team"),
                ({"sidecar": {"resources": {"limits": {"memory": 256}}}}, "limits.memory.*found 256"),
                ({"tls": {"secret": "s"}, "app": {"livenessProbe": {"grpc": {"port": 8080}}}}, "gRPC probes.*do not use TLS"),
                ({"config": "[listen]\nproxy_protocol = 'require'", "app": {"readinessPath": "", "startupProbe": {
                    "httpGet": {"path": "/", "port": 8080}}}}, "proxy_protocol.*does not speak it"),
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

    def test_own_policies_keep_the_exemption_of_the_probes(self):
        policy = '[[policy]]\nname = "%s"\nlimit = { requests = 1, per = "1s" }'
        for values, names in (({}, ["health", "per-client"]),
                              ({"config": "[log]\nlevel = 'debug'"}, ["health", "per-client"]),
                              ({"config": 'include = ["policies.toml"]'}, ["health", "per-client"]),
                              ({"config": "include = []"}, []),
                              ({"config": policy % "p"}, ["health"]),
                              ({"config": policy % "health"}, []),
                              ({"policies": policy % "p"}, ["health", "p"]),
                              ({"policies": policy % "health"}, ["health"]),
                              ({"policies": policy % "p", "app": {"readinessPath": ""}}, ["p"]),
                              ({"policies": policy % "p", "kind": "None"}, ["health", "p"])):
            with self.subTest(values=values):
                made = template(values)
                self.assertEqual([one["name"] for one in policies(made)], names)
                self.assertEqual(configuration(made).get("include", []), ["policies.toml"] if names else [])

    def test_own_policies_are_unchanged(self):
        """All examples of the recipes. The chart writes their TOML anew."""
        recipes = re.findall(r"^```toml\n(.*?)^```", (REPO / "docs/RECIPES.md").read_text(), re.MULTILINE | re.DOTALL)
        examples = [text for text in recipes if tomllib.loads(text).get("policy")]
        self.assertGreater(len(examples), 20)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            for text, made in zip(examples, pool.map(lambda text: template({"policies": text}), examples)):
                [data] = [thing["data"] for thing in of_kind(made, "ConfigMap")]
                written, own = tomllib.loads(data["policies.toml"]), tomllib.loads(text)
                written["policy"] = [one for one in written["policy"] if one in own["policy"] or one["name"] != "health"]
                self.assertEqual(written, own)

    def test_the_notes_say_where_counters_are(self):
        for values, alone in (("redis.secret=a", False), ("redis.secret=", True),
                              ("redis.secret=,config=[store.redis]\nurl = 'redis://a'", False)):
            notes = helm("install", "orders", str(CHART), "--dry-run=client", "--set", values).split("NOTES:")[1]
            self.assertEqual("Each pod counts alone, in memory" in notes, alone, values)

    def test_a_complete_configuration_keeps_its_values(self):
        for overlay in ("redis-cluster", "tls"):
            text = (K8S / "overlays" / overlay / "config.toml").read_text()
            values = {"config": text, "tls": {"secret": "orders-tls" if overlay == "tls" else ""}}
            made = template(values)
            self.assertEqual(configuration(made), tomllib.loads(text))
            check([named(made, "ConfigMap", "orders-tidegate")["data"]])

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

    @contextlib.contextmanager
    def documented_chart(self, *sections):
        """A folder with the files of sections of the page."""
        page = (REPO / PAGE).read_text()
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "tidegate").symlink_to(REPO)
            chart = pathlib.Path(folder) / "carts"
            for section in sections:
                text = re.search(rf"^##+ {section}\n(.*?)^##", page, re.MULTILINE | re.DOTALL)[1]
                for name, content in re.findall(r"`([\w./]+)`:\n\n```\w+\n(.*?)```", text, re.DOTALL):
                    (chart / name).parent.mkdir(parents=True, exist_ok=True)
                    (chart / name).write_text(content)
            helm("dependency", "build", str(chart))
            yield chart

    def test_the_documented_chart_of_ones_own_gets_the_sidecar(self):
        with self.documented_chart("Your own chart") as chart:
            made = template(release="carts", chart=chart)
            deployment = named(made, "Deployment", "carts")
            spec = deployment["spec"]["template"]["spec"]
            self.assertEqual([one["name"] for one in spec["initContainers"]], ["tidegate"])
            self.assertEqual(spec["containers"][0]["lifecycle"], {"preStop": {"sleep": {"seconds": 35}}})
            self.assertEqual(spec["terminationGracePeriodSeconds"], 60)
            self.assertIn("carts-tidegate", [volume.get("configMap", {}).get("name") for volume in spec["volumes"]])
            self.assertEqual({thing["kind"] for thing in made}, {"Deployment", "ConfigMap"})
            self.assertEqual([one["name"] for one in policies(made, "carts")], ["health", "per-client"])
            check([named(made, "ConfigMap", "carts-tidegate")["data"]])
            kubernetes_validate.validate(deployment, KUBERNETES[0], strict=True)

            # Without Redis, the Deployment still has its number of replicas.
            made = template({"tidegate": {"redis": {"secret": ""}}}, "carts", chart)
            self.assertEqual(named(made, "Deployment", "carts")["spec"]["replicas"], 3)
            check([named(made, "ConfigMap", "carts-tidegate")["data"]])

            # With monitors, no NetworkPolicy isolates the pods of a chart that has none.
            made = template({"tidegate": {"monitoring": {"serviceMonitor": True}}}, "carts", chart)
            self.assertEqual({thing["kind"] for thing in made}, {"Deployment", "ConfigMap", "Service", "ServiceMonitor"})
            labels = named(made, "Deployment", "carts")["spec"]["template"]["metadata"]["labels"]
            self.assertTrue(selects(named(made, "Service", "carts-metrics")["spec"]["selector"], labels))

            # Without `kind: None`, it would be a second workload.
            for kind in ("Deployment", "StatefulSet"):
                with self.assertRaisesRegex(AssertionError, "expected `kind: None`"):
                    template({"tidegate": {"kind": kind}}, "carts", chart)
            own_app = {"kind": "Deployment", "name": "other", "app": {"image": "registry.example/other:1"}}
            self.assertEqual(len(of_kind(template({"tidegate": own_app}, "carts", chart), "Deployment")), 2)

    def test_hooks_of_a_wrapped_workload_are_kept(self):
        with self.documented_chart("Your own chart") as chart:
            text = (chart / "templates/deployment.yaml").read_text()
            own = "          lifecycle: {preStop: {exec: {command: [/leave]}}}\n"
            (chart / "templates/deployment.yaml").write_text(text.replace("          readinessProbe:", own + "          readinessProbe:"))
            with self.assertRaisesRegex(AssertionError, "Deployment carts: container app has a preStop hook of its own"):
                template(release="carts", chart=chart)
            made = template({"tidegate": {"sidecar": {"keepPreStop": True}}}, "carts", chart)
            hook = named(made, "Deployment", "carts")["spec"]["template"]["spec"]["containers"][0]["lifecycle"]
            self.assertEqual(hook, {"preStop": {"exec": {"command": ["/leave"]}}})

    def test_probes_of_a_wrapped_workload_speak_as_the_proxy_does(self):
        probe = "readinessProbe:\n            httpGet:\n              path: /healthz\n              port: 8080\n"
        ports = "ports: [{name: web, containerPort: 8080}]\n          "
        with self.documented_chart("Your own chart") as chart:
            text = (chart / "templates/deployment.yaml").read_text()
            self.assertIn(probe, text)
            for more, tls, scheme in (("", "s", "HTTPS"), ("", "", None), ("          scheme: HTTP\n", "s", "HTTP"),
                                      ("          host: 10.0.0.1\n", "s", None)):
                for kind in ("readinessProbe", "livenessProbe", "startupProbe"):
                    for port, has_ports in (("8080", False), ('"web"', True)):
                        own = probe.replace("readinessProbe", kind).replace("8080", port) + (more and "    " + more)
                        (chart / "templates/deployment.yaml").write_text(text.replace(probe, ports * has_ports + own))
                        made = template({"tidegate": {"tls": {"secret": tls}}}, "carts", chart)
                        [request] = probes(made)
                        self.assertEqual(request.get("scheme"), scheme, (own, tls))
            (chart / "templates/deployment.yaml").write_text(text.replace(probe, probe.replace("8080", "3001")))
            self.assertNotIn("scheme", probes(template({"tidegate": {"tls": {"secret": "s"}}}, "carts", chart))[0])
            (chart / "templates/deployment.yaml").write_text(text)
            with self.assertRaisesRegex(AssertionError, "client_auth.*Deployment carts.*no client certificate"):
                template({"tidegate": {"tls": {"secret": "s"}, "config": "[listen.tls]\nclient_auth = 'require'"}}, "carts", chart)

    def test_what_is_no_workload_is_not_wrapped(self):
        service = "apiVersion: v1\nkind: Service\nmetadata: {name: carts}\n"
        with self.documented_chart("Your own chart") as chart:
            text = (chart / "templates/deployment.yaml").read_text()
            own = re.search(r'define "carts.deployment" }}\n(.*?){{- end }}', text, re.DOTALL)[1]
            found = re.escape("found 2 documents, separated by ---, the first of them Deployment carts; expected only the workload")
            for wrong, message in (("kind: Pod\nspec: {}", "no spec.template.spec.containers"), ("a: [", "not valid YAML"),
                                   (f"{own}---\n{service}", found), (f"---\n# Both.\n{own}--- # Next.\n{service}---\n", found)):
                (chart / "templates/deployment.yaml").write_text(text.replace(own, wrong))
                with self.assertRaisesRegex(AssertionError, message):
                    template(release="carts", chart=chart)
            for right in (f"---\n{own}", f"# Mine.\n---\n{own}---\n# The end.\n"):
                (chart / "templates/deployment.yaml").write_text(text.replace(own, right))
                self.assertEqual(len(template(release="carts", chart=chart)), 2)
            (chart / "templates/deployment.yaml").write_text(text.replace(".Subcharts.tidegate", ".Subcharts.tidgate"))
            with self.assertRaisesRegex(AssertionError, "tidegate.inject: .*expected .Subcharts.NAME"):
                template(release="carts", chart=chart)

    def test_the_documented_chart_of_two_services(self):
        [calls] = re.findall(r"^```yaml\n({{ include.*?)^```", (REPO / PAGE).read_text(), re.MULTILINE | re.DOTALL)
        with self.documented_chart("Your own chart", "Two services") as chart:
            file = chart / "templates/deployment.yaml"
            definition = file.read_text().split("{{ include")[0]
            file.write_text("".join(definition.replace("carts", name).replace("tidegate", name) for name in ("carts", "orders")) + calls)
            made = template(release="shop", chart=chart)
            names = {"shop-carts", "shop-orders"}
            self.assertEqual({(thing["kind"], thing["metadata"]["name"]) for thing in of_kind(made, "ConfigMap")},
                             {("ConfigMap", f"{name}-tidegate") for name in names})
            self.assertEqual({configuration(made, name)["store"]["redis"]["key_prefix"] for name in names}, names)
            for name in ("carts", "orders"):
                template_of = pod_template(named(made, "Deployment", name))
                self.assertEqual(template_of["spec"]["volumes"][0]["configMap"]["name"], f"shop-{name}-tidegate")
                self.assertEqual(template_of["metadata"]["labels"]["tidegate/name"], f"shop-{name}")
            check(thing["data"] for thing in of_kind(made, "ConfigMap"))

    def test_the_chart_version_is_the_version_of_the_package(self):
        package = (REPO / "Cargo.toml").read_text().split('version = "')[1].split('"')[0]
        chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
        self.assertEqual((chart["version"], chart["appVersion"]), (package, package))


if __name__ == "__main__":
    unittest.main()
