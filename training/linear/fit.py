"""Linear node scorers, layer by layer from the root.

A node's children learn one-versus-rest from training points that the search would bring there: those with a positive below the node
(teacher forcing), those whose beam of the layers trained so far keeps the node (matcher-aware), or both. XR-Linear, §3.3 of
papers' product search; the memory is that of one node's problem a thread and of what is kept of the layers above. Where the items below
a node have few points each there is nothing to learn from, and its children stay at their centroids.

Legend: B points, N nodes, P inner nodes.
"""

from __future__ import annotations

import os
import threading
import zipfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.chunks import MAX_CHILDREN, Chunks
from espalier.engines.linear.chunk_search import BeamParams, ChunkSearch
from espalier.errors import InvalidConfig, InvalidData
from espalier.tree import Tree
from training.data.csr import Csr, as_rows
from training.data.xmc import LabelledPoints
from training.linear.config import LinearOptions
from training.linear.label_features import pifa
from training.linear.node_centroids import Centroids, node_centroids
from training.linear.solver import train_children

Int64 = NDArray[np.int64]


def fit_linear(
    data: LabelledPoints,
    tree: Tree,
    options: LinearOptions,
    threads: int = 1,
    seed: int = 0,
    progress: Callable[[int], object] = lambda nodes: None,
    work: Path | None = None,
    centroids: Csr | None = None,
) -> Chunks:
    """The scorers of a tree over labels 0 … I − 1.

    centroids  rows [I, F] of length 1, which `options.prior` draws the weights to; without them it is PIFA's
    progress  told how many more inner nodes have been trained
    work      an empty folder, or that of a run with the same arguments that was killed: each level is kept there once it is trained
    Raises InvalidData where labels are not the tree's items, or a node has more children than a chunk can number.
    """
    points, labels = data.points, data.labels
    if labels.shape != (len(data), tree.item_count):
        raise InvalidData("labels", str(list(labels.shape)), f"[{len(data)}, {tree.item_count}]: a row per point, a column per item")
    if max(tree.max_children) > MAX_CHILDREN:
        raise InvalidData("tree", f"a node of {max(tree.max_children)} children", f"at most {MAX_CHILDREN}")
    if options.prior > 0 and centroids is None:
        centroids = pifa(data)
    if centroids is not None and centroids.shape != (tree.item_count, points.shape[1]):
        raise InvalidData("centroids", str(list(centroids.shape)), f"[{tree.item_count}, {points.shape[1]}]")
    drawn = centroids is not None and options.prior > 0
    drawn_to = node_centroids(centroids, tree) if centroids is not None and drawn else [None] * tree.height
    trained_P = _trained(data, tree, options.few) if drawn else np.ones(tree.leaf_offset, np.bool_)
    trainer = _Trainer(points, tree, options, trained_P, threads, seed)
    weights = labels.data / labels.data.mean() if options.weighted and labels.nnz else np.ones(labels.nnz, np.float32)
    levels = [_Positives(np.repeat(np.arange(len(data)), np.diff(labels.indptr)), tree.leaf_of_item[labels.indices], weights).distinct()]
    for _ in range(tree.height - 1):
        levels.insert(0, _Positives(levels[0].point, tree.parent[levels[0].node], levels[0].weight).distinct())
    parts: list[_Part] = []
    for level, positives in enumerate(levels, start=1):
        file = None if work is None else work / f"level-{level}.npz"
        if file is not None and file.is_file():
            trained = _read_level(file)
            progress(len(trained))
        else:
            above = tree.level(level - 1)
            matched = options.negatives != "teacher" and level > 1 and bool(trained_P[above.start : above.stop].any())
            kept = _kept_by_beam(points, tree, parts, options, level - 1) if matched else None
            trained = trainer.level(level, positives, kept, drawn_to[level - 1], progress)
            if file is not None:
                _keep_level(file, trained)
        parts += trained
    return _joined(parts, tree, points.shape[1])


