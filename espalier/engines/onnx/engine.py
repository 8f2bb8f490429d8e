"""`onnx-cpu` and `onnx-cuda`: the whole beam search as one ONNX graph, run by ONNX Runtime.

Beam sizes fall into buckets [2^j, 2^(j+1) − 1]; each bucket has a graph of its own, built by `compose` when first used or at warm-up.
Node rows and the tree's arrays are put on the device once and shared by all graphs. On CUDA, calls that fit a few sizes of batch and
beam sizes run as CUDA graphs with fixed buffers; others, and all with filters, run as ordinary sessions.

Legend: B queries, T history, K beam, C candidates, M results, X excluded nodes, N nodes, F masks.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.engines.frontiers import beam_is_frontier, frontier_of
from espalier.engines.given_states import blank_states, check_queries
from espalier.engines.onnx.compose import Plan, compose
from espalier.engines.onnx.runtime import ort, session_options
from espalier.errors import DeviceUnavailable
from espalier.masks.eligibility import NO_NODE, EligibleNodes, ExcludedNodes, eligible_nodes, every_item
from espalier.queries import QueryBatch, VectorKind, blank_queries
from espalier.scores import finish
from espalier.search import NO_ITEM, Frontier, LevelTrace, MemoryLookup, NodeMask, SearchParams, SearchResult
from espalier.trace import from_start_level
from espalier.tree import Tree

if TYPE_CHECKING:  # numba takes a while to import
    from espalier.memory_lists import MemoryLists

Array = NDArray[Any]
log = logging.getLogger(__name__)

WIDE = 128
"""Excluded nodes of one query that are compared with its candidates one by one."""
MEMORY_CELLS = 1 << 26
"""Queries times nodes, of one run of several queries with a memory: a float32 each."""
FRONTIER = ("frontier_nodes", "frontier_ranks", "leaf_states")
"""Outputs that are bound where they are asked for."""
FREEING_PAUSE_S = 1e-3
"""Between two sessions that are freed."""


@dataclass(frozen=True)
class FixedShapes:
    """The call sizes that run with fixed shapes: a call is padded up to the next batch size, m and width of exclusions.

    memory  nodes of one query that may have memory
    """

    batches: tuple[int, ...] = (1, 8, 64, 512)
    m_sizes: tuple[int, ...] = (64, 256, 1024)
    excluded: int = 128
    memory: int = 4096


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
    shapes     the fixed call sizes; None (the CPU's default) leaves all shapes free
    """

    rounding = 1e-3

    def __init__(self, bundle: Bundle, device: Literal["cpu", "cuda"], threads: int = 1, shapes: FixedShapes | None = None) -> None:
        if device == "cuda" and not cuda_available():
            raise DeviceUnavailable(
                "onnx-cuda needs a CUDA device, and ONNX Runtime finds none; install the `gpu` extra on a machine with one"
            )
        self.name = f"onnx-{device}"
        self.bundle = bundle
        self._device = device
        self._threads = threads
        self._shapes = (shapes or FixedShapes()) if device == "cuda" else shapes
        self._graphs = bundle.graph("query.onnx"), bundle.graph("scorer.onnx")
        self._sessions: dict[Plan, ort.InferenceSession] = {}
        self._fixed_runs: dict[tuple[Plan, int], _FixedRun] = {}
        self._lock, self._building = threading.Lock(), threading.Lock()
        tree = bundle.tree
        self._every_item = every_item(tree)
        self._has_empty_leaves = not self._every_item.eligible_N.all()
        self._masks: weakref.WeakKeyDictionary[NodeMask, ort.OrtValue] = weakref.WeakKeyDictionary()
        self._shared = {
            "node_rows": self._on_device(np.ascontiguousarray(bundle.node_rows_ND, np.float32)),
            "parent": self._on_device(np.append(tree.parent, -1)),
            "leaf_of_item": self._on_device(np.append(tree.leaf_of_item, -1)),
            "first_child": self._on_device(tree.first_child),
            "leaf_item": self._on_device(tree.leaf_item),
            "eligible": self._mask_on_device(self._every_item),
        }
        self._memory_tree: MemoryLookup | None = None
        if bundle.memory is not None:
            from espalier.memory_lists import MemoryTree  # numba takes a while to import

            self._memory_tree = MemoryTree(bundle.memory, tree)
            self._largest_part, self._key_weight = bundle.memory.largest_part, np.float32(bundle.memory.key_weight)
            self._own = threading.local()  # float32[N] of λ · mem, all 0 between calls
            if self._shapes is not None:  # else each run is for one query
                self._shared["no_memory"] = self._on_device(np.zeros((1, tree.node_count), np.float32))

    @property
    def session_count(self) -> int:
        """How many graphs have been built; warm-up is to build all that a query may need."""
        return len(self._sessions) + len(self._fixed_runs)

    def warm_up(self) -> None:
        """Build and run the graphs of every beam bucket up to the model's limit, with and without exclusions and filters.

        With fixed shapes, all of them.
        """
        limits = self.bundle.manifest.search
        leaf, root = self.bundle.tree.leaf_offset, 0
        for batch in self._shapes.batches if self._shapes else (1,):
            queries, states_BLS = blank_queries(self.bundle.manifest.query, batch), blank_states(self.bundle, batch)
            some = [
                ExcludedNodes(np.full((batch, 1), leaf), np.full((batch, 1), inner), np.ones(batch, np.int64)) for inner in (NO_NODE, root)
            ]
            for bucket in range(limits.max_beam_size.bit_length()):
                for m in {min(m, limits.max_m) for m in self._shapes.m_sizes} if self._shapes else {limits.m}:
                    for mask in (None, self._every_item):
                        for excluded in (None, *some):
                            params = replace(SearchParams.uniform(batch, 1 << bucket, m, mask=mask), states_BLS=states_BLS)
                            self._run(queries, params, excluded, self._lists(queries, params), bucket)

    def close(self) -> None:
        """Free the sessions one by one: fifty at once hold the interpreter for 40 to 80 ms."""
        for kept in (self._sessions, self._fixed_runs):
            while kept:
                kept.popitem()
                time.sleep(FREEING_PAUSE_S)

    def prepare(self, params: SearchParams) -> None:
        params, excluded = self._long_lists_as_masks(params, eligible_nodes(self.bundle.tree, params, len(params.m_B), None).excluded)
        for members, bucket in self._groups(params):
            self._session(self._plan(params.take(members), excluded and excluded.take(members), bucket))

    def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        tree, memory = self.bundle.tree, self._memory_of(params)
        check_queries(self.bundle, queries, params, None if memory is None else memory.item_count)
        eligible = eligible_nodes(tree, params, len(queries), None)
        params, excluded = self._long_lists_as_masks(params, eligible.excluded)
        lists = None if memory is None else memory.lists(queries.array, eligible)
        shape = len(queries), int(params.m_B.max(initial=0))
        rows_BM, ranks_BM = np.full(shape, NO_ITEM, np.int64), np.full(shape, -np.inf, np.float32)
        keys_BM = None if lists is None else ranks_BM.copy()
        finite_B = np.ones(len(queries), np.bool_) if isinstance(queries.kind, VectorKind) else None
        outputs = []
        for members, bucket in self._groups(params):
            own = excluded and excluded.take(members), lists and lists.take(members)
            part = self._run(queries.take(members), params.take(members), *own, bucket)
            rows, ranks = part["item_rows"], part["ranks"]
            width = min(rows.shape[1], shape[1])
            rows_BM[members, :width], ranks_BM[members, :width] = rows[:, :width], ranks[:, :width]
            if keys_BM is not None:
                keys_BM[members, :width] = part["keys"][:, :width]
            if finite_B is not None:
                finite_B[members] = part["finite"] > 0 if "finite" in part else True
            outputs.append((members, part))
        frontiers = (self._frontier(outputs, params, eligible),) if params.frontier else ()
        ranking = self.bundle.manifest.ranking
        result = finish(ranking, params.m_B, eligible.items_B, rows_BM, ranks_BM, None, finite_B, keys_BM, frontiers)
        if not params.trace:
            return result
        return replace(result, trace=from_start_level(tree, params.beam_size_B, self._trace(outputs, result)))

    def _long_lists_as_masks(self, params: SearchParams, excluded: ExcludedNodes | None) -> tuple[SearchParams, ExcludedNodes | None]:
        """Queries with more than WIDE excluded nodes get a mask without them instead: a list is compared with every candidate."""
        if excluded is None or max(excluded.leaves_BX.shape[1], excluded.inner_BX.shape[1]) <= WIDE:
            return params, excluded
        mask_B = list(params.mask_B or (None,) * len(params.m_B))
        lists = [excluded.leaves_BX.copy(), excluded.inner_BX.copy()]
        wide_B = np.max([np.count_nonzero(nodes_BX != NO_NODE, axis=1) for nodes_BX in lists], axis=0) > WIDE
        for b in np.flatnonzero(wide_B).tolist():
            eligible_N = (mask_B[b] or self._every_item).eligible_N.copy()
            for nodes_BX in lists:
                eligible_N[nodes_BX[b][nodes_BX[b] != NO_NODE]] = False
                nodes_BX[b] = NO_NODE
            mask_B[b] = NodeMask(eligible_N, int(np.count_nonzero(eligible_N[self.bundle.tree.leaf_offset :])))
        leaves_BX, inner_BX = (nodes_BX[:, :WIDE] for nodes_BX in lists)
        return replace(params, mask_B=tuple(mask_B)), ExcludedNodes(leaves_BX, inner_BX, excluded.count_B)

    def _groups(self, params: SearchParams) -> list[tuple[NDArray[np.int64], int]]:
        """Which queries (int64 positions) share a session run, and their beam bucket."""
        bucket_B = np.frexp(params.beam_size_B.astype(np.float64))[1] - 1
        if self._device == "cpu" and self._shapes is None:  # a batch saves a CPU nothing, one query a call does
            return [(np.array([b]), int(bucket)) for b, bucket in enumerate(bucket_B)]
        groups = [(np.flatnonzero(bucket_B == bucket), int(bucket)) for bucket in np.unique(bucket_B)]
        most = len(bucket_B) if self.bundle.memory is None else max(1, MEMORY_CELLS // self.bundle.tree.node_count)
        return [(members[b : b + most], bucket) for members, bucket in groups for b in range(0, len(members), most)]

    def _plan(self, params: SearchParams, excluded: ExcludedNodes | None, bucket: int) -> Plan:
        """What the graph of some queries of one bucket must be able to do."""
        masked = _filtered(params) or self._has_empty_leaves
        kinds: Literal["none", "leaves", "leaves and inner"] = "none"
        if excluded is not None and (excluded.leaves_BX >= 0).any():
            kinds = "leaves and inner" if masked or (excluded.inner_BX >= 0).any() else "leaves"
        part = None if self.bundle.memory is None else self._largest_part
        single = len(params.m_B) == 1 and (part is None or self._device == "cpu")  # a GPU is sent lists, not an array of all nodes
        beams = 1 << bucket, (2 << bucket) - 1
        return Plan(
            *beams,
            single,
            careful=not single,
            excluded=kinds,
            masked=masked,
            trace=params.trace,
            states=params.states_BLS is not None,
            largest_part=part,
        )

    def _run(
        self, queries: QueryBatch, params: SearchParams, excluded: ExcludedNodes | None, lists: MemoryLists | None, bucket: int
    ) -> dict[str, Array]:
        """The outputs of one session run for queries whose beams are of one bucket: `item_rows`, `ranks`, and those of a trace.

        A single query is searched again, with care, where its logits turn out not to be finite: care on each level would cost every query.
        """
        wanted = int(params.m_B.max(initial=1))
        plan = self._plan(params, excluded, bucket)
        feeds: dict[str, Array] = {queries.kind.kind: queries.array, "beam_size": params.beam_size_B}
        if params.states_BLS is not None:
            feeds["states"] = params.states_BLS
        if excluded is not None:
            feeds |= {"excluded_leaves": excluded.leaves_BX, "excluded_inner": excluded.inner_BX}
        width = 0
        if lists is not None:
            memory_nodes, values = lists.padded()
            width = memory_nodes.shape[1]
            feeds |= {"memory_nodes": memory_nodes, "memory_values": self._key_weight * values}
        fixed = None if _filtered(params) else self._fixed(len(queries), plan, wanted, excluded, width)
        if fixed is not None:
            return fixed.run(feeds, len(queries), params.frontier)
        with self._remembered(plan, feeds) as feeds:
            outputs = self._run_plan(plan, feeds, params)
            if not plan.careful and np.isnan(outputs["ranks"][0, 0]):
                outputs = self._run_plan(replace(plan, careful=True), feeds, params)
        return outputs

    @contextmanager
    def _remembered(self, plan: Plan, feeds: dict[str, Array]) -> Iterator[dict[str, Array]]:
        """The feeds with the dense memory that a plan for a single query takes: this thread's array, filled here and cleared after it."""
        if not plan.single or plan.largest_part is None:
            yield feeds
            return
        memory_N = getattr(self._own, "memory_N", None)
        if memory_N is None:
            memory_N = self._own.memory_N = np.zeros(self.bundle.tree.node_count, np.float32)
        nodes_X = feeds["memory_nodes"][0]
        memory_N[nodes_X] = feeds["memory_values"][0]
        try:
            yield feeds | {"memory": memory_N}
        finally:
            memory_N[nodes_X] = 0

    def _lists(self, queries: QueryBatch, params: SearchParams) -> MemoryLists | None:
        """What a memory gives for queries without exclusions."""
        memory = self._memory_of(params)
        return None if memory is None else memory.lists(queries.array, eligible_nodes(self.bundle.tree, params, len(queries), None))

    def _memory_of(self, params: SearchParams) -> MemoryLookup | None:
        """The memory that a search asks; None where the bundle has none."""
        return None if self._memory_tree is None else params.memory or self._memory_tree

    def _run_plan(self, plan: Plan, feeds: dict[str, Array], params: SearchParams) -> dict[str, Array]:
        """The outputs of a session with free shapes."""
        session = self._session(plan)
        wanted = int(params.m_B.max(initial=1))
        feeds = feeds | {"kept": np.array([params.beam_size_B.max(initial=1)]), "wanted": np.array([wanted])}
        binding = self._bound(session)
        if plan.masked:
            masks = params.mask_B if params.mask_B is not None else (None,) * len(params.m_B)
            eligible, feeds["mask_of"] = self._joined_masks(masks)
            binding.bind_ortvalue_input("eligible", eligible)
        for entry in session.get_inputs():
            if entry.name in feeds:
                binding.bind_cpu_input(entry.name, feeds[entry.name])
        names = [entry.name for entry in session.get_outputs() if params.frontier or entry.name not in FRONTIER]
        for name in names:
            binding.bind_output(name, "cpu")
        session.run_with_iobinding(binding)
        return dict(zip(names, binding.copy_outputs_to_cpu(), strict=True))

    def _joined_masks(self, mask_B: Sequence[NodeMask | None]) -> tuple[ort.OrtValue, NDArray[np.int64]]:
        """The distinct masks of some queries end to end, bool[F · N], and which of them is each query's, int64[B]."""
        masks = [self._every_item if mask is None else mask for mask in mask_B]
        number = {mask: f for f, mask in enumerate(dict.fromkeys(masks))}
        mask_of_B = np.array([number[mask] for mask in masks])
        if len(number) == 1:
            return self._mask_on_device(masks[0]), mask_of_B
        return self._on_device(np.concatenate([mask.eligible_N for mask in number])), mask_of_B

    def _mask_on_device(self, mask: NodeMask) -> ort.OrtValue:
        """A mask where the graphs can read it: put there once and for as long as the mask lives; on a CPU it is the mask's own memory."""
        with self._lock:
            if mask not in self._masks:
                self._masks[mask] = self._on_device(mask.eligible_N)
            return self._masks[mask]

    def _fixed(self, batch: int, plan: Plan, wanted: int, excluded: ExcludedNodes | None, memory: int) -> _FixedRun | None:
        """The run with fixed shapes that a call without filters fits, or None. memory: nodes of a query that have some."""
        shapes = self._shapes
        if shapes is None or plan.trace or batch > shapes.batches[-1] or wanted > shapes.m_sizes[-1]:
            return None
        if excluded is not None and max(excluded.leaves_BX.shape[1], excluded.inner_BX.shape[1]) > shapes.excluded:
            return None
        size = next(size for size in shapes.batches if size >= batch)
        if memory > shapes.memory or (plan.largest_part is not None and size * self.bundle.tree.node_count > MEMORY_CELLS):
            return None
        plan = replace(
            plan,
            single=False,
            careful=True,
            excluded="none" if excluded is None else "leaves and inner",
            wanted=next(size for size in shapes.m_sizes if size >= wanted),
        )
        with self._building:
            run = self._fixed_runs.get((plan, size))
            if run is None:
                sizes = {"B": size, "F_N": self.bundle.tree.node_count}
                sizes |= {"excluded_leaves_X": shapes.excluded, "excluded_inner_X": shapes.excluded, "memory_X": shapes.memory}
                session = self._new_session(plan, sizes)
                run = self._fixed_runs[plan, size] = _FixedRun(session, self._bound(session), self._device)
        return run

    def _trace(self, parts: Sequence[tuple[NDArray[np.int64], dict[str, Array]]], result: SearchResult) -> tuple[LevelTrace, ...]:
        """The levels of all runs of a call; a level that a run did not visit is empty for its queries."""
        tree, batch = self.bundle.tree, len(result.count_B)
        levels = []
        for h in range(1, tree.height + 1):
            visited = [(members, outputs) for members, outputs in parts if f"candidates_{h}" in outputs]
            if visited:
                key = "ranks" if self.bundle.memory is None else "keys"
                chosen, chosen_keys = (_rows(visited, f"candidates_{h}", f"candidate_{name}_{h}", batch) for name in ("ranks", key))
                if h < tree.height:
                    kept, kept_keys = (_rows(visited, f"nodes_{h}", f"{name}_{h}", batch) for name in ("ranks", key))
                else:
                    kept, kept_keys = (_leaves(tree, result, ranks_BM) for ranks_BM in (result.ranks_BM, result.keys_BM))
                levels.append(LevelTrace(h, *kept, *chosen, kept_keys[1], chosen_keys[1]))
        return tuple(levels)

    def _frontier(
        self, parts: Sequence[tuple[NDArray[np.int64], dict[str, Array]]], params: SearchParams, eligible: EligibleNodes
    ) -> Frontier:
        """Of all runs of a call."""
        batch = len(params.m_B)
        states_BS = parts[0][1]["leaf_states"]
        if len(parts) > 1:
            states_BS = np.empty((batch, states_BS.shape[1]), np.float32)
            for members, outputs in parts:
                states_BS[members] = outputs["leaf_states"]
        scored = [(members, outputs) for members, outputs in parts if "frontier_nodes" in outputs]
        if len(scored) == len(parts) == 1:
            beams = scored[0][1]["frontier_nodes"], scored[0][1]["frontier_ranks"]
        elif scored:
            beams = _rows(scored, "frontier_nodes", "frontier_ranks", batch)
        else:
            beams = np.empty((batch, 0), np.int64), np.empty((batch, 0), np.float32)
        if beam_is_frontier(self.bundle.tree, params.beam_size_B, beams[1]):
            return Frontier(*beams, states_BS)
        eligible = replace(eligible, mask_B=tuple(mask or self._every_item for mask in eligible.mask_B))
        return frontier_of(self.bundle.tree, self.bundle.manifest.ranking.gamma, params.beam_size_B, eligible, *beams, states_BS)

    def _session(self, plan: Plan) -> ort.InferenceSession:
        """The session of a plan with free shapes. One that is there is not waited for while another is being built."""
        session = self._sessions.get(plan)
        if session is None:
            with self._building:
                session = self._sessions.get(plan) or self._sessions.setdefault(plan, self._new_session(plan))
        return session

    def _new_session(self, plan: Plan, fixed: dict[str, int] | None = None) -> ort.InferenceSession:
        """A session; with fixed dimensions, so that shape arithmetic folds away and a CUDA graph can be captured."""
        manifest = self.bundle.manifest
        model = compose(*self._graphs, self.bundle.tree, manifest.ranking, self.bundle.graph_kind, self.bundle.graph_scorer, plan)
        options = session_options(self._threads)
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


FIXED_FILLERS = {
    "history": -1, "vector": 0, "beam_size": 1, "excluded_leaves": NO_NODE, "excluded_inner": NO_NODE, "mask_of": 0,
    "memory_nodes": 0, "memory_values": 0, "states": 0,
}  # fmt: skip
"""The inputs of a fixed run that have a buffer of their own, and their first values. Later, rows past a call's queries hold queries of
earlier calls; their answers are not read."""


def _filtered(params: SearchParams) -> bool:
    return params.mask_B is not None and any(mask is not None for mask in params.mask_B)


class _FixedRun:
    """One session with one batch size and buffers that stay where they are, as a CUDA graph needs."""

    def __init__(self, session: ort.InferenceSession, binding: ort.IOBinding, device: str) -> None:
        self._session, self._binding, self._lock = session, binding, threading.Lock()
        self._host: dict[str, Array] = {}
        self._device: dict[str, ort.OrtValue] = {}
        for entry in session.get_inputs():
            if entry.name in FIXED_FILLERS:
                dtype = np.float32 if entry.type == "tensor(float)" else np.int64
                self._host[entry.name] = np.full(entry.shape, FIXED_FILLERS[entry.name], dtype)
                self._device[entry.name] = ort.OrtValue.ortvalue_from_numpy(self._host[entry.name], device, 0)
                binding.bind_ortvalue_input(entry.name, self._device[entry.name])
        # Before the first run, which captures the CUDA graph and with it the addresses of these buffers.
        self._outputs: dict[str, ort.OrtValue] = {}
        for entry in session.get_outputs():
            blank = np.zeros(entry.shape, np.float32 if entry.type == "tensor(float)" else np.int64)
            self._outputs[entry.name] = ort.OrtValue.ortvalue_from_numpy(blank, device, 0)
            binding.bind_ortvalue_output(entry.name, self._outputs[entry.name])

    def run(self, feeds: dict[str, Array], batch: int, frontier: bool) -> dict[str, Array]:
        with self._lock:
            for name in feeds.keys() & self._host.keys():
                host, feed = self._host[name], feeds[name]
                if name.startswith(("excluded", "memory")):
                    host[:batch] = FIXED_FILLERS[name]
                    host[:batch, : feed.shape[1]] = feed
                else:
                    host[:batch] = feed
                self._device[name].update_inplace(host)
            self._session.run_with_iobinding(self._binding)
            wanted = {name: value for name, value in self._outputs.items() if frontier or name not in FRONTIER}
            return {name: value.numpy()[:batch].copy() for name, value in wanted.items()}


def _rows(
    parts: Sequence[tuple[NDArray[np.int64], dict[str, Array]]], nodes_name: str, ranks_name: str, batch: int
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """One level's nodes and ranks of several runs as one array each; nodes are −1 where the rank is −inf."""
    width = max(outputs[nodes_name].shape[1] for _, outputs in parts)
    nodes, ranks = np.full((batch, width), -1, np.int64), np.full((batch, width), -np.inf, np.float32)
    for members, outputs in parts:
        part = outputs[ranks_name]
        nodes[members, : part.shape[1]] = np.where(part > -np.inf, outputs[nodes_name], -1)
        ranks[members, : part.shape[1]] = part
    return nodes, ranks


def _leaves(tree: Tree, result: SearchResult, ranks_BM: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The leaves of the items that came back, in ascending order, and their ranks, or keys."""
    leaves_BM = np.where(result.item_rows_BM >= 0, tree.leaf_of_item[result.item_rows_BM], tree.node_count)
    order_BM = np.argsort(leaves_BM, axis=1)
    leaves_BM = np.take_along_axis(leaves_BM, order_BM, axis=1)
    return np.where(leaves_BM < tree.node_count, leaves_BM, -1), np.take_along_axis(ranks_BM, order_BM, axis=1)
