"""The types that the stages of a search pass on: encoded queries, scored leaves, beams.

    ids → encode → search → merge → reorder → fields

`pipeline.py` shows the stages in a row.

Legend: B queries, T trees (of a forest; else 1), M results, K beam, L levels, S state, H levels below the root.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from espalier.live.overlay import Overlay
from espalier.masks.eligibility import EligibleNodes
from espalier.memory_lists import MemoryLists
from espalier.queries import QueryBatch
from espalier.search import NO_CONTEXT, Coverage, Engine, LevelTrace, SearchContext, SearchParams, SearchResult

Int64 = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class GivenQueries(QueryBatch):
    """Queries that another process has encoded.

    states_BLS  float32[B, H + 1 or 1, S], None for linear scorers
    memory      the nodes with memory; the histories are then not read. None: compute them from the histories
    frontier    whether the answer shall have the beams above the leaves (`ShardResult`)
    """

    states_BLS: Floats | None = None
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
    states_BLS: Floats | None
    beam_size_B: Int64
    m_B: Int64
    eligible_T: tuple[EligibleNodes, ...]
    memory: MemoryLists | None = None
    trace: bool = False
    frontier: bool = False
    encoded_B: NDArray[np.bool_] | None = None
    context: SearchContext = NO_CONTEXT

    def __len__(self) -> int:
        return len(self.beam_size_B)

    def leaf_states(self, leaves: Leaves) -> Floats | None:
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


@dataclass(frozen=True, eq=False)
class Frontier:
    """The beam of a tree on the level above the leaves: the nodes whose children were scored. In a tree of height 1, the root.

    If no level above the leaves needs pruning, the beam may hold all nodes of that level, eligible or not. With γ = 0 leaves do not depend
    on these ranks; ranks of a level that was not scored are 0.

    nodes_BK  int64[B, K]     ascending, then −1 as padding
    ranks_BK  float32[B, K]   −inf for padding
    """

    nodes_BK: Int64
    ranks_BK: Floats


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
    ranks_BTM: Floats
    keys_BTM: Floats
    count_BT: Int64
    finite_B: NDArray[np.bool_] | None = None
    traces: tuple[tuple[LevelTrace, ...], ...] = ()
    frontiers: tuple[Frontier, ...] = ()
    leaf_states_BS: Floats | None = None
    coverage: Coverage | None = None


@dataclass(frozen=True)
class ShardResult(SearchResult):
    """A result with the beams above the leaves of each tree."""

    frontiers: tuple[Frontier, ...] = ()

    @staticmethod
    def of(result: SearchResult, frontiers: tuple[Frontier, ...]) -> ShardResult:
        """A result with these frontiers."""
        return ShardResult(**{field.name: getattr(result, field.name) for field in fields(SearchResult)}, frontiers=frontiers)


@dataclass(frozen=True, eq=False)
class ParentsFound:
    """Where new items belong that match some queries: the beams above the leaves of each tree, and the best trained items under them.

    leaf_states_BS  float32[B, S]: the queries' states on the leaf level; None for linear scorers
    """

    result: SearchResult
    frontiers: tuple[Frontier, ...]
    leaf_states_BS: Floats | None


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


@runtime_checkable
class StagedEngine(Engine, Protocol):
    """An engine whose stages can be called one by one, and that searches live items (espalier.engines.pipeline)."""

    def set_overlay(self, overlay: Overlay | None) -> None:
        """Set the live items for all later calls; None: there are none. Any thread may call it."""
        ...

    def candidates(self, queries: QueryBatch, params: SearchParams, context: SearchContext = NO_CONTEXT) -> SearchResult:
        """The best m items before the reorder stage, if the bundle has one."""
        ...

    def parents(self, queries: QueryBatch, params: SearchParams) -> ParentsFound:
        """The beams above the leaves: new items that match the queries belong there."""
        ...
