"""Learns a bundle's stacking (espalier.stacking): tables of training points, and a network that learns from points held out.

Trees are trained on a part of the points, and the network learns from what they find for the others: for a fifth of the points at a time,
until about 3,000 were held out. It is measured on a fifth of these, which it does not learn from. Texts of items are never held out: a
tree has seen them in another form, and the network would learn to look for items whose whole text is the query.

Knows what is held out, and whether a network is kept. Does not know files of bundles.

Legend: B points, C candidates.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.errors import InvalidConfig
from espalier.manifest import Ranking, StackingInfo
from espalier.stacking import Stacking, StackingNetwork

from ..data.xmc import LabelledPoints
from ..linear.choosing import MEASURES, RESULTS, measures_of
from ..linear.stacking_examples import Examples, Train, examples_of
from ..linear.stacking_network import fitted, logits
from ..linear.stacking_tables import Weighing, tables_of
from ..specification.linear import StackingOptions

log = logging.getLogger(__name__)

LEAST_POINTS, LEAST_WANTED = 2000, 10
"""With fewer labelled training points, `auto` is none; and `network` is refused, since nothing could be measured."""
SHARE, HELD_OUT = 0.2, 3_000
"""The share that a fold holds out, and the points that folds are added up to."""
MOST_CANDIDATES = 1 << 23
"""Of all points held out: 0.5 GB of features. Of more than 419 candidates fewer points are held out."""
ONE_FOLD = 1 << 23
"""Feature values of a set from which on one fold must do: each is a training."""


def learn(
    data: LabelledPoints,
    weighing: Weighing,
    train: Train,
    ranking: Ranking,
    options: StackingOptions,
    beam_size: int,
    seed: int,
    work: Path,
) -> Stacking | None:
    """The stacking of trees as `train` makes them; None where none is wanted, or it finds no more.

    data      all training points
    work      a folder; what a fold gave is kept there, for a run that was killed
    Raises InvalidConfig where a network is wanted of fewer than LEAST_WANTED points with labels.
    """
    if options.model == "none":
        return None
    known = data.unseen[np.diff(data.labels.indptr)[data.unseen] > 0]
    others = "" if data.seen_B is None else " that are not texts of items"
    if options.model == "auto" and len(known) < LEAST_POINTS:
        log.info("no stacking: %d points with labels%s, it takes %d", len(known), others, LEAST_POINTS)
        return None
    if len(known) < LEAST_WANTED:
        expected = f"none: {len(known)} training points have labels{others}, a network takes {LEAST_WANTED}"
        raise InvalidConfig("stacking.model", options.model, expected)
    depth = min(options.candidates, data.labels.shape[1])
    parts = []
    for fold, held in enumerate(folds(known, data.points.nnz, depth, seed)):
        file = work / f"stacking-{fold + 1}.npz"
        if not file.is_file():
            kept = np.setdiff1d(np.arange(len(data)), held)
            part = examples_of(data, held, kept, weighing, train, ranking, depth, beam_size, options.points, seed)
            unfinished = file.with_suffix(".part.npz")
            np.savez(unfinished, features=part.features, targets=part.targets, rows=part.rows, points=part.points)
            unfinished.replace(file)
        with np.load(file) as stored:
            parts.append(Examples(**stored))
        log.info("stacking: %d points held out so far", sum(len(part.points) for part in parts))
    examples = Examples.together(parts)
    parts.clear()
    order = np.random.default_rng([seed, 0x57AC]).permutation(len(examples.points))
    judged, learned = np.sort(order[: len(order) // 5]), np.sort(order[len(order) // 5 :])
    weight_I = weighing.weights(data.labels.shape[1])
    network = fitted(examples.take(learned), seed)
    report = gain_of(network, examples.take(judged), data, weight_I, options.power)
    is_kept = options.model == "network" or report["gain"] > report["standard_error"]
    log.info(
        "stacking: nDCG@5 %.4f instead of %.4f, recall@10 %.4f instead of %.4f on %d points held out, gain %.4f, standard error %.4f: %s",
        *(figure for name in MEASURES for figure in (report["stacked"][name], report["trees"][name])),
        *(report["held_out"], report["gain"], report["standard_error"], "kept" if is_kept else "left out"),
    )
    if not is_kept:
        return None
    tables = tables_of(data, weighing, options.points, seed)
    info = StackingInfo(candidates=options.candidates, power=options.power, points=tables.points, training=report)
    return Stacking(info, tables, network)


def folds(known: NDArray[np.int64], values: int, depth: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Positions that are held out together, ascending; no position twice."""
    order = np.random.default_rng([seed, 0xF01D5]).permutation(known)
    most = min(HELD_OUT, MOST_CANDIDATES // depth)
    size = max(1, min(int(SHARE * len(order)), most))
    count = 1 if values > ONE_FOLD else min(-(-most // size), int(1 / SHARE))
    for fold in range(count):
        yield np.sort(order[fold * size : (fold + 1) * size])


def gain_of(
    network: StackingNetwork, examples: Examples, data: LabelledPoints, weight_I: NDArray[np.float64], power: float
) -> dict[str, Any]:
    """Means of nDCG@5 and recall@10 of points that the network did not see, in the order that is served and the trees', and the gain of
    their mean.

    weight_I, power  of `espalier.stacking`
    """
    wide_BC = logits(network, examples.features).astype(np.float64)
    keys_BC = -np.logaddexp(0, -wide_BC) + power * np.log(weight_I)[examples.rows]
    keys_BC[examples.rows < 0] = -np.inf
    stacked_BC = np.take_along_axis(examples.rows, np.argsort(-keys_BC, axis=1, kind="stable"), axis=1)
    relevant = [data.labels_of(point) for point in examples.points.tolist()]
    trees_QB, stacked_QB = (measures_of(rows_BC[:, :RESULTS], relevant) for rows_BC in (examples.rows, stacked_BC))
    gain_B = (stacked_QB - trees_QB).mean(axis=0)
    error = float(gain_B.std(ddof=1) / np.sqrt(len(gain_B)))
    trees, stacked = (dict(zip(MEASURES, figures_QB.mean(axis=1).round(4).tolist(), strict=True)) for figures_QB in (trees_QB, stacked_QB))
    return {
        "held_out": len(gain_B),
        "trees": trees,
        "stacked": stacked,
        "gain": round(float(gain_B.mean()), 5),
        "standard_error": round(error, 5),
    }
