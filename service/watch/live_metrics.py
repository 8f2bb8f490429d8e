"""The metrics of one model's live catalogue.

Every worker reports what it has applied, and the worst of them is scraped; a write is counted by the worker that took it. Knows numbers.
Does not know items, journals or versions that serve.
"""

from __future__ import annotations

from ..watch.metrics import Metrics

REFUSED = (404, 409, 412, 413, 415, 422, 429, 503, 507)
"""Statuses of refused writes: 0 from the start, so that Prometheus sees the first one as an increase."""


class LiveMetrics:
    """Made once for each model that takes writes or follows those of others. Its methods may be called from any thread."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._model = model
        self._gauges, self._refused = metrics.gauges, metrics.counters["espalier_live_refused_total"]
        self._visible = metrics.histograms["espalier_live_visible_seconds"].labels(model)
        self._lag = metrics.gauges["espalier_live_lag"].labels(model)
        for status in REFUSED:
            self._refused.labels(model, status)

    def holds(self, version: int, items: int, tombstones: int, limit: int) -> None:
        """What a version that serves holds since its last snapshot.

        items, tombstones  live items and deleted ones
        limit              most live items, ESPALIER_MAX_LIVE
        """
        for name, value in (("items", items), ("tombstones", tombstones), ("capacity_ratio", items / limit if limit else 0.0)):
            self._gauges[f"espalier_live_{name}"].labels(self._model, version).set(value)

    def lag(self, operations: int) -> None:
        """How many committed operations this worker, or one that it waits for, has not applied."""
        self._lag.set(operations)

    def journal_failing(self, failing: bool) -> None:
        """Whether the journal takes no writes, or cannot be read."""
        self._gauges["espalier_live_journal_failing"].labels(self._model).set(failing)

    def visible(self, seconds: float) -> None:
        """A write was applied by all workers, so long after its request had arrived."""
        self._visible.observe(seconds)

    def refused(self, status: int, writes: int = 1) -> None:
        """Count writes, of single requests or lines of a bulk, that were refused with this status."""
        self._refused.labels(self._model, status).inc(writes)

    def probed(self, version: int, canary_recall: float | None, displacement: float | None) -> None:
        """The probe's findings on a version; None: too few answers yet.

        canary_recall  share of recent inserts that their own evidence finds; NaN where there are none
        displacement   held-out recall with the live catalogue less that without: below 0, old items are displaced
        """
        for name, value in (("canary_recall", canary_recall), ("displacement", displacement)):
            if value is not None:
                self._gauges[f"espalier_live_{name}"].labels(self._model, version).set(value)
