"""Approximate nearest neighbours of item vectors for inner products, by faiss: what is used instead of a tree where scores are products.

Knows vectors and one search knob per kind. Does not know where the vectors came from.

`hnsw` walks a neighbourhood graph, whose knob is efSearch, the candidates kept on the way; `ivf` scans the nearest cells of a k-means
partition, whose knob is nprobe, how many. Both need distances, not products: an item gets one more coordinate that makes all items
equally long, a query a 0 there, after which the nearest item is the one with the largest product (Bachrach et al. 2014).

Legend: B queries, I items, D vector width, M results.
"""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from espalier.errors import DeviceUnavailable, InvalidData
from espalier.search import NO_ITEM

if TYPE_CHECKING:
    import faiss

Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Kind = Literal["hnsw", "ivf"]

LINKS = 32
"""hnsw: neighbours per item and layer (twice as many on the lowest)."""
EF_CONSTRUCTION = 200
KNOBS: dict[str, str] = {"hnsw": "efSearch", "ivf": "nprobe"}
MIN_ITEMS_PER_CELL = 39
"""What faiss asks for to place a cell's centre."""


def faiss_is_installed() -> bool:
    return importlib.util.find_spec("faiss") is not None


class AnnIndex:
    """An index over item_vectors float32[I, D], at least one, for the largest inner products, on one thread.

    The same vectors give the same index. Raises DeviceUnavailable where faiss is not installed.

    file  where the index is kept: read where it is there, else written. Raises InvalidData where one of another size lies there
    """

    def __init__(self, kind: Kind, item_vectors: Float32, file: Path | None = None) -> None:
        if not faiss_is_installed():
            raise DeviceUnavailable("faiss is not installed: pip install -e '.[ann]' -c constraints.txt")
        import faiss

        faiss.omp_set_num_threads(1)  # of this process: whoever measures wants one thread
        self.kind, self.items = kind, len(item_vectors)
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
        recipe = {"hnsw": f"HNSW{LINKS},Flat", "ivf": f"IVF{self.cells},Flat"}[kind]
        self._index = faiss.index_factory(vectors.shape[1], recipe)
        if kind == "hnsw":
            self._knobs.set_index_parameter(self._index, "efConstruction", EF_CONSTRUCTION)
        self._index.train(vectors)
        self._index.add(vectors)
        if file is not None:
            faiss.write_index(self._index, str(file))

    @property
    def cells(self) -> int:
        """ivf: about 4 · √I, as many as can be placed."""
        return max(1, min(round(4 * math.sqrt(self.items)), self.items // MIN_ITEMS_PER_CELL))

    @property
    def full_effort(self) -> int:
        """The knob at which nothing is left out (hnsw: of what the graph connects)."""
        return self.items if self.kind == "hnsw" else self.cells

    def search(self, user_vectors: Float32, m: int, effort: int) -> Int64:
        """int64[B, M = m]: item rows, best first; NO_ITEM where fewer were found. The order of ties is faiss's.

        user_vectors  float32[B, D]
        effort        efSearch (faiss keeps at least m) or nprobe
        """
        if effort != self._effort:
            self._knobs.set_index_parameter(self._index, KNOBS[self.kind], effort)
            self._effort = effort
        lengthened = np.concatenate([user_vectors, np.zeros((len(user_vectors), 1), np.float32)], axis=1)
        rows_BM = np.full((len(user_vectors), m), NO_ITEM, np.int64)
        rows_BM[:, : self.items] = self._index.search(lengthened, min(m, self.items))[1]
        return rows_BM


def equally_long(item_vectors: Float32) -> Float32:
    """float32[I, D + 1]: with a last coordinate √(max ‖v‖² − ‖v‖²), so that ‖(u, 0) − v‖² is a constant less 2 ⟨u, v⟩."""
    square_I = np.square(item_vectors, dtype=np.float64).sum(axis=1)
    return np.concatenate([item_vectors, np.sqrt(square_I.max() - square_I)[:, None]], axis=1, dtype=np.float32)
