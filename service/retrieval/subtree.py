"""A node of a tree as people see it: where it is, what is below it, and what is typical of that.

Node numbers are those of explanations: that of a live leaf is N + its handle. Nodes are numbered level by level and children are
contiguous, so the leaves below a node are contiguous too. Knows trees and views. Does not know HTTP.

Legend: N nodes, H height, K children, X live leaves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from espalier.errors import InvalidQuery
from espalier.live.overlay import PARENT
from espalier.tree import EMPTY_LEAF

from ..errors import ItemNotFound, NodeNotFound
from ..models.loading import LoadedModel
from ..retrieval.scans import Check
from ..retrieval.typical_values import TypicalValues, evenly, summed, typical

Int64 = NDArray[np.int64]

MAX_CHILDREN = 4096
"""Children that are listed."""
MAX_TITLE = 1000
"""Characters of a title that are shown."""
SAMPLED_ITEMS = 1 << 14
"""Items below a node that are looked at for typical values; where there are more, at even distances."""


class Trees:
    """One tree of a version, with what is live in it now. Raises InvalidQuery where there is no such tree.

    place   of a forest, counted from 0
    hidden  int64, ascending: trained leaves whose items were deleted, or are live elsewhere
    """

    def __init__(self, model: LoadedModel, place: int) -> None:
        trees = model.bundle.alone
        if place >= len(trees):
            raise InvalidQuery("tree", place, f"at most {len(trees) - 1}: the model has {len(trees)} trees")
        self.model, self.place, self.tree, self.view = model, place, trees[place].tree, model.live.view()
        self.overlay = None if self.view.overlay.is_empty else self.view.overlay
        self.leaves = None if self.overlay is None else self.overlay.trees[place]
        self.hidden: Int64 = np.sort(self.tree.leaf_of_item[[] if self.overlay is None else self.overlay.hidden])

    def path_to(self, item_id: str) -> list[int]:
        """The nodes from the root to an item's leaf. Raises ItemNotFound."""
        row, entry = int(self.view.items.rows_of([item_id])[0]), self.view.entry(item_id)
        if entry is not None and entry.is_deleted:
            raise ItemNotFound(f"{item_id!r} was deleted.")
        if row < 0:
            raise ItemNotFound(f"There is no item {item_id!r} in version {self.model.version}.")
        path: list[int] = self.view.path_of(self.tree, self.place, row).tolist()
        if -1 in path:
            raise ItemNotFound(f"{item_id!r} was deleted.")
        return path

    def path(self, node: int) -> list[int]:
        """The nodes from the root to a node. Raises NodeNotFound."""
        nodes = self.tree.node_count
        if 0 <= node < nodes:
            path = [node]
        else:
            x = self._live_leaf(node)
            if x is None:
                live = "" if self.leaves is None or not len(self.leaves) else f"; {nodes} + HANDLE are live leaves"
                raise NodeNotFound(f"There is no node {node}: this tree has the nodes 0 to {nodes - 1}{live}.")
            path = [node, int(x)]
        while path[-1]:
            path.append(int(self.tree.parent[path[-1]]))
        return path[::-1]

    def _live_leaf(self, node: int) -> int | None:
        """The parent of a live leaf; None where it is none."""
        handle = node - self.tree.node_count
        entry = 0 if self.leaves is None else int(self.leaves.of_handles(np.array([handle]))[0])
        return None if self.leaves is None or not entry else int(self.leaves.entries.rows[entry, PARENT])

    def first_below(self, nodes_K: Int64, level: int, below: int) -> Int64:
        """int64[K]: the first node on the level `below` under each node of a level; of the node after that level, the one after `below`."""
        for _ in range(level, below):
            nodes_K = self.tree.first_child[nodes_K]
        return nodes_K

    def live_below(self, first: int, end: int) -> Int64:
        """int64: positions 0 … X − 1 of the live leaves under the parents (nodes of level H − 1) first … end − 1."""
        if self.leaves is None:
            return np.empty(0, np.int64)
        return np.arange(*np.searchsorted(self.leaves.parent_X, [first, end]))

    def items_of_children(self, first: int, end: int, level: int) -> Int64:
        """int64[K]: how many items the nodes first … end − 1 of a level have below them now."""
        bounds = np.arange(first, end + 1)
        leaves = self.first_below(bounds, level, self.tree.height)
        count_K = self.tree.items_below[first:end] - np.diff(np.searchsorted(self.hidden, leaves))
        if self.leaves is not None and level < self.tree.height:
            parents = self.first_below(bounds, level, self.tree.height - 1)
            count_K = count_K + np.diff(np.searchsorted(self.leaves.parent_X, parents))
        return count_K


class Below(NamedTuple):
    """What is below a node.

    children     node numbers, at most MAX_CHILDREN of `child_count`; children_items: int64[K], items below each
    items        how many items are below it
    trained      int64: rows of trained ones, in a large subtree of some at even distances
    live         int64: rows of live ones
    """

    children: list[int]
    children_items: Int64
    child_count: int
    items: int
    trained: Int64
    live: Int64


