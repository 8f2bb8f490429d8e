"""The Prometheus metrics: their names, labels and buckets. The only importer of prometheus_client.

Several workers count in files of one folder (counter_files.py), and whichever worker is asked adds them up. Knows numbers. Does not know
requests, engines or models.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    disable_created_metrics,
    generate_latest,
    values,
)
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from service.watch import counter_files
from service.watch.process_usage import memory_limit, usage

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = tuple(15e-6 * 1.5**i for i in range(34))
"""Geometric buckets from 15 µs to 9.7 s."""
QUERIES = tuple(2.0**i for i in range(11))
AUTH_FAILURES = (
    *(("retrieve", reason) for reason in ("missing", "malformed", "unknown")),
    *(("admin", reason) for reason in ("missing", "malformed", "unknown", "role", "off")),
)
"""Which role can be refused for which reason."""
STAGES = ("queue", "encode", "search", "serialise", "rerank")
REFUSALS = ("too_many", "crowded_out", "head_too_large", "head_too_slow", "malformed", "not_read")
"""Why a connection is refused or cut off, see connection.py."""
Outcome = Literal["loaded", "failed", "rolled_back", "unloaded"]
ProbeOutcome = Literal["answered", "late", "failed"]
OWN_DEADLINE = "504-client"
"""The label `status` of a 504 whose deadline the client chose, shorter than ESPALIER_TIMEOUT_MS."""
MEASURE_S = 1.0
"""Between two looks at what this process takes of its machine."""
READS = 3
"""Of the files of all workers, until what cannot be read is an error: one of them may be writing a key."""


class _Shared:
    """A number of a metric in a file that other processes read, instead of one in this process."""

    _multiprocess = True
    files: ClassVar[counter_files.Counts | None] = None

    def __init__(
        self,
        kind: str,
        metric: str,
        sample: str,
        label_names: Sequence[str],
        label_values: Sequence[str],
        documentation: str,
        multiprocess_mode: str = "",
        **_: Any,
    ) -> None:
        if self.files is None:
            raise RuntimeError("count_in has not said where to count")
        self._file = self.files.file(f"{kind}_{multiprocess_mode}" if multiprocess_mode else kind)
        self._key = counter_files.key_of(metric, sample, dict(zip(label_names, label_values, strict=True)), documentation)
        self._value = 0.0
        self.inc(0.0)

    def inc(self, amount: float) -> None:
        with self._file.lock:
            self._value += amount
            self._file.write(self._key, self._value)

    def set(self, value: float, timestamp: float | None = None) -> None:
        with self._file.lock:
            self._value = value
            self._file.write(self._key, value)

    def get(self) -> float:
        return self._value

    def set_exemplar(self, exemplar: object) -> None:
        """None is kept: nobody could read it."""

    def get_exemplar(self) -> None:
        return None


def count_in(folder: Path) -> None:
    """Count in this folder from now on, together with other processes. To be said before the first metric is made."""
    _Shared.files = counter_files.Counts(folder)
    values.ValueClass = _Shared


class _AllWorkers(Collector):
    """What the workers of a folder have counted together."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Metric]:
        with counter_files.being_read(self._folder):
            for attempt in range(READS):
                try:
                    found = [*MultiProcessCollector(None, str(self._folder)).collect()]  # type: ignore[no-untyped-call]
                    break
                except ValueError:
                    if attempt == READS - 1:
                        raise
        yield from (metric for metric in found if metric.name != counter_files.FREE)


