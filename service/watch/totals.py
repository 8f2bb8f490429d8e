"""What the metrics say of one model at one time, all workers together: the numbers of which health.py and alert_conditions.py know.

Knows names of metrics. Does not know histories.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, isnan, nan

Sample = tuple[str, Mapping[str, str], float]
"""Name, labels and value of a series of /metrics."""

COUNTS = (
    "requests",  # all
    "counted",  # those of the error budget: answered 2.., 429 or 5..
    "bad",  # answered 429 or 5..
    "errors",  # answered 5..
    "timed",  # without lines of streams
    "background",
    "shed",
    "queries",
    "incomplete",
    "degraded",
    "unknown_ids",
    "engine_s",
    "reload_failures",
    "worker_restarts",
    "store_failures",  # of versions; not of a store that does not answer
    "probe_answered",  # of the default version
    "probe_failed",
    "probe_queries",
    "auth_retrieve",  # refused keys by role, of all models
    "auth_write",
    "auth_admin",
    "auth_internal",
)
"""Numbers that only grow."""
STATES = (
    "default_version",
    "recall",  # of the default version, at recall_m
    "expected_recall",
    "recall_m",
    "recall_loss",  # of the default version, at the m where it is largest compared with its limit
    "recall_loss_limit",
    "drift",  # the largest over versions
    "live_items",  # of the default version
    "live_tombstones",
    "live_capacity",  # the largest over versions
    "live_canary_recall",  # the lowest
    "live_displacement",  # the lowest
    "live_lag",  # operations
    "journal_failing",
    "desired_state_wrong",
    "store_silent",  # seconds
    "workers",
    "queue_depth",
    "memory",  # shares of what there is, of the whole service
    "descriptors",
    "gpu_memory",
    "disk",
)
"""Numbers that go up and down; NaN where one is unknown."""
RECALL_SHARE, RECALL_MOST = 0.1, 0.02
"""A loss of recall is allowed up to this share of the expected recall, and up to this value."""


@dataclass(frozen=True)
class Totals:
    """at: seconds since 1970; values: by the names of COUNTS and STATES.

    buckets  upper bound of a bucket in seconds, ascending → how many requests took no longer
    ready    versions that serve
    """

    at: float
    values: Mapping[str, float]
    buckets: Mapping[float, float] = field(default_factory=dict)
    ready: tuple[int, ...] = ()


def totals(samples: Iterable[Sample], models: Iterable[str], at: float) -> dict[str, Totals]:
    """By model."""
    found = Series(samples)
    return {model: _of_model(found, model, at) for model in models}


class Series:
    def __init__(self, samples: Iterable[Sample]) -> None:
        self._found: dict[tuple[str, str], list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for name, labels, value in samples:
            self._found[name, labels.get("model", "")].append((labels, value))

    def all(self, name: str, model: str = "", **labels: str) -> list[tuple[Mapping[str, str], float]]:
        """(labels, value) of the series that have these labels."""
        return [(own, value) for own, value in self._found.get((name, model), ()) if all(own.get(k) == v for k, v in labels.items())]

    def sum(self, name: str, model: str = "", matches: Callable[[Mapping[str, str]], bool] = lambda _: True) -> float:
        return sum((value for labels, value in self._found.get((name, model), ()) if matches(labels)), 0.0)

    def only(self, name: str, model: str = "", **labels: str) -> float:
        found = self.all(name, model, **labels)
        return found[0][1] if found else nan

    def buckets(self, name: str, model: str, **labels: str) -> dict[float, float]:
        """Upper bound of a bucket of a histogram, ascending → how many are not above it."""
        found = self.all(f"{name}_bucket", model, **labels)
        return dict(sorted((inf if own["le"] == "+Inf" else float(own["le"]), value) for own, value in found))


def _of_model(series: Series, model: str, at: float) -> Totals:
    default = series.only("espalier_model_default_version", model)
    version = "" if isnan(default) else str(int(default))
    values = {
        **_requests(series, model),
        **_probe(series, model, version),
        **_live(series, model, version),
        **_service(series),
        "engine_s": series.sum("espalier_engine_seconds_total", model),
        "reload_failures": series.sum("espalier_reload_total", model, lambda own: own["outcome"] in ("failed", "rolled_back")),
        "default_version": default,
        "desired_state_wrong": series.only("espalier_desired_state_wrong", model),
        "queue_depth": series.only("espalier_queue_depth", model),
    }
    ready = sorted({int(own["version"]) for own, value in series.all("espalier_model_info", model) if value == 1})
    return Totals(at, values, series.buckets("espalier_request_seconds", model), tuple(ready))


def _requests(series: Series, model: str) -> dict[str, float]:
    def answered(*statuses: str) -> float:
        """Without 503-client and 504-client: what the client alone caused."""
        name = "espalier_requests_total"
        return series.sum(name, model, lambda own: own["status"].isdecimal() and own["status"].startswith(statuses))

    return {
        "requests": series.sum("espalier_requests_total", model),
        "counted": answered("2", "429", "5"),
        "bad": answered("429", "5"),
        "errors": answered("5"),
        "timed": series.sum("espalier_request_seconds_count", model),
        "background": series.sum("espalier_background_requests_total", model),
        "shed": series.sum("espalier_shed_total", model),
        "queries": series.sum("espalier_queries_total", model),
        "incomplete": series.sum("espalier_incomplete_total", model),
        "degraded": series.sum("espalier_degraded_total", model),
        "unknown_ids": series.sum("espalier_unknown_ids_total", model),
    }


def _probe(series: Series, model: str, version: str) -> dict[str, float]:
    recalls = {(own["version"], own["m"]): value for own, value in series.all("espalier_probe_recall", model) if value >= 0}
    expected = {(own["version"], own["m"]): value for own, value in series.all("espalier_probe_expected_recall", model) if value >= 0}
    ms = sorted({int(m) for own, m in recalls if own == version})
    m = ms[len(ms) // 2] if ms else None
    both = [key for key in expected if key in recalls and key[0] == version]
    losses = [(expected[key] - recalls[key], min(RECALL_SHARE * expected[key], RECALL_MOST)) for key in both]
    loss, limit = max(losses, key=lambda one: one[0] - one[1], default=(nan, nan))
    asked = {outcome: series.all("espalier_probe_queries_total", model, version=version, outcome=outcome) for outcome in _OUTCOMES}
    counts = {outcome: sum(value for _, value in found) for outcome, found in asked.items()}
    known = any(asked.values())
    return {
        "recall": recalls.get((version, str(m)), nan),
        "expected_recall": expected.get((version, str(m)), nan),
        "recall_m": nan if m is None else float(m),
        "recall_loss": loss,
        "recall_loss_limit": limit,
        "drift": _extreme(max, series, "espalier_probe_drift", model),
        "probe_answered": counts["answered"] if known else nan,
        "probe_failed": counts["failed"] if known else nan,
        "probe_queries": sum(counts.values()) if known else nan,
    }


_OUTCOMES = ("answered", "late", "failed")


def _live(series: Series, model: str, version: str) -> dict[str, float]:
    return {
        "live_items": series.only("espalier_live_items", model, version=version),
        "live_tombstones": series.only("espalier_live_tombstones", model, version=version),
        "live_capacity": _extreme(max, series, "espalier_live_capacity_ratio", model),
        "live_canary_recall": _extreme(min, series, "espalier_live_canary_recall", model),
        "live_displacement": _extreme(min, series, "espalier_live_displacement", model),
        "live_lag": series.only("espalier_live_lag", model),
        "journal_failing": series.only("espalier_live_journal_failing", model),
    }


def _service(series: Series) -> dict[str, float]:
    limit = series.only("espalier_memory_limit_bytes")
    gpu = {own["device"]: value for own, value in series.all("espalier_gpu_memory_bytes")}
    gpu_limits = {own["device"]: value for own, value in series.all("espalier_gpu_memory_limit_bytes")}
    most = {own["worker"]: value for own, value in series.all("espalier_worker_max_descriptors")}
    descriptors = series.all("espalier_worker_open_descriptors")
    disk, free = series.only("espalier_models_disk_bytes"), series.only("espalier_models_disk_free_bytes")
    refused = dict.fromkeys(("auth_retrieve", "auth_write", "auth_admin", "auth_internal"), 0.0)
    for own, value in series.all("espalier_auth_failures_total"):
        refused[f"auth_{own['role']}"] += value
    return {
        "workers": series.only("espalier_workers"),
        "worker_restarts": series.sum("espalier_worker_restarts_total"),
        "store_failures": series.sum("espalier_store_failures_total", matches=lambda own: own["reason"] != "unreachable"),
        "store_silent": series.only("espalier_store_silent_seconds"),
        "memory": series.sum("espalier_worker_anonymous_bytes") / limit if limit > 0 else nan,
        "descriptors": max((value / most[own["worker"]] for own, value in descriptors if most.get(own["worker"])), default=nan),
        "gpu_memory": max((used / gpu_limits[device] for device, used in gpu.items() if gpu_limits.get(device)), default=nan),
        "disk": 1 - free / disk if disk > 0 else nan,
        **refused,
    }


def _extreme(choose: Callable[..., float], series: Series, name: str, model: str) -> float:
    return choose((value for _, value in series.all(name, model) if not isnan(value)), default=nan)
