"""Softmax cross-entropy over a table of items, whole or sampled, whose logits exist a block of positions at a time.

Knows states, item vectors and targets. Does not know how they are made. A language model's loss at every position has positions × items
logits, which a log of any size makes too many to hold; gradients are made with the loss, block by block, so that none is kept.

    loss = mean_n (log Z_n − ⟨h_n, v_target⟩)
    Z_n  = exp⟨h_n, v_target⟩ + Σ_{s ∈ negatives ∖ target} exp(⟨h_n, v_s⟩ + log_weight_s)

Legend: N positions, I items, S negatives, D width, C columns of a block (the target's, then the negatives').
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

LOGITS = 1 << 20
"""Logits that exist at a time; at least those of one position. Fewer make the products slow, more no faster."""


def softmax_loss(state_ND: Tensor, target_ND: Tensor, negative_SD: Tensor, own_N: Tensor, log_weight_S: Tensor | None = None) -> Tensor:
    """The mean cross-entropy.

    state_ND      float32 or bfloat16, which products then run in; losses and gradients of items are float32
    target_ND     float32[N, D], each position's target
    negative_SD   float32[S, D], shared by all positions: all items, or a sample
    own_N         int64[N], where the target is among the negatives, which does not count there; −1 = nowhere
    log_weight_S  float32[S], of a sample: log of (times drawn / times expected), the log-q correction, with which Z is an unbiased estimate
    """
    weight_S = torch.zeros(0) if log_weight_S is None else log_weight_S
    return cast(Tensor, _Softmax.apply(state_ND, target_ND, negative_SD, own_N, weight_S))  # type: ignore[no-untyped-call]  # as torch is


def places_of(target_N: Tensor, negative_S: Tensor) -> Tensor:
    """int64[N]: where each item is among others, distinct and ascending int64[S]; −1 = nowhere."""
    place_N = torch.searchsorted(negative_S, target_N).clamp(max=len(negative_S) - 1)
    return torch.where(negative_S[place_N] == target_N, place_N, -1)


class _Softmax(torch.autograd.Function):
    """Gradients are made in the forward pass. An empty log_weight_S stands for zeros."""

    @staticmethod
    def forward(ctx: Any, state_ND: Tensor, target_ND: Tensor, negative_SD: Tensor, own_N: Tensor, log_weight_S: Tensor) -> Tensor:
        low_SD = negative_SD.to(state_ND.dtype)
        own_score_N = (state_ND.float() * target_ND).sum(1)
        state_gradient_ND, target_gradient_ND = torch.empty_like(state_ND), torch.empty_like(target_ND)
        negative_gradient_SD = torch.zeros_like(negative_SD)
        loss = state_ND.new_zeros((), dtype=torch.float32)
        size = max(1, LOGITS // (1 + len(negative_SD)))
        for start in range(0, len(state_ND), size):
            block = slice(start, start + size)
            state_BD = state_ND[block]
            score_BC = torch.empty(len(state_BD), 1 + len(negative_SD), device=state_ND.device)
            score_BC[:, 0] = own_score_N[block]
            score_BC[:, 1:] = state_BD @ low_SD.T
            if len(log_weight_S):
                score_BC[:, 1:] += log_weight_S
            masked_B = torch.nonzero(own_N[block] >= 0).squeeze(1)
            score_BC[masked_B, 1 + own_N[block][masked_B]] = -torch.inf
            share_BC = torch.softmax(score_BC, 1)
            loss -= share_BC[:, 0].clamp_min(torch.finfo(torch.float32).tiny).log().sum()  # a share may round to 0
            above_B1 = share_BC[:, :1] - 1
            share_BS = share_BC[:, 1:].to(state_ND.dtype)
            state_gradient_ND[block] = share_BS @ low_SD + (above_B1 * target_ND[block]).to(state_ND.dtype)
            target_gradient_ND[block] = above_B1 * state_BD
            negative_gradient_SD += share_BS.T @ state_BD
        count = max(1, len(state_ND))
        ctx.save_for_backward(state_gradient_ND / count, target_gradient_ND / count, negative_gradient_SD / count)
        return loss / count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        state_ND, target_ND, negative_SD = ctx.saved_tensors
        return state_ND * gradients[0].to(state_ND.dtype), target_ND * gradients[0], negative_SD * gradients[0], None, None
