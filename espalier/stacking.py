"""Stacking: a small network estimates the relevance of a search's best candidates from the trees' scores and from training points.

Trees of linear scorers miss nonlinear effects, many of which are local: labels of similar training points, and labels that occur together.
The network is trained on points that the trees were not trained on (stacked generalisation, Wolpert 1992). Its input for a candidate i of a
query x are the numbers of `FEATURES`:

    score.log       log s_i, s_i being the trees' score, at least FLOOR
    score.below     log s_i − log of the best candidate's
    score.logit     log s_i / (1 − s_i), s_i at most 1 − FLOOR
    score.best      log of the best candidate's score
    score.sum       Σ_j s_j over the candidates
    item.count      log (1 + training points with i)
    vote.5, .20, .100   of the nearest training points: Σ_n r_n^q y_ni / Σ_n r_n^q, with n = 5, 20, 100 points and q = 8, 4, 1
    near.1, near.20     cosines of the nearest point and of the 20th, or of the last
    beside          Σ_j s_j P(i | j) over the first BESIDE_OF candidates j ≠ i; P: share of the points with j that have i
    beside.share    `beside` over the largest `beside` of all candidates, 0 if that is 0
    query.length    log (1 + features of the query)

Cosines are of features times their idf, log (1 + points / points with the feature). The most frequent features have no posting lists and
count only in lengths. r_n is a point's cosine over that of the nearest point; y is relevance over its maximum. Votes are 0 if no point
shares a feature.

    p = σ(network),   key = log p + power · log w_i, at least float32's lowest number

w is an item's weight: its inverse propensity over the largest, if training weights labels by it, else 1. `power` 1 orders by the estimate
of relevance, p · w; 0 by p, which finds more relevant items; values between trade one for the other. Only the best `candidates` of a search
are reordered. Later items keep their order and follow with keys below the lowest.

Legend: I items, F features of queries, P points, E postings, X features of candidates, H units.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.arrays import Array, Float32, Int32, Int64
from espalier.errors import BundleCorrupt
from espalier.manifest import StackingInfo
from espalier.stored_arrays import check_arrays, check_length, check_rows

FEATURES = (
    "score.log",
    "score.below",
    "score.logit",
    "score.best",
    "score.sum",
    "item.count",
    "vote.5",
    "vote.20",
    "vote.100",
    "near.1",
    "near.20",
    "beside",
    "beside.share",
    "query.length",
)
VOTES = ((5, 8), (20, 4), (100, 1))
"""How many of the nearest points vote, and the power of their cosines."""
NEAREST = 100
BESIDE_OF = 20
FLOOR = 1e-6
MOST_POINTS, MOST_LABELS, MOST_BESIDE, MOST_UNITS = 1 << 16, 1 << 12, 64, 256
"""Limits: points; labels of a point; items stored beside an item; units of a layer."""
LOWEST = float(np.finfo(np.float32).min)
FARTHEST = 6.0
"""Standardised features are cut off at ± FARTHEST."""
NETWORK = ("mean", "scale", "weight_1", "bias_1", "weight_2", "bias_2", "weight_3", "bias_3")


class StackingTables(NamedTuple):
    """Tables from which features of candidates are computed. Compiled code reads them as stored; for float16 see `stored_numbers`.

    posting_begin   int64[F + 1]   where the postings of each feature begin
    posting_point   uint16[E]      a point that has the feature, ascending within a feature
    label_begin     int64[P + 1]   where the labels of each point begin
    label           int32          an item of the point
    beside_begin    int64[I + 1]   where the items beside each item begin
    beside          int32          an item that occurs at points with it
    feature_weight  float32[F], ≥ 0: the idf of features
    posting_value   float16[E]     the point's value of a feature, in rows of length 1
    label_value     float32        an item's relevance to a point, in (0, 1]
    beside_share    float32        the share of an item's points that also have the item beside it, in (0, 1]
    log_count       float32[I], ≥ 0
    log_weight      float32[I], ≤ 0
    """

    posting_begin: Int64
    posting_point: NDArray[np.uint16]
    label_begin: Int64
    label: Int32
    beside_begin: Int64
    beside: Int32
    feature_weight: Float32
    posting_value: NDArray[np.float16]
    label_value: Float32
    beside_share: Float32
    log_count: Float32
    log_weight: Float32

    @property
    def points(self) -> int:
        return len(self.label_begin) - 1

    def check(self, items: int, width: int) -> None:
        """Raise BundleCorrupt unless these are tables of `items` items and `width` features."""
        arrays = self._asdict()
        check_arrays(arrays, TABLES)
        for name, array in arrays.items():
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                raise BundleCorrupt(f"{name} has numbers that are not finite")
        if not 0 <= self.points <= MOST_POINTS:
            raise BundleCorrupt(f"label_begin: {self.points} points, 0 … {MOST_POINTS} expected")
        for name, begin, rows, columns, most in (
            ("posting_point", self.posting_begin, width, self.points, MOST_POINTS),
            ("label", self.label_begin, self.points, items, MOST_LABELS),
            ("beside", self.beside_begin, items, items, MOST_BESIDE),
        ):
            check_rows(name, arrays[name], begin, rows, columns)
            longest = int(np.diff(begin).max(initial=0))
            if longest > most:
                raise BundleCorrupt(f"{name} has a row of {longest} entries, at most {most} expected")
        lengths = {"feature_weight": width, "log_count": items, "log_weight": items}
        lengths |= {"posting_value": len(self.posting_point), "label_value": len(self.label), "beside_share": len(self.beside)}
        for name, length in lengths.items():
            check_length(name, arrays[name], length)
        for name in ("label_value", "beside_share"):
            array = arrays[name]
            if array.size and not (array.min() > 0 and array.max() <= 1):
                raise BundleCorrupt(f"{name} has numbers outside 0 … 1")
        if self.feature_weight.min(initial=0) < 0 or self.log_count.min(initial=0) < 0 or self.log_weight.max(initial=0) > 0:
            raise BundleCorrupt("expected feature_weight and log_count of at least 0, and log_weight of at most 0")


TABLES: dict[str, type[np.generic]] = dict.fromkeys(StackingTables._fields, np.float32) | {"posting_value": np.float16}
TABLES |= {"posting_begin": np.int64, "posting_point": np.uint16, "label_begin": np.int64, "label": np.int32}
TABLES |= {"beside_begin": np.int64, "beside": np.int32}


@dataclass(frozen=True, eq=False)
class StackingNetwork:
    """σ(weight_3 · relu(weight_2ᵀ relu(weight_1ᵀ z + bias_1) + bias_2) + bias_3), z = (features − mean) · scale within ± FARTHEST.

    mean, scale float32[X] · weight_1 float32[X, H₁] · bias_1 float32[H₁] · weight_2 float32[H₁, H₂] · bias_2, weight_3 float32[H₂] ·
    bias_3 float32[1]
    """

    mean: Float32
    scale: Float32
    weight_1: Float32
    bias_1: Float32
    weight_2: Float32
    bias_2: Float32
    weight_3: Float32
    bias_3: Float32

    def check(self) -> None:
        """Raise BundleCorrupt unless the arrays fit each other and are finite."""
        if self.weight_1.ndim != 2 or self.weight_2.ndim != 2:
            raise BundleCorrupt("weight_1 and weight_2 must have two dimensions")
        features, first, second = len(FEATURES), self.weight_1.shape[1], self.weight_2.shape[1]
        shapes = ((features,), (features,), (features, first), (first,), (first, second), (second,), (second,), (1,))
        for name, shape in zip(NETWORK, shapes, strict=True):
            array = getattr(self, name)
            if array.dtype != np.float32 or array.shape != shape or not np.isfinite(array).all():
                raise BundleCorrupt(f"{name} is {array.dtype}{list(array.shape)}, expected finite float32{list(shape)}")
        if not 1 <= min(first, second) <= max(first, second) <= MOST_UNITS:
            raise BundleCorrupt(f"layers of {first} and {second} units, at most {MOST_UNITS} expected")


@dataclass(frozen=True, eq=False)
class Stacking:
    """A bundle's stacking: see the module."""

    info: StackingInfo
    tables: StackingTables
    network: StackingNetwork

    def arrays(self) -> dict[str, Array]:
        """The arrays by their names in the file."""
        named = {name: getattr(self.tables, name) for name in TABLES} | {name: getattr(self.network, name) for name in NETWORK}
        return {name: np.ascontiguousarray(array) for name, array in named.items()}

    @staticmethod
    def of_arrays(arrays: Mapping[str, Array], info: StackingInfo, items: int, width: int) -> Stacking:
        """The stacker of `items` items and `width` features, from a file's arrays. Raises BundleCorrupt."""
        if arrays.keys() != {*TABLES, *NETWORK}:
            raise BundleCorrupt(f"arrays {sorted(arrays)}, expected {sorted((*TABLES, *NETWORK))}")
        tables = StackingTables(**{name: arrays[name] for name in TABLES})
        network = StackingNetwork(**{name: arrays[name] for name in NETWORK})
        tables.check(items, width)
        network.check()
        if info.points != tables.points:
            raise BundleCorrupt(f"{tables.points} points, the manifest says {info.points}")
        return Stacking(info, tables, network)
