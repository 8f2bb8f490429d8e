"""A cell: one shape of call on a GPU, with buffers that stay where they are and one CUDA graph of the launches over them.

Knows masks, excluded nodes, beams, the selection on each level, the frontier and the order of what was found. What a query is and how a
level's candidates are scored, its two kinds know: those of `graph_engine.py` and `linear_engine.py`.

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

from espalier.engines.stages import Frontier, TreeQuery
from espalier.engines.triton.kernels.select import count_kernel, select_kernel
from espalier.masks.eligibility import NO_NODE, ExcludedNodes
from espalier.search import NO_ITEM, LevelTrace
from espalier.tree import Tree

MOST_CHOSEN = 128
"""Candidates of which a kernel that scores can choose a beam without wanting for registers."""
FEW = 1023
"""Candidates of which a selection finds two bits of its threshold at once."""
_CAPTURE = threading.Lock()
"""One capture at a time in a process: two would invalidate each other."""
Entries = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Arrays of a buffer by name: their shapes and types."""
State = TypeVar("State")
"""What a kind of cell makes of its queries before the first level."""


@dataclass(frozen=True)
class Tuning:
    """Sizes that change how fast a search is, and nothing else but, with `tile`, the last digits.

    chosen        of `triton`: most queries · candidates of which the next level's kernel chooses the beam itself, each program for itself;
                  never more than 128 candidates
    alone         of `triton`: most queries of a call whose levels are kernels; of more, which fill a GPU, each is searched by one program
    counted       most queries · candidates² that are selected by counting, in parallel; above, one program a query
    count_tile    candidates of a program that counts; busy_count_tile: where there are more than `alone` queries
    dependent     most queries of which kernels start while the one before them ends: more fill the GPU, and early ones are in the way
    whole         candidates that a selection keeps in registers; more are read again in each pass
    warps         of a program that scores; of `sparse-cuda` one where there are more than `alone` queries
    tile          of `triton`: candidates that one program scores at a time; None: as `TritonSearch.tile` has it
    registers     of `triton`: most of a thread that scores, so that more programs have room; None: as many as the compiler likes
    selecting     candidates that a warp selects from
    busy_tiles    of `triton`: tiles of a level of a call from which on one program scores several, up to tiles_per_program

    Raises ValueError for sizes that would change more than the speed.
    """

    tile: int | None = None
    registers: int | None = None
    selecting: int = 512
    busy_tiles: int = 2048
    tiles_per_program: int = 8
    chosen: int = 1024
    counted: int = 1 << 24
    alone: int = 64
    count_tile: int = 16
    busy_count_tile: int = 64
    dependent: int = 64
    whole: int = 1 << 14
    warps: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.whole <= 1 << 15:
            raise ValueError(f"whole {self.whole}: expected 1 to {1 << 15}")


@dataclass(frozen=True)
class FixedShapes:
    """The sizes of cells: a call is padded up to the next batch and m, and a longer one is cut.

    excluded  most excluded nodes of one query that are passed as a list; with more it gets a mask instead
    """

    batches: tuple[int, ...] = (1, 8, 64, 512)
    m_sizes: tuple[int, ...] = (64, 256, 1024, 4096, 16384, 65536)
    excluded: int = 1024


class CellParts(NamedTuple):
    """What a cell's launches have more or less than those of a plain search, which pays for neither.

    frontier  they bring the beam above the leaves
    states    they take query states in place of queries, and encode nothing
    """

    frontier: bool
    states: bool


PLAIN = CellParts(frontier=False, states=False)


class CellFound(NamedTuple):
    """What a run of a cell brings for each of its queries: item rows, ranks and keys; whether the logits that were looked at are finite;
    the trace, and the frontier with the states of the leaf level, where they were asked for.
    """

    rows_BM: NDArray[np.int64]
    ranks_BM: NDArray[np.float32]
    keys_BM: NDArray[np.float32]
    finite_B: NDArray[np.bool_]
    trace: tuple[LevelTrace, ...]
    frontier: Frontier | None
    leaf_states_BS: NDArray[np.float32]


