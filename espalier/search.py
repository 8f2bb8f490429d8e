"""The types of a search: its parameters, its result and the Engine protocol.

- Beam size, m, mask and exclusions belong to a query, not to an engine. A query gets the same answer in any batch.
- The beam size governs levels 1 … H − 1. The last level keeps the best m eligible candidates; m may exceed the beam size.
- The search starts on the first level with more nodes than the beam. With γ > 0 the levels above are scored first, for their ranks.
- A node is a candidate if an eligible item lies below it. So with a beam of at least m the answer holds min(m, eligible) items;
  `complete` says whether it does.
- Beams are cut and leaves ordered by key. Of equal keys the lower node number wins, on every engine.
- Every engine equals the reference exactly where weights are integers (tests/espalier/test_signature.py).

`espalier.engines` opens an engine.

Legend: B queries, E excluded items, M results, K beam, C candidates, N nodes, L levels, S state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol, get_args

import numpy as np

from espalier.arrays import Bool, Float32, Float64, Int64
from espalier.errors import InvalidInput, InvalidQuery
from espalier.queries import QueryBatch

Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["float32", "float16", "bfloat16"]
NO_ITEM = -1
"""Padding in `item_rows_BM` and `exclude_BE`."""


def padded(lists: Sequence[Int64], width: int | None = None) -> Int64:
    """int64[B, E = width]: lists of item rows, NO_ITEM behind each. None: as wide as the longest, at least 1."""
    rows_BE = np.full((len(lists), width or max(1, *map(len, lists))), NO_ITEM, np.int64)
    for row_E, rows in zip(rows_BE, lists, strict=True):
        row_E[: len(rows)] = rows
    return rows_BE


def check_device(device: str) -> None:
    """Raises InvalidInput for anything but a Device."""
    if device not in get_args(Device):
        raise InvalidInput("device", device, '"auto", "cpu" or "cuda"')


@dataclass(frozen=True, eq=False)
class NodeMask:
    """The nodes of a tree that a filter leaves eligible; see `espalier.masks.eligibility.node_mask`. Compared and hashed by identity.

    eligible_N  bool[N]   True where an eligible item lies below the node, a leaf's own item included
    items   number of eligible items
    others  the masks of a forest's second tree, third tree, …
    live_R  bool[R]: which live items pass, by handle (espalier.live.overlay). Items with later handles do not pass. `eligible_N` and
            `items` then count live items, too. None: the query sees only the bundle, also in its history
    at      overlay (espalier.live.overlay.Overlay) → the mask of that snapshot of the live catalogue, None if it is this mask.
            None: the mask is the same for all snapshots
    """

    eligible_N: Bool
    items: int
    others: tuple[NodeMask, ...] = ()
    live_R: Bool | None = None
    at: Callable[[Any], NodeMask | None] | None = None

    def of_tree(self, tree_index: int) -> NodeMask:
        """The mask of a forest's tree (from 0). Raises InvalidQuery if the mask is for fewer trees."""
        if tree_index > len(self.others):
            raise InvalidQuery(
                "mask_B", f"a mask of {1 + len(self.others)} trees", f"a mask of at least {1 + tree_index}, as the forest has"
            )
        return self if tree_index == 0 else self.others[tree_index - 1]

    @cached_property
    def every_tree_N(self) -> Bool:
        """bool: `eligible_N` of all trees, one after the other."""
        return np.concatenate([self.eligible_N, *(mask.eligible_N for mask in self.others)]) if self.others else self.eligible_N

    @property
    def nbytes(self) -> int:
        mask_bytes = int(self.eligible_N.nbytes) + sum(mask.nbytes for mask in self.others)
        return 2 * mask_bytes if self.others else mask_bytes


