"""The parents that an item may go to, best first, each with the row that it has there.

Legend: B queries, K parents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from espalier.engines.stages import Frontier, ParentsFound
from espalier.live.rows import LiveRow
from espalier.queries import QueryBatch
from espalier.search import SearchParams

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
Search = Callable[[QueryBatch, SearchParams], ParentsFound]
"""Searches a version for the parents that queries lead to."""
Votes = tuple[Int64, Float64]
"""Distinct nodes, ascending, and what speaks for each."""
MOST = 64
"""Parents that are candidates for an item: with room for 16 leaves each, 1,024 items of one kind find a place."""


@dataclass(frozen=True, eq=False)
class Parents:
    """Nodes, best first, and what makes the row that the item has under one of them: only when it is asked for."""

    nodes: Sequence[int]
    row: Callable[[int], LiveRow]

    def __iter__(self) -> Iterator[tuple[int, LiveRow]]:
        return ((node, self.row(node)) for node in self.nodes)


def votes_of_search(frontier: Frontier, queries: Sequence[int]) -> Votes:
    """What a search says of its parents: the mean over some queries (positions) of the softmax of their ranks."""
    nodes, weights = [], []
    for b in queries:
        found = frontier.nodes_BK[b] >= 0
        ranks = frontier.ranks_BK[b][found].astype(np.float64)
        if len(ranks):
            chances = np.exp(ranks - ranks.max())
            nodes.append(frontier.nodes_BK[b][found])
            weights.append(chances / (chances.sum() * len(queries)))
    return (nodes[0], weights[0]) if len(nodes) == 1 else summed(nodes, weights)


def summed(nodes: Sequence[Int64], weights: Sequence[Float64]) -> Votes:
    """Votes for nodes that may stand there twice."""
    if not nodes:
        return np.empty(0, np.int64), np.empty(0)
    distinct, at = np.unique(np.concatenate(nodes), return_inverse=True)
    return distinct, np.bincount(at, np.concatenate(weights)).astype(np.float64)


def best_first(parts: Sequence[tuple[float, Votes]]) -> Int64:
    """At most MOST nodes by their weighted votes; ties: the lower node."""
    if len(parts) == 1:
        nodes, total = parts[0][1]
    else:
        nodes, total = summed([nodes for _, (nodes, _) in parts], [weight * votes for weight, (_, votes) in parts])
    return nodes[np.argsort(-total, kind="stable")[:MOST]]
