"""The arrays of a bundle's file, checked before compiled code follows them: their names, their types, and rows of ascending numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from espalier.arrays import Array, Int64
from espalier.errors import BundleCorrupt

Dtype = type[np.generic]
Dtypes = Mapping[str, Dtype | tuple[Dtype, ...]]
"""The dtypes of arrays by name; a tuple of dtypes allows any of them."""
BLOCK = 1 << 22
"""Entries that are checked at a time, which bounds the memory of intermediate arrays."""


def check_arrays(arrays: Mapping[str, Array], dtypes: Dtypes) -> None:
    """Raise BundleCorrupt unless these are one-dimensional arrays of these names and types."""
    if arrays.keys() != dtypes.keys():
        found = f"arrays {sorted(arrays)}, expected {sorted(dtypes)}"
        raise BundleCorrupt(f"{found}; if an earlier state of this software wrote them, train the model again")
    for name, expected_dtypes in dtypes.items():
        array, allowed = arrays[name], expected_dtypes if isinstance(expected_dtypes, tuple) else (expected_dtypes,)
        if array.ndim != 1 or array.dtype not in allowed:
            expected = " or ".join(str(np.dtype(dtype)) for dtype in allowed)
            raise BundleCorrupt(f"{name} is {array.dtype}{list(array.shape)}, expected one-dimensional {expected}")


def check_length(name: str, array: Array, length: int) -> None:
    """Raise BundleCorrupt unless an array has `length` entries."""
    if len(array) != length:
        raise BundleCorrupt(f"{name} has {len(array)} entries, expected {length}")


def check_rows(name: str, numbers: Array, begin: Int64, rows: int, width: int) -> None:
    """Raise BundleCorrupt unless `begin` divides numbers into `rows` rows, each ascending and from 0 to width − 1."""
    if not rises(begin, rows, len(numbers)):
        raise BundleCorrupt(f"{name}: {len(begin)} beginnings of rows, expected {rows + 1} from 0 to {len(numbers)} that never decrease")
    for first, end in row_blocks(begin):
        begin_R = begin[first : end + 1]
        block = numbers[begin_R[0] : begin_R[-1]]
        if len(block) and (block.min() < 0 or block.max() >= width):
            raise BundleCorrupt(f"{name} has numbers outside 0 … {width - 1}")
        if not ascends_in_rows(block, begin_R - begin_R[0]):
            raise BundleCorrupt(f"{name} is not strictly ascending within a row")


def row_blocks(begin: Array, most: int | None = None) -> Iterator[tuple[int, int]]:
    """Blocks of consecutive rows, as (first, end): at most `most` (None: BLOCK) entries, or one row with more.

    begin  where each row's entries begin
    """
    first = 0
    while first < len(begin) - 1:
        end = max(first + 1, int(np.searchsorted(begin, begin[first] + (BLOCK if most is None else most), side="right")) - 1)
        yield first, end
        first = end


def spans(begin: Int64, end: Int64) -> Int64:
    """begin[0] … end[0] − 1, begin[1] … end[1] − 1, …"""
    count = end - begin
    return np.asarray(np.arange(int(count.sum())) + np.repeat(begin - np.cumsum(count) + count, count))


def rises(begin: Array, rows: int, entries: int) -> bool:
    """Whether `begin` can divide `entries` entries into `rows` rows: from 0 to `entries`, never decreasing."""
    ends = len(begin) == rows + 1 and begin[0] == 0 and begin[-1] == entries
    return bool(ends and not np.any(begin[1:] < begin[:-1]))  # differences could wrap


def ascends_in_rows(column: Array, begin: Int64) -> bool:
    """Whether the entries of each row are in ascending order, none twice."""
    falls = column[1:] <= column[:-1]
    falls[begin[(begin > 0) & (begin < len(column))] - 1] = False
    return not falls.any()
