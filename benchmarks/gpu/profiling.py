"""Where the time of a search goes: launches, gaps between them, and operations and bytes compared to the card's peak.

torch's profiler, which uses CUPTI, traces a replay of the cell's CUDA graph and the same launches one by one. If it sees no kernel, the
rows say so.
"""

from __future__ import annotations

import cProfile
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from benchmarks.gpu.graph_models import model_of
from benchmarks.gpu.lines import Row, reason
from benchmarks.gpu.search_speed import M, filled_cell, work
from benchmarks.gpu.sparse_speed import M as LABELS
from benchmarks.gpu.sparse_speed import model_of as linear_model_of
from benchmarks.gpu.sparse_speed import queries_of
from benchmarks.gpu.timing import captured, ceilings, milliseconds, significant, wait
from espalier.engines.pipeline import Pipeline
from espalier.engines.triton.cells import FixedShapes
from espalier.engines.triton.graph_engine import TritonSearch
from espalier.engines.triton.linear_engine import SparseCudaSearch
from espalier.queries import QueryBatch
from espalier.search import SearchParams
from training.specification.deep import PAPER_WINDOWS

Device = Literal["cuda", "cpu"]
RUNS = 20


class Span(NamedTuple):
    """One piece of work on the device, in microseconds."""

    name: str
    start: float
    end: float


def profile(
    height: int, beams: Sequence[int], batches: Sequence[int], forms: Sequence[str], levels: int, branching: int, device: Device = "cuda"
) -> Iterator[Row]:
    """Profiles of `triton` over 2^height items in float16, and of `sparse-cuda` over branching^levels labels."""
    best = ceilings() if device == "cuda" else ceilings(64, 1 << 16)
    yield {"case": "at best", "ok": None} | best
    for form in forms:
        bundle, rng = model_of(height, form), np.random.default_rng(1)
        with closing(TritonSearch(bundle, device, "float16", FixedShapes(batches=tuple(sorted(batches)), m_sizes=(64, 256)))) as engine:
            for batch, beam in itertools.product(batches, beams):
                m = min(M, beam, bundle.tree.item_count)
                queries = QueryBatch(bundle.manifest.query, rng.integers(0, bundle.tree.item_count, (batch, sum(PAPER_WINDOWS))))
                params = SearchParams.uniform(batch, beam, m)
                call = partial(Pipeline(bundle, engine).search, queries, params)
                call()
                cell, state_BLS = filled_cell(engine, batch, beam, m)
                case = f"triton, {form}, 2^{height}, beam {beam}, batch {batch}, float16"
                searched = captured(partial(cell.launch_search, state_BLS))
                ms = milliseconds(searched)
                flops, read = work(engine, form, beam, batch, 2)
                row: Row = {"case": f"{case}: against the card", "ok": True, "ms": round(ms, 4)}
                row |= {"mflop": significant(flops / 1e6), "mb": significant(read / 1e6)}
                row |= {"share_of_tflops": significant(flops / ms / 1e9 / best["tflops"])}
                yield row | {"share_of_gb_per_s": significant(read / ms / 1e6 / best["gb_per_s"])}
                whole = milliseconds(call, 5)
                with engine.running():
                    encoder = milliseconds(captured(cell.launch_encoder))
                    waited = milliseconds(partial(cell.run, batch, False), 5)  # waits for the device each time
                row = {"case": f"{case}: a call", "ok": True, "ms": round(whole, 4), "encoder_ms": round(encoder, 4)}
                yield row | {"search_ms": round(ms, 4), "run_ms": round(waited, 4), "host_us": host(call)}
                yield _launches(f"{case}: its CUDA graph", searched)
                yield _launches(f"{case}: one by one", partial(cell.launch_search, state_BLS))
    linear, own_NF = linear_model_of(levels, branching)
    with closing(
        SparseCudaSearch(linear, device, "float16", FixedShapes(batches=tuple(sorted(batches)), m_sizes=(64,)))
    ) as engine_of_labels:
        for batch, beam in itertools.product(batches, beams):
            queries, params = queries_of(linear, own_NF, batch), SearchParams.uniform(batch, beam, LABELS)
            Pipeline(linear, engine_of_labels).search(queries, params)
            with engine_of_labels.running():
                cell_of_labels = engine_of_labels.cell(batch, beam.bit_length() - 1, LABELS)
            case = f"sparse-cuda, {linear.tree.leaf_count} labels, beam {beam}, batch {batch}, float16"
            run = cell_of_labels.graph.replay if cell_of_labels.graph is not None else partial(cell_of_labels.launch_search, None)
            yield _launches(f"{case}: its CUDA graph", run)


def host(call: Callable[[], object]) -> dict[str, float]:
    """Microseconds of a call in its 12 most expensive host functions. The profiler adds a little to each."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(RUNS):
        call()
    profiler.disable()
    most = sorted(profiler.getstats(), key=lambda entry: -entry.inlinetime)[:12]
    names = [code if isinstance(code := entry.code, str) else f"{Path(code.co_filename).name}:{code.co_qualname}" for entry in most]
    return {name: round(entry.inlinetime / RUNS * 1e6, 1) for name, entry in zip(names, most, strict=True)}


# -- launches -------------------------------------------------------------------------------------------------------------


def _launches(case: str, run: Callable[[], object]) -> Row:
    try:
        spans = traced(run)
    except Exception as error:  # a missing profiler raises many types
        return {"case": case, "ok": None, "note": f"not profiled: {reason(error)}"}
    if not spans:
        return {"case": case, "ok": None, "note": "not profiled: the profiler saw no kernel"}
    return {"case": case, "ok": True} | summary(spans, RUNS)


def traced(run: Callable[[], object]) -> list[Span]:
    """Work on the device during RUNS runs, by start."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    run()
    wait()
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(RUNS):
            run()
            wait()
    on_device = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
    return sorted((Span(event.name, event.time_range.start, event.time_range.end) for event in on_device), key=lambda span: span.start)


def summary(spans: Sequence[Span], runs: int) -> dict[str, Any]:
    """A row's numbers from the spans of `runs` equal runs, one after the other: each the median over the runs.

    launches  pieces of work of a run · busy_us  while the device works · gap_us  idle time between the first and the last piece
    kernels   name → how often, and microseconds in all
    """
    spans_per_run = len(spans) // runs
    if spans_per_run == 0 or spans_per_run * runs != len(spans):
        return {"launches": len(spans) / runs, "note": "the runs differ in their launches"}
    run_times = []
    for begin in range(0, len(spans), spans_per_run):
        run_spans = spans[begin : begin + spans_per_run]
        gaps = [max(0.0, after.start - max(span.end for span in run_spans[: i + 1])) for i, after in enumerate(run_spans[1:])]
        long = max(span.end for span in run_spans) - run_spans[0].start
        run_times.append((long, long - sum(gaps), sum(gaps), float(np.median(gaps)) if gaps else 0.0))
    long, busy, gap, median_gap = np.median(run_times, axis=0).tolist()
    kernels: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for span in spans:
        kernels[span.name][0] += 1 / runs
        kernels[span.name][1] += (span.end - span.start) / runs
    shown = {name[:60]: [round(count, 2), round(us, 2)] for name, (count, us) in sorted(kernels.items(), key=lambda entry: -entry[1][1])}
    rounded = {"busy_us": round(busy, 2), "gap_us": round(gap, 2), "median_gap_us": round(median_gap, 3)}
    return {"ms": round(long / 1e3, 4), "launches": spans_per_run} | rounded | {"kernels": shown}
