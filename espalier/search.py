"""What every engine takes and gives back, and how one is opened.

Knows the parameters of a search, its result, the Engine protocol and which engine fits a device. Does not know how a search is done.

Legend: B queries, E excluded items, M results, K beam, C candidates, N nodes, L levels.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from espalier.bundle import Bundle
from espalier.engines.cuda import gpu_present
from espalier.errors import DeviceUnavailable, InvalidQuery, UnsupportedGraph
from espalier.manifest import LinearScorer, Ranking
from espalier.queries import QueryBatch

log = logging.getLogger(__name__)

NO_ITEM = -1
"""Padding in `item_rows_BM` and `exclude_BE`."""


@dataclass(frozen=True, eq=False)
class NodeMask:
    """What a filter leaves of a tree; `espalier.masks.eligibility.node_mask` makes one. Compared and hashed by identity.

    open_N  bool[N]   True where an eligible item lies below the node, a leaf's own item included
    items   how many items are eligible
    """

    open_N: NDArray[np.bool_]
    items: int


@dataclass(frozen=True)
class SearchParams:
    """Per-query knobs of one `search()` call.

    beam_size_B   int64[B], ≥ 1   nodes kept on the levels 1 … H − 1
    m_B           int64[B], ≥ 1   results wanted; may exceed the beam size
    exclude_BE    int64[B, E] or None   item rows that must not come back, NO_ITEM as padding; repeats are allowed
    trace         keep the candidates and the beams of each level in the result
    mask_B        None, or each query's NodeMask, None where all items are eligible; queries of one filter should share one object
    """

    beam_size_B: NDArray[np.int64]
    m_B: NDArray[np.int64]
    exclude_BE: NDArray[np.int64] | None = None
    trace: bool = False
    mask_B: tuple[NodeMask | None, ...] | None = None

    @staticmethod
    def uniform(
        batch: int,
        beam_size: int,
        m: int,
        exclude_BE: NDArray[np.int64] | None = None,
        trace: bool = False,
        mask: NodeMask | None = None,
    ) -> SearchParams:
        """The same beam size, m and mask for every query."""
        mask_B = None if mask is None else (mask,) * batch
        return SearchParams(np.full(batch, beam_size, np.int64), np.full(batch, m, np.int64), exclude_BE, trace, mask_B)

    def take(self, queries: NDArray[np.int64]) -> SearchParams:
        """Those of the queries at some positions (int64)."""
        return SearchParams(
            self.beam_size_B[queries],
            self.m_B[queries],
            None if self.exclude_BE is None else self.exclude_BE[queries],
            self.trace,
            None if self.mask_B is None else tuple(self.mask_B[b] for b in queries.tolist()),
        )

    def check(self, batch: int, items: int, nodes: int | None = None) -> None:
        """Raise InvalidQuery unless the arrays fit `batch` queries over `items` items and, where it is told, a tree of `nodes` nodes."""
        for name in ("beam_size_B", "m_B"):
            array = getattr(self, name)
            if array.shape != (batch,) or array.dtype != np.int64:
                raise InvalidQuery(name, f"{array.dtype}{list(array.shape)}", f"int64[{batch}], one per query")
            if batch and array.min() < 1:
                raise InvalidQuery(name, int(array.min()), "at least 1")
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
                open_N = mask.open_N
                if open_N.dtype != np.bool_ or open_N.ndim != 1 or nodes not in (None, len(open_N)):
                    raise InvalidQuery("mask_B", f"{open_N.dtype}{list(open_N.shape)}", f"bool[{'N' if nodes is None else nodes}]")


@dataclass(frozen=True)
class LevelTrace:
    """What one level of a search scored and kept, for every query of the call.

    level               h
    nodes_BK            int64[B, K]     the nodes kept, ascending, −1 where a slot is empty; on level H the best m leaves
    ranks_BK            float32[B, K]   their ranks, −inf where a slot is empty
    candidates_BC       int64[B, C]     the nodes that were chosen from, −1 where a slot is empty or its node has no eligible item below
    candidate_ranks_BC  float32[B, C]   their ranks, −inf in those slots
    """

    level: int
    nodes_BK: NDArray[np.int64]
    ranks_BK: NDArray[np.float32]
    candidates_BC: NDArray[np.int64]
    candidate_ranks_BC: NDArray[np.float32]


@dataclass(frozen=True)
class SearchResult:
    """The answer to one `search()` call.

    item_rows_BM  int64[B, M]     best first, NO_ITEM as padding; M = max of m_B
    scores_BM     float32[B, M]   in [0, 1], 0 where there is no item
    ranks_BM      float32[B, M]   what the items were ordered by, −inf where there is no item
    count_B       int64[B]        items in each row
    complete_B    bool[B]         False iff fewer than min(m, eligible items) came back
    trace         the levels from the start level to H, when asked for
    finite_B      bool[B]         for vectors: False iff some node that was scored has a logit that is not finite; None for other kinds
    """

    item_rows_BM: NDArray[np.int64]
    scores_BM: NDArray[np.float32]
    ranks_BM: NDArray[np.float32]
    count_B: NDArray[np.int64]
    complete_B: NDArray[np.bool_]
    trace: tuple[LevelTrace, ...] | None = None
    finite_B: NDArray[np.bool_] | None = None


class Engine(Protocol):
    """Searches one bundle. Holds no search knob: those are arguments of `search()`."""

    @property
    def name(self) -> str:
        """`reference`, `onnx-cpu`, `onnx-cuda`, `triton`, `sparse-cpu`, `sparse-cuda`: the name in JSON and metrics."""
        ...

    @property
    def rounding(self) -> float:
        """ε: how far a rank may be from exact arithmetic; closer candidates may change places."""
        ...

    def search(self, queries: QueryBatch, params: SearchParams) -> SearchResult:
        """The top m eligible items of each query. The same query gives the same answer in any batch."""
        ...

    def warm_up(self) -> None:
        """Build and run what the first queries would otherwise wait for."""
        ...

    def prepare(self, params: SearchParams) -> None:
        """Build what a search with such parameters needs and `warm_up` left out (a trace, say), from any thread, beside searches."""
        ...

    def close(self) -> None:
        """Free what the engine holds, a little at a time, so that other engines of the process are not held up. No search after it."""
        ...


Device = Literal["auto", "cpu", "cuda"]
Precision = Literal["float32", "float16", "bfloat16"]
LINEAR_ENGINES = ("sparse-cpu", "sparse-cuda", "reference")
GRAPH_ENGINES = ("onnx-cpu", "triton", "onnx-cuda", "reference")
ENGINES = ("onnx-cpu", "triton", "onnx-cuda", "sparse-cpu", "sparse-cuda", "reference")
GPU_ENGINES = ("triton", "onnx-cuda", "sparse-cuda")
PRECISE_ENGINES = ("triton", "sparse-cuda")
"""Those that know other precisions than float32."""


def gpu_usable() -> bool:
    """Whether `auto` would find a GPU that some engine here can use."""
    if not gpu_present():
        return False
    if all(find_spec(library) is not None for library in ("torch", "triton")):
        from espalier.engines.triton.gpu_engine import gpu_available

        if gpu_available():
            return True
    from espalier.engines.onnx.engine import cuda_available

    return cuda_available()


def open_engine(
    bundle: Bundle, device: Device = "auto", engine: str | None = None, threads: int = 1, precision: Precision = "float32"
) -> Engine:
    """The best engine for a bundle on a device.

    device     `auto` takes a GPU where there is one; a device that was asked for and is not there is DeviceUnavailable
    engine     an engine by name, instead of the choice by device: `triton` on a GPU where it knows the bundle's scorer, else `onnx-cuda`;
               for linear scorers `sparse-cuda` on a GPU, else `sparse-cpu`
    threads    intra-op threads of one CPU search; one process per core with one thread each scales best
    precision  of node rows and products in `triton`, of weights in `sparse-cuda`; the other engines compute in float32 and refuse another
    """
    if engine not in (None, *ENGINES):
        raise DeviceUnavailable(f"engine {engine!r}: expected one of {', '.join(ENGINES)}")
    if engine is not None and device != "auto" and (engine in GPU_ENGINES) != (device == "cuda"):
        raise DeviceUnavailable(f"engine {engine} does not run on device {device}")
    linear = isinstance(bundle.manifest.scorer, LinearScorer)
    if engine is not None and engine not in (LINEAR_ENGINES if linear else GRAPH_ENGINES):
        fitting = ", ".join(LINEAR_ENGINES if linear else GRAPH_ENGINES)
        kind = bundle.manifest.scorer.kind
        raise DeviceUnavailable(
            f"engine {engine} cannot search {bundle.manifest.name}, which has {kind} scorers: expected one of {fitting}"
        )
    opened = _opened(bundle, device, engine, threads, precision)
    if precision != "float32" and opened.name not in PRECISE_ENGINES:
        opened.close()
        needed = "sparse-cuda" if linear else "triton"
        raise DeviceUnavailable(f"precision {precision} needs the engine {needed}; {bundle.manifest.name} would run on {opened.name}")
    log.info("%s version %d runs on %s", bundle.manifest.name, bundle.manifest.version, opened.name)
    return opened


def _opened(bundle: Bundle, device: Device, engine: str | None, threads: int, precision: Precision) -> Engine:
    if engine == "reference":
        from espalier.engines.reference import ReferenceEngine

        return ReferenceEngine(bundle)
    if isinstance(bundle.manifest.scorer, LinearScorer):
        return _opened_linear(bundle, device, engine, threads, precision)
    name = f"{bundle.manifest.name} version {bundle.manifest.version}"
    on_gpu = _on_gpu(device, engine)
    if on_gpu and engine != "onnx-cuda":
        reason = _missing()
        if not reason:
            from espalier.engines.triton.graph_engine import TritonEngine  # here, because only the image for GPUs has torch

            try:
                return TritonEngine(bundle, precision=precision)
            except UnsupportedGraph as error:
                reason = str(error)
            except DeviceUnavailable as error:
                if engine == "triton" or device == "cuda":
                    raise
                reason = str(error)
        if engine == "triton":
            raise DeviceUnavailable(f"triton cannot run {name}: {reason}")
        log.info("%s cannot run on triton: %s", name, reason)
    from espalier.engines.onnx import engine as onnx_graph

    if on_gpu and engine is None and device == "auto" and not onnx_graph.cuda_available():
        log.warning("%s runs on the CPU: there is a GPU, but neither triton nor ONNX Runtime can use it", name)
        on_gpu = False
    return onnx_graph.OnnxEngine(bundle, "cuda" if on_gpu else "cpu", threads=threads)


def _opened_linear(bundle: Bundle, device: Device, engine: str | None, threads: int, precision: Precision) -> Engine:
    if _on_gpu(device, engine):
        name = f"{bundle.manifest.name} version {bundle.manifest.version}"
        asked = engine == "sparse-cuda" or device == "cuda"
        reason = _missing()
        if not reason:
            from espalier.engines.triton.linear_engine import SparseCudaEngine  # here, because only the image for GPUs has torch

            try:
                return SparseCudaEngine(bundle, precision=precision)
            except (DeviceUnavailable, UnsupportedGraph) as error:
                if asked:
                    raise
                reason = str(error)
        if asked:
            raise DeviceUnavailable(f"sparse-cuda cannot run {name}: {reason}")
        log.warning("%s runs on the CPU: there is a GPU, but sparse-cuda cannot use it: %s", name, reason)
    from espalier.engines.linear.engine import SparseCpuEngine  # here, because numba takes a while to import

    return SparseCpuEngine(bundle, threads)


def _on_gpu(device: Device, engine: str | None) -> bool:
    """Whether a GPU was asked for, or is there and nothing else was."""
    return engine in GPU_ENGINES or device == "cuda" or (device == "auto" and engine is None and gpu_present())


def _missing() -> str:
    """What is not installed of what our own engines on a GPU need; empty where all is."""
    missing = [library for library in ("torch", "triton") if find_spec(library) is None]
    return f"{' and '.join(missing)} not installed (extra `gpu`)" if missing else ""


def finish(
    ranking: Ranking,
    m_B: NDArray[np.int64],
    eligible_B: NDArray[np.int64],
    item_rows_BM: NDArray[np.int64],
    ranks_BM: NDArray[np.float32],
    trace: tuple[LevelTrace, ...] | None,
    finite_B: NDArray[np.bool_] | None = None,
) -> SearchResult:
    """The result of a search from its best leaves: places past a query's m, or of rank −inf, hold no item.

    eligible_B  int64[B]: how many items each query could have got
    """
    found_BM = ranks_BM > -np.inf
    if len(m_B) > 1:  # otherwise its m is the width
        found_BM &= np.arange(ranks_BM.shape[1]) < m_B[:, None]
        ranks_BM = np.where(found_BM, ranks_BM, np.float32(-np.inf))
    count_B = found_BM.sum(1)
    return SearchResult(
        item_rows_BM=np.where(found_BM, item_rows_BM, NO_ITEM),
        scores_BM=scores_of_ranks(ranking, ranks_BM),
        ranks_BM=ranks_BM,
        count_B=count_B,
        complete_B=count_B >= np.minimum(m_B, eligible_B),
        trace=trace,
        finite_B=finite_B,
    )


def scores_of_ranks(ranking: Ranking, ranks: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32, same shape, in [0, 1]: a rank's calibration where there is one, else its exponential (`path`) or sigmoid; 0 for −inf."""
    wide = ranks.astype(np.float64)
    if ranking.calibration is not None:
        wide = np.where(np.isneginf(wide), wide, ranking.calibration.slope * wide + ranking.calibration.intercept)
    elif ranking.own == "log_activation":
        return np.exp(np.minimum(wide, 0)).astype(np.float32)
    sigmoid = 1 / (1 + np.exp(-np.clip(wide, -700, 700)))
    return np.where(np.isneginf(wide), 0, sigmoid).astype(np.float32)
