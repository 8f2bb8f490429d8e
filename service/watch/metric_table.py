"""Every metric: its name, meaning, labels, and buckets or mode. metrics.py sets them; docs/reference.md lists them.

A gauge's mode is prometheus_client's: how the values of several worker processes become one.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

SECONDS = tuple(15e-6 * 1.5**i for i in range(34))
"""Geometric buckets from 15 µs to 9.7 s."""
QUERIES = tuple(2.0**i for i in range(11))
SHARES = tuple(i / 20 for i in range(21))


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
    "espalier_requests_total": CounterRow(
        "Answered retrievals, lines of streams too. A status that ends in -client is an error that the client itself caused.",
        ("model", "status"),
    ),
    "espalier_version_requests_total": CounterRow(
        "Retrievals by their version, lines of streams too: answered, refused (429), late (504) or failed.",
        ("model", "version", "outcome"),
    ),
    "espalier_shadow_requests_total": CounterRow(
        "Requests for a shadow: compared, failed, or left_out because it is large or others are under way.",
        ("model", "version", "outcome"),
    ),
    "espalier_background_requests_total": CounterRow(
        "Requests with Espalier-Priority: background, which no other metric of requests, queries or stages counts.", ("model", "status")
    ),
    "espalier_queries_total": CounterRow("Queries of answered requests, without the probe's.", ("model",)),
    "espalier_engine_seconds_total": CounterRow(
        "Seconds in which an engine searched; its rate ÷ espalier_workers is how busy the engines are.", ("model",)
    ),
    "espalier_incomplete_total": CounterRow("Queries that got fewer than min(m, eligible items).", ("model",)),
    "espalier_shed_total": CounterRow("Requests that were answered 429.", ("model",)),
    "espalier_degraded_total": CounterRow("Queries that were searched with a smaller beam, to keep their deadline.", ("model",)),
    "espalier_unknown_ids_total": CounterRow("Ids in queries of answered requests that the catalogue does not have.", ("model",)),
    "espalier_auth_failures_total": CounterRow(
        "Requests refused because of their key, by the role of the route and the reason: missing, malformed, unknown, expired, role (of "
        "another role), model (not this one) or off (the role has no keys).",
        ("role", "reason"),
    ),
    "espalier_key_requests_total": CounterRow(
        "Retrievals by the name of their key, lines of streams too: admitted, or limited (429).",
        ("key", "outcome"),
    ),
    "espalier_reload_total": CounterRow(
        "Versions that were loaded, failed or unloaded, per worker, and changes that were rolled_back.", ("model", "outcome")
    ),
    "espalier_probe_queries_total": CounterRow(
        "Queries that the probe replayed: answered, late (no room for 5 s) or failed.", ("model", "version", "outcome")
    ),
    "espalier_refused_connections_total": CounterRow(
        "Connections that were refused or cut off: too_many, crowded_out (idle, to make room), head_too_large, head_too_slow, malformed, "
        "not_read or handshake (of TLS).",
        ("reason",),
    ),
    "espalier_worker_cpu_seconds_total": CounterRow("Processor time of a worker and its predecessors.", ("worker",)),
    "espalier_live_refused_total": CounterRow("Writes of live items that were refused, lines of a bulk too.", ("model", "status")),
    "espalier_live_backup_failures_total": CounterRow("Failures to back a model up, or to delete its old backups.", ("model",)),
    "espalier_shard_searches_total": CounterRow("Searches of routers that a shard answered.", ("model",)),
    "espalier_shard_refused_total": CounterRow(
        "Searches that a shard did not answer: unknown_masks (the router sends them and asks again), not_served, invalid, full, late, "
        "not_ready or failed.",
        ("reason",),
    ),
    "espalier_store_bytes_total": CounterRow("Bytes that were downloaded from the store."),
    "espalier_store_seconds_total": CounterRow("Seconds in which versions were downloaded from the store."),
    "espalier_store_failures_total": CounterRow(
        "Failures of the store, and of versions that should come from it: unreachable, missing, damaged, disk_full or other.", ("reason",)
    ),
    "espalier_router_failures_total": CounterRow(
        "Replicas that gave a router no answer: connection, late, full, not_served, refused (422), broken (another status), "
        "garbage, or mixed (of another shard, version or question).",
        ("reason",),
    ),
    "espalier_router_mixed_total": CounterRow("Answers for another shard, version or query than requested; always discarded."),
    "espalier_router_hedges_total": CounterRow("Queries that were also sent to a second replica, because the first was slow."),
    "espalier_router_retries_total": CounterRow("Replicas that were asked after one that failed."),
    "espalier_router_unanswered_total": CounterRow("Searches that a shard was left out of, because no replica answered.", ("shard",)),
    "espalier_worker_restarts_total": CounterRow("Workers that replaced one that had ended."),
}

GAUGES = {
    "espalier_workers": GaugeRow("Processes that serve.", "livesum"),
    "espalier_queue_depth": GaugeRow("Queries that wait for the engine.", "livesum", ("model",)),
    "espalier_desired_state_wrong": GaugeRow(
        "1 while serving.json or removed.json is malformed, unreadable or missing and the last valid content is in force.",
        "livemax",
        ("model",),
    ),
    "espalier_model_info": GaugeRow("1 if the version serves, 0 while it is being loaded.", "livemax", ("model", "version", "engine")),
    "espalier_model_default_version": GaugeRow(
        "The default version; 0 while none is ready, NaN for a model that was found later and never was ready.",
        "livemin",
        ("model",),
    ),
    "espalier_model_created_timestamp_seconds": GaugeRow(
        "When the bundle of a version was written, in seconds since 1970.", "livemax", ("model", "version")
    ),
    "espalier_probe_recall": GaugeRow(
        "Recall@m of held-out queries in the probe's last round.",
        "livemin",
        ("model", "version", "m"),
    ),
    "espalier_probe_expected_recall": GaugeRow(
        "Recall@m of the probe's held-out queries when the model was exported.", "livemax", ("model", "version", "m")
    ),
    "espalier_probe_drift": GaugeRow(
        "Mean absolute difference between the scores of golden queries now and at export (of several shards: at first).",
        "livemax",
        ("model", "version"),
    ),
    "espalier_live_items": GaugeRow(
        "Live items of a version: put in or changed since it was trained or folded.", "livemax", ("model", "version")
    ),
    "espalier_live_tombstones": GaugeRow("Items of a version that are deleted and not yet folded out.", "livemax", ("model", "version")),
    "espalier_live_capacity_ratio": GaugeRow(
        "Live items ÷ the most that there may be; at 1 new items are refused.", "livemax", ("model", "version")
    ),
    "espalier_live_lag": GaugeRow(
        "Committed operations that the worker furthest behind knows of and has not applied; +Inf while a follower cannot copy.",
        "livemax",
        ("model",),
    ),
    "espalier_live_backup_timestamp_seconds": GaugeRow(
        "Unix time at which the newest backup was made, or last found to hold everything.",
        "livemax",
        ("model",),
    ),
    "espalier_live_journal_failing": GaugeRow(
        "1 from when the journal cannot be written or read until it can: writes are answered 503.", "livemax", ("model",)
    ),
    "espalier_live_canary_recall": GaugeRow(
        "Share of the latest inserts that the probe finds by their own evidence.",
        "livemin",
        ("model", "version"),
    ),
    "espalier_live_displacement": GaugeRow(
        "Recall of held-out queries with live items less that without; below 0 old items are displaced.",
        "livemin",
        ("model", "version"),
    ),
    "espalier_shard_mask_bytes": GaugeRow(
        "Masks of routers' filters that a shard holds, over all workers.", "livesum", ("model", "version")
    ),
    "espalier_router_replicas": GaugeRow(
        "Replicas of a shard that answer: the lowest number that any router process sees.", "livemin", ("model", "version", "shard")
    ),
    "espalier_models_disk_free_bytes": GaugeRow("Bytes that the service may still write to the disk of the models folder.", "livemin"),
    "espalier_models_disk_bytes": GaugeRow("Size of the disk of the models folder.", "livemax"),
    "espalier_gpu_memory_bytes": GaugeRow("Memory in use on a GPU, by all processes.", "livemax", ("device",)),
    "espalier_gpu_memory_limit_bytes": GaugeRow("Memory that a GPU has.", "livemax", ("device",)),
    "espalier_store_silent_seconds": GaugeRow(
        "Time from the store's last answer to the last request to it; 0: it answered, or there is no store.", "livemax"
    ),
    "espalier_connections": GaugeRow("Open connections.", "livesum"),
    "espalier_worker_resident_bytes": GaugeRow(
        "Memory of a worker in RAM; shared memory, such as models' files, counts in each.", "livemax", ("worker",)
    ),
    "espalier_worker_anonymous_bytes": GaugeRow("Memory of a worker without files, which the system cannot drop.", "livemax", ("worker",)),
    "espalier_memory_limit_bytes": GaugeRow(
        "Memory that all workers together may take: the container's limit, or the machine's memory.", "livemin"
    ),
    "espalier_worker_open_descriptors": GaugeRow("Descriptors that a worker has open: connections and files.", "livemax", ("worker",)),
    "espalier_worker_max_descriptors": GaugeRow("Descriptors that a worker may have open.", "livemax", ("worker",)),
    "espalier_worker_start_time_seconds": GaugeRow("Start of a worker, in seconds since 1970.", "livemax", ("worker",)),
}

HISTOGRAMS = {
    "espalier_request_seconds": HistogramRow(
        "From the head of a POST /retrieve to the end of its answer; without lines of streams.",
        SECONDS,
    ),
    "espalier_version_request_seconds": HistogramRow(
        "From the arrival of a request, or of a line of a stream, to its answer, by version.",
        SECONDS,
        ("model", "version"),
    ),
    "espalier_shadow_overlap": HistogramRow(
        "Share of the items of a default version's answer that its candidate's has too.", SHARES, ("model", "version")
    ),
    "espalier_shadow_seconds": HistogramRow(
        "Engine time of a query that both answered, of the default and the candidate.",
        SECONDS,
        ("model", "version", "of"),
    ),
    "espalier_stage_seconds": HistogramRow(
        "Stages of answered requests: queue, encode, search, serialise, and rerank where it was requested.", SECONDS, ("model", "stage")
    ),
    "espalier_query_seconds": HistogramRow(
        "Engine wall time ÷ queries in the call; beam is the power of two at or below the beam size.",
        SECONDS,
        ("model", "engine", "beam"),
    ),
    "espalier_shard_search_seconds": HistogramRow("From the arrival of a router's search at a shard to its answer.", SECONDS),
    "espalier_batch_queries": HistogramRow("Queries in one engine call, the probe's too.", QUERIES),
    "espalier_router_shard_seconds": HistogramRow("From a router's query to a shard to its answer.", SECONDS, ("shard",)),
    "espalier_router_own_seconds": HistogramRow("Time of a router's searches without their slowest shard.", SECONDS),
    "espalier_router_coverage": HistogramRow(
        "Share of the items on shards that answered, of each search.", (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999)
    ),
    "espalier_live_visible_seconds": HistogramRow(
        "From the arrival of a write to the moment when every worker has applied it.",
        SECONDS,
    ),
}

VERSION_METRICS = [name for table in (COUNTERS, GAUGES, HISTOGRAMS) for name, row in table.items() if "version" in row.labels]
"""Metrics of single versions, which are dropped when a version is unloaded."""
