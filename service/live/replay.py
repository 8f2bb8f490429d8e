"""Applies operations of the journal to a version, with their places.

Places are stored by version. An operation without one was committed when no worker served this version: it is placed now, in the order of
the journal, and its places are stored. The journal is locked only to store them. Of workers that place an operation at once the first to
store its places decides, so all have the same. Knows operations and versions. Does not know when a version is opened.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from espalier.errors import InvalidData, JournalBusy, JournalError
from espalier.live.journal import Journal
from espalier.live.operations import Operation
from espalier.live.rows import Placement

from ..live.live_version import LiveVersion
from ..live.placing import named_by

log = logging.getLogger(__name__)

PAGE = 2000
"""Operations that are read at a time."""
BLOCK = 16
"""Most operations that are placed together."""

Placements = tuple[Placement, ...]
Stored = Mapping[int, Placements]
"""Places in one version, by sequence."""
Store = Callable[[int, Stored], Stored]
"""Stores places in a version, unless another process did before; returns those that hold. Raises JournalError."""


def replay(version: LiveVersion, journal: Journal, until: int | None = None, store: Store | None = None) -> None:
    """Apply the last operation of each item that a version lacks, up to an operation, and show them. Raises JournalError.

    store  None: in transactions of this thread
    """
    if version.refused is not None or (until is not None and version.applied >= until):
        return
    end = journal.last_sequence() if until is None else until
    with _without_collections():
        while version.applied < end:
            operations = [operation for operation in journal.current(version.applied, PAGE) if operation.sequence <= end]
            stored = journal.placements(version.version, [operation.sequence for operation in operations])
            apply_all(version, operations, stored, store or journal.store_placements)
            if not operations:
                version.skip_to(end)  # what is left was replaced by later operations
    version.publish()


@contextmanager
def _without_collections() -> Iterator[None]:
    """No garbage is collected meanwhile: a replay makes many objects that stay, and to visit them again and again takes a third of it."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def apply_all(version: LiveVersion, operations: Sequence[Operation], stored: Stored, store: Store) -> None:
    """Apply operations to a version, in their order. stored: the places that are known.

    Raises JournalBusy where new places cannot be stored now: another process may store other ones, so the version waits for these. Where
    nobody can store any, because the disk is full or must not be written to, they are used all the same.
    """
    begin = 0
    while begin < len(operations):
        end = begin
        while end < len(operations) and (operations[end].sequence in stored or operations[end].kind == "delete"):
            end += 1
        version.apply(operations[begin:end], stored)
        block = _independent(operations[end : end + BLOCK])
        lacking = [one for one in block if one.sequence > version.applied and one.sequence not in stored and version.lacks_places(one)]
        places = version.places(lacking) if lacking else {}
        if places:
            try:
                places = dict(store(version.version, places))
            except JournalBusy:
                raise
            except (JournalError, InvalidData) as error:  # InvalidData: a row is too large
                log.warning("%s version %d: places are not stored: %s", version.bundle.manifest.name, version.version, error)
        version.apply(block, {**stored, **places})
        begin = end + len(block)


def _independent(operations: Sequence[Operation]) -> Sequence[Operation]:
    """The first operations, up to one of an item before it, or that such an item places: it must be applied first."""
    ids: set[str] = set()
    for count, operation in enumerate(operations):
        if operation.id in ids or not ids.isdisjoint(named_by(operation.body)):
            return operations[:count]
        ids.add(operation.id)
    return operations
