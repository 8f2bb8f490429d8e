"""Systems that encode a query and then search with what they made of it, and how both parts are timed.

A tree; a scan of all items and HNSW over the tree's own leaf rows and leaf-level states; a scan, HNSW and IVF over the vectors of a
product-DNN. A query is the item rows of a history, or a vector.

Legend: B queries, I items, D row, M results; in timing X systems, P parts, R rounds, Q queries.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from benchmarks.papers.product_search.ann import AnnIndex, Kind, faiss_is_installed
from espalier.bundle import Bundle
from espalier.engines.encode import Encoder
from espalier.engines.pipeline import Pipeline
from espalier.engines.stages import GivenQueries
from espalier.manifest import GraphScorer, InnerProductForm
from espalier.queries import HistoryKind, QueryBatch, pad_histories
from espalier.search import SearchParams
from training.baselines.product_dnn_model import ProductDnn
from training.retrieval.scores import best_of_all

M = 200
"""Results of every search of a history."""

Array = NDArray[Any]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class System:
    """One point of a plot.

    knob    the beam, efSearch or nprobe; None where there is none
    encode  a query → what its search takes
    search  a query and what `encode` made of it → int64[1, ≤ M] item rows, best first, NO_ITEM at the end
    apart   False: nothing is encoded, or the engine does it while it searches, so the two cannot be timed apart
    """

    name: str
    knob: int | None
    encode: Callable[[Array], Any]
    search: Callable[[Array, Any], Int64]
    apart: bool = True

    def find(self, query: Array) -> Int64:
        return self.search(query, self.encode(query))


def timed(systems: Sequence[System], queries: Sequence[Array], rounds: int) -> list[dict[str, float | None]]:
    """{"ms_per_query", "encode_ms", "search_ms"} of each system: the mean over queries of each one's median over rounds.

    One query at a time; all systems take turns in every round. The parts are None where a system does both at once.
    """
    ms_XPRQ = np.zeros((len(systems), 2, rounds, len(queries)))
    for round_number in tqdm(range(rounds), desc="time", unit="round", disable=None):
        for system, ms_PRQ in zip(systems, ms_XPRQ, strict=True):
            system.find(queries[0])  # pays for the turned knob and for what others left in the processor's cache
            for query_number, query in enumerate(queries):
                begin = time.perf_counter()
                encoded = system.encode(query)
                between = time.perf_counter()
                system.search(query, encoded)
                ms_PRQ[:, round_number, query_number] = (between - begin) * 1e3, (time.perf_counter() - between) * 1e3
    return [_milliseconds(system, ms_PRQ) for system, ms_PRQ in zip(systems, ms_XPRQ, strict=True)]


def _milliseconds(system: System, ms_PRQ: NDArray[np.float64]) -> dict[str, float | None]:
    whole, encode, search = (round(float(np.median(part_RQ, axis=0).mean()), 4) for part_RQ in (ms_PRQ.sum(0), *ms_PRQ))
    return {"ms_per_query": whole, "encode_ms": encode if system.apart else None, "search_ms": search if system.apart else None}


def batch_of(bundle: Bundle, query: Array) -> QueryBatch:
    """One query as an engine takes it."""
    kind = bundle.manifest.query
    return pad_histories(kind, [query]) if isinstance(kind, HistoryKind) else QueryBatch(kind, query[None])


def tree_system(engine: Pipeline, name: str, beam: int, m: int, exclude_seen: bool) -> System:
    def request(query: Array) -> tuple[QueryBatch, SearchParams]:
        return batch_of(engine.bundle, query), SearchParams.uniform(1, beam, m, query[None] if exclude_seen else None)

    def search(query: Array, made: tuple[QueryBatch, SearchParams]) -> Int64:
        return engine.search(*made).item_rows_BM

    if engine.tree_search.encodes or not isinstance(engine.bundle.manifest.scorer, GraphScorer):
        return System(name, beam, request, search, apart=False)
    encoder = Encoder(engine.bundle, elsewhere=False)

    def encode(query: Array) -> tuple[QueryBatch, SearchParams]:
        queries, params = request(query)
        states_BLS = encoder.of(queries, params.beam_size_B, False, None, None).states_BLS
        return GivenQueries(queries.kind, queries.rows, states_BLS), params

    return System(name, beam, encode, search)


def leaf_encoder(bundle: Bundle) -> Callable[[Array], Float32]:
    """Makes the states of a query on the leaf level, float32[1, S]."""
    encoder = Encoder(bundle, elsewhere=False)
    return lambda query: encoder.leaf_states(batch_of(bundle, query), None)


def same_encoder_systems(bundle: Bundle, ef_search: list[int], exclude_seen: bool) -> list[System]:
    """A scan of all items and HNSW, with the tree's leaf rows and leaf-level states. Empty where its scorer is no inner product."""
    scorer = bundle.manifest.scorer
    if not isinstance(scorer, GraphScorer) or not isinstance(scorer.form, InnerProductForm):
        return []
    encode, item_rows_ID = leaf_encoder(bundle), leaf_rows(bundle)
    systems = [scan_system("exact scan, same encoder", encode, item_rows_ID, M, exclude_seen)]
    if faiss_is_installed():
        index = AnnIndex("hnsw", item_rows_ID)
        efforts = [effort for effort in ef_search if effort <= index.full_effort]
        systems += [index_system("HNSW, same encoder", encode, index, effort, M, exclude_seen) for effort in efforts]
    return systems


def leaf_rows(bundle: Bundle) -> Float32:
    """float32[I, D]: the row of each item's leaf."""
    return np.ascontiguousarray(bundle.node_rows_ND[bundle.tree.leaf_of_item], np.float32)


def product_dnn_systems(model: ProductDnn, efforts: dict[Kind, list[int]], exclude_seen: bool) -> list[System]:
    """Exact search, and every kind of `efforts` at each of them that the index has."""

    def encode(history: Array) -> Float32:
        return model.user_vectors([history])

    systems = [scan_system("product-dnn exact", encode, model.item_vectors, M, exclude_seen)]
    if not faiss_is_installed():
        print("faiss is not installed: HNSW and IVF are left out (pip install -e '.[ann]' -c constraints.txt)", file=sys.stderr)
        return systems
    for kind, wanted in efforts.items():
        index = AnnIndex(kind, model.item_vectors)
        for effort in wanted:
            if effort <= index.full_effort:
                systems.append(index_system(f"product-dnn {kind.upper()}", encode, index, effort, M, exclude_seen))
    return systems


def scan_system(name: str, encode: Callable[[Array], Float32], item_rows_ID: Float32, m: int, exclude_seen: bool) -> System:
    """All inner products by one product of a matrix and a vector, then the best by compiled code."""

    def search(query: Array, state_1D: Float32) -> Int64:
        return best_of_all(lambda part: state_1D @ item_rows_ID.T, len(item_rows_ID), [query], m, exclude_seen)

    return System(name, None, encode, search)


def index_system(name: str, encode: Callable[[Array], Float32], index: AnnIndex, effort: int, m: int, exclude_seen: bool) -> System:
    """The index cannot leave items out, so it is asked for as many more as the history has, which are then dropped."""

    def search(query: Array, state_1D: Float32) -> Int64:
        if not exclude_seen:
            return index.search(state_1D, m, effort)
        found_BM = index.search(state_1D, m + len(query), effort)
        return found_BM[:, ~np.isin(found_BM[0], query)][:, :m]

    return System(name, effort, encode, search)
