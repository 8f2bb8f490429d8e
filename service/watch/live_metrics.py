"""The metrics of one model's live catalogue.

Every worker reports what it has applied; the scraped value is that of the worst worker. The worker that receives a write counts it. Knows
numbers. Does not know items, journals or versions that serve.
"""

from __future__ import annotations

from ..watch.metrics import Metrics

REFUSED = (404, 409, 412, 413, 415, 422, 429, 503, 507)
"""Statuses of refused writes. Their counters are 0 from the start, so that Prometheus sees the first refusal as an increase."""


class LiveMetrics:
    """One object for each model that takes writes or follows them. Any thread may call its methods."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._model = model
        self._gauges, self._refused = metrics.gauges, metrics.counters["espalier_live_refused_total"]
        self._visible = metrics.histograms["espalier_live_visible_seconds"].labels(model)
        self._lag = metrics.gauges["espalier_live_lag"].labels(model)
        for status in REFUSED:
            self._refused.labels(model, status)

    def holds(self, version: int, items: int, tombstones: int, limit: int) -> None:
        """Set how many live items the last snapshot of a serving version has.

        items, tombstones  live items and deleted ones
        limit              most live items, ESPALIER_MAX_LIVE
        """
        for name, value in (("items", items), ("tombstones", tombstones), ("capacity_ratio", items / limit if limit else 0.0)):
            self._gauges[f"espalier_live_{name}"].labels(self._model, version).set(value)

    def lag(self, operations: int) -> None:
        """Set how many committed operations this worker, or a worker that it waits for, has not applied."""
        self._lag.set(operations)

    def journal_failing(self, failing: bool) -> None:
        """Set whether the journal cannot be written or read."""
        self._gauges["espalier_live_journal_failing"].labels(self._model).set(failing)

    def visible(self, seconds: float) -> None:
        """Note how long after the arrival of a write's request all workers had applied it."""
        self._visible.observe(seconds)

    def refused(self, status: int, writes: int = 1) -> None:
        """Count writes, of single requests or lines of a bulk, that were refused with this status."""
        self._refused.labels(self._model, status).inc(writes)

    def probed(self, version: int, canary_recall: float | None, displacement: float | None) -> None:
        """Set the probe's measurements of a version; None leaves a value: there are too few answers yet.

        canary_recall  share of recent inserts that a search for their own evidence returns; NaN without recent inserts
        displacement   held-out recall with the live catalogue minus recall without it: below 0, old items are displaced
        """
        for name, value in (("canary_recall", canary_recall), ("displacement", displacement)):
            if value is not None:
                self._gauges[f"espalier_live_{name}"].labels(self._model, version).set(value)
