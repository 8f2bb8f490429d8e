"""The systems that `why_not_ann` compares: each encodes a history, then searches with what it made of it.

The tree; a scan of all items and HNSW over the tree's own leaf rows and leaf-level states; a scan, HNSW and IVF over the vectors of a
product-DNN.

Legend: B queries, I items, D row, M results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.engines.compiled.engine import CompiledEngine
from espalier.errors import InvalidData
from espalier.queries import HistoryKind, QueryBatch, pad_histories
from espalier.search import Engine, SearchParams
from training.baselines.ann import AnnIndex, Kind, faiss_is_installed
from training.baselines.product_dnn_model import ProductDnn
from training.retrieval.scores import best_of_all

M = 200
"""Results of every search."""

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]


@dataclass(frozen=True)
class System:
    """One point of the plot.

    knob    the beam, efSearch or nprobe; None where there is none
    encode  the item rows of a history → what its search takes
    search  a history and what `encode` made of it → int64[1, ≤ M] item rows, best first, NO_ITEM at the end
    apart   False: the engine encodes while it searches, so the two cannot be timed apart
    """

    name: str
    knob: int | None
    encode: Callable[[Int64], Any]
    search: Callable[[Int64, Any], Int64]
    apart: bool = True

    def find(self, history: Int64) -> Int64:
        return self.search(history, self.encode(history))


def tree_system(engine: Engine, bundle: Bundle, name: str, beam: int, exclude_seen: bool) -> System:
    kind = history_kind(bundle)

    def request(history: Int64) -> tuple[QueryBatch, SearchParams]:
        return pad_histories(kind, [history]), SearchParams.uniform(1, beam, M, history[None] if exclude_seen else None)

    if not isinstance(engine, CompiledEngine):
        return System(name, beam, request, lambda history, made: engine.search(*made).item_rows_BM, apart=False)

    def encode(history: Int64) -> tuple[QueryBatch, SearchParams]:
        queries, params = request(history)
        return queries, replace(params, states_BLS=engine.encode(queries, params))

    return System(name, beam, encode, lambda history, made: engine.search(*made).item_rows_BM)


def same_encoder_systems(engine: Engine, bundle: Bundle, ef_search: list[int], exclude_seen: bool) -> list[System]:
    """A scan of all items and HNSW, with the tree's leaf rows and leaf-level states. Empty where its scorer is no inner product."""
    if not isinstance(engine, CompiledEngine):
        return []
    kind, tree = history_kind(bundle), bundle.tree
    item_rows_ID = np.ascontiguousarray(bundle.node_rows_ND[tree.leaf_of_item], np.float32)

    def encode(history: Int64) -> Float32:
        return engine.leaf_states(pad_histories(kind, [history]))

    systems = [scan_system("exact scan, same encoder", encode, item_rows_ID, exclude_seen)]
    if faiss_is_installed():
        index = AnnIndex("hnsw", item_rows_ID)
        efforts = [effort for effort in ef_search if effort <= index.full_effort]
        systems += [index_system("HNSW, same encoder", encode, index, effort, exclude_seen) for effort in efforts]
    return systems


def product_dnn_systems(model: ProductDnn, efforts: dict[Kind, list[int]], exclude_seen: bool) -> list[System]:
    """Exact search, and every kind of `efforts` at each of them that the index has."""

    def encode(history: Int64) -> Float32:
        return model.user_vectors([history])

    systems = [scan_system("product-dnn exact", encode, model.item_vectors, exclude_seen)]
    if not faiss_is_installed():
        print("faiss is not installed: HNSW and IVF are left out (pip install -e '.[ann]' -c constraints.txt)", file=sys.stderr)
        return systems
    for kind, wanted in efforts.items():
        index = AnnIndex(kind, model.item_vectors)
        for effort in wanted:
            if effort <= index.full_effort:
                systems.append(index_system(f"product-dnn {kind.upper()}", encode, index, effort, exclude_seen))
    return systems


def scan_system(name: str, encode: Callable[[Int64], Float32], item_rows_ID: Float32, exclude_seen: bool) -> System:
    """All inner products by one product of a matrix and a vector, then the best by compiled code."""

    def search(history: Int64, state_1D: Float32) -> Int64:
        return best_of_all(lambda part: state_1D @ item_rows_ID.T, len(item_rows_ID), [history], M, exclude_seen)

    return System(name, None, encode, search)


def index_system(name: str, encode: Callable[[Int64], Float32], index: AnnIndex, effort: int, exclude_seen: bool) -> System:
    """The index cannot leave items out, so it is asked for as many more as the history has, which are then dropped."""

    def search(history: Int64, state_1D: Float32) -> Int64:
        if not exclude_seen:
            return index.search(state_1D, M, effort)
        found_BM = index.search(state_1D, M + len(history), effort)
        return found_BM[:, ~np.isin(found_BM[0], history)][:, :M]

    return System(name, effort, encode, search)


def history_kind(bundle: Bundle) -> HistoryKind:
    kind = bundle.manifest.query
    if not isinstance(kind, HistoryKind):
        raise InvalidData("--model", kind.kind, "a model of history queries")
    return kind
