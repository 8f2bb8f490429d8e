"""What the searches with the whole of it on a GPU share: queries go to the device, result rows come back, and nothing in between.

A call is cut into groups of queries whose beams fall into one bucket [2^j, 2^(j+1) − 1] and that bring states, or do not; each group is
padded to one of a few batch sizes: such a cell (`cells.py`) has its buffers and its CUDA graph. Few queries or many, it is the same kernels
over the same tiles, so a query's answer does not depend on the batch. The trees of a forest are searched one after the other.

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
from numpy.typing import NDArray
from torch import Tensor

from espalier.bundle import Bundle
from espalier.engines.forest_mean import BLOCK, most_leaves
from espalier.engines.results import NO_RANK, NO_ROW
from espalier.engines.stages import Frontier, Leaves, TreeQuery
from espalier.engines.triton.cells import PLAIN, Cell, CellContext, CellFound, CellParts, ExcludedLists, FixedShapes, Tables, Tuning
from espalier.engines.triton.device_lists import DeviceLists
from espalier.errors import DeviceUnavailable, UnsupportedGraph
from espalier.manifest import GraphScorer
from espalier.masks.eligibility import EligibleNodes, every_item
from espalier.queries import HistoryKind
from espalier.search import NodeMask, Precision

Array = NDArray[Any]
Int64 = NDArray[np.int64]
DTYPES: dict[Precision, torch.dtype] = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
MAX_NODES = 2**31 - 1
FREEING_PAUSE_S = 1e-3
"""Between two cells that are freed."""
AnyCell = TypeVar("AnyCell", bound=Cell[Any])
OfQueries = tuple[Int64, CellFound]
"""What a cell found for some queries of a call (int64 positions)."""


def gpu_available() -> bool:
    """Whether torch here can reach an NVIDIA GPU."""
    return bool(torch.cuda.is_available())


class GpuSearch(ABC, Generic[AnyCell]):
    """See the module. One search at a time.

    device     "cuda", or "cpu" under Triton's interpreter (TRITON_INTERPRET=1), for tests
    precision  of node rows, weights and products of matrices; sums are float32 in any case. Query encoders run in float32
    shapes, tuning  sizes of cells and kernels
    cuda_graphs  False: every launch goes out by itself, as compute-sanitizer wants it

    roundings  largest differences of ranks, for logits of a few units
    on_device  the attributes that `load` sets, which go when the engine is closed
    Raises DeviceUnavailable when there is no GPU or too little memory on it, UnsupportedGraph for a tree whose nodes 32 bits cannot number
    and for graphs that are not known here.
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
        self._usual = CellParts(frontier=False, states=brings_states)
        self._stream = torch.cuda.Stream() if device == "cuda" else None
        self._lock = threading.RLock()
        self._every_item = [every_item(tree) for tree in self._trees]
        self._masks: weakref.WeakKeyDictionary[NodeMask, Tensor] = weakref.WeakKeyDictionary()
        self.cells: dict[tuple[int, int, int, CellParts, int], AnyCell] = {}
        self._graphs = device == "cuda" and cuda_graphs
        with self.running():
            self.load(DTYPES[precision])
            self._memory = None if bundle.memory is None else DeviceLists(self.device)
            self.contexts = self._cell_contexts()

    @abstractmethod
    def load(self, dtype: torch.dtype) -> None:
        """Put the scorers on the device, in the engine's stream."""

    @abstractmethod
    def new_cell(self, batch: int, bucket: int, wanted: int, parts: CellParts, place: int) -> AnyCell:
        """A cell of a tree that is not captured yet."""

    def _cell_contexts(self) -> list[CellContext]:
        """What the cells of each tree share."""
        memory_weight = None if self.bundle.memory is None else float(self.bundle.memory.key_weight)
        pool = torch.cuda.graph_pool_handle() if self._graphs else None
        histories, gamma = isinstance(self.bundle.manifest.query, HistoryKind), self.bundle.manifest.ranking.gamma
        return [
            CellContext(tree, gamma, memory_weight, self.device, self.shapes, self.tuning, Tables(tree, self.device, histories), pool)
            for tree in self._trees
        ]

    def refuse_without_memory(self, needed: int, of: str) -> None:
        """Raise DeviceUnavailable where a GPU has less than the bytes that are needed free. of: what needs them."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what closed engines had is free too
            refuse_what_does_not_fit(self.bundle, needed, of, *torch.cuda.mem_get_info(self.device))

    def warm_up(self) -> None:
        """Build and capture the cell of every batch size, beam bucket and m up to the model's limits; and for the usual beam and m those
        with which live items are searched: the first one must not wait for them.
        """
        search, stacking = self.bundle.manifest.search, self.bundle.manifest.stacking
        most = search.max_m if stacking is None else max(search.max_m, stacking.candidates)
        for batch in self.shapes.batches:
            for bucket in range(search.max_beam_size.bit_length()):
                for m in sorted({0 if self._is_forest else min(m, most) for m in (*self.shapes.m_sizes, most)}):
                    self._build(batch, bucket, m, self._usual)
            usual = search.beam_size.bit_length() - 1, 0 if self._is_forest else search.m
            self._build(batch, *usual, CellParts(frontier=True, states=self._usual.states))
            if self.encodes and isinstance(self.bundle.manifest.query, HistoryKind):
                self._build(batch, *usual, CellParts(frontier=True, states=True))

    def _build(self, batch: int, bucket: int, wanted: int, parts: CellParts) -> None:
        """The cells of every tree, unless calls of a forest with such beams are cut to so few queries that smaller cells do."""
        smaller = max((size for size in self.shapes.batches if size < batch), default=0)
        if self._is_forest and smaller and (smaller + 1) * most_leaves(self._trees, 1 << bucket) > BLOCK:
            return
        for place in range(len(self._trees)):
            with self.running():
                self.cell(batch, bucket, wanted, parts, place)

    def close(self) -> None:
        """Free what is on the device, the cells one by one: a hundred CUDA graphs at once would hold the interpreter."""
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
        found_T: list[list[OfQueries]] = [[] for _ in self._trees]
        with self.running():
            for members, bucket, parts in self._groups(query.beam_size_B, encoded_B, query.frontier):
                own = query if len(members) == batch else query.take(members)
                for place, found in enumerate(found_T):
                    found.append((members, self._found(own, bucket, parts, place)))
        width = 0 if self._is_forest else int(query.m_B.max(initial=0))
        rows_BTM, ranks_BTM = _of_trees(found_T, "rows_BM", NO_ROW, batch, width), _of_trees(found_T, "ranks_BM", NO_RANK, batch, width)
        leaves = Leaves(
            rows_BTM,
            ranks_BTM,
            ranks_BTM if self._memory is None else _of_trees(found_T, "keys_BM", NO_RANK, batch, width),
            np.full((batch, len(found_T)), rows_BTM.shape[2]) if self._is_forest else np.count_nonzero(rows_BTM >= 0, axis=2),
            traces=tuple(found.trace for own in found_T for _, found in own) if query.trace else (),
            frontiers=tuple(_frontier(own, batch) for own in found_T) if query.frontier else (),
        )
        if not self.encodes:
            return leaves
        finite_B = np.ones(batch, np.bool_)
        for members, of_cell in found_T[0]:
            finite_B[members] = of_cell.finite_B
        states = [(members, of_cell.leaf_states_BS) for members, of_cell in found_T[0]]
        return leaves._replace(finite_B=finite_B, leaf_states_BS=_together(states, batch, NO_RANK) if query.frontier else None)

    def _found(self, query: TreeQuery, bucket: int, parts: CellParts, place: int) -> CellFound:
        """What a cell finds in a tree for the queries of a group."""
        eligible = query.eligible_T[place]
        excluded = ExcludedLists.of(eligible.excluded, len(query), self._trees[place].node_count)
        cell = self.cell(len(query), bucket, 0 if self._is_forest else int(query.m_B.max()), parts, place)
        addresses_B, held = self._addresses(eligible, excluded, place)
        cell.fill(query, addresses_B, excluded)
        if self._memory is not None and query.memory is not None:
            lists = query.memory
            addresses = self._memory.put(lists.offset_B, lists.nodes, lists.values)
            cell.fill_memory(np.stack([*addresses, np.diff(lists.offset_B)], 1))
        found = cell.run(len(query), query.trace)
        del held  # until here, so that no mask goes while its address is in use
        return found

    def _groups(self, beam_size_B: Int64, encoded_B: NDArray[np.bool_], frontier: bool) -> Iterator[tuple[Int64, int, CellParts]]:
        """Which queries (int64 positions) share a run, their beam bucket, and whether they bring states."""
        bucket_B = np.frexp(beam_size_B.astype(np.float64))[1] - 1
        kind_B, most = 2 * bucket_B + encoded_B, self.shapes.batches[-1]
        for kind in np.unique(kind_B).tolist():
            members = np.flatnonzero(kind_B == kind)
            for start in range(0, len(members), most):
                yield members[start : start + most], kind // 2, CellParts(frontier, kind % 2 == 1)

    def cell(self, batch: int, bucket: int, wanted: int, parts: CellParts = PLAIN, place: int = 0) -> AnyCell:
        """The cell for at most `batch` queries of beams in [2^bucket, 2^(bucket + 1) − 1] and at most `wanted` results; 0: every leaf.

        place  which tree of a forest, from 0
        """
        size = next(size for size in self.shapes.batches if size >= batch)
        if wanted:
            wanted = min(next((m for m in self.shapes.m_sizes if m >= wanted), 1 << (wanted - 1).bit_length()), self._trees[0].leaf_count)
        cell = self.cells.get((size, bucket, wanted, parts, place))
        if cell is None:
            cell = self.new_cell(size, bucket, wanted, parts, place)
            if self._graphs:
                cell.capture()
            self.cells[size, bucket, wanted, parts, place] = cell
        return cell

    def _addresses(self, eligible: EligibleNodes, excluded: ExcludedLists, place: int) -> tuple[Int64, list[Tensor]]:
        """int64[B]: where each query's mask of a tree is on the device, 0 without one; and the tensors there."""
        masks = eligible.mask_B
        held = {mask: self._mask_on_device(mask) for mask in set(masks) if mask is not None}
        address = {mask: bits.data_ptr() for mask, bits in held.items()}
        addresses_B, own = np.array([0 if mask is None else address[mask] for mask in masks], np.int64), list(held.values())
        for b in np.flatnonzero(excluded.count_B > self.shapes.excluded).tolist():
            own.append(self._without(masks[b] or self._every_item[place], excluded.of_query(b)))
            addresses_B[b] = own[-1].data_ptr()
        return addresses_B, own

    def _mask_on_device(self, mask: NodeMask) -> Tensor:
        """uint8[⌈N / 8⌉], bit n & 7 of byte n >> 3: put there once and for as long as the mask lives."""
        bits = self._masks.get(mask)
        if bits is None:
            bits = self._masks[mask] = torch.from_numpy(np.packbits(mask.eligible_N, bitorder="little")).to(self.device)
        return bits

    def _without(self, mask: NodeMask, nodes: Int64) -> Tensor:
        """A mask less some nodes, for a query that excludes more of them than a cell has room for."""
        byte, place = np.unique(nodes >> 3, return_inverse=True)
        cleared = np.zeros(len(byte), np.uint8)
        np.bitwise_or.at(cleared, place, (1 << (nodes & 7)).astype(np.uint8))
        bits = self._mask_on_device(mask).clone()
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


