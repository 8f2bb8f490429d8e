"""What a router counts of its shards. Knows numbers alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

from ..router.transport import Reason
from ..watch.metrics import Metrics


class RouterMetrics:
    """The metrics `espalier_router_…`. From any thread."""

    def __init__(self, metrics: Metrics) -> None:
        self._shown: Mapping[tuple[str, int], int] = {}  # how many shards
        self._gauges, counters, histograms = metrics.gauges, metrics.counters, metrics.histograms
        self._hedges, self._retries = counters["espalier_router_hedges_total"], counters["espalier_router_retries_total"]
        self._mixed, self._left_out = counters["espalier_router_mixed_total"], counters["espalier_router_unanswered_total"]
        self._seconds = histograms["espalier_router_shard_seconds"]
        self._own_seconds, self._coverage = histograms["espalier_router_own_seconds"], histograms["espalier_router_coverage"]
        self._failures = {reason: counters["espalier_router_failures_total"].labels(reason) for reason in get_args(Reason)}

    def answered(self, shard: int, seconds: float) -> None:
        """A replica of a shard has answered."""
        self._seconds.labels(shard).observe(seconds)

    def failed(self, reason: Reason) -> None:
        """A replica gave no answer."""
        self._failures[reason].inc()
        if reason == "mixed":
            self._mixed.inc()

    def hedged(self) -> None:
        """A second replica was asked beside a slow one."""
        self._hedges.inc()

    def retried(self) -> None:
        """Another replica was asked after one that failed."""
        self._retries.inc()

    def unanswered(self, shard: int) -> None:
        """No replica of a shard gave an answer to a search."""
        self._left_out.labels(shard).inc()

    def searched(self, model: str, own_s: float, coverage: float) -> None:
        """One search. own_s: without the time of its slowest shard; coverage: the share of the items on shards that answered."""
        self._own_seconds.labels(model).observe(own_s)
        self._coverage.labels(model).observe(coverage)

    def replicas(self, shown: Mapping[tuple[str, int], Sequence[int]]) -> None:
        """How many replicas answer, by model and version, then by shard. Those that were shown before and are not among them are dropped.

        Always from the same thread.
        """
        gauge = self._gauges["espalier_router_replicas"]
        for (model, version), shards in self._shown.items():
            for shard in range(len(shown.get((model, version), ())), shards):
                gauge.remove(model, version, shard)
        for (model, version), up in shown.items():
            for shard, count in enumerate(up):
                gauge.labels(model, version, shard).set(count)
        self._shown = {key: len(up) for key, up in shown.items()}
