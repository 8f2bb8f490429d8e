"""Looking rows of the node table up, with a gradient that costs what was looked up and not what the table holds.

torch's own embedding makes a zeroed gradient of the whole table for every lookup and adds them up: a step has one per level. Here the
lookups of a step add their rows into one gradient. Where processes share the rows, a lookup asks their owners (`shared_rows.py`).

Legend: N nodes, D node row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from training.deep.scorers.shared_rows import SharedRows

Rows = Tensor | SharedRows
"""The node table float32[N, D]: whole, or shared between processes."""


def lookup(nodes: Tensor, node_rows: Rows) -> Tensor:
    """float32[…, D]: rows of node_rows at nodes int64[…]."""
    if isinstance(node_rows, SharedRows):
        return node_rows.lookup(nodes)
    # On a GPU torch's way is cheap, and sums in a fixed order, which index_add there does not.
    if torch.is_grad_enabled() and node_rows.is_leaf and node_rows.device.type == "cpu":
        rows: Tensor = _Lookup.apply(nodes, node_rows)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return rows
    return nn.functional.embedding(nodes, node_rows)


def rows_of(span: range, node_rows: Rows) -> Tensor:
    """float32[n, D]: neighbouring rows of node_rows."""
    if isinstance(node_rows, SharedRows):
        return node_rows.lookup(torch.arange(span.start, span.stop, device=node_rows.device))
    if torch.is_grad_enabled() and node_rows.is_leaf:
        rows: Tensor = _Slice.apply(span, node_rows)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return rows
    return node_rows[span.start : span.stop]


def _gradient_of(node_rows: Tensor) -> Tensor:
    if node_rows.grad is None:
        node_rows.grad = torch.zeros_like(node_rows)
    return node_rows.grad


class _Lookup(torch.autograd.Function):
    """Its backward pass returns no gradient, but adds into node_rows.grad."""

    @staticmethod
    def forward(ctx: Any, nodes: Tensor, node_rows: Tensor) -> Tensor:
        ctx.nodes, ctx.node_rows = nodes, node_rows
        return nn.functional.embedding(nodes, node_rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        _gradient_of(ctx.node_rows).index_add_(0, ctx.nodes.flatten(), gradients[0].flatten(0, -2))
        return None, None


class _Slice(torch.autograd.Function):
    """As `_Lookup`."""

    @staticmethod
    def forward(ctx: Any, span: range, node_rows: Tensor) -> Tensor:
        ctx.span, ctx.node_rows = span, node_rows
        return node_rows[span.start : span.stop]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        _gradient_of(ctx.node_rows)[ctx.span.start : ctx.span.stop] += gradients[0]
        return None, None
