"""Slots for the items of one group of operations, of which none is applied yet.

Knows candidates and which slots are taken. Does not know how candidates are found (espalier.placement).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

from espalier.live.live_tree import late_slot
from espalier.live.rows import LiveRow, Placement
from espalier.live.state import LiveState
from espalier.placement.parents import Parents
from espalier.placement.placer import Candidates

from ..errors import CatalogueFull


class Slots:
    """The slots of one version's trees, by its state; each is promised once."""

    def __init__(self, state: LiveState) -> None:
        self._state = state
        self._promised: dict[tuple[int, int], set[int]] = {}

    def place(self, item_id: str, candidates: Candidates, late: int | None = None) -> tuple[Placement, ...]:
        """An item's leaf in each tree: under the best parent with room, at its own slot where it has one there. Raises CatalogueFull.

        Where no candidate has room it goes near the best one, with the row that it has there. A trained item keeps its own leaf, and takes
        the row of its best parent.

        late  sequence of an operation that is placed after later ones may have been; None: of the next one. The state does not know all
              slots that those have taken, so it gets one that no other operation has
        """
        chosen = [self._choose(item_id, tree, parents, late) for tree, parents in enumerate(candidates)]
        for placement in chosen:
            self._promised.setdefault((placement.tree, placement.parent), set()).add(placement.slot)
        return tuple(chosen)

    def keep(self, item_id: str, placements: Sequence[Placement]) -> tuple[Placement, ...]:
        """The leaves of an item whose row stays. If it has expired, others may have its slots: then new ones, under the same parents."""
        return self.place(item_id, [Parents([kept.parent], partial(_row_of, kept)) for kept in placements])

    def give_back(self, placements: Sequence[Placement]) -> None:
        """Promise an item's leaves no more: its operation is not stored."""
        for placement in placements:
            self._promised[placement.tree, placement.parent].discard(placement.slot)

    def _choose(self, item_id: str, tree: int, parents: Parents, late: int | None) -> Placement:
        if not parents.nodes:
            raise CatalogueFull(f"A search with the evidence of {item_id!r} finds no node of the tree.")
        best = parents.nodes[0]
        trained = self._state.trained_leaf_of(item_id, tree)
        if trained is not None:
            return Placement(tree, *trained, parents.row(best))
        own = self._state.live_leaf_of(item_id, tree)
        candidates, near = ((node, node) for node in parents.nodes), ((node, best) for node in self._state.near(tree, best))
        for parent, of_row in chain(candidates, near):
            if own is not None and own[0] == parent:
                return Placement(tree, *own, parents.row(of_row))
            promised = self._promised.get((tree, parent), set())
            if self._state.has_room(tree, parent, promised):
                slot = self._state.next_slot(tree, parent, promised) if late is None else late_slot(late)
                return Placement(tree, parent, slot, parents.row(of_row))
        raise CatalogueFull(f"No node of the tree has room for {item_id!r}; fold the live catalogue.")


def _row_of(kept: Placement, _: int) -> LiveRow:
    return kept.row
