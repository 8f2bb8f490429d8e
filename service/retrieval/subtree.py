"""A node of a tree for the console: its path, its children, items below it, and their typical values.

Node numbers are those of explanations: a live leaf has the number N + its handle. Nodes are numbered level by level and children are
contiguous, so the leaves below a node are contiguous, too. Knows trees and views. Does not know HTTP.

Legend: N nodes, H height, K children, X live leaves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from espalier.arrays import Int64
from espalier.errors import InvalidQuery, spelled
from espalier.live.overlay import PARENT
from espalier.tree import EMPTY_LEAF

from ..errors import NotFound
from ..models.loading import LoadedModel
from ..retrieval.scans import Check
from ..retrieval.typical_values import TypicalValues, count_blocks, evenly_spaced, typical

MAX_CHILDREN = 4096
"""Most children that are listed."""
MAX_TITLE = 1000
"""Most characters of a title."""
SAMPLED_ITEMS = 1 << 14
"""Most items below a node that are counted for typical values. Of more, an evenly spaced sample is counted."""


class TreeView:
    """One tree of a version with its live leaves. Raises InvalidQuery if the version has no such tree.

    tree_index  the tree's number in a forest, from 0
    hidden      int64, ascending: trained leaves whose items were deleted, or have a live leaf instead
    """

    def __init__(self, model: LoadedModel, tree_index: int) -> None:
        trees = model.bundle.alone
        if tree_index >= len(trees):
            raise InvalidQuery("tree", tree_index, f"at most {len(trees) - 1}, the number of the model's last tree")
        self.model, self.tree_index, self.tree, self.view = model, tree_index, trees[tree_index].tree, model.live.view()
        self.overlay = None if self.view.overlay.is_empty else self.view.overlay
        self.leaves = None if self.overlay is None else self.overlay.trees[tree_index]
        self.hidden: Int64 = np.sort(self.tree.leaf_of_item[[] if self.overlay is None else self.overlay.hidden])

    def path_to_item(self, item_id: str) -> list[int]:
        """The nodes from the root to an item's leaf. Raises NotFound."""
        row, entry = int(self.view.items.rows_of([item_id])[0]), self.view.entry(item_id)
        if entry is not None and entry.is_deleted:
            raise NotFound(f"{spelled(item_id)} was deleted.")
        if row < 0:
            raise NotFound(f"There is no item {spelled(item_id)} in version {self.model.version}.")
        path: list[int] = self.view.path_of(self.tree, self.tree_index, row).tolist()
        if -1 in path:
            raise NotFound(f"{spelled(item_id)} was deleted.")
        return path

    def path_to_node(self, node: int) -> list[int]:
        """The nodes from the root to `node`. Raises NotFound."""
        nodes = self.tree.node_count
        if 0 <= node < nodes:
            path = [node]
        else:
            x = self._live_leaf(node)
            if x is None:
                live = "" if self.leaves is None or not len(self.leaves) else f"; {nodes} + HANDLE are live leaves"
                raise NotFound(f"There is no node {node}: this tree has the nodes 0 to {nodes - 1}{live}.")
            path = [node, int(x)]
        while path[-1]:
            path.append(int(self.tree.parent[path[-1]]))
        return path[::-1]

    def _live_leaf(self, node: int) -> int | None:
        """The parent of a live leaf; None if `node` is not a live leaf."""
        handle = node - self.tree.node_count
        if self.overlay is None or self.leaves is None or handle not in range(self.overlay.handles):
            return None
        entry = int(self.leaves.of_handles(np.array([handle]))[0])
        return int(self.leaves.entries.rows[entry, PARENT]) if entry else None

    def first_descendants(self, nodes_K: Int64, level: int, descendant_level: int) -> Int64:
        """int64[K]: the first descendant of each node on a deeper level; one past that level's end for the node after `level`'s last."""
        for _ in range(level, descendant_level):
            nodes_K = self.tree.first_child[nodes_K]
        return nodes_K

    def item_counts(self, first: int, end: int, level: int) -> Int64:
        """int64[K]: the number of items below each of the nodes first … end − 1 of a level, live ones included."""
        bounds = np.arange(first, end + 1)
        leaves = self.first_descendants(bounds, level, self.tree.height)
        count_K = self.tree.items_below[first:end] - np.diff(np.searchsorted(self.hidden, leaves))
        if self.leaves is not None and level < self.tree.height:
            parents = self.first_descendants(bounds, level, self.tree.height - 1)
            count_K = count_K + np.diff(np.searchsorted(self.leaves.parent_X, parents))
        return count_K


class Subtree(NamedTuple):
    """The children of a node and the items below it.

    children     node numbers, at most MAX_CHILDREN of `child_count`; children_items: int64[K], number of items below each
    items        number of items below the node
    trained      int64: rows of trained items below; in a large subtree, of an evenly spaced sample
    live         int64: rows of live items below
    """

    children: list[int]
    children_items: Int64
    child_count: int
    items: int
    trained: Int64
    live: Int64


