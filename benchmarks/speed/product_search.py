"""A beam over inner products beside HNSW and exact search over its leaf rows: the part of `engine_cpu` that `--scorer product` runs.

One query at a time, one thread. All systems take turns in every round; a figure is the mean over queries of each one's median over rounds.
Recall is the share of the m best leaves by the scorer alone that came back.

Legend: B queries, I items, M results, D row; in timing X systems, P parts, R rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from benchmarks.synthetic import diffusion_queries
from espalier.bundle import Bundle
from espalier.engines.compiled.engine import CompiledEngine
from espalier.queries import QueryBatch
from espalier.search import SearchParams
from training.baselines.ann import AnnIndex, faiss_is_installed
from training.retrieval.scores import best_of_all

QUERIES = 256
RECALL = 0.95
EF_SEARCH = (10, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
MOST = 4096
"""efSearch where none of those is enough."""

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Row = dict[str, Any]


@dataclass(frozen=True)
class System:
    """encode: the number of a query → what its search takes; search: that → int64[1, M] item rows."""

    name: str
    knob: int | None
    encode: Callable[[int], Any]
    search: Callable[[Any], Int64]


def run(bundle: Bundle, beams: Sequence[int], m: int, rounds: int, index_file: Path | None = None) -> list[Row]:
    """Rows {"engine", "items", "knob", "m", "recall", "ms_per_query", "encode_ms", "search_ms"}; the knob is the beam or efSearch."""
    with threadpool_limits(1):
        engine, queries = CompiledEngine(bundle), diffusion_queries(bundle, QUERIES)
        one = [queries.take(np.array([b])) for b in range(QUERIES)]
        item_rows_ID = np.ascontiguousarray(bundle.node_rows_ND[bundle.tree.leaf_of_item], np.float32)

        def leaf_state(b: int) -> Float32:
            return engine.leaf_states(one[b])

        def scan(state_1D: Float32) -> Int64:
            return best_of_all(lambda part: state_1D @ item_rows_ID.T, len(item_rows_ID), [np.empty(0, np.int64)], m, False)

        systems = [_tree(engine, one, beam, m) for beam in beams]
        exact = System("exact scan", None, leaf_state, scan)
        exact_BM = np.concatenate([scan(leaf_state(b)) for b in range(QUERIES)])
        if faiss_is_installed():
            index = AnnIndex("hnsw", item_rows_ID, index_file)
            tried = (_hnsw(index, leaf_state, effort, m) for effort in EF_SEARCH if effort < index.full_effort)
            systems.append(next((system for system in tried if recall(system, exact_BM) >= RECALL), _hnsw(index, leaf_state, MOST, m)))
        rows = measured([*systems, exact], exact_BM, rounds)
    for row in rows:
        print(
            f"{row['engine']:12s} {row['knob'] or '':>5}  {row['ms_per_query']:7.3f} ms/query, {row['encode_ms']:.3f} of them encode, "
            f"recall@{m} {row['recall']:.4f}"
        )
    return [row | {"items": bundle.tree.item_count, "m": m} for row in rows]


def _tree(engine: CompiledEngine, one: Sequence[QueryBatch], beam: int, m: int) -> System:
    params = SearchParams.uniform(1, beam, m)

    def encode(b: int) -> tuple[QueryBatch, SearchParams]:
        return one[b], replace(params, states_BLS=engine.encode(one[b], params))

    return System(engine.name, beam, encode, lambda made: engine.search(*made).item_rows_BM)


def _hnsw(index: AnnIndex, encode: Callable[[int], Float32], effort: int, m: int) -> System:
    return System("hnsw", effort, encode, lambda state_1D: index.search(state_1D, m, effort))


def recall(system: System, exact_BM: Int64) -> float:
    """The mean share of the exact answers that come back."""
    return float(np.mean([np.isin(exact_M, system.search(system.encode(b))).mean() for b, exact_M in enumerate(exact_BM)]))


def measured(systems: Sequence[System], exact_BM: Int64, rounds: int) -> list[Row]:
    ms_XPRB = np.zeros((len(systems), 2, rounds, len(exact_BM)))
    for number in range(rounds):
        for system, ms_PRB in zip(systems, ms_XPRB, strict=True):
            system.search(system.encode(0))  # pays for what others left in the processor's cache
            for b in range(len(exact_BM)):
                begin = time.perf_counter()
                encoded = system.encode(b)
                between = time.perf_counter()
                system.search(encoded)
                ms_PRB[:, number, b] = (between - begin) * 1e3, (time.perf_counter() - between) * 1e3
    rows = []
    for system, ms_PRB in zip(systems, ms_XPRB, strict=True):
        whole, encode, search = (round(float(np.median(part_RB, axis=0).mean()), 4) for part_RB in (ms_PRB.sum(0), *ms_PRB))
        found = round(recall(system, exact_BM), 4)
        rows.append(
            {"engine": system.name, "knob": system.knob, "recall": found, "ms_per_query": whole, "encode_ms": encode, "search_ms": search}
        )
    return rows
