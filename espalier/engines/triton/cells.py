"""A cell: the fixed buffers for one shape of call on a GPU, and one CUDA graph of the kernel launches over them.

Knows masks, excluded nodes, beams, the selection on each level, the frontier and the order of the results. Does not know what a query is or
how candidates are scored: the subclasses in `graph_engine.py` and `linear_engine.py` do.

Legend: B queries, K beam, C candidates, M results, X excluded nodes, N nodes, L levels, S state.
"""

from __future__ import annotations

import gc
import math
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from espalier.engines.stages import TreeQuery
from espalier.engines.triton.kernels.select import count_kernel, select_kernel
from espalier.masks.eligibility import NO_NODE, ExcludedNodes
from espalier.search import NO_ITEM, Frontier, LevelTrace
from espalier.tree import Tree

MOST_CHOSEN = 128
"""Most candidates from which a scoring kernel chooses the beam itself: with more it runs out of registers."""
FEW = 1023
"""Most candidates for which a selection finds two bits of its threshold in each step."""
_CAPTURE = threading.Lock()
"""One capture at a time in a process: two would invalidate each other."""
Entries = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Arrays of a buffer by name: their shapes and types."""
State = TypeVar("State")
"""The encoded queries: query states, or None where a cell reads features."""


@dataclass(frozen=True)
class Tuning:
    """Sizes that change the speed of a search. Answers stay the same; `tile` may change their last digits.

    chosen_candidates     `triton`: up to so many queries · candidates, each program of the next level's kernel chooses the beam itself;
                          never from more than MOST_CHOSEN candidates
    level_kernel_queries  `triton`: up to so many queries in a call, every level is a kernel. More queries fill a GPU: then one program
                          searches each query
    counted_pairs         up to so many queries · candidates², selections count in parallel; above, one program selects for each query
    count_tile            candidates of a counting program; busy_count_tile: the same for calls of more than level_kernel_queries
    dependent_queries     up to so many queries, a kernel starts while the one before it ends. More queries fill the GPU, and early programs
                          are in the way
    register_candidates   candidates that a selection keeps in registers; more are read again in each pass
    warps                 of a scoring program. `sparse-cuda` uses one for calls of more than level_kernel_queries
    tile                  `triton`: candidates that one program scores at a time; None: `TritonSearch.tile` chooses
    registers             `triton`: most registers of a scoring thread, so that more programs have room; None: the compiler chooses
    candidates_per_warp   of a selection
    busy_tiles            `triton`: from so many tiles of a level on, one program scores several, up to tiles_per_program

    Raises ValueError for sizes that would change more than the speed.
    """

    tile: int | None = None
    registers: int | None = None
    candidates_per_warp: int = 512
    busy_tiles: int = 2048
    tiles_per_program: int = 8
    chosen_candidates: int = 1024
    counted_pairs: int = 1 << 24
    level_kernel_queries: int = 64
    count_tile: int = 16
    busy_count_tile: int = 64
    dependent_queries: int = 64
    register_candidates: int = 1 << 14
    warps: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.register_candidates <= 1 << 15:
            raise ValueError(f"register_candidates {self.register_candidates}: expected 1 to {1 << 15}")


@dataclass(frozen=True)
class FixedShapes:
    """The sizes of cells. A call is padded up to the next batch size and m; a call of more queries than the largest batch is split.

    excluded  most excluded nodes of a query that are passed as a list. A query with more gets a mask instead
    """

    batches: tuple[int, ...] = (1, 8, 64, 512)
    m_sizes: tuple[int, ...] = (64, 256, 1024, 4096, 16384, 65536)
    excluded: int = 1024


class CellVariant(NamedTuple):
    """How a cell's launches differ from those of a plain search.

    frontier  they also return the beam above the leaves
    states    their inputs are query states, so nothing is encoded
    """

    frontier: bool
    states: bool


PLAIN = CellVariant(frontier=False, states=False)


class CellResults(NamedTuple):
    """The results of a cell's queries: item rows, ranks and keys; whether all logits that were checked are finite; and on request the
    trace, and the frontier with the states of the leaf level.
    """

    rows_BM: NDArray[np.int64]
    ranks_BM: NDArray[np.float32]
    keys_BM: NDArray[np.float32]
    finite_B: NDArray[np.bool_]
    trace: tuple[LevelTrace, ...]
    frontier: Frontier | None
    leaf_states_BS: NDArray[np.float32]


class Tables:
    """The tree's arrays on the device, in 32 bits. Arrays that arithmetic can replace are left out."""

    def __init__(self, tree: Tree, device: torch.device, histories: bool) -> None:
        def on_device(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array.astype(np.int32)).to(device)

        empty = np.zeros(1, np.int32)
        self.first_child = on_device(tree.first_child if is_ragged(tree) else empty)
        self.parent = on_device(tree.parent if is_ragged(tree) and histories else empty)
        self.leaf_of_item = on_device(tree.leaf_of_item if histories else empty)
        self.leaf_item = on_device(tree.leaf_item)
        uniform = [tree.max_children[h] if tree.is_uniform(h) else 0 for h in range(tree.height)] + [0]
        self.levels = on_device(np.stack([tree.level_offset[:-1], np.array(uniform)], 1))


