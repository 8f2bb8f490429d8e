"""Scoring heads: query features → query state, and (query state, node rows) → logits.

`MlpHead` is the papers' 128–64–24 network with PReLU. Its first dense layer is split into the query part, which goes into the state,
and the node part: exact, and two thirds of the work saved at search time. `ProductHead` is an inner product with a network of the query: a
candidate costs D multiplications, and dense layers on a sum of projections are slow to learn an inner product.

Legend: B queries, L levels, C candidates, D node row, F features, S state.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from espalier.arrays import Float32
from espalier.engines.scorer_weights import Layer, ScorerWeights

from ...deep.parallel import drawn_rows


class SharedPReLU(nn.Module):
    """max(x, 0) + a · min(x, 0) with one learned slope a, initially 0.25.

    The same function as `torch.nn.PReLU()`, whose backward pass is several times slower on a CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.device.type == "cpu":
            y: Tensor = _SharedPReLU.apply(x, self.weight)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            return y
        return torch.nn.functional.prelu(x, self.weight.to(x.dtype))


class _SharedPReLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.slope = float(weight)
        return torch.nn.functional.leaky_relu(x, ctx.slope)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = ctx.saved_tensors
        (gradient,) = gradients
        below = x.clamp(max=0).flatten(0, -2)
        # Row by row in bfloat16: its dot and its sum in float32 are several times slower on a CPU.
        slope_gradient = (
            torch.linalg.vecdot(gradient.flatten(0, -2), below).sum(dtype=torch.float32)
            if x.dtype == torch.bfloat16
            else torch.dot(gradient.flatten(), below.flatten())
        )
        return torch.ops.aten.leaky_relu_backward(gradient, x, ctx.slope, False), slope_gradient.view(1)


class MlpHead(nn.Module):
    """g(x, n) = w · φ(W₃ φ(W₂ φ(W_q x + W_n row_n + b₁) + b₂) + b₃) + b₄, φ = PReLU with one slope a layer.

    One shared slope (initially 0.25) instead of one per channel: it exports to LeakyRelu, which is several times faster to serve.
    """

    def __init__(self, features: int, node_dim: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.state_dim = hidden[0]
        self.query_part = nn.Linear(features, hidden[0])
        self.node_part = nn.Linear(node_dim, hidden[0], bias=False)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(hidden))
        self.slopes = nn.ModuleList(SharedPReLU() for _ in hidden)
        self.out = nn.Linear(hidden[-1], 1)
        bound = (6 / (features + node_dim + hidden[0])) ** 0.5
        for part in (self.query_part, self.node_part):
            nn.init.uniform_(part.weight, -bound, bound)

    def state(self, features_BLF: Tensor) -> Tensor:
        state: Tensor = self.query_part(features_BLF)
        return state

    def forward(self, query_state: Tensor, node_rows: Tensor) -> Tensor:
        """query_state [B, S], node_rows [B, C, D] → logits [B, C]."""
        return self.from_first_layer(self.node_part(node_rows) + query_state.unsqueeze(1))

    def scorer_weights(self) -> ScorerWeights:
        """The weights as engines with kernels of their own take them."""
        first = _array(self.node_part.weight.T)
        linear = [layer for layer in self.layers if isinstance(layer, nn.Linear)]
        weights = [first, *(_array(layer.weight.T) for layer in linear)]
        biases = [np.zeros(first.shape[1], np.float32), *(_array(layer.bias) for layer in linear)]
        slope_of_layer = [slope.weight.item() for slope in self.slopes if isinstance(slope, SharedPReLU)]
        slopes = [np.full(len(bias), slope, np.float32) for bias, slope in zip(biases, slope_of_layer, strict=True)]
        layers = tuple(Layer(*arrays) for arrays in zip(weights, biases, slopes, strict=True))
        return ScorerWeights(layers, _array(self.out.weight[0]), self.out.bias.item())

    def from_first_layer(self, sums_BCS: Tensor) -> Tensor:
        """The first layer's sums, before its PReLU → logits [B, C]."""
        flat = self.slopes[0](sums_BCS).flatten(0, 1)  # two-dimensional, so that it exports to Gemm
        for layer, slope in zip(self.layers, list(self.slopes)[1:], strict=True):
            flat = slope(layer(flat))
        with torch.autocast(flat.device.type, enabled=False):  # logits of neighbouring candidates differ by less than bfloat16 can tell
            logits: Tensor = self.out(flat.to(self.out.weight.dtype))
        return logits.view(sums_BCS.shape[0], sums_BCS.shape[1])


class ProductHead(nn.Module):
    """g(x, n) = ⟨u(x), row_n⟩ + b_n, with the bias in the last entry of the node row; the state is u(x) and a 1.

    hidden   widths of the ReLU layers of the network u; empty: u is linear. None: u(x) = x, and node rows are as wide as the query: the
             linear node scorer of OTM's synthetic experiments
    dropout  share of the inputs of each layer of u that is 0 in training, the same on all levels

    All logits of a level are one matrix product; `otm_robust_loss` uses that for small levels.
    """

    def __init__(self, features: int, node_dim: int, hidden: Sequence[int] | None, dropout: float = 0.0) -> None:
        super().__init__()
        self.state_dim, self.dropout = node_dim, dropout
        widths = () if hidden is None else (features, *hidden, node_dim - 1)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def state(self, features_BLF: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """[B, L, S]; with a generator, inputs are dropped."""
        features = features_BLF
        for number, layer in enumerate(self.layers):
            features = torch.relu(features) if number else features
            features = layer(features if generator is None else dropped(features, self.dropout, generator))
        return torch.cat([features, torch.ones_like(features[..., :1])], -1)

    def forward(self, query_state: Tensor, node_rows: Tensor) -> Tensor:
        """query_state [B, S], node_rows [B, C, S] → logits [B, C]."""
        with torch.autocast(node_rows.device.type, enabled=False):  # as in MlpHead
            return torch.bmm(node_rows, query_state.to(node_rows.dtype).unsqueeze(-1)).squeeze(-1)

    def scorer_weights(self) -> ScorerWeights:
        """An inner product has none."""
        return ScorerWeights()


def _array(weights: Tensor) -> Float32:
    return weights.detach().float().numpy()


def dropped(x_BLF: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """x with a share of each query's features set to 0, the same on all levels, and the others raised in proportion."""
    if share == 0:
        return x_BLF
    width, device = x_BLF.shape[2], x_BLF.device
    draw_B1F = drawn_rows(lambda rows: torch.rand((rows, 1, width), generator=generator, device=device), len(x_BLF))
    return torch.where(draw_B1F >= share, x_BLF / (1 - share), 0)
