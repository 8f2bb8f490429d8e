"""One level's share of every objective: binary cross-entropy over chosen nodes, and how nodes are drawn.

Legend: B queries, P positives, C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from training.parallel import drawn_rows
from training.topology import Topology


def level_loss(logits_BC: Tensor, label_BC: Tensor, real_BC: Tensor) -> Tensor:
    """Σ_n BCE(z_n, g(x, n)) over real nodes, with ℓ = z·log(1+e^{−g}) + (1−z)·log(1+e^{g}) (OTM Eq. 2, sign corrected); a scalar."""
    return binary_cross_entropy_with_logits(logits_BC.float(), label_BC, weight=real_BC.to(label_BC.dtype), reduction="sum")


def draw_nodes(topology: Topology, h: int, batch: int, count: int, generator: torch.Generator) -> Tensor:
    """int64[B, C]: uniform nodes of level h, or the whole level where it has no more than `count` nodes.

    Drawn with replacement, so on a level with few more nodes than asked for some come twice, and count twice. Where several processes
    share a batch, each gets what one alone would have drawn for its instances.
    """
    span = topology.tree.level(h)
    if len(span) <= count:
        return topology.level_nodes(h).expand(batch, -1)

    def draw(rows: int) -> Tensor:
        return torch.randint(span.start, span.stop, (rows, count), generator=generator, device=topology.device)

    return drawn_rows(draw, batch)


def draw_items(topology: Topology, batch: int, count: int, generator: torch.Generator) -> Tensor:
    """int64[B, R]: uniform item rows, with replacement; shared between processes as in `draw_nodes`."""

    def draw(rows: int) -> Tensor:
        return torch.randint(topology.tree.item_count, (rows, count), generator=generator, device=topology.device)

    return drawn_rows(draw, batch)
