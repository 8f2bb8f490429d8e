"""Compares results with the expected answers of golden queries: one engine's up to its rounding, several shards' by the missing items.

Knows answers and results. Does not know how expected answers are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from espalier.arrays import Float32, Float64, Int64
from espalier.bundle import Bundle
from espalier.errors import BundleCorrupt
from espalier.manifest import Ranking
from espalier.scores import finish
from espalier.search import NO_ITEM, SearchResult

MIN_MEAN_OVERLAP = 0.99
MIN_SHARDED_OVERLAP = 0.95
"""Least mean overlap if several shards answer. Each shard keeps a whole beam, so together they may find better items than expected. An
expected item may be missing if all items that came have at least its key."""


class GoldenAnswers(NamedTuple):
    """For each golden query the item rows, int64, best first; their ranks and their keys, float32."""

    rows: Sequence[Int64]
    ranks: Sequence[Float32]
    keys: Sequence[Float32]

    @staticmethod
    def of(rows: Sequence[Any], ranks: Sequence[Any], keys: Sequence[Any]) -> GoldenAnswers:
        """Answers from lists of numbers."""
        as_ranks = ([np.asarray(row or (), np.float32) for row in column] for column in (ranks, keys))
        return GoldenAnswers([np.asarray(row or (), np.int64) for row in rows], *as_ranks)

    def as_result(self, ranking: Ranking, least: int) -> SearchResult:
        """The result of a search with these answers, with at least `least` columns."""
        count_B = np.array([len(rows) for rows in self.rows], np.int64)
        shape = len(self.rows), max(int(count_B.max(initial=0)), least)
        rows_BM, ranks_BM, keys_BM = np.full(shape, NO_ITEM, np.int64), *np.full((2, *shape), -np.inf, np.float32)
        for b, (rows, ranks, keys) in enumerate(zip(*self, strict=True)):
            rows_BM[b, : len(rows)], ranks_BM[b, : len(rows)], keys_BM[b, : len(rows)] = rows, ranks, keys
        return finish(ranking, count_B, count_B, rows_BM, ranks_BM, keys_BM=keys_BM)


def check_same(bundle: Bundle, source: str, expected: GoldenAnswers, result: SearchResult, margin_B: Float64, rounding: float) -> float:
    """The mean overlap of expected answers and a result. source: where the result is from, for messages. Raises BundleCorrupt."""
    overlap_B = np.array([_overlap(rows, got) for rows, got in zip(expected.rows, result.item_rows_BM, strict=True)])
    different = np.flatnonzero((margin_B > 2 * rounding) & (overlap_B < 1))
    if len(different):
        raise BundleCorrupt(f"{bundle.path}: golden query {different[0]} gave other items on {source} than when the model was trained")
    overlap = _mean_overlap(bundle, source, overlap_B, MIN_MEAN_OVERLAP)
    for b, (rows, ranks, keys) in enumerate(zip(*expected, strict=True)):
        fault = _length_fault(rows, ranks, keys) or _fault(rows, ranks, keys, result, b, 2 * rounding)
        if fault:
            raise BundleCorrupt(f"{bundle.path}: golden query {b} on {source}: {fault}")
    return overlap


def check_shards(bundle: Bundle, source: str, expected: GoldenAnswers, result: SearchResult, rounding: float) -> float:
    """`check_same` for a result of several shards. In a forest, items may have larger ranks than expected: more trees reach them."""
    tolerance, is_forest = 2 * rounding, bool(bundle.manifest.trees)
    overlap_B = np.empty(len(expected.rows))
    for b, (rows, ranks, keys) in enumerate(zip(*expected, strict=True)):
        fault = _length_fault(rows, ranks, keys) or ("" if is_forest else _fault(rows, ranks, keys, result, b, tolerance))
        if fault:
            raise BundleCorrupt(f"{bundle.path}: golden query {b} on {source}: {fault}")
        overlap_B[b] = _sharded_overlap(rows, keys, result.item_rows_BM[b], result.keys_BM[b], tolerance)
    return _mean_overlap(bundle, source, overlap_B, MIN_SHARDED_OVERLAP)


def _mean_overlap(bundle: Bundle, source: str, overlap_B: Float64, least: float) -> float:
    """The mean overlap. Raises BundleCorrupt if it is below `least`."""
    overlap = float(overlap_B.mean()) if len(overlap_B) else 1.0
    if overlap < least:
        raise BundleCorrupt(f"{bundle.path}: golden queries overlap by {overlap:.4f} on {source}, at least {least} expected")
    return overlap


def _length_fault(rows: Int64, ranks: Float32, keys: Float32) -> str:
    """A message if there are not as many ranks, or keys, as items; else empty."""
    for name, numbers in (("rank", ranks), ("key", keys)):
        if len(numbers) != len(rows):
            return f"{len(numbers)} {name}s are stored for {len(rows)} items"
    return ""


def _fault(rows: Int64, ranks: Float32, keys: Float32, result: SearchResult, b: int, tolerance: float) -> str:
    """A message if an item that was expected and came has a wrong rank, key or position; else empty."""
    got_rows = result.item_rows_BM[b]
    return (
        _rank_fault("rank", rows, ranks, got_rows, result.ranks_BM[b], tolerance)
        or _rank_fault("key", rows, keys, got_rows, result.keys_BM[b], tolerance)
        or _order_fault(rows, keys, got_rows, tolerance)
    )


def _rank_fault(
    name: str,
    expected: Int64,
    expected_ranks: Float32,
    got: Int64,
    got_ranks: Float32,
    tolerance: float,
) -> str:
    """A message if an item that was expected and came has a wrong rank (or key); else empty."""
    rows, positions, got_positions = np.intersect1d(expected, got, return_indices=True)
    stored, computed = expected_ranks[positions].astype(np.float64), got_ranks[got_positions].astype(np.float64)
    tolerance *= _scale(stored)
    wrong_positions = np.flatnonzero(~(np.abs(computed - stored) <= tolerance))  # also where one is NaN
    if not len(wrong_positions):
        return ""
    i = wrong_positions[0]
    return f"item row {rows[i]} has {name} {computed[i]:.6g}, expected {stored[i]:.6g} ± {tolerance:.2g}"


def _order_fault(expected: Int64, expected_keys: Float32, got: Int64, tolerance: float) -> str:
    """A message if items that were expected and came are in the wrong order; else empty."""
    rows, positions, got_positions = np.intersect1d(expected, got, return_indices=True)
    order = np.argsort(got_positions)
    keys_in_order = expected_keys[positions][order].astype(np.float64)
    late = np.flatnonzero(keys_in_order[1:] > np.minimum.accumulate(keys_in_order)[:-1] + tolerance * _scale(keys_in_order))
    return f"item row {rows[order[late[0] + 1]]} comes after items of lower rank" if len(late) else ""


def _scale(ranks: Float64) -> float:
    """The factor of a tolerance: the largest absolute rank, at least 1."""
    return max(1.0, float(np.abs(ranks).max(initial=0)))


def _overlap(expected: Int64, got: Int64) -> float:
    got = got[got >= 0]
    return len(np.intersect1d(expected, got)) / max(len(expected), len(got), 1)


def _sharded_overlap(expected: Int64, expected_keys: Float32, got: Int64, got_keys: Float32, tolerance: float) -> float:
    """The share of the expected items that came with at least their key, or are missing from a full answer of items at least as good."""
    if not len(expected):
        return 1.0
    least = expected_keys.astype(np.float64)
    least -= tolerance * _scale(least)
    is_full = len(got[got >= 0]) >= len(expected)
    displaced = least <= (float(got_keys[got >= 0].min()) if is_full else -np.inf)
    _, positions, got_positions = np.intersect1d(expected, got, return_indices=True)
    retrieved = np.zeros(len(expected), np.bool_)
    retrieved[positions] = got_keys[got_positions] >= least[positions]
    return float(np.mean(retrieved | displaced))
