"""C and γ of linear scorers, chosen on held-out training points by the search that will serve.

A quarter of the points is held out, at most a thousand, and of few points each quarter in turn; never texts of items, which the tree has
seen in another form. Scorers learn from a quarter of the rest, where that is enough. For each γ the held-out points are searched with the
beam that will serve and with one five times as wide. Quality is the geometric mean of nDCG@5 and recall@10, each as the worse of both
beams finds it. Precision@1 is in it only as a part of nDCG@5: alone it is one draw a point, and noise decides. Recall@100 is not, since a
smaller C raises it at the expense of the first results. A γ with which quality falls as the beam widens is not taken if another is there.
C climbs from its first value while quality rises; γ is chosen anew for each C, without training. C and γ are then those of scorers that
learn from all points.

A configured C or γ is kept. The matcher's beam ranks with γ = .5 in trials whose γ is not configured.

Knows scorers, searches and figures. Does not know files or bundles.

Legend: B points, M results, Q measures.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.chunks import Chunks
from espalier.engines.linear.chunk_search import BeamParams, ChunkSearch
from espalier.metrics import ndcg_at_m, precision_recall_f
from espalier.search import NO_ITEM
from espalier.tree import Tree

from ..data.csr import Csr, as_rows
from ..data.xmc import LabelledPoints
from ..linear.fit import fit_linear
from ..retrieval.task import NO_DEADLINE
from ..retrieval.tuning import Option, Options, search
from ..specification.linear import AUTO, LinearOptions

log = logging.getLogger(__name__)

GAMMAS = (0.0, 0.3, 0.5, 0.7, 0.85, 1.0)
COSTS = Option("cost", (0.03, 0.1, 0.3, 1.0, 3.0))
FIRST_COST = 0.3
WIDER = 5
"""The wide beam, in beams that serve."""
SHARE, HELD_OUT = 0.25, 1000
"""The share that a fold holds out, and the points that folds are added up to."""
LEARNED, LEAST_LEARNED = 0.25, 4000
"""The share of the points that are not held out which a trial learns from, and the fewest; texts of items come on top."""
LEAST_HELD_OUT = 200
"""With fewer held-out points, differences are noise: nothing is chosen."""
MOST_VALUES = 1 << 23
"""Feature values that a trial learns from, at most; of a larger set, it takes a random part."""
MEASURES = "ndcg@5", "recall@10"
RESULTS = 10
FALL = 0.005
"""The relative fall of quality that counts as noise when the beam widens."""
LEAST = 1e-4
"""Figures below this count as this, so that their logarithm has a value."""

TreeOf = Callable[[LabelledPoints], tuple[Tree, Csr]]
"""Training points → a tree as it will be made of all points, and the centroids of labels."""


@dataclass(frozen=True)
class Choice:
    """Options with numbers for C and γ, and what was tried, for the manifest; None where nothing was tried."""

    options: LinearOptions
    report: dict[str, Any] | None


@dataclass(frozen=True)
class Trial:
    """Figures of held-out points, of the beam that serves and the wide one: float64[2, Q]."""

    cost: float
    gamma: float
    figures: NDArray[np.float64]

    @property
    def quality(self) -> float:
        return float(np.exp(_logs(self.figures.min(axis=0)).mean()))

    @property
    def fall(self) -> float:
        """By how much the results get worse as the beam widens, relatively."""
        narrow, wide = _logs(self.figures).mean(axis=1)
        return float(narrow - wide)

    def row(self) -> dict[str, Any]:
        beams = [dict(zip(MEASURES, map(float, own.round(4)), strict=True)) for own in self.figures]
        return {"cost": self.cost, "gamma": self.gamma, "quality": round(self.quality, 5), "at_beam": beams[0], "at_wide_beam": beams[1]}


def choose(
    data: LabelledPoints,
    tree_of: TreeOf,
    options: LinearOptions,
    beam_size: int,
    threads: int = 1,
    seed: int = 0,
) -> Choice:
    """The options with C and γ chosen where they are "auto".

    tree_of    of the points that a trial learns from: held-out points must not shape its tree
    beam_size  that will serve by default
    """
    if AUTO not in (options.cost, options.gamma):
        return Choice(options, None)
    known_B = np.flatnonzero(np.diff(data.labels.indptr)).astype(np.int64)
    data = data.take(known_B[_most_values(data.points[known_B], seed)])
    folds = list(_folds(data.unseen, len(data), seed))
    held_out = sum(len(held) for held, _ in folds)
    if held_out < LEAST_HELD_OUT:
        known = {"cost": options.known_cost, "gamma": options.ranking.gamma}
        log.info("too few points to choose by (%d of %d could be held out): C = %g, γ = %g", held_out, len(data), *known.values())
        return Choice(options.model_copy(update=known), None)
    parts = []
    for held, kept in folds:
        training = data.take(kept)
        parts.append((training, *tree_of(training), data.take(held)))
    if options.gamma != AUTO:
        gammas: Sequence[float] = (options.gamma,)
    else:
        gammas = GAMMAS if parts[0][1].height > 1 else (1.0,)  # γ weighs parents, and here nobody has one but the root
    beams = beam_size, WIDER * beam_size
    trials: dict[float, list[Trial]] = {}

    def quality(tried: Options) -> float:
        cost = tried["cost"]
        figures = np.zeros((len(gammas), 2, len(MEASURES)))
        for training, tree, centroids, held_points in parts:
            chunks = fit_linear(training, tree, options.model_copy(update={"cost": cost}), threads, seed, centroids=centroids)
            for g, gamma in enumerate(gammas):
                figures[g] += len(held_points) * _measured(tree, chunks, options, gamma, held_points, beams, threads)
        trials[cost] = [Trial(cost, gamma, own / held_out) for gamma, own in zip(gammas, figures, strict=True)]
        best = _best(trials[cost])
        log.info("C = %g: γ = %g is best, quality %.4f", cost, best.gamma, best.quality)
        return best.quality

    start, grid = (FIRST_COST, [COSTS]) if options.cost == AUTO else (options.cost, [])
    search(quality, [{"cost": start}], grid, NO_DEADLINE)
    best = max((_best(own) for own in trials.values()), key=lambda trial: trial.quality)
    rows = [trial.row() for own in trials.values() for trial in own]
    log.info("C = %g, γ = %g, chosen by %d held-out points", best.cost, best.gamma, held_out)
    report = {"held_out": held_out, "beams": list(beams), "cost": best.cost, "gamma": best.gamma, "trials": rows}
    return Choice(options.model_copy(update={"cost": best.cost, "gamma": best.gamma}), report)


def _best(trials: list[Trial]) -> Trial:
    """The best γ of one C, among those with which quality does not fall; of equal ones the largest."""
    steady = [trial for trial in trials if trial.fall <= FALL] or [min(trials, key=lambda trial: trial.fall)]
    return max(steady, key=lambda trial: (trial.quality, trial.gamma))


def _measured(
    tree: Tree, chunks: Chunks, options: LinearOptions, gamma: float, held: LabelledPoints, beams: Sequence[int], threads: int
) -> NDArray[np.float64]:
    """float64[beams, Q]: the means of `MEASURES`."""
    searched = ChunkSearch(tree, chunks, options.ranking.model_copy(update={"gamma": gamma}), threads=threads)
    points, found = as_rows(held.points), []
    try:
        for beam in beams:
            leaves_BM = searched.search(points, BeamParams.uniform(len(held), beam, min(RESULTS, tree.item_count))).leaves_BM
            found.append(measures_of(items_at(tree, leaves_BM), [held.labels_of(b) for b in range(len(held))]).mean(axis=1))
    finally:
        searched.close()
    return np.array(found)


def items_at(tree: Tree, leaves_BM: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64[B, M]: the item rows of leaves, NO_ITEM where there is none."""
    return np.where(leaves_BM >= 0, tree.leaf_item[np.maximum(leaves_BM - tree.leaf_offset, 0)], NO_ITEM)