@dataclass(frozen=True)
class _Positives:
    """Points with nodes of one level above their labels: int64, int64, float32 of one length."""

    point: Int64
    node: Int64
    weight: NDArray[np.float32]

    def distinct(self) -> _Positives:
        """Each pair once, by point, with its largest weight."""
        order = np.lexsort((self.node, self.point))
        point, node = self.point[order], self.node[order]
        first = np.flatnonzero(np.append(True, (point[1:] != point[:-1]) | (node[1:] != node[:-1])))[: len(point)]
        largest = np.maximum.reduceat(self.weight[order], first) if len(first) else self.weight
        return _Positives(point[first], node[first], largest)


@dataclass(frozen=True)
class _Part:
    """One inner node's chunk, as `train_children` returns it."""

    row_feature: NDArray[np.int32]
    row_entry: Int64
    entry_child: NDArray[np.uint16]
    entry_weight: NDArray[np.float32]
    bias: NDArray[np.float32]


PART_ARRAYS = tuple(field.name for field in fields(_Part))


class _Trainer:
    def __init__(self, points: Csr, tree: Tree, options: LinearOptions, trained_P: NDArray[np.bool_], threads: int, seed: int) -> None:
        self._points, self._tree, self._options, self._trained_P = points, tree, options, trained_P
        self._threads, self._seed = threads, seed
        self._own = threading.local()

    def level(
        self,
        level: int,
        positives: _Positives,
        kept: tuple[Int64, Int64] | None,
        centroids: Centroids | None,
        progress: Callable[[int], object],
    ) -> list[_Part]:
        """The chunks of level − 1, whose children are on `level`.

        positives  of `level` · kept: points and nodes of level − 1 that beams keep · centroids: of the nodes of `level`
        """
        tree = self._tree
        parents = tree.level(level - 1)
        parent = tree.parent[positives.node]
        order = np.lexsort((positives.node, positives.point, parent))
        point, node, parent = positives.point[order], positives.node[order], parent[order]
        cost = (self._options.cost * positives.weight[order]).astype(np.float32)
        cut = np.searchsorted(parent, np.arange(parents.start, parents.stop + 1))
        if kept is not None:
            order = np.lexsort((kept[0], kept[1]))
            kept = kept[0][order], kept[1][order]
            kept_cut = np.searchsorted(kept[1], np.arange(parents.start, parents.stop + 1))

        def one(p: int) -> _Part:
            k = p - parents.start
            first = int(tree.first_child[p] - tree.level(level).start)
            children = slice(first, first + int(tree.first_child[p + 1] - tree.first_child[p]))
            if centroids is not None and not self._trained_P[p]:
                return _as_centroids(centroids, children, self._options)
            drawn_to = None if centroids is None else centroids.rows[children]
            own = slice(cut[k], cut[k + 1])
            positive, child, own_cost = point[own], node[own] - tree.first_child[p], cost[own]
            if kept is None:
                rows = np.unique(positive)
            elif self._options.negatives == "matcher":
                rows = kept[0][kept_cut[k] : kept_cut[k + 1]]
                among = np.isin(positive, rows)
                positive, child, own_cost = positive[among], child[among], own_cost[among]
            else:
                rows = np.union1d(positive, kept[0][kept_cut[k] : kept_cut[k + 1]])
            positive_from = np.searchsorted(positive, np.append(rows, self._points.shape[0]))
            return self._train(p, rows, positive_from, child.astype(np.int32), own_cost, drawn_to)

        def counted(trained: Iterable[_Part]) -> list[_Part]:
            parts = []
            for part in trained:
                parts.append(part)
                progress(1)
            return parts

        if self._threads == 1:
            return counted(map(one, parents))
        with ThreadPoolExecutor(self._threads) as pool:
            return counted(pool.map(one, parents))

    def _train(
        self,
        p: int,
        rows: Int64,
        positive_from: Int64,
        positive_child: NDArray[np.int32],
        positive_cost: NDArray[np.float32],
        centroids: Csr | None,
    ) -> _Part:
        if not hasattr(self._own, "number_of"):
            self._own.number_of = np.full(self._points.shape[1], -1, np.int32)
        children = int(self._tree.first_child[p + 1] - self._tree.first_child[p])
        return _Part(
            *train_children(
                self._points, rows, positive_from.astype(np.int64), positive_child, positive_cost, centroids, children, self._options,
                self._own.number_of, self._seed * 1_000_003 + p + 1,
            )
        )  # fmt: skip


