"""All trees of a forest with live items in few compiled calls, for a single query without a filter of its own, exclusions and a trace.

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
    """An overlay as these calls take it.

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
        items_T, ranks_T, sparse = [], [], queries[:3]
        nodes_TK, kept_ranks_TK = found[5][:, 0], found[6][:, 0]
        nodes_TK = np.where(nodes_TK < 0, nodes_TK, nodes_TK - self._root_T[:, None])
        for t, leaves in enumerate(self._leaves_T):
            beams = read_only(nodes_TK[t : t + 1], kept_ranks_TK[t : t + 1])
            _, position_C, ranks_C = score(sparse, beams, leaves, self._masks, ranker, work[0])
            items_T.append(self._of_items[0] + leaves[2][position_C])
            ranks_T.append(ranks_C)
        live = np.concatenate(items_T), np.concatenate(ranks_T)
        _means(found, item_N, live, sparse, knobs[1], tail, place_I, *out, self._of_items)


@compiled()
def _means(
    found: tuple[Array, ...], item_N: Array, live: tuple[Array, Array], queries: tuple[Array, ...], m_B: Array, tail: tuple[Any, Array],
    place_I: Array, rows_BM: Array, ranks_BM: Array, of_items: tuple[Any, ...],
) -> None:  # fmt: skip
    """`best_means` of what the trees found, and of the items and ranks of live leaves in them."""
    items_C, ranks_C = live
    items_BX, logs_BX, count_B = scored_items(found, item_N, len(items_C))
    at = count_B[0]
    for c in range(len(items_C)):
        items_BX[0, at + c], logs_BX[0, at + c] = items_C[c], ranks_C[c]
    count_B[0] = at + len(items_C)
    best_means(items_BX, logs_BX, count_B, len(found[2]), m_B, queries, tail, place_I, rows_BM, ranks_BM, of_items)