def measures_of(rows_BM: NDArray[np.int64], relevant: Sequence[NDArray[np.int64]]) -> NDArray[np.float64]:
    """float64[Q, B]: `MEASURES` of what was found for points, best first."""
    return np.stack([ndcg_at_m(rows_BM, relevant, 5), precision_recall_f(rows_BM, relevant, RESULTS)[1]])


def _logs(figures: NDArray[np.float64]) -> NDArray[np.float64]:
    logs: NDArray[np.float64] = np.log(np.maximum(figures, LEAST))
    return logs


def _most_values(points: Csr, seed: int) -> NDArray[np.int64]:
    """The positions of all points, or of a random part of them, ascending."""
    count = points.shape[0]
    if points.nnz <= MOST_VALUES:
        return np.arange(count)
    order = np.random.default_rng([seed, 0xFA1F]).permutation(count)
    counts = np.diff(points.indptr)[order]
    return np.sort(order[: int(np.searchsorted(np.cumsum(counts), MOST_VALUES, side="right"))])


def _folds(unseen: NDArray[np.int64], count: int, seed: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """Positions that are held out, and those that are learned from, both ascending. No position is held out twice.

    Of `unseen` alone some are held out, and some of the others left out; all others below `count` are learned from.
    """
    order = np.random.default_rng([seed, 0xF01D]).permutation(unseen)
    size = min(int(SHARE * len(unseen)), HELD_OUT)
    learned = max(LEAST_LEARNED, int(LEARNED * (len(unseen) - size)))
    for fold in range(min(int(1 / SHARE), math.ceil(HELD_OUT / size)) if size else 0):
        held, _, left_out = np.split(np.roll(order, -fold * size), [size, size + learned])
        is_learned = np.ones(count, np.bool_)
        is_learned[held] = is_learned[left_out] = False
        yield np.sort(held), np.flatnonzero(is_learned)
