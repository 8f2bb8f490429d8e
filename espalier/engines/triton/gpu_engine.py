"""What the engines with the whole search on a GPU share: queries go to the device, result rows come back, and nothing in between.

A call is cut into groups of queries whose beams fall into one bucket [2^j, 2^(j+1) − 1], and each group is padded to one of a few
batch sizes: such a cell (`cells.py`) has its buffers and its CUDA graph. Few queries or many, it is the same kernels over the same
tiles, so a query's answer does not depend on the batch.

Legend: B queries, M results, K beam, X excluded nodes, N nodes.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from espalier.bundle import Bundle
from espalier.engines.forest import BLOCK, ScoredLeaves, refuse_forest
from espalier.engines.given_states import blank_states, check_queries
from espalier.engines.triton.cells import PLAIN, Cell, CellContext, CellParts, ExcludedLists, FixedShapes, Tables, Tuning, inner_slots
from espalier.engines.triton.device_lists import DeviceMemory
from espalier.errors import DeviceUnavailable, InvalidQuery, UnsupportedGraph
from espalier.frontier import joined, restricted, without_unscored
from espalier.masks.eligibility import EligibleNodes, eligible_nodes, every_item, unrestricted_mask
from espalier.memory_lists import MemoryTree
from espalier.queries import HistoryKind, QueryBatch, VectorKind, blank_queries
from espalier.scores import finish
from espalier.search import NO_ITEM, Frontier, LevelTrace, MemoryLookup, NodeMask, Precision, SearchParams, SearchResult
from espalier.trace import from_start_level

DTYPES: dict[Precision, torch.dtype] = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MAX_NODES = 2**31 - 1
FREEING_PAUSE_S = 1e-3
"""Between two cells that are freed."""
AnyCell = TypeVar("AnyCell", bound=Cell[Any])


def gpu_available() -> bool:
    """Whether torch here can reach an NVIDIA GPU."""
    return bool(torch.cuda.is_available())


class _Found(NamedTuple):
    """What the cells of a call found; keys are None where there is no memory."""

    rows_BM: NDArray[np.int64]
    ranks_BM: NDArray[np.float32]
    keys_BM: NDArray[np.float32] | None
    finite_B: NDArray[np.bool_]
    trace: tuple[LevelTrace, ...]
    frontier: Frontier | None


class GpuEngine(ABC, Generic[AnyCell]):
    """See the module.

    device       "cuda", or "cpu" under Triton's interpreter (TRITON_INTERPRET=1), for tests
    shapes, tuning  sizes of cells and kernels
    cuda_graphs  False: every launch goes out by itself, as compute-sanitizer wants it
    every_leaf   of a forest: its cells bring all leaves that they score (`scored_leaves`), and there is no `search`

    Raises DeviceUnavailable when there is no GPU, UnsupportedGraph for a tree whose nodes 32 bits cannot number.
    """

    name: str
    rounding: float

    def __init__(
        self,
        bundle: Bundle,
        device: Literal["cuda", "cpu"],
        shapes: FixedShapes | None,
        tuning: Tuning | None,
        cuda_graphs: bool,
        every_leaf: bool = False,
    ) -> None:
        refuse_forest(bundle)
        if device == "cuda" and not gpu_available():
            raise DeviceUnavailable(f"{self.name} needs a CUDA device, and torch finds none; install the `gpu` extra on a machine with one")
        tree = bundle.tree
        if tree.node_count > MAX_NODES:
            raise UnsupportedGraph(f"the tree has {tree.node_count} nodes, at most {MAX_NODES} are known")
        self.bundle = bundle
        self.device = torch.device(device)
        self.shapes, self.tuning = shapes or FixedShapes(), tuning or Tuning()
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        self._lock = threading.RLock()
        self._every_item = every_item(tree)
        self._unrestricted = unrestricted_mask(tree)
        self._masks: weakref.WeakKeyDictionary[NodeMask, Tensor] = weakref.WeakKeyDictionary()
        self._cells: dict[tuple[int, int, int, CellParts], AnyCell] = {}
        self._graphs = device == "cuda" and cuda_graphs
        self._memory: DeviceMemory | None = None
        self._memory_tree: MemoryTree | None = None
        self._every_leaf = every_leaf

    @abstractmethod
    def new_cell(self, batch: int, bucket: int, wanted: int, parts: CellParts) -> AnyCell:
        """A cell that is not captured yet."""

    @abstractmethod
    def release(self) -> None:
        """Let go of the scorers on the device; may be called twice."""

    def cell_context(self) -> CellContext:
        """What the cells share. To be called once, in the engine's stream."""
        bundle = self.bundle
        if bundle.memory is not None:
            self._memory, self._memory_tree = DeviceMemory(bundle.memory, self.device), MemoryTree(bundle.memory, bundle.tree)
        memory_weight = None if self._memory is None else self._memory.weight
        tables = Tables(bundle.tree, self.device, isinstance(bundle.manifest.query, HistoryKind))
        pool = torch.cuda.graph_pool_handle() if self._graphs else None
        gamma = bundle.manifest.ranking.gamma
        return CellContext(bundle.tree, gamma, memory_weight, self.device, self.shapes, self.tuning, tables, pool)

    def refuse_without_memory(self, needed: int, of: str) -> None:
        """Raise DeviceUnavailable where a GPU has less than the bytes that are needed free. of: what needs them."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what closed engines had is free too
            refuse_what_does_not_fit(self.bundle, needed, of, *torch.cuda.mem_get_info(self.device))

    @property
    def cell_count(self) -> int:
        """How many cells have been built; warm-up is to build all that a query may need."""
        return len(self._cells)

    def warm_up(self) -> None:
        """Build and capture the cell of every batch size, beam bucket and m up to the model's limits."""
        limits = self.bundle.manifest.search
        for batch in self.shapes.batches:
            queries, states_BLS = blank_queries(self.bundle.manifest.query, batch), blank_states(self.bundle, batch)
            for bucket in range(limits.max_beam_size.bit_length()):
                if self._every_leaf:
                    beam_size = min(1 << bucket, limits.max_beam_size)
                    if batch == self.shapes.batches[0] or batch * self.most_leaves(beam_size) <= BLOCK:
                        self.scored_leaves(queries, SearchParams.uniform(batch, beam_size, 1))
                    continue
                for m in sorted({min(m, limits.max_m) for m in (*self.shapes.m_sizes, limits.max_m)}):
                    params = SearchParams.uniform(batch, min(1 << bucket, limits.max_beam_size), m)
                    self.search(queries, replace(params, states_BLS=states_BLS))

    def prepare(self, params: SearchParams) -> None:
        """Where they bring frontiers or take states, which warm-up leaves out, for calls of every size."""
        parts = CellParts.of(params)
        for members, bucket in self._groups(params):
            for batch in (len(members),) if parts == PLAIN else self.shapes.batches:
                with self.running():
                    self.cell(batch, bucket, self._wanted(params, members), parts)

    def close(self) -> None:
        """Free what is on the device, the cells one by one: a hundred CUDA graphs at once would hold the interpreter."""
        while self._cells:
            with self._lock:
                self._cells.popitem()
            time.sleep(FREEING_PAUSE_S)
        with self._lock:
            self._masks.clear()
            self._memory = None
            self.release()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The engine's own stream, on a GPU: one engine does not wait for another's work. One thread at a time."""
        with self._lock, torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            yield

    def check(self, queries: QueryBatch, params: SearchParams) -> None:
        """Raise InvalidQuery where the queries, or the states that come with them, are not the bundle's."""
        kind = self.bundle.manifest.query
        if queries.kind is not kind and queries.kind != kind:
            raise InvalidQuery("queries", queries.kind, str(kind))
        memory = self._memory_of(params)
        check_queries(self.bundle, queries, params, None if memory is None else memory.item_count)

    def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        """Raises InvalidQuery where the queries or the parameters are not the bundle's."""
        self.check(queries, params)
        eligible = eligible_nodes(self.bundle.tree, params, len(queries), self._unrestricted)
        found = self._run(queries, params, eligible, int(params.m_B.max(initial=0)))
        finite_B = found.finite_B if isinstance(queries.kind, VectorKind) else None
        ranking = self.bundle.manifest.ranking
        result = finish(ranking, params.m_B, eligible.items_B, found.rows_BM, found.ranks_BM, None, finite_B, found.keys_BM)
        result = result if found.frontier is None else replace(result, frontiers=(found.frontier,))
        return replace(result, trace=found.trace) if params.trace else result

    def _memory_of(self, params: SearchParams) -> MemoryLookup | None:
        """The memory that a search asks; None where the bundle has none."""
        return None if self._memory_tree is None else params.memory or self._memory_tree

    def most_leaves(self, beam_size: int) -> int:
        """The most leaves that the cell of a beam scores."""
        tree = self.bundle.tree
        return inner_slots(tree, beam_size.bit_length() - 1)[1][-1] * tree.max_children[-1]

    def scored_leaves(self, queries: QueryBatch, params: SearchParams) -> ScoredLeaves:
        """All leaves that the queries' beams lead to, see `TreeEngine`."""
        self.check(queries, params)
        eligible = eligible_nodes(self.bundle.tree, params, len(queries), self._unrestricted)
        width = self.most_leaves(int(params.beam_size_B.max(initial=1)))
        found = self._run(queries, params, eligible, width)
        count_B = np.full(len(queries), width, np.int64)
        trace = found.trace if params.trace else None
        return ScoredLeaves(found.rows_BM, found.ranks_BM, count_B, eligible.items_B, trace, found.frontier)

    def _run(self, queries: QueryBatch, params: SearchParams, eligible: EligibleNodes, width: int) -> _Found:
        """What the cells find for each query, in arrays of this width."""
        tree, masks, parts, memory = self.bundle.tree, eligible.mask_B, CellParts.of(params), self._memory_of(params)
        lists = ExcludedLists.of(eligible.excluded, len(queries), tree.node_count)
        long_B = lists.count_B > self.shapes.excluded
        shape = len(queries), width
        rows_BM, ranks_BM = np.full(shape, NO_ITEM, np.int64), np.full(shape, -np.inf, np.float32)
        keys_BM = None if self._memory is None else ranks_BM.copy()
        finite_B = np.ones(len(queries), np.bool_)
        levels: list[tuple[NDArray[np.int64], list[LevelTrace]]] = []
        frontiers: list[tuple[NDArray[np.int64], Frontier]] = []
        with self.running():
            for members, bucket in self._groups(params):
                cell = self.cell(len(members), bucket, self._wanted(params, members), parts)
                addresses_B, held = self._addresses([masks[b] for b in members.tolist()])
                for place in np.flatnonzero(long_B[members]).tolist():
                    held.append(self._without(masks[members[place]], lists.of_query(int(members[place]))))
                    addresses_B[place] = held[-1].data_ptr()
                own = queries.take(members)
                cell.fill(own, params.take(members), addresses_B, lists, members)
                if self._memory is not None and memory is not None:
                    cell.fill_memory(self._memory.put(memory.lists(np.asarray(own.array, np.int64), eligible.take(members))))
                found = cell.run(len(members), params.trace)
                del held  # until here, so that no mask goes while its address is in use
                own_width = min(found.rows_BM.shape[1], width)
                rows_BM[members, :own_width], ranks_BM[members, :own_width] = found.rows_BM[:, :own_width], found.ranks_BM[:, :own_width]
                finite_B[members] = found.finite_B
                if keys_BM is not None:
                    keys_BM[members, :own_width] = found.keys_BM[:, :own_width]
                levels.append((members, found.trace))
                if found.frontier is not None:
                    frontiers.append((members, self._eligible_frontier(found.frontier, eligible.take(members), cell.start)))
        traced = from_start_level(tree, params.beam_size_B, _merged(levels, len(queries))) if params.trace else ()
        frontier = None
        if params.frontier:
            gamma = self.bundle.manifest.ranking.gamma
            frontier = without_unscored(tree, gamma, params.beam_size_B, joined(frontiers, len(queries)))
        return _Found(rows_BM, ranks_BM, keys_BM, finite_B, traced, frontier)

    def _eligible_frontier(self, frontier: Frontier, eligible: EligibleNodes, start: int) -> Frontier:
        """A cell's frontier, of a search from level `start`, without nodes that are not eligible or have no finite rank."""
        if start < self.bundle.tree.height:
            return frontier  # of nodes that were chosen
        keep_BK = np.isfinite(frontier.ranks_BK)
        if start > 1:
            for members, mask in eligible.groups:
                if mask is not None:
                    keep_BK[members] &= mask.eligible_N[frontier.nodes_BK[members]]
            if eligible.excluded is not None:
                for keep_K, nodes_K, inner_X in zip(keep_BK, frontier.nodes_BK, eligible.excluded.inner_BX, strict=True):
                    keep_K &= ~np.isin(nodes_K, inner_X)
        return restricted(frontier, keep_BK)

    def _wanted(self, params: SearchParams, members: NDArray[np.int64]) -> int:
        """How many results a cell brings for some queries; 0: every leaf."""
        return 0 if self._every_leaf else int(params.m_B[members].max())

    def _groups(self, params: SearchParams) -> list[tuple[NDArray[np.int64], int]]:
        """Which queries (int64 positions) share a run, and their beam bucket."""
        bucket_B = np.frexp(params.beam_size_B.astype(np.float64))[1] - 1
        most = self.shapes.batches[-1]
        groups = []
        for bucket in np.unique(bucket_B).tolist():
            members = np.flatnonzero(bucket_B == bucket)
            groups += [(members[start : start + most], bucket) for start in range(0, len(members), most)]
        return groups

    def cell(self, batch: int, bucket: int, wanted: int, parts: CellParts = PLAIN) -> AnyCell:
        """The cell for at most `batch` queries of beams in [2^bucket, 2^(bucket + 1) − 1] and at most `wanted` results; 0: every leaf."""
        size = next(size for size in self.shapes.batches if size >= batch)
        if wanted:
            wanted = min(next((m for m in self.shapes.m_sizes if m >= wanted), 1 << (wanted - 1).bit_length()), self.bundle.tree.leaf_count)
        cell = self._cells.get((size, bucket, wanted, parts))
        if cell is None:
            cell = self.new_cell(size, bucket, wanted, parts)
            if self._graphs:
                cell.capture()
            self._cells[size, bucket, wanted, parts] = cell
        return cell

    def _addresses(self, masks: Sequence[NodeMask | None]) -> tuple[NDArray[np.int64], list[Tensor]]:
        """int64[B]: where each query's mask is on the device, 0 without one; and the tensors there."""
        held = {mask: None if mask is None else self._mask_on_device(mask) for mask in set(masks)}
        address = {mask: 0 if bits is None else bits.data_ptr() for mask, bits in held.items()}
        return np.array([address[mask] for mask in masks], np.int64), [bits for bits in held.values() if bits is not None]

    def _mask_on_device(self, mask: NodeMask) -> Tensor:
        """uint8[⌈N / 8⌉], bit n & 7 of byte n >> 3: put there once and for as long as the mask lives."""
        bits = self._masks.get(mask)
        if bits is None:
            bits = self._masks[mask] = torch.from_numpy(np.packbits(mask.eligible_N, bitorder="little")).to(self.device)
        return bits

    def _without(self, mask: NodeMask | None, nodes: NDArray[np.int64]) -> Tensor:
        """A mask less some nodes, for a query that excludes more of them than a cell has room for."""
        byte, place = np.unique(nodes >> 3, return_inverse=True)
        cleared = np.zeros(len(byte), np.uint8)
        np.bitwise_or.at(cleared, place, (1 << (nodes & 7)).astype(np.uint8))
        bits = self._mask_on_device(mask or self._every_item).clone()
        at = torch.from_numpy(byte).to(self.device)
        bits[at] &= torch.from_numpy(~cleared).to(self.device)
        return bits


