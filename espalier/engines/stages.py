"""The types that the stages of a search pass on: encoded queries, scored leaves, beams; and how those of several calls are joined.

    ids → encode → search → merge → reorder → fields

`pipeline.py` shows the stages in a row.

Legend: B queries, T trees (of a forest; else 1), M results, K beam, C candidates, L levels, S state, H levels below the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from espalier.arrays import Array, Bool, Float32, Int64
from espalier.masks.eligibility import EligibleNodes
from espalier.memory_lists import MemoryLists
from espalier.queries import QueryBatch
from espalier.search import NO_CONTEXT, Coverage, Frontier, LevelTrace, SearchContext, SearchResult

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


@dataclass(frozen=True)
class GivenQueries(QueryBatch):
    """Queries that another process has encoded.

    states_BLS  float32[B, H + 1 or 1, S], None for linear scorers
    memory      the nodes with memory; the histories are then not read. None: compute them from the histories
    frontier    whether the result has the beams above the leaves
    """

    states_BLS: Float32 | None = None
    memory: MemoryLists | None = None
    frontier: bool = False

    def take(self, rows: Int64) -> GivenQueries:
        """The queries at some positions (int64)."""
        queries = super().take(rows)
        states_BLS = None if self.states_BLS is None else self.states_BLS[rows]
        return GivenQueries(queries.kind, queries.rows, states_BLS, None if self.memory is None else self.memory.take(rows), self.frontier)

    def fits(self, other: QueryBatch) -> bool:
        """See `QueryBatch`: all queries of a batch have a memory, or none has. The answer has beams if any query asks for them."""
        return isinstance(other, GivenQueries) and (self.memory is None) == (other.memory is None)

    def _joined(self, batches: Sequence[GivenQueries]) -> GivenQueries:
        queries = super()._joined(batches)
        states_BLS = None if self.states_BLS is None else np.concatenate([batch.states_BLS for batch in batches])
        lists = [batch.memory for batch in batches if batch.memory is not None]
        memory = MemoryLists.joined(lists) if lists else None
        return GivenQueries(queries.kind, queries.rows, states_BLS, memory, any(batch.frontier for batch in batches))


@dataclass(eq=False, slots=True)
class TreeQuery:
    """Encoded queries, and how to search the trees for them.

    queries      features for linear scorers, item rows where a memory reads histories
    states_BLS   float32[B, H + 1 or 1, S]: a state for each level or one for all, for scorers that are graphs; else None
    encoded_B    bool[B]: which queries have states; a search that `encodes` encodes the others itself. None: all have states
    beam_size_B  int64[B]
    m_B          int64[B]: how many of the best leaves a single tree returns. A tree of a forest returns all leaves that it scores
    eligible_T   the eligible nodes of each tree
    memory       the nodes with memory, None where the bundle has none
    trace        keep each level; the batch is then a single query
    frontier     keep the beam above the leaves
    context      for a search that asks other machines
    """

    queries: QueryBatch
    states_BLS: Float32 | None
    beam_size_B: Int64
    m_B: Int64
    eligible_T: tuple[EligibleNodes, ...]
    memory: MemoryLists | None = None
    trace: bool = False
    frontier: bool = False
    encoded_B: Bool | None = None
    context: SearchContext = NO_CONTEXT

    def __len__(self) -> int:
        return len(self.beam_size_B)

    def leaf_states(self, leaves: Leaves) -> Float32 | None:
        """float32[B, S]: the states on the leaf level, of the search that returned `leaves`; None for linear scorers."""
        if leaves.leaf_states_BS is not None or self.states_BLS is None:
            return leaves.leaf_states_BS
        return self.states_BLS[:, -1]

    def take(self, queries: Int64) -> TreeQuery:
        """The queries at some positions (int64)."""
        return replace(
            self,
            queries=self.queries.take(queries),
            states_BLS=None if self.states_BLS is None else self.states_BLS[queries],
            beam_size_B=self.beam_size_B[queries],
            m_B=self.m_B[queries],
            eligible_T=tuple(eligible.take(queries) for eligible in self.eligible_T),
            memory=None if self.memory is None else self.memory.take(queries),
            encoded_B=None if self.encoded_B is None else self.encoded_B[queries],
        )


class Leaves(NamedTuple):
    """The leaves that trees scored, by item row (NO_ITEM as padding).

    rows_BTM   int64[B, T, M]     of a single tree the best m, best first, of equal keys the lower leaf. Of a forest all leaves that were
                                  scored, in any order; entries from count_BT on are undefined
    ranks_BTM  float32[B, T, M]   −inf where there is no item
    keys_BTM   float32[B, T, M]   the best leaves have the largest keys; without a memory keys are ranks
    count_BT   int64[B, T]
    finite_B   bool[B]: False iff some node that was scored has a logit that is not finite; None: not checked
    traces, frontiers   of each tree, on request
    leaf_states_BS      float32[B, S]: with frontiers, from a search that encodes; else None
    coverage            from a search that asks shards
    """

    rows_BTM: Int64
    ranks_BTM: Float32
    keys_BTM: Float32
    count_BT: Int64
    finite_B: Bool | None = None
    traces: tuple[tuple[LevelTrace, ...], ...] = ()
    frontiers: tuple[Frontier, ...] = ()
    leaf_states_BS: Float32 | None = None
    coverage: Coverage | None = None


class TreeSearch(Protocol):
    """Searches the trees of one bundle. Any number of threads may call it, unless the class says otherwise.

    encodes  whether it encodes queries that come without states
    merges   whether it asks shards and merges their leaves. Of a forest it then returns one list, with the means over the trees
    """

    encodes: bool = False
    merges: bool = False

    @property
    def name(self) -> str:
        """See `Engine`."""
        ...

    @property
    def rounding(self) -> float:
        """See `Engine`."""
        ...

    def search(self, query: TreeQuery) -> Leaves:
        """The leaves of all queries. The pipeline has checked the queries and parameters."""
        ...

    def warm_up(self) -> None:
        """Build what searches need, if the pipeline's first searches do not build it. By default there is nothing to build."""
        return

    def close(self) -> None:
        """See `Engine`. By default nothing needs closing."""
        return


