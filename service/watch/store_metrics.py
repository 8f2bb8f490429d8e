"""The metrics of a service that follows a store. The worker that follows it counts; what it finds out is scraped from any."""

from __future__ import annotations

from espalier.errors import CacheFull, StoreDamaged, StoreMissing, StoreUnavailable
from service.watch.metrics import Metrics

REASONS = ("unreachable", "missing", "damaged", "disk_full", "other")
"""Why something did not come: 0 from the start, so that Prometheus sees the first one as an increase."""


class StoreMetrics:
    """Made once for a service with a store."""

    def __init__(self, metrics: Metrics) -> None:
        self._bytes = metrics.counters["espalier_store_bytes_total"]
        self._seconds = metrics.counters["espalier_store_seconds_total"]
        self._failures = metrics.counters["espalier_store_failures_total"]
        self._silent = metrics.gauges["espalier_store_silent_seconds"]
        for reason in REASONS:
            self._failures.labels(reason)

    def came(self, count: int) -> None:
        """Count bytes that were downloaded."""
        self._bytes.inc(count)

    def took(self, seconds: float) -> None:
        """Count the seconds of one download, whether or not it was finished."""
        self._seconds.inc(seconds)

    def failed(self, error: Exception) -> None:
        """Count one failure of the store or of a version."""
        self._failures.labels(reason_of(error)).inc()

    def silent(self, seconds: float) -> None:
        """How long ago the store answered last."""
        self._silent.set(seconds)


def reason_of(error: Exception) -> str:
    kinds = {StoreUnavailable: "unreachable", StoreMissing: "missing", StoreDamaged: "damaged", CacheFull: "disk_full"}
    return next((reason for kind, reason in kinds.items() if isinstance(error, kind)), "other")
