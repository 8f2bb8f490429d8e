"""Which processes hold the node rows of a model, and how rows come from process 0 to all and back.

A run needs node rows, Adam's two moments, the averaged and the best rows: 20 bytes for each number of a row. Where several processes
train, each holds its part of all five, and a full table exists nowhere while they do. Process 0 makes the first rows, and gets the last
ones, one table of 4 bytes a number.

Legend: N nodes, D node row, P processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..deep.parallel import from_first, process, processes
from ..deep.scorers.model import NodeScorer
from ..deep.scorers.row_table import RowTable, own_count

log = logging.getLogger(__name__)

BLOCK = 1 << 15
"""Rows of a process that travel at a time."""


@torch.no_grad()
def share_rows(model: NodeScorer, nodes: int, device: torch.device) -> None:
    """Let all processes share the rows float32[N, D] of process 0's model, and move the model to the device; a collective call."""
    width = model.node_rows.shape[1]
    whole_ND = model.node_rows.detach() if process() == 0 else None
    own_nD = torch.empty((own_count(nodes), width), device=device)
    size = BLOCK * processes()
    for start in range(0, nodes, size):
        rows = min(size, nodes - start)
        block = torch.empty((rows, width), device=device) if whole_ND is None else whole_ND[start : start + rows].to(device)
        dist.broadcast(block, 0)
        part = block[process() :: processes()]
        own_nD[start // processes() : start // processes() + len(part)] = part
    model.node_rows = nn.Parameter(own_nD)
    model.to(device)
    model.row_table = RowTable(model.node_rows, nodes)


def share_weights(model: NodeScorer) -> None:
    """All processes take the weights of process 0, but for the node rows."""
    from_first(values for name, values in model.state_dict().items() if name != "node_rows")


@torch.no_grad()
def gather_rows(own_nD: Tensor, nodes: int, into_ND: Tensor | None) -> None:
    """Write what processes hold of [N, D] into process 0's into_ND; the others pass None. A collective call, in blocks."""
    for start in range(0, len(range(0, nodes, processes())), BLOCK):
        rows = min(BLOCK, len(range(0, nodes, processes())) - start)  # process 0 holds the most: another may lack the last
        part = own_nD.new_zeros((rows, *own_nD.shape[1:]))
        mine = own_nD[start : start + rows]
        part[: len(mine)] = mine
        parts = [torch.empty_like(part) for _ in range(processes())] if into_ND is not None else None
        dist.gather(part, parts)
        if into_ND is not None and parts is not None:
            first = start * processes()
            block = torch.stack(parts, 1).flatten(0, 1)[: nodes - first]
            into_ND[first : first + len(block)] = block


@torch.no_grad()
def unshare_rows(model: NodeScorer) -> None:
    """End training: process 0's model has all rows; the others keep theirs, and can no longer be used. A collective call."""
    table, device = model.row_table, model.node_rows.device
    model.row_table = None
    if table is None or processes() == 1:
        return
    nodes = table.nodes
    whole_ND = torch.empty((nodes, model.node_rows.shape[1])) if process() == 0 else None  # not on a GPU: its share still lies there
    gather_rows(model.node_rows.detach(), nodes, whole_ND)
    if whole_ND is not None:
        model.node_rows = nn.Parameter(torch.empty(0))
        model.node_rows = nn.Parameter(whole_ND.to(device))


def map_rows(content: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """A checkpoint's content with other node rows: those of the model, their moments, averaged and best. Every process comes to the tables
    in the same order.
    """

    def changed(part: dict[str, Any], *names: str) -> dict[str, Any]:
        return part | {name: change(part[name]) for name in names}

    optimiser, best = content["optimiser"], content["progress"]["best"]
    parts = {"rows": changed(optimiser["rows"], "first", "second"), "averaged": changed(optimiser["averaged"], "node_rows")}
    return content | {
        "model": changed(content["model"], "node_rows"),
        "optimiser": optimiser | parts,
        "progress": content["progress"] | {"best": changed(best, "node_rows") if best else best},
    }