def is_ragged(tree: Tree) -> bool:
    """Whether some level's nodes have different numbers of children."""
    return not all(tree.is_uniform(h) for h in range(tree.height))


@dataclass(frozen=True, eq=False)
class CellContext:
    """What all cells of a tree share.

    memory_weight  λ; None: the bundle has no memory, and kernels are compiled without one
    pool           CUDA graphs take the memory between their launches from it; None: no CUDA graphs
    """

    tree: Tree
    gamma: float
    memory_weight: float | None
    device: torch.device
    shapes: FixedShapes
    tuning: Tuning
    tables: Tables
    pool: Any

    def launch_options(self, batch: int) -> dict[str, bool]:
        """Keyword arguments of every launch, besides those of the kernel itself: see `kernels.dependency`."""
        is_hopper = self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) >= (9, 0)
        return {"DEPENDENT": True, "launch_pdl": True} if is_hopper and batch <= self.tuning.dependent_queries else {"DEPENDENT": False}


@dataclass
class ExcludedLists:
    """Each query's excluded nodes in a tree of `nodes` nodes, ascending.

    nodes_BX  int64[B, X], large numbers as padding · count_B  int64[B]
    """

    nodes_BX: NDArray[np.int64]
    count_B: NDArray[np.int64]

    def of_query(self, b: int) -> NDArray[np.int64]:
        nodes: NDArray[np.int64] = self.nodes_BX[b, : self.count_B[b]]
        return nodes

    @staticmethod
    def of(excluded: ExcludedNodes | None, batch: int, nodes: int) -> ExcludedLists:
        if excluded is None:
            return ExcludedLists(np.empty((batch, 0), np.int64), np.zeros(batch, np.int64))
        both_BX = np.concatenate([excluded.inner_BX, excluded.leaves_BX], axis=1)
        return ExcludedLists(np.sort(np.where(both_BX == NO_NODE, nodes, both_BX), axis=1), np.count_nonzero(both_BX != NO_NODE, axis=1))


class Beam:
    """Nodes int32[B, width], their ranks float32[B, width], and the keys float32[B, width] that order them. Not yet initialised.

    memory  whether keys differ from ranks; without a memory they are one array
    """

    def __init__(self, batch: int, width: int, device: torch.device, memory: bool) -> None:
        self.nodes = torch.empty((batch, width), dtype=torch.int32, device=device)
        self.ranks = torch.empty((batch, width), dtype=torch.float32, device=device)
        self.keys = torch.empty_like(self.ranks) if memory else self.ranks

    def of_first(self, width: int) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.float32]]:
        """The first `width` of the first query, on the host."""
        nodes, ranks, keys = (array[:1, :width].cpu().numpy() for array in (self.nodes, self.ranks, self.keys))
        return nodes.astype(np.int64), ranks.copy(), keys.copy()


def inner_slots(tree: Tree, bucket: int) -> tuple[int, list[int]]:
    """The level that a cell's search starts with, and the number of nodes kept on each level from the one above it (all nodes) to H − 1."""
    start = tree.start_level(1 << bucket)
    slots = [tree.level_size(start - 1)]
    for level in range(start, tree.height):
        slots.append(min((2 << bucket) - 1, slots[-1] * tree.max_children[level - 1]))
    return start, slots


