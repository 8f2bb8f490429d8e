"""Sparse rows of features (CSR), as queries hold them.

Raw arrays instead of scipy.sparse: compiled searches rely on fixed index types, which scipy changes with an array's size, and services
that only answer queries need no scipy. The trainer holds scipy's matrices (`training/data/csr.py`).

Legend: B rows, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from espalier.arrays import Array, Float32, Int32, Int64, read_only
from espalier.errors import InvalidQuery
from espalier.stored_arrays import rises, row_blocks, spans

MAX_FEATURES = 1 << 26
"""Most features of sparse vectors and texts: training and searches keep an array of this length for each thread."""


@dataclass(frozen=True, eq=False)
class SparseRows:
    """B rows of `width` features.

    indptr   int64[B + 1]   where each row's entries begin
    indices  int32[entries] feature numbers, ascending within a row, none twice
    values   float32[entries], finite
    """

    indptr: Int64
    indices: Int32
    values: Float32
    width: int

    def __post_init__(self) -> None:
        for name, dtype in (("indptr", np.int64), ("indices", np.int32), ("values", np.float32)):
            array = getattr(self, name)
            if array.ndim != 1 or array.dtype != dtype:
                raise InvalidQuery(f"features.{name}", f"{array.dtype}{list(array.shape)}", f"a one-dimensional {np.dtype(dtype)} array")
        if len(self.indptr) < 1 or not rises(self.indptr, len(self), len(self.indices)):
            raise InvalidQuery("features.indptr", self.indptr.tolist()[:8], f"from 0 to {len(self.indices)}, never decreasing")
        if len(self.values) != len(self.indices):
            raise InvalidQuery("features.values", f"{len(self.values)} numbers", f"{len(self.indices)}, one per index")

    def __len__(self) -> int:
        return len(self.indptr) - 1

    @cached_property
    def arrays(self) -> tuple[Array, ...]:
        """indptr, indices and values as compiled code takes them, cached: a forest needs them for every tree."""
        return read_only(self.indptr, self.indices, self.values)

    def check_numbers(self) -> None:
        """Raise InvalidQuery if an index is out of range, or a value is not finite."""
        if len(self.indices) and (self.indices.min() < 0 or self.indices.max() >= self.width):
            bad = int(self.indices.max() if self.indices.max() >= self.width else self.indices.min())
            raise InvalidQuery("features.indices", bad, f"feature numbers from 0 to {self.width - 1}")
        if not np.isfinite(self.values).all():
            raise InvalidQuery("features.values", float(self.values[~np.isfinite(self.values)][0]), "finite numbers")

    def check(self) -> None:
        """Raise InvalidQuery as `check_numbers`, and if indices do not ascend."""
        self.check_numbers()
        begins = np.zeros(len(self.indices), np.bool_)
        begins[self.indptr[:-1][np.diff(self.indptr) > 0]] = True
        descends = ~begins[1:] & (np.diff(self.indices) <= 0)
        if descends.any():
            raise InvalidQuery("features.indices", int(self.indices[1:][descends][0]), "ascending numbers within a row, none twice")

    def row(self, b: int) -> tuple[Int32, Float32]:
        """The indices and values of a row."""
        entries = slice(int(self.indptr[b]), int(self.indptr[b + 1]))
        return self.indices[entries], self.values[entries]

    def take(self, rows: Int64) -> SparseRows:
        """The rows at some positions (int64)."""
        begin, end = self.indptr[rows], self.indptr[rows + 1]
        entries = spans(begin, end)
        return SparseRows(np.append(0, np.cumsum(end - begin)), self.indices[entries], self.values[entries], self.width)

    def between(self, begin: int, end: int) -> SparseRows:
        """Consecutive rows; their entries are not copied."""
        entries = slice(int(self.indptr[begin]), int(self.indptr[end]))
        return SparseRows(self.indptr[begin : end + 1] - self.indptr[begin], self.indices[entries], self.values[entries], self.width)

    def without_zeros(self) -> SparseRows:
        """The rows without entries of value 0: a feature with this value is one that the row lacks."""
        kept = self.values != 0
        if kept.all():
            return self
        return SparseRows(np.append(0, np.cumsum(kept))[self.indptr], self.indices[kept], self.values[kept], self.width)

    def normalised(self) -> SparseRows:
        """Rows of length 1 (L2); empty ones stay empty."""
        unit = np.empty_like(self.values)
        for first, end in row_blocks(self.indptr):
            begin = self.indptr[first : end + 1] - self.indptr[first]
            entries, counts = slice(int(self.indptr[first]), int(self.indptr[end])), np.diff(begin)
            squares = np.add.reduceat(np.append(self.values[entries], np.float32(0)).astype(np.float64) ** 2, begin[:-1]) * (counts > 0)
            unit[entries] = self.values[entries] / np.repeat(np.sqrt(np.where(squares > 0, squares, 1)), counts)
        return SparseRows(self.indptr, self.indices, unit, self.width)


def concatenated(batches: Sequence[SparseRows]) -> SparseRows:
    """The rows of several batches of one width, one batch after the other."""
    ends = np.cumsum([0, *(len(batch.indices) for batch in batches)])
    indptr = np.concatenate([batches[0].indptr[:1], *(batch.indptr[1:] + end for batch, end in zip(batches, ends, strict=False))])
    indices, values = (np.concatenate([getattr(batch, name) for batch in batches]) for name in ("indices", "values"))
    return SparseRows(indptr, indices, values, batches[0].width)
