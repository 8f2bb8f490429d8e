"""Replays a journal over a version for a training run: places and applies the operations that the version does not hold.

An operation whose placement in this version is stored in the journal keeps it. Others are placed here, as a service does when it loads the
version; the new placements are not stored.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from espalier.bundle import Bundle
from espalier.engines import open_engine
from espalier.engines.pipeline import Pipeline
from espalier.errors import EspalierError, InvalidData
from espalier.live.fields import Columns
from espalier.live.journal import Journal
from espalier.live.operations import Operation
from espalier.live.rows import Placement
from espalier.live.state import Change, LiveState
from espalier.placement.placer import Placer, needs_placement
from espalier.placement.slots import Slots

log = logging.getLogger(__name__)

LISTED_IDS = 5
"""Most ids that the warning about items without a placement lists."""


def held_through(bundle: Bundle) -> int:
    """The last operation that a version holds."""
    return 0 if bundle.manifest.live is None else bundle.manifest.live.through


def replay_operations(bundle: Bundle, file: Path, operations: Iterable[Operation], now: float) -> LiveState:
    """The state of a version at the time `now`, in seconds since 1970.

    file        the journal, which holds stored placements
    operations  ascending; the last one of each id is enough
    An item that cannot be placed is left out, with a warning.
    """
    replay, left_out, held, pending = _Replay(bundle), list[str](), list[Operation](), list[Operation]()
    for operation in operations:
        (pending if operation.sequence > replay.state.sequence else held).append(operation)
    replay.state.expire_held(held, now)
    journal = Journal(file, "read")
    try:
        stored = journal.placements(bundle.manifest.fingerprint, [operation.sequence for operation in pending])
        for operation in pending:
            if not replay.apply(operation, stored.get(operation.sequence, ()), now):
                left_out.append(operation.id)
    finally:
        journal.close()
        replay.close()
    if left_out:
        ids = ", ".join(map(repr, left_out[:LISTED_IDS]))
        log.warning("%d items are left out, since they have no evidence for a placement in %s: %s", len(left_out), bundle.path, ids)
    replay.state.expire(now)
    return replay.state


class _Replay:
    def __init__(self, bundle: Bundle) -> None:
        self.bundle, self.state, self._columns = bundle, LiveState(bundle), Columns(bundle.items)
        self.state.skip_to(held_through(bundle))
        self._engine_and_placer: tuple[Pipeline, Placer] | None = None  # opened when the first operation must be placed

    def close(self) -> None:
        if self._engine_and_placer is not None:
            self._engine_and_placer[0].close()

    def apply(self, operation: Operation, stored: tuple[Placement, ...], now: float) -> bool:
        """Apply an operation with its stored placements, or with new ones. Returns whether its item has a leaf."""
        change = Change.of(operation, stored, self._columns, now)
        if stored or change.kind == "delete":
            try:
                self.state.apply([change])
                return True
            except InvalidData as error:
                log.info("operation %d gets a new placement: %s", operation.sequence, error)
        placements = self._place(operation) if needs_placement(self.bundle, operation) else ()
        if not placements and self.bundle.items.row_of(operation.id) < 0:
            self.state.skip_to(operation.sequence)
            return False
        self.state.apply([replace(change, placements=placements)])
        return True

    def _place(self, operation: Operation) -> tuple[Placement, ...]:
        """A leaf in each tree; empty if the item's evidence is unusable or no parent has room."""
        if self._engine_and_placer is None:
            self._engine_and_placer = open_engine(self.bundle, "cpu"), Placer(self.bundle)
        engine, placer = self._engine_and_placer
        table, overlay = self.state.table, self.state.overlay()
        engine.set_overlay(overlay)
        try:
            body = placer.completed(operation.id, operation.body, table)
            (candidates,) = placer.place([body], table, overlay, engine.parents, [operation.id])
            if isinstance(candidates, EspalierError):
                raise candidates
            return Slots(self.state).place(operation.id, candidates)
        except EspalierError as error:
            log.info("%r: %s", operation.id, error)
            return ()
