"""Tables of training points for a bundle's stacking (espalier.stacking): postings, labels, and labels that co-occur.

Legend: B points, I items, F features.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.sparse import csc_array, csr_array

from espalier.arrays import Bool, Float32, Float64, Int64
from espalier.stacking import MOST_BESIDE, MOST_LABELS, StackingTables

from ..data.csr import Csr, normalised
from ..data.relevance import scale_of
from ..data.xmc import LabelledPoints

MOST_POSTINGS = 1 << 20
"""Most postings that a query reads on average; in larger sets fewer points vote."""
LEFT_OUT = 0.1
"""The share of points' squared lengths in features without postings: frequent words tell little and cause most of the work. On
EURLex-4K a query reads 80,000 numbers instead of 870,000, at the same quality of held-out points."""
MOST_PAIRS = 1 << 28
"""Pairs of labels of a point that are counted."""
BLOCK_PAIRS = 1 << 24
"""Most pairs in memory at a time, unless one item has more."""


@dataclass(frozen=True)
class Weighing:
    """How relevance is computed: `labels` divided by `scale`, or with `weight_I` the item's weight, and labels count 1.

    weight_I  float64[I], in (0, 1], or None
    """

    scale: float
    weight_I: Float64 | None

    @staticmethod
    def of(labels: Csr, inverse_propensity_I: Float64 | None) -> Weighing:
        """The weighing for training labels; with inverse propensities if these are the relevance."""
        scale = scale_of(labels)
        return Weighing(scale, None if inverse_propensity_I is None else np.minimum(inverse_propensity_I / scale, 1))

    def weights(self, items: int) -> Float64:
        """float64[I], in (0, 1]: the weights of items in keys."""
        return np.ones(items) if self.weight_I is None else self.weight_I

    def targets(self, labels: Csr) -> Csr:
        """float32[B, I], in (0, 1]: the values that the network estimates."""
        values = np.ones(labels.nnz) if self.weight_I is not None else np.maximum(labels.data / self.scale, np.finfo(np.float32).tiny)
        return csr_array((values.astype(np.float32), labels.indices, labels.indptr), shape=labels.shape)


def tables_of(data: LabelledPoints, weighing: Weighing, most_points: int, seed: int) -> StackingTables:
    rng = np.random.default_rng([seed, 0x7AB1E])
    points, count = data.points, len(data)
    frequency_F = np.bincount(points.indices, minlength=points.shape[1])
    idf_F = np.log1p(count / np.maximum(frequency_F, 1)).astype(np.float32)
    posted_F = _posted(points, idf_F, frequency_F)
    postings_read = float(((frequency_F[posted_F] / max(count, 1)) ** 2).sum())  # postings that a query reads, for each point
    most = min(most_points, count, max(1, int(MOST_POSTINGS / max(postings_read, 1e-9))))
    sizes_B = np.diff(data.labels.indptr)
    usable_points = np.flatnonzero((sizes_B > 0) & (sizes_B <= MOST_LABELS)).astype(np.int64)
    chosen = np.sort(rng.permutation(usable_points)[:most])
    weighted = points[chosen].astype(np.float32)
    weighted.data *= idf_F[weighted.indices]
    unit_rows = normalised(weighted)
    unit_rows.data[~posted_F[unit_rows.indices]] = 0
    unit_rows.eliminate_zeros()
    postings = csc_array(unit_rows)
    postings.sort_indices()
    votes = csr_array(weighing.targets(data.labels[chosen]))
    votes.sort_indices()
    count_I = np.bincount(data.labels.indices, minlength=data.labels.shape[1])
    beside = _beside(data.labels, count_I, rng)
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
        log_weight=np.log(weighing.weights(len(count_I))).astype(np.float32),
    )


def _posted(points: Csr, idf_F: Float32, frequency_F: Int64) -> Bool:
    """bool[F]: features that have postings: all but the most frequent ones, which hold LEFT_OUT of the points' squared lengths."""
    mass_F = np.bincount(points.indices, (points.data * idf_F[points.indices]).astype(np.float64) ** 2, minlength=points.shape[1])
    order = np.argsort(-frequency_F, kind="stable")
    posted_F = np.ones(len(mass_F), np.bool_)
    posted_F[order[np.cumsum(mass_F[order]) <= LEFT_OUT * mass_F.sum()]] = False
    return posted_F


def _beside(labels: Csr, count_I: Int64, rng: np.random.Generator) -> Csr:
    """float32[I, I]: the share of the points with one item that have another, of each item the MOST_BESIDE largest; ties: the lower.

    Counts points with at most MOST_LABELS labels, up to MOST_PAIRS pairs.
    """
    sizes_B = np.diff(labels.indptr).astype(np.int64)
    order = rng.permutation(np.flatnonzero(sizes_B <= MOST_LABELS))
    counted_points = np.sort(order[np.cumsum(sizes_B[order] ** 2) <= MOST_PAIRS])
    ones = csr_array((np.ones(labels.nnz, np.float32), labels.indices, labels.indptr), shape=labels.shape)[counted_points]
    by_item, blocks = csr_array(ones.T), []
    seen_I = np.diff(by_item.indptr)
    block_I = np.cumsum(by_item.astype(np.int64) @ sizes_B[counted_points]) // BLOCK_PAIRS
    begins = np.flatnonzero(np.diff(block_I, prepend=-1)).tolist()
    for begin, end in pairwise([*begins, len(count_I)]):
        shares = (by_item[begin:end] @ ones).tocoo()
        row, column = shares.coords[0] + begin, shares.coords[1]
        is_pair = row != column
        row, column, share = row[is_pair], column[is_pair], shares.data[is_pair] / seen_I[row[is_pair]]
        best = np.lexsort((column, -share, row))
        row, column, share = row[best], column[best], share[best]
        first = np.searchsorted(row, row)  # where the entries of its row begin
        is_kept = np.arange(len(row)) - first < MOST_BESIDE
        blocks.append((row[is_kept], column[is_kept], share[is_kept]))
    row, column, share = (np.concatenate(arrays) for arrays in zip(*blocks, strict=True))
    beside = csr_array((share.astype(np.float32), (row, column)), shape=(len(count_I), len(count_I)))
    beside.sort_indices()
    return beside
