"""C and γ of linear scorers, chosen on held-out training points by the search that will serve.

A quarter of the points is held out, at most a thousand; with few points, each quarter in turn. Texts of items are never held out: the tree
has seen them in another form. Scorers learn from a quarter of the remaining points, if that is enough. For each γ the held-out points are
searched with the serving beam and with one five times as wide. Quality is the geometric mean of nDCG@5 and recall@10, each the lower of
both beams. Precision@1 counts only as a part of nDCG@5: a single draw a point would be noise. Recall@100 does not count: a smaller C raises
it at the expense of the first results. A γ with which quality falls as the beam widens is not chosen if there is another. C climbs from its
first value while quality rises; γ is chosen for each C, without training. The final scorers learn from all points with this C and γ.

A configured C or γ stays. The matcher's beam ranks with γ = .5 in trials whose γ is not configured.

Knows scorers, searches and figures. Does not know files or bundles.

Legend: B points, M results, Q measures.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from espalier.arrays import Float64, Int64
from espalier.chunks import Chunks
from espalier.engines.linear.chunk_search import BeamParams, ChunkSearch
from espalier.metrics import ndcg_at_m, precision_recall_f
from espalier.search import NO_ITEM
from espalier.tree import Tree

from ..data.csr import Csr, as_rows
from ..data.xmc import LabelledPoints
from ..linear.fit import fit_linear
from ..retrieval.task import NO_DEADLINE
from ..retrieval.tuning import Option, Options, geometric_mean, search
from ..specification.linear import AUTO, UNCHOSEN_GAMMA, LinearOptions

log = logging.getLogger(__name__)

GAMMAS = (0.0, 0.3, 0.5, 0.7, 0.85, 1.0)
COSTS = Option("cost", (0.03, 0.1, 0.3, 1.0, 3.0))
FIRST_COST = 0.3
WIDE_FACTOR = 5
"""The wide beam, in beams that serve."""
HELD_OUT_SHARE, HELD_OUT = 0.25, 1000
"""The share that a fold holds out, and the points that folds are added up to."""
LEARNED_SHARE, LEAST_LEARNED = 0.25, 4000
"""A trial learns from this share of the points that are not held out, but at least so many; texts of items come on top."""
LEAST_HELD_OUT = 200
"""With fewer held-out points, differences are noise: nothing is chosen."""
MOST_VALUES = 1 << 23
"""Most feature values in the data of the trials; a random part of a larger set is used."""
MEASURES = "ndcg@5", "recall@10"
RESULTS = 10
MOST_FALL = 0.005
"""The relative fall of quality that counts as noise when the beam widens."""

TreeOf = Callable[[LabelledPoints], tuple[Tree, Csr]]
"""Training points → a tree as it will be made of all points, and the centroids of labels."""


class Fold(NamedTuple):
    """The training points of a trial with the tree over them, and its held-out points."""

    training: LabelledPoints
    tree: Tree
    centroids: Csr
    held_out: LabelledPoints


@dataclass(frozen=True)
class Choice:
    """Options with numbers for C and γ. report: the trials, for the manifest; None without trials."""

    options: LinearOptions
    report: dict[str, Any] | None


@dataclass(frozen=True)
class Trial:
    """Figures of held-out points, of the beam that serves and the wide one: float64[2, Q]."""

    cost: float
    gamma: float
    figures: Float64

    @property
    def quality(self) -> float:
        return geometric_mean(self.figures.min(axis=0))

    @property
    def fall(self) -> float:
        """The relative fall of quality as the beam widens."""
        narrow, wide = map(geometric_mean, self.figures)
        return math.log(narrow / wide)

    def row(self) -> dict[str, Any]:
        beams = [dict(zip(MEASURES, map(float, figures.round(4)), strict=True)) for figures in self.figures]
        return {"cost": self.cost, "gamma": self.gamma, "quality": round(self.quality, 5), "at_beam": beams[0], "at_wide_beam": beams[1]}


def choose(
    data: LabelledPoints,
    tree_of: TreeOf,
    options: LinearOptions,
    beam_size: int,
    threads: int = 1,
    seed: int = 0,
    unchosen_gamma: float = UNCHOSEN_GAMMA,
) -> Choice:
    """The options with C and γ chosen where they are "auto".

    tree_of         builds the tree of a trial from its training points alone: held-out points must not shape it
    beam_size       the default beam size in serving
    unchosen_gamma  γ if too few points can be held out
    """
    if AUTO not in (options.cost, options.gamma):
        return Choice(options, None)
    labelled_B = np.flatnonzero(np.diff(data.labels.indptr)).astype(np.int64)
    data = data.take(labelled_B[_most_values(data.points[labelled_B], seed)])
    position_pairs = list(_folds(data.unseen, len(data), seed))
    held_out_count = sum(len(held_positions) for held_positions, _ in position_pairs)
    if held_out_count < LEAST_HELD_OUT:
        defaults = {"cost": options.known_cost, "gamma": unchosen_gamma if options.gamma == AUTO else options.gamma}
        log.info("too few points to choose by (%d of %d could be held out): C = %g, γ = %g", held_out_count, len(data), *defaults.values())
        return Choice(options.model_copy(update=defaults), None)
    fold_data = []
    for held_positions, training_positions in position_pairs:
        training = data.take(training_positions)
        fold_data.append(Fold(training, *tree_of(training), data.take(held_positions)))
    if options.gamma != AUTO:
        gammas: Sequence[float] = (options.gamma,)
    else:
        gammas = GAMMAS if fold_data[0].tree.height > 1 else (1.0,)  # γ weighs parents, and here the only parent is the root
    beams = beam_size, WIDE_FACTOR * beam_size
    trials: dict[float, list[Trial]] = {}

    def quality(trial_options: Options) -> float:
        cost = trial_options["cost"]
        figures = np.zeros((len(gammas), 2, len(MEASURES)))
        for fold in fold_data:
            with_cost = options.model_copy(update={"cost": cost})
            chunks = fit_linear(fold.training, fold.tree, with_cost, threads, seed, centroids=fold.centroids)
            for g, gamma in enumerate(gammas):
                figures[g] += len(fold.held_out) * _measure(fold.tree, chunks, options, gamma, fold.held_out, beams, threads)
        trials[cost] = [Trial(cost, gamma, sums / held_out_count) for gamma, sums in zip(gammas, figures, strict=True)]
        best = _best(trials[cost])
        log.info("C = %g: γ = %g is best, quality %.4f", cost, best.gamma, best.quality)
        return best.quality

    start, grid = (FIRST_COST, [COSTS]) if options.cost == AUTO else (options.cost, [])
    search(quality, [{"cost": start}], grid, NO_DEADLINE)
    best = max((_best(of_cost) for of_cost in trials.values()), key=lambda trial: trial.quality)
    rows = [trial.row() for of_cost in trials.values() for trial in of_cost]
    log.info("C = %g, γ = %g, chosen by %d held-out points", best.cost, best.gamma, held_out_count)
    report = {"held_out": held_out_count, "beams": list(beams), "cost": best.cost, "gamma": best.gamma, "trials": rows}
    return Choice(options.model_copy(update={"cost": best.cost, "gamma": best.gamma}), report)


def _best(trials: list[Trial]) -> Trial:
    """The best γ of one C, among those whose quality does not fall with a wider beam; among equal ones the largest."""
    steady = [trial for trial in trials if trial.fall <= MOST_FALL] or [min(trials, key=lambda trial: trial.fall)]
    return max(steady, key=lambda trial: (trial.quality, trial.gamma))


def _measure(
    tree: Tree, chunks: Chunks, options: LinearOptions, gamma: float, held_out: LabelledPoints, beams: Sequence[int], threads: int
) -> Float64:
    """float64[beams, Q]: the means of `MEASURES`."""
    search = ChunkSearch(tree, chunks, options.ranking.model_copy(update={"gamma": gamma}), threads=threads)
    points, means = as_rows(held_out.points), []
    try:
        for beam in beams:
            leaves_BM = search.search(points, BeamParams.uniform(len(held_out), beam, min(RESULTS, tree.item_count))).leaves_BM
            means.append(measures_of(items_at(tree, leaves_BM), [held_out.labels_of(b) for b in range(len(held_out))]).mean(axis=1))
    finally:
        search.close()
    return np.array(means)


def items_at(tree: Tree, leaves_BM: Int64) -> Int64:
    """int64[B, M]: the item rows of leaves, NO_ITEM for none."""
    return np.where(leaves_BM >= 0, tree.leaf_item[np.maximum(leaves_BM - tree.leaf_offset, 0)], NO_ITEM)


def measures_of(rows_BM: Int64, relevant: Sequence[Int64]) -> Float64:
    """float64[Q, B]: `MEASURES` of the item rows found for each point, best first."""
    return np.stack([ndcg_at_m(rows_BM, relevant, 5), precision_recall_f(rows_BM, relevant, RESULTS)[1]])


def _most_values(points: Csr, seed: int) -> Int64:
    """The positions of all points, or of a random part of them, ascending."""
    count = points.shape[0]
    if points.nnz <= MOST_VALUES:
        return np.arange(count)
    order = np.random.default_rng([seed, 0xFA1F]).permutation(count)
    counts = np.diff(points.indptr)[order]
    return np.sort(order[: int(np.searchsorted(np.cumsum(counts), MOST_VALUES, side="right"))])


def _folds(unseen: Int64, count: int, seed: int) -> Iterator[tuple[Int64, Int64]]:
    """Held-out positions and training positions, both ascending. No position is held out twice.

    Only positions in `unseen` are held out or left out; all others below `count` are training positions.
    """
    order = np.random.default_rng([seed, 0xF01D]).permutation(unseen)
    held_out_size = min(int(HELD_OUT_SHARE * len(unseen)), HELD_OUT)
    training_size = max(LEAST_LEARNED, int(LEARNED_SHARE * (len(unseen) - held_out_size)))
    for fold in range(min(int(1 / HELD_OUT_SHARE), math.ceil(HELD_OUT / held_out_size)) if held_out_size else 0):
        held_out, _, left_out = np.split(np.roll(order, -fold * held_out_size), [held_out_size, held_out_size + training_size])
        is_learned = np.ones(count, np.bool_)
        is_learned[held_out] = is_learned[left_out] = False
        yield np.sort(held_out), np.flatnonzero(is_learned)
