"""Linear scorers in a third of the bytes: weights in float16, and differences instead of feature numbers and offsets.

Features ascend within a node, so each is stored as its difference from the one before. Instead of the offset of a row's entries, their
number is stored. These numbers are small, and so are child numbers: each array has the narrowest type that holds it. An opened bundle maps
weights and children as they are stored, and unpacks rows.

Legend: P inner nodes, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from espalier.arrays import Array
from espalier.chunks import Chunks
from espalier.errors import BundleCorrupt
from espalier.stored_arrays import BLOCK, Dtypes, check_arrays, check_length, rises

NARROW = (np.uint8, np.uint16, np.int32)
PACKED: Dtypes = {
    "chunk_row": np.int64,
    "row_gap": NARROW,
    "row_count": NARROW,
    "entry_child": (np.uint8, np.uint16),
    "entry_weight": np.float16,
    "bias": np.float32,
}
"""The arrays of packed chunks, as bundles name them, and their types.

row_gap    [R]: a row's feature minus that of the row before; for a node's first row the feature
row_count  [R]: the number of entries of a row
others     as in Chunks
"""
MAX_LOST_SHARE = 1e-3
"""Largest rounding error as a share of the absolute weights: float16 rounds to 11 bits, tiny numbers to fewer."""


def rounded(chunks: Chunks) -> Chunks | None:
    """The scorers with weights in float16; None if weights are too large, or so small that rounding would lose too much."""
    with np.errstate(over="ignore"):
        weights = chunks.entry_weight.astype(np.float16)
    lost_weight = total_weight = 0.0
    for begin in range(0, len(weights), BLOCK):
        block = chunks.entry_weight[begin : begin + BLOCK].astype(np.float64)
        lost_weight += np.abs(weights[begin : begin + BLOCK] - block).sum()
        total_weight += np.abs(block).sum()
    if not lost_weight <= MAX_LOST_SHARE * total_weight:  # also if some weights are infinite
        return None
    return replace(chunks, entry_weight=weights, entry_child=narrowed(chunks.entry_child))


def widened(chunks: Chunks) -> Chunks:
    """The scorers with float32 weights, for code that changes weights or has no float16. Unchanged if they have float32 weights."""
    if chunks.entry_weight.dtype == np.float32 and chunks.entry_child.dtype == np.uint16:
        return chunks
    return replace(chunks, entry_weight=chunks.entry_weight.astype(np.float32), entry_child=chunks.entry_child.astype(np.uint16))


def packed(chunks: Chunks) -> dict[str, Array]:
    """The arrays of scorers in float16, as a bundle has them."""
    gaps = np.diff(chunks.row_feature, prepend=np.int32(0))
    begins = chunks.chunk_row[:-1][np.diff(chunks.chunk_row) > 0]
    gaps[begins] = chunks.row_feature[begins]
    return {
        "chunk_row": chunks.chunk_row,
        "row_gap": narrowed(gaps),
        "row_count": narrowed(np.diff(chunks.row_entry)),
        "entry_child": chunks.entry_child,
        "entry_weight": chunks.entry_weight,
        "bias": chunks.bias,
    }


def unpacked(arrays: Mapping[str, Array], width: int) -> Chunks:
    """The scorers of a bundle's arrays, weights and children as they are. Raises BundleCorrupt; `Chunks.check` makes the other checks."""
    check_arrays(arrays, PACKED)
    chunk_row, gaps, counts = arrays["chunk_row"], arrays["row_gap"], arrays["row_count"]
    check_length("row_count", counts, len(gaps))
    if not len(chunk_row) or not rises(chunk_row, len(chunk_row) - 1, len(gaps)):
        raise BundleCorrupt(f"chunk_row does not rise from 0 to {len(gaps)}, the number of rows")
    if len(gaps) and (gaps.min() < 0 or counts.min() < 0):
        raise BundleCorrupt("row_gap or row_count has numbers below 0")
    begins = chunk_row[:-1][np.diff(chunk_row) > 0]
    last = np.add.reduceat(gaps, begins, dtype=np.int64) if len(begins) else np.zeros(0, np.int64)  # the largest feature of each node
    if last.max(initial=0) >= width:
        raise BundleCorrupt(f"row_gap leads to feature numbers outside 0 … {width - 1}")
    features = gaps.astype(np.int32)
    features[begins[1:]] -= last[:-1].astype(np.int32)
    np.cumsum(features, dtype=np.int32, out=features)
    entries = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, dtype=np.int64, out=entries[1:])
    return Chunks(chunk_row, features, entries, arrays["entry_child"], arrays["entry_weight"], arrays["bias"], width)


def narrowed(numbers: Array) -> Array:
    """Numbers of at least 0, in the narrowest type of NARROW that holds them."""
    largest = int(numbers.max(initial=0))
    dtype = next(dtype for dtype in NARROW if largest <= np.iinfo(dtype).max)
    return numbers.astype(dtype, copy=False)
