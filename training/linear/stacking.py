"""Learns a bundle's stacking (espalier.stacking): tables of training points, and a network that learns from held-out points.

A fold holds out a fifth of the points, trains trees on the others, and the network learns from the trees' candidates for the held-out
points. Folds are added until about 3,000 points were held out. The network is tested on a fifth of these, which it does not learn from.
Texts of items are never held out: a tree has seen them in another form, and the network would learn to prefer items whose whole text is
the query.

Knows which points are held out and whether the bundle gets a network. Does not know files of bundles.

Legend: B points, C candidates, X features of candidates.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.linalg import block_diag

from espalier.arrays import Array, Float32, Float64, Int64
from espalier.durable import atomic_write
from espalier.errors import InvalidConfig
from espalier.manifest import Ranking, StackingInfo
from espalier.stacking import FARTHEST, NETWORK, Stacking, StackingNetwork

from ..data.xmc import LabelledPoints
from ..linear.choosing import MEASURES, RESULTS, measures_of
from ..linear.stacking_examples import StackingExamples, Train, examples_of
from ..linear.stacking_tables import Weighing, tables_of
from ..specification.linear import StackingOptions

log = logging.getLogger(__name__)

LEAST_POINTS, LEAST_WANTED = 2000, 10
"""With fewer labelled training points than the first, `auto` gives no stacking; with fewer than the second, `network` is refused."""
HELD_OUT_SHARE, HELD_OUT = 0.2, 3_000
"""The share of the points that a fold holds out, and the number of held-out points at which no fold is added."""
MOST_CANDIDATES = 1 << 23
"""Most candidates of all held-out points (0.5 GB of features): with more than 419 a point, fewer points are held out."""
LARGE_SET = 1 << 23
"""Sets with more feature values get one fold only: each fold is a training."""
UNITS, NETWORKS = (64, 32), 3
"""Units of the layers of one network, and how many of different seeds are averaged: held-out P@1 of three sets rose by .1 to .2."""
PASSES, STEPS, BATCH, RATE, DECAY = 10, 1000, 32, 3e-3, 1e-5
"""Adam with one cycle of the learning rate: most passes, about how many steps in all, points of a batch, rate and weight decay."""
BLOCK = 256
"""Points whose hidden units are held at a time."""


def learn_stacking(
    data: LabelledPoints,
    weighing: Weighing,
    train: Train,
    ranking: Ranking,
    options: StackingOptions,
    beam_size: int,
    seed: int,
    work: Path,
) -> Stacking | None:
    """The stacking of trees as `train` makes them; None if none is configured, or it gains nothing.

    data      all training points
    work      a folder where the examples of each fold are stored, so that a killed run can go on
    Raises InvalidConfig if a network is configured and fewer than LEAST_WANTED points have labels.
    """
    if options.model == "none":
        return None
    labelled = data.unseen[np.diff(data.labels.indptr)[data.unseen] > 0]
    condition = "" if data.seen_B is None else " that are not texts of items"
    if options.model == "auto" and len(labelled) < LEAST_POINTS:
        log.info("no stacking: %d points with labels%s, it takes %d", len(labelled), condition, LEAST_POINTS)
        return None
    if len(labelled) < LEAST_WANTED:
        expected = f"none: {len(labelled)} training points have labels{condition}, a network takes {LEAST_WANTED}"
        raise InvalidConfig("stacking.model", options.model, expected)
    depth = min(options.candidates, data.labels.shape[1])
    fold_examples: list[dict[str, Array]] = []
    for fold, held_positions in enumerate(folds(labelled, data.points.nnz, depth, seed)):
        file = work / f"stacking-{fold + 1}.npz"
        if not file.is_file():
            training_positions = np.setdiff1d(np.arange(len(data)), held_positions)
            of_fold = examples_of(
                data, held_positions, training_positions, weighing, train, ranking, depth, beam_size, options.points, seed
            )
            with atomic_write(file) as part, part.open("wb") as stream:
                np.savez(stream, features=of_fold.features, targets=of_fold.targets, rows=of_fold.rows, points=of_fold.points)
        with np.load(file) as arrays:
            fold_examples.append(dict(arrays))
        log.info("stacking: %d points held out so far", sum(len(of_fold["points"]) for of_fold in fold_examples))
    examples = StackingExamples(**{name: np.concatenate([of_fold[name] for of_fold in fold_examples]) for name in fold_examples[0]})
    fold_examples.clear()
    order = np.random.default_rng([seed, 0x57AC]).permutation(len(examples.points))
    test_rows, training_rows = np.sort(order[: len(order) // 5]), np.sort(order[len(order) // 5 :])
    weight_I = weighing.weights(data.labels.shape[1])
    network = fit_network(examples.take(training_rows), seed)
    report = gain_of(network, examples.take(test_rows), data, weight_I, options.power)
    is_kept = options.model == "network" or report["gain"] > report["standard_error"]
    log.info(
        "stacking: nDCG@5 %.4f instead of %.4f, recall@10 %.4f instead of %.4f on %d points held out, gain %.4f, standard error %.4f: %s",
        *(figure for name in MEASURES for figure in (report["stacked"][name], report["trees"][name])),
        *(report["held_out"], report["gain"], report["standard_error"], "kept" if is_kept else "left out"),
    )
    if not is_kept:
        return None
    if report["gain"] < 0:
        log.warning(
            "stacking.model = network: the network finds less than the trees alone: the mean of nDCG@5 and recall@10 changes by %.4f on %d "
            "points held out. With auto it is left out",
            *(report["gain"], report["held_out"]),
        )
    tables = tables_of(data, weighing, options.points, seed)
    info = StackingInfo(candidates=options.candidates, power=options.power, points=tables.points, training=report)
    return Stacking(info, tables, network)


def folds(labelled: Int64, values: int, depth: int, seed: int) -> Iterator[Int64]:
    """The held-out positions of each fold, ascending; no position is in two folds."""
    order = np.random.default_rng([seed, 0xF01D5]).permutation(labelled)
    most = min(HELD_OUT, MOST_CANDIDATES // depth)
    size = max(1, min(int(HELD_OUT_SHARE * len(order)), most))
    count = 1 if values > LARGE_SET else min(-(-most // size), int(1 / HELD_OUT_SHARE))
    for fold in range(count):
        yield np.sort(order[fold * size : (fold + 1) * size])


def gain_of(network: StackingNetwork, examples: StackingExamples, data: LabelledPoints, weight_I: Float64, power: float) -> dict[str, Any]:
    """Mean nDCG@5 and recall@10 of points that the network did not learn from, in the stacked order and in the trees' order, and the gain
    of their mean.

    weight_I, power  of `espalier.stacking`
    """
    logit_BC = logits(network, examples.features).astype(np.float64)
    keys_BC = -np.logaddexp(0, -logit_BC) + power * np.log(weight_I)[examples.rows]
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


def fit_network(examples: StackingExamples, seed: int) -> StackingNetwork:
    """The network, trained by the logistic loss of all candidates: several side by side, whose logits it averages."""
    is_item = examples.rows >= 0
    mean, scale = np.empty((2, examples.features.shape[2]), np.float32)
    for x in range(len(mean)):  # one at a time: there may be a billion numbers
        column = examples.features[..., x][is_item].astype(np.float64)
        mean[x], scale[x] = column.mean(), 1 / max(float(column.std()), 1e-3)
    inputs = torch.from_numpy(_standardised(examples.features, mean, scale))
    targets, weights = torch.from_numpy(examples.targets), torch.from_numpy(is_item.astype(np.float32))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that the result does not depend on their number
    try:
        networks = [_train_network(inputs, targets, weights, int(state)) for state in np.random.SeedSequence(seed).generate_state(NETWORKS)]
    finally:
        torch.set_num_threads(threads)
    weight_1, bias_1, weight_2, bias_2, weight_3, bias_3 = (
        [array.detach().numpy() for array in layers] for layers in zip(*networks, strict=True)
    )
    sums = (np.hstack(weight_1), np.concatenate(bias_1), block_diag(*weight_2), np.concatenate(bias_2))
    arrays = [array.astype(np.float32) for array in (*sums, np.concatenate(weight_3) / NETWORKS, np.mean(bias_3, axis=0))]
    return StackingNetwork(**dict(zip(NETWORK, [mean, scale, *arrays], strict=True)))


def logits(network: StackingNetwork, features: Float32) -> Float32:
    """float32[B, C] of features float32[B, C, X]: the network before σ."""
    out = np.empty(features.shape[:2], np.float32)
    for begin in range(0, len(features), BLOCK):
        hidden = _standardised(features[begin : begin + BLOCK], network.mean, network.scale)
        hidden = np.maximum(hidden @ network.weight_1 + network.bias_1, 0)
        hidden = np.maximum(hidden @ network.weight_2 + network.bias_2, 0)
        out[begin : begin + BLOCK] = hidden @ network.weight_3 + network.bias_3
    return out


def _standardised(features: Float32, mean: Float32, scale: Float32) -> Float32:
    z = features - mean
    z *= scale
    np.clip(z, -FARTHEST, FARTHEST, out=z)
    return z


def _train_network(inputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """weight_1, bias_1, …, bias_3."""
    random = torch.Generator().manual_seed(seed)
    layers = []
    for fan_in, fan_out in pairwise((inputs.shape[2], *UNITS, 1)):  # uniform, biases too: with biases of 0, some outputs stayed below 0
        layers += [(2 * torch.rand(shape, generator=random) - 1) / fan_in**0.5 for shape in ((fan_in, fan_out), (fan_out,))]
    layers[-2] = layers[-2][:, 0]
    for layer in layers:
        layer.requires_grad_()
    count = len(inputs)
    size = min(BATCH, count)
    passes = max(1, min(PASSES, STEPS // (count // size)))
    steps = passes * (count // size)
    optimiser = torch.optim.AdamW(layers, lr=RATE, weight_decay=DECAY)
    # One step more than are made: with ten steps, PyTorch would divide by the length of the first phase, which is 0.
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=steps + 1, pct_start=0.1)
    for _ in range(passes):
        order = torch.randperm(count, generator=random)
        for begin in range(0, count - size + 1, size):
            batch = order[begin : begin + size]
            hidden = inputs[batch]
            for layer in range(len(UNITS)):
                hidden = torch.relu(hidden @ layers[2 * layer] + layers[2 * layer + 1])
            logits = hidden @ layers[-2] + layers[-1]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets[batch], weights[batch])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    return layers
