"""The last 24 hours of a model as a document: series, events, unknown ids, and the alerts of Prometheus (docker/prometheus/rules).

The alerts are computed from one service's own numbers, so that a service without Prometheus can show them. The files of rules are
authoritative; a test compares names, thresholds and times with them. Objectives are the defaults of objectives.yml. Knows a history. Does
not know HTTP.

Legend: T rows of a history, a minute apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import isnan
from typing import Any, Literal, NamedTuple

import numpy as np
import orjson

from espalier.arrays import Bool, Float64

from ..watch.history import STEP_S, Columns, History

ERRORS_ALLOWED = 0.001
"""The error budget: the share of requests that may be bad."""


class Condition(NamedTuple):
    """One alert.

    compare    how value and threshold compare; the alert fires when this has held for `for_s`
    threshold  a number, or float64[T]
    extra_condition  bool[T]: must hold too
    """

    name: str
    meaning: str
    value: Callable[[Columns], Float64]
    compare: Literal[">", "<", "=="]
    threshold: float | Callable[[Columns], Float64]
    for_s: float
    extra_condition: Callable[[Columns], Bool] | None = None


def as_json(model: str, version: int | None, history: History, unknown: Sequence[tuple[str, int]]) -> bytes:
    """The body of GET /models/{name}/health.

    version  the default one
    unknown  (id, count), most asked first
    """
    columns = history.columns()
    m = _number(columns["recall_m"][-1])
    document = {
        "model": model,
        "version": version,
        "now": int(columns.at_T[-1]),
        "since": int(columns.at_T[0]),
        "step_s": STEP_S,
        "at": columns.at_T.astype(np.int64),
        "recall_m": None if m is None else int(m),
        "series": {name: values(columns).astype(np.float32) for name, values in SERIES.items()},  # NaN is null
        "alerts": states(columns),
        "events": [{"at": int(at), "what": event} for at, event in history.events],
        "unknown_ids": [{"id": item_id, "count": count} for item_id, count in unknown],
    }
    return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)


def states(columns: Columns) -> list[dict[str, Any]]:
    """Every alert as of the last row: `{"name", "firing", "since", "value", "threshold", "what"}`; since: null unless it fires."""
    return [_state(condition, columns) for condition in CONDITIONS]


def _state(condition: Condition, columns: Columns) -> dict[str, Any]:
    value_T, rows = condition.value(columns), len(columns.at_T)
    threshold = condition.threshold
    threshold_T = threshold(columns) if callable(threshold) else np.full(rows, threshold)
    holds_T = _COMPARISONS[condition.compare](value_T, threshold_T)
    if condition.extra_condition is not None:
        holds_T &= condition.extra_condition(columns)
    begin = rows - int(np.argmin(holds_T[::-1])) if not holds_T.all() else 0  # first of the last rows that all hold
    held_s = columns.at_T[-1] - columns.at_T[begin] if begin < rows else -1.0
    firing = bool(held_s >= condition.for_s)
    return {
        "name": condition.name,
        "firing": firing,
        "since": int(columns.at_T[begin]) if firing else None,
        "value": _number(value_T[-1]) if rows else None,
        "threshold": _number(threshold_T[-1]) if rows else None,
        "what": condition.meaning,
    }


def _number(value: float) -> float | None:
    """A number for JSON with six digits; None if it is NaN."""
    return None if isnan(value) else float(f"{value:.6g}")


def _engine_busy(columns: Columns) -> Float64:
    """Seconds of search ÷ seconds of all workers, over a minute."""
    return np.asarray(columns.rate("engine_s", 60) / columns["workers"])


def _ratio(numerator: str, denominator: str, seconds: float) -> Callable[[Columns], Float64]:
    """The ratio of two counts' increases; NaN if the second did not increase."""

    def ratio(columns: Columns) -> Float64:
        with np.errstate(invalid="ignore", divide="ignore"):
            return columns.increase(numerator, seconds) / columns.increase(denominator, seconds)

    return ratio


def _increase(name: str, seconds: float) -> Callable[[Columns], Float64]:
    return lambda columns: columns.increase(name, seconds)


def _now(name: str) -> Callable[[Columns], Float64]:
    return lambda columns: columns[name]


def _rate(name: str) -> Callable[[Columns], Float64]:
    return lambda columns: columns.rate(name)


def _burns(short_s: float, long_s: float, factor: float) -> Callable[[Columns], Bool]:
    """Whether the error budget still burns, and at least ten requests were bad."""

    def burns(columns: Columns) -> Bool:
        ratio_T, bad_T = _ratio("bad", "counted", short_s)(columns), columns.increase("bad", long_s)
        return np.greater(ratio_T, factor * ERRORS_ALLOWED) & np.greater_equal(bad_T, 10)

    return burns


def _refused_keys(columns: Columns) -> Float64:
    """Refused keys in five minutes, of the role with the most."""
    increases = [columns.increase(f"auth_{role}", 300) for role in ("retrieve", "write", "admin", "internal")]
    return np.asarray(np.max(increases, axis=0))


def _probe_expected(columns: Columns) -> Bool:
    """Whether there is a probe, and a version that it should query."""
    return np.asarray(~np.isnan(columns["probe_queries"]) & (columns["default_version"] > 0))


