"""Sums of a softmax over columns, whole or sampled, whose logits exist a block of positions at a time.

Knows states, the vectors of columns and targets. Does not know how they are made. A loss at every position has positions × items logits,
too many to hold at once. So gradients are computed with the sums, block by block, and no logits are stored.

    Z_n  = exp(own_n) + Σ_{s ∈ columns ∖ own} exp(⟨h_n, v_s⟩ + offset_s)
    loss = mean_n (log Z_n − own_n)

Legend: N positions, S columns, D width, C columns of a block (the position's own, where it has one, then the shared ones).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

LOGITS = 1 << 20
"""Logits that exist at a time; at least those of one position. Fewer make the products slow, more no faster."""
ROWS, COLUMNS = 64, 128
"""Positions and columns of a product are padded to multiples of these: a CPU recompiles products in bfloat16 for every shape."""


def softmax_loss(state_ND: Tensor, target_ND: Tensor, negative_SD: Tensor, own_N: Tensor, log_weight_S: Tensor | None = None) -> Tensor:
    """The mean cross-entropy against one target a position.

    target_ND     float32[N, D], each position's target
    own_N         int64[N], the target's position among the negatives, where it does not count; −1 = not among them
    log_weight_S  float32[S], of a sample: log of (times drawn / times expected), the log-q correction, with which Z is an unbiased estimate

    The others as in `mean_log_sum`.
    """
    own_score_N = (state_ND.float() * target_ND).sum(1)
    return mean_log_sum(state_ND, negative_SD, log_weight_S, own_score_N, own_N) - own_score_N.mean()


def mean_log_sum(
    state_ND: Tensor, column_SD: Tensor, offset_S: Tensor | None = None, own_score_N: Tensor | None = None, own_N: Tensor | None = None
) -> Tensor:
    """mean_n log Z_n.

    state_ND     float32 or bfloat16, which products then run in; sums and gradients of columns are float32
    column_SD    float32[S, D], shared by all positions: all items, or a sample
    offset_S     float32[S], added to the logits of the columns: biases, log weights of a sample, −inf for columns that do not count
    own_score_N  float32[N], the logit of a separate column of each position, without an offset; None: Z is the sum over the shared columns
    own_N        int64[N], the index of that column among the shared ones, where it then does not count; −1 = not among them
    """
    empty = column_SD.new_zeros(0)
    offset_S = empty if offset_S is None else offset_S
    if own_score_N is None or own_N is None:
        own_score_N, own_N = empty, empty.long()
    return cast(Tensor, _MeanLogSum.apply(state_ND, column_SD, offset_S, own_score_N, own_N))  # type: ignore[no-untyped-call]  # as torch is


def positions_in(target_N: Tensor, negative_S: Tensor) -> Tensor:
    """int64[N]: the index of each item in the distinct, ascending int64[S]; −1 = not in it."""
    position_N = torch.searchsorted(negative_S, target_N).clamp(max=len(negative_S) - 1)
    return torch.where(negative_S[position_N] == target_N, position_N, -1)


def softmax_in_place(score_BC: Tensor) -> tuple[Tensor, Tensor]:
    """[B, C]: shares of the sum of exponentials, which replace the scores, and [B]: the log of that sum."""
    highest_B1 = score_BC.amax(1, keepdim=True)
    share_BC = score_BC.sub_(highest_B1).exp_()
    sum_B1 = share_BC.sum(1, keepdim=True)
    return share_BC.div_(sum_B1), (highest_B1 + sum_B1.log()).squeeze(1)


class _MeanLogSum(torch.autograd.Function):
    """Gradients are made in the forward pass. An empty offset_S stands for zeros, an empty own_score_N for no own column."""

    @staticmethod
    def forward(ctx: Any, state_ND: Tensor, column_SD: Tensor, offset_S: Tensor, own_score_N: Tensor, own_N: Tensor) -> Tensor:
        count, columns, has_own = len(state_ND), len(column_SD), int(len(own_score_N) > 0)
        offset_S = offset_S if len(offset_S) else column_SD.new_zeros(columns)
        column_SD, offset_S = _padded(column_SD, COLUMNS), _padded(offset_S, COLUMNS, -torch.inf)
        low_SD = column_SD.to(state_ND.dtype)
        state_gradient_ND, own_gradient_N = torch.empty_like(state_ND), torch.empty_like(own_score_N)
        column_gradient_SD, offset_gradient_S = torch.zeros_like(column_SD), torch.zeros_like(offset_S)
        total = state_ND.new_zeros((), dtype=torch.float32)
        size = max(1, LOGITS // (has_own + len(column_SD)))
        size = size // ROWS * ROWS or size
        for start in range(0, count, size):
            block = slice(start, min(start + size, count))
            rows = block.stop - start
            state_BD = _padded(state_ND[block], ROWS)
            score_BC = torch.empty(len(state_BD), has_own + len(column_SD), device=state_ND.device)
            torch.add(state_BD @ low_SD.T, offset_S, out=score_BC[:, has_own:])
            if has_own:
                score_BC[:, 0] = _padded(own_score_N[block], ROWS)
                masked_B = torch.nonzero(own_N[block] >= 0).squeeze(1)
                score_BC[masked_B, 1 + own_N[block][masked_B]] = -torch.inf
            share_BC, log_sum_B = softmax_in_place(score_BC)
            total += log_sum_B[:rows].sum()
            share_BS = share_BC[:, has_own:].to(state_ND.dtype)
            state_gradient_ND[block] = (share_BS @ low_SD)[:rows]
            column_gradient_SD += share_BS.T @ state_BD
            offset_gradient_S += share_BC[:rows, has_own:].sum(0)
            if has_own:
                own_gradient_N[block] = share_BC[:rows, 0]
        ctx.save_for_backward(state_gradient_ND, column_gradient_SD[:columns], offset_gradient_S[:columns], own_gradient_N)
        ctx.count = max(1, count)
        return cast(Tensor, total / ctx.count)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor, None]:
        scale = gradients[0] / ctx.count
        state_ND, column_SD, offset_S, own_N = ctx.saved_tensors
        return (
            state_ND * scale.to(state_ND.dtype),
            column_SD * scale,
            offset_S * scale if ctx.needs_input_grad[2] else None,
            own_N * scale,
            None,
        )


def _padded(values: Tensor, multiple: int, value: float = 0.0) -> Tensor:
    """The rows, padded with a value to a multiple; fewer rows than `multiple` are not padded."""
    missing = -len(values) % multiple if len(values) > multiple else 0
    return torch.cat([values, values.new_full((missing, *values.shape[1:]), value)]) if missing else values
