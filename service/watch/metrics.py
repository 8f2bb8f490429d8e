"""Counts and renders the Prometheus metrics of metric_table.py.

Several workers count in files of one folder (multiprocess.py), and the worker that is scraped sums them. Knows numbers. Does not know
requests, engines or models.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from ..keys_file import MOST_KEYS
from ..watch import multiprocess
from ..watch.metric_table import COUNTERS, GAUGES, HISTOGRAMS, VERSION_METRICS
from ..watch.process_usage import gpu_memory, memory_limit, usage

CONTENT_TYPE = CONTENT_TYPE_LATEST
AUTH_FAILURES = tuple(
    (role, reason)
    for role in ("retrieve", "write", "admin", "internal")
    for reason in ("missing", "malformed", "unknown", "expired", "role", "model", "off")
    if (role, reason) != ("retrieve", "off")
)
"""The reasons for which each role can be refused."""
STAGES = ("queue", "encode", "search", "serialise", "rerank")
SHARD_REFUSALS = ("unknown_masks", "not_served", "invalid", "full", "late", "not_ready", "failed")
"""Why a router's search is refused."""
REFUSALS = ("too_many", "crowded_out", "head_too_large", "head_too_slow", "malformed", "not_read", "handshake")
"""Why a connection is refused or closed, see connection.py and handshake.py."""
RELOADS = ("loaded", "failed", "rolled_back", "unloaded")
REFUSED_WRITES = (404, 409, 412, 413, 415, 422, 429, 503, 507)
"""Statuses of refused writes of live items."""
VersionOutcome = Literal["answered", "refused", "late", "failed"]
ShadowOutcome = Literal["compared", "failed", "left_out"]
BY_CLIENT = "-client"
"""Suffix of the status label for errors that the client's own deadline or condition caused. No error budget counts them."""
OTHER_KEYS = "others"
"""Label of all keys beyond MOST_KEYS: a file may bring new keys at any time."""
MEASURE_S = 1.0
"""Seconds between two measurements of this process."""