def _as_centroids(centroids: Centroids, children: slice, options: LinearOptions) -> _Part:
    """The chunk of a node that is not trained.

    What is small is told before a row is brought to length 1: the rows of large nodes have many features, and all of them small ones.
    """
    rows = centroids.rows[children]
    child = np.repeat(np.arange(children.stop - children.start), np.diff(rows.indptr))
    features, weights = rows.indices.astype(np.int32, copy=False), np.float32(options.prior) * rows.data
    large = np.abs(weights) * centroids.length_N[children][child] >= options.threshold
    order = np.lexsort((child[large], features[large]))
    features = features[large][order]
    first = np.flatnonzero(np.diff(features, prepend=-1))
    return _Part(
        row_feature=features[first],
        row_entry=np.append(first, len(features)),
        entry_child=child[large][order].astype(np.uint16),
        entry_weight=weights[large][order],
        bias=np.full(children.stop - children.start, -options.prior / 2 * (options.bias > 0), np.float32),
    )


def _kept_by_beam(points: Csr, tree: Tree, parts: list[_Part], options: LinearOptions, level: int) -> tuple[Int64, Int64]:
    """The points and nodes of `level` that a beam over the scorers so far keeps."""
    search = ChunkSearch(tree, _joined(parts, tree, points.shape[1]), options.ranking, last=level)
    beam_B = np.full(points.shape[0], options.beam_size, np.int64)
    nodes_BM = search.search(as_rows(points), BeamParams(beam_B, np.minimum(beam_B, tree.level_size(level)))).leaves_BM
    point, slot = np.nonzero(nodes_BM >= 0)
    return point, nodes_BM[point, slot]


def _trained(data: LabelledPoints, tree: Tree, few: float) -> NDArray[np.bool_]:
    """bool[P]: inner nodes whose children learn, those below which an item has at least `few` points, on average over the points' labels.

    On average over items it would be those that nobody asks for who decide.
    """
    count_N, square_N = np.zeros(tree.node_count), np.zeros(tree.node_count)
    count_N[tree.leaf_of_item] = np.bincount(data.labels.indices, minlength=tree.item_count)
    square_N[tree.leaf_of_item] = count_N[tree.leaf_of_item] ** 2
    for level in range(tree.height, 0, -1):
        nodes = slice(tree.level(level).start, tree.level(level).stop)
        for sums_N in (count_N, square_N):
            np.add.at(sums_N, tree.parent[nodes], sums_N[nodes])
    return square_N[: tree.leaf_offset] >= few * np.maximum(count_N[: tree.leaf_offset], 1)


def _keep_level(file: Path, parts: list[_Part]) -> None:
    """Write a level's chunks, all or nothing."""
    arrays = {f"{p}.{name}": getattr(part, name) for p, part in enumerate(parts) for name in PART_ARRAYS}
    part_file = file.with_suffix(".part")
    with part_file.open("wb") as stream:
        np.savez(stream, **arrays)
        stream.flush()
        os.fsync(stream.fileno())
    part_file.replace(file)


def _read_level(file: Path) -> list[_Part]:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            count = len(arrays.files) // len(PART_ARRAYS)
            return [_Part(*(arrays[f"{p}.{name}"] for name in PART_ARRAYS)) for p in range(count)]
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise InvalidConfig("--resume", str(file), f"a readable level ({error}); delete its folder to start anew") from error


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
