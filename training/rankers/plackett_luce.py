"""Plackett–Luce, also ListMLE: the best item is chosen first, then the best of the rest (NCE Eq. 2; Xia et al. 2008).

    ℓ(π) = Σ_{i < N} [ −f_i + log Σ_{j ≥ i} exp(f_j) ]                                        (items 1 … N from best to worst)

It is choice by elimination of −f in the reversed order, and computed as that.

Legend: B queries, N places from best to worst.
"""

from __future__ import annotations

from torch import Tensor

from training.rankers import elimination


def plackett_luce_loss(scores_BN: Tensor, present_BN: Tensor, top_k: int | None = None) -> Tensor:
    """[B]: −log P of each query's order, or of its first `top_k` places alone (their marginal: what follows has probability 1).

    scores_BN  f of each item, best item first; float32 or float64, any device
    present_BN    bool: where there is an item; elsewhere is padding
    """
    return elimination.staged_elimination(-scores_BN.flip(-1), present_BN.flip(-1), first_places(present_BN, top_k).flip(-1))


def gradient_and_curvature(scores_BN: Tensor, present_BN: Tensor) -> tuple[Tensor, Tensor]:
    """∂ℓ/∂f_k and a diagonal bound of the curvature, both [B, N], as `elimination.gradient_and_curvature` has them."""
    gradient_BN, curvature_BN = elimination.gradient_and_curvature(-scores_BN.flip(-1), present_BN.flip(-1), present_BN.flip(-1))
    return -gradient_BN.flip(-1), curvature_BN.flip(-1)


def first_places(present_BN: Tensor, top_k: int | None) -> Tensor:
    """bool[B, N]: the first `top_k` items (None: all)."""
    return present_BN if top_k is None else present_BN & (present_BN.cumsum(-1) <= top_k)
