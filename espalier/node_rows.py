"""Node rows as bundles store them: float32, float16, or int8 with an exponent behind each row.

    row n = stored[n, :D] · 2^stored[n, D]

A row of int8 takes half the bytes of one of float16. float16 holds each of its numbers exactly: engines that compute with float16 or
float32 read the stored numbers unchanged, and rounding a row again does not change it.

Legend: N nodes, D node row, E = D + 1.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.arrays import Array, Float32

LARGEST_CODE = 127
LOWEST, HIGHEST = -24, 8
"""Range of exponents: float16 holds numbers from 2^-24 to 128 · 2^8, and few beyond."""
BLOCK = 1 << 14
"""Rows that are packed at a time."""


class PackedRows:
    """float16[N, D], read row by row from int8[N, E], which may be mapped.

    Indices are those of NumPy's first axis: nodes, or a slice of them. Raises IndexError for a tuple.
    """

    dtype = np.dtype(np.float16)

    def __init__(self, stored_NE: NDArray[np.int8]) -> None:
        self._stored_NE = stored_NE
        self.shape = len(stored_NE), stored_NE.shape[1] - 1

    def __len__(self) -> int:
        return len(self._stored_NE)

    def __getitem__(self, nodes: Any) -> NDArray[np.float16]:
        if isinstance(nodes, tuple):
            raise IndexError("rows are indexed by nodes alone")
        stored = np.asarray(self._stored_NE[nodes])
        rows: NDArray[np.float16] = (stored[..., :-1] * np.ldexp(np.float32(1), stored[..., -1:])).astype(np.float16)
        return rows

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self[:], dtype)


NodeRows = Array | PackedRows
"""float32[N, D], float16[N, D], or PackedRows, which are read as float16."""


def rows_of(stored: Array) -> NodeRows:
    """Stored rows as numbers."""
    return PackedRows(stored) if stored.dtype == np.int8 else stored


def width_of(stored: Any) -> int:
    """D of an array of stored rows, or of an object with its shape and dtype."""
    return int(stored.shape[1]) - int(stored.dtype == np.int8)


def stored_as(rows_ND: Any, dtype: Any) -> Array:
    """Rows as a bundle of this dtype stores them. Raises FloatingPointError if the dtype cannot hold them."""
    dtype = np.dtype(dtype)
    if dtype == np.int8:
        return _packed(rows_ND)
    with np.errstate(over="ignore"):
        stored = np.asarray(rows_ND).astype(dtype)
    if not np.isfinite(stored).all():
        raise FloatingPointError(f"node rows are not finite in {dtype}")
    return stored


def rounded(rows_ND: Array, dtype: Any) -> Float32:
    """float32[N, D]: rows rounded as a bundle of this dtype stores them. Raises as `stored_as`."""
    return np.asarray(rows_of(stored_as(rows_ND, dtype)), np.float32)


def has_known_exponents(stored_NE: NDArray[np.int8]) -> bool:
    """Whether all exponents are in the range where float16 holds all numbers."""
    exponent_N = stored_NE[:, -1]
    return not len(exponent_N) or bool(exponent_N.min() >= LOWEST and exponent_N.max() <= HIGHEST)


def _packed(rows_ND: Any) -> NDArray[np.int8]:
    """int8[N, E]: each row with the lowest exponent that leaves no code above LARGEST_CODE."""
    stored_NE = np.empty((len(rows_ND), rows_ND.shape[1] + 1), np.int8)
    for begin in range(0, len(rows_ND), BLOCK):
        block_nD = np.asarray(rows_ND[begin : begin + BLOCK], np.float64)
        largest_n = np.abs(block_nD).max(1, initial=0)
        if not np.all(largest_n <= LARGEST_CODE * 2.0**HIGHEST):  # NaN fails too
            raise FloatingPointError("node rows are not finite in int8")
        fraction_n, exponent_n = np.frexp(largest_n / LARGEST_CODE)
        exponent_n = np.clip(exponent_n - (fraction_n == 0.5), LOWEST, HIGHEST)
        stored_NE[begin : begin + BLOCK, :-1] = np.rint(np.ldexp(block_nD, -exponent_n[:, None]))
        stored_NE[begin : begin + BLOCK, -1] = exponent_n
    return stored_NE