class Metrics:
    """One registry per application, so that two applications in one process do not share counts."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series per series, which nobody reads
        self._folder: Path | None = None
        self._registry = registry = CollectorRegistry()
        self.requests = Counter(
            "espalier_requests_total",
            "Answered POST /retrieve requests; model is empty where none was found.",
            ["model", "status"],
            registry=registry,
        )
        self.request_seconds = Histogram(
            "espalier_request_seconds",
            "From the head of a POST /retrieve to the end of its answer; lines of streams, which wait for each other, are not among them.",
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
        self.queries = Counter(
            "espalier_queries_total", "Queries of answered requests; the probe's are not among them.", ["model"], registry=registry
        )
        self.engine_seconds = Counter(
            "espalier_engine_seconds_total", "Seconds in which an engine was searching, over all workers.", ["model"], registry=registry
        )
        self.workers = Gauge("espalier_workers", "Processes that serve.", registry=registry, multiprocess_mode="livesum")
        self.workers.set(1)
        self.queue_depth = Gauge(
            "espalier_queue_depth", "Queries that wait for the engine.", ["model"], registry=registry, multiprocess_mode="livesum"
        )
        self.incomplete = Counter(
            "espalier_incomplete_total", "Queries that got fewer than min(m, eligible items).", ["model"], registry=registry
        )
        self.refused = Counter(
            "espalier_shed_total", "Requests that were refused because too many queries waited.", ["model"], registry=registry
        )
        self.degraded = Counter(
            "espalier_degraded_total",
            "Queries that were searched with a smaller beam, to keep their deadline.",
            ["model"],
            registry=registry,
        )
        self.auth_failures = Counter(
            "espalier_auth_failures_total",
            "Requests that were not let in, by the role that their route asks for and why it was not granted.",
            ["role", "reason"],
            registry=registry,
        )
        for role, reason in AUTH_FAILURES:
            self.auth_failures.labels(role, reason)  # 0 from the start
        self.reloads = Counter(
            "espalier_reload_total",
            "Versions loaded, failed to load or unloaded, per worker; and changes rolled back.",
            ["model", "outcome"],
            registry=registry,
        )
        self.wrong_state = Gauge(
            "espalier_desired_state_wrong",
            "1 while a model's serving.json or removed.json is malformed, unreadable or gone, so that what was last read is in force.",
            ["model"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.model_info = Gauge(
            "espalier_model_info",
            "1 where the version serves, 0 where it does not.",
            ["model", "version", "engine"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.default_version = Gauge(
            "espalier_model_default_version",
            "The version that answers where a request names none; 0 while none is ready.",
            ["model"],
            registry=registry,
            multiprocess_mode="livemin",
        )
        self.probe_recall = Gauge(
            "espalier_probe_recall",
            "Recall@m of held-out queries, by the answers of the probe's last round; NaN once the version is unloaded.",
            ["model", "version", "m"],
            registry=registry,
            multiprocess_mode="livemin",
        )
        self.probe_expected_recall = Gauge(
            "espalier_probe_expected_recall",
            "Recall@m of the same held-out queries when the model was exported.",
            ["model", "version", "m"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.probe_drift = Gauge(
            "espalier_probe_drift",
            "Mean absolute difference between the scores of golden queries now and when the model was exported.",
            ["model", "version"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.probe_queries = Counter(
            "espalier_probe_queries_total", "Queries that the probe replayed.", ["model", "version", "outcome"], registry=registry
        )
        self.gpu_memory = Gauge(
            "espalier_gpu_memory_bytes", "Memory in use on a GPU.", ["device"], registry=registry, multiprocess_mode="livemax"
        )
        self.gpu_memory_limit = Gauge(
            "espalier_gpu_memory_limit_bytes", "Memory that a GPU has.", ["device"], registry=registry, multiprocess_mode="livemax"
        )
        self.connections = Gauge("espalier_connections", "Open connections.", registry=registry, multiprocess_mode="livesum")
        self.refused_connections = Counter(
            "espalier_refused_connections_total",
            "Connections that were refused or cut off, by reason.",
            ["reason"],
            registry=registry,
        )
        for reason in REFUSALS:
            self.refused_connections.labels(reason)
        self.worker_resident = Gauge(
            "espalier_worker_resident_bytes",
            "Memory of a worker in RAM; what it shares with others, as the files of models, is counted in each.",
            ["worker"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.worker_anonymous = Gauge(
            "espalier_worker_anonymous_bytes",
            "Memory of a worker that is no file's, so that the system cannot drop it.",
            ["worker"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.memory_limit = Gauge(
            "espalier_memory_limit_bytes",
            "Memory that all workers together may take: of the container or its control groups, or what the machine has.",
            registry=registry,
            multiprocess_mode="livemin",
        )
        self.worker_descriptors = Gauge(
            "espalier_worker_open_descriptors",
            "Descriptors that a worker has open: connections and files.",
            ["worker"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.worker_max_descriptors = Gauge(
            "espalier_worker_max_descriptors",
            "Descriptors that a worker may have open.",
            ["worker"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.worker_start = Gauge(
            "espalier_worker_start_time_seconds",
            "When a worker began, in seconds since 1970.",
            ["worker"],
            registry=registry,
            multiprocess_mode="livemax",
        )
        self.worker_cpu = Counter(
            "espalier_worker_cpu_seconds_total", "Processor time that a worker, and those before it, took.", ["worker"], registry=registry
        )
        self.worker_restarts = Counter(
            "espalier_worker_restarts_total", "Workers that took the place of one that had ended.", registry=registry
        )
        self._began, self._worker, self._measure_at, self._cpu_s = time.time(), "0", 0.0, 0.0
        self._gpus: Callable[[], Mapping[str, tuple[int, int]]] | None = None
        self._answered: dict[tuple[str, int | str], tuple[Counter, Histogram]] = {}
        self._waiting: dict[str, list[Callable[[], int]]] = {}
        self._lock = threading.Lock()  # guards _waiting

    def share(self, folder: Path) -> None:
        """Be scraped for all workers, which count in this folder."""
        self._folder = folder

    def begin(self, worker: int, restarted: bool) -> None:
        """Say which of the workers this process is; restarted: in the place of one that ended."""
        self._worker = str(worker)
        if restarted:
            self.worker_restarts.inc()
        self.look_at_process()

    def render(self) -> bytes:
        """The text that Prometheus scrapes: over all workers, whichever is asked."""
        self.look_at_queues()
        self._look_at_gpus()
        self.look_at_process()
        if self._folder is None:
            return generate_latest(self._registry)
        registry = CollectorRegistry()
        registry.register(_AllWorkers(self._folder))
        return generate_latest(registry)

    def request(self, model: str, status: int, seconds: float | None, own_deadline: bool = False) -> None:
        """Count one answered request; without its seconds where it is a line of a stream.

        own_deadline  what passed was a deadline that the client had chosen, shorter than the service's: that is no failure of the service
        """
        label = OWN_DEADLINE if own_deadline else status
        found = self._answered.get((model, label))
        if found is None:
            found = self._answered[model, label] = self.requests.labels(model, label), self.request_seconds.labels(model)
        counter, histogram = found
        counter.inc()
        if seconds is not None:
            histogram.observe(seconds)

    def connection_refused(self, reason: str) -> None:
        """Count one connection that was refused or cut off."""
        self.refused_connections.labels(reason).inc()

    def shed(self, model: str) -> None:
        """Count one request that was refused because the queue is full."""
        self.refused.labels(model).inc()

    def auth_failure(self, role: str, reason: str) -> None:
        """Count one request that was not let in."""
        self.auth_failures.labels(role, reason).inc()

    def reload(self, model: str, outcome: Outcome) -> None:
        """Count one change of what is loaded."""
        self.reloads.labels(model, outcome).inc()

    def model_state(self, model: str, version: int, engine: str, ready: bool) -> None:
        self.model_info.labels(model, version, engine).set(ready)

    def know(self, model: str) -> None:
        """A model of the models folder: its changes are 0 from the start, so that the first one is seen as an increase."""
        for outcome in get_args(Outcome):
            self.reloads.labels(model, outcome)
        self.state_wrong(model, False)

    def state_wrong(self, model: str, wrong: bool) -> None:
        """Whether the files that say what should be served do not say what is in force."""
        self.wrong_state.labels(model).set(wrong)

    def default(self, model: str, version: float) -> None:
        """The version that answers where a request names none; 0 while none is ready, NaN where nobody waits for one."""
        self.default_version.labels(model).set(version)

    def probed(self, model: str, version: int, recall: Mapping[int, float], expected: Mapping[int, float], drift: float | None) -> None:
        """What the probe knows of a version after one more answer: recall@m and what it should be, by m; drift of the golden queries."""
        for m, value in recall.items():
            self.probe_recall.labels(model, version, m).set(value)
        for m, value in expected.items():
            self.probe_expected_recall.labels(model, version, m).set(value)
        if drift is not None:
            self.probe_drift.labels(model, version).set(drift)

    def probe_query(self, model: str, version: int, outcome: ProbeOutcome) -> None:
        """Count one query that the probe replayed."""
        self.probe_queries.labels(model, version, outcome).inc()

    def forget_version(self, model: str, version: int) -> None:
        """Show nothing any more of a version that does not serve: a service that loads one a day would show all of them for ever."""
        labels = {"model": model, "version": str(version)}
        for metric in (self.model_info, self.probe_recall, self.probe_expected_recall, self.probe_drift, self.probe_queries):
            metric.remove_by_labels(labels)
        if _Shared.files is not None:
            _Shared.files.forget(labels)

    def watch_gpus(self, read: Callable[[], Mapping[str, tuple[int, int]]]) -> None:
        """Ask for (bytes in use, bytes there are) by device at each scrape."""
        self._gpus = read

    def _look_at_gpus(self) -> None:
        for device, (used, limit) in (self._gpus() if self._gpus is not None else {}).items():
            self.gpu_memory.labels(device).set(used)
            self.gpu_memory_limit.labels(device).set(limit)

    def look_at_process(self) -> None:
        """Bring up to date what this process takes of its machine."""
        now = time.monotonic()
        if now < self._measure_at:
            return
        self._measure_at = now + MEASURE_S
        worker, found, limit = self._worker, usage(), memory_limit()
        self.worker_start.labels(worker).set(self._began)
        if limit is not None:
            self.memory_limit.set(limit)
        if found is not None:
            self.worker_descriptors.labels(worker).set(found.descriptors)
            self.worker_max_descriptors.labels(worker).set(found.max_descriptors)
            self.worker_cpu.labels(worker).inc(max(found.cpu_s - self._cpu_s, 0.0))
            self._cpu_s = found.cpu_s
            if found.resident_bytes:  # without a descriptor it cannot be asked for
                self.worker_resident.labels(worker).set(found.resident_bytes)
                self.worker_anonymous.labels(worker).set(found.anonymous_bytes)

    def watch(self, model: str, depth: Callable[[], int]) -> None:
        """Take the queue of a loaded version into the gauge."""
        with self._lock:
            self._waiting.setdefault(model, []).append(depth)
        self.look_at_queue(model)

    def unwatch(self, model: str, depth: Callable[[], int]) -> None:
        """The same, not any more."""
        with self._lock:
            self._waiting[model].remove(depth)
        self.look_at_queue(model)

    def look_at_queue(self, model: str) -> None:
        """Bring the gauge of one model up to date. (A gauge that is a function is not seen by the other workers.)"""
        with self._lock:
            self.queue_depth.labels(model).set(sum([depth() for depth in self._waiting[model]]))

    def look_at_queues(self) -> None:
        """Bring the gauges of all models up to date, and write what had to wait for room."""
        if _Shared.files is not None:
            _Shared.files.settle()
        for model in list(self._waiting):
            self.look_at_queue(model)


class ModelMetrics:
    """The metrics of one loaded version, their labels looked up once."""

    def __init__(self, metrics: Metrics, model: str, engine: str, queue_depth: Callable[[], int]) -> None:
        self._metrics, self._model, self._engine, self._queue_depth = metrics, model, engine, queue_depth
        self._stages = tuple(metrics.stage_seconds.labels(model, stage) for stage in STAGES)
        self._batch = metrics.batch_queries.labels(model)
        self._engine_seconds = metrics.engine_seconds.labels(model)
        self._queries = metrics.queries.labels(model)
        self._incomplete = metrics.incomplete.labels(model)
        self._degraded = metrics.degraded.labels(model)
        metrics.refused.labels(model)  # 0 from the start
        self._beams: dict[int, Histogram] = {}
        metrics.watch(model, queue_depth)

    def close(self) -> None:
        """The version does not serve any more."""
        self._metrics.unwatch(self._model, self._queue_depth)

    def call(self, batch: int, seconds: float) -> None:
        """One engine call of `batch` queries."""
        self._batch.observe(batch)
        self._engine_seconds.inc(seconds)
        self._metrics.look_at_queue(self._model)

    def retrieved(
        self,
        stages_s: Sequence[float],
        s_per_query: float,
        beam_size: int,
        queries: int = 1,
        incomplete: int = 0,
        degraded: int = 0,
    ) -> None:
        """One answered request: seconds per stage in the order of STAGES, the last of which only some requests have; its queries, and how
        many of them are incomplete or degraded."""
        self._queries.inc(queries)
        bucket = beam_size.bit_length()
        beam = self._beams.get(bucket)
        if beam is None:
            beam = self._beams[bucket] = self._metrics.query_seconds.labels(self._model, self._engine, 1 << (bucket - 1))
        for stage, seconds in zip(self._stages, stages_s, strict=False):
            stage.observe(seconds)
        beam.observe(s_per_query)
        if incomplete:
            self._incomplete.inc(incomplete)
        if degraded:
            self._degraded.inc(degraded)


def forget_process(pid: int, folder: Path) -> None:
    """Take a worker that has ended out of the gauges. What it counted stays, in the sums of all that have ended."""
    counter_files.bury(folder, pid, ("counter", "histogram"))
