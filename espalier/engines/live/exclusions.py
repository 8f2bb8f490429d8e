"""What a query's exclusions do to trained and live items, compiled, and whether the wrapped engine closes the parents that a fold would.

The wrapped engine knows trained leaves alone. It closes a parent whose eligible trained leaves are all excluded, also above a live leaf,
and leaves one open whose last eligible leaf was an excluded live one. Both are rare; then the query needs a mask of its own.

Legend: E excluded items, W trained items that are live, Y parents of live leaves, X live leaves, R handles, N nodes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from espalier.compiled_code import compiled
from espalier.live.overlay import LiveLeaves, Overlay
from espalier.read_only import read_only
from espalier.search import NO_ITEM
from espalier.tree import Tree

Array = NDArray[Any]
(EVERY_NODE,) = read_only(np.empty(0, np.bool_))


class Excluded(NamedTuple):
    """trained   int64: distinct trained item rows to exclude, ascending, whose own leaves may count
    handles      int64: distinct eligible handles to exclude
    held         how many of `trained` are eligible
    needs_mask   whether the wrapped engine would close other parents than a fold
    """

    trained: NDArray[np.int64]
    handles: NDArray[np.int64]
    held: int
    needs_mask: bool


class Exclusions:
    """For one tree; the overlay may change from call to call."""

    def __init__(self, tree: Tree) -> None:
        self._tree = read_only(tree.leaf_of_item, tree.parent, tree.first_child, tree.leaf_item)
        self._known: tuple[LiveLeaves, tuple[Array, ...]] | None = None

    def of(self, overlay: Overlay, leaves: LiveLeaves, exclude_E: Array, eligible_N: Array | None, live_R: Array | None) -> Excluded:
        """What a query excludes.

        exclude_E   int64[E]: item rows, live ones included, NO_ITEM as padding, repeats allowed
        eligible_N  bool[N]: its mask; None: every node above an item is eligible
        live_R      bool[R]: its eligible handles; None: it sees the bundle alone
        """
        known = self._known
        if known is None or known[0] is not leaves:
            arrays = overlay.row_W, overlay.handle_W, leaves.parent_Y, leaves.begin_Y, leaves.handle_X, leaves.parent_X, leaves.position_R
            known = self._known = leaves, read_only(*arrays)
        nodes_N, handles_R = EVERY_NODE if eligible_N is None else eligible_N, EVERY_NODE if live_R is None else live_R
        return Excluded(*_excluded(overlay.items, self._tree, known[1], *read_only(exclude_E, nodes_N, handles_R), live_R is None))


@compiled()
def _found(sorted_W: Array, number: int) -> Any:
    """Where a number is among ascending ones; −1 where it is not."""
    at = np.searchsorted(sorted_W, number)
    return at if at < len(sorted_W) and sorted_W[at] == number else -1


@compiled()
def _excluded(
    items: int, tree: Any, live: Any, exclude_E: Array, eligible_N: Array, live_R: Array, is_frozen: bool
) -> tuple[Array, Array, int, bool]:
    """The fields of Excluded."""
    leaf_of_item, parent, first_child, leaf_item = tree
    row_W, handle_W, parent_Y, begin_Y, handle_X, parent_X, position_R = live
    leaf_offset = len(parent) - len(leaf_item)
    rows = np.sort(exclude_E)
    trained, handles, touched = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
    count, gone, parents, held, former = 0, 0, 0, 0, NO_ITEM
    for row in rows:
        if row in (former, NO_ITEM):
            continue
        former = row
        handle = row - items
        if row < items:
            at = -1 if is_frozen else _found(row_W, row)
            handle = -1 if at < 0 else handle_W[at]
        if handle < 0:
            trained[count] = row
            count += 1
            leaf = leaf_of_item[row]
            if len(eligible_N) == 0 or eligible_N[leaf]:
                held += 1
                at = _found(parent_Y, parent[leaf])
                if at >= 0:
                    touched[parents] = at
                    parents += 1
        elif handle < min(len(live_R), len(position_R)) and live_R[handle] and position_R[handle] >= 0:
            handles[gone] = handle
            gone += 1
            touched[parents] = _found(parent_Y, parent_X[position_R[handle]])
            parents += 1
    excluded_R = np.sort(handles[:gone])
    needs_mask = False
    for y in touched[:parents]:
        closed, is_open = False, False
        for node in range(first_child[parent_Y[y]], first_child[parent_Y[y] + 1]):
            item = leaf_item[node - leaf_offset]
            if item >= 0 and (len(eligible_N) == 0 or eligible_N[node]):
                if _found(trained[:count], item) >= 0:
                    closed = True
                else:
                    is_open = True
        if is_open:
            continue
        for x in range(begin_Y[y], begin_Y[y + 1]):
            handle = handle_X[x]
            if handle < len(live_R) and live_R[handle] and _found(excluded_R, handle) < 0:
                is_open = True
        if closed == is_open:
            needs_mask = True
    return trained[:count].copy(), handles[:gone].copy(), held, needs_mask
