"""Sparse matrices as the trainer holds them (scipy.sparse), to and from the rows that engines take.

Legend: B rows, F features.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.sparse import csr_array

from espalier.text.sparse_rows import SparseRows

Csr = csr_array[Any, tuple[int, int]]


def as_matrix(rows: SparseRows) -> Csr:
    """float32[B, F], sharing the rows' indices and values."""
    short = len(rows.indices) <= np.iinfo(np.int32).max  # with a long indptr scipy would copy the indices to 64 bits
    indptr = rows.indptr.astype(np.int32) if short else rows.indptr
    return csr_array((rows.values, rows.indices, indptr), shape=(len(rows), rows.width))


def as_rows(matrix: Csr) -> SparseRows:
    """The rows of a matrix, with ascending indices."""
    matrix.sort_indices()
    indptr, indices, values = matrix.indptr, matrix.indices, matrix.data
    return SparseRows(
        indptr.astype(np.int64, copy=False), indices.astype(np.int32, copy=False), values.astype(np.float32, copy=False), matrix.shape[1]
    )


def normalised(matrix: Csr) -> Csr:
    """float32 rows of length 1 (L2), rounded as a query's are at serving; empty ones stay empty."""
    return as_matrix(as_rows(matrix).normalised())
