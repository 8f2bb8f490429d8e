"""`onnx-cpu` and `onnx-cuda`: scorers of any form, run by ONNX Runtime level by level; the beam search around them is in NumPy.

Inner products and MLPs have faster engines. A GPU scores the queries of a call together, level by level. A CPU scores them one by one: it
takes as long, and a query's answer does not depend on the batch.

Legend: B queries, C candidates, K beam, M results, N nodes, D node row, S state.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from espalier.arrays import Bool, Float32, Int64
from espalier.bundle import Bundle
from espalier.engines.encoder import free_inputs
from espalier.engines.graphs import load_graph
from espalier.engines.runtime import opened_session, ort
from espalier.engines.stages import NO_RANK, NO_ROW, Leaves, TreeQuery, TreeSearch, stacked
from espalier.errors import DeviceUnavailable
from espalier.search import Frontier, LevelTrace

log = logging.getLogger(__name__)
GPU_GROUP = 64
"""Queries that a GPU scores together."""


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


class _Level(NamedTuple):
    """One level of one query's search: the candidates, ascending by node, and the positions of the kept ones, ascending."""

    nodes_C: Int64
    ranks_C: Float32
    keys_C: Float32
    kept_K: Int64


class OnnxSearch(TreeSearch):
    """See the module. Any number of threads may search.

    device      "cpu" or "cuda"
    threads     intra-op threads of one search on the CPU
    group_size  queries that are scored together; None: one on a CPU, GPU_GROUP on a GPU
    Raises DeviceUnavailable where there is no GPU.
    """

    name = "onnx-cpu"
    rounding = 1e-3

    def __init__(self, bundle: Bundle, device: Literal["cpu", "cuda"], threads: int = 1, group_size: int | None = None) -> None:
        if device == "cuda" and not cuda_available():
            raise DeviceUnavailable(
                "onnx-cuda needs a CUDA device, and ONNX Runtime finds none; install the `gpu` extra on a machine with one"
            )
        self.name = f"onnx-{device}"
        self._tree, self._rows_ND, self._ranking = bundle.tree, bundle.node_rows_ND, bundle.manifest.ranking
        self._key_weight = np.float32(0 if bundle.memory is None else bundle.memory.key_weight)
        self.group_size = group_size or (1 if device == "cpu" else GPU_GROUP)
        model = load_graph("scorer.onnx", bundle.graph("scorer.onnx"))
        free_inputs(model)
        self._session = opened_session(model, threads, device)

    def search(self, query: TreeQuery) -> Leaves:
        """See `TreeSearch`."""
        if query.states_BLS is None:
            raise ValueError("queries without states")
        paths: list[list[_Level]] = []
        finite_B = np.ones(len(query), np.bool_)
        for begin in range(0, len(query), self.group_size):
            paths += self._searched(query, range(begin, min(begin + self.group_size, len(query))), finite_B)
        shape = len(query), 1, int(query.m_B.max(initial=0))
        rows_BTM, count_BT = np.full(shape, -1, np.int64), np.zeros(shape[:2], np.int64)
        ranks_BTM, keys_BTM = np.full(shape, -np.inf, np.float32), np.full(shape, -np.inf, np.float32)
        for b, (*_, last) in enumerate(paths):
            order = last.kept_K[np.argsort(-last.keys_C[last.kept_K], kind="stable")]  # of equal keys the lower leaf
            rows_BTM[b, 0, : len(order)] = self._tree.leaf_item[last.nodes_C[order] - self._tree.leaf_offset]
            ranks_BTM[b, 0, : len(order)], keys_BTM[b, 0, : len(order)] = last.ranks_C[order], last.keys_C[order]
            count_BT[b] = len(order)
        traces = (_trace(paths[0]),) if query.trace else ()
        frontiers = (self._frontier(paths),) if query.frontier else ()
        return Leaves(rows_BTM, ranks_BTM, keys_BTM, count_BT, finite_B, traces, frontiers)

    def _searched(self, query: TreeQuery, members: range, finite_B: Bool) -> list[list[_Level]]:
        tree, gamma, (eligible,) = self._tree, self._ranking.gamma, query.eligible_T
        starts = tree.start_levels(query.beam_size_B[members]).tolist()
        first = 1 if gamma > 0 or query.trace else min(starts)
        top = np.arange(tree.level(first - 1).start, tree.level(first - 1).stop)
        paths = [[_Level(top, zeros := np.zeros(len(top), np.float32), zeros, np.arange(len(top)))] for _ in members]
        for level in range(first, tree.height + 1):
            nodes, parents = [], []
            for b, path in zip(members, paths, strict=True):
                children_C, slot_C = tree.children(path[-1].nodes_C[path[-1].kept_K])
                mask = eligible.mask_B[b]
                is_open_C = np.ones(len(children_C), np.bool_) if mask is None else mask.eligible_N[children_C]
                if eligible.excluded is not None:
                    is_open_C &= ~np.isin(children_C, eligible.excluded.leaves_BX[b]) & ~np.isin(children_C, eligible.excluded.inner_BX[b])
                nodes.append(children_C[is_open_C])
                parents.append(slot_C[is_open_C])
            logits = self._logits(query, members, level, nodes)
            for i, b in enumerate(members):
                matters = gamma > 0 or level >= starts[i]
                scored_level = self._level(query, b, level, nodes[i], logits[i], paths[i][-1], parents[i], matters)
                if matters:
                    finite_B[b] &= bool(np.isfinite(logits[i]).all())
                paths[i].append(scored_level)
        return paths

    def _logits(self, query: TreeQuery, members: range, level: int, nodes: Sequence[Int64]) -> list[Float32]:
        states_BLS = query.states_BLS
        if states_BLS is None or not any(map(len, nodes)):
            return [np.empty(0, np.float32) for _ in nodes]
        state_BS = states_BLS[members.start : members.stop, level if states_BLS.shape[1] > 1 else 0]
        nodes_BC = stacked([nodes_C[None] for nodes_C in nodes], np.int64(0))
        rows_BCD = np.asarray(self._rows_ND[nodes_BC], np.float32)
        logits_BC = self._session.run(None, {"query_state": state_BS, "node_rows": rows_BCD})[0]
        return [logits_BC[i, : len(nodes_C)] for i, nodes_C in enumerate(nodes)]

    def _level(
        self, query: TreeQuery, b: int, level: int, nodes_C: Int64, logits_C: Float32, parents: _Level, slot_C: Int64, matters: bool
    ) -> _Level:
        """The ranks, the keys and the kept nodes of a level. matters: whether its ranks can change the answer."""
        with np.errstate(over="ignore", invalid="ignore"):
            ranks_C = logits_C
            if self._ranking.own == "log_activation":
                ranks_C = np.minimum(logits_C, 0) - np.log1p(np.exp(-np.abs(logits_C)))
            if self._ranking.gamma > 0:
                ranks_C = ranks_C + np.float32(self._ranking.gamma) * parents.ranks_C[parents.kept_K][slot_C]
            keys_C = ranks_C = np.asarray(ranks_C, np.float32)
            if query.memory is not None:
                keys_C = ranks_C + self._key_weight * _values_at(*query.memory.of(b), nodes_C)
        is_number_C = np.isfinite(logits_C) & np.isfinite(ranks_C) & np.isfinite(keys_C)
        if matters:
            nodes_C, ranks_C, keys_C = nodes_C[is_number_C], ranks_C[is_number_C], keys_C[is_number_C]
        elif not is_number_C.all():
            lift_C = np.where(is_number_C, keys_C - ranks_C, 0)
            ranks_C = np.where(is_number_C, ranks_C, np.float32(0))
            keys_C = np.asarray(ranks_C + lift_C, np.float32)
        size = int(query.m_B[b] if level == self._tree.height else query.beam_size_B[b])
        return _Level(nodes_C, ranks_C, keys_C, np.sort(np.argsort(-keys_C, kind="stable")[:size]))

    def _frontier(self, paths: Sequence[Sequence[_Level]]) -> Frontier:
        levels = [path[-2] for path in paths]
        return Frontier(
            stacked([level.nodes_C[None, level.kept_K] for level in levels], NO_ROW),
            stacked([level.ranks_C[None, level.kept_K] for level in levels], NO_RANK),
        )


def _trace(path: Sequence[_Level]) -> tuple[LevelTrace, ...]:
    """Every level of one query's search: with a trace all levels are scored."""
    levels = []
    for h, level in enumerate(path[1:], start=1):
        nodes_1C, ranks_1C, keys_1C = level.nodes_C[None], level.ranks_C[None], level.keys_C[None]
        kept_K = level.kept_K
        levels.append(LevelTrace(h, nodes_1C[:, kept_K], ranks_1C[:, kept_K], nodes_1C, ranks_1C, keys_1C[:, kept_K], keys_1C))
    return tuple(levels)


def _values_at(nodes_X: Int64, values_X: Float32, nodes_C: Int64) -> Float32:
    """float32[C]: the values of nodes, 0 for those that a list (ascending) does not have."""
    if not len(nodes_X):
        return np.zeros(len(nodes_C), np.float32)
    at_C = np.minimum(np.searchsorted(nodes_X, nodes_C), len(nodes_X) - 1)
    return np.where(nodes_X[at_C] == nodes_C, values_X[at_C], np.float32(0))
