"""Assigns slots to the items of one group of operations, before any of them is applied.

Knows candidates and which slots are free. Does not know how candidates are found (placer.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

from espalier.errors import InvalidQuery, NoRoom
from espalier.live.live_tree import late_slot
from espalier.live.rows import LiveRow, Placement
from espalier.live.state import LiveState
from espalier.manifest import LinearScorer
from espalier.placement.parents import Parents
from espalier.placement.placer import Candidates


class Slots:
    """The free slots of one version's trees. Each is promised once."""

    def __init__(self, state: LiveState) -> None:
        self._state = state
        manifest = state.bundle.manifest
        self._beam, self._moves_trained_items = manifest.search.beam_size, isinstance(manifest.scorer, LinearScorer)
        self._promised: dict[tuple[int, int], set[int]] = {}

    def place(self, item_id: str, candidates: Candidates, late_sequence: int | None = None) -> tuple[Placement, ...]:
        """An item's placement in each tree: under the best parent with room, at the item's slot if it has one there. Raises NoRoom,
        and InvalidQuery for an item without a candidate.

        If no candidate has room, the item goes near the best one, with the row for the best one. A trained item keeps its trained leaf,
        with the row for its best parent; in a linear model only if a search for it passes there with the default beam.

        late_sequence  of an operation that may be placed after later ones; None: it is the next one. The state does not know all slots of
                       the later ones, so the operation gets a slot that no other can have
        """
        placements = tuple(self._choose(item_id, tree, parents, late_sequence) for tree, parents in enumerate(candidates))
        for placement in placements:
            self._promised.setdefault((placement.tree, placement.parent), set()).add(placement.slot)
        return placements

    def keep(self, item_id: str, placements: Sequence[Placement]) -> tuple[Placement, ...]:
        """Placements of an item whose row stays. If others have its slots since it expired, it gets new ones under the same parents."""
        return self.place(item_id, [Parents([stored.parent], partial(_row_of, stored)) for stored in placements])

    def give_back(self, placements: Sequence[Placement]) -> None:
        """Free the slots of an operation that is not stored."""
        for placement in placements:
            self._promised[placement.tree, placement.parent].discard(placement.slot)

    def _choose(self, item_id: str, tree: int, parents: Parents, late_sequence: int | None) -> Placement:
        if not parents.nodes:
            raise InvalidQuery("events", f"those of {item_id!r}", "numbers whose scores are finite, to place it by")
        best = parents.nodes[0]
        trained = self._state.trained_leaf_of(item_id, tree)
        if trained is not None and (trained[0] in parents.nodes[: self._beam] or not self._moves_trained_items):
            return Placement(tree, *trained, parents.row(best))
        live_leaf = self._state.live_leaf_of(item_id, tree)
        candidates, near = ((node, node) for node in parents.nodes), ((node, best) for node in self._state.near(tree, best))
        for parent, row_parent in chain(candidates, near):
            if trained is not None and trained[0] == parent:
                return Placement(tree, *trained, parents.row(row_parent))
            if live_leaf is not None and live_leaf[0] == parent:
                return Placement(tree, *live_leaf, parents.row(row_parent))
            promised = self._promised.get((tree, parent), set())
            if self._state.has_room(tree, parent, promised):
                slot = self._state.next_slot(tree, parent, promised) if late_sequence is None else late_slot(late_sequence)
                return Placement(tree, parent, slot, parents.row(row_parent))
        raise NoRoom(f"No node of the tree has room for {item_id!r}; fold the live catalogue.")


def _row_of(stored: Placement, _: int) -> LiveRow:
    return stored.row
