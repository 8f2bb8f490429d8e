"""The node rows of a model in training: lookups and their gradients, whose cost grows with the rows that are looked up.

Several processes share the rows: process p of P holds those of the nodes n with n mod P = p, in ascending order, so that every level is
spread evenly. Then a lookup is a collective call, which all processes make in the same order, each for different nodes: distinct nodes go
to their owners, rows come back. After the backward pass each node's gradient goes to its owner in one exchange.

Knows rows and processes. Does not know models or trees.

Legend: N nodes, n nodes that this process holds, D node row, U distinct nodes of a lookup, R rows that processes ask this one for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...deep.parallel import process, processes
from ...deep.row_adam import RowAdam


def held_rows(nodes: int) -> int:
    """The rows of `nodes` that this process holds."""
    return len(range(process(), nodes, processes()))


class RowTable:
    """float32[N, D], of which this process holds `held_nD`, float32[n, D].

    adam      brings rows up to date before they are read; None: they always are
    compose   changes the rows of a lookup: distinct nodes int64[U], their rows float32[U, D] → rows; None: no change
    """

    def __init__(
        self, held_nD: nn.Parameter, nodes: int, adam: RowAdam | None = None, compose: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> None:
        self.held_nD, self.nodes = held_nD, nodes
        self._adam, self._compose = adam, compose
        self._lookups: list[tuple[Tensor, Tensor]] = []

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.nodes, self.held_nD.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.held_nD.dtype

    @property
    def device(self) -> torch.device:
        return self.held_nD.device

    def lookup(self, nodes: Tensor) -> Tensor:
        """float32[…, D]: the rows at nodes int64[…], each 0 … N − 1. With gradients enabled, `gradients` returns them later."""
        distinct_U, position = torch.unique(nodes, return_inverse=True)
        rows_UD = self._fetch(distinct_U)
        if torch.is_grad_enabled() and self.held_nD.requires_grad:
            self._lookups.append((distinct_U, rows_UD.requires_grad_()))
        if self._compose is not None:
            rows_UD = self._compose(distinct_U, rows_UD)
        if torch.equal(distinct_U, nodes):
            return rows_UD
        return nn.functional.embedding(position, rows_UD)

    @torch.no_grad()
    def gradients(self) -> tuple[Tensor, Tensor]:
        """For the lookups since the last call: distinct positions int64[R] among the held rows, and float32[R, D], the mean of the
        gradients there over the processes. A collective call.
        """
        lookups = [(nodes_U, torch.zeros_like(rows_UD) if rows_UD.grad is None else rows_UD.grad) for nodes_U, rows_UD in self._lookups]
        self._lookups.clear()
        nodes_U, sum_UD = _summed(lookups)
        if processes() == 1:
            return nodes_U, sum_UD
        route = _Route(nodes_U)
        sums_RD = route.forth(sum_UD / processes())
        return _summed(list(zip(route.position_R.split(route.received_counts), sums_RD.split(route.received_counts), strict=True)))

    @torch.no_grad()
    def _fetch(self, nodes_U: Tensor) -> Tensor:
        """float32[U, D]: the rows of distinct nodes, not part of a graph."""
        if processes() == 1:
            return self._held_rows(nodes_U)
        route = _Route(nodes_U)
        return route.back(self._held_rows(route.position_R))

    def _held_rows(self, positions: Tensor) -> Tensor:
        if self._adam is not None:
            self._adam.refresh(positions if processes() == 1 else torch.unique(positions))
        return self.held_nD.detach().index_select(0, positions)


def _summed(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The distinct numbers in pairs (int64[U], float32[U, D]), and the sums of their values in the pairs' order. A pair has none twice."""
    if len(pairs) == 1:
        return pairs[0]
    distinct, position = torch.unique(torch.cat([numbers for numbers, _ in pairs]), return_inverse=True)
    sums = pairs[0][1].new_empty((len(distinct), pairs[0][1].shape[1]))
    is_written = torch.zeros(len(distinct), dtype=torch.bool, device=sums.device)
    for position_U, (_, values) in zip(position.split([len(numbers) for numbers, _ in pairs]), pairs, strict=True):
        is_written_U = is_written[position_U]
        if is_written_U.any():
            sums.index_fill_(0, position_U[~is_written_U], 0).index_add_(0, position_U, values)
        else:
            sums.index_copy_(0, position_U, values)  # the usual case: without a pass over zeros
        is_written[position_U] = True
    return distinct, sums


class _Route:
    """Between distinct nodes int64[U] and their owners.

    position_R       int64[R]: the rows that the processes request from this one (process 0 first), as positions among its held rows
    received_counts  how many rows each process requests
    """

    def __init__(self, nodes_U: Tensor) -> None:
        owner_U = nodes_U % processes()
        self._order_U = owner_U.argsort(stable=True)
        requested = torch.bincount(owner_U, minlength=processes())
        received = torch.empty_like(requested)
        dist.all_to_all_single(received, requested)
        self._requested_counts, self.received_counts = requested.tolist(), received.tolist()
        self.position_R = self.forth(nodes_U // processes())

    def forth(self, values: Tensor) -> Tensor:
        """[R, …]: the processes' values for the rows of this one, from values [U, …] for the nodes."""
        received = values.new_empty((sum(self.received_counts), *values.shape[1:]))
        dist.all_to_all_single(received, values[self._order_U], self.received_counts, self._requested_counts)
        return received

    def back(self, values: Tensor) -> Tensor:
        """[U, …]: the owners' values for the nodes, from values [R, …] for the rows that were requested from this process."""
        received = values.new_empty((len(self._order_U), *values.shape[1:]))
        dist.all_to_all_single(received, values, self._requested_counts, self.received_counts)
        ordered = torch.empty_like(received)
        ordered[self._order_U] = received
        return ordered


Rows = Tensor | RowTable
"""The node table float32[N, D]."""


def lookup(nodes: Tensor, node_rows: Rows) -> Tensor:
    """float32[…, D]: rows of node_rows at nodes int64[…]."""
    return node_rows.lookup(nodes) if isinstance(node_rows, RowTable) else nn.functional.embedding(nodes, node_rows)


def rows_of(span: range, node_rows: Rows) -> Tensor:
    """float32[n, D]: neighbouring rows of node_rows."""
    if isinstance(node_rows, RowTable):
        return node_rows.lookup(torch.arange(span.start, span.stop, device=node_rows.device))
    return node_rows[span.start : span.stop]
