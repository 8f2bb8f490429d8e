"""The distribution that negatives of a softmax are drawn from, with the log-q correction.

Legend: I items, S distinct negatives.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Proposal:
    """The distribution q that negatives are drawn from, ∝ weight_I (float64[I], positive)."""

    def __init__(self, weight_I: NDArray[np.float64], device: torch.device) -> None:
        self.share_I = torch.from_numpy(weight_I / weight_I.sum()).to(device)
        self.upper_I = self.share_I.cumsum(0)

    def draw(self, times: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Of `times` draws with replacement: int64[S], the items, distinct and ascending; float32[S], log of (times drawn / expected)."""
        point = torch.rand(times, generator=generator, dtype=torch.float64, device=self.upper_I.device) * self.upper_I[-1]
        drawn = torch.searchsorted(self.upper_I, point, right=True).clamp(max=len(self.upper_I) - 1)
        negative_S, count_S = torch.unique(drawn, return_counts=True)
        return negative_S, (count_S / (times * self.share_I[negative_S])).log().float()
