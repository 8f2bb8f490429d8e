"""What watches the service, docker/prometheus and docker/grafana: every rule and every panel asks for what the service exposes, every alert
fires in a test and has a section in the runbook, and a Prometheus that scrapes a live service answers every query of the dashboard.

Debian's package prometheus brings both programs; where they are missing those tests are skipped.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client.parser import text_string_to_metric_families

from service.watch.metrics import Metrics
from tests import ROOT
from tests.service.running import every_metric

RUNBOOKS = "http://localhost:8001/docs/alerts.html"
"""Where `make docs` shows the runbook."""
PROMETHEUS = ROOT / "docker" / "prometheus"
GRAFANA = ROOT / "docker" / "grafana"
RUNBOOK = (ROOT / "docs" / "alerts.md").read_text()
Json = dict[str, Any]

RULES: list[Json] = [
    rule
    for path in sorted((PROMETHEUS / "rules").glob("*.yml"))
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
]
ALERTS: dict[str, Json] = {rule["alert"]: rule for rule in RULES if "alert" in rule}
RECORDED = [rule for rule in RULES if "record" in rule]
DASHBOARD: Json = json.loads((GRAFANA / "dashboards" / "espalier.json").read_text())
PANELS: list[Json] = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES: list[tuple[str, Json]] = [(panel["title"], target) for panel in PANELS for target in panel["targets"]]

NOT_ON_A_CPU = {"GPU memory"}
NOT_AT_ONCE = {"espalier:probe_recall:best_avg1d"}  # a version must have been watched for five minutes
OF_SHARDS = ("espalier_shard_", "espalier_router_", *(rule["record"] for rule in RECORDED if "espalier_router_" in rule["expr"]))
"""Series of routers and shards, by how their names begin: a service without them has none."""


def program(name: str, package: str = "prometheus") -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is missing: alerts and dashboard queries are NOT tested. On Debian and Ubuntu: apt install {package}")
    return found


# -- rules and queries against what the service exposes -------------------------------------------------------------------


TARGET = {"cluster", "namespace", "job", "instance"}
"""Labels that Prometheus adds to each series, or may add."""


def exposed() -> dict[str, set[str]]:
    """Series → labels, of everything that the service can expose; those that Prometheus adds to each included."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(every_metric()):
        for sample in family.samples:
            found.setdefault(sample.name, TARGET.copy()).update(sample.labels)
    return found


WORDS = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
FUNCTIONS = """
absent and avg_over_time bool changes clamp_max count count_over_time histogram_quantile increase max max_over_time min
offset or rate sum sum_over_time unless vector group time Inf
"""


def series_of(expression: str) -> list[tuple[str, set[str]]]:
    """(series, labels that are matched) of a PromQL expression. Fails where a word is neither a series nor a known function."""
    bare = re.sub(r'count_values by \([^)]*\) \("version", ', "(", expression)  # makes a label of a value
    bare = re.sub(r"\[[^\]]*\]", "", WORDS.sub("", bare))
    bare = re.sub(r"\boffset \d+[smhd]\b", "", bare)
    found = []
    for name, matchers in re.findall(r"\b([a-zA-Z_][\w:]*)\b(?:\s*\{([^}]*)\})?", re.sub(r'"[^"]*"', '""', bare)):
        if name not in FUNCTIONS.split():
            found.append((name, set(re.findall(r"(\w+)\s*[=!]", matchers))))
    return found


def grouped(expression: str) -> set[str]:
    """The labels in its `by`, `on` and the like."""
    return {label for _, labels in WORDS.findall(expression) for label in re.split(r"[,\s]+", labels) if label}


def check(expression: str, known: dict[str, set[str]]) -> None:
    series = series_of(expression)
    assert series, expression
    unknown = [name for name, _ in series if name not in known]
    assert not unknown, f"{unknown} are exposed by nobody: {expression}"
    for name, labels in series:
        assert labels <= known[name], f"{name} has no label {labels - known[name]}: {expression}"
    there = set().union(*(known[name] for name, _ in series))
    assert grouped(expression) <= there, f"nothing here has the label {grouped(expression) - there}: {expression}"


