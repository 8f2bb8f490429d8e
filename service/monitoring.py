"""The Prometheus metrics: their names, labels and buckets. The only importer of prometheus_client.

prometheus_client writes what is scraped; what is counted is in a Store, which several worker processes share and which takes a quarter
of the time (prometheus_client's own counters cost 8 µs a request, with several processes 16). Knows numbers. Does not know requests,
engines or models.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Literal

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from service.series import Labels, Slots, Store

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = tuple(15e-6 * 1.5**i for i in range(34))
"""Geometric buckets from 15 µs to 9.7 s."""
QUERIES = tuple(2.0**i for i in range(11))
STAGES = ("queue", "encode", "search", "serialise")
Outcome = Literal["loaded", "failed", "rolled_back", "unloaded"]


@dataclass(frozen=True)
class Described:
    """A metric as it is scraped. A gauge is summed over the workers that live; `largest` ones are 1 where any of them is not 0."""

    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: Labels
    buckets: tuple[float, ...] = ()
    largest: bool = False


METRICS = {
    "espalier_requests_total": Described(
        "counter", "Answered POST /retrieve requests; model is empty where none was found.", ("model", "status")
    ),
    "espalier_request_seconds": Described("histogram", "From the head of a POST /retrieve to the end of its answer.", ("model",), SECONDS),
    "espalier_stage_seconds": Described("histogram", "Stages of answered requests.", ("model", "stage"), SECONDS),
    "espalier_query_seconds": Described(
        "histogram",
        "Engine wall time ÷ queries in the engine call, once per request; beam is the power of two at or below the beam size.",
        ("model", "engine", "beam"),
        SECONDS,
    ),
    "espalier_batch_queries": Described("histogram", "Queries in one engine call.", ("model",), QUERIES),
    "espalier_queue_depth": Described("gauge", "Queries that wait for the engine.", ("model",)),
    "espalier_incomplete_total": Described("counter", "Queries that got fewer than min(m, eligible items).", ("model",)),
    "espalier_shed_total": Described("counter", "Requests that were refused because too many queries waited.", ("model",)),
    "espalier_degraded_total": Described("counter", "Queries that were searched with a smaller beam, to keep their deadline.", ("model",)),
    "espalier_reload_total": Described(
        "counter", "Versions loaded, failed to load or unloaded, per worker; and changes rolled back.", ("model", "outcome")
    ),
    "espalier_model_info": Described(
        "gauge", "1 where the version serves, 0 where it does not.", ("model", "version", "engine"), largest=True
    ),
}
"""Every metric by its name."""


class Histogram:
    """One series of a histogram. Slots: the sum, then how many fell into each bucket."""

    def __init__(self, store: Store, name: str, labels: Labels) -> None:
        self._bounds = METRICS[name].buckets
        self._slots = store.series(name, labels, len(self._bounds) + 2)

    def observe(self, value: float) -> None:
        slots = self._slots
        slots[0] += value
        slots[1 + bisect_left(self._bounds, value)] += 1


class Metrics(Collector):
    """One per application, so that two applications in one process do not share counts."""

    def __init__(self) -> None:
        self._store = Store()
        self.lock = threading.Lock()  # a slot is read, added to and written
        self._depths: dict[ModelMetrics, tuple[str, Callable[[], int]]] = {}
        self._requests: dict[tuple[str, int], tuple[Slots, Histogram]] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def share(self, folder: Path) -> None:
        """Count together with the other workers of a run folder. Before anything is counted."""
        self._store = Store(folder)

    @property
    def shared(self) -> bool:
        """Whether other workers read what is counted here."""
        return self._store.folder is not None

    def render(self) -> bytes:
        """The text that Prometheus scrapes: over all workers, whichever is asked."""
        self.queue_depth()
        return generate_latest(self._registry)

    def request(self, model: str, status: int, seconds: float) -> None:
        """Count one answered request."""
        found = self._requests.get((model, status))
        if found is None:
            counter = self.counter("espalier_requests_total", model, str(status))
            found = self._requests[model, status] = counter, Histogram(self._store, "espalier_request_seconds", (model,))
        counter, histogram = found
        with self.lock:
            counter[0] += 1
            histogram.observe(seconds)

    def shed(self, model: str) -> None:
        """Count one request that was refused because the queue is full."""
        self.add(self.counter("espalier_shed_total", model), 1)

    def reload(self, model: str, outcome: Outcome) -> None:
        """Count one change of what is loaded."""
        self.add(self.counter("espalier_reload_total", model, outcome), 1)

    def model_state(self, model: str, version: int, engine: str, ready: bool) -> None:
        self.counter("espalier_model_info", model, str(version), engine)[0] = float(ready)

    def counter(self, name: str, *labels: str) -> Slots:
        """The one slot of a counter's or a gauge's series."""
        return self._store.series(name, labels, 1)

    def histogram(self, name: str, *labels: str) -> Histogram:
        return Histogram(self._store, name, labels)

    def add(self, counter: Slots, amount: float) -> None:
        with self.lock:
            counter[0] += amount

    def watch(self, model: str, metrics: ModelMetrics, depth: Callable[[], int] | None) -> None:
        """Take the queue depth of a loaded version into the gauge; None: not any more."""
        with self.lock:
            self._depths.pop(metrics, None)
            if depth is not None:
                self._depths[metrics] = model, depth
        self.queue_depth(model)

    def queue_depth(self, only: str | None = None) -> None:
        """Bring the gauge up to date, for the other workers to read."""
        with self.lock:
            depths = dict.fromkeys([only] if only is not None else [model for model, _ in self._depths.values()], 0)
            for model, depth in self._depths.values():
                if model in depths:
                    depths[model] += depth()
        for model, waiting in depths.items():
            self.counter("espalier_queue_depth", model)[0] = waiting

    def collect(self) -> Iterable[Metric]:
        """For prometheus_client."""
        gauges = [name for name, described in METRICS.items() if described.kind == "gauge"]
        by_name: dict[str, list[tuple[Labels, list[float]]]] = {name: [] for name in METRICS}
        for (name, labels), slots in sorted(self._store.sums(of_the_living=gauges).items()):
            by_name[name].append((labels, slots))
        return [_family(name, described, by_name[name]) for name, described in METRICS.items()]


class ModelMetrics:
    """The metrics of one loaded version, their labels looked up once."""

    def __init__(self, metrics: Metrics, model: str, engine: str, queue_depth: Callable[[], int]) -> None:
        self._metrics, self._model, self._engine = metrics, model, engine
        self._stages = tuple(metrics.histogram("espalier_stage_seconds", model, stage) for stage in STAGES)
        self._batch = metrics.histogram("espalier_batch_queries", model)
        self._incomplete = metrics.counter("espalier_incomplete_total", model)
        self._degraded = metrics.counter("espalier_degraded_total", model)
        metrics.counter("espalier_shed_total", model)  # 0 from the start
        self._beams: dict[int, Histogram] = {}
        metrics.watch(model, self, queue_depth)

    def close(self) -> None:
        """The version does not serve any more."""
        self._metrics.watch(self._model, self, None)

    def call(self, batch: int) -> None:
        """One engine call of `batch` queries."""
        with self._metrics.lock:
            self._batch.observe(batch)
        if self._metrics.shared:
            self._metrics.queue_depth(self._model)

    def retrieved(
        self, stages_s: tuple[float, float, float, float], s_per_query: float, beam_size: int, incomplete: int, degraded: int = 0
    ) -> None:
        """One answered request: seconds per stage in the order of STAGES, and how many of its queries are incomplete or degraded."""
        bucket = beam_size.bit_length()
        beam = self._beams.get(bucket)
        if beam is None:
            beam = self._metrics.histogram("espalier_query_seconds", self._model, self._engine, str(1 << (bucket - 1)))
            self._beams[bucket] = beam
        with self._metrics.lock:
            for stage, seconds in zip(self._stages, stages_s, strict=True):
                stage.observe(seconds)
            beam.observe(s_per_query)
            if incomplete:
                self._incomplete[0] += incomplete
            if degraded:
                self._degraded[0] += degraded


def _family(name: str, described: Described, series: Iterable[tuple[Labels, list[float]]]) -> Metric:
    match described.kind:
        case "counter":
            counter = CounterMetricFamily(name.removesuffix("_total"), described.text, labels=described.labels)
            for labels, slots in series:
                counter.add_metric(labels, slots[0])
            return counter
        case "gauge":
            gauge = GaugeMetricFamily(name, described.text, labels=described.labels)
            for labels, slots in series:
                gauge.add_metric(labels, min(slots[0], 1.0) if described.largest else slots[0])
            return gauge
        case "histogram":
            histogram = HistogramMetricFamily(name, described.text, labels=described.labels)
            for labels, slots in series:
                histogram.add_metric(labels, list(_cumulated(described.buckets, slots[1:])), slots[0])
            return histogram


def _cumulated(bounds: tuple[float, ...], counts: list[float]) -> Iterator[tuple[str, float]]:
    yield from zip([*map(floatToGoString, bounds), "+Inf"], accumulate(counts), strict=True)
