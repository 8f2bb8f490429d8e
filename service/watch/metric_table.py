"""Every metric: its name, meaning, labels, and buckets or mode. metrics.py sets them; docs/service.md describes them.

A gauge's mode is prometheus_client's: how the values of several worker processes become one.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

SECONDS = tuple(15e-6 * 1.5**i for i in range(34))
"""Geometric buckets from 15 µs to 9.7 s."""
QUERIES = tuple(2.0**i for i in range(11))


class CounterRow(NamedTuple):
    help: str
    labels: tuple[str, ...] = ()


class GaugeRow(NamedTuple):
    help: str
    mode: Literal["livesum", "livemin", "livemax"]
    labels: tuple[str, ...] = ()


class HistogramRow(NamedTuple):
    help: str
    buckets: tuple[float, ...]
    labels: tuple[str, ...] = ("model",)


COUNTERS = {
    "espalier_requests_total": CounterRow("Answered POST /retrieve requests; model is empty where none was found.", ("model", "status")),
    "espalier_background_requests_total": CounterRow(
        "Answered POST /retrieve requests with Espalier-Priority: background; no other metric of requests counts them.", ("model", "status")
    ),
    "espalier_queries_total": CounterRow("Queries of answered requests; the probe's are not among them.", ("model",)),
    "espalier_engine_seconds_total": CounterRow("Seconds in which an engine was searching, over all workers.", ("model",)),
    "espalier_incomplete_total": CounterRow("Queries that got fewer than min(m, eligible items).", ("model",)),
    "espalier_shed_total": CounterRow("Requests that were refused because too many queries waited.", ("model",)),
    "espalier_degraded_total": CounterRow("Queries that were searched with a smaller beam, to keep their deadline.", ("model",)),
    "espalier_unknown_ids_total": CounterRow("Ids in queries of answered requests that the catalogue does not have.", ("model",)),
    "espalier_auth_failures_total": CounterRow(
        "Requests that were denied, by the role that their route needs and the reason.", ("role", "reason")
    ),
    "espalier_reload_total": CounterRow(
        "Versions loaded, failed to load or unloaded, per worker; and changes rolled back.", ("model", "outcome")
    ),
    "espalier_probe_queries_total": CounterRow("Queries that the probe replayed.", ("model", "version", "outcome")),
    "espalier_refused_connections_total": CounterRow("Connections that were refused or cut off, by reason.", ("reason",)),
    "espalier_worker_cpu_seconds_total": CounterRow("Processor time that a worker, and those before it, took.", ("worker",)),
    "espalier_live_refused_total": CounterRow(
        "Writes of live items that were refused, lines of a bulk too, by status.", ("model", "status")
    ),
    "espalier_shard_searches_total": CounterRow("Searches of routers that a shard answered.", ("model",)),
    "espalier_shard_refused_total": CounterRow("Searches of routers that were not answered, by reason.", ("reason",)),
    "espalier_store_bytes_total": CounterRow("Bytes that were downloaded from the store."),
    "espalier_store_seconds_total": CounterRow("Seconds in which versions were downloaded from the store."),
    "espalier_store_failures_total": CounterRow("Failures of the store, and of versions that should come from it, by reason.", ("reason",)),
    "espalier_router_failures_total": CounterRow("Replicas of shards that gave a router no answer, by reason.", ("reason",)),
    "espalier_router_mixed_total": CounterRow("Answers of another shard or version than was asked for; none of them was used."),
    "espalier_router_hedges_total": CounterRow("Second replicas that were asked beside a slow one."),
    "espalier_router_retries_total": CounterRow("Replicas that were asked after another one had failed."),
    "espalier_router_unanswered_total": CounterRow("Searches that a shard was left out of, because no replica answered.", ("shard",)),
    "espalier_worker_restarts_total": CounterRow("Workers that took the place of one that had ended."),
}

GAUGES = {
    "espalier_workers": GaugeRow("Processes that serve.", "livesum"),
    "espalier_queue_depth": GaugeRow("Queries that wait for the engine.", "livesum", ("model",)),
    "espalier_desired_state_wrong": GaugeRow(
        "1 while a model's serving.json or removed.json is malformed, unreadable or gone, so that what was last read is in force.",
        "livemax",
        ("model",),
    ),
    "espalier_model_info": GaugeRow("1 where the version serves, 0 where it does not.", "livemax", ("model", "version", "engine")),
    "espalier_model_default_version": GaugeRow(
        "The version that answers where a request names none; 0 while none is ready.", "livemin", ("model",)
    ),
    "espalier_probe_recall": GaugeRow(
        "Recall@m of held-out queries, by the answers of the probe's last round; NaN once the version is unloaded.",
        "livemin",
        ("model", "version", "m"),
    ),
    "espalier_probe_expected_recall": GaugeRow(
        "Recall@m of the same held-out queries when the model was exported.", "livemax", ("model", "version", "m")
    ),
    "espalier_probe_drift": GaugeRow(
        "Mean absolute difference between the scores of golden queries now and when the model was exported.",
        "livemax",
        ("model", "version"),
    ),
    "espalier_live_items": GaugeRow(
        "Live items of a version: put in or changed since it was trained or folded.", "livemax", ("model", "version")
    ),
    "espalier_live_tombstones": GaugeRow("Items of a version that are deleted and not yet folded out.", "livemax", ("model", "version")),
    "espalier_live_capacity_ratio": GaugeRow(
        "Live items ÷ ESPALIER_MAX_LIVE; at 1 new items are refused.", "livemax", ("model", "version")
    ),
    "espalier_live_lag": GaugeRow(
        "Committed operations that the worker furthest behind has not applied, when last looked at.", "livemax", ("model",)
    ),
    "espalier_live_canary_recall": GaugeRow(
        "Share of the most recent inserts that the probe finds by their own evidence; NaN where there are none.",
        "livemin",
        ("model", "version"),
    ),
    "espalier_live_displacement": GaugeRow(
        "Recall of held-out queries with the live catalogue less that without, by the probe's last round.",
        "livemin",
        ("model", "version"),
    ),
    "espalier_shard_mask_bytes": GaugeRow(
        "Masks of routers' filters that a shard holds, over all workers.", "livesum", ("model", "version")
    ),
    "espalier_router_replicas": GaugeRow(
        "Replicas of a shard that answer, as the router that sees fewest sees it.", "livemin", ("model", "version", "shard")
    ),
    "espalier_gpu_memory_bytes": GaugeRow("Memory in use on a GPU.", "livemax", ("device",)),
    "espalier_gpu_memory_limit_bytes": GaugeRow("Memory that a GPU has.", "livemax", ("device",)),
    "espalier_store_silent_seconds": GaugeRow("How long ago the store had answered last when it was last asked; 0: it did.", "livemax"),
    "espalier_connections": GaugeRow("Open connections.", "livesum"),
    "espalier_worker_resident_bytes": GaugeRow(
        "Memory of a worker in RAM; memory that it shares with others, as the files of models, is counted in each.", "livemax", ("worker",)
    ),
    "espalier_worker_anonymous_bytes": GaugeRow(
        "Memory of a worker that is not a file's, so that the system cannot drop it.", "livemax", ("worker",)
    ),
    "espalier_memory_limit_bytes": GaugeRow(
        "Memory that all workers together may take: of the container or its control groups, or what the machine has.", "livemin"
    ),
    "espalier_worker_open_descriptors": GaugeRow("Descriptors that a worker has open: connections and files.", "livemax", ("worker",)),
    "espalier_worker_max_descriptors": GaugeRow("Descriptors that a worker may have open.", "livemax", ("worker",)),
    "espalier_worker_start_time_seconds": GaugeRow("When a worker began, in seconds since 1970.", "livemax", ("worker",)),
}

HISTOGRAMS = {
    "espalier_request_seconds": HistogramRow(
        "From the head of a POST /retrieve to the end of its answer; lines of streams, which wait for each other, are not among them.",
        SECONDS,
    ),
    "espalier_stage_seconds": HistogramRow("Stages of answered requests.", SECONDS, ("model", "stage")),
    "espalier_query_seconds": HistogramRow(
        "Engine wall time ÷ queries in the engine call, once per request; beam is the power of two at or below the beam size.",
        SECONDS,
        ("model", "engine", "beam"),
    ),
    "espalier_shard_search_seconds": HistogramRow("From the arrival of a router's search to its answer, if it was answered.", SECONDS),
    "espalier_batch_queries": HistogramRow("Queries in one engine call.", QUERIES),
    "espalier_router_shard_seconds": HistogramRow("From a router's question to a shard to its answer.", SECONDS, ("shard",)),
    "espalier_router_own_seconds": HistogramRow("Time of a router's searches without their slowest shard.", SECONDS),
    "espalier_router_coverage": HistogramRow(
        "Share of the catalogue's items that is on shards which answered, of each search.", (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999)
    ),
    "espalier_live_visible_seconds": HistogramRow(
        "From the arrival of a write to the moment when every worker has applied it.",
        SECONDS,
    ),
}

VERSION_METRICS = [name for table in (COUNTERS, GAUGES) for name, row in table.items() if "version" in row.labels]
"""Metrics of single versions, which are dropped when a version is unloaded."""
