"""Choice by elimination: the worst item is removed first, until none is left (NCE: Tran, Phung and Venkatesh 2016); and Plackett–Luce; for
items in order, and for grades.

    ℓ(π) = Σ_i stage_i,   stage_i = f_i + log Z_i,   Z_i = Σ_{j ≤ i} exp(−f_j)                (Eq. 5; items 1 … N from best to worst)
    ∂ℓ/∂f_k = 1 − exp(−f_k) Σ_{i ≥ k} 1/Z_i

Plackett–Luce, also ListMLE, chooses the best item first, then the best of the rest (NCE Eq. 2; Xia et al. 2008). It is choice by
elimination of −f in the reversed order, and computed as that.

Value and gradient take one cumulative sum of exponentials forth and one back, in logs: linear in time and memory, finite for any finite
scores. The printed form of the gradient (after Eq. 5) has the sum at the wrong end; this one is its derivative.

Items of equal grade come in a random order, or all their orders count. A choice model gives each order a probability; grades are a partial
order: groups of items without an order inside. The likelihood of the groups is the sum over all orders that agree with them (the marginal
likelihood of Kalbfleisch and Prentice 1973 for tied lifetimes in Cox's model; both models of choice are instances of it). A group D leaves
before the others R with probability

    P = ∫_0^∞ Π_{j ∈ D} (1 − exp(−a_j s)) exp(−s) ds,   a_j = w_j / Σ_{i ∈ R} w_i

(DeLong, Guirguis and So 1994), w_j = exp(−f_j) for choice by elimination, where the worst leave first, and exp(f_j) for Plackett–Luce.
With s = exp(x) the integrand is log-concave and its mode is in [0, log(1 + |D|)]. The trapezoid rule around the mode has an error of about
1e-7 with 68 nodes; its cost is linear in the items of each group. No library has this likelihood with gradients.

Knows scores, grades and which positions are padding. Does not know rank functions.

Legend: B queries, N positions from best to worst, M members of the group, T nodes of the rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BISECTIONS = 14
"""Halvings of an interval of at most log(1 + |D|). The value hardly depends on where the nodes lie."""
STEP = 0.4
NODES = torch.arange(-20.0, 7.2, STEP)
"""In units of the mode's width. To the left the integrand falls like exp(t), to the right like a Gaussian or faster."""


def elimination_loss(scores_BN: Tensor, present_BN: Tensor) -> Tensor:
    """[B]: −log P of each query's order under choice by elimination (Eq. 5).

    scores_BN  f of each item, best item first; float32 or float64, any device
    present_BN    bool: whether the position holds an item; scores of padding may be any finite number
    """
    loss_B: Tensor = _Elimination.apply(scores_BN, present_BN)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return loss_B


def plackett_luce_loss(scores_BN: Tensor, present_BN: Tensor) -> Tensor:
    """[B]: −log P of each query's order under Plackett–Luce. Arguments as those of `elimination_loss`."""
    return elimination_loss(-scores_BN.flip(-1), present_BN.flip(-1))


