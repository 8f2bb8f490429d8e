"""Learns a bundle's stacking (espalier.stacking): tables of training points, and a network that learns from points held out.

Trees that have seen a point are too sure of it. So trees are trained on a part of the points, and the network learns from what they find
for the others: for a fifth of the points at a time, until about 20,000 were held out. Tables are made of the part alone, too.

Knows trees, searches and networks. Does not know files or bundles.

Legend: B points, I items, C candidates, X features of candidates.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csc_array, csr_array

from espalier.chunks import TreeChunks
from espalier.engines.linear.chunk_search import BeamParams, ChunkSearch
from espalier.engines.stacked_keys import KNOWN, Scratch, StackingArrays, candidate_features
from espalier.errors import InvalidConfig
from espalier.manifest import Ranking, StackingInfo
from espalier.metrics import ndcg_at_m, precision_recall_f
from espalier.search import NO_ITEM
from espalier.stacking import FARTHEST, MOST_BESIDE, MOST_LABELS, NETWORK, Stacking, StackingNetwork, StackingTables
from training.data.csr import Csr, as_rows, normalised
from training.data.relevance import scale_of
from training.data.xmc import LabelledPoints
from training.specification.stacking import StackingOptions

log = logging.getLogger(__name__)

LEAST_POINTS, LEAST_WANTED = 2000, 10
"""With fewer labelled training points, `auto` is none; and `network` is refused, since nothing could be measured."""
SHARE, HELD_OUT = 0.2, 20_000
"""The share that a fold holds out, and the points that folds are added up to."""
ONE_FOLD = 1 << 23
"""Feature values of a set from which on one fold must do: each is a training."""
MOST_POSTINGS = 1 << 20
"""Postings that a query reads on average; of larger sets fewer points vote."""
LEFT_OUT = 0.1
"""The share of points' squared lengths that features without postings hold: frequent words say little and make most of the work. On
EURLex-4K a query reads 80,000 numbers instead of 870,000, at the same quality of held-out points."""
MOST_PAIRS = 1 << 28
"""Pairs of labels of a point that are counted."""
BLOCK_PAIRS = 1 << 24
"""Of these, held at a time, unless one item has more."""
UNITS = (64, 32)
PASSES, BATCH, RATE, DECAY = 20, 64, 3e-3, 1e-5
"""Of Adam with one cycle of the learning rate; a batch is of points."""
RESULTS = 10

Train = Callable[[LabelledPoints], Sequence[TreeChunks]]
"""Trees as the model has them, learned from some points."""


@dataclass(frozen=True)
class Weighing:
    """What relevance is: `labels` divided by `scale`; where `weight_I` is given, an item's own weight instead, and labels count 1.

    weight_I  float64[I], in (0, 1], or None
    """

    scale: float
    weight_I: NDArray[np.float64] | None

    @staticmethod
    def of(labels: Csr, inverse_propensity_I: NDArray[np.float64] | None) -> Weighing:
        """Of training labels; with inverse propensities where they are the relevance."""
        scale = scale_of(labels)
        return Weighing(scale, None if inverse_propensity_I is None else np.minimum(inverse_propensity_I / scale, 1))

    def targets(self, labels: Csr) -> Csr:
        """float32[B, I], in (0, 1]: what the network estimates."""
        values = np.ones(labels.nnz) if self.weight_I is not None else np.maximum(labels.data / self.scale, np.finfo(np.float32).tiny)
        return csr_array((values.astype(np.float32), labels.indices, labels.indptr), shape=labels.shape)


@dataclass(frozen=True, eq=False)
class Candidates:
    """What a search found for points, best first: rows int64[B, C], −1 as padding, and ranks float32[B, C], −inf there."""

    rows_BC: NDArray[np.int64]
    ranks_BC: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Examples:
    """What the network learns from: features float32[B, C, X], targets float32[B, C], candidates' rows int64[B, C] and the points' own."""

    features: NDArray[np.float32]
    targets: NDArray[np.float32]
    rows: NDArray[np.int64]
    points: NDArray[np.int64]

    def take(self, places: NDArray[np.int64]) -> Examples:
        return Examples(self.features[places], self.targets[places], self.rows[places], self.points[places])

    @staticmethod
    def together(parts: Sequence[Examples]) -> Examples:
        return Examples(*(np.concatenate([getattr(part, name) for part in parts]) for name in ("features", "targets", "rows", "points")))


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

    data  all training points
    work  a folder; what a fold gave is kept there, for a run that was killed
    Raises InvalidConfig where a network is wanted of fewer than LEAST_WANTED points with labels.
    """
    if options.model == "none":
        return None
    known = np.flatnonzero(np.diff(data.labels.indptr)).astype(np.int64)
    if options.model == "auto" and len(known) < LEAST_POINTS:
        log.info("no stacking: %d points with labels, it takes %d", len(known), LEAST_POINTS)
        return None
    if len(known) < LEAST_WANTED:
        expected = f"none: {len(known)} training points have labels, a network takes {LEAST_WANTED}"
        raise InvalidConfig("stacking.model", options.model, expected)
    depth = min(options.candidates, data.labels.shape[1])
    parts = []
    for fold, held in enumerate(folds(known, data.points.nnz, seed)):
        file = work / f"stacking-{fold + 1}.npz"
        if not file.is_file():
            kept = np.setdiff1d(np.arange(len(data)), held)
            part = _examples(data, held, kept, weighing, train, ranking, depth, beam_size, options.points, seed)
            unfinished = file.with_suffix(".part.npz")
            np.savez(unfinished, features=part.features, targets=part.targets, rows=part.rows, points=part.points)
            unfinished.replace(file)
        with np.load(file) as stored:
            parts.append(Examples(**stored))
        log.info("stacking: %d points held out", len(parts[-1].points))
    examples = Examples.together(parts)
    order = np.random.default_rng([seed, 0x57AC]).permutation(len(examples.points))
    judged, learned = np.sort(order[: len(order) // 5]), np.sort(order[len(order) // 5 :])
    report = _judged(fitted(examples.take(learned), seed), examples.take(judged), data)
    log.info("stacking: %s", report)
    if options.model == "auto" and not report["gain"] > report["standard_error"]:
        return None
    tables = tables_of(data, weighing, options.points, seed)
    info = StackingInfo(candidates=options.candidates, power=options.power, points=tables.points, training=report)
    return Stacking(info, tables, fitted(examples, seed))


def folds(known: NDArray[np.int64], values: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Positions that are held out together, ascending; no position twice."""
    order = np.random.default_rng([seed, 0xF01D5]).permutation(known)
    size = max(1, min(int(SHARE * len(order)), HELD_OUT))
    count = 1 if values > ONE_FOLD else min(-(-HELD_OUT // size), int(1 / SHARE))
    for fold in range(count):
        yield np.sort(order[fold * size : (fold + 1) * size])


def _examples(
    data: LabelledPoints,
    held: NDArray[np.int64],
    kept: NDArray[np.int64],
    weighing: Weighing,
    train: Train,
    ranking: Ranking,
    depth: int,
    beam_size: int,
    points: int,
    seed: int,
) -> Examples:
    """What trees of the kept points find for those held out."""
    part, queries = data.take(kept), data.take(held)
    found = candidates_of(train(part), ranking, queries.points, depth, beam_size)
    tables = tables_of(part, weighing, points, seed)
    log_count = np.log1p(np.expm1(tables.log_count.astype(np.float64)) * len(data) / len(part)).astype(np.float32)
    features = features_of(replace(tables, log_count=log_count), found, queries.points)
    targets = weighing.targets(queries.labels)
    rows_BC = found.rows_BC
    point_BC = np.broadcast_to(np.arange(len(held))[:, None], rows_BC.shape)
    values = np.asarray(csr_array(targets)[point_BC.ravel(), np.maximum(rows_BC, 0).ravel()]).reshape(rows_BC.shape)
    return Examples(features, np.where(rows_BC >= 0, values, 0).astype(np.float32), rows_BC, held)


def candidates_of(trees: Sequence[TreeChunks], ranking: Ranking, points: Csr, depth: int, beam_size: int) -> Candidates:
    """The best `depth` items by the log of the mean of the trees' scores; of a forest, among the best 4 · depth leaves of each tree."""
    count, items = points.shape[0], trees[0].tree.item_count
    wanted = depth if len(trees) == 1 else min(4 * depth, items)
    total: Any = csr_array((count, items))
    for tree, chunks in trees:
        search = ChunkSearch(tree, chunks, ranking)
        found = search.search(as_rows(points), BeamParams.uniform(count, beam_size, wanted))
        search.close()
        rows_BM = np.where(found.leaves_BM >= 0, tree.leaf_item[np.maximum(found.leaves_BM - tree.leaf_offset, 0)], NO_ITEM)
        if len(trees) == 1:
            return Candidates(rows_BM, found.ranks_BM)
        real = rows_BM >= 0
        indptr = np.concatenate([[0], np.cumsum(real.sum(1))])
        total = total + csr_array((np.exp(found.ranks_BM[real].astype(np.float64)), rows_BM[real], indptr), shape=(count, items))
    rows_BC, ranks_BC = np.full((count, depth), NO_ITEM, np.int64), np.full((count, depth), -np.inf, np.float32)
    for b in range(count):
        own = slice(total.indptr[b], total.indptr[b + 1])
        best = np.argsort(-total.data[own], kind="stable")[:depth]
        rows_BC[b, : len(best)] = total.indices[own][best]
        with np.errstate(divide="ignore"):
            ranks_BC[b, : len(best)] = np.log(total.data[own][best] / len(trees))
    return Candidates(rows_BC, ranks_BC)


def features_of(tables: StackingTables, found: Candidates, points: Csr) -> NDArray[np.float32]:
    """float32[B, C, X]: as the service computes them."""
    arrays, scratch = tuple(StackingArrays.of(tables)), tuple(Scratch.of(len(tables.log_count), tables.points))
    rows, out = as_rows(points), np.zeros((*found.rows_BC.shape, KNOWN), np.float32)
    wide_CX = np.empty((found.rows_BC.shape[1], KNOWN))
    for b in range(len(out)):
        count, own = int((found.rows_BC[b] >= 0).sum()), slice(rows.indptr[b], rows.indptr[b + 1])
        if count:
            candidate_features(found.rows_BC[b], found.ranks_BC[b], count, rows.indices[own], rows.values[own], arrays, scratch, wide_CX)
            out[b, :count] = wide_CX[:count]
    return out


def tables_of(data: LabelledPoints, weighing: Weighing, most_points: int, seed: int) -> StackingTables:
    """The tables of training points."""
    rng = np.random.default_rng([seed, 0x7AB1E])
    points, count = data.points, len(data)
    frequency_F = np.bincount(points.indices, minlength=points.shape[1])
    idf_F = np.log1p(count / np.maximum(frequency_F, 1)).astype(np.float32)
    posted_F = _posted(points, idf_F, frequency_F)
    read = float(((frequency_F[posted_F] / max(count, 1)) ** 2).sum())  # postings that a query reads, for each point
    most = min(most_points, count, max(1, int(MOST_POSTINGS / max(read, 1e-9))))
    sizes_B = np.diff(data.labels.indptr)
    usable = np.flatnonzero((sizes_B > 0) & (sizes_B <= MOST_LABELS)).astype(np.int64)
    chosen = np.sort(rng.permutation(usable)[:most])
    weighed = points[chosen].astype(np.float32)
    weighed.data *= idf_F[weighed.indices]
    unit = normalised(weighed)
    unit.data[~posted_F[unit.indices]] = 0
    unit.eliminate_zeros()
    postings = csc_array(unit)
    postings.sort_indices()
    votes = csr_array(weighing.targets(data.labels[chosen]))
    votes.sort_indices()
    count_I = np.bincount(data.labels.indices, minlength=data.labels.shape[1])
    beside = _beside(data.labels, count_I, rng)
    weight_I = np.ones(len(count_I)) if weighing.weight_I is None else weighing.weight_I
    return StackingTables(
        feature_weight=idf_F,
        posting_begin=postings.indptr.astype(np.int64),
        posting_point=postings.indices.astype(np.uint16),
        posting_value=postings.data.astype(np.float16),
        label_begin=votes.indptr.astype(np.int64),
        label=votes.indices.astype(np.int32),
        label_value=votes.data.astype(np.float32),
        beside_begin=beside.indptr.astype(np.int64),
        beside=beside.indices.astype(np.int32),
        beside_share=beside.data.astype(np.float32),
        log_count=np.log1p(count_I).astype(np.float32),
        log_weight=np.log(weight_I).astype(np.float32),
    )


def _posted(points: Csr, idf_F: NDArray[np.float32], frequency_F: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool[F]: features that have postings: not the most frequent ones, which hold a LEFT_OUT of the points' squared lengths together."""
    mass_F = np.bincount(points.indices, (points.data * idf_F[points.indices]).astype(np.float64) ** 2, minlength=points.shape[1])
    order = np.argsort(-frequency_F, kind="stable")
    posted_F = np.ones(len(mass_F), np.bool_)
    posted_F[order[np.cumsum(mass_F[order]) <= LEFT_OUT * mass_F.sum()]] = False
    return posted_F


def _beside(labels: Csr, count_I: NDArray[np.int64], rng: np.random.Generator) -> Csr:
    """float32[I, I]: the share of the points with one item that have another, of each item the MOST_BESIDE largest; ties: the lower.

    Of points with at most MOST_LABELS labels, as many as have MOST_PAIRS pairs.
    """
    sizes_B = np.diff(labels.indptr).astype(np.int64)
    order = rng.permutation(np.flatnonzero(sizes_B <= MOST_LABELS))
    taken = np.sort(order[np.cumsum(sizes_B[order] ** 2) <= MOST_PAIRS])
    ones = csr_array((np.ones(labels.nnz, np.float32), labels.indices, labels.indptr), shape=labels.shape)[taken]
    by_item, parts = csr_array(ones.T), []
    seen_I = np.diff(by_item.indptr)
    block_I = np.cumsum(by_item.astype(np.int64) @ sizes_B[taken]) // BLOCK_PAIRS
    begins = np.flatnonzero(np.diff(block_I, prepend=-1)).tolist()
    for begin, end in pairwise([*begins, len(count_I)]):
        shares = (by_item[begin:end] @ ones).tocoo()
        row, column = shares.coords[0] + begin, shares.coords[1]
        other = row != column
        row, column, share = row[other], column[other], shares.data[other] / seen_I[row[other]]
        best = np.lexsort((column, -share, row))
        row, column, share = row[best], column[best], share[best]
        first = np.searchsorted(row, row)  # where the entries of its row begin
        kept = np.arange(len(row)) - first < MOST_BESIDE
        parts.append((row[kept], column[kept], share[kept]))
    row, column, share = (np.concatenate(part) for part in zip(*parts, strict=True))
    beside = csr_array((share.astype(np.float32), (row, column)), shape=(len(count_I), len(count_I)))
    beside.sort_indices()
    return beside


def fitted(examples: Examples, seed: int) -> StackingNetwork:
    """The network, trained by the logistic loss of all candidates."""
    real = examples.rows >= 0
    wide = examples.features[real].astype(np.float64)
    mean = wide.mean(0).astype(np.float32)
    scale = (1 / np.maximum(wide.std(0), 1e-3)).astype(np.float32)
    inputs = torch.from_numpy(np.clip((examples.features - mean) * scale, -FARTHEST, FARTHEST))
    targets, weights = torch.from_numpy(examples.targets), torch.from_numpy(real.astype(np.float32))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that their number makes no difference
    try:
        layers = _trained(inputs, targets, weights, seed)
    finally:
        torch.set_num_threads(threads)
    arrays = [array.detach().numpy().astype(np.float32) for array in layers]
    return StackingNetwork(**dict(zip(NETWORK, [mean, scale, *arrays], strict=True)))


def _trained(inputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, seed: int) -> list[torch.Tensor]:
    """weight_1, bias_1, …, bias_3."""
    random = torch.Generator().manual_seed(seed)
    widths, layers = (inputs.shape[2], *UNITS), []
    for narrow, wide in zip(widths, UNITS, strict=False):
        layers += [torch.randn(narrow, wide, generator=random) * (2 / narrow) ** 0.5, torch.zeros(wide)]
    layers += [torch.zeros(UNITS[-1]), torch.zeros(1)]
    for layer in layers:
        layer.requires_grad_()
    count = len(inputs)
    size = min(BATCH, count)
    steps = PASSES * (count // size)
    optimiser = torch.optim.AdamW(layers, lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, total_steps=max(steps, 2), pct_start=0.1)
    for _ in range(PASSES):
        order = torch.randperm(count, generator=random)
        for begin in range(0, count - size + 1, size):
            batch = order[begin : begin + size]
            hidden = inputs[batch]
            for layer in range(len(UNITS)):
                hidden = torch.relu(hidden @ layers[2 * layer] + layers[2 * layer + 1])
            logits = hidden @ layers[-2] + layers[-1]
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets[batch], weights[batch])
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch
            optimiser.step()
            schedule.step()
    return layers


def _judged(network: StackingNetwork, examples: Examples, data: LabelledPoints) -> dict[str, Any]:
    """Means of nDCG@5 and recall@10 of points that the network did not see, by its order and by the trees', and the gain of their mean."""
    logits_BC = np.where(examples.rows >= 0, _logits(network, examples.features), -np.inf)
    stacked_BC = np.take_along_axis(examples.rows, np.argsort(-logits_BC, axis=1, kind="stable"), axis=1)
    relevant = [data.labels_of(point) for point in examples.points.tolist()]
    figures = []
    for rows_BC in (examples.rows, stacked_BC):
        best_BM = rows_BC[:, :RESULTS]
        figures.append((ndcg_at_m(best_BM, relevant, 5), precision_recall_f(best_BM, relevant, RESULTS)[1]))
    gain_B = np.mean(figures[1], axis=0) - np.mean(figures[0], axis=0)
    error = float(gain_B.std(ddof=1) / np.sqrt(len(gain_B))) if len(gain_B) > 1 else float("inf")
    names = ("ndcg@5", "recall@10")
    measured = [{name: round(float(column_B.mean()), 4) for name, column_B in zip(names, own, strict=True)} for own in figures]
    return {
        "held_out": len(gain_B),
        "trees": measured[0],
        "stacked": measured[1],
        "gain": round(float(gain_B.mean()), 5),
        "standard_error": round(error, 5),
    }


def _logits(network: StackingNetwork, features: NDArray[np.float32]) -> NDArray[np.float32]:
    hidden = np.clip((features - network.mean) * network.scale, -FARTHEST, FARTHEST)
    hidden = np.maximum(hidden @ network.weight_1 + network.bias_1, 0)
    hidden = np.maximum(hidden @ network.weight_2 + network.bias_2, 0)
    return np.asarray(hidden @ network.weight_3 + network.bias_3, np.float32)
