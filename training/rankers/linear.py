"""The linear rank function f(x) = ⟨w, x⟩ (NCE, Table 1)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class LinearFunction(nn.Module):
    """Features [… , F] → scores […]. Without a bias: no model of choice has a gradient for it."""

    def __init__(self, features: int, init_std: float, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, generator=generator) * init_std)

    def forward(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """`generator` is that of dropout, which this function lacks."""
        return x @ self.weight
