"""`python -m service` on a GPU: milliseconds over HTTP, a reload, the memory that it frees, and loads without enough memory.

The service has two models: one of 2^height items with the papers' scorer, and a small one of linear scorers. This process generates the
load, occupies the card's memory, and asks the driver how much is free. Both share the machine.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch

from benchmarks.gpu.graph_models import FORMS, scorer_of
from benchmarks.gpu.lines import Row
from benchmarks.random_bundles import make_bundle, make_linear_bundle, random_tree
from benchmarks.service.serving import JSON, request, serving, settings
from espalier.engines.linear.chunk_search import L3_HINGE
from espalier.engines.triton.graph_engine import device_bytes
from espalier.tree import complete_tree
from loadtest.loops import Address, Answered, closed_loop, open_loop, percentiles_ms, request_bytes, statuses
from training.deep.scorers.model import export_graphs
from training.specification.deep import PAPER_WINDOWS

NEEDED = ("fastapi", "fastapi_offline", "httptools", "orjson", "prometheus_client", "pydantic_settings", "uvicorn")
KEY = "gpu-benchmark-admin-key"
ITEMS_MODEL, LABELS_MODEL = "items", "labels"
HISTORY, FEATURES, M = 20, 20, 100
STAGES = ("queue_ms", "encode_ms", "search_ms", "serialise_ms")
SLACK = 64 << 20
"""Freed bytes that an allocator may keep."""


def serve(height: int, beam: int, seconds: float, concurrencies: Sequence[int], ready_s: float) -> Iterator[Row]:
    """ready_s: time limit of a start or reload, with compiling kernels and capturing graphs."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        yield {"case": "service", "ok": None, "note": f"not installed: {', '.join(missing)}; see benchmarks/gpu/wheels.txt"}
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        needed = _models(folder, height, beam)
        environment = settings(folder, device="cuda", precision="float16", admin_keys=KEY, load_timeout_s=ready_s)
        before, begin = _used(), time.perf_counter()
        with serving(["service"], environment, timeout_s=ready_s) as port:
            ready = {"ms": round((time.perf_counter() - begin) * 1e3), "used_mb": _mb(_used() - before)}
            yield {"case": f"ready, 2^{height} items and a linear model", "ok": True, "needed_mb": _mb(needed)} | ready
            address, requests = ("127.0.0.1", port), _retrievals(height, beam)
            yield from _two_models(address, requests[0])
            capacity = yield from _times(address, requests, concurrencies, seconds)
            yield from _sustained(address, requests, capacity, seconds)
            yield from _reload(port, requests)
            yield from _no_memory(port, requests[0], needed)


# -- models and requests --------------------------------------------------------------------------------------------------


def _models(folder: Path, height: int, beam: int) -> int:
    """Write two versions of the model of items, the first pinned, and a model of labels; bytes of a version on a GPU."""
    rng, length = np.random.default_rng(1), sum(PAPER_WINDOWS)
    model = scorer_of("mlp")
    graphs = export_graphs(model, "history_nodes", torch.zeros((2, height + 1, length), dtype=torch.int64))
    tree = complete_tree(rng.permutation(1 << height), 2)
    limits: dict[str, Any] = {"beam_size": beam, "m": M, "max_beam_size": beam, "max_m": M}
    for version in (1, 2):
        bundle = make_bundle(
            folder, rng, tree, integer=False, name=ITEMS_MODEL, width=FORMS["mlp"].scorer.node_dim, length=length, version=version,
            graphs=graphs, **limits,
        )  # fmt: skip
    (folder / ITEMS_MODEL / "serving.json").write_text(json.dumps({"generation": 1, "versions": [1], "default": 1}))
    make_linear_bundle(folder, rng, random_tree(rng, 2, 16, False), L3_HINGE, False, LABELS_MODEL, FEATURES, **(limits | {"max_m": 200}))
    return device_bytes(bundle, "float16")


def _retrievals(height: int, beam: int) -> list[bytes]:
    rng = np.random.default_rng(2)
    histories = [[f"item-{item}" for item in rng.integers(1 << height, size=HISTORY)] for _ in range(256)]
    bodies = [{"model": ITEMS_MODEL, "queries": [{"history": history}], "m": M, "beam_size": beam} for history in histories]
    return [request_bytes("/retrieve", body) for body in bodies]


# -- what is measured -----------------------------------------------------------------------------------------------------


def _two_models(address: Address, of_items: bytes) -> Iterator[Row]:
    """Mixed requests to both models get the same answers as separate ones."""
    query = {"features": {"indices": [0, 3], "values": [1.0, 0.5]}}
    of_labels = request_bytes("/retrieve", {"model": LABELS_MODEL, "queries": [query], "m": 10})
    separate_answers = [_answer(address, retrieval) for retrieval in (of_items, of_labels)]
    mixed_answers = closed_loop(address, [of_items, of_labels], 8, 0.5)
    right = [_items(answer.body) == _items(separate_answers[answer.number % 2].body) for answer in mixed_answers if answer.status == 200]
    engines = [orjson.loads(answer.body).get("engine") for answer in separate_answers if answer.status == 200]
    ok = all(right) and len(right) == len(mixed_answers) > 0 and len(engines) == 2
    row: Row = {"case": "two models by turns", "ok": ok, "engines": engines, "requests": len(mixed_answers)}
    yield row | {"statuses": statuses(mixed_answers), "different": len(right) - sum(right)}


def _times(address: Address, requests: list[bytes], concurrencies: Sequence[int], seconds: float) -> Any:
    """A closed loop at each concurrency; returns the most requests a second."""
    capacity = 0.0
    closed_loop(address, requests, max(concurrencies), min(seconds, 1.0))  # warm
    for concurrency in concurrencies:
        answered = closed_loop(address, requests, concurrency, seconds)
        rate = sum(answer.status == 200 for answer in answered) / seconds
        capacity = max(capacity, rate)
        yield {"case": f"closed loop, {concurrency} clients"} | _measured(answered, rate)
    return capacity


