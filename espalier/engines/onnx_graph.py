"""`onnx-cpu` and `onnx-cuda`: the whole beam search as one ONNX graph, run by ONNX Runtime.

Beam sizes fall into buckets [2^j, 2^(j+1) − 1]; each bucket has a graph of its own, built by `compose` when first used or at warm-up.
Node rows and the tree's arrays are put on the device once and shared by all graphs. On CUDA, calls that fit a small grid of batch and
beam sizes run as CUDA graphs with fixed buffers; others run as ordinary sessions.

Legend: B queries, T history, K beam, M results, X excluded nodes, N nodes.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.eligibility import NO_NODE, ExcludedNodes, excluded_nodes
from espalier.engines.compose import Plan, compose
from espalier.errors import DeviceUnavailable
from espalier.queries import QueryBatch, blank_queries
from espalier.search import NO_ITEM, LevelTrace, SearchParams, SearchResult, finish
from espalier.tree import EMPTY_LEAF

Array = NDArray[Any]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Grid:
    """The call sizes that run with fixed shapes: a call is padded up to the next batch, m and excluded width of the grid."""

    batches: tuple[int, ...] = (1, 8, 64, 512)
    wanted: tuple[int, ...] = (64, 256, 1024)
    excluded: int = 128


def cuda_available() -> bool:
    """Whether ONNX Runtime here can reach an NVIDIA GPU."""
    if "CUDAExecutionProvider" not in ort.get_available_providers():
        return False
    ort.preload_dlls()  # the CUDA build has no run path of its own to the libraries
    try:
        ort.OrtValue.ortvalue_from_numpy(np.zeros(1, np.float32), "cuda", 0)
    except Exception as error:  # ONNX Runtime's own classes derive from nothing narrower
        log.info("ONNX Runtime's CUDA provider finds no device: %s", error)
        return False
    return True


class OnnxEngine:
    """See the module.

    device   "cpu" or "cuda"
    threads  intra-op threads of one search on the CPU
    grid     the fixed call sizes; None (the CPU's default) leaves all shapes free
    """

    rounding = 1e-3

    def __init__(self, bundle: Bundle, device: Literal["cpu", "cuda"], threads: int = 1, grid: Grid | None = None) -> None:
        if device == "cuda" and not cuda_available():
            raise DeviceUnavailable(
                "onnx-cuda was asked for, but ONNX Runtime finds no CUDA device; install the `gpu` extra on a machine with one"
            )
        self.name = f"onnx-{device}"
        self.bundle = bundle
        self._device = device
        self._threads = threads
        self._grid = (grid or Grid()) if device == "cuda" else grid
        self._graphs = bundle.graph("query.onnx"), bundle.graph("scorer.onnx")
        self._sessions: dict[Plan, ort.InferenceSession] = {}
        self._fixed_runs: dict[tuple[Plan, int], _FixedRun] = {}
        self._lock = threading.Lock()
        tree = bundle.tree
        self._shared = {
            "node_rows": self._on_device(np.ascontiguousarray(bundle.node_rows_ND, np.float32)),
            "parent": self._on_device(np.append(tree.parent, -1)),
            "leaf_of_item": self._on_device(np.append(tree.leaf_of_item, -1)),
            "first_child": self._on_device(tree.first_child),
            "vacant": self._on_device(tree.items_below == 0),
            "leaf_item": self._on_device(tree.leaf_item),
        }

    def warm_up(self) -> None:
        """Build and run the graph of every beam bucket up to the model's limit, with and without exclusions (with a grid every cell)."""
        limits, tree = self.bundle.manifest.search, self.bundle.tree
        parent = int(tree.parent[tree.leaf_of_item[0]])
        below = tree.leaf_item[tree.first_child[parent] - tree.leaf_offset : tree.first_child[parent + 1] - tree.leaf_offset]
        leaf, whole_node = np.zeros(1, np.int64), below[below != EMPTY_LEAF]
        for batch in self._grid.batches if self._grid else (1,):
            queries = blank_queries(self.bundle.manifest.query, batch)
            for beam_size in (1 << j for j in range(limits.max_beam_size.bit_length())):
                for m in {min(m, limits.max_m) for m in self._grid.wanted} if self._grid else {limits.m}:
                    self.search(queries, SearchParams.uniform(batch, beam_size, m))
                    for excluded in (leaf, whole_node):
                        self.search(queries, SearchParams.uniform(batch, beam_size, m, np.tile(excluded, (batch, 1))))

    def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        tree = self.bundle.tree
        queries.check(tree.item_count)
        params.check(len(queries), tree.item_count)
        excluded = None if params.exclude_BE is None or params.exclude_BE.size == 0 else excluded_nodes(tree, params.exclude_BE)
        bucket_B = np.frexp(params.beam_size_B.astype(np.float64))[1] - 1
        one_by_one = self._device == "cpu" and self._grid is None  # a batch saves a CPU nothing, one query a call does
        groups = (
            [np.array([b]) for b in range(len(queries))] if one_by_one else [np.flatnonzero(bucket_B == j) for j in np.unique(bucket_B)]
        )
        shape = len(queries), int(params.m_B.max(initial=0))
        rows_BM, ranks_BM = np.full(shape, NO_ITEM, np.int64), np.full(shape, -np.inf, np.float32)
        parts = []
        for members in groups:
            part = SearchParams(params.beam_size_B[members], params.m_B[members], trace=params.trace)
            rows, ranks, levels = self._run(queries.take(members), part, excluded and excluded.take(members), int(bucket_B[members[0]]))
            width = min(rows.shape[1], shape[1])
            rows_BM[members, :width], ranks_BM[members, :width] = rows[:, :width], ranks[:, :width]
            parts.append((members, levels))
        eligible_B = np.full(len(queries), tree.item_count, np.int64)
        eligible_B -= excluded.count_B if excluded is not None else 0
        trace = _merge(parts, len(queries)) if params.trace else None
        return finish(self.bundle.manifest.ranking, params.m_B, eligible_B, rows_BM, ranks_BM, trace)

    def _run(
        self, queries: QueryBatch, params: SearchParams, excluded: ExcludedNodes | None, bucket: int
    ) -> tuple[Array, Array, tuple[LevelTrace, ...] | None]:
        """One session run: item rows [B, M] and ranks [B, M] of queries whose beams are of one bucket, and the levels kept."""
        low, high = 1 << bucket, (2 << bucket) - 1
        wanted = int(params.m_B.max(initial=1))
        feeds: dict[str, Array] = {queries.kind.kind: queries.array, "beam_size": params.beam_size_B}
        if excluded is not None:
            feeds |= {"excluded_leaves": excluded.leaves_BX, "excluded_inner": excluded.inner_BX}
        closed: Literal["none", "leaves", "leaves and inner"] = "none"
        if excluded is not None:
            closed = "leaves and inner" if (excluded.inner_BX >= 0).any() else "leaves"
        plan = Plan(low, high, single=len(queries) == 1, excluded=closed, trace=params.trace)
        fixed = self._fixed(len(queries), plan, wanted, excluded)
        if fixed is not None:
            return *fixed.run(feeds, len(queries)), None
        session = self._session(plan)
        feeds |= {"kept": np.array([params.beam_size_B.max(initial=1)]), "wanted": np.array([wanted])}
        binding = self._bound(session)
        for entry in session.get_inputs():
            if entry.name in feeds:
                binding.bind_cpu_input(entry.name, feeds[entry.name])
        names = [entry.name for entry in session.get_outputs()]
        for name in names:
            binding.bind_output(name, "cpu")
        session.run_with_iobinding(binding)
        arrays = dict(zip(names, binding.copy_outputs_to_cpu(), strict=True))
        trace = None
        if params.trace:
            levels = (int(name[6:]) for name in names if name.startswith("nodes_"))
            trace = tuple(_level(h, arrays[f"nodes_{h}"], arrays[f"ranks_{h}"]) for h in levels)
        return arrays["item_rows"], arrays["ranks"], trace

    def _fixed(self, batch: int, plan: Plan, wanted: int, excluded: ExcludedNodes | None) -> _FixedRun | None:
        """The run with fixed shapes that a call fits, or None."""
        grid = self._grid
        if grid is None or plan.trace or batch > grid.batches[-1] or wanted > grid.wanted[-1]:
            return None
        if excluded is not None and max(excluded.leaves_BX.shape[1], excluded.inner_BX.shape[1]) > grid.excluded:
            return None
        size = next(size for size in grid.batches if size >= batch)
        plan = replace(
            plan,
            single=False,
            excluded="none" if excluded is None else "leaves and inner",
            wanted=next(size for size in grid.wanted if size >= wanted),
        )
        with self._lock:
            run = self._fixed_runs.get((plan, size))
            if run is None:
                session = self._new_session(plan, {"B": size, "excluded_leaves_X": grid.excluded, "excluded_inner_X": grid.excluded})
                run = self._fixed_runs[plan, size] = _FixedRun(session, self._bound(session), self._device)
        return run

    def _session(self, plan: Plan) -> ort.InferenceSession:
        """The session of a plan with free shapes."""
        with self._lock:
            if plan not in self._sessions:
                self._sessions[plan] = self._new_session(plan)
            return self._sessions[plan]

    def _new_session(self, plan: Plan, fixed: dict[str, int] | None = None) -> ort.InferenceSession:
        """A session; with fixed dimensions, so that shape arithmetic folds away and a CUDA graph can be captured."""
        manifest = self.bundle.manifest
        model = compose(*self._graphs, self.bundle.tree, manifest.ranking, manifest.query, manifest.scorer, plan)
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 3  # graph clean-up notes are no news
        for name, size in (fixed or {}).items():
            options.add_free_dimension_override_by_name(name, size)
        providers: list[Any] = ["CPUExecutionProvider"]
        if self._device == "cuda":
            providers.insert(0, ("CUDAExecutionProvider", {"use_tf32": "0", "enable_cuda_graph": "1" if fixed else "0"}))
        return ort.InferenceSession(model, options, providers=providers)

    def _bound(self, session: ort.InferenceSession) -> ort.IOBinding:
        binding = session.io_binding()
        for entry in session.get_inputs():
            if entry.name in self._shared:
                binding.bind_ortvalue_input(entry.name, self._shared[entry.name])
        return binding

    def _on_device(self, array: Array) -> ort.OrtValue:
        return ort.OrtValue.ortvalue_from_numpy(array, self._device, 0)


class _FixedRun:
    """One session with one batch size and buffers that stay where they are, as a CUDA graph needs."""

    def __init__(self, session: ort.InferenceSession, binding: ort.IOBinding, device: str) -> None:
        self._session, self._binding, self._lock = session, binding, threading.Lock()
        self._host: dict[str, Array] = {}
        self._device: dict[str, ort.OrtValue] = {}
        for entry in session.get_inputs():
            if entry.name in ("history", "vector", "beam_size", "excluded_leaves", "excluded_inner"):
                dtype, filler = (
                    (np.float32, 0) if entry.type == "tensor(float)" else (np.int64, 1 if entry.name == "beam_size" else NO_NODE)
                )
                self._host[entry.name] = np.full(entry.shape, filler, dtype)
                self._device[entry.name] = ort.OrtValue.ortvalue_from_numpy(self._host[entry.name], device, 0)
                binding.bind_ortvalue_input(entry.name, self._device[entry.name])
        # Before the first run, which captures the CUDA graph and with it the addresses of these buffers.
        self._outputs: dict[str, ort.OrtValue] = {}
        for entry in session.get_outputs():
            blank = np.zeros(entry.shape, np.float32 if entry.type == "tensor(float)" else np.int64)
            self._outputs[entry.name] = ort.OrtValue.ortvalue_from_numpy(blank, device, 0)
            binding.bind_ortvalue_output(entry.name, self._outputs[entry.name])

    def run(self, feeds: dict[str, Array], batch: int) -> tuple[Array, Array]:
        with self._lock:
            for name, host in self._host.items():
                feed = feeds[name]
                if name.startswith("excluded"):
                    host[:batch] = NO_NODE
                    host[:batch, : feed.shape[1]] = feed
                else:
                    host[:batch] = feed
                self._device[name].update_inplace(host)
            self._session.run_with_iobinding(self._binding)
            return self._outputs["item_rows"].numpy()[:batch].copy(), self._outputs["ranks"].numpy()[:batch].copy()


def _level(level: int, nodes: Array, ranks: Array) -> LevelTrace:
    nodes = np.where(ranks > -np.inf, nodes, -1)
    return LevelTrace(level, nodes, ranks)


def _merge(parts: list[tuple[NDArray[np.int64], tuple[LevelTrace, ...] | None]], batch: int) -> tuple[LevelTrace, ...]:
    """The traces of several buckets as one; a level that a bucket did not visit is empty for its queries."""
    levels: dict[int, list[tuple[NDArray[np.int64], LevelTrace]]] = {}
    for members, trace in parts:
        for level in trace or ():
            levels.setdefault(level.level, []).append((members, level))
    merged = []
    for h, entries in sorted(levels.items()):
        width = max(level.nodes_BK.shape[1] for _, level in entries)
        nodes = np.full((batch, width), -1, np.int64)
        ranks = np.full((batch, width), -np.inf, np.float32)
        for members, level in entries:
            nodes[members, : level.nodes_BK.shape[1]] = level.nodes_BK
            ranks[members, : level.ranks_BK.shape[1]] = level.ranks_BK
        merged.append(LevelTrace(h, nodes, ranks))
    return tuple(merged)
