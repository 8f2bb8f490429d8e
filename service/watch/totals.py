"""The numbers of one model at one time, from the metrics of all workers, for health.py.

Knows names of metrics. Does not know histories.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, isnan, nan

Sample = tuple[str, Mapping[str, str], float]
"""Name, labels and value of a series of /metrics."""

MAX_LOSS_SHARE, MAX_LOSS = 0.1, 0.02
"""A loss of recall is allowed up to this share of the expected recall, and up to this value."""
MAX_LAG = 1e18
"""The lag of a follower that cannot copy. Its metric is infinite, which JSON cannot say."""


@dataclass(frozen=True)
class Totals:
    """at: seconds since 1970; values: by name, as `_of_model` lists them: counts only grow; states go up and down, and are NaN if unknown.

    buckets  upper bound in seconds, ascending → how many requests took no longer
    ready    versions that serve
    """

    at: float
    values: Mapping[str, float]
    buckets: Mapping[float, float] = field(default_factory=dict)
    ready: tuple[int, ...] = ()


def totals(samples: Iterable[Sample], models: Iterable[str], at: float) -> dict[str, Totals]:
    """The totals of each model."""
    series = Series(samples)
    return {model: _of_model(series, model, at) for model in models}


class Series:
    def __init__(self, samples: Iterable[Sample]) -> None:
        self._by_name_and_model: dict[tuple[str, str], list[tuple[Mapping[str, str], float]]] = defaultdict(list)
        for name, labels, value in samples:
            self._by_name_and_model[name, labels.get("model", "")].append((labels, value))

    def all(self, name: str, model: str = "", **labels: str) -> list[tuple[Mapping[str, str], float]]:
        """(labels, value) of the series that have these labels."""
        series = self._by_name_and_model.get((name, model), ())
        return [(all_labels, value) for all_labels, value in series if labels.items() <= all_labels.items()]

    def sum(self, name: str, model: str = "", **labels: str) -> float:
        return sum((value for _, value in self.all(name, model, **labels)), 0.0)

    def only(self, name: str, model: str = "", **labels: str) -> float:
        values = [value for _, value in self.all(name, model, **labels)]
        return values[0] if values else nan

    def buckets(self, name: str, model: str, **labels: str) -> dict[float, float]:
        """Upper bound of a histogram's bucket, ascending → cumulative count."""
        buckets = [(all_labels["le"], value) for all_labels, value in self.all(f"{name}_bucket", model, **labels)]
        return dict(sorted((inf if bound == "+Inf" else float(bound), value) for bound, value in buckets))


def _of_model(series: Series, model: str, at: float) -> Totals:
    default = series.only("espalier_model_default_version", model)
    version = "" if isnan(default) else str(int(default))
    values = {
        **_requests(series, model),
        **_probe(series, model, version),
        **_live(series, model, version),
        **_service(series),
        "engine_s": series.sum("espalier_engine_seconds_total", model),
        "reload_failures": sum(series.sum("espalier_reload_total", model, outcome=outcome) for outcome in ("failed", "rolled_back")),
        "default_version": default,
        "desired_state_wrong": series.only("espalier_desired_state_wrong", model),
        "queue_depth": series.only("espalier_queue_depth", model),
    }
    ready = sorted({int(labels["version"]) for labels, value in series.all("espalier_model_info", model) if value == 1})
    return Totals(at, values, series.buckets("espalier_request_seconds", model), tuple(ready))


def _requests(series: Series, model: str) -> dict[str, float]:
    def answered(*statuses: str) -> float:
        """Without 503-client and 504-client, which the client's own deadline or condition caused."""
        counts = [(labels["status"], value) for labels, value in series.all("espalier_requests_total", model)]
        return sum(value for status, value in counts if status.isdecimal() and status.startswith(statuses))

    return {
        "requests": series.sum("espalier_requests_total", model),
        "counted": answered("2", "429", "5"),  # those of the error budget
        "bad": answered("429", "5"),
        "errors": answered("5"),
        "timed": series.sum("espalier_request_seconds_count", model),  # without lines of streams
        "background": series.sum("espalier_background_requests_total", model),
        "shed": series.sum("espalier_shed_total", model),
        "queries": series.sum("espalier_queries_total", model),
        "incomplete": series.sum("espalier_incomplete_total", model),
        "degraded": series.sum("espalier_degraded_total", model),
        "unknown_ids": series.sum("espalier_unknown_ids_total", model),
    }


