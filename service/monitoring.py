"""The Prometheus metrics: their names, labels and buckets. The only importer of prometheus_client.

Knows numbers. Does not know requests, engines or models.
"""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = tuple(15e-6 * 1.5**i for i in range(34))
"""Geometric buckets from 15 µs to 9.7 s."""
QUERIES = tuple(2.0**i for i in range(11))
STAGES = ("queue", "encode", "search", "serialise")


class Metrics:
    """One registry per application, so that two applications in one process do not share counts."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per series, which nobody reads
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "espalier_requests_total",
            "Answered POST /retrieve requests; model is empty where none was found.",
            ["model", "status"],
            registry=registry,
        )
        self.request_seconds = Histogram(
            "espalier_request_seconds",
            "From the head of a POST /retrieve to the end of its answer.",
            ["model"],
            buckets=SECONDS,
            registry=registry,
        )
        self.stage_seconds = Histogram(
            "espalier_stage_seconds", "Stages of answered requests.", ["model", "stage"], buckets=SECONDS, registry=registry
        )
        self.query_seconds = Histogram(
            "espalier_query_seconds",
            "Engine wall time ÷ queries in the engine call, once per request; beam is the power of two at or below the beam size.",
            ["model", "engine", "beam"],
            buckets=SECONDS,
            registry=registry,
        )
        self.batch_queries = Histogram(
            "espalier_batch_queries", "Queries in one engine call.", ["model"], buckets=QUERIES, registry=registry
        )
        self.queue_depth = Gauge("espalier_queue_depth", "Queries that wait for the engine.", ["model"], registry=registry)
        self.incomplete = Counter(
            "espalier_incomplete_total", "Queries that got fewer than min(m, eligible items).", ["model"], registry=registry
        )
        self.model_info = Gauge(
            "espalier_model_info", "1 where the version serves, 0 where it does not.", ["model", "version", "engine"], registry=registry
        )

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def request(self, model: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        self.requests.labels(model, status).inc()
        self.request_seconds.labels(model).observe(seconds)

    def model_state(self, model: str, version: int, engine: str, ready: bool) -> None:
        self.model_info.labels(model, version, engine).set(ready)


class ModelMetrics:
    """The metrics of one loaded model, their labels looked up once."""

    def __init__(self, metrics: Metrics, model: str, engine: str, queue_depth: Callable[[], int]) -> None:
        self._model, self._engine, self._metrics = model, engine, metrics
        self._stages = tuple(metrics.stage_seconds.labels(model, stage) for stage in STAGES)
        self._batch = metrics.batch_queries.labels(model)
        self._incomplete = metrics.incomplete.labels(model)
        metrics.queue_depth.labels(model).set_function(queue_depth)

    def call(self, batch: int) -> None:
        """One engine call of `batch` queries."""
        self._batch.observe(batch)

    def retrieved(self, stages_s: tuple[float, float, float, float], s_per_query: float, beam_size: int, incomplete: int) -> None:
        """One answered request: seconds per stage in the order of STAGES, and how many of its queries are incomplete."""
        for stage, seconds in zip(self._stages, stages_s, strict=True):
            stage.observe(seconds)
        self._metrics.query_seconds.labels(self._model, self._engine, 1 << (beam_size.bit_length() - 1)).observe(s_per_query)
        if incomplete:
            self._incomplete.inc(incomplete)
