"""Looking rows of the node table up, with a gradient that costs what was looked up and not what the table holds.

torch's own embedding makes a zeroed gradient of the whole table for every lookup and adds them up: a step has one per level. Here the
lookups of a step add their rows into one gradient.

Legend: N nodes, D node row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def lookup(nodes: Tensor, node_rows: Tensor) -> Tensor:
    """float32[…, D]: rows of node_rows float32[N, D] at nodes int64[…]."""
    # On a GPU index_add sums in no fixed order and torch's way is cheap, so a seed goes on giving one model there.
    if torch.is_grad_enabled() and node_rows.is_leaf and node_rows.device.type == "cpu":
        rows: Tensor = _Lookup.apply(nodes, node_rows)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return rows
    return nn.functional.embedding(nodes, node_rows)


class _Lookup(torch.autograd.Function):
    """Its backward pass returns no gradient, but adds into node_rows.grad."""

    @staticmethod
    def forward(ctx: Any, nodes: Tensor, node_rows: Tensor) -> Tensor:
        ctx.nodes, ctx.node_rows = nodes, node_rows
        return nn.functional.embedding(nodes, node_rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        if ctx.node_rows.grad is None:
            ctx.node_rows.grad = torch.zeros_like(ctx.node_rows)
        ctx.node_rows.grad.index_add_(0, ctx.nodes.flatten(), gradients[0].flatten(0, -2))
        return None, None
