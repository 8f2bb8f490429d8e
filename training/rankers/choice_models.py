"""Choice by elimination: the worst item is removed first, until none is left (NCE: Tran, Phung and Venkatesh 2016); and Plackett–Luce.

    ℓ(π) = Σ_i stage_i,   stage_i = f_i + log Z_i,   Z_i = Σ_{j ≤ i} exp(−f_j)                (Eq. 5; items 1 … N from best to worst)
    ∂ℓ/∂f_k = 1 − exp(−f_k) Σ_{i ≥ k} 1/Z_i

Plackett–Luce, also ListMLE, chooses the best item first, then the best of the rest (NCE Eq. 2; Xia et al. 2008). It is choice by
elimination of −f in the reversed order, and computed as that.

Knows scores in order and which places are padding. Does not know grades (`ties.py` puts items in order) nor rank functions. Value and
gradient take one cumulative sum of exponentials forth and one back, in logs: linear in time and memory, finite for any finite
scores. The printed form of the gradient (after Eq. 5) has the sum at the wrong end; this one is its derivative.

Legend: B queries, N places from best to worst.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def elimination_loss(scores_BN: Tensor, present_BN: Tensor) -> Tensor:
    """[B]: −log P of each query's order under choice by elimination (Eq. 5).

    scores_BN  f of each item, best item first; float32 or float64, any device
    present_BN    bool: where there is an item; elsewhere is padding, whose scores may be anything finite
    """
    loss_B: Tensor = _Elimination.apply(scores_BN, present_BN)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return loss_B


def plackett_luce_loss(scores_BN: Tensor, present_BN: Tensor) -> Tensor:
    """[B]: −log P of each query's order under Plackett–Luce. Arguments as those of `elimination_loss`."""
    return elimination_loss(-scores_BN.flip(-1), present_BN.flip(-1))


class _Elimination(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_BN: Tensor, present_BN: Tensor) -> Tensor:
        log_worth_BN, log_z_BN = _log_sums(scores_BN, present_BN)
        ctx.save_for_backward(log_worth_BN, log_z_BN, present_BN)
        return torch.where(present_BN, scores_BN + log_z_BN, 0).sum(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        log_worth_BN, log_z_BN, present_BN = ctx.saved_tensors
        log_rate_BN = torch.where(present_BN, -log_z_BN, -torch.inf)
        share_BN = (log_worth_BN + log_rate_BN.flip(-1).logcumsumexp(-1).flip(-1)).exp()
        return gradients[0].unsqueeze(-1) * (present_BN.to(log_z_BN.dtype) - share_BN), None


def _log_sums(scores_BN: Tensor, present_BN: Tensor) -> tuple[Tensor, Tensor]:
    """log exp(−f_k), −∞ at padding, and log Z_k; padding before the first item has a Z of 0."""
    log_worth_BN = torch.where(present_BN, -scores_BN, -torch.inf)
    return log_worth_BN, log_worth_BN.logcumsumexp(-1)
