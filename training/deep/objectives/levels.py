"""One level's share of every objective: binary cross-entropy over chosen nodes, and how nodes are drawn.

Legend: B queries, P positives, C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from ...deep.parallel import drawn_rows
from ...deep.topology import Topology

DENSE = 4
"""Draw with repeats removed from at least this many numbers per draw. From fewer, too many draws repeat: sort a random key per number."""


def level_loss(logits_BC: Tensor, label_BC: Tensor, counted_BC: Tensor) -> Tensor:
    """Σ_n BCE(z_n, g(x, n)) over the counted nodes, with ℓ = z·log(1+e^{−g}) + (1−z)·log(1+e^{g}) (OTM Eq. 2, sign corrected); a scalar."""
    return binary_cross_entropy_with_logits(logits_BC.float(), label_BC, weight=counted_BC.to(label_BC.dtype), reduction="sum")


def draw_nodes(topology: Topology, h: int, batch: int, count: int, generator: torch.Generator) -> Tensor:
    """int64[B, C]: different nodes of level h for each query, ascending, every set of them as likely; the whole level where it has no
    more than `count` nodes.

    Where several processes share a batch, each gets the nodes that a single process would have drawn for its instances.
    """
    span = topology.tree.level(h)
    if len(span) <= count:
        return topology.level_nodes(h).expand(batch, -1)
    return drawn_rows(lambda rows: span.start + drawn_sets(len(span), rows, count, generator, topology.device), batch)


def drawn_sets(size: int, rows: int, count: int, generator: torch.Generator, device: torch.device) -> Tensor:
    """int64[rows, count]: numbers below `size`, in each row a sample without replacement, ascending.

    From many numbers: draw with replacement and draw repeats again. That favours no number, so every set is equally likely.
    """
    if size < DENSE * count:
        keys = torch.rand((rows, size), generator=generator, device=device)
        return keys.topk(count, dim=1).indices.sort(1).values
    drawn = torch.randint(size, (rows, count), generator=generator, device=device).sort(1).values
    open_rows = torch.arange(rows, device=device)
    while len(open_rows):
        numbers = drawn[open_rows]
        is_repeat = torch.zeros_like(numbers, dtype=torch.bool)
        is_repeat[:, 1:] = numbers[:, 1:] == numbers[:, :-1]
        has_repeats = is_repeat.any(1)
        open_rows, numbers, is_repeat = open_rows[has_repeats], numbers[has_repeats], is_repeat[has_repeats]
        numbers[is_repeat] = torch.randint(size, (int(is_repeat.sum()),), generator=generator, device=device)
        drawn[open_rows] = numbers.sort(1).values
    return drawn


def draw_items(topology: Topology, batch: int, count: int, generator: torch.Generator) -> Tensor:
    """int64[B, R]: uniform item rows, with replacement; shared between processes as in `draw_nodes`."""
    items, device = topology.tree.item_count, topology.device
    return drawn_rows(lambda rows: torch.randint(items, (rows, count), generator=generator, device=device), batch)
