"""The reference's formulas: from logits to ranks, the mean over a forest's trees, and the tail of its items.

Legend: C candidates, F features.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from espalier.manifest import Activation, Ranking
from espalier.tail import FARTHEST, FLOOR, Tail


def ranks_of(ranking: Ranking, logits_C: NDArray[np.float32], parent_rank_C: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32[C]: the ranks of nodes, given their logits and their parents' ranks."""
    with np.errstate(over="ignore", invalid="ignore"):
        own_C = log_activation(ranking.activation, logits_C) if ranking.own == "log_activation" else logits_C
        inherited_C = np.float32(ranking.gamma) * parent_rank_C if ranking.gamma > 0 else np.float32(0)  # 0 · ∞ is no number
        return np.asarray(own_C + inherited_C, np.float32)


def log_near(tail: Tail, query_F: NDArray[np.float64], item: int) -> float:
    """The log of how near a query is to an item's row (espalier.tail)."""
    own = slice(int(tail.row_begin[item]), int(tail.row_begin[item + 1]))
    row_F = np.zeros(tail.width)
    row_F[tail.feature[own]] = tail.value[own]
    if tail.info.form == "product":
        return math.log(max(float(row_F @ query_F), FLOOR))
    distance = float(((query_F - row_F) ** 2).sum())
    return -float(np.logaddexp(0, min(tail.info.gamma / 2 * distance, FARTHEST)))


def log_mean(logs: list[float], trees: int) -> float:
    """log((Σ e^log) / trees), as good for scores too small for a float."""
    top = max(logs)
    return top + math.log(sum(math.exp(log - top) for log in logs) / trees)


def log_activation(activation: Activation, logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """The log of the sigmoid, or of a hinge: −max(0, 1 − v)^p."""
    if activation == "sigmoid":
        return np.asarray(-np.logaddexp(np.float32(0), -logits), np.float32)
    return np.asarray(-(np.maximum(np.float32(1) - logits, 0) ** int(activation[1])), np.float32)
