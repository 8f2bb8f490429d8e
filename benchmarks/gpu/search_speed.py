"""How fast `triton` searches, compared to other methods on the same card in the same run.

Rows of a complete binary tree of 2^height items, m = 200 (m = beam below it), queries of full histories:

    triton, torch-graph, torch-eager     the search, from query states on the device
    triton-call, onnx-cuda-call          whole calls, from histories to result rows in NumPy
    onnx-cpu-call                        the same on one thread of the host's processor, single queries alone
    inner-product                        torch's matmul of 64 numbers an item, and topk
    exhaustive                           every item with the same scorer, and topk

`tflops` and `gb_per_s` count only the scorer's products and the node rows. The same queries are searched repeatedly, so small batches read
their rows from the card's cache. `as_torch` is the share of the answers that torch's search finds too. `first_call_s` is the time of the
first call of a shape, which compiles kernels and captures their CUDA graph.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.graph_models import FORMS, TorchSearch, items_of, model_of, with_rows_in_memory
from benchmarks.gpu.lines import Row, reason
from benchmarks.gpu.timing import captured, milliseconds, significant, wait
from espalier.arrays import Int64
from espalier.bundle import Bundle
from espalier.engines.onnx import engine as onnx_graph
from espalier.engines.pipeline import Pipeline
from espalier.engines.triton.cells import FixedShapes, Tuning
from espalier.engines.triton.graph_engine import GraphCell, TritonSearch
from espalier.masks.eligibility import node_mask
from espalier.queries import QueryBatch
from espalier.search import NodeMask, Precision, SearchParams, SearchResult
from training.specification.deep import PAPER_WINDOWS

M = 200
VECTOR = 64
Call = Callable[[QueryBatch, SearchParams], SearchResult]
LARGEST = 24e9
"""Most bytes of scores in a brute-force search."""
SAME = 0.97
"""Least agreement with the same engine under another tuning: sums in float32 may have another order."""
AGREED = 0.8
"""Least agreement with torch's search, which rounds activations to float16."""


def search(
    height: int,
    beams: Sequence[int],
    batches: Sequence[int],
    form: str = "mlp",
    precision: Precision = "float16",
    peers: Sequence[str] = ("torch", "onnx", "inner-product", "exhaustive"),
    masked: bool = True,
    device: Literal["cuda", "cpu"] = "cuda",
) -> Iterator[Row]:
    """Rows of one run, as they are measured, in the order of `batches`."""
    bundle, rng = model_of(height, form), np.random.default_rng(1)
    tree = bundle.tree
    with closing(_engine(bundle, device, precision, batches)) as engine:
        calls: dict[str, Call] = {"triton-call": Pipeline(bundle, engine).search}
        if "onnx" in peers and onnx_graph.cuda_available():
            calls["onnx-cuda-call"] = _by_onnx(bundle, "cuda")
        elif "onnx" in peers:
            yield {"case": f"onnx-cuda-call, 2^{height}", "ok": None, "note": "not installed: ONNX Runtime here has no CUDA"}
        single_query_calls = {"onnx-cpu-call": _by_onnx(bundle, "cpu")} if "onnx" in peers else {}
        masks = [node_mask(tree, rng.random(tree.item_count) < 0.5) for _ in range(2)] if masked else []
        for batch, beam in itertools.product(batches, beams):
            queries = QueryBatch(bundle.manifest.query, rng.integers(0, tree.item_count, (batch, sum(PAPER_WINDOWS))))
            try:
                yield from _case(engine, form, beam, queries, calls | (single_query_calls if batch == 1 else {}), masks, peers)
                if "exhaustive" in peers and batch <= 16 and beam == beams[0] and not FORMS[form].gamma:
                    yield _exhaustive(engine, form, beam, queries)
            except Exception as error:  # of a compiler or an allocator: nothing narrower is known
                yield {"case": f"{form}, 2^{height}, beam {beam}, batch {batch}", "ok": False, "note": reason(error)}
            if "inner-product" in peers and beam == beams[0]:
                yield _inner_product(height, batch, device)


def _by_onnx(bundle: Bundle, device: Literal["cuda", "cpu"]) -> Call:
    in_memory = with_rows_in_memory(bundle)
    return Pipeline(in_memory, onnx_graph.OnnxSearch(in_memory, device)).search