def all_series() -> dict[str, set[str]]:
    """What the service exposes and what the rules record, in their order; what a rule records may be used by later ones only."""
    known = exposed() | {"up": TARGET, "ALERTS": TARGET | {"alertname", "alertstate", "severity"}}
    for rule in RECORDED:
        check(rule["expr"], known)
        by = re.search(r"\bby \(([^)]*)\)", rule["expr"])  # the outermost comes first; a ratio of recorded series has theirs
        labels = set(by[1].split(", ")) - {"le"} if by else set().union(*(known[name] for name, _ in series_of(rule["expr"])))
        known[rule["record"]] = labels | set(rule.get("labels", {}))
    return known


def test_every_rule_and_every_panel_asks_for_what_is_exposed_and_every_metric_is_shown() -> None:
    known = all_series()
    for alert in ALERTS.values():
        check(alert["expr"], known)
        told = set(re.findall(r"\$labels\.(\w+)", " ".join(alert["annotations"].values())))
        assert told <= set().union(*(known[name] for name, _ in series_of(alert["expr"]))), alert["alert"]
    known = all_series()
    for title, target in QUERIES:
        check(target["expr"], known)
        told = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert told <= set().union(*(known[name] for name, _ in series_of(target["expr"]))), title
    for variable in DASHBOARD["templating"]["list"][1:]:
        [(series, label)] = re.findall(r"^label_values\((\w+)(?:\{[^}]*\})?, (\w+)\)$", variable["query"]["query"])
        assert label in known[series]
        assert label == variable["name"]
    records = {rule["record"]: rule["expr"] for rule in RECORDED}
    shown = {name for _, target in QUERIES for name, _ in series_of(target["expr"])}
    for record in reversed(records):
        if record in shown:
            shown |= {name for name, _ in series_of(records[record])}
    families = set(re.findall(r"^# TYPE (\S+)", Metrics().render().decode(), re.MULTILINE))
    assert {family for family in families if not any(name.startswith(family) for name in shown)} == set()
    # They are answered at once, or wait for a body; EspalierLatencyHigh leaves them out, so the panels do.
    for title, target in QUERIES:
        if "request_seconds" in target["expr"]:
            assert 'model!=""' in target["expr"], title


# -- alerts: tested and explained -----------------------------------------------------------------------------------------


def cases() -> list[Json]:
    return [case for path in sorted((PROMETHEUS / "tests").glob("*.yml")) for case in yaml.safe_load(path.read_text())["tests"]]


def test_every_alert_fires_in_a_case_and_on_one_side_of_its_threshold_alone() -> None:
    """Those of `== 0` and `> 0` have no threshold: firing.yml and healthy.yml are their two sides."""
    firing = {test["alertname"] for case in cases() for test in case.get("alert_rule_test", []) if test["exp_alerts"]}
    assert firing == set(ALERTS)
    tested = " ".join(path.read_text() for path in (PROMETHEUS / "tests").glob("thresholds*.yml"))
    with_threshold = {name for name, alert in ALERTS.items() if re.search(r"[<>]=? (?!0$)", alert["expr"])}
    assert with_threshold == set(re.findall(r'alertname="(\w+)"', tested))
    silent = [test["expr"] for case in cases() for test in case.get("promql_expr_test", []) if not test["exp_samples"]]
    assert sum("ALERTS" in expression for expression in silent) >= 2
    assert {re.sub(r"\[\w+\]", "", expression) for expression in silent if "ALERTS" in expression} == {
        'count_over_time(ALERTS{alertstate="firing"})'
    }


