"""The trainer's sparse matrices (scipy.sparse), to and from the rows that engines take, and from files of `save_npz`.

SciPy does not check indices when it reads a file; its compiled code would then access memory outside its arrays. So files are checked here.

Legend: B rows, F features.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csc_array, csr_array, load_npz

from espalier.arrays import Array, Float32
from espalier.errors import InvalidData
from espalier.stored_arrays import row_blocks
from espalier.text.sparse_rows import SparseRows

Csr = csr_array[Any, tuple[int, int]]
READ_ERRORS = (
    *(OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, OverflowError, IndexError),
    *(MemoryError, NotImplementedError, RuntimeError, zipfile.BadZipFile, zlib.error),
)
"""Errors of a file that is no matrix. MemoryError: a few bytes can claim 2^60 rows."""
LARGEST = int(np.iinfo(np.int32).max)


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
    """float32 rows of L2 norm 1, rounded like a query in serving; empty rows stay empty."""
    return as_matrix(as_rows(matrix).normalised())


def lengths(matrix: Csr) -> Float32:
    """float32[B]: the L2 norm of each row."""
    length_B = np.zeros(matrix.shape[0], np.float32)
    for first, end in row_blocks(matrix.indptr):
        row = np.repeat(np.arange(end - first), np.diff(matrix.indptr[first : end + 1]))
        squares = matrix.data[matrix.indptr[first] : matrix.indptr[end]].astype(np.float64) ** 2
        length_B[first:end] = np.sqrt(np.bincount(row, squares, minlength=end - first))
    return length_B


def scaled(matrix: Csr, factor_B: Array) -> Csr:
    """float32[B, F]: each row times its factor. The indices are shared."""
    rows = as_rows(matrix)
    return as_matrix(replace(rows, values=rows.values * np.repeat(factor_B.astype(np.float32), np.diff(rows.indptr))))


def stacked(blocks: Iterable[Csr], width: int) -> Csr:
    """float32[B, width]: blocks of rows, one below the other. SciPy's `vstack` holds all of them twice."""
    counts, indices, values = [np.zeros(1, np.int64)], [np.empty(0, np.int32)], [np.empty(0, np.float32)]
    for block in blocks:
        rows = as_rows(block)
        counts.append(np.diff(rows.indptr))
        indices.append(rows.indices)
        values.append(rows.values)
    all_indices = np.concatenate(indices)
    indices.clear()
    return as_matrix(SparseRows(np.cumsum(np.concatenate(counts)), all_indices, np.concatenate(values), width))


def read_by_rows(file: Path) -> Csr:
    """A matrix by rows: float32, columns ascending and distinct, without zeros. Raises InvalidData."""
    return csr_array(_read(file, csr_array))


def read_by_columns(file: Path) -> csc_array[Any]:
    """A matrix by columns; zeros are kept."""
    return csc_array(_read(file, csc_array))


def _read(file: Path, form: Any) -> Any:
    try:
        with file.open("rb") as stream:  # NumPy may not close the stream of a damaged file that it opened itself
            stored = load_npz(stream)
        if hasattr(stored, "check_format"):
            stored.check_format(full_check=True)
        if stored.ndim != 2 or max(stored.shape) > LARGEST or stored.dtype.kind not in "biuf":
            raise ValueError(f"{stored.dtype}{list(stored.shape)}, expected numbers in at most {LARGEST} rows and columns")
        matrix = form(stored)
        with np.errstate(over="ignore"):  # infinite ones are refused below
            matrix = matrix.astype(np.float32)
        matrix.sum_duplicates()
    except READ_ERRORS as error:
        raise InvalidData(str(file), str(error) or type(error).__name__, "a sparse matrix written by scipy.sparse.save_npz") from error
    if not np.isfinite(matrix.data).all():
        raise InvalidData(str(file), "numbers that are not finite", "finite 32-bit numbers")
    if form is csr_array:
        matrix.eliminate_zeros()
    return matrix