def _probe(series: Series, model: str, version: str) -> dict[str, float]:
    def by_version_and_m(name: str) -> dict[tuple[str, str], float]:
        return {(labels["version"], labels["m"]): value for labels, value in series.all(name, model) if value >= 0}

    recalls, expected = by_version_and_m("espalier_probe_recall"), by_version_and_m("espalier_probe_expected_recall")
    ms = sorted({int(m) for other, m in recalls if other == version})
    m = ms[len(ms) // 2] if ms else None
    compared_keys = [key for key in expected if key in recalls and key[0] == version]
    losses = [(expected[key] - recalls[key], min(MAX_LOSS_SHARE * expected[key], MAX_LOSS)) for key in compared_keys]
    loss, limit = max(losses, key=lambda pair: pair[0] - pair[1], default=(nan, nan))
    queries = {outcome: series.all("espalier_probe_queries_total", model, version=version, outcome=outcome) for outcome in _OUTCOMES}
    counts = {outcome: sum(value for _, value in outcome_series) for outcome, outcome_series in queries.items()}
    has_probe = any(queries.values())
    return {  # of the default version
        "recall": recalls.get((version, str(m)), nan),  # at recall_m
        "expected_recall": expected.get((version, str(m)), nan),
        "recall_m": nan if m is None else float(m),
        "recall_loss": loss,  # at the m where it is largest compared with its limit
        "recall_loss_limit": limit,
        "drift": _extreme(max, series, "espalier_probe_drift", model),  # the largest over all versions
        "probe_answered": counts["answered"] if has_probe else nan,
        "probe_failed": counts["failed"] if has_probe else nan,
        "probe_queries": sum(counts.values()) if has_probe else nan,
    }


_OUTCOMES = ("answered", "late", "failed")


def _live(series: Series, model: str, version: str) -> dict[str, float]:
    return {
        "live_items": series.only("espalier_live_items", model, version=version),  # of the default version
        "live_tombstones": series.only("espalier_live_tombstones", model, version=version),
        "live_capacity": _extreme(max, series, "espalier_live_capacity_ratio", model),
        "live_canary_recall": _extreme(min, series, "espalier_live_canary_recall", model),
        "live_displacement": _extreme(min, series, "espalier_live_displacement", model),
        "live_lag": min(series.only("espalier_live_lag", model), MAX_LAG),  # operations
        "journal_failing": series.only("espalier_live_journal_failing", model),
    }


def _service(series: Series) -> dict[str, float]:
    limit = series.only("espalier_memory_limit_bytes")
    gpu = {labels["device"]: value for labels, value in series.all("espalier_gpu_memory_bytes")}
    gpu_limits = {labels["device"]: value for labels, value in series.all("espalier_gpu_memory_limit_bytes")}
    fd_limits = {labels["worker"]: value for labels, value in series.all("espalier_worker_max_descriptors")}
    descriptors = {labels["worker"]: value for labels, value in series.all("espalier_worker_open_descriptors")}
    disk, free = series.only("espalier_models_disk_bytes"), series.only("espalier_models_disk_free_bytes")
    store_failures = series.all("espalier_store_failures_total")
    refused = dict.fromkeys(("auth_retrieve", "auth_write", "auth_admin", "auth_internal"), 0.0)  # keys by role, of all models
    for labels, value in series.all("espalier_auth_failures_total"):
        refused[f"auth_{labels['role']}"] += value
    return {
        "workers": series.only("espalier_workers"),
        "worker_restarts": series.sum("espalier_worker_restarts_total"),
        "store_failures": sum(value for labels, value in store_failures if labels["reason"] != "unreachable"),  # of versions
        "store_silent": series.only("espalier_store_silent_seconds"),
        "memory": series.sum("espalier_worker_anonymous_bytes") / limit if limit > 0 else nan,  # a share, as the next three
        "descriptors": max((value / fd_limits[worker] for worker, value in descriptors.items() if fd_limits.get(worker)), default=nan),
        "gpu_memory": max((used / gpu_limits[device] for device, used in gpu.items() if gpu_limits.get(device)), default=nan),
        "disk": 1 - free / disk if disk > 0 else nan,
        **refused,
    }


def _extreme(choose: Callable[..., float], series: Series, name: str, model: str) -> float:
    return choose((value for _, value in series.all(name, model) if not isnan(value)), default=nan)


NAMES = tuple(_of_model(Series(()), "", 0.0).values)
"""The names of all values of `Totals`. They are the same whatever the samples are."""