def chart_rules() -> list[Json]:
    """What the Helm chart writes itself."""
    made = yaml.safe_load_all((ROOT / "tests/deploy/rendered/single.yaml").read_text())
    return [rule for one in made if one["kind"] == "PrometheusRule" for group in one["spec"]["groups"] for rule in group["rules"]]


def test_the_runbook_lists_alerts_as_they_are() -> None:
    sections = re.findall(r"^### (\w+)\n\n\*\*(\w+), (\w+|at once)\.\*\* \w", RUNBOOK, re.MULTILINE)
    explained = ALERTS | {rule["alert"]: rule for rule in chart_rules() if "alert" in rule}
    assert sections == [(name, alert["labels"]["severity"], alert.get("for", "at once")) for name, alert in explained.items()]
    for name, alert in ALERTS.items():
        assert alert["labels"]["severity"] in ("critical", "warning")
        assert alert["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert alert["annotations"]["runbook_url"] == f"{RUNBOOKS}#{name.lower()}"
        assert name == "EspalierDown" or "$value" in alert["annotations"]["description"], name


APART = {"cluster", "namespace"}
PAGES = """
EspalierDown EspalierModelNotReady EspalierRestarting EspalierErrorBudgetBurnFast EspalierErrorBudgetBurn EspalierRecallDrop
EspalierShardMissing EspalierPartialAnswers
"""
"""What customers feel. Nothing else wakes anybody."""


def test_rules_keep_environments_apart_and_only_what_customers_feel_pages() -> None:
    known = all_series()
    for rule in RULES:
        for word, labels in WORDS.findall(rule["expr"]):
            assert word.startswith("group_") or {*labels.split(", ")} >= APART, f"{word} ({labels}): {rule['expr']}"
        aggregated = re.findall(r"\b(sum|max|min|avg|count|group)\b(?! by)", rule["expr"])
        assert not aggregated, rule["expr"]
    assert all(known[rule["record"]] >= APART for rule in RECORDED)
    assert {name for name, alert in ALERTS.items() if alert["labels"]["severity"] == "critical"} == {*PAGES.split()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", *(str(path) for path in sorted((PROMETHEUS / "rules").glob("*.yml")))),
        *(("test", "rules", str(path)) for path in sorted((PROMETHEUS / "tests").glob("*.yml"))),
    ],
    ids=lambda arguments: " ".join(Path(argument).name for argument in arguments),
)
def test_promtool_agrees(arguments: tuple[str, ...]) -> None:
    run = subprocess.run([program("promtool"), *arguments], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_configuration_is_valid_and_finds_the_rules(tmp_path: Path) -> None:
    written = (PROMETHEUS / "prometheus.yml").read_text()
    config = yaml.safe_load(written)
    assert config["rule_files"] == ["/etc/prometheus/rules/*.yml"]  # where docker-compose.yml mounts them
    jobs = {job["job_name"]: job.get("static_configs") for job in config["scrape_configs"]}
    assert jobs == {
        "espalier": [{"targets": ["service:8000"]}],
        "espalier-shards": None,
        "prometheus": [{"targets": ["localhost:9090"]}],
    }
    names = {job["job_name"]: job["dns_sd_configs"][0]["names"] for job in config["scrape_configs"] if "dns_sd_configs" in job}
    assert names == {"espalier": ["router"], "espalier-shards": ["shard-0", "shard-1"]}  # of docker-compose.yml
    assert config["alerting"]["alertmanagers"] == [{"static_configs": [{"targets": ["alertmanager:9093"]}]}]
    here = tmp_path / "prometheus.yml"
    here.write_text(written.replace("/etc/prometheus/rules", str(PROMETHEUS / "rules")))
    run = subprocess.run([program("promtool"), "check", "config", str(here)], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"{len(list((PROMETHEUS / 'rules').glob('*.yml')))} rule files found" in run.stdout


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [("severity=critical", "page"), ("severity=warning", "ticket"), ("alertname=Other", "ticket")],
)
def test_alertmanager_takes_the_configuration_and_pages_for_what_is_critical(labels: str, receiver: str) -> None:
    file = str(ROOT / "docker/alertmanager/alertmanager.yml")
    for words, said in ((["check-config", file], "SUCCESS"), (["config", "routes", "test", f"--config.file={file}", labels], receiver)):
        run = subprocess.run([program("amtool", "prometheus-alertmanager"), *words], capture_output=True, text=True, timeout=60)
        assert run.returncode == 0, run.stdout + run.stderr
        assert said in run.stdout


# -- the dashboard --------------------------------------------------------------------------------------------------------


def missing(written: Any, understood: Any, path: str = "") -> Iterator[str]:
    """What of a document is not in another one, or otherwise; the other may have more."""
    if isinstance(written, dict) and isinstance(understood, dict):
        for key, value in written.items():
            if key in understood:
                yield from missing(value, understood[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(written, list) and isinstance(understood, list) and len(written) == len(understood):
        for i, (one, other) in enumerate(zip(written, understood, strict=True)):
            yield from missing(one, other, f"{path}[{i}]")
    elif written != understood:
        yield f"{path}: {written!r} became {understood!r}"


def round_trip(document: Json) -> Json:
    """A dashboard through the models that Grafana's own SDK has made of Grafana's schema: keys that are not in it get lost."""
    register_default_plugins()
    found: Json = json.loads(json.dumps(Dashboard.from_json(document), cls=JSONEncoder))
    return found


def test_the_dashboard_is_provisioned_says_what_it_shows_and_has_nothing_unknown() -> None:
    all_labels = all_series()
    assert list(missing(DASHBOARD, round_trip(DASHBOARD))) == []
    misspelt = json.loads(json.dumps(DASHBOARD).replace('"drawStyle"', '"drawstyle"'))
    assert {path.rpartition(".")[2] for path in missing(misspelt, round_trip(misspelt))} == {"drawstyle"}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    for panel in PANELS:
        assert re.fullmatch(r"[A-Z].*[.]", panel["description"]), panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEF"[: len(panel["targets"])])
        for target in panel["targets"]:
            assert target["datasource"] == panel["datasource"]
            assert "[$__rate_interval]" in target["expr"] or not re.search(r"\[", target["expr"]), panel["title"]
        defaults = panel["fieldConfig"]["defaults"]
        assert panel["type"] in ("heatmap", "table") or defaults["unit"], panel["title"]
    [source] = yaml.safe_load((GRAFANA / "provisioning" / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert (source["uid"], source["url"]) == ("espalier-prometheus", "http://prometheus:9090")
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert [*variables] == ["datasource", "cluster", "namespace", "model", "instance"]  # each chooses among what those before it leave
    for title, target in QUERIES:
        for name, matchers in re.findall(r"\b([a-zA-Z_][\w:]*)\{([^}]*)\}", target["expr"]):
            chosen = {label for label in ("cluster", "namespace", "instance") if label in all_labels[name]}
            assert chosen == set(re.findall(r'(\w+)=~"\$\1"', matchers)) - {"model"}, f"{title}: {name}"
        assert all("{" in part for part in re.findall(r"\b(?:espalier[_:][\w:]+|ALERTS).?", target["expr"])), title
    for variable in (variables[name] for name in ("cluster", "namespace", "model", "instance")):
        narrowed = {"cluster": set(), "namespace": {"cluster"}}.get(variable["name"], {"cluster", "namespace"})
        assert set(re.findall(r"\$(\w+)", variable["query"]["query"])) == narrowed
        assert (variable["allValue"], variable["includeAll"]) == (".*", True)  # which matches where the label is not there, too
    assert variables["datasource"]["current"]["value"] == source["uid"]
    [provider] = yaml.safe_load((GRAFANA / "provisioning" / "dashboards" / "espalier.yml").read_text())["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"  # where docker-compose.yml mounts them
