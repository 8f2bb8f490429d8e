"""Applies operations of the journal to a version, with their placements.

Placements are stored by version. An operation without one was committed when no worker served this version: it is placed now, in the order
of the journal, and its placements are stored. The journal is locked only to store them. If several workers place an operation, those of the
first to store them hold, so all have the same. Knows operations and versions. Does not know when a version is opened.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from espalier.errors import InvalidData, JournalBusy, JournalError
from espalier.live.journal import Journal
from espalier.live.operations import Operation

from ..live.live_version import LiveVersion, Placements
from ..live.placing import named_by

log = logging.getLogger(__name__)

PAGE = 2000
"""Operations that are read at a time."""
BLOCK = 16
"""Most operations that are placed together."""

Stored = Mapping[int, Placements]
"""Placements in one version, by sequence."""
Store = Callable[[int, Stored], Stored]
"""Stores placements in the version of a fingerprint. Returns the stored ones: those of an earlier process hold. Raises JournalError."""


def replay(version: LiveVersion, journal: Journal, until: int | None = None, store: Store | None = None) -> None:
    """Apply the last operation of each item that a version lacks, up to an operation, and publish them.

    Raises JournalError and ShardsMissing.

    store  None: in transactions of this thread
    """
    if version.refused is not None:
        return
    if not version.knows_expiries and journal.last_sequence() >= version.through:  # a host that follows may have less
        _read_expiries(version, journal)
    if until is not None and version.applied >= until:
        return
    end = journal.last_sequence() if until is None else until
    with _without_collections():
        while version.applied < end:
            operations = [operation for operation in journal.current(version.applied, PAGE) if operation.sequence <= end]
            stored = journal.placements(version.fingerprint, [operation.sequence for operation in operations])
            apply_all(version, operations, stored, store or journal.store_placements)
            if not operations:
                version.skip_to(end)  # the rest was replaced by later operations
    version.publish()


def _read_expiries(version: LiveVersion, journal: Journal) -> None:
    """Read when items expire that a version holds, and publish that."""
    after = 0
    while operations := journal.expiring(after, version.through, PAGE):
        version.expire_held(operations)
        after = operations[-1].sequence
    version.knows_expiries = True
    version.publish()


@contextmanager
def _without_collections() -> Iterator[None]:
    """Disable garbage collection: a replay makes many objects that stay, and visiting them again and again takes a third of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def apply_all(version: LiveVersion, operations: Sequence[Operation], stored: Stored, store: Store) -> None:
    """Apply operations to a version, in their order. stored: the stored placements.

    Raises JournalBusy if new placements cannot be stored now: another process may store other ones, so the version must wait for these. If
    no process can store any, because the disk is full or read-only, the new ones are used all the same. Raises ShardsMissing if shards do
    not say now where items go. In both cases the operations before are applied.
    """
    begin = 0
    while begin < len(operations):
        end = begin
        while end < len(operations) and (operations[end].sequence in stored or operations[end].kind == "delete"):
            end += 1
        version.apply(operations[begin:end], stored)
        block = _independent(operations[end : end + BLOCK])
        new = (operation for operation in block if operation.sequence > version.applied and operation.sequence not in stored)
        unplaced = [operation for operation in new if version.needs_placements(operation)]
        placements = version.new_placements(unplaced) if unplaced else {}
        if placements:
            try:
                placements = dict(store(version.fingerprint, placements))
            except JournalBusy:
                raise
            except (JournalError, InvalidData) as error:  # InvalidData: a row is too large
                log.warning("%s version %d: placements are not stored: %s", version.bundle.manifest.name, version.version, error)
        version.apply(block, {**stored, **placements})
        begin = end + len(block)


def _independent(operations: Sequence[Operation]) -> Sequence[Operation]:
    """The first operations, up to one of an item before it, or whose evidence names one: that item must be applied first."""
    ids: set[str] = set()
    for count, operation in enumerate(operations):
        if operation.id in ids or not ids.isdisjoint(named_by(operation.body)):
            return operations[:count]
        ids.add(operation.id)
    return operations
