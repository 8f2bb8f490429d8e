"""The last 24 hours of a model: exact, bounded, and the same from every worker."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from math import inf, isnan, nan
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from service.run_folder import living
from service.watch.health import CONDITIONS, SERIES, as_json, states
from service.watch.history import HISTORY_S, MAX_EVENTS, MAX_ROWS, STEP_S, History, quantile
from service.watch.metrics import Metrics, ModelMetrics
from service.watch.recorder import Recorder
from service.watch.totals import NAMES, Totals, totals
from service.watch.unknown_ids import UnknownIds
from tests import ROOT
from tests.service.running import Json, run
from tests.waiting import until

BEGIN = 1_800_000_000.0
ELSEWHERE = {
    "EspalierDown": "a service that is down shows nothing",
    "EspalierInstanceDown": "a service that is down shows nothing",
    "EspalierInstanceNotReady": "on one instance it is EspalierModelNotReady",
    "EspalierRestarting": "its times of start are not kept",
    "EspalierErrorBudgetBurnSlow": "it looks back three days",
    "EspalierTrafficLost": "it compares with the day before",
    "EspalierClientErrors": "it is of all models, by status",
    "EspalierRecallBelowBest": "it compares versions over a day",
    "EspalierVersionOld": "its objective is Prometheus's",
    "EspalierLiveRefused": "it is by status",
    "EspalierBackupOld": "a backup is of one host of several",
    "EspalierBackupFailing": "a backup is of one host of several",
}
"""Alerts of the rules' file that are not among CONDITIONS, and why."""
NOTHING = totals([], ["books"], BEGIN)["books"].values
COUNTS = [name for name, value in NOTHING.items() if value == 0 or name in ("probe_answered", "probe_failed", "probe_queries")]
HEALTHY = {name: nan for name in NAMES if name not in COUNTS} | {"default_version": 1, "workers": 2, "desired_state_wrong": 0}


def simulated(minutes: int, numbers: Callable[[int], dict[str, float]], begin: float = BEGIN) -> History:
    """A history of a row a minute. numbers: of a minute; counts grow by them, states are them."""
    history, sums = History(), dict.fromkeys(COUNTS, 0.0)
    for minute in range(minutes + 1):
        own = HEALTHY | numbers(minute)
        grown = {name: own.pop(name, 0.0) for name in sums}
        sums = {name: count + grown[name] * (minute > 0) for name, count in sums.items()}
        history.add(Totals(begin + minute * STEP_S, sums | own, ready=(1,)))
    return history


def document(history: History) -> Json:
    found: Json = orjson.loads(as_json("books", 1, history, []))
    return found


def firing(history: History) -> dict[str, Json]:
    return {state["name"]: state for state in states(history.columns()) if state["firing"]}


# -- rows -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hours", [8, 24, 100])
def test_hours_of_service_are_a_number_a_minute_and_at_most_a_day(hours: int) -> None:
    history = simulated(hours * 60, lambda minute: {"requests": 60.0 * minute, "queries": 120.0, "recall": 0.5})
    found = document(history)
    rows = min(hours * 60 + 1, MAX_ROWS)
    assert len(found["at"]) == rows
    assert {len(series) for series in found["series"].values()} == {rows}
    assert found["now"] == BEGIN + hours * 3600
    assert found["since"] == found["at"][0] == max(BEGIN, found["now"] - HISTORY_S + STEP_S)
    assert found["series"]["requests_per_s"][-1] == hours * 60  # as many a second as minutes have gone
    assert found["series"]["queries_per_s"][1:] == [2.0] * (rows - 1)
    assert set(found["series"]["recall"]) == {0.5}
    assert set(found["series"]["live_items"]) == {None}


def recorded(*counted: tuple[float, float]) -> History:
    """(time, requests up to then) by row."""
    history = History()
    for at, requests in counted:
        history.add(Totals(at, {"requests": requests}))
    return history


