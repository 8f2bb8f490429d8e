"""Results of several calls as one, a part of one, and which levels a trace has.

Legend: B queries, M results, K beam.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.engines.stages import Frontier, ParentsFound, ShardResult
from espalier.search import NO_ITEM, Coverage, LevelTrace, SearchResult
from espalier.tree import Tree

Array = NDArray[Any]


OF_ITEMS = {"item_rows_BM": NO_ITEM, "scores_BM": 0, "ranks_BM": -np.inf, "keys_BM": -np.inf}
"""The arrays [B, M] of a result, and their padding."""


def joined(results: Sequence[SearchResult]) -> SearchResult:
    """The results of some queries, then of others, of one search, without traces; padded to the widest."""
    if len(results) == 1:
        return results[0]
    finite = [result.finite_B for result in results if result.finite_B is not None]
    arrays: dict[str, Any] = {name: _stacked([getattr(one, name) for one in results], padding) for name, padding in OF_ITEMS.items()}
    result = SearchResult(
        **arrays,
        count_B=np.concatenate([result.count_B for result in results]),
        complete_B=np.concatenate([result.complete_B for result in results]),
        finite_B=np.concatenate(finite) if finite else None,
        coverage=Coverage.joined([result.coverage for result in results]),
    )
    beams = [result.frontiers for result in results if isinstance(result, ShardResult)]
    return result if len(beams) < len(results) else ShardResult.of(result, joined_frontiers(beams))


def joined_parents(parts: Sequence[ParentsFound]) -> ParentsFound:
    """Where some queries led to, then others."""
    if len(parts) == 1:
        return parts[0]
    states = [part.leaf_states_BS for part in parts if part.leaf_states_BS is not None]
    frontiers = joined_frontiers([part.frontiers for part in parts])
    return ParentsFound(joined([part.result for part in parts]), frontiers, np.concatenate(states) if states else None)


def between(result: SearchResult, begin: int, end: int, m: int) -> SearchResult:
    """The best m of consecutive queries, without traces."""
    arrays: dict[str, Any] = {name: getattr(result, name)[begin:end, :m] for name in OF_ITEMS}
    part = SearchResult(
        **arrays,
        count_B=result.count_B[begin:end],
        complete_B=result.complete_B[begin:end],
        finite_B=None if result.finite_B is None else result.finite_B[begin:end],
        coverage=result.coverage and replace(result.coverage, answered_BS=result.coverage.answered_BS[begin:end]),
    )
    if not isinstance(result, ShardResult):
        return part
    beams = (Frontier(frontier.nodes_BK[begin:end], frontier.ranks_BK[begin:end]) for frontier in result.frontiers)
    return ShardResult.of(part, tuple(map(_narrowed, beams)))


def joined_frontiers(parts: Sequence[tuple[Frontier, ...]]) -> tuple[Frontier, ...]:
    """The beams of some queries, then of others, in each tree."""
    return tuple(
        Frontier(_stacked([frontier.nodes_BK for frontier in own], NO_ITEM), _stacked([frontier.ranks_BK for frontier in own], -np.inf))
        for own in zip(*parts, strict=True)
    )


def _narrowed(frontier: Frontier) -> Frontier:
    """Without the padding that none of its queries needs."""
    width = max(1, int(np.count_nonzero(frontier.nodes_BK >= 0, axis=1).max(initial=0)))
    return Frontier(frontier.nodes_BK[:, :width], frontier.ranks_BK[:, :width])


def _stacked(arrays: Sequence[Array], filler: float) -> Array:
    """Rows of some arrays, one below the other."""
    width = max(array.shape[1] for array in arrays)
    if all(array.shape[1] == width for array in arrays):
        return np.concatenate(arrays)
    stacked = np.full((sum(map(len, arrays)), width), filler, arrays[0].dtype)
    begin = 0
    for array in arrays:
        stacked[begin : begin + len(array), : array.shape[1]] = array
        begin += len(array)
    return stacked


def from_start_level(tree: Tree, beam_size_B: NDArray[np.int64], levels: Sequence[LevelTrace]) -> tuple[LevelTrace, ...]:
    """The levels of a trace, the same on every engine: from each query's start level to H. A level above a query's is empty for it."""
    start_B = tree.start_levels(beam_size_B)
    return tuple(_without(level, start_B > level.level) for level in levels if np.any(start_B <= level.level))


def _without(level: LevelTrace, above_B: NDArray[np.bool_]) -> LevelTrace:
    if not above_B.any():
        return level
    emptied = {}
    for name in ("nodes_BK", "ranks_BK", "keys_BK", "candidates_BC", "candidate_ranks_BC", "candidate_keys_BC"):
        array = getattr(level, name)
        emptied[name] = np.where(above_B[:, None], array.dtype.type(NO_ITEM if array.dtype == np.int64 else -np.inf), array)
    return replace(level, **emptied)
