"""Approximate nearest neighbours of item vectors for inner products, by faiss: what is used instead of a tree where scores are products.

Knows vectors. Does not know where they came from.

HNSW walks a neighbourhood graph. Its knob is efSearch, the candidates kept on the way. It needs distances, not products: an item gets one
more coordinate that makes all items equally long, a query a 0 there, after which the nearest item is the one with the largest product
(Bachrach et al. 2014).

Legend: B queries, I items, D vector width, M results.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from espalier.arrays import Float32, Int64
from espalier.errors import DeviceUnavailable, InvalidData
from espalier.search import NO_ITEM

if TYPE_CHECKING:
    import faiss


LINKS = 32
"""Neighbours of an item in a layer (twice as many in the lowest)."""
EF_CONSTRUCTION = 200


def faiss_is_installed() -> bool:
    return importlib.util.find_spec("faiss") is not None


class HnswIndex:
    """An index over item_vectors float32[I, D], at least one, for the largest inner products, on one thread.

    The same vectors give the same index. Raises DeviceUnavailable where faiss is not installed.

    file  where the index is kept: read where it is there, else written. Raises InvalidData where one of another size lies there
    """

    def __init__(self, item_vectors: Float32, file: Path | None = None) -> None:
        if not faiss_is_installed():
            raise DeviceUnavailable("faiss is not installed: pip install -e '.[ann]' -c constraints.txt")
        import faiss

        faiss.omp_set_num_threads(1)  # of this process: whoever measures wants one thread
        self.items = len(item_vectors)
        self._knobs = faiss.ParameterSpace()
        self._effort = 0
        self._index: faiss.Index
        vectors = equally_long(item_vectors)
        if file is not None and file.exists():
            self._index = faiss.read_index(str(file))
            if (self._index.ntotal, self._index.d) != vectors.shape:
                stored = f"{self._index.ntotal} vectors of {self._index.d} numbers"
                raise InvalidData(str(file), stored, f"{len(vectors)} of {vectors.shape[1]}")
            return
        self._index = faiss.index_factory(vectors.shape[1], f"HNSW{LINKS},Flat")
        self._knobs.set_index_parameter(self._index, "efConstruction", EF_CONSTRUCTION)
        self._index.add(vectors)
        if file is not None:
            faiss.write_index(self._index, str(file))

    def search(self, user_vectors: Float32, m: int, effort: int) -> Int64:
        """int64[B, M = m]: item rows, best first; NO_ITEM where fewer were found. The order of ties is faiss's.

        user_vectors  float32[B, D]
        effort        efSearch; faiss keeps at least m
        """
        if effort != self._effort:
            self._knobs.set_index_parameter(self._index, "efSearch", effort)
            self._effort = effort
        lengthened = np.concatenate([user_vectors, np.zeros((len(user_vectors), 1), np.float32)], axis=1)
        rows_BM = np.full((len(user_vectors), m), NO_ITEM, np.int64)
        rows_BM[:, : self.items] = self._index.search(lengthened, min(m, self.items))[1]
        return rows_BM


def equally_long(item_vectors: Float32) -> Float32:
    """float32[I, D + 1]: with a last coordinate √(max ‖v‖² − ‖v‖²), so that ‖(u, 0) − v‖² is a constant less 2 ⟨u, v⟩."""
    square_I = np.square(item_vectors, dtype=np.float64).sum(axis=1)
    return np.concatenate([item_vectors, np.sqrt(square_I.max() - square_I)[:, None]], axis=1, dtype=np.float32)
