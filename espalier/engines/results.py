"""Joins results of several calls into one, and cuts one into parts.

Legend: B queries, M results, K beam, C candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.engines.stages import Frontier, ParentsFound, ShardResult
from espalier.search import Coverage, LevelTrace, SearchResult

Array = NDArray[Any]


NO_ROW, NO_RANK = np.int64(-1), np.float32(-np.inf)
"""Padding of item rows and nodes, of ranks and keys."""
OF_ITEMS: dict[str, np.generic] = {"item_rows_BM": NO_ROW, "scores_BM": np.float32(0), "ranks_BM": NO_RANK, "keys_BM": NO_RANK}
"""The arrays [B, M] of a result, and their padding."""
OF_LEVELS: dict[str, np.generic] = {
    "nodes_BK": NO_ROW,
    "ranks_BK": NO_RANK,
    "keys_BK": NO_RANK,
    "candidates_BC": NO_ROW,
    "candidate_ranks_BC": NO_RANK,
    "candidate_keys_BC": NO_RANK,
}
"""The arrays of a trace's level, and their padding."""
_NODES, _NUMBERS = np.empty((1, 0), np.int64), np.empty((1, 0), np.float32)
NO_LEVEL = LevelTrace(0, _NODES, _NUMBERS, _NODES, _NUMBERS, _NUMBERS, _NUMBERS)
"""The trace of a level that a query's search skipped, above its start level."""


def joined(results: Sequence[SearchResult]) -> SearchResult:
    """Several results of one search as one, padded to the widest; each trace is of a single query."""
    if len(results) == 1:
        return results[0]
    finite = [result.finite_B for result in results if result.finite_B is not None]
    arrays: dict[str, Any] = {name: stacked([getattr(result, name) for result in results], padding) for name, padding in OF_ITEMS.items()}
    result = SearchResult(
        **arrays,
        count_B=np.concatenate([result.count_B for result in results]),
        complete_B=np.concatenate([result.complete_B for result in results]),
        traces=tuple(_joined_levels(of_tree) for of_tree in zip(*(result.traces for result in results), strict=True)),
        finite_B=np.concatenate(finite) if finite else None,
        coverage=Coverage.joined([result.coverage for result in results]),
    )
    beams = [result.frontiers for result in results if isinstance(result, ShardResult)]
    return result if len(beams) < len(results) else ShardResult.of(result, joined_frontiers(beams))


def joined_parents(answers: Sequence[ParentsFound]) -> ParentsFound:
    """Several `ParentsFound` as one."""
    if len(answers) == 1:
        return answers[0]
    states = [answer.leaf_states_BS for answer in answers if answer.leaf_states_BS is not None]
    frontiers = joined_frontiers([answer.frontiers for answer in answers])
    return ParentsFound(joined([answer.result for answer in answers]), frontiers, np.concatenate(states) if states else None)


def between(result: SearchResult, begin: int, end: int, m: int) -> SearchResult:
    """The best m results of the queries begin … end − 1, without traces."""
    arrays: dict[str, Any] = {name: getattr(result, name)[begin:end, :m] for name in OF_ITEMS}
    rows = SearchResult(
        **arrays,
        count_B=result.count_B[begin:end],
        complete_B=result.complete_B[begin:end],
        finite_B=None if result.finite_B is None else result.finite_B[begin:end],
        coverage=result.coverage and replace(result.coverage, answered_BS=result.coverage.answered_BS[begin:end]),
    )
    if not isinstance(result, ShardResult):
        return rows
    beams = (Frontier(frontier.nodes_BK[begin:end], frontier.ranks_BK[begin:end]) for frontier in result.frontiers)
    return ShardResult.of(rows, tuple(map(_narrowed, beams)))


def joined_frontiers(beams: Sequence[tuple[Frontier, ...]]) -> tuple[Frontier, ...]:
    """Several batches' beams in each tree as one batch's."""
    return tuple(
        Frontier(stacked([beam.nodes_BK for beam in of_tree], NO_ROW), stacked([beam.ranks_BK for beam in of_tree], NO_RANK))
        for of_tree in zip(*beams, strict=True)
    )


def _joined_levels(traces: Sequence[tuple[LevelTrace, ...]]) -> tuple[LevelTrace, ...]:
    """The traces of single queries in one tree as one; each may start on another level."""
    numbers = sorted({level.level for trace in traces for level in trace})
    by_number = [{level.level: level for level in trace} for trace in traces]
    return tuple(stacked_levels(number, [levels.get(number, NO_LEVEL) for levels in by_number]) for number in numbers)


def stacked_levels(number: int, levels: Sequence[LevelTrace]) -> LevelTrace:
    """Several queries' traces of a level as one."""
    arrays = {name: stacked([getattr(level, name) for level in levels], padding) for name, padding in OF_LEVELS.items()}
    return LevelTrace(number, **arrays)


def _narrowed(frontier: Frontier) -> Frontier:
    """A frontier without columns that are padding for every query."""
    width = max(1, int(np.count_nonzero(frontier.nodes_BK >= 0, axis=1).max(initial=0)))
    return Frontier(frontier.nodes_BK[:, :width], frontier.ranks_BK[:, :width])


def stacked(arrays: Sequence[Array], padding: np.generic) -> Array:
    """Rows of some arrays, one below the other, padded to the widest."""
    rows = np.full((sum(map(len, arrays)), max((array.shape[1] for array in arrays), default=0)), padding)
    begin = 0
    for array in arrays:
        rows[begin : begin + len(array), : array.shape[1]] = array
        begin += len(array)
    return rows
