"""Linear node scorers, level by level from the root.

A node's children learn one-versus-rest from the points that the search would bring to it (`examples.py`, `solver.py`). Memory holds one
node's problem for each thread, and the scorers of the levels above. Nodes whose labels average too few positives are not trained; their
children are scored by their centroids.

Legend: P inner nodes, I labels, F features.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from espalier.arrays import Bool
from espalier.chunks import Chunks
from espalier.engines.linear.chunk_search import BeamParams, ChunkSearch
from espalier.tree import Tree

from ..data.csr import Csr, as_rows
from ..data.xmc import LabelledPoints
from ..linear.examples import BeamNodes, LevelExamples, Positives
from ..linear.label_features import pifa
from ..linear.node_centroids import Centroids, node_centroids
from ..linear.node_scorers import LevelScorers, NodeScorers, as_chunks, centroid_scorers, read_level, write_level
from ..linear.solver import train_children
from ..specification.linear import LinearOptions


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

    centroids  rows [I, F], towards which `options.prior` regularises; PIFA's, of length 1, by default
    progress   called with the number of inner nodes that have been trained since the last call
    work       an empty folder, or that of a killed run with the same arguments: each trained level is stored there
    """
    if options.prior > 0:
        of_level: list[Centroids | None] = [*node_centroids(pifa(data) if centroids is None else centroids, tree)]
        is_trained_P = _has_enough_positives(data, tree, options.min_positives)
    else:
        of_level, is_trained_P = [None] * tree.height, np.ones(tree.leaf_offset, np.bool_)
    positives = [Positives.of_leaves(data, tree, options)]  # of each level of children, the top one first
    for _ in range(tree.height - 1):
        positives.insert(0, positives[0].of_parents(tree))
    trainer = LevelTrainer(data.points, tree, options, is_trained_P, threads, seed)
    scorers: list[LevelScorers] = []
    for level in range(tree.height):
        file = None if work is None else work / f"level-{level + 1}.safetensors"
        if file is not None and file.is_file():
            progress(tree.level_size(level))
            scorers.append(read_level(file))
        else:
            scorers.append(trainer.train(level, positives[level], scorers, of_level[level], progress, file))
        of_level[level] = None
    return as_chunks(scorers, tree, data.points.shape[1], work)


class LevelTrainer:
    """Trains the scorers level by level. `is_trained_P` bool[P]: the nodes whose children are trained."""

    def __init__(self, points: Csr, tree: Tree, options: LinearOptions, is_trained_P: Bool, threads: int, seed: int) -> None:
        self._points, self._tree, self._options, self._is_trained_P = points, tree, options, is_trained_P
        self._threads, self._seed = threads, seed
        self._scratch_of_thread = threading.local()

    def train(
        self,
        level: int,
        positives: Positives,
        above: list[LevelScorers],
        centroids: Centroids | None,
        progress: Callable[[int], object],
        file: Path | None,
    ) -> LevelScorers:
        """The scorers of a level's nodes.

        positives, centroids  of their children
        above                 the scorers of all levels above
        file                  where they are written, and then read from; None: they are in memory
        """
        nodes = self._tree.level(level)
        by_beam = self._options.negatives != "teacher" and level > 0 and bool(self._is_trained_P[nodes.start : nodes.stop].any())
        beam_nodes = self._search_level(above, level) if by_beam else None
        examples = LevelExamples(self._tree, level, positives, beam_nodes, self._options)

        def train_node(p: int) -> NodeScorers:
            return self._train_node(p, level, examples, centroids)

        def trained(pool: ThreadPoolExecutor) -> Iterator[NodeScorers]:
            ahead: deque[Future[NodeScorers]] = deque()  # few, since scorers of nodes that wait are in memory
            for p in nodes:
                ahead.append(pool.submit(train_node, p))
                if len(ahead) > 2 * self._threads:
                    yield ahead.popleft().result()
                    progress(1)
            for future in ahead:
                yield future.result()
                progress(1)

        with ThreadPoolExecutor(self._threads) as pool:
            if file is None:
                return LevelScorers.of(trained(pool))
            write_level(file, trained(pool))
        return read_level(file)

    def _train_node(self, p: int, level: int, examples: LevelExamples, centroids: Centroids | None) -> NodeScorers:
        first_child = self._tree.first_child
        offset = self._tree.level(level + 1).start
        children = slice(int(first_child[p]) - offset, int(first_child[p + 1]) - offset)
        if centroids is not None and not self._is_trained_P[p]:
            return centroid_scorers(centroids, children, self._options)
        if not hasattr(self._scratch_of_thread, "number_of"):
            self._scratch_of_thread.number_of = np.full(self._points.shape[1], -1, np.int32)
        return train_children(
            self._points,
            examples.of(p),
            children.stop - children.start,
            None if centroids is None else centroids.of(children),
            self._options,
            self._scratch_of_thread.number_of,
            self._seed * 1_000_003 + p + 1,
        )

    def _search_level(self, above: list[LevelScorers], level: int) -> BeamNodes:
        """The nodes of a level that a beam over the scorers above keeps for each point."""
        points, options = self._points, self._options
        search = ChunkSearch(self._tree, as_chunks(above, self._tree, points.shape[1]), options.ranking, last=level)
        beam_B = np.full(points.shape[0], options.beam_size, np.int64)
        params = BeamParams(beam_B, np.minimum(beam_B, self._tree.level_size(level)))
        nodes_BM = search.search(as_rows(points), params).leaves_BM
        point, position = np.nonzero(nodes_BM >= 0)
        return BeamNodes(point, nodes_BM[point, position])


def trains_root(data: LabelledPoints, options: LinearOptions) -> bool:
    """Whether the root of a tree over these labels has enough positives to be trained, as `_has_enough_positives` has it."""
    count_I = np.bincount(data.labels[data.asked].indices, minlength=data.labels.shape[1])
    return options.prior == 0 or bool(_is_enough(count_I.sum(), np.square(count_I).sum(), options.min_positives))


def _has_enough_positives(data: LabelledPoints, tree: Tree, least: float) -> Bool:
    """bool[P]: inner nodes whose items average at least `least` points, without texts of items.

    The average is over the points' labels: an average over items would be dominated by items without queries.
    """
    count_N, square_N = np.zeros(tree.node_count), np.zeros(tree.node_count)
    count_N[tree.leaf_of_item] = np.bincount(data.labels[data.asked].indices, minlength=tree.item_count)
    square_N[tree.leaf_of_item] = count_N[tree.leaf_of_item] ** 2
    for level in range(tree.height, 0, -1):
        nodes = slice(tree.level(level).start, tree.level(level).stop)
        for sums_N in (count_N, square_N):
            np.add.at(sums_N, tree.parent[nodes], sums_N[nodes])
    return _is_enough(count_N[: tree.leaf_offset], square_N[: tree.leaf_offset], least)


def _is_enough(count: Any, square: Any, least: float) -> Bool:
    """Whether labels average at least so many points, given the sums over labels of their points and of the squares of these."""
    enough: Bool = square >= least * np.maximum(count, 1)
    return enough
