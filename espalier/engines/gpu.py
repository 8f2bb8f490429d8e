"""`triton`: the whole beam search in Triton kernels; queries go to the device, result rows come back, and nothing in between.

A call is cut into groups of queries whose beams fall into one bucket [2^j, 2^(j+1) − 1], and each group is padded to a batch size of a
small grid. Such a cell has buffers that stay where they are and one CUDA graph: query encoder, then on each level one kernel that scores
the children of the beam and one that selects the best of them, at last one that orders the leaves. Few queries or many, it is the same
kernels over the same tiles, so a query's answer does not depend on the batch.

Legend: B queries, T history, L levels, K beam, C candidates, M results, X closed nodes, N nodes, D node row, S state.
"""

from __future__ import annotations

import gc
import logging
import math
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import onnx
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from espalier.bundle import Bundle
from espalier.eligibility import NO_NODE, ExcludedNodes, every_item, excluded_nodes
from espalier.engines.graphs import read_graph
from espalier.engines.kernels.history_nodes import history_nodes_kernel
from espalier.engines.kernels.order import order_kernel
from espalier.engines.kernels.score import rank_level_kernel, score_children_kernel, score_levels_kernel
from espalier.engines.kernels.select import select_kernel
from espalier.engines.scorer_form import ScorerForm, scorer_form
from espalier.engines.torch_graph import TorchGraph, encoder_of
from espalier.errors import DeviceUnavailable, InvalidQuery, UnsupportedGraph
from espalier.queries import HistoryKind, QueryBatch, blank_queries
from espalier.search import NO_ITEM, LevelTrace, NodeMask, Precision, SearchParams, SearchResult, finish
from espalier.tree import Tree

DTYPES: dict[Precision, torch.dtype] = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
ROUNDING: dict[Precision, float] = {"float32": 1e-3, "float16": 0.02, "bfloat16": 0.15}
log = logging.getLogger(__name__)

MAX_NODES = 2**31 - 1
COPY_BYTES = 256 << 20
"""Of node rows that are brought to the device at a time."""
FREEING_PAUSE_S = 1e-3
"""Between two cells that are freed."""
_CAPTURE = threading.Lock()
"""Of the process: two captures at a time would end each other."""


@dataclass(frozen=True)
class Tuning:
    """Sizes that change how fast a search is, and nothing else.

    tile          candidates that one program scores at a time; None: 16 for an MLP in float32, which would spill registers, else 32
    busy_tiles    tiles of a level of a call from which on one program scores several, up to tiles_per_program
    bits          of a threshold that one pass of the selection finds
    whole         candidates that the selection keeps in registers; more are read again in each pass
    warps         of a program that scores · select_warps, of one that selects

    Raises ValueError for sizes that would change more than the speed.
    """

    tile: int | None = None
    busy_tiles: int = 2048
    tiles_per_program: int = 4
    bits: int = 2
    whole: int = 4096
    warps: int = 4
    select_warps: int = 8

    def __post_init__(self) -> None:
        if self.bits not in (1, 2, 4) or not 1 <= self.whole <= 1 << 15:
            raise ValueError(f"bits {self.bits}, whole {self.whole}: expected 1, 2 or 4, and 1 to {1 << 15}")


@dataclass(frozen=True)
class Grid:
    """The sizes of cells: a call is padded up to the next batch and m, and a longer one is cut.

    closed  nodes of one query that its exclusions may close; with more it gets a mask instead
    """

    batches: tuple[int, ...] = (1, 8, 64, 512)
    wanted: tuple[int, ...] = (64, 256, 1024, 4096, 16384, 65536)
    closed: int = 1024


def gpu_available() -> bool:
    """Whether torch here can reach an NVIDIA GPU."""
    return bool(torch.cuda.is_available())