def _sustained(address: Address, requests: list[bytes], capacity: float, seconds: float) -> Iterator[Row]:
    """Random arrivals at shares of the capacity."""
    for share in (0.5, 0.8, 0.9):
        if capacity * share < 1:
            continue
        answered = open_loop(address, requests, capacity * share, seconds)
        rate = sum(answer.status == 200 for answer in answered) / seconds
        yield {"case": f"open loop, {share:.0%} of the capacity", "offered_per_s": round(capacity * share)} | _measured(answered, rate)


def _measured(answers: Sequence[Answered], rate: float) -> Row:
    accepted = [answer for answer in answers if answer.status == 200]
    p50_ms, p99_ms = percentiles_ms(accepted)
    timings = [orjson.loads(answer.body)["timing"] for answer in accepted[:: max(1, len(accepted) // 200)]]
    stage_times = {stage: [timing[stage] for timing in timings if timing.get(stage) is not None] for stage in STAGES}
    median_stage_times = {stage: round(float(np.median(values)), 4) for stage, values in stage_times.items() if values}
    batch = [timing["batch"] for timing in timings if timing.get("batch") is not None]
    row: Row = {"ok": bool(accepted) and all(answer.status in (200, 429) for answer in answers), "queries_per_s": round(rate, 1)}
    row |= {"ms": round(p50_ms, 4), "p99_ms": round(p99_ms, 4)} if accepted else {"ms": None}
    return row | {"inside": median_stage_times, "batch": float(np.median(batch)) if batch else None, "statuses": statuses(answers)}


def _reload(port: int, requests: list[bytes]) -> Iterator[Row]:
    """Switch to version 2 and back under load; then the same memory must be in use as before."""
    bytes_before, peak_bytes = _used(), 0
    answered: list[Answered] = []
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            answered.extend(closed_loop(("127.0.0.1", port), requests, 4, 0.5))

    loading = threading.Thread(target=load)
    loading.start()
    durations_ms, refusal = [], ""
    try:
        for version, other in ((2, 1), (1, 2)):
            begin = time.perf_counter()
            status, body = _admin(port, "default", version)
            durations_ms.append((time.perf_counter() - begin) * 1e3)
            peak_bytes = max(peak_bytes, _used())
            unload_status, unload_body = _admin(port, "unload", other)
            refusal = refusal or (body if status != 200 else unload_body if unload_status != 200 else "")
    finally:
        stop.set()
        loading.join()
    failed = {status: count for status, count in statuses(answered).items() if status not in ("200", "429")}
    row: Row = {"case": "reload under load, twice", "ok": not refusal and not failed, "ms": round(float(np.median(durations_ms)), 1)}
    yield row | {"requests": len(answered), "statuses": statuses(answered)} | ({"note": refusal[:500]} if refusal else {})
    bytes_after = _settled(bytes_before)
    kept_bytes = bytes_after - bytes_before
    row = {"case": "memory given back", "ok": kept_bytes <= max(SLACK, (peak_bytes - bytes_before) // 4)}
    yield row | {"used_mb": _mb(bytes_before), "with_both_mb": _mb(peak_bytes), "after_mb": _mb(bytes_after), "kept_mb": _mb(kept_bytes)}


def _no_memory(port: int, retrieval: bytes, needed: int) -> Iterator[Row]:
    """Loads that run out of memory, for the rows or during the warm-up: an error, and the other version keeps serving."""
    for case, free_bytes in (("too little for the rows", needed // 2), ("too little for the warm-up", needed + (24 << 20))):
        torch.cuda.empty_cache()
        ballast = torch.empty(max(1, torch.cuda.mem_get_info()[0] - free_bytes), dtype=torch.uint8, device="cuda")
        try:
            status, body = _admin(port, "load", 2)
            served = _answer(("127.0.0.1", port), retrieval).status
        finally:
            del ballast
            torch.cuda.empty_cache()
        if status == 200:  # memory that the service's allocator kept was enough
            _admin(port, "unload", 2)
        fits = case.endswith("warm-up")
        row: Row = {"case": f"out of memory: {case}", "ok": served == 200 and (status == 409 or (fits and status == 200))}
        yield row | {"status": status, "retrieve_status": served, "note": body[:500]}
    status, body = _admin(port, "load", 2)
    note = {} if status == 200 else {"note": body[:500]}
    yield {"case": "out of memory: with room again", "ok": status == 200, "status": status} | note


# -- small things ---------------------------------------------------------------------------------------------------------


def _admin(port: int, action: str, version: int) -> tuple[int, str]:
    """Status and body of an admin request for the model of items; `load` leaves the default as it is."""
    body = {"version": version} | ({"default": False} if action == "load" else {})
    status, document = request(port, "POST", f"/models/{ITEMS_MODEL}/{action}", body, JSON | {"Authorization": f"Bearer {KEY}"})
    return status, json.dumps(document)


def _answer(address: Address, retrieval: bytes) -> Answered:
    return closed_loop(address, [retrieval], 1, 0.01)[0]


def _items(body: bytes) -> Any:
    return [result["items"] for result in orjson.loads(body)["results"]]


def _used() -> int:
    """Bytes of the card in use by all processes."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def _settled(before: int, seconds: float = 10.0) -> int:
    """Bytes in use, once down to `before` or after `seconds`: a former version is freed when its requests are answered."""
    end = time.monotonic() + seconds
    while _used() > before + SLACK and time.monotonic() < end:
        time.sleep(0.1)
    return _used()


def _mb(count: int) -> float:
    return round(count / 1e6, 1)
