"""The base of engines whose whole search runs on a GPU: queries go to the device, and only results come back.

A call is split into groups. The queries of a group have beams in one bucket [2^j, 2^(j+1) − 1], and all of them bring states or none does.
A group is padded to one of a few batch sizes; each has a cell (`cells.py`) with its buffers and its CUDA graph. Every batch size uses the
same kernels over the same tiles, so a query's answer does not depend on the batch. The trees of a forest are searched one after the other.

Legend: B queries, T trees, M results, N nodes, S state.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from espalier.arrays import Array, Bool, Float32, Int32, Int64
from espalier.bundle import Bundle
from espalier.engines.forest_mean import BLOCK, most_leaves
from espalier.engines.stages import NO_RANK, NO_ROW, Leaves, TreeQuery
from espalier.engines.triton.cells import PLAIN, Cell, CellContext, CellResults, CellVariant, ExcludedLists, FixedShapes, Tables, Tuning
from espalier.errors import DeviceUnavailable, UnsupportedGraph
from espalier.manifest import GraphScorer
from espalier.masks.eligibility import EligibleNodes, every_item
from espalier.queries import HistoryKind
from espalier.search import Frontier, NodeMask, Precision

DTYPES: dict[Precision, torch.dtype] = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MAX_NODES = 2**31 - 1
FREEING_PAUSE_S = 1e-3
"""Pause between freeing one cell and the next."""
LIST_ROOM = 1 << 16
"""Initial size of the buffer of `DeviceLists`, in numbers and values."""
AnyCell = TypeVar("AnyCell", bound=Cell[Any])
Group = tuple[Int64, CellResults]
"""Some queries of a call, by their positions in it, and their results."""


def gpu_available() -> bool:
    """Whether torch here can reach an NVIDIA GPU."""
    return bool(torch.cuda.is_available())


class DeviceLists:
    """A buffer for the lists of a call's queries: all numbers (int32), followed by a float32 value for each.

    The lists are the features of queries, or the nodes with memory of their histories. Kernels read the addresses of lists, so lists may
    have any length and the CUDA graph stays the same.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._room = device, 0
        self._make_room(LIST_ROOM)

    def _make_room(self, numbers: int) -> None:
        self._host_numbers = torch.empty(numbers, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._device_numbers, self._room = torch.empty(numbers, dtype=torch.int32, device=self._device), numbers

    def put(self, offset_B: Int64, numbers: Int32 | Int64, values: Float32) -> tuple[Int64, Int64]:
        """Int64[B] and int64[B]: the addresses of each query's numbers and of their values, in the current stream.

        offset_B  int64[B + 1]: query b's are offset_B[b] … offset_B[b + 1] − 1
        """
        total = len(numbers)
        if 2 * total > self._room:
            self._make_room(1 << (2 * total - 1).bit_length())
        host = self._host_numbers.numpy()
        host[:total], host[total : 2 * total] = numbers, values.view(np.int32)
        if total:
            self._device_numbers[: 2 * total].copy_(self._host_numbers[: 2 * total], non_blocking=True)
        numbers_B = self._device_numbers.data_ptr() + 4 * offset_B[:-1]
        return numbers_B, numbers_B + 4 * total


class GpuSearch(ABC, Generic[AnyCell]):
    """See the module. One search at a time.

    device     "cuda", or "cpu" under Triton's interpreter (TRITON_INTERPRET=1), for tests
    precision  of node rows, weights and products of matrices; sums are float32 in any case. Query encoders run in float32
    shapes, tuning  sizes of cells and kernels
    cuda_graphs  False: every kernel is launched by itself, as compute-sanitizer needs it

    roundings  largest differences of ranks, for logits of a few units
    on_device  the attributes that `load` sets; closing the engine deletes them
    Raises DeviceUnavailable when there is no GPU or too little memory on it, UnsupportedGraph for a tree of more nodes than 32 bits can
    number and for graphs that this engine does not support.
    """

    name: str
    roundings: ClassVar[Mapping[Precision, float]]
    on_device: tuple[str, ...]
    encodes: bool
    merges = False

    def __init__(
        self,
        bundle: Bundle,
        device: Literal["cuda", "cpu"] = "cuda",
        precision: Precision = "float32",
        shapes: FixedShapes | None = None,
        tuning: Tuning | None = None,
        cuda_graphs: bool = True,
    ) -> None:
        if device == "cuda" and not gpu_available():
            raise DeviceUnavailable(f"{self.name} needs a CUDA device, and torch finds none; install the `gpu` extra on a machine with one")
        self._trees = [alone.tree for alone in bundle.alone]
        nodes = max(tree.node_count for tree in self._trees)
        if nodes > MAX_NODES:
            raise UnsupportedGraph(f"the tree has {nodes} nodes, at most {MAX_NODES} are known")
        self.bundle, self.precision, self.rounding = bundle, precision, self.roundings[precision]
        self.device = torch.device(device)
        self.shapes, self.tuning = shapes or FixedShapes(), tuning or Tuning()
        self._is_forest = len(self._trees) > 1
        brings_states = bundle.manifest.shard is not None and isinstance(bundle.manifest.scorer, GraphScorer)
        self._usual_variant = CellVariant(frontier=False, states=brings_states)
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        self._lock = threading.RLock()
        self._every_item = [every_item(tree) for tree in self._trees]
        self._masks: weakref.WeakKeyDictionary[NodeMask, Tensor] = weakref.WeakKeyDictionary()
        self.cells: dict[tuple[int, int, int, CellVariant, int], AnyCell] = {}
        self._graphs = device == "cuda" and cuda_graphs
        with self.running():
            self.load(DTYPES[precision])
            self._memory = None if bundle.memory is None else DeviceLists(self.device)
            self.contexts = self._cell_contexts()

    @abstractmethod
    def load(self, dtype: torch.dtype) -> None:
        """Put the scorers on the device, in the engine's stream."""

    @abstractmethod
    def new_cell(self, batch: int, bucket: int, m: int, variant: CellVariant, t: int) -> AnyCell:
        """A new cell of tree t, not captured yet."""

    def _cell_contexts(self) -> list[CellContext]:
        memory_weight = None if self.bundle.memory is None else float(self.bundle.memory.key_weight)
        pool = torch.cuda.graph_pool_handle() if self._graphs else None
        histories, gamma = isinstance(self.bundle.manifest.query, HistoryKind), self.bundle.manifest.ranking.gamma
        return [
            CellContext(tree, gamma, memory_weight, self.device, self.shapes, self.tuning, Tables(tree, self.device, histories), pool)
            for tree in self._trees
        ]

    def refuse_without_memory(self, needed: int, of: str) -> None:
        """Raise DeviceUnavailable where a GPU has fewer free bytes than needed. of: what needs them."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # memory of closed engines is free too
            refuse_what_does_not_fit(self.bundle, needed, of, *torch.cuda.mem_get_info(self.device))

    def warm_up(self) -> None:
        """Build and capture the cell of every batch size, beam bucket and m up to the model's limits. For the usual beam and m, build also
        the cells that a search with live items uses, so that the first live item need not wait for them.
        """
        search, stacking = self.bundle.manifest.search, self.bundle.manifest.stacking
        max_m = search.max_m if stacking is None else max(search.max_m, stacking.candidates)
        for batch in self.shapes.batches:
            for bucket in range(search.max_beam_size.bit_length()):
                for m in sorted({0 if self._is_forest else min(m, max_m) for m in (*self.shapes.m_sizes, max_m)}):
                    self._build(batch, bucket, m, self._usual_variant)
            usual = search.beam_size.bit_length() - 1, 0 if self._is_forest else search.m
            self._build(batch, *usual, CellVariant(frontier=True, states=self._usual_variant.states))
            if self.encodes and isinstance(self.bundle.manifest.query, HistoryKind):
                self._build(batch, *usual, CellVariant(frontier=True, states=True))

    def _build(self, batch: int, bucket: int, m: int, variant: CellVariant) -> None:
        """Build the cells of every tree. Skip those of a forest whose calls, with such beams, are always split to fit smaller cells."""
        smaller = max((size for size in self.shapes.batches if size < batch), default=0)
        if self._is_forest and smaller and (smaller + 1) * most_leaves(self._trees, 1 << bucket) > BLOCK:
            return
        for t in range(len(self._trees)):
            with self.running():
                self.cell(batch, bucket, m, variant, t)

    def close(self) -> None:
        """Free the device memory. Cells are freed one by one: a hundred CUDA graphs at once would block the interpreter."""
        while self.cells:
            with self._lock:
                self.cells.popitem()
            time.sleep(FREEING_PAUSE_S)
        with self._lock:
            self._masks.clear()
            for name in ("_memory", "contexts", *self.on_device):
                vars(self).pop(name, None)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The engine's own stream, on a GPU: one engine does not wait for another's work. One thread at a time."""
        with self._lock, torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            yield

    def search(self, query: TreeQuery) -> Leaves:
        """See `TreeSearch`."""
        batch, encoded_B = len(query), query.encoded_B
        if encoded_B is None:
            encoded_B = np.full(batch, query.states_BLS is not None)
        groups_T: list[list[Group]] = [[] for _ in self._trees]
        with self.running():
            for members, bucket, variant in self._groups(query.beam_size_B, encoded_B, query.frontier):
                group = query if len(members) == batch else query.take(members)
                for t, groups in enumerate(groups_T):
                    groups.append((members, self._search_group(group, bucket, variant, t)))
        width = 0 if self._is_forest else int(query.m_B.max(initial=0))
        rows_BTM, ranks_BTM = _of_trees(groups_T, "rows_BM", NO_ROW, batch, width), _of_trees(groups_T, "ranks_BM", NO_RANK, batch, width)
        leaves = Leaves(
            rows_BTM,
            ranks_BTM,
            ranks_BTM if self._memory is None else _of_trees(groups_T, "keys_BM", NO_RANK, batch, width),
            np.full((batch, len(groups_T)), rows_BTM.shape[2]) if self._is_forest else np.count_nonzero(rows_BTM >= 0, axis=2),
            traces=tuple(results.trace for groups in groups_T for _, results in groups) if query.trace else (),
            frontiers=tuple(_frontier(groups, batch) for groups in groups_T) if query.frontier else (),
        )
        if not self.encodes:
            return leaves
        finite_B = np.ones(batch, np.bool_)
        for members, results in groups_T[0]:
            finite_B[members] = results.finite_B
        states = [(members, results.leaf_states_BS) for members, results in groups_T[0]]
        return leaves._replace(finite_B=finite_B, leaf_states_BS=_assembled(states, batch, NO_RANK) if query.frontier else None)

    def _search_group(self, query: TreeQuery, bucket: int, variant: CellVariant, t: int) -> CellResults:
        eligible = query.eligible_T[t]
        excluded = ExcludedLists.of(eligible.excluded, len(query), self._trees[t].node_count)
        cell = self.cell(len(query), bucket, 0 if self._is_forest else int(query.m_B.max()), variant, t)
        addresses_B, masks = self._addresses(eligible, excluded, t)
        cell.fill(query, addresses_B, excluded)
        if self._memory is not None and query.memory is not None:
            lists = query.memory
            addresses = self._memory.put(lists.offset_B, lists.nodes, lists.values)
            cell.fill_memory(np.stack([*addresses, np.diff(lists.offset_B)], 1))
        results = cell.run(len(query), query.trace)
        del masks  # not earlier: their addresses were in use
        return results

    def _groups(self, beam_size_B: Int64, encoded_B: Bool, frontier: bool) -> Iterator[tuple[Int64, int, CellVariant]]:
        """The groups of queries that share a run: their positions (int64), their beam bucket, and the variant of their cell."""
        bucket_B = np.frexp(beam_size_B.astype(np.float64))[1] - 1
        kind_B, max_batch = 2 * bucket_B + encoded_B, self.shapes.batches[-1]
        for kind in np.unique(kind_B).tolist():
            members = np.flatnonzero(kind_B == kind)
            for start in range(0, len(members), max_batch):
                yield members[start : start + max_batch], kind // 2, CellVariant(frontier, kind % 2 == 1)

    def cell(self, batch: int, bucket: int, m: int, variant: CellVariant = PLAIN, t: int = 0) -> AnyCell:
        """The cell for at most `batch` queries of beams in [2^bucket, 2^(bucket + 1) − 1] and at most m results; m = 0: every leaf.

        t  which tree of a forest, from 0
        """
        size = next(size for size in self.shapes.batches if size >= batch)
        if m:
            m = min(next((m_size for m_size in self.shapes.m_sizes if m_size >= m), 1 << (m - 1).bit_length()), self._trees[0].leaf_count)
        cell = self.cells.get((size, bucket, m, variant, t))
        if cell is None:
            cell = self.new_cell(size, bucket, m, variant, t)
            if self._graphs:
                cell.capture()
            self.cells[size, bucket, m, variant, t] = cell
        return cell

    def _addresses(self, eligible: EligibleNodes, excluded: ExcludedLists, t: int) -> tuple[Int64, list[Tensor]]:
        """int64[B]: the address of each query's mask of a tree on the device, 0 without a mask; and the tensors at these addresses."""
        masks = eligible.mask_B
        bits_of = {mask: self._mask_on_device(mask) for mask in set(masks) if mask is not None}
        addresses_B = np.array([0 if mask is None else bits_of[mask].data_ptr() for mask in masks], np.int64)
        tensors = list(bits_of.values())
        for b in np.flatnonzero(excluded.count_B > self.shapes.excluded).tolist():
            tensors.append(self._without(masks[b] or self._every_item[t], excluded.of_query(b)))
            addresses_B[b] = tensors[-1].data_ptr()
        return addresses_B, tensors

    def _mask_on_device(self, mask: NodeMask) -> Tensor:
        """uint8[⌈N / 8⌉]: node n is bit n & 7 of byte n >> 3. Copied once, and kept for as long as the mask lives."""
        bits = self._masks.get(mask)
        if bits is None:
            bits = self._masks[mask] = torch.from_numpy(np.packbits(mask.eligible_N, bitorder="little")).to(self.device)
        return bits

    def _without(self, mask: NodeMask, nodes: Int64) -> Tensor:
        """A copy of a mask without some nodes, for a query that excludes more nodes than a cell has room for."""
        byte, position = np.unique(nodes >> 3, return_inverse=True)
        cleared = np.zeros(len(byte), np.uint8)
        np.bitwise_or.at(cleared, position, (1 << (nodes & 7)).astype(np.uint8))
        bits = self._mask_on_device(mask).clone()
        bits[torch.from_numpy(byte).to(self.device)] &= torch.from_numpy(~cleared).to(self.device)
        return bits


def refuse_what_does_not_fit(bundle: Bundle, needed: int, of: str, free: int, total: int) -> None:
    """Raise DeviceUnavailable when a bundle needs more bytes than are free of a GPU's."""
    if needed > free:
        raise DeviceUnavailable(
            f"{bundle.manifest.name} version {bundle.manifest.version} needs {needed / 1e9:.2f} GB on the GPU, for {of} and the tree; "
            f"{free / 1e9:.2f} of its {total / 1e9:.2f} GB are free"
        )


def _of_trees(groups_T: Sequence[Sequence[Group]], name: str, padding: np.generic, batch: int, width: int) -> Array:
    """[B, T, M]: one field of the results of all groups in all trees."""
    trees = len(groups_T)
    arrays = [(members * trees + t, getattr(results, name)) for t, groups in enumerate(groups_T) for members, results in groups]
    rows = _assembled(arrays, batch * trees, padding, width)
    return rows.reshape(batch, trees, rows.shape[1])


def _frontier(groups: Sequence[Group], batch: int) -> Frontier:
    beams = [(members, results.frontier) for members, results in groups if results.frontier is not None]
    return Frontier(
        _assembled([(members, beam.nodes_BK) for members, beam in beams], batch, NO_ROW),
        _assembled([(members, beam.ranks_BK) for members, beam in beams], batch, NO_RANK),
    )


def _assembled(arrays: Sequence[tuple[Int64, Array]], count: int, padding: np.generic, width: int = 0) -> Array:
    """One array of `count` rows from (row numbers int64, those rows) pairs: as wide as the widest, at least `width`."""
    width = max([width, *(array.shape[1] for _, array in arrays)])
    if len(arrays) == 1 and arrays[0][1].shape == (count, width):
        return arrays[0][1]
    out = np.full((count, width), padding)
    for rows, array in arrays:
        out[rows, : array.shape[1]] = array
    return out
