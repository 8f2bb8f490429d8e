"""The distribution that negatives of a softmax are drawn from, with the log-q correction.

Legend: I items, S distinct negatives.
"""

from __future__ import annotations

import torch
from torch import Tensor

from espalier.arrays import Float64

from ..deep.sequence.level_softmax import draw_counts


class Proposal:
    """The distribution q that negatives are drawn from, ∝ weight_I (float64[I], positive)."""

    def __init__(self, weight_I: Float64, device: torch.device) -> None:
        self.share_I = torch.from_numpy(weight_I / weight_I.sum()).to(device)
        self.upper_I = self.share_I.cumsum(0)

    def draw(self, times: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Of `times` draws with replacement: int64[S], the items, distinct and ascending; float32[S], log of (times drawn / expected)."""
        negative_S, count_S = draw_counts(self.upper_I, times, generator)
        return negative_S, (count_S / (times * self.share_I[negative_S])).log().float()
