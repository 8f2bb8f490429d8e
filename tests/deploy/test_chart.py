"""The Helm chart: what its manifests promise, and that they fit the service, its settings and its metrics.

The manifests are those of tests/deploy/rendered; where Helm is installed, they are rendered anew and must be the same.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from service.settings import Settings
from tests import ROOT
from tests.certificates import Authority
from tests.deploy.chart import CASES, CHART, KEY, RENDERED, digest, manifests, named, render, run_helm, without_copies
from tests.repository.test_watching import RUNBOOKS, exposed, program

VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
ADAPTER: list[dict[str, Any]] = yaml.safe_load((ROOT / "deploy/helm/prometheus-adapter.yaml").read_text())["rules"]["custom"]
Json = dict[str, Any]


def overridden(values: Json, given: Json) -> Json:
    """The values of the chart with those given, as Helm merges them: maps key by key, everything else as a whole."""
    merged = {key: overridden(values[key], value) if isinstance(values.get(key), dict) else value for key, value in given.items()}
    return values | merged


def workloads(case: str) -> dict[str, Json]:
    return named(case, "StatefulSet") | named(case, "Deployment")


def pod(workload: Json) -> Json:
    spec: Json = workload["spec"]["template"]["spec"]
    return spec


def container(workload: Json) -> Json:
    [only] = pod(workload)["containers"]
    found: Json = only
    return found


def environment(case: str, workload: Json) -> dict[str, str]:
    """What the chart sets in a container by itself: not what comes from Secrets."""
    maps = [source["configMapRef"]["name"] for source in container(workload)["envFrom"] if "configMapRef" in source]
    found = {name: value for settings in maps for name, value in named(case, "ConfigMap")[settings]["data"].items()}
    return found | {variable["name"]: variable["value"] for variable in container(workload)["env"] if "value" in variable}


ALL = [(case, name) for case in CASES for name in workloads(case)]

# -- values ------------------------------------------------------------------------------------------------------------------------------


def test_the_schema_knows_every_value_and_no_other_and_takes_every_case() -> None:
    validator = jsonschema_rs.validator_for(SCHEMA)
    for name, given in CASES.items():
        assert [str(error) for error in validator.iter_errors(overridden(VALUES, given))] == [], name
    described = objects(SCHEMA, VALUES)
    assert len(described) >= 15
    for path, schema, values in described:
        assert schema["additionalProperties"] is False, path
        optional = {"global"} if path == "" else {"ephemeral-storage"} if path.endswith(".requests") else set()
        assert schema["properties"].keys() - optional == values.keys(), path
    project = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert project
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"] == project[1]


def objects(schema: Json, values: Json, path: str = "") -> list[tuple[str, Json, Json]]:
    """Every object with keys of its own in the schema, beside the values that it describes."""
    found = [(path, schema, values)]
    for key, below in schema["properties"].items():
        if "$ref" in below:
            below = SCHEMA["$defs"]["part"]["properties"].get(key, {})
        if "properties" in below and key in values:
            found += objects(below, values[key], f"{path}.{key}")
    return found


@pytest.mark.parametrize(
    "wrong",
    [
        {"shard": {"count": 2}},
        {"shards": {"count": -1}},
        {"monitoring": {"objectives": {"errorRatio": 99.9}}},
        {"settings": {"ESPALIER_PROBE_PER_S": "0"}},
        {"shards": {"resources": {"requests": {"cpu": "two"}}}},
        {"model": "../models"},
        {"models": {"store": "ftp://bucket"}},
        {"settings": {"ESPALIER_ADMIN_KEYS": KEY}},
        {"router": {"settings": {"ESPALIER_PORT": "80"}}},
        {"image": {"digest": "latest"}},
    ],
    ids=str,
)
def test_a_wrong_value_is_refused(wrong: Json) -> None:
    assert not jsonschema_rs.validator_for(SCHEMA).is_valid(overridden(VALUES, wrong))


# -- pods --------------------------------------------------------------------------------------------------------------------------------


CONFINED: Json = {
    "runAsNonRoot": True,
    "runAsUser": 10001,  # the image's user
    "runAsGroup": 10001,
    "fsGroup": 10001,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
UNPRIVILEGED: Json = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True}
PROBES = {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
"""Restarts go by /livez, routing by /readyz."""
ZONES_AND_HOSTS = ["topology.kubernetes.io/zone", "kubernetes.io/hostname"]


@pytest.mark.parametrize(("case", "name"), ALL)
def test_every_pod_is_confined_limited_spread_probed_drained_and_set_as_the_service_knows(
    case: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    workload = workloads(case)[name]
    spec, only, selector = pod(workload), container(workload), workload["spec"]["selector"]["matchLabels"]
    assert (spec["securityContext"], only["securityContext"]) == (CONFINED, UNPRIVILEGED)
    assert (spec["automountServiceAccountToken"], spec["enableServiceLinks"]) == (False, False)
    assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
    assert "hostPath" not in str(spec["volumes"])
    assert only["resources"]["requests"].keys() == only["resources"]["limits"].keys() == {"cpu", "memory"}
    assert {probe: only[probe]["httpGet"]["path"] for probe in PROBES} == PROBES
    assert {port["name"]: port["containerPort"] for port in only["ports"]} == {"http": 8000}
    spread = {constraint["topologyKey"]: constraint["labelSelector"]["matchLabels"] for constraint in spec["topologySpreadConstraints"]}
    assert spread == dict.fromkeys(ZONES_AND_HOSTS, selector)
    labels = {other: found["spec"]["template"]["metadata"]["labels"] for other, found in workloads(case).items()}
    assert [other for other, found in labels.items() if selector.items() <= found.items()] == [name], "it selects its own pods alone"
    workload = workloads(case)[name]
    delay_s, drain_s = (float(environment(case, workload)[f"ESPALIER_{setting}_S"]) for setting in ("DRAIN_DELAY", "DRAIN"))
    assert delay_s > 0
    assert pod(workload)["terminationGracePeriodSeconds"] > delay_s + drain_s + 10
    known = {f"ESPALIER_{field.upper()}" for field in Settings.model_fields}
    written = environment(case, workloads(case)[name])
    secret = {variable["name"] for variable in container(workloads(case)[name])["env"] if "valueFrom" in variable}
    ours = {variable for variable in written.keys() | secret if variable.startswith("ESPALIER_")}
    assert ours - known == set()
    authority = Authority(tmp_path)
    files = dict(zip(("tls.crt", "tls.key", "ca.crt"), (*authority.signs("tls"), authority.ca), strict=True))
    for variable, value in written.items():
        folder, _, file = value.partition("/etc/espalier-tls/")
        monkeypatch.setenv(variable, value if folder or not file else str(files[file]))
    assert Settings().log_format == "json"


@pytest.mark.parametrize("case", CASES)
def test_what_a_pod_refers_to_is_there(case: str) -> None:
    for name, workload in workloads(case).items():
        maps = {source["configMapRef"]["name"] for source in container(workload)["envFrom"] if "configMapRef" in source}
        maps |= {volume["configMap"]["name"] for volume in pod(workload)["volumes"] if "configMap" in volume}
        assert maps <= named(case, "ConfigMap").keys(), name
        assert workload["spec"].get("serviceName", name) in named(case, "Service"), name
        volumes = {volume["name"] for volume in pod(workload)["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
        assert {mount["name"] for mount in container(workload)["volumeMounts"]} == volumes, name
        account = pod(workload)["serviceAccountName"]
        assert account in named(case, "ServiceAccount") or account == "default", name
        for variable in container(workload)["env"]:
            if "valueFrom" in variable:
                assert variable["valueFrom"]["secretKeyRef"]["optional"] is True


# -- shards and router -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("case", "count", "routers"), [("store", 3, 2), ("existing", 2, 1)])
def test_each_shard_has_replicas_a_headless_service_and_a_budget_and_routers_know_its_name(case: str, count: int, routers: int) -> None:
    shards = {name: workload for name, workload in workloads(case).items() if "ESPALIER_SHARD" in environment(case, workload)}
    assert sorted(environment(case, workload)["ESPALIER_SHARD"] for workload in shards.values()) == [str(index) for index in range(count)]
    for name, workload in shards.items():
        labels = workload["spec"]["template"]["metadata"]["labels"].items()
        service = named(case, "Service")[name]["spec"]
        assert service["clusterIP"] == "None"
        assert service["selector"].items() <= labels
        assert service["ports"] == [{"name": "http", "port": 8000, "targetPort": "http"}]
        budget = named(case, "PodDisruptionBudget")[name]["spec"]
        assert (budget["maxUnavailable"], budget["selector"]["matchLabels"].items() <= labels) == (1, True)
        assert workload["spec"].get("replicas", 2) >= 2
    [fleet] = [data for name, data in named(case, "ConfigMap").items() if name.endswith("-fleet")]
    written = re.findall(r'"dns\+https?://([\w-]+)\.(\w+)\.svc:8000"', fleet["data"]["router.toml"])
    assert sorted(written) == sorted((name, "shop") for name in shards)
    commands = [container(workload).get("command") for name, workload in workloads(case).items() if name not in shards]
    assert commands == [["python", "-m", "service.router", "--config", "/etc/espalier/router.toml"]] * routers


def test_each_pod_gets_the_keys_of_its_part_which_are_in_the_secret_alone() -> None:
    by_name = {
        name: {variable["name"] for variable in container(workload)["env"] if "valueFrom" in variable}
        for name, workload in workloads("store").items()
    }
    readers = {"ESPALIER_RETRIEVE_KEYS", "ESPALIER_ADMIN_KEYS", "ESPALIER_INTERNAL_KEYS"}
    assert by_name == {
        **{f"r-espalier-shard-{index}": {"ESPALIER_INTERNAL_KEYS"} for index in range(3)},
        "r-espalier-router": readers | {"ESPALIER_FOLLOW_KEY"},
        "r-espalier-writer": readers | {"ESPALIER_WRITE_KEYS"},
    }
    follows = {name: environment("store", workload).get("ESPALIER_FOLLOW") for name, workload in workloads("store").items()}
    assert {name: address for name, address in follows.items() if address} == {
        "r-espalier-router": "https://r-espalier-writer.shop.svc:8000"
    }
    [secret] = named("store", "Secret").values()
    assert set().union(*by_name.values()) == secret["stringData"].keys()
    assert named("existing", "Secret") == named("defaults", "Secret") == {}
    assert "keys-of-search" in json.dumps(workloads("existing"))
    rest = [manifest for manifest in manifests("store") if manifest["kind"] != "Secret"]
    assert KEY not in json.dumps(rest)


def test_only_routers_and_prometheus_reach_a_shard() -> None:
    policies = named("store", "NetworkPolicy")
    shard = policies["r-espalier-shards"]["spec"]
    [rule] = shard["ingress"]
    peer, prometheus = rule["from"]
    assert prometheus == {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    assert peer["podSelector"]["matchExpressions"] == [
        {"key": "app.kubernetes.io/component", "operator": "In", "values": ["router", "writer"]}
    ]
    assert shard["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "shard"
    assert shard["policyTypes"] == ["Ingress", "Egress"]
    [router] = policies["r-espalier-router"]["spec"]["ingress"]
    assert {"namespaceSelector": {"matchLabels": {"shop": "yes"}}} in router["from"]
    assert named("existing", "NetworkPolicy") == {}


# -- without shards ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["defaults", "single", "live"])
def test_without_shards_one_deployment_has_a_service_a_budget_a_policy_and_the_image_s_own_command(case: str) -> None:
    [(name, workload)] = workloads(case).items()
    assert (workload["kind"], name) == ("Deployment", "r-espalier")
    assert "command" not in container(workload)
    labels = workload["spec"]["template"]["metadata"]["labels"].items()
    service = named(case, "Service")[name]["spec"]
    assert service["selector"].items() <= labels
    assert service["ports"] == [{"name": "http", "port": 80, "targetPort": "http"}]
    assert named(case, "PodDisruptionBudget")[name]["spec"]["selector"]["matchLabels"].items() <= labels
    [policy] = named(case, "NetworkPolicy").values()
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels
    assert all(not name.endswith("-fleet") for name in named(case, "ConfigMap"))


def test_without_shards_a_pod_has_a_copy_of_the_store_or_a_claim_and_one_pod_writes_a_journal() -> None:
    [copies] = workloads("single").values()
    [volume] = [volume for volume in pod(copies)["volumes"] if volume["name"] == "models"]
    assert volume["ephemeral"]["volumeClaimTemplate"]["spec"]["resources"] == {"requests": {"storage": "4Gi"}}
    assert environment("single", copies)["ESPALIER_STORE"] == "s3://bucket/espalier"
    assert copies["spec"]["strategy"] == {"rollingUpdate": {"maxUnavailable": 0}}
    [writer] = workloads("live").values()
    [volume] = [volume for volume in pod(writer)["volumes"] if volume["name"] == "models"]
    assert volume["persistentVolumeClaim"] == {"claimName": "models"}
    assert {mount["name"]: mount.get("readOnly", False) for mount in container(writer)["volumeMounts"]} == {"tmp": False, "models": False}
    assert (writer["spec"]["replicas"], writer["spec"]["strategy"]) == (1, {"type": "Recreate"})
    keys = {variable["name"] for variable in container(writer)["env"] if "valueFrom" in variable}
    assert keys == {"ESPALIER_RETRIEVE_KEYS", "ESPALIER_ADMIN_KEYS", "ESPALIER_WRITE_KEYS"}
    for workload in workloads("existing").values():
        [volume] = [volume for volume in pod(workload)["volumes"] if volume["name"] == "models"]
        assert volume["persistentVolumeClaim"] == {"claimName": "espalier-models", "readOnly": True}


def test_an_ingress_passes_retrieval_to_the_service_and_nothing_else() -> None:
    [ingress] = named("single", "Ingress").values()
    [rule] = ingress["spec"]["rules"]
    assert rule["host"] == "shop.example"
    [path] = rule["http"]["paths"]
    assert (path["path"], path["pathType"]) == ("/retrieve", "Prefix")
    backend = path["backend"]["service"]
    assert backend["port"]["name"] in {port["name"] for port in named("single", "Service")[backend["name"]]["spec"]["ports"]}
    assert ingress["spec"]["tls"] == [{"hosts": ["shop.example"], "secretName": "shop-tls"}]
    assert [case for case in CASES if named(case, "Ingress")] == ["single"]


# -- scaling and watching ----------------------------------------------------------------------------------------------------------------


def test_autoscalers_the_adapter_monitors_and_rules_ask_for_what_is_exposed() -> None:
    given = {rule["name"]["as"] for rule in ADAPTER}
    scalers = named("store", "HorizontalPodAutoscaler")
    assert scalers.keys() == workloads("store").keys() - {"r-espalier-writer"}
    asked = {metric["pods"]["metric"]["name"] for scaler in scalers.values() for metric in scaler["spec"]["metrics"] if "pods" in metric}
    assert asked == given == {"espalier_engine_busy", "espalier_queue_depth"}
    for name, scaler in scalers.items():
        assert scaler["spec"]["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name}
        assert "replicas" not in workloads("store")[name]["spec"]  # each upgrade would undo what the autoscaler did
    known = exposed()
    for rule in ADAPTER:
        queried = re.match(r"\w+", rule["seriesQuery"])
        assert queried is not None
        assert queried[0] in known
        for series in re.findall(r"\w+(?=\{<<\.LabelMatchers>>\})", rule["metricsQuery"]):
            assert series in known, rule["name"]["as"]
    [scaler] = named("single", "HorizontalPodAutoscaler").values()
    assert scaler["spec"]["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "r-espalier"}
    assert "replicas" not in workloads("single")["r-espalier"]["spec"]
    monitors = named("store", "PodMonitor")
    jobs = {
        relabeling["replacement"]: set(monitor["spec"]["selector"]["matchExpressions"][0]["values"])
        for monitor in monitors.values()
        for relabeling in monitor["spec"]["podMetricsEndpoints"][0]["relabelings"]
    }
    assert jobs == {"espalier": {"router", "writer"}, "espalier-shards": {"shard"}}
    assert all(monitor["metadata"]["labels"]["release"] == "prometheus" for monitor in monitors.values())
    for ours, theirs in (("rules", "docker/prometheus/rules"), ("dashboards", "docker/grafana/dashboards")):
        assert (CHART / "monitoring" / ours).resolve() == ROOT / theirs


PROMETHEUS_OF: dict[str, str] = {"defaults": "monitoring", "single": "watch", "live": "monitoring", "store": "monitoring"}


@pytest.mark.parametrize("case", PROMETHEUS_OF)
def test_the_policy_lets_the_namespace_of_prometheus_in_and_the_probe_runs(case: str) -> None:
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": PROMETHEUS_OF[case]}}}
    for name, policy in named(case, "NetworkPolicy").items():
        [rule] = policy["spec"]["ingress"]
        assert peer in rule["from"], name
    for name, workload in workloads(case).items():
        assert float(environment(case, workload)["ESPALIER_PROBE_PER_S"]) > 0, name


def test_a_pod_monitor_selects_the_pods_of_its_case() -> None:
    for case in ("single", "store"):
        labels = [workload["spec"]["template"]["metadata"]["labels"] for workload in workloads(case).values()]
        [*selectors] = [monitor["spec"]["selector"] for monitor in named(case, "PodMonitor").values()]
        for own in labels:
            component = own["app.kubernetes.io/component"]
            found = [one for one in selectors if component in one["matchExpressions"][0]["values"]]
            assert len(found) == 1, component
            assert found[0]["matchLabels"].items() <= own.items()


def chart_groups() -> list[Json]:
    """The groups of rules that the chart writes itself."""
    [rule] = named("single", "PrometheusRule").values()
    groups: list[Json] = rule["spec"]["groups"]
    return groups


def test_the_objectives_of_the_chart_are_the_rules_of_the_file_with_its_own_numbers_and_namespace() -> None:
    [file] = yaml.safe_load((ROOT / "docker/prometheus/rules/objectives.yml").read_text())["groups"]
    own = chart_groups()[0]
    assert own["name"] == file["name"]
    written = {rule["record"]: rule["expr"].replace(', namespace="shop"', "").split(" * ") for rule in own["rules"]}
    assert written.keys() == {rule["record"] for rule in file["rules"]}
    assert [number for number, _ in written.values()] == ["0.01", "0.2", str(9 * 86400)]
    assert [[rest] for _, rest in written.values()] == [rule["expr"].split(" * ")[1:] for rule in file["rules"]]
    assert all('namespace="shop"' in rule["expr"] for rule in own["rules"])
    defaults = VALUES["monitoring"]["objectives"]
    numbers = [float(rule["expr"].split(" * ")[0]) for rule in file["rules"]]
    assert numbers == [defaults["errorRatio"], defaults["latencySeconds"], float("inf")]
    assert VALUES["monitoring"]["runbook"] == RUNBOOKS


def test_an_autoscaler_at_its_maximum_is_told_and_others_are_not(tmp_path: Path) -> None:
    """With promtool, over the rules of the chart: below its maximum, of another release, and for a short time nothing fires."""
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": chart_groups()}))
    current, most = (f"kube_horizontalpodautoscaler_{name}" for name in ("status_current_replicas", "spec_max_replicas"))
    given = {"r-espalier": ("6x40", "6x40"), "r-espalier-shard-0": ("5x40", "6x40"), "r-espalier-router": ("5x32 6x8", "6x40")}
    series = [
        {"series": f'{name}{{namespace="shop", horizontalpodautoscaler="{scaler}"}}', "values": values}
        for scaler, both in (given | {"other": ("6x40", "6x40")}).items()
        for name, values in zip((current, most), both, strict=True)
    ]
    fires = {
        "exp_labels": {"severity": "warning", "namespace": "shop", "horizontalpodautoscaler": "r-espalier"},
        "exp_annotations": {
            "summary": "r-espalier has as many pods as it may",
            "description": "r-espalier has had 6 pods for 15 min, and may have no more.",
            "runbook_url": "https://docs.example/alerts.html#espalierautoscalerfull",
        },
    }
    alerts = [
        {"alertname": "EspalierAutoscalerFull", "eval_time": "10m", "exp_alerts": []},
        {"alertname": "EspalierAutoscalerFull", "eval_time": "40m", "exp_alerts": [fires]},
    ]
    case = {"interval": "1m", "input_series": series, "alert_rule_test": alerts}
    (tmp_path / "tests.yml").write_text(json.dumps({"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [case]}))
    run = subprocess.run([program("promtool"), "test", "rules", str(tmp_path / "tests.yml")], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr


# -- Helm itself -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_the_manifests_here_are_of_this_chart(case: str) -> None:
    first = (RENDERED / f"{case}.yaml").read_text().partition("\n")[0]
    assert first == f"# {digest()}", "the chart has changed: python -m tests.deploy.chart (it needs Helm)"


@pytest.mark.parametrize("case", CASES)
def test_helm_makes_the_manifests_of_the_chart_and_lints_it_without_a_warning(case: str) -> None:
    made = [manifest for manifest in yaml.safe_load_all(without_copies(render(CASES[case]))) if manifest]
    assert made == list(manifests(case))
    ran = run_helm("lint", "--strict", CHART, values=CASES[case])
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "[WARNING]" not in ran.stdout


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shards": {"count": 2}}, "shards need models.store or models.existingClaim"),
        ({"live": {"enabled": True}, "shards": {"count": 2}, "models": {"existingClaim": "c"}}, "live.enabled needs models.store"),
        ({"live": {"enabled": True}, "shards": {"count": 2}, "models": {"store": "s3://bucket"}}, "live.enabled needs keys.write"),
        ({"live": {"enabled": True}}, "live.enabled without shards needs models.existingClaim"),
        ({"live": {"enabled": True}, "models": {"existingClaim": "c"}}, "needs single.replicas=1"),
        ({"live": {"enabled": True}, "models": {"existingClaim": "c"}, "single": {"replicas": 1}}, "live.enabled needs keys.write"),
        ({"single": {"autoscaling": {"enabled": True, "minReplicas": 7}}}, "minReplicas 7 is more than maxReplicas 6"),
        ({"single": {"autoscaling": {"enabled": True, "cpu": 0}}}, "set at least one of engineBusy, queueDepth and cpu"),
        ({"networkPolicy": {"prometheusNamespace": ""}, "monitoring": {"podMonitor": True}}, "would keep Prometheus out"),
        ({"ingress": {"enabled": True, "host": "h"}}, "ingress.enabled needs networkPolicy.clients"),
        ({"ingress": {"enabled": True}, "networkPolicy": {"enabled": False}}, "ingress.enabled needs ingress.host"),
        ({"shard": {}}, "additional properties 'shard' not allowed"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_helm_refuses_values_that_do_not_go_together(values: Json, message: str) -> None:
    ran = run_helm("template", "r", CHART, values=values)
    assert ran.returncode != 0
    assert message in ran.stderr


def test_helm_puts_rules_and_dashboard_in_as_they_are_where_the_cluster_has_the_operator() -> None:
    made = [manifest for manifest in yaml.safe_load_all(render({}, "--api-versions", "monitoring.coreos.com/v1")) if manifest]
    [rule] = [manifest for manifest in made if manifest["metadata"]["name"] == "r-espalier" and manifest["kind"] == "PrometheusRule"]
    files = [path for path in sorted((ROOT / "docker/prometheus/rules").glob("*.yml")) if path.name != "objectives.yml"]
    assert rule["spec"]["groups"] == [group for path in files for group in yaml.safe_load(path.read_text())["groups"]]
    assert [manifest["metadata"]["name"] for manifest in made if manifest["kind"] == "PodMonitor"] == ["r-espalier-service"]
    moved = render({"monitoring": {"prometheusRule": True, "runbook": "https://docs.example/alerts"}})
    assert RUNBOOKS not in moved
    assert "https://docs.example/alerts#espalierrecalldrop" in moved
    assert "monitoring.coreos.com" not in render({})
    [dashboard] = [manifest for manifest in made if manifest["metadata"]["name"].endswith("-dashboard")]
    assert json.loads(dashboard["data"]["espalier.json"]) == json.loads((ROOT / "docker/grafana/dashboards/espalier.json").read_text())


def test_with_a_secret_of_tls_pods_speak_nothing_else() -> None:
    for case in CASES:
        secret = overridden(VALUES, CASES[case])["tls"]["secret"]
        for workload in workloads(case).values():
            mounted = [volume["secret"]["secretName"] for volume in pod(workload)["volumes"] if "secret" in volume]
            assert mounted == [secret] * bool(secret)
            schemes = {container(workload)[probe]["httpGet"].get("scheme") for probe in PROBES}
            assert schemes == ({"HTTPS"} if secret else {None})
            given = environment(case, workload)
            assert ("ESPALIER_TLS_CERTIFICATE" in given) == ("ESPALIER_TLS_KEY" in given) == bool(secret)
            is_router = "service.router" in container(workload).get("command", ())
            assert ("ESPALIER_TLS_CA" in given) == (bool(secret) and is_router)
        for config in named(case, "ConfigMap").values():
            assert ("dns+https://" if not secret else "dns+http://") not in config["data"].get("router.toml", "")
        for monitor in named(case, "PodMonitor").values():
            assert {endpoint.get("scheme") for endpoint in monitor["spec"]["podMetricsEndpoints"]} == {"https" if secret else None}