SERIES: Mapping[str, Callable[[Columns], Float64]] = {
    "recall": _now("recall"),
    "expected_recall": _now("expected_recall"),
    "drift": _now("drift"),
    "requests_per_s": _rate("requests"),
    "queries_per_s": _rate("queries"),
    "background_per_s": _rate("background"),
    "p50_ms": lambda columns: columns["p50_s"] * 1e3,
    "p99_ms": lambda columns: columns["p99_s"] * 1e3,
    "incomplete_per_s": _rate("incomplete"),
    "degraded_per_s": _rate("degraded"),
    "shed_per_s": _rate("shed"),
    "errors_per_s": _rate("errors"),
    "unknown_ids_per_s": _rate("unknown_ids"),
    "engine_busy": _engine_busy,
    "queue_depth": _now("queue_depth"),
    "memory": _now("memory"),
    "live_items": _now("live_items"),
    "live_tombstones": _now("live_tombstones"),
    "live_canary_recall": _now("live_canary_recall"),
    "live_displacement": _now("live_displacement"),
}
"""The series of the document, one value a row."""
_COMPARISONS: Mapping[str, Callable[[Float64, Float64], Bool]] = {">": np.greater, "<": np.less, "==": np.equal}
HOUR_S = 3600.0
CONDITIONS = (
    Condition("EspalierModelNotReady", "No version is ready.", _now("default_version"), "==", 0.0, 120),
    Condition("EspalierWorkerRestarted", "Workers that were replaced in the last 15 min.", _increase("worker_restarts", 900), ">", 0.0, 0),
    Condition(
        "EspalierErrorBudgetBurnFast",
        "Share of requests answered 5xx or 429 in the last hour.",
        _ratio("bad", "counted", HOUR_S),
        ">",
        14.4 * ERRORS_ALLOWED,
        60,
        _burns(300, HOUR_S, 14.4),
    ),
    Condition(
        "EspalierErrorBudgetBurn",
        "Share of requests answered 5xx or 429 in the last six hours.",
        _ratio("bad", "counted", 6 * HOUR_S),
        ">",
        6 * ERRORS_ALLOWED,
        120,
        _burns(1800, 6 * HOUR_S, 6),
    ),
    Condition(
        "EspalierReloadFailed", "Versions that could not be loaded in the last 15 min.", _increase("reload_failures", 900), ">", 0.0, 0
    ),
    Condition(
        "EspalierLatencyHigh",
        "The 99th percentile of latency over 5 min, in seconds.",
        _now("p99_s"),
        ">",
        0.050,
        300,
        lambda columns: columns.increase("timed", 300) >= 100,
    ),
    Condition("EspalierQueueFull", "Share of requests refused because the queue is full.", _ratio("shed", "requests", 60), ">", 0.01, 120),
    Condition("EspalierSaturated", "Share of the time in which the engines search.", _engine_busy, ">", 0.8, 300),
    Condition("EspalierDegradedAnswers", "Share of queries that got a smaller beam.", _ratio("degraded", "queries", 300), ">", 0.05, 300),
    Condition("EspalierGpuMemoryFull", "Share of a GPU's memory in use.", _now("gpu_memory"), ">", 0.95, 120),
    Condition("EspalierMemoryFull", "Share of the memory that the service may take.", _now("memory"), ">", 0.9, 120),
    Condition("EspalierDescriptorsFull", "Share of the descriptors that a worker may have open.", _now("descriptors"), ">", 0.8, 60),
    Condition("EspalierDiskFull", "Share of the disk of the models folder in use.", _now("disk"), ">", 0.9, 600),
    Condition(
        "EspalierUnknownIds",
        "Unknown ids for each query.",
        _ratio("unknown_ids", "queries", 300),
        ">",
        1.0,
        900,
        lambda columns: columns.increase("queries", 300) >= 100,
    ),
    Condition("EspalierDesiredStateWrong", "The files of desired state cannot be read.", _now("desired_state_wrong"), "==", 1.0, 60),
    Condition("EspalierStoreSilent", "Seconds since the store answered.", _now("store_silent"), ">", 300.0, 60),
    Condition("EspalierStoreVersionMissing", "Failures to bring a version from the store.", _increase("store_failures", 900), ">", 0.0, 0),
    Condition(
        "EspalierIncompleteAnswers", "Share of queries that found too few items.", _ratio("incomplete", "queries", 300), ">", 0.01, 600
    ),
    Condition("EspalierRecallDrop", "Recall at export less that of the probe.", _now("recall_loss"), ">", _now("recall_loss_limit"), 30),
    Condition("EspalierScoreDrift", "Difference of golden queries' scores from those at export.", _now("drift"), ">", 0.001, 30),
    Condition("EspalierLiveCanaryLow", "Share of recent inserts that are found.", _now("live_canary_recall"), "<", 0.8, 600),
    Condition(
        "EspalierLiveDisplacement",
        "Recall that live items take from trained ones.",
        lambda columns: -columns["live_displacement"],
        ">",
        0.02,
        600,
    ),
    Condition("EspalierLiveFull", "Share of the live items that there may be.", _now("live_capacity"), ">", 0.8, 60),
    Condition("EspalierLiveLag", "Committed operations on live items that are not applied.", _now("live_lag"), ">", 1000.0, 300),
    Condition("EspalierJournalFailing", "The journal cannot be written or read.", _now("journal_failing"), "==", 1.0, 120),
    Condition("EspalierAuthFailures", "Requests with refused keys in 5 min, to routes of one role.", _refused_keys, ">", 100.0, 60),
    Condition("EspalierProbeSilent", "Answers to the probe in 3 min.", _increase("probe_answered", 180), "==", 0.0, 120, _probe_expected),
    Condition("EspalierProbeFailing", "Share of probe queries that failed.", _ratio("probe_failed", "probe_queries", 300), ">", 0.1, 120),
)