@pytest.mark.parametrize(
    ("counted", "rates"),
    [
        ([(0, 100), (60, 160), (3660, 520)], [None, 1, 0.1]),  # the first is unknown, and a gap is averaged
        ([(0, 0), (60, 60), (120, 120), (121, 190)], [None, 1, 1, pytest.approx(130 / 61)]),  # that of now is not of a moment
        ([(0, 100), (60, 40), (120, 100)], [None, 0, 1]),  # a count that falls began anew and is no negative rate
    ],
)
def test_a_rate_is_of_what_came_in_a_minute(counted: list[tuple[float, float]], rates: list[float | None]) -> None:
    history = recorded(*counted)
    assert document(history)["series"]["requests_per_s"] == rates
    assert history.columns().increase("requests", 3600).min() >= 0


@pytest.mark.parametrize(
    ("times", "kept"),
    [
        ([60, 120, 90, 120, 180], [60, 120, 180]),  # a clock that is set back leaves rows out
        ([0, 60, HISTORY_S + 60], [HISTORY_S + 60]),  # rows older than a day go even where there are few
    ],
)
def test_rows_are_of_the_last_day_and_in_order(times: list[float], kept: list[float]) -> None:
    assert [*recorded(*((at, 0) for at in times)).at] == kept


def test_quantiles_are_prometheus_estimates_of_the_last_five_minutes() -> None:
    buckets = {1.0: 10.0, 2.0: 30.0, 4.0: 40.0, inf: 40.0}
    assert quantile(buckets, 0.5) == 1.5
    assert quantile(buckets, 0.25) == 1.0
    assert quantile(buckets, 0.125) == 0.5
    assert quantile(buckets | {inf: 50.0}, 0.99) == 4.0
    assert isnan(quantile({1.0: 0.0, inf: 0.0}, 0.5))
    assert isnan(quantile({}, 0.5))
    history, counts = History(), {0.001: 0.0, 0.1: 0.0, inf: 0.0}
    for minute in range(12):
        slow = minute == 6
        counts = {bound: count + (100 if bound > 0.001 or not slow else 0) for bound, count in counts.items()}
        history.add(Totals(minute * 60.0, {}, counts))
    p99 = document(history)["series"]["p99_ms"]
    assert [value > 1 for value in p99] == [False] * 6 + [True] * 5 + [False]
    assert p99[0] == pytest.approx(0.99)


# -- events ---------------------------------------------------------------------------------------------------------------


def happened(*steps: tuple[dict[str, float], tuple[int, ...]]) -> list[str]:
    history = History()
    for minute, (values, ready) in enumerate(steps):
        history.add(Totals(minute * 60.0, HEALTHY | values, ready=ready))
    return [what for _, what in history.events]


def test_loads_defaults_and_failures_are_events_and_these_are_bounded() -> None:
    assert happened(({"default_version": 0}, ()), ({"default_version": 3}, (3,)), ({"default_version": 3}, (3,))) == [
        "Version 3 serves.",
        "Version 3 is the default now.",
    ]
    assert happened(({}, (1,)), ({}, (1, 2)), ({"default_version": 2}, (2,))) == [
        "Version 1 serves.",
        "Version 1 is the default now.",
        "Version 2 serves.",
        "Version 1 serves no longer.",
        "Version 2 is the default now.",
    ]
    unknown: tuple[dict[str, float], tuple[int, ...]] = ({"default_version": nan}, ())
    assert happened(unknown, ({"default_version": 2}, (2,)), unknown, ({"default_version": 2}, ())) == [
        "Version 2 serves.",
        "Version 2 is the default now.",
        "Version 2 serves no longer.",
    ]
    loaded = "Version 1 is the default now."  # before the first row
    assert happened(({"reload_failures": 2}, ()), ({"reload_failures": 3}, ()), ({"reload_failures": 5, "worker_restarts": nan}, ())) == [
        loaded,
        "A version failed to load, or a change was rolled back.",
        "2 loads failed or changes were rolled back.",
    ]
    assert happened(({"worker_restarts": 0}, ()), ({"worker_restarts": 1, "desired_state_wrong": 1}, ())) == [
        loaded,
        "A worker ended and was replaced.",
        "The files of desired state cannot be read.",
    ]
    assert happened(({}, ()), ({"default_version": 0}, ())) == [loaded, "No version is ready."]
    assert len(happened(*(({"reload_failures": float(i)}, ()) for i in range(3 * MAX_EVENTS)))) == MAX_EVENTS
    history = History()
    history.add(Totals(0.0, {}, ready=(1,)))
    history.add(Totals(HISTORY_S + 1.0, {}, ready=(1,)))
    assert not history.events