class Tables:
    """The tree's arrays on the device, in 32 bits; what arithmetic replaces is left out."""

    def __init__(self, tree: Tree, device: torch.device, histories: bool) -> None:
        def on_device(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array.astype(np.int32)).to(device)

        nothing = np.zeros(1, np.int32)
        self.first_child = on_device(tree.first_child if is_ragged(tree) else nothing)
        self.parent = on_device(tree.parent if is_ragged(tree) and histories else nothing)
        self.leaf_of_item = on_device(tree.leaf_of_item if histories else nothing)
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
    pool           of the memory between launches; None: no CUDA graphs
    """

    tree: Tree
    gamma: float
    memory_weight: float | None
    device: torch.device
    shapes: FixedShapes
    tuning: Tuning
    tables: Tables
    pool: Any

    def launched(self, batch: int) -> dict[str, bool]:
        """What every launch of a search is given beside the kernel's own arguments: see `kernels.dependency`."""
        known = self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) >= (9, 0)
        return {"DEPENDENT": True, "launch_pdl": True} if known and batch <= self.tuning.dependent else {"DEPENDENT": False}


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
    """Nodes int32[B, width], their ranks and what they are ordered by, keys, float32[B, width], not yet initialised.

    memory  whether keys are other than ranks; without one they are the same array
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
    """The level that a cell's search begins with, and the nodes that are kept from the one above it (all of its nodes) to H − 1."""
    start = tree.start_level(1 << bucket)
    slots = [tree.level_size(start - 1)]
    for level in range(start, tree.height):
        slots.append(min((2 << bucket) - 1, slots[-1] * tree.max_children[level - 1]))
    return start, slots