@dataclass(frozen=True)
class SearchParams:
    """Per-query knobs of one `search()` call.

    beam_size_B   int64[B], ≥ 1   nodes kept on the levels 1 … H − 1
    m_B           int64[B], ≥ 1   results wanted; may exceed the beam size
    exclude_BE    int64[B, E] or None   item rows that must not come back, NO_ITEM as padding; repeats are allowed
    trace         keep the candidates and the beams of each level in the result
    mask_B        None, or each query's NodeMask (None: all items are eligible); queries with the same filter should share one object
    """

    beam_size_B: Int64
    m_B: Int64
    exclude_BE: Int64 | None = None
    trace: bool = False
    mask_B: tuple[NodeMask | None, ...] | None = None

    @staticmethod
    def uniform(
        batch: int, beam_size: int, m: int, exclude_BE: Int64 | None = None, trace: bool = False, mask: NodeMask | None = None
    ) -> SearchParams:
        """The same beam size, m and mask for every query."""
        mask_B = None if mask is None else (mask,) * batch
        return SearchParams(np.full(batch, beam_size, np.int64), np.full(batch, m, np.int64), exclude_BE, trace, mask_B)

    @property
    def largest_beam(self) -> int:
        """The most nodes that a query keeps on a level; a beam of all eligible items keeps no more."""
        mask_B = self.mask_B or (None,) * len(self.beam_size_B)
        kept = (beam if mask is None else min(beam, mask.items) for beam, mask in zip(self.beam_size_B.tolist(), mask_B, strict=True))
        return max(kept, default=1) or 1

    def take(self, queries: Int64) -> SearchParams:
        """The parameters of the queries at some positions (int64)."""
        return replace(
            self,
            beam_size_B=self.beam_size_B[queries],
            m_B=self.m_B[queries],
            exclude_BE=None if self.exclude_BE is None else self.exclude_BE[queries],
            mask_B=None if self.mask_B is None else tuple(self.mask_B[b] for b in queries.tolist()),
        )

    def check(self, batch: int, items: int, nodes: int | None = None) -> None:
        """Raise InvalidQuery unless the arrays fit `batch` queries over `items` items and a tree of `nodes` nodes (None: any)."""
        for name, array in (("beam_size_B", self.beam_size_B), ("m_B", self.m_B)):
            if array.shape != (batch,) or array.dtype != np.int64:
                raise InvalidQuery(name, f"{array.dtype}{list(array.shape)}", f"int64[{batch}], one per query")
            smallest = (
                int(array[0]) if batch == 1 else int(array.min(initial=1))
            )  # for one query, a reduction takes longer than all other checks
            if smallest < 1:
                raise InvalidQuery(name, smallest, "at least 1")
        exclude = self.exclude_BE
        if exclude is not None:
            if exclude.ndim != 2 or len(exclude) != batch or exclude.dtype != np.int64:
                raise InvalidQuery("exclude_BE", f"{exclude.dtype}{list(exclude.shape)}", f"int64[{batch}, E]")
            if exclude.size and (exclude.min() < NO_ITEM or exclude.max() >= items):
                bad = int(exclude.max() if exclude.max() >= items else exclude.min())
                raise InvalidQuery("exclude_BE", bad, f"item rows from 0 to {items - 1}, or {NO_ITEM} as padding")
        if self.mask_B is not None:
            if len(self.mask_B) != batch:
                raise InvalidQuery("mask_B", f"{len(self.mask_B)} masks", f"{batch}, one per query, or None")
            for mask in {mask for mask in self.mask_B if mask is not None}:
                eligible_N = mask.eligible_N
                if eligible_N.dtype != np.bool_ or eligible_N.ndim != 1 or nodes not in (None, len(eligible_N)):
                    raise InvalidQuery("mask_B", f"{eligible_N.dtype}{list(eligible_N.shape)}", f"bool[{'N' if nodes is None else nodes}]")


@dataclass(frozen=True)
class SearchContext:
    """Deadline and tracing for an engine that asks other machines. Other engines ignore it.

    deadline   time.perf_counter() at which the engine returns, with only the shards that have answered; None: wait for all shards
    origin     header names and values of the first request in the call: X-Request-Id, traceparent
    for_write  whether writes wait for this search, which has no deadline: shards get less time than for others without one
    """

    deadline: float | None = None
    origin: tuple[tuple[str, str], ...] = ()
    for_write: bool = False


NO_CONTEXT = SearchContext()


@dataclass(frozen=True)
class LevelTrace:
    """The candidates and the beam of one level, for every query of the call.

    A trace has a query's levels from its start level (`Tree.start_level`) to H, even if the engine scored more levels. In a call with
    several beam sizes, a level above a query's start level is empty for that query.

    level               h
    nodes_BK            int64[B, K]     the beam, ascending, −1 as padding; on level H the best m leaves
    ranks_BK            float32[B, K]   their ranks, −inf as padding
    candidates_BC       int64[B, C]     the candidates, −1 as padding and for nodes without an eligible item below
    candidate_ranks_BC  float32[B, C]   their ranks, −inf where the node is −1
    keys_BK             float32[B, K]   the keys of the beam; without a memory equal to the ranks
    candidate_keys_BC   float32[B, C]   the keys of the candidates
    """

    level: int
    nodes_BK: Int64
    ranks_BK: Float32
    candidates_BC: Int64
    candidate_ranks_BC: Float32
    keys_BK: Float32
    candidate_keys_BC: Float32