def describe_node(tree_view: TreeView, node: int, limit: int, typical_values: TypicalValues, check: Check) -> dict[str, Any]:
    """The answer to a request for a node, with at most `limit` of the items below it. Raises NotFound, DeadlinePassed."""
    path = tree_view.path_to_node(node)
    subtree = _subtree(tree_view, node, len(path) - 1)
    sampled_live = subtree.live[evenly_spaced(len(subtree.live), SAMPLED_ITEMS - min(len(subtree.trained), SAMPLED_ITEMS) + 1)]
    return {
        "node": node,
        "level": len(path) - 1,
        "height": tree_view.tree.height,
        "trained_nodes": tree_view.tree.node_count,
        "parent": path[-2] if len(path) > 1 else None,
        "path": path,
        "children": subtree.children,
        "children_items": subtree.children_items.tolist(),
        "child_count": subtree.child_count,
        "item_count": subtree.items,
        "items": _listed_items(tree_view, subtree.trained, subtree.live, limit),
        "looked_at": len(subtree.trained) + len(sampled_live),
        "values": _values(tree_view, subtree.trained, sampled_live, subtree.items, typical_values, check),
    }


def _subtree(tree_view: TreeView, node: int, level: int) -> Subtree:
    tree = tree_view.tree
    if node >= tree.node_count or tree_view.overlay is None:
        live = np.array([node - tree.node_count] if node >= tree.node_count else [], np.int64)
    elif level < tree.height and tree_view.leaves is not None:
        first, end = np.searchsorted(tree_view.leaves.parent_X, _descendants(tree_view, node, level, tree.height - 1))
        live = tree_view.leaves.handle_X[first:end]
    else:
        live = np.empty(0, np.int64)
    rows = np.empty(0, np.int64) if tree_view.overlay is None else tree_view.overlay.item_R[live]
    if node >= tree.node_count:
        return Subtree([], np.empty(0, np.int64), 0, 1, np.empty(0, np.int64), rows)
    items = int(tree_view.item_counts(node, node + 1, level)[0])
    sampled = SAMPLED_ITEMS * (items - len(live)) // max(items, 1) + 1
    trained = _trained_items(tree_view, *_descendants(tree_view, node, level, tree.height), sampled)
    if level == tree.height:
        return Subtree([], np.empty(0, np.int64), 0, items, trained, rows)
    first, end = _descendants(tree_view, node, level, level + 1)
    listed_end = min(end, first + MAX_CHILDREN)
    children, count_K = list(range(first, listed_end)), tree_view.item_counts(first, listed_end, level + 1)
    if level == tree.height - 1:  # live leaves have no nodes below
        live_leaves = live[: MAX_CHILDREN - len(children)]
        children += (tree.node_count + live_leaves).tolist()
        count_K, end = np.append(count_K, np.ones(len(live_leaves), np.int64)), end + len(live)
    return Subtree(children, count_K, end - first, items, trained, rows)


def _descendants(tree_view: TreeView, node: int, level: int, descendant_level: int) -> tuple[int, int]:
    """A node's descendants on a deeper level: the first, and one past the last."""
    first, end = tree_view.first_descendants(np.array([node, node + 1]), level, descendant_level).tolist()
    return first, end


def _trained_items(tree_view: TreeView, leaf: int, end: int, most: int) -> Int64:
    """int64: the rows of trained items in the leaves leaf … end − 1, or in `most` evenly spaced ones of them."""
    offset = tree_view.tree.leaf_offset
    leaves = leaf + evenly_spaced(end - leaf, most)
    leaves = leaves[~np.isin(leaves, tree_view.hidden)]
    rows = tree_view.tree.leaf_item[leaves - offset]
    item_rows: Int64 = rows[rows != EMPTY_LEAF]
    return item_rows


def _listed_items(tree_view: TreeView, trained: Int64, live: Int64, limit: int) -> list[dict[str, Any]]:
    """At most `limit` items: live ones first, up to half of them or more if there is room, then trained ones. Both are evenly spaced."""
    live = live[evenly_spaced(len(live), max(limit - len(trained), limit // 2, 1))]
    trained = trained[evenly_spaced(len(trained), limit - len(live))] if limit > len(live) else trained[:0]
    rows, items = np.concatenate([live, trained]), tree_view.view.items
    titles = items.values("title", rows) if "title" in items.fields else [None] * len(rows)
    first_tree = tree_view.model.bundle.tree
    eligible = tree_view.view.is_eligible(first_tree, rows)
    columns = zip(items.ids_of(rows), titles, eligible.tolist(), strict=True)
    return [
        {"id": item_id, "title": title[:MAX_TITLE] if isinstance(title, str) else None, "live": i < len(live), "eligible": is_eligible}
        for i, (item_id, title, is_eligible) in enumerate(columns)
    ]


def _values(
    tree_view: TreeView, trained: Int64, sampled_live: Int64, represented: int, typical_values: TypicalValues, check: Check
) -> dict[str, list[dict[str, Any]]]:
    if tree_view.overlay is not None:  # trained items whose fields were changed
        changed = np.isin(trained, tree_view.overlay.changed[1])
        trained, sampled_live = trained[~changed], np.concatenate([sampled_live, trained[changed]])
    catalogue, values = int(tree_view.item_counts(0, 1, 0)[0]), {}
    for name, base in typical_values.columns(tree_view.model, tree_view.view, check).items():
        check()
        column = tree_view.model.bundle.items.column(name)
        blocks = [column.take(pa.array(trained)).combine_chunks(), pa.array(tree_view.view.items.values(name, sampled_live), column.type)]
        counts = count_blocks(column.type, blocks)
        values[name] = typical(base, counts, len(trained) + len(sampled_live), represented, catalogue)
    return values
