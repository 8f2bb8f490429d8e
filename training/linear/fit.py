"""Linear node scorers, layer by layer from the root.

A node's children learn one-versus-rest from training points that the search would bring there: those with a positive below the node
(teacher forcing), those whose beam of the layers trained so far keeps the node (matcher-aware), or both. XR-Linear, §3.3 of
papers' product search; the memory is that of one node's problem a thread and of what is kept of the layers above.

Legend: B points, N nodes, P inner nodes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from espalier.chunks import MAX_CHILDREN, Chunks
from espalier.engines.chunk_search import ChunkSearch, Wanted
from espalier.errors import InvalidData
from espalier.manifest import Activation, Ranking
from espalier.sparse import SparseRows
from espalier.tree import Tree
from training.linear.solver import train_children

Int64 = NDArray[np.int64]


@dataclass(frozen=True)
class LinearOptions:
    """How linear node scorers are trained.

    negatives   whose points a node's children learn from: "teacher" (a positive below), "matcher" (kept by the beam), "both"
    beam_size   of that beam
    cost        C, what a unit of squared hinge loss costs against ½‖w‖²
    tolerance, passes   of the descent
    bias        value of the feature that all points have
    threshold   weights below are left out of the model
    """

    negatives: Literal["teacher", "matcher", "both"] = "both"
    beam_size: int = 10
    cost: float = 1.0
    tolerance: float = 0.1
    passes: int = 10
    bias: float = 1.0
    threshold: float = 0.05
    activation: Activation = "l3-hinge"
    seed: int = 0


def fit_linear(
    points: SparseRows,
    labels_from: Int64,
    labels: NDArray[np.int32],
    tree: Tree,
    options: LinearOptions,
    threads: int = 1,
    progress: Callable[[int], object] = lambda nodes: None,
) -> Chunks:
    """The scorers of a tree over labels 0 … I − 1.

    points               training points
    labels_from, labels  int64[B + 1], int32: each point's positive labels, CSR
    progress             told how many inner nodes have been trained, each time there are more
    Raises InvalidData where labels are not the tree's items, or a node has more children than a chunk can number.
    """
    if len(labels_from) != len(points) + 1 or labels_from[0] != 0 or labels_from[-1] != len(labels):
        raise InvalidData("labels_from", f"{len(labels_from)} entries", f"{len(points) + 1}, from 0 to {len(labels)}")
    if len(labels) and (labels.min() < 0 or labels.max() >= tree.item_count):
        raise InvalidData("labels", int(labels.max()), f"labels from 0 to {tree.item_count - 1}")
    if max(tree.max_children) > MAX_CHILDREN:
        raise InvalidData("tree", f"a node of {max(tree.max_children)} children", f"at most {MAX_CHILDREN}")
    trainer = _Trainer(points, tree, options, threads)
    at = np.repeat(np.arange(len(points)), np.diff(labels_from)), tree.leaf_of_item[labels]
    levels: list[tuple[Int64, Int64]] = []
    for _ in range(tree.height):  # distinct (point, node) pairs of each level, from the leaves up
        point, node = np.divmod(np.unique(at[0] * tree.node_count + at[1]), tree.node_count)
        levels.insert(0, (point, node))
        at = point, tree.parent[node]
    parts: list[_Part] = []
    for level, (point, node) in enumerate(levels, start=1):
        kept = _kept_by_beam(points, tree, parts, options, level - 1) if options.negatives != "teacher" and level > 1 else None
        parts += trainer.level(level, point, node, kept)
        progress(len(parts))
    return _joined(parts, tree, points.width)


@dataclass(frozen=True)
class _Part:
    """One inner node's chunk, as `train_children` returns it."""

    row_feature: NDArray[np.int32]
    row_entry: Int64
    entry_child: NDArray[np.uint16]
    entry_weight: NDArray[np.float32]
    bias: NDArray[np.float32]


