"""All trees of a forest with live items in two compiled calls, for a single query without a filter of its own, exclusions and a trace.

What `linear/joint_search.py` is without live items. The beams above the leaves come with the search of the trees; live leaves under them
are scored tree by tree, and join the mean.

Legend: T trees, N nodes of all trees, K beam, X scored (item, tree) pairs, M results, R handles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from espalier.compiled_code import compiled
from espalier.engines.forest import best_means
from espalier.engines.linear.beam import search_queries
from espalier.engines.linear.chunk_search import ALL_NODES, refuse
from espalier.engines.linear.joint_search import JointSearch, scored_items
from espalier.engines.live.linear_leaves import arrays_of, score
from espalier.live.overlay import Overlay
from espalier.read_only import read_only
from espalier.text.sparse_rows import SparseRows
from espalier.tree import Tree

Array = NDArray[Any]
(FIRST,) = read_only(np.zeros(1, np.int64))


class JointOverlay:
    """An overlay as one compiled call for all trees takes it.

    of_items  `live` of `best_means`
    """

    def __init__(self, trees: Sequence[Tree], overlay: Overlay, of_items: tuple[Any, ...]) -> None:
        standing, self._of_items = overlay.standing, of_items
        self._eligible_N = ALL_NODES
        if standing is not None:
            (self._eligible_N,) = read_only(np.concatenate([standing.of_tree(place).eligible_N for place in range(len(trees))]))
        self._leaves_T = tuple(arrays_of(leaves) for leaves in overlay.trees)
        self._masks = read_only(FIRST, overlay.eligible_R[None])
        (self._root_T,) = read_only(np.cumsum([0, *(tree.node_count for tree in trees[:-1])]))

    def search(
        self, joint: JointSearch, query: SparseRows, knobs: tuple[Array, Array], tail: tuple[Any, Array], place_I: Array,
        out: tuple[Array, Array],
    ) -> None:  # fmt: skip
        """Write the best items of one query, and their ranks. Raises InvalidQuery as `JointSearch.search`.

        knobs  beam_size_B and m_B · tail, place_I  of `best_means` · out  rows_BM and ranks_BM
        """
        positions_T, queries, tables, ranker, work, found, item_N = joint.arguments(query, knobs[0], frontier=True)
        wrong = search_queries(positions_T, queries, tables, self._eligible_N, ranker, work, found)
        if wrong >= 0:
            refuse(query, wrong, joint.width)
        live = self._leaves_T, self._masks, self._of_items
        _means(queries[:3], ranker, found, item_N, self._root_T, knobs[1], tail, place_I, *out, work[0], live)


@compiled()
def _means(
    queries: tuple[Array, ...], ranker: tuple[Any, int], found: tuple[Array, ...], item_N: Array, root_T: Array, m_B: Array,
    tail: tuple[Any, Array], place_I: Array, rows_BM: Array, ranks_BM: Array, query_F: Array, live: Any,
) -> None:  # fmt: skip
    """`score` of the live leaves of every tree, then `best_means` of these and of what the trees found."""
    leaves_T, masks, of_items = live
    nodes_TK, ranks_TK = found[5][:, 0], found[6][:, 0]
    lists, more = [], 0
    for t in range(len(root_T)):
        for k in range(nodes_TK.shape[1]):
            if nodes_TK[t, k] >= 0:
                nodes_TK[t, k] -= root_T[t]
        leaves = leaves_T[t]
        _, position_C, ranks_C = score(queries, (nodes_TK[t : t + 1], ranks_TK[t : t + 1]), leaves, masks, ranker, query_F)
        lists.append((leaves[2], position_C, ranks_C))
        more += len(position_C)
    items_BX, logs_BX, count_B = scored_items(found, item_N, more)
    at = count_B[0]
    for handle_X, position_C, ranks_C in lists:
        for c in range(len(position_C)):
            items_BX[0, at], logs_BX[0, at] = of_items[0] + handle_X[position_C[c]], ranks_C[c]
            at += 1
    count_B[0] = at
    best_means(items_BX, logs_BX, count_B, len(root_T), m_B, queries, tail, place_I, rows_BM, ranks_BM, of_items)