def _case(
    engine: TritonSearch,
    form: str,
    beam: int,
    queries: QueryBatch,
    calls: Mapping[str, Call],
    masks: Sequence[NodeMask],
    peers: Sequence[str],
) -> Iterator[Row]:
    """Rows of all methods for one beam and one batch."""
    batch, tree = len(queries), engine.bundle.tree
    m = min(M, beam, tree.item_count)
    row = partial(_measured, engine, form, beam, batch)
    params = SearchParams.uniform(batch, beam, m)
    begin = time.perf_counter()
    found_BM = calls["triton-call"](queries, params).item_rows_BM  # fills the cell
    first_s = round(time.perf_counter() - begin, 2)
    cell, state_BLS = filled_cell(engine, batch, beam, m)
    searched = row("triton", partial(captured, partial(cell.launch_search, state_BLS)))
    by_torch = TorchSearch(engine, form, state_BLS, _first_level(engine, beam))
    share = agreement(found_BM, items_of(tree, by_torch.search(beam, m)))
    yield searched | {"ok": searched["ok"] and share >= AGREED, "as_torch": round(share, 4), "first_call_s": first_s}
    for name, call in calls.items():
        yield row(name, partial(_itself, partial(call, queries, params)), 1 if name.startswith("onnx") else 5)
    if masks:
        masked = replace(params, mask_B=tuple(masks[b % len(masks)] for b in range(batch)))
        calls["triton-call"](queries, masked)
        yield row("triton", partial(captured, partial(cell.launch_search, state_BLS)), masked=True)
        yield row("triton-call", partial(_itself, partial(calls["triton-call"], queries, masked)), 5, masked=True)
    if "torch" in peers:
        loop = partial(by_torch.search, beam, m)
        yield row("torch-graph", partial(captured, loop))
        yield row("torch-eager", partial(_itself, loop), 5)


def _exhaustive(engine: TritonSearch, form: str, beam: int, queries: QueryBatch) -> Row:
    m = min(M, beam, engine.bundle.tree.item_count)
    _, state_BLS = filled_cell(engine, len(queries), beam, m)
    by_torch = TorchSearch(engine, form, state_BLS, _first_level(engine, beam))
    return _measured(engine, form, beam, len(queries), "exhaustive", partial(_itself, partial(by_torch.exhaustive, m)), 3)


def tune(
    height: int,
    beams: Sequence[int],
    batches: Sequence[int],
    tried: Sequence[Mapping[str, Any]],
    forms: Sequence[str] = ("mlp",),
    device: Literal["cuda", "cpu"] = "cuda",
) -> Iterator[Row]:
    """The search with other tunings; the last rows are the fastest of each case.

    tried  the changed fields of each `Tuning`. `as_it_is`: agreement with the default tuning
    """
    fastest: dict[tuple[str, int, int], Row] = {}
    as_it_is: dict[tuple[str, int, int], Int64] = {}
    for changed, form in itertools.product([{}, *tried], forms):
        tuning, rng = Tuning(**changed), np.random.default_rng(1)
        bundle = model_of(height, form)
        with closing(_engine(bundle, device, "float16", batches, tuning)) as engine:
            for batch, beam in itertools.product(batches, beams):
                m = min(M, beam, bundle.tree.item_count)
                queries = QueryBatch(bundle.manifest.query, rng.integers(0, bundle.tree.item_count, (batch, sum(PAPER_WINDOWS))))
                row = _measured(engine, form, beam, batch, "triton", partial(_graph_of_search, engine, queries, beam, m))
                row |= {"tuning": changed, "case": f"{row['case']}, {changed or 'as it is'}"}
                if not row["ok"]:
                    yield row
                    continue
                found_BM = Pipeline(bundle, engine).search(queries, SearchParams.uniform(batch, beam, m)).item_rows_BM
                share = agreement(found_BM, as_it_is.setdefault((form, batch, beam), found_BM))
                row |= {"ok": share >= SAME, "as_it_is": round(share, 5)}
                yield row
                if not row["ok"]:
                    continue
                best = fastest.setdefault((form, batch, beam), row | {"as_it_is_ms": row["ms"]})
                if row["ms"] < best["ms"]:
                    fastest[form, batch, beam] = row | {"as_it_is_ms": best["as_it_is_ms"]}
    for row in fastest.values():
        yield row | {"case": f"fastest: {row['case']}"}


def _engine(
    bundle: Bundle, device: Literal["cuda", "cpu"], precision: Precision, batches: Sequence[int], tuning: Tuning | None = None
) -> TritonSearch:
    return TritonSearch(bundle, device, precision, FixedShapes(batches=tuple(sorted(batches)), m_sizes=(64, 256, 1024)), tuning)