class _Trainer:
    def __init__(self, points: SparseRows, tree: Tree, options: LinearOptions, threads: int) -> None:
        self._points, self._tree, self._options, self._threads = points, tree, options, threads
        self._own = threading.local()

    def level(self, level: int, point: Int64, node: Int64, kept: tuple[Int64, Int64] | None) -> list[_Part]:
        """The chunks of level − 1, whose children are on `level`.

        point, node  each point's nodes on `level` · kept: points and nodes of level − 1 that beams keep
        """
        tree = self._tree
        parents = tree.level(level - 1)
        parent = tree.parent[node]
        order = np.lexsort((node, point, parent))
        point, node, parent = point[order], node[order], parent[order]
        cut = np.searchsorted(parent, np.arange(parents.start, parents.stop + 1))
        if kept is not None:
            order = np.lexsort((kept[0], kept[1]))
            kept = kept[0][order], kept[1][order]
            kept_cut = np.searchsorted(kept[1], np.arange(parents.start, parents.stop + 1))

        def one(p: int) -> _Part:
            k = p - parents.start
            positive, child = point[cut[k] : cut[k + 1]], node[cut[k] : cut[k + 1]] - tree.first_child[p]
            if kept is None:
                rows = np.unique(positive)
            elif self._options.negatives == "matcher":
                rows = kept[0][kept_cut[k] : kept_cut[k + 1]]
                among = np.isin(positive, rows)
                positive, child = positive[among], child[among]
            else:
                rows = np.union1d(positive, kept[0][kept_cut[k] : kept_cut[k + 1]])
            return self._train(p, rows, np.searchsorted(positive, np.append(rows, len(self._points))), child.astype(np.int32))

        if self._threads == 1:
            return [one(p) for p in parents]
        with ThreadPoolExecutor(self._threads) as pool:
            return list(pool.map(one, parents))

    def _train(self, p: int, rows: Int64, positive_from: Int64, positive_child: NDArray[np.int32]) -> _Part:
        options, points = self._options, self._points
        if not hasattr(self._own, "number_of"):
            self._own.number_of = np.full(points.width, -1, np.int32)
        children = int(self._tree.first_child[p + 1] - self._tree.first_child[p])
        *arrays, _ = train_children(
            points.indptr, points.indices, points.values, rows, positive_from.astype(np.int64), positive_child, children,
            options.cost, options.tolerance, options.passes, np.float32(options.bias), np.float32(options.threshold),
            self._own.number_of, options.seed * 1_000_003 + p + 1,
        )  # fmt: skip
        return _Part(*arrays)


def _kept_by_beam(points: SparseRows, tree: Tree, parts: list[_Part], options: LinearOptions, level: int) -> tuple[Int64, Int64]:
    """The points and nodes of `level` that a beam over the scorers so far keeps."""
    ranking = Ranking(activation=options.activation, own="log_activation", gamma=1)
    search = ChunkSearch(tree, _joined(parts, tree, points.width), ranking, last=level)
    beam_B = np.full(len(points), options.beam_size, np.int64)
    nodes_BM = search.search(points, Wanted(beam_B, np.minimum(beam_B, tree.level_size(level)))).leaves_BM
    point, slot = np.nonzero(nodes_BM >= 0)
    return point, nodes_BM[point, slot]


def _joined(parts: list[_Part], tree: Tree, width: int) -> Chunks:
    """The chunks of the first inner nodes; those that are still missing are empty."""
    rows = np.zeros(tree.leaf_offset, np.int64)
    rows[: len(parts)] = [len(part.row_feature) for part in parts]
    entries = np.cumsum([0, *(len(part.entry_child) for part in parts)])
    bias = np.zeros(tree.node_count, np.float32)
    for p, part in enumerate(parts):
        bias[tree.first_child[p] : tree.first_child[p + 1]] = part.bias

    def joined(arrays: list[NDArray[Any]], dtype: type) -> NDArray[Any]:
        return np.concatenate(arrays) if arrays else np.empty(0, dtype)

    starts = [part.row_entry[:-1] + entries[p] for p, part in enumerate(parts)]
    return Chunks(
        chunk_row=np.concatenate([[0], np.cumsum(rows)]),
        row_feature=joined([part.row_feature for part in parts], np.int32),
        row_entry=np.append(joined(starts, np.int64), entries[-1]).astype(np.int64),
        entry_child=joined([part.entry_child for part in parts], np.uint16),
        entry_weight=joined([part.entry_weight for part in parts], np.float32),
        bias=bias,
        width=width,
    )