# -- several calls as one, and one cut into parts ----------------------------------------------------------------------------


def joined(results: Sequence[SearchResult]) -> SearchResult:
    """Several results of one search as one, padded to the widest; each trace is of a single query."""
    if len(results) == 1:
        return results[0]
    finite = [result.finite_B for result in results if result.finite_B is not None]
    beams = [result.frontiers for result in results]
    states = [result.leaf_states_BS for result in results if result.leaf_states_BS is not None]
    arrays: dict[str, Any] = {name: stacked([getattr(result, name) for result in results], padding) for name, padding in OF_ITEMS.items()}
    return SearchResult(
        **arrays,
        count_B=np.concatenate([result.count_B for result in results]),
        complete_B=np.concatenate([result.complete_B for result in results]),
        traces=tuple(_joined_levels(of_tree) for of_tree in zip(*(result.traces for result in results), strict=True)),
        finite_B=np.concatenate(finite) if finite else None,
        coverage=Coverage.joined([result.coverage for result in results]),
        frontiers=_joined_frontiers(beams) if all(beams) else (),
        leaf_states_BS=np.concatenate(states) if states else None,
    )


def between(result: SearchResult, begin: int, end: int, m: int) -> SearchResult:
    """The best m results of the queries begin … end − 1, without traces."""
    arrays: dict[str, Any] = {name: getattr(result, name)[begin:end, :m] for name in OF_ITEMS}
    beams = (Frontier(frontier.nodes_BK[begin:end], frontier.ranks_BK[begin:end]) for frontier in result.frontiers)
    return SearchResult(
        **arrays,
        count_B=result.count_B[begin:end],
        complete_B=result.complete_B[begin:end],
        finite_B=None if result.finite_B is None else result.finite_B[begin:end],
        coverage=result.coverage and replace(result.coverage, answered_BS=result.coverage.answered_BS[begin:end]),
        frontiers=tuple(map(_narrowed, beams)),
    )


def _joined_frontiers(beams: Sequence[tuple[Frontier, ...]]) -> tuple[Frontier, ...]:
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
