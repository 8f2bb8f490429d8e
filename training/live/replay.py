"""The live items of a version as a training run sees them: the operations of the journal that it does not hold, placed and applied.

Operations that were placed in this version keep their places. Others are placed here, as a service places them that loads the version;
nothing is stored.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from espalier.bundle import Bundle
from espalier.errors import InvalidData, InvalidInput
from espalier.live.journal import Journal
from espalier.live.operations import Operation
from espalier.live.rows import LiveRow, Placement
from espalier.live.state import Change, LiveState

log = logging.getLogger(__name__)

Candidates = Sequence[Sequence[tuple[int, LiveRow]]]
"""For each tree, where an item may go, best first: a parent, and the row that the item has there."""
Placing = Callable[[Operation], Candidates]
"""Where an item may go by what an operation says of it. Raises InvalidInput where it says nothing."""


def held_by(bundle: Bundle) -> int:
    """The last operation that a version holds."""
    return 0 if bundle.manifest.live is None else bundle.manifest.live.through


def replayed(bundle: Bundle, file: Path, operations: Iterable[Operation], now: float, placing: Placing | None = None) -> LiveState:
    """The state of a version at a time, seconds since 1970.

    file        the journal, for the places that it has stored
    operations  ascending; of each id its last one is enough
    placing     None: operations that have no place are left out
    An item that cannot be placed is left out, with a warning.
    """
    state, left_out = LiveState(bundle), []
    state.skip_to(held_by(bundle))
    wanted = [operation for operation in operations if operation.sequence > state.sequence]
    journal, columns = Journal(file, "read"), set(bundle.items.fields)
    stored = journal.placements(bundle.manifest.version, [operation.sequence for operation in wanted])
    journal.close()
    for operation in wanted:
        state.expire(operation.at)
        body = operation.body
        fields = None if body.fields is None else {name: value for name, value in body.fields.items() if name in columns}
        change = Change(operation.sequence, operation.id, operation.kind, fields, (), body.valid_until, operation.at)
        if not _applied(state, change, stored.get(operation.sequence, ()), operation, placing):
            left_out.append(operation.id)
            state.skip_to(operation.sequence)
    if left_out:
        log.warning("%d items are left out, since nothing says where they belong in %s: %s", len(left_out), bundle.path, left_out[:5])
    state.expire(now)
    return state


def _applied(state: LiveState, change: Change, stored: tuple[Placement, ...], operation: Operation, placing: Placing | None) -> bool:
    """Apply an operation at the places that are stored, or at new ones; whether its item has a place."""
    if stored or change.kind == "delete":
        try:
            state.apply([replace(change, placements=stored)])
            return True
        except InvalidData as error:
            log.info("operation %d is placed anew: %s", change.sequence, error)
    is_trained = bool(state.bundle.items.rows_of([change.id])[0] >= 0)
    if is_trained and not operation.body.has_evidence:
        state.apply([change])
        return True
    try:
        placements = () if placing is None else _placed(state, placing(operation), is_trained)
    except InvalidInput as error:
        log.info("%r: %s", change.id, error)
        placements = ()
    if not placements and not is_trained:
        return False
    state.apply([replace(change, placements=placements)])
    return True


def _placed(state: LiveState, candidates: Candidates, is_trained: bool) -> tuple[Placement, ...]:
    """A leaf in each tree under the best parent with room, of a trained item its own; empty where one tree has no room."""
    found = []
    for tree, parents in enumerate(candidates):
        for parent, row in parents:
            if is_trained or state.has_room(tree, parent):
                found.append(Placement(tree, parent, 0 if is_trained else state.next_slot(tree, parent), row))
                break
        else:
            return ()
    return tuple(found)