class Cell(ABC, Generic[State]):
    """One batch size, beam bucket and m: static buffers, the launches over them, and on a GPU their CUDA graph.

    Memory between the launches comes from a pool that all cells of an engine share, since they run one after another.

    batch, wanted  most queries of a call, most results of a query, best first; 0: every leaf that is scored, in no order, with no result
                   in places of leaves that are not eligible
    start          the level that the search begins with
    slots          nodes kept on each level, from the one above the start (all of its nodes) to the leaves
    inputs         on the device: the queries' numbers, and what `entries` names
    finite         float32[batch] on the device: 1, or 0 where some node that was scored has a logit that is not finite; written by kernels
                   that check logits
    state_width    S, of a frontier's states; 0: there are none
    """

    def __init__(
        self, context: CellContext, batch: int, bucket: int, wanted: int, parts: CellParts, entries: Entries, state_width: int = 0
    ) -> None:
        self.context, self.batch, self._parts, self.launched = context, batch, parts, context.launched(batch)
        tree, device = context.tree, context.device
        self.memory = context.memory_weight is not None
        self.start, inner = inner_slots(tree, bucket)
        most = inner[-1] * tree.max_children[-1]
        self._every_leaf = wanted == 0
        self.slots = [*inner, min(wanted or most, most)]
        self._wanted = wanted = wanted or most
        self.stride = max(self.slots)
        self.candidates = max(slots * children for slots, children in zip(self.slots, tree.max_children[self.start - 1 :], strict=False))

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
        above = tree.level(self.start - 1)
        self._above = Beam(batch, self.stride, device, self.memory)
        self._above.nodes[:, : self.slots[0]] = torch.arange(above.start, above.stop, dtype=torch.int32, device=device)
        self._above.ranks.zero_()
        self._found = torch.full((batch, wanted), NO_ITEM, dtype=torch.int32, device=device)
        self._found_ranks = torch.full((batch, wanted), -torch.inf, dtype=torch.float32, device=device)
        self._found_keys = self._found_ranks.clone() if self.memory else self._found_ranks
        self.finite = torch.ones(batch, dtype=torch.float32, device=device)
        self._rows_back = torch.empty((batch, wanted), dtype=torch.int32, pin_memory=pinned)
        self._ranks_back = torch.empty((batch, wanted), dtype=torch.float32, pin_memory=pinned)
        self._keys_back = torch.empty_like(self._ranks_back, pin_memory=pinned) if self.memory else self._ranks_back
        self._finite_back = torch.ones(batch, dtype=torch.float32, pin_memory=pinned)
        widths = (inner[-1], torch.int32), (inner[-1], torch.float32), (state_width, torch.float32)
        self._frontier = [torch.empty((batch, width if parts.frontier else 0), dtype=dtype, device=device) for width, dtype in widths]
        self._frontier_back = [torch.empty(part.shape, dtype=part.dtype, pin_memory=pinned) for part in self._frontier]
        self.graph: torch.cuda.CUDAGraph | None = None

    chooses = False
    """Whether `score` can choose the beam itself."""

    @abstractmethod
    def fill_queries(self, query: TreeQuery) -> None:
        """Put a call's queries, or their states, into the buffers, no more of them than the cell has room for."""

    @abstractmethod
    def launch_encoder(self) -> State:
        """What the levels are scored from."""

    @abstractmethod
    def leaf_states(self, state: State) -> Tensor:
        """float32[batch, state_width]: the states of the leaf level."""

    @abstractmethod
    def begin(self, state: State, beam: Beam) -> None:
        """The ranks of all nodes of the level above the start, which is the beam, where children inherit them."""

    @abstractmethod
    def score(self, level: int, slots: int, beam: Beam, found: Beam, state: State, before: int) -> None:
        """The children on `level` of the nodes in the first `slots` of a beam, with their ranks.

        before  0, or where `chooses`: the first `before` of the beam are candidates, of which the best are chosen first
        """

    def search_alone(self, beam: Beam, found: Beam, kept: Beam, state: State) -> bool:
        """Search the levels from a beam above the start to the leaves in `kept`, in no order, each query by one program.

        found  the program's candidates, overwritten
        False, and nothing is done, where levels are kernels.
        """
        return False

    def fill(self, query: TreeQuery, addresses_B: NDArray[np.int64], excluded: ExcludedLists) -> None:
        """Put a call into the buffers. Rows past its queries get a beam of 0, which ends their search where it begins.

        addresses_B  of the queries' masks on the device, 0 for those without one
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
        """Put where the lists of a call's queries are into the buffers. Rows past its queries get empty lists.

        lists_B3  the addresses of each query's nodes, ascending, and of their mem; and how many there are
        """
        self.host["memory"].numpy()[: len(lists_B3)] = lists_B3
        self.host["memory"].numpy()[len(lists_B3) :] = 0

    def run(self, count: int, trace: bool) -> CellFound:
        """What the launches find for the first `count` queries. With a trace, of a single query, they go out one by one."""
        levels: list[LevelTrace] = []
        if self.graph is not None and not trace:
            self.graph.replay()
        else:
            self._launch(levels if trace else None)
        if self.context.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        width = self._wanted if self._every_leaf else int(self.host["m"].numpy()[:count].max())
        rows, ranks, keys = (back.numpy()[:count, :width] for back in (self._rows_back, self._ranks_back, self._keys_back))
        ranks = ranks.copy()
        finite, nodes, node_ranks, states = (back.numpy()[:count] for back in (self._finite_back, *self._frontier_back))
        frontier = Frontier(nodes.astype(np.int64), node_ranks.copy()) if self._parts.frontier else None
        return CellFound(
            rows.astype(np.int64), ranks, keys.copy() if self.memory else ranks, finite > 0, tuple(levels), frontier, states.copy()
        )

    def capture(self) -> None:
        """Record the launches, in the engine's stream. Other threads may go on using the GPU, but for capturing themselves."""
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
        self._rows_back.copy_(self._found, non_blocking=True)
        self._ranks_back.copy_(self._found_ranks, non_blocking=True)
        if self.memory:
            self._keys_back.copy_(self._found_keys, non_blocking=True)
        self._finite_back.copy_(self.finite, non_blocking=True)
        for back, part in zip(self._frontier_back, self._frontier, strict=True):
            if self._parts.frontier:
                back.copy_(part, non_blocking=True)

    def launch_search(self, state: State, trace: list[LevelTrace] | None = None) -> None:
        """The levels from the start to the leaves, and the order of what was found. trace: takes the levels of the first query."""
        tree, device = self.context.tree, self.context.device
        beam, free = self._above, [Beam(self.batch, self.stride, device, self.memory) for _ in range(2)]
        found, other = (Beam(self.batch, self.candidates, device, self.memory) for _ in range(2))
        # Of candidates in another order than that of the nodes, none can be selected later: it leaves ties to their order.
        in_order = trace is not None or self._parts.frontier or self.batch * self.candidates**2 > self.context.tuning.counted
        before = 0
        self.begin(state, beam)
        if trace is None and self.search_alone(beam, found, free[0], state):
            self._count(free[0], self.slots[-1], free[0], self.slots[-1], True)
            return
        for place, level in enumerate(range(self.start, tree.height + 1)):
            candidates = self.slots[place] * tree.max_children[level - 1]
            if level == tree.height and self._parts.frontier:
                self._keep_frontier(beam, state)
            self.score(level, self.slots[place], beam, found, state, before)
            before = 0
            if level == tree.height and self._every_leaf:
                self._found.copy_(self._items(found.nodes[:, : self._wanted]))
                self._found_ranks.copy_(found.ranks[:, : self._wanted])
                if trace is not None:
                    nodes, ranks, keys = found.of_first(candidates)
                    trace.append(LevelTrace(level, nodes, ranks, nodes, ranks, keys, keys))
                return
            slots, last = self.slots[place + 1], level == tree.height
            if self.chooses and not in_order and not last and candidates <= min(MOST_CHOSEN, self.context.tuning.chosen // self.batch):
                beam, found, other, before = found, other, found, candidates
                continue
            if in_order:
                self._select(found, candidates, free[0], slots, last)
            else:
                self._count(found, candidates, free[0], slots, last)
                if last:
                    return
            beam = free[0]
            free.reverse()
            if trace is not None:
                kept, kept_ranks, kept_keys = beam.of_first(slots)
                nodes, ranks, keys = found.of_first(candidates)
                trace.append(LevelTrace(level, kept, kept_ranks, nodes, ranks, kept_keys, keys))
        self._count(beam, self.slots[-1], beam, self.slots[-1], True)

    def _items(self, leaves: Tensor) -> Tensor:
        """Int32, same shape: the item rows of leaves, NO_ITEM where there is none."""
        place = (leaves - self.context.tree.leaf_offset).clamp(min=0)
        return self.context.tables.leaf_item[place.long()].masked_fill(leaves < 0, NO_ITEM)

    def _keep_frontier(self, beam: Beam, state: State) -> None:
        nodes, ranks, states = self._frontier
        nodes.copy_(beam.nodes[:, : nodes.shape[1]])
        ranks.copy_(beam.ranks[:, : ranks.shape[1]])
        if states.shape[1]:
            states.copy_(self.leaf_states(state))

    def _count(self, found: Beam, candidates: int, beam: Beam, slots: int, last: bool) -> None:
        """The best of the candidates, best first: into the beam, or the items of leaves into what was found."""
        tables, tree, tuning = self.context.tables, self.context.tree, self.context.tuning
        nodes, ranks, keys = (self._found, self._found_ranks, self._found_keys) if last else (beam.nodes, beam.ranks, beam.keys)
        width = min(triton.next_power_of_2(candidates), 1024)
        tile = tuning.count_tile if self.batch <= tuning.alone else tuning.busy_count_tile
        count_kernel[(triton.cdiv(candidates, tile), self.batch)](
            found.nodes, found.ranks, found.keys, found.nodes.shape[1], candidates, self.inputs["m" if last else "beam_size"],
            nodes, ranks, keys, self._wanted if last else self.stride, slots, tables.leaf_item, tree.leaf_offset,
            tile, width, last, self.memory, num_warps=8 if width > 256 else 4, **self.launched,
        )  # fmt: skip

    def _select(self, found: Beam, candidates: int, beam: Beam, slots: int, last: bool) -> None:
        """The best of the candidates, in their order."""
        tuning = self.context.tuning
        width = min(triton.next_power_of_2(candidates), tuning.whole)
        select_kernel[(self.batch,)](
            found.nodes, found.ranks, found.keys, self.candidates, candidates, self.inputs["m" if last else "beam_size"],
            beam.nodes, beam.ranks, beam.keys, self.stride, slots,
            width, candidates <= width, candidates <= min(width, FEW), min(triton.next_power_of_2(slots), 1024), self.memory,
            num_warps=min(16, max(1, width // tuning.selecting)), **self.launched,
        )  # fmt: skip


def _padded_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes that an array takes in a shared buffer (each array begins at a multiple of 16)."""
    return math.ceil(math.prod(shape) * dtype.itemsize / 16) * 16


def _views(buffer: Tensor, entries: Entries) -> dict[str, Tensor]:
    """The arrays in a buffer, one after the other."""
    views, start = {}, 0
    for name, (shape, dtype) in entries.items():
        views[name] = buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        start += _padded_bytes(shape, dtype)
    return views