# -- alerts ---------------------------------------------------------------------------------------------------------------

WRONG: dict[str, dict[str, float]] = {
    "EspalierModelNotReady": {"default_version": 0},
    "EspalierWorkerRestarted": {"worker_restarts": 1},
    "EspalierErrorBudgetBurnFast": {"counted": 100, "bad": 2, "requests": 100},
    "EspalierErrorBudgetBurn": {"counted": 1000, "bad": 9, "requests": 1000},
    "EspalierReloadFailed": {"reload_failures": 1},
    "EspalierLatencyHigh": {"timed": 30},  # and slow, below
    "EspalierQueueFull": {"requests": 100, "shed": 2},
    "EspalierSaturated": {"engine_s": 100},
    "EspalierDegradedAnswers": {"queries": 100, "degraded": 6},
    "EspalierGpuMemoryFull": {"gpu_memory": 0.96},
    "EspalierMemoryFull": {"memory": 0.91},
    "EspalierDescriptorsFull": {"descriptors": 0.81},
    "EspalierDiskFull": {"disk": 0.91},
    "EspalierUnknownIds": {"queries": 100, "unknown_ids": 110},
    "EspalierLiveLag": {"live_lag": 1001},
    "EspalierJournalFailing": {"journal_failing": 1},
    "EspalierDesiredStateWrong": {"desired_state_wrong": 1},
    "EspalierStoreSilent": {"store_silent": 301},
    "EspalierStoreVersionMissing": {"store_failures": 1},
    "EspalierIncompleteAnswers": {"queries": 100, "incomplete": 2},
    "EspalierRecallDrop": {"recall_loss": 0.021, "recall_loss_limit": 0.02},
    "EspalierScoreDrift": {"drift": 0.002},
    "EspalierLiveCanaryLow": {"live_canary_recall": 0.79},
    "EspalierLiveDisplacement": {"live_displacement": -0.03},
    "EspalierLiveFull": {"live_capacity": 0.81},
    "EspalierAuthFailures": {"auth_write": 21},
    "EspalierProbeSilent": {"probe_queries": 5, "probe_answered": 0},
    "EspalierProbeFailing": {"probe_queries": 100, "probe_answered": 80, "probe_failed": 20},
}
FINE: dict[str, float] = {
    "counted": 1000,
    "bad": 0.5,
    "requests": 1000,
    "timed": 1000,
    "shed": 5,
    "queries": 1000,
    "engine_s": 90,
    "degraded": 40,
    "incomplete": 9,
    "store_silent": 299,
    "gpu_memory": 0.94,
    "memory": 0.89,
    "disk": 0.89,
    "unknown_ids": 900,
    "live_lag": 999,
    "descriptors": 0.79,
    "recall_loss": 0.019,
    "recall_loss_limit": 0.02,
    "drift": 0.0009,
    "live_canary_recall": 0.81,
    "live_displacement": -0.019,
    "live_capacity": 0.79,
    "auth_write": 19,
    "probe_queries": 100,
    "probe_answered": 95,
    "probe_failed": 5,
}