def describe_node(trees: Trees, node: int, limit: int, typical_values: TypicalValues, check: Check) -> dict[str, Any]:
    """The answer to a request for a node, with at most `limit` of its items. Raises NodeNotFound, DeadlinePassed."""
    path = trees.path(node)
    below = _below(trees, node, len(path) - 1)
    later = below.live[evenly(len(below.live), SAMPLED_ITEMS - min(len(below.trained), SAMPLED_ITEMS) + 1)]
    return {
        "node": node,
        "level": len(path) - 1,
        "height": trees.tree.height,
        "trained_nodes": trees.tree.node_count,
        "parent": path[-2] if len(path) > 1 else None,
        "path": path,
        "children": below.children,
        "children_items": below.children_items.tolist(),
        "child_count": below.child_count,
        "item_count": below.items,
        "items": _listed(trees, below.trained, below.live, limit),
        "looked_at": len(below.trained) + len(later),
        "values": _values(trees, below.trained, later, below.items, typical_values, check),
    }


def _below(trees: Trees, node: int, level: int) -> Below:
    tree = trees.tree
    if node >= tree.node_count or trees.overlay is None:
        live = np.array([node - tree.node_count] if node >= tree.node_count else [], np.int64)
    elif level < tree.height and trees.leaves is not None:
        live = trees.leaves.handle_X[trees.live_below(*_ends(trees, node, level, tree.height - 1))]
    else:
        live = np.empty(0, np.int64)
    rows = np.empty(0, np.int64) if trees.overlay is None else trees.overlay.item_R[live]
    if node >= tree.node_count:
        return Below([], np.empty(0, np.int64), 0, 1, np.empty(0, np.int64), rows)
    items = int(trees.items_of_children(node, node + 1, level)[0])
    trained = _trained_items(trees, *_ends(trees, node, level, tree.height), SAMPLED_ITEMS * (items - len(live)) // max(items, 1) + 1)
    if level == tree.height:
        return Below([], np.empty(0, np.int64), 0, items, trained, rows)
    first, end = _ends(trees, node, level, level + 1)
    listed = min(end, first + MAX_CHILDREN)
    children, count_K = list(range(first, listed)), trees.items_of_children(first, listed, level + 1)
    if level == tree.height - 1:  # live leaves have no nodes below
        own = live[: MAX_CHILDREN - len(children)]
        children += (tree.node_count + own).tolist()
        count_K, end = np.append(count_K, np.ones(len(own), np.int64)), end + len(live)
    return Below(children, count_K, end - first, items, trained, rows)


def _ends(trees: Trees, node: int, level: int, below: int) -> tuple[int, int]:
    """The nodes of the level `below` under a node: the first, and one past the last."""
    first, end = trees.first_below(np.array([node, node + 1]), level, below).tolist()
    return first, end


def _trained_items(trees: Trees, leaf: int, end: int, most: int) -> Int64:
    """int64: the rows of trained items in the leaves leaf … end − 1; of at most so many leaves, at even distances."""
    offset = trees.tree.leaf_offset
    slots = leaf + evenly(end - leaf, most)
    slots = slots[~np.isin(slots, trees.hidden)]
    rows = trees.tree.leaf_item[slots - offset]
    kept: Int64 = rows[rows != EMPTY_LEAF]
    return kept


def _listed(trees: Trees, trained: Int64, live: Int64, limit: int) -> list[dict[str, Any]]:
    """At most `limit` items, of both kinds at even distances: live ones first, and at least half of the room for them if they need it."""
    live = live[evenly(len(live), max(limit - len(trained), limit // 2, 1))]
    trained = trained[evenly(len(trained), limit - len(live))] if limit > len(live) else trained[:0]
    rows, items = np.concatenate([live, trained]), trees.view.items
    titles = items.values("title", rows) if "title" in items.fields else [None] * len(rows)
    first = trees.model.bundle.tree
    eligible = trees.view.is_eligible(first, rows)
    columns = zip(items.ids_of(rows), titles, eligible.tolist(), strict=True)
    return [
        {"id": item_id, "title": title[:MAX_TITLE] if isinstance(title, str) else None, "live": i < len(live), "eligible": may}
        for i, (item_id, title, may) in enumerate(columns)
    ]


def _values(
    trees: Trees, trained: Int64, later: Int64, below: int, typical_values: TypicalValues, check: Check
) -> dict[str, list[dict[str, Any]]]:
    if trees.overlay is not None:  # trained items whose fields were changed
        changed = np.isin(trained, trees.overlay.changed[1])
        trained, later = trained[~changed], np.concatenate([later, trained[changed]])
    catalogue, found = int(trees.items_of_children(0, 1, 0)[0]), {}
    for name, base in typical_values.columns(trees.model, trees.view, check).items():
        check()
        column = trees.model.bundle.items.column(name)
        parts = [column.take(pa.array(trained)).combine_chunks(), pa.array(trees.view.items.values(name, later), column.type)]
        counts = summed(column.type, parts)
        found[name] = typical(base, counts, len(trained) + len(later), below, catalogue)
    return found
