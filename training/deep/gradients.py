"""Gradients of a step, as one process alone would have them: means over the processes, and their norm.

Legend: D node row.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.deep.parallel import average_gradients
from training.deep.scorers.model import NodeScorer


def combine_gradients(model: NodeScorer) -> None:
    """Each gradient becomes its mean over the processes; those of shared rows go to the rows' owners."""
    if model.shared is None:
        average_gradients(model.parameters())
        return
    model.shared.bring_gradients()
    average_gradients(parameter for parameter in model.parameters() if parameter is not model.node_rows)


@torch.no_grad()
def clip_gradients(model: NodeScorer, most: float) -> None:
    """Scale all gradients down to a norm of at most `most`, over the rows of all processes."""
    norms: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.grad is not None:
            norm = torch.linalg.vector_norm(parameter.grad)
            if model.shared is not None and parameter is model.node_rows:
                square = norm.double().square()
                dist.all_reduce(square)
                norm = square.sqrt().to(norm.dtype)
            norms.append(norm)
    nn.utils.clip_grads_with_norm_(model.parameters(), most, torch.linalg.vector_norm(torch.stack(norms)))
