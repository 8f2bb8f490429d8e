"""The candidate parents of an item, best first, each with the item's row under it.

Legend: B queries, K parents.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from espalier.arrays import Float64, Int64
from espalier.live.rows import LiveRow
from espalier.queries import QueryBatch
from espalier.search import Frontier, SearchParams, SearchResult

Search = Callable[[QueryBatch, SearchParams], SearchResult]
"""Searches a version with queries, and returns their beams of parents."""
Votes = tuple[Int64, Float64]
"""Distinct nodes, ascending, and the votes for each."""
MOST = 64
"""Most candidate parents of an item. With room for 16 leaves each, they take 1,024 similar items."""


@dataclass(frozen=True, eq=False)
class Parents:
    """Nodes, best first, and a function that makes the item's row under one of them, when it is needed."""

    nodes: Sequence[int]
    row: Callable[[int], LiveRow]

    def __iter__(self) -> Iterator[tuple[int, LiveRow]]:
        return ((node, self.row(node)) for node in self.nodes)


def _no_row(node: int) -> LiveRow:
    raise ValueError(f"node {node}: an item without candidates has no row")


NO_PARENTS = Parents((), _no_row)
"""Those of an item that nothing can place."""


def votes_of_search(frontier: Frontier, queries: Sequence[int]) -> Votes:
    """Votes of a search for its parents: the mean, over some queries (positions), of the softmax of the ranks."""
    nodes, weights = [], []
    for b in queries:
        is_node = frontier.nodes_BK[b] >= 0
        ranks = frontier.ranks_BK[b][is_node].astype(np.float64)
        if len(ranks):
            exponentials = np.exp(ranks - ranks.max())
            nodes.append(frontier.nodes_BK[b][is_node])
            weights.append(exponentials / (exponentials.sum() * len(queries)))
    return (nodes[0], weights[0]) if len(nodes) == 1 else summed(nodes, weights)


def summed(nodes: Sequence[Int64], weights: Sequence[Float64]) -> Votes:
    """The sum of votes. Nodes may repeat."""
    if not nodes:
        return np.empty(0, np.int64), np.empty(0)
    distinct, at = np.unique(np.concatenate(nodes), return_inverse=True)
    return distinct, np.bincount(at, np.concatenate(weights)).astype(np.float64)


def best_first(weighted_votes: Sequence[tuple[float, Votes]]) -> Int64:
    """At most MOST nodes by the sum of (weight, votes) pairs. Ties go to the lower node."""
    if len(weighted_votes) == 1:
        nodes, total = weighted_votes[0][1]
    else:
        nodes, total = summed([nodes for _, (nodes, _) in weighted_votes], [weight * votes for weight, (_, votes) in weighted_votes])
    return nodes[np.argsort(-total, kind="stable")[:MOST]]
