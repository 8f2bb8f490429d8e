"""Softmax over the catalogue, whole or estimated from sampled negatives with the log-q correction.

Knows user vectors, item vectors and targets. Does not know how either is made.

Legend: B instances, P targets, I items, S distinct negatives, D vector width, X positives and negatives of an instance.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def full_softmax_loss(user_BD: Tensor, item_ID: Tensor, bias_I: Tensor, target_BP: Tensor) -> Tensor:
    """The mean over instances of log Σ_i exp(s_i) − mean_{p ∈ targets} s_p: cross-entropy against the uniform distribution of the targets.

    target_BP  int64[B, P], −1 = none; a repeated target counts as often as it occurs
    """
    score_BI = torch.addmm(bias_I, user_BD, item_ID.T).float()
    positive_BP = score_BI.gather(1, target_BP.clamp(min=0))
    return (score_BI.logsumexp(1) - _mean_of_targets(positive_BP, target_BP)).mean()


def sampled_softmax_loss(
    user_BD: Tensor, item_ID: Tensor, bias_I: Tensor, target_BP: Tensor, negative_S: Tensor, log_weight_S: Tensor
) -> Tensor:
    """`full_softmax_loss` with the sum over the catalogue estimated from negatives that the whole batch shares.

        Ẑ = Σ_{p ∈ targets} exp(s_p) + Σ_{i ∈ negatives ∖ targets} exp(s_i + log_weight_i)

    negative_S    int64[S], distinct and ascending
    log_weight_S  float32[S], log of (times drawn / times expected): the log-q correction. An instance's targets are left out of its
                  negatives and enter with their true score, so that Ẑ is an unbiased estimate of the full sum.
    """
    target_BP = target_BP.sort(1).values
    present_BP = target_BP >= 0
    row_BP = target_BP.clamp(min=0)
    positive_BP = ((item_ID[row_BP] * user_BD.unsqueeze(1)).sum(-1) + bias_I[row_BP]).float()
    first_BP = present_BP & torch.cat([torch.ones_like(present_BP[:, :1]), target_BP[:, 1:] != target_BP[:, :-1]], 1)
    negative_BS = torch.addmm(bias_I[negative_S], user_BD, item_ID[negative_S].T).float() + log_weight_S
    position_BP = torch.searchsorted(negative_S, row_BP).clamp(max=len(negative_S) - 1)
    row, column = torch.nonzero(present_BP & (negative_S[position_BP] == row_BP), as_tuple=True)
    is_target_BS = torch.zeros_like(negative_BS, dtype=torch.bool)
    is_target_BS[row, position_BP[row, column]] = True
    score_BX = torch.cat([positive_BP.masked_fill(~first_BP, -torch.inf), negative_BS.masked_fill(is_target_BS, -torch.inf)], 1)
    return (score_BX.logsumexp(1) - _mean_of_targets(positive_BP, target_BP)).mean()


def _mean_of_targets(positive_BP: Tensor, target_BP: Tensor) -> Tensor:
    """[B]: the mean score of each instance's targets."""
    present_BP = target_BP >= 0
    return torch.where(present_BP, positive_BP, 0).sum(1) / present_BP.sum(1)


class Proposal:
    """The distribution q that negatives are drawn from, ∝ weight_I (float64[I], positive)."""

    def __init__(self, weight_I: NDArray[np.float64], device: torch.device) -> None:
        self.share_I = torch.from_numpy(weight_I / weight_I.sum()).to(device)
        self.upper_I = self.share_I.cumsum(0)

    def draw(self, times: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """`negative_S` and `log_weight_S` of `times` draws with replacement. These do not depend on any history."""
        point = torch.rand(times, generator=generator, dtype=torch.float64, device=self.upper_I.device) * self.upper_I[-1]
        drawn = torch.searchsorted(self.upper_I, point, right=True).clamp(max=len(self.upper_I) - 1)
        negative_S, count_S = torch.unique(drawn, return_counts=True)
        return negative_S, (count_S / (times * self.share_I[negative_S])).log().float()
