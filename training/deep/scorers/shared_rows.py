"""Node rows that processes share: each holds those of some nodes, and asks the others for the rest.

Process p of P holds the rows of the nodes n with n mod P = p, in ascending order: every level is spread evenly. A lookup is a collective
call, which all processes make in the same order, each for nodes of its own: distinct nodes go to their owners, rows come back. Gradients
wait until the backward pass is over (`bring_gradients`); then each node's sum goes to its owner in one exchange.

Knows rows and processes. Does not know models or trees.

Legend: N nodes, D node row, U distinct nodes that this process asks for, R rows that processes ask this one for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.deep.parallel import process, processes


def own_count(nodes: int) -> int:
    """The rows of `nodes` that this process holds."""
    return len(range(process(), nodes, processes()))


class SharedRows:
    """float32[N, D], of which this process holds `own`, float32[own_count(N), D]."""

    def __init__(self, own: nn.Parameter, nodes: int) -> None:
        self.own, self.nodes = own, nodes
        self._waiting: list[tuple[Tensor, Tensor]] = []

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.nodes, self.own.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.own.dtype

    @property
    def device(self) -> torch.device:
        return self.own.device

    def lookup(self, nodes: Tensor) -> Tensor:
        """float32[…, D]: the rows at nodes int64[…], each 0 … N − 1."""
        distinct_U, place = torch.unique(nodes, return_inverse=True)
        if torch.is_grad_enabled():
            rows_UD: Tensor = _Fetch.apply(distinct_U, self.own, self)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        else:
            rows_UD = self.fetch(distinct_U)
        return nn.functional.embedding(place, rows_UD)

    def fetch(self, nodes_U: Tensor) -> Tensor:
        """float32[U, D]: the rows of distinct nodes."""
        route = _Route(nodes_U)
        return route.back(self.own.detach()[route.place_R])

    def add_gradient(self, nodes_U: Tensor, gradient_UD: Tensor) -> None:
        """Keep the gradient of rows that were looked up until `bring_gradients`."""
        self._waiting.append((nodes_U, gradient_UD))

    @torch.no_grad()
    def bring_gradients(self) -> None:
        """Add to `own.grad` the mean over the processes of what the lookups of this step left; a collective call."""
        if self.own.grad is None:
            self.own.grad = torch.zeros_like(self.own)
        nodes = torch.cat([nodes_U for nodes_U, _ in self._waiting])
        distinct_U, place = torch.unique(nodes, return_inverse=True)
        sum_UD = self.own.new_zeros((len(distinct_U), self.own.shape[1]))
        sum_UD.index_add_(0, place, torch.cat([gradient_UD for _, gradient_UD in self._waiting]))
        self._waiting.clear()
        route = _Route(distinct_U)
        self.own.grad.index_add_(0, route.place_R, route.forth(sum_UD) / processes())


class _Fetch(torch.autograd.Function):
    """Its backward pass returns no gradient, but leaves it with the shared rows."""

    @staticmethod
    def forward(ctx: Any, nodes_U: Tensor, own: nn.Parameter, rows: SharedRows) -> Tensor:
        ctx.nodes_U, ctx.rows = nodes_U, rows
        return rows.fetch(nodes_U)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.rows.add_gradient(ctx.nodes_U, gradients[0])
        return None, None, None


class _Route:
    """Between distinct nodes int64[U] and their owners.

    place_R  int64[R]: of the nodes that processes ask this one for, process 0's first, the places among its own rows
    """

    def __init__(self, nodes_U: Tensor) -> None:
        owner_U = nodes_U % processes()
        self._order_U = owner_U.argsort(stable=True)
        asked = torch.bincount(owner_U, minlength=processes())
        answered = torch.empty_like(asked)
        dist.all_to_all_single(answered, asked)
        self._asked, self._answered = asked.tolist(), answered.tolist()
        self.place_R = self.forth(nodes_U // processes())

    def forth(self, values: Tensor) -> Tensor:
        """[R, …]: what processes have for the rows of this one; values [U, …] of the nodes."""
        received = values.new_empty((sum(self._answered), *values.shape[1:]))
        dist.all_to_all_single(received, values[self._order_U], self._answered, self._asked)
        return received

    def back(self, values: Tensor) -> Tensor:
        """[U, …]: what owners have for the nodes; values [R, …] of the rows that this process was asked for."""
        received = values.new_empty((len(self._order_U), *values.shape[1:]))
        dist.all_to_all_single(received, values, self._asked, self._answered)
        ordered = torch.empty_like(received)
        ordered[self._order_U] = received
        return ordered