class Metrics:
    """One registry per application, so that two applications in one process do not share counts.

    folder        in which all workers count; then their sums are rendered. None: this process counts alone
    watches_gpus  whether the memory of GPUs is measured at each scrape
    """

    def __init__(self) -> None:
        disable_created_metrics()
        self.folder: Path | None = None
        self._registry = registry = CollectorRegistry()
        self.counters = {name: Counter(name, row.help, row.labels, registry=registry) for name, row in COUNTERS.items()}
        self.gauges = {
            name: Gauge(name, row.help, row.labels, registry=registry, multiprocess_mode=row.mode) for name, row in GAUGES.items()
        }
        self.histograms = {
            name: Histogram(name, row.help, row.labels, registry=registry, buckets=row.buckets) for name, row in HISTOGRAMS.items()
        }
        self.gauges["espalier_workers"].set(1)
        for role, reason in AUTH_FAILURES:
            self.count("espalier_auth_failures_total", role, reason, by=0)  # 0 from the start, as the next two
        for refusal in SHARD_REFUSALS:
            self.count("espalier_shard_refused_total", refusal, by=0)
        for refusal in REFUSALS:
            self.count("espalier_refused_connections_total", refusal, by=0)
        self._began, self._worker, self._measure_at, self._cpu_s = time.time(), "0", 0.0, 0.0
        self.watches_gpus = False
        self._disk: Path | None = None
        self._request_metrics: dict[tuple[str, int | str], tuple[Counter, Histogram]] = {}  # by model and status label
        self._key_counters: dict[tuple[str, str], Counter] = {}  # by key and outcome
        self._queues: dict[str, list[Callable[[], int]]] = {}
        self._lock = threading.Lock()  # guards _queues

    def begin(self, worker: int, restarted: bool) -> None:
        """Set the number of this worker. restarted: it replaces a worker that ended."""
        self._worker = str(worker)
        if restarted:
            self.counters["espalier_worker_restarts_total"].inc()
        self.measure_process()

    def render(self) -> bytes:
        """The text that Prometheus scrapes, for all workers."""
        return generate_latest(self._measured())

    def samples(self) -> Iterator[tuple[str, Mapping[str, str], float]]:
        """Name, labels and value of every series of that text."""
        for metric in self._measured().collect():
            for sample in metric.samples:
                yield sample.name, sample.labels, sample.value

    def _measured(self) -> CollectorRegistry:
        """The registry to expose, after measuring gauges."""
        self.measure_queues()
        self.measure_process()
        self.measure_disk()
        for device, (used, limit) in (gpu_memory() if self.watches_gpus else {}).items():
            self.gauges["espalier_gpu_memory_bytes"].labels(device).set(used)
            self.gauges["espalier_gpu_memory_limit_bytes"].labels(device).set(limit)
        if self.folder is None:
            return self._registry
        registry = CollectorRegistry()
        registry.register(multiprocess.AllWorkers(self.folder))
        return registry

    # -- events ---------------------------------------------------------------------------------------------------------

    def count(self, name: str, *labels: object, by: float = 1.0) -> None:
        """Add to a counter of the table."""
        counter = self.counters[name]
        (counter.labels(*labels) if labels else counter).inc(by)

    def observe(self, name: str, value: float, *labels: object) -> None:
        """Add a value to a histogram of the table."""
        self.histograms[name].labels(*labels).observe(value)

    def show(self, name: str, value: float, *labels: object) -> None:
        """Set a gauge of the table."""
        gauge = self.gauges[name]
        (gauge.labels(*labels) if labels else gauge).set(value)

    def request(self, model: str, status: int, seconds: float | None, by_client: bool = False) -> None:
        """Count one answered request. seconds: None for a line of a stream.

        by_client  whether the client's own deadline or condition made it an error, which is no failure of the service
        """
        label = f"{status}{BY_CLIENT}" if by_client else status
        if (model, label) not in self._request_metrics:
            counter = self.counters["espalier_requests_total"].labels(model, label)
            self._request_metrics[model, label] = counter, self.histograms["espalier_request_seconds"].labels(model)
        requests, latencies = self._request_metrics[model, label]
        requests.inc()
        if seconds is not None:
            latencies.observe(seconds)

    def key_request(self, key: str, outcome: Literal["admitted", "limited"]) -> None:
        """Count one retrieval of a key. Keys beyond MOST_KEYS are counted together."""
        counter = self._key_counters.get((key, outcome))
        if counter is None:
            name = key if len(self._key_counters) < 2 * MOST_KEYS else OTHER_KEYS
            counter = self._key_counters[name, outcome] = self.counters["espalier_key_requests_total"].labels(name, outcome)
        counter.inc()

    # -- state ----------------------------------------------------------------------------------------------------------

    def add_model(self, model: str) -> None:
        """Add a model of the models folder. Its counts are 0 from the start, so that Prometheus sees the first one as an increase."""
        for outcome in RELOADS:
            self.count("espalier_reload_total", model, outcome, by=0)
        for status in REFUSED_WRITES:
            self.count("espalier_live_refused_total", model, status, by=0)
        self.histograms["espalier_live_visible_seconds"].labels(model)
        self.show("espalier_live_lag", 0, model)
        self.show("espalier_desired_state_wrong", False, model)

    def probed(self, model: str, version: int, recall: Mapping[int, float], expected: Mapping[int, float], drift: float | None) -> None:
        """Set the probe's measurements of a version: m → recall@m, m → its expected value, and the drift of golden queries."""
        for m, value in recall.items():
            self.show("espalier_probe_recall", value, model, version, m)
        for m, value in expected.items():
            self.show("espalier_probe_expected_recall", value, model, version, m)
        if drift is not None:
            self.show("espalier_probe_drift", drift, model, version)

    def forget_version(self, model: str, version: int) -> None:
        """Drop the series of an unloaded version. Otherwise a service that loads a version a day would show all of them for ever."""
        labels = {"model": model, "version": str(version)}
        for name in VERSION_METRICS:
            (self.counters.get(name) or self.gauges.get(name) or self.histograms[name]).remove_by_labels(labels)
        multiprocess.forget(labels)

    # -- measurements ---------------------------------------------------------------------------------------------------

    def watch_disk(self, folder: Path) -> None:
        """Measure the disk of a folder now and at each scrape. Each worker must measure it often: the lowest of their numbers counts."""
        self._disk = folder
        self.measure_disk()

    def measure_disk(self) -> None:
        """Measure the free space of the folder's file system. If the folder is gone, the last values stay."""
        if self._disk is None:
            return
        with suppress(OSError):
            total, _, free = shutil.disk_usage(self._disk)
            self.gauges["espalier_models_disk_bytes"].set(total)
            self.gauges["espalier_models_disk_free_bytes"].set(free)

    def measure_process(self) -> None:
        """Measure memory, descriptors and processor time of this process, at most once in MEASURE_S."""
        now = time.monotonic()
        if now < self._measure_at:
            return
        self._measure_at = now + MEASURE_S
        process, limit = usage(), memory_limit()
        gauges = {"espalier_worker_start_time_seconds": self._began}
        if limit is not None:
            self.gauges["espalier_memory_limit_bytes"].set(limit)
        if process is not None:
            gauges["espalier_worker_open_descriptors"] = process.descriptors
            gauges["espalier_worker_max_descriptors"] = process.max_descriptors
            self.counters["espalier_worker_cpu_seconds_total"].labels(self._worker).inc(max(process.cpu_s - self._cpu_s, 0.0))
            self._cpu_s = process.cpu_s
            if process.resident_bytes:  # unknown if no descriptor is free
                gauges["espalier_worker_resident_bytes"] = process.resident_bytes
                gauges["espalier_worker_anonymous_bytes"] = process.anonymous_bytes
        for name, value in gauges.items():
            self.gauges[name].labels(self._worker).set(value)

    def watch_queue(self, model: str, depth: Callable[[], int]) -> None:
        with self._lock:
            self._queues.setdefault(model, []).append(depth)
        self.measure_queues()

    def unwatch_queue(self, model: str, depth: Callable[[], int]) -> None:
        with self._lock:
            self._queues[model].remove(depth)
        self.measure_queues()

    def measure_queues(self) -> None:
        """Measure all queues, and write values that waited for disk space. (Other workers could not see a gauge that is a function.)"""
        multiprocess.settle()
        with self._lock:
            for model, depths in self._queues.items():
                self.gauges["espalier_queue_depth"].labels(model).set(sum([depth() for depth in depths]))


