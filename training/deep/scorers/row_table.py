"""The node rows of a model in training: rows that are looked up, and their gradients, which cost what was looked up.

Several processes share the rows: process p of P holds those of the nodes n with n mod P = p, in ascending order, so that every level is
spread evenly. Then a lookup is a collective call, which all processes make in the same order, each for nodes of its own: distinct nodes go
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


def own_count(nodes: int) -> int:
    """The rows of `nodes` that this process holds."""
    return len(range(process(), nodes, processes()))


class RowTable:
    """float32[N, D], of which this process holds `own`, float32[n, D].

    adam      brings rows up to date before they are read; None: no row waits for that
    composed  what a lookup makes of distinct nodes int64[U] and their rows float32[U, D]; None: nothing else
    """

    def __init__(
        self, own: nn.Parameter, nodes: int, adam: RowAdam | None = None, composed: Callable[[Tensor, Tensor], Tensor] | None = None
    ) -> None:
        self.own, self.nodes = own, nodes
        self._adam, self._composed = adam, composed
        self._lookups: list[tuple[Tensor, Tensor]] = []

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
        """float32[…, D]: the rows at nodes int64[…], each 0 … N − 1. Where gradients are wanted, `gradients` has them later."""
        distinct_U, place = torch.unique(nodes, return_inverse=True)
        rows_UD = self._fetch(distinct_U)
        if torch.is_grad_enabled() and self.own.requires_grad:
            self._lookups.append((distinct_U, rows_UD.requires_grad_()))
        if self._composed is not None:
            rows_UD = self._composed(distinct_U, rows_UD)
        if torch.equal(distinct_U, nodes):
            return rows_UD
        return nn.functional.embedding(place, rows_UD)

    @torch.no_grad()
    def gradients(self) -> tuple[Tensor, Tensor]:
        """Of the lookups since the last call: distinct places int64[R] among own rows, and float32[R, D], the mean over the processes of
        the gradients there. A collective call.
        """
        lookups = [(nodes_U, torch.zeros_like(rows_UD) if rows_UD.grad is None else rows_UD.grad) for nodes_U, rows_UD in self._lookups]
        self._lookups.clear()
        nodes_U, sum_UD = _summed(lookups)
        if processes() == 1:
            return nodes_U, sum_UD
        route = _Route(nodes_U)
        sums_RD = route.forth(sum_UD / processes())
        return _summed(list(zip(route.place_R.split(route.answered), sums_RD.split(route.answered), strict=True)))

    @torch.no_grad()
    def _fetch(self, nodes_U: Tensor) -> Tensor:
        """float32[U, D]: the rows of distinct nodes, not part of a graph."""
        if processes() == 1:
            return self._own_rows(nodes_U)
        route = _Route(nodes_U)
        return route.back(self._own_rows(route.place_R))

    def _own_rows(self, places: Tensor) -> Tensor:
        if self._adam is not None:
            self._adam.refresh(places if processes() == 1 else torch.unique(places))
        return self.own.detach().index_select(0, places)


def _summed(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The distinct numbers of some (int64[U], float32[U, D]), and the sums of their values in the parts' order. A part has none twice."""
    if len(parts) == 1:
        return parts[0]
    distinct, place = torch.unique(torch.cat([numbers for numbers, _ in parts]), return_inverse=True)
    sums = parts[0][1].new_empty((len(distinct), parts[0][1].shape[1]))
    begun = torch.zeros(len(distinct), dtype=torch.bool, device=sums.device)
    for place_U, (_, values) in zip(place.split([len(numbers) for numbers, _ in parts]), parts, strict=True):
        begun_U = begun[place_U]
        if begun_U.any():
            sums.index_fill_(0, place_U[~begun_U], 0).index_add_(0, place_U, values)
        else:
            sums.index_copy_(0, place_U, values)  # most parts: without a pass over zeros
        begun[place_U] = True
    return distinct, sums


class _Route:
    """Between distinct nodes int64[U] and their owners.

    place_R   int64[R]: of the nodes that processes ask this one for, process 0's first, the places among its own rows
    answered  how many each process asks for
    """

    def __init__(self, nodes_U: Tensor) -> None:
        owner_U = nodes_U % processes()
        self._order_U = owner_U.argsort(stable=True)
        asked = torch.bincount(owner_U, minlength=processes())
        answered = torch.empty_like(asked)
        dist.all_to_all_single(answered, asked)
        self._asked, self.answered = asked.tolist(), answered.tolist()
        self.place_R = self.forth(nodes_U // processes())

    def forth(self, values: Tensor) -> Tensor:
        """[R, …]: what processes have for the rows of this one; values [U, …] of the nodes."""
        received = values.new_empty((sum(self.answered), *values.shape[1:]))
        dist.all_to_all_single(received, values[self._order_U], self.answered, self._asked)
        return received

    def back(self, values: Tensor) -> Tensor:
        """[U, …]: what owners have for the nodes; values [R, …] of the rows that this process was asked for."""
        received = values.new_empty((len(self._order_U), *values.shape[1:]))
        dist.all_to_all_single(received, values, self._asked, self.answered)
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