def filled_cell(engine: TritonSearch, batch: int, beam: int, m: int) -> tuple[GraphCell, Tensor]:
    """The cell of the search that just ran, and its query states."""
    with engine.running():
        cell = engine.cell(batch, beam.bit_length() - 1, m)
        state_BLS = cell.launch_encoder().clone()
    wait()
    return cell, state_BLS


def _graph_of_search(engine: TritonSearch, queries: QueryBatch, beam: int, m: int) -> Callable[[], object]:
    Pipeline(engine.bundle, engine).search(queries, SearchParams.uniform(len(queries), beam, m))
    cell, state_BLS = filled_cell(engine, len(queries), beam, m)
    return captured(partial(cell.launch_search, state_BLS))


def _itself(run: Callable[[], object]) -> Callable[[], object]:
    return run


def _first_level(engine: TritonSearch, beam: int) -> int:
    """The level of a cell's first query states."""
    return 1 if engine.bundle.manifest.ranking.gamma > 0 else engine.bundle.tree.start_level(1 << (beam.bit_length() - 1))


def agreement(found_BM: Int64, expected_BM: Int64) -> float:
    """Share of the expected items that were found; −1 is no item."""
    same = [np.isin(expected_M[expected_M >= 0], found_M).sum() for found_M, expected_M in zip(found_BM, expected_BM, strict=True)]
    return float(np.sum(same) / np.sum(expected_BM >= 0))


def work(engine: TritonSearch, form: str, beam: int, batch: int, width: int) -> tuple[float, float]:
    """Floating-point operations of the scorer's products and bytes of the node rows in a search of a full binary tree."""
    tree, scorer = engine.bundle.tree, FORMS[form].scorer
    scored = batch * sum(min(2 * beam, tree.level_size(level)) for level in range(tree.start_level(beam), tree.height + 1))
    if FORMS[form].gamma:
        scored += batch * (tree.level(tree.start_level(beam)).start - 1)
    widths = (scorer.node_dim, *scorer.hidden, 1) if scorer.kind == "mlp" else (scorer.node_dim, 1)
    return 2.0 * scored * sum(a * b for a, b in itertools.pairwise(widths)), float(scored * scorer.node_dim * width)


def _measured(
    engine: TritonSearch,
    form: str,
    beam: int,
    batch: int,
    name: str,
    prepare: Callable[[], Callable[[], object]],
    least: int = 20,
    masked: bool = False,
) -> Row:
    """Time the function that `prepare` returns. A failure gives a row, too, so that the other methods still run."""
    tree, precision = engine.bundle.tree, str(engine.node_rows_ND.dtype).removeprefix("torch.")
    if name.startswith("onnx"):
        precision = "float32"
    elif not name.startswith("triton"):
        precision = "float16"
    case = f"{name}, {form}, 2^{tree.height}, beam {beam}, batch {batch}, {precision}" + (", masked" if masked else "")
    row: Row = {"case": case, "engine": name, "form": form, "items": tree.item_count, "beam_size": beam, "batch": batch}
    row |= {"precision": precision, "masked": masked}
    try:
        ms = milliseconds(prepare(), least)
    except Exception as error:  # of a peer, a compiler or the allocator: nothing narrower is known
        return row | {"ok": False, "note": reason(error)}
    row |= {"ok": True, "ms": round(ms, 4), "queries_per_s": round(batch / ms * 1e3)}
    if masked or name == "exhaustive":  # masked nodes are neither read nor scored
        return row
    flops, read = work(engine, form, beam, batch, {"float32": 4}.get(precision, 2))
    return row | {"tflops": significant(flops / ms / 1e9), "gb_per_s": significant(read / ms / 1e6)}


def _inner_product(height: int, batch: int, device: Literal["cuda", "cpu"]) -> Row:
    """Brute force over 2^height vectors of VECTOR numbers in float16."""
    items = 1 << height
    row: Row = {"case": f"inner-product, 2^{height}, batch {batch}, float16", "engine": "inner-product", "items": items, "batch": batch}
    if batch * items * 2 > LARGEST:
        return row | {"ok": None, "note": f"left out: {batch * items * 2 / 1e9:.0f} GB of scores"}
    table_IF = torch.randn(items, VECTOR, device=device, dtype=torch.float16)
    vectors_BF = torch.randn(batch, VECTOR, device=device, dtype=torch.float16)
    ms = milliseconds(partial(_best_products, vectors_BF, table_IF), 3)
    return row | {"ok": True, "ms": round(ms, 4), "queries_per_s": round(batch / ms * 1e3)}


def _best_products(vectors_BF: Tensor, table_IF: Tensor) -> Tensor:
    best: Tensor = (vectors_BF @ table_IF.T).topk(min(M, len(table_IF))).indices
    return best
