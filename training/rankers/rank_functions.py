"""Rank functions: the linear one f(x) = ⟨w, x⟩ (NCE, Table 1) and the highway network (NCE §4; Srivastava, Greff and Schmidhuber 2015).

    z_1 = g(b_H + W_X x),   z_{l+1} = H(z_l) ⊙ T(z_l) + z_l ⊙ (1 − T(z_l)),   f = ⟨w, z_L⟩
    H(z) = g(b_H + W_H z),  T(z) = σ(b_T + W_T z),  g = ReLU

Layers 2 … L share their weights, and the input layer shares b_H. The paper states neither the standard deviation of the initial weights nor
which values dropout drops. Here each item draws one mask of hidden units for all layers, since these are the same units: z_1 and every
H(z_l) are multiplied by it, so a dropped unit is 0 in all layers.

Legend: F features, K hidden units; items have any number of dimensions in front.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

GATE_BIAS = -1.0


class LinearFunction(nn.Module):
    """Features [… , F] → scores […]. Without a bias: no model of choice has a gradient for it."""

    def __init__(self, features: int, init_std: float, generator: torch.Generator) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(features, generator=generator) * init_std)

    def forward(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """`generator` is for dropout, which this function lacks."""
        return x @ self.weight


class HighwayFunction(nn.Module):
    """Features [… , F] → scores […].

    hidden, layers             K and L; with L = 1 it is a network of one hidden layer
    dropout                    share of hidden units that is dropped for an item; only when a generator is given
    init_std                   of all weights at the start; b_H starts at 0, b_T at −1
    """

    def __init__(self, features: int, hidden: int, layers: int, dropout: float, init_std: float, generator: torch.Generator) -> None:
        super().__init__()

        def draw(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) * init_std)

        self.layers, self.dropout = layers, dropout
        self.input_KF = draw(hidden, features)
        self.transform_KK = draw(hidden, hidden)
        self.gate_KK = draw(hidden, hidden)
        self.transform_bias = nn.Parameter(torch.zeros(hidden))
        self.gate_bias = nn.Parameter(torch.full((hidden,), GATE_BIAS))
        self.weight = draw(hidden)

    def forward(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Scores; `generator` is for dropout; without one nothing is dropped."""
        z = linear(x, self.input_KF, self.transform_bias).relu()
        mask = _mask(x, z.shape[-1], self.dropout, generator) if generator is not None and self.dropout else None
        if mask is not None:
            z = z * mask
        for _ in range(self.layers - 1):
            gate = linear(z, self.gate_KK, self.gate_bias).sigmoid()
            new = linear(z, self.transform_KK, self.transform_bias).relu()
            z = (new if mask is None else new * mask) * gate + z * (1 - gate)
        return z @ self.weight

    @torch.no_grad()
    def limit_norms(self, longest: float) -> None:
        """Shorten the incoming weights of each unit and gate to a length of at most `longest` (the paper's max-norm)."""
        for weights in (self.input_KF, self.transform_KK, self.gate_KK):
            weights.mul_(longest / torch.linalg.vector_norm(weights, dim=1, keepdim=True).clamp(min=longest))


def _mask(x: Tensor, width: int, share: float, generator: torch.Generator) -> Tensor:
    """[… , width]: 0 for a share of the units of each item, 1 / (1 − share) for the others."""
    is_kept = torch.rand((*x.shape[:-1], width), generator=generator, device=x.device) >= share
    return is_kept.to(x.dtype) / (1 - share)
