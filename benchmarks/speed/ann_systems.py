"""Systems that encode a query vector and then search with what they made of it, and how both parts are timed.

A tree; a scan of all items and HNSW over the tree's own leaf rows and leaf-level states.

Legend: B queries, I items, D row, M results; in timing X systems, P parts, R rounds, Q queries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.papers.product_search.ann import AnnIndex
from espalier.bundle import Bundle
from espalier.engines.encode import Encoder
from espalier.engines.pipeline import Pipeline
from espalier.engines.stages import GivenQueries
from espalier.queries import QueryBatch
from espalier.search import SearchParams
from training.retrieval.scores import best_of_all

Array = NDArray[Any]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class System:
    """One of those that are compared.

    knob    the beam or efSearch; None where there is none
    encode  a query → what its search takes
    search  what `encode` made of a query → int64[1, ≤ M] item rows, best first, NO_ITEM at the end
    """

    name: str
    knob: int | None
    encode: Callable[[Array], Any]
    search: Callable[[Any], Int64]

    def find(self, query: Array) -> Int64:
        return self.search(self.encode(query))


def timed(systems: Sequence[System], queries: Sequence[Array], rounds: int) -> list[dict[str, float]]:
    """{"ms_per_query", "encode_ms", "search_ms"} of each system: the mean over queries of each one's median over rounds.

    One query at a time; all systems take turns in every round.
    """
    ms_XPRQ = np.zeros((len(systems), 2, rounds, len(queries)))
    for round_number in tqdm(range(rounds), desc="time", unit="round", disable=None):
        for system, ms_PRQ in zip(systems, ms_XPRQ, strict=True):
            system.find(queries[0])  # pays for the turned knob and for what others left in the processor's cache
            for query_number, query in enumerate(queries):
                begin = time.perf_counter()
                encoded = system.encode(query)
                between = time.perf_counter()
                system.search(encoded)
                ms_PRQ[:, round_number, query_number] = (between - begin) * 1e3, (time.perf_counter() - between) * 1e3
    return [_milliseconds(ms_PRQ) for ms_PRQ in ms_XPRQ]


def _milliseconds(ms_PRQ: NDArray[np.float64]) -> dict[str, float]:
    whole, encode, search = (round(float(np.median(part_RQ, axis=0).mean()), 4) for part_RQ in (ms_PRQ.sum(0), *ms_PRQ))
    return {"ms_per_query": whole, "encode_ms": encode, "search_ms": search}


def tree_system(engine: Pipeline, beam: int, m: int) -> System:
    encoder = Encoder(engine.bundle, elsewhere=False)

    def encode(query: Array) -> tuple[QueryBatch, SearchParams]:
        queries, params = QueryBatch(engine.bundle.manifest.query, query[None]), SearchParams.uniform(1, beam, m)
        states_BLS = encoder.of(queries, params.beam_size_B, False, None, None).states_BLS
        return GivenQueries(queries.kind, queries.rows, states_BLS), params

    return System(engine.name, beam, encode, lambda made: engine.search(*made).item_rows_BM)


def leaf_encoder(bundle: Bundle) -> Callable[[Array], Float32]:
    """Makes the states of a query on the leaf level, float32[1, S]."""
    encoder = Encoder(bundle, elsewhere=False)
    return lambda query: encoder.leaf_states(QueryBatch(bundle.manifest.query, query[None]), None)


def leaf_rows(bundle: Bundle) -> Float32:
    """float32[I, D]: the row of each item's leaf."""
    return np.ascontiguousarray(bundle.node_rows_ND[bundle.tree.leaf_of_item], np.float32)


def scan_system(name: str, encode: Callable[[Array], Float32], item_rows_ID: Float32, m: int) -> System:
    """All inner products by one product of a matrix and a vector, then the best by compiled code."""

    def search(state_1D: Array) -> Int64:
        return best_of_all(lambda part: state_1D @ item_rows_ID.T, len(item_rows_ID), list(state_1D), m, exclude_seen=False)

    return System(name, None, encode, search)


def index_system(name: str, encode: Callable[[Array], Float32], index: AnnIndex, effort: int, m: int) -> System:
    return System(name, effort, encode, lambda state_1D: index.search(state_1D, m, effort))