@dataclass(frozen=True, eq=False)
class Frontier:
    """The beam of a tree on the level above the leaves: the nodes whose children were scored. In a tree of height 1, the root.

    If no level above the leaves needs pruning, the beam may hold all nodes of that level, eligible or not. With γ = 0 leaves do not depend
    on these ranks; ranks of a level that was not scored are 0.

    nodes_BK  int64[B, K]     ascending, then −1 as padding
    ranks_BK  float32[B, K]   −inf for padding
    """

    nodes_BK: Int64
    ranks_BK: Float32


@dataclass(frozen=True)
class Coverage:
    """Which shards of a catalogue answered the queries of a call.

    items_S      int64[S]     items of each shard
    answered_BS  bool[B, S]
    """

    items_S: Int64
    answered_BS: Bool

    @property
    def items_B(self) -> Float64:
        """float64[B]: the share of the catalogue's items that the answering shards hold; 1 if all shards answered."""
        return np.asarray(self.answered_BS @ self.items_S / self.items_S.sum(), np.float64)

    @staticmethod
    def joined(coverages: Sequence[Coverage | None]) -> Coverage | None:
        """The coverage of several batches of one search, one batch after the other."""
        sharded = [coverage for coverage in coverages if coverage is not None]
        return Coverage(sharded[0].items_S, np.concatenate([coverage.answered_BS for coverage in sharded])) if sharded else None


@dataclass(frozen=True)
class SearchResult:
    """The answer to one `search()` call.

    item_rows_BM  int64[B, M]     best first, NO_ITEM as padding; M = max of m_B
    scores_BM     float32[B, M]   in [0, 1], 0 where there is no item
    ranks_BM      float32[B, M]   −inf where there is no item
    keys_BM       float32[B, M]   the keys, which order the items; −inf where there is no item; without a memory equal to ranks_BM
    count_B       int64[B]        items in each row
    complete_B    bool[B]         False iff fewer than min(m, eligible items) came back
    traces        for each tree the levels from the smallest start level of the call to H; empty unless requested. On the last level of a
                  forest's tree, the beam has every scored leaf
    finite_B      bool[B]         for vectors: False iff some scored node has a logit that is not finite; None for other kinds
    coverage      which shards answered; None if the engine holds the whole catalogue
    frontiers     of each tree, on request of a router or for the placement of new items
    leaf_states_BS  float32[B, S], for that placement: the queries' states on the leaf level; None for linear scorers
    """

    item_rows_BM: Int64
    scores_BM: Float32
    ranks_BM: Float32
    keys_BM: Float32
    count_B: Int64
    complete_B: Bool
    traces: tuple[tuple[LevelTrace, ...], ...] = ()
    finite_B: Bool | None = None
    coverage: Coverage | None = None
    frontiers: tuple[Frontier, ...] = ()
    leaf_states_BS: Float32 | None = None


def check_finite(queries: QueryBatch, result: SearchResult, first: int = 0) -> None:
    """Raise InvalidQuery if a vector has a score that is not finite, which only the search can tell. first: number of the first query."""
    if result.finite_B is not None and not result.finite_B.all():
        b = int(np.flatnonzero(~result.finite_B)[0])
        largest = float(queries.array[b][np.argmax(np.abs(queries.array[b]))])
        raise InvalidQuery(f"queries[{first + b}].vector", largest, "numbers whose scores are finite")


class Engine(Protocol):
    """Searches one bundle. Holds no search knob: those are arguments of `search()`."""

    @property
    def name(self) -> str:
        """`reference`, `compiled-cpu`, `onnx-cpu`, `onnx-cuda`, `triton`, `sparse-cpu`, `sparse-cuda`: the name in JSON and metrics."""
        ...

    @property
    def rounding(self) -> float:
        """ε: how far a rank may be from exact arithmetic; closer candidates may change places."""
        ...

    def search(self, queries: QueryBatch, params: SearchParams, context: SearchContext = NO_CONTEXT) -> SearchResult:
        """The top m eligible items of each query. The same query gives the same answer in any batch. One search at a time."""
        ...

    def warm_up(self) -> None:
        """Build and run everything that would otherwise delay the first queries. Does nothing by default."""
        return

    def close(self) -> None:
        """Free the engine's memory in small steps, so that other engines of the process are not held up. No search may follow."""
        return