def refuse_what_does_not_fit(bundle: Bundle, needed: int, of: str, free: int, total: int) -> None:
    """Raise DeviceUnavailable when a bundle needs more bytes than are free of a GPU's."""
    if needed > free:
        raise DeviceUnavailable(
            f"{bundle.manifest.name} version {bundle.manifest.version} needs {needed / 1e9:.2f} GB on the GPU, for {of} and the tree; "
            f"{free / 1e9:.2f} of its {total / 1e9:.2f} GB are free"
        )


def _merged(parts: Sequence[tuple[NDArray[np.int64], list[LevelTrace]]], batch: int) -> tuple[LevelTrace, ...]:
    """The levels of all groups of a call; a level that a group did not visit is empty for its queries."""
    merged = []
    for level in sorted({entry.level for _, trace in parts for entry in trace}):
        visited = [(members, entry) for members, trace in parts for entry in trace if entry.level == level]
        widths = [max(entry.nodes_BK.shape[1] for _, entry in visited), max(entry.candidates_BC.shape[1] for _, entry in visited)]
        nodes, candidates = (np.full((batch, width), -1, np.int64) for width in widths)
        ranks, keys = (np.full((batch, widths[0]), -np.inf, np.float32) for _ in range(2))
        candidate_ranks, candidate_keys = (np.full((batch, widths[1]), -np.inf, np.float32) for _ in range(2))
        for members, entry in visited:
            for to, part in (
                (nodes, entry.nodes_BK), (ranks, entry.ranks_BK), (keys, entry.keys_BK),
                (candidates, entry.candidates_BC), (candidate_ranks, entry.candidate_ranks_BC), (candidate_keys, entry.candidate_keys_BC),
            ):  # fmt: skip
                to[members, : part.shape[1]] = part
        merged.append(LevelTrace(level, nodes, ranks, candidates, candidate_ranks, keys, candidate_keys))
    return tuple(merged)
