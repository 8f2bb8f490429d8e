"""Spreads the node rows of a model over the processes, and gathers them in process 0.

A run needs node rows, Adam's two moments, the averaged and the best rows: 20 bytes for each number of a row. Where several processes
train, each holds its part of all five, and no process holds a full table during training. Process 0 makes the first rows and gets the
trained ones, each one table of 4 bytes a number.

Legend: N nodes, D node row, P processes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..deep.parallel import broadcast_from_first, process, processes
from ..deep.scorers.model import NodeScorer
from ..deep.scorers.row_table import RowTable, held_rows

log = logging.getLogger(__name__)

BLOCK = 1 << 15
"""Rows of a process that travel at a time."""


@torch.no_grad()
def share_rows(model: NodeScorer, nodes: int, device: torch.device) -> None:
    """Spread the rows float32[N, D] of process 0's model over all, copy its other weights, and move the model to the device. Collective."""
    width = model.node_rows.shape[1]
    all_rows_ND = model.node_rows.detach() if process() == 0 else None
    rows_nD = torch.empty((held_rows(nodes), width), device=device)
    size = BLOCK * processes()
    for start in range(0, nodes, size):
        rows = min(size, nodes - start)
        block = torch.empty((rows, width), device=device) if all_rows_ND is None else all_rows_ND[start : start + rows].to(device)
        dist.broadcast(block, 0)
        process_block = block[process() :: processes()]
        rows_nD[start // processes() : start // processes() + len(process_block)] = process_block
    model.node_rows = nn.Parameter(rows_nD)
    model.to(device)
    model.row_table = RowTable(model.node_rows, nodes)
    broadcast_from_first(values for name, values in model.state_dict().items() if name != "node_rows")


@torch.no_grad()
def gather_rows(rows_nD: Tensor, nodes: int, target_ND: Tensor | None) -> None:
    """Write the rows [N, D] that the processes hold into process 0's target_ND; the others pass None. A collective call, in blocks."""
    for start in range(0, len(range(0, nodes, processes())), BLOCK):
        rows = min(BLOCK, len(range(0, nodes, processes())) - start)  # process 0 holds the most: others may hold one row less
        padded = rows_nD.new_zeros((rows, *rows_nD.shape[1:]))
        rows_to_send = rows_nD[start : start + rows]
        padded[: len(rows_to_send)] = rows_to_send
        blocks = [torch.empty_like(padded) for _ in range(processes())] if target_ND is not None else None
        dist.gather(padded, blocks)
        if target_ND is not None and blocks is not None:
            first = start * processes()
            block = torch.stack(blocks, 1).flatten(0, 1)[: nodes - first]
            target_ND[first : first + len(block)] = block


@torch.no_grad()
def unshare_rows(model: NodeScorer) -> None:
    """End training: process 0's model has all rows; the others keep theirs, and can no longer be used. A collective call."""
    table, device = model.row_table, model.node_rows.device
    model.row_table = None
    if table is None or processes() == 1:
        return
    nodes = table.nodes
    all_rows_ND = torch.empty((nodes, model.node_rows.shape[1])) if process() == 0 else None  # not on a GPU, which still holds a share
    gather_rows(model.node_rows.detach(), nodes, all_rows_ND)
    if all_rows_ND is not None:
        model.node_rows = nn.Parameter(torch.empty(0))
        model.node_rows = nn.Parameter(all_rows_ND.to(device))


def map_rows(content: dict[str, Any], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """A checkpoint's content with changed node rows: the model's, their moments, averaged and best. Every process changes the tables in the
    same order.
    """

    def changed(state: dict[str, Any], *names: str) -> dict[str, Any]:
        return state | {name: change(state[name]) for name in names}

    optimiser, best = content["optimiser"], content["progress"]["best"]
    tables = {"rows": changed(optimiser["rows"], "first", "second"), "averaged": changed(optimiser["averaged"], "node_rows")}
    return content | {
        "model": changed(content["model"], "node_rows"),
        "optimiser": optimiser | tables,
        "progress": content["progress"] | {"best": changed(best, "node_rows") if best else best},
    }
