"""Applies operations of the journal to a version, with their places.

Places are stored by version. An operation without one was committed when no worker served this version: it is placed now, in the order of
the journal and under its lock, and its places are stored, so that all workers have the same. Knows operations and versions. Does not know
when a version is opened.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

from espalier.errors import JournalError
from espalier.live.journal import Journal, Transaction
from espalier.live.operations import Operation
from espalier.live.rows import Placement
from service.live.live_version import LiveVersion

log = logging.getLogger(__name__)

PAGE = 2000
"""Operations that are read at a time."""
BLOCK = 16
"""Operations that are placed while the journal is locked."""

Placements = tuple[Placement, ...]
Stored = Mapping[int, Placements]
"""Places in one version, by sequence."""
Writing = Callable[[], AbstractContextManager[Transaction]]


def replay(version: LiveVersion, journal: Journal, until: int | None = None) -> None:
    """Apply the last operation of each item that a version lacks, up to an operation, and show them. Raises JournalError."""
    if version.refused is not None or (until is not None and version.applied >= until):
        return
    end = journal.last_sequence() if until is None else until
    with _without_collections():
        while version.applied < end:
            operations = [operation for operation in journal.current(version.applied, PAGE) if operation.sequence <= end]
            stored = journal.placements(version.version, [operation.sequence for operation in operations])
            apply_all(version, operations, stored, journal.writing)
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


def apply_all(version: LiveVersion, operations: Sequence[Operation], stored: Stored, writing: Writing) -> None:
    """Apply operations to a version, in their order.

    writing  opens a transaction, in which places are stored. Where that fails they are used all the same: others find the same ones
    """
    begin = 0
    while begin < len(operations):
        end = begin
        while end < len(operations) and (operations[end].sequence in stored or operations[end].kind == "delete"):
            end += 1
        version.apply(operations[begin:end], stored)
        block = operations[end : end + BLOCK]
        if any(operation.sequence > version.applied and version.lacks_places(operation) for operation in block):
            try:
                with writing() as transaction:
                    _apply_block(version, block, stored, transaction)
            except JournalError as error:
                log.warning("%s version %d: places are not stored: %s", version.bundle.manifest.name, version.version, error)
        _apply_block(version, block, stored, None)  # those that were applied change nothing
        begin = end + len(block)


def _apply_block(version: LiveVersion, block: Sequence[Operation], stored: Stored, transaction: Transaction | None) -> None:
    if transaction is not None:  # another worker may have been faster
        stored = transaction.placements(version.version, [operation.sequence for operation in block])
    for operation in block:
        if operation.sequence <= version.applied:
            continue
        placements = stored.get(operation.sequence, ())
        if not placements and version.lacks_places(operation):
            placements = version.place(operation)
            if placements and transaction is not None:
                transaction.store_placements(version.version, {operation.sequence: placements})
        version.apply([operation], {operation.sequence: placements})