class _Elimination(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_BN: Tensor, present_BN: Tensor) -> Tensor:
        log_worth_BN = torch.where(present_BN, -scores_BN, -torch.inf)  # log exp(−f_k)
        log_z_BN = log_worth_BN.logcumsumexp(-1)  # padding before the first item has a Z of 0
        ctx.save_for_backward(log_worth_BN, log_z_BN, present_BN)
        return torch.where(present_BN, scores_BN + log_z_BN, 0).sum(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        log_worth_BN, log_z_BN, present_BN = ctx.saved_tensors
        log_rate_BN = torch.where(present_BN, -log_z_BN, -torch.inf)
        share_BN = (log_worth_BN + log_rate_BN.flip(-1).logcumsumexp(-1).flip(-1)).exp()
        return gradients[0].unsqueeze(-1) * (present_BN.to(log_z_BN.dtype) - share_BN), None


def random_order(grades_BN: Tensor, present_BN: Tensor, generator: torch.Generator) -> Tensor:
    """int64[B, N]: positions of the items from the best grade to the worst, equal grades in random order, padding last."""
    shuffled_BN = torch.rand(grades_BN.shape, generator=generator, device=grades_BN.device).argsort(-1)
    key_BN = torch.where(present_BN, -grades_BN, torch.inf).gather(-1, shuffled_BN)
    return shuffled_BN.gather(-1, key_BN.argsort(dim=-1, stable=True))


def tied_elimination_loss(scores_BN: Tensor, grades_BN: Tensor, present_BN: Tensor) -> Tensor:
    """[B]: −log P that all items of each grade are eliminated before those of higher ones. A pass per distinct grade."""
    return _group_losses(-scores_BN, grades_BN, present_BN, torch.gt)


def tied_plackett_luce_loss(scores_BN: Tensor, grades_BN: Tensor, present_BN: Tensor) -> Tensor:
    """[B]: −log P that all items of each grade are chosen before those of lower ones. A pass per distinct grade."""
    return _group_losses(scores_BN, grades_BN, present_BN, torch.lt)


def _group_losses(log_worth_BN: Tensor, grades_BN: Tensor, present_BN: Tensor, remains: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    loss_B = log_worth_BN.sum(-1) * 0  # with a gradient, also where all grades are equal
    for grade in torch.unique(grades_BN[present_BN]):
        loss_B = loss_B - _log_group_first(log_worth_BN, present_BN & (grades_BN == grade), present_BN & remains(grades_BN, grade))
    return loss_B


def _log_group_first(log_worth_BN: Tensor, group_BN: Tensor, others_BN: Tensor) -> Tensor:
    """[B]: the log-probability that all items of the group leave before any of the others; 0 if the group or the others are empty."""
    has_both_B = group_BN.any(-1) & others_BN.any(-1)
    if not has_both_B.any():
        return log_worth_BN.new_zeros(len(log_worth_BN))
    dtype, log_worth_BN = log_worth_BN.dtype, log_worth_BN.double()  # the integrand's log is a sum over items, and differences of it count
    # A query with an empty group or no others gets finite numbers here, and 0 at the end.
    others_B = torch.where(others_BN | ~has_both_B[:, None], log_worth_BN, -torch.inf).logsumexp(-1)
    query_M, position_M = group_BN.nonzero(as_tuple=True)
    share_M = log_worth_BN[query_M, position_M] - others_B[query_M]
    with torch.no_grad():
        mode_B, width_B = _mode(share_M, query_M, len(others_B))
    x_BT = mode_B[:, None] + width_B[:, None] * NODES.to(mode_B)
    height_BT = (x_BT - x_BT.exp()).index_add(0, query_M, _log_cdf(share_M[:, None] + x_BT[query_M]))
    log_p_B = height_BT.logsumexp(-1) + (STEP * width_B).log()
    return torch.where(has_both_B, log_p_B, 0).to(dtype)


def _mode(share_M: Tensor, query_M: Tensor, queries: int) -> tuple[Tensor, Tensor]:
    """Where each query's integrand is highest, and 1/√ of its log's curvature there."""
    low_B = share_M.new_zeros(queries)
    high_B = low_B.index_add(0, query_M, torch.ones_like(share_M)).log1p()
    for _ in range(BISECTIONS):
        middle_B = (low_B + high_B) / 2
        slope_B = (1 - middle_B.exp()).index_add(0, query_M, _log_cdf_slope(share_M + middle_B[query_M]))
        low_B, high_B = torch.where(slope_B > 0, middle_B, low_B), torch.where(slope_B > 0, high_B, middle_B)
    mode_B = (low_B + high_B) / 2
    y_M = share_M + mode_B[query_M]
    slope_M = _log_cdf_slope(y_M)
    # The slope of log(1 − exp(−e^y)) falls by slope · (slope + e^y − 1).
    fall_M = slope_M * (slope_M + y_M.clamp(max=_SURE).exp() - 1)
    return mode_B, mode_B.exp().index_add(0, query_M, fall_M).rsqrt()


_SURE = math.log(200)
"""exp(−e^y) is nothing from here on."""
_RARE = -12.0
"""1 − exp(−e^y) is e^y up to here."""


def _log_cdf(y: Tensor) -> Tensor:
    """log(1 − exp(−e^y)) and its gradient, for any finite y."""
    middle = y.clamp(_RARE, _SURE)
    return torch.where(y < _RARE, y - y.clamp(max=_RARE).exp() / 2, (-torch.expm1(-middle.exp())).log())


def _log_cdf_slope(y: Tensor) -> Tensor:
    """e^y / (exp(e^y) − 1), from 1 down to 0."""
    rate = y.clamp(_RARE, math.log(80)).exp()
    return rate / torch.expm1(rate)