class ModelMetrics:
    """The metrics of one loaded version. Their labels are looked up once."""

    def __init__(self, metrics: Metrics, model: str, version: int, engine: str, queue_depth: Callable[[], int]) -> None:
        counters, histograms = metrics.counters, metrics.histograms
        self._metrics, self._model, self._engine, self._queue_depth = metrics, model, engine, queue_depth
        self._stages = tuple(histograms["espalier_stage_seconds"].labels(model, stage) for stage in STAGES)
        self._batch = histograms["espalier_batch_queries"].labels(model)
        self._engine_seconds = counters["espalier_engine_seconds_total"].labels(model)
        self._queries = counters["espalier_queries_total"].labels(model)
        self._incomplete = counters["espalier_incomplete_total"].labels(model)
        self._degraded = counters["espalier_degraded_total"].labels(model)
        self._unknown = counters["espalier_unknown_ids_total"].labels(model)
        counters["espalier_shed_total"].labels(model)  # 0 from the start
        self._version = version
        self._outcomes: dict[VersionOutcome, Counter] = {}  # series of a version are made when there is something to count
        self._seconds: Histogram | None = None
        self._beams: dict[int, Histogram] = {}
        metrics.watch_queue(model, queue_depth)

    def close(self) -> None:
        self._metrics.unwatch_queue(self._model, self._queue_depth)

    def request(self, outcome: VersionOutcome, seconds: float) -> None:
        """Count one request to the version, and how long it took."""
        if outcome not in self._outcomes:
            requests = self._metrics.counters["espalier_version_requests_total"]
            self._outcomes[outcome] = requests.labels(self._model, self._version, outcome)
        self._outcomes[outcome].inc()
        if outcome == "answered":
            if self._seconds is None:
                self._seconds = self._metrics.histograms["espalier_version_request_seconds"].labels(self._model, self._version)
            self._seconds.observe(seconds)

    def shadow(self, outcome: ShadowOutcome) -> None:
        """Count one request that the version was to answer as a shadow."""
        self._metrics.counters["espalier_shadow_requests_total"].labels(self._model, self._version, outcome).inc()

    def compared(self, overlap: float, default_s: float, own_s: float) -> None:
        """Count one request that the version answered as a shadow. overlap: share of common items; others: engine seconds per query."""
        self.shadow("compared")
        histograms = self._metrics.histograms
        histograms["espalier_shadow_overlap"].labels(self._model, self._version).observe(overlap)
        for role, seconds in (("default", default_s), ("candidate", own_s)):
            histograms["espalier_shadow_seconds"].labels(self._model, self._version, role).observe(seconds)

    def call(self, batch: int, seconds: float) -> None:
        """Count one engine call of `batch` queries."""
        self._batch.observe(batch)
        self._engine_seconds.inc(seconds)

    def retrieved(
        self,
        stages_s: Sequence[float],
        s_per_query: float,
        beam_size: int,
        queries: int = 1,
        incomplete: int = 0,
        degraded: int = 0,
        unknown: int = 0,
    ) -> None:
        """Count one answered request.

        stages_s              seconds per stage in the order of STAGES; not all requests have the last
        incomplete, degraded  how many of its queries were
        unknown               ids in its queries that the catalogue does not have
        """
        self._queries.inc(queries)
        bucket = beam_size.bit_length()
        beam = self._beams.get(bucket)
        if beam is None:
            query_seconds = self._metrics.histograms["espalier_query_seconds"]
            beam = self._beams[bucket] = query_seconds.labels(self._model, self._engine, 1 << (bucket - 1))
        for stage, seconds in zip(self._stages, stages_s, strict=False):
            stage.observe(seconds)
        beam.observe(s_per_query)
        if incomplete:
            self._incomplete.inc(incomplete)
        if degraded:
            self._degraded.inc(degraded)
        if unknown:
            self._unknown.inc(unknown)