class Cell(ABC, Generic[State]):
    """One batch size, beam bucket and m: static buffers, the launches over them, and on a GPU their CUDA graph.

    Memory between the launches comes from a pool that all cells of an engine share, since they run one after another.

    batch          most queries of a call
    m              most results of a query, best first. 0: every leaf that is scored, in no order, with NO_ITEM for leaves that are not
                   eligible
    start          the level that the search starts with
    slots          nodes kept on each level, from the one above the start (all of its nodes) to the leaves
    inputs         on the device: the queries' numbers, and the arrays that `entries` names
    finite         float32[batch] on the device: 0 where some scored node has a logit that is not finite, else 1; written by kernels that
                   check logits
    state_width    S, of a frontier's states; 0: there are none
    """

    def __init__(
        self, context: CellContext, batch: int, bucket: int, m: int, variant: CellVariant, entries: Entries, state_width: int = 0
    ) -> None:
        self.context, self.batch, self._variant, self.launch_options = context, batch, variant, context.launch_options(batch)
        tree, device = context.tree, context.device
        self.memory = context.memory_weight is not None
        self.start, inner = inner_slots(tree, bucket)
        max_leaves = inner[-1] * tree.max_children[-1]
        self._every_leaf = m == 0
        self.slots = [*inner, min(m or max_leaves, max_leaves)]
        self._result_width = result_width = m or max_leaves
        self.stride = max(self.slots)
        max_children = tree.max_children[self.start - 1 :]
        self.max_candidates = max(slots * children for slots, children in zip(self.slots, max_children, strict=False))

        pinned = device.type == "cuda"
        entries = {
            "masks": ((batch,), torch.int64),
            "beam_size": ((batch,), torch.int32),
            "m": ((batch,), torch.int32),
            "excluded_from": ((batch,), torch.int32),
            "excluded_count": ((batch,), torch.int32),
            **({"memory": ((batch, 3), torch.int64)} if self.memory else {}),
            **entries,
        }
        size = sum(_padded_bytes(*entry) for entry in entries.values())
        self._host_bytes = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self._input_bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self.host, self.inputs = _views(self._host_bytes, entries), _views(self._input_bytes, entries)
        self._host_excluded = torch.zeros(batch * context.shapes.excluded, dtype=torch.int32, pin_memory=pinned)
        self.excluded = torch.zeros(batch * context.shapes.excluded, dtype=torch.int32, device=device)
        top_level = tree.level(self.start - 1)
        self._start_beam = Beam(batch, self.stride, device, self.memory)
        self._start_beam.nodes[:, : self.slots[0]] = torch.arange(top_level.start, top_level.stop, dtype=torch.int32, device=device)
        self._start_beam.ranks.zero_()
        self._result_rows = torch.full((batch, result_width), NO_ITEM, dtype=torch.int32, device=device)
        self._result_ranks = torch.full((batch, result_width), -torch.inf, dtype=torch.float32, device=device)
        self._result_keys = self._result_ranks.clone() if self.memory else self._result_ranks
        self.finite = torch.ones(batch, dtype=torch.float32, device=device)
        self._host_rows = torch.empty((batch, result_width), dtype=torch.int32, pin_memory=pinned)
        self._host_ranks = torch.empty((batch, result_width), dtype=torch.float32, pin_memory=pinned)
        self._host_keys = torch.empty_like(self._host_ranks, pin_memory=pinned) if self.memory else self._host_ranks
        self._host_finite = torch.ones(batch, dtype=torch.float32, pin_memory=pinned)
        widths = (inner[-1], torch.int32), (inner[-1], torch.float32), (state_width, torch.float32)
        self._frontier = [torch.empty((batch, width if variant.frontier else 0), dtype=dtype, device=device) for width, dtype in widths]
        self._host_frontier = [torch.empty(array.shape, dtype=array.dtype, pin_memory=pinned) for array in self._frontier]
        self.graph: torch.cuda.CUDAGraph | None = None

    chooses = False
    """Whether `score` can choose the beam itself."""

    @abstractmethod
    def fill_queries(self, query: TreeQuery) -> None:
        """Copy a call's queries, or their states, into the buffers: at most `batch` of them."""

    @abstractmethod
    def launch_encoder(self) -> State:
        """Encode the queries."""

    @abstractmethod
    def leaf_states(self, state: State) -> Tensor:
        """float32[batch, state_width]: the states of the leaf level."""

    @abstractmethod
    def begin(self, state: State, beam: Beam) -> None:
        """Write the ranks of the beam above the start, all nodes of their level, if children inherit them."""

    @abstractmethod
    def score(self, level: int, slots: int, beam: Beam, candidates: Beam, state: State, before: int) -> None:
        """Write the children on `level` of the nodes in a beam's first `slots`, with their ranks.

        before  0: the beam is selected. Otherwise, if `chooses`: select it first, from the first `before` nodes in it
        """

    def search_by_program(self, beam: Beam, candidates: Beam, leaves: Beam, state: State) -> bool:
        """Search from the beam above the start to the leaves, one program a query; write the leaves in no order.

        candidates  overwritten
        Returns False, having done nothing, if each level is a kernel.
        """
        return False

    def fill(self, query: TreeQuery, addresses_B: NDArray[np.int64], excluded: ExcludedLists) -> None:
        """Copy a call into the buffers. Rows past its queries get a beam size of 0, so they are not searched.

        addresses_B  of the queries' masks on the device, 0 without a mask
        """
        count, room = len(query), self.context.shapes.excluded
        count_B = np.where(excluded.count_B <= room, excluded.count_B, 0)  # longer lists are part of a mask
        for name, array in (
            ("beam_size", query.beam_size_B),
            ("m", query.m_B),
            ("masks", addresses_B),
            ("excluded_from", np.cumsum(count_B) - count_B),
            ("excluded_count", count_B),
        ):
            self.host[name].numpy()[:count] = array
        for name in ("masks", "beam_size", "m", "excluded_count"):
            self.host[name].numpy()[count:] = 0
        self.fill_queries(query)
        total = int(count_B.sum())
        if total:
            listed_BX = np.arange(excluded.nodes_BX.shape[1]) < count_B[:, None]
            self._host_excluded.numpy()[:total] = excluded.nodes_BX[listed_BX]
            self.excluded[:total].copy_(self._host_excluded[:total], non_blocking=True)

    def fill_memory(self, lists_B3: NDArray[np.int64]) -> None:
        """Copy the addresses of a call's memory lists into the buffers. Rows past its queries get empty lists.

        lists_B3  for each query the address of its nodes (ascending), the address of their mem, and their number
        """
        self.host["memory"].numpy()[: len(lists_B3)] = lists_B3
        self.host["memory"].numpy()[len(lists_B3) :] = 0

    def run(self, count: int, trace: bool) -> CellResults:
        """Run the launches; the results of the first `count` queries. A trace is of a single query, without the CUDA graph."""
        levels: list[LevelTrace] = []
        if self.graph is not None and not trace:
            self.graph.replay()
        else:
            self._launch(levels if trace else None)
        if self.context.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        width = self._result_width if self._every_leaf else int(self.host["m"].numpy()[:count].max())
        rows, ranks, keys = (array.numpy()[:count, :width] for array in (self._host_rows, self._host_ranks, self._host_keys))
        ranks = ranks.copy()
        finite, nodes, node_ranks, states = (array.numpy()[:count] for array in (self._host_finite, *self._host_frontier))
        frontier = Frontier(nodes.astype(np.int64), node_ranks.copy()) if self._variant.frontier else None
        return CellResults(
            rows.astype(np.int64), ranks, keys.copy() if self.memory else ranks, finite > 0, tuple(levels), frontier, states.copy()
        )

    def capture(self) -> None:
        """Record the launches, in the engine's stream. Meanwhile other threads may use the GPU, but not capture."""
        self._launch()  # compiles the kernels, which a capture cannot
        self.graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        with _CAPTURE:
            gc.disable()  # the end of another engine's graphs would end the capture
            try:
                self.graph.capture_begin(pool=self.context.pool, capture_error_mode="thread_local")
                try:
                    self._launch()
                finally:
                    self.graph.capture_end()
            finally:
                if collecting:
                    gc.enable()
        self.graph.replay()  # the first one of a graph takes longer

    def _launch(self, trace: list[LevelTrace] | None = None) -> None:
        self._input_bytes.copy_(self._host_bytes, non_blocking=True)
        self.finite.fill_(1)
        self.launch_search(self.launch_encoder(), trace)
        self._host_rows.copy_(self._result_rows, non_blocking=True)
        self._host_ranks.copy_(self._result_ranks, non_blocking=True)
        if self.memory:
            self._host_keys.copy_(self._result_keys, non_blocking=True)
        self._host_finite.copy_(self.finite, non_blocking=True)
        for host, array in zip(self._host_frontier, self._frontier, strict=True):
            if self._variant.frontier:
                host.copy_(array, non_blocking=True)

    def launch_search(self, state: State, trace: list[LevelTrace] | None = None) -> None:
        """Search from the start level to the leaves and order the results. trace: the levels of the first query are appended to it."""
        tree, device, tuning = self.context.tree, self.context.device, self.context.tuning
        beam, free_beams = self._start_beam, [Beam(self.batch, self.stride, device, self.memory) for _ in range(2)]
        candidates, spare = (Beam(self.batch, self.max_candidates, device, self.memory) for _ in range(2))
        # A selection leaves ties in the order of its candidates, so once one has changed that order, no later one may select.
        in_order = trace is not None or self._variant.frontier or self.batch * self.max_candidates**2 > tuning.counted_pairs
        before = 0
        self.begin(state, beam)
        if trace is None and self.search_by_program(beam, candidates, free_beams[0], state):
            self._count(free_beams[0], self.slots[-1], free_beams[0], self.slots[-1], True)
            return
        for i, level in enumerate(range(self.start, tree.height + 1)):
            count = self.slots[i] * tree.max_children[level - 1]
            if level == tree.height and self._variant.frontier:
                self._keep_frontier(beam, state)
            self.score(level, self.slots[i], beam, candidates, state, before)
            before = 0
            if level == tree.height and self._every_leaf:
                self._result_rows.copy_(self._items(candidates.nodes[:, : self._result_width]))
                self._result_ranks.copy_(candidates.ranks[:, : self._result_width])
                if trace is not None:
                    nodes, ranks, keys = candidates.of_first(count)
                    trace.append(LevelTrace(level, nodes, ranks, nodes, ranks, keys, keys))
                return
            slots, last = self.slots[i + 1], level == tree.height
            if self.chooses and not in_order and not last and count <= min(MOST_CHOSEN, tuning.chosen_candidates // self.batch):
                beam, candidates, spare, before = candidates, spare, candidates, count
                continue
            if in_order:
                self._select(candidates, count, free_beams[0], slots, last)
            else:
                self._count(candidates, count, free_beams[0], slots, last)
                if last:
                    return
            beam = free_beams[0]
            free_beams.reverse()
            if trace is not None:
                kept_nodes, kept_ranks, kept_keys = beam.of_first(slots)
                nodes, ranks, keys = candidates.of_first(count)
                trace.append(LevelTrace(level, kept_nodes, kept_ranks, nodes, ranks, kept_keys, keys))
        self._count(beam, self.slots[-1], beam, self.slots[-1], True)

    def _items(self, leaves: Tensor) -> Tensor:
        """Int32, same shape: the item rows of leaves, NO_ITEM where there is none."""
        leaf = (leaves - self.context.tree.leaf_offset).clamp(min=0)
        return self.context.tables.leaf_item[leaf.long()].masked_fill(leaves < 0, NO_ITEM)

    def _keep_frontier(self, beam: Beam, state: State) -> None:
        nodes, ranks, states = self._frontier
        nodes.copy_(beam.nodes[:, : nodes.shape[1]])
        ranks.copy_(beam.ranks[:, : ranks.shape[1]])
        if states.shape[1]:
            states.copy_(self.leaf_states(state))

    def _count(self, candidates: Beam, count: int, beam: Beam, slots: int, last: bool) -> None:
        """Write the best candidates, best first: into the beam, or the items of leaves into the results."""
        tables, tree, tuning = self.context.tables, self.context.tree, self.context.tuning
        nodes, ranks, keys = (self._result_rows, self._result_ranks, self._result_keys) if last else (beam.nodes, beam.ranks, beam.keys)
        width = min(triton.next_power_of_2(count), 1024)
        tile = tuning.count_tile if self.batch <= tuning.level_kernel_queries else tuning.busy_count_tile
        count_kernel[(triton.cdiv(count, tile), self.batch)](
            candidates.nodes, candidates.ranks, candidates.keys, candidates.nodes.shape[1], count,
            self.inputs["m" if last else "beam_size"], nodes, ranks, keys, self._result_width if last else self.stride, slots,
            tables.leaf_item, tree.leaf_offset,
            tile, width, last, self.memory, num_warps=8 if width > 256 else 4, **self.launch_options,
        )  # fmt: skip

    def _select(self, candidates: Beam, count: int, beam: Beam, slots: int, last: bool) -> None:
        """Write the best candidates into a beam, in the order of the candidates."""
        tuning = self.context.tuning
        width = min(triton.next_power_of_2(count), tuning.register_candidates)
        select_kernel[(self.batch,)](
            candidates.nodes, candidates.ranks, candidates.keys, self.max_candidates, count, self.inputs["m" if last else "beam_size"],
            beam.nodes, beam.ranks, beam.keys, self.stride, slots,
            width, count <= width, count <= min(width, FEW), min(triton.next_power_of_2(slots), 1024), self.memory,
            num_warps=min(16, max(1, width // tuning.candidates_per_warp)), **self.launch_options,
        )  # fmt: skip


def _padded_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes that an array takes in a shared buffer (each array begins at a multiple of 16)."""
    return math.ceil(math.prod(shape) * dtype.itemsize / 16) * 16


def _views(buffer: Tensor, entries: Entries) -> dict[str, Tensor]:
    views, start = {}, 0
    for name, (shape, dtype) in entries.items():
        views[name] = buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        start += _padded_bytes(shape, dtype)
    return views