def _of_trees(found_T: Sequence[Sequence[OfQueries]], name: str, padding: np.generic, batch: int, width: int) -> Array:
    """[B, T, M]: an array that all cells have."""
    trees = len(found_T)
    parts = [(members * trees + place, getattr(found, name)) for place, own in enumerate(found_T) for members, found in own]
    whole = _together(parts, batch * trees, padding, width)
    return whole.reshape(batch, trees, whole.shape[1])


def _frontier(parts: Sequence[OfQueries], batch: int) -> Frontier:
    """The beams of all groups of a call."""
    beams = [(members, found.frontier) for members, found in parts if found.frontier is not None]
    return Frontier(
        _together([(members, beam.nodes_BK) for members, beam in beams], batch, NO_ROW),
        _together([(members, beam.ranks_BK) for members, beam in beams], batch, NO_RANK),
    )


def _together(parts: Sequence[tuple[Int64, Array]], count: int, padding: np.generic, width: int = 0) -> Array:
    """One array of `count` rows, of arrays with those at some places (int64): as wide as the widest, at least `width`."""
    width = max([width, *(array.shape[1] for _, array in parts)])
    if len(parts) == 1 and parts[0][1].shape == (count, width):
        return parts[0][1]
    whole = np.full((count, width), padding)
    for places, array in parts:
        whole[places, : array.shape[1]] = array
    return whole
