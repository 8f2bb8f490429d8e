"""How a model of kind `neighbours` ranks without its memory: by popularity, whatever the history.

Legend: N nodes, I items.
"""

from __future__ import annotations

import numpy as np

from espalier.arrays import Array, Float32
from espalier.tree import Tree


def popularity_ranks(tree: Tree, events_I: Array) -> Float32:
    """float32[N], 0 to 1: leaves by their items' events, and an inner node as its best leaf."""
    log_events_I = np.log1p(events_I)
    best_N = np.zeros(tree.node_count, np.float32)
    best_N[tree.leaf_of_item] = log_events_I / max(log_events_I.max(), 1)
    for h in range(tree.height, 0, -1):
        nodes = np.arange(tree.level(h).start, tree.level(h).stop)
        np.maximum.at(best_N, tree.parent[nodes], best_N[nodes])
    return best_N
