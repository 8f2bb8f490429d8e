"""Scoring heads: query features → query state, and (query state, node rows) → logits.

`MlpHead` is the papers' 128–64–24 network with PReLU. Its first dense layer is split into the query part, which goes into the state,
and the node part: exact, and two thirds of the work saved at search time. `LinearHead` is an inner product with a bias. `ProductMlpHead` is
the sum of both: what an inner product says well, dense layers on a sum of projections learn slowly.

Legend: B queries, L levels, C candidates, D node row, F features, S state.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

START_NOISE = 0.1
"""How much of torch's random start is left in a state that begins as means."""


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

    def from_first_layer(self, sums_BCS: Tensor) -> Tensor:
        """The first layer's sums, before its PReLU → logits [B, C]."""
        flat = self.slopes[0](sums_BCS).flatten(0, 1)  # two-dimensional, so that it exports to Gemm
        for layer, slope in zip(self.layers, list(self.slopes)[1:], strict=True):
            flat = slope(layer(flat))
        with torch.autocast(flat.device.type, enabled=False):  # logits of neighbouring candidates differ by less than bfloat16 can tell
            logits: Tensor = self.out(flat.to(self.out.weight.dtype))
        return logits.view(sums_BCS.shape[0], sums_BCS.shape[1])


class LinearHead(nn.Module):
    """g(x, n) = ⟨state, θ_n⟩ + b_n, with the bias in the last entry of the node row.

    The state is W x + c for learned queries, or x itself where the node rows are as wide as the query (`project` false), the
    linear node scorer of OTM's synthetic experiments.
    """

    def __init__(self, features: int, node_dim: int, project: bool) -> None:
        super().__init__()
        self.state_dim = node_dim
        self.query_part = nn.Linear(features, node_dim - 1) if project else nn.Identity()

    def start_as_means(self, weight: float) -> None:
        """Let the learned state begin as `weight` times the sum of the windows' means: then items near the history's items score high."""
        if isinstance(self.query_part, nn.Linear):
            columns = self.query_part.in_features // self.state_dim  # each window has the width of a node row, whose last entry is the bias
            identity = torch.eye(self.state_dim - 1, self.state_dim).repeat(1, columns)
            with torch.no_grad():
                self.query_part.weight.mul_(START_NOISE).add_(weight * identity)
                self.query_part.bias.zero_()

    def state(self, features_BLF: Tensor) -> Tensor:
        part = self.query_part(features_BLF)
        return torch.cat([part, torch.ones_like(part[..., :1])], -1)

    def forward(self, query_state: Tensor, node_rows: Tensor) -> Tensor:
        """query_state [B, S], node_rows [B, C, S] → logits [B, C]."""
        with torch.autocast(node_rows.device.type, enabled=False):  # as in MlpHead
            return torch.bmm(node_rows, query_state.to(node_rows.dtype).unsqueeze(-1)).squeeze(-1)


class ProductMlpHead(nn.Module):
    """g(x, n) = MLP(x, row_n) + ⟨W x + c, row_n⟩ + b_n: `MlpHead` plus `LinearHead`, on the same node rows.

    The state is theirs, one after the other. The MLP sees the bias too, as the last entry of the row.
    """

    def __init__(self, features: int, node_dim: int, hidden: Sequence[int]) -> None:
        super().__init__()
        self.mlp = MlpHead(features, node_dim, hidden)
        self.product = LinearHead(features, node_dim, project=True)
        self.state_dim = self.mlp.state_dim + self.product.state_dim

    def state(self, features_BLF: Tensor) -> Tensor:
        return torch.cat([self.mlp.state(features_BLF), self.product.state(features_BLF)], -1)

    def forward(self, query_state: Tensor, node_rows: Tensor) -> Tensor:
        """query_state [B, S], node_rows [B, C, D] → logits [B, C]."""
        split = self.mlp.state_dim
        logits: Tensor = self.mlp(query_state[:, :split], node_rows) + self.product(query_state[:, split:], node_rows)
        return logits