class TritonEngine:
    """See the module.

    device     "cuda", or "cpu" under Triton's interpreter (TRITON_INTERPRET=1), for tests
    precision  of node rows and of products of matrices; sums are float32 in any case. Query encoders run in float32
    grid, tuning  sizes of cells and kernels
    cuda_graphs   False: every launch goes out by itself, as compute-sanitizer wants it

    Raises UnsupportedGraph when the bundle's graphs are not known here, DeviceUnavailable when there is no GPU or too little memory on it.
    """

    name = "triton"

    def __init__(
        self,
        bundle: Bundle,
        device: Literal["cuda", "cpu"] = "cuda",
        precision: Precision = "float32",
        grid: Grid | None = None,
        tuning: Tuning | None = None,
        cuda_graphs: bool = True,
    ) -> None:
        if device == "cuda" and not gpu_available():
            raise DeviceUnavailable("triton was asked for, but torch finds no CUDA device; install the `gpu` extra on a machine with one")
        self.bundle = bundle
        self.rounding = ROUNDING[precision]
        self.device = torch.device(device)
        self._grid, self._tuning = grid or Grid(), tuning or Tuning()
        tree, manifest = bundle.tree, bundle.manifest
        if tree.node_count > MAX_NODES:
            raise UnsupportedGraph(f"the tree has {tree.node_count} nodes, at most {MAX_NODES} are known")
        form = scorer_form(
            read_graph("scorer.onnx", bundle.graph("scorer.onnx")), bundle.graph_scorer.state_dim, bundle.graph_scorer.node_dim
        )
        query = read_graph("query.onnx", bundle.graph("query.onnx"))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what closed engines had is free too
            refuse_what_does_not_fit(bundle, precision, *torch.cuda.mem_get_info(self.device))
        self._stream = torch.cuda.Stream() if device == "cuda" else None  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._lock = threading.RLock()
        with self.running():
            self._encoder = _encoder(query, bundle, self.device)
            self._scorer = _Scorer(form, bundle.graph_scorer.node_dim, DTYPES[precision], self.device)
            self.node_rows_ND = self._node_rows(DTYPES[precision])
            self._tables = _Tables(tree, self.device, isinstance(manifest.query, HistoryKind))
        self._tile = self._tuning.tile or (16 if form.layers and precision == "float32" else 32)
        self._every_item = every_item(tree)
        self._vacant = not self._every_item.open_N.all()
        self._masks: weakref.WeakKeyDictionary[NodeMask, Tensor] = weakref.WeakKeyDictionary()
        self._cells: dict[tuple[int, int, int], Cell] = {}
        self.pool = torch.cuda.graph_pool_handle() if device == "cuda" and cuda_graphs else None

    @property
    def cell_count(self) -> int:
        """How many cells have been built; warm-up is to build all that a query may need."""
        return len(self._cells)

    def warm_up(self) -> None:
        """Build and capture the cell of every batch size, beam bucket and m up to the model's limits."""
        limits = self.bundle.manifest.search
        for batch in self._grid.batches:
            queries = blank_queries(self.bundle.manifest.query, batch)
            for bucket in range(limits.max_beam_size.bit_length()):
                for m in sorted({min(m, limits.max_m) for m in (*self._grid.wanted, limits.max_m)}):
                    self.search(queries, SearchParams.uniform(batch, min(1 << bucket, limits.max_beam_size), m))

    def prepare(self, params: SearchParams) -> None:
        with self.running():
            for members, bucket in self._groups(params):
                self.cell(len(members), bucket, int(params.m_B[members].max()))

    def close(self) -> None:
        """Free what is on the device, the cells one by one: a hundred CUDA graphs at once would hold the interpreter."""
        while self._cells:
            with self._lock:
                self._cells.popitem()
            time.sleep(FREEING_PAUSE_S)
        with self._lock:
            self._masks.clear()
            for name in ("node_rows_ND", "_tables", "_scorer", "_encoder"):
                vars(self).pop(name, None)  # closed twice is closed once
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The engine's own stream, on a GPU: one engine does not wait for another's work. One thread at a time."""
        with self._lock, torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            yield

    def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        tree, kind = self.bundle.tree, self.bundle.manifest.query
        if queries.kind != kind:
            raise InvalidQuery("queries", queries.kind, str(kind))
        queries.check(tree.item_count)
        params.check(len(queries), tree.item_count, tree.node_count)
        excluded = None
        if params.exclude_BE is not None and params.exclude_BE.size:
            excluded = excluded_nodes(tree, params.exclude_BE, params.mask_B)
        masks = list(params.mask_B or (None,) * len(queries))
        eligible_B = np.array([tree.item_count if mask is None else mask.items for mask in masks], np.int64)
        eligible_B -= excluded.count_B if excluded is not None else 0
        closed = _Closed.of(excluded, len(queries), tree.node_count)
        long_B = closed.count_B > self._grid.closed
        shape = len(queries), int(params.m_B.max(initial=0))
        rows_BM, ranks_BM = np.full(shape, NO_ITEM, np.int64), np.full(shape, -np.inf, np.float32)
        levels: list[tuple[NDArray[np.int64], list[LevelTrace]]] = []
        with self.running():
            for members, bucket in self._groups(params):
                cell = self.cell(len(members), bucket, int(params.m_B[members].max()))
                addresses_B, held = self._addresses([masks[b] for b in members.tolist()])
                for place in np.flatnonzero(long_B[members]).tolist():
                    held.append(self._without(masks[members[place]], closed.of_query(int(members[place]))))
                    addresses_B[place] = held[-1].data_ptr()
                cell.fill(queries.take(members), params.beam_size_B[members], params.m_B[members], addresses_B, closed, members)
                rows, ranks, trace = cell.run(len(members), params.trace)
                del held  # until here, so that no mask goes while its address is in use
                width = min(rows.shape[1], shape[1])
                rows_BM[members, :width], ranks_BM[members, :width] = rows[:, :width], ranks[:, :width]
                levels.append((members, trace))
        result = finish(self.bundle.manifest.ranking, params.m_B, eligible_B, rows_BM, ranks_BM, None)
        return replace(result, trace=_merged(levels, result, tree)) if params.trace else result

    def _groups(self, params: SearchParams) -> list[tuple[NDArray[np.int64], int]]:
        """Which queries (int64 positions) share a run, and their beam bucket."""
        bucket_B = np.frexp(params.beam_size_B.astype(np.float64))[1] - 1
        most = self._grid.batches[-1]
        groups = []
        for bucket in np.unique(bucket_B).tolist():
            members = np.flatnonzero(bucket_B == bucket)
            groups += [(members[start : start + most], bucket) for start in range(0, len(members), most)]
        return groups

    def cell(self, batch: int, bucket: int, wanted: int) -> Cell:
        """The cell for at most `batch` queries of beams in [2^bucket, 2^(bucket + 1) − 1] and at most `wanted` results."""
        size = next(size for size in self._grid.batches if size >= batch)
        wanted = min(next((m for m in self._grid.wanted if m >= wanted), 1 << (wanted - 1).bit_length()), self.bundle.tree.leaf_count)
        cell = self._cells.get((size, bucket, wanted))
        if cell is None:
            cell = self._cells[size, bucket, wanted] = Cell(self, size, bucket, wanted)
        return cell

    def _addresses(self, masks: Sequence[NodeMask | None]) -> tuple[NDArray[np.int64], list[Tensor]]:
        """int64[B]: where each query's mask is on the device, 0 without one; and the tensors there."""
        vacant = self._every_item if self._vacant else None
        masks = [mask or vacant for mask in masks]
        held = {mask: None if mask is None else self._mask_on_device(mask) for mask in set(masks)}
        address = {mask: 0 if bits is None else bits.data_ptr() for mask, bits in held.items()}
        return np.array([address[mask] for mask in masks], np.int64), [bits for bits in held.values() if bits is not None]

    def _mask_on_device(self, mask: NodeMask) -> Tensor:
        """uint8[⌈N / 8⌉], bit n & 7 of byte n >> 3: put there once and for as long as the mask lives."""
        bits = self._masks.get(mask)
        if bits is None:
            bits = self._masks[mask] = torch.from_numpy(np.packbits(mask.open_N, bitorder="little")).to(self.device)
        return bits

    def _without(self, mask: NodeMask | None, nodes: NDArray[np.int64]) -> Tensor:
        """A mask less some nodes, for a query that closes more of them than a cell has room for."""
        byte, place = np.unique(nodes >> 3, return_inverse=True)
        cleared = np.zeros(len(byte), np.uint8)
        np.bitwise_or.at(cleared, place, (1 << (nodes & 7)).astype(np.uint8))
        bits = self._mask_on_device(mask or self._every_item).clone()
        at = torch.from_numpy(byte).to(self.device)
        bits[at] &= torch.from_numpy(~cleared).to(self.device)
        return bits

    def _node_rows(self, dtype: torch.dtype) -> Tensor:
        """The rows, read from the bundle's mapped file piece by piece."""
        source = self.bundle.node_rows_ND
        rows_ND = torch.empty(source.shape, dtype=dtype, device=self.device)
        step = max(1, COPY_BYTES // max(1, source.shape[1] * source.itemsize))
        for start in range(0, len(source), step):
            rows_ND[start : start + step] = torch.from_numpy(np.array(source[start : start + step])).to(self.device).to(dtype)
        return rows_ND


def refuse_what_does_not_fit(bundle: Bundle, precision: Precision, free: int, total: int) -> None:
    """Raise DeviceUnavailable when a bundle's rows and tree need more than the `free` of a GPU's `total` bytes."""
    tree, scorer = bundle.tree, bundle.graph_scorer
    ragged = not all(tree.is_uniform(h) for h in range(tree.height))
    needed = tree.node_count * scorer.node_dim * DTYPES[precision].itemsize
    needed += 4 * (tree.leaf_count + tree.item_count + (2 * tree.node_count if ragged else 0))
    if needed > free:
        raise DeviceUnavailable(
            f"{bundle.manifest.name} version {bundle.manifest.version} needs {needed / 1e9:.2f} GB on the GPU, for {tree.node_count:,} "
            f"node rows of {scorer.node_dim} {precision} numbers and the tree; {free / 1e9:.2f} of its {total / 1e9:.2f} GB are free"
        )


class _Scorer:
    """A scorer's weights as the kernels want them: layers padded to powers of two of at least 16, end to end."""

    def __init__(self, form: ScorerForm, node_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self.widths = [_padded(len(layer.bias)) for layer in form.layers] + [0] * (4 - len(form.layers))
        self.row_width = triton.next_power_of_2(node_dim) if not form.layers else _padded(node_dim)
        self.state_width = self.widths[0]
        matrices, vectors, before = [], [], self.row_width
        for layer, width in zip(form.layers, self.widths, strict=False):
            matrix = np.zeros((before, width), np.float32)
            matrix[: layer.weight.shape[0], : layer.weight.shape[1]] = layer.weight
            matrices.append(matrix.ravel())
            vectors += [_fill(layer.bias, width), _fill(layer.slope, width)]
            before = width
        if form.layers:
            vectors += [_fill(form.out, before), np.array([form.offset], np.float32)]
        flat = np.concatenate(matrices) if matrices else np.zeros(1, np.float32)
        self.weights = torch.from_numpy(flat).to(device).to(dtype)
        self.vectors = torch.from_numpy(np.concatenate(vectors) if vectors else np.zeros(1, np.float32)).to(device)


class _Tables:
    """The tree's arrays on the device, in 32 bits; what arithmetic replaces is left out."""

    def __init__(self, tree: Tree, device: torch.device, histories: bool) -> None:
        def on_device(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(array.astype(np.int32)).to(device)

        nothing = np.zeros(1, np.int32)
        ragged = not all(tree.is_uniform(h) for h in range(tree.height))
        self.first_child = on_device(tree.first_child if ragged else nothing)
        self.parent = on_device(tree.parent if ragged and histories else nothing)
        self.leaf_of_item = on_device(tree.leaf_of_item if histories else nothing)
        self.leaf_item = on_device(tree.leaf_item)
        uniform = [tree.max_children[h] if tree.is_uniform(h) else 0 for h in range(tree.height)] + [0]
        self.levels = on_device(np.stack([tree.level_offset[:-1], np.array(uniform)], 1))


@dataclass
class _Closed:
    """Each query's closed nodes, ascending.

    nodes_BX  int64[B, X], large numbers as padding · count_B  int64[B]
    """

    nodes_BX: NDArray[np.int64]
    count_B: NDArray[np.int64]

    def of_query(self, b: int) -> NDArray[np.int64]:
        nodes: NDArray[np.int64] = self.nodes_BX[b, : self.count_B[b]]
        return nodes

    @staticmethod
    def of(excluded: ExcludedNodes | None, batch: int, nodes: int) -> _Closed:
        if excluded is None:
            return _Closed(np.empty((batch, 0), np.int64), np.zeros(batch, np.int64))
        both_BX = np.concatenate([excluded.inner_BX, excluded.leaves_BX], axis=1)
        return _Closed(np.sort(np.where(both_BX == NO_NODE, nodes, both_BX), axis=1), np.count_nonzero(both_BX != NO_NODE, axis=1))


def _encoder(query: onnx.ModelProto, bundle: Bundle, device: torch.device) -> TorchGraph:
    kind, tree = bundle.graph_kind, bundle.tree
    width = kind.length if isinstance(kind, HistoryKind) else kind.width
    return encoder_of(query, device, bundle.graph_scorer.node_dim, tree.height + 1, width)


class Cell:
    """One batch size, beam bucket and m: static buffers, the launches over them, and on a GPU their CUDA graph.

    What lies between the launches is taken from a pool that all cells of an engine share, since they run one after another.
    """

    def __init__(self, engine: TritonEngine, batch: int, bucket: int, wanted: int) -> None:
        self._engine, self._batch, self._wanted = engine, batch, wanted
        manifest, tree = engine.bundle.manifest, engine.bundle.tree
        device = engine.device
        self._gamma = manifest.ranking.gamma
        self._log_activation = manifest.ranking.own == "log_activation"
        beam = (2 << bucket) - 1
        self._start = tree.start_level(1 << bucket)
        self._first = 1 if self._gamma > 0 else self._start
        # The slots of each level from the one above the start, whose nodes are all there, to the leaves.
        self._slots = [tree.level_size(self._start - 1)]
        for level in range(self._start, tree.height + 1):
            most = self._slots[-1] * tree.max_children[level - 1]
            self._slots.append(min(beam if level < tree.height else wanted, most))
        self._stride = max(self._slots)
        self._candidates = max(slots * children for slots, children in zip(self._slots, tree.max_children[self._start - 1 :], strict=False))

        kind = manifest.query
        self._history = isinstance(kind, HistoryKind)
        width, dtype = (kind.length, torch.int32) if isinstance(kind, HistoryKind) else (kind.width, torch.float32)
        pinned = device.type == "cuda"
        entries: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "masks": ((batch,), torch.int64),
            "beam_size": ((batch,), torch.int32),
            "m": ((batch,), torch.int32),
            "closed_from": ((batch,), torch.int32),
            "closed_count": ((batch,), torch.int32),
            "query": ((batch, width), dtype),
        }
        size = sum(_bytes(*entry) for entry in entries.values())
        self._host_bytes = torch.zeros(size, dtype=torch.uint8, pin_memory=pinned)
        self._input_bytes = torch.zeros(size, dtype=torch.uint8, device=device)
        self._host, self._inputs = _views(self._host_bytes, entries), _views(self._input_bytes, entries)
        self._host_closed = torch.zeros(batch * engine._grid.closed, dtype=torch.int32, pin_memory=pinned)
        self._closed = torch.zeros(batch * engine._grid.closed, dtype=torch.int32, device=device)

        above = tree.level(self._start - 1)
        self._above = torch.arange(above.start, above.stop, dtype=torch.int32, device=device)
        self._found = torch.full((batch, wanted), NO_ITEM, dtype=torch.int32, device=device)
        self._found_ranks = torch.full((batch, wanted), -torch.inf, dtype=torch.float32, device=device)
        self._rows_back = torch.empty((batch, wanted), dtype=torch.int32, pin_memory=pinned)
        self._ranks_back = torch.empty((batch, wanted), dtype=torch.float32, pin_memory=pinned)
        self._top = _WholeLevels(tree, self._start - 1, engine._tile, device) if self._gamma > 0 and self._start > 1 else None
        self.graph: torch.cuda.CUDAGraph | None = None
        if engine.pool is not None:
            self._capture()

    def fill(
        self,
        queries: QueryBatch,
        beam_size_B: NDArray[np.int64],
        m_B: NDArray[np.int64],
        addresses_B: NDArray[np.int64],
        closed: _Closed,
        members: NDArray[np.int64],
    ) -> None:
        """Put a call's queries into the buffers. Rows past them get a beam of 0, which ends their search where it begins."""
        count, room = len(queries), self._engine._grid.closed
        count_B = np.where(closed.count_B[members] <= room, closed.count_B[members], 0)  # longer lists are part of a mask
        for name, array in (
            ("query", queries.array),
            ("beam_size", beam_size_B),
            ("m", m_B),
            ("masks", addresses_B),
            ("closed_from", np.cumsum(count_B) - count_B),
            ("closed_count", count_B),
        ):
            self._host[name].numpy()[:count] = array
        for name in ("masks", "beam_size", "m", "closed_count"):
            self._host[name].numpy()[count:] = 0
        total = int(count_B.sum())
        if total:
            nodes_BX = closed.nodes_BX[members]
            self._host_closed.numpy()[:total] = nodes_BX[np.arange(nodes_BX.shape[1]) < count_B[:, None]]
            self._closed[:total].copy_(self._host_closed[:total], non_blocking=True)

    def run(self, count: int, trace: bool) -> tuple[NDArray[np.int32], NDArray[np.float32], list[LevelTrace]]:
        """Item rows and ranks of the first `count` queries, best first; with a trace the launches go out one by one."""
        levels: list[LevelTrace] = []
        if self.graph is not None and not trace:
            self.graph.replay()
        else:
            self._launch(levels if trace else None, count)
        if self._engine.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        return self._rows_back.numpy()[:count], self._ranks_back.numpy()[:count], levels

    def _capture(self) -> None:
        """Record the launches, in the engine's stream. Other threads may go on using the GPU, but for capturing themselves."""
        self._launch(None, 0)  # compiles the kernels, which a capture cannot
        self.graph = torch.cuda.CUDAGraph()
        collecting = gc.isenabled()
        with _CAPTURE:
            gc.disable()  # the end of another engine's graphs would end the capture
            try:
                self.graph.capture_begin(pool=self._engine.pool, capture_error_mode="thread_local")
                try:
                    self._launch(None, 0)
                finally:
                    self.graph.capture_end()
            finally:
                if collecting:
                    gc.enable()

    def _launch(self, trace: list[LevelTrace] | None, count: int) -> None:
        self._input_bytes.copy_(self._host_bytes, non_blocking=True)
        self.launch_search(self.launch_encoder(), trace, count)
        self._rows_back.copy_(self._found, non_blocking=True)
        self._ranks_back.copy_(self._found_ranks, non_blocking=True)

    def launch_encoder(self) -> Tensor:
        """float32[B, levels from `first` on or 1, S]: the query states."""
        engine, batch = self._engine, self._batch
        tree, tables = engine.bundle.tree, engine._tables
        feeds = {"node_rows": engine.node_rows_ND, "vector": self._inputs["query"]}
        if self._history:
            length = self._inputs["query"].shape[1]
            shape = (batch, tree.height + 1 - self._first, length)
            feeds["history_nodes"] = nodes = torch.empty(shape, dtype=torch.int64, device=engine.device)
            history_nodes_kernel[(batch,)](
                self._inputs["query"], tables.leaf_of_item, tables.parent, tables.levels, nodes, length, self._first, tree.height,
                triton.next_power_of_2(length),
            )  # fmt: skip
        state_BLS = engine._encoder(**{name: feeds[name] for name in engine._encoder.inputs})
        padding = engine._scorer.state_width - state_BLS.shape[2]
        return (torch.nn.functional.pad(state_BLS, (0, padding)) if padding > 0 else state_BLS).contiguous()

    def launch_search(self, state_BLS: Tensor, trace: list[LevelTrace] | None = None, count: int = 0) -> None:
        """The levels from the start to the leaves, and the order of what was found, from query states."""
        tree, beams = self._engine.bundle.tree, [_Beam(self._batch, self._stride, state_BLS.device) for _ in range(2)]
        found = _Beam(self._batch, self._candidates, state_BLS.device)
        self._begin(state_BLS, beams[0])
        for place, level in enumerate(range(self._start, tree.height + 1)):
            candidates = self._slots[place] * tree.max_children[level - 1]
            self._score(level, self._slots[place], beams[0], found, state_BLS)
            self._select(found, candidates, beams[1], self._slots[place + 1], "beam_size" if level < tree.height else "m")
            beams.reverse()
            if trace is not None:
                kept, chosen = beams[0].part(count, self._slots[place + 1]), found.part(count, candidates)
                trace.append(LevelTrace(level, *kept, *chosen))
        self._order(beams[0])

    def _begin(self, state_BLS: Tensor, beam: _Beam) -> None:
        """All nodes of the level above the start, with their ranks where children inherit them."""
        engine = self._engine
        beam.nodes[:, : self._slots[0]] = self._above
        if self._top is None:
            beam.ranks.zero_()
            return
        top, scorer, tile = self._top, engine._scorer, engine._tile
        own = torch.empty((self._batch, top.nodes), dtype=torch.float32, device=engine.device)
        score_levels_kernel[(len(top.tiles), self._batch)](
            top.tiles, engine.node_rows_ND, state_BLS, state_BLS.stride(0), state_BLS.shape[2], state_BLS.shape[1],
            scorer.weights, scorer.vectors, engine.node_rows_ND.shape[1], own, top.nodes,
            tile, scorer.row_width, *scorer.widths, self._log_activation, num_warps=engine._tuning.warps,
        )  # fmt: skip
        levels, width = top.ancestors.shape
        rank_level_kernel[(triton.cdiv(width, 128), self._batch)](
            own, top.nodes, top.ancestors, levels, width, beam.ranks, self._stride, self._gamma, 128
        )

    def _score(self, level: int, slots: int, beam: _Beam, found: _Beam, state_BLS: Tensor) -> None:
        engine, tree = self._engine, self._engine.bundle.tree
        scorer, tuning = engine._scorer, engine._tuning
        children = tree.max_children[level - 1]
        tiles = triton.cdiv(slots * children, engine._tile)
        several = tuning.tiles_per_program if tiles * self._batch >= tuning.busy_tiles else 1
        place = 0 if state_BLS.shape[1] == 1 else level - self._first
        score_children_kernel[(triton.cdiv(tiles, several), self._batch)](
            beam.nodes, beam.ranks, slots, self._stride, engine._tables.first_child,
            tree.level(level - 1).start, tree.level(level).start,
            self._inputs["masks"], self._closed, self._inputs["closed_from"], self._inputs["closed_count"],
            engine._grid.closed.bit_length(),
            engine.node_rows_ND, state_BLS, state_BLS.stride(0), place * state_BLS.shape[2],
            scorer.weights, scorer.vectors, engine.node_rows_ND.shape[1], self._gamma,
            found.nodes, found.ranks, self._candidates, slots * children,
            children, tree.is_uniform(level - 1), engine._tile, several,
            scorer.row_width, *scorer.widths, self._log_activation, num_warps=tuning.warps,
        )  # fmt: skip

    def _select(self, found: _Beam, candidates: int, beam: _Beam, slots: int, size: Literal["beam_size", "m"]) -> None:
        tuning = self._engine._tuning
        width = min(triton.next_power_of_2(candidates), tuning.whole)
        select_kernel[(self._batch,)](
            found.nodes, found.ranks, self._candidates, candidates, self._inputs[size], beam.nodes, beam.ranks, self._stride, slots,
            width, candidates <= width, tuning.bits, min(triton.next_power_of_2(slots), 1024), num_warps=tuning.select_warps,
        )  # fmt: skip

    def _order(self, beam: _Beam) -> None:
        tables, tree, tile = self._engine._tables, self._engine.bundle.tree, 64
        wanted = self._slots[-1]
        order_kernel[(triton.cdiv(wanted, tile), self._batch)](
            beam.nodes, beam.ranks, self._stride, tables.leaf_item, tree.leaf_offset, self._found, self._found_ranks, wanted, self._wanted,
            tile,
        )  # fmt: skip


class _Beam:
    """Nodes int32[B, width] and their ranks float32[B, width], of no value yet."""

    def __init__(self, batch: int, width: int, device: torch.device) -> None:
        self.nodes = torch.empty((batch, width), dtype=torch.int32, device=device)
        self.ranks = torch.empty((batch, width), dtype=torch.float32, device=device)

    def part(self, count: int, width: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The first `width` of the first `count` queries, on the host."""
        return self.nodes[:count, :width].cpu().numpy().astype(np.int64), self.ranks[:count, :width].cpu().numpy().copy()


class _WholeLevels:
    """The levels 1 … `last`, all of whose nodes are scored for their ranks.

    nodes      of those levels and the root
    tiles      int32[tiles, 3]: level − 1, first node and number of nodes of a tile of one level
    ancestors  int32[last, nodes of the last]: each node's ancestors from level 1 down to itself
    """

    def __init__(self, tree: Tree, last: int, tile: int, device: torch.device) -> None:
        self.nodes = tree.level(last).stop
        tiles = [
            (level - 1, first, min(tile, tree.level(level).stop - first))
            for level in range(1, last + 1)
            for first in range(tree.level(level).start, tree.level(level).stop, tile)
        ]
        path = [np.arange(tree.level(last).start, tree.level(last).stop)]
        for _ in range(1, last):
            path.insert(0, tree.parent[path[0]])
        self.tiles = torch.tensor(tiles, dtype=torch.int32, device=device)
        self.ancestors = torch.from_numpy(np.stack(path).astype(np.int32)).to(device)


def _merged(parts: Sequence[tuple[NDArray[np.int64], list[LevelTrace]]], result: SearchResult, tree: Tree) -> tuple[LevelTrace, ...]:
    """The levels of all groups of a call; a level that a group did not visit is empty for its queries."""
    merged = []
    batch = len(result.count_B)
    for level in sorted({entry.level for _, trace in parts for entry in trace}):
        visited = [(members, entry) for members, trace in parts for entry in trace if entry.level == level]
        widths = [max(entry.nodes_BK.shape[1] for _, entry in visited), max(entry.candidates_BC.shape[1] for _, entry in visited)]
        nodes, candidates = (np.full((batch, width), -1, np.int64) for width in widths)
        ranks, candidate_ranks = (np.full((batch, width), -np.inf, np.float32) for width in widths)
        for members, entry in visited:
            nodes[members, : entry.nodes_BK.shape[1]] = entry.nodes_BK
            ranks[members, : entry.nodes_BK.shape[1]] = entry.ranks_BK
            candidates[members, : entry.candidates_BC.shape[1]] = entry.candidates_BC
            candidate_ranks[members, : entry.candidates_BC.shape[1]] = entry.candidate_ranks_BC
        merged.append(LevelTrace(level, nodes, ranks, candidates, candidate_ranks))
    return tuple(merged)


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Of an array in a buffer of many, each of which begins at a multiple of 16."""
    return math.ceil(math.prod(shape) * dtype.itemsize / 16) * 16


def _views(buffer: Tensor, entries: dict[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
    """The arrays in a buffer, one after the other."""
    views, start = {}, 0
    for name, (shape, dtype) in entries.items():
        views[name] = buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        start += _bytes(shape, dtype)
    return views


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _fill(values: NDArray[np.float32], width: int) -> NDArray[np.float32]:
    return np.pad(values, (0, width - len(values)))