def history_of(wrong: dict[str, float], minutes: int, slow: bool = False) -> History:
    """An hour in which all is fine, then minutes of something wrong."""
    history, sums, buckets = History(), dict.fromkeys(COUNTS, 0.0), {0.01: 0.0, 1.0: 0.0, inf: 0.0}
    for minute in range(60 + minutes + 1):
        own = HEALTHY | FINE | (wrong if minute > 60 else {})
        sums = {name: count + own.pop(name, 0.0) for name, count in sums.items()}
        fast = not slow or minute <= 60
        buckets = {bound: count + (sums["timed"] if bound > 0.01 or fast else 0) for bound, count in buckets.items()}
        history.add(Totals(BEGIN + minute * STEP_S, sums | own, dict(buckets), (1,)))
    return history


def test_names_thresholds_and_times_are_those_of_the_rules_and_nothing_known_is_no_alert() -> None:
    history = History()
    history.add(Totals(BEGIN, {}))
    assert firing(history) == {}
    assert {state["value"] for state in states(history.columns())} <= {None, 0.0}
    folder = ROOT / "docker/prometheus/rules"
    rules, objectives = (yaml.safe_load((folder / name).read_text())["groups"][0]["rules"] for name in ("alerts.yml", "objectives.yml"))
    rule_of = {rule["alert"]: rule for rule in rules}
    numbers = {rule["record"]: rule["expr"].partition(" ")[0] for rule in objectives}
    assert rule_of.keys() == {condition.name for condition in CONDITIONS} | ELSEWHERE.keys()
    assert not {condition.name for condition in CONDITIONS} & ELSEWHERE.keys()
    for condition in CONDITIONS:
        rule = rule_of[condition.name]
        assert seconds(rule.get("for", "0s")) == condition.for_s, condition.name
        expression = re.sub(r"> on \(cluster, namespace\) group_left \(\) \(?", "> ", rule["expr"])
        for name, number in numbers.items():
            expression = expression.replace(name, number)
        compared = {(sign, product(number)) for sign, number in re.findall(r"(==|<|>) ([\d.]+(?: \* [\d.]+)?)", expression)}
        if not callable(condition.threshold):
            found = [number for sign, number in compared if sign == condition.compare]
            assert any(number == pytest.approx(condition.threshold) for number in found), condition.name
    host = "by (cluster, namespace, job, instance, model, version, m)"
    assert f"> clamp_max(0.1 * max {host} (espalier_probe_expected_recall), 0.02)" in rule_of["EspalierRecallDrop"]["expr"]
    assert re.findall(r"\[(\d+)m\]", rule_of["EspalierProbeSilent"]["expr"])[0] == "3"


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda condition: condition.name)
def test_each_alert_fires_after_its_time_and_not_before(condition: Any) -> None:
    wrong, slow = WRONG[condition.name], condition.name == "EspalierLatencyHigh"
    needed = {"EspalierErrorBudgetBurnFast": 60, "EspalierErrorBudgetBurn": 300, "EspalierProbeSilent": 2, "EspalierAuthFailures": 5}
    minutes = int(condition.for_s // 60) + needed.get(condition.name, 5) + 2
    history = history_of(wrong, minutes, slow)
    found = firing(history)[condition.name]
    begin = BEGIN + 60 * STEP_S
    assert begin < found["since"] <= BEGIN + (60 + minutes) * STEP_S - condition.for_s
    assert set(found) == {"name", "firing", "since", "value", "threshold", "what"}
    assert found["value"] is not None
    assert firing(history_of(wrong, 0, slow)) == {}
    if condition.for_s > 60 and condition.name not in needed:
        assert condition.name not in firing(history_of(wrong, int(condition.for_s // 60), slow))


def seconds(duration: str) -> float:
    return float(duration[:-1]) * {"s": 1, "m": 60, "h": 3600}[duration[-1]]


def product(text: str) -> float:
    first, _, second = text.partition(" * ")
    return float(first) * float(second or 1)


# -- from the metrics -----------------------------------------------------------------------------------------------------


def test_totals_are_what_the_metrics_count() -> None:
    metrics = Metrics()
    for model in ("books", "films"):
        metrics.add_model(model)
    own = ModelMetrics(metrics, "books", 1, "fake", lambda: 1)
    ModelMetrics(metrics, "books", 2, "fake", lambda: 2)  # of another version
    own.call(2, 0.5)
    own.retrieved((0.1,), 0.1, 8, queries=4, incomplete=1, degraded=2, unknown=7)
    for status, times in ((200, 5), (429, 2), (500, 1), (422, 3)):
        for _ in range(times):
            metrics.request("books", status, 0.01)
    metrics.request("books", 504, None, by_client=True)
    metrics.request("films", 200, 0.01)
    metrics.count("espalier_background_requests_total", "books", 200)
    metrics.count("espalier_shed_total", "books")
    metrics.show("espalier_model_default_version", 2, "books")
    metrics.show("espalier_model_info", True, "books", 2, "fake")
    metrics.show("espalier_model_info", False, "books", 3, "fake")
    metrics.probed("books", 2, {10: 0.3, 50: 0.5, 200: 0.7}, {10: 0.31, 50: 0.5, 200: 0.7}, 0.25)
    metrics.probed("books", 1, {50: 0.1}, {50: 0.5}, 0.0)  # of a version that is not the default one
    metrics.watch_disk(Path())
    metrics.gauges["espalier_live_lag"].labels("books").set(7)
    metrics.gauges["espalier_live_journal_failing"].labels("books").set(1)
    metrics.count("espalier_probe_queries_total", "books", 2, "answered")
    metrics.count("espalier_probe_queries_total", "books", 2, "failed")
    metrics.count("espalier_reload_total", "books", "failed")
    metrics.count("espalier_auth_failures_total", "write", "unknown")
    found = totals(metrics.samples(), ["books", "films"], 12.0)
    books = found["books"].values
    assert set(books) == {*NAMES}
    assert {name: books[name] for name in ("requests", "counted", "bad", "errors", "timed", "background", "shed")} == {
        "requests": 12,
        "counted": 8,
        "bad": 3,
        "errors": 1,
        "timed": 11,
        "background": 1,
        "shed": 1,
    }
    counts = ("queries", "incomplete", "degraded", "unknown_ids", "engine_s", "reload_failures", "auth_write", "queue_depth")
    assert [books[name] for name in counts] == [4, 1, 2, 7, 0.5, 1, 1, 3]
    assert [books[name] for name in ("recall_m", "recall", "expected_recall", "drift")] == [50, 0.5, 0.5, 0.25]
    assert books["recall_loss"] == pytest.approx(0.01)
    assert books["recall_loss_limit"] == 0.02
    assert (books["live_lag"], books["journal_failing"]) == (7, 1)
    metrics.show("espalier_live_lag", inf, "books")  # of a follower that cannot copy
    uncopied = History()
    for minute in range(6):
        uncopied.add(totals(metrics.samples(), ["books"], 60.0 * minute)["books"])
    firing = [alert["name"] for alert in states(History.from_json(uncopied.to_json()).columns()) if alert["firing"]]
    assert "EspalierLiveLag" in firing
    assert 0 < books["disk"] < 1
    assert [books[name] for name in ("probe_answered", "probe_failed", "probe_queries")] == [1, 1, 2]
    assert (found["books"].ready, found["films"].ready) == ((2,), ())
    assert (found["films"].values["requests"], found["films"].values["queries"]) == (1, 0)
    assert list(found["books"].buckets.values())[-1] == 11
    assert list(found["books"].buckets)[-1] == inf


# -- several processes ----------------------------------------------------------------------------------------------------


def test_a_history_is_the_same_after_it_was_written_and_read() -> None:
    history = simulated(100, lambda minute: {"requests": 3.0, "recall": 0.1 * (minute % 3)})
    history.recent[-1] = Totals(history.at[-1], history.recent[-1].values, {0.5: 3.0, inf: 4.0}, (1,))
    again = History.from_json(history.to_json())
    assert document(again) == document(history)
    for one in (history, again):
        one.add(Totals(BEGIN + 101 * STEP_S, {"requests": 900.0}, {0.5: 4.0, inf: 9.0}, (1, 2)))
    assert document(again) == document(history)
    assert again.events[-1][1] == "Version 2 serves."


class Workers:
    """Recorders of several processes over one folder, and the clock and counts that they share."""

    def __init__(self, folder: Path | None) -> None:
        self.now, self.requests, self.folder = BEGIN, 0.0, folder

    def recorder(self) -> Recorder:
        return Recorder(self._samples, lambda: ["books"], UnknownIds(lambda: self.now), self.folder, lambda: self.now)

    def _samples(self) -> list[tuple[str, dict[str, str], float]]:
        return [("espalier_requests_total", {"model": "books", "status": "200"}, self.requests)]

    def pass_time(self, seconds: int, *recorders: Recorder) -> None:
        for _ in range(0, seconds, 10):
            self.now, self.requests = self.now + 10, self.requests + 10
            for one in recorders:
                one.tick(None)


def rates(recorder: Recorder) -> list[float | None]:
    found: list[float | None] = document(recorder.history("books"))["series"]["requests_per_s"]
    return found


def test_another_worker_goes_on_where_the_recorder_ended(tmp_path: Path) -> None:
    workers = Workers(tmp_path)
    first, second = workers.recorder(), workers.recorder()
    workers.pass_time(600, first, second)
    assert rates(first) == rates(second) == [None, *[1.0] * 10]
    first.close()  # the system closes what a killed process held
    workers.pass_time(600, second)
    third = workers.recorder()  # in the place of the first
    workers.pass_time(60, second, third)
    assert rates(second) == rates(third)
    found = document(third.history("books"))
    assert found["since"] == BEGIN + 10
    assert len(found["at"]) in (22, 23)
    assert [*dict.fromkeys(found["series"]["requests_per_s"][1:])] == [1.0]  # not a minute is lost
    second.close()


def test_a_history_stays_in_memory_alone_and_where_a_folder_takes_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workers = Workers(None)
    recorder = workers.recorder()
    workers.pass_time(300, recorder)
    assert len(rates(recorder)) == 6
    assert rates(recorder) == rates(recorder)  # asking adds no row
    recorder.close()
    workers = Workers(tmp_path)
    recorder = workers.recorder()
    workers.pass_time(120, recorder)

    def full(*_: object) -> int:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        workers.pass_time(60, recorder)
    monkeypatch.undo()
    assert len(rates(recorder)) == 4  # the row is in memory
    workers.pass_time(60, recorder)
    assert len(rates(recorder)) == 5
    assert living(tmp_path) == []
    assert os.path.exists(tmp_path / "history" / "history_books.json")
    recorder.close()


# -- over HTTP ------------------------------------------------------------------------------------------------------------


def test_health_is_there_from_the_first_minute(versions: Path) -> None:
    with run(versions) as running:
        running.retrieve(queries=[{"history": ["item-1"]}])

        def told() -> Json:
            health: Json = running.client.get("/models/books/health").json()
            return health

        until(lambda: "Version 2 is the default now." in [event["what"] for event in told()["events"]])
        found = told()
        assert (found["model"], found["version"], found["step_s"]) == ("books", 2, STEP_S)
        assert found["series"].keys() == SERIES.keys()
        assert found["series"]["p99_ms"][-1] > 0
        assert found["since"] <= found["now"]
        assert "Version 2 serves." in [event["what"] for event in found["events"]]
        assert {alert["name"] for alert in found["alerts"]} == {condition.name for condition in CONDITIONS}
        assert not [alert for alert in found["alerts"] if alert["firing"]]
        assert running.client.get("/models/nobody/health").status_code == 404
